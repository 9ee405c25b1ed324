"""Implicit language Q-learning: the loss by hand, laws between the schemes, updates and decoding."""

from __future__ import annotations

from functools import cache

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isqn.language.game as wordle
from helpers import TINY_WRITER, assert_trees_close
from isqn.language import play
from isqn.language.agent import make
from isqn.language.data import Trajectories, source_from_players, to_tokens
from isqn.language.decoding import make_decoder
from isqn.language.game import SPEC, encode
from isqn.language.heads import without_v
from isqn.language.learning import to_transitions
from isqn.language.losses import ilql
from isqn.language.play import compile_decoder, draw_hidden_words, guess_statistics, returns_to_go
from isqn.language.types import TokenValues
from isqn.language.words import load_words
from isqn.presets import preset_config
from isqn.types import Transition

WORDS = load_words("common", 8)
SMALL = preset_config("wordle-mini").replace(**TINY_WRITER, batch_size=4, micro_batch_size=0, target_step_size=5e-3)
TB, TF = SMALL.replace(scheme="target-based"), SMALL.replace(scheme="target-free")


def iterated(k: int, **more):
    return SMALL.replace(scheme="iterated-shared", num_bellman_iterations=k, **more)


@cache
def initialised(config):
    agent = make(config, SPEC)
    return agent, jax.jit(agent.init)(0)


@cache
def games(count: int = 4):
    return source_from_players(WORDS, 0.5).sample(count, np.random.default_rng(0))


def dropout_keys(config):
    return jax.random.split(jax.random.key(0), 2 + config.target_scheme.num_copies)


def loss_and_gradient(config, params, copies=()):
    agent, _ = initialised(config)

    def summed(params):
        return agent.losses(params, copies, games(), dropout_keys(config))[0].sum()

    return jax.jit(jax.value_and_grad(summed))(params)


# -- the loss


def test_the_loss_of_a_token_by_hand():
    """Q1 and Q2 of three tokens, of which token 1 was written; reward -1, V' = -2, discount 0.5: target -2."""
    online = TokenValues(
        q=jnp.array([[0.0, -1.0, 0.0], [0.0, -3.0, 0.0]]), v=jnp.float32(-2.0), next_v=jnp.float32(9.0)
    )
    target = TokenValues(
        q=jnp.array([[5.0, -1.5, 5.0], [5.0, -1.0, 5.0]]), v=jnp.float32(7.0), next_v=jnp.float32(-2.0)
    )
    step = Transition((), 1, -1.0, 0.5, ())
    value = 0.7 * 0.5**2  # the smaller of -1.5 and -1 is above V = -2 by 0.5
    bellman = (-2 + 1) ** 2 + (-2 + 3) ** 2
    spread = np.log(2 + np.exp(-1)) + 1 + np.log(2 + np.exp(-3)) + 3
    loss = ilql(online, target, step, expectile_level=0.7, conservative_weight=0.1)
    assert float(loss) == pytest.approx(value + bellman + 0.1 * spread, rel=1e-6)


def test_transitions_of_a_game():
    """Three guesses, the last of them right: 18 steps, -1 at the ends of the first two, discount 0 at the last.

    The state after the end of a guess comes after its colours.
    """
    words = encode(WORDS)
    tokens = to_tokens(Trajectories(np.array([2]), np.array([[0, 1, 2, -1, -1, -1]])), words)
    steps, is_step = to_transitions(tokens, SPEC, 0.99)
    assert is_step[0].sum() == 18
    assert is_step[0, :18].all()
    assert tokens.tokens[0, 12 * 3 + 1] == wordle.END_GAME
    np.testing.assert_array_equal(np.flatnonzero(steps.reward[0]), [5, 11])
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(steps.discount)[0, :18] == 0), [17])
    expected = [token for word in words[:3] for token in (*word, wordle.END_ACTION)]
    np.testing.assert_array_equal(steps.action[0, :18], expected)
    assert list(SPEC.state_positions[5:7]) == [5, 12]
    assert tokens.tokens[0, 12] == wordle.END_STATE
    assert len(SPEC.state_positions) == 37
    assert SPEC.state_positions[-1] == 72


def test_a_game_that_was_broken_off_bootstraps_and_a_lost_one_does_not():
    words = encode(WORDS)
    guesses = np.array([[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1]])
    tokens = to_tokens(Trajectories(np.array([7, 7]), guesses), words)
    np.testing.assert_array_equal(tokens.finished, [True, False])
    steps, is_step = to_transitions(tokens, SPEC, 0.99)
    assert np.asarray(steps.discount)[0, 35] == 0
    assert np.asarray(steps.discount)[1, 11] == pytest.approx(0.99)
    np.testing.assert_array_equal(is_step.sum(axis=1), [36, 12])


