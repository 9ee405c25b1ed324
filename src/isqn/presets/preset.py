"""A preset, and kinds of environments that presets are chosen for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isqn.config.run import Run
from isqn.envs import toy
from isqn.envs.scores import DMC_HARD_7

# Presets in order, each with a function that says whether it fits an environment, given by its id.
Choices = tuple[tuple[Callable[[str], bool], str], ...]


class Preset(NamedTuple):
    """Named settings of `isqn train AGENT`."""

    description: str
    config: Run

    @property
    def agent(self) -> str:
        return self.config.agent


def is_atari(env_id: str) -> bool:
    return env_id.startswith("ALE/")


def is_minatar(env_id: str) -> bool:
    return env_id.startswith("MinAtar/")


def is_toy(env_id: str) -> bool:
    return env_id in toy.PROBLEMS


def is_control(env_id: str) -> bool:
    return env_id.startswith("dm_control/")


def is_hard_control(env_id: str) -> bool:
    return is_control(env_id) and env_id.removeprefix("dm_control/").removesuffix("-v0") in DMC_HARD_7


def is_any(env_id: str) -> bool:
    return True
