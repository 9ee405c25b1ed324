"""From runs on disk to a report: which numbers are shown, and in which charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from isqn.analysis import stats
from isqn.analysis.results import Incomparable, Results, gather
from isqn.analysis.stats import Interval
from isqn.experiments.config import Config, to_toml
from isqn.report import tables
from isqn.report.charts import Chart, Figure, Report, Series, Table
from isqn.report.collect import Collected, Rows, unit_of
from isqn.report.compare import Comparison, compare, interval, mean_return, profile
from isqn.study.grid import Cell
from isqn.study.grid import to_toml as study_toml
from isqn.types import UserError

MOST_LINES = 10  # in one panel of curves
MOST_POINTS = 250  # of one line of what was recorded
AVERAGED = f"Where there are more than {MOST_POINTS} rows, neighbours are averaged."
LABELS = {"target_update_period": "target update period T", "num_bellman_iterations": "K"}
PROBES = {
    "effective_rank": "effective rank of the features (srank)",
    "dormant_share": "share of dormant units",
    "head_cosine": "cosine between the weights of neighbouring heads",
    "batch_norm_deviation": "deviation of what comes into BatchNorm",
    "win_rate": "share of games whose word was found",
    "cloned_return": "return of the policy without the values",
    "value_correlation": "correlation of V with the return that followed",
}

Shown = TypeVar("Shown", Figure, Table)


class Options(NamedTuple):
    missing: str = "fail"
    pool_protocols: bool = False


def build(collected: Collected, options: Options, *, watching: bool = False) -> tuple[Report, Comparison | None]:
    """The report, and the comparison in it.

    There is none if the runs have no common scale; and while watching, whatever is there will do.
    """
    results: Results | None = None
    compared: Comparison | None = None
    notes: list[str] = []
    missing = "truncate" if watching else options.missing
    planned = (collected.tasks, collected.methods, collected.seeds)
    try:
        results = gather(collected.runs, *planned, missing=missing, pool_protocols=options.pool_protocols)
        notes += results.notes
        compared = compare(collected, results)
    except UserError as error:
        if not (watching or isinstance(error, Incomparable)):
            raise
        notes.append(str(error))
    notes += collected.learned_from
    if collected.going or collected.waiting:
        of = f"Of {len(collected.runs) + collected.waiting} runs"
        notes.append(
            f"{of}, not finished: {collected.going}, not begun: {collected.waiting}; see the table of what ran."
        )
    about_all = " ".join(results.notes) if results else ""
    if results and not watching:
        shown, remark = replace(collected, runs=results.runs), about_all
    else:
        shown, remark = collected, "Runs are going: a line ends with the shortest of its seeds." * bool(collected.going)

    figures = _remarked(_of_all(collected, compared), about_all) if compared else []
    figures += _remarked(_of_tasks(shown), remark)
    figures += [*_parameters(collected), *_remarked(_of_metrics(shown), remark)]
    (by_task,) = _remarked([tables.by_task(shown)], remark)
    others = [by_task] if compared else []
    others += _remarked([*tables.measures(shown), *tables.probes(shown)], remark)
    others.append(tables.sizes(collected))
    if collected.study and collected.study.flops:
        work = tables.work(collected)
        figures += _work(work)
        others.append(tables.work_table(work))
    others += [tables.what_ran(collected), tables.energy(collected.runs)]
    others += [tables.commands(collected), tables.made_with(collected)]
    headline = _remarked([tables.headline(collected, compared)], about_all)[0] if compared else by_task
    report = Report(
        title=collected.name,
        question=collected.about,
        notes=tuple(notes),
        headline=headline,
        figures=tuple(figures),
        tables=tuple(others),
        configs=_configs(collected),
    )
    return report, compared


def _remarked(shown: Iterable[Shown], remark: str) -> list[Shown]:
    return [replace(one, remark=remark) for one in shown]


def overview(report: Report) -> Figure | None:
    """The paper's first figure of a setting: areas, curves and parameters side by side."""
    found = {figure.name: figure for figure in report.figures}
    if not {"auc", "curves", "parameters"} <= set(found) or len(found["auc"].charts) > 1:
        return None
    sizes = found["parameters"].charts
    of_the_first = "parameters" if len(sizes) == 1 else f"parameters, {sizes[0].title}"
    titles = {"auc": "area under the curve", "curves": "learning curves", "parameters": of_the_first}
    charts = [replace(found[name].charts[0], title=title) for name, title in titles.items()]
    return replace(found["auc"], name="overview", charts=tuple(charts))


