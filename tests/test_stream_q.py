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
    """Yield the state after each step, with the target updates that are due."""
    agent = make_agent(config, spec)
    schedule = target_schedule(config, agent)
    state = agent.init(0) if state is None else state
    for time, step in enumerate(steps, start=1):
        state, _ = agent.update(state, step)
        if schedule.is_sync_due(time):
            state = agent.sync(state)
        if schedule.is_refresh_due(time):
            state = agent.refresh(state)
        yield state


def learn_from_frames(config, steps, spec: EnvSpec = VECTOR):
    """Yield the observation and the state of each step of an agent that normalises what it observes."""
    agent = make_agent(config, spec)
    state, obs = agent.init(0), None
    for step in steps:
        if obs is None:
            state, obs = agent.observe(state, step.obs[0])
        state, next_obs = agent.observe(state, step.next_obs[0], step.reward[0], step.ended[0])
        state, _ = agent.update(state, step._replace(obs=obs[None], next_obs=next_obs[None]))
        yield obs, state
        obs = next_obs


def reference(config, steps, spec: EnvSpec = VECTOR):
    """Yield the parameters, the copies and the traces after each step, computed as in the papers.

    Each pair has a trace of its own over all parameters, and each gradient is a backward pass of its own.
    """
    online, target, copy = (getattr(config.target_scheme, name) for name in ("online", "target", "copy"))
    pairs = range(len(online))
    network = make_network(spec, config.target_scheme.num_heads, config.torso, config.torso_settings)
    params = jax.device_get(make_agent(config, spec).init(0).params)
    copies = [params for _ in set(copy)]
    traces = [jax.tree.map(np.zeros_like, params) for _ in pairs]
    new, old = np.float32(config.target_step_size), np.float32(1 - config.target_step_size)
    # what the online head of each pair becomes at a target update: the online head that has it as its target, or itself
    moves = {to: source for to, source in zip(target, online, strict=True) if to != source}

    def between(before, after):
        return jax.tree.map(lambda a, b: old * a + new * b, before, after)

    def move_heads(tree, sources):
        heads = jax.tree.map(np.copy, tree["heads"])
        for to, source in sources.items():
            for name, of_heads in heads.items():
                of_heads[to] = tree["heads"][name][source]
        return {**tree, "heads": heads}

    @jax.jit
    def evaluate(params, copies, step):
        def value(params, head):
            return network.apply(params, {}, step.obs)[0][0, head, step.action[0]]

        gradients = [jax.grad(value)(params, head) for head in online]
        now = network.apply(params, {}, step.obs)[0][0]
        return gradients, now, [network.apply(older, {}, step.next_obs)[0][0] for older in copies or [params]]

    for time, step in enumerate(steps, start=1):
        gradients, now, after = jax.device_get(evaluate(params, copies, step))
        errors, reaches = [], []
        fade = np.float32(config.discount * config.trace_decay)
        for pair in pairs:
            next_values = after[copy[pair] if copy else 0][target[pair]]
            error = float(step.reward[0] + step.discount[0] * next_values.max() - now[online[pair], step.action[0]])
            traces[pair] = jax.tree.map(lambda z, g: fade * z + g, traces[pair], gradients[pair])  # noqa: B023
            norm = sum(float(np.abs(z.astype(np.float64)).sum()) for z in jax.tree.leaves(traces[pair]))
            errors.append(error)
            reaches.append(config.obgd_kappa * max(abs(error), 1) * norm)
        if config.obgd == "joint":
            reaches = [sum(reaches) for _ in pairs]
        for trace, error, reach in zip(traces, errors, reaches, strict=True):
            step_size = np.float32(config.learning_rate / max(config.learning_rate * reach, 1) * error)
            params = jax.tree.map(lambda w, z, step_size=step_size: w + step_size * z, params, trace)
        if step.ended[0] or step.explored[0]:
            traces = [jax.tree.map(np.zeros_like, trace) for trace in traces]
        if time % config.target_update_period == 0:
            copies[:1] = [between(first, params) for first in copies[:1]]
            params = between(params, move_heads(params, moves))
            copies[1:] = [between(later, params) for later in copies[1:]]
            if config.shift_traces:  # the trace of the source head, with respect to the head that it becomes
                sources = [moves.get(head, head) for head in online]
                arriving = [
                    move_heads(traces[online.index(source)], {head: source, source: head})
                    for head, source in zip(online, sources, strict=True)
                ]
                traces = [between(*both) for both in zip(traces, arriving, strict=True)]
        elif time % config.target_sync_period == 0:
            copies[1:] = [params for _ in copies[1:]]
        yield params, copies, traces


def assert_close(one, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, other)


