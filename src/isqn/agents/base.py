"""The interface of all agents, a record of pure functions over one state, and building blocks for these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from isqn import schemes
from isqn.config.run import Run
from isqn.keys import device_key
from isqn.lazy import jax, jnp, optax
from isqn.types import Array, Metrics, Params


class AgentState(NamedTuple):
    """Everything that learning changes. It is saved and restored as a whole."""

    seed: Array
    params: Params
    statistics: Params  # running averages of BatchNorm
    copies: tuple[Params, ...]  # older networks, for schemes with target networks
    optimizer: Any
    meta: Any = ()  # state of the learned pair weights
    probe: Any = ()  # state of the probes
    moments: Any = ()  # running moments of observations and rewards
    policy: Any = ()  # the actor


class Choice(NamedTuple):
    """Action of an agent."""

    action: Array
    explored: Array  # whether another action had a higher value


# (params, statistics, copies, batch) -> mean loss of each pair, (metrics, new statistics)
PairLosses = Callable[..., tuple[Array, Any]]


def identity_observe(
    state: AgentState, frame: Array, reward: Any = None, ended: Any = None
) -> tuple[AgentState, Array]:
    """Return the frame unchanged, for agents that normalise nothing."""
    return state, frame


def sync(state: AgentState) -> AgentState:
    return state._replace(copies=schemes.sync(state.params, state.copies))


class Agent(NamedTuple):
    """Pure functions over one state. A loop compiles them and calls each when it is due."""

    init: Callable[[Array | int], AgentState]  # seed -> state
    act: Callable[[AgentState, Array, Array, Array, Array], Choice]  # state, obs, epsilon, step, episode
    update: Callable[[AgentState, Any], tuple[AgentState, Metrics]]  # state, batch
    refresh: Callable[[AgentState], AgentState]  # target update, every T steps
    losses: PairLosses
    activations: Callable[[AgentState, Any], tuple[list[Array], Array]]  # batch -> outputs of every ReLU, features
    network: Any  # `Network`, or the `ValueNetwork` of a language agent
    refreshes: bool  # whether the loop has to call `refresh`
    # state, frame, and, except after a reset, the reward and whether the episode ended -> state, observation
    observe: Callable[..., tuple[AgentState, Array]] = identity_observe
    observe_eval: Callable[..., tuple[AgentState, Array]] = identity_observe  # the same in evaluations
    sync: Callable[[AgentState], AgentState] = sync  # every D steps (i-QN)
    forget: Callable[[AgentState], AgentState] = lambda state: state  # drop what was summed over past steps
    acting_parts: tuple[str, ...] = ("params", "statistics", "meta")  # what `act` reads of the state, with the seed
    is_streaming: bool = False  # whether the agent learns from each step once, when it is taken


# -- heads and targets


def init_state(
    scheme: schemes.TargetScheme, network: Any, seed: Array | int, *, copy_first: bool = False
) -> AgentState:
    """Return the initial network with its copies as a state, to which an agent adds its optimizer."""
    params, statistics = network.init(device_key(seed, "network"))
    params = initialise_heads(scheme, params, copy_first=copy_first)
    return AgentState(jnp.asarray(seed, jnp.uint32), params, statistics, copy_params(scheme, params), optimizer=())


def initialise_heads(scheme: schemes.TargetScheme, params: Params, *, copy_first: bool = False) -> Params:
    """Copy the heads that start equal to others; with `copy_first`, head 0 starts as a copy of head 1."""
    if scheme.copies_initial_heads or copy_first:
        params, _ = schemes.refresh(scheme if scheme.copies_initial_heads else scheme.first_pair, params, ())
    return params


def copy_params(scheme: schemes.TargetScheme, params: Params) -> tuple[Params, ...]:
    """Return the copies of a scheme in separate buffers, because the state is donated to the update."""
    return tuple(jax.tree.map(jnp.copy, params) for _ in range(scheme.num_copies))


class TargetSchedule(NamedTuple):
    """Steps after which target updates are due. The methods take numbers and traced arrays."""

    refresh_period: int  # T; 0 if the loop does no target updates
    sync_period: int  # D of i-QN; 0 for schemes with at most one copy

    def is_refresh_due(self, step: Any) -> Any:
        return step % self.refresh_period == 0 if self.refresh_period else False

    def is_sync_due(self, step: Any) -> Any:
        """Return whether the later copies of i-QN are due; a target update updates them as well."""
        due = step % self.sync_period == 0 if self.sync_period else False
        return due & (step % self.refresh_period != 0) if self.refresh_period else due

    def was_sync_due(self, start: Any, step: Any) -> Any:
        """Return whether the later copies were due after `start` and before `step`."""
        return (step - 1) // self.sync_period > start // self.sync_period


def target_schedule(config: Run, agent: Agent) -> TargetSchedule:
    """Return the steps at which a loop has to call `refresh` and `sync`."""
    refresh_period = config.target_update_period if agent.refreshes else 0
    return TargetSchedule(refresh_period, config.target_sync_period if config.target_scheme.num_copies > 1 else 0)


def refresh_if_due(
    config: Run, refresh: Callable[[AgentState], AgentState], state: AgentState, updates: Array
) -> AgentState:
    """Do the target update within a gradient step, for agents that count their gradient steps."""
    if config.target_update_period == 1:
        return refresh(state)
    return jax.lax.cond(updates % config.target_update_period == 0, refresh, lambda unchanged: unchanged, state)


def make_adam(config: Any, eps_root: float = 0.0) -> optax.GradientTransformation:
    """Return Adam with the learning-rate schedule of a config."""
    rate: Any = config.learning_rate
    if config.learning_rate_decay_steps:
        updates = config.learning_rate_decay_steps * config.updates_per_step
        rate = optax.linear_schedule(rate, config.learning_rate_end, updates)
    return optax.adam(rate, b1=config.adam_beta1, eps=config.adam_epsilon, eps_root=eps_root)


def descend(optimizer: optax.GradientTransformation, grads: Any, optimizer_state: Any, params: Any) -> tuple[Any, Any]:
    """Take a step of an optimizer; return the new parameters and the new state of the optimizer."""
    steps, optimizer_state = optimizer.update(grads, optimizer_state, params)
    return optax.apply_updates(params, steps), optimizer_state


def descend_on_losses(
    optimizer: optax.GradientTransformation,
    optimizer_state: Any,
    losses: PairLosses,
    weights: Array,
    state: AgentState,
    batch: Any,
) -> tuple[Params, Any, tuple[Metrics, Params]]:
    """Take a step on the weighted sum of the pair losses; return parameters, optimizer state and the rest."""

    def weighted(params: Params) -> tuple[Array, tuple[Metrics, Params]]:
        per_pair, rest = losses(params, state.statistics, state.copies, batch)
        return per_pair @ weights, rest

    grads, rest = jax.grad(weighted, has_aux=True)(state.params)
    return *descend(optimizer, grads, optimizer_state, state.params), rest


def make_refresh(scheme: schemes.TargetScheme, step_size: float) -> Callable[[AgentState], AgentState]:
    """Return the target update of a scheme."""

    def refresh(state: AgentState) -> AgentState:
        params, copies = schemes.refresh(scheme, state.params, state.copies, step_size)
        return state._replace(params=params, copies=copies)

    return refresh
