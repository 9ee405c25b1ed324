"""Faults of the system: each gets one sentence and an exit code, and the last checkpoint stays good."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from helpers import WAIT_SECONDS, assert_same, copy_unfinished, final, run_config, wait_for, write_run
from isqn import Model
from isqn.agents.dqn import DqnConfig
from isqn.cli import main
from isqn.config.toml import to_toml
from isqn.data import files
from isqn.data.dataset import Dataset
from isqn.exits import DONE, FAILED, INTERRUPTED
from isqn.report.collect import collect
from isqn.study.grid import Study
from isqn.study.grid import to_toml as study_toml
from isqn.study.jobs import remaining_jobs
from isqn.study.worker import train_job
from isqn.train import checkpoint, record, run
from isqn.types import UserError

HOST = DqnConfig(
    env_id="isqn/Chain-v0",
    loop="host",
    hidden_sizes=(8,),
    total_timesteps=600,
    epoch_steps=200,
    log_period_steps=50,
    learning_starts=20,
    buffer_size=200,
    target_update_period=30,
)
COMPILED = HOST.replace(loop="compiled", target_update_period=40)
LOOPS = pytest.mark.parametrize("config", [HOST, COMPILED], ids=["host", "compiled"])
LONG = {"total_timesteps": 10**7, "epoch_steps": 500}
PAGE = 4096


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Train both configs without a fault; tests only read these folders."""
    folders = {}
    for config in (HOST, COMPILED):
        folders[config.loop] = tmp_path_factory.mktemp("whole") / config.loop
        run.start(config.replace(record_dataset=config.loop == "host"), folders[config.loop], quiet=True)
    return folders


