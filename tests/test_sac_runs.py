"""Runs of `isqn train sac`: from the command line and from Python, resumed to the same bits."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
from safetensors.numpy import load_file

import isqn
from helpers import assert_same, final, stop_after
from isqn.agents.registry import make_config
from isqn.cli import main
from isqn.data.text import read_table
from isqn.envs.adapter import make_environment
from isqn.presets import preset_config
from isqn.study.catalogue import find_study
from isqn.train import checkpoint, record, run
from isqn.train.evaluate import evaluate
from isqn.train.online import uses_compiled_loop
from isqn.types import Interrupted, UserError

PENDULUM = make_config("sac").replace(
    num_bellman_iterations=2,
    twin_q=True,
    hidden_sizes=(8,),
    batch_size=16,
    learning_starts=100,
    updates_per_step=2,
    total_timesteps=600,
    epoch_steps=300,
    log_period_steps=70,
    normalise_rewards=True,
)
ONE_GAME = {"episodes": 1, "seed": 0, "epsilon": 0.0, "max_episode_steps": 1_000}
CARTPOLE = PENDULUM.replace(
    env_id="dm_control/cartpole-swingup-v0",
    torso="simba",
    critic_width=8,
    policy_width=8,
    num_atoms=11,
    twin_q=False,
    total_timesteps=1_000,
    epoch_steps=500,
    learning_starts=300,
)


@pytest.mark.parametrize("config", [PENDULUM, CARTPOLE], ids=["gymnasium", "dm_control"])
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(config, tmp_path, monkeypatch):
    """It stops in the middle of episodes: the seed and the continuous actions restore the simulator exactly."""
    run.start(config, tmp_path / "whole", quiet=True)
    folder = tmp_path / "parts"
    record.create_run(folder, config)
    for calls in (250, 130, 150):
        stop_after(monkeypatch, calls)
        with pytest.raises(Interrupted):
            run.resume(folder, quiet=True)
    monkeypatch.undo()
    run.resume(folder, quiet=True)
    assert_same(final(tmp_path / "whole"), final(folder))


# -- the compiled loop

COMPILED = PENDULUM.replace(loop="compiled", num_seeds=2, seed=3, checkpoint_minutes=0.0, normalise_rewards=False)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Train two seeds in one program."""
    return run.start(COMPILED, tmp_path_factory.mktemp("runs") / "compiled", quiet=True)


def test_two_seeds_resume_in_the_compiled_loop_to_the_same_bits(compiled, tmp_path, monkeypatch):
    stop_after(monkeypatch, 4)  # at step 280, within the first epoch
    with pytest.raises(Interrupted):
        run.start(COMPILED, tmp_path / "cut", quiet=True)
    monkeypatch.undo()
    assert checkpoint.steps(tmp_path / "cut" / "seed-3")[0] == 280
    run.resume(tmp_path / "cut" / "seed-4", quiet=True)
    for folder in compiled:
        assert_same(final(tmp_path / "cut" / folder.name), final(folder))


def test_the_compiled_loop_plays_the_pendulum_of_gymnasium(compiled):
    """Each stored step is one of Gymnasium's: its action, in [-1, 1], is a torque of up to 2."""
    env = gym.make("Pendulum-v1").unwrapped
    env.reset(seed=0)
    for folder in compiled:
        newest = checkpoint.read_manifest(checkpoint.folder_of(folder, checkpoint.steps(folder)[0]))
        files = [load_file(folder / "replay" / file["name"]) for file in newest["replay"]["files"]]
        rows = {name: np.concatenate([file[name] for file in files]) for name in files[0]}
        assert rows["action"].shape == (600, 1)
        assert 0.9 < np.abs(rows["action"]).max() <= 1
        for obs, action, reward, next_obs in zip(
            *(rows[n] for n in ("obs", "action", "reward", "next_obs")), strict=True
        ):
            env.state = np.array([np.arctan2(obs[1], obs[0]), obs[2]], np.float64)
            expected, expected_reward, *_ = env.step(2 * action)
            np.testing.assert_allclose(next_obs, expected, atol=1e-4)
            assert reward == pytest.approx(expected_reward, abs=1e-3)
        assert [episode["length"] for episode in read_table(folder / "episodes.csv")] == ["200"] * 3
    (game,) = isqn.evaluate(isqn.Model.load(compiled[0]), episodes=1)
    assert game.length == 200


def test_updates_and_probes_in_the_compiled_loop(tmp_path):
    """The first update comes after step 101, as in the host loop, and each step has two."""
    config = COMPILED.replace(total_timesteps=280, epoch_steps=280, analysis=True, analysis_samples=50)
    for folder in run.start(config, tmp_path, quiet=True):
        *_, row = read_table(folder / "metrics.csv")
        assert int(row["updates"]) == 2 * (280 - 100)
        assert {"effective_rank", "dormant_share", "head_cosine", "entropy", "temperature"} <= row.keys()
    (folder,) = run.start(config.replace(loop="host", num_seeds=1), tmp_path / "host", quiet=True)
    (updates,) = [row["updates"] for row in read_table(folder / "metrics.csv") if row["step"] == "280"]
    assert int(updates) == 2 * (280 - 100)


