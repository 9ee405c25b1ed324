"""A new torso: random Fourier features of a vector, then one hidden layer.

isqn train dqn --import examples/new_torso.py --experiment fourier --torso fourier --env-id CartPole-v1
"""

import flax.linen as nn
import jax.numpy as jnp

import isqn
from isqn.networks.torsos import Activation, Input, TorsoSettings
from isqn.types import Array


class Fourier(nn.Module):
    """Rahimi & Recht 2007, with frequencies that are trained from their random initial values."""

    settings: TorsoSettings  # settings of the layers: normalisation, width, precision

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = Input(self.settings)(x, train)
        waves = nn.Dense(64, dtype=self.settings.dtype, kernel_init=nn.initializers.normal(1.0))(x)
        x = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
        x = nn.Dense(self.settings.features(128), dtype=self.settings.dtype)(x)
        return Activation(self.settings)(x, train)  # the features that all heads share: (batch, features)


isqn.register_torso("fourier", Fourier)
