"""`isqn report FOLDER`: statistics, figures and one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from isqn.cli.parse import arg, parse
from isqn.cli.tables import table
from isqn.types import UserError


@dataclass(frozen=True)
class Report:
    """Write statistics, figures and one self-contained page about runs."""

    folder: Annotated[tyro.conf.Positional[Path], arg("FOLDER")]
    """Folder of a study, or any folder with runs in it."""
    out: Annotated[Path | None, arg("PATH", "FOLDER/report", ["-o"])] = None
    """Output folder."""
    baseline: Annotated[str | None, arg("METHOD", "that of the study, or a target-based method")] = None
    """Baseline, the method whose score is 1, such as TB-DQN."""
    missing: Literal["fail", "drop", "truncate"] = "fail"
    """Missing or unfinished runs: refuse them, drop their seeds, or truncate all runs to the shortest."""
    pool_protocols: bool = False
    """Compare runs of different protocols."""
    figure: Annotated[tuple[str, ...], arg("FIGURE ...", "all")] = ()
    """Figures to write as files, such as auc or curves; the page always has all of them."""
    watch: bool = False
    """Update the page regularly while runs are training."""
    every: float = 30.0
    """Seconds between updates with --watch."""
    json: bool = False
    """Print the main result as JSON."""


def run(args: Sequence[str]) -> int:
    options = parse(Report, args, "isqn report")
    from isqn.report import write
    from isqn.train.progress import say

    out = options.out or options.folder / "report"
    if not 0 < options.every < float("inf"):
        raise UserError(f"--every is {options.every:g}; it must be a number of seconds above 0.")
    rules = write.Options(options.missing, options.pool_protocols)
    if options.watch:
        say(f"{out / 'index.html'} is updated every {options.every:g} s; Ctrl-C ends it")
        write.watch(options.folder, out, rules, options.baseline, options.every)
    made = write.write(options.folder, out, rules, options.baseline, options.figure)
    headline = made.headline
    if options.json:
        page, result = str(out / "index.html"), headline.as_json()
        print(json.dumps({"title": made.title, "notes": made.notes, "result": result, "page": page}))
        return 0
    say(made.question)
    print(*table(headline.columns, list(headline.rows)), sep="\n")
    say(headline.caption)
    for sentence in (*made.findings, *made.notes):
        print(sentence)
    print(out / "index.html")
    say("the report is written; open this page in a browser")
    return 0
