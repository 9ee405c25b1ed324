"""Named settings: those of the paper's Tables 1 to 3 and of its text on streaming, and small ones of our own.

The presets of an agent are in the file of its name. Settings have the names of the agent's config. Names end with
their unit: `_steps` are agent steps, `_updates` gradient steps. Values that no table gives are listed apart, with their
source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import Any

from isqn.agents.registry import agent_names, config_class, find_agent, make_config
from isqn.config.fields import field_names, nearest
from isqn.config.run import Run
from isqn.presets.preset import Preset
from isqn.types import UserError


def all_presets() -> dict[str, Preset]:
    """Return the presets of all agents by name."""
    modules = dict.fromkeys(find_agent(agent).presets for agent in agent_names())
    return {name: preset for module in modules if module for name, preset in import_module(module).PRESETS.items()}


def presets_of(agent: str) -> tuple[str, ...]:
    """Return the names of the presets that fit an agent."""
    module = find_agent(agent).presets
    return tuple(import_module(module).PRESETS) if module else ()


def preset_config(name: str, agent: str | None = None) -> Run:
    """Return the settings of a preset for `isqn train AGENT`; for its own agent if none is named."""
    presets = all_presets()
    if name not in presets:
        raise UserError(f"The preset {name!r} is not known; {nearest(name, presets_of(agent) if agent else presets)}")
    preset = presets[name]
    agent = agent or preset.agent
    if name not in presets_of(agent):
        own = presets_of(agent)
        rest = f"the presets of `isqn train {agent}` are {', '.join(own)}" if own else f"{agent} has no presets"
        raise UserError(f"--preset {name} is for `isqn train {preset.agent}`; {rest}.")
    if agent == preset.agent:
        return make_config(agent, **asdict(preset.config))
    # An agent that shares the presets of another one keeps its own defaults where the preset keeps those of its agent.
    defaults, known = asdict(make_config(preset.agent)), field_names(config_class(agent))
    changed = {n: value for n, value in asdict(preset.config).items() if n in known and value != defaults[n]}
    return make_config(agent, **changed)


def preset_for(env_id: str, agent: str = "dqn") -> str:
    """Return the name of the preset that fits an environment if none is asked for."""
    return next(_fitting(env_id, agent, "DEFAULTS"))


def short_preset(env_id: str, agent: str) -> str:
    """Return the name of a preset of a short run that fits an environment; "" if there is none."""
    return next(_fitting(env_id, agent, "SHORT"), "")


def _fitting(env_id: str, agent: str, choices: str) -> Iterator[str]:
    module: Any = import_module(find_agent(agent).presets)
    return (name for fits, name in getattr(module, choices, ()) if fits(env_id))


def default_config(agent: str, env_id: str) -> Run:
    """Return the settings that fit an environment if no preset is asked for."""
    if not presets_of(agent):
        return make_config(agent, env_id=env_id)
    return preset_config(preset_for(env_id, agent), agent).replace(env_id=env_id)
