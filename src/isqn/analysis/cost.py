"""What a scheme costs before any training: parameters, work per update, bytes of network, optimizer and replay."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from isqn import agents
from isqn.compiler import jit
from isqn.experiments.config import Config
from isqn.language.learning import make_learner
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


def size(config: Config, spec: EnvSpec) -> Size:
    """Of one agent, from its shapes: nothing is compiled or allocated."""
    state = jax.eval_shape(agents.make(config, spec).init, 0)
    policy = state.policy._replace(statistics=()) if hasattr(state.policy, "statistics") else state.policy
    return Size(
        parameters=_count((state.params, policy)),
        copied_parameters=_count(state.copies),
        policy_parameters=_count(policy),
        network_bytes=num_bytes((state.params, state.policy, state.copies, state.statistics)),
        optimizer_bytes=num_bytes(state.optimizer),
        moments_bytes=num_bytes(state.moments),
    )


def flops_per_update(config: Config, spec: EnvSpec) -> float:
    """From the compiler's analysis of the compiled update."""
    config = config.replace(updates_per_step=1)
    agent = agents.make(config, spec)
    state = jax.eval_shape(agent.init, 0)
    compiled = jit(agent.update, donate_argnums=0).lower(state, config.seen(spec).batch(config.batch_size)).compile()
    return float((compiled.cost_analysis() or {}).get("flops", math.nan))


def flops_per_game(config: Config, spec: Any) -> float:
    """Of one pass through all networks, from the program as it is before compiling, which would take a minute."""
    state = jax.eval_shape(agents.make(config, spec).init, 0)
    lowered = jax.jit(make_learner(config, spec, unroll=True).loss).lower(state, spec.batch(1))
    return float((lowered.cost_analysis() or {}).get("flops", math.nan))


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
