"""Tests of soft actor-critic: SimbaV2 against its paper, the losses by hand, and laws that relate the schemes."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from helpers import ALL_SCHEMES, assert_trees_close, compile_functions
from isqn import losses
from isqn.agents import normalisation, sac
from isqn.agents.base import make_adam
from isqn.agents.registry import make_config
from isqn.analysis.cost import measure_size
from isqn.networks import make_policy
from isqn.networks.layers import BatchRenorm
from isqn.networks.simba import bound_log_std, normalise_columns, to_unit_length
from isqn.presets import preset_config
from isqn.types import EnvSpec, Transition, UserError, Values

TASK = EnvSpec("task", "test", (3,), "float32", 2, action_low=(-1, -1), action_high=(1, 1), action_box=(2,))
DOG = EnvSpec("dog", "test", (223,), "float32", 38, action_low=(-1,) * 38, action_high=(1,) * 38, action_box=(38,))
HUMANOID = EnvSpec("human", "test", (67,), "float32", 21, action_low=(-1,) * 21, action_high=(1,) * 21)
WIDE = EnvSpec("wide", "test", (5,), "float32", 2)
SIMBA = {"torso": "simba", "critic_width": 8, "policy_width": 4, "num_atoms": 11}


def make(spec=TASK, **fields):
    small = {"batch_size": 8, "hidden_sizes": (8,), "learning_rate": 0.01}
    return make_agent(make_config("sac", **small | fields), spec)


@cache
def make_agent(config, spec):
    return config, compile_functions(sac.make(config, spec))


def policy_network(config, spec=TASK):
    """Build the policy of a config, without BatchNorm, for tests that follow an update by hand."""
    settings = {"width": config.policy_width, "blocks": config.policy_blocks, "batch_norm": False}
    return make_policy(spec, config.torso, config.torso_settings | settings)


def random_batch(size=8, seed=0, spec=TASK):
    rng = np.random.default_rng(seed)
    return Transition(
        obs=rng.normal(size=(size, *spec.obs_shape)).astype(np.float32),
        action=rng.uniform(-1, 1, (size, spec.num_actions)).astype(np.float32),
        reward=rng.normal(size=size).astype(np.float32),
        discount=(0.9 * (rng.random(size) < 0.8)).astype(np.float32),
        next_obs=rng.normal(size=(size, *spec.obs_shape)).astype(np.float32),
    )


def train(agent, state, updates, size=8):
    for i in range(updates):
        state, metrics = agent.update(state, random_batch(size, seed=i))
    return state, metrics


# -- the paper's sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "scheme", "k", "kept"),
    [
        (DOG, "target-based", 1, 9_500_439),
        (DOG, "target-free", 1, 4_860_082),
        (DOG, "iterated-shared", 1, 4_911_895),
        (DOG, "iterated-shared", 9, 5_326_399),
        (HUMANOID, "target-based", 1, 9_298_933),
        (HUMANOID, "target-free", 1, 4_747_152),
        (HUMANOID, "iterated-shared", 1, 4_798_965),
        (HUMANOID, "iterated-shared", 9, 5_213_469),
    ],
)
def test_parameters_of_simbav2(spec, scheme, k, kept):
    """Embedding (d + 2) h, a block 8 h^2 + 5 h, before the heads h^2 + h, a head 101 (h + 1); policies as well."""
    assert (
        measure_size(preset_config("dmc-hard").replace(scheme=scheme, num_bellman_iterations=k), spec).total_parameters
        == kept
    )


def test_twin_q_adds_the_parameters_of_a_second_critic():
    """MLP (5, 8) and a head (8, 1), each with biases, and two BatchNorm parameters for each of 8 units."""
    one, two = (
        measure_size(make(twin_q=twin)[0].replace(scheme="target-free"), TASK).parameters for twin in (False, True)
    )
    assert two - one == (5 * 8 + 8) + (8 + 1) + 2 * 8


# -- SimbaV2 -----------------------------------------------------------------------------------------------------------


def kernels(tree):
    return [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if path[-1].key == "kernel"]


def test_every_column_of_simbav2_has_length_one():
    _, agent = make(scheme="iterated-shared", num_bellman_iterations=3, target_step_size=1.0, **SIMBA)
    begun = agent.init(0)
    after, _ = train(agent, begun, 3)
    for state in (begun, after):
        for kernel in kernels((state.params, state.policy.network)):
            np.testing.assert_allclose(jnp.linalg.norm(kernel, axis=-2), 1, atol=1e-5)
    assert any((a != b).any() for a, b in zip(kernels(begun.params), kernels(after.params), strict=True))


def test_vectors_and_kernel_columns_are_scaled_to_length_one():
    assert float(jnp.linalg.norm(to_unit_length(jnp.array([3.0, 4.0])))) == pytest.approx(1)
    np.testing.assert_array_equal(to_unit_length(jnp.zeros(3)), 0)
    assert np.isfinite(jax.grad(lambda x: to_unit_length(x).sum())(jnp.zeros(3))).all()
    params = {"kernel": jnp.ones((4, 2)), "scale": jnp.full(2, 7.0)}
    np.testing.assert_allclose(normalise_columns(params)["kernel"], 0.5)
    np.testing.assert_array_equal(normalise_columns(params)["scale"], 7)


def sphere(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def simba_features(params, x, width, blocks, batch_norm):
    """Compute SimbaV2's critic below its heads in float64, as its paper writes it, with the initial scalers."""
    body, root = params["Body_0"], np.sqrt(2 / width)
    x = np.concatenate([x, np.full((len(x), 1), 3.0)], axis=-1)
    x = sphere(sphere(x) @ body["Dense_0"]["kernel"] * root)
    for block in range(blocks):
        y = np.maximum(x @ body[f"Dense_{2 * block + 1}"]["kernel"] * root / 2, 0) + 1e-8
        if batch_norm:
            y = (y - y.mean(axis=0)) / np.sqrt(y.var(axis=0) + 1e-5)
        y = sphere(y @ body[f"Dense_{2 * block + 2}"]["kernel"])
        x = sphere(x + (y - x) / (blocks + 1))
    return x @ params["Dense_0"]["kernel"]


