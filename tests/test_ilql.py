"""Implicit language Q-learning: laws between the schemes, the loss by hand, and what is written by which weights."""

from __future__ import annotations

from functools import cache

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isqn.language.game as wordle
from helpers import TINY_WRITER, assert_trees_close
from isqn import agents, losses
from isqn.language.agent import make_writer, steps_of
from isqn.language.data import Trajectories, of_players, to_tokens
from isqn.language.game import SPEC, encode
from isqn.language.heads import of_twins
from isqn.language.play import compile_writer, hidden_words, returns_to_go, shares
from isqn.language.words import find_words
from isqn.presets import preset_config
from isqn.train import language
from isqn.types import TokenValues, Transition

WORDS = find_words("common", 8)
SMALL = preset_config("wordle-mini").replace(**TINY_WRITER, batch_size=4, micro_batch_size=0, target_step_size=5e-3)
TB, TF = SMALL.replace(scheme="target-based"), SMALL.replace(scheme="target-free")


def iterated(k: int, **more):
    return SMALL.replace(scheme="iterated-shared", num_bellman_iterations=k, **more)


@cache
def begun(config):
    agent = agents.make(config, SPEC)
    return agent, jax.jit(agent.init)(0)


@cache
def games(count: int = 4):
    return of_players(WORDS, 0.5).sample(count, np.random.default_rng(0))


def keys(config):
    return jax.random.split(jax.random.key(0), 2 + config.target_scheme.num_copies)


def loss_and_gradient(config, params, copies=()):
    agent, _ = begun(config)

    def summed(params):
        return agent.losses(params, copies, games(), keys(config))[0].sum()

    return jax.jit(jax.value_and_grad(summed))(params)


# -- the loss


def test_the_loss_of_a_token_by_hand():
    """Two functions over three tokens, token 1 was written; reward -1, V' = -2, discount 0.5: y = -2."""
    online = TokenValues(
        q=jnp.array([[0.0, -1.0, 0.0], [0.0, -3.0, 0.0]]), v=jnp.float32(-2.0), next_v=jnp.float32(9.0)
    )
    aim = TokenValues(q=jnp.array([[5.0, -1.5, 5.0], [5.0, -1.0, 5.0]]), v=jnp.float32(7.0), next_v=jnp.float32(-2.0))
    step = Transition((), 1, -1.0, 0.5, ())
    value = 0.7 * 0.5**2  # the smaller of -1.5 and -1 is above V = -2 by 0.5
    bellman = (-2 + 1) ** 2 + (-2 + 3) ** 2
    spread = np.log(2 + np.exp(-1)) + 1 + np.log(2 + np.exp(-3)) + 3
    found = losses.ilql(online, aim, step, expectile_level=0.7, conservative_weight=0.1)
    assert float(found) == pytest.approx(value + bellman + 0.1 * spread, rel=1e-6)


def test_steps_of_a_game():
    """Three guesses, the last of them right: 18 steps, -1 at the ends of the first two, and no future after the last.
    The next state of the end of a guess is behind its colours."""
    words = encode(WORDS)
    told = to_tokens(Trajectories(np.array([2]), np.array([[0, 1, 2, -1, -1, -1]])), words)
    steps, real = steps_of(told, SPEC, 0.99)
    assert real[0].sum() == 18
    assert real[0, :18].all()
    assert told.tokens[0, 12 * 3 + 1] == wordle.END_GAME
    np.testing.assert_array_equal(np.flatnonzero(steps.reward[0]), [5, 11])
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(steps.discount)[0, :18] == 0), [17])
    expected = [token for word in words[:3] for token in (*word, wordle.END_ACTION)]
    np.testing.assert_array_equal(steps.action[0, :18], expected)
    assert list(SPEC.states[5:7]) == [5, 12]
    assert told.tokens[0, 12] == wordle.END_STATE
    assert len(SPEC.states) == 37
    assert SPEC.states[-1] == 72


def test_a_game_that_was_broken_off_bootstraps_and_a_lost_one_does_not():
    words = encode(WORDS)
    six = np.array([[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1]])
    told = to_tokens(Trajectories(np.array([7, 7]), six), words)
    np.testing.assert_array_equal(told.finished, [True, False])
    steps, real = steps_of(told, SPEC, 0.99)
    assert np.asarray(steps.discount)[0, 35] == 0
    assert np.asarray(steps.discount)[1, 11] == pytest.approx(0.99)
    np.testing.assert_array_equal(real.sum(axis=1), [36, 12])


