"""Networks over tokens: values with heads along a leading axis, and a policy, each on a GPT-2 of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from isqn.language.gpt2 import GPT2, Cache, Size, apply, empty_cache
from isqn.types import Array, Params

if TYPE_CHECKING:
    from isqn.language.agent import IlqlConfig

VALUES = ("q1", "q2", "v")


class ValueNetwork(NamedTuple):
    """Functions of the value network: a GPT-2, then for each of Q1, Q2 and V a hidden layer and the heads.

    `params` is {"torso": {"gpt2", "q1", "q2", "v"}, "heads": {"q1", "q2", "v"}}. The hidden layer of each value is
    shared by all its heads and belongs to the torso; head k is index k of axis 0 of each last layer.
    """

    init: Callable[[Array], Params]
    features: Callable[..., tuple[Array, Cache | None]]  # params, tokens, is_token, cache, starts, key -> (B, T, F)
    q: Callable[[Params, Array], Array]  # params, features (B, T, F) -> (2, B, T, heads, tokens)
    v: Callable[[Params, Array], Array]  # params, features (B, S, F) -> (B, S, heads)
    hidden: Callable[[Params, Array], list[Array]]  # params, features (..., F) -> hidden layer of each value


class PolicyNetwork(NamedTuple):
    """Functions of the policy: a GPT-2 whose token embedding also gives the logits."""

    features: Callable[..., tuple[Array, Cache | None]]  # params, tokens, is_token, cache, starts, key -> (B, T, F)
    logits: Callable[[Params, Array], Array]  # params, features (..., F) -> (..., tokens)


class Networks(NamedTuple):
    """Networks of a language agent, on torsos of the same size."""

    values: ValueNetwork
    policy: PolicyNetwork
    empty_cache: Callable[[int, int], Cache]  # games, length


def make_networks(config: IlqlConfig, vocabulary: int, *, unroll: bool = False) -> Networks:
    """Make the networks; with `unroll`, each layer is compiled on its own, so that the compiler counts all its work."""
    size = Size(
        unroll=unroll,
        vocabulary=vocabulary,
        positions=config.num_positions,
        width=config.model_width,
        layers=config.num_layers,
        heads=config.attention_heads,
        dropout=config.dropout,
        rematerialise=config.rematerialise,
        dtype=jnp.dtype(config.compute_dtype),
    )
    return Networks(
        values=make_values(size, config.target_scheme.num_heads, config.head_hidden_size),
        policy=make_policy(size),
        empty_cache=lambda games, length: empty_cache(size, games, length),
    )


def make_values(size: Size, num_heads: int, hidden_size: int) -> ValueNetwork:
    """Make the value network, with a hidden layer of `hidden_size` units for each value."""
    module = GPT2(size)
    outputs = {"q1": size.vocabulary, "q2": size.vocabulary, "v": 1}

    def init(key: Array) -> Params:
        torso_key, *keys = jax.random.split(key, 1 + 2 * len(VALUES))
        gpt2 = module.init(torso_key, jnp.zeros((1, 1), int))["params"]
        hidden_layers = {name: _init_linear(keys[i], size.width, hidden_size) for i, name in enumerate(VALUES)}
        heads = {}
        for i, name in enumerate(VALUES, start=len(VALUES)):
            flat = _init_linear(keys[i], hidden_size, num_heads * outputs[name])
            kernel = flat["kernel"].reshape(hidden_size, num_heads, outputs[name]).swapaxes(0, 1)
            heads[name] = {"kernel": kernel, "bias": flat["bias"].reshape(num_heads, outputs[name])}
        return {"torso": {"gpt2": gpt2, **hidden_layers}, "heads": heads}

    def features(params: Params, *inputs: Any, key: Array | None = None) -> tuple[Array, Cache | None]:
        return apply(module, params["torso"]["gpt2"], *inputs, key=key)

    def hidden_layer(params: Params, name: str, features: Array) -> Array:
        layer = params["torso"][name]
        return jax.nn.relu(features.astype(size.dtype) @ layer["kernel"].astype(size.dtype) + layer["bias"])

    def outputs_of(params: Params, name: str, features: Array) -> Array:
        heads = params["heads"][name]
        inputs = hidden_layer(params, name, features).astype(size.dtype)
        values = jnp.einsum("btf,hfa->btha", inputs, heads["kernel"].astype(size.dtype)) + heads["bias"]
        return values.astype(jnp.float32)

    def q(params: Params, features: Array) -> Array:
        return jnp.stack([outputs_of(params, name, features) for name in ("q1", "q2")])

    def v(params: Params, features: Array) -> Array:
        return outputs_of(params, "v", features)[..., 0]

    def hidden(params: Params, features: Array) -> list[Array]:
        return [hidden_layer(params, name, features) for name in VALUES]

    return ValueNetwork(init, features, q, v, hidden)


def make_policy(size: Size) -> PolicyNetwork:
    module = GPT2(size)

    def features(params: Params, *inputs: Any, key: Array | None = None) -> tuple[Array, Cache | None]:
        return apply(module, params, *inputs, key=key)

    def logits(params: Params, features: Array) -> Array:
        return (features @ params["tokens"].T.astype(features.dtype)).astype(jnp.float32)

    return PolicyNetwork(features, logits)


def without_v(params: Params) -> Params:
    """Return the parameters that a target network copies: all but those of V, which has no target network."""
    return {part: {name: w for name, w in tree.items() if name != "v"} for part, tree in params.items()}


def _init_linear(key: Array, inputs: int, outputs: int) -> Params:
    """Initialise a linear layer as PyTorch does: kernel and bias uniform within 1 / sqrt(inputs)."""
    kernel_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5

    def uniform(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    return {"kernel": uniform(kernel_key, (inputs, outputs)), "bias": uniform(bias_key, (outputs,))}
