"""Learning of a language agent: the value heads learn in pairs, and a policy is cloned.

One pass over a game gives the features of all its states, because a state is what comes before a token: s and s' of a
step are two positions of the same sequence. A target network takes another pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn import losses, schemes
from isqn.agents.base import AgentState, descend, make_adam, refresh_if_due
from isqn.keys import device_key
from isqn.language.heads import Networks, ValueNetwork, make_networks, without_v
from isqn.language.losses import ilql
from isqn.language.types import TextSpec, Tokens, TokenValues
from isqn.schemes import TargetScheme
from isqn.types import Array, Metrics, Params, Transition

if TYPE_CHECKING:
    from isqn.language.agent import IlqlConfig


class Optimizer(NamedTuple):
    """State of Adam, and the number of updates so far."""

    adam: Any  # state of Adam for the values and the policy
    updates: Array  # number of updates so far, from which dropout is drawn


class Learner(NamedTuple):
    """Functions that learn from batches of games."""

    init_optimizer: Callable[[Params, Params], Optimizer]  # params, policy
    pair_losses: Callable[..., tuple[Array, Metrics]]  # params, copies, games, dropout keys -> (pairs,), metrics
    loss: Callable[[AgentState, Tokens], Array]  # forward passes of an update alone, to count and time them
    td_errors: Callable[[AgentState, Tokens], tuple[Array, Array]]  # games -> error of Q, and V: (games, steps) each
    update: Callable[[AgentState, Tokens], tuple[AgentState, Metrics]]
    refresh: Callable[[AgentState], AgentState]
    sync: Callable[[AgentState], AgentState]


def to_transitions(games: Tokens, spec: TextSpec, discount: float) -> tuple[Transition, Array]:
    """Return the transition of each token that an agent may write, (games, steps), and a mask of those it wrote."""
    positions = spec.state_positions[:-1]
    step, num_steps = jnp.arange(len(positions)), spec.action_tokens * games.num_actions[:, None]
    is_end = games.finished[:, None] & (step == num_steps - 1)
    return Transition((), games.tokens[:, positions + 1], games.rewards, discount * ~is_end, ()), step < num_steps


def select_targets(scheme: TargetScheme, copies: list[Array]) -> Array:
    """Select the target head of each pair: from (B, T, heads, ...) of each copy to (B, T, pairs, ...)."""
    copy, head = np.array(scheme.copy, int), np.array(scheme.target)
    return jnp.moveaxis(jnp.stack(copies)[copy, :, :, head], 0, 2)


def make_learner(config: IlqlConfig, spec: TextSpec, *, unroll: bool = False) -> Learner:
    """Make the functions that learn; with `unroll`, the compiler counts the work of all layers."""
    scheme = config.target_scheme
    networks = make_networks(config, spec.num_actions, unroll=unroll)
    pair_losses, td_errors = _make_value_losses(config, spec, networks.values)
    batch_loss = _make_batch_loss(config, spec, networks, pair_losses)
    optimizer = make_adam(config)
    clones_policy = not config.policy_checkpoint

    def init_optimizer(params: Params, policy: Params) -> Optimizer:
        return Optimizer(optimizer.init((params, policy) if clones_policy else (params,)), jnp.int32(0))

    def trained_params(state: AgentState) -> tuple[Params, ...]:
        return (state.params, state.policy) if clones_policy else (state.params,)

    def dropout_keys(state: AgentState, parts: int) -> Array:
        """Return for each part of a batch the keys of the values, the policy and the copies."""
        key = device_key(state.seed, "dropout", state.optimizer.updates)
        return jax.random.split(key, (parts, 2 + scheme.num_copies))

    def loss(state: AgentState, games: Tokens) -> Array:
        return batch_loss(trained_params(state), state.copies, games, dropout_keys(state, 1)[0])[0]

    def update(state: AgentState, games: Tokens) -> tuple[AgentState, Metrics]:
        trained = trained_params(state)
        parts = len(games.tokens) // (config.micro_batch_size or len(games.tokens))
        keys = dropout_keys(state, parts)
        gradient = jax.grad(batch_loss, has_aux=True)
        if parts == 1:
            grads, metrics = gradient(trained, state.copies, games, keys[0])
        else:
            grads, metrics = _accumulate(gradient, trained, state.copies, games, keys)
        (params, *policy), adam = descend(optimizer, grads, state.optimizer.adam, trained)
        updates = state.optimizer.updates + 1
        state = state._replace(
            params=params, policy=policy[0] if clones_policy else state.policy, optimizer=Optimizer(adam, updates)
        )
        return refresh_if_due(config, refresh, state, updates), metrics

    def refresh(state: AgentState) -> AgentState:
        step_size = config.target_step_size
        _, copies = schemes.refresh(config.refreshed_scheme, without_v(state.params), state.copies, step_size)
        params, _ = schemes.refresh(config.refreshed_scheme, state.params, (), step_size)
        return state._replace(params=params, copies=copies)

    def sync(state: AgentState) -> AgentState:
        return state._replace(copies=schemes.sync(without_v(state.params), state.copies))

    return Learner(init_optimizer, pair_losses, loss, td_errors, update, refresh, sync)


def _accumulate(gradient: Any, trained: Any, copies: tuple[Params, ...], games: Tokens, keys: Array) -> Any:
    """Return the mean gradient and metrics over the parts of a batch, one part after another."""
    num_parts = len(keys)
    # game i goes to part i % num_parts, so that each device has its share of every part
    parts = jax.tree.map(lambda x: x.reshape(-1, num_parts, *x.shape[1:]).swapaxes(0, 1), games)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(trained, copies, *part)), None

    shapes = jax.eval_shape(gradient, trained, copies, *jax.tree.map(lambda x: x[0], (parts, keys)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, (parts, keys))
    return jax.tree.map(lambda x: x / num_parts, total)


def _make_batch_loss(
    config: IlqlConfig, spec: TextSpec, networks: Networks, pair_losses: Callable[..., tuple[Array, Metrics]]
) -> Callable[..., tuple[Array, Metrics]]:
    """Make the loss of a batch: the weighted sum over the pairs, and the cloning loss if a policy is trained."""
    pair_weights = jnp.asarray(config.pair_weights)
    positions = spec.state_positions[:-1]

    def cloning_loss(policy: Params, games: Tokens, key: Array) -> Array:
        """Return the cross-entropy of the tokens that the players wrote, averaged over them."""
        steps, is_step = to_transitions(games, spec, config.discount)
        key_or_none = key if config.dropout else None
        features, _ = networks.policy.features(policy, games.tokens, games.tokens != spec.pad, key=key_or_none)
        log_probabilities = jax.nn.log_softmax(networks.policy.logits(policy, features[:, positions]))
        written = jnp.take_along_axis(log_probabilities, steps.action[..., None], axis=-1)[..., 0]
        return -(written * is_step).sum() / is_step.sum()

    def batch_loss(trained: Any, copies: tuple[Params, ...], games: Tokens, keys: Array) -> tuple[Array, Metrics]:
        per_pair, metrics = pair_losses(trained[0], copies, games, keys)
        if config.policy_checkpoint:
            return per_pair @ pair_weights, metrics
        cloning = cloning_loss(trained[1], games, keys[1])
        return per_pair @ pair_weights + cloning, metrics | {"cloning_loss": cloning}

    return batch_loss


def _make_value_losses(
    config: IlqlConfig, spec: TextSpec, network: ValueNetwork
) -> tuple[Callable[..., tuple[Array, Metrics]], Callable[[AgentState, Tokens], tuple[Array, Array]]]:
    """Make the losses of the pairs, and the temporal-difference errors of an evaluation."""
    scheme, positions = config.target_scheme, spec.state_positions
    online, target = np.array(scheme.online), np.array(scheme.target)
    pair_loss = losses.bind_settings(ilql, config)

    def features_of(params: Params, tokens: Array, key: Array | None) -> Array:
        return network.features(params, tokens, tokens != spec.pad, key=key if config.dropout else None)[0]

    def q_of(params: Params, features: Array) -> Array:
        """Return Q as (B, steps, heads, 2, tokens), only where the agent writes: heads cost as much as the torso."""
        return jnp.moveaxis(network.q(params, features[:, positions[:-1]]), 0, 3)

    def values_of(params: Params, tokens: Array, key: Array | None) -> TokenValues:
        """Return the values of all heads at each step, (B, steps, heads, ...)."""
        features = features_of(params, tokens, key)
        v = network.v(params, features[:, positions])
        return TokenValues(q_of(params, features), v[:, :-1], v[:, 1:])

    def values_of_pairs(
        params: Params, copies: tuple[Params, ...], tokens: Array, keys: Array
    ) -> tuple[TokenValues, TokenValues]:
        """Return the values of the online and the target heads at each step, (B, steps, pairs, ...)."""
        values = values_of(params, tokens, keys[0])
        fixed = jax.lax.stop_gradient(values)
        target_q = fixed.q[:, :, target]
        if copies:
            copy_keys = keys[2:] if config.target_dropout else [None] * len(copies)
            of_copies = [q_of(copy, features_of(copy, tokens, k)) for copy, k in zip(copies, copy_keys, strict=True)]
            target_q = jax.lax.stop_gradient(select_targets(scheme, of_copies))
        online_values = jax.tree.map(lambda x: x[:, :, online], values)
        q_for_v = fixed.q[:, :, online] if config.bellman_heads == "B" else target_q
        v_for_q = fixed.next_v[:, :, online if config.bellman_heads == "A" else target]
        return online_values, online_values._replace(q=q_for_v, next_v=v_for_q)

    def pair_losses(params: Params, copies: tuple[Params, ...], games: Tokens, keys: Array) -> tuple[Array, Metrics]:
        """Return the loss of each pair, averaged over the steps of all games."""
        steps, is_step = to_transitions(games, spec, config.discount)
        online_values, target_values = values_of_pairs(params, copies, games.tokens, keys)
        over_pairs = jax.vmap(pair_loss, in_axes=(0, 0, None))
        each = jax.vmap(jax.vmap(over_pairs))(online_values, target_values, steps)
        count = is_step.sum()
        per_pair = (each * is_step[..., None]).sum(axis=(0, 1)) / count
        actions = steps.action[:, :, None, None, None]
        written_q = jnp.take_along_axis(online_values.q, actions, axis=-1)[..., 0].min(axis=-1)
        recorded = {"q_value": written_q, "v_value": online_values.v}
        means = {name: (x.mean(axis=-1) * is_step).sum() / count for name, x in recorded.items()}
        return per_pair, {"loss": per_pair.sum(), **means}

    def td_errors(state: AgentState, games: Tokens) -> tuple[Array, Array]:
        """Return the error of Q and the value V at each step, both of the mean over the online heads."""
        steps, _ = to_transitions(games, spec, config.discount)
        values = values_of(state.params, games.tokens, None)
        mean = jax.tree.map(lambda x: x[:, :, online].mean(axis=2), values)
        written_q = jnp.take_along_axis(mean.q, steps.action[..., None, None], axis=-1)[..., 0].min(axis=-1)
        return steps.reward + steps.discount * mean.next_v - written_q, mean.v

    return pair_losses, td_errors
