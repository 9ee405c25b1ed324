"""Presets of `isqn train stream-q`."""

from __future__ import annotations

from isqn.agents.stream_q import StreamQConfig
from isqn.presets.preset import Choices, Preset, is_any, is_atari, is_minatar, is_toy

# Paper, appendix A, "Streaming RL setup", and section 5.5. Other values are those of Table 1.
_STREAM = StreamQConfig(
    discount=0.99,
    obgd_kappa=2.0,
    trace_decay=0.8,
    # not specified in the paper; the code of Stream Q (Elsayed et al. 2024)
    epsilon_start=1.0,
    epsilon_end=0.01,
)
_ATARI = _STREAM.replace(
    env_id="ALE/Breakout-v5",
    protocol="streaming",  # no-ops at the start, a lost life ends the episode, no sticky actions
    max_episode_steps=27_000,
    torso="stream",  # 256 units; strides 5, 3, 2 and no padding as in the code of Stream Q
    # not specified in the paper; the code of Stream Q
    epsilon_decay_steps=1_250_000,  # 5 % of a run; slimStreamQ has 12.5M, which looks like a slip
    # not specified in the paper; the authors' slimStreamQ
    epoch_steps=250_000,
    total_timesteps=25_000_000,
    # not specified in the paper
    log_period_steps=10_000,
)

PRESETS = {
    "atari-stream": Preset("Stream Q(λ) on Atari, without replay and batches", _ATARI),
    "atari-stream-smoke": Preset(
        "Stream Q(λ) on Atari, shortened to check that it runs on a laptop",
        _ATARI.replace(epsilon_decay_steps=1_000, epoch_steps=5_000, log_period_steps=1_000, total_timesteps=20_000),
    ),
    # Ours: network and share of exploration of the code of Stream Q on MinAtar, which trains for 5M steps.
    "minatar-stream": Preset(
        "Stream Q(λ) on MinAtar in the compiled loop",
        _STREAM.replace(
            env_id="MinAtar/Breakout-v1",
            torso="minatar",
            epsilon_decay_steps=200_000,
            epoch_steps=50_000,
            log_period_steps=5_000,
            total_timesteps=1_000_000,
        ),
    ),
    "classic-stream": Preset(
        "Stream Q(λ) on vector observations: MLP 2 × 128",
        _STREAM.replace(
            env_id="Acrobot-v1",
            hidden_sizes=(128, 128),
            epsilon_decay_steps=40_000,
            epoch_steps=10_000,
            log_period_steps=1_000,
            total_timesteps=200_000,
        ),
    ),
    "toy-stream": Preset(
        "Stream Q(λ) on a toy problem with known values, in seconds",
        _STREAM.replace(
            env_id="isqn/Chain-v0",
            hidden_sizes=(64,),
            discount=0.9,
            epsilon_decay_steps=5_000,
            epsilon_end=0.1,
            epoch_steps=2_000,
            log_period_steps=500,
            total_timesteps=20_000,
        ),
    ),
}
DEFAULTS: Choices = (
    (is_atari, "atari-stream"),
    (is_minatar, "minatar-stream"),
    (is_toy, "toy-stream"),
    (is_any, "classic-stream"),
)
SHORT: Choices = ((is_atari, "atari-stream-smoke"),)
