"""Settings of every run, and of the kinds of runs: those that act in an environment, and those that learn from data.

The docstring of a field is its line in `--help` and its comment in `config.toml`. If the rest of the program reads a
setting that only some agents have, `Run` has a class attribute of that name for the others.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from isqn.config import fields
from isqn.config.fields import (
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    INPUT_PATH,
    JSON_FLAG,
    JSON_LIST,
    JSON_OBJECT,
    MAX_INTEGER,
    MAY_CHANGE,
    NONE_OR_NUMBER,
    POSITIVE,
    PROBABILITY,
    SIZE,
    Needs,
    Range,
    alias,
    require,
)
from isqn.schemes import SCHEMES, TargetScheme, make_scheme
from isqn.types import EnvSpec, UserError


def _has_several_heads(config: Any) -> bool:
    return make_scheme(config.scheme, 2) != make_scheme(config.scheme, 1)


NEEDS_REFRESH = Needs(lambda config: config.target_scheme.refreshes, "another --scheme than target-free")

# Types of settings whose default differs from agent to agent.
TargetUpdatePeriod = Annotated[int, AT_LEAST_ONE, NEEDS_REFRESH, alias("target-network-frequency")]
TargetStepSize = Annotated[float, Range(0, 1, open_low=True), NEEDS_REFRESH, alias("tau")]
LearningRate = Annotated[float, AT_LEAST_ZERO]
LearningStarts = Annotated[int, AT_LEAST_ZERO, alias("min-replay-history")]
EnvKwargs = Annotated[str, JSON_OBJECT, JSON_FLAG]
EnvWrappers = Annotated[str, JSON_LIST, JSON_FLAG]
RewardClip = Annotated[float | None, POSITIVE, NONE_OR_NUMBER]
TrainingLoop = Literal["auto", "host", "compiled"]


@dataclass(frozen=True)
class Run:
    """Settings of every run."""

    agent: ClassVar[str]  # name of the agent in the registry

    env_id: str = "isqn/Chain-v0"
    """Environment: a Gymnasium id, `module:Env-v0`, ALE/Game-v5, MinAtar/Game-v1 or dm_control/task-v0."""
    scheme: Literal[tuple(SCHEMES)] = "iterated-shared"  # type: ignore[valid-type]
    """Target scheme: which heads learn from which (`isqn list schemes`)."""
    num_bellman_iterations: Annotated[
        int,
        Range(1, 1_000),  # compiling more heads takes hours
        SIZE,
        Needs(_has_several_heads, "a --scheme of several heads, such as iterated-shared"),
        alias("k"),
    ] = 1
    """Number of Bellman updates learned in parallel (K); for ensemble-shared, the number of pairs of heads."""
    seed: Annotated[int, AT_LEAST_ZERO] = 0
    """Random seed of the network, the actions, the sampling and the environment."""
    discount: Annotated[float, PROBABILITY, alias("gamma")] = 0.99
    """Discount factor (gamma), in [0, 1]."""
    target_update_period: TargetUpdatePeriod = 200
    """Target update period (T) in agent steps; a multiple of --update-period."""
    target_step_size: TargetStepSize = 1.0
    """Step size of a target update (tau), in (0, 1]. 1 is a copy; less is a moving average."""
    target_sync_period: Annotated[
        int,
        AT_LEAST_ONE,
        Needs(lambda config: config.target_scheme.num_copies > 1, "--scheme iterated-target-based and --k above 1"),
    ] = 30
    """Agent steps (offline: gradient steps) between updates of the later target networks (D of i-QN)."""
    learning_rate: LearningRate = 1e-3
    """Learning rate of Adam."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of convolutions and matrix products; parameters, normalisation and losses are float32 (paper, D.5)."""
    checkpoint_minutes: Annotated[float, AT_LEAST_ZERO, MAY_CHANGE] = 10.0
    """Minutes between checkpoints within an epoch; there is always a checkpoint at its end."""
    analysis: bool = False
    """Record probes in metrics.csv: feature rank, dormant units, head cosine; dqn, stream-q: also churn and cosines."""
    analysis_samples: Annotated[int, Range(1, 100_000)] = 2_048
    """Number of states that the probes evaluate."""
    track: Annotated[Literal["none", "tensorboard", "wandb", "trackio"], MAY_CHANGE] = "none"
    """Experiment tracker to log to, besides the CSV files; if it fails, the run continues."""
    experiment: str = "default"
    """Name of the experiment, the first part of the run folder: runs/EXPERIMENT/ENV/LABEL/seed-N."""

    # Values for agents that have no such setting.
    num_seeds = 1
    loop = "auto"
    protocol = "auto"
    env_kwargs = ""
    env_wrappers = ""
    max_episode_steps = 27_000
    acting_rule = ""
    evaluation_epsilon = 0.0
    last_epsilon = 0.0
    dataset = ""
    batch_size = 1
    updates_per_step = 1
    update_period = 1
    compress_replay = "auto"
    reward_clip = cast("float | None", None)
    learning_starts = 0
    num_steps_return = 1
    normalise_observations = False
    normalise_rewards = False
    uses_batch_norm = False
    held_out_size = 0  # transitions of a batch that only the probes evaluate
    algorithm = ""  # name in labels, such as "SAC"; by default that of the agent
    first_epoch = 1  # number of the first epoch in messages
    is_offline = False  # whether the run learns from data alone; then its results are those of evaluations
    unit = "agent steps"  # unit of the length of a run

    def __post_init__(self) -> None:
        fields.check(self)
        self.check_together()

    def check_together(self) -> None:
        """Refuse settings that do not fit together; parts extend this."""
        most = MAX_INTEGER - self.num_seeds + 1
        several = f", with --num-seeds {self.num_seeds}" if self.num_seeds > 1 else ""
        require(self, "seed", self.seed <= most, f"must be at most {most}{several}")
        self.target_scheme  # noqa: B018 - refuses a scheme without pairs
        require(
            self,
            "target_update_period",
            self.target_update_period % self.update_period == 0,
            f"must be a multiple of --update-period ({self.update_period})",
        )

    @property
    def update_batch_size(self) -> int:
        """Number of transitions in the batches of all gradient steps after an agent step."""
        return self.batch_size * self.updates_per_step

    @property
    def sampled_batch_size(self) -> int:
        return self.update_batch_size + self.held_out_size

    @property
    def row_length(self: Any) -> int:
        """Steps between rows of metrics.csv, at most the length of an epoch."""
        return min(self.log_period, self.epoch_length, self.length)

    @property
    def num_epochs(self: Any) -> int:
        """Number of epochs; offline, this includes the evaluation before the first gradient step."""
        return math.ceil(self.length / self.epoch_length) + 1 - self.first_epoch

    def epoch_end(self: Any, epoch: int) -> int:
        """Return the step at which an epoch may end; the last epoch may be shorter."""
        return min((epoch + self.first_epoch) * self.epoch_length, self.length)

    @property
    def target_scheme(self) -> TargetScheme:
        return make_scheme(self.scheme, self.num_bellman_iterations)

    @property
    def num_costly_heads(self) -> int:
        """Number of heads or networks that the duration of a step depends on."""
        return self.target_scheme.num_pairs

    @property
    def label(self) -> str:
        """Name of the method in the paper's words, such as "iS-DQN K=9"."""
        return self.target_scheme.label(self.algorithm or self.agent)

    def epsilon(self, step: Any) -> Any:
        """Return the probability of a random action, which `act` is given; takes numbers and traced arrays."""
        return 0.0 * step

    def acting_by(self, rule: str) -> Self:
        """Return the config with another acting rule."""
        if "acting_rule" not in fields.field_names(type(self)):
            raise UserError(f"--acting-rule is {rule!r}; {self.label} has one way of acting, so leave it out.")
        return self.replace(acting_rule=rule)

    def deterministic(self) -> Self:
        """Return the config of the agent that acts without randomness."""
        return self

    def observed_spec(self, spec: EnvSpec) -> EnvSpec:
        """Return the specification of an environment as the agent observes it."""
        return dataclasses.replace(spec, frame_dtype="float32") if self.normalise_observations else spec

    def to_json(self) -> dict[str, Any]:
        """Return the agent and all settings as JSON values."""
        settings = {"agent": self.agent} | dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    def resume_fields(self) -> dict[str, Any]:
        """Return the settings that must not change between a stop and a resume, as JSON values."""
        may_change = {*fields.find_rules(type(self), MAY_CHANGE), *fields.find_rules(type(self), INPUT_PATH)}
        return {name: value for name, value in self.to_json().items() if name not in may_change}

    @property
    def input_paths(self) -> dict[str, str]:
        """Paths that a run reads: setting -> path."""
        paths = {name: getattr(self, name) for name in fields.find_rules(type(self), INPUT_PATH)}
        return {name: path for name, path in paths.items() if path}

    def with_seed_index(self, index: int) -> Self:
        """Return the config of one of the `num_seeds` runs of a program, as of a run of its own."""
        return self.replace(seed=self.seed + index, **({"num_seeds": 1} if self.num_seeds != 1 else {}))

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