def test_a_run_without_a_loop_in_its_config_is_trained_in_the_host_loop(tmp_path):
    """Runs of earlier versions have no such line; their bits are those of the host loop."""
    record.create_run(tmp_path, PENDULUM)
    file = tmp_path / "config.toml"
    lines = file.read_text().splitlines()
    assert 'loop = "host"' in lines
    file.write_text("\n".join(line for line in lines if not line.startswith(("loop =", "num_seeds ="))))
    config = record.read_config(tmp_path)
    assert config == PENDULUM
    assert not uses_compiled_loop(config)
    assert uses_compiled_loop(config.replace(loop="auto"))
    assert uses_compiled_loop(config.replace(loop="compiled"))


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "k"), [("target-based", 1), ("target-free", 1), ("iterated-shared", 9)])
def test_a_run_at_the_size_of_the_paper_resumes_to_the_same_bits(scheme, k, tmp_path, monkeypatch):
    config = preset_config("dmc-hard").replace(scheme=scheme, num_bellman_iterations=k, learning_starts=480)
    config = config.replace(total_timesteps=500, epoch_steps=500, log_period_steps=10)
    run.start(config, tmp_path / "whole", quiet=True)
    record.create_run(tmp_path / "parts", config)
    stop_after(monkeypatch, 490)
    with pytest.raises(Interrupted):
        run.resume(tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    run.resume(tmp_path / "parts", quiet=True)
    assert_same(final(tmp_path / "whole"), final(tmp_path / "parts"))
    assert int(read_table(tmp_path / "parts" / "metrics.csv")[-1]["updates"]) == 40


def test_the_command_line_trains_evaluates_and_probes(tmp_path, capsys):
    folder = str(tmp_path / "run")
    flags = "--total-timesteps 400 --epoch-steps 400 --learning-starts 200 --hidden-sizes 8 --batch-size 16 --quiet"
    assert main(["train", "sac", "--env-id", "Pendulum-v1", "--k", "3", "--run-dir", folder, *flags.split()]) == 0
    assert main(["eval", folder, "--episodes", "2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["label"], first["epsilon"], first["acting_rule"]) == ("iS-SAC K=3", 0.0, "mean")
    assert main(["eval", folder, "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert main(["eval", folder, "--episodes", "2", "--acting-rule", "sample", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] != first["episodes"]
    assert main(["probe", folder, "--samples", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    probes = {"effective_rank", "dormant_share", "head_cosine", "batch_norm_deviation"}
    assert found.keys() == {"label", "step", *probes}
    assert 1 <= found["effective_rank"] <= 8
    assert -1 <= found["head_cosine"] <= 1
    assert main(["probe", folder, "--metric", "target-churn"]) == 1
    assert "--metric target-churn is not for iS-SAC K=3; choose one of effective-rank" in capsys.readouterr().err


def test_probes_during_training(tmp_path):
    run.start(CARTPOLE.replace(analysis=True, analysis_samples=100), tmp_path, quiet=True)
    rows = read_table(tmp_path / "metrics.csv")
    assert {"effective_rank", "dormant_share", "head_cosine", "entropy", "temperature"} <= rows[-1].keys()
    assert 0 < float(rows[-1]["batch_norm_deviation"]) < 0.5  # inputs of length 1 have small deviations
    assert int(rows[-1]["updates"]) == 2 * (int(rows[-1]["step"]) - CARTPOLE.learning_starts)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("train sac --env-id CartPole-v1", "The actions of CartPole-v1 are a finite set; use the agent dqn or"),
        ("train dqn --env-id Pendulum-v1", "The actions of Pendulum-v1 are continuous; use the agent sac."),
        ("train sac --acting-rule last", "--acting-rule is 'last'; choose one of sample, mean."),
        ("train dqn --acting-rule sample", "--acting-rule is 'sample'; choose one of uniform, episode, mean, last."),
        (
            "train sac --loss huber",
            "`isqn train sac` has no flag --loss; it is for `isqn train dqn` or `isqn train cql`, not for sac.",
        ),
        (
            "train sac --num-seeds 2",
            "--num-seeds 2 needs the compiled loop, for environments written in JAX; add --loop compiled, or train",
        ),
        ("train sac --env-id MountainCarContinuous-v0 --loop compiled", "--loop compiled needs an environment written"),
        ("train dqn --torso simba", "--torso simba needs a projection of its weights after each gradient step,"),
        ("train sac --torso nature", "--torso nature needs images"),
        ("train sac --num-atoms 0", "--num-atoms is 0; it must be at least 1."),
        ("train sac --value-bound -1", "--value-bound is -1.0; it must be above 0."),
        ("train sac --target-entropy-per-action 5", "must be below 0.693, the entropy of uniform actions."),
        ("train sac --env-id Pendulum", "--env-id Pendulum leaves open which version is meant; write Pendulum-v"),
        ("cost dmc-hard --game Asterix", "--game is for presets of ALE; dmc-hard is of dm_control/dog-walk-v0."),
        ("train sac --env-id dm_control/dog-wak-v0", "did you mean dm_control/dog-walk-v0"),
        ("train sac --critic-width 64", "--critic-width has no effect in this run: it needs --torso simba."),
        (
            "train sac --preset dmc-small --layer-norm",
            "it needs --torso auto or mlp or minatar or nature or impala or st",
        ),
        ("train dqn --torso nature --hidden-sizes 8", "it needs --torso auto or mlp."),
        ("train sac --scheme target-based --batch-norm-kind renorm", "it needs --joint-batch-norm yes."),
        ("train dqn --munchausen-weight 0.5", "it needs --loss munchausen."),
        (
            "train sac --scheme target-based --k 9",
            "--k has no effect in this run: it needs a",
        ),
        ("train sac --scheme target-free --tau 0.1", "it needs another --scheme than target-free."),
        ("train dqn --target-sync-period 5", "it needs --scheme iterated-target-based and --k above 1."),
        ("cost dmc-hard --task dog-wlk", "did you mean dm_control/dog-walk-v0"),
        ("cost dmc-hard --task dog-walk --game Pong", "give one of them"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(argv, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv.split()) in (1, 2)
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_facade_learns_predicts_saves_and_loads(tmp_path):
    """Actions are in the units of the environment: up to 2 for a pendulum."""
    model = isqn.Model("sac", env="Pendulum-v1", hidden_sizes=(8,), batch_size=16, learning_starts=100, seed=1)
    assert model.spec.id == "Pendulum-v1"
    model.learn(400)
    env = gym.make("Pendulum-v1")
    obs, _ = env.reset(seed=0)
    action, _ = model.predict(obs)
    assert env.action_space.contains(action)
    many, _ = model.predict(np.repeat(obs[None], 50, axis=0), deterministic=False)
    assert many.shape == (50, 1)
    assert len(np.unique(many)) == 50
    model.save(tmp_path / "model")
    again = isqn.Model.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(obs)[0], action)
    returns = [episode.episodic_return for episode in isqn.evaluate(again, episodes=2)]
    assert returns == [episode.episodic_return for episode in isqn.evaluate(model, env, episodes=2)]
    with pytest.raises(UserError, match="learns from vectors only"):
        isqn.Model("sac", env=ImageEnv())


def test_a_model_refuses_an_environment_with_other_action_bounds(tmp_path):
    isqn.Model("sac", env="Pendulum-v1", hidden_sizes=(8,)).save(tmp_path / "model")
    env = gym.make("Pendulum-v1")
    env.unwrapped.action_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    with pytest.raises(UserError, match=r"with actions from \(-2.0,\) to \(2.0,\); those of Pendulum-v1 are from \(-9"):
        isqn.Model.load(tmp_path / "model", env=env)


def test_evaluations_observe_as_the_agent_says():
    """The moments of soft actor-critic stay as they are; an agent with `observe_eval` moves them on."""
    model = isqn.Model("sac", env="Pendulum-v1", hidden_sizes=(8,))

    def observe(*_):
        raise AssertionError("counted")

    agent = model._agent._replace(observe=observe)
    with pytest.raises(AssertionError, match="counted"):
        evaluate(agent._replace(observe_eval=observe), model.state, make_environment("Pendulum-v1"), **ONE_GAME)
    (played,) = evaluate(agent, model.state, make_environment("Pendulum-v1"), **ONE_GAME)
    assert played.length == 200


class ImageEnv(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize("scale", ["mini", "paper"])
def test_the_study_of_continuous_control(scale):
    study = find_study("continuous", scale)
    labels = [cell.config.label for cell in study.cells if cell.task == study.cells[0].task]
    assert labels == ["TB-SAC", "TB-SAC", "TF-SAC", "iS-SAC K=1", "iS-SAC K=9"]
    assert [cell.method for cell in study.cells[:2]] == ["TB-SAC", "TB-SAC, BN"]
    assert [cell.config.uses_batch_norm for cell in study.cells[:5]] == [False, True, True, True, True]
    assert all(cell.config.analysis for cell in study.cells)
    assert all(cell.config.torso == "simba" and cell.config.num_atoms == 101 for cell in study.cells)
    assert len(study.seeds) == (10 if scale == "paper" else 5)
