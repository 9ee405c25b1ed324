"""Trained agents loaded from a run folder, with the environment of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from isqn.agents.base import Agent, AgentState
from isqn.agents.registry import find_agent
from isqn.envs.adapter import Environment, make_run_environment
from isqn.train.evaluate import load_agent_state
from isqn.train.functions import make_run_agent
from isqn.train.record import naming_missing_imports, read_config
from isqn.types import UserError


class Player(NamedTuple):
    """A trained agent and its environment."""

    config: Any
    env: Environment
    agent: Agent
    state: AgentState
    step: int  # training step of the checkpoint
    epsilon: float


def require_environment_agent(config: Any, command: str) -> None:
    """Refuse agents that write text, for commands that act in an environment."""
    if find_agent(config.agent).actions == "tokens":
        raise UserError(f"{command} is not for {config.label}, which writes words; see `isqn eval` and `isqn play`.")


def load_player(
    run_dir: Path,
    which: str,
    acting_rule: str,
    epsilon: float | None,
    *,
    command: str,
    for_evaluation: bool = False,
    render: bool = False,
) -> Player:
    """Load a trained agent. The acting rule "auto" is that of training, or the agent's own rule for evaluations."""
    config: Any = read_config(run_dir)
    require_environment_agent(config, command)
    with naming_missing_imports(run_dir):
        env = make_run_environment(config, render=render)
        agent = make_run_agent(config, env.spec)
    state, step = load_agent_state(run_dir, agent, which)
    rule = acting_rule if acting_rule != "auto" else for_evaluation and find_agent(config.agent).evaluation_rule
    if rule and rule != config.acting_rule:
        config = config.acting_by(rule)
        agent = make_run_agent(config, env.spec)
    return Player(config, env, agent, state, step, config.evaluation_epsilon if epsilon is None else epsilon)
