"""Classic control in JAX, with Gymnasium's equations, limits and rewards, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from isqn.lazy import jax, jnp
from isqn.types import Array

IDS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1")
HOST_IDS = ("MountainCarContinuous-v0",)  # host loop only, from Gymnasium


class TimedState(NamedTuple):
    """State of an episode: the physical state and the time."""

    physics: Array
    time: Array  # steps since the reset


class Problem(NamedTuple):
    """Dynamics, observations and time limit of one environment."""

    reset: Callable[[Array], Array]  # key -> physics
    step: Callable[[Array, Array], tuple[Array, Array, Array]]  # physics, action -> physics, reward, terminated
    observe: Callable[[Array], Array]  # physics -> observation
    num_actions: int
    time_limit: int
    action_bound: float = 0.0  # largest number of a continuous action; 0 if actions are discrete


def _cart_pole(state: Array, action: Array) -> tuple[Array, Array, Array]:
    """Advance CartPole (Barto, Sutton and Anderson 1983) by one Euler step of 0.02 s."""
    _, x_dot, angle, angle_dot = state
    gravity, cart, pole, half_length, force_size, dt = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    mass = cart + pole
    force = jnp.where(action == 1, force_size, -force_size)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    push = (force + pole * half_length * angle_dot**2 * sin) / mass
    angle_acc = (gravity * sin - cos * push) / (half_length * (4 / 3 - pole * cos**2 / mass))
    x_acc = push - pole * half_length * angle_acc * cos / mass
    state = state + dt * jnp.stack([x_dot, x_acc, angle_dot, angle_acc])
    fallen = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 12 * 2 * np.pi / 360)
    return state, jnp.float32(1), fallen


def _mountain_car(state: Array, action: Array) -> tuple[Array, Array, Array]:
    """Advance MountainCar (Moore 1990) by one step."""
    position, velocity = state
    velocity = jnp.clip(velocity + (action - 1) * 0.001 - 0.0025 * jnp.cos(3 * position), -0.07, 0.07)
    position = jnp.clip(position + velocity, -1.2, 0.6)
    velocity = jnp.where((position <= -1.2) & (velocity < 0), 0.0, velocity)
    return jnp.stack([position, velocity]), jnp.float32(-1), (position >= 0.5) & (velocity >= 0)


def _acrobot(state: Array, action: Array) -> tuple[Array, Array, Array]:
    """Advance Acrobot (Sutton 1996, the version of Sutton and Barto's book) by one Runge-Kutta step of 0.2 s."""
    dt = 0.2
    torque = (action - 1).astype(jnp.float32)
    k1 = _acrobot_rates(state, torque)
    k2 = _acrobot_rates(state + dt / 2 * k1, torque)
    k3 = _acrobot_rates(state + dt / 2 * k2, torque)
    k4 = _acrobot_rates(state + dt * k3, torque)
    state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    angles = (state[:2] + np.pi) % (2 * np.pi) - np.pi
    velocities = jnp.clip(state[2:], -np.array([4, 9]) * np.pi, np.array([4, 9]) * np.pi)
    reached = -jnp.cos(angles[0]) - jnp.cos(angles[0] + angles[1]) > 1
    return jnp.concatenate([angles, velocities]).astype(jnp.float32), jnp.where(reached, jnp.float32(0), -1), reached


def _acrobot_rates(state: Array, torque: Array) -> Array:
    """Return the time derivative of Acrobot's state.

    Both links have mass, length and moment of inertia 1, and their centre of mass in the middle.
    """
    angle1, angle2, rate1, rate2 = state
    gravity, centre = 9.8, 0.5
    d1 = centre**2 + 1 + centre**2 + 2 * centre * jnp.cos(angle2) + 2
    d2 = centre**2 + centre * jnp.cos(angle2) + 1
    phi2 = centre * gravity * jnp.cos(angle1 + angle2 - np.pi / 2)
    phi1 = (
        -centre * rate2**2 * jnp.sin(angle2)
        - 2 * centre * rate2 * rate1 * jnp.sin(angle2)
        + (centre + 1) * gravity * jnp.cos(angle1 - np.pi / 2)
        + phi2
    )
    angle_acc2 = (torque + d2 / d1 * phi1 - centre * rate1**2 * jnp.sin(angle2) - phi2) / (centre**2 + 1 - d2**2 / d1)
    angle_acc1 = -(d2 * angle_acc2 + phi1) / d1
    return jnp.stack([rate1, rate2, angle_acc1, angle_acc2])


def _observe_acrobot(state: Array) -> Array:
    cos, sin = jnp.cos(state[:2]), jnp.sin(state[:2])
    return jnp.stack([cos[0], sin[0], cos[1], sin[1], state[2], state[3]])


def _pendulum(state: Array, action: Array) -> tuple[Array, Array, Array]:
    """Advance Pendulum by one step of 0.05 s; angle 0 is upright, and the reward is that of the state before."""
    angle, speed = state
    gravity, mass, length, dt = 10.0, 1.0, 1.0, 0.05
    torque = jnp.clip(action[0], -2.0, 2.0)
    wrapped = (angle + np.pi) % (2 * np.pi) - np.pi
    cost = wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2
    acceleration = 3 * gravity / (2 * length) * jnp.sin(angle) + 3 / (mass * length**2) * torque
    speed = jnp.clip(speed + acceleration * dt, -8.0, 8.0)
    return jnp.stack([angle + speed * dt, speed]), -cost, jnp.bool_(False)


def _reset_pendulum(key: Array) -> Array:
    high = jnp.array([np.pi, 1.0])
    return jax.random.uniform(key, (2,), minval=-high, maxval=high)


PROBLEMS = {
    "CartPole-v1": Problem(
        lambda key: jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), _cart_pole, lambda s: s, 2, 500
    ),
    "Acrobot-v1": Problem(
        lambda key: jax.random.uniform(key, (4,), minval=-0.1, maxval=0.1), _acrobot, _observe_acrobot, 3, 500
    ),
    "MountainCar-v0": Problem(
        lambda key: jnp.stack([jax.random.uniform(key, minval=-0.6, maxval=-0.4), 0.0]),
        _mountain_car,
        lambda s: s,
        3,
        200,
    ),
    "Pendulum-v1": Problem(
        _reset_pendulum,
        _pendulum,
        lambda s: jnp.stack([jnp.cos(s[0]), jnp.sin(s[0]), s[1]]),
        num_actions=1,
        time_limit=200,
        action_bound=2.0,
    ),
}


def make_jax_functions(env_id: str) -> tuple[Any, Any, int, float]:
    """Return the functions `reset` and `step` of an environment, its number of actions and their bound."""
    problem = PROBLEMS[env_id]

    def reset(key: Array) -> tuple[TimedState, Array]:
        physics = problem.reset(key)
        return TimedState(physics, jnp.int32(0)), problem.observe(physics)

    def step(state: TimedState, action: Array, key: Array) -> tuple[TimedState, Array, Array, Array, Array]:
        physics, reward, terminated = problem.step(state.physics, action)
        time = state.time + 1
        return TimedState(physics, time), problem.observe(physics), reward, terminated, time >= problem.time_limit

    return reset, step, problem.num_actions, problem.action_bound
