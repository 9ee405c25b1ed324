"""From a configuration to a trained run folder, by whichever loop fits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from isqn.agents import q_learning
from isqn.analysis.probes import observed
from isqn.data.replay import Memory, Replay, memory_needed
from isqn.envs.adapter import make_environment
from isqn.envs.native import has_native
from isqn.experiments.config import Config, flag, read_toml
from isqn.train import host, record
from isqn.train.progress import Progress
from isqn.types import EnvSpec, UserError


def make_agent(config: Config, spec: EnvSpec) -> q_learning.Agent:
    agent = q_learning.make(config, spec)
    return observed(agent, config) if config.analysis else agent


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
    return native and config.loop != "host"


def compresses(config: Config, spec: EnvSpec) -> bool:
    if config.compress_replay == "auto":
        return spec.is_image and spec.frame_dtype in ("uint8", "bool")
    return config.compress_replay == "yes"


def replay_factory(config: Config, spec: EnvSpec) -> Callable[[], Replay]:
    return lambda: Replay(
        spec,
        config.buffer_size,
        compress=compresses(config, spec),
        num_steps_return=config.num_steps_return,
        discount=config.discount,
        reward_clip=config.reward_clip,
    )


def require_memory(memory: Memory) -> None:
    """Refuse before allocating, rather than fail hours in."""
    available = psutil.virtual_memory().available
    if memory.total > 0.9 * available:
        raise UserError(
            f"The run needs {memory}; {available / 1e9:.1f} GB are free here. Lower {flag('buffer_size')}"
            + ("." if memory.compressed else f", or set {flag('compress_replay')} yes.")
        )


def start(config: Config, run_dir: Path | None = None, *, overwrite: bool = False, quiet: bool = False) -> list[Path]:
    """Train a new run; the folders that it wrote, one for each seed."""
    folders = run_dirs(config, run_dir)
    uses_compiled_loop(config)
    for index, folder in enumerate(folders):
        record.create_run(folder, config.replace(seed=config.seed + index, num_seeds=1), overwrite)
    _train(config, folders, quiet)
    return folders


def run_dirs(config: Config, run_dir: Path | None) -> list[Path]:
    """One folder for each seed."""
    if run_dir is not None and config.num_seeds == 1:
        return [run_dir]
    seeds = range(config.seed, config.seed + config.num_seeds)
    if run_dir is not None:
        return [run_dir / f"seed-{seed}" for seed in seeds]
    return [record.default_run_dir(config.replace(seed=seed)) for seed in seeds]


def resume(run_dir: Path, *, quiet: bool = False) -> bool:
    """Go on where the run stopped; False if it had finished."""
    config = read_config(run_dir)
    if record.run_state(run_dir) == "finished":
        return False
    _train(config, [run_dir], quiet)
    return True


def read_config(run_dir: Path) -> Config:
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{run_dir} is not a run: there is no config.toml in it.")
    return read_toml(run_dir / "config.toml")


def _train(config: Config, folders: list[Path], quiet: bool) -> None:
    progress = Progress(config.total_timesteps, enabled=not quiet)
    with stop_on_signals() as should_stop:
        if uses_compiled_loop(config):
            raise NotImplementedError
        (run_dir,) = folders
        _train_on_host(config, run_dir, progress, should_stop)


def _train_on_host(config: Config, run_dir: Path, progress: Progress, should_stop: Callable[[], bool]) -> None:
    env = make_environment(config.env_id, protocol=config.protocol)
    memory = memory_needed(env.spec, config.buffer_size, compresses(config, env.spec))
    require_memory(memory)
    progress.say(f"{config.label} on {env.spec.id} ({env.spec.protocol}), seed {config.seed} -> {run_dir}")
    progress.say(f"{memory}")
    agent = make_agent(config, env.spec)
    summary = {**record.provenance(), **describe(config, env.spec)}
    record.write_summary(run_dir, {"status": "running", **summary})
    results = []
    epochs = host.train(
        config, run_dir, agent, env, replay_factory(config, env.spec), should_stop=should_stop, progress=progress
    )
    for epoch in epochs:
        results.append(epoch)
        progress.say(
            f"epoch {epoch.epoch + 1}/{config.num_epochs}: "
            f"return {epoch.mean_return:.2f} over {len(epoch.returns)} episodes"
        )
    env.close()
    record.write_summary(run_dir, {"status": "finished", **summary, **record.results(run_dir)})


def describe(config: Config, spec: EnvSpec) -> dict[str, Any]:
    return {"label": config.label, "env_id": spec.id, "protocol": spec.protocol, "seed": config.seed}


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C ask the loop to save and stop; a second Ctrl-C stops at once."""
    asked = False

    def ask(signum: int, _: Any) -> None:
        nonlocal asked
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    earlier = {signum: signal.signal(signum, ask) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: asked
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
