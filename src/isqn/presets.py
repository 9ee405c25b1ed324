"""Named settings: those of the paper's Tables 1 to 3 and of its text on streaming, and small ones of our own.

A setting has its name in the config of its agent. Units are in the names: `_steps` agent steps, `_frames` frames of the
emulator or the simulator, `_updates` gradient steps. Values that no table gives are listed apart, with their source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from isqn.agents.cql import CqlConfig
from isqn.agents.dqn import DqnConfig
from isqn.agents.registry import config_class, find_agent, make_config
from isqn.agents.sac import SacConfig
from isqn.agents.stream_q import StreamQConfig
from isqn.config.fields import field_names, nearest
from isqn.config.run import Run
from isqn.envs import toy
from isqn.envs.scores import DMC_HARD_7
from isqn.language.agent import IlqlConfig
from isqn.types import UserError


class Preset(NamedTuple):
    """Named settings of `isqn train AGENT`."""

    description: str
    config: Run

    @property
    def agent(self) -> str:
        return self.config.agent


# Paper, Table 1, "Shared hyperparameters". The protocol has sticky actions (0.25) and game over (appendix A).
_SHARED: dict[str, Any] = {
    "protocol": "machado2018",
    "discount": 0.99,
    "max_episode_steps": 27_000,
    "reward_clip": 1.0,
    "batch_size": 32,
}
# Paper, Table 1, "DQN hyperparameters".
_ATARI: dict[str, Any] = _SHARED | {
    "env_id": "ALE/Asterix-v5",
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
# Paper, Table 1, "CQL hyperparameters", with the network of section 5.2.
_ATARI_CQL: dict[str, Any] = _SHARED | {
    "env_id": "ALE/Pong-v5",
    "torso": "impala",
    "layer_norm": True,
    "loss": "cql",
    "epoch_updates": 62_500,
    "target_update_period": 2_000,  # updates
    "learning_rate": 5e-5,
    "adam_epsilon": 3.125e-4,
    "conservative_weight": 0.1,
    # not specified in the paper; the authors' slimCQL
    "num_updates": 3_125_000,  # 50 epochs
    "evaluation_steps": 125_000,
    # not specified in the paper
    "log_period_updates": 2_500,
}
_CQL: dict[str, Any] = {"loss": "cql", "conservative_weight": 0.1, "batch_size": 32, "discount": 0.99}
# Paper, Table 2. By default, `joint_batch_norm` gives BatchNorm to TF and iS only, as there.
_DMC: dict[str, Any] = {
    "discount": 0.99,
    "protocol": "action-repeat-2",
    "max_episode_steps": 1_000,  # H; the suite itself ends an episode after 1,000 frames, which are 500 agent steps
    "batch_size": 256,
    "torso": "simba",
    "target_step_size": 5e-3,
    "buffer_size": 1_000_000,
    "learning_rate": 1e-4,
    "learning_rate_end": 1e-5,
    "twin_q": False,
    "num_atoms": 101,
    "head_weight_discount": 0.25,  # section 5.3
    # not specified in the paper; the code of SimbaV2 (Lee et al. 2025), whose details the paper follows
    "updates_per_step": 2,
    "target_update_period": 1,
    "adam_epsilon": 1e-8,
    "policy_width": 128,
    "policy_blocks": 1,
    "critic_blocks": 2,
    "value_bound": 5.0,
    "entropy_temperature_start": 0.01,
    "target_entropy_per_action": -0.5,
    "normalise_observations": True,
    "normalise_rewards": True,
}
_DMC_HARD: dict[str, Any] = _DMC | {
    "env_id": "dm_control/dog-walk-v0",
    "critic_width": 512,  # the hidden layer of the heads
    "total_timesteps": 500_000,
    "learning_starts": 5_000,
    # not specified in the paper; the code of SimbaV2
    "learning_rate_decay_steps": 500_000,
    # not specified in the paper
    "epoch_steps": 10_000,  # 20 episodes
    "log_period_steps": 1_000,
}
# Paper, Table 3.
_WORDLE: dict[str, Any] = {
    "discount": 0.99,
    "batch_size": 1_024,
    "num_layers": 12,  # GPT-2 small
    "model_width": 768,
    "attention_heads": 12,
    "num_positions": 1_024,
    "dropout": 0.1,
    "head_hidden_size": 1_536,
    "num_updates": 37_500,  # of 16 micro-batches each: the paper's 600,000 gradient steps, see below
    "target_step_size": 5e-3,
    "learning_rate": 1e-5,
    "inverse_temperature": 4.0,
    "conservative_weight": 1e-4,
    # not specified in the paper; the code of ILQL (Snell et al. 2023), of which the paper's is a fork
    "micro_batch_size": 64,  # the code of ILQL counts each micro-batch as a step
    "target_update_period": 1,
    "adam_epsilon": 1e-8,
    "expectile_level": 0.7,
    "word_list": "answers-200",
    # not specified in the paper
    "epoch_updates": 625,  # 60 evaluations
    "log_period_updates": 25,
}
# Ours: 40 words, and players whose guesses are mostly careless, so that the values of guesses matter.
_WORDLE_MINI: dict[str, Any] = {
    "discount": 0.99,
    "batch_size": 32,
    "num_layers": 2,
    "model_width": 64,
    "attention_heads": 4,
    "num_positions": 74,
    "micro_batch_size": 8,  # on a CPU 0.7 of the time of 32 at once: memory is reused between updates
    "dropout": 0.0,
    "head_hidden_size": 128,
    "learning_rate": 1e-3,
    "num_words": 40,
    "players": "mixture",
    "careless_share": 0.6,
    "target_step_size": 0.05,  # the best of 0.005 to 0.3 for iS (results/tuning-language.csv)
    "num_updates": 2_500,
    "epoch_updates": 100,
    "log_period_updates": 50,
}
# Paper, appendix A, "Streaming RL setup", and section 5.5. Other values are those of Table 1.
_STREAM: dict[str, Any] = {
    "discount": 0.99,
    "obgd_kappa": 2.0,
    "trace_decay": 0.8,
    # not specified in the paper; the code of Stream Q (Elsayed et al. 2024)
    "epsilon_start": 1.0,
    "epsilon_end": 0.01,
}
_ATARI_STREAM: dict[str, Any] = _STREAM | {
    "env_id": "ALE/Breakout-v5",
    "protocol": "streaming",  # no-ops at the start, a lost life ends the episode, no sticky actions
    "max_episode_steps": 27_000,
    "torso": "stream",  # 256 units; strides 5, 3, 2 and no padding as in the code of Stream Q
    # not specified in the paper; the code of Stream Q
    "epsilon_decay_steps": 1_250_000,  # 5 % of a run; slimStreamQ has 12.5M, which looks like a slip
    # not specified in the paper; the authors' slimStreamQ
    "epoch_steps": 250_000,
    "total_timesteps": 25_000_000,
    # not specified in the paper
    "log_period_steps": 10_000,
}

PRESETS: dict[str, Preset] = {
    "atari-cnn-ln": Preset(
        "main setting of the paper: Nature CNN with LayerNorm",
        DqnConfig(**(_ATARI | {"torso": "nature", "layer_norm": True})),
    ),
    "atari-cnn": Preset("Nature CNN without normalisation", DqnConfig(**(_ATARI | {"torso": "nature"}))),
    "atari-batchnorm": Preset(
        "Nature CNN with BatchNorm after each activation (paper, F.3)",
        DqnConfig(**(_ATARI | {"torso": "nature", "batch_norm": True})),
    ),
    "atari-impala-ln": Preset("IMPALA with LayerNorm", DqnConfig(**(_ATARI | {"torso": "impala", "layer_norm": True}))),
    "atari-smoke": Preset(
        "main setting of the paper, shortened to check that Atari runs on a laptop",
        DqnConfig(
            **(
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
                }
            )
        ),
    ),
    "atari-cql": Preset("offline CQL on Atari: IMPALA with LayerNorm", CqlConfig(**_ATARI_CQL)),
    "atari-stream": Preset("Stream Q(λ) on Atari, without replay and batches", StreamQConfig(**_ATARI_STREAM)),
    "atari-stream-smoke": Preset(
        "Stream Q(λ) on Atari, shortened to check that it runs on a laptop",
        StreamQConfig(
            **(
                _ATARI_STREAM
                | {
                    "epsilon_decay_steps": 1_000,
                    "epoch_steps": 5_000,
                    "log_period_steps": 1_000,
                    "total_timesteps": 20_000,
                }
            )
        ),
    ),
    # Ours: network and share of exploration of the code of Stream Q on MinAtar, which trains for 5M steps.
    "minatar-stream": Preset(
        "Stream Q(λ) on MinAtar in the compiled loop",
        StreamQConfig(
            **(
                _STREAM
                | {
                    "env_id": "MinAtar/Breakout-v1",
                    "torso": "minatar",
                    "epsilon_decay_steps": 200_000,
                    "epoch_steps": 50_000,
                    "log_period_steps": 5_000,
                    "total_timesteps": 1_000_000,
                }
            )
        ),
    ),
    "classic-stream": Preset(
        "Stream Q(λ) on vector observations: MLP 2 × 128",
        StreamQConfig(
            **(
                _STREAM
                | {
                    "env_id": "Acrobot-v1",
                    "hidden_sizes": (128, 128),
                    "epsilon_decay_steps": 40_000,
                    "epoch_steps": 10_000,
                    "log_period_steps": 1_000,
                    "total_timesteps": 200_000,
                }
            )
        ),
    ),
    "toy-stream": Preset(
        "Stream Q(λ) on a toy problem with known values, in seconds",
        StreamQConfig(
            **(
                _STREAM
                | {
                    "env_id": "isqn/Chain-v0",
                    "hidden_sizes": (64,),
                    "discount": 0.9,
                    "epsilon_decay_steps": 5_000,
                    "epsilon_end": 0.1,
                    "epoch_steps": 2_000,
                    "log_period_steps": 500,
                    "total_timesteps": 20_000,
                }
            )
        ),
    ),
    "dmc-hard": Preset("SAC with SimbaV2 on the hard tasks of the DeepMind Control suite", SacConfig(**_DMC_HARD)),
    # Ours: a critic of an eighth of the width, half the batch, a fraction of the steps.
    "dmc-small": Preset(
        "SAC with a small SimbaV2 critic on the DeepMind Control suite, on a laptop",
        SacConfig(
            **(
                _DMC
                | {
                    "env_id": "dm_control/cartpole-swingup-v0",
                    "batch_size": 128,
                    "critic_width": 64,
                    "policy_width": 64,
                    "total_timesteps": 20_000,
                    "learning_starts": 1_000,
                    "learning_rate_decay_steps": 20_000,
                    "epoch_steps": 1_000,
                    "log_period_steps": 500,
                }
            )
        ),
    ),
    # Ours: the layer sizes of the first SAC (Haarnoja et al. 2018).
    "continuous": Preset(
        "SAC on any task with continuous actions: MLP 2 × 256, two critics",
        SacConfig(env_id="Pendulum-v1", twin_q=True, total_timesteps=20_000, epoch_steps=2_000, log_period_steps=500),
    ),
    # Ours: network and learning rate of the online runs that log the datasets.
    "minatar-cql": Preset(
        "offline CQL on MinAtar",
        CqlConfig(
            **(
                _CQL
                | {
                    "env_id": "MinAtar/Breakout-v1",
                    "torso": "minatar",
                    "learning_rate": 2.5e-4,
                    "target_update_period": 100,
                    "num_updates": 30_000,  # as in the paper, each of 50,000 transitions is then drawn about 20 times
                    "epoch_updates": 3_000,
                    "log_period_updates": 1_000,
                    "evaluation_steps": 25_000,
                    "evaluation_environments": 25,
                }
            )
        ),
    ),
    "classic-cql": Preset(
        "offline CQL on vector observations: MLP 2 × 128",
        CqlConfig(
            **(
                _CQL
                | {
                    "env_id": "CartPole-v1",
                    "hidden_sizes": (128, 128),
                    "learning_rate": 1e-3,
                    "target_update_period": 100,
                    "num_updates": 20_000,
                    "epoch_updates": 2_000,
                    "log_period_updates": 500,
                }
            )
        ),
    ),
    "toy-cql": Preset(
        "offline CQL on a toy problem with known values, in seconds",
        CqlConfig(
            **(
                _CQL
                | {
                    "env_id": "isqn/Chain-v0",
                    "hidden_sizes": (64,),
                    "discount": 0.9,
                    "learning_rate": 1e-3,
                    "target_update_period": 50,
                    "num_updates": 5_000,
                    "epoch_updates": 1_000,
                    "log_period_updates": 500,
                    "evaluation_steps": 1_000,
                }
            )
        ),
    ),
    "wordle": Preset("ILQL with GPT-2 small on Wordle", IlqlConfig(**_WORDLE)),
    "wordle-mini": Preset("ILQL with two small layers on 40 words of Wordle, on a laptop", IlqlConfig(**_WORDLE_MINI)),
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


def presets_of(agent: str) -> tuple[str, ...]:
    """Return the names of the presets that fit an agent."""
    owner = find_agent(agent).presets_of
    return tuple(name for name, preset in PRESETS.items() if preset.agent == owner)


def preset_config(name: str, agent: str | None = None) -> Run:
    """Return the settings of a preset for `isqn train AGENT`; for its own agent if none is named."""
    if name not in PRESETS:
        raise UserError(f"The preset {name!r} is not known; {nearest(name, presets_of(agent) if agent else PRESETS)}")
    preset = PRESETS[name]
    agent = agent or preset.agent
    if name not in presets_of(agent):
        raise UserError(
            f"--preset {name} is for `isqn train {preset.agent}`; "
            f"the presets of `isqn train {agent}` are {', '.join(presets_of(agent))}."
        )
    if agent == preset.agent:
        return make_config(agent, **asdict(preset.config))
    # An agent that shares the presets of another one keeps its own defaults where the preset keeps those of its agent.
    defaults, known = asdict(make_config(preset.agent)), field_names(config_class(agent))
    changed = {n: value for n, value in asdict(preset.config).items() if n in known and value != defaults[n]}
    return make_config(agent, **changed)


def preset_for(env_id: str, agent: str = "dqn") -> str:
    """Return the name of the preset that fits an environment if none is asked for."""
    by_kind = _DEFAULT_PRESETS[find_agent(agent).presets_of]
    return next(name for fits, name in by_kind if fits(env_id))


def _is_atari(env_id: str) -> bool:
    return env_id.startswith("ALE/")


def _is_minatar(env_id: str) -> bool:
    return env_id.startswith("MinAtar/")


def _is_toy(env_id: str) -> bool:
    return env_id in toy.PROBLEMS


def _is_hard_control(env_id: str) -> bool:
    return _is_control(env_id) and env_id.removeprefix("dm_control/").removesuffix("-v0") in DMC_HARD_7


def _is_control(env_id: str) -> bool:
    return env_id.startswith("dm_control/")


def _is_any(env_id: str) -> bool:
    return True


def _by_environment(suffix: str, atari: str) -> tuple[tuple[Callable[[str], bool], str], ...]:
    names = (atari, f"minatar{suffix}", f"toy{suffix}", f"classic{suffix}")
    return tuple(zip((_is_atari, _is_minatar, _is_toy, _is_any), names, strict=True))


# Agent -> its presets in order, each with the environments that it fits.
_DEFAULT_PRESETS = {
    "dqn": _by_environment("", "atari-cnn-ln"),
    "stream-q": _by_environment("-stream", "atari-stream"),
    "cql": _by_environment("-cql", "atari-cql"),
    "sac": ((_is_hard_control, "dmc-hard"), (_is_control, "dmc-small"), (_is_any, "continuous")),
    "ilql": ((_is_any, "wordle-mini"),),
}


def default_config(agent: str, env_id: str | None = None) -> Run:
    """Return the settings that fit an environment if no preset is asked for."""
    env_id = env_id or make_config(agent).env_id
    if not presets_of(agent):
        return make_config(agent, env_id=env_id)
    return preset_config(preset_for(env_id, agent), agent).replace(env_id=env_id)
