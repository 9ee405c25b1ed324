"""Engines that run the jobs of a study: processes of this machine, a Ray cluster, or SLURM by submitit.

An engine starts jobs and reports how they ended. `isqn.study.drive` decides which to start, and what to do when one
fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isqn.study.engines.base import RETRIES, Engine, Handle, Job, combine_exit_codes
from isqn.study.engines.local import Local, default_workers, share_cores, visible_gpus
from isqn.types import UserError

__all__ = [
    "RETRIES",
    "Engine",
    "Handle",
    "Job",
    "Local",
    "combine_exit_codes",
    "default_workers",
    "make",
    "require_flags",
    "share_cores",
    "visible_gpus",
]


def require_flags(
    name: str, address: str | None, gpus: float, cluster: str, parameters: Sequence[str], hosts: int = 1
) -> None:
    """Refuse the flags of another engine, because they would do nothing."""
    if hosts > 1 and name == "local":
        raise UserError(f"--hosts is {hosts}; it is for --engine ray or slurm, and the engine is local.")
    for flag, is_given, needed in (
        ("--address", address is not None, "ray"),
        ("--gpus", gpus != 0, "ray"),
        ("--cluster", cluster != "slurm", "slurm"),
        ("--slurm", bool(parameters), "slurm"),
    ):
        if is_given and name != needed:
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
    """Return the engine that the flags of `isqn study` ask for."""
    if name == "local":
        return Local(workers or default_workers())
    if name == "ray":
        from isqn.study.engines.ray import Ray

        return Ray(max(hosts, workers or default_workers()), address, gpus, hosts)
    from isqn.study.engines.slurm import Slurm

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
