"""JAX versions against the environments they stand for, step by step."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isqn.envs import classic, minatar, toy
from isqn.envs.adapter import make_environment
from isqn.envs.native import has_native, make_native

KEY = jax.random.key(0)


def test_which_have_a_native_version():
    for env_id in (*toy.PROBLEMS, *classic.IDS, *minatar.IDS, "MinAtar/Breakout"):
        assert has_native(env_id)
    for env_id in ("ALE/Pong-v5", "CartPole-v0", "MinAtar/Pong", "Pendulum-v1"):
        assert not has_native(env_id)
        with pytest.raises(ValueError, match="no JAX version"):
            make_native(env_id)


@pytest.mark.parametrize("env_id", [*toy.PROBLEMS, *classic.IDS, *minatar.IDS[:5], "MinAtar/Breakout-v0"])
def test_native_versions_fit_a_compiled_loop(env_id):
    """A step keeps every shape and dtype of the state, so that `scan` can carry it; `vmap` adds an axis."""
    native = make_native(env_id)
    assert native.spec == make_environment(env_id).spec

    def play(key):
        def one(carry, key):
            state, _ = carry
            state, obs, reward, terminated, truncated = native.step(state, jnp.int32(1), key)
            return (state, obs), (reward, terminated, truncated)

        return jax.lax.scan(one, native.reset(key), jax.random.split(key, 3))

    (_, obs), (reward, terminated, truncated) = jax.eval_shape(jax.vmap(play), jax.random.split(KEY, 5))
    assert (obs.shape, obs.dtype.name) == ((5, *native.spec.frame_shape), native.spec.frame_dtype)
    assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float32, np.bool_, np.bool_)
    assert reward.shape == terminated.shape == truncated.shape == (5, 3)


# Classic control


def _interesting_states(env_id: str, count: int) -> np.ndarray:
    """Of all kinds, those at the limits of the problem included."""
    draw = np.random.default_rng(0)
    high = {
        "CartPole-v1": [2.5, 3.0, 0.22, 3.0],
        "Acrobot-v1": [np.pi, np.pi, 4 * np.pi, 9 * np.pi],
        "MountainCar-v0": [0.9, 0.07],
    }[env_id]
    states = draw.uniform(-1, 1, (count, len(high))) * high
    if env_id == "MountainCar-v0":
        states[:, 0] -= 0.3  # from -1.2 to 0.6
        states[:20] = [-1.2, -0.05]  # at the wall
    return states.astype(np.float32)


@pytest.mark.parametrize("env_id", classic.IDS)
def test_classic_control_steps_as_gymnasium_does(env_id):
    """One step from each of many states. The ends must agree except where float32 decides differently."""
    states = _interesting_states(env_id, 600)
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
    ends = np.array([step.terminated for step in expected])
    assert (np.asarray(terminated) != ends).sum() <= 1
    assert 5 < ends.sum() < 590
    same = np.asarray(terminated) == ends
    np.testing.assert_array_equal(np.asarray(reward)[same], np.array([step.reward for step in expected])[same])
    assert not truncated.any()


@pytest.mark.parametrize(("env_id", "horizon"), [("CartPole-v1", 60), ("Acrobot-v1", 40), ("MountainCar-v0", 200)])
def test_classic_control_trajectories(env_id, horizon):
    """From one first state, under one sequence of actions; float32 drifts, so the horizon is short."""
    native, host = make_native(env_id), make_environment(env_id)
    reset, step = jax.jit(native.reset), jax.jit(native.step)
    draw = np.random.default_rng(1)
    for episode in range(3):
        state, obs = reset(jax.random.key(episode))
        host.reset(episode)
        host.env.unwrapped.state = np.asarray(state.physics, np.float64)  # type: ignore[attr-defined]
        for _ in range(horizon):
            action = int(draw.integers(native.spec.num_actions))
            state, obs, reward, terminated, truncated = step(state, action, KEY)
            expected = host.step(action)
            np.testing.assert_allclose(obs, expected.frame, atol=2e-3)
            assert (reward, terminated, truncated) == expected[1:]
            if terminated or truncated:
                break


@pytest.mark.parametrize("env_id", classic.IDS)
def test_classic_control_starts_and_is_cut_as_gymnasium_does(env_id):
    native, host = make_native(env_id), make_environment(env_id)
    _, ours = jax.jit(jax.vmap(native.reset))(jax.random.split(KEY, 400))
    theirs = np.stack([host.reset(seed) for seed in range(400)])
    for quantile in (0, 0.25, 0.5, 0.75, 1):
        np.testing.assert_allclose(
            np.quantile(ours, quantile, axis=0), np.quantile(theirs, quantile, axis=0), atol=0.03
        )
    limit = classic.PROBLEMS[env_id].time_limit
    assert host.env.spec is not None
    assert limit == host.env.spec.max_episode_steps
    state, _ = jax.jit(native.reset)(KEY)
    step = jax.jit(native.step)
    for time, cut in ((limit - 2, False), (limit - 1, True)):
        *_, truncated = step(state._replace(time=jnp.int32(time)), 0, KEY)
        assert truncated == cut


# MinAtar: the original against pgx, with the same randomness where it can be had


def _pair(game: str) -> tuple[minatar.MinAtarGame, Any, Any]:
    original = minatar.MinAtarGame(f"MinAtar/{game}-v1", sticky_action_prob=0.0)
    reset, step, num_actions = minatar.make_jax_functions(f"MinAtar/{game}-v1", sticky_action_prob=0.0)
    assert num_actions == original.action_space.n  # type: ignore[attr-defined]
    return original, jax.jit(reset), jax.jit(step)


def _agree(theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> bool:
    """Observation, reward and end agree; returns whether the episode is over."""
    obs, reward, terminated, _, _ = theirs
    _, our_obs, our_reward, our_terminated, our_truncated = ours
    np.testing.assert_array_equal(our_obs, obs)
    assert (float(our_reward), bool(our_terminated), bool(our_truncated)) == (reward, terminated, False)
    return terminated


def test_space_invaders_is_the_original():
    """Nothing in this game is random. Every second episode starts with one alien, so that waves are cleared."""
    original, reset, step = _pair("SpaceInvaders")
    ends, faster = 0, 0
    for episode in range(6):
        draw = np.random.default_rng(episode)
        first, _ = original.reset(seed=episode)
        state, obs = reset(KEY)
        np.testing.assert_array_equal(obs, first)
        if episode % 2:
            original.game.env.alien_map = np.eye(10)[3:4].T @ np.eye(10)[5:6]
            state = state.replace(_alien_map=jnp.asarray(original.game.env.alien_map, bool))
        for _ in range(300):
            action = int(draw.choice(4, p=[0.1, 0.25, 0.25, 0.4]))
            theirs, ours = original.step(action), step(state, action, KEY)
            state = ours[0]
            if _agree(theirs, ours):
                ends += 1
                break
        faster += original.game.env.ramp_index
    assert ends > 3
    assert faster > 1


def test_breakout_is_the_original():
    """The side from which the ball starts is random; the rest follows. Play goes where the ball goes, mostly, and
    every second episode starts with one brick, so that walls are cleared."""
    original, reset, step = _pair("Breakout")
    sides, ends, walls = set(), 0, 0
    for episode in range(6):
        draw = np.random.default_rng(episode)
        state, obs = reset(jax.random.key(episode))
        while True:
            first, _ = original.reset(seed=int(draw.integers(2**31)))
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
            towards = 1 if target < game.pos else 2 if target > game.pos else 0
            action = towards if draw.random() < 0.95 else int(draw.integers(3))
            bricks = game.brick_map.sum()
            theirs, ours = original.step(action), step(state, action, KEY)
            state = ours[0]
            walls += game.brick_map.sum() > bricks
            if _agree(theirs, ours):
                ends += 1
                break
    assert sides == {0, 9}
    assert ends > 1
    assert walls > 0


def test_freeway_is_the_original():
    """Cars are drawn at the start and at every crossing: the original is given those of pgx."""
    original, reset, step = _pair("Freeway")
    state, _ = reset(KEY)
    original.reset(seed=0)
    game = original.game.env
    assert game.terminate_timer == int(state._terminate_timer) == 2500
    game.terminate_timer = 400
    state = state.replace(_terminate_timer=jnp.int32(400))
    game.cars = np.asarray(state._cars).tolist()
    draw = np.random.default_rng(0)
    keys = np.asarray(jax.random.split(jax.random.PRNGKey(0), 401))
    crossings = 0
    for t in range(401):
        action = int(draw.choice(3, p=[0.05, 0.9, 0.05]))
        theirs, ours = original.step(action), step(state, action, keys[t])
        state = ours[0]
        if theirs[1]:
            crossings += 1
            assert float(ours[2]) == 1
            game.cars = np.asarray(state._cars).tolist()  # both have drawn new speeds
        else:
            assert _agree(theirs, ours) == (t == 400)
    assert crossings > 1


class Recorder:
    """numpy's RandomState, with a note of the last draws."""

    def __init__(self, seed: int):
        self.random, self.drawn = np.random.RandomState(seed), []

    def rand(self) -> float:
        self.drawn.append(self.random.rand())
        return self.drawn[-1]

    def randint(self, *args: Any, **kwargs: Any) -> int:
        self.drawn.append(self.random.randint(*args, **kwargs))
        return self.drawn[-1]


