"""Gymnasium wrappers as a setting: which are allowed, and how the JSON of `--env-wrappers` becomes wrappers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from isqn.config.fields import flag, nearest
from isqn.types import UserError

# Wrappers that are functions of the running game alone: they write nothing, show nothing and learn nothing.
WRAPPERS = (
    *("AtariPreprocessing", "ClipAction", "ClipReward", "DelayObservation", "DiscretizeAction", "DtypeObservation"),
    *("FilterObservation", "FlattenObservation", "FrameStackObservation", "GrayscaleObservation"),
    *("MaxAndSkipObservation", "RepeatAction", "RescaleAction", "RescaleObservation", "ReshapeObservation"),
    *("ResizeObservation", "StickyAction", "TimeAwareObservation", "TimeLimit"),
)


def make_wrappers(env_wrappers: str) -> Callable[[gym.Env], gym.Env]:
    """Return a function that puts wrappers around an environment, the first one innermost."""
    wrappers: list[tuple[str, dict[str, Any]]] = []
    for entry in json.loads(env_wrappers or "[]"):
        name, kwargs = (entry, {}) if isinstance(entry, str) else entry if _is_pair(entry) else ("", {})
        if not name or not isinstance(kwargs, dict):
            raise UserError(
                f"{flag('env_wrappers')} has the entry {json.dumps(entry)}; an entry is the name of a wrapper, or a "
                "list of its name and its keyword arguments."
            )
        if name not in WRAPPERS or not hasattr(gym.wrappers, name):
            raise UserError(f"{flag('env_wrappers')} names {name!r}; {nearest(name, WRAPPERS)}")
        wrappers.append((name, kwargs))

    def wrap(env: gym.Env) -> gym.Env:
        for name, kwargs in wrappers:
            env = getattr(gym.wrappers, name)(env, **kwargs)
        return env

    return wrap


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
