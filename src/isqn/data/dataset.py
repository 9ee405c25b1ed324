"""Datasets on disk: episodes as rows in immutable, memory-mapped files, with an index that describes them.

A folder holds `index.json` and shards of equally many rows in safetensors. A shard has the columns `actions`, `rewards`
and `ends`, and each frame once; image frames are compressed as in the replay buffer. Columns are read into memory (6
bytes per row if actions are discrete and few). Frames are read from disk when they are sampled, so a dataset may be
larger than memory; a small dataset is decompressed into memory when the first batch is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from isqn.data.files import (
    LOCK,
    DamagedFile,
    Description,
    check_files,
    path_in,
    read_file,
    replace_text,
    sync,
    write_file,
    writing,
)
from isqn.data.frames import BLOCK_ROWS, Layout, RawFrames, StoredFrames, make_frames, map_arrays
from isqn.data.index import FORMAT, INDEX, digest_index, read_index, spec_from_index
from isqn.data.sample import COLUMNS, CONTEXT, ENDED, INSIDE, TERMINATED, TRUNCATED, Rows, action_dtype
from isqn.data.segments import columns_crc, find_problem, read_segment
from isqn.types import EnvSpec, Transition, UserError

Array = NDArray[Any]

SHARD_ROWS, SHARD_BYTES = 2**16, 2**29  # maximum size of a shard, which is held in memory while it is written
UNPACKED_BYTES = 2**28  # datasets whose frames take at most this much are held in memory while they are sampled
ZSTD_LEVEL = 3


class Piece(NamedTuple):
    """Consecutive rows of one episode, maybe preceded by rows of context; the last row is marked as an end."""

    frames: Array
    actions: Array  # action taken at each row; 0 where no step starts
    rewards: Array  # reward of that step; 0 where no step starts
    ends: Array  # role of each row in its episode, see `isqn.data.sample`

    @property
    def num_transitions(self) -> int:
        return int((self.ends == INSIDE).sum())


UNKNOWN_POLICY = "not said"  # in the index of a dataset whose source does not name the policy


@dataclass(frozen=True)
class Provenance:
    """Provenance of a dataset, copied to its index."""

    policy: str  # behaviour policy
    source: str = ""  # format that the dataset was converted from; empty if it was recorded
    subset: str = "all"  # all, first or random-episodes
    fraction: float = 1.0  # requested fraction of the source
    seed: int = 0  # seed of a random subset, or of the recorded episodes
    num_checkpoints: int = 1  # number of parts of the source; the subset is taken of each part


class DatasetWriter:
    """Writer of a dataset. After a crash, the rows of the last `save` are intact and later rows are lost."""

    def __init__(self, folder: Path, spec: EnvSpec, about: Provenance) -> None:
        self.folder, self.spec, self.about = folder, spec, about
        self._layout = Layout.of(spec, 1, shard_rows(spec))
        # Each compressed block has a checksum, so a damaged block is detected when it is sampled.
        settings = {"checksum": True, "level": ZSTD_LEVEL} if spec.is_image else {}
        self._frames = make_frames(self._layout, compress=spec.is_image, **settings)
        self._shard_rows = self._layout.segment_rows
        self._actions = np.zeros((self._shard_rows, *spec.action_shape), action_dtype(spec))
        self._rewards = np.zeros(self._shard_rows, np.float32)
        self._ends = np.zeros(self._shard_rows, np.uint8)
        self._files: list[Description] = []  # finished shards
        self.total = 0  # number of rows

    def add_first(self, frame: Array) -> None:
        """Add the frame after a reset. An unfinished episode before it counts as truncated."""
        last = self._last
        if self.total and not self._ends[last] & ENDED:
            self._ends[last] = TRUNCATED
        self._append(frame, INSIDE)

    def add(self, action: Any, reward: float, terminated: bool, truncated: bool, frame: Array) -> None:
        """Add the step taken from the last frame, and the frame it led to."""
        self._actions[self._last], self._rewards[self._last] = action, reward
        self._append(frame, TERMINATED if terminated else TRUNCATED if truncated else INSIDE)

    def extend(self, piece: Piece) -> None:
        """Add the rows of a piece."""
        words = np.ascontiguousarray(piece.frames).reshape(len(piece.ends), -1).view(self._layout.word)
        done = 0
        while done < len(words):
            slot = self._next_slot()
            rows = slice(done, min(len(words), done + self._shard_rows - slot))
            count = rows.stop - rows.start
            self._frames.extend(self.total, words[rows])
            for column, values in (
                (self._actions, piece.actions),
                (self._rewards, piece.rewards),
                (self._ends, piece.ends),
            ):
                column[slot : slot + count] = values[rows]
            self.total, done = self.total + count, rows.stop

    @property
    def _last(self) -> int:
        """Index of the newest row in its shard."""
        return (self.total - 1) % self._shard_rows

    def _next_slot(self) -> int:
        """Return the index of the next row in its shard, and write the previous shard if it is full."""
        number, slot = divmod(self.total, self._shard_rows)
        if number > len(self._files):  # only now is the action of the shard's last row known
            self._files.append(self._write_shard(number - 1))
        return slot

    def _append(self, frame: Array, end: int) -> None:
        slot = self._next_slot()
        self._frames.append(self.total, np.ascontiguousarray(frame).reshape(-1).view(self._layout.word))
        self._actions[slot], self._rewards[slot], self._ends[slot] = 0, 0, end
        self.total += 1

    def _write_shard(self, number: int) -> Description:
        count = min(self._shard_rows, self.total - number * self._shard_rows)
        columns = {"actions": self._actions[:count], "rewards": self._rewards[:count], "ends": self._ends[:count]}
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        arrays = {**columns, **self._frames.segment(number, count)}
        file = write_file(self.folder, f"rows-{number:06d}", safetensors.numpy.save(arrays))
        return {**file, "rows": count, "columns_crc32": columns_crc(arrays)}

    def save(self, *, tidy: bool = False, **more: Any) -> Description:
        """Write the new rows and the index; return a JSON-serialisable description of all files.

        `more` are additional fields of the index. `tidy` deletes older versions of the last shard, which the checkpoint
        of a run may still need.
        """
        files = list(self._files)
        if self.total > len(files) * self._shard_rows:
            files.append(self._write_shard(len(files)))
        description = {"rows": self.total, "shard_rows": self._shard_rows, "files": files}
        index = {"format": FORMAT, "spec": self.spec.to_json(), **asdict(self.about), **description, **more}
        text = json.dumps({**index, "index_sha256": digest_index(index)}, indent=1)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.folder / INDEX, text + "\n")
            sync(self.folder)
        if tidy:
            named = {file["name"] for file in files}
            for path in [path for path in self.folder.glob("rows-*") if path.name not in named]:
                path.unlink()
        return description

    def resume(self, **same: Any) -> Description:
        """Resume an interrupted dataset in the folder; return its index, or {} if there is none yet.

        The index must agree with the spec, the provenance and the fields `same`; a different dataset is refused.
        """
        check_output_folder(self.folder)
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if INDEX not in names:
            if not all(name.startswith(("rows-", f".{INDEX}", LOCK)) for name in names):
                raise UserError(f"{self.folder} is not empty and not a dataset; give --out another folder.")
            return {}
        index = read_index(self.folder)
        expected = {**asdict(self.about), "spec": self.spec.to_json(), **same}
        if any(index.get(name) != value for name, value in expected.items()):
            other = ", ".join(name for name, value in expected.items() if index.get(name) != value)
            raise UserError(
                f"{self.folder} holds another dataset, which differs in {other}; give --out another folder, or delete "
                "it."
            )
        try:
            self.restore(index)
        except DamagedFile as error:
            raise UserError(f"{error} Delete {self.folder} and start again.") from None
        return index

    def restore(self, description: Description) -> None:
        """Load the state that `save` described; raises `DamagedFile` if a file differs from what was written."""
        total, rows = description.get("rows"), self._shard_rows
        files = check_files(description, self.folder)
        if type(total) is not int or total < 0 or len(files) != -(-total // rows):
            raise DamagedFile(f"{self.folder} has {total!r} rows in {len(files)} files of {rows:,}.")
        self.total = total
        if not self.total:
            return
        *self._files, last = files  # the last shard may be full, but lack its last action
        count = total - len(self._files) * rows
        arrays = read_segment(self.folder, last, self.spec, count, rows, is_compressed=self.spec.is_image)
        for name, column in (("actions", self._actions), ("rewards", self._rewards), ("ends", self._ends)):
            column[: len(arrays[name])] = arrays[name]
        self._frames.restore(len(self._files), arrays)


class Dataset:
    """Read-only dataset that is sampled like a replay buffer."""

    def __init__(self, folder: Path, index: Description, rows: Rows) -> None:
        self.folder, self.index, self.rows, self.spec = folder, index, rows, rows.spec
        self.digest = digest_index(index)  # identifies the content: the index has the checksum of every file

    @staticmethod
    def open(
        folder: Path, *, num_steps_return: int = 1, discount: float = 0.99, reward_clip: float | None = None
    ) -> Dataset:
        """Open the dataset in a folder; the settings are those of sampled n-step returns."""
        index = read_index(folder)
        spec = spec_from_index(index)
        if not index["files"]:
            raise UserError(f"{folder} holds no rows yet.")
        try:
            paths = [path_in(folder, file["name"]) for file in index["files"]]
        except DamagedFile as error:
            raise UserError(f"{error} Make the dataset again.") from None
        shards = [_open_shard(path, file) for path, file in zip(paths, index["files"], strict=True)]
        for path, file, shard in zip(paths, index["files"], shards, strict=True):
            expected = index["shard_rows"] if path != paths[-1] else file["rows"]
            if problem := find_problem(shard, spec, expected, index["shard_rows"], is_compressed=spec.is_image):
                raise UserError(f"{path} is damaged: {problem}. Make the dataset again.")
        actions, rewards, ends = (np.concatenate([shard[name] for shard in shards]) for name in COLUMNS)
        if not ends[-1] & ENDED:
            ends[-1] = TRUNCATED  # what came after this row is not known
        rows = Rows(
            spec,
            Layout.of(spec, 1, index["shard_rows"]),
            len(ends),
            StoredFrames(paths, shards, index["shard_rows"]),
            actions,
            rewards,
            ends,
            num_steps_return=num_steps_return,
            discount=discount,
            reward_clip=reward_clip,
            total=len(ends),
        )
        dataset = Dataset(folder, index, rows)
        if not dataset.num_transitions:
            raise UserError(f"{folder} holds no transition: no step starts at any of its {len(ends)} rows.")
        return dataset

    def require_complete(self) -> None:
        """Refuse a dataset that is still being written, because its content would change."""
        if not self.index.get("complete", True):
            raise UserError(f"{self.folder} is not complete; run the command that made it again.")

    @property
    def num_transitions(self) -> int:
        return int((self.rows.ends == INSIDE).sum())

    def episodes(self) -> tuple[Array, Array]:
        """Return the first and the last row of each episode."""
        last = np.flatnonzero(self.rows.ends & ENDED)
        return np.concatenate([[0], last[:-1] + 1]), last

    def provenance(self) -> Description:
        """Return the provenance that a run records, JSON-serialisable."""
        names = ("policy", "source", "subset", "fraction", "seed", "num_checkpoints", "rows")
        return {name: self.index[name] for name in names} | {"digest": self.digest}

    def describe(self) -> str:
        """Return one line for the user: size, environment and behaviour policy."""
        part = "" if self.index["subset"] == "all" else f" ({self.index['subset']}, {self.index['fraction']:.3g})"
        return f"{self.num_transitions:,} transitions of {self.spec.id} by {self.index['policy']}{part}"

    def sample(self, batch_size: int, generator: np.random.Generator) -> Transition:
        """Sample a batch uniformly, with replacement; the first call loads a small dataset into memory."""
        if isinstance(self.rows.frames, StoredFrames) and in_memory_bytes(self.spec, self.rows.total):
            frames = RawFrames(Layout.of(self.spec, self.rows.total))
            frames.extend(0, self._words(0, self.rows.total))
            self.rows.frames = frames
        return self.rows.sample(batch_size, generator)

    def pieces(self, since: int = 0, until: int | None = None) -> Iterator[Piece]:
        """Yield the steps that start in rows `since` to `until` (excluded), one piece per episode.

        If a piece starts inside an episode, the rows that its first frame stack needs come first, as context.
        """
        until = self.rows.total if until is None else until
        for first, last in zip(*map(np.ndarray.tolist, self.episodes()), strict=True):
            start, end = max(first, since), min(last, until)  # rows of the first step and of the last next frame
            if not (self.rows.ends[start:end] == INSIDE).any():
                continue
            rows = slice(max(first, start - self.spec.frame_stack + 1), end + 1)
            columns = (self.rows.actions, self.rows.rewards, self.rows.ends)
            piece = Piece(self.frames(rows.start, rows.stop), *(column[rows].copy() for column in columns))
            piece.ends[: start - rows.start] = CONTEXT
            if end < last:
                piece.ends[-1] = TRUNCATED
            for column in (piece.actions, piece.rewards):
                column[piece.ends != INSIDE] = 0
            yield piece

    def frames(self, first: int, end: int) -> Array:
        """Return the frames of rows `first` to `end` (excluded)."""
        return self._words(first, end).view(self.spec.frame_dtype).reshape(-1, *self.spec.frame_shape)

    def _words(self, first: int, end: int) -> Array:
        layout = self.rows.layout
        window: Array = np.zeros((1, end - first, layout.words), layout.word)
        self.rows.frames.read(window, np.array([first]), np.array([first]), np.array([end - 1]))
        return window[0]


def damaged_files(folder: Path) -> Iterator[str]:
    """Read all files and yield a sentence for each that differs from what was written."""
    for file in read_index(folder)["files"]:
        try:
            read_file(folder, file)
        except DamagedFile as error:
            yield str(error)


def check_output_folder(folder: Path) -> None:
    """Refuse to write a dataset to a file, or inside another dataset."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out a folder.")
    for outer in folder.resolve().parents:
        if (outer / INDEX).is_file() and any(outer.glob("rows-*")):
            raise UserError(f"{folder} lies in the dataset {outer}; give --out another folder.")


