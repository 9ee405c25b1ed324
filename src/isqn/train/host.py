"""The host loop: any Gymnasium environment, one step at a time. Reads as Algorithm 1 of the paper.

The environment's state is never saved: it is the seed of the episode and the actions since. A restart
resets with that seed and takes those actions again, so that a run can stop after any step.
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

from isqn.agents.q_learning import Agent
from isqn.analysis.probes import probe_columns, probe_features
from isqn.compiler import jit
from isqn.data.dataset import About, Writer
from isqn.data.files import DamagedFile
from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.experiments.config import Config
from isqn.keys import episode_seed, host_generator
from isqn.train import checkpoint
from isqn.train.loop import Epoch, empty_totals, means, metrics_columns, require_finite, save_best, with_held_out
from isqn.train.progress import Progress, memory_mb
from isqn.train.record import EPISODE_COLUMNS, Table, Tracker, require_tables
from isqn.types import Interrupted, UserError


@dataclass
class Counters:
    """Where the run is; saved as JSON."""

    step: int = 0
    updates: int = 0
    episode: int = 0
    epoch: int = 0
    epoch_start: int = 0
    episode_return: float = 0.0
    episode_length: int = 0
    seconds: float = 0.0
    logged_updates: int = 0  # updates summed in the totals that the next row of metrics averages
    best: float | None = None
    epoch_returns: list[float] = field(default_factory=list)


class Functions(NamedTuple):
    """The agent's functions, each compiled once."""

    init: Callable[..., Any]
    observe: Callable[..., Any]
    # the same outside training: what a stream is normalised by goes on, that of a replay stays
    watch: Callable[..., Any]
    act: Callable[..., Any]
    update: Callable[..., Any]
    refresh: Callable[..., Any]
    sync: Callable[..., Any]


