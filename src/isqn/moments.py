"""Running mean and variance (Welford 1962) in float64, inside programs that are otherwise float32.

JAX computes in float32 unless a whole process is told not to, and a float32 mean stops moving after some ten million
samples. So the double numbers are kept as the pairs of 32-bit words that they are made of, which every program can
carry and every checkpoint can hold; they are numbers only inside the functions of this file.
"""

from __future__ import annotations

from typing import NamedTuple

from isqn.lazy import jax, jnp
from isqn.types import Array


class Moments(NamedTuple):
    """Of all samples so far, number by number."""

    number: Array  # uint32
    mean: Array  # words of float64, (..., 2)
    squares: Array  # words of float64: the sum of squared distances from the mean


def empty(shape: tuple[int, ...] = ()) -> Moments:
    # two buffers, because what holds them is donated
    return Moments(jnp.uint32(0), zeros(shape), zeros(shape))


def zeros(shape: tuple[int, ...] = ()) -> Array:
    """As words of float64."""
    return jnp.zeros((*shape, 2), jnp.uint32)


def count(moments: Moments, sample: Array) -> Moments:
    """One more sample."""
    with jax.enable_x64(True):
        number = moments.number + jnp.uint32(1)
        x, mean = _double(sample), _number(moments.mean)
        moved = mean + (x - mean) / _double(number)
        squares = _number(moments.squares) + (x - mean) * (x - moved)
        return Moments(number, _words(moved), _words(squares))


def follow(
    moments: Moments, total: Array, discount: float, ended: Array, reward: Array
) -> tuple[Moments, Array, Array]:
    """Count a discounted sum of rewards at its newest value; the words of that, and its size in float32."""
    with jax.enable_x64(True):
        now = discount * _double(1 - ended) * _number(total) + _double(reward)
        return count(moments, now), _words(now), _single(jnp.abs(now))


def centred(moments: Moments, x: Array) -> Array:
    """Distance from the mean, in deviations; float32."""
    with jax.enable_x64(True):
        return _single((_double(x) - _number(moments.mean)) / _deviation(moments))


def deviation(moments: Moments) -> Array:
    """float32."""
    with jax.enable_x64(True):
        return _single(_deviation(moments))


def _deviation(moments: Moments) -> Array:
    """From the sample variance, which is taken as 1 before there are two samples. Nothing is clipped: what was
    constant for n samples is about sqrt(n) deviations away when it first changes, as Elsayed et al. 2024 want it."""
    freedom = jnp.maximum(_double(moments.number) - 1, 1.0)
    variance = jnp.where(moments.number > 1, _number(moments.squares) / freedom, 1.0)
    return jnp.sqrt(variance + 1e-8)


def _double(x: Array) -> Array:
    return jax.lax.convert_element_type(x, jnp.float64)


def _single(x: Array) -> Array:
    return jax.lax.convert_element_type(x, jnp.float32)


def _number(words: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, jnp.float64)


def _words(number: Array) -> Array:
    return jax.lax.bitcast_convert_type(number, jnp.uint32)
