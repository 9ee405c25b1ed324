"""Training of a config into a run folder, by the loop of its agent."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import jax

from isqn.agents.registry import find_agent
from isqn.config.fields import flag
from isqn.config.run import Run
from isqn.data.files import DamagedFile, WriteError
from isqn.data.replay import Memory
from isqn.envs.adapter import Environment
from isqn.train import checkpoint, parallel, record, tables
from isqn.train.announce import advise_lower, remarks, require_address_space, require_memory
from isqn.train.functions import agent_bytes
from isqn.train.progress import Control, Progress, say
from isqn.train.record import read_config
from isqn.train.signals import stop_on_signals
from isqn.types import EnvSpec, UserError, num_bytes


class Loop(Protocol):
    """Names that a module must offer to train agents; `register_agent(loop=...)` names the module."""

    IS_DISTRIBUTED: bool  # whether several processes may train one run
    WORK: str  # unit of which `flops` counts the FLOPs: "update" or "game"

    def specification(self, config: Any) -> EnvSpec:
        """Return the specification of the environment."""

    def trains_seeds_together(self, config: Any) -> bool:
        """Return whether one program may train several seeds."""

    def require_possible(self, config: Any, spec: Any, **where: bool) -> None:
        """Refuse a run that cannot work, before its folder is made or an old one is deleted."""

    def train(self, config: Any, folders: list[Path], env: Environment | None, control: Control) -> None:
        """Train the runs in `folders` to the end, each from its newest checkpoint."""

    def flops(self, config: Any, spec: Any) -> float:
        """Return the FLOPs of one unit of work."""

    def replay_memory(self, config: Any, spec: Any) -> Memory:
        """Return the memory of the replay buffers, or of the dataset."""

    def batches_in_memory(self, config: Any) -> int:
        """Return the number of batches that are in memory at once."""

    def batch_flag(self, config: Any) -> str:
        """Return the setting that the memory of an update depends on."""

    def seconds_per_step(self, config: Any, seconds: float) -> float:
        """Measure the seconds of a step of all seeds, after compiling and after learning has started."""


def loop_of(config: Run) -> Loop:
    """Return the module that trains the agent of a config."""
    kind = find_agent(config.agent)
    names = [*Loop.__annotations__, *(name for name in vars(Loop) if not name.startswith("_"))]
    try:
        module = import_module(kind.loop)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"register_agent: the agent {kind.name!r} has the loop {kind.loop!r}, which cannot be imported ({error}); "
            f"it must be a module with {', '.join(names)}."
        ) from error
    if missing := [name for name in names if not hasattr(module, name)]:
        raise UserError(
            f"register_agent: the agent {kind.name!r} has the loop {kind.loop!r}, which lacks {', '.join(missing)}; "
            "isqn.train.run.Loop says what a loop must offer."
        )
    return cast(Loop, module)


def specification(config: Run) -> EnvSpec:
    """Return the specification of the environment of a run."""
    return loop_of(config).specification(config)


def start(config: Run, run_dir: Path | None = None, *, overwrite: bool = False, quiet: bool = False) -> list[Path]:
    """Train a new run; return its folders, one for each seed."""
    folders = run_dirs(config, run_dir)
    if loop_of(config).IS_DISTRIBUTED:
        parallel.join()
    require_possible(config, specification(config), is_new=True)
    for index, folder in enumerate(folders):
        _require_free(folder, config.with_seed_index(index), overwrite)
        for path in config.input_paths.values():
            if folder.resolve().is_relative_to(Path(path).resolve()):
                raise UserError(
                    f"The run folder {folder} is inside {path}, an input of the run; choose another --run-dir."
                )
            if Path(path).resolve().is_relative_to(folder.resolve()):
                raise UserError(
                    f"The run folder {folder} would be emptied and contains {path}, an input of the run; choose "
                    "another --run-dir."
                )
    parallel.barrier("checked")
    if not parallel.is_first():
        train(config.replace(track="none"), folders, quiet=True)
        return folders
    with record.lock_run(folders), stop_on_signals() as should_stop:
        for folder in folders:
            record.clear_run(folder, overwrite)
        for index, folder in enumerate(folders):
            record.create_run(folder, config.with_seed_index(index), overwrite, folders)
        train(config, folders, should_stop, quiet=quiet)
    return folders


def _require_free(folder: Path, config: Run, overwrite: bool) -> None:
    """Refuse a folder that holds another run; the error says in which settings that run differs."""
    try:
        record.require_free(folder, overwrite)
    except UserError as error:
        raise UserError(f"{error}{_compare_settings(folder, config)}") from None


def _compare_settings(folder: Path, config: Run) -> str:
    """Return a sentence about the settings in which the run in a folder differs; "" if there is no run."""
    try:
        there, here = read_config(folder).resume_fields(), config.resume_fields()
    except UserError:
        return ""
    different = [
        f"{name} ({there.get(name)!r} there, {here.get(name)!r} here)"
        for name in dict.fromkeys((*here, *there))
        if here.get(name) != there.get(name)
    ]
    shown = ", ".join(different[:5]) + (f" and {len(different) - 5} more" if len(different) > 5 else "")
    return f" It has other settings: {shown}." if different else " It has the same settings."


def require_possible(config: Any, spec: EnvSpec, **where: bool) -> None:
    """Refuse a run that cannot work, before its folder is made or an old one is deleted."""
    loop = loop_of(config)
    require_address_space()
    size = agent_bytes(config, spec)
    require_memory(size, f"The network and its optimizer need {size / 1e9:,.1f} GB", advise_lower(config))
    number = loop.batches_in_memory(config)
    size = number * num_bytes(spec.batch_shapes(config.sampled_batch_size))
    what = f"The {number} batches in memory take" if number > 1 else "A batch takes"
    require_memory(size, f"{what} {size / 1e9:,.1f} GB", f"Lower {flag('batch_size')}.")
    loop.require_possible(config, spec, **where)


def run_dirs(config: Run, run_dir: Path | None) -> list[Path]:
    """Return one folder for each seed."""
    if run_dir is not None and config.num_seeds == 1:
        return [run_dir]
    configs = [config.with_seed_index(index) for index in range(config.num_seeds)]
    return [record.seed_dir(run_dir, one.seed) if run_dir else record.default_run_dir(one) for one in configs]


def _folders_of_program(run_dir: Path) -> list[Path]:
    """Return the folders of the seeds that were trained in one program, which lie beside each other."""
    names = record.trained_with(run_dir) or _named_by_siblings(run_dir)
    folders = [run_dir / name for name in names]
    if any(folder.resolve().parent != run_dir.resolve().parent for folder in folders):
        raise record.damaged_siblings(run_dir, names)
    for folder in folders:
        if not folder.is_dir() and (folder == folders[0] or checkpoint.steps(run_dir)):
            raise UserError(
                f"{run_dir} was trained together with {folder.resolve()}, which is missing; put it back. The seeds of "
                "one program are resumed together."
            )
    return folders


def _named_by_siblings(run_dir: Path) -> list[str]:
    """Return the folders with which a run was trained, if its own summary cannot be read."""
    for path in sorted(run_dir.resolve().parent.glob("*/summary.json")):
        try:
            names = record.trained_with(path.parent)
        except UserError:
            continue
        if run_dir.resolve() in [(path.parent / name).resolve() for name in names]:
            return record.relative_paths([path.parent / name for name in names], run_dir.resolve())
    return ["."]


def resume(run_dir: Path, *, quiet: bool = False) -> bool:
    """Resume a run where it stopped; return False if it had finished."""
    record.restore_config(run_dir)
    read_config(run_dir)
    if record.run_state(run_dir) == "finished":
        return False
    folders = _folders_of_program(run_dir)
    for folder in folders:
        record.restore_config(folder)
    finished = [folder for folder in folders if record.run_state(folder) == "finished"]
    if finished and not checkpoint.steps(*folders):
        raise UserError(
            f"{run_dir} was trained together with {finished[0]}, which has finished, and there is no checkpoint that "
            f"both have; move {run_dir} away to train it anew."
        )
    config = read_config(folders[0])
    if len(folders) > 1:
        config = config.replace(num_seeds=len(folders))
    if loop_of(config).IS_DISTRIBUTED:
        parallel.join()
    if not parallel.is_first():
        train(config.replace(track="none"), folders, quiet=True)
        return True
    if config.dataset and not Path(config.dataset).exists():
        raise UserError(
            f"{config.dataset}, which {run_dir} learns from, is not there; put it back, or give its new path: "
            f"`dataset` in {run_dir / 'config.toml'} may be changed."
        )
    with record.lock_run(folders, "make it writable"), stop_on_signals() as should_stop:
        _complete_start(config, folders)
        for folder in folders:
            _require_unchanged(folder, read_config(folder))
        with record.naming_missing_imports(folders[0]):
            spec = specification(config)
            _require_same_protocol(folders[0], config, spec)
            require_possible(config, spec)
        train(config, folders, should_stop, quiet=quiet)
    return True


def _complete_start(config: Run, folders: list[Path]) -> None:
    """Create the runs of a program's seeds that a kill prevented `start` from creating."""
    for index, folder in enumerate(folders):
        if record.run_state(folder) == "new":
            record.create_run(folder, config.with_seed_index(index), trained_with=folders)


