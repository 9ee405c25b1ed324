"""Studies on three engines: kills, second starts and failures do not change the results."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from helpers import wait_for
from isqn.cli import main
from isqn.data.text import read_table
from isqn.exits import FAILED, INTERRUPTED
from isqn.imports import import_all
from isqn.study import drive, engines, worker
from isqn.study import progress as progress_module
from isqn.study.catalogue import find_study
from isqn.study.engines import local, slurm
from isqn.study.grid import Study, read_study
from isqn.study.grid import to_toml as study_toml
from isqn.study.jobs import remaining_jobs
from isqn.study.progress import StudyProgress
from isqn.train import checkpoint, record, run
from isqn.types import UserError

STUDY = Study(
    name="small",
    question="Is it the same?",
    baseline="TB-DQN",
    seeds=(3, 4),
    tasks=({"env_id": "isqn/Chain-v0"},),
    methods=({"scheme": "target-based"},),
    # the host loop, with a checkpoint every 250 steps: slow enough to be killed in the middle
    settings={
        "loop": "host",
        "total_timesteps": 4_000,
        "epoch_steps": 250,
        "log_period_steps": 250,
        "hidden_sizes": [8],
    },
)
(CELL,) = STUDY.cells


def outcome(out: Path) -> list[tuple]:
    """Return the parts of every run that must be the same: parameters, and episodes without the clock."""
    results = []
    for folder in STUDY.folders(out):
        step, arrays, _ = next(checkpoint.newest_good(folder))
        rows = read_table(folder / "episodes.csv")
        episodes = [tuple(value for name, value in row.items() if name != "seconds") for row in rows]
        results.append((step, {name: array.tobytes() for name, array in arrays.items()}, episodes))
    return results


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    done = drive.train(STUDY, out, engines.Local(2), quiet=True)
    assert done == (2, 2, [])
    return outcome(out)


def workers_of(out: Path) -> list[psutil.Process]:
    """Return the processes that train a job of this study."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "isqn.study.worker" in words and any(word.startswith(str(out)) for word in words):
            processes.append(process)
    return processes


def halfway(out: Path) -> list[psutil.Process]:
    """Return the workers once a run has a checkpoint; before that, none."""
    begun = [folder for folder in STUDY.folders(out) if checkpoint.steps(folder)]
    return workers_of(out) if begun else []


