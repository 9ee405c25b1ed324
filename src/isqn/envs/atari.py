"""Atari 2600 games, played by a named protocol. Needs ale-py and OpenCV: `pip install "isqn[atari]"`.

Results of two protocols cannot be compared, so a protocol is data with a name and a version, printed at the start
and stored with the results. Rewards are never clipped here.
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
    """How a game is played. The words are those of the Arcade Learning Environment."""

    name: str
    """Name and version; a change of any other field is a new version."""
    repeat_action_probability: float
    """Sticky actions: the chance, on every emulator frame, that the action of the frame before stays."""
    life_loss_terminates: bool
    """A lost life ends the episode, though not the game: the next reset carries the game on."""
    max_noops: int
    """At the start of a game, 1 to this many emulator frames pass without an action; 0 for none."""
    fire_at_start: bool
    """At the start of a game whose action 1 is FIRE, actions 1 and 2 are taken once (FireReset of SB3)."""
    frame_cap: int
    """Emulator frames, those of the start included, after which a game is truncated."""
    action_repeat: int = 4
    """Emulator frames in one agent step."""
    screen_size: int = 84
    """Height and width of a frame: the maximum of the last two grayscale screens, resized by area."""
    frame_stack: int = 4
    """Frames an agent sees at once; the replay stacks them, and fills the first stacks with zeros."""

    def describe(self) -> str:
        """One line, to print at the start of a run."""
        return (
            f"{self.name}: sticky actions {self.repeat_action_probability:g}, "
            f"{'life loss' if self.life_loss_terminates else 'game over'} terminates, "
            f"{f'1-{self.max_noops} no-ops' if self.max_noops else 'no no-ops'}"
            f"{' and FIRE' if self.fire_at_start else ''} at the start, action repeat {self.action_repeat}, "
            f"{self.screen_size}x{self.screen_size} grayscale x {self.frame_stack}, "
            f"truncated at {self.frame_cap:,} frames"
        )


# Machado et al. 2018, as Dopamine and the paper play: the default. 108,000 frames are the paper's H = 27,000.
MACHADO2018 = AtariProtocol(
    name="machado2018-v1",
    repeat_action_probability=0.25,
    life_loss_terminates=False,
    max_noops=0,
    fire_at_start=False,
    frame_cap=108_000,
)
# Elsayed et al. 2024 (Stream Q). The paper says 0 to 30 no-ops; both public codes draw 1 to 30.
STREAMING = dataclasses.replace(
    MACHADO2018,
    name="streaming-v1",
    repeat_action_probability=0.0,
    life_loss_terminates=True,
    max_noops=30,
    fire_at_start=True,
)
# The authors' public code caps the emulator at 100,000 frames. It then feeds the agent 2,000 copies of the
# frozen screen, up to its own horizon of 27,000 steps; we truncate at the cap instead.
REFERENCE = dataclasses.replace(MACHADO2018, name="reference-v1", frame_cap=100_000)

PROTOCOLS = {protocol.name: protocol for protocol in (MACHADO2018, STREAMING, REFERENCE)}


def find_protocol(name: str) -> AtariProtocol:
    """`auto` is machado2018-v1; a name without a version is its newest."""
    for protocol in PROTOCOLS.values():
        if name in (protocol.name, protocol.name.rpartition("-")[0]):
            return protocol
    if name == "auto":
        return MACHADO2018
    raise UserError(f"--protocol {name!r} is not known; choose one of auto, {', '.join(PROTOCOLS)}.")


@cache
def games() -> dict[str, str]:
    """Every `ALE/...-v5` id and the name of its ROM."""
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
    """One game under one protocol, driven through the emulator's own interface.

    Sticky actions and no-ops are drawn here and not by the emulator, which takes a new seed only with a reload
    of the ROM (20 times as long as our reset). The distribution is the same: before every frame, with the given
    probability, the action of the frame before stays.
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
        self.ale.loadROM(str(roms.get_rom_path(games()[env_id])))
        # Some games (Seaquest, BeamRider, Assault) start from what the last episode left in the memory of the
        # console, so a reset first puts back the memory of a fresh console, and then presses reset.
        self._fresh_console = self.ale.cloneState(include_rng=True)

        self._actions = self.ale.getMinimalActionSet()
        self._noop = ale_py.Action.NOOP
        fires = len(self._actions) > 2 and self._actions[1] == ale_py.Action.FIRE
        self._start_actions = self._actions[1:3] if protocol.fire_at_start and fires else []
        self._screens = np.zeros((2, *self.ale.getScreenDims()), np.uint8)  # the last two frames
        self._pooled = np.zeros_like(self._screens[0])
        self._size = (protocol.screen_size, protocol.screen_size)
        self._resize, self._by_area = cv2.resize, cv2.INTER_AREA
        self._last_action = self._noop
        self._lives = 0
        self.continues = False
        self.observation_space = gym.spaces.Box(0, 255, (*self._size, 1), np.uint8)
        self.action_space = gym.spaces.Discrete(len(self._actions))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a game, or carry it on after a lost life; the seed is then not used, and no frame passes.

        `options={"restart": True}` starts a game in any case.
        """
        if self.continues and not (options or {}).get("restart"):
            self.continues = False
            return self._frame(), {}
        super().reset(seed=seed)
        self._boot()
        if self.protocol.max_noops:
            for _ in range(self.np_random.integers(1, self.protocol.max_noops + 1)):
                self.ale.act(self._noop)
        self.ale.getScreenGrayscale(self._screens[1])
        for action in self._start_actions:
            self._play(action)
        if self.ale.game_over():
            self._boot()
        self._lives = self.ale.lives()
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = self._play(self._actions[action])
        game_over = self.ale.game_over(with_truncation=False)
        # Only a loss that leaves a life counts: Q*bert shows 0 lives for some frames before its game is over.
        lives = self.ale.lives()
        lost_life = self.protocol.life_loss_terminates and 0 < lives < self._lives
        self._lives = lives
        capped = self.ale.game_truncated()
        self.continues = lost_life and not game_over and not capped
        terminated = game_over or lost_life
        return self._frame(), float(reward), terminated, capped and not terminated, {"lives": lives}

    def render(self) -> np.ndarray | None:
        return self.ale.getScreenRGB() if self.render_mode == "rgb_array" else None

    def _boot(self) -> None:
        self.ale.restoreState(self._fresh_console)
        self.ale.reset_game()
        self._last_action = self._noop
        self._screens[:] = 0
        self.ale.getScreenGrayscale(self._screens[1])
        self.continues = False

    def _play(self, action: Any) -> int:
        """One agent step: the action, repeated; stops where the game does."""
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
        np.maximum(self._screens[0], self._screens[1], out=self._pooled)
        frame: np.ndarray = self._resize(self._pooled, self._size, interpolation=self._by_area)
        return frame[..., None]
