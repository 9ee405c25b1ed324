"""Random number generators, each derived from a seed, the name of its consumer and counters (such as the step).

No generator state is carried from step to step, so a resumed run needs none, and no two consumers share a stream.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from isqn.lazy import jax


def device_key(seed: jax.Array | int, name: str, *counts: jax.Array | int) -> jax.Array:
    """Return the JAX key of a seed, a consumer name and counters; traceable in `seed` and `counts`."""
    key = jax.random.fold_in(jax.random.key(seed), crc32(name.encode()))
    for count in counts:
        key = jax.random.fold_in(key, count)
    return key


def host_generator(seed: int, name: str, *counts: int) -> np.random.Generator:
    """Return the numpy generator of a seed, a consumer name and counters."""
    return np.random.default_rng([seed, crc32(name.encode()), *counts])


def episode_seed(seed: int, episode: int) -> int:
    """Return the seed that resets the environment for an episode.

    With the actions taken since, it determines the state of the environment, so a resumed run can replay the episode.
    """
    return int(host_generator(seed, "environment", episode).integers(2**31))
