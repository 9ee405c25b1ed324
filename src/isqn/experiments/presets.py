"""Named settings. The paper's are its Table 1 (Atari), field by field; the small ones are ours and say so."""

from __future__ import annotations

from typing import Any, NamedTuple

from isqn.experiments.config import Config, nearest
from isqn.types import UserError


class Preset(NamedTuple):
    description: str
    fields: dict[str, Any]


# Paper, Table 1: "Shared hyperparameters" and "DQN hyperparameters".
_ATARI = {
    "env_id": "ALE/Asterix-v5",
    "protocol": "machado2018",
    "discount": 0.99,
    "max_episode_steps": 27_000,
    "reward_clip": 1.0,
    "batch_size": 32,
    "epoch_steps": 250_000,
    "target_update_period": 8_000,
    "learning_starts": 20_000,
    "buffer_size": 1_000_000,
    "update_period": 4,
    "epsilon_start": 1.0,
    "epsilon_end": 0.01,
    "epsilon_decay_steps": 250_000,
    "learning_rate": 6.25e-5,
    "adam_epsilon": 1.5e-4,
    "total_timesteps": 25_000_000,  # 100 epochs: 100M frames
    "log_period_steps": 8_000,  # probes are averaged over a target period
}

PRESETS: dict[str, Preset] = {
    "atari-cnn-ln": Preset(
        "the paper's main setting: Nature CNN with LayerNorm", _ATARI | {"torso": "nature", "layer_norm": True}
    ),
    "atari-cnn": Preset("Nature CNN without normalisation", _ATARI | {"torso": "nature"}),
    "atari-impala-ln": Preset("IMPALA with LayerNorm", _ATARI | {"torso": "impala", "layer_norm": True}),
    "atari-smoke": Preset(
        "the paper's main setting, cut short: Atari on a laptop, to see that it runs",
        _ATARI
        | {
            "torso": "nature",
            "layer_norm": True,
            "buffer_size": 20_000,
            "learning_starts": 1_000,
            "epsilon_decay_steps": 5_000,
            "target_update_period": 1_000,
            "epoch_steps": 5_000,
            "log_period_steps": 1_000,
            "total_timesteps": 10_000,
        },
    ),
    # Ours: the sizes of Young & Tian 2019, the paper's update period and schedule in proportion.
    "minatar": Preset(
        "MinAtar in the compiled loop",
        {
            "env_id": "MinAtar/Breakout-v1",
            "buffer_size": 100_000,
            "learning_starts": 5_000,
            "epsilon_decay_steps": 100_000,
            "epsilon_end": 0.01,
            "update_period": 4,
            "target_update_period": 1_000,
            "learning_rate": 2.5e-4,
            "epoch_steps": 25_000,
            "log_period_steps": 5_000,
            "total_timesteps": 1_000_000,
        },
    ),
    "classic": Preset(
        "classic control in the compiled loop: MLP 2 × 128, T = 200",
        {
            "env_id": "Acrobot-v1",
            "hidden_sizes": (128, 128),
            "buffer_size": 50_000,
            "learning_starts": 1_000,
            "epsilon_decay_steps": 20_000,
            "target_update_period": 200,
            "learning_rate": 1e-3,
            "epoch_steps": 10_000,
            "log_period_steps": 1_000,
            "total_timesteps": 200_000,
        },
    ),
    "toy": Preset(
        "a problem with known values, in seconds",
        {
            "env_id": "isqn/Chain-v0",
            "hidden_sizes": (64,),
            "discount": 0.9,
            "buffer_size": 10_000,
            "learning_starts": 500,  # as long as a row of metrics: one program less to compile
            "epsilon_decay_steps": 5_000,
            "epsilon_end": 0.1,  # every action goes on being tried, so that all values are learned
            "target_update_period": 50,
            "epoch_steps": 2_000,
            "log_period_steps": 500,
            "total_timesteps": 10_000,
        },
    ),
}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise UserError(f"--preset {name!r} is not known; {nearest(name, PRESETS)}")
    return PRESETS[name]


def preset_config(name: str) -> Config:
    return Config(**find_preset(name).fields)


def preset_for(env_id: str) -> str:
    """What fits an environment if nothing is asked for."""
    if env_id.startswith("ALE/"):
        return "atari-cnn-ln"
    if env_id.startswith("MinAtar/"):
        return "minatar"
    return "toy" if env_id.startswith("isqn/") else "classic"
