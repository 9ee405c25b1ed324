"""Normalisation of observations and rewards by running moments of each number of a frame and of the return."""

from __future__ import annotations

from typing import NamedTuple

from isqn import moments
from isqn.config.parts import Run
from isqn.lazy import jnp
from isqn.moments import Moments
from isqn.types import Array, EnvSpec


class Normalisation(NamedTuple):
    """Running statistics; () for what is not normalised."""

    observations: Moments | tuple[()]
    returns: Returns | tuple[()]


class Returns(NamedTuple):
    """Running statistics of the discounted return."""

    moments: Moments
    latest: (
        Array  # discounted rewards so far, as words of float64; they start again after the last reward of an episode
    )
    largest: Array  # largest absolute return


def init(config: Run, spec: EnvSpec) -> Normalisation:
    """Return empty statistics, without a leaf if nothing is normalised."""
    observations = moments.empty(spec.frame_shape) if config.normalise_observations else ()
    returns = Returns(moments.empty(), moments.zeros(), jnp.float32(0)) if config.normalise_rewards else ()
    return Normalisation(observations, returns)


def count(
    statistics: Normalisation, frame: Array, reward: Array | None, ended: Array | None, discount: float
) -> Normalisation:
    """Count a frame and, except for the first frame of an episode, the reward of the step that led to it."""
    if statistics.observations:
        statistics = statistics._replace(observations=moments.count(statistics.observations, frame))
    if statistics.returns and reward is not None and ended is not None:
        earlier = statistics.returns
        counted, latest, size = moments.follow(earlier.moments, earlier.latest, discount, ended, reward)
        statistics = statistics._replace(returns=Returns(counted, latest, jnp.maximum(earlier.largest, size)))
    return statistics


def normalise_observation(statistics: Normalisation, frame: Array) -> Array:
    return moments.centred(statistics.observations, frame) if statistics.observations else frame


def reward_scale(statistics: Normalisation, value_bound: float | None = None) -> Array:
    """Return the reward scale: the standard deviation of returns, or more if a return would exceed `value_bound`."""
    if not statistics.returns:
        return jnp.float32(1)
    deviation = moments.deviation(statistics.returns.moments)
    return deviation if value_bound is None else jnp.maximum(deviation, statistics.returns.largest / value_bound)
