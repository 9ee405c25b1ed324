"""Where the jobs of a study run: processes of this machine, a Ray cluster, or SLURM by submitit.

An engine starts a job and says how it ended; what to start, and what to do when it ended badly, is `drive.py`'s. All
three run the same command in a process of its own, and its folder must be seen from everywhere.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from isqn.experiments import worker
from isqn.experiments.config import Config, seed_dir
from isqn.train import parallel, record
from isqn.train.progress import free_memory
from isqn.types import UserError

RETRIES = 3  # of a job whose process was killed
LOST = -signal.SIGKILL  # the exit code of a process that ended without one
HOSTS_SECONDS = 600  # that the hosts of one run may take to be free


class Job(NamedTuple):
    """Some seeds of one method on one task, trained in one program."""

    name: str
    config: Config  # of all its seeds
    method_dir: Path
    file: Path  # holds the config
    log: Path
    memory: int = 0  # bytes that it will need
    imports: tuple[str, ...] = ()  # what its process imports first

    @property
    def folders(self) -> list[Path]:
        return [seed_dir(self.method_dir, self.config.seed + index) for index in range(self.config.num_seeds)]

    @property
    def steps(self) -> int:
        return self.config.length * self.config.num_seeds


class Handle(Protocol):
    """A job that was started."""

    def poll(self) -> int | None:
        """Its exit code; below 0 if it was killed or lost; None while it goes on."""

    def stop(self) -> None:
        """Ask it to save and stop."""


class Engine(Protocol):
    def start(self, jobs: Sequence[Job]) -> Sequence[tuple[Job, Handle]]:
        """Start as many of the jobs as there is room for; the others are offered again."""

    def close(self) -> None: ...


# -- processes of this machine -----------------------------------------------------------------------------


class Local:
    """A pool of processes. The cores are shared out evenly, and the GPUs in turn."""

    def __init__(self, workers: int):
        self._cores = [cores_of(slot, workers) for slot in range(workers)]
        self._gpus = visible_gpus()
        self._slots: list[LocalHandle | None] = [None] * workers
        self._memory = 0.9 * free_memory()

    def start(self, jobs: Sequence[Job]) -> Sequence[tuple[Job, LocalHandle]]:
        started = []
        for job in jobs:
            running = [handle for handle in self._slots if handle is not None and handle.poll() is None]
            needed = job.memory + sum(handle.memory for handle in running)
            if len(running) == len(self._slots) or (running and needed > self._memory):
                continue  # a smaller one may fit; one that is too large even alone refuses by itself
            slot = next(s for s, handle in enumerate(self._slots) if handle not in running)
            environment = gpu_environment(slot, len(self._slots), self._gpus)
            process = _spawn(job, environment)
            if self._cores[slot]:  # XLA makes as many threads as there are cores to run on
                with suppress(ProcessLookupError):  # it has ended already
                    os.sched_setaffinity(process.pid, self._cores[slot])
            self._slots[slot] = handle = LocalHandle(process, job.memory)
            started.append((job, handle))
        return started

    def close(self) -> None:
        pass


class LocalHandle(NamedTuple):
    process: subprocess.Popen[bytes]
    memory: int

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None:
            _end(self.process)
        return code

    def stop(self) -> None:
        self.process.terminate()


def cores_of(slot: int, workers: int) -> list[int]:
    """An even share of the cores this process may use; none where a process cannot be kept to some."""
    cores = record.usable_cores()
    each = max(1, len(cores) // workers)
    return cores[slot * each % len(cores) :][:each] if hasattr(os, "sched_setaffinity") else []


def share_cores(workers: int) -> None:
    """Let this process have what one of so many workers would have: to measure as they will run."""
    if cores := cores_of(0, workers):
        os.sched_setaffinity(0, cores)


def _spawn(job: Job, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """The pipe to its standard input closes when this process ends, however it ends."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as file:
        return subprocess.Popen(
            worker.command(job.file, job.method_dir, job.imports),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is for us, who then stop it
        )


