"""Checks of a study: each problem is one sentence that says what was given and what is allowed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from isqn.agents.registry import agent_names, config_class, foreign_setting, owners
from isqn.config.fields import (
    MAX_INTEGER,
    Needs,
    field_names,
    field_types,
    find_rules,
    has_effect,
    nearest,
    nearest_setting,
)
from isqn.data.convert import check_subset
from isqn.presets import presets_of
from isqn.schemes import SCHEMES
from isqn.study.cell import setting_values
from isqn.train.record import slug
from isqn.types import UserError

if TYPE_CHECKING:
    from isqn.study.cell import Cell
    from isqn.study.grid import Study

SUBSET_SETTINGS = {"subset": "all", "fraction": 1.0, "checkpoints": 50}  # of a log, as of `isqn data convert`
LOGGING_AGENT = "dqn"  # the agent whose runs log datasets
FIELD_OF_SETTING = {  # settings that a study has a field for
    "agent": "agent",
    "env_id": "tasks",
    "seed": "seeds",
    "num_seeds": "seeds",
    "experiment": "name",
}
SCORES = ("random_score", "reference_score")
SCALES = ("own", "mini", "paper")
LENGTHS = (("total_timesteps", "epoch_steps"), ("num_updates", "epoch_updates"))


def setting_names(agent: str) -> tuple[str, ...]:
    """Return the settings of an agent that a table of a study can have."""
    return tuple(name for name in field_names(config_class(agent)) if name not in FIELD_OF_SETTING)


def number_settings(agent: str) -> list[str]:
    numbers = (int, float, float | None)
    return [name for name, kind in field_types(config_class(agent)).items() if kind in numbers]


def list_settings(agent: str) -> set[str]:
    return {name for name, kind in field_types(config_class(agent)).items() if get_origin(kind) is tuple}


def check_tables(study: Study) -> None:
    """Check the fields of a study, and that its tables set what a run of its agent has."""
    where = f"study {study.name}"
    require_folder_name(study.name, f"{where}: name")
    if "/" in study.name or study.name.startswith("."):
        raise UserError(f"{where}: name is {study.name!r}; it must be a name, not a path.")
    require_one_of(SCALES, study.scale, f"{where}: scale", "a scale", f"choose one of {', '.join(SCALES)}.")
    require_one_of(agent_names(), study.agent, f"{where}: agent", "an agent")
    for name in ("seeds", "tasks", "methods"):
        if not getattr(study, name):
            raise UserError(f"{where}: {name} is empty; give at least one.")
    seeds = {seed for seed in study.seeds if type(seed) is int and 0 <= seed <= MAX_INTEGER}
    if len(seeds) < len(study.seeds):
        raise UserError(
            f"{where}: seeds is {list(study.seeds)}; they must be different whole numbers from 0 to {MAX_INTEGER}."
        )
    _check_settings(study, study.settings, f"{where}: settings")
    for task in study.tasks:
        _check_task(study, task)
    for number, method in enumerate(study.methods, start=1):
        _check_method(study, method, f"{where}: method {number}")
    require_different([task["env_id"] for task in study.tasks], f"{where}: the tasks", "leave one of them out")
    if study.datasets:
        if not _uses_datasets(study):
            raise UserError(f"{where}: datasets are for the agent {' or '.join(owners('dataset'))}.")
        _check_settings(study, study.datasets, f"{where}: datasets", *SUBSET_SETTINGS, agent=LOGGING_AGENT)
        check_subset(**study.dataset_subset, where=f"{where}: datasets: ")


def _check_settings(study: Study, table: dict[str, Any], where: str, *more: str, agent: str = "") -> None:
    """Check the names, and that a file can hold the values; the config itself checks what they may be."""
    agent = agent or study.agent
    known = ("preset", *setting_names(agent), *more)
    for key, value in table.items():
        if key not in known:
            hint = f"a study says it by `{FIELD_OF_SETTING[key]}`." if key in FIELD_OF_SETTING else ""
            if not hint and (foreign := foreign_setting(key, agent)):
                raise UserError(f"{where} sets {key!r}; {foreign}")
            hint = hint or nearest_setting(key, config_class(agent), known, _help(agent))
            raise UserError(f"{where} sets {key!r}, which is not a setting there; {hint}")
        if key not in more and not _is_plain(value):
            raise UserError(
                f"{where}: {key} is {value!r}; it must be a text, a finite number of at most 64 bits, true or "
                "false, or a list of those."
            )
    if "preset" in table:
        preset = table["preset"]
        if not isinstance(preset, str):
            raise UserError(f"{where}: preset is {preset!r}; it must be a text.")
        require_one_of(presets_of(agent), preset, f"{where}: preset", f"a preset of the agent {agent}")


def _check_task(study: Study, task: dict[str, Any]) -> None:
    env_id = task.get("env_id")
    if not isinstance(env_id, str):
        raise UserError(f"study {study.name}: a task has no env_id; `isqn list envs` shows what there is.")
    where = f"study {study.name}, {env_id}"
    require_folder_name(env_id, f"{where}: env_id")
    _check_settings(study, task, where, "env_id", *SCORES, *SCHEMES)
    for key in SCORES:
        score = task.get(key, 0)
        if type(score) not in (int, float) or not _is_plain(score) or score == math.inf:
            raise UserError(f"{where}: {key} is {score!r}; it must be a number.")
    random, reference = task.get("random_score", -math.inf), task.get("reference_score", math.inf)
    if random >= reference:
        raise UserError(f"{where}: random_score is {random}; it must be below reference_score ({reference}).")
    for scheme in SCHEMES:
        table = task.get(scheme, {})
        if not isinstance(table, dict) or "scheme" in table:
            raise UserError(f"{where}: {scheme} is {table!r}; it must be a table of other settings.")
        _check_settings(study, table, f"{where}, {scheme}")


def _check_method(study: Study, method: dict[str, Any], where: str) -> None:
    _check_settings(study, method, where, "name")
    if not isinstance(method.get("name", ""), str):
        raise UserError(f"{where}: name is {method['name']!r}; it must be a text.")
    for key in method:
        if not setting_values(method, key, list_settings(study.agent)):
            raise UserError(f"{where}: {key} is an empty list; give at least one value.")


# -- checks of the grid


def check_grid(study: Study) -> None:
    """Check that the runs of a study can be told apart and compared."""
    where = f"study {study.name}"
    _check_axes(study, where)
    _check_dataset_paths(study, where)
    _check_tasks_agree(study, where)
    _check_lengths(study, where)
    _check_effects(study, where)
    _check_names(study, where)


def _check_axes(study: Study, where: str) -> None:
    if study.along:
        numbers = number_settings(study.agent)
        require_one_of(numbers, study.along, f"{where}: along", "a setting that is a number", _help(study.agent))
    if study.panels:
        if study.panels == study.along:
            raise UserError(f"{where}: along and panels are both {study.along!r}; let panels be another setting.")
        settings = setting_names(study.agent)
        require_one_of(settings, study.panels, f"{where}: panels", "a setting", _help(study.agent))


def _check_dataset_paths(study: Study, where: str) -> None:
    if not _uses_datasets(study):
        return
    for cell in study.cells:
        if not cell.config.dataset:
            raise UserError(f"{where}: {cell.task} has no dataset; give its folder, inside that of the study.")
        path = Path(cell.config.dataset.replace("{seed}", "0"))
        if path.is_absolute() or ".." in path.parts or "{" in str(path):
            raise UserError(
                f"{where}: dataset is {cell.config.dataset!r}; it must be a path inside the study's folder, where "
                "{seed} stands for the seed."
            )


def _check_tasks_agree(study: Study, where: str) -> None:
    """Refuse a method that has another name or panel on another task."""
    for first, same in zip(itertools.cycle(_first_task(study)), study.cells, strict=False):
        if first.name_with_panel != same.name_with_panel:
            raise UserError(
                f"{where}: one method is named {first.name_with_panel!r} on {first.task} and {same.name_with_panel!r} "
                f"on {same.task}; move the setting in which they differ from [[tasks]] to [[methods]]."
            )


def _check_lengths(study: Study, where: str) -> None:
    """Refuse runs that cannot be compared epoch by epoch."""
    settings = next((names for names in LENGTHS if names[0] in setting_names(study.agent)), ())
    for one, other in itertools.pairwise(study.cells):
        for name in ("num_epochs", *(settings if one.task == other.task else ())):
            length, other_length = getattr(one.config, name), getattr(other.config, name)
            if length != other_length:
                advice = f"set their {' and '.join(settings)} alike" if settings else "let them be equally long"
                raise UserError(
                    f"{where}: {one.name_with_panel} on {one.task} has {name} {length} and "
                    f"{other.name_with_panel} on {other.task} {other_length}; {advice}."
                )


def _check_effects(study: Study, where: str) -> None:
    tables = (study.settings, *study.methods, *study.tasks, *(task.get(s, {}) for task in study.tasks for s in SCHEMES))
    conditions = find_rules(config_class(study.agent), Needs)
    for name in dict.fromkeys(name for table in tables for name in table):
        if not any(has_effect(name, cell.config) for cell in study.cells):
            raise UserError(f"{where}: {name} has no effect in any run: it needs {conditions[name].describe()}.")


def _check_names(study: Study, where: str) -> None:
    """Check that methods and lines have different names, and that the axes and the baseline exist."""
    first = _first_task(study)
    for cell in first:
        require_folder_name(cell.method, f"{where}: the name of a method")
    require_different([cell.method for cell in first], f"{where}: the methods")
    for panel in dict.fromkeys(cell.panel for cell in first):
        cells = [cell for cell in first if cell.panel == panel]
        names = [cell.in_panel for cell in cells]
        here = f"{where}, {panel}" if panel else where
        require_different(names, f"{here}: the methods")
        require_one_of(names, study.baseline, f"{here}: baseline", "a method")
        lines = dict.fromkeys(cell.line for cell in cells if cell.position is not None)
        across = [cell.line for cell in cells if cell.position is None]
        require_different([*across, *lines], f"{here}: the lines")
    if study.along and all(cell.position is None for cell in first):
        raise UserError(f"{where}: along is {study.along!r}, and no method has a list of it.")
    if study.panels and len({cell.panel for cell in first}) == 1:
        raise UserError(f"{where}: panels is {study.panels!r}, and all methods have the same.")


def _first_task(study: Study) -> tuple[Cell, ...]:
    """Return the cells of all methods on the first task."""
    return study.cells[: len(study.cells) // len(study.tasks)]


def _uses_datasets(study: Study) -> bool:
    return "dataset" in setting_names(study.agent)


# -- checks of values and names


def _help(agent: str) -> str:
    return f"the settings are those of `isqn train {agent} --help`."


def _is_plain(value: Any) -> bool:
    """Return whether `to_toml` can write a value: no dates, tables, nan, -inf or integers beyond 64 bits."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str) or (isinstance(value, float) and value > -math.inf)


def require_one_of(known: Collection[str], name: str, what: str, kind: str, otherwise: str = "") -> None:
    if name not in known:
        raise UserError(f"{what} is {name!r}, which is not {kind}; {nearest(name, known, otherwise)}")


RENAME_ADVICE = "give one of them another `name`, or leave it out"


def require_different(names: list[str], what: str, advice: str = RENAME_ADVICE) -> None:
    """Refuse names that would be the same folder, also on a file system that ignores case."""
    earlier: dict[str, str] = {}
    for name in names:
        folder = slug(name).lower()
        if folder in earlier:
            raise UserError(f"{what} {earlier[folder]!r} and {name!r} have the same folder name; {advice}.")
        earlier[folder] = name


def require_folder_name(name: str, what: str) -> None:
    if not (name.strip(". /") and name.isprintable() and len(name.encode()) <= 100):
        raise UserError(f"{what} is {name!r}; it must be a text that can name a folder, of at most 100 bytes.")
