"""Rules of a setting, written in the annotation of its field: range, condition for an effect, and aliases.

A config is a frozen dataclass. `check` applies the rules of all its fields. Rules that relate several settings are in
the `check_together` of the parts of a config.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from isqn.types import UserError

MAX_INTEGER = 2**31 - 1  # keys, steps and rows are 32-bit integers on a device
MAX_FLOAT = 3.4e38  # numbers on a device are float32


@dataclass(frozen=True)
class Range:
    """Bounds of a number; a bound is allowed itself unless it is open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        """Return the bounds as the end of an error message: "must be at least 1"."""
        low = f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        high = f"below {self.high:g}" if self.open_high else f"at most {self.high:g}"
        if self.low == -math.inf:
            return f"must be {high}"
        if self.high == math.inf:
            return f"must be {low}"
        closed_or_open = self.open_low == self.open_high
        return f"must be between {self.low:g} and {self.high:g}" if closed_or_open else f"must be {low} and {high}"


POSITIVE = Range(0, open_low=True)
AT_LEAST_ZERO = Range(0)
AT_LEAST_ONE = Range(1)
PROBABILITY = Range(0, 1)


@dataclass(frozen=True)
class Needs:
    """Condition on the other settings that a setting needs to have an effect."""

    condition: Callable[[Any], bool]
    words: str | Callable[[], str]  # what is needed; a function if it depends on a registry

    def describe(self) -> str:
        """Return what is needed as the end of an error message: "--loss munchausen"."""
        return self.words if isinstance(self.words, str) else self.words()


def needs(name: str, *values: Any) -> Needs:
    """Return the condition that the setting `name` has one of some values."""
    words = " or ".join(str(value) for value in values)
    return Needs(lambda config: getattr(config, name) in values, f"{flag(name)} {words}")


def needs_other(name: str, value: Any) -> Needs:
    """Return the condition that the setting `name` has another value than this one."""
    return Needs(lambda config: getattr(config, name) != value, f"another {flag(name)} than {value}")


def needs_above(name: str, bound: float) -> Needs:
    """Return the condition that the setting `name` is above a bound."""
    return Needs(lambda config: getattr(config, name) > bound, f"{flag(name)} above {bound}")


@dataclass(frozen=True)
class Mark:
    """Property of a setting that has no value of its own."""

    name: str


MAY_CHANGE = Mark("may change between a stop and a resume")
SIZE = Mark("decides how much memory the network takes")
JSON_OBJECT = Mark("JSON text of an object, kept in its shortest form with sorted names")
JSON_LIST = Mark("JSON text of a list, kept in its shortest form")
INPUT_PATH = Mark("path that a run reads; it may change too, because checkpoints have a digest of its contents")


JSON_FLAG = tyro.conf.arg(metavar="JSON")
NONE_OR_NUMBER = tyro.conf.arg(metavar="None|FLOAT")  # tyro's own words are {None}|FLOAT
EMPTY_IS_NONE = tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {default or 'none'})")  # for a tuple


def alias(*names: str) -> Any:
    """Return an annotation that gives a flag more names: `alias("k")` adds `--k`."""
    return tyro.conf.arg(aliases=[f"--{name}" for name in names])


def flag(field: str) -> str:
    """Return the flag of a setting."""
    return "--" + field.replace("_", "-")


@contextmanager
def rename_flags(rename: Callable[[str], str]) -> Iterator[None]:
    """Rename the flags in the message of an error; the commands in it, which are in backticks, stay as they are."""
    try:
        yield
    except UserError as error:
        error.args = (re.sub(r"`[^`]*`|--[a-z][\w-]*", lambda m: m[0] if m[0][0] == "`" else rename(m[0]), str(error)),)
        raise


def name_as_given(kind: type, names: Iterable[str]) -> AbstractContextManager[None]:
    """Let errors name settings by the alias that is among `names`: `--k` for `--num-bellman-iterations`."""
    flags = set(map(flag, (name.partition("=")[0].removeprefix("--") for name in names)))
    given = {flag(setting): alias for alias, setting in alias_flags(kind).items() if alias in flags}
    return rename_flags(lambda name: given.get(name, name))


