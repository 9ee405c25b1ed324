"""From a configuration to a trained run folder, by whichever loop fits."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from isqn import agents
from isqn.agents.q_learning import Agent, AgentState
from isqn.analysis.probes import observed
from isqn.data.dataset import INDEX, Dataset, read_index, spec_of, unpacked_bytes
from isqn.data.device_replay import DeviceReplay
from isqn.data.files import DamagedFile, Description
from isqn.data.replay import Memory, Replay, memory_needed
from isqn.data.sample import columns_bytes
from isqn.envs import atari, dmc, wordle
from isqn.envs.adapter import Environment, full_id, make_environment, require_protocol
from isqn.envs.native import has_native, make_native
from isqn.experiments.config import Config, flag, has_effect, nearest_path, others, read_toml, seed_dir
from isqn.experiments.study import import_for
from isqn.keys import episode_seed
from isqn.train import checkpoint, compiled, host, language, offline, parallel, record, timing
from isqn.train.evaluate import host_evaluation, load_agent_state, native_evaluation
from isqn.train.loop import Epoch, empty_totals
from isqn.train.progress import Progress, count, duration, free_memory, memory_mb
from isqn.types import EnvSpec, UserError, num_bytes

LONG_RUN_STEPS = 100_000  # from here on a run is worth a measured estimate of its time


def make_agent(config: Config, spec: EnvSpec) -> Agent:
    agent = agents.make(config, spec)
    return observed(agent, config, spec) if config.held_out_size else agent


def uses_compiled_loop(config: Config) -> bool:
    native = has_native(config.env_id)
    if config.loop == "compiled" and not native:
        raise UserError(
            f"--loop compiled needs an environment written in JAX, and {config.env_id} is not; "
            "`isqn list envs` shows which are, or leave --loop at auto."
        )
    if config.num_seeds > 1 and (config.loop == "host" or not native):
        raise UserError(
            f"--num-seeds {config.num_seeds} needs the compiled loop, for environments written in JAX; "
            f"train the seeds of {config.env_id} one by one with --seed."
        )
    return native and config.loop != "host" and not (config.record_dataset or config.is_offline)


def compresses(config: Config, spec: EnvSpec) -> bool:
    if config.compress_replay == "auto":
        return spec.is_image and config.seen(spec).frame_dtype in ("uint8", "bool")
    return config.compress_replay == "yes"


def replay_factory(config: Config, spec: EnvSpec, rows: int | None = None) -> Callable[[], Replay]:
    """As large as the run needs, or of so many rows."""
    return lambda: Replay(
        config.seen(spec),
        rows or config.replay_rows,
        compress=compresses(config, spec),
        num_steps_return=config.num_steps_return,
        discount=config.discount,
        reward_clip=config.reward_clip,
    )


def require_memory(size: int, needs: str, advice: str) -> None:
    """Refuse before allocating, rather than fail hours in."""
    available = free_memory()
    if size > 0.9 * available:
        raise UserError(f"{needs}; {available / 1e9:.1f} GB are free here. {advice}")


def specification(config: Config) -> EnvSpec:
    """Of the environment as this run will see it."""
    if config.writes:
        return wordle.spec_of(official=config.official_colours)
    if index := _index(config):
        return spec_of(index)
    if uses_compiled_loop(config):
        spec = make_native(config.env_id).spec
        require_protocol(config.protocol, spec.protocol, spec.id)
        return spec
    env = make_environment(config.env_id, protocol=config.protocol)
    env.close()
    return env.spec


def _index(config: Config) -> Description:
    """Of its dataset; nothing if it has none, or none yet."""
    folder = Path(config.dataset)
    return read_index(folder) if config.is_offline and config.dataset and (folder / INDEX).is_file() else {}


def device_replay(config: Config, spec: EnvSpec) -> DeviceReplay:
    seen, rows = config.seen(spec), config.replay_rows
    return DeviceReplay(seen, rows, config.num_steps_return, config.discount, config.reward_clip)


def replay_memory(config: Config, spec: EnvSpec) -> Memory:
    """Of all seeds that are trained at once."""
    if config.is_offline:
        rows = _index(config).get("rows", 0)
        frames = unpacked_bytes(spec, rows)
        return Memory(columns=columns_bytes(spec, rows), frames=frames, most_frames=frames, compressed=False)
    if not uses_compiled_loop(config):
        return memory_needed(config.seen(spec), config.replay_rows, compresses(config, spec))
    size = device_replay(config, spec).nbytes * config.num_seeds
    return Memory(columns=0, frames=size, most_frames=size, compressed=False)


def agent_bytes(config: Config, spec: EnvSpec) -> int:
    """Networks, copies and optimizer of all seeds that are trained at once."""
    return config.num_seeds * num_bytes(jax.eval_shape(make_agent(config, spec).init, 0))


def start(config: Config, run_dir: Path | None = None, *, overwrite: bool = False, quiet: bool = False) -> list[Path]:
    """Train a new run; the folders that it wrote, one for each seed."""
    folders = run_dirs(config, run_dir)
    if config.writes:
        parallel.join()
    require_possible(config, specification(config), compiled_loop=uses_compiled_loop(config))
    if config.writes:
        language.require_beginning(config)
    for folder in folders:
        record.require_free(folder, overwrite)
        for place in config.places.values():
            if folder.resolve().is_relative_to(Path(place).resolve()):
                raise UserError(f"{folder} lies in {place}, which is learned from; choose another --run-dir.")
            if Path(place).resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{place} lies in {folder}, which is to be overwritten; choose another --run-dir.")
    parallel.meet("checked")
    if not parallel.is_first():
        train(config.replace(track="none"), folders, quiet=True)
        return folders
    with record.hold(folders):
        for index, folder in enumerate(folders):
            record.create_run(folder, config.of_seed(index), overwrite)
        for folder in folders:
            record.write_summary(folder, {"status": "running", "trained_with": _relative(folders, folder)})
        train(config, folders, quiet=quiet)
    return folders


def require_possible(config: Config, spec: EnvSpec, *, compiled_loop: bool) -> None:
    """Refuse what cannot run before a folder is made, or an old one deleted, for it."""
    size = agent_bytes(config, spec)
    require_memory(size, f"The network and its optimizer need {size / 1e9:,.1f} GB", _lower(config))
    held = offline.HELD if config.is_offline else config.num_seeds
    size = held * num_bytes(spec.batch(config.sampled_batch_size))
    what = f"The {held} batches that are held take" if held > 1 else "A batch takes"
    require_memory(size, f"{what} {size / 1e9:,.1f} GB", f"Lower {flag('batch_size')}.")
    if config.writes:
        shared = _learned_at_once(config)
        parallel.require_shares(getattr(config, shared), flag(shared))
        language.open_source(config)
        return
    memory = replay_memory(config, spec)
    if config.is_offline:
        needs = f"{config.dataset} takes {memory.total / 1e9:.1f} GB in memory"
        require_memory(memory.total, needs, "Take a part of it by `isqn data convert --fraction`.")
        open_dataset(config)
        return
    rows = "analysis_samples" if config.streams else "buffer_size"
    can_compress = not (compiled_loop or memory.compressed or "compress_replay" in others(config.agent))
    instead = f", or set {flag('compress_replay')} yes" if can_compress else ""
    require_memory(memory.total, f"The run needs {memory}", f"Lower {flag(rows)}{instead}.")
    if compiled_loop:
        _require_whole_updates(config)


def _learned_at_once(config: Config) -> str:
    """The setting that says how much."""
    return "micro_batch_size" if config.micro_batch_size else "batch_size"


def _lower(config: Config, *first: str) -> str:
    """Advice on what a network takes its memory for."""
    learned = ("num_bellman_iterations", "num_atoms", "width_factor", "critic_width", "hidden_sizes", "num_seeds")
    sizes = (*learned, "num_layers", "model_width")
    flags = [flag(n) for n in (*first, *sizes) if n not in others(config.agent) and has_effect(n, config)]
    return f"Lower {', '.join(flags[:-1])} or {flags[-1]}."


def _require_whole_updates(config: Config) -> None:
    for name in ("log_period_steps", "epoch_steps", "total_timesteps"):
        if getattr(config, name) % config.update_period:
            raise UserError(
                f"{flag(name)} is {getattr(config, name)}; in the compiled loop it must be a multiple of "
                f"{flag('update_period')} ({config.update_period})."
            )


def run_dirs(config: Config, run_dir: Path | None) -> list[Path]:
    """One folder for each seed."""
    if run_dir is not None and config.num_seeds == 1:
        return [run_dir]
    configs = [config.of_seed(index) for index in range(config.num_seeds)]
    return [seed_dir(run_dir, one.seed) if run_dir else record.default_run_dir(one) for one in configs]


def resume(run_dir: Path, *, quiet: bool = False) -> bool:
    """Go on where the run stopped; False if it had finished."""
    read_config(run_dir)
    if record.run_state(run_dir) == "finished":
        return False
    folders = [run_dir / name for name in record.read_summary(run_dir).get("trained_with", ["."])]
    config = read_config(folders[0]).replace(num_seeds=len(folders))
    if config.writes:
        parallel.join()
    if not parallel.is_first():
        train(config.replace(track="none"), folders, quiet=True)
        return True
    if config.dataset and not Path(config.dataset).exists():
        raise UserError(
            f"{config.dataset}, which {run_dir} learns from, is not there; put it back, or say where it is now: "
            f"`dataset` in {run_dir / 'config.toml'} may be changed."
        )
    with record.hold(folders):
        for folder in folders:
            _require_unchanged(folder, read_config(folder))
        require_possible(config, specification(config), compiled_loop=uses_compiled_loop(config))
        train(config, folders, quiet=quiet)
    return True


def _require_unchanged(run_dir: Path, config: Config) -> None:
    """A run goes on with the settings it began with, or its bits would be nobody's."""
    for step in checkpoint.steps(run_dir):
        try:
            earlier = checkpoint.read_manifest(checkpoint.folder_of(run_dir, step))["config"]
        except DamagedFile:
            continue
        for name, value in config.kept().items():
            if value != earlier.get(name, value):  # a version that knows more settings may go on
                raise UserError(
                    f"{run_dir / 'config.toml'} was changed: {name} is {value!r}, and was {earlier[name]!r} at the "
                    "last checkpoint; put it back, or train a new run with `isqn train --config`."
                )
        return


