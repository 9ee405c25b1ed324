"""Runs of `isqn train stream-q`: both loops, resume, eval, probes, cost, the facade, Atari and memory."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isqn
from helpers import assert_same, final, stop_after
from isqn.analysis.cost import measure_size
from isqn.analysis.probe import known_values, probe_run
from isqn.cli import main
from isqn.data.text import read_table
from isqn.envs.adapter import Environment, make_environment
from isqn.envs.registry import make_native
from isqn.envs.toy import PROBLEMS, optimal_values
from isqn.presets import preset_config
from isqn.train import checkpoint, online, record, run
from isqn.train.compiled import make_loop
from isqn.train.doctor import examine
from isqn.train.functions import compile_agent, make_run_agent
from isqn.types import EnvSpec, Interrupted, UserError

CHAIN = preset_config("toy-stream").replace(
    num_bellman_iterations=3, total_timesteps=600, epoch_steps=300, log_period_steps=100, hidden_sizes=(32,)
)
HOST, COMPILED = CHAIN.replace(loop="host"), CHAIN.replace(loop="compiled")
LOOPS = pytest.mark.parametrize("config", [HOST, COMPILED], ids=["host", "compiled"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that trains a config without interruption, once; tests only read its folder."""

    @cache
    def train(config) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        run.start(config, folder, quiet=True)
        return folder

    return train


@LOOPS
@pytest.mark.parametrize("analysis", [False, True], ids=["plain", "with probes"])
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(config, analysis, whole, tmp_path, monkeypatch):
    config = config.replace(analysis=True, analysis_samples=64) if analysis else config
    if analysis:
        last = read_table(whole(config) / "metrics.csv")[-1]
        assert 1 <= float(last["effective_rank"]) <= 32
        assert float(last["target_churn_train"]) > 0
        assert float(last["target_churn_held_out"]) >= 0
        assert -1 <= float(last["gradient_cosine_own_tb"]) <= 1
    folder = tmp_path / "run"
    record.create_run(folder, config)
    stops = (1, 37, 200) if config.loop == "host" else (1, 2)  # the compiled loop checks after each row
    for calls in stops[-1:] if analysis else stops:
        stop_after(monkeypatch, calls)
        with pytest.raises(Interrupted, match="resume with `isqn resume"):
            run.resume(folder, quiet=True)
    monkeypatch.undo()
    assert run.resume(folder, quiet=True)
    assert_same(final(folder), final(whole(config)))


@pytest.mark.parametrize(("scheme", "k"), [("target-free", 1), ("iterated-shared", 3)])
def test_the_optimal_values_of_a_chain_are_learned(scheme, k, tmp_path):
    """`known_values` returns them in units of raw rewards, though the agent learns from normalised ones."""
    config = preset_config("toy-stream").replace(scheme=scheme, num_bellman_iterations=k)
    run.start(config, tmp_path / "run", quiet=True)
    known = known_values(tmp_path / "run")
    problem = PROBLEMS["isqn/Chain-v0"]()
    np.testing.assert_allclose(known.true, optimal_values(problem, config.discount)[known.states], atol=1e-9)
    np.testing.assert_allclose(known.learned, known.true, atol=0.02)


@LOOPS
def test_a_truncated_episode_bootstraps(config, tmp_path):
    """The ring never terminates and is truncated after 5 steps: Q* is 1 / (1 - gamma) = 10.

    If truncation were taken for termination, the values would be at most 5.
    """
    config = config.replace(env_id="isqn/Loop-v0", scheme="target-free", total_timesteps=4_000, epoch_steps=2_000)
    run.start(config, tmp_path / "run", quiet=True)
    known = known_values(tmp_path / "run")
    assert known.true.max() == pytest.approx(10)
    np.testing.assert_allclose(known.learned.max(), 10, rtol=0.1)