def _require_unchanged(run_dir: Path, config: Run) -> None:
    """Refuse a config that was changed since the last checkpoint, because the bits would fit neither config."""
    for step in checkpoint.steps(run_dir):
        try:
            earlier = checkpoint.read_manifest(checkpoint.folder_of(run_dir, step))["config"]
        except DamagedFile:
            continue
        for name, value in config.resume_fields().items():
            if value != earlier.get(name, value):  # a newer version may have more settings
                raise UserError(
                    f"{run_dir / 'config.toml'} was changed: {name} is {value!r}, and was {earlier[name]!r} at the "
                    "last checkpoint; put it back, or train a new run with `isqn train --config`."
                )
        return


def _require_same_protocol(run_dir: Path, config: Run, spec: EnvSpec) -> None:
    """Refuse to continue a run by other rules of play, to which another version may have changed the default."""
    earlier = record.read_summary(run_dir).get("protocol", spec.protocol)
    if earlier != spec.protocol and config.dataset:
        raise UserError(
            f"{run_dir} learned from data of the protocol {earlier}; {config.dataset} is of {spec.protocol}. Put the "
            "dataset back."
        )
    if earlier != spec.protocol:
        raise UserError(
            f"{run_dir} was played by the protocol {earlier}; here it would be {spec.protocol}. Resume it with the "
            "version of isqn in its summary.json, or train a new run."
        )


