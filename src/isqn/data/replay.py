"""Replay buffer of the host loop.

Every frame is stored once, in a ring buffer; frame stacks and n-step returns are built when a batch is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from isqn.data.files import DamagedFile, Description, check_files, sync, write_file
from isqn.data.frames import BLOCK_ROWS, Layout, make_frames
from isqn.data.sample import COLUMNS, ENDED, INSIDE, TERMINATED, TRUNCATED, Rows, action_dtype, columns_bytes
from isqn.data.segments import read_segment
from isqn.types import EnvSpec, Transition, UserError

Array = NDArray[Any]

COMPRESSED_SHARE = 0.0325  # compressed size / raw size: mean over 15 Atari games, results/replay_memory.json


@dataclass(frozen=True)
class Memory:
    """Size of a full replay buffer in bytes, computed without allocating it."""

    columns: int
    frames: int  # exact if stored raw, an estimate if compressed
    max_frames: int  # upper bound, reached by frames that do not compress
    compressed: bool

    @property
    def total(self) -> int:
        return self.columns + self.frames

    def __str__(self) -> str:
        if not self.compressed:
            return f"{_megabytes(self.total)} for a full replay buffer"
        return (
            f"about {_megabytes(self.total)} for a full replay buffer, if frames compress as they do on Atari "
            f"(at most {_megabytes(self.columns + self.max_frames)} if they do not compress)"
        )


def memory_needed(spec: EnvSpec, capacity: int, compress: bool) -> Memory:
    """Compute the size of a full replay buffer.

    Columns and raw frames are exact; for compressed frames, the compression measured on Atari is assumed.
    """
    layout = Layout.of(spec, capacity)
    columns = columns_bytes(spec, layout.ring_rows)
    raw = layout.ring_rows * layout.frame_bytes
    if not compress:
        return Memory(columns, raw, raw, compressed=False)
    index = layout.ring_rows // BLOCK_ROWS * np.dtype(np.uint32).itemsize
    open_block = BLOCK_ROWS * layout.frame_bytes
    upper_bound = raw + raw // 256 + 64 * layout.ring_rows // BLOCK_ROWS  # zstd's bound for incompressible data
    return Memory(columns + index + open_block, round(raw * COMPRESSED_SHARE), upper_bound, compressed=True)


class Replay:
    """First-in, first-out replay buffer of `capacity` rows that samples n-step transitions uniformly.

    Not thread-safe.
    """

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        *,
        compress: bool,
        num_steps_return: int = 1,
        discount: float,
        reward_clip: float | None = None,
    ) -> None:
        if num_steps_return < 1:
            raise UserError(f"num_steps_return is {num_steps_return}; it must be at least 1.")
        if capacity <= num_steps_return:
            raise UserError(
                f"The replay's capacity is {capacity} rows; a return of {num_steps_return} steps "
                f"needs at least {num_steps_return + 1}."
            )
        self.spec = spec
        self.capacity = capacity
        self._compress = compress
        self._layout = Layout.of(spec, capacity)
        self._frames = make_frames(self._layout, compress=compress)
        self._rows = Rows(
            spec,
            self._layout,
            capacity,
            self._frames,
            actions=np.zeros((self._layout.ring_rows, *spec.action_shape), action_dtype(spec)),
            rewards=np.zeros(self._layout.ring_rows, np.float32),
            ends=np.full(self._layout.ring_rows, TRUNCATED, np.uint8),
            num_steps_return=num_steps_return,
            discount=discount,
            reward_clip=reward_clip,
        )
        self._stack = np.zeros((spec.frame_stack, self._layout.words), self._layout.word)
        self._saved: dict[int, Description] = {}  # finished segments on disk, by number

    # -- writing

    def add_first(self, frame: Array) -> None:
        """Add the frame after a reset. An unfinished episode before it counts as truncated."""
        if self._rows.total and not self._has_ended(self._rows.total - 1):
            self._rows.ends[self._rows.slot(self._rows.total - 1)] = TRUNCATED
        self._stack[:] = 0
        self._append(frame, INSIDE)

    def add(self, action: Any, reward: float, terminated: bool, truncated: bool, frame: Array) -> None:
        """Add the step taken from the last frame, and the frame it led to."""
        if not self._rows.total or self._has_ended(self._rows.total - 1):
            raise ValueError("Replay.add needs a current episode; start one with add_first.")
        slot = self._rows.slot(self._rows.total - 1)
        self._rows.actions[slot] = action
        self._rows.rewards[slot] = reward
        self._append(frame, TERMINATED if terminated else TRUNCATED if truncated else INSIDE)

    def _append(self, frame: Array, end: int) -> None:
        if frame.shape != self.spec.frame_shape or frame.dtype != self.spec.frame_dtype:
            raise ValueError(
                f"A frame of {self.spec.id} is {frame.dtype} {frame.shape}; "
                f"its specification says {self.spec.frame_dtype} {self.spec.frame_shape}."
            )
        words = np.ascontiguousarray(frame).reshape(-1).view(self._layout.word)
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = words
        rows = self._rows
        self._frames.append(rows.total, words)
        slot = rows.slot(rows.total)
        rows.actions[slot], rows.rewards[slot] = 0, 0  # clear the old row in this slot
        rows.ends[slot] = end
        rows.total += 1

    # -- reading

    @property
    def num_rows(self) -> int:
        """Number of rows that can be sampled."""
        return self._rows.num_rows

    @property
    def nbytes(self) -> int:
        """Current size in bytes, frames and columns."""
        columns = (self._rows.actions, self._rows.rewards, self._rows.ends)
        return sum(column.nbytes for column in columns) + self._frames.nbytes

    def observation(self) -> Array:
        """Return the current observation: the latest frames of the current episode, of shape `spec.obs_shape`."""
        return self._rows.observations(self._stack[None])[0].copy()

    def sample(self, batch_size: int, generator: np.random.Generator) -> Transition:
        """Sample a batch uniformly, with replacement, from the valid starts."""
        return self._rows.sample(batch_size, generator)

    def valid_starts(self) -> Array:
        """Return all rows at which a transition can start: those with a complete n-step return."""
        return self._rows.valid_starts()

    def gather(self, starts: Array) -> Transition:
        """Return the transitions that start at the given rows."""
        return self._rows.gather(starts)

    def latest(self, explored: bool) -> Transition:
        """Return the newest step as a batch of one, for agents that learn online from a stream."""
        start = self._rows.total - 2
        # If a new episode has just begun, the newest step starts one row earlier.
        return self.step_from(start - self._has_ended(start), explored)

    def step_from(self, row: int, explored: bool) -> Transition:
        """Return the step that starts at a row, as a batch of one with `ended` and `explored`."""
        ended = self._has_ended(row + 1)
        return self.gather(np.array([row]))._replace(ended=np.array([ended]), explored=np.array([explored]))

    def _has_ended(self, row: int) -> bool:
        return bool(self._rows.ends[self._rows.slot(row)] & ENDED)

    # -- disk

    def save(self, folder: Path) -> Description:
        """Write the new rows and return a JSON-serialisable description of all files of the replay buffer.

        File names contain a checksum, so a file of an older description is never overwritten, even if a run is resumed
        from an older checkpoint and then differs.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        if self._rows.total:
            live = self._segments(self._rows.total)
            last = live[-1]  # unfinished: the action of its newest row is missing
            self._saved = {number: file for number, file in self._saved.items() if number in live}
            for number in live:
                file = self._saved.get(number)
                if file is None or not (folder / file["name"]).exists():
                    content = safetensors.numpy.save(self._segment(number))
                    file = {**write_file(folder, f"replay-{number:06d}", content), "segment": number}
                if number != last:
                    self._saved[number] = file
                files.append(file)
            sync(folder)
        return {**self._identity(), "total_rows": self._rows.total, "files": files}

    def restore(self, description: Description, folder: Path) -> None:
        """Load the rows that `save` described into a new replay buffer, which continues exactly as the saved one.

        Raises `DamagedFile` if a file differs from what was written; the replay buffer must then be discarded.
        """
        if self._rows.total:
            raise ValueError("Replay.restore needs an empty replay; this one has rows.")
        for name, mine in self._identity().items():
            if description.get(name) != mine:
                raise UserError(f"The saved replay's {name} is {description.get(name)}, this run's is {mine}.")
        total, rows = description.get("total_rows"), self._layout.segment_rows
        files = check_files(description, folder)
        if type(total) is not int or [file.get("segment") for file in files] != [*self._segments(total)]:
            raise DamagedFile(f"{folder} has {len(files)} files, which do not hold the rows before row {total!r:.40}.")
        for file in files:
            count = min(rows, total - file["segment"] * rows)
            arrays = read_segment(folder, file, self.spec, count, rows, is_compressed=self._compress)
            slots = self._rows.slot(np.arange(len(arrays["ends"])) + file["segment"] * rows)
            for name in COLUMNS:
                getattr(self._rows, name)[slots] = arrays[name]
            self._frames.restore(file["segment"], arrays)
            if (file["segment"] + 1) * rows < total:
                self._saved[file["segment"]] = file
        self._rows.total = total
        if total:
            newest = np.array([total - 1])
            self._frames.read(
                self._stack[None], newest - len(self._stack) + 1, self._rows.first_in_stack(newest), newest
            )

    def _segments(self, total: int) -> range:
        """Return the numbers of the segments that are needed after `total` rows."""
        if not 0 < total < 2**62:
            return range(0)
        rows = self._layout.segment_rows
        return range(max(0, total - self._layout.reach_rows) // rows, (total - 1) // rows + 1)

    def _segment(self, number: int) -> dict[str, Array]:
        first = number * self._layout.segment_rows
        count = min(self._layout.segment_rows, self._rows.total - first)
        slots = slice(self._rows.slot(first), self._rows.slot(first) + count)
        columns = {name: getattr(self._rows, name)[slots] for name in COLUMNS}
        return {**columns, **self._frames.segment(number, count)}

    def _identity(self) -> Description:
        """Return the settings that saved rows must share with this replay buffer."""
        return {
            "format": 1,
            "capacity": self.capacity,
            "compress": self._compress,
            "frame_shape": list(self.spec.frame_shape),
            "frame_dtype": self.spec.frame_dtype,
            "frame_stack": self.spec.frame_stack,
            "num_actions": self.spec.num_actions,
        }


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
