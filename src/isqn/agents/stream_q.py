"""Stream Q(λ) (Elsayed et al. 2024) for every scheme: each step is learned from once, when it comes.

There is no replay, no batch and no Adam. Every online head has a trace of the gradients of its past values, and the
temporal-difference error of its pair moves the parameters along it, by a step (ObGD) that is short enough not to
overshoot. Network, acting and refresh are those of Q-learning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn import schemes
from isqn.agents import normalise, q_learning
from isqn.agents.q_learning import Agent, AgentState
from isqn.types import Array, EnvSpec, Metrics, Params, Transition

if TYPE_CHECKING:
    from isqn.experiments.config import Config


class Traces(NamedTuple):
    """Sums of past gradients. That of a head with respect to itself is the same for all: the features, where the
    action was taken; it is kept once."""

    torso: Params  # with a leading axis of pairs
    head: Params
    fade: Array  # what they are multiplied by before the next gradient: gamma lambda, or 0 where they end


def make(config: Config, spec: EnvSpec) -> Agent:
    scheme, decay = config.target_scheme, config.discount * config.trace_decay
    agent = q_learning.make(config, spec)
    network = agent.network
    online, target, copy = np.array(scheme.online), np.array(scheme.target), np.array(scheme.copy or 0)

    def init(seed: Array | int) -> AgentState:
        state = agent.init(seed)
        torso = jax.tree.map(lambda w: jnp.zeros((scheme.num_pairs, *w.shape)), state.params["torso"])
        head = jax.tree.map(lambda w: jnp.zeros(w.shape[1:]), state.params["heads"])
        traces = Traces(torso, head, jnp.float32(decay))
        return state._replace(optimizer=traces, moments=normalise.begin(config, spec))

    def observe(
        state: AgentState, frame: Array, reward: Array | None = None, ended: Array | None = None
    ) -> tuple[AgentState, Array]:
        """A frame and a reward count before they are normalised; the frame stays as it was then."""
        seen = normalise.count(state.moments, frame, reward, ended, config.discount)
        return state._replace(moments=seen), normalise.observation(seen, frame)

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        step = jax.tree.map(lambda x: x[0], batch)
        params, traces = state.params, state.optimizer
        reward = step.reward / normalise.scale(state.moments)

        features, pull_back = jax.vjp(lambda torso: network.features(torso, step.obs[None])[0], params["torso"])
        q = network.values(params["heads"], features[None])[0, online, step.action]
        networks = [network.apply(older, {}, step.next_obs[None])[0][0] for older in state.copies or (params,)]
        aims = jnp.stack(networks)[copy, target].max(axis=-1)
        errors = reward + step.discount * aims - q

        # The gradient of each online value with respect to the torso, all of them in one backward pass.
        (gradients,) = jax.vmap(pull_back)(params["heads"]["kernel"][online, :, step.action].astype(features.dtype))
        taken = jax.nn.one_hot(step.action, spec.num_actions)
        own = {"kernel": jnp.outer(features, taken), "bias": taken}
        torso, head = jax.tree.map(lambda z, g: traces.fade * z + g, (traces.torso, traces.head), (gradients, own))

        of_head = sum(jnp.abs(z).sum() for z in jax.tree.leaves(head))
        norms = sum(map(_norms, jax.tree.leaves(torso)), jnp.asarray(of_head))
        moves = step_sizes(errors, norms, config) * errors
        params = {
            "torso": jax.tree.map(lambda w, z: w + _weighted_sum(moves, z), params["torso"], torso),
            "heads": jax.tree.map(lambda w, z: w.at[online].add(jnp.tensordot(moves, z, 0)), params["heads"], head),
        }
        fade = jnp.where(step.ended | step.explored, 0.0, decay).astype(jnp.float32)
        state = state._replace(params=params, optimizer=Traces(torso, head, fade))
        return state, {"loss": jnp.square(errors).sum(), "q_value": q.mean()}

    def refresh(state: AgentState) -> AgentState:
        """A trace belongs to the function that it was summed for, so it moves with its head."""
        state = agent.refresh(state)
        if not config.shift_traces:
            return state
        sources, size = _sources_of_traces(scheme), config.target_step_size
        torso = jax.tree.map(lambda z: schemes.towards(z, z[sources], size), state.optimizer.torso)
        return state._replace(optimizer=state.optimizer._replace(torso=torso))

    return agent._replace(init=init, observe=observe, update=update, refresh=refresh, streams=True)


def step_sizes(errors: Array, norms: Array, config: Config) -> Array:
    """ObGD, Elsayed et al. 2024, algorithm 3: for each pair the learning rate, or less where it would overshoot.

    `norms` are the l1 norms of the traces.
    """
    reach = config.obgd_kappa * jnp.maximum(jnp.abs(errors), 1) * norms
    reach = reach.sum() if config.obgd == "joint" else reach
    return config.learning_rate / jnp.maximum(config.learning_rate * reach, 1)


def _sources_of_traces(scheme: schemes.TargetScheme) -> np.ndarray:
    """For each pair the one whose online head becomes its own at a refresh."""
    pair_of = {head: pair for pair, head in enumerate(scheme.online)}
    source_of = dict(zip(*scheme.moves, strict=True))
    return np.array([pair_of[source_of.get(head, head)] for head in scheme.online])


def _weighted_sum(weights: Array, z: Array) -> Array:
    """Over the pairs, term by term: one pass over the memory, where a product of matrices makes two."""
    return sum(weights[pair] * z[pair] for pair in range(len(z)))  # type: ignore[return-value]


def _norms(z: Array) -> Array:
    """The l1 norm of the trace of each pair.

    Sums take the absolute value themselves: XLA would write a whole array of them first. It leaves a sum of one
    number as it is, so what comes out may still have a sign.
    """
    rows = z.reshape(len(z), -1, z.shape[-1])
    columns = jax.lax.reduce(rows, np.float32(0), lambda a, b: jnp.abs(a) + jnp.abs(b), (1,))
    return jnp.abs(columns).sum(axis=1)
