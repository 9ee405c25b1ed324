"""Memory and speed of the compressed replay on 15 Atari games under random play.

    python benchmarks/replay_memory.py --json results/replay_memory.json
    python benchmarks/replay_memory.py --resident BeamRider

The first plays every game and prints a table. The second fills a replay of 1,000,000 rows with one game and
reports how much the process really grew. It adds the recorded rows again and again, which is as hard as new
ones: blocks are compressed one by one, so nothing is gained from having been seen before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from pathlib import Path

import ale_py
import numpy as np
import psutil
import zstandard

from isqn.data.frames import BLOCK_ROWS, ZSTD_LEVEL
from isqn.data.replay import Replay, memory_needed
from isqn.envs.adapter import make_environment
from isqn.envs.scores import ATARI_15
from isqn.keys import episode_seed
from isqn.types import EnvSpec

MILLION = 1_000_000


def record(game: str, steps: int, seed: int) -> tuple[EnvSpec, list[tuple], np.ndarray]:
    """Random play: the arguments of `add` without the frame, () for a reset; and the frames."""
    env = make_environment(f"ALE/{game}-v5")
    rng = np.random.default_rng(seed)
    # One array from the start: a list of frames would leave free memory behind for the replay to grow into.
    frames = np.empty((steps, *env.spec.frame_shape), np.uint8)
    moves: list[tuple] = []
    over, episode = True, 0
    for row in range(steps):
        if over:
            frames[row] = env.reset(episode_seed(seed, episode))
            moves.append(())
            over, episode = False, episode + 1
        else:
            action = int(rng.integers(env.spec.num_actions))
            frames[row], reward, terminated, truncated = env.step(action)
            moves.append((action, reward, terminated, truncated))
            over = terminated or truncated
    return env.spec, moves, frames


def add_row(replay: Replay, move: tuple, frame: np.ndarray) -> None:
    if move:
        replay.add(*move, frame)
    else:
        replay.add_first(frame)


def sample_times(replay: Replay, batches: int = 300) -> dict:
    """Milliseconds for a batch of 32, by the clock and of this thread alone (for a machine that is shared)."""
    generator = np.random.default_rng(0)
    clock, thread = [], []
    for _ in range(batches):
        begin = time.perf_counter(), time.thread_time()
        replay.sample(32, generator)
        thread.append(1e3 * (time.thread_time() - begin[1]))
        clock.append(1e3 * (time.perf_counter() - begin[0]))
    return {
        "sample_ms_median": round(float(np.median(clock)), 3),
        "sample_ms_p90": round(float(np.quantile(clock, 0.9)), 3),
        "sample_cpu_ms_median": round(float(np.median(thread)), 3),
    }


def measure(game: str, steps: int, seed: int) -> dict:
    spec, moves, frames = record(game, steps, seed)
    replay = Replay(spec, len(moves), compress=True, discount=0.99, reward_clip=1.0)
    begin = time.thread_time()
    for move, frame in zip(moves, frames, strict=True):
        add_row(replay, move, frame)
    add_seconds = time.thread_time() - begin
    times = sample_times(replay)
    per_row = replay.nbytes / replay.num_rows
    return {
        "game": game,
        "rows": replay.num_rows,
        "bytes_per_row": round(per_row, 1),
        "mb_at_1m": round(per_row * MILLION / 1e6, 1),
        **times,
        "add_cpu_us_per_frame": round(1e6 * add_seconds / len(moves), 1),
    }


def measure_resident(game: str, steps: int, seed: int) -> dict:
    spec, moves, frames = record(game, steps, seed)
    needed = memory_needed(spec, MILLION, compress=True)
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    replay = Replay(spec, MILLION, compress=True, discount=0.99, reward_clip=1.0)
    for row in range(MILLION + MILLION // 20):  # a little more, so that old segments are given back too
        add_row(replay, moves[row % len(moves)], frames[row % len(moves)])
    times = sample_times(replay)
    gc.collect()
    grown = process.memory_info().rss - before
    return {
        "game": game,
        "rows": replay.num_rows,
        "recorded_rows": len(moves),
        "resident_mb": round(grown / 1e6, 1),
        "counted_mb": round(replay.nbytes / 1e6, 1),
        "announced_mb": round(needed.total / 1e6, 1),
        **times,
    }


def mean(results: list[dict]) -> dict:
    numbers = [name for name in results[0] if name != "game"]
    return {"game": "mean", **{name: round(float(np.mean([r[name] for r in results])), 3) for name in numbers}}


def print_row(result: dict) -> None:
    print(
        f"{result['game']:14}{result['bytes_per_row']:12.0f}{result['mb_at_1m']:12.0f}"
        f"{result['sample_ms_median']:12.2f}{result['sample_ms_p90']:12.2f}"
        f"{result['sample_cpu_ms_median']:12.2f}{result['add_cpu_us_per_frame']:12.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="rows per game: steps, and one more per episode")
    parser.add_argument("--games", nargs="+", default=ATARI_15)
    parser.add_argument("--resident", metavar="GAME", help="fill 1,000,000 rows with this game instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add the results to this file")
    arguments = parser.parse_args()

    machine = {
        "command": " ".join(["python", *sys.argv]),
        "cpu_count": os.cpu_count(),
        "load_average": None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "zstandard": zstandard.__version__,
        "ale_py": ale_py.__version__,
        "block_rows": BLOCK_ROWS,
        "zstd_level": ZSTD_LEVEL,
    }
    if arguments.resident:
        name, result = "resident", measure_resident(arguments.resident, arguments.steps, arguments.seed)
        print(result)
    else:
        print(
            f"{'game':14}{'bytes/row':>12}{'MB at 1M':>12}{'sample ms':>12}{'p90 ms':>12}{'cpu ms':>12}{'add us':>12}"
        )
        results = []
        for game in arguments.games:
            results.append(measure(game, arguments.steps, arguments.seed))
            print_row(results[-1])
        print_row(mean(results))
        name, result = "games", {"mean": mean(results), "each": results}
    if hasattr(os, "getloadavg"):
        machine["load_average"] = [round(load, 2) for load in os.getloadavg()]
    if arguments.json:
        known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        known[name] = {**machine, **result}
        arguments.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
