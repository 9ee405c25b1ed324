"""Presets of `isqn train sac`."""

from __future__ import annotations

from isqn.agents.sac import SacConfig
from isqn.presets.preset import Choices, Preset, is_any, is_control, is_hard_control

# Paper, Table 2. By default, `joint_batch_norm` gives BatchNorm to TF and iS only, as there.
_DMC = SacConfig(
    discount=0.99,
    protocol="action-repeat-2",
    max_episode_steps=1_000,  # H; the suite itself ends an episode after 1,000 frames, which are 500 agent steps
    batch_size=256,
    torso="simba",
    target_step_size=5e-3,
    buffer_size=1_000_000,
    learning_rate=1e-4,
    learning_rate_end=1e-5,
    twin_q=False,
    num_atoms=101,
    head_weight_discount=0.25,  # section 5.3
    # not specified in the paper; the code of SimbaV2 (Lee et al. 2025), whose details the paper follows
    updates_per_step=2,
    target_update_period=1,
    adam_epsilon=1e-8,
    policy_width=128,
    policy_blocks=1,
    critic_blocks=2,
    value_bound=5.0,
    entropy_temperature_start=0.01,
    target_entropy_per_action=-0.5,
    normalise_observations=True,
    normalise_rewards=True,
)

PRESETS = {
    "dmc-hard": Preset(
        "SAC with SimbaV2 on the hard tasks of the DeepMind Control suite",
        _DMC.replace(
            env_id="dm_control/dog-walk-v0",
            critic_width=512,  # the hidden layer of the heads
            total_timesteps=500_000,
            learning_starts=5_000,
            # not specified in the paper; the code of SimbaV2
            learning_rate_decay_steps=500_000,
            # not specified in the paper
            epoch_steps=10_000,  # 20 episodes
            log_period_steps=1_000,
        ),
    ),
    # Ours: a critic of an eighth of the width, half the batch, a fraction of the steps.
    "dmc-small": Preset(
        "SAC with a small SimbaV2 critic on the DeepMind Control suite, on a laptop",
        _DMC.replace(
            env_id="dm_control/cartpole-swingup-v0",
            batch_size=128,
            critic_width=64,
            policy_width=64,
            total_timesteps=20_000,
            learning_starts=1_000,
            learning_rate_decay_steps=20_000,
            epoch_steps=1_000,
            log_period_steps=500,
        ),
    ),
    # Ours: the layer sizes of the first SAC (Haarnoja et al. 2018).
    "continuous": Preset(
        "SAC on any task with continuous actions: MLP 2 × 256, two critics",
        SacConfig(env_id="Pendulum-v1", twin_q=True, total_timesteps=20_000, epoch_steps=2_000, log_period_steps=500),
    ),
}
DEFAULTS: Choices = ((is_hard_control, "dmc-hard"), (is_control, "dmc-small"), (is_any, "continuous"))
SHORT: Choices = ((is_hard_control, "dmc-small"),)
