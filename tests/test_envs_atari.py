"""Tests of Atari: protocols, golden frames, and a comparison with the emulator's own preprocessing.

`python tests/test_envs_atari.py` rewrites tests/data/golden_frames.json. Run it only when a protocol gets a new
version.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ale_py
import cv2
import numpy as np
import pytest

from isqn.envs import scores
from isqn.envs.adapter import make_environment
from isqn.envs.atari import MACHADO2018, REFERENCE, STREAMING, AtariGame, AtariProtocol, find_protocol

GOLDEN = Path(__file__).parent / "data" / "golden_frames.json"
CASES = [
    (game, protocol)
    for game in ("ALE/Pong-v5", "ALE/Breakout-v5", "ALE/MsPacman-v5")
    for protocol in ("machado2018-v1", "streaming-v1")
]


def golden_hash(env_id: str, protocol: str) -> str:
    """Hash the first 200 frames, rewards and flags under seed 1 and fixed actions."""
    env = make_environment(env_id, protocol=protocol)
    actions = np.random.default_rng(1)
    digest = hashlib.sha256(env.reset(1).tobytes())
    for _ in range(200):
        step = env.step(int(actions.integers(env.spec.num_actions)))
        digest.update(step.frame.tobytes() + repr(step[1:]).encode())
        if step.terminated or step.truncated:
            digest.update(env.reset(2).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("env_id", "protocol"), CASES)
def test_frames_match_the_golden_hashes(env_id, protocol):
    golden = json.loads(GOLDEN.read_text())
    versions = {"ale_py": ale_py.__version__, "cv2": cv2.__version__}
    assert golden_hash(env_id, protocol) == golden["frames"][f"{env_id} {protocol}"], (
        f"golden hashes made with {golden['versions']}, test run with {versions}"
    )


def test_frames_are_the_same_in_another_process():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_envs_atari as t; print(t.golden_hash(*t.CASES[0]))"
    process = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], check=True, capture_output=True, text=True
    )
    assert process.stdout.strip() == golden_hash(*CASES[0])


def test_protocols_have_the_documented_fields():
    assert dataclasses.asdict(MACHADO2018) == {
        "name": "machado2018-v1",
        "repeat_action_probability": 0.25,
        "life_loss_terminates": False,
        "max_noops": 0,
        "fire_at_start": False,
        "frame_cap": 108_000,
        "action_repeat": 4,
        "screen_size": 84,
        "frame_stack": 4,
    }
    assert dataclasses.asdict(STREAMING) == {
        **dataclasses.asdict(MACHADO2018),
        "name": "streaming-v1",
        "repeat_action_probability": 0.0,
        "life_loss_terminates": True,
        "max_noops": 30,
        "fire_at_start": True,
    }
    assert dataclasses.replace(MACHADO2018, name="reference-v1", frame_cap=100_000) == REFERENCE
    assert find_protocol("auto") == find_protocol("machado2018") == find_protocol("machado2018-v1") == MACHADO2018
    assert find_protocol("streaming") == STREAMING
    assert find_protocol("reference") == REFERENCE
    line = STREAMING.describe()
    assert line.startswith("streaming-v1: sticky actions 0, life loss terminates, 1-30 no-ops and FIRE")
    assert "\n" not in line


def test_spec_of_pong():
    spec = make_environment("ALE/Pong-v5", protocol="machado2018").spec
    assert (spec.id, spec.protocol) == ("ALE/Pong-v5", "machado2018-v1")
    assert (spec.frame_shape, spec.frame_dtype, spec.obs_shape) == ((84, 84, 1), "uint8", (84, 84, 4))
    assert (spec.num_actions, spec.frames_per_step) == (6, 4)


class FakeEmulator:
    """Replacement for the emulator that records its actions."""

    def __init__(self) -> None:
        self.actions: list[Any] = []

    def act(self, action: Any) -> int:
        self.actions.append(action)
        return 1

    def getScreenGrayscale(self, screen: np.ndarray) -> None:  # noqa: N802 - name in ale-py
        screen[:] = len(self.actions) % 256

    def game_over(self, with_truncation: bool = True) -> bool:
        return False

    def game_truncated(self) -> bool:
        return False

    def lives(self) -> int:
        return 0


def test_sticky_actions_repeat_the_previous_action_with_the_right_probability():
    """If actions alternate, frame i of a step still repeats the previous action with probability 0.25**(i + 1)."""
    game = AtariGame("ALE/Pong-v5", MACHADO2018)
    game.reset(seed=0)
    emulator = FakeEmulator()
    game.ale = emulator  # type: ignore[assignment]
    steps = 4000
    for t in range(steps):
        _, reward, *_ = game.step(2 + t % 2)
        assert reward == 4
    requested = [game._actions[2 + t % 2] for t in range(steps) for _ in range(4)]
    sticky = np.array([a != b for a, b in zip(emulator.actions, requested, strict=True)]).reshape(steps, 4).mean(axis=0)
    # with probability 0.25**4 the previous step ended with an older action, which is the requested one
    expected = 0.25 ** np.arange(1, 5) * (1 - 0.25**4)
    np.testing.assert_allclose(sticky, expected, atol=0.03)  # 4 standard errors of the first frame


def test_streaming_has_no_sticky_actions_and_takes_the_maximum_of_the_last_two_screens():
    game = AtariGame("ALE/Pong-v5", STREAMING)
    game.reset(seed=0)
    emulator = FakeEmulator()
    game.ale = emulator  # type: ignore[assignment]
    frame, *_ = game.step(3)
    assert emulator.actions == [game._actions[3]] * 4
    assert frame.shape == (84, 84, 1)
    assert (frame == 4).all()  # the maximum of screens 3 and 4


def test_an_episode_is_truncated_at_the_frame_cap():
    for cap, steps in ((100, 25), (102, 26)):
        game = AtariGame("ALE/Pong-v5", dataclasses.replace(MACHADO2018, name="tiny-v0", frame_cap=cap))
        for episode in range(2):
            game.reset(seed=episode)
            flags = [game.step(0)[2:4] for _ in range(steps)]
            assert flags == [(False, False)] * (steps - 1) + [(False, True)]
            assert game.ale.getEpisodeFrameNumber() == cap


def test_streaming_starts_with_no_ops_and_fire():
    frames = {}
    for env_id in ("ALE/MsPacman-v5", "ALE/Pong-v5"):  # without and with FIRE as action 1
        game = AtariGame(env_id, STREAMING)
        frames[env_id] = []
        for seed in range(12):
            game.reset(seed=seed)
            frames[env_id].append(game.ale.getEpisodeFrameNumber())
    no_ops = frames["ALE/MsPacman-v5"]
    assert min(no_ops) >= 1
    assert max(no_ops) <= 30
    assert len(set(no_ops)) > 4
    assert frames["ALE/Pong-v5"] == [n + 8 for n in no_ops]  # FIRE and action 2, four frames each
    game = AtariGame("ALE/Pong-v5", MACHADO2018)
    game.reset(seed=0)
    assert game.ale.getEpisodeFrameNumber() == 0


def test_life_loss_ends_the_episode_but_not_the_game():
    env = make_environment("ALE/Breakout-v5", protocol="streaming")
    actions = np.random.default_rng(0)
    ale = env.env.unwrapped.ale  # type: ignore[attr-defined]
    last = env.reset(0)
    game_continues = []
    while not game_continues or game_continues[-1]:
        step = env.step(int(actions.integers(4)))
        last = step.frame
        if step.terminated:
            game_continues.append(env.game_continues)
            frame_number = ale.getEpisodeFrameNumber()
            first = env.reset(99)
            if game_continues[-1]:
                np.testing.assert_array_equal(first, last)  # the game continues from the last frame
                assert ale.getEpisodeFrameNumber() == frame_number
    assert game_continues == [True] * 4 + [False]  # five lives
    assert ale.getEpisodeFrameNumber() <= 38  # new game: at most 30 no-ops, FIRE and action 2

    first = env.reset(5, restart=True)
    while not env.step(int(actions.integers(4))).terminated:
        pass
    assert env.game_continues
    np.testing.assert_array_equal(env.reset(5, restart=True), first)
    assert not env.game_continues


def test_machado2018_terminates_only_at_game_over():
    env = make_environment("ALE/Breakout-v5")
    actions = np.random.default_rng(0)
    env.reset(0)
    while True:
        step = env.step(int(actions.integers(4)))
        if step.terminated:
            break
    assert env.env.unwrapped.ale.lives() == 0  # type: ignore[attr-defined]
    assert not env.game_continues


@pytest.mark.parametrize("env_id", ["ALE/Seaquest-v5", "ALE/Assault-v5", "ALE/Qbert-v5"])
def test_a_reset_clears_the_state_of_the_previous_episode(env_id):
    """The emulator's own reset does not clear the whole memory in these games."""

    def play(game: AtariGame) -> list[np.ndarray]:
        return [game.reset(seed=3)[0]] + [game.step(t % 6)[0] for t in range(80)]

    used = AtariGame(env_id, MACHADO2018)
    for seed in range(2):
        used.reset(seed=seed)
        for t in range(50 + 7 * seed):
            used.step(t % 5)
    for a, b in zip(play(AtariGame(env_id, MACHADO2018)), play(used), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("game", ["breakout", "ms_pacman", "space_invaders"])
def test_frames_equal_those_of_ale_pys_own_preprocessing(game):
    vector = ale_py.AtariVectorEnv(
        game=game,
        num_envs=1,
        noop_max=0,
        use_fire_reset=False,
        reward_clipping=False,
        repeat_action_probability=0.0,
    )
    plain = dataclasses.replace(MACHADO2018, name="plain-v0", repeat_action_probability=0.0)
    ours = AtariGame(f"ALE/{game.title().replace('_', '')}-v5", plain)
    theirs, _ = vector.reset(seed=0)
    np.testing.assert_array_equal(theirs[0, -1], ours.reset(seed=0)[0][..., 0])
    actions = np.random.default_rng(0)
    for _ in range(250):
        action = int(actions.integers(ours.action_space.n))  # type: ignore[attr-defined]
        stack, rewards, terminations, truncations, _ = vector.step(np.array([action]))
        frame, reward, terminated, truncated, _ = ours.step(action)
        assert (rewards[0], bool(terminations[0]), bool(truncations[0])) == (reward, terminated, truncated)
        if terminated:
            break
        np.testing.assert_array_equal(stack[0, -1], frame[..., 0])
    vector.close()


def test_render_returns_the_colour_screen():
    env = make_environment("ALE/Pong-v5", render=True)
    env.reset(0)
    image = env.render()
    assert image is not None
    assert image.shape == (210, 160, 3)


def test_a_protocol_sets_action_repeat_and_screen_size():
    game = AtariGame("ALE/Pong-v5", dataclasses.replace(MACHADO2018, name="small-v0", action_repeat=2, screen_size=42))
    assert game.reset(seed=0)[0].shape == (42, 42, 1)
    game.step(0)
    assert game.ale.getEpisodeFrameNumber() == 2


def test_lists_of_games_have_the_stated_sizes_and_scores():
    lists = (scores.ATARI_15, scores.IMPALA_10, scores.OFFLINE_10, scores.STREAMING_7, scores.META_3)
    assert [len(games) for games in lists] == [15, 10, 10, 7, 3]
    assert all(len(set(games)) == len(games) and set(games) <= set(scores.SCORES) for games in lists)
    assert len(scores.SCORES) == 16


def test_minimal_action_sets_have_the_sizes_in_the_score_table():
    from ale_py import roms

    for game, score in scores.SCORES.items():
        ale = ale_py.ALEInterface()
        rom = "".join("_" + c.lower() if c.isupper() else c for c in game).lstrip("_")
        ale.loadROM(str(roms.get_rom_path(rom)))
        assert len(ale.getMinimalActionSet()) == score.num_actions, game


def test_protocol_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MACHADO2018.frame_cap = 1  # type: ignore[misc]
    assert isinstance(MACHADO2018, AtariProtocol)


if __name__ == "__main__":
    contents = {
        "versions": {"ale_py": ale_py.__version__, "cv2": cv2.__version__},
        "frames": {f"{game} {protocol}": golden_hash(game, protocol) for game, protocol in CASES},
    }
    GOLDEN.write_text(json.dumps(contents, indent=2) + "\n")
