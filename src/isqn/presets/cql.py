"""Presets of `isqn train cql`."""

from __future__ import annotations

from isqn.agents.cql import CqlConfig
from isqn.presets.dqn import ATARI_SHARED
from isqn.presets.preset import Choices, Preset, is_any, is_atari, is_minatar, is_toy

# Paper, Table 1, "CQL hyperparameters", with the network of section 5.2.
_ATARI = CqlConfig(
    **ATARI_SHARED,
    env_id="ALE/Pong-v5",
    torso="impala",
    layer_norm=True,
    loss="cql",
    epoch_updates=62_500,
    target_update_period=2_000,  # updates
    learning_rate=5e-5,
    adam_epsilon=3.125e-4,
    conservative_weight=0.1,
    # not specified in the paper; the authors' slimCQL
    num_updates=3_125_000,  # 50 epochs
    evaluation_steps=125_000,
    # not specified in the paper
    log_period_updates=2_500,
)

PRESETS = {
    "atari-cql": Preset("offline CQL on Atari: IMPALA with LayerNorm", _ATARI),
    # Ours: network and learning rate of the online runs that log the datasets.
    "minatar-cql": Preset(
        "offline CQL on MinAtar",
        CqlConfig(
            env_id="MinAtar/Breakout-v1",
            torso="minatar",
            learning_rate=2.5e-4,
            target_update_period=100,
            num_updates=30_000,  # as in the paper, each of 50,000 transitions is then drawn about 20 times
            epoch_updates=3_000,
            log_period_updates=1_000,
            evaluation_steps=25_000,
            evaluation_environments=25,
        ),
    ),
    "classic-cql": Preset(
        "offline CQL on vector observations: MLP 2 × 128",
        CqlConfig(
            env_id="CartPole-v1",
            hidden_sizes=(128, 128),
            learning_rate=1e-3,
            target_update_period=100,
            num_updates=20_000,
            epoch_updates=2_000,
            log_period_updates=500,
        ),
    ),
    "toy-cql": Preset(
        "offline CQL on a toy problem with known values, in seconds",
        CqlConfig(
            env_id="isqn/Chain-v0",
            hidden_sizes=(64,),
            discount=0.9,
            learning_rate=1e-3,
            target_update_period=50,
            num_updates=5_000,
            epoch_updates=1_000,
            log_period_updates=500,
            evaluation_steps=1_000,
        ),
    ),
}
DEFAULTS: Choices = (
    (is_atari, "atari-cql"),
    (is_minatar, "minatar-cql"),
    (is_toy, "toy-cql"),
    (is_any, "classic-cql"),
)
