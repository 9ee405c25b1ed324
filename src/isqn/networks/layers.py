"""The layers that are not flax's own, and the style that every torso is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from isqn.types import Array


@dataclass(frozen=True)
class Style:
    """What every torso can vary."""

    layer_norm: bool = False
    batch_norm: bool = False
    width_factor: float = 1.0  # scales the last hidden layer: the features that the heads share (paper, D.3)
    hidden_sizes: tuple[int, ...] = (128, 128)  # of the MLP
    dtype: jnp.dtype = jnp.float32  # of convolutions and matrix products; parameters stay float32
    stream: bool = False  # Elsayed et al. 2024: LayerNorm has no parameters, and the ReLU leaks
    layer_norm_axes: str = "channels"  # of a LayerNorm without parameters; or "all" of a sample
    width: int = 512  # of SimbaV2
    blocks: int = 2
    sparsity: float = 0.0  # share of the incoming weights of a unit that start at zero
    batch_norm_epsilon: float = 1e-5
    batch_norm_kind: str = "plain"  # or "renorm"
    batch_norm_input: bool = False  # of vectors; that of images always is

    def features(self, size: int) -> int:
        return max(1, round(size * self.width_factor))


class LayerNorm(nn.Module):
    """Over the last axis, in float32 whatever comes in, with a learned scale and bias."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones_init(), x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros_init(), x.shape[-1:])
        return layer_norm(x.astype(jnp.float32), scale, bias)


class BatchNorm(nn.Module):
    """As the authors': on images one statistic for each position, shared by the channels. But the variance is taken in
    two passes: as E[x^2] - E[x]^2 it loses the digits of small ones."""

    style: Style

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        if self.style.batch_norm_kind == "renorm":
            return BatchRenorm(self.style.batch_norm_epsilon)(x, train)
        axis: Any = (1, 2) if x.ndim == 4 else -1
        settings = {"axis": axis, "epsilon": self.style.batch_norm_epsilon, "use_fast_variance": False}
        return nn.BatchNorm(use_running_average=not train, dtype=jnp.float32, **settings)(x)


class BatchRenorm(nn.Module):
    """Ioffe 2017, of vectors, with the constants of CrossQ (Bhatt et al. 2024): in training, too, it normalises by the
    running averages, as far as these are near enough to those of the batch; at first by the batch alone."""

    epsilon: float
    most_scale: float = 3.0
    most_shift: float = 5.0
    warm_up: int = 100_000  # calls
    momentum: float = 0.99

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        shape = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones_init(), shape)
        bias = self.param("bias", nn.initializers.zeros_init(), shape)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape)
        variance = self.variable("batch_stats", "var", jnp.ones, shape)
        calls = self.variable("batch_stats", "calls", jnp.zeros, (), jnp.int32)
        x = x.astype(jnp.float32)
        deviation = jnp.sqrt(variance.value + self.epsilon)
        if not train:
            return (x - mean.value) / deviation * scale + bias
        own_mean, own_variance = x.mean(axis=0), x.var(axis=0)
        own = jnp.sqrt(own_variance + self.epsilon)
        warm = calls.value >= self.warm_up
        factor = jnp.where(warm, jnp.clip(own / deviation, 1 / self.most_scale, self.most_scale), 1.0)
        shift = jnp.where(warm, jnp.clip((own_mean - mean.value) / deviation, -self.most_shift, self.most_shift), 0.0)
        x = (x - own_mean) / own * jax.lax.stop_gradient(factor) + jax.lax.stop_gradient(shift)
        mean.value = self.momentum * mean.value + (1 - self.momentum) * own_mean
        variance.value = self.momentum * variance.value + (1 - self.momentum) * own_variance
        calls.value = calls.value + 1
        return x * scale + bias


def plain_layer_norm(x: Array, axes: str) -> Array:
    """Without parameters, over the channels (the authors' slimStreamQ) or all of a sample (Elsayed et al. 2024);
    each with its epsilon, that of flax and that of PyTorch."""
    over, epsilon = ((-1,), 1e-6) if axes == "channels" else (tuple(range(1, x.ndim)), 1e-5)
    x = x.astype(jnp.float32)
    x = x - x.mean(over, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(over, keepdims=True) + epsilon)


