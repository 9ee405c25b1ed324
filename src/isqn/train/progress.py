"""Progress of a run on standard error: one line that is redrawn in a terminal, one line per epoch elsewhere.

The run continues if the terminal or the pipe is closed.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil


def memory_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def free_memory() -> int:
    """Return the bytes that this process may still allocate.

    This is the free memory of the machine, or less under `ulimit -v` or in a control group.
    """
    free = [psutil.virtual_memory().available, free_address_space()]
    free += [size for folder in control_groups() if (size := _free_in_group(folder)) is not None]
    return int(max(0, min(free)))


def free_address_space() -> float:
    """Return the bytes that this process may still map under `ulimit -v`; infinity without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if limit == resource.RLIM_INFINITY else limit - psutil.Process().memory_info().vms


def control_groups(groups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Return the control group (version 2) of this process and its parents, which may have memory limits."""
    lines = mine.read_text().splitlines() if mine.exists() else []
    own_groups = [groups / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [folder for own in own_groups for folder in (own, *own.parents) if folder.is_relative_to(groups)]


def _free_in_group(group: Path) -> int | None:
    with suppress(OSError, ValueError):  # the limit may be absent, or "max"
        # The usage includes cached files that the system drops when memory is needed.
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        used = int((group / "memory.current").read_text()) - int(files)
        return int((group / "memory.max").read_text()) - used
    return None


def say(sentence: str) -> None:
    """Write a line to standard error, in place of the progress line."""
    _write(("\r\x1b[K" if sys.stderr.isatty() else "") + sentence + "\n")


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 job", "2 jobs"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def _write(text: str) -> None:
    with suppress(OSError):  # a broken pipe, a closed terminal
        sys.stderr.write(text)
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 90 -> "1 min 30 s"."""
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count:.0f} {unit}")
    return " ".join(parts[:2])


WARM_UP_SECONDS = 10  # the device is still behind the loop, so a rate would be too high


@dataclass
class Progress:
    """The progress line of a run; `show` redraws it at most twice a second."""

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
        """Return the time to the end of the run; "" if it is not known yet, or if the run is at its end."""
        rate = self._rate(step)
        return f"{duration((self.total_steps - step) / rate)} left" if rate and step < self.total_steps else ""

    def _rate(self, step: int) -> float:
        """Return steps per second; 0 in the first seconds, when the device has not done the steps of the loop yet."""
        seconds = time.monotonic() - self._started
        if self._first_step is None or seconds <= WARM_UP_SECONDS:
            return 0.0
        return (step - self._first_step) / seconds

    def say(self, sentence: str) -> None:
        if self.enabled:
            say(sentence)


class Control(NamedTuple):
    """Progress reports of a training loop, and requests to stop it."""

    progress: Progress  # where it reports
    should_stop: Callable[[], bool]  # whether it must save and stop
