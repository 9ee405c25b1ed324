"""How long each part of a host-loop step takes on this machine, and so how long a run will."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from isqn.agents.base import Agent
from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.keys import host_generator
from isqn.train.functions import Functions, append_held_out, compile_agent, zero_totals
from isqn.train.play import play

ROWS = 2_000  # of a replay that is only timed


class Timing(NamedTuple):
    """Median of the seconds of one call, with the quartiles around it."""

    median: float
    low: float
    high: float


def time_calls(call: Callable[[], object], seconds: float = 1.0, least: int = 5) -> Timing:
    """Call once to warm up, then again for about `seconds`."""
    call()
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < least or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    low, median, high = np.percentile(taken, [25, 50, 75])
    return Timing(float(median), float(low), float(high))


def time_updates(config: Any, agent: Agent, spec: Any, batch: Any, seconds: float) -> float:
    """Measure the median seconds of an update; `batch` holds shapes and types."""
    call = compile_agent(agent)
    state, totals = call.init(config.seed), zero_totals(agent, config, spec)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), batch)

    def update() -> None:
        nonlocal state, totals
        state, totals = call.update(state, totals, zeros)
        jax.block_until_ready(state)

    return time_calls(update, seconds).median


class StepTimes(NamedTuple):
    """Seconds of one environment step, one choice of action, one sampled batch and one update."""

    environment: Timing
    act: Timing
    sample: Timing
    update: Timing

    def seconds_per_step(self, config: Any) -> float:
        """Return the seconds of a step of the loop once it learns."""
        each = self.environment.median + self.act.median
        return each + (self.sample.median + self.update.median) / config.update_period

    def bottleneck(self, config: Any) -> tuple[str, float]:
        """Return the part that takes most of a step, and its share."""
        shares = {
            "environment": self.environment.median,
            "act": self.act.median,
            "sample": self.sample.median / config.update_period,
            "update": self.update.median / config.update_period,
        }
        name = max(shares, key=lambda part: shares[part])
        return name, shares[name] / sum(shares.values())


def measure(
    config: Any,
    agent: Agent,
    env: Environment,
    replay: Replay,
    functions: Functions | None = None,
    seconds: float = 1.0,
) -> StepTimes:
    """Play a little at random, then time each part on its own. `replay` is used up."""
    call = functions or compile_agent(agent)
    rng = host_generator(config.seed, "timing")
    state: Any = call.init(config.seed)
    totals: Any = zero_totals(agent, config, env.spec)

    def observe(*seen: Any) -> np.ndarray:
        nonlocal state
        state, obs = call.observe(state, *seen)
        return obs

    steps = play(config, env, replay, lambda *_: env.spec.random_action(rng), config.seed, observe)
    for _ in range(max(200, config.num_steps_return + 1)):
        next(steps)

    def sample() -> Any:
        batch = replay.latest(explored=False) if agent.is_streaming else replay.sample(config.update_batch_size, rng)
        size = config.held_out_size
        return append_held_out(batch, replay.sample(size, rng)) if size else batch

    batch = sample()

    def update() -> None:
        nonlocal state, totals
        state, totals = call.update(state, totals, batch)
        jax.block_until_ready(state)

    return StepTimes(
        environment=time_calls(lambda: next(steps), seconds),
        act=time_calls(lambda: np.asarray(call.act(state, replay.observation(), 0.01, 0, 0).action), seconds),
        sample=time_calls(sample, seconds),
        update=time_calls(update, seconds),
    )
