"""`isqn resume RUN_DIR`: go on with a run where it stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import tyro

from isqn.cli.parse import parse


@dataclass(frozen=True)
class Resume:
    """Go on with a run where it stopped."""

    run_dir: tyro.conf.Positional[Path]
    """Run folder."""
    quiet: bool = False
    """Print nothing but errors."""


def run(args: Sequence[str]) -> int:
    options = parse(Resume, args, "isqn resume")
    from isqn.train import run as runs

    with redirect_stdout(sys.stderr):
        went_on = runs.resume(options.run_dir, quiet=options.quiet)
    if not went_on and not options.quiet:
        print(f"{options.run_dir} had finished; nothing to do.", file=sys.stderr)
    return 0
