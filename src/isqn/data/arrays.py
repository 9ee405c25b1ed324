"""Reader of transitions in named arrays: HDF5 files of D4RL's layout, and .npz files with the same names.

Row t of the arrays `observations`, `actions`, `rewards`, `terminals` and `timeouts` is one step. The next observation
is that of the next row, or row t of `next_observations` if the file has it. Observations are read in parts, so that a
file may be larger than memory; the other arrays are loaded whole.
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isqn.data.dataset import UNKNOWN_POLICY, Piece
from isqn.data.files import check_claim
from isqn.data.npy import NpyStream
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.data.sources import Part, Source, digest_files
from isqn.types import EnvSpec, UserError

Array = NDArray[Any]

MAGIC = {b"\x89HDF\r\n\x1a\n": "hdf5", b"PK\x03\x04": "npz"}
NEEDED = ("observations", "actions", "rewards", "terminals")
OPTIONAL = ("timeouts", "next_observations")
READ_ROWS = 4_096
PART_BYTES = 2**26  # observations that are read at a time
MAX_CHUNK_BYTES = 2**28  # HDF5 decompresses whole chunks
MAX_COMPRESSION = 1_100  # deflate compresses at most by this factor
ACTION_TOLERANCE = 1e-3  # of the range of an action; more lies outside of its bounds


class Column(Protocol):
    """One array of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def rows(self, first: int, stop: int) -> Array:
        """Return rows; `first` never decreases from call to call."""


def arrays_format(path: Path) -> str | None:
    """Return "hdf5" or "npz" by the first bytes of a file, or None; refuse a pickle."""
    with path.open("rb") as file:
        head = file.read(8)
    if head[:1] == b"\x80" or path.suffix in (".pkl", ".pickle"):
        raise UserError(
            f"{path} is a pickle, and reading a pickle runs the code in it; save its arrays as .npz instead. "
            "docs/guides/offline.md shows how, for a replay buffer of Stable-Baselines3."
        )
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)


def arrays(path: Path, kind: str, spec: EnvSpec, to_frame: Callable[[Any], Array]) -> Source:
    """Return the steps in an HDF5 or .npz file."""
    with _open(path, kind) as columns:
        total = _check_shapes(path, columns, spec)
    part = Part(path.name, 0, total, lambda: _pieces(path, kind, spec, to_frame))
    return Source(kind, UNKNOWN_POLICY, [part], digest_files([path]))


# -- columns of a file


@contextmanager
def _open(path: Path, kind: str) -> Iterator[dict[str, Column]]:
    """Open the arrays of a file that are used."""
    opener = _open_hdf5 if kind == "hdf5" else _open_npz
    with opener(path) as columns:
        if missing := [name for name in NEEDED if name not in columns]:
            raise UserError(
                f"{path} has no array {', '.join(missing)}; it needs {', '.join(NEEDED)}, and may have "
                f"{' and '.join(OPTIONAL)}."
            )
        yield columns