class SmallDisk:
    """File system of 16 MB in memory. Where mounting is not allowed, a limit on the size of files takes its place."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path, self._filler = path, path / "filler"
        command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
        self._is_mounted = not subprocess.run(command, capture_output=True).returncode
        self.reason = "No space left on device" if self._is_mounted else "File too large"

    def fill(self, free: int = 0) -> None:
        """Fill the disk, but for so many bytes."""
        if not self._is_mounted:
            return resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.RLIM_INFINITY))
        with self._filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE))
            except OSError:
                os.truncate(self._filler, self._filler.stat().st_size // PAGE * PAGE - free)

    def empty(self) -> None:
        if self._is_mounted:
            self._filler.unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    @contextmanager
    def read_only(self) -> Iterator[str]:
        """Let nothing be written; yield the reason that errors give."""
        if self._is_mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)
            try:
                yield "Read-only file system"
            finally:
                subprocess.run(["mount", "-o", "remount,rw", str(self.path)], check=True)
        else:
            folders = [self.path, *(path for path in self.path.rglob("*") if path.is_dir())]
            for folder in folders:
                folder.chmod(0o500)
            try:
                yield "Permission denied"
            finally:
                for folder in folders:
                    folder.chmod(0o700)

    def close(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)
        else:
            self.empty()


@pytest.fixture
def disk(tmp_path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "disk")
    yield small
    small.close()


def after_checkpoints(monkeypatch, number: int, then: Callable[[], None]) -> None:
    """Do something after so many checkpoints of a run."""
    write, left = checkpoint.write, iter(range(number))

    def write_and_count(folder, *rest):
        write(folder, *rest)
        if folder.parent.name == "checkpoints" and next(left, None) == number - 1:
            then()

    monkeypatch.setattr(checkpoint, "write", write_and_count)


# -- full disks


@LOOPS
@pytest.mark.parametrize("free", [0, 1, 2, 4, 8])
def test_a_run_on_a_full_disk_stops_and_resumes_to_the_same_bits(config, free, disk, whole, monkeypatch):
    """With more room it fails later: in a table, the replay buffer, the checkpoint or the summary."""
    folder = disk.path / "run"
    config = config.replace(record_dataset=config.loop == "host")
    after_checkpoints(monkeypatch, 1, lambda: disk.fill(free * PAGE))
    with pytest.raises(UserError) as refused:
        run.start(config, folder, quiet=True)
    monkeypatch.undo()
    (step, *_) = checkpoint.steps(folder)
    assert str(refused.value).startswith(f"{folder}/")
    assert f"cannot be written ({disk.reason})" in str(refused.value)
    assert f"the last checkpoint is at step {step:,}, and `isqn resume {folder}` continues there." in str(refused.value)
    with pytest.raises(UserError, match=disk.reason):
        run.resume(folder, quiet=True)
    disk.empty()
    run.resume(folder, quiet=True)
    assert_same(final(folder), final(whole[config.loop]))
    assert not [path for path in folder.rglob("*") if "writing" in path.name or "unfinished" in path.name]


def test_a_full_disk_leaves_no_run(disk, capsys):
    disk.fill()
    folder = disk.path / "run"
    assert main(["train", "dqn", "--env-id", "isqn/Chain-v0", "--run-dir", str(folder)]) == FAILED
    assert f"cannot be written ({disk.reason})" in capsys.readouterr().err
    assert record.run_state(folder) == "new"


def test_commands_that_write_say_that_the_disk_is_full(disk, whole, tmp_path, capsys):
    """The same command does its work when there is room."""
    source = whole["host"] / "dataset"
    write_run(tmp_path / "runs" / "run", run_config(), [1, 2, 3])
    for words, made in (
        (["data", "convert", str(source), "--out"], "copy/index.json"),
        (["data", "collect", str(whole["host"]), "--steps", "500", "--out"], "collected/index.json"),
        (["data", "convert", str(source), "--to", "minari", "--out"], "exported-v0/data/metadata.json"),
        (["report", str(tmp_path / "runs"), "--out"], "report/index.html"),
    ):
        out = disk.path / Path(made).parts[0]
        disk.fill()
        assert main([*words, str(out)]) == FAILED
        error = capsys.readouterr().err
        assert f"cannot be written ({disk.reason})" in error, words
        assert "--debug" not in error, words
        disk.empty()
        assert main([*words, str(out)]) == DONE, capsys.readouterr().err
        assert (disk.path / made).is_file()
        shutil.rmtree(out)
    assert Dataset.open(source)


def test_a_model_is_saved_whole_or_not_at_all(disk, tmp_path):
    model = Model("dqn", env="isqn/Chain-v0", hidden_sizes=(8,))
    model.save(disk.path / "model")
    before = {path: path.read_bytes() for path in (disk.path / "model").rglob("*") if path.is_file()}
    disk.fill()
    with pytest.raises(UserError, match=rf"cannot be written \({disk.reason}\); choose another path"):
        model.save(disk.path / "other")
    with pytest.raises(UserError, match=rf"cannot be written \({disk.reason}\); choose another path"):
        model.save(disk.path / "model")
    disk.empty()
    assert {path: path.read_bytes() for path in (disk.path / "model").rglob("*") if path.is_file()} == before
    Model.load(disk.path / "model")


STUDY = Study(
    name="tiny",
    question="Is there room?",
    baseline="TB-DQN",
    seeds=(0,),
    tasks=({"env_id": "isqn/Chain-v0"},),
    methods=({"scheme": "target-based"},),
    settings={"total_timesteps": 400, "epoch_steps": 200, "log_period_steps": 200, "hidden_sizes": [8]},
)


def test_a_study_on_a_full_disk_fails_and_goes_on_when_there_is_room(disk, tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(study_toml(STUDY))
    words = ["study", str(tmp_path / "tiny.toml"), "--out", str(disk.path / "out"), "--workers", "1", "--no-report"]
    disk.fill()
    assert main(words) == FAILED
    assert f"cannot be written ({disk.reason})" in capsys.readouterr().err
    disk.empty()
    disk.fill(6 * PAGE)  # enough for the study, and not for its run
    assert main(words) == FAILED
    error = capsys.readouterr().err
    assert "FAILED isqn-Chain-v0--TB-DQN--0" in error
    assert disk.reason in error or "bytes left" in error
    disk.empty()
    assert main(words) == DONE


# -- folders that cannot be written


def test_a_read_only_disk_can_be_read_and_not_written(disk, whole, tmp_path, capsys):
    folder = disk.path / "run"
    shutil.copytree(whole["host"], folder)
    with disk.read_only() as reason:
        assert main(["eval", str(folder), "--episodes", "1"]) == DONE
        assert main(["report", str(disk.path), "--out", str(tmp_path / "report")]) == DONE
        assert main(["probe", str(folder)]) == DONE
        capsys.readouterr()
        for words in (
            ["train", "dqn", "--env-id", "isqn/Chain-v0", "--run-dir", str(disk.path / "other")],
            ["report", str(folder), "--out", str(disk.path / "report")],
            ["data", "convert", str(folder / "dataset"), "--out", str(disk.path / "copy")],
        ):
            assert main(words) == FAILED
            assert f"cannot be written ({reason})" in capsys.readouterr().err, words


# -- processes under limits


# Let a program obey the permissions of files, even if root starts it: without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
DROP_PRIVILEGES = """
import ctypes, os, sys
for capability in (1, 2):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextmanager
def training(config: DqnConfig, folder: Path) -> Iterator[subprocess.Popen]:
    """Train in a process of its own, from the time when there is a checkpoint."""
    record.create_run(folder, config)
    words = [sys.executable, "-c", DROP_PRIVILEGES, "-m", "isqn", "resume", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: checkpoint.steps(folder), process)
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen) -> tuple[int, str]:
    error = process.communicate(timeout=WAIT_SECONDS)[1]
    return process.returncode, error.strip().splitlines()[-1]


