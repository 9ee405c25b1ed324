"""Tables of a report: results, probes, sizes, compute, runs, energy, software and commands."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from isqn.agents.registry import make_config
from isqn.analysis import cost, stats
from isqn.analysis.results import Run, format_ranges
from isqn.config.fields import field_names
from isqn.config.run import Run as RunConfig
from isqn.report.charts import Table, Value
from isqn.report.collect import CollectedRuns
from isqn.report.compare import Comparison, interval, mean_return
from isqn.study.grid import Cell
from isqn.train import run
from isqn.train.progress import duration, format_count
from isqn.types import EnvSpec, UserError

# -- results -----------------------------------------------------------------------------------------------------


def headline(collected: CollectedRuns, comparison: Comparison) -> Table:
    rows = []
    for method, cell in collected.methods.items():
        means = comparison.scores[method].mean(axis=2)
        statistics = (stats.iqm, stats.median, stats.mean, stats.optimality_gap)
        network_size = size(cell)
        rows.append(
            (
                method,
                comparison.aucs[method],
                comparison.improvements.get(method),
                *(float(statistic(means)) for statistic in statistics),
                network_size.total_parameters if network_size else None,
            )
        )
    columns = ("method", "normalised AUC", f"P(beats {collected.baseline})", "IQM", "median", "mean", "optimality gap")
    schemes = {cell.config.target_scheme.prefix: cell.config.scheme for cell in collected.methods.values()}
    legend = ", ".join(f"{prefix} is {name}" for prefix, name in schemes.items())
    caption = (
        f"{legend}. Normalised AUC: area under the learning curve, divided by that of {collected.baseline}; P(beats): "
        f"probability that a run has a larger one. {comparison.caption} IQM (interquartile mean), median, mean and "
        "optimality gap (distance below 1) are those of the mean score over training. Parameters kept include "
        f"target copies and are counted on {collected.tasks[0]}."
    )
    return Table("Result", (*columns, "parameters kept"), tuple(rows), caption)


def findings(collected: CollectedRuns, comparison: Comparison) -> tuple[str, ...]:
    """Return the headline in words: the AUC of each method beside that of its baseline, and the verdict."""
    baselines = {panel: cells[collected.baseline] for panel, cells in collected.panels.items()}
    return tuple(
        sentence
        for method, cell in collected.methods.items()
        if (sentence := _finding(cell, baselines[cell.panel], comparison.aucs[method], len(comparison.results.seeds)))
    )


SEEDS_FOR_A_VERDICT = 3  # the interval of two seeds is as wide as their difference, whatever the methods are


def _finding(cell: Cell, baseline: Cell, auc: stats.Interval, seeds: int) -> str:
    if cell.method == baseline.method:
        return ""
    point, low, high = (float(value) for value in auc)
    own, reference = size(cell), size(baseline)
    share = own.total_parameters / reference.total_parameters if own and reference else math.nan
    parameters = f", with {share:.2f} of its parameters" if math.isfinite(share) else ""
    interval = f" [{low:.2f}, {high:.2f}]" if math.isfinite(low) else ""
    verdict = "no difference can be seen"
    if seeds < SEEDS_FOR_A_VERDICT:
        verdict = f"{format_count(seeds, 'seed')} {'is' if seeds == 1 else 'are'} too few to tell"
    elif not low <= 1 <= high:
        verdict = "better" if low > 1 else "worse"
    return f"{cell.method} has {point:.2f}{interval} of the AUC of {baseline.method}{parameters}: {verdict}."


def returns_by_task(collected: CollectedRuns) -> Table:
    rows = [
        (method, *(mean_return(collected, task, method) for task in collected.tasks)) for method in collected.methods
    ]
    caption = "Mean over seeds and epochs, not normalised, with 95 % intervals if there are several seeds."
    return Table("Mean return over training", ("method", *collected.tasks), tuple(rows), caption)


GAME_COLUMNS = {
    "games won": "win_rate",
    "return, policy alone": "cloned_return",
    "games won, policy alone": "cloned_win_rate",
    "five letters": "valid_share",
    "in the word list": "dictionary_share",
    "consistent with clues": "consistent_share",
    "TD error": "td_error",
    "correlation of V": "value_correlation",
}


def games(collected: CollectedRuns) -> list[Table]:
    """Return a table of the games of language agents, if there are any."""
    rows: list[tuple[Value, ...]] = []
    for cell in collected.cells:
        columns = [collected.column(cell.task, cell.method, name) for name in GAME_COLUMNS.values()]
        cell_runs = collected.runs_of(cell.task, cell.method)
        shortest = min((len(one.returns) for one in cell_runs), default=0)
        if any(columns) and shortest:
            returns = np.array([[one.returns[shortest - 1]] for one in cell_runs])
            last: list[Value] = [interval(returns, stats.mean)]
            last += [interval(column[1][:, -1:], stats.mean) if column else None for column in columns]
            rows.append((cell.task, cell.method, *last))
    caption = (
        "Last evaluation: means over seeds, with 95 % intervals if there are several. Games won is a share of games; "
        "five letters, in the word list and consistent with clues are shares of guesses. The TD error (root mean "
        "square) and the correlation of V with the observed return are measured on held-out games."
    )
    names = ("task", "method", "return", *GAME_COLUMNS)
    return [Table("Games at the end", names, tuple(rows), caption)] if rows else []


PROBE_COLUMNS = {
    "effective rank": "effective_rank",
    "dormant share": "dormant_share",
    "head cosine": "head_cosine",
    "BatchNorm input": "batch_norm_deviation",
    "gradient cosine": "gradient_cosine_own_tb",
    "gradient cosine of TF": "gradient_cosine_tf_tb",
}


def probes(collected: CollectedRuns) -> list[Table]:
    """Return a table of the probes, if any were recorded."""
    rows = []
    for cell in collected.cells:
        columns = [collected.column(cell.task, cell.method, name) for name in PROBE_COLUMNS.values()]
        columns.append(collected.target_churn(cell.task, cell))
        if any(columns):
            means = [interval(column[1].mean(axis=1)[:, None], stats.mean) if column else None for column in columns]
            rows.append((cell.task, cell.method, *means))
    if not rows:
        return []
    sentences = {
        "": "Means over training and seeds, with 95 % intervals if there are several seeds.",
        "head cosine": "Head cosine: between the weights of neighbouring heads.",
        "BatchNorm input": "BatchNorm input: its standard deviation.",
        "gradient cosine": "Gradient cosine: between the gradients of the agent's loss and of the target-based loss, "
        "at the agent's parameters. Gradient cosine of TF: between those of the target-free and the target-based loss.",
        "target churn": "Target churn is divided by that of the target-free agent." if collected.target_free else "",
    }
    names = ("task", "method", *PROBE_COLUMNS, "target churn")
    nonempty = [i for i, values in enumerate(zip(*rows, strict=True)) if any(value is not None for value in values)]
    names = tuple(names[i] for i in nonempty)
    caption = " ".join(sentence for name, sentence in sentences.items() if sentence and name in ("", *names))
    return [Table("Probes", names, tuple(tuple(row[i] for i in nonempty) for row in rows), caption)]


# -- cost -----------------------------------------------------------------------------------------------------------


@cache
def _spec(config: RunConfig) -> EnvSpec | None:
    try:
        return run.specification(config)
    except UserError:  # a report can be made where the environment is not installed
        return None


_size = cache(cost.measure_size)


@cache
def _flops(config: RunConfig, spec: EnvSpec) -> float:
    loop = run.loop_of(config)
    # The compiler counts loops over layers and micro-batches only once; `isqn cost` unrolls them.
    return loop.flops(config, spec) if loop.WORK == "update" else math.nan


def spec_of(config: RunConfig) -> EnvSpec | None:
    """Return the specification of a run's environment, or None if it is not installed."""
    known = field_names(type(config))
    settings = {name: getattr(config, name) for name in ("env_id", "protocol", "loop") if name in known}
    return _spec(make_config(config.agent, **settings))


