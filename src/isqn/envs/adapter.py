"""Adapter from one Gymnasium environment to the host loop: a specification, single frames and seeded resets.

There are no vectorised environments and no automatic resets here. `step` returns the last observation of an
episode and keeps `terminated` and `truncated` apart; the trainer calls `reset`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from isqn.config.fields import flag
from isqn.envs import atari, dmc, minatar, registry, scores
from isqn.envs.results import finite_problem, is_unpacking, reset_problem, reward_problem, shape_problem, step_problem
from isqn.envs.wrappers import make_wrappers
from isqn.imports import module_of
from isqn.types import EnvSpec, UserError
from isqn.usercode import UserCodeError, describe_error, find_user_line

CHECK_HINT = "isqn.check_environment lists all problems of an environment."


class Step(NamedTuple):
    """Result of one agent step."""

    frame: np.ndarray
    reward: float
    terminated: bool
    truncated: bool


class Environment:
    """A thin adapter around one Gymnasium environment.

    After `reset(seed)` the same actions give the same frames and rewards. The seed of an episode and its actions
    are therefore its whole state, and a run is resumed by replaying them. If a protocol ends an episode at a lost
    life but continues the game, `game_continues` is true. The state then consists of all seeds and actions since the
    last reset at which `game_continues` was false.
    """

    def __init__(self, env: gym.Env, spec: EnvSpec):
        self.env = env
        self.spec = spec
        _, _, self.to_frame = _frame_format(env.observation_space, spec.id)
        self._is_over = True
        self._seed, self._step = 0, 0  # of the last reset, and steps since then

    @property
    def game_continues(self) -> bool:
        """Whether the next `reset` continues the current game, after a lost life."""
        return bool(getattr(self.env.unwrapped, "game_continues", False))

    def reset(self, seed: int, *, restart: bool = False) -> np.ndarray:
        """Start an episode and return its first frame; `restart` starts a new game even if `game_continues`."""
        options = {"restart": True} if restart and self.game_continues else None
        self._seed, self._step = seed, 0
        with self._wrap_errors("reset"):
            result = self.env.reset(seed=seed, options=options)
            self._require(reset_problem(result))
            frame = self._frame(result[0], "reset()")
        self._is_over = False
        return frame

    def step(self, action: Any) -> Step:
        """Take one step. Discrete actions count from 0; continuous actions lie in [-1, 1]."""
        if self._is_over:
            raise RuntimeError(f"the episode of {self.spec.id} is over; call reset(seed) before step(action)")
        self._step += 1
        with self._wrap_errors("step"):
            action = self.spec.to_env_action(action if self.spec.is_continuous else int(action))
            result: Any = self.env.step(action)
            self._require(step_problem(result))
            obs, reward, terminated, truncated, _ = result
            self._require(reward_problem(reward))
            step = Step(self._frame(obs, "step()"), float(reward), bool(terminated), bool(truncated))
        self._is_over = step.terminated or step.truncated
        return step

    def _frame(self, obs: Any, where: str) -> np.ndarray:
        """Convert an observation to a frame and check its shape and values."""
        frame = self.to_frame(obs)
        if frame.shape != self.spec.frame_shape:
            self._require(shape_problem(obs, self.env.observation_space.shape, where))
        self._require(finite_problem(frame, where))
        return frame

    def _require(self, problem: str) -> None:
        if problem:
            where = f"{self.spec.id}, step {self._step} of the episode with seed {self._seed}"
            raise UserError(f"{where}: {problem} {CHECK_HINT}")

    @contextmanager
    def _wrap_errors(self, method: str) -> Iterator[None]:
        """Turn any error raised by the environment into a `UserError` that names the environment."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if line := find_user_line(error):
                raise UserCodeError(f"{self.spec.id} failed in {method}() ({line}): {describe_error(error)}") from error
            if method == "step" and is_unpacking(error):
                self._require(step_problem(()))
            sentence = f"{self.spec.id} failed in {method}(): {describe_error(error)} {CHECK_HINT}"
            raise UserCodeError(sentence) from error

    def render(self) -> np.ndarray | None:
        """Return an RGB frame, or None if the environment was made without `render=True` or cannot render."""
        try:
            image = self.env.render() if self.env.render_mode == "rgb_array" else None
        except gym.error.DependencyNotInstalled as error:
            raise UserError(f"{self.spec.id} cannot be rendered: {error}") from error
        return image if isinstance(image, np.ndarray) else None

    def close(self) -> None:
        self.env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_run_environment(config: Any, *, render: bool = False) -> Environment:
    """Make the environment of a run from its settings."""
    settings = {"protocol": config.protocol, "env_kwargs": config.env_kwargs, "env_wrappers": config.env_wrappers}
    return make_environment(config.env_id, **settings, render=render)


