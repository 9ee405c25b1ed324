"""Target schemes: which head of which network provides the target of which online head.

This file and `losses.py` are the paper. A network is a torso and a few linear heads. A scheme lists pairs of heads,
(online, target): the online head of each pair learns the Bellman update of the target head. Target-based, target-free
and iterated shared Q-learning differ only in these lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isqn.lazy import jax
from isqn.types import Params, UserError, require_new_name
from isqn.usercode import named


@dataclass(frozen=True)
class TargetScheme:
    """Pairs of online and target heads, as plain data: no parameters, no network."""

    name: str
    prefix: str  # short name in the paper: TB, TF, iS, ES or i
    num_heads: int
    online: tuple[int, ...]  # online head of each pair
    target: tuple[int, ...]  # target head of each pair
    copy: tuple[int, ...] = ()  # index of the network copy that holds each target; () if the network holds its own
    copies_initial_heads: bool = False  # whether target heads are initialised as copies of their online heads
    size: str = ""  # label suffix, such as "K=9"

    def __post_init__(self) -> None:
        where = f"The scheme {self.name} ({self.size})" if self.size else f"The scheme {self.name}"
        if not self.online:
            raise UserError(f"{where} has no pair of heads; it needs at least one.")
        lengths = {len(self.online), len(self.target), len(self.copy) or len(self.online)}
        if len(lengths) > 1:
            raise UserError(f"{where}: online, target and copy differ in length; each has one entry for each pair.")
        wrong = [head for head in (*self.online, *self.target) if not 0 <= head < self.num_heads]
        if wrong or min(self.copy, default=0) < 0:
            found = f"head {wrong[0]}" if wrong else f"copy {min(self.copy)}"
            raise UserError(f"{where} names {found}; it has the heads 0 to {self.num_heads - 1}, and copies from 0 on.")

    @property
    def num_pairs(self) -> int:
        return len(self.online)

    @property
    def num_copies(self) -> int:
        """Number of older copies of the network that the scheme needs."""
        return max(self.copy, default=-1) + 1

    @property
    def head_moves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Heads that a target update overwrites inside the network, and the heads copied there."""
        pairs = [pair for pair in zip(self.target, self.online, strict=True) if pair[0] != pair[1]]
        return tuple(to for to, _ in pairs), tuple(source for _, source in pairs)

    @property
    def first_pair(self) -> TargetScheme:
        """The same scheme with its first pair of heads only."""
        return replace(self, online=self.online[:1], target=self.target[:1], copy=self.copy[:1])

    @property
    def refreshes(self) -> bool:
        """Whether a target update changes anything; it does not if every head is its own target."""
        return self.num_copies > 0 or self.online != self.target

    def label(self, algorithm: str) -> str:
        """Return the name used in the paper: `iterated_shared(9).label("DQN")` is "iS-DQN K=9"."""
        return f"{self.prefix}-{algorithm} {self.size}".strip()


def target_based() -> TargetScheme:
    """Target network (Mnih et al. 2015): the target is an older copy of the whole network."""
    return TargetScheme("target-based", "TB", num_heads=1, online=(0,), target=(0,), copy=(0,))


def target_free() -> TargetScheme:
    """No target network: the only head is its own target."""
    return TargetScheme("target-free", "TF", num_heads=1, online=(0,), target=(0,))


def iterated_shared(k: int) -> TargetScheme:
    """iS-QN (the paper): head i learns from head i - 1 on shared features; only a target update changes head 0."""
    _require_count("iterated_shared", k)
    return TargetScheme(
        "iterated-shared",
        "iS",
        num_heads=k + 1,
        online=tuple(range(1, k + 1)),
        target=tuple(range(k)),
        size=f"K={k}",
    )


def ensemble_shared(n: int) -> TargetScheme:
    """ES, an ablation in the paper: n independent pairs; head 2i + 1 learns from head 2i, an older copy of itself."""
    _require_count("ensemble_shared", n)
    return TargetScheme(
        "ensemble-shared",
        "ES",
        num_heads=2 * n,
        online=tuple(range(1, 2 * n, 2)),
        target=tuple(range(0, 2 * n, 2)),
        copies_initial_heads=True,
        size=f"N={n}",
    )