def _configs(collected: Collected) -> dict[str, str]:
    """Of the study, and of the first run of each method and task: the others differ in their seed."""
    shown = {"study.toml": study_toml(collected.study, collected.folder)} if collected.study else {}
    for cell in collected.cells:
        runs = collected.of(cell.task, cell.method)
        config = runs[0].config if runs else cell.config.replace(seed=collected.seeds[0])
        shown[f"{cell.task}, {cell.method}, seed {config.seed}"] = to_toml(config)
    return shown


def _line(x: np.ndarray | None, value: Interval) -> Series:
    point, low, high = (np.atleast_1d(part) for part in value)
    return Series(point, low, high, x) if np.isfinite(low).any() else Series(point, x=x)


# -- over all tasks ------------------------------------------------------------------------------------------------


def _of_all(collected: Collected, compared: Comparison) -> Iterator[Figure]:
    aucs, panels = compared.aucs, collected.panels
    about = f"Area under the learning curve, divided by that of {collected.baseline}. {compared.words}"
    if collected.study and collected.study.along:
        charts = tuple(
            _ablation(title, panel, collected.study.along, aucs, "normalised AUC", 1.0)
            for title, panel in panels.items()
        )
        yield Figure("ablation", "Ablation", about, charts)
    else:
        charts = tuple(
            _bars({name: aucs[cell.method] for name, cell in panel.items()}, "normalised AUC", 1.0, title)
            for title, panel in panels.items()
        )
        yield Figure("auc", "Normalised area under the curve", about, charts)
    if max(map(len, panels.values())) <= MOST_LINES:

        def lines(line_of: Callable[[str], Series], xlabel: str, ylabel: str) -> tuple[Chart, ...]:
            """A panel each, of the methods in it."""
            return tuple(
                Chart("lines", {name: line_of(cell.method) for name, cell in panel.items()}, title, xlabel, ylabel)
                for title, panel in panels.items()
            )

        scores = compared.scores
        x, xlabel = _common_axis([cell.config for cell in collected.cells], len(compared.results.runs[0].returns))
        charts = lines(lambda method: _line(x, interval(scores[method])), xlabel, "IQM of normalised returns")
        yield Figure(
            "curves", "Learning curves", f"Mean {kind_of_return(collected)} of each epoch. {compared.words}", charts
        )
        means = {method: score.mean(axis=2) for method, score in scores.items()}
        at = np.linspace(0, max(1.0, *(np.max(m) for m in means.values())), 61)
        charts = lines(lambda method: _line(at, profile(means[method], at)), "normalised return", "share of runs above")
        about = (
            f"Share of runs whose mean normalised return over training is above a value; {compared.scale}. "
            f"Over {compared.over}."
        )
        yield Figure("profile", "Performance profile", about, charts)
    if 0 < len(compared.improvements) <= MOST_LINES:
        about = "How often a run has a larger area under its curve than one of the baseline on the same task."
        yield Figure(
            "improvement",
            f"Probability of improvement over {collected.baseline}",
            f"{about} Over {compared.over}.",
            (_bars(compared.improvements, f"P(beats {collected.baseline})", 0.5),),
        )


def _bars(values: dict[str, Interval], ylabel: str, reference: float, title: str = "") -> Chart:
    series = {name: _line(None, value) for name, value in values.items()}
    return Chart("bars", series, title=title, ylabel=ylabel, reference=reference)


def _ablation(
    title: str,
    panel: dict[str, Cell],
    along: str,
    values: dict[str, Interval],
    ylabel: str,
    reference: float | None = None,
) -> Chart:
    """Lines along what varies; what does not depend on it is a level."""
    lines: dict[str, dict[float, Interval]] = {}
    series = {}
    for cell in panel.values():
        if cell.method not in values:
            continue
        if cell.position is None:
            series[cell.line] = _line(None, values[cell.method])
        else:
            lines.setdefault(cell.line, {})[cell.position] = values[cell.method]
    for name, points in lines.items():
        x = sorted(points)
        series[name] = _line(np.array(x), Interval(*np.array([points[position] for position in x]).T))
    label = LABELS.get(along, along.replace("_", " "))
    log_x = all(position > 0 for points in lines.values() for position in points)
    return Chart("lines", series, title=title, xlabel=label, ylabel=ylabel, log_x=log_x, reference=reference)