def test_asterix_is_the_original():
    """pgx is given the draws of the original."""
    module = import_module("pgx.minatar.asterix")
    step = jax.jit(lambda state, action, *draws: module._step_det(state, jnp.int32(action), *draws))
    observe = jax.jit(module._observe)
    ends, total = 0, 0
    for episode in range(12):
        original = minatar.MinAtarGame("MinAtar/Asterix-v1", sticky_action_prob=0.0)
        original.reset(seed=0)
        game, draws = original.game.env, Recorder(episode)
        game.random = draws
        state = module.State()
        choose = np.random.default_rng(episode)
        for _ in range(400):
            free = [i for i in range(8) if game.entities[i] is None]
            draws.drawn.clear()
            action = int(choose.integers(5))
            obs, reward, terminated, _, _ = original.step(action)
            right, gold, slot = False, False, 0
            if draws.drawn:
                right, gold = draws.drawn[0] < 1 / 2, draws.drawn[1] < 1 / 3
                slot = free[draws.drawn[2]] if free else 0
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
    """pgx is given the draws of the original, and both are given divers now and then, so that there is
    something to surface with. Returns the number of episodes that agree, and of surfacings."""
    state_class = import_module("pgx.minatar.seaquest").State
    agree, surfacings = 0, 0
    for episode in range(episodes):
        original = minatar.MinAtarGame("MinAtar/Seaquest-v1", sticky_action_prob=0.0)
        original.reset(seed=0)
        game, draws = original.game.env, Recorder(episode)
        game.random = draws
        state = state_class()
        choose = np.random.default_rng(episode)
        while True:
            if choose.random() < 0.1:
                game.diver_count = int(choose.integers(1, 7))
                state = state.replace(_diver_count=jnp.int32(game.diver_count))
            draws.drawn.clear()
            enemy_due, diver_due = game.e_spawn_timer == 0, game.d_spawn_timer == 0
            ramp = game.ramp_index
            action = int(choose.choice(6, p=[0.1, 0.15, 0.15, 0.15, 0.2, 0.25]))
            obs, reward, terminated, _, _ = original.step(action)
            surfacings += game.ramp_index != ramp
            enemy = draws.drawn[:3] if enemy_due else [0.0, 0.0, 1]
            diver = draws.drawn[-2:] if diver_due else [0.0, 1]
            given = (enemy[0] < 1 / 2, enemy[1] < 1 / 3, int(enemy[2]), diver[0] < 1 / 2, int(diver[1]))
            state = step(state, np.int32(action), *map(np.asarray, given))
            same = np.array_equal(state.observation, obs)
            if not same or (float(state.rewards[0]), bool(state.terminated)) != (reward, terminated):
                break
            if terminated:
                agree += 1
                break
    return agree, surfacings


