"""Soak test of studies: many tiny runs, while workers are killed at random.

python -m benchmarks.soak --engine local --json results/soak-local.json
python -m benchmarks.soak --engine ray --json results/soak-ray.json

The same study is trained twice, undisturbed and with kills. The report says whether the results are the same to the
bit, how the memory of the driver develops, and which processes and temporary files are left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from isqn.data.text import read_table
from isqn.study.grid import Study, to_toml
from isqn.train import checkpoint

STUDY = Study(
    name="soak",
    question="Do kills change anything?",
    baseline="TB-DQN",
    seeds=(0,),
    tasks=({"env_id": "isqn/Chain-v0"},),
    methods=({"scheme": "target-based"}, {"scheme": "iterated-shared", "num_bellman_iterations": 3}),
    settings={
        "loop": "host",  # slow enough to be killed in the middle
        "total_timesteps": 1_500,
        "epoch_steps": 250,
        "log_period_steps": 250,
        "learning_starts": 100,
        "hidden_sizes": [8],
    },
)
MOST_KILLS = 2  # of one job: a study gives up after three


def find_workers(out: Path) -> list[psutil.Process]:
    """Return the processes that train a job of the study."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "isqn.study.worker" in words and any(word.startswith(str(out)) for word in words):
            found.append(process)
    return found


def train(study: Study, folder: Path, engine: str, workers: int, kills: int, seed: int) -> dict[str, Any]:
    """Train the study by the command line; kill `kills` workers at random moments."""
    folder.mkdir(parents=True)
    file, out = folder / "soak.toml", folder / "out"
    file.write_text(to_toml(study))
    words = [str(file), "--out", str(out), "--engine", engine, "--workers", str(workers), "--seeds-per-job", "1"]
    command = [sys.executable, "-m", "isqn", "study", *words, "--no-report"]
    rng, began, killed = random.Random(seed), time.monotonic(), dict[str, int]()
    memory: list[float] = []
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log)
        process, next_kill = psutil.Process(driver.pid), time.monotonic() + 5
        while driver.poll() is None:
            time.sleep(0.5)
            try:
                memory.append(process.memory_info().rss / 1e6)
            except psutil.NoSuchProcess:
                break
            if sum(killed.values()) < kills and time.monotonic() > next_kill:
                next_kill = time.monotonic() + rng.uniform(1, 8)
                victims = [(w, " ".join(w.info["cmdline"][-2:])) for w in find_workers(out)]
                victims = [(w, job) for w, job in victims if killed.get(job, 0) < MOST_KILLS]
                if victims:
                    worker, job = rng.choice(victims)
                    killed[job] = killed.get(job, 0) + 1
                    worker.send_signal(signal.SIGKILL)
    time.sleep(3)
    left = [p.pid for p in find_workers(out)]
    temporary = [str(p.relative_to(out)) for p in out.rglob("*") if "writing" in p.name or "unfinished" in p.name]
    return {
        "exit_code": driver.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "kills": sum(killed.values()),
        "driver_mb": {"first_quarter": _mean(memory, 0), "last_quarter": _mean(memory, 3), "peak": max(memory)},
        "processes_left": left,
        "temporary_files_left": temporary,
    }


def _mean(values: list[float], quarter: int) -> float:
    part = values[len(values) * quarter // 4 : len(values) * (quarter + 1) // 4] or values
    return sum(part) / len(part)


def outcome(study: Study, out: Path) -> list[Any]:
    """Return what must be the same of every run: parameters, and episodes without the clock."""
    results = []
    for folder in study.folders(out):
        step, arrays, _ = next(checkpoint.newest_good(folder))
        rows = read_table(folder / "episodes.csv")
        episodes = [tuple(value for name, value in row.items() if name != "seconds") for row in rows]
        results.append((step, {name: array.tobytes() for name, array in arrays.items()}, episodes))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    study = replace(STUDY, seeds=tuple(range(options.runs // len(STUDY.methods))))
    before = set(os.listdir(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        parts = {
            name: train(study, Path(folder) / name, options.engine, options.workers, kills, options.seed)
            for name, kills in (("undisturbed", 0), ("with_kills", options.kills))
        }
        undisturbed, with_kills = (outcome(study, Path(folder) / name / "out") for name in parts)
    left = sorted(name for name in set(os.listdir(tempfile.gettempdir())) - before if "isqn" in name)
    report = {
        "engine": options.engine,
        "runs": options.runs,
        "same_results": undisturbed == with_kills,
        "left_in_tmp": left,
        **parts,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
