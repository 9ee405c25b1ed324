"""Tests of the environment adapter and of `check_environment`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import isqn
from helpers import registries_restored
from isqn.agents.registry import make_config
from isqn.cli import main
from isqn.envs import atari, minatar
from isqn.envs.adapter import Environment, has_channels_first, list_environments, make_environment
from isqn.envs.check import check_environment
from isqn.imports import import_all
from isqn.train import online, record, run
from isqn.types import EnvSpec, UserError


class Good(gym.Env):
    """Valid environment: a counter that ends after ten steps, with noise."""

    observation_space: gym.Space[Any] = spaces.Box(0, 20, (2,), np.float32)
    action_space: gym.Space[Any] = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.time += 1
        return self.observe(), 1.0, self.time >= 10, False, {}

    def observe(self) -> Any:
        return np.array([self.time, self.np_random.random()], np.float32)


def test_frames_rewards_and_flags_pass_through():
    env = make_environment(Good())
    assert env.spec.id == "Good"
    assert (env.spec.frame_shape, env.spec.frame_dtype, env.spec.num_actions) == ((2,), "float32", 2)
    assert env.reset(0)[0] == 0
    steps = [env.step(1) for _ in range(10)]
    assert [step.frame[0] for step in steps] == list(range(1, 11))
    assert [step.terminated for step in steps] == [False] * 9 + [True]
    assert not any(step.truncated for step in steps)
    assert not env.game_continues


def test_step_without_a_reset_raises_an_error():
    env = make_environment(Good())
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)
    env.reset(0)
    for _ in range(10):
        env.step(0)
    with pytest.raises(RuntimeError, match="over"):
        env.step(0)


def test_time_limit_is_truncation():
    env = make_environment("MountainCar-v0")
    env.reset(0)
    steps = [env.step(1) for _ in range(200)]
    assert [step.truncated for step in steps] == [False] * 199 + [True]
    assert not any(step.terminated for step in steps)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((np.zeros(2, np.float32), float("nan"), False, False, {}), "gives the reward nan; it must be a finite number"),
        ((np.zeros(2, np.float32), "one", False, False, {}), "gives the reward 'one'; it must be a finite number"),
        ((np.full(2, np.inf, np.float32), 0.0, False, False, {}), "The observation of step() contains NaN or infinity"),
        ((np.zeros(3, np.float32), 0.0, False, False, {}), "of step() has shape (3,); its space says (2,)"),
        ((np.zeros(2, np.float32), 0.0, False, {}), "step() returned 4 values; Gymnasium expects the five values"),
    ],
)
def test_an_invalid_result_of_step_raises_an_error_with_the_name_of_the_environment(result, message):
    inner = Good()
    inner.step = lambda action: result  # type: ignore[method-assign]
    env = make_environment(inner)
    env.reset(0)
    with pytest.raises(UserError) as error:
        env.step(0)
    assert str(error.value).startswith("Good, step 1 of the episode with seed ")
    assert message in str(error.value)
    assert any(message in problem for problem in check_environment(inner))


def test_exceptions_in_an_environment_are_reported_by_the_check_and_in_training():
    inner = Good()
    inner.step = lambda action: 1 / 0  # type: ignore[method-assign]
    assert re.fullmatch(
        r"step\(\d\) raised ZeroDivisionError: division by zero \(.*test_envs_adapter\.py, line \d+\)\.",
        check_environment(inner)[0],
    )
    env = make_environment(inner)
    env.reset(0)
    with pytest.raises(UserError, match=r"Good failed in step\(\) \(.*py, line \d+\): ZeroDivisionError: division"):
        env.step(0)
    inner.reset = lambda **_: 1 / 0  # type: ignore[method-assign]
    assert check_environment(inner)[0].startswith("reset() raised ZeroDivisionError: division by zero (")
    with pytest.raises(UserError, match=r"Good failed in reset\(\) \(.*py, line \d+\): ZeroDivisionError"):
        env.reset(0)


class OffsetSpaces(Good):
    """Valid environment with Discrete spaces that do not start at 0."""

    observation_space = spaces.Discrete(4, start=3)
    action_space = spaces.Discrete(2, start=-1)

    def step(self, action: Any) -> Any:
        assert action in (-1, 0)
        self.time += 1
        return self.observe(), float(action), self.time == 3, False, {}

    def observe(self) -> Any:
        return 3 + self.time


def test_discrete_spaces_may_start_at_any_number():
    env = make_environment(OffsetSpaces())
    assert env.spec.frame_shape == (4,)
    np.testing.assert_array_equal(env.reset(0), [1, 0, 0, 0])
    step = env.step(0)
    np.testing.assert_array_equal(step.frame, [0, 1, 0, 0])
    assert step.reward == -1
    assert env.step(1).reward == 0


def _with_space(space: gym.Space[Any], obs: Any) -> Environment:
    env = Good()
    env.observation_space = space
    env.observe = lambda: obs  # type: ignore[method-assign]
    return make_environment(env)


@pytest.mark.parametrize(
    ("space", "obs", "shape", "dtype"),
    [
        (spaces.Box(-1, 1, (3,), np.float64), np.zeros(3), (3,), "float32"),
        (spaces.Box(0, 255, (128,), np.uint8), np.zeros(128, np.uint8), (128,), "float32"),
        (spaces.Box(0, 255, (8, 6), np.uint8), np.zeros((8, 6), np.uint8), (8, 6, 1), "uint8"),
        (spaces.Box(0, 255, (8, 6, 3), np.uint8), np.zeros((8, 6, 3), np.uint8), (8, 6, 3), "uint8"),
        (spaces.Box(0, 1, (8, 6, 3), np.bool_), np.zeros((8, 6, 3), bool), (8, 6, 3), "bool"),
        (spaces.Box(0, 1, (8, 6, 3), np.float32), np.zeros((8, 6, 3), np.float32), (8, 6, 3), "float32"),
    ],
)
def test_frame_formats(space, obs, shape, dtype):
    env = _with_space(space, obs)
    assert (env.spec.frame_shape, env.spec.frame_dtype) == (shape, dtype)
    frame = env.reset(0)
    assert (frame.shape, frame.dtype.name) == (shape, dtype)
    assert not np.shares_memory(frame, obs)  # an environment may reuse its buffer
    assert env.spec.obs_shape == shape


@pytest.mark.parametrize(
    ("observations", "actions", "message"),
    [
        (spaces.Dict(a=spaces.Discrete(2)), spaces.Discrete(2), "observation space of Good is Dict"),
        (spaces.Tuple([spaces.Discrete(2)]), spaces.Discrete(2), "observation space of Good is Tuple"),
        (spaces.MultiDiscrete([2, 2]), spaces.Discrete(2), "observation space of Good is MultiDiscrete"),
        (spaces.Box(0, 1, (2, 2, 2, 2)), spaces.Discrete(2), "observation space of Good is Box"),
        (spaces.Box(0, 1, (2,)), spaces.MultiDiscrete([2, 2]), "Discrete and Box actions are supported"),
    ],
)
def test_unsupported_spaces_raise_an_error(observations, actions, message):
    env = Good()
    env.observation_space, env.action_space = observations, actions
    with pytest.raises(UserError, match=message):
        make_environment(env)
    assert any(message in problem for problem in check_environment(env))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("isqn/chain-v0", "isqn/Chain-v0"),
        ("MinAtar/Brekout", "MinAtar/Breakout-v1"),
        ("MinAtar/Breakout-v2", "MinAtar/Breakout-v1"),
        ("ALE/pong-v5", "ALE/Pong-v5"),
        ("ALE/Pong-v4", "ALE/Pong-v5"),
        ("not an id !!", "isqn list envs"),
    ],
)
def test_an_unknown_id_is_answered_with_similar_ids(wrong, right):
    with pytest.raises(UserError, match=right) as error:
        make_environment(wrong)
    assert repr(wrong) in str(error.value)


def test_legacy_atari_ids_are_refused():
    with pytest.raises(UserError, match="ALE/Pong-v5 and choose a --protocol"):
        make_environment("PongNoFrameskip-v4")


def test_a_protocol_must_exist_for_the_environment():
    with pytest.raises(UserError, match="leave --protocol at 'auto'"):
        make_environment("CartPole-v1", protocol="streaming")
    with pytest.raises(UserError, match="machado2018-v1, streaming-v1, reference-v1"):
        make_environment("ALE/Pong-v5", protocol="nature")
    assert make_environment("CartPole-v1", protocol="gymnasium").spec.protocol == "gymnasium"


MODULE = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
gym.register(id="Mine-v0", entry_point=CartPoleEnv, max_episode_steps=7)
"""