def in_float64(tree):
    return jax.tree.map(lambda w: np.asarray(w, np.float64), tree)


def critic_by_hand(state, x, batch_norm=True):
    """Compute the outputs (B, H, A) of the only critic."""
    params = in_float64(jax.tree.map(lambda w: w[0], state.params["torso"]))
    heads = in_float64(state.params["heads"])
    assert not heads["bias"].any()
    return np.einsum("bf,hfa->bha", simba_features(params, x, 8, 2, batch_norm), heads["kernel"][:, 0])


@pytest.mark.parametrize("batch_norm", ["yes", "no"])
def test_simbav2_by_hand(batch_norm):
    _, agent = make(num_bellman_iterations=2, joint_batch_norm=batch_norm, **SIMBA)
    state, x = agent.init(0), np.random.default_rng(0).normal(size=(16, 5))
    found, _ = agent.network.apply(state.params, state.statistics, x.astype(np.float32), True)
    np.testing.assert_allclose(found[:, :, 0], critic_by_hand(state, x, batch_norm == "yes"), atol=2e-6)


def test_initial_values_of_the_scalers():
    """They are sqrt(2 / h), half of it in a block, and 1 / sqrt(h) for the interpolation between blocks."""
    body = make(**SIMBA)[1].init(0).params["torso"]["Body_0"]
    begun = [float(body[f"Scaler_{i}"]["scale"].mean()) for i in range(5)]
    root, along = np.sqrt(2 / 8), np.sqrt(1 / 8)
    assert begun == pytest.approx([root, root / 2, along, root / 2, along])


def test_the_log_standard_deviation_of_a_policy_is_bounded():
    np.testing.assert_allclose(bound_log_std(jnp.array([-1e9, 0.0, 1e9])), [-10, -4, 2])


def test_initial_value_distributions_are_nearly_uniform():
    """The initial cross entropy is the logarithm of the number of atoms: 4.615 for 101."""
    config, agent = make(scheme="iterated-shared", num_bellman_iterations=3, **SIMBA | {"num_atoms": 101})
    _, metrics = train(agent, agent.init(0), 1)
    assert metrics["loss"] / 3 == pytest.approx(np.log(config.num_atoms), abs=0.3)


# -- losses ------------------------------------------------------------------------------------------------------------


def projected(probabilities, reward, discount, bound):
    """Project a target distribution by Bellemare et al. 2017, algorithm 1, as printed."""
    count = len(probabilities)
    atoms, width = np.linspace(-bound, bound, count), 2 * bound / (count - 1)
    result = np.zeros(count)
    for probability, atom in zip(probabilities, atoms, strict=True):
        place = (np.clip(reward + discount * atom, -bound, bound) + bound) / width
        low, high = int(np.floor(place)), int(np.ceil(place))
        if low == high:
            result[low] += probability
        else:
            result[low] += probability * (high - place)
            result[high] += probability * (place - low)
    return result