def test_returns_to_go_by_hand():
    words = encode(WORDS)
    told = to_tokens(Trajectories(np.array([1]), np.array([[0, 1, -1, -1, -1, -1]])), words)
    later = returns_to_go(told, 0.5)
    np.testing.assert_allclose(later[0, :7], [-(0.5**5), -(0.5**4), -(0.5**3), -(0.5**2), -0.5, -1, 0])


def test_the_losses_of_games_are_those_of_their_steps():
    """Step by step, with places counted by hand: the state of token j of guess n is its place 12 n + j, and behind the
    end of a guess come five colours and their end before the next one."""
    config = iterated(2)
    agent, state = begun(config)
    values = agent.network
    features, _ = values.features(state.params, games().tokens)
    q, v = values.q(state.params, features), values.v(state.params, features)
    total, count = np.zeros(2), 0
    for game in range(4):
        for step in range(6 * int(games().num_actions[game])):
            guess, letter = divmod(step, 6)
            place = 12 * guess + letter
            following = place + 1 if letter < 5 else place + 7
            last = bool(games().finished[game]) and step == 6 * int(games().num_actions[game]) - 1
            token = int(games().tokens[game, place + 1])
            seen = Transition((), token, float(games().rewards[game, step]), 0.0 if last else 0.99, ())
            for pair in range(2):
                now = TokenValues(q[:, game, place, pair + 1], v[game, place, pair + 1], jnp.float32(np.nan))
                aim = TokenValues(q[:, game, place, pair], jnp.float32(np.nan), v[game, following, pair + 1])
                total[pair] += losses.ilql(now, aim, seen, expectile_level=0.7, conservative_weight=1e-4)
            count += 1
    found, _ = agent.losses(state.params, (), games(), keys(config))
    np.testing.assert_allclose(found, total / count, rtol=1e-4)


# -- laws between the schemes


def test_target_based_with_a_copy_of_itself_is_target_free():
    _, state = begun(TF)
    based = loss_and_gradient(TB, state.params, (of_twins(state.params),))
    assert_trees_close(based, loss_and_gradient(TF, state.params))


@pytest.mark.parametrize("heads", ["A", "B", "C"])
def test_iterated_with_two_equal_heads_is_target_free(heads):
    _, state = begun(TF)
    tied = {**state.params, "heads": jax.tree.map(lambda w: jnp.repeat(w, 2, axis=0), state.params["heads"])}
    loss, grads = loss_and_gradient(iterated(1, bellman_heads=heads), tied)
    free, expected = loss_and_gradient(TF, state.params)
    np.testing.assert_allclose(loss, free, rtol=1e-6)
    assert_trees_close(grads["torso"], expected["torso"])
    assert_trees_close(jax.tree.map(lambda w: w[1:], grads["heads"]), expected["heads"])


@pytest.mark.parametrize("heads", ["A", "B", "C"])
def test_the_first_head_gets_no_gradient(heads):
    config = iterated(3, bellman_heads=heads)
    _, state = begun(config)
    _, grads = loss_and_gradient(config, state.params)
    for leaf in jax.tree.leaves(grads["heads"]):
        assert not np.any(leaf[0])
        assert all(np.any(leaf[head]) for head in (1, 2, 3))


def test_who_learns_from_whom():
    """With A, V_k looks at Q_k-1 only; with B Q_k at V_k-1; with C both look back: what changes if head 0 does."""
    _, state = begun(iterated(1))

    def moved(name):
        heads = {**state.params["heads"], name: jax.tree.map(lambda w: w.at[0].add(1.0), state.params["heads"][name])}
        return {**state.params, "heads": heads}

    for letter, seen in (
        ("A", {"q1": True, "v": False}),
        ("B", {"q1": False, "v": True}),
        ("C", {"q1": True, "v": True}),
    ):
        config = iterated(1, bellman_heads=letter)
        before, _ = loss_and_gradient(config, state.params)
        for name, matters in seen.items():
            after, _ = loss_and_gradient(config, moved(name))
            assert (abs(after - before) > 1e-6) == matters, (letter, name)


def test_what_is_behind_the_end_of_a_game_does_not_matter():
    agent, state = begun(iterated(1))
    told = games()
    behind = np.arange(told.tokens.shape[1]) >= np.array([(row != wordle.PAD).sum() for row in told.tokens])[:, None]
    assert behind.any()
    other = told._replace(tokens=np.where(behind, 3, told.tokens))
    losses = jax.jit(agent.losses)
    assert_trees_close(losses(state.params, (), told, keys(SMALL))[0], losses(state.params, (), other, keys(SMALL))[0])


