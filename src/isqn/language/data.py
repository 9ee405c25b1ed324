"""Games of Wordle to learn from: colours that people shared, and words that fit them; or games of players by rule.

The public data of ILQL (Snell et al. 2023) are tweets, of which only the colours are known. A game is made of one by
drawing a hidden word, and for each row a word with those colours. Where the tweets are not to be had, players are
simulated and written as tweets, which then go the same way.
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
from isqn.keys import host_generator
from isqn.language.game import COLOURS, EMOJI, END_ACTION, LETTERS, SOLVED, TRIES, Games, encode, spec_of, table
from isqn.language.players import Trajectories, informed, mixture, play, repeating
from isqn.language.words import DAYS, FIRST_DAY, find_words, is_installed, listed, word_counts
from isqn.types import TextSpec, Tokens, UserError

Array = NDArray[Any]

NUM_CODES = 3**LETTERS
SQUARES = {"🟩": "g", "🟧": "g", "🟨": "y", "🟦": "y", "⬛": "b", "⬜": "b"}  # the second of each for high contrast
COLUMNS = ("wordle_id", "tweet_id", "tweet_date", "tweet_username", "tweet_text")


class Grids(NamedTuple):
    """Colours of games, and what could not be used."""

    rows: Array  # (games, 6): the code of each row, -1 behind the last
    skipped: Counter[str]
    numbers: Array  # (games,): which of all that the file holds they are

    def summary(self) -> str:
        bad = ", ".join(f"{count:,} {why}" for why, count in self.skipped.most_common())
        return f"{len(self.rows):,} game{'s' * (len(self.rows) != 1)}" + (f"; skipped: {bad}" if bad else "")


def code_of(row: str) -> int:
    """Of five letters of g, y and b."""
    return sum(COLOURS.index(colour) * 3**place for place, colour in enumerate(row))


def letters_of(code: int) -> str:
    return "".join(COLOURS[code // 3**place % 3] for place in range(LETTERS))


def find_grid(text: str) -> list[str]:
    """The longest run of lines of exactly five squares, the first of those; at most six."""
    best: list[str] = []
    run: list[str] = []
    for line in (*text.replace("\ufe0f", "").splitlines(), ""):
        squares = [SQUARES.get(character) for character in line.strip()]
        if len(squares) == LETTERS and None not in squares:
            run.append("".join(map(str, squares)))
        else:
            best, run = max(best, run[:TRIES], key=len), []
    return best


def read_tweets(path: Path) -> Grids:
    """Of a file of comma-separated values with tweets; those that hold no game are counted."""
    found, skipped = list[tuple[int, list[str]]](), Counter[str]()
    try:
        # one tweet that is no text does not spoil the rest
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
                    found.append((number, grid))
    except OSError as error:
        raise UserError(f"--data-path {path} cannot be read as tweets ({error.strerror}).") from None
    except csv.Error as error:
        raise UserError(f"--data-path {path} cannot be read as tweets ({error}).") from None
    columns = f"{', '.join(COLUMNS)} belong there, with a grid of squares in the last"
    return _grids(path, found, skipped, columns)


def read_published(path: Path) -> Grids:
    """The file that ILQL publishes: `games`, each a word and the colours of its rows, such as <b><y><g><b><b>.

    Neither the word is read nor `transitions`: words are drawn, and what fits is worked out here.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"--data-path {path} cannot be read as games ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--data-path {path} cannot be read as games: it is no JSON ({error}).") from None
    games = found.get("games") if isinstance(found, dict) else None
    if not isinstance(games, list):
        raise UserError(f"--data-path {path} cannot be read as games: there must be `games`, a list, in it.")
    good = [(number, grid) for number, game in enumerate(games) if (grid := _published_grid(game))]
    skipped = Counter({"that are no grid": len(games) - len(good)})
    return _grids(path, good, skipped, "games have one to six rows of five colours")