def test_returns_to_go_by_hand():
    words = encode(WORDS)
    tokens = to_tokens(Trajectories(np.array([1]), np.array([[0, 1, -1, -1, -1, -1]])), words)
    returns = returns_to_go(tokens, 0.5)
    np.testing.assert_allclose(returns[0, :7], [-(0.5**5), -(0.5**4), -(0.5**3), -(0.5**2), -0.5, -1, 0])


def test_the_loss_of_a_batch_is_the_mean_over_its_steps():
    """Worked out by hand: token j of guess n is at position 12 n + j, and the answer takes six tokens."""
    config = iterated(2)
    agent, state = initialised(config)
    values = agent.network
    features, _ = values.features(state.params, games().tokens)
    q, v = values.q(state.params, features), values.v(state.params, features)
    total, count = np.zeros(2), 0
    for game in range(4):
        for step in range(6 * int(games().num_actions[game])):
            guess, letter = divmod(step, 6)
            position = 12 * guess + letter
            following = position + 1 if letter < 5 else position + 7
            last = bool(games().finished[game]) and step == 6 * int(games().num_actions[game]) - 1
            token = int(games().tokens[game, position + 1])
            transition = Transition((), token, float(games().rewards[game, step]), 0.0 if last else 0.99, ())
            for pair in range(2):
                online = TokenValues(q[:, game, position, pair + 1], v[game, position, pair + 1], jnp.float32(np.nan))
                target = TokenValues(q[:, game, position, pair], jnp.float32(np.nan), v[game, following, pair + 1])
                total[pair] += ilql(online, target, transition, expectile_level=0.7, conservative_weight=1e-4)
            count += 1
    losses, _ = agent.losses(state.params, (), games(), dropout_keys(config))
    np.testing.assert_allclose(losses, total / count, rtol=1e-4)


# -- laws between the schemes


def test_target_based_with_a_copy_of_itself_is_target_free():
    _, state = initialised(TF)
    target_based = loss_and_gradient(TB, state.params, (without_v(state.params),))
    assert_trees_close(target_based, loss_and_gradient(TF, state.params))


