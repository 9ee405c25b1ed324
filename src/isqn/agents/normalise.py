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
    returns: Moments | tuple[()]
    discounted_return: Array  # of the rewards so far; after an episode it begins again with its last reward
    largest_return: Array  # and its largest size


def begin(config: Config, spec: EnvSpec) -> Normalisation:
    observations = moments.empty(spec.frame_shape) if config.normalise_observations else ()
    returns = moments.empty() if config.normalise_rewards else ()
    return Normalisation(observations, returns, jnp.float32(0), jnp.float32(0))


def count(
    seen: Normalisation, frame: Array, reward: Array | None, ended: Array | None, discount: float
) -> Normalisation:
    """One more frame and, but for the first of an episode, the reward of the step that led to it."""
    if seen.observations:
        seen = seen._replace(observations=moments.count(seen.observations, frame))
    if seen.returns and reward is not None and ended is not None:
        total = discount * (1 - ended) * seen.discounted_return + reward
        largest = jnp.maximum(seen.largest_return, jnp.abs(total))
        returns = moments.count(seen.returns, total)
        seen = seen._replace(returns=returns, discounted_return=total, largest_return=largest)
    return seen


def observation(seen: Normalisation, frame: Array) -> Array:
    return moments.centred(seen.observations, frame) if seen.observations else frame


def scale(seen: Normalisation) -> Array:
    """What rewards are divided by."""
    return moments.deviation(seen.returns) if seen.returns else jnp.float32(1)
