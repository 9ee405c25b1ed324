"""`isqn.Model`: making, learning, acting, saving and loading."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import gymnasium as gym
import jax
import numpy as np
import pytest

import isqn
from isqn.agents.registry import read_config_file
from isqn.data.text import read_table
from isqn.envs.toy import ToyEnvironment
from isqn.train import checkpoint, record, run
from isqn.types import UserError

SETTINGS = {
    "hidden_sizes": (8,),
    "loop": "host",
    "total_timesteps": 300,
    "epoch_steps": 150,
    "learning_starts": 50,
    "log_period_steps": 50,
    "target_update_period": 20,
    "epsilon_decay_steps": 200,
    "buffer_size": 1_000,
}
CHAIN = np.eye(8, dtype=np.float32)
STORED = Path(__file__).parent / "data" / "model-0.1.0"


def make(**fields):
    return isqn.Model("dqn", env="isqn/Chain-v0", scheme=isqn.iterated_shared(2), **{**SETTINGS, **fields})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a trained model that all tests share; no test may change it."""
    return make().learn(run_dir=tmp_path_factory.mktemp("model") / "run")


@pytest.fixture(scope="module")
def run_dir(model):
    return model._run_dir


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "chain"
    model.save(folder)
    return folder


def same_state(left, right) -> bool:
    leaves = zip(jax.tree.leaves(left.state), jax.tree.leaves(right.state), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


# -- making -------------------------------------------------------------------------------------------------


def test_settings_come_from_the_preset_the_scheme_and_the_fields(model):
    assert model.config.label == "iS-DQN K=2"
    assert model.config.discount == 0.9  # of the preset that fits the environment
    assert model.config.hidden_sizes == (8,)
    assert isqn.Model(env="isqn/Chain-v0", preset="classic", hidden_sizes=(3,)).config.discount == 0.99
    assert isqn.Model(env_id="isqn/Chain-v0", k=3, gamma=0.8).config.label == "iS-DQN K=3"


def test_unknown_names_and_invalid_settings_are_refused():
    with pytest.raises(UserError, match="algorithm 'ppo' is not known; choose one of dqn, stream-q, sac"):
        isqn.Model("ppo")
    with pytest.raises(UserError, match=r"The preset 'toi' is not known; did you mean toy\?"):
        isqn.Model(env="isqn/Chain-v0", preset="toi")
    with pytest.raises(UserError, match=r"'isqn/Chian-v0' is not a known environment; did you mean isqn/Chain-v0\?"):
        isqn.Model(env="isqn/Chian-v0")
    with pytest.raises(UserError, match=r"isqn\.Model: batch_size is 0; it must be at least 1"):
        isqn.Model(env="isqn/Chain-v0", batch_size=0)
    with pytest.raises(UserError, match=r"isqn\.Model: k is 0; it must be between 1 and 1000"):
        isqn.Model(env="isqn/Chain-v0", k=0)
    with pytest.raises(UserError, match=r"isqn\.Model: scheme has its number of pairs already; leave num_bellman"):
        make(k=3)
    with pytest.raises(UserError, match=r"isqn\.Model: env and env_id are the same setting; give one"):
        make(env_id="CartPole-v1")
    with pytest.raises(UserError, match=r"isqn.Model sets 'learning_rte', .* did you mean learning_rate\?"):
        isqn.Model(env="isqn/Chain-v0", learning_rte=0.1)
    with pytest.raises(UserError, match="scheme is 'iterated-shared'; it must come from isqn"):
        isqn.Model(env="isqn/Chain-v0", scheme="iterated-shared")
    for env in (3, ToyEnvironment):
        with pytest.raises(UserError, match=r"An environment is an id or a gymnasium.Env; .* is neither"):
            isqn.Model(env=env)


def test_a_model_is_not_saved_over_other_files(model, tmp_path, monkeypatch):
    (tmp_path / "work" / "model").mkdir(parents=True)
    (tmp_path / "work" / "thesis.tex").write_text("mine")
    for path in (tmp_path / "work", tmp_path / "work" / "thesis.tex"):
        with pytest.raises(UserError, match="holds something else; save to a folder of its own"):
            model.save(path)
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UserError, match="holds something else"):
        model.save("")
    model.save("saved")
    model.save("saved")  # over itself it may go


