"""Running moments agree with numpy in float64, although the surrounding program computes in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isqn import moments


def to_float64(words) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.float64)[..., 0]


def moments_of(samples: np.ndarray) -> moments.Moments:
    def step(state, sample):
        return moments.add_sample(state, sample), None

    return jax.jit(lambda xs: jax.lax.scan(step, moments.empty(samples.shape[1:]), xs)[0])(samples)


def test_mean_and_variance_match_numpy_in_float64():
    samples = np.random.default_rng(0).normal(1_000, 3, (2_000, 4)).astype(np.float32)
    result = moments_of(samples)
    exact = samples.astype(np.float64)
    np.testing.assert_allclose(to_float64(result.mean), exact.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(to_float64(result.squares) / 1_999, exact.var(axis=0, ddof=1), rtol=1e-11)
    assert int(result.number) == 2_000


def test_moments_of_three_samples_by_hand():
    """Samples 1, 2, 6: the mean is 3, the sample variance (4 + 1 + 9) / 2 = 7, so 6 is 3 / sqrt(7) deviations away."""
    result = moments_of(np.array([1, 2, 6], np.int32))
    assert to_float64(result.mean) == 3.0
    assert to_float64(result.squares) == 14.0
    np.testing.assert_allclose(moments.standardise(result, jnp.int32(6)), 3 / np.sqrt(7 + 1e-8), rtol=1e-6)
    np.testing.assert_allclose(moments.deviation(result), np.sqrt(7 + 1e-8), rtol=1e-6)


def test_discounted_returns_accumulate_in_float64():
    """0.1 is inexact in binary: after 1,000 discounted sums a float32 total is wrong in the seventh digit."""
    state, total, expected = moments.empty(), moments.zeros(), 0.0
    step = jax.jit(lambda state, total: moments.add_discounted_return(state, total, 0.999, False, jnp.float32(0.1)))
    for _ in range(1_000):
        state, total, size = step(state, total)
        expected = 0.999 * expected + float(np.float32(0.1))
    assert to_float64(total) == pytest.approx(expected, rel=1e-13)
    assert float(size) == np.float32(expected)
    _, total, size = moments.add_discounted_return(state, total, 0.999, True, jnp.float32(-2.0))
    assert (to_float64(total), float(size)) == (-2.0, 2.0)


def test_one_sample_has_deviation_zero_and_variance_one():
    result = moments_of(np.array([[5.0, -2.0]], np.float32))
    np.testing.assert_array_equal(moments.standardise(result, jnp.array([5.0, -2.0])), [0, 0])
    np.testing.assert_allclose(moments.deviation(result), 1, rtol=1e-6)


@pytest.mark.parametrize("n", [10, 1_000, 100_000])
def test_a_first_change_after_n_samples_is_sqrt_n_deviations_away(n):
    """A pixel is constant for n - 1 frames and then changes; as in Elsayed et al. 2024, nothing is clipped."""
    samples = np.zeros(n, np.float32)
    samples[-1] = 255
    result = moments_of(samples)
    np.testing.assert_allclose(moments.standardise(result, samples[-1]), (n - 1) / np.sqrt(n), rtol=1e-5)


def test_the_mean_still_changes_where_float32_would_not():
    """After 2**25 samples of 1, one sample of 3 would not change a float32 mean."""
    number = np.uint32(2**25)
    mean, squares = (np.array([value], np.float64).view(np.uint32) for value in (1.0, 0.0))
    result = moments.add_sample(
        moments.Moments(jnp.asarray(number), jnp.asarray(mean), jnp.asarray(squares)), jnp.float32(3)
    )
    np.testing.assert_allclose(to_float64(result.mean), 1 + 2 / (2**25 + 1), rtol=1e-15)
    assert np.float32(1) + np.float32(2 / (2**25 + 1)) == np.float32(1)


def test_vmap_matches_single_computations():
    samples = np.random.default_rng(1).normal(size=(3, 50, 2)).astype(np.float32)
    together = jax.vmap(moments_of)(samples)
    for index in range(3):
        alone = moments_of(samples[index])
        jax.tree.map(lambda a, b, index=index: np.testing.assert_array_equal(a[index], b), together, alone)


def test_the_surrounding_program_stays_float32():
    result = moments_of(np.zeros((3, 2), np.float32))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(result)} == {"uint32"}
    assert jnp.zeros(2).dtype == jnp.float32
    assert moments.standardise(result, jnp.zeros(2)).dtype == jnp.float32
