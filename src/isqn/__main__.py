"""The `isqn` command, and `python -m isqn`."""

from __future__ import annotations

import os
import sys


def console() -> None:
    if sys.stdout is None or sys.stderr is None:  # the caller closed them
        null = open(os.devnull, "w")  # noqa: SIM115 - stays open as long as the process lives
        sys.stdout, sys.stderr = sys.stdout or null, sys.stderr or null
    try:
        from isqn.cli import main  # imported here, so that Ctrl-C is one line during the import too
    except KeyboardInterrupt:
        print("isqn: stopped", file=sys.stderr, flush=True)
        os._exit(130)
    sys.exit(main())


if __name__ == "__main__":
    console()
