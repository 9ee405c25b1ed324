"""Command lines: each works, or is answered with one sentence that says what to type instead."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import jax
import numpy as np
import psutil
import pytest

import isqn
from helpers import assert_same, final
from isqn.agents.dqn import DqnConfig
from isqn.agents.registry import agent_names, read_config_file
from isqn.cli import COMMANDS, main
from isqn.cli.probe import MEANINGS
from isqn.config.fields import flag
from isqn.data.text import read_table
from isqn.losses import LOSSES
from isqn.presets import all_presets
from isqn.schemes import SCHEMES
from isqn.train import checkpoint, online, progress, record, run
from isqn.train.signals import stop_on_signals
from isqn.types import UserError

SHORT = [
    *("--env-id", "isqn/Chain-v0", "--loop", "host", "--hidden-sizes", "8", "--k", "2", "--buffer-size", "1_000"),
    *("--total-timesteps", "300", "--epoch-steps", "150", "--learning-starts", "50", "--log-period-steps", "50"),
    *("--num-steps-return", "3"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run that the command trained, with its output."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        assert main(["train", "dqn", *SHORT, "--run-dir", str(folder)]) == 0
    return SimpleNamespace(folder=folder, out=out.getvalue(), err=err.getvalue())


@pytest.fixture
def refused(capsys):
    """Return a function that runs a command which must fail, and returns its error message."""

    def call(*words: str, code: int = 1) -> str:
        capsys.readouterr()
        assert main([*words]) == code
        out, err = capsys.readouterr()
        assert out == ""
        *before, sentence = err.splitlines()
        assert all(line.startswith("settings: ") for line in before), err
        assert sentence.startswith("isqn: ")
        return sentence.removeprefix("isqn: ")

    return call


@pytest.fixture
def answer(capsys):
    """Return a function that runs a command with --json, and returns its output as an object."""

    def call(*words: str):
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def process(*words: str, **streams) -> subprocess.CompletedProcess:
    """Run the command in a process of its own."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run([sys.executable, "-m", "isqn", *words], **streams, text=True, check=False)


# -- first steps -----------------------------------------------------------------------------------------------


def test_isqn_without_a_command_prints_a_welcome_of_five_lines(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0] == f"isqn {isqn.__version__}: deep Q-learning without a target network."
    assert "isqn train dqn --env-id isqn/Chain-v0" in lines[1]
    assert all(command in lines[3] for command in COMMANDS)


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_the_help_of_isqn_describes_every_command(word, capsys):
    assert main([word]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: isqn COMMAND [flags]\n")
    assert re.findall(r"^  (\w+)(?: AGENT)? +[A-Z]", out, re.MULTILINE) == list(COMMANDS)
    assert all(name in out for name in (*agent_names(), "--debug", "--import", "--version"))


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{isqn.__version__}\n"


HELP = {
    "train dqn": [
        *(flag(field.name) for field in fields(DqnConfig)),
        *("--k", "--gamma", "--tau", "--train-frequency", "--target-network-frequency", "--update-horizon"),
        *("--min-replay-history", "--preset", "--config", "--run-dir", "--overwrite", "--quiet", "--show-diff"),
    ],
    "resume": ["--quiet"],
    "study": [
        *("--scale", "--out", "--tasks", "--seeds", "--engine", "--workers", "--seeds-per-job", "--address", "--gpus"),
        *("--cluster", "--slurm", "--dry-run", "--show", "--no-report", "--quiet"),
    ],
    "report": ["--out", "--baseline", "--missing", "--pool-protocols", "--figure", "--watch", "--json"],
    "eval": ["--episodes", "--seed", "--epsilon", "--acting-rule", "--which", "--capture-video", "--json"],
    "probe": ["--metric", "--which", "--samples", "--updates", "--seed", "--json"],
    "cost": ["--game", "--task", "--json"],
    "list": ["--json"],
    "doctor": ["--preset", "--json"],
}


@pytest.mark.parametrize("command", HELP)
def test_help_lists_every_flag(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*command.split(), "--help"])
    assert exit_.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    missing = [name for name in (*HELP[command], "--debug") if name not in out]
    assert missing == []
    assert "{None" not in out