def lower(process: subprocess.Popen, limit: int, value: int) -> None:
    resource.prlimit(process.pid, limit, (value, value))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("size", "cannot be written (File too large). The run stopped; the last checkpoint is at step "),
        ("handles", "(Too many open files). The run stopped; nothing before the last checkpoint is lost, and `isqn "),
        ("permission", "cannot be written (Permission denied). The run stopped; the last checkpoint is at step "),
        ("memory", "There is not enough memory for an update ("),
    ],
)
def test_a_limit_in_the_middle_of_a_run(fault, sentence, tmp_path):
    """The run stops with a sentence, and resumes; without memory, the compiler may also end the process."""
    folder, config = tmp_path / "run", (COMPILED if fault == "memory" else HOST).replace(**LONG)
    with training(config, folder) as process:
        if fault == "size":
            lower(process, resource.RLIMIT_FSIZE, 2_000)
        elif fault == "handles":
            lower(process, resource.RLIMIT_NOFILE, 3)
        elif fault == "memory":
            lower(process, resource.RLIMIT_AS, psutil.Process(process.pid).memory_info().vms)
        else:
            for path in (folder / "checkpoints", folder / "replay", folder):
                path.chmod(0o500)
        code, last_line = end(process)
    folder.chmod(0o700)
    for path in ("checkpoints", "replay"):
        (folder / path).chmod(0o700)
    if fault == "memory" and code != FAILED:
        assert code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL, 127)
    else:
        assert (code, sentence in last_line) == (FAILED, True), last_line
    step = checkpoint.steps(folder)[0]
    rest = record.read_config(folder).replace(total_timesteps=step + 1_000)
    files.replace_text(folder / "config.toml", to_toml(rest))
    run.resume(folder, quiet=True)
    run.start(rest, tmp_path / "whole", quiet=True)
    assert_same(final(folder), final(tmp_path / "whole"))


def test_little_address_space_is_refused_before_the_compiler_is_called(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (psutil.Process().memory_info().vms + 10**8, 0))
    folder = tmp_path / "run"
    assert main(["train", "dqn", "--env-id", "isqn/Chain-v0", "--run-dir", str(folder)]) == FAILED
    assert "MB of address space are left under the limit of this process, and compiling takes 268 MB; raise it" in (
        capsys.readouterr().err
    )
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "moment"),
    [("SIGTERM", "start"), ("SIGTERM", "lock"), ("SIGTERM", "config"), ("SIGHUP", "start"), ("SIGINT", "start")],
)
def test_a_signal_in_the_first_second(name, moment, tmp_path):
    """Whenever it comes, there is a sentence, a documented exit code, and a folder that a command can go on with."""
    folder, number = tmp_path / "run", signal.Signals[name]
    words = ["train", "dqn", "--env-id", "isqn/Chain-v0", "--loop", "host", "--total-timesteps", "10_000_000"]
    command = [sys.executable, "-m", "isqn", *words, "--run-dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    reached = {
        "start": lambda: handles(process.pid, signal.SIGTERM),  # the command answers signals from here on
        "lock": (folder / files.LOCK).exists,
        "config": (folder / "config.toml").exists,
    }
    wait_for(reached[moment], process)
    process.send_signal(number)
    code, last_line = end(process)
    assert code in (128 + number, INTERRUPTED)
    assert last_line.startswith("isqn: stopped")
    assert record.run_state(folder) == ("unfinished" if code == INTERRUPTED else "new")


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


# -- kills while a folder is made


class Killed(BaseException):
    pass


def kill_at(monkeypatch, call: int) -> None:
    """End the process, as it were, at the given change of the disk: after it, nothing changes any more."""
    calls = iter(range(call))

    def mortal(change):
        def change_or_die(*args, **kwargs):
            if next(calls, None) is None:
                raise Killed
            return change(*args, **kwargs)

        return change_or_die

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, mortal(getattr(os, name)))


