"""Where randomness comes from: a seed, the name of who draws, and a count. Nothing is carried along,
so a restart needs no generator's state, and no two consumers share a stream."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from isqn.lazy import jax


def device_key(seed: jax.Array | int, name: str, *counts: jax.Array | int) -> jax.Array:
    """A JAX key; traceable in `seed` and `counts`."""
    key = jax.random.fold_in(jax.random.key(seed), crc32(name.encode()))
    for count in counts:
        key = jax.random.fold_in(key, count)
    return key


def host_generator(seed: int, name: str, *counts: int) -> np.random.Generator:
    """A numpy generator for the same kind of address."""
    return np.random.default_rng([seed, crc32(name.encode()), *counts])


def episode_seed(seed: int, episode: int) -> int:
    """What an environment is reset with: with the actions since, it is the environment's whole state."""
    return int(host_generator(seed, "environment", episode).integers(2**31))
