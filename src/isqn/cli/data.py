"""`isqn data`: datasets collected from an agent, converted, and described."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from isqn.cli.parse import UsageError, parse, require_at_least_one, require_probability, require_seed
from isqn.cli.tables import number
from isqn.config.fields import nearest, nearest_path
from isqn.types import UserError


@dataclass(frozen=True)
class Collect:
    """Let a trained agent act, and keep its transitions as a dataset."""

    run_dir: tyro.conf.Positional[Path]
    """Run folder."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Folder of the dataset. The same command continues one that was stopped."""
    steps: int = 100_000
    """Number of agent steps, to the end of the last game."""
    seed: int = 100
    """Seed of the environment and of the agent."""
    epsilon: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Probability of a random action. Default: 0.001, and 0 for a policy."""
    acting_rule: Literal["auto", "uniform", "episode", "mean", "last", "sample"] = "auto"
    """Acting head, or how a policy acts. auto: as in training."""
    which: Literal["last", "best"] = "last"
    """Checkpoint: the newest, or that of the best epoch."""
    quiet: bool = False
    """Print nothing but errors."""


def collect(args: Sequence[str]) -> int:
    options = parse(Collect, args, "isqn data collect")
    require_at_least_one("steps", options.steps)
    require_probability("--epsilon", options.epsilon)
    require_seed(options.seed)
    from isqn.data.dataset import About
    from isqn.train.collect import collect as play
    from isqn.train.player import load_player
    from isqn.train.progress import Progress
    from isqn.train.signals import stop_on_signals

    config, env, agent, state, step, epsilon = load_player(
        options.run_dir, options.which, options.acting_rule, options.epsilon, command="`isqn data collect`"
    )
    progress = Progress(options.steps, enabled=not options.quiet)
    with redirect_stdout(sys.stderr), stop_on_signals() as should_stop:
        went_on = play(
            agent,
            state,
            env,
            options.out,
            About(_player(config, step, epsilon), seed=options.seed),
            steps=options.steps,
            seed=options.seed,
            epsilon=epsilon,
            max_episode_steps=config.max_episode_steps,
            should_stop=should_stop,
            report=lambda step, total: progress.show(step, total, None),
        )
    return _inspected(options.out, went_on, options.quiet)


def _player(config: Any, step: int, epsilon: float) -> str:
    return f"{config.label}, seed {config.seed}, at step {step:,}, epsilon {epsilon:g}, {config.acting_rule}"


@dataclass(frozen=True)
class Convert:
    """Convert the datasets of other software, or take a part of a dataset."""

    source: tyro.conf.Positional[Path]
    """Folder of a dataset: isqn, DQN replay (Dopamine or d4rl-atari), RL Unplugged or Minari."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Folder of the dataset. The same command continues one that was stopped."""
    to: Literal["isqn", "minari"] = "isqn"
    """Output format; minari converts a dataset of isqn."""
    env_id: Annotated[str | None, tyro.conf.arg(metavar="ID")] = None
    """Environment. Default: the one that the source or its path names, such as .../Pong/1."""
    run: int = 1
    """For RL Unplugged: number of the run whose files are read."""
    subset: Literal["all", "first", "random-episodes"] = "all"
    """Subset: the first transitions of each checkpoint (the paper's 10 %), or random episodes."""
    fraction: float = 1.0
    """Fraction of each checkpoint, in (0, 1]."""
    checkpoints: int = 50
    """For a dataset of isqn: number of parts whose first transitions are taken."""
    seed: int = 0
    """Seed of a random subset."""
    quiet: bool = False
    """Print nothing but errors."""


def convert(args: Sequence[str]) -> int:
    options = parse(Convert, args, "isqn data convert")
    from isqn.data.convert import convert as write
    from isqn.data.convert import require_part, to_minari
    from isqn.train.progress import Progress
    from isqn.train.signals import stop_on_signals
    from isqn.train.source import find_source

    require_part(options.subset, options.fraction, options.checkpoints, "--")
    if options.to == "minari" and options.subset != "all":
        raise UserError("--to minari is for a whole dataset; take a part of it first, by another `isqn data convert`.")
    require_seed(options.seed)
    if not options.source.is_dir():
        raise UserError(
            f"{options.source} is not a folder{nearest_path(options.source) or '; give that of a dataset.'}"
        )
    if options.to == "minari":
        return _inspected(options.source, to_minari(options.source, options.out), options.quiet, options.out)
    source, spec = find_source(
        options.source, options.env_id, options.run, options.checkpoints if options.subset == "first" else 1
    )
    total = sum(part.size for part in source.parts)
    progress = Progress(round(total * options.fraction), enabled=not options.quiet)
    with stop_on_signals() as should_stop:
        went_on = write(
            source,
            spec,
            options.out,
            subset=options.subset,
            fraction=options.fraction,
            seed=options.seed,
            should_stop=should_stop,
            report=lambda transitions: progress.show(transitions, None, None),
        )
    return _inspected(options.out, went_on, options.quiet)


