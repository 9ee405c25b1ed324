"""Running mean and variance (Welford 1962) in float64, inside programs that are otherwise float32.

JAX computes in float32 unless the whole process enables float64, and a float32 mean stops changing after about ten
million samples. Each float64 number is therefore stored as two 32-bit words, which every program can carry and every
checkpoint can hold. Only the functions in this file convert the words to float64.
"""

from __future__ import annotations

from typing import NamedTuple

from isqn.lazy import jax, jnp
from isqn.types import Array


class Moments(NamedTuple):
    """Elementwise running moments of all samples so far."""

    number: Array  # uint32: number of samples
    mean: Array  # float64 as words, (..., 2)
    squares: Array  # float64 as words, (..., 2): sum of squared distances from the mean


def empty(shape: tuple[int, ...] = ()) -> Moments:
    """Return the moments of no samples."""
    # The mean and the squares need separate buffers, because the state that holds them is donated.
    return Moments(jnp.uint32(0), zeros(shape), zeros(shape))


def zeros(shape: tuple[int, ...] = ()) -> Array:
    """Return float64 zeros as words."""
    return jnp.zeros((*shape, 2), jnp.uint32)


def add_sample(moments: Moments, sample: Array) -> Moments:
    """Add one sample to the moments."""
    with jax.enable_x64(True):
        number = moments.number + jnp.uint32(1)
        x, mean = _to_float64(sample), _from_words(moments.mean)
        new_mean = mean + (x - mean) / _to_float64(number)
        squares = _from_words(moments.squares) + (x - mean) * (x - new_mean)
        return Moments(number, _to_words(new_mean), _to_words(squares))


def add_discounted_return(
    moments: Moments, total: Array, discount: float, ended: Array, reward: Array
) -> tuple[Moments, Array, Array]:
    """Update a discounted sum of rewards and add its new value to the moments.

    Returns the moments, the new sum (as words) and its absolute value (float32). `total` is the sum so far, as words;
    `ended` resets it to zero before the reward is added.
    """
    with jax.enable_x64(True):
        new_total = discount * _to_float64(1 - ended) * _from_words(total) + _to_float64(reward)
        return add_sample(moments, new_total), _to_words(new_total), _to_float32(jnp.abs(new_total))


def standardise(moments: Moments, x: Array) -> Array:
    """Standardise `x`: subtract the mean and divide by the standard deviation; float32."""
    with jax.enable_x64(True):
        return _to_float32((_to_float64(x) - _from_words(moments.mean)) / _deviation(moments))


def deviation(moments: Moments) -> Array:
    """Standard deviation, in float32."""
    with jax.enable_x64(True):
        return _to_float32(_deviation(moments))


def _deviation(moments: Moments) -> Array:
    """Standard deviation, in float64, from the sample variance (taken as 1 before the second sample).

    Nothing is clipped, as in Elsayed et al. 2024: an input that was constant for n samples is about sqrt(n) standard
    deviations from the mean when it first changes.
    """
    degrees_of_freedom = jnp.maximum(_to_float64(moments.number) - 1, 1.0)
    variance = jnp.where(moments.number > 1, _from_words(moments.squares) / degrees_of_freedom, 1.0)
    return jnp.sqrt(variance + 1e-8)


def _to_float64(x: Array) -> Array:
    return jax.lax.convert_element_type(x, jnp.float64)


def _to_float32(x: Array) -> Array:
    return jax.lax.convert_element_type(x, jnp.float32)


def _from_words(words: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, jnp.float64)


def _to_words(number: Array) -> Array:
    return jax.lax.bitcast_convert_type(number, jnp.uint32)
