"""A new environment in JAX, trained by the compiled loop with several seeds: walk to a goal on a line.

isqn train dqn --import examples/new_native_environment.py --env-id Goal-v0 --num-seeds 3 --total-timesteps 10_000
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import isqn
from isqn.types import Array, EnvSpec


class State(NamedTuple):
    """Position and goal, both in [-1, 1], and the steps so far."""

    position: Array
    goal: Array
    time: Array


def observe(state: State) -> Array:
    return jnp.stack([state.position, state.goal])


def reset(key: Array) -> tuple[State, Array]:
    state = State(*jax.random.uniform(key, (2,), minval=-1), jnp.int32(0))
    return state, observe(state)


def step(state: State, action: Array, key: Array) -> tuple[State, Array, Array, Array, Array]:
    position = jnp.clip(state.position + 0.2 * (2 * action - 1), -1, 1)  # action 0 goes left, action 1 right
    state = State(position, state.goal, state.time + 1)
    is_there = jnp.abs(position - state.goal) < 0.15
    return state, observe(state), jnp.where(is_there, 0.0, -1.0), is_there, state.time >= 30


SPEC = EnvSpec(id="Goal-v0", protocol="goal-v1", frame_shape=(2,), frame_dtype="float32", num_actions=2)
isqn.register_environment("Goal-v0", isqn.NativeEnvironment(SPEC, reset, step))
