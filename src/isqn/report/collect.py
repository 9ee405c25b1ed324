"""What a report is about: the runs that were asked for, and what there is of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from isqn.analysis.results import Key, References, Run, read_run
from isqn.envs.registry import full_id
from isqn.experiments.config import MAY_MOVE, Config, nearest, nearest_path
from isqn.schemes import SCHEMES
from isqn.study.catalogue import command
from isqn.study.grid import Cell, Study, method_name, read_study
from isqn.train.run import read_config
from isqn.types import UserError

Rows = tuple[np.ndarray, np.ndarray]  # frames or steps (rows,), and values (seeds, rows)
NOT_A_METHOD = ("env_id", "seed", "experiment", "loop")  # the loops draw different runs of one distribution


def unit_of(task: str, *, offline: bool) -> str:
    """What figures show along training: updates, frames of the emulator, as the paper's of Atari, or agent steps."""
    if offline:
        return "updates"
    return "frames" if task.startswith("ALE/") else "agent steps"


@dataclass(frozen=True)
class Collected:
    name: str
    baseline: str  # the name of a method inside its panel
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]  # that have begun
    study: Study | None = None  # none: the runs were trained one by one
    folder: Path = Path()

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.task for cell in self.cells))

    @cached_property
    def panels(self) -> dict[str, dict[str, Cell]]:
        """Panel -> the name of a method in it -> its cell on its first task."""
        found: dict[str, dict[str, Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.panel, {}).setdefault(cell.in_panel, cell)
        return found

    @cached_property
    def methods(self) -> dict[str, Cell]:
        """Panel by panel, each with its cell on its first task."""
        return {cell.method: cell for panel in self.panels.values() for cell in panel.values()}

    def of(self, task: str, method: str) -> list[Run]:
        return self._runs_of.get((task, method), [])

    @cached_property
    def _runs_of(self) -> dict[tuple[str, str], list[Run]]:
        found: dict[tuple[str, str], list[Run]] = {}
        for one in self.runs:
            found.setdefault((one.task, one.method), []).append(one)
        return found

    @property
    def is_offline(self) -> bool:
        return self.cells[0].config.is_offline

    def unit(self, task: str) -> str:
        return unit_of(task, offline=self.is_offline)

    def recorded(self, task: str, method: str, name: str) -> Rows | None:
        """Frames or steps (rows,) and values (seeds, rows) of a column of metrics.csv, or of measures.csv, where all
        seeds have numbers."""
        both = [table for one in self.of(task, method) for table in (one.metrics, one.measures)]
        tables = [table for table in both if name in table]
        if not tables:
            return None
        shortest = min(len(columns[name]) for columns in tables)
        values = np.array([columns[name][:shortest] for columns in tables])
        known = np.isfinite(values).all(axis=0)
        x = tables[0]["frame" if self.unit(task) == "frames" else "step"][:shortest]
        return (x[known], values[:, known]) if known.any() else None

    def churn(self, task: str, cell: Cell) -> Rows | None:
        """The same of the target churn, divided by that of the panel's target-free agent if each panel has one."""
        name = "target_churn_held_out"
        mine = self.recorded(task, cell.method, name)
        if not (mine and self.target_free):
            return mine
        free = self.recorded(task, self.target_free[cell.panel], name)
        if not free:
            return None
        x, here, there = np.intersect1d(mine[0], free[0], return_indices=True)
        return (x, mine[1][:, here] / np.maximum(free[1][:, there].mean(axis=0), 1e-12)) if len(x) else None

    @cached_property
    def target_free(self) -> dict[str, str]:
        """Panel -> its only target-free method; nothing if a panel has none, or several."""
        free = [cell for cell in self.methods.values() if cell.config.scheme == "target-free"]
        found = {cell.panel: cell.method for cell in free}
        return found if len(free) == len(found) == len(self.panels) else {}

    @property
    def learned_from(self) -> list[str]:
        """Games that were made for learning: what they are belongs to every number."""
        told = [
            one.summary["learned_from"] for one in self.runs if one.config.writes and one.summary.get("learned_from")
        ]
        return list(dict.fromkeys(f"Learned from {games['games']}; {games['words']} words." for games in told))

    @property
    def going(self) -> int:
        return sum(not one.finished for one in self.runs)

    @property
    def waiting(self) -> int:
        """How many runs of the study have not begun."""
        return len(self.cells) * len(self.seeds) - len(self.runs) if self.study else 0

    @property
    def about(self) -> str:
        if not self.study:
            return "Runs that were trained one by one."
        return self.study.question + (f" ({self.study.paper}; scale: {self.study.scale})" if self.study.paper else "")

    @property
    def command(self) -> str:
        """That trains the study; nothing without one."""
        return command(self.study) if self.study else ""

    @property
    def references(self) -> References:
        tasks = self.study.tasks if self.study else ()
        return {task["env_id"]: (task.get("random_score"), task.get("reference_score")) for task in tasks}


def collect(folder: Path, baseline: str | None = None) -> Collected:
    """The study of a folder; without a study.toml, the runs below it as they come."""
    if not folder.is_dir():
        hint = nearest_path(folder) or "; give that of a study, or one with runs in it."
        raise UserError(f"{folder} is not a folder{hint}")
    if (folder / "study.toml").is_file():
        study = read_study(folder / "study.toml")
        runs = tuple(_of_study(folder, study))
        found = Collected(study.name, baseline or study.baseline, study.cells, study.seeds, runs, study, folder)
    else:
        cells, runs = _of_folder(folder)
        seeds = tuple(sorted({one.config.seed for one in runs}))
        first = min((cell.method for cell in cells), key=lambda name: not name.startswith("TB"))
        found = Collected(folder.resolve().name, baseline or first, cells, seeds, runs)
    for title, panel in found.panels.items():
        if found.baseline not in panel:
            where = f"a method of the panel {title!r}" if title else "a method here"
            raise UserError(f"The baseline {found.baseline!r} is not {where}; {nearest(found.baseline, panel)}")
    return found


def _of_study(folder: Path, study: Study) -> Iterator[Run]:
    """The runs that have begun; each must be what the study asks for."""
    for cell in study.cells:
        for seed in study.seeds:
            place = cell.folder(folder, seed)
            if not (place / "config.toml").is_file():
                continue
            yield read_run(place, cell.read_config(place, seed), cell.task, cell.method)


def _of_folder(folder: Path) -> tuple[tuple[Cell, ...], tuple[Run, ...]]:
    """Runs of one label are of one method, unless on one task they differ in more than seed and length."""
    places = [path.parent for path in sorted(folder.rglob("config.toml"))]
    # A saved model has a config.toml too.
    places = [place for place in places if any((place / name).is_file() for name in ("summary.json", "episodes.csv"))]
    if not places:
        raise UserError(f"There is no run in {folder}; `isqn train` and `isqn study` make some.")
    configs = {place: read_config(place) for place in places}
    configs = {place: config.replace(env_id=full_id(config.env_id)) for place, config in configs.items()}
    _require_common_task(folder, list(configs.values()))
    varied = _varied(list(configs.values()))
    cells: dict[tuple[str, str], Cell] = {}
    found: dict[Key, tuple[Path, Run]] = {}
    for place, config in configs.items():
        name = method_name(config, varied)
        one = read_run(place, config, config.env_id, name)
        if one.key in found:
            raise UserError(
                f"{found[one.key][0]} and {place} are the same run twice; report only one of their folders."
            )
        found[one.key] = place, one
        cells.setdefault((one.task, name), Cell(one.task, name, config, in_panel=name))
    ordered = sorted(cells.values(), key=lambda cell: (cell.task, _place_in_the_paper(cell.config)))
    return tuple(ordered), tuple(one for _, one in found.values())


def _require_common_task(folder: Path, configs: list[Config]) -> None:
    """Methods are compared on the same tasks, and agents with other actions have none in common."""
    if len({config.is_offline for config in configs}) > 1:
        raise UserError(
            f"Some runs in {folder} learn from datasets and some by playing, which have neither steps nor returns in "
            "common; report their folders one by one."
        )
    tasks: dict[str, set[str]] = {}
    for config in configs:
        tasks.setdefault(config.agent, set()).add(config.env_id)
    if len(tasks) > 1 and not set.intersection(*tasks.values()):
        played = "; ".join(f"{agent} on {', '.join(sorted(own))}" for agent, own in tasks.items())
        raise UserError(f"The runs in {folder} have no task in common ({played}); report their folders one by one.")


def _varied(configs: list[Config]) -> list[str]:
    """The settings that a method's name must tell: its label and the task do not say what they are."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for config in configs:
        alike.setdefault((config.env_id, config.label), []).append(config.kept())
    names = [name for name in configs[0].kept() if name not in NOT_A_METHOD]
    varied = [name for name in names if any(one[name] != group[0][name] for group in alike.values() for one in group)]
    for place in MAY_MOVE:
        places: dict[tuple[str, ...], set[str]] = {}  # each seed may have one of its own, but not two
        for config in configs:
            one_run = tuple(str(getattr(config, name)) for name in ("env_id", "label", "seed", *varied))
            places.setdefault(one_run, set()).add(getattr(config, place))
        varied += [place] * any(len(found) > 1 for found in places.values())
    return varied


def _place_in_the_paper(config: Config) -> tuple[int, int]:
    return list(SCHEMES).index(config.scheme), config.num_bellman_iterations