def size(cell: Cell) -> cost.Size | None:
    """Return the size of a method's agent, or None if the environment is not installed."""
    spec = spec_of(cell.config)
    if spec is None:
        return None
    # The id is left out of the cache key: games with the same number of actions have networks of the same size.
    return _size(cell.config.replace(env_id=make_config(cell.config.agent).env_id), dataclasses.replace(spec, id=""))


def sizes(collected: CollectedRuns) -> Table:
    rows = []
    for cell in collected.cells:
        agent_size, spec, cell_runs = size(cell), spec_of(cell.config), collected.runs_of(cell.task, cell.method)
        numbers: tuple[Value, ...] = (None,) * 5
        if agent_size and spec:
            numbers = (
                agent_size.parameters,
                agent_size.copied_parameters,
                f"{agent_size.network_bytes / 1e6:,.2f}",
                f"{agent_size.optimizer_bytes / 1e6:,.2f}",
                f"{run.loop_of(cell.config).replay_memory(cell.config, spec).total / 1e6:,.1f}",
            )
        peak = max(map(peak_megabytes, cell_runs), default=0)
        rows.append((cell.task, cell.method, *numbers, f"{peak:,.0f}" if peak else ""))
    columns = ("task", "method", "parameters", "copied", "network MB", "optimizer MB", "replay MB", "process MB")
    caption = (
        "Copied: parameters of the target copies. Process: peak memory of the process, the maximum over seeds. Cells "
        "are empty if the environment is not installed here."
    )
    return Table("Parameters and memory", columns, tuple(rows), caption)


