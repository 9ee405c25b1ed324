"""Learning from a dataset: losses, runs that resume to the same bits, and evaluations of whole games."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import isqn
from helpers import ALL_SCHEMES, SMALL, assert_same, final, random_batch, stop_after
from isqn.agents.cql import CqlConfig
from isqn.agents.dqn import DqnConfig
from isqn.cli import main
from isqn.data.dataset import Dataset, DatasetWriter, Provenance
from isqn.data.index import read_index
from isqn.data.text import read_table
from isqn.envs.adapter import make_environment
from isqn.envs.registry import make_native
from isqn.losses import cloning
from isqn.presets import preset_config
from isqn.study import drive, engines
from isqn.study.grid import Study
from isqn.train import checkpoint, offline, record, run
from isqn.train.evaluate import host_evaluation, native_evaluation
from isqn.train.functions import make_run_agent
from isqn.types import Interrupted, Transition, UserError, Values

SCHEMES = [("target-based", 1), ("iterated-shared", 2), ("iterated-target-based", 2)]

LOGGED = DqnConfig(
    env_id="isqn/Chain-v0",
    record_dataset=True,
    hidden_sizes=(8,),
    total_timesteps=600,
    epoch_steps=300,
    log_period_steps=100,
    learning_starts=50,
    buffer_size=200,
    epsilon_end=0.5,
)


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("logged") / "run"
    run.start(LOGGED, folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def data(logged) -> Path:
    return logged / "dataset"


def small(data: Path, **changes) -> CqlConfig:
    fields = {
        "env_id": "isqn/Chain-v0",
        "dataset": str(data),
        "hidden_sizes": (8,),
        "num_updates": 60,
        "epoch_updates": 25,
        "log_period_updates": 10,
        "target_update_period": 7,
        "evaluation_steps": 100,
        "evaluation_environments": 3,
    }
    return CqlConfig(**fields | changes)


def start_and_stop(config: CqlConfig, folder: Path, calls: int, monkeypatch) -> None:
    """Start a run and interrupt it when it asks for the `calls`-th time whether to stop."""
    with monkeypatch.context() as patch:
        stop_after(patch, calls)
        with pytest.raises(Interrupted):
            run.start(config, folder, quiet=True)


# -- behaviour cloning (test_losses.py has the law that CQL with a weight of 0 is DQN)


def test_cloning_by_hand():
    """Logits 1 and 0: the probability of the first is 1 / (1 + 1/e)."""
    values = Values(np.array([1.0, 0.0]), np.array([5.0, 9.0]))
    for action, loss in ((0, np.log(1 + np.exp(-1))), (1, np.log(1 + np.exp(1)))):
        transition = Transition(0.0, action, 3.0, 0.9, 0.0)
        assert cloning(values, values, transition) == pytest.approx(loss, rel=1e-6)


def test_cloning_learns_the_frequencies_of_actions():
    """In the only state, action 2 is taken three times of four."""
    config = CqlConfig(loss="cloning", scheme="target-free", learning_rate=0.05)
    assert config.label == "BC"
    agent = make_run_agent(config.replace(hidden_sizes=(5,)), SMALL)
    state, batch = agent.init(0), random_batch(size=4)
    batch = batch._replace(obs=np.ones_like(batch.obs), action=np.array([2, 2, 1, 2], np.int32))
    update = jax.jit(agent.update)
    for _ in range(300):
        state, _ = update(state, batch)
    q, _ = agent.network.apply(state.params, state.statistics, batch.obs[:1])
    np.testing.assert_allclose(jax.nn.softmax(q[0, 0]), [0, 0.25, 0.75, 0], atol=0.01)


# -- logging


def test_a_log_has_the_episodes_of_the_run(logged):
    dataset = Dataset.open(logged / "dataset")
    episodes = read_table(logged / "episodes.csv")
    lengths = [piece.num_transitions for piece in dataset.pieces()]
    assert lengths[: len(episodes)] == [int(row["length"]) for row in episodes]
    assert dataset.num_transitions == int(episodes[-1]["step"])
    returns = [float(piece.rewards.sum()) for piece in dataset.pieces()]
    assert returns[: len(episodes)] == [float(row["return"]) for row in episodes]
    assert dataset.index["policy"] == "iS-DQN K=1, seed 0, while it learns"


def test_a_log_resumes_to_the_same_bits(logged, tmp_path, monkeypatch):
    start_and_stop(LOGGED, tmp_path / "run", 210, monkeypatch)
    assert run.resume(tmp_path / "run", quiet=True)
    assert read_index(tmp_path / "run" / "dataset") == read_index(logged / "dataset")
    Dataset.open(tmp_path / "run" / "dataset")


# -- runs


@pytest.mark.parametrize(("scheme", "k", "after"), [(*scheme, 6 + 20 * i) for i, scheme in enumerate(SCHEMES)])
def test_a_run_resumes_to_the_same_bits(scheme, k, after, data, tmp_path, monkeypatch):
    config = small(data, scheme=scheme, num_bellman_iterations=k, target_sync_period=3)
    run.start(config, tmp_path / "whole", quiet=True)
    start_and_stop(config, tmp_path / "stopped", after, monkeypatch)
    assert run.resume(tmp_path / "stopped", quiet=True)
    assert_same(final(tmp_path / "stopped"), final(tmp_path / "whole"))
    assert record.run_state(tmp_path / "stopped") == "finished"


@pytest.fixture(scope="module")
def breakout(tmp_path_factory) -> Path:
    """Return a dataset of 300 steps of random play on Breakout."""
    folder = tmp_path_factory.mktemp("breakout") / "run"
    few = {"total_timesteps": 300, "epoch_steps": 300, "max_episode_steps": 100, "learning_starts": 300}
    config = preset_config("atari-smoke").replace(env_id="ALE/Breakout-v5", record_dataset=True, **few)
    run.start(config, folder, quiet=True)
    return folder / "dataset"


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "k"), ALL_SCHEMES)
def test_runs_of_the_size_of_the_paper_resume_to_the_same_bits(scheme, k, breakout, tmp_path, monkeypatch):
    """Only the lengths differ from the preset. There are refreshes and evaluations before and after the stop."""
    config = preset_config("atari-cql").replace(
        env_id="ALE/Breakout-v5",
        dataset=str(breakout),
        scheme=scheme,
        num_bellman_iterations=k,
        num_updates=12,
        epoch_updates=6,
        log_period_updates=4,
        target_update_period=5,
        evaluation_steps=40,
        max_episode_steps=20,
    )
    run.start(config, tmp_path / "whole", quiet=True)
    start_and_stop(config, tmp_path / "parts", 20, monkeypatch)
    assert 0 < checkpoint.steps(tmp_path / "parts")[0] < 12
    assert run.resume(tmp_path / "parts", quiet=True)
    assert_same(final(tmp_path / "parts"), final(tmp_path / "whole"))


def test_a_run_that_was_killed_before_its_last_summary_is_finished(data, tmp_path):
    """All is saved, and only the summary is still that of a running run."""
    run.start(small(data), tmp_path / "run", quiet=True)
    before = final(tmp_path / "run")
    summary = record.read_summary(tmp_path / "run")
    record.write_summary(tmp_path / "run", {**summary, "status": "running"})
    assert run.resume(tmp_path / "run", quiet=True)
    assert_same(final(tmp_path / "run"), before)
    assert record.read_summary(tmp_path / "run")["auc"] == summary["auc"]


def test_files_of_a_run(data, tmp_path):
    run.start(small(data), tmp_path / "run", quiet=True)
    rows = read_table(tmp_path / "run" / "evaluations.csv")
    assert [int(row["step"]) for row in rows] == sorted(int(row["step"]) for row in rows)
    assert {(int(row["epoch"]), int(row["step"])) for row in rows} == {(0, 0), (1, 25), (2, 50), (3, 60)}
    for epoch in range(4):
        assert sum(int(row["length"]) for row in rows if int(row["epoch"]) == epoch) >= 100
    metrics = read_table(tmp_path / "run" / "metrics.csv")
    assert [int(row["updates"]) for row in metrics] == [10, 20, 30, 40, 50, 60]
    assert not (tmp_path / "run" / "episodes.csv").exists()
    summary = record.read_summary(tmp_path / "run")
    assert (summary["status"], summary["label"], len(summary["epoch_returns"])) == ("finished", "iS-CQL K=1", 4)
    index = read_index(data)
    origin = summary["learned_from"]
    assert (origin["policy"], origin["subset"], origin["rows"]) == (index["policy"], "all", index["rows"])


def test_an_unfinished_dataset_is_refused(data, tmp_path):
    writer = DatasetWriter(tmp_path / "part", run.specification(small(data)), Provenance("somebody"))
    for piece in Dataset.open(data).pieces():
        writer.extend(piece)
    writer.save(complete=False)
    with pytest.raises(UserError, match=r"part is not complete; run the command that made it again\."):
        run.start(small(tmp_path / "part"), tmp_path / "run", quiet=True)


def test_a_dataset_in_a_run_folder_is_not_tidied_up(data, tmp_path, monkeypatch):
    """Only files that are named by checkpoints of the run are removed."""
    start_and_stop(small(data), tmp_path / "run", 30, monkeypatch)
    shutil.copytree(data, tmp_path / "run" / "dataset")
    assert run.resume(tmp_path / "run", quiet=True)
    Dataset.open(tmp_path / "run" / "dataset")


def logging_study(dataset: str, **changes) -> Study:
    """Return a study of two seeds that learns from part of a log, which it trains itself."""
    logged = {name: getattr(LOGGED, name) for name in ("hidden_sizes", "epoch_steps", "learning_starts", "buffer_size")}
    log = {"total_timesteps": 300, "log_period_steps": 100, "subset": "first", "fraction": 0.5, "checkpoints": 3}
    return Study(
        name="mine",
        question="Is it logged?",
        agent="cql",
        baseline="TB-CQL",
        seeds=(0, 1),
        tasks=({"env_id": "isqn/Chain-v0", "dataset": dataset},),
        methods=({"scheme": "target-based"},),
        settings={"num_updates": 10, "epoch_updates": 10, "log_period_updates": 10, "evaluation_steps": 0},
        datasets={**logged, **log, **changes},
    )


def train_study(study: Study, out: Path) -> drive.Outcome:
    engine = engines.make("local", out, 1, None, 0.0, "slurm", ())
    return drive.train(study, out, engine, quiet=True)


@pytest.mark.parametrize("place", ["/data/{seed}", "../data", "data/{sede}"])
def test_the_datasets_of_a_study_lie_in_its_folder(place):
    with pytest.raises(UserError, match="it must be a path inside the study's folder, where"):
        logging_study(place)


def test_a_study_logs_a_dataset_for_each_seed(tmp_path):
    study = logging_study("data/{seed}")
    assert len(drive.datasets_to_log(study, tmp_path, 1)) == 2
    assert train_study(study, tmp_path) == (2, 2, [])
    indices = [read_index(tmp_path / "data" / str(seed)) for seed in (0, 1)]
    assert [index["policy"] for index in indices] == [f"iS-DQN K=1, seed {seed}, while it learns" for seed in (0, 1)]
    assert all((index["subset"], index["fraction"], index["num_checkpoints"]) == ("first", 0.5, 3) for index in indices)
    shutil.rmtree(tmp_path / "data")
    assert train_study(study, tmp_path) == (2, 2, [])  # nothing is left to train, so nothing is logged
    assert not (tmp_path / "data").exists()


def test_a_dataset_for_all_seeds_is_logged_once_and_again_if_it_is_missing(tmp_path):
    """A log with other settings, or another part of it, is not used in its place."""
    study = logging_study("data/all")
    assert len(drive.datasets_to_log(study, tmp_path, 1)) == 1
    assert train_study(study, tmp_path) == (2, 2, [])
    assert read_index(tmp_path / "data" / "all")["policy"] == "iS-DQN K=1, seed 0, while it learns"
    for folder in ("data", "runs"):
        shutil.rmtree(tmp_path / folder)
    with pytest.raises(UserError, match="has total_timesteps = 300, and the study says 600"):
        train_study(logging_study("data/all", total_timesteps=600), tmp_path)
    assert train_study(study, tmp_path) == (2, 2, [])
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(UserError, match="was made with another subset, fraction or number of checkpoints"):
        train_study(logging_study("data/all", fraction=0.25), tmp_path)


def test_batches_do_not_depend_on_when_they_are_drawn():
    drawn = []
    for first in (0, 3, 8, 13):
        batches = offline.Batches(lambda group: [group * offline.GROUP + i for i in range(offline.GROUP)], first)
        drawn.append([next(batches) for _ in range(20)])
        batches.close()
        assert drawn[-1] == list(range(first, first + 20))


def test_a_run_does_not_overwrite_its_dataset(logged, tmp_path):
    shutil.copytree(logged, tmp_path / "run")
    with pytest.raises(UserError, match=r"is inside .*dataset, an input of the run; choose another --run-dir\."):
        run.start(small(tmp_path / "run" / "dataset"), tmp_path / "run" / "dataset" / "run", quiet=True)
    with pytest.raises(UserError, match=r"run would be emptied and contains .*dataset, an input of the run; choose"):
        run.start(small(tmp_path / "run" / "dataset"), tmp_path / "run", overwrite=True, quiet=True)
    assert Dataset.open(tmp_path / "run" / "dataset").num_transitions


def test_labels_of_offline_runs(data):
    assert small(data).label == "iS-CQL K=1"
    assert small(data, loss="dqn").label == "iS-offline DQN K=1"
    assert small(data, loss="cloning", scheme="target-free").label == "BC"


def test_resuming_with_a_changed_dataset_is_refused(data, tmp_path, monkeypatch):
    shutil.copytree(data, tmp_path / "data")
    start_and_stop(small(tmp_path / "data"), tmp_path / "run", 30, monkeypatch)
    shutil.rmtree(tmp_path / "data")
    run.start(LOGGED.replace(seed=1), tmp_path / "other", quiet=True)
    shutil.copytree(tmp_path / "other" / "dataset", tmp_path / "data")
    with pytest.raises(UserError, match=r"is not what .* was trained on: it has changed since"):
        run.resume(tmp_path / "run", quiet=True)


def test_a_run_resumes_with_a_moved_dataset(data, tmp_path, monkeypatch):
    shutil.copytree(data, tmp_path / "data")
    start_and_stop(small(tmp_path / "data"), tmp_path / "run", 30, monkeypatch)
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"learns from, is not there; .* `dataset` in \S+config\.toml may be changed\."):
        run.resume(tmp_path / "run", quiet=True)
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace(str(tmp_path / "data"), str(tmp_path / "moved")))
    assert run.resume(tmp_path / "run", quiet=True)


# -- evaluations


def test_evaluations_play_whole_games(data):
    """On the chain, a game has at most 100 steps; each environment plays its share of whole games."""
    config = small(data)
    agent = make_run_agent(config, run.specification(config))
    state = agent.init(0)
    common = {"steps": 300, "epsilon": 1.0, "max_episode_steps": 1_000}
    play = {
        "host": host_evaluation(agent, [make_environment("isqn/Chain-v0") for _ in range(3)], **common),
        "native": native_evaluation(agent, make_native("isqn/Chain-v0"), count=3, **common),
    }
    for evaluate in play.values():
        played = evaluate(state, 5)
        assert played == evaluate(state, 5) != evaluate(state, 6)
        assert 300 <= sum(episode.length for episode in played) < 600
        assert all(episode.length <= 100 for episode in played)
        assert all(episode.episodic_return == 1 for episode in played if episode.length < 100)


def test_native_and_host_evaluations_agree(data):
    config = small(data)
    agent = make_run_agent(config, run.specification(config))
    state = agent.init(0)
    common = {"steps": 20_000, "epsilon": 1.0, "max_episode_steps": 1_000}
    lengths = [
        np.mean([episode.length for episode in evaluate(state, 1)])
        for evaluate in (
            host_evaluation(agent, [make_environment("isqn/Chain-v0") for _ in range(4)], **common),
            native_evaluation(agent, make_native("isqn/Chain-v0"), count=20, **common),
        )
    ]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.15)


# -- from playing to learning


def test_commands_from_playing_to_learning_offline(tmp_path, monkeypatch, capsys):
    """On MinAtar: log, select a part, learn, resume, evaluate, collect, report, inspect."""
    monkeypatch.chdir(tmp_path)
    short = "--total-timesteps 400 --epoch-steps 200 --learning-starts 100 --log-period-steps 100"
    for words in (
        f"train dqn --env-id MinAtar/Breakout --record-dataset --run-dir online {short} --quiet",
        "data convert online/dataset -o part --subset first --fraction 0.5 --checkpoints 4 --quiet",
        "train cql --dataset part --num-updates 20 --epoch-updates 10 --evaluation-steps 200 --run-dir runs/a --quiet",
        "train cql --dataset part --num-updates 20 --epoch-updates 10 --evaluation-steps 200 --scheme target-based "
        "--run-dir runs/b --quiet",
        "resume runs/a",
        "eval runs/a --episodes 2",
        "data collect runs/a -o played --steps 100 --quiet",
        "report runs -o report",
        "data convert part -o minari --to minari",
    ):
        assert main(words.split()) == 0, words
    said = capsys.readouterr()
    assert said.out.endswith("minari\n")
    assert "MinAtar/Breakout-v1 (minatar-v1), played by iS-DQN K=1" in said.err
    assert main(["data", "collect", "runs/a", "-o", "played", "--steps", "100"]) == 0  # again
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[0]) == ("played\n", "played was complete; nothing to do.")
    assert main(["data", "collect", "runs/a", "-o", "played", "--steps", "101"]) == 1
    assert "played holds another dataset, which differs in steps; give --out another folder" in capsys.readouterr().err
    assert main(["data", "inspect", "played", "--json", "--strip", "strip.png"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["transitions"] >= 100
    assert found["policy"] == "iS-CQL K=1, seed 0, at step 20, epsilon 0.001, uniform"
    assert (tmp_path / "strip.png").stat().st_size > 500
    part = read_index(tmp_path / "part")
    assert (part["subset"], part["fraction"], part["num_checkpoints"]) == ("first", 0.5, 4)
    assert main(["data", "inspect", "part", "--verify"]) == 0
    assert capsys.readouterr().out.endswith("\nverified: 1 file is as written\n")
    (shard,) = (tmp_path / "part").glob("rows-*")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["data", "inspect", "part", "--verify"]) == 1
    assert capsys.readouterr().out == f"part/{shard.name} is not what was written: its checksum differs.\n"


def test_fit_of_a_model(data, tmp_path):
    model = isqn.Model("cql", env="isqn/Chain-v0", hidden_sizes=(8,), evaluation_steps=0)
    with pytest.raises(UserError, match="num_updates is '10'; it must be a whole number"):
        model.fit(data, "10")
    with pytest.raises(UserError, match=r"A model of 'cql' has no learn; call fit\(dataset\)"):
        model.learn(100)
    model.fit(data, 30)
    assert model.num_timesteps == 30
    first = np.eye(8)[0]
    assert model.predict(first)[0] in (0, 1)
    model.save(tmp_path / "model")
    assert isqn.Model.load(tmp_path / "model").predict(first) == model.predict(first)
    with pytest.raises(UserError, match=r"A model of 'dqn' has no fit; call learn\(total_timesteps\)"):
        isqn.Model("dqn", env="isqn/Chain-v0").fit(data)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("train cql", "--dataset is not given; it is the folder that `isqn train cql` learns from."),
        ("train cql --dataset nowhere", "nowhere is not a dataset: there is no such folder"),
        ("train cql --dataset {data} --env-id CartPole-v1", "is of isqn/Chain-v0, not of --env-id CartPole-v1."),
        ("train cql --dataset {data} --total-timesteps 5", "has no flag --total-timesteps; it is for `isqn train dqn`"),
        ("train dqn --num-updates 5", "has no flag --num-updates; it is for `isqn train cql` or "),
        ("train dqn --loss cloning", "is for `isqn train cql`, whose dataset has an action to clone"),
        ("train cql --dataset {data} --loss cloning", "must be target-free with --loss cloning"),
        ("train cql --dataset {data} --loss dqn --conservative-weight 1", "it needs --loss cql."),
        ("train dqn --record-dataset --num-seeds 2", "--num-seeds is 2; it must be 1 with --record-dataset."),
        ("train dqn --record-dataset --loop compiled", "it must be host or auto with --record-dataset."),
        ("data", ""),
        ("data cook", "`isqn data cook` is not known; choose one of collect, convert, inspect."),
        ("data inspect nowhere", "nowhere is not a dataset"),
        ("data convert nowhere -o x", "nowhere does not exist"),
        ("data convert {data}", "`isqn data convert` needs --out."),
        ("data convert {data} -o x --fraction 0.1", "--fraction is 0.1 and --subset all; it must be 1 for all"),
        (
            "data convert {data} -o x --subset first --fraction 2",
            "--fraction is 2.0; it must be above 0 and at most 1.",
        ),
        ("data convert {data} -o x --env-id CartPole-v1", "is of isqn/Chain-v0, not of --env-id CartPole-v1."),
        ("data collect {data} -o x", "is not a run: there is no config.toml in it."),
        ("data inspect {data} --strip x.png", "isqn/Chain-v0 observes no images; leave out --strip."),
    ],
)
def test_bad_input_is_answered_in_a_sentence(argv, sentence, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = main(argv.format(data=data).split())
    assert code in ((1, 2) if sentence else (0,))
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
