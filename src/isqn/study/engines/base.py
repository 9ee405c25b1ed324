"""Jobs, what an engine does with them, and the process that trains one.

All engines run the same command in a process of its own. The folder of a study must be visible from everywhere.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from isqn.exits import FAILED, INTERRUPTED
from isqn.study import worker
from isqn.train.record import seed_dir
from isqn.types import UserError

RETRIES = 3  # of a job whose process was killed
LOST = -signal.SIGKILL  # exit code of a process that ended without one


class Launch(NamedTuple):
    """All that a process needs to train a job; schedulers send it to another machine."""

    file: Path
    method_dir: Path
    log: Path
    imports: tuple[str, ...]


class Job(NamedTuple):
    """Some seeds of one method on one task, trained in one program."""

    name: str
    config: Any  # config of all its seeds
    method_dir: Path
    file: Path  # holds the config
    log: Path
    memory: int = 0  # bytes that it will need
    imports: tuple[str, ...] = ()  # files and modules that its process imports first

    @property
    def folders(self) -> list[Path]:
        return [seed_dir(self.method_dir, self.config.seed + index) for index in range(self.config.num_seeds)]

    @property
    def steps(self) -> int:
        return int(self.config.length * self.config.num_seeds)

    @property
    def launch(self) -> Launch:
        return Launch(self.file, self.method_dir, self.log, self.imports)


class Handle(Protocol):
    """A started job."""

    def poll(self) -> int | None:
        """Return the exit code, below 0 if the process was killed or lost; None while it runs."""

    def stop(self) -> None:
        """Ask the job to save and stop."""


class Engine(Protocol):
    """A place where jobs run."""

    def start(self, jobs: Sequence[Job]) -> Sequence[tuple[Job, Handle]]:
        """Start as many of the jobs as there is room for; the others are offered again."""

    def close(self) -> None: ...


def start_process(launch: Launch, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a worker. The pipe to its standard input closes when this process ends, however it ends."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    with launch.log.open("ab") as file:
        return subprocess.Popen(
            worker.command(launch.file, launch.method_dir, launch.imports),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops the worker
        )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Let a worker save and stop, if it still runs."""
    process.terminate()
    process.wait()
    if process.stdin:
        process.stdin.close()


def execute(
    launch: Launch,
    environment: dict[str, str] | None = None,
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> int:
    """Run a worker to its end, inside a process of a scheduler; return its exit code."""
    process = start_process(launch, environment or {})
    on_start(process)
    try:
        return _wait(process)
    finally:  # the scheduler may stop this process by an exception
        end_process(process)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code. `Popen.wait` would hold a lock and block exceptions from other threads."""
    while (code := process.poll()) is None:
        time.sleep(0.2)
    return code


def combine_exit_codes(codes: Sequence[int]) -> int:
    """Return the exit code of a job of several processes: if one was lost, the others fail because of it."""
    lost = [code for code in codes if code < 0]
    return next((code for code in (*lost, FAILED, INTERRUPTED) if code in codes), max(codes))


def import_library(name: str, extra: str) -> Any:
    """Import the library of an engine, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f'--engine {extra} needs `pip install "isqn[{extra}]"`.') from None
