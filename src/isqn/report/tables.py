"""The tables of a report: results, sizes, work, what ran, energy, and what it was made with."""

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

from isqn.analysis import cost, stats
from isqn.analysis.results import Run, ranges
from isqn.experiments.config import Config, begin
from isqn.report.charts import Table, Value
from isqn.report.collect import Collected
from isqn.report.compare import Comparison, interval, mean_return
from isqn.study.grid import Cell
from isqn.train import run
from isqn.train.progress import duration
from isqn.types import EnvSpec, UserError

# -- results -----------------------------------------------------------------------------------------------------


def headline(collected: Collected, compared: Comparison) -> Table:
    rows = []
    for method, cell in collected.methods.items():
        means = compared.scores[method].mean(axis=2)
        measures = (stats.iqm, stats.median, stats.mean, stats.optimality_gap)
        found = size(cell)
        rows.append(
            (
                method,
                compared.aucs[method],
                compared.improvements.get(method),
                *(float(measure(means)) for measure in measures),
                found.kept_parameters if found else None,
            )
        )
    columns = ("method", "normalised AUC", f"P(beats {collected.baseline})", "IQM", "median", "mean", "optimality gap")
    about = (
        f"Area under the learning curve, divided by that of {collected.baseline}. {compared.words} IQM, median, mean "
        f"and optimality gap: of the mean score over training. Parameters: with copies, on {collected.tasks[0]}."
    )
    return Table("Result", (*columns, "parameters kept"), tuple(rows), about)


def by_task(collected: Collected) -> Table:
    rows = [
        (method, *(mean_return(collected, task, method) for task in collected.tasks)) for method in collected.methods
    ]
    about = "Over seeds and epochs, as the environment counts, with 95 % intervals if there are several seeds."
    return Table("Mean return over training", ("method", *collected.tasks), tuple(rows), about)


MEASURED = {
    "won": "win_rate",
    "return, policy alone": "cloned_return",
    "won, policy alone": "cloned_win_rate",
    "five letters": "valid_share",
    "in the list": "dictionary_share",
    "as clues allow": "consistent_share",
    "error of Q": "td_error",
    "correlation of V": "value_correlation",
}


def measures(collected: Collected) -> list[Table]:
    """One table, if agents write."""
    rows: list[tuple[Value, ...]] = []
    for cell in collected.cells:
        found = [collected.recorded(cell.task, cell.method, name) for name in MEASURED.values()]
        runs = collected.of(cell.task, cell.method)
        shortest = min((len(one.returns) for one in runs), default=0)
        if any(found) and shortest:
            returns = np.array([[one.returns[shortest - 1]] for one in runs])
            ends: list[Value] = [interval(returns, stats.mean)]
            ends += [interval(each[1][:, -1:], stats.mean) if each else None for each in found]
            rows.append((cell.task, cell.method, *ends))
    about = (
        "At the last evaluation: means over seeds, with 95 % intervals if there are several. Shares are of games or of "
        "guesses; the error of Q and the correlation of V are on games that were not learned from."
    )
    columns = ("task", "method", "return", *MEASURED)
    return [Table("Games at the end", columns, tuple(rows), about)] if rows else []


PROBED = {
    "effective rank": "effective_rank",
    "dormant share": "dormant_share",
    "cosine of heads": "head_cosine",
    "into BatchNorm": "batch_norm_deviation",
    "cosine": "gradient_cosine_own_tb",
    "cosine of TF": "gradient_cosine_tf_tb",
}


def probes(collected: Collected) -> list[Table]:
    """One table, if anything was probed."""
    rows = []
    for cell in collected.cells:
        found = [collected.recorded(cell.task, cell.method, name) for name in PROBED.values()]
        found.append(collected.churn(cell.task, cell))
        if any(found):
            means = [interval(each[1].mean(axis=1)[:, None], stats.mean) if each else None for each in found]
            rows.append((cell.task, cell.method, *means))
    if not rows:
        return []
    about = {
        "": "Means over training and seeds, with 95 % intervals if there are several.",
        "cosine of heads": "Of heads: between the weights of neighbouring ones.",
        "into BatchNorm": "Into BatchNorm: the deviation of what comes into it.",
        "cosine": "Cosine: between the gradients of the agent's loss and of the target-based one, at the agent's "
        "parameters; of TF: of the target-free loss there.",
        "target churn": "Target churn is divided by that of the target-free agent." if collected.target_free else "",
    }
    columns = ("task", "method", *PROBED, "target churn")
    kept = [place for place, values in enumerate(zip(*rows, strict=True)) if any(value is not None for value in values)]
    names = tuple(columns[place] for place in kept)
    words = " ".join(sentence for name, sentence in about.items() if sentence and name in ("", *names))
    return [Table("Probes", names, tuple(tuple(row[place] for place in kept) for row in rows), words)]


# -- what a method costs ----------------------------------------------------------------------------------------


@cache
def _spec(config: Config) -> EnvSpec | None:
    try:
        return run.specification(config)
    except UserError:  # runs may be reported where they could not be trained
        return None


_size, _flops = cache(cost.size), cache(cost.flops_per_update)


def spec_of(config: Config) -> EnvSpec | None:
    if config.writes:
        return _spec(begin(config.agent))
    return _spec(Config(env_id=config.env_id, protocol=config.protocol, loop=config.loop))


def size(cell: Cell) -> cost.Size | None:
    spec = spec_of(cell.config)
    if spec is None:
        return None
    # Games of as many actions have networks of the same size.
    return _size(cell.config.replace(env_id=begin(cell.config.agent).env_id), dataclasses.replace(spec, id=""))


