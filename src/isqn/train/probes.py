"""The paper's probes of a network in training: feature rank, dormant units, target churn, gradient cosines."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents import normalisation
from isqn.agents.base import Agent, AgentState
from isqn.agents.dqn import make_pair_losses
from isqn.compiler import jit
from isqn.losses import make_loss
from isqn.schemes import target_based, target_free
from isqn.types import Array, Metrics, Params, Transition


def probe_columns(config: Any) -> tuple[str, ...]:
    """Return the names of the columns that the probes of the network add to metrics.csv."""
    heads = ("head_cosine",) if config.target_scheme.num_heads > 1 else ()
    norm = ("batch_norm_deviation",) if config.uses_batch_norm else ()
    return ("effective_rank", "dormant_share", *heads, *norm) if config.analysis else ()


def effective_rank(features: np.ndarray, delta: float = 0.01) -> int:
    """Return the effective rank (srank, Kumar et al. 2021).

    It is the smallest number of singular values whose sum is at least 1 - delta of the sum of all.
    """
    values = np.linalg.svd(np.asarray(features, np.float64), compute_uv=False)
    return int(np.searchsorted(np.cumsum(values), (1 - delta) * values.sum()) + 1)


def dormant_share(units: list[Array]) -> float:
    """Return the share of units that are above zero on no sample. Each position of a feature map is a unit.

    This is the measure of Sokar et al. 2023 with a threshold of 0, as in the authors' code. Units of a leaky ReLU are
    rarely dormant in this sense.
    """
    dormant = [np.asarray(jnp.max(layer, axis=0) <= 0) for layer in units]
    return float(sum(d.sum() for d in dormant) / max(1, sum(d.size for d in dormant)))


def probe_features(agent: Agent, state: AgentState, batch: Transition) -> dict[str, float]:
    """Return the probes of the network on the states of a batch.

    They are the effective rank and the share of dormant units, the cosine between heads if there are several, and the
    deviation of BatchNorm's input if there is any.
    """
    units, features = jit(agent.activations)(state._replace(optimizer=(), probe=()), batch)
    values = {"effective_rank": effective_rank(np.asarray(features)), "dormant_share": dormant_share(units)}
    cosine = head_cosine(state.params["heads"])
    values |= {} if cosine is None else {"head_cosine": cosine}
    return values | ({"batch_norm_deviation": batch_norm_deviation(units)} if state.statistics else {})


def head_cosine(heads: Params) -> float | None:
    """Return the mean cosine between the weights of neighbouring heads, or None if there is only one head.

    Moving-average updates of the target heads pull the heads together.
    """
    leaves = jax.tree_util.tree_leaves_with_path(heads)
    kernels = [np.asarray(leaf, np.float64) for path, leaf in leaves if path[-1].key == "kernel"]
    if len(kernels[0]) == 1:
        return None
    rows = np.concatenate([kernel.reshape(len(kernel), -1) for kernel in kernels], axis=1)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return float((rows[1:] * rows[:-1]).sum(axis=1).mean())


def batch_norm_deviation(units: list[Array]) -> float:
    """Return the root of the mean variance of BatchNorm's inputs, which are the outputs of every ReLU.

    If it is not far above the square root of BatchNorm's epsilon, BatchNorm centres more than it scales.
    """
    return float(np.sqrt(np.mean([np.asarray(layer, np.float64).var(axis=0).mean() for layer in units])))


def add_probes(agent: Agent, config: Any) -> Agent:
    """Return an agent that also reports target churn and gradient cosines at every update.

    Its batches are longer: the transitions after the first `batch_size` are held out and never learned from. Its state
    also keeps the parameters before the last refresh, in `probe`. The first online head of that copy is the current
    target of the first pair, so that a target-based gradient can be computed beside the agent's own.
    """
    scheme, pair_loss = config.target_scheme, make_loss(config.loss, config)
    joint = config.uses_batch_norm
    tf_losses = make_pair_losses(target_free(), agent.network, pair_loss, joint=joint)
    tb_losses = make_pair_losses(target_based(), agent.network, pair_loss, joint=joint)
    online_head, target_head = scheme.online[0], scheme.target[0]

    def first_head(params: Params) -> Params:
        """Select the online head of the first pair."""
        return {**params, "heads": jax.tree.map(lambda w: w[online_head : online_head + 1], params["heads"])}

    def bootstrap_target(state: AgentState, batch: Transition) -> Array:
        """Return the regression target of the first pair without the reward."""
        params = state.copies[scheme.copy[0]] if scheme.copy else state.params
        q, _ = agent.network.apply(params, state.statistics, batch.next_obs, joint)
        return batch.discount * q[:, target_head].max(axis=-1)

    def init(seed: Array | int) -> AgentState:
        state = agent.init(seed)
        return state._replace(probe=jax.tree.map(jnp.copy, state.params))

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        train = jax.tree.map(lambda x: x[: config.batch_size], batch)
        held_out = jax.tree.map(lambda x: x[config.batch_size :], batch)._replace(ended=(), explored=())

        def gradient(losses: Any, params: Params, copies: tuple[Params, ...]) -> Params:
            return jax.grad(lambda p: losses(p, state.statistics, copies, compared)[0].sum())(params)

        # On a single transition all targets give parallel gradients, so a streaming agent needs held-out ones.
        compared = held_out if agent.is_streaming else train
        if config.normalise_rewards:
            compared = compared._replace(reward=compared.reward / normalisation.reward_scale(state.moments))
        own_gradient = first_head(gradient(agent.losses, state.params, state.copies))
        one_head = first_head(state.params)
        tf_gradient = gradient(tf_losses, one_head, ())
        tb_gradient = gradient(tb_losses, one_head, (first_head(state.probe),))
        new_state, metrics = agent.update(state, train)
        churn = {
            f"target_churn_{name}": jnp.abs(bootstrap_target(state, part) - bootstrap_target(new_state, part)).mean()
            for name, part in (("train", train), ("held_out", held_out))
        }
        cosines = {
            "gradient_cosine_own_tb": gradient_cosine(own_gradient, tb_gradient),
            "gradient_cosine_tf_tb": gradient_cosine(tf_gradient, tb_gradient),
        }
        return new_state, metrics | churn | cosines

    def refresh(state: AgentState) -> AgentState:
        return agent.refresh(state._replace(probe=state.params))

    return agent._replace(init=init, update=update, refresh=refresh, refreshes=True)


def gradient_cosine(a: Params, b: Params) -> Array:
    """Return the cosine between two gradients, without the parameters of normalisation layers (as the authors)."""

    def flatten(tree: Params) -> Array:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return jnp.concatenate(
            [leaf.ravel() for path, leaf in leaves if "norm" not in jax.tree_util.keystr(path).lower()]
        )

    left, right = flatten(a), flatten(b)
    return left @ right / (jnp.linalg.norm(left) * jnp.linalg.norm(right) + 1e-9)
