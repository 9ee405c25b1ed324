"""Play Wordle with a language agent, many games at once, and evaluate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from isqn.agents.base import AgentState
from isqn.compiler import jit
from isqn.keys import device_key, host_generator
from isqn.language import players as wordle_players
from isqn.language.agent import IlqlConfig, Judged, make_writer, steps_of
from isqn.language.data import Source
from isqn.language.game import (
    END_ACTION,
    LENGTH,
    SPEC,
    TRIES,
    Games,
    colours,
    decode,
    encode,
    guesses_of,
    initials,
    table,
)
from isqn.language.words import find_words
from isqn.train import parallel
from isqn.train.evaluate import STOPPED, Episode
from isqn.train.offline import Evaluation
from isqn.types import Interrupted, Tokens

MEASURES = (
    *("win_rate", "valid_share", "dictionary_share", "consistent_share", "cloned_return", "cloned_win_rate"),
    *("td_error", "value_correlation"),
)
HELD_OUT_GAMES = 256
AT_ONCE = 64  # games; what GPT-2 small has read of so many takes 0.4 GB


def words_of(config: IlqlConfig) -> list[str]:
    return find_words(config.word_list, config.num_words, config.word_seed)


class CompiledWriter(NamedTuple):
    """What an agent does with games."""

    play: Callable[..., Games]  # state, letters of the hidden words (games, 5), seed
    judge: Callable[..., Judged]
    appraise: Callable[..., Any]


def compile_writer(config: IlqlConfig, should_stop: Callable[[], bool] = lambda: False) -> CompiledWriter:
    writer = make_writer(config, SPEC)
    guess = jit(writer.guess, donate_argnums=1)

    def play(state: AgentState, hidden: np.ndarray, seed: int) -> Games:
        """In parts of as many games as caches are held for."""
        count, state = len(hidden), state._replace(optimizer=(), probe=())
        size = min(count, AT_ONCE)
        parts = [
            play_part(state, hidden[np.arange(first, first + size) % count], (seed, "guess", first))
            for first in range(0, count, size)
        ]
        games = Games(hidden, official=config.official_colours)
        for name in ("tokens", "lengths", "guess_start", "tries", "solved"):
            setattr(games, name, np.concatenate([getattr(part, name) for part in parts])[:count])
        return games

    def play_part(state: AgentState, hidden: np.ndarray, draw: Any) -> Games:
        games, count = Games(hidden, official=config.official_colours), len(hidden)
        caches, read = writer.begin(count), np.zeros(count, int)  # what the caches hold
        for turn in range(TRIES):
            if games.over.all():
                break
            if parallel.any_process(should_stop()):
                raise Interrupted(STOPPED)
            places = np.minimum(read[:, None] + np.arange(SPEC.answer_tokens), LENGTH - 1)
            new = np.take_along_axis(games.tokens, places, axis=1)
            tokens, caches = guess(state, caches, new, read, games.lengths - read, device_key(*draw, turn))
            start, ended = games.lengths.copy(), np.zeros(count, bool)
            written = np.zeros(count, int)
            for column in np.asarray(tokens).T:
                written += ~ended
                games.step(column, ~ended)
                ended |= column == END_ACTION
            read = np.minimum(start + written, games.lengths - 1)  # without an answer, its last token once more
        return games

    return CompiledWriter(play, jit(writer.judge), jit(writer.appraise))


def hidden_words(words: list[str], count: int, seed: int) -> np.ndarray:
    """Of so many games, or of one for each word: all of them in an order that the seed draws, and again in another."""
    count = count or len(words)
    rng = host_generator(seed, "hidden")
    rounds = [rng.permutation(len(words)) for _ in range(-(-count // len(words)))]
    return encode(words)[np.concatenate(rounds)[:count]]


def shares(games: Games, words: list[str]) -> dict[str, float]:
    """Of all guesses: those of five letters, those in the list, and those that all clues allow."""
    known, found = set(words), list[tuple[bool, bool, bool]]()
    for tokens in games.tokens:
        clues: list[tuple[np.ndarray, str]] = []
        for guess, told in guesses_of(tokens):
            if told is None:
                found.append((False, False, False))
                continue
            letters = encode([guess])[0]
            allowed = all(
                initials(colours(earlier, letters, official=games.official)) == shown for earlier, shown in clues
            )
            found.append((True, guess in known, allowed))
            clues.append((letters, told))
    valid, listed, consistent = np.mean(found, axis=0).tolist()
    return {"valid_share": valid, "dictionary_share": listed, "consistent_share": consistent}


def yardsticks(words: list[str], hidden: np.ndarray, seed: int, *, official: bool) -> dict[str, float]:
    """What players by rule make of the same hidden words: their mean returns over a thousand games or more."""
    letters = encode(words)
    patterns = table(letters, letters, official=official)
    number = {word: place for place, word in enumerate(words)}
    looked_for = np.array([number[decode(word)] for word in hidden])
    looked_for = np.tile(looked_for, -(-1_000 // len(looked_for)))
    players = {
        "random": wordle_players.at_random,
        "consistent": wordle_players.consistent,
        "informed": wordle_players.informed(patterns),
    }
    played = {
        name: wordle_players.play(player, patterns, looked_for, host_generator(seed, name))
        for name, player in players.items()
    }
    return {name: float(games.returns.mean()) for name, games in played.items()}


def returns_to_go(games: Tokens, discount: float) -> np.ndarray:
    """From each step on, as its rewards were; (games, steps)."""
    found, ahead = np.zeros_like(games.rewards), np.zeros(len(games.rewards), np.float32)
    for step in reversed(range(games.rewards.shape[1])):
        ahead = found[:, step] = games.rewards[:, step] + discount * ahead
    return found


def evaluation(
    config: IlqlConfig, source: Source, should_stop: Callable[[], bool] = lambda: False
) -> Callable[[AgentState, int], Evaluation]:
    """Of a state at an epoch: games by values and policy, the same by the policy alone, and what values are worth."""
    words = source.words
    writer, cloner = (compile_writer(one, should_stop) for one in (config, config.replace(inverse_temperature=0.0)))
    held_out = source.sample(HELD_OUT_GAMES, host_generator(config.seed, "held-out"), held_out=True)
    starts = range(0, HELD_OUT_GAMES, AT_ONCE)
    parts = [Tokens(*(column[first : first + AT_ONCE] for column in held_out)) for first in starts]
    real = np.asarray(steps_of(held_out, SPEC, config.discount)[1])
    # where a game was broken off, nobody knows what would have followed
    known = real & held_out.finished[:, None]
    later = returns_to_go(held_out, config.discount)

    def evaluate(state: AgentState, epoch: int) -> Evaluation:
        seed = int(host_generator(config.seed, "evaluation", epoch).integers(2**31))
        hidden = hidden_words(words, config.evaluation_games, seed)
        games = writer.play(state, hidden, seed)
        by_policy = cloner.play(state, hidden, seed) if config.inverse_temperature else games
        error, v = map(np.concatenate, zip(*(writer.appraise(state, part) for part in parts), strict=True))
        measures = {
            "win_rate": float(games.solved.mean()),
            **shares(games, words),
            "cloned_return": float(by_policy.returns.mean()),
            "cloned_win_rate": float(by_policy.solved.mean()),
            "td_error": float(np.sqrt(np.mean(error[real] ** 2))),
            "value_correlation": _correlation(v[known], later[known]),
        }
        played = zip(games.returns.tolist(), games.tries.tolist(), strict=True)
        return Evaluation([Episode(seed, float(total), int(tries)) for total, tries in played], measures)

    return evaluate


class Thought(NamedTuple):
    """Of a word that might be guessed."""

    word: str
    chosen: float  # its probability
    cloned: float  # by the policy alone
    value: float  # what follows from it, discounted, as Q expects


class Turn(NamedTuple):
    guess: str
    told: str | None  # its colours; none if it was no word
    value: float  # of the state that it was guessed in, as V expects
    thoughts: list[Thought]  # the likeliest words


def explain(config: IlqlConfig, state: AgentState, word: str, top: int, seed: int) -> tuple[Games, list[Turn]]:
    """How an agent looks for a word, and what else it might have guessed, of the words of its list."""
    writer, letters = compile_writer(config), encode(words_of(config))
    games = writer.play(state, encode([word]), seed)
    tokens, place, turns = games.tokens[0], 0, []
    written = np.pad(letters, ((0, 0), (0, 1)), constant_values=END_ACTION)
    for guess, told in guesses_of(tokens):
        ahead = np.full((len(letters), LENGTH), SPEC.pad, np.int32)
        ahead[:, : place + 1] = tokens[: place + 1]
        places = place + np.arange(SPEC.action_tokens)
        ahead[:, places + 1] = written
        judged = _judged(writer, state, ahead, places)
        chosen, cloned = (_likelihood(scores, written) for scores in (judged.scores, judged.cloned))
        values = judged.q[:, -1, END_ACTION]
        best = np.argsort(-chosen, kind="stable")[:top]
        thoughts = [Thought(decode(letters[i]), float(chosen[i]), float(cloned[i]), float(values[i])) for i in best]
        turns.append(Turn(guess, told, float(judged.v[0, 0]), thoughts))
        place += 1 + int(np.flatnonzero(tokens[place + 1 :] == END_ACTION)[0])
        place += 0 if told is None else SPEC.answer_tokens
    return games, turns


def _judged(writer: CompiledWriter, state: AgentState, tokens: np.ndarray, places: np.ndarray) -> Judged:
    """At some places of the games; as many games at a time as are played at once."""
    count = len(tokens)
    parts = []
    for first in range(0, count, AT_ONCE):
        whole = tokens[np.arange(first, first + min(count, AT_ONCE)) % count]
        parts.append(jax.tree.map(lambda x: np.asarray(x)[:, places], writer.judge(state, whole)))
    return jax.tree.map(lambda *found: np.concatenate(found)[:count], *parts)


def _likelihood(scores: Any, written: np.ndarray) -> np.ndarray:
    """Of whole words, if tokens were drawn."""
    likely = np.asarray(jax.nn.log_softmax(scores))
    return np.exp(np.take_along_axis(likely, written[..., None], axis=-1)[..., 0].sum(axis=1))


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """0 where one of them is constant."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0