def name_settings() -> _GeneratorContextManager[None]:
    """Let errors name settings as in Python and in files: `learning_rate` for `--learning-rate`."""
    of_commands = ("--debug", "--import")
    return rename_flags(lambda given: given if given in of_commands else given[2:].replace("-", "_"))


# -- reading the rules


def find_rules(kind: type, mark: Any) -> dict[str, Any]:
    """Return the rules of one type in a config: field -> rule."""
    return {
        name: rule
        for name, rules in _annotations(kind).items()
        for rule in rules
        if (isinstance(rule, mark) if isinstance(mark, type) else rule == mark)
    }


def field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field, without its rules. Not cached, because losses and schemes can be registered."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in field_names(kind)}


@cache
def _annotations(kind: type) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: tuple(getattr(hints[name], "__metadata__", ())) if get_origin(hints[name]) is Annotated else ()
        for name in field_names(kind)
    }


@cache
def read_docs(kind: type) -> dict[str, str]:
    """Return the docstring of each field, which is its line in `--help` and its comment in `config.toml`."""
    all_docs: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        if dataclasses.is_dataclass(part):
            all_docs |= _docs_of_class(part)
    return {name: all_docs.get(name, "") for name in field_names(kind)}


def has_source(part: type) -> bool:
    """Return whether the docstrings of a class can be read: not in a prompt, or if it was made by `config_class`."""
    try:
        inspect.getsource(part)
    except (OSError, TypeError):
        return False
    return True


def _docs_of_class(part: type) -> dict[str, str]:
    if not has_source(part):
        return {}
    (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(part))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


# -- checks


def require(config: Any, field: str, holds: bool, rule: str) -> None:
    """Refuse a config if a rule of one of its settings does not hold."""
    if not holds:
        raise UserError(f"{flag(field)} is {getattr(config, field)!r}; it {rule}.")


def check(config: Any) -> None:
    """Refuse a value of the wrong type or out of its range; turn lists into tuples and integers into floats."""
    kind = type(config)
    for mark, python_type in ((JSON_OBJECT, dict), (JSON_LIST, list)):
        for name in find_rules(kind, mark):
            object.__setattr__(config, name, json_text(name, getattr(config, name), python_type))
    for name, hint in field_types(kind).items():
        object.__setattr__(config, name, _checked(name, getattr(config, name), hint))
    for name, bounds in find_rules(kind, Range).items():
        value = getattr(config, name)
        require(config, name, value is None or value in bounds, str(bounds))


def json_text(name: str, value: Any, python_type: type) -> str:
    """Return a JSON value, given as text or as a Python object, as text; "" if it is empty."""
    wanted = """an object, such as '{"size": 3}'""" if python_type is dict else """a list, such as '["ClipReward"]'"""
    try:
        parsed = json.loads(value or "null") if isinstance(value, str) else value
        text = json.dumps(parsed, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{flag(name)} is {value!r}; it must be JSON, {wanted} ({error}).") from None
    if not parsed:
        return ""
    if not isinstance(parsed, python_type):
        raise UserError(f"{flag(name)} is {value!r}; it must be {wanted}.")
    return text


_TYPE_WORDS = {  # type -> one value and several, in words
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
}


def _checked(name: str, value: Any, hint: Any) -> Any:
    def refuse(rule: str) -> UserError:
        return UserError(f"{flag(name)} is {value!r}; it {rule}.")

    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"{flag(name)} is {value!r}; {nearest(str(value), get_args(hint))}")
        return value
    if get_origin(hint) is tuple:
        entry = get_args(hint)[0]
        allowed = (int, float) if entry is float else (entry,)
        if not isinstance(value, list | tuple) or not all(type(item) in allowed for item in value):
            raise refuse(f"must be a list of {_TYPE_WORDS[entry][1]}")
        return tuple(entry(item) for item in value)
    if hint is float or hint == float | None:
        if value is None and hint is not float:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse("must be a number")
        is_never = value == math.inf and name == "checkpoint_minutes"  # checkpoints only at the ends of epochs
        if not (abs(value) <= MAX_FLOAT or is_never):
            raise UserError(f"{flag(name)} is {value}; it must be a finite number of 32 bits.")
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        raise refuse(whole_number_rule(value))
    if hint in (int, bool, str) and type(value) is not hint:
        raise refuse(f"must be {_TYPE_WORDS[hint][0]}")
    if hint is int and value > MAX_INTEGER and name != "seed":  # its limit depends on --num-seeds
        raise refuse(f"must be at most {MAX_INTEGER}")
    return value


