"""GPT-2 against a plain computation of it, its size, its cache, and weights from a file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers import gpt2_weights
from isqn.language.gpt2 import GPT2, Size, empty_cache, load_weights
from isqn.types import UserError

TINY = Size(vocabulary=11, positions=16, width=8, layers=3, heads=2, dropout=0.0)
TOKENS = np.random.default_rng(0).integers(0, 11, (4, 9))


@pytest.fixture(scope="module")
def params():
    return GPT2(TINY).init(jax.random.key(0), TOKENS)["params"]


@pytest.fixture(scope="module")
def theirs() -> dict[str, np.ndarray]:
    """Of a vocabulary and of positions that fit."""
    return gpt2_weights(TINY.width, TINY.layers, TINY.vocabulary, TINY.positions)


def reference(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """One sequence, one head after the other, in float64."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: len(tokens)]
    side = TINY.width // TINY.heads
    for layer in range(TINY.layers):
        joined = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn")
        q, k, v = np.split(joined, 3, axis=-1)
        heads = []
        for head in range(TINY.heads):
            part = slice(head * side, (head + 1) * side)
            scores = q[:, part] @ k[:, part].T / np.sqrt(side)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, part])
        x = x + linear(np.concatenate(heads, axis=-1), f"h.{layer}.attn.c_proj")
        hidden = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + linear(hidden, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f")


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_weights_of_a_file_compute_what_gpt2_computes(prefix, theirs, params, tmp_path):
    save_file({prefix + name: array for name, array in theirs.items()}, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path / "model.safetensors", params)
    features, _ = GPT2(TINY).apply({"params": loaded}, TOKENS)
    for mine, tokens in zip(features, TOKENS, strict=True):
        np.testing.assert_allclose(mine, reference(theirs, tokens), rtol=1e-4, atol=1e-4)


def test_another_vocabulary_keeps_its_own_embeddings(theirs, params, tmp_path):
    larger = theirs | {"wte.weight": np.zeros((50, 8), np.float32), "wpe.weight": np.ones((99, 8), np.float32)}
    save_file(larger, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path / "model.safetensors", params)
    np.testing.assert_array_equal(loaded["tokens"], params["tokens"])
    assert loaded["positions"].shape == (16, 8)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"h.2.mlp.c_fc.bias": None}, r"has no h\.2\.mlp\.c_fc\.bias, which GPT-2 has"),
        ({"h.3.ln_1.bias": np.zeros(8, np.float32)}, "has 4 layers; --num-layers is 3"),
        ({"ln_f.bias": np.full(8, np.nan, np.float32)}, r"not all of ln_f\.bias are finite numbers"),
        ({"ln_f.bias": np.zeros(3, np.float32)}, r"ln_f\.bias is \(3,\), and \(8,\) is asked for"),
    ],
)
def test_other_weights_are_refused(change, sentence, theirs, params, tmp_path):
    kept = {name: array for name, array in (theirs | change).items() if array is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=sentence):
        load_weights(tmp_path / "model.safetensors", params)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot be read as weights of GPT-2"):
        load_weights(tmp_path / "model.safetensors", params)


def test_nothing_is_known_of_later_tokens(params):
    changed = TOKENS.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % 11
    first, second = (GPT2(TINY).apply({"params": params}, tokens)[0] for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(first[:, :6], second[:, :6])
    assert (first[:, 6:] != second[:, 6:]).any()


def test_padding_is_not_looked_at(params):
    """On the left, where tokens behind it would see it."""
    real = np.arange(9) >= np.array([0, 2, 4, 0])[:, None]
    changed = np.where(real, TOKENS, 0)
    first, second = (GPT2(TINY).apply({"params": params}, tokens, real)[0] for tokens in (TOKENS, changed))
    np.testing.assert_allclose(first[real], second[real], rtol=1e-5, atol=1e-6)


def test_a_cache_gives_what_a_whole_pass_gives(params):
    """Games of other lengths: each goes on where it is."""
    whole, _ = GPT2(TINY).apply({"params": params}, TOKENS)
    lengths = np.array([3, 5, 2, 4])
    cache = empty_cache(TINY, 4, 12)
    found, cache = GPT2(TINY).apply({"params": params}, TOKENS[:, :5], None, cache, jnp.zeros(4, int))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
    for step in range(3):  # what was padding is overwritten
        here = lengths + step
        found, cache = GPT2(TINY).apply(
            {"params": params}, np.take_along_axis(TOKENS, here[:, None], 1), None, cache, jnp.asarray(here)
        )
        np.testing.assert_allclose(found[:, 0], whole[np.arange(4), here], rtol=1e-4, atol=1e-5)


def test_dropout_draws_in_training_only(params):
    module = GPT2(Size(vocabulary=11, positions=16, width=8, layers=3, heads=2, dropout=0.5))
    keys = [{"dropout": jax.random.key(seed)} for seed in (0, 0, 1)]
    first, same, other = (module.apply({"params": params}, TOKENS, train=True, rngs=key)[0] for key in keys)
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    np.testing.assert_array_equal(
        module.apply({"params": params}, TOKENS)[0], GPT2(TINY).apply({"params": params}, TOKENS)[0]
    )


@pytest.mark.parametrize("change", [{"rematerialise": True}, {"dtype": jnp.bfloat16}])
def test_memory_may_be_saved(change, params):
    def total(params, size):
        return (GPT2(size).apply({"params": params}, TOKENS)[0] ** 2 * np.arange(8)).mean()

    plain = jax.grad(total)(params, TINY)
    saved = jax.grad(total)(params, Size(**{**TINY.__dict__, **change}))
    rough = 1e-5 if "rematerialise" in change else 0.1
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(saved), strict=True):
        np.testing.assert_allclose(a, b, rtol=rough, atol=rough * np.abs(a).max())
        assert b.dtype == np.float32
