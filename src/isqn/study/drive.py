"""Train what a study still lacks: the same run list for every engine."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from isqn.analysis import cost
from isqn.data.convert import convert
from isqn.data.dataset import INDEX, read_index, spec_of
from isqn.data.sources import own
from isqn.experiments import worker
from isqn.experiments.config import Config, from_mapping, read_toml, slug, to_toml
from isqn.presets import preset_config, preset_for
from isqn.study.engines import RETRIES, Engine, Handle, Job, share_cores, visible_gpus
from isqn.study.grid import PART, Cell, Study, require_settings
from isqn.study.grid import to_toml as study_toml
from isqn.study.worker import SEEDS_PER_JOB
from isqn.train import record, run
from isqn.train.progress import count, duration, say
from isqn.types import Interrupted, UserError

POLL_SECONDS = 0.5
DRAW_SECONDS = 2.0  # between two tables of progress on a terminal
SAY_SECONDS = 300.0  # between two lines of progress in a pipe
STOP_SECONDS = 120.0  # a scheduler may be slow to say that a job has ended
BASE_BYTES = 400_000_000  # of a process that has started JAX


def folders(study: Study, out: Path) -> dict[Path, tuple[Cell, int]]:
    """Every run of a study."""
    return {cell.folder(out, seed): (cell, seed) for cell in study.cells for seed in study.seeds}


def jobs(study: Study, out: Path, seeds_per_job: int = SEEDS_PER_JOB) -> list[Job]:
    """What is left to train: first seeds of every method, so that what is there can be compared early, and fairly."""
    left = [jobs_of(cell, study, out, seeds_per_job) for cell in study.cells]
    return [job for turn in itertools.zip_longest(*left) for job in turn if job]


def jobs_of(cell: Cell, study: Study, out: Path, seeds_per_job: int) -> list[Job]:
    """Seeds that were begun together go on together; new ones are put together."""
    left = [s for s in sorted(study.seeds) if record.run_state(cell.folder(out, s)) != "finished"]
    begun = {group for s in left if (group := _begun_together(cell.folder(out, s)))}
    new = [s for s in left if not any(s in group for group in begun)]
    together = seeds_per_job if run.uses_compiled_loop(cell.config) else 1
    groups = [*sorted(begun), *_consecutive(new, together)]
    return [_job(study, cell, tuple(group), out) for group in groups]


def _begun_together(folder: Path) -> tuple[int, ...]:
    """The seeds of its program; none if it has not begun."""
    others = [(folder / other).resolve() for other in record.read_summary(folder).get("trained_with", ())]
    gone = [other for other in others if not (other / "config.toml").is_file()]
    if folder.resolve() in gone:
        raise UserError(f"{folder} has no config.toml any more; move it away to train it anew.")
    if gone:
        raise UserError(
            f"{folder} was begun in one program with {gone[0].name}, which is not there any more; move it away too."
        )
    return tuple(sorted(read_toml(other / "config.toml").seed for other in others))


def _consecutive(seeds: list[int], most: int) -> Iterator[list[int]]:
    """A program's seeds follow one another."""
    for _, stretch in itertools.groupby(enumerate(seeds), key=lambda pair: pair[1] - pair[0]):
        members = [seed for _, seed in stretch]
        yield from (members[i : i + most] for i in range(0, len(members), most))


def _job(study: Study, cell: Cell, seeds: tuple[int, ...], out: Path) -> Job:
    config = cell.config_in(out, seeds)
    name = f"{slug(cell.task)}--{slug(cell.method)}--{seeds[0]}" + (f"-{seeds[-1]}" if len(seeds) > 1 else "")
    return Job(
        name=name,
        config=config,
        method_dir=cell.folder(out, seeds[0]).parent,
        file=out / "jobs" / f"{name}.toml",
        log=out / "logs" / f"{name}.log",
        memory=memory_needed(config.replace(seed=0, dataset="")),
        imports=study.imports,
    )


class Outcome(NamedTuple):
    finished: int
    total: int
    failed: list[Job]