class Work(NamedTuple):
    """Compute of an update, and speed of the runs, of a method on a task."""

    task: str
    method: str
    flops: float  # per update
    rates: list[float]  # steps per second of each run

    @property
    def hours(self) -> np.ndarray:
        """Hours per million steps of each run."""
        return 1e6 / np.array(self.rates) / 3600


def measure_work(collected: CollectedRuns) -> list[Work]:
    """Return the compute and the speed of every method on every task."""
    rows = []
    for cell in collected.cells:
        spec = spec_of(cell.config)
        flops = _flops(cell.config, spec) if spec else math.nan
        rates = [rate for one in collected.runs_of(cell.task, cell.method) if (rate := steps_per_second(one))]
        rows.append(Work(cell.task, cell.method, flops, rates))
    return rows


def work(rows: Iterable[Work]) -> Table:
    cells = [
        (
            row.task,
            row.method,
            f"{row.flops / 1e6:,.1f}" if math.isfinite(row.flops) else "",
            f"{np.median(row.rates):,.0f}" if row.rates else "",
            float(np.median(row.hours)) if row.rates else None,
        )
        for row in rows
    ]
    caption = (
        "FLOPs as counted by the compiler. Steps include those of all seeds that train in the same program. Speed and "
        "hours are medians over runs."
    )
    columns = ("task", "method", "MFLOP per update", "steps/s", "hours per million steps")
    return Table("Compute and time", columns, tuple(cells), caption)


def steps_per_second(one: Run) -> float | None:
    """Return the median speed over the rows of a run. The mean would include the compilation in the first rows."""
    rates = one.metrics.get("steps_per_second", np.array([]))
    return float(np.median(rates)) if len(rates) else None


def seeds_per_program(one: Run) -> int:
    """Return the number of seeds that were trained in the same program and share its time and memory."""
    return len(one.summary.get("trained_with", ["."]))


def peak_megabytes(one: Run) -> float:
    return float(max(one.metrics.get("memory_mb", ()), default=0.0))


def seconds(one: Run) -> float:
    """Return the training time of a run: the time of its program divided by the number of seeds in it."""
    return float(max(one.metrics.get("seconds", ()), default=0.0)) / seeds_per_program(one)


# -- runs, energy and software --------------------------------------------------------------------------------------


