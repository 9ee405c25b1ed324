"""Jobs of a SLURM cluster, by submitit."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from isqn.study.engines.base import LOST, Job, Launch, combine_exit_codes, execute, import_library
from isqn.train import parallel
from isqn.types import UserError


class Slurm:
    """Jobs of a job array. `cluster="local"` runs them without SLURM, to try the engine."""

    def __init__(self, folder: Path, workers: int, cluster: str, parameters: dict[str, Any], hosts: int = 1):
        submitit = import_library("submitit", "slurm")
        self._is_local = cluster == "local"
        self._room = workers if self._is_local else math.inf  # SLURM queues jobs by itself
        self._started: list[SlurmHandle] = []
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"--engine slurm cannot start: {str(error).partition(chr(10))[0]}") from None
        defaults = {"name": "isqn", "timeout_min": 24 * 60, "cpus_per_task": 1}
        if hosts > 1:  # with --cluster local, this machine stands for all hosts
            defaults |= {"tasks_per_node": hosts} if self._is_local else {"nodes": hosts, "tasks_per_node": 1}
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
            submitted = [self._executor.submit(Preemptible(), job.launch) for job in chosen]
        handles = [SlurmHandle(job, self._is_local) for job in submitted]
        self._started += handles
        return list(zip(chosen, handles, strict=True))

    def close(self) -> None:
        pass


class SlurmHandle(NamedTuple):
    """A job of submitit."""

    job: Any
    is_local: bool

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        if self.is_local and not self.job.paths.result_pickle.exists():
            return LOST  # submitit would wait 15 s, for network file systems
        try:
            return combine_exit_codes([int(code) for code in self.job.results()])
        except Exception:  # submitit has many: killed, out of memory, lost, failed
            return LOST

    def stop(self) -> None:
        self.job.cancel(check=False)


class Preemptible:
    """Function that submitit runs, and requeues when the job is preempted or its time is over."""

    process: subprocess.Popen[bytes] | None = None

    def __call__(self, launch: Launch) -> int:
        return execute(launch, _process_variables(), self._on_start)

    def _on_start(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        # submitit ignores SIGTERM, which `scancel` sends first
        signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))

    def checkpoint(self, launch: Launch) -> Any:
        """Let the run save, and queue it again; submitit calls this in a signal handler."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            # the handler interrupts the call above, which may hold the lock of Popen
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Preemptible(), launch)


def _process_variables() -> dict[str, str]:
    """Return the address of the first task of a job of several, with a port that follows from the job's number."""
    from submitit import JobEnvironment

    here = JobEnvironment()
    if here.num_tasks == 1:
        return {}
    host = "127.0.0.1" if here.cluster == "local" else here.hostnames[0]
    port = 20_000 + crc32(here.job_id.encode()) % 40_000
    return parallel.process_variables(f"{host}:{port}", here.num_tasks, here.global_rank)
