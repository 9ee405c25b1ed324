"""Wordle as tokens: the rules, many games at once, and one game as a Gymnasium environment.

A game is a sequence of tokens: `<a>`, then for each guess its letters, `</a>`, five colours and `</s>`, and `</eod>`
when it is over. An agent writes the letters and `</a>`. Each guess but the right one costs 1, and there are six.
The rules are those of the public code of ILQL (Snell et al. 2023), which any five letters satisfy.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from isqn.language.words import find_words
from isqn.language.types import TextSpec
from isqn.types import UserError

Array = NDArray[Any]

ENV_ID = "isqn/Wordle-v0"
LETTERS, TRIES = 5, 6
NAMES = [*"abcdefghijklmnopqrstuvwxyz", "<g>", "<b>", "<y>", "<|pad|>", "</a>", "</s>", "<s>", "<a>", "</eod>"]
GREEN, BLACK, YELLOW, PAD, END_ACTION, END_STATE, _, BEGIN, END_GAME = range(26, 35)
NUM_TOKENS = len(NAMES)
ACTION_TOKENS = LETTERS + 1  # of a guess: its letters and the end
LENGTH = TRIES * (2 * LETTERS + 2) + 2  # of the longest game
COLOURS = "gby"  # as their tokens are counted
SOLVED = 0  # the code of a row that is all green
SPEC = TextSpec(
    ENV_ID,
    "simplified-colours-v1",
    (LENGTH,),
    "int32",
    NUM_TOKENS,
    pad=PAD,
    action_tokens=ACTION_TOKENS,
    answer_tokens=LETTERS + 1,
    max_actions=TRIES,
)


def spec_of(*, official: bool = False) -> TextSpec:
    return replace(SPEC, protocol="official-colours-v1") if official else SPEC


def encode(words: list[str]) -> Array:
    """Letters as tokens, (words, 5)."""
    return np.array([[ord(letter) - ord("a") for letter in word] for word in words], np.int32).reshape(-1, LETTERS)


def require_word(word: str) -> str:
    if not re.fullmatch("[a-z]{5}", word):
        raise UserError(f"The word {word!r} cannot be looked for; give five letters from a to z.")
    return word


def decode(tokens: Array) -> str:
    return "".join(NAMES[token] for token in tokens)


def colours(guesses: Array, words: Array, *, official: bool = False) -> Array:
    """GREEN, YELLOW or BLACK for each letter, over leading axes that fit together.

    A letter that is elsewhere in the word is yellow; by the official rule only as often as the word still has it.
    """
    guesses, words = np.broadcast_arrays(guesses, words)
    green = guesses == words
    same = guesses[..., :, None] == words[..., None, :]
    if official:
        left = (same & ~green[..., None, :]).sum(-1)  # of this letter, in places that are not green
        alike = guesses[..., :, None] == guesses[..., None, :]
        earlier = (alike & ~green[..., None, :] & np.tri(LETTERS, k=-1, dtype=bool)).sum(-1)
        elsewhere = earlier < left
    else:
        elsewhere = same.any(-1)
    return np.where(green, GREEN, np.where(elsewhere, YELLOW, BLACK)).astype(np.int32)


def initials(row: Array) -> str:
    """Colours as letters of g, b and y."""
    return "".join(COLOURS[colour - GREEN] for colour in row)


def codes(rows: Array) -> Array:
    """Each row of colours as one number, in base 3; `SOLVED` is all green."""
    return (rows - GREEN) @ (3 ** np.arange(LETTERS))


def table(guesses: Array, words: Array, *, official: bool = False) -> Array:
    """The code of every guess for every word, (guesses, words)."""
    rows = [codes(colours(guess, words, official=official)) for guess in guesses]
    return np.array(rows, np.int16).reshape(len(guesses), len(words))


class Games:
    """Many games at once, each with a word of its own; agents write one token at a time."""

    def __init__(self, words: Array, *, official: bool = False) -> None:
        self.words, self.official = words, official
        count = len(words)
        self.tokens = np.full((count, LENGTH), PAD, np.int32)
        self.tokens[:, 0] = BEGIN
        self.lengths = np.ones(count, int)
        self.guess_start = np.ones(count, int)  # where the guess begins that is being written
        self.tries = np.zeros(count, int)
        self.solved = np.zeros(count, bool)

    @property
    def over(self) -> Array:
        return self.solved | (self.tries == TRIES)

    @property
    def returns(self) -> Array:
        """So far."""
        return -(self.tries - self.solved)

    def step(self, tokens: Array, playing: Array | bool = True) -> Array:
        """Write a token in each game, or in some, that is not over. The rewards."""
        going = np.flatnonzero(~self.over & playing)
        self._append(going, tokens[going, None])
        written = self.lengths - self.guess_start
        last = self.tokens[np.arange(len(self.tokens)), self.lengths - 1]
        unended = going[(last[going] != END_ACTION) & (written[going] == ACTION_TOKENS)]
        self._append(unended, np.full((len(unended), 1), END_ACTION))
        guessed = np.union1d(going[last[going] == END_ACTION], unended)
        return self._answer(guessed)

    def _answer(self, rows: Array) -> Array:
        """To guesses that are written: colours, unless it is none of five letters, and the end of the game."""
        guesses = self.tokens[rows[:, None], self.guess_start[rows, None] + np.arange(LETTERS)]
        whole = (self.lengths[rows] - self.guess_start[rows] == ACTION_TOKENS) & (guesses < 26).all(axis=1)
        rows_of_colours = colours(guesses, self.words[rows], official=self.official)
        told = np.concatenate([rows_of_colours, np.full((len(rows), 1), END_STATE)], axis=1)
        self._append(rows[whole], told[whole])
        self.tries[rows] += 1
        self.solved[rows] = whole & (rows_of_colours == GREEN).all(axis=1)
        self.guess_start[rows] = self.lengths[rows]
        ended = rows[self.over[rows]]
        self._append(ended, np.full((len(ended), 1), END_GAME))
        rewards = np.zeros(len(self.tokens), np.float32)
        rewards[rows] = np.where(self.solved[rows], 0.0, -1.0)
        return rewards

    def _append(self, rows: Array, tokens: Array) -> None:
        places = self.lengths[rows, None] + np.arange(tokens.shape[1])
        self.tokens[rows[:, None], places] = tokens
        self.lengths[rows] += tokens.shape[1]


def guesses_of(tokens: Array) -> list[tuple[str, str | None]]:
    """What was guessed in a game, and its colours as letters of g, b and y; none if it was no word.

    An agent may write any token, those of the game's answers too: only five letters are answered.
    """
    found: list[tuple[str, str | None]] = []
    place = 1
    for end in np.flatnonzero(tokens == END_ACTION).tolist():
        guess = tokens[place:end]
        place = end + 1
        told = None
        if len(guess) == LETTERS and (guess < 26).all():
            told = initials(tokens[place : place + LETTERS])
            place += LETTERS + 1
        found.append((decode(guess), told))
    return found


class WordleEnvironment(gym.Env):
    """One game, a token at a time: what is seen is all of its tokens so far."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - gymnasium's convention

    def __init__(
        self,
        word_list: str = "common",
        num_words: int = 0,
        word_seed: int = 0,
        official_colours: bool = False,
        render_mode: str | None = None,
    ):
        self.words = find_words(word_list, num_words, word_seed)
        self.official = official_colours
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(0, NUM_TOKENS - 1, (LENGTH,), np.int32)
        self.action_space = gym.spaces.Discrete(NUM_TOKENS)
        self.games = Games(encode(self.words[:1]), official=official_colours)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """With `options={"word": "crane"}` that word is to be found."""
        super().reset(seed=seed)
        drawn = self.words[self.np_random.integers(len(self.words))]
        word = require_word((options or {}).get("word", drawn))
        self.games = Games(encode([word]), official=self.official)
        return self.games.tokens[0].copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise UserError(f"The action {action!r} is no token; it must be a whole number from 0 to {NUM_TOKENS - 1}.")
        reward = self.games.step(np.array([action]))
        over = bool(self.games.over[0])
        info = {"word": decode(self.games.words[0]), "solved": bool(self.games.solved[0])} if over else {}
        return self.games.tokens[0].copy(), float(reward[0]), over, False, info

    def render(self) -> Any:
        return board(guesses_of(self.games.tokens[0])) if self.render_mode == "ansi" else None


ESCAPES = {"g": "\x1b[30;42m", "y": "\x1b[30;43m", "b": "\x1b[37;100m"}
EMOJI = {"g": "🟩", "y": "🟨", "b": "⬛"}


def row(guess: str, told: str | None, *, colour: bool = True) -> str:
    """A guess as a terminal shows it, or as a text that can be kept."""
    if told is None:
        return f"{guess or 'nothing'} is no guess of five letters"
    if not colour:
        return f"{guess} {''.join(EMOJI[c] for c in told)}"
    return "".join(f"{ESCAPES[c]} {letter.upper()} \x1b[0m" for letter, c in zip(guess, told, strict=True))


def board(guesses: list[tuple[str, str | None]], *, colour: bool = True) -> str:
    return "\n".join(row(guess, told, colour=colour) for guess, told in guesses)