def runs(collected: CollectedRuns) -> Table:
    rows = []
    for cell in collected.cells:
        by_seed = {one.config.seed: one for one in collected.runs_of(cell.task, cell.method)}
        finished = [seed for seed, one in by_seed.items() if one.finished]
        unfinished = [seed for seed, one in by_seed.items() if not one.finished]
        not_started = [seed for seed in collected.seeds if seed not in by_seed]
        time = duration(sum(map(seconds, by_seed.values()))) if by_seed else ""
        rows.append((cell.task, cell.method, *map(format_ranges, (finished, unfinished, not_started)), time))
    columns = ("task", "method", "seeds finished", "seeds unfinished", "seeds not started", "time")
    return Table("Runs", columns, tuple(rows))


# Defaults of Green Algorithms (Lannelongue et al. 2021).
WATTS_PER_CORE = 12.0
WATTS_PER_GIGABYTE = 0.3725
POWER_USAGE_EFFECTIVENESS = 1.67
GRAMS_PER_KILOWATT_HOUR = 475.0  # world average


def energy(runs: Iterable[Run]) -> Table:
    core_hours = gigabyte_hours = 0.0
    for one in runs:
        hours = seconds(one) / 3600
        core_hours += hours * (one.summary.get("cores") or 1)
        gigabyte_hours += hours * peak_megabytes(one) / 1e3
    watt_hours = core_hours * WATTS_PER_CORE + gigabyte_hours * WATTS_PER_GIGABYTE
    kilowatt_hours = watt_hours * POWER_USAGE_EFFECTIVENESS / 1e3
    rows = (
        ("core hours", f"{core_hours:,.2f}"),
        ("GB hours", f"{gigabyte_hours:,.2f}"),
        ("energy", f"{kilowatt_hours:,.3g} kWh"),
        ("carbon dioxide equivalent", f"{kilowatt_hours * GRAMS_PER_KILOWATT_HOUR:,.3g} g"),
    )
    caption = (
        f"Energy = (core hours x {WATTS_PER_CORE:g} W + GB hours x {WATTS_PER_GIGABYTE:g} W) x "
        f"{POWER_USAGE_EFFECTIVENESS:g}, the power usage effectiveness; CO2e = energy x {GRAMS_PER_KILOWATT_HOUR:g} "
        "g/kWh: the formula and the defaults of Green Algorithms (Lannelongue et al. 2021). All cores available to a "
        "run count as used; GPUs are not counted. The estimate covers the runs of this report, not earlier "
        "experiments. The paper reports 2.63 to 2.88 tonnes of CO2e for all of its experiments."
    )
    return Table("Energy", ("", "estimate"), rows, caption)


def software(collected: CollectedRuns) -> Table:
    """Return a table with a row for each combination of versions, protocol, device and commit."""
    counts: Counter[tuple[str, ...]] = Counter()
    for one in collected.runs:
        numbers = {"python": one.summary.get("python", "?"), **one.summary.get("versions", {})}
        versions = ", ".join(f"{name} {number}" for name, number in numbers.items())
        protocol, device, commit = one.protocol, str(one.summary.get("device", "")), one.summary.get("git") or ""
        counts[versions, protocol, device, commit[:12]] += 1
    rows: tuple[tuple[Value, ...], ...] = tuple((*key, count) for key, count in counts.items())
    return Table("Software and devices", ("versions", "protocol", "device", "commit", "runs"), rows)


def commands(collected: CollectedRuns) -> Table:
    """Return a table of the commands that trained the runs.

    Programs are shown without their folders. The workers of a study are shown as the command of the study.
    """
    rows = tuple(Counter(_format_command(one, collected.command) for one in collected.runs).items())
    return Table("Commands", ("command", "runs"), rows)


def _format_command(one: Run, study_command: str) -> str:
    program, *rest = shlex.split(one.summary.get("command", "")) or [""]
    name = "isqn" if program.endswith("/isqn/__main__.py") else Path(program).name  # __main__.py is `python -m isqn`
    if study_command and name != "isqn":
        return study_command
    return shlex.join([name, *rest]) if name else "unknown"
