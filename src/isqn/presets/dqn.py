"""Presets of `isqn train dqn`."""

from __future__ import annotations

from typing import Any

from isqn.agents.dqn import DqnConfig
from isqn.presets.preset import Choices, Preset, is_any, is_atari, is_minatar, is_toy

# Paper, Table 1, "Shared hyperparameters". The protocol has sticky actions (0.25) and game over (appendix A).
ATARI_SHARED: dict[str, Any] = {
    "protocol": "machado2018",
    "discount": 0.99,
    "max_episode_steps": 27_000,
    "reward_clip": 1.0,
    "batch_size": 32,
}
# Paper, Table 1, "DQN hyperparameters".
_ATARI = DqnConfig(
    **ATARI_SHARED,
    env_id="ALE/Asterix-v5",
    epoch_steps=250_000,
    target_update_period=8_000,
    learning_starts=20_000,
    buffer_size=1_000_000,
    update_period=4,
    epsilon_start=1.0,
    epsilon_end=0.01,
    epsilon_decay_steps=250_000,
    learning_rate=6.25e-5,
    adam_epsilon=1.5e-4,
    total_timesteps=25_000_000,  # 100 epochs: 100M frames
    log_period_steps=8_000,  # probes are averaged over a target period
)
_ATARI_CNN_LN = _ATARI.replace(torso="nature", layer_norm=True)

PRESETS = {
    "atari-cnn-ln": Preset("main setting of the paper: Nature CNN with LayerNorm", _ATARI_CNN_LN),
    "atari-cnn": Preset("Nature CNN without normalisation", _ATARI.replace(torso="nature")),
    "atari-batchnorm": Preset(
        "Nature CNN with BatchNorm after each activation (paper, F.3)", _ATARI.replace(torso="nature", batch_norm=True)
    ),
    "atari-impala-ln": Preset("IMPALA with LayerNorm", _ATARI.replace(torso="impala", layer_norm=True)),
    "atari-smoke": Preset(
        "main setting of the paper, shortened to check that Atari runs on a laptop",
        _ATARI_CNN_LN.replace(
            buffer_size=20_000,
            learning_starts=1_000,
            epsilon_decay_steps=5_000,
            target_update_period=1_000,
            epoch_steps=5_000,
            log_period_steps=1_000,
            total_timesteps=10_000,
        ),
    ),
    # Ours: network sizes of Young & Tian 2019; update period and schedules in proportion to the paper's.
    "minatar": Preset(
        "MinAtar in the compiled loop",
        DqnConfig(
            env_id="MinAtar/Breakout-v1",
            buffer_size=100_000,
            learning_starts=5_000,
            epsilon_decay_steps=100_000,
            epsilon_end=0.01,
            update_period=4,
            target_update_period=1_000,
            learning_rate=2.5e-4,
            epoch_steps=25_000,
            log_period_steps=5_000,
            total_timesteps=1_000_000,
        ),
    ),
    "classic": Preset(
        "classic control in the compiled loop: MLP 2 × 128, T = 200",
        DqnConfig(
            env_id="Acrobot-v1",
            hidden_sizes=(128, 128),
            buffer_size=50_000,
            learning_starts=1_000,
            epsilon_decay_steps=20_000,
            target_update_period=200,
            learning_rate=1e-3,
            epoch_steps=10_000,
            log_period_steps=1_000,
            total_timesteps=200_000,
        ),
    ),
    "toy": Preset(
        "a toy problem with known values, in seconds",
        DqnConfig(
            env_id="isqn/Chain-v0",
            hidden_sizes=(64,),
            discount=0.9,
            buffer_size=10_000,
            learning_starts=500,  # the length of a row of metrics, which saves compiling a program
            epsilon_decay_steps=5_000,
            epsilon_end=0.1,  # keeps exploring, so that all values are learned
            target_update_period=50,
            epoch_steps=2_000,
            log_period_steps=500,
            total_timesteps=10_000,
        ),
    ),
}
DEFAULTS: Choices = ((is_atari, "atari-cnn-ln"), (is_minatar, "minatar"), (is_toy, "toy"), (is_any, "classic"))
SHORT: Choices = ((is_atari, "atari-smoke"),)
