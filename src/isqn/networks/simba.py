"""SimbaV2 (Lee et al. 2025): features and the weights of every unit lie on spheres, and learned scales do the rest.

Every kernel here has columns of length 1, at the start and, by `unit_columns`, after each step of the optimizer.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from isqn.networks.layers import BatchNorm, Style
from isqn.types import Array, Params

SHIFT = 3.0  # a constant beside the observation, so that its length is not lost on the sphere
LOG_STD = (-10.0, 2.0)  # what a policy may say


def unit(x: Array, axis: int = -1) -> Array:
    """At length 1, in float32; a vector of zeros stays one, and has a gradient that is a number."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis, keepdims=True), 1e-16))


def unit_columns(params: Params) -> Params:
    """The kernels of a network back on their spheres: each column, the weights into one unit, at length 1."""

    def project(path: Any, leaf: Array) -> Array:
        return unit(leaf, axis=-2) if path[-1].key == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(project, params)


def orthogonal(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    return unit(nn.initializers.orthogonal()(key, shape, dtype), axis=0)


def dense(features: int, dtype: Any = jnp.float32, use_bias: bool = False) -> nn.Dense:
    return nn.Dense(features, use_bias=use_bias, dtype=dtype, kernel_init=orthogonal)


class Scaler(nn.Module):
    """A learned factor for each number. It begins at `initial`, and is kept as a parameter that begins at `scale`,
    which sets how fast it learns against the others under Adam."""

    initial: float
    scale: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        factor = self.param("scale", nn.initializers.constant(self.scale), x.shape[-1:])
        return x * (self.initial / self.scale * factor)


class Body(nn.Module):
    """The embedding of an input and residual blocks that move along the sphere."""

    style: Style

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        width, blocks, dtype = self.style.width, self.style.blocks, self.style.dtype
        root = math.sqrt(2 / width)
        x = x.astype(jnp.float32)
        if self.style.batch_norm and self.style.batch_norm_input:
            x = BatchNorm(self.style)(x, train)
        x = jnp.concatenate([x, jnp.full((*x.shape[:-1], 1), SHIFT)], axis=-1)
        x = unit(Scaler(root, root)(dense(width, dtype)(unit(x))))
        for _ in range(blocks):
            y = Scaler(root / 2, root / 2)(dense(4 * width, dtype)(x))
            y = nn.relu(y)
            self.sow("intermediates", "units", y)  # for the probes
            y = y + 1e-8  # a vector of zeros has no direction
            if self.style.batch_norm:
                y = BatchNorm(self.style)(y, train)
            y = unit(dense(width, dtype)(y))
            x = unit(x + Scaler(1 / (blocks + 1), 1 / math.sqrt(width))(y - x))
        return x


class Simba(nn.Module):
    """The torso of a critic: all of it but the linear heads."""

    style: Style

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        return _before_output(self.style, Body(self.style)(x, train))


def _before_output(style: Style, x: Array) -> Array:
    """Called inside a compact method."""
    return Scaler(1, 1)(dense(style.width, style.dtype)(x))


class SimbaPolicy(nn.Module):
    """Mean and logarithm of the deviation of each number of an action, before tanh."""

    style: Style
    num_actions: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> tuple[Array, Array]:
        x = Body(self.style)(x, train)
        mean, log_std = (dense(self.num_actions, use_bias=True)(_before_output(self.style, x)) for _ in range(2))
        return mean, bounded(log_std)


def bounded(log_std: Array) -> Array:
    low, high = LOG_STD
    return low + (high - low) * 0.5 * (1 + jnp.tanh(log_std))