def _relative(folders: list[Path], here: Path) -> list[str]:
    """The folders of the seeds of one program, as seen from one of them."""
    return [os.path.relpath(folder, here) for folder in folders]


def read_config(run_dir: Path) -> Config:
    if not (run_dir / "config.toml").is_file():
        if not run_dir.exists():
            raise UserError(f"{run_dir} does not exist{nearest_path(run_dir) or '; give the folder of a run.'}")
        raise UserError(f"{run_dir} is not a run: there is no config.toml in it.")
    import_for(run_dir)
    return read_toml(run_dir / "config.toml")


def require_environment(config: Config, what: str) -> None:
    """That an agent acts in one, and does not write words."""
    if config.writes:
        raise UserError(f"{what} is not for {config.label}, which writes words; see `isqn eval` and `isqn play`.")


class Player(NamedTuple):
    """A trained agent, and what it plays."""

    config: Config
    env: Environment
    agent: Agent
    state: AgentState
    step: int  # of its training
    epsilon: float


def load_player(
    run_dir: Path,
    which: str,
    acting_rule: str,
    epsilon: float | None,
    *,
    of_policies: str | None = None,
    render: bool = False,
) -> Player:
    """By the acting rule that is asked for; auto: as in training, or of a policy as `of_policies` says."""
    config = read_config(run_dir)
    require_environment(config, "`isqn data collect`")
    if acting_rule == "auto":
        acting_rule = (config.is_actor_critic and of_policies) or config.acting_rule
    config = config.replace(acting_rule=acting_rule)
    env = make_environment(config.env_id, protocol=config.protocol, render=render)
    agent = make_agent(config, env.spec)
    state, step = load_agent_state(run_dir, agent, which)
    return Player(config, env, agent, state, step, config.evaluation_epsilon if epsilon is None else epsilon)


