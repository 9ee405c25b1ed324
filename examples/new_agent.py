"""A new agent in one file: expected SARSA (van Seijen et al. 2009) with a softmax (Boltzmann) policy.

isqn train boltzmann --import examples/new_agent.py --temperature 0.05 --env-id isqn/Chain-v0 --k 3
"""

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

import isqn
from isqn.agents.base import Agent, AgentState, Choice, descend_on_losses, init_state, make_adam, make_refresh
from isqn.agents.dqn import make_pair_losses
from isqn.config.fields import POSITIVE
from isqn.config.parts import Adam, Replay, ScaledTorso
from isqn.config.run import NativeLoop
from isqn.keys import device_key
from isqn.networks import make_network
from isqn.types import Array, EnvSpec, Metrics, Transition, Values


@dataclass(frozen=True)
class BoltzmannConfig(ScaledTorso, Adam, Replay, NativeLoop):
    """Expected SARSA with a softmax policy and a replay buffer."""

    agent = "boltzmann"

    temperature: Annotated[float, POSITIVE] = 0.1
    """Temperature of the softmax policy, in units of reward."""

    algorithm = "Boltzmann"

    def deterministic(self) -> "BoltzmannConfig":
        return self.replace(temperature=1e-6)


def make(config: BoltzmannConfig, spec: EnvSpec) -> Agent:
    scheme, optimizer = config.target_scheme, make_adam(config)
    network = make_network(spec, scheme.num_heads, config.torso, config.torso_settings)
    online = np.array(scheme.online)

    def loss(online: Values, target: Values, transition: Transition) -> Array:
        value = jax.nn.softmax(target.next / config.temperature) @ target.next
        return jnp.square(transition.reward + transition.discount * value - online.now[transition.action])

    losses = make_pair_losses(scheme, network, loss, joint=False)

    def init(seed: Array | int) -> AgentState:
        state = init_state(scheme, network, seed)
        return state._replace(optimizer=optimizer.init(state.params))

    def act(state: AgentState, obs: Array, epsilon: Array, step: Array, episode: Array) -> Choice:
        q, _ = network.apply(state.params, state.statistics, obs[None])
        logits = q[0, online].mean(axis=0) / config.temperature
        action = jax.random.categorical(device_key(state.seed, "explore", step), logits)
        return Choice(action, action != jnp.argmax(logits))

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        weights = jnp.ones(scheme.num_pairs)
        params, optimizer_state, (metrics, _) = descend_on_losses(
            optimizer, state.optimizer, losses, weights, state, batch
        )
        return state._replace(params=params, optimizer=optimizer_state), metrics

    def activations(state: AgentState, batch: Any) -> tuple[list[Array], Array]:
        return network.activations(state.params, state.statistics, batch.obs)

    refresh = make_refresh(scheme, config.target_step_size)
    return Agent(init, act, update, refresh, losses, activations, network, scheme.refreshes)


isqn.register_agent("boltzmann", BoltzmannConfig, make)