def _common_axis(configs: list[Config], epochs: int) -> tuple[np.ndarray, str]:
    """Where epochs end: in frames or steps if all tasks agree, else in per cent, else just their number."""
    axes = [_axis(config, epochs) for config in configs]
    x, label = axes[0]
    if all(other == label and np.array_equal(ends, x) for ends, other in axes):
        return x, label
    shares = {tuple(100 * config.epoch_end(e) / config.length for e in range(epochs)) for config in configs}
    if len(shares) == 1:
        return np.array(shares.pop()), "share of training in %"
    return np.arange(1.0, epochs + 1), "epoch"


def kind_of_return(collected: Collected) -> str:
    return "return of evaluations" if collected.is_offline else "training return"


def _axis(config: Config, epochs: int) -> tuple[np.ndarray, str]:
    steps = np.array([config.epoch_end(epoch) for epoch in range(epochs)], np.float64)
    unit = unit_of(config.env_id, offline=config.is_offline)
    return 4 * steps if unit == "frames" else steps, unit


# -- by task ------------------------------------------------------------------------------------------------------


def _of_tasks(collected: Collected) -> Iterator[Figure]:
    if collected.study and collected.study.along:
        charts = []
        for task in collected.tasks:
            found = {method: mean_return(collected, task, method) for method in collected.methods}
            means = {method: value for method, value in found.items() if value}
            for title, panel in collected.panels.items():
                charts.append(
                    _ablation(_joined(task, title), panel, collected.study.along, means, "mean return over training")
                )
        about = "Over seeds and epochs, as the environment counts, with 95 % intervals."
        yield from _if_any("ablation-tasks", "Ablation, task by task", about, charts)
    if max(map(len, collected.panels.values())) > MOST_LINES:
        return
    charts = []
    for task in collected.tasks:
        for title, panel in collected.panels.items():
            series, xlabel = {}, ""
            for label, cell in panel.items():
                runs = [one for one in collected.of(task, cell.method) if one.returns]
                if runs:
                    shortest = min(len(one.returns) for one in runs)
                    returns = np.array([one.returns[:shortest] for one in runs])
                    x, xlabel = _axis(runs[0].config, shortest)
                    series[label] = _line(x, interval(returns[:, None], stats.mean))._replace(seeds=returns)
            name = _joined(task, title)
            charts.append(Chart("lines", series, title=name, xlabel=xlabel, ylabel="mean return of an epoch"))
    about = (
        f"Mean over seeds of the mean {kind_of_return(collected)} of each epoch, as the environment counts, with 95 % "
        "intervals if there are several seeds."
    )
    yield from _if_any("tasks", "Task by task", about, charts)


def _joined(task: str, panel: str) -> str:
    return f"{task}, {panel}" if panel else task


# -- what was recorded during training ---------------------------------------------------------------------------


def _of_metrics(collected: Collected) -> Iterator[Figure]:
    for name, words in PROBES.items():
        charts = []
        for task in collected.tasks:
            found = {method: collected.recorded(task, method, name) for method in collected.methods}
            charts.append(_over_training(collected, task, found, words))
        yield from _if_any(
            name.replace("_", "-"), words.capitalize(), f"Mean over seeds of the {words}. {AVERAGED}", charts
        )
    yield from _churn(collected)
    yield from _cosines(collected)
    yield from _weights(collected)


def _churn(collected: Collected) -> Iterator[Figure]:
    """As in the paper: divided by that of the target-free agent, if there is one."""
    ylabel, reference = "target churn", None
    about = "How much one update changes the regression targets of a held-out batch. 0: they stand still"
    if collected.target_free:
        ylabel, reference = "target churn / that of TF", 1.0
        about += ", as with a target network; 1: they move as much as the target-free agent's"
    charts = []
    for task in collected.tasks:
        found = {method: collected.churn(task, cell) for method, cell in collected.methods.items()}
        charts.append(_over_training(collected, task, found, ylabel, reference))
    yield from _if_any("target-churn", "Target churn", f"{about}. {AVERAGED}", charts)