def iterated_target_based(k: int) -> TargetScheme:
    """i-QN (Vincent et al. 2025) on one torso: head i learns from head i - 1 of an older network copy.

    Copy 0 holds the first target of the chain and is updated only at a target update (every T steps). Copy 1 holds the
    other targets and is also updated at a sync (every D steps). K = 1 is target-based learning.
    """
    _require_count("iterated_target_based", k)
    return TargetScheme(
        "iterated-target-based",
        "i",
        num_heads=k,
        online=tuple(range(k)),
        target=(0, *range(k - 1)),
        copy=(0, *(1,) * (k - 1)),
        size=f"K={k}",
    )


def _require_count(function: str, pairs: int) -> None:
    if not isinstance(pairs, int | np.integer) or pairs < 1:
        raise UserError(f"{function}({pairs!r}): the number of pairs must be a whole number of at least 1.")


SCHEMES: dict[str, Callable[[int], TargetScheme]] = {
    "target-based": lambda k: target_based(),
    "target-free": lambda k: target_free(),
    "iterated-shared": iterated_shared,
    "ensemble-shared": ensemble_shared,
    "iterated-target-based": iterated_target_based,
}


def register_scheme(name: str, make: Callable[[int], TargetScheme]) -> None:
    """Make a scheme known as `--scheme NAME`; `make` takes the value of `--k`."""
    if not callable(make):
        raise UserError(f"register_scheme: make is {make!r}; it must be a function k -> TargetScheme.")
    owner = SCHEMES[name].__module__ if name in SCHEMES else None
    require_new_name("register_scheme", "a scheme", name, owner, make.__module__)
    make = named(f"The scheme {name!r}", make)
    made = make(1)
    if not isinstance(made, TargetScheme) or made.name != name:
        raise UserError(f"register_scheme: make(1) returns {made!r:.80}; it must be a TargetScheme named {name!r}.")
    for field, text in (("prefix", made.prefix), ("size", made.size)):
        if not isinstance(text, str):
            raise UserError(f"register_scheme: the scheme {name!r} has the {field} {text!r}; it must be a text.")
    for other in SCHEMES:
        if other != name and SCHEMES[other](1).prefix == made.prefix:
            raise UserError(
                f"register_scheme: the scheme {name!r} has the prefix {made.prefix!r} of {other}; choose another one, "
                "because labels and run folders begin with it."
            )
    SCHEMES[name] = make


def make_scheme(name: str, k: int) -> TargetScheme:
    """Return the scheme called `name` with `k` pairs; schemes with a single pair ignore `k`."""
    if name not in SCHEMES:
        raise UserError(f"--scheme {name!r} is not known; choose one of {', '.join(SCHEMES)}.")
    return SCHEMES[name](k)


def infer_k(scheme: TargetScheme) -> int:
    """Return the k for which `make_scheme(scheme.name, k)` equals `scheme`; a config stores the name and this k."""
    for k in range(1, scheme.num_heads + 1):
        if make_scheme(scheme.name, k) == scheme:
            return k
    raise UserError(f"The scheme is not what isqn.schemes.SCHEMES makes by the name {scheme.name!r}; add its function.")


def refresh(
    scheme: TargetScheme, params: Params, copies: tuple[Params, ...], step_size: float = 1.0
) -> tuple[Params, tuple[Params, ...]]:
    """Move every target towards its online head (or network); called every T steps.

    Target heads inside the network move simultaneously, so the heads of iS-QN shift by one. The first copy is taken
    before this shift and the other copies after it, so the i-QN chain starts from its old first head and continues
    with the shifted heads.
    """
    first = tuple(interpolate(copy, params, step_size) for copy in copies[:1])
    to, source = (np.array(heads, int) for heads in scheme.head_moves)
    heads = jax.tree.map(lambda w: w.at[to].set(interpolate(w[to], w[source], step_size)), params["heads"])
    params = {**params, "heads": heads}
    return params, first + tuple(interpolate(copy, params, step_size) for copy in copies[1:])


def interpolate(old: Any, new: Any, step_size: float) -> Any:
    """Interpolate between two pytrees; a step size of 1 returns `new` exactly."""
    if step_size == 1:
        return new
    return jax.tree.map(lambda a, b: step_size * b + (1 - step_size) * a, old, new)


def sync(params: Params, copies: tuple[Params, ...]) -> tuple[Params, ...]:
    """Replace every copy but the first by the current network; called every D steps (i-QN)."""
    return copies[:1] + tuple(params for _ in copies[1:])
