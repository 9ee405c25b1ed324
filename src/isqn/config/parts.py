"""Parts that the configs of agents are composed of: a few settings each, with their rules in the annotations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from isqn.config.fields import (
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    EMPTY_IS_NONE,
    POSITIVE,
    PROBABILITY,
    SIZE,
    Needs,
    Range,
    alias,
    needs,
    require,
)
from isqn.config.run import LearningStarts, Run
from isqn.losses import LOSSES
from isqn.schemes import TargetScheme
from isqn.torsos import TORSOS, is_read_by

# -- acting


@dataclass(frozen=True)
class GreedyHeads(Run):
    """Settings of agents that choose the action with the highest value."""

    acting_rule: Literal["uniform", "episode", "mean", "last"] = "uniform"
    """Acting head: drawn at each step (uniform, the paper's) or episode, the mean of the online heads, or the last."""

    evaluation_epsilon = 0.001
    last_epsilon = 0.01

    def deterministic(self) -> Self:
        return self.acting_by("mean")


@dataclass(frozen=True)
class EpsilonGreedy(GreedyHeads):
    """Settings of epsilon-greedy exploration."""

    epsilon_start: Annotated[float, PROBABILITY] = 1.0
    """Probability of a random action at the first step, in [0, 1]."""
    epsilon_end: Annotated[float, PROBABILITY] = 0.01
    """Probability of a random action after the decay, in [0, 1]."""
    epsilon_decay_steps: Annotated[int, AT_LEAST_ZERO] = 10_000
    """Agent steps of the linear decay of epsilon."""

    def epsilon(self, step: Any) -> Any:
        """Return the probability of a random action; takes numbers and traced arrays."""
        remaining = 1.0 - step / max(self.epsilon_decay_steps, 1)
        return self.epsilon_end + (self.epsilon_start - self.epsilon_end) * remaining * (remaining > 0)

    @property
    def last_epsilon(self) -> float:  # type: ignore[override]
        return self.epsilon_end


# -- learning


@dataclass(frozen=True)
class Batches(Run):
    """Settings of agents that learn from batches of transitions."""

    num_steps_return: Annotated[int, AT_LEAST_ONE, alias("update-horizon")] = 1
    """Number of steps of the n-step return (n)."""
    batch_size: Annotated[int, AT_LEAST_ONE] = 32
    """Number of transitions in the batch of a gradient step."""


@dataclass(frozen=True)
class Replay(Batches):
    """Settings of agents that learn from a replay buffer."""

    buffer_size: Annotated[int, AT_LEAST_ONE] = 50_000
    """Capacity of the replay buffer in rows: one per step and, in the host loop, one more per episode (its end)."""
    learning_starts: LearningStarts = 1_000
    """Agent steps before the first gradient step."""

    def check_together(self) -> None:
        super().check_together()
        below = f"must be below --buffer-size ({self.buffer_size})"
        require(self, "learning_starts", self.learning_starts < self.buffer_size, below)
        require(self, "num_steps_return", self.num_steps_return < self.buffer_size, below)
        least = self.num_steps_return - 1
        rule = f"must be at least {least}, for a first return of {self.num_steps_return} steps"
        require(self, "learning_starts", self.learning_starts >= least, rule)

    @property
    def replay_rows(self) -> int:
        return self.buffer_size


@dataclass(frozen=True)
class Adam(Run):
    """Settings of agents that learn by Adam."""

    adam_epsilon: Annotated[float, AT_LEAST_ZERO] = 1e-8
    """Epsilon of Adam."""
    adam_beta1: Annotated[float, Range(0, 1, open_high=True)] = 0.9
    """Beta 1 of Adam, the decay rate of its first moment, in [0, 1). CrossQ: 0.5."""

    learning_rate_decay_steps = 0


@dataclass(frozen=True)
class PairWeights(Run):
    """Settings of the weights of the pairs in the loss."""

    head_weights: Annotated[tuple[float, ...], EMPTY_IS_NONE] = ()
    """Weight of each pair of heads in the loss; if empty, all are 1."""
    head_weight_discount: Annotated[float, AT_LEAST_ZERO] = 1.0
    """Ratio between the weights of successive pairs. Paper: 0.25 in continuous control."""

    def check_together(self) -> None:
        super().check_together()
        require(self, "head_weights", all(map(math.isfinite, self.head_weights)), "must be finite numbers")
        pairs = self.target_scheme.num_pairs
        rule = f"must be empty or one for each of the {pairs} pairs"
        require(self, "head_weights", len(self.head_weights) in (0, pairs), rule)

    @property
    def pair_weights(self) -> tuple[float, ...]:
        given = self.head_weights or (1.0,) * self.target_scheme.num_pairs
        return tuple(weight * self.head_weight_discount**i for i, weight in enumerate(given))


@dataclass(frozen=True)
class MetaGradient(PairWeights, GreedyHeads):
    """Settings of learned pair weights (paper, D.4)."""

    meta_gradient: Literal["none", "adam", "sgd"] = "none"
    """Learn the weights of the pairs by a gradient through a step of this optimizer (paper, D.4)."""
    meta_learning_rate: Annotated[float, AT_LEAST_ZERO, needs("meta_gradient", "adam", "sgd")] = 6.25e-5
    """Learning rate of the weights of the pairs. Not specified in the paper; the authors' code: that of the network."""

    def check_together(self) -> None:
        super().check_together()
        if self.meta_gradient == "none":
            return
        rule = "cannot be combined with --meta-gradient"
        require(self, "batch_norm", not self.uses_batch_norm, rule)
        require(self, "head_weights", not self.head_weights, rule)
        require(self, "head_weight_discount", self.head_weight_discount == 1, rule)
        rule = "must be uniform with --meta-gradient, which draws the head by the learned weights"
        require(self, "acting_rule", self.acting_rule == "uniform", rule)

    def acting_by(self, rule: str) -> Self:
        """Return the config with another acting rule, which does not use the learned weights."""
        return self if rule == self.acting_rule else self.replace(acting_rule=rule, meta_gradient="none")

    @property
    def label(self) -> str:
        return {"none": "", "adam": "Meta ", "sgd": "Meta-SGD "}[self.meta_gradient] + super().label


@dataclass(frozen=True)
class PairLoss(Run):
    """Settings of the temporal-difference loss."""

    loss: Literal[tuple(LOSSES)] = "dqn"  # type: ignore[valid-type]
    """Temporal-difference loss of each pair (`isqn list losses`)."""
    mellowmax_temperature: Annotated[float, POSITIVE, needs("loss", "mellowmax")] = 30.0
    """Temperature of MellowMax (omega); larger is closer to the maximum. Paper: 1000 on Breakout, 30 on Seaquest."""
    munchausen_temperature: Annotated[float, POSITIVE, needs("loss", "munchausen")] = 0.03
    """Temperature of the Munchausen policy (tau of Vieillard et al. 2020; not --tau)."""
    munchausen_weight: Annotated[float, needs("loss", "munchausen")] = 0.9
    """Weight of the Munchausen log-policy bonus (alpha)."""
    munchausen_clip: Annotated[float, Range(high=0), needs("loss", "munchausen")] = -1.0
    """Lower bound of the Munchausen log-policy bonus."""
    conservative_weight: Annotated[float, AT_LEAST_ZERO, needs("loss", "cql")] = 0.1
    """Weight of the conservative term of CQL (alpha)."""

    def check_together(self) -> None:
        super().check_together()
        if not LOSSES[self.loss].bootstraps:
            require(self, "loss", self.is_offline, "is for `isqn train cql`, whose dataset has an action to clone")
            rule = f"must be target-free with --loss {self.loss}: no targets"
            require(self, "scheme", self.scheme == "target-free", rule)

    @property
    def num_costly_heads(self) -> int:
        return 0  # more heads take hardly longer (paper, appendix B)

    @property
    def algorithm(self) -> str:  # type: ignore[override]
        return LOSSES[self.loss].label


@dataclass(frozen=True)
class Normalisation(Run):
    """Settings of the normalisation of observations and rewards by running moments."""

    normalise_observations: bool = False
    """Normalise observations by their running mean and standard deviation, without clipping."""
    normalise_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return. Reported returns are raw."""


@dataclass(frozen=True)
class MovingHeads(Run):
    """Settings of the initial heads and of the target updates of iterated-shared."""

    refreshed_heads: Annotated[Literal["all", "first"], needs("scheme", "iterated-shared")] = "all"
    """Heads that a target update moves towards the next head: all, or only head 0. Not specified in the paper."""
    initial_heads: Annotated[Literal["independent", "copied"], needs("scheme", "iterated-shared")] = "independent"
    """Initial head 0: drawn independently, or a copy of head 1. Not specified in the paper."""

    @property
    def refreshed_scheme(self) -> TargetScheme:
        """Scheme of the target updates."""
        return self.target_scheme if self.refreshed_heads == "all" else self.target_scheme.first_pair


# -- the network


def needs_torso_that_reads(setting: str) -> Needs:
    """Return the condition that the torso reads a setting of `isqn.torsos.TorsoSettings`."""

    def words() -> str:
        return "--torso " + " or ".join(name for name in ("auto", *TORSOS) if is_read_by(setting, name))

    return Needs(lambda config: is_read_by(setting, config.torso), words)


@dataclass(frozen=True)
class Torso(Run):
    """Settings of the torso, the layers that all heads share."""

    torso: str = "auto"
    """Torso: mlp, minatar, nature, impala or stream; for sac mlp or simba. auto: by the shape of the observation."""
    hidden_sizes: Annotated[tuple[int, ...], SIZE, needs_torso_that_reads("hidden_sizes")] = (128, 128)
    """Hidden layer sizes of the MLP; if empty, it is linear."""
    layer_norm: Annotated[bool, needs_torso_that_reads("layer_norm")] = False
    """LayerNorm before each activation."""

    width_factor = 1.0

    def check_together(self) -> None:
        super().check_together()
        require(self, "hidden_sizes", min(self.hidden_sizes, default=1) > 0, "must be sizes of at least 1")

    @property
    def torso_settings(self) -> dict[str, Any]:
        """Settings of the layers, under the names of `isqn.torsos.TorsoSettings`."""
        return {
            "layer_norm": self.layer_norm,
            "batch_norm": self.uses_batch_norm,
            "width_factor": self.width_factor,
            "hidden_sizes": self.hidden_sizes,
            "dtype": self.compute_dtype,
        }


@dataclass(frozen=True)
class ScaledTorso(Torso):
    """Settings of a torso whose width can be scaled."""

    width_factor: Annotated[float, POSITIVE, SIZE] = 1.0
    """Factor on the width of the last hidden layer (paper, D.3)."""


@dataclass(frozen=True)
class BatchNorm(Torso):
    """Settings of BatchNorm in the torso."""

    batch_norm: bool = False
    """BatchNorm after each activation, with s and s' in one batch."""

    @property
    def uses_batch_norm(self) -> bool:  # type: ignore[override]
        return self.batch_norm