def test_target_dropout_can_be_turned_off():
    """The target's own mask: without it, only the values that learn are dropped from."""
    dropping = TB.replace(dropout=0.5)
    results = []
    for target_dropout in (True, False):
        config = dropping.replace(target_dropout=target_dropout)
        agent, state = begun(config)
        of = jax.jit(agent.losses)
        two = [
            of(state.params, state.copies, games(), jnp.stack([*keys(TB)[:2], key]))[0]
            for key in (jax.random.key(1), jax.random.key(2))
        ]
        results.append(float(two[0][0]) == float(two[1][0]))
    assert results == [False, True]


# -- updates


def test_an_update_moves_the_copy_a_little_and_leaves_it_without_v():
    agent, state = begun(TB)
    after, _ = jax.jit(agent.update)(state, games())
    expected = jax.tree.map(lambda old, new: 0.995 * old + 0.005 * new, state.copies[0], of_twins(after.params))
    assert_trees_close(after.copies[0], expected, rtol=1e-6)
    assert "v" not in after.copies[0]["heads"]
    assert int(after.optimizer.updates) == 1


def test_an_update_shifts_all_heads_at_once():
    """omega_k moves by 5e-3 towards omega_k+1 as it was: head 0 must not see what head 1 has become."""
    config = iterated(2, learning_rate=0.0)
    agent, state = begun(config)
    after, _ = jax.jit(agent.update)(state, games())
    for name in ("q1", "q2", "v"):
        old, new = state.params["heads"][name]["kernel"], after.params["heads"][name]["kernel"]
        np.testing.assert_allclose(new[:2], 0.995 * old[:2] + 0.005 * old[1:], rtol=1e-6)
        np.testing.assert_array_equal(new[2], old[2])
    first = iterated(2, learning_rate=0.0, refreshed_heads="first")
    after, _ = jax.jit(agents.make(first, SPEC).update)(state, games())
    old, new = state.params["heads"]["v"]["kernel"], after.params["heads"]["v"]["kernel"]
    np.testing.assert_array_equal(new[1], old[1])
    assert np.any(new[0] != old[0])


def test_values_and_policy_learn_apart():
    """Cloning does not depend on the scheme, so one trained policy serves all. Of Adam the first moments are compared:
    its steps make as much of gradients that are zero but for rounding, as those of the keys' biases."""
    policies = [
        jax.jit(agents.make(c, SPEC).update)(begun(c)[1], games())[0].optimizer.adam[0].mu[1]
        for c in (TB, TF, iterated(3))
    ]
    assert_trees_close(policies[0], policies[1], rtol=1e-6)
    assert_trees_close(policies[0], policies[2], rtol=1e-6)


def test_a_policy_that_is_taken_from_a_run_stays_as_it_is():
    config = TF.replace(policy_checkpoint="somewhere")
    agent, state = begun(config)
    after, metrics = jax.jit(agent.update)(state, games())
    jax.tree.map(np.testing.assert_array_equal, after.policy, state.policy)
    assert "cloning_loss" not in metrics
    other, _ = jax.jit(begun(TF)[0].update)(begun(TF)[1], games())
    assert_trees_close(after.optimizer.adam[0].mu[0], other.optimizer.adam[0].mu[0], rtol=1e-6)


