"""Train the runs that a study lacks, by any engine."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from isqn.agents.registry import config_from_mapping
from isqn.analysis import cost
from isqn.config.fields import INPUT_PATH, MAY_CHANGE, field_names, field_types, find_rules, name_settings
from isqn.config.toml import to_toml
from isqn.data.convert import convert
from isqn.data.files import replace_bytes
from isqn.data.index import INDEX, read_index, spec_from_index
from isqn.data.sources import own_dataset
from isqn.exits import DONE, INTERRUPTED
from isqn.presets import default_config, preset_config
from isqn.study.cell import require_settings
from isqn.study.checks import LOGGING_AGENT, SUBSET_SETTINGS
from isqn.study.engines import RETRIES, Engine, Handle, Job, share_cores, visible_gpus
from isqn.study.grid import Study
from isqn.study.grid import to_toml as study_toml
from isqn.study.jobs import make_job, remaining_jobs, remaining_jobs_of, without_dataset
from isqn.study.progress import StudyProgress, steps_done
from isqn.study.worker import SEEDS_PER_JOB
from isqn.train import record, run
from isqn.train.progress import format_count, say
from isqn.train.record import slug
from isqn.train.signals import stop_on_signals
from isqn.types import Interrupted, UserError

POLL_SECONDS = 0.5
STOP_SECONDS = 120.0  # timeout for jobs to save; a scheduler may be slow to report that one has ended

LOW_DISK_BYTES = 2**20  # bytes on a disk


# -- training


class Outcome(NamedTuple):
    """Number of finished runs, of all runs, and the jobs that failed."""

    finished: int
    total: int
    failed: list[Job]


def train(
    study: Study, out: Path, engine: Engine, *, seeds_per_job: int = SEEDS_PER_JOB, quiet: bool = False
) -> Outcome:
    """Train the missing runs. A failed job does not hold up the others; a request to stop raises Interrupted."""
    _require_environments(study)
    out = out.resolve()  # a worker may start in another folder
    with closing(engine), record.lock_run([out], "choose another --out"):
        _require_matching_runs(study, out)
        study = _copy_imports(study, out)
        pending = remaining_jobs(study, out, seeds_per_job)
        record.replace_text(out / "study.toml", study_toml(study, out))
        (out / "jobs").mkdir(exist_ok=True)
        progress = StudyProgress(study, out, enabled=not quiet)
        with stop_on_signals() as should_stop:
            failed = make_datasets(study, pending, out, engine, progress, should_stop)
            pending = [job for job in pending if not (job.config.dataset and _is_absent(job.config.dataset))]
            for job in pending:
                record.replace_text(job.file, to_toml(job.config))
            if pending:
                progress.say(f"training {format_count(len(pending), 'job')}; each has a log in {out / 'logs'}")
            failed += _run_jobs(pending, engine, progress, should_stop)
        states = Counter(record.run_state(folder) for folder in study.folders(out))
        return Outcome(states["finished"], sum(states.values()), failed)


def _run_jobs(
    pending: list[Job], engine: Engine, progress: StudyProgress, should_stop: Callable[[], bool]
) -> list[Job]:
    """Run jobs until none is left; return those that failed."""
    running: dict[Handle, Job] = {}
    kills: Counter[str] = Counter()
    failed: list[Job] = []
    while pending or running:
        started = engine.start(pending) if pending else ()
        running |= {handle: job for job, handle in started}
        pending = [job for job in pending if job not in running.values()]
        for handle, job in list(running.items()):
            code = handle.poll()
            if code is None:
                continue
            del running[handle]
            kills[job.name] += code < 0
            if code == DONE:
                progress.say(f"finished {job.name}")
            elif code == INTERRUPTED or (code < 0 and kills[job.name] <= RETRIES):
                how = "stopped" if code > 0 else "killed"
                progress.say(f"{job.name} was {how}; it starts again, from its checkpoint if it has one")
                pending.append(job)
            else:
                failed.append(job)
                why = f"killed {kills[job.name]} times" if code < 0 else last_line(job.log)
                log = job.log if job.log.exists() else progress.out / "logs"  # a job that never started has no log
                progress.say(f"FAILED {job.name}: {why} (log: {log})", always=True)
        progress.show(running.values(), len(pending), failed)
        if should_stop():
            _stop(running, progress)
            raise Interrupted(f"stopped; the same command resumes {progress.out}")
        if running:
            time.sleep(POLL_SECONDS)
    progress.erase()
    return failed


def _stop(running: dict[Handle, Job], progress: StudyProgress) -> None:
    progress.say(f"saving {format_count(len(running), 'job')}")
    for handle in running:
        handle.stop()
    end = time.monotonic() + STOP_SECONDS
    while any(handle.poll() is None for handle in running) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)


def last_line(log: Path) -> str:
    """Return the last line of a log, which says why a job failed; without one, the disk may be full."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "no log"
    if lines:
        return lines[-1].removeprefix("isqn: ")
    free = shutil.disk_usage(log.parent).free
    return "nothing in its log" + (f"; its disk has {free:,} bytes left" if free < LOW_DISK_BYTES else "")


