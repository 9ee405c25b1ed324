"""A new loss: expectile regression. Errors that say "too low" weigh more than those that say "too high".

python examples/new_loss.py train dqn --loss expectile --env-id isqn/Grid-v0 --scheme iterated-shared --k 3
"""

import sys

import jax.numpy as jnp

from isqn.cli import main
from isqn.losses import LOSSES
from isqn.types import Array, Transition, Values

OPTIMISM = 0.7  # 0.5 is half the squared error of DQN


def expectile(online: Values, target: Values, transition: Transition) -> Array:
    """Newey & Powell 1987: a squared error whose weight depends on its sign."""
    aim = transition.reward + transition.discount * jnp.max(target.next)
    error = aim - online.now[transition.action]
    return jnp.where(error > 0, OPTIMISM, 1 - OPTIMISM) * error**2


LOSSES["expectile"] = ("Expectile", expectile)  # the flag, and the name in labels: "iS-Expectile K=3"

if __name__ == "__main__":
    sys.exit(main())