def load_writer(
    run_dir: Path, which: str, acting_rule: str, inverse_temperature: float | None
) -> tuple[Config, AgentState, int]:
    """A trained agent that writes, and the step of its training."""
    config = read_config(run_dir)
    if not config.writes:
        raise UserError(f"{run_dir} is a run of `isqn train {config.agent}`; words are for runs of `isqn train ilql`.")
    state, step = load_agent_state(run_dir, make_agent(config, wordle.SPEC), which)
    if acting_rule != "auto":
        config = config.replace(acting_rule=acting_rule)
    if inverse_temperature is not None:
        config = config.replace(inverse_temperature=inverse_temperature)
    return config, state, step


def train(config: Config, folders: list[Path], *, quiet: bool = False, env: Environment | None = None) -> None:
    """Train what `folders` hold to the end, each from its newest checkpoint, by the loop that fits."""
    progress = Progress(config.length, enabled=not quiet)
    if not checkpoint.steps(folders[0]) and record.results_table(folders[0]).exists():
        progress.say(f"there is no checkpoint in {folders[0]}: the run begins again at step 0")
    with stop_on_signals() as should_stop, _memory_named(config):
        if config.writes:
            with parallel.workplace(folders[0]) as folder:
                _train_offline(config, folder, env, progress, should_stop)
        elif config.is_offline:
            _train_offline(config, folders[0], env, progress, should_stop)
        elif env is None and uses_compiled_loop(config):
            _train_compiled(config, folders, progress, should_stop)
        else:
            made = env or make_environment(config.env_id, protocol=config.protocol)
            _train_on_host(config, folders[0], made, progress, should_stop)
            if env is None:
                made.close()


