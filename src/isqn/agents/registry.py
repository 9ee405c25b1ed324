"""Registry of the agents: everything that the rest of the program needs to know about each.

An agent registers itself in its own file, which may be a user's file outside the package. Losses of users, whose
settings become those of agents, are registered here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from inspect import get_annotations, signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from isqn.config.fields import (
    alias_flags,
    aliased_setting,
    field_names,
    flag,
    has_source,
    name_as_given,
    name_settings,
    nearest,
    nearest_setting,
    read_docs,
    resolve_aliases,
)
from isqn.config.parts import PairLoss
from isqn.config.run import Run
from isqn.config.toml import load_toml
from isqn.data.text import DamagedText
from isqn.losses import LOSSES, Loss, required_settings
from isqn.types import Array, EnvSpec, UserError, require_new_name
from isqn.usercode import find_definition, named

if TYPE_CHECKING:
    from pathlib import Path

    from isqn.agents.base import Agent

_BUILT_IN = {  # name -> the module that registers it, imported when the agent is first needed
    "dqn": "isqn.agents.dqn",
    "stream-q": "isqn.agents.stream_q",
    "sac": "isqn.agents.sac",
    "cql": "isqn.agents.cql",
    "ilql": "isqn.language.agent",
}


# Flags of `isqn train`, and keys of a study, that are not settings.
_NOT_SETTINGS = ("preset", "config", "run_dir", "overwrite", "show_diff", "quiet", "debug", "import", "help", "name")


Actions = Literal["discrete", "continuous", "tokens"]


class AgentKind(NamedTuple):
    """Everything that the program needs to know of a registered agent."""

    name: str
    config: type[Run]  # its config, without the settings of losses that users register
    make: Callable[[Any, Any], Agent]  # config, specification of the environment -> agent
    actions: Actions
    loop: str  # the module that trains it, such as "isqn.train.online"
    presets: str  # the module that has its presets; "": none
    evaluation_rule: str  # acting rule in `isqn eval`; "": as in training

    @property
    def summary(self) -> str:
        """First sentence of the config's docstring."""
        return (self.config.__doc__ or "").split("\n")[0]


_KINDS: dict[str, AgentKind] = {}


def register_agent(
    name: str,
    config: type[Run],
    make: Callable[[Any, Any], Agent],
    *,
    actions: Actions = "discrete",
    loop: str = "isqn.train.online",
    presets: str = "",
    evaluation_rule: str = "",
) -> None:
    """Register an agent for `isqn train NAME`, `isqn.Model(NAME)`, studies, reports and all other commands.

    `loop` names the module that trains it, which offers what `isqn.train.run.Loop` lists. `presets` names the module
    that has its presets, as `isqn.presets.dqn` does.
    """
    _require_config("register_agent: config", config, Run)
    if (given := getattr(config, "agent", None)) != name:
        raise UserError(f"register_agent: {config.__name__}.agent is {given!r}; it must be {name!r}.")
    if not callable(make):
        raise UserError(f"register_agent: make is {make!r}; it must be a function (config, spec) -> Agent.")
    if actions not in get_args(Actions):
        raise UserError(f"register_agent: actions is {actions!r}; {nearest(str(actions), get_args(Actions))}")
    for attribute in ("length", "epoch_length", "log_period"):
        if not hasattr(config, attribute):
            raise UserError(
                f"register_agent: {config.__name__} has no {attribute}; it must extend Interaction or Offline of "
                "isqn.config.run."
            )
    owner = _KINDS[name].config.__module__ if name in _KINDS else _BUILT_IN.get(name)
    require_new_name("register_agent", "an agent", name, owner, config.__module__)
    if issubclass(config, PairLoss):
        for loss_name, loss in LOSSES.items():
            if loss.settings:
                _require_new_names(f"register_agent: {config.__name__}", loss_name, loss.settings, config)
    _KINDS[name] = AgentKind(name, config, named(f"The agent {name!r}", make), actions, loop, presets, evaluation_rule)


def _require_config(what: str, config: Any, base: type[Run]) -> None:
    """Refuse a class that does not extend `base`, or whose fields are lost because it is not a dataclass."""
    is_config = isinstance(config, type) and issubclass(config, base)
    if not is_config or not ("__dataclass_fields__" in vars(config) or not get_annotations(config)):
        given = find_definition(config) if isinstance(config, type) else repr(config)
        raise UserError(f"{what} is {given}; it must be a frozen dataclass that extends {base.__name__}.")


