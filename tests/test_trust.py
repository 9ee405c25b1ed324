"""Data is never code: reading a run, a model, a dataset or a report executes nothing that lies on disk."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import isqn
from isqn.cli import main
from isqn.train import checkpoint, record
from isqn.types import UserError

TRAINING = [
    *("train", "dqn", "--env-id", "isqn/Chain-v0", "--loop", "host", "--hidden-sizes", "8", "--record-dataset"),
    *("--total-timesteps", "200", "--epoch-steps", "100", "--learning-starts", "50", "--log-period-steps", "50"),
]
HOSTILE = """
import pathlib
pathlib.Path({witness!r}).write_text("code from disk was executed")
"""


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A finished run below a hostile study, beside hostile modules, in the current folder."""
    study = tmp_path / "study"
    folder = study / "runs" / "isqn-Chain-v0" / "iS-DQN-K1" / "seed-0"
    assert main([*TRAINING, "--run-dir", str(folder), "--quiet"]) == 0
    hostile = HOSTILE.format(witness=str(tmp_path / "witness"))
    for place in (study, *study.rglob("*/"), tmp_path):
        if place.is_dir():
            (place / "study.toml").write_text('imports = ["hostile.py", "hostile_module"]\n')
            for name in ("hostile.py", "hostile_module.py", "sitecustomize.py", "conftest.py"):
                (place / name).write_text(hostile)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    sys.modules.pop("hostile_module", None)


def forget_last_checkpoint(run_dir: Path) -> None:
    """Make a finished run one that stopped at the checkpoint before its last one."""
    shutil.rmtree(checkpoint.folder_of(run_dir, checkpoint.steps(run_dir)[0]))
    record.write_summary(run_dir, {"status": "running", "trained_with": ["."]})


def assert_nothing_ran(run_dir: Path) -> None:
    assert not (run_dir.parents[4] / "witness").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["resume"],
        ["eval", "--episodes", "1"],
        ["probe", "--samples", "8", "--updates", "1"],
        ["data", "inspect"],
        ["data", "collect", "--steps", "10", "-o", "collected"],
        ["train", "--run-dir", "other", "--quiet", "--config"],
    ],
    ids=lambda words: words[0],
)
def test_commands_that_read_a_run_execute_nothing_from_disk(words, run_dir, capsys):
    places = {"inspect": run_dir / "dataset", "--config": run_dir / "config.toml"}
    place = next((place for word, place in places.items() if word in words), run_dir)
    position = 2 if words[0] == "data" else len(words) if "--config" in words else 1
    steps = checkpoint.steps(run_dir)
    if words == ["resume"]:  # a finished run would not be read
        forget_last_checkpoint(run_dir)
        assert checkpoint.steps(run_dir) == steps[1:]
    assert main([*words[:position], str(place), *words[position:]]) == 0, capsys.readouterr().err
    assert record.run_state(run_dir) == "finished"
    assert checkpoint.steps(run_dir) == steps
    assert_nothing_ran(run_dir)


STUDY = """
question = "What is executed?"
baseline = "iS-DQN K=1"
seeds = [0]
imports = ["hostile.py", "hostile_module"]
settings = { loop = "host", hidden_sizes = [8], total_timesteps = 200, epoch_steps = 100 }
tasks = [{ env_id = "isqn/Chain-v0" }]
methods = [{ scheme = "iterated-shared", learning_starts = 50, log_period_steps = 50, record_dataset = true }]
"""


@pytest.mark.parametrize("text", ["", STUDY], ids=["folder", "study"])
def test_a_report_executes_nothing_from_disk(text, run_dir):
    study = run_dir.parents[3]
    if text:
        (study / "study.toml").write_text(text)
    else:
        (study / "study.toml").unlink()
    main(["report", str(study)])
    assert_nothing_ran(run_dir)


def test_loading_a_model_executes_nothing_from_disk(run_dir):
    model = isqn.Model.load(run_dir)
    model.save("saved")
    isqn.Model.load("saved")
    assert_nothing_ran(run_dir)


@pytest.mark.parametrize("command", ["eval", "resume", "probe"])
def test_a_module_that_a_config_names_is_not_imported(command, run_dir, capsys):
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace('"isqn/Chain-v0"', '"hostile_module:Chain-v0"'))
    if command == "resume":  # a checkpoint would refuse the changed env_id before the environment is made
        (run_dir / "summary.json").unlink()
        shutil.rmtree(run_dir / "checkpoints")
    assert main([command, str(run_dir)]) == 1
    registered = "The environment hostile_module:Chain-v0 is registered by the module 'hostile_module'"
    assert capsys.readouterr().err == f"isqn: {registered}; add --import hostile_module.\n"
    with pytest.raises(UserError, match="add --import hostile_module"):
        isqn.Model.load(run_dir)
    assert_nothing_ran(run_dir)


def test_code_is_executed_only_if_it_is_named(run_dir):
    """The same hostile file runs if the user asks for it: the tests above can fail."""
    assert main(["resume", str(run_dir), "--import", "hostile.py"]) == 0
    assert (run_dir.parents[4] / "witness").exists()


def test_a_missing_import_is_answered_with_its_flag(tmp_path, capsys, monkeypatch):
    loss = Path(__file__).parents[1] / "examples" / "new_loss.py"
    text = loss.read_text().replace('"expectile"', '"trusted"').replace('"Expectile"', '"Trusted"')
    (tmp_path / "trusted_loss.py").write_text(text.replace("optimism", "trusted_optimism"))
    monkeypatch.chdir(tmp_path)
    from isqn.losses import LOSSES

    monkeypatch.setattr("isqn.imports.IMPORTED", imported := [])
    monkeypatch.setattr("isqn.train.record.IMPORTED", imported)
    try:
        words = [*TRAINING, "--loss", "trusted", "--run-dir", "run", "--quiet", "--import", "trusted_loss.py"]
        assert main(words) == 0
    finally:
        LOSSES.pop("trusted", None)
    imported.clear()
    capsys.readouterr()
    assert main(["eval", "run"]) == 1
    assert capsys.readouterr().err.endswith("The run was trained with --import trusted_loss.py; add it.\n")


def test_a_summary_cannot_name_folders_elsewhere(run_dir, capsys):
    summary = run_dir / "summary.json"
    summary.write_text('{"status": "running", "trained_with": ["../../../../../elsewhere"]}')
    assert main(["resume", str(run_dir)]) == 1
    assert "trained_with is ['../../../../../elsewhere']; it must name its siblings." in capsys.readouterr().err
