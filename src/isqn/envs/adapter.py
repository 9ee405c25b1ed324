"""One Gymnasium environment as an agent and a replay need it: a specification, single frames, seeded resets.

There is no vector environment and no automatic reset in here, so no last observation can be lost: `step`
returns it, with `terminated` and `truncated` apart, and the trainer calls `reset`.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from isqn.envs import atari, classic, minatar, scores, toy
from isqn.types import EnvSpec, UserError


class Step(NamedTuple):
    frame: np.ndarray
    reward: float
    terminated: bool
    truncated: bool


class Environment:
    """A thin adapter around one Gymnasium environment.

    After `reset(seed)` the same actions give the same frames and rewards, so the seed of an episode and the
    actions since are its whole state: that is how a run is resumed. Where a protocol lets the game go on
    after a lost life, `continues` says so, and the state is then the seeds and actions since the last reset
    that found `continues` false.
    """

    def __init__(self, env: gym.Env, spec: EnvSpec):
        self.env = env
        self.spec = spec
        _, _, self._to_frame = _frame_format(env.observation_space, spec.id)
        self._over = True

    @property
    def continues(self) -> bool:
        """Whether the last episode ended inside a game that the next `reset` will carry on."""
        return bool(getattr(self.env.unwrapped, "continues", False))

    def reset(self, seed: int, *, restart: bool = False) -> np.ndarray:
        """The first frame of an episode; `restart` begins a new game even where the old one `continues`."""
        options = {"restart": True} if restart and self.continues else None
        with self._named("reset"):
            obs, _ = self.env.reset(seed=seed, options=options)
            frame = self._frame(obs)
        self._over = False
        return frame

    def step(self, action: int) -> Step:
        if self._over:
            raise RuntimeError(f"the episode of {self.spec.id} is over; call reset(seed) before step(action)")
        with self._named("step"):
            obs, reward, terminated, truncated, _ = self.env.step(self.spec.first_action + int(action))
            step = Step(self._frame(obs), float(reward), bool(terminated), bool(truncated))
            if not math.isfinite(step.reward):
                raise ValueError(f"the reward is {step.reward}")
        self._over = step.terminated or step.truncated
        return step

    def _frame(self, obs: Any) -> np.ndarray:
        frame = self._to_frame(obs)
        if frame.shape != self.spec.frame_shape:
            raise ValueError(
                f"an observation has the shape {np.shape(obs)}, and its space has {self.env.observation_space.shape}"
            )
        if frame.dtype.kind == "f" and not np.isfinite(frame).all():
            raise ValueError("an observation holds NaN or infinity")
        return frame

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """Whatever an environment does wrong is said with its name."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.spec.id} failed in {method}(): {type(error).__name__}: {error}; --debug shows where."
            ) from error

    def render(self) -> np.ndarray | None:
        """An RGB frame, if the environment was made with `render=True` and can draw itself."""
        try:
            picture = self.env.render() if self.env.render_mode == "rgb_array" else None
        except gym.error.DependencyNotInstalled as error:
            raise UserError(f"{self.spec.id} cannot draw itself: {error}") from error
        return picture if isinstance(picture, np.ndarray) else None

    def close(self) -> None:
        self.env.close()


def make_environment(env_id: str | gym.Env, *, protocol: str = "auto", render: bool = False) -> Environment:
    """Make `ALE/Pong-v5`, `MinAtar/Breakout-v1`, `isqn/Chain-v0`, any Gymnasium id or `module:Env-v0`; or adapt
    an environment that is there already.

    `protocol` names how an Atari game is played (see `atari.PROTOCOLS`); the others have one way only.
    """
    if isinstance(env_id, str) and env_id.startswith("ALE/"):
        rules = atari.find_protocol(protocol)
        env: gym.Env = atari.AtariGame(_known_atari_id(env_id), rules, render_mode=_mode(render))
        name, frames_per_step, frame_stack = rules.name, rules.action_repeat, rules.frame_stack
    else:
        env, env_id, name = _make_gymnasium(env_id, render)
        frames_per_step, frame_stack = 1, 1
        require_protocol(protocol, name, env_id)
    shape, dtype, _ = _frame_format(env.observation_space, env_id)
    spec = EnvSpec(
        id=env_id,
        protocol=name,
        frame_shape=shape,
        frame_dtype=dtype.name,
        num_actions=_num_actions(env.action_space, env_id),
        frame_stack=frame_stack,
        frames_per_step=frames_per_step,
        first_action=int(env.action_space.start),  # type: ignore[attr-defined]
        first_state=int(space.start) if isinstance(space := env.observation_space, spaces.Discrete) else None,
    )
    return Environment(env, spec)


def require_protocol(protocol: str, name: str, env_id: str) -> None:
    """Only Atari can be played in more than one way."""
    if protocol not in ("auto", name):
        raise UserError(
            f"--protocol {protocol!r} is for ALE/* games; {env_id} is played by the protocol {name!r}, "
            "so leave --protocol at 'auto', and choose a --preset that does."
        )


