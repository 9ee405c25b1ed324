"""The `isqn` command, and `python -m isqn`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def stop(signum: int, _: Any) -> None:
    """Say that a signal has ended the command; while it trains, another handler saves first."""
    try:
        os.write(2, f"isqn: stopped by {signal.Signals(signum).name}\n".encode())
    finally:  # the terminal may be gone
        os._exit(128 + signum)


def console() -> None:
    if sys.stdout is None or sys.stderr is None:  # the caller closed them
        null = open(os.devnull, "w")  # noqa: SIM115 - stays open as long as the process lives
        sys.stdout, sys.stderr = sys.stdout or null, sys.stderr or null
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:  # not under nohup, which ignores SIGHUP
            signal.signal(signum, stop)
    try:
        from isqn.cli import main  # imported here, so that Ctrl-C is one line during the import too
    except KeyboardInterrupt:
        print("isqn: stopped", file=sys.stderr, flush=True)
        os._exit(130)
    sys.exit(main())


if __name__ == "__main__":
    console()
