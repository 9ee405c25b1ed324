"""Messages and summaries of a run, and checks of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isqn.config.fields import SIZE, field_names, find_rules, flag, has_effect
from isqn.config.run import Run
from isqn.train import record, tables
from isqn.train.progress import Progress, format_count, free_address_space, free_memory, memory_mb
from isqn.train.session import Epoch
from isqn.types import EnvSpec, UserError

COMPILER_BYTES = 2**28  # address space of the compiler, beside what JAX takes when it starts


def begin_summaries(config: Run, folders: list[Path], spec: EnvSpec, **more: Any) -> Callable[[], None]:
    """Write a summary to each folder, with the status "running"; return a function that writes the finished one."""
    common = {**record.provenance(), "label": config.label, "env_id": spec.id, "protocol": spec.protocol, **more}
    summaries = [
        {**common, "seed": config.seed + index, "trained_with": record.relative_paths(folders, folder)}
        for index, folder in enumerate(folders)
    ]

    def finish() -> None:
        for folder, summary in zip(folders, summaries, strict=True):
            record.write_summary(folder, {"status": "finished", **summary, **tables.results(folder, config.num_epochs)})

    for folder, summary in zip(folders, summaries, strict=True):
        if record.run_state(folder) != "finished":  # a finished seed keeps its results when others resume
            record.write_summary(folder, {"status": "running", **summary})
    return finish


def epoch_line(config: Any, epochs: list[Epoch], progress: Progress) -> str:
    """Return the result of an epoch of all seeds as a line."""
    number, total = epochs[0].epoch + config.first_epoch, config.num_epochs - 1 + config.first_epoch
    returns = ", ".join(f"{epoch.mean_return:.2f}" for epoch in epochs)
    episodes = format_count(sum(len(epoch.returns) for epoch in epochs), "episode")
    result = f": return {returns} ({episodes})" if any(epoch.returns for epoch in epochs) else ""
    time_left = progress.time_left(epochs[0].step)
    return f"epoch {number}/{total}{result}, {memory_mb():,.0f} MB of memory" + (f", {time_left}" if time_left else "")


def remarks(config: Any) -> Iterator[str]:
    """Yield remarks about settings that are allowed, but are probably mistakes."""
    settings, total, period = field_names(type(config)), config.length, config.update_period
    if total // period <= config.learning_starts // period:
        first = (config.learning_starts // period + 1) * period
        names = f"{flag('learning_starts')}, {flag('update_period')}" if period > 1 else flag("learning_starts")
        yield f"nothing is learned in {total:,} steps: the first gradient step is after step {first:,} ({names})"
    if {"batch_size", "buffer_size"} <= set(settings) and config.batch_size > (rows := min(config.buffer_size, total)):
        yield (
            f"a batch repeats transitions: it has {config.batch_size:,} ({flag('batch_size')}), and the replay buffer "
            f"never holds more than {rows:,}"
        )
    if config.learning_rate == 0:
        yield f"nothing is learned: the learning rate is 0 ({flag('learning_rate')})"
    if "head_weights" in settings and not any(config.pair_weights):
        yield f"nothing is learned: the weight of every pair is 0 ({flag('head_weights')})"
    decay = config.learning_rate_decay_steps if "learning_rate_decay_steps" in settings else 0
    if decay and decay != total:
        part = f"is at its end after {decay:,} of {total:,} steps" if decay < total else f"decays over {decay:,} steps"
        yield f"the learning rate {part} ({flag('learning_rate_decay_steps')})"
    if "num_atoms" in settings and config.num_atoms > 1 and not config.normalise_rewards:
        bound = f"({flag('value_bound')}, or {flag('normalise_rewards')})"
        yield f"returns beyond +-{config.value_bound:g} are cut {bound}"


def require_memory(size: int, needs: str, advice: str) -> None:
    """Refuse a run that needs more memory than is free, before anything is allocated."""
    available = free_memory()
    if size > 0.9 * available:
        raise UserError(f"{needs}; {available / 1e9:.1f} GB are free here. {advice}")


def require_address_space() -> None:
    """Refuse a run that the compiler would not survive under `ulimit -v`: it ends the process if it gets no memory."""
    left = free_address_space()
    if left < COMPILER_BYTES:
        raise UserError(
            f"{left / 1e6:,.0f} MB of address space are left under the limit of this process, and compiling takes "
            f"{COMPILER_BYTES / 1e6:,.0f} MB; raise it (`ulimit -v`), or limit the memory by a control group."
        )


def advise_lower(config: Run, *first: str) -> str:
    """Return the advice to lower the settings that the memory of a network depends on."""
    flags = [flag(name) for name in (*first, *find_rules(type(config), SIZE)) if has_effect(name, config)]
    if not flags:
        return "Choose a smaller network."
    return f"Lower {', '.join(flags[:-1])} or {flags[-1]}." if len(flags) > 1 else f"Lower {flags[0]}."