def test_an_id_with_a_module_needs_the_import_of_the_module(tmp_path, monkeypatch):
    (tmp_path / "my_environments.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])  # as in a console script
    with registries_restored():
        with pytest.raises(UserError, match="is registered by the module 'my_environments'; add --import my_envir"):
            make_environment("my_environments:Mine-v0")
        import_all(["my_environments"])
        env = make_environment("my_environments:Mine-v0")
        assert env.spec.id == "my_environments:Mine-v0"
        assert env.spec.num_actions == 2


@pytest.mark.parametrize(
    ("env_id", "module", "extra"), [("ALE/Pong-v5", "ale_py", "atari"), ("MinAtar/Breakout", "minatar", "minatar")]
)
def test_a_missing_extra_raises_an_error_with_the_install_command(env_id, module, extra, monkeypatch):
    atari.list_games.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf'pip install "isqn\[{extra}\]"'):
        make_environment(env_id)
    assert len(list_environments()) > 20  # the list works without the extra
    atari.list_games.cache_clear()


def test_minatar_ids_may_omit_the_version():
    assert minatar.canonical_id("MinAtar/Breakout") == "MinAtar/Breakout-v1"
    assert make_environment("MinAtar/Breakout").spec.num_actions == 3
    assert make_environment("MinAtar/Breakout-v0").spec.num_actions == 6


