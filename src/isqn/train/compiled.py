"""The compiled loop: environment, replay and learning in one program, several seeds at once.

With a replay all seeds take their steps together, so whether an update or a refresh is due is the same for all of
them and costs no branch; streaming seeds run one after another. Each seed has its own keys: seed i of a batch draws as
seed i alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from isqn.agents.base import Agent, AgentState, target_schedule
from isqn.compiler import jit
from isqn.data.device_replay import DeviceReplay, Rows
from isqn.data.files import Description, read_file, sync, write_file
from isqn.envs.native import NativeEnvironment
from isqn.keys import device_key
from isqn.train import checkpoint
from isqn.train.functions import append_held_out, zero_totals
from isqn.train.probes import probe_columns, probe_features
from isqn.train.progress import Progress, duration
from isqn.train.record import EPISODE_COLUMNS
from isqn.train.session import Counters, Epoch, Session, metrics_columns, restore
from isqn.types import Array


class LoopState(NamedTuple):
    """State of one seed; the step is shared by all seeds."""

    agent: AgentState
    env: Any
    obs: Array
    rows: Any  # Rows; () in a checkpoint, which saves them apart
    episode: Array
    episode_return: Array
    episode_length: Array


class Ended(NamedTuple):
    """Episode statistics of each step of each seed."""

    over: Array
    episodic_return: Array
    length: Array


class Loop(NamedTuple):
    """Two programs over a batch of seeds: one makes their state, one takes some steps."""

    init: Callable[[Array], LoopState]  # seeds -> state, with a leading axis
    # state, first step; number of steps, whether to learn -> state, episodes, sums of metrics
    run: Callable[..., tuple[LoopState, Ended, Any]]


def make_loop(config: Any, agent: Agent, env: NativeEnvironment, replay: DeviceReplay) -> Loop:
    period, schedule = config.update_period, target_schedule(config, agent)

    def init(seed: Array) -> LoopState:
        env_state, frame = env.reset(device_key(seed, "environment", 0, 0))
        agent_state, obs = agent.observe(agent.init(seed), frame)
        zero = jnp.int32(0)
        return LoopState(agent_state, env_state, obs, replay.init(), zero, jnp.float32(0), zero)

    def act_and_store(state: LoopState, time: Array) -> tuple[LoopState, Ended]:
        """Take the step from `time` to `time` + 1."""
        seed = state.agent.seed
        action, explored = agent.act(state.agent, state.obs, config.epsilon(time), time, state.episode)
        step_key, reset_key = jax.random.split(device_key(seed, "environment", 1, time))
        env_state, frame, reward, terminated, truncated = env.step(state.env, action, step_key)
        length = state.episode_length + 1
        total = state.episode_return + reward
        over = terminated | truncated | (length >= config.max_episode_steps)
        seen, next_obs = agent.observe(state.agent, frame, reward, over)
        row = Rows(state.obs, action, reward, terminated, over, next_obs, explored)
        begun, first_frame = env.reset(reset_key)
        again = (begun, *agent.observe(seen, first_frame))
        env_state, agent_state, obs = jax.tree.map(
            lambda new, old: jnp.where(over, new, old), again, (env_state, seen, next_obs)
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

    def learn(state: LoopState, step: Array) -> tuple[LoopState, Any]:
        """Do the update that is due after `step` steps."""
        updates = step // period
        if agent.is_streaming:
            batch = replay.latest(state.rows, step)
        else:
            batch = replay.sample(state.rows, step, device_key(state.agent.seed, "replay", updates), config.batch_size)
        if config.analysis:
            key = device_key(state.agent.seed, "held-out", updates)
            batch = append_held_out(batch, replay.sample(state.rows, step, key, config.held_out_size))
        new, metrics = agent.update(state.agent, batch)
        return state._replace(agent=new), metrics

    def on_agents(function: Callable[[AgentState], AgentState], due: Array, state: LoopState) -> LoopState:
        new = jax.lax.cond(due, jax.vmap(function), lambda unchanged: unchanged, state.agent)
        return state._replace(agent=new)

    def cycle(
        learning: bool, refreshes: bool, carry: tuple[LoopState, Any], start: Array
    ) -> tuple[tuple[LoopState, Any], Ended]:
        """Take `update_period` steps from `start`, then learn: the body of Algorithm 1."""
        state, totals = carry
        times = start + jnp.arange(period)
        state, ended = jax.lax.scan(jax.vmap(act_and_store, in_axes=(0, None)), state, times)
        if learning:
            step = start + period
            if schedule.sync_period:  # a sync that was due between two updates takes effect before the second
                state = on_agents(agent.sync, schedule.was_sync_due(start, step), state)
            state, metrics = jax.vmap(learn, in_axes=(0, None))(state, step)
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
        batch = env.spec.batch(config.sampled_batch_size)
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

    def stretch(state: LoopState, first_step: int, *, num_steps: int, learning: bool) -> Any:
        whole = learning and bool(schedule.is_refresh_due(first_step)) and bool(schedule.is_refresh_due(num_steps))
        return program(state, first_step, num_steps=num_steps, learning=learning, whole_periods=whole)

    return Loop(jit(jax.vmap(init)), stretch)


@dataclass
class SeedCounters(Counters):
    """Position of one seed, beside its state on the device."""

    step: int = 0
    epoch_returns: list[float] = field(default_factory=list)


def train(
    config: Any,
    run_dirs: list[Path],
    agent: Agent,
    env: NativeEnvironment,
    replay: DeviceReplay,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Iterator[list[Epoch]]:
    """Train all seeds from their newest common checkpoint, or from the start; yield the results of each epoch."""
    progress = progress or Progress(config.total_timesteps, enabled=False)
    loop, num_seeds = make_loop(config, agent, env, replay), len(run_dirs)
    seeds = jnp.arange(config.seed, config.seed + num_seeds)
    totals = zero_totals(agent, config, env.spec)
    columns = metrics_columns(totals, probe_columns(config))
    totals = jax.tree.map(lambda m: jnp.zeros((num_seeds, *m.shape), m.dtype), totals)
    if found := _restore(run_dirs, jax.eval_shape(loop.init, seeds), totals, replay):
        state, totals, counts, saved_files, lengths = found
        progress.say(f"goes on after {counts[0].step:,} steps")
    else:
        state, counts, saved_files = loop.init(seeds), [SeedCounters() for _ in run_dirs], [[] for _ in run_dirs]
        lengths = [{} for _ in run_dirs]
    step = counts[0].step
    sessions = [
        Session(
            config.of_seed(index),
            run_dir,
            count,
            {"episodes": EPISODE_COLUMNS, "metrics": columns},
            length,
            progress,
            first_step=step,
            frames_per_step=env.spec.frames_per_step,
        )
        for index, (run_dir, count, length) in enumerate(zip(run_dirs, counts, lengths, strict=True))
    ]

    def save() -> None:
        for index, session in enumerate(sessions):
            mine, sums = jax.tree.map(np.asarray, _one(state, index)), _one(totals, index)
            counts[index].step = step

            def about(index: int = index, mine: LoopState = mine) -> dict[str, Any]:
                folder = run_dirs[index] / "replay"
                saved_files[index] = _save_rows(folder, mine.rows, saved_files[index], step, replay.capacity)
                return {"replay": {"files": saved_files[index]}}

            def arrays(mine: LoopState = mine, sums: Any = sums) -> dict[str, np.ndarray]:
                return checkpoint.flatten({**mine._replace(rows=())._asdict(), "totals": sums})

            session.save(step, mine.agent, sums, arrays, about, tidy=False)
        for run_dir in run_dirs:  # an old checkpoint goes only when every seed has the new one
            checkpoint.tidy(run_dir)

    compiled_lengths: set[int] = set()  # stretches whose time does not include the compiler
    has_estimate = False
    try:
        while step < config.total_timesteps:
            epoch = step // config.epoch_steps
            until, learning = _next_stop(config, step)

            # Act and learn.
            began = time.monotonic()
            state, ended, sums = loop.run(state, step, num_steps=until - step, learning=learning)
            jax.block_until_ready(ended)
            if learning:
                if not has_estimate and (until - step) in compiled_lengths:
                    has_estimate = True
                    left = (config.total_timesteps - until) * (time.monotonic() - began) / (until - step)
                    progress.say(f"about {duration(left)} left on this machine")
                compiled_lengths.add(until - step)
                totals = jax.tree.map(jnp.add, totals, sums)
                for count in counts:
                    count.logged_updates += (until - step) // config.update_period

            # Record.
            for index, session in enumerate(sessions):
                _record_episodes(session, counts[index], _one(ended, index, axis=1), step, config.epoch_steps)
            step = until
            if step % config.row_length == 0:
                for index, session in enumerate(sessions):
                    mine = _one(state.agent, index)
                    means, _ = session.average(_one(totals, index), mine, step)
                    if means and config.analysis:
                        key = device_key(mine.seed, "probe", step)
                        states = replay.sample(_one(state.rows, index), step, key, config.analysis_samples)
                        means |= probe_features(agent, mine, states)
                    row = {"frame": step * env.spec.frames_per_step, "updates": _updates(config, step)}
                    row |= {"epsilon": float(config.epsilon(step - 1)), **means}
                    session.add_row(step, row, steps_per_step=num_seeds)
                totals = jax.tree.map(jnp.zeros_like, totals)
            sessions[-1].show_progress(step)

            stopping = should_stop()
            if step == config.epoch_end(epoch):
                results = []
                for index, session in enumerate(sessions):
                    result = Epoch(epoch, step, counts[index].epoch_returns)
                    counts[index].epoch_returns = []
                    session.end_epoch(result, _one(state.agent, index))
                    results.append(result)
                save()
                yield results
            elif stopping or sessions[0].is_checkpoint_due():
                save()
            if stopping and step < config.total_timesteps:
                raise sessions[0].interrupted(f"at step {step:,}")
    finally:
        for session in sessions:
            session.close()


def _next_stop(config: Any, step: int) -> tuple[int, bool]:
    """Return where the next stretch ends, in whole updates, and whether it learns."""
    begins = config.learning_starts // config.update_period * config.update_period
    stops = [
        (step // config.row_length + 1) * config.row_length,
        config.epoch_end(step // config.epoch_steps),
    ]
    if step < begins:
        stops.append(begins)
    return min(stops), step >= begins


def _updates(config: Any, step: int) -> int:
    return max(0, step // config.update_period - config.learning_starts // config.update_period)


def _one(tree: Any, index: int, axis: int = 0) -> Any:
    """Return the part of one seed."""
    return jax.tree.map(lambda x: jnp.take(x, index, axis), tree)


def _record_episodes(session: Session, count: SeedCounters, ended: Ended, first_step: int, epoch_steps: int) -> None:
    """Record the episodes that ended in a stretch of steps; an episode belongs to the epoch in which it ends."""
    for place in np.flatnonzero(ended.over):
        step = first_step + int(place) + 1
        episodic_return = float(ended.episodic_return[place])
        session.add_episode((step - 1) // epoch_steps, step, episodic_return, int(ended.length[place]))
        count.epoch_returns.append(episodic_return)


def _save_rows(folder: Path, rows: Rows, files: list[Description], step: int, capacity: int) -> list[Description]:
    """Write the rows added since the last save; name only the files that still hold some of the last `capacity`."""
    folder.mkdir(parents=True, exist_ok=True)
    since = max(files[-1]["until"] if files else 0, step - capacity)
    if step > since:
        places = np.arange(since, step) % capacity
        content = safetensors.numpy.save({name: ring[places] for name, ring in rows._asdict().items()})
        files = [*files, {**write_file(folder, f"rows-{step:012d}", content), "since": since, "until": step}]
        sync(folder)
    return [file for file in files if file["until"] > step - capacity]


def _restore(run_dirs: list[Path], template: LoopState, totals: Any, replay: DeviceReplay) -> Any:
    """Return the newest state that all seeds have whole, as one batch."""
    batched = {**template._replace(rows=())._asdict(), "totals": totals}
    one_seed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batched)

    def load(run_dir: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> Rows:
        return load_rows(run_dir / "replay", manifest["replay"]["files"], replay)

    if not (found := restore(run_dirs, one_seed, load)):
        return None
    states = [{**seed.tree, "rows": seed.extra} for seed in found]
    tree = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    totals = tree.pop("totals")
    counts = [seed.counters(SeedCounters) for seed in found]
    files, lengths = [s.manifest["replay"]["files"] for s in found], [s.manifest["tables"] for s in found]
    return LoopState(**tree), totals, counts, files, lengths


def load_rows(folder: Path, files: list[Description], replay: DeviceReplay) -> Rows:
    rows = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(replay.init))
    for file in files:
        places = np.arange(file["since"], file["until"]) % replay.capacity
        for name, array in safetensors.numpy.load(read_file(folder, file)).items():
            getattr(rows, name)[places] = array
    return rows
