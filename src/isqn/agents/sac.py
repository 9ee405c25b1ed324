"""Soft actor-critic (Haarnoja et al. 2018) for every scheme: a policy acts, and the heads of a critic learn in pairs.

The order within an update is that of SimbaV2 (Lee et al. 2025): policy, temperature, critic, refresh. Replays hold
observations and rewards as they came; what they are normalised by moves, and is applied when they are learned from.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from isqn import losses
from isqn.agents import normalise
from isqn.agents.q_learning import (
    Agent,
    AgentState,
    Choice,
    begin_heads,
    both_sides,
    make_optimizer,
    refresh_if_due,
    refreshed,
    synced,
)
from isqn.keys import device_key
from isqn.networks import make_critic, make_policy
from isqn.types import Array, EnvSpec, Metrics, Params, Transition

if TYPE_CHECKING:
    from isqn.experiments.config import Config


class Actor(NamedTuple):
    network: Params
    statistics: Params  # running averages of its BatchNorm, {} without
    log_temperature: Array


class Optimizers(NamedTuple):
    critic: Any
    policy: Any
    temperature: Any
    updates: Array  # so far; draws are counted by it


def make(config: Config, spec: EnvSpec) -> Agent:
    scheme = config.target_scheme
    critic, policy = make_critic(spec, scheme.num_heads, config), make_policy(spec, config)
    optimizer, refresh = make_optimizer(config), partial(refreshed, config)
    atoms = losses.value_atoms(config.num_atoms, config.value_bound)
    is_categorical = config.num_atoms > 1
    pair_loss = losses.with_settings(losses.categorical if is_categorical else losses.expected, config)
    weights, climbed = jnp.asarray(config.pair_weights), jnp.asarray(config.policy_weights)
    online = np.array(scheme.online)
    frozen = np.array(sorted(set(scheme.target) - set(scheme.online)), int)
    target_entropy = config.target_entropy_per_action * spec.num_actions

    def init(seed: Array | int) -> AgentState:
        params, statistics = critic.init(device_key(seed, "network"))
        params = begin_heads(config, params)
        network, policy_statistics = policy.init(device_key(seed, "policy"))
        log_temperature = jnp.log(jnp.float32(config.entropy_temperature_start))
        return AgentState(
            seed=jnp.asarray(seed, jnp.uint32),
            params=params,
            statistics=statistics,
            # copies are distinct buffers, because the state is donated to the update
            copies=tuple(jax.tree.map(jnp.copy, params) for _ in range(scheme.num_copies)),
            optimizer=Optimizers(
                critic=optimizer.init(params),
                policy=optimizer.init(network),
                temperature=optimizer.init(log_temperature),
                updates=jnp.int32(0),
            ),
            moments=normalise.begin(config, spec),
            policy=Actor(network, policy_statistics, log_temperature),
        )

    def observe(
        state: AgentState, frame: Array, reward: Array | None = None, ended: Array | None = None
    ) -> tuple[AgentState, Array]:
        return state._replace(moments=normalise.count(state.moments, frame, reward, ended, config.discount)), frame

    def act(state: AgentState, obs: Array, epsilon: Array, step: Array, episode: Array) -> Choice:
        explore, uniform, normal = jax.random.split(device_key(state.seed, "explore", step), 3)
        mean, log_std = plan(state.policy, normalise.observation(state.moments, obs)[None])
        chosen = jnp.tanh(mean[0]) if config.acting_rule == "mean" else draw(normal, mean, log_std)[0][0]
        random_action = jax.random.uniform(uniform, (spec.num_actions,), minval=-1)
        return Choice(jnp.where(jax.random.uniform(explore) < epsilon, random_action, chosen), jnp.bool(False))

    def plan(actor: Actor, obs: Array) -> tuple[Array, Array]:
        return policy.apply(actor.network, actor.statistics, obs)[0]

    def value(outputs: Array) -> Array:
        """What a critic expects, from its logits over atoms or its one number."""
        return jnp.matmul(jax.nn.softmax(outputs), atoms, precision="highest") if is_categorical else outputs[..., 0]

    def pair_losses(
        params: Params, statistics: Params, copies: tuple[Params, ...], batch: Transition
    ) -> tuple[Array, tuple[Metrics, Params]]:
        """The batch mean of the loss of each pair. `obs` and `next_obs` are those of the critic, with their actions."""
        predictions, aims, new_statistics = both_sides(
            scheme, critic, params, statistics, copies, batch, joint=config.uses_batch_norm
        )
        if config.twin_q:  # both learn from the one that expects less
            least = jnp.argmin(value(aims.next), axis=2, keepdims=True)[..., None]
            chosen = jnp.take_along_axis(aims.next, least, axis=2)
            aims = aims._replace(next=jnp.broadcast_to(chosen, aims.next.shape))
        over_critics = jax.vmap(pair_loss, (0, 0, None))
        per_pair = jax.vmap(jax.vmap(over_critics, (0, 0, None)))(predictions, aims, batch).sum(axis=2).mean(axis=0)
        metrics = {"loss": per_pair.sum(), "q_value": value(jax.lax.stop_gradient(predictions.now)).mean()}
        return per_pair, (metrics, new_statistics)

    def stepped(optimizer_state: Any, grads: Any, params: Any) -> tuple[Any, Any]:
        steps, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return optax.apply_updates(params, steps), optimizer_state

    def learn_policy(state: AgentState, batch: Transition, key: Array) -> tuple[AgentState, Metrics]:
        """The policy, by what the critic values and its entropy; then the temperature, by that entropy."""
        actor, temperature = state.policy, jnp.exp(state.policy.log_temperature)

        def loss(network: Params) -> tuple[Array, tuple[Array, Params]]:
            (mean, log_std), statistics = policy.apply(network, actor.statistics, batch.obs, True)
            action, log_probability = draw(key, mean, log_std)
            joined, train = jnp.concatenate([batch.obs, action], axis=-1), config.policy_loss_statistics == "batch"
            q, _ = critic.apply(state.params, state.statistics, joined, train)
            least = value(q[:, online]).min(axis=2)
            return (temperature * log_probability - least @ climbed).mean(), (-log_probability.mean(), statistics)

        grads, (entropy, statistics) = jax.grad(loss, has_aux=True)(actor.network)
        network, of_policy = stepped(state.optimizer.policy, grads, actor.network)
        slope = temperature * (entropy - target_entropy)
        log_temperature, of_temperature = stepped(state.optimizer.temperature, slope, actor.log_temperature)
        state = state._replace(
            policy=Actor(policy.project(network), statistics, log_temperature),
            optimizer=state.optimizer._replace(policy=of_policy, temperature=of_temperature),
        )
        return state, {"entropy": entropy, "temperature": jnp.exp(log_temperature)}

    def learn_critic(state: AgentState, batch: Transition, key: Array) -> tuple[AgentState, Metrics]:
        next_action, next_log_probability = draw(key, *plan(state.policy, batch.next_obs))
        bonus = -jnp.exp(state.policy.log_temperature) * next_log_probability
        batch = batch._replace(
            obs=jnp.concatenate([batch.obs, batch.action], axis=-1),
            reward=batch.reward + batch.discount * bonus,
            next_obs=jnp.concatenate([batch.next_obs, next_action], axis=-1),
        )

        def weighted(params: Params) -> tuple[Array, tuple[Metrics, Params]]:
            per_pair, rest = pair_losses(params, state.statistics, state.copies, batch)
            return per_pair @ weights, rest

        grads, (metrics, statistics) = jax.grad(weighted, has_aux=True)(state.params)
        params, of_critic = stepped(state.optimizer.critic, grads, state.params)
        optimizers = state.optimizer._replace(critic=of_critic)
        return state._replace(params=project(params), statistics=statistics, optimizer=optimizers), metrics

    def project(params: Params) -> Params:
        projected = critic.project(params)
        if config.project_frozen_heads:
            return projected
        heads = jax.tree.map(lambda w, old: w.at[frozen].set(old[frozen]), projected["heads"], params["heads"])
        return {**projected, "heads": heads}

    def learn(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        """One update, of observations and rewards that are normalised."""
        keys = jax.random.split(device_key(state.seed, "update", state.optimizer.updates))
        parts, metrics = [(learn_policy, keys[0]), (learn_critic, keys[1])], Metrics()
        for part, key in parts if config.update_order == "policy-first" else reversed(parts):
            state, found = part(state, batch, key)
            metrics |= found
        updates = state.optimizer.updates + 1
        state = state._replace(optimizer=state.optimizer._replace(updates=updates))
        return refresh_if_due(config, refresh, state, updates), metrics

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        """As many as belong to a step, in one program: `batch` is that many batches, one behind the other."""
        batch = batch._replace(
            obs=normalise.observation(state.moments, batch.obs),
            reward=batch.reward / normalise.scale(state.moments, config.value_bound if is_categorical else None),
            next_obs=normalise.observation(state.moments, batch.next_obs),
        )
        batches = jax.tree.map(lambda x: x.reshape(-1, config.batch_size, *x.shape[1:]), batch)
        state, metrics = jax.lax.scan(learn, state, batches)
        return state, jax.tree.map(lambda m: m.sum(axis=0), metrics)

    def look(state: AgentState, batch: Transition) -> tuple[list[Array], Array]:
        x = jnp.concatenate([normalise.observation(state.moments, batch.obs), batch.action], axis=-1)
        return critic.look(state.params, state.statistics, x)

    return Agent(
        init=init,
        observe=observe,
        act=act,
        update=update,
        refresh=refresh,
        sync=synced,
        losses=pair_losses,
        look=look,
        network=critic,
        refreshes=False,  # an update does it
        acts_by=("policy", "moments"),
    )


def draw(key: Array, mean: Array, log_std: Array) -> tuple[Array, Array]:
    """Actions between -1 and 1 and the logarithms of their densities (Haarnoja et al. 2018, appendix C)."""
    noise = jax.random.normal(key, mean.shape)
    before = mean + jnp.exp(log_std) * noise
    normal = -0.5 * jnp.square(noise) - log_std - 0.5 * jnp.log(2 * jnp.pi)
    squashed = 2 * (jnp.log(2.0) - before - jax.nn.softplus(-2 * before))  # the logarithm of 1 - tanh^2
    return jnp.tanh(before), (normal - squashed).sum(axis=-1)
