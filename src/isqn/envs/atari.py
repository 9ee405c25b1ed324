"""Atari 2600 games under a named protocol. Needs ale-py and OpenCV: `pip install "isqn[atari]"`.

Results under different protocols cannot be compared. A protocol therefore has a name and a version, which are
printed at the start of a run and stored with its results. Rewards are never clipped here.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np

from isqn.types import UserError


@dataclasses.dataclass(frozen=True)
class AtariProtocol:
    """Settings of an Atari environment, in the terms of the Arcade Learning Environment."""

    name: str
    """Name and version; changing any other field requires a new version."""
    repeat_action_probability: float
    """Sticky actions: probability, at every emulator frame, of repeating the previous frame's action."""
    life_loss_terminates: bool
    """Whether a lost life ends the episode. The game itself continues at the next reset."""
    max_noops: int
    """Maximum number of no-op frames at the start of a game (uniform from 1 to this); 0 disables no-ops."""
    fire_at_start: bool
    """Whether a game whose action 1 is FIRE starts by taking actions 1 and 2 once (SB3's FireResetEnv)."""
    frame_cap: int
    """Emulator frames after which a game is truncated, including those at its start."""
    action_repeat: int = 4
    """Emulator frames in one agent step."""
    screen_size: int = 84
    """Height and width of a frame, in pixels: the maximum of the last two grayscale screens, resized by area."""
    frame_stack: int = 4
    """Frames in one observation. The replay stacks them and pads the start of an episode with zeros."""

    def describe(self) -> str:
        """Return a one-line summary, printed at the start of a run."""
        return (
            f"{self.name}: sticky actions {self.repeat_action_probability:g}, "
            f"{'life loss' if self.life_loss_terminates else 'game over'} terminates, "
            f"{f'1-{self.max_noops} no-ops' if self.max_noops else 'no no-ops'}"
            f"{' and FIRE' if self.fire_at_start else ''} at the start, action repeat {self.action_repeat}, "
            f"{self.screen_size}x{self.screen_size} grayscale x {self.frame_stack}, "
            f"truncated at {self.frame_cap:,} frames"
        )


# The default: Machado et al. 2018, as in Dopamine and the paper. 108,000 frames are the paper's H = 27,000 steps.
MACHADO2018 = AtariProtocol(
    name="machado2018-v1",
    repeat_action_probability=0.25,
    life_loss_terminates=False,
    max_noops=0,
    fire_at_start=False,
    frame_cap=108_000,
)
# Elsayed et al. 2024 (Stream Q). The paper states 0 to 30 no-ops; both public implementations draw 1 to 30.
STREAMING = dataclasses.replace(
    MACHADO2018,
    name="streaming-v1",
    repeat_action_probability=0.0,
    life_loss_terminates=True,
    max_noops=30,
    fire_at_start=True,
)
# The authors' public code caps the emulator at 100,000 frames. It then repeats the last screen 2,000 times, until
# its own horizon of 27,000 steps; this protocol truncates at the cap instead.
REFERENCE = dataclasses.replace(MACHADO2018, name="reference-v1", frame_cap=100_000)

PROTOCOLS = {protocol.name: protocol for protocol in (MACHADO2018, STREAMING, REFERENCE)}


def find_protocol(name: str) -> AtariProtocol:
    """Return the protocol with this name. `auto` is machado2018-v1; a name without a version is its newest version."""
    for protocol in PROTOCOLS.values():
        if name in (protocol.name, protocol.name.rpartition("-")[0]):
            return protocol
    if name == "auto":
        return MACHADO2018
    raise UserError(f"--protocol {name!r} is not known; choose one of auto, {', '.join(PROTOCOLS)}.")


