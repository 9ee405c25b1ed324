"""Meta iS-QN (paper, D.4): the weight of each Bellman update is learned by a gradient through the update.

The batch that makes the step also judges it: outer(theta') = sum of the pair losses, unweighted, at the
parameters theta' that the weighted step led to; its gradient with respect to the weights, one step back
only (Xu et al. 2018), moves the logits. Through SGD this is the paper's closed form.
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
    """Return a softmax scaled so that equal logits give ones, the plain sum."""
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

    def stepped(weights: Array) -> tuple[Any, Any, Any]:
        def inner(params: Any) -> tuple[Array, Any]:
            losses, rest = pair_losses(params, state.statistics, state.copies, batch)
            return losses @ weights, rest

        grads, rest = jax.grad(inner, has_aux=True)(state.params)
        steps, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        return optax.apply_updates(state.params, steps), optimizer_state, rest

    def outer(logits: Array) -> tuple[Array, Any]:
        params, optimizer_state, rest = stepped(pair_weights(logits))
        losses, _ = pair_losses(params, state.statistics, state.copies, batch)
        return losses.sum(), (params, optimizer_state, rest)

    grad, (params, optimizer_state, (metrics, statistics)) = jax.grad(outer, has_aux=True)(state.meta.logits)
    step, meta_optimizer = optax.adam(learning_rate).update(grad, state.meta.optimizer)
    metrics = metrics | {"pair_weight": pair_weights(state.meta.logits)}
    meta = MetaState(optax.apply_updates(state.meta.logits, step), meta_optimizer)
    return state._replace(params=params, optimizer=optimizer_state, statistics=statistics, meta=meta), metrics
