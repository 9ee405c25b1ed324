"""Build a report from collected runs: select the numbers and arrange them in charts and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from isqn.analysis import stats
from isqn.analysis.results import IncomparableError, Results, gather
from isqn.analysis.stats import Interval
from isqn.config.toml import to_toml
from isqn.report import tables
from isqn.report.charts import Chart, Figure, Report, Series, Table
from isqn.report.collect import CollectedRuns, Rows, unit_of
from isqn.report.compare import Comparison, compare, interval, mean_return, profile
from isqn.study.grid import Cell
from isqn.study.grid import to_toml as study_toml
from isqn.types import UserError

MAX_LINES = 10  # in a panel of curves
MAX_POINTS = 250  # of a line over training
AVERAGING_NOTE = f"With more than {MAX_POINTS} rows, adjacent rows are averaged."
LABELS = {"target_update_period": "target update period T", "num_bellman_iterations": "K"}
METRICS = {
    "effective_rank": "effective rank of the features (srank)",
    "dormant_share": "share of dormant units",
    "head_cosine": "cosine between the weights of neighbouring heads",
    "batch_norm_deviation": "standard deviation of the input of BatchNorm",
    "win_rate": "share of games won",
    "cloned_return": "return of the cloned policy alone",
    "value_correlation": "correlation of V with the observed return",
}

Item = TypeVar("Item", Figure, Table)


class Options(NamedTuple):
    """Treatment of runs that are missing, and of runs with different protocols."""

    missing: str = "fail"
    pool_protocols: bool = False


def build(collected: CollectedRuns, options: Options, *, watching: bool = False) -> tuple[Report, Comparison | None]:
    """Build the report, and the comparison of the methods that is in it.

    The comparison is None if the returns have no common scale. With `watching`, unfinished runs are truncated to the
    shortest, and whatever cannot be compared yet is left out.
    """
    results: Results | None = None
    comparison: Comparison | None = None
    notes: list[str] = []
    missing = "truncate" if watching else options.missing
    planned = (collected.tasks, collected.methods, collected.seeds)
    try:
        results = gather(collected.runs, *planned, missing=missing, pool_protocols=options.pool_protocols)
        notes += results.notes
        comparison = compare(collected, results)
    except UserError as error:
        if not (watching or isinstance(error, IncomparableError)):
            raise
        notes.append(str(error))
    notes += collected.data_notes
    if collected.num_unfinished or collected.num_not_started:
        notes.append(
            f"Of {len(collected.runs) + collected.num_not_started} runs, unfinished: {collected.num_unfinished}, not "
            f"started: {collected.num_not_started}; see the table of runs."
        )
    general_remark = " ".join(results.notes) if results else ""
    if results and not watching:
        included, remark = replace(collected, runs=results.runs), general_remark
    else:
        in_progress = "Training is in progress: a line ends where the shortest run of its seeds ends."
        included, remark = collected, in_progress * bool(collected.num_unfinished)

    figures = _add_remark(_comparison_figures(collected, comparison), general_remark) if comparison else []
    figures += _add_remark(_task_figures(included), remark)
    figures += [*_parameter_figure(collected), *_add_remark(_metric_figures(included), remark)]
    (by_task,) = _add_remark([tables.returns_by_task(included)], remark)
    others = [by_task] if comparison else []
    others += _add_remark([*tables.games(included), *tables.probes(included)], remark)
    others.append(tables.sizes(collected))
    if collected.study and collected.study.flops:
        work = tables.measure_work(collected)
        figures += _work_figure(work)
        others.append(tables.work(work))
    others += [tables.runs(collected), tables.energy(collected.runs)]
    others += [tables.commands(collected), tables.software(collected)]
    headline = _add_remark([tables.headline(collected, comparison)], general_remark)[0] if comparison else by_task
    report = Report(
        title=collected.name,
        question=collected.description,
        notes=tuple(notes),
        headline=headline,
        figures=tuple(figures),
        tables=tuple(others),
        configs=_configs(collected),
        findings=tables.findings(collected, comparison) if comparison else (),
    )
    return report, comparison


def _add_remark(items: Iterable[Item], remark: str) -> list[Item]:
    return [replace(item, remark=remark) for item in items]


def overview(report: Report) -> Figure | None:
    """Return areas, curves and parameters side by side, as in the paper's first figure of each setting."""
    by_name = {figure.name: figure for figure in report.figures}
    if not {"auc", "curves", "parameters"} <= set(by_name) or len(by_name["auc"].charts) > 1:
        return None
    sizes = by_name["parameters"].charts
    parameters_title = "parameters" if len(sizes) == 1 else f"parameters, {sizes[0].title}"
    titles = {"auc": "area under the curve", "curves": "learning curves", "parameters": parameters_title}
    charts = [replace(by_name[name].charts[0], title=title) for name, title in titles.items()]
    return replace(by_name["auc"], name="overview", charts=tuple(charts))


def _configs(collected: CollectedRuns) -> dict[str, str]:
    """Return the study, and the settings of one run of each method and task. The other runs differ in their seed."""
    configs = {"study.toml": study_toml(collected.study, collected.folder)} if collected.study else {}
    for cell in collected.cells:
        runs = collected.runs_of(cell.task, cell.method)
        config = runs[0].config if runs else cell.config.replace(seed=collected.seeds[0])
        configs[f"{cell.task}, {cell.method}, seed {config.seed}"] = to_toml(config)
    return configs