def test_the_compiled_loop_learns_from_each_step_once_and_in_order():
    """Each row starts where the last one led, unless an episode began, and each frame is counted once."""
    config = preset_config("minatar-stream").replace(scheme="target-free")
    env = make_native("MinAtar/Breakout-v1")
    agent, replay = make_run_agent(config, env.spec), online.make_device_replay(config, env.spec)
    loop = make_loop(config, agent, env, replay)
    state, over_before, count = loop.init(jnp.arange(1)), False, 1
    for step in range(30):
        before = np.asarray(state.obs[0])
        state, ended, _ = loop.run(state, step, num_steps=1, learning=True)
        over_before = bool(ended.over[0, 0])
        row = replay.latest(jax.tree.map(lambda x: x[0], state.rows), step + 1)
        np.testing.assert_array_equal(row.obs[0], before)
        assert bool(row.ended[0]) == over_before
        assert np.array_equal(row.next_obs[0], state.obs[0]) != over_before
        count += 1 + over_before
        assert int(state.agent.moments.observations.number[0]) == count
        assert float(state.agent.optimizer.fade[0]) in (0.0, pytest.approx(0.99 * 0.8))
        if over_before or bool(row.explored[0]):
            assert float(state.agent.optimizer.fade[0]) == 0.0


def test_stretches_of_whole_target_periods_equal_single_steps():
    """The compiled loop runs T steps and a refresh without a condition at each step, for speed."""
    config = COMPILED.replace(target_update_period=5)
    env = make_native(config.env_id)
    agent, replay = make_run_agent(config, env.spec), online.make_device_replay(config, env.spec)
    loop = make_loop(config, agent, env, replay)
    single, steps, expected = loop.init(jnp.arange(2)), [], {}
    for step in range(20):
        single, *rest = loop.run(single, step, num_steps=1, learning=True)
        steps.append(jax.device_get(rest))
        if step + 1 in (5, 20):
            ended = jax.tree.map(lambda *x: np.concatenate(x), *(each for each, _ in steps))
            totals = jax.tree.map(lambda *x: sum(x), *(each for _, each in steps))
            expected[step + 1] = jax.device_get((single, ended, totals))
    for num_steps, by_step in expected.items():
        stretch = loop.run(loop.init(jnp.arange(2)), 0, num_steps=num_steps, learning=True)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), stretch, by_step)


def test_each_of_several_seeds_equals_a_run_of_its_own(tmp_path):
    config = COMPILED.replace(total_timesteps=300)
    several = run.start(config.replace(num_seeds=3), tmp_path / "several", quiet=True)
    run.start(config.replace(seed=1), tmp_path / "alone", quiet=True)
    ours, alone = (read_table(folder / "episodes.csv") for folder in (several[1], tmp_path / "alone"))
    for column in ("step", "return", "length"):
        assert [row[column] for row in ours] == [row[column] for row in alone]
    losses = [[float(row["loss"]) for row in read_table(folder / "metrics.csv")] for folder in several]
    (learned,) = [[float(row["loss"]) for row in read_table(tmp_path / "alone" / "metrics.csv")]]
    np.testing.assert_allclose(losses[1], learned, rtol=1e-4)
    assert losses[0] != losses[2]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MinAtar/Breakout", "FrozenLake-v1"])
def test_the_host_loop_trains_in_every_kind_of_environment(env_id, tmp_path):
    config = preset_config("classic-stream").replace(
        env_id=env_id, loop="host", num_bellman_iterations=3, torso="auto", total_timesteps=300, epoch_steps=150
    )
    run.start(config, tmp_path / "run", quiet=True)
    assert float(read_table(tmp_path / "run" / "metrics.csv")[-1]["loss"]) > 0
    assert record.read_summary(tmp_path / "run")["label"] == "iS-Stream Q(λ) K=3"


def test_the_replay_holds_only_the_last_step(whole):
    folder = whole(HOST)
    manifest = checkpoint.read_manifest(checkpoint.folder_of(folder, checkpoint.steps(folder)[0]))
    assert manifest["replay"]["capacity"] == 2
    assert online.replay_memory(HOST, run.specification(HOST)).total < 2_000


