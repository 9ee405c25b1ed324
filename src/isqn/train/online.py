"""Runs that learn while they act in an environment, in the host loop or the compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from isqn.config.fields import field_names, flag
from isqn.data.device_replay import DeviceReplay
from isqn.data.replay import Memory, Replay, memory_needed
from isqn.envs import atari
from isqn.envs.adapter import Environment, make_run_environment, require_protocol
from isqn.envs.registry import has_native, make_native
from isqn.train import checkpoint, compiled, host, timing
from isqn.train.announce import begin_summaries, epoch_line, require_memory
from isqn.train.functions import agent_bytes, compile_agent, flops_per_update, make_run_agent
from isqn.train.progress import Control, duration
from isqn.types import EnvSpec, UserError

IS_DISTRIBUTED = False
WORK = "update"  # the unit whose FLOPs are counted
flops = flops_per_update
LONG_RUN_STEPS = 100_000  # for longer runs, the time is estimated by a measurement at the start


def has_native_version(config: Any) -> bool:
    """Return whether the environment of a run has a JAX version, which takes no keyword arguments and no wrappers."""
    return has_native(config.env_id) and not (config.env_kwargs or config.env_wrappers)


def require_native(config: Any) -> None:
    """Refuse `--loop compiled` for an environment without a JAX version."""
    if not has_native(config.env_id):
        raise UserError(
            f"--loop compiled needs an environment written in JAX, and {config.env_id} is not; `isqn list envs` shows "
            "which are, or leave --loop at auto."
        )
    if not has_native_version(config):
        raise UserError(
            f"--loop compiled uses the JAX version of {config.env_id}, which takes no {flag('env_kwargs')} and no "
            f"{flag('env_wrappers')}; leave --loop at auto."
        )


def uses_compiled_loop(config: Any) -> bool:
    """Return whether a run trains in the compiled loop; refuse a --loop or --num-seeds that does not fit."""
    native = has_native_version(config)
    if config.loop == "compiled":
        require_native(config)
    if config.num_seeds > 1 and (config.loop == "host" or not native):
        switch = "add --loop compiled, or " if native else ""
        raise UserError(
            f"--num-seeds {config.num_seeds} needs the compiled loop, for environments written in JAX; "
            f"{switch}train the seeds of {config.env_id} one by one with --seed."
        )
    return native and config.loop != "host" and not config.record_dataset


def trains_seeds_together(config: Any) -> bool:
    return "num_seeds" in field_names(type(config)) and uses_compiled_loop(config)


def specification(config: Any) -> EnvSpec:
    """Return the specification of the environment as this run will observe it."""
    if uses_compiled_loop(config):
        spec = make_native(config.env_id).spec
        require_protocol(config.protocol, spec.protocol, spec.id)
        return spec
    with make_run_environment(config) as env:
        return env.spec


# -- memory


def uses_compression(config: Any, spec: EnvSpec) -> bool:
    if config.compress_replay == "auto":
        return spec.is_image and config.observed_spec(spec).frame_dtype in ("uint8", "bool")
    return config.compress_replay == "yes"


def make_replay_factory(config: Any, spec: EnvSpec, rows: int | None = None) -> Callable[[], Replay]:
    """Return a function that makes the replay buffer of a run, or one with another number of rows."""
    return lambda: Replay(
        config.observed_spec(spec),
        rows or config.replay_rows,
        compress=uses_compression(config, spec),
        num_steps_return=config.num_steps_return,
        discount=config.discount,
        reward_clip=config.reward_clip,
    )


def make_device_replay(config: Any, spec: EnvSpec) -> DeviceReplay:
    observed, rows = config.observed_spec(spec), config.replay_rows
    return DeviceReplay(observed, rows, config.num_steps_return, config.discount, config.reward_clip)


def replay_memory(config: Any, spec: EnvSpec) -> Memory:
    """Return the memory of the replay buffers of all seeds that are trained at once."""
    if not uses_compiled_loop(config):
        return memory_needed(config.observed_spec(spec), config.replay_rows, uses_compression(config, spec))
    size = make_device_replay(config, spec).nbytes * config.num_seeds
    return Memory(columns=0, frames=size, max_frames=size, compressed=False)


def batches_in_memory(config: Any) -> int:
    return config.num_seeds


def batch_flag(config: Any) -> str:
    return "batch_size"


def require_possible(config: Any, spec: EnvSpec, *, on_host: bool = False, is_new: bool = False) -> None:
    """Refuse a run that cannot work, before its folder is made or an old one is deleted."""
    memory, is_compiled = replay_memory(config, spec), not on_host and uses_compiled_loop(config)
    settings = field_names(type(config))
    rows_setting = "buffer_size" if "buffer_size" in settings else "analysis_samples"
    can_compress = not (is_compiled or memory.compressed) and "compress_replay" in settings
    alternative = f", or set {flag('compress_replay')} yes" if can_compress else ""
    require_memory(memory.total, f"The run needs {memory}", f"Lower {flag(rows_setting)}{alternative}.")
    if is_compiled:
        _require_whole_updates(config)


def _require_whole_updates(config: Any) -> None:
    for name in ("log_period_steps", "epoch_steps", "total_timesteps"):
        if getattr(config, name) % config.update_period:
            raise UserError(
                f"{flag(name)} is {getattr(config, name)}; in the compiled loop it must be a multiple of "
                f"{flag('update_period')} ({config.update_period})."
            )


# -- training


def train(config: Any, folders: list[Path], env: Environment | None, control: Control) -> None:
    """Train the runs in `folders` to the end, in the host loop or the compiled loop."""
    if env is None and uses_compiled_loop(config):
        _train_compiled(config, folders, control)
        return
    if env is not None:
        _train_on_host(config, folders[0], env, control, is_timed=False)  # it would see steps that are not of the run
        return
    with make_run_environment(config) as own:
        _train_on_host(config, folders[0], own, control, is_timed=control.progress.enabled)


def _train_on_host(config: Any, run_dir: Path, env: Environment, control: Control, *, is_timed: bool) -> None:
    progress = control.progress
    progress.say(f"{config.label} on {env.spec.id} (protocol {env.spec.protocol}), seed {config.seed}")
    if env.spec.protocol in atari.PROTOCOLS:
        progress.say(atari.PROTOCOLS[env.spec.protocol].describe())
    progress.say(_memory_line(config, env.spec))
    agent, make_replay = make_run_agent(config, env.spec), make_replay_factory(config, env.spec)
    finish = begin_summaries(config, [run_dir], env.spec)
    functions = compile_agent(agent)
    if is_timed and config.total_timesteps >= LONG_RUN_STEPS:
        times = timing.measure(config, agent, env, make_replay(), functions, seconds=0.5)
        steps_left = config.total_timesteps - max(checkpoint.steps(run_dir), default=0)
        time_left = duration(steps_left * times.seconds_per_step(config))
        progress.say(f"about {time_left} on this machine for {steps_left:,} steps")
    for epoch in host.train(config, run_dir, agent, env, make_replay, functions, control):
        progress.say(epoch_line(config, [epoch], progress))
    finish()


def _train_compiled(config: Any, folders: list[Path], control: Control) -> None:
    progress = control.progress
    env = make_native(config.env_id)
    replay = make_device_replay(config, env.spec)
    seeds = f"seeds {config.seed} to {config.seed + len(folders) - 1}" if len(folders) > 1 else f"seed {config.seed}"
    progress.say(f"{config.label} on {env.spec.id} (protocol {env.spec.protocol}), {seeds}, compiled loop")
    progress.say(_memory_line(config, env.spec))
    agent = make_run_agent(config, env.spec)
    finish = begin_summaries(config, folders, env.spec)
    for epochs in compiled.train(config, folders, agent, env, replay, control):
        progress.say(epoch_line(config, epochs, progress))
    finish()


def _memory_line(config: Any, spec: EnvSpec) -> str:
    memory = replay_memory(config, spec)
    if "buffer_size" in field_names(type(config)):
        return f"{memory}."
    size = agent_bytes(config, spec)
    replay = f"{memory}, which only the probes read" if config.analysis else "no replay buffer"
    return f"{size / 1e6:.3g} MB for network, traces and moments; {replay}."


def seconds_per_step(config: Any, seconds: float) -> float:
    """Measure the seconds of a step of all seeds, after compiling and after learning has started."""
    if not uses_compiled_loop(config):
        with make_run_environment(config) as env:
            replay = make_replay_factory(config, env.spec, rows=timing.ROWS)()
            times = timing.measure(config, make_run_agent(config, env.spec), env, replay, seconds=seconds / 4)
        return times.seconds_per_step(config)
    native = make_native(config.env_id)
    agent, rows = make_run_agent(config, native.spec), make_device_replay(config, native.spec)
    loop, steps = compiled.make_loop(config, agent, native, rows), 100 * config.update_period
    state = loop.init(jax.numpy.arange(config.seed, config.seed + config.num_seeds))

    def stretch() -> None:
        nonlocal state
        state, ended, _ = loop.run(state, 0, num_steps=steps, learning=True)
        jax.block_until_ready(ended)

    return timing.time_calls(stretch, seconds).median / steps