@pytest.mark.parametrize(
    "env_id", ["isqn/Grid-v0", "CartPole-v1", "MinAtar/Seaquest-v1", "MinAtar/Freeway-v1", "ALE/Breakout-v5"]
)
def test_seed_and_actions_determine_an_episode(env_id):
    """Resuming a run relies on this: nothing carries over from earlier episodes."""

    def play(env: Environment, seed: int) -> list[Any]:
        actions = np.random.default_rng(seed)
        trajectory: list[Any] = [env.reset(seed)]
        for _ in range(60):
            step = env.step(int(actions.integers(env.spec.num_actions)))
            trajectory += [step.frame, step.reward, step.terminated, step.truncated]
            if step.terminated or step.truncated:
                break
        return trajectory

    fresh, used = make_environment(env_id), make_environment(env_id)
    for seed in range(10, 13):
        play(used, seed)
    for a, b in zip(play(fresh, 5), play(used, 5), strict=True):
        np.testing.assert_array_equal(a, b)
    different = play(used, 6)
    assert any(not np.array_equal(a, b) for a, b in zip(play(used, 5), different, strict=False))


def test_list_environments_names_every_kind_and_its_loops():
    rows = {row.id: row for row in list_environments()}
    assert rows["isqn/Chain-v0"].loops == ("host", "compiled")
    assert rows["MinAtar/SpaceInvaders-v1"].kind == "MinAtar"
    assert rows["ALE/Pong-v5"].loops == ("host",)
    assert {row.kind for row in rows.values()} == {"toy", "Wordle", "classic", "MinAtar", "Atari", "dm_control"}