def train(
    study: Study, out: Path, engine: Engine, *, seeds_per_job: int = SEEDS_PER_JOB, quiet: bool = False
) -> Outcome:
    """Train what is missing. Failed jobs are listed, and hold up no other; Interrupted if asked to stop."""
    _require_environments(study)
    out = out.resolve()  # a worker may start elsewhere
    with closing(engine), record.hold([out], "--out"):
        _require_these_runs(study, out)
        study = _keep_imports(study, out)
        pending = jobs(study, out, seeds_per_job)
        record.replace_text(out / "study.toml", study_toml(study, out))
        (out / "jobs").mkdir(exist_ok=True)
        board = Board(study, out, enabled=not quiet)
        with run.stop_on_signals() as should_stop:
            failed = make_datasets(study, pending, out, engine, board, should_stop)
            pending = [job for job in pending if not (job.config.dataset and _is_absent(job.config.dataset))]
            for job in pending:
                record.replace_text(job.file, to_toml(job.config))
            if pending:
                board.say(f"training {count(len(pending), 'job')}; each has a log in {out / 'logs'}")
            failed += _drive(pending, engine, board, should_stop)
        states = Counter(record.run_state(folder) for folder in folders(study, out))
        return Outcome(states["finished"], sum(states.values()), failed)


def datasets(study: Study, pending: list[Job], out: Path) -> dict[str, tuple[str, int]]:
    """Those that jobs learn from: what is played there, and the seed of the run that logs it."""
    needed = {job.config.dataset for job in pending if job.config.dataset}
    wanted = {
        cell.config_in(out, (seed,)).dataset: (cell.task, seed if "{seed}" in cell.config.dataset else 0)
        for cell in study.cells
        for seed in study.seeds
    }
    return {place: wanted[place] for place in wanted if place in needed}


def make_datasets(
    study: Study, pending: list[Job], out: Path, engine: Engine, board: Board, should_stop: Callable[[], bool]
) -> list[Job]:
    """Those that are not there: a run of dqn logs each, and maybe a part of it is taken. The jobs that failed."""
    wanted = datasets(study, pending, out)
    if not study.datasets:
        if absent := [place for place in wanted if _is_absent(place)]:
            raise UserError(
                f"study {study.name}: {absent[0]} is not a dataset ({len(absent)} are missing); make them by "
                "`isqn data convert`, or let the study log some by a table [datasets]."
            )
        return []
    part = study.part
    checkpoints = part.pop("checkpoints") if part["subset"] == "first" else 1
    logs = {place: _logging(study, place, *wanted[place], out) for place in wanted}
    for place, log in logs.items():
        if (log.folders[0] / "config.toml").is_file():
            require_settings(log.folders[0], log.config)
        if not _is_absent(place):
            index = read_index(Path(place))
            if {key: index[key] for key in part} | {"n": index["num_checkpoints"]} != part | {"n": checkpoints}:
                raise UserError(
                    f"{place} is another part of its log than the study says; choose another folder, or delete it."
                )
    logs = {place: log for place, log in logs.items() if _is_absent(place)}
    if logs:
        board.say(f"logging {count(len(logs), 'dataset')}; each has a log in {out / 'logs'}")
    left = [log for log in logs.values() if record.run_state(log.folders[0]) != "finished"]
    for log in left:
        record.replace_text(log.file, to_toml(log.config))
    failed = _drive(left, engine, board, should_stop)
    for place, log in logs.items():
        if log not in failed:
            whole = log.folders[0] / "dataset"
            convert(own(whole, checkpoints), spec_of(read_index(whole)), Path(place), **part)
            board.say(f"made {place}")
    return failed


def datasets_to_log(study: Study, out: Path, seeds_per_job: int) -> list[str]:
    return [place for place in datasets(study, jobs(study, out, seeds_per_job), out) if _is_absent(place)]


def _logging(study: Study, place: str, task: str, seed: int, out: Path) -> Job:
    """The run that logs a dataset."""
    settings = {key: value for key, value in study.datasets.items() if key not in PART}
    base = preset_config(settings.pop("preset", None) or preset_for(task, "dqn"), "dqn")
    fields = {"env_id": task, "experiment": study.name, "seed": seed, "record_dataset": True} | settings
    config = from_mapping(fields, f"study {study.name}: datasets", base)
    name = f"log--{slug(os.path.relpath(place, out))}"
    return Job(
        name=name,
        config=config,
        method_dir=out / "logging" / name,
        file=out / "jobs" / f"{name}.toml",
        log=out / "logs" / f"{name}.log",
        memory=memory_needed(config.replace(seed=0)),
        imports=study.imports,
    )


def _is_absent(place: str) -> bool:
    return not (Path(place) / INDEX).is_file() or not read_index(Path(place)).get("complete", True)


def _require_environments(study: Study) -> None:
    """Before a folder is made."""
    for task, cell in {cell.task: cell for cell in study.cells}.items():
        try:
            run.specification(cell.config.replace(dataset=""))
        except UserError as error:
            raise UserError(f"study {study.name}, {task}: {error}") from None