def whole_number_rule(value: float) -> str:
    """Return the rule for an integer that is written as a float: 1e6 for 1_000_000."""
    return f"must be a whole number, written as {int(value):_}"


def has_effect(name: str, config: Any) -> bool:
    rule = find_rules(type(config), Needs).get(name)
    return rule is None or rule.condition(config)


def require_effect(config: Any, base: Any) -> None:
    """Refuse a changed setting that has no effect in this run."""
    for name, rule in find_rules(type(config), Needs).items():
        if getattr(config, name) != getattr(base, name) and not rule.condition(config):
            raise UserError(f"{flag(name)} has no effect in this run: it needs {rule.describe()}.")


# -- unknown names


def nearest(name: Any, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error message about an unknown name: the nearest known name, or all of them."""
    known = list(known)
    near = _nearest_name(name, known)
    return f"did you mean {near}?" if near else otherwise or f"choose one of {', '.join(known)}."


def _nearest_name(name: Any, known: Iterable[str]) -> str:
    """Return the most similar name, such as one with a letter changed; "" if none is near."""
    name, suffix = str(name), Path(str(name)).suffix  # what all names share must not make them similar
    plain = {one.removeprefix("--").removesuffix(suffix): one for one in known}
    near = difflib.get_close_matches(name.removeprefix("--").removesuffix(suffix), plain, 1, cutoff=0.65)
    return plain[near[0]] if near else ""


def nearest_setting(name: str, kind: type, known: Iterable[str], otherwise: str) -> str:
    """Return the same for a setting, which may be given by an alias: `k` for `num_bellman_iterations`."""
    setting = aliased_setting(name, kind)
    return f"did you mean {setting}?" if setting else nearest(name, known, otherwise)


def aliased_setting(name: str, kind: type) -> str:
    """Return the setting that has an alias: `num_bellman_iterations` for `k`; "" if none has."""
    return alias_flags(kind).get(flag(name), "")


def alias_flags(kind: type) -> dict[str, str]:
    """Return every alias with its setting: `--k` -> `num_bellman_iterations`."""
    return {
        name: setting
        for setting, rules in _annotations(kind).items()
        for rule in rules
        for name in getattr(rule, "aliases", None) or ()
    }


def resolve_aliases(settings: dict[str, Any], kind: type, where: str) -> dict[str, Any]:
    """Return settings under their own names; refuse a setting that is given by two names."""
    names: dict[str, str] = {}  # setting -> the name that was given
    for name in settings:
        setting = aliased_setting(name, kind) or name
        if setting in names:
            raise UserError(f"{where} sets {names[setting]!r} and {name!r}, which are the same setting; give one.")
        names[setting] = name
    return {setting: settings[name] for setting, name in names.items()}


def nearest_path(path: Path) -> str:
    """Return the same for a path: the nearest name beside the first part of it that does not exist."""
    for part in reversed((path, *path.parents)):
        if not part.exists():
            siblings = [p.name for p in part.parent.iterdir()] if part.parent.is_dir() else []
            near = _nearest_name(part.name, siblings)
            return f"; did you mean {part.parent / near}?" if near else ""
    return ""