@pytest.mark.parametrize(("reward", "discount"), [(0.3, 0.9), (-7.0, 0.9), (7.0, 0.5), (0.4, 0.0), (0.1, 1.0)])
def test_categorical_is_the_cross_entropy_with_the_projected_target(reward, discount):
    rng = np.random.default_rng(0)
    online, target = rng.normal(size=(2, 11))
    step = Transition(None, None, reward, discount, None)
    found = losses.categorical(Values(online, online), Values(target, target), step, value_bound=5.0)
    softmax = np.exp(target) / np.exp(target).sum()
    log_softmax = online - np.log(np.exp(online).sum())
    aim = projected(softmax, reward, discount, 5.0)
    assert aim.sum() == pytest.approx(1)
    assert float(found) == pytest.approx(-(aim * log_softmax).sum(), rel=1e-5)


def test_categorical_does_not_move_the_target_without_reward_and_discounting():
    """Cross entropy with itself is the entropy; for two even atoms of eleven, ln 2."""
    logits = np.full(11, -50.0)
    logits[[2, 7]] = 0.0
    values = Values(jnp.asarray(logits), jnp.asarray(logits))
    found = losses.categorical(values, values, Transition(None, None, 0.0, 1.0, None), value_bound=5.0)
    assert float(found) == pytest.approx(np.log(2), rel=1e-4)


def test_the_soft_bellman_loss_is_the_squared_error():
    """(1 + 0.9 * 10 - 4)^2"""
    step = Transition(None, None, 1.0, 0.9, None)
    q = losses.soft_bellman(Values(jnp.array([4.0]), None), Values(None, jnp.array([10.0])), step)
    assert float(q) == pytest.approx(36)


@pytest.mark.parametrize("twin", [False, True])
def test_the_loss_of_a_critic_by_hand(twin):
    """The update follows SimbaV2: the new policy draws a', and the new temperature weighs its entropy.

    The entropy bonus is part of the reward. Rewards and observations are normalised by the statistics of the observed
    steps. Heads 1 and 2 learn from heads 0 and 1; with two critics, from the one with the smaller expected value.
    """
    fields = {"num_bellman_iterations": 2, "normalise_rewards": True, "twin_q": twin, "learning_rate": 0.1}
    config, agent = make(**SIMBA | fields)
    state, batch = agent.init(0), random_batch()
    for step, frame in enumerate(random_batch(20, seed=9).obs):
        state, _ = agent.observe(state, 3 + 2 * frame, jnp.float32(7.0 + step), False)
    after, metrics = agent.update(state, batch)

    seen = 3 + 2 * random_batch(20, seed=9).obs.astype(np.float64)
    obs, next_obs = ((x - seen.mean(axis=0)) / seen.std(axis=0, ddof=1) for x in (batch.obs, batch.next_obs))
    returns = [0.0]
    for step in range(20):
        returns.append(0.99 * returns[-1] + 7 + step)
    divisor = max(np.std(returns[1:], ddof=1), returns[-1] / config.value_bound)
    key = jax.random.split(sac.device_key(0, "update", 0))[1]
    (mean, log_std), _ = policy_network(config).apply(after.policy.network, {}, next_obs.astype(np.float32))
    next_action, log_probability = in_float64(sac.draw(key, mean, log_std))
    temperature = np.exp(float(after.policy.log_temperature))
    rows = np.concatenate([np.concatenate([obs, batch.action], 1), np.concatenate([next_obs, next_action], 1)])
    critics = range(2 if twin else 1)
    values = np.stack([critic_by_hand(one_critic(state, c), rows) for c in critics], axis=2)  # (2 B, H, C, A)
    log_softmax = values - np.log(np.exp(values).sum(axis=-1, keepdims=True))
    atoms, total = np.linspace(-5, 5, 11), 0.0
    for i, pair, c in np.ndindex(8, 2, len(critics)):
        aims = np.exp(log_softmax[8 + i, pair])
        aim = min(aims, key=lambda p: p @ atoms)
        reward = batch.reward[i] / divisor - batch.discount[i] * temperature * log_probability[i]
        total -= projected(aim, reward, batch.discount[i], 5.0) @ log_softmax[i, pair + 1, c] / 8
    assert float(metrics["loss"]) == pytest.approx(total, rel=1e-4)