def _train_on_host(
    config: Config, run_dir: Path, env: Environment, progress: Progress, should_stop: Callable[[], bool]
) -> None:
    progress.say(f"{config.label} on {env.spec.id} ({env.spec.protocol}), seed {config.seed}")
    if env.spec.protocol in atari.PROTOCOLS:
        progress.say(atari.PROTOCOLS[env.spec.protocol].describe())
    progress.say(_memory_line(config, env.spec))
    for remark in _remarks(config):
        progress.say(remark)
    agent, make_replay = make_agent(config, env.spec), replay_factory(config, env.spec)
    finish = _begin_summaries(config, [run_dir], env.spec)
    functions = host.compile_agent(agent)
    if progress.enabled and config.total_timesteps >= LONG_RUN_STEPS:
        times = timing.measure(config, agent, env, make_replay(), functions, seconds=0.5)
        left = config.total_timesteps - max(checkpoint.steps(run_dir), default=0)
        seconds = left * times.seconds_per_step(config)
        progress.say(f"about {duration(seconds)} on this machine for {left:,} steps{_shorter(config)}")
    epochs = host.train(
        config, run_dir, agent, env, make_replay, functions=functions, should_stop=should_stop, progress=progress
    )
    for epoch in epochs:
        progress.say(_epoch_line(config, [epoch], progress))
    finish()


def _train_compiled(config: Config, folders: list[Path], progress: Progress, should_stop: Callable[[], bool]) -> None:
    env = make_native(config.env_id)
    replay = device_replay(config, env.spec)
    seeds = f"seeds {config.seed} to {config.seed + len(folders) - 1}" if len(folders) > 1 else f"seed {config.seed}"
    progress.say(f"{config.label} on {env.spec.id} ({env.spec.protocol}), {seeds}, compiled loop")
    progress.say(_memory_line(config.replace(num_seeds=len(folders)), env.spec))
    agent = make_agent(config, env.spec)
    finish = _begin_summaries(config, folders, env.spec)
    for epochs in compiled.train(config, folders, agent, env, replay, should_stop=should_stop, progress=progress):
        progress.say(_epoch_line(config, epochs, progress))
    finish()


def _train_offline(
    config: Config, run_dir: Path, env: Environment | None, progress: Progress, should_stop: Callable[[], bool]
) -> None:
    dataset: Any = language.open_source(config) if config.writes else open_dataset(config)
    where = config.env_id if config.writes else dataset.folder
    progress.say(f"{config.label} on {where}: {dataset.describe()}; seed {config.seed}")
    progress.say(_memory_line(config, dataset.spec))
    agent = make_agent(config, dataset.spec)
    more: dict[str, Any] = {"should_stop": should_stop, "progress": progress}
    if config.writes:
        more |= {"measures": language.MEASURES, "prepare": partial(language.prepared, config)}
        playing: Any = nullcontext(language.evaluation(config, dataset, should_stop))
    else:
        playing = _evaluation(config, agent, dataset.spec, env, should_stop)
    with playing as evaluate:
        finish = _begin_summaries(config, [run_dir], dataset.spec, learned_from=dataset.origin())
        for epoch in offline.train(config, run_dir, agent, dataset, evaluate, **more):
            progress.say(_epoch_line(config, [epoch], progress))
        finish()


