"""Offline Q-learning from a dataset: conservative Q-learning, plain deep Q-learning, or behaviour cloning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from isqn.agents import dqn
from isqn.agents.registry import register_agent
from isqn.config.fields import AT_LEAST_ONE, AT_LEAST_ZERO, INPUT_PATH, NONE_OR_NUMBER, POSITIVE
from isqn.config.parts import Adam, Batches, BatchNorm, MetaGradient, PairLoss, ScaledTorso
from isqn.config.run import Offline, TargetUpdatePeriod
from isqn.losses import LOSSES


@dataclass(frozen=True)
class CqlConfig(PairLoss, MetaGradient, BatchNorm, ScaledTorso, Adam, Batches, Offline):
    """Offline Q-learning from a dataset alone, with evaluations in between."""

    agent = "cql"

    loss: Literal[tuple(LOSSES)] = "cql"  # type: ignore[valid-type]
    """Loss of each pair: conservative Q-learning (cql), behaviour cloning (cloning), or others (`isqn list losses`)."""
    target_update_period: TargetUpdatePeriod = 2_000
    """Target update period (T) in gradient steps."""
    dataset: Annotated[str, INPUT_PATH] = ""
    """Folder of the dataset to learn from (made by `isqn data`). It also sets the environment."""
    protocol: str = "auto"
    """Protocol of Atari or dm_control, as for `isqn train dqn`. auto: the protocol of the dataset."""
    max_episode_steps: Annotated[int, AT_LEAST_ONE] = 27_000
    """Agent steps after which an episode is truncated (H), beside any limit of the environment."""
    reward_clip: Annotated[float | None, POSITIVE, NONE_OR_NUMBER] = None
    """Clip rewards to [-c, c] for learning; None: no clipping. Reported returns are never clipped."""
    evaluation_steps: Annotated[int, AT_LEAST_ZERO] = 10_000
    """Agent steps of an evaluation, up to the end of the running episodes; 0 disables evaluations."""
    evaluation_environments: Annotated[int, AT_LEAST_ONE] = 8
    """Number of parallel evaluation environments."""
    loop: Literal["auto", "host", "compiled"] = "auto"
    """Evaluation loop. compiled: one program with an environment written in JAX. auto: compiled if possible."""

    @property
    def algorithm(self) -> str:  # type: ignore[override]
        has_online_method = self.loss != "cql" and LOSSES[self.loss].bootstraps  # with the same loss
        return ("offline " if has_online_method else "") + super().algorithm

    @property
    def label(self) -> str:
        return super().label if LOSSES[self.loss].bootstraps else self.algorithm


register_agent("cql", CqlConfig, dqn.make, loop="isqn.train.from_dataset")
