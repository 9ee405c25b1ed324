"""Loss of implicit language Q-learning, for one token and one pair of heads."""

from __future__ import annotations

from isqn.language.types import TokenValues
from isqn.lazy import jax, jnp
from isqn.types import Array, Transition


def ilql(
    online: TokenValues,
    target: TokenValues,
    transition: Transition,
    *,
    expectile_level: float,
    conservative_weight: float,
) -> Array:
    """Implicit language Q-learning (Snell et al. 2023, section 4.1) for one token.

    V regresses to an upper expectile of Q. Q regresses to the reward plus the discounted next V. A CQL term pushes down
    the Q-values of all other tokens. The caller picks the heads of `target`; no gradient flows to them.
    """
    written = online.q[:, transition.action]
    value = expectile(online.v, target.q[:, transition.action].min(), expectile_level)
    bellman = jnp.square(transition.reward + transition.discount * target.next_v - written).sum()
    conservative = (jax.nn.logsumexp(online.q, axis=-1) - written).sum()
    return value + bellman + conservative_weight * conservative


def expectile(value: Array, target: Array, level: float) -> Array:
    """Expectile loss (Kostrikov et al. 2022, eq. 5): targets above `value` weigh `level`, those below 1 - `level`."""
    error = target - value
    return jnp.where(error >= 0, level, 1 - level) * error**2
