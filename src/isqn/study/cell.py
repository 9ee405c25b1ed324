"""A cell of a study's grid: one method on one task. It knows the names, folders and configs of its runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from isqn.agents.registry import read_config_file
from isqn.config.fields import field_names
from isqn.train.record import seed_dir, slug
from isqn.types import UserError

SHORT_NAMES = {
    "num_bellman_iterations": "K={}",
    "target_update_period": "T={}",
    "target_step_size": "tau={:g}",
    "learning_rate": "lr={:g}",
    "width_factor": "width x{:g}",
    "compute_dtype": "{}",
}
SWITCHES = {"layer_norm": "LN", "batch_norm": "BN", "analysis": "analysis"}
IN_THE_LABEL = ("scheme", "num_bellman_iterations", "loss", "meta_gradient")
# Settings in which a finished run may differ from what its study says. A run records the identity of its dataset.
MAY_DIFFER = ("experiment", "dataset", "checkpoint_minutes", "track")


class Cell(NamedTuple):
    """One method on one task: a row of runs that differ in their seed."""

    task: str
    method: str
    config: Any  # the config of its agent, for any seed
    panel: str = ""  # title of its panel
    in_panel: str = ""  # name of the method within the panel
    line: str = ""  # line of an ablation that it is a point of
    position: float | None = None  # position on that line; None: it does not depend on the varied setting

    @property
    def name_with_panel(self) -> str:
        return f"{self.method} in {self.panel}" if self.panel else self.method

    def read_config(self, folder: Path, seed: int) -> Any:
        """Return the config of an existing run, which must be the one that the study asks for."""
        return require_settings(folder, self.config.replace(seed=seed))

    def config_in(self, out: Path, seeds: tuple[int, ...]) -> Any:
        """Return the config of some seeds with absolute paths, because a worker may start in another folder.

        The dataset lies in the folder of the study; other paths are relative to where the study was started.
        """
        together = {"num_seeds": len(seeds)} if len(seeds) > 1 else {}
        config = self.config.replace(seed=seeds[0], **together)
        roots = {"dataset": out}
        paths = {name: roots.get(name, Path.cwd()) / path for name, path in _input_paths(config).items()}
        return config.replace(**{name: os.path.normpath(path) for name, path in paths.items()})

    def folder(self, out: Path, seed: int) -> Path:
        return seed_dir(out / "runs" / slug(self.task) / slug(self.method), seed)


def require_settings(folder: Path, asked: Any) -> Any:
    """Return the config of an existing run; refuse it unless it has the settings that a study asks for."""
    try:
        config = read_config_file(folder / "config.toml")
    except UserError as error:
        raise UserError(f"{error} Move {folder} away to train it anew.") from None
    paths = _input_paths(asked)
    for name in ("agent", *field_names(type(asked))):
        if name in MAY_DIFFER:
            continue
        existing, wanted = getattr(config, name), paths.get(name, getattr(asked, name))
        is_same = existing == wanted
        if name in paths:  # the study may have been started elsewhere, so the end of the path is enough
            end = [part for part in Path(os.path.normpath(wanted)).parts if part != ".."]
            is_same = list(Path(existing).parts)[len(Path(existing).parts) - len(end) :] == end
        if not is_same:
            raise UserError(
                f"{folder} has {name} = {existing!r}, and the study says {wanted!r}; choose another folder, or move "
                "the run away."
            )
    return config


def _input_paths(config: Any) -> dict[str, str]:
    """Return the paths that a run reads; {seed} in a path stands for the seed."""
    return {name: path.replace("{seed}", str(config.seed)) for name, path in config.input_paths.items()}


# -- methods and their names


def setting_values(method: dict[str, Any], key: str, list_settings: Collection[str]) -> list[Any]:
    """Return the values that a method gives to a setting.

    A list means several values, unless the setting is itself a list and this is just its value.
    """
    value = method[key]
    if not isinstance(value, list | tuple):
        return [value]
    has_several = key not in list_settings or any(isinstance(entry, list | tuple) for entry in value)
    return list(value) if has_several else [value]


def expand_method(method: dict[str, Any], list_settings: Collection[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield every combination of the values of a method, with the settings that vary."""
    lists = {key: setting_values(method, key, list_settings) for key in method}
    varied = [key for key, values in lists.items() if len(values) > 1]
    for values in itertools.product(*lists.values()):
        yield dict(zip(method, values, strict=True)), varied


def method_name(config: Any, varied: list[str], name: str = "") -> str:
    """Return the given name or the paper's label, followed by other settings that vary: "iS-DQN K=9, T=400"."""
    known = () if name else IN_THE_LABEL
    words = (describe_setting(key, getattr(config, key)) for key in varied if key not in known)
    return ", ".join([name or config.label, *words])


def describe_setting(key: str, value: Any) -> str:
    if key in SWITCHES:
        return SWITCHES[key] if value else f"no {SWITCHES[key]}"
    return SHORT_NAMES.get(key, f"{key.replace('_', ' ')} {{}}").format(value)
