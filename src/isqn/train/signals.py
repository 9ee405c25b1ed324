"""Requests to stop: SIGTERM, a closed terminal, Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from isqn.train.progress import say


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a loop must save and stop; a second Ctrl-C stops at once."""
    is_requested = False

    def request(signum: int, _: Any) -> None:
        nonlocal is_requested
        if is_requested and signum == signal.SIGINT:
            raise KeyboardInterrupt("stopped without saving since the last checkpoint")
        if not is_requested:
            is_requested = True
            with suppress(RuntimeError):  # the signal came while another line was being written
                say("stopping after this step; press Ctrl-C again to stop without saving")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # an ignored signal, as under nohup, stays ignored
    old_handlers = {s: signal.signal(s, request) for s in signals if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield lambda: is_requested
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
