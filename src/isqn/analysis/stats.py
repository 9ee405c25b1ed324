"""Aggregate statistics over seeds and tasks (Agarwal et al. 2021), and the AUC of the paper's appendix A.

Scores have the axes (seeds, tasks) or (seeds, tasks, epochs), as in rliable's dictionaries. A statistic reduces the
first two axes and keeps the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from isqn.types import UserError

AXES = ("seeds", "tasks", "epochs")
CHUNK = 2**21  # resampled numbers in memory at a time: 16 MB
Statistic = Callable[[np.ndarray], Any]


class Interval(NamedTuple):
    """Point estimate and percentile interval: floats, or arrays over epochs. The point may lie outside the interval."""

    point: Any
    low: Any
    high: Any


def auc(scores: ArrayLike) -> np.ndarray:
    """Return the area under the curve of each seed and task: the sum over epochs."""
    return _check_scores(scores, 3).sum(axis=-1)


def iqm(scores: ArrayLike) -> Any:
    """Return the interquartile mean: the mean of all runs of all tasks without the lowest and the highest quarter.

    The number of runs cut at either end is rounded down, as in `scipy.stats.trim_mean`.
    """
    runs = np.sort(_pool_runs(scores), axis=-1)
    num_cut = runs.shape[-1] // 4
    return runs[..., num_cut : runs.shape[-1] - num_cut].mean(axis=-1)


def median(scores: ArrayLike) -> Any:
    """Return the median over tasks of the mean over seeds."""
    return np.median(_check_scores(scores).mean(axis=0), axis=0)


def mean(scores: ArrayLike) -> Any:
    """Return the mean over all runs. Every task has the same number of seeds, so tasks have equal weight."""
    return _pool_runs(scores).mean(axis=-1)


def optimality_gap(scores: ArrayLike, threshold: float = 1.0) -> Any:
    """Return the threshold minus the mean score, with every score clipped to at most the threshold."""
    return threshold - np.minimum(_pool_runs(scores), threshold).mean(axis=-1)


def resample_seeds(rng: np.random.Generator, resamples: int, seeds: int, tasks: int) -> np.ndarray:
    """Draw seed indices (resamples, seeds, tasks) with replacement, independently for each task."""
    if resamples < 1:
        raise UserError(f"A bootstrap needs at least 1 resample, not {resamples}.")
    return rng.integers(seeds, size=(resamples, seeds, tasks))


def interval(
    scores: ArrayLike, statistic: Statistic = iqm, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return a statistic with its stratified bootstrap interval. All epochs of a curve share their resamples."""
    scores = _check_scores(scores, 2, 3)
    seeds, tasks = scores.shape[:2]
    curves = np.ascontiguousarray(scores.reshape(seeds * tasks, -1).T)  # (epochs, runs)

    def evaluate(draws: np.ndarray) -> np.ndarray:
        resampled = np.take(curves, draws * tasks + np.arange(tasks), axis=1)
        values = np.asarray(statistic(np.moveaxis(resampled, (2, 3), (0, 1))))
        if values.shape != resampled.shape[:2]:
            raise UserError("A statistic must reduce axes 0 and 1 (seeds and tasks) of its scores and keep the others.")
        return values

    draws = resample_seeds(np.random.default_rng(seed), resamples, seeds, tasks)
    # The point is computed like the resamples: sums in the same order make equal scores give an interval of width 0.
    point = evaluate(np.arange(seeds)[None, :, None])[:, 0]
    return _percentile_interval(point.reshape(scores.shape[2:]), _in_chunks(evaluate, scores.size, draws), confidence)


def relative(interval: Interval, baseline: ArrayLike) -> Interval:
    """Divide an interval by the baseline's point estimate. The paper divides by the IQM of the target-based agent."""
    divisor = np.asarray(baseline, np.float64)
    if not np.all((divisor > 0) & np.isfinite(divisor)):
        raise UserError(
            f"The baseline is {divisor.min():g}; it must be above 0: "
            "normalise scores so that the baseline is positive, for example by human and random scores."
        )
    return Interval(*(value / divisor for value in interval))


def performance_profile(
    scores: ArrayLike, thresholds: ArrayLike, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return the share of runs above each threshold (the run-score distribution), as arrays over thresholds."""
    levels = np.asarray(thresholds, np.float64)
    if levels.ndim != 1 or not levels.size or not np.isfinite(levels).all():
        raise UserError(f"Thresholds must be a list of at least one finite number, not {thresholds!r}.")
    return interval(_check_scores(scores, 2)[..., None] > levels, mean, resamples, confidence, seed)


def probability_of_improvement(
    x: ArrayLike, y: ArrayLike, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return the probability that a run of x beats a run of y on the same task, averaged over tasks.

    A tie counts as half a win.
    """
    x, y = _check_scores(x, 2), _check_scores(y, 2)
    if x.shape[1] != y.shape[1]:
        raise UserError(f"Two methods must have the same tasks, and these have {x.shape[1]} and {y.shape[1]}.")
    wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)  # (seeds of x, seeds of y, tasks)

    def evaluate(x_draws: np.ndarray, y_draws: np.ndarray) -> np.ndarray:
        return wins[x_draws[:, :, None], y_draws[:, None], np.arange(x.shape[1])].mean(axis=(1, 2, 3))

    rng = np.random.default_rng(seed)
    draws = [resample_seeds(rng, resamples, *scores.shape) for scores in (x, y)]
    return _percentile_interval(wins.mean(), _in_chunks(evaluate, wins.size, *draws), confidence)


def _check_scores(scores: ArrayLike, *allowed: int) -> np.ndarray:
    """Return scores as a finite float array with one of the allowed numbers of axes (by default at least two)."""
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


def _pool_runs(scores: ArrayLike) -> np.ndarray:
    """Merge seeds and tasks into one axis, the last."""
    array = _check_scores(scores)
    return np.ascontiguousarray(np.moveaxis(array.reshape(-1, *array.shape[2:]), 0, -1))


def _in_chunks(function: Callable[..., np.ndarray], numbers_per_draw: int, *draws: np.ndarray) -> np.ndarray:
    """Apply a function to the draws chunk by chunk, so that at most `CHUNK` resampled numbers are in memory."""
    size = max(1, CHUNK // numbers_per_draw)
    starts = range(0, len(draws[0]), size)
    return np.concatenate([function(*(d[start : start + size] for d in draws)) for start in starts], axis=-1)


def _percentile_interval(point: np.ndarray, values: np.ndarray, confidence: float) -> Interval:
    if not 0 < confidence < 1:
        raise UserError(f"confidence is {confidence}; it must be above 0 and below 1, for example 0.95.")
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2], axis=-1)
    bounds = (np.reshape(bound, point.shape) for bound in (point, low, high))
    return Interval(*(bound if bound.ndim else float(bound) for bound in bounds))
