"""Tests of the DeepMind Control suite and of continuous action spaces."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from isqn.envs import dmc
from isqn.envs.adapter import list_environments, make_environment
from isqn.envs.check import check_environment
from isqn.envs.scores import DMC_HARD_7
from isqn.presets import preset_config
from isqn.train import online
from isqn.train.play import play as play_to_replay
from isqn.types import UserError

CARTPOLE = "dm_control/cartpole-swingup-v0"


def play(env, steps, seed=0):
    """Play random actions; return the frames, the rewards and the last step."""
    rng = np.random.default_rng(seed)
    frames = [env.reset(seed)]
    rewards = []
    for _ in range(steps):
        step = env.step(env.spec.random_action(rng))
        frames.append(step.frame)
        rewards.append(step.reward)
    return np.array(frames), rewards, step


@pytest.mark.parametrize(("task", "observation_size", "num_actions"), [("dog-walk", 223, 38), ("humanoid-run", 67, 21)])
def test_spec_of_hard_tasks(task, observation_size, num_actions):
    env = make_environment(f"dm_control/{task}-v0")
    assert (env.spec.frame_shape, env.spec.num_actions) == ((observation_size,), num_actions)
    assert (env.spec.frame_dtype, env.spec.action_dtype) == ("float32", "float32")
    assert set(env.spec.action_low + env.spec.action_high) == {-1.0, 1.0}
    assert (env.spec.protocol, env.spec.frames_per_step) == ("action-repeat-2", 2)
    _, rewards, _ = play(env, 3)
    assert all(0 <= reward <= 2 for reward in rewards)  # sum over two simulator steps
    env.close()


def test_an_episode_is_truncated_after_500_steps_and_does_not_terminate():
    env = make_environment(CARTPOLE)
    frames, _, last = play(env, 500)
    assert (last.terminated, last.truncated) == (False, True)
    assert len(frames) == 501
    with pytest.raises(RuntimeError, match="is over"):
        env.step(np.zeros(1))


def test_the_replay_samples_every_step_of_an_episode_with_a_positive_discount():
    """An episode has 500 transitions, none terminal; the last one leads to the frame before the reset."""
    config = preset_config("dmc-hard").replace(env_id="dm_control/humanoid-stand-v0")
    env = make_environment(config.env_id)
    replay, rng = online.make_replay_factory(config, env.spec, rows=2_000)(), np.random.default_rng(0)
    frames = []

    def observe(frame, *_):
        frames.append(frame)
        return frame

    steps = play_to_replay(config, env, replay, lambda *_: env.spec.random_action(rng), 0, observe)
    for _ in range(500):
        next(steps)
    starts = replay.valid_starts()
    assert len(starts) == 500
    last = replay.step_from(starts[-1], False)
    np.testing.assert_array_equal(last.next_obs[0], frames[500])
    assert not np.array_equal(frames[500], frames[501])  # the first frame of the next episode
    batch = replay.sample(2_000, rng)
    assert set(batch.discount.tolist()) == {float(np.float32(0.99))}


def test_seed_and_actions_determine_an_episode():
    """A used environment and a new one give the same episode."""
    first, second = make_environment(CARTPOLE), make_environment(CARTPOLE)
    frames, rewards, _ = play(first, 50, seed=3)
    for env in (first, second):
        other_frames, other_rewards, _ = play(env, 50, seed=3)
        np.testing.assert_array_equal(frames, other_frames)
        assert rewards == other_rewards
    assert not np.array_equal(frames[0], first.reset(4))


def test_action_repeat_sums_the_rewards():
    once, twice = make_environment(CARTPOLE, protocol="action-repeat-1"), make_environment(CARTPOLE)
    action = np.array([0.7], np.float32)
    np.testing.assert_array_equal(once.reset(1), twice.reset(1))
    single = [once.step(action) for _ in range(4)]
    double = [twice.step(action) for _ in range(2)]
    for i in range(2):
        np.testing.assert_array_equal(single[2 * i + 1].frame, double[i].frame)
        assert double[i].reward == pytest.approx(single[2 * i].reward + single[2 * i + 1].reward)
    assert once.spec.frames_per_step == 1


@pytest.mark.parametrize(("protocol", "steps"), [("action-repeat-1", 1_000), ("action-repeat-2", 500)])
def test_an_episode_of_a_preset_lasts_1000_frames_for_any_action_repeat(protocol, steps):
    config = preset_config("dmc-small").replace(protocol=protocol)
    env, length, step = make_environment(config.env_id, protocol=protocol), 0, None
    env.reset(0)
    while step is None or not step.truncated:
        step, length = env.step(np.zeros(1, np.float32)), length + 1
    assert length == steps <= config.max_episode_steps
    assert not step.terminated


def test_all_tasks_are_listed_and_an_unknown_one_is_answered_with_similar_ids():
    ids = [row.id for row in list_environments() if row.kind == "dm_control"]
    assert {f"dm_control/{task}-v0" for task in DMC_HARD_7} < set(ids)
    assert len(ids) > 40
    with pytest.raises(UserError, match=r"did you mean .*dm_control/dog-walk-v0"):
        make_environment("dm_control/dog-wlk-v0")
    with pytest.raises(
        UserError, match="--protocol 'streaming' is not known for dm_control; choose one of auto, action"
    ):
        make_environment(CARTPOLE, protocol="streaming")


def test_incompatible_versions_are_reported(monkeypatch):
    assert dmc.find_version_conflict() is None
    monkeypatch.setattr(dmc, "version", {"dm_control": "1.0.50", "mujoco": "4.0.0"}.__getitem__)
    assert (
        dmc.find_version_conflict()
        == "dm_control 1.0.50 cannot load its models with mujoco 4.0.0: pip install 'mujoco<4'"
    )


# -- continuous action spaces ------------------------------------------------------------------------------------------


class ActionRecorder(gym.Env):
    """Environment with a given action space that records the last action."""

    def __init__(self, space):
        self.action_space = space
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.last = action
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_actions_are_scaled_to_their_bounds():
    space = gym.spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
    env = make_environment(ActionRecorder(space))
    env.reset(0)
    for action, expected in (([-1, -1], [-2, 0]), ([0, 0], [0, 5]), ([1, 0.5], [2, 7.5])):
        env.step(np.array(action, np.float32))
        np.testing.assert_allclose(env.env.last, expected, rtol=1e-6)
        assert env.env.last.dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_extreme_actions_equal_the_bounds_in_the_dtype_of_the_space(dtype):
    """0.1 and 0.3 round differently in each dtype, and the adjacent number may lie outside the bounds."""
    env = make_environment(ActionRecorder(gym.spaces.Box(dtype(-0.1), dtype(0.3), (1,), dtype)))
    env.reset(0)
    for action, bound in ((-1, env.env.action_space.low), (1, env.env.action_space.high)):
        env.step(np.array([action], np.float32))
        np.testing.assert_array_equal(env.env.last, bound)


def test_an_action_may_be_a_scalar():
    env = make_environment(ActionRecorder(gym.spaces.Box(-2, 2, (), np.float32)))
    env.reset(0)
    env.step(np.array([0.5], np.float32))
    assert env.env.last == 1
    assert check_environment(env.env)[0].startswith("Remark: no episode ended")


def test_an_action_may_have_any_shape():
    env = make_environment(ActionRecorder(gym.spaces.Box(-1, 1, (2, 3), np.float32)))
    assert (env.spec.num_actions, env.spec.action_box) == (6, (2, 3))
    env.reset(0)
    env.step(np.arange(6, dtype=np.float32) / 6)
    np.testing.assert_allclose(env.env.last, np.arange(6).reshape(2, 3) / 6, rtol=1e-5, atol=1e-7)
    assert check_environment(ActionRecorder(gym.spaces.Box(-1, 1, (2, 3), np.float32)))[0].startswith(
        "Remark: no episode ended"
    )


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (gym.spaces.Box(-np.inf, np.inf, (2,)), "have no finite bounds"),
        (gym.spaces.Box(0, 5, (2,), np.int64), "must be floating-point numbers"),
        (gym.spaces.Box(-1, 1, (0,)), "an action needs at least one number"),
        (gym.spaces.MultiDiscrete([2, 3]), "Discrete and Box actions are supported"),
    ],
)
def test_unsupported_action_spaces_raise_an_error(space, message):
    with pytest.raises(UserError, match=message):
        make_environment(ActionRecorder(space))
