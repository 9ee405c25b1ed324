"""Meta iS-QN (paper, D.4): learn the weight of each Bellman update by a gradient through the update.

The weighted pair losses lead from theta to theta' by one optimizer step. The outer loss is the unweighted sum of the
pair losses at theta', on the same batch. Its gradient with respect to the weights, through this one step (Xu et al.
2018), updates their logits. With SGD this is the closed form in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from isqn.lazy import jax, jnp, optax
from isqn.types import Array, Metrics, Transition


class MetaState(NamedTuple):
    """Logits of the pair weights, and the state of their optimizer."""

    logits: Array
    optimizer: Any


def pair_weights(logits: Array) -> Array:
    """Return the softmax of the logits times their number, so that equal logits give weights of one."""
    return len(logits) * jax.nn.softmax(logits)


def init_meta(num_pairs: int, learning_rate: float) -> MetaState:
    logits = jnp.zeros(num_pairs)
    return MetaState(logits, optax.adam(learning_rate).init(logits))


def meta_update(
    state: Any,
    batch: Transition,
    pair_losses: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    learning_rate: float,
) -> tuple[Any, Metrics]:
    """Update the network by the weighted losses, then the weights by a gradient through that update."""

    def take_step(weights: Array) -> tuple[Any, Any, Any]:
        def inner(params: Any) -> tuple[Array, Any]:
            losses, rest = pair_losses(params, state.statistics, state.copies, batch)
            return losses @ weights, rest

        grads, rest = jax.grad(inner, has_aux=True)(state.params)
        steps, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        return optax.apply_updates(state.params, steps), optimizer_state, rest

    def outer(logits: Array) -> tuple[Array, Any]:
        params, optimizer_state, rest = take_step(pair_weights(logits))
        losses, _ = pair_losses(params, state.statistics, state.copies, batch)
        return losses.sum(), (params, optimizer_state, rest)

    grad, (params, optimizer_state, (metrics, statistics)) = jax.grad(outer, has_aux=True)(state.meta.logits)
    step, meta_optimizer = optax.adam(learning_rate).update(grad, state.meta.optimizer)
    metrics = metrics | {"pair_weight": pair_weights(state.meta.logits)}
    meta = MetaState(optax.apply_updates(state.meta.logits, step), meta_optimizer)
    return state._replace(params=params, optimizer=optimizer_state, statistics=statistics, meta=meta), metrics
