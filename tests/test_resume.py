"""Resume: a run that is stopped or killed at any moment ends with the bits of an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import WAIT_SECONDS, assert_same, copy_unfinished, final, stop_after, wait_for
from isqn.agents.dqn import DqnConfig
from isqn.cli import main
from isqn.data.text import read_table
from isqn.envs.adapter import make_environment
from isqn.envs.toy import ToyEnvironment
from isqn.train import checkpoint, record, run
from isqn.train.session import Diverged
from isqn.types import Interrupted, UserError

HOST = DqnConfig(
    env_id="isqn/Chain-v0",
    loop="host",
    scheme="iterated-shared",
    num_bellman_iterations=2,
    hidden_sizes=(8,),
    total_timesteps=900,
    epoch_steps=300,
    log_period_steps=70,
    learning_starts=50,
    buffer_size=200,
    update_period=3,
    target_update_period=30,
    num_steps_return=3,
    epsilon_decay_steps=500,
)
# Rows and epochs do not coincide, so that a checkpoint must also hold the sums of an unfinished row.
COMPILED = HOST.replace(loop="compiled", log_period_steps=120, learning_starts=60)
LOOPS = pytest.mark.parametrize("config", [HOST, COMPILED], ids=["host", "compiled"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Train both configs without interruption; tests only read these folders."""
    folders = {}
    for config in (HOST, COMPILED):
        folders[config.loop] = tmp_path_factory.mktemp("whole") / config.loop
        run.start(config, folders[config.loop], quiet=True)
    return folders


