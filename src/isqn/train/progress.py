"""One line that says where a run is. Silent in pipes but for a line for each epoch.

If nobody reads it any more, the run goes on.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

import psutil


def memory_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def say(sentence: str) -> None:
    """A line for the person who watches, in place of the progress line."""
    _write(("\r\x1b[K" if sys.stderr.isatty() else "") + sentence + "\n")


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _write(text: str) -> None:
    with suppress(OSError):  # a pipe that broke, a terminal that closed
        sys.stderr.write(text)
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """90 -> "1 min 30 s"; the two largest units."""
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count:.0f} {unit}")
    return " ".join(parts[:2])


@dataclass
class Progress:
    """Call `show` as often as you like: it draws twice a second."""

    total_steps: int
    enabled: bool = True
    _started: float = field(default_factory=time.monotonic)
    _drawn: float = 0.0
    _first_step: int | None = None

    def show(self, step: int, last_return: float | None, loss: float | None) -> None:
        if self._first_step is None:
            self._first_step, self._started = step, time.monotonic()
        now = time.monotonic()
        if not (self.enabled and sys.stderr.isatty()) or now - self._drawn < 0.5:
            return
        self._drawn = now
        rate = (step - self._first_step) / max(now - self._started, 1e-9)
        left = duration((self.total_steps - step) / rate) if rate > 0 and step < self.total_steps else "a moment"
        parts = [
            f"{step:,}/{self.total_steps:,} steps",
            f"{rate:,.0f} steps/s",
            f"return {last_return:.1f}" if last_return is not None else "",
            f"loss {loss:.3g}" if loss is not None else "",
            f"{memory_mb():,.0f} MB",
            f"{left} left",
        ]
        _write("\r\x1b[K" + " · ".join(filter(None, parts)))

    def say(self, sentence: str) -> None:
        if self.enabled:
            say(sentence)
