"""Stream Q(λ): its update equals a slow reference that follows the papers, and laws of traces and step sizes."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import ALL_SCHEMES, compile_functions
from isqn import moments
from isqn.agents import stream_q
from isqn.agents.base import target_schedule
from isqn.agents.registry import make_config
from isqn.networks import make_network
from isqn.types import EnvSpec, Transition

VECTOR = EnvSpec("Vector-v0", "gymnasium", (5,), "float32", 3)
SMALL = EnvSpec("Small-v0", "gymnasium", (6, 6, 2), "float32", 3)
BASE = make_config("stream-q").replace(
    hidden_sizes=(16,), initial_sparsity=0.5, normalise_observations=False, normalise_rewards=False
)


def scheme(name: str, k: int = 1, **more):
    return BASE.replace(scheme=name, num_bellman_iterations=k, **more)


def stream(length: int, spec: EnvSpec = VECTOR, seed: int = 0):
    """Yield random steps, each from where the last one led; some end an episode, some explore."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(length + 1, *spec.obs_shape)).astype(np.float32)
    for i in range(length):
        ended = rng.random() < 0.05
        discount = 0.0 if ended and rng.random() < 0.5 else 0.99
        yield Transition(
            obs=obs[i : i + 1],
            action=rng.integers(0, spec.num_actions, 1).astype(np.int32),
            reward=rng.normal(size=1).astype(np.float32),
            discount=np.array([discount], np.float32),
            next_obs=obs[i + 1 : i + 2],
            ended=np.array([ended]),
            explored=np.array([rng.random() < 0.2]),
        )


@cache
def make_agent(config, spec: EnvSpec = VECTOR):
    return compile_functions(stream_q.make(config, spec))


def learn(config, steps, spec: EnvSpec = VECTOR, state=None):
    """Yield the state after each step, refreshed every T."""
    agent = make_agent(config, spec)
    state = agent.init(0) if state is None else state
    for time, step in enumerate(steps, start=1):
        state, _ = agent.update(state, step)
        if time % config.target_update_period == 0:
            state = agent.refresh(state)
        yield state


def reference(config, steps, spec: EnvSpec = VECTOR):
    """Yield the parameters and the traces after each step, computed as in the papers.

    Each pair has a trace of its own over all parameters, and each gradient is a backward pass of its own.
    """
    k = config.num_bellman_iterations
    network = make_network(spec, k + 1, config.torso, config.torso_settings)
    params = jax.device_get(make_agent(config, spec).init(0).params)
    traces = [jax.tree.map(np.zeros_like, params) for _ in range(k)]

    @jax.jit
    def evaluate(params, step):
        def value(params, head):
            return network.apply(params, {}, step.obs)[0][0, head, step.action[0]]

        gradients = [jax.grad(value)(params, head) for head in range(1, k + 1)]
        now, after = (network.apply(params, {}, obs)[0][0] for obs in (step.obs, step.next_obs))
        return gradients, now, after

    for time, step in enumerate(steps, start=1):
        gradients, now, after = jax.device_get(evaluate(params, step))
        errors, reaches = [], []
        fade = np.float32(config.discount * config.trace_decay)
        for head in range(1, k + 1):
            error = float(step.reward[0] + step.discount[0] * after[head - 1].max() - now[head, step.action[0]])
            traces[head - 1] = jax.tree.map(lambda z, g: fade * z + g, traces[head - 1], gradients[head - 1])  # noqa: B023
            norm = sum(float(np.abs(z.astype(np.float64)).sum()) for z in jax.tree.leaves(traces[head - 1]))
            errors.append(error)
            reaches.append(config.obgd_kappa * max(abs(error), 1) * norm)
        if config.obgd == "joint":
            reaches = [sum(reaches)] * k
        for trace, error, reach in zip(traces, errors, reaches, strict=True):
            move = np.float32(config.learning_rate / max(config.learning_rate * reach, 1) * error)
            params = jax.tree.map(lambda w, z, move=move: w + move * z, params, trace)
        if step.ended[0] or step.explored[0]:
            traces = [jax.tree.map(np.zeros_like, trace) for trace in traces]
        if time % config.target_update_period == 0:
            new, old = np.float32(config.target_step_size), np.float32(1 - config.target_step_size)
            heads = jax.tree.map(lambda w: new * np.concatenate([w[1:], w[-1:]]) + old * w, params["heads"])  # noqa: B023
            params = {**params, "heads": heads}
            if config.shift_traces:  # the trace of head k + 1, with respect to the head that it moves to
                rolled = [{**z, "heads": jax.tree.map(lambda w: np.roll(w, -1, axis=0), z["heads"])} for z in traces]
                shifted = [*rolled[1:], traces[-1]]
                traces = [
                    jax.tree.map(lambda z, next_z: new * next_z + old * z, *pair)  # noqa: B023
                    for pair in zip(traces, shifted, strict=True)
                ]
        yield params, traces


