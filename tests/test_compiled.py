"""The compiled loop and its replay: each seed of a batch equals a run of its own, and rows equal those of a list."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import assert_same, final, stop_after
from isqn.agents import dqn
from isqn.agents.dqn import DqnConfig
from isqn.data.device_replay import DeviceReplay, Rows
from isqn.data.text import read_table
from isqn.envs.registry import make_native
from isqn.keys import device_key
from isqn.train import checkpoint, online, record, run
from isqn.train.compiled import make_loop
from isqn.types import EnvSpec, Interrupted, UserError

BOOLS = EnvSpec("bools", "test", (3, 3, 2), "bool", 4)
VECTOR = EnvSpec("vector", "test", (2,), "float32", 4)


def fill(replay: DeviceReplay, steps: list[tuple[float, bool, bool]], spec: EnvSpec):
    """Add steps (reward, terminated, ended), whose observations are patterns of their number."""

    def pattern(number: int) -> np.ndarray:
        rng = np.random.default_rng(number)
        return rng.random(spec.obs_shape) < 0.5 if spec.frame_dtype == "bool" else rng.normal(size=spec.obs_shape)

    rows = replay.init()
    add = jax.jit(replay.add)
    naive = []
    for time, (reward, terminated, ended) in enumerate(steps):
        obs, next_obs = pattern(2 * time), pattern(2 * time + 1)
        row = Rows(obs, time % spec.num_actions, reward, terminated, ended, next_obs, explored=time % 2 == 0)
        rows = add(rows, time, jax.tree.map(lambda x, like: jnp.asarray(x, like), row, _types(spec)))
        naive.append((obs, time % spec.num_actions, reward, terminated, ended, next_obs))
    return rows, naive


def _types(spec: EnvSpec) -> Rows:
    return Rows(spec.frame_dtype, "int32", "float32", "bool", "bool", spec.frame_dtype, "bool")


@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(st.integers(-3, 3), st.sampled_from([(False, False), (True, True), (False, True)])),
        min_size=12,
        max_size=40,
    ),
    n=st.integers(1, 3),
    spec=st.sampled_from([BOOLS, VECTOR]),
)
def test_samples_equal_the_transitions_of_a_list(steps, n, spec):
    capacity, discount = 9, 0.5
    replay = DeviceReplay(spec, capacity, n, discount, reward_clip=2.0)
    rows, naive = fill(replay, [(float(r), *ends) for r, ends in steps], spec)
    batch = jax.jit(replay.sample, static_argnums=3)(rows, len(steps), jax.random.key(len(steps)), 64)
    starts = range(len(steps) - capacity, len(steps) - n + 1)
    expected = {}
    for start in starts:
        total, factor, last = 0.0, 1.0, start
        for last in range(start, start + n):
            total += factor * float(np.clip(naive[last][2], -2, 2))
            factor *= discount
            if naive[last][4]:
                break
        expected[naive[start][0].tobytes()] = (naive[start][1], total, factor * (not naive[last][3]), naive[last][5])
    drawn = set()
    for obs, action, reward, factor, next_obs in zip(*map(np.asarray, batch[:5]), strict=True):
        if spec.frame_dtype == "float32":
            (key,) = [k for k in expected if np.allclose(np.frombuffer(k).reshape(2), obs, atol=1e-6)]
        else:
            key = obs.tobytes()
        drawn.add(key)
        want_action, want_reward, want_discount, want_next = expected[key]
        assert action == want_action
        assert reward == pytest.approx(want_reward, abs=1e-5)
        assert factor == pytest.approx(want_discount)
        np.testing.assert_allclose(next_obs.astype(float), want_next.astype(float), atol=1e-6)
    assert len(drawn) > len(starts) // 2  # 64 draws over at most nine starts


@pytest.mark.parametrize("capacity", [2, 9])
def test_latest_returns_the_last_step(capacity):
    replay = DeviceReplay(VECTOR, capacity, 1, 0.5, None)
    steps = [(float(i), i % 5 == 4, i % 3 == 2 or i % 5 == 4) for i in range(13)]
    for length in range(1, len(steps) + 1):
        rows, naive = fill(replay, steps[:length], VECTOR)
        obs, action, reward, terminated, ended, next_obs = naive[-1]
        step = replay.latest(rows, length)
        np.testing.assert_allclose(step.obs, obs[None], rtol=1e-6)
        np.testing.assert_allclose(step.next_obs, next_obs[None], rtol=1e-6)
        assert (int(step.action[0]), float(step.reward[0])) == (action, reward)
        assert float(step.discount[0]) == (0 if terminated else 0.5)
        assert (bool(step.ended[0]), bool(step.explored[0])) == (ended, (length - 1) % 2 == 0)


def test_the_latest_reward_is_clipped_like_those_of_a_sample():
    rows, _ = fill(replay := DeviceReplay(VECTOR, 4, 1, 0.5, 2.0), [(-3.0, False, False)], VECTOR)
    sampled = replay.sample(rows, 1, jax.random.key(0), 3)
    assert float(replay.latest(rows, 1).reward[0]) == -2
    np.testing.assert_array_equal(sampled.reward, [-2, -2, -2])


def test_the_size_of_the_replay_is_known_before_allocation_and_bits_are_packed():
    replay = DeviceReplay(EnvSpec("MinAtar", "test", (10, 10, 4), "bool", 3), 1000, 1, 0.99, None)
    assert replay.nbytes == 1000 * (50 + 4 + 4 + 1 + 1 + 50 + 1)
    assert sum(leaf.nbytes for leaf in replay.init()) == replay.nbytes


def test_the_replay_stores_continuous_actions():
    """Two numbers an action, as they are; a row is 2 x 12 bytes of observations, 8 of the action, 4 and 3 flags."""
    spec = EnvSpec("box", "test", (3,), "float32", 2, action_low=(-1, -1), action_high=(1, 1), action_box=(2,))
    replay = DeviceReplay(spec, 10, 1, 0.9, None)
    assert replay.nbytes == 10 * (12 + 8 + 4 + 1 + 1 + 12 + 1)
    rows, actions = replay.init(), np.linspace(-1, 1, 26, dtype=np.float32).reshape(13, 2)
    for time, action in enumerate(actions):
        row = Rows(jnp.zeros(3), action, float(time), False, False, jnp.zeros(3), False)
        rows = replay.add(rows, time, jax.tree.map(jnp.asarray, row))
    batch = replay.sample(rows, 13, jax.random.key(0), 64)
    np.testing.assert_array_equal(batch.action, actions[batch.reward.astype(int)])
    assert set(batch.reward.astype(int).tolist()) == set(range(3, 13))
    np.testing.assert_array_equal(replay.latest(rows, 13).action, actions[-1:])


SMALL = DqnConfig(
    env_id="CartPole-v1",
    scheme="iterated-shared",
    num_bellman_iterations=2,
    hidden_sizes=(16,),
    total_timesteps=400,
    epoch_steps=400,
    log_period_steps=200,
    learning_starts=100,
    buffer_size=500,
    target_update_period=50,
    epsilon_decay_steps=200,
)


@cache
def compile_loop(config: DqnConfig):
    env = make_native(config.env_id)
    return make_loop(config, dqn.make(config, env.spec), env, online.make_device_replay(config, env.spec))


def run_loop(config: DqnConfig, seeds: list[int], stretches: list[tuple[int, bool]]):
    loop = compile_loop(config)
    state, step, episodes = loop.init(jnp.array(seeds)), 0, []
    for count, learning in stretches:
        state, ended, _ = loop.run(state, step, num_steps=count, learning=learning)
        step += count
        episodes.append(jax.device_get(ended))
    return jax.device_get(state), jax.tree.map(lambda *x: np.concatenate(x), *episodes)


def test_each_seed_of_a_batch_equals_a_run_of_its_own_and_seeds_differ():
    stretches = [(100, False), (20, True)]
    batch, batch_episodes = run_loop(SMALL, [3, 4, 5], stretches)
    for index, seed in enumerate((3, 4, 5)):
        alone, episodes = run_loop(SMALL, [seed], stretches)
        of_batch = jax.tree.map(lambda x, i=index: x[i], batch)
        of_own = jax.tree.map(lambda x: x[0], alone)
        np.testing.assert_array_equal(of_batch.rows.action[:100], of_own.rows.action[:100])  # the same first actions,
        np.testing.assert_allclose(of_batch.rows.obs[:100], of_own.rows.obs[:100], atol=1e-6)  # the same frames,
        np.testing.assert_array_equal(batch_episodes.over[:100, index], episodes.over[:100, 0])
        for a, b in zip(jax.tree.leaves(of_batch.agent.params), jax.tree.leaves(of_own.agent.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # and after 20 updates the same parameters
    first, second = (jax.tree.map(lambda x, i=i: x[i], batch) for i in (0, 1))
    assert (first.rows.action[:100] != second.rows.action[:100]).any()
    assert (first.rows.obs[0] != second.rows.obs[0]).all()
    kernel = "Dense_0"
    assert (first.agent.params["torso"][kernel]["kernel"] != second.agent.params["torso"][kernel]["kernel"]).all()


def test_batch_indices_of_two_seeds_differ_and_do_not_depend_on_the_batch_of_seeds():
    """The reward of each row is its number, so it shows which rows were drawn."""
    replay = DeviceReplay(VECTOR, 100, 1, 0.9, None)
    rows = replay.init()._replace(reward=jnp.arange(100, dtype=jnp.float32))

    def draw(seed):
        return replay.sample(rows, 100, device_key(seed, "replay", 7), 32).reward

    together = jax.vmap(draw)(jnp.arange(3))
    for seed in range(3):
        np.testing.assert_array_equal(together[seed], draw(seed))
    assert (together[0] != together[1]).any()


BATCH = SMALL.replace(num_seeds=2, seed=7, checkpoint_minutes=0.0)


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Train two seeds in one program."""
    return run.start(BATCH, tmp_path_factory.mktemp("runs") / "batch", quiet=True)