def test_imports_start_no_device_and_load_no_optional_package():
    code = (
        "import sys, isqn.envs.adapter, isqn.envs.native, isqn.envs.check\n"
        "from isqn.envs.registry import has_native\n"
        "assert has_native('MinAtar/Breakout') and not has_native('ALE/Pong-v5')\n"
        "heavy = {'pgx', 'ale_py', 'cv2', 'minatar', 'flax', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_render_returns_an_image_only_if_asked_for():
    rendered = make_environment("MinAtar/Breakout", render=True)
    rendered.reset(0)
    image = rendered.render()
    assert image is not None
    assert image.shape == (160, 160, 3)
    assert image.dtype == np.uint8
    plain = make_environment("isqn/Chain-v0")
    plain.reset(0)
    assert plain.render() is None


# Broken environments; each differs from `Good` by one fault.


class WrongDtype(Good):
    def observe(self):
        return super().observe().astype(np.float64)


class OutOfBounds(Good):
    def observe(self):
        return super().observe() - 5


class WrongShape(Good):
    def observe(self):
        return np.zeros(3, np.float32)


class NotAnArray(Good):
    def observe(self):
        return [0.0, 1.0]


class NotANumber(Good):
    def observe(self):
        return np.array([0, np.nan if self.time == 3 else 1], np.float32)


class NoSeed(Good):
    def reset(self):  # type: ignore[override]
        return super().reset()


class OldReset(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class IgnoresSeed(Good):
    def observe(self):
        return np.array([self.time, np.random.random()], np.float32)  # noqa: NPY002 - the fault


class FourValues(Good):
    def step(self, action):
        obs, reward, done, _, info = super().step(action)
        return obs, reward, done, info


class IntegerFlag(Good):
    def step(self, action):
        obs, reward, done, _, info = super().step(action)
        return obs, reward, int(done), False, info


class NoReward(Good):
    def step(self, action):
        obs, _, done, _, info = super().step(action)
        return obs, None, done, False, info


class InfiniteReward(Good):
    def step(self, action):
        obs, _, done, _, info = super().step(action)
        return obs, float("inf"), done, False, info


class ReusesBuffer(Good):
    buffer = np.zeros(2, np.float32)

    def observe(self):
        self.buffer[:] = super().observe()
        return self.buffer


class NeverCleared(Good):
    """Its reset does not clear the clock."""

    time = 0

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        return np.zeros(2, np.float32), {}

    def observe(self):
        return np.array([min(self.time, 10), 0], np.float32)


class Endless(Good):
    def step(self, action):
        return np.ones(2, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (WrongDtype, "The observation of reset() has dtype float64; its space says float32."),
        (OutOfBounds, "The observation of reset() leaves the bounds of its space (Box(0.0, 20.0, (2,), float32))."),
        (WrongShape, "The observation of step() has shape (3,); its space says (2,)."),
        (NotAnArray, "The observation of reset() is a list; it must be a numpy array."),
        (NotANumber, "The observation of step() contains NaN or infinity."),
        (NoSeed, "reset() does not take a seed"),
        (OldReset, "reset() returned one ndarray; Gymnasium expects the two values (observation, info)."),
        (IgnoresSeed, "Two plays from reset(seed=0) with the same actions differ"),
        (FourValues, "step() returned 4 values; Gymnasium expects the five values"),
        (IntegerFlag, "step() gives terminated as a int; it must be a bool."),
        (NoReward, "step() gives the reward None; it must be a finite number."),
        (InfiniteReward, "step() gives the reward inf; it must be a finite number."),
        (ReusesBuffer, "step() writes into the array of the last observation"),
        (NeverCleared, "The first episode took 10 steps and all later ones end at their first step"),
        (Endless, "Remark: no episode ended within 500 steps"),
    ],
)
def test_check_finds_the_fault_of_a_broken_environment(broken, sentence):
    problems = check_environment(broken())
    assert any(problem.startswith(sentence) for problem in problems), problems


@pytest.mark.parametrize("env", [Good, OffsetSpaces, "isqn/Grid-v0", "CartPole-v1", "MinAtar/Asterix"])
def test_check_finds_no_problem_in_valid_environments(env):
    assert check_environment(env if isinstance(env, str) else env()) == []


def test_check_finds_a_step_of_four_values_behind_a_time_limit():
    problems = check_environment(gym.wrappers.TimeLimit(FourValues(), 5))
    assert any("Gymnasium expects the five values" in problem for problem in problems), problems


def test_reset_refuses_an_observation_of_another_shape():
    with pytest.raises(UserError, match=r"The observation of reset\(\) has shape \(\d*,?\d*\); its space says"):
        make_environment(WrongShape()).reset(0)


# -- keyword arguments and wrappers ----------------------------------------------------------------------------------


LAKE = {"desc": ["SF", "HG"], "is_slippery": False}
LEARN = {"hidden_sizes": (), "learning_rate": 0.1, "learning_starts": 100, "target_update_period": 50}


def frozen_lake(**fields):
    return make_config("dqn", env_id="FrozenLake-v1", epsilon_decay_steps=500, discount=0.9, **LEARN, **fields)


def test_keyword_arguments_are_a_setting_that_every_command_applies(tmp_path):
    """On a lake that is not slippery the goal can always be reached; on the slippery one it cannot."""
    config = frozen_lake(env_kwargs=LAKE, total_timesteps=1_000, epoch_steps=500)
    assert config.env_kwargs == '{"desc": ["SF", "HG"], "is_slippery": false}'
    assert not online.uses_compiled_loop(config)
    run.start(config, tmp_path / "run", quiet=True)
    assert record.read_config(tmp_path / "run") == config
    assert record.read_summary(tmp_path / "run")["protocol"] == f"gymnasium {config.env_kwargs}"
    model = isqn.Model.load(tmp_path / "run")
    assert [episode.episodic_return for episode in isqn.evaluate(model, episodes=20, epsilon=0.0)] == [1.0] * 20

    assert main(["data", "collect", str(tmp_path / "run"), "-o", str(tmp_path / "data"), "--steps", "60"]) == 0
    words = ["--num-updates", "300", "--epoch-updates", "300", "--evaluation-steps", "60", "--quiet"]
    words += ["--hidden-sizes", "--learning-rate", "0.1", "--target-update-period", "20"]
    offline = str(tmp_path / "offline")
    assert main(["train", "cql", "--dataset", str(tmp_path / "data"), *words, "--run-dir", offline]) == 0
    assert record.read_config(Path(offline)).env_kwargs == config.env_kwargs
    assert record.read_summary(Path(offline))["epoch_returns"][-1] == 1.0


def test_wrappers_are_a_setting_too():
    settings = '["TimeAwareObservation", ["ClipReward", {"max_reward": 0.5}]]'
    env = make_environment("CartPole-v1", env_wrappers=settings)
    assert env.spec.frame_shape == (5,)
    assert env.spec.protocol == f"gymnasium {settings}"
    env.reset(0)
    first, second = env.step(0), env.step(1)
    assert (first.reward, second.reward) == (0.5, 0.5)
    assert (first.frame[-1], second.frame[-1]) == (1.0, 2.0)
    assert EnvSpec.from_json(json.loads(json.dumps(env.spec.to_json()))) == env.spec


@pytest.mark.parametrize(
    ("env_id", "settings", "sentence"),
    [
        ("CartPole-v1", {"env_kwargs": '{"foo": 1}'}, 'CartPole-v1 cannot be made with --env-kwargs {"foo": 1}: TypeE'),
        (
            "CartPole-v1",
            {"env_kwargs": '{"render_mode": "human"}'},
            "sets render_mode, which isqn sets itself",
        ),
        ("CartPole-v1", {"env_wrappers": '["ClipRewards"]'}, "names 'ClipRewards'; did you mean ClipReward?"),
        ("CartPole-v1", {"env_wrappers": '["RecordVideo"]'}, "names 'RecordVideo'; choose one of AtariPreprocessing,"),
        (
            "CartPole-v1",
            {"env_wrappers": '[["ClipReward"]]'},
            'has the entry ["ClipReward"]; an entry is',
        ),
        ("CartPole-v1", {"env_wrappers": '["ReshapeObservation"]'}, "made with --env-wrappers ["),
        (
            "MinAtar/Breakout",
            {"env_kwargs": '{"a": 1}'},
            "is for environments that gymnasium.make makes",
        ),
    ],
)
def test_wrong_keyword_arguments_and_wrappers_are_refused(env_id, settings, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        make_environment(env_id, **settings)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("slippery", "env_kwargs is 'slippery'; it must be JSON, an object, such as"),
        ("[1]", "env_kwargs is '[1]'; it must be an object, such as"),
        ({"a": object}, "it must be JSON, an object, such as"),
    ],
)
def test_keyword_arguments_are_json(value, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        frozen_lake(env_kwargs=value)
    assert frozen_lake(env_kwargs="{}").env_kwargs == frozen_lake(env_kwargs={}).env_kwargs == ""
    assert frozen_lake(env_kwargs=' {"b":1,"a":2}').env_kwargs == '{"a": 2, "b": 1}'


class ChannelsFirst(gym.Env):
    """Images whose value at (channel, row, column) says where it is."""

    observation_space = gym.spaces.Box(0, 255, (3, 40, 50), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        channels, rows, columns = np.indices((3, 40, 50))
        return (50 * channels + rows + columns).astype(np.uint8), {}

    def step(self, action):
        return self.reset()[0], 0.0, True, False, {}


def test_images_with_channels_first_are_turned():
    env = make_environment(ChannelsFirst())
    assert env.spec.frame_shape == (40, 50, 3)
    frame = env.reset(0)
    assert frame.flags["C_CONTIGUOUS"]
    assert [frame[7, 9, channel] for channel in range(3)] == [16, 66, 116]
    assert isqn.check_environment(ChannelsFirst()) == [
        "Remark: images of shape (3, 40, 50) are taken to have their channels first, and are turned to (40, 50, 3)."
    ]
    model = isqn.Model("dqn", env=ChannelsFirst())
    obs = ChannelsFirst().reset()[0]
    assert model.predict(obs)[0] == model.predict(obs[None])[0][0]


@pytest.mark.parametrize(
    ("shape", "is_first"),
    [
        *(((3, 84, 84), True), ((4, 84, 84), True), ((1, 10, 10), True), ((12, 84, 84), True), ((4, 10, 10), True)),
        *(((84, 84, 3), False), ((10, 10, 4), False), ((84, 84, 12), False), ((6, 10, 10), False), ((3, 3, 3), False)),
    ],
)
def test_which_images_have_channels_first(shape, is_first):
    assert has_channels_first(shape) is is_first
