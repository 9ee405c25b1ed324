"""Tests of the JAX environments against the original ones, step by step."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from helpers import registries_restored
from isqn.envs import classic, minatar, toy
from isqn.envs.adapter import make_environment
from isqn.envs.native import NativeEnvironment, complete_spec, to_native_action
from isqn.envs.registry import has_native, make_native, register_environment
from isqn.types import EnvSpec, UserError

KEY = jax.random.key(0)


def test_has_native():
    for env_id in (*toy.PROBLEMS, *classic.IDS, *minatar.IDS, "MinAtar/Breakout"):
        assert has_native(env_id)
    for env_id in ("ALE/Pong-v5", "CartPole-v0", "MinAtar/Pong", "MountainCarContinuous-v0"):
        assert not has_native(env_id)
        with pytest.raises(ValueError, match="no JAX version"):
            make_native(env_id)


@pytest.mark.parametrize("env_id", [*toy.PROBLEMS, *classic.IDS, *minatar.IDS[:5], "MinAtar/Breakout-v0"])
def test_native_environments_run_under_scan_and_vmap(env_id):
    """`scan` requires that a step keeps all shapes and dtypes of the state; `vmap` adds an axis."""
    native = make_native(env_id)
    assert native.spec == make_environment(env_id).spec
    action = jnp.ones(native.spec.action_shape, native.spec.action_dtype)

    def play(key):
        def scan_step(carry, key):
            state, _ = carry
            state, obs, reward, terminated, truncated = native.step(state, action, key)
            return (state, obs), (reward, terminated, truncated)

        return jax.lax.scan(scan_step, native.reset(key), jax.random.split(key, 3))

    (_, obs), (reward, terminated, truncated) = jax.eval_shape(jax.vmap(play), jax.random.split(KEY, 5))
    assert (obs.shape, obs.dtype.name) == ((5, *native.spec.frame_shape), native.spec.frame_dtype)
    assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float32, np.bool_, np.bool_)
    assert reward.shape == terminated.shape == truncated.shape == (5, 3)


# Classic control

DISCRETE_IDS = [env_id for env_id in classic.IDS if not classic.PROBLEMS[env_id].action_bound]


def _sample_states(env_id: str, count: int) -> np.ndarray:
    """Sample states, including some at the limits of the problem."""
    rng = np.random.default_rng(0)
    high = {
        "CartPole-v1": [2.5, 3.0, 0.22, 3.0],
        "Acrobot-v1": [np.pi, np.pi, 4 * np.pi, 9 * np.pi],
        "MountainCar-v0": [0.9, 0.07],
    }[env_id]
    states = rng.uniform(-1, 1, (count, len(high))) * high
    if env_id == "MountainCar-v0":
        states[:, 0] -= 0.3  # from -1.2 to 0.6
        states[:20] = [-1.2, -0.05]  # at the wall
    return states.astype(np.float32)


@pytest.mark.parametrize("env_id", DISCRETE_IDS)
def test_one_step_of_classic_control_equals_gymnasium(env_id):
    """Terminations must agree up to one state, where float32 may round differently."""
    states = _sample_states(env_id, 600)
    actions = np.arange(len(states)) % classic.PROBLEMS[env_id].num_actions
    native = make_native(env_id)
    timed = classic.TimedState(jnp.asarray(states), jnp.zeros(len(states), jnp.int32))
    _, obs, reward, terminated, truncated = jax.jit(jax.vmap(native.step, (0, 0, None)))(timed, actions, KEY)
    host = make_environment(env_id)
    expected = []
    for state, action in zip(states, actions, strict=True):
        host.reset(0)
        host.env.unwrapped.state = state.astype(np.float64)  # type: ignore[attr-defined]
        expected.append(host.step(int(action)))
    np.testing.assert_allclose(obs, [step.frame for step in expected], rtol=2e-4, atol=2e-4)
    terminations = np.array([step.terminated for step in expected])
    assert (np.asarray(terminated) != terminations).sum() <= 1
    assert 5 < terminations.sum() < 590
    is_same = np.asarray(terminated) == terminations
    np.testing.assert_array_equal(np.asarray(reward)[is_same], np.array([step.reward for step in expected])[is_same])
    assert not truncated.any()


@pytest.mark.parametrize(("env_id", "horizon"), [("CartPole-v1", 60), ("Acrobot-v1", 40), ("MountainCar-v0", 200)])
def test_trajectories_of_classic_control_equal_gymnasium(env_id, horizon):
    """The initial state and the actions are the same; the horizon is short because float32 errors grow."""
    native, host = make_native(env_id), make_environment(env_id)
    reset, step = jax.jit(native.reset), jax.jit(native.step)
    rng = np.random.default_rng(1)
    for episode in range(3):
        state, obs = reset(jax.random.key(episode))
        host.reset(episode)
        host.env.unwrapped.state = np.asarray(state.physics, np.float64)  # type: ignore[attr-defined]
        for _ in range(horizon):
            action = int(rng.integers(native.spec.num_actions))
            state, obs, reward, terminated, truncated = step(state, action, KEY)
            expected = host.step(action)
            np.testing.assert_allclose(obs, expected.frame, atol=2e-3)
            assert (reward, terminated, truncated) == expected[1:]
            if terminated or truncated:
                break


@pytest.mark.parametrize("env_id", DISCRETE_IDS)
def test_classic_control_has_the_initial_distribution_of_gymnasium(env_id):
    native, host = make_native(env_id), make_environment(env_id)
    _, ours = jax.jit(jax.vmap(native.reset))(jax.random.split(KEY, 400))
    theirs = np.stack([host.reset(seed) for seed in range(400)])
    for quantile in (0, 0.25, 0.5, 0.75, 1):
        np.testing.assert_allclose(
            np.quantile(ours, quantile, axis=0), np.quantile(theirs, quantile, axis=0), atol=0.03
        )


@pytest.mark.parametrize("env_id", classic.IDS)
def test_classic_control_has_the_time_limit_of_gymnasium(env_id):
    native, host = make_native(env_id), make_environment(env_id)
    limit = classic.PROBLEMS[env_id].time_limit
    assert host.env.spec is not None
    assert limit == host.env.spec.max_episode_steps
    state, _ = jax.jit(native.reset)(KEY)
    step, action = jax.jit(native.step), np.zeros(native.spec.action_shape, native.spec.action_dtype)
    for time, expected in ((limit - 2, False), (limit - 1, True)):
        *_, truncated = step(state._replace(time=jnp.int32(time)), action, KEY)
        assert truncated == expected


def _at(physics: Any) -> classic.TimedState:
    return classic.TimedState(jnp.asarray(physics, jnp.float32), jnp.int32(0))


@pytest.mark.parametrize(
    ("angle", "speed", "torque", "next_angle", "next_speed", "reward"),
    [
        (0, 0, 0, 0, 0, 0),  # upright and at rest
        (np.pi / 2, 0, 0, np.pi / 2 + 0.0375, 0.75, -(np.pi**2) / 4),  # gravity: 15 sin(angle) x 0.05
        (0, 0, 1, 0.0075, 0.15, -0.001),  # a torque of 1: 3 x 0.05
        (0, 1, -9, 0.035, 0.7, -0.1 - 0.004),  # a torque of at most 2
        (0, 7.9, 2, 0.4, 8, -0.1 * 7.9**2 - 0.004),  # a speed of at most 8
        (1.5 * np.pi, 0, 0, 1.5 * np.pi - 0.0375, -0.75, -(np.pi**2) / 4),  # the cost is of the angle -pi / 2
    ],
)
def test_a_step_of_pendulum_by_hand(angle, speed, torque, next_angle, next_speed, reward):
    native = make_native("Pendulum-v1")
    state, obs, got, terminated, _ = native.step(_at([angle, speed]), jnp.array([torque]), KEY)
    np.testing.assert_allclose(state.physics, [next_angle, next_speed], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(obs, [np.cos(next_angle), np.sin(next_angle), next_speed], rtol=1e-6, atol=1e-6)
    assert got == pytest.approx(reward, rel=1e-5, abs=1e-9)
    assert not terminated


def test_a_step_of_pendulum_equals_gymnasium():
    """Angles of several turns, and speeds and torques beyond their limits."""
    rng = np.random.default_rng(0)
    states = rng.uniform(-1, 1, (600, 2)).astype(np.float32) * [20, 8]
    actions = rng.uniform(-3, 3, (600, 1)).astype(np.float32)
    native, host = make_native("Pendulum-v1"), make_environment("Pendulum-v1")
    timed = classic.TimedState(jnp.asarray(states, jnp.float32), jnp.zeros(600, jnp.int32))
    _, obs, reward, terminated, truncated = jax.jit(jax.vmap(native.step, (0, 0, None)))(timed, actions, KEY)
    expected = []
    host.reset(0)
    for state, action in zip(states, actions, strict=True):
        host.env.unwrapped.state = state.astype(np.float64)  # type: ignore[attr-defined]
        expected.append(host.env.unwrapped.step(action))
    np.testing.assert_allclose(obs, [step[0] for step in expected], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(reward, [step[1] for step in expected], rtol=1e-4, atol=1e-4)
    assert not terminated.any()
    assert not truncated.any()


def test_an_episode_of_pendulum_equals_gymnasium():
    """All 200 steps, under actions of the agent, which are in [-1, 1] in both loops."""
    native, host = make_native("Pendulum-v1"), make_environment("Pendulum-v1")
    step = jax.jit(lambda state, action: native.step(state, to_native_action(native.spec, action), KEY))
    rng = np.random.default_rng(1)
    state, _ = native.reset(KEY)
    host.reset(0)
    host.env.unwrapped.state = np.asarray(state.physics, np.float64)  # type: ignore[attr-defined]
    for time in range(200):
        action = rng.uniform(-1, 1, 1).astype(np.float32)
        state, obs, reward, terminated, truncated = step(state, action)
        expected = host.step(action)
        np.testing.assert_allclose(obs, expected.frame, atol=2e-3)
        assert float(reward) == pytest.approx(expected.reward, abs=2e-3)
        assert (bool(terminated), bool(truncated)) == (False, time == 199) == expected[2:]


def test_pendulum_starts_at_a_uniform_angle_and_speed():
    native, host = make_native("Pendulum-v1"), make_environment("Pendulum-v1")
    ours, _ = jax.vmap(native.reset)(jax.random.split(KEY, 1_000))
    theirs = []
    for seed in range(1_000):
        host.reset(seed)
        theirs.append(host.env.unwrapped.state)  # type: ignore[attr-defined]
    for physics in (np.asarray(ours.physics), np.asarray(theirs)):
        for values, high in zip(physics.T, (np.pi, 1), strict=True):
            assert stats.kstest(values, "uniform", (-high, 2 * high)).pvalue > 1e-3


def test_actions_are_scaled_to_the_bounds_as_in_the_host_loop():
    """-1, 0 and 1 are the lower bound, the middle and the upper bound; a box of 2 x 1 numbers keeps its shape."""
    box = {"action_low": (-1.0, 0.1), "action_high": (3.0, 0.7)}
    spec = EnvSpec("box", "test", (3,), "float32", 2, **box, action_box=(2, 1))
    for action, expected in (([-1, -1], [-1, 0.1]), ([0, 0], [1, 0.4]), ([1, 1], [3, 0.7]), ([0.5, 2], [2, 0.7])):
        scaled = to_native_action(spec, jnp.array(action, jnp.float32))
        np.testing.assert_allclose(scaled, np.array(expected, np.float32)[:, None], rtol=1e-6)
        np.testing.assert_allclose(scaled, spec.to_env_action(action), rtol=1e-6)
    discrete = EnvSpec("discrete", "test", (3,), "float32", 4)
    assert to_native_action(discrete, jnp.int32(3)) == 3
    assert complete_spec(discrete) == discrete
    assert complete_spec(replace(spec, action_box=())) == replace(spec, action_box=(2,))


# MinAtar: pgx against the original, with the same random draws where possible


def _make_both(game: str) -> tuple[minatar.MinAtarGame, Any, Any]:
    """Make the original game and pgx's reset and step, without sticky actions."""
    original = minatar.MinAtarGame(f"MinAtar/{game}-v1", sticky_action_prob=0.0)
    reset, step, num_actions = minatar.make_jax_functions(f"MinAtar/{game}-v1", sticky_action_prob=0.0)
    assert num_actions == original.action_space.n  # type: ignore[attr-defined]
    return original, jax.jit(reset), jax.jit(step)