def agent_names() -> tuple[str, ...]:
    return (*_BUILT_IN, *(name for name in _KINDS if name not in _BUILT_IN))


def find_agent(name: Any) -> AgentKind:
    """Return the entry of an agent; refuse an unknown name."""
    if name not in agent_names():
        raise UserError(f"--agent is {name!r}; {nearest(str(name), agent_names())}")
    if name not in _KINDS:
        import_module(_BUILT_IN[name])
    return _KINDS[name]


def make_agent(config: Run, spec: EnvSpec) -> Agent:
    require_actions(config, spec)
    return _require_results(config.agent, find_agent(config.agent).make(config, spec))


def _require_results(name: str, agent: Any) -> Agent:
    """Return an agent whose functions name it in their errors, and refuse results of other types."""
    from isqn.agents.base import Agent, AgentState, Choice

    def require(what: str, result: Any, holds: bool, wanted: str) -> None:
        if not holds:
            raise UserError(f"The agent {name!r}: {what} returns {type(result).__name__}; it must return {wanted}.")

    def checked(function: str, holds: Callable[[Any], bool], wanted: str) -> Callable[..., Any]:
        call = named(f"The agent {name!r}", getattr(agent, function))

        @wraps(call)
        def check(*args: Any) -> Any:
            result = call(*args)
            require(f"{function}()", result, holds(result), wanted)
            return result

        return check

    require("make(config, spec)", agent, isinstance(agent, Agent), "an Agent of isqn.agents.base")
    return agent._replace(
        init=checked("init", lambda state: isinstance(state, AgentState), "an AgentState"),
        act=checked("act", lambda choice: isinstance(choice, Choice), "a Choice(action, explored)"),
        update=checked("update", _is_state_and_metrics, "an AgentState and a dictionary of metrics"),
        refresh=checked("refresh", lambda state: isinstance(state, AgentState), "an AgentState"),
    )


def _is_state_and_metrics(result: Any) -> bool:
    from isqn.agents.base import AgentState

    is_pair = isinstance(result, tuple) and len(result) == 2
    return is_pair and isinstance(result[0], AgentState) and isinstance(result[1], dict)


def require_actions(config: Run, spec: EnvSpec) -> None:
    """Refuse an environment whose actions the agent cannot choose."""
    kind, needed = find_agent(config.agent), "continuous" if spec.is_continuous else "discrete"
    if kind.actions in (needed, "tokens"):
        return
    others = (find_agent(name) for name in agent_names())
    names = [kind.name for kind in others if kind.actions == needed and not kind.config.is_offline]
    actions = "continuous" if spec.is_continuous else "a finite set"
    raise UserError(f"The actions of {spec.id} are {actions}; use the agent {' or '.join(names)}.")


# -- losses of users


def register_loss(
    name: str, function: Callable[..., Array], label: str, *, bootstraps: bool = True, settings: type[Run] | None = None
) -> None:
    """Make a loss known as `--loss NAME`.

    Its keyword-only arguments without a default are filled from the settings of the same name. `settings` is a part of
    a config (a frozen dataclass that extends `isqn.config.parts.PairLoss`) with those that the package does not have.
    """
    if not callable(function):
        raise UserError(f"register_loss: function is {function!r}; it must be (online, target, transition) -> scalar.")
    owner = LOSSES[name].function.__module__ if name in LOSSES else None
    require_new_name("register_loss", "a loss", name, owner, function.__module__)
    where = f"register_loss: the loss {name!r}"
    kinds = [kind for kind in (find_agent(agent).config for agent in agent_names()) if issubclass(kind, PairLoss)]
    if settings:
        _require_config(f"{where}: settings", settings, PairLoss)
        part_docs = read_docs(cast(type, settings))
        for setting, part in _own_settings(settings).items():
            if has_source(part) and not part_docs[setting]:
                raise UserError(f"{where}: the setting {setting!r} has no docstring; it is its line in --help.")
        for kind in kinds:
            _require_new_names(where, name, settings, kind)
    try:
        signature(function).bind(None, None, None, **dict.fromkeys(required_settings(function)))
    except TypeError as error:
        defined = find_definition(function)
        raise UserError(f"{where}: {defined} cannot be called as (online, target, transition): {error}.") from None
    for argument in required_settings(function):
        for kind in kinds:
            if argument not in (*field_names(config_class(kind.agent)), *field_names(settings or PairLoss)):
                raise UserError(
                    f"{where}: its argument {argument!r} is not a setting of `isqn train {kind.agent}`; give it a "
                    "default, or give `settings` that have it."
                )
    LOSSES[name] = Loss(label, named(f"The loss {name!r}", function), bootstraps, settings)


