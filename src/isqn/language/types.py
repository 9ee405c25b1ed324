"""Data types of a language agent: batches of games, values of tokens, and the specification of a text game."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from isqn.lazy import jax
from isqn.types import Array, EnvSpec


class Tokens(NamedTuple):
    """Batch of whole games as token sequences, with the rewards of the tokens that the agent wrote."""

    tokens: Any  # (games, length): token ids, padded with `TextSpec.pad`
    num_actions: Any  # (games,): actions (guesses) taken, each of `TextSpec.action_tokens` tokens
    finished: Any  # (games,): whether the game reached its end; False if it was broken off
    rewards: Any  # (games, steps): reward after each token that the agent wrote


class TokenValues(NamedTuple):
    """Values of one head for one token that the agent writes."""

    q: Array  # (2, tokens): two estimates of the value of writing each token
    v: Array  # value of the state before the token
    next_v: Array  # value of the state after the token


@dataclass(frozen=True)
class TextSpec(EnvSpec):
    """Specification of a text game: the agent writes a fixed number of tokens per action, then the game answers."""

    pad: int = 0  # id of the padding token after the end of a game
    action_tokens: int = 1  # tokens that the agent writes per action
    answer_tokens: int = 0  # tokens of the game's answer to each action
    max_actions: int = 1  # maximum number of actions in a game

    @property
    def state_positions(self) -> np.ndarray:
        """Token positions that are states: those after which the agent writes a token, then the final position.

        A step leads from one state to the next. If it completes an action, it also skips the game's answer.
        """
        turn = self.action_tokens + self.answer_tokens
        written = [turn * action + step for action in range(self.max_actions) for step in range(self.action_tokens)]
        return np.array([*written, turn * self.max_actions])

    @property
    def length(self) -> int:
        """Maximum number of tokens in a game."""
        return self.frame_shape[0]

    def batch_shapes(self, size: int) -> Any:
        """Return the shapes and dtypes of a batch of games."""
        num_steps = len(self.state_positions) - 1

        def struct(shape: tuple[int, ...], dtype: str) -> Any:
            return jax.ShapeDtypeStruct((size, *shape), dtype)

        return Tokens(
            tokens=struct((self.length,), "int32"),
            num_actions=struct((), "int32"),
            finished=struct((), "bool"),
            rewards=struct((num_steps,), "float32"),
        )
