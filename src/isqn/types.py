"""Data types shared by all modules: transitions, environment specifications and errors."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from math import prod
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
    """Return the total size in bytes of the arrays (or `ShapeDtypeStruct`s) of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class UserError(Exception):
    """Error that the user can fix; its message says what was given, where, what is allowed and which flag."""


def require_new_name(function: str, thing: str, name: str, owner: str | None, module: str) -> None:
    """Refuse to replace what the module `owner` has registered; a module may register its own again."""
    if owner not in (None, module):
        who = "the package" if owner.startswith("isqn.") else f"the module {re.sub('^isqn_import_[0-9]+_', '', owner)}"
        raise UserError(f"{function}: {who} has {thing} {name!r}; choose another name.")


class Interrupted(Exception):
    """Raised when a command stops on request, after it has saved its progress."""


class Transition(NamedTuple):
    """One n-step transition; a batch is the same tuple with a leading axis on every field.

    `discount` carries termination: it is gamma**n, or 0 if the episode terminated. Truncation is not
    termination: a truncated step keeps its discount, and `next_obs` is the true last observation.
    """

    obs: Any  # observation at step t
    action: Any  # action taken at step t
    reward: Any  # discounted sum of the n rewards
    discount: Any  # gamma**n, or 0 if the episode terminated
    next_obs: Any  # observation at step t + n
    # Only set for agents that learn online from a stream; () in samples of a replay.
    ended: Any = ()  # whether the episode ended at this step (terminated or truncated)
    explored: Any = ()  # whether another action had a higher value


class Values(NamedTuple):
    """Action values of one head at both ends of a transition."""

    now: Array  # (actions,): values at s
    next: Array  # (actions,): values at s'


@dataclass(frozen=True)
class EnvSpec:
    """Specification of an environment: observations, actions, and the protocol under which it is played."""

    id: str
    protocol: str  # name and version of the rules of play; results of different protocols are never pooled
    frame_shape: tuple[int, ...]  # shape of one frame (an observation before stacking); the last axis is channels
    frame_dtype: str  # numpy dtype name of a frame
    num_actions: int  # number of discrete actions, or dimension of a continuous action
    frame_stack: int = 1  # frames per observation, concatenated along the last axis
    frames_per_step: int = 1  # emulator frames per agent step
    first_action: int = 0  # the environment's index of the agent's action 0 (start of a `Discrete` action space)
    first_state: int | None = None  # start of a `Discrete` observation space, which the agent sees one-hot; else None
    action_low: tuple[float, ...] = ()  # environment value of the agent's -1, per action dimension; () if discrete
    action_high: tuple[float, ...] = ()  # environment value of the agent's 1, per action dimension
    action_box: tuple[int, ...] = ()  # shape of a continuous action in the environment
    action_type: str = "float32"  # numpy dtype name of a continuous action in the environment
    env_kwargs: str = ""  # keyword arguments of the environment, as the setting of that name
    env_wrappers: str = ""  # wrappers of the environment, as the setting of that name
    channels_first: bool = False  # whether the environment's images have their channels on the first axis

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; newer ones only if they are set, so that older files stay the same."""
        fields = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        newer = ("env_kwargs", "env_wrappers", "channels_first")
        return {name: value for name, value in fields.items() if value or name not in newer}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> EnvSpec:
        """Return the specification with the fields of `to_json`."""
        values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        return cls(**values)

    def check_types(self) -> None:
        """Raise `ValueError` or `TypeError` if a field cannot be that of an environment, as in a damaged file."""
        sides = (self.num_actions, self.frame_stack, self.frames_per_step, *self.frame_shape)
        if not all(type(side) is int and 0 < side < 2**31 for side in sides) or not self.frame_shape:
            raise ValueError(f"the sizes {sides} are not those of an environment")
        starts = (self.first_action, 0 if self.first_state is None else self.first_state)
        if not all(type(start) is int and abs(start) < 2**31 for start in starts):
            raise ValueError(f"the starts {starts} are not those of an environment")
        if not all(isinstance(text, str) for text in (self.id, self.protocol, self.frame_dtype, self.action_type)):
            raise TypeError("names and types are texts")
        if np.dtype(self.frame_dtype).kind not in "biuf" or np.dtype(self.action_type).kind != "f":
            raise TypeError(f"frames are {self.frame_dtype} and actions {self.action_type}")
        bounds = (self.action_low, self.action_high)
        if not all(len(bound) == len(self.action_low) and np.isfinite(bound).all() for bound in bounds):
            raise ValueError("the bounds of actions are not finite")
        if self.is_continuous and (
            len(self.action_low) != self.num_actions or prod(self.action_box) != self.num_actions
        ):
            raise ValueError("the bounds of actions have another shape than actions")

    @property
    def obs_shape(self) -> tuple[int, ...]:
        """Shape of an observation: a stack of frames."""
        return (*self.frame_shape[:-1], self.frame_shape[-1] * self.frame_stack)

    @property
    def is_image(self) -> bool:
        return len(self.frame_shape) == 3

    @property
    def is_continuous(self) -> bool:
        return bool(self.action_low)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of an action of the agent: (num_actions,) if continuous, () if discrete."""
        return (self.num_actions,) if self.is_continuous else ()

    @property
    def action_dtype(self) -> str:
        return "float32" if self.is_continuous else "int32"

    def to_env_action(self, action: Any) -> Any:
        """Convert an action (or a batch of them) from the agent's format to the environment's."""
        if not self.is_continuous:
            return self.first_action + action
        low, high = np.array(self.action_low), np.array(self.action_high)
        # clipping makes -1 and 1 map to the bounds exactly, despite rounding
        scaled = np.clip(low + (np.asarray(action, np.float64) + 1) / 2 * (high - low), low, high)
        return scaled.reshape((*scaled.shape[:-1], *self.action_box)).astype(self.action_type)

    def from_env_action(self, action: Any) -> Any:
        """Convert an action (or a batch of them) from the environment's format to the agent's."""
        if not self.is_continuous:
            return np.asarray(action) - self.first_action
        low, high = np.array(self.action_low), np.array(self.action_high)
        flat = np.asarray(action, np.float64).reshape(-1, self.num_actions)
        return ((flat - low) / np.where(high > low, high - low, 1) * 2 - 1).astype(np.float32)

    def random_action(self, generator: np.random.Generator) -> Any:
        """Draw an action uniformly at random, in the agent's format."""
        if self.is_continuous:
            return generator.uniform(-1, 1, self.num_actions).astype(np.float32)
        return generator.integers(self.num_actions)

    def batch_shapes(self, size: int) -> Transition:
        """Return the shapes and dtypes of a batch of transitions."""

        def struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size, *shape), dtype)

        obs, action = struct(self.obs_shape, self.frame_dtype), struct(self.action_shape, self.action_dtype)
        number, flag = struct((), "float32"), struct((), "bool")
        return Transition(obs, action, number, number, obs, flag, flag)
