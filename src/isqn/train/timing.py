"""Measured time of each part of a step in the host loop, from which the time of a run is estimated."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from isqn.agents.base import Agent
from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.keys import host_generator
from isqn.train.functions import Functions, compile_agent, draw_batch, zero_totals
from isqn.train.play import play

ROWS = 2_000  # capacity of a replay buffer that is only timed


class Timing(NamedTuple):
    """Median and quartiles of the seconds of one call."""

    median: float
    low: float
    high: float


def time_calls(call: Callable[[], object], seconds: float = 1.0, least: int = 5) -> Timing:
    """Time a function: call it once to warm up, then at least `least` times and for about `seconds`."""
    call()
    durations: list[float] = []
    started = time.perf_counter()
    while len(durations) < least or time.perf_counter() - started < seconds:
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    low, median, high = np.percentile(durations, [25, 50, 75])
    return Timing(float(median), float(low), float(high))


def time_updates(config: Any, agent: Agent, spec: Any, batch: Any, seconds: float) -> float:
    """Return the median seconds of an update; `batch` gives the shapes and types of a batch."""
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
        """Return the seconds of a step of the loop after learning has started."""
        interaction = self.environment.median + self.act.median
        return interaction + (self.sample.median + self.update.median) / config.update_period

    def bottleneck(self, config: Any) -> tuple[str, float]:
        """Return the slowest part of a step, and its share of the step."""
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
    """Time each part of a step on its own, after some random steps that fill `replay`."""
    call = functions or compile_agent(agent)
    rng = host_generator(config.seed, "timing")
    state: Any = call.init(config.seed)
    totals: Any = zero_totals(agent, config, env.spec)

    def observe(*step: Any) -> np.ndarray:
        nonlocal state
        state, obs = call.observe(state, *step)
        return obs

    steps = play(config, env, replay, lambda *_: env.spec.random_action(rng), config.seed, observe)
    for _ in range(max(200, config.num_steps_return + 1)):
        next(steps)

    numbers = itertools.count()  # another batch each time

    def sample() -> Any:
        return draw_batch(config, agent, replay, next(numbers), explored=False)

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
