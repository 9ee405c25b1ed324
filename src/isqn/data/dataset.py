"""Datasets: rows of episodes in files that never change, mapped into memory, and an index that says what they are.

A folder holds `index.json` and shards of as many rows each, in safetensors: the columns `actions`, `rewards` and
`ends`, and the frames, each once, those of images compressed as the replay's. Columns are read into memory, 6 bytes a
row where actions are few; frames stay on disk until they are drawn, so that a dataset may be larger than memory, or
are unpacked into memory at the first draw if they are few.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from isqn.data.files import DamagedFile, Description, read_file, replace_text, sync, write_file
from isqn.data.frames import BLOCK_ROWS, Layout, RawFrames, StoredFrames, make_frames, map_arrays
from isqn.data.sample import COLUMNS, CONTEXT, ENDED, INSIDE, TERMINATED, TRUNCATED, Rows, action_dtype
from isqn.types import EnvSpec, Transition, UserError

Array = NDArray[Any]

FORMAT = 1
INDEX = "index.json"
MINARI = ("metadata.json", "data/metadata.json")
SHARD_ROWS, SHARD_BYTES = 2**16, 2**29  # at most; a shard is in memory while it is written
UNPACKED_BYTES = 2**28  # frames that take less are kept in memory as they are, once they are drawn from
ZSTD_LEVEL = 3


class Piece(NamedTuple):
    """Consecutive rows of one episode, of which the last has ended. Rows of context may come first."""

    frames: Array
    actions: Array  # taken from a row; 0 where no step starts
    rewards: Array
    ends: Array

    @property
    def num_transitions(self) -> int:
        return int((self.ends == INSIDE).sum())


@dataclass(frozen=True)
class About:
    """Where rows are from; written to the index as it is."""

    policy: str  # who played
    source: str = ""  # what they were converted from
    subset: str = "all"  # all, first or random-episodes
    fraction: float = 1.0  # of the source, as it was asked for
    seed: int = 0  # of a random subset, or of the games that were played for it
    num_checkpoints: int = 1  # parts of the source, of each of which a subset was taken


class Writer:
    """Adds rows to a dataset. What was saved is whole after any kill; what came later is lost."""

    def __init__(self, folder: Path, spec: EnvSpec, about: About) -> None:
        self.folder, self.spec, self.about = folder, spec, about
        self._layout = Layout.of(spec, 1, shard_rows(spec))
        # checksums of blocks find a damaged one when it is drawn
        settings = {"checksum": True, "level": ZSTD_LEVEL} if spec.is_image else {}
        self._frames = make_frames(self._layout, compress=spec.is_image, **settings)
        self._shard_rows = self._layout.segment_rows
        self._actions = np.zeros((self._shard_rows, *spec.action_shape), action_dtype(spec))
        self._rewards = np.zeros(self._shard_rows, np.float32)
        self._ends = np.zeros(self._shard_rows, np.uint8)
        self._files: list[Description] = []  # finished shards
        self.total = 0  # rows

    def add_first(self, frame: Array) -> None:
        """The frame after a reset. An episode left unfinished before it counts as truncated."""
        last = self._last
        if self.total and not self._ends[last] & ENDED:
            self._ends[last] = TRUNCATED
        self._append(frame, INSIDE)

    def add(self, action: Any, reward: float, terminated: bool, truncated: bool, frame: Array) -> None:
        """The step taken from the last frame, and the frame it led to."""
        self._actions[self._last], self._rewards[self._last] = action, reward
        self._append(frame, TERMINATED if terminated else TRUNCATED if truncated else INSIDE)

    def extend(self, piece: Piece) -> None:
        """Rows that are complete."""
        words = np.ascontiguousarray(piece.frames).reshape(len(piece.ends), -1).view(self._layout.word)
        done = 0
        while done < len(words):
            place = self._begin_row()
            rows = slice(done, min(len(words), done + self._shard_rows - place))
            count = rows.stop - rows.start
            self._frames.extend(self.total, words[rows])
            for column, values in (
                (self._actions, piece.actions),
                (self._rewards, piece.rewards),
                (self._ends, piece.ends),
            ):
                column[place : place + count] = values[rows]
            self.total, done = self.total + count, rows.stop

    @property
    def _last(self) -> int:
        return (self.total - 1) % self._shard_rows

    def _begin_row(self) -> int:
        """Its place in its shard; the one before is written if it is full."""
        number, place = divmod(self.total, self._shard_rows)
        if number > len(self._files):  # only now is the action of its last row known
            self._files.append(self._write_shard(number - 1))
        return place

    def _append(self, frame: Array, end: int) -> None:
        place = self._begin_row()
        self._frames.append(self.total, np.ascontiguousarray(frame).reshape(-1).view(self._layout.word))
        self._actions[place], self._rewards[place], self._ends[place] = 0, 0, end
        self.total += 1

    def _write_shard(self, number: int) -> Description:
        count = min(self._shard_rows, self.total - number * self._shard_rows)
        columns = {"actions": self._actions[:count], "rewards": self._rewards[:count], "ends": self._ends[:count]}
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = {**columns, **self._frames.segment(number, count)}
        file = write_file(self.folder, f"rows-{number:06d}", safetensors.numpy.save(arrays))
        return {**file, "rows": count, "columns_crc32": _columns_crc(arrays)}

    def save(self, *, tidy: bool = False, **more: Any) -> Description:
        """Write what is new, and the index; describe, in JSON's terms, the files that hold the rows as they are.

        `tidy` deletes what is not in it any more: older states of the last shard, which a checkpoint may still need.
        """
        files = list(self._files)
        if self.total > len(files) * self._shard_rows:
            files.append(self._write_shard(len(files)))
        described = {"rows": self.total, "shard_rows": self._shard_rows, "files": files}
        index = {"format": FORMAT, "spec": self.described_spec, **asdict(self.about), **described, **more}
        text = json.dumps({**index, "index_sha256": _digest(index)}, indent=1)
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.folder / INDEX, text + "\n")
        sync(self.folder)
        if tidy:
            named = {file["name"] for file in files}
            for path in [path for path in self.folder.glob("rows-*") if path.name not in named]:
                path.unlink()
        return described

    def go_on(self, **same: Any) -> Description:
        """With what the same work has left: what its index says, {} if there is none yet. `same` are fields that must
        not have changed."""
        require_place(self.folder)
        left = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if INDEX not in left:
            if not all(name.startswith(("rows-", f".{INDEX}")) for name in left):
                raise UserError(f"{self.folder} is not empty and no dataset; give --out another folder.")
            return {}
        index = read_index(self.folder)
        mine = {**asdict(self.about), "spec": self.described_spec, **same}
        if any(index.get(name) != value for name, value in mine.items()):
            other = ", ".join(name for name, value in mine.items() if index.get(name) != value)
            raise UserError(
                f"{self.folder} holds another dataset, which differs in {other}; give --out another folder, or delete "
                "it."
            )
        try:
            self.restore(index)
        except DamagedFile as error:
            raise UserError(f"{error} Delete {self.folder}, and begin again.") from None
        return index

    @property
    def described_spec(self) -> Description:
        """In JSON's terms."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.spec).items()}

    def restore(self, described: Description) -> None:
        """Go on from what `save` described. Raises `DamagedFile` if a file is not what was written."""
        self.total = described["rows"]
        if not self.total:
            return
        *self._files, last = described["files"]  # the last may be full, but its last action still to come
        arrays = safetensors.numpy.load(read_file(self.folder, last))
        for name, column in (("actions", self._actions), ("rewards", self._rewards), ("ends", self._ends)):
            column[: len(arrays[name])] = arrays[name]
        self._frames.restore(len(self._files), arrays)


