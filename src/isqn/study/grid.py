"""A study: one question, asked of some methods on some tasks over some seeds. Data only, and a TOML file as well.

The settings of a run are those of a preset, then of the study, of the task, of the task for one scheme, and of the
method; each may change what comes before it.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import os
import re
import runpy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

from isqn.data.convert import require_part
from isqn.experiments.config import (
    AGENTS,
    MAY_MOVE,
    MOST_INTEGER,
    NEEDS,
    Config,
    from_mapping,
    has_effect,
    load_toml,
    nearest,
    nearest_setting,
    read_toml,
    seed_dir,
    slug,
    toml_value,
)
from isqn.presets import preset_config, preset_for, presets_of
from isqn.schemes import SCHEMES
from isqn.types import UserError

FIELDS = get_type_hints(Config)
PART = ("subset", "fraction", "checkpoints")  # of a log, as of `isqn data convert`
LISTS = {name for name, kind in FIELDS.items() if get_origin(kind) is tuple}
NUMBERS = [name for name, kind in FIELDS.items() if kind in (int, float, float | None)]
OF_A_STUDY = {  # what says it there
    "agent": "agent",
    "env_id": "tasks",
    "seed": "seeds",
    "num_seeds": "seeds",
    "experiment": "name",
}
HELP = "the settings are those of `isqn train dqn --help`."
SETTINGS = [name for name in FIELDS if name not in OF_A_STUDY]
SCORES = ("random_score", "reference_score")
SHORT = {
    "num_bellman_iterations": "K={}",
    "target_update_period": "T={}",
    "target_step_size": "tau={:g}",
    "learning_rate": "lr={:g}",
    "width_factor": "width x{:g}",
    "compute_dtype": "{}",
}
SWITCHES = {"layer_norm": "LN", "batch_norm": "BN", "analysis": "analysis"}


@dataclass(frozen=True)
class Study:
    name: str
    question: str
    baseline: str
    """The method by whose IQM the AUCs are divided."""
    seeds: tuple[int, ...]
    tasks: tuple[dict[str, Any], ...]
    """`env_id`, maybe `random_score` and `reference_score`, settings, and a table of settings for a scheme."""
    methods: tuple[dict[str, Any], ...]
    """Settings, and maybe a `name`; a list of values makes a method of each."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of all runs; maybe `preset`."""
    scale: str = "own"
    paper: str = ""
    """Which figure of the paper asks the same."""
    along: str = ""
    """The setting on the x axis of an ablation."""
    panels: str = ""
    """The setting whose values stand side by side, each divided by its own baseline."""
    flops: bool = False
    """Also count the work of an update."""
    agent: str = "dqn"
    """What learns."""
    datasets: dict[str, Any] = field(default_factory=dict)
    """Of an agent that learns from datasets: how those that are not there yet are made. Settings of the run of dqn that
    logs them, maybe with a `preset`; and `subset`, `fraction` and `checkpoints` as of `isqn data convert`."""
    imports: tuple[str, ...] = ()
    """Python files or modules to import first, which add losses, schemes, torsos or environments of your own."""

    def __post_init__(self) -> None:
        where = f"study {self.name}"
        for name in ("name", "scale"):
            _require_folder_name(getattr(self, name), f"{where}: {name}")
        _require_one_of(AGENTS, self.agent, f"{where}: agent", "an agent")
        for name in ("seeds", "tasks", "methods"):
            if not getattr(self, name):
                raise UserError(f"{where}: {name} is empty; give at least one.")
        seeds = {seed for seed in self.seeds if type(seed) is int and 0 <= seed <= MOST_INTEGER}
        if len(seeds) < len(self.seeds):
            raise UserError(
                f"{where}: seeds is {list(self.seeds)}; they must be different whole numbers from 0 to {MOST_INTEGER}."
            )
        self._check_settings(self.settings, f"{where}: settings")
        for task in self.tasks:
            self._check_task(task)
        for number, method in enumerate(self.methods, start=1):
            self._check_method(method, f"{where}: method {number}")
        _require_different([task["env_id"] for task in self.tasks], f"{where}: the tasks", "leave one of them out")
        if self.datasets:
            if self.agent != "cql":
                raise UserError(f"{where}: datasets are for the agent cql.")
            self._check_settings(self.datasets, f"{where}: datasets", *PART, agent="dqn")
            require_part(**self.part, where=f"{where}: datasets: ")
        self._check_grid(where)

    @property
    def part(self) -> dict[str, Any]:
        """What is taken of each log."""
        given = {key: value for key, value in self.datasets.items() if key in PART}
        return {"subset": "all", "fraction": 1.0, "checkpoints": 50} | given

    def _check_settings(self, table: dict[str, Any], where: str, *more: str, agent: str = "") -> None:
        """The names, and that a file can hold the values; what a value may be is for `Config` to say."""
        agent = agent or self.agent
        known = ("preset", *SETTINGS, *more)
        for key, value in table.items():
            if key not in known:
                said = f"a study says it by `{OF_A_STUDY[key]}`." if key in OF_A_STUDY else ""
                hint = said or nearest_setting(key, known, HELP)
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
            _require_one_of(presets_of(agent), preset, f"{where}: preset", f"a preset of the agent {agent}")

    def _check_task(self, task: dict[str, Any]) -> None:
        env_id = task.get("env_id")
        if not isinstance(env_id, str):
            raise UserError(f"study {self.name}: a task has no env_id; `isqn list envs` shows what there is.")
        where = f"study {self.name}, {env_id}"
        _require_folder_name(env_id, f"{where}: env_id")
        self._check_settings(task, where, "env_id", *SCORES, *SCHEMES)
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
            self._check_settings(table, f"{where}, {scheme}")

    def _check_method(self, method: dict[str, Any], where: str) -> None:
        self._check_settings(method, where, "name")
        if not isinstance(method.get("name", ""), str):
            raise UserError(f"{where}: name is {method['name']!r}; it must be a text.")
        for key in method:
            if not _values(method, key):
                raise UserError(f"{where}: {key} is an empty list; give at least one value.")

    def _check_grid(self, where: str) -> None:
        """Every method has a name and a place, and these are the same on every task."""
        if self.along:
            _require_one_of(NUMBERS, self.along, f"{where}: along", "a setting that is a number", HELP)
        if self.panels:
            if self.panels == self.along:
                raise UserError(f"{where}: along and panels are both {self.along!r}; let panels be another setting.")
            _require_one_of(SETTINGS, self.panels, f"{where}: panels", "a setting", HELP)
        first = self.cells[: len(self.cells) // len(self.tasks)]  # on the first task
        for cell in self.cells:
            if self.agent == "cql" and not cell.config.dataset:
                raise UserError(f"{where}: {cell.task} has no dataset; give its folder, inside that of the study.")
            place = Path(cell.config.dataset.replace("{seed}", "0"))
            if place.is_absolute() or ".." in place.parts or "{" in str(place):
                raise UserError(
                    f"{where}: dataset is {cell.config.dataset!r}; it must be a path inside the study's folder, where "
                    "{seed} stands for the seed."
                )
        for one, same in zip(itertools.cycle(first), self.cells, strict=False):
            if one.place != same.place:
                raise UserError(
                    f"{where}: what is {one.place!r} on {one.task} is {same.place!r} on {same.task}; "
                    "let the method say what they differ in."
                )
        for one, other in itertools.pairwise(self.cells):
            sizes = ("total_timesteps", "epoch_steps", "num_updates", "epoch_updates")
            alike = ("num_epochs", *(sizes if one.task == other.task else ()))
            what = "num_updates and epoch_updates" if one.config.is_offline else "total_timesteps and epoch_steps"
            for name in alike:  # curves and areas are compared epoch by epoch
                mine, theirs = getattr(one.config, name), getattr(other.config, name)
                if mine != theirs:
                    raise UserError(
                        f"{where}: {one.place} on {one.task} has {name} {mine} and {other.place} on {other.task} "
                        f"{theirs}; set their {what} alike."
                    )
        tables = (self.settings, *self.methods, *self.tasks, *(task.get(s, {}) for task in self.tasks for s in SCHEMES))
        for name in dict.fromkeys(name for table in tables for name in table):
            if not any(has_effect(name, cell.config) for cell in self.cells):
                raise UserError(f"{where}: {name} has no effect in any run: it needs {NEEDS[name][1]}.")
        for cell in first:
            _require_folder_name(cell.method, f"{where}: the name of a method")
        _require_different([cell.method for cell in first], f"{where}: the methods")
        for panel in dict.fromkeys(cell.panel for cell in first):
            cells = [cell for cell in first if cell.panel == panel]
            names = [cell.in_panel for cell in cells]
            here = f"{where}, {panel}" if panel else where
            _require_different(names, f"{here}: the methods")
            _require_one_of(names, self.baseline, f"{here}: baseline", "a method")
            lines = dict.fromkeys(cell.line for cell in cells if cell.position is not None)
            across = [cell.line for cell in cells if cell.position is None]
            _require_different([*across, *lines], f"{here}: the lines")
        if self.along and all(cell.position is None for cell in first):
            raise UserError(f"{where}: along is {self.along!r}, and no method has a list of it.")
        if self.panels and len({cell.panel for cell in first}) == 1:
            raise UserError(f"{where}: panels is {self.panels!r}, and all methods have the same.")

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every task with every method."""
        return tuple(
            self._cell(task, choice, varied)
            for task in self.tasks
            for method in self.methods
            for choice, varied in _choices(method)
        )

    def _cell(self, task: dict[str, Any], choice: dict[str, Any], varied: list[str]) -> Cell:
        mine = {key: value for key, value in task.items() if key not in ("env_id", *SCORES, *SCHEMES)}
        scheme = (self.settings | mine | choice).get("scheme", Config.scheme)
        for_scheme = task.get(scheme, {}) if scheme in list(SCHEMES) else {}  # what is no scheme, Config refuses
        given = self.settings | mine | for_scheme | choice
        name, preset = given.pop("name", ""), given.pop("preset", preset_for(task["env_id"], self.agent))
        given |= {"env_id": task["env_id"], "experiment": self.name}
        config = from_mapping(given, f"study {self.name}, {task['env_id']}", preset_config(preset, self.agent))

        def called(*without: str) -> str:
            return method_name(config, [key for key in varied if key not in without], name)

        line = called(self.along, self.panels)
        if self.along == "num_bellman_iterations" and self.along in varied and not name:
            line = line.replace(f" {config.target_scheme.size}", "")  # the label says it too
        return Cell(
            task=task["env_id"],
            method=called(),
            config=config,
            panel=_words(self.panels, getattr(config, self.panels)) if self.panels else "",
            in_panel=called(self.panels),
            line=line,
            position=float(getattr(config, self.along)) if self.along in varied else None,
        )

    def only(self, tasks: tuple[str, ...] = (), seeds: tuple[int, ...] = ()) -> Study:
        """Some of its tasks, or other seeds; nothing given changes nothing."""
        if not (tasks or seeds):
            return self
        known = {task["env_id"]: task for task in self.tasks}
        for task in tasks:
            _require_one_of(known, task, f"study {self.name}: --tasks", "a task of it")
        chosen = tuple(known[task] for task in tasks) or self.tasks
        return self.replace(tasks=chosen, seeds=seeds or self.seeds)

    def replace(self, **changes: Any) -> Study:
        return dataclasses.replace(self, **changes)


class Cell(NamedTuple):
    """One method on one task: a row of runs that differ in their seed."""

    task: str
    method: str
    config: Config  # of any seed
    panel: str = ""  # which panel it is in
    in_panel: str = ""  # its name there
    line: str = ""  # which line of an ablation it is a point of
    position: float | None = None  # where on that line; None: it does not depend on what varies

    @property
    def place(self) -> str:
        return f"{self.method} in {self.panel}" if self.panel else self.method

    def read_config(self, folder: Path, seed: int) -> Config:
        """Of a run that is there, which must be the one that is asked for."""
        return require_settings(folder, self.config.replace(seed=seed))

    def config_in(self, out: Path, seeds: tuple[int, ...]) -> Config:
        """Of some seeds, with what it reads where that lies: its dataset inside the study, the rest where the study was
        started, because a worker may be started elsewhere."""
        config = self.config.replace(seed=seeds[0], num_seeds=len(seeds))
        from_here = {"dataset": out}
        found = {name: from_here.get(name, Path.cwd()) / place for name, place in _places(config).items()}
        return config.replace(**{name: os.path.normpath(place) for name, place in found.items()})

    def folder(self, out: Path, seed: int) -> Path:
        return seed_dir(out / "runs" / slug(self.task) / slug(self.method), seed)


def require_settings(folder: Path, asked: Config) -> Config:
    """Of a run that is there, and has the settings that a study asks for."""
    try:
        config = read_toml(folder / "config.toml")
    except UserError as error:
        raise UserError(f"{error} Move {folder} away to train it anew.") from None
    places = _places(asked)
    for name in (*config.kept(), "total_timesteps", "num_updates", *MAY_MOVE):
        there, here = getattr(config, name), places.get(name, getattr(asked, name))
        same = there == here
        if name in places:  # as the study was started elsewhere, the end of a path is enough
            end = [part for part in Path(os.path.normpath(here)).parts if part != ".."]
            same = list(Path(there).parts)[len(Path(there).parts) - len(end) :] == end
        if not same and name not in ("experiment", "dataset"):  # a run itself knows what is in its dataset
            raise UserError(
                f"{folder} has {name} = {there!r}, and the study says {here!r}; choose another folder, or move "
                "the run away."
            )
    return config


def _places(config: Config) -> dict[str, str]:
    """What a run reads; {seed} in a path stands for the seed."""
    return {name: place.replace("{seed}", str(config.seed)) for name, place in config.places.items()}


def _values(method: dict[str, Any], key: str) -> list[Any]:
    """What a method sets a field to: a list, unless the field itself is one and this is just its value."""
    value = method[key]
    if not isinstance(value, list | tuple):
        return [value]
    several = key not in LISTS or any(isinstance(entry, list | tuple) for entry in value)
    return list(value) if several else [value]


def _choices(method: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Every combination of the lists of a method, and the settings that vary."""
    lists = {key: _values(method, key) for key in method}
    varied = [key for key, values in lists.items() if len(values) > 1]
    for values in itertools.product(*lists.values()):
        yield dict(zip(method, values, strict=True)), varied


def method_name(config: Config, varied: list[str], name: str = "") -> str:
    """Its own name or the paper's label, and what that does not say: "iS-DQN K=9, T=400"."""
    told = () if name else ("scheme", "num_bellman_iterations", "loss", "meta_gradient")
    return ", ".join([name or config.label, *(_words(key, getattr(config, key)) for key in varied if key not in told)])


def _words(key: str, value: Any) -> str:
    if key in SWITCHES:
        return SWITCHES[key] if value else f"no {SWITCHES[key]}"
    return SHORT.get(key, f"{key.replace('_', ' ')} {{}}").format(value)


def _is_plain(value: Any) -> bool:
    """What TOML can hold and `to_toml` can write: not dates, tables, nan, -inf, and integers beyond 64 bits."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str) or (isinstance(value, float) and value > -math.inf)


def _require_one_of(known: Collection[str], name: str, what: str, kind: str, otherwise: str = "") -> None:
    if name not in known:
        raise UserError(f"{what} is {name!r}, which is not {kind}; {nearest(name, known, otherwise)}")


RENAME = "give one of them another `name`, or leave it out"


def _require_different(names: list[str], what: str, cure: str = RENAME) -> None:
    """As folders too, also where these do not tell capital letters apart."""
    seen: dict[str, str] = {}
    for name in names:
        folder = slug(name).lower()
        if folder in seen:
            raise UserError(f"{what} {seen[folder]!r} and {name!r} are not told apart; {cure}.")
        seen[folder] = name


def _require_folder_name(name: str, what: str) -> None:
    if not (name.strip(". /") and name.isprintable() and len(name.encode()) <= 100):
        raise UserError(f"{what} is {name!r}; it must be a text that can name a folder, of at most 100 bytes.")


def to_toml(study: Study, folder: Path | None = None) -> str:
    """As a file that `isqn study FILE.toml` reads; in a folder, it names the files to import as seen from there."""
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


_IMPORTED: set[str] = set()  # files by their text: the copy of one in a study is the same
_KINDS: dict[str, tuple[type, str]] = {
    "seeds": (list, "a list"),
    "tasks": (list, "tables, each under [[tasks]]"),
    "methods": (list, "tables, each under [[methods]]"),
    "settings": (dict, "a table"),
    "datasets": (dict, "a table"),
    "flops": (bool, "true or false"),
    "imports": (list, "a list of names"),
}


def read_study(path: Path) -> Study:
    values = load_toml(path, "give a study file.")
    try:
        return _from_values({"name": path.stem} | values, path.resolve().parent)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def import_all(names: Iterable[str]) -> None:
    """What registers itself when it is imported, in this process; once, as it may not like to be twice."""
    for name in names:
        try:
            if not name.endswith(".py"):
                importlib.import_module(name)
            elif (text := Path(name).read_text()) not in _IMPORTED:
                runpy.run_path(name)
                _IMPORTED.add(text)
        except (Exception, SystemExit) as error:  # whatever is wrong in a file of the user's
            raise UserError(f"imports: {name!r} cannot be imported: {type(error).__name__}: {error}.") from error


def import_for(run_dir: Path) -> None:
    """What the study of a run imports, if it is the run of a study."""
    for folder in run_dir.resolve().parents:
        if (folder / "study.toml").is_file():
            import_all(_imports(load_toml(folder / "study.toml", ""), folder))
            return


def _from_values(values: dict[str, Any], folder: Path) -> Study:
    known = [f.name for f in dataclasses.fields(Study)]
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{name!r} is not a field of a study; {nearest(name, known)}")
        kind, words = _KINDS.get(name, (str, "a text"))
        entries = value if isinstance(value, list) and name in ("tasks", "methods") else ()
        if not isinstance(value, kind) or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"{name} is {value!r}; it must be {words}.")
    lacking = [name for name in ("question", "baseline", "seeds", "tasks", "methods") if name not in values]
    if lacking:
        said = f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing"
        raise UserError(f"{said}; `isqn study online-plain --show` is an example of a study.")
    values["imports"] = _imports(values, folder)
    import_all(values["imports"])
    return Study(**values | {name: tuple(values[name]) for name in ("seeds", "tasks", "methods", "imports")})


def _imports(values: dict[str, Any], folder: Path) -> list[str]:
    """Files from the root, whatever folder they were named from."""
    names = values.get("imports", [])
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"imports is {names!r}; it must be {_KINDS['imports'][1]}.")
    _require_different([Path(name).name for name in names], "imports:", "rename one of them")
    return [str(folder / name) if name.endswith(".py") else name for name in names]
