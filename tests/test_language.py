"""Networks over tokens: how many parameters each variant has, worked out from the sizes of GPT-2 small."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from isqn import schemes
from isqn.analysis import cost
from isqn.language.game import SPEC
from isqn.language.gpt2 import Size
from isqn.language.heads import make_values
from isqn.losses import expectile
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
def test_parameters_of_the_variants(scheme, parameters):
    """A policy, values with twins, and for TB a copy of all values but V; paper, section 5.4: 264M and 88M less."""
    config = preset_config("wordle").replace(scheme=scheme[0], num_bellman_iterations=scheme[1])
    assert cost.size(config, SPEC).kept_parameters == parameters


def test_a_target_network_takes_a_third_pass():
    """As the compiler counts, before it compiles: 2.58e10 and 3.88e10 FLOPs by hand for a game of 74 tokens (a torso
    takes 1.28e10), and heads of K = 9 hardly any."""
    config = preset_config("wordle")
    kinds = {"TB": ("target-based", 1), "TF": ("target-free", 1), "iS": ("iterated-shared", 9)}
    configs = {name: config.replace(scheme=scheme, num_bellman_iterations=k) for name, (scheme, k) in kinds.items()}
    flops = {name: cost.flops_per_game(one, SPEC) for name, one in configs.items()}
    assert flops["TB"] == pytest.approx(3.88e10, rel=0.02)
    assert flops["TF"] == pytest.approx(2.58e10, rel=0.02)
    assert flops["TB"] / flops["TF"] == pytest.approx(1.5, abs=0.01)
    assert flops["iS"] / flops["TF"] < 1.02


def test_heads_share_all_but_their_last_layer():
    """What one head says depends on its own last layer only; a refresh moves no other part."""
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


def test_an_expectile_by_hand():
    """Errors of 2 and -2: 0.7 times 4 and 0.3 times 4."""
    assert expectile(1.0, 3.0, 0.7) == pytest.approx(2.8)
    assert expectile(3.0, 1.0, 0.7) == pytest.approx(1.2)