# -- checks before training


def _require_environments(study: Study) -> None:
    """Refuse an environment that cannot be made, before a folder is made."""
    for task, cell in {cell.task: cell for cell in study.cells}.items():
        with _name_errors(f"study {study.name}, {task}"), name_settings():
            run.specification(without_dataset(cell.config))


@contextmanager
def _name_errors(where: str) -> Iterator[None]:
    """Let errors begin with the part of the study that they are about."""
    try:
        yield
    except UserError as error:
        error.args = (f"{where}: {error}",)
        raise


def _require_matching_runs(study: Study, out: Path) -> None:
    """Refuse a folder with other settings, other runs (the report would leave them out) or other imported files."""
    asked = study.folders(out)
    for folder, (cell, seed) in asked.items():
        if (folder / "config.toml").is_file():
            cell.read_config(folder, seed)
    existing = [path.parent for path in sorted(out.glob("runs/*/*/*/config.toml"))]
    unasked = [folder for folder in existing if folder not in asked]
    if unasked:
        raise UserError(
            f"--out {out} has {format_count(len(unasked), 'run')} that this study does not ask for, such as "
            f"{unasked[0].relative_to(out)}; choose another folder, or ask for those too."
        )
    for name, copy in _import_copies(study, out).items():
        if existing and copy.is_file() and copy.read_bytes() != Path(name).read_bytes():
            raise UserError(
                f"imports: {name} is not what the runs in --out {out} were trained with, which is {copy}; "
                "choose another folder, or delete that file if no run that you keep needs it."
            )


def _copy_imports(study: Study, out: Path) -> Study:
    """Copy each imported file into the folder, so that runs stay together with the code they were trained with."""
    copies = _import_copies(study, out)
    for name, copy in copies.items():
        copy.parent.mkdir(exist_ok=True)
        replace_bytes(copy, Path(name).read_bytes())
    return study.replace(imports=tuple(str(copies.get(name, name)) for name in study.imports))


def _import_copies(study: Study, out: Path) -> dict[str, Path]:
    """Return where each imported file is copied to; modules are installed and need no copy."""
    return {name: out / "imports" / Path(name).name for name in study.imports if name.endswith(".py")}


# -- datasets


def needed_datasets(study: Study, pending: list[Job], out: Path) -> dict[str, tuple[str, int]]:
    """Return the datasets that jobs learn from, each with its environment and the seed of the run that logs it."""
    needed = {job.config.dataset for job in pending if job.config.dataset}
    of_study = {
        cell.config_in(out, (seed,)).dataset: (cell.task, seed if "{seed}" in cell.config.dataset else 0)
        for cell in study.cells
        for seed in study.seeds
    }
    return {path: of_study[path] for path in of_study if path in needed}


def datasets_to_log(study: Study, out: Path, seeds_per_job: int) -> list[str]:
    pending = remaining_jobs(study, out, seeds_per_job)
    return [path for path in needed_datasets(study, pending, out) if _is_absent(path)]


def make_datasets(
    study: Study,
    pending: list[Job],
    out: Path,
    engine: Engine,
    progress: StudyProgress,
    should_stop: Callable[[], bool],
) -> list[Job]:
    """Make the missing datasets: a dqn run logs each, and a subset of the log is taken. Return the jobs that failed."""
    needed = needed_datasets(study, pending, out)
    if not study.datasets:
        if absent := [path for path in needed if _is_absent(path)]:
            raise UserError(
                f"study {study.name}: {absent[0]} is not a dataset ({len(absent)} are missing); make them by "
                "`isqn data convert`, or let the study log some by a table [datasets]."
            )
        return []
    subset = study.dataset_subset
    checkpoints = subset.pop("checkpoints") if subset["subset"] == "first" else 1
    logging_jobs = {path: _logging_job(study, path, *needed[path], out) for path in needed}
    for path, job in logging_jobs.items():
        if (job.folders[0] / "config.toml").is_file():
            require_settings(job.folders[0], job.config)
        if not _is_absent(path):
            index = read_index(Path(path))
            if {key: index[key] for key in subset} | {"n": index["num_checkpoints"]} != subset | {"n": checkpoints}:
                raise UserError(
                    f"{path} was made with another subset, fraction or number of checkpoints than the study's; "
                    "choose another folder, or delete it."
                )
    logging_jobs = {path: job for path, job in logging_jobs.items() if _is_absent(path)}
    if logging_jobs:
        progress.say(f"logging {format_count(len(logging_jobs), 'dataset')}; each has a log in {out / 'logs'}")
    remaining = [job for job in logging_jobs.values() if record.run_state(job.folders[0]) != "finished"]
    for job in remaining:
        record.replace_text(job.file, to_toml(job.config))
    failed = _run_jobs(remaining, engine, progress, should_stop)
    for path, job in logging_jobs.items():
        if job not in failed:
            recorded = job.folders[0] / "dataset"
            source, spec = own_dataset(recorded, checkpoints), spec_from_index(read_index(recorded))
            convert(source, spec, Path(path), **subset, should_stop=should_stop)
            progress.say(f"made {path}")
    return failed


