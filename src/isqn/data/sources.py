"""What datasets are converted from: each source is a list of parts, and each part a stream of pieces of episodes.

Nothing is loaded whole but columns of numbers. A frame that is not there, because a log goes on elsewhere or was cut,
is not made up: the step that would lead to it is left out, and rows whose stack is not known are context.
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

from isqn.data.dataset import MINARI, Dataset, Piece
from isqn.data.npy import NpyStream, read_column
from isqn.data.sample import CONTEXT, INSIDE, TERMINATED, TRUNCATED
from isqn.data.tfrecord import Example, read_examples
from isqn.types import EnvSpec, UserError

Array = NDArray[Any]

CHECKPOINT_STEPS = 1_000_000  # of the DQN replay dataset (Agarwal et al. 2020)
MOST_ROWS = 30_000  # of a piece: longer episodes are cut in several, which no sample of one step notices
CHUNK_ROWS = 1_024


class Part(NamedTuple):
    name: str
    checkpoint: int  # a subset is taken of each
    size: int  # transitions of the whole checkpoint, as far as is known before it is read
    pieces: Callable[[], Iterator[Piece]]


class Source(NamedTuple):
    kind: str
    policy: str
    parts: list[Part]
    identity: str  # of its files: what was converted in part goes on with the same ones


def identity(files: Iterable[Path]) -> str:
    """By names and sizes: to read them all would take as long as to convert them."""
    described = sorted((path.name, path.stat().st_size) for path in files if path.is_file())
    return sha256(json.dumps(described).encode()).hexdigest()


# -- the DQN replay dataset: shards of Dopamine, and d4rl-atari's copies of them

STORE = "$store$_{}_ckpt.{}.gz"
DQN = "DQN of Dopamine, while it learned"


def dopamine(folder: Path, spec: EnvSpec) -> Source:
    """`$store$_observation_ckpt.N.gz` and its fellows: one number N for each checkpoint."""
    named = [re.fullmatch(r"\$store\$_observation_ckpt\.(\d+)\.gz", path.name) for path in folder.iterdir()]
    numbers = sorted(int(match[1]) for match in named if match)

    def files(number: int) -> dict[str, Path]:
        named = {name: folder / STORE.format(name, number) for name in ("observation", "action", "reward", "terminal")}
        return named | {"add_count": folder / f"add_count_ckpt.{number}.gz"}

    parts = [_log_part(files(n), n, spec) for n in numbers]
    return Source("dqn-replay", DQN, parts, identity(folder.iterdir()))


def d4rl_atari(folder: Path, spec: EnvSpec) -> Source:
    """`N/observation.gz` and its fellows: one folder for each checkpoint."""
    numbers = sorted(int(path.parent.name) for path in folder.glob("*/observation.gz") if path.parent.name.isdigit())

    def files(number: int) -> dict[str, Path]:
        return {name: folder / str(number) / f"{name}.gz" for name in ("observation", "action", "reward", "terminal")}

    parts = [_log_part(files(n), n, spec) for n in numbers]
    return Source("d4rl-atari", DQN, parts, identity(folder.glob("*/*.gz")))


def _log_part(files: dict[str, Path], number: int, spec: EnvSpec) -> Part:
    return Part(f"checkpoint {number}", number, CHECKPOINT_STEPS, lambda: _log_pieces(files, spec))


def _log_pieces(files: dict[str, Path], spec: EnvSpec) -> Iterator[Piece]:
    """A ring of rows (observation, action, reward, terminal): the next observation is that of the next row.

    In a ring that is full the newest row lies before the oldest, where it was last written. Dopamine puts rows of
    zeros, one less than a stack has, before each episode; of truncated episodes nothing tells the end.
    """
    for name in ("observation", "action", "reward", "terminal"):
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
    if actions.dtype.kind not in "iu":
        raise UserError(f"{files['action']} holds {actions.dtype}; actions are whole numbers.")
    if not np.isin(terminals, (0, 1)).all():
        raise UserError(f"{files['terminal']} has {terminals.min()} to {terminals.max()}; 0 or 1 belong there.")
    if size and not (actions.min() >= 0 and actions.max() < spec.num_actions):
        raise UserError(
            f"{files['action']} has actions from {actions.min()} to {actions.max()}; {spec.id} has {spec.num_actions}."
        )
    added = size
    if "add_count" in files and files["add_count"].is_file():
        added = _scalar(files["add_count"])
    used = min(added, size)  # behind them lie rows of the checkpoint before, or none
    breaks = {0, added % size if used else 0, used}  # where a row does not follow the one before it
    over = np.flatnonzero(terminals[:used]) + 1
    bounds = sorted(breaks | set(over.tolist()))
    known = set(over.tolist()) - breaks  # where an episode begins
    chunks, held = stream.rows(CHUNK_ROWS), np.empty((0, *spec.frame_shape[:2]), np.uint8)

    stack = spec.frame_stack
    for first, end in itertools.pairwise(bounds):
        start, context = first, 0 if first in known else stack - 1
        while start < end:
            stop = min(end, start + MOST_ROWS)
            while len(held) < stop - start:
                held = np.concatenate([held, next(chunks)])
            frames, held = held[: stop - start], held[stop - start :]
            columns = [frames, actions[start:stop], rewards[start:stop]]
            if start == first and not any(
                x[: stack - 1].any() for x in columns
            ):  # rows of zeros, or what is left of them
                columns, context = [x[stack - 1 :] for x in columns], 0
            yield from _steps(*columns, terminal=bool(terminals[stop - 1]), context=context)
            if stop == end:
                break
            # seen again: the context of the next piece, and the row that its first step starts from
            held, start, context = np.concatenate([frames[-stack:], held]), stop - stack, stack - 1
    for _ in chunks:  # to the end, where a damaged file is found out
        pass
    stream.close()


def _steps(frames: Array, actions: Array, rewards: Array, *, terminal: bool, context: int = 0) -> Iterator[Piece]:
    """Rows whose last observation is not there: a terminal one is of no matter, and stands for itself again; another
    would be learned from, so the last step is left out."""
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


def _scalar(path: Path) -> int:
    """Of an array without axes."""
    try:
        with gzip.open(path, "rb") as file:
            found = np.load(io.BytesIO(file.read(4_096)))  # numpy refuses pickles by itself
        if found.shape or found.dtype.kind not in "iu" or found < 0:
            raise ValueError(f"it holds {found.tolist()}, and not a number of rows")
        return int(found)
    except Exception as error:
        raise UserError(f"{path} is damaged: {error}.") from error


# -- RL Unplugged (Gulcehre et al. 2020)


def rl_unplugged(folder: Path, spec: EnvSpec, run: int) -> Source:
    """`run_R-NNNNN-of-MMMMM`: single transitions, or whole episodes in the order in which they were played."""
    found = {int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(rf"run_{run}-(\d+)-of-\d+", path.name))}
    first = next(read_examples(next(iter(found.values()))), {}) if found else {}
    ordered = "observations" in first
    read = _episode if ordered else _transition
    kind = "rl-unplugged, ordered episodes" if ordered else "rl-unplugged, transitions"

    def part(number: int, path: Path) -> Part:
        def pieces() -> Iterator[Piece]:
            for index, example in enumerate(read_examples(path)):
                try:
                    pieces = [*read(example, spec)]
                except (KeyError, ValueError, TypeError, IndexError) as error:
                    raise UserError(f"{path}: example {index} is not {kind}: {_reason(error)}.") from error
                yield from pieces

        return Part(path.name, number, CHECKPOINT_STEPS if ordered else CHECKPOINT_STEPS // 2, pieces)

    return Source(kind, DQN, [part(*item) for item in sorted(found.items())], identity(found.values()))


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _episode(example: Example, spec: EnvSpec) -> Iterator[Piece]:
    """Of L steps there are L observations. The last was terminal if its discount is 0."""
    actions, rewards, discounts = (np.asarray(example[name]) for name in ("actions", "clipped_rewards", "discounts"))
    images = example["observations"]
    lengths = {len(images), len(actions), len(rewards), len(discounts)}
    if len(lengths) > 1:
        raise ValueError(f"its columns have lengths {sorted(lengths)}")
    if len(images):
        frames = np.stack([_picture(image, spec) for image in images])
        yield from _steps(frames, _actions(actions, spec), rewards, terminal=bool(discounts[-1] == 0))


def _transition(example: Example, spec: EnvSpec) -> Iterator[Piece]:
    """Both ends, each with its stack: one frame is new."""
    before, after = example["o_t"], example["o_tp1"]
    if len(before) != spec.frame_stack or len(after) != spec.frame_stack:
        raise ValueError(f"stacks have {len(before)} and {len(after)} frames, and not {spec.frame_stack}")
    frames = np.stack([_picture(image, spec) for image in (*before, after[-1])])
    context = [CONTEXT] * (spec.frame_stack - 1)
    terminal = float(np.asarray(example["d_t"])[0]) == 0
    action = _actions(np.asarray(example["a_t"])[:1], spec)[0]
    actions, rewards = np.zeros(len(frames), np.int64), np.zeros(len(frames), np.float32)
    actions[-2], rewards[-2] = action, np.asarray(example["r_t"])[0]
    ends = np.array([*context, INSIDE, TERMINATED if terminal else TRUNCATED], np.uint8)
    yield Piece(frames[..., None], actions, rewards, ends)


def _actions(actions: Array, spec: EnvSpec) -> Array:
    if len(actions) and not (actions.min() >= 0 and actions.max() < spec.num_actions):
        raise ValueError(f"its actions go from {actions.min()} to {actions.max()}; {spec.id} has {spec.num_actions}")
    return actions


def _picture(content: Any, spec: EnvSpec) -> Array:
    try:
        from PIL import Image
    except ImportError:
        raise UserError('PNG frames need `pip install "isqn[offline]"`.') from None
    try:
        frame = np.asarray(Image.open(io.BytesIO(content), formats=("PNG",)))
    except Exception as error:
        raise ValueError(f"a frame is no PNG ({error})") from error
    if frame.shape != spec.frame_shape[:2] or frame.dtype != np.uint8:
        raise ValueError(f"a frame is {frame.dtype} {frame.shape}, and not uint8 {spec.frame_shape[:2]}")
    return frame


# -- Minari (Younis et al. 2024)


def minari(folder: Path, spec: EnvSpec, to_frame: Callable[[Any], Array]) -> Source:
    """Whole episodes of a Gymnasium environment, with their last observations."""
    storage = _read_minari(folder)
    total = int(storage.total_episodes)

    def pieces() -> Iterator[Piece]:
        for number in range(total):
            try:
                (episode,) = storage.get_episodes([number])
            except Exception as error:  # whatever a damaged file leads to
                raise UserError(f"{folder} is damaged: episode {number} cannot be read ({error}).") from error
            taken = np.asarray(episode["actions"])
            frames = np.stack([to_frame(obs) for obs in episode["observations"]])
            if len(frames) != len(taken) + 1 or len(taken) != len(episode["rewards"]):
                raise UserError(
                    f"{folder}: episode {number} has {len(taken)} actions, {len(episode['rewards'])} rewards and "
                    f"{len(frames)} observations; there must be one observation more."
                )
            if frames.shape[1:] != spec.frame_shape:
                raise UserError(f"{folder}: frames of episode {number} are {frames.shape[1:]}, not {spec.frame_shape}.")
            chosen = spec.from_environment(taken)
            if not spec.is_continuous:
                try:
                    _actions(chosen, spec)
                except ValueError as error:
                    raise UserError(f"{folder}: episode {number}: {error}.") from None
            actions = np.concatenate([chosen, np.zeros((1, *spec.action_shape))])
            ends = np.full(len(frames), INSIDE, np.uint8)
            ends[-1] = TERMINATED if episode["terminations"][-1] else TRUNCATED
            yield Piece(frames, actions, np.append(episode["rewards"], 0).astype(np.float32), ends)

    policy = str(storage.metadata.get("algorithm_name", "not said"))
    part = Part("episodes", 0, int(storage.total_steps), pieces)
    return Source("minari", policy, [part], identity(_minari_data(folder).iterdir()))


def minari_env_id(folder: Path) -> str | None:
    """What environment it says it is of."""
    metadata = _read_minari(folder).metadata
    described = metadata.get("env_spec")
    return str(json.loads(described)["id"]) if described else metadata.get("isqn_env_id")


def minari_digest(folder: Path) -> str | None:
    """Of the dataset of this package that it was written from."""
    if not any((folder / name).is_file() for name in MINARI):
        return None
    return _read_minari(folder).metadata.get("isqn_digest")


def minari_storage() -> Any:
    try:
        from minari.dataset.minari_storage import MinariStorage
    except ImportError:
        raise UserError('Datasets of Minari need `pip install "isqn[offline]"`.') from None
    return MinariStorage


def _read_minari(folder: Path) -> Any:
    try:
        return minari_storage().read(_minari_data(folder))
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{folder} cannot be read as a dataset of Minari: {error}") from None
    except Exception as error:  # whatever a damaged file leads to
        raise UserError(
            f"{folder} cannot be read as a dataset of Minari: its metadata.json or data are damaged."
        ) from error


def _minari_data(folder: Path) -> Path:
    return (folder / "data" if (folder / "data").is_dir() else folder).resolve()  # Minari takes no other


# -- our own


def own(folder: Path, num_checkpoints: int) -> Source:
    """In parts of as many rows."""
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
