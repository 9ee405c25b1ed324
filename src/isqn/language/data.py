"""Wordle games to learn from: recorded colours with words that fit them, or games of scripted players.

The public data of ILQL (Snell et al. 2023) are tweets, which show only the colours. A game is made from a tweet by
drawing a hidden word, and for each row a word with those colours. Where the tweets are not available, people are
simulated and their games written as tweets, which are then used in the same way.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isqn.data.files import replace_text
from isqn.data.text import DamagedText, read_json
from isqn.keys import host_generator
from isqn.language.game import (
    ACTION_TOKENS,
    COLOURS,
    EMOJI,
    END_ACTION,
    LETTERS,
    MAX_GUESSES,
    SOLVED,
    Games,
    colour_table,
    encode,
    make_spec,
)
from isqn.language.players import Trajectories, make_informed, mix_players, play_games, repeat_first
from isqn.language.types import TextSpec, Tokens
from isqn.language.words import DAYS, FIRST_DAY, is_installed, load_words, read_word_counts, split_words
from isqn.types import UserError

Array = NDArray[Any]

NUM_CODES = 3**LETTERS
SQUARES = {"🟩": "g", "🟧": "g", "🟨": "y", "🟦": "y", "⬛": "b", "⬜": "b"}  # the second of each for high contrast
COLUMNS = ("wordle_id", "tweet_id", "tweet_date", "tweet_username", "tweet_text")


# -- recorded colours


class Grids(NamedTuple):
    """Colours of the games of a file."""

    rows: Array  # (games, 6): colour code of each row, -1 after the last row
    skipped: Counter[str]  # games that cannot be used, counted by reason
    numbers: Array  # (games,): number of each game in the file, counted from 0

    def summary(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.most_common())
        return f"{len(self.rows):,} game{'s' * (len(self.rows) != 1)}" + (f"; skipped: {reasons}" if reasons else "")


def encode_row(row: str) -> int:
    """Return the colour code of five letters of g, y and b."""
    return sum(COLOURS.index(colour) * 3**place for place, colour in enumerate(row))


def decode_row(code: int) -> str:
    """Return a colour code as letters of g, y and b."""
    return "".join(COLOURS[code // 3**place % 3] for place in range(LETTERS))


def find_grid(text: str) -> list[str]:
    """Return the first longest run of lines of exactly five squares, at most six lines."""
    best: list[str] = []
    run: list[str] = []
    for line in (*text.replace("\ufe0f", "").splitlines(), ""):
        squares = [SQUARES.get(character) for character in line.strip()]
        if len(squares) == LETTERS and None not in squares:
            run.append("".join(map(str, squares)))
        else:
            best, run = max(best, run[:MAX_GUESSES], key=len), []
    return best


def read_tweets(path: Path) -> Grids:
    """Read a CSV file of tweets; count those without a usable game."""
    grids, skipped = list[tuple[int, list[str]]](), Counter[str]()
    try:
        # a tweet that is not valid text must not spoil the others
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            for number, record in enumerate(csv.reader(file)):
                if record[:1] == [COLUMNS[0]]:
                    continue
                if len(record) != len(COLUMNS) or not (record[0].isdecimal() and len(record[0]) < 10):
                    skipped["with other columns"] += 1
                    continue
                grid = find_grid(record[4])
                if not 0 <= int(record[0]) - FIRST_DAY < len(DAYS):
                    skipped["of a day whose word is not known"] += 1
                elif not grid:
                    skipped["without a grid"] += 1
                else:
                    grids.append((number, grid))
    except OSError as error:
        raise UserError(f"--data-path {path} cannot be read as tweets ({error.strerror}).") from None
    except csv.Error as error:
        raise UserError(f"--data-path {path} cannot be read as tweets ({error}).") from None
    expected = f"the columns must be {', '.join(COLUMNS)}, with a grid of squares in the last"
    return _make_grids(path, grids, skipped, expected)


def read_ilql_json(path: Path) -> Grids:
    """Read the JSON file that ILQL publishes.

    Its `games` hold a word and the colours of the rows, such as <b><y><g><b><b>. The word and the `transitions` of the
    file are not used: hidden words and guesses are drawn here.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise UserError(f"--data-path {path} cannot be read as games ({error.strerror}).") from None
    except DamagedText as error:
        raise UserError(f"--data-path cannot be read as games: {error}") from None
    games = content.get("games") if isinstance(content, dict) else None
    if not isinstance(games, list):
        raise UserError(f"--data-path {path} cannot be read as games: there must be `games`, a list, in it.")
    grids = [(number, grid) for number, game in enumerate(games) if (grid := _parse_game(game))]
    skipped = Counter({"without a grid": len(games) - len(grids)})
    return _make_grids(path, grids, skipped, "games have one to six rows of five colours")


