"""The host replay: every frame is stored once; stacks and n-step returns are built when a batch is drawn.

A row is one moment of an episode: the frame seen at it, and the action and reward of the step taken from
it. An episode of L steps is L + 1 rows: no step starts from its last row, but the true last observation is
there to bootstrap from. Rows are numbered from the first one ever added. The last `capacity` of them
can be drawn; those just before are kept for as long as a stack reaches back to them.

Rows are grouped in segments. A finished segment never changes, so it is written to disk only once. Frames
are compressed in blocks of a few, each frame as its difference from the one before it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import zstandard
from numpy.typing import NDArray

from isqn.data.files import Description, read_file, sync, write_file
from isqn.types import EnvSpec, Transition, UserError

Array = NDArray[Any]

# A sample decodes one or two blocks. 16 frames in a block need 19 % less memory and take a third more time.
BLOCK_ROWS = 8
ZSTD_LEVEL = 9  # 5 % smaller than the default level for 0.03 ms per frame; decoding is as fast
MAX_SEGMENT_ROWS = 4096
COMPRESSED_SHARE = 0.0325  # of the raw bytes: the mean of 15 Atari games, results/replay_memory.json

# What a row is to its episode.
INSIDE, TRUNCATED, TERMINATED = 0, 1, 2


@dataclass(frozen=True)
class Memory:
    """Bytes that a replay takes, known before anything is allocated."""

    columns: int
    frames: int  # exact if stored raw, expected if compressed
    most_frames: int  # the same for frames that do not compress at all
    compressed: bool

    @property
    def total(self) -> int:
        return self.columns + self.frames

    def __str__(self) -> str:
        if not self.compressed:
            return f"{_megabytes(self.total)} for the replay when it is full"
        return (
            f"about {_megabytes(self.total)} for the replay when it is full (frames compressed as well as "
            f"Atari's; at most {_megabytes(self.columns + self.most_frames)} if they do not compress at all)"
        )


def memory_needed(spec: EnvSpec, capacity: int, compress: bool) -> Memory:
    """Exact for the columns and for raw frames; for compressed frames, what Atari's were measured to take."""
    layout = _Layout.of(spec, capacity)
    action_bytes = _action_dtype(spec).itemsize * prod(spec.action_shape)
    row_bytes = action_bytes + np.dtype(np.float32).itemsize + np.dtype(np.uint8).itemsize
    columns = layout.ring_rows * row_bytes
    raw = layout.ring_rows * layout.frame_bytes
    if not compress:
        return Memory(columns, raw, raw, compressed=False)
    index = layout.ring_rows // BLOCK_ROWS * np.dtype(np.uint32).itemsize
    open_block = BLOCK_ROWS * layout.frame_bytes
    most = raw + raw // 256 + 64 * layout.ring_rows // BLOCK_ROWS  # zstd's own bound for noise
    return Memory(columns + index + open_block, round(raw * COMPRESSED_SHARE), most, compressed=True)


