"""A new torso: random Fourier features of a vector, then one hidden layer.

python examples/new_torso.py train dqn --torso fourier --env-id CartPole-v1
"""

import sys

import flax.linen as nn
import jax.numpy as jnp

from isqn.cli import main
from isqn.networks.torsos import TORSOS, Activation, Input, Style
from isqn.types import Array


class Fourier(nn.Module):
    """Rahimi & Recht 2007, with frequencies that are learned on from where they were drawn."""

    style: Style  # what the flags say: normalisation, width, precision

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = Input(self.style)(x, train)
        waves = nn.Dense(64, dtype=self.style.dtype, kernel_init=nn.initializers.normal(1.0))(x)
        x = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
        x = nn.Dense(self.style.features(128), dtype=self.style.dtype)(x)
        return Activation(self.style)(x, train)  # what the heads share: (batch, features)


TORSOS["fourier"] = Fourier  # the flag

if __name__ == "__main__":
    sys.exit(main())