def _cosines(collected: Collected) -> Iterator[Figure]:
    """Of the shared agent with the fewest heads, as in the paper."""
    shared = {m: cell.config for m, cell in collected.methods.items() if cell.config.scheme == "iterated-shared"}
    method = min(shared, key=lambda m: shared[m].num_bellman_iterations, default="")
    columns = {
        f"{method} and target-based": "gradient_cosine_own_tb",
        "target-free and target-based": "gradient_cosine_tf_tb",
    }
    charts = []
    for task in collected.tasks:
        found = {label: collected.recorded(task, method, name) for label, name in columns.items()}
        charts.append(_over_training(collected, task, found, "cosine of gradients"))
    about = "Cosine between gradients of different losses at the same parameters, along the training of"
    yield from _if_any("gradient-cosine", "Directions of the gradients", f"{about} {method}. {AVERAGED}", charts)


def _weights(collected: Collected) -> Iterator[Figure]:
    learned = [method for method, cell in collected.methods.items() if cell.config.meta_gradient != "none"]
    charts = []
    for task in collected.tasks:
        for method in learned:
            pairs = range(1, collected.methods[method].config.target_scheme.num_pairs + 1)
            found = {f"pair {k}": collected.recorded(task, method, f"pair_weight_{k}") for k in pairs}
            title = task if len(learned) == 1 else f"{task}, {method}"
            charts.append(replace(_over_training(collected, task, found, "weight of the pair", 1.0), title=title))
    about = f"The learned weight of each Bellman update; they sum to their number, and 1 is the plain sum. {AVERAGED}"
    yield from _if_any("weights", "Learned weights", about, charts)


def _mean_line(x: np.ndarray, values: np.ndarray) -> Series:
    """Over seeds, and over neighbouring rows if there are too many to be seen apart."""
    rows = -(-len(x) // MOST_POINTS)
    whole = len(x) // rows * rows
    means = values[:, :whole].reshape(len(values), -1, rows).mean(axis=2)
    return _line(x[rows - 1 : whole : rows], interval(means[:, None], stats.mean))


def _over_training(
    collected: Collected, task: str, found: Mapping[str, Rows | None], ylabel: str, reference: float | None = None
) -> Chart:
    series = {label: _mean_line(*rows) for label, rows in found.items() if rows}
    return Chart("lines", series, title=task, xlabel=collected.unit(task), ylabel=ylabel, reference=reference)


def _if_any(name: str, title: str, about: str, charts: Iterable[Chart]) -> Iterator[Figure]:
    drawn = tuple(chart for chart in charts if chart.series)
    if drawn:
        yield Figure(name, title, about, drawn)


# -- what a method costs --------------------------------------------------------------------------------------------


def _parameters(collected: Collected) -> Iterator[Figure]:
    """A panel for each network: tasks of the same shapes share one."""
    if len(collected.methods) > MOST_LINES:
        return
    found: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for task in collected.tasks:
        sizes = {
            cell: size.kept_parameters for cell in collected.cells if cell.task == task and (size := tables.size(cell))
        }
        in_panels = {(cell.in_panel, count) for cell, count in sizes.items()}
        alike = len(in_panels) == len(dict(in_panels))  # in all panels, which then need no bars of their own
        names = {cell.in_panel if alike else cell.method: count for cell, count in sizes.items()}
        found.setdefault(tuple(names.items()), []).append(task)
    charts = []
    for counts, tasks in found.items():
        series = {method: Series(np.array([float(count)])) for method, count in counts}
        title = tasks[0] if len(tasks) == 1 else f"{tasks[0]} and {len(tasks) - 1} more"
        charts.append(Chart("bars", series, title=title, ylabel="parameters"))
    yield from _if_any("parameters", "Parameters", "Of the network and the copies that a scheme keeps.", charts)


def _work(rows: list[tables.Work]) -> Iterator[Figure]:
    """FLOPs of an update, and the time that steps take, from the speed that was measured during training."""
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
    about = (
        "FLOPs as the compiler counts them. Hours at the median speed of a run: the median over runs, and the fastest "
        "and the slowest."
    )
    yield from _if_any("work", "Work and time", about, charts)
