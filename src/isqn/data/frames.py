"""Storage of frames, each stored once: raw, or compressed in small blocks of differences between consecutive frames.

Rows are numbered from the first one ever added and grouped into segments. A finished segment never changes, so it is
written to disk only once. Frames in memory and on disk share the same `read` interface.
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

# Reading one sample decodes one or two blocks. Blocks of 16 frames need 19 % less memory but a third more time.
BLOCK_ROWS = 8
ZSTD_LEVEL = 9  # 5 % smaller than the default level, for 0.03 ms per frame; decoding is equally fast
MAX_SEGMENT_ROWS = 4096


class Frames(Protocol):
    """Readable frames, in memory or on disk."""

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        """Copy the frames of rows first[i] to last[i] into window[i], where index 0 stands for row origin[i]."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the storage of frames."""

    frame_bytes: int
    reach_rows: int  # rows that are needed: the capacity, and the older frames in the stack of the oldest start
    segment_rows: int
    num_segments: int
    word: np.dtype[Any]  # unsigned integer that divides a frame; frames of any dtype are copied as words

    @staticmethod
    def of(spec: EnvSpec, capacity: int, segment_rows: int | None = None) -> Layout:
        """Return the layout for an environment and a number of rows that can be sampled."""
        frame_bytes = prod(spec.frame_shape) * np.dtype(spec.frame_dtype).itemsize
        if segment_rows is None:
            segment_rows = min(MAX_SEGMENT_ROWS, max(1, capacity // 64 // BLOCK_ROWS) * BLOCK_ROWS)
        reach_rows = capacity + spec.frame_stack - 1
        word = next(size for size in (8, 4, 2, 1) if frame_bytes % size == 0)
        return Layout(
            frame_bytes=frame_bytes,
            reach_rows=reach_rows,
            segment_rows=segment_rows,
            num_segments=(reach_rows + segment_rows - 2) // segment_rows + 1,  # enough wherever the reach starts
            word=np.dtype(f"u{word}"),
        )

    @property
    def ring_rows(self) -> int:
        """Number of rows in the ring buffer: whole segments."""
        return self.segment_rows * self.num_segments

    @property
    def words(self) -> int:
        """Number of words in a frame."""
        return self.frame_bytes // self.word.itemsize


# -- in memory


class RawFrames:
    """Ring buffer of uncompressed frames."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ring = np.zeros((layout.ring_rows, layout.words), layout.word)

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    def append(self, row: int, frame: Array) -> None:
        self._ring[row % len(self._ring)] = frame

    def extend(self, row: int, frames: Array) -> None:
        """Append the frames of several rows of one segment, starting at `row`."""
        first = row % len(self._ring)
        self._ring[first : first + len(frames)] = frames

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        rows = origin[:, None] + np.arange(window.shape[1])
        wanted = (rows >= first[:, None]) & (rows <= last[:, None])
        window[wanted] = self._ring[rows[wanted] % len(self._ring)]

    def segment(self, number: int, num_rows: int) -> dict[str, Array]:
        """Return the arrays of a segment, to be saved."""
        first = number * self._layout.segment_rows % len(self._ring)
        return {"frames": self._ring[first : first + num_rows]}

    def restore(self, number: int, arrays: dict[str, Array]) -> None:
        """Load the saved arrays of a segment."""
        first = number * self._layout.segment_rows % len(self._ring)
        self._ring[first : first + len(arrays["frames"])] = arrays["frames"]


class CompressedFrames:
    """Compressed blocks of frames, concatenated in one buffer per segment; the unfinished block is stored raw."""

    def __init__(self, layout: Layout, level: int = ZSTD_LEVEL, checksum: bool = False) -> None:
        self._blocks_per_segment = layout.segment_rows // BLOCK_ROWS
        self._num_segments = layout.num_segments
        self._buffers: dict[int, bytes | bytearray] = {}
        self._ends = np.zeros(layout.ring_rows // BLOCK_ROWS, np.uint32)  # end offset of each block in its buffer
        self._open = np.zeros((BLOCK_ROWS, layout.words), layout.word)
        self._num_closed = 0
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    def nbytes(self) -> int:
        return sum(map(sys.getsizeof, self._buffers.values())) + self._ends.nbytes + self._open.nbytes

    def append(self, row: int, frame: Array) -> None:
        index = row % BLOCK_ROWS
        self._open[index] = frame
        if index == BLOCK_ROWS - 1:
            self._close_block(self._open)

    def extend(self, row: int, frames: Array) -> None:
        """Append the frames of several rows of one segment, starting at `row`."""
        while len(frames):
            if row % BLOCK_ROWS or len(frames) < BLOCK_ROWS:
                self.append(row, frames[0])
                row, frames = row + 1, frames[1:]
            else:
                self._close_block(frames[:BLOCK_ROWS])
                row, frames = row + BLOCK_ROWS, frames[BLOCK_ROWS:]

    def _close_block(self, frames: Array) -> None:
        """Compress a full block: its first frame, then the XOR of each frame with the one before it."""
        number, index = divmod(self._num_closed, self._blocks_per_segment)
        if index == 0:
            self._buffers.pop(number - self._num_segments, None)
        differences = frames.copy()
        differences[1:] ^= frames[:-1]
        buffer = self._buffers.setdefault(number, bytearray())
        buffer += self._compressor.compress(differences.tobytes())
        self._ends[self._num_closed % len(self._ends)] = len(buffer)
        # A full buffer becomes immutable bytes, which are exactly as large as needed.
        self._buffers[number] = bytes(buffer) if index == self._blocks_per_segment - 1 else buffer
        self._num_closed += 1

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        _read_by_blocks(window, origin, first, last, self._read_block)

    def _read_block(self, block: int, skip: int, out: Array) -> None:
        """Copy the frames of a block to `out`, without the first `skip`."""
        if block == self._num_closed:
            out[:] = self._open[skip : skip + len(out)]
            return
        number, index = divmod(block, self._blocks_per_segment)
        slot = block % len(self._ends)
        start = self._ends[slot - 1] if index else 0
        try:
            _decode_block(self._decompressor, self._buffers[number][start : self._ends[slot]], skip, out)
        except (zstandard.ZstdError, ValueError) as error:
            raise UserError(
                f"Block {block} of the replay buffer is damaged ({error}), although the checksum of its file is right; "
                "move the run away to train it anew."
            ) from error

    def segment(self, number: int, num_rows: int) -> dict[str, Array]:
        """Return the arrays of a segment, to be saved."""
        first = number * self._blocks_per_segment % len(self._ends)
        count, num_open = divmod(num_rows, BLOCK_ROWS)
        return {
            "frames": np.frombuffer(self._buffers.get(number, b""), np.uint8),
            "block_ends": self._ends[first : first + count],
            "open_frames": self._open[:num_open],
        }

    def restore(self, number: int, arrays: dict[str, Array]) -> None:
        """Load the saved arrays of a segment."""
        first = number * self._blocks_per_segment % len(self._ends)
        count, num_open = len(arrays["block_ends"]), len(arrays["open_frames"])
        self._ends[first : first + count] = arrays["block_ends"]
        self._open[:num_open] = arrays["open_frames"]
        frames = arrays["frames"].tobytes()
        if count:
            self._buffers[number] = frames if count == self._blocks_per_segment else bytearray(frames)
        self._num_closed = number * self._blocks_per_segment + count


def make_frames(layout: Layout, *, compress: bool, **settings: Any) -> RawFrames | CompressedFrames:
    """Return empty storage; `settings` are those of `CompressedFrames`."""
    return CompressedFrames(layout, **settings) if compress else RawFrames(layout)


def _read_by_blocks(
    window: Array, origin: Array, first: Array, last: Array, read_block: Callable[[int, int, Array], None]
) -> None:
    """Implement `Frames.read` with a function that reads (a part of) one block."""
    for frames, start, row, end in zip(window, origin.tolist(), first.tolist(), last.tolist(), strict=True):
        while row <= end:
            block, skip = divmod(row, BLOCK_ROWS)
            count = min(BLOCK_ROWS - skip, end - row + 1)
            read_block(block, skip, frames[row - start : row - start + count])
            row += count


def _decode_block(decompressor: zstandard.ZstdDecompressor, content: Any, skip: int, out: Array) -> None:
    """Decode the frames of a block, without the first `skip`; raises `ValueError` or `ZstdError` if it is damaged."""
    size = BLOCK_ROWS * out.shape[1] * out.dtype.itemsize
    if (claimed := zstandard.frame_content_size(content)) not in (-1, size):  # it would be allocated at once
        raise ValueError(f"it claims {claimed:,} bytes, not {size:,}")
    _decode_differences(decompressor.decompress(content, max_output_size=size), skip, out)


def _decode_differences(raw: bytes, skip: int, out: Array) -> None:
    """Rebuild the frames of a block from their differences, without the first `skip`."""
    differences = np.frombuffer(raw, out.dtype).reshape(BLOCK_ROWS, -1)
    frame = np.bitwise_xor.reduce(differences[: skip + 1], axis=0, out=out[0])
    for index, difference in enumerate(differences[skip + 1 : skip + len(out)], start=1):
        frame = np.bitwise_xor(frame, difference, out=out[index])


# -- on disk


class StoredFrames:
    """Segments in memory-mapped files; only the frames that are accessed are read from disk."""

    def __init__(self, paths: list[Path], segments: list[dict[str, Array]], segment_rows: int) -> None:
        self._paths, self._segments, self._segment_rows = paths, segments, segment_rows
        self._maps = [_locate(segment["frames"]) for segment in segments]
        self._decompressor = zstandard.ZstdDecompressor()
        self._is_compressed = "block_ends" in segments[0]

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        if self._is_compressed:
            for block in np.unique(np.stack([first, last]) // BLOCK_ROWS).tolist():
                self._prefetch(block)
            _read_by_blocks(window, origin, first, last, self._read_block)
            return
        rows = origin[:, None] + np.arange(window.shape[1])
        wanted = (rows >= first[:, None]) & (rows <= last[:, None])
        for number in np.unique(rows[wanted] // self._segment_rows):
            in_segment = wanted & (rows // self._segment_rows == number)
            window[in_segment] = self._segments[number]["frames"][rows[in_segment] % self._segment_rows]

    def _bounds(self, block: int) -> tuple[int, int, int]:
        """Return the segment of a block and its byte range there, which is (0, 0) for an unfinished last block."""
        number, index = divmod(block, self._segment_rows // BLOCK_ROWS)
        ends = self._segments[number]["block_ends"]
        end = int(ends[index]) if index < len(ends) else 0
        return number, int(ends[index - 1]) if index and end else 0, end

    def _prefetch(self, block: int) -> None:
        """Ask the system to load a block; the missing blocks of a whole batch are then read from disk together."""
        number, start, end = self._bounds(block)
        mapped, offset = self._maps[number]
        start, end = offset + start, offset + end
        first = start - start % mmap.PAGESIZE
        if end > start:
            mapped.madvise(mmap.MADV_WILLNEED, first, end - first)

    def _read_block(self, block: int, skip: int, out: Array) -> None:
        """Copy the frames of a block to `out`, without the first `skip`."""
        number, start, end = self._bounds(block)
        segment, index = self._segments[number], block % (self._segment_rows // BLOCK_ROWS)
        if not end:
            out[:] = segment["open_frames"][skip : skip + len(out)]
            return
        try:
            _decode_block(self._decompressor, segment["frames"][start:end].data, skip, out)
        except (zstandard.ZstdError, ValueError) as error:
            where = f"block {index}, at byte {start:,} of its frames"
            raise UserError(f"{self._paths[number]} is damaged: {where} ({error}).") from error


def map_arrays(path: Path) -> dict[str, Array]:
    """Memory-map the arrays of a safetensors file (length of the header, header in JSON, data)."""
    try:
        _raise_open_file_limit()
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # no read-ahead
        data = np.frombuffer(mapped, np.uint8)
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        arrays = {}
        for name, entry in header.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            arrays[name] = data[start:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}.") from error


@cache
def _raise_open_file_limit() -> None:
    """Allow as many open files as the system permits, because every map keeps its file open."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _locate(array: Array) -> tuple[mmap.mmap, int]:
    """Return the memory map that holds an array, and the array's offset in it."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base, array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data


_DTYPES = {
    **{f"{kind}{8 * size}": f"{kind.lower()}{size}" for kind in "UIF" for size in (1, 2, 4, 8)},
    "BOOL": "bool",
}