def _assert_equal_steps(theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> bool:
    """Assert equal observations, rewards and terminations; return whether the episode terminated."""
    obs, reward, terminated, _, _ = theirs
    _, our_obs, our_reward, our_terminated, our_truncated = ours
    np.testing.assert_array_equal(our_obs, obs)
    assert (float(our_reward), bool(our_terminated), bool(our_truncated)) == (reward, terminated, False)
    return terminated


def test_space_invaders_equals_the_original():
    """The game is deterministic. Every second episode starts with one alien, so that waves are cleared."""
    original, reset, step = _make_both("SpaceInvaders")
    ends, faster = 0, 0
    for episode in range(6):
        rng = np.random.default_rng(episode)
        first, _ = original.reset(seed=episode)
        state, obs = reset(KEY)
        np.testing.assert_array_equal(obs, first)
        if episode % 2:
            original.game.env.alien_map = np.eye(10)[3:4].T @ np.eye(10)[5:6]
            state = state.replace(_alien_map=jnp.asarray(original.game.env.alien_map, bool))
        for _ in range(300):
            action = int(rng.choice(4, p=[0.1, 0.25, 0.25, 0.4]))
            theirs, ours = original.step(action), step(state, action, KEY)
            state = ours[0]
            if _assert_equal_steps(theirs, ours):
                ends += 1
                break
        faster += original.game.env.ramp_index
    assert ends > 3
    assert faster > 1


def test_breakout_equals_the_original():
    """Only the side at which the ball starts is random.

    The policy mostly follows the ball, and every second episode starts with one brick, so that walls are cleared.
    """
    original, reset, step = _make_both("Breakout")
    sides, ends, walls = set(), 0, 0
    for episode in range(6):
        rng = np.random.default_rng(episode)
        state, obs = reset(jax.random.key(episode))
        while True:
            first, _ = original.reset(seed=int(rng.integers(2**31)))
            if original.game.env.ball_x == int(state._ball_x):
                break
        sides.add(int(state._ball_x))
        np.testing.assert_array_equal(obs, first)
        game = original.game.env
        if episode % 2:
            game.brick_map[:] = np.arange(100).reshape(10, 10) == 33
            state = state.replace(_brick_map=jnp.asarray(game.brick_map, bool))
        for _ in range(200):
            target = game.ball_x + (1 if game.ball_dir in (1, 2) else -1)
            towards_target = 1 if target < game.pos else 2 if target > game.pos else 0
            action = towards_target if rng.random() < 0.95 else int(rng.integers(3))
            bricks = game.brick_map.sum()
            theirs, ours = original.step(action), step(state, action, KEY)
            state = ours[0]
            walls += game.brick_map.sum() > bricks
            if _assert_equal_steps(theirs, ours):
                ends += 1
                break
    assert sides == {0, 9}
    assert ends > 1
    assert walls > 0


def test_freeway_equals_the_original():
    """Cars are random at the start and after every crossing, so the original gets the cars of pgx."""
    original, reset, step = _make_both("Freeway")
    state, _ = reset(KEY)
    original.reset(seed=0)
    game = original.game.env
    assert game.terminate_timer == int(state._terminate_timer) == 2500
    game.terminate_timer = 400
    state = state.replace(_terminate_timer=jnp.int32(400))
    game.cars = np.asarray(state._cars).tolist()
    rng = np.random.default_rng(0)
    keys = np.asarray(jax.random.split(jax.random.PRNGKey(0), 401))
    crossings = 0
    for t in range(401):
        action = int(rng.choice(3, p=[0.05, 0.9, 0.05]))
        theirs, ours = original.step(action), step(state, action, keys[t])
        state = ours[0]
        if theirs[1]:
            crossings += 1
            assert float(ours[2]) == 1
            game.cars = np.asarray(state._cars).tolist()  # both have drawn new cars
        else:
            assert _assert_equal_steps(theirs, ours) == (t == 400)
    assert crossings > 1


class DrawRecorder:
    """Wrapper of numpy's RandomState that records its draws."""

    def __init__(self, seed: int):
        self.random, self.history = np.random.RandomState(seed), []

    def rand(self) -> float:
        self.history.append(self.random.rand())
        return self.history[-1]

    def randint(self, *args: Any, **kwargs: Any) -> int:
        self.history.append(self.random.randint(*args, **kwargs))
        return self.history[-1]


def test_asterix_equals_the_original():
    """pgx gets the random draws of the original."""
    module = import_module("pgx.minatar.asterix")
    step = jax.jit(lambda state, action, *draws: module._step_det(state, jnp.int32(action), *draws))
    observe = jax.jit(module._observe)
    ends, total = 0, 0
    for episode in range(12):
        original = minatar.MinAtarGame("MinAtar/Asterix-v1", sticky_action_prob=0.0)
        original.reset(seed=0)
        game, draws = original.game.env, DrawRecorder(episode)
        game.random = draws
        state = module.State()
        choose = np.random.default_rng(episode)
        for _ in range(400):
            free = [i for i in range(8) if game.entities[i] is None]
            draws.history.clear()
            action = int(choose.integers(5))
            obs, reward, terminated, _, _ = original.step(action)
            right, gold, slot = False, False, 0
            if draws.history:
                right, gold = draws.history[0] < 1 / 2, draws.history[1] < 1 / 3
                slot = free[draws.history[2]] if free else 0
            state = step(state, action, *map(np.asarray, (right, gold, slot)))
            np.testing.assert_array_equal(observe(state), obs)
            assert (float(state.rewards[0]), bool(state.terminated)) == (reward, terminated)
            total += int(reward)
            if terminated:
                ends += 1
                break
    assert ends > 6
    assert total > 0


def _play_seaquest(step: Any, episodes: int) -> tuple[int, int]:
    """Play Seaquest in both versions; return the numbers of equal episodes and of surfacings.

    pgx gets the random draws of the original. Both sometimes get divers, because surfacing needs at least one.
    """
    state_class = import_module("pgx.minatar.seaquest").State
    num_equal, surfacings = 0, 0
    for episode in range(episodes):
        original = minatar.MinAtarGame("MinAtar/Seaquest-v1", sticky_action_prob=0.0)
        original.reset(seed=0)
        game, draws = original.game.env, DrawRecorder(episode)
        game.random = draws
        state = state_class()
        choose = np.random.default_rng(episode)
        while True:
            if choose.random() < 0.1:
                game.diver_count = int(choose.integers(1, 7))
                state = state.replace(_diver_count=jnp.int32(game.diver_count))
            draws.history.clear()
            enemy_due, diver_due = game.e_spawn_timer == 0, game.d_spawn_timer == 0
            ramp = game.ramp_index
            action = int(choose.choice(6, p=[0.1, 0.15, 0.15, 0.15, 0.2, 0.25]))
            obs, reward, terminated, _, _ = original.step(action)
            surfacings += game.ramp_index != ramp
            enemy = draws.history[:3] if enemy_due else [0.0, 0.0, 1]
            diver = draws.history[-2:] if diver_due else [0.0, 1]
            pgx_draws = (enemy[0] < 1 / 2, enemy[1] < 1 / 3, int(enemy[2]), diver[0] < 1 / 2, int(diver[1]))
            state = step(state, np.int32(action), *map(np.asarray, pgx_draws))
            is_same = np.array_equal(state.observation, obs)
            if not is_same or (float(state.rewards[0]), bool(state.terminated)) != (reward, terminated):
                break
            if terminated:
                num_equal += 1
                break
    return num_equal, surfacings


def test_corrected_seaquest_equals_the_original():
    module = import_module("pgx.minatar.seaquest")

    def uncorrected_step(state, *args):
        after = module._step_det(state, *args)
        return after.replace(observation=module._observe(after))

    num_equal, surfacings = _play_seaquest(
        jax.jit(lambda state, *args: minatar.correct_seaquest(state, uncorrected_step(state, *args))), episodes=6
    )
    assert num_equal == 6
    assert surfacings > 2


def test_pgx_seaquest_still_needs_corrections():
    """pgx 2.6 keeps bullets outside the screen and speeds up enemies too early.

    If this fails, `correct_seaquest` may be unnecessary.
    """
    module = import_module("pgx.minatar.seaquest")
    # pgx keeps enemy bullets that left the screen
    bullets = module.State()._e_bullets.at[0].set(jnp.array([12, 3, 1]))
    ix = module.find_ix(bullets)
    assert (module._remove_out_of_bound(bullets, ix)[0] == bullets[0]).all()
    # enemies speed up at the first surfacing in pgx, and at the second in the original
    *_, move_speed, spawn_speed, ramp_index = module._surface(
        jnp.int32(1), jnp.int32(100), jnp.int32(20), jnp.int32(5), True, jnp.int32(0)
    )
    assert (move_speed, spawn_speed, ramp_index) == (4, 19, 1)
    game = minatar.MinAtarGame("MinAtar/Seaquest-v1").game.env
    game.diver_count = 1
    game._surface()
    assert (game.move_speed, game.e_spawn_speed, game.ramp_index) == (5, 19, 1)


def _pgx_draws(module: Any, monkeypatch: pytest.MonkeyPatch, count: int = 4000) -> Any:
    """Return the random draws that pgx passes to `_step_det`."""
    monkeypatch.setattr(module, "_step_det", lambda state, action, *args, **kwargs: (*args, *kwargs.values()))
    step = jax.jit(jax.vmap(lambda key: module._step(module.State(), 0, key, 0.1)))
    return [np.asarray(values) for values in step(jax.random.split(KEY, count))]


def test_pgx_draws_from_the_same_distributions_as_the_original(monkeypatch):
    """The tests above replace these draws. Tolerances are four standard errors."""
    right, gold, slot = _pgx_draws(import_module("pgx.minatar.asterix"), monkeypatch)
    np.testing.assert_allclose([right.mean(), gold.mean()], [1 / 2, 1 / 3], atol=0.032)
    np.testing.assert_allclose(np.bincount(slot, minlength=8) / 4000, 1 / 8, atol=0.021)
    right, is_sub, row, diver_right, diver_row = _pgx_draws(import_module("pgx.minatar.seaquest"), monkeypatch)
    np.testing.assert_allclose([right.mean(), is_sub.mean(), diver_right.mean()], [1 / 2, 1 / 3, 1 / 2], atol=0.032)
    for rows in (row, diver_row):
        np.testing.assert_allclose(np.bincount(rows, minlength=9)[1:] / 4000, 1 / 8, atol=0.021)
    speeds, directions = _pgx_draws(import_module("pgx.minatar.freeway"), monkeypatch)
    np.testing.assert_allclose(np.bincount(speeds.ravel(), minlength=6)[1:] / 32000, 1 / 5, atol=0.01)
    np.testing.assert_allclose((directions == 1).mean(), 1 / 2, atol=0.012)
    assert set(np.unique(directions)) == {-1, 1}


@pytest.mark.slow
@pytest.mark.parametrize("game", ["Asterix", "Seaquest"])
def test_mean_returns_and_lengths_of_random_play_agree_with_the_original(game):
    """Compare the means over 512 episodes of random play, within four standard errors."""
    episodes, horizon = 512, 60
    host = minatar.MinAtarGame(f"MinAtar/{game}-v1")
    rng = np.random.default_rng(0)
    theirs = np.zeros((episodes, 2))
    for episode in range(episodes):
        host.reset(seed=episode)
        for _ in range(horizon):
            _, reward, terminated, _, _ = host.step(int(rng.integers(host.action_space.n)))  # type: ignore
            theirs[episode] += reward, 1
            if terminated:
                break
    reset, step, num_actions = minatar.make_jax_functions(f"MinAtar/{game}-v1")
    step_all = jax.jit(jax.vmap(step))
    state, _ = jax.vmap(reset)(jax.random.split(KEY, episodes))
    ours = np.zeros((episodes, 2))
    is_active = np.ones(episodes, bool)
    for t in range(horizon):
        key = jax.random.fold_in(KEY, t)
        actions = jax.random.randint(key, (episodes,), 0, num_actions)
        state, _, reward, terminated, _ = step_all(state, actions, jax.random.split(key, episodes))
        ours += np.stack([np.asarray(reward), np.ones(episodes)], axis=1) * is_active[:, None]
        is_active &= ~np.asarray(terminated)
    error = np.sqrt((theirs.var(axis=0) + ours.var(axis=0)) / episodes)
    assert (np.abs(theirs.mean(axis=0) - ours.mean(axis=0)) < 4 * error).all()
    assert (theirs.std(axis=0) > 0).all()


def test_sticky_actions_in_both_versions():
    """With probability 1, the initial no-op repeats forever."""
    original = minatar.MinAtarGame("MinAtar/Breakout-v1", sticky_action_prob=1.0)
    original.reset(seed=0)
    assert original.step(1)[0][9, 4, 0]
    reset, step, _ = minatar.make_jax_functions("MinAtar/Breakout-v1", sticky_action_prob=1.0)
    state, _ = jax.jit(reset)(KEY)
    assert jax.jit(step)(state, 1, KEY)[1][9, 4, 0]
    assert minatar.STICKY_ACTION_PROBABILITY == 0.1
    assert minatar.MinAtarGame("MinAtar/Breakout-v1").game.sticky_action_prob == 0.1


def test_a_reset_clears_the_previous_action():
    """MinAtar itself keeps it, so that the first step of an episode depends on the previous episode."""
    game = minatar.MinAtarGame("MinAtar/Breakout-v1", sticky_action_prob=1.0)
    game.reset(seed=0)
    game.game.last_action = 1
    game.reset(seed=0)
    assert game.step(0)[0][9, 4, 0]


# -- environments of users -----------------------------------------------------------------------------------------

SPEC = EnvSpec("Line-v0", "gymnasium", (2,), "float32", 2)


def line_reset(key):
    return jnp.float32(0), jnp.zeros(2)


def line_step(state, action, key):
    return state + 1, jnp.full(2, state), jnp.float32(1), state > 3, jnp.bool(False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"step": lambda s, a, k: (s, jnp.zeros(1), *line_step(s, a, k)[2:])},
            "of step has shape (1,) and type float32;",
        ),
        (
            {"reset": lambda k: (jnp.float32(0), jnp.zeros(2, int))},
            "of reset has shape (2,) and type int32",
        ),
        (
            {"step": lambda s, a, k: (*line_step(s, a, k)[:3], 5, 5)},
            "terminated has shape () and type int32",
        ),
        (
            {"step": lambda s, a, k: (s > 0, *line_step(s, a, k)[1:])},
            "other shapes or types after step",
        ),
        (
            {"step": lambda s, a: 0},
            "and step(state, action, key) (state, obs, reward, ",
        ),
        ({"spec": replace(SPEC, num_actions=0)}, "its spec has num_actions 0; it must be at least 1"),
        ({"spec": replace(SPEC, frame_shape=(3,))}, "of reset has shape (2,) and type float32; it must have"),
    ],
)
def test_inconsistent_functions_are_refused_before_training(changes, sentence):
    with registries_restored():
        register_environment("Line-v0", NativeEnvironment(SPEC, line_reset, line_step)._replace(**changes))
        for make in (make_native, make_environment):
            with pytest.raises(UserError, match=re.escape(sentence)):
                make("Line-v0")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"env_id": "CartPole-v1", "entry_point": "mine:Env"}, "the package has an environment 'CartPole-v1'; choose"),
        (
            {"env_id": "Blackjack-v1", "entry_point": "mine:Env"},
            "the module gymnasium has an environment",
        ),
        ({"env_id": "Foo-v0"}, "give 'Foo-v0' an entry_point, or a native version in JAX"),
        ({"env_id": "Foo-v0", "native": 3}, "native is 3; it must be an isqn.NativeEnvironment"),
        ({"env_id": "Foo-v0", "entry_point": 3}, "entry_point 3; give an id, and a class or 'module:Class'"),
        ({"env_id": 3, "entry_point": "mine:Env"}, "env_id is 3 and"),
    ],
)
def test_environments_that_cannot_be_registered_are_refused(arguments, sentence):
    with registries_restored(), pytest.raises(UserError, match=re.escape(sentence)):
        register_environment(**arguments)


def test_a_module_may_register_its_own_environment_again():
    with registries_restored():
        for _ in range(2):
            register_environment("Line-v0", NativeEnvironment(SPEC, line_reset, line_step))
        with pytest.raises(UserError, match="has an environment 'Line-v0'; choose another name"):
            register_environment("Line-v0", entry_point="another:Line")
        assert make_environment("Line-v0").spec.frame_shape == (2,)
