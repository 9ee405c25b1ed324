"""Interaction without learning, for measurements and probes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.keys import episode_seed


def play(
    config: Any,
    env: Environment,
    replay: Replay,
    choose: Callable[[int, int], Any],
    seed: int,
    observe: Callable[..., np.ndarray] = lambda frame, *_: frame,
) -> Iterator[None]:
    """Take one step per iteration, episode after episode, and add it to the replay buffer.

    `choose` returns the action, given the numbers of the step and the episode.
    """
    episode, length = 0, 0
    replay.add_first(observe(env.reset(episode_seed(seed, episode))))
    for step in itertools.count():
        action, length = choose(step, episode), length + 1
        frame, reward, terminated, truncated = env.step(action)
        truncated = truncated or (not terminated and length >= config.max_episode_steps)
        ended = terminated or truncated
        replay.add(action, reward, terminated, truncated, observe(frame, reward, ended))
        if ended:
            episode, length = episode + 1, 0
            replay.add_first(observe(env.reset(episode_seed(seed, episode))))
        yield
