"""Temporal-difference losses, written as in their papers: for one sample and one pair of heads.

A loss is a function `(online, target, transition) -> scalar`. `online` and `target` are the `Values` of the two heads
of a pair: one value per action at s (`.now`) and at s' (`.next`). Only `online.now` carries a gradient; the caller
stops the gradient of everything else, so a target cannot be differentiated by mistake. The caller also applies `vmap`
over samples and pairs, so a loss sees no batch, no network and no number of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import NamedTuple

from isqn.lazy import jax, jnp
from isqn.types import Array, Transition, UserError, Values

LossFunction = Callable[[Values, Values, Transition], Array]


def dqn(online: Values, target: Values, transition: Transition) -> Array:
    """DQN (Mnih et al. 2015) with the squared temporal-difference error, as in the iS-QN paper."""
    return jnp.square(_error(online, transition, jnp.max(target.next)))


def huber(online: Values, target: Values, transition: Transition) -> Array:
    """DQN with the Huber loss of Mnih et al. 2015: quadratic below an error of 1, linear above."""
    error = jnp.abs(_error(online, transition, jnp.max(target.next)))
    return jnp.where(error < 1, 0.5 * error**2, error - 0.5)


def double_dqn(online: Values, target: Values, transition: Transition) -> Array:
    """Double DQN (van Hasselt et al. 2016): the online head selects the next action, the target head evaluates it."""
    return jnp.square(_error(online, transition, target.next[jnp.argmax(online.next)]))


def mellowmax_dqn(online: Values, target: Values, transition: Transition, *, mellowmax_temperature: float) -> Array:
    """DQN with MellowMax in place of the maximum (Kim et al. 2019)."""
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
    """Munchausen DQN (Vieillard et al. 2020, eq. 3): soft target, and the clipped log-policy as a reward bonus."""
    next_log_policy = jax.nn.log_softmax(target.next / munchausen_temperature)
    soft_value = jnp.sum(jnp.exp(next_log_policy) * (target.next - munchausen_temperature * next_log_policy))
    log_policy = jax.nn.log_softmax(target.now / munchausen_temperature)[transition.action]
    bonus = munchausen_weight * jnp.clip(munchausen_temperature * log_policy, munchausen_clip, 0.0)
    return jnp.square(_error(online, transition, soft_value) + bonus)


def cql(online: Values, target: Values, transition: Transition, *, conservative_weight: float) -> Array:
    """Conservative Q-learning (Kumar et al. 2020, eq. 4) for discrete actions."""
    conservative = jax.nn.logsumexp(online.now) - online.now[transition.action]
    return dqn(online, target, transition) + conservative_weight * conservative


def cloning(online: Values, target: Values, transition: Transition) -> Array:
    """Behaviour cloning (Pomerleau 1991): cross-entropy of the taken action, with values as logits; no target."""
    return -jax.nn.log_softmax(online.now)[transition.action]


def soft_bellman(online: Values, target: Values, transition: Transition) -> Array:
    """SAC critic loss (Haarnoja et al. 2018, eq. 5) at one action; the reward includes the entropy bonus."""
    return jnp.square(transition.reward + transition.discount * target.next[0] - online.now[0])


def categorical(online: Values, target: Values, transition: Transition, *, value_bound: float) -> Array:
    """Categorical critic loss (C51; Bellemare et al. 2017, algorithm 1) at one action.

    Values are logits over atoms evenly spaced in [-value_bound, value_bound]. The Bellman update moves each atom of
    the target; its probability is split between the two nearest atoms.
    """
    atoms = value_atoms(len(online.now), value_bound)
    shifted_atoms = jnp.clip(transition.reward + transition.discount * atoms, -value_bound, value_bound)
    positions = (shifted_atoms + value_bound) * ((len(atoms) - 1) / (2 * value_bound))
    weights = jnp.maximum(0, 1 - jnp.abs(positions[:, None] - jnp.arange(len(atoms))))  # (shifted atom, atom)
    projected = jnp.matmul(jax.nn.softmax(target.next), weights, precision="highest")  # float32 on accelerators too
    return -jnp.sum(projected * jax.nn.log_softmax(online.now))


def value_atoms(count: int, bound: float) -> Array:
    """Return `count` atoms evenly spaced in [-bound, bound]."""
    return jnp.linspace(-bound, bound, count)


def mellowmax(q: Array, temperature: float) -> Array:
    """Soft maximum log(mean(exp(temperature q))) / temperature, between the mean (0) and the maximum (infinity)."""
    return (jax.nn.logsumexp(temperature * q) - jnp.log(q.shape[-1])) / temperature


def _error(online: Values, transition: Transition, next_value: Array) -> Array:
    """Return the temporal-difference error, given the value of the next state."""
    return transition.reward + transition.discount * next_value - online.now[transition.action]


class Loss(NamedTuple):
    """A registered loss: its function, its label, and its settings."""

    label: str  # its name in labels: "iS-Mellow K=9"
    function: Callable[..., Array]
    bootstraps: bool = True  # whether it has targets
    settings: type | None = None  # part of a config with settings of its own


LOSSES: dict[str, Loss] = {  # `isqn.register_loss` adds those of users
    "dqn": Loss("DQN", dqn),
    "huber": Loss("DQN-Huber", huber),
    "double": Loss("DDQN", double_dqn),
    "mellowmax": Loss("Mellow", mellowmax_dqn),
    "munchausen": Loss("M-DQN", munchausen_dqn),
    "cql": Loss("CQL", cql),
    "cloning": Loss("BC", cloning, bootstraps=False),
}


def make_loss(name: str, settings: object) -> LossFunction:
    """Return the loss of that name, with its settings filled in."""
    if name not in LOSSES:
        raise UserError(f"--loss {name!r} is not known; choose one of {', '.join(LOSSES)}.")
    loss = bind_settings(LOSSES[name].function, settings)

    def checked(online: Values, target: Values, transition: Transition) -> Array:
        value = loss(online, target, transition)
        shape = getattr(value, "shape", () if isinstance(value, float | int) else None)
        if shape != ():
            returned = repr(value) if shape is None else f"an array of shape {shape}"
            raise UserError(f"The loss {name!r} returns {returned}; a loss returns one number for one sample.")
        return value

    return checked


def bind_settings(loss: Callable[..., Array], settings: object) -> Callable[..., Array]:
    """Bind the required keyword arguments of `loss` to the fields of `settings` with the same names."""
    return partial(loss, **{field: getattr(settings, field) for field in required_settings(loss)})


def required_settings(loss: Callable[..., Array]) -> list[str]:
    """Return the keyword-only arguments of a loss that have no default."""
    keywords = [p for p in signature(loss).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    return [p.name for p in keywords if p.default is Parameter.empty]
