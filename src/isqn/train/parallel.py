"""One run on many devices, and on many hosts: each has all that is learned, and a share of every batch.

All processes do the same, with the same numbers. The first one keeps the run's folder; the others work on a copy of it,
which they throw away. Who starts them says how many there are and where the first one is, in the words of
`jax.distributed.initialize`: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
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
    """What a process is to be told."""
    return {ADDRESS: address, COUNT: str(count), NUMBER: str(number)}


def join(told: Mapping[str, str] = os.environ) -> None:
    """Meet the other processes of this run, if there are any; before anything is computed."""
    if ADDRESS not in told or jax.distributed.is_initialized():
        return
    try:
        count, number = int(told[COUNT]), int(told[NUMBER])
    except (KeyError, ValueError):
        raise UserError(f"{ADDRESS} is set; {COUNT} and {NUMBER} must be whole numbers beside it.") from None
    if not 0 <= number < count:
        raise UserError(f"{NUMBER} is {number}; it must be from 0 to {count - 1}, below {COUNT}.")
    if count > 1:
        jax.distributed.initialize(told[ADDRESS], count, number)


def is_first() -> bool:
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait for the others."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def require_same(what: str) -> None:
    """That all processes begin with the same data, at the same update."""
    if jax.process_count() > 1:
        everyones = multihost_utils.process_allgather(np.array(crc32(what.encode()), np.uint32))
        if len(set(everyones.ravel().tolist())) > 1:
            raise UserError(
                "The processes of this run do not see the same folder, or not the same games to learn from."
            )


@contextmanager
def workplace(run_dir: Path) -> Iterator[Path]:
    """The folder of a run, that the first process has made; for the others a copy, from before it is written to."""
    barrier("made")
    if any_process(not run_dir.is_dir()):
        raise UserError(f"The processes of this run do not see the same folder {run_dir}; it must be on a shared disk.")
    with TemporaryDirectory() as aside:
        if not is_first():
            shutil.copytree(run_dir, Path(aside) / "run", ignore=shutil.ignore_patterns("best-*", "videos"))
        barrier("copied")
        yield run_dir if is_first() else Path(aside) / "run"
    barrier("finished")


def any_process(wish: bool) -> bool:
    """Whether any process has it: all go on, or all stop, after the same update."""
    return wish if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(wish)).any())


# -- arrays


def shard(batch: Any) -> Any:
    """A share of the games for each device; all processes hold the whole batch."""
    return _placed(batch, "games")


def replicate(tree: Any) -> Any:
    return _placed(tree)


def _placed(tree: Any, *axes: str) -> Any:
    if jax.device_count() == 1:
        return tree
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("games",)), PartitionSpec(*axes))

    def place(x: Any) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    return jax.tree.map(place, tree)


def local_copy(tree: Any) -> Any:
    """What every device has, on one of this process: to be looked at without the others."""
    return tree if jax.device_count() == 1 else jax.tree.map(lambda x: x.addressable_data(0), tree)


def require_shares(games: int, flag: str) -> None:
    devices = jax.device_count()
    if games % devices:
        raise UserError(f"{flag} is {games}; it must be a multiple of the {devices} devices that share it.")