def _make_grids(path: Path, grids: list[tuple[int, list[str]]], skipped: Counter[str], expected: str) -> Grids:
    """Keep the games in which a green row comes last, if there is one."""
    good = [(number, grid) for number, grid in grids if "ggggg" not in grid[:-1]]
    skipped["with rows after the word"] += len(grids) - len(good)
    if not good:
        raise UserError(f"--data-path {path} holds no game of Wordle: {expected}.")
    rows = np.full((len(good), MAX_GUESSES), -1, np.int16)
    for padded, (_, grid) in zip(rows, good, strict=True):
        padded[: len(grid)] = [encode_row(row) for row in grid]
    return Grids(rows, +skipped, np.array([number for number, _ in good]))


def _parse_game(game: Any) -> list[str]:
    """Return the grid of a game of the JSON file; empty if it has none."""
    match game:
        case [_, [*rows]] if 1 <= len(rows) <= MAX_GUESSES and all(isinstance(row, str) for row in rows):
            grid = [row.replace("<", "").replace(">", "") for row in rows]
            return grid if all(len(row) == LETTERS and set(row) <= set(COLOURS) for row in grid) else []
    return []


# -- simulated people

OPENERS = split_words("""
raise arise adieu audio crane slate stare roast irate arose later house heart train great ocean media steam about store
""")


class People(NamedTuple):
    """Habits of simulated people; the defaults give a distribution of tries like that of early 2022."""

    opener_share: float = 0.6  # share of games that begin with a popular opener
    skill: tuple[float, float] = (9.0, 1.5)  # Beta distribution of the share of guesses that follow all clues
    careless_share: float = 0.3  # share of the other guesses that follow no clue; the rest follow the last row
    familiarity: float = 0.4  # the probability of a word is proportional to its frequency to this power


def simulate_people(
    count: int, seed: int, vocabulary: list[str], people: People, counts: Mapping[str, int] | None = None
) -> Array:
    """Return the colours of simulated games by the official rule, (games, 7): the day, then the code of each row.

    `counts` are the frequencies of words; without them all words are equally likely.
    """
    rng = np.random.default_rng(seed)
    vocabulary = list(dict.fromkeys([*vocabulary, *OPENERS, *DAYS]))
    words = encode(vocabulary)
    table = colour_table(words, words, official=True)
    answers = np.array([vocabulary.index(day) for day in DAYS])
    openers = np.array([vocabulary.index(word) for word in OPENERS])
    weights = np.array([(counts or {}).get(word, 1) for word in vocabulary]) ** people.familiarity
    days = rng.integers(len(DAYS), size=count)
    hidden = answers[days]
    skill = rng.beta(*people.skill, size=count)
    rows = np.full((count, MAX_GUESSES), -1, np.int16)
    for first in range(0, count, 256):  # limits the memory of the masks over words
        chunk = np.arange(first, min(count, first + 256))
        fits_all = np.ones((len(chunk), len(words)), bool)
        fits_last = fits_all.copy()
        playing = np.arange(len(chunk))
        for turn in range(MAX_GUESSES):
            games = chunk[playing]
            if turn:
                draw = rng.random((2, len(playing)))
                follows_all = draw[0] < skill[games]
                is_careless = ~follows_all & (draw[1] < people.careless_share)
                allowed = np.where(follows_all[:, None], fits_all[playing], fits_last[playing]) | is_careless[:, None]
                guess = _draw_words(allowed, weights, rng)
            else:
                has_opener = rng.random(len(playing)) < people.opener_share
                any_word = rng.choice(len(words), len(playing), p=weights / weights.sum())
                guess = np.where(has_opener, rng.choice(openers, len(playing)), any_word)
            codes = table[guess, hidden[games]]
            rows[games, turn] = codes
            fits_last[playing] = table[guess] == codes[:, None]
            fits_all[playing] &= fits_last[playing]
            playing = playing[codes != SOLVED]
    return np.concatenate([days[:, None], rows], axis=1)


