"""All methods on one scale: areas under their curves, divided by that of the baseline (paper, appendix A)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from isqn.analysis import stats
from isqn.analysis.results import Incomparable, Results, Scores, known_random, normalised
from isqn.analysis.stats import Interval
from isqn.report.collect import Collected
from isqn.train.evaluate import random_return
from isqn.train.progress import say
from isqn.types import UserError


class Comparison(NamedTuple):
    results: Results
    scores: Scores
    scale: str  # of the scores, in words
    aucs: dict[str, Interval]  # method -> the IQM of its AUC over that of the baseline in its panel
    improvements: dict[str, Interval]  # method -> how likely it beats that baseline, which itself is not in here

    @property
    def words(self) -> str:
        """What a caption must say of the numbers."""
        return f"IQM over {self.over}; {self.scale}."

    @property
    def over(self) -> str:
        seeds, tasks = len(self.results.seeds), len(self.results.tasks)
        bands = "95 % stratified bootstrap intervals" if seeds > 1 else "without intervals, which need more seeds"
        few = f" (of {seeds} seeds, so not to be relied on)" if 1 < seeds < 5 else ""
        return f"{tasks} task{'s' * (tasks > 1)} x {seeds} seed{'s' * (seeds > 1)}, {bands}{few}"


def compare(collected: Collected, results: Results) -> Comparison:
    """Incomparable where a task or a baseline has no positive scale to divide by."""
    first = next(iter(collected.panels.values()))[collected.baseline].method
    references = {task: collected.references.get(task, (None, None)) for task in results.tasks}
    for task, (random, reference) in references.items():
        if random is None and known_random(task) is None:
            references[task] = _random_play(task), reference
    scores, scale = normalised(results, first, references)
    aucs, improvements = {}, {}
    for panel in collected.panels.values():
        base = panel[collected.baseline].method
        unit = stats.iqm(stats.auc(scores[base]))
        if not unit > 0:
            raise Incomparable(
                f"Nothing can be divided by {base}: the IQM of its area under the curve is {unit:.4g}, where {scale}."
            )
        for cell in panel.values():
            mine = stats.auc(scores[cell.method])
            aucs[cell.method] = stats.relative(interval(mine), unit)
            if cell.method != base:
                better = stats.probability_of_improvement(mine, stats.auc(scores[base]))
                improvements[cell.method] = _of_seeds(better, len(mine))
    return Comparison(results, scores, scale, aucs, improvements)


@cache
def _random_play(task: str) -> float:
    say(f"playing {task} at random, to know where its scale begins")
    try:
        return random_return(task, episodes=100)
    except UserError as error:
        raise Incomparable(f"Where the scale of {task} begins is not known: {error}") from None


def interval(scores: np.ndarray, statistic: stats.Statistic = stats.iqm) -> Interval:
    return _of_seeds(stats.interval(scores, statistic), len(scores))


def mean_return(collected: Collected, task: str, method: str) -> Interval | None:
    """Over seeds and epochs, as the environment counts."""
    means = [np.mean(one.returns) for one in collected.of(task, method) if one.returns]
    return interval(np.array(means)[:, None], stats.mean) if means else None


def profile(scores: np.ndarray, thresholds: np.ndarray) -> Interval:
    return _of_seeds(stats.performance_profile(scores, thresholds), len(scores))


def _of_seeds(value: Interval, seeds: int) -> Interval:
    """A single seed, resampled, is always itself: that is no interval."""
    unknown = np.full_like(value.point, np.nan, dtype=np.float64)
    return value if seeds > 1 else Interval(value.point, unknown, unknown)