# -- the length of a run, and its epochs


@dataclass(frozen=True)
class Interaction(Run):
    """Settings of a run that learns while it acts in an environment."""

    protocol: str = "auto"
    """Protocol. Atari: machado2018, streaming, reference; dm_control: action-repeat-2, -1, -4, -8. auto: the first."""
    env_kwargs: EnvKwargs = ""
    """Keyword arguments of the environment for gymnasium.make, as JSON: '{"is_slippery": false}'."""
    env_wrappers: EnvWrappers = ""
    """Gymnasium wrappers of the environment, as JSON: '["FlattenObservation", ["ClipReward", {"max_reward": 1}]]'."""
    max_episode_steps: Annotated[int, AT_LEAST_ONE] = 27_000
    """Agent steps after which an episode is truncated (H), beside any limit of the environment."""
    total_timesteps: Annotated[int, AT_LEAST_ONE, MAY_CHANGE] = 50_000
    """Number of agent steps; in the host loop, each epoch continues to the end of its last episode."""
    epoch_steps: Annotated[int, AT_LEAST_ONE] = 5_000
    """Agent steps per epoch, whose result is its mean return; in the host loop it ends with an episode."""
    log_period_steps: Annotated[int, AT_LEAST_ONE] = 1_000
    """Agent steps between rows of metrics.csv."""
    record_dataset: bool = False
    """Record every step in RUN_DIR/dataset, for `isqn train cql`; uses the host loop."""

    def check_together(self) -> None:
        super().check_together()
        if self.record_dataset:
            require(self, "loop", self.loop != "compiled", "must be host or auto with --record-dataset")
            require(self, "num_seeds", self.num_seeds == 1, "must be 1 with --record-dataset")

    @property
    def length(self) -> int:
        """Length of the run in agent steps."""
        return self.total_timesteps

    @property
    def epoch_length(self) -> int:
        return self.epoch_steps

    @property
    def log_period(self) -> int:
        return self.log_period_steps


