"""Decoding of a language agent: the policy and the values together choose each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import AgentState
from isqn.language.gpt2 import Cache
from isqn.language.heads import make_networks
from isqn.language.learning import select_targets
from isqn.language.types import TextSpec
from isqn.types import Array, Params

if TYPE_CHECKING:
    from isqn.language.agent import IlqlConfig


class TokenScores(NamedTuple):
    """Scores and values of every token that may come next."""

    scores: Array  # (..., tokens): log-probability of the policy plus the log-weight that the values give
    policy_scores: Array  # (..., tokens): log-probability of the policy
    q: Array  # (..., tokens): mean over the pairs
    v: Array  # (...): mean over the pairs


class Decoder(NamedTuple):
    """Functions that decode guesses, in many games at once."""

    score: Callable[[AgentState, Array], TokenScores]  # tokens (B, T) -> (B, T, ...)
    choose: Callable[[Array, Array], Array]  # scores (..., tokens), key -> token
    init_caches: Callable[[int], tuple[Cache, ...]]  # number of games
    # state, caches, new tokens (B, answer), their first position, their number, key -> tokens of a guess, caches
    decode_guess: Callable[..., tuple[Array, tuple[Cache, ...]]]


def make_decoder(config: IlqlConfig, spec: TextSpec) -> Decoder:
    """Make the functions that decode."""
    scheme = config.target_scheme
    values, policy, empty_cache = make_networks(config, spec.num_actions)
    online = np.array(scheme.online)
    uses_copies = config.deciding_q == "target"

    def value_params(state: AgentState) -> tuple[Params, ...]:
        """Return the parameters whose values weigh tokens: those that learn, then the copies whose Q decides."""
        return (state.params, *(state.copies if uses_copies else ()))

    def q_and_v(state: AgentState, features: Array, *copy_features: Array) -> tuple[Array, Array]:
        """Return Q (B, T, pairs, tokens) and V (B, T, pairs) of the deciding heads, from the features (B, T, F)."""
        heads = np.arange(scheme.num_heads) if config.averaged_heads == "all" else online
        v = values.v(state.params, features)[:, :, heads]
        if not copy_features:
            return values.q(state.params, features).min(axis=0)[:, :, heads], v
        of_copies = [values.q(params, f).min(axis=0) for params, f in zip(state.copies, copy_features, strict=True)]
        return select_targets(scheme, of_copies), v

    def score_tokens(
        state: AgentState, policy_features: Array, q: Array | None = None, v: Array | None = None
    ) -> Array:
        """Return log-probabilities of the policy, plus log-weights if there are values."""
        scores = jax.nn.log_softmax(policy.logits(state.policy, policy_features)).at[..., spec.pad].set(-jnp.inf)
        if q is None or v is None:
            return scores
        advantage = config.inverse_temperature * (q - v[..., None])
        if config.clip_advantages:
            advantage = jnp.minimum(advantage, 0)
        if config.average_of == "weights":
            return scores + jax.nn.logsumexp(advantage, axis=2) - jnp.log(advantage.shape[2])
        return scores + advantage.mean(axis=2)

    def score(state: AgentState, tokens: Array) -> TokenScores:
        is_token = tokens != spec.pad
        features = [values.features(params, tokens, is_token)[0] for params in value_params(state)]
        policy_features = policy.features(state.policy, tokens, is_token)[0]
        q, v = q_and_v(state, *features)
        return TokenScores(
            scores=score_tokens(state, policy_features, q, v),
            policy_scores=score_tokens(state, policy_features),
            q=q.mean(axis=2),
            v=v.mean(axis=2),
        )

    def choose(scores: Array, key: Array) -> Array:
        if config.acting_rule == "sample":
            return jax.random.categorical(key, scores).astype(jnp.int32)
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    def init_caches(games: int) -> tuple[Cache, ...]:
        """Return empty caches of the policy and, if values weigh tokens, of the networks that give them."""
        count = 2 + scheme.num_copies * uses_copies if config.inverse_temperature else 1
        return tuple(empty_cache(games, spec.length + spec.answer_tokens) for _ in range(count))

    def read(state: AgentState, caches: Any, tokens: Array, starts: Array) -> Any:
        """Read more tokens: return their features by each network that has a cache, and the updated caches."""
        results = [policy.features(state.policy, tokens, None, caches[0], starts)]
        for params, cache in zip(value_params(state), caches[1:], strict=False):
            results.append(values.features(params, tokens, None, cache, starts))
        return [features for features, _ in results], tuple(cache for _, cache in results)

    def decode_guess(state: AgentState, caches: Any, new: Array, starts: Array, count: Array, key: Array) -> Any:
        """Read the new tokens, then write a guess, always `spec.action_tokens` long.

        Tokens after the end of a shorter guess are never read: later ones overwrite them in the caches.
        """
        features, caches = read(state, caches, new, starts)
        features = [jnp.take_along_axis(f, count[:, None, None] - 1, axis=1) for f in features]

        def write_token(carry: Any, key: Array) -> Any:
            caches, (policy_features, *value_features), position = carry
            values = q_and_v(state, *value_features) if value_features else ()
            token = choose(score_tokens(state, policy_features, *values)[:, 0], key)
            features, caches = read(state, caches, token[:, None], position)
            return (caches, features, position + 1), token

        carry: Any = caches, features, starts + count
        (caches, *_), tokens = jax.lax.scan(write_token, carry, jax.random.split(key, spec.action_tokens))
        return tokens.T, caches

    return Decoder(score, choose, init_caches, decode_guess)
