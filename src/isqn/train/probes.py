"""The paper's analysis of what a network learns: feature rank, dormant units, target churn, gradient directions."""

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
    """What a row of metrics says about the network."""
    heads = ("head_cosine",) if config.target_scheme.num_heads > 1 else ()
    norm = ("batch_norm_deviation",) if config.uses_batch_norm else ()
    return ("effective_rank", "dormant_share", *heads, *norm) if config.analysis else ()


def effective_rank(features: np.ndarray, delta: float = 0.01) -> int:
    """srank (Kumar et al. 2021): how many singular values make up 1 - delta of their sum."""
    values = np.linalg.svd(np.asarray(features, np.float64), compute_uv=False)
    return int(np.searchsorted(np.cumsum(values), (1 - delta) * values.sum()) + 1)


def dormant_share(units: list[Array]) -> float:
    """The share of units that are above zero on no sample; each position of a feature map is a unit.

    As in the authors' code: Sokar et al. 2023 with a threshold of 0. A ReLU that leaks is never at zero for long.
    """
    dormant = [np.asarray(jnp.max(layer, axis=0) <= 0) for layer in units]
    return float(sum(d.sum() for d in dormant) / max(1, sum(d.size for d in dormant)))


def probe_features(agent: Agent, state: AgentState, batch: Transition) -> dict[str, float]:
    """Rank and dormant units of a network on the states of a batch; with several heads, how alike they are."""
    units, features = jit(agent.activations)(state._replace(optimizer=(), probe=()), batch)
    found = {"effective_rank": effective_rank(np.asarray(features)), "dormant_share": dormant_share(units)}
    cosine = head_cosine(state.params["heads"])
    found |= {} if cosine is None else {"head_cosine": cosine}
    return found | ({"batch_norm_deviation": batch_norm_deviation(units)} if state.statistics else {})


def head_cosine(heads: Params) -> float | None:
    """Between the weights of neighbouring heads, the mean over them: moving averages pull heads together. None if there
    is only one."""
    leaves = jax.tree_util.tree_leaves_with_path(heads)
    kernels = [np.asarray(leaf, np.float64) for path, leaf in leaves if path[-1].key == "kernel"]
    if len(kernels[0]) == 1:
        return None
    rows = np.concatenate([kernel.reshape(len(kernel), -1) for kernel in kernels], axis=1)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return float((rows[1:] * rows[:-1]).sum(axis=1).mean())


def batch_norm_deviation(units: list[Array]) -> float:
    """Of what comes into BatchNorm, the output of every ReLU: the root of the mean variance over the samples. Where it
    is not far above the root of the epsilon, BatchNorm centres more than it scales."""
    return float(np.sqrt(np.mean([np.asarray(layer, np.float64).var(axis=0).mean() for layer in units])))


def add_probes(agent: Agent, config: Any) -> Agent:
    """The same agent, which also reports churn and gradient directions at every update.

    Its batches are longer: what comes behind is held out, only looked at. Its state keeps the
    network as it was at the last refresh, before heads moved: there the head that learns first is the one
    that is now its target, so that a target-based gradient can be computed beside the agent's own.
    """
    scheme, pair_loss = config.target_scheme, make_loss(config.loss, config)
    joint = config.uses_batch_norm
    without_target_losses = make_pair_losses(target_free(), agent.network, pair_loss, joint=joint)
    with_target_losses = make_pair_losses(target_based(), agent.network, pair_loss, joint=joint)
    learns, aims = scheme.online[0], scheme.target[0]

    def first_head(params: Params) -> Params:
        return {**params, "heads": jax.tree.map(lambda w: w[learns : learns + 1], params["heads"])}

    def target_of(state: AgentState, batch: Transition) -> Array:
        """What the first pair learns towards, but for the reward."""
        params = state.copies[scheme.copy[0]] if scheme.copy else state.params
        q, _ = agent.network.apply(params, state.statistics, batch.next_obs, joint)
        return batch.discount * q[:, aims].max(axis=-1)

    def init(seed: Array | int) -> AgentState:
        state = agent.init(seed)
        return state._replace(probe=jax.tree.map(jnp.copy, state.params))

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        train = jax.tree.map(lambda x: x[: config.batch_size], batch)
        held_out = jax.tree.map(lambda x: x[config.batch_size :], batch)._replace(ended=(), explored=())

        def direction(losses: Any, params: Params, copies: tuple[Params, ...]) -> Params:
            return jax.grad(lambda p: losses(p, state.statistics, copies, compared)[0].sum())(params)

        # one step has one direction, whatever its target: of a stream, several are compared
        compared = held_out if agent.is_streaming else train
        if config.normalise_rewards:
            compared = compared._replace(reward=compared.reward / normalisation.reward_scale(state.moments))
        own = first_head(direction(agent.losses, state.params, state.copies))
        small = first_head(state.params)
        without = direction(without_target_losses, small, ())
        with_target = direction(with_target_losses, small, (first_head(state.probe),))
        new, metrics = agent.update(state, train)
        churn = {
            f"target_churn_{name}": jnp.abs(target_of(state, part) - target_of(new, part)).mean()
            for name, part in (("train", train), ("held_out", held_out))
        }
        cosines = {
            "gradient_cosine_own_tb": gradient_cosine(own, with_target),
            "gradient_cosine_tf_tb": gradient_cosine(without, with_target),
        }
        return new, metrics | churn | cosines

    def refresh(state: AgentState) -> AgentState:
        return agent.refresh(state._replace(probe=state.params))

    return agent._replace(init=init, update=update, refresh=refresh, refreshes=True)


def gradient_cosine(a: Params, b: Params) -> Array:
    """Of two gradients as vectors, without the parameters of normalisation layers, as in the authors' code."""

    def vector(tree: Params) -> Array:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        kept = [leaf.ravel() for path, leaf in leaves if "norm" not in jax.tree_util.keystr(path).lower()]
        return jnp.concatenate(kept)

    left, right = vector(a), vector(b)
    return left @ right / (jnp.linalg.norm(left) * jnp.linalg.norm(right) + 1e-9)
