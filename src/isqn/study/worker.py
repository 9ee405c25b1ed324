"""Train one job of a study in a process of its own: `python -m isqn.study.worker JOB.toml METHOD_DIR [IMPORT ...]`.

The worker finds out by itself what is left to do, so an engine may start it again after any failure. Its exit codes are
those of `isqn train`. It ends with its parent: when the pipe at its standard input closes, it saves and stops.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isqn.agents.registry import read_config_file
from isqn.data.files import Busy
from isqn.exits import DONE, FAILED, INTERRUPTED
from isqn.imports import import_all
from isqn.train.record import seed_dir
from isqn.types import Interrupted, UserError

WAIT_SECONDS = 5.0
SEEDS_PER_JOB = 5  # in one compiled program; with more, a core does no more work per second


def command(job_file: Path, method_dir: Path, imports: Iterable[str]) -> list[str]:
    # -P: files of the current folder do not shadow modules, as for the command `isqn`
    return [sys.executable, "-P", "-m", "isqn.study.worker", str(job_file), str(method_dir), *imports]


def main(argv: list[str]) -> int:
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        job_file, method_dir, *imports = argv
        import_all(imports)
        train_job(read_config_file(Path(job_file)), Path(method_dir))
        return DONE
    except Interrupted as stop:
        print(f"isqn: {stop}", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        traceback.print_exc()  # the line below it is what the study shows
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        print(f"isqn: {kind}{str(error).strip().partition(chr(10))[0]}", file=sys.stderr, flush=True)
        return FAILED


def _stop_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def train_job(config: Any, method_dir: Path) -> None:
    """Train all seeds of a job to the end, whatever exists already; wait for a run that another process trains."""
    from isqn.train import parallel, record, run

    def folder(seed: int) -> Path:
        return seed_dir(method_dir, seed)

    def has_begun(seed: int) -> bool:
        return record.run_state(folder(seed)) != "new"

    seeds = range(config.seed, config.seed + config.num_seeds)
    while left := [seed for seed in seeds if record.run_state(folder(seed)) != "finished"]:
        first = left[0]
        together = [first]  # the following seeds that can begin in the same program
        while together[-1] + 1 in left and not has_begun(together[-1] + 1):
            together.append(together[-1] + 1)
        try:
            new = config.with_seed_index(first - config.seed)
            if has_begun(first):
                run.resume(folder(first))
            elif len(together) == 1:
                run.start(new, folder(first))
            else:
                run.start(new.replace(num_seeds=len(together)), method_dir)
            if not parallel.is_first():  # the first process says when it is finished
                return
        except Busy as busy:
            print(f"isqn: {busy} Waiting for it.", file=sys.stderr, flush=True)
            time.sleep(WAIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
