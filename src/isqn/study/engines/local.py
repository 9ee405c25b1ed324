"""Processes of this machine."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from isqn.study.engines.base import Job, end_process, start_process
from isqn.train import record
from isqn.train.progress import free_memory


class Local:
    """A pool of processes that share the cores evenly and take the GPUs in turn."""

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
                continue  # a smaller job may fit; one that is too large even alone refuses by itself
            slot = next(s for s, handle in enumerate(self._slots) if handle not in running)
            environment = gpu_environment(slot, len(self._slots), self._gpus)
            process = start_process(job.launch, environment)
            if self._cores[slot]:  # XLA starts as many threads as the process has cores
                with suppress(ProcessLookupError):  # the process has ended already
                    os.sched_setaffinity(process.pid, self._cores[slot])
            self._slots[slot] = handle = LocalHandle(process, job.memory)
            started.append((job, handle))
        return started

    def close(self) -> None:
        pass


class LocalHandle(NamedTuple):
    """A worker process of this machine."""

    process: subprocess.Popen[bytes]
    memory: int

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None:
            end_process(self.process)
        return code

    def stop(self) -> None:
        self.process.terminate()


def default_workers() -> int:
    """Return one worker for each GPU, or for each core: two runs on one core each do more than one run on both."""
    return len(visible_gpus()) or len(record.usable_cores())


def cores_of(slot: int, workers: int) -> list[int]:
    """Return an even share of the usable cores; none where a process cannot be bound to cores."""
    cores = record.usable_cores()
    each = max(1, len(cores) // workers)
    return cores[slot * each % len(cores) :][:each] if hasattr(os, "sched_setaffinity") else []


def share_cores(workers: int) -> None:
    """Bind this process to the cores of one worker, so that it measures the speed of a worker."""
    if cores := cores_of(0, workers):
        os.sched_setaffinity(0, cores)


def visible_gpus() -> list[str]:
    """Return the names that CUDA gives to the GPUs, without starting a device."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))  # as CUDA reads it
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index, line in enumerate(listing.splitlines()) if line.startswith("GPU ")]


def gpu_environment(slot: int, slots: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables that give a slot its GPU, and its share of the memory that JAX preallocates."""
    if not gpus:
        return {}
    sharing = math.ceil(slots / len(gpus))
    return {
        "CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)],
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / sharing:.2f}",
    }
