"""Parsing of the command line by tyro, with error messages of one sentence: what was given, what is allowed."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro import _errors as tyro_errors  # structured parse errors; private in tyro 1.0, hence its upper bound

from isqn.agents.registry import foreign_setting
from isqn.config.fields import MAX_INTEGER, flag, nearest, whole_number_rule
from isqn.types import UserError

Options = TypeVar("Options")

HELP_ENDING = (
    "Every command also takes --debug, to show the traceback of an error, and --import FILE, to import your code."
)
EMPTY = "is empty; give it a value, or leave it out."


class UsageError(UserError):
    """Error in the command line itself."""


@dataclass(frozen=True)
class GlobalFlags:
    """Flags of every command."""

    debug: bool = False
    """Show the traceback of an error."""
    imports: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="import")] = ()
    """Python file or module to import first; may be repeated."""


def arg(metavar: str, default: str = "", aliases: Sequence[str] = ()) -> Any:
    """Return the annotation of a flag whose default is described in words; `metavar` is the value in its help."""
    hint = f"(default: {default})" if default else None
    return tyro.conf.arg(metavar=metavar, aliases=list(aliases) or None, help_behavior_hint=hint)


def parse_global_flags(args: Sequence[str]) -> tuple[GlobalFlags, list[str]]:
    """Return the flags of every command, and the rest of the command line."""
    return _parse(GlobalFlags, args, "isqn", return_unknown_args=True, add_help=False)


def parse_some(kind: type[Options], args: Sequence[str], prog: str) -> Options:
    """Return the flags of `kind`; all others are ignored."""
    return _parse(kind, args, prog, return_unknown_args=True, add_help=False)[0]  # type: ignore[no-any-return]


def parse(kind: Any, args: Sequence[str], prog: str, default: Any = None, agent: str = "", source: str = "") -> Any:
    """Return the parsed command line of a command.

    `agent` is the agent whose settings are flags; `source` says in its help where the defaults come from.
    """
    settings: dict[str, Any] = {} if default is None else {"default": default}
    defaults = f" Here: {source}." if source else ""
    description = f"{inspect.getdoc(get_origin(kind) or kind)}{defaults}\n\n{HELP_ENDING}"
    _require_values_once(kind, args, prog, may_be_empty=bool(agent))  # --hidden-sizes alone: no hidden layer
    return _parse(kind, args, prog, agent=agent, description=description, **settings)


def _parse(kind: Any, args: Sequence[str], prog: str, *, agent: str = "", **settings: Any) -> Any:
    def refuse(event: tyro_errors.ParseErrorEvent) -> None:
        _refuse(event, kind, list(args), prog, agent)

    with tyro_errors.on_parse_error(refuse):
        return tyro.cli(kind, args=list(args), prog=prog, **settings)


def _require_values_once(kind: Any, args: Sequence[str], prog: str, may_be_empty: bool) -> None:
    """Refuse an empty value, and a list that is given twice or without values, which tyro accepts."""
    types = flags(kind)
    lists = [name for name, hint in types.items() if get_origin(hint) is tuple]
    lists_given: set[str] = set()
    for before, word, after in zip(("", *args), args, (*args[1:], "--"), strict=False):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if word == "" or (equals and not value and word.startswith("--")):
            takes_value = before.startswith("-") and types.get(before.replace("_", "-")) is not bool
            subject = name if equals else before if takes_value else f"An argument of `{prog}`"
            raise UsageError(f"{subject} {EMPTY}")
        if name in lists:
            if name in lists_given:
                raise UsageError(f"{name} is given twice; give all its values after one {name}.")
            if not equals and after.startswith("--") and not may_be_empty:
                raise UsageError(f"{name} needs a value.")
            lists_given.add(name)


def _refuse(event: tyro_errors.ParseErrorEvent, kind: Any, args: list[str], prog: str, agent: str) -> NoReturn:
    """Raise a `UsageError` for an error of tyro."""
    match event:
        case tyro_errors.UnrecognizedArgs():
            raise UsageError(_describe_unrecognised(event.tokens, kind, args, prog, agent))
        case tyro_errors.InvalidChoice():
            choices = _choices(event.argument.field.type_stripped) or event.choices
            raise UsageError(f"{_flag_of(event.argument, args)} is {event.value!r}; {nearest(event.value, choices)}")
        case tyro_errors.BadValue():
            choices = _choices(event.argument.field.type_stripped)
            raise UsageError(
                f"{_flag_of(event.argument, args)} needs a value{': ' * bool(choices)}{', '.join(choices)}."
            )
        case tyro_errors.InstantiationFailure() if event.argument is not None:
            raise UsageError(_describe_bad_value(event.argument, event.message, args))
        case tyro_errors.MissingArgs():
            arguments = [missing.arg for missing in event.missing_arguments]
            raise UsageError(" ".join(_describe_missing(argument, prog, args) for argument in arguments[:1]))
    raise UsageError(f"`{prog}` cannot read this command line; `{prog} --help` explains it.")


def _choices(hint: Any) -> list[str]:
    """Return the choices of a type in their order. None is left out, because it means to leave out the flag."""
    literals = [member for member in (hint, *get_args(hint)) if get_origin(member) is Literal]
    return [str(choice) for literal in literals for choice in get_args(literal)]


def _describe_unrecognised(tokens: list[str], kind: Any, args: list[str], prog: str, agent: str) -> str:
    names = [token.partition("=")[0].replace("_", "-") for token in tokens if token.startswith("--")]
    if names:
        foreign = foreign_setting(names[0][2:].replace("-", "_"), agent) if agent else ""
        hint = foreign or nearest(names[0], flags(kind), _flag_by_initials(names[0], kind, prog))
        return f"`{prog}` has no flag {names[0]}; {hint}"
    joined = [arg.partition("=")[0] for arg in args if arg.startswith("--") and arg.endswith(f"={tokens[0]}")]
    before = args[args.index(tokens[0]) - 1] if tokens[0] in args[1:] else "".join(joined[:1])
    before = before.replace("_", "-")
    if flags(kind).get(before) is bool:
        other = f"--{before.removeprefix('--no-')}" if before.startswith("--no-") else f"--no-{before[2:]}"
        return f"{before} takes no value; its opposite is {other}."
    hint = f"`{prog} --help` explains it."
    if "--env-id" in flags(kind) and re.search(r"/|-v\d+$", tokens[0]):
        hint = f"did you mean --env-id {tokens[0]}?"
    return f"`{prog}` has no place for {tokens[0]!r}; {hint}"


def _flag_by_initials(given: str, kind: Any, prog: str) -> str:
    """Return a hint about an unknown flag that consists of the initials of a known one: --lr for --learning-rate."""
    by_initials = {"--" + "".join(part[:1] for part in name[2:].split("-")): name for name in reversed(flags(kind))}
    return f"did you mean {by_initials[given]}?" if given in by_initials else f"`{prog} --help` lists them."


def _describe_bad_value(argument: Any, message: str, args: list[str]) -> str:
    """Return the message for a value of the wrong type, which the message of its parser contains in quotes."""
    hint = argument.field.type_stripped
    kinds = (hint, *get_args(hint))
    for value in re.findall(r"'([^']*)'", message):
        number = "must be a number" + " or None" * (type(None) in kinds)
        for kind, rule in ((int, _whole_number_rule(value)), (float, number)):
            if kind in kinds:
                try:
                    kind(value)
                except ValueError:
                    return f"{_flag_of(argument, args)} is {value!r}; it {rule}."
    return f"{_flag_of(argument, args)} cannot be read: {message.rstrip('.')}."


def _whole_number_rule(value: str) -> str:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    return whole_number_rule(number) if number.is_integer() else "must be a whole number"


def _describe_missing(argument: Any, prog: str, args: list[str]) -> str:
    if argument.is_positional():
        text = argument.field.helptext
        meaning = str(text() if callable(text) else text).rstrip(".")
        name = argument.field.extern_name.replace("_", "-").upper()
        return f"`{prog}` needs an argument: {name} ({meaning[:1].lower()}{meaning[1:]})."
    return f"`{prog}` needs {_flag_of(argument, args)}."


def _flag_of(argument: Any, args: list[str]) -> str:
    """Return the flag of an argument; if it has several names, the one that was given."""
    names = [str(name).replace("_", "-") for name in argument.lowered.name_or_flags]
    given = {word.partition("=")[0].replace("_", "-") for word in args}
    if not names:
        return str(argument.field.extern_name.replace("_", "-").upper())
    return max([name for name in names if name in given] or names, key=len)


def flags(kind: Any) -> dict[str, Any]:
    """Return every flag of a command with its type."""
    types: dict[str, Any] = {}
    arguments = dict(zip(getattr(get_origin(kind), "__parameters__", ()), get_args(kind), strict=False))
    for name, hint in get_type_hints(get_origin(kind) or kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ()) if get_origin(hint) is Annotated else ()
        plain = get_args(hint)[0] if marks else hint
        plain = arguments.get(plain, plain)
        if is_dataclass(plain):
            types |= flags(plain)
        elif name in {field.name for field in dataclass_fields(get_origin(kind) or kind)}:
            renamed = [mark.name for mark in marks if getattr(mark, "name", None)]
            aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
            names = [*aliases, *map(flag, renamed or [name])]
            names += [f"--no-{name[2:]}" for name in names if plain is bool]
            types |= dict.fromkeys(names, plain)
    return types


# -- checks of values that several commands take


def require_at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UserError(f"{flag(name)} is {value}; it must be at least 1.")


def require_probability(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= 1:
        raise UserError(f"{name} is {value}; it must be between 0 and 1.")


def require_beta(beta: float | None) -> None:
    if beta is not None and not 0 <= beta < float("inf"):
        raise UserError(f"--beta is {beta}; it must be a number of at least 0.")


def require_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_INTEGER:
        raise UserError(f"--seed is {seed}; it must be between 0 and {MAX_INTEGER}.")