def visible_gpus() -> list[str]:
    """The names CUDA gives them, without starting a device."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))  # as CUDA reads it
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


def gpu_environment(slot: int, slots: int, gpus: Sequence[str]) -> dict[str, str]:
    """Which GPU the job of a slot sees, and how much of its memory JAX may take at the start."""
    if not gpus:
        return {}
    sharing = math.ceil(slots / len(gpus))
    return {
        "CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)],
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / sharing:.2f}",
    }


# -- what Ray and SLURM run on another machine ---------------------------------------------------------------


def execute(
    job: Job,
    environment: dict[str, str] | None = None,
    begun: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
) -> int:
    """A job from beginning to end, as seen from the process that a scheduler gave us; its exit code."""
    process = _spawn(job, environment or {})
    begun(process)
    try:
        return _watch(process)
    finally:  # the scheduler may stop us by an exception in here
        _end(process)


def _watch(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. Not by `wait`, which lets no exception of another thread through, and holds a lock."""
    while (code := process.poll()) is None:
        time.sleep(0.2)
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it save and stop, if it has not."""
    process.terminate()
    process.wait()
    if process.stdin:
        process.stdin.close()


# -- Ray ------------------------------------------------------------------------------------------------------


class Ray:
    """Tasks of a cluster, or of one that is started here; a job of several hosts is a task on each."""

    def __init__(self, workers: int, address: str | None, gpus: float, hosts: int = 1):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        self._ray = _import("ray", "ray")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        try:
            if address:
                _require_answer(address)
                self._ray.init(address=address, **quiet)
            else:
                here: dict[str, Any] = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
                self._ray.init(num_cpus=workers, **here, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            what = f"--address {address} is not a Ray cluster that answers" if address else "Ray cannot be started here"
            raise UserError(f"{what}: {error}.") from None
        there = self._ray.cluster_resources().get("GPU", 0)
        if not 0 <= gpus <= (math.inf if address else there):  # a cluster may grow
            raise UserError(f"--gpus is {gpus:g}; it must be from 0 to the {there:g} GPUs of this machine.")
        self._hosts, self._share = hosts, {"CPU": 1, "GPU": gpus}
        self._task, self._address = (
            self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(function) for function in (execute, free_address)
        )
        self._group: Any = None  # the hosts, which one job after the other has
        self._started: list[RayHandle] = []

    def start(self, jobs: Sequence[Job]) -> Sequence[tuple[Job, RayHandle]]:
        """All of them, as Ray waits for room; one at a time of those that need several hosts, which meet first."""
        if self._hosts == 1:
            return [(job, RayHandle(self._ray, (self._task.remote(job),))) for job in jobs]
        if not jobs or any(handle.poll() is None for handle in self._started):
            return []
        self._started = [RayHandle(self._ray, self._together(jobs[0]))]
        return [(jobs[0], self._started[0])]

    def _together(self, job: Job) -> tuple[Any, ...]:
        """A task on each host, the first of which is where the others find it."""
        if self._group is None:
            group = importlib.import_module("ray.util").placement_group([self._share] * self._hosts, strategy="SPREAD")
            if not group.wait(HOSTS_SECONDS):
                raise UserError(f"--hosts is {self._hosts}; the cluster had no room for so many in {HOSTS_SECONDS} s.")
            self._group = group
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        places = [strategy(self._group, placement_group_bundle_index=host) for host in range(self._hosts)]
        address = self._ray.get(self._address.options(scheduling_strategy=places[0]).remote())
        tasks = [self._task.options(scheduling_strategy=place) for place in places]
        return tuple(
            task.remote(job, parallel.process_variables(address, self._hosts, host)) for host, task in enumerate(tasks)
        )

    def close(self) -> None:
        self._ray.shutdown()


def _require_answer(address: str) -> None:
    """Ray itself tries for minutes. OSError if nothing listens there."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def free_address() -> str:
    """Of this host, as others reach it, with a port that nobody listens on."""
    here = importlib.import_module("ray.util").get_node_ip_address()
    with socket.socket() as listening:
        listening.bind((here, 0))
        return f"{here}:{listening.getsockname()[1]}"


class RayHandle(NamedTuple):
    ray: Any
    references: tuple[Any, ...]  # one for each host

    def poll(self) -> int | None:
        done, going = self.ray.wait(list(self.references), num_returns=len(self.references), timeout=0)
        codes = [self._code(reference) for reference in done]
        if going and not any(codes):
            return None
        for reference in going:  # one has failed, and the others would wait for it
            self.ray.cancel(reference)
        return worst(codes)

    def _code(self, reference: Any) -> int:
        try:
            return int(self.ray.get(reference))
        except self.ray.exceptions.TaskCancelledError:
            return worker.INTERRUPTED
        except self.ray.exceptions.RayError:
            return LOST

    def stop(self) -> None:
        for reference in self.references:
            self.ray.cancel(reference)


def worst(codes: Sequence[int]) -> int:
    """Of the processes of one job: if one was lost, others fail for it."""
    lost = [code for code in codes if code < 0]
    return next((code for code in (*lost, worker.FAILED, worker.INTERRUPTED) if code in codes), max(codes))


# -- SLURM -----------------------------------------------------------------------------------------------------