def one_critic(state, c):
    torso = jax.tree.map(lambda w: w[c : c + 1], state.params["torso"])
    heads = jax.tree.map(lambda w: w[:, c : c + 1], state.params["heads"])
    return state._replace(params={"torso": torso, "heads": heads})


def test_the_actor_loss_uses_the_smaller_of_two_critics():
    """If one critic is raised by 1,000, the gradient of the policy is that of the other critic alone."""
    _, agent = make(scheme="target-free", twin_q=True, joint_batch_norm="no")
    state = agent.init(0)
    bias, moments = state.params["heads"]["bias"], []
    for lifted in (0, 1):
        heads = {**state.params["heads"], "bias": bias.at[:, lifted].add(1_000)}
        other = one_critic(state, 1 - lifted)
        _, single = make(scheme="target-free", joint_batch_norm="no")
        alone = single.init(0)._replace(params=other.params, policy=state.policy)
        both = state._replace(params={**state.params, "heads": heads})
        found, expected = (train(a, s, 1)[0].optimizer.policy[0].mu for a, s in ((agent, both), (single, alone)))
        assert_trees_close(found, expected, rtol=1e-3, atol=1e-6)
        moments.append(jax.tree.leaves(found))
    assert any((left != right).any() for left, right in zip(*moments, strict=True))


def test_the_gradient_passes_through_the_joint_batch_statistics():
    """The gradient equals finite differences of the loss; with a discount of 0 no target depends on a parameter."""
    _, agent = make(scheme="target-free")
    state, batch = agent.init(0), random_batch(spec=WIDE)._replace(discount=np.zeros(8, np.float32))

    @jax.jit
    def loss(torso):
        params = {**state.params, "torso": torso}
        return agent.losses(params, state.statistics, state.copies, batch)[0].sum()

    torso = state.params["torso"]
    slopes = jax.tree.leaves(jax.grad(loss)(torso))
    along = jax.tree.map(lambda w: np.random.default_rng(w.size).normal(size=w.shape).astype(np.float32), torso)
    ahead, behind = (loss(jax.tree.map(lambda w, v, s=s: w + s * v, torso, along)) for s in (1e-3, -1e-3))
    expected = float(ahead - behind) / 2e-3
    assert sum(float((a * b).sum()) for a, b in zip(slopes, jax.tree.leaves(along), strict=True)) == pytest.approx(
        expected, rel=0.01
    )


def test_the_target_network_is_a_moving_average_without_projection():
    _, agent = make(scheme="target-based", target_step_size=0.5, **SIMBA)
    state, _ = train(agent, agent.init(0), 1)
    begun = agent.init(0)
    for old, new, copy in zip(*map(kernels, (begun.params, state.params, state.copies)), strict=True):
        np.testing.assert_allclose(copy, 0.5 * old + 0.5 * new, atol=1e-6)
    lengths = np.concatenate([np.linalg.norm(kernel, axis=-2).ravel() for kernel in kernels(state.copies)])
    assert lengths.max() <= 1 + 1e-6
    assert lengths.min() < 0.9999


def test_the_log_density_of_an_action_equals_scipy():
    """The density of tanh(u) with normal u is that of u over the slope of tanh; scipy computes it in float64."""
    mean, log_std = np.array([[0.3, -1.0]]), np.array([[-0.5, 0.2]])
    action, found = sac.draw(jax.random.key(0), jnp.asarray(mean, jnp.float32), jnp.asarray(log_std, jnp.float32))
    u = np.arctanh(np.asarray(action, np.float64))
    expected = stats.norm.logpdf(u, mean, np.exp(log_std)) - np.log(1 - np.tanh(u) ** 2)
    np.testing.assert_allclose(found, expected.sum(axis=1), rtol=1e-4)


def test_the_log_density_is_finite_for_saturated_actions():
    _, density = sac.draw(jax.random.key(0), jnp.array([[50.0]]), jnp.array([[0.0]]))
    assert np.isfinite(density)


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, SIMBA], ids=["mlp", "simba"])
def test_head_zero_is_frozen_between_refreshes(fields):
    """With SimbaV2, the projection to length 1 rounds it."""
    _, agent = make(scheme="iterated-shared", num_bellman_iterations=2, target_update_period=1_000, **fields)
    begun = agent.init(0)
    after, _ = train(agent, begun, 100)
    tolerance = 1e-5 if fields else 0
    for leaf in ("kernel", "bias"):
        before, now = begun.params["heads"][leaf], after.params["heads"][leaf]
        np.testing.assert_allclose(now[0], before[0], rtol=0, atol=tolerance)
        assert (np.abs(now[1:] - before[1:]) > 1e-4).any()


