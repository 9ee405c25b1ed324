"""Normalisation of observations and rewards by running moments of each entry of a frame and of the return."""

from __future__ import annotations

from typing import NamedTuple

from isqn import moments
from isqn.config.run import Run
from isqn.lazy import jnp
from isqn.moments import Moments
from isqn.types import Array, EnvSpec


class Normalisation(NamedTuple):
    """Running statistics; () for observations or rewards that are not normalised."""

    observations: Moments | tuple[()]
    returns: Returns | tuple[()]


class Returns(NamedTuple):
    """Running statistics of the discounted return."""

    moments: Moments
    latest: Array  # discounted sum of the rewards of the episode so far, as words of float64
    largest: Array  # largest absolute return


def init(config: Run, spec: EnvSpec) -> Normalisation:
    """Return empty statistics; a tree without leaves if nothing is normalised."""
    observations = moments.empty(spec.frame_shape) if config.normalise_observations else ()
    returns = Returns(moments.empty(), moments.zeros(), jnp.float32(0)) if config.normalise_rewards else ()
    return Normalisation(observations, returns)


def update(
    statistics: Normalisation, frame: Array, reward: Array | None, ended: Array | None, discount: float
) -> Normalisation:
    """Add a frame and, except after a reset, the reward of the step that led to it."""
    if statistics.observations:
        statistics = statistics._replace(observations=moments.add_sample(statistics.observations, frame))
    if statistics.returns and reward is not None and ended is not None:
        old = statistics.returns
        new_moments, latest, size = moments.add_discounted_return(old.moments, old.latest, discount, ended, reward)
        statistics = statistics._replace(returns=Returns(new_moments, latest, jnp.maximum(old.largest, size)))
    return statistics


def normalise_observation(statistics: Normalisation, frame: Array) -> Array:
    return moments.standardise(statistics.observations, frame) if statistics.observations else frame


def reward_scale(statistics: Normalisation, value_bound: float | None = None) -> Array:
    """Return the reward scale: the standard deviation of returns, or more if a return would exceed `value_bound`."""
    if not statistics.returns:
        return jnp.float32(1)
    deviation = moments.deviation(statistics.returns.moments)
    return deviation if value_bound is None else jnp.maximum(deviation, statistics.returns.largest / value_bound)
