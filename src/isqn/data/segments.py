"""Segments of rows in files: shards of a dataset, and files of a replay buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from isqn.data.files import DamagedFile, Description, read_file
from isqn.data.frames import BLOCK_ROWS, Layout
from isqn.data.sample import COLUMNS, CONTEXT, INSIDE, TERMINATED, TRUNCATED, action_dtype
from isqn.types import EnvSpec

Array = NDArray[Any]


def read_arrays(folder: Path, file: Description) -> dict[str, Array]:
    """Read the arrays of a described file; raises `DamagedFile`."""
    content = read_file(folder, file)
    try:
        arrays: dict[str, Array] = safetensors.numpy.load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:  # KeyError: a type that numpy does not have
        raise DamagedFile(f"{folder / file['name']} cannot be read: {error}") from error
    return arrays


def read_segment(
    folder: Path, file: Description, spec: EnvSpec, rows: int, segment_rows: int, *, is_compressed: bool
) -> dict[str, Array]:
    """Read the first `rows` rows of a segment; raises `DamagedFile`."""
    arrays = read_arrays(folder, file)
    if problem := find_problem(arrays, spec, rows, segment_rows, is_compressed=is_compressed):
        raise DamagedFile(f"{folder / file['name']} is damaged: {problem}.")
    return arrays


def find_problem(
    arrays: dict[str, Array], spec: EnvSpec, rows: int, segment_rows: int, *, is_compressed: bool
) -> str | None:
    """Return what is wrong with the arrays of a segment, if anything."""
    needed = {*COLUMNS, "frames", *(("block_ends", "open_frames") if is_compressed else ())}
    if set(arrays) != needed:
        return f"its arrays are {', '.join(sorted(arrays))}, not {', '.join(sorted(needed))}"
    words = Layout.of(spec, 1).words
    word, open_rows = Layout.of(spec, 1).word, rows % BLOCK_ROWS
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "actions": (action_dtype(spec), (rows, *spec.action_shape)),
        "rewards": (np.dtype(np.float32), (rows,)),
        "ends": (np.dtype(np.uint8), (rows,)),
    }
    if is_compressed:
        shapes["block_ends"] = (np.dtype(np.uint32), (rows // BLOCK_ROWS,))
        shapes["open_frames"] = (word, (open_rows, words))
        shapes["frames"] = (np.dtype(np.uint8), (len(arrays["frames"]),))
    else:
        shapes["frames"] = (word, (rows, words))
    for name, (dtype, shape) in shapes.items():
        if arrays[name].dtype != dtype or arrays[name].shape != shape:
            return f"{name} is {arrays[name].dtype} {arrays[name].shape}, not {dtype} {shape}"
    if rows > segment_rows or (is_compressed and segment_rows % BLOCK_ROWS):
        return f"it has {rows:,} rows of {segment_rows:,}"
    if not np.isin(arrays["ends"], (INSIDE, TRUNCATED, TERMINATED, CONTEXT)).all():
        return "ends has values other than 0, 1, 2 and 4"
    if not spec.is_continuous and rows and int(arrays["actions"].max()) >= spec.num_actions:
        return f"actions reach {arrays['actions'].max()}, and {spec.id} has {spec.num_actions}"
    if is_compressed:
        edges = np.concatenate([[0], arrays["block_ends"].astype(np.int64)])
        if (np.diff(edges) < 0).any() or edges[-1] > len(arrays["frames"]):
            return "block_ends do not lie in frames"
    return None


def columns_crc(arrays: dict[str, Array]) -> int:
    """Return the checksum of all arrays except compressed frames, whose blocks have their own checksums."""
    checksum = 0
    for name in (*COLUMNS, *(("block_ends", "open_frames") if "block_ends" in arrays else ("frames",))):
        checksum = crc32(np.ascontiguousarray(arrays[name]).data.cast("B") if arrays[name].size else b"", checksum)
    return checksum
