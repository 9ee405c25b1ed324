"""Readers of other dataset formats; each source is a list of parts, and each part yields pieces of episodes.

Frames are streamed; only columns of numbers are loaded whole. If a frame is missing, because a log continues elsewhere
or was cut, the step that leads to it is left out. Rows with an incomplete frame stack are context: no step starts at
them.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isqn.data.dataset import Dataset, Piece
from isqn.data.npy import NpyStream, read_column
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.data.tfrecord import Example, read_examples
from isqn.types import EnvSpec, UserError

Array = NDArray[Any]

CHECKPOINT_STEPS = 1_000_000  # steps in a checkpoint of the DQN replay dataset (Agarwal et al. 2020)
MAX_PIECE_ROWS = 30_000  # longer episodes are split into several pieces; sampled 1-step transitions are the same
CHUNK_ROWS = 1_024  # frames that are read at a time


class Part(NamedTuple):
    """Part of a source that is converted as a whole, such as one file or one checkpoint."""

    name: str
    checkpoint: int  # number of its checkpoint; a subset is taken of each checkpoint
    size: int  # number of transitions in the checkpoint, as far as it is known before reading
    pieces: Callable[[], Iterator[Piece]]


class Source(NamedTuple):
    """Data to convert: its format, its behaviour policy and its parts."""

    kind: str
    policy: str
    parts: list[Part]
    identity: str  # digest of its files; a conversion is only resumed from the same files


def digest_files(files: Iterable[Path]) -> str:
    """Return a digest of the names and sizes of files; reading their content would take as long as converting them."""
    sizes = sorted((path.name, path.stat().st_size) for path in files if path.is_file())
    return sha256(json.dumps(sizes).encode()).hexdigest()


# -- the DQN replay dataset: logs of Dopamine, and copies of them by d4rl-atari

STORE = "$store$_{}_ckpt.{}.gz"
DQN = "DQN of Dopamine, while it learned"  # in the index of datasets, so it must not change
COLUMN_FILES = ("observation", "action", "reward", "terminal")
EPISODE_ENDS = "episode_end_indices"  # a pickle of Dopamine since April 2022; it is never read


def dopamine(folder: Path, spec: EnvSpec) -> Source:
    """Return the Dopamine logs in a folder: files `$store$_observation_ckpt.N.gz` etc., with checkpoint number N."""
    matches = [re.fullmatch(r"\$store\$_observation_ckpt\.(\d+)\.gz", path.name) for path in folder.iterdir()]
    numbers = sorted(int(match[1]) for match in matches if match)

    def files(number: int) -> dict[str, Path]:
        columns = {name: folder / STORE.format(name, number) for name in COLUMN_FILES}
        return columns | {name: folder / f"{name}_ckpt.{number}.gz" for name in ("add_count", EPISODE_ENDS)}

    parts = [_log_part(files(n), n, spec) for n in numbers]
    return Source("dqn-replay", DQN, parts, digest_files(folder.iterdir()))


def d4rl_atari(folder: Path, spec: EnvSpec) -> Source:
    """Return the logs in a folder of d4rl-atari: files `N/observation.gz` etc., with checkpoint number N."""
    numbers = sorted(int(path.parent.name) for path in folder.glob("*/observation.gz") if path.parent.name.isdigit())

    def files(number: int) -> dict[str, Path]:
        return {name: folder / str(number) / f"{name}.gz" for name in COLUMN_FILES}

    parts = [_log_part(files(n), n, spec) for n in numbers]
    return Source("d4rl-atari", DQN, parts, digest_files(folder.glob("*/*.gz")))


def _log_part(files: dict[str, Path], number: int, spec: EnvSpec) -> Part:
    return Part(f"checkpoint {number}", number, CHECKPOINT_STEPS, lambda: _log_pieces(files, spec))


def _log_pieces(files: dict[str, Path], spec: EnvSpec) -> Iterator[Piece]:
    """Yield the episodes of a log: a ring buffer of rows (observation, action, reward, terminal).

    The next observation is that of the next row. In a full ring buffer, the newest row precedes the oldest one. Rows
    that were never written hold arbitrary values, which are not checked. Dopamine puts padding rows of zeros, one fewer
    than the frame stack, before each episode. Only the versions that write `episode_end_indices` also put them after a
    truncated episode, so only there they mark truncation.
    """
    for name in COLUMN_FILES:
        if not files[name].is_file():
            raise UserError(f"{files[name]} is missing; a checkpoint needs observation, action, reward and terminal.")
    actions, rewards, terminals = (read_column(files[name]) for name in ("action", "reward", "terminal"))
    stream = NpyStream(files["observation"])
    size = stream.shape[0]
    if stream.dtype != np.uint8 or stream.shape[1:] != spec.frame_shape[:2]:
        raise UserError(
            f"{stream.path} holds {stream.dtype} of shape {stream.shape}; frames of {spec.id} are uint8 "
            f"{spec.frame_shape[:2]}."
        )
    for name, column in (("action", actions), ("reward", rewards), ("terminal", terminals)):
        if len(column) != size:
            raise UserError(f"{files[name]} has {len(column):,} rows and {stream.path.name} {size:,}.")
    added = size
    if "add_count" in files and files["add_count"].is_file():
        added = _read_count(files["add_count"])
    used = min(added, size)  # later rows are empty, or belong to the previous checkpoint
    actions, rewards, terminals = actions[:used], rewards[:used], terminals[:used]
    if actions.dtype.kind not in "iu":
        raise UserError(f"{files['action']} holds {actions.dtype}; actions are whole numbers.")
    if not np.isin(terminals, (0, 1)).all():
        raise UserError(f"{files['terminal']} has {terminals.min()} to {terminals.max()}; it must be 0 or 1.")
    if used and not (actions.min() >= 0 and actions.max() < spec.num_actions):
        raise UserError(
            f"{files['action']} has actions from {actions.min()} to {actions.max()}; {spec.id} has {spec.num_actions}."
        )
    breaks = {0, added % size if used else 0, used}  # rows that do not follow the row before them
    follows_end = np.flatnonzero(terminals) + 1
    if EPISODE_ENDS in files and files[EPISODE_ENDS].is_file():
        is_zero = _find_blank_frames(files["observation"], used) & (actions == 0) & (rewards == 0) & (terminals == 0)
        follows_end = np.union1d(follows_end, _find_padding(is_zero, sorted(breaks), spec.frame_stack - 1))
    bounds = sorted(breaks | set(follows_end.tolist()))
    episode_starts = set(follows_end.tolist()) - breaks
    chunks, buffer = stream.rows(CHUNK_ROWS), np.empty((0, *spec.frame_shape[:2]), np.uint8)

    stack = spec.frame_stack
    for first, end in itertools.pairwise(bounds):
        start, context = first, 0 if first in episode_starts else stack - 1
        while start < end:
            stop = min(end, start + MAX_PIECE_ROWS)
            while len(buffer) < stop - start:
                buffer = np.concatenate([buffer, next(chunks)])
            frames, buffer = buffer[: stop - start], buffer[stop - start :]
            columns = [frames, actions[start:stop], rewards[start:stop]]
            has_padding = start == first and not any(x[: stack - 1].any() for x in columns)
            if has_padding:
                columns, context = [x[stack - 1 :] for x in columns], 0
            yield from _make_piece(*columns, terminal=bool(terminals[stop - 1]), context=context)
            if stop == end:
                break
            # The next piece repeats `stack` rows: its context, and the row at which its first step starts.
            buffer, start, context = np.concatenate([frames[-stack:], buffer]), stop - stack, stack - 1
    for _ in chunks:  # read to the end, to detect a damaged file
        pass
    stream.close()


def _find_blank_frames(path: Path, rows: int) -> Array:
    """Return which of the first rows are zeros; the file is read twice, because it may be larger than memory."""
    stream = NpyStream(path)
    blank = [~chunk.any(axis=(1, 2)) for chunk in stream.rows(CHUNK_ROWS)]
    stream.close()
    return np.concatenate([np.empty(0, bool), *blank])[:rows]


def _find_padding(is_zero: Array, breaks: list[int], count: int) -> Array:
    """Return the first rows of all runs of at least `count` rows of zeros; a break may cut a run short."""
    starts = []
    for first, end in itertools.pairwise(breaks):
        edges = np.flatnonzero(np.diff(is_zero[first:end].astype(np.int8), prepend=0, append=0)) + first
        starts += [start for start, stop in edges.reshape(-1, 2).tolist() if stop - start >= count or stop == end]
    return np.array(starts, np.int64)


def _make_piece(frames: Array, actions: Array, rewards: Array, *, terminal: bool, context: int = 0) -> Iterator[Piece]:
    """Yield a piece (or none) from rows without a final next observation.

    After a terminal step the next observation does not matter, so the last frame is repeated. Otherwise the last step
    is left out, because a target would bootstrap from the missing observation.
    """
    ends = np.full(len(frames), INSIDE, np.uint8)
    ends[:context] = CONTEXT
    if terminal:
        frames, actions, rewards = (np.concatenate([x, x[-1:]]) for x in (frames, actions, rewards))
        ends = np.append(ends, np.uint8(TERMINATED))
    elif len(ends):
        ends[-1] = TRUNCATED
    starts = ends == INSIDE
    if starts.any():
        yield Piece(frames[..., None], np.where(starts, actions, 0), np.where(starts, rewards, 0), ends)


def _read_count(path: Path) -> int:
    """Read a number of rows: an npy array without axes."""
    try:
        with gzip.open(path, "rb") as file:
            content = io.BytesIO(file.read(4_096))
        if np.lib.format.read_magic(content) != (1, 0) or np.lib.format.read_array_header_1_0(content)[0]:
            raise ValueError("it does not hold a number of rows")  # an array of any size could be claimed
        content.seek(0)
        count = np.load(content)  # np.load refuses pickles by default
        if count.dtype.kind not in "iu" or count < 0:
            raise ValueError(f"it holds {count.tolist()}, not a number of rows")
        return int(count)
    except Exception as error:
        raise UserError(f"{path} is damaged: {error}.") from error


# -- RL Unplugged (Gulcehre et al. 2020)


def rl_unplugged(folder: Path, spec: EnvSpec, run: int) -> Source:
    """Return the files `run_R-NNNNN-of-MMMMM` of a run: single transitions, or ordered episodes."""
    shards = {
        int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(rf"run_{run}-(\d+)-of-\d+", path.name))
    }
    first = next(read_examples(next(iter(shards.values()))), {}) if shards else {}
    is_ordered = "observations" in first
    read = _read_episode if is_ordered else _read_transition
    kind = "rl-unplugged, ordered episodes" if is_ordered else "rl-unplugged, transitions"

    def part(number: int, path: Path) -> Part:
        def pieces() -> Iterator[Piece]:
            for index, example in enumerate(read_examples(path)):
                try:
                    pieces = [*read(example, spec)]
                except (KeyError, ValueError, TypeError, IndexError) as error:
                    raise UserError(f"{path}: example {index} is not {kind}: {reason(error)}.") from error
                yield from pieces

        return Part(path.name, number, CHECKPOINT_STEPS if is_ordered else CHECKPOINT_STEPS // 2, pieces)

    return Source(kind, DQN, [part(*item) for item in sorted(shards.items())], digest_files(shards.values()))


def reason(error: Exception) -> str:
    """Return what an error says of an example."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _read_episode(example: Example, spec: EnvSpec) -> Iterator[Piece]:
    """Yield an ordered episode: L steps with L observations, terminated if the last discount is 0.

    Its last row is a step, not the terminal state: the published episodes end as many equal frames after the last
    change as the game shows before its terminal frame (docs/files.md).
    """
    actions, rewards, discounts = (np.asarray(example[name]) for name in ("actions", "clipped_rewards", "discounts"))
    terminal = bool((discounts[-1:] == 0).any())
    yield from episode_piece(example["observations"], actions, rewards, discounts, terminal, spec)


