"""Cost of an agent before training: parameters, FLOPs per update, and memory of the network and the optimizer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from isqn.agents.registry import make_agent
from isqn.config.run import Run
from isqn.types import EnvSpec, num_bytes

COMPARED_SCHEMES = (
    *(("target-based", 1), ("target-free", 1)),
    *(("iterated-shared", k) for k in (1, 3, 9, 49)),
    *(("ensemble-shared", 5), ("iterated-target-based", 4)),
)


class Size(NamedTuple):
    """Number of parameters and bytes of an agent's state."""

    parameters: int  # trainable parameters, those of the policy included
    policy_parameters: int  # trainable parameters of the policy and of the entropy temperature
    copied_parameters: int  # parameters of the target copies
    network_bytes: int  # parameters, target copies and BatchNorm statistics
    optimizer_bytes: int  # optimizer state; eligibility traces of a streaming agent
    moments_bytes: int  # running moments that normalise observations and rewards

    @property
    def total_parameters(self) -> int:
        """Trainable parameters and target copies."""
        return self.parameters + self.copied_parameters

    @property
    def critic_parameters(self) -> int:
        """Trainable parameters and target copies of the critic."""
        return self.total_parameters - self.policy_parameters


def measure_size(config: Run, spec: EnvSpec) -> Size:
    """Return the size of an agent, from its shapes alone: nothing is compiled or allocated."""
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
