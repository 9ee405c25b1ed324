"""A new agent in one file: expected SARSA (van Seijen et al. 2009), which evaluates its own epsilon-greedy policy.

isqn train expected-sarsa --import examples/new_agent.py --policy-epsilon 0.1 --env-id isqn/Chain-v0 --k 3
"""

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

import isqn
from isqn.agents import dqn
from isqn.agents.base import Agent, AgentState
from isqn.config.fields import PROBABILITY
from isqn.types import Array, EnvSpec, Metrics, Transition, Values


@dataclass(frozen=True)
class ExpectedSarsaConfig(dqn.DqnConfig):
    """Expected SARSA with a replay buffer."""

    agent = "expected-sarsa"

    policy_epsilon: Annotated[float, PROBABILITY] = 0.1
    """Probability of a random action in the policy that is evaluated, in [0, 1]."""

    algorithm = "Expected-SARSA"


def make(config: ExpectedSarsaConfig, spec: EnvSpec) -> Agent:
    agent, scheme = dqn.make(config, spec), config.target_scheme  # network, acting and refresh of deep Q-learning
    optimizer, weights = dqn.make_optimizer(config), jnp.asarray(config.pair_weights)

    def loss(online: Values, target: Values, transition: Transition) -> Array:
        greedy, uniform = jnp.max(target.next), jnp.mean(target.next)
        value = (1 - config.policy_epsilon) * greedy + config.policy_epsilon * uniform
        return jnp.square(transition.reward + transition.discount * value - online.now[transition.action])

    losses = dqn.make_pair_losses(scheme, agent.network, loss, joint=config.uses_batch_norm)

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        def weighted(params: Any) -> Any:
            per_pair, rest = losses(params, state.statistics, state.copies, batch)
            return per_pair @ weights, rest

        grads, (metrics, statistics) = jax.grad(weighted, has_aux=True)(state.params)
        steps, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, steps)
        return state._replace(params=params, statistics=statistics, optimizer=optimizer_state), metrics

    return agent._replace(update=update, losses=losses)


isqn.register_agent("expected-sarsa", ExpectedSarsaConfig, make, presets_of="dqn")
