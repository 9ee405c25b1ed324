"""Q-learning for every scheme and every loss: one update function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from isqn import schemes
from isqn.agents.meta import init_meta, meta_update
from isqn.keys import device_key
from isqn.losses import make_loss
from isqn.networks import Network, make_network
from isqn.types import Array, EnvSpec, Metrics, Params, Transition, Values

if TYPE_CHECKING:
    from isqn.experiments.config import Config


class AgentState(NamedTuple):
    """All that learning changes; saved and restored as one."""

    seed: Array
    params: Params
    statistics: Params  # running averages of BatchNorm
    copies: tuple[Params, ...]  # older networks, for the schemes that keep any
    optimizer: Any
    meta: Any = ()  # what meta-learned head weights need; () without
    probe: Any = ()  # what the analysis keeps beside the agent; () without
    moments: Any = ()  # what observations and rewards are normalised by; () without
    policy: Any = ()  # the network that acts, where it is not this one; () without


class Choice(NamedTuple):
    action: Array
    explored: Array  # whether another action looked better


class Agent(NamedTuple):
    """Pure functions over one state. The trainer jits them and decides when each is due."""

    init: Callable[[Array | int], AgentState]  # seed -> state
    # state, frame; reward of the step that led to it and whether it ended, if one did -> state, what is learned of it
    observe: Callable[..., tuple[AgentState, Array]]
    act: Callable[[AgentState, Array, Array, Array, Array], Choice]  # state, obs, epsilon, step, episode
    update: Callable[[AgentState, Any], tuple[AgentState, Metrics]]  # state, a batch of transitions or of games
    refresh: Callable[[AgentState], AgentState]  # every T steps
    sync: Callable[[AgentState], AgentState]  # every D steps (i-QN)
    losses: Callable[..., tuple[Array, Any]]  # params, what else learns, batch -> loss of each pair, rest
    look: Callable[[AgentState, Any], tuple[list[Array], Array]]  # of a batch: every ReLU's output, the shared features
    network: Any  # a `Network`, or where tokens are written a `ValueNetwork`
    refreshes: bool  # whether the trainer has to call `refresh`
    acts_by: tuple[str, ...] = ("params", "statistics", "meta")  # the parts of the state, with the seed, that act needs
    streams: bool = False  # whether each step is learned from once, when it comes


def make(config: Config, spec: EnvSpec) -> Agent:
    scheme = config.target_scheme
    network = make_network(spec, scheme.num_heads, config)
    pair_loss = make_loss(config.loss, config)
    optimizer = make_optimizer(config)
    weights = jnp.asarray(config.pair_weights) if config.meta_gradient == "none" else None
    online = np.array(scheme.online)

    def init(seed: Array | int) -> AgentState:
        params, statistics = network.init(device_key(seed, "network"))
        params = begin_heads(config, params)
        return AgentState(
            seed=jnp.asarray(seed, jnp.uint32),
            params=params,
            statistics=statistics,
            # copies are distinct buffers, because the state is donated to the update
            copies=tuple(jax.tree.map(jnp.copy, params) for _ in range(scheme.num_copies)),
            optimizer=optimizer.init(params),
            meta=() if weights is not None else init_meta(scheme.num_pairs, config),
        )

    def pair_losses(
        params: Params, statistics: Params, copies: tuple[Params, ...], batch: Transition
    ) -> tuple[Array, tuple[Metrics, Params]]:
        """The batch mean of the loss of each pair."""
        predictions, aims, new_statistics = both_sides(
            scheme, network, params, statistics, copies, batch, joint=config.batch_norm
        )
        over_pairs = jax.vmap(pair_loss, in_axes=(0, 0, None))
        losses = jax.vmap(over_pairs)(predictions, aims, batch).mean(axis=0)
        chosen = jnp.take_along_axis(predictions.now, batch.action[:, None, None], axis=-1)
        return losses, ({"loss": losses.sum(), "q_value": chosen.mean()}, new_statistics)

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        if weights is None:
            return meta_update(state, batch, pair_losses, optimizer, config)

        def weighted(params: Params) -> tuple[Array, tuple[Metrics, Params]]:
            losses, rest = pair_losses(params, state.statistics, state.copies, batch)
            return losses @ weights, rest

        grads, (metrics, statistics) = jax.grad(weighted, has_aux=True)(state.params)
        steps, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, steps)
        return state._replace(params=params, statistics=statistics, optimizer=optimizer_state), metrics

    def look(state: AgentState, batch: Transition) -> tuple[list[Array], Array]:
        return network.look(state.params, state.statistics, batch.obs)

    def act(state: AgentState, obs: Array, epsilon: Array, step: Array, episode: Array) -> Choice:
        heads = jnp.asarray(online)
        if config.acting_rule == "last":
            heads = heads[-1:]
        elif config.acting_rule != "mean":
            count = episode if config.acting_rule == "episode" else step
            logits = state.meta.logits if weights is None else jnp.zeros(len(online))
            heads = heads[jax.random.categorical(device_key(state.seed, "head", count), logits)][None]
        params = {**state.params, "heads": jax.tree.map(lambda w: w[heads], state.params["heads"])}
        q, _ = network.apply(params, state.statistics, obs[None])
        best = jnp.argmax(q[0].mean(axis=0))  # of one head or of all
        explore, draw = jax.random.split(device_key(state.seed, "explore", step))
        random_action = jax.random.randint(draw, (), 0, spec.num_actions)
        action = jnp.where(jax.random.uniform(explore) < epsilon, random_action, best).astype(jnp.int32)
        return Choice(action, action != best)

    refresh = partial(refreshed, config)
    return Agent(init, pass_on, act, update, refresh, synced, pair_losses, look, network, scheme.refreshes)


def both_sides(
    scheme: schemes.TargetScheme,
    network: Network,
    params: Params,
    statistics: Params,
    copies: tuple[Params, ...],
    batch: Transition,
    *,
    joint: bool,
) -> tuple[Values, Values, Params]:
    """What the online and the target head of each pair say at s and s', (B, pairs, ...) each, and the statistics after
    it. What a loss does not use is never computed. A gradient flows to the online heads at s only."""

    def at_both_ends(params: Params) -> tuple[Values, Params]:
        if joint:
            # BatchNorm must see s and s' as one batch (Bhatt et al. 2024), and its averages have a gradient; otherwise
            # two passes, because the gradient of one joint pass runs through both halves: 1.5 times the work.
            both, moved = network.apply(params, statistics, jnp.concatenate([batch.obs, batch.next_obs]), True)
            now, then = jnp.split(both, 2)
        else:
            (now, moved), (then, _) = (network.apply(params, statistics, x) for x in (batch.obs, batch.next_obs))
        return Values(now, jax.lax.stop_gradient(then)), moved

    online, target, copy = np.array(scheme.online), np.array(scheme.target), np.array(scheme.copy, int)
    own, moved = at_both_ends(params)
    if copies:
        every = jax.tree.map(lambda *q: jnp.stack(q), *(at_both_ends(older)[0] for older in copies))
        aims = jax.tree.map(lambda q: q[copy, :, target].swapaxes(0, 1), every)  # of (copies, B, heads, ...)
    else:
        aims = jax.tree.map(lambda q: q[:, target], own)
    return jax.tree.map(lambda q: q[:, online], own), jax.lax.stop_gradient(aims), moved


# -- what agents share


def pass_on(state: AgentState, frame: Array, reward: Any = None, ended: Any = None) -> tuple[AgentState, Array]:
    """To observe, where nothing is learned of it."""
    return state, frame


def first_pair(scheme: schemes.TargetScheme) -> schemes.TargetScheme:
    return dataclasses.replace(scheme, online=scheme.online[:1], target=scheme.target[:1], copy=scheme.copy[:1])


def begin_heads(config: Config, params: Params) -> Params:
    """Those that are to begin as copies of others."""
    scheme = config.target_scheme
    if scheme.twins or config.initial_heads == "copied":
        params, _ = schemes.refresh(scheme if scheme.twins else first_pair(scheme), params, ())
    return params


def moved_scheme(config: Config) -> schemes.TargetScheme:
    """The pairs that a refresh moves."""
    return config.target_scheme if config.refreshed_heads == "all" else first_pair(config.target_scheme)


def refreshed(config: Config, state: AgentState) -> AgentState:
    params, copies = schemes.refresh(moved_scheme(config), state.params, state.copies, config.target_step_size)
    return state._replace(params=params, copies=copies)


def synced(state: AgentState) -> AgentState:
    return state._replace(copies=schemes.sync(state.params, state.copies))


def refresh_if_due(
    config: Config, refresh: Callable[[AgentState], AgentState], state: AgentState, updates: Array
) -> AgentState:
    """For agents that count their updates, and refresh within one."""
    if config.target_update_period == 1:
        return refresh(state)
    due = updates % config.target_update_period == 0
    return jax.lax.cond(due, refresh, lambda unchanged: unchanged, state)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    rate: Any = config.learning_rate
    if config.learning_rate_decay_steps:
        updates = config.learning_rate_decay_steps * config.updates_per_step
        rate = optax.linear_schedule(rate, config.learning_rate_end, updates)
    if config.meta_gradient == "sgd":
        return optax.sgd(rate)
    # Differentiating through Adam needs eps_root: a gradient of exactly zero has no slope under the root.
    eps_root = 1e-9 if config.meta_gradient == "adam" else 0.0
    return optax.adam(rate, eps=config.adam_epsilon, eps_root=eps_root)
