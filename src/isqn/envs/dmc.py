"""The DeepMind Control suite (Tassa et al. 2018): `dm_control/DOMAIN-TASK-v0`, straight from dm_control.

Rewards of a step are between 0 and 1, episodes are 1,000 steps of the simulator, and nearly all tasks only end there:
they are truncated, never terminal. Needs `pip install "isqn[dmc]"`.
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
# The same action for so many steps of the simulator, whose rewards are added. SimbaV2, and so the paper: 2.
PROTOCOLS = {f"action-repeat-{count}": count for count in (2, 1, 4, 8)}


def find_protocol(name: str) -> str:
    if name == "auto":
        return next(iter(PROTOCOLS))
    if name not in PROTOCOLS:
        raise UserError(f"--protocol {name!r} is not known for dm_control; choose one of auto, {', '.join(PROTOCOLS)}.")
    return name


def version_problem() -> str | None:
    """What is wrong with the two packages together, if anything."""
    try:
        suite, engine = version("dm_control"), version("mujoco")
    except PackageNotFoundError:
        return None
    if int(engine.split(".")[0]) >= 4:
        return f"dm_control {suite} cannot load its models with mujoco {engine}: pip install 'mujoco<4'"
    return None


@cache
def _suite() -> Any:
    # There is no display on most machines that train, and without a word dm_control looks for one when it is imported.
    os.environ.setdefault("MUJOCO_GL", "egl" if os.path.exists("/dev/dri") else "disable")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from dm_control import suite
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            raise UserError(f'Tasks of dm_control need it: pip install "isqn[dmc]" ({error})') from error
        chosen = os.environ["MUJOCO_GL"]
        why = version_problem() or f"{type(error).__name__}: {error}"
        drawing = "" if chosen == "disable" else f" (MUJOCO_GL is {chosen}; without its library, set it to disable)"
        raise UserError(f"dm_control cannot be imported: {why}{drawing}") from error
    return suite


@cache
def task_ids() -> tuple[str, ...]:
    return tuple(f"{PREFIX}{domain}-{task}-v0" for domain, task in sorted(_suite().ALL_TASKS))


class ControlTask(gym.Env):
    """One task, whose observations are joined in the order of their names."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - gymnasium's convention

    def __init__(self, env_id: str, action_repeat: int, render_mode: str | None = None):
        domain, task = env_id.removeprefix(PREFIX).removesuffix("-v0").split("-")
        try:
            # what it draws from is seeded at every reset; time limits and all else are the suite's
            self.task = _suite().load(domain, task, task_kwargs={"random": 0})
        except Exception as error:
            raise UserError(f"{env_id} cannot be loaded: {version_problem() or error}") from error
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
        return self._joined(self.task.reset()), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._repeat):
            now = self.task.step(action)
            total += now.reward
            if now.last():
                break
        return self._joined(now), total, now.last() and now.discount == 0, now.last() and now.discount != 0, {}

    def _joined(self, now: Any) -> np.ndarray:
        return np.concatenate([np.ravel(now.observation[name]) for name in sorted(now.observation)]).astype(np.float64)

    def render(self) -> np.ndarray:  # type: ignore[override]
        try:
            return self.task.physics.render(height=240, width=320, camera_id=0)
        except Exception as error:
            raise gym.error.DependencyNotInstalled(
                f"it needs EGL or OSMesa; set MUJOCO_GL to egl or osmesa ({type(error).__name__}: {error})"
            ) from error

    def close(self) -> None:
        self.task.close()
