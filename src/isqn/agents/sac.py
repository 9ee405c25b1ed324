"""Soft actor-critic (Haarnoja et al. 2018) for every scheme: the heads of the critic learn in pairs.

The order within an update is that of SimbaV2 (Lee et al. 2025): policy, temperature, critic, target update. The replay
buffer holds raw observations and rewards; a sampled batch is normalised by the newest statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np

from isqn import losses
from isqn.agents import normalisation
from isqn.agents.base import (
    Agent,
    AgentState,
    Choice,
    PairLosses,
    descend,
    descend_on_losses,
    init_state,
    make_adam,
    make_refresh,
    refresh_if_due,
)
from isqn.agents.dqn import evaluate_pairs
from isqn.agents.registry import register_agent
from isqn.config.fields import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, SIZE, Needs, needs, needs_above, require
from isqn.config.parts import Adam, MovingHeads, Normalisation, PairWeights, Replay, Torso, needs_torso_that_reads
from isqn.config.run import LearningRate, LearningStarts, NativeLoop, TargetStepSize, TargetUpdatePeriod, TrainingLoop
from isqn.keys import device_key
from isqn.lazy import jax, jnp
from isqn.types import Array, EnvSpec, Metrics, Params, Transition, UserError

if TYPE_CHECKING:
    from isqn.networks import Network, Policy

# (state, batch, key) -> state with the policy, or the critic, updated; metrics
PartialUpdate = Callable[[AgentState, Transition, Array], tuple[AgentState, Metrics]]

NEEDS_BATCH_NORM = Needs(lambda config: config.uses_batch_norm, "--joint-batch-norm yes")


@dataclass(frozen=True)
class SacConfig(MovingHeads, Normalisation, PairWeights, Torso, Adam, Replay, NativeLoop):
    """Soft actor-critic for continuous actions."""

    agent = "sac"

    # The defaults are for a plain MLP and are tuned for no task; the paper's SimbaV2 is a preset.
    env_id: str = "Pendulum-v1"
    target_update_period: TargetUpdatePeriod = 1
    """Target update period (T) in gradient steps."""
    target_step_size: TargetStepSize = 5e-3
    learning_rate: LearningRate = 3e-4
    buffer_size: Annotated[int, AT_LEAST_ONE] = 1_000_000
    learning_starts: LearningStarts = 1_000
    """Agent steps before the first gradient step; until then, actions are uniformly random."""
    batch_size: Annotated[int, AT_LEAST_ONE] = 256
    hidden_sizes: Annotated[tuple[int, ...], SIZE, needs_torso_that_reads("hidden_sizes")] = (256, 256)
    head_weight_discount: Annotated[float, AT_LEAST_ZERO] = 0.25
    normalise_observations: bool = True
    acting_rule: Literal["sample", "mean"] = "sample"
    """Action of the policy: a sample, or the mean."""
    updates_per_step: Annotated[int, AT_LEAST_ONE] = 1
    """Gradient steps after each agent step, each on a new batch. Not specified in the paper; SimbaV2: 2."""
    learning_rate_end: Annotated[float, AT_LEAST_ZERO, needs_above("learning_rate_decay_steps", 0)] = 0.0
    """Learning rate at the end of its decay."""
    learning_rate_decay_steps: Annotated[int, AT_LEAST_ZERO] = 0
    """Agent steps of the linear learning-rate decay, counted from the first gradient step; 0 disables it."""
    twin_q: bool = False
    """Train two critics, and take the smaller of their values as the target."""
    num_atoms: Annotated[int, AT_LEAST_ONE, SIZE] = 1
    """Number of atoms of the categorical critic; 1 predicts the mean."""
    value_bound: Annotated[float, POSITIVE, needs_above("num_atoms", 1)] = 5.0
    """Largest absolute value of an atom. Larger returns are clipped or, with --normalise-rewards, scaled down."""
    joint_batch_norm: Literal["auto", "yes", "no"] = "auto"
    """BatchNorm in the critic, with s and s' in one batch. auto: for schemes without a target network."""
    batch_norm_epsilon: Annotated[float, POSITIVE, NEEDS_BATCH_NORM] = 1e-5
    """Epsilon of BatchNorm. Not specified in the paper; CrossQ: 1e-3."""
    batch_norm_kind: Annotated[Literal["plain", "renorm"], NEEDS_BATCH_NORM] = "plain"
    """BatchNorm, or the batch renormalisation of CrossQ. Not specified in the paper."""
    batch_norm_input: Annotated[bool, NEEDS_BATCH_NORM] = False
    """BatchNorm also on the inputs, as in CrossQ. Not specified in the paper."""
    batch_norm_policy: Annotated[bool, NEEDS_BATCH_NORM] = False
    """BatchNorm also in the policy, as in CrossQ; the actor loss updates its averages. Not specified in the paper."""
    policy_loss_statistics: Annotated[Literal["running", "batch"], NEEDS_BATCH_NORM] = "running"
    """BatchNorm statistics of the critic in the actor loss, which never updates them. Not specified in the paper."""
    policy_value: Literal["weighted-mean", "weighted-sum-over-k", "first", "last"] = "weighted-mean"
    """Q in the actor loss: sum of w_k Q_k over the sum of w_k (weighted-mean) or over K, or one online head."""
    update_order: Literal["policy-first", "critic-first"] = "policy-first"
    """Order within a gradient step. Not in the paper; SimbaV2: policy-first; the authors' slimSAC: critic-first."""
    project_frozen_heads: Annotated[bool, needs("scheme", "iterated-shared")] = True
    """Also normalise the weights of frozen heads of SimbaV2 at each gradient step. Not specified in the paper."""
    entropy_temperature_start: Annotated[float, POSITIVE] = 1.0
    """Initial entropy temperature (alpha); it is learned."""
    target_entropy_per_action: float = -1.0
    """Target entropy per action dimension, in nats; below 0.693, the entropy of uniform actions."""
    critic_width: Annotated[int, AT_LEAST_ONE, SIZE, needs_torso_that_reads("width")] = 512
    """Hidden width of the SimbaV2 critic."""
    critic_blocks: Annotated[int, AT_LEAST_ONE, SIZE, needs_torso_that_reads("blocks")] = 2
    """Number of blocks of the SimbaV2 critic."""
    policy_width: Annotated[int, AT_LEAST_ONE, SIZE, needs_torso_that_reads("width")] = 128
    """Hidden width of the SimbaV2 policy."""
    policy_blocks: Annotated[int, AT_LEAST_ONE, SIZE, needs_torso_that_reads("blocks")] = 1
    """Number of blocks of the SimbaV2 policy."""
    # Runs of earlier versions, whose configs have no such line, were trained in the host loop.
    loop: TrainingLoop = "host"
    """Training loop; host unless asked. compiled: one program with an environment in JAX. auto: compiled if it can."""

    algorithm = "SAC"

    def check_together(self) -> None:
        super().check_together()
        uniform = math.log(2)  # entropy of a uniform action in [-1, 1]
        rule = f"must be below {uniform:.3f}, the entropy of uniform actions"
        require(self, "target_entropy_per_action", self.target_entropy_per_action < uniform, rule)
        require(self, "head_weights", sum(self.pair_weights) > 0, "must have a sum above 0, for the actor loss")

    @property
    def uses_batch_norm(self) -> bool:  # type: ignore[override]
        auto = not self.target_scheme.num_copies
        return {"auto": auto, "yes": True, "no": False}[self.joint_batch_norm]

    @property
    def actor_head_weights(self) -> tuple[float, ...]:
        """Weight of the value of each pair in the actor loss."""
        weights, pairs = self.pair_weights, self.target_scheme.num_pairs
        if self.policy_value in ("first", "last"):
            chosen = 0 if self.policy_value == "first" else pairs - 1
            return tuple(float(pair == chosen) for pair in range(pairs))
        divisor = sum(weights) if self.policy_value == "weighted-mean" else pairs
        return tuple(weight / divisor for weight in weights)

    def deterministic(self) -> Self:
        return self.acting_by("mean")

    def epsilon(self, step: Any) -> Any:
        """Return the probability of a uniform action: 1 until learning starts, then 0."""
        return 1.0 * (step < self.learning_starts)

    @property
    def torso_settings(self) -> dict[str, Any]:
        return super().torso_settings | {
            "batch_norm_epsilon": self.batch_norm_epsilon,
            "batch_norm_kind": self.batch_norm_kind,
            "batch_norm_input": self.batch_norm_input,
        }


