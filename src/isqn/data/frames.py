"""Frames, each stored once: raw, or compressed in blocks of a few, each frame as its difference from the one before it.

Rows are numbered from the first one ever added and grouped in segments. A finished segment never changes, so that it
is written to disk only once. `read` is the same for frames in memory and on disk.
"""

from __future__ import annotations

import json
import mmap
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from isqn.data.files import DamagedFile
from isqn.types import EnvSpec, UserError

Array = NDArray[Any]

# A sample decodes one or two blocks. 16 frames in a block need 19 % less memory and take a third more time.
BLOCK_ROWS = 8
ZSTD_LEVEL = 9  # 5 % smaller than the default level for 0.03 ms per frame; decoding is as fast
MAX_SEGMENT_ROWS = 4096


class Frames(Protocol):
    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        """Write rows first[i] to last[i] into window[i], whose place 0 stands for row origin[i]."""


@dataclass(frozen=True)
class Layout:
    """Sizes that follow from a specification and a number of rows."""

    frame_bytes: int
    reach_rows: int  # how far back a row can be of use: the capacity, and the stack of the oldest start
    segment_rows: int
    num_segments: int
    word: np.dtype[Any]  # frames are moved and compared as rows of these, whatever their type

    @staticmethod
    def of(spec: EnvSpec, capacity: int, segment_rows: int | None = None) -> Layout:
        frame_bytes = prod(spec.frame_shape) * np.dtype(spec.frame_dtype).itemsize
        if segment_rows is None:
            segment_rows = min(MAX_SEGMENT_ROWS, max(1, capacity // 64 // BLOCK_ROWS) * BLOCK_ROWS)
        reach_rows = capacity + spec.frame_stack - 1
        word = next(size for size in (8, 4, 2, 1) if frame_bytes % size == 0)
        return Layout(
            frame_bytes=frame_bytes,
            reach_rows=reach_rows,
            segment_rows=segment_rows,
            num_segments=(reach_rows + segment_rows - 2) // segment_rows + 1,  # wherever the reach begins
            word=np.dtype(f"u{word}"),
        )

    @property
    def ring_rows(self) -> int:
        return self.segment_rows * self.num_segments

    @property
    def words(self) -> int:
        return self.frame_bytes // self.word.itemsize


# -- in memory


class RawFrames:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ring = np.zeros((layout.ring_rows, layout.words), layout.word)

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    def append(self, row: int, frame: Array) -> None:
        self._ring[row % len(self._ring)] = frame

    def extend(self, row: int, frames: Array) -> None:
        """Rows of one segment."""
        first = row % len(self._ring)
        self._ring[first : first + len(frames)] = frames

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        rows = origin[:, None] + np.arange(window.shape[1])
        wanted = (rows >= first[:, None]) & (rows <= last[:, None])
        window[wanted] = self._ring[rows[wanted] % len(self._ring)]

    def segment(self, number: int, num_rows: int) -> dict[str, Array]:
        first = number * self._layout.segment_rows % len(self._ring)
        return {"frames": self._ring[first : first + num_rows]}

    def restore(self, number: int, arrays: dict[str, Array]) -> None:
        first = number * self._layout.segment_rows % len(self._ring)
        self._ring[first : first + len(arrays["frames"])] = arrays["frames"]


class CompressedFrames:
    """Blocks of frames, one after the other in a buffer per segment; the unfinished block is kept raw."""

    def __init__(self, layout: Layout, level: int = ZSTD_LEVEL, checksum: bool = False) -> None:
        self._blocks_per_segment = layout.segment_rows // BLOCK_ROWS
        self._num_segments = layout.num_segments
        self._buffers: dict[int, bytes | bytearray] = {}
        self._ends = np.zeros(layout.ring_rows // BLOCK_ROWS, np.uint32)  # of each block, in its buffer
        self._open = np.zeros((BLOCK_ROWS, layout.words), layout.word)
        self._num_closed = 0
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    def nbytes(self) -> int:
        return sum(map(sys.getsizeof, self._buffers.values())) + self._ends.nbytes + self._open.nbytes

    def append(self, row: int, frame: Array) -> None:
        place = row % BLOCK_ROWS
        self._open[place] = frame
        if place == BLOCK_ROWS - 1:
            self._close_block(self._open)

    def extend(self, row: int, frames: Array) -> None:
        """Rows of one segment."""
        while len(frames):
            if row % BLOCK_ROWS or len(frames) < BLOCK_ROWS:
                self.append(row, frames[0])
                row, frames = row + 1, frames[1:]
            else:
                self._close_block(frames[:BLOCK_ROWS])
                row, frames = row + BLOCK_ROWS, frames[BLOCK_ROWS:]

    def _close_block(self, frames: Array) -> None:
        number, place = divmod(self._num_closed, self._blocks_per_segment)
        if place == 0:
            self._buffers.pop(number - self._num_segments, None)
        differences = frames.copy()
        differences[1:] ^= frames[:-1]
        buffer = self._buffers.setdefault(number, bytearray())
        buffer += self._compressor.compress(differences.tobytes())
        self._ends[self._num_closed % len(self._ends)] = len(buffer)
        # A full buffer is frozen: exactly as large as it must be, and out of the way of those that grow.
        self._buffers[number] = bytes(buffer) if place == self._blocks_per_segment - 1 else buffer
        self._num_closed += 1

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        _read_by_blocks(window, origin, first, last, self._read_block)

    def _read_block(self, block: int, skip: int, out: Array) -> None:
        if block == self._num_closed:
            out[:] = self._open[skip : skip + len(out)]
            return
        number, place = divmod(block, self._blocks_per_segment)
        slot = block % len(self._ends)
        begin = self._ends[slot - 1] if place else 0
        _undo(self._decompressor.decompress(self._buffers[number][begin : self._ends[slot]]), skip, out)

    def segment(self, number: int, num_rows: int) -> dict[str, Array]:
        first = number * self._blocks_per_segment % len(self._ends)
        count, num_open = divmod(num_rows, BLOCK_ROWS)
        return {
            "frames": np.frombuffer(self._buffers.get(number, b""), np.uint8),
            "block_ends": self._ends[first : first + count],
            "open_frames": self._open[:num_open],
        }

    def restore(self, number: int, arrays: dict[str, Array]) -> None:
        first = number * self._blocks_per_segment % len(self._ends)
        count, num_open = len(arrays["block_ends"]), len(arrays["open_frames"])
        self._ends[first : first + count] = arrays["block_ends"]
        self._open[:num_open] = arrays["open_frames"]
        frames = arrays["frames"].tobytes()
        if count:
            self._buffers[number] = frames if count == self._blocks_per_segment else bytearray(frames)
        self._num_closed = number * self._blocks_per_segment + count


def make_frames(layout: Layout, *, compress: bool, **settings: Any) -> RawFrames | CompressedFrames:
    return CompressedFrames(layout, **settings) if compress else RawFrames(layout)


def _read_by_blocks(
    window: Array, origin: Array, first: Array, last: Array, read_block: Callable[[int, int, Array], None]
) -> None:
    for places, start, row, end in zip(window, origin.tolist(), first.tolist(), last.tolist(), strict=True):
        while row <= end:
            block, skip = divmod(row, BLOCK_ROWS)
            count = min(BLOCK_ROWS - skip, end - row + 1)
            read_block(block, skip, places[row - start : row - start + count])
            row += count


def _undo(raw: bytes, skip: int, out: Array) -> None:
    """Frames from the differences of a block, without the first few."""
    differences = np.frombuffer(raw, out.dtype).reshape(BLOCK_ROWS, -1)
    frame = np.bitwise_xor.reduce(differences[: skip + 1], axis=0, out=out[0])
    for place, difference in enumerate(differences[skip + 1 : skip + len(out)], start=1):
        frame = np.bitwise_xor(frame, difference, out=out[place])


# -- on disk


class StoredFrames:
    """Segments in files that are mapped into memory: what is not looked at is not read."""

    def __init__(self, paths: list[Path], segments: list[dict[str, Array]], segment_rows: int) -> None:
        self._paths, self._segments, self._segment_rows = paths, segments, segment_rows
        self._maps = [_map_of(segment["frames"]) for segment in segments]
        self._decompressor = zstandard.ZstdDecompressor()
        self._is_compressed = "block_ends" in segments[0]

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        if self._is_compressed:
            for block in np.unique(np.stack([first, last]) // BLOCK_ROWS).tolist():
                self._ask_for(block)
            _read_by_blocks(window, origin, first, last, self._read_block)
            return
        rows = origin[:, None] + np.arange(window.shape[1])
        wanted = (rows >= first[:, None]) & (rows <= last[:, None])
        for number in np.unique(rows[wanted] // self._segment_rows):
            here = wanted & (rows // self._segment_rows == number)
            window[here] = self._segments[number]["frames"][rows[here] % self._segment_rows]

    def _bounds(self, block: int) -> tuple[int, int, int]:
        """Segment and bytes of its frames; none for a last block that is not full."""
        number, place = divmod(block, self._segment_rows // BLOCK_ROWS)
        ends = self._segments[number]["block_ends"]
        end = int(ends[place]) if place < len(ends) else 0
        return number, int(ends[place - 1]) if place and end else 0, end

    def _ask_for(self, block: int) -> None:
        """Of the system, before it is needed: what is not in memory is then read for a whole batch at once."""
        number, begin, end = self._bounds(block)
        mapped, offset = self._maps[number]
        begin, end = offset + begin, offset + end
        first = begin - begin % mmap.PAGESIZE
        if end > begin:
            mapped.madvise(mmap.MADV_WILLNEED, first, end - first)

    def _read_block(self, block: int, skip: int, out: Array) -> None:
        number, begin, end = self._bounds(block)
        segment, place = self._segments[number], block % (self._segment_rows // BLOCK_ROWS)
        if not end:
            out[:] = segment["open_frames"][skip : skip + len(out)]
            return
        size = BLOCK_ROWS * out.shape[1] * out.dtype.itemsize
        try:
            raw = self._decompressor.decompress(segment["frames"][begin:end].data, max_output_size=size)
            _undo(raw, skip, out)
        except (zstandard.ZstdError, ValueError) as error:
            where = f"block {place}, at byte {begin:,} of its frames"
            raise UserError(f"{self._paths[number]} is damaged: {where} ({error}).") from error


def map_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors file, mapped into memory: its length, a header in JSON, then their bytes."""
    try:
        _allow_files()
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # what lies behind what is read is not read too
        data = np.frombuffer(mapped, np.uint8)
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        arrays = {}
        for name, described in header.items():
            begin, end = (8 + length + offset for offset in described["data_offsets"])
            arrays[name] = data[begin:end].view(_TYPES[described["dtype"]]).reshape(described["shape"])
        return arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}.") from error


@cache
def _allow_files() -> None:
    """A map keeps its file open: as many as the system lets this process have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _map_of(array: Array) -> tuple[mmap.mmap, int]:
    """The map that an array lies in, and where."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base, array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data


_TYPES = {
    **{f"{kind}{8 * size}": f"{kind.lower()}{size}" for kind in "UIF" for size in (1, 2, 4, 8)},
    "BOOL": "bool",
}