def _series(x: np.ndarray | None, value: Interval) -> Series:
    point, low, high = (np.atleast_1d(part) for part in value)
    return Series(point, low, high, x) if np.isfinite(low).any() else Series(point, x=x)


# -- all tasks together ---------------------------------------------------------------------------------------------


def _comparison_figures(collected: CollectedRuns, comparison: Comparison) -> Iterator[Figure]:
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
        charts = line_charts(lambda method: _series(x, interval(scores[method])), xlabel, "IQM of normalised returns")
        caption = f"Mean {return_name(collected)} of each epoch. {comparison.caption}"
        yield Figure("curves", "Learning curves", caption, charts)
        means = {method: score.mean(axis=2) for method, score in scores.items()}
        levels = np.linspace(0, max(1.0, *(np.max(m) for m in means.values())), 61)
        charts = line_charts(
            lambda method: _series(levels, profile(means[method], levels)), "normalised return", "share of runs above"
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
    series = {name: _series(None, value) for name, value in values.items()}
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
            series[cell.line] = _series(None, values[cell.method])
        else:
            lines.setdefault(cell.line, {})[cell.position] = values[cell.method]
    for name, points in lines.items():
        x = sorted(points)
        series[name] = _series(np.array(x), Interval(*np.array([points[position] for position in x]).T))
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
    return "evaluation return" if collected.results_table == "evaluations" else "training return"


def _epoch_ends(config: Any, epochs: int) -> tuple[np.ndarray, str]:
    """Return the ends of the epochs in the unit of the task, and the unit."""
    steps = np.array([config.epoch_end(epoch) for epoch in range(epochs)], np.float64)
    unit = unit_of(config.env_id, config.unit)
    return 4 * steps if unit == "frames" else steps, unit


# -- each task ------------------------------------------------------------------------------------------------------


def _task_figures(collected: CollectedRuns) -> Iterator[Figure]:
    if collected.study and collected.study.along:
        charts = []
        for task in collected.tasks:
            by_method = {method: mean_return(collected, task, method) for method in collected.methods}
            means = {method: value for method, value in by_method.items() if value}
            for title, panel in collected.panels.items():
                name = _panel_title(task, title)
                charts.append(_ablation_chart(name, panel, collected.study.along, means, "mean return over training"))
        caption = "Mean over seeds and epochs of the return, not normalised, with 95 % intervals."
        yield from _figure_of("ablation-tasks", "Ablation by task", caption, charts)
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
                    series[label] = _series(x, interval(returns[:, None], stats.mean))._replace(seeds=returns)
            name = _panel_title(task, title)
            charts.append(Chart("lines", series, title=name, xlabel=xlabel, ylabel="mean return of an epoch"))
    caption = (
        f"Mean over seeds of the mean {return_name(collected)} of each epoch, not normalised, with 95 % intervals if "
        "there are several seeds."
    )
    yield from _figure_of("tasks", "Learning curves by task", caption, charts)


def _panel_title(task: str, panel: str) -> str:
    return f"{task}, {panel}" if panel else task


# -- metrics over training ------------------------------------------------------------------------------------------


def _metric_figures(collected: CollectedRuns) -> Iterator[Figure]:
    for name, description in METRICS.items():
        charts = []
        for task in collected.tasks:
            rows = {method: collected.column(task, method, name) for method in collected.methods}
            charts.append(_training_chart(collected, task, rows, description))
        title = description[0].upper() + description[1:]
        caption = f"Mean over seeds of the {description}. {AVERAGING_NOTE}"
        yield from _figure_of(name.replace("_", "-"), title, caption, charts)
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
    yield from _figure_of("target-churn", "Target churn", f"{caption}. {AVERAGING_NOTE}", charts)


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
    yield from _figure_of("gradient-cosine", "Cosine between gradients", caption, charts)


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
    yield from _figure_of("weights", "Learned weights", caption, charts)


def _mean_series(x: np.ndarray, values: np.ndarray) -> Series:
    """Average over seeds, and over groups of adjacent rows if there are more than `MAX_POINTS`."""
    group = -(-len(x) // MAX_POINTS)
    length = len(x) // group * group
    means = values[:, :length].reshape(len(values), -1, group).mean(axis=2)
    return _series(x[group - 1 : length : group], interval(means[:, None], stats.mean))


def _training_chart(
    collected: CollectedRuns, task: str, rows: Mapping[str, Rows | None], ylabel: str, reference: float | None = None
) -> Chart:
    series = {label: _mean_series(*values) for label, values in rows.items() if values}
    return Chart("lines", series, title=task, xlabel=collected.unit(task), ylabel=ylabel, reference=reference)


def _figure_of(name: str, title: str, caption: str, charts: Iterable[Chart]) -> Iterator[Figure]:
    """Yield a figure of the charts that are not empty, if there are any."""
    nonempty = tuple(chart for chart in charts if chart.series)
    if nonempty:
        yield Figure(name, title, caption, nonempty)


# -- cost -----------------------------------------------------------------------------------------------------------


def _parameter_figure(collected: CollectedRuns) -> Iterator[Figure]:
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
    yield from _figure_of("parameters", "Parameters", "Parameters of the network and of its target copies.", charts)


def _work_figure(rows: list[tables.Work]) -> Iterator[Figure]:
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
    yield from _figure_of("work", "Compute and time", caption, charts)
