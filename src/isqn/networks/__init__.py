"""Networks: a torso and linear heads along a leading axis. With `isqn.language.gpt2`, the only place that uses flax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isqn.config.fields import nearest
from isqn.networks.layers import sparse_uniform
from isqn.networks.torsos import TorsoPolicy
from isqn.torsos import TORSOS, Torso, TorsoSettings, choose_torso
from isqn.types import Array, EnvSpec, Params, UserError
from isqn.usercode import named


class Network(NamedTuple):
    """Pure functions. `params` is {"torso": ..., "heads": {"kernel", "bias"}}, head k at index k of axis 0.

    `statistics` are BatchNorm's running averages, {} without BatchNorm.
    """

    init: Callable[[Array], tuple[Params, Params]]  # key -> params, statistics
    apply: Callable[..., tuple[Array, Params]]  # params, statistics, obs (B, ...), train -> q (B, H, A), statistics
    features: Callable[[Params, Array], Array]  # params of the torso, obs (B, ...) -> (B, F); not with BatchNorm
    values: Callable[[Params, Array], Array]  # params of the heads, features (B, F) -> q (B, H, A)
    # params, statistics, obs (B, ...) -> outputs of every ReLU, features
    activations: Callable[[Params, Params, Array], tuple[list[Array], Array]]
    project: Callable[[Params], Params]  # projection onto the valid parameters, after each gradient step


class Policy(NamedTuple):
    """Pure functions of an actor network."""

    init: Callable[[Array], tuple[Params, Params]]  # key -> params, statistics
    # params, statistics, obs (B, ...), train -> (mean, log of the standard deviation), each (B, A), statistics
    apply: Callable[..., tuple[tuple[Array, Array], Params]]
    project: Callable[[Params], Params]


def make_torso_settings(settings: Mapping[str, Any]) -> TorsoSettings:
    """Return the settings of the layers from those of a config."""
    return TorsoSettings(**{**settings, "dtype": jnp.dtype(settings["dtype"])})


def torso_name(requested: str, spec: EnvSpec, settings: TorsoSettings, *, projects: bool = False) -> str:
    """Return the name of the torso; "auto" depends on the observation. Refuse a torso that is not suitable.

    `projects` says whether the agent applies `project` after each gradient step.
    """
    if requested == "auto":
        return choose_torso(spec, settings)
    if requested not in TORSOS:
        suitable = ["auto", *(name for name, torso in TORSOS.items() if projects or not torso.project)]
        raise UserError(f"--torso {requested!r} is not known; {nearest(requested, suitable)}")
    torso = TORSOS[requested]
    if torso.project and not projects:
        raise UserError(
            f"--torso {requested} needs a projection of its weights after each gradient step, which this agent does "
            "not do; use --torso auto."
        )
    if torso.min_image_side and not spec.is_image:
        raise UserError(
            f"--torso {requested} needs images, but {spec.id} observes vectors of shape {spec.frame_shape}; "
            f"use --torso {choose_torso(spec, settings)}."
        )
    if min(spec.frame_shape[:2]) < torso.min_image_side:
        raise UserError(
            f"--torso {requested} needs images of at least {torso.min_image_side} pixels a side, but {spec.id} "
            f"observes {spec.frame_shape}; use --torso auto."
        )
    return requested


def _find_torso(requested: str, spec: EnvSpec, settings: TorsoSettings, *, projects: bool) -> Torso:
    return TORSOS[torso_name(requested, spec, settings, projects=projects)]


def make_policy(spec: EnvSpec, torso: str, settings: Mapping[str, Any]) -> Policy:
    """Build the actor network: means and log standard deviations of the actions."""
    torso_settings = make_torso_settings(settings)
    entry = _find_torso(torso, spec, torso_settings, projects=True)
    make_module = entry.make_policy or partial(TorsoPolicy, entry.make)
    module = make_module(torso_settings, spec.num_actions)

    def init(key: Array) -> tuple[Params, Params]:
        variables = module.init(key, jnp.zeros((1, *spec.obs_shape)), False)
        return variables["params"], variables.get("batch_stats", {})

    def apply(params: Params, statistics: Params, obs: Array, train: bool = False) -> Any:
        return _apply_module(module, params, statistics, obs, train and torso_settings.batch_norm)

    component = f"The policy of the torso {torso!r}"
    return Policy(named(component, init), named(component, apply), entry.project or _unchanged)


def _apply_module(module: Any, params: Params, statistics: Params, obs: Array, train: bool) -> tuple[Any, Params]:
    """Apply a module; return its output and the updated batch statistics."""
    variables = {"params": params, "batch_stats": statistics}
    if not train:
        return module.apply(variables, obs, False), statistics
    output, changed = module.apply(variables, obs, True, mutable=["batch_stats"])
    return output, changed["batch_stats"]


def make_critic(
    spec: EnvSpec, num_heads: int, torso: str, settings: Mapping[str, Any], *, num_atoms: int, num_critics: int
) -> Network:
    """Build one or two critics over concatenated observations and actions.

    Each head has an output for every atom of a value. The axis of the critics is the first of the torso and of the
    statistics, and the second of the heads; values are (B, H, C, A).
    """
    # Check here, so that an error names the shape of the observation.
    torso_name(torso, spec, make_torso_settings(settings), projects=True)
    joined = EnvSpec(spec.id, spec.protocol, (spec.obs_shape[-1] + spec.num_actions,), "float32", num_atoms)
    one_critic = make_network(joined, num_heads, torso, settings, projects=True)
    axes = {"torso": 0, "heads": 1}

    def init(key: Array) -> tuple[Params, Params]:
        return jax.vmap(one_critic.init, out_axes=(axes, 0))(jax.random.split(key, num_critics))

    def apply(params: Params, statistics: Params, x: Array, train: bool = False) -> tuple[Array, Params]:
        return jax.vmap(lambda p, s: one_critic.apply(p, s, x, train), (axes, 0), (2, 0))(params, statistics)

    def activations(params: Params, statistics: Params, x: Array) -> tuple[list[Array], Array]:
        first = {"torso": jax.tree.map(lambda w: w[0], params["torso"]), "heads": {}}
        return one_critic.activations(first, jax.tree.map(lambda s: s[0], statistics), x)

    return one_critic._replace(init=init, apply=apply, activations=activations)


def make_network(
    spec: EnvSpec, num_heads: int, torso: str, settings: Mapping[str, Any], *, projects: bool = False
) -> Network:
    """Build a torso with linear heads on top of it; `projects` as in `torso_name`."""
    torso_settings = make_torso_settings(settings)
    entry = _find_torso(torso, spec, torso_settings, projects=projects)
    module, component = entry.make(torso_settings), f"The torso {torso!r}"

    def init(key: Array) -> tuple[Params, Params]:
        torso_key, head_key = jax.random.split(key)
        obs = jnp.zeros((1, *spec.obs_shape), spec.frame_dtype)
        variables = module.init(torso_key, obs, False)
        output = jax.eval_shape(lambda v: module.apply(v, obs, False), variables)
        shape: tuple[int, ...] = getattr(output, "shape", ())
        if shape[:-1] != (1,):
            found = f"an array of shape {('B', *shape[1:])}" if shape else type(output).__name__
            raise UserError(f"{component} returns {found}; it must return a batch of feature vectors, ('B', features).")
        features = shape[-1]
        # One matrix for all heads: the initial range depends on the number of outputs of all heads, as in the authors'
        # single last layer, so that it shrinks as K grows.
        outputs = num_heads * spec.num_actions
        params, kernel = variables.get("params", {}), entry.head_init(head_key, (features, outputs))
        if torso_settings.is_streaming:  # this range does not depend on the number of outputs
            params, kernel = sparse_uniform(key, (params, kernel), torso_settings.sparsity)
        kernel = kernel.reshape(features, num_heads, spec.num_actions).transpose(1, 0, 2)
        heads = {"kernel": kernel, "bias": jnp.zeros((num_heads, spec.num_actions))}
        return {"torso": params, "heads": heads}, variables.get("batch_stats", {})

    def apply(params: Params, statistics: Params, obs: Array, train: bool = False) -> tuple[Array, Params]:
        features, statistics = _apply_module(
            module, params["torso"], statistics, obs, train and torso_settings.batch_norm
        )
        return values(params["heads"], features), statistics

    def features(params: Params, obs: Array) -> Array:
        return module.apply({"params": params}, obs, False)  # type: ignore[return-value]

    def values(heads: Params, features: Array) -> Array:
        kernel, bias = (heads[name].astype(torso_settings.dtype) for name in ("kernel", "bias"))
        q = jnp.einsum("bf,hfa->bha", features.astype(torso_settings.dtype), kernel) + bias
        return q.astype(jnp.float32)  # errors and losses are always float32

    def activations(params: Params, statistics: Params, obs: Array) -> tuple[list[Array], Array]:
        variables = {"params": params["torso"], "batch_stats": statistics}
        features, collected = module.apply(variables, obs, False, mutable=["intermediates"])
        return jax.tree.leaves(_in_call_order(collected.get("intermediates", {}))), features

    project = entry.project or _unchanged
    return Network(named(component, init), named(component, apply), features, values, activations, project)


def _unchanged(params: Params) -> Params:
    return params


def _in_call_order(tree: Any) -> Any:
    """Return nested lists in the order of the calls. Flax numbers modules; jax sorts "10" before "9"."""
    if not isinstance(tree, dict):
        return tree
    return [_in_call_order(tree[name]) for name in sorted(tree, key=lambda n: (len(n), n))]
