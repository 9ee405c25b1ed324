"""Figures of returns: all methods compared over all tasks, and the learning curves of each task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from isqn.analysis import stats
from isqn.analysis.stats import Interval
from isqn.envs import atari
from isqn.report.charts import MAX_LINES, Chart, Figure, Series, interval_series, nonempty_figure
from isqn.report.collect import CollectedRuns, unit_of
from isqn.report.compare import Comparison, interval, mean_return, profile
from isqn.study.grid import Cell

LABELS = {"target_update_period": "target update period T", "num_bellman_iterations": "K"}


# -- all tasks together ---------------------------------------------------------------------------------------------


def comparison_figures(collected: CollectedRuns, comparison: Comparison) -> Iterator[Figure]:
    aucs, panels = comparison.aucs, collected.panels
    caption = f"Area under the learning curve, divided by that of {collected.baseline}. {comparison.caption}"
    if collected.study and collected.study.along:
        charts = tuple(
            _ablation_chart(title, panel, collected.study.along, aucs, "normalised AUC", 1.0)
            for title, panel in panels.items()
        )
        yield Figure("ablation", "Ablation", caption, charts)
    else:
        charts = tuple(
            _bar_chart({name: aucs[cell.method] for name, cell in panel.items()}, "normalised AUC", 1.0, title)
            for title, panel in panels.items()
        )
        yield Figure("auc", "Normalised area under the curve", caption, charts)
    if max(map(len, panels.values())) <= MAX_LINES:

        def line_charts(make_series: Callable[[str], Series], xlabel: str, ylabel: str) -> tuple[Chart, ...]:
            return tuple(
                Chart("lines", {name: make_series(cell.method) for name, cell in panel.items()}, title, xlabel, ylabel)
                for title, panel in panels.items()
            )

        scores = comparison.scores
        x, xlabel = _common_axis([cell.config for cell in collected.cells], len(comparison.results.runs[0].returns))
        charts = line_charts(
            lambda method: interval_series(x, interval(scores[method])), xlabel, "IQM of normalised returns"
        )
        caption = f"Mean {return_name(collected)} of each epoch. {comparison.caption}"
        yield Figure("curves", "Learning curves", caption, charts)
        means = {method: score.mean(axis=2) for method, score in scores.items()}
        levels = np.linspace(0, max(1.0, *(np.max(m) for m in means.values())), 61)
        charts = line_charts(
            lambda method: interval_series(levels, profile(means[method], levels)),
            "normalised return",
            "share of runs above",
        )
        caption = (
            f"Share of runs whose mean normalised return over training is above a value; {comparison.scale}. "
            f"Over {comparison.sample}."
        )
        yield Figure("profile", "Performance profile", caption, charts)
    if 0 < len(comparison.improvements) <= MAX_LINES:
        caption = (
            "Probability that a run has a larger area under its curve than a run of the baseline on the same task. "
            f"Over {comparison.sample}."
        )
        yield Figure(
            "improvement",
            f"Probability of improvement over {collected.baseline}",
            caption,
            (_bar_chart(comparison.improvements, f"P(beats {collected.baseline})", 0.5),),
        )


def _bar_chart(values: dict[str, Interval], ylabel: str, reference: float, title: str = "") -> Chart:
    series = {name: interval_series(None, value) for name, value in values.items()}
    return Chart("bars", series, title=title, ylabel=ylabel, reference=reference)


def _ablation_chart(
    title: str,
    panel: dict[str, Cell],
    along: str,
    values: dict[str, Interval],
    ylabel: str,
    reference: float | None = None,
) -> Chart:
    """Draw lines over the setting that varies. A method that does not depend on it is a horizontal line."""
    lines: dict[str, dict[float, Interval]] = {}
    series = {}
    for cell in panel.values():
        if cell.method not in values:
            continue
        if cell.position is None:
            series[cell.line] = interval_series(None, values[cell.method])
        else:
            lines.setdefault(cell.line, {})[cell.position] = values[cell.method]
    for name, points in lines.items():
        x = sorted(points)
        series[name] = interval_series(np.array(x), Interval(*np.array([points[position] for position in x]).T))
    label = LABELS.get(along, along.replace("_", " "))
    log_x = all(position > 0 for points in lines.values() for position in points)
    return Chart("lines", series, title=title, xlabel=label, ylabel=ylabel, log_x=log_x, reference=reference)


def _common_axis(configs: list[Any], epochs: int) -> tuple[np.ndarray, str]:
    """Return the ends of the epochs and their unit.

    The unit is frames or steps if all tasks agree, else the share of training, else the number of the epoch.
    """
    axes = [_epoch_ends(config, epochs) for config in configs]
    x, label = axes[0]
    if all(other == label and np.array_equal(ends, x) for ends, other in axes):
        return x, label
    shares = {tuple(100 * config.epoch_end(e) / config.length for e in range(epochs)) for config in configs}
    if len(shares) == 1:
        return np.array(shares.pop()), "share of training in %"
    return np.arange(1.0, epochs + 1), "epoch"


def return_name(collected: CollectedRuns) -> str:
    return "evaluation return" if collected.is_offline else "training return"


def _epoch_ends(config: Any, epochs: int) -> tuple[np.ndarray, str]:
    """Return the ends of the epochs in the unit of the task, and the unit."""
    steps = np.array([config.epoch_end(epoch) for epoch in range(epochs)], np.float64)
    unit = unit_of(config.env_id, config.unit)
    return atari.find_protocol(config.protocol).action_repeat * steps if unit == "frames" else steps, unit


# -- each task ------------------------------------------------------------------------------------------------------


def task_figures(collected: CollectedRuns) -> Iterator[Figure]:
    if collected.study and collected.study.along:
        charts = []
        for task in collected.tasks:
            by_method = {method: mean_return(collected, task, method) for method in collected.methods}
            means = {method: value for method, value in by_method.items() if value}
            for title, panel in collected.panels.items():
                name = _panel_title(task, title)
                charts.append(_ablation_chart(name, panel, collected.study.along, means, "mean return over training"))
        caption = "Mean over seeds and epochs of the return, not normalised, with 95 % intervals."
        yield from nonempty_figure("ablation-tasks", "Ablation by task", caption, charts)
    if max(map(len, collected.panels.values())) > MAX_LINES:
        return
    charts = []
    for task in collected.tasks:
        for title, panel in collected.panels.items():
            series, xlabel = {}, ""
            for label, cell in panel.items():
                runs = [one for one in collected.runs_of(task, cell.method) if one.returns]
                if runs:
                    shortest = min(len(one.returns) for one in runs)
                    returns = np.array([one.returns[:shortest] for one in runs])
                    x, xlabel = _epoch_ends(runs[0].config, shortest)
                    series[label] = interval_series(x, interval(returns[:, None], stats.mean))._replace(seeds=returns)
            name = _panel_title(task, title)
            charts.append(Chart("lines", series, title=name, xlabel=xlabel, ylabel="mean return of an epoch"))
    caption = (
        f"Mean over seeds of the mean {return_name(collected)} of each epoch, not normalised, with 95 % intervals if "
        "there are several seeds."
    )
    yield from nonempty_figure("tasks", "Learning curves by task", caption, charts)


def _panel_title(task: str, panel: str) -> str:
    return f"{task}, {panel}" if panel else task
