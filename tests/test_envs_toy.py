"""Tests of the toy problems: exact values, dynamics and rendering."""

from __future__ import annotations

import warnings

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from isqn.envs import toy
from isqn.envs.adapter import make_environment
from isqn.envs.registry import make_native


@pytest.mark.parametrize("discount", [0.5, 0.9, 0.99])
def test_values_of_the_chain_equal_hand_computation(discount):
    q = toy.optimal_values(toy.chain(5), discount)
    expected = [
        [discount**4, discount**3],
        [discount**4, discount**2],
        [discount**3, discount],
        [discount**2, 1],
        [0, 0],
    ]
    np.testing.assert_allclose(q, expected, rtol=1e-9)


def test_values_of_the_loop_equal_hand_computation():
    q = toy.optimal_values(toy.loop(), 0.9)
    np.testing.assert_allclose(q, [[9, 10]] * 3, rtol=1e-9)


def test_values_of_the_grid_equal_the_book():
    """Russell and Norvig, figure "the utilities of the states in the 4 x 3 world": discount 1, step cost 0.04."""
    values = toy.optimal_values(toy.grid(), 1.0).max(axis=1)
    book = [0.812, 0.868, 0.918, 0, 0.762, 0.660, 0, 0.705, 0.655, 0.611, 0.388]
    np.testing.assert_allclose(values, book, atol=5e-4)


def test_bellman_iterates_of_the_chain():
    mdp = toy.chain(4)
    iterates = toy.bellman_iterates(mdp, np.zeros((4, 2)), 0.5, 3)
    assert iterates.shape == (4, 4, 2)
    np.testing.assert_array_equal(iterates[1], [[0, 0], [0, 0], [0, 1], [0, 0]])
    np.testing.assert_array_equal(iterates[2], [[0, 0], [0, 0.5], [0, 1], [0, 0]])
    np.testing.assert_array_equal(iterates[3], [[0, 0.25], [0, 0.5], [0.25, 1], [0, 0]])
    fixed = toy.optimal_values(mdp, 0.5)
    np.testing.assert_allclose(toy.bellman_iterates(mdp, fixed, 0.5, 1)[1], fixed, rtol=1e-9)


@pytest.mark.parametrize("make", toy.PROBLEMS.values())
def test_problems_are_valid_markov_decision_processes(make):
    mdp = make()
    np.testing.assert_allclose(mdp.transitions.sum(axis=-1), 1)
    np.testing.assert_allclose(mdp.start.sum(), 1)
    assert (mdp.transitions >= 0).all()
    assert not mdp.terminal[mdp.start > 0].any()


@pytest.mark.parametrize("env_id", toy.PROBLEMS)
@pytest.mark.parametrize("render_mode", ["ansi", "rgb_array"])
def test_environments_pass_the_gymnasium_checker(env_id, render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(env_id, render_mode=render_mode).unwrapped)


def test_text_rendering_of_the_grid():
    env = gym.make("isqn/Grid-v0", render_mode="ansi")
    env.reset(seed=0)
    assert env.render() == "...*\n. .*\n@..."


def test_the_loop_truncates_and_the_chain_terminates():
    env = make_environment("isqn/Loop-v0")
    env.reset(0)
    steps = [env.step(1) for _ in range(5)]
    assert [step.truncated for step in steps] == [False] * 4 + [True]
    assert not any(step.terminated for step in steps)
    env = make_environment("isqn/Chain-v0")
    env.reset(0)
    steps = [env.step(1) for _ in range(7)]
    assert [step.terminated for step in steps] == [False] * 6 + [True]
    assert [step.reward for step in steps] == [0] * 6 + [1]
    assert not any(step.truncated for step in steps)


def test_host_transitions_have_the_right_frequencies():
    mdp = toy.grid()
    env = toy.ToyEnvironment("isqn/Grid-v0")
    env.reset(seed=0)
    counts = np.zeros(len(mdp.start))
    for _ in range(5000):
        env.state = 7
        env.step(0)
        counts[env.state] += 1
    np.testing.assert_allclose(counts / 5000, mdp.transitions[7, 0], atol=0.03)  # 4 standard errors


@pytest.mark.parametrize(
    "env_id", ["isqn/Loop-v0", "isqn/Grid-v0"]
)  # one with a random start, one with random transitions
def test_native_transitions_have_the_right_frequencies(env_id):
    mdp = toy.PROBLEMS[env_id]()
    native = make_native(env_id)
    keys = jax.random.split(jax.random.key(0), 4000)
    first, _ = jax.jit(jax.vmap(native.reset))(keys)
    np.testing.assert_allclose(np.bincount(first.place, minlength=len(mdp.start)) / 4000, mdp.start, atol=0.04)
    state, action = int(np.argmax(mdp.start)), 1
    toy_state = toy.ToyState(jnp.int32(state), jnp.int32(0))
    after, obs, reward, terminated, truncated = jax.jit(jax.vmap(native.step, (None, None, 0)))(toy_state, action, keys)
    counts = np.bincount(after.place, minlength=len(mdp.start)) / 4000
    np.testing.assert_allclose(counts, mdp.transitions[state, action], atol=0.04)
    np.testing.assert_array_equal(obs, mdp.features[after.place])
    np.testing.assert_allclose(reward, mdp.rewards[state, action, after.place], rtol=1e-6)
    np.testing.assert_array_equal(terminated, mdp.terminal[after.place])
    assert not truncated.any()


def test_native_chain_and_loop_equal_the_host_versions():
    for env_id in ("isqn/Chain-v0", "isqn/Loop-v0"):
        host, native = make_environment(env_id), make_native(env_id)
        assert native.spec == host.spec
        step = jax.jit(native.step)
        state, _ = jax.jit(native.reset)(jax.random.key(0))
        host.reset(0)
        host.env.unwrapped.state = int(state.place)  # type: ignore[attr-defined]
        actions = np.random.default_rng(0)
        for _ in range(100):
            action = int(actions.integers(2))
            state, obs, *outcome = step(state, action, jax.random.key(1))
            expected = host.step(action)
            np.testing.assert_array_equal(obs, expected.frame)
            assert [float(x) for x in outcome] == [expected.reward, expected.terminated, expected.truncated]
            if expected.terminated or expected.truncated:
                break
        else:
            pytest.fail("no episode ended within 100 steps")