@pytest.mark.parametrize("heads", ["A", "B", "C"])
def test_iterated_with_two_equal_heads_is_target_free(heads):
    _, state = initialised(TF)
    tied = {**state.params, "heads": jax.tree.map(lambda w: jnp.repeat(w, 2, axis=0), state.params["heads"])}
    loss, grads = loss_and_gradient(iterated(1, bellman_heads=heads), tied)
    expected_loss, expected = loss_and_gradient(TF, state.params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_trees_close(grads["torso"], expected["torso"])
    assert_trees_close(jax.tree.map(lambda w: w[1:], grads["heads"]), expected["heads"])


@pytest.mark.parametrize("heads", ["A", "B", "C"])
def test_the_first_head_gets_no_gradient(heads):
    config = iterated(3, bellman_heads=heads)
    _, state = initialised(config)
    _, grads = loss_and_gradient(config, state.params)
    for leaf in jax.tree.leaves(grads["heads"]):
        assert not np.any(leaf[0])
        assert all(np.any(leaf[head]) for head in (1, 2, 3))


def test_targets_of_the_bellman_heads():
    """A: V_k learns from Q_k-1, Q_k from V_k. B: Q_k from V_k-1, V_k from Q_k. C: both from head k-1.

    The loss depends on a value of head 0 where it is a target.
    """
    _, state = initialised(iterated(1))

    def moved(name):
        heads = {**state.params["heads"], name: jax.tree.map(lambda w: w.at[0].add(1.0), state.params["heads"][name])}
        return {**state.params, "heads": heads}

    for letter, is_target in (
        ("A", {"q1": True, "v": False}),
        ("B", {"q1": False, "v": True}),
        ("C", {"q1": True, "v": True}),
    ):
        config = iterated(1, bellman_heads=letter)
        before, _ = loss_and_gradient(config, state.params)
        for name, matters in is_target.items():
            after, _ = loss_and_gradient(config, moved(name))
            assert (abs(after - before) > 1e-6) == matters, (letter, name)


def test_losses_do_not_depend_on_tokens_after_the_end():
    agent, state = initialised(iterated(1))
    batch, keys = games(), dropout_keys(SMALL)
    lengths = np.array([(row != wordle.PAD).sum() for row in batch.tokens])
    is_padding = np.arange(batch.tokens.shape[1]) >= lengths[:, None]
    assert is_padding.any()
    other = batch._replace(tokens=np.where(is_padding, 3, batch.tokens))
    losses = jax.jit(agent.losses)
    assert_trees_close(losses(state.params, (), batch, keys)[0], losses(state.params, (), other, keys)[0])


def test_target_dropout_can_be_turned_off():
    """Without it, the loss does not depend on the dropout key of the target network."""
    results = []
    for target_dropout in (True, False):
        config = TB.replace(dropout=0.5, target_dropout=target_dropout)
        agent, state = initialised(config)
        losses = jax.jit(agent.losses)
        first, second = (
            losses(state.params, state.copies, games(), jnp.stack([*dropout_keys(TB)[:2], key]))[0]
            for key in (jax.random.key(1), jax.random.key(2))
        )
        results.append(float(first[0]) == float(second[0]))
    assert results == [False, True]


# -- updates


def test_an_update_moves_the_target_network_which_has_no_v():
    agent, state = initialised(TB)
    after, _ = jax.jit(agent.update)(state, games())
    expected = jax.tree.map(lambda old, new: 0.995 * old + 0.005 * new, state.copies[0], without_v(after.params))
    assert_trees_close(after.copies[0], expected, rtol=1e-6)
    assert "v" not in after.copies[0]["heads"]
    assert int(after.optimizer.updates) == 1


def test_an_update_shifts_all_heads_at_once():
    """Head k moves by 5e-3 towards head k+1 as it was before the update."""
    config = iterated(2, learning_rate=0.0)
    agent, state = initialised(config)
    after, _ = jax.jit(agent.update)(state, games())
    for name in ("q1", "q2", "v"):
        old, new = state.params["heads"][name]["kernel"], after.params["heads"][name]["kernel"]
        np.testing.assert_allclose(new[:2], 0.995 * old[:2] + 0.005 * old[1:], rtol=1e-6)
        np.testing.assert_array_equal(new[2], old[2])
    first = iterated(2, learning_rate=0.0, refreshed_heads="first")
    after, _ = jax.jit(make(first, SPEC).update)(state, games())
    old, new = state.params["heads"]["v"]["kernel"], after.params["heads"]["v"]["kernel"]
    np.testing.assert_array_equal(new[1], old[1])
    assert np.any(new[0] != old[0])


def test_the_cloned_policy_does_not_depend_on_the_scheme():
    """So that one trained policy serves all schemes.

    The first moments of Adam are compared: its steps enlarge gradients that are zero but for rounding.
    """
    policies = [
        jax.jit(make(c, SPEC).update)(initialised(c)[1], games())[0].optimizer.adam[0].mu[1]
        for c in (TB, TF, iterated(3))
    ]
    assert_trees_close(policies[0], policies[1], rtol=1e-6)
    assert_trees_close(policies[0], policies[2], rtol=1e-6)


def test_a_policy_of_another_run_is_not_trained():
    config = TF.replace(policy_checkpoint="somewhere")
    agent, state = initialised(config)
    after, metrics = jax.jit(agent.update)(state, games())
    jax.tree.map(np.testing.assert_array_equal, after.policy, state.policy)
    assert "cloning_loss" not in metrics
    other, _ = jax.jit(initialised(TF)[0].update)(initialised(TF)[1], games())
    assert_trees_close(after.optimizer.adam[0].mu[0], other.optimizer.adam[0].mu[0], rtol=1e-6)


def test_micro_batches_are_averaged():
    """The gradient, a tenth of which is Adam's first moment, is the mean of those of games 0, 2 and of games 1, 3."""
    whole, parts = TF, TF.replace(micro_batch_size=2)
    agent, state = initialised(whole)
    split, metrics = jax.jit(make(parts, SPEC).update)(state, games())
    halves = [jax.jit(agent.update)(state, jax.tree.map(lambda x, i=i: x[i::2], games())) for i in (0, 1)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, halves[0][0].optimizer.adam[0].mu, halves[1][0].optimizer.adam[0].mu)
    assert_trees_close(split.optimizer.adam[0].mu, mean, rtol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(np.mean([m["loss"] for _, m in halves]), rel=1e-5)


# -- decoding


def scored(config, state, tokens):
    return jax.jit(make_decoder(config, SPEC).score)(state._replace(optimizer=()), tokens)


def test_weights_of_tokens():
    """The weight is exp(beta A), at most 1 with the clip, and 1 if beta is 0; padding is never written."""
    _, state = initialised(iterated(1))
    tokens = games().tokens
    plain = scored(iterated(1, inverse_temperature=0.0), state, tokens)
    np.testing.assert_array_equal(plain.scores, plain.policy_scores)  # if beta is 0, the policy alone
    policy_scores = plain.policy_scores
    advantage = np.asarray(plain.q - plain.v[..., None])
    writable = [token for token in range(35) if token != wordle.PAD]
    for clip in (False, True):
        weights = scored(iterated(1, clip_advantages=clip), state, tokens).scores - policy_scores
        expected = np.minimum(4 * advantage, 0) if clip else 4 * advantage
        np.testing.assert_allclose(np.asarray(weights)[..., writable], expected[..., writable], rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(policy_scores)[..., wordle.PAD] == -np.inf)


def test_averages_over_heads():
    """Weights or advantages are averaged, over heads 1 to K or over all."""
    config = iterated(2, clip_advantages=False)
    _, state = initialised(config)
    tokens = games().tokens
    single = []
    for head in range(3):
        heads = jax.tree.map(lambda w, head=head: w[head : head + 1], state.params["heads"])
        one_head = state._replace(params={**state.params, "heads": heads})
        single.append(scored(TF.replace(clip_advantages=False), one_head, tokens).scores)
    policy = scored(
        TF.replace(inverse_temperature=0.0), initialised(TF)[1]._replace(policy=state.policy), tokens
    ).scores
    weights = [np.asarray(scores - policy)[..., :26] for scores in single]
    for average_of, averaged, expected in (
        ("weights", "learned", np.log((np.exp(weights[1]) + np.exp(weights[2])) / 2)),
        ("weights", "all", np.log(sum(map(np.exp, weights)) / 3)),
        ("advantages", "learned", (weights[1] + weights[2]) / 2),
    ):
        chosen = config.replace(average_of=average_of, averaged_heads=averaged)
        log_weights = np.asarray(scored(chosen, state, tokens).scores - policy)[..., :26]
        np.testing.assert_allclose(log_weights, expected, rtol=1e-3, atol=1e-5)


def test_the_network_whose_q_weighs_tokens():
    _, state = initialised(TB)
    tokens = games().tokens
    moved = state._replace(copies=(jax.tree.map(lambda w: w + 0.1, state.copies[0]),))
    by_target, by_online = (scored(TB.replace(deciding_q=q), moved, tokens) for q in ("target", "online"))
    assert np.any(np.asarray(by_target.q) != np.asarray(by_online.q))
    assert_trees_close(by_online.q, scored(TF, state._replace(copies=()), tokens).q)


CLONING = TF.replace(inverse_temperature=0.0)


@pytest.mark.parametrize(
    "config",
    [TB, TB.replace(deciding_q="online"), TF, CLONING, iterated(2)],
    ids=["TB", "TB online", "TF", "policy", "iS"],
)
def test_games_with_caches_equal_those_of_one_token_at_a_time(config, monkeypatch):
    """Writing whole guesses with caches, two games at once, equals acting on the whole game so far."""
    monkeypatch.setattr(play, "GAMES_AT_ONCE", 2)
    agent, state = initialised(config)
    update = jax.jit(agent.update)
    for _ in range(20):  # the agent writes hardly any words yet, so that guesses of other lengths occur too
        state, _ = update(state, games())
    hidden = encode(WORDS[:3])
    together = compile_decoder(config).play(state, hidden, seed=0)
    act = jax.jit(agent.act)
    env = gymnasium.make(wordle.ENV_ID, num_words=8).unwrapped
    for index, word in enumerate(WORDS[:3]):
        obs, _ = env.reset(options={"word": word})
        over = False
        while not over:
            action = int(act(state, obs, 0.0, 0, 0).action)
            obs, _, over, _, _ = env.step(action)
        np.testing.assert_array_equal(obs, together.tokens[index])


def test_sampled_guesses_depend_on_the_seed_alone():
    config = TF.replace(acting_rule="sample")
    _, state = initialised(config)
    decoder = compile_decoder(config)
    first, again, other = (decoder.play(state, encode(WORDS[:2]), seed).tokens for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


def test_statistics_of_guesses_by_hand():
    """First a word, two letters, and a word that agrees with the clues; then the same wrong word twice."""
    played = wordle.Games(encode(["beach"]))
    for text in ("about", "ab", "beach"):
        for token in [*(ord(letter) - 97 for letter in text), wordle.END_ACTION]:
            played.step(np.array([token]))
    statistics = guess_statistics(played, ["beach", "about"])
    assert statistics == {"valid_share": 2 / 3, "dictionary_share": 2 / 3, "consistent_share": 2 / 3}
    again = wordle.Games(encode(["beach"]))
    for text in ("about", "about"):
        for token in [*(ord(letter) - 97 for letter in text), wordle.END_ACTION]:
            again.step(np.array([token]))
    statistics = guess_statistics(again, ["beach"])
    assert statistics["consistent_share"] == 1 / 2
    assert statistics["dictionary_share"] == 0


def test_each_word_is_hidden_equally_often():
    drawn = draw_hidden_words(WORDS, 24, seed=3)
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    np.testing.assert_array_equal(counts, np.full(8, 3))
    assert np.any(drawn != draw_hidden_words(WORDS, 24, seed=4))
