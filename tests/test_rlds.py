"""Folders of TensorFlow Datasets hold the same episodes as RL Unplugged's own files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from isqn.cli import main
from isqn.data.convert import convert
from isqn.data.dataset import Dataset
from isqn.data.sample import INSIDE, TERMINATED, TRUNCATED
from isqn.train.source import find_source
from isqn.types import UserError

DATA = Path(__file__).parent / "data" / "rl_unplugged"
ORDERED = DATA / "rlu_atari_checkpoints_ordered" / "Pong_run_1" / "1.1.0"
SHUFFLED = DATA / "rlu_atari" / "Pong_run_1" / "1.3.0"


def episodes(folder: Path, tmp_path: Path) -> list:
    """Return the episodes of a converted source: greys of frames, actions, rewards and ends."""
    out = tmp_path / f"out-{len([*tmp_path.iterdir()])}"
    convert(*find_source(folder, None, 1, 1), out)
    return [
        (piece.frames[:, 0, 0, 0].tolist(), piece.actions.tolist(), piece.rewards.tolist(), piece.ends.tolist())
        for piece in Dataset.open(out).pieces()
    ]


@pytest.mark.parametrize("folder", [ORDERED, SHUFFLED])
def test_prepared_folders_have_the_episodes_of_the_original_files(folder, tmp_path):
    """TensorFlow wrote the original files, and TensorFlow Datasets prepared these folders from them."""
    original = episodes(DATA / "raw" / "Pong", tmp_path)
    assert sorted(episodes(folder, tmp_path)) == original
    assert original[0] == ([1, 2, 3, 3], [1, 2, 3, 0], [0, 1, -1, 0], [INSIDE, INSIDE, INSIDE, TERMINATED])
    assert original[1] == ([4, 5, 6, 7], [4, 5, 0, 0], [0, 1, -1, 0], [INSIDE, INSIDE, INSIDE, TRUNCATED])


def test_parts_are_checkpoints_where_the_folder_has_them():
    source, spec = find_source(ORDERED, None, 1, 1)
    assert (source.kind, spec.id) == ("rlds, rlu_atari_checkpoints_ordered", "ALE/Pong-v5")
    assert [(part.name, part.checkpoint, part.size) for part in source.parts] == [
        ("checkpoint_00", 0, 1_000_000),
        ("checkpoint_01", 1, 1_000_000),
    ]
    source, _ = find_source(SHUFFLED, None, 1, 1)
    assert [(part.checkpoint, part.size) for part in source.parts] == [(0, 50_000_000)]


def test_a_prepared_folder_is_converted_by_the_command(tmp_path, capsys):
    assert main(["data", "convert", str(ORDERED), "-o", str(tmp_path / "out")]) == 0
    assert Dataset.open(tmp_path / "out").num_transitions == 8
    with pytest.raises(UserError, match=r"holds folders of TensorFlow Datasets; give one of them, such as .*1\.1\.0"):
        find_source(DATA / "rlu_atari_checkpoints_ordered", None, 1, 1)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(ORDERED, tmp_path / "Pong_run_1"))


def change(path: Path, *keys: str, value: object) -> None:
    content = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(content))


STEPS = ("featuresDict", "features", "steps", "sequence", "feature", "featuresDict", "features")


@pytest.mark.parametrize(
    ("file", "keys", "value", "sentence"),
    [
        ("dataset_info.json", ("name",), "d4rl", "describes 'd4rl'; the datasets that can be read are rlu_atari, rlu"),
        ("dataset_info.json", ("fileFormat",), "riegeli", "the files are 'riegeli'; prepare the dataset with"),
        ("dataset_info.json", ("name",), "rlu_atari_checkpoints", "There is nothing to convert"),
        ("features.json", ("featuresDict",), [], "does not describe the steps of rlu_atari: "),
        ("features.json", (*STEPS, "action"), {}, "does not describe the steps of rlu_atari: 'tensor' is missing."),
        ("features.json", (*STEPS, "action", "tensor", "dtype"), "int32", "action has another type or encoding"),
        ("features.json", (*STEPS, "reward", "tensor", "encoding"), "zlib", "a column has another type or encoding"),
        ("features.json", (*STEPS, "observation", "image", "encodingFormat"), "jpeg", "another type or encoding"),
        ("features.json", (*STEPS, "observation", "image", "shape"), {"dimensions": ["84", "84", "3"]}, "(84, 84, 3)"),
    ],
)  # fmt: skip
def test_other_layouts_are_refused(file, keys, value, sentence, folder, tmp_path):
    change(folder / file, *keys, value=value)
    with pytest.raises(UserError) as refused:
        convert(*find_source(folder, None, 1, 1), tmp_path / "out")
    assert sentence in str(refused.value)


def test_missing_and_damaged_files_are_refused(folder, tmp_path):
    path = folder / "rlu_atari_checkpoints_ordered-checkpoint_00.tfrecord-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"00000-of-00001 is damaged in the record at byte 0: .* checksum"):
        convert(*find_source(folder, None, 1, 1), tmp_path / "out")
    path.rename(path.with_name(path.name.replace("of-00001", "of-00003")))
    with pytest.raises(UserError, match="Pong_run_1 has 1 of the 3 files of the split checkpoint_00"):
        find_source(folder, None, 1, 1)
    (folder / "dataset_info.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"dataset_info.json is damaged"):
        find_source(folder, None, 1, 1)


def test_older_versions_have_a_clipped_reward(folder, tmp_path):
    """The clipped reward is taken, as from the original files."""
    features = json.loads((folder / "features.json").read_text())
    reward = features["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]["reward"]
    change(folder / "features.json", *STEPS, "clipped_reward", value=reward)
    with pytest.raises(UserError, match="example 0 is not an episode: 'steps/clipped_reward' is missing"):
        convert(*find_source(folder, None, 1, 1), tmp_path / "out")
