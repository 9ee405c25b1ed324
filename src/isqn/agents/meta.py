"""Meta iS-QN (paper, D.4): learn the weight of each Bellman update by a gradient through the update.

The weighted pair losses lead from theta to theta' by one optimizer step. The outer loss is the unweighted sum of the
pair losses at theta', on the same batch. Its gradient with respect to the weights, through this one step (Xu et al.
2018), updates their logits. With SGD this is the closed form in the paper.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from isqn.agents.base import PairLosses, descend, descend_on_losses
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
    pair_losses: PairLosses,
    optimizer: optax.GradientTransformation,
    learning_rate: float,
) -> tuple[Any, Metrics]:
    """Update the network by the weighted losses, then the weights by a gradient through that update."""

    def outer(logits: Array) -> tuple[Array, Any]:
        params, optimizer_state, rest = descend_on_losses(
            optimizer, state.optimizer, pair_losses, pair_weights(logits), state, batch
        )
        losses, _ = pair_losses(params, state.statistics, state.copies, batch)
        return losses.sum(), (params, optimizer_state, rest)

    grad, (params, optimizer_state, (metrics, statistics)) = jax.grad(outer, has_aux=True)(state.meta.logits)
    logits, meta_optimizer = descend(optax.adam(learning_rate), grad, state.meta.optimizer, state.meta.logits)
    metrics = metrics | {"pair_weight": pair_weights(state.meta.logits)}
    meta = MetaState(logits, meta_optimizer)
    return state._replace(params=params, optimizer=optimizer_state, statistics=statistics, meta=meta), metrics
