"""The `isqn` command: parsing, calls and printing only."""

from __future__ import annotations

import inspect
import io
import itertools
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from isqn import __version__
from isqn.experiments.config import (
    AGENTS,
    MOST_INTEGER,
    Config,
    begin,
    nearest,
    nearest_path,
    others,
    read_toml,
    require_effect,
    slug,
)
from isqn.presets import PRESETS, preset_config, preset_for
from isqn.study.grid import import_for
from isqn.study.worker import INTERRUPTED, SEEDS_PER_JOB
from isqn.losses import LOSSES
from isqn.train.progress import count, duration, say
from isqn.types import Interrupted, UserError

USAGE = 2

WELCOME = f"""\
isqn {__version__}: deep value-based reinforcement learning without the second network.
  isqn train dqn --env-id isqn/Chain-v0     a problem with known values, in seconds
  isqn study online-plain --dry-run         a figure of the paper, at a size for this machine
  isqn COMMAND --help                       train, resume, study, report, eval, play, data, probe, cost, list, doctor
The method in ten minutes: src/isqn/schemes.py and src/isqn/losses.py."""


class UsageError(UserError):
    """A command line that cannot be read."""


@dataclass(frozen=True)
class Train:
    """Train a run, or, in environments that are written in JAX, several seeds of it in one program.

    `isqn train dqn` learns with a replay, `isqn train stream-q` without one, `isqn train sac`
    where actions are continuous, `isqn train cql` from a dataset, `isqn train ilql` to write
    words. Defaults are those of the preset; with --env-id ID, --help shows those of an
    environment.
    """

    config: tyro.conf.OmitArgPrefixes[Config] = field(default_factory=Config)
    preset: str = "auto"
    """Named settings that the other flags change (`isqn list presets`). auto: by the environment."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Start from the config.toml of another run."""
    run_dir: Path | None = None
    """The run's folder. By default runs/EXPERIMENT/ENV/LABEL/seed-N."""
    overwrite: bool = False
    """Delete what the folder holds."""
    show_diff: str | None = None
    """Print what differs from this preset, and train nothing."""
    quiet: bool = False
    """Print nothing but errors."""


def train(argv: list[str]) -> int:
    agent = None  # that of the file, if there is one
    if argv and not argv[0].startswith("-"):
        agent, *argv = argv
        if agent not in AGENTS:
            loss = f"that loss is trained by `isqn train dqn --loss {agent}`." if agent in LOSSES else ""
            raise UsageError(f"`isqn train {agent}` is not known; {loss or nearest(agent, AGENTS)}")
    base, source = _base_config(argv, agent)
    default = _with_own_settings(base)
    owners: dict[str, list[str]] = {}
    for other in AGENTS:
        for name in _options(type(_with_own_settings(begin(other)))) if other != base.agent else ():
            owners.setdefault(name, []).append(f"`isqn train {other}`")
    elsewhere = {name: f"it is for {' or '.join(agents)}." for name, agents in owners.items()}
    args = _parse(type(default), argv, f"isqn train {base.agent}", default, elsewhere)
    config = Config(**asdict(args.config))
    require_effect(config, base)
    if args.show_diff:
        return _show_diff(config, args.show_diff)
    from isqn.train import run

    if not args.quiet:
        say(f"settings: {source}")
    with redirect_stdout(sys.stderr):  # ours is for the names of the folders, whatever an environment prints
        folders = run.start(config, args.run_dir, overwrite=args.overwrite, quiet=args.quiet)
    if not args.quiet:
        for line in _known_values(folders[0]):
            say(line)
        for folder in folders:
            print(folder)
    return 0


def _with_own_settings(base: Config) -> Train:
    """A `Train` of a kind that does not show the settings that only other agents have."""
    hints = get_type_hints(Config, include_extras=True)
    hidden = {name: Annotated[hints[name], SUPPRESSED] for name in others(base.agent)}
    kind: Any = dataclass(frozen=True)(type("Config", (Config,), {"__annotations__": hidden}))
    own = {"__doc__": inspect.getdoc(Train), "__annotations__": {"config": Annotated[kind, *OMIT_PREFIX]}}
    train: Any = dataclass(frozen=True)(type("Train", (Train,), own))
    return train(config=kind(**asdict(base)))  # type: ignore[no-any-return]


def _show_diff(config: Config, preset: str) -> int:
    """Settings of a run beside those of a preset, where they differ, or only one of two agents has them."""
    theirs, mine = (
        {name: str(value) for name, value in asdict(one).items() if name not in others(one.agent)}
        for one in (preset_config(preset), config)
    )
    rows = [
        (name, theirs.get(name, ""), mine.get(name, ""))
        for name in asdict(config)
        if theirs.get(name) != mine.get(name)
    ]
    if rows:
        print(*_table((), [("setting", preset, "this run"), *rows]), sep="\n")
    else:
        print(f"nothing differs from {preset}")
    return 0


def _known_values(run_dir: Path) -> list[str]:
    """What was learned beside the truth, for the problems whose values are known."""
    from isqn.train.probe import known_values

    known = known_values(run_dir)
    if known is None:
        return []
    actions = range(known.true.shape[1])
    rows = [
        (str(state), *(f"{q[action]:.3f}" for action in actions for q in (learned, true)))
        for state, learned, true in zip(*known, strict=True)
    ]
    header = ("state", *(name for action in actions for name in (f"Q(s,{action})", f"Q*(s,{action})")))
    difference = abs(known.learned - known.true).max()
    return ["learned and true values:", *_table(header, rows), f"the largest difference is {difference:.3f}"]