def gymnasium_settings(protocol: AtariProtocol) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return keyword arguments of `gymnasium.make` and of AtariPreprocessing for a protocol, or None.

    Their game continues after a lost life by another rule than `AtariGame`, and they know no FIRE at the start.
    """
    if protocol.life_loss_terminates or protocol.fire_at_start:
        return None
    kwargs = {
        "frameskip": 1,
        "repeat_action_probability": protocol.repeat_action_probability,
        "full_action_space": False,
        "max_num_frames_per_episode": protocol.frame_cap,
    }
    preprocessing = {
        "noop_max": protocol.max_noops,
        "frame_skip": protocol.action_repeat,
        "screen_size": protocol.screen_size,
        "terminal_on_life_loss": False,
        "grayscale_obs": True,
        "grayscale_newaxis": True,
        "scale_obs": False,
    }
    return kwargs, preprocessing


@cache
def list_games() -> dict[str, str]:
    """Return the ROM name of every `ALE/...-v5` id."""
    _require_ale()
    from ale_py import registration, roms

    multiplayer_only = {"combat", "joust", "maze_craze", "warlords"}
    names = [rom for rom in roms.get_all_rom_ids() if rom not in multiplayer_only]
    return {f"ALE/{registration.rom_id_to_name(rom)}-v5": rom for rom in sorted(names)}


def _require_ale() -> None:
    try:
        import ale_py  # noqa: F401
        import cv2  # noqa: F401
    except ImportError as error:
        raise UserError(f'Atari games need {error.name}, which is not installed: pip install "isqn[atari]"') from error


class AtariGame(gym.Env):
    """One game under one protocol, using the emulator's own interface.

    Sticky actions and no-ops are drawn here instead of in the emulator. The emulator accepts a new seed only when it
    reloads the ROM, which takes 20 times as long as this reset. The distribution is the same: before every frame,
    the previous action is kept with the given probability.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 - gymnasium's convention

    def __init__(self, env_id: str, protocol: AtariProtocol, render_mode: str | None = None):
        _require_ale()
        import ale_py
        import cv2
        from ale_py import roms

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.protocol = protocol
        self.render_mode = render_mode
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.setInt("random_seed", 0)
        self.ale.setInt("max_num_frames_per_episode", protocol.frame_cap)
        self.ale.loadROM(str(roms.get_rom_path(list_games()[env_id])))
        # Some games (Seaquest, BeamRider, Assault) depend on what the previous episode left in the console's memory.
        # A reset therefore restores the memory of a fresh console before it resets the game.
        self._initial_state = self.ale.cloneState(include_rng=True)

        self._actions = self.ale.getMinimalActionSet()
        self._noop = ale_py.Action.NOOP
        has_fire = len(self._actions) > 2 and self._actions[1] == ale_py.Action.FIRE
        self._start_actions = self._actions[1:3] if protocol.fire_at_start and has_fire else []
        self._screens = np.zeros((2, *self.ale.getScreenDims()), np.uint8)  # the last two frames
        self._pooled = np.zeros_like(self._screens[0])
        self._size = (protocol.screen_size, protocol.screen_size)
        self._resize, self._interpolation = cv2.resize, cv2.INTER_AREA
        self._last_action = self._noop
        self._lives = 0
        self.game_continues = False
        self.observation_space = gym.spaces.Box(0, 255, (*self._size, 1), np.uint8)
        self.action_space = gym.spaces.Discrete(len(self._actions))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a game, or continue it after a lost life.

        Continuing ignores the seed and emulates no frame. `options={"restart": True}` always starts a new game.
        """
        if self.game_continues and not (options or {}).get("restart"):
            self.game_continues = False
            return self._frame(), {}
        super().reset(seed=seed)
        self._restart_game()
        if self.protocol.max_noops:
            for _ in range(self.np_random.integers(1, self.protocol.max_noops + 1)):
                self.ale.act(self._noop)
        self.ale.getScreenGrayscale(self._screens[1])
        for action in self._start_actions:
            self._repeat_action(action)
        if self.ale.game_over():
            self._restart_game()
        self._lives = self.ale.lives()
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = self._repeat_action(self._actions[action])
        game_over = self.ale.game_over(with_truncation=False)
        # A life counts as lost only if another is left: Q*bert shows 0 lives for some frames before its game is over.
        lives = self.ale.lives()
        lost_life = self.protocol.life_loss_terminates and 0 < lives < self._lives
        self._lives = lives
        is_capped = self.ale.game_truncated()
        self.game_continues = lost_life and not game_over and not is_capped
        terminated = game_over or lost_life
        return self._frame(), float(reward), terminated, is_capped and not terminated, {"lives": lives}

    def render(self) -> np.ndarray | None:
        return self.ale.getScreenRGB() if self.render_mode == "rgb_array" else None

    def _restart_game(self) -> None:
        self.ale.restoreState(self._initial_state)
        self.ale.reset_game()
        self._last_action = self._noop
        self._screens[:] = 0
        self.ale.getScreenGrayscale(self._screens[1])
        self.game_continues = False

    def _repeat_action(self, action: Any) -> int:
        """Repeat an action for one agent step, or until the game is over, and return the summed reward."""
        ale, repeat, reward = self.ale, self.protocol.action_repeat, 0
        sticky = self.protocol.repeat_action_probability
        draws = self.np_random.random(repeat).tolist() if sticky else [1.0] * repeat
        for i, draw in enumerate(draws):
            if draw >= sticky:
                self._last_action = action
            reward += ale.act(self._last_action)
            if i >= repeat - 2:
                ale.getScreenGrayscale(self._screens[i - repeat])
            if ale.game_over():
                break
        return reward

    def _frame(self) -> np.ndarray:
        """Return the current frame of shape (screen_size, screen_size, 1)."""
        np.maximum(self._screens[0], self._screens[1], out=self._pooled)
        frame: np.ndarray = self._resize(self._pooled, self._size, interpolation=self._interpolation)
        return frame[..., None]
