"""From a config to a trained run folder, by whichever loop trains its agent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from isqn.agents.registry import find_agent
from isqn.config.fields import MAY_CHANGE, PLACE, flag, marks
from isqn.config.parts import Run
from isqn.data.files import DamagedFile
from isqn.envs.adapter import Environment
from isqn.train import checkpoint, parallel, record
from isqn.train.announce import advise_lower, relative_paths, require_memory
from isqn.train.functions import make_agent
from isqn.train.progress import Progress
from isqn.train.record import read_config
from isqn.train.signals import stop_on_signals
from isqn.types import EnvSpec, UserError, num_bytes


def loop_of(config: Run) -> Any:
    """Return the module that trains an agent of this kind; `isqn.train.online` shows what it must offer."""
    module: ModuleType = import_module(find_agent(config.agent).loop)
    return module


def specification(config: Run) -> EnvSpec:
    """Return the specification of the environment as this run will observe it."""
    return loop_of(config).specification(config)  # type: ignore[no-any-return]


def agent_bytes(config: Run, spec: EnvSpec) -> int:
    """Return the memory of networks, copies and optimizer of all seeds that are trained at once."""
    return config.num_seeds * num_bytes(jax.eval_shape(make_agent(config, spec).init, 0))


def start(config: Run, run_dir: Path | None = None, *, overwrite: bool = False, quiet: bool = False) -> list[Path]:
    """Train a new run; return the folders that it wrote, one for each seed."""
    folders = run_dirs(config, run_dir)
    if loop_of(config).IS_DISTRIBUTED:
        parallel.join()
    require_possible(config, specification(config), is_new=True)
    for folder in folders:
        record.require_free(folder, overwrite)
        for place in config.places.values():
            if folder.resolve().is_relative_to(Path(place).resolve()):
                raise UserError(f"{folder} lies in {place}, which is learned from; choose another --run-dir.")
            if Path(place).resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{place} lies in {folder}, which is to be overwritten; choose another --run-dir.")
    parallel.barrier("checked")
    if not parallel.is_first():
        train(config.replace(track="none"), folders, quiet=True)
        return folders
    with record.lock_run(folders):
        for index, folder in enumerate(folders):
            record.create_run(folder, config.of_seed(index), overwrite)
        for folder in folders:
            record.write_summary(folder, {"status": "running", "trained_with": relative_paths(folders, folder)})
        train(config, folders, quiet=quiet)
    return folders


def require_possible(config: Run, spec: EnvSpec, **where: Any) -> None:
    """Refuse what cannot run before a folder is made, or an old one deleted, for it."""
    loop, sized = loop_of(config), config
    size = agent_bytes(config, spec)
    require_memory(size, f"The network and its optimizer need {size / 1e9:,.1f} GB", advise_lower(config))
    number = loop.batches_in_memory(config)
    size = number * num_bytes(spec.batch(sized.sampled_batch_size))  # type: ignore[attr-defined]
    what = f"The {number} batches that are held take" if number > 1 else "A batch takes"
    require_memory(size, f"{what} {size / 1e9:,.1f} GB", f"Lower {flag('batch_size')}.")
    loop.require_possible(config, spec, **where)


def run_dirs(config: Run, run_dir: Path | None) -> list[Path]:
    """Return one folder for each seed."""
    if run_dir is not None and config.num_seeds == 1:
        return [run_dir]
    configs = [config.of_seed(index) for index in range(config.num_seeds)]
    return [record.seed_dir(run_dir, one.seed) if run_dir else record.default_run_dir(one) for one in configs]


def resume(run_dir: Path, *, quiet: bool = False) -> bool:
    """Go on where the run stopped; return False if it had finished."""
    read_config(run_dir)
    if record.run_state(run_dir) == "finished":
        return False
    folders = [run_dir / name for name in record.read_summary(run_dir).get("trained_with", ["."])]
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
            f"{config.dataset}, which {run_dir} learns from, is not there; put it back, or say where it is now: "
            f"`dataset` in {run_dir / 'config.toml'} may be changed."
        )
    with record.lock_run(folders):
        for folder in folders:
            _require_unchanged(folder, read_config(folder))
        with record.naming_missing_imports(folders[0]):
            require_possible(config, specification(config))
        train(config, folders, quiet=quiet)
    return True


def _require_unchanged(run_dir: Path, config: Run) -> None:
    """Refuse to go on with other settings than the run began with, because its bits would belong to neither."""
    for step in checkpoint.steps(run_dir):
        try:
            earlier = checkpoint.read_manifest(checkpoint.folder_of(run_dir, step))["config"]
        except DamagedFile:
            continue
        for name, value in config.resume_fields().items():
            if value != earlier.get(name, value):  # a version that knows more settings may go on
                raise UserError(
                    f"{run_dir / 'config.toml'} was changed: {name} is {value!r}, and was {earlier[name]!r} at the "
                    "last checkpoint; put it back, or train a new run with `isqn train --config`."
                )
        return


def may_change(config: Run) -> set[str]:
    """Return the settings that may change in the middle of a run."""
    return {*marks(type(config), MAY_CHANGE), *marks(type(config), PLACE)}


def train(config: Run, folders: list[Path], *, quiet: bool = False, env: Environment | None = None) -> None:
    """Train what `folders` hold to the end, each from its newest checkpoint."""
    progress = Progress(config.length, enabled=not quiet)  # type: ignore[attr-defined]
    if not checkpoint.steps(folders[0]) and record.results_table(folders[0]).exists():
        progress.say(f"there is no checkpoint in {folders[0]}: the run begins again at step 0")
    with stop_on_signals() as should_stop, _name_memory_errors(config):
        loop_of(config).train(config, folders, env, progress, should_stop)


def seconds_per_step(config: Run, seconds: float = 1.0) -> float:
    """Measure the seconds of a step of all seeds together, once the run learns, after compiling."""
    return loop_of(config).seconds_per_step(config, seconds)  # type: ignore[no-any-return]


@contextmanager
def _name_memory_errors(config: Run) -> Iterator[None]:
    """Name the flags when memory runs out: what an update needs is known only when it is allocated."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, jax.errors.JaxRuntimeError) and not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", why):
            raise
        advice = advise_lower(config, loop_of(config).batch_flag(config))
        raise UserError(f"There is not enough memory for an update ({why}). {advice}") from error
