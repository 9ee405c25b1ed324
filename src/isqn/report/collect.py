"""Runs of a report, read from the folder of a study or from any folder of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from isqn.analysis.results import Key, References, Run, read_run
from isqn.config.fields import INPUT_PATH, find_rules, nearest, nearest_path
from isqn.envs.registry import canonical_id
from isqn.schemes import SCHEMES
from isqn.study.catalogue import format_command
from isqn.study.grid import Cell, Study, method_name, read_study
from isqn.train import checkpoint
from isqn.train.run import read_config
from isqn.types import UserError

Rows = tuple[np.ndarray, np.ndarray]  # frames or steps (rows,), and values (seeds, rows)
NOT_A_METHOD = ("env_id", "seed", "experiment", "loop")  # both loops sample runs of the same distribution


def unit_of(task: str, unit: str) -> str:
    """Return the unit of the x axis of a task: emulator frames for agent steps on Atari, as in the paper."""
    return "frames" if task.startswith("ALE/") and unit == "agent steps" else unit


@dataclass(frozen=True)
class CollectedRuns:
    """Runs that a report is about, and the study that asked for them, if any."""

    name: str
    baseline: str  # name of a method within its panel
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]  # runs that have started
    study: Study | None = None  # None: the runs do not belong to a study
    folder: Path = Path()

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.task for cell in self.cells))

    @cached_property
    def panels(self) -> dict[str, dict[str, Cell]]:
        """Panel -> name of a method within it -> cell of the method on its first task."""
        panels: dict[str, dict[str, Cell]] = {}
        for cell in self.cells:
            panels.setdefault(cell.panel, {}).setdefault(cell.in_panel, cell)
        return panels

    @cached_property
    def methods(self) -> dict[str, Cell]:
        """Method -> its cell on its first task, in the order of the panels."""
        return {cell.method: cell for panel in self.panels.values() for cell in panel.values()}

    def runs_of(self, task: str, method: str) -> list[Run]:
        """Return the runs of all seeds of a method on a task."""
        return self._runs_by_cell.get((task, method), [])

    @cached_property
    def _runs_by_cell(self) -> dict[tuple[str, str], list[Run]]:
        groups: dict[tuple[str, str], list[Run]] = {}
        for one in self.runs:
            groups.setdefault((one.task, one.method), []).append(one)
        return groups

    @property
    def is_offline(self) -> bool:
        """Whether all runs learn from data alone; then their returns are those of evaluations."""
        return self.cells[0].config.is_offline

    def unit(self, task: str) -> str:
        """Return the unit of the x axis of a task."""
        return unit_of(task, self.cells[0].config.unit)

    def column(self, task: str, method: str, name: str) -> Rows | None:
        """Return a column of metrics.csv or measures.csv, at the rows in which all seeds have a number."""
        both = [table for one in self.runs_of(task, method) for table in (one.metrics, one.measures)]
        tables = [table for table in both if name in table]
        if not tables:
            return None
        shortest = min(len(columns[name]) for columns in tables)
        values = np.array([columns[name][:shortest] for columns in tables])
        is_complete = np.isfinite(values).all(axis=0)
        x = tables[0]["frame" if self.unit(task) == "frames" else "step"][:shortest]
        return (x[is_complete], values[:, is_complete]) if is_complete.any() else None

    def target_churn(self, task: str, cell: Cell) -> Rows | None:
        """Return the target churn, divided by that of the panel's target-free agent if each panel has one."""
        name = "target_churn_held_out"
        churn = self.column(task, cell.method, name)
        if not (churn and self.target_free):
            return churn
        free = self.column(task, self.target_free[cell.panel], name)
        if not free:
            return None
        x, rows, free_rows = np.intersect1d(churn[0], free[0], return_indices=True)
        return (x, churn[1][:, rows] / np.maximum(free[1][:, free_rows].mean(axis=0), 1e-12)) if len(x) else None

    @cached_property
    def target_free(self) -> dict[str, str]:
        """Panel -> its only target-free method. Empty unless every panel has exactly one."""
        free = [cell for cell in self.methods.values() if cell.config.scheme == "target-free"]
        by_panel = {cell.panel: cell.method for cell in free}
        return by_panel if len(free) == len(by_panel) == len(self.panels) else {}

    @property
    def data_notes(self) -> list[str]:
        """Descriptions of the games that language agents were trained on. They qualify every number of the report."""
        learned_from = [one.summary.get("learned_from") for one in self.runs]
        sources = [one for one in learned_from if isinstance(one, dict) and {"games", "words"} <= one.keys()]
        return list(dict.fromkeys(f"Learned from {source['games']}; {source['words']} words." for source in sources))

    @property
    def num_unfinished(self) -> int:
        """Number of runs that have started and not finished."""
        return sum(not one.finished for one in self.runs)

    @property
    def num_not_started(self) -> int:
        """Number of runs of the study that have not started."""
        return len(self.cells) * len(self.seeds) - len(self.runs) if self.study else 0

    @property
    def description(self) -> str:
        """Question of the study, with its figure of the paper and its scale."""
        if not self.study:
            return "Individual runs, not part of a study."
        return self.study.question + (f" ({self.study.paper}; scale: {self.study.scale})" if self.study.paper else "")

    @property
    def command(self) -> str:
        """Command that trains the study. Empty without a study."""
        return format_command(self.study) if self.study else ""

    @property
    def references(self) -> References:
        """Returns that the study gives for a score of 0 and of 1 on each task."""
        tasks = self.study.tasks if self.study else ()
        return {task["env_id"]: (task.get("random_score"), task.get("reference_score")) for task in tasks}


