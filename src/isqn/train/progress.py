"""One line that says where a run is. Silent in pipes but for a line for each epoch.

If nobody reads it any more, the run goes on.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil


def memory_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def free_memory() -> int:
    """Bytes that this process may still take: free here, and left by `ulimit -v` and by its control group."""
    free = [psutil.virtual_memory().available]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free.append(limit - psutil.Process().memory_info().vms)
    free += [left for folder in control_groups() if (left := _left_in(folder)) is not None]
    return max(0, min(free))


def control_groups(groups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Of version 2: that of this process, and those that it is in. Clusters and containers set limits there."""
    lines = mine.read_text().splitlines() if mine.exists() else []
    inside = [groups / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [folder for own in inside for folder in (own, *own.parents) if folder.is_relative_to(groups)]


def _left_in(group: Path) -> int | None:
    with suppress(OSError, ValueError):  # the limit may be absent, or "max"
        # of what is counted there, copies of files that nobody is using can be dropped
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        used = int((group / "memory.current").read_text()) - int(files)
        return int((group / "memory.max").read_text()) - used
    return None


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


SETTLED_SECONDS = 10


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
        rate = self._rate(step)
        parts = [
            f"{step:,}/{self.total_steps:,} steps",
            f"{rate:,.0f} steps/s" if rate else "",
            f"return {last_return:.1f}" if last_return is not None else "",
            f"loss {loss:.3g}" if loss is not None else "",
            f"{memory_mb():,.0f} MB",
            self.time_left(step),
        ]
        _write("\r\x1b[K" + " · ".join(filter(None, parts)))

    def time_left(self, step: int) -> str:
        """How long it will take to the end; nothing if that is not known yet, or there."""
        rate = self._rate(step)
        return f"{duration((self.total_steps - step) / rate)} left" if rate and step < self.total_steps else ""

    def _rate(self, step: int) -> float:
        """Steps per second. In its first seconds steps are asked for that the device has not taken yet."""
        seconds = time.monotonic() - self._started
        if self._first_step is None or seconds <= SETTLED_SECONDS:
            return 0.0
        return (step - self._first_step) / seconds

    def say(self, sentence: str) -> None:
        if self.enabled:
            say(sentence)
