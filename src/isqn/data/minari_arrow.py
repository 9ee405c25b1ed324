"""Reader of Minari datasets stored as Arrow or Parquet, one file per episode. It needs `pip install "isqn[offline]"`.

Minari 0.5.4 loads only the first batch of an episode (32,768 rows with pyarrow 26.0.1), and does not validate what it
reads: a damaged file can crash the process. So its files are read here, and only the five columns that are needed.
"""

from __future__ import annotations

import io
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from isqn.data.arrays import MAX_COMPRESSION
from isqn.data.files import check_claim
from isqn.data.text import read_json
from isqn.types import UserError

if TYPE_CHECKING:
    from gymnasium import Space

Array = NDArray[Any]

COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations")
ARROW_FORMATS = ("arrow", "parquet")
IGNORED_PREFIXES = ("_", ".", "metadata.json")  # of files that Minari does not read


def require_pyarrow(folder: Path, data_format: str) -> None:
    """Refuse a dataset if pyarrow is not installed."""
    try:
        import pyarrow.dataset  # noqa: F401
    except ImportError:
        raise UserError(
            f'{folder} is stored as {data_format}; reading it needs `pip install "isqn[offline]"`.'
        ) from None


def read_episode(data: Path, number: int, data_format: str, spaces: tuple[Space[Any], Space[Any]]) -> dict[str, Any]:
    """Read an episode as Minari's `get_episodes` returns it, without its infos.

    `data` is the folder of the episodes, and `spaces` are those of observations and actions. The file has one row for
    each of L + 1 observations; the other columns are padded by one row.
    """
    folder = data / str(number)
    metadata = read_json(folder / "metadata.json")
    steps = metadata.get("total_steps") if isinstance(metadata, dict) else None
    columns = _read_columns(folder, data_format, steps)
    episode = {"observations": _decode(columns["observations"], spaces[0], "observations")}
    episode["actions"] = _decode(columns["actions"][:-1], spaces[1], "actions")
    return episode | {name: _to_numpy(columns[name][:-1], name) for name in ("rewards", "terminations", "truncations")}


def _read_columns(folder: Path, data_format: str, steps: Any) -> dict[str, Any]:
    """Read and validate the columns of an episode of so many steps."""
    from pyarrow import dataset, fs

    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(IGNORED_PREFIXES)]
    if len(paths) != 1:
        raise ValueError(f"it has {len(paths)} files, and Minari writes one")
    source = dataset.dataset(str(paths[0]), format=data_format, filesystem=fs.LocalFileSystem())
    if missing := [name for name in COLUMNS if name not in source.schema.names]:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    rows = source.count_rows()
    if steps != rows - 1:
        raise ValueError(f"it has {steps!r} steps in its metadata.json and {rows} rows; L steps need L + 1 rows")
    stored = paths[0].stat().st_size
    for name in COLUMNS:  # before anything is decompressed
        check_claim(paths[0], name, rows * _min_bytes(source.schema.field(name).type), stored, MAX_COMPRESSION)
    table = source.to_table(columns=[*COLUMNS], use_threads=False)
    table.validate(full=True)  # offsets of a damaged file can point anywhere in memory
    return {name: table.column(name).combine_chunks() for name in COLUMNS}


def _min_bytes(kind: Any) -> int:
    """Return the bytes that a row of a type takes at least; 0 if its rows may be empty."""
    from pyarrow import types

    if types.is_struct(kind):
        return sum(_min_bytes(kind.field(index).type) for index in range(kind.num_fields))
    if types.is_fixed_size_list(kind):
        return int(kind.list_size) * _min_bytes(kind.value_type)
    return kind.bit_width // 8 if types.is_primitive(kind) else 0


def _decode(column: Any, space: Any, name: str) -> Any:
    """Return a column of Arrow as observations or actions of a space."""
    from gymnasium import spaces
    from pyarrow import types

    kind = column.type
    if isinstance(space, spaces.Dict | spaces.Tuple):
        _require_no_nulls(column, name)
        if not types.is_struct(kind):
            raise ValueError(f"its {name} are {kind}, not a struct as {space}")
        parts = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        if missing := [key for key in map(str, parts) if kind.get_field_index(key) < 0]:
            raise ValueError(f"its {name} have no {' and no '.join(missing)}")
        decoded = {key: _decode(column.field(str(key)), part, f"{name}, {key},") for key, part in parts.items()}
        return decoded if isinstance(space, spaces.Dict) else tuple(decoded.values())
    if types.is_binary(kind):
        return _decode_images(column, space, name)
    if isinstance(space, spaces.Discrete):
        return _to_numpy(column, name)
    shape: Any = space.shape
    if not types.is_fixed_size_list(kind) or kind.list_size != prod(shape):
        raise ValueError(f"its {name} are {kind}, not lists of {prod(shape)} numbers as {space}")
    _require_no_nulls(column, name)
    return _to_numpy(column.flatten(), name).reshape(len(column), *shape)


def _decode_images(column: Any, space: Any, name: str) -> Array:
    """Return images that were stored as JPEG; pixels are only decoded if the header has the right shape."""
    from PIL import Image

    _require_no_nulls(column, name)
    images = np.empty((len(column), *space.shape), np.uint8)
    for row, content in enumerate(column):
        try:
            image = Image.open(io.BytesIO(content.as_py()), formats=("JPEG",))
            shape = (image.height, image.width, *[len(image.getbands())][: len(space.shape) - 2])
            is_right = shape == space.shape and image.mode in ("L", "RGB")
            pixels = np.asarray(image) if is_right else None
        except Exception as error:  # a damaged image can raise anything
            raise ValueError(f"image {row} of its {name} is not a JPEG image") from error
        if pixels is None:
            raise ValueError(f"image {row} of its {name} is {image.mode} {shape}, not {space}")
        images[row] = pixels
    return images


def _to_numpy(column: Any, name: str) -> Array:
    """Return a column of numbers or booleans."""
    _require_no_nulls(column, name)
    values: Array = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"its {name} are {column.type}, not numbers")
    return values


def _require_no_nulls(column: Any, name: str) -> None:
    if column.null_count:
        raise ValueError(f"its {name} have missing values ({column.null_count} of {len(column)})")