def _own_settings(settings: type) -> dict[str, type]:
    """Return the settings that a loss adds, each with the class that it is written in."""
    parts = [part for part in reversed(settings.__mro__) if part not in PairLoss.__mro__]
    return {name: part for part in parts for name in get_annotations(part) if name in field_names(settings)}


def _require_new_names(where: str, loss_name: str, settings: type[Run], kind: type[Run]) -> None:
    """Refuse a setting of a loss whose name or alias an agent or another loss has already."""
    own = _own_settings(settings)
    flags = {**{flag(name): name for name in own}, **{f: s for f, s in alias_flags(settings).items() if s in own}}
    aliases = alias_flags(kind)
    for given, setting in flags.items():
        if hasattr(kind, given[2:].replace("-", "_")) or given in aliases or given in map(flag, _NOT_SETTINGS):
            raise UserError(f"{where}: `isqn train {kind.agent}` has {given} already; rename the setting {setting!r}.")
    for other_name, other in LOSSES.items():
        others = _own_settings(other.settings) if other.settings and other_name != loss_name else {}
        for setting in own.keys() & others.keys():
            if own[setting] is not others[setting]:
                raise UserError(
                    f"{where}: the loss {other_name!r} has a setting {setting!r} already; choose another name, or let "
                    "both have the same `settings`."
                )


# -- configs by the name of their agent


def config_class(agent: str) -> type[Run]:
    """Return the config class of an agent, with the settings of the losses that users have registered."""
    kind: type = find_agent(agent).config
    parts = dict.fromkeys(loss.settings for loss in LOSSES.values() if loss.settings)
    inherited = {base for part in parts for base in part.__mro__[1:]}
    settings = tuple(part for part in parts if part not in inherited) if issubclass(kind, PairLoss) else ()
    return _add_settings(kind, settings)


@cache
def _add_settings(kind: type, settings: tuple[type, ...]) -> type[Run]:
    if not settings:
        return kind
    attributes: dict[str, Any] = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__annotations__": {}}
    return dataclass(frozen=True)(type(kind.__name__, (*settings, kind), attributes))


@name_settings()
def make_config(agent: str, **settings: Any) -> Run:
    """Return the default config of an agent, with some settings changed, given by their names or aliases."""
    kind, where = config_class(agent), "isqn.make_config"
    with name_as_given(kind, settings):
        return config_from_mapping({"agent": agent, **resolve_aliases(settings, kind, where)}, where)


def owners(setting: str) -> list[str]:
    """Return the agents that have a setting, given by its name or by an alias."""
    configs = {name: config_class(name) for name in agent_names()}
    return [name for name, kind in configs.items() if setting in field_names(kind) or aliased_setting(setting, kind)]


def foreign_setting(setting: str, agent: str) -> str:
    """Return the end of a sentence about a setting that only other agents have; "" if none has it."""
    having = owners(setting)
    if not having or agent in having:
        return ""
    return f"it is for {' or '.join(f'`isqn train {name}`' for name in having)}, not for {agent}."


def config_from_mapping(values: dict[str, Any], where: str, base: Run | None = None) -> Run:
    """Return a config from the contents of a file; an error about an unknown name suggests the nearest known one."""
    settings = dict(values)
    agent = settings.pop("agent", base.agent if base else "dqn")
    if base and agent != base.agent:
        raise UserError(f"{where} sets 'agent' to {agent!r}, and these are settings of {base.agent!r}; leave it out.")
    try:
        kind = config_class(agent)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    known = field_names(kind)
    for name in settings:
        if name not in known:
            if foreign := foreign_setting(name, agent):
                raise UserError(f"{where} sets {name!r}; {foreign}")
            fields = f"the fields are those of `isqn train {agent} --help`."
            hint = nearest_setting(name, kind, ("agent", *known), fields)
            raise UserError(f"{where} sets {name!r}, which is not a field of a run; {hint}")
    try:
        return base.replace(**settings) if base else kind(**settings)
    except UserError as error:
        error.args = (f"{where}: {error}",)
        raise


def read_config_file(path: Path) -> Run:
    """Return the config in a `config.toml`. Nothing that the file names is imported."""
    settings = load_toml(path, "give the config.toml of a run.")
    if not settings:  # as a full disk leaves it; it must not be read as a run with all defaults
        raise DamagedText(f"{path} is empty; give the config.toml of a run.")
    with name_settings():
        return config_from_mapping(settings, str(path))