def test_evaluating_no_episode_is_refused(model):
    with pytest.raises(UserError, match="episodes is 0; it must be a whole number of at least 1"):
        isqn.evaluate(model, episodes=0)


# -- learning -------------------------------------------------------------------------------------------------


def test_learn_trains_a_normal_run(model, run_dir, tmp_path):
    """Training the same config by `run.start` gives the same parameters."""
    assert model.num_timesteps >= 300
    assert record.read_summary(run_dir)["status"] == "finished"
    run.start(read_config_file(run_dir / "config.toml"), tmp_path / "again", quiet=True)
    assert same_state(isqn.Model.load(tmp_path / "again"), model)


def test_learn_twice_equals_one_longer_run(tmp_path):
    parts = make().learn(150, run_dir=tmp_path / "parts")
    first, rows = parts.num_timesteps, read_table(tmp_path / "parts" / "episodes.csv")
    assert parts.learn(150) is parts
    assert parts.num_timesteps >= first + 150
    longer = read_table(tmp_path / "parts" / "episodes.csv")
    assert longer[: len(rows)] == rows
    assert [int(row["episode"]) for row in longer] == list(range(len(longer)))
    assert len(record.read_summary(tmp_path / "parts")["epoch_returns"]) == 2
    whole = make().learn(300, run_dir=tmp_path / "whole")
    assert same_state(parts, whole)
    assert parts.num_timesteps == whole.num_timesteps


def test_learning_in_parts_takes_the_steps_that_were_asked_for(tmp_path):
    """In the compiled loop too, where an epoch (150 steps) may be cut short and then goes on."""
    parts = make(loop="compiled", epoch_steps=100).learn(152, run_dir=tmp_path / "parts").learn(48)
    whole = make(loop="compiled", epoch_steps=100).learn(200, run_dir=tmp_path / "whole")
    assert parts.num_timesteps == whole.num_timesteps == 200
    assert same_state(parts, whole)
    returns = [record.read_summary(tmp_path / name)["epoch_returns"] for name in ("parts", "whole")]
    assert returns[0] == returns[1]


def test_a_model_has_one_seed():
    sentence = "num_seeds is 3; it must be 1 for a Model; `isqn train` and `isqn study` train several seeds"
    with pytest.raises(UserError, match=re.escape(sentence)):
        make(loop="compiled", num_seeds=3)


def test_a_refused_folder_is_left_unchanged(run_dir, tmp_path):
    other = make(seed=1)
    before = (run_dir / "config.toml").read_text()
    for _ in range(2):
        with pytest.raises(UserError, match="holds a finished run; choose another run_dir"):
            other.learn(run_dir=run_dir)
    assert (run_dir / "config.toml").read_text() == before
    other.learn(60, run_dir=tmp_path / "mine")
    with pytest.raises(UserError, match=r"This model learns in .*mine; it cannot go on in .*else"):
        other.learn(60, run_dir=tmp_path / "else")


@pytest.mark.parametrize("steps", [0, -5])
def test_learning_without_a_step_is_refused(model, steps):
    with pytest.raises(UserError, match=f"total_timesteps is {steps}; it must be a whole number of at least 1"):
        model.learn(steps)


def test_a_loaded_model_cannot_continue_learning(saved):
    loaded = isqn.Model.load(saved)
    for _ in range(2):
        with pytest.raises(UserError, match=r"A loaded model cannot continue training: .* `isqn resume RUN_DIR`"):
            loaded.learn(100)


