"""What a scheme costs before any training: parameters, work per update, bytes of network, optimizer and replay."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from isqn.agents.registry import make_agent
from isqn.config.parts import Run
from isqn.types import EnvSpec, num_bytes

COMPARED = (
    *(("target-based", 1), ("target-free", 1)),
    *(("iterated-shared", k) for k in (1, 3, 9, 49)),
    *(("ensemble-shared", 5), ("iterated-target-based", 4)),
)


class Size(NamedTuple):
    parameters: int  # of the networks that learn
    policy_parameters: int  # of these, a policy's and its temperature
    copied_parameters: int  # of the older copies that the scheme keeps
    network_bytes: int  # parameters, copies and the averages of BatchNorm
    optimizer_bytes: int  # of a stream: its traces
    moments_bytes: int  # what observations and rewards are normalised by

    @property
    def kept_parameters(self) -> int:
        return self.parameters + self.copied_parameters

    @property
    def kept_critic(self) -> int:
        return self.kept_parameters - self.policy_parameters


def size(config: Run, spec: EnvSpec) -> Size:
    """Of one agent, from its shapes: nothing is compiled or allocated."""
    state = jax.eval_shape(make_agent(config, spec).init, 0)
    policy = state.policy._replace(statistics=()) if hasattr(state.policy, "statistics") else state.policy
    return Size(
        parameters=_count((state.params, policy)),
        copied_parameters=_count(state.copies),
        policy_parameters=_count(policy),
        network_bytes=num_bytes((state.params, state.policy, state.copies, state.statistics)),
        optimizer_bytes=num_bytes(state.optimizer),
        moments_bytes=num_bytes(state.moments),
    )


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
