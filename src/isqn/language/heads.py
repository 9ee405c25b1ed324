"""Networks over tokens: a policy, and values with heads along a leading axis, each on a GPT-2 of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isqn.language.gpt2 import GPT2, Cache, Size, apply
from isqn.types import Array, Params

VALUES = ("q1", "q2", "v")


class ValueNetwork(NamedTuple):
    """`params` is {"torso": {"gpt2", "q1", "q2", "v"}, "heads": {"q1", "q2", "v"}}: the hidden layer of each value is
    shared by all its heads, and belongs to the torso; head k is index k of axis 0 of each last layer."""

    init: Callable[[Array], Params]
    features: Callable[..., tuple[Array, Cache | None]]  # params, tokens, real, cache, places, dropout key -> (B, T, F)
    q: Callable[[Params, Array], Array]  # params, features (B, T, F) -> (2, B, T, H, tokens)
    v: Callable[[Params, Array], Array]  # params, features (B, S, F) -> (B, S, H)
    hidden: Callable[[Params, Array], list[Array]]  # params, features (..., F) -> what its heads see of each value


def make_values(size: Size, num_heads: int, hidden_size: int) -> ValueNetwork:
    """With a layer of so many units between the features and the heads of each value."""
    module = GPT2(size)
    outputs = {"q1": size.vocabulary, "q2": size.vocabulary, "v": 1}

    def init(key: Array) -> Params:
        torso, *keys = jax.random.split(key, 1 + 2 * len(VALUES))
        gpt2 = module.init(torso, jnp.zeros((1, 1), int))["params"]
        hidden_layers = {name: _linear(keys[i], size.width, hidden_size) for i, name in enumerate(VALUES)}
        heads = {}
        for i, name in enumerate(VALUES, start=len(VALUES)):
            flat = _linear(keys[i], hidden_size, num_heads * outputs[name])
            kernel = flat["kernel"].reshape(hidden_size, num_heads, outputs[name]).swapaxes(0, 1)
            heads[name] = {"kernel": kernel, "bias": flat["bias"].reshape(num_heads, outputs[name])}
        return {"torso": {"gpt2": gpt2, **hidden_layers}, "heads": heads}

    def features(params: Params, *seen: Any, key: Array | None = None) -> tuple[Array, Cache | None]:
        return apply(module, params["torso"]["gpt2"], *seen, key=key)

    def wide(params: Params, name: str, features: Array) -> Array:
        layer = params["torso"][name]
        return jax.nn.relu(features.astype(size.dtype) @ layer["kernel"].astype(size.dtype) + layer["bias"])

    def value(params: Params, name: str, features: Array) -> Array:
        heads = params["heads"][name]
        seen = wide(params, name, features).astype(size.dtype)
        said = jnp.einsum("btf,hfa->btha", seen, heads["kernel"].astype(size.dtype)) + heads["bias"]
        return said.astype(jnp.float32)

    def q(params: Params, features: Array) -> Array:
        return jnp.stack([value(params, name, features) for name in ("q1", "q2")])

    def v(params: Params, features: Array) -> Array:
        return value(params, "v", features)[..., 0]

    def hidden(params: Params, features: Array) -> list[Array]:
        return [wide(params, name, features) for name in VALUES]

    return ValueNetwork(init, features, q, v, hidden)


def without_v(params: Params) -> Params:
    """Return what a target network copies: there is no target for V."""
    return {part: {name: w for name, w in tree.items() if name != "v"} for part, tree in params.items()}


def _linear(key: Array, inputs: int, outputs: int) -> Params:
    """As PyTorch's layers begin: uniform, as wide as the inputs say, biases too."""
    first, second = jax.random.split(key)
    bound = inputs**-0.5
    uniform = lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)  # noqa: E731
    return {"kernel": uniform(first, (inputs, outputs)), "bias": uniform(second, (outputs,))}
