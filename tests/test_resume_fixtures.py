"""Runs made by an earlier version load, resume and end as they did (tests/data/resume).

Integers, counters and the exact columns of the tables are compared on every machine, and floats with a tolerance. On
the machine that made the runs all bits are compared.
"""

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

from isqn.data.text import read_table
from isqn.train import checkpoint, tables

FIXTURES = Path(__file__).parent / "data" / "resume"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
COUNTS = json.loads((FIXTURES.parent / "resume_counts.json").read_text())
EXACT = ("epoch", "episode", "step", "frame", "length", "updates")  # columns that depend on no rounding
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


def is_float(name: str, array: np.ndarray) -> bool:
    """Return whether a leaf holds floats, which other processors may round differently."""
    return array.dtype.kind == "f" or is_float64_in_words(name)


def is_float64_in_words(name: str) -> bool:
    """Return whether a leaf holds float64 as pairs of 32-bit words (isqn.moments)."""
    return ".moments." in name and name.split(".")[-1] in ("mean", "squares", "latest")


def to_float64(name: str, array: np.ndarray) -> np.ndarray:
    return array.view("<f8") if is_float64_in_words(name) else array.astype(np.float64)


def final_arrays(key: str) -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "final" / f"{key.replace('/', '--')}.safetensors")


def tables_of(run_dir: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of all tables of a run, without clocks."""
    return {
        path.name: [{k: v for k, v in row.items() if k not in CLOCKS} for row in read_table(path)]
        for path in sorted(run_dir.glob("*.csv"))
    }


def counters_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in manifest["counters"].items() if k != "seconds"}


def counts_of(run_dir: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what `resume_counts.json` holds of a run: its counters, and the exact columns of its tables."""
    tables = {
        name: {column: [row[column] for row in rows] for column in EXACT if column in rows[0]}
        for name, rows in tables_of(run_dir).items()
    }
    return {"counters": counters_of(manifest), "tables": tables}


@pytest.fixture(params=EXPECTED["runs"])
def ended(request, resumed):
    """The name of a run that was resumed, its folder, and the arrays and the manifest of its last checkpoint."""
    folder, failures = resumed
    assert not failures
    run_dir = folder / request.param
    step = checkpoint.steps(run_dir)[0]
    assert step == EXPECTED["runs"][request.param]["checkpoint"]
    return request.param, run_dir, *checkpoint.read(checkpoint.folder_of(run_dir, step))


def test_a_run_of_an_earlier_version_resumes_to_the_same_counts(ended):
    key, run_dir, arrays, manifest = ended
    final = final_arrays(key)
    assert arrays.keys() == final.keys()
    for name, array in final.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape), name
        if is_float(name, array):
            ours, theirs = to_float64(name, arrays[name]), to_float64(name, array)
            # Adam's averages of the latest gradients: a ReLU that switches changes them at once, the parameters hardly.
            bound = 0.1 * np.abs(theirs).max() if {"mu", "nu"} & set(name.split(".")) else 0.0
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 + bound, err_msg=name)
        else:
            np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    counts = counts_of(run_dir, manifest)
    assert counts["tables"] == COUNTS[key]["tables"]
    assert counts["counters"].keys() == COUNTS[key]["counters"].keys()
    for name, value in COUNTS[key]["counters"].items():
        counted = counts["counters"][name]
        assert type(counted) is type(value), name
        assert counted == (value if isinstance(value, int) else pytest.approx(value, rel=1e-3, abs=1e-3)), name
    assert {path.name for path in run_dir.glob("best-*")} == set(EXPECTED["runs"][key]["best"])


@pytest.mark.skipif(not SAME_BITS, reason=f"the bits were made on {EXPECTED['machine']}, jaxlib {EXPECTED['jaxlib']}")
def test_a_run_of_an_earlier_version_resumes_to_the_same_bits(ended):
    key, run_dir, arrays, manifest = ended
    expected = EXPECTED["runs"][key]
    for name, array in final_arrays(key).items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    assert {table: digest(rows) for table, rows in tables_of(run_dir).items()} == expected["tables"]
    assert digest(counters_of(manifest)) == expected["counters"]
    assert digest(tables.results(run_dir)) == expected["results"]
    best = {path.name: digest_arrays(checkpoint.read(path)[0]) for path in run_dir.glob("best-*")}
    assert best == expected["best"]
