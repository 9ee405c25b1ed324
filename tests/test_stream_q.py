"""Stream Q(λ): the laws of its update, against a slow one that follows the papers word by word."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isqn import moments
from isqn.agents import stream_q
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
    """Random steps, of which the next begins where the last one ended; some end, some explore."""
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


def learn(config, steps, spec: EnvSpec = VECTOR, state=None):
    """The states after each step, refreshed every T."""
    agent = stream_q.make(config, spec)
    state = agent.init(0) if state is None else state
    update, refresh = jax.jit(agent.update), jax.jit(agent.refresh)
    for time, step in enumerate(steps, start=1):
        state, _ = update(state, step)
        if time % config.target_update_period == 0:
            state = refresh(state)
        yield state


def slow(config, steps, spec: EnvSpec = VECTOR):
    """Each pair has a whole trace of its own, over all parameters, and each gradient is a backward pass of its own.

    Yields the parameters and the traces after each step.
    """
    k = config.num_bellman_iterations
    network = make_network(spec, k + 1, config)
    params = stream_q.make(config, spec).init(0).params
    traces = [jax.tree.map(jnp.zeros_like, params) for _ in range(k)]

    @jax.jit
    def look(params, step):
        def value(params, head):
            return network.apply(params, {}, step.obs)[0][0, head, step.action[0]]

        gradients = [jax.grad(value)(params, head) for head in range(1, k + 1)]
        now, after = (network.apply(params, {}, obs)[0][0] for obs in (step.obs, step.next_obs))
        return gradients, now, after

    for time, step in enumerate(steps, start=1):
        gradients, now, after = look(params, step)
        moves, reaches = [], []
        for head in range(1, k + 1):
            error = float(step.reward[0] + step.discount[0] * after[head - 1].max() - now[head, step.action[0]])
            fade = config.discount * config.trace_decay
            traces[head - 1] = jax.tree.map(lambda z, g, fade=fade: fade * z + g, traces[head - 1], gradients[head - 1])
            norm = sum(float(np.abs(np.asarray(z, np.float64)).sum()) for z in jax.tree.leaves(traces[head - 1]))
            moves.append(error)
            reaches.append(config.obgd_kappa * max(abs(error), 1) * norm)
        if config.obgd == "joint":
            reaches = [sum(reaches)] * k
        for trace, error, reach in zip(traces, moves, reaches, strict=True):
            size = config.learning_rate / max(config.learning_rate * reach, 1)
            params = jax.tree.map(lambda w, z, move=size * error: w + move * z, params, trace)
        if step.ended[0] or step.explored[0]:
            traces = [jax.tree.map(jnp.zeros_like, trace) for trace in traces]
        if time % config.target_update_period == 0:
            tau = config.target_step_size
            heads = jax.tree.map(
                lambda w, tau=tau: tau * jnp.concatenate([w[1:], w[-1:]]) + (1 - tau) * w, params["heads"]
            )
            params = {**params, "heads": heads}
            if config.shift_traces:  # the trace of head k + 1, now with respect to where that head has gone
                before = [{**z, "heads": jax.tree.map(lambda w: jnp.roll(w, -1, axis=0), z["heads"])} for z in traces]
                shifted = [*before[1:], traces[-1]]
                mix = partial(jax.tree.map, lambda old, new, tau=tau: tau * new + (1 - tau) * old)
                traces = list(map(mix, traces, shifted))
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
def test_the_update_is_that_of_the_slow_one(k, spec, settings):
    config = scheme("iterated-shared", k, target_update_period=7, **settings)
    fast = learn(config, stream(60, spec), spec)
    for state, (params, _) in zip(fast, slow(config, stream(60, spec), spec), strict=True):
        assert_close(state.params, params, rtol=2e-4, atol=2e-5)


def test_one_head_that_is_refreshed_at_each_step_is_target_free():
    """Over 500 random steps, to float error."""
    free, shared = scheme("target-free"), scheme("iterated-shared", 1, target_update_period=1)
    state = stream_q.make(free, VECTOR).init(0)
    twice = jax.tree.map(lambda w: jnp.concatenate([w, w]), state.params["heads"])
    started = stream_q.make(shared, VECTOR).init(0)._replace(params={**state.params, "heads": twice})
    pairs = zip(learn(free, stream(500), state=state), learn(shared, stream(500), state=started), strict=True)
    for one, other in pairs:
        assert_close(other.params["torso"], one.params["torso"], rtol=1e-5, atol=1e-6)
        for head in (0, 1):
            mine = jax.tree.map(lambda w, head=head: w[head : head + 1], other.params["heads"])
            assert_close(mine, one.params["heads"], rtol=1e-5, atol=1e-6)


def test_the_traces_of_the_heads_are_one_and_the_same():
    """With respect to itself, every head has the trace that is kept once; with respect to others, none."""
    config = scheme("iterated-shared", 3, target_update_period=7)
    for state, (_, traces) in zip(learn(config, stream(40)), slow(config, stream(40)), strict=True):
        kept = state.optimizer.head
        faded = float(state.optimizer.fade) > 0  # the fast one forgets at the beginning of the next step
        for pair, trace in enumerate(traces):
            for name, z in trace["heads"].items():
                np.testing.assert_allclose(z[pair + 1], np.asarray(kept[name]) * faded, rtol=1e-4, atol=1e-6)
                assert not np.delete(np.asarray(z), pair + 1, axis=0).any()


def test_head_0_only_moves_at_a_refresh():
    config = scheme("iterated-shared", 3, target_update_period=10)
    before = None
    for time, state in enumerate(learn(config, stream(30)), start=1):
        first = np.asarray(state.params["heads"]["kernel"][0])
        if before is not None and time % 10:
            np.testing.assert_array_equal(first, before)
        elif before is not None:
            assert (first != before).any()
        before = first


@pytest.mark.parametrize("name", ["target-free", "target-based", "ensemble-shared", "iterated-target-based"])
def test_every_scheme_learns_from_a_stream(name):
    config = scheme(name, 2)
    *_, last = learn(config, stream(30))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.params))
    copies = last.copies
    if name == "target-based":  # the copy is as old as the last refresh
        assert_close(copies[0], last.params, rtol=0, atol=0)


def test_a_target_that_is_copied_at_each_step_is_none():
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
def test_no_step_is_longer_than_the_bound(spec):
    """All parameters together move by at most 1 / kappa, for each pair: also the first step, where a normalised
    observation is all zeros and LayerNorm has its steepest gradient."""
    config = scheme("iterated-shared", 3, normalise_rewards=True, target_update_period=1_000)
    before = stream_q.make(config, spec).init(0).params
    steps = [step._replace(obs=step.obs * (i > 0)) for i, step in enumerate(stream(50, spec))]
    for state in learn(config, steps, spec):
        moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).sum(), state.params, before)
        assert 0 < sum(jax.tree.leaves(moved)) <= 3 / config.obgd_kappa + 1e-4
        before = state.params


def test_traces_end_after_the_update_of_the_step_that_ends_them():
    config = scheme("target-free")
    first, second = stream(2)
    flags = {"ended": np.array([False]), "explored": np.array([False])}
    ways = {
        "goes on": first._replace(**flags),
        "explores": first._replace(**{**flags, "explored": np.array([True])}),
        "is cut": first._replace(**{**flags, "ended": np.array([True])}),
    }
    after_one, after_two = {}, {}
    for name, step in ways.items():
        after_one[name], after_two[name] = list(learn(config, [step, second._replace(**flags)]))
    for name in ("explores", "is cut"):
        assert_close(after_one[name].params, after_one["goes on"].params, rtol=0, atol=0)
        assert_close(after_two[name].params, after_two["explores"].params, rtol=0, atol=0)
    kernels = [np.asarray(after_two[name].params["heads"]["kernel"]) for name in ("goes on", "explores")]
    assert (kernels[0] != kernels[1]).any()


def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return():
    """Elsayed et al. 2024, algorithm 5, in float64 by numpy; the return starts again before the last reward."""
    config = BASE.replace(normalise_rewards=True, scheme="target-free")
    agent = stream_q.make(config, VECTOR)
    state, totals, running = agent.init(0), [], 0.0
    for step in stream(40):
        state, _ = agent.observe(state, step.next_obs[0], step.reward[0], step.ended[0])
        before, (state, metrics) = state, agent.update(state, step)
        running = 0.99 * (not step.ended[0]) * running + float(step.reward[0])
        totals.append(running)
        deviation = np.sqrt((np.var(totals, ddof=1) if len(totals) > 1 else 1.0) + 1e-8)
        np.testing.assert_allclose(moments.deviation(state.moments.returns.moments), deviation, rtol=1e-5)
    # the learner sees them so: with raw rewards and those of the last step scaled by hand, its error is the same
    raw = stream_q.make(config.replace(normalise_rewards=False), VECTOR)
    before = before._replace(moments=raw.init(0).moments)
    _, by_hand = raw.update(before, step._replace(reward=step.reward / np.float32(deviation)))
    np.testing.assert_allclose(metrics["loss"], by_hand["loss"], rtol=1e-4)


def test_observations_count_before_they_are_normalised_and_never_change_again():
    config = BASE.replace(normalise_observations=True, scheme="target-free")
    agent = stream_q.make(config, VECTOR)
    state = agent.init(0)
    frames = np.random.default_rng(0).normal(3, 2, (30, 5)).astype(np.float32)
    for n, frame in enumerate(frames, start=1):
        state, seen = agent.observe(state, frame)
        so_far = frames[:n].astype(np.float64)
        deviation = np.sqrt((so_far.var(axis=0, ddof=1) if n > 1 else 1.0) + 1e-8)
        np.testing.assert_allclose(seen, (frame - so_far.mean(axis=0)) / deviation, rtol=1e-5, atol=1e-6)
    assert seen.dtype == jnp.float32


def test_an_agent_that_does_not_normalise_sees_frames_as_they_are():
    agent = stream_q.make(scheme("target-free"), VECTOR)
    frame = np.arange(5, dtype=np.float32)
    _, seen = agent.observe(agent.init(0), frame)
    assert seen is frame
