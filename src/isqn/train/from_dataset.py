"""Runs that learn from a dataset alone, and are evaluated in an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from isqn.agents.base import Agent, AgentState
from isqn.agents.registry import require_actions
from isqn.config.fields import flag
from isqn.data.dataset import Dataset, in_memory_bytes
from isqn.data.files import Description
from isqn.data.index import INDEX, read_index, spec_from_index
from isqn.data.replay import Memory
from isqn.data.sample import columns_bytes
from isqn.envs.adapter import Environment, make_run_environment
from isqn.envs.registry import canonical_id, make_native
from isqn.keys import episode_seed
from isqn.train import offline, timing
from isqn.train.announce import begin_summaries, epoch_line, require_memory
from isqn.train.evaluate import host_evaluation, native_evaluation
from isqn.train.functions import flops_per_update, make_run_agent
from isqn.train.online import has_native_version, require_native
from isqn.train.progress import Control
from isqn.types import EnvSpec, UserError

IS_DISTRIBUTED = False
WORK = "update"  # the unit whose FLOPs are counted
flops = flops_per_update


def specification(config: Any) -> EnvSpec:
    """Return the specification in the dataset, or that of the environment if the dataset does not exist yet."""
    if index := _index(config):
        return spec_from_index(index)
    with make_run_environment(config) as env:
        return env.spec


def _index(config: Any) -> Description:
    folder = Path(config.dataset)
    return read_index(folder) if config.dataset and (folder / INDEX).is_file() else {}


def trains_seeds_together(config: Any) -> bool:
    return False


def replay_memory(config: Any, spec: EnvSpec) -> Memory:
    rows = _index(config).get("rows", 0)
    frames = in_memory_bytes(spec, rows)
    return Memory(columns=columns_bytes(spec, rows), frames=frames, max_frames=frames, compressed=False)


def batches_in_memory(config: Any) -> int:
    return offline.BATCHES_IN_MEMORY


def batch_flag(config: Any) -> str:
    return "batch_size"


def require_possible(config: Any, spec: EnvSpec, *, on_host: bool = False, is_new: bool = False) -> None:
    """Refuse a run that cannot work, before its folder is made or an old one is deleted."""
    if config.loop == "compiled":
        require_native(config)
    memory = replay_memory(config, spec)
    needs = f"{config.dataset} takes {memory.total / 1e9:.1f} GB in memory"
    require_memory(memory.total, needs, "Take a part of it by `isqn data convert --fraction`.")
    open_dataset(config)


def open_dataset(config: Any) -> Dataset:
    if not config.dataset:
        raise UserError(
            f"{flag('dataset')} is not given; it is the folder that `isqn train {config.agent}` learns from."
        )
    dataset = Dataset.open(
        Path(config.dataset),
        num_steps_return=config.num_steps_return,
        discount=config.discount,
        reward_clip=config.reward_clip,
    )
    dataset.require_complete()
    if canonical_id(config.env_id) != dataset.spec.id:
        raise UserError(f"{config.dataset} is of {dataset.spec.id}, not of {flag('env_id')} {config.env_id}.")
    require_actions(config, dataset.spec)
    return dataset


def train(config: Any, folders: list[Path], env: Environment | None, control: Control) -> None:
    """Train the run in the folder to the end."""
    dataset, (run_dir,), progress = open_dataset(config), folders, control.progress
    progress.say(f"{config.label} on {dataset.folder}: {dataset.describe()}; seed {config.seed}")
    memory = replay_memory(config, dataset.spec)
    parts = "columns and frames of the dataset" if memory.frames else "columns of the dataset; frames stay on disk"
    progress.say(f"{memory.total / 1e6:.3g} MB of memory for the {parts}.")
    agent = make_run_agent(config, dataset.spec)
    with evaluation(config, agent, dataset.spec, env, control.should_stop) as evaluate:
        finish = begin_summaries(config, [run_dir], dataset.spec, learned_from=dataset.provenance())
        for epoch in offline.train(config, run_dir, agent, dataset, evaluate, control):
            progress.say(epoch_line(config, [epoch], progress))
        finish()


@contextmanager
def evaluation(
    config: Any, agent: Agent, spec: EnvSpec, env: Environment | None, should_stop: Callable[[], bool]
) -> Iterator[Callable[[AgentState, int], offline.Evaluation]]:
    """Yield a function that evaluates a state at an epoch, in one program if the environment is written in JAX."""
    count = min(config.evaluation_environments, max(1, config.evaluation_steps))
    common: dict[str, Any] = {
        "steps": config.evaluation_steps,
        "epsilon": config.evaluation_epsilon,
        "max_episode_steps": config.max_episode_steps,
        "should_stop": should_stop,
    }
    own_environments: list[Environment] = []
    if not config.evaluation_steps:
        yield lambda state, epoch: offline.Evaluation([])
        return
    if env is None and has_native_version(config) and config.loop != "host":
        native = make_native(config.env_id)
        _require_same_environment(spec, native.spec)
        play = native_evaluation(agent, native, count=count, **common)
    else:
        own_environments = [] if env else [make_run_environment(config) for _ in range(count)]
        environments = [env] if env else own_environments
        _require_same_environment(spec, environments[0].spec)
        play = host_evaluation(agent, environments, **common)
    try:
        yield lambda state, epoch: offline.Evaluation(play(state, episode_seed(config.seed, epoch)))
    finally:
        for own in own_environments:
            own.close()


def _require_same_environment(spec: EnvSpec, other: EnvSpec) -> None:
    """Refuse an evaluation in another environment than the recorded one."""
    for name in ("protocol", "obs_shape", "frame_dtype", "num_actions", "action_low", "action_high"):
        if getattr(spec, name) != getattr(other, name):
            raise UserError(
                f"The dataset is of {spec.id} with {name} {getattr(spec, name)}; {other.id} has {getattr(other, name)}."
            )


def seconds_per_step(config: Any, seconds: float) -> float:
    """Measure the seconds of a gradient step, including its share of the evaluations."""
    spec = specification(config)
    agent = make_run_agent(config, spec)
    batch = spec.batch_shapes(config.sampled_batch_size)._replace(ended=(), explored=())
    per_update = timing.time_updates(config, agent, spec, batch, seconds / 2)
    if not config.evaluation_steps:
        return per_update
    steps = min(config.evaluation_steps, 200)
    state = jax.jit(agent.init)(config.seed)
    short = config.replace(evaluation_steps=steps, max_episode_steps=steps)
    with evaluation(short, agent, spec, None, lambda: False) as play:
        per_evaluation = timing.time_calls(lambda: play(state, 0), seconds / 2, least=2).median
        per_step = per_evaluation / sum(episode.length for episode in play(state, 0).episodes)
    return per_update + per_step * config.evaluation_steps / config.epoch_updates
