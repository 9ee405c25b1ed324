"""Figures of metrics over training, of the number of parameters, and of the cost of an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from isqn.analysis import stats
from isqn.report import tables
from isqn.report.charts import MAX_LINES, Chart, Figure, Series, interval_series, nonempty_figure
from isqn.report.collect import CollectedRuns, Rows
from isqn.report.compare import interval

MAX_POINTS = 250  # of a line over training
AVERAGING_NOTE = f"With more than {MAX_POINTS} rows, adjacent rows are averaged."
METRICS = {
    "effective_rank": "effective rank of the features (srank)",
    "dormant_share": "share of dormant units",
    "head_cosine": "cosine between the weights of neighbouring heads",
    "batch_norm_deviation": "standard deviation of the input of BatchNorm",
    "win_rate": "share of games won",
    "cloned_return": "return of the cloned policy alone",
    "value_correlation": "correlation of V with the observed return",
}


def metric_figures(collected: CollectedRuns) -> Iterator[Figure]:
    for name, description in METRICS.items():
        charts = []
        for task in collected.tasks:
            rows = {method: collected.column(task, method, name) for method in collected.methods}
            charts.append(_training_chart(collected, task, rows, description))
        title = description[0].upper() + description[1:]
        caption = f"Mean over seeds of the {description}. {AVERAGING_NOTE}"
        yield from nonempty_figure(name.replace("_", "-"), title, caption, charts)
    yield from _churn_figure(collected)
    yield from _cosine_figure(collected)
    yield from _weight_figure(collected)


def _churn_figure(collected: CollectedRuns) -> Iterator[Figure]:
    """Draw the target churn, divided by that of the target-free agent if there is one, as in the paper."""
    ylabel, reference = "target churn", None
    caption = "Mean absolute change of the regression targets of a held-out batch in one update. 0: fixed targets"
    if collected.target_free:
        ylabel, reference = "target churn / that of TF", 1.0
        caption += ", as with a target network; 1: targets that change as much as those of the target-free agent"
    charts = []
    for task in collected.tasks:
        rows = {method: collected.target_churn(task, cell) for method, cell in collected.methods.items()}
        charts.append(_training_chart(collected, task, rows, ylabel, reference))
    yield from nonempty_figure("target-churn", "Target churn", f"{caption}. {AVERAGING_NOTE}", charts)


def _cosine_figure(collected: CollectedRuns) -> Iterator[Figure]:
    """Draw the gradient cosines of the iterated shared agent with the smallest K, as in the paper."""
    shared = {m: cell.config for m, cell in collected.methods.items() if cell.config.scheme == "iterated-shared"}
    method = min(shared, key=lambda m: shared[m].num_bellman_iterations, default="")
    columns = {
        f"{method} and target-based": "gradient_cosine_own_tb",
        "target-free and target-based": "gradient_cosine_tf_tb",
    }
    charts = []
    for task in collected.tasks:
        rows = {label: collected.column(task, method, name) for label, name in columns.items()}
        charts.append(_training_chart(collected, task, rows, "cosine of gradients"))
    caption = f"Cosine between the gradients of different losses at the parameters of {method}. {AVERAGING_NOTE}"
    yield from nonempty_figure("gradient-cosine", "Cosine between gradients", caption, charts)


def _weight_figure(collected: CollectedRuns) -> Iterator[Figure]:
    learned = [
        method
        for method, cell in collected.methods.items()
        if getattr(cell.config, "meta_gradient", "none") != "none"  # a setting that not all agents have
    ]
    charts = []
    for task in collected.tasks:
        for method in learned:
            pairs = range(1, collected.methods[method].config.target_scheme.num_pairs + 1)
            rows = {f"pair {k}": collected.column(task, method, f"pair_weight_{k}") for k in pairs}
            title = task if len(learned) == 1 else f"{task}, {method}"
            charts.append(replace(_training_chart(collected, task, rows, "weight of the pair", 1.0), title=title))
    caption = (
        "Learned weight of the loss of each pair of heads. The mean of the weights is 1; fixed weights would all be 1. "
        f"{AVERAGING_NOTE}"
    )
    yield from nonempty_figure("weights", "Learned weights", caption, charts)


def _mean_series(x: np.ndarray, values: np.ndarray) -> Series:
    """Average over seeds, and over groups of adjacent rows if there are more than `MAX_POINTS`."""
    group = -(-len(x) // MAX_POINTS)
    length = len(x) // group * group
    means = values[:, :length].reshape(len(values), -1, group).mean(axis=2)
    return interval_series(x[group - 1 : length : group], interval(means[:, None], stats.mean))


def _training_chart(
    collected: CollectedRuns, task: str, rows: Mapping[str, Rows | None], ylabel: str, reference: float | None = None
) -> Chart:
    series = {label: _mean_series(*values) for label, values in rows.items() if values}
    return Chart("lines", series, title=task, xlabel=collected.unit(task), ylabel=ylabel, reference=reference)


# -- cost -----------------------------------------------------------------------------------------------------------


def parameter_figure(collected: CollectedRuns) -> Iterator[Figure]:
    """Draw the number of parameters. Tasks with networks of the same sizes share a panel."""
    if len(collected.methods) > MAX_LINES:
        return
    tasks_by_counts: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for task in collected.tasks:
        sizes = {
            cell: size.total_parameters for cell in collected.cells if cell.task == task and (size := tables.size(cell))
        }
        in_panels = {(cell.in_panel, count) for cell, count in sizes.items()}
        same_in_all_panels = len(in_panels) == len(dict(in_panels))  # then one bar stands for all panels
        names = {cell.in_panel if same_in_all_panels else cell.method: count for cell, count in sizes.items()}
        tasks_by_counts.setdefault(tuple(names.items()), []).append(task)
    charts = []
    for counts, tasks in tasks_by_counts.items():
        series = {method: Series(np.array([float(count)])) for method, count in counts}
        title = tasks[0] if len(tasks) == 1 else f"{tasks[0]} and {len(tasks) - 1} more"
        charts.append(Chart("bars", series, title=title, ylabel="parameters"))
    yield from nonempty_figure(
        "parameters", "Parameters", "Parameters of the network and of its target copies.", charts
    )


def work_figure(rows: list[tables.Work]) -> Iterator[Figure]:
    """Draw the FLOPs of an update, and the time of a million steps at the speed measured in training."""
    flops, hours = {}, {}
    for row in rows:
        name = row.method if len({other.task for other in rows}) == 1 else f"{row.method}, {row.task}"
        flops[name] = Series(np.array([row.flops]))
        if row.rates:
            measures = (np.median, np.min, np.max) if len(row.rates) > 1 else (np.median,)
            hours[name] = Series(*(np.array([measure(row.hours)]) for measure in measures))
    charts = [
        Chart("bars", flops, title="work of an update", ylabel="FLOPs"),
        Chart("bars", hours, title="time of a million steps", ylabel="hours"),
    ]
    caption = (
        "FLOPs as counted by the compiler. Hours at the median speed of a run: the median over runs, with the fastest "
        "and the slowest run as the interval."
    )
    yield from nonempty_figure("work", "Compute and time", caption, charts)