def test_seaquest_is_the_original_once_mended():
    module = import_module("pgx.minatar.seaquest")

    def bare(state, *args):
        after = module._step_det(state, *args)
        return after.replace(observation=module._observe(after))

    agree, surfacings = _play_seaquest(
        jax.jit(lambda state, *args: minatar.correct_seaquest(state, bare(state, *args))), episodes=6
    )
    assert agree == 6
    assert surfacings > 2


def test_why_seaquest_needs_mending():
    """What pgx 2.6 does, on one state each; if this fails, pgx has changed and `correct_seaquest` may go."""
    module = import_module("pgx.minatar.seaquest")
    # the enemy's bullets that left the screen are kept
    bullets = module.State()._e_bullets.at[0].set(jnp.array([12, 3, 1]))
    ix = module.find_ix(bullets)
    assert (module._remove_out_of_bound(bullets, ix)[0] == bullets[0]).all()
    # enemies get faster at the first surfacing; in the original at the second
    *_, move_speed, spawn_speed, ramp_index = module._surface(
        jnp.int32(1), jnp.int32(100), jnp.int32(20), jnp.int32(5), True, jnp.int32(0)
    )
    assert (move_speed, spawn_speed, ramp_index) == (4, 19, 1)
    game = minatar.MinAtarGame("MinAtar/Seaquest-v1").game.env
    game.diver_count = 1
    game._surface()
    assert (game.move_speed, game.e_spawn_speed, game.ramp_index) == (5, 19, 1)


