"""Losses compared with numbers computed by hand, for two actions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isqn import losses
from isqn.agents.dqn import DqnConfig
from isqn.types import Transition, UserError, Values

ONLINE = Values(now=jnp.array([1.0, 2.0]), next=jnp.array([5.0, 4.0]))
TARGET = Values(now=jnp.array([0.0, 1.0]), next=jnp.array([3.0, 7.0]))
STEP = Transition(obs=None, action=1, reward=0.5, discount=0.9, next_obs=None)


def test_dqn():
    # 0.5 + 0.9 * 7 - 2 = 4.8
    assert losses.dqn(ONLINE, TARGET, STEP) == pytest.approx(4.8**2)


def test_a_discount_of_zero_is_a_termination():
    assert losses.dqn(ONLINE, TARGET, STEP._replace(discount=0.0)) == pytest.approx((0.5 - 2) ** 2)


def test_huber_is_half_the_squared_error_up_to_one_and_linear_above():
    assert losses.huber(ONLINE, TARGET, STEP) == pytest.approx(4.8 - 0.5)
    assert losses.huber(ONLINE, TARGET, STEP._replace(reward=2.6, discount=0.0)) == pytest.approx(0.5 * 0.6**2)


def test_double_dqn_evaluates_the_online_action_with_the_target_head():
    # the online head prefers action 0 at s', which the target head values 3: 0.5 + 0.9 * 3 - 2 = 1.2
    assert losses.double_dqn(ONLINE, TARGET, STEP) == pytest.approx(1.2**2)


def test_mellowmax_dqn():
    soft = np.log(np.mean(np.exp(2 * np.array([3.0, 7.0])))) / 2
    assert losses.mellowmax_dqn(ONLINE, TARGET, STEP, mellowmax_temperature=2.0) == pytest.approx(
        (0.5 + 0.9 * soft - 2) ** 2, rel=1e-5
    )


def test_munchausen():
    # temperature 1: pi(.|s) = softmax(0, 1), log pi(1|s) = -log(1 + e^-1) = -0.3132617
    # soft value at s' = logsumexp(3, 7) = 7.0181500
    error = 0.5 + 0.9 * -0.3132617 + 0.9 * 7.0181500 - 2
    settings = {"munchausen_temperature": 1.0, "munchausen_weight": 0.9, "munchausen_clip": -1.0}
    assert losses.munchausen_dqn(ONLINE, TARGET, STEP, **settings) == pytest.approx(error**2, rel=1e-5)
    # action 0 has log pi = -1.3132617, clipped at -1
    error = 0.5 + 0.9 * -1.0 + 0.9 * 7.0181500 - 1
    assert losses.munchausen_dqn(ONLINE, TARGET, STEP._replace(action=0), **settings) == pytest.approx(
        error**2, rel=1e-5
    )


def test_cql_adds_the_gap_between_logsumexp_and_the_chosen_value():
    gap = np.log(np.exp(1) + np.exp(2)) - 2
    assert losses.cql(ONLINE, TARGET, STEP, conservative_weight=0.1) == pytest.approx(4.8**2 + 0.1 * gap, rel=1e-5)
    assert losses.cql(ONLINE, TARGET, STEP, conservative_weight=0.0) == losses.dqn(ONLINE, TARGET, STEP)


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6), st.floats(0.5, 1000))
def test_mellowmax_lies_within_log_n_over_w_of_the_maximum(q, temperature):
    soft = float(losses.mellowmax(jnp.array(q, jnp.float32), temperature))
    slack = 1e-5 * (1 + max(map(abs, q)))
    assert max(q) - np.log(len(q)) / temperature - slack <= soft <= max(q) + slack


def test_settings_of_a_loss_are_the_config_fields_of_the_same_name():
    loss = losses.make_loss("cql", DqnConfig(conservative_weight=2.0))
    gap = np.log(np.exp(1) + np.exp(2)) - 2
    assert loss(ONLINE, TARGET, STEP) == pytest.approx(4.8**2 + 2 * gap, rel=1e-5)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda online, target, transition: online.now, r"an array of shape \(2,\)"),
        (lambda online, target, transition: None, "None"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused(function, found, monkeypatch):
    monkeypatch.setitem(losses.LOSSES, "mine", losses.Loss("Mine", function))
    with pytest.raises(UserError, match=f"The loss 'mine' returns {found}; a loss returns one number for one sample"):
        losses.make_loss("mine", DqnConfig())(ONLINE, TARGET, STEP)


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="--loss 'dqm' is not known; choose one of dqn, huber"):
        losses.make_loss("dqm", DqnConfig())
