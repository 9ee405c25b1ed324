"""DeepMind Control suite (Tassa et al. 2018): `dm_control/DOMAIN-TASK-v0`. Needs `pip install "isqn[dmc]"`.

The reward of a simulator step lies in [0, 1]. Episodes last 1,000 simulator steps, and nearly all tasks are truncated
there and never terminate.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import gymnasium as gym
import numpy as np

from isqn.types import UserError

PREFIX = "dm_control/"
# Protocol name -> action repeat, in simulator steps, whose rewards are summed. The first is the default: 2, as in
# SimbaV2 and the paper.
PROTOCOLS = {f"action-repeat-{count}": count for count in (2, 1, 4, 8)}


def find_protocol(name: str) -> str:
    """Check the name of a protocol and resolve `auto`."""
    if name == "auto":
        return next(iter(PROTOCOLS))
    if name not in PROTOCOLS:
        raise UserError(f"--protocol {name!r} is not known for dm_control; choose one of auto, {', '.join(PROTOCOLS)}.")
    return name


def find_version_conflict() -> str | None:
    """Return an error message if the installed dm_control and mujoco are incompatible, else None."""
    try:
        suite, engine = version("dm_control"), version("mujoco")
    except PackageNotFoundError:
        return None
    if int(engine.split(".")[0]) >= 4:
        return f"dm_control {suite} cannot load its models with mujoco {engine}: pip install 'mujoco<4'"
    return None


@cache
def _import_suite() -> Any:
    """Import dm_control's suite."""
    # By default dm_control looks for a display when it is imported, and most training machines have none.
    os.environ.setdefault("MUJOCO_GL", "egl" if os.path.exists("/dev/dri") else "disable")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from dm_control import suite
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            raise UserError(f'Tasks of dm_control need it: pip install "isqn[dmc]" ({error})') from error
        backend = os.environ["MUJOCO_GL"]
        reason = find_version_conflict() or f"{type(error).__name__}: {error}"
        hint = (
            "" if backend == "disable" else f" (MUJOCO_GL is {backend}; if its library is missing, set it to disable)"
        )
        raise UserError(f"dm_control cannot be imported: {reason}{hint}") from error
    return suite


@cache
def task_ids() -> tuple[str, ...]:
    """Return the ids of all tasks in the suite."""
    return tuple(f"{PREFIX}{domain}-{task}-v0" for domain, task in sorted(_import_suite().ALL_TASKS))


class ControlTask(gym.Env):
    """One task, with its observations concatenated in alphabetical order of their names."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - gymnasium's convention

    def __init__(self, env_id: str, action_repeat: int, render_mode: str | None = None):
        domain, task = env_id.removeprefix(PREFIX).removesuffix("-v0").split("-")
        try:
            # reset() seeds the task again; time limits and all other settings are the suite's
            self.task = _import_suite().load(domain, task, task_kwargs={"random": 0})
        except Exception as error:
            raise UserError(f"{env_id} cannot be loaded: {find_version_conflict() or error}") from error
        self.render_mode, self._repeat = render_mode, action_repeat
        actions = self.task.action_spec()
        low, high = (np.broadcast_to(b, actions.shape).astype(np.float32) for b in (actions.minimum, actions.maximum))
        self.action_space = gym.spaces.Box(low, high, dtype=np.float32)
        size = sum(int(np.prod(part.shape)) for part in self.task.observation_spec().values())
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.task.task.random.seed(seed % 2**32)
        return self._concatenate(self.task.reset()), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = 0.0
        for _ in range(self._repeat):
            timestep = self.task.step(action)
            reward += timestep.reward
            if timestep.last():
                break
        is_last, is_terminal = timestep.last(), timestep.discount == 0
        return self._concatenate(timestep), reward, is_last and is_terminal, is_last and not is_terminal, {}

    def _concatenate(self, timestep: Any) -> np.ndarray:
        observation = timestep.observation
        return np.concatenate([np.ravel(observation[name]) for name in sorted(observation)]).astype(np.float64)

    def render(self) -> np.ndarray:  # type: ignore[override]
        try:
            return self.task.physics.render(height=240, width=320, camera_id=0)
        except Exception as error:
            raise gym.error.DependencyNotInstalled(
                f"it needs EGL or OSMesa; set MUJOCO_GL to egl or osmesa ({type(error).__name__}: {error})"
            ) from error

    def close(self) -> None:
        self.task.close()
