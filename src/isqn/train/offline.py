"""The offline loop: all is learned from a dataset; before the first update and after each epoch the agent plays.

A batch is a function of the seed and its number, so batches are drawn ahead, in a thread, while updates run; several at
a time, because that takes little longer than one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.q_learning import Agent, AgentState
from isqn.analysis.probes import probe_columns, probe_features
from isqn.experiments.config import Config
from isqn.keys import host_generator
from isqn.train import checkpoint, parallel
from isqn.train.evaluate import Episode
from isqn.train.host import compile_agent
from isqn.train.loop import Epoch, empty_totals, means, metrics_columns, require_finite, save_best
from isqn.train.progress import Progress, count, free_memory, memory_mb
from isqn.train.record import EPISODE_COLUMNS, Table, Tracker, require_tables
from isqn.types import Interrupted, UserError

GROUP = 8  # batches drawn at a time
AHEAD = 2  # groups
HELD = GROUP * (AHEAD + 2)  # batches in memory: those ahead, the ones that are drawn and the ones that are taken


@dataclass
class Counters:
    """Where the run is; saved as JSON."""

    updates: int = 0
    epoch: int = 0  # the next one to be evaluated
    episode: int = 0
    seconds: float = 0.0
    logged_updates: int = 0  # updates summed in the totals that the next row of metrics averages
    best: float | None = None


class Source(Protocol):
    """What is learned from: a dataset, or games."""

    folder: Any
    spec: Any

    @property
    def digest(self) -> str: ...

    def sample(self, size: int, generator: np.random.Generator) -> Any:
        """A batch."""


class Evaluation(NamedTuple):
    episodes: list[Episode]
    measures: dict[str, float] = {}  # noqa: RUF012 - never written to


class Batches:
    """One after the other, from a number on; a thread draws them before they are asked for."""

    def __init__(self, draw: Callable[[int], list[Any]], first: int) -> None:
        self._draw, self._next, skipped = draw, *divmod(first, GROUP)
        self._drawn = deque[Future[list[Any]]]()
        self.thread = ThreadPoolExecutor(1)  # whatever is drawn from a dataset is drawn in it
        self._left: Iterator[Any] = iter(())
        for _ in range(skipped):
            next(self)

    def _group(self) -> list[Any]:
        while len(self._drawn) <= AHEAD:
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
    config: Config,
    run_dir: Path,
    agent: Agent,
    dataset: Source,
    evaluate: Callable[[AgentState, int], Evaluation],
    *,
    prepare: Callable[[AgentState], AgentState] = lambda state: state,
    measures: tuple[str, ...] = (),
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Iterator[Epoch]:
    """Train from the newest checkpoint in `run_dir`, or from the start; yield each epoch's result.

    `evaluate` plays with a state for an epoch, and says what else it finds, whose names are `measures`; it raises
    `Interrupted` if it is to stop. `prepare` changes the state that is begun with.
    """
    scheme, seed, spec = config.target_scheme, config.seed, dataset.spec
    call = compile_agent(agent)
    progress = progress or Progress(config.length, enabled=False)
    count = Counters()
    totals = empty_totals(agent, config, spec)
    state = call.init(seed)
    columns = (*metrics_columns(totals, probe_columns(config)), "waiting_share")
    lengths: dict[str, int] = {}
    restored = _restore(run_dir, dataset, state, totals)
    if restored:
        state, totals, count, lengths = restored
        progress.say(f"goes on after {count.updates:,} updates")
    else:
        state = prepare(state)
    here, keeps = parallel.here, parallel.is_first()
    update: Any = call.update
    if config.writes:
        parallel.require_same(f"{dataset.digest} {count.updates}")
        state, totals = parallel.everywhere((state, totals))
        shapes = parallel.spread(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec.batch(config.batch_size)))
        update = update.lower(state, totals, shapes).compile()
        _say_memory(update, progress)
    kinds = {"evaluations": EPISODE_COLUMNS, "metrics": columns}
    kinds |= {"measures": ("epoch", "step", *measures)} if measures else {}
    tables = {name: Table(run_dir / f"{name}.csv", cells, lengths.get(name)) for name, cells in kinds.items()}
    tracker = Tracker(config, run_dir)
    last_return: float | None = None
    last_loss: float | None = None
    clock = time.monotonic() - count.seconds
    saved_at = logged_at = time.monotonic()
    logged_updates, waited = count.updates, 0.0

    def draw(group: int) -> list[Any]:
        return split(dataset.sample(GROUP * config.batch_size, host_generator(seed, "replay", group)))

    def save() -> None:
        nonlocal saved_at
        if not keeps:
            return
        kept = here({"agent": state, "totals": totals})
        require_finite((kept["agent"].params, kept["agent"].policy, kept["totals"]), run_dir, count.updates)
        count.seconds = time.monotonic() - clock
        for table in tables.values():
            table.flush_to_disk()
        manifest = {
            "config": config.kept(),
            "counters": asdict(count),
            "learned_from": dataset.digest,
            "tables": {name: table.length for name, table in tables.items()},
        }
        checkpoint.write(checkpoint.folder_of(run_dir, count.updates), checkpoint.flatten(kept), manifest)
        checkpoint.tidy(run_dir)
        saved_at = time.monotonic()

    batches = Batches(draw, count.updates)
    try:
        while count.epoch < config.num_epochs:
            if count.updates >= config.epoch_end(count.epoch):
                save()  # a kill in the middle of an evaluation loses that evaluation only
                began = time.monotonic()
                result = Epoch(count.epoch, count.updates, [])
                found = evaluate(here(state), count.epoch)
                if measures:
                    row = {"epoch": count.epoch, "step": count.updates, **found.measures}
                    tables["measures"].add(row)
                    tracker.log(row, count.updates)
                for played in found.episodes:
                    row = {
                        "epoch": count.epoch,
                        "episode": count.episode,
                        "step": count.updates,
                        "return": played.episodic_return,
                        "length": played.length,
                        "seconds": time.monotonic() - clock,
                    }
                    tables["evaluations"].add(row)
                    tracker.log({"return": played.episodic_return, "length": played.length}, count.updates)
                    result.returns.append(played.episodic_return)
                    count.episode += 1
                count.epoch += 1
                if result.returns:
                    last_return = result.mean_return
                    if count.best is None or result.mean_return > count.best:
                        count.best = result.mean_return
                        if keeps:
                            save_best(run_dir, here(state), result)
                save()
                yield result
                logged_at += time.monotonic() - began  # of which no update is a part
                continue

            began = time.monotonic()
            batch = parallel.spread(next(batches)) if config.writes else next(batches)
            if totals["loss"].is_ready():  # the device has nothing else to do
                waited += time.monotonic() - began
            state, totals = update(state, totals, batch)
            count.updates += 1
            count.logged_updates += 1
            if agent.refreshes and count.updates % config.target_update_period == 0:
                state = call.refresh(state)
            elif scheme.num_copies > 1 and count.updates % config.target_sync_period == 0:
                state = call.sync(state)

            if count.updates % config.row_length == 0:
                require_finite(here((state.params, state.policy, totals)), run_dir, count.updates)
                now = time.monotonic()
                row = {
                    "step": count.updates,
                    "updates": count.updates,
                    **means(totals, count.logged_updates),
                    "steps_per_second": (count.updates - logged_updates) / (now - logged_at),
                    "memory_mb": memory_mb(),
                    "seconds": now - clock,
                    "waiting_share": waited / (now - logged_at),
                }
                last_loss = row["loss"]
                totals, count.logged_updates = jax.tree.map(jnp.zeros_like, totals), 0
                if config.analysis:
                    generator = host_generator(seed, "probe", count.updates)
                    looked_at = batches.thread.submit(dataset.sample, config.analysis_samples, generator).result()
                    row |= probe_features(agent, here(state), looked_at)
                tables["metrics"].add(row)
                tracker.log(row, count.updates)
                waited, logged_at, logged_updates = 0.0, time.monotonic(), count.updates
            progress.show(count.updates, last_return, last_loss)

            stopping = parallel.agreed(should_stop())
            if stopping or time.monotonic() - saved_at > 60 * config.checkpoint_minutes:
                save()
            if stopping:
                raise Interrupted(f"stopped after {count.updates:,} updates; go on with `isqn resume {run_dir}`")
    finally:
        batches.close()
        for table in tables.values():
            table.close()
        tracker.close()


def _say_memory(update: Any, progress: Progress) -> None:
    """What an update takes at its peak, on each device, as its compiler planned it; refused if there is not so much."""
    plan = update.memory_analysis()
    more = plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
    peak = plan.argument_size_in_bytes + more
    progress.say(f"an update needs {peak / 1e9:.3g} GB at its peak, on each of {count(jax.device_count(), 'device')}")
    if jax.default_backend() == "cpu" and jax.local_device_count() * more > 0.95 * free_memory():
        raise UserError(
            f"An update needs {more / 1e9:.1f} GB beside what it learns, on each of "
            f"{count(jax.local_device_count(), 'device')}, and {free_memory() / 1e9:.1f} GB are free; lower "
            "--micro-batch-size, or give --rematerialise."
        )


def split(group: Any) -> list[Any]:
    """One behind the other."""
    columns, kind = jax.tree.flatten(group)
    parts = [np.split(column, GROUP) for column in columns]
    return [jax.tree.unflatten(kind, batch) for batch in zip(*parts, strict=True)]


def _restore(run_dir: Path, dataset: Source, state: Any, totals: Any) -> Any:
    for step, arrays, manifest in checkpoint.newest_good(run_dir):
        if manifest["learned_from"] != dataset.digest:
            changed = "it has changed since, or is another one"
            raise UserError(f"{dataset.folder} is not what {run_dir} was trained on: {changed}.")
        tree = checkpoint.unflatten({"agent": state, "totals": totals}, arrays, checkpoint.folder_of(run_dir, step))
        require_tables(run_dir, manifest["tables"])
        checkpoint.drop_after(run_dir, step)
        tree = jax.tree.map(jnp.asarray, tree)
        return tree["agent"], tree["totals"], Counters(**manifest["counters"]), manifest["tables"]
    if checkpoint.steps(run_dir):
        raise UserError(f"{run_dir} has no checkpoint that can be read; move the folder away to train it anew.")
    return None
