"""A run in progress: everything that a training loop does besides learning.

Counters, tables, episodes, epochs, the best agent, checkpoints, resuming, progress, trackers and the check for
numbers that are not finite are here, once for all loops.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from isqn.config.run import Run
from isqn.data.files import DamagedFile
from isqn.train import checkpoint
from isqn.train.progress import Progress, memory_mb
from isqn.train.tables import Table, require_tables
from isqn.train.tracker import Tracker
from isqn.types import Interrupted, UserError


class Diverged(UserError):
    """A loss or a parameter that is not finite."""


class Epoch(NamedTuple):
    """Result of an epoch: the returns of its episodes, in training or, offline, in its evaluation."""

    epoch: int
    step: int
    returns: list[float]

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns)) if self.returns else float("nan")


@dataclass
class Counters:
    """Position of a run, saved as JSON; each loop adds what it counts."""

    episode: int = 0
    seconds: float = 0.0  # training time, without the time between a stop and a restart
    logged_updates: int = 0  # number of updates in the totals that the next row of metrics averages
    best: float | None = None  # highest mean return of an epoch


SomeCounters = TypeVar("SomeCounters", bound=Counters)


class Session(Generic[SomeCounters]):
    """Tables, results and checkpoints of one seed of a run."""

    def __init__(
        self,
        config: Run,
        run_dir: Path,
        counters: SomeCounters,
        tables: dict[str, tuple[str, ...]],
        lengths: dict[str, int],
        progress: Progress,
        *,
        first_step: int,
        frames_per_step: int = 1,
        keeps_files: bool = True,
    ):
        self.config, self.run_dir, self.counters, self.progress = config, run_dir, counters, progress
        self.tables = {
            name: Table(run_dir / f"{name}.csv", columns, lengths.get(name)) for name, columns in tables.items()
        }
        self.tracker = Tracker(config, run_dir, first_step)
        self.last_return: float | None = None
        self.last_loss: float | None = None
        self._frames_per_step, self._keeps_files = frames_per_step, keeps_files
        self._clock = time.monotonic() - counters.seconds
        self._saved_at = self._row_at = time.monotonic()
        self._row_step = first_step

    @property
    def seconds(self) -> float:
        """Training time in seconds, with the time before a restart."""
        return time.monotonic() - self._clock

    @property
    def row_seconds(self) -> float:
        """Seconds since the last row of metrics."""
        return time.monotonic() - self._row_at

    def exclude(self, seconds: float) -> None:
        """Leave an evaluation out of the time of the next row."""
        self._row_at += seconds

    # -- rows

    def add_row(self, step: int, values: dict[str, Any], *, steps_per_step: int = 1) -> None:
        """Write a row of metrics, and report it to the tracker."""
        row: dict[str, Any] = {
            "step": step,
            **values,
            "steps_per_second": (step - self._row_step) * steps_per_step / self.row_seconds,
            "memory_mb": memory_mb(),
            "seconds": self.seconds,
        }
        self.last_loss = row.get("loss", self.last_loss)
        self.tables["metrics"].add(row)
        self.tracker.log(row, step)
        self._row_at, self._row_step = time.monotonic(), step

    def average(self, totals: Any, state: Any, step: int) -> tuple[dict[str, float], Any]:
        """Return the means of the metrics since the last row, and zeros for the next one."""
        if not self.counters.logged_updates:
            return {}, totals
        self.require_finite(state, totals, step)
        means = fetch_means(totals, self.counters.logged_updates)
        self.counters.logged_updates = 0
        return means, jax.tree.map(jnp.zeros_like, totals)

    def add_episode(self, epoch: int, step: int, episodic_return: float, length: int, table: str = "episodes") -> None:
        """Write a row for an episode that has ended, and report it to the tracker."""
        row: dict[str, Any] = {"epoch": epoch, "episode": self.counters.episode, "step": step}
        row |= {"frame": step * self._frames_per_step} if table == "episodes" else {}
        row |= {"return": episodic_return, "length": length, "seconds": self.seconds}
        self.tables[table].add(row)
        self.tracker.log({"return": episodic_return, "length": length}, step)
        self.counters.episode += 1
        self.last_return = episodic_return

    def show_progress(self, step: int) -> None:
        self.progress.show(step, self.last_return, self.last_loss)

    # -- results and checkpoints

    def end_epoch(self, result: Epoch, state: Any) -> None:
        """Save the agent if its epoch is the best so far, by mean return."""
        counters = self.counters
        if not result.returns or (counters.best is not None and result.mean_return <= counters.best):
            return
        counters.best = result.mean_return
        if self._keeps_files:
            self.require_finite(state, (), result.step)
            save_best(self.run_dir, state, result)

    def save(
        self,
        step: int,
        state: Any,
        totals: Any,
        arrays: Callable[[], dict[str, Any]],
        save_files: Callable[[], dict[str, Any]] = dict,
        *,
        tidy: bool = True,
    ) -> None:
        """Write a checkpoint of named arrays.

        `save_files` writes the files beside it, and returns their descriptions for its manifest.
        """
        if not self._keeps_files:
            return
        self.require_finite(state, totals, step)
        self.counters.seconds = self.seconds
        for table in self.tables.values():
            table.flush_to_disk()
        manifest = {
            "config": self.config.to_json(),
            "counters": asdict(self.counters),
            **save_files(),
            "tables": {name: table.length for name, table in self.tables.items()},
        }
        checkpoint.write(checkpoint.folder_of(self.run_dir, step), arrays(), manifest)
        if tidy:
            checkpoint.tidy(self.run_dir)
        self._saved_at = time.monotonic()

    def is_checkpoint_due(self) -> bool:
        return time.monotonic() - self._saved_at > 60 * self.config.checkpoint_minutes

    def interrupted(self, at: str) -> Interrupted:
        return Interrupted(f"stopped {at}; resume with `isqn resume {self.run_dir}`")

    def require_finite(self, state: Any, totals: Any, step: int) -> None:
        """Stop at the first number that is not finite, before it reaches a checkpoint."""
        if not _all_finite((state.params, state.policy, totals)):
            steps = checkpoint.steps(self.run_dir)
            where = (
                f"the last good checkpoint is at step {steps[0]:,}" if steps else "there was no checkpoint before it"
            )
            raise Diverged(
                f"a loss or a parameter stopped being a finite number before step {step:,}; {where}. "
                "A lower --learning-rate, a normalised network or another --scheme may help."
            )

    def close(self) -> None:
        for table in self.tables.values():
            table.close()
        self.tracker.close()


@jax.jit
def _all_finite(tree: Any) -> Any:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def save_best(run_dir: Path, state: Any, result: Epoch) -> None:
    """Write the agent of the best epoch, and delete the previous best."""
    name = f"best-{result.step:012d}"
    manifest = {"criterion": "mean return of an epoch", **result._asdict(), "mean_return": result.mean_return}
    checkpoint.write(run_dir / name, checkpoint.flatten({"agent": state}), manifest)
    for older in run_dir.glob("best-*"):
        if older.name != name:
            shutil.rmtree(older)


# -- resuming


class Restored(NamedTuple):
    """Newest checkpoint of a run."""

    step: int
    tree: Any  # on the device
    manifest: dict[str, Any]
    counters: Any
    extra: Any  # result of the `load` function of the loop

    @property
    def table_lengths(self) -> dict[str, int]:
        """Length of each table at the checkpoint, in bytes."""
        lengths: dict[str, int] = self.manifest["tables"]
        return lengths


def restore(
    run_dirs: Sequence[Path],
    template: Any,
    counters: type[Counters],
    load: Callable[[Path, dict[str, np.ndarray], dict[str, Any]], Any] = lambda *_: None,
) -> list[Restored]:
    """Return the newest checkpoint that is undamaged for all seeds of a program; [] if there is no checkpoint.

    `load` reads the files beside the checkpoint of a folder. It must take the arrays out of the checkpoint that are not
    in `template`. A damaged checkpoint is skipped with a warning.
    """
    for step in checkpoint.steps(*run_dirs):
        try:
            all_restored = [_read(run_dir, step, template, counters, load) for run_dir in run_dirs]
        except DamagedFile as error:
            checkpoint.warn_damaged(error)
            continue
        for run_dir, restored in zip(run_dirs, all_restored, strict=True):
            require_tables(run_dir, restored.manifest["tables"])
        for run_dir in run_dirs:
            checkpoint.drop_after(run_dir, step)
        return all_restored
    if not any(checkpoint.steps(run_dir) for run_dir in run_dirs):
        return []
    if len(run_dirs) == 1:
        raise UserError(f"{run_dirs[0]} has no checkpoint that can be read; move the folder away to train it anew.")
    lacking = next((run_dir for run_dir in run_dirs if not checkpoint.steps(run_dir)), None)
    where = f"{lacking} has none" if lacking else "they have none in common that can be read"
    raise UserError(
        f"{', '.join(map(str, run_dirs))} are trained in one program and resumed from one checkpoint, and {where}; put "
        "it back, or move all of these folders away to train them anew."
    )


def _read(run_dir: Path, step: int, template: Any, kind: type[Counters], load: Callable[..., Any]) -> Restored:
    folder = checkpoint.folder_of(run_dir, step)
    arrays, manifest = checkpoint.read(folder)
    counters = _counters(kind, manifest["counters"], folder)
    extra = load(run_dir, arrays, manifest)
    tree = checkpoint.unflatten(template, arrays, folder)
    return Restored(step, jax.tree.map(jnp.asarray, tree), manifest, counters, extra)


def _counters(kind: type[SomeCounters], values: dict[str, Any], folder: Path) -> SomeCounters:
    """Return saved counters, without those of other versions; raises `DamagedFile` if one is not of its type."""
    known = {name: value for name, value in values.items() if name in {field.name for field in fields(kind)}}
    for name, value in known.items():
        default = getattr(kind(), name)
        is_count = type(value) is int and 0 <= value < 2**62
        is_number = is_count or isinstance(value, float)
        is_list = isinstance(value, list) and all(type(entry) in (int, float) for entry in value)
        if not (is_list if default == [] else is_count if type(default) is int else is_number or value == default):
            raise DamagedFile(f"{folder / 'manifest.json'} is damaged: the counter {name} is {value!r:.40}.")
    return kind(**known)


# -- metrics


def metrics_columns(totals: Any, probes: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of metrics.csv."""
    from_updates = [column for name, leaf in totals.items() for column in _columns(name, leaf)]
    return ("step", "frame", "updates", "epsilon", *from_updates, *probes, "steps_per_second", "memory_mb", "seconds")


def _columns(name: str, leaf: Any) -> list[str]:
    return [name] if leaf.ndim == 0 else [f"{name}_{i + 1}" for i in range(leaf.shape[0])]


def fetch_means(totals: Any, updates: int) -> dict[str, float]:
    """Return the means of summed metrics; vectors are spread over numbered columns."""
    fetched = jax.device_get(totals)
    return {
        column: float(value) / updates
        for name, leaf in fetched.items()
        for column, value in zip(_columns(name, leaf), np.atleast_1d(leaf), strict=True)
    }
