"""Reader of folders that TensorFlow Datasets prepared from RL Unplugged's Atari games, without TensorFlow.

A folder has `dataset_info.json`, `features.json` and TFRecords, one example an episode. Steps are lists named
`steps/action` etc. (RLDS; Ramos et al. 2021).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from isqn.data.dataset import Piece
from isqn.data.sources import CHECKPOINT_STEPS, DQN, Part, Source, digest_files, episode_piece, reason
from isqn.data.tfrecord import Example, read_examples
from isqn.types import EnvSpec, UserError

INFO, FEATURES = "dataset_info.json", "features.json"
NAMES = ("rlu_atari", "rlu_atari_checkpoints", "rlu_atari_checkpoints_ordered")
TYPES = {"action": "int64", "reward": "float32", "is_terminal": "bool"}
RUN_STEPS = 50 * CHECKPOINT_STEPS
MAX_JSON_BYTES = 2**24


def rlds(folder: Path, spec: EnvSpec) -> Source:
    """Return the episodes in a folder; a part is a checkpoint, or a shard if the folder does not say which is which."""
    info = _read_json(folder / INFO)
    name, file_format = info.get("name"), info.get("fileFormat", "tfrecord")
    if name not in NAMES:
        raise UserError(f"{folder / INFO} describes {name!r}; the datasets that can be read are {', '.join(NAMES)}.")
    if file_format != "tfrecord":
        raise UserError(
            f"{folder / INFO}: the files are {file_format!r}; prepare the dataset with file_format='tfrecord'."
        )
    reward = _check_features(folder / FEATURES, spec)
    parts: list[Part] = []
    files = _list_shards(folder, str(name))
    for split, shards in sorted(files.items()):
        match = re.fullmatch(r"checkpoint_(\d+)", split)
        groups = [(split, int(match[1]), shards)] if match else [(x.name, i, [x]) for i, x in enumerate(shards)]
        size = CHECKPOINT_STEPS if match else RUN_STEPS // len(shards)
        parts += [_part(label, number, size, paths, reward, spec) for label, number, paths in groups]
    return Source(f"rlds, {name}", DQN, parts, digest_files(path for paths in files.values() for path in paths))


def rlds_game(folder: Path) -> str | None:
    """Return the name of the game, such as Pong, of a configuration such as Pong_run_1."""
    match = re.fullmatch(r"(\w+)_run_\d+", str(_read_json(folder / INFO).get("configName")))
    return match[1] if match else None


def _part(label: str, number: int, size: int, paths: list[Path], reward: str, spec: EnvSpec) -> Part:
    def pieces() -> Iterator[Piece]:
        for path in paths:
            for index, example in enumerate(read_examples(path, is_gzipped=False)):
                try:
                    episode = [*_read_episode(example, reward, spec)]
                except (KeyError, ValueError, TypeError, IndexError) as error:
                    raise UserError(f"{path}: example {index} is not an episode: {reason(error)}.") from error
                yield from episode

    return Part(label, number, size, pieces)


def _read_episode(example: Example, reward: str, spec: EnvSpec) -> Iterator[Piece]:
    """Yield an episode. As in the files of RL Unplugged, its last row is a step, with an action and a reward."""
    is_terminal = np.asarray(example["steps/is_terminal"])
    if len(is_terminal) and is_terminal[:-1].any():
        raise ValueError("a step before the last one is terminal")
    actions, rewards = np.asarray(example["steps/action"]), np.asarray(example[f"steps/{reward}"])
    terminal = bool(is_terminal[-1:].any())
    yield from episode_piece(example["steps/observation"], actions, rewards, is_terminal, terminal, spec)


def _list_shards(folder: Path, name: str) -> dict[str, list[Path]]:
    """Return the files of each split, all of which must be there."""
    shards: dict[str, dict[int, Path]] = {}
    counts: dict[str, int] = {}
    for path in folder.iterdir():
        if match := re.fullmatch(rf"{name}-(\w+)\.tfrecord-(\d{{5,}})-of-(\d{{5,}})", path.name):
            shards.setdefault(match[1], {})[int(match[2])] = path
            counts[match[1]] = int(match[3])
    for split, paths in shards.items():
        if len(paths) != counts[split] or set(paths) != set(range(len(paths))):
            raise UserError(f"{folder} has {len(paths):,} of the {counts[split]:,} files of the split {split}.")
    return {split: [paths[number] for number in sorted(paths)] for split, paths in shards.items()}


def _check_features(path: Path, spec: EnvSpec) -> str:
    """Check the types of the steps; return the name of the reward, which older versions also had unclipped."""
    features = _read_json(path)
    try:
        steps = features["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
        reward = "clipped_reward" if "clipped_reward" in steps else "reward"
        image = steps["observation"]["image"]
        shape = tuple(int(side) for side in image["shape"]["dimensions"])
        found = {name: steps[reward if name == "reward" else name]["tensor"] for name in TYPES}
        wrong = [name for name, dtype in TYPES.items() if found[name]["dtype"] != dtype]
        encodings = {image["encodingFormat"], *(tensor.get("encoding", "none") for tensor in found.values())}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} does not describe the steps of {NAMES[0]}: {reason(error)}.") from error
    if shape != spec.frame_shape or image.get("dtype") != spec.frame_dtype:
        raise UserError(
            f"{path}: frames are {image.get('dtype')} {shape}; those of {spec.id} are uint8 {spec.frame_shape}."
        )
    if wrong or encodings != {"png", "none"}:
        raise UserError(f"{path}: {', '.join(wrong) or 'a column'} has another type or encoding than in {NAMES[0]}.")
    return reward


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of moderate size."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}.") from error
