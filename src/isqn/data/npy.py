"""Arrays in gzip of npy, as Dopamine's replay logs them, read as a stream: a checkpoint of frames is 7 GB."""

from __future__ import annotations

import ast
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from isqn.types import UserError

Array = NDArray[Any]

MOST_HEADER = 2**16
CHUNK = 2**20
OF_HEADERS = (SyntaxError, KeyError, TypeError, RecursionError, MemoryError)
DAMAGE = (OSError, EOFError, ValueError, zlib.error, *OF_HEADERS)


class NpyStream:
    """The rows of one array, from the first to the last."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0
        with self._named():
            self._file: BinaryIO = gzip.open(path, "rb")  # type: ignore[assignment]  # noqa: SIM115
            shape, dtype = self._header()
        self.shape, self.dtype = shape, dtype
        self.row_bytes = prod(shape[1:]) * dtype.itemsize

    def _header(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Of any version: magic, how long it is, and a Python dictionary. numpy's own reader believes any length."""
        magic, version, _ = self._read(6), self._read(1)[0], self._read(1)
        if magic != b"\x93NUMPY" or version not in (1, 2, 3):
            raise ValueError("it does not begin as npy does")
        length = int.from_bytes(self._read(2 if version == 1 else 4), "little")
        if length > MOST_HEADER:
            raise ValueError(f"its header claims {length:,} bytes")
        described = ast.literal_eval(self._read(length).decode("latin1"))
        shape, dtype = described["shape"], np.dtype(described["descr"])
        if not (isinstance(shape, tuple) and shape and all(type(side) is int and side >= 0 for side in shape)):
            raise ValueError(f"its shape is {shape!r}")
        if described["fortran_order"] or dtype.hasobject or not dtype.itemsize or prod(shape) >= 2**48:
            raise ValueError(f"{dtype} of shape {shape} cannot be read row by row")
        return shape, dtype

    def rows(self, most: int) -> Iterator[Array]:
        """All of them, so many at a time."""
        with self._named():
            for first in range(0, self.shape[0], most):
                count = min(most, self.shape[0] - first)
                yield np.frombuffer(self._read(count * self.row_bytes), self.dtype).reshape(count, *self.shape[1:])
            if self._file.read(1):
                raise ValueError(f"there is more behind its {self.shape[0]:,} rows")

    def _read(self, size: int) -> bytes:
        parts = []
        while size and (
            part := self._file.read(min(size, CHUNK))
        ):  # what a header claims is not taken before it is there
            parts.append(part)
            size -= len(part)
            self._offset += len(part)
        if size:
            raise EOFError(f"it ends {size:,} bytes too early")
        return b"".join(parts)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever is wrong is said with the file and the place in what it unpacks to."""
        try:
            yield
        except DAMAGE as error:
            where = f"at byte {self._offset:,} of what it unpacks to"
            why = "its header is not one of npy" if isinstance(error, OF_HEADERS) else error
            raise UserError(f"{self.path} is damaged {where}: {why}.") from error

    def close(self) -> None:
        self._file.close()


def read_column(path: Path) -> Array:
    """One number for each row."""
    stream = NpyStream(path)
    if len(stream.shape) != 1 or stream.dtype.kind not in "biuf":
        raise UserError(f"{path} holds {stream.dtype} of shape {stream.shape}; a column of numbers belongs there.")
    parts = [*stream.rows(2**16)]
    stream.close()
    return np.concatenate(parts) if parts else np.empty(0, stream.dtype)