class Dataset:
    """Rows that were written: read-only, drawn from as a replay is."""

    def __init__(self, folder: Path, index: Description, rows: Rows) -> None:
        self.folder, self.index, self.rows, self.spec = folder, index, rows, rows.spec
        self.digest = _digest(index)  # of what is in it, file by file

    @staticmethod
    def open(
        folder: Path, *, num_steps_return: int = 1, discount: float = 0.99, reward_clip: float | None = None
    ) -> Dataset:
        index = read_index(folder)
        spec = spec_of(index)
        if not index["files"]:
            raise UserError(f"{folder} holds no rows yet.")
        paths = [folder / file["name"] for file in index["files"]]
        shards = [_open_shard(path, file) for path, file in zip(paths, index["files"], strict=True)]
        actions, rewards, ends = (np.concatenate([shard[name] for shard in shards]) for name in COLUMNS)
        if not ends[-1] & ENDED:
            ends[-1] = TRUNCATED  # nothing is known of what came after it
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
            raise UserError(f"{folder} holds no transition: {len(ends)} rows, in none of which a step starts.")
        return dataset

    def require_complete(self) -> None:
        """What is still being made would be another dataset when it is."""
        if not self.index.get("complete", True):
            raise UserError(f"{self.folder} is not complete; the command that made it goes on with it.")

    @property
    def num_transitions(self) -> int:
        return int((self.rows.ends == INSIDE).sum())

    def episodes(self) -> tuple[Array, Array]:
        """The first and the last row of each."""
        last = np.flatnonzero(self.rows.ends & ENDED)
        return np.concatenate([[0], last[:-1] + 1]), last

    def origin(self) -> Description:
        """What a run should remember of it, in JSON's terms."""
        told = ("policy", "source", "subset", "fraction", "seed", "num_checkpoints", "rows")
        return {name: self.index[name] for name in told} | {"digest": self.digest}

    def describe(self) -> str:
        part = "" if self.index["subset"] == "all" else f" ({self.index['subset']}, {self.index['fraction']:.3g})"
        return f"{self.num_transitions:,} transitions of {self.spec.id} by {self.index['policy']}{part}"

    def sample(self, batch_size: int, generator: np.random.Generator) -> Transition:
        if isinstance(self.rows.frames, StoredFrames) and unpacked_bytes(self.spec, self.rows.total):
            frames = RawFrames(Layout.of(self.spec, self.rows.total))
            frames.extend(0, self._words(0, self.rows.total))
            self.rows.frames = frames
        return self.rows.sample(batch_size, generator)

    def pieces(self, since: int = 0, until: int | None = None) -> Iterator[Piece]:
        """The steps that start in these rows, episode by episode. What lies before them is context."""
        until = self.rows.total if until is None else until
        for first, last in zip(*map(np.ndarray.tolist, self.episodes()), strict=True):
            start, end = (
                max(first, since),
                min(last, until),
            )  # the row of the first step, and that which the last leads to
            if not (self.rows.ends[start:end] == INSIDE).any():
                continue
            here = slice(max(first, start - self.spec.frame_stack + 1), end + 1)
            columns = (self.rows.actions, self.rows.rewards, self.rows.ends)
            piece = Piece(self.frames(here.start, here.stop), *(column[here].copy() for column in columns))
            piece.ends[: start - here.start] = CONTEXT
            if end < last:
                piece.ends[-1] = TRUNCATED
            for column in (piece.actions, piece.rewards):
                column[piece.ends != INSIDE] = 0
            yield piece

    def frames(self, first: int, end: int) -> Array:
        """Those of some rows."""
        return self._words(first, end).view(self.spec.frame_dtype).reshape(-1, *self.spec.frame_shape)

    def _words(self, first: int, end: int) -> Array:
        layout = self.rows.layout
        window: Array = np.zeros((1, end - first, layout.words), layout.word)
        self.rows.frames.read(window, np.array([first]), np.array([first]), np.array([end - 1]))
        return window[0]