def _draws(module: Any, monkeypatch: pytest.MonkeyPatch, count: int = 4000) -> Any:
    """What pgx draws before a step, and hands to the function that `_step_det` is."""
    monkeypatch.setattr(module, "_step_det", lambda state, action, *args, **kwargs: (*args, *kwargs.values()))
    step = jax.jit(jax.vmap(lambda key: module._step(module.State(), 0, key, 0.1)))
    return [np.asarray(values) for values in step(jax.random.split(KEY, count))]


def test_pgx_draws_as_the_original_does(monkeypatch):
    """The tests above take these draws as given. Tolerances are four standard errors."""
    right, gold, slot = _draws(import_module("pgx.minatar.asterix"), monkeypatch)
    np.testing.assert_allclose([right.mean(), gold.mean()], [1 / 2, 1 / 3], atol=0.032)
    np.testing.assert_allclose(np.bincount(slot, minlength=8) / 4000, 1 / 8, atol=0.021)
    right, is_sub, row, diver_right, diver_row = _draws(import_module("pgx.minatar.seaquest"), monkeypatch)
    np.testing.assert_allclose([right.mean(), is_sub.mean(), diver_right.mean()], [1 / 2, 1 / 3, 1 / 2], atol=0.032)
    for rows in (row, diver_row):
        np.testing.assert_allclose(np.bincount(rows, minlength=9)[1:] / 4000, 1 / 8, atol=0.021)
    speeds, directions = _draws(import_module("pgx.minatar.freeway"), monkeypatch)
    np.testing.assert_allclose(np.bincount(speeds.ravel(), minlength=6)[1:] / 32000, 1 / 5, atol=0.01)
    np.testing.assert_allclose((directions == 1).mean(), 1 / 2, atol=0.012)
    assert set(np.unique(directions)) == {-1, 1}


@pytest.mark.slow
@pytest.mark.parametrize("game", ["Asterix", "Seaquest"])
def test_random_play_has_the_same_statistics(game):
    """The draws themselves: 512 episodes of random play in both, compared within four standard errors."""
    episodes, horizon = 512, 60
    host = minatar.MinAtarGame(f"MinAtar/{game}-v1")
    draw = np.random.default_rng(0)
    theirs = np.zeros((episodes, 2))
    for episode in range(episodes):
        host.reset(seed=episode)
        for _ in range(horizon):
            _, reward, terminated, _, _ = host.step(int(draw.integers(host.action_space.n)))  # type: ignore
            theirs[episode] += reward, 1
            if terminated:
                break
    reset, step, num_actions = minatar.make_jax_functions(f"MinAtar/{game}-v1")
    many = jax.jit(jax.vmap(step))
    state, _ = jax.vmap(reset)(jax.random.split(KEY, episodes))
    ours = np.zeros((episodes, 2))
    alive = np.ones(episodes, bool)
    for t in range(horizon):
        key = jax.random.fold_in(KEY, t)
        actions = jax.random.randint(key, (episodes,), 0, num_actions)
        state, _, reward, terminated, _ = many(state, actions, jax.random.split(key, episodes))
        ours += np.stack([np.asarray(reward), np.ones(episodes)], axis=1) * alive[:, None]
        alive &= ~np.asarray(terminated)
    error = np.sqrt((theirs.var(axis=0) + ours.var(axis=0)) / episodes)
    assert (np.abs(theirs.mean(axis=0) - ours.mean(axis=0)) < 4 * error).all()
    assert (theirs.std(axis=0) > 0).all()


def test_sticky_actions_in_both():
    """With a probability of 1 the first, empty action stays for ever; with 0.1 the paddle moves."""
    original = minatar.MinAtarGame("MinAtar/Breakout-v1", sticky_action_prob=1.0)
    original.reset(seed=0)
    assert original.step(1)[0][9, 4, 0]
    reset, step, _ = minatar.make_jax_functions("MinAtar/Breakout-v1", sticky_action_prob=1.0)
    state, _ = jax.jit(reset)(KEY)
    assert jax.jit(step)(state, 1, KEY)[1][9, 4, 0]
    assert minatar.STICKY_ACTION_PROBABILITY == 0.1
    assert minatar.MinAtarGame("MinAtar/Breakout-v1").game.sticky_action_prob == 0.1


def test_a_reset_clears_the_last_action():
    """In the original it survives, so that the first step of an episode depends on the one before."""
    game = minatar.MinAtarGame("MinAtar/Breakout-v1", sticky_action_prob=1.0)
    game.reset(seed=0)
    game.game.last_action = 1
    game.reset(seed=0)
    assert game.step(0)[0][9, 4, 0]
