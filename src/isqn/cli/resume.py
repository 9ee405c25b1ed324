"""`isqn resume RUN_DIR`: resume a run where it stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from isqn.cli.parse import arg, parse


@dataclass(frozen=True)
class Resume:
    """Resume a run where it stopped."""

    run_dir: Annotated[tyro.conf.Positional[Path], arg("RUN_DIR")]
    """Run folder."""
    quiet: bool = False
    """Print nothing but errors."""


def run(args: Sequence[str]) -> int:
    options = parse(Resume, args, "isqn resume")
    from isqn.train import run as runs
    from isqn.train.progress import say

    with redirect_stdout(sys.stderr):
        was_unfinished = runs.resume(options.run_dir, quiet=options.quiet)
    if not options.quiet:
        plays = f"`isqn eval {options.run_dir}` plays with the agent"
        say(f"finished; {plays}" if was_unfinished else f"{options.run_dir} had finished; nothing to do.")
    return 0
