"""GPT-2 against a reference in NumPy; its cache, its dropout, and weights from a file."""

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
def weights() -> dict[str, np.ndarray]:
    """Weights of a file that fits the module."""
    return gpt2_weights(TINY.width, TINY.layers, TINY.vocabulary, TINY.positions)


def reference(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Features of one sequence in float64, head by head."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        standardise = x - x.mean(-1, keepdims=True)
        scaled = standardise / np.sqrt((standardise**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: len(tokens)]
    head_width = TINY.width // TINY.heads
    for layer in range(TINY.layers):
        joined = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn")
        q, k, v = np.split(joined, 3, axis=-1)
        heads = []
        for head in range(TINY.heads):
            part = slice(head * head_width, (head + 1) * head_width)
            scores = q[:, part] @ k[:, part].T / np.sqrt(head_width)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            attention = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(attention / attention.sum(-1, keepdims=True) @ v[:, part])
        x = x + linear(np.concatenate(heads, axis=-1), f"h.{layer}.attn.c_proj")
        hidden = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + linear(hidden, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f")


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_weights_from_a_file_give_the_features_of_the_reference(prefix, weights, params, tmp_path):
    save_file({prefix + name: array for name, array in weights.items()}, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path / "model.safetensors", params)
    features, _ = GPT2(TINY).apply({"params": loaded}, TOKENS)
    for actual, tokens in zip(features, TOKENS, strict=True):
        np.testing.assert_allclose(actual, reference(weights, tokens), rtol=1e-4, atol=1e-4)


def test_token_embeddings_of_another_vocabulary_are_not_loaded(weights, params, tmp_path):
    larger = weights | {"wte.weight": np.zeros((50, 8), np.float32), "wpe.weight": np.ones((99, 8), np.float32)}
    save_file(larger, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path / "model.safetensors", params)
    np.testing.assert_array_equal(loaded["tokens"], params["tokens"])
    assert loaded["positions"].shape == (16, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h.2.mlp.c_fc.bias": None}, r"has no h\.2\.mlp\.c_fc\.bias, which GPT-2 has"),
        ({"h.3.ln_1.bias": np.zeros(8, np.float32)}, "has 4 layers; --num-layers is 3"),
        ({"ln_f.bias": np.full(8, np.nan, np.float32)}, r"not all of ln_f\.bias are finite numbers"),
        ({"ln_f.bias": np.zeros(3, np.float32)}, r"ln_f\.bias has shape \(3,\); it must have \(8,\)"),
    ],
)
def test_unsuitable_weights_are_refused(change, message, weights, params, tmp_path):
    given = {name: array for name, array in (weights | change).items() if array is not None}
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_weights(tmp_path / "model.safetensors", params)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot be read as weights of GPT-2"):
        load_weights(tmp_path / "model.safetensors", params)


def test_features_do_not_depend_on_later_tokens(params):
    changed = TOKENS.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % 11
    first, second = (GPT2(TINY).apply({"params": params}, tokens)[0] for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(first[:, :6], second[:, :6])
    assert (first[:, 6:] != second[:, 6:]).any()


def test_padding_is_masked(params):
    """The padding is on the left, where the causal mask does not hide it from the tokens after it."""
    is_token = np.arange(9) >= np.array([0, 2, 4, 0])[:, None]
    changed = np.where(is_token, TOKENS, 0)
    first, second = (GPT2(TINY).apply({"params": params}, tokens, is_token)[0] for tokens in (TOKENS, changed))
    np.testing.assert_allclose(first[is_token], second[is_token], rtol=1e-5, atol=1e-6)


def test_features_with_a_cache_equal_those_of_a_whole_pass(params):
    """The sequences have different lengths, and each is continued from its own end."""
    whole, _ = GPT2(TINY).apply({"params": params}, TOKENS)
    lengths = np.array([3, 5, 2, 4])
    cache = empty_cache(TINY, 4, 12)
    features, cache = GPT2(TINY).apply({"params": params}, TOKENS[:, :5], None, cache, jnp.zeros(4, int))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(features[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
    for step in range(3):  # new tokens overwrite the padding in the cache
        positions = lengths + step
        features, cache = GPT2(TINY).apply(
            {"params": params}, np.take_along_axis(TOKENS, positions[:, None], 1), None, cache, jnp.asarray(positions)
        )
        np.testing.assert_allclose(features[:, 0], whole[np.arange(4), positions], rtol=1e-4, atol=1e-5)


def test_dropout_is_on_in_training_only(params):
    module = GPT2(Size(vocabulary=11, positions=16, width=8, layers=3, heads=2, dropout=0.5))
    keys = [{"dropout": jax.random.key(seed)} for seed in (0, 0, 1)]
    first, same, other = (module.apply({"params": params}, TOKENS, train=True, rngs=key)[0] for key in keys)
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    np.testing.assert_array_equal(
        module.apply({"params": params}, TOKENS)[0], GPT2(TINY).apply({"params": params}, TOKENS)[0]
    )


@pytest.mark.parametrize("change", [{"rematerialise": True}, {"dtype": jnp.bfloat16}])
def test_options_that_save_memory_give_the_same_gradients(change, params):
    def total(params, size):
        return (GPT2(size).apply({"params": params}, TOKENS)[0] ** 2 * np.arange(8)).mean()

    expected = jax.grad(total)(params, TINY)
    grads = jax.grad(total)(params, Size(**{**TINY.__dict__, **change}))
    tolerance = 1e-5 if "rematerialise" in change else 0.1
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(a).max())
        assert b.dtype == np.float32
