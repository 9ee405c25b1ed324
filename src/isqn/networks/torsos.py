"""Torsos: everything below the linear heads. Shapes and initialisers are the authors' (iS-DQN, Dopamine)."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from isqn.networks.layers import BatchNorm, Conv, LayerNorm, PatchConv, Style, dot, dot_of_one, plain_layer_norm
from isqn.networks.simba import Simba, bounded
from isqn.types import Array


class Activation(nn.Module):
    """LayerNorm before the ReLU, BatchNorm after it (paper, appendix E)."""

    style: Style
    layer_norm: bool = True  # whether this place is one of those that are normalised
    batch_norm: bool = True
    flatten: bool = False

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        if self.style.stream:
            # The gradients of the layers around it are outer products: let XLA not compute their factors again for
            # each number of them.
            x = jax.lax.optimization_barrier(x)
        if self.style.layer_norm and self.layer_norm:
            x = plain_layer_norm(x, self.style.layer_norm_axes) if self.style.stream else LayerNorm()(x)
        x = jax.lax.optimization_barrier(nn.leaky_relu(x, 0.01)) if self.style.stream else nn.relu(x)
        self.sow("intermediates", "units", x)  # for the probes; costs nothing otherwise
        if self.flatten:
            x = x.reshape(x.shape[0], -1)
        if self.style.batch_norm and self.batch_norm:
            x = BatchNorm(self.style)(x, train)
        return x


class Input(nn.Module):
    """Bytes become fractions; everything else is taken as it is."""

    style: Style

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = x / jnp.float32(255.0) if x.dtype == jnp.uint8 else x.astype(jnp.float32)
        if self.style.batch_norm and (x.ndim == 4 or self.style.batch_norm_input):
            x = BatchNorm(self.style)(x, train)
        return x


class MLP(nn.Module):
    """Dense layers; with none of them, the heads are linear in the observation (tabular, if it is one-hot)."""

    style: Style

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = Input(self.style)(x, train)
        x = x.reshape(x.shape[0], -1)
        sizes = list(self.style.hidden_sizes)
        sizes[-1:] = map(self.style.features, sizes[-1:])
        for size in sizes:
            x = nn.Dense(size, dtype=self.style.dtype)(x)  # flax's default kernel is lecun_normal, as the authors'
            x = Activation(self.style)(x, train)
        return x


class MLPPolicy(nn.Module):
    """Mean and logarithm of the deviation of each number of an action, before tanh."""

    style: Style
    num_actions: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> tuple[Array, Array]:
        x = MLP(self.style)(x, train)
        mean, log_std = (nn.Dense(self.num_actions)(x) for _ in range(2))
        return mean, bounded(log_std)


class CNN(nn.Module):
    """Convolutions, then one hidden layer."""

    style: Style
    conv: Callable[..., nn.Module]
    layers: tuple[tuple[int, int, int], ...]  # features, kernel, stride
    hidden: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = Input(self.style)(x, train)
        for place, (features, kernel, stride) in enumerate(self.layers, start=1):
            x = self.conv(features, kernel, stride, dtype=self.style.dtype)(x)
            x = Activation(self.style, flatten=place == len(self.layers))(x, train)
        return _hidden(self.style, self.hidden, x, train)


class Impala(nn.Module):
    """Espeholt et al. 2018 with three stacks of 32, 64 and 64 channels, LayerNorm where the authors put it."""

    style: Style

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = Input(self.style)(x, train)
        for features in (32, 64, 64):
            x = Conv(features, 3, dtype=self.style.dtype)(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                block = Activation(self.style)(x, train)
                block = Conv(features, 3, dtype=self.style.dtype, kernel_init=nn.initializers.lecun_normal())(block)
                block = Activation(self.style, layer_norm=False, batch_norm=False)(block, train)
                block = Conv(features, 3, dtype=self.style.dtype, kernel_init=nn.initializers.lecun_normal())(block)
                x = x + block
        x = Activation(self.style, flatten=True)(x, train)
        return _hidden(self.style, 512, x, train)


def _hidden(style: Style, size: int, x: Array, train: bool) -> Array:
    """The last hidden layer of a convolutional torso. Called inside a compact method."""
    kernel_init, product = nn.initializers.xavier_uniform(), dot_of_one if style.stream else dot
    x = nn.Dense(style.features(size), dtype=style.dtype, kernel_init=kernel_init, dot_general=product)(x)
    return Activation(style)(x, train)


TORSOS: dict[str, Callable[[Style], nn.Module]] = {
    "mlp": MLP,
    # Young & Tian 2019: one small convolution, then 128 units
    "minatar": lambda style: CNN(style, PatchConv, ((16, 3, 1),), 128),
    # Mnih et al. 2015 with SAME padding
    "nature": lambda style: CNN(style, Conv, ((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
    "impala": Impala,
    # Elsayed et al. 2024: larger strides, no padding
    "stream": lambda style: CNN(style, PatchConv, ((32, 8, 5), (64, 4, 3), (64, 3, 2)), 256),
    "simba": Simba,
}
# Those for images, and the shortest side that leaves them a pixel: without padding, a convolution needs its kernel.
SHORTEST_SIDE = {"minatar": 3, "nature": 1, "impala": 1, "stream": 53}
