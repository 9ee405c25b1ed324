"""What a scheme costs before any training: parameters, work per update, bytes of network, optimizer and replay."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from isqn.agents import q_learning
from isqn.compiler import jit
from isqn.experiments.config import Config
from isqn.types import EnvSpec, num_bytes

COMPARED = (
    *(("target-based", 1), ("target-free", 1)),
    *(("iterated-shared", k) for k in (1, 3, 9, 49)),
    *(("ensemble-shared", 5), ("iterated-target-based", 4)),
)


class Cost(NamedTuple):
    label: str
    parameters: int  # of the network that learns
    copied_parameters: int  # of the older copies that the scheme keeps
    flops_per_update: float  # from the compiler's analysis of the compiled update
    network_bytes: int  # parameters and copies
    optimizer_bytes: int
    replay_bytes: int


def cost(config: Config, spec: EnvSpec, replay_bytes: int) -> Cost:
    agent = q_learning.make(config, spec)
    state = jax.eval_shape(agent.init, 0)
    compiled = jit(agent.update, donate_argnums=0).lower(state, spec.batch(config.batch_size)).compile()
    parameters, copied = _count(state.params), _count(state.copies)
    return Cost(
        label=config.label,
        parameters=parameters,
        copied_parameters=copied,
        flops_per_update=float((compiled.cost_analysis() or {}).get("flops", math.nan)),
        network_bytes=num_bytes((state.params, state.copies, state.statistics)),
        optimizer_bytes=num_bytes(state.optimizer),
        replay_bytes=replay_bytes,
    )


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