@dataclass(frozen=True)
class Offline(Run):
    """Settings of a run that learns from data alone, with evaluations in between."""

    num_updates: Annotated[int, AT_LEAST_ONE, MAY_CHANGE] = 50_000
    """Number of gradient steps."""
    epoch_updates: Annotated[int, AT_LEAST_ONE] = 5_000
    """Gradient steps between evaluations; there is also an evaluation before the first step."""
    log_period_updates: Annotated[int, AT_LEAST_ONE] = 1_000
    """Gradient steps between rows of metrics.csv."""

    first_epoch = 0  # the evaluation before the first gradient step
    is_offline = True
    unit = "updates"

    @property
    def length(self) -> int:
        """Length of the run in gradient steps."""
        return self.num_updates

    @property
    def epoch_length(self) -> int:
        return self.epoch_updates

    @property
    def log_period(self) -> int:
        return self.log_period_updates


@dataclass(frozen=True)
class FromDataset(Offline):
    """Settings of a run that learns from a dataset of transitions, and is evaluated in their environment."""

    dataset: Annotated[str, INPUT_PATH] = ""
    """Folder of the dataset to learn from (made by `isqn data`). It also sets the environment."""
    protocol: str = "auto"
    """Protocol of Atari or dm_control, as for `isqn train dqn`. auto: the protocol of the dataset."""
    env_kwargs: EnvKwargs = ""
    """Keyword arguments of the environment for gymnasium.make, as JSON. Default: those of the dataset."""
    env_wrappers: EnvWrappers = ""
    """Gymnasium wrappers of the environment, as JSON. Default: those of the dataset."""
    max_episode_steps: Annotated[int, AT_LEAST_ONE] = 27_000
    """Agent steps after which an episode is truncated (H), beside any limit of the environment."""
    reward_clip: RewardClip = None
    """Clip rewards to [-c, c] for learning; None: no clipping. Reported returns are never clipped."""
    evaluation_steps: Annotated[int, AT_LEAST_ZERO] = 10_000
    """Agent steps of an evaluation, up to the end of the running episodes; 0 disables evaluations."""
    evaluation_environments: Annotated[int, AT_LEAST_ONE] = 8
    """Number of parallel evaluation environments."""
    loop: Literal["auto", "host", "compiled"] = "auto"
    """Evaluation loop. compiled: one program with an environment written in JAX. auto: compiled if possible."""


@dataclass(frozen=True)
class NativeLoop(Interaction):
    """Settings of agents that can train in one compiled program with their environment."""

    num_seeds: Annotated[int, AT_LEAST_ONE, SIZE] = 1
    """Number of seeds (seed, seed + 1, ...) trained in one compiled program."""
    loop: TrainingLoop = "auto"
    """Training loop. compiled: one program with an environment written in JAX. auto: compiled if possible."""