def test_micro_batches_are_averaged():
    """Adam's first moment is a tenth of the gradient: the mean of those of games 0, 2 and 1, 3."""
    whole, parts = TF, TF.replace(micro_batch_size=2)
    agent, state = begun(whole)
    split, metrics = jax.jit(agents.make(parts, SPEC).update)(state, games())
    halves = [jax.jit(agent.update)(state, jax.tree.map(lambda x, i=i: x[i::2], games())) for i in (0, 1)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, halves[0][0].optimizer.adam[0].mu, halves[1][0].optimizer.adam[0].mu)
    assert_trees_close(split.optimizer.adam[0].mu, mean, rtol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(np.mean([m["loss"] for _, m in halves]), rel=1e-5)


# -- writing


def judged(config, state, tokens):
    return jax.jit(make_writer(config, SPEC).judge)(state._replace(optimizer=()), tokens)


def test_weights_of_tokens():
    """exp(beta A) without the clip, at most 1 with it, nothing at beta 0; the pad is never written."""
    _, state = begun(iterated(1))
    tokens = games().tokens
    plain = judged(iterated(1, inverse_temperature=0.0), state, tokens)
    np.testing.assert_array_equal(plain.scores, plain.cloned)  # at beta 0 the policy alone
    logits = plain.cloned
    advantage = np.asarray(plain.q - plain.v[..., None])
    written = [token for token in range(35) if token != wordle.PAD]
    for clip in (False, True):
        found = judged(iterated(1, clip_advantages=clip), state, tokens).scores - logits
        expected = np.minimum(4 * advantage, 0) if clip else 4 * advantage
        np.testing.assert_allclose(np.asarray(found)[..., written], expected[..., written], rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(logits)[..., wordle.PAD] == -np.inf)


def test_averages_over_heads():
    """In the space of weights or of advantages, over heads 1..K or all."""
    config = iterated(2, clip_advantages=False)
    _, state = begun(config)
    tokens = games().tokens
    alone = []
    for head in range(3):
        heads = jax.tree.map(lambda w, head=head: w[head : head + 1], state.params["heads"])
        alone.append(
            judged(
                TF.replace(clip_advantages=False), state._replace(params={**state.params, "heads": heads}), tokens
            ).scores
        )
    policy = judged(TF.replace(inverse_temperature=0.0), begun(TF)[1]._replace(policy=state.policy), tokens).scores
    weights = [np.asarray(one - policy)[..., :26] for one in alone]
    for average_of, averaged, expected in (
        ("weights", "learned", np.log((np.exp(weights[1]) + np.exp(weights[2])) / 2)),
        ("weights", "all", np.log(sum(map(np.exp, weights)) / 3)),
        ("advantages", "learned", (weights[1] + weights[2]) / 2),
    ):
        chosen = config.replace(average_of=average_of, averaged_heads=averaged)
        found = np.asarray(judged(chosen, state, tokens).scores - policy)[..., :26]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_whose_q_decides():
    _, state = begun(TB)
    tokens = games().tokens
    far = state._replace(copies=(jax.tree.map(lambda w: w + 0.1, state.copies[0]),))
    by_target, by_online = (judged(TB.replace(deciding_q=q), far, tokens) for q in ("target", "online"))
    assert np.any(np.asarray(by_target.q) != np.asarray(by_online.q))
    assert_trees_close(by_online.q, judged(TF, state._replace(copies=()), tokens).q)


CLONING = TF.replace(inverse_temperature=0.0)


@pytest.mark.parametrize(
    "config",
    [TB, TB.replace(deciding_q="online"), TF, CLONING, iterated(2)],
    ids=["TB", "TB online", "TF", "policy", "iS"],
)
def test_games_at_once_are_those_of_one_token_at_a_time(config, monkeypatch):
    """With what it has read in a cache, guess by guess, an agent writes what it writes from the whole game so far; and
    however many games it plays at once."""
    monkeypatch.setattr(language, "AT_ONCE", 2)
    agent, state = begun(config)
    after = jax.jit(agent.update)
    for _ in range(20):
        state, _ = after(state, games())
    # it writes hardly any words yet, so that guesses of other lengths occur too
    hidden = encode(WORDS[:3])
    together = compile_writer(config).play(state, hidden, seed=0)
    act = jax.jit(agent.act)
    env = gymnasium.make(wordle.ENV_ID, num_words=8).unwrapped
    for index, word in enumerate(WORDS[:3]):
        obs, _ = env.reset(options={"word": word})
        over = False
        while not over:
            action = int(act(state, obs, 0.0, 0, 0).action)
            obs, _, over, _, _ = env.step(action)
        np.testing.assert_array_equal(obs, together.tokens[index])


def test_sampled_guesses_follow_their_seed():
    config = TF.replace(acting_rule="sample")
    _, state = begun(config)
    play = compile_writer(config).play
    first, again, other = (play(state, encode(WORDS[:2]), seed).tokens for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


def test_shares_of_guesses_by_hand():
    """ "about", then two letters only, then a word that the clues allow; and "about" twice, which they do not."""
    played = wordle.Games(encode(["beach"]))
    for text in ("about", "ab", "beach"):
        for token in [*(ord(letter) - 97 for letter in text), wordle.END_ACTION]:
            played.step(np.array([token]))
    found = shares(played, ["beach", "about"])
    assert found == {"valid_share": 2 / 3, "dictionary_share": 2 / 3, "consistent_share": 2 / 3}
    again = wordle.Games(encode(["beach"]))
    for text in ("about", "about"):
        for token in [*(ord(letter) - 97 for letter in text), wordle.END_ACTION]:
            again.step(np.array([token]))
    assert shares(again, ["beach"])["consistent_share"] == 1 / 2
    assert shares(again, ["beach"])["dictionary_share"] == 0


def test_each_word_is_hidden_as_often_as_any_other():
    drawn = hidden_words(WORDS, 24, seed=3)
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    np.testing.assert_array_equal(counts, np.full(8, 3))
    assert np.any(drawn != hidden_words(WORDS, 24, seed=4))