def episode_piece(
    images: Any, actions: Array, rewards: Array, marks: Array, terminal: bool, spec: EnvSpec
) -> Iterator[Piece]:
    """Yield an episode (or none) from PNG frames and columns of the same length; `marks` tell where it ends."""
    lengths = {len(images), len(actions), len(rewards), len(marks)}
    if len(lengths) > 1:
        raise ValueError(f"its columns have lengths {sorted(lengths)}")
    if len(images):
        frames = np.stack([_decode_png(image, spec) for image in images])
        yield from _make_piece(frames, _check_actions(actions, spec), rewards, terminal=terminal)


def _read_transition(example: Example, spec: EnvSpec) -> Iterator[Piece]:
    """Yield a single transition: two frame stacks that differ by one frame."""
    before, after = example["o_t"], example["o_tp1"]
    if len(before) != spec.frame_stack or len(after) != spec.frame_stack:
        raise ValueError(f"stacks have {len(before)} and {len(after)} frames, not {spec.frame_stack}")
    frames = np.stack([_decode_png(image, spec) for image in (*before, after[-1])])
    context = [CONTEXT] * (spec.frame_stack - 1)
    terminal = float(np.asarray(example["d_t"])[0]) == 0
    action = _check_actions(np.asarray(example["a_t"])[:1], spec)[0]
    actions, rewards = np.zeros(len(frames), np.int64), np.zeros(len(frames), np.float32)
    actions[-2], rewards[-2] = action, np.asarray(example["r_t"])[0]
    ends = np.array([*context, INSIDE, TERMINATED if terminal else TRUNCATED], np.uint8)
    yield Piece(frames[..., None], actions, rewards, ends)