def _draw_words(allowed: Array, weights: Array, rng: np.random.Generator) -> Array:
    """Draw one of the allowed words for each game, with probabilities proportional to the weights."""
    ends = np.cumsum(allowed * weights, axis=1)
    return np.argmax(ends > rng.random((len(ends), 1)) * ends[:, -1:], axis=1)


def write_tweets(path: Path, games: Array) -> None:
    """Write simulated games in the format of the published tweets."""
    lines = [",".join(COLUMNS)]
    for number, (day, *rows) in enumerate(games.tolist()):
        rows = [code for code in rows if code >= 0]
        tries = len(rows) if rows[-1] == SOLVED else "X"
        grid = "\n".join("".join(EMOJI[colour] for colour in decode_row(code)) for code in rows)
        when = date(2022, 1, 15) + timedelta(days=day)
        lines.append(f'{FIRST_DAY + day},{number},{when},player{number},"Wordle {FIRST_DAY + day} {tries}/6\n\n{grid}"')
    replace_text(path, "\n".join(lines) + "\n")


# -- words that fit the colours


class WordIndex:
    """Words by hidden word and colour code: those that show the code as a guess."""

    def __init__(self, words: Array, *, official: bool = False) -> None:
        self.words = words
        table = colour_table(words, words, official=official).T  # (hidden, guess)
        self.order = np.argsort(table, axis=1, kind="stable").astype(np.int32)  # for each hidden word, by code
        counts = np.zeros((len(words), NUM_CODES + 1), np.int32)
        np.add.at(counts, (np.arange(len(words))[:, None], table + 1), 1)
        self.starts = np.cumsum(counts, axis=1)  # where the words of each code begin in `order`

    def draw(self, grids: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Draw a hidden word for each grid, and a word for each row, -1 after the last; return whether all rows fit."""
        hidden = rng.integers(len(self.words), size=len(grids))
        is_row = grids >= 0
        codes = np.where(is_row, grids, 0)
        start, end = (self.starts[hidden[:, None], codes + extra] for extra in (0, 1))
        fits = ((end > start) | ~is_row).all(axis=1)
        place = start + (rng.random(grids.shape) * (end - start)).astype(int)
        guesses = self.order[hidden[:, None], np.minimum(place, len(self.words) - 1)]
        return hidden, np.where(is_row, guesses, -1), fits


def fill_in_words(grids: Array, index: WordIndex, count: int, rng: np.random.Generator) -> Trajectories:
    """Draw games: a grid and a hidden word at random, and again if a row has no word."""
    found, rounds = list[tuple[Array, Array]](), 0
    while (num_found := sum(len(hidden) for hidden, _ in found)) < count:
        rounds += 1
        if rounds > 1_000 and num_found < rounds:
            raise UserError(
                f"Hardly any game fits the {len(index.words)} words of the list; take more of them (--num-words), or "
                "another list (--word-list)."
            )
        drawn = grids[rng.integers(len(grids), size=8_192)]
        hidden, guesses, fits = index.draw(drawn, rng)
        found.append((hidden[fits], guesses[fits]))
    return Trajectories(*(np.concatenate(parts)[:count] for parts in zip(*found, strict=True)))


def to_tokens(games: Trajectories, words: Array, *, official: bool = False) -> Tokens:
    """Return games of words as tokens, with their rewards."""
    played = Games(words[games.hidden], official=official)
    num_guesses = (games.guesses >= 0).sum(axis=1)
    rewards = np.zeros((len(num_guesses), MAX_GUESSES * ACTION_TOKENS), np.float32)
    for turn in range(MAX_GUESSES):
        ends = np.full((len(num_guesses), 1), END_ACTION)
        letters = np.concatenate([words[games.guesses[:, turn]], ends], axis=1)
        for place, column in enumerate(letters.T):
            rewards[:, turn * ACTION_TOKENS + place] = played.step(column, num_guesses > turn)
    return Tokens(played.tokens, num_guesses.astype(np.int32), played.over, rewards)


# -- sources of games

HELD_OUT = 0.05  # share of the games of a file that does not say which are held out
SUBSTITUTE = "in place of the tweets that ILQL learned from"


@dataclass(frozen=True)
class Source:
    """Endless supply of games; each batch is a function of its random generator."""

    words: list[str]
    official: bool  # whether colours follow the official rule
    draw: Callable[[int, np.random.Generator, bool], Trajectories]  # number of games, generator, whether held out
    folder: str  # where the games are from, for messages
    about: str  # what the games are, as a sentence
    digest: str  # hash of everything that decides which games are drawn

    @property
    def spec(self) -> TextSpec:
        return make_spec(official=self.official)

    def sample(self, count: int, rng: np.random.Generator, *, held_out: bool = False) -> Tokens:
        """Draw games as tokens; held-out games are never learned from."""
        return to_tokens(self.draw(count, rng, held_out), encode(self.words), official=self.official)

    def describe(self) -> str:
        return f"{self.about}; {len(self.words)} words"

    def provenance(self) -> dict[str, Any]:
        """Return what a run's summary says of its games."""
        return {"games": self.about, "words": len(self.words), "sha256": self.digest}


def source_from_players(words: list[str], careless_share: float, *, official: bool = False) -> Source:
    """Return games of scripted players: a mixture of the most informative guess and of the first guess again."""
    letters = encode(words)
    table = colour_table(letters, letters, official=official)
    player = mix_players(careless_share, repeat_first, make_informed(table))

    def draw(count: int, rng: np.random.Generator, held_out: bool) -> Trajectories:
        hidden = rng.integers(len(words), size=count)
        return play_games(player, table, hidden, rng)

    about = f"games of scripted players, {careless_share:.0%} of whose guesses repeat their first word, {SUBSTITUTE}"
    return Source(words, official, draw, "players", about, _digest(words, official, careless_share))


def source_from_file(path: Path, words: list[str], *, official: bool = False, about: str = "") -> Source:
    """Return games with the colours of a file: tweets, or the JSON file that ILQL publishes."""
    grids = read_ilql_json(path) if path.suffix == ".json" else read_tweets(path)
    train, held_out = _split(path, grids.numbers)
    index = WordIndex(encode(words), official=official)

    def draw(count: int, rng: np.random.Generator, from_held_out: bool) -> Trajectories:
        return fill_in_words(grids.rows[held_out if from_held_out else train], index, count, rng)

    for part in (False, True):
        draw(1, host_generator(0, "fits"), part)  # refuse games that no words fit before a run begins
    digest = _digest(words, official, grids.rows.tolist(), train.tolist(), held_out.tolist())
    return Source(words, official, draw, str(path), about or f"{path.name}: {grids.summary()}", digest)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _split(path: Path, numbers: Array) -> tuple[Array, Array]:
    """Split games into those to learn from and those held out: by ILQL's files beside the JSON file, or at random."""
    names = [path.with_name(f"human_{part}_idxs.json") for part in ("train", "eval")]
    if path.suffix != ".json" or not all(name.is_file() for name in names):
        order = host_generator(0, "held-out", len(numbers)).permutation(len(numbers))
        last = len(numbers) - max(1, int(HELD_OUT * len(numbers)))
        return order[:last] if last else order, order[last:]
    parts = []
    for name in names:
        try:
            listed = np.array(read_json(name), np.int64)
        except (OSError, ValueError, TypeError, OverflowError):
            listed = np.array([], np.int64)
        part = np.flatnonzero(np.isin(numbers, listed))  # skipped games drop out
        if listed.ndim != 1 or not part.size:
            raise UserError(f"{name} must be a list of numbers of games of {path.name}, counted from 0.")
        parts.append(part)
    return parts[0], parts[1]


def source_from_people(count: int, words: list[str], *, official: bool = False) -> Source:
    """Return games of simulated people; their tweets are cached, because simulating takes a while."""
    people, vocabulary, counts = People(), load_words("answers" if is_installed() else "common"), read_word_counts()
    path = cache_folder() / f"wordle-people-{_digest(count, vocabulary, people, counts)[:16]}.csv"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent) as temporary:  # several runs may simulate at once
            write_tweets(Path(temporary) / path.name, simulate_people(count, 0, vocabulary, people, counts))
            os.replace(Path(temporary) / path.name, path)
    about = f"{count:,} simulated games of human-like players with {len(vocabulary):,} words, {SUBSTITUTE}"
    return source_from_file(path, words, official=official, about=about)


def cache_folder() -> Path:
    """Return the folder for what can be made again: $XDG_CACHE_HOME/isqn, or ~/.cache/isqn."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isqn"