def make_environment(
    env_id: str | gym.Env,
    *,
    protocol: str = "auto",
    env_kwargs: str = "",
    env_wrappers: str = "",
    render: bool = False,
) -> Environment:
    """Make an environment from its id, or adapt a given `gymnasium.Env`.

    Ids: `ALE/Pong-v5`, `MinAtar/Breakout-v1`, `dm_control/dog-walk-v0`, `isqn/Chain-v0`, any other Gymnasium id, or
    `module:Env-v0` of a module that is imported already. `protocol` selects the protocol of an Atari game
    (`atari.PROTOCOLS`) or a dm_control task (`dmc.PROTOCOLS`); all other environments have a single protocol.
    `env_kwargs` and `env_wrappers` are the settings of these names, for other environments.
    """
    if (env_kwargs or env_wrappers) and (
        not isinstance(env_id, str) or env_id.startswith(("ALE/", dmc.PREFIX, "MinAtar/"))
    ):
        raise UserError(
            f"{flag('env_kwargs' if env_kwargs else 'env_wrappers')} is for environments that gymnasium.make makes; "
            + ("the given one is made already." if not isinstance(env_id, str) else f"{env_id} has its own protocol.")
        )
    if isinstance(env_id, str) and env_id.startswith("ALE/"):
        settings = atari.find_protocol(protocol)
        if env_id not in atari.list_games():
            raise _unknown_id_error(env_id)
        env: gym.Env = atari.AtariGame(env_id, settings, render_mode=_render_mode(render))
        protocol_name, frames_per_step, frame_stack = settings.name, settings.action_repeat, settings.frame_stack
    elif isinstance(env_id, str) and env_id.startswith(dmc.PREFIX):
        if env_id not in dmc.task_ids():
            raise _unknown_id_error(env_id)
        protocol_name = dmc.find_protocol(protocol)
        frames_per_step, frame_stack = dmc.PROTOCOLS[protocol_name], 1
        env = dmc.ControlTask(env_id, frames_per_step, render_mode=_render_mode(render))
    else:
        env, env_id, protocol_name = _make_gymnasium(env_id, env_kwargs, env_wrappers, render)
        frames_per_step, frame_stack = 1, 1
        require_protocol(protocol, protocol_name, env_id)
        _require_spaces(env, env_id)
    shape, dtype, _ = _frame_format(env.observation_space, env_id)
    spec = EnvSpec(
        id=env_id,
        protocol=protocol_name,
        frame_shape=shape,
        frame_dtype=dtype.name,
        frame_stack=frame_stack,
        frames_per_step=frames_per_step,
        **_action_fields(env.action_space, env_id),
        first_state=int(space.start) if isinstance(space := env.observation_space, spaces.Discrete) else None,
        env_kwargs=env_kwargs,
        env_wrappers=env_wrappers,
        channels_first=has_channels_first(env.observation_space.shape),
    )
    return Environment(env, spec)


def _require_spaces(env: gym.Env, env_id: str) -> None:
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gym.Space):
            found = "has no" if space is None else f"has {space!r} as its"
            raise UserError(f"{env_id} {found} {name}; set it to a gymnasium.Space in __init__().")


def require_protocol(protocol: str, name: str, env_id: str) -> None:
    """Refuse a `protocol` other than `name`, for environments with a single protocol."""
    if protocol not in ("auto", name):
        raise UserError(
            f"--protocol {protocol!r} is for ALE/* games or dm_control/* tasks; {env_id} is played by the protocol "
            f"{name!r}, so leave --protocol at 'auto', or choose a --preset that leaves it there."
        )


