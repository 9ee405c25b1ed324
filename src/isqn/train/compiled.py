"""The compiled loop: environment, replay buffer and learning in one program, several seeds at once.

With a replay buffer all seeds take their steps together, so whether an update or a refresh is due is the same for all
of them and needs no branch; streaming seeds run one after another. Each seed has its own keys: seed i of a batch draws
the same numbers as seed i alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import Agent, AgentState, target_schedule
from isqn.compiler import jit
from isqn.data.device_replay import DeviceReplay, Rows
from isqn.envs.native import NativeEnvironment, to_native_action
from isqn.keys import device_key
from isqn.train.functions import append_held_out, zero_totals
from isqn.train.probes import probe_columns, probe_features
from isqn.train.progress import Control, Progress, duration
from isqn.train.seeds import Ended, SavedSeed, SeedCounters, SeedSessions, load_rows, select_seed
from isqn.train.session import Epoch, metrics_columns, restore
from isqn.types import Array


class LoopState(NamedTuple):
    """State of one seed; the step is shared by all seeds."""

    agent: AgentState
    env: Any
    obs: Array
    rows: Any  # Rows; () in a checkpoint, which saves them in files of their own
    episode: Array
    episode_return: Array
    episode_length: Array


class Loop(NamedTuple):
    """Two programs over a batch of seeds: one makes their initial state, one takes some steps."""

    init: Callable[[Array], LoopState]  # seeds -> state, with a leading axis
    # state, first step; number of steps, whether to learn -> state, episodes, sums of metrics
    run: Callable[..., tuple[LoopState, Ended, Any]]


def make_act_and_store(
    config: Any, agent: Agent, env: NativeEnvironment, replay: DeviceReplay
) -> Callable[[LoopState, Array], tuple[LoopState, Ended]]:
    """Return a function that takes the step from `time` to `time` + 1."""

    def act_and_store(state: LoopState, time: Array) -> tuple[LoopState, Ended]:
        seed = state.agent.seed
        action, explored = agent.act(state.agent, state.obs, config.epsilon(time), time, state.episode)
        step_key, reset_key = jax.random.split(device_key(seed, "environment", 1, time))
        env_action = to_native_action(env.spec, action)
        env_state, frame, reward, terminated, truncated = env.step(state.env, env_action, step_key)
        length = state.episode_length + 1
        total = state.episode_return + reward
        over = terminated | truncated | (length >= config.max_episode_steps)
        agent_state, next_obs = agent.observe(state.agent, frame, reward, over)
        row = Rows(state.obs, action, reward, terminated, over, next_obs, explored)
        first_env_state, first_frame = env.reset(reset_key)
        after_reset = (first_env_state, *agent.observe(agent_state, first_frame))
        env_state, agent_state, obs = jax.tree.map(
            lambda new, old: jnp.where(over, new, old), after_reset, (env_state, agent_state, next_obs)
        )
        state = state._replace(
            agent=agent_state,
            env=env_state,
            obs=obs,
            rows=replay.add(state.rows, time, row),
            episode=state.episode + over,
            episode_return=jnp.where(over, 0.0, total),
            episode_length=jnp.where(over, 0, length),
        )
        return state, Ended(over, total, length)

    return act_and_store


def make_update(config: Any, agent: Agent, replay: DeviceReplay) -> Callable[[LoopState, Array], tuple[LoopState, Any]]:
    """Return a function that does the update that is due after `step` steps."""

    size = config.update_batch_size

    def update(state: LoopState, step: Array) -> tuple[LoopState, Any]:
        updates = step // config.update_period
        if agent.is_streaming:
            batch = replay.latest(state.rows, step)
        else:
            batch = replay.sample(state.rows, step, device_key(state.agent.seed, "replay", updates), size)
        if config.held_out_size:
            key = device_key(state.agent.seed, "held-out", updates)
            batch = append_held_out(batch, replay.sample(state.rows, step, key, config.held_out_size))
        agent_state, metrics = agent.update(state.agent, batch)
        return state._replace(agent=agent_state), metrics

    return update


def make_loop(config: Any, agent: Agent, env: NativeEnvironment, replay: DeviceReplay) -> Loop:
    period, schedule = config.update_period, target_schedule(config, agent)
    act_and_store, update = make_act_and_store(config, agent, env, replay), make_update(config, agent, replay)

    def init(seed: Array) -> LoopState:
        env_state, frame = env.reset(device_key(seed, "environment", 0, 0))
        agent_state, obs = agent.observe(agent.init(seed), frame)
        zero = jnp.int32(0)
        return LoopState(agent_state, env_state, obs, replay.init(), zero, jnp.float32(0), zero)

    def on_agents(function: Callable[[AgentState], AgentState], due: Array, state: LoopState) -> LoopState:
        agents = jax.lax.cond(due, jax.vmap(function), lambda unchanged: unchanged, state.agent)
        return state._replace(agent=agents)

    def cycle(
        learning: bool, refreshes: bool, carry: tuple[LoopState, Any], start: Array
    ) -> tuple[tuple[LoopState, Any], Ended]:
        """Take `update_period` steps from `start`, then update and refresh: the body of Algorithm 1."""
        state, totals = carry
        times = start + jnp.arange(period)
        state, ended = jax.lax.scan(jax.vmap(act_and_store, in_axes=(0, None)), state, times)
        if learning:
            step = start + period
            if schedule.sync_period:  # a sync that was due between two updates takes effect before the second
                state = on_agents(agent.sync, schedule.was_sync_due(start, step), state)
            state, metrics = jax.vmap(update, in_axes=(0, None))(state, step)
            totals = jax.tree.map(jnp.add, totals, metrics)
            if refreshes:
                state = on_agents(agent.refresh, schedule.is_refresh_due(step), state)
            if schedule.sync_period:
                state = on_agents(agent.sync, schedule.is_sync_due(step), state)
        return (state, totals), ended

    def target_period(carry: tuple[LoopState, Any], start: Array) -> tuple[tuple[LoopState, Any], Ended]:
        """Take T steps, then refresh: without a branch, which would copy the whole agent if none is due."""
        starts = start + jnp.arange(0, schedule.refresh_period, period)
        (state, totals), ended = jax.lax.scan(partial(cycle, True, False), carry, starts)
        return (state._replace(agent=jax.vmap(agent.refresh)(state.agent)), totals), ended

    def run(
        state: LoopState, first_step: Array, *, num_steps: int, learning: bool, whole_periods: bool
    ) -> tuple[LoopState, Ended, Any]:
        batch = env.spec.batch_shapes(config.sampled_batch_size)
        _, metrics = jax.eval_shape(jax.vmap(agent.update, in_axes=(0, None)), state.agent, batch)
        totals = jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metrics)
        carry, length = (state, totals), schedule.refresh_period if whole_periods else period
        body = target_period if whole_periods else partial(cycle, learning, agent.refreshes)
        (state, totals), ended = jax.lax.scan(body, carry, first_step + jnp.arange(0, num_steps, length))
        return state, jax.tree.map(lambda x: x.reshape(num_steps, -1), ended), totals

    def one_by_one(state: LoopState, first_step: Array, **settings: Any) -> tuple[LoopState, Ended, Any]:
        """Run streaming seeds one after another: each step reads all traces, and one seed's stay in the cache."""
        alone = jax.tree.map(lambda x: x[:, None], state)
        state, ended, totals = jax.lax.map(lambda seed: run(seed, first_step, **settings), alone)
        state, totals = jax.tree.map(lambda x: x[:, 0], (state, totals))
        return state, jax.tree.map(lambda x: x[:, :, 0].T, ended), totals

    static = ("num_steps", "learning", "whole_periods")
    program = jit(one_by_one if agent.is_streaming else run, static_argnames=static, donate_argnums=0)

    def run_stretch(state: LoopState, first_step: int, *, num_steps: int, learning: bool) -> Any:
        whole = learning and bool(schedule.is_refresh_due(first_step)) and bool(schedule.is_refresh_due(num_steps))
        return program(state, first_step, num_steps=num_steps, learning=learning, whole_periods=whole)

    return Loop(jit(jax.vmap(init)), run_stretch)