def open_dataset(config: Config) -> Dataset:
    if not config.dataset:
        raise UserError(f"{flag('dataset')} is not given; it is the folder that `isqn train cql` learns from.")
    dataset = Dataset.open(
        Path(config.dataset),
        num_steps_return=config.num_steps_return,
        discount=config.discount,
        reward_clip=config.reward_clip,
    )
    dataset.require_complete()
    if full_id(config.env_id) != dataset.spec.id:
        raise UserError(f"{config.dataset} is of {dataset.spec.id}, not of {flag('env_id')} {config.env_id}.")
    agents.require_actions(config, dataset.spec)
    return dataset


@contextmanager
def _evaluation(
    config: Config, agent: Agent, spec: EnvSpec, env: Environment | None, should_stop: Callable[[], bool]
) -> Iterator[Callable[[AgentState, int], offline.Evaluation]]:
    """Of a state at an epoch: in one program if the environment is written in JAX."""
    count = min(config.evaluation_environments, max(1, config.evaluation_steps))
    common: dict[str, Any] = {
        "steps": config.evaluation_steps,
        "epsilon": config.evaluation_epsilon,
        "max_episode_steps": config.max_episode_steps,
        "should_stop": should_stop,
    }
    made: list[Environment] = []
    if not config.evaluation_steps:
        yield lambda state, epoch: offline.Evaluation([])
        return
    if env is None and has_native(config.env_id) and config.loop != "host":
        native = make_native(config.env_id)
        _require_same_game(spec, native.spec)
        play = native_evaluation(agent, native, count=count, **common)
    else:
        made = [] if env else [make_environment(config.env_id, protocol=config.protocol) for _ in range(count)]
        played = [env] if env else made
        _require_same_game(spec, played[0].spec)
        play = host_evaluation(agent, played, **common)
    try:
        yield lambda state, epoch: offline.Evaluation(play(state, episode_seed(config.seed, epoch)))
    finally:
        for own in made:
            own.close()


def _require_same_game(spec: EnvSpec, other: EnvSpec) -> None:
    """What was recorded must be what is played."""
    for name in ("protocol", "obs_shape", "frame_dtype", "num_actions", "action_low", "action_high"):
        if getattr(spec, name) != getattr(other, name):
            raise UserError(
                f"The dataset is of {spec.id} with {name} {getattr(spec, name)}; {other.id} has {getattr(other, name)}."
            )


def seconds_per_step(config: Config, seconds: float = 1.0) -> float:
    """Of all its seeds together, once it learns; measured here, after compiling."""
    if config.is_offline:
        return _seconds_per_update(config, seconds)
    if not uses_compiled_loop(config):
        env = make_environment(config.env_id, protocol=config.protocol)
        replay = replay_factory(config, env.spec, rows=timing.ROWS)()
        measured = timing.measure(config, make_agent(config, env.spec), env, replay, seconds=seconds / 4)
        env.close()
        return measured.seconds_per_step(config)
    native = make_native(config.env_id)
    agent, rows = make_agent(config, native.spec), device_replay(config, native.spec)
    loop, steps = compiled.make_loop(config, agent, native, rows), 100 * config.update_period
    state = loop.init(jax.numpy.arange(config.seed, config.seed + config.num_seeds))

    def stretch() -> None:
        nonlocal state
        state, ended, _ = loop.run(state, 0, num_steps=steps, learning=True)
        jax.block_until_ready(ended)

    return timing.time_calls(stretch, seconds).median / steps


def _seconds_per_update(config: Config, seconds: float) -> float:
    """With what evaluations take for each."""
    spec = specification(config)
    agent = make_agent(config, spec)
    call = host.compile_agent(agent)
    state, totals = call.init(config.seed), empty_totals(agent, config, spec)
    batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec.batch(config.sampled_batch_size))
    batch = batch if config.writes else batch._replace(ended=(), explored=())

    def update() -> None:
        nonlocal state, totals
        state, totals = call.update(state, totals, batch)
        jax.block_until_ready(state)

    each = timing.time_calls(update, seconds / 2).median
    if config.writes:
        evaluate = language.evaluation(config, language.open_source(config))
        return each + timing.time_calls(lambda: evaluate(state, 0), seconds / 2, least=2).median / config.epoch_updates
    if not config.evaluation_steps:
        return each
    steps = min(config.evaluation_steps, 200)
    brief = config.replace(evaluation_steps=steps, max_episode_steps=steps)
    with _evaluation(brief, agent, spec, None, lambda: False) as play:
        taken = timing.time_calls(lambda: play(state, 0), seconds / 2, least=2).median
        a_step = taken / sum(episode.length for episode in play(state, 0).episodes)
    return each + a_step * config.evaluation_steps / config.epoch_updates


