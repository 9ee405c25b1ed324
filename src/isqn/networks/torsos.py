"""Torsos: all layers below the linear heads. Shapes and initialisers follow the authors' code (iS-DQN, Dopamine)."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from isqn.networks.layers import (
    BatchNorm,
    Conv,
    LayerNorm,
    PatchConv,
    dot_one_row,
    parameter_free_layer_norm,
    split_dot,
)
from isqn.networks.simba import bound_log_std
from isqn.torsos import TorsoSettings
from isqn.types import Array


class Activation(nn.Module):
    """ReLU with optional LayerNorm before it and BatchNorm after it (paper, appendix E)."""

    settings: TorsoSettings
    normalise: bool = True  # whether the setting's LayerNorm and BatchNorm apply here
    flatten: bool = False

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        if self.settings.is_streaming:
            # The gradients of the adjacent layers are outer products. The barriers keep XLA from computing their
            # factors again for each element of the product.
            x = jax.lax.optimization_barrier(x)
        if self.settings.layer_norm and self.normalise:
            x = (
                parameter_free_layer_norm(x, self.settings.layer_norm_axes)
                if self.settings.is_streaming
                else LayerNorm()(x)
            )
        x = jax.lax.optimization_barrier(nn.leaky_relu(x, 0.01)) if self.settings.is_streaming else nn.relu(x)
        self.sow("intermediates", "units", x)  # read by the probes; free otherwise
        if self.flatten:
            x = x.reshape(x.shape[0], -1)
        if self.settings.batch_norm and self.normalise:
            x = BatchNorm(self.settings)(x, train)
        return x


class Input(nn.Module):
    """Scale bytes to [0, 1], convert all other observations to float32, and apply BatchNorm if enabled."""

    settings: TorsoSettings

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = x / jnp.float32(255.0) if x.dtype == jnp.uint8 else x.astype(jnp.float32)
        if self.settings.batch_norm and (x.ndim == 4 or self.settings.batch_norm_input):
            x = BatchNorm(self.settings)(x, train)
        return x


class MLP(nn.Module):
    """Dense layers. Without hidden layers, the heads are linear in the observation (tabular if it is one-hot)."""

    settings: TorsoSettings

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = Input(self.settings)(x, train)
        x = x.reshape(x.shape[0], -1)
        sizes = list(self.settings.hidden_sizes)
        sizes[-1:] = map(self.settings.features, sizes[-1:])
        for size in sizes:
            x = nn.Dense(size, dtype=self.settings.dtype)(x)  # flax's default lecun_normal, as in the authors' code
            x = Activation(self.settings)(x, train)
        return x


class TorsoPolicy(nn.Module):
    """Policy network on a torso: mean and log standard deviation of each action dimension, before tanh."""

    make: Callable[[TorsoSettings], nn.Module]
    settings: TorsoSettings
    num_actions: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> tuple[Array, Array]:
        x = self.make(self.settings)(x, train)
        mean, log_std = (nn.Dense(self.num_actions)(x) for _ in range(2))
        return mean, bound_log_std(log_std)


class CNN(nn.Module):
    """Convolutions and one hidden layer."""

    settings: TorsoSettings
    conv: Callable[..., nn.Module]
    layers: tuple[tuple[int, int, int], ...]  # features, kernel, stride
    hidden: int  # width of the hidden layer

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = Input(self.settings)(x, train)
        for index, (features, kernel, stride) in enumerate(self.layers, start=1):
            x = self.conv(features, kernel, stride, dtype=self.settings.dtype)(x)
            x = Activation(self.settings, flatten=index == len(self.layers))(x, train)
        return _hidden_layer(self.settings, self.hidden, x, train)


class Impala(nn.Module):
    """IMPALA torso (Espeholt et al. 2018): stacks of 32, 64 and 64 channels, LayerNorm as in the authors' code."""

    settings: TorsoSettings

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = Input(self.settings)(x, train)
        for features in (32, 64, 64):
            x = Conv(features, 3, dtype=self.settings.dtype)(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                block = Activation(self.settings)(x, train)
                block = Conv(features, 3, dtype=self.settings.dtype, kernel_init=nn.initializers.lecun_normal())(block)
                block = Activation(self.settings, normalise=False)(block, train)
                block = Conv(features, 3, dtype=self.settings.dtype, kernel_init=nn.initializers.lecun_normal())(block)
                x = x + block
        x = Activation(self.settings, flatten=True)(x, train)
        return _hidden_layer(self.settings, 512, x, train)


def _hidden_layer(settings: TorsoSettings, size: int, x: Array, train: bool) -> Array:
    """Apply the last hidden layer of a convolutional torso, inside a compact method."""
    kernel_init, dot_general = nn.initializers.xavier_uniform(), dot_one_row if settings.is_streaming else split_dot
    x = nn.Dense(settings.features(size), dtype=settings.dtype, kernel_init=kernel_init, dot_general=dot_general)(x)
    return Activation(settings)(x, train)


def make_minatar(settings: TorsoSettings) -> CNN:
    """Return the network of Young and Tian 2019: one small convolution and 128 units."""
    return CNN(settings, PatchConv, ((16, 3, 1),), 128)


def make_nature(settings: TorsoSettings) -> CNN:
    """Return the network of Mnih et al. 2015, with SAME padding."""
    return CNN(settings, Conv, ((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512)


def make_stream(settings: TorsoSettings) -> CNN:
    """Return the network of Elsayed et al. 2024, with larger strides and without padding."""
    return CNN(settings, PatchConv, ((32, 8, 5), (64, 4, 3), (64, 3, 2)), 256)
