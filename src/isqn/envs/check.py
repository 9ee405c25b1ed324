"""What is wrong with an environment, in sentences."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from isqn.envs.adapter import make_environment
from isqn.types import UserError


def check_environment(env: str | gym.Env, *, num_steps: int = 500, seed: int = 0) -> list[str]:
    """Play an environment with random actions and say what would go wrong in training; [] if nothing would.

    A sentence that begins with "Remark:" is no fault.
    """
    try:
        inner = make_environment(env).env
    except UserError as error:
        return [str(error)]
    found: list[str] = []  # every sentence once, in the order of discovery
    first = _play(inner, seed, num_steps, found)
    second = _play(inner, seed, num_steps, found)
    if first is not None and (second is None or not _same(first, second)):
        _note(
            found,
            f"Two plays from reset(seed={seed}) with the same actions differ; draw all randomness from "
            "self.np_random, after super().reset(seed=seed), and clear all state in reset().",
        )
    return found


def _note(found: list[str], sentence: str) -> None:
    if sentence not in found:
        found.append(sentence)


def _play(env: gym.Env, seed: int, num_steps: int, found: list[str]) -> list[tuple[Any, ...]] | None:
    """One seeded reset and random actions, over several episodes. Returns everything that was seen, or None
    if the environment cannot be played at all."""
    actions = np.random.default_rng(seed)
    space = env.action_space
    obs = _reset(env, seed, found)
    if obs is None:
        return None
    seen: list[tuple[Any, ...]] = [(np.array(obs),)]
    lengths = [0]
    for _ in range(num_steps):
        before, copy = obs, np.array(obs)
        result = _step(env, _random_action(space, actions), found)
        if result is None:
            return None
        obs, reward, terminated, truncated = result
        lengths[-1] += 1
        _check_observation(obs, env.observation_space, "step()", found)
        _check_flags(reward, terminated, truncated, found)
        if isinstance(before, np.ndarray) and not np.array_equal(before, copy, equal_nan=before.dtype.kind == "f"):
            _note(found, "step() writes into the array of the last observation; return a copy of it each time.")
        seen.append((np.array(obs), reward, terminated, truncated))
        if terminated or truncated:
            obs = _reset(env, None, found)
            if obs is None:
                return None
            lengths.append(0)
    _check_lengths(lengths, num_steps, found)
    return seen


def _random_action(space: gym.Space[Any], actions: np.random.Generator) -> Any:
    if isinstance(space, spaces.Box):
        return np.asarray(actions.uniform(space.low, space.high), space.dtype)
    assert isinstance(space, spaces.Discrete)  # or `make_environment` had refused it
    return int(space.start + actions.integers(space.n))


def _reset(env: gym.Env, seed: int | None, found: list[str]) -> Any:
    try:
        result = env.reset() if seed is None else env.reset(seed=seed)
    except Exception as error:
        if isinstance(error, TypeError) and ("seed" in str(error) or "options" in str(error)):
            _note(
                found, f"reset() does not take a seed ({error}); Gymnasium expects reset(*, seed=None, options=None)."
            )
        else:
            _note(found, f"reset() raised {type(error).__name__}: {error}.")
        return None
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        _note(found, f"reset() returned {_kind(result)}; Gymnasium expects the two values (observation, info).")
        return None
    _check_observation(result[0], env.observation_space, "reset()", found)
    return result[0]


def _step(env: gym.Env, action: int, found: list[str]) -> Any:
    try:
        result: Any = env.step(action)
    except Exception as error:
        if not (
            isinstance(error, ValueError) and "to unpack" in str(error)
        ):  # raised by the time limit that `gymnasium.make` puts around it
            _note(found, f"step({action}) raised {type(error).__name__}: {error}.")
            return None
        result = ()
    if not (isinstance(result, tuple) and len(result) == 5):
        _note(
            found,
            f"step() returned {_kind(result)}; Gymnasium expects the five values "
            "(observation, reward, terminated, truncated, info).",
        )
        return None
    return result[:4]


def _kind(result: Any) -> str:
    if not isinstance(result, tuple):
        return f"one {type(result).__name__}"
    return f"{len(result)} values" if result else "another number of values"


def _check_observation(obs: Any, space: gym.Space[Any], where: str, found: list[str]) -> None:
    if isinstance(space, spaces.Discrete):
        if not space.contains(obs):
            _note(found, f"The observation of {where} is {obs!r}, which is not in {space}.")
        return
    assert isinstance(space, spaces.Box)
    if not isinstance(obs, np.ndarray):
        _note(found, f"The observation of {where} is a {type(obs).__name__}; it must be a numpy array.")
        obs = np.asarray(obs)
    if obs.shape != space.shape:
        _note(found, f"The observation of {where} has shape {obs.shape}; its space says {space.shape}.")
        return
    if obs.dtype != space.dtype:
        _note(found, f"The observation of {where} has dtype {obs.dtype}; its space says {space.dtype}.")
    if obs.dtype.kind == "f" and not np.isfinite(obs).all():
        _note(found, f"The observation of {where} contains NaN or infinity.")
    elif (obs < space.low).any() or (obs > space.high).any():
        _note(found, f"The observation of {where} leaves the bounds of its space ({space}).")


def _check_flags(reward: Any, terminated: Any, truncated: Any, found: list[str]) -> None:
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            _note(found, f"step() gives {name} as a {type(flag).__name__}; it must be a bool.")
    try:
        finite = math.isfinite(float(reward))
    except (TypeError, ValueError):
        finite = False
    if not finite:
        _note(found, f"step() gives the reward {reward!r}; it must be a finite number.")


def _check_lengths(lengths: list[int], num_steps: int, found: list[str]) -> None:
    """The last of `lengths` was cut by us."""
    ended = lengths[:-1]
    if not ended:
        _note(
            found,
            f"Remark: no episode ended within {num_steps} steps; if none ever does, give "
            "gymnasium.register(...) a max_episode_steps.",
        )
    elif len(ended) > 2 and ended[0] > 1 and max(ended[1:]) == 1:
        _note(
            found,
            f"The first episode took {ended[0]} steps and all later ones end at their first step; "
            "reset() must clear what ended the episode.",
        )


def _same(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return bool(np.array_equal(np.nan_to_num(np.asarray(a)), np.nan_to_num(np.asarray(b))))

    return len(first) == len(second) and all(
        len(a) == len(b) and all(map(equal, a, b)) for a, b in zip(first, second, strict=True)
    )
