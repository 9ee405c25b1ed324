"""The `isqn` command, and `python -m isqn`."""

from __future__ import annotations

import os
import sys


def console() -> None:
    if sys.stdout is None or sys.stderr is None:  # closed by whoever called
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    try:
        from isqn.cli import main  # here, for Ctrl-C to be silent while JAX is imported too
    except KeyboardInterrupt:
        os._exit(130)
    sys.exit(main())


if __name__ == "__main__":
    console()
