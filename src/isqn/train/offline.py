"""The offline loop: all is learned from data; before the first update and after each epoch the agent is evaluated.

A batch is a function of the seed and its number, so a thread draws batches ahead while updates run; it draws several at
a time, because that takes little longer than one.
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
from isqn.train.progress import Progress
from isqn.train.record import EPISODE_COLUMNS
from isqn.train.session import Counters, Epoch, Session, metrics_columns, restore
from isqn.types import UserError

GROUP = 8  # batches drawn at a time
GROUPS_AHEAD = 2
BATCHES_IN_MEMORY = GROUP * (GROUPS_AHEAD + 2)  # those ahead, those being drawn and those being taken


@dataclass
class OfflineCounters(Counters):
    """Position of a run in the offline loop."""

    updates: int = 0
    epoch: int = 0  # the next one to be evaluated


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
    """Episodes of an evaluation, and measures beside them."""

    episodes: list[Episode]
    measures: dict[str, float] = {}  # noqa: RUF012 - never written to


class Devices(NamedTuple):
    """Placement of arrays on the devices of one process; a run on several replaces these functions."""

    replicate: Callable[[Any], Any] = lambda tree: tree  # onto all devices
    shard: Callable[[Any], Any] = lambda batch: batch  # a share of the batch for each device
    local_copy: Callable[[Any], Any] = lambda tree: tree  # onto one device of this process
    any_process: Callable[[bool], bool] = lambda wish: wish
    is_first: bool = True  # whether this process keeps the files
    compile_update: Callable[..., Any] = lambda update, *_: update


class Batches:
    """Batches one after another from a number on, drawn ahead by a thread."""

    def __init__(self, draw: Callable[[int], list[Any]], first: int) -> None:
        self._draw, self._next, skipped = draw, *divmod(first, GROUP)
        self._drawn = deque[Future[list[Any]]]()
        self.thread = ThreadPoolExecutor(1)  # the only thread that reads the dataset
        self._left: Iterator[Any] = iter(())
        for _ in range(skipped):
            next(self)

    def _group(self) -> list[Any]:
        while len(self._drawn) <= GROUPS_AHEAD:
            self._drawn.append(self.thread.submit(self._draw, self._next))
            self._next += 1
        return self._drawn.popleft().result()

    def __next__(self) -> Any:
        try:
            return next(self._left)
        except StopIteration:
            self._left = iter(self._group())
            return next(self._left)

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def train(
    config: Any,
    run_dir: Path,
    agent: Agent,
    source: Source,
    evaluate: Callable[[AgentState, int], Evaluation],
    *,
    initialise: Callable[[AgentState], AgentState] = lambda state: state,
    measures: tuple[str, ...] = (),
    devices: Devices | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Iterator[Epoch]:
    """Train from the newest checkpoint in `run_dir`, or from the start; yield the result of each epoch.

    `evaluate` plays with a state at an epoch and returns episodes and values of `measures`; it raises `Interrupted` if
    it is to stop. `initialise` changes the state of a new run.
    """
    seed, schedule, devices = config.seed, target_schedule(config, agent), devices or Devices()
    call = compile_agent(agent)
    progress = progress or Progress(config.length, enabled=False)
    state, totals = call.init(seed), zero_totals(agent, config, source.spec)
    columns = (*metrics_columns(totals, probe_columns(config)), "waiting_share")
    count, lengths = OfflineCounters(), {}

    def load(run_dir: Path, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
        if manifest["learned_from"] != source.digest:
            changed = "it has changed since, or is another one"
            raise UserError(f"{source.folder} is not what {run_dir} was trained on: {changed}.")

    if found := restore([run_dir], {"agent": state, "totals": totals}, load):
        (last,) = found
        state, totals, count = last.tree["agent"], last.tree["totals"], last.counters(OfflineCounters)
        lengths = last.manifest["tables"]
        progress.say(f"goes on after {count.updates:,} updates")
    else:
        state = initialise(state)
    state, totals = devices.replicate((state, totals))
    update = devices.compile_update(call.update, state, totals, count.updates)
    tables = {"evaluations": EPISODE_COLUMNS, "metrics": columns}
    tables |= {"measures": ("epoch", "step", *measures)} if measures else {}
    session = Session(
        config,
        run_dir,
        count,
        tables,
        lengths,
        progress,
        first_step=count.updates,
        keeps_files=devices.is_first,
    )
    waited = 0.0  # seconds of the device since the last row

    def draw(group: int) -> list[Any]:
        return split(source.sample(GROUP * config.batch_size, host_generator(seed, "replay", group)))

    def save() -> None:
        here = devices.local_copy({"agent": state, "totals": totals})
        session.save(
            count.updates,
            here["agent"],
            here["totals"],
            lambda: checkpoint.flatten(here),
            lambda: {"learned_from": source.digest},
        )

    batches = Batches(draw, count.updates)
    try:
        while count.epoch < config.num_epochs:
            # Evaluate.
            if count.updates >= config.epoch_end(count.epoch):
                save()  # a kill in the middle of an evaluation loses that evaluation only
                began = time.monotonic()
                acting = devices.local_copy(state)
                result = _record(session, count, evaluate(acting, count.epoch), measures)
                count.epoch += 1
                session.end_epoch(result, acting)
                save()
                yield result
                session.exclude(time.monotonic() - began)
                continue

            # Learn.
            began = time.monotonic()
            batch = devices.shard(next(batches))
            if totals["loss"].is_ready():  # the device has nothing else to do
                waited += time.monotonic() - began
            state, totals = update(state, totals, batch)
            count.updates += 1
            count.logged_updates += 1
            if schedule.is_refresh_due(count.updates):
                state = call.refresh(state)
            elif schedule.is_sync_due(count.updates):
                state = call.sync(state)

            # Record.
            if count.updates % config.row_length == 0:
                acting = devices.local_copy(state)
                means, _ = session.average(devices.local_copy(totals), acting, count.updates)
                totals = jax.tree.map(jnp.zeros_like, totals)
                waiting_share, waited = waited / session.row_seconds, 0.0
                if config.analysis:
                    generator = host_generator(seed, "probe", count.updates)
                    states = batches.thread.submit(source.sample, config.analysis_samples, generator).result()
                    means |= probe_features(agent, acting, states)
                session.add_row(count.updates, {"updates": count.updates, **means, "waiting_share": waiting_share})
            session.show_progress(count.updates)

            stopping = devices.any_process(should_stop())
            if stopping or session.is_checkpoint_due():
                save()
            if stopping:
                raise session.interrupted(f"after {count.updates:,} updates")
    finally:
        batches.close()
        session.close()


def _record(session: Session, count: OfflineCounters, found: Evaluation, measures: tuple[str, ...]) -> Epoch:
    """Write the tables of an evaluation."""
    if measures:
        row = {"epoch": count.epoch, "step": count.updates, **found.measures}
        session.tables["measures"].add(row)
        session.tracker.log(row, count.updates)
    for episode in found.episodes:
        session.add_episode(count.epoch, count.updates, episode.episodic_return, episode.length, table="evaluations")
    returns = [episode.episodic_return for episode in found.episodes]
    result = Epoch(count.epoch, count.updates, returns)
    session.last_return = result.mean_return if returns else session.last_return
    return result


def split(group: Any) -> list[Any]:
    """Split a group into its batches."""
    columns, structure = jax.tree.flatten(group)
    parts = [np.split(column, GROUP) for column in columns]
    return [jax.tree.unflatten(structure, batch) for batch in zip(*parts, strict=True)]
