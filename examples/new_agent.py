"""A new agent in one file: expected SARSA (van Seijen et al. 2009), which evaluates its own epsilon-greedy policy.

isqn train expected-sarsa --import examples/new_agent.py --policy-epsilon 0.1 --env-id isqn/Chain-v0 --k 3
"""

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

import isqn
from isqn.agents import dqn
from isqn.agents.base import Agent
from isqn.config.fields import PROBABILITY
from isqn.types import Array, EnvSpec, Transition, Values


@dataclass(frozen=True)
class ExpectedSarsaConfig(dqn.DqnConfig):
    """Expected SARSA with a replay buffer."""

    agent = "expected-sarsa"

    policy_epsilon: Annotated[float, PROBABILITY] = 0.1
    """Probability of a random action in the policy that is evaluated, in [0, 1]."""

    algorithm = "Expected-SARSA"


def make(config: ExpectedSarsaConfig, spec: EnvSpec) -> Agent:
    agent = dqn.make(config, spec)  # network, acting and target update of deep Q-learning

    def loss(online: Values, target: Values, transition: Transition) -> Array:
        greedy, uniform = jnp.max(target.next), jnp.mean(target.next)
        value = (1 - config.policy_epsilon) * greedy + config.policy_epsilon * uniform
        return jnp.square(transition.reward + transition.discount * value - online.now[transition.action])

    losses = dqn.make_pair_losses(config.target_scheme, agent.network, loss, joint=config.uses_batch_norm)

    return agent._replace(update=dqn.make_update(config, losses), losses=losses)


isqn.register_agent("expected-sarsa", ExpectedSarsaConfig, make, presets_of="dqn")
