"""Runs on disk as arrays: the mean training return of every epoch, by method, seed and task.

Nothing is left out in silence: runs that are missing, of other lengths or of other protocols are refused with their
list, unless it is said what to do about them, and then the notes say what was done.
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

from isqn.envs import minatar
from isqn.envs.scores import RANDOM_RETURNS, SCORES, game_of
from isqn.experiments.config import Config, nearest
from isqn.train import record
from isqn.types import UserError

MISSING = ("fail", "drop", "truncate")
SHOWN = {"versions": dict, "cores": int, "trained_with": list, "command": str}  # what a report takes of a summary

Key = tuple[str, str, int]  # task, method, seed
Scores = dict[str, np.ndarray]  # rliable's: method -> (seeds, tasks, epochs)
References = Mapping[str, tuple[float | None, float | None]]  # task -> the returns that are 0 and 1, where given


class Incomparable(UserError):
    """The runs are there, but no scale that they share."""


class Run(NamedTuple):
    """One run as it lies on disk."""

    task: str
    method: str
    config: Config
    returns: tuple[float, ...]  # of each epoch that has ended
    finished: bool
    summary: dict[str, Any]
    metrics: dict[str, np.ndarray]  # the columns of metrics.csv; empty cells are not numbers
    measures: dict[str, np.ndarray] = {}  # noqa: RUF012 - never written to; those of measures.csv, where there is one

    @property
    def key(self) -> Key:
        return self.task, self.method, self.config.seed

    @property
    def protocol(self) -> str:
        return str(self.summary.get("protocol", "unknown"))


@dataclass(frozen=True)
class Results:
    """Runs that can be compared: every method has every seed on every task, for as many epochs."""

    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    returns: Scores  # as the environment counts
    runs: tuple[Run, ...]  # those in the arrays, cut as these are
    notes: tuple[str, ...]  # what was left out, cut or pooled


def read_run(folder: Path, config: Config, task: str, method: str) -> Run:
    """What a folder holds so far."""
    summary = record.read_summary(folder)
    finished = summary.get("status") == "finished"
    with _undamaged(folder / "summary.json" if finished else record.results_table(folder)):
        means = summary["epoch_returns"] if finished else _epoch_means(folder, config)
        if finished:  # nothing is written of last epochs in which no episode ended
            if abs(summary["auc"] - sum(mean for mean in means if mean is not None)) > 1e-6:
                raise ValueError("auc is not the sum of epoch_returns")
            means = [*means, *[None] * (config.num_epochs - len(means))]
        returns = _filled(means)
        if not np.isfinite(returns).all():
            raise ValueError("returns must be numbers")
    with _undamaged(folder / "summary.json"):
        for name, kind in SHOWN.items():
            if not isinstance(summary.get(name, kind()), kind):
                raise TypeError(f"{name} is no {kind.__name__}")
    with _undamaged(folder / "metrics.csv"):
        metrics = _columns(folder / "metrics.csv")
    with _undamaged(folder / "measures.csv"):
        measures = _columns(folder / "measures.csv")
    return Run(task, method, config, returns, finished, summary, metrics, measures)


@contextmanager
def _undamaged(file: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        what = f"{file} is damaged ({type(error).__name__}: {error})"
        raise UserError(f"{what}; move {file.parent} away, and train that run again.") from None


def _epoch_means(folder: Path, config: Config) -> list[float | None]:
    """Of those that have ended: an epoch of training goes on, an evaluation is written when it is over."""
    means = record.results(folder)["epoch_returns"] if record.results_table(folder).is_file() else []
    return means if config.is_offline else means[:-1]


def _filled(means: Iterable[float | None]) -> tuple[float, ...]:
    """An epoch in which no episode ended is as good as the one before it, and the first as good as the next."""
    means = list(means)
    last = next((mean for mean in means if mean is not None), None)
    filled = [last := last if mean is None else mean for mean in means]
    return tuple(float(mean) for mean in filled if mean is not None)


def _columns(path: Path) -> dict[str, np.ndarray]:
    rows = record.read_table(path) if path.is_file() else []
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
    """Runs as arrays.

    `missing` says what to do if a run is not there, or shorter than others: fail; drop its seed; or truncate all runs
    to the epochs that the shortest has, and drop the seeds that lack a run with any.
    """
    if missing not in MISSING:
        raise UserError(f"missing is {missing!r}; {nearest(missing, MISSING)}")
    found = {run.key: run for run in runs}
    tasks, methods, seeds = tuple(tasks), tuple(methods), tuple(seeds)
    wanted = list(itertools.product(tasks, methods, seeds))
    if not wanted:
        raise UserError("There are no runs to compare: tasks, methods and seeds must not be empty.")
    there = {key for key, run in found.items() if run.returns and (run.finished or missing == "truncate")}
    seeds, left_out = _common_seeds(wanted, there, missing)
    kept = [found[key] for key in wanted if key[2] in seeds]
    epochs, shortened = _common_epochs(kept, missing)
    notes = (*left_out, *shortened, *_pooled(kept, pool_protocols))
    cut = {run.key: _cut(run, epochs) for run in kept}
    returns = {
        method: np.array([[cut[task, method, seed].returns for task in tasks] for seed in seeds]) for method in methods
    }
    return Results(tasks, seeds, returns, tuple(cut.values()), notes)


def _common_seeds(wanted: list[Key], there: set[Key], missing: str) -> tuple[tuple[int, ...], list[str]]:
    """The seeds of which all runs are there, and what is to be said of the others."""
    lacking = [key for key in wanted if key not in there]
    gone = {seed for _, _, seed in lacking}
    seeds = tuple(dict.fromkeys(seed for _, _, seed in wanted if seed not in gone))
    if not lacking:
        return seeds, []
    few = f"{len(lacking)} of {len(wanted)} runs are missing, unfinished or without an episode"
    if missing == "fail":
        raise UserError(
            f"{few}: {_listed(lacking)}; train them, longer if no episode ends, or take --missing drop (without their "
            "seeds) or truncate (all to the shortest)."
        )
    if not seeds:
        raise UserError(
            f"No seed has a run of every method on every task: {few}, {_listed(lacking)}; train them, or report a "
            "folder with fewer methods and tasks in it."
        )
    return seeds, [f"Left out: {_seeds(gone)}, because {few}."]


def _common_epochs(runs: list[Run], missing: str) -> tuple[int, list[str]]:
    for one, other in itertools.pairwise(sorted(runs, key=lambda run: run.task)):
        mine, theirs = one.config.epoch_length, other.config.epoch_length
        if one.task == other.task and mine != theirs:
            raise UserError(
                f"The epochs of {_listed([one.key])} have {mine} steps and those of {_listed([other.key])} {theirs}; "
                "train them with the same --epoch-steps, or report them apart."
            )
    epochs = min(len(run.returns) for run in runs)
    longest = max(max(len(run.returns), run.config.num_epochs) for run in runs)
    if epochs == longest:
        return epochs, []
    if missing != "truncate":
        shorter = [run.key for run in runs if len(run.returns) < longest]
        raise UserError(
            f"Runs have different numbers of epochs: {longest}, and fewer in {_listed(shorter)}; take --missing "
            "truncate, which cuts all to the shortest."
        )
    return epochs, [f"Cut: all runs to their first {epochs} of {longest} epochs."]


def _cut(run: Run, epochs: int) -> Run:
    if epochs >= max(len(run.returns), run.config.num_epochs):
        return run
    early = run.metrics.get("step", np.array([])) <= run.config.epoch_end(epochs - 1)
    return run._replace(
        returns=run.returns[:epochs], metrics={name: column[early] for name, column in run.metrics.items()}
    )


def _pooled(runs: Iterable[Run], allowed: bool) -> Iterable[str]:
    """Two protocols of one family of environments, such as ALE, are different experiments."""
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


def _listed(keys: Iterable[Key]) -> str:
    """Seeds of the same task and method together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for task, method, seed in keys:
        groups.setdefault((task, method), []).append(seed)
    return ", ".join(f"{task} {method} {_seeds(seeds)}" for (task, method), seeds in groups.items())