def collect(folder: Path, baseline: str | None = None) -> CollectedRuns:
    """Read the runs of a study from its folder. Without a study.toml, read all runs below the folder."""
    if not folder.is_dir():
        hint = nearest_path(folder) or "; give that of a study, or one with runs in it."
        raise UserError(f"{folder} is not a folder{hint}")
    if (folder / "study.toml").is_file():
        study = read_study(folder / "study.toml", import_code=False)
        runs = tuple(_read_study_runs(folder, study))
        collected = CollectedRuns(study.name, baseline or study.baseline, study.cells, study.seeds, runs, study, folder)
    else:
        cells, runs = _read_runs_below(folder)
        seeds = tuple(sorted({one.config.seed for one in runs}))
        default = min((cell.method for cell in cells), key=lambda name: not name.startswith("TB"))
        collected = CollectedRuns(folder.resolve().name, baseline or default, cells, seeds, runs)
    for title, panel in collected.panels.items():
        if collected.baseline not in panel:
            where = f"a method of the panel {title!r}" if title else "a method here"
            raise UserError(f"The baseline {collected.baseline!r} is not {where}; {nearest(collected.baseline, panel)}")
    return collected


def _read_study_runs(folder: Path, study: Study) -> Iterator[Run]:
    """Read the runs of a study that have started. Each must have the settings that the study asks for."""
    for cell in study.cells:
        for seed in study.seeds:
            run_dir = cell.folder(folder, seed)
            if not (run_dir / "config.toml").is_file():
                continue
            yield read_run(run_dir, cell.read_config(run_dir, seed), cell.task, cell.method)


def _read_runs_below(folder: Path) -> tuple[tuple[Cell, ...], tuple[Run, ...]]:
    """Read all runs below a folder and group them by method.

    Runs with the same label belong to the same method, unless they differ on the same task in more than seed and
    length. Then the settings that differ are added to the name of the method.
    """
    run_dirs = [path.parent for path in sorted(folder.rglob("config.toml"))]
    # A saved model has a config.toml too, but none of these.
    run_dirs = [path for path in run_dirs if any((path / name).is_file() for name in ("summary.json", "episodes.csv"))]
    for path in sorted(folder.rglob("summary.json")):
        if checkpoint.steps(path.parent) and path.parent not in run_dirs:
            read_config(path.parent)  # says that config.toml is missing
    if not run_dirs:
        raise UserError(f"There is no run in {folder}; `isqn train` and `isqn study` make some.")
    configs = {run_dir: read_config(run_dir) for run_dir in run_dirs}
    configs = {run_dir: config.replace(env_id=canonical_id(config.env_id)) for run_dir, config in configs.items()}
    _require_common_unit(folder, list(configs.values()))
    varied = _varied_settings(list(configs.values()))
    cells: dict[tuple[str, str], Cell] = {}
    runs: dict[Key, tuple[Path, Run]] = {}
    for run_dir, config in configs.items():
        name = method_name(config, varied)
        one = read_run(run_dir, config, config.env_id, name)
        if one.key in runs:
            raise UserError(_describe_duplicate(folder, runs[one.key][0], run_dir, one))
        runs[one.key] = run_dir, one
        cells.setdefault((one.task, name), Cell(one.task, name, config, in_panel=name))
    ordered = sorted(cells.values(), key=lambda cell: (cell.task, _paper_order(cell.config)))
    return tuple(ordered), tuple(one for _, one in runs.values())


def _describe_duplicate(folder: Path, first: Path, second: Path, one: Run) -> str:
    common = Path(os.path.commonpath([first, second]))
    apart = [common / path.relative_to(common).parts[0] for path in (first, second) if path != common]
    commands = " or ".join(f"`isqn report {path}`" for path in apart)
    return (
        f"{first} and {second} are the same run twice: {one.method} on {one.task}, seed {one.config.seed}. Report one "
        f"of them by {commands}, or move the other out of {folder}."
    )


def _require_common_unit(folder: Path, configs: list[Any]) -> None:
    """Refuse offline runs beside online ones."""
    if len({config.is_offline for config in configs}) > 1:
        raise UserError(
            f"Some runs in {folder} learn from datasets and some by playing, which have neither steps nor returns in "
            "common; report their folders one by one."
        )


def _varied_settings(configs: list[Any]) -> list[str]:
    """Return the settings in which runs of the same task and label differ. The name of a method must contain them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for config in configs:
        groups.setdefault((config.env_id, config.label), []).append(config.resume_fields())
    names = dict.fromkeys(name for config in configs for name in config.resume_fields() if name not in NOT_A_METHOD)
    varied = [
        name for name in names if any(one.get(name) != group[0].get(name) for group in groups.values() for one in group)
    ]
    for setting in dict.fromkeys(name for config in configs for name in find_rules(type(config), INPUT_PATH)):
        paths: dict[tuple[str, ...], set[str]] = {}  # each seed may have its own path, but only one
        for config in configs:
            one_run = tuple(str(getattr(config, name, "")) for name in ("env_id", "label", "seed", *varied))
            paths.setdefault(one_run, set()).add(getattr(config, setting, ""))
        varied += [setting] * any(len(of_run) > 1 for of_run in paths.values())
    return varied


def _paper_order(config: Any) -> tuple[int, int]:
    """Return a sort key that orders methods as the paper does: by scheme, then by K."""
    return list(SCHEMES).index(config.scheme), config.num_bellman_iterations
