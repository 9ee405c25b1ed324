"""What the loops share."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.q_learning import Agent
from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.experiments.config import Config
from isqn.keys import episode_seed
from isqn.train import checkpoint
from isqn.types import EnvSpec, Transition, UserError


class Diverged(UserError):
    """A number that is not finite."""


class Epoch(NamedTuple):
    """A result: the returns of the episodes of an epoch, of training or, offline, of its evaluation."""

    epoch: int
    step: int
    returns: list[float]

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns)) if self.returns else float("nan")


def empty_totals(agent: Agent, config: Config, spec: EnvSpec) -> Any:
    """Zeros of the shape of the metrics, which stay on the device between rows."""
    batch = spec.batch(config.sampled_batch_size)
    _, metrics = jax.eval_shape(agent.update, jax.eval_shape(agent.init, 0), batch)
    return jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metrics)


def play(
    config: Config,
    env: Environment,
    replay: Replay,
    choose: Callable[[int, int], Any],
    seed: int,
    observe: Callable[..., np.ndarray] = lambda frame, *_: frame,
) -> Iterator[None]:
    """Without learning: one step a turn, game after game; `choose` sees the numbers of the step and the episode."""
    episode, length = 0, 0
    replay.add_first(observe(env.reset(episode_seed(seed, episode))))
    for step in itertools.count():
        action, length = choose(step, episode), length + 1
        frame, reward, terminated, truncated = env.step(action)
        truncated = truncated or (not terminated and length >= config.max_episode_steps)
        ended = terminated or truncated
        replay.add(action, reward, terminated, truncated, observe(frame, reward, ended))
        if ended:
            episode, length = episode + 1, 0
            replay.add_first(observe(env.reset(episode_seed(seed, episode))))
        yield


def with_held_out(batch: Transition, held_out: Transition) -> Transition:
    """Behind what is learned from, what the probes look at."""
    fields = ("obs", "action", "reward", "discount", "next_obs")
    return batch._replace(**{f: jnp.concatenate([getattr(batch, f), getattr(held_out, f)]) for f in fields})


def save_best(run_dir: Path, state: Any, result: Epoch) -> None:
    """The agent of the best epoch so far, by mean return."""
    require_finite((state.params, state.policy), run_dir, result.step)
    name = f"best-{result.step:012d}"
    manifest = {"criterion": "mean return of an epoch", **result._asdict(), "mean_return": result.mean_return}
    checkpoint.write(run_dir / name, checkpoint.flatten({"agent": state}), manifest)
    for older in run_dir.glob("best-*"):
        if older.name != name:
            shutil.rmtree(older)


def metrics_columns(totals: Any, probes: tuple[str, ...]) -> tuple[str, ...]:
    learned = [column for name, leaf in totals.items() for column in _columns(name, leaf)]
    return ("step", "frame", "updates", "epsilon", *learned, *probes, "steps_per_second", "memory_mb", "seconds")


def _columns(name: str, leaf: Any) -> list[str]:
    return [name] if leaf.ndim == 0 else [f"{name}_{i + 1}" for i in range(leaf.shape[0])]


def means(totals: Any, updates: int) -> dict[str, float]:
    """Fetch the sums once and spread vectors over numbered columns."""
    fetched = jax.device_get(totals)
    return {
        column: float(value) / updates
        for name, leaf in fetched.items()
        for column, value in zip(_columns(name, leaf), np.atleast_1d(leaf), strict=True)
    }


@jax.jit
def _all_finite(tree: Any) -> Any:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def require_finite(tree: Any, run_dir: Path, step: int) -> None:
    """Stop at the first number that is not finite, before it reaches a checkpoint."""
    if not _all_finite(tree):
        kept = checkpoint.steps(run_dir)
        where = f"the last good checkpoint is at step {kept[0]:,}" if kept else "there was no checkpoint before it"
        raise Diverged(
            f"a loss or a parameter stopped being a finite number before step {step:,}; {where}. "
            "A lower --learning-rate, a normalised network or another --scheme may help."
        )
