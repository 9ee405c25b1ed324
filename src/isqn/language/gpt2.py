"""GPT-2 (Radford et al. 2019) of any size, as a torso: its features are the output of the final LayerNorm.

The layers are stacked along a first axis and run by a scan, so that twelve layers compile as fast as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from isqn.types import Array, Params, UserError

FEW_LAYERS = 4  # up to here layers are unrolled, a third faster than a loop, which first fills its buffers


@dataclass(frozen=True)
class Size:
    """Size and options of a GPT-2."""

    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.0
    rematerialise: bool = False  # recompute each layer in the backward pass, to save memory
    unroll: bool = False  # compile each layer on its own: the compiler counts the work of a loop only once
    dtype: jnp.dtype = jnp.float32  # of matrix products; parameters stay float32


class Cache(NamedTuple):
    """Keys and values of earlier tokens, each of shape (layers, B, heads, positions, head width)."""

    keys: Array
    values: Array


def empty_cache(size: Size, batch: int, length: int) -> Cache:
    """Return a cache for `batch` sequences of at most `length` tokens."""
    shape = (size.layers, batch, size.heads, length, size.width // size.heads)
    return Cache(jnp.zeros(shape, size.dtype), jnp.zeros(shape, size.dtype))


def _dense(size: Size, x: Array, features: int, name: str, stddev: float = 0.02) -> Array:
    layer = nn.Dense(features, dtype=size.dtype, kernel_init=nn.initializers.normal(stddev), name=name)
    # one matrix with a row per token: XLA's gradients of a product with two batch axes take up to twice as long
    return layer(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], features)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, dtype=jnp.float32, name=name)


class Block(nn.Module):
    """Transformer layer: attention and MLP, each with LayerNorm before it and a residual connection around it."""

    size: Size
    train: bool

    @nn.compact
    def __call__(self, x: Array, cache: Cache | None, mask: Array, starts: Array) -> tuple[Array, Cache | None]:
        """Apply the layer to features (B, T, width); return them and the updated cache.

        `mask` (B, T, S) marks the keys that each token attends to; `starts` (B,) are the positions of the first token
        in the cache.
        """
        size = self.size
        # the two layers that add to the residual stream begin smaller, because many of them add up
        residual = 0.02 / (2 * size.layers) ** 0.5
        split = lambda y: y.reshape(*y.shape[:2], size.heads, -1).swapaxes(1, 2)  # noqa: E731 - (B, heads, T, width)
        query, key, value = map(split, jnp.split(_dense(size, _norm("norm_1")(x), 3 * size.width, "attend"), 3, -1))
        if cache is not None:
            write = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice(old, new, (0, start, 0)))
            cache = Cache(write(cache.keys, key, starts), write(cache.values, value, starts))
            key, value = cache
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, key).astype(jnp.float32) / key.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min))
        weights = self._drop(weights).astype(size.dtype)
        attended = jnp.einsum("bhqk,bhkd->bhqd", weights, value).swapaxes(1, 2).reshape(x.shape)
        x = x + self._drop(_dense(size, attended, size.width, "mix", residual))
        hidden = nn.gelu(_dense(size, _norm("norm_2")(x), 4 * size.width, "widen"), approximate=True)
        return x + self._drop(_dense(size, hidden, size.width, "narrow", residual)), cache

    def _drop(self, x: Array) -> Array:
        return nn.Dropout(self.size.dropout, deterministic=not self.train)(x)


class GPT2(nn.Module):
    """Features of a token sequence, by causal self-attention."""

    size: Size

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        is_token: Array | None = None,
        cache: Cache | None = None,
        starts: Any = None,
        *,
        train: bool = False,
    ) -> tuple[Array, Cache | None]:
        """Return the features (B, T, width) of tokens (B, T), and the updated cache.

        `is_token` (B, T) is False for padding. With a cache, the tokens continue the sequences in it: the first token
        is at position `starts` (B,).
        """
        size = self.size
        embedding = self.param("tokens", nn.initializers.normal(0.02), (size.vocabulary, size.width))
        position_embedding = self.param("positions", nn.initializers.normal(0.02), (size.positions, size.width))
        batch, length = tokens.shape
        first = jnp.zeros(batch, int) if starts is None else starts
        positions = first[:, None] + jnp.arange(length)
        # a matrix product, whose gradient is one too: the gradient of indexing adds up row by row
        x = jax.nn.one_hot(tokens, size.vocabulary) @ embedding
        x = x + (position_embedding[:length] if starts is None else position_embedding[positions])
        x = nn.Dropout(size.dropout, deterministic=not train)(x)
        num_keys = length if cache is None else cache.keys.shape[-2]
        mask = jnp.arange(num_keys) <= positions[..., None]
        if is_token is not None:
            mask &= is_token[:, None]
        block = nn.remat(Block, prevent_cse=False) if size.rematerialise else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=size.layers,
            unroll=size.layers if size.unroll or size.layers <= FEW_LAYERS else 1,
        )
        x, cache = layers(size, train, name="layers")(x, cache, mask, first)
        return _norm("norm")(x), cache


def apply(module: GPT2, params: Params, *inputs: Any, key: Array | None = None) -> tuple[Array, Cache | None]:
    """Apply the module to its inputs; with a key, dropout is on."""
    rngs = {} if key is None else {"dropout": key}
    return module.apply({"params": params}, *inputs, train=key is not None, rngs=rngs)  # type: ignore[return-value]


# -- weights from a file

# name here -> name in the file; and within each layer
_OUTSIDE = {"tokens": "wte.weight", "positions": "wpe.weight", "norm.scale": "ln_f.weight", "norm.bias": "ln_f.bias"}
_DENSE = {"attend": "attn.c_attn", "mix": "attn.c_proj", "widen": "mlp.c_fc", "narrow": "mlp.c_proj"}
_NORMS = {"norm_1": "ln_1", "norm_2": "ln_2"}
_INSIDE = {
    f"{ours}.{part}": f"{theirs}.{'bias' if part == 'bias' else 'weight'}"
    for names, weight in ((_DENSE, "kernel"), (_NORMS, "scale"))
    for ours, theirs in names.items()
    for part in (weight, "bias")
}


def load_weights(path: Path, params: Params) -> Params:
    """Load GPT-2 weights from a safetensors file, with or without `transformer.` in front of the names.

    Token embeddings stay as they are if the vocabulary differs; of the position embeddings the first ones are loaded.
    """
    if path.is_dir():
        raise UserError(f"--gpt2-weights {path} is a folder; give the file of safetensors in it.")
    try:
        arrays = {name.removeprefix("transformer."): array for name, array in load_file(path).items()}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--gpt2-weights {path} cannot be read as weights of GPT-2 ({error}).") from None
    num_layers = params["layers"]["norm_1"]["scale"].shape[0]
    found = len({name.split(".")[1] for name in arrays if name.startswith("h.")})
    if found != num_layers:
        raise UserError(f"--gpt2-weights {path} has {found} layers; --num-layers is {num_layers}.")

    def load_leaf(keys: Any, current: Array) -> Array:
        name = ".".join(part.key for part in keys).removeprefix("layers.")
        is_stacked = name in _INSIDE
        names = [f"h.{layer}.{_INSIDE[name]}" for layer in range(num_layers)] if is_stacked else [_OUTSIDE[name]]
        if missing := [n for n in names if n not in arrays]:
            raise UserError(f"--gpt2-weights {path} has no {missing[0]}, which GPT-2 has.")
        if len({arrays[n].shape for n in names}) > 1:
            raise UserError(f"--gpt2-weights {path}: {names[0]} has another shape than in other layers.")
        array = np.stack([arrays[n] for n in names]) if is_stacked else arrays[names[0]]
        if name == "tokens" and array.shape != current.shape:
            return current
        if name == "positions":
            array = array[: len(current)]
        if array.shape != current.shape:
            raise UserError(
                f"--gpt2-weights {path}: {names[0]} has shape {array.shape[is_stacked:]}; it must have "
                f"{current.shape[is_stacked:]} (--model-width, --num-positions)."
            )
        if not np.isfinite(array).all():
            raise UserError(f"--gpt2-weights {path}: not all of {names[0]} are finite numbers.")
        return jnp.asarray(array, current.dtype)

    return jax.tree_util.tree_map_with_path(load_leaf, params)
