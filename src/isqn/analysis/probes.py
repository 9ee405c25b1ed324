"""The paper's analysis of what a network learns: feature rank, dormant units, target churn, gradient directions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from isqn.types import Array, Params, Transition

if TYPE_CHECKING:
    from isqn.agents.q_learning import Agent, AgentState
    from isqn.experiments.config import Config
    from isqn.networks import Network

FEATURE_PROBES = ("effective_rank", "dormant_share")


def effective_rank(features: np.ndarray, delta: float = 0.01) -> int:
    """srank (Kumar et al. 2021): how many singular values make up 1 - delta of their sum."""
    values = np.linalg.svd(np.asarray(features, np.float64), compute_uv=False)
    shares = np.cumsum(values) / max(values.sum(), np.finfo(float).tiny)
    return int(np.searchsorted(shares, 1 - delta) + 1)


def dormant_share(units: list[Array]) -> float:
    """The share of units that are zero on every sample; each position of a feature map is a unit.

    As in the authors' code: Sokar et al. 2023 with a threshold of 0.
    """
    dormant = [np.asarray(jnp.sum(layer, axis=0) <= 0) for layer in units]
    return float(sum(d.sum() for d in dormant) / sum(d.size for d in dormant))


def probe_features(network: Network, state: AgentState, obs: Any) -> dict[str, float]:
    """Rank and dormant units of a network on a set of states."""
    units = jax.jit(network.units)(state.params, state.statistics, obs)
    return {"effective_rank": effective_rank(np.asarray(units[-1])), "dormant_share": dormant_share(units)}


def observed(agent: Agent, config: Config) -> Agent:
    """The same agent, which also reports churn and gradient directions at every update.

    Its batches are twice as long: the second half is held out, only looked at. Its state keeps the
    network as it was at the last refresh, before the heads moved: the target-based gradient's target.
    """
    raise NotImplementedError


__all__ = ["Array", "Params", "Transition", "partial"]
