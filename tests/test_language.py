"""Networks of a language agent: parameters and FLOPs of GPT-2 small, heads, and the expectile loss."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from isqn import schemes
from isqn.analysis import cost
from isqn.language import training
from isqn.language.game import SPEC
from isqn.language.gpt2 import Size
from isqn.language.heads import make_values
from isqn.language.losses import expectile
from isqn.presets import preset_config


@pytest.mark.parametrize(
    ("scheme", "parameters"),
    [
        (("target-based", 1), 263_730_573),
        (("target-free", 1), 175_391_303),
        (("iterated-shared", 1), 175_500_430),
        (("iterated-shared", 9), 176_373_446),
    ],
)
def test_number_of_parameters(scheme, parameters):
    """A policy, Q1, Q2 and V, and for TB a copy of all but V. Paper, section 5.4: 264M, and 88M less."""
    config = preset_config("wordle").replace(scheme=scheme[0], num_bellman_iterations=scheme[1])
    assert cost.measure_size(config, SPEC).total_parameters == parameters


def test_a_target_network_takes_a_third_pass():
    """FLOPs of a game of 74 tokens. By hand: 2.58e10, and 3.88e10 with a target network; a torso takes 1.28e10.

    Nine heads take hardly any more.
    """
    config = preset_config("wordle")
    kinds = {"TB": ("target-based", 1), "TF": ("target-free", 1), "iS": ("iterated-shared", 9)}
    configs = {name: config.replace(scheme=scheme, num_bellman_iterations=k) for name, (scheme, k) in kinds.items()}
    flops = {name: training.flops(one, SPEC) for name, one in configs.items()}
    assert flops["TB"] == pytest.approx(3.88e10, rel=0.02)
    assert flops["TF"] == pytest.approx(2.58e10, rel=0.02)
    assert flops["TB"] / flops["TF"] == pytest.approx(1.5, abs=0.01)
    assert flops["iS"] / flops["TF"] < 1.02


def test_heads_share_all_but_their_last_layer():
    """The values of a head depend on its own last layer only, and a refresh moves no other part."""
    size = Size(vocabulary=7, positions=8, width=4, layers=1, heads=2, dropout=0.0)
    network, scheme = make_values(size, 3, 8), schemes.iterated_shared(2)
    params = network.init(jax.random.key(0))
    features = jax.random.normal(jax.random.key(1), (2, 5, 4))
    moved, _ = schemes.refresh(scheme, params, ())
    before, after = (network.q(p, features) for p in (params, moved))
    assert before.shape == (2, 2, 5, 3, 7)
    np.testing.assert_array_equal(after[..., :2, :], before[..., 1:, :])
    np.testing.assert_array_equal(after[..., 2, :], before[..., 2, :])
    np.testing.assert_array_equal(network.v(moved, features)[..., :2], network.v(params, features)[..., 1:])
    jax.tree.map(np.testing.assert_array_equal, moved["torso"], params["torso"])


def test_expectile_loss_by_hand():
    """Errors of 2 and -2 give 0.7 times 4 and 0.3 times 4."""
    assert expectile(1.0, 3.0, 0.7) == pytest.approx(2.8)
    assert expectile(3.0, 1.0, 0.7) == pytest.approx(1.2)
