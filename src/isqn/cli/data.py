"""`isqn data`: collect, convert and inspect datasets."""

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

from isqn.cli.parse import UsageError, arg, parse, require_at_least_one, require_probability, require_seed
from isqn.config.fields import nearest, nearest_path
from isqn.train.progress import format_count
from isqn.types import UserError


@dataclass(frozen=True)
class Collect:
    """Record a dataset of a trained agent."""

    run_dir: Annotated[tyro.conf.Positional[Path], arg("RUN_DIR")]
    """Run folder."""
    out: Annotated[Path, arg("FOLDER", aliases=["-o"])]
    """Folder of the new dataset. If the command is stopped, run it again to resume it."""
    steps: int = 100_000
    """Minimum number of agent steps; the last episode (on Atari, game) is played to its end."""
    seed: int = 100
    """Seed of the environment and of the agent."""
    epsilon: Annotated[float | None, arg("FLOAT", "0.001, or 0 for sac")] = None
    """Probability of a random action."""
    acting_rule: Annotated[str, arg("RULE")] = "auto"
    """Acting head, or action of the policy (--acting-rule of `isqn train`). auto: as in training."""
    which: Literal["last", "best"] = "last"
    """Checkpoint: the newest, or the one after the best epoch."""
    quiet: bool = False
    """Print nothing but errors."""


def collect(args: Sequence[str]) -> int:
    options = parse(Collect, args, "isqn data collect")
    require_at_least_one("steps", options.steps)
    require_probability("--epsilon", options.epsilon)
    require_seed(options.seed)
    from isqn.data.dataset import Provenance
    from isqn.train.collect import collect as play
    from isqn.train.player import load_player
    from isqn.train.progress import Progress
    from isqn.train.signals import stop_on_signals

    config, env, agent, state, step, epsilon = load_player(
        options.run_dir, options.which, options.acting_rule, options.epsilon, command="`isqn data collect`"
    )
    progress = Progress(options.steps, enabled=not options.quiet)
    with redirect_stdout(sys.stderr), env, stop_on_signals() as should_stop:
        has_changed = play(
            agent,
            state,
            env,
            options.out,
            Provenance(_policy_name(config, step, epsilon), seed=options.seed),
            steps=options.steps,
            seed=options.seed,
            epsilon=epsilon,
            max_episode_steps=config.max_episode_steps,
            should_stop=should_stop,
            report=lambda step, total: progress.show(step, total, None),
        )
    return _print_description(options.out, has_changed, options.quiet)


def _policy_name(config: Any, step: int, epsilon: float) -> str:
    return f"{config.label}, seed {config.seed}, at step {step:,}, epsilon {epsilon:g}, {config.acting_rule}"


@dataclass(frozen=True)
class Convert:
    """Convert a dataset of other software, or extract a subset of a dataset."""

    source: Annotated[tyro.conf.Positional[Path], arg("SOURCE")]
    """Folder of isqn, Dopamine, d4rl-atari, RL Unplugged or Minari; minari:ID; or a file .hdf5 or .npz of steps."""
    out: Annotated[Path, arg("FOLDER", aliases=["-o"])]
    """Folder of the new dataset; with --to minari also minari:ID. A stopped command resumes when run again."""
    to: Literal["isqn", "minari"] = "isqn"
    """Output format; minari needs a dataset of isqn as its source."""
    env_id: Annotated[str | None, arg("ID", "from the source, or from its path, such as .../Pong/1")] = None
    """Environment of the source."""
    env_kwargs: Annotated[str | None, arg("JSON", "from the source")] = None
    """For Minari: keyword arguments of the environment, instead of the recorded ones."""
    env_wrappers: Annotated[str | None, arg("JSON", "from the source")] = None
    """For Minari: wrappers of the environment, instead of the recorded ones."""
    run: int = 1
    """For RL Unplugged: number of the run to read."""
    subset: Literal["all", "first", "random-episodes"] = "all"
    """Subset: the first transitions of each checkpoint (as the 10 % of the paper), or random episodes."""
    fraction: float = 1.0
    """Fraction of each checkpoint, in (0, 1]."""
    checkpoints: int = 50
    """For a dataset of isqn with --subset first: number of equal parts; the first transitions of each are taken."""
    seed: int = 0
    """Seed of --subset random-episodes."""
    quiet: bool = False
    """Print nothing but errors."""


