"""A new loss with a setting of its own: expectile regression. Positive errors weigh more than negative ones.

isqn train dqn --import examples/new_loss.py --loss expectile --optimism 0.7 --env-id isqn/Grid-v0 --k 3
"""

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

import isqn
from isqn.config.fields import PROBABILITY, needs
from isqn.config.parts import PairLoss
from isqn.types import Array, Transition, Values


@dataclass(frozen=True)
class Expectile(PairLoss):
    """Settings of expectile regression."""

    optimism: Annotated[float, PROBABILITY, needs("loss", "expectile")] = 0.6
    """Weight of positive errors, in [0, 1]; 0.5 is half the squared error of DQN."""


def expectile(online: Values, target: Values, transition: Transition, *, optimism: float) -> Array:
    """Newey & Powell 1987: a squared error whose weight depends on its sign."""
    error = transition.reward + transition.discount * jnp.max(target.next) - online.now[transition.action]
    return jnp.where(error > 0, optimism, 1 - optimism) * error**2


isqn.register_loss("expectile", expectile, "Expectile", settings=Expectile)  # labels: "iS-Expectile K=3"
