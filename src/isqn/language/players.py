"""Players of Wordle that follow a rule: what `isqn eval` compares an agent with, and what datasets are made of.

A player sees which words of the list are still possible in each game, (games, words), and what was guessed in it,
(games, turns), and names a word for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isqn.language.game import SOLVED, TRIES

Array = NDArray[Any]
Player = Callable[[Array, Array, np.random.Generator], Array]


def at_random(possible: Array, guessed: Array, rng: np.random.Generator) -> Array:
    """Any word of the list."""
    return rng.integers(possible.shape[1], size=len(possible))


def consistent(possible: Array, guessed: Array, rng: np.random.Generator) -> Array:
    """Any word that is still possible."""
    return np.argmax(possible * (1 - rng.random(possible.shape)), axis=1)


def repeating(possible: Array, guessed: Array, rng: np.random.Generator) -> Array:
    """What was guessed first, again and again; at first any word."""
    return guessed[:, 0] if guessed.shape[1] else at_random(possible, guessed, rng)


def mixture(share: float, often: Player, else_: Player) -> Player:
    """One player in this share of all guesses, and another one in the rest."""

    def play(possible: Array, guessed: Array, rng: np.random.Generator) -> Array:
        chosen = rng.random(len(possible)) < share
        return np.where(chosen, often(possible, guessed, rng), else_(possible, guessed, rng))

    return play


def informed(patterns: Array) -> Player:
    """The possible word whose colours tell most on average; ties are drawn."""
    best: dict[bytes, Array] = {}

    def of(possible: Array) -> Array:
        words = np.flatnonzero(possible)
        among = patterns[np.ix_(words, words)].astype(int)
        told = np.zeros(len(words))
        for guess, row in enumerate(among):
            sizes = np.bincount(row)
            sizes = sizes[sizes > 0]
            told[guess] = -(sizes * np.log(sizes)).sum()
        return words[np.isclose(told, told.max())]

    def play(possible: Array, guessed: Array, rng: np.random.Generator) -> Array:
        keys = [row.tobytes() for row in np.packbits(possible, axis=1)]
        for key, row in zip(keys, possible, strict=True):
            if key not in best:
                best[key] = of(row)
        return np.array([rng.choice(best[key]) for key in keys])

    return play


class Trajectories(NamedTuple):
    """Games as words of a list."""

    hidden: Array  # (games,)
    guesses: Array  # (games, 6), -1 behind the last

    @property
    def returns(self) -> Array:
        return -((self.guesses >= 0) & (self.guesses != self.hidden[:, None])).sum(axis=1)


def play(player: Player, patterns: Array, hidden: Array, rng: np.random.Generator) -> Trajectories:
    """Games for hidden words of a list with a table of colours."""
    count = len(hidden)
    possible = np.ones((count, patterns.shape[1]), bool)
    guesses = np.full((count, TRIES), -1)
    going = np.arange(count)
    for turn in range(TRIES):
        chosen = player(possible[going], guesses[going, :turn], rng)
        guesses[going, turn] = chosen
        told = patterns[chosen, hidden[going]]
        possible[going] &= patterns[chosen] == told[:, None]
        going = going[told != SOLVED]
        if not len(going):
            break
    return Trajectories(hidden, guesses)