def _grids(path: Path, found: list[tuple[int, list[str]]], skipped: Counter[str], expected: str) -> Grids:
    """Of those that end with the word, if they find it."""
    good = [(number, grid) for number, grid in found if "ggggg" not in grid[:-1]]
    skipped["with rows behind the word"] += len(found) - len(good)
    if not good:
        raise UserError(f"--data-path {path} holds no game of Wordle: {expected}.")
    rows = _padded([[code_of(row) for row in grid] for _, grid in good])
    return Grids(rows, +skipped, np.array([number for number, _ in good]))


def _published_grid(game: Any) -> list[str]:
    """Of a word and the colours of its rows; empty if it is none."""
    match game:
        case [_, [*rows]] if 1 <= len(rows) <= TRIES and all(isinstance(row, str) for row in rows):
            grid = [row.replace("<", "").replace(">", "") for row in rows]
            return grid if all(len(row) == LETTERS and set(row) <= set(COLOURS) for row in grid) else []
    return []


def _padded(rows: list[list[int]]) -> Array:
    padded = np.full((len(rows), TRIES), -1, np.int16)
    for game, row in zip(padded, rows, strict=True):
        game[: len(row)] = row
    return padded


# -- people, simulated

OPENERS = listed("""
raise arise adieu audio crane slate stare roast irate arose later house heart train great ocean media steam about store
""")


class People(NamedTuple):
    """How they play; the defaults give a spread of tries like that of early 2022."""

    opener_share: float = 0.6  # of games that begin with a popular word
    skill: tuple[float, float] = (9.0, 1.5)  # of a Beta distribution: how often all clues are followed
    careless_share: float = 0.3  # of slips in which no clue is followed; in the rest those of the last row
    familiarity: float = 0.4  # words come to mind as often as they are written, to this power


def simulate(
    count: int, seed: int, vocabulary: list[str], people: People, counts: Mapping[str, int] | None = None
) -> Array:
    """Colours of games by the official rule, (games, 7): the day's number, and the code of each row. Without the counts
    of words, all come to mind alike."""
    rng = np.random.default_rng(seed)
    vocabulary = list(dict.fromkeys([*vocabulary, *OPENERS, *DAYS]))
    words = encode(vocabulary)
    patterns = table(words, words, official=True)
    hidden_of = np.array([vocabulary.index(day) for day in DAYS])
    openers = np.array([vocabulary.index(word) for word in OPENERS])
    weights = np.array([(counts or {}).get(word, 1) for word in vocabulary]) ** people.familiarity
    days = rng.integers(len(DAYS), size=count)
    hidden = hidden_of[days]
    skill = rng.beta(*people.skill, size=count)
    rows = np.full((count, TRIES), -1, np.int16)
    for first in range(0, count, 256):  # a mask of words for each game is held for so many at a time
        here = np.arange(first, min(count, first + 256))
        possible = np.ones((len(here), len(words)), bool)
        last = possible.copy()
        going = np.arange(len(here))
        for turn in range(TRIES):
            games = here[going]
            if turn:
                draw = rng.random((2, len(going)))
                followed = draw[0] < skill[games]
                careless = ~followed & (draw[1] < people.careless_share)
                allowed = np.where(followed[:, None], possible[going], last[going]) | careless[:, None]
                guess = _drawn(allowed, weights, rng)
            else:
                popular = rng.random(len(going)) < people.opener_share
                anything = rng.choice(len(words), len(going), p=weights / weights.sum())
                guess = np.where(popular, rng.choice(openers, len(going)), anything)
            told = patterns[guess, hidden[games]]
            rows[games, turn] = told
            last[going] = patterns[guess] == told[:, None]
            possible[going] &= last[going]
            going = going[told != SOLVED]
    return np.concatenate([days[:, None], rows], axis=1)


def _drawn(allowed: Array, weights: Array, rng: np.random.Generator) -> Array:
    """One of the allowed words for each game, in proportion to the weights."""
    ends = np.cumsum(allowed * weights, axis=1)
    return np.argmax(ends > rng.random((len(ends), 1)) * ends[:, -1:], axis=1)


