"""Build a report from collected runs: select the numbers and arrange them in charts and tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from isqn.analysis.results import IncomparableError, Results, gather
from isqn.config.toml import to_toml
from isqn.report import tables
from isqn.report.charts import Figure, Report, Table
from isqn.report.collect import CollectedRuns
from isqn.report.compare import Comparison, compare
from isqn.report.metric_figures import metric_figures, parameter_figure, work_figure
from isqn.report.return_figures import comparison_figures, task_figures
from isqn.study.grid import to_toml as study_toml
from isqn.types import UserError

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
        _require_grid(collected)
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

    figures = _add_remark(comparison_figures(collected, comparison), general_remark) if comparison else []
    figures += _add_remark(task_figures(included), remark)
    figures += [*parameter_figure(collected), *_add_remark(metric_figures(included), remark)]
    (by_task,) = _add_remark([tables.returns_by_task(included)], remark)
    others = [by_task] if comparison else []
    others += _add_remark([*tables.games(included), *tables.probes(included)], remark)
    others.append(tables.sizes(collected))
    if collected.study and collected.study.flops:
        work = tables.measure_work(collected)
        figures += work_figure(work)
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


def _require_grid(collected: CollectedRuns) -> None:
    """Refuse to compare runs that no study asked for if not every method was trained on every task."""
    methods = {task: [cell.method for cell in collected.cells if cell.task == task] for task in collected.tasks}
    if not collected.study and any(set(names) != set(collected.methods) for names in methods.values()):
        listed = "; ".join(f"{task}: {', '.join(names)}" for task, names in methods.items())
        raise IncomparableError(
            f"The methods are shown task by task and not compared, because not all have runs on all tasks ({listed})."
        )


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
