"""Wordle games of a language agent, many at once, and their evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from isqn.agents.base import AgentState
from isqn.compiler import jit
from isqn.keys import device_key, host_generator
from isqn.language.agent import IlqlConfig
from isqn.language.data import Source
from isqn.language.decoding import TokenScores, make_decoder
from isqn.language.game import (
    END_ACTION,
    LENGTH,
    MAX_GUESSES,
    SPEC,
    Games,
    colour_letters,
    colour_table,
    colours,
    decode,
    encode,
    parse_guesses,
)
from isqn.language.learning import make_learner, to_transitions
from isqn.language.players import guess_any, guess_consistent, make_informed, play_games
from isqn.language.types import Tokens
from isqn.language.words import load_words
from isqn.train import parallel
from isqn.train.evaluate import STOPPED, Episode
from isqn.train.offline import Evaluation
from isqn.types import Interrupted

MEASURES = (
    *("win_rate", "valid_share", "dictionary_share", "consistent_share", "cloned_return", "cloned_win_rate"),
    *("td_error", "value_correlation"),
)
HELD_OUT_GAMES = 256
GAMES_AT_ONCE = 64  # the caches of GPT-2 small for so many games take 0.4 GB


def load_word_list(config: IlqlConfig) -> list[str]:
    """Return the words of a run."""
    return load_words(config.word_list, config.num_words, config.word_seed)


def draw_hidden_words(words: list[str], count: int, seed: int) -> np.ndarray:
    """Draw hidden words as letters (games, 5): each word once in random order, then each again; 0 draws each once."""
    count = count or len(words)
    rng = host_generator(seed, "hidden")
    rounds = [rng.permutation(len(words)) for _ in range(-(-count // len(words)))]
    return encode(words)[np.concatenate(rounds)[:count]]


# -- playing


class CompiledDecoder(NamedTuple):
    """Compiled functions that decode."""

    play: Callable[..., Games]  # state, letters of the hidden words (games, 5), seed
    score: Callable[..., TokenScores]  # state, tokens (games, T)


def compile_decoder(config: IlqlConfig, should_stop: Callable[[], bool] = lambda: False) -> CompiledDecoder:
    """Compile the functions that decode; `play` raises `Interrupted` if it is to stop."""
    decoder = make_decoder(config, SPEC)
    decode_guess = jit(decoder.decode_guess, donate_argnums=1)

    def play(state: AgentState, hidden: np.ndarray, seed: int) -> Games:
        """Play a game for each hidden word, as many at once as caches are held for."""
        count, state = len(hidden), state._replace(optimizer=(), probe=())
        size = min(count, GAMES_AT_ONCE)
        parts = [
            play_part(state, hidden[np.arange(first, first + size) % count], (seed, "guess", first))
            for first in range(0, count, size)
        ]
        games = Games(hidden, official=config.official_colours)
        for name in ("tokens", "lengths", "guess_start", "num_guesses", "solved"):
            setattr(games, name, np.concatenate([getattr(part, name) for part in parts])[:count])
        return games

    def play_part(state: AgentState, hidden: np.ndarray, key: Any) -> Games:
        games, count = Games(hidden, official=config.official_colours), len(hidden)
        caches, num_cached = decoder.init_caches(count), np.zeros(count, int)  # tokens in the caches
        for turn in range(MAX_GUESSES):
            if games.over.all():
                break
            if parallel.any_process(should_stop()):
                raise Interrupted(STOPPED)
            positions = np.minimum(num_cached[:, None] + np.arange(SPEC.answer_tokens), LENGTH - 1)
            new = np.take_along_axis(games.tokens, positions, axis=1)
            num_new = games.lengths - num_cached
            tokens, caches = decode_guess(state, caches, new, num_cached, num_new, device_key(*key, turn))
            start, has_ended = games.lengths.copy(), np.zeros(count, bool)
            num_written = np.zeros(count, int)
            for column in np.asarray(tokens).T:
                num_written += ~has_ended
                games.step(column, ~has_ended)
                has_ended |= column == END_ACTION
            # an invalid guess has no answer, so its last token is read again
            num_cached = np.minimum(start + num_written, games.lengths - 1)
        return games

    return CompiledDecoder(play, jit(decoder.score))


# -- evaluation


def guess_statistics(games: Games, words: list[str]) -> dict[str, float]:
    """Return the share of guesses that have five letters, are in the word list, and agree with all clues so far."""
    known, results = set(words), list[tuple[bool, bool, bool]]()
    for tokens in games.tokens:
        clues: list[tuple[np.ndarray, str]] = []
        for guess, row in parse_guesses(tokens):
            if row is None:
                results.append((False, False, False))
                continue
            letters = encode([guess])[0]
            is_consistent = all(
                colour_letters(colours(earlier, letters, official=games.official)) == clue for earlier, clue in clues
            )
            results.append((True, guess in known, is_consistent))
            clues.append((letters, row))
    valid, listed, consistent = np.mean(results, axis=0).tolist()
    return {"valid_share": valid, "dictionary_share": listed, "consistent_share": consistent}


def baseline_returns(words: list[str], hidden: np.ndarray, seed: int, *, official: bool) -> dict[str, float]:
    """Return the mean return of scripted players on the same hidden words, over at least a thousand games."""
    letters = encode(words)
    table = colour_table(letters, letters, official=official)
    index = {word: i for i, word in enumerate(words)}
    indices = np.array([index[decode(word)] for word in hidden])
    indices = np.tile(indices, -(-1_000 // len(indices)))
    players = {"random": guess_any, "consistent": guess_consistent, "informed": make_informed(table)}
    played = {name: play_games(player, table, indices, host_generator(seed, name)) for name, player in players.items()}
    return {name: float(games.returns.mean()) for name, games in played.items()}


def returns_to_go(games: Tokens, discount: float) -> np.ndarray:
    """Return the discounted return from each step on, (games, steps)."""
    returns, following = np.zeros_like(games.rewards), np.zeros(len(games.rewards), np.float32)
    for step in reversed(range(games.rewards.shape[1])):
        following = returns[:, step] = games.rewards[:, step] + discount * following
    return returns


def make_evaluation(
    config: IlqlConfig, source: Source, should_stop: Callable[[], bool] = lambda: False
) -> Callable[[AgentState, int], Evaluation]:
    """Make the function that evaluates a state at an epoch.

    It plays with policy and values, then with the policy alone, and compares the values with held-out games.
    """
    words = source.words
    decoder = compile_decoder(config, should_stop)
    cloning_decoder = compile_decoder(config.replace(inverse_temperature=0.0), should_stop)
    td_errors = jit(make_learner(config, SPEC).td_errors)
    held_out = source.sample(HELD_OUT_GAMES, host_generator(config.seed, "held-out"), held_out=True)
    starts = range(0, HELD_OUT_GAMES, GAMES_AT_ONCE)
    parts = [Tokens(*(column[first : first + GAMES_AT_ONCE] for column in held_out)) for first in starts]
    is_step = np.asarray(to_transitions(held_out, SPEC, config.discount)[1])
    has_return = is_step & held_out.finished[:, None]  # the return of a game that was broken off is not known
    returns = returns_to_go(held_out, config.discount)

    def evaluate(state: AgentState, epoch: int) -> Evaluation:
        seed = int(host_generator(config.seed, "evaluation", epoch).integers(2**31))
        hidden = draw_hidden_words(words, config.evaluation_games, seed)
        games = decoder.play(state, hidden, seed)
        cloned = cloning_decoder.play(state, hidden, seed) if config.inverse_temperature else games
        error, v = map(np.concatenate, zip(*(td_errors(state, part) for part in parts), strict=True))
        measures = {
            "win_rate": float(games.solved.mean()),
            **guess_statistics(games, words),
            "cloned_return": float(cloned.returns.mean()),
            "cloned_win_rate": float(cloned.solved.mean()),
            "td_error": float(np.sqrt(np.mean(error[is_step] ** 2))),
            "value_correlation": _correlate(v[has_return], returns[has_return]),
        }
        results = zip(games.returns.tolist(), games.num_guesses.tolist(), strict=True)
        return Evaluation([Episode(seed, float(total), int(length)) for total, length in results], measures)

    return evaluate


def _correlate(a: np.ndarray, b: np.ndarray) -> float:
    """Return the correlation coefficient; 0 if one of the two is constant."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0


