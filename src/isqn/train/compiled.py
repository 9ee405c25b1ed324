"""The compiled loop: environment, replay and learning in one program, several seeds at once.

With a replay all seeds take their steps together, so whether an update or a refresh is due is the same for all of
them and costs no branch; the seeds of a stream take turns. Each has its own keys: seed i of a batch is seed i alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from isqn.agents.q_learning import Agent, AgentState
from isqn.analysis.probes import probe_columns, probe_features
from isqn.compiler import jit
from isqn.data.device_replay import DeviceReplay, Rows
from isqn.data.files import DamagedFile, Description, read_file, sync, write_file
from isqn.envs.native import NativeEnvironment
from isqn.experiments.config import Config
from isqn.keys import device_key
from isqn.train import checkpoint
from isqn.train.loop import Epoch, empty_totals, means, metrics_columns, require_finite, save_best, with_held_out
from isqn.train.progress import Progress, duration, memory_mb
from isqn.train.record import EPISODE_COLUMNS, Table, Tracker, require_tables
from isqn.types import Array, Interrupted, UserError


class LoopState(NamedTuple):
    """Everything of one seed that a restart needs, but for the step that all seeds share."""

    agent: AgentState
    env: Any
    obs: Array
    rows: Any  # Rows; () where they are saved apart
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
        env_state, frame = env.reset(device_key(seed, "environment", 0, 0))
        agent_state, obs = agent.observe(agent.init(seed), frame)
        zero = jnp.int32(0)
        return LoopState(agent_state, env_state, obs, replay.init(), zero, jnp.float32(0), zero)

    def act_and_store(state: LoopState, time: Array) -> tuple[LoopState, Ended]:
        """The step from `time` to `time` + 1."""
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
        """The update that is due after `step` steps."""
        updates = step // period
        if agent.streams:
            batch = replay.latest(state.rows, step)
        else:
            batch = replay.sample(state.rows, step, device_key(state.agent.seed, "replay", updates), config.batch_size)
        if config.analysis:
            key = device_key(state.agent.seed, "held-out", updates)
            batch = with_held_out(batch, replay.sample(state.rows, step, key, config.held_out_size))
        new, metrics = agent.update(state.agent, batch)
        return state._replace(agent=new), metrics

    def on_agents(function: Callable[[AgentState], AgentState], due: Array, state: LoopState) -> LoopState:
        new = jax.lax.cond(due, jax.vmap(function), lambda unchanged: unchanged, state.agent)
        return state._replace(agent=new)

    def cycle(
        learning: bool, refreshes: bool, carry: tuple[LoopState, Any], start: Array
    ) -> tuple[tuple[LoopState, Any], Ended]:
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
            if refreshes:
                state = on_agents(agent.refresh, refreshed, state)
            if scheme.num_copies > 1:
                state = on_agents(agent.sync, ~refreshed & (step % config.target_sync_period == 0), state)
        return (state, totals), ended

    def target_period(carry: tuple[LoopState, Any], start: Array) -> tuple[tuple[LoopState, Any], Ended]:
        """T steps and a refresh: without a branch, which would copy the whole agent where none is due."""
        starts = start + jnp.arange(0, config.target_update_period, period)
        (state, totals), ended = jax.lax.scan(partial(cycle, True, False), carry, starts)
        return (state._replace(agent=jax.vmap(agent.refresh)(state.agent)), totals), ended

    def run(
        state: LoopState, first_step: Array, *, num_steps: int, learning: bool, whole_periods: bool
    ) -> tuple[LoopState, Ended, Any]:
        batch = env.spec.batch(config.sampled_batch_size)
        _, metrics = jax.eval_shape(jax.vmap(agent.update, in_axes=(0, None)), state.agent, batch)
        totals = jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metrics)
        carry, length = (state, totals), config.target_update_period if whole_periods else period
        body = target_period if whole_periods else partial(cycle, learning, agent.refreshes)
        (state, totals), ended = jax.lax.scan(body, carry, first_step + jnp.arange(0, num_steps, length))
        return state, jax.tree.map(lambda x: x.reshape(num_steps, -1), ended), totals

    def in_turn(state: LoopState, first_step: Array, **settings: Any) -> tuple[LoopState, Ended, Any]:
        """Seed by seed: each step of a stream goes through all of its traces; those of one seed stay in the cache."""
        alone = jax.tree.map(lambda x: x[:, None], state)
        state, ended, totals = jax.lax.map(lambda seed: run(seed, first_step, **settings), alone)
        state, totals = jax.tree.map(lambda x: x[:, 0], (state, totals))
        return state, jax.tree.map(lambda x: x[:, :, 0].T, ended), totals

    static = ("num_steps", "learning", "whole_periods")
    program = jit(in_turn if agent.streams else run, static_argnames=static, donate_argnums=0)

    def stretch(state: LoopState, first_step: int, *, num_steps: int, learning: bool) -> Any:
        length = config.target_update_period
        whole = learning and agent.refreshes and first_step % length == num_steps % length == 0
        return program(state, first_step, num_steps=num_steps, learning=learning, whole_periods=whole)

    return Loop(jit(jax.vmap(init)), stretch)


@dataclass
class Counters:
    """Where one seed is, beyond its state on the device; saved as JSON."""

    step: int = 0
    episode: int = 0
    seconds: float = 0.0
    logged_updates: int = 0  # updates summed in the totals that the next row of metrics averages
    best: float | None = None
    epoch_returns: list[float] = field(default_factory=list)


def train(
    config: Config,
    run_dirs: list[Path],
    agent: Agent,
    env: NativeEnvironment,
    replay: DeviceReplay,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Iterator[list[Epoch]]:
    """Train all seeds from their newest common checkpoint, or from the start; yield each epoch's results."""
    progress = progress or Progress(config.total_timesteps, enabled=False)
    loop = make_loop(config, agent, env, replay)
    seeds = jnp.arange(config.seed, config.seed + len(run_dirs))
    totals = empty_totals(agent, config, env.spec)
    columns = metrics_columns(totals, probe_columns(config))
    totals = jax.tree.map(lambda m: jnp.zeros((len(run_dirs), *m.shape), m.dtype), totals)
    restored = _restore(run_dirs, jax.eval_shape(loop.init, seeds), totals, replay)
    if restored:
        state, totals, counts, saved_files, lengths = restored
        progress.say(f"goes on after {counts[0].step:,} steps")
    else:
        state = loop.init(seeds)
        counts, saved_files = [Counters() for _ in run_dirs], [[] for _ in run_dirs]
        lengths = [{"episodes": None, "metrics": None} for _ in run_dirs]
    kept = list(zip(run_dirs, lengths, strict=True))
    episodes = [Table(run_dir / "episodes.csv", EPISODE_COLUMNS, length["episodes"]) for run_dir, length in kept]
    metrics = [Table(run_dir / "metrics.csv", columns, length["metrics"]) for run_dir, length in kept]
    trackers = [Tracker(config.of_seed(index), d) for index, d in enumerate(run_dirs)]
    step = counts[0].step
    last_return: float | None = None
    last_loss: float | None = None
    clock = time.monotonic() - counts[0].seconds
    saved_at = time.monotonic()
    row_started, row_step = time.monotonic(), step
    compiled_lengths: set[int] = set()  # stretches whose time is not that of the compiler
    estimated = False

    def save() -> None:
        for index, run_dir in enumerate(run_dirs):
            mine = jax.tree.map(np.asarray, _one(state, index))
            require_finite(mine.agent.params, run_dir, step)
            counts[index].step, counts[index].seconds = step, time.monotonic() - clock
            saved_files[index] = _save_rows(run_dir / "replay", mine.rows, saved_files[index], step, replay.capacity)
            for table in (episodes[index], metrics[index]):
                table.flush_to_disk()
            manifest = {
                "config": config.of_seed(index).kept(),
                "counters": asdict(counts[index]),
                "replay": {"files": saved_files[index]},
                "tables": {"episodes": episodes[index].length, "metrics": metrics[index].length},
            }
            arrays = checkpoint.flatten({**mine._replace(rows=())._asdict(), "totals": _one(totals, index)})
            checkpoint.write(checkpoint.folder_of(run_dir, step), arrays, manifest)
        for run_dir in run_dirs:  # only when every seed has the new one may an old one go
            checkpoint.tidy(run_dir)

    try:
        while step < config.total_timesteps:
            epoch = step // config.epoch_steps
            until, learning = _next_stop(config, step)
            began = time.monotonic()
            state, ended, sums = loop.run(state, step, num_steps=until - step, learning=learning)
            jax.block_until_ready(ended)
            if learning and not estimated and (until - step) in compiled_lengths:
                estimated = True
                left = (config.total_timesteps - until) * (time.monotonic() - began) / (until - step)
                progress.say(f"about {duration(left)} left on this machine")
            if learning:
                compiled_lengths.add(until - step)
            for index in range(len(run_dirs)):
                mine = _one(ended, index, axis=1)
                for episode in _record_episodes(episodes[index], mine, step, counts[index], config, clock):
                    trackers[index].log({"return": episode["return"], "length": episode["length"]}, episode["step"])
                    last_return = episode["return"]
            if learning:
                totals = jax.tree.map(jnp.add, totals, sums)
                for count in counts:
                    count.logged_updates += (until - step) // config.update_period
            step = until

            if step % config.row_length == 0:
                now = time.monotonic()
                updates = max(0, step // config.update_period - config.learning_starts // config.update_period)
                for index in range(len(run_dirs)):
                    row: dict[str, Any] = {
                        "step": step,
                        "frame": step,
                        "updates": updates,
                        "epsilon": float(config.epsilon(step - 1)),
                        "steps_per_second": (step - row_step) * len(run_dirs) / (now - row_started),
                        "memory_mb": memory_mb(),
                        "seconds": now - clock,
                    }
                    if counts[index].logged_updates:
                        mine, sums = _one(state.agent, index), _one(totals, index)
                        require_finite((mine.params, sums), run_dirs[index], step)
                        row |= means(sums, counts[index].logged_updates)
                        last_loss = row["loss"]
                        if config.analysis:
                            key = device_key(mine.seed, "probe", step)
                            looked_at = replay.sample(_one(state.rows, index), step, key, config.analysis_samples)
                            row |= probe_features(agent, mine, looked_at)
                    counts[index].logged_updates = 0
                    metrics[index].add(row)
                    trackers[index].log(row, step)
                totals = jax.tree.map(jnp.zeros_like, totals)
                row_started, row_step = now, step
            progress.show(step, last_return, last_loss)

            stopping = should_stop()
            if step == config.epoch_end(epoch):
                results = []
                for index, count in enumerate(counts):
                    result = Epoch(epoch, step, count.epoch_returns)
                    count.epoch_returns = []
                    if result.returns and (count.best is None or result.mean_return > count.best):
                        count.best = result.mean_return
                        save_best(run_dirs[index], _one(state.agent, index), result)
                    results.append(result)
                save()
                saved_at = time.monotonic()
                yield results
            elif stopping or time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                save()
                saved_at = time.monotonic()
            if stopping and step < config.total_timesteps:
                raise Interrupted(f"stopped at step {step:,}; go on with `isqn resume {run_dirs[0]}`")
    finally:
        for table in (*episodes, *metrics):
            table.close()
        for tracker in trackers:
            tracker.close()


def _next_stop(config: Config, step: int) -> tuple[int, bool]:
    """Where the next stretch ends, in whole updates, and whether it learns."""
    begins = config.learning_starts // config.update_period * config.update_period
    stops = [
        (step // config.row_length + 1) * config.row_length,
        config.epoch_end(step // config.epoch_steps),
    ]
    if step < begins:
        stops.append(begins)
    return min(stops), step >= begins


def _one(tree: Any, index: int, axis: int = 0) -> Any:
    """The part of one seed."""
    return jax.tree.map(lambda x: jnp.take(x, index, axis), tree)


def _record_episodes(
    table: Table, ended: Ended, first_step: int, count: Counters, config: Config, clock: float
) -> list[dict[str, Any]]:
    """Rows for the episodes that ended in a stretch of steps; an episode belongs to the epoch in which it ends."""
    rows = []
    for place in np.flatnonzero(ended.over):
        step = first_step + int(place) + 1
        row = {
            "epoch": (step - 1) // config.epoch_steps,
            "episode": count.episode,
            "step": step,
            "frame": step,
            "return": float(ended.episodic_return[place]),
            "length": int(ended.length[place]),
            "seconds": time.monotonic() - clock,
        }
        table.add(row)
        count.episode += 1
        count.epoch_returns.append(row["return"])
        rows.append(row)
    return rows


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
    """The newest state that all seeds have whole."""
    common = set.intersection(*(set(checkpoint.steps(d)) for d in run_dirs))
    batched = {**template._replace(rows=())._asdict(), "totals": totals}
    small = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batched)
    for step in sorted(common, reverse=True):
        states, manifests = [], []
        try:
            for run_dir in run_dirs:
                folder = checkpoint.folder_of(run_dir, step)
                arrays, manifest = checkpoint.read(folder)
                tree = checkpoint.unflatten(small, arrays, folder)
                tree["rows"] = _load_rows(run_dir / "replay", manifest["replay"]["files"], replay)
                states.append(tree)
                manifests.append(manifest)
        except DamagedFile as error:
            checkpoint.warn_damaged(error)
            continue
        for run_dir, manifest in zip(run_dirs, manifests, strict=True):
            require_tables(run_dir, manifest["tables"])
        for run_dir in run_dirs:
            checkpoint.drop_after(run_dir, step)
        tree = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        totals = tree.pop("totals")
        counts = [Counters(**manifest["counters"]) for manifest in manifests]
        return (
            LoopState(**tree),
            totals,
            counts,
            [m["replay"]["files"] for m in manifests],
            [m["tables"] for m in manifests],
        )
    if any(checkpoint.steps(d) for d in run_dirs):
        raise UserError(f"{run_dirs[0]} has no checkpoint that can be read; move the folder away to train it anew.")
    return None


def _load_rows(folder: Path, files: list[Description], replay: DeviceReplay) -> Rows:
    rows = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(replay.init))
    for file in files:
        places = np.arange(file["since"], file["until"]) % replay.capacity
        for name, array in safetensors.numpy.load(read_file(folder, file)).items():
            getattr(rows, name)[places] = array
    return rows
