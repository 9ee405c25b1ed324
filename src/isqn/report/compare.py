"""Comparison of all methods by their AUC, divided by that of the baseline (paper, appendix A)."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from isqn.analysis import stats
from isqn.analysis.results import IncomparableError, Results, Scores, known_random_return, normalise
from isqn.analysis.stats import Interval
from isqn.report.collect import CollectedRuns
from isqn.train.evaluate import random_return
from isqn.train.progress import say
from isqn.types import UserError


class Comparison(NamedTuple):
    """Normalised scores and statistics of all methods."""

    results: Results
    scores: Scores
    scale: str  # description of the returns that count as 0 and 1
    aucs: dict[str, Interval]  # method -> IQM of its AUC, divided by that of the baseline in its panel
    improvements: dict[str, Interval]  # method -> probability that it beats that baseline; without the baseline itself

    @property
    def caption(self) -> str:
        """Sentence for captions: the statistic, the sample and the scale."""
        return f"IQM over {self.sample}; {self.scale}."

    @property
    def sample(self) -> str:
        """Number of tasks and seeds, and the kind of interval."""
        seeds, tasks = len(self.results.seeds), len(self.results.tasks)
        intervals = "95 % stratified bootstrap intervals" if seeds > 1 else "no intervals (only one seed)"
        warning = f" (unreliable with only {seeds} seeds)" if 1 < seeds < 5 else ""
        return f"{tasks} task{'s' * (tasks > 1)} x {seeds} seed{'s' * (seeds > 1)}, {intervals}{warning}"


def compare(collected: CollectedRuns, results: Results) -> Comparison:
    """Compare all methods with the baseline.

    Raises `IncomparableError` if the returns of a task cannot be normalised, or the AUC of a baseline is not above 0.
    """
    first_baseline = next(iter(collected.panels.values()))[collected.baseline].method
    references = {task: collected.references.get(task, (None, None)) for task in results.tasks}
    for task, (random, reference) in references.items():
        config = next(cell.config for cell in collected.cells if cell.task == task)
        changes = {"env_kwargs": config.env_kwargs, "env_wrappers": config.env_wrappers}
        if random is None and (any(changes.values()) or known_random_return(task) is None):
            references[task] = _measure_random_return(task, **changes), reference
    scores, scale = normalise(results, first_baseline, references)
    aucs, improvements = {}, {}
    for panel in collected.panels.values():
        baseline = panel[collected.baseline].method
        unit = stats.iqm(stats.auc(scores[baseline]))
        if not unit > 0:
            raise IncomparableError(
                f"Methods cannot be compared with {baseline}: the IQM of its area under the curve is {unit:.4g} and "
                f"must be above 0, where {scale}."
            )
        for cell in panel.values():
            auc = stats.auc(scores[cell.method])
            aucs[cell.method] = stats.relative(interval(auc), unit)
            if cell.method != baseline:
                improvement = stats.probability_of_improvement(auc, stats.auc(scores[baseline]))
                improvements[cell.method] = _drop_interval_of_one_seed(improvement, len(auc))
    return Comparison(results, scores, scale, aucs, improvements)


@cache
def _measure_random_return(task: str, **settings: Any) -> float:
    say(f"playing {task} at random, to normalise its returns")
    try:
        return random_return(task, episodes=100, **settings)
    except UserError as error:
        raise IncomparableError(f"The return of random play on {task} is not known: {error}") from None


def interval(scores: np.ndarray, statistic: stats.Statistic = stats.iqm) -> Interval:
    """Return a statistic with its bootstrap interval, which is nan for a single seed."""
    return _drop_interval_of_one_seed(stats.interval(scores, statistic), len(scores))


def mean_return(collected: CollectedRuns, task: str, method: str) -> Interval | None:
    """Return the mean return over seeds and epochs, not normalised, or None if no run has an epoch."""
    means = [np.mean(one.returns) for one in collected.runs_of(task, method) if one.returns]
    return interval(np.array(means)[:, None], stats.mean) if means else None


def profile(scores: np.ndarray, thresholds: np.ndarray) -> Interval:
    """Return the performance profile with its bootstrap interval, which is nan for a single seed."""
    return _drop_interval_of_one_seed(stats.performance_profile(scores, thresholds), len(scores))


def _drop_interval_of_one_seed(value: Interval, seeds: int) -> Interval:
    """Replace the interval of a single seed by nan: resampling one seed gives no information."""
    unknown = np.full_like(value.point, np.nan, dtype=np.float64)
    return value if seeds > 1 else Interval(value.point, unknown, unknown)
