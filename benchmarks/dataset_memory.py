"""Sampling from a dataset that is ten times as large as the memory it is given.

    python benchmarks/dataset_memory.py --json results/dataset_memory.json

Frames are noise, which cannot be compressed. A process of its own, in a control group with a limit of memory, opens the
dataset and draws batches; what the system caches of files counts there too. Needs Linux and the right to make a group.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from isqn.data.dataset import Dataset, DatasetWriter, Piece, Provenance
from isqn.data.sample import INSIDE, TERMINATED
from isqn.types import EnvSpec

SPEC = EnvSpec("noise", "noise", (84, 84, 1), "uint8", 4, frame_stack=4)
EPISODE = 1_000
BATCHES = 1_000


def write(folder: Path, rows: int) -> int:
    """Its size in bytes."""
    rng, writer = np.random.default_rng(0), DatasetWriter(folder, SPEC, Provenance("nobody"))
    ends = np.full(EPISODE, INSIDE, np.uint8)
    ends[-1] = TERMINATED
    for _ in range(rows // EPISODE):
        frames = rng.integers(0, 256, (EPISODE, *SPEC.frame_shape), np.uint8)
        writer.extend(Piece(frames, rng.integers(0, 4, EPISODE), rng.normal(size=EPISODE), ends))
    writer.save()
    return sum(path.stat().st_size for path in folder.iterdir())


def forget(folder: Path) -> None:
    """Drop the cached pages of the files, which count as memory of the process that wrote them."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


@contextmanager
def group(limit: int):
    """A control group, of version 1 or 2, with a limit of memory: files of its members and of the most that it took."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, most, peak = (
        (old, "memory.limit_in_bytes", "memory.max_usage_in_bytes")
        if old.is_dir()
        else (new, "memory.max", "memory.peak")
    )
    folder = root / f"isqn-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / most).write_text(str(limit))
        yield folder / "cgroup.procs", folder / peak
    finally:
        folder.rmdir()


def sample(folder: Path) -> None:
    """Print the batches drawn per second, in the process whose memory is limited."""
    dataset = Dataset.open(folder)
    rng = np.random.default_rng(1)
    first = dataset.sample(32, rng)
    assert first.obs.shape == (32, 84, 84, 4)
    began = time.perf_counter()
    for _ in range(BATCHES):
        dataset.sample(32, rng)
    print(json.dumps({"batches_per_second": BATCHES / (time.perf_counter() - began)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sample", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sample:
        sample(args.sample)
        return
    with TemporaryDirectory() as temporary:
        size = write(Path(temporary) / "noise", args.rows)
        found: dict[str, object] = {"rows": args.rows, "dataset_bytes": size}
        for name, limit in (("a tenth", size // 10), ("all", 4 * size)):
            forget(Path(temporary) / "noise")
            with group(limit) as (members, peak):
                process = subprocess.Popen(
                    [sys.executable, __file__, "--sample", str(Path(temporary) / "noise")],
                    stdout=subprocess.PIPE,
                    preexec_fn=lambda members=members: members.write_text(str(os.getpid())),
                )
                out, _ = process.communicate()
                if process.returncode:
                    raise SystemExit(f"with {limit:,} bytes it failed ({process.returncode})")
                found[name] = {"limit_bytes": limit, "peak_bytes": int(peak.read_text()), **json.loads(out)}
            print(name, found[name])
    if args.json:
        found["command"] = "python benchmarks/dataset_memory.py"
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