def write_tweets(path: Path, games: Array) -> None:
    """As the tweets are published."""
    lines = [",".join(COLUMNS)]
    for number, (day, *rows) in enumerate(games.tolist()):
        rows = [code for code in rows if code >= 0]
        tries = len(rows) if rows[-1] == SOLVED else "X"
        grid = "\n".join("".join(EMOJI[colour] for colour in letters_of(code)) for code in rows)
        when = date(2022, 1, 15) + timedelta(days=day)
        lines.append(f'{FIRST_DAY + day},{number},{when},player{number},"Wordle {FIRST_DAY + day} {tries}/6\n\n{grid}"')
    replace_text(path, "\n".join(lines) + "\n")


# -- words that fit the colours


class Fitting:
    """For each hidden word and code, the words that show it: all in one array, and where each lot begins."""

    def __init__(self, words: Array, *, official: bool = False) -> None:
        self.words = words
        patterns = table(words, words, official=official).T  # (hidden, guess)
        self.order = np.argsort(patterns, axis=1, kind="stable").astype(np.int32)
        counts = np.zeros((len(words), NUM_CODES + 1), np.int32)
        np.add.at(counts, (np.arange(len(words))[:, None], patterns + 1), 1)
        self.begins = np.cumsum(counts, axis=1)

    def draw(self, grids: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """For each grid a hidden word and a word for each row, -1 behind the last; and whether there are any."""
        hidden = rng.integers(len(self.words), size=len(grids))
        shown = grids >= 0
        codes_ = np.where(shown, grids, 0)
        begin, end = (self.begins[hidden[:, None], codes_ + extra] for extra in (0, 1))
        fits = ((end > begin) | ~shown).all(axis=1)
        place = begin + (rng.random(grids.shape) * (end - begin)).astype(int)
        words = self.order[hidden[:, None], np.minimum(place, len(self.words) - 1)]
        return hidden, np.where(shown, words, -1), fits


def retrofit(grids: Array, fitting: Fitting, count: int, rng: np.random.Generator) -> Trajectories:
    """So many games: a grid and a hidden word at random, and again if some row has no word."""
    found, tries = list[tuple[Array, Array]](), 0
    while (have := sum(len(hidden) for hidden, _ in found)) < count:
        tries += 1
        if tries > 1_000 and have < tries:
            raise UserError(
                f"Hardly any game fits the {len(fitting.words)} words of the list; take more of them (--num-words), or "
                "another list (--word-list)."
            )
        chosen = grids[rng.integers(len(grids), size=8_192)]
        hidden, guesses, fits = fitting.draw(chosen, rng)
        found.append((hidden[fits], guesses[fits]))
    return Trajectories(*(np.concatenate(parts)[:count] for parts in zip(*found, strict=True)))


def to_tokens(games: Trajectories, words: Array, *, official: bool = False) -> Tokens:
    played = Games(words[games.hidden], official=official)
    count = (games.guesses >= 0).sum(axis=1)
    rewards = np.zeros((len(count), TRIES * (LETTERS + 1)), np.float32)
    for turn in range(TRIES):
        letters = np.concatenate([words[games.guesses[:, turn]], np.full((len(count), 1), END_ACTION)], axis=1)
        for place, column in enumerate(letters.T):
            rewards[:, turn * (LETTERS + 1) + place] = played.step(column, count > turn)
    return Tokens(played.tokens, count.astype(np.int32), played.over, rewards)


# -- what is learned from

HELD_OUT = 0.05  # of the games of a file that says nothing about it
SUBSTITUTE = "in place of the tweets that ILQL learned from"


@dataclass(frozen=True)
class Source:
    """Games without end: each is made when it is asked for, by the numbers that it is given."""

    words: list[str]
    official: bool
    draw: Callable[[int, np.random.Generator, bool], Trajectories]  # how many, by what; whether nobody learns from them
    folder: str  # where they are from, in a word
    about: str
    digest: str  # of all that decides what is drawn

    @property
    def spec(self) -> TextSpec:
        return spec_of(official=self.official)

    def sample(self, count: int, rng: np.random.Generator, *, held_out: bool = False) -> Tokens:
        return to_tokens(self.draw(count, rng, held_out), encode(self.words), official=self.official)

    def describe(self) -> str:
        return f"{self.about}; {len(self.words)} words"

    def origin(self) -> dict[str, Any]:
        return {"games": self.about, "words": len(self.words), "sha256": self.digest}


def of_players(words: list[str], careless_share: float, *, official: bool = False) -> Source:
    """Of those who choose what tells most, and who, at so many of their guesses, repeat themselves."""
    letters = encode(words)
    patterns = table(letters, letters, official=official)
    player = mixture(careless_share, repeating, informed(patterns))

    def draw(count: int, rng: np.random.Generator, held_out: bool) -> Trajectories:
        hidden = rng.integers(len(words), size=count)
        return play(player, patterns, hidden, rng)

    about = f"games of players by rule, {careless_share:.0%} of their guesses careless, {SUBSTITUTE}"
    return Source(words, official, draw, "players", about, _digest(words, official, careless_share))


def of_file(path: Path, words: list[str], *, official: bool = False, about: str = "") -> Source:
    """Of the JSON file that ILQL publishes, or of tweets."""
    grids = read_published(path) if path.suffix == ".json" else read_tweets(path)
    learned, held_out = _split(path, grids.numbers)
    fitting = Fitting(encode(words), official=official)

    def draw(count: int, rng: np.random.Generator, of_held_out: bool) -> Trajectories:
        return retrofit(grids.rows[held_out if of_held_out else learned], fitting, count, rng)

    for part in (False, True):
        draw(1, host_generator(0, "fits"), part)  # what cannot be drawn from is refused before a run is made of it
    digest = _digest(words, official, grids.rows.tolist(), learned.tolist(), held_out.tolist())
    return Source(words, official, draw, str(path), about or f"{path.name}: {grids.summary()}", digest)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _split(path: Path, numbers: Array) -> tuple[Array, Array]:
    """Which games are learned from, and which are not: as two files beside the JSON file say, or by chance."""
    names = [path.with_name(f"human_{part}_idxs.json") for part in ("train", "eval")]
    if path.suffix != ".json" or not all(name.is_file() for name in names):
        order = host_generator(0, "held-out", len(numbers)).permutation(len(numbers))
        last = len(numbers) - max(1, int(HELD_OUT * len(numbers)))
        return order[:last] if last else order, order[last:]
    parts = []
    for name in names:
        try:
            wanted = np.array(json.loads(name.read_text()), np.int64)
        except (OSError, ValueError, TypeError, OverflowError):
            wanted = np.array([], np.int64)
        found = np.flatnonzero(np.isin(numbers, wanted))  # without those that were skipped
        if wanted.ndim != 1 or not found.size:
            raise UserError(f"{name} must be a list of numbers of games of {path.name}, counted from 0.")
        parts.append(found)
    return parts[0], parts[1]


def of_people(count: int, words: list[str], *, official: bool = False) -> Source:
    """Of people who are simulated; their tweets are kept, because it takes a while."""
    people, vocabulary, counts = People(), find_words("answers" if is_installed() else "common"), word_counts()
    path = cache_folder() / f"wordle-people-{_digest(count, vocabulary, people, counts)[:16]}.csv"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent) as own:  # several runs may begin at once
            write_tweets(Path(own) / path.name, simulate(count, 0, vocabulary, people, counts))
            os.replace(Path(own) / path.name, path)
    about = f"{count:,} games of people who know {len(vocabulary):,} words, simulated, {SUBSTITUTE}"
    return of_file(path, words, official=official, about=about)


def cache_folder() -> Path:
    """Where what can be made again is kept: $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isqn"
