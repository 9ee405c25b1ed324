"""Results of finished and unfinished runs as arrays: the mean return of every epoch, by method, seed and task.

Runs that are missing, or that differ in length or in protocol, are refused with their list. The caller may choose to
drop, truncate or pool them instead, and then the notes say what was done.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isqn.config.fields import nearest
from isqn.data.text import DamagedText, read_json, read_table
from isqn.envs import minatar
from isqn.envs.scores import RANDOM_RETURNS, SCORES, game_name
from isqn.train import record, tables
from isqn.types import UserError

MISSING = ("fail", "drop", "truncate")
SUMMARY_TYPES = {"versions": dict, "cores": int, "trained_with": list, "command": str}  # fields that a report reads

Key = tuple[str, str, int]  # task, method, seed
Scores = dict[str, np.ndarray]  # method -> (seeds, tasks, epochs), as in rliable
References = Mapping[str, tuple[float | None, float | None]]  # task -> returns that count as 0 and as 1, where given


class IncomparableError(UserError):
    """The runs exist, but their returns cannot be put on a common scale."""


class Run(NamedTuple):
    """Settings and results of one run, read from its folder."""

    task: str
    method: str
    config: Any
    returns: tuple[float, ...]  # mean return of each completed epoch
    finished: bool
    summary: dict[str, Any]
    metrics: dict[str, np.ndarray]  # columns of metrics.csv; empty cells are nan
    measures: dict[str, np.ndarray] = {}  # noqa: RUF012 - never written to; columns of measures.csv, if it exists

    @property
    def key(self) -> Key:
        return self.task, self.method, self.config.seed

    @property
    def protocol(self) -> str:
        return str(self.summary.get("protocol", "unknown"))


@dataclass(frozen=True)
class Results:
    """Comparable runs: every method has every seed on every task, with the same number of epochs."""

    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    returns: Scores  # not normalised
    runs: tuple[Run, ...]  # the runs in the arrays, truncated like them
    notes: tuple[str, ...]  # seeds dropped, epochs truncated, protocols pooled


def read_run(folder: Path, config: Any, task: str, method: str) -> Run:
    """Read the results that a run folder holds so far."""
    summary = record.read_summary(folder, strict=True)
    finished = summary.get("status") == "finished"
    with _report_damage(folder / "summary.json" if finished else tables.results_table(folder)):
        means = summary["epoch_returns"] if finished else _completed_epoch_returns(folder, config)
        if finished:  # the summary omits trailing epochs in which no episode ended
            if abs(summary["auc"] - sum(mean for mean in means if mean is not None)) > 1e-6:
                raise ValueError("auc is not the sum of epoch_returns")
            means = [*means, *[None] * (config.num_epochs - len(means))]
        returns = _fill_gaps(means)
        if not np.isfinite(returns).all():
            raise ValueError("returns must be numbers")
    with _report_damage(folder / "summary.json"):
        for name, kind in SUMMARY_TYPES.items():
            if not isinstance(summary.get(name, kind()), kind):
                raise TypeError(f"{name} is not of type {kind.__name__}")
    with _report_damage(folder / "metrics.csv"):
        metrics = _read_columns(folder / "metrics.csv")
    with _report_damage(folder / "measures.csv"):
        measures = _read_columns(folder / "measures.csv")
    return Run(task, method, config, returns, finished, summary, metrics, measures)


@contextmanager
def _report_damage(file: Path) -> Iterator[None]:
    """Turn an error while reading a file into a `UserError` that names the file."""
    try:
        yield
    except DamagedText as error:
        raise UserError(f"{error} Move {file.parent} away, and train that run again.") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        damage = f"{file} is damaged ({type(error).__name__}: {error})"
        raise UserError(f"{damage}; move {file.parent} away, and train that run again.") from None


def _completed_epoch_returns(folder: Path, config: Any) -> list[float | None]:
    """Return the mean return of each completed epoch of an unfinished run.

    The last epoch of an online run is still in progress. An offline run writes an evaluation only when it is complete.
    """
    has_results = tables.results_table(folder).is_file()
    means = tables.results(folder, config.num_epochs)["epoch_returns"] if has_results else []
    return means if config.is_offline else means[:-1]


def _fill_gaps(means: Iterable[float | None]) -> tuple[float, ...]:
    """Give an epoch without a completed episode the return of the epoch before it, or of the first one that has any."""
    means = list(means)
    last = next((mean for mean in means if mean is not None), None)
    filled = [last := last if mean is None else mean for mean in means]
    return tuple(float(mean) for mean in filled if mean is not None)


def _read_columns(path: Path) -> dict[str, np.ndarray]:
    rows = read_table(path) if path.is_file() else []
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in (rows[0] if rows else ())}


def gather(
    runs: Iterable[Run],
    tasks: Iterable[str],
    methods: Iterable[str],
    seeds: Iterable[int],
    *,
    missing: str = "fail",
    pool_protocols: bool = False,
) -> Results:
    """Combine runs into arrays of returns.

    `missing` is the policy for runs that do not exist or are shorter than others. "fail" raises an error; "drop" leaves
    out their seeds; "truncate" cuts all runs to the shortest, and leaves out only seeds with a run that has no epoch.
    """
    if missing not in MISSING:
        raise UserError(f"missing is {missing!r}; {nearest(missing, MISSING)}")
    by_key = {run.key: run for run in runs}
    tasks, methods, seeds = tuple(tasks), tuple(methods), tuple(seeds)
    requested = list(itertools.product(tasks, methods, seeds))
    if not requested:
        raise UserError("There are no runs to compare: tasks, methods and seeds must not be empty.")
    usable = {key for key, run in by_key.items() if run.returns and (run.finished or missing == "truncate")}
    seeds, dropped = _common_seeds(requested, usable, missing)
    selected = [by_key[key] for key in requested if key[2] in seeds]
    epochs, truncated = _common_epochs(selected, missing)
    notes = (*dropped, *truncated, *_check_protocols(selected, pool_protocols))
    final = {run.key: _truncate(run, epochs) for run in selected}
    returns = {
        method: np.array([[final[task, method, seed].returns for task in tasks] for seed in seeds])
        for method in methods
    }
    return Results(tasks, seeds, returns, tuple(final.values()), notes)


def _common_seeds(requested: list[Key], usable: set[Key], missing: str) -> tuple[tuple[int, ...], list[str]]:
    """Return the seeds that have all their runs, and notes about the others."""
    missing_runs = [key for key in requested if key not in usable]
    dropped = {seed for _, _, seed in missing_runs}
    seeds = tuple(dict.fromkeys(seed for _, _, seed in requested if seed not in dropped))
    if not missing_runs:
        return seeds, []
    reason = f"{len(missing_runs)} of {len(requested)} runs are missing, unfinished or without an episode"
    if missing == "fail":
        raise UserError(
            f"{reason}: {_describe(missing_runs)}; train them, longer if no episode ends, or take --missing drop "
            "(without their seeds) or truncate (all to the shortest)."
        )
    if not seeds:
        raise UserError(
            f"No seed has a run of every method on every task: {reason}, {_describe(missing_runs)}; train them, or "
            "report a folder with fewer methods and tasks in it."
        )
    return seeds, [f"Left out: {_describe_seeds(dropped)}, because {reason}."]


def _common_epochs(runs: list[Run], missing: str) -> tuple[int, list[str]]:
    """Return the number of epochs that all runs have, and notes about truncated ones."""
    for one, other in itertools.pairwise(sorted(runs, key=lambda run: run.task)):
        length, other_length = one.config.epoch_length, other.config.epoch_length
        if one.task == other.task and length != other_length:
            raise UserError(
                f"The epochs of {_describe([one.key])} have {length} steps and those of {_describe([other.key])} "
                f"{other_length}; train them with the same --epoch-steps, or report them apart."
            )
    epochs = min(len(run.returns) for run in runs)
    longest = max(max(len(run.returns), run.config.num_epochs) for run in runs)
    if epochs == longest:
        return epochs, []
    if missing != "truncate":
        shorter = [run.key for run in runs if len(run.returns) < longest]
        raise UserError(
            f"Runs have different numbers of epochs: {longest}, and fewer in {_describe(shorter)}; take --missing "
            "truncate, which cuts all to the shortest."
        )
    return epochs, [f"Truncated: all runs to their first {epochs} of {longest} epochs."]


def _truncate(run: Run, epochs: int) -> Run:
    """Cut the returns and metrics of a run to its first epochs."""
    if epochs >= max(len(run.returns), run.config.num_epochs):
        return run
    before_end = run.metrics.get("step", np.array([])) <= run.config.epoch_end(epochs - 1)
    return run._replace(
        returns=run.returns[:epochs], metrics={name: column[before_end] for name, column in run.metrics.items()}
    )


def _check_protocols(runs: Iterable[Run], allowed: bool) -> Iterable[str]:
    """Refuse to pool different protocols of a family of environments, such as ALE, or note that it was allowed."""
    families: dict[str, set[str]] = {}
    for run in runs:
        families.setdefault(run.task.split("/")[0], set()).add(run.protocol)
    for family, protocols in families.items():
        if len(protocols) > 1:
            listed = " and ".join(sorted(protocols))
            if not allowed:
                raise UserError(
                    f"The runs of {family} were played under different protocols, {listed}, and are not comparable; "
                    "report them apart, or take --pool-protocols."
                )
            yield f"Pooled: runs of {family} under {listed}."


def _describe(keys: Iterable[Key]) -> str:
    """List runs in words, with the seeds of the same task and method together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for task, method, seed in keys:
        groups.setdefault((task, method), []).append(seed)
    return ", ".join(f"{task} {method} {_describe_seeds(seeds)}" for (task, method), seeds in groups.items())


