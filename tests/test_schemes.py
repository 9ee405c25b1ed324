"""Target schemes: labels, pairs of heads, and how a refresh moves parameters."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from isqn import schemes
from isqn.schemes import TargetScheme
from isqn.types import UserError


def params_of(*heads: float) -> dict:
    return {"torso": {"w": jnp.array(10.0)}, "heads": {"bias": jnp.array(heads, jnp.float32)[:, None]}}


def heads_of(params: dict) -> list[float]:
    return params["heads"]["bias"][:, 0].tolist()


def test_labels_are_those_of_the_paper():
    assert schemes.target_based().label("DQN") == "TB-DQN"
    assert schemes.target_free().label("CQL") == "TF-CQL"
    assert schemes.iterated_shared(9).label("DQN") == "iS-DQN K=9"
    assert schemes.ensemble_shared(5).label("CQL") == "ES-CQL N=5"
    assert schemes.iterated_target_based(4).label("DQN") == "i-DQN K=4"


def test_pairs_of_online_and_target_heads():
    assert schemes.iterated_shared(3).online == (1, 2, 3)
    assert schemes.iterated_shared(3).target == (0, 1, 2)
    assert schemes.ensemble_shared(2).online == (1, 3)
    assert schemes.ensemble_shared(2).target == (0, 2)
    assert not schemes.target_free().refreshes


def test_one_ensemble_pair_is_iterated_shared_with_one_iteration():
    ensemble, iterated = schemes.ensemble_shared(1), schemes.iterated_shared(1)
    fields = ("num_heads", "online", "target", "copy", "head_moves")
    assert [getattr(ensemble, f) for f in fields] == [getattr(iterated, f) for f in fields]


def test_iterated_shared_shifts_all_heads_at_once():
    params, copies = schemes.refresh(schemes.iterated_shared(3), params_of(0, 1, 2, 3), ())
    assert heads_of(params) == [1, 2, 3, 3]
    assert copies == ()


def test_each_ensemble_target_copies_its_online_head():
    params, _ = schemes.refresh(schemes.ensemble_shared(2), params_of(0, 1, 2, 3), ())
    assert heads_of(params) == [1, 1, 3, 3]


def test_target_based_copies_the_network():
    params, (copy,) = schemes.refresh(schemes.target_based(), params_of(5), (params_of(1),))
    assert heads_of(copy) == heads_of(params) == [5]


def test_target_free_has_nothing_to_refresh():
    params, copies = schemes.refresh(schemes.target_free(), params_of(5), ())
    assert heads_of(params) == [5]
    assert copies == ()


def test_a_step_size_below_one_is_a_moving_average():
    params, _ = schemes.refresh(schemes.iterated_shared(2), params_of(0, 10, 20), (), 0.1)
    np.testing.assert_allclose(heads_of(params), [1, 11, 20])
    _, (copy,) = schemes.refresh(schemes.target_based(), params_of(10), (params_of(0),), 0.1)
    np.testing.assert_allclose(heads_of(copy), [1])


def test_refresh_and_sync_of_iterated_target_based():
    """Online theta_1..theta_3 = 1, 2, 3; targets are tb_0 in copy 0, tb_1 and tb_2 in copy 1."""
    scheme = schemes.iterated_target_based(3)
    assert scheme.copy == (0, 1, 1)
    assert scheme.target == (0, 0, 1)

    def targets(copies: tuple) -> list[float]:
        return [heads_of(copies[c])[t] for c, t in zip(scheme.copy, scheme.target, strict=True)]

    online, copies = params_of(1, 2, 3), (params_of(-1, -1, -1), params_of(-2, -2, -2))
    # D: tb_k <- theta_k for k >= 1; tb_0 stays
    assert targets(schemes.sync(online, copies)) == [-1, 1, 2]
    # T: tb_k <- theta_(k+1) for every k, then theta_k <- theta_(k+1)
    params, copies = schemes.refresh(scheme, online, copies)
    assert targets(copies) == [1, 2, 3]
    assert heads_of(params) == [2, 3, 3]


def test_iterated_target_based_with_one_iteration_is_target_based():
    iterated, plain = schemes.iterated_target_based(1), schemes.target_based()
    assert (iterated.num_heads, iterated.online, iterated.target, iterated.copy) == (
        plain.num_heads,
        plain.online,
        plain.target,
        plain.copy,
    )


def test_unknown_names_and_schemes_without_pairs_are_refused():
    with pytest.raises(UserError, match="--scheme 'target' is not known; choose one of target-based"):
        schemes.make_scheme("target", 1)
    with pytest.raises(UserError, match=r"iterated_shared\(0\): the number of pairs must be a whole number"):
        schemes.make_scheme("iterated-shared", 0)


@pytest.mark.parametrize(
    ("lists", "sentence"),
    [
        ({"online": (1, 5), "target": (0, 1)}, "The scheme mine names head 5; it has the heads 0 to 1"),
        ({"online": (1,), "target": (-1,)}, "The scheme mine names head -1; it has the heads 0 to 1"),
        ({"online": (1,), "target": (0, 1)}, "online, target and copy differ in length"),
        ({"online": (0, 1), "target": (0, 1), "copy": (0,)}, "online, target and copy differ in length"),
        ({"online": (1,), "target": (0,), "copy": (-1,)}, "The scheme mine names copy -1"),
    ],
)
def test_heads_that_a_network_does_not_have_are_refused(lists, sentence):
    with pytest.raises(UserError, match=sentence):
        TargetScheme("mine", "M", num_heads=2, **lists)
