"""Runs made by an earlier version load, resume and end with the same bits (tests/data/resume)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from isqn.train import checkpoint, record

FIXTURES = Path(__file__).parent / "data" / "resume"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
RUNS = sorted({name.split("/")[0] for name in EXPECTED["runs"]})
CLOCKS = {"seconds", "steps_per_second", "memory_mb", "waiting_share"}


def machine() -> str:
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return " ".join(facts.get(name, "") for name in ("model name", "cpu family", "model"))


SAME_BITS = machine() == EXPECTED["machine"] and version("jaxlib") == EXPECTED["jaxlib"]


def digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_arrays(arrays: dict[str, np.ndarray]) -> str:
    each = {
        name: sha256(str((array.dtype.str, array.shape)).encode() + array.tobytes()).hexdigest()
        for name, array in sorted(arrays.items())
    }
    return sha256(json.dumps(each).encode()).hexdigest()


# The flags that these bits were made with; another process resumes the runs, so that no other flags matter.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
RESUME_ALL = """
import sys, traceback
from pathlib import Path
from isqn.train import run
for folder in sys.argv[1:]:
    try:
        assert run.resume(Path(folder), quiet=True), "it had finished"
    except Exception:
        print(folder, traceback.format_exc(), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Resume a copy of every run; return their folder, and what failed."""
    folder = tmp_path_factory.mktemp("runs")
    for name in (*RUNS, "dataset"):
        shutil.copytree(FIXTURES / name, folder / name)
    first = [min(key for key in EXPECTED["runs"] if key.split("/")[0] == name) for name in RUNS]
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", RESUME_ALL, *first]
    # The config of `cql` names its dataset relative to the working folder.
    env = os.environ | {"XLA_FLAGS": XLA_FLAGS}
    return folder, subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_version_resumes_to_the_same_bits(name, resumed):
    folder, failures = resumed
    assert not failures
    for key in EXPECTED["runs"]:
        if key.split("/")[0] == name:
            assert_ended_as_expected(folder / key, key)


def assert_ended_as_expected(run_dir: Path, key: str) -> None:
    expected = EXPECTED["runs"][key]
    step = checkpoint.steps(run_dir)[0]
    assert step == expected["checkpoint"]
    arrays, manifest = checkpoint.read(checkpoint.folder_of(run_dir, step))
    final = load_file(FIXTURES / "final" / f"{key.replace('/', '--')}.safetensors")
    assert arrays.keys() == final.keys()
    for leaf, array in final.items():
        assert arrays[leaf].dtype == array.dtype, leaf
        if SAME_BITS:
            np.testing.assert_array_equal(arrays[leaf], array, err_msg=leaf)
        elif array.dtype.kind == "f":
            np.testing.assert_allclose(arrays[leaf], array, rtol=1e-3, atol=1e-3, err_msg=leaf)
    if not SAME_BITS:
        return
    tables = {
        path.name: [{k: v for k, v in row.items() if k not in CLOCKS} for row in record.read_table(path)]
        for path in sorted(run_dir.glob("*.csv"))
    }
    assert {table: digest(rows) for table, rows in tables.items()} == expected["tables"]
    assert digest({k: v for k, v in manifest["counters"].items() if k != "seconds"}) == expected["counters"]
    assert digest(record.results(run_dir)) == expected["results"]
    best = {path.name: digest_arrays(checkpoint.read(path)[0]) for path in run_dir.glob("best-*")}
    assert best == expected["best"]
