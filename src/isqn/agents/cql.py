"""Offline Q-learning from a dataset: conservative Q-learning, plain deep Q-learning, or behaviour cloning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isqn.agents import dqn
from isqn.agents.registry import register_agent
from isqn.config.parts import Adam, Batches, BatchNorm, MetaGradient, PairLoss, ScaledTorso
from isqn.config.run import FromDataset, TargetUpdatePeriod
from isqn.losses import LOSSES


@dataclass(frozen=True)
class CqlConfig(PairLoss, MetaGradient, BatchNorm, ScaledTorso, Adam, Batches, FromDataset):
    """Offline Q-learning from a dataset alone, with evaluations in between."""

    agent = "cql"

    loss: Literal[tuple(LOSSES)] = "cql"  # type: ignore[valid-type]
    """Loss of each pair: conservative Q-learning (cql), behaviour cloning (cloning), or others (`isqn list losses`)."""
    target_update_period: TargetUpdatePeriod = 2_000
    """Target update period (T) in gradient steps."""

    @property
    def algorithm(self) -> str:  # type: ignore[override]
        has_online_method = self.loss != "cql" and LOSSES[self.loss].bootstraps  # with the same loss
        return ("offline " if has_online_method else "") + super().algorithm

    @property
    def label(self) -> str:
        return super().label if LOSSES[self.loss].bootstraps else self.algorithm


register_agent("cql", CqlConfig, dqn.make, loop="isqn.train.from_dataset", presets="isqn.presets.cql")
