"""The offline loop: learns from data alone, and evaluates the agent before the first update and after each epoch.

A batch is a function of the seed and its number, so a thread draws batches ahead while updates run. It draws several
batches at a time, because that takes little longer than drawing one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import Agent, AgentState, target_schedule
from isqn.keys import host_generator
from isqn.train import checkpoint
from isqn.train.evaluate import Episode
from isqn.train.functions import compile_agent, zero_totals
from isqn.train.probes import probe_columns, probe_features
from isqn.train.progress import Control, Progress
from isqn.train.session import Counters, Epoch, Session, metrics_columns, restore
from isqn.train.tables import EPISODE_COLUMNS
from isqn.types import UserError

GROUP = 8  # batches drawn at a time
GROUPS_AHEAD = 2
BATCHES_IN_MEMORY = GROUP * (GROUPS_AHEAD + 2)  # groups ahead, one being drawn and one being learned from


@dataclass
class OfflineCounters(Counters):
    """Position of a run in the offline loop."""

    updates: int = 0
    epoch: int = 0  # the next epoch to be evaluated


class Source(Protocol):
    """Data to learn from: a dataset, or games."""

    @property
    def folder(self) -> Any: ...

    @property
    def spec(self) -> Any: ...

    @property
    def digest(self) -> str: ...

    def sample(self, size: int, generator: np.random.Generator) -> Any:
        """Draw a batch."""


class Evaluation(NamedTuple):
    """Episodes of an evaluation, and further measures of it."""

    episodes: list[Episode]
    measures: dict[str, float] = {}  # noqa: RUF012 - never written to


class Devices(NamedTuple):
    """Placement of arrays on the devices of one process; a run on several processes replaces these functions."""

    replicate: Callable[[Any], Any] = lambda tree: tree  # onto all devices
    shard: Callable[[Any], Any] = lambda batch: batch  # a share of the batch for each device
    local_copy: Callable[[Any], Any] = lambda tree: tree  # onto one device of this process
    any_process: Callable[[bool], bool] = lambda wish: wish  # whether any process has the wish
    is_first: bool = True  # whether this process writes the files
    compile_update: Callable[..., Any] = lambda update, *_: update


class Batches:
    """Iterator over the batches from number `first` on, which a thread draws ahead in groups."""

    def __init__(self, draw: Callable[[int], list[Any]], first: int) -> None:
        self._draw, self._next_group, num_skipped = draw, *divmod(first, GROUP)
        self._groups = deque[Future[list[Any]]]()
        self.thread = ThreadPoolExecutor(1)  # the only thread that reads the dataset
        self._group: Iterator[Any] = iter(())
        for _ in range(num_skipped):
            next(self)

    def _take_group(self) -> list[Any]:
        while len(self._groups) <= GROUPS_AHEAD:
            self._groups.append(self.thread.submit(self._draw, self._next_group))
            self._next_group += 1
        return self._groups.popleft().result()

    def __next__(self) -> Any:
        try:
            return next(self._group)
        except StopIteration:
            self._group = iter(self._take_group())
            return next(self._group)

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def train(
    config: Any,
    run_dir: Path,
    agent: Agent,
    source: Source,
    evaluate: Callable[[AgentState, int], Evaluation],
    control: Control,
    *,
    initialise: Callable[[AgentState], AgentState] = lambda state: state,
    measures: tuple[str, ...] = (),
    devices: Devices | None = None,
) -> Iterator[Epoch]:
    """Train from the newest checkpoint in `run_dir`, or from the start; yield the result of each epoch.

    `evaluate` evaluates a state at an epoch and returns episodes and the values of `measures`; it raises `Interrupted`
    if it is asked to stop. `initialise` changes the state of a new run.
    """
    schedule, call, devices = target_schedule(config, agent), compile_agent(agent), devices or Devices()
    progress = control.progress
    totals = zero_totals(agent, config, source.spec)
    tables = {
        "evaluations": EPISODE_COLUMNS,
        "metrics": (*metrics_columns(totals, probe_columns(config)), "waiting_share"),
        **({"measures": ("epoch", "step", *measures)} if measures else {}),
    }
    state, totals, counters, lengths = _restore(run_dir, call.init(config.seed), totals, source, initialise, progress)
    state, totals = devices.replicate((state, totals))
    update = devices.compile_update(call.update, state, totals, counters.updates)
    session = Session(
        config, run_dir, counters, tables, lengths, progress, first_step=counters.updates, keeps_files=devices.is_first
    )
    waited = 0.0  # seconds that the device was idle since the last row

    def draw(group: int) -> list[Any]:
        return split(source.sample(GROUP * config.batch_size, host_generator(config.seed, "replay", group)))

    def save() -> None:
        local = devices.local_copy({"agent": state, "totals": totals})
        session.save(
            counters.updates,
            local["agent"],
            local["totals"],
            lambda: checkpoint.flatten(local),
            lambda: {"learned_from": source.digest},
        )

    batches = Batches(draw, counters.updates)
    try:
        while counters.epoch < config.num_epochs:
            # Evaluate.
            if counters.updates >= config.epoch_end(counters.epoch):
                save()  # a kill in the middle of an evaluation loses that evaluation only
                began = time.monotonic()
                acting = devices.local_copy(state)
                result = _record_evaluation(session, evaluate(acting, counters.epoch), measures)
                counters.epoch += 1
                session.end_epoch(result, acting)
                save()
                yield result
                session.exclude(time.monotonic() - began)
                continue

            # Update, and refresh the targets.
            began = time.monotonic()
            batch = devices.shard(next(batches))
            if totals["loss"].is_ready():  # the device has nothing else to do
                waited += time.monotonic() - began
            state, totals = update(state, totals, batch)
            counters.updates += 1
            counters.logged_updates += 1
            if schedule.is_refresh_due(counters.updates):
                state = call.refresh(state)
            elif schedule.is_sync_due(counters.updates):
                state = call.sync(state)

            # Record.
            if counters.updates % config.row_length == 0:
                acting = devices.local_copy(state)
                means, _ = session.average(devices.local_copy(totals), acting, counters.updates)
                totals = jax.tree.map(jnp.zeros_like, totals)
                waiting_share, waited = waited / session.row_seconds, 0.0
                if config.analysis:
                    generator = host_generator(config.seed, "probe", counters.updates)
                    states = batches.thread.submit(source.sample, config.analysis_samples, generator).result()
                    means |= probe_features(agent, acting, states)
                row = {"updates": counters.updates, **means, "waiting_share": waiting_share}
                session.add_row(counters.updates, row)
            session.show_progress(counters.updates)

            stopping = devices.any_process(control.should_stop())
            if stopping or session.is_checkpoint_due():
                save()
            if stopping:
                raise session.interrupted(f"after {counters.updates:,} updates")
    finally:
        batches.close()
        session.close()


def _restore(
    run_dir: Path,
    state: AgentState,
    totals: Any,
    source: Source,
    initialise: Callable[[AgentState], AgentState],
    progress: Progress,
) -> tuple[AgentState, Any, OfflineCounters, dict[str, int]]:
    """Return state, totals, counters and table lengths of the newest checkpoint, or those of a new run."""

    def check_source(run_dir: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
        if manifest["learned_from"] != source.digest:
            changed = "it has changed since, or is another one"
            raise UserError(f"{source.folder} is not what {run_dir} was trained on: {changed}.")

    if not (restored := restore([run_dir], {"agent": state, "totals": totals}, OfflineCounters, check_source)):
        return initialise(state), totals, OfflineCounters(), {}
    (newest,) = restored
    counters = newest.counters
    progress.say(f"resumed after {counters.updates:,} updates")
    return newest.tree["agent"], newest.tree["totals"], counters, newest.table_lengths


def _record_evaluation(session: Session[OfflineCounters], evaluation: Evaluation, measures: tuple[str, ...]) -> Epoch:
    """Write the tables of an evaluation, and return its result."""
    counters = session.counters
    if measures:
        row = {"epoch": counters.epoch, "step": counters.updates, **evaluation.measures}
        session.tables["measures"].add(row)
        session.tracker.log(row, counters.updates)
    for episode in evaluation.episodes:
        total, length = episode.episodic_return, episode.length
        session.add_episode(counters.epoch, counters.updates, total, length, table="evaluations")
    returns = [episode.episodic_return for episode in evaluation.episodes]
    result = Epoch(counters.epoch, counters.updates, returns)
    session.last_return = result.mean_return if returns else session.last_return
    return result


def split(group: Any) -> list[Any]:
    """Split a group into its batches."""
    columns, structure = jax.tree.flatten(group)
    parts = [np.split(column, GROUP) for column in columns]
    return [jax.tree.unflatten(structure, batch) for batch in zip(*parts, strict=True)]
