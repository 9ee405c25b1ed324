"""The host loop: any Gymnasium environment, one step at a time. Reads as Algorithm 1 of the paper.

The environment's state is never saved: it is the seed of the episode and the actions since. A restart resets with that
seed and takes those actions again, so that a run can stop after any step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from isqn.agents.base import Agent, target_schedule
from isqn.data.dataset import About, Writer
from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.keys import episode_seed, host_generator
from isqn.train import checkpoint
from isqn.train.functions import Functions, append_held_out, compile_agent, zero_totals
from isqn.train.probes import probe_columns, probe_features
from isqn.train.progress import Progress
from isqn.train.record import EPISODE_COLUMNS
from isqn.train.session import Counters, Epoch, Session, metrics_columns, restore
from isqn.types import UserError


@dataclass
class HostCounters(Counters):
    """Position of a run in the host loop."""

    step: int = 0
    updates: int = 0
    epoch: int = 0
    epoch_start: int = 0
    episode_return: float = 0.0
    episode_length: int = 0
    epoch_returns: list[float] = field(default_factory=list)


def train(
    config: Any,
    run_dir: Path,
    agent: Agent,
    env: Environment,
    make_replay: Callable[[], Replay],
    *,
    functions: Functions | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Iterator[Epoch]:
    """Train from the newest checkpoint in `run_dir`, or from the start; yield the result of each epoch."""
    seed, schedule = config.seed, target_schedule(config, agent)
    call = functions or compile_agent(agent)
    progress = progress or Progress(config.total_timesteps, enabled=False)
    state, totals = call.init(seed), zero_totals(agent, config, env.spec)
    columns = metrics_columns(totals, probe_columns(config))
    history = History(env)
    writer = None
    if config.record_dataset:
        writer = Writer(run_dir / "dataset", env.spec, About(f"{config.label}, seed {seed}, while it learns"))

    def load(run_dir: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> tuple[Replay, np.ndarray]:
        frame = history.load(arrays)
        replay = make_replay()
        replay.restore(manifest["replay"], run_dir / "replay")
        if writer:
            writer.restore(manifest["dataset"])
            writer.save()  # the index may name files that are newer than this checkpoint
        return replay, frame

    count, lengths = HostCounters(), {}
    if found := restore([run_dir], {"agent": state, "totals": totals}, load):
        (last,) = found
        count, lengths = last.counters(HostCounters), last.manifest["tables"]
        state, totals, (replay, frame) = last.tree["agent"], last.tree["totals"], last.extra
        progress.say(f"goes on after {count.step:,} steps")
        history.replay(seed, count.episode, frame, config.env_id)
    else:
        replay = make_replay()
    session = Session(
        config,
        run_dir,
        count,
        {"episodes": EPISODE_COLUMNS, "metrics": columns},
        lengths,
        progress,
        first_step=count.step,
        frames_per_step=env.spec.frames_per_step,
    )

    def begin_episode(*, restart: bool) -> None:
        nonlocal state, frame
        frame = env.reset(episode_seed(seed, count.episode), restart=restart)
        state, obs = call.observe(state, frame)
        replay.add_first(obs)
        if writer:
            writer.add_first(frame)

    def save() -> None:
        def arrays() -> dict[str, np.ndarray]:
            return checkpoint.flatten({"agent": state, "totals": totals}) | history.arrays(frame)

        def about() -> dict[str, Any]:
            dataset = {"dataset": writer.save()} if writer else {}
            return {"replay": replay.save(run_dir / "replay"), **dataset}

        session.save(count.step, state, totals, arrays, about)

    if not found:
        begin_episode(restart=False)
    try:
        while count.epoch < config.num_epochs:
            # Act.
            epsilon = config.epsilon(count.step)
            choice = call.act(state, replay.observation(), epsilon, count.step, count.episode)
            action = np.array(choice.action)  # a view would hold a buffer of the device for as long as the game
            try:
                frame, reward, terminated, truncated = env.step(action)
            except UserError:
                save()  # keep what was learned until then
                raise
            history.add(action)
            count.step += 1
            count.episode_length += 1
            count.episode_return += reward
            truncated = truncated or (not terminated and count.episode_length >= config.max_episode_steps)
            ended = terminated or truncated

            # Store.
            state, obs = call.observe(state, frame, reward, ended)
            replay.add(action, reward, terminated, truncated, obs)
            if writer:
                writer.add(action, reward, terminated, truncated, frame)

            # Learn.
            if count.step > config.learning_starts:
                if count.step % config.update_period == 0:
                    batch = _draw(config, agent, replay, count.updates, explored=bool(choice.explored))
                    state, totals = call.update(state, totals, batch)
                    count.updates += config.updates_per_step
                    count.logged_updates += config.updates_per_step
                if schedule.is_refresh_due(count.step):
                    state = call.refresh(state)
                elif schedule.is_sync_due(count.step):
                    state = call.sync(state)

            # Record.
            if count.step % config.row_length == 0:
                means, totals = session.average(totals, state, count.step)
                if means and config.analysis:
                    states = replay.sample(config.analysis_samples, host_generator(seed, "probe", count.step))
                    means |= probe_features(agent, state, states)
                frames = count.step * env.spec.frames_per_step
                session.add_row(count.step, {"frame": frames, "updates": count.updates, "epsilon": epsilon, **means})
            session.show_progress(count.step)

            # A lost life may end an episode for the learner; the game, whose return is a result, goes on.
            over = ended and not (env.continues and count.episode_length < config.max_episode_steps)
            if over:
                session.add_episode(count.epoch, count.step, count.episode_return, count.episode_length)
                count.epoch_returns.append(count.episode_return)
                count.episode_return, count.episode_length = 0.0, 0
            if ended:
                history.end_episode(over=over)
                begin_episode(restart=over)

            stopping = should_stop()
            if over and count.step - count.epoch_start >= _epoch_length(config, count.epoch):
                result = Epoch(count.epoch, count.step, count.epoch_returns)
                count.epoch, count.epoch_start, count.epoch_returns = count.epoch + 1, count.step, []
                session.end_epoch(result, state)
                save()
                yield result
            elif stopping or session.is_checkpoint_due():
                save()
            if stopping and count.epoch < config.num_epochs:
                raise session.interrupted(f"at step {count.step:,}")
    finally:
        session.close()


def _epoch_length(config: Any, epoch: int) -> int:
    return config.epoch_end(epoch) - (config.epoch_end(epoch - 1) if epoch else 0)


def _draw(config: Any, agent: Agent, replay: Replay, updates: int, *, explored: bool) -> Any:
    """Return the batch of an update: a sample of the replay, or the newest step of a stream."""
    if agent.is_streaming:
        batch = replay.latest(explored=explored)
    else:
        batch = replay.sample(config.update_batch_size, host_generator(config.seed, "replay", updates))
    if not config.held_out_size:
        return batch
    return append_held_out(batch, replay.sample(config.held_out_size, host_generator(config.seed, "held-out", updates)))


class History:
    """Actions since the game began, episode by episode: with the seed, the state of the environment."""

    def __init__(self, env: Environment):
        self._env = env
        self._actions: list[list[np.ndarray]] = [[]]  # a game has several episodes where a lost life ends one

    def add(self, action: np.ndarray) -> None:
        self._actions[-1].append(action)

    def end_episode(self, *, over: bool) -> None:
        self._actions = [[]] if over else [*self._actions, []]

    def arrays(self, frame: np.ndarray) -> dict[str, np.ndarray]:
        spec, taken = self._env.spec, [action for actions in self._actions for action in actions]
        return {
            "history.actions": np.array(taken, spec.action_dtype).reshape(-1, *spec.action_shape),
            "history.lengths": np.array([len(actions) for actions in self._actions], np.int32),
            "history.frame": frame,
        }

    def load(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Take its arrays out of a checkpoint; return the last frame."""
        actions, lengths, frame = (arrays.pop(f"history.{name}") for name in ("actions", "lengths", "frame"))
        ends = np.cumsum(lengths)
        self._actions = [list(actions[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
        return frame

    def replay(self, seed: int, episode: int, expected: np.ndarray, env_id: str) -> None:
        """Bring the environment to where it was, by its seed and the actions since."""
        frame = None
        for actions in self._actions:
            frame = self._env.reset(episode_seed(seed, episode))
            for action in actions:
                frame = self._env.step(action).frame
        if not np.array_equal(frame, expected):  # type: ignore[arg-type]
            raise UserError(
                f"{env_id} did not come back to where the run stopped: under the same seed and actions it shows "
                "another observation, so this run cannot be resumed; an environment must draw only from its seed."
            )