def _make_gymnasium(
    env_id: str | gym.Env, env_kwargs: str, env_wrappers: str, render: bool
) -> tuple[gym.Env, str, str]:
    """Return an environment that is neither Atari nor dm_control, its full id and the name of its protocol.

    Keyword arguments and wrappers are part of the name, so that results with other ones are not pooled.
    """
    if isinstance(env_id, gym.Env):
        return env_id, env_id.spec.id if env_id.spec else type(env_id.unwrapped).__name__, "gymnasium"
    if not isinstance(env_id, str):
        raise UserError(f"An environment is an id or a gymnasium.Env; {env_id!r} is neither.")
    if env_id.startswith("MinAtar/"):
        canonical_id = minatar.canonical_id(env_id)
        if canonical_id is None:
            raise _unknown_id_error(env_id)
        return minatar.MinAtarGame(canonical_id, render_mode=_render_mode(render)), canonical_id, minatar.PROTOCOL
    name = env_id
    if ":" in env_id:
        name = env_id.split(":", 1)[1]
        _require_imported(env_id)
    if _is_legacy_atari_id(name):
        game = name.split("-")[0].removesuffix("NoFrameskip")
        raise UserError(
            f"--env-id {env_id} leaves open how the game is played; write ALE/{game}-v5 and choose a --protocol "
            f"(auto, {', '.join(atari.PROTOCOLS)})."
        )
    versions = [key for key in gym.registry if key.rpartition("-v")[0] == name]
    if versions and name not in gym.registry:  # gym.make would choose the newest version
        raise UserError(f"--env-id {env_id} leaves open which version is meant; write {' or '.join(versions)}.")
    kwargs = json.loads(env_kwargs or "{}")
    if taken := {"id", "render_mode", "disable_env_checker"} & set(kwargs):
        raise UserError(f"{flag('env_kwargs')} sets {', '.join(sorted(taken))}, which isqn sets itself; leave it out.")
    wrap = make_wrappers(env_wrappers)
    try:
        env = gym.make(name, disable_env_checker=True, **kwargs)
        if render and "rgb_array" in env.metadata.get("render_modes", ()):
            env.close()
            for driver in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):  # pygame draws frames; it must not look for a screen
                os.environ.setdefault(driver, "dummy")
            env = gym.make(name, disable_env_checker=True, render_mode="rgb_array", **kwargs)
        env = wrap(env)
    except gym.error.DependencyNotInstalled as error:
        commands = " and ".join(re.findall(r"`pip install [^`]*`", str(error)))
        needed = f"a package that is not installed; get it by {commands}." if commands else f"more packages: {error}"
        raise UserError(f"{env_id} needs {needed}") from error
    except gym.error.Error as error:  # malformed id, unregistered id or removed version
        raise _unknown_id_error(env_id) from error
    except Exception as error:
        given = " and ".join(
            f"{flag(name)} {value}"
            for name, value in (("env_kwargs", env_kwargs), ("env_wrappers", env_wrappers))
            if value
        )
        line = find_user_line(error)
        where = f"made with {given}" * bool(given) or "made"
        where += f" ({line})" if line else ""
        raise UserCodeError(f"{env_id} cannot be {where}: {describe_error(error)}") from error
    return env, env_id, " ".join(filter(None, ("gymnasium", env_kwargs, env_wrappers)))


def _render_mode(render: bool) -> str | None:
    return "rgb_array" if render else None


def _require_imported(env_id: str) -> None:
    """Refuse an id whose module was not imported: an id that was read from a file must not import anything."""
    module = module_of(env_id)
    if module not in sys.modules:
        raise UserError(f"The environment {env_id} is registered by the module {module!r}; add --import {module}.")


def _unknown_id_error(env_id: str) -> UserError:
    """Return an error that suggests the most similar ids, ignoring case and version."""
    known = [row.id for row in list_environments()] + [key for key in gym.registry if not _is_legacy_atari_id(key)]
    by_lowercase = {key.lower(): key for key in known}
    matches = difflib.get_close_matches(env_id.lower(), by_lowercase, n=3, cutoff=0.75)
    similar = [by_lowercase[key] for key in matches]
    listed = "`isqn list envs` shows those of the package, and --import FILE adds your own."
    hint = f"did you mean {' or '.join(similar)}?" if similar else listed
    return UserError(f"--env-id {env_id!r} is not a known environment; {hint}")


def _is_legacy_atari_id(name: str) -> bool:
    """Return whether an id is a legacy one, such as Pong-v4 or PongNoFrameskip-v4, which importing ale-py registers."""
    match = re.fullmatch(r"(\w+?)(-ram)?(NoFrameskip|Deterministic)?-v[04]", name)
    return match is not None and f"ALE/{match[1]}-v5" in _list_atari_ids()


def _list_atari_ids() -> list[str]:
    try:
        return list(atari.list_games())
    except UserError:  # without ale-py, list only the games of the paper
        return [f"ALE/{game}-v5" for game in scores.SCORES]


