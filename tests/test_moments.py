"""Running moments: those of numpy in float64, whatever the program around them computes in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isqn import moments


def numbers(words) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.float64)[..., 0]


def after(samples: np.ndarray) -> moments.Moments:
    def step(state, sample):
        return moments.count(state, sample), None

    return jax.jit(lambda xs: jax.lax.scan(step, moments.empty(samples.shape[1:]), xs)[0])(samples)


def test_mean_and_variance_are_those_of_float64():
    samples = np.random.default_rng(0).normal(1_000, 3, (2_000, 4)).astype(np.float32)
    found = after(samples)
    exact = samples.astype(np.float64)
    np.testing.assert_allclose(numbers(found.mean), exact.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(numbers(found.squares) / 1_999, exact.var(axis=0, ddof=1), rtol=1e-11)
    assert int(found.number) == 2_000


def test_by_hand():
    """1, 2, 6: the mean is 3, the sample variance (4 + 1 + 9) / 2 = 7; then 6 is 3 / sqrt(7) away."""
    found = after(np.array([1, 2, 6], np.int32))
    assert numbers(found.mean) == 3.0
    assert numbers(found.squares) == 14.0
    np.testing.assert_allclose(moments.centred(found, jnp.int32(6)), 3 / np.sqrt(7 + 1e-8), rtol=1e-6)
    np.testing.assert_allclose(moments.deviation(found), np.sqrt(7 + 1e-8), rtol=1e-6)


def test_a_discounted_return_is_followed_in_float64():
    """0.1 has no end in binary: summed 1,000 times with gamma 0.999, float32 is off in the seventh digit."""
    state, total, expected = moments.empty(), moments.zeros(), 0.0
    step = jax.jit(lambda state, total: moments.follow(state, total, 0.999, False, jnp.float32(0.1)))
    for _ in range(1_000):
        state, total, size = step(state, total)
        expected = 0.999 * expected + float(np.float32(0.1))
    assert numbers(total) == pytest.approx(expected, rel=1e-13)
    assert float(size) == np.float32(expected)
    _, total, size = moments.follow(state, total, 0.999, True, jnp.float32(-2.0))
    assert (numbers(total), float(size)) == (-2.0, 2.0)


def test_the_first_sample_is_at_zero_and_its_variance_is_taken_as_one():
    found = after(np.array([[5.0, -2.0]], np.float32))
    np.testing.assert_array_equal(moments.centred(found, jnp.array([5.0, -2.0])), [0, 0])
    np.testing.assert_allclose(moments.deviation(found), 1, rtol=1e-6)


@pytest.mark.parametrize("n", [10, 1_000, 100_000])
def test_what_changes_for_the_first_time_is_the_root_of_n_away(n):
    """Elsayed et al. 2024 clip nothing: a pixel that was constant for n - 1 frames."""
    samples = np.zeros(n, np.float32)
    samples[-1] = 255
    found = after(samples)
    np.testing.assert_allclose(moments.centred(found, samples[-1]), (n - 1) / np.sqrt(n), rtol=1e-5)


def test_it_still_moves_where_float32_stands_still():
    """After 2**25 samples at 1, one float32 more at 3 would not move a float32 mean."""
    number = np.uint32(2**25)
    mean, squares = (np.array([value], np.float64).view(np.uint32) for value in (1.0, 0.0))
    found = moments.count(moments.Moments(jnp.asarray(number), jnp.asarray(mean), jnp.asarray(squares)), jnp.float32(3))
    np.testing.assert_allclose(numbers(found.mean), 1 + 2 / (2**25 + 1), rtol=1e-15)
    assert np.float32(1) + np.float32(2 / (2**25 + 1)) == np.float32(1)


def test_it_is_the_same_in_a_batch_and_alone():
    samples = np.random.default_rng(1).normal(size=(3, 50, 2)).astype(np.float32)
    together = jax.vmap(after)(samples)
    for index in range(3):
        alone = after(samples[index])
        jax.tree.map(lambda a, b, index=index: np.testing.assert_array_equal(a[index], b), together, alone)


def test_a_program_around_it_stays_float32():
    found = after(np.zeros((3, 2), np.float32))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"uint32"}
    assert jnp.zeros(2).dtype == jnp.float32
    assert moments.centred(found, jnp.zeros(2)).dtype == jnp.float32
