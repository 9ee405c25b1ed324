"""Checks of an environment before training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from isqn.envs.adapter import make_environment
from isqn.envs.results import (
    finite_problem,
    is_unpacking,
    reset_problem,
    reward_problem,
    shape_problem,
    step_problem,
)
from isqn.types import UserError
from isqn.usercode import describe_error, find_user_line


def check_environment(env: str | gym.Env, *, num_steps: int = 500, seed: int = 0) -> list[str]:
    """Play random actions in an environment and return the problems found, one sentence each.

    A sentence that starts with "Remark:" is a hint and not an error.
    """
    try:
        adapter = make_environment(env)
    except UserError as error:
        return [str(error)]
    problems: list[str] = []  # without repetitions, in order of discovery
    if adapter.spec.channels_first:
        shapes = f"{adapter.env.observation_space.shape} are taken to have their channels first"
        problems.append(f"Remark: images of shape {shapes}, and are turned to {adapter.spec.frame_shape}.")
    with nullcontext() if isinstance(env, gym.Env) else adapter:
        first, second = (_random_trajectory(adapter.env, seed, num_steps, problems) for _ in range(2))
    if first is not None and (second is None or not _are_equal(first, second)):
        _add_problem(
            problems,
            f"Two plays from reset(seed={seed}) with the same actions differ; draw all randomness from "
            "self.np_random, after super().reset(seed=seed), and clear all state in reset().",
        )
    return problems


def _add_problem(problems: list[str], sentence: str) -> None:
    if sentence not in problems:
        problems.append(sentence)


def _random_trajectory(env: gym.Env, seed: int, num_steps: int, problems: list[str]) -> list[tuple[Any, ...]] | None:
    """Take random actions from a seeded reset on, over several episodes.

    Returns everything the environment returned, or None if it cannot be played at all.
    """
    rng = np.random.default_rng(seed)
    space = env.action_space
    obs = _reset(env, seed, problems)
    if obs is None:
        return None
    trajectory: list[tuple[Any, ...]] = [(np.array(obs),)]
    lengths = [0]
    for _ in range(num_steps):
        previous, copy = obs, np.array(obs)
        result = _step(env, _random_action(space, rng), problems)
        if result is None:
            return None
        obs, reward, terminated, truncated = result
        lengths[-1] += 1
        _check_observation(obs, env.observation_space, "step()", problems)
        _check_flags(reward, terminated, truncated, problems)
        if isinstance(previous, np.ndarray) and not np.array_equal(
            previous, copy, equal_nan=previous.dtype.kind == "f"
        ):
            _add_problem(
                problems, "step() writes into the array of the last observation; return a copy of it each time."
            )
        trajectory.append((np.array(obs), reward, terminated, truncated))
        if terminated or truncated:
            obs = _reset(env, None, problems)
            if obs is None:
                return None
            lengths.append(0)
    _check_lengths(lengths, num_steps, problems)
    return trajectory


def _random_action(space: gym.Space[Any], rng: np.random.Generator) -> Any:
    if isinstance(space, spaces.Box):
        return np.asarray(rng.uniform(space.low, space.high), space.dtype)
    assert isinstance(space, spaces.Discrete)  # `make_environment` refuses all other spaces
    return int(space.start + rng.integers(space.n))


def _reset(env: gym.Env, seed: int | None, problems: list[str]) -> Any:
    try:
        result = env.reset() if seed is None else env.reset(seed=seed)
    except Exception as error:
        if isinstance(error, TypeError) and ("seed" in str(error) or "options" in str(error)):
            _add_problem(
                problems,
                f"reset() does not take a seed ({error}); Gymnasium expects reset(*, seed=None, options=None).",
            )
        else:
            _add_problem(problems, f"reset() raised {_describe(error)}")
        return None
    if problem := reset_problem(result):
        _add_problem(problems, problem)
        return None
    _check_observation(result[0], env.observation_space, "reset()", problems)
    return result[0]


def _step(env: gym.Env, action: int, problems: list[str]) -> Any:
    try:
        result: Any = env.step(action)
    except Exception as error:
        if find_user_line(error) or not is_unpacking(error):
            _add_problem(problems, f"step({action}) raised {_describe(error)}")
            return None
        result = ()
    if problem := step_problem(result):
        _add_problem(problems, problem)
        return None
    return result[:4]


def _describe(error: Exception) -> str:
    """Return an error with the line of the environment that raised it."""
    line = find_user_line(error)
    return f"{describe_error(error).rstrip('.')}{f' ({line})' if line else ''}."


def _check_observation(obs: Any, space: gym.Space[Any], where: str, problems: list[str]) -> None:
    if isinstance(space, spaces.Discrete):
        if not space.contains(obs):
            _add_problem(problems, f"The observation of {where} is {obs!r}, which is not in {space}.")
        return
    assert isinstance(space, spaces.Box)
    if not isinstance(obs, np.ndarray):
        _add_problem(problems, f"The observation of {where} is a {type(obs).__name__}; it must be a numpy array.")
        obs = np.asarray(obs)
    if problem := shape_problem(obs, space.shape, where):
        _add_problem(problems, problem)
        return
    if obs.dtype != space.dtype:
        _add_problem(problems, f"The observation of {where} has dtype {obs.dtype}; its space says {space.dtype}.")
    if problem := finite_problem(obs, where):
        _add_problem(problems, problem)
    elif (obs < space.low).any() or (obs > space.high).any():
        _add_problem(problems, f"The observation of {where} leaves the bounds of its space ({space}).")


def _check_flags(reward: Any, terminated: Any, truncated: Any, problems: list[str]) -> None:
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            _add_problem(problems, f"step() gives {name} as a {type(flag).__name__}; it must be a bool.")
    if problem := reward_problem(reward):
        _add_problem(problems, problem)


def _check_lengths(lengths: list[int], num_steps: int, problems: list[str]) -> None:
    """Check the lengths of the episodes; the last episode is incomplete."""
    complete = lengths[:-1]
    if not complete:
        _add_problem(
            problems,
            f"Remark: no episode ended within {num_steps} steps; if none ever does, give "
            "gymnasium.register(...) a max_episode_steps.",
        )
    elif len(complete) > 2 and complete[0] > 1 and max(complete[1:]) == 1:
        _add_problem(
            problems,
            f"The first episode took {complete[0]} steps and all later ones end at their first step; "
            "reset() must reset the state that ended the episode.",
        )


def _are_equal(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return bool(np.array_equal(np.nan_to_num(np.asarray(a)), np.nan_to_num(np.asarray(b))))

    return len(first) == len(second) and all(
        len(a) == len(b) and all(map(equal, a, b)) for a, b in zip(first, second, strict=True)
    )