class Actor(NamedTuple):
    """Policy network and entropy temperature."""

    network: Params
    statistics: Params  # running averages of its BatchNorm, {} without
    log_temperature: Array


class Optimizers(NamedTuple):
    """Optimizer states, and the number of updates."""

    critic: Any
    policy: Any
    temperature: Any
    updates: Array  # number of gradient steps, which also numbers the random draws


def make(config: SacConfig, spec: EnvSpec) -> Agent:
    """Make the agent of soft actor-critic: critic, policy, and their updates."""
    scheme, optimizer = config.target_scheme, make_adam(config)
    critic, policy = make_networks(config, spec)
    refresh = make_refresh(config.refreshed_scheme, config.target_step_size)
    pair_losses = make_pair_losses(config, critic)

    def init(seed: Array | int) -> AgentState:
        state = init_state(scheme, critic, seed, copy_first=config.initial_heads == "copied")
        network, policy_statistics = policy.init(device_key(seed, "policy"))
        log_temperature = jnp.log(jnp.float32(config.entropy_temperature_start))
        return state._replace(
            optimizer=Optimizers(
                critic=optimizer.init(state.params),
                policy=optimizer.init(network),
                temperature=optimizer.init(log_temperature),
                updates=jnp.int32(0),
            ),
            moments=normalisation.init(config, spec),
            policy=Actor(network, policy_statistics, log_temperature),
        )

    def observe(
        state: AgentState, frame: Array, reward: Array | None = None, ended: Array | None = None
    ) -> tuple[AgentState, Array]:
        return state._replace(moments=normalisation.update(state.moments, frame, reward, ended, config.discount)), frame

    def act(state: AgentState, obs: Array, epsilon: Array, step: Array, episode: Array) -> Choice:
        explore, uniform, normal = jax.random.split(device_key(state.seed, "explore", step), 3)
        obs = normalisation.normalise_observation(state.moments, obs)[None]
        mean, log_std = apply_policy(policy, state.policy, obs)
        chosen = jnp.tanh(mean[0]) if config.acting_rule == "mean" else draw(normal, mean, log_std)[0][0]
        random_action = jax.random.uniform(uniform, (spec.num_actions,), minval=-1)
        return Choice(jnp.where(jax.random.uniform(explore) < epsilon, random_action, chosen), jnp.bool(False))

    def activations(state: AgentState, batch: Transition) -> tuple[list[Array], Array]:
        x = jnp.concatenate([normalisation.normalise_observation(state.moments, batch.obs), batch.action], axis=-1)
        return critic.activations(state.params, state.statistics, x)

    update_policy = make_policy_update(config, critic, policy, config.target_entropy_per_action * spec.num_actions)
    update_critic = make_critic_update(config, critic, policy, pair_losses)
    return Agent(
        init=init,
        observe=observe,
        act=act,
        update=make_update(config, update_policy, update_critic, refresh),
        refresh=refresh,
        losses=pair_losses,
        activations=activations,
        network=critic,
        refreshes=False,  # the update does it itself
        acting_parts=("policy", "moments"),
    )


