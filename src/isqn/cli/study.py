"""`isqn study NAME`: train the missing runs of a study, and write its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import tyro

from isqn.cli import report
from isqn.cli.parse import arg, parse, require_at_least_one
from isqn.cli.tables import table
from isqn.imports import IMPORTED
from isqn.study.worker import SEEDS_PER_JOB
from isqn.train.record import slug
from isqn.types import UserError


@dataclass(frozen=True)
class StudyRun:
    """Train the missing runs of a study, and write its report."""

    name: Annotated[tyro.conf.Positional[str], arg("NAME")]
    """Study of the paper (`isqn list studies`), or a study file such as mine.toml."""
    scale: Annotated[Literal["mini", "paper"] | None, arg("{mini,paper}", "mini")] = None
    """Size of the study: that of the paper (paper), or small enough for two cores (mini)."""
    out: Annotated[Path | None, arg("PATH", "studies/NAME-SCALE")] = None
    """Folder of the study."""
    tasks: Annotated[tuple[str, ...], arg("ENV_ID ...", "all of the study")] = ()
    """Environments to train in."""
    seeds: Annotated[tuple[int, ...], arg("INT ...", "those of the study")] = ()
    """Seeds to train."""
    engine: Literal["local", "ray", "slurm"] = "local"
    """Engine of the jobs: processes of this machine, Ray, or SLURM."""
    workers: Annotated[int | None, arg("INT", "one per GPU or core of this machine; a cluster decides itself")] = None
    """Number of parallel jobs."""
    seeds_per_job: int = SEEDS_PER_JOB
    """Number of seeds trained in one program, if the environment is written in JAX."""
    address: Annotated[str | None, arg("HOST:PORT", "Ray is started on this machine")] = None
    """Address of a Ray cluster, which decides how many jobs run at once."""
    gpus: float = 0.0
    """Number of GPUs per Ray job."""
    hosts: int = 1
    """Number of hosts per ILQL run, with --engine ray or slurm."""
    cluster: Literal["slurm", "local"] = "slurm"
    """Cluster of the SLURM engine; local runs its jobs on this machine, without SLURM, as a test."""
    slurm: Annotated[tuple[str, ...], arg("KEY=VALUE ...", "none")] = ()
    """Settings of submitit, such as slurm_partition=cpu timeout_min=600."""
    dry_run: bool = False
    """Do not train; list the runs with their parameters, memory and time."""
    show: bool = False
    """Do not train; print the study as a TOML file."""
    report: bool = True
    """Write the report after training; this needs `pip install "isqn[report]"`."""
    quiet: bool = False
    """Print nothing but errors."""


def run(args: Sequence[str]) -> int:
    options = parse(StudyRun, args, "isqn study")
    imported = list(IMPORTED)  # by --import, which the workers need too
    from isqn.study.catalogue import find_study
    from isqn.study.grid import read_study, to_toml

    if options.name.endswith(".toml"):
        if options.scale:
            raise UserError(f"--scale is for the studies of the paper; {options.name} says its own sizes.")
        study = read_study(Path(options.name))
    elif (Path(options.name) / "study.toml").is_file():
        file = Path(options.name) / "study.toml"
        raise UserError(f"{options.name} is a study folder; resume it with `isqn study {file} --out {options.name}`.")
    else:
        study = find_study(options.name, options.scale or "mini")
    study = study.only(options.tasks, options.seeds).with_imports(imported)
    if options.show:
        print(to_toml(study), end="")
        return 0
    from isqn.study import drive, engines
    from isqn.train.progress import format_count, say
    from isqn.train.run import loop_of

    engines.require_flags(options.engine, options.address, options.gpus, options.cluster, options.slurm, options.hosts)
    if options.hosts > 1 and not loop_of(study.cells[0].config).IS_DISTRIBUTED:
        raise UserError(f"--hosts is {options.hosts}; only runs of `isqn train ilql` are trained by several together.")
    for name in ("workers", "seeds_per_job", "hosts"):
        require_at_least_one(name, getattr(options, name))
    out = options.out
    if out is None and not (options.tasks or options.seeds):
        out = Path("studies") / slug(f"{study.name}-{study.scale}")
    if options.dry_run:
        return _dry_run(study, out, options.workers or engines.default_workers(), options.seeds_per_job)
    if out is None:
        raise UserError("--tasks and --seeds make another study; give it a folder of its own by --out.")
    from isqn.report import write

    if options.report:
        write.require_libraries()
    with redirect_stdout(sys.stderr):  # an engine may print; standard output is for the result
        engine = engines.make(
            options.engine,
            out,
            options.workers,
            options.address,
            options.gpus,
            options.cluster,
            options.slurm,
            options.hosts,
        )
        outcome = drive.train(study, out, engine, seeds_per_job=options.seeds_per_job, quiet=options.quiet)
    if not options.quiet:
        say(f"{outcome.finished} of {outcome.total} runs have finished")
    if outcome.failed:
        failed = format_count(len(outcome.failed), "job")
        say(
            f"isqn: {failed} failed; the same command tries again, and `isqn report {out} --missing drop` shows the "
            "seeds that all methods have"
        )
        return 1
    if not options.report:
        return 0
    if options.quiet:
        write.write(out, out / "report", write.Options())
        return 0
    return report.run([str(out)])


def _dry_run(study: Any, out: Path | None, workers: int, seeds_per_job: int) -> int:
    from isqn.study import drive
    from isqn.train.progress import duration, format_count

    rows: list[tuple[str, ...]] = []
    with redirect_stdout(sys.stderr), TemporaryDirectory() as empty:  # a part of a study needs no --out here
        planned, seconds = drive.estimate(study, out or Path(empty), workers, seeds_per_job)
        logs = drive.datasets_to_log(study, out or Path(empty), seeds_per_job) if study.datasets else []
    for row in planned:
        rows.append(
            (
                row.task,
                row.method,
                f"{row.runs}",
                f"{row.to_do}",
                f"{row.steps:,}",
                f"{row.parameters:,}",
                f"{row.memory / 1e9:.2f}",
                duration(sum(row.seconds)) if row.to_do else "",
            )
        )
    header = ("task", "method", "runs", "to train", "steps", "parameters", "GB a job", "time of its jobs")
    print(*table(header, rows), sep="\n")
    runs, runs_left = sum(row.runs for row in planned), sum(row.to_do for row in planned)
    time = f"about {duration(seconds)} with {format_count(workers, 'worker')} on this machine"
    print(f"{runs_left} of {runs} runs to train{f' in {out}' if out else ''}: {time}.")
    if logs:
        print(f"Before that, {format_count(len(logs), 'dataset')} to log, whose time is not counted.")
    return 0
