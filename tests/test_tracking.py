"""Trackers get the metrics of the tables under the names of CleanRL, and never stop a run."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from isqn.agents.dqn import DqnConfig
from isqn.data.text import read_table
from isqn.train import checkpoint, record, run

HOST = DqnConfig(
    env_id="isqn/Chain-v0",
    loop="host",
    hidden_sizes=(8,),
    total_timesteps=200,
    epoch_steps=100,
    log_period_steps=50,
    learning_starts=60,
    buffer_size=300,
    target_update_period=20,
    experiment="tracked",
    seed=3,
)
COMPILED = HOST.replace(loop="compiled", learning_starts=100)
LOOPS = pytest.mark.parametrize("config", [HOST, COMPILED], ids=["host", "compiled"])
SWITCHED_OFF = "failed and is switched off; the run continues and still writes its own files"


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return name -> step -> value from the event files of TensorBoard."""
    found: dict[str, dict[int, float]] = {}
    for event in events(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def events(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])  # length, checksum, record, checksum
            yield event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def starts_of_sessions(folder: Path) -> list[int]:
    """Return the steps from which TensorBoard hides what earlier event files say."""
    return [event.step for event in events(folder) if event.session_log.status == event_pb2.SessionLog.START]


@LOOPS
def test_tensorboard_hides_what_a_killed_run_wrote_after_its_checkpoint(config, tmp_path, monkeypatch):
    """TensorBoard drops events from the step of a session's start on, if they were written before it."""

    @contextmanager
    def killed():
        calls = iter(range(180 if config.loop == "host" else 3))

        def kill():
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return False

        yield kill

    folder = tmp_path / "run"
    monkeypatch.setattr(run, "stop_on_signals", killed)
    with pytest.raises(KeyboardInterrupt):
        run.start(config.replace(track="tensorboard"), folder, quiet=True)
    monkeypatch.undo()
    (saved, *_) = checkpoint.steps(folder)
    assert max(scalars(folder / "tensorboard")["charts/epsilon"]) > saved
    run.resume(folder, quiet=True)
    assert starts_of_sessions(folder / "tensorboard") == [1, saved + 1]


@LOOPS
def test_tensorboard_gets_the_rows_of_the_tables_under_the_names_of_cleanrl(config, tmp_path):
    run.start(config.replace(track="tensorboard"), tmp_path / "run", quiet=True)
    found = scalars(tmp_path / "run" / "tensorboard")
    assert found.keys() == {
        *("charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/epsilon"),
        *("losses/td_loss", "losses/q_values", "analysis/updates", "analysis/memory_mb"),
    }
    episodes = read_table(tmp_path / "run" / "episodes.csv")
    metrics = read_table(tmp_path / "run" / "metrics.csv")
    tables = [
        ("charts/episodic_return", episodes, "return"),
        ("charts/episodic_length", episodes, "length"),
        ("charts/epsilon", metrics, "epsilon"),
        ("charts/SPS", metrics, "steps_per_second"),
        ("losses/td_loss", metrics, "loss"),
        ("losses/q_values", metrics, "q_value"),
    ]
    for name, rows, column in tables:
        expected = {int(row["step"]): float(row[column]) for row in rows if row[column]}
        assert expected, column
        assert found[name] == pytest.approx(expected, rel=1e-5), name