def test_evaluations_start_from_the_moments_of_training_and_do_not_change_them(whole, capsys):
    before = final(whole(HOST))
    for _ in range(2):
        assert main(["eval", str(whole(HOST)), "--episodes", "3", "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == second
    assert first["label"] == "iS-Stream Q(λ) K=3"
    assert_same(final(whole(HOST)), before)


def test_probes_of_a_streaming_agent(whole, capsys):
    words = ["probe", str(whole(HOST)), "--samples", "50", "--updates", "20", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 <= found["effective_rank"] <= 32
    assert 0 <= found["dormant_share"] < 1
    assert found["target_churn_train"] > 0
    assert -1 <= found["gradient_cosine_own_tb"] <= 1
    assert probe_run(whole(HOST), ("dormant",), "last", 50, 20, 100)["dormant_share"] == found["dormant_share"]


def test_probes_do_not_change_learning(whole):
    with_probes = whole(HOST.replace(analysis=True, analysis_samples=64))
    returns = [record.read_summary(folder)["epoch_returns"] for folder in (whole(HOST), with_probes)]
    assert returns[0] == returns[1]


BREAKOUT = EnvSpec("ALE/Breakout-v5", "streaming-v1", (84, 84, 1), "uint8", 4, frame_stack=4, frames_per_step=4)


def test_memory_of_streaming_on_atari():
    """Parameters, traces, moments and the last step take less than 7 MB at K = 9."""
    config = preset_config("atari-stream")
    free = measure_size(config.replace(scheme="target-free"), BREAKOUT)
    nine = measure_size(config.replace(num_bellman_iterations=9), BREAKOUT)
    assert free.parameters == 143_776 + 257 * 4  # Breakout has 4 actions
    assert nine.parameters == 143_776 + 10 * 257 * 4
    assert nine.optimizer_bytes == 4 * (9 * 143_776 + 257 * 4 + 1)  # traces of the torso and of a head, and the fade
    assert (
        # two doubles per pixel and two of the return, two counts, the running return and its maximum
        nine.moments_bytes == 84 * 84 * 16 + 16 + 2 * 4 + 8 + 4
    )
    last_step = online.replay_memory(config, BREAKOUT).total
    assert nine.network_bytes + nine.optimizer_bytes + nine.moments_bytes + last_step < 7e6


@pytest.mark.slow
def test_the_cost_table_of_a_streaming_preset(capsys):
    assert main(["cost", "atari-stream"]) == 0
    header, *lines = capsys.readouterr().out.strip().splitlines()[1:]
    assert re.split(r"\s{2,}", header)[6:] == ["network MB", "traces MB", "moments MB", "last step MB", "total MB"]
    (nine,) = [re.split(r"\s{2,}", line) for line in lines if "K=9" in line]
    assert float(nine[-1]) == pytest.approx(sum(map(float, nine[6:-1])), abs=0.2)


def test_the_facade_learns_predicts_saves_and_loads(tmp_path):
    model = isqn.Model("stream-q", env="CartPole-v1", scheme=isqn.iterated_shared(3), loop="host")
    model.learn(300)
    obs = np.zeros(4, np.float32)
    action, _ = model.predict(obs)
    assert action in (0, 1)
    many, _ = model.predict(np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32), deterministic=False)
    assert set(many) <= {0, 1}
    model.save(tmp_path / "model")
    again = isqn.Model.load(tmp_path / "model")
    assert again.config.agent == "stream-q"
    assert again.predict(obs)[0] == action
    jax.tree.map(np.testing.assert_array_equal, again.state, model.state)
    assert len(isqn.evaluate(again, gym.make("CartPole-v1"), episodes=2)) == 2
    with pytest.raises(UserError, match="algorithm 'streamq' is not known; did you mean stream-q"):
        isqn.Model("streamq")


def test_predict_normalises_as_training_does():
    """The newest frame is counted before it is normalised; predicting does not change the model."""
    model = isqn.Model("stream-q", env="CartPole-v1", loop="host").learn(200)
    obs = np.array([0.3, -0.2, 0.05, 0.4], np.float32)
    moments = jax.tree.map(np.asarray, model.state.moments)
    state, normalised = model._agent.observe(model.state, obs)
    q, _ = model._agent.network.apply(state.params, {}, normalised[None])
    best = int(np.asarray(q)[0, 1:].mean(axis=0).argmax())
    assert model.predict(obs)[0] == best
    jax.tree.map(np.testing.assert_array_equal, moments, jax.tree.map(np.asarray, model.state.moments))


def test_zeros_before_the_first_frame_of_a_game_are_not_normalised():
    """The model stacks the first frames of a game as the replay does in training."""
    model = isqn.Model("stream-q", env="ALE/Breakout-v5", scheme=isqn.iterated_shared(1))
    rng, observe = np.random.default_rng(0), jax.jit(model._agent.observe)
    values = jax.jit(lambda params, obs: model._agent.network.apply(params, {}, obs)[0])
    state = model.state
    for frame in rng.integers(0, 255, (20, 84, 84, 1), np.uint8):
        state, _ = observe(state, frame)
    model.state = state
    for count in (1, 2, 4):
        frames = rng.integers(0, 255, (count, 84, 84, 1), np.uint8)
        stack = [np.zeros((84, 84, 1), np.float32)] * (4 - count)
        for frame in frames:
            state, normalised = observe(state, frame)
            stack.append(normalised)
        q = np.asarray(values(state.params, np.concatenate(stack, axis=-1)[None]))
        obs = np.concatenate([np.zeros((4 - count, 84, 84, 1), np.uint8), frames])
        assert model.predict(np.concatenate(list(obs), axis=-1))[0] == int(q[0, 1].argmax())
        state = model.state


def test_the_step_time_is_measured_in_the_host_loop():
    assert run.seconds_per_step(HOST, seconds=0.01) > 0
    assert examine(HOST)["steps_per_second"] > 0


def test_the_memory_line_names_the_rows_for_the_probes():
    spec = run.specification(HOST)
    assert "no replay buffer" in online._memory_line(HOST, spec)
    assert "which only the probes read" in online._memory_line(HOST.replace(analysis=True), spec)


def test_a_linear_network_learns_the_values_of_a_chain(tmp_path):
    """On one-hot states it is a table, and only the heads have traces."""
    config = COMPILED.replace(hidden_sizes=(), initial_sparsity=0.0, total_timesteps=4_000, epoch_steps=2_000)
    run.start(config, tmp_path / "run", quiet=True)
    known = known_values(tmp_path / "run")
    assert np.abs(known.learned - known.true).max() < 0.3


def test_bad_input_is_answered_in_a_sentence(capsys):
    for words, sentence in (
        (
            "train stream-q --batch-size 4",
            "`isqn train stream-q` has no flag --batch-size; it is for `isqn train dqn` or `isqn train sac`",
        ),
        (
            "train dqn --obgd joint",
            "`isqn train dqn` has no flag --obgd; it is for `isqn train stream-q`, not for dqn.",
        ),
        ("train stream --k 3", "`isqn train stream` is not known; did you mean stream-q?"),
        ("train stream-q --obgd jont", "--obgd is 'jont'; did you mean joint?"),
        ("train stream-q --trace-decay 2", "--trace-decay is 2.0; it must be between 0 and 1."),
        ("train stream-q --preset minatar", "--preset minatar is for `isqn train dqn`; the presets of"),
        ("train dqn --preset atari-stream", "--preset atari-stream is for `isqn train stream-q`; the presets of"),
        ("train stream-q --torso nature", "--torso nature needs images"),
        ("train stream-q --train-frequency 4", "has no flag --train-frequency; it is for `isqn train dqn`, not for"),
        ("train stream-q --normalise-rewards false", "takes no value; its opposite is --no-normalise-rewards."),
        ("train stream-q --no-layer-norm=True", "--no-layer-norm takes no value; its opposite is --layer-norm."),
        ("train stream-q --obgd", "--obgd needs a value: per-head, joint."),
        ("train stream-q --preset nosuch", "choose one of atari-stream, atari-stream-smoke, minatar-stream"),
        ("train stream-q --preset atari-stream --env-id isqn/Chain-v0", "or choose a --preset that leaves it there."),
    ):
        assert main(words.split()) != 0
        assert sentence in capsys.readouterr().err, words


def test_show_diff_lists_the_settings_of_both_agents(capsys):
    assert main(["train", "stream-q", "--env-id", "ALE/Pong-v5", "--show-diff", "atari-cnn"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["trace_decay"] == ["0.8"]  # only this run has it
    assert rows["batch_size"] == ["32"]  # only the preset
    assert rows["target_update_period"] == ["8000", "10"]
    assert not {"agent_samples", "loop"} & set(rows)


def test_a_config_file_names_its_agent(tmp_path, capsys):
    record.create_run(tmp_path / "run", COMPILED.replace(total_timesteps=100, epoch_steps=100))
    file = str(tmp_path / "run" / "config.toml")
    assert main(["train", "--config", file, "--run-dir", str(tmp_path / "again"), "--quiet"]) == 0
    assert record.read_config(tmp_path / "again").agent == "stream-q"
    assert main(["train", "dqn", "--config", file, "--run-dir", str(tmp_path / "no")]) == 2
    assert "is of `isqn train stream-q`, not of `isqn train dqn`." in capsys.readouterr().err


def test_the_help_of_an_agent_shows_its_own_settings(capsys):
    shown = {}
    for agent in ("dqn", "stream-q"):
        with pytest.raises(SystemExit):
            main(["train", agent, "--help"])
        shown[agent] = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert {"--buffer-size", "--loss"} <= shown["dqn"] - shown["stream-q"]
    assert {"--trace-decay", "--obgd", "--normalise-rewards"} <= shown["stream-q"] - shown["dqn"]
    assert {"--k", "--scheme", "--target-update-period", "--layer-norm"} <= shown["dqn"] & shown["stream-q"]


def test_streaming_on_atari_trains_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """In Breakout under the streaming protocol, a lost life ends an episode, and the game goes on."""
    config = preset_config("atari-stream").replace(
        num_bellman_iterations=3, total_timesteps=260, epoch_steps=260, log_period_steps=65
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run.start(config, whole, quiet=True)
    stop_after(monkeypatch, 110)
    with pytest.raises(Interrupted):
        run.start(config, cut, quiet=True)
    monkeypatch.undo()
    run.resume(cut, quiet=True)
    assert_same(final(cut), final(whole))
    summary = record.read_summary(whole)
    assert summary["protocol"] == "streaming-v1"
    assert float(read_table(whole / "metrics.csv")[-1]["loss"]) > 0


def test_results_are_of_whole_games_although_lives_end_episodes(tmp_path, monkeypatch):
    taken = []

    def step(self, action, real=Environment.step):
        taken.append(real(self, action))
        return taken[-1]

    monkeypatch.setattr(Environment, "step", step)
    config = preset_config("atari-stream").replace(
        scheme="target-free", total_timesteps=400, epoch_steps=400, log_period_steps=200
    )
    run.start(config, tmp_path / "run", quiet=True)
    games = read_table(tmp_path / "run" / "episodes.csv")
    lost = sum(step.terminated for step in taken)
    assert lost == 5 * len(games)  # Breakout has five lives, and a run ends with a game
    assert sum(float(game["return"]) for game in games) == sum(step.reward for step in taken)
    assert sum(int(game["length"]) for game in games) == len(taken)


def test_the_horizon_counts_the_steps_of_a_game_across_lives(tmp_path):
    """After H steps a game is truncated, and a new one begins."""
    config = preset_config("atari-stream").replace(
        scheme="target-free", total_timesteps=200, epoch_steps=200, log_period_steps=200, max_episode_steps=60
    )
    run.start(config, tmp_path / "run", quiet=True)
    games = read_table(tmp_path / "run" / "episodes.csv")
    assert [game["length"] for game in games] == ["60"] * 4


def test_frames_are_stacked_after_normalisation():
    """Each frame of a stack stays as it was normalised when it came."""
    config = preset_config("atari-stream").replace(scheme="target-free")
    env = make_environment(config.env_id, protocol=config.protocol)
    agent = make_run_agent(config, env.spec)
    call, replay = compile_agent(agent), online.make_replay_factory(config, env.spec)()
    state, normalised = call.observe(agent.init(0), env.reset(0))
    replay.add_first(normalised)
    frames = [normalised]
    for _ in range(6):
        state, normalised = call.observe(state, env.step(1).frame)
        frames.append(normalised)
        replay.add(1, 0.0, False, False, normalised)
    np.testing.assert_array_equal(replay.observation(), np.concatenate(frames[-4:], axis=-1))
    step = replay.latest(explored=False)
    np.testing.assert_array_equal(step.next_obs[0], np.concatenate(frames[-4:], axis=-1))
    np.testing.assert_array_equal(step.obs[0], np.concatenate(frames[-5:-1], axis=-1))
    env.close()
