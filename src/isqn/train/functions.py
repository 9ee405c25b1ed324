"""Compiled functions of an agent, and their inputs and sums of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import Agent
from isqn.agents.registry import make_agent
from isqn.compiler import jit
from isqn.config.run import Run
from isqn.train.probes import add_probes
from isqn.types import EnvSpec, Transition, num_bytes


def make_run_agent(config: Run, spec: EnvSpec) -> Agent:
    """Make the agent of a run; with --analysis, it also computes the probes."""
    agent = make_agent(config, spec)
    return add_probes(agent, config) if config.held_out_size else agent


def agent_bytes(config: Run, spec: EnvSpec) -> int:
    """Return the bytes of networks, copies and optimizer of all seeds that are trained at once."""
    return config.num_seeds * num_bytes(jax.eval_shape(make_run_agent(config, spec).init, 0))


class Functions(NamedTuple):
    """The functions of an agent, each compiled once."""

    init: Callable[..., Any]
    observe: Callable[..., Any]
    # The same in evaluations, where only a streaming agent updates its moments.
    observe_eval: Callable[..., Any]
    act: Callable[..., Any]
    update: Callable[..., Any]
    refresh: Callable[..., Any]
    sync: Callable[..., Any]


def compile_agent(agent: Agent) -> Functions:
    program = partial(jit, low_compile_memory=agent.is_streaming)

    def update(state: Any, totals: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = agent.update(state, batch)
        return state, jax.tree.map(jnp.add, totals, metrics)

    @program
    def update_moments(state: Any, *step: Any) -> tuple[Any, Any]:
        state, frame = agent.observe(state, *step)
        return state.moments, frame

    def select_parts(state: Any, *parts: str) -> Any:
        """Drop the arrays that a program does not read, because passing many arrays takes time at every step."""
        return state._replace(**dict.fromkeys(set(state._fields) - {"seed", *parts}, ()))

    def observe(state: Any, frame: np.ndarray, *step: Any) -> tuple[Any, np.ndarray]:
        if not jax.tree.leaves(state.moments):
            return state, frame
        moments, obs = update_moments(select_parts(state, "moments"), frame, *step)
        return state._replace(moments=moments), np.asarray(obs) if agent.is_streaming else frame

    def observe_eval(state: Any, frame: np.ndarray, *step: Any) -> tuple[Any, np.ndarray]:
        return observe(state, frame, *step) if agent.is_streaming else (state, frame)

    act = program(agent.act)
    return Functions(
        init=program(agent.init),
        observe=observe,
        observe_eval=observe_eval,
        act=lambda state, *rest: act(select_parts(state, *agent.acting_parts), *rest),
        update=program(update, donate_argnums=(0, 1)),
        refresh=program(agent.refresh, donate_argnums=0),
        sync=program(agent.sync, donate_argnums=0),
    )


def flops_per_update(config: Any, spec: EnvSpec) -> float:
    """Return the FLOPs of a gradient step, from the compiler's analysis of the compiled update."""
    config = config.replace(updates_per_step=1) if config.updates_per_step != 1 else config
    agent = make_agent(config, spec)
    state = jax.eval_shape(agent.init, 0)
    batch = config.observed_spec(spec).batch_shapes(config.batch_size)
    compiled = jit(agent.update, donate_argnums=0).lower(state, batch).compile()
    return float((compiled.cost_analysis() or {}).get("flops", math.nan))


def zero_totals(agent: Agent, config: Any, spec: EnvSpec) -> Any:
    """Return zeros in the shape of the metrics. The sums stay on the device until a row is written."""
    batch = spec.batch_shapes(config.sampled_batch_size)
    _, metrics = jax.eval_shape(agent.update, jax.eval_shape(agent.init, 0), batch)
    return jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metrics)


def append_held_out(batch: Transition, held_out: Transition) -> Transition:
    """Append the held-out transitions, which only the probes evaluate, to a training batch."""
    fields = ("obs", "action", "reward", "discount", "next_obs")
    return batch._replace(**{f: jnp.concatenate([getattr(batch, f), getattr(held_out, f)]) for f in fields})
