"""Environments as pure JAX functions, for the compiled loop. They run under `jit`, `vmap` and `scan`.

They do not reset themselves: the training loop stores the last observation of every episode, and then resets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from isqn.keys import device_key
from isqn.lazy import jax, jnp
from isqn.types import Array, EnvSpec, UserError
from isqn.usercode import UserCodeError, describe_error, find_user_line

State = Any
Reset = Callable[[Array], tuple[State, Array]]
Step = Callable[[State, Array, Array], tuple[State, Array, Array, Array, Array]]


class NativeEnvironment(NamedTuple):
    """Pure functions of an environment, over one state pytree."""

    spec: EnvSpec
    reset: Reset  # key -> state, obs
    # state, action in the environment's units, key -> state, obs, reward (float32), terminated, truncated (bool)
    step: Step


def native_environment(
    env_id: str, protocol: str, reset: Reset, step: Step, num_actions: int, action_bound: float = 0.0
) -> NativeEnvironment:
    """Make a `NativeEnvironment`; the specification of its observations comes from `reset`.

    With an `action_bound`, actions are `num_actions` numbers of at most that size.
    """
    frame = jax.eval_shape(lambda: reset(jax.random.key(0))[1])
    spec = EnvSpec(env_id, protocol, frame.shape, frame.dtype.name, num_actions)
    if action_bound:
        high = (action_bound,) * num_actions
        low = tuple(-bound for bound in high)
        spec = replace(spec, action_low=low, action_high=high, action_box=(num_actions,))
    return NativeEnvironment(spec, reset, step)


def to_native_action(spec: EnvSpec, action: Array) -> Array:
    """Do the same as `EnvSpec.to_env_action` to an action of the agent, in a compiled program."""
    if not spec.is_continuous:
        return action
    low, high = jnp.array(spec.action_low), jnp.array(spec.action_high)
    return jnp.clip(low + (action + 1) / 2 * (high - low), low, high).reshape(spec.action_box)


def complete_spec(spec: EnvSpec) -> EnvSpec:
    """Fill in the shape of a continuous action in the environment, a vector if none is given."""
    return replace(spec, action_box=(spec.num_actions,)) if spec.is_continuous and not spec.action_box else spec


def require_consistent(native: NativeEnvironment, env_id: str) -> None:
    """Refuse functions whose results have other shapes or types than the loop expects, before anything is trained."""
    spec = native.spec
    if spec.num_actions < 1:
        raise UserError(f"{env_id}: its spec has num_actions {spec.num_actions}; it must be at least 1.")
    action = np.zeros(spec.action_box, spec.action_type) if spec.is_continuous else np.int32(0)
    try:
        key = jax.eval_shape(lambda: jax.random.key(0))
        state, obs = jax.eval_shape(native.reset, key)
        new_state, new_obs, *rest = jax.eval_shape(native.step, state, action, key)
        reward, terminated, truncated = rest
    except Exception as error:
        line = find_user_line(error)
        raise UserCodeError(
            f"{env_id}: reset(key) must return (state, obs), and step(state, action, key) (state, obs, reward, "
            f"terminated, truncated), as JAX functions; {f'{line}: ' if line else ''}{describe_error(error)}"
        ) from error
    expected = jax.ShapeDtypeStruct(spec.frame_shape, spec.frame_dtype)
    number, flag = (jax.ShapeDtypeStruct((), dtype) for dtype in ("float32", "bool"))
    for name, found, wanted in (
        ("the observation of reset", obs, expected),
        ("the observation of step", new_obs, expected),
        ("the reward", reward, number),
        ("terminated", terminated, flag),
        ("truncated", truncated, flag),
    ):
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            raise UserError(
                f"{env_id}: {name} has shape {found.shape} and type {found.dtype.name}; it must have shape "
                f"{wanted.shape} and type {wanted.dtype.name}."
            )
    before, after = (jax.tree.map(lambda x: (x.shape, x.dtype.name), tree) for tree in (state, new_state))
    if before != after:
        raise UserError(
            f"{env_id}: the state has other shapes or types after step, {after}, than after reset, {before}."
        )


def _action_space(spec: EnvSpec) -> gym.spaces.Space[Any]:
    if not spec.is_continuous:
        return gym.spaces.Discrete(spec.num_actions)
    shape, dtype = spec.action_box, np.dtype(spec.action_type)
    low, high = (np.array(bound, dtype).reshape(shape) for bound in (spec.action_low, spec.action_high))
    return gym.spaces.Box(low, high, shape, dtype.type)


class NativeGymnasium(gym.Env):
    """Gymnasium environment around an environment in JAX, for the host loop and evaluations."""

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's convention

    def __init__(self, native: NativeEnvironment, render_mode: str | None = None):
        spec = complete_spec(native.spec)
        dtype = np.dtype(spec.frame_dtype)
        low, high = (-np.inf, np.inf) if dtype.kind == "f" else (0, 1 if dtype.kind == "b" else np.iinfo(dtype).max)
        self.observation_space = gym.spaces.Box(low, high, spec.frame_shape, dtype.type)
        self.action_space = _action_space(spec)
        self.render_mode = render_mode
        self._reset, self._step = jax.jit(native.reset), jax.jit(native.step)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode = int(self.np_random.integers(2**31))
        self._count = 0
        self._state, obs = self._reset(device_key(self._episode, "reset"))
        return np.asarray(obs), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._count += 1
        key = device_key(self._episode, "step", self._count)
        self._state, obs, reward, terminated, truncated = self._step(self._state, action, key)
        return np.asarray(obs), float(reward), bool(terminated), bool(truncated), {}
