"""Runs of a language agent: their games, their initial weights, and training on several devices and hosts."""

from __future__ import annotations

import math
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
from isqn.language.agent import IlqlConfig
from isqn.language.data import Source, source_from_file, source_from_people, source_from_players
from isqn.language.game import SPEC, make_spec
from isqn.language.gpt2 import load_weights
from isqn.language.learning import make_learner
from isqn.language.play import MEASURES, load_word_list, make_evaluation
from isqn.language.types import TextSpec
from isqn.train import checkpoint, offline, parallel, timing
from isqn.train.announce import begin_summaries, epoch_line
from isqn.train.evaluate import load_agent_state
from isqn.train.functions import agent_bytes, make_run_agent
from isqn.train.progress import Control, Progress, format_count, free_memory
from isqn.train.record import read_config
from isqn.types import Params, UserError

IS_DISTRIBUTED = True
WORK = "game"  # the unit whose FLOPs are counted


def flops(config: IlqlConfig, spec: TextSpec) -> float:
    """Return the FLOPs of one pass of a game through all networks, from the program before compiling."""
    state = jax.eval_shape(make_run_agent(config, spec).init, 0)
    lowered = jax.jit(make_learner(config, spec, unroll=True).loss).lower(state, spec.batch_shapes(1))
    return float((lowered.cost_analysis() or {}).get("flops", math.nan))


def specification(config: IlqlConfig) -> TextSpec:
    return make_spec(official=config.official_colours)


def trains_seeds_together(config: IlqlConfig) -> bool:
    return False


def replay_memory(config: IlqlConfig, spec: TextSpec) -> Memory:
    """Return no memory: games are made when they are needed."""
    return Memory(columns=0, frames=0, max_frames=0, compressed=False)


def batches_in_memory(config: IlqlConfig) -> int:
    return offline.BATCHES_IN_MEMORY


def batch_flag(config: IlqlConfig) -> str:
    """Return the setting for the number of games in a forward pass."""
    return "micro_batch_size" if config.micro_batch_size else "batch_size"


def require_possible(config: IlqlConfig, spec: TextSpec, *, on_host: bool = False, is_new: bool = False) -> None:
    """Refuse what cannot run before a folder is made, or an old one deleted, for it."""
    setting = batch_flag(config)
    parallel.require_divisible(getattr(config, setting), flag(setting))
    open_source(config)
    if is_new:  # a run that goes on has weights of its own
        require_initial_weights(config)


@lru_cache(1)  # reading takes seconds, and the source is needed before a run and in it
def open_source(config: IlqlConfig) -> Source:
    """Return the games to learn from."""
    words, official = load_word_list(config), config.official_colours
    if config.data_path:
        return source_from_file(Path(config.data_path), words, official=official)
    if config.players == "mixture":
        return source_from_players(words, config.careless_share, official=official)
    return source_from_people(config.num_people, words, official=official)


# -- initial weights


def require_initial_weights(config: IlqlConfig) -> None:
    """Refuse initial weights that cannot be read."""
    jax.eval_shape(lambda seed: initialise(config, make_run_agent(config, SPEC).init(seed)), 0)


def initialise(config: IlqlConfig, state: AgentState) -> AgentState:
    """Load GPT-2 weights into all torsos, and the policy of another run, where the config names them."""
    if config.gpt2_weights:
        state = _load_gpt2(Path(config.gpt2_weights), state)
    if config.policy_checkpoint:
        policy = _load_policy(Path(config.policy_checkpoint), config, state.policy)
        state = state._replace(policy=jax.tree.map(jnp.asarray, policy))
    return state


def _load_gpt2(path: Path, state: AgentState) -> AgentState:
    weights = load_weights(path, state.policy)

    def with_weights(params: Params) -> Params:
        return {**params, "torso": {**params["torso"], "gpt2": jax.tree.map(jnp.copy, weights)}}

    return state._replace(
        params=with_weights(state.params), copies=tuple(map(with_weights, state.copies)), policy=weights
    )


