"""Registry of the agents: everything that the rest of the program needs to know about each.

An agent registers itself in its own file, which may be a user's file outside the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from isqn.config.fields import aliased_setting, field_names, nearest, nearest_setting
from isqn.config.parts import PairLoss
from isqn.config.run import Interaction, Run
from isqn.config.toml import load_toml
from isqn.losses import LOSSES
from isqn.types import EnvSpec, UserError

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


class AgentKind(NamedTuple):
    """Entry of the registry."""

    name: str
    config: type[Run]  # its config, without the settings of losses that users register
    make: Callable[[Any, Any], Agent]  # config, specification of the environment -> agent
    actions: Literal["discrete", "continuous", "tokens"]
    loop: str  # the module that trains it, such as "isqn.train.online"
    presets_of: str  # the agent whose presets also fit this one
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
    actions: Literal["discrete", "continuous", "tokens"] = "discrete",
    loop: str = "isqn.train.online",
    presets_of: str = "",
    evaluation_rule: str = "",
) -> None:
    """Register an agent for `isqn train NAME`, `isqn.Model(NAME)`, studies, reports and all other commands."""
    if config.agent != name:
        raise UserError(f"register_agent: {config.__name__}.agent is {config.agent!r}; it must be {name!r}.")
    if name in _BUILT_IN and make.__module__.partition(".")[0] != "isqn":
        raise UserError(f"register_agent: the package has an agent {name!r}; choose another name.")
    _KINDS[name] = AgentKind(name, config, make, actions, loop, presets_of or name, evaluation_rule)


def agent_names() -> tuple[str, ...]:
    return (*_BUILT_IN, *(name for name in _KINDS if name not in _BUILT_IN))


def find_agent(name: Any) -> AgentKind:
    """Return the entry of an agent; refuse an unknown name."""
    if isinstance(name, str) and name in _BUILT_IN and name not in _KINDS:
        import_module(_BUILT_IN[name])
    if not isinstance(name, str) or name not in _KINDS:
        raise UserError(f"--agent is {name!r}; {nearest(str(name), agent_names())}")
    return _KINDS[name]


def make_agent(config: Run, spec: EnvSpec) -> Agent:
    require_actions(config, spec)
    return find_agent(config.agent).make(config, spec)


def require_actions(config: Run, spec: EnvSpec) -> None:
    """Refuse an environment whose actions the agent cannot choose."""
    kind, needed = find_agent(config.agent), "continuous" if spec.is_continuous else "discrete"
    if kind.actions in (needed, "tokens"):
        return
    others = (find_agent(name) for name in agent_names())
    names = [kind.name for kind in others if kind.actions == needed and issubclass(kind.config, Interaction)]
    actions = "continuous" if spec.is_continuous else "a finite set"
    suitable = " or ".join(f"`isqn train {name}`" for name in names)
    raise UserError(f"The actions of {spec.id} are {actions}; use {suitable}.")


# -- configs by the name of their agent


def config_class(agent: str) -> type[Run]:
    """Return the config class of an agent, with the settings of the losses that users have registered."""
    kind: type = find_agent(agent).config
    settings = tuple(loss.settings for loss in LOSSES.values() if loss.settings) if issubclass(kind, PairLoss) else ()
    return _add_settings(kind, settings)


@cache
def _add_settings(kind: type, settings: tuple[type, ...]) -> type[Run]:
    if not settings:
        return kind
    attributes: dict[str, Any] = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__annotations__": {}}
    return dataclass(frozen=True)(type(kind.__name__, (*settings, kind), attributes))


def make_config(agent: str, **settings: Any) -> Run:
    """Return the default config of an agent, with some settings changed."""
    return config_class(agent)(**settings)


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
        raise UserError(f"{where}: {error}") from None


def read_config_file(path: Path) -> Run:
    """Return the config in a `config.toml`. Nothing that the file names is imported."""
    settings = load_toml(path, "give the config.toml of a run.")
    if not settings:  # as a full disk leaves it; it must not be read as a run with all defaults
        raise UserError(f"{path} is empty; give the config.toml of a run.")
    return config_from_mapping(settings, str(path))
