"""The few shapes of data that every other module speaks in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isqn.lazy import jax

if TYPE_CHECKING:
    Array = jax.Array
else:
    Array = Any  # jax.Array, which would import JAX
Params = dict[str, Any]
Metrics = dict[str, Array]


def num_bytes(tree: Any) -> int:
    """Of all arrays in a tree, or of those that its shapes stand for."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class UserError(Exception):
    """Something the user can mend: one sentence that says what, where, what is allowed and which flag."""


class Interrupted(Exception):
    """Stopped on request, after saving."""


class Transition(NamedTuple):
    """One sample of experience; a batch is the same tuple with a leading axis on every field.

    `discount` carries termination: gamma**n, or 0 where the episode terminated. Truncation is not
    termination, so a truncated step keeps its discount and its true last observation in `next_obs`.
    """

    obs: Any
    action: Any
    reward: Any  # the sum of n discounted rewards
    discount: Any
    next_obs: Any
    # for agents that learn from a stream; () in samples of a replay
    ended: Any = ()  # whether the episode ended here, terminated or truncated
    explored: Any = ()  # whether another action looked better


class Tokens(NamedTuple):
    """Whole games as tokens, and what is learned at each step of the agent that wrote some of them."""

    tokens: Any  # (games, length)
    num_actions: Any  # (games,): guesses, each of as many tokens as a `TextSpec` says
    finished: Any  # (games,): a game that was broken off has no end
    rewards: Any  # (games, steps)


class Values(NamedTuple):
    """What one head of one network says about a transition: a vector over actions at s and at s'."""

    now: Array
    next: Array


class TokenValues(NamedTuple):
    """What one head says about a step of an agent that writes tokens."""

    q: Array  # (2, tokens): of each token, by two functions
    v: Array  # of the state, whatever is written
    next_v: Array  # of the state that the token leads to


@dataclass(frozen=True)
class EnvSpec:
    """What an agent, a replay and a recorder need to know of an environment, and nothing else."""

    id: str
    protocol: str  # how it is played, by name and version; results of two protocols are never pooled
    frame_shape: tuple[int, ...]  # one observation as the environment returns it
    frame_dtype: str  # a numpy dtype's name
    num_actions: int  # to choose from; where actions are continuous, the numbers of one
    frame_stack: int = 1  # frames an agent sees at once, joined along the last axis
    frames_per_step: int = 1  # emulator frames in one agent step
    first_action: int = 0  # what the environment calls the agent's action 0
    first_state: int | None = None  # where observations are numbers, which the agent sees one-hot: the least one
    action_low: tuple[float, ...] = ()  # of continuous actions, number by number: what the agent's -1 stands for
    action_high: tuple[float, ...] = ()  # and its 1
    action_box: tuple[int, ...] = ()  # the shape in which the environment takes them
    action_type: str = "float32"  # and the type

    @property
    def obs_shape(self) -> tuple[int, ...]:
        """The shape an agent sees."""
        return (*self.frame_shape[:-1], self.frame_shape[-1] * self.frame_stack)

    @property
    def is_image(self) -> bool:
        return len(self.frame_shape) == 3

    @property
    def is_continuous(self) -> bool:
        return bool(self.action_low)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """As the agent chooses it."""
        return (self.num_actions,) if self.is_continuous else ()

    @property
    def action_dtype(self) -> str:
        return "float32" if self.is_continuous else "int32"

    def for_environment(self, action: Any) -> Any:
        """The agent's action as the environment takes it; also a batch of them."""
        if not self.is_continuous:
            return self.first_action + action
        low, high = np.array(self.action_low), np.array(self.action_high)
        # the ends exactly, whatever a sum would round to
        scaled = np.clip(low + (np.asarray(action, np.float64) + 1) / 2 * (high - low), low, high)
        return scaled.reshape((*scaled.shape[:-1], *self.action_box)).astype(self.action_type)

    def from_environment(self, action: Any) -> Any:
        """The other way round: what the agent chose."""
        if not self.is_continuous:
            return np.asarray(action) - self.first_action
        low, high = np.array(self.action_low), np.array(self.action_high)
        flat = np.asarray(action, np.float64).reshape(-1, self.num_actions)
        return ((flat - low) / np.where(high > low, high - low, 1) * 2 - 1).astype(np.float32)

    def random_action(self, generator: np.random.Generator) -> Any:
        """Uniform, as the agent would choose it."""
        if self.is_continuous:
            return generator.uniform(-1, 1, self.num_actions).astype(np.float32)
        return generator.integers(self.num_actions)

    def batch(self, size: int) -> Transition:
        """Shapes and types of a batch, without the numbers."""

        def of(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size, *shape), dtype)

        obs, action = of(self.obs_shape, self.frame_dtype), of(self.action_shape, self.action_dtype)
        flag = of((), "bool")
        return Transition(obs, action, of((), "float32"), of((), "float32"), obs, flag, flag)


@dataclass(frozen=True)
class TextSpec(EnvSpec):
    """A game of tokens, which are its actions too: where an agent writes, if all its actions are whole."""

    pad: int = 0  # the token behind the end
    action_tokens: int = 1  # that an agent writes before the game answers
    answer_tokens: int = 0  # that the game answers with
    most_actions: int = 1

    @property
    def states(self) -> np.ndarray:
        """Places of the tokens from which an agent goes on. A step leads from one to the next, over the answer if it
        ended an action; from the last one nothing is written."""
        turn = self.action_tokens + self.answer_tokens
        written = [turn * action + step for action in range(self.most_actions) for step in range(self.action_tokens)]
        return np.array([*written, turn * self.most_actions])

    @property
    def length(self) -> int:
        return self.frame_shape[0]

    def batch(self, size: int) -> Any:
        of: Any = jax.ShapeDtypeStruct
        steps = len(self.states) - 1
        return Tokens(
            of((size, self.length), "int32"), of((size,), "int32"), of((size,), "bool"), of((size, steps), "float32")
        )
