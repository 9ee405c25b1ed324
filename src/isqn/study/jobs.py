"""Jobs that a study has left: groups of seeds that train in one program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from isqn.study.cell import Cell
from isqn.study.engines import Job
from isqn.study.grid import Study
from isqn.study.worker import SEEDS_PER_JOB
from isqn.train import checkpoint, record, run
from isqn.train.functions import agent_bytes
from isqn.train.record import slug
from isqn.types import UserError

BASE_BYTES = 400_000_000  # memory of a process that has started JAX


def remaining_jobs(study: Study, out: Path, seeds_per_job: int = SEEDS_PER_JOB) -> list[Job]:
    """Return what is left to train. The first seeds of all methods come first, so that early results compare fairly."""
    left = [remaining_jobs_of(cell, study, out, seeds_per_job) for cell in study.cells]
    return [job for turn in itertools.zip_longest(*left) for job in turn if job]


def remaining_jobs_of(cell: Cell, study: Study, out: Path, seeds_per_job: int) -> list[Job]:
    """Return the jobs of a cell: seeds that began together resume together, and new ones are grouped."""
    left = [seed for seed in sorted(study.seeds) if record.run_state(cell.folder(out, seed)) != "finished"]
    begun = {group for seed in left if (group := _seeds_trained_with(cell.folder(out, seed), seed))}
    new = [seed for seed in left if not any(seed in group for group in begun)]
    is_joint = run.loop_of(cell.config).trains_seeds_together(cell.config)
    groups = [*sorted(begun), *_consecutive(new, seeds_per_job if is_joint else 1)]
    return [_cell_job(study, cell, tuple(group), out) for group in groups]


def _seeds_trained_with(folder: Path, seed: int) -> tuple[int, ...]:
    """Return the seeds of the program that began the run of a seed; none if it has not begun, or does not say."""
    names = record.trained_with(folder)
    folders = [(folder / name).resolve() for name in names]
    if record.run_state(folder) == "new" or not folders:
        return ()
    if folder.resolve() not in folders:
        raise record.damaged_siblings(folder, names)
    missing = [other for other in folders if not other.is_dir()]
    if missing and checkpoint.steps(folder):
        raise UserError(
            f"{folder} was begun in one program with {missing[0].name}, which is not there any more; move it away too."
        )
    first = seed - folders.index(folder.resolve())  # the seeds of a program follow one another
    return tuple(range(first, first + len(folders)))


def _consecutive(seeds: list[int], most: int) -> Iterator[list[int]]:
    """Yield groups of at most so many seeds that follow one another, as one program needs them."""
    for _, stretch in itertools.groupby(enumerate(seeds), key=lambda pair: pair[1] - pair[0]):
        members = [seed for _, seed in stretch]
        yield from (members[i : i + most] for i in range(0, len(members), most))


def _cell_job(study: Study, cell: Cell, seeds: tuple[int, ...], out: Path) -> Job:
    name = f"{slug(cell.task)}--{slug(cell.method)}--{seeds[0]}" + (f"-{seeds[-1]}" if len(seeds) > 1 else "")
    return make_job(study, name, cell.config_in(out, seeds), cell.folder(out, seeds[0]).parent, out)


def make_job(study: Study, name: str, config: Any, method_dir: Path, out: Path) -> Job:
    """Return a job with its files in the folder of the study."""
    return Job(
        name=name,
        config=config,
        method_dir=method_dir,
        file=out / "jobs" / f"{name}.toml",
        log=out / "logs" / f"{name}.log",
        memory=memory_needed(without_dataset(config.replace(seed=0))),
        imports=(*study.imports, *study.modules),
    )


def without_dataset(config: Any) -> Any:
    """Return the config as it is before its dataset exists."""
    return config.replace(dataset="") if config.dataset else config


@cache  # the jobs of a method differ in their seeds
def memory_needed(config: Any) -> int:
    """Estimate the memory of a job, for replay, network and process."""
    spec = run.specification(config)
    replay = run.loop_of(config).replay_memory(config, spec).total
    return BASE_BYTES + int(replay) + 4 * agent_bytes(config, spec)
