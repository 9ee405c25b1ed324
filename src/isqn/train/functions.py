"""Compiled functions of an agent, and their inputs and sums of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import Agent, identity_observe
from isqn.agents.registry import make_agent
from isqn.compiler import jit
from isqn.config.run import Run
from isqn.data.replay import Replay
from isqn.keys import host_generator
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

    def select_parts(state: Any, *parts: str) -> Any:
        """Drop the arrays that a program does not read, because passing many arrays takes time at every step."""
        return state._replace(**dict.fromkeys(set(state._fields) - {"seed", *parts}, ()))

    def compile_observe(function: Callable[..., Any]) -> Callable[..., Any]:
        if function is identity_observe:
            return function

        @program
        def traced(state: Any, frame: Any, *step: Any) -> tuple[Any, Any]:
            state, obs = function(state, frame, *step)
            return state.moments, () if obs is frame else obs  # an unchanged frame is not sent back

        def observe(state: Any, frame: np.ndarray, *step: Any) -> tuple[Any, np.ndarray]:
            moments, obs = traced(select_parts(state, "moments"), frame, *step)
            return state._replace(moments=moments), frame if isinstance(obs, tuple) else np.asarray(obs)

        return observe

    act = program(agent.act)
    return Functions(
        init=program(agent.init),
        observe=compile_observe(agent.observe),
        observe_eval=compile_observe(agent.observe_eval),
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


def draw_batch(config: Any, agent: Agent, replay: Replay, updates: int, *, explored: Any) -> Transition:
    """Return the batch of an update: a sample of the replay buffer, or the newest step of a streaming agent."""
    if agent.is_streaming:
        batch = replay.latest(explored=bool(explored))
    else:
        batch = replay.sample(config.update_batch_size, host_generator(config.seed, "replay", updates))
    if not config.held_out_size:
        return batch
    return append_held_out(batch, replay.sample(config.held_out_size, host_generator(config.seed, "held-out", updates)))


def append_held_out(batch: Transition, held_out: Transition) -> Transition:
    """Append the held-out transitions, which only the probes evaluate, to a training batch."""
    fields = ("obs", "action", "reward", "discount", "next_obs")
    return batch._replace(**{f: jnp.concatenate([getattr(batch, f), getattr(held_out, f)]) for f in fields})
