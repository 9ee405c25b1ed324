"""The paper's probes compared with closed forms."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import SMALL, compile_functions, make_compiled_agent, random_batch
from isqn.agents.dqn import DqnConfig
from isqn.data.text import read_table
from isqn.networks import make_network
from isqn.train import probes, run


def test_effective_rank():
    assert probes.effective_rank(np.ones((2048, 512))) == 1
    # singular values 99, 98, ..., 0 sum to 4950; the first 89 reach 4895 < 4900.5, the first 90 reach 4905
    assert probes.effective_rank(np.diag(np.arange(100.0))) == 90
    assert probes.effective_rank(np.eye(10)) == 10
    assert probes.effective_rank(np.zeros((4, 4))) == 1


def test_dormant_share():
    layer = jnp.array([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])  # units 0 and 3 are zero on both samples
    assert probes.dormant_share([layer]) == 0.5
    assert probes.dormant_share([layer, jnp.ones((2, 3, 3, 4))]) == 2 / 40


def test_all_units_of_a_zero_network_are_dormant():
    network = make_network(SMALL, 1, "auto", DqnConfig(hidden_sizes=(6, 5)).torso_settings)
    params, statistics = network.init(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    units, _ = network.activations(zeros, statistics, jnp.ones((4, 3)))
    assert [u.shape for u in units] == [(4, 6), (4, 5)]
    assert probes.dormant_share(units) == 1.0


def test_gradient_cosine_ignores_normalisation_parameters():
    a = {"Dense": jnp.array([3.0, 4.0]), "LayerNorm_0": jnp.array([100.0])}
    b = {"Dense": jnp.array([4.0, 3.0]), "LayerNorm_0": jnp.array([-100.0])}
    assert probes.gradient_cosine(a, b) == pytest.approx(24 / 25)


@cache
def make_probed_agent(**fields):
    config, agent = make_compiled_agent(analysis=True, batch_size=8, **fields)
    return agent, compile_functions(probes.add_probes(agent, config))


@pytest.mark.parametrize("scheme", ["target-based", "target-free", "iterated-shared"])
def test_probes_do_not_change_learning(scheme):
    agent, probed = make_probed_agent(scheme=scheme)
    state, probed_state = agent.init(0), probed.init(0)
    for i in range(3):
        batch = random_batch(size=16, seed=i)
        state, _ = agent.update(state, jax.tree.map(lambda x: x[:8], batch))
        probed_state, _ = probed.update(probed_state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.params, probed_state.params)


def test_churn_is_zero_with_a_target_network_and_positive_without():
    batch = random_batch(size=16)
    _, based = make_probed_agent(scheme="target-based")
    _, metrics = based.update(based.init(0), batch)
    assert metrics["target_churn_train"] == metrics["target_churn_held_out"] == 0
    for scheme in ("target-free", "iterated-shared"):
        _, moving = make_probed_agent(scheme=scheme)
        _, metrics = moving.update(moving.init(0), batch)
        assert metrics["target_churn_train"] > 0
        assert metrics["target_churn_held_out"] > 0


def test_churn_by_hand():
    """With one linear head the targets are discount * max Q(s') before and after the update."""
    _, agent = make_probed_agent(scheme="target-free", hidden_sizes=())
    state = agent.init(0)
    batch = random_batch(size=16)
    after, metrics = agent.update(state, batch)

    def target(params):
        q = batch.next_obs[:8] @ params["heads"]["kernel"][0] + params["heads"]["bias"][0]
        return batch.discount[:8] * q.max(-1)

    expected = np.abs(target(state.params) - target(after.params)).mean()
    assert metrics["target_churn_train"] == pytest.approx(float(expected), rel=1e-4)


def test_shared_and_target_based_gradients_agree_right_after_a_refresh():
    """For K = 1 the frozen head is the old online head on the same features, so both targets are equal."""
    _, agent = make_probed_agent(scheme="iterated-shared")
    state = agent.init(0)
    for i in range(5):
        state, _ = agent.update(state, random_batch(size=16, seed=i))
    state = agent.refresh(state)
    _, metrics = agent.update(state, random_batch(size=16, seed=9))
    assert metrics["gradient_cosine_own_tb"] == pytest.approx(1, abs=1e-5)
    assert metrics["gradient_cosine_tf_tb"] == pytest.approx(1, abs=1e-5)
    for i in range(50):
        state, metrics = agent.update(state, random_batch(size=16, seed=i))
    assert metrics["gradient_cosine_own_tb"] < 1 - 1e-5


@pytest.mark.parametrize("loop", ["host", "compiled"])
def test_the_copy_of_a_target_free_agent_is_refreshed_too(loop, tmp_path):
    """If the copy is refreshed at every update it equals the network, so both gradients are the same."""
    config = DqnConfig(scheme="target-free", loop=loop, analysis=True, hidden_sizes=(8,), batch_size=8)
    config = config.replace(update_period=4, target_update_period=4, learning_starts=40)
    config = config.replace(total_timesteps=200, epoch_steps=100, log_period_steps=100)
    run.start(config, tmp_path / "run", quiet=True)
    last = read_table(tmp_path / "run" / "metrics.csv")[-1]
    assert float(last["gradient_cosine_tf_tb"]) == pytest.approx(1, abs=1e-5)