def test_a_batch_of_seeds_writes_a_run_folder_for_each(batch):
    assert [folder.name for folder in batch] == ["seed-7", "seed-8"]
    for folder, seed in zip(batch, (7, 8), strict=True):
        assert record.read_config(folder).seed == seed
        assert record.read_summary(folder)["seed"] == seed
        assert checkpoint.steps(folder)[0] == 400
        assert read_table(folder / "episodes.csv")
    first, second = ((folder / "episodes.csv").read_text() for folder in batch)
    assert first != second


def test_a_batch_resumes_as_a_batch_to_the_same_bits(batch, tmp_path, monkeypatch):
    stop_after(monkeypatch, 1)
    with pytest.raises(Interrupted):
        run.start(BATCH, tmp_path / "cut", quiet=True)
    monkeypatch.undo()
    assert run.resume(tmp_path / "cut" / "seed-8", quiet=True)  # resuming any of its seeds resumes the batch
    for folder in batch:
        assert_same(final(tmp_path / "cut" / folder.name), final(folder))


def test_the_compiled_loop_calls_the_update_of_the_agent():
    """One cycle equals a draw, an update and a refresh that are called by hand on the same rows."""
    config = SMALL.replace(update_period=5, target_update_period=10, learning_starts=10, buffer_size=100)
    env = make_native(config.env_id)
    agent, replay = dqn.make(config, env.spec), online.make_device_replay(config, env.spec)
    update_and_refresh = jax.jit(lambda state, batch: agent.refresh(agent.update(state, batch)[0]))
    before, _ = run_loop(config, [2], [(15, False)])
    after, _ = run_loop(config, [2], [(15, False), (5, True)])
    rows = jax.tree.map(lambda x: jnp.asarray(x[0]), after.rows)
    batch = replay.sample(rows, 20, device_key(2, "replay", 20 // 5), config.batch_size)
    state = jax.tree.map(lambda x: jnp.asarray(x[0]), before.agent)
    expected = update_and_refresh(state, batch)
    for a, b in zip(jax.tree.leaves(after.agent.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-6)


def test_row_lengths_that_are_no_multiple_of_the_update_period_are_refused(tmp_path):
    with pytest.raises(
        UserError,
        match=r"--log-period-steps is 201; in the compiled loop it must be a multiple of --update-period \(4\)",
    ):
        run.start(
            SMALL.replace(update_period=4, target_update_period=8, log_period_steps=201), tmp_path / "run", quiet=True
        )


def test_truncation_bootstraps_and_termination_does_not(tmp_path):
    """`Loop` is truncated after 5 steps: its values are 1 / (1 - gamma) = 10, above the 5 of an episode.

    `Chain` terminates: the value of its last step is the reward of 1.
    """
    config = DqnConfig(
        env_id="isqn/Loop-v0",
        discount=0.9,
        hidden_sizes=(),
        learning_rate=0.02,
        scheme="target-based",
        target_update_period=20,
        total_timesteps=6_000,
        epoch_steps=6_000,
        log_period_steps=6_000,
        learning_starts=200,
        epsilon_end=1.0,
    )
    for loop in ("host", "compiled"):
        (folder,) = run.start(config.replace(loop=loop), tmp_path / loop, quiet=True)
        arrays, _ = checkpoint.read(checkpoint.folder_of(folder, checkpoint.steps(folder)[0]))
        q = arrays["agent.params.heads.kernel"][0] + arrays["agent.params.heads.bias"][0]
        np.testing.assert_allclose(q[:, 1], 10.0, rtol=0.05)
        np.testing.assert_allclose(q[:, 0], 9.0, rtol=0.05)
        (folder,) = run.start(config.replace(loop=loop, env_id="isqn/Chain-v0"), tmp_path / f"{loop}-chain", quiet=True)
        arrays, _ = checkpoint.read(checkpoint.folder_of(folder, checkpoint.steps(folder)[0]))
        q = arrays["agent.params.heads.kernel"][0] + arrays["agent.params.heads.bias"][0]
        assert q[6, 1] == pytest.approx(1.0, abs=0.02)
        assert q[0, 1] == pytest.approx(0.9**6, abs=0.02)
