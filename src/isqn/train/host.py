"""The host loop: any Gymnasium environment, one step at a time. Reads as Algorithm 1 of the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from isqn.agents.base import Agent, AgentState, target_schedule
from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.keys import host_generator
from isqn.train import checkpoint
from isqn.train.experience import Experience
from isqn.train.functions import Functions, draw_batch, zero_totals
from isqn.train.probes import probe_columns, probe_features
from isqn.train.progress import Control, Progress
from isqn.train.session import Counters, Epoch, Session, metrics_columns, restore
from isqn.train.tables import EPISODE_COLUMNS
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
    call: Functions,
    control: Control,
) -> Iterator[Epoch]:
    """Train from the newest checkpoint in `run_dir`, or from the start; yield the result of each epoch."""
    schedule, totals = target_schedule(config, agent), zero_totals(agent, config, env.spec)
    state, totals, experience, session = _open(config, run_dir, env, make_replay, call, totals, control.progress)
    counters = session.counters

    def save() -> None:
        agent_and_totals = {"agent": state, "totals": totals}
        session.save(
            counters.step,
            state,
            totals,
            lambda: checkpoint.flatten(agent_and_totals) | experience.arrays(),
            experience.save,
        )

    try:
        while counters.epoch < config.num_epochs:
            # Act.
            epsilon = config.epsilon(counters.step)
            choice = call.act(state, experience.replay.observation(), epsilon, counters.step, counters.episode)
            action = np.array(choice.action)  # a copy: a view would hold a buffer of the device for the whole game
            try:
                frame, reward, terminated, truncated = env.step(action)
            except UserError:
                save()  # keep what was learned before the environment failed
                raise
            counters.step += 1
            counters.episode_length += 1
            counters.episode_return += reward
            truncated = truncated or (not terminated and counters.episode_length >= config.max_episode_steps)
            has_ended = terminated or truncated

            # Store.
            state, obs = call.observe(state, frame, reward, has_ended)
            experience.add(action, reward, terminated, truncated, frame, obs)

            # Update, and refresh the targets.
            if counters.step > config.learning_starts:
                if counters.step % config.update_period == 0:
                    batch = draw_batch(config, agent, experience.replay, counters.updates, explored=choice.explored)
                    state, totals = call.update(state, totals, batch)
                    counters.updates += config.updates_per_step
                    counters.logged_updates += config.updates_per_step
                if schedule.is_refresh_due(counters.step):
                    state = call.refresh(state)
                elif schedule.is_sync_due(counters.step):
                    state = call.sync(state)

            # Record.
            if counters.step % config.row_length == 0:
                means, totals = session.average(totals, state, counters.step)
                if means and config.analysis:
                    generator = host_generator(config.seed, "probe", counters.step)
                    states = experience.replay.sample(config.analysis_samples, generator)
                    means |= probe_features(agent, state, states)
                frames = counters.step * env.spec.frames_per_step
                row = {"frame": frames, "updates": counters.updates, "epsilon": epsilon, **means}
                session.add_row(counters.step, row)
            session.show_progress(counters.step)

            # A lost life may end an episode for the agent; the game, whose return is recorded, continues.
            is_over = has_ended and not (env.game_continues and counters.episode_length < config.max_episode_steps)
            if is_over:
                session.add_episode(counters.epoch, counters.step, counters.episode_return, counters.episode_length)
                counters.epoch_returns.append(counters.episode_return)
                counters.episode_return, counters.episode_length = 0.0, 0
            if has_ended:
                experience.history.end_episode(is_over=is_over)
                state = experience.begin_episode(call.observe, state, counters.episode, restart=is_over)

            stopping = control.should_stop()
            if is_over and counters.step - counters.epoch_start >= _epoch_length(config, counters.epoch):
                result = Epoch(counters.epoch, counters.step, counters.epoch_returns)
                counters.epoch, counters.epoch_start, counters.epoch_returns = counters.epoch + 1, counters.step, []
                session.end_epoch(result, state)
                save()
                yield result
            elif stopping or session.is_checkpoint_due():
                save()
            if stopping and counters.epoch < config.num_epochs:
                raise session.interrupted(f"at step {counters.step:,}")
    finally:
        session.close()


def _open(
    config: Any,
    run_dir: Path,
    env: Environment,
    make_replay: Callable[[], Replay],
    call: Functions,
    totals: Any,
    progress: Progress,
) -> tuple[AgentState, Any, Experience, Session[HostCounters]]:
    """Return the state, totals, experience and session of the newest checkpoint, or of a new run."""
    state = call.init(config.seed)

    def load(run_dir: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> Experience:
        experience = Experience(config, run_dir, env, make_replay())
        experience.load(arrays, manifest)
        return experience

    tables = {"episodes": EPISODE_COLUMNS, "metrics": metrics_columns(totals, probe_columns(config))}
    counters, lengths = HostCounters(), {}
    if restored := restore([run_dir], {"agent": state, "totals": totals}, HostCounters, load):
        (newest,) = restored
        counters, lengths, experience = newest.counters, newest.table_lengths, newest.extra
        state, totals = newest.tree["agent"], newest.tree["totals"]
        progress.say(f"resumed after {counters.step:,} steps")
        experience.history.replay_actions(env, config.seed, counters.episode, config.env_id)
    else:
        experience = Experience(config, run_dir, env, make_replay())
    session = Session(
        config,
        run_dir,
        counters,
        tables,
        lengths,
        progress,
        first_step=counters.step,
        frames_per_step=env.spec.frames_per_step,
    )
    if not restored:
        state = experience.begin_episode(call.observe, state, counters.episode, restart=False)
    return state, totals, experience, session


def _epoch_length(config: Any, epoch: int) -> int:
    return config.epoch_end(epoch) - (config.epoch_end(epoch - 1) if epoch else 0)