def _base_config(argv: list[str], agent: str | None) -> tuple[Config, str]:
    """What the flags change: a file, a preset, or the preset that fits the environment."""
    preset, file, env_id = (_peek(argv, name) for name in ("--preset", "--config", "--env-id"))
    if file:
        if preset:
            raise UsageError("--config and --preset both say where to start from; give one of them.")
        import_for(Path(file))
        config = read_toml(Path(file))
        if agent not in (None, config.agent):
            raise UsageError(f"{file} is of `isqn train {config.agent}`, not of `isqn train {agent}`.")
        return config, file
    dataset = _peek(argv, "--dataset") if agent == "cql" else None
    recorded = {}  # what a dataset says of the environment; what is given beside it must be the same
    if dataset:
        from isqn.data.dataset import read_index, spec_of

        spec = spec_of(read_index(Path(dataset)))
        recorded = {"env_id": spec.id, "protocol": spec.protocol, "dataset": dataset}
    if preset and preset != "auto":
        return preset_config(preset, agent).replace(**recorded), f"preset {preset}"
    fields = {"env_id": env_id or begin(agent or "dqn").env_id} | recorded
    name = preset_for(fields["env_id"], agent or "dqn")
    return preset_config(name).replace(**fields), f"preset {name}, chosen by the environment"


def _peek(argv: list[str], name: str) -> str | None:
    for word, value in itertools.zip_longest(argv, argv[1:]):
        if word.replace("_", "-") == name:
            return None if value and value.startswith("--") else value  # what is missing is said later
        if word.replace("_", "-").startswith(f"{name}="):
            return word.split("=", 1)[1]
    return None


@dataclass(frozen=True)
class Resume:
    """Go on with a run where it stopped."""

    run_dir: tyro.conf.Positional[Path]
    """The folder of a run."""
    quiet: bool = False
    """Print nothing but errors."""