def _make_gymnasium(env_id: str | gym.Env, render: bool) -> tuple[gym.Env, str, str]:
    """The environment, its full id and the name of its protocol."""
    if isinstance(env_id, gym.Env):
        return env_id, env_id.spec.id if env_id.spec else type(env_id.unwrapped).__name__, "gymnasium"
    if not isinstance(env_id, str):
        raise UserError(f"An environment is an id or a gymnasium.Env; {env_id!r} is neither.")
    if env_id.startswith("MinAtar/"):
        full_id = minatar.full_id(env_id)
        if full_id is None:
            raise _unknown(env_id)
        return minatar.MinAtarGame(full_id, render_mode=_mode(render)), full_id, minatar.PROTOCOL
    toy.register()
    name = env_id
    if ":" in env_id:
        module, name = env_id.split(":", 1)
        _import_from_here(module, env_id)
    if _is_old_atari(name):
        game = name.split("-")[0].removesuffix("NoFrameskip")
        raise UserError(
            f"--env-id {env_id} leaves open how the game is played; write ALE/{game}-v5 and choose a --protocol "
            f"(auto, {', '.join(atari.PROTOCOLS)})."
        )
    try:
        env = gym.make(name, disable_env_checker=True)
        if render and "rgb_array" in env.metadata.get("render_modes", ()):
            env.close()
            env = gym.make(name, disable_env_checker=True, render_mode="rgb_array")
    except gym.error.DependencyNotInstalled as error:
        raise UserError(f"{env_id} needs a package that is not installed: {error}") from error
    except gym.error.Error as error:  # malformed, not registered, or of a version that is gone
        raise _unknown(env_id) from error
    except Exception as error:
        raise UserError(f"{env_id} cannot be made: {type(error).__name__}: {error}; --debug shows where.") from error
    return env, env_id, "gymnasium"


def _mode(render: bool) -> str | None:
    return "rgb_array" if render else None


def _import_from_here(module: str, env_id: str) -> None:
    """Import what registers a user's environment; a console script alone does not search the current folder."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and (module + ".").startswith(f"{error.name}.")
        why = f"is neither in {os.getcwd()} nor installed." if absent else f"fails: {type(error).__name__}: {error}."
        raise UserError(f"The module {module!r} of --env-id {env_id} {why}") from error


def _known_atari_id(env_id: str) -> str:
    if env_id not in atari.games():
        raise _unknown(env_id)
    return env_id


def _unknown(env_id: str) -> UserError:
    """An error that names the nearest ids, whatever their case or version."""
    known = [row.id for row in list_environments()] + [key for key in gym.registry if not _is_old_atari(key)]
    lower = {key.lower(): key for key in known}
    near = [lower[key] for key in difflib.get_close_matches(env_id.lower(), lower, n=3, cutoff=0.75)]
    hint = f"did you mean {' or '.join(near)}?" if near else "`isqn list envs` shows what there is."
    return UserError(f"--env-id {env_id!r} is not a known environment; {hint}")


def _is_old_atari(name: str) -> bool:
    """Pong-v4, PongNoFrameskip-v4, ...: ids that Gymnasium knows once something has imported ale-py."""
    game = re.fullmatch(r"(\w+?)(-ram)?(NoFrameskip|Deterministic)?-v[04]", name)
    return game is not None and f"ALE/{game[1]}-v5" in {row.id for row in list_environments()}


class Row(NamedTuple):
    """One line of `isqn list envs`."""

    id: str
    kind: str  # toy, classic, MinAtar or Atari
    loops: tuple[str, ...]  # host: any; compiled: there is a JAX version


def list_environments() -> list[Row]:
    """What is known by name; any other Gymnasium id works too."""
    both = ("host", "compiled")
    rows = [Row(env_id, "toy", both) for env_id in toy.PROBLEMS]
    rows += [Row(env_id, "classic", both) for env_id in classic.IDS]
    rows += [Row(env_id, "MinAtar", both) for env_id in minatar.IDS]
    try:
        games = list(atari.games())
    except UserError:  # ale-py is not installed: name at least the games of the paper
        games = [f"ALE/{game}-v5" for game in scores.SCORES]
    return rows + [Row(env_id, "Atari", ("host",)) for env_id in games]


def _num_actions(space: gym.Space[Any], env_id: str) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Box):
        raise UserError(
            f"The actions of {env_id} are continuous ({space}); Q-learning needs a finite set of actions "
            "(Discrete), so continuous control is not for this agent."
        )
    raise UserError(f"The action space of {env_id} is {space}; only Discrete actions are supported.")


def _frame_format(space: gym.Space[Any], env_id: str) -> tuple[tuple[int, ...], np.dtype, Callable[[Any], np.ndarray]]:
    """Shape and dtype of a frame, and how an observation becomes one. A frame is a copy, because the environment may
    write into its own buffer again, and in C's order, because files keep arrays as they lie in memory."""
    if isinstance(space, spaces.Discrete):
        identity, start = np.eye(int(space.n), dtype=np.float32), int(space.start)
        return (int(space.n),), identity.dtype, lambda obs: identity[int(obs) - start].copy()
    if isinstance(space, spaces.Box) and space.dtype is not None:
        if len(space.shape) == 1:
            return space.shape, np.dtype(np.float32), lambda obs: np.array(obs, np.float32, order="C")
        dtype = np.dtype(np.float32) if space.dtype == np.float64 else space.dtype
        if len(space.shape) == 2:
            return (*space.shape, 1), dtype, lambda obs: np.array(obs, dtype, order="C")[..., None]
        if len(space.shape) == 3:
            return space.shape, dtype, lambda obs: np.array(obs, dtype, order="C")
    raise UserError(
        f"The observation space of {env_id} is {space}; supported are Discrete, Box vectors (n,) and Box images "
        "(height, width) or (height, width, channels), so give it a gymnasium.ObservationWrapper."
    )
