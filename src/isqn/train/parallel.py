"""One run on several devices and hosts: each device has a copy of the agent and a share of every batch.

All processes compute the same numbers. The first one writes to the folder of the run; the others work on a temporary
copy of it. The number of processes and the address of the first one come from the environment, in the variables that
`jax.distributed.initialize` takes: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isqn.types import UserError

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def process_variables(address: str, count: int, number: int) -> dict[str, str]:
    """Return the environment variables of a process."""
    return {ADDRESS: address, COUNT: str(count), NUMBER: str(number)}


def join(variables: Mapping[str, str] = os.environ) -> None:
    """Connect to the other processes of this run, if there are any; to be called before anything is computed."""
    if ADDRESS not in variables or jax.distributed.is_initialized():
        return
    try:
        count, number = int(variables[COUNT]), int(variables[NUMBER])
    except (KeyError, ValueError):
        raise UserError(f"{ADDRESS} is set; {COUNT} and {NUMBER} must be whole numbers beside it.") from None
    if not 0 <= number < count:
        raise UserError(f"{NUMBER} is {number}; it must be from 0 to {count - 1}, below {COUNT}.")
    if count > 1:
        jax.distributed.initialize(variables[ADDRESS], count, number)


def is_first() -> bool:
    """Return whether this process writes the files of the run."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def require_same(text: str) -> None:
    """Refuse to begin with different data, or at different updates; `text` must be the same in all processes."""
    if jax.process_count() > 1:
        hashes = multihost_utils.process_allgather(np.array(crc32(text.encode()), np.uint32))
        if len(set(hashes.ravel().tolist())) > 1:
            raise UserError(
                "The processes of this run do not see the same folder, or not the same games to learn from."
            )


@contextmanager
def working_folder(run_dir: Path) -> Iterator[Path]:
    """Yield the folder that this process works in: the run's own for the first process, a copy of it for the others.

    The first process has made the folder; nothing is written to it before all others have copied it.
    """
    barrier("made")
    if any_process(not run_dir.is_dir()):
        raise UserError(f"The processes of this run do not see the same folder {run_dir}; it must be on a shared disk.")
    with TemporaryDirectory() as temporary:
        if not is_first():
            shutil.copytree(run_dir, Path(temporary) / "run", ignore=shutil.ignore_patterns("best-*", "videos"))
        barrier("copied")
        yield run_dir if is_first() else Path(temporary) / "run"
    barrier("finished")


def any_process(flag: bool) -> bool:
    """Return whether the flag is set in any process, so that all of them stop after the same update."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(flag)).any())


# -- arrays


def shard(batch: Any) -> Any:
    """Place a share of the games of a batch on each device; all processes hold the whole batch."""
    return _place(batch, "games")


def replicate(tree: Any) -> Any:
    """Place a copy of the arrays on each device."""
    return _place(tree)


def _place(tree: Any, *axes: str) -> Any:
    if jax.device_count() == 1:
        return tree
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("games",)), PartitionSpec(*axes))

    def place_array(x: Any) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    return jax.tree.map(place_array, tree)


def local_copy(tree: Any) -> Any:
    """Return the copy of replicated arrays on one device of this process, to be used without the other processes."""
    return tree if jax.device_count() == 1 else jax.tree.map(lambda x: x.addressable_data(0), tree)


def require_divisible(games: int, flag: str) -> None:
    """Refuse a number of games that the devices cannot share equally."""
    devices = jax.device_count()
    if games % devices:
        raise UserError(f"{flag} is {games}; it must be a multiple of the {devices} devices that share it.")
