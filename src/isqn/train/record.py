"""A run folder: its name, its lock, its config and its summary."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from isqn.agents.registry import config_from_mapping, read_config_file
from isqn.config.fields import nearest_path
from isqn.config.run import Run
from isqn.config.toml import to_toml
from isqn.data.files import LOCK, UNFINISHED, DamagedFile, lock_folder, replace_text, writing
from isqn.data.text import DamagedText, read_json
from isqn.imports import IMPORTED
from isqn.train import checkpoint
from isqn.types import UserError


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


@contextmanager
def lock_run(run_dirs: Iterable[Path], advice: str = "choose another --run-dir") -> Iterator[None]:
    """Lock run folders for this process, and create them if needed. The locks end with the process."""
    with ExitStack() as stack:
        for run_dir in run_dirs:
            stack.enter_context(lock_folder(run_dir, advice))
        yield


def clear_run(run_dir: Path, overwrite: bool = False) -> None:
    """Delete what is in a folder that a new run may take; a kill leaves the old run without its results, or no run."""
    require_free(run_dir, overwrite)
    order = {"summary.json": 0, "checkpoints": 1, "config.toml": 3}  # what is left must not pass for a finished run
    with writing(run_dir, "choose another --run-dir"):
        run_dir.mkdir(parents=True, exist_ok=True)
        for path in sorted(run_dir.iterdir(), key=lambda path: order.get(path.name, 2)):
            if path.is_dir() and not path.is_symlink():
                _delete_folder(path)
            elif path.name != LOCK:
                path.unlink()


def _delete_folder(path: Path) -> None:
    """Delete a folder; a kill leaves all of it, or something under a name that means nothing."""
    if not path.name.endswith(UNFINISHED):
        hidden = path.with_name(f".{path.name}{UNFINISHED}")
        shutil.rmtree(hidden, ignore_errors=True)
        path = path.rename(hidden)
    shutil.rmtree(path, ignore_errors=True)


def create_run(run_dir: Path, config: Run, overwrite: bool = False, trained_with: Sequence[Path] = ()) -> None:
    """Create a run; it exists once config.toml is written.

    `trained_with` lists the folders of all seeds of the program.
    """
    clear_run(run_dir, overwrite)
    siblings = relative_paths(trained_with or [run_dir], run_dir)
    with writing(run_dir, "choose another --run-dir"):
        write_summary(run_dir, {"status": "running", "trained_with": siblings})
        replace_text(run_dir / "config.toml", to_toml(config))


def relative_paths(folders: Iterable[Path], here: Path) -> list[str]:
    """Return the folders of the seeds of one program as paths relative to one of them."""
    return [os.path.relpath(folder, here) for folder in folders]


def read_config(run_dir: Path) -> Run:
    """Return the config of a run folder. Nothing that the folder names is imported."""
    path = run_dir / "config.toml"
    written_again = f"`isqn resume {run_dir}` writes it again, from the last checkpoint."
    if not path.is_file():
        if run_dir.is_file():
            raise UserError(f"{run_dir} is a file; give the folder of a run.")
        if not run_dir.exists():
            raise UserError(f"{run_dir} does not exist{nearest_path(run_dir) or '; give the folder of a run.'}")
        if path.exists():
            raise UserError(f"{path} is not a file; move it away.")
        if checkpoint.steps(run_dir):
            raise UserError(f"{path} is missing; {written_again}")
        raise UserError(f"{run_dir} is not a run: there is no config.toml in it.")
    with naming_missing_imports(run_dir):
        try:
            return read_config_file(path)
        except DamagedText as error:
            hint = f" Delete it, and {written_again}" if checkpoint.steps(run_dir) else ""
            raise UserError(f"{error}{hint}") from None


def restore_config(run_dir: Path) -> None:
    """Write a missing config.toml again, with the settings of the newest checkpoint that has them all."""
    if (run_dir / "config.toml").exists() or not checkpoint.steps(run_dir):
        return
    with lock_run([run_dir], "make it writable"), naming_missing_imports(run_dir):
        for step in checkpoint.steps(run_dir):
            folder = checkpoint.folder_of(run_dir, step)
            try:
                settings = checkpoint.read_manifest(folder)["config"]
            except DamagedFile:
                continue
            if "checkpoint_minutes" in settings:  # earlier versions did not save settings that may change
                given = {name: value for name, value in settings.items() if value is not None}
                replace_text(run_dir / "config.toml", to_toml(config_from_mapping(given, str(folder))))
                warnings.warn(f"{run_dir / 'config.toml'} was missing and is restored from {folder}", stacklevel=2)
                return


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
    """Return the state of a folder: new, unfinished, finished or foreign.

    A folder in which a kill interrupted `create_run` before the run began is new.
    """
    if not run_dir.exists():
        return "new"
    if not (run_dir / "config.toml").is_file():
        return "new" if run_dir.is_dir() and _holds_no_run(run_dir) else "foreign"
    return "finished" if read_summary(run_dir).get("status") == "finished" else "unfinished"


def _holds_no_run(folder: Path) -> bool:
    """Return whether a folder has nothing but what `create_run` writes before config.toml."""
    names = {path.name for path in folder.iterdir()}
    left = {name for name in names if not (name.startswith(".") and name.endswith((LOCK, UNFINISHED)))}
    return not left or (left == {"summary.json"} and "trained_with" in read_summary(folder))


def read_summary(run_dir: Path, *, strict: bool = False) -> dict[str, Any]:
    """Return the summary of a run; {} if there is none, or, unless `strict`, if it cannot be read."""
    path = run_dir / "summary.json"
    try:
        summary = read_json(path)
        if not isinstance(summary, dict):
            raise DamagedText.at(path, 1, "it is not an object")
        return summary
    except FileNotFoundError:
        return {}
    except (OSError, DamagedText) as error:
        if not strict:
            return {}
        what = f"{path} cannot be read ({error.strerror})." if isinstance(error, OSError) else str(error)
        advice = f"`isqn resume {run_dir}` writes it again." if checkpoint.steps(run_dir) else f"Move {run_dir} away."
        raise UserError(f"{what} {advice}") from None


def trained_with(run_dir: Path) -> list[str]:
    """Return the folders of the seeds of one program, relative to one of them; none if a summary does not say."""
    names = read_summary(run_dir).get("trained_with", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
        raise damaged_siblings(run_dir, names)
    return names


def damaged_siblings(run_dir: Path, names: Any) -> UserError:
    return UserError(f"{run_dir / 'summary.json'} is damaged: trained_with is {names!r}; it must name its siblings.")


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
