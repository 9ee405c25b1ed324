"""Named settings: those of the paper's Tables 1 to 3 and of its text on streaming, and small ones of our own.

The presets of an agent are in the file of its name. Settings have the names of the agent's config. Names end with
their unit: `_steps` are agent steps, `_updates` gradient steps. Values that no table gives are listed apart, with their
source.
"""

from __future__ import annotations

from dataclasses import asdict

from isqn.agents.registry import config_class, find_agent, make_config
from isqn.config.fields import field_names, nearest
from isqn.config.run import Run
from isqn.presets import cql, dqn, ilql, sac, stream_q
from isqn.presets.preset import Preset
from isqn.types import UserError

_MODULES = {"dqn": dqn, "stream-q": stream_q, "sac": sac, "cql": cql, "ilql": ilql}
PRESETS: dict[str, Preset] = {name: preset for module in _MODULES.values() for name, preset in module.PRESETS.items()}


def presets_of(agent: str) -> tuple[str, ...]:
    """Return the names of the presets that fit an agent."""
    owner = find_agent(agent).presets_of
    return tuple(name for name, preset in PRESETS.items() if preset.agent == owner)


def preset_config(name: str, agent: str | None = None) -> Run:
    """Return the settings of a preset for `isqn train AGENT`; for its own agent if none is named."""
    if name not in PRESETS:
        raise UserError(f"The preset {name!r} is not known; {nearest(name, presets_of(agent) if agent else PRESETS)}")
    preset = PRESETS[name]
    agent = agent or preset.agent
    if name not in presets_of(agent):
        raise UserError(
            f"--preset {name} is for `isqn train {preset.agent}`; "
            f"the presets of `isqn train {agent}` are {', '.join(presets_of(agent))}."
        )
    if agent == preset.agent:
        return make_config(agent, **asdict(preset.config))
    # An agent that shares the presets of another one keeps its own defaults where the preset keeps those of its agent.
    defaults, known = asdict(make_config(preset.agent)), field_names(config_class(agent))
    changed = {n: value for n, value in asdict(preset.config).items() if n in known and value != defaults[n]}
    return make_config(agent, **changed)


def preset_for(env_id: str, agent: str = "dqn") -> str:
    """Return the name of the preset that fits an environment if none is asked for."""
    choices = _MODULES[find_agent(agent).presets_of].DEFAULTS
    return next(name for fits, name in choices if fits(env_id))


def default_config(agent: str, env_id: str) -> Run:
    """Return the settings that fit an environment if no preset is asked for."""
    if not presets_of(agent):
        return make_config(agent, env_id=env_id)
    return preset_config(preset_for(env_id, agent), agent).replace(env_id=env_id)