def make_networks(config: SacConfig, spec: EnvSpec) -> tuple[Network, Policy]:
    """Return the critic and the policy."""
    from isqn.networks import make_critic, make_policy

    if spec.is_image:
        raise UserError(
            f"{spec.id} observes images {spec.frame_shape}; `isqn train {config.agent}` learns from vectors only."
        )
    num_heads, num_critics = config.target_scheme.num_heads, 2 if config.twin_q else 1
    settings = config.torso_settings | {"width": config.critic_width, "blocks": config.critic_blocks}
    critic = make_critic(spec, num_heads, config.torso, settings, num_atoms=config.num_atoms, num_critics=num_critics)
    settings = config.torso_settings | {"width": config.policy_width, "blocks": config.policy_blocks}
    settings["batch_norm"] = config.uses_batch_norm and config.batch_norm_policy
    return critic, make_policy(spec, config.torso, settings)


def apply_policy(policy: Policy, actor: Actor, obs: Array) -> tuple[Array, Array]:
    """Return the mean and the log standard deviation of the policy, before the squashing."""
    return policy.apply(actor.network, actor.statistics, obs)[0]


def make_value(config: SacConfig) -> Callable[[Array], Array]:
    """Return a function from critic outputs to values: the mean under the logits of the atoms, or the one output."""
    if config.num_atoms == 1:
        return lambda outputs: outputs[..., 0]
    atoms = losses.value_atoms(config.num_atoms, config.value_bound)
    return lambda logits: jnp.matmul(jax.nn.softmax(logits), atoms, precision="highest")


