"""Stream Q(λ) (Elsayed et al. 2024) for every scheme: learns from each step once, when it is taken.

There is no replay buffer, no batch and no Adam. Every online head has an eligibility trace of its gradients. The
temporal-difference error of its pair moves the parameters along the trace, by a step size (ObGD) that is small enough
not to overshoot. Network, acting and target update are those of Q-learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from isqn import losses, schemes
from isqn.agents import normalisation
from isqn.agents.base import Agent, AgentState, init_state, make_refresh
from isqn.agents.dqn import make_epsilon_greedy, make_pair_losses
from isqn.agents.registry import register_agent
from isqn.config.fields import POSITIVE, PROBABILITY, alias
from isqn.config.parts import EpsilonGreedy, Normalisation, ScaledTorso
from isqn.config.run import LearningRate, NativeLoop, TargetUpdatePeriod
from isqn.lazy import jax, jnp
from isqn.types import Array, EnvSpec, Metrics, Params, Transition

HELD_OUT_STEPS = 32  # past steps that the probes evaluate at each update


@dataclass(frozen=True)
class StreamQConfig(Normalisation, ScaledTorso, EpsilonGreedy, NativeLoop):
    """Streaming Q-learning, without a replay buffer and without batches."""

    agent = "stream-q"

    target_update_period: TargetUpdatePeriod = 10
    """Target update period (T) in agent steps."""
    learning_rate: LearningRate = 1.0
    """Maximum step size of ObGD (alpha); a step that would overshoot is made smaller."""
    layer_norm: bool = True
    normalise_observations: bool = True
    normalise_rewards: bool = True
    trace_decay: Annotated[float, PROBABILITY, alias("lambda")] = 0.8
    """Trace decay (lambda), in [0, 1]. Traces are reset after an episode and after an exploring action."""
    obgd_kappa: Annotated[float, POSITIVE] = 2.0
    """Safety factor of ObGD (kappa): larger values make smaller steps."""
    obgd: Literal["per-head", "joint"] = "per-head"
    """Update that ObGD bounds: of each pair (per-head), or summed over pairs (joint). Not specified in the paper."""
    shift_traces: bool = True
    """Shift the traces along with the heads at a target update. Not specified in the paper."""
    layer_norm_axes: Literal["channels", "all"] = "channels"
    """Axes of LayerNorm: the channels (the authors' slimStreamQ), or all axes of a sample (the code of Stream Q)."""
    initial_sparsity: Annotated[float, PROBABILITY] = 0.9
    """Share of initially zero weights among the inputs of each unit; at least one weight is not zero."""

    algorithm = "Stream Q(λ)"
    loss = "dqn"

    @property
    def torso_settings(self) -> dict[str, Any]:
        streaming = {"is_streaming": True, "layer_norm_axes": self.layer_norm_axes, "sparsity": self.initial_sparsity}
        return super().torso_settings | streaming

    @property
    def held_out_size(self) -> int:  # type: ignore[override]
        return HELD_OUT_STEPS if self.analysis else 0

    @property
    def replay_rows(self) -> int:
        """Two rows for the current step, or more with --analysis, for the past steps that the probes read."""
        return self.analysis_samples + 1 if self.analysis else 2


class Traces(NamedTuple):
    """Eligibility traces: decayed sums of past gradients.

    The gradient of a value with respect to its own head is the same for all heads: the features, in the column of the
    action. One trace serves all heads.
    """

    torso: Params  # with a leading axis of pairs
    head: Params
    fade: Array  # factor before the next gradient: gamma lambda, or 0 where the traces end


def make(config: StreamQConfig, spec: EnvSpec) -> Agent:
    """Make the streaming agent: network, traces, and an update for one step."""
    from isqn.networks import make_network

    scheme, decay = config.target_scheme, config.discount * config.trace_decay
    network = make_network(spec, scheme.num_heads, config.torso, config.torso_settings)
    move_heads = make_refresh(scheme, config.target_step_size)
    online, target, copy = np.array(scheme.online), np.array(scheme.target), np.array(scheme.copy or 0)

    def init(seed: Array | int) -> AgentState:
        state = init_state(scheme, network, seed)
        torso = jax.tree.map(lambda w: jnp.zeros((scheme.num_pairs, *w.shape)), state.params["torso"])
        head = jax.tree.map(lambda w: jnp.zeros(w.shape[1:]), state.params["heads"])
        traces = Traces(torso, head, jnp.float32(decay))
        return state._replace(optimizer=traces, moments=normalisation.init(config, spec))

    def observe(
        state: AgentState, frame: Array, reward: Array | None = None, ended: Array | None = None
    ) -> tuple[AgentState, Array]:
        """Add a frame and a reward to the statistics, then normalise the frame by them."""
        statistics = normalisation.update(state.moments, frame, reward, ended, config.discount)
        return state._replace(moments=statistics), normalisation.normalise_observation(statistics, frame)

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        step = jax.tree.map(lambda x: x[0], batch)
        params, traces = state.params, state.optimizer
        reward = step.reward / normalisation.reward_scale(state.moments)

        features, pull_back = jax.vjp(lambda torso: network.features(torso, step.obs[None])[0], params["torso"])
        q = network.values(params["heads"], features[None])[0, online, step.action]
        networks = [network.apply(older, {}, step.next_obs[None])[0][0] for older in state.copies or (params,)]
        targets = jnp.stack(networks)[copy, target].max(axis=-1)
        errors = reward + step.discount * targets - q

        # The gradients of all online values with respect to the torso, in one backward pass.
        (gradients,) = jax.vmap(pull_back)(params["heads"]["kernel"][online, :, step.action].astype(features.dtype))
        action = jax.nn.one_hot(step.action, spec.num_actions)
        head_gradient = {"kernel": jnp.outer(features, action), "bias": action}
        torso, head = jax.tree.map(
            lambda z, g: traces.fade * z + g, (traces.torso, traces.head), (gradients, head_gradient)
        )

        head_norm = sum(jnp.abs(z).sum() for z in jax.tree.leaves(head))
        norms = sum(map(_norms, jax.tree.leaves(torso)), jnp.asarray(head_norm))
        steps = step_sizes(errors, norms, config) * errors
        params = {
            "torso": jax.tree.map(lambda w, z: w + _weighted_sum(steps, z), params["torso"], torso),
            "heads": jax.tree.map(lambda w, z: w.at[online].add(jnp.tensordot(steps, z, 0)), params["heads"], head),
        }
        fade = jnp.where(step.ended | step.explored, 0.0, decay).astype(jnp.float32)
        state = state._replace(params=params, optimizer=Traces(torso, head, fade))
        return state, {"loss": jnp.square(errors).sum(), "q_value": q.mean()}

    def refresh(state: AgentState) -> AgentState:
        """Move the heads, and with --shift-traces their traces."""
        state = move_heads(state)
        if not config.shift_traces:
            return state
        sources = _trace_sources(scheme)
        torso = jax.tree.map(
            lambda z: schemes.interpolate(z, z[sources], config.target_step_size), state.optimizer.torso
        )
        return state._replace(optimizer=state.optimizer._replace(torso=torso))

    def forget(state: AgentState) -> AgentState:
        """Let the traces of past steps have no effect on later ones."""
        return state._replace(optimizer=state.optimizer._replace(fade=jnp.float32(0)))

    def activations(state: AgentState, batch: Transition) -> tuple[list[Array], Array]:
        return network.activations(state.params, state.statistics, batch.obs)

    return Agent(
        init=init,
        observe=observe,
        observe_eval=observe,
        act=make_epsilon_greedy(scheme, network, spec, config.acting_rule),
        update=update,
        refresh=refresh,
        losses=make_pair_losses(scheme, network, losses.dqn, joint=False),
        activations=activations,
        forget=forget,
        network=network,
        refreshes=scheme.refreshes,
        is_streaming=True,
    )


def step_sizes(errors: Array, norms: Array, config: StreamQConfig) -> Array:
    """Return the step size of each pair by ObGD (Elsayed et al. 2024, algorithm 3), given the l1 norms of the traces.

    The step size is the learning rate, or less if that would overshoot.
    """
    reach = config.obgd_kappa * jnp.maximum(jnp.abs(errors), 1) * norms
    reach = reach.sum() if config.obgd == "joint" else reach
    return config.learning_rate / jnp.maximum(config.learning_rate * reach, 1)


def _trace_sources(scheme: schemes.TargetScheme) -> np.ndarray:
    """Return for each pair the pair whose online head becomes its own online head at a refresh."""
    pair_of = {head: pair for pair, head in enumerate(scheme.online)}
    source_of = dict(zip(*scheme.head_moves, strict=True))
    return np.array([pair_of[source_of.get(head, head)] for head in scheme.online])


def _weighted_sum(weights: Array, z: Array) -> Array:
    """Sum over the pairs term by term, in one pass over the memory; a matrix product would take two."""
    return sum(weights[pair] * z[pair] for pair in range(len(z)))  # type: ignore[return-value]


def _norms(z: Array) -> Array:
    """Return the l1 norm of the trace of each pair.

    The reduction takes absolute values itself, because XLA would write an array of them first. XLA leaves a sum of one
    number as it is, so the result of the first reduction may still have a sign.
    """
    rows = z.reshape(len(z), -1, z.shape[-1])
    columns = jax.lax.reduce(rows, np.float32(0), lambda a, b: jnp.abs(a) + jnp.abs(b), (1,))
    return jnp.abs(columns).sum(axis=1)


register_agent("stream-q", StreamQConfig, make, presets="isqn.presets.stream_q")