@LOOPS
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(config, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    record.create_run(folder, config)
    stops = 0
    for calls in (1, 37, 2, 200, 11) if config.loop == "host" else (1, 3, 2):
        stop_after(monkeypatch, calls)
        with pytest.raises(Interrupted, match="resume with `isqn resume"):
            run.resume(folder, quiet=True)
        stops += 1
    monkeypatch.undo()
    assert run.resume(folder, quiet=True)
    assert stops >= 3
    assert_same(final(folder), final(whole[config.loop]))
    assert record.read_summary(folder)["epoch_returns"] == record.read_summary(whole[config.loop])["epoch_returns"]


@LOOPS
def test_runs_of_one_seed_are_equal_and_those_of_two_seeds_are_not(config, whole, tmp_path):
    run.start(config, tmp_path / "again", quiet=True)
    assert_same(final(tmp_path / "again"), final(whole[config.loop]))
    run.start(config.replace(seed=1, total_timesteps=300), tmp_path / "other", quiet=True)
    ours, theirs = final(whole[config.loop])["arrays"], final(tmp_path / "other")["arrays"]
    kernel = "agent.params.torso.Dense_0.kernel"
    assert (ours[kernel] != theirs[kernel]).any()


@LOOPS
def test_a_damaged_checkpoint_is_skipped_with_a_warning(config, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    record.create_run(folder, config)
    stop_after(monkeypatch, 500 if config.loop == "host" else 6)
    with pytest.raises(Interrupted):
        run.resume(folder, quiet=True)
    monkeypatch.undo()
    newest, before = checkpoint.steps(folder)
    state = checkpoint.folder_of(folder, newest) / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    with pytest.warns(UserWarning, match=r"damaged checkpoint.*state.safetensors does not match its checksum"):
        run.resume(folder, quiet=True)
    assert before < newest
    assert_same(final(folder), final(whole[config.loop]))


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_checkpoint_with_a_damaged_replay_file_is_skipped(damage, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    record.create_run(folder, HOST)
    stop_after(monkeypatch, 500)
    with pytest.raises(Interrupted):
        run.resume(folder, quiet=True)
    monkeypatch.undo()
    newest, before = (
        checkpoint.read_manifest(checkpoint.folder_of(folder, s))["replay"]["files"] for s in checkpoint.steps(folder)
    )
    only_newest = {f["name"] for f in newest} - {f["name"] for f in before}
    victim = folder / "replay" / min(only_newest)  # a full segment, which the resumed run writes again
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.unlink() if damage == "missing" else victim.write_bytes(content)
    with pytest.warns(UserWarning, match="is missing" if damage == "missing" else "its checksum differs"):
        run.resume(folder, quiet=True)
    assert_same(final(folder), final(whole["host"]))


@LOOPS
def test_only_two_checkpoints_and_one_best_are_kept(config, whole):
    folder = whole[config.loop]
    assert len(checkpoint.steps(folder)) == 2
    assert len(list(folder.glob("best-*"))) == 1
    named = set()
    for step in checkpoint.steps(folder):
        named |= {f["name"] for f in checkpoint.read_manifest(checkpoint.folder_of(folder, step))["replay"]["files"]}
    assert {p.name for p in (folder / "replay").iterdir()} == named


@LOOPS
def test_a_number_that_is_not_finite_stops_the_run_at_the_last_good_checkpoint(config, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[config.loop], folder)
    good = checkpoint.steps(folder)[0]
    hopeless = config.replace(total_timesteps=1_200, learning_rate=1e38, adam_epsilon=0.0)
    with pytest.raises(
        Diverged, match=rf"stopped being a finite number before step .*; the last good checkpoint is at step {good}"
    ):
        run.train(hopeless, [folder], quiet=True)
    assert checkpoint.steps(folder)[0] == good


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "isqn", *words]


def own_environment() -> dict[str, str]:
    """Return the variables of a process that shares no compiled programs, as when a user resumes a run."""
    return {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}


def start_process(*words: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*words), env=own_environment(), **pipes)


def test_a_folder_is_locked_while_it_is_trained_and_sigterm_saves_and_exits_with_75(tmp_path):
    folder = tmp_path / "run"
    record.create_run(folder, HOST.replace(total_timesteps=10**7, epoch_steps=10**6))
    process = start_process("resume", str(folder))
    wait_for(lambda: (folder / "metrics.csv").exists() and len(read_table(folder / "metrics.csv")) > 2, process)
    with pytest.raises(UserError, match="run is in use by another process"):
        run.resume(folder, quiet=True)
    with pytest.raises(UserError, match="is in use by another process"):
        run.start(HOST, folder, overwrite=True, quiet=True)
    assert (folder / "metrics.csv").exists(), "nothing was deleted"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 75, err
    assert "resume with `isqn resume" in err
    assert checkpoint.steps(folder)[0] > 140
    with record.lock_run([folder]):  # the process has released it
        pass


def test_a_hangup_that_is_ignored_stays_ignored():
    """`nohup isqn train ...` goes on when the terminal closes."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with run.stop_on_signals() as should_stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not should_stop()
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_a_closed_terminal_saves_and_exits_with_75(tmp_path):
    """The last message cannot be written, because the terminal is gone."""
    folder = tmp_path / "run"
    record.create_run(folder, HOST.replace(total_timesteps=10**7, epoch_steps=10**6))
    ours, theirs = os.openpty()
    process = subprocess.Popen(command("resume", str(folder)), stdout=theirs, stderr=theirs)
    wait_for(lambda: (folder / "metrics.csv").exists(), process)
    os.close(theirs)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=WAIT_SECONDS) == 75
    assert checkpoint.steps(folder)


@LOOPS
@pytest.mark.parametrize("name", ["episodes", "metrics"])
def test_a_table_that_was_cut_or_deleted_is_refused_before_training(config, name, whole, tmp_path):
    folder = copy_unfinished(whole[config.loop], tmp_path / "run")
    table = folder / f"{name}.csv"
    content = table.read_bytes()
    table.write_bytes(content[:30])
    with pytest.raises(UserError, match=rf"{name}.csv is shorter than at the checkpoint. Put it back"):
        run.resume(folder, quiet=True)
    assert table.read_bytes() == content[:30]
    table.unlink()
    with pytest.raises(UserError, match=rf"{name}.csv is missing. Put it back"):
        run.resume(folder, quiet=True)
    table.write_bytes(content)
    run.resume(folder, quiet=True)
    assert_same(final(folder), final(whole[config.loop]))


@LOOPS
def test_resume_names_the_settings_that_were_changed(config, whole, tmp_path):
    folder = copy_unfinished(whole[config.loop], tmp_path / "run")
    text = (folder / "config.toml").read_text()
    for changed, message in (
        (text.replace("learning_rate = 0.001", "learning_rate = 0.5"), "learning_rate is 0.5, and was 0.001"),
        (text.replace("\nseed = 0", "\nseed = 1"), "seed is 1, and was 0"),
        ("seed = 0\n", ""),
        ("", None),
    ):
        assert changed != text
        (folder / "config.toml").write_text(changed)
        with pytest.raises(UserError, match="config.toml is empty" if message is None else f"was changed: .*{message}"):
            run.resume(folder, quiet=True)
    (folder / "config.toml").write_text(text.replace('track = "none"', 'track = "tensorboard"'))
    run.resume(folder, quiet=True)
    assert_same(final(folder), final(whole[config.loop]))


def test_resume_refuses_other_rules_of_play(whole, tmp_path):
    """`auto` may mean another protocol in another version."""
    folder = copy_unfinished(whole["host"], tmp_path / "run")
    record.write_summary(folder, {**record.read_summary(folder), "protocol": "older-rules"})
    sentence = "was played by the protocol older-rules; here it would be gymnasium"
    with pytest.raises(UserError, match=sentence):
        run.resume(folder, quiet=True)


def test_a_run_without_checkpoints_starts_again_with_a_remark(whole, tmp_path, capsys):
    folder = copy_unfinished(whole["host"], tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    run.resume(folder)
    assert f"there is no checkpoint in {folder}: the run begins again at step 0" in capsys.readouterr().err
    assert_same(final(folder), final(whole["host"]))


def test_a_failing_environment_leaves_a_checkpoint_of_the_step_before(tmp_path):
    class Fails(ToyEnvironment):
        steps = 0

        def step(self, action):
            self.steps += 1
            if self.steps == 131:
                raise RuntimeError("motor on fire")
            return super().step(action)

    config = HOST.replace(env_id="Fails")
    record.create_run(tmp_path / "run", config)
    with pytest.raises(UserError, match=r"failed in step\(\) \(.*\): RuntimeError: motor on fire"):
        run.train(config, [tmp_path / "run"], quiet=True, env=make_environment(Fails("isqn/Chain-v0")))
    assert checkpoint.steps(tmp_path / "run") == [130]


# Resume a run, and kill -9 the process at any moment after the given number of checkpoints.
RESUME_AND_DIE = """
import os, signal, sys, threading
from pathlib import Path
from isqn.train import checkpoint, run

written, left, write = threading.Event(), int(sys.argv[2]), checkpoint.write

def write_and_count(folder, *rest):
    global left
    write(folder, *rest)
    left -= folder.parent.name == "checkpoints"  # the others are the best agents
    if left == 0:
        written.set()

def die():
    written.wait()
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint.write = write_and_count
threading.Thread(target=die, daemon=True).start()
run.resume(Path(sys.argv[1]), quiet=True)
"""


def resume_and_kill(folder: Path, checkpoints: int) -> None:
    """Resume a run in a process of its own, which is killed after it has written so many checkpoints."""
    words = [sys.executable, "-c", RESUME_AND_DIE, str(folder), str(checkpoints)]
    done = subprocess.run(words, env=own_environment(), capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert record.run_state(folder) == "unfinished"
    assert checkpoint.steps(folder)


@LOOPS
def test_a_killed_and_resumed_run_ends_with_the_same_bits(config, whole, tmp_path):
    folder = tmp_path / "run"
    record.create_run(folder, config)
    resume_and_kill(folder, 1)
    run.resume(folder, quiet=True)
    assert_same(final(folder), final(whole[config.loop]))


@pytest.mark.slow
@LOOPS
def test_kill_at_random_moments(config, tmp_path):
    """The run saves after every step (host) or stretch (compiled), so that kills hit both learning and saving."""
    folder, reference = tmp_path / "run", tmp_path / "reference"
    most, steps = (100, 1800) if config.loop == "host" else (4, 5400)  # far more checkpoints than six kills need
    busy = config.replace(checkpoint_minutes=0.0, total_timesteps=steps)
    run.start(busy, reference, quiet=True)
    record.create_run(folder, busy)
    rng = np.random.default_rng(0)
    for _ in range(6):
        before = max(checkpoint.steps(folder), default=0)
        resume_and_kill(folder, int(rng.integers(1, most)))
        assert max(checkpoint.steps(folder)) > before
    run.resume(folder, quiet=True)
    assert_same(final(folder), final(reference))


def test_a_run_that_is_killed_while_it_writes_a_checkpoint_resumes_to_the_same_bits(whole, tmp_path, monkeypatch):
    """It is killed at each point between the first byte and the rename."""
    folder = tmp_path / "run"
    record.create_run(folder, HOST)

    class Killed(BaseException):
        pass

    real = {"rename": os.rename, "save_file": checkpoint.save_file, "sync": checkpoint.sync}

    def dying(name):
        def die(*args, **kwargs):
            if name == "sync":
                real["sync"](*args, **kwargs)
            elif name == "save_file":
                Path(args[1]).write_bytes(b"half a file")
            raise Killed

        return die

    for place in ("save_file", "sync", "rename"):
        target = os if place == "rename" else checkpoint
        monkeypatch.setattr(target, place, dying(place))
        stop_after(monkeypatch, 150)
        with pytest.raises(Killed):
            run.resume(folder, quiet=True)
        monkeypatch.undo()
        stop_after(monkeypatch, 100)
        with pytest.raises(Interrupted):
            run.resume(folder, quiet=True)
        monkeypatch.undo()
    run.resume(folder, quiet=True)
    assert_same(final(folder), final(whole["host"]))


def test_a_finished_seed_keeps_its_results_when_another_seed_of_its_run_is_damaged(tmp_path):
    folders = run.start(COMPILED.replace(num_seeds=2, total_timesteps=300), tmp_path / "runs", quiet=True)
    whole = [record.read_summary(folder) for folder in folders]
    record.write_summary(folders[0], whole[0] | {"status": "running"})
    for state in folders[0].glob("checkpoints/*/state.safetensors"):
        state.write_bytes(b"damaged")
    unread = pytest.raises(UserError, match="they have none in common that can be read")
    with pytest.warns(UserWarning, match="damaged checkpoint"), unread:
        run.resume(folders[0], quiet=True)
    assert record.read_summary(folders[1]) == whole[1]


def test_train_refuses_a_folder_that_holds_a_run(whole, capsys):
    folder = str(whole["host"])
    assert main(["train", "dqn", "--run-dir", folder]) == 1
    assert f"{folder} holds a finished run; choose another --run-dir" in capsys.readouterr().err
    assert main(["resume", folder]) == 0
    assert "had finished; nothing to do" in capsys.readouterr().err


def test_an_environment_that_is_not_reproducible_is_refused_on_resume(tmp_path, monkeypatch):
    import gymnasium as gym

    class Unseeded(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)
        drawn = np.random.default_rng()

        def reset(self, *, seed=None, options=None):
            return self.drawn.uniform(-1, 1, 2).astype(np.float32), {}

        def step(self, action):
            return self.drawn.uniform(-1, 1, 2).astype(np.float32), 0.0, False, False, {}

    folder, env = tmp_path / "run", make_environment(Unseeded())
    config = HOST.replace(env_id=env.spec.id)
    record.create_run(folder, config)
    stop_after(monkeypatch, 20)
    with pytest.raises(Interrupted):
        run.train(config, [folder], quiet=True, env=env)
    monkeypatch.undo()
    with pytest.raises(UserError, match="under the same seed and actions it shows another observation"):
        run.train(config, [folder], quiet=True, env=make_environment(Unseeded()))


def test_the_tables_have_the_documented_columns(whole):
    for folder in whole.values():
        assert (folder / "episodes.csv").read_text().split("\n")[0] == "epoch,episode,step,frame,return,length,seconds"
        assert (folder / "metrics.csv").read_text().split("\n")[0] == (
            "step,frame,updates,epsilon,loss,q_value,steps_per_second,memory_mb,seconds"
        )


def test_an_incomplete_last_line_of_a_table_is_ignored(tmp_path):
    path = tmp_path / "episodes.csv"
    path.write_text("step,return\n1,2\n3,4")
    assert read_table(path) == [{"step": "1", "return": "2"}]


def test_the_summary_of_a_run(whole):
    summary = json.loads((whole["host"] / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["label"] == "iS-DQN K=2"
    assert summary["seed"] == 0
    assert len(summary["epoch_returns"]) == 3
    assert summary["versions"]["jax"]