def test_the_first_run_learns_the_known_values(tmp_path, monkeypatch, capsys):
    """`isqn train dqn --env-id isqn/Chain-v0` uses the preset's settings and the default folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "dqn", "--env-id", "isqn/Chain-v0"]) == 0
    out, err = capsys.readouterr()
    assert out == "runs/default/isqn-Chain-v0/iS-DQN-K1/seed-0\n"
    lines = err.splitlines()
    assert lines[0] == "settings: preset toy, which fits isqn/Chain-v0"
    start = lines.index("learned and true values:")
    header, *rows, last, finished = lines[start + 1 :]
    folder = "runs/default/isqn-Chain-v0/iS-DQN-K1/seed-0"
    assert re.fullmatch(rf"finished in .* s; `isqn eval {folder}` plays with the agent", finished)
    assert header.split() == ["state", "Q(s,0)", "Q*(s,0)", "Q(s,1)", "Q*(s,1)"]
    table = np.array([[float(cell) for cell in row.split()] for row in rows])
    assert table[:, 0].tolist() == list(range(7))
    right = 0.9 ** np.arange(6, -1, -1)
    np.testing.assert_allclose(table[:, 4], right, atol=6e-4)
    np.testing.assert_allclose(table[:, 2], 0.9 * np.array([right[0], *right[:-1]]), atol=6e-4)
    worst = max(abs(table[:, 1] - table[:, 2]).max(), abs(table[:, 3] - table[:, 4]).max())
    assert worst < 0.05
    assert last.startswith("the largest difference is ")
    assert float(last.split()[-1]) == pytest.approx(worst, abs=2e-3)


# -- typos -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["trian"], 2, "`isqn trian` is not known; did you mean train?"),
        (
            ["??"],
            2,
            "`isqn ??` is not known; choose one of train, resume, study, report, eval, play, data, probe, cost, list, "
            "doctor.",
        ),
        (
            ["train", "mellowmax"],
            2,
            "`isqn train mellowmax` is not known; that loss is trained by `isqn train dqn --loss mellowmax`.",
        ),
        (["train", "--envid", "x"], 2, "`isqn train dqn` has no flag --envid; did you mean --env-id?"),
        (["train", "dqn", "--gama=0.9"], 2, "`isqn train dqn` has no flag --gama; did you mean --gamma?"),
        (["train", "--no_layer_nrm"], 2, "`isqn train dqn` has no flag --no-layer-nrm; did you mean --no-layer-norm?"),
        (["eval", "x", "--xyz"], 2, "`isqn eval` has no flag --xyz; `isqn eval --help` lists them."),
        (
            ["train", "dqn", "--dataset", "x"],
            2,
            "`isqn train dqn` has no flag --dataset; it is for `isqn train cql`, not for dqn.",
        ),
        (["train", "--scheme", "iterated-shard"], 2, "--scheme is 'iterated-shard'; did you mean iterated-shared?"),
        (["train", "--loss=dqm"], 2, "--loss is 'dqm'; did you mean dqn?"),
        (["train", "--loop", "?"], 2, "--loop is '?'; choose one of auto, host, compiled."),
        (["eval", "x", "--which", "bst"], 2, "--which is 'bst'; did you mean best?"),
        (["probe", "x", "--metric", "dormant", "dorment"], 2, "--metric is 'dorment'; did you mean dormant?"),
        (["list", "env"], 2, "`isqn list env` is not known; did you mean envs?"),
        (
            ["study", "meta", "--seeds", "1", "2", "--seeds=3"],
            2,
            "--seeds is given twice; give all its values after one --seeds.",
        ),
        (["study", "meta", "--out", ""], 2, "--out is empty; give it a value, or leave it out."),
        (["report", "runs", "-o", ""], 2, "-o is empty; give it a value, or leave it out."),
        (["list", "envs", "--import", ""], 2, "--import is empty; give it a value, or leave it out."),
        (["train", "--experiment="], 2, "--experiment is empty; give it a value, or leave it out."),
        (["train", "--preset", "atari-cn"], 1, "The preset 'atari-cn' is not known; did you mean atari-cnn?"),
        (["cost", "clasic"], 1, "The preset 'clasic' is not known; did you mean classic?"),
        (["doctor", "--preset", "toi"], 1, "The preset 'toi' is not known; did you mean toy?"),
        (
            ["train", "--env-id", "isqn/Chian-v0"],
            1,
            "--env-id 'isqn/Chian-v0' is not a known environment; did you mean isqn/Chain-v0?",
        ),
        (
            ["train", "--preset", "toy", "--config", "x.toml"],
            2,
            "--config and --preset both say where to start from; give one of them.",
        ),
        (["train", "--batch-size", "0"], 1, "--batch-size is 0; it must be at least 1."),
        (
            [""],
            2,
            "The command is empty; choose one of train, resume, study, report, eval, play, data, probe, cost, list, "
            "doctor.",
        ),
        (["train", "--k", "0"], 1, "--k is 0; it must be between 1 and 1000."),
        (["train", "--gamma=2"], 1, "--gamma is 2.0; it must be between 0 and 1."),
        (["train", "stream-q", "--lambda", "2"], 1, "--lambda is 2.0; it must be between 0 and 1."),
        (
            ["train", "--scheme", "target-free", "--tau", "0.5"],
            1,
            "--tau has no effect in this run: it needs another --scheme than target-free.",
        ),
        (["train", "--config", "nope.toml"], 1, "nope.toml does not exist; give the config.toml of a run."),
        (["train", "--seed", "-1"], 1, "--seed is -1; it must be at least 0."),
        (
            ["train", "--env-id", "Catch-v0"],
            1,
            "--env-id 'Catch-v0' is not a known environment; `isqn list envs` shows those of the package, and --import "
            "FILE adds your own.",
        ),
        (
            ["train", "dqn", "--torso", "foo"],
            1,
            "--torso 'foo' is not known; choose one of auto, mlp, minatar, nature, impala, stream.",
        ),
        (
            ["cost", "atari-cnn-ln", "--game", "Ponk"],
            1,
            "--game 'ALE/Ponk-v5' is not a known environment; did you mean ALE/Pong-v5 or ALE/Pooyan-v5 or "
            "ALE/Phoenix-v5?",
        ),
        (["eval", "x", "--episodes", "0"], 1, "--episodes is 0; it must be at least 1."),
        (["eval", "x", "--epsilon", "2"], 1, "--epsilon is 2.0; it must be between 0 and 1."),
        (["eval", "x", "--seed", "-1"], 1, "--seed is -1; it must be between 0 and 2147483647."),
        (["probe", "x", "--updates", "0"], 1, "--updates is 0; it must be at least 1."),
        (
            ["train", "--torso", "nature"],
            1,
            "--torso nature needs images, but isqn/Chain-v0 observes vectors of shape (8,); use --torso mlp.",
        ),
        (
            ["train", "--update-period", "3", "--target-update-period", "30", "--loop", "compiled"],
            1,
            "--log-period-steps is 500; in the compiled loop it must be a multiple of --update-period (3).",
        ),
        (
            ["train", "--env-id", "ALE/Pong-v5", "--num-seeds", "2"],
            1,
            "--num-seeds 2 needs the compiled loop, for environments written in JAX; "
            "train the seeds of ALE/Pong-v5 one by one with --seed.",
        ),
        (
            ["train", "--env-id", "ALE/Pong-v5", "--loop", "compiled"],
            1,
            "--loop compiled needs an environment written in JAX, and ALE/Pong-v5 is not; "
            "`isqn list envs` shows which are, or leave --loop at auto.",
        ),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(words, code, sentence, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(*words, code=code) == sentence
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def test_an_unknown_path_is_answered_with_the_nearest(trained, refused):
    folder = trained.folder
    near = folder.with_name("rum")
    for command in ("eval", "resume", "probe"):
        assert refused(command, str(near)) == f"{near} does not exist; did you mean {folder}?"
    file = folder / "confg.toml"
    assert refused("train", "--config", str(file)) == f"{file} does not exist; did you mean {folder}/config.toml?"


def test_an_unknown_setting_in_a_file_is_answered_with_the_nearest(trained, refused, tmp_path):
    text = (trained.folder / "config.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("batch_size =", "batch_sise ="))
    expected = f"{path} sets 'batch_sise', which is not a field of a run; did you mean batch_size?"
    assert refused("train", "--config", str(path)) == expected
    path.write_text(text.replace("hidden_sizes = [8]", "hidden_sizes = 8"))
    expected = f"{path}: hidden_sizes is 8; it must be a list of whole numbers."
    assert refused("train", "--config", str(path)) == expected


def test_debug_gives_the_traceback(trained):
    with pytest.raises(UserError, match="not known; did you mean train"):
        main(["trian", "--debug"])
    done = process("trian", "--debug")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    done = process("trian")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "isqn: `isqn trian` is not known; did you mean train?\n"


def test_a_value_that_cannot_be_read_is_a_usage_error(capsys):
    for words, said in (
        ("train --seed abc", "--seed is 'abc'; it must be a whole number."),
        ("train --seed=1e+6", "--seed is '1e+6'; it must be a whole number, written as 1_000_000."),
        ("train --gamma abc", "--gamma is 'abc'; it must be a number."),
        ("train --env-id", "--env-id needs a value."),
        ("study online-ln --workers two", "--workers is 'two'; it must be a whole number."),
        ("study online-ln --scale big", "--scale is 'big'; choose one of mini, paper."),
        ("study online-ln --seeds 1 x --quiet", "--seeds is 'x'; it must be a whole number."),
        ("study online-ln --seeds --dry-run", "--seeds needs a value."),
        ("resume", "`isqn resume` needs an argument: RUN-DIR (run folder)."),
        ("train --config --quiet", "--config needs a value."),
        ("list", "`isqn list` needs an argument: WHAT (one of envs, presets, studies, schemes, losses or agents)."),
        ("train", "`isqn train` needs an agent: dqn, stream-q, sac, cql, ilql; `isqn train --help` describes them."),
        ("train dqn Cart-v1", "`isqn train dqn` has no place for 'Cart-v1'; did you mean --env-id Cart-v1?"),
        ("train dqn --lr 0.1", "`isqn train dqn` has no flag --lr; did you mean --learning-rate?"),
        ("train dqn --reward-clip none", "--reward-clip is 'none'; it must be a number or None."),
        ("list envs presets", "`isqn list` has no place for 'presets'; `isqn list --help` explains it."),
        ("probe run --metric", "--metric needs a value."),
    ):
        assert main(words.split()) == 2
        assert capsys.readouterr().err == f"isqn: {said}\n"


def test_unusual_but_valid_command_lines_are_accepted(tmp_path, monkeypatch, capsys):
    """Flags may come before the argument, a folder may begin with an underscore, and a choice may be None."""
    monkeypatch.chdir(tmp_path)
    assert main(["study", "--show", "--seeds", "7", "8", "online-plain"]) == 0
    assert "seeds = [7, 8]" in capsys.readouterr().out
    assert main(["study", "online-plain", "--show", "--scale", "None"]) == 0
    (tmp_path / "_o").mkdir()
    assert main(["report", "_o"]) == 1
    assert "_o" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["study", "online-plain", "--seeds", "1", "-h"])
    assert exit_.value.code == 0


def test_an_empty_argument_is_refused(capsys):
    for words, what in (
        (["report", ""], "An argument of `isqn report`"),
        (["report", "--watch", ""], "An argument of `isqn report`"),
        (["study", "x", "--tasks", ""], "--tasks"),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err == f"isqn: {what} is empty; give it a value, or leave it out.\n"


# -- train -------------------------------------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch):
    """Return a function that parses a command line into a config, without training."""

    def call(*words: str) -> DqnConfig:
        configs = []
        monkeypatch.setattr(run, "start", lambda config, *rest, **more: configs.append(config) or [])
        assert main(["train", "dqn", *words, "--quiet"]) == 0
        return configs[0]

    return call


def test_flags_have_the_names_of_other_packages_as_aliases(parsed):
    ours = parsed(
        *("--num-bellman-iterations", "7", "--discount", "0.5", "--target-step-size", "0.1", "--update-period", "4"),
        *("--target-update-period", "8", "--num-steps-return", "3", "--learning-starts", "9"),
    )
    theirs = parsed(
        *("--k", "7", "--gamma", "0.5", "--tau", "0.1", "--train-frequency", "4"),
        *("--target-network-frequency", "8", "--update-horizon", "3", "--min-replay-history", "9"),
    )
    assert ours == theirs
    assert (ours.num_bellman_iterations, ours.discount, ours.target_step_size, ours.update_period) == (7, 0.5, 0.1, 4)
    assert (ours.target_update_period, ours.num_steps_return, ours.learning_starts) == (8, 3, 9)


def test_numbers_may_have_underscores_and_flags_too(parsed):
    assert parsed("--total-timesteps", "1_000").total_timesteps == 1_000
    assert parsed("--total_timesteps=25_000_000").total_timesteps == 25_000_000


def test_flags_change_the_preset_or_the_config_file(parsed, trained):
    assert parsed("--preset", "minatar") == all_presets()["minatar"].config
    assert parsed("--preset", "minatar", "--seed", "3") == all_presets()["minatar"].config.replace(seed=3)
    assert parsed("--env-id", "CartPole-v1") == all_presets()["classic"].config.replace(env_id="CartPole-v1")
    assert parsed("--env-id=MinAtar/Freeway").buffer_size == all_presets()["minatar"].config.buffer_size
    file = trained.folder / "config.toml"
    assert parsed("--config", str(file), "--seed", "4") == read_config_file(file).replace(seed=4)
    assert parsed("--hidden-sizes", "3", "4", "--layer-norm").hidden_sizes == (3, 4)
    assert parsed("--hidden-sizes").hidden_sizes == parsed("--head-weights").head_weights == ()
    assert parsed("--reward-clip", "None").reward_clip is None


def test_train_writes_the_documented_files_and_prints_the_folder(trained):
    assert trained.out == f"{trained.folder}\n"
    names = {path.name for path in trained.folder.iterdir()}
    best = {name for name in names if name.startswith("best-")}
    assert len(best) == 1
    assert names - best == {
        "config.toml",
        "episodes.csv",
        "metrics.csv",
        "summary.json",
        "checkpoints",
        "replay",
    }
    config = read_config_file(trained.folder / "config.toml")
    assert (config.label, config.hidden_sizes, config.total_timesteps) == ("iS-DQN K=2", (8,), 300)
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["episodes"] == len(read_table(trained.folder / "episodes.csv"))
    lines = trained.err.splitlines()
    assert lines[1] == "iS-DQN K=2 on isqn/Chain-v0 (protocol gymnasium), seed 0"
    assert [line.split(":")[0] for line in lines[3:5]] == ["epoch 1/2", "epoch 2/2"]
    assert "\r" not in trained.err, "no progress line where nobody watches"


def test_the_config_of_a_run_reproduces_it(trained, tmp_path, capsys):
    again = tmp_path / "again"
    assert main(["train", "--config", str(trained.folder / "config.toml"), "--run-dir", str(again), "--quiet"]) == 0
    assert_same(final(again), final(trained.folder))
    assert capsys.readouterr() == ("", "")


def test_output_to_a_pipe_is_whole_lines_and_quiet_prints_nothing(trained, tmp_path):
    words = ["train", "--config", str(trained.folder / "config.toml"), "--run-dir"]
    done = process(*words, str(tmp_path / "a"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/a\n")
    said = done.stderr.replace(f"{trained.folder}/config.toml", "preset toy, which fits isqn/Chain-v0")
    said = said.replace(f"{tmp_path}/a", str(trained.folder))
    measured = r"[\d,]+ MB of memory|finished in .* s;"
    assert re.sub(measured, "", said) == re.sub(measured, "", trained.err)
    done = process(*words, str(tmp_path / "b"), "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_each_seed_has_a_folder(tmp_path, capsys):
    words = ["--hidden-sizes", "8", "--total-timesteps", "100", "--learning-starts", "50", "--log-period-steps", "50"]
    words += ["--epoch-steps", "100", "--num-seeds", "2", "--seed", "5", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "dqn", *words]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/run/seed-5\n{tmp_path}/run/seed-6\n"
    assert "seeds 5 to 6, compiled loop" in err
    assert [read_config_file(tmp_path / "run" / f"seed-{seed}" / "config.toml").seed for seed in (5, 6)] == [5, 6]


def test_an_existing_folder_is_refused_with_the_remedy(trained, refused, tmp_path):
    unfinished, foreign, file = tmp_path / "unfinished", tmp_path / "foreign", tmp_path / "file"
    record.create_run(unfinished, DqnConfig())
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("precious")
    file.write_text("")

    def sentence(folder: Path, *more: str) -> str:
        return refused("train", *SHORT, "--run-dir", str(folder), *more)

    assert sentence(trained.folder) == (
        f"{trained.folder} holds a finished run; choose another --run-dir or --experiment, or add --overwrite. "
        "It has the same settings."
    )
    assert sentence(trained.folder, "--layer-norm", "--gamma", "0.5").endswith(
        " It has other settings: discount (0.9 there, 0.5 here), layer_norm (False there, True here)."
    )
    assert sentence(unfinished).startswith(
        f"{unfinished} holds an unfinished run; resume it with `isqn resume {unfinished}`, or add --overwrite. "
        "It has other settings: "
    )
    for folder in (foreign, file):
        assert sentence(folder) == f"{folder} exists and is not a run; choose another --run-dir."
        assert sentence(folder, "--overwrite") == f"{folder} exists and is not a run; choose another --run-dir."
    assert (foreign / "thesis.tex").read_text() == "precious"
    inside = file / "run"
    assert sentence(inside) == f"{inside} cannot be written (Not a directory); choose another --run-dir."


def test_overwrite_deletes_the_folder_unless_the_command_is_refused(refused, tmp_path):
    folder = tmp_path / "run"
    record.create_run(folder, DqnConfig(seed=9))
    (folder / "notes").write_text("old")
    refused("train", *SHORT, "--run-dir", str(folder), "--overwrite", "--torso", "nature")
    assert (folder / "notes").exists()
    assert main(["train", *SHORT, "--run-dir", str(folder), "--overwrite", "--quiet"]) == 0
    assert not (folder / "notes").exists()
    assert read_config_file(folder / "config.toml").seed == 0


@pytest.mark.parametrize(
    ("loop", "hint"),
    [("host", "Lower --buffer-size, or set --compress-replay yes."), ("compiled", "Lower --buffer-size.")],
)
def test_a_replay_that_does_not_fit_is_refused_with_the_flag(loop, hint, refused, monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2_000_000_000, total=4e9))
    words = ["--loop", loop, "--buffer-size", "1_000_000_000", "--run-dir", str(tmp_path / "run")]
    sentence = refused("train", "--env-id", "isqn/Chain-v0", *words)
    assert sentence.startswith("The run needs ")
    assert sentence.endswith(f"; 2.0 GB are free here. {hint}")
    assert not (tmp_path / "run").exists()


def test_a_batch_that_does_not_fit_is_refused_with_the_flag(refused, tmp_path):
    sentence = refused(
        "train", "--env-id", "isqn/Chain-v0", "--batch-size", "2_000_000_000", "--run-dir", str(tmp_path)
    )
    assert sentence.startswith("A batch takes ")
    assert sentence.endswith("Lower --batch-size.")


@pytest.mark.parametrize(
    "error", [MemoryError("no room for 8 bytes"), jax.errors.JaxRuntimeError("INTERNAL: Out of memory, 8 bytes.")]
)
def test_an_update_that_does_not_fit_names_the_flags(error, refused, monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(online, "_train_on_host", fail)
    sentence = refused("train", *SHORT, "--run-dir", str(tmp_path / "run"))
    assert sentence.startswith("There is not enough memory for an update (")
    assert sentence.endswith(
        "8 bytes). Lower --batch-size, --num-bellman-iterations, --num-seeds, --hidden-sizes or --width-factor."
    )


def test_free_memory_respects_all_limits(monkeypatch, tmp_path):
    """Limits are set by the machine, by `ulimit -v`, and by every control group of the process."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9_000))
    find = progress.control_groups
    monkeypatch.setattr(progress, "control_groups", list)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert progress.free_memory() == 9_000
    used = SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=3_000))
    monkeypatch.setattr(psutil, "Process", lambda: used)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10_000, resource.RLIM_INFINITY))
    assert progress.free_memory() == 7_000
    inner = tmp_path / "groups" / "job" / "step"
    inner.mkdir(parents=True)
    (tmp_path / "mine").write_text("1:name=x:/other\n0::/job/step\n")
    groups = find(tmp_path / "groups", tmp_path / "mine")
    assert groups == [inner, inner.parent, tmp_path / "groups"]
    for group, most in ((inner, "max"), (inner.parent, "8000")):
        for name, text in (("max", most), ("current", "5000"), ("stat", "anon 2000\ninactive_file 3000")):
            (group / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(progress, "control_groups", lambda: groups)
    assert progress.free_memory() == 6_000  # 8,000 without the 2,000 that are in use


def test_estimate_of_the_time_left(monkeypatch):
    """A run of 1,000 steps resumes at 200: neither earlier steps nor the first seconds count for its speed."""
    clock = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock)
    shown = progress.Progress(1_000)
    clock = 150.0
    assert shown.time_left(200) == ""  # it is evaluated before its first step
    clock = 100.0
    shown.show(200, None, None)
    clock = 105.0
    assert shown.time_left(300) == ""
    clock = 120.0
    assert shown.time_left(300) == "2 min 20 s left"  # 100 steps in 20 s, 700 to go
    assert shown.time_left(1_000) == ""


