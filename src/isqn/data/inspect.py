"""What is in a dataset: counts, returns, actions, a strip of frames, and what looks wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isqn.data.dataset import Dataset
from isqn.data.sample import INSIDE, TERMINATED
from isqn.types import UserError

Array = NDArray[Any]

LOOKED_AT = 1_000  # pairs of frames that are compared


def examine(dataset: Dataset) -> dict[str, Any]:
    """In JSON's terms."""
    rows, index = dataset.rows, dataset.index
    starts, (first, _) = rows.ends == INSIDE, dataset.episodes()
    returns = np.add.reduceat(np.where(starts, rows.rewards, np.float32(0)), first, dtype=np.float64)
    lengths = np.add.reduceat(starts, first, dtype=np.int64)
    played = lengths > 0
    size = sum(file["bytes"] for file in index["files"])
    found: dict[str, Any] = {
        "env_id": dataset.spec.id,
        "protocol": dataset.spec.protocol,
        **{name: index[name] for name in ("policy", "source", "subset", "fraction", "seed", "num_checkpoints")},
        "complete": index.get("complete", True),
        "transitions": dataset.num_transitions,
        "episodes": int(played.sum()),
        "terminated": int((rows.ends == TERMINATED).sum()),
        "bytes": size,
        "bytes_per_transition": size / dataset.num_transitions,
        "returns": _spread(returns[played]),
        "lengths": _spread(lengths[played]),
        "rewards": [float(rows.rewards[starts].min()), float(rows.rewards[starts].max())],
    }
    if not dataset.spec.is_continuous:
        counted = np.bincount(rows.actions[starts].astype(int), minlength=dataset.spec.num_actions)
        found["actions"] = (counted / counted.sum()).round(6).tolist()
    return found | {"notes": [*remarks(dataset, found)]}


def _spread(values: Array) -> dict[str, float]:
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {
        "mean": float(values.mean()),
        "least": float(values.min()),
        "quarter": low,
        "median": median,
        "three_quarters": high,
        "most": float(values.max()),
    }


def remarks(dataset: Dataset, found: dict[str, Any]) -> Iterator[str]:
    """What may not be meant, or may mislead."""
    rows = dataset.rows
    if not found["complete"]:
        yield "it is not complete: the command that made it goes on with it"
    starts = rows.ends == INSIDE
    if not np.isfinite(rows.rewards).all():
        yield "some rewards are not finite numbers"
    if set(np.unique(rows.rewards[starts])) <= {-1.0, 0.0, 1.0}:
        yield "all rewards are -1, 0 or 1: they may have been clipped, and then returns are not those of the game"
    if not found["terminated"] and found["episodes"] > 1:
        yield "no episode is terminal: all were cut"
    unused = [number for number, share in enumerate(found.get("actions", ())) if not share]
    if unused:
        yield f"actions never taken: {', '.join(map(str, unused))}"
    frozen = _frozen_share(dataset)
    if frozen > 0.5:
        yield f"{frozen:.0%} of frames are the same as the one before"


def _frozen_share(dataset: Dataset) -> float:
    starts = np.flatnonzero(dataset.rows.ends == INSIDE)
    chosen = starts[:: max(1, len(starts) // LOOKED_AT)]
    return float(np.mean([np.array_equal(*dataset.frames(int(row), int(row) + 2)) for row in chosen]))


def strip(dataset: Dataset, path: Path, count: int = 8, side: int = 160) -> None:
    """Some frames of one episode side by side, as PNG."""
    if path.suffix.lower() != ".png":
        raise UserError(f"--strip is {path}; it must end with .png.")
    if not dataset.spec.is_image:
        raise UserError(f"{dataset.spec.id} observes no images; leave out --strip.")
    try:
        from PIL import Image
    except ImportError:
        raise UserError('--strip needs `pip install "isqn[offline]"`.') from None
    first, last = dataset.episodes()
    longest = int(np.argmax(last - first))
    chosen = np.linspace(first[longest], last[longest], count).astype(int)
    pictures = [_coloured(dataset.frames(int(row), int(row) + 1)[0]) for row in chosen]
    scale = max(1, side // pictures[0].shape[0])
    large = [np.kron(picture, np.ones((scale, scale, 1), np.uint8)) for picture in pictures]
    gap = np.full((large[0].shape[0], 4, 3), 255, np.uint8)
    joined = [part for picture in large for part in (picture, gap)][:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(joined, axis=1)).save(path, format="PNG")


def _coloured(frame: Array) -> Array:
    """Grey, RGB, or one colour for each channel."""
    channels = frame.shape[-1]
    if frame.dtype == np.uint8 and channels in (1, 3):
        return np.repeat(frame, 3, axis=-1) if channels == 1 else frame
    hues = np.linspace(0, 2 * np.pi, channels, endpoint=False)
    colours = 0.5 + 0.5 * np.cos(hues[:, None] - np.array([0, 2 * np.pi / 3, 4 * np.pi / 3]))
    mixed = (frame.astype(float)[..., None] * colours).max(axis=-2)
    return np.asarray(255 * mixed / max(mixed.max(), 1e-9), np.uint8)
