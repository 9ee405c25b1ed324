"""What observations and rewards are normalised by: running moments of each number of a frame, and of the return."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from isqn import moments
from isqn.moments import Moments
from isqn.types import Array, EnvSpec

if TYPE_CHECKING:
    from isqn.experiments.config import Config


class Normalisation(NamedTuple):
    observations: Moments | tuple[()]  # () if they are learned from as they are
    returns: Returns | tuple[()]


class Returns(NamedTuple):
    moments: Moments
    latest: Array  # words of float64: the discounted rewards so far; an episode's last reward begins it again
    largest: Array  # its largest size


def begin(config: Config, spec: EnvSpec) -> Normalisation:
    """Without a leaf where nothing is normalised."""
    observations = moments.empty(spec.frame_shape) if config.normalise_observations else ()
    returns = Returns(moments.empty(), moments.zeros(), jnp.float32(0)) if config.normalise_rewards else ()
    return Normalisation(observations, returns)


def count(
    seen: Normalisation, frame: Array, reward: Array | None, ended: Array | None, discount: float
) -> Normalisation:
    """One more frame and, but for the first of an episode, the reward of the step that led to it."""
    if seen.observations:
        seen = seen._replace(observations=moments.count(seen.observations, frame))
    if seen.returns and reward is not None and ended is not None:
        counted, latest, size = moments.follow(seen.returns.moments, seen.returns.latest, discount, ended, reward)
        seen = seen._replace(returns=Returns(counted, latest, jnp.maximum(seen.returns.largest, size)))
    return seen


def observation(seen: Normalisation, frame: Array) -> Array:
    return moments.centred(seen.observations, frame) if seen.observations else frame


def scale(seen: Normalisation, value_bound: float | None = None) -> Array:
    """What rewards are divided by: so much at least that no return so far is beyond the bound."""
    if not seen.returns:
        return jnp.float32(1)
    deviation = moments.deviation(seen.returns.moments)
    return deviation if value_bound is None else jnp.maximum(deviation, seen.returns.largest / value_bound)