def train(
    config: Any,
    folders: list[Path],
    should_stop: Callable[[], bool] | None = None,
    *,
    quiet: bool = False,
    env: Environment | None = None,
) -> None:
    """Train the runs in `folders` to the end, each from its newest checkpoint."""
    progress = Progress(config.length, enabled=not quiet)
    if not checkpoint.steps(*folders) and tables.results_table(folders[0]).exists():  # also said with --quiet
        say(f"there is no checkpoint in {folders[0]}: the run begins again at step 0")
    for remark in remarks(config):
        progress.say(remark)
    signals = nullcontext(should_stop) if should_stop else stop_on_signals()
    with signals as should_stop, _say_how_to_go_on(config, folders):
        loop_of(config).train(config, folders, env, Control(progress, should_stop))


def seconds_per_step(config: Run, seconds: float = 1.0) -> float:
    """Measure the seconds of a step of all seeds, after compiling and after learning has started."""
    return loop_of(config).seconds_per_step(config, seconds)


# Errors of the system that stop a run and may come from any file.
SYSTEM_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)


@contextmanager
def _say_how_to_go_on(config: Run, folders: list[Path]) -> Iterator[None]:
    """Add the last checkpoint and the command that continues to an error of the disk, the system or the memory."""
    cause: BaseException
    try:
        yield
        return
    except WriteError as error:
        cause, what = error, str(error)
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS:
            raise
        cause, what = error, f"{error.filename or 'A file'} cannot be read or written ({error.strerror})."
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        why = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        if isinstance(error, jax.errors.JaxRuntimeError) and not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", why):
            raise
        advice = advise_lower(config, loop_of(config).batch_flag(config))
        cause, what = error, f"There is not enough memory for an update ({why}). {advice}"
        if not checkpoint.steps(*folders):  # it comes with the first update
            raise UserError(what) from cause
    try:
        steps = checkpoint.steps(*folders)
        where = f"the last checkpoint is at step {steps[0]:,}" if steps else "there is no checkpoint yet"
        command = f"`isqn resume {folders[0]}` {'continues there' if steps else 'begins again'}"
    except OSError:  # without file handles no folder can be read
        where, command = "nothing before the last checkpoint is lost", f"`isqn resume {folders[0]}` continues"
    raise UserError(f"{what} The run stopped; {where}, and {command}.") from cause
