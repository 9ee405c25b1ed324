"""Rules for the results of reset() and step(), in sentences that training and `check_environment` share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def reset_problem(result: Any) -> str:
    """Return what is wrong with the result of reset(); "" if nothing is."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return ""
    return f"reset() returned {_describe_result(result)}; Gymnasium expects the two values (observation, info)."


def step_problem(result: Any) -> str:
    """Return what is wrong with the number of values that step() returned; "" if nothing is."""
    if isinstance(result, tuple) and len(result) == 5:
        return ""
    return (
        f"step() returned {_describe_result(result)}; Gymnasium expects the five values "
        "(observation, reward, terminated, truncated, info)."
    )


def is_unpacking(error: Exception) -> bool:
    """Return whether a wrapper of `gymnasium.make` could not unpack the result of step()."""
    return isinstance(error, ValueError) and "to unpack" in str(error)


def _describe_result(result: Any) -> str:
    if not isinstance(result, tuple):
        return f"one {type(result).__name__}"
    return f"{len(result)} values" if result else "another number of values"


def reward_problem(reward: Any) -> str:
    """Return what is wrong with a reward; "" if nothing is."""
    try:
        is_finite = math.isfinite(float(reward))
    except (TypeError, ValueError):
        is_finite = False
    return "" if is_finite else f"step() gives the reward {reward!r}; it must be a finite number."


def shape_problem(obs: Any, shape: tuple[int, ...] | None, where: str) -> str:
    """Return what is wrong with the shape of an observation; "" if nothing is."""
    found = np.shape(obs)
    return "" if found == shape else f"The observation of {where} has shape {found}; its space says {shape}."


def finite_problem(obs: np.ndarray, where: str) -> str:
    """Return whether an observation has numbers that are not finite, in words; "" if it has none."""
    is_finite = obs.dtype.kind != "f" or np.isfinite(obs).all()
    return "" if is_finite else f"The observation of {where} contains NaN or infinity."