def _describe_seeds(seeds: Collection[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {format_ranges(seeds)}"


def format_ranges(numbers: Iterable[int]) -> str:
    """Write whole numbers as ranges: 3, 4, 5, 9 -> "3-5, 9"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def known_random_return(task: str) -> float | None:
    """Return the mean return of random play from the tables of measured ones, or None if the task is not in them."""
    game = game_name(task)
    return SCORES[game].random if game in SCORES else RANDOM_RETURNS.get(minatar.canonical_id(task) or task)


def normalise(results: Results, baseline: str, references: References) -> tuple[Scores, str]:
    """Normalise returns to a common scale; return the scores and a description of the scale.

    `references` has precedence. Otherwise 0 is random play, and 1 is a human on Atari and elsewhere the mean return of
    the baseline over its training.
    """
    ends: list[tuple[float, float]] = []
    tasks_by_scale: dict[str, list[str]] = {}
    for index, task in enumerate(results.tasks):
        random, reference = references.get(task, (None, None))
        game = game_name(task)
        if reference is not None:
            source = "the study's reference"
        elif game in SCORES:
            reference, source = SCORES[game].human, "a human"
        else:
            reference = float(results.returns[baseline][:, index].mean())
            source = f"the mean return of {baseline} over its training"
        random = known_random_return(task) if random is None else random
        if random is None:
            raise IncomparableError(
                f"The return of random play on {task} is not known; give a random_score in the study."
            )
        if not reference > random:
            raise IncomparableError(
                f"There is no common scale: on {task}, {source} is {reference:.4g}, which is not above random play "
                f"with {random:.4g}; a reference_score of the task in a study file would set it."
            )
        ends.append((random, reference))
        tasks_by_scale.setdefault(source, []).append(task)
    low, high = np.array(ends).T[..., None]
    scores = {method: (returns - low) / (high - low) for method, returns in results.returns.items()}
    sources = [
        source if len(tasks_by_scale) == 1 else f"{source} ({', '.join(tasks)})"
        for source, tasks in tasks_by_scale.items()
    ]
    return scores, f"0 is random play and 1 {' or '.join(sources)}"


def write_score_dict(path: Path, results: Results, scores: Scores, scale: str) -> None:
    """Write rliable's dictionary of scores as JSON, with the names of its axes."""
    about = {"axes": ["seed", "task", "epoch"], "seeds": results.seeds, "tasks": results.tasks, "scale": scale}
    lists = {method: values.tolist() for method, values in scores.items()}
    record.replace_text(path, json.dumps({**about, "notes": results.notes, "scores": lists}) + "\n")


def read_score_dict(path: Path) -> Scores:
    """Read scores from a file of `write_score_dict`, or from a JSON object of method -> nested lists.

    The lists are nested by seed, by task and, optionally, by epoch.
    """
    try:
        content = read_json(path)
        scores = {
            str(method): np.array(values, np.float64) for method, values in content.get("scores", content).items()
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} holds no scores: {error}.") from None
    for method, values in scores.items():
        if values.ndim not in (2, 3):
            raise UserError(
                f"{path}: the scores of {method} have {values.ndim} axes; they need (seeds, tasks) or (seeds, tasks, "
                "epochs)."
            )
    return scores