def test_an_unexpected_failure_is_one_line(monkeypatch, capsys, tmp_path):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("in the middle\nof a long story")

    monkeypatch.setattr(run, "start", fail)
    words = ["train", *SHORT, "--run-dir", str(tmp_path / "run"), "--quiet"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "isqn: ZeroDivisionError: in the middle (add --debug for the traceback)\n"
    with pytest.raises(ZeroDivisionError):
        main([*words, "--overwrite", "--debug"])


def test_a_folder_in_place_of_a_file_is_named(capsys, tmp_path):
    (tmp_path / "study.toml").mkdir()
    assert main(["study", "training-time", "--out", str(tmp_path), "--no-report"]) == 1
    assert capsys.readouterr().err == f"isqn: {tmp_path / 'study.toml'} cannot be written (Is a directory).\n"


def test_ctrl_c_is_answered_at_once(monkeypatch, capsys):
    """The first one is a request to save and stop; the second stops without saving."""

    def train(*args, **kwargs):
        with stop_on_signals() as should_stop:
            assert not should_stop()
            os.kill(os.getpid(), signal.SIGINT)
            assert should_stop()
            os.kill(os.getpid(), signal.SIGINT)

    codes = []
    monkeypatch.setattr(run, "start", train)
    monkeypatch.setattr("isqn.cli.os._exit", codes.append)
    main(["train", "dqn", "--quiet"])
    assert codes == [130]
    assert capsys.readouterr().err.splitlines() == [
        "stopping after this step; press Ctrl-C again to stop without saving",
        "isqn: stopped without saving since the last checkpoint",
    ]


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    codes = []
    monkeypatch.setattr(run, "start", stop)
    monkeypatch.setattr("isqn.cli.os._exit", codes.append)
    main(["train", "--quiet"])
    assert codes == [130]
    assert capsys.readouterr() == ("", "isqn: stopped\n")


@pytest.mark.parametrize("module", ["tyro", "jax"])
def test_ctrl_c_is_one_line_during_imports(module):
    code = f"""
import sys
class Stop:
    def find_spec(self, name, *rest):
        if name == "{module}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
sys.argv = ["isqn", "train", "dqn"]
from isqn.__main__ import console
console()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "isqn: stopped\n")


def test_a_closed_pipe_is_no_failure(tmp_path):
    """A reader that closes the pipe ends neither a list nor a training run with an error."""
    for words, stream in (
        (["list", "envs"], "stdout"),
        (["train", *SHORT, "--run-dir", str(tmp_path / "run")], "stderr"),
    ):
        reading, writing = os.pipe()
        os.close(reading)
        done = process(*words, **{stream: writing})
        os.close(writing)
        assert done.returncode == 0
        assert not done.stderr
    assert record.read_summary(tmp_path / "run")["status"] == "finished"
    assert done.stdout == f"{tmp_path}/run\n"


# -- resume ------------------------------------------------------------------------------------------------------


def test_resume_continues_a_run_and_quiet_prints_nothing(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    record.create_run(folder, read_config_file(trained.folder / "config.toml"))
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert_same(final(folder), final(trained.folder))
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_seed_whose_sibling_is_missing_is_refused(refused, tmp_path):
    for seed in (0, 1):
        record.create_run(tmp_path / f"seed-{seed}", DqnConfig(seed=seed))
        record.write_summary(tmp_path / f"seed-{seed}", {"trained_with": ["../seed-0", "../seed-1"]})
    shutil.rmtree(tmp_path / "seed-0")
    assert refused("resume", str(tmp_path / "seed-1")) == (
        f"{tmp_path}/seed-1 was trained together with {tmp_path}/seed-0, which is missing; put it back. The seeds of "
        "one program are resumed together."
    )


def test_a_folder_that_is_not_a_run_is_refused(refused, tmp_path):
    for command in ("resume", "eval", "probe"):
        assert refused(command, str(tmp_path)) == f"{tmp_path} is not a run: there is no config.toml in it."


# -- eval and probe ------------------------------------------------------------------------------------------------


def test_eval_is_reproducible(trained, answer):
    words = ["eval", str(trained.folder), "--episodes", "4", "--seed", "7", "--epsilon", "0.5"]
    found = answer(*words)
    assert found == answer(*words)
    assert found != answer(*words[:-3], "8", *words[-2:])
    assert list(found) == [
        *("env_id", "protocol", "label", "step", "mean_return", "std_return", "epsilon", "acting_rule"),
        *("episodes", "video"),
    ]
    returns = [episode["return"] for episode in found["episodes"]]
    assert len(returns) == 4
    assert found["mean_return"] == pytest.approx(np.mean(returns))
    assert found["std_return"] == pytest.approx(np.std(returns))
    assert found["step"] == checkpoint.steps(trained.folder)[0]
    rest = {key: found[key] for key in ("env_id", "protocol", "label", "epsilon", "acting_rule", "video")}
    assert rest == {
        "env_id": "isqn/Chain-v0",
        "protocol": "gymnasium",
        "label": "iS-DQN K=2",
        "epsilon": 0.5,
        "acting_rule": "uniform",
        "video": None,
    }
    assert found["episodes"][0].keys() == {"seed", "return", "length"}


def test_eval_of_the_best_epoch_and_of_another_head(trained, answer):
    words = ["eval", str(trained.folder), "--episodes", "1"]
    (best,) = trained.folder.glob("best-*")
    assert answer(*words, "--which", "best")["step"] == int(best.name.removeprefix("best-"))
    assert answer(*words, "--acting-rule", "mean")["acting_rule"] == "mean"


def test_eval_prints_a_line_for_each_game_and_the_mean(trained, capsys):
    assert main(["eval", str(trained.folder), "--episodes", "3"]) == 0
    *games, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0::2] for line in games] == [["return", "length", "seed"]] * 3
    step = checkpoint.steps(trained.folder)[0]
    assert last.startswith(f"iS-DQN K=2 on isqn/Chain-v0 at step {step}: ")
    assert last.endswith(" over 3 episodes")


@pytest.mark.parametrize("which", ["last", "best"])
def test_eval_without_a_checkpoint_is_refused(which, refused, tmp_path):
    record.create_run(tmp_path / "run", DqnConfig(hidden_sizes=(8,)))
    sentence = refused("eval", str(tmp_path / "run"), "--which", which)
    missing = {"last": "checkpoint yet; train it for longer", "best": "best checkpoint that can be read"}
    assert sentence == f"{tmp_path}/run has no {missing[which]}."


DESCRIBE_VIDEO = """
import json, sys
import imageio.v2 as imageio
import numpy as np

frames = np.stack([np.asarray(frame, int) for frame in imageio.get_reader(sys.argv[1])])
print(json.dumps({
    "frames": len(frames),
    "shape": frames[0].shape,
    "contrast": int(np.ptp(frames[0])),
    "motion": int(abs(frames[0] - frames).max()),
}))
"""


def test_a_video_shows_the_first_game(trained, answer):
    found = answer("eval", str(trained.folder), "--episodes", "2", "--epsilon", "1", "--capture-video")
    path = Path(found["video"])
    assert path == trained.folder / "videos" / f"step-{found['step']}-seed-100.mp4"
    done = subprocess.run([sys.executable, "-c", DESCRIBE_VIDEO, path], capture_output=True, text=True, check=True)
    video = json.loads(done.stdout)
    assert video["frames"] == found["episodes"][0]["length"]
    assert video["shape"] == [32, 256, 3]
    assert video["contrast"] > 100, "the picture is blank"
    assert video["motion"] > 50, "nothing moves"


def test_a_video_without_its_library_is_refused_before_a_game_is_played(trained, refused, monkeypatch):
    from isqn.envs.adapter import Environment

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setattr(Environment, "step", lambda *_: pytest.fail("an episode was played"))
    sentence = refused("eval", str(trained.folder), "--capture-video")
    assert sentence == '--capture-video needs `pip install "isqn[video]"`.'


def test_probe_prints_every_metric_by_name(trained, answer, capsys):
    words = ["probe", str(trained.folder), "--samples", "32", "--updates", "3"]
    found = answer(*words)
    assert list(found) == [
        *("label", "step", "effective_rank", "dormant_share", "target_churn_train", "target_churn_held_out"),
        *("gradient_cosine_own_tb", "gradient_cosine_tf_tb", "head_cosine"),
    ]
    assert (found["label"], found["step"]) == ("iS-DQN K=2", checkpoint.steps(trained.folder)[0])
    assert 1 <= found["effective_rank"] <= 8
    assert 0 <= found["dormant_share"] <= 1
    assert found["target_churn_train"] > 0
    assert -1 <= found["gradient_cosine_tf_tb"] <= 1
    assert found == answer(*words)
    some = answer(*words, "--metric", "dormant", "effective-rank")
    assert list(some) == ["label", "step", "dormant_share", "effective_rank"]
    assert main([*words, "--metric", "dormant"]) == 0
    *_, (name, value, *meaning) = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (name, float(value)) == ("dormant_share", pytest.approx(found["dormant_share"], rel=1e-4))
    assert " ".join(meaning) == "share of dormant units, in [0, 1]"
    assert set(found) - {"label"} <= set(MEANINGS)


# -- list, cost, doctor ----------------------------------------------------------------------------------------------


def test_lists_are_complete(answer, capsys):
    assert [row["name"] for row in answer("list", "presets")] == list(all_presets())
    assert [row["name"] for row in answer("list", "losses")] == list(LOSSES)
    schemes = {row["name"]: row for row in answer("list", "schemes")}
    assert list(schemes) == list(SCHEMES)
    assert schemes["iterated-shared"] == {
        "name": "iterated-shared",
        "label": "iS-DQN K=3",
        "heads": "4 heads",
        "copies": "0 copies",
        "targets": "1 from 0, 2 from 1, 3 from 2",
    }
    envs = {row["id"]: row for row in answer("list", "envs")}
    assert envs["isqn/Chain-v0"] == {"id": "isqn/Chain-v0", "kind": "toy", "loops": "host, compiled"}
    assert envs["ALE/Pong-v5"]["loops"] == "host"
    assert main(["list", "presets"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "description", "agent"]
    assert (
        len({line.index(preset.description) for line, preset in zip(lines, all_presets().values(), strict=True)}) == 1
    )


def test_cost_agrees_with_counts_by_hand(answer):
    found = answer("cost", "classic")
    assert (found["preset"], found["env_id"], found["num_actions"]) == ("classic", "Acrobot-v1", 3)
    torso = (6 * 128 + 128) + (128 * 128 + 128)

    def head(heads: int) -> int:
        return heads * (128 * 3 + 3)

    parameters = {row["label"]: (row["parameters"], row["copied_parameters"]) for row in found["schemes"]}
    assert parameters == {
        "TB-DQN": (torso + head(1), torso + head(1)),
        "TF-DQN": (torso + head(1), 0),
        "iS-DQN K=1": (torso + head(2), 0),
        "iS-DQN K=3": (torso + head(4), 0),
        "iS-DQN K=9": (torso + head(10), 0),
        "iS-DQN K=49": (torso + head(50), 0),
        "ES-DQN N=5": (torso + head(10), 0),
        "i-DQN K=4": (torso + head(4), 2 * (torso + head(4))),
    }
    for row in found["schemes"]:
        assert row["network_bytes"] == 4 * (row["parameters"] + row["copied_parameters"])
        assert row["optimizer_bytes"] == 4 * 2 * row["parameters"] + 4  # two moments and a count
        # at least the forward pass of s and s' and the backward pass of s: 2 per parameter and sample each
        assert row["flops_per_update"] > 32 * 2 * 3 * torso
        # obs and next_obs (6 floats each), action, reward, two flags
        assert row["replay_bytes"] == pytest.approx(50_000 * (2 * 24 + 4 + 4 + 2), rel=0.05)


def test_doctor_prints_versions_extras_and_times(answer):
    found = answer("doctor", "--preset", "toy")
    assert found.keys() == {
        *("preset", "python", "platform", "device", "xla_flags", "versions", "git", "command", "cores", "memory_gb"),
        *("extras", "problem", "milliseconds", "bottleneck", "steps_per_second", "verdict"),
    }
    assert (found["preset"], found["problem"]) == ("toy", None)
    assert found["versions"]["isqn"] == isqn.__version__
    assert found["versions"]["jax"] == jax.__version__
    assert found["milliseconds"].keys() == {"environment", "act", "sample", "update"}
    for median, low, high in found["milliseconds"].values():
        assert 0 < low <= median <= high
    assert found["bottleneck"] in found["milliseconds"]
    assert f"the {found['bottleneck']} takes " in found["verdict"]
    for name, state in found["extras"].items():
        assert state == "installed" or state.endswith(f': pip install "isqn[{name}]"')


def test_doctor_reports_a_missing_extra_as_a_finding(monkeypatch, answer):
    from isqn.train import doctor

    def missing(*args, **kwargs):
        raise UserError('ALE/Asterix-v5 needs `pip install "isqn[atari]"`.')

    monkeypatch.setattr(doctor, "make_run_environment", missing)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "cv2" else name)
    found = answer("doctor")
    assert found["problem"] == 'ALE/Asterix-v5 needs `pip install "isqn[atari]"`.'
    assert found["extras"]["atari"] == 'without cv2: pip install "isqn[atari]"'
    assert found["extras"]["report"] == "installed"


# -- own environments --------------------------------------------------------------------------------------------------

MODULE = """
import gymnasium as gym
import numpy as np

SPACES = {
    "Fine": (gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Discrete(2)),
    "Dict": (gym.spaces.Dict({"eye": gym.spaces.Discrete(2)}), gym.spaces.Discrete(2)),
    "Multi": (gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.MultiDiscrete([2, 2])),
    "Continuous": (gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Box(0, 1, (1,), np.float32)),
}

class Env(gym.Env):
    def __init__(self, name):
        self.observation_space, self.action_space = SPACES[name]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return self.np_random.random(2, np.float32), float(action), self.time == 5, False, {}

for name in SPACES:
    gym.register(f"{name}-v0", entry_point=Env, kwargs={"name": name})
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "odd_envs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(gym.envs.registration, "registry", gym.registry)
    yield
    sys.modules.pop("odd_envs", None)
    for name in ("Fine", "Dict", "Multi", "Continuous"):
        gym.registry.pop(f"{name}-v0", None)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "Dict",
            "The observation space of odd_envs:Dict-v0 is Dict('eye': Discrete(2)); supported are Discrete, Box "
            "vectors (n,) and Box images (height, width) or (height, width, channels), so wrap it in a "
            "gymnasium.ObservationWrapper.",
        ),
        (
            "Multi",
            "The action space of odd_envs:Multi-v0 is MultiDiscrete([2 2]); Discrete and Box actions are supported.",
        ),
        (
            "Continuous",
            "The actions of odd_envs:Continuous-v0 are continuous; use the agent sac.",
        ),
    ],
)
def test_an_unsupported_environment_is_refused_in_a_sentence(own_module, refused, tmp_path, name, sentence):
    assert refused("train", "--env-id", f"odd_envs:{name}-v0") == sentence
    assert not (tmp_path / "runs").exists()


def test_an_own_environment_is_trained_and_evaluated(own_module, answer, refused):
    words = [word for word in SHORT if word not in ("--env-id", "isqn/Chain-v0", "--loop", "host")]
    assert main(["train", "--env-id", "odd_envs:Fine-v0", *words, "--run-dir", "mine", "--quiet"]) == 0
    found = answer("eval", "mine", "--episodes", "2")
    assert [episode["length"] for episode in found["episodes"]] == [5, 5]
    assert refused("eval", "mine", "--capture-video").endswith(
        ("cannot be rendered; leave out --capture-video.", '--capture-video needs `pip install "isqn[video]"`.')
    )
    sentence = refused("train", "--env-id", "od_envs:Fine-v0")
    where = f"it is neither in {os.getcwd()} nor installed"
    assert sentence == f"--env-id od_envs:Fine-v0: 'od_envs' cannot be imported: {where}."
    assert refused("list", "envs", "--import", "od_envs") == f"--import: 'od_envs' cannot be imported: {where}."
    assert (
        refused("list", "envs", "--import", "no.py") == "--import: 'no.py' cannot be imported: there is no such file."
    )