def assert_close(one, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, other)


@pytest.mark.parametrize(
    ("k", "spec", "settings"),
    [
        (1, VECTOR, {}),
        (3, VECTOR, {}),
        (3, VECTOR, {"obgd": "joint"}),
        (3, VECTOR, {"shift_traces": False}),
        (3, VECTOR, {"learning_rate": 1e-3}),  # below the bound
        (3, VECTOR, {"target_step_size": 0.3}),
        (2, VECTOR, {"hidden_sizes": ()}),
        (3, SMALL, {}),
        (2, SMALL, {"layer_norm_axes": "all"}),
    ],
)
def test_the_update_equals_the_reference(k, spec, settings):
    config = scheme("iterated-shared", k, target_update_period=7, **settings)
    states, expected = learn(config, stream(60, spec), spec), reference(config, stream(60, spec), spec)
    for state, (params, _) in zip(states, expected, strict=True):
        assert_close(state.params, params, rtol=2e-4, atol=2e-5)


def test_iterated_shared_with_one_iteration_refreshed_at_every_step_is_target_free():
    """The parameters stay equal over 500 random steps, up to rounding."""
    free, shared = scheme("target-free"), scheme("iterated-shared", 1, target_update_period=1)
    state = make_agent(free).init(0)
    twice = jax.tree.map(lambda w: jnp.concatenate([w, w]), state.params["heads"])
    started = make_agent(shared).init(0)._replace(params={**state.params, "heads": twice})
    pairs = zip(learn(free, stream(500), state=state), learn(shared, stream(500), state=started), strict=True)
    for one, other in pairs:
        assert_close(other.params["torso"], one.params["torso"], rtol=1e-5, atol=1e-6)
        for head in (0, 1):
            of_head = jax.tree.map(lambda w, head=head: w[head : head + 1], other.params["heads"])
            assert_close(of_head, one.params["heads"], rtol=1e-5, atol=1e-6)


def test_all_heads_share_one_trace():
    """The trace of a head with respect to itself is the shared one, and with respect to other heads zero."""
    config = scheme("iterated-shared", 3, target_update_period=7)
    for state, (_, traces) in zip(learn(config, stream(40)), reference(config, stream(40)), strict=True):
        shared = state.optimizer.head
        continues = float(state.optimizer.fade) > 0  # the agent clears its traces at the start of the next step
        for pair, trace in enumerate(traces):
            for name, z in trace["heads"].items():
                np.testing.assert_allclose(z[pair + 1], np.asarray(shared[name]) * continues, rtol=1e-4, atol=1e-6)
                assert not np.delete(np.asarray(z), pair + 1, axis=0).any()


def test_head_0_moves_only_at_a_refresh():
    config = scheme("iterated-shared", 3, target_update_period=10)
    before = None
    for time, state in enumerate(learn(config, stream(30)), start=1):
        first = np.asarray(state.params["heads"]["kernel"][0])
        if before is not None and time % 10:
            np.testing.assert_array_equal(first, before)
        elif before is not None:
            assert (first != before).any()
        before = first


