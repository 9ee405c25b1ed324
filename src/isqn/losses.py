"""Temporal-difference losses, each as its base paper writes it: one sample, one pair of heads.

A loss is `(online, target, transition) -> scalar`. `online` and `target` are the `Values` of the two heads
of a pair, vectors over actions at s (`.now`) and at s' (`.next`). Only `online.now` carries a gradient: the
caller stops every other one, so a target cannot be differentiated by mistake. The caller also maps
over samples and pairs, so a loss knows no batch, no network and no number of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import NamedTuple

from isqn.lazy import jax, jnp
from isqn.types import Array, TokenValues, Transition, UserError, Values

PairLoss = Callable[[Values, Values, Transition], Array]


def dqn(online: Values, target: Values, transition: Transition) -> Array:
    """Mnih et al. 2015, as in the paper: the plain square of the temporal-difference error."""
    return jnp.square(_error(online, transition, jnp.max(target.next)))


def huber(online: Values, target: Values, transition: Transition) -> Array:
    """Mnih et al. 2015 as published: quadratic below an error of 1, linear above."""
    error = jnp.abs(_error(online, transition, jnp.max(target.next)))
    return jnp.where(error < 1, 0.5 * error**2, error - 0.5)


def double_dqn(online: Values, target: Values, transition: Transition) -> Array:
    """van Hasselt et al. 2016: the online head chooses the next action, the target head values it."""
    return jnp.square(_error(online, transition, target.next[jnp.argmax(online.next)]))


def mellowmax_dqn(online: Values, target: Values, transition: Transition, *, mellowmax_temperature: float) -> Array:
    """Kim et al. 2019: the soft maximum of `mellowmax` in place of the maximum."""
    return jnp.square(_error(online, transition, mellowmax(target.next, mellowmax_temperature)))


def munchausen_dqn(
    online: Values,
    target: Values,
    transition: Transition,
    *,
    munchausen_temperature: float,
    munchausen_weight: float,
    munchausen_clip: float,
) -> Array:
    """Vieillard et al. 2020, eq. 3: a soft target, and the target's clipped log-policy added to the reward."""
    next_log_policy = jax.nn.log_softmax(target.next / munchausen_temperature)
    soft_value = jnp.sum(jnp.exp(next_log_policy) * (target.next - munchausen_temperature * next_log_policy))
    log_policy = jax.nn.log_softmax(target.now / munchausen_temperature)[transition.action]
    bonus = munchausen_weight * jnp.clip(munchausen_temperature * log_policy, munchausen_clip, 0.0)
    return jnp.square(_error(online, transition, soft_value) + bonus)


def cql(online: Values, target: Values, transition: Transition, *, conservative_weight: float) -> Array:
    """Kumar et al. 2020, eq. 4, for discrete actions."""
    spread = jax.nn.logsumexp(online.now) - online.now[transition.action]
    return dqn(online, target, transition) + conservative_weight * spread


def cloning(online: Values, target: Values, transition: Transition) -> Array:
    """Pomerleau 1991: values are logits, and the action that was taken is to be the likely one. There is no target."""
    return -jax.nn.log_softmax(online.now)[transition.action]


def expected(online: Values, target: Values, transition: Transition) -> Array:
    """Haarnoja et al. 2018, eq. 5: of one action, by the square. The bonus for entropy is in the reward."""
    return jnp.square(transition.reward + transition.discount * target.next[0] - online.now[0])


def categorical(online: Values, target: Values, transition: Transition, *, value_bound: float) -> Array:
    """Bellemare et al. 2017, algorithm 1, of one action: logits over values spread evenly up to +- the bound.

    What a value of the target becomes, its probability goes to the two atoms around it.
    """
    atoms = value_atoms(len(online.now), value_bound)
    moved = jnp.clip(transition.reward + transition.discount * atoms, -value_bound, value_bound)
    places = (moved + value_bound) * ((len(atoms) - 1) / (2 * value_bound))
    shares = jnp.maximum(0, 1 - jnp.abs(places[:, None] - jnp.arange(len(atoms))))  # of each place, to each atom
    aim = jnp.matmul(jax.nn.softmax(target.next), shares, precision="highest")  # float32 on accelerators too
    return -jnp.sum(aim * jax.nn.log_softmax(online.now))


def value_atoms(count: int, bound: float) -> Array:
    return jnp.linspace(-bound, bound, count)


def mellowmax(q: Array, temperature: float) -> Array:
    """log(mean(exp(temperature q))) / temperature: between the mean (0) and the maximum (infinity)."""
    return (jax.nn.logsumexp(temperature * q) - jnp.log(q.shape[-1])) / temperature


def _error(online: Values, transition: Transition, next_value: Array) -> Array:
    return transition.reward + transition.discount * next_value - online.now[transition.action]


class Loss(NamedTuple):
    """A loss as it is registered."""

    label: str  # its name in labels: "iS-Mellow K=9"
    function: Callable[..., Array]
    bootstraps: bool = True  # whether it has targets
    settings: type | None = None  # part of a config with settings of its own


LOSSES: dict[str, Loss] = {}


def register_loss(
    name: str, function: Callable[..., Array], label: str, *, bootstraps: bool = True, settings: type | None = None
) -> None:
    """Make a loss known as `--loss NAME`.

    Its keyword-only arguments without a default are filled from the settings of the same name. `settings` is a part of
    a config (a frozen dataclass that extends `isqn.config.parts.PairLoss`) with those that the package does not have.
    """
    LOSSES[name] = Loss(label, function, bootstraps, settings)


register_loss("dqn", dqn, "DQN")
register_loss("huber", huber, "DQN-Huber")
register_loss("double", double_dqn, "DDQN")
register_loss("mellowmax", mellowmax_dqn, "Mellow")
register_loss("munchausen", munchausen_dqn, "M-DQN")
register_loss("cql", cql, "CQL")
register_loss("cloning", cloning, "BC", bootstraps=False)


def make_loss(name: str, settings: object) -> PairLoss:
    """Return the loss of that name, with its settings filled in."""
    if name not in LOSSES:
        raise UserError(f"--loss {name!r} is not known; choose one of {', '.join(LOSSES)}.")
    return with_settings(LOSSES[name].function, settings)


def with_settings(loss: Callable[..., Array], settings: object) -> Callable[..., Array]:
    """Its keyword arguments without a default are the fields of `settings` of the same name."""
    keywords = [p for p in signature(loss).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    wanted = [p.name for p in keywords if p.default is Parameter.empty]
    return partial(loss, **{field: getattr(settings, field) for field in wanted})


# -- values of tokens


def ilql(
    online: TokenValues, aim: TokenValues, transition: Transition, *, expectile_level: float, conservative_weight: float
) -> Array:
    """Implicit language Q-learning (Snell et al. 2023, section 4.1), of one token: V follows an upper expectile of Q, Q
    the reward and the V that comes next, and other tokens than the one that was written are held down.

    Which heads of a pair the two aims are of, the caller decides; no gradient flows to them.
    """
    written = online.q[:, transition.action]
    value = expectile(online.v, aim.q[:, transition.action].min(), expectile_level)
    bellman = jnp.square(transition.reward + transition.discount * aim.next_v - written).sum()
    spread = (jax.nn.logsumexp(online.q, axis=-1) - written).sum()
    return value + bellman + conservative_weight * spread


def expectile(value: Array, target: Array, level: float) -> Array:
    """Kostrikov et al. 2022, eq. 5: what is above the value weighs `level`, what is below it the rest."""
    error = target - value
    return jnp.where(error >= 0, level, 1 - level) * error**2
