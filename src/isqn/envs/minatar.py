"""MinAtar (Young and Tian 2019): the original for the host loop, pgx's JAX version for the compiled loop.

`MinAtar/Breakout-v1` has the minimal action set of the game, `-v0` all six actions; the default version is v1.
Sticky actions (0.1) and difficulty ramping are those of the original. Needs `pip install "isqn[minatar]"`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np

from isqn.lazy import jnp
from isqn.types import Array, UserError

GAMES = {  # name in the id -> module name in both packages
    "Asterix": "asterix",
    "Breakout": "breakout",
    "Freeway": "freeway",
    "Seaquest": "seaquest",
    "SpaceInvaders": "space_invaders",
}
IDS = tuple(f"MinAtar/{game}-{version}" for version in ("v1", "v0") for game in GAMES)
PROTOCOL = "minatar-v1"
STICKY_ACTION_PROBABILITY = 0.1


def canonical_id(env_id: str) -> str | None:
    """Return the id with its version (`MinAtar/Breakout-v1`), or None if it is not a MinAtar game."""
    return next((known for known in (env_id, f"{env_id}-v1") if known in IDS), None)


def _game_and_version(env_id: str) -> tuple[str, str]:
    game, version = env_id.removeprefix("MinAtar/").split("-")
    return GAMES[game], version


def _missing_package_error(package: str) -> UserError:
    return UserError(f'MinAtar games need {package}, which is not installed: pip install "isqn[minatar]"')


class MinAtarGame(gym.Env):
    """The original game.

    It does not use MinAtar's own Gymnasium class (`minatar.gym` 1.0.15), which fails Gymnasium's checker and, for any
    seed, uses the last action of one episode as the first sticky action of the next.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - gymnasium's convention

    def __init__(
        self, env_id: str, sticky_action_prob: float = STICKY_ACTION_PROBABILITY, render_mode: str | None = None
    ):
        try:
            from minatar import Environment
        except ImportError as error:
            raise _missing_package_error("MinAtar") from error
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
        self.game.last_action = 0  # so that a seed determines the episode, as in pgx
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
        last_active = np.max(state * np.arange(1, channels + 1), axis=-1)  # 0 where no channel is active
        return np.kron(palette[last_active], np.ones((16, 16, 1), np.uint8))


def make_jax_functions(env_id: str, sticky_action_prob: float = STICKY_ACTION_PROBABILITY) -> tuple[Any, Any, int]:
    """Return the functions `reset` and `step` of pgx's version, and its number of actions."""
    game, version = _game_and_version(env_id)
    try:
        module = import_module(f"pgx.minatar.{game}")
    except ImportError as error:
        raise _missing_package_error("pgx") from error
    name = "MinAtar" + game.title().replace("_", "")
    env = getattr(module, name)(use_minimal_action_set=version == "v1", sticky_action_prob=sticky_action_prob)

    def reset(key: Array) -> tuple[Any, Array]:
        state = env.init(key)
        return state, state.observation

    correct = correct_seaquest if game == "seaquest" else lambda before, after: after

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Array, Array, Array, Array]:
        state = correct(state, env.step(state, action, key))
        return state, state.observation, state.rewards[0], state.terminated, state.truncated

    return reset, step, len(env.legal_action_mask)


def correct_seaquest(before: Any, after: Any) -> Any:
    """Correct a step of pgx 2.6 from `before` to `after`, where its Seaquest differs from the original.

    - Without oxygen, the original ends one step earlier and shows an empty gauge.
    - pgx keeps enemy bullets that have left the screen. One that left at the left edge freezes those after it (they
      stop moving and do no damage), and once 25 are kept, new ones overwrite the first.
    - At a surfacing, pgx increments the ramp index before it reads it, so enemies speed up one surfacing too early.

    One difference remains: in the original, a submarine still shoots in the step in which it hits a bullet.
    """
    is_suffocated = before._oxygen <= 0
    bullets = after._e_bullets
    is_outside = (bullets[:, 0] < 0) | (bullets[:, 0] > 9)
    order = jnp.argsort(is_outside, stable=True)  # bullets on the screen first
    is_ramped = after._ramp_index != before._ramp_index
    speed_up = (before._move_speed > 2) & (before._ramp_index % 2 == 1)
    gauge = after.observation[9, :, 7] & (after._oxygen >= 0)
    return after.replace(
        terminated=after.terminated | is_suffocated,
        _terminal=after._terminal | is_suffocated,
        observation=after.observation.at[9, :, 7].set(gauge),
        _e_bullets=jnp.where(is_outside[order, None], -1, bullets[order]),
        _move_speed=jnp.where(is_ramped, before._move_speed - speed_up, after._move_speed),
    )
