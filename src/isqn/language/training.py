"""Runs of a language agent: its games, its initial weights, and training on several devices and hosts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import AgentState
from isqn.agents.registry import read_config_file
from isqn.config.fields import flag, nearest_path
from isqn.data.replay import Memory
from isqn.envs.adapter import Environment
from isqn.language.agent import IlqlConfig, make, make_writer
from isqn.language.data import Source, of_file, of_people, of_players
from isqn.language.game import SPEC, spec_of
from isqn.language.gpt2 import load_weights
from isqn.language.play import MEASURES, evaluation, words_of
from isqn.train import checkpoint, offline, parallel, timing
from isqn.train.announce import begin_summaries, epoch_line
from isqn.train.evaluate import load_agent_state
from isqn.train.functions import make_agent
from isqn.train.progress import Progress, count, free_memory
from isqn.train.record import read_config
from isqn.types import Params, TextSpec, UserError, num_bytes

IS_DISTRIBUTED = True
WORK = "game"  # the unit whose FLOPs are counted


def flops(config: IlqlConfig, spec: TextSpec) -> float:
    """Return the FLOPs of one pass of a game through all networks, from the program before compiling."""
    state = jax.eval_shape(make(config, spec).init, 0)
    lowered = jax.jit(make_writer(config, spec, unroll=True).loss).lower(state, spec.batch(1))
    return float((lowered.cost_analysis() or {}).get("flops", math.nan))


def specification(config: IlqlConfig) -> TextSpec:
    return spec_of(official=config.official_colours)


def replay_memory(config: IlqlConfig, spec: TextSpec) -> Memory:
    return Memory(columns=0, frames=0, most_frames=0, compressed=False)


def batches_in_memory(config: IlqlConfig) -> int:
    return offline.BATCHES_IN_MEMORY


def batch_flag(config: IlqlConfig) -> str:
    """Return the setting that says how many games are learned from at once."""
    return "micro_batch_size" if config.micro_batch_size else "batch_size"


def require_possible(config: IlqlConfig, spec: TextSpec, *, on_host: bool = False) -> None:
    """Refuse what cannot run before a folder is made, or an old one deleted, for it."""
    shared = batch_flag(config)
    parallel.require_shares(getattr(config, shared), flag(shared))
    open_source(config)
    require_initial_weights(config)


@lru_cache(1)  # reading takes seconds, and the source is needed before a run and in it
def open_source(config: IlqlConfig) -> Source:
    """Return the games to learn from."""
    words = words_of(config)
    if config.data_path:
        return of_file(Path(config.data_path), words, official=config.official_colours)
    if config.players == "mixture":
        return of_players(words, config.careless_share, official=config.official_colours)
    return of_people(config.num_people, words, official=config.official_colours)


def require_initial_weights(config: IlqlConfig) -> None:
    """Refuse initial weights that cannot be read."""
    jax.eval_shape(lambda seed: initialise(config, make(config, SPEC).init(seed)), 0)


def initialise(config: IlqlConfig, state: AgentState) -> AgentState:
    """Load the initial weights of GPT-2 into all torsos, and the policy of another run, where the config names them."""
    if config.gpt2_weights:
        state = _with_weights(Path(config.gpt2_weights), state)
    if config.policy_checkpoint:
        policy = _policy_of(Path(config.policy_checkpoint), config, state.policy)
        state = state._replace(policy=jax.tree.map(jnp.asarray, policy))
    return state


def _policy_of(run_dir: Path, config: IlqlConfig, shapes: Params) -> Params:
    named = f"{flag('policy_checkpoint')} {run_dir}"
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{named} is no folder of a run{nearest_path(run_dir) or '.'}")
    theirs: Any = read_config_file(run_dir / "config.toml")
    if not isinstance(theirs, IlqlConfig):
        raise UserError(f"{named} is a run of `isqn train {theirs.agent}`; it must be one of `isqn train ilql`.")
    for name in ("num_layers", "model_width", "attention_heads", "num_positions"):
        if getattr(theirs, name) != getattr(config, name):
            raise UserError(f"{flag(name)} of {named} is {getattr(theirs, name)}, and {getattr(config, name)} here.")
    for step, arrays, _ in checkpoint.newest_good(run_dir):
        mine = {name: array for name, array in arrays.items() if name.startswith("agent.policy")}
        where = checkpoint.folder_of(run_dir, step)
        return checkpoint.unflatten({"agent": {"policy": shapes}}, mine, where)["agent"]["policy"]  # type: ignore[no-any-return]
    raise UserError(f"{named} has no checkpoint that can be read.")


def _with_weights(path: Path, state: AgentState) -> AgentState:
    torso = load_weights(path, state.policy)

    def with_torso(params: Params) -> Params:
        return {**params, "torso": {**params["torso"], "gpt2": jax.tree.map(jnp.copy, torso)}}

    return state._replace(params=with_torso(state.params), copies=tuple(map(with_torso, state.copies)), policy=torso)


def load_writer(
    run_dir: Path, which: str, acting_rule: str, inverse_temperature: float | None
) -> tuple[IlqlConfig, AgentState, int]:
    """Load a trained language agent, and the step of its training."""
    config: Any = read_config(run_dir)
    if not isinstance(config, IlqlConfig):
        raise UserError(f"{run_dir} is a run of `isqn train {config.agent}`; words are for runs of `isqn train ilql`.")
    state, step = load_agent_state(run_dir, make_agent(config, SPEC), which)
    if acting_rule != "auto":
        config = config.replace(acting_rule=acting_rule)
    if inverse_temperature is not None:
        config = config.replace(inverse_temperature=inverse_temperature)
    return config, state, step


# -- training


def train(
    config: IlqlConfig,
    folders: list[Path],
    env: Environment | None,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    """Train what the folder holds to the end."""
    with parallel.workplace(folders[0]) as run_dir:
        source = open_source(config)
        progress.say(f"{config.label} on {config.env_id}: {source.describe()}; seed {config.seed}")
        agent = make_agent(config, source.spec)
        size = num_bytes(jax.eval_shape(agent.init, 0))
        progress.say(f"{size / 1e9:.3g} GB for networks and optimizer; games are made as they are needed.")
        finish = begin_summaries(config, [run_dir], source.spec, learned_from=source.origin())
        epochs = offline.train(
            config,
            run_dir,
            agent,
            source,
            evaluation(config, source, should_stop),
            initialise=partial(initialise, config),
            measures=MEASURES,
            devices=_devices(config, source, progress),
            should_stop=should_stop,
            progress=progress,
        )
        for epoch in epochs:
            progress.say(epoch_line(config, [epoch], progress))
        finish()


def _devices(config: IlqlConfig, source: Source, progress: Progress) -> offline.Devices:
    def compile_update(update: Any, state: Any, totals: Any, updates: int) -> Any:
        parallel.require_same(f"{source.digest} {updates}")
        shapes = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), source.spec.batch(config.batch_size))
        program = update.lower(state, totals, parallel.shard(shapes)).compile()
        _announce_memory(program, progress)
        return program

    return offline.Devices(
        replicate=parallel.replicate,
        shard=parallel.shard,
        local_copy=parallel.local_copy,
        any_process=parallel.any_process,
        is_first=parallel.is_first(),
        compile_update=compile_update,
    )


def _announce_memory(update: Any, progress: Progress) -> None:
    """Say what an update takes at its peak on each device, as compiled; refuse it if there is not so much memory."""
    plan = update.memory_analysis()
    more = plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
    peak = plan.argument_size_in_bytes + more
    progress.say(f"an update needs {peak / 1e9:.3g} GB at its peak, on each of {count(jax.device_count(), 'device')}")
    if jax.default_backend() == "cpu" and jax.local_device_count() * more > 0.95 * free_memory():
        raise UserError(
            f"An update needs {more / 1e9:.1f} GB beside what it learns, on each of "
            f"{count(jax.local_device_count(), 'device')}, and {free_memory() / 1e9:.1f} GB are free; lower "
            "--micro-batch-size, or give --rematerialise."
        )


def seconds_per_step(config: IlqlConfig, seconds: float) -> float:
    """Measure the seconds of a gradient step, with its share of the evaluations."""
    spec = specification(config)
    agent = make_agent(config, spec)
    each = timing.time_updates(config, agent, spec, spec.batch(config.batch_size), seconds / 2)
    evaluate = evaluation(config, open_source(config))
    state = jax.jit(agent.init)(config.seed)
    return each + timing.time_calls(lambda: evaluate(state, 0), seconds / 2, least=2).median / config.epoch_updates
