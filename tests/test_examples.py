"""The examples of docs/extend.md: each one runs, does what it says, and is quoted as it is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isqn
from helpers import SMALL, random_batch, registries_restored
from isqn.agents import dqn
from isqn.agents.dqn import DqnConfig
from isqn.agents.registry import make_config
from isqn.cli import main
from isqn.imports import import_all
from isqn.schemes import make_scheme, refresh
from isqn.train import record, run
from isqn.train.online import uses_compiled_loop
from isqn.types import Transition, UserError, Values

ROOT = Path(__file__).parents[1]
# Examples in the order of the page, each with the most lines it may have.
EXAMPLES = {
    "new_loss": 40,
    "new_scheme": 40,
    "new_torso": 40,
    "new_agent": 80,
    "new_environment": 40,
    "new_native_environment": 40,
}
QUICK = "--quiet --loop host --total-timesteps 300 --epoch-steps 150 --learning-starts 50 --log-period-steps 150"


def path(name: str) -> str:
    return str(ROOT / "examples" / f"{name}.py")


@pytest.fixture
def load():
    """Import an example as `--import` does; what it registers is forgotten after the test."""

    def import_example(name: str):
        import_all([path(name)])
        return next(
            module for key, module in sys.modules.items() if key.startswith("isqn_import_") and key.endswith(name)
        )

    with registries_restored():
        yield import_example


def test_the_page_quotes_the_files():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)
    assert blocks == [Path(path(name)).read_text() for name in EXAMPLES]
    assert sorted(file.stem for file in (ROOT / "examples").glob("*.py")) == sorted(EXAMPLES)


@pytest.mark.parametrize(("name", "limit"), EXAMPLES.items())
def test_an_example_is_short_and_says_how_to_run_it(name, limit):
    text = Path(path(name)).read_text()
    assert len(text.splitlines()) <= limit
    assert f"\n\nisqn train {'boltzmann' if name == 'new_agent' else 'dqn'} --import examples/{name}.py " in text


def test_new_loss(load, tmp_path):
    loss = load("new_loss").expectile
    values = Values(now=jnp.array([1.0, 5.0]), next=jnp.array([4.0, 2.0]))
    too_low = Transition(obs=None, action=0, reward=1.0, discount=0.5, next_obs=None)  # 1 + 0.5 x 4 = 3, not 1
    assert loss(values, values, too_low, optimism=0.7) == pytest.approx(0.7 * 2**2)
    assert loss(values, values, too_low._replace(action=1), optimism=0.7) == pytest.approx(0.3 * 2**2)

    model = isqn.Model("dqn", env="isqn/Chain-v0", loss="expectile", hidden_sizes=(), learning_rate=0.03, optimism=0.7)
    assert model.config.label == "iS-Expectile K=1"
    states = np.eye(8, dtype=np.float32)[:-1]  # the last one ends the episode
    assert not (model.predict(states)[0] == 1).all()
    model.learn(3_000, run_dir=tmp_path / "run")
    assert (model.predict(states)[0] == 1).all()  # to the right, from everywhere


def test_a_setting_of_a_new_loss_is_a_setting_like_any_other(load, tmp_path, monkeypatch, capsys):
    load("new_loss")
    monkeypatch.setattr(run, "train", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        main(["train", "dqn", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "--optimism FLOAT" in help_text
    assert "Weight of positive errors, in [0, 1]; 0.5 is half the squared error of DQN. (default: 0.6)" in help_text

    words = ["train", "dqn", "--loss", "expectile", "--optimism", "0.8", "--run-dir", str(tmp_path / "run")]
    assert main([*words, "--quiet"]) == 0
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "# Weight of positive errors, in [0, 1]; 0.5 is half the squared error of DQN.\noptimism = 0.8\n" in text
    assert record.read_config(tmp_path / "run").optimism == 0.8

    for flags, sentence in (
        ("--loss expectile --optimism 2", "--optimism is 2.0; it must be between 0 and 1."),
        ("--optimism 0.8", "--optimism has no effect in this run: it needs --loss expectile."),
    ):
        capsys.readouterr()
        assert main(["train", "dqn", *flags.split(), "--quiet"]) == 1
        assert capsys.readouterr().err == f"isqn: {sentence}\n"


def test_new_scheme(load, tmp_path, monkeypatch):
    scheme = load("new_scheme").two_chains(3)
    assert make_scheme("two-chains", 3) == scheme
    agent = dqn.make(DqnConfig(scheme="two-chains", num_bellman_iterations=3, hidden_sizes=(5,)), SMALL)
    state = agent.init(0)
    grads = jax.grad(lambda p: agent.losses(p, {}, (), random_batch())[0].sum())(state.params)
    learns = [bool(np.any(head != 0)) for head in grads["heads"]["kernel"]]
    assert learns == [False, True, True, True] * 2

    numbered = {"torso": {}, "heads": {"bias": jnp.arange(8.0)}}
    shifted, _ = refresh(scheme, numbered, ())
    np.testing.assert_array_equal(shifted["heads"]["bias"], [1, 2, 3, 3, 5, 6, 7, 7])

    monkeypatch.chdir(tmp_path)
    assert main(["train", "dqn", "--scheme", "two-chains", "--k", "3", *QUICK.split()]) == 0
    summary = record.read_summary(tmp_path / "runs" / "default" / "isqn-Chain-v0" / "2iS-DQN-K3" / "seed-0")
    assert (summary["status"], summary["label"]) == ("finished", "2iS-DQN K=3")


def test_new_torso(load, tmp_path):
    load("new_torso")
    model = isqn.Model("dqn", env="CartPole-v1", torso="fourier")
    frequencies, hidden, heads = 4 * 64 + 64, 128 * 128 + 128, 2 * (128 * 2 + 2)
    assert sum(leaf.size for leaf in jax.tree.leaves(model.state.params)) == frequencies + hidden + heads
    half = isqn.Model("dqn", env="CartPole-v1", torso="fourier", width_factor=0.5, layer_norm=True)
    assert half.state.params["heads"]["kernel"].shape == (2, 64, 2)
    assert "LayerNorm" in str(jax.tree_util.tree_structure(half.state.params))

    run_dir = tmp_path / "run"
    words = ["train", "dqn", "--torso", "fourier", "--env-id", "CartPole-v1", *QUICK.split()]
    assert main([*words, "--run-dir", str(run_dir)]) == 0
    trained = isqn.Model.load(run_dir)
    for before, after in zip(jax.tree.leaves(model.state.params), jax.tree.leaves(trained.state.params), strict=True):
        assert np.isfinite(after).all()
        assert not np.array_equal(before, after)


def test_new_torso_of_a_critic_and_of_a_policy(load):
    """A pendulum has 3 numbers and 1 action: two heads with an output, and two outputs of the policy."""
    load("new_torso")
    settings = {"torso": "fourier", "twin_q": False, "scheme": isqn.iterated_shared(1)}
    state = isqn.Model("sac", env="Pendulum-v1", **settings).state
    hidden = 128 * 128 + 128
    critic, policy = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.params, state.policy.network))
    batch_norm = 2 * 128  # of the critic, because there is no target network
    assert critic == (4 * 64 + 64) + hidden + 2 * (128 + 1) + batch_norm
    assert policy == (3 * 64 + 64) + hidden + 2 * (128 + 1)


def test_new_agent(load, tmp_path, monkeypatch, capsys):
    """An agent that shares no config with those of the package learns its values, and works with every command."""
    load("new_agent")
    assert make_config("boltzmann").label == "iS-Boltzmann K=1"
    with pytest.raises(SystemExit):
        main(["train", "boltzmann", "--help"])
    help_text = capsys.readouterr().out
    assert "Expected SARSA with a softmax policy and a replay buffer." in help_text
    assert "--loss" not in help_text

    run_dir = str(tmp_path / "run")
    words = ["--hidden-sizes", "--learning-rate", "0.03", "--temperature", "0.3", "--discount", "0.9"]
    words += ["--total-timesteps", "8_000", "--target-update-period", "50", "--quiet", "--run-dir", run_dir]
    assert main(["train", "boltzmann", "--env-id", "isqn/Chain-v0", *words]) == 0
    model = isqn.Model.load(run_dir)
    states = np.eye(8, dtype=np.float32)[:-1]
    assert (model.predict(states)[0] == 1).all()
    assert set(np.concatenate([model.predict(states, deterministic=False)[0] for _ in range(20)])) == {0, 1}
    q = np.asarray(model._agent.network.apply(model.state.params, model.state.statistics, states)[0])[:, 1]
    np.testing.assert_allclose(q, boltzmann_values(temperature=0.3, discount=0.9), atol=0.06)

    monkeypatch.chdir(tmp_path)
    for command in ("eval run --episodes 1", "probe run --metric effective-rank dormant --samples 100", "resume run"):
        assert main(command.split()) == 0
    assert main(["data", "collect", "run", "-o", "data", "--steps", "50", "--quiet"]) == 0
    assert main(["report", ".", "-o", "report"]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "--acting-rule", "mean"]) == 1
    sentence = "--acting-rule is 'mean'; iS-Boltzmann K=1 has one way of acting, so leave it out."
    assert capsys.readouterr().err == f"isqn: {sentence}\n"


def boltzmann_values(temperature: float, discount: float) -> np.ndarray:
    """Return the values, by state and action, of the softmax policy with respect to these values."""
    q = np.zeros((7, 2))
    for _ in range(1_000):
        policy = np.exp(q / temperature)
        value = (policy / policy.sum(axis=1, keepdims=True) * q).sum(axis=1)
        left = discount * value[[0, 0, 1, 2, 3, 4, 5]]
        right = np.append(discount * value[1:], 1.0)
        q = np.stack([left, right], axis=1)
    return q


def test_new_environment(load, tmp_path):
    catch = load("new_environment").Catch
    assert isqn.check_environment(catch()) == []
    settings = {"epsilon_decay_steps": 1_000, "learning_starts": 200, "update_period": 2, "log_period_steps": 500}
    model = isqn.Model("dqn", env="Catch-v0", epoch_steps=1_250, **settings)
    model.learn(2_500, run_dir=tmp_path / "run")
    returns = [episode.episodic_return for episode in isqn.evaluate(model, episodes=20)]
    assert np.mean(returns) > 0.5  # standing still catches one ball in five: -0.6


def test_new_native_environment(load, tmp_path, capsys):
    """The compiled loop trains three seeds at once; each of them plays in the host loop afterwards."""
    load("new_native_environment")
    assert main(["list", "envs", "--json"]) == 0
    assert {"id": "Goal-v0", "kind": "user", "loops": "host, compiled"} in json.loads(capsys.readouterr().out)
    words = "--env-id Goal-v0 --num-seeds 3 --total-timesteps 6_000 --epoch-steps 3_000 --learning-starts 500"
    words += " --hidden-sizes 32 --epsilon-decay-steps 3_000 --quiet"
    assert main(["train", "dqn", *words.split(), "--run-dir", str(tmp_path / "runs")]) == 0
    for seed in range(3):
        run_dir = tmp_path / "runs" / f"seed-{seed}"
        assert uses_compiled_loop(record.read_config(run_dir))
        first, last = record.read_summary(run_dir)["epoch_returns"]
        assert last > first
    assert len(isqn.evaluate(isqn.Model.load(run_dir), episodes=2)) == 2


# -- runs that need a file again


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("new_loss", "dqn --loss expectile"),
        ("new_scheme", "dqn --scheme two-chains"),
        ("new_torso", "dqn --torso fourier"),
        ("new_agent", "boltzmann"),
        ("new_environment", "dqn --env-id Catch-v0"),
        ("new_native_environment", "dqn --env-id Goal-v0"),
    ],
)
def test_a_missing_import_is_answered_with_the_flag(name, words, tmp_path, monkeypatch, capsys):
    """Reading a run executes nothing: without `--import`, each command answers with the flag."""
    monkeypatch.chdir(tmp_path)
    text = Path(path(name)).read_text()
    Path(f"{name}.py").write_text(f"{text}\nopen('executed', 'w').close()\n")
    own = ["--import", f"{name}.py"]
    monkeypatch.setattr(run, "train", lambda *_, **__: None)
    with registries_restored():
        assert main(["train", *words.split(), *own, "--run-dir", "run", "--quiet"]) == 0
        record.write_summary(Path("run"), record.read_summary(Path("run")) | record.provenance())
    assert record.read_summary(Path("run"))["imports"] == [f"{name}.py"]
    Path("executed").unlink()
    for command in ("resume", "eval", "probe"):
        capsys.readouterr()
        assert main([command, "run"]) == 1
        assert capsys.readouterr().err.endswith(f" The run was trained with --import {name}.py; add it.\n")
        with pytest.raises(UserError, match=f"was trained with --import {name}.py; add it"):
            isqn.Model.load("run")
    assert not Path("executed").exists()
    with registries_restored():
        assert main(["eval", "run", *own]) == 1  # it is understood now, but nothing was trained
        assert "run has no checkpoint yet" in capsys.readouterr().err
    assert Path("executed").exists()
