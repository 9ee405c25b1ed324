"""Networks: a torso and linear heads along a leading axis. The only folder that knows flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from isqn.networks.layers import Style, sparse_uniform
from isqn.networks.simba import SimbaPolicy, orthogonal, unit_columns
from isqn.networks.torsos import SHORTEST_SIDE, TORSOS, MLPPolicy
from isqn.types import Array, EnvSpec, Params, UserError

if TYPE_CHECKING:
    from isqn.experiments.config import Config


class Network(NamedTuple):
    """Pure functions. `params` is {"torso": ..., "heads": {"kernel", "bias"}}, head k at index k of axis 0.

    `statistics` are BatchNorm's running averages, {} without BatchNorm.
    """

    init: Callable[[Array], tuple[Params, Params]]  # key -> params, statistics
    apply: Callable[..., tuple[Array, Params]]  # params, statistics, obs (B, ...), train -> q (B, H, A), statistics
    features: Callable[[Params, Array], Array]  # torso's params, obs (B, ...) -> (B, F), without BatchNorm
    values: Callable[[Params, Array], Array]  # heads' params, features (B, F) -> q (B, H, A)
    look: Callable[[Params, Params, Array], tuple[list[Array], Array]]  # the output of every ReLU, the shared features
    project: Callable[[Params], Params]  # after each step of the optimizer: back to where the parameters may lie


class Policy(NamedTuple):
    """Pure functions of the network that acts."""

    init: Callable[[Array], tuple[Params, Params]]  # key -> params, statistics
    # params, statistics, obs (B, ...), train -> (mean, log of the deviation) (B, A) each, statistics
    apply: Callable[..., tuple[tuple[Array, Array], Params]]
    project: Callable[[Params], Params]


def torso_name(requested: str, spec: EnvSpec, streams: bool = False, critic: bool = False) -> str:
    """ "auto" looks at the observation: a vector, a small image, a large one."""
    side = min(spec.frame_shape[:2])
    if requested == "simba" and not critic:
        raise UserError("--torso simba is for `isqn train sac`; use --torso auto.")
    if requested == "auto":
        if not spec.is_image:
            return "mlp"
        if side < 32:
            return "minatar"
        return "stream" if streams and side >= SHORTEST_SIDE["stream"] else "nature"
    if requested not in TORSOS:
        raise UserError(f"--torso {requested!r} is not known; choose one of auto, {', '.join(TORSOS)}.")
    if requested in SHORTEST_SIDE and not spec.is_image:
        raise UserError(
            f"--torso {requested} needs images, but {spec.id} observes vectors of shape {spec.frame_shape}; "
            "use --torso mlp."
        )
    if side < SHORTEST_SIDE.get(requested, 1):
        raise UserError(
            f"--torso {requested} needs images of at least {SHORTEST_SIDE[requested]} pixels a side, but {spec.id} "
            f"observes {spec.frame_shape}; use --torso auto."
        )
    return requested


def _style(config: Config, **others: Any) -> Style:
    return Style(
        layer_norm=config.layer_norm,
        width_factor=config.width_factor,
        hidden_sizes=config.hidden_sizes,
        dtype=jnp.dtype(config.compute_dtype),
        stream=config.streams,
        layer_norm_axes=config.layer_norm_axes,
        batch_norm_epsilon=config.batch_norm_epsilon,
        batch_norm_kind=config.batch_norm_kind,
        batch_norm_input=config.batch_norm_input,
        **others,
    )


def make_policy(spec: EnvSpec, config: Config) -> Policy:
    simba = torso_name(config.torso, spec, critic=True) == "simba"
    batch_norm = config.uses_batch_norm and config.batch_norm_policy
    style = _style(config, batch_norm=batch_norm, width=config.policy_width, blocks=config.policy_blocks)
    module = (SimbaPolicy if simba else MLPPolicy)(style, spec.num_actions)

    def init(key: Array) -> tuple[Params, Params]:
        variables = module.init(key, jnp.zeros((1, *spec.obs_shape)), False)
        return variables["params"], variables.get("batch_stats", {})

    def apply(params: Params, statistics: Params, obs: Array, train: bool = False) -> Any:
        return _applied(module, params, statistics, obs, train and batch_norm)

    return Policy(init, apply, unit_columns if simba else _unchanged)


def _applied(module: Any, params: Params, statistics: Params, obs: Array, train: bool) -> tuple[Any, Params]:
    """What a module says, and its statistics, which move in training."""
    variables = {"params": params, "batch_stats": statistics}
    if not train:
        return module.apply(variables, obs, False), statistics
    said, changed = module.apply(variables, obs, True, mutable=["batch_stats"])
    return said, changed["batch_stats"]


def make_critic(spec: EnvSpec, num_heads: int, config: Config) -> Network:
    """Of one or two critics: a network over an observation and an action, joined, whose heads have an output for each
    atom of a value. What belongs to one critic has an axis for them: the first of the torso and the statistics, the
    second of the heads; values are (B, H, C, A)."""
    torso_name(config.torso, spec, critic=True)  # what is wrong is said of the observation alone
    joined = spec.obs_shape[-1] + spec.num_actions
    seen = EnvSpec(spec.id, spec.protocol, (joined,), "float32", config.num_atoms)
    one, count, axes = make_network(seen, num_heads, config), 2 if config.twin_q else 1, {"torso": 0, "heads": 1}

    def init(key: Array) -> tuple[Params, Params]:
        return jax.vmap(one.init, out_axes=(axes, 0))(jax.random.split(key, count))

    def apply(params: Params, statistics: Params, x: Array, train: bool = False) -> tuple[Array, Params]:
        return jax.vmap(lambda p, s: one.apply(p, s, x, train), (axes, 0), (2, 0))(params, statistics)

    def look(params: Params, statistics: Params, x: Array) -> tuple[list[Array], Array]:
        first = {"torso": jax.tree.map(lambda w: w[0], params["torso"]), "heads": {}}
        return one.look(first, jax.tree.map(lambda s: s[0], statistics), x)

    return one._replace(init=init, apply=apply, look=look)


def make_network(spec: EnvSpec, num_heads: int, config: Config) -> Network:
    batch_norm = config.uses_batch_norm
    style = _style(config, batch_norm=batch_norm, width=config.critic_width, blocks=config.critic_blocks)
    name = torso_name(config.torso, spec, config.streams, config.is_actor_critic)
    torso, simba = TORSOS[name](style), name == "simba"
    kernel_inits = {"mlp": jax.nn.initializers.lecun_normal(), "simba": orthogonal}
    kernel_init = kernel_inits.get(name, jax.nn.initializers.xavier_uniform())

    def init(key: Array) -> tuple[Params, Params]:
        torso_key, head_key = jax.random.split(key)
        obs = jnp.zeros((1, *spec.obs_shape), spec.frame_dtype)
        variables = torso.init(torso_key, obs, False)
        features = jax.eval_shape(lambda v: torso.apply(v, obs, False), variables).shape[-1]
        # One matrix for all heads, so that the initial range counts the outputs of all of them, as the
        # authors' single last layer does: it shrinks as K grows.
        outputs = num_heads * spec.num_actions
        params, kernel = variables.get("params", {}), kernel_init(head_key, (features, outputs))
        if config.streams:  # where the range does not depend on the outputs
            params, kernel = sparse_uniform(key, (params, kernel), config.initial_sparsity)
        kernel = kernel.reshape(features, num_heads, spec.num_actions).transpose(1, 0, 2)
        heads = {"kernel": kernel, "bias": jnp.zeros((num_heads, spec.num_actions))}
        return {"torso": params, "heads": heads}, variables.get("batch_stats", {})

    def apply(params: Params, statistics: Params, obs: Array, train: bool = False) -> tuple[Array, Params]:
        features, statistics = _applied(torso, params["torso"], statistics, obs, train and batch_norm)
        return values(params["heads"], features), statistics

    def features(params: Params, obs: Array) -> Array:
        return torso.apply({"params": params}, obs, False)  # type: ignore[return-value]

    def values(heads: Params, features: Array) -> Array:
        kernel, bias = (heads[name].astype(style.dtype) for name in ("kernel", "bias"))
        q = jnp.einsum("bf,hfa->bha", features.astype(style.dtype), kernel) + bias
        return q.astype(jnp.float32)  # errors and losses are float32 whatever the torso computes in

    def look(params: Params, statistics: Params, obs: Array) -> tuple[list[Array], Array]:
        variables = {"params": params["torso"], "batch_stats": statistics}
        features, collected = torso.apply(variables, obs, False, mutable=["intermediates"])
        return jax.tree.leaves(_in_call_order(collected.get("intermediates", {}))), features

    return Network(init, apply, features, values, look, unit_columns if simba else _unchanged)


def _unchanged(params: Params) -> Params:
    return params


def _in_call_order(tree: Any) -> Any:
    """Flax numbers modules as they are called; jax sorts keys as text, so that "10" comes before "9"."""
    if not isinstance(tree, dict):
        return tree
    return [_in_call_order(tree[name]) for name in sorted(tree, key=lambda n: (len(n), n))]
