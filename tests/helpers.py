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


TINY_WRITER = {"num_layers": 1, "model_width": 8, "attention_heads": 2, "head_hidden_size": 6, "num_words": 8}


def gpt2_weights(width: int, layers: int, vocabulary: int, positions: int) -> dict[str, np.ndarray]:
    """Drawn at random, under the usual names."""
    rng, w = np.random.default_rng(1), width
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, w), "wpe.weight": (positions, w)}
    norms = ["ln_f", *(f"h.{layer}.ln_{n}" for layer in range(layers) for n in (1, 2))]
    for layer in range(layers):
        for name, ins, outs in (
            *(("attn.c_attn", w, 3 * w), ("attn.c_proj", w, w)),
            *(("mlp.c_fc", w, 4 * w), ("mlp.c_proj", 4 * w, w)),
        ):
            shapes |= {f"h.{layer}.{name}.weight": (ins, outs), f"h.{layer}.{name}.bias": (outs,)}
    shapes |= {f"{norm}.{part}": (w,) for norm in norms for part in ("weight", "bias")}
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


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