class Replay:
    """First in, first out, over `capacity` rows; samples n-step transitions uniformly.

    Not to be used from two threads at once.
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
        self._num_steps_return = num_steps_return
        self._discount = discount
        self._reward_clip = reward_clip
        self._compress = compress
        self._layout = _Layout.of(spec, capacity)
        rows = self._layout.ring_rows
        self._actions = np.zeros((rows, *spec.action_shape), _action_dtype(spec))
        self._rewards = np.zeros(rows, np.float32)
        self._ends = np.full(rows, TRUNCATED, np.uint8)  # so that nothing reaches back before row 0
        self._frames = (_CompressedFrames if compress else _RawFrames)(self._layout)
        self._stack = np.zeros((spec.frame_stack, self._layout.words), self._layout.word)
        self._total = 0
        self._saved: dict[int, Description] = {}  # finished segments on disk, by number

    # -- writing

    def add_first(self, frame: Array) -> None:
        """The frame after a reset. An episode left unfinished before it counts as truncated."""
        if self._total and self._end_of_last_row == INSIDE:
            self._ends[self._slot(self._total - 1)] = TRUNCATED
        self._stack[:] = 0
        self._append(frame, INSIDE)

    def add(self, action: Any, reward: float, terminated: bool, truncated: bool, frame: Array) -> None:
        """The step taken from the last frame, and the frame it led to."""
        if not self._total or self._end_of_last_row != INSIDE:
            raise ValueError("Replay.add needs a current episode; begin one with add_first.")
        slot = self._slot(self._total - 1)
        self._actions[slot] = action
        self._rewards[slot] = reward
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
        self._frames.append(self._total, words)
        slot = self._slot(self._total)
        self._actions[slot], self._rewards[slot] = 0, 0  # nothing is left of the row that was here before
        self._ends[slot] = end
        self._total += 1

    # -- reading

    @property
    def num_rows(self) -> int:
        return min(self._total, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes held now, frames and columns."""
        columns = self._actions.nbytes + self._rewards.nbytes + self._ends.nbytes
        return columns + self._frames.nbytes

    def observation(self) -> Array:
        """What the agent sees now: the last frames of the current episode, of shape `spec.obs_shape`."""
        return self._observations(self._stack[None])[0].copy()

    def sample(self, batch_size: int, generator: np.random.Generator) -> Transition:
        """A batch drawn uniformly, with replacement, from the valid starts."""
        return self.gather(self._draw(batch_size, generator))

    def latest(self, explored: bool) -> Transition:
        """The step that was added last, as a batch of one: all that a stream is learned from."""
        start = self._total - 2
        return self.step_from(start - int(self._ends[self._slot(start)] != INSIDE), explored)  # or an episode has begun

    def step_from(self, row: int, explored: bool) -> Transition:
        """The same for the step that starts at a row."""
        ended = self._ends[self._slot(row + 1)] != INSIDE
        return self.gather(np.array([row]))._replace(ended=np.array([ended]), explored=np.array([explored]))

    def valid_starts(self) -> Array:
        """Every row that a sample can start from: its n-step return is complete."""
        rows = np.arange(self._total - self.num_rows, self._total)
        return rows[self._steps_taken(rows) > 0]

    def gather(self, starts: Array) -> Transition:
        """The transitions from the given rows.

        Observations are views of one (batch, frame, ...) array where they can be, so they are read-only:
        jax reorders them on transfer in a third of the time that numpy would take here.
        """
        steps = self._steps_taken(starts)
        if not steps.all():
            raise ValueError(f"No transition starts at rows {starts[steps == 0].tolist()}.")
        ahead = np.arange(self._num_steps_return)
        rewards = self._rewards[self._slot(starts[:, None] + ahead)].astype(np.float64)
        if self._reward_clip is not None:
            rewards = rewards.clip(-self._reward_clip, self._reward_clip)
        rewards = np.where(ahead < steps[:, None], rewards, 0.0)
        terminated = self._ends[self._slot(starts + steps)] == TERMINATED
        obs, next_obs = self._stacks(starts, steps)
        return Transition(
            obs=obs,
            action=self._actions[self._slot(starts)].astype(self.spec.action_dtype),
            reward=(rewards * self._discount**ahead).sum(1).astype(np.float32),
            discount=np.where(terminated, 0.0, self._discount**steps).astype(np.float32),
            next_obs=next_obs,
        )

    def _draw(self, batch_size: int, generator: np.random.Generator) -> Array:
        drawn = np.empty(0, np.int64)
        for _ in range(8):  # nearly every row is a valid start, except in the smallest of buffers
            if not self._total:
                break
            rows = generator.integers(self._total - self.num_rows, self._total, batch_size)
            drawn = np.concatenate([drawn, rows[self._steps_taken(rows) > 0]])[:batch_size]
            if len(drawn) == batch_size:
                return drawn
        starts = self.valid_starts()
        if not len(starts):
            raise UserError(
                f"The replay holds {self.num_rows} rows and no complete {self._num_steps_return}-step "
                "transition to sample; let the agent act longer before it learns (--learning-starts)."
            )
        return np.concatenate([drawn, generator.choice(starts, batch_size - len(drawn))])

    def _steps_taken(self, starts: Array) -> Array:
        """The number of steps in the return from each row: n, or fewer at an episode's end; 0 if no
        step starts there, or the return is not complete yet."""
        n = self._num_steps_return
        ahead = np.minimum(starts[:, None] + np.arange(1, n + 1), self._total - 1)
        ends = self._ends[self._slot(ahead)] != INSIDE
        ended = ends.any(1)
        complete = ended | (starts + n < self._total)
        steps = np.where(ended, ends.argmax(1) + 1, n)
        return np.where(complete & (self._ends[self._slot(starts)] == INSIDE), steps, 0)

    def _stacks(self, starts: Array, steps: Array) -> tuple[Array, Array]:
        """The observations at the two ends of each return; frames before an episode's first are zeros."""
        stack = self.spec.frame_stack
        width = stack + self._num_steps_return
        window: Array = np.zeros((len(starts), width, self._layout.words), self._layout.word)
        self._frames.read(window, starts - stack + 1, self._first_seen(starts), starts + steps)
        window.flags.writeable = False
        if (steps == self._num_steps_return).all():
            following = window[:, self._num_steps_return :]
        else:
            following = window[np.arange(len(starts))[:, None], steps[:, None] + np.arange(stack)]
        return self._observations(window[:, :stack]), self._observations(following)

    def _first_seen(self, rows: Array) -> Array:
        """The oldest row in the stack at each row: the stack's length back, or the episode's first."""
        behind = rows[:, None] - np.arange(1, self.spec.frame_stack)
        stops = np.ones((len(rows), self.spec.frame_stack), bool)
        stops[:, :-1] = self._ends[self._slot(behind)] != INSIDE
        return rows - stops.argmax(1)

    def _observations(self, stacks: Array) -> Array:
        """Frames as stored, (batch, stack, words), to observations: joined along the last axis."""
        spec = self.spec
        frames = stacks.view(spec.frame_dtype).reshape(*stacks.shape[:2], *spec.frame_shape)
        return np.moveaxis(frames, 1, -2).reshape(len(stacks), *spec.obs_shape)

    def _slot(self, row: Any) -> Any:
        return row % self._layout.ring_rows

    @property
    def _end_of_last_row(self) -> int:
        return int(self._ends[self._slot(self._total - 1)])

    # -- disk

    def save(self, folder: Path) -> Description:
        """Write what is new and describe, in JSON's terms, the files that hold the replay as it is now.

        Names carry the checksum of what is in the file, so no file that an older description names is
        ever written again, even if a run goes back to an older checkpoint and takes another way.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        if self._total:
            oldest_row = max(0, self._total - self._layout.reach_rows)
            last = (self._total - 1) // self._layout.segment_rows  # its newest row is still to be acted from
            live = range(oldest_row // self._layout.segment_rows, last + 1)
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
        return {**self._identity(), "total_rows": self._total, "files": files}

    def restore(self, description: Description, folder: Path) -> None:
        """Fill a new replay with what `save` described; it then goes on as if it had never been saved.

        Raises `DamagedFile` if a file is not what was written; the replay is then of no more use.
        """
        if self._total:
            raise ValueError("Replay.restore fills a new replay; this one has rows.")
        for name, mine in self._identity().items():
            if description.get(name) != mine:
                raise UserError(f"The saved replay's {name} is {description.get(name)}, this run's is {mine}.")
        total, rows = description["total_rows"], self._layout.segment_rows
        for file in description["files"]:
            arrays = safetensors.numpy.load(read_file(folder, file))
            slots = self._slot(np.arange(len(arrays["ends"])) + file["segment"] * rows)
            self._actions[slots] = arrays["actions"]
            self._rewards[slots] = arrays["rewards"]
            self._ends[slots] = arrays["ends"]
            self._frames.restore(file["segment"], arrays)
            if (file["segment"] + 1) * rows < total:
                self._saved[file["segment"]] = file
        self._total = total
        if total:
            newest = np.array([total - 1])
            self._frames.read(self._stack[None], newest - len(self._stack) + 1, self._first_seen(newest), newest)

    def _segment(self, number: int) -> dict[str, Array]:
        first = number * self._layout.segment_rows
        count = min(self._layout.segment_rows, self._total - first)
        here = slice(self._slot(first), self._slot(first) + count)
        columns = {"actions": self._actions[here], "rewards": self._rewards[here], "ends": self._ends[here]}
        return {**columns, **self._frames.segment(number, count)}

    def _identity(self) -> Description:
        """What must be the same for saved rows to be this replay's."""
        return {
            "format": 1,
            "capacity": self.capacity,
            "compress": self._compress,
            "frame_shape": list(self.spec.frame_shape),
            "frame_dtype": self.spec.frame_dtype,
            "frame_stack": self.spec.frame_stack,
            "num_actions": self.spec.num_actions,
        }