class Slurm:
    """Jobs of an array. `cluster="local"` runs the same without SLURM, to try it."""

    def __init__(self, folder: Path, workers: int, cluster: str, parameters: dict[str, Any], hosts: int = 1):
        submitit = _import("submitit", "slurm")
        self._local = cluster == "local"
        self._room = workers if self._local else math.inf  # SLURM waits for room by itself
        self._started: list[SlurmHandle] = []
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"--engine slurm cannot start: {str(error).partition(chr(10))[0]}") from None
        defaults = {"name": "isqn", "timeout_min": 24 * 60, "cpus_per_task": 1}
        if hosts > 1:  # the one machine of --cluster local is as many
            defaults |= {"tasks_per_node": hosts} if self._local else {"nodes": hosts, "tasks_per_node": 1}
        try:
            self._executor.update_parameters(**defaults | parameters)
        except (NameError, TypeError, ValueError, AssertionError) as error:
            raise UserError(f"--slurm: {str(error).partition(chr(10))[0]}") from None

    def start(self, jobs: Sequence[Job]) -> Sequence[tuple[Job, SlurmHandle]]:
        self._started = [handle for handle in self._started if handle.poll() is None]
        chosen = jobs[: int(min(len(jobs), self._room - len(self._started)))]
        if not chosen:
            return []
        with self._executor.batch():
            submitted = [self._executor.submit(Preemptible(), job) for job in chosen]
        handles = [SlurmHandle(job, self._local) for job in submitted]
        self._started += handles
        return list(zip(chosen, handles, strict=True))

    def close(self) -> None:
        pass


class Preemptible:
    """What submitit runs, and requeues when the job is preempted or its time is over."""

    process: subprocess.Popen[bytes] | None = None

    def __call__(self, job: Job) -> int:
        return execute(job, _meeting(), self._begun)

    def _begun(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        # submitit ignores SIGTERM, which is what `scancel` sends first
        signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))

    def checkpoint(self, job: Job) -> Any:
        """Called when the signal comes: let the run save, and queue the same again."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            # this runs in the middle of the call above, which may hold the lock of Popen
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Preemptible(), job)


def _meeting() -> dict[str, str]:
    """For a job of several tasks: where the first one is, on a port that follows from the job's number."""
    from submitit import JobEnvironment

    here = JobEnvironment()
    if here.num_tasks == 1:
        return {}
    host = "127.0.0.1" if here.cluster == "local" else here.hostnames[0]
    port = 20_000 + crc32(here.job_id.encode()) % 40_000
    return parallel.process_variables(f"{host}:{port}", here.num_tasks, here.global_rank)


class SlurmHandle(NamedTuple):
    job: Any
    local: bool

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        if self.local and not self.job.paths.result_pickle.exists():
            return LOST  # submitit would wait 15 s, for network file systems
        try:
            return worst([int(code) for code in self.job.results()])
        except Exception:  # submitit's many: killed, out of memory, lost, failed
            return LOST

    def stop(self) -> None:
        self.job.cancel(check=False)


def _import(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f'--engine {extra} needs `pip install "isqn[{extra}]"`.') from None


def require_flags(
    name: str, address: str | None, gpus: float, cluster: str, parameters: Sequence[str], hosts: int = 1
) -> None:
    """A flag of another engine would do nothing."""
    if hosts > 1 and name == "local":
        raise UserError(f"--hosts is {hosts}; it is for --engine ray or slurm, and the engine is local.")
    for flag, given, needed in (
        ("--address", address is not None, "ray"),
        ("--gpus", gpus != 0, "ray"),
        ("--cluster", cluster != "slurm", "slurm"),
        ("--slurm", bool(parameters), "slurm"),
    ):
        if given and name != needed:
            raise UserError(f"{flag} is for --engine {needed}, and the engine is {name}.")


def make(
    name: str,
    out: Path,
    workers: int | None,
    address: str | None,
    gpus: float,
    cluster: str,
    parameters: Sequence[str],
    hosts: int = 1,
) -> Engine:
    """By the words of the command line."""
    if name == "local":
        return Local(workers or default_workers())
    if name == "ray":
        return Ray(max(hosts, workers or default_workers()), address, gpus, hosts)
    more: dict[str, Any] = {"slurm_array_parallelism": workers} if workers and cluster != "local" else {}
    for word in parameters:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--slurm {word!r} is not of the form KEY=VALUE, such as slurm_partition=cpu.")
        try:
            more[key] = json.loads(value)  # numbers and lists
        except ValueError:
            more[key] = value
    return Slurm(out / "logs" / "submitit", workers or default_workers(), cluster, more, hosts)


def default_workers() -> int:
    """On this machine: one for each GPU, or for each core, since two runs with a core each do more than one on both."""
    return len(visible_gpus()) or len(record.usable_cores())