def compile_agent(agent: Agent) -> Functions:
    program = partial(jit, frugal=agent.streams)

    def update(state: Any, totals: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = agent.update(state, batch)
        return state, jax.tree.map(jnp.add, totals, metrics)

    @program
    def count(state: Any, *seen: Any) -> tuple[Any, Any]:
        state, frame = agent.observe(state, *seen)
        return state.moments, frame

    def only(state: Any, *parts: str) -> Any:
        """Without the many arrays that are not looked at, which would be handed over at every step."""
        return state._replace(**dict.fromkeys(set(state._fields) - {"seed", *parts}, ()))

    def observe(state: Any, frame: np.ndarray, *step: Any) -> tuple[Any, np.ndarray]:
        if not jax.tree.leaves(state.moments):
            return state, frame
        moments, obs = count(only(state, "moments"), frame, *step)
        return state._replace(moments=moments), np.asarray(obs) if agent.streams else frame

    def watch(state: Any, frame: np.ndarray, *step: Any) -> tuple[Any, np.ndarray]:
        return observe(state, frame, *step) if agent.streams else (state, frame)

    act = program(agent.act)
    return Functions(
        init=program(agent.init),
        observe=observe,
        watch=watch,
        act=lambda state, *rest: act(only(state, *agent.acts_by), *rest),
        update=program(update, donate_argnums=(0, 1)),
        refresh=program(agent.refresh, donate_argnums=0),
        sync=program(agent.sync, donate_argnums=0),
    )


def train(
    config: Config,
    run_dir: Path,
    agent: Agent,
    env: Environment,
    make_replay: Callable[[], Replay],
    *,
    functions: Functions | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Iterator[Epoch]:
    """Train from the newest checkpoint in `run_dir`, or from the start; yield each epoch's result."""
    scheme, seed = config.target_scheme, config.seed
    call = functions or compile_agent(agent)
    progress = progress or Progress(config.total_timesteps, enabled=False)
    count = Counters()
    history: list[list[np.ndarray]] = [[]]  # actions since the game began, life by life
    totals = empty_totals(agent, config, env.spec)
    state = call.init(seed)
    metric_columns = metrics_columns(totals, probe_columns(config))

    recorded = None
    if config.record_dataset:
        recorded = Writer(run_dir / "dataset", env.spec, About(f"{config.label}, seed {seed}, while it learns"))

    def begin(frame: np.ndarray) -> None:
        nonlocal state
        state, obs = call.observe(state, frame)
        replay.add_first(obs)
        if recorded:
            recorded.add_first(frame)

    restored = _restore(run_dir, state, totals, make_replay, recorded)
    if restored:
        state, totals, replay, count, history, lengths, last_frame = restored
        progress.say(f"goes on after {count.step:,} steps")
        frame = _simulate(env, seed, count.episode, history)
        if not np.array_equal(frame, last_frame):
            raise UserError(
                f"{config.env_id} did not come back to where the run stopped: under the same seed and actions it "
                "shows another observation, so this run cannot be resumed; an environment must draw only from its seed."
            )
        episodes = Table(run_dir / "episodes.csv", EPISODE_COLUMNS, lengths["episodes"])
        metrics = Table(run_dir / "metrics.csv", metric_columns, lengths["metrics"])
    else:
        episodes = Table(run_dir / "episodes.csv", EPISODE_COLUMNS)
        metrics = Table(run_dir / "metrics.csv", metric_columns)
        replay = make_replay()
        frame = env.reset(episode_seed(seed, 0))
        begin(frame)
    tracker = Tracker(config, run_dir)
    last_return = count.epoch_returns[-1] if count.epoch_returns else None
    last_loss: float | None = None
    clock = time.monotonic() - count.seconds
    saved_at, logged_at, logged_step = time.monotonic(), time.monotonic(), count.step

    def save() -> None:
        require_finite((state.params, state.policy, totals), run_dir, count.step)
        count.seconds = time.monotonic() - clock
        for table in (episodes, metrics):
            table.flush_to_disk()
        arrays = checkpoint.flatten({"agent": state, "totals": totals})
        taken = [action for actions in history for action in actions]
        arrays["history.actions"] = np.array(taken, env.spec.action_dtype).reshape(-1, *env.spec.action_shape)
        arrays["history.lengths"] = np.array([len(actions) for actions in history], np.int32)
        arrays["history.frame"] = frame
        manifest = {
            "config": config.kept(),
            "counters": asdict(count),
            "replay": replay.save(run_dir / "replay"),
            **({"dataset": recorded.save()} if recorded else {}),
            "tables": {"episodes": episodes.length, "metrics": metrics.length},
        }
        checkpoint.write(checkpoint.folder_of(run_dir, count.step), arrays, manifest)
        checkpoint.tidy(run_dir)

    try:
        while count.epoch < config.num_epochs:
            # Act.
            epsilon = config.epsilon(count.step)
            choice = call.act(state, replay.observation(), epsilon, count.step, count.episode)
            action = np.array(choice.action)  # a view would keep a buffer of the device for as long as the game
            try:
                frame, reward, terminated, truncated = env.step(action)
            except UserError:
                save()  # what was learned until then
                raise
            history[-1].append(action)
            count.step += 1
            count.episode_length += 1
            count.episode_return += reward
            truncated = truncated or (not terminated and count.episode_length >= config.max_episode_steps)
            ended = terminated or truncated
            state, obs = call.observe(state, frame, reward, ended)
            replay.add(action, reward, terminated, truncated, obs)
            if recorded:
                recorded.add(action, reward, terminated, truncated, frame)

            # Learn.
            if count.step > config.learning_starts:
                if count.step % config.update_period == 0:
                    if agent.streams:
                        batch = replay.latest(explored=bool(choice.explored))
                    else:
                        generator = host_generator(seed, "replay", count.updates)
                        batch = replay.sample(config.learned_batch_size, generator)
                    if config.held_out_size:
                        held_out = replay.sample(config.held_out_size, host_generator(seed, "held-out", count.updates))
                        batch = with_held_out(batch, held_out)
                    state, totals = call.update(state, totals, batch)
                    count.updates += config.updates_per_step
                    count.logged_updates += config.updates_per_step
                if agent.refreshes and count.step % config.target_update_period == 0:
                    state = call.refresh(state)
                elif scheme.num_copies > 1 and count.step % config.target_sync_period == 0:
                    state = call.sync(state)

            # Record.
            if count.step % config.row_length == 0:
                now = time.monotonic()
                row: dict[str, Any] = {
                    "step": count.step,
                    "frame": count.step * env.spec.frames_per_step,
                    "updates": count.updates,
                    "epsilon": epsilon,
                    "steps_per_second": (count.step - logged_step) / (now - logged_at),
                    "memory_mb": memory_mb(),
                    "seconds": now - clock,
                }
                if count.logged_updates:
                    require_finite((state.params, state.policy, totals), run_dir, count.step)
                    row |= means(totals, count.logged_updates)
                    last_loss = row["loss"]
                    totals, count.logged_updates = jax.tree.map(jnp.zeros_like, totals), 0
                    if config.analysis:
                        looked_at = replay.sample(config.analysis_samples, host_generator(seed, "probe", count.step))
                        row |= probe_features(agent, state, looked_at)
                metrics.add(row)
                tracker.log(row, count.step)
                logged_at, logged_step = now, count.step
            progress.show(count.step, last_return, last_loss)

            # A lost life may end an episode for the learner; the game, whose return is a result, goes on.
            over = ended and not (env.continues and count.episode_length < config.max_episode_steps)
            if over:
                last_return = count.episode_return
                row = {
                    "epoch": count.epoch,
                    "episode": count.episode,
                    "step": count.step,
                    "frame": count.step * env.spec.frames_per_step,
                    "return": count.episode_return,
                    "length": count.episode_length,
                    "seconds": time.monotonic() - clock,
                }
                episodes.add(row)
                tracker.log({"return": row["return"], "length": row["length"]}, count.step)
                count.epoch_returns.append(count.episode_return)
                count.episode += 1
                count.episode_return, count.episode_length = 0.0, 0
            if ended:
                history = [[]] if over else [*history, []]
                frame = env.reset(episode_seed(seed, count.episode), restart=over)
                begin(frame)

            stopping = should_stop()
            length = config.epoch_end(count.epoch) - (config.epoch_end(count.epoch - 1) if count.epoch else 0)
            if over and count.step - count.epoch_start >= length:
                result = Epoch(count.epoch, count.step, count.epoch_returns)
                count.epoch, count.epoch_start, count.epoch_returns = count.epoch + 1, count.step, []
                if count.best is None or result.mean_return > count.best:
                    count.best = result.mean_return
                    save_best(run_dir, state, result)
                save()
                saved_at = time.monotonic()
                yield result
            elif stopping or time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                save()
                saved_at = time.monotonic()
            if stopping and count.epoch < config.num_epochs:
                raise Interrupted(f"stopped at step {count.step:,}; go on with `isqn resume {run_dir}`")
    finally:
        episodes.close()
        metrics.close()
        tracker.close()


def _restore(run_dir: Path, state: Any, totals: Any, make_replay: Callable[[], Replay], recorded: Writer | None) -> Any:
    for step, arrays, manifest in checkpoint.newest_good(run_dir):
        actions, lengths, frame = (arrays.pop(f"history.{name}") for name in ("actions", "lengths", "frame"))
        tree = checkpoint.unflatten({"agent": state, "totals": totals}, arrays, checkpoint.folder_of(run_dir, step))
        try:
            replay = make_replay()
            replay.restore(manifest["replay"], run_dir / "replay")
            if recorded:
                recorded.restore(manifest["dataset"])
                recorded.save()  # the index may name what is newer than this checkpoint
        except DamagedFile as error:
            checkpoint.warn_damaged(error)
            continue
        require_tables(run_dir, manifest["tables"])
        checkpoint.drop_after(run_dir, step)
        ends = np.cumsum(lengths)
        history = [list(actions[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
        tree = jax.tree.map(jnp.asarray, tree)
        counters, tables = Counters(**manifest["counters"]), manifest["tables"]
        return tree["agent"], tree["totals"], replay, counters, history, tables, frame
    if checkpoint.steps(run_dir):
        raise UserError(f"{run_dir} has no checkpoint that can be read; move the folder away to train it anew.")
    return None


def _simulate(env: Environment, seed: int, episode: int, history: list[list[np.ndarray]]) -> np.ndarray:
    """Bring a new environment to where the old one was."""
    frame = None
    for actions in history:
        frame = env.reset(episode_seed(seed, episode))
        for action in actions:
            frame = env.step(action).frame
    assert frame is not None
    return frame