def test_runs_are_not_tracked_by_default(tmp_path):
    run.start(HOST, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert DqnConfig().track == "none"


class Fake(types.ModuleType):
    """Fake tracking library, which fails in the function `fails` and records all calls."""

    def __init__(self, name: str, fails: str):
        super().__init__(name)
        self.fails, self.calls, self.logged = fails, [], []

    def _at(self, place: str) -> None:
        self.calls.append(place)
        if place == self.fails:
            raise RuntimeError(f"no network at {place}")

    def init(self, **about):
        self._at("init")
        self.about = about
        return self

    def log(self, values, step):
        self._at("log")
        self.logged.append((step, values))

    def finish(self):
        self._at("finish")


@pytest.mark.parametrize(
    ("config", "place"),
    [(HOST, "init"), (HOST, "log"), (HOST, "finish"), (COMPILED, "log")],
    ids=["init", "log", "finish", "log-compiled"],
)
def test_a_tracker_that_fails_is_switched_off_with_one_warning(config, place, tmp_path, monkeypatch):
    fake = Fake("wandb", fails=place)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.start(config.replace(track="wandb"), tmp_path / "run", quiet=True)
    ours = [str(warning.message) for warning in caught if SWITCHED_OFF in str(warning.message)]
    assert ours == [f"{'wandb' if place == 'init' else 'tracker'} {SWITCHED_OFF}: no network at {place}"]
    assert record.read_summary(tmp_path / "run")["status"] == "finished"
    assert len(read_table(tmp_path / "run" / "metrics.csv")) == 4
    assert fake.calls.count(place) == 1, "it was asked again after it had failed"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_config_and_every_row(name, tmp_path, monkeypatch):
    fake = Fake(name, fails="never")
    monkeypatch.setitem(sys.modules, name, fake)
    run.start(HOST.replace(track=name), tmp_path / "run", quiet=True)
    assert fake.about["project"] == "tracked"
    assert fake.about["name"] == "isqn/Chain-v0 iS-DQN K=1 seed 3"
    assert fake.about["config"]["hidden_sizes"] == (8,)
    episodes = read_table(tmp_path / "run" / "episodes.csv")
    returns = [(s, v["charts/episodic_return"]) for s, v in fake.logged if "charts/episodic_return" in v]
    assert returns == [(int(row["step"]), float(row["return"])) for row in episodes]
    assert [s for s, v in fake.logged if "charts/epsilon" in v] == [50, 100, 150, 200]
    assert fake.calls[-1] == "finish"


def test_each_seed_is_a_run_of_its_own(tmp_path, monkeypatch):
    """Trackers must be told to start a run per seed: wandb returns the first one, trackio ends its current one."""
    current = ContextVar("current", default=None)

    class Library(Fake):
        def init(self, **about):
            assert current.get() is None, "the run of the seed before would end here"
            current.set(self)
            begun.append((about["name"], about["dir"], about["reinit"]))
            return self

    begun = []
    monkeypatch.setitem(sys.modules, "wandb", Library("wandb", fails="never"))
    run.start(COMPILED.replace(track="wandb", num_seeds=2), tmp_path / "run", quiet=True)
    assert begun == [
        (f"isqn/Chain-v0 iS-DQN K=1 seed {seed}", tmp_path / "run" / f"seed-{seed}", "create_new") for seed in (3, 4)
    ]


def test_tracking_does_not_change_what_is_learned(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Fake("wandb", fails="never"))
    run.start(HOST, tmp_path / "without", quiet=True)
    run.start(HOST.replace(track="wandb"), tmp_path / "with", quiet=True)
    assert (tmp_path / "with" / "summary.json").exists()
    for name, column in (("episodes", "return"), ("metrics", "loss")):
        columns = [[row[column] for row in read_table(tmp_path / d / f"{name}.csv")] for d in ("with", "without")]
        assert columns[0] == columns[1]


@pytest.mark.parametrize(("track", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_library_is_a_warning_with_the_install_line(track, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    install = re.escape(f'--track {track} needs `pip install "isqn[track]"`.')
    with pytest.warns(UserWarning, match=f"{track} {SWITCHED_OFF}: {install}"):
        run.start(HOST.replace(track=track), tmp_path / "run", quiet=True)
    assert record.read_summary(tmp_path / "run")["status"] == "finished"


def test_a_warning_of_the_command_is_one_line(tmp_path):
    (tmp_path / "config.toml").write_text(record.to_toml(HOST))
    code = "import sys; sys.modules['wandb'] = None; from isqn.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["train", "--config", str(tmp_path / "config.toml"), "--track", "wandb", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", code, *words, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == f'isqn: warning: wandb {SWITCHED_OFF}: --track wandb needs `pip install "isqn[track]"`.\n'
    assert record.read_summary(tmp_path / "run")["status"] == "finished"