def _require_these_runs(study: Study, out: Path) -> None:
    """What is in the folder is of this study, and the report will leave out none of it."""
    asked = folders(study, out)
    for folder, (cell, seed) in asked.items():
        if (folder / "config.toml").is_file():
            cell.read_config(folder, seed)
    there = [path.parent for path in sorted(out.glob("runs/*/*/*/config.toml"))]
    others = [folder for folder in there if folder not in asked]
    if others:
        raise UserError(
            f"--out {out} has {count(len(others), 'run')} that this study does not ask for, such as "
            f"{others[0].relative_to(out)}; choose another folder, or ask for those too."
        )
    for name, copy in _copies(study, out).items():
        if there and copy.is_file() and copy.read_text() != Path(name).read_text():
            raise UserError(
                f"imports: {name} is not what the runs in --out {out} were trained with, which is {copy}; "
                "choose another folder, or delete that file if no run that you keep needs it."
            )


def _keep_imports(study: Study, out: Path) -> Study:
    """A copy of each file that it imports, so that its runs stay together with what they were trained with."""
    copies = _copies(study, out)
    for name, copy in copies.items():
        copy.parent.mkdir(exist_ok=True)
        record.replace_text(copy, Path(name).read_text())
    return study.replace(imports=tuple(str(copies.get(name, name)) for name in study.imports))


def _copies(study: Study, out: Path) -> dict[str, Path]:
    """Of the files that it imports; modules are installed."""
    return {name: out / "imports" / Path(name).name for name in study.imports if name.endswith(".py")}


@cache  # the jobs of a method differ in their seeds
def memory_needed(config: Config) -> int:
    """Of the replay, the network and the process: an estimate to share out memory by."""
    spec = run.specification(config)
    return BASE_BYTES + run.replay_memory(config, spec).total + 4 * run.agent_bytes(config, spec)


class Planned(NamedTuple):
    """A line of --dry-run."""

    task: str
    method: str
    runs: int
    to_do: int
    steps: int  # of a run
    parameters: int  # kept by a run: with copies
    memory: int  # bytes of a job
    seconds: list[float]  # of each of its jobs that are left


def estimate(study: Study, out: Path, workers: int, seeds_per_job: int) -> tuple[list[Planned], float]:
    """What is left to train, and how many seconds it takes here: measured on the method with the most heads."""
    _require_environments(study)
    _require_these_runs(study, out)
    at_once = workers if visible_gpus() else min(workers, len(record.usable_cores()))  # more share the same cores
    share_cores(workers)
    measured: dict[tuple[object, ...], tuple[float, float]] = {}
    rows = {}
    for cell in sorted(study.cells, key=lambda c: -c.config.target_scheme.num_heads):
        left, seconds = jobs_of(cell, study, out, seeds_per_job), []
        for job in left:
            key = _like(job.config)
            if key not in measured:
                say(f"measuring {cell.method} on {cell.task}")
                began = time.perf_counter()
                # measuring takes as long as a worker takes to begin: a second or two, and compiling
                measured[key] = run.seconds_per_step(job.config.replace(dataset="")), time.perf_counter() - began
            a_step, to_begin = measured[key]
            seconds.append(to_begin + a_step * (cell.config.length - steps_done(job.folders[0])))
        rows[cell.task, cell.method] = Planned(
            cell.task,
            cell.method,
            len(study.seeds),
            sum(job.config.num_seeds for job in left),
            cell.config.length,
            cost.size(cell.config, run.specification(cell.config.replace(dataset=""))).kept_parameters,
            max((job.memory for job in left), default=0),
            seconds,
        )
    planned = [rows[cell.task, cell.method] for cell in study.cells]
    free = [0.0] * at_once  # when each worker is free: the first one takes the next job
    for job_seconds in (each for row in planned for each in row.seconds):
        free[free.index(min(free))] += job_seconds
    return planned, max(free)


def _like(config: Config) -> tuple[object, ...]:
    """Runs that take about as long: other games of a kind; fewer heads, as the paper's appendix B finds, but for those
    that learn from a stream, where each head has a trace, and small critics, where it has many atoms."""
    kind = config.env_id.partition("/")[0]
    network = (config.torso, config.hidden_sizes, config.width_factor, config.compute_dtype)
    critic = (config.critic_width, config.critic_blocks, config.policy_width, config.policy_blocks, config.num_atoms)
    norms = (config.layer_norm, config.uses_batch_norm)
    batches = (config.learned_batch_size, config.update_period)
    update = (config.loss, config.analysis, config.meta_gradient, *batches)
    pairs = config.target_scheme.num_pairs if config.streams or config.is_actor_critic else 0
    writing = (config.target_scheme.num_copies, config.num_layers, config.model_width) if config.writes else ()
    return kind, config.num_seeds, config.loop, network, critic, config.twin_q, norms, update, pairs, writing