def in_memory_bytes(spec: EnvSpec, rows: int) -> int:
    """Return the size of the frames if they are held in memory while training, or 0 if they are read from disk.

    Small datasets are held in memory because decompressing a batch takes longer than an update of a small network.
    """
    size = rows * Layout.of(spec, 1).frame_bytes
    return size if size <= UNPACKED_BYTES else 0


def shard_rows(spec: EnvSpec) -> int:
    """Return the number of rows in a shard: as many whole blocks as fit."""
    fit = SHARD_BYTES // Layout.of(spec, 1).frame_bytes // BLOCK_ROWS * BLOCK_ROWS
    return min(SHARD_ROWS, max(BLOCK_ROWS, fit))


def _open_shard(path: Path, file: Description) -> dict[str, Array]:
    """Map a shard into memory, and verify its size and the checksum of its columns."""
    size = path.stat().st_size if path.is_file() else None
    if size != file["bytes"]:
        problem = "is missing" if size is None else f"has {size:,} bytes and was written with {file['bytes']:,}"
        raise UserError(f"{path} {problem}; copy or make the dataset again.")
    try:
        arrays = map_arrays(path)
        if columns_crc(arrays) != file["columns_crc32"]:
            raise DamagedFile(f"{path} is damaged: the checksum of its columns differs.")
        return arrays
    except (DamagedFile, KeyError) as error:
        raise UserError(f"{error} Copy or make the dataset again.") from None