def test_a_given_environment_object_is_used(tmp_path):
    env = ToyEnvironment("isqn/Chain-v0")
    steps = 0

    class Counted(gym.Wrapper):
        def step(self, action):
            nonlocal steps
            steps += 1
            return super().step(action)

    model = isqn.Model("dqn", env=Counted(env), scheme=isqn.iterated_shared(2), **{**SETTINGS, "loop": "auto"})
    assert model.spec.id == "ToyEnvironment"
    model.learn(100, run_dir=tmp_path / "run")
    assert steps == model.num_timesteps
    played = isqn.evaluate(model, episodes=2)  # in its own environment: there is no id to make one from
    assert steps == model.num_timesteps + sum(episode.length for episode in played)
    model.save(tmp_path / "saved")
    loaded = isqn.Model.load(tmp_path / "saved")  # the environment is not needed to act
    assert np.array_equal(loaded.predict(CHAIN)[0], model.predict(CHAIN)[0])
    assert isqn.evaluate(loaded, ToyEnvironment("isqn/Chain-v0"), episodes=2) == played


# -- acting -------------------------------------------------------------------------------------------------


def greedy(model) -> np.ndarray:
    """Return the greedy actions by the mean of the online heads, computed from the parameters."""
    params = jax.tree.map(np.asarray, model.state.params)
    layer = params["torso"]["Dense_0"]
    features = np.maximum(CHAIN @ layer["kernel"] + layer["bias"], 0)
    q = np.einsum("bf,hfa->bha", features, params["heads"]["kernel"]) + params["heads"]["bias"]
    return q[:, 1:].mean(axis=1).argmax(axis=-1)


def test_deterministic_actions_are_greedy_in_the_mean_of_the_online_heads(model):
    actions, nothing = model.predict(CHAIN)
    assert nothing is None
    assert actions.shape == (8,)
    assert np.array_equal(actions, greedy(model))
    assert all(np.array_equal(model.predict(CHAIN)[0], actions) for _ in range(5))


def test_an_observation_gives_a_number_and_a_batch_gives_an_array(model):
    one, _ = model.predict(CHAIN[3])
    assert type(one) is int
    batch, _ = model.predict(CHAIN[3:4])
    assert batch.shape == (1,)
    assert batch[0] == one == greedy(model)[3]
    assert model.predict(list(CHAIN[3]))[0] == one


def test_stochastic_actions_are_those_of_training(tmp_path):
    """The last epsilon is 1 here: both actions occur, and a loaded copy draws the same ones."""
    model = make(epsilon_end=1.0)
    draws = [model.predict(CHAIN[0], deterministic=False)[0] for _ in range(40)]
    assert set(draws) == {0, 1}
    model.save(tmp_path / "m")
    again = isqn.Model.load(tmp_path / "m")
    assert [again.predict(CHAIN[0], deterministic=False)[0] for _ in range(40)] == draws


class Numbers(gym.Env):
    """States 3, 4 and 5; of the actions 7 and 8, the last one has a reward of 1."""

    observation_space = gym.spaces.Discrete(3, start=3)
    action_space = gym.spaces.Discrete(2, start=7)

    def reset(self, *, seed=None, options=None):
        self.state = 3
        return self.state, {}

    def step(self, action):
        assert action in (7, 8)
        self.state += 1
        return self.state, float(action == 8), self.state == 5, False, {}


def test_observations_and_actions_are_those_of_the_environment(tmp_path):
    env = Numbers()
    model = isqn.Model("dqn", env=env, **{**SETTINGS, "hidden_sizes": (), "learning_rate": 0.1}).learn()
    model.save(tmp_path / "saved")
    for one in (model, isqn.Model.load(tmp_path / "saved")):
        obs, _ = env.reset()
        assert one.predict(obs) == (8, None)
        assert env.step(one.predict(obs)[0])[1] == 1
        assert one.predict([3, 4])[0].tolist() == one.predict(np.eye(3)[:2])[0].tolist() == [8, 8]
        with pytest.raises(UserError) as error:
            one.predict(6)
        assert str(error.value) == "The observations of Numbers are the numbers 3 to 5."
    loaded = isqn.Model.load(tmp_path / "saved", env=env)
    assert [e.episodic_return for e in isqn.evaluate(loaded, episodes=2, epsilon=0.0)] == [2, 2]