def _drive(pending: list[Job], engine: Engine, board: Board, should_stop: Callable[[], bool]) -> list[Job]:
    running: dict[Handle, Job] = {}
    attempts: Counter[str] = Counter()
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
            attempts[job.name] += code < 0
            if code == worker.DONE:
                board.say(f"finished {job.name}")
            elif code == worker.INTERRUPTED or (code < 0 and attempts[job.name] <= RETRIES):
                how = "stopped" if code > 0 else "killed"
                board.say(f"{job.name} was {how}; it starts again, from its checkpoint if it has one")
                pending.append(job)
            else:
                failed.append(job)
                why = f"killed {attempts[job.name]} times" if code < 0 else last_line(job.log)
                log = job.log if job.log.exists() else board.out / "logs"  # what a scheduler could not start has none
                board.say(f"FAILED {job.name}: {why} (log: {log})", always=True)
        board.show(running.values(), len(pending), failed)
        if should_stop():
            _stop(running, board)
            raise Interrupted(f"stopped; the same command goes on with {board.out}")
        if running:
            time.sleep(POLL_SECONDS)
    board.erase()
    return failed


def _stop(running: dict[Handle, Job], board: Board) -> None:
    board.say(f"saving {count(len(running), 'job')}")
    for handle in running:
        handle.stop()
    end = time.monotonic() + STOP_SECONDS
    while any(handle.poll() is None for handle in running) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)


def last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "no log"
    return lines[-1].removeprefix("isqn: ") if lines else "nothing in its log"


@dataclass
class Board:
    """One table of progress: on a terminal it is drawn anew, in a pipe its head is a line every few minutes."""

    study: Study
    out: Path
    enabled: bool
    _began: float = 0.0
    _first_steps: int | None = None
    _drawn: float = -1e9
    _lines: int = 0

    def say(self, sentence: str, *, always: bool = False) -> None:
        if self.enabled or always:
            self.erase()
            say(sentence)

    def show(self, running: Iterable[Job], waiting: int, failed: list[Job]) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if not self.enabled or now - self._drawn < (DRAW_SECONDS if terminal else SAY_SECONDS):
            return
        self._drawn = now
        lines = self.table(list(running), waiting, failed)
        if not terminal:
            say(" · ".join(lines[:2]))
            return
        width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be erased
        lines = [line[:width] for line in lines]
        self.erase()
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        self._lines = len(lines)

    def table(self, running: list[Job], waiting: int, failed: list[Job]) -> list[str]:
        """What there is, how long it takes, and what is running."""
        runs = folders(self.study, self.out)
        progress = {folder: steps_done(folder) for folder in runs}
        goal = sum(cell.config.length for cell, _ in runs.values())
        done = sum(progress.values())
        if self._first_steps is None:
            self._first_steps, self._began = done, time.monotonic()
        rate = (done - self._first_steps) / max(time.monotonic() - self._began, 1e-9)
        finished = sum(record.run_state(folder) == "finished" for folder in progress)
        pace = f"{rate:,.0f} steps/s · {duration((goal - done) / rate)} left" if rate > 0 else "time left not known yet"
        head = f"{self.study.name}: {finished} of {len(progress)} runs done · {pace}"
        # a cluster takes all jobs at once, and lets them wait
        begun = [job for job in running if any((folder / "config.toml").is_file() for folder in job.folders)]
        waiting += len(running) - len(begun)
        counts = f"jobs: {len(begun)} running · {waiting} waiting · {len(failed)} failed"
        rows = [f"  {job.name}  {sum(progress.get(f, 0) for f in job.folders) / job.steps:.0%}" for job in begun[:20]]
        return [head, counts, *rows]

    def erase(self) -> None:
        if self._lines:
            sys.stderr.write(f"\x1b[{self._lines}A\x1b[J")
            self._lines = 0


def steps_done(folder: Path) -> int:
    """How far a run is, by the last row of its metrics."""
    try:
        with (folder / "metrics.csv").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2_000))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
        return int(lines[-1].split(",")[0])
    except (OSError, ValueError, IndexError):
        return 0