@dataclass(frozen=True)
class _Layout:
    """Sizes that follow from a specification and a capacity."""

    frame_bytes: int
    reach_rows: int  # how far back a row can be of use: the capacity, and the stack of the oldest start
    segment_rows: int
    num_segments: int
    word: np.dtype[Any]  # frames are moved and compared as rows of these, whatever their type

    @staticmethod
    def of(spec: EnvSpec, capacity: int) -> _Layout:
        frame_bytes = prod(spec.frame_shape) * np.dtype(spec.frame_dtype).itemsize
        segment_rows = min(MAX_SEGMENT_ROWS, max(1, capacity // 64 // BLOCK_ROWS) * BLOCK_ROWS)
        reach_rows = capacity + spec.frame_stack - 1
        word = next(size for size in (8, 4, 2, 1) if frame_bytes % size == 0)
        return _Layout(
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


class _RawFrames:
    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        self._ring = np.zeros((layout.ring_rows, layout.words), layout.word)

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    def append(self, row: int, frame: Array) -> None:
        self._ring[row % len(self._ring)] = frame

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        """Write rows first[i] to last[i] into window[i], whose place 0 stands for row origin[i]."""
        rows = origin[:, None] + np.arange(window.shape[1])
        wanted = (rows >= first[:, None]) & (rows <= last[:, None])
        window[wanted] = self._ring[rows[wanted] % len(self._ring)]

    def segment(self, number: int, num_rows: int) -> dict[str, Array]:
        first = number * self._layout.segment_rows % len(self._ring)
        return {"frames": self._ring[first : first + num_rows]}

    def restore(self, number: int, arrays: dict[str, Array]) -> None:
        first = number * self._layout.segment_rows % len(self._ring)
        self._ring[first : first + len(arrays["frames"])] = arrays["frames"]


class _CompressedFrames:
    """Blocks of frames, one after the other in a buffer per segment; the unfinished block is kept raw."""

    def __init__(self, layout: _Layout) -> None:
        self._blocks_per_segment = layout.segment_rows // BLOCK_ROWS
        self._num_segments = layout.num_segments
        self._buffers: dict[int, bytes | bytearray] = {}
        self._ends = np.zeros(layout.ring_rows // BLOCK_ROWS, np.uint32)  # of each block, in its buffer
        self._open = np.zeros((BLOCK_ROWS, layout.words), layout.word)
        self._num_closed = 0
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    def nbytes(self) -> int:
        return sum(map(sys.getsizeof, self._buffers.values())) + self._ends.nbytes + self._open.nbytes

    def append(self, row: int, frame: Array) -> None:
        place = row % BLOCK_ROWS
        self._open[place] = frame
        if place == BLOCK_ROWS - 1:
            self._close_block()

    def _close_block(self) -> None:
        number, place = divmod(self._num_closed, self._blocks_per_segment)
        if place == 0:
            self._buffers.pop(number - self._num_segments, None)
        differences = self._open.copy()
        differences[1:] ^= self._open[:-1]
        buffer = self._buffers.setdefault(number, bytearray())
        buffer += self._compressor.compress(differences.tobytes())
        self._ends[self._num_closed % len(self._ends)] = len(buffer)
        # A full buffer is frozen: exactly as large as it must be, and out of the way of those that grow.
        self._buffers[number] = bytes(buffer) if place == self._blocks_per_segment - 1 else buffer
        self._num_closed += 1

    def read(self, window: Array, origin: Array, first: Array, last: Array) -> None:
        """Write rows first[i] to last[i] into window[i], whose place 0 stands for row origin[i]."""
        for places, start, row, end in zip(window, origin.tolist(), first.tolist(), last.tolist(), strict=True):
            while row <= end:
                block, skip = divmod(row, BLOCK_ROWS)
                count = min(BLOCK_ROWS - skip, end - row + 1)
                self._read_block(block, skip, places[row - start : row - start + count])
                row += count

    def _read_block(self, block: int, skip: int, out: Array) -> None:
        if block == self._num_closed:
            out[:] = self._open[skip : skip + len(out)]
            return
        number, place = divmod(block, self._blocks_per_segment)
        slot = block % len(self._ends)
        begin = self._ends[slot - 1] if place else 0
        raw = self._decompressor.decompress(self._buffers[number][begin : self._ends[slot]])
        differences = np.frombuffer(raw, out.dtype).reshape(BLOCK_ROWS, -1)
        frame = np.bitwise_xor.reduce(differences[: skip + 1], axis=0, out=out[0])
        for place, difference in enumerate(differences[skip + 1 : skip + len(out)], start=1):
            frame = np.bitwise_xor(frame, difference, out=out[place])

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


def _action_dtype(spec: EnvSpec) -> np.dtype[Any]:
    return np.dtype(spec.action_dtype) if spec.is_continuous else np.min_scalar_type(spec.num_actions - 1)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