def test_a_target_step_size_of_one_is_the_hard_shift():
    _, agent = make(scheme="iterated-shared", num_bellman_iterations=3)
    state = agent.init(0)
    soft = agent.refresh(state).params["heads"]["kernel"]
    _, hard_agent = make(scheme="iterated-shared", num_bellman_iterations=3, target_step_size=1.0)
    hard = hard_agent.refresh(state).params["heads"]["kernel"]
    old = state.params["heads"]["kernel"]
    np.testing.assert_array_equal(hard, jnp.stack([old[1], old[2], old[3], old[3]]))
    expected = [0.995 * old[i] + 0.005 * old[i + 1] for i in range(3)]  # all heads at once, from the old ones
    np.testing.assert_allclose(soft, jnp.stack([*expected, old[3]]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fields", [{"twin_q": True}, SIMBA], ids=["twins", "simba"])
def test_iterated_shared_with_one_iteration_refreshed_at_every_update_is_target_free(fields):
    """With K = 1 and a copy after each update, head 0 equals head 1, so the targets are those of TF."""
    _, shared = make(scheme="iterated-shared", num_bellman_iterations=1, target_step_size=1.0, **fields)
    _, free = make(scheme="target-free", **fields)
    begun = shared.init(3)
    heads = jax.tree.map(lambda w: w.at[0].set(w[1]), begun.params["heads"])
    begun = begun._replace(params={**begun.params, "heads": heads})
    alone = {**begun.params, "heads": jax.tree.map(lambda w: w[1:], heads)}
    left, _ = train(shared, begun, 10)
    fresh = free.init(3)
    right, _ = train(free, fresh._replace(params=alone, policy=begun.policy), 10)
    np.testing.assert_array_equal(left.params["heads"]["kernel"][0], left.params["heads"]["kernel"][1])
    assert_trees_close(left.params["torso"], right.params["torso"], rtol=1e-3, atol=1e-5)
    assert_trees_close(left.policy, right.policy, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fields", [{"twin_q": True}, SIMBA], ids=["twins", "simba"])
def test_target_based_refreshed_at_every_update_is_target_free(fields):
    same = {"joint_batch_norm": "no", "target_step_size": 1.0, **fields}
    (_, based), (_, free) = (make(scheme=scheme, **same) for scheme in ("target-based", "target-free"))
    left, _ = train(based, based.init(3), 10)
    right, _ = train(free, free.init(3), 10)
    assert_trees_close((left.params, left.policy), (right.params, right.policy), rtol=1e-3, atol=1e-5)


def test_two_updates_per_step_equal_two_single_updates():
    _, single = make(scheme="iterated-shared", num_bellman_iterations=2)
    _, double = make(scheme="iterated-shared", num_bellman_iterations=2, updates_per_step=2)
    first, second = random_batch(seed=0), random_batch(seed=1)
    left, _ = train(single, single.init(0), 2)
    both = jax.tree.map(lambda *two: np.concatenate(two), first, second)
    right, metrics = double.update(double.init(0), both)
    assert int(right.optimizer.updates) == 2
    assert_trees_close((left.params, left.policy), (right.params, right.policy), rtol=1e-4, atol=1e-6)
    _, last = single.update(train(single, single.init(0), 1)[0], second)
    _, once = single.update(single.init(0), first)
    assert float(metrics["loss"]) == pytest.approx(float(once["loss"] + last["loss"]), rel=1e-4)


@pytest.mark.parametrize(("scheme", "k"), ALL_SCHEMES)
@pytest.mark.parametrize("fields", [{"twin_q": True}, SIMBA], ids=["twins", "simba"])
def test_every_scheme_fits_a_fixed_target(fields, scheme, k):
    """On terminal steps the target is the reward, whatever the scheme."""
    _, agent = make(scheme=scheme, num_bellman_iterations=k, **{"hidden_sizes": (32,), **fields})
    batch = random_batch()._replace(discount=np.zeros(8, np.float32))
    state = agent.init(0)
    _, first = agent.update(state, batch)
    for _ in range(200):
        state, last = agent.update(state, batch)
    assert np.isfinite(last["loss"])
    assert last["loss"] < 0.8 * first["loss"]


def test_batch_norm_is_on_by_default_without_a_target_network():
    schemes = ("target-based", "target-free", "iterated-shared", "ensemble-shared", "iterated-target-based")
    found = [make(scheme=scheme)[0].uses_batch_norm for scheme in schemes]
    assert found == [False, True, True, True, False]
    assert make(scheme="target-based", joint_batch_norm="yes")[0].uses_batch_norm


def test_batch_norm_statistics_follow_both_ends_of_the_critics_batch():
    """After one update from 0, the running mean is a hundredth of the mean over s and s' together."""
    config, agent = make(scheme="target-free", learning_rate=0.0, normalise_observations=False)
    begun = agent.init(0)
    batch = random_batch()
    after, _ = agent.update(begun, batch)
    (mean, _) = jax.tree.leaves(after.statistics)
    key = jax.random.split(sac.device_key(begun.seed, "update", 0))[1]
    policy = policy_network(config)
    next_action, _ = sac.draw(key, *policy.apply(begun.policy.network, {}, batch.next_obs)[0])
    now, then = (np.concatenate(x, axis=-1) for x in ((batch.obs, batch.action), (batch.next_obs, next_action)))
    units, _ = agent.network.activations(begun.params, begun.statistics, np.concatenate([now, then]))
    np.testing.assert_allclose(mean[0], 0.01 * units[0].mean(axis=0), rtol=1e-4)


def test_the_actor_loss_uses_the_weighted_mean_of_the_heads():
    """The gradient of the policy is linear in the head weights, if they sum to 1."""
    policies = []
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5)):
        config, agent = make(
            scheme="iterated-shared", num_bellman_iterations=2, head_weights=weights, head_weight_discount=1.0
        )
        state, _ = train(agent, agent.init(0), 1)
        policies.append(jax.tree.leaves(state.optimizer.policy[0].mu))  # a tenth of the gradient
    for first, second, mean in zip(*policies, strict=True):
        np.testing.assert_allclose(mean, (first + second) / 2, rtol=1e-3, atol=1e-7)
    assert config.pair_weights == (0.5, 0.5)
    assert make(num_bellman_iterations=3)[0].pair_weights == (1.0, 0.25, 0.0625)


def test_the_temperature_rises_while_the_entropy_is_below_its_target():
    for per_action, sign in ((-100.0, -1), (0.6, 1)):
        _, agent = make(target_entropy_per_action=per_action)
        state, _ = train(agent, agent.init(0), 1)
        # Adam's first step is the learning rate
        assert float(state.policy.log_temperature) == pytest.approx(sign * 0.01, rel=1e-3)
    _, agent = make(target_entropy_per_action=-0.5)
    state, metrics = train(agent, agent.init(0), 1)
    slope = 1.0 * (float(metrics["entropy"]) + 0.5 * 2)  # two action dimensions, at a temperature of 1
    assert float(state.optimizer.temperature[0].mu) == pytest.approx(0.1 * slope, rel=1e-4)


def test_the_learning_rate_decays_linearly():
    config = preset_config("dmc-hard")
    optimizer, one = make_adam(config), jnp.ones(())
    state = optimizer.init(one)
    for updates, rate in ((0, 1e-4), (500_000, 5.5e-5), (1_000_000, 1e-5), (2_000_000, 1e-5)):
        at = jax.tree.map(lambda x, n=updates: jnp.asarray(n, x.dtype) if x.dtype == jnp.int32 else x, state)
        # after a constant gradient of 1, Adam's step is the learning rate
        at = (at[0]._replace(mu=one, nu=one, count=jnp.int32(2**30)), *at[1:])
        step, _ = optimizer.update(one, at)
        assert float(-step) == pytest.approx(rate, rel=1e-3)


# -- settings that the paper does not specify --------------------------------------------------------------------------


def test_aggregation_of_the_heads_in_the_actor_loss():
    """Three pairs have the weights 1, 1/4 and 1/16, which sum to 21/16."""
    expected = {
        "weighted-mean": (16 / 21, 4 / 21, 1 / 21),
        "weighted-sum-over-k": (1 / 3, 1 / 12, 1 / 48),
        "first": (1, 0, 0),
        "last": (0, 0, 1),
    }
    for rule, weights in expected.items():
        assert make(num_bellman_iterations=3, policy_value=rule)[0].actor_head_weights == pytest.approx(weights)
    with pytest.raises(UserError, match="it must have a sum above 0, for the actor loss"):
        make(num_bellman_iterations=2, head_weights=(0.0, 0.0))


def test_a_refresh_can_move_head_zero_alone():
    _, agent = make(num_bellman_iterations=3, refreshed_heads="first", target_step_size=1.0)
    state = agent.init(0)
    old, new = state.params["heads"]["kernel"], agent.refresh(state).params["heads"]["kernel"]
    np.testing.assert_array_equal(new, jnp.stack([old[1], old[1], old[2], old[3]]))


def test_heads_are_initialised_independently_or_head_zero_as_a_copy_of_head_one():
    for rule, copied in (("independent", False), ("copied", True)):
        heads = make(num_bellman_iterations=2, initial_heads=rule)[1].init(0).params["heads"]["kernel"]
        same = [bool((heads[i] == heads[i + 1]).all()) for i in range(2)]
        assert same == [copied, False]


def test_projection_of_frozen_heads_is_optional():
    for projected, length in ((True, 1.0), (False, 0.5)):
        _, agent = make(target_update_period=1_000, project_frozen_heads=projected, **SIMBA)
        state = agent.init(0)
        heads = {**state.params["heads"], "kernel": state.params["heads"]["kernel"].at[0].multiply(0.5)}
        state, _ = train(agent, state._replace(params={**state.params, "heads": heads}), 1)
        lengths = jnp.linalg.norm(state.params["heads"]["kernel"], axis=-2)
        np.testing.assert_allclose(lengths[0], length, rtol=1e-5)
        np.testing.assert_allclose(lengths[1], 1, rtol=1e-5)


@pytest.mark.parametrize("order", ["policy-first", "critic-first"])
def test_update_order_of_policy_and_critic(order):
    """In one update, the part that comes first does not depend on the new value of the other."""
    critics, policies = [], []
    for entropy, reward in ((-99.0, 0.0), (0.6, 0.0), (-99.0, 9.0)):
        _, agent = make(update_order=order, target_entropy_per_action=entropy, normalise_observations=False)
        batch = random_batch()._replace(reward=np.full(8, reward, np.float32))
        state, _ = agent.update(agent.init(0), batch)
        gradients = (state.optimizer.critic[0].mu, state.optimizer.policy[0].mu)  # a tenth of them
        critic, policy = (np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in gradients)
        critics.append(critic)
        policies.append(policy)
    assert (critics[0] != critics[1]).any() == (order == "policy-first")
    assert (policies[0] != policies[2]).any() == (order == "critic-first")


def test_the_actor_loss_does_not_update_the_statistics_of_the_critic():
    states = []
    for rule in ("running", "batch"):
        _, agent = make(scheme="target-free", policy_loss_statistics=rule, normalise_observations=False)
        states.append(train(agent, agent.init(0), 1)[0])
    # after one update the critics learned from policies that differ by a step of 0.01
    assert_trees_close(*(state.statistics for state in states), rtol=0.05, atol=1e-3)
    leaves = [jax.tree.leaves(state.optimizer.policy) for state in states]
    assert any((left != right).any() for left, right in zip(*leaves, strict=True))


@pytest.mark.parametrize("fields", [{}, SIMBA], ids=["mlp", "simba"])
def test_parameters_of_batch_norm_at_the_input_and_in_the_policy(fields):
    """BatchNorm has two parameters for each of 3 + 2 inputs of the critic, 3 of the policy, and each of its units."""
    units = 4 * fields["policy_width"] if fields else 8
    plain, _ = make(**fields)
    found = {
        name: measure_size(plain.replace(**{name: True}), TASK) for name in ("batch_norm_input", "batch_norm_policy")
    }
    both, agent = make(batch_norm_input=True, batch_norm_policy=True, **fields)
    parameters = measure_size(plain, TASK).parameters
    assert found["batch_norm_input"].parameters - parameters == 2 * 5
    assert found["batch_norm_policy"].parameters - parameters == 2 * units
    assert measure_size(both, TASK).parameters - parameters == 2 * (5 + units + 3)
    begun = agent.init(0)
    state, _ = train(agent, begun, 2)
    moved = [(a != b).any() for a, b in zip(*map(jax.tree.leaves, (begun.policy, state.policy)), strict=True)]
    assert all(moved)
    assert not jax.tree.leaves(make(scheme="target-based", batch_norm_policy=True)[1].init(0).policy.statistics)


def test_batch_renormalisation_by_hand():
    """During warm-up it is BatchNorm; later training equals evaluation near the running averages (Ioffe 2017)."""
    x = np.random.default_rng(0).normal(2, 3, (64, 4)).astype(np.float32)
    layer = BatchRenorm(epsilon=1e-3)
    params = layer.init(jax.random.key(0), x, False)
    mean, variance = np.full(4, 1.5), np.full(4, 8.0)

    def normalised(train, calls, mean=mean, variance=variance):
        averages = {"mean": jnp.asarray(mean), "var": jnp.asarray(variance), "calls": jnp.int32(calls)}
        return layer.apply({**params, "batch_stats": averages}, x, train, mutable=["batch_stats"])

    by_batch = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-3)
    np.testing.assert_allclose(normalised(True, 99_999)[0], by_batch, rtol=1e-4, atol=1e-5)
    known, after = normalised(True, 100_000)
    np.testing.assert_allclose(known, normalised(False, 0)[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(known, (x - mean) / np.sqrt(variance + 1e-3), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after["batch_stats"]["mean"], 0.99 * mean + 0.01 * x.mean(axis=0), rtol=1e-5)
    assert int(after["batch_stats"]["calls"]) == 100_001
    far, _ = normalised(True, 100_000, mean=np.full(4, -1e6), variance=np.full(4, 1e-6))  # the limits, 3 and 5
    np.testing.assert_allclose(far, 3 * by_batch + 5, rtol=1e-4, atol=1e-4)
    _, agent = make(scheme="target-free", batch_norm_kind="renorm", batch_norm_epsilon=1e-3, **SIMBA)
    assert np.isfinite(train(agent, agent.init(0), 2)[1]["loss"])


def test_bfloat16_is_used_in_matrix_products_only():
    config, agent = make(compute_dtype="bfloat16", **SIMBA)
    state = agent.init(0)
    _, features = agent.activations(state, random_batch())
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.policy, features))} == {np.dtype("float32")}
    (mean, log_std), _ = policy_network(config).apply(state.policy.network, {}, random_batch().obs)
    assert (mean.dtype, log_std.dtype, to_unit_length(jnp.ones(3, jnp.bfloat16)).dtype) == (jnp.float32,) * 3


