"""`isqn cost PRESET`: parameters, FLOPs and memory of every scheme, without training."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from isqn.cli.parse import UsageError, arg, parse
from isqn.cli.tables import table
from isqn.config.fields import rename_flags
from isqn.config.run import Run
from isqn.presets import preset_config


@dataclass(frozen=True)
class Cost:
    """Print the parameters, FLOPs of an update and memory of every scheme under a preset, without training.

    For ilql, the FLOPs are those of one pass of a game through all networks.
    """

    preset: Annotated[tyro.conf.Positional[str], arg("[PRESET]")] = "atari-cnn-ln"
    """Preset of the network, batch and replay buffer (`isqn list presets`)."""
    game: Annotated[str | None, arg("GAME", "that of the preset")] = None
    """Atari game, such as Asterix."""
    task: Annotated[str | None, arg("TASK", "that of the preset")] = None
    """Task of dm_control, such as dog-walk."""
    json: bool = False
    """Print one JSON object."""


PARTS = ("network", "optimizer", "moments", "replay")


def run(args: Sequence[str]) -> int:
    options = parse(Cost, args, "isqn cost")
    config: Any = _config(options)
    from isqn.analysis.cost import COMPARED_SCHEMES
    from isqn.train.progress import say
    from isqn.train.run import loop_of

    loop = loop_of(config)
    with rename_flags(lambda name: _given_flag(options) if name == "--env-id" else name):
        spec, work = loop.specification(config), loop.WORK
    if not (options.json or sys.stderr.isatty()):
        say(f"counting the work of {len(COMPARED_SCHEMES)} schemes")
    rows = []
    for row in _rows(config, spec, loop):
        rows.append(row)
        if not options.json and sys.stderr.isatty():
            print(f"\rcounting {len(rows)}/{len(COMPARED_SCHEMES)} ", end="", file=sys.stderr)
    if options.json:
        about = {"preset": options.preset, "env_id": spec.id, "num_actions": spec.num_actions}
        print(json.dumps({**about, "schemes": rows}))
        return 0
    actions = f"actions of {spec.num_actions} numbers" if spec.is_continuous else f"{spec.num_actions} actions"
    saved = "saved: share of all parameters of target-based learning, its target network included"
    print(f"\r{spec.id}, {actions}, preset {options.preset}; {saved}")
    print(*_lines(config, spec, work, rows), sep="\n")
    return 0


def _config(options: Cost) -> Run:
    config = preset_config(options.preset)
    if options.game and options.task:
        raise UsageError("--game and --task both say what is played; give one of them.")
    for flag, name, form in (("--game", options.game, "ALE/{}-v5"), ("--task", options.task, "dm_control/{}-v0")):
        kind = form.partition("/")[0]
        if name and not config.env_id.startswith(kind):
            raise UsageError(f"{flag} is for presets of {kind}; {options.preset} is of {config.env_id}.")
        if name:
            config = config.replace(env_id=name if name.startswith(kind) else form.format(name))
    return config


def _given_flag(options: Cost) -> str:
    """Return the flag by which errors name the environment."""
    return "--game" if options.game else "--task" if options.task else "--env-id"


def _rows(config: Any, spec: Any, loop: Any) -> Iterator[dict[str, Any]]:
    """Yield the costs of each scheme."""
    from isqn.analysis.cost import COMPARED_SCHEMES, measure_size

    target_based = measure_size(config.replace(scheme="target-based", num_bellman_iterations=1), spec)
    for scheme, k in COMPARED_SCHEMES:
        variant = config.replace(scheme=scheme, num_bellman_iterations=k)
        its_size = measure_size(variant, spec)
        row = {"label": variant.label, **its_size._asdict(), f"flops_per_{loop.WORK}": loop.flops(variant, spec)}
        row["kept_parameters"] = its_size.total_parameters
        row["saved_share"] = 1 - its_size.total_parameters / target_based.total_parameters
        row["saved_share_of_critic"] = 1 - its_size.critic_parameters / target_based.critic_parameters
        row["replay_bytes"] = loop.replay_memory(variant, spec).total
        yield row | {"total_bytes": sum(row[f"{part}_bytes"] for part in PARTS)}


def _lines(config: Any, spec: Any, work: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table."""
    from isqn.agents.registry import make_agent

    shown = [part for part in (*PARTS, "total") if rows[0][f"{part}_bytes"]]
    names = {"optimizer": "traces", "replay": "last step"} if make_agent(config, spec).is_streaming else {}
    decimals = 1 if rows[0]["total_bytes"] > 1e6 else 3
    saved = {"saved": "saved_share"}
    if spec.is_continuous:
        saved["saved in critic"] = "saved_share_of_critic"
    columns = [f"{names.get(part, part)} MB" for part in shown]
    header = ("scheme", "trained parameters", "target networks", "all parameters", *saved, f"MFLOP/{work}", *columns)
    body = [
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
    ]
    yield from table(header, body)