# A problem of two states: for each state and action the reward, the next state and whether the episode terminates.
REWARD = np.array([[0.0, 1.0], [2.0, 5.0]], np.float32)
NEXT_STATE = np.array([[0, 1], [0, 1]])
TERMINATES = np.array([[False, False], [False, True]])
# Q*(1, 1) = 5, V(0) = 1 + 0.9 V(1) and V(1) = 2 + 0.9 V(0), so V(1) = 2.9 / 0.19
VALUE_1 = 2.9 / 0.19
VALUE_0 = 1 + 0.9 * VALUE_1
OPTIMAL = [[0.9 * VALUE_0, VALUE_0], [VALUE_1, 5.0]]


@pytest.mark.parametrize(("name", "k"), ALL_SCHEMES)
def test_every_scheme_learns_the_optimal_values_from_a_stream(name, k):
    """A linear network on one-hot states is a table; half of the actions are random, which cuts the traces."""
    config = scheme(name, k, hidden_sizes=(), initial_sparsity=0.0, discount=0.9, target_sync_period=3)
    agent = stream_q.make(config, EnvSpec("Two-v0", "test", (2,), "float32", 2))
    schedule = target_schedule(config, agent)

    def step(carry, time):
        state, at = carry
        obs = jnp.eye(2)[at]
        choice = agent.act(state, obs, 0.5, time, 0)
        ends, after = jnp.asarray(TERMINATES)[at, choice.action], jnp.asarray(NEXT_STATE)[at, choice.action]
        reward, discount = jnp.asarray(REWARD)[at, choice.action], jnp.where(ends, 0.0, 0.9)
        transition = Transition(obs, choice.action, reward, discount, jnp.eye(2)[after], ends, choice.explored)
        state, _ = agent.update(state, jax.tree.map(lambda x: x[None], transition))
        for is_due, function in (
            (schedule.is_sync_due(time + 1), agent.sync),
            (schedule.is_refresh_due(time + 1), agent.refresh),
        ):
            state = jax.lax.cond(is_due, function, lambda same: same, state)
        return (state, after), None

    (state, _), _ = jax.jit(lambda s: jax.lax.scan(step, (s, 0), jnp.arange(20_000)))(agent.init(0))
    heads = jax.device_get(state.params["heads"])
    for head in config.target_scheme.online:
        np.testing.assert_allclose(heads["kernel"][head] + heads["bias"][head], OPTIMAL, rtol=0.01)


def test_the_target_network_is_that_of_the_last_refresh():
    states = list(learn(scheme("target-based", target_update_period=10), stream(34)))
    assert_close(states[-1].copies[0], states[29].params, rtol=0, atol=0)
    assert (states[-1].copies[0]["heads"]["kernel"] != states[-1].params["heads"]["kernel"]).any()


def test_target_based_refreshed_at_every_step_is_target_free():
    based, free = scheme("target-based", target_update_period=1), scheme("target-free")
    for one, other in zip(learn(based, stream(50)), learn(free, stream(50)), strict=True):
        assert_close(one.params, other.params, rtol=1e-6, atol=1e-7)


def test_step_sizes_by_hand():
    errors, norms = jnp.array([0.5, -3.0, 0.1]), jnp.array([10.0, 10.0, 0.2])
    # 1 / (2 x 1 x 10), 1 / (2 x 3 x 10); 2 x 1 x 0.2 is below 1, so the learning rate itself
    np.testing.assert_allclose(stream_q.step_sizes(errors, norms, BASE), [0.05, 1 / 60, 1.0], rtol=1e-6)
    # 20 + 60 + 0.4
    joint = stream_q.step_sizes(errors, norms, BASE.replace(obgd="joint"))
    np.testing.assert_allclose(joint, [1 / 80.4] * 3, rtol=1e-6)