def sparse_uniform(key: Array, shapes: Any, sparsity: float) -> Any:
    """Elsayed et al. 2024: of the weights of each output unit exactly that share, rounded up, begins at zero, and the
    others are uniform up to 1 / sqrt(fan in); biases are zero. One weight of a unit is always left, or a layer of few
    inputs would begin blind.

    For a whole tree, from one draw: each draw of its own would take XLA seconds to compile, and 20 MB.
    """
    leaves, structure = jax.tree.flatten(shapes)
    kernels = [leaf for leaf in leaves if leaf.ndim > 1]
    ends = np.cumsum([2 * kernel.size for kernel in kernels])
    draws = iter(jnp.split(jax.random.uniform(key, (ends[-1],), minval=-1), ends[:-1]))

    def drawn(shape: tuple[int, ...]) -> Array:
        fan_in = math.prod(shape[:-1])
        weights, places = next(draws).reshape(2, fan_in, shape[-1])
        order = jnp.argsort(places, axis=0)  # a permutation for each unit
        zeros = min(math.ceil(sparsity * fan_in), fan_in - 1)
        return jnp.where(order < zeros, 0, weights / math.sqrt(fan_in)).reshape(shape)

    return jax.tree.unflatten(structure, [drawn(x.shape) if x.ndim > 1 else jnp.zeros(x.shape) for x in leaves])


@jax.custom_vjp
def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    """Ba et al. 2016 with flax's epsilon, its gradient written out.

    XLA's sums over a short last axis, and over all axes but the last, are slow on a CPU, and products of a
    matrix and a vector are not: forward and backward take 0.4 to 0.8 of the time of flax's layer.
    """
    return _layer_norm(x, scale, bias)[0]


def _layer_norm(x: Array, scale: Array, bias: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    average = jnp.full(scale.shape, 1 / scale.size, x.dtype)
    mean = _dot(x, average)[..., None]
    variance = jnp.maximum(_dot(x * x, average)[..., None] - mean * mean, 0)
    inverse = jax.lax.rsqrt(variance + 1e-6)
    unit = (x - mean) * inverse
    return unit * scale + bias, (unit, inverse, scale)


def _layer_norm_gradient(saved: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, Array]:
    unit, inverse, scale = saved
    along, average = g * unit, scale / scale.size
    dx = (g * scale - _dot(g, average)[..., None] - unit * _dot(along, average)[..., None]) * inverse
    return dx, _sum_over_rows(along), _sum_over_rows(g)


layer_norm.defvjp(_layer_norm, _layer_norm_gradient)


def _dot(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision="highest")  # float32 on accelerators too


def _sum_over_rows(x: Array) -> Array:
    """Over every axis but the last, one axis at a time: one long sum would round ten times worse."""
    while x.ndim > 1:
        x = _dot(jnp.ones(len(x), x.dtype), x.reshape(len(x), -1)).reshape(x.shape[1:])
    return x


def dot(x: Array, kernel: Array, dimensions: Any, **settings: Any) -> Array:
    """For `nn.Dense`: x @ kernel. One row, as in acting, goes through a large kernel in 16 parts.

    XLA reads the kernel of a single row on one core, and the parts on all: a third off the time to act on Atari.
    """
    parts = 16
    if len(x) > 1 or len(kernel) < 256 * parts or len(kernel) % parts:
        return jax.lax.dot_general(x, kernel, dimensions, **settings)
    sums = jnp.einsum("pi,pio->po", x.reshape(parts, -1), kernel.reshape(parts, -1, kernel.shape[1]), **settings)
    return sums.sum(axis=0, keepdims=True)


@jax.custom_vjp
def product(x: Array, kernel: Array) -> Array:
    """x @ kernel, with the kernel on the left in the gradient of x: XLA would copy it to turn it over on a CPU, which
    for a batch of one takes longer than the product."""
    return x @ kernel


def _product_gradient(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return (kernel @ g.T).T, x.T * g if len(x) == 1 else x.T @ g


product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), _product_gradient)


def dot_of_one(x: Array, kernel: Array, dimensions: Any, **settings: Any) -> Array:
    """For `nn.Dense`, where batches are single samples."""
    return product(x, kernel)


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
    """A convolution without padding, as one product of a matrix of patches.

    On small images this is twice as fast on a CPU; and where each seed has its own kernel it stays a batched
    product, while a convolution becomes a grouped one, which is slower by far.
    """

    features: int
    kernel: int
    stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size, step, channels = self.kernel, self.stride, x.shape[-1]
        rows, columns = ((length - size) // step + 1 for length in x.shape[1:3])
        shape = (size, size, channels, self.features)
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), shape).reshape(-1, self.features)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        if step == 1:
            shifted = [x[:, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
            patches = jnp.concatenate(shifted, axis=-1)
        else:  # the columns of all patches, then their rows: there is more to copy at once
            x = jnp.stack([x[:, :, step * j : step * j + size] for j in range(columns)], axis=2)
            patches = jnp.stack([x[:, i : i + step * rows : step] for i in range(size)], axis=3)
        patches = patches.reshape(-1, size * size * channels)
        y = patches.astype(self.dtype) @ kernel.astype(self.dtype) + bias.astype(self.dtype)
        return y.reshape(-1, rows, columns, self.features)
