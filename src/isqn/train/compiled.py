"""The compiled loop: environment, replay and learning in one program, several seeds at once.

All seeds take their steps together, so whether an update or a refresh is due is the same for all of them
and costs no branch. Each seed has its own stream of keys: seed i of a batch is seed i alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isqn.agents.q_learning import Agent, AgentState
from isqn.data.device_replay import DeviceReplay, Rows
from isqn.envs.native import NativeEnvironment
from isqn.experiments.config import Config
from isqn.keys import device_key
from isqn.types import Array


class LoopState(NamedTuple):
    """Everything of one seed that a restart needs, but for the step that all seeds share."""

    agent: AgentState
    env: Any
    obs: Array
    rows: Rows
    episode: Array
    episode_return: Array
    episode_length: Array


class Ended(NamedTuple):
    """What each step of each seed says about its episode."""

    over: Array
    episodic_return: Array
    length: Array


class Loop(NamedTuple):
    """Two programs over a batch of seeds: one that begins, one that takes some steps."""

    init: Callable[[Array], LoopState]  # seeds -> state, with a leading axis
    run: Callable[
        ..., tuple[LoopState, Ended, Any]
    ]  # state, first step; number of steps, learning -> state, episodes, metric sums


def make_loop(config: Config, agent: Agent, env: NativeEnvironment, replay: DeviceReplay) -> Loop:
    scheme, period = config.target_scheme, config.update_period

    def init(seed: Array) -> LoopState:
        env_state, obs = env.reset(device_key(seed, "environment", 0, 0))
        zero = jnp.int32(0)
        return LoopState(agent.init(seed), env_state, obs, replay.init(), zero, jnp.float32(0), zero)

    def act_and_store(state: LoopState, time: Array) -> tuple[LoopState, Ended]:
        """The step from `time` to `time` + 1."""
        seed = state.agent.seed
        action = agent.act(state.agent, state.obs, config.epsilon(time), time, state.episode)
        step_key, reset_key = jax.random.split(device_key(seed, "environment", 1, time))
        env_state, next_obs, reward, terminated, truncated = env.step(state.env, action, step_key)
        length = state.episode_length + 1
        total = state.episode_return + reward
        over = terminated | truncated | (length >= config.max_episode_steps)
        row = Rows(state.obs, action, reward, terminated, over, next_obs)
        begun, first_obs = env.reset(reset_key)
        env_state, obs = jax.tree.map(
            lambda new, old: jnp.where(over, new, old), (begun, first_obs), (env_state, next_obs)
        )
        state = state._replace(
            env=env_state,
            obs=obs,
            rows=replay.add(state.rows, time, row),
            episode=state.episode + over,
            episode_return=jnp.where(over, 0.0, total),
            episode_length=jnp.where(over, 0, length),
        )
        return state, Ended(over, total, length)

    def learn(state: LoopState, step: Array) -> tuple[LoopState, Any]:
        """The update that is due after `step` steps."""
        updates = step // period
        key = device_key(state.agent.seed, "replay", updates)
        batch = replay.sample(state.rows, step, key, config.batch_size)
        if config.analysis:
            key = device_key(state.agent.seed, "held-out", updates)
            held_out = replay.sample(state.rows, step, key, config.batch_size)
            batch = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), batch, held_out)
        new, metrics = agent.update(state.agent, batch)
        return state._replace(agent=new), metrics

    def on_agents(function: Callable[[AgentState], AgentState], due: Array, state: LoopState) -> LoopState:
        new = jax.lax.cond(due, jax.vmap(function), lambda unchanged: unchanged, state.agent)
        return state._replace(agent=new)

    def cycle(learning: bool, carry: tuple[LoopState, Any], start: Array) -> tuple[tuple[LoopState, Any], Ended]:
        """`update_period` steps from `start`, then what is due: the body of Algorithm 1."""
        state, totals = carry
        times = start + jnp.arange(period)
        state, ended = jax.lax.scan(jax.vmap(act_and_store, in_axes=(0, None)), state, times)
        if learning:
            step = start + period
            if scheme.num_copies > 1:  # a sync that fell between two updates takes effect before the second
                since = (step - 1) // config.target_sync_period > start // config.target_sync_period
                state = on_agents(agent.sync, since, state)
            state, metrics = jax.vmap(learn, in_axes=(0, None))(state, step)
            totals = jax.tree.map(jnp.add, totals, metrics)
            refreshed = step % config.target_update_period == 0
            if scheme.refreshes:
                state = on_agents(agent.refresh, refreshed, state)
            if scheme.num_copies > 1:
                state = on_agents(agent.sync, ~refreshed & (step % config.target_sync_period == 0), state)
        return (state, totals), ended

    @partial(jax.jit, static_argnames=("num_steps", "learning"), donate_argnums=0)
    def run(state: LoopState, first_step: Array, *, num_steps: int, learning: bool) -> tuple[LoopState, Ended, Any]:
        batch = env.spec.batch(config.sampled_batch_size)
        _, metrics = jax.eval_shape(jax.vmap(agent.update, in_axes=(0, None)), state.agent, batch)
        totals = jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metrics)
        starts = first_step + jnp.arange(0, num_steps, period)
        (state, totals), ended = jax.lax.scan(partial(cycle, learning), (state, totals), starts)
        return state, jax.tree.map(lambda x: x.reshape(num_steps, -1), ended), totals

    return Loop(jax.jit(jax.vmap(init)), run)