def make_pair_losses(config: SacConfig, critic: Network) -> PairLosses:
    """Return the mean critic loss of each pair; `obs` and `next_obs` of the batch have the actions appended."""
    scheme, value = config.target_scheme, make_value(config)
    pair_loss = losses.bind_settings(losses.categorical if config.num_atoms > 1 else losses.soft_bellman, config)

    def pair_losses(
        params: Params, statistics: Params, copies: tuple[Params, ...], batch: Transition
    ) -> tuple[Array, tuple[Metrics, Params]]:
        predictions, targets, new_statistics = evaluate_pairs(
            scheme, critic, params, statistics, copies, batch, joint=config.uses_batch_norm
        )
        if config.twin_q:  # the target of both critics is the smaller value
            least = jnp.argmin(value(targets.next), axis=2, keepdims=True)[..., None]
            chosen = jnp.take_along_axis(targets.next, least, axis=2)
            targets = targets._replace(next=jnp.broadcast_to(chosen, targets.next.shape))
        over_critics = jax.vmap(pair_loss, (0, 0, None))
        per_pair = jax.vmap(jax.vmap(over_critics, (0, 0, None)))(predictions, targets, batch).sum(axis=2).mean(axis=0)
        metrics = {"loss": per_pair.sum(), "q_value": value(jax.lax.stop_gradient(predictions.now)).mean()}
        return per_pair, (metrics, new_statistics)

    return pair_losses


def make_policy_update(config: SacConfig, critic: Network, policy: Policy, target_entropy: float) -> PartialUpdate:
    """Return the update of the policy by its value and its entropy, then of the temperature by the entropy."""
    optimizer, value = make_adam(config), make_value(config)
    online, weights = np.array(config.target_scheme.online), jnp.asarray(config.actor_head_weights)
    uses_batch_statistics = config.policy_loss_statistics == "batch"

    def update_policy(state: AgentState, batch: Transition, key: Array) -> tuple[AgentState, Metrics]:
        actor, temperature = state.policy, jnp.exp(state.policy.log_temperature)

        def loss(network: Params) -> tuple[Array, tuple[Array, Params]]:
            (mean, log_std), statistics = policy.apply(network, actor.statistics, batch.obs, True)
            action, log_probability = draw(key, mean, log_std)
            joined = jnp.concatenate([batch.obs, action], axis=-1)
            q, _ = critic.apply(state.params, state.statistics, joined, uses_batch_statistics)
            least = value(q[:, online]).min(axis=2)
            return (temperature * log_probability - least @ weights).mean(), (-log_probability.mean(), statistics)

        grads, (entropy, statistics) = jax.grad(loss, has_aux=True)(actor.network)
        network, policy_optimizer = descend(optimizer, grads, state.optimizer.policy, actor.network)
        gradient = temperature * (entropy - target_entropy)
        log_temperature, temperature_optimizer = descend(
            optimizer, gradient, state.optimizer.temperature, actor.log_temperature
        )
        state = state._replace(
            policy=Actor(policy.project(network), statistics, log_temperature),
            optimizer=state.optimizer._replace(policy=policy_optimizer, temperature=temperature_optimizer),
        )
        return state, {"entropy": entropy, "temperature": jnp.exp(log_temperature)}

    return update_policy


