"""SimbaV2 (Lee et al. 2025): features and the weights of each unit have length 1, with learned scales between layers.

The columns of every kernel have length 1 at initialisation; `normalise_columns` restores it after each optimiser step.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from isqn.networks.layers import BatchNorm
from isqn.torsos import TorsoSettings
from isqn.types import Array, Params

SHIFT = 3.0  # constant appended to the observation, so that normalisation does not lose its length
LOG_STD_RANGE = (-10.0, 2.0)  # of a policy's log standard deviation


def to_unit_length(x: Array, axis: int = -1) -> Array:
    """Scale vectors to length 1, in float32. A zero vector stays zero and has a finite gradient."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis, keepdims=True), 1e-16))


def normalise_columns(params: Params) -> Params:
    """Scale each column of every kernel, the weights of one unit, to length 1."""

    def project(path: Any, leaf: Array) -> Array:
        return to_unit_length(leaf, axis=-2) if path[-1].key == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(project, params)


def orthogonal(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Initialise a kernel as an orthogonal matrix with columns of length 1."""
    return to_unit_length(nn.initializers.orthogonal()(key, shape, dtype), axis=0)


def dense(features: int, dtype: Any = jnp.float32, use_bias: bool = False) -> nn.Dense:
    """Make a dense layer with an orthogonal kernel."""
    return nn.Dense(features, use_bias=use_bias, dtype=dtype, kernel_init=orthogonal)


class Scaler(nn.Module):
    """Learned scale of each feature.

    The factor starts at `initial`. Its parameter starts at `scale`, which sets its learning speed under Adam relative
    to the other parameters.
    """

    initial: float
    scale: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        factor = self.param("scale", nn.initializers.constant(self.scale), x.shape[-1:])
        return x * (self.initial / self.scale * factor)


class Body(nn.Module):
    """Input embedding and residual blocks, whose outputs have length 1."""

    settings: TorsoSettings

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        width, blocks, dtype = self.settings.width, self.settings.blocks, self.settings.dtype
        root = math.sqrt(2 / width)
        x = x.astype(jnp.float32)
        if self.settings.batch_norm and self.settings.batch_norm_input:
            x = BatchNorm(self.settings)(x, train)
        x = jnp.concatenate([x, jnp.full((*x.shape[:-1], 1), SHIFT)], axis=-1)
        x = to_unit_length(Scaler(root, root)(dense(width, dtype)(to_unit_length(x))))
        for _ in range(blocks):
            y = Scaler(root / 2, root / 2)(dense(4 * width, dtype)(x))
            y = nn.relu(y)
            self.sow("intermediates", "units", y)  # read by the probes
            y = y + 1e-8  # a zero vector has no direction
            if self.settings.batch_norm:
                y = BatchNorm(self.settings)(y, train)
            y = to_unit_length(dense(width, dtype)(y))
            x = to_unit_length(x + Scaler(1 / (blocks + 1), 1 / math.sqrt(width))(y - x))
        return x


class Simba(nn.Module):
    """Torso of a critic: all layers below the linear heads."""

    settings: TorsoSettings

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        return _output_features(self.settings, Body(self.settings)(x, train))


def _output_features(settings: TorsoSettings, x: Array) -> Array:
    """Apply the last layer below the outputs, inside a compact method."""
    return Scaler(1, 1)(dense(settings.width, settings.dtype)(x))


class SimbaPolicy(nn.Module):
    """Policy network: mean and log standard deviation of each action dimension, before tanh."""

    settings: TorsoSettings
    num_actions: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> tuple[Array, Array]:
        x = Body(self.settings)(x, train)
        mean, log_std = (dense(self.num_actions, use_bias=True)(_output_features(self.settings, x)) for _ in range(2))
        return mean, bound_log_std(log_std)


def bound_log_std(log_std: Array) -> Array:
    """Squash log standard deviations into `LOG_STD_RANGE`."""
    low, high = LOG_STD_RANGE
    return low + (high - low) * 0.5 * (1 + jnp.tanh(log_std))