def go_on(config: DqnConfig, root: Path) -> list[Path]:
    """Resume if there is a run, and begin it otherwise."""
    folders = run.run_dirs(config, root)
    begun = [folder for folder in folders if record.run_state(folder) == "unfinished"]
    if begun:
        run.resume(begun[0], quiet=True)
        return folders
    return run.start(config, root, quiet=True)


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_a_kill_in_the_first_writes_leaves_a_folder_that_commands_understand(num_seeds, tmp_path, monkeypatch):
    """It is new, and the same command begins; or it is a run, and resumes."""
    config, states = COMPILED.replace(num_seeds=num_seeds, total_timesteps=200), []
    reference = run.start(config, tmp_path / "whole", quiet=True)
    for call in range(10 * num_seeds):
        root = tmp_path / f"killed-{call}"
        kill_at(monkeypatch, call)
        with pytest.raises(Killed):
            run.start(config, root, quiet=True)
        monkeypatch.undo()
        states.append([record.run_state(folder) for folder in run.run_dirs(config, root)])
        if len(states) < 2 or states[-1] != states[-2]:  # of those that look alike, one goes on
            for folder, other in zip(go_on(config, root), reference, strict=True):
                assert_same(final(folder), final(other))
        if states[-1] == ["unfinished"] * num_seeds:
            break
    assert states[0] == ["new"] * num_seeds
    assert states[-1] == ["unfinished"] * num_seeds


def test_a_study_goes_on_after_a_kill_in_the_first_writes(tmp_path, monkeypatch):
    study = replace(STUDY, seeds=(0, 1))
    (cell,) = study.cells
    for call in range(20):
        out = tmp_path / f"killed-{call}"
        (job,) = remaining_jobs(study, out)
        kill_at(monkeypatch, call)
        with pytest.raises(Killed):
            train_job(job.config, job.method_dir)
        monkeypatch.undo()
        assert sum(job.config.num_seeds for job in remaining_jobs(study, out)) == 2
        if all(record.run_state(cell.folder(out, seed)) == "unfinished" for seed in study.seeds):
            break
    for job in remaining_jobs(study, out):
        train_job(job.config, job.method_dir)
    assert [record.run_state(cell.folder(out, seed)) for seed in study.seeds] == ["finished"] * 2


def test_a_kill_while_a_run_is_overwritten_leaves_no_mixture(whole, tmp_path, monkeypatch):
    """The folder holds the old run, maybe without its results, or the new run, or none."""
    new = COMPILED.replace(seed=5, total_timesteps=200)
    run.start(new, tmp_path / "new", quiet=True)
    seen = set()
    for call in range(40):
        folder = tmp_path / f"run-{call}"
        shutil.copytree(whole["compiled"], folder)
        kill_at(monkeypatch, call)
        with pytest.raises(Killed):
            run.start(new, folder, overwrite=True, quiet=True)
        monkeypatch.undo()
        state = record.run_state(folder)
        seed = record.read_config(folder).seed if state != "new" else None
        if (state, seed) in seen:
            continue
        seen.add((state, seed))
        assert state != "finished" or call == 0
        if seed == COMPILED.seed:
            run.resume(folder, quiet=True)
            assert_same(final(folder), final(whole["compiled"]))
        else:
            go_on(new, folder)
            assert_same(final(folder), final(tmp_path / "new"))
        if seed == new.seed:
            break
    assert seen >= {("unfinished", COMPILED.seed), ("new", None), ("unfinished", new.seed)}


def test_a_lock_lies_in_its_folder_and_leaves_nothing(tmp_path):
    folder = tmp_path / "run"
    with files.lock_folder(folder, ""):
        assert [path.name for path in tmp_path.rglob("*")] == ["run", files.LOCK]
        with pytest.raises(files.Busy, match="run is in use by another process"), files.lock_folder(folder, ""):
            pass
    assert not folder.exists()
    folder.mkdir()
    (folder / files.LOCK).touch()  # left by a kill
    with files.lock_folder(folder, ""):
        pass
    assert [*folder.iterdir()] == []


def test_two_commands_do_not_write_one_dataset(whole, tmp_path, capsys):
    words = ["data", "convert", str(whole["host"] / "dataset"), "--out", str(tmp_path / "copy")]
    with files.lock_folder(tmp_path / "copy", ""):
        assert main(words) == FAILED
    assert capsys.readouterr().err == f"isqn: {tmp_path / 'copy'} is in use by another process.\n"
    assert main(words) == DONE
    assert {path.suffix for path in (tmp_path / "copy").iterdir()} == {".json", ".safetensors"}


