"""One run on four devices, and by two processes: the same numbers as on one device, up to rounding."""

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
from isqn.study.engines.base import combine_exit_codes
from isqn.study.worker import DONE, FAILED, INTERRUPTED
from isqn.train import checkpoint
from isqn.train.parallel import join, process_variables
from isqn.types import UserError

# with dropout and micro-batches, whose random numbers must not depend on the number of devices
SMALL = (
    *("train", "ilql", "--num-layers", "1", "--model-width", "8", "--attention-heads", "2", "--head-hidden-size", "6"),
    *("--num-words", "8", "--batch-size", "8", "--micro-batch-size", "4", "--dropout", "0.1", "--epoch-updates", "2"),
    *("--num-updates", "6", "--log-period-updates", "2", "--evaluation-games", "4", "--quiet"),
)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Folder of the run by one process, on one device."""
    folder = tmp_path_factory.mktemp("single") / "run"
    assert main([*SMALL, "--run-dir", str(folder)]) == 0
    return folder


def start(*words, **variables):
    command = [sys.executable, "-m", "isqn", *words]
    return subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(*processes, code=0):
    for process in processes:
        _, error = process.communicate(timeout=300)
        assert process.returncode == code, error


def assert_close(folder, other):
    """Compare parameters and Adam's moments."""
    arrays, expected = (next(checkpoint.newest_good(run))[1] for run in (folder, other))
    assert arrays.keys() == expected.keys()
    for name in arrays:
        np.testing.assert_allclose(arrays[name], expected[name], rtol=2e-3, atol=2e-5, err_msg=name)


def test_four_devices_learn_the_same_as_one(single, tmp_path):
    flags = "--xla_force_host_platform_device_count=4"
    wait_for(start(*SMALL, "--run-dir", str(tmp_path / "run"), XLA_FLAGS=flags))
    assert_close(tmp_path / "run", single)


def test_a_batch_that_devices_cannot_share_is_refused(tmp_path):
    flags = "--xla_force_host_platform_device_count=3"
    process = start(*SMALL, "--run-dir", str(tmp_path / "run"), XLA_FLAGS=flags)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert error == "isqn: --micro-batch-size is 4; it must be a multiple of the 3 devices that share it.\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_stop_and_resume_together(single, tmp_path):
    """They are stopped after an epoch, by a signal to the second one; the first one writes the folder."""
    folder = tmp_path / "run"

    def start_both(*words):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        return [start(*words, **process_variables(address, 2, number)) for number in (0, 1)]

    processes = start_both(*SMALL, "--run-dir", str(folder))
    measures = folder / "measures.csv"
    while not measures.exists() or len(measures.read_text().splitlines()) < 3:
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.05)
    processes[1].terminate()
    wait_for(*processes, code=INTERRUPTED)
    assert 2 <= checkpoint.steps(folder)[0] < 6
    wait_for(*start_both("resume", str(folder), "--quiet"))
    assert_close(folder, single)
    assert len(measures.read_text().splitlines()) == 1 + 4


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID must be whole numbers"),
        ({"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "must be whole numbers"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID is 2; it must be from 0 to 1"),
    ],
)
def test_wrong_variables_are_refused(variables, message):
    with pytest.raises(UserError, match=message):
        join({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", **variables})


def test_a_single_process_joins_nothing():
    join({})
    join({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"})
    assert not jax.distributed.is_initialized()


def test_the_worst_exit_code_of_a_job():
    assert combine_exit_codes([DONE, DONE]) == DONE
    assert combine_exit_codes([DONE, INTERRUPTED]) == INTERRUPTED
    assert combine_exit_codes([DONE, INTERRUPTED, FAILED]) == FAILED
    assert combine_exit_codes([FAILED, -9]) == -9  # the other process failed because of this one


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
@pytest.mark.parametrize("engine", [("ray",), ("slurm", "--cluster", "local")], ids=["ray", "slurm"])
def test_engines_start_the_hosts_of_a_run(engine, tmp_path):
    """The run equals that of a single process; the log of the job is that of both processes."""
    name, *more = engine
    (tmp_path / "study.toml").write_text(STUDY)
    command = ("study", str(tmp_path / "study.toml"), "--no-report")
    wait_for(start(*command, "--engine", name, *more, "--hosts", "2", "--out", str(tmp_path / "two")))
    wait_for(start(*command, "--out", str(tmp_path / "one")))
    one, two = (next((tmp_path / folder / "runs").rglob("config.toml")).parent for folder in ("one", "two"))
    assert_close(two, one)
    assert "on each of 2 devices" in next((tmp_path / "two" / "logs").glob("*.log")).read_text()


def test_hosts_needs_an_engine_and_an_agent_that_support_it(tmp_path, capsys):
    (tmp_path / "study.toml").write_text(STUDY)
    for words, message in (
        ([str(tmp_path / "study.toml")], "--hosts is 2; it is for --engine ray or slurm, and the engine is local."),
        (["online-plain", "--engine", "ray"], "--hosts is 2; only runs of `isqn train ilql` are trained by several"),
    ):
        assert main(["study", *words, "--hosts", "2", "--out", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
