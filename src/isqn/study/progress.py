"""Progress of a study: a table that is redrawn on a terminal, or a line every half minute in a pipe."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from isqn.study.engines import Job
from isqn.study.grid import Study
from isqn.train import record
from isqn.train.progress import duration, say

REDRAW_SECONDS = 2.0  # between two tables on a terminal
LINE_SECONDS = 30.0  # between two lines in a pipe
MAX_ROWS = 20


@dataclass
class StudyProgress:
    """Progress of the runs of a study, and messages that do not disturb the table."""

    study: Study
    out: Path
    enabled: bool
    _start_time: float = 0.0
    _start_steps: int | None = None
    _drawn: float = -1e9
    _lines: int = 0

    def say(self, sentence: str, *, always: bool = False) -> None:
        if self.enabled or always:
            self.erase()
            say(sentence)

    def show(self, running: Iterable[Job], waiting: int, failed: list[Job]) -> None:
        """Draw the table, or print a line, if it is time."""
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        if not self.enabled or now - self._drawn < (REDRAW_SECONDS if is_terminal else LINE_SECONDS):
            return
        self._drawn = now
        lines = self.table(list(running), waiting, failed)
        if not is_terminal:
            say(" · ".join(lines[:2]))
            return
        width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
        lines = [line[:width] for line in lines]
        self.erase()
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        self._lines = len(lines)

    def table(self, running: list[Job], waiting: int, failed: list[Job]) -> list[str]:
        """Return the lines: finished runs and remaining time, numbers of jobs, and the progress of each."""
        runs = self.study.folders(self.out)
        progress = {folder: steps_done(folder) for folder in runs}
        goal = sum(cell.config.length for cell, _ in runs.values())
        done = sum(progress.values())
        if self._start_steps is None:
            self._start_steps, self._start_time = done, time.monotonic()
        rate = (done - self._start_steps) / max(time.monotonic() - self._start_time, 1e-9)
        finished = sum(record.run_state(folder) == "finished" for folder in progress)
        pace = f"{rate:,.0f} steps/s · {duration((goal - done) / rate)} left" if rate > 0 else "time left not known yet"
        head = f"{self.study.name}: {finished} of {len(progress)} runs done · {pace}"
        # a cluster accepts all jobs at once, and queues them
        begun = [job for job in running if any((folder / "config.toml").is_file() for folder in job.folders)]
        waiting += len(running) - len(begun)
        counts = f"jobs: {len(begun)} running · {waiting} waiting · {len(failed)} failed"
        shares = {job.name: sum(progress.get(folder, 0) for folder in job.folders) / job.steps for job in begun}
        return [head, counts, *(f"  {name}  {share:.0%}" for name, share in list(shares.items())[:MAX_ROWS])]

    def erase(self) -> None:
        if self._lines:
            sys.stderr.write(f"\x1b[{self._lines}A\x1b[J")
            self._lines = 0


def steps_done(folder: Path) -> int:
    """Return the step in the last row of a run's metrics; 0 if there is none."""
    try:
        with (folder / "metrics.csv").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2_000))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
        return int(lines[-1].split(",")[0])
    except (OSError, ValueError, IndexError):
        return 0