@pytest.mark.parametrize("shape", [(), (7,), (16,), (2, 4), (3, 9), (2, 3, 8)])
def test_an_observation_of_another_shape_is_refused(model, shape):
    with pytest.raises(UserError) as error:
        model.predict(np.zeros(shape))
    assert str(error.value) == f"The observation has shape {shape}; isqn/Chain-v0 observes (8,)."


def test_evaluation_depends_on_its_seed_only(model):
    played = isqn.evaluate(model, episodes=3, epsilon=0.5)
    assert isqn.evaluate(model, episodes=3, epsilon=0.5) == played
    assert isqn.evaluate(model, episodes=3, epsilon=0.5, seed=7) != played
    assert isqn.evaluate(model, "isqn/Chain-v0", episodes=3, epsilon=0.5) == played
    assert [episode._fields for episode in played] == [("seed", "episodic_return", "length")] * 3


# -- saving -------------------------------------------------------------------------------------------------


def test_a_loaded_model_equals_the_saved_one(model, saved):
    loaded = isqn.Model.load(saved)
    assert same_state(loaded, model)
    assert (loaded.config, loaded.spec, loaded.num_timesteps) == (model.config, model.spec, model.num_timesteps)
    assert isqn.evaluate(loaded, episodes=5, epsilon=0.3) == isqn.evaluate(model, episodes=5, epsilon=0.3)
    assert repr(loaded) == repr(model) == f"Model('iS-DQN K=2', \"isqn/Chain-v0\", {model.num_timesteps:,} steps)"


def test_saving_again_replaces_the_model(model, tmp_path):
    make(seed=5).save(tmp_path / "m")
    model.save(tmp_path / "m")
    assert same_state(isqn.Model.load(tmp_path / "m"), model)
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["config.toml", "model"]


def test_a_run_folder_is_loaded_as_a_model(model, run_dir):
    loaded = isqn.Model.load(run_dir)
    assert same_state(loaded, model)
    assert loaded.num_timesteps == model.num_timesteps
    with pytest.raises(UserError, match=r"is a run, which `Model\.load` reads as it is; save to another folder"):
        loaded.save(run_dir)


def test_a_folder_that_is_neither_model_nor_run_is_refused(tmp_path):
    with pytest.raises(UserError) as error:
        isqn.Model.load(tmp_path)
    assert str(error.value) == f"{tmp_path} is neither a saved model nor a run: there is no config.toml in it."


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("state.safetensors", lambda b: b[:-1] + b"x", "/state.safetensors does not match its checksum"),
        ("state.safetensors", None, " cannot be read: [Errno 2] No such file or directory: "),
        ("manifest.json", lambda b: b.replace(b"model", b"modle", 1), "/manifest.json does not match its checksum"),
        (
            "manifest.json",
            lambda b: b[:50],
            "/manifest.json, line 2, is damaged: it is not JSON (Unterminated",
        ),
        ("manifest.json", lambda b: b"{}", "/manifest.json does not match its checksum"),
    ],
    ids=["changed", "missing", "manifest changed", "manifest cut", "manifest empty"],
)
def test_a_damaged_model_is_refused_in_a_sentence(saved, tmp_path, name, change, sentence):
    folder = tmp_path / "m"
    shutil.copytree(saved, folder)
    path = folder / "model" / name
    if change is None:
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(change(content))
        assert path.read_bytes() != content
    with pytest.raises(UserError) as error:
        isqn.Model.load(folder)
    assert str(error.value).startswith(f"{folder} cannot be loaded: {folder}/model{sentence}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "hidden_sizes = [8]",
            "hidden_sizes = [9]",
            "agent.params.heads.kernel is float32[3, 8, 2] there and float32[3, 9, 2] here.",
        ),
        (
            "num_bellman_iterations = 2",
            "num_bellman_iterations = 1",
            "agent.params.heads.bias is float32[3, 2] there and float32[2, 2] here.",
        ),
        ("hidden_sizes = [8]", "hidden_sizes = [8, 8]", "agent.optimizer.0.mu.torso.Dense_1.bias, "),
    ],
)
def test_a_config_that_does_not_match_the_parameters_is_refused(saved, tmp_path, old, new, sentence):
    folder = tmp_path / "m"
    shutil.copytree(saved, folder)
    text = (folder / "config.toml").read_text()
    assert old in text
    (folder / "config.toml").write_text(text.replace(old, new))
    with pytest.raises(UserError) as error:
        isqn.Model.load(folder)
    assert str(error.value).startswith(f"{folder} does not fit this configuration: {sentence}")