def damaged_files(folder: Path) -> Iterator[str]:
    """Those that are not what was written; reads all of them."""
    for file in read_index(folder)["files"]:
        try:
            read_file(folder, file)
        except DamagedFile as error:
            yield str(error)


def require_place(folder: Path) -> None:
    """Where a dataset may be written: a folder, and none of another dataset's."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give --out a folder.")
    for outer in folder.resolve().parents:
        if (outer / INDEX).is_file() and any(outer.glob("rows-*")):
            raise UserError(f"{folder} lies in the dataset {outer}; give --out another folder.")


def read_index(folder: Path) -> Description:
    """Of a dataset that is there, or a sentence."""
    path = folder / INDEX
    if not path.is_file():
        what = f"there is no {INDEX} in it" if folder.is_dir() else "there is no such folder"
        hint = (
            "`isqn data collect` and `isqn data convert` make datasets, and `isqn train dqn --record-dataset` does "
            "while it learns."
        )
        if (folder / "dataset" / INDEX).is_file():
            hint = f"it is a run, whose dataset is {folder / 'dataset'}."
        elif (folder / "config.toml").is_file():
            hint = f"it is a run, of which `isqn data collect {folder} -o DIR` makes one."
        elif any((folder / name).is_file() for name in MINARI):
            hint = f"it is one of Minari, of which `isqn data convert {folder} -o DIR` makes one."
        raise UserError(f"{folder} is not a dataset: {what}; {hint}")
    try:
        index = json.loads(path.read_text())
        if index.pop("index_sha256") != _digest(index):
            raise ValueError
        if index["format"] != FORMAT:
            raise UserError(f"{path} has format {index['format']}; this version reads format {FORMAT}.")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged: it is not what was written; make the dataset again.") from None
    return index


def unpacked_bytes(spec: EnvSpec, rows: int) -> int:
    """What frames take in memory while they are learned from; 0: they stay on disk. An update of a small network takes
    less time than to unpack its batch."""
    size = rows * Layout.of(spec, 1).frame_bytes
    return size if size <= UNPACKED_BYTES else 0


def shard_rows(spec: EnvSpec) -> int:
    """As many as fit, in whole blocks."""
    fit = SHARD_BYTES // Layout.of(spec, 1).frame_bytes // BLOCK_ROWS * BLOCK_ROWS
    return min(SHARD_ROWS, max(BLOCK_ROWS, fit))


def spec_of(index: Description) -> EnvSpec:
    fields: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in index["spec"].items()}
    return EnvSpec(**fields)


def _open_shard(path: Path, file: Description) -> dict[str, Array]:
    size = path.stat().st_size if path.is_file() else None
    if size != file["bytes"]:
        found = "is missing" if size is None else f"has {size:,} bytes and was written with {file['bytes']:,}"
        raise UserError(f"{path} {found}; copy the dataset again, or make it anew.")
    try:
        arrays = map_arrays(path)
        if _columns_crc(arrays) != file["columns_crc32"]:
            raise DamagedFile(f"{path} is damaged: the checksum of its columns differs.")
        return arrays
    except (DamagedFile, KeyError) as error:
        raise UserError(f"{error} Copy the dataset again, or make it anew.") from None


def _columns_crc(arrays: dict[str, Array]) -> int:
    """Of all but frames that are compressed, whose blocks have checksums of their own."""
    checksum = 0
    for name in (*COLUMNS, *(("block_ends", "open_frames") if "block_ends" in arrays else ("frames",))):
        checksum = crc32(np.ascontiguousarray(arrays[name]).data.cast("B") if arrays[name].size else b"", checksum)
    return checksum


def _digest(index: Description) -> str:
    return sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
