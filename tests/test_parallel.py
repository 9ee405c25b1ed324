"""One run on four devices, and by two processes: the numbers are those of one device, but for rounding."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from isqn.cli import main
from isqn.study.engines import worst
from isqn.study.worker import DONE, FAILED, INTERRUPTED
from isqn.train import checkpoint
from isqn.train.parallel import join, process_variables
from isqn.types import UserError

# dropout and micro-batches: the draws of a device must be its share of those of all
SMALL = (
    *("train", "ilql", "--num-layers", "1", "--model-width", "8", "--attention-heads", "2", "--head-hidden-size", "6"),
    *("--num-words", "8", "--batch-size", "8", "--micro-batch-size", "4", "--dropout", "0.1", "--epoch-updates", "2"),
    *("--num-updates", "6", "--log-period-updates", "2", "--evaluation-games", "4", "--quiet"),
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By one process, on one device."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert main([*SMALL, "--run-dir", str(folder)]) == 0
    return folder


def started(*words, **more):
    process = [sys.executable, "-m", "isqn", *words]
    return subprocess.Popen(
        process, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(*processes, code=0):
    for process in processes:
        _, told = process.communicate(timeout=300)
        assert process.returncode == code, told


def assert_same(folder, other):
    """All that was learned, Adam's moments too."""
    arrays, expected = (next(checkpoint.newest_good(run))[1] for run in (folder, other))
    assert arrays.keys() == expected.keys()
    for name in arrays:
        np.testing.assert_allclose(arrays[name], expected[name], rtol=2e-3, atol=2e-5, err_msg=name)


def test_four_devices_learn_what_one_does(alone, tmp_path):
    shared = "--xla_force_host_platform_device_count=4"
    ended(started(*SMALL, "--run-dir", str(tmp_path / "run"), XLA_FLAGS=shared))
    assert_same(tmp_path / "run", alone)


def test_a_batch_that_devices_cannot_share_is_refused(tmp_path):
    three = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    process = started(*SMALL, "--run-dir", str(tmp_path / "run"), **three)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 1
    assert told == "isqn: --micro-batch-size is 4; it must be a multiple of the 3 devices that share it.\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_stop_together_and_go_on(alone, tmp_path):
    """Stopped after an epoch, by a signal to one of them only, and resumed: the folder is that of the first."""
    folder = tmp_path / "run"

    def both(*words):
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listening.getsockname()[1]}"
        return [started(*words, **process_variables(address, 2, number)) for number in (0, 1)]

    processes = both(*SMALL, "--run-dir", str(folder))
    measures = folder / "measures.csv"
    while not measures.exists() or len(measures.read_text().splitlines()) < 3:
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.05)
    processes[1].terminate()
    ended(*processes, code=INTERRUPTED)
    assert 2 <= checkpoint.steps(folder)[0] < 6
    ended(*both("resume", str(folder), "--quiet"))
    assert_same(folder, alone)
    assert len(measures.read_text().splitlines()) == 1 + 4


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID must be whole numbers"),
        ({"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "must be whole numbers"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID is 2; it must be from 0 to 1"),
    ],
)
def test_what_is_told_wrongly_is_said(more, sentence):
    with pytest.raises(UserError, match=sentence):
        join({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", **more})


def test_who_is_told_of_nobody_is_alone():
    join({})
    join({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"})
    assert not jax.distributed.is_initialized()


def test_the_worst_of_the_codes_of_a_job():
    assert worst([DONE, DONE]) == DONE
    assert worst([DONE, INTERRUPTED]) == INTERRUPTED
    assert worst([DONE, INTERRUPTED, FAILED]) == FAILED
    assert worst([FAILED, -9]) == -9  # the other one failed because of it


STUDY = """
name = "together"
question = "Do two hosts learn what one does?"
agent = "ilql"
baseline = "TF-ILQL"
seeds = [0]
tasks = [{ env_id = "isqn/Wordle-v0", random_score = -6.0, reference_score = 0.0 }]
methods = [{ scheme = "target-free" }]

[settings]
preset = "wordle-mini"
num_layers = 1
model_width = 8
attention_heads = 2
head_hidden_size = 6
num_words = 8
batch_size = 8
micro_batch_size = 4
dropout = 0.1
num_updates = 4
epoch_updates = 2
log_period_updates = 2
evaluation_games = 4
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", [("ray", "ray"), ("slurm", "submitit", "--cluster", "local")], ids=["ray", "slurm"])
def test_engines_start_the_hosts_of_a_run(engine, tmp_path):
    """The job's log has what both processes said; the run is the first one's, and that of a process alone."""
    name, library, *more = engine
    pytest.importorskip(library)
    (tmp_path / "study.toml").write_text(STUDY)
    command = ("study", str(tmp_path / "study.toml"), "--no-report")
    ended(started(*command, "--engine", name, *more, "--hosts", "2", "--out", str(tmp_path / "two")))
    ended(started(*command, "--out", str(tmp_path / "one")))
    one, two = (next((tmp_path / folder / "runs").rglob("config.toml")).parent for folder in ("one", "two"))
    assert_same(two, one)
    assert "on each of 2 devices" in next((tmp_path / "two" / "logs").glob("*.log")).read_text()


def test_hosts_are_for_engines_and_agents_that_can(tmp_path, capsys):
    (tmp_path / "study.toml").write_text(STUDY)
    for words, sentence in (
        ([str(tmp_path / "study.toml")], "--hosts is 2; it is for --engine ray or slurm, and the engine is local."),
        (["online-plain", "--engine", "ray"], "--hosts is 2; only runs of `isqn train ilql` are trained by several"),
    ):
        assert main(["study", *words, "--hosts", "2", "--out", str(tmp_path / "out")]) == 1
        assert sentence in capsys.readouterr().err
