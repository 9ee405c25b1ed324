"""Small things that several tests use."""

from __future__ import annotations

import jax
import numpy as np

from isqn.agents import q_learning
from isqn.experiments.config import Config
from isqn.types import EnvSpec, Transition

SMALL = EnvSpec("small", "test", (3,), "float32", 4)
ALL_SCHEMES = [
    ("target-based", 1),
    ("target-free", 1),
    ("iterated-shared", 3),
    ("ensemble-shared", 2),
    ("iterated-target-based", 3),
]


def random_batch(spec: EnvSpec = SMALL, size: int = 8, seed: int = 0) -> Transition:
    rng = np.random.default_rng(seed)

    def observations() -> np.ndarray:
        shape = (size, *spec.obs_shape)
        if spec.frame_dtype == "float32":
            return rng.normal(size=shape).astype(np.float32)
        return rng.integers(0, 256, shape).astype(spec.frame_dtype)

    return Transition(
        obs=observations(),
        action=rng.integers(0, spec.num_actions, size).astype(np.int32),
        reward=rng.normal(size=size).astype(np.float32),
        discount=(0.9 * (rng.random(size) < 0.8)).astype(np.float32),
        next_obs=observations(),
    )


def make_agent(spec: EnvSpec = SMALL, **fields):
    config = Config(**{"hidden_sizes": (5,), "learning_rate": 0.01} | fields)
    return config, q_learning.make(config, spec)


def assert_trees_close(actual, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
