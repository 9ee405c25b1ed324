"""Few seeds, many tasks: the statistics of Agarwal et al. 2021, and the area under the curve of the paper's appendix A.

Seeds are the first axis of scores and tasks the second, as in rliable's dictionaries; a third, if there is
one, is epochs. A statistic takes the first two axes away and keeps whatever follows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from isqn.types import UserError

AXES = ("seeds", "tasks", "epochs")
CHUNK = 2**21  # numbers that are resampled at once: 16 MB
Statistic = Callable[[np.ndarray], Any]


class Interval(NamedTuple):
    """A statistic and its percentile interval, which need not contain it: floats, or arrays over epochs."""

    point: Any
    low: Any
    high: Any


def auc(scores: ArrayLike) -> np.ndarray:
    """The sum over epochs, for each seed and task."""
    return _checked(scores, 3).sum(axis=-1)


def iqm(scores: ArrayLike) -> Any:
    """The interquartile mean: the runs of all tasks are pooled, and the lowest and highest quarter left out.

    A quarter that is not a whole number is rounded down, as in `scipy.stats.trim_mean`.
    """
    runs = np.sort(_runs(scores), axis=-1)
    cut = runs.shape[-1] // 4
    return runs[..., cut : runs.shape[-1] - cut].mean(axis=-1)


def median(scores: ArrayLike) -> Any:
    """Over tasks, of the mean over seeds."""
    return np.median(_checked(scores).mean(axis=0), axis=0)


def mean(scores: ArrayLike) -> Any:
    """Over tasks, of the mean over seeds; every task has as many seeds, so this is the mean of all runs."""
    return _runs(scores).mean(axis=-1)


def optimality_gap(scores: ArrayLike, threshold: float = 1.0) -> Any:
    """How far the mean falls short of a threshold when scores above it count as the threshold."""
    return threshold - np.minimum(_runs(scores), threshold).mean(axis=-1)


def resampled_seeds(rng: np.random.Generator, resamples: int, seeds: int, tasks: int) -> np.ndarray:
    """Which seed stands in for each seed of each task: drawn with replacement, for each task on its own."""
    if resamples < 1:
        raise UserError(f"A bootstrap needs at least 1 resample, not {resamples}.")
    return rng.integers(seeds, size=(resamples, seeds, tasks))


def interval(
    scores: ArrayLike, statistic: Statistic = iqm, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """A stratified bootstrap; all epochs of a curve are resampled alike."""
    scores = _checked(scores, 2, 3)
    seeds, tasks = scores.shape[:2]
    curves = np.ascontiguousarray(scores.reshape(seeds * tasks, -1).T)  # (epochs, runs)

    def of(draws: np.ndarray) -> np.ndarray:
        picked = np.take(curves, draws * tasks + np.arange(tasks), axis=1)
        values = np.asarray(statistic(np.moveaxis(picked, (2, 3), (0, 1))))
        if values.shape != picked.shape[:2]:
            raise UserError("A statistic must reduce axes 0 and 1 (seeds and tasks) of its scores and keep the others.")
        return values

    draws = resampled_seeds(np.random.default_rng(seed), resamples, seeds, tasks)
    # The point goes the way of the resamples: summed in the same order, equal numbers come out equal.
    point = of(np.arange(seeds)[None, :, None])[:, 0]
    return _percentiles(point.reshape(scores.shape[2:]), _in_chunks(of, scores.size, draws), confidence)


def relative(interval: Interval, baseline: ArrayLike) -> Interval:
    """Divided by the baseline's point, as the paper divides by the IQM of the target-based approach."""
    divisor = np.asarray(baseline, np.float64)
    if not np.all((divisor > 0) & np.isfinite(divisor)):
        raise UserError(
            f"Only a baseline above 0 can be divided by, and this one is {divisor.min():g}: "
            "normalise scores so that the baseline is positive, for example by human and random scores."
        )
    return Interval(*(value / divisor for value in interval))


def performance_profile(
    scores: ArrayLike, thresholds: ArrayLike, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """The share of runs above each threshold: the run-score distribution, arrays over thresholds."""
    levels = np.asarray(thresholds, np.float64)
    if levels.ndim != 1 or not levels.size or not np.isfinite(levels).all():
        raise UserError(f"Thresholds must be a list of at least one finite number, not {thresholds!r}.")
    return interval(_checked(scores, 2)[..., None] > levels, mean, resamples, confidence, seed)


def probability_of_improvement(
    x: ArrayLike, y: ArrayLike, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """How likely a run of x beats one of y on the same task, on average over tasks; a tie is half a win."""
    x, y = _checked(x, 2), _checked(y, 2)
    if x.shape[1] != y.shape[1]:
        raise UserError(f"Two methods are compared on the same tasks, and these have {x.shape[1]} and {y.shape[1]}.")
    wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)  # (seeds of x, seeds of y, tasks)

    def of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return wins[first[:, :, None], second[:, None], np.arange(x.shape[1])].mean(axis=(1, 2, 3))

    rng = np.random.default_rng(seed)
    draws = [resampled_seeds(rng, resamples, *scores.shape) for scores in (x, y)]
    return _percentiles(wins.mean(), _in_chunks(of, wins.size, *draws), confidence)


def _checked(scores: ArrayLike, *allowed: int) -> np.ndarray:
    """As an array of floats with the number of axes that is allowed; at least two if none is named."""
    try:
        array = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        raise UserError("Scores must be numbers, with as many seeds for every task and epochs for every run.") from None
    if array.ndim < 2 or (allowed and array.ndim not in allowed):
        shapes = " or ".join(f"({', '.join(AXES[:n])})" for n in allowed) or "(seeds, tasks, ...)"
        raise UserError(f"Scores must have the axes {shapes}, but their shape is {array.shape}.")
    if not array.size:
        raise UserError(f"There are no scores: their shape is {array.shape}, and no axis may be empty.")
    if not (finite := np.isfinite(array)).all():
        first = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise UserError(f"Scores must be finite, but the one at {first} of the shape {array.shape} is {array[first]}.")
    return array


def _runs(scores: ArrayLike) -> np.ndarray:
    """Seeds and tasks as one axis, the last."""
    array = _checked(scores)
    return np.ascontiguousarray(np.moveaxis(array.reshape(-1, *array.shape[2:]), 0, -1))


def _in_chunks(function: Callable[..., np.ndarray], numbers: int, *draws: np.ndarray) -> np.ndarray:
    """A function of many resamples, each of which takes so many numbers, without all of them in memory at once."""
    size = max(1, CHUNK // numbers)
    starts = range(0, len(draws[0]), size)
    return np.concatenate([function(*(d[start : start + size] for d in draws)) for start in starts], axis=-1)


def _percentiles(point: np.ndarray, values: np.ndarray, confidence: float) -> Interval:
    if not 0 < confidence < 1:
        raise UserError(f"The confidence of an interval is above 0 and below 1, for example 0.95, not {confidence}.")
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2], axis=-1)
    bounds = (np.reshape(bound, point.shape) for bound in (point, low, high))
    return Interval(*(bound if bound.ndim else float(bound) for bound in bounds))