def _seeds(seeds: Collection[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {ranges(seeds)}"


def ranges(numbers: Iterable[int]) -> str:
    """3, 4, 5, 9 -> "3-5, 9"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def known_random(task: str) -> float | None:
    """What random play returns, where it was measured before."""
    game = game_of(task)
    return SCORES[game].random if game in SCORES else RANDOM_RETURNS.get(minatar.full_id(task) or task)


def normalised(results: Results, baseline: str, references: References) -> tuple[Scores, str]:
    """Returns on one scale, and the scale in words.

    What `references` does not give is human-normalised on Atari; elsewhere 0 is random play and 1 the mean return of
    the baseline over its training.
    """
    ends: list[tuple[float, float]] = []
    ways: dict[str, list[str]] = {}
    for index, task in enumerate(results.tasks):
        random, reference = references.get(task, (None, None))
        game = game_of(task)
        if reference is not None:
            way = "the study's reference"
        elif game in SCORES:
            reference, way = SCORES[game].human, "a human"
        else:
            reference = float(results.returns[baseline][:, index].mean())
            way = f"the mean return of {baseline} over its training"
        random = known_random(task) if random is None else random
        if random is None:
            raise Incomparable(f"What random play returns on {task} is not known; give a random_score in the study.")
        if not reference > random:
            raise Incomparable(
                f"There is no common scale: on {task}, {way} is {reference:.4g}, which is not above random play with "
                f"{random:.4g}; a reference_score of the task in a study file would set it."
            )
        ends.append((random, reference))
        ways.setdefault(way, []).append(task)
    low, high = np.array(ends).T[..., None]
    scores = {method: (returns - low) / (high - low) for method, returns in results.returns.items()}
    told = [way if len(ways) == 1 else f"{way} ({', '.join(tasks)})" for way, tasks in ways.items()]
    return scores, f"0 is random play and 1 {' or '.join(told)}"


def write_score_dict(path: Path, results: Results, scores: Scores, scale: str) -> None:
    """rliable's dictionary as JSON, with the names of its axes."""
    about = {"axes": ["seed", "task", "epoch"], "seeds": results.seeds, "tasks": results.tasks, "scale": scale}
    lists = {method: values.tolist() for method, values in scores.items()}
    record.replace_text(path, json.dumps({**about, "notes": results.notes, "scores": lists}) + "\n")


def read_score_dict(path: Path) -> Scores:
    """Of a file that `write_score_dict` wrote, or a plain JSON object of method -> lists by seed, by task, by epoch."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        scores = {str(method): np.array(values, np.float64) for method, values in read.get("scores", read).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no scores: {error}.") from None
    for method, values in scores.items():
        if values.ndim not in (2, 3):
            raise UserError(
                f"{path}: the scores of {method} have {values.ndim} axes; (seeds, tasks) are needed at least."
            )
    return scores