def _check_actions(actions: Array, spec: EnvSpec) -> Array:
    """Return the actions, if they are all in range."""
    if len(actions) and not (actions.min() >= 0 and actions.max() < spec.num_actions):
        raise ValueError(f"its actions go from {actions.min()} to {actions.max()}; {spec.id} has {spec.num_actions}")
    return actions


def _decode_png(content: Any, spec: EnvSpec) -> Array:
    try:
        from PIL import Image
    except ImportError:
        raise UserError('PNG frames need `pip install "isqn[offline]"`.') from None
    try:
        image = Image.open(io.BytesIO(content), formats=("PNG",))
        height, width = image.height, image.width  # of the header; pixels are only decoded if it is right
        is_grey = image.mode == "L"
        frame = np.asarray(image) if (height, width) == spec.frame_shape[:2] and is_grey else None
    except Exception as error:
        raise ValueError(f"a frame is not a PNG image ({error})") from error
    if frame is None:
        raise ValueError(f"a frame is {image.mode} ({height}, {width}), not L {spec.frame_shape[:2]} (8-bit grey)")
    return frame


# -- datasets of this package


def own_dataset(folder: Path, num_checkpoints: int) -> Source:
    """Return a dataset of this package, split into parts with equal numbers of rows."""
    dataset = Dataset.open(folder)
    dataset.require_complete()
    if num_checkpoints > dataset.num_transitions:
        raise UserError(
            f"--checkpoints is {num_checkpoints:,}; {folder} has {dataset.num_transitions:,} transitions, and each "
            "part needs one."
        )
    bounds = np.linspace(0, dataset.rows.total, num_checkpoints + 1).astype(int)

    def part(number: int) -> Part:
        first, end = int(bounds[number]), int(bounds[number + 1])
        size = int((dataset.rows.ends[first:end] == INSIDE).sum())
        return Part(f"part {number}", number, size, lambda: dataset.pieces(first, end))

    parts = [part(number) for number in range(num_checkpoints)]
    return Source("isqn", dataset.index["policy"], parts, dataset.digest)