@pytest.mark.parametrize("spec", [VECTOR, SMALL], ids=["vector", "image"])
def test_no_step_exceeds_the_bound(spec):
    """The absolute changes of all parameters sum to at most 1 / kappa for each pair.

    This holds for the first step, too, where a normalised observation is all zeros and LayerNorm has its steepest
    gradient.
    """
    config = scheme("iterated-shared", 3, normalise_rewards=True, target_update_period=1_000)
    before = make_agent(config, spec).init(0).params
    steps = [step._replace(obs=step.obs * (i > 0)) for i, step in enumerate(stream(50, spec))]
    for state in learn(config, steps, spec):
        moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).sum(), state.params, before)
        assert 0 < sum(jax.tree.leaves(moved)) <= 3 / config.obgd_kappa + 1e-4
        before = state.params


def test_traces_are_cleared_after_the_update_of_a_last_or_exploring_step():
    config = scheme("target-free")
    first, second = stream(2)
    flags = {"ended": np.array([False]), "explored": np.array([False])}
    steps = {
        "game_continues": first._replace(**flags),
        "explores": first._replace(**{**flags, "explored": np.array([True])}),
        "ends": first._replace(**{**flags, "ended": np.array([True])}),
    }
    after_one, after_two = {}, {}
    for name, step in steps.items():
        after_one[name], after_two[name] = list(learn(config, [step, second._replace(**flags)]))
    for name in ("explores", "ends"):
        assert_close(after_one[name].params, after_one["game_continues"].params, rtol=0, atol=0)
        assert_close(after_two[name].params, after_two["explores"].params, rtol=0, atol=0)
    kernels = [np.asarray(after_two[name].params["heads"]["kernel"]) for name in ("game_continues", "explores")]
    assert (kernels[0] != kernels[1]).any()


def test_rewards_are_divided_by_the_standard_deviation_of_discounted_returns():
    """Numpy computes algorithm 5 of Elsayed et al. 2024 in float64."""
    config = BASE.replace(normalise_rewards=True, scheme="target-free")
    agent = make_agent(config)
    state, totals, running = agent.init(0), [], 0.0
    for step in stream(40):
        state, _ = agent.observe(state, step.next_obs[0], step.reward[0], step.ended[0])
        before, (state, metrics) = state, agent.update(state, step)
        running = 0.99 * (not step.ended[0]) * running + float(step.reward[0])
        totals.append(running)
        deviation = np.sqrt((np.var(totals, ddof=1) if len(totals) > 1 else 1.0) + 1e-8)
        np.testing.assert_allclose(moments.deviation(state.moments.returns.moments), deviation, rtol=1e-5)
    # an agent without normalisation has the same error on a reward that is divided by hand
    raw = make_agent(config.replace(normalise_rewards=False))
    before = before._replace(moments=raw.init(0).moments)
    _, by_hand = raw.update(before, step._replace(reward=step.reward / np.float32(deviation)))
    np.testing.assert_allclose(metrics["loss"], by_hand["loss"], rtol=1e-4)


def test_observations_are_normalised_by_moments_that_include_them():
    config = BASE.replace(normalise_observations=True, scheme="target-free")
    agent = make_agent(config)
    state = agent.init(0)
    frames = np.random.default_rng(0).normal(3, 2, (30, 5)).astype(np.float32)
    for n, frame in enumerate(frames, start=1):
        state, obs = agent.observe(state, frame)
        so_far = frames[:n].astype(np.float64)
        deviation = np.sqrt((so_far.var(axis=0, ddof=1) if n > 1 else 1.0) + 1e-8)
        np.testing.assert_allclose(obs, (frame - so_far.mean(axis=0)) / deviation, rtol=1e-5, atol=1e-6)
    assert obs.dtype == jnp.float32


def test_frames_are_unchanged_without_normalisation():
    agent = stream_q.make(scheme("target-free"), VECTOR)
    frame = np.arange(5, dtype=np.float32)
    _, obs = agent.observe(agent.init(0), frame)
    assert obs is frame
