"""`isqn list`: list environments, presets, studies, schemes, losses or agents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from isqn.agents.registry import agent_names, find_agent
from isqn.cli.parse import UsageError, arg, parse
from isqn.cli.tables import table
from isqn.config.fields import nearest
from isqn.losses import LOSSES
from isqn.presets import all_presets
from isqn.schemes import SCHEMES, TargetScheme
from isqn.train.progress import format_count

LISTS = ("envs", "presets", "studies", "schemes", "losses", "agents")
HEADER = {  # of `isqn list schemes`; the other lists have the names of their JSON fields
    "name": "scheme",
    "label": "label for --k 3",
    "heads": "heads",
    "copies": "older networks",
    "targets": "head that each online head learns from",
}


@dataclass(frozen=True)
class List:
    """List the environments, presets, studies, schemes, losses or agents of the package."""

    what: Annotated[tyro.conf.Positional[str], arg("WHAT")]
    """One of envs, presets, studies, schemes, losses or agents."""
    json: bool = False
    """Print a JSON list."""


def run(args: Sequence[str]) -> int:
    options = parse(List, args, "isqn list")
    if options.what not in LISTS:
        raise UsageError(f"`isqn list {options.what}` is not known; {nearest(options.what, LISTS)}")
    rows = _listing(options.what)
    if options.json:
        print(json.dumps(rows))
        return 0
    header = tuple(HEADER.values() if options.what == "schemes" else rows[0])
    print(*table((), [header, *(tuple(row.values()) for row in rows)]), sep="\n")
    return 0


def _listing(what: str) -> list[dict[str, str]]:
    """Return the rows of a list."""
    from isqn.envs.adapter import list_environments

    if what == "envs":
        return [{"id": row.id, "kind": row.kind, "loops": ", ".join(row.loops)} for row in list_environments()]
    if what == "presets":
        return [
            {"name": name, "description": preset.description, "agent": preset.agent}
            for name, preset in all_presets().items()
        ]
    if what == "studies":
        from isqn.study.catalogue import QUESTIONS

        return [{"name": name, "paper": paper, "question": question} for name, (question, paper) in QUESTIONS.items()]
    if what == "schemes":
        return [
            {
                "name": name,
                "label": make(3).label("DQN"),
                "heads": format_count(make(3).num_heads, "head"),
                "copies": format_count(make(3).num_copies, "copy", "copies"),
                "targets": _describe_targets(make(3)),
            }
            for name, make in SCHEMES.items()
        ]
    if what == "agents":
        return [{"name": name, "description": find_agent(name).summary} for name in agent_names()]
    return [
        {"name": name, "label": loss.label, "description": (loss.function.__doc__ or "").split("\n")[0]}
        for name, loss in LOSSES.items()
    ]


def _describe_targets(scheme: TargetScheme) -> str:
    """Return the target head of each online head: "1 from 0, 2 from 1"."""
    pairs = ", ".join(f"{online} from {target}" for online, target in zip(scheme.online, scheme.target, strict=True))
    return pairs + (" of an older network" if scheme.num_copies == 1 else " of older networks" * bool(scheme.copy))