# -- normalisation -----------------------------------------------------------------------------------------------------


def test_rewards_are_divided_by_the_standard_deviation_of_returns_or_by_their_bound():
    """The return is G = gamma (1 - ended) G + r, and the divisor max(deviation, largest |G| / bound)."""
    config, agent = make(normalise_rewards=True, discount=0.5, num_atoms=11)
    state = agent.init(0)
    rewards, ends, total, returns = [1.0, 2.0, 40.0, 1.0], [False, False, True, False], 0.0, []
    state, _ = agent.observe(state, jnp.zeros(3))
    for reward, end in zip(rewards, ends, strict=True):
        state, frame = agent.observe(state, jnp.ones(3), reward, end)
        total = 0.5 * (1 - end) * total + reward
        returns.append(total)
    assert returns == [1.0, 2.5, 40.0, 21.0]  # the last reward of an episode leaks into the next one
    np.testing.assert_array_equal(frame, 1)  # the replay stores raw frames
    assert float(state.moments.returns.largest) == 40
    deviation = np.std(returns, ddof=1)
    assert float(normalisation.reward_scale(state.moments)) == pytest.approx(deviation, rel=1e-5)
    assert deviation > 40 / config.value_bound
    assert float(normalisation.reward_scale(state.moments, config.value_bound)) == pytest.approx(deviation, rel=1e-5)
    assert float(normalisation.reward_scale(state.moments, 1.0)) == 40
    _, without = make(normalise_observations=False)
    assert not jax.tree.leaves(without.init(0).moments)  # without normalisation the state has no moments


def test_actions_are_uniform_before_learning_and_then_samples_or_the_mean():
    config, agent = make(normalise_observations=False)
    state, act = agent.init(0), agent.act
    assert [config.epsilon(step) for step in (0, 999, 1_000, 10**6)] == [1.0, 1.0, 0.0, 0.0]
    uniform = np.array([act(state, jnp.zeros(3), 1.0, step, 0).action for step in range(300)])
    assert np.abs(uniform).max() <= 1
    assert stats.kstest(uniform.ravel(), stats.uniform(-1, 2).cdf).pvalue > 0.01
    samples = np.array([act(state, jnp.zeros(3), 0.0, step, 0).action for step in range(300)])
    assert len(np.unique(samples)) > 500
    _, certain = make(normalise_observations=False, acting_rule="mean")
    means = np.array([certain.act(state, jnp.zeros(3), 0.0, step, 0).action for step in range(3)])
    (mean, _), _ = policy_network(config).apply(state.policy.network, {}, np.zeros((1, 3)))
    np.testing.assert_allclose(means, np.tanh(np.repeat(mean, 3, axis=0)), rtol=1e-5)