# -- files that are rebuilt


def test_finished_results_are_never_trained_over(tmp_path):
    """Two finished seeds of one program lose their checkpoints, and one its summary."""
    folders = run.start(COMPILED.replace(num_seeds=2, total_timesteps=200), tmp_path / "runs", quiet=True)
    for folder in folders:
        shutil.rmtree(folder / "checkpoints")
    (folders[1] / "summary.json").write_text("{")
    before = [(folder / "episodes.csv").read_bytes() for folder in folders]
    with pytest.raises(
        UserError, match=r"which has finished, and there is no checkpoint that both have; move .*seed-1"
    ):
        run.resume(folders[1], quiet=True)
    assert [(folder / "episodes.csv").read_bytes() for folder in folders] == before


def test_seeds_without_a_common_checkpoint_are_named(tmp_path):
    folders = run.start(COMPILED.replace(num_seeds=2), tmp_path / "runs", quiet=True)
    shutil.rmtree(folders[1] / "checkpoints")
    record.write_summary(folders[0], {**record.read_summary(folders[0]), "status": "running"})
    record.write_summary(folders[1], {**record.read_summary(folders[1]), "status": "running"})
    with pytest.raises(
        UserError, match=r"resumed from one checkpoint, and .*seed-1 has none; put it back, or move all"
    ):
        run.resume(folders[0], quiet=True)


def test_a_report_leaves_no_damaged_run_out(whole, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(whole["host"], tmp_path / "runs" / name)
    (tmp_path / "runs" / "b" / "config.toml").unlink()
    with pytest.raises(UserError, match=r"b/config.toml is missing; `isqn resume .*b` writes it again"):
        collect(tmp_path / "runs")


@pytest.mark.parametrize("name", ["episodes", "metrics"])
def test_a_table_that_an_editor_has_changed_is_refused(name, whole, tmp_path):
    """With other ends of lines, the length at the checkpoint is in the middle of a row."""
    folder = copy_unfinished(whole["host"], tmp_path / "run")
    path = folder / f"{name}.csv"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(
        UserError, match=rf"{name}.csv, line \d+, is damaged: a row of the checkpoint ends in the middle"
    ):
        run.resume(folder, quiet=True)


@LOOPS
def test_a_missing_config_is_restored_from_the_checkpoint(config, whole, tmp_path, capsys):
    folder = copy_unfinished(whole[config.loop], tmp_path / "run")
    path = folder / "config.toml"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert main(["resume", str(folder)]) == FAILED
    assert f"Delete it, and `isqn resume {folder}` writes it again, from the last checkpoint." in (
        capsys.readouterr().err
    )
    path.unlink()
    with pytest.warns(UserWarning, match=r"config.toml was missing and is restored from .*checkpoints/0"):
        run.resume(folder, quiet=True)
    assert path.read_text() == text
    assert_same(final(folder), final(whole[config.loop]))


def test_a_damaged_summary_is_written_again(tmp_path):
    """The seeds of one program are known from the summaries of the others."""
    folders = run.start(COMPILED.replace(num_seeds=2, total_timesteps=200), tmp_path / "runs", quiet=True)
    before = [record.read_summary(folder) for folder in folders]
    (folders[1] / "summary.json").write_bytes(b'{"status": "fini')
    assert run.resume(folders[1], quiet=True)
    assert [record.read_summary(folder)["epoch_returns"] for folder in folders] == [s["epoch_returns"] for s in before]
    assert record.read_summary(folders[1])["trained_with"] == ["../seed-0", "."]


@LOOPS
def test_a_damaged_table_is_refused_before_training(config, whole, tmp_path):
    folder = copy_unfinished(whole[config.loop], tmp_path / "run")
    path = folder / "metrics.csv"
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for damaged, reason in (
        (b"".join([*lines[:3], lines[2], *lines[3:]]), "line 4, is damaged: step is '100' after '100'."),
        (content.replace(b"\n100,", b"\n1\xff0,"), "line 3, is damaged: byte 0xff is not UTF-8."),
    ):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(UserError) as refused:
            run.resume(folder, quiet=True)
        assert str(refused.value) == (f"{path}, {reason} Put it back, or move the folder away to train it anew.")
    path.write_bytes(content)
    run.resume(folder, quiet=True)
    assert_same(final(folder), final(whole[config.loop]))