def make_critic_update(config: SacConfig, critic: Network, policy: Policy, pair_losses: PairLosses) -> PartialUpdate:
    """Return the update of the critic by the weighted pair losses."""
    optimizer, weights = make_adam(config), jnp.asarray(config.pair_weights)
    scheme = config.target_scheme
    frozen = np.array(sorted(set(scheme.target) - set(scheme.online)), int)

    def update_critic(state: AgentState, batch: Transition, key: Array) -> tuple[AgentState, Metrics]:
        next_action, next_log_probability = draw(key, *apply_policy(policy, state.policy, batch.next_obs))
        bonus = -jnp.exp(state.policy.log_temperature) * next_log_probability
        batch = batch._replace(
            obs=jnp.concatenate([batch.obs, batch.action], axis=-1),
            reward=batch.reward + batch.discount * bonus,
            next_obs=jnp.concatenate([batch.next_obs, next_action], axis=-1),
        )

        params, critic_optimizer, (metrics, statistics) = descend_on_losses(
            optimizer, state.optimizer.critic, pair_losses, weights, state, batch
        )
        optimizers = state.optimizer._replace(critic=critic_optimizer)
        return state._replace(params=project(params), statistics=statistics, optimizer=optimizers), metrics

    def project(params: Params) -> Params:
        projected = critic.project(params)
        if config.project_frozen_heads:
            return projected
        heads = jax.tree.map(lambda w, old: w.at[frozen].set(old[frozen]), projected["heads"], params["heads"])
        return {**projected, "heads": heads}

    return update_critic


def make_update(
    config: SacConfig,
    update_policy: PartialUpdate,
    update_critic: PartialUpdate,
    refresh: Callable[[AgentState], AgentState],
) -> Callable[[AgentState, Transition], tuple[AgentState, Metrics]]:
    """Return the update of an agent step: its gradient steps, each on a batch of its own, one after another."""
    value_bound = config.value_bound if config.num_atoms > 1 else None

    def update_once(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        """Do one gradient step of the policy, the temperature and the critic on a normalised batch."""
        keys = jax.random.split(device_key(state.seed, "update", state.optimizer.updates))
        parts, metrics = [(update_policy, keys[0]), (update_critic, keys[1])], Metrics()
        for part, key in parts if config.update_order == "policy-first" else reversed(parts):
            state, part_metrics = part(state, batch, key)
            metrics |= part_metrics
        updates = state.optimizer.updates + 1
        state = state._replace(optimizer=state.optimizer._replace(updates=updates))
        return refresh_if_due(config, refresh, state, updates), metrics

    def update(state: AgentState, batch: Transition) -> tuple[AgentState, Metrics]:
        batch = batch._replace(
            obs=normalisation.normalise_observation(state.moments, batch.obs),
            reward=batch.reward / normalisation.reward_scale(state.moments, value_bound),
            next_obs=normalisation.normalise_observation(state.moments, batch.next_obs),
        )
        batches = jax.tree.map(lambda x: x.reshape(-1, config.batch_size, *x.shape[1:]), batch)
        state, metrics = jax.lax.scan(update_once, state, batches)
        return state, jax.tree.map(lambda m: m.sum(axis=0), metrics)

    return update


def draw(key: Array, mean: Array, log_std: Array) -> tuple[Array, Array]:
    """Sample actions in (-1, 1); return them and their log densities (Haarnoja et al. 2018, appendix C)."""
    noise = jax.random.normal(key, mean.shape)
    before = mean + jnp.exp(log_std) * noise
    normal = -0.5 * jnp.square(noise) - log_std - 0.5 * jnp.log(2 * jnp.pi)
    squashed = 2 * (jnp.log(2.0) - before - jax.nn.softplus(-2 * before))  # the logarithm of 1 - tanh^2
    return jnp.tanh(before), (normal - squashed).sum(axis=-1)


register_agent("sac", SacConfig, make, actions="continuous", presets="isqn.presets.sac", evaluation_rule="mean")