# -- the candidates of a guess


class Candidate(NamedTuple):
    """Word that the agent may guess."""

    word: str
    probability: float  # of writing the word, by policy and values
    policy_probability: float  # of writing the word, by the policy alone
    value: float  # Q of its last token

    def as_json(self) -> dict[str, Any]:
        return {
            "word": self.word,
            "probability": self.probability,
            "policy_probability": self.policy_probability,
            "value": self.value,
        }


class Turn(NamedTuple):
    """Guess of an agent, with the likeliest words."""

    guess: str
    colours: str | None  # as letters of g, b and y; None if the guess was no word
    value: float  # V of the state before the guess
    candidates: list[Candidate]

    def as_json(self) -> dict[str, Any]:
        return {
            "guess": self.guess,
            "colours": self.colours,
            "value": self.value,
            "candidates": [candidate.as_json() for candidate in self.candidates],
        }


def trace_game(config: IlqlConfig, state: AgentState, word: str, top: int, seed: int) -> tuple[Games, list[Turn]]:
    """Play a game with a hidden word; return it, and for each guess the `top` likeliest words of the word list."""
    decoder, letters = compile_decoder(config), encode(load_word_list(config))
    games = decoder.play(state, encode([word]), seed)
    tokens, start, turns = games.tokens[0], 0, []
    actions = np.pad(letters, ((0, 0), (0, 1)), constant_values=END_ACTION)
    for guess, row in parse_guesses(tokens):
        continued = np.full((len(letters), LENGTH), SPEC.pad, np.int32)
        continued[:, : start + 1] = tokens[: start + 1]
        positions = start + np.arange(SPEC.action_tokens)
        continued[:, positions + 1] = actions
        scored = _score_at(decoder, state, continued, positions)
        probabilities, of_policy = (_probability(s, actions) for s in (scored.scores, scored.policy_scores))
        values = scored.q[:, -1, END_ACTION]
        best = np.argsort(-probabilities, kind="stable")[:top]
        candidates = [
            Candidate(decode(letters[i]), float(probabilities[i]), float(of_policy[i]), float(values[i])) for i in best
        ]
        turns.append(Turn(guess, row, float(scored.v[0, 0]), candidates))
        start += 1 + int(np.flatnonzero(tokens[start + 1 :] == END_ACTION)[0])
        start += 0 if row is None else SPEC.answer_tokens
    return games, turns


def _score_at(decoder: CompiledDecoder, state: AgentState, tokens: np.ndarray, positions: np.ndarray) -> TokenScores:
    """Return the scores at some positions, for as many games at a time as are played at once."""
    count = len(tokens)
    parts = []
    for first in range(0, count, GAMES_AT_ONCE):
        part = tokens[np.arange(first, first + min(count, GAMES_AT_ONCE)) % count]
        parts.append(jax.tree.map(lambda x: np.asarray(x)[:, positions], decoder.score(state, part)))
    return jax.tree.map(lambda *columns: np.concatenate(columns)[:count], *parts)


def _probability(scores: Any, actions: np.ndarray) -> np.ndarray:
    """Return the probability of writing whole words, if tokens are sampled."""
    log_probabilities = np.asarray(jax.nn.log_softmax(scores))
    return np.exp(np.take_along_axis(log_probabilities, actions[..., None], axis=-1)[..., 0].sum(axis=1))