def start(out: Path, *words: str) -> subprocess.Popen:
    """Start `isqn study` in a process of its own."""
    file = out / "mine.toml"
    if not file.exists():
        file.write_text(study_toml(STUDY))
    command = [
        sys.executable,
        "-m",
        "isqn",
        "study",
        str(file),
        "--out",
        str(out / "out"),
        "--workers",
        "2",
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


ENGINES = {"local": (), "ray": ("--engine", "ray"), "slurm": ("--engine", "slurm", "--cluster", "local")}


@pytest.mark.parametrize(
    ("engine", "victim"),
    # The parent of a local run is the study itself: see test_workers_end_with_the_study.
    [("local", "the run"), *((engine, victim) for engine in ("ray", "slurm") for victim in ("the run", "its parent"))],
)
def test_a_killed_worker_is_restarted_and_the_results_are_the_same(engine, victim, tmp_path, undisturbed):
    study = start(tmp_path, *ENGINES[engine])
    process = wait_for(lambda: halfway(tmp_path / "out"))[0]
    (process if victim == "the run" else process.parent()).send_signal(signal.SIGKILL)
    _, errors = study.communicate()
    assert study.returncode == 0, errors
    assert outcome(tmp_path / "out") == undisturbed
    assert victim != "the run" or "was killed; it starts again, from its checkpoint" in errors


def test_a_preempted_slurm_job_is_queued_again(tmp_path, undisturbed):
    study = start(tmp_path, *ENGINES["slurm"])
    process = wait_for(lambda: halfway(tmp_path / "out"))[0]
    process.parent().send_signal(signal.SIGUSR2)  # the signal that submitit asks SLURM to send
    _, errors = study.communicate()
    assert study.returncode == 0, errors
    assert outcome(tmp_path / "out") == undisturbed
    logs = "".join(path.read_text() for path in (tmp_path / "out" / "logs").rglob("*.err"))
    assert "this job is preempted" in logs


def test_a_second_start_at_the_same_time_is_refused(tmp_path, undisturbed):
    """The first one is not disturbed."""
    first = start(tmp_path)
    wait_for(lambda: workers_of(tmp_path / "out"))
    first.send_signal(signal.SIGSTOP)  # so that it cannot finish before the second begins
    second = start(tmp_path)
    _, errors = second.communicate()
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 1
    assert errors.splitlines()[-1] == f"isqn: {tmp_path / 'out'} is in use by another process."
    first.communicate()
    assert first.returncode == 0
    assert outcome(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("engine", ENGINES)
def test_ctrl_c_leaves_all_runs_resumable(engine, tmp_path, undisturbed):
    study = start(tmp_path, *ENGINES[engine])
    wait_for(lambda: halfway(tmp_path / "out"))
    study.send_signal(signal.SIGINT)
    _, errors = study.communicate()
    assert study.returncode == INTERRUPTED, errors
    assert errors.splitlines()[-1] == f"isqn: stopped; the same command resumes {tmp_path / 'out'}"
    assert not workers_of(tmp_path / "out")
    again = start(tmp_path)
    again.communicate()
    assert again.returncode == 0
    assert outcome(tmp_path / "out") == undisturbed


def test_workers_end_with_the_study(tmp_path, undisturbed):
    """When the study is killed, its workers save and stop, and the next start resumes."""
    study = start(tmp_path)
    wait_for(lambda: halfway(tmp_path / "out"))
    study.kill()
    study.communicate()
    again = start(tmp_path)  # at once: it waits for workers that are still saving
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert outcome(tmp_path / "out") == undisturbed


def test_a_second_start_trains_nothing_twice(tmp_path, undisturbed, capsys):
    (tmp_path / "mine.toml").write_text(study_toml(STUDY))
    words = ["study", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out"), "--no-report", "--seeds"]
    assert main([*words, "3"]) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("*")}
    assert main([*words, "3", "4"]) == 0
    assert outcome(tmp_path / "out") == undisturbed
    assert all(path.stat().st_mtime_ns == when for path, when in before.items() if path.is_file())
    assert remaining_jobs(STUDY, tmp_path / "out") == []


def test_a_failed_job_is_listed_with_its_log_and_the_others_go_on(tmp_path, capsys):
    broken = {"scheme": "target-free", "name": "broken", "learning_rate": 1e30}
    fast = {"total_timesteps": 1_000, "epoch_steps": 500, "log_period_steps": 250}
    study = STUDY.replace(seeds=(0,), methods=(broken, *STUDY.methods), settings=fast)
    (tmp_path / "mine.toml").write_text(study_toml(study))
    words = ["study", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 1
    said = capsys.readouterr().err
    log = tmp_path / "out" / "logs" / "isqn-Chain-v0--broken--0.log"
    assert "1 of 2 runs have finished" in said
    assert said.count(f"FAILED isqn-Chain-v0--broken--0: {drive.last_line(log)} (log: {log})") == 1
    assert said.endswith(
        f"isqn: 1 job failed; the same command tries again, and `isqn report {tmp_path / 'out'} --missing drop` shows "
        "the seeds that all methods have\n"
    )
    assert drive.last_line(log).startswith("a loss or a parameter stopped being a finite number")
    assert "Traceback" in log.read_text()


class DeadlyEngine:
    """Engine whose jobs are killed, as when memory runs out. It is its own handle."""

    code = -9

    def start(self, jobs):
        return [(job, DeadlyEngine()) for job in jobs]

    def poll(self):
        return self.code

    def close(self):
        pass


def test_a_job_that_is_killed_repeatedly_fails(tmp_path, capsys):
    done = drive.train(STUDY.replace(seeds=(3,)), tmp_path, DeadlyEngine())
    assert (done.finished, done.total, len(done.failed)) == (0, 1, 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"training 1 job; each has a log in {tmp_path / 'logs'}"
    again = "isqn-Chain-v0--TB-DQN--3 was killed; it starts again, from its checkpoint if it has one"
    assert [line for line in lines if "was killed" in line] == [again] * engines.RETRIES
    assert lines[-1] == f"FAILED isqn-Chain-v0--TB-DQN--3: killed 4 times (log: {tmp_path / 'logs'})"


def test_an_unknown_environment_is_refused_before_training(tmp_path, capsys):
    study = STUDY.replace(tasks=({"env_id": "CartPool-v1"},))
    (tmp_path / "mine.toml").write_text(study_toml(study))
    assert main(["study", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out")]) == 1
    assert "CartPool-v1" in capsys.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()


def test_a_folder_with_other_settings_is_refused(tmp_path):
    folder = CELL.folder(tmp_path, 3)
    record.create_run(folder, CELL.config.replace(seed=3, learning_rate=0.5))
    with pytest.raises(UserError) as error:
        drive.train(STUDY, tmp_path, engines.Local(1), quiet=True)
    sentence = "has learning_rate = 0.5, and the study says 0.001; choose another folder, or move the run away."
    assert str(error.value) == f"{folder} {sentence}"


def test_a_run_with_an_unreadable_config_is_refused(tmp_path):
    folder = CELL.folder(tmp_path, 3)
    record.create_run(folder, CELL.config.replace(seed=3))
    (folder / "config.toml").write_text("seed = ")
    with pytest.raises(UserError, match=rf"is not valid TOML: .* Move {folder} away to train it anew\."):
        drive.train(STUDY, tmp_path, engines.Local(1), quiet=True)


def test_a_folder_with_runs_of_a_larger_study_is_refused(tmp_path):
    """The report would leave them out silently."""
    begin(tmp_path, CELL, 3, 5)
    with pytest.raises(UserError) as error:
        drive.train(STUDY, tmp_path, engines.Local(1), quiet=True)
    assert str(error.value) == (
        f"--out {tmp_path} has 1 run that this study does not ask for, such as runs/isqn-Chain-v0/TB-DQN/seed-5; "
        "choose another folder, or ask for those too."
    )
    assert not (tmp_path / "study.toml").exists()


def begin(out: Path, cell, *seeds: int) -> None:
    """Make the folders that a killed program leaves."""
    for seed in seeds:
        folder = cell.folder(out, seed)
        record.create_run(folder, cell.config.replace(seed=seed))
        others = [f"../seed-{other}" for other in seeds]
        record.write_summary(folder, {"status": "running", "trained_with": others})


def test_jobs_group_seeds(tmp_path):
    """Seeds that began together resume together; new ones are consecutive, at most so many in a program."""
    study = STUDY.replace(seeds=(0, 1, 2, 3, 5, 6, 7, 8, 9), settings={})
    (cell,) = study.cells
    begin(tmp_path, cell, 1, 2)
    (cell.folder(tmp_path, 2) / "summary.json").unlink()  # killed before it was written
    record.create_run(cell.folder(tmp_path, 9), cell.config.replace(seed=9))
    record.write_summary(cell.folder(tmp_path, 9), {"status": "finished", "trained_with": ["."]})

    def seeds(jobs):
        return [[job.config.seed + i for i in range(job.config.num_seeds)] for job in jobs]

    assert seeds(remaining_jobs(study, tmp_path, seeds_per_job=3)) == [[1, 2], [0], [3], [5, 6, 7], [8]]
    (cell.folder(tmp_path, 1) / "config.toml").rename(tmp_path / "aside")  # killed before it was written
    assert seeds(remaining_jobs(study, tmp_path, seeds_per_job=3)) == [[0, 1, 2], [3], [5, 6, 7], [8]]
    (tmp_path / "aside").rename(cell.folder(tmp_path, 1) / "config.toml")
    shutil.rmtree(cell.folder(tmp_path, 2))
    assert seeds(remaining_jobs(study, tmp_path, seeds_per_job=3)) == [[1, 2], [0], [3], [5, 6, 7], [8]]
    checkpoint.folder_of(cell.folder(tmp_path, 1), 100).mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"seed-1 was begun in one program with seed-2, which is not there any more; move"
    ):
        remaining_jobs(study, tmp_path)
    on_host = study.replace(settings={"loop": "host"})
    assert seeds(remaining_jobs(on_host, tmp_path / "new")) == [[seed] for seed in study.seeds]


def test_methods_take_turns(tmp_path):
    """If the study is stopped early, all methods have the same seeds."""
    study = STUDY.replace(methods=(*STUDY.methods, {"scheme": "target-free"}), seeds=(0, 1))
    names = [f"isqn-Chain-v0--{method}--{seed}" for seed in (0, 1) for method in ("TB-DQN", "TF-DQN")]
    assert [job.name for job in remaining_jobs(study, tmp_path)] == names


def test_a_worker_trains_what_a_kill_left(tmp_path):
    """One seed is finished, one has begun, one was killed before its config was written, and one is new."""
    config = CELL.config.replace(loop="compiled", total_timesteps=1_000, epoch_steps=500, log_period_steps=250, seed=0)
    run.start(config, tmp_path / "seed-0", quiet=True)
    before = (tmp_path / "seed-0" / "episodes.csv").stat().st_mtime_ns
    record.create_run(tmp_path / "seed-1", config.replace(seed=1))
    record.create_run(tmp_path / "seed-2", config.replace(seed=2))
    (tmp_path / "seed-2" / "config.toml").rename(tmp_path / "seed-2" / ".config.toml.writing")
    (tmp_path / "seed-2" / ".lock").touch()
    worker.train_job(config.replace(num_seeds=4), tmp_path)
    assert [record.run_state(tmp_path / f"seed-{seed}") for seed in range(4)] == ["finished"] * 4
    assert (tmp_path / "seed-0" / "episodes.csv").stat().st_mtime_ns == before
    assert record.read_summary(tmp_path / "seed-3")["trained_with"] == ["../seed-2", "."]


def test_an_error_of_any_kind_is_the_last_line_of_a_log(tmp_path, monkeypatch, capsys):
    def fail(*_):
        error = ValueError("in my own loss\nand much more")
        error.add_note("JAX has removed its frames.")
        raise error

    monkeypatch.setattr(worker, "train_job", fail)
    monkeypatch.setattr(worker, "_stop_with_parent", lambda: None)
    (tmp_path / "job.toml").write_text("seed = 3\n")
    assert worker.main([str(tmp_path / "job.toml"), str(tmp_path)]) == FAILED
    (tmp_path / "log").write_text(capsys.readouterr().err)
    assert drive.last_line(tmp_path / "log") == "ValueError: in my own loss"


def test_a_worker_writes_a_damaged_summary_again(tmp_path):
    """It loses neither checkpoints nor results of the finished run."""
    config = CELL.config.replace(loop="compiled", total_timesteps=500, epoch_steps=500, log_period_steps=250, seed=0)
    (folder,) = run.start(config, tmp_path / "seed-0", quiet=True)
    before, summary = checkpoint.steps(folder), record.read_summary(folder)
    (folder / "summary.json").write_text("{")
    worker.train_job(config.replace(num_seeds=2), tmp_path)
    assert checkpoint.steps(folder) == before
    assert record.read_summary(folder)["epoch_returns"] == summary["epoch_returns"]
    assert record.run_state(tmp_path / "seed-1") == "finished"


def test_a_worker_waits_for_another_worker(tmp_path, monkeypatch, capsys):
    config = CELL.config.replace(loop="compiled", total_timesteps=500, epoch_steps=500, log_period_steps=250)
    lock = record.lock_run([tmp_path / "seed-0"])  # until the worker sleeps
    lock.__enter__()
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: lock.__exit__(None, None, None))
    worker.train_job(config, tmp_path)
    assert record.run_state(tmp_path / "seed-0") == "finished"
    assert f"{tmp_path / 'seed-0'} is in use by another process. Waiting for it." in capsys.readouterr().err


def test_gpus_are_taken_in_turn(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    gpus = engines.visible_gpus()
    assert gpus == ["0", "2"]
    variables = [local.gpu_environment(slot, 3, gpus) for slot in range(3)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in variables] == ["0", "2", "0"]
    assert {one["XLA_PYTHON_CLIENT_MEM_FRACTION"] for one in variables} == {"0.45"}  # two share the first
    assert local.gpu_environment(0, 2, []) == {}
    for value, visible in {"-1": [], "": [], "1,-1,2": ["1"]}.items():  # as CUDA reads it
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert engines.visible_gpus() == visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: B'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert engines.visible_gpus() == ["0", "1"]


def test_cores_are_shared_out_evenly(monkeypatch):
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8, 9}, raising=False)
    assert [local.cores_of(slot, 3) for slot in range(3)] == [[0, 1], [2, 3], [8, 9]]
    assert [local.cores_of(slot, 4) for slot in range(4)] == [[0], [1], [2], [3]]
    assert [local.cores_of(slot, 8) for slot in range(8)] == [[0], [1], [2], [3], [8], [9], [0], [1]]


def test_jobs_wait_for_memory(monkeypatch, tmp_path):
    class Process:
        pid, stdin, code = 0, None, None

        def poll(self):
            return self.code

        def terminate(self):
            pass

        wait = poll

    monkeypatch.setattr(local, "start_process", lambda *_: Process())
    monkeypatch.setattr(local, "cores_of", lambda *_: [])
    engine = engines.Local(3)
    gigabyte = 10**9
    engine._memory = 10 * gigabyte
    large, small, huge = (
        engines.Job(name, CELL.config, tmp_path, tmp_path, tmp_path, size * gigabyte)
        for name, size in (("large", 6), ("small", 3), ("huge", 50))
    )
    started = engine.start([large, large, huge, small])
    assert [job.name for job, _ in started] == ["large", "small"]  # a second large one has to wait
    assert engine.start([huge]) == []
    for _, handle in started:
        handle.process.code = 0
    assert [job.name for job, _ in engine.start([huge, small])] == ["huge"]  # alone; the run itself may refuse


def test_the_progress_table(tmp_path):
    progress = StudyProgress(STUDY, tmp_path, enabled=True)
    (job, other) = remaining_jobs(STUDY, tmp_path)
    begin(tmp_path, CELL, 3)
    columns = "step,frame\n"
    (CELL.folder(tmp_path, 3) / "metrics.csv").write_text(columns + "1000,1000\n2000,20")
    assert progress.table([job], 1, []) == [
        "small: 0 of 2 runs done · time left not known yet",
        "jobs: 1 running · 1 waiting · 0 failed",
        "  isqn-Chain-v0--TB-DQN--3  25%",
    ]
    (CELL.folder(tmp_path, 3) / "metrics.csv").write_text(columns + "4000,4000\n")
    progress._start_time -= 1_000  # 3,000 steps in 1,000 s; 4,000 steps are left
    assert progress.table([job], 0, [other]) == [
        "small: 0 of 2 runs done · 3 steps/s · 22 min 13 s left",
        "jobs: 1 running · 0 waiting · 1 failed",
        "  isqn-Chain-v0--TB-DQN--3  100%",
    ]


def test_in_a_pipe_progress_is_a_line_every_few_minutes(tmp_path, monkeypatch, capsys):
    clock = iter([0.0, 0.0, 1.0, 299.0, 301.0, 301.0])  # one time for each call, and one for each table
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(clock))
    progress = StudyProgress(STUDY, tmp_path, enabled=True, _start_time=0.0, _start_steps=0)
    for _ in range(4):
        progress.show([], 2, [])
    line = "small: 0 of 2 runs done · time left not known yet · jobs: 0 running · 2 waiting · 0 failed\n"
    assert capsys.readouterr().err == 2 * line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "0"], "--workers is 0; it must be at least 1."),
        (["--seeds-per-job", "0"], "--seeds-per-job is 0; it must be at least 1."),
        (["--engine", "slrm"], "--engine is 'slrm'; did you mean slurm?"),
        (["--slurm", "slurm_partition=cpu"], "--slurm is for --engine slurm, and the engine is local."),
        (["--cluster", "local", "--engine", "ray"], "--cluster is for --engine slurm, and the engine is ray."),
        (["--address", "auto", "--dry-run"], "--address is for --engine ray, and the engine is local."),
        (["--engine", "ray", "--gpus", "1"], "--gpus is 1; it must be from 0 to the 0 GPUs of this machine."),
        (["--engine", "slurm", "--slurm", "partition"], "--slurm 'partition' is not of the form KEY=VALUE"),
        (["--engine", "slurm", "--cluster", "local", "--slurm", "partitoin=x"], "--slurm: "),
        (["--engine", "slurm", "--cluster", "local", "--slurm", "timeout_min=x"], '--slurm: Parameter "timeout_min"'),
        (["--engine", "slurm"], "--engine slurm cannot start: "),
        # nothing listens on port 9 (discard) any more
        (["--engine", "ray", "--address", "127.0.0.1:9"], "--address 127.0.0.1:9 is not a Ray cluster that answers: "),
    ],
)
def test_bad_flags_are_refused(words, sentence, tmp_path):
    """A process of its own is needed, because submitit keeps the output of the one that imports it."""
    command = [sys.executable, "-m", "isqn", "study", "online-plain", "--out", str(tmp_path / "out"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    said = done.stderr
    assert said.startswith("isqn: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out" / "runs").exists()


def test_parameters_for_submitit(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "Slurm", lambda folder, workers, cluster, parameters, hosts: parameters)
    words = ["slurm_partition=cpu", "timeout_min=600", "mem_gb=0.5", 'slurm_setup=["module load cuda"]']
    assert engines.make("slurm", tmp_path, 4, None, 0, "slurm", words) == {
        "slurm_array_parallelism": 4,
        "slurm_partition": "cpu",
        "timeout_min": 600,
        "mem_gb": 0.5,
        "slurm_setup": ["module load cuda"],
    }


def test_a_study_imports_a_scheme_of_the_user(tmp_path):
    """Workers import it too; other commands execute nothing of the folder, and say which --import they need."""
    examples = Path(__file__).parents[1] / "examples"
    (tmp_path / "new_scheme.py").write_text((examples / "new_scheme.py").read_text())
    fast = {"total_timesteps": 500, "epoch_steps": 250, "log_period_steps": 250, "hidden_sizes": [8]}
    text = study_toml(STUDY.replace(seeds=(0,), settings=fast))
    text = text.replace("baseline", 'imports = ["new_scheme.py"]\nbaseline')
    (tmp_path / "mine.toml").write_text(text + '\n[[methods]]\nscheme = "two-chains"\nnum_bellman_iterations = 3\n')
    command = [sys.executable, "-m", "isqn", "study", "mine.toml", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2iS-DQN K=3" in done.stdout
    # The folder has its own copy of the file, and a changed file is refused.
    assert 'imports = ["imports/new_scheme.py"]' in (tmp_path / "out" / "study.toml").read_text()
    assert str(tmp_path) not in (tmp_path / "out" / "report" / "index.html").read_text()
    with (tmp_path / "new_scheme.py").open("a") as file:
        file.write("# changed\n")
    for words in ([], ["--dry-run"]):
        again = subprocess.run([*command, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert again.returncode == 1
        assert f"imports: {tmp_path / 'new_scheme.py'} is not what the runs in --out" in again.stderr
    (tmp_path / "new_scheme.py").unlink()
    (mine,) = map(str, (tmp_path / "out").glob("runs/*/2iS-DQN-K3/seed-0"))
    for words in (["report", "out"], ["eval", mine, "--episodes", "1"], ["resume", mine]):
        refused = subprocess.run([*command[:3], *words], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert refused.returncode == 1
        assert re.search(r"--import \S*imports/new_scheme\.py; add it\.\n$", refused.stderr), refused.stderr
        with_import = [*command[:3], *words, "--import", "out/imports/new_scheme.py"]
        done = subprocess.run(with_import, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    code = "import isqn, isqn.imports, sys; isqn.imports.import_all(sys.argv[2:]); "
    code += "print(isqn.Model.load(sys.argv[1]).num_timesteps)"
    load = [sys.executable, "-c", code, mine]
    refused = subprocess.run(load, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "new_scheme.py; add it." in refused.stderr
    load.append("out/imports/new_scheme.py")
    done = subprocess.run(load, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "500\n", done.stderr


def test_workers_import_the_modules_of_environments(tmp_path):
    study = STUDY.replace(tasks=({"env_id": "isqn/Chain-v0"},), imports=("a_module",))
    (job, _) = remaining_jobs(study, tmp_path)
    assert job.launch == (job.file, job.method_dir, job.log, ("a_module",))
    own = study.replace(tasks=({"env_id": "isqn:isqn/Chain-v0"},), seeds=(3,))
    (job,) = remaining_jobs(own, tmp_path)
    assert job.imports == ("a_module", "isqn")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("mine.py", "1 +", "SyntaxError: invalid syntax"),
        ("mine.py", "raise ValueError('no')", "ValueError: no"),
        ("mine.py", "import sys; sys.exit(3)", "SystemExit: 3"),
        ("nothing.py", "", "there is no such file"),
        ("no.such.module", "", "it is neither in "),
        ("", "", "ValueError: Empty module name"),
    ],
)
def test_a_failed_import_is_refused_by_one_sentence(name, text, sentence, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    file = study_toml(STUDY).replace("baseline", f'imports = ["{name}"]\nbaseline')
    (tmp_path / "mine.toml").write_text(file)
    with pytest.raises(UserError) as error:
        read_study(tmp_path / "mine.toml")
    assert re.search(rf"cannot be imported( \(.*/mine\.py, line 1\))?: {re.escape(sentence)}", str(error.value))


def test_a_file_is_imported_once(tmp_path):
    """A second import could register an environment twice; the copy in a study is the same file."""
    for name in ("mine.py", "copy.py"):
        (tmp_path / name).write_text(f"import os; os.mkdir({str(tmp_path / 'once')!r})")
        import_all([str(tmp_path / name)])
    assert (tmp_path / "once").is_dir()
    (tmp_path / "mine.py").write_text(f"import os; os.rmdir({str(tmp_path / 'once')!r})")
    import_all([str(tmp_path / "mine.py")])
    assert not (tmp_path / "once").exists()


def test_two_imports_with_the_same_name_are_refused(tmp_path):
    """Their copies in the study's folder would be the same file."""
    file = study_toml(STUDY).replace("baseline", 'imports = ["a/loss.py", "b/loss.py"]\nbaseline')
    (tmp_path / "mine.toml").write_text(file)
    with pytest.raises(UserError, match=r"imports: 'loss\.py' and 'loss\.py' have the same folder name; rename"):
        read_study(tmp_path / "mine.toml")


def test_the_estimate_of_a_dry_run(tmp_path, monkeypatch):
    """One run is measured for all that take about as long; steps already trained are not counted."""
    measured = []
    monkeypatch.setattr(drive.run, "seconds_per_step", lambda config: measured.append(config.label) or 0.5)
    monkeypatch.setattr(drive, "share_cores", lambda workers: None)
    clock = itertools.count(0.0, 10.0)  # each measurement takes 10 s, as does the start of a worker
    monkeypatch.setattr(drive.time, "perf_counter", lambda: next(clock))
    study = STUDY.replace(methods=(*STUDY.methods, {"scheme": "iterated-shared", "num_bellman_iterations": 9}))
    begin(tmp_path, study.cells[0], 3)
    (study.cells[0].folder(tmp_path, 3) / "metrics.csv").write_text("step\n1000\n")
    rows, _ = drive.estimate(study, tmp_path, 2, 5)
    assert measured == ["iS-DQN K=9"]
    assert [(row.method, row.runs, row.to_do, row.seconds) for row in rows] == [
        ("TB-DQN", 2, 2, [10 + 0.5 * 3_000, 10 + 0.5 * 4_000]),
        ("iS-DQN K=9", 2, 2, [10 + 0.5 * 4_000] * 2),
    ]
    assert [row.parameters for row in rows] == [2 * (8 * 8 + 8 + 8 * 2 + 2), 8 * 8 + 8 + 10 * (8 * 2 + 2)]


@pytest.mark.parametrize(
    ("workers", "cores", "seconds"),
    [
        (1, 4, 1_500 + 3 * 2_000),
        (2, 4, 4_000),  # the first worker takes the third job, when it is done with its short one
        (8, 2, 4_000),  # eight workers have two cores
        (8, 8, 2_000),  # and there are four jobs
    ],
)
def test_the_time_of_a_dry_run_is_until_the_last_worker_ends(tmp_path, monkeypatch, workers, cores, seconds):
    monkeypatch.setattr(drive.run, "seconds_per_step", lambda config: 0.5)
    monkeypatch.setattr(drive, "share_cores", lambda workers: None)
    monkeypatch.setattr(drive, "visible_gpus", list)
    monkeypatch.setattr(drive.record, "usable_cores", lambda: list(range(cores)))
    monkeypatch.setattr(drive.time, "perf_counter", lambda: 0.0)
    study = STUDY.replace(methods=(*STUDY.methods, {"scheme": "iterated-shared", "num_bellman_iterations": 9}))
    begin(tmp_path, study.cells[0], 3)
    (study.cells[0].folder(tmp_path, 3) / "metrics.csv").write_text("step\n1000\n")
    assert drive.estimate(study, tmp_path, workers, 5)[1] == seconds


def test_a_dry_run_of_a_part_counts_nothing_of_the_whole(tmp_path, monkeypatch, capsys):
    """The part will have a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drive.run, "seconds_per_step", lambda config: 0.5)
    monkeypatch.setattr(drive, "share_cores", lambda workers: None)
    cell = find_study("training-time", "mini").cells[0]
    folder = cell.folder(Path("studies/training-time-mini"), 10)
    record.create_run(folder, cell.config.replace(seed=10))
    record.write_summary(folder, {"status": "finished", "trained_with": ["."]})
    whole, part = "17 of 18 runs to train in studies/training-time-mini:", "6 of 6 runs to train:"
    for words, left in (([], whole), (["--seeds", "10"], part)):
        assert main(["study", "training-time", "--dry-run", *words]) == 0
        assert left in capsys.readouterr().out
    begin(Path("studies/training-time-mini"), cell, 20)
    assert main(["study", "training-time", "--dry-run"]) == 1
    assert "has 1 run that this study does not ask for" in capsys.readouterr().err