def _memory_line(config: Config, spec: EnvSpec) -> str:
    if config.writes:
        return (
            f"{agent_bytes(config, spec) / 1e9:.3g} GB for networks and optimizer; games are made as they are needed."
        )
    memory = replay_memory(config, spec)
    if config.is_offline:
        where = " and frames" if memory.frames else "; frames stay on disk"
        return f"{memory.total / 1e6:.3g} MB for its columns{where}."
    if not config.streams:
        return f"{memory}."
    kept = f"{memory} for the probes to look at" if config.analysis else "there is no replay"
    return f"{agent_bytes(config, spec) / 1e6:.3g} MB for network, traces and moments; {kept}."


def _remarks(config: Config) -> Iterator[str]:
    """What may not be meant."""
    if config.learning_starts >= config.total_timesteps:
        yield f"nothing is learned before step {config.learning_starts:,} ({flag('learning_starts')})"
    decay, total = config.learning_rate_decay_steps, config.total_timesteps
    if decay and decay != total:
        of_all = (
            f"is at its end after {decay:,} of {total:,} steps" if decay < total else f"decays over {decay:,} steps"
        )
        yield f"the learning rate {of_all} ({flag('learning_rate_decay_steps')})"
    if config.num_atoms > 1 and not config.normalise_rewards:
        yield f"returns beyond +-{config.value_bound:g} are cut ({flag('value_bound')}, or {flag('normalise_rewards')})"


def _shorter(config: Config) -> str:
    short = {"ALE/": "atari-stream-smoke" if config.streams else "atari-smoke", dmc.PREFIX: "dmc-small"}
    names = [name for prefix, name in short.items() if config.env_id.startswith(prefix)]
    return f"; --preset {names[0]} is a short one." if names else "."


def _begin_summaries(config: Config, folders: list[Path], spec: EnvSpec, **more: Any) -> Callable[[], None]:
    """Say in each folder what runs there; the function returned says that it is done."""
    about = {**record.provenance(), "label": config.label, "env_id": spec.id, "protocol": spec.protocol, **more}
    summaries = [
        {**about, "seed": config.seed + index, "trained_with": _relative(folders, folder)}
        for index, folder in enumerate(folders)
    ]

    def finish() -> None:
        for folder, summary in zip(folders, summaries, strict=True):
            record.write_summary(folder, {"status": "finished", **summary, **record.results(folder)})

    for folder, summary in zip(folders, summaries, strict=True):
        if record.run_state(folder) != "finished":  # a seed whose program is to go on for others keeps its results
            record.write_summary(folder, {"status": "running", **summary})
    return finish


def _epoch_line(config: Config, epochs: list[Epoch], progress: Progress) -> str:
    # offline they are counted from the one before the first update
    number, last = (epochs[0].epoch + (not config.is_offline), config.num_epochs - config.is_offline)
    returns = ", ".join(f"{epoch.mean_return:.2f}" for epoch in epochs)
    games = count(sum(len(epoch.returns) for epoch in epochs), "episode")
    played = "" if config.is_offline and not config.evaluation_steps else f": return {returns} ({games})"
    left = progress.left(epochs[0].step)
    return f"epoch {number}/{last}{played}, {memory_mb():,.0f} MB" + (f", {left}" if left else "")


@contextmanager
def _memory_named(config: Config) -> Iterator[None]:
    """What a batch needs on its way through a network is known only when it is asked for."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, jax.errors.JaxRuntimeError) and not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", why):
            raise
        raise UserError(
            f"There is not enough memory for an update ({why}). {_lower(config, _learned_at_once(config))}"
        ) from error


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM, a closed terminal and Ctrl-C ask the loop to save and stop; a second Ctrl-C stops at once."""
    asked = False

    def ask(signum: int, _: Any) -> None:
        nonlocal asked
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    wanted = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # what is ignored, as under nohup, stays so
    earlier = {s: signal.signal(s, ask) for s in wanted if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield lambda: asked
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
