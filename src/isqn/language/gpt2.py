"""GPT-2 (Radford et al. 2019): a torso over tokens, of any size, whose layers are one program.

Features are those behind the last LayerNorm. Layers are stacked along a first axis and run by a scan, so that
twelve of them compile as fast as one.
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

FEW_LAYERS = 4  # up to here each is compiled on its own: a third less time than a loop, which fills buffers before it


@dataclass(frozen=True)
class Size:
    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.0
    rematerialise: bool = False  # compute the inside of a layer again for its gradient, to save memory
    unroll: bool = False  # compile each layer on its own: the work of a loop is counted once, however long it is
    dtype: jnp.dtype = jnp.float32  # of matrix products; parameters stay float32


class Cache(NamedTuple):
    """What later tokens need of earlier ones, (layers, B, heads, positions, width of a head) each."""

    keys: Array
    values: Array


def empty_cache(size: Size, batch: int, length: int) -> Cache:
    shape = (size.layers, batch, size.heads, length, size.width // size.heads)
    return Cache(jnp.zeros(shape, size.dtype), jnp.zeros(shape, size.dtype))


def _dense(size: Size, x: Array, features: int, name: str, deviation: float = 0.02) -> Array:
    layer = nn.Dense(features, dtype=size.dtype, kernel_init=nn.initializers.normal(deviation), name=name)
    # all tokens as rows of one matrix: XLA's gradients of a product with two batch axes take up to twice as long
    return layer(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], features)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, dtype=jnp.float32, name=name)


class Block(nn.Module):
    size: Size
    train: bool

    @nn.compact
    def __call__(self, x: Array, cache: Cache | None, seen: Array, places: Array) -> tuple[Array, Cache | None]:
        """`seen` (B, T, S) says which keys each token looks at; `places` (B,) where these tokens go in the cache."""
        size = self.size
        # the two that are added to the stream are smaller, as there are so many of them
        residual = 0.02 / (2 * size.layers) ** 0.5
        split = lambda y: y.reshape(*y.shape[:2], size.heads, -1).swapaxes(1, 2)  # noqa: E731 - (B, heads, T, width)
        query, key, value = map(split, jnp.split(_dense(size, _norm("norm_1")(x), 3 * size.width, "attend"), 3, -1))
        if cache is not None:
            put = jax.vmap(lambda old, new, place: jax.lax.dynamic_update_slice(old, new, (0, place, 0)))
            cache = Cache(put(cache.keys, key, places), put(cache.values, value, places))
            key, value = cache
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, key).astype(jnp.float32) / key.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, jnp.finfo(jnp.float32).min))
        weights = self._dropped(weights).astype(size.dtype)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, value).swapaxes(1, 2).reshape(x.shape)
        x = x + self._dropped(_dense(size, mixed, size.width, "mix", residual))
        hidden = nn.gelu(_dense(size, _norm("norm_2")(x), 4 * size.width, "widen"), approximate=True)
        return x + self._dropped(_dense(size, hidden, size.width, "narrow", residual)), cache

    def _dropped(self, x: Array) -> Array:
        return nn.Dropout(self.size.dropout, deterministic=not self.train)(x)


class GPT2(nn.Module):
    size: Size

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        real: Array | None = None,
        cache: Cache | None = None,
        places: Any = None,
        *,
        train: bool = False,
    ) -> tuple[Array, Cache | None]:
        """Features (B, T, F) of tokens (B, T). `real` (B, T) is False where there is only padding.

        With a cache the tokens are behind those that it holds: from `places` (B,) on.
        """
        size = self.size
        embedding = self.param("tokens", nn.initializers.normal(0.02), (size.vocabulary, size.width))
        position = self.param("positions", nn.initializers.normal(0.02), (size.positions, size.width))
        batch, length = tokens.shape
        start = jnp.zeros(batch, int) if places is None else places
        numbers = start[:, None] + jnp.arange(length)
        # as a product, whose gradient is one too: that of an index adds up one by one
        x = jax.nn.one_hot(tokens, size.vocabulary) @ embedding
        x = x + (position[:length] if places is None else position[numbers])
        x = nn.Dropout(size.dropout, deterministic=not train)(x)
        keys = length if cache is None else cache.keys.shape[-2]
        seen = jnp.arange(keys) <= numbers[..., None]
        if real is not None:
            seen &= real[:, None]
        kind = nn.remat(Block, prevent_cse=False) if size.rematerialise else Block
        layers = nn.scan(
            kind,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=size.layers,
            unroll=size.layers if size.unroll or size.layers <= FEW_LAYERS else 1,
        )
        x, cache = layers(size, train, name="layers")(x, cache, seen, start)
        return _norm("norm")(x), cache


def apply(module: GPT2, params: Params, *seen: Any, key: Array | None = None) -> tuple[Array, Cache | None]:
    """Features of what is seen, as `GPT2` says; with a key, units are dropped."""
    rngs = {} if key is None else {"dropout": key}
    return module.apply({"params": params}, *seen, train=key is not None, rngs=rngs)  # type: ignore[return-value]


# our name -> theirs, and theirs of each layer
_OUTSIDE = {"tokens": "wte.weight", "positions": "wpe.weight", "norm.scale": "ln_f.weight", "norm.bias": "ln_f.bias"}
_LAYERS = {"attend": "attn.c_attn", "mix": "attn.c_proj", "widen": "mlp.c_fc", "narrow": "mlp.c_proj"}
_NORMS = {"norm_1": "ln_1", "norm_2": "ln_2"}
_INSIDE = {
    f"{ours}.{part}": f"{theirs}.{'bias' if part == 'bias' else 'weight'}"
    for names, first in ((_LAYERS, "kernel"), (_NORMS, "scale"))
    for ours, theirs in names.items()
    for part in (first, "bias")
}


def load_weights(path: Path, params: Params) -> Params:
    """Parameters as a file of GPT-2's has them: matrices from inputs to outputs, names with or without `transformer.`.

    Embeddings of tokens stay as they are if the vocabulary is another one, and of the positions the first are taken.
    """
    if path.is_dir():
        raise UserError(f"--gpt2-weights {path} is a folder; give the file of safetensors in it.")
    try:
        theirs = {name.removeprefix("transformer."): array for name, array in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"--gpt2-weights {path} cannot be read as weights of GPT-2 ({error}).") from None
    layers = params["layers"]["norm_1"]["scale"].shape[0]
    has = len({name.split(".")[1] for name in theirs if name.startswith("h.")})
    if has != layers:
        raise UserError(f"--gpt2-weights {path} has {has} layers; --num-layers is {layers}.")

    def taken(ours: Any, mine: Array) -> Array:
        name = ".".join(part.key for part in ours).removeprefix("layers.")
        inside = name in _INSIDE
        names = [f"h.{layer}.{_INSIDE[name]}" for layer in range(layers)] if inside else [_OUTSIDE[name]]
        if missing := [n for n in names if n not in theirs]:
            raise UserError(f"--gpt2-weights {path} has no {missing[0]}, which GPT-2 has.")
        found = np.stack([theirs[n] for n in names]) if inside else theirs[names[0]]
        if name == "tokens" and found.shape != mine.shape:
            return mine
        if name == "positions":
            found = found[: len(mine)]
        if found.shape != mine.shape:
            raise UserError(
                f"--gpt2-weights {path}: {names[0]} is {found.shape[inside:]}, and {mine.shape[inside:]} is asked for "
                "(--model-width, --num-positions)."
            )
        if not np.isfinite(found).all():
            raise UserError(f"--gpt2-weights {path}: not all of {names[0]} are finite numbers.")
        return jnp.asarray(found, mine.dtype)

    return jax.tree_util.tree_map_with_path(taken, params)
