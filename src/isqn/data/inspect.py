"""Summary of a dataset: counts, returns, actions, warnings and a strip of frames."""

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

MAX_COMPARED_PAIRS = 1_000  # pairs of consecutive frames that are compared


def summarise(dataset: Dataset) -> dict[str, Any]:
    """Return a JSON-serialisable summary of a dataset."""
    rows, index = dataset.rows, dataset.index
    starts, (first, _) = rows.ends == INSIDE, dataset.episodes()
    returns = np.add.reduceat(np.where(starts, rows.rewards, np.float32(0)), first, dtype=np.float64)
    lengths = np.add.reduceat(starts, first, dtype=np.int64)
    has_steps = lengths > 0
    size = sum(file["bytes"] for file in index["files"])
    summary: dict[str, Any] = {
        "env_id": dataset.spec.id,
        "protocol": dataset.spec.protocol,
        **{name: index[name] for name in ("policy", "source", "subset", "fraction", "seed", "num_checkpoints")},
        "complete": index.get("complete", True),
        "transitions": dataset.num_transitions,
        "episodes": int(has_steps.sum()),
        "terminated": int((rows.ends == TERMINATED).sum()),
        "bytes": size,
        "bytes_per_transition": size / dataset.num_transitions,
        "returns": _summarise(returns[has_steps]),
        "lengths": _summarise(lengths[has_steps]),
        "rewards": [float(rows.rewards[starts].min()), float(rows.rewards[starts].max())],
    }
    if not dataset.spec.is_continuous:
        counts = np.bincount(rows.actions[starts].astype(int), minlength=dataset.spec.num_actions)
        summary["actions"] = (counts / counts.sum()).round(6).tolist()
    return summary | {"notes": [*find_warnings(dataset, summary)]}


def _summarise(values: Array) -> dict[str, float]:
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {
        "mean": float(values.mean()),
        "least": float(values.min()),
        "quarter": low,
        "median": median,
        "three_quarters": high,
        "most": float(values.max()),
    }


def find_warnings(dataset: Dataset, summary: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for everything that may be a mistake or may mislead."""
    rows = dataset.rows
    if not summary["complete"]:
        yield "it is not complete: run the command that made it again to continue"
    starts = rows.ends == INSIDE
    if not np.isfinite(rows.rewards).all():
        yield "some rewards are not finite numbers"
    if set(np.unique(rows.rewards[starts])) <= {-1.0, 0.0, 1.0}:
        yield "all rewards are -1, 0 or 1: if they were clipped, returns are not the scores of the game"
    if not summary["terminated"] and summary["episodes"] > 1:
        yield "no episode terminates: all are truncated"
    unused = [number for number, share in enumerate(summary.get("actions", ())) if not share]
    if unused:
        yield f"actions never taken: {', '.join(map(str, unused))}"
    repeated = _repeated_share(dataset)
    if repeated > 0.5:
        yield f"{repeated:.0%} of frames are the same as the one before"


def _repeated_share(dataset: Dataset) -> float:
    """Estimate the share of frames that equal the previous frame."""
    starts = np.flatnonzero(dataset.rows.ends == INSIDE)
    compared = starts[:: max(1, len(starts) // MAX_COMPARED_PAIRS)]
    return float(np.mean([np.array_equal(*dataset.frames(int(row), int(row) + 2)) for row in compared]))


def write_strip(dataset: Dataset, path: Path, count: int = 8, side: int = 160) -> None:
    """Write evenly spaced frames of the longest episode side by side, as PNG."""
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
    rows = np.linspace(first[longest], last[longest], count).astype(int)
    images = [_to_rgb(dataset.frames(int(row), int(row) + 1)[0]) for row in rows]
    scale = max(1, side // images[0].shape[0])
    scaled = [np.kron(image, np.ones((scale, scale, 1), np.uint8)) for image in images]
    gap = np.full((scaled[0].shape[0], 4, 3), 255, np.uint8)
    joined = [part for image in scaled for part in (image, gap)][:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(joined, axis=1)).save(path, format="PNG")


def _to_rgb(frame: Array) -> Array:
    """Convert a frame to RGB; a frame that is neither grey nor RGB gets one colour per channel."""
    channels = frame.shape[-1]
    if frame.dtype == np.uint8 and channels in (1, 3):
        return np.repeat(frame, 3, axis=-1) if channels == 1 else frame
    hues = np.linspace(0, 2 * np.pi, channels, endpoint=False)
    colours = 0.5 + 0.5 * np.cos(hues[:, None] - np.array([0, 2 * np.pi / 3, 4 * np.pi / 3]))
    mixed = (frame.astype(float)[..., None] * colours).max(axis=-2)
    return np.asarray(255 * mixed / max(mixed.max(), 1e-9), np.uint8)
