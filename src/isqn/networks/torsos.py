"""Torsos: all layers below the linear heads. Shapes and initialisers follow the authors' code (iS-DQN, Dopamine)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from isqn.networks.layers import (
    BatchNorm,
    Conv,
    LayerNorm,
    PatchConv,
    TorsoSettings,
    dot_one_row,
    parameter_free_layer_norm,
    split_dot,
)
from isqn.networks.simba import Simba, SimbaPolicy, bound_log_std, normalise_columns, orthogonal
from isqn.types import Array, EnvSpec, Params, UserError, require_new_name


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


class Torso(NamedTuple):
    """Entry of the registry: what the rest of the package must know of a torso, as `register_torso` describes it."""

    make: Callable[[TorsoSettings], nn.Module]
    min_image_side: int
    head_init: Callable[..., Array]
    project: Callable[[Params], Params] | None
    make_policy: Callable[[TorsoSettings, int], nn.Module]
    reads: tuple[str, ...]


TORSOS: dict[str, Torso] = {}
_READ_BY_DEFAULT = ("hidden_sizes", "layer_norm")


def register_torso(
    name: str,
    make: Callable[[TorsoSettings], nn.Module],
    *,
    min_image_side: int = 0,
    head_init: Callable[..., Array] = nn.initializers.xavier_uniform(),  # noqa: B008 - a pure function
    project: Callable[[Params], Params] | None = None,
    make_policy: Callable[[TorsoSettings, int], nn.Module] | None = None,
    reads: tuple[str, ...] = _READ_BY_DEFAULT,
) -> None:
    """Make a torso known as `--torso NAME`, for the networks of all agents: heads, critics and policies.

    - `make` returns a flax module that maps a batch of observations to a batch of feature vectors.
    - With a `min_image_side`, the torso is for images of at least so many pixels a side.
    - `head_init` is the initialiser of the heads.
    - `project` maps the parameters of a whole network, with any leading axes, to valid ones. Such a torso is only for
      agents that apply it after each gradient step.
    - `make_policy` returns the policy network, given the settings and the number of actions. By default it is the torso
      and two dense layers.
    - `reads` names the settings that the module reads, of hidden_sizes, layer_norm, width and blocks. The flags of the
      others are refused.
    """
    if not callable(make):
        raise UserError(f"register_torso: make is {make!r}; it must be a function TorsoSettings -> flax module.")
    owner = "isqn." if name == "auto" else TORSOS[name].make.__module__ if name in TORSOS else None
    require_new_name("register_torso", "a torso", name, owner, make.__module__)
    for setting in reads:
        if setting not in TorsoSettings.__dataclass_fields__:
            raise UserError(
                f"register_torso: the torso {name!r} reads {setting!r}, which is not a field of TorsoSettings."
            )
    policy = make_policy or partial(TorsoPolicy, make)
    TORSOS[name] = Torso(make, min_image_side, head_init, project, policy, reads)


def choose_torso(spec: EnvSpec, settings: TorsoSettings) -> str:
    """Return the name of the torso that "auto" stands for: by a vector, a small image or a large image."""
    side = min(spec.frame_shape[:2])
    if not spec.is_image:
        return "mlp"
    if side < 32:
        return "minatar"
    return "stream" if settings.is_streaming and side >= TORSOS["stream"].min_image_side else "nature"


def is_read_by(setting: str, torso: str) -> bool:
    """Return whether a torso reads a setting; "auto" and torsos that are not known here read the usual ones."""
    return setting in (TORSOS[torso].reads if torso in TORSOS else _READ_BY_DEFAULT)


register_torso("mlp", MLP, head_init=nn.initializers.lecun_normal())
# Young and Tian 2019: one small convolution and 128 units
register_torso(
    "minatar", lambda settings: CNN(settings, PatchConv, ((16, 3, 1),), 128), min_image_side=3, reads=("layer_norm",)
)
# Mnih et al. 2015 with SAME padding
register_torso(
    "nature",
    lambda settings: CNN(settings, Conv, ((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
    min_image_side=1,
    reads=("layer_norm",),
)
register_torso("impala", Impala, min_image_side=1, reads=("layer_norm",))
# Elsayed et al. 2024: larger strides, no padding
register_torso(
    "stream",
    lambda settings: CNN(settings, PatchConv, ((32, 8, 5), (64, 4, 3), (64, 3, 2)), 256),
    min_image_side=53,
    reads=("layer_norm",),
)
# Lee et al. 2025
register_torso(
    "simba",
    Simba,
    head_init=orthogonal,
    project=normalise_columns,
    make_policy=SimbaPolicy,
    reads=("width", "blocks"),
)