def test_a_model_of_a_future_format_is_refused(saved, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(saved, folder)
    arrays, manifest = checkpoint.read(folder / "model")
    checkpoint.write(folder / "model", arrays, manifest | {"format": 99})
    with pytest.raises(UserError, match="has checkpoint format 99; this version reads format 1"):
        isqn.Model.load(folder)


def test_a_model_of_an_earlier_release_acts_as_it_did():
    """tests/data/model-0.1.0 was saved by isqn 0.1.0, with its actions of that time."""
    recorded = json.loads((STORED / "expected.json").read_text())
    model = isqn.Model.load(STORED)
    assert model.config.label == recorded["label"]
    assert model.num_timesteps == recorded["num_timesteps"]
    assert model.predict(CHAIN)[0].tolist() == recorded["actions"]
    q, _ = model._agent.network.apply(model.state.params, model.state.statistics, CHAIN)
    np.testing.assert_allclose(q, recorded["q"], rtol=0, atol=1e-5)
    played = [[e.seed, e.episodic_return, e.length] for e in isqn.evaluate(model, episodes=3, epsilon=0.0)]
    assert played == recorded["episodes"]
    assert sum(path.stat().st_size for path in STORED.rglob("*") if path.is_file()) < 20_000


def test_an_environment_of_other_shapes_is_refused(tmp_path):
    model = isqn.Model("dqn", env="CartPole-v1")
    model.save(tmp_path / "model")
    other = gym.make("Acrobot-v1")
    sentence = r"made for CartPole-v1, with observations \(4,\) and 2 actions; Acrobot-v1 has \(6,\) and 3"
    with pytest.raises(UserError, match=sentence):
        isqn.Model.load(tmp_path / "model", env=other)
    with pytest.raises(UserError, match=sentence):
        isqn.evaluate(model, other, episodes=1)


@pytest.mark.parametrize("obs", ["hello", [0.0, 0.0, np.nan, 0.0], [None] * 4], ids=str)
def test_an_observation_that_is_not_finite_numbers_is_refused(obs):
    with pytest.raises(UserError, match="The observation must contain only finite numbers, but is"):
        isqn.Model("dqn", env="CartPole-v1").predict(obs)


def test_what_is_not_an_environment_or_a_model_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"isqn\.Model needs an environment: an id such as env='CartPole-v1', or a gym"):
        isqn.Model("dqn")
    for wrong in ("cartpole", None):
        with pytest.raises(UserError, match=rf"model is {wrong!r}; it must be an isqn\.Model"):
            isqn.evaluate(wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/m cannot be written \(Not a directory\); choose another path\."):
        isqn.Model("dqn", env="isqn/Chain-v0", hidden_sizes=()).save(tmp_path / "file" / "m")
