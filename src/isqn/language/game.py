"""Wordle as tokens: the rules, batches of games, and one game as a Gymnasium environment.

A game is a sequence of tokens: `<a>`, then for each guess its letters, `</a>`, five colours and `</s>`, and `</eod>` at
the end. The agent writes the letters and `</a>`. There are six guesses, and each wrong one has reward -1. As in the
public code of ILQL (Snell et al. 2023), any five letters are a valid guess.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from isqn.language.types import TextSpec
from isqn.language.words import load_words
from isqn.types import UserError

Array = NDArray[Any]
Guess = tuple[str, str | None]  # the letters, and their colours as letters of g, b and y; None if it was invalid

ENV_ID = "isqn/Wordle-v0"
LETTERS, MAX_GUESSES = 5, 6
TOKEN_NAMES = [*"abcdefghijklmnopqrstuvwxyz", "<g>", "<b>", "<y>", "<|pad|>", "</a>", "</s>", "<s>", "<a>", "</eod>"]
GREEN, BLACK, YELLOW, PAD, END_ACTION, END_STATE, _, BEGIN, END_GAME = range(26, 35)
NUM_TOKENS = len(TOKEN_NAMES)
ACTION_TOKENS = LETTERS + 1  # tokens of a guess: its letters and `</a>`
LENGTH = MAX_GUESSES * (2 * LETTERS + 2) + 2  # tokens of the longest game
COLOURS = "gby"  # in the order of their tokens
SOLVED = 0  # colour code of a row that is all green
SPEC = TextSpec(
    ENV_ID,
    "simplified-colours-v1",
    (LENGTH,),
    "int32",
    NUM_TOKENS,
    pad=PAD,
    action_tokens=ACTION_TOKENS,
    answer_tokens=LETTERS + 1,
    max_actions=MAX_GUESSES,
)


def make_spec(*, official: bool = False) -> TextSpec:
    """Return the specification of the game, by the simplified or the official rule of colours."""
    return replace(SPEC, protocol="official-colours-v1") if official else SPEC


# -- words and colours


def encode(words: list[str]) -> Array:
    """Return the letters of words as tokens, (words, 5)."""
    return np.array([[ord(letter) - ord("a") for letter in word] for word in words], np.int32).reshape(-1, LETTERS)


def decode(tokens: Array) -> str:
    return "".join(TOKEN_NAMES[token] for token in tokens)


def require_word(word: str) -> str:
    """Return the word; refuse all but five letters."""
    if not re.fullmatch("[a-z]{5}", word):
        raise UserError(f"The word {word!r} is not possible in Wordle; give five letters from a to z.")
    return word


def colours(guesses: Array, words: Array, *, official: bool = False) -> Array:
    """Return GREEN, YELLOW or BLACK for each letter, over leading axes that broadcast.

    A letter that is elsewhere in the word is yellow; by the official rule only as often as the word has it left.
    """
    guesses, words = np.broadcast_arrays(guesses, words)
    is_green = guesses == words
    matches = guesses[..., :, None] == words[..., None, :]
    if official:
        left = (matches & ~is_green[..., None, :]).sum(-1)  # the same letter in places of the word that are not green
        repeats = guesses[..., :, None] == guesses[..., None, :]
        earlier = (repeats & ~is_green[..., None, :] & np.tri(LETTERS, k=-1, dtype=bool)).sum(-1)
        is_yellow = earlier < left
    else:
        is_yellow = matches.any(-1)
    return np.where(is_green, GREEN, np.where(is_yellow, YELLOW, BLACK)).astype(np.int32)


def colour_letters(row: Array) -> str:
    """Return the colours of a guess as letters of g, b and y."""
    return "".join(COLOURS[colour - GREEN] for colour in row)


def colour_codes(rows: Array) -> Array:
    """Return each row of colours as one number in base 3; `SOLVED` is all green."""
    return (rows - GREEN) @ (3 ** np.arange(LETTERS))


def colour_table(guesses: Array, words: Array, *, official: bool = False) -> Array:
    """Return the colour code of every guess for every hidden word, (guesses, words)."""
    rows = [colour_codes(colours(guess, words, official=official)) for guess in guesses]
    return np.array(rows, np.int16).reshape(len(guesses), len(words))


# -- games


class Games:
    """Batch of games, each with its own hidden word, written one token at a time."""

    def __init__(self, words: Array, *, official: bool = False) -> None:
        self.words, self.official = words, official
        count = len(words)
        self.tokens = np.full((count, LENGTH), PAD, np.int32)
        self.tokens[:, 0] = BEGIN
        self.lengths = np.ones(count, int)
        self.guess_start = np.ones(count, int)  # position of the first token of the current guess
        self.num_guesses = np.zeros(count, int)
        self.solved = np.zeros(count, bool)

    @property
    def over(self) -> Array:
        return self.solved | (self.num_guesses == MAX_GUESSES)

    @property
    def returns(self) -> Array:
        """Sum of the rewards so far."""
        return -(self.num_guesses - self.solved)

    def step(self, tokens: Array, active: Array | bool = True) -> Array:
        """Write a token in each active game that is not over; return the rewards."""
        playing = np.flatnonzero(~self.over & active)
        self._append(playing, tokens[playing, None])
        num_written = self.lengths - self.guess_start
        last = self.tokens[np.arange(len(self.tokens)), self.lengths - 1]
        unended = playing[(last[playing] != END_ACTION) & (num_written[playing] == ACTION_TOKENS)]
        self._append(unended, np.full((len(unended), 1), END_ACTION))
        guessed = np.union1d(playing[last[playing] == END_ACTION], unended)
        return self._answer(guessed)

    def _answer(self, games: Array) -> Array:
        """Answer complete guesses: colours if they are five letters, and the end of the game if it is over."""
        guesses = self.tokens[games[:, None], self.guess_start[games, None] + np.arange(LETTERS)]
        is_valid = (self.lengths[games] - self.guess_start[games] == ACTION_TOKENS) & (guesses < 26).all(axis=1)
        rows = colours(guesses, self.words[games], official=self.official)
        answers = np.concatenate([rows, np.full((len(games), 1), END_STATE)], axis=1)
        self._append(games[is_valid], answers[is_valid])
        self.num_guesses[games] += 1
        self.solved[games] = is_valid & (rows == GREEN).all(axis=1)
        self.guess_start[games] = self.lengths[games]
        ended = games[self.over[games]]
        self._append(ended, np.full((len(ended), 1), END_GAME))
        rewards = np.zeros(len(self.tokens), np.float32)
        rewards[games] = np.where(self.solved[games], 0.0, -1.0)
        return rewards

    def _append(self, games: Array, tokens: Array) -> None:
        positions = self.lengths[games, None] + np.arange(tokens.shape[1])
        self.tokens[games[:, None], positions] = tokens
        self.lengths[games] += tokens.shape[1]


def parse_guesses(tokens: Array) -> list[Guess]:
    """Return the guesses of a game with their colours.

    An agent may write any token, also those of the game's answers. Only a guess of five letters has an answer.
    """
    guesses: list[Guess] = []
    position = 1
    for end in np.flatnonzero(tokens == END_ACTION).tolist():
        guess = tokens[position:end]
        position = end + 1
        row = None
        if len(guess) == LETTERS and (guess < 26).all():
            row = colour_letters(tokens[position : position + LETTERS])
            position += LETTERS + 1
        guesses.append((decode(guess), row))
    return guesses


class WordleEnvironment(gym.Env):
    """One game, a token at a time; the observation is all of its tokens so far."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - gymnasium's convention

    def __init__(
        self,
        word_list: str = "common",
        num_words: int = 0,
        word_seed: int = 0,
        official_colours: bool = False,
        render_mode: str | None = None,
    ):
        self.words = load_words(word_list, num_words, word_seed)
        self.official = official_colours
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(0, NUM_TOKENS - 1, (LENGTH,), np.int32)
        self.action_space = gym.spaces.Discrete(NUM_TOKENS)
        self.games = Games(encode(self.words[:1]), official=official_colours)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game; `options={"word": "crane"}` sets the hidden word."""
        super().reset(seed=seed)
        drawn = self.words[self.np_random.integers(len(self.words))]
        word = require_word((options or {}).get("word", drawn))
        self.games = Games(encode([word]), official=self.official)
        return self.games.tokens[0].copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            rule = f"must be a whole number from 0 to {NUM_TOKENS - 1}"
            raise UserError(f"The action {action!r} is not a token; it {rule}.")
        reward = self.games.step(np.array([action]))
        over = bool(self.games.over[0])
        info = {"word": decode(self.games.words[0]), "solved": bool(self.games.solved[0])} if over else {}
        return self.games.tokens[0].copy(), float(reward[0]), over, False, info

    def render(self) -> Any:
        return format_board(parse_guesses(self.games.tokens[0])) if self.render_mode == "ansi" else None


# -- boards in a terminal

ESCAPES = {"g": "\x1b[30;42m", "y": "\x1b[30;43m", "b": "\x1b[37;100m"}
EMOJI = {"g": "🟩", "y": "🟨", "b": "⬛"}


def format_guess(guess: str, row: str | None, *, colour: bool = True) -> str:
    """Return a guess on coloured squares of a terminal; without `colour`, with emoji squares."""
    if row is None:
        return f"{guess or '(empty)'}: not a word of five letters"
    if not colour:
        return f"{guess} {''.join(EMOJI[c] for c in row)}"
    return "".join(f"{ESCAPES[c]} {letter.upper()} \x1b[0m" for letter, c in zip(guess, row, strict=True))


def format_board(guesses: list[Guess], *, colour: bool = True) -> str:
    """Return the guesses of a game, one per line."""
    return "\n".join(format_guess(guess, row, colour=colour) for guess, row in guesses)
