"""Scripted Wordle players: baselines of `isqn eval`, and the source of simulated games.

A player is a function of the words of the list that are still possible in each game, (games, words), and of the earlier
guesses, (games, turns); it returns the next guess of each game, as an index into the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isqn.language.game import MAX_GUESSES, SOLVED

Array = NDArray[Any]
Player = Callable[[Array, Array, np.random.Generator], Array]


def guess_any(possible: Array, guesses: Array, rng: np.random.Generator) -> Array:
    """Guess any word of the list."""
    return rng.integers(possible.shape[1], size=len(possible))


def guess_consistent(possible: Array, guesses: Array, rng: np.random.Generator) -> Array:
    """Guess any word that agrees with all colours so far."""
    return np.argmax(possible * (1 - rng.random(possible.shape)), axis=1)


def repeat_first(possible: Array, guesses: Array, rng: np.random.Generator) -> Array:
    """Repeat the first guess, which is any word."""
    return guesses[:, 0] if guesses.shape[1] else guess_any(possible, guesses, rng)


def mix_players(share: float, player: Player, other: Player) -> Player:
    """Return a player whose guesses are those of `player` with probability `share`, else those of `other`."""

    def guess(possible: Array, guesses: Array, rng: np.random.Generator) -> Array:
        is_first = rng.random(len(possible)) < share
        return np.where(is_first, player(possible, guesses, rng), other(possible, guesses, rng))

    return guess


def make_informed(table: Array) -> Player:
    """Return a player that guesses the consistent word with the most information; ties are drawn.

    `table` is the colour code of every guess for every word. The information of a guess is the entropy of its colours
    over the words that are still possible.
    """
    best_words: dict[bytes, Array] = {}

    def find_best(possible: Array) -> Array:
        words = np.flatnonzero(possible)
        codes = table[np.ix_(words, words)].astype(int)
        information = np.zeros(len(words))
        for guess, row in enumerate(codes):
            sizes = np.bincount(row)
            sizes = sizes[sizes > 0]
            information[guess] = -(sizes * np.log(sizes)).sum()
        return words[np.isclose(information, information.max())]

    def guess(possible: Array, guesses: Array, rng: np.random.Generator) -> Array:
        keys = [row.tobytes() for row in np.packbits(possible, axis=1)]
        for key, row in zip(keys, possible, strict=True):
            if key not in best_words:
                best_words[key] = find_best(row)
        return np.array([rng.choice(best_words[key]) for key in keys])

    return guess


class Trajectories(NamedTuple):
    """Games as indices of words in a list."""

    hidden: Array  # (games,)
    guesses: Array  # (games, 6), -1 after the last guess

    @property
    def returns(self) -> Array:
        return -((self.guesses >= 0) & (self.guesses != self.hidden[:, None])).sum(axis=1)


def play_games(player: Player, table: Array, hidden: Array, rng: np.random.Generator) -> Trajectories:
    """Play a game for each hidden word, an index into a list with a table of colours."""
    count = len(hidden)
    possible = np.ones((count, table.shape[1]), bool)
    guesses = np.full((count, MAX_GUESSES), -1)
    playing = np.arange(count)
    for turn in range(MAX_GUESSES):
        chosen = player(possible[playing], guesses[playing, :turn], rng)
        guesses[playing, turn] = chosen
        codes = table[chosen, hidden[playing]]
        possible[playing] &= table[chosen] == codes[:, None]
        playing = playing[codes != SOLVED]
        if not len(playing):
            break
    return Trajectories(hidden, guesses)