def train(
    config: Any,
    run_dirs: list[Path],
    agent: Agent,
    env: NativeEnvironment,
    replay: DeviceReplay,
    control: Control,
) -> Iterator[list[Epoch]]:
    """Train all seeds from their newest common checkpoint, or from the start; yield the results of each epoch."""
    loop = make_loop(config, agent, env, replay)
    state, totals, step, sessions = _open(
        config, run_dirs, loop, zero_totals(agent, config, env.spec), replay, control.progress
    )
    time_left = TimeLeft(config.total_timesteps, control.progress)

    def probe(index: int, agent_state: AgentState) -> dict[str, float]:
        if not config.analysis:
            return {}
        key = device_key(agent_state.seed, "probe", step)
        states = replay.sample(select_seed(state.rows, index), step, key, config.analysis_samples)
        return probe_features(agent, agent_state, states)

    try:
        while step < config.total_timesteps:
            epoch = step // config.epoch_steps
            until, learning = _next_stop(config, step)

            # Act, store, update and refresh.
            began = time.monotonic()
            state, ended, sums = loop.run(state, step, num_steps=until - step, learning=learning)
            jax.block_until_ready(ended)
            if learning:
                time_left.say_once(step, until, time.monotonic() - began)
                totals = jax.tree.map(jnp.add, totals, sums)
                sessions.count_updates((until - step) // config.update_period * config.updates_per_step)

            # Record.
            sessions.add_episodes(ended, step)
            step = until
            if step % config.row_length == 0:
                sessions.add_rows(step, _updates(config, step), state.agent, totals, probe)
                totals = jax.tree.map(jnp.zeros_like, totals)
            sessions.show_progress(step)

            stopping = control.should_stop()
            if step == config.epoch_end(epoch):
                results = sessions.end_epoch(epoch, step, state.agent)
                sessions.save(step, state, totals)
                yield results
            elif stopping or sessions.first.is_checkpoint_due():
                sessions.save(step, state, totals)
            if stopping and step < config.total_timesteps:
                raise sessions.first.interrupted(f"at step {step:,}")
    finally:
        sessions.close()


def _open(
    config: Any, run_dirs: list[Path], loop: Loop, seed_totals: Any, replay: DeviceReplay, progress: Progress
) -> tuple[LoopState, Any, int, SeedSessions]:
    """Return the state, totals, step and sessions of the newest common checkpoint, or of a new run."""
    seeds = jnp.arange(config.seed, config.seed + len(run_dirs))
    columns = metrics_columns(seed_totals, probe_columns(config))
    totals = jax.tree.map(lambda m: jnp.zeros((len(seeds), *m.shape), m.dtype), seed_totals)
    if restored := _restore(run_dirs, jax.eval_shape(loop.init, seeds), totals, replay):
        state, totals, saved = restored
        progress.say(f"resumed after {saved[0].counters.step:,} steps")
    else:
        state, saved = loop.init(seeds), [SavedSeed() for _ in run_dirs]
    sessions = SeedSessions(config, run_dirs, saved, columns, progress, replay.spec.frames_per_step, replay.capacity)
    return state, totals, saved[0].counters.step, sessions


def _restore(
    run_dirs: list[Path], template: LoopState, totals: Any, replay: DeviceReplay
) -> tuple[LoopState, Any, list[SavedSeed]] | None:
    """Return the newest state that is undamaged for all seeds, as one batch."""
    batched = {**template._replace(rows=())._asdict(), "totals": totals}
    one_seed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batched)

    def load(run_dir: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> Rows:
        return load_rows(run_dir / "replay", manifest["replay"]["files"], replay)

    if not (restored := restore(run_dirs, one_seed, SeedCounters, load)):
        return None
    states = [{**seed.tree, "rows": seed.extra} for seed in restored]
    tree = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    totals = tree.pop("totals")
    saved = [SavedSeed(seed.counters, seed.manifest["replay"]["files"], seed.table_lengths) for seed in restored]
    return LoopState(**tree), totals, saved


class TimeLeft:
    """Estimate of the time that a run needs, announced once."""

    def __init__(self, total_steps: int, progress: Progress):
        self._total_steps, self._progress = total_steps, progress
        self._compiled_lengths: set[int] = set()  # a stretch of a new length is compiled first
        self._is_said = False

    def say_once(self, step: int, until: int, seconds: float) -> None:
        """Say the time left after the first stretch whose `seconds` do not include the compiler."""
        if not self._is_said and (until - step) in self._compiled_lengths:
            self._is_said = True
            left = (self._total_steps - until) * seconds / (until - step)
            if left >= 1:
                self._progress.say(f"about {duration(left)} left on this machine")
        self._compiled_lengths.add(until - step)


def _next_stop(config: Any, step: int) -> tuple[int, bool]:
    """Return where the next stretch ends, in whole updates, and whether it learns."""
    first_learning_step = config.learning_starts // config.update_period * config.update_period
    stops = [
        (step // config.row_length + 1) * config.row_length,
        config.epoch_end(step // config.epoch_steps),
    ]
    if step < first_learning_step:
        stops.append(first_learning_step)
    return min(stops), step >= first_learning_step


def _updates(config: Any, step: int) -> int:
    period = config.update_period
    return max(0, step // period - config.learning_starts // period) * config.updates_per_step