def convert(args: Sequence[str]) -> int:
    options = parse(Convert, args, "isqn data convert")
    from isqn.data import minari
    from isqn.data.convert import check_subset
    from isqn.data.convert import convert as write
    from isqn.train.progress import Progress, say
    from isqn.train.signals import stop_on_signals
    from isqn.train.source import export_to_minari, find_source

    check_subset(options.subset, options.fraction, options.checkpoints, "--")
    if options.to == "minari" and options.subset != "all":
        raise UserError("--to minari is for a whole dataset; take a part of it first, by another `isqn data convert`.")
    require_seed(options.seed)
    folder, out = options.source, options.out
    if str(folder).startswith(minari.PREFIX):
        folder = minari.local_folder(str(folder))
    if not folder.is_dir() and (options.to == "minari" or not folder.is_file()):
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}{nearest_path(folder) or '; give a dataset.'}")
    if options.to == "minari":
        out = minari.output_folder(str(out))
        has_changed = export_to_minari(folder, out)
        if not options.quiet:
            say(f"Its id in Minari's folder is {minari.dataset_id(out)}.")
        return _print_description(folder, has_changed, options.quiet, out)
    if str(out).startswith(minari.PREFIX):
        raise UserError(f"--out {out} is for --to minari; give --out a folder.")
    source, spec = find_source(
        folder,
        options.env_id,
        options.run,
        options.checkpoints if options.subset == "first" else 1,
        env_kwargs=options.env_kwargs,
        env_wrappers=options.env_wrappers,
    )
    total = sum(part.size for part in source.parts)
    progress = Progress(round(total * options.fraction), enabled=not options.quiet)
    with stop_on_signals() as should_stop:
        has_changed = write(
            source,
            spec,
            options.out,
            subset=options.subset,
            fraction=options.fraction,
            seed=options.seed,
            should_stop=should_stop,
            report=lambda transitions: progress.show(transitions, None, None),
        )
    return _print_description(options.out, has_changed, options.quiet)


@dataclass(frozen=True)
class Inspect:
    """Print statistics of a dataset, and warnings if something looks wrong."""

    folder: Annotated[tyro.conf.Positional[Path], arg("FOLDER")]
    """Folder of a dataset."""
    verify: bool = False
    """Verify the checksum of every file."""
    strip: Annotated[Path | None, arg("PATH")] = None
    """Write some frames of the longest episode to this PNG file."""
    json: bool = False
    """Print one JSON object."""


def inspect_dataset(args: Sequence[str]) -> int:
    options = parse(Inspect, args, "isqn data inspect")
    from isqn.data.dataset import Dataset, damaged_files
    from isqn.data.inspect import summarise, write_strip

    damaged = [*damaged_files(options.folder)] if options.verify else []
    if damaged:
        print(json.dumps({"damaged": damaged}) if options.json else "\n".join(damaged))
        return 1
    dataset = Dataset.open(options.folder)
    summary = summarise(dataset)
    if options.strip:
        write_strip(dataset, options.strip)
    if options.json:
        print(json.dumps(summary | ({"damaged": []} if options.verify else {})))
        return 0
    print(*_description_lines(summary), sep="\n")
    if options.verify:
        print(f"verified: {format_count(len(dataset.index['files']), 'file is', 'files are')} as written")
    return 0


def _print_description(folder: Path, has_changed: bool, quiet: bool, output: Path | None = None) -> int:
    """Describe a dataset that a command has written, and print the path of the output."""
    if quiet:
        return 0
    from isqn.data.dataset import Dataset
    from isqn.data.inspect import summarise
    from isqn.train.progress import say

    if not has_changed:
        say(f"{output or folder} was complete; nothing to do.")
    for line in _description_lines(summarise(Dataset.open(folder))):
        say(line)
    print(output or folder)
    return 0


def _description_lines(summary: dict[str, Any]) -> Iterator[str]:
    from isqn.data.dataset import UNKNOWN_POLICY

    how = f", {summary['subset']} {summary['fraction']:.3g} of {format_count(summary['num_checkpoints'], 'part')}"
    part = "" if summary["subset"] == "all" else how
    source = f", from {summary['source']}" if summary["source"] else ""
    policy = "an unknown policy" if summary["policy"] == UNKNOWN_POLICY else summary["policy"]
    yield f"{summary['env_id']} ({summary['protocol']}), played by {policy}{source}{part}"
    episodes = f"{format_count(summary['episodes'], 'episode')}, of which {summary['terminated']:,} terminated"
    yield f"{summary['transitions']:,} transitions, {episodes}"
    size = f"{summary['bytes'] / 1e6:,.1f} MB" if summary["bytes"] >= 1e5 else f"{summary['bytes'] / 1e3:.1f} kB"
    yield f"{size}, {summary['bytes_per_transition']:.1f} bytes a transition"
    for name in ("returns", "lengths"):
        stats = summary[name]
        quartiles = f"quartiles {stats['quarter']:.6g} and {stats['three_quarters']:.6g}"
        yield f"{name}: mean {stats['mean']:.6g}, {quartiles}, from {stats['least']:.6g} to {stats['most']:.6g}"
    if "actions" in summary:
        yield "actions: " + "  ".join(f"{number}: {share:.1%}" for number, share in enumerate(summary["actions"]))
    for note in summary["notes"]:
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
