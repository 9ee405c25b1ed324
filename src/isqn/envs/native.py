"""Environments as pure JAX functions, for the compiled loop. They run under `jit`, `vmap` and `scan`.

There are no automatic resets: the trainer holds the keys, receives the last observation of every episode, and resets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from isqn.envs import classic, minatar, toy
from isqn.types import Array, EnvSpec

State = Any
Reset = Callable[[Array], tuple[State, Array]]
Step = Callable[[State, Array, Array], tuple[State, Array, Array, Array, Array]]


class NativeEnvironment(NamedTuple):
    """Pure functions of an environment, over one state pytree."""

    spec: EnvSpec
    reset: Reset  # key -> state, obs
    step: Step  # state, action, key -> state, obs, reward (float32), terminated, truncated (bool)


def has_native(env_id: str) -> bool:
    """Whether an environment has a JAX version. Imports no optional package and starts no device."""
    return env_id in toy.PROBLEMS or env_id in classic.IDS or minatar.full_id(env_id) is not None


def make_native(env_id: str) -> NativeEnvironment:
    """Make the JAX version of an environment."""
    if env_id in toy.PROBLEMS:
        protocol = "gymnasium"
        reset, step, num_actions = toy.make_jax_functions(toy.PROBLEMS[env_id]())
    elif env_id in classic.IDS:
        protocol = "gymnasium"
        reset, step, num_actions = classic.make_jax_functions(env_id)
    elif full_id := minatar.full_id(env_id):
        env_id = full_id
        protocol = minatar.PROTOCOL
        reset, step, num_actions = minatar.make_jax_functions(env_id)
    else:
        raise ValueError(f"{env_id} has no JAX version; see has_native.")
    frame = jax.eval_shape(lambda: reset(jax.random.key(0))[1])
    spec = EnvSpec(env_id, protocol, frame.shape, frame.dtype.name, num_actions)
    return NativeEnvironment(spec, reset, step)
