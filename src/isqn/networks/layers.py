"""The layers that are not flax's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from isqn.types import Array


class LayerNorm(nn.Module):
    """Over the last axis, in float32 whatever comes in, with a learned scale and bias."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.LayerNorm(dtype=jnp.float32)(x)


class Conv(nn.Module):
    """A square two-dimensional convolution."""

    features: int
    kernel: int
    stride: int = 1
    dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size, step = (self.kernel, self.kernel), (self.stride, self.stride)
        return nn.Conv(self.features, size, step, dtype=self.dtype, kernel_init=self.kernel_init)(x)


class PatchConv(nn.Module):
    """A convolution without stride or padding, as one product of a matrix of patches.

    On small images this is twice as fast on a CPU; and where each seed has its own kernel it stays a batched
    product, while a convolution becomes a grouped one, which is slower by far.
    """

    features: int
    kernel: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size, channels = self.kernel, x.shape[-1]
        rows, columns = x.shape[1] - size + 1, x.shape[2] - size + 1
        shape = (size, size, channels, self.features)
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), shape).reshape(-1, self.features)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        shifted = [x[:, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
        patches = jnp.concatenate(shifted, axis=-1).reshape(-1, size * size * channels)
        y = patches.astype(self.dtype) @ kernel.astype(self.dtype) + bias.astype(self.dtype)
        return y.reshape(-1, rows, columns, self.features)