def _load_policy(run_dir: Path, config: IlqlConfig, template: Params) -> Params:
    """Load the policy of the newest good checkpoint of another run, which must have the same size."""
    name = f"{flag('policy_checkpoint')} {run_dir}"
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{name} is not a run folder{nearest_path(run_dir) or '.'}")
    other: Any = read_config_file(run_dir / "config.toml")
    if not isinstance(other, IlqlConfig):
        raise UserError(f"{name} is a run of `isqn train {other.agent}`; it must be one of `isqn train ilql`.")
    for setting in ("num_layers", "model_width", "attention_heads", "num_positions"):
        theirs, ours = getattr(other, setting), getattr(config, setting)
        if theirs != ours:
            raise UserError(f"{flag(setting)} of {name} is {theirs}, and {ours} here.")
    for step, arrays, _ in checkpoint.newest_good(run_dir):
        policy = {leaf: array for leaf, array in arrays.items() if leaf.startswith("agent.policy")}
        folder = checkpoint.folder_of(run_dir, step)
        tree = checkpoint.unflatten({"agent": {"policy": template}}, policy, folder)
        return tree["agent"]["policy"]  # type: ignore[no-any-return]
    raise UserError(f"{name} has no checkpoint that can be read.")


def load_language_agent(
    run_dir: Path, which: str, acting_rule: str, inverse_temperature: float | None
) -> tuple[IlqlConfig, AgentState, int]:
    """Load a trained language agent: its config with the given decoding, its state, and the step of the checkpoint."""
    config: Any = read_config(run_dir)
    if not isinstance(config, IlqlConfig):
        raise UserError(
            f"{run_dir} is a run of `isqn train {config.agent}`; `isqn play` needs a run of `isqn train ilql`."
        )
    state, step = load_agent_state(run_dir, make_run_agent(config, SPEC), which)
    if acting_rule != "auto":
        config = config.acting_by(acting_rule)
    if inverse_temperature is not None:
        config = config.replace(inverse_temperature=inverse_temperature)
    return config, state, step


# -- training


def train(config: IlqlConfig, folders: list[Path], env: Environment | None, control: Control) -> None:
    """Train the run of the folder to its end."""
    progress = control.progress
    with parallel.working_folder(folders[0]) as run_dir:
        source = open_source(config)
        progress.say(f"{config.label} on {config.env_id}: {source.describe()}; seed {config.seed}")
        agent = make_run_agent(config, source.spec)
        size = agent_bytes(config, source.spec)
        progress.say(f"{size / 1e9:.3g} GB for networks and optimizer; games are made as they are needed.")
        evaluate = make_evaluation(config, source, control.should_stop)
        finish = begin_summaries(config, [run_dir], source.spec, learned_from=source.provenance())
        epochs = offline.train(
            config,
            run_dir,
            agent,
            source,
            evaluate,
            control,
            initialise=partial(initialise, config),
            measures=MEASURES,
            devices=_make_devices(config, source, progress),
        )
        for epoch in epochs:
            progress.say(epoch_line(config, [epoch], progress))
        finish()


def _make_devices(config: IlqlConfig, source: Source, progress: Progress) -> offline.Devices:
    """Return the placement of arrays on all devices of all processes."""

    def compile_update(update: Any, state: Any, totals: Any, updates: int) -> Any:
        parallel.require_same(f"{source.digest} {updates}")
        shapes = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), source.spec.batch_shapes(config.batch_size))
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
    """Say the peak memory of a compiled update on each device; refuse it if there is not so much memory."""
    plan = update.memory_analysis()
    extra = plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
    peak = plan.argument_size_in_bytes + extra
    devices = format_count(jax.device_count(), "device")
    progress.say(f"an update needs {peak / 1e9:.3g} GB at its peak, on each of {devices}")
    if jax.default_backend() == "cpu" and jax.local_device_count() * extra > 0.95 * free_memory():
        raise UserError(
            f"An update needs {extra / 1e9:.1f} GB beside the network and the optimizer, on each of "
            f"{format_count(jax.local_device_count(), 'device')}, and {free_memory() / 1e9:.1f} GB are free; lower "
            "--micro-batch-size, or give --rematerialise."
        )


def seconds_per_step(config: IlqlConfig, seconds: float) -> float:
    """Measure the seconds of a gradient step, with its share of the evaluations."""
    spec = specification(config)
    agent = make_run_agent(config, spec)
    each = timing.time_updates(config, agent, spec, spec.batch_shapes(config.batch_size), seconds / 2)
    evaluate = make_evaluation(config, open_source(config))
    state = jax.jit(agent.init)(config.seed)
    return each + timing.time_calls(lambda: evaluate(state, 0), seconds / 2, least=2).median / config.epoch_updates
