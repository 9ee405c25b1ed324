"""MinAtar (Young and Tian 2019): the original for the host loop, pgx's JAX version for the compiled loop.

`MinAtar/Breakout-v1` has the actions that matter in the game, `-v0` all six; without a version it is v1.
Sticky actions (0.1) and the rising difficulty are the original's. Needs `pip install "isqn[minatar]"`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np

from isqn.lazy import jnp
from isqn.types import Array, UserError

GAMES = {  # id -> the module's name in both packages
    "Asterix": "asterix",
    "Breakout": "breakout",
    "Freeway": "freeway",
    "Seaquest": "seaquest",
    "SpaceInvaders": "space_invaders",
}
IDS = tuple(f"MinAtar/{game}-{version}" for version in ("v1", "v0") for game in GAMES)
PROTOCOL = "minatar-v1"
STICKY = 0.1


def full_id(env_id: str) -> str | None:
    """`MinAtar/Breakout` is `MinAtar/Breakout-v1`; None for what is not a game."""
    return next((known for known in (env_id, f"{env_id}-v1") if known in IDS), None)


def _game_and_version(env_id: str) -> tuple[str, str]:
    game, version = env_id.removeprefix("MinAtar/").split("-")
    return GAMES[game], version


def _missing(package: str) -> UserError:
    return UserError(f'MinAtar games need {package}, which is not installed: pip install "isqn[minatar]"')


class MinAtarGame(gym.Env):
    """The original game. Its own Gymnasium class (`minatar.gym` 1.0.15) fails Gymnasium's checker, and repeats
    the last action of one episode as the first sticky action of the next, whatever the seed."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - gymnasium's convention

    def __init__(self, env_id: str, sticky_action_prob: float = STICKY, render_mode: str | None = None):
        try:
            from minatar import Environment
        except ImportError as error:
            raise _missing("MinAtar") from error
        game, version = _game_and_version(env_id)
        self.game = Environment(game, sticky_action_prob=sticky_action_prob)
        self.render_mode = render_mode
        self._actions = self.game.minimal_action_set() if version == "v1" else list(range(6))
        self.action_space = gym.spaces.Discrete(len(self._actions))
        self.observation_space = gym.spaces.Box(0, 1, tuple(self.game.state_shape()), np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.game.seed(seed % 2**32)
        self.game.last_action = 0  # as in pgx
        self.game.reset()
        return self.game.state(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, terminated = self.game.act(self._actions[action])
        return self.game.state(), float(reward), bool(terminated), False, {}

    def render(self) -> np.ndarray | None:
        if self.render_mode != "rgb_array":
            return None
        state = self.game.state()
        channels = state.shape[-1]
        hues = np.linspace(0, 2 * np.pi, channels, endpoint=False)[:, None] + np.array([0, 2, 4]) * np.pi / 3
        palette = np.vstack([np.zeros(3), 155 + 100 * np.cos(hues)]).astype(np.uint8)
        top = np.max(state * np.arange(1, channels + 1), axis=-1)  # the last channel that is on wins
        return np.kron(palette[top], np.ones((16, 16, 1), np.uint8))


def native(env_id: str, sticky_action_prob: float = STICKY) -> tuple[Any, Any, int]:
    """The functions reset and step of pgx's version, and the number of actions."""
    game, version = _game_and_version(env_id)
    try:
        module = import_module(f"pgx.minatar.{game}")
    except ImportError as error:
        raise _missing("pgx") from error
    name = "MinAtar" + game.title().replace("_", "")
    env = getattr(module, name)(use_minimal_action_set=version == "v1", sticky_action_prob=sticky_action_prob)

    def reset(key: Array) -> tuple[Any, Array]:
        state = env.init(key)
        return state, state.observation

    mend = mend_seaquest if game == "seaquest" else lambda before, after: after

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array, Array]:
        state = mend(state, env.step(state, action, key))
        return state, state.observation, state.rewards[0], state.terminated, state.truncated

    return reset, step, len(env.legal_action_mask)


def mend_seaquest(before: Any, after: Any) -> Any:
    """Where pgx 2.6 leaves the original's Seaquest, after a step from `before`.

    - Without oxygen the original ends one step earlier, and draws an empty gauge.
    - pgx keeps bullets of the enemy that have left the screen: one that left to the left freezes those after it
      (they stand still and do no harm), and when 25 are kept new ones overwrite the first.
    - At a surfacing pgx counts the ramp before it looks at it, so that enemies get faster one surfacing too early.

    One difference stays: in the original a submarine that runs into a bullet in the very step in which it would
    shoot still shoots.
    """
    suffocated = before._oxygen <= 0
    bullets = after._e_bullets
    gone = (bullets[:, 0] < 0) | (bullets[:, 0] > 9)
    keep = jnp.argsort(gone, stable=True)
    ramped = after._ramp_index != before._ramp_index
    faster = (before._move_speed > 2) & (before._ramp_index % 2 == 1)
    gauge = after.observation[9, :, 7] & (after._oxygen >= 0)
    return after.replace(
        terminated=after.terminated | suffocated,
        _terminal=after._terminal | suffocated,
        observation=after.observation.at[9, :, 7].set(gauge),
        _e_bullets=jnp.where(gone[keep, None], -1, bullets[keep]),
        _move_speed=jnp.where(ramped, before._move_speed - faster, after._move_speed),
    )
