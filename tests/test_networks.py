"""Tests of the networks: parameter counts, initialisation, normalisation and precision."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import registries_restored
from isqn.agents.dqn import DqnConfig
from isqn.agents.registry import make_config
from isqn.config.fields import has_effect
from isqn.networks import make_critic, make_network, make_policy, torso_name
from isqn.networks.layers import (
    PatchConv,
    layer_norm,
    matmul_one_row,
    parameter_free_layer_norm,
    sparse_uniform,
    split_dot,
)
from isqn.networks.torsos import Activation
from isqn.torsos import TORSOS, TorsoSettings, register_torso
from isqn.types import EnvSpec, UserError

ATARI = EnvSpec("ALE/Asterix-v5", "machado2018-v1", (84, 84, 1), "uint8", 9, frame_stack=4, frames_per_step=4)
MINATAR = EnvSpec("MinAtar/Breakout-v1", "minatar", (10, 10, 4), "bool", 3)
VECTOR = EnvSpec("CartPole-v1", "gymnasium", (4,), "float32", 2)


def build(spec, num_heads, config):
    """Build the network of a config, with compiled functions."""
    network = make_network(spec, num_heads, config.torso, config.torso_settings)
    return network._replace(init=jax.jit(network.init), apply=jax.jit(network.apply, static_argnums=3))


def count_parameters(spec, num_heads, **fields) -> int:
    params, _ = jax.eval_shape(build(spec, num_heads, DqnConfig(**fields)).init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("num_heads", "expected"), [(1, 4_049_385), (2, 4_054_002), (10, 4_090_938)])
def test_parameters_of_the_nature_cnn_with_layer_norm(num_heads, expected):
    """On 9 actions: TF (and each network of TB), iS with K=1 and iS with K=9."""
    assert count_parameters(ATARI, num_heads, layer_norm=True) == expected


def test_parameters_of_impala():
    # five 3x3 convolutions with biases per stack; LayerNorm before the first ReLU of each block
    convolutions = (9 * 4 + 1) * 32 + 4 * (9 * 32 + 1) * 32 + (9 * 32 + 1) * 64 + 9 * (9 * 64 + 1) * 64
    dense = 7744 * 512 + 512 + 512 * 9 + 9
    norms = 2 * (2 * 32) + 2 * (2 * 64) * 2 + 2 * 64 + 2 * 512
    assert count_parameters(ATARI, 1, torso="impala") == convolutions + dense
    assert count_parameters(ATARI, 1, torso="impala", layer_norm=True) == convolutions + dense + norms


def test_parameters_of_the_minatar_cnn_and_the_mlp():
    assert count_parameters(MINATAR, 1) == (9 * 4 * 16 + 16) + (1024 * 128 + 128) + (128 * 3 + 3)
    assert count_parameters(VECTOR, 4) == (4 * 128 + 128) + (128 * 128 + 128) + 4 * (128 * 2 + 2)
    assert count_parameters(VECTOR, 3, hidden_sizes=()) == 3 * (4 * 2 + 2)


def shapes_by_path(tree) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(
    ("spec", "torso", "last_dense", "last_activation"),
    [
        (ATARI, "nature", "Dense_0", "Activation_3"),
        (ATARI, "impala", "Dense_0", "Activation_13"),
        (MINATAR, "minatar", "Dense_0", "Activation_1"),
        (VECTOR, "mlp", "Dense_1", "Activation_1"),
    ],
)
def test_the_width_factor_scales_the_shared_features_only(spec, torso, last_dense, last_activation):
    """Half the width halves the last hidden layer, its normalisation and the inputs of the heads, and nothing else."""

    def shapes(width_factor):
        config = DqnConfig(torso=torso, layer_norm=True, batch_norm=True, width_factor=width_factor)
        params, statistics = jax.eval_shape(build(spec, 2, config).init, jax.random.key(0))
        return shapes_by_path({**params, "statistics": statistics})

    full, half = shapes(1.0), shapes(0.5)
    assert full.keys() == half.keys()
    features = 512 if spec is ATARI else 128
    scaled = {path for path in full if full[path] != half[path]}
    layer_norm = f"['{last_activation}']['LayerNorm_0']"
    batch_norm = f"['{last_activation}']['BatchNorm_0']['BatchNorm_0']"
    assert scaled == {
        "['heads']['kernel']",
        *(f"['torso']['{last_dense}']['{name}']" for name in ("kernel", "bias")),
        *(f"['torso']{norm}['{name}']" for norm in (layer_norm, batch_norm) for name in ("scale", "bias")),
        *(f"['statistics']{batch_norm}['{name}']" for name in ("mean", "var")),
    }
    for path in scaled:
        axis = 1 if path == "['heads']['kernel']" else -1  # (heads, features, actions), else features are the outputs
        assert full[path][axis] == features
        expected = list(full[path])
        expected[axis] = features // 2
        assert half[path] == tuple(expected)


def test_the_width_factor_changes_the_count_of_parameters():
    assert count_parameters(ATARI, 1, width_factor=0.5) == count_parameters(ATARI, 1) - 256 * (7744 + 1 + 9)


@pytest.mark.parametrize("torso", ["nature", "impala"])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_image_torsos_compute_finite_values_with_every_normalisation(torso, layer_norm, batch_norm):
    """LayerNorm and BatchNorm exist if and only if they are enabled, and only training moves the running averages."""
    config = DqnConfig(torso=torso, layer_norm=layer_norm, batch_norm=batch_norm)
    network = build(ATARI, 3, config)
    params, statistics = network.init(jax.random.key(0))
    obs = jax.random.randint(jax.random.key(1), (2, 84, 84, 4), 0, 256).astype(jnp.uint8)
    for train in (True, False):
        q, after = network.apply(params, statistics, obs, train)
        assert q.shape == (2, 3, 9)
        assert np.isfinite(q).all()
        assert all((q[:, i] != q[:, j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))  # one value per head
        assert (q[0] != q[1]).any()  # values depend on the observation
        moved = [bool((a != b).any()) for a, b in zip(jax.tree.leaves(statistics), jax.tree.leaves(after), strict=True)]
        assert moved == [train] * len(moved)
    paths = shapes_by_path(params["torso"])
    # one LayerNorm and one BatchNorm per activation that is normalised, and a BatchNorm at the input
    num_activations = {"nature": 4, "impala": 8}[torso]
    assert sum("LayerNorm" in path for path in paths) == 2 * num_activations * layer_norm
    assert sum("BatchNorm" in path for path in paths) == 2 * (num_activations + 1) * batch_norm
    assert len(jax.tree.leaves(statistics)) == 2 * (num_activations + 1) * batch_norm


def test_patch_conv_equals_a_convolution_without_padding():
    x = jax.random.normal(jax.random.key(0), (5, 10, 10, 4))
    layer = PatchConv(16, 3)
    variables = layer.init(jax.random.key(1), x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"] + 0.5
    numbers = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=numbers) + bias
    np.testing.assert_allclose(layer.apply({"params": {"kernel": kernel, "bias": bias}}, x), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_dot_equals_the_matrix_product_for_one_row_and_for_more(dtype):
    x, kernel = jnp.arange(4096.0) % 7, jnp.arange(4096.0 * 3).reshape(4096, 3) % 5  # integers, so that sums are exact
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    dimensions = (((1,), (0,)), ((), ()))
    for rows in (x[None], jnp.stack([x, 2 * x])):
        product = split_dot(rows.astype(dtype), kernel.astype(dtype), dimensions)
        assert product.dtype == dtype
        all_rows = [expected, 2 * expected][: len(rows)]
        np.testing.assert_allclose(product.astype(jnp.float32), all_rows, rtol=0 if dtype == "float32" else 0.01)


def test_layer_norm_and_its_gradient_equal_flax():
    x = 2 + 3 * jax.random.normal(jax.random.key(0), (4, 5, 6, 32))
    scale, bias = jax.random.normal(jax.random.key(1), (2, 32))
    cotangent = jax.random.normal(jax.random.key(2), x.shape)

    def flax_norm(x, scale, bias):
        return nn.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x)

    ours, our_gradient = jax.vjp(layer_norm, x, scale, bias)
    theirs, their_gradient = jax.vjp(flax_norm, x, scale, bias)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for a, b in zip(our_gradient(cotangent), their_gradient(cotangent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_activations_are_returned_in_network_order():
    """They equal the outputs of the activation modules in the order of their calls; no two of these are equal."""
    calls = []

    def record_call(call, args, kwargs, context):
        output = call(*args, **kwargs)
        if isinstance(context.module, Activation) and context.method_name == "__call__":
            calls.append(output)
        return output

    small = EnvSpec("Image-v0", "gymnasium", (12, 12, 1), "uint8", 2)
    network = build(small, 1, DqnConfig(torso="impala"))
    params, statistics = network.init(jax.random.key(0))
    obs = jax.random.randint(jax.random.key(1), (1, 12, 12, 1), 0, 256).astype(jnp.uint8)
    with nn.intercept_methods(record_call):
        activations, features = network.activations(params, statistics, obs)
    stacks = [(6, 6, 32)] * 4 + [(3, 3, 64)] * 4 + [(2, 2, 64)] * 4
    assert [layer.shape[1:] for layer in activations] == [*stacks, (2, 2, 64), (512,)]
    for layer, output in zip(activations, calls, strict=True):  # the output of the last convolution is flat
        np.testing.assert_array_equal(np.ravel(layer), np.ravel(output))
    assert len({np.asarray(output).tobytes() for output in calls}) == len(calls)
    np.testing.assert_array_equal(features, calls[-1])


def test_the_initial_range_of_the_heads_counts_the_outputs_of_all_heads():
    """Xavier initialisation has 512 inputs and num_heads x 9 outputs, so the range shrinks with the number of heads."""
    for num_heads in (1, 10, 50):
        params, _ = build(ATARI, num_heads, DqnConfig()).init(jax.random.key(0))
        limit = np.sqrt(6 / (512 + num_heads * 9))
        largest = np.abs(params["heads"]["kernel"]).max()
        assert 0.98 * limit < largest <= limit
        assert (params["heads"]["bias"] == 0).all()
    params, _ = build(VECTOR, 4, DqnConfig()).init(jax.random.key(0))
    assert np.std(params["heads"]["kernel"]) == pytest.approx(1 / np.sqrt(128), rel=0.1)  # lecun normal


def test_heads_and_seeds_have_different_initial_parameters():
    network = build(VECTOR, 2, DqnConfig())
    first, _ = network.init(jax.random.key(0))
    second, _ = network.init(jax.random.key(1))
    kernel = first["heads"]["kernel"]
    assert (kernel[0] != kernel[1]).any()
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True) if a.any())


def test_bfloat16_networks_compute_in_bfloat16_with_float32_parameters_and_values():
    network = build(ATARI, 2, DqnConfig(layer_norm=True, compute_dtype="bfloat16"))
    params, statistics = network.init(jax.random.key(0))
    obs = jax.random.randint(jax.random.key(1), (2, 84, 84, 4), 0, 256).astype(jnp.uint8)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    q, _ = network.apply(params, statistics, obs)
    assert q.dtype == jnp.float32
    np.testing.assert_array_equal(q, q.astype(jnp.bfloat16).astype(jnp.float32))  # rounded to bfloat16 before
    jaxpr = str(jax.make_jaxpr(lambda p: network.apply(p, statistics, obs)[0])(params))
    products = [line for line in jaxpr.splitlines() if "conv_general_dilated[" in line or "dot_general[" in line]
    in_bfloat16 = [line for line in products if "bf16" in line.split("=")[0]]
    assert len(in_bfloat16) == 5  # three convolutions, the hidden layer, the heads
    assert len(products) - len(in_bfloat16) == 2 * 4  # two float32 sums per LayerNorm
    grads = jax.grad(lambda p: network.apply(p, statistics, obs)[0].sum())(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_auto_chooses_the_torso_by_the_observation():
    for stream, large in ((False, "nature"), (True, "stream")):
        settings = TorsoSettings(is_streaming=stream)
        assert [torso_name("auto", spec, settings) for spec in (ATARI, MINATAR, VECTOR)] == [large, "minatar", "mlp"]


def image_spec(height: int, width: int) -> EnvSpec:
    return EnvSpec("Image-v0", "gymnasium", (height, width, 3), "uint8", 2)


@pytest.mark.parametrize("agent", ["dqn", "stream-q"])
@pytest.mark.parametrize("size", [(3, 4), (31, 60), (32, 32), (37, 53), (52, 52), (53, 53)], ids=str)
def test_auto_has_a_torso_for_every_image_size(agent, size):
    network = build(image_spec(*size), 2, make_config(agent))
    params, statistics = jax.eval_shape(network.init, jax.random.key(0))
    obs = jax.ShapeDtypeStruct((1, *size, 3), "uint8")
    assert jax.eval_shape(network.apply, params, statistics, obs)[0].shape == (1, 2, 2)


@pytest.mark.parametrize(
    ("torso", "spec", "message"),
    [
        ("stream", image_spec(84, 52), "stream needs images of at least 53 pixels a side, but Image-v0 observes"),
        ("minatar", image_spec(2, 9), "minatar needs images of at least 3 pixels a side, but Image-v0 observes"),
        ("nature", VECTOR, "nature needs images, but CartPole-v1 observes vectors of shape (4,); use --torso mlp."),
        ("resnet", ATARI, "'resnet' is not known; choose one of auto, mlp, minatar, nature"),
        ("simba", VECTOR, "simba needs a projection of its weights after each gradient step"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_unsuitable_torsos_are_refused(torso, spec, message):
    with pytest.raises(UserError, match=re.escape(f"--torso {message}")):
        torso_name(torso, spec, TorsoSettings())


def test_simba_is_for_agents_that_project():
    assert torso_name("simba", VECTOR, TorsoSettings(), projects=True) == "simba"


# -- torsos of users ----------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """A torso without parameters: the sum of an observation and the sum of its squares."""

    settings: TorsoSettings

    @nn.compact
    def __call__(self, x, train):
        return jnp.stack([x.sum(axis=-1), jnp.square(x).sum(axis=-1)], axis=-1)


@pytest.fixture
def sums():
    with registries_restored():
        register_torso("sums", Sums)
        yield


BODY = EnvSpec("body", "test", (3,), "float32", 2, action_low=(-1, -1), action_high=(1, 1), action_box=(2,))


def make_actor(torso="sums"):
    return make_policy(BODY, torso, make_config("sac", torso=torso).torso_settings)


def test_a_registered_torso_is_the_torso_of_a_critic_and_of_a_policy(sums):
    """The features of (1, 2, 3) are (6, 14), and those of (1, 2, 3) with the action (0, -2) are (4, 18)."""
    policy = make_actor()
    params, _ = policy.init(jax.random.key(0))
    assert shapes_by_path(params) == {
        **{f"['Dense_{i}']['kernel']": (2, 2) for i in (0, 1)},
        **{f"['Dense_{i}']['bias']": (2,) for i in (0, 1)},
    }
    params["Dense_0"] = {"kernel": jnp.array([[1.0, 0.0], [0.0, 0.5]]), "bias": jnp.array([0.0, 1.0])}
    (mean, _), _ = policy.apply(params, {}, jnp.array([[1.0, 2.0, 3.0]]))
    np.testing.assert_allclose(mean, [[6, 8]])

    settings = make_config("sac", torso="sums").torso_settings
    critic = make_critic(BODY, 3, "sums", settings, num_atoms=1, num_critics=2)
    params, _ = critic.init(jax.random.key(0))
    assert shapes_by_path(params) == {"['heads']['kernel']": (3, 2, 2, 1), "['heads']['bias']": (3, 2, 1)}
    params["heads"]["kernel"] = jnp.arange(12.0).reshape(3, 2, 2, 1)
    values, _ = critic.apply(params, {}, jnp.array([[1.0, 2.0, 3.0, 0.0, -2.0]]))
    np.testing.assert_allclose(
        values[0, :, :, 0], 4 * np.array([[0, 2], [4, 6], [8, 10]]) + 18 * np.array([[1, 3], [5, 7], [9, 11]])
    )


def test_a_torso_may_choose_the_initial_heads_the_projection_and_the_policy():
    class Constant(nn.Module):
        settings: TorsoSettings
        num_actions: int

        @nn.compact
        def __call__(self, x, train):
            bias = self.param("bias", nn.initializers.constant(0.25), (self.num_actions,))
            return jnp.broadcast_to(bias, (len(x), self.num_actions)), jnp.zeros((len(x), self.num_actions))

    with registries_restored():
        register_torso(
            "own",
            Sums,
            head_init=nn.initializers.constant(2.0),
            project=lambda params: jax.tree.map(lambda w: jnp.clip(w, -1, 1), params),
            make_policy=Constant,
        )
        network = make_network(VECTOR, 2, "own", DqnConfig().torso_settings, projects=True)
        params, _ = network.init(jax.random.key(0))
        assert (params["heads"]["kernel"] == 2).all()
        assert (network.project(params)["heads"]["kernel"] == 1).all()
        policy = make_actor("own")
        params, _ = policy.init(jax.random.key(0))
        assert (policy.apply(params, {}, jnp.zeros((4, 3)))[0][0] == 0.25).all()
        assert (policy.project({"bias": jnp.full(2, -3.0)})["bias"] == -1).all()
        with pytest.raises(UserError, match="--torso own needs a projection of its weights"):
            build(VECTOR, 2, DqnConfig(torso="own"))


def test_a_torso_says_which_settings_it_reads(sums):
    names = ("hidden_sizes", "layer_norm", "critic_width", "policy_blocks")

    def read_by(torso):
        return [name for name in names if has_effect(name, make_config("sac", torso=torso))]

    assert read_by("auto") == read_by("sums") == read_by("mlp") == ["hidden_sizes", "layer_norm"]
    assert read_by("simba") == ["critic_width", "policy_blocks"]
    register_torso("sums", Sums, reads=("width", "layer_norm"))
    assert read_by("sums") == ["layer_norm", "critic_width"]
    with pytest.raises(UserError, match="torso 'typo' reads 'widht', which is not a field of TorsoSettings"):
        register_torso("typo", Sums, reads=("widht",))


@pytest.mark.parametrize("name", [*TORSOS, "auto"])
def test_torsos_of_the_package_are_not_replaced(name):
    before = dict(TORSOS)
    with pytest.raises(UserError, match=f"register_torso: the package has a torso '{name}'; choose another name"):
        register_torso(name, Sums)
    assert before == TORSOS


# -- streaming ----------------------------------------------------------------------------------------------------


def stream_config(**fields):
    return make_config("stream-q").replace(**fields)


def test_the_stream_torso_has_the_shapes_and_parameter_count_of_the_paper():
    """84 -> 16 -> 5 -> 2 without padding, 256 units: 8,224 + 32,832 + 36,928 + 65,792 parameters."""
    network = build(ATARI, 10, stream_config())
    params, _ = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params["torso"])) == 143_776
    activations, features = jax.eval_shape(network.activations, params, {}, ATARI.batch_shapes(1).obs)
    assert [layer.shape[1:] for layer in activations] == [(16, 16, 32), (5, 5, 64), (2, 2, 64), (256,)]
    assert features.shape == (1, 256)
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(params)} == {"kernel", "bias"}


@pytest.mark.parametrize(("kernel", "stride"), [(8, 5), (4, 3), (3, 2), (3, 1)])
def test_patch_conv_and_its_gradient_equal_a_convolution(kernel, stride):
    x = jax.random.normal(jax.random.key(0), (2, 20, 17, 3))
    layer = PatchConv(5, kernel, stride)
    params = layer.init(jax.random.key(1), x)

    def convolution(params, x):
        output = jax.lax.conv_general_dilated(
            x, params["params"]["kernel"], (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return output + params["params"]["bias"]

    np.testing.assert_allclose(layer.apply(params, x), convolution(params, x), atol=1e-5)
    ours, theirs = (
        jax.jit(jax.grad(lambda p, x, f=f: jnp.square(f(p, x)).sum(), argnums=(0, 1)))(params, x)
        for f in (layer.apply, convolution)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), ours, theirs)


@pytest.mark.parametrize(("shape", "zeros"), [((100, 7), 90), ((3, 3, 4, 16), 33), ((4, 5), 3), ((1024, 3), 922)])
def test_sparse_initialisation_sets_the_given_fraction_of_each_unit_to_zero(shape, zeros):
    """ceil(0.9 x fan in) weights are zero: 90, 33 of 36, 922 of 1,024; 3 of 4, because one must remain.

    The others are uniform below 1 / sqrt(fan in).
    """
    shapes = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32), "bias": jax.ShapeDtypeStruct(shape[-1:], jnp.float32)}
    params = sparse_uniform(jax.random.key(0), shapes, 0.9)
    assert not params["bias"].any()
    weights = np.asarray(params["kernel"]).reshape(-1, shape[-1])
    assert ((weights == 0).sum(axis=0) == zeros).all()
    bound = 1 / np.sqrt(len(weights))
    assert np.abs(weights).max() <= bound
    nonzero_positions = {tuple(np.flatnonzero(column)) for column in weights.T}
    assert len(nonzero_positions) > 1  # each unit has zeros of its own
    if len(weights) == 100:
        assert np.abs(weights).max() > 0.8 * bound


def test_every_kernel_of_a_streaming_network_is_sparse_and_every_bias_is_zero():
    params, _ = build(ATARI, 4, stream_config()).init(jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["torso"]):
        fraction = float((leaf == 0).mean())
        assert fraction == 1 if path[-1].key == "bias" else 0.9 <= fraction < 0.91, path
    heads = params["heads"]["kernel"]  # (heads, features, actions)
    assert ((np.asarray(heads) == 0).sum(axis=1) == 231).all()  # ceil(0.9 x 256)
    assert not params["heads"]["bias"].any()


@pytest.mark.parametrize(("axes", "over", "epsilon"), [("channels", (3,), 1e-6), ("all", (1, 2, 3), 1e-5)])
def test_parameter_free_layer_norm_equals_its_definition(axes, over, epsilon):
    x = np.random.default_rng(0).normal(2, 3, (2, 4, 5, 6)).astype(np.float32)
    expected = (x - x.mean(over, keepdims=True)) / np.sqrt(x.var(over, keepdims=True) + epsilon)
    np.testing.assert_allclose(parameter_free_layer_norm(jnp.asarray(x), axes), expected, rtol=1e-4, atol=1e-5)


def test_streaming_activations_are_leaky_relus():
    settings = TorsoSettings(is_streaming=True, layer_norm=False)
    out = Activation(settings).apply({}, jnp.array([[-2.0, 3.0]]), False)
    np.testing.assert_allclose(out, [[-0.02, 3.0]])


def test_layer_norm_stands_before_the_leaky_relu_of_a_streaming_torso():
    """-2, 1 and 4 have mean 1 and variance 6; a leaky ReLU before LayerNorm would make it -0.02, 1 and 4."""
    spec = EnvSpec("Three-v0", "gymnasium", (3,), "float32", 1)
    network = build(spec, 1, stream_config(hidden_sizes=(3,)))
    torso = {"Dense_0": {"kernel": jnp.eye(3), "bias": jnp.zeros(3)}}
    expected = [[-0.03 / np.sqrt(6), 0, 3 / np.sqrt(6)]]
    np.testing.assert_allclose(network.features(torso, jnp.array([[-2.0, 1.0, 4.0]])), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("spec", "layers"), [(ATARI, 4), (MINATAR, 2), (VECTOR, 2)], ids=["stream", "minatar", "mlp"])
def test_every_activation_of_a_streaming_torso_is_a_leaky_relu_of_normalised_units(spec, layers):
    network = build(spec, 1, stream_config(initial_sparsity=0.0))
    params, _ = network.init(jax.random.key(0))
    obs = 100 * jax.random.uniform(jax.random.key(1), (2, *spec.obs_shape))
    activations, _ = jax.jit(network.activations)(params, {}, obs.astype(spec.frame_dtype))
    assert len(activations) == layers
    for layer in activations:
        normalised = jnp.where(layer < 0, 100 * layer, layer)
        np.testing.assert_allclose(normalised.mean(axis=-1), 0, atol=1e-4)
        np.testing.assert_allclose(normalised.std(axis=-1), 1, rtol=1e-2)


def test_the_gradient_of_matmul_one_row_equals_that_of_matmul():
    x, kernel = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(3, 8), (8, 5)]))
    for rows in (1, 3):
        ours, theirs = (
            jax.grad(lambda x, w, f=f: jnp.sin(f(x, w)).sum(), argnums=(0, 1))(x[:rows], kernel)
            for f in (matmul_one_row, jnp.matmul)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)
