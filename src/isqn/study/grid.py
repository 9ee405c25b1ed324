"""A study: one question, asked of some methods on some tasks over some seeds. It is data, and can be a TOML file.

The settings of a run come from a preset, then the study, the task, the task's table for one scheme, and the method;
each overrides those before it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from isqn.agents.registry import config_class, config_from_mapping
from isqn.config.fields import name_settings, nearest
from isqn.config.run import Run
from isqn.config.toml import load_toml, toml_value
from isqn.imports import import_all, module_of
from isqn.presets import default_config, preset_config
from isqn.schemes import SCHEMES
from isqn.study.cell import Cell, describe_setting, expand_method, method_name, require_settings
from isqn.study.checks import (
    SCORES,
    SUBSET_SETTINGS,
    check_grid,
    check_tables,
    list_settings,
    require_different,
    require_one_of,
)
from isqn.types import UserError

__all__ = ["Cell", "Study", "method_name", "read_study", "require_settings", "to_toml"]


@dataclass(frozen=True)
class Study:
    """A question and the grid of runs that answers it."""

    name: str
    question: str
    baseline: str
    """Method whose IQM divides the AUCs."""
    seeds: tuple[int, ...]
    tasks: tuple[dict[str, Any], ...]
    """Tables with `env_id`, optional `random_score` and `reference_score`, settings, and a table for a scheme."""
    methods: tuple[dict[str, Any], ...]
    """Tables of settings with an optional `name`; a list of values makes one method of each value."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of all runs, with an optional `preset`."""
    scale: str = "own"
    paper: str = ""
    """Figure of the paper that asks the same question."""
    along: str = ""
    """Setting on the x axis of an ablation."""
    panels: str = ""
    """Setting whose values are shown side by side, each divided by its own baseline."""
    flops: bool = False
    """Also count the operations of an update."""
    agent: str = "dqn"
    """Agent of all runs."""
    datasets: dict[str, Any] = field(default_factory=dict)
    """Settings of the dqn run that logs a missing dataset, for an agent that learns from datasets. `preset` is
    optional, and so are `subset`, `fraction` and `checkpoints`, as in `isqn data convert`."""
    imports: tuple[str, ...] = ()
    """Python files or modules to import first, which register losses, schemes, torsos or environments."""

    @name_settings()
    def __post_init__(self) -> None:
        check_tables(self)
        check_grid(self)

    # -- the grid

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every task with every method."""
        lists = list_settings(self.agent)
        return tuple(
            self._cell(task, choice, varied)
            for task in self.tasks
            for method in self.methods
            for choice, varied in expand_method(method, lists)
        )

    def _cell(self, task: dict[str, Any], choice: dict[str, Any], varied: list[str]) -> Cell:
        env_id, config, name = self._config(task, choice)

        def name_without(*settings: str) -> str:
            return method_name(config, [key for key in varied if key not in settings], name)

        line = name_without(self.along, self.panels)
        if self.along == "num_bellman_iterations" and self.along in varied and not name:
            line = line.replace(f" {config.target_scheme.size}", "")  # the label has it too
        return Cell(
            task=env_id,
            method=name_without(),
            config=config,
            panel=describe_setting(self.panels, getattr(config, self.panels)) if self.panels else "",
            in_panel=name_without(self.panels),
            line=line,
            position=float(getattr(config, self.along)) if self.along in varied else None,
        )

    def _config(self, task: dict[str, Any], choice: dict[str, Any]) -> tuple[str, Run, str]:
        """Return the environment, the config and the given name of one method on one task."""
        env_id = task["env_id"]
        of_task = {key: value for key, value in task.items() if key not in ("env_id", *SCORES, *SCHEMES)}
        default_scheme = config_class(self.agent).scheme
        scheme = (self.settings | of_task | choice).get("scheme", default_scheme)
        of_scheme = task.get(scheme, {}) if scheme in list(SCHEMES) else {}  # the config refuses an unknown scheme
        given = self.settings | of_task | of_scheme | choice
        name, preset = given.pop("name", ""), given.pop("preset", "")
        given |= {"env_id": env_id, "experiment": self.name}
        base = preset_config(preset, self.agent) if preset else default_config(self.agent, env_id)
        return env_id, config_from_mapping(given, f"study {self.name}, {env_id}", base), name

    def folders(self, out: Path) -> dict[Path, tuple[Cell, int]]:
        """Return the folder of every run, with its cell and seed."""
        return {cell.folder(out, seed): (cell, seed) for cell in self.cells for seed in self.seeds}

    # -- other properties and variants

    @property
    def dataset_subset(self) -> dict[str, Any]:
        """Subset of each log that becomes a dataset."""
        return SUBSET_SETTINGS | {key: value for key, value in self.datasets.items() if key in SUBSET_SETTINGS}

    @property
    def modules(self) -> list[str]:
        """Modules of environment ids such as `module:Env-v0`."""
        return list(dict.fromkeys(module for task in self.tasks if (module := module_of(task["env_id"]))))

    def with_imports(self, names: Iterable[str]) -> Study:
        """Return the study with more imports, such as those of `--import`, so that its workers import them too."""
        more = _absolute_imports(names, Path.cwd())
        return self.replace(imports=tuple(dict.fromkeys((*self.imports, *more)))) if more else self

    def only(self, tasks: tuple[str, ...] = (), seeds: tuple[int, ...] = ()) -> Study:
        """Return the study with some of its tasks, or with other seeds; without either, the study itself."""
        if not (tasks or seeds):
            return self
        known = {task["env_id"]: task for task in self.tasks}
        for task in tasks:
            require_one_of(known, task, f"study {self.name}: --tasks", "a task of it")
        chosen = tuple(known[task] for task in tasks) or self.tasks
        return self.replace(tasks=chosen, seeds=seeds or self.seeds)

    def replace(self, **changes: Any) -> Study:
        return dataclasses.replace(self, **changes)


# -- files


def to_toml(study: Study, folder: Path | None = None) -> str:
    """Write a study as a file for `isqn study FILE.toml`; imports that lie in `folder` are relative to it."""
    if folder:
        study = study.replace(imports=tuple(name.removeprefix(f"{folder.resolve()}/") for name in study.imports))
    lines = [f"# isqn study FILE.toml; the settings are those of `isqn train {study.agent} --help`."]
    plain = ("name", "question", "paper", "scale", "agent", "baseline", "along", "panels", "flops", "imports", "seeds")
    defaults = {f.name: f.default for f in dataclasses.fields(Study)}
    for name in plain:
        if getattr(study, name) != defaults[name]:
            lines.append(f"{name} = {toml_value(getattr(study, name))}")
    for name in ("settings", "datasets"):
        if getattr(study, name):
            lines += ["", f"[{name}]", *_entries(getattr(study, name))]
    for kind in ("tasks", "methods"):
        for table in getattr(study, kind):
            lines += ["", f"[[{kind}]]", *_entries({k: v for k, v in table.items() if not isinstance(v, dict)})]
            for name, inner in table.items():
                if isinstance(inner, dict):
                    lines += [f"[{kind}.{_key(name)}]", *_entries(inner)]
    return "\n".join(lines) + "\n"


def _entries(table: dict[str, Any]) -> list[str]:
    return [f"{_key(key)} = {toml_value(value)}" for key, value in table.items()]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else toml_value(name)


_TYPES: dict[str, tuple[type, str]] = {
    "seeds": (list, "a list"),
    "tasks": (list, "tables, each under [[tasks]]"),
    "methods": (list, "tables, each under [[methods]]"),
    "settings": (dict, "a table"),
    "datasets": (dict, "a table"),
    "flops": (bool, "true or false"),
    "imports": (list, "a list of names"),
}


def read_study(path: Path, *, import_code: bool = True) -> Study:
    """Read a study file, which the user has named: import what it names, and the modules of its environments.

    Without `import_code` nothing is executed, as for the study.toml in a folder of runs.
    """
    values = load_toml(path, "give a study file.")
    try:
        return _study_from_values({"name": path.stem} | values, path.resolve().parent, import_code)
    except UserError as error:
        error.args = (f"{path}: {error}",)
        raise


def _study_from_values(values: dict[str, Any], folder: Path, import_code: bool) -> Study:
    known = [f.name for f in dataclasses.fields(Study)]
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{name!r} is not a field of a study; {nearest(name, known)}")
        kind, words = _TYPES.get(name, (str, "a text"))
        entries = value if isinstance(value, list) and name in ("tasks", "methods") else ()
        if not isinstance(value, kind) or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"{name} is {value!r}; it must be {words}.")
    missing = [name for name in ("question", "baseline", "seeds", "tasks", "methods") if name not in values]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{', '.join(missing)} {verb} missing; `isqn study online-plain --show` is an example of a study."
        )
    imports = _absolute_imports(values.get("imports", []), folder)
    lists = {name: tuple(values[name]) for name in ("seeds", "tasks", "methods")}
    if import_code:
        _import_code(imports, "imports")
    try:
        study = Study(**values | lists | {"imports": imports})
    except UserError as error:
        if import_code or not imports:
            raise
        flags = " ".join(f"--import {name}" for name in imports)
        raise UserError(f"{error} The study was trained with {flags}; add it.") from None
    if import_code:
        _import_code(study.modules, "tasks")
    return study


def _absolute_imports(names: Any, folder: Path) -> tuple[str, ...]:
    """Return imports with the absolute paths of files; modules stay as they are."""
    names = list(names) if isinstance(names, list | tuple) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"imports is {names!r}; it must be {_TYPES['imports'][1]}.")
    require_different([Path(name).name for name in names], "imports:", "rename one of them")
    return tuple(str(folder / name) if name.endswith(".py") else name for name in names)


def _import_code(names: Iterable[str], field_name: str) -> None:
    try:
        import_all(names)
    except UserError as error:
        error.args = (f"{field_name}: {str(error).removeprefix('--import: ')}",)
        raise