class EnvironmentRow(NamedTuple):
    """One row of `isqn list envs`."""

    id: str
    kind: str  # toy, Wordle, classic, MinAtar, user, Atari or dm_control
    loops: tuple[str, ...]  # host, and compiled if there is a JAX version


def list_environments() -> list[EnvironmentRow]:
    """Return the environments that are known by name; any other Gymnasium id works too."""
    rows = [
        EnvironmentRow(env_id, entry.kind, ("host", "compiled") if entry.native else ("host",))
        for env_id, entry in registry.entries().items()
    ]
    rows += [EnvironmentRow(env_id, "Atari", ("host",)) for env_id in _list_atari_ids()]
    try:
        tasks = dmc.task_ids()
    except UserError:
        tasks = tuple(f"{dmc.PREFIX}{task}-v0" for task in scores.DMC_HARD_7)
    return rows + [EnvironmentRow(env_id, "dm_control", ("host",)) for env_id in tasks]


def _action_fields(space: gym.Space[Any], env_id: str) -> dict[str, Any]:
    """Return the fields of an `EnvSpec` that describe an action space."""
    if isinstance(space, spaces.Discrete):
        return {"num_actions": int(space.n), "first_action": int(space.start)}
    if not isinstance(space, spaces.Box):
        raise UserError(f"The action space of {env_id} is {space}; Discrete and Box actions are supported.")
    low, high = (tuple(bound.astype(float).ravel().tolist()) for bound in (space.low, space.high))
    if space.dtype is None or space.dtype.kind != "f":
        raise UserError(f"The actions of {env_id} are {space}; those of a Box must be floating-point numbers.")
    if not low:
        raise UserError(f"The actions of {env_id} are {space}; an action needs at least one number.")
    if not np.isfinite([low, high]).all():
        raise UserError(
            f"The actions of {env_id} have no finite bounds ({space}); wrap it in a gymnasium.wrappers.TransformAction "
            "whose action_space is a Box with bounds."
        )
    bounds = {"action_low": low, "action_high": high, "action_box": space.shape}
    return {"num_actions": len(low), **bounds, "action_type": space.dtype.name}


def has_channels_first(shape: tuple[int, ...] | None) -> bool:
    """Return whether images of this shape have their channels on the first axis, as those of PyTorch.

    A first axis of at most 4 is one of channels if the last axis is longer than that; a first axis of at most 16, as
    of stacked frames, if both others are at least 32.
    """
    if shape is None or len(shape) != 3 or shape[0] >= min(shape[1:]):
        return False
    return (shape[0] <= 4 < shape[2]) or (shape[0] <= 16 and min(shape[1:]) >= 32)


def _frame_format(space: gym.Space[Any], env_id: str) -> tuple[tuple[int, ...], np.dtype, Callable[[Any], np.ndarray]]:
    """Return the shape and dtype of a frame, and a function that converts an observation to a frame.

    A frame is a copy, because the environment may reuse its buffer. It is in C order, because files store arrays in
    their memory order.
    """
    if isinstance(space, spaces.Discrete):
        identity, start = np.eye(int(space.n), dtype=np.float32), int(space.start)
        return (int(space.n),), identity.dtype, lambda obs: identity[int(obs) - start].copy()
    if isinstance(space, spaces.Box) and space.dtype is not None and 0 in space.shape:
        raise UserError(f"The observation space of {env_id} is {space}; an observation needs at least one number.")
    if isinstance(space, spaces.Box) and space.dtype is not None:
        if len(space.shape) == 1:
            return space.shape, np.dtype(np.float32), lambda obs: np.array(obs, np.float32, order="C")
        dtype = np.dtype(np.float32) if space.dtype == np.float64 else space.dtype
        if len(space.shape) == 2:
            return (*space.shape, 1), dtype, lambda obs: np.array(obs, dtype, order="C")[..., None]
        if has_channels_first(space.shape):
            channels, height, width = space.shape
            return (height, width, channels), dtype, lambda obs: np.array(np.moveaxis(obs, 0, -1), dtype, order="C")
        if len(space.shape) == 3:
            return space.shape, dtype, lambda obs: np.array(obs, dtype, order="C")
    raise UserError(
        f"The observation space of {env_id} is {space}; supported are Discrete, Box vectors (n,) and Box images "
        "(height, width) or (height, width, channels), so wrap it in a gymnasium.ObservationWrapper."
    )
