"""How long each part of a host-loop step takes on this machine, and so how long a run will."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from isqn.agents.q_learning import Agent
from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.experiments.config import Config
from isqn.keys import host_generator
from isqn.train.host import Functions, compile_agent
from isqn.train.loop import empty_totals, play, with_held_out

ROWS = 2_000  # of a replay that is only timed


class Timing(NamedTuple):
    """Seconds of one call: the median, and the quartiles around it."""

    median: float
    low: float
    high: float


def time_calls(call: Callable[[], object], seconds: float = 1.0, least: int = 5) -> Timing:
    """Call once to warm up, then for about so long."""
    call()
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < least or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    low, median, high = np.percentile(taken, [25, 50, 75])
    return Timing(float(median), float(low), float(high))


class StepTimes(NamedTuple):
    """Seconds: of one environment step, one choice of action, one sampled batch, one update."""

    environment: Timing
    act: Timing
    sample: Timing
    update: Timing

    def seconds_per_step(self, config: Config) -> float:
        """Of the loop once it learns."""
        each = self.environment.median + self.act.median
        return each + (self.sample.median + self.update.median) / config.update_period

    def bottleneck(self, config: Config) -> tuple[str, float]:
        """The part that takes most of a step, and its share."""
        shares = {
            "environment": self.environment.median,
            "act": self.act.median,
            "sample": self.sample.median / config.update_period,
            "update": self.update.median / config.update_period,
        }
        name = max(shares, key=lambda part: shares[part])
        return name, shares[name] / sum(shares.values())


def measure(
    config: Config,
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
    totals: Any = empty_totals(agent, config, env.spec)

    def observe(*seen: Any) -> np.ndarray:
        nonlocal state
        state, obs = call.observe(state, *seen)
        return obs

    steps = play(config, env, replay, lambda *_: env.spec.random_action(rng), config.seed, observe)
    for _ in range(max(200, config.num_steps_return + 1)):
        next(steps)

    def sample() -> Any:
        batch = replay.latest(explored=False) if agent.streams else replay.sample(config.learned_batch_size, rng)
        size = config.held_out_size
        return with_held_out(batch, replay.sample(size, rng)) if size else batch

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
