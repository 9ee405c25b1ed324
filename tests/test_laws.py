"""Laws that relate the schemes to each other, and every loss with every scheme."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import ALL_SCHEMES, SMALL, assert_trees_close, random_batch
from helpers import make_agent as make_pure_agent
from helpers import make_compiled_agent as make_agent
from isqn.agents.meta import pair_weights
from isqn.losses import LOSSES
from isqn.train.functions import compile_agent
from isqn.types import EnvSpec, Transition


def train(agent, state, steps: int, period: int, size: int = 8):
    """Update on `steps` random batches, and refresh after every `period`-th."""
    for i in range(1, steps + 1):
        state, metrics = agent.update(state, random_batch(size=size, seed=i))
        if i % period == 0:
            state = agent.refresh(state)
    return state, metrics


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "cloning"])
@pytest.mark.parametrize(("scheme", "k"), ALL_SCHEMES)
def test_every_loss_decreases_with_every_scheme(scheme, k, loss):
    """On one batch of terminal transitions the regression targets are fixed."""
    _, agent = make_agent(
        scheme=scheme, num_bellman_iterations=k, loss=loss, hidden_sizes=(32,), conservative_weight=0.01
    )
    state = agent.init(0)
    batch = random_batch(size=4)._replace(discount=np.zeros(4, np.float32))
    state, first = agent.update(state, batch)
    for _ in range(300):
        state, last = agent.update(state, batch)
    assert np.isfinite(last["loss"])
    floor = 0.3 if loss in ("munchausen", "cql") else 0.05  # these two do not go to zero
    assert last["loss"] < floor * first["loss"] + 0.1


def test_target_based_refreshed_at_every_update_is_target_free():
    _, based = make_agent(scheme="target-based")
    _, free = make_agent(scheme="target-free")
    left, _ = train(based, based.init(3), 20, period=1)
    right, _ = train(free, free.init(3), 20, period=1)
    assert_trees_close(left.params, right.params)


def test_iterated_target_based_with_one_iteration_is_target_based():
    _, iterated = make_agent(scheme="iterated-target-based", num_bellman_iterations=1)
    _, based = make_agent(scheme="target-based")
    left, _ = train(iterated, iterated.init(3), 20, period=5)
    left = iterated.sync(left)  # D has no effect
    right, _ = train(based, based.init(3), 20, period=5)
    assert_trees_close((left.params, left.copies), (right.params, right.copies))


@pytest.mark.parametrize("loss", ["dqn", "cql"])
def test_ensemble_of_one_is_iterated_shared_with_one_iteration(loss):
    _, ensemble = make_agent(scheme="ensemble-shared", num_bellman_iterations=1, loss=loss)
    _, iterated = make_agent(scheme="iterated-shared", num_bellman_iterations=1, loss=loss)
    start = ensemble.init(3)
    heads = start.params["heads"]["kernel"]
    np.testing.assert_array_equal(heads[0], heads[1])  # paired heads of the ensemble start equal; those of iS do not
    left, _ = train(ensemble, start, 20, period=5)
    right, _ = train(iterated, start, 20, period=5)
    assert_trees_close(left.params, right.params, rtol=0, atol=0)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "cloning"])
def test_head_zero_of_iterated_shared_is_frozen_between_shifts(loss):
    _, agent = make_agent(scheme="iterated-shared", num_bellman_iterations=2, loss=loss)
    before = agent.init(0)
    after, _ = train(agent, before, 10, period=100)
    for leaf in ("kernel", "bias"):
        np.testing.assert_array_equal(after.params["heads"][leaf][0], before.params["heads"][leaf][0])
        assert (after.params["heads"][leaf][1:] != before.params["heads"][leaf][1:]).any()


def test_a_pair_of_weight_zero_does_not_learn():
    _, agent = make_agent(scheme="iterated-shared", num_bellman_iterations=3, head_weights=(1.0, 0.0, 1.0))
    before = agent.init(0)
    after, _ = train(agent, before, 5, period=100)
    changed = [(after.params["heads"]["kernel"][h] != before.params["heads"]["kernel"][h]).any() for h in range(4)]
    assert changed == [False, True, False, True]


def test_head_weights_multiply_the_losses_of_their_pairs():
    """The gradient of a head is linear in the weight of its pair."""
    _, plain = make_agent(scheme="iterated-shared", num_bellman_iterations=2)
    _, double = make_agent(scheme="iterated-shared", num_bellman_iterations=2, head_weights=(1.0, 2.0))
    batch = random_batch()
    one, _ = plain.update(plain.init(0), batch)
    two, _ = double.update(double.init(0), batch)
    first, second = (s.optimizer[0].mu["heads"]["kernel"] for s in (one, two))  # a tenth of the gradient
    np.testing.assert_allclose(second[1], first[1], rtol=1e-6)
    np.testing.assert_allclose(second[2], 2 * first[2], rtol=1e-6)


def test_the_head_weight_discount_is_a_power_of_the_pair():
    config, _ = make_agent(scheme="iterated-shared", num_bellman_iterations=3, head_weight_discount=0.25)
    assert config.pair_weights == (1.0, 0.25, 0.0625)


# -- a tabular problem: two states, two actions, everything known ------------------------------------------------

TABULAR = EnvSpec("two states", "test", (2,), "float32", 2)
# (state, action) -> (reward, next state, terminated)
DYNAMICS = {(0, 0): (0.0, 0, False), (0, 1): (1.0, 1, False), (1, 0): (2.0, 0, False), (1, 1): (5.0, 1, True)}
GAMMA = 0.9


def every_transition() -> Transition:
    one_hot = np.eye(2, dtype=np.float32)
    rows = [(one_hot[s], a, r, GAMMA * (not end), one_hot[n]) for (s, a), (r, n, end) in DYNAMICS.items()]
    obs, action, reward, discount, next_obs = map(np.array, zip(*rows, strict=True))
    return Transition(obs, action.astype(np.int32), reward.astype(np.float32), discount.astype(np.float32), next_obs)


def bellman(q: np.ndarray) -> np.ndarray:
    new = np.zeros((2, 2))
    for (s, a), (r, n, end) in DYNAMICS.items():
        new[s, a] = r + GAMMA * (not end) * q[n].max()
    return new


def table(params, head: int) -> np.ndarray:
    return np.asarray(params["heads"]["kernel"][head] + params["heads"]["bias"][head])


def fit(agent, state, updates: int):
    batch = every_transition()
    return jax.jit(lambda s: jax.lax.fori_loop(0, updates, lambda _, x: agent.update(x, batch)[0], s))(state)


def test_head_k_is_the_kth_bellman_iterate():
    """Without hidden layers the heads are tables; trained to convergence, head k is the k-th iterate of head 0."""
    _, agent = make_agent(
        TABULAR, scheme="iterated-shared", num_bellman_iterations=4, hidden_sizes=(), learning_rate=0.02
    )
    state = fit(agent, agent.init(0), 4000)
    iterate = table(state.params, 0)
    for head in range(1, 5):
        iterate = bellman(iterate)
        np.testing.assert_allclose(table(state.params, head), iterate, atol=2e-2)

    # After a shift, head k is iterate k + 1 of the old head 0.
    shifted = fit(agent, agent.refresh(state), 4000)
    np.testing.assert_allclose(table(shifted.params, 0), table(state.params, 1))
    np.testing.assert_allclose(table(shifted.params, 4), bellman(iterate), atol=2e-2)


@pytest.mark.parametrize(("scheme", "k"), ALL_SCHEMES)
def test_every_scheme_finds_the_optimal_values(scheme, k):
    optimal = np.zeros((2, 2))
    for _ in range(500):
        optimal = bellman(optimal)
    # by hand: Q*(1, 1) = 5; V(0) = 1 + 0.9 V(1); Q*(1, 0) = 2 + 0.9 V(0); so V(1) = 2.9 / 0.19 and V(0) = 1 + 0.9 V(1)
    value = 2.9 / 0.19
    np.testing.assert_allclose(optimal, [[0.9 * (1 + 0.9 * value), 1 + 0.9 * value], [value, 5.0]], rtol=1e-6)

    _, agent = make_agent(TABULAR, scheme=scheme, num_bellman_iterations=k, hidden_sizes=(), learning_rate=0.05)
    batch = every_transition()

    def cycle(_, state):
        state = jax.lax.fori_loop(0, 50, lambda _, s: agent.sync(agent.update(s, batch)[0]), state)
        return agent.refresh(state)

    state = jax.jit(lambda s: jax.lax.fori_loop(0, 300, cycle, s))(agent.init(0))
    last = agent_scheme_last(scheme, k)
    np.testing.assert_allclose(table(state.params, last), optimal, rtol=0.02)


def agent_scheme_last(scheme: str, k: int) -> int:
    config, _ = make_agent(TABULAR, scheme=scheme, num_bellman_iterations=k)
    return config.target_scheme.online[-1]


# -- acting ---------------------------------------------------------------------------------------------------


def preferring(agent, choices: list[int]):
    """Return a state whose head h prefers action choices[h] in every state."""
    state = agent.init(0)
    heads = {"kernel": jnp.zeros_like(state.params["heads"]["kernel"]), "bias": jax.nn.one_hot(jnp.array(choices), 4)}
    return state._replace(params={**state.params, "heads": heads})


def actions(agent, state, epsilon=0.0, count=300, episode=None):
    steps = jnp.arange(count)
    episodes = steps * 0 if episode is None else episode
    obs = jnp.zeros(SMALL.obs_shape)
    return np.asarray(jax.jit(jax.vmap(lambda s, e: agent.act(state, obs, epsilon, s, e).action))(steps, episodes))


def test_the_acting_head_is_drawn_from_the_online_heads_at_each_step():
    _, agent = make_agent(scheme="iterated-shared", num_bellman_iterations=3)
    drawn = actions(agent, preferring(agent, [0, 1, 2, 3]), count=3000)
    share = np.bincount(drawn, minlength=4) / 3000
    assert share[0] == 0
    np.testing.assert_allclose(share[1:], 1 / 3, atol=0.03)


def test_acting_rules_episode_last_and_mean():
    _, per_episode = make_agent(scheme="iterated-shared", num_bellman_iterations=3, acting_rule="episode")
    state = preferring(per_episode, [0, 1, 2, 3])
    assert len(set(actions(per_episode, state))) == 1
    assert set(actions(per_episode, state, episode=jnp.arange(300) // 10)) == {1, 2, 3}
    _, last = make_agent(scheme="iterated-shared", num_bellman_iterations=3, acting_rule="last")
    assert set(actions(last, preferring(last, [0, 1, 2, 3]))) == {3}
    _, mean = make_agent(scheme="iterated-shared", num_bellman_iterations=3, acting_rule="mean")
    assert set(actions(mean, preferring(mean, [0, 2, 2, 3]))) == {2}


def test_epsilon_is_the_probability_of_a_random_action():
    _, agent = make_agent(scheme="target-free")
    state = preferring(agent, [2])
    assert set(actions(agent, state, epsilon=0.0)) == {2}
    share = np.bincount(actions(agent, state, epsilon=0.4, count=4000), minlength=4) / 4000
    np.testing.assert_allclose(share, [0.1, 0.1, 0.7, 0.1], atol=0.025)


# -- meta-gradient (paper, D.4) -----------------------------------------------------------------------------------


def meta_gradient_of_logits(agent, state, batch):
    """Update, and return the gradient of the logits: ten times the first moment of the outer Adam."""
    after, metrics = agent.update(state, batch)
    return 10 * np.asarray(after.meta.optimizer[0].mu), after, metrics


def test_meta_sgd_is_the_closed_form_of_the_paper():
    """d outer / d alpha_k = -rate <grad L_k(theta), grad sum_i L_i(theta')>, over torso and head k."""
    rate, num_pairs = 0.05, 3
    _, agent = make_agent(
        scheme="iterated-shared",
        num_bellman_iterations=num_pairs,
        meta_gradient="sgd",
        learning_rate=rate,
        hidden_sizes=(7,),
    )
    state, batch = agent.init(1), random_batch(seed=5)
    logits = jnp.array([0.3, -0.2, 0.1])
    state = state._replace(meta=state.meta._replace(logits=logits))

    @jax.jit
    def gradient(params, weights):
        """Return the gradient of the weighted sum of pair losses."""

        def loss(params):
            return jnp.dot(weights, agent.losses(params, state.statistics, state.copies, batch)[0])

        return jax.grad(loss)(params)

    alpha = pair_weights(logits)
    stepped = jax.tree.map(lambda p, g: p - rate * g, state.params, gradient(state.params, alpha))
    outer = gradient(stepped, np.ones(num_pairs))
    closed = []
    for k in range(num_pairs):
        inner = gradient(state.params, np.eye(num_pairs)[k])
        products = jax.tree.map(lambda a, b: jnp.vdot(a, b), inner, outer)
        closed.append(-rate * sum(map(float, jax.tree.leaves(products))))
    through_softmax = jax.jacobian(pair_weights)(logits).T @ jnp.array(closed)

    actual, after, metrics = meta_gradient_of_logits(agent, state, batch)
    np.testing.assert_allclose(actual, through_softmax, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(metrics["pair_weight"], alpha, rtol=1e-6)
    assert_trees_close(after.params, stepped)  # the step uses the old weights


def test_meta_gradient_through_adam_is_finite_with_dead_units_and_changes_the_weights():
    _, agent = make_agent(
        scheme="iterated-shared", num_bellman_iterations=3, meta_gradient="adam", meta_learning_rate=0.01
    )
    state = agent.init(0)
    dead = state.params["torso"]["Dense_0"]["bias"].at[0].set(-1e6)
    torso = {"Dense_0": {**state.params["torso"]["Dense_0"], "bias": dead}}
    state = state._replace(params={**state.params, "torso": torso})
    for i in range(20):
        state, _ = agent.update(state, random_batch(seed=i))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert (state.meta.logits != 0).all()
    assert float(pair_weights(state.meta.logits).sum()) == pytest.approx(3, rel=1e-5)


def test_equal_meta_weights_give_the_plain_update():
    settings = {"scheme": "iterated-shared", "num_bellman_iterations": 3}
    _, plain = make_agent(**settings)
    _, meta = make_agent(**settings, meta_gradient="adam")
    batch = random_batch()
    left, _ = plain.update(plain.init(0), batch)
    right, _ = meta.update(meta.init(0), batch)
    assert_trees_close(left.params, right.params, rtol=1e-3, atol=1e-4)  # up to eps_root


def test_the_host_loop_takes_the_observation_that_the_agent_makes():
    """As the compiled loop does; a frame that the agent leaves as it is comes back as the same object."""
    (_, agent, *_), frame = make_pure_agent(), np.array([1.0, 2.0, 3.0], np.float32)
    state = agent.init(0)
    for name in ("observe", "observe_eval"):
        call = getattr(compile_agent(agent._replace(**{name: lambda state, frame, *_: (state, 10 * frame)})), name)
        np.testing.assert_array_equal(call(state, frame)[1], [10, 20, 30])
        call = getattr(compile_agent(agent._replace(**{name: lambda state, frame, *_: (state, frame)})), name)
        assert call(state, frame)[1] is frame
        assert getattr(compile_agent(agent), name)(state, frame)[1] is frame
