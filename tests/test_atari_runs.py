"""Runs at the paper's Atari settings and network sizes, but of few steps, train and resume to the same bits."""

from __future__ import annotations

import pytest

from helpers import assert_same, final, stop_after
from isqn.data.text import read_table
from isqn.envs.adapter import make_environment
from isqn.presets import preset_config
from isqn.train import checkpoint, run
from isqn.types import Interrupted

FEW = {
    "learning_starts": 64,
    "total_timesteps": 120,
    "epoch_steps": 120,
    "max_episode_steps": 50,
    "log_period_steps": 40,
    "target_update_period": 80,
}


@pytest.mark.parametrize(
    ("preset", "game", "scheme", "k"),
    [
        ("atari-cnn-ln", "Asterix", "iterated-shared", 9),
        pytest.param("atari-cnn", "Pong", "target-based", 1, marks=pytest.mark.slow),
        pytest.param("atari-cnn-ln", "Breakout", "iterated-target-based", 4, marks=pytest.mark.slow),
        pytest.param("atari-impala-ln", "Tutankham", "iterated-shared", 9, marks=pytest.mark.slow),
        pytest.param("atari-impala-ln", "VideoPinball", "ensemble-shared", 5, marks=pytest.mark.slow),
    ],
)
def test_a_preset_trains_and_resumes_to_the_same_bits(preset, game, scheme, k, tmp_path, monkeypatch):
    config = preset_config(preset).replace(env_id=f"ALE/{game}-v5", scheme=scheme, num_bellman_iterations=k, **FEW)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run.start(config, whole, quiet=True)
    stop_after(monkeypatch, 75)  # in the middle of an episode, after three updates
    with pytest.raises(Interrupted):
        run.start(config, cut, quiet=True)
    monkeypatch.undo()
    assert checkpoint.steps(cut) == [76]
    run.resume(cut, quiet=True)
    assert_same(final(cut), final(whole))
    rows = read_table(whole / "metrics.csv")
    assert rows[-1]["frame"] == "480"
    assert float(rows[-1]["loss"]) > 0


def test_the_seed_and_the_actions_restore_a_game():
    """Sticky actions are drawn from the seed of the episode, so nothing else decides the frames."""
    first, second = (make_environment("ALE/SpaceInvaders-v5") for _ in range(2))
    first.reset(11)
    actions = [0, 1, 3, 2, 1, 4, 5, 0] * 5
    for action in actions:
        last = first.step(action).frame
    second.reset(999)
    second.reset(11)
    for action in actions:
        again = second.step(action).frame
    assert (last == again).all()
