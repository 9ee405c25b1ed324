"""Agents: records of pure functions over one state, by the name of the first word of `isqn train`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isqn.agents import ilql, q_learning, sac, stream_q
from isqn.agents.q_learning import Agent
from isqn.types import EnvSpec, UserError

if TYPE_CHECKING:
    from isqn.experiments.config import Config

MAKERS: dict[str, Callable[..., Agent]] = {
    "dqn": q_learning.make,
    "stream-q": stream_q.make,
    "sac": sac.make,
    "cql": q_learning.make,
    "ilql": ilql.make,
}


def make(config: Config, spec: EnvSpec) -> Agent:
    require_actions(config, spec)
    return MAKERS[config.agent](config, spec)


def require_actions(config: Config, spec: EnvSpec) -> None:
    """That the agent can choose them."""
    if config.is_actor_critic and not spec.is_continuous:
        raise UserError(f"The actions of {spec.id} are a finite set; use `isqn train dqn` or `isqn train stream-q`.")
    if spec.is_continuous and not config.is_actor_critic:
        raise UserError(f"The actions of {spec.id} are continuous; use `isqn train sac`.")
    if spec.is_continuous and spec.is_image:
        raise UserError(f"{spec.id} observes images {spec.frame_shape}; `isqn train sac` learns from vectors only.")