@dataclass(frozen=True)
class Inspect:
    """Describe a dataset, and warn about what looks wrong."""

    folder: tyro.conf.Positional[Path]
    """Folder of a dataset."""
    verify: bool = False
    """Read every file and compare its checksum."""
    strip: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Write some frames of the longest episode to this PNG file."""
    json: bool = False
    """Print one JSON object."""


def inspect_dataset(args: Sequence[str]) -> int:
    options = parse(Inspect, args, "isqn data inspect")
    from isqn.data.dataset import Dataset, damaged_files
    from isqn.data.inspect import examine, strip

    damaged = [*damaged_files(options.folder)] if options.verify else []
    if damaged:
        print(json.dumps({"damaged": damaged}) if options.json else "\n".join(damaged))
        return 1
    dataset = Dataset.open(options.folder)
    found = examine(dataset)
    if options.strip:
        strip(dataset, options.strip)
    if options.json:
        print(json.dumps(found | ({"damaged": []} if options.verify else {})))
        return 0
    print(*_described(found), sep="\n")
    if options.verify:
        print(f"verified: {number(len(dataset.index['files']), 'file is', 'files are')} as written")
    return 0


def _inspected(folder: Path, made: bool, quiet: bool, written: Path | None = None) -> int:
    """Describe the dataset that a command has made."""
    if quiet:
        return 0
    from isqn.data.dataset import Dataset
    from isqn.data.inspect import examine
    from isqn.train.progress import say

    if not made:
        say(f"{written or folder} was complete; nothing to do.")
    for line in _described(examine(Dataset.open(folder))):
        say(line)
    print(written or folder)
    return 0


def _described(found: dict[str, Any]) -> Iterator[str]:
    how = f", {found['subset']} {found['fraction']:.3g} of {number(found['num_checkpoints'], 'part', 'parts')}"
    part = "" if found["subset"] == "all" else how
    source = f", from {found['source']}" if found["source"] else ""
    yield f"{found['env_id']} ({found['protocol']}), played by {found['policy']}{source}{part}"
    yield f"{found['transitions']:,} transitions, {number(found['episodes'], 'episode', 'episodes')}, " + (
        f"{found['terminated']:,} of them to a terminal state"
    )
    size = f"{found['bytes'] / 1e6:,.1f} MB" if found["bytes"] >= 1e5 else f"{found['bytes'] / 1e3:.1f} kB"
    yield f"{size}, {found['bytes_per_transition']:.1f} bytes a transition"
    for name in ("returns", "lengths"):
        spread = found[name]
        middle = f"middle half {spread['quarter']:.6g} to {spread['three_quarters']:.6g}"
        yield f"{name}: mean {spread['mean']:.6g}, {middle}, from {spread['least']:.6g} to {spread['most']:.6g}"
    if "actions" in found:
        yield "actions: " + "  ".join(f"{number}: {share:.1%}" for number, share in enumerate(found["actions"]))
    for note in found["notes"]:
        yield f"note: {note}"


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], type]] = {
    "collect": (collect, Collect),
    "convert": (convert, Convert),
    "inspect": (inspect_dataset, Inspect),
}


def run(args: Sequence[str]) -> int:
    """Run `isqn data collect`, `convert` or `inspect`."""
    if not args or args[0] in ("-h", "--help"):
        print("isqn data collect|convert|inspect: datasets to learn from offline.")
        for name, (_, options) in COMMANDS.items():
            print(f"  isqn data {name:8s} {inspect.getdoc(options)}")
        return 0
    if args[0] not in COMMANDS:
        raise UsageError(f"`isqn data {args[0]}` is not known; {nearest(args[0], COMMANDS)}")
    return COMMANDS[args[0]][0](args[1:])
