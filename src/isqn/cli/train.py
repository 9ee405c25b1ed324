"""`isqn train AGENT`: train an agent, or several seeds of it in one program."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from isqn.agents.registry import agent_names, config_class, find_agent, make_config, read_config_file
from isqn.cli.parse import HELP_ENDING, UsageError, arg, parse, parse_some
from isqn.cli.tables import table
from isqn.config.fields import field_names, name_as_given, nearest, require_effect
from isqn.config.run import Run
from isqn.imports import import_module_of
from isqn.losses import LOSSES
from isqn.presets import default_config, preset_config, preset_for, presets_of, short_preset

Config = TypeVar("Config")


@dataclass(frozen=True)
class Train(Generic[Config]):
    """Train an agent, and print the folder of the run.

    A setting with two flags, such as `--k, --num-bellman-iterations`, has the name of the last one in config.toml and
    in studies. The defaults come from a preset: the one that --preset names, or else the one that fits --env-id; so
    `isqn train AGENT --env-id ID --help` shows those for your environment.
    """

    config: tyro.conf.OmitArgPrefixes[Config]
    preset: str = "auto"
    """Preset to start from, which the other flags change (`isqn list presets`). auto: the one that fits --env-id."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config", metavar="PATH")] = None
    """Config file to start from instead of a preset, such as the config.toml of another run."""
    run_dir: Annotated[Path | None, arg("PATH", "runs/EXPERIMENT/ENV/LABEL/seed-N")] = None
    """Run folder."""
    overwrite: bool = False
    """Delete the contents of the run folder first."""
    show_diff: Annotated[str | None, tyro.conf.arg(metavar="PRESET")] = None
    """Do not train; print the settings that differ from this preset."""
    quiet: bool = False
    """Print nothing but errors."""


@dataclass(frozen=True)
class Base:
    """Flags that select the settings to start from."""

    preset: str = ""
    config_file: Annotated[str, tyro.conf.arg(name="config")] = ""
    env_id: str = ""
    dataset: str = ""


def run(args: Sequence[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        return _list_agents()
    if not args:
        names = ", ".join(agent_names())
        raise UsageError(f"`isqn train` needs an agent: {names}; `isqn train --help` describes them.")
    agent = None  # then it is the agent of the config file, or dqn
    if args and not args[0].startswith("-"):
        agent, *args = args
        if agent not in agent_names():
            loss = f"that loss is trained by `isqn train dqn --loss {agent}`." if agent in LOSSES else ""
            raise UsageError(f"`isqn train {agent}` is not known; {loss or nearest(agent, agent_names())}")
    base, source = _base_config(args, agent)
    prog = f"isqn train {base.agent}"
    with name_as_given(type(base), args):
        kind: Any = Train[config_class(base.agent)]  # type: ignore[misc]
        options = parse(kind, args, prog, Train(base), base.agent, source)
        config: Run = options.config
        require_effect(config, base)
    if options.show_diff:
        return _show_diff(config, options.show_diff)
    from isqn.train import run as runs
    from isqn.train.progress import duration, say

    began = time.monotonic()
    if not options.quiet:
        say(f"settings: {source}")
    with redirect_stdout(sys.stderr):  # an environment may print; standard output is for the folders
        folders = runs.start(config, options.run_dir, overwrite=options.overwrite, quiet=options.quiet)
    if not options.quiet:
        for line in _known_values(folders[0]):
            say(line)
        for folder in folders:
            print(folder)
        say(f"finished in {duration(time.monotonic() - began)}; `isqn eval {folders[0]}` plays with the agent")
    return 0


def _list_agents() -> int:
    print("usage: isqn train [AGENT] [flags]\n\nWithout AGENT, the agent is that of --config FILE, or dqn.\n")
    print(*table((), [(f"  isqn train {name}", find_agent(name).summary) for name in agent_names()]), sep="\n")
    print(f"\n`isqn train AGENT --help` lists every setting of an agent.\n{HELP_ENDING}")
    return 0


def _base_config(args: Sequence[str], agent: str | None) -> tuple[Run, str]:
    """Return the config that the flags change, and the name of its source: a file, a preset, or the environment."""
    base = parse_some(Base, args, f"isqn train {agent or 'dqn'}")
    import_module_of(base.env_id, f"--env-id {base.env_id}")
    if base.config_file:
        if base.preset:
            raise UsageError("--config and --preset both say where to start from; give one of them.")
        config = read_config_file(Path(base.config_file))
        if agent not in (None, config.agent):
            file = base.config_file
            raise UsageError(f"{file} is of `isqn train {config.agent}`, not of `isqn train {agent}`.")
        return config, base.config_file
    agent = agent or "dqn"
    recorded: dict[str, Any] = {}  # settings that follow from the dataset
    if base.dataset and "dataset" in field_names(config_class(agent)):
        from isqn.data.index import read_index, spec_from_index

        spec = spec_from_index(read_index(Path(base.dataset)))
        recorded = {"env_id": spec.id, "protocol": spec.protocol, "dataset": base.dataset}
        recorded |= {"env_kwargs": spec.env_kwargs, "env_wrappers": spec.env_wrappers}
    if base.preset and base.preset != "auto":
        return preset_config(base.preset, agent).replace(**recorded), f"preset {base.preset}"
    env_id = recorded.get("env_id") or base.env_id or make_config(agent).env_id
    config = default_config(agent, env_id).replace(**recorded)
    if not presets_of(agent):
        return config, f"defaults of {agent}"
    preset, short = preset_for(env_id, agent), short_preset(env_id, agent)
    return config, f"preset {preset}, which fits {env_id}" + (f"; --preset {short} is a short run" if short else "")


def _show_diff(config: Run, preset: str) -> int:
    """Print the settings of a run and of a preset that differ, or that only one of the two has."""
    theirs, ours = (
        {name: str(value) for name, value in ({"agent": one.agent} | asdict(one)).items()}
        for one in (preset_config(preset), config)
    )
    names = dict.fromkeys((*ours, *theirs))
    rows = [(n, theirs.get(n, ""), ours.get(n, "")) for n in names if theirs.get(n) != ours.get(n)]
    if rows:
        print(*table((), [("setting", preset, "this run"), *rows]), sep="\n")
    else:
        print(f"nothing differs from {preset}")
    return 0


def _known_values(run_dir: Path) -> list[str]:
    """Return a table of learned and true values, for problems whose values are known."""
    from isqn.analysis.probe import known_values

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
    return ["learned and true values:", *table(header, rows), f"the largest difference is {difference:.3f}"]
