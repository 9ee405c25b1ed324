"""Target schemes: which head of which network learns from which.

This file and `losses.py` are the paper. A network is a torso and a few linear heads. A scheme lists pairs
of heads, (online, target): the online head of each pair learns the Bellman update of the target head.
Everything that tells target-based, target-free and iterated shared Q-learning apart is in these lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from isqn.lazy import jax
from isqn.types import Params, UserError


@dataclass(frozen=True)
class TargetScheme:
    """Pairs of heads. Data only: no parameters, no network."""

    name: str
    prefix: str  # the paper's short name: TB, TF, iS, ES, i
    num_heads: int
    online: tuple[int, ...]  # the heads that learn, one for each pair
    target: tuple[int, ...]  # the heads they learn from
    copy: tuple[int, ...] = ()  # for each pair, which older copy of the network holds its target; () for none
    twins: bool = False  # whether target heads begin as copies of their online heads
    size: str = ""  # "K=9", for labels

    def __post_init__(self) -> None:
        if not self.online:
            raise UserError(f"The scheme {self.name} ({self.size}) has no pair of heads; it needs at least one.")

    @property
    def num_pairs(self) -> int:
        return len(self.online)

    @property
    def num_copies(self) -> int:
        return max(self.copy, default=-1) + 1

    @property
    def moves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The heads that a refresh overwrites inside the network, and the heads it copies there."""
        pairs = [pair for pair in zip(self.target, self.online, strict=True) if pair[0] != pair[1]]
        return tuple(to for to, _ in pairs), tuple(source for _, source in pairs)

    @property
    def refreshes(self) -> bool:
        """Whether a refresh changes anything: not if every head learns from itself."""
        return self.num_copies > 0 or self.online != self.target

    def label(self, algorithm: str) -> str:
        """The paper's name: `iterated_shared(9).label("DQN")` is "iS-DQN K=9"."""
        return f"{self.prefix}-{algorithm} {self.size}".strip()


def target_based() -> TargetScheme:
    """Mnih et al. 2015: the target is an older copy of the whole network."""
    return TargetScheme("target-based", "TB", num_heads=1, online=(0,), target=(0,), copy=(0,))


def target_free() -> TargetScheme:
    """The network learns from itself."""
    return TargetScheme("target-free", "TF", num_heads=1, online=(0,), target=(0,))


def iterated_shared(k: int) -> TargetScheme:
    """The paper's iS-QN: head i learns from head i - 1 on shared features; head 0 is frozen between shifts."""
    return TargetScheme(
        "iterated-shared",
        "iS",
        num_heads=k + 1,
        online=tuple(range(1, k + 1)),
        target=tuple(range(k)),
        size=f"K={k}",
    )


def ensemble_shared(n: int) -> TargetScheme:
    """The paper's ablation ES: n independent pairs, each head 2i + 1 learning from its older twin 2i."""
    return TargetScheme(
        "ensemble-shared",
        "ES",
        num_heads=2 * n,
        online=tuple(range(1, 2 * n, 2)),
        target=tuple(range(0, 2 * n, 2)),
        twins=True,
        size=f"N={n}",
    )


def iterated_target_based(k: int) -> TargetScheme:
    """i-QN (Vincent et al. 2025) on one torso: head i learns from head i - 1 of an older copy.

    Copy 0 holds the start of the chain and moves at a refresh; copy 1 holds the rest of it and is
    also brought up to date every D steps. With K = 1 this is target-based learning.
    """
    return TargetScheme(
        "iterated-target-based",
        "i",
        num_heads=k,
        online=tuple(range(k)),
        target=(0, *range(k - 1)),
        copy=(0, *(1,) * (k - 1)),
        size=f"K={k}",
    )


SCHEMES: dict[str, Callable[[int], TargetScheme]] = {
    "target-based": lambda k: target_based(),
    "target-free": lambda k: target_free(),
    "iterated-shared": iterated_shared,
    "ensemble-shared": ensemble_shared,
    "iterated-target-based": iterated_target_based,
}


def register_scheme(name: str, make: Callable[[int], TargetScheme]) -> None:
    """Make a scheme known as `--scheme NAME`; `make` takes the value of `--k`."""
    SCHEMES[name] = make


def make_scheme(name: str, k: int) -> TargetScheme:
    if name not in SCHEMES:
        raise UserError(f"--scheme {name!r} is not known; choose one of {', '.join(SCHEMES)}.")
    return SCHEMES[name](k)


def k_of(scheme: TargetScheme) -> int:
    """The k from which SCHEMES makes this very scheme: a configuration holds its name and this number."""
    for k in range(1, scheme.num_heads + 1):
        if make_scheme(scheme.name, k) == scheme:
            return k
    raise UserError(f"The scheme is not what isqn.schemes.SCHEMES makes by the name {scheme.name!r}; add its function.")


def refresh(
    scheme: TargetScheme, params: Params, copies: tuple[Params, ...], step_size: float = 1.0
) -> tuple[Params, tuple[Params, ...]]:
    """Every T steps: each target moves towards what it stands for.

    Inside the network all heads move at once, so that those of iS-QN shift by one. The first copy takes
    the network before its heads move, the others after: the chain of i-QN then starts from its old
    first link and goes on with the shifted ones.
    """
    first = tuple(towards(copy, params, step_size) for copy in copies[:1])
    to, source = (np.array(heads, int) for heads in scheme.moves)
    heads = jax.tree.map(lambda w: w.at[to].set(towards(w[to], w[source], step_size)), params["heads"])
    params = {**params, "heads": heads}
    return params, first + tuple(towards(copy, params, step_size) for copy in copies[1:])


def towards(old: Any, new: Any, step_size: float) -> Any:
    """A step from one tree of numbers to another; all the way, exactly, at step size 1."""
    if step_size == 1:
        return new
    return jax.tree.map(lambda a, b: step_size * b + (1 - step_size) * a, old, new)


def sync(params: Params, copies: tuple[Params, ...]) -> tuple[Params, ...]:
    """Every D steps: the later links of an i-QN chain take the current network; its start stays."""
    return copies[:1] + tuple(params for _ in copies[1:])
