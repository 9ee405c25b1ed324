"""The index of a dataset: `index.json`, with its checksum and the types of its fields."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from isqn.data.files import Description
from isqn.types import EnvSpec, UserError

FORMAT = 1
INDEX = "index.json"
MINARI = ("metadata.json", "data/metadata.json")


def read_index(folder: Path) -> Description:
    """Read and verify the index of a dataset; the error for any other folder says what it is."""
    path = folder / INDEX
    if not path.is_file():
        problem = f"there is no {INDEX} in it" if folder.is_dir() else "there is no such folder"
        hint = (
            "`isqn data collect` and `isqn data convert` make datasets, as does `isqn train dqn --record-dataset` "
            "during training."
        )
        if (folder / "dataset" / INDEX).is_file():
            hint = f"it is a run; its dataset is {folder / 'dataset'}."
        elif (folder / "config.toml").is_file():
            hint = f"it is a run; `isqn data collect {folder} -o DIR` makes a dataset with its agent."
        elif any((folder / name).is_file() for name in MINARI):
            hint = f"it is a Minari dataset; `isqn data convert {folder} -o DIR` converts it."
        raise UserError(f"{folder} is not a dataset: {problem}; {hint}")
    try:
        index = json.loads(path.read_text())
        if index.pop("index_sha256") != digest_index(index):
            raise ValueError
        if index["format"] != FORMAT:
            raise UserError(f"{path} has format {index['format']}; this version reads format {FORMAT}.")
        _check_index(index)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{path} is damaged: it is not what was written; make the dataset again.") from None
    return index


INDEX_TYPES = {
    "policy": str,
    "source": str,
    "subset": str,
    "seed": int,
    "num_checkpoints": int,
    "rows": int,
    "shard_rows": int,
    "files": list,
    "spec": dict,
}


def _check_index(index: Description) -> None:
    """Check the types of an index: its checksum can be right although it was not written by this package."""
    for name, kind in INDEX_TYPES.items():
        if type(index[name]) is not kind:
            raise ValueError
    if not (
        isinstance(index["fraction"], int | float) and 0 < index["fraction"] <= 1 and 0 < index["shard_rows"] < 2**31
    ):
        raise ValueError
    for file in index["files"]:
        if not all(type(file[name]) is int and file[name] >= 0 for name in ("bytes", "rows", "columns_crc32")):
            raise ValueError
        if not all(type(file[name]) is str for name in ("name", "sha256")):
            raise ValueError
    if index["rows"] != sum(file["rows"] for file in index["files"]):
        raise ValueError
    EnvSpec.from_json(index["spec"]).check_types()


def spec_from_index(index: Description) -> EnvSpec:
    """Return the environment specification stored in an index."""
    return EnvSpec.from_json(index["spec"])


def digest_index(index: Description) -> str:
    """Return the checksum of an index, which identifies the content of the dataset."""
    return sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
