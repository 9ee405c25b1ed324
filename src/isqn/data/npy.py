"""Streaming reader of compressed .npy files: replay logs of Dopamine (7 GB a checkpoint), and members of .npz files."""

from __future__ import annotations

import ast
import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from isqn.data.files import check_claim
from isqn.types import UserError

Array = NDArray[Any]

MAX_HEADER_BYTES = 2**16
READ_BYTES = 2**20
HEADER_ERRORS = (SyntaxError, KeyError, TypeError, RecursionError, MemoryError)
ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, RuntimeError)
READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, *ZIP_ERRORS, *HEADER_ERRORS)


class NpyStream:
    """Rows of one array, read from the first to the last."""

    def __init__(self, path: Path, name: str = "", opener: Callable[[], Any] | None = None) -> None:
        """Open a gzipped file, or what `opener` opens; messages call it `name` in the file."""
        self.path, self._offset, self._label = path, 0, f"{path}: {name}" if name else f"{path}"
        with self._report_damage():
            self._file: BinaryIO = opener() if opener else gzip.open(path, "rb")  # type: ignore[assignment]  # noqa: SIM115
            try:
                self.shape, self.dtype, self._is_fortran = self._read_header()
            except BaseException:
                self._file.close()
                raise
        self.row_bytes = prod(self.shape[1:]) * self.dtype.itemsize

    def _read_header(self) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
        """Read the header (any version) and return the shape, the dtype, and whether the order is that of Fortran.

        The header is the magic bytes, its length and a Python dictionary. numpy's own reader trusts any length.
        """
        magic, version, _ = self._read(6), self._read(1)[0], self._read(1)
        if magic != b"\x93NUMPY" or version not in (1, 2, 3):
            raise ValueError("it does not start with the magic bytes of npy")
        length = int.from_bytes(self._read(2 if version == 1 else 4), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header claims {length:,} bytes")
        header = ast.literal_eval(self._read(length).decode("latin1"))
        shape, dtype = header["shape"], np.dtype(header["descr"])
        if not (isinstance(shape, tuple) and shape and all(type(side) is int and side >= 0 for side in shape)):
            raise ValueError(f"its shape is {shape!r}")
        if dtype.hasobject:
            raise ValueError("it holds Python objects, which only a pickle can hold, and reading a pickle runs code")
        if not dtype.itemsize or prod(shape) >= 2**48:
            raise ValueError(f"{dtype} of shape {shape} cannot be read")
        return shape, dtype, header["fortran_order"] is True and len(shape) > 1

    def rows(self, max_rows: int) -> Iterator[Array]:
        """Yield all rows, at most `max_rows` at a time; an array in Fortran's order is held in memory at once."""
        with self._report_damage():
            columns = None
            if self._is_fortran:
                content = np.frombuffer(self._read(self.shape[0] * self.row_bytes), self.dtype)
                columns = content.reshape(self.shape[::-1]).T
            for first in range(0, self.shape[0], max_rows):
                count = min(max_rows, self.shape[0] - first)
                if columns is not None:
                    yield np.ascontiguousarray(columns[first : first + count])
                    continue
                yield np.frombuffer(self._read(count * self.row_bytes), self.dtype).reshape(count, *self.shape[1:])
            if self._file.read(1):
                raise ValueError(f"there is more data after its {self.shape[0]:,} rows")

    def _read(self, size: int) -> bytes:
        """Read in small parts, so that a damaged header cannot make it allocate more than the file holds."""
        parts = []
        while size and (part := self._file.read(min(size, READ_BYTES))):
            parts.append(part)
            size -= len(part)
            self._offset += len(part)
        if size:
            raise EOFError(f"it ends {size:,} bytes too early")
        return b"".join(parts)

    @contextmanager
    def _report_damage(self) -> Iterator[None]:
        """Turn any reading error into a `UserError` that names the file and the position in its content."""
        try:
            yield
        except READ_ERRORS as error:
            reason = "its header is not that of an npy file" if isinstance(error, HEADER_ERRORS) else error
            raise UserError(
                f"{self._label} is damaged at byte {self._offset:,} of its decompressed data: {reason}."
            ) from error

    def close(self) -> None:
        self._file.close()


def read_column(path: Path) -> Array:
    """Read a one-dimensional array of numbers."""
    stream = NpyStream(path)
    if len(stream.shape) != 1 or stream.dtype.kind not in "biuf":
        raise UserError(f"{path} holds {stream.dtype} of shape {stream.shape}; it must be one column of numbers.")
    check_claim(path, "its column", stream.shape[0] * stream.row_bytes, path.stat().st_size)
    parts = [*stream.rows(2**16)]
    stream.close()
    return np.concatenate(parts) if parts else np.empty(0, stream.dtype)