class NpyColumn:
    """Member of an .npz file, decompressed from its first row to its last."""

    def __init__(self, stream: NpyStream) -> None:
        self.shape, self.dtype, self._stream = stream.shape, stream.dtype, stream
        self._chunks = stream.rows(max(1, min(READ_ROWS, PART_BYTES // max(1, stream.row_bytes))))
        self._first, self._buffer = 0, np.empty((0, *stream.shape[1:]), stream.dtype)

    def rows(self, first: int, stop: int) -> Array:
        parts, end = [self._buffer[first - self._first :]], self._first + len(self._buffer)
        while end < stop:
            parts.append(next(self._chunks))
            end += len(parts[-1])
        self._first, self._buffer = first, np.concatenate(parts)
        if end == self.shape[0]:
            next(self._chunks, None)  # compare the checksum at the end of the member
        return self._buffer[: stop - first]


@contextmanager
def _open_npz(path: Path) -> Iterator[dict[str, Column]]:
    columns: dict[str, Column] = {}
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{path} is damaged: it is not a zip archive of arrays ({error}).") from error
    with archive, ExitStack() as streams:
        for name in (*NEEDED, *OPTIONAL):
            if f"{name}.npy" not in archive.NameToInfo:
                continue
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise UserError(f"{path}: {name} has a compression that numpy does not write; use np.savez_compressed.")
            stream = NpyStream(path, name, partial(archive.open, member))
            streams.callback(stream.close)
            check_claim(path, name, prod(stream.shape) * stream.dtype.itemsize, member.compress_size, MAX_COMPRESSION)
            columns[name] = NpyColumn(stream)
        yield columns


class Hdf5Column:
    """Dataset of an HDF5 file."""

    def __init__(self, path: Path, name: str, dataset: Any) -> None:
        self.shape, self.dtype = tuple(map(int, dataset.shape or ())), dataset.dtype
        self._path, self._name, self._dataset = path, name, dataset

    def rows(self, first: int, stop: int) -> Array:
        try:
            return np.asarray(self._dataset[first:stop])
        except Exception as error:  # a damaged file can raise anything
            raise UserError(f"{self._path} is damaged: {self._name}, rows {first:,} to {stop:,} ({error}).") from error


@contextmanager
def _open_hdf5(path: Path) -> Iterator[dict[str, Column]]:
    try:
        import h5py
    except ImportError:
        raise UserError('HDF5 files need `pip install "isqn[offline]"`.') from None
    try:
        file = h5py.File(path, "r")
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{path} is damaged: it cannot be opened as HDF5 ({error}).") from error
    with file:
        try:
            columns = {
                name: column
                for name in (*NEEDED, *OPTIONAL)
                if (column := _hdf5_column(path, name, file, h5py)) is not None
            }
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{path} is damaged: its arrays cannot be listed ({error}).") from error
        yield columns


def _hdf5_column(path: Path, name: str, file: Any, h5py: Any) -> Column | None:
    """Return an array that lies in this file, in chunks that fit into memory."""
    link = file.get(name, getlink=True)
    if link is None:
        return None
    dataset = file.get(name) if isinstance(link, h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.external or dataset.is_virtual:
        raise UserError(f"{path}: {name} is not an array in this file; links to other files are not followed.")
    if dataset.dtype.hasobject or dataset.shape is None:
        raise UserError(f"{path}: {name} holds {dataset.dtype}; arrays hold numbers.")
    if prod(dataset.chunks or ()) * dataset.dtype.itemsize > MAX_CHUNK_BYTES:
        raise UserError(f"{path}: {name} is stored in chunks of {dataset.chunks}; at most 256 MiB a chunk can be read.")
    check_claim(path, name, dataset.nbytes, int(dataset.id.get_storage_size()), MAX_COMPRESSION)
    return Hdf5Column(path, name, dataset)


# -- checks


def _check_shapes(path: Path, columns: dict[str, Column], spec: EnvSpec) -> int:
    """Check shapes and types, before any row is read; return the number of rows."""
    total = columns["observations"].shape[0] if columns["observations"].shape else 0
    for name, column in columns.items():
        if column.dtype.kind not in "biuf":
            raise UserError(f"{path}: {name} holds {column.dtype}; arrays hold numbers.")
        if not column.shape or column.shape[0] != total:
            raise UserError(f"{path}: {name} has the shape {column.shape}, and observations {total:,} rows.")
        if name in ("rewards", "terminals", "timeouts") and column.shape[1:] not in ((), (1,)):
            raise UserError(f"{path}: {name} has the shape {column.shape}; it must be ({total},) or ({total}, 1).")
        if not name.endswith("observations"):
            check_claim(path, name, prod(column.shape) * column.dtype.itemsize, path.stat().st_size)
    if not total:
        raise UserError(f"{path} has no rows.")
    shape = columns["actions"].shape[1:]
    boxes = (spec.action_box, spec.action_shape) if spec.is_continuous else ((), (1,), (spec.num_actions,))
    if shape not in boxes:
        allowed = f"shape {spec.action_box}" if spec.is_continuous else f"one number, or one-hot of {spec.num_actions}"
        raise UserError(f"{path}: an action has the shape {shape}; one of {spec.id} has {allowed}.")
    for name in ("observations", "next_observations"):
        if name not in columns:
            continue
        shape, dtype = columns[name].shape[1:], np.dtype(spec.frame_dtype)
        sizes = {1, 0} if spec.first_state is not None else {prod(spec.frame_shape)}
        if prod(shape) not in sizes:
            states = "one number" if spec.first_state is not None else f"shape {spec.frame_shape}"
            raise UserError(f"{path}: a row of {name} has the shape {shape}; one of {spec.id} has {states}.")
        if dtype.kind != "f" and not np.can_cast(columns[name].dtype, dtype):
            raise UserError(f"{path}: {name} holds {columns[name].dtype}; observations of {spec.id} are {dtype}.")
    return total


def _numbers(path: Path, name: str, column: Column) -> Array:
    """Load an array of finite numbers, without axes of length 1."""
    values = column.rows(0, column.shape[0])
    if values.dtype.kind == "b":
        values = values.view(np.uint8)
    with np.errstate(over="ignore"):
        _refuse_rows(path, name, ~np.isfinite(values.astype(np.float32)), "are not finite numbers")
    return values[:, 0] if column.shape[1:] == (1,) else values


def _refuse_rows(path: Path, name: str, is_wrong: Array, problem: str, first: int = 0) -> None:
    """Refuse a file with wrong values, naming the first row that has one."""
    wrong = np.flatnonzero(is_wrong.any(axis=tuple(range(1, is_wrong.ndim))))
    if len(wrong):
        raise UserError(f"{path}: {name}, row {first + wrong[0]:,}: values {problem}.")


def _flags(path: Path, name: str, column: Column) -> Array:
    values = _numbers(path, name, column)
    _refuse_rows(path, name, ~np.isin(values, (0, 1)), "are neither 0 nor 1")
    return values.astype(bool)


def _actions(path: Path, column: Column, spec: EnvSpec) -> Array:
    """Return the actions as the agent counts or scales them."""
    values = _numbers(path, "actions", column)
    if spec.is_continuous:
        actions = spec.from_env_action(values)
        where = f"lie outside of the bounds of {spec.id}; np.clip them, or scale them to its action space"
        _refuse_rows(path, "actions", np.abs(actions) > 1 + 2 * ACTION_TOLERANCE, where)
        return np.clip(actions, -1, 1)
    if column.shape[1:] not in ((), (1,)):
        is_one_hot = np.isin(values, (0, 1)).all(1) & (values.sum(1) == 1)
        _refuse_rows(path, "actions", ~is_one_hot, "are not one-hot")
        return values.argmax(1)
    _refuse_rows(path, "actions", values != np.trunc(values), "are not whole numbers")
    first, last = spec.first_action, spec.first_action + spec.num_actions - 1
    _refuse_rows(path, "actions", (values < first) | (values > last), f"are not in {first} to {last} ({spec.id})")
    return spec.from_env_action(values.astype(np.int64))


# -- episodes


def _pieces(path: Path, kind: str, spec: EnvSpec, to_frame: Callable[[Any], Array]) -> Iterator[Piece]:
    """Yield the episodes of a file.

    They end at terminals, at timeouts and at the end of the file, and where a row of `next_observations` differs from
    the next observation. Without `next_observations`, the last step of an episode that is not terminal is left out.
    """
    with _open(path, kind) as columns:
        total = _check_shapes(path, columns, spec)
        actions = _actions(path, columns["actions"], spec)
        rewards = _numbers(path, "rewards", columns["rewards"])
        terminals = _flags(path, "terminals", columns["terminals"])
        ends = terminals | _flags(path, "timeouts", columns["timeouts"]) if "timeouts" in columns else terminals

        def frames(name: str, first: int, stop: int) -> Array:
            return _frames(path, name, columns[name].rows(first, stop), first, spec, to_frame)

        frame_bytes = prod(spec.frame_shape) * np.dtype(spec.frame_dtype).itemsize
        part_rows = max(spec.frame_stack, PART_BYTES // frame_bytes)
        for first, stop in itertools.pairwise(sorted({0, total, *(np.flatnonzero(ends) + 1).tolist()})):
            episode = first
            for start in range(first, stop, part_rows):
                end = min(stop, start + part_rows)
                context = min(spec.frame_stack - 1, start - episode)
                obs = frames("observations", start - context, min(end + 1, stop))
                cuts = []
                if "next_observations" in columns:
                    following = frames("next_observations", start, end)
                    known = obs[context + 1 :]
                    cuts = (np.flatnonzero(_differ(following[: len(known)], known)) + 1 + start).tolist()
                elif end < stop or not terminals[end - 1]:
                    following = obs[context + 1 :]  # unknown after the last row, if the episode ends here
                else:  # the next observation of a terminal step does not matter
                    following = np.concatenate([obs[context + 1 :], obs[-1:]])
                for low, high in itertools.pairwise(sorted({start, end, *cuts})):
                    lead = context if low == start else 0
                    rows = obs[low - start + context - lead : high - start + context]
                    last = following[high - 1 - start : high - start]
                    yield from _piece(rows, last, actions[low:high], rewards[low:high], lead, terminals[high - 1])
                episode = max([episode, *cuts])


def _differ(first: Array, second: Array) -> Array:
    return (first != second).any(axis=tuple(range(1, first.ndim)))


def _piece(obs: Array, last: Array, actions: Array, rewards: Array, context: int, terminal: bool) -> Iterator[Piece]:
    """Yield a piece (or none) of rows and the observation after them, if it is known."""
    frames = np.concatenate([obs, last])
    ends = np.full(len(frames), INSIDE, np.uint8)
    ends[:context] = CONTEXT
    ends[-1] = TERMINATED if terminal else TRUNCATED
    steps = len(frames) - context - 1
    if steps:
        columns = []
        for values in (actions, rewards):
            column = np.zeros((len(frames), *values.shape[1:]), values.dtype)
            column[context : context + steps] = values[:steps]
            columns.append(column)
        yield Piece(frames, columns[0], columns[1], ends)


def _frames(path: Path, name: str, rows: Array, first: int, spec: EnvSpec, to_frame: Callable[[Any], Array]) -> Array:
    """Convert observations to frames, and check their values."""
    if rows.dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = rows.astype(spec.frame_dtype) if np.dtype(spec.frame_dtype).kind == "f" else rows
        _refuse_rows(path, name, ~np.isfinite(values), "are not finite numbers", first)
    if spec.first_state is not None:
        low, high = spec.first_state, spec.first_state + prod(spec.frame_shape) - 1
        states = rows.reshape(len(rows))
        is_wrong = (states != np.trunc(states)) | (states < low) | (states > high)
        _refuse_rows(path, name, is_wrong, f"are not whole numbers in {low} to {high} ({spec.id})", first)
        rows = states
    frames = np.stack([to_frame(row) for row in rows]) if len(rows) else np.empty((0, *spec.frame_shape))
    if frames.shape[1:] != spec.frame_shape:
        raise UserError(f"{path}: a row of {name} has the shape {frames.shape[1:]}; {spec.id} has {spec.frame_shape}.")
    return frames.astype(spec.frame_dtype, copy=False)
