"""The examples of docs/extend.md: each one runs, does what it says, and is quoted as it is."""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isqn
from helpers import SMALL, random_batch
from isqn.agents import dqn
from isqn.agents.dqn import DqnConfig
from isqn.cli import main
from isqn.losses import LOSSES
from isqn.networks.torsos import TORSOS
from isqn.schemes import SCHEMES, refresh
from isqn.train import record
from isqn.types import Transition, Values

ROOT = Path(__file__).parents[1]
EXAMPLES = ["new_loss", "new_scheme", "new_torso", "new_environment"]


@pytest.fixture
def load():
    """Run an example as an import does; what it registers is forgotten after the test."""
    with ExitStack() as stack:
        for registry in (LOSSES, SCHEMES, TORSOS, gymnasium.registry, sys.modules):
            stack.enter_context(patch.dict(registry))

        def run(name: str):
            spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        yield run


def test_the_page_quotes_the_files():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)
    assert blocks == [(ROOT / "examples" / f"{name}.py").read_text() for name in EXAMPLES]


def test_new_loss(load, tmp_path):
    loss = load("new_loss").expectile
    values = Values(now=jnp.array([1.0, 5.0]), next=jnp.array([4.0, 2.0]))
    too_low = Transition(obs=None, action=0, reward=1.0, discount=0.5, next_obs=None)  # 1 + 0.5 x 4 = 3, not 1
    assert loss(values, values, too_low) == pytest.approx(0.7 * 2**2)
    assert loss(values, values, too_low._replace(action=1)) == pytest.approx(0.3 * 2**2)

    model = isqn.Model("dqn", env="isqn/Chain-v0", loss="expectile", hidden_sizes=(), learning_rate=0.03)
    assert model.config.label == "iS-Expectile K=1"
    states = np.eye(8, dtype=np.float32)[:-1]  # the last one ends the episode
    assert not (model.predict(states)[0] == 1).all()
    model.learn(3_000, run_dir=tmp_path / "run")
    assert (model.predict(states)[0] == 1).all()  # to the right, from everywhere


def test_new_scheme(load, tmp_path, monkeypatch):
    scheme = load("new_scheme").two_chains(3)
    agent = dqn.make(DqnConfig(scheme="two-chains", num_bellman_iterations=3, hidden_sizes=(5,)), SMALL)
    state = agent.init(0)
    grads = jax.grad(lambda p: agent.losses(p, {}, (), random_batch())[0].sum())(state.params)
    moving = [bool(np.any(head != 0)) for head in grads["heads"]["kernel"]]
    assert moving == [False, True, True, True] * 2

    numbered = {"torso": {}, "heads": {"bias": jnp.arange(8.0)}}
    shifted, _ = refresh(scheme, numbered, ())
    np.testing.assert_array_equal(shifted["heads"]["bias"], [1, 2, 3, 3, 5, 6, 7, 7])

    monkeypatch.chdir(tmp_path)
    words = "train dqn --scheme two-chains --k 3 --quiet --total-timesteps 500 --hidden-sizes 8"
    assert main(words.split()) == 0
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

    words = "train dqn --torso fourier --env-id CartPole-v1 --quiet --total-timesteps 600 --learning-starts 100"
    run_dir = tmp_path / "run"
    assert main([*words.split(), "--epoch-steps", "300", "--run-dir", str(run_dir)]) == 0
    trained = isqn.Model.load(run_dir)
    for before, after in zip(jax.tree.leaves(model.state.params), jax.tree.leaves(trained.state.params), strict=True):
        assert np.isfinite(after).all()
        assert not np.array_equal(before, after)


def test_new_environment(load, tmp_path):
    catch = load("new_environment").Catch
    assert isqn.check_environment(catch()) == []
    settings = {"epsilon_decay_steps": 1_000, "learning_starts": 200, "update_period": 2, "log_period_steps": 500}
    model = isqn.Model("dqn", env="new_environment:Catch-v0", epoch_steps=1_250, **settings)
    model.learn(2_500, run_dir=tmp_path / "run")
    returns = [episode.episodic_return for episode in isqn.evaluate(model, episodes=20)]
    assert np.mean(returns) > 0.5  # standing still catches one ball in five: -0.6
