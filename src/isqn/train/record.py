"""Files of a run folder: config, tables as CSV that are flushed row by row, and a summary as JSON."""

from __future__ import annotations

import csv
import fcntl
import importlib
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

from isqn.agents.registry import read_config_file
from isqn.config.fields import nearest_path
from isqn.config.run import Run
from isqn.config.toml import to_toml
from isqn.data.files import replace_text
from isqn.imports import IMPORTED
from isqn.types import UserError

EPISODE_COLUMNS = ("epoch", "episode", "step", "frame", "return", "length", "seconds")


def seed_dir(folder: Path, seed: int) -> Path:
    """Return the folder of the run of one seed."""
    return folder / f"seed-{seed}"


def slug(name: str) -> str:
    """Return a name in a form that fits into a path."""
    for old, new in (("/", "-"), (":", "-"), (",", ""), (" ", "-"), ("=", ""), ("(λ)", "-lambda")):
        name = name.replace(old, new)
    return name


def default_run_dir(config: Run, root: Path = Path("runs")) -> Path:
    """Return the default folder of a run. It contains no time, so that the same command finds the same folder."""
    words = (config.experiment, config.env_id, config.label)
    return seed_dir(root.joinpath(*map(slug, words)), config.seed)


class Table:
    """A CSV file that grows by whole rows and can be truncated to its length at a checkpoint."""

    def __init__(self, path: Path, columns: tuple[str, ...], length: int | None = None):
        self.columns = columns
        if length is None:
            self._file = path.open("wb", buffering=0)
            self._write(columns)
        else:
            self._file = path.open("r+b", buffering=0)
            self._file.truncate(length)
            self._file.seek(length)

    def add(self, row: dict[str, Any]) -> None:
        self._write([_cell(row.get(column)) for column in self.columns])

    def _write(self, cells: Any) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        self._file.write(line.getvalue().encode())  # one write per row: a kill leaves it complete or absent

    @property
    def length(self) -> int:
        return self._file.tell()

    def flush_to_disk(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def require_tables(run_dir: Path, lengths: dict[str, int]) -> None:
    """Refuse tables that are shorter than at a checkpoint, because their rows cannot be restored."""
    for name, length in lengths.items():
        path = run_dir / f"{name}.csv"
        if not path.exists() or path.stat().st_size < length:
            raise UserError(
                f"{path} is {'shorter than at the checkpoint' if path.exists() else 'missing'}; "
                "put it back, or move the folder away to train it anew."
            )


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.9g}" if isinstance(value, float) else value


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, without an incomplete last line."""
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(io.StringIO(complete)))


def require_free(run_dir: Path, overwrite: bool = False) -> None:
    """Refuse a folder that a new run cannot be written to."""
    state = run_state(run_dir)
    if state == "finished" and not overwrite:
        raise UserError(
            f"{run_dir} holds a finished run; choose another --run-dir or --experiment, or add --overwrite."
        )
    if state == "unfinished" and not overwrite:
        raise UserError(
            f"{run_dir} holds an unfinished run; resume it with `isqn resume {run_dir}`, or add --overwrite."
        )
    if state == "foreign":
        raise UserError(f"{run_dir} exists and is not a run; choose another --run-dir.")


class Busy(UserError):
    """Another process trains this run."""


@contextmanager
def lock_run(run_dirs: Iterable[Path], flag: str = "--run-dir") -> Iterator[None]:
    """Lock run folders for this process, and create them if needed. The locks end with the process."""
    with ExitStack() as stack:
        for run_dir in run_dirs:
            with writable(run_dir, flag):
                run_dir.mkdir(parents=True, exist_ok=True)
                # The lock is a file beside the folder, because the folder may be emptied. It is open for writing,
                # because network file systems lock no other files.
                handle = os.open(run_dir.with_name(f".{run_dir.name}.lock"), os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"{run_dir} is being trained by another process.") from None
            except OSError as error:
                warnings.warn(f"{run_dir} cannot be locked ({error.strerror}): train it only once.", stacklevel=3)
        yield


@contextmanager
def writable(folder: Path, flag: str = "--run-dir") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another {flag}.") from None


def create_run(run_dir: Path, config: Run, overwrite: bool = False) -> None:
    """Create the folder of a run with its config."""
    require_free(run_dir, overwrite)
    with writable(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        for path in run_dir.iterdir():  # there are none unless `overwrite` is set
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        replace_text(run_dir / "config.toml", to_toml(config))


def read_config(run_dir: Path) -> Run:
    """Return the config of a run folder. Nothing that the folder names is imported."""
    if not (run_dir / "config.toml").is_file():
        if run_dir.is_file():
            raise UserError(f"{run_dir} is a file; give the folder of a run.")
        if not run_dir.exists():
            raise UserError(f"{run_dir} does not exist{nearest_path(run_dir) or '; give the folder of a run.'}")
        raise UserError(f"{run_dir} is not a run: there is no config.toml in it.")
    with naming_missing_imports(run_dir):
        return read_config_file(run_dir / "config.toml")


@contextmanager
def naming_missing_imports(run_dir: Path) -> Iterator[None]:
    """Add to an error which flags import what a run was trained with, if that is not imported now."""
    try:
        yield
    except UserError as error:
        recorded = read_summary(run_dir).get("imports", [])
        names = [name for name in recorded if isinstance(name, str)] if isinstance(recorded, list) else []
        imported = {Path(name).name for name in IMPORTED}  # the file may be imported from another folder now
        hint = " ".join(f"--import {name}" for name in names if Path(name).name not in imported)
        if not hint or hint in str(error):
            raise
        raise UserError(f"{error} The run was trained with {hint}; add it.") from error


def run_state(run_dir: Path) -> str:
    """Return the state of a folder: new, unfinished, finished or foreign."""
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        return "new"
    if not (run_dir / "config.toml").is_file():
        return "foreign"
    return "finished" if read_summary(run_dir).get("status") == "finished" else "unfinished"


def read_summary(run_dir: Path) -> dict[str, Any]:
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    replace_text(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")


def provenance() -> dict[str, Any]:
    """Return versions, device and flags, on which the bits of a run depend."""
    import jax

    core = ("isqn", "jax", "jaxlib", "flax", "optax", "numpy", "gymnasium")
    packages = (*core, "ale-py", "pgx", "MinAtar", "dm_control", "mujoco")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(jax.devices()[0]),
        "cores": len(usable_cores()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {name: number for name in packages if (number := _version(name))},
        "git": _git_hash(),
        "command": shlex.join(sys.argv),
        **({"imports": IMPORTED} if IMPORTED else {}),
    }


def usable_cores() -> list[int]:
    """Return the cores that this process may run on; all cores if the system does not report it."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_hash() -> str | None:
    try:
        out = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        return out.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Tracker:
    """Tracker of metrics in TensorBoard, wandb or trackio, under CleanRL's names. If it fails, the run continues."""

    NAMES: ClassVar = {
        "return": "charts/episodic_return",
        "length": "charts/episodic_length",
        "steps_per_second": "charts/SPS",
        "epsilon": "charts/epsilon",
        "loss": "losses/td_loss",
        "q_value": "losses/q_values",
    }

    def __init__(self, config: Run, run_dir: Path):
        self._log: Any = None
        self._finish: Any = None
        if config.track == "none":
            return
        try:
            self._open(config, run_dir)
        except Exception as error:
            self._switch_off(config.track, error)

    def _open(self, config: Run, run_dir: Path) -> None:
        if config.track == "tensorboard":
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                raise UserError('--track tensorboard needs `pip install "isqn[track]"`.') from None
            writer = SummaryWriter(str(run_dir / "tensorboard"))
            self._log = lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()]
            self._finish = writer.close
            return
        try:
            library = importlib.import_module(config.track)
        except ImportError:
            raise UserError(f'--track {config.track} needs `pip install "isqn[track]"`.') from None
        # Each seed of one process is a run: wandb needs `reinit`, and trackio would end the run in the same context.
        settings = {"dir": run_dir, "reinit": "create_new"} if config.track == "wandb" else {}
        name = f"{config.env_id} {config.label} seed {config.seed}"
        run = Context().run(
            library.init,
            project=config.experiment,
            name=name,
            config={"agent": config.agent, **asdict(config)},
            **settings,
        )
        self._log = lambda values, step: run.log(values, step=step)
        self._finish = run.finish

    def log(self, values: dict[str, Any], step: int) -> None:
        if self._log is None:
            return
        named = {
            self.NAMES.get(k, f"analysis/{k}"): v for k, v in values.items() if k not in ("step", "frame", "seconds")
        }
        try:
            self._log(named, step)
        except Exception as error:
            self._switch_off("tracker", error)

    def close(self) -> None:
        if self._finish is not None:
            try:
                self._finish()
            except Exception as error:
                self._switch_off("tracker", error)

    def _switch_off(self, name: str, error: Exception) -> None:
        self._log = self._finish = None
        consequence = "is switched off; the run continues and still writes its own files"
        warnings.warn(f"{name} failed and {consequence}: {error}", stacklevel=3)


def results_table(run_dir: Path) -> Path:
    """Return the table with the results of a run: its evaluations if it is offline, or its training episodes."""
    evaluations = run_dir / "evaluations.csv"
    return evaluations if evaluations.is_file() else run_dir / "episodes.csv"


def results(run_dir: Path) -> dict[str, Any]:
    """Return the mean return of each epoch, and the sum of these means (the paper's AUC)."""
    epochs: dict[int, list[float]] = {}
    rows = read_table(results_table(run_dir))
    for row in rows:
        epochs.setdefault(int(row["epoch"]), []).append(float(row["return"]))
    means = [sum(epochs[e]) / len(epochs[e]) if e in epochs else None for e in range(max(epochs, default=-1) + 1)]
    return {"episodes": len(rows), "epoch_returns": means, "auc": sum(mean for mean in means if mean is not None)}
