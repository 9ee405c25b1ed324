"""Requests to stop: SIGTERM, a closed terminal, Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a loop is to save and stop; a second Ctrl-C stops at once."""
    asked = False

    def ask(signum: int, _: Any) -> None:
        nonlocal asked
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    wanted = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # an ignored signal, as under nohup, stays ignored
    earlier = {s: signal.signal(s, ask) for s in wanted if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield lambda: asked
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
