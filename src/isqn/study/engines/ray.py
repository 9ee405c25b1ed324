"""Tasks of a Ray cluster."""

from __future__ import annotations

import importlib
import math
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from isqn.exits import INTERRUPTED
from isqn.study.engines.base import LOST, Job, combine_exit_codes, execute, import_library
from isqn.train import parallel
from isqn.types import UserError

HOSTS_SECONDS = 600  # timeout for the hosts of one run to become free


class Ray:
    """Tasks of a cluster, or of one that is started here; a job of several hosts is a task on each."""

    def __init__(self, workers: int, address: str | None, gpus: float, hosts: int = 1):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        self._ray = import_library("ray", "ray")
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
        available = self._ray.cluster_resources().get("GPU", 0)
        if not 0 <= gpus <= (math.inf if address else available):  # a cluster may grow
            raise UserError(f"--gpus is {gpus:g}; it must be from 0 to the {available:g} GPUs of this machine.")
        self._hosts, self._resources = hosts, {"CPU": 1, "GPU": gpus}
        self._task, self._find_address = (
            self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(function) for function in (execute, free_address)
        )
        self._group: Any = None  # the hosts, which jobs use one after another
        self._started: list[RayHandle] = []

    def start(self, jobs: Sequence[Job]) -> Sequence[tuple[Job, RayHandle]]:
        """Start all jobs, since Ray queues them; if a job needs several hosts, one at a time."""
        if self._hosts == 1:
            return [(job, RayHandle(self._ray, (self._task.remote(job.launch),))) for job in jobs]
        if not jobs or any(handle.poll() is None for handle in self._started):
            return []
        self._started = [RayHandle(self._ray, self._start_on_hosts(jobs[0]))]
        return [(jobs[0], self._started[0])]

    def _start_on_hosts(self, job: Job) -> tuple[Any, ...]:
        """Start a task on each host; the others find the first one by its address."""
        if self._group is None:
            make_group = importlib.import_module("ray.util").placement_group
            group = make_group([self._resources] * self._hosts, strategy="SPREAD")
            if not group.wait(HOSTS_SECONDS):
                raise UserError(f"--hosts is {self._hosts}; the cluster had no room for so many in {HOSTS_SECONDS} s.")
            self._group = group
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        places = [strategy(self._group, placement_group_bundle_index=host) for host in range(self._hosts)]
        address = self._ray.get(self._find_address.options(scheduling_strategy=places[0]).remote())
        tasks = [self._task.options(scheduling_strategy=place) for place in places]
        return tuple(
            task.remote(job.launch, parallel.process_variables(address, self._hosts, host))
            for host, task in enumerate(tasks)
        )

    def close(self) -> None:
        self._ray.shutdown()


class RayHandle(NamedTuple):
    """A job of a Ray cluster."""

    ray: Any
    references: tuple[Any, ...]  # one for each host

    def poll(self) -> int | None:
        done, running = self.ray.wait(list(self.references), num_returns=len(self.references), timeout=0)
        codes = [self._code(reference) for reference in done]
        if running and not any(codes):
            return None
        for reference in running:  # one task has failed, and the others would wait for it
            self.ray.cancel(reference)
        return combine_exit_codes(codes)

    def _code(self, reference: Any) -> int:
        try:
            return int(self.ray.get(reference))
        except self.ray.exceptions.TaskCancelledError:
            return INTERRUPTED
        except self.ray.exceptions.RayError:
            return LOST

    def stop(self) -> None:
        for reference in self.references:
            self.ray.cancel(reference)


def _require_answer(address: str) -> None:
    """Raise OSError if nothing listens there; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def free_address() -> str:
    """Return the address of this host as others reach it, with a free port."""
    here = importlib.import_module("ray.util").get_node_ip_address()
    with socket.socket() as listening:
        listening.bind((here, 0))
        return f"{here}:{listening.getsockname()[1]}"