def resume(argv: list[str]) -> int:
    args = _parse(Resume, argv, "isqn resume")
    from isqn.train import run

    with redirect_stdout(sys.stderr):
        went_on = run.resume(args.run_dir, quiet=args.quiet)
    if not went_on and not args.quiet:
        print(f"{args.run_dir} had finished; nothing to do.", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class Eval:
    """Play with a trained agent and print its returns."""

    run_dir: tyro.conf.Positional[Path]
    """The folder of a run."""
    episodes: int = 10
    """Games to play."""
    seed: int = 100
    """Of the games and of the agent's draws."""
    epsilon: float | None = None
    """Share of random actions; by default 0.001, and 0 where a policy acts. Not for ilql."""
    acting_rule: Literal["auto", "uniform", "episode", "mean", "last", "sample", "greedy"] = "auto"
    """The head that acts, or how a policy does. auto: as in training, but of a policy of sac the mean."""
    which: Literal["last", "best"] = "last"
    """The newest checkpoint, or that of the best epoch."""
    beta: float | None = None
    """Of ilql: how much values weigh beside the policy. By default as in training; 0: not at all."""
    html: Path | None = None
    """Of ilql: also write the boards of all games to this page."""
    capture_video: bool = False
    """Record the first game to RUN_DIR/videos."""
    json: bool = False
    """Print one JSON object."""


def evaluate(argv: list[str]) -> int:
    args = _parse(Eval, argv, "isqn eval")
    if args.episodes < 1:
        raise UserError(f"--episodes is {args.episodes}; it must be at least 1.")
    _require_share("--epsilon", args.epsilon)
    _require_seed(args.seed)
    _require_beta(args.beta)
    import numpy as np

    from isqn.train import run
    from isqn.train.evaluate import evaluate as play_games

    if run.read_config(args.run_dir).writes:
        return _evaluate_words(args)
    for name, given in (("--beta", args.beta), ("--html", args.html)):
        if given is not None:
            raise UserError(f"{name} is for runs of `isqn train ilql`, and {args.run_dir} is none.")
    config, env, agent, state, step, epsilon = run.load_player(
        args.run_dir, args.which, args.acting_rule, args.epsilon, of_policies="mean", render=args.capture_video
    )
    video = args.run_dir / "videos" / f"step-{step}-seed-{args.seed}.mp4" if args.capture_video else None
    with redirect_stdout(sys.stderr):
        played = play_games(
            agent,
            state,
            env,
            episodes=args.episodes,
            seed=args.seed,
            epsilon=epsilon,
            max_episode_steps=config.max_episode_steps,
            video=video,
        )
    returns = np.array([episode.episodic_return for episode in played])
    summary = {
        "env_id": env.spec.id,
        "protocol": env.spec.protocol,
        "label": config.label,
        "step": step,
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "epsilon": epsilon,
        "acting_rule": config.acting_rule,
        "episodes": [{"seed": e.seed, "return": e.episodic_return, "length": e.length} for e in played],
        "video": str(video) if video else None,
    }
    if args.json:
        print(json.dumps(summary))
        return 0
    for e in played:
        print(f"return {e.episodic_return:10.2f}   length {e.length:6d}   seed {e.seed}")
    mean = f"{returns.mean():.2f} ± {returns.std():.2f} over {_number(len(played), 'game', 'games')}"
    print(f"{config.label} on {env.spec.id} at step {step:,}: {mean}")
    if video:
        print(video)
    return 0


FEW_WORDS = 2_500  # of a longer list, a table of all colours takes minutes


def _evaluate_words(args: Eval) -> int:
    """Games of Wordle, as boards."""
    from isqn.data.files import replace_text
    from isqn.language.game import board, decode, guesses_of
    from isqn.language.boards import page
    from isqn.train import language, record, run

    for name, given, instead in (
        ("--epsilon", args.epsilon is not None, "--acting-rule sample varies what is written"),
        ("--capture-video", args.capture_video, "--html keeps the boards"),
    ):
        if given:
            raise UserError(f"{name} is not for runs of `isqn train ilql`; {instead}.")
    if args.html and args.html.is_dir():
        raise UserError(f"--html {args.html} is a folder; give a file, such as {args.html / 'boards.html'}.")
    config, state, step = run.load_writer(args.run_dir, args.which, args.acting_rule, args.beta)
    words = language.words_of(config)
    hidden = language.hidden_words(words, args.episodes, args.seed)
    games = language.compile_writer(config).play(state, hidden, args.seed)
    returns, found = games.returns, language.shares(games, words)
    learned_from = record.read_summary(args.run_dir).get("learned_from")
    rulers = {}
    if len(words) <= FEW_WORDS:
        rulers = language.yardsticks(words, hidden, args.seed, official=config.official_colours)
    boards = [(decode(word), guesses_of(tokens)) for word, tokens in zip(hidden, games.tokens, strict=True)]
    summary = {
        "env_id": config.env_id,
        "label": config.label,
        "step": step,
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "win_rate": float(games.solved.mean()),
        **found,
        "players": rulers,
        "learned_from": learned_from,
        "inverse_temperature": config.inverse_temperature,
        "acting_rule": config.acting_rule,
        "episodes": [
            {"word": word, "return": float(total), "guesses": [guess for guess, _ in guesses]}
            for (word, guesses), total in zip(boards, returns, strict=True)
        ],
    }
    mean = f"{returns.mean():.2f} ± {returns.std():.2f} over {_number(len(returns), 'game', 'games')}"
    line = f"{config.label} on {config.env_id} at step {step:,}, beta {config.inverse_temperature:g}: {mean}"
    shares = f"{games.solved.mean():.0%} found; of the guesses {found['valid_share']:.0%} of five letters, "
    shares += f"{found['dictionary_share']:.0%} in the list, {found['consistent_share']:.0%} as the clues allow"
    told = [shares, *([f"learned from {learned_from['games']}"] if learned_from else [])]
    if rulers:
        means = f"any word {rulers['random']:.2f}, any that the clues allow {rulers['consistent']:.2f}"
        told.append(f"players by rule on the same words: {means}, the most telling of these {rulers['informed']:.2f}")
    if args.html:
        args.html.parent.mkdir(parents=True, exist_ok=True)
        replace_text(args.html, page(line, told, boards))
    if args.json:
        print(json.dumps(summary))
        return 0
    for (word, guesses), total in zip(boards, returns, strict=True):
        print(f"{word}, return {total:.0f}", board(guesses, colour=_in_colour()), "", sep="\n")
    print(line, *told, sep="\n")
    if args.html:
        print(args.html)
    return 0


def _in_colour() -> bool:
    """A terminal that is not asked to be plain (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


@dataclass(frozen=True)
class Play:
    """Show how a trained agent looks for a word of Wordle: its guesses, and what else it thought of."""

    run_dir: tyro.conf.Positional[Path]
    """The folder of a run of `isqn train ilql`."""
    word: tyro.conf.Positional[str]
    """Five letters."""
    top: int = 5
    """How many words it thought of are shown at each turn."""
    beta: float | None = None
    """How much values weigh beside the policy. By default as in training; 0: not at all."""
    acting_rule: Literal["auto", "greedy", "sample"] = "auto"
    """auto: as in training."""
    which: Literal["last", "best"] = "last"
    """The newest checkpoint, or that of the best epoch."""
    seed: int = 100
    """Of what is sampled."""
    json: bool = False
    """Print one JSON object."""


def play(argv: list[str]) -> int:
    args = _parse(Play, argv, "isqn play")
    from isqn.language.game import require_word, row

    word = require_word(args.word.lower())
    if args.top < 1:
        raise UserError(f"--top is {args.top}; it must be at least 1.")
    _require_seed(args.seed)
    _require_beta(args.beta)
    from isqn.train import language, run

    config, state, step = run.load_writer(args.run_dir, args.which, args.acting_rule, args.beta)
    words = language.words_of(config)
    games, turns = language.explain(config, state, word, args.top, args.seed)
    if args.json:
        rows = [{**turn._asdict(), "thoughts": [thought._asdict() for thought in turn.thoughts]} for turn in turns]
        print(
            json.dumps(
                {
                    "label": config.label,
                    "step": step,
                    "inverse_temperature": config.inverse_temperature,
                    "acting_rule": config.acting_rule,
                    "word": word,
                    "listed": word in words,
                    "solved": bool(games.solved[0]),
                    "turns": rows,
                }
            )
        )
        return 0
    some = ", ".join(words[:: -(-len(words) // 4)])
    known = "" if word in words else f"; {word} is not among the {len(words)} words it knows, such as {some}"
    print(f"{config.label} at step {step:,}, beta {config.inverse_temperature:g}{known}")
    for number, turn in enumerate(turns, start=1):
        print(f"\n{number}. {row(turn.guess, turn.told, colour=_in_colour())}   V {turn.value:.2f}")
        shown: list[tuple[str, ...]] = [
            (t.word, f"{100 * t.chosen:.2g} %", f"{100 * t.cloned:.2g} %", f"{t.value:.2f}") for t in turn.thoughts
        ]
        print(*(f"   {line}" for line in _table(("word", "chosen", "policy", "Q"), shown)), sep="\n")
    print(f"\n{word}: found with guess {len(turns)}" if games.solved[0] else f"\n{word}: not found")
    return 0


@dataclass(frozen=True)
class Collect:
    """Let a trained agent play, and keep what it does as a dataset."""

    run_dir: tyro.conf.Positional[Path]
    """The folder of a run."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The dataset's folder. The same command goes on with one that was stopped."""
    steps: int = 100_000
    """Agent steps, to the end of the last game."""
    seed: int = 100
    """Of the games and of the agent's draws."""
    epsilon: float | None = None
    """Share of random actions; by default 0.001, and 0 where a policy acts."""
    acting_rule: Literal["auto", "uniform", "episode", "mean", "last", "sample"] = "auto"
    """The head that acts, or how a policy does. auto: as in training."""
    which: Literal["last", "best"] = "last"
    """The newest checkpoint, or that of the best epoch."""
    quiet: bool = False
    """Print nothing but errors."""


def collect(argv: list[str]) -> int:
    args = _parse(Collect, argv, "isqn data collect")
    if args.steps < 1:
        raise UserError(f"--steps is {args.steps}; it must be at least 1.")
    _require_share("--epsilon", args.epsilon)
    _require_seed(args.seed)
    from isqn.data.dataset import About
    from isqn.train import run
    from isqn.train.collect import collect as play
    from isqn.train.progress import Progress

    played = run.load_player(args.run_dir, args.which, args.acting_rule, args.epsilon)
    config, env, agent, state, step, epsilon = played
    progress = Progress(args.steps, enabled=not args.quiet)
    with redirect_stdout(sys.stderr), run.stop_on_signals() as should_stop:
        went_on = play(
            agent,
            state,
            env,
            args.out,
            About(_player(config, step, epsilon), seed=args.seed),
            steps=args.steps,
            seed=args.seed,
            epsilon=epsilon,
            max_episode_steps=config.max_episode_steps,
            should_stop=should_stop,
            report=lambda step, total: progress.show(step, total, None),
        )
    return _inspected(args.out, went_on, args.quiet)


def _player(config: Config, step: int, epsilon: float) -> str:
    return f"{config.label}, seed {config.seed}, at step {step:,}, epsilon {epsilon:g}, {config.acting_rule}"


@dataclass(frozen=True)
class Convert:
    """Make a dataset of files that others have made, or of a part of another dataset."""

    source: tyro.conf.Positional[Path]
    """A folder: of this package, DQN replay (Dopamine or d4rl-atari), RL Unplugged, or Minari."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The dataset's folder. The same command goes on with one that was stopped."""
    to: Literal["isqn", "minari"] = "isqn"
    """minari: from a dataset of this package."""
    env_id: str | None = None
    """What was played. By default what the source says, or a game that its path names, such as .../Pong/1."""
    run: int = 1
    """Of RL Unplugged: files of this run."""
    subset: Literal["all", "first", "random-episodes"] = "all"
    """first: the first transitions of each checkpoint, as the paper's 10 %; random-episodes: some of its episodes."""
    fraction: float = 1.0
    """How much of each checkpoint."""
    checkpoints: int = 50
    """Of a dataset of this package: the parts that `first` takes the first transitions of."""
    seed: int = 0
    """Of a random subset."""
    quiet: bool = False
    """Print nothing but errors."""


def convert(argv: list[str]) -> int:
    args = _parse(Convert, argv, "isqn data convert")
    from isqn.data.convert import convert as write
    from isqn.data.convert import require_part, to_minari
    from isqn.train.progress import Progress
    from isqn.train.run import stop_on_signals
    from isqn.train.source import find_source

    require_part(args.subset, args.fraction, args.checkpoints, "--")
    if args.to == "minari" and args.subset != "all":
        raise UserError("--to minari is for a whole dataset; take a part of it first, by another `isqn data convert`.")
    _require_seed(args.seed)
    if not args.source.is_dir():
        raise UserError(f"{args.source} is not a folder{nearest_path(args.source) or '; give that of a dataset.'}")
    if args.to == "minari":
        return _inspected(args.source, to_minari(args.source, args.out), args.quiet, args.out)
    source, spec = find_source(args.source, args.env_id, args.run, args.checkpoints if args.subset == "first" else 1)
    total = sum(part.size for part in source.parts)
    progress = Progress(round(total * args.fraction), enabled=not args.quiet)
    with stop_on_signals() as should_stop:
        went_on = write(
            source,
            spec,
            args.out,
            subset=args.subset,
            fraction=args.fraction,
            seed=args.seed,
            should_stop=should_stop,
            report=lambda transitions: progress.show(transitions, None, None),
        )
    return _inspected(args.out, went_on, args.quiet)


@dataclass(frozen=True)
class Inspect:
    """What is in a dataset, and what looks wrong."""

    folder: tyro.conf.Positional[Path]
    """Of a dataset."""
    verify: bool = False
    """Read every file, and compare its checksum."""
    strip: Path | None = None
    """Write some frames of the longest episode there, as PNG."""
    json: bool = False
    """Print one JSON object."""


def inspect_dataset(argv: list[str]) -> int:
    args = _parse(Inspect, argv, "isqn data inspect")
    from isqn.data.dataset import Dataset, damaged_files
    from isqn.data.inspect import examine, strip

    damaged = [*damaged_files(args.folder)] if args.verify else []
    if damaged:
        print(json.dumps({"damaged": damaged}) if args.json else "\n".join(damaged))
        return 1
    dataset = Dataset.open(args.folder)
    found = examine(dataset)
    if args.strip:
        strip(dataset, args.strip)
    if args.json:
        print(json.dumps(found | ({"damaged": []} if args.verify else {})))
        return 0
    print(*_described(found), sep="\n")
    if args.verify:
        print(f"verified: {_number(len(dataset.index['files']), 'file is', 'files are')} as written")
    return 0


def _inspected(folder: Path, made: bool, quiet: bool, written: Path | None = None) -> int:
    """What a command has made, and where."""
    if quiet:
        return 0
    from isqn.data.dataset import Dataset
    from isqn.data.inspect import examine

    if not made:
        say(f"{written or folder} was complete; nothing to do.")
    for line in _described(examine(Dataset.open(folder))):
        say(line)
    print(written or folder)
    return 0


def _described(found: dict[str, Any]) -> Iterator[str]:
    how = f", {found['subset']} {found['fraction']:.3g} of {_number(found['num_checkpoints'], 'part', 'parts')}"
    part = "" if found["subset"] == "all" else how
    source = f", from {found['source']}" if found["source"] else ""
    yield f"{found['env_id']} ({found['protocol']}), played by {found['policy']}{source}{part}"
    yield f"{found['transitions']:,} transitions, {_number(found['episodes'], 'episode', 'episodes')}, " + (
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


DATA: dict[str, Callable[[list[str]], int]] = {"collect": collect, "convert": convert, "inspect": inspect_dataset}


def data(argv: list[str]) -> int:
    """Datasets: made by an agent, made of others, looked at."""
    if not argv or argv[0] in ("-h", "--help"):
        print("isqn data collect|convert|inspect: datasets to learn from offline.")
        for name, kind in (("collect", Collect), ("convert", Convert), ("inspect", Inspect)):
            print(f"  isqn data {name:8s} {inspect.getdoc(kind)}")
        return 0
    if argv[0] not in DATA:
        raise UsageError(f"`isqn data {argv[0]}` is not known; {nearest(argv[0], DATA)}")
    return DATA[argv[0]](argv[1:])


@dataclass(frozen=True)
class StudyOptions:
    """Train what a study still lacks, and write its report."""

    name: tyro.conf.Positional[str]
    """A study of the paper (`isqn list studies`), or a file such as mine.toml."""
    scale: Literal["mini", "paper"] | None = None
    """paper: the paper's grid. mini, which is the default: the same question at a size that two cores answer."""
    out: Path | None = None
    """Its folder. By default studies/NAME-SCALE."""
    tasks: tuple[str, ...] = ()
    """Only these environments of it."""
    seeds: tuple[int, ...] = ()
    """These seeds instead of its own."""
    engine: Literal["local", "ray", "slurm"] = "local"
    """Where it runs: processes of this machine, Ray, or SLURM."""
    workers: int | None = None
    """Jobs at once. By default one for each GPU or core of this machine; on a cluster it is for the cluster to say."""
    seeds_per_job: int = SEEDS_PER_JOB
    """Seeds trained in one program, where the environment is written in JAX."""
    address: str | None = None
    """Of a Ray cluster, which then decides how many jobs run at once; none: one is started here."""
    gpus: float = 0.0
    """GPUs of a Ray job."""
    hosts: int = 1
    """That train each run of `ilql` together, with --engine ray or slurm."""
    cluster: Literal["slurm", "local"] = "slurm"
    """local: try the SLURM engine on a machine that has no SLURM."""
    slurm: tuple[str, ...] = ()
    """More for submitit, as KEY=VALUE: slurm_partition=cpu timeout_min=600."""
    dry_run: bool = False
    """List the runs with their parameters, memory and time, and train nothing."""
    show: bool = False
    """Print the study as a file."""
    report: bool = True
    """Write the report when all is trained; it needs the extra `report`."""
    quiet: bool = False
    """Print nothing but errors."""


def study(argv: list[str]) -> int:
    args = _parse(StudyOptions, argv, "isqn study")
    from isqn.experiments import drive, engines
    from isqn.study.catalogue import find_study
    from isqn.study.grid import read_study, to_toml

    if args.name.endswith(".toml"):
        if args.scale:
            raise UserError(f"--scale is for the studies of the paper; {args.name} says its own sizes.")
        asked = read_study(Path(args.name))
    elif (Path(args.name) / "study.toml").is_file():
        file = Path(args.name) / "study.toml"
        raise UserError(f"{args.name} is a folder; `isqn study {file} --out {args.name}` goes on with its study.")
    else:
        asked = find_study(args.name, args.scale or "mini")
    asked = asked.only(args.tasks, args.seeds)
    if args.show:
        print(to_toml(asked), end="")
        return 0
    engines.require_flags(args.engine, args.address, args.gpus, args.cluster, args.slurm, args.hosts)
    if args.hosts > 1 and asked.agent != "ilql":
        raise UserError(f"--hosts is {args.hosts}; only runs of `isqn train ilql` are trained by several together.")
    for name in ("workers", "seeds_per_job", "hosts"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    out = args.out
    if out is None and not (args.tasks or args.seeds):
        out = Path("studies") / slug(f"{asked.name}-{asked.scale}")
    if args.dry_run:
        return _dry_run(asked, out, args.workers or engines.default_workers(), args.seeds_per_job)
    if out is None:
        raise UserError("--tasks and --seeds make another study; give it a folder of its own by --out.")
    if args.report:
        from isqn.report import write

        write.require_libraries()
    with redirect_stdout(sys.stderr):  # ours is for the result, whatever an engine prints
        engine = engines.make(
            args.engine, out, args.workers, args.address, args.gpus, args.cluster, args.slurm, args.hosts
        )
        outcome = drive.train(asked, out, engine, seeds_per_job=args.seeds_per_job, quiet=args.quiet)
    if not args.quiet:
        say(f"{outcome.finished} of {outcome.total} runs are there")
    if outcome.failed:
        say(
            f"isqn: {count(len(outcome.failed), 'job')} failed; the same command tries again, and `isqn report {out} "
            "--missing drop` shows the seeds that all methods have"
        )
        return 1
    if not args.report:
        return 0
    with redirect_stdout(io.StringIO()) if args.quiet else nullcontext():
        return report([str(out)])


def _dry_run(asked: Any, out: Path | None, workers: int, seeds_per_job: int) -> int:
    from isqn.experiments import drive

    rows: list[tuple[str, ...]] = []
    with redirect_stdout(sys.stderr), TemporaryDirectory() as empty:  # what it would be for a part of a study
        planned, seconds = drive.estimate(asked, out or Path(empty), workers, seeds_per_job)
        logs = drive.datasets_to_log(asked, out or Path(empty), seeds_per_job) if asked.datasets else []
    for row in planned:
        rows.append(
            (
                row.task,
                row.method,
                f"{row.runs}",
                f"{row.to_do}",
                f"{row.steps:,}",
                f"{row.parameters:,}",
                f"{row.memory / 1e9:.2f}",
                duration(sum(row.seconds)) if row.to_do else "",
            )
        )
    header = ("task", "method", "runs", "to train", "steps", "parameters", "GB a job", "time of its jobs")
    print(*_table(header, rows), sep="\n")
    runs, left = sum(row.runs for row in planned), sum(row.to_do for row in planned)
    time = f"about {duration(seconds)} with {count(workers, 'worker')} on this machine"
    print(f"{left} of {runs} runs to train{f' in {out}' if out else ''}: {time}.")
    if logs:
        print(f"Before that, {count(len(logs), 'dataset')} to log, whose time is not counted.")
    return 0


@dataclass(frozen=True)
class ReportOptions:
    """Statistics, figures and one self-contained page, from the runs that are there."""

    folder: tyro.conf.Positional[Path]
    """The folder of a study, or any folder with runs below it."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where to write. By default FOLDER/report."""
    baseline: str | None = None
    """The method that all are divided by, such as TB-DQN."""
    missing: Literal["fail", "drop", "truncate"] = "fail"
    """If runs are missing or unfinished: refuse, leave out their seeds, or cut all to the shortest."""
    pool_protocols: bool = False
    """Compare runs of different protocols all the same."""
    figure: tuple[str, ...] = ()
    """Write only these figures, such as auc or curves, as files; the page has all."""
    watch: bool = False
    """Make the page anew while runs are going."""
    every: float = 30.0
    """Seconds between two pages with --watch."""
    json: bool = False
    """Print the headline as JSON."""


def report(argv: list[str]) -> int:
    args = _parse(ReportOptions, argv, "isqn report")
    from isqn.report import write

    out = args.out or args.folder / "report"
    if not 0 < args.every < float("inf"):
        raise UserError(f"--every is {args.every:g}; it must be a number of seconds above 0.")
    options = write.Options(args.missing, args.pool_protocols)
    if args.watch:
        say(f"{out / 'index.html'} is made anew every {args.every:g} s; Ctrl-C ends it")
        write.watch(args.folder, out, options, args.baseline, args.every)
    made = write.write(args.folder, out, options, args.baseline, args.figure)
    headline = made.headline
    if args.json:
        page, result = str(out / "index.html"), headline.as_json()
        print(json.dumps({"title": made.title, "notes": made.notes, "result": result, "page": page}))
        return 0
    print(*_table(headline.columns, list(headline.rows)), sep="\n")
    for note in made.notes:
        print(note)
    print(out / "index.html")
    return 0


METRICS = ("effective-rank", "dormant", "target-churn", "gradient-cosine", "head-cosine", "batch-norm")


@dataclass(frozen=True)
class Probe:
    """Look at what a trained network represents and how its targets move (the paper's analysis)."""

    run_dir: tyro.conf.Positional[Path]
    """The folder of a run."""
    metric: tuple[str, ...] = ()
    """Some of effective-rank, dormant, target-churn, gradient-cosine, head-cosine, batch-norm; by default all."""
    which: Literal["last", "best"] = "last"
    """The newest checkpoint, or that of the best epoch."""
    samples: int = 2048
    """States to look at, from fresh games of the agent."""
    updates: int = 100
    """Updates over which churn and cosines are averaged. They are thrown away."""
    seed: int = 100
    """Of the games."""
    json: bool = False
    """Print one JSON object."""


def probe(argv: list[str]) -> int:
    args = _parse(Probe, argv, "isqn probe")
    for name in ("samples", "updates"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be at least 1.")
    for metric in args.metric:
        _require_choice("--metric", metric, METRICS)
    _require_seed(args.seed)
    from isqn.train.probe import probe_run

    with redirect_stdout(sys.stderr):
        found = probe_run(args.run_dir, args.metric, args.which, args.samples, args.updates, args.seed)
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:24s} {value:.6g}" if isinstance(value, float) else f"{name:24s} {value}")
    return 0


@dataclass(frozen=True)
class Cost:
    """Parameters, FLOPs of an update (of ilql: of reading a game) and bytes of every scheme under a preset, without
    training."""

    preset: tyro.conf.Positional[str] = "atari-cnn-ln"
    """Whose network, batch and replay (`isqn list presets`)."""
    game: str | None = None
    """An Atari game, such as Asterix, instead of the preset's."""
    task: str | None = None
    """A task of dm_control, such as dog-walk, instead of the preset's."""
    json: bool = False
    """Print one JSON object."""


COST_PARTS = ("network", "optimizer", "moments", "replay")


def cost(argv: list[str]) -> int:
    args = _parse(Cost, argv, "isqn cost")
    from isqn.analysis.cost import COMPARED, flops_per_game, flops_per_update, size
    from isqn.train.run import replay_memory, specification

    config = preset_config(args.preset)
    if args.game and args.task:
        raise UsageError("--game and --task both say what is played; give one of them.")
    for flag, given, like in (("--game", args.game, "ALE/{}-v5"), ("--task", args.task, "dm_control/{}-v0")):
        kind = like.partition("/")[0]
        if given and not config.env_id.startswith(kind):
            raise UsageError(f"{flag} is for presets of {kind}; {args.preset} is of {config.env_id}.")
        if given:
            config = config.replace(env_id=given if given.startswith(kind) else like.format(given))
    spec = specification(config)
    flops, work = (flops_per_game, "game") if config.writes else (flops_per_update, "update")
    rows, with_copy = [], size(config.replace(scheme="target-based", num_bellman_iterations=1), spec)
    if not (args.json or sys.stderr.isatty()):
        say(f"counting the work of {len(COMPARED)} schemes")
    for scheme, k in COMPARED:
        one = config.replace(scheme=scheme, num_bellman_iterations=k)
        found = size(one, spec)
        row = {"label": one.label, **found._asdict(), f"flops_per_{work}": flops(one, spec)}
        row["kept_parameters"] = found.kept_parameters
        row["saved_share"] = 1 - found.kept_parameters / with_copy.kept_parameters
        row["saved_share_of_critic"] = 1 - found.kept_critic / with_copy.kept_critic
        row["replay_bytes"] = replay_memory(one, spec).total
        rows.append(row | {"total_bytes": sum(row[f"{part}_bytes"] for part in COST_PARTS)})
        if not args.json and sys.stderr.isatty():
            print(f"\rcounting {len(rows)}/{len(COMPARED)} ", end="", file=sys.stderr)
    if args.json:
        print(json.dumps({"preset": args.preset, "env_id": spec.id, "num_actions": spec.num_actions, "schemes": rows}))
        return 0
    actions = f"actions of {count(spec.num_actions, 'number')}" if spec.is_continuous else f"{spec.num_actions} actions"
    print(
        f"\r{spec.id}, {actions}, preset {args.preset}; saved: of all parameters of target-based learning, copies too"
    )
    shown = [part for part in (*COST_PARTS, "total") if rows[0][f"{part}_bytes"]]
    names = {"optimizer": "traces", "replay": "last step"} if config.streams else {}
    decimals = 1 if rows[0]["total_bytes"] > 1e6 else 3
    saved = {"saved": "saved_share"} | ({"of the critic": "saved_share_of_critic"} if config.is_actor_critic else {})
    lines = _table(
        (
            "scheme",
            "parameters",
            "copied",
            "kept in all",
            *saved,
            f"MFLOP/{work}",
            *(f"{names.get(part, part)} MB" for part in shown),
        ),
        [
            (
                row["label"],
                f"{row['parameters']:,}",
                f"{row['copied_parameters']:,}",
                f"{row['kept_parameters']:,}",
                *(f"{row[share]:.1%}" for share in saved.values()),
                f"{row[f'flops_per_{work}'] / 1e6:,.1f}",
                *(f"{row[f'{part}_bytes'] / 1e6:,.{decimals}f}" for part in shown),
            )
            for row in rows
        ],
    )
    print(*lines, sep="\n")
    return 0


@dataclass(frozen=True)
class Doctor:
    """Versions, devices, and how long each part of a step takes here under a preset."""

    preset: str = "atari-cnn-ln"
    """Whose parts to time."""
    json: bool = False
    """Print one JSON object."""


def doctor(argv: list[str]) -> int:
    args = _parse(Doctor, argv, "isqn doctor")
    from isqn.train.doctor import examine

    found = examine(preset_config(args.preset))
    if args.json:
        print(json.dumps({"preset": args.preset, **found}))
        return 0
    for name in ("python", "platform", "device", "cores", "memory_gb", "xla_flags"):
        print(f"{name:12s} {found[name]}")
    for name, number in found["versions"].items():
        print(f"{name:12s} {number}")
    for name, state in found["extras"].items():
        print(f"{'[' + name + ']':12s} {state}")
    if found["problem"]:
        print(found["problem"])
        return 0
    print(f"\none step of preset {args.preset}, in ms (median, and the middle half of the calls):")
    for part, (median, low, high) in found["milliseconds"].items():
        print(f"{part:12s} {median:9.3f}   {low:.3f} to {high:.3f}")
    print(found["verdict"])
    return 0


LISTS = ("envs", "presets", "studies", "schemes", "losses")


@dataclass(frozen=True)
class List:
    """What there is."""

    what: tyro.conf.Positional[str]
    """envs, presets, studies, schemes or losses."""
    json: bool = False
    """Print JSON."""


def list_things(argv: list[str]) -> int:
    args = _parse(List, argv, "isqn list")
    if args.what not in LISTS:
        raise UsageError(f"`isqn list {args.what}` is not known; {nearest(args.what, LISTS)}")
    rows = _listing(args.what)
    if args.json:
        print(json.dumps(rows))
        return 0
    print(*_table((), [tuple(row.values()) for row in rows]), sep="\n")
    return 0


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Lines with columns as wide as they must be; numbers to the right."""
    lines = [header, *rows] if header else rows
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [
            cell.rjust(width) if header and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _listing(what: str) -> list[dict[str, str]]:
    from isqn.envs.adapter import list_environments
    from isqn.schemes import SCHEMES

    if what == "envs":
        return [{"id": row.id, "kind": row.kind, "loops": ", ".join(row.loops)} for row in list_environments()]
    if what == "presets":
        return [
            {"name": name, "description": preset.description, "agent": preset.agent} for name, preset in PRESETS.items()
        ]
    if what == "studies":
        from isqn.study.catalogue import QUESTIONS

        return [{"name": name, "paper": paper, "question": question} for name, (question, paper) in QUESTIONS.items()]
    if what == "schemes":
        return [
            {
                "name": name,
                "label": make(3).label("DQN"),
                "heads": _number(make(3).num_heads, "head", "heads"),
                "copies": _number(make(3).num_copies, "copy", "copies"),
            }
            for name, make in SCHEMES.items()
        ]
    return [
        {"name": name, "label": label, "description": (loss.__doc__ or "").split("\n")[0]}
        for name, (label, loss) in LOSSES.items()
    ]


def _number(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "study": study,
    "report": report,
    "eval": evaluate,
    "play": play,
    "data": data,
    "probe": probe,
    "cost": cost,
    "list": list_things,
    "doctor": doctor,
}


def _parse(kind: Any, argv: list[str], prog: str, default: Any = None, elsewhere: dict[str, str] | None = None) -> Any:
    """By tyro, which takes some mistakes in silence and words others as a parser would: those are said here.

    `elsewhere` says of flags that this command does not have where they are.
    """
    options, given = _options(kind), dict[str, list[str]]()
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not word.startswith("-") or name not in options:
            if word.startswith("--") and name != "--help":
                hint = (elsewhere or {}).get(name) or nearest(name, options, f"`{prog} --help` lists them.")
                raise UsageError(f"`{prog}` has no flag {name}; {hint}")
            continue
        many = get_origin(options[name]) is tuple
        if many and name in given:
            raise UsageError(f"{name} is given twice; give all its values after one {name}.")
        following = itertools.takewhile(lambda other: not other.startswith("--"), argv[place + 1 :])
        given[name] = [value] if equals else [*following][: None if many else 1]
        if options[name] is bool:
            if equals or (given[name] and given[name][0].lower() in ("true", "false", "yes", "no", "0", "1")):
                other = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name[2:]}"
                raise UsageError(f"{name} takes no value; its opposite is {other}.")
            continue
        if "" in given[name]:
            raise UsageError(f"{name} {EMPTY}")
        if not given[name] and name not in MAY_BE_EMPTY:
            choices = get_args(options[name]) if get_origin(options[name]) is Literal else ()
            raise UsageError(f"{name} needs a value{': ' * bool(choices)}{', '.join(choices)}.")
    if "" in argv:
        raise UsageError(f"An argument of `{prog}` {EMPTY}")
    extra = {} if default is None else {"default": default}
    try:
        with redirect_stderr(io.StringIO()) as box, redirect_stdout(io.StringIO()) as text:
            return tyro.cli(kind, args=argv, prog=prog, description=inspect.getdoc(kind), **extra)
    except SystemExit as stop:
        if not stop.code:
            print(_help(text.getvalue()))
            raise
    for name, values in given.items():
        _require_values(name, options[name], values)
    raise UsageError(f"{_sentence(box.getvalue(), prog)} `{prog} --help` explains.")


EMPTY = "is empty; give it a value, or leave it out."
MAY_BE_EMPTY = ("--hidden-sizes", "--head-weights")  # a linear network; equal weights


def _require_values(name: str, hint: Any, given: list[str]) -> None:
    """As its type asks for: to say in plain words why tyro refuses them."""
    kinds = (hint, *get_args(hint))
    for value in given:
        if value == "None" and type(None) in kinds:
            continue
        for kind, words in ((int, "a whole number"), (float, "a number")):
            if kind in kinds:
                try:
                    kind(value)
                except ValueError:
                    raise UsageError(f"{name} is {value!r}; it must be {words}.") from None
        for choices in (get_args(kind) for kind in kinds if get_origin(kind) is Literal):
            _require_choice(name, value, choices)


def _help(text: str) -> str:
    """tyro's, plain, without the words of its types for what may be left out; as wide as it was."""
    text = re.sub(r"\{None\}\|(\w+)", rf"\1{' ' * len('{None}|')}", text)
    text = re.sub(r"\{None,([^}]+)\}", rf"{{\1}}{' ' * len('None,')}", text)
    text = re.sub(r" +\]", "]", text)  # in the line of usage nothing is below
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join([*lines, "--debug, with any command, shows the traceback of an error."])


def _sentence(box: str, prog: str) -> str:
    """What tyro draws in a box, without the box and its pointers to the help."""
    lines = [line.strip("│| ") for line in box.splitlines()[1:]]
    words = " ".join(line for line in lines if line.strip("╰─╯+-"))
    said = re.split(r" (?:Argument helptext|For full helptext)", words)[0]
    said = re.sub(r"^Missing from .*?: [A-Z]+ (.*) \(required\)$", rf"`{prog}` needs an argument: \1", said)
    said = re.sub(r"^Missing from .*?: (?:-\w \S+, )?(--[\w-]+) .*$", rf"`{prog}` needs \1", said)
    return f"{said.rstrip('.')}."


POSITIONAL, SUPPRESSED = (get_args(mark[str])[1] for mark in (tyro.conf.Positional, tyro.conf.Suppress))
OMIT_PREFIX = get_args(tyro.conf.OmitArgPrefixes[str])[1:]


def _options(kind: Any) -> dict[str, Any]:
    """Every flag of a command, and its type."""
    options: dict[str, Any] = {}
    for field_name, hint in get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        if POSITIONAL in marks or SUPPRESSED in marks:
            continue
        plain = get_args(hint)[0] if marks else hint
        if is_dataclass(plain):
            options |= _options(plain)
            continue
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        renamed = [mark.name for mark in marks if getattr(mark, "name", None)]
        names = [*aliases, *(f"--{name.replace('_', '-')}" for name in renamed or [field_name])]
        names += [f"--no-{name.removeprefix('--')}" for name in names if plain is bool]
        options |= dict.fromkeys(names, plain)
    return options


def _require_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{what} is {value!r}; {nearest(value, choices)}")


def _require_share(name: str, share: float | None) -> None:
    if share is not None and not 0 <= share <= 1:
        raise UserError(f"{name} is {share}; it must be between 0 and 1.")


def _require_beta(beta: float | None) -> None:
    if beta is not None and not 0 <= beta < float("inf"):
        raise UserError(f"--beta is {beta}; it must be a number of at least 0.")


def _require_seed(seed: int) -> None:
    if not 0 <= seed <= MOST_INTEGER:
        raise UserError(f"--seed is {seed}; it must be between 0 and {MOST_INTEGER}.")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own warnings are sentences for the user, not places in the code."""
    ours, elsewhere = str(Path(__file__).parent), warnings.formatwarning

    def plain(message: Any, category: type[Warning], filename: str, *rest: Any, **more: Any) -> str:
        if category is UserWarning and filename.startswith(ours):
            return f"isqn: warning: {message}\n"
        return elsewhere(message, category, filename, *rest, **more)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = elsewhere


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if not argv or argv[0] in ("-h", "--help"):
        print(WELCOME)
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    try:
        command, *rest = argv
        if command not in COMMANDS:
            raise UsageError(f"`isqn {command}` is not known; {nearest(command, COMMANDS)}")
        with _plain_warnings():
            code = COMMANDS[command](rest)
        sys.stdout.flush()
        return code
    except UserError as error:
        if debug:
            raise
        say(f"isqn: {error}")
        return USAGE if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # an orderly end, with the compiler still at work in a thread, is a segmentation fault
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Interrupted as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is saved: who asks again need not see how Python ends
        say(f"isqn: {stop}")
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename2 or error.filename} cannot be read or written ({error.strerror})"
        say(f"isqn: {message} (add --debug for the traceback)")
        return 1