def _logging_job(study: Study, path: str, task: str, seed: int, out: Path) -> Job:
    """Return the job of the run that logs a dataset."""
    settings = {key: value for key, value in study.datasets.items() if key not in SUBSET_SETTINGS}
    preset = settings.pop("preset", "")
    base = preset_config(preset, LOGGING_AGENT) if preset else default_config(LOGGING_AGENT, task)
    fields = {"env_id": task, "experiment": study.name, "seed": seed, "record_dataset": True} | settings
    config = config_from_mapping(fields, f"study {study.name}: datasets", base)
    name = f"log--{slug(os.path.relpath(path, out))}"
    return make_job(study, name, config, out / "logging" / name, out)


def _is_absent(path: str) -> bool:
    return not (Path(path) / INDEX).is_file() or not read_index(Path(path)).get("complete", True)


# -- dry run


class Planned(NamedTuple):
    """A line of --dry-run: one method on one task."""

    task: str
    method: str
    runs: int
    to_do: int
    steps: int  # of a run
    parameters: int  # of a run, with copies
    memory: int  # bytes of a job
    seconds: list[float]  # of each job that is left


def estimate(study: Study, out: Path, workers: int, seeds_per_job: int) -> tuple[list[Planned], float]:
    """Return the runs that are left, and the seconds they take on this machine.

    Of runs that take about as long, only the one with the most heads is measured.
    """
    _require_environments(study)
    _require_matching_runs(study, out)
    at_once = workers if visible_gpus() else min(workers, len(record.usable_cores()))  # more would share the cores
    share_cores(workers)
    measured: dict[tuple[object, ...], tuple[float, float]] = {}
    rows = {}
    for cell in sorted(study.cells, key=lambda cell: -cell.config.target_scheme.num_heads):
        left, seconds = remaining_jobs_of(cell, study, out, seeds_per_job), []
        for job in left:
            key = duration_key(job.config)
            if key not in measured:
                say(f"measuring {cell.method} on {cell.task}")
                start = time.perf_counter()
                # measuring takes as long as the start of a worker: a second or two, and compiling
                with _name_errors(f"study {study.name}, {cell.method} on {cell.task}"):
                    step_seconds = run.seconds_per_step(without_dataset(job.config))
                measured[key] = step_seconds, time.perf_counter() - start
            step_seconds, start_seconds = measured[key]
            seconds.append(start_seconds + step_seconds * (cell.config.length - steps_done(job.folders[0])))
        rows[cell.task, cell.method] = Planned(
            cell.task,
            cell.method,
            len(study.seeds),
            sum(job.config.num_seeds for job in left),
            cell.config.length,
            cost.measure_size(cell.config, run.specification(without_dataset(cell.config))).total_parameters,
            max((job.memory for job in left), default=0),
            seconds,
        )
    planned = [rows[cell.task, cell.method] for cell in study.cells]
    free = [0.0] * at_once  # time at which each worker is free; the earliest takes the next job
    for job_seconds in (each for row in planned for each in row.seconds):
        free[free.index(min(free))] += job_seconds
    return planned, max(free)


# Settings that do not change how long a step takes, beside rates and weights (numbers with a fraction).
SAME_DURATION = (
    *("seed", "env_id", "experiment", "target_update_period", "target_sync_period", "learning_starts", "buffer_size"),
    *("max_episode_steps", "epoch_steps", "epoch_updates", "log_period_steps", "log_period_updates"),
    *("epsilon_decay_steps", "learning_rate_decay_steps", "evaluation_steps", "evaluation_games", "word_seed"),
    *("scheme", "num_bellman_iterations"),  # see `num_costly_heads`
)


def duration_key(config: Any) -> tuple[object, ...]:
    """Return a key that is equal for runs that take about as long, such as those on two games of one kind."""
    kind = type(config)
    ignored = {*SAME_DURATION, *find_rules(kind, MAY_CHANGE), *find_rules(kind, INPUT_PATH)}
    rates = (float, float | None, tuple[float, ...])
    ignored |= {name for name, hint in field_types(kind).items() if hint in rates and name != "width_factor"}
    settings = tuple(getattr(config, name) for name in field_names(kind) if name not in ignored)
    return config.agent, config.env_id.partition("/")[0], config.uses_batch_norm, config.num_costly_heads, settings