def sizes(collected: Collected) -> Table:
    rows = []
    for cell in collected.cells:
        found, spec, mine = size(cell), spec_of(cell.config), collected.of(cell.task, cell.method)
        numbers: tuple[Value, ...] = (None,) * 5
        if found and spec:
            numbers = (
                found.parameters,
                found.copied_parameters,
                f"{found.network_bytes / 1e6:,.2f}",
                f"{found.optimizer_bytes / 1e6:,.2f}",
                f"{run.replay_memory(cell.config, spec).total / 1e6:,.1f}",
            )
        peak = max(map(peak_megabytes, mine), default=0)
        rows.append((cell.task, cell.method, *numbers, f"{peak:,.0f}" if peak else ""))
    columns = ("task", "method", "parameters", "copied", "network MB", "optimizer MB", "replay MB", "process MB")
    about = (
        "Copied: parameters of older copies of the network. Process: the most memory it had, of all its seeds. Empty "
        "where an environment is not installed here."
    )
    return Table("Parameters and memory", columns, tuple(rows), about)


class Work(NamedTuple):
    task: str
    method: str
    flops: float  # of an update
    rates: list[float]  # steps a second, of each run

    @property
    def hours(self) -> np.ndarray:
        """For a million steps, at these rates."""
        return 1e6 / np.array(self.rates) / 3600


def work(collected: Collected) -> list[Work]:
    rows = []
    for cell in collected.cells:
        spec = spec_of(cell.config)
        # of layers and micro-batches, which are loops, the compiler counts one: see `isqn cost`
        flops = _flops(cell.config, spec) if spec and not cell.config.writes else math.nan
        rates = [rate for one in collected.of(cell.task, cell.method) if (rate := steps_per_second(one))]
        rows.append(Work(cell.task, cell.method, flops, rates))
    return rows


def work_table(rows: Iterable[Work]) -> Table:
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
    about = "FLOPs as the compiler counts them. Steps are those of all seeds of a program; medians over its runs."
    return Table("Work", ("task", "method", "MFLOP an update", "steps/s", "hours a million steps"), tuple(cells), about)


def steps_per_second(one: Run) -> float | None:
    """By the middle of its rows: the first ones hold compiling."""
    rates = one.metrics.get("steps_per_second", np.array([]))
    return float(np.median(rates)) if len(rates) else None


def together(one: Run) -> int:
    """Seeds in one program, which share its time and its memory."""
    return len(one.summary.get("trained_with", ["."]))


def peak_megabytes(one: Run) -> float:
    return float(max(one.metrics.get("memory_mb", ()), default=0.0))


def seconds(one: Run) -> float:
    """Its share of the time of its program."""
    return float(max(one.metrics.get("seconds", ()), default=0.0)) / together(one)


# -- what ran, and how ----------------------------------------------------------------------------------------------


def what_ran(collected: Collected) -> Table:
    rows = []
    for cell in collected.cells:
        mine = {one.config.seed: one for one in collected.of(cell.task, cell.method)}
        done = [seed for seed, one in mine.items() if one.finished]
        begun = [seed for seed, one in mine.items() if not one.finished]
        lacking = [seed for seed in collected.seeds if seed not in mine]
        time = duration(sum(map(seconds, mine.values()))) if mine else ""
        rows.append((cell.task, cell.method, ranges(done), ranges(begun), ranges(lacking), time))
    columns = ("task", "method", "seeds finished", "seeds unfinished", "seeds not begun", "time")
    return Table("What ran and what did not", columns, tuple(rows))


# The defaults of Green Algorithms (Lannelongue et al. 2021).
WATTS_PER_CORE = 12.0
WATTS_PER_GIGABYTE = 0.3725
POWER_USAGE_EFFECTIVENESS = 1.67
GRAMS_PER_KILOWATT_HOUR = 475.0  # the world's average


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
    about = (
        f"Energy = (core hours x {WATTS_PER_CORE:g} W + GB hours x {WATTS_PER_GIGABYTE:g} W) x "
        f"{POWER_USAGE_EFFECTIVENESS:g}, the power usage effectiveness; CO2e = energy x {GRAMS_PER_KILOWATT_HOUR:g} "
        "g/kWh: the formula and the defaults of Green Algorithms (Lannelongue et al. 2021). Cores that a run might use "
        "count as used; GPUs are not counted. Of the runs above, not of what was tried before them. The paper reports "
        "2.63 to 2.88 tonnes for all of its own."
    )
    return Table("Energy", ("", "estimate"), rows, about)


def made_with(collected: Collected) -> Table:
    """One row for each kind of machine and version that was used."""
    found: Counter[tuple[str, ...]] = Counter()
    for one in collected.runs:
        versions = {"python": one.summary.get("python", "?"), **one.summary.get("versions", {})}
        told = ", ".join(f"{name} {number}" for name, number in versions.items())
        protocol, device, commit = one.protocol, str(one.summary.get("device", "")), one.summary.get("git") or ""
        found[told, protocol, device, commit[:12]] += 1
    rows: tuple[tuple[Value, ...], ...] = tuple((*key, count) for key, count in found.items())
    return Table("Made with", ("versions", "protocol", "device", "commit", "runs"), rows)


def commands(collected: Collected) -> Table:
    """What was typed: programs without their folders, and for the workers of a study the command that starts them."""
    of_study = collected.command
    rows = tuple(Counter(_command(one, of_study) for one in collected.runs).items())
    return Table("Commands", ("command", "runs"), rows)


def _command(one: Run, of_study: str) -> str:
    program, *rest = shlex.split(one.summary.get("command", "")) or [""]
    name = "isqn" if program.endswith("/isqn/__main__.py") else Path(program).name  # the former: python -m isqn
    return of_study if of_study and name != "isqn" else shlex.join([name, *rest]) if name else "not known"