@pytest.mark.parametrize(
    ("name", "k", "spec", "settings"),
    [
        ("iterated-shared", 1, VECTOR, {}),
        ("iterated-shared", 3, VECTOR, {}),
        ("iterated-shared", 3, VECTOR, {"obgd": "joint"}),
        ("iterated-shared", 3, VECTOR, {"shift_traces": False}),
        ("iterated-shared", 3, VECTOR, {"learning_rate": 1e-3}),  # below the bound
        ("iterated-shared", 3, VECTOR, {"target_step_size": 0.3}),
        ("iterated-shared", 2, VECTOR, {"hidden_sizes": ()}),
        ("iterated-shared", 3, SMALL, {}),
        ("iterated-shared", 2, SMALL, {"layer_norm_axes": "all"}),
        ("target-free", 1, VECTOR, {}),
        ("target-based", 1, VECTOR, {}),
        ("target-based", 1, SMALL, {"target_step_size": 0.3}),
        ("ensemble-shared", 2, VECTOR, {}),
        ("iterated-target-based", 3, VECTOR, {}),
        ("iterated-target-based", 3, VECTOR, {"target_step_size": 0.3}),
        ("iterated-target-based", 3, VECTOR, {"shift_traces": False}),
    ],
)
def test_the_update_equals_the_reference(name, k, spec, settings):
    """Parameters, copies and the traces of the torso; `test_all_heads_share_one_trace` compares those of the heads."""
    config = scheme(name, k, target_update_period=7, target_sync_period=3, **settings)
    states, expected = learn(config, stream(60, spec), spec), reference(config, stream(60, spec), spec)
    for state, (params, copies, traces) in zip(states, expected, strict=True):
        assert_close(state.params, params, rtol=2e-4, atol=2e-5)
        assert_close(list(state.copies), copies, rtol=2e-4, atol=2e-5)
        continues = float(state.optimizer.fade) > 0  # the agent clears its traces at the start of the next step
        ours = jax.tree.map(lambda z: np.asarray(z) * continues, state.optimizer.torso)  # noqa: B023
        torso = jax.tree.map(lambda *z: np.stack(z), *(trace["torso"] for trace in traces))
        assert_close(ours, torso, rtol=1e-3, atol=1e-4)


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


@pytest.mark.parametrize(
    ("name", "k"), [("iterated-shared", 3), ("ensemble-shared", 2), ("iterated-target-based", 3), ("target-based", 1)]
)
def test_all_heads_share_one_trace(name, k):
    """The trace of a head with respect to itself is the shared one, and with respect to other heads zero."""
    config = scheme(name, k, target_update_period=7, target_sync_period=3)
    for state, (_, _, traces) in zip(learn(config, stream(40)), reference(config, stream(40)), strict=True):
        shared = state.optimizer.head
        continues = float(state.optimizer.fade) > 0  # the agent clears its traces at the start of the next step
        for head, trace in zip(config.target_scheme.online, traces, strict=True):
            for part, z in trace["heads"].items():
                np.testing.assert_allclose(z[head], np.asarray(shared[part]) * continues, rtol=1e-4, atol=1e-6)
                assert not np.delete(np.asarray(z), head, axis=0).any()


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
    config = scheme(
        "iterated-shared", 3, normalise_observations=True, normalise_rewards=True, target_update_period=1_000
    )
    steps = [
        step._replace(obs=5 + 3 * step.obs, next_obs=5 + 3 * step.next_obs, reward=100 * step.reward)
        for step in stream(50, spec)
    ]
    before, moved, observations = make_agent(config, spec).init(0).params, [], []
    for obs, state in learn_from_frames(config, steps, spec):
        changes = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).sum(), state.params, before)
        moved.append(sum(jax.tree.leaves(changes)))
        observations.append(np.asarray(obs))
        before = state.params
    assert not observations[0].any()
    assert abs(np.mean(observations[1:])) < 0.2  # and 5 without normalisation
    assert moments.deviation(state.moments.returns.moments) > 50
    assert all(0 < distance <= 3 / config.obgd_kappa + 1e-4 for distance in moved)


def test_traces_are_cleared_after_the_update_of_a_last_or_exploring_step():
    """The step after it equals the first step of an agent with the same parameters."""
    config = scheme("iterated-shared", 2, target_update_period=1_000)
    agent = make_agent(config)
    flags = {"ended": np.array([False]), "explored": np.array([False])}
    first, flagged, last = (step._replace(**flags) for step in stream(3))
    ends = {
        "continues": flagged,
        "explores": flagged._replace(explored=np.array([True])),
        "ends": flagged._replace(ended=np.array([True])),
    }
    states = {name: list(learn(config, [first, step, last])) for name, step in ends.items()}
    for name in ("explores", "ends"):
        _, after_flagged, after_last = states[name]
        assert_close(after_flagged.params, states["continues"][1].params, rtol=0, atol=0)
        fresh, _ = agent.update(after_flagged._replace(optimizer=agent.init(0).optimizer), last)
        assert_close(after_last, fresh, rtol=0, atol=0)
    kernels = [np.asarray(states[name][-1].params["heads"]["kernel"]) for name in ("continues", "ends")]
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
