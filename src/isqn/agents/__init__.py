"""Agents: records of pure functions over one state, by the name of the first word of `isqn train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isqn.agents import q_learning, stream_q
from isqn.agents.q_learning import Agent
from isqn.types import EnvSpec

if TYPE_CHECKING:
    from isqn.experiments.config import Config

MAKERS = {"dqn": q_learning.make, "stream-q": stream_q.make}


def make(config: Config, spec: EnvSpec) -> Agent:
    return MAKERS[config.agent](config, spec)
