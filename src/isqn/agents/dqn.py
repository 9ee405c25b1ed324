"""Deep Q-learning: one update function for every target scheme and every loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from isqn import schemes
from isqn.agents.base import (
    Agent,
    AgentState,
    Choice,
    PairLosses,
    descend_on_losses,
    init_state,
    make_adam,
    make_refresh,
)
from isqn.agents.meta import init_meta, meta_update
from isqn.agents.registry import register_agent
from isqn.config.fields import AT_LEAST_ONE, alias
from isqn.config.parts import Adam, BatchNorm, EpsilonGreedy, MetaGradient, PairLoss, Replay, ScaledTorso
from isqn.config.run import NativeLoop, RewardClip
from isqn.keys import device_key
from isqn.lazy import jax, jnp, optax
from isqn.losses import LossFunction, make_loss
from isqn.types import Array, EnvSpec, Metrics, Params, Transition, Values

if TYPE_CHECKING:
    from isqn.networks import Network


@dataclass(frozen=True)
class DqnConfig(PairLoss, MetaGradient, BatchNorm, ScaledTorso, Adam, Replay, EpsilonGreedy, NativeLoop):
    """Deep Q-learning with a replay buffer."""

    agent = "dqn"

    update_period: Annotated[int, AT_LEAST_ONE, alias("train-frequency")] = 1
    """Agent steps between gradient steps (G)."""
    reward_clip: RewardClip = None
    """Clip rewards to [-c, c] for learning; None: no clipping. Reported returns are never clipped."""
    compress_replay: Literal["auto", "yes", "no"] = "auto"
    """Compress frames in the replay buffer, without loss. auto: for images in the host loop."""

    @property
    def held_out_size(self) -> int:  # type: ignore[override]
        return self.batch_size if self.analysis else 0


def make(config: Any, spec: EnvSpec) -> Agent:
    """Make the agent of deep Q-learning: network, losses, acting, update and target update."""
    from isqn.networks import make_network

    scheme = config.target_scheme
    network = make_network(spec, scheme.num_heads, config.torso, config.torso_settings)
    losses = make_pair_losses(scheme, network, make_loss(config.loss, config), joint=config.uses_batch_norm)
    optimizer = make_optimizer(config)
    learns_weights = config.meta_gradient != "none"

    def init(seed: Array | int) -> AgentState:
        state = init_state(scheme, network, seed)
        meta = init_meta(scheme.num_pairs, config.meta_learning_rate) if learns_weights else ()
        return state._replace(optimizer=optimizer.init(state.params), meta=meta)

    def activations(state: AgentState, batch: Transition) -> tuple[list[Array], Array]:
        return network.activations(state.params, state.statistics, batch.obs)

    return Agent(
        init=init,
        act=make_epsilon_greedy(scheme, network, spec, config.acting_rule),
        update=make_update(config, losses),
        refresh=make_refresh(scheme, config.target_step_size),
        losses=losses,
        activations=activations,
        network=network,
        refreshes=scheme.refreshes,
    )


def make_optimizer(config: Any) -> optax.GradientTransformation:
    if config.meta_gradient == "sgd":
        return optax.sgd(config.learning_rate)
    # Differentiating through Adam needs eps_root: a gradient of exactly zero has no slope under the root.
    return make_adam(config, eps_root=1e-9 if config.meta_gradient == "adam" else 0.0)


def make_update(config: Any, losses: PairLosses) -> Callable[[AgentState, Transition], tuple[AgentState, Metrics]]:
    """Return the gradient step on the weighted sum of the pair losses; a meta-gradient may learn the weights."""
    optimizer, weights = make_optimizer(config), jnp.asarray(config.pair_weights)

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        if config.meta_gradient != "none":
            return meta_update(state, batch, losses, optimizer, config.meta_learning_rate)

        params, optimizer_state, (metrics, statistics) = descend_on_losses(
            optimizer, state.optimizer, losses, weights, state, batch
        )
        return state._replace(params=params, statistics=statistics, optimizer=optimizer_state), metrics

    return update


def make_pair_losses(
    scheme: schemes.TargetScheme, network: Network, pair_loss: LossFunction, *, joint: bool
) -> PairLosses:
    """Return a function of parameters, statistics, copies and a batch that returns the mean loss of each pair."""

    def pair_losses(
        params: Params, statistics: Params, copies: tuple[Params, ...], batch: Transition
    ) -> tuple[Array, tuple[Metrics, Params]]:
        predictions, targets, new_statistics = evaluate_pairs(
            scheme, network, params, statistics, copies, batch, joint=joint
        )
        over_pairs = jax.vmap(pair_loss, in_axes=(0, 0, None))
        losses = jax.vmap(over_pairs)(predictions, targets, batch).mean(axis=0)
        chosen = jnp.take_along_axis(predictions.now, batch.action[:, None, None], axis=-1)
        return losses, ({"loss": losses.sum(), "q_value": chosen.mean()}, new_statistics)

    return pair_losses


def evaluate_pairs(
    scheme: schemes.TargetScheme,
    network: Network,
    params: Params,
    statistics: Params,
    copies: tuple[Params, ...],
    batch: Transition,
    *,
    joint: bool,
) -> tuple[Values, Values, Params]:
    """Evaluate the online and the target head of each pair at s and s'.

    Returns two `Values` of shape (B, pairs, ...) and the new statistics. Only the online heads at s have a gradient.
    XLA removes the values that a loss does not use.
    """

    def evaluate_both(params: Params) -> tuple[Values, Params]:
        if joint:
            # BatchNorm must see s and s' as one batch (Bhatt et al. 2024), and its averages have a gradient. Two
            # passes are cheaper without it: the gradient of a joint pass runs through both halves, 1.5 times the work.
            both, new_statistics = network.apply(params, statistics, jnp.concatenate([batch.obs, batch.next_obs]), True)
            now, after = jnp.split(both, 2)
        else:
            now, new_statistics = network.apply(params, statistics, batch.obs)
            after, _ = network.apply(params, statistics, batch.next_obs)
        return Values(now, jax.lax.stop_gradient(after)), new_statistics

    online, target, copy = np.array(scheme.online), np.array(scheme.target), np.array(scheme.copy, int)
    values, new_statistics = evaluate_both(params)
    if copies:
        of_copies = jax.tree.map(lambda *q: jnp.stack(q), *(evaluate_both(older)[0] for older in copies))
        targets = jax.tree.map(lambda q: q[copy, :, target].swapaxes(0, 1), of_copies)  # from (copies, B, heads, ...)
    else:
        targets = jax.tree.map(lambda q: q[:, target], values)
    return jax.tree.map(lambda q: q[:, online], values), jax.lax.stop_gradient(targets), new_statistics


def make_epsilon_greedy(
    scheme: schemes.TargetScheme, network: Network, spec: EnvSpec, acting_rule: str
) -> Callable[[AgentState, Array, Array, Array, Array], Choice]:
    """Return the behaviour policy: epsilon-greedy with respect to one online head, or to the mean of all."""

    def act(state: AgentState, obs: Array, epsilon: Array, step: Array, episode: Array) -> Choice:
        heads = jnp.asarray(np.array(scheme.online))
        if acting_rule == "last":
            heads = heads[-1:]
        elif acting_rule != "mean":
            count = episode if acting_rule == "episode" else step
            logits = state.meta.logits if state.meta else jnp.zeros(len(scheme.online))
            heads = heads[jax.random.categorical(device_key(state.seed, "head", count), logits)][None]
        params = {**state.params, "heads": jax.tree.map(lambda w: w[heads], state.params["heads"])}
        q, _ = network.apply(params, state.statistics, obs[None])
        best = jnp.argmax(q[0].mean(axis=0))  # the mean over the acting heads
        explore, draw = jax.random.split(device_key(state.seed, "explore", step))
        random_action = jax.random.randint(draw, (), 0, spec.num_actions)
        action = jnp.where(jax.random.uniform(explore) < epsilon, random_action, best).astype(jnp.int32)
        return Choice(action, action != best)

    return act


register_agent("dqn", DqnConfig, make, presets="isqn.presets.dqn")
