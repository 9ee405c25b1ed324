"""The two layers whose usual forms are slow on a CPU."""

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
    padding: str = "SAME"
    dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size, step = (self.kernel, self.kernel), (self.stride, self.stride)
        return nn.Conv(self.features, size, step, self.padding, dtype=self.dtype, kernel_init=self.kernel_init)(x)
