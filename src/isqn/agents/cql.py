"""Offline Q-learning from a dataset: conservative Q-learning, plain deep Q-learning, or behaviour cloning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from isqn.agents import dqn
from isqn.agents.dqn import meta_label
from isqn.agents.registry import register_agent
from isqn.config.fields import AT_LEAST_ONE, AT_LEAST_ZERO, NONE_OR_NUMBER, PLACE, POSITIVE
from isqn.config.parts import Adam, Batches, BatchNorm, MetaGradient, Offline, PairLoss, ScaledTorso, TargetUpdatePeriod
from isqn.losses import LOSSES


@dataclass(frozen=True)
class CqlConfig(PairLoss, MetaGradient, BatchNorm, ScaledTorso, Adam, Batches, Offline):
    """Offline Q-learning from a dataset alone, with evaluations in between."""

    agent = "cql"

    loss: Literal[tuple(LOSSES)] = "cql"  # type: ignore[valid-type]
    """Loss of each pair: conservative Q-learning (cql), behaviour cloning (cloning), or any of `isqn list losses`."""
    target_update_period: TargetUpdatePeriod = 2_000
    """Target update period (T) in gradient steps."""
    dataset: Annotated[str, PLACE] = ""
    """Folder of the dataset to learn from (`isqn data`); it names its environment."""
    protocol: str = "auto"
    """Atari: machado2018, streaming or reference; dm_control: action-repeat-2, -1, -4 or -8. auto: the dataset's."""
    max_episode_steps: Annotated[int, AT_LEAST_ONE] = 27_000
    """Horizon (H): agent steps after which an episode is truncated."""
    reward_clip: Annotated[float | None, POSITIVE, NONE_OR_NUMBER] = None
    """Bound c: rewards are clipped to [-c, c] for learning, or with None not at all; results are always raw."""
    evaluation_steps: Annotated[int, AT_LEAST_ZERO] = 10_000
    """Agent steps of an evaluation, which ends with the running episodes; 0 disables evaluations."""
    evaluation_environments: Annotated[int, AT_LEAST_ONE] = 8
    """Number of parallel evaluation environments."""
    loop: Literal["auto", "host", "compiled"] = "auto"
    """Evaluation loop; compiled: in one program with the environment, if that is written in JAX. auto: then."""

    @property
    def label(self) -> str:
        if not LOSSES[self.loss].bootstraps:
            return self.algorithm
        offline = "" if self.loss == "cql" else "offline "  # the same loss is another method where an agent acts
        return meta_label(self) + self.target_scheme.label(offline + self.algorithm)


register_agent("cql", CqlConfig, dqn.make, loop="isqn.train.from_dataset")
