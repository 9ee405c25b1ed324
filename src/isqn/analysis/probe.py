"""The paper's probes of a trained agent, on states from new episodes that it plays."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents import normalisation
from isqn.agents.base import AgentState, target_schedule
from isqn.envs import toy
from isqn.envs.adapter import Environment, make_run_environment
from isqn.keys import host_generator
from isqn.networks import Network
from isqn.train import online, run
from isqn.train.evaluate import load_agent_state
from isqn.train.functions import append_held_out, compile_agent, make_run_agent, zero_totals
from isqn.train.play import play
from isqn.train.player import require_environment_agent
from isqn.train.probes import probe_features
from isqn.train.record import naming_missing_imports, read_config
from isqn.train.session import fetch_means
from isqn.types import UserError

COLUMNS = {
    "effective-rank": ("effective_rank",),
    "dormant": ("dormant_share",),
    "target-churn": ("target_churn_train", "target_churn_held_out"),
    "gradient-cosine": ("gradient_cosine_own_tb", "gradient_cosine_tf_tb"),
    "head-cosine": ("head_cosine",),
    "batch-norm": ("batch_norm_deviation",),
}


def list_metrics(config: Any) -> tuple[str, ...]:
    """Return the metrics that are defined for an agent."""
    has_held_out = config.replace(analysis=True).held_out_size > 0  # churn and cosines are measured in updates
    missing = set() if has_held_out else {"target-churn", "gradient-cosine"}
    missing |= {"head-cosine"} if config.target_scheme.num_heads == 1 else set()
    missing |= set() if config.uses_batch_norm else {"batch-norm"}
    return tuple(metric for metric in COLUMNS if metric not in missing)


def probe_run(
    run_dir: Path, metrics: tuple[str, ...], which: str, samples: int, updates: int, seed: int
) -> dict[str, Any]:
    """Return the probes of a trained agent: rank and dormant units on `samples` states, churn and cosines in updates.

    The `updates` gradient steps begin with a target update, as the paper's target period does. They learn from the
    new episodes, and the targets are updated when that is due.
    """
    config: Any = read_config(run_dir)
    require_environment_agent(config, "`isqn probe`")
    metrics = metrics or list_metrics(config)
    for metric in metrics:
        if metric not in list_metrics(config):
            raise UserError(
                f"--metric {metric} is not for {config.label}; choose one of {', '.join(list_metrics(config))}."
            )
    with naming_missing_imports(run_dir):
        env = make_run_environment(config)
        trained = make_run_agent(config, env.spec)
    with env:
        state, step = load_agent_state(run_dir, trained, which)
        values = _measure(config, env, state, metrics, samples, updates, seed)
    columns = [column for metric in metrics for column in COLUMNS[metric]]
    return {"label": config.label, "step": step, **{name: values[name] for name in columns}}


def _measure(
    config: Any, env: Environment, state: AgentState, metrics: tuple[str, ...], samples: int, updates: int, seed: int
) -> dict[str, float]:
    rows = samples + config.num_steps_return
    config = config.replace(analysis=True)
    agent = make_run_agent(config, env.spec)
    call = compile_agent(agent)
    if config.held_out_size:
        state = call.refresh(state._replace(probe=jax.tree.map(jnp.copy, state.params)))

    # A step takes at most two rows.
    replay, explored = online.make_replay_factory(config, env.spec, rows=2 * rows)(), list[bool]()

    def choose(step: int, episode: int) -> Any:
        choice = call.act(state, replay.observation(), config.last_epsilon, step, episode)
        explored.append(bool(choice.explored))
        return choice.action

    def observe(*step: Any) -> np.ndarray:
        nonlocal state
        state, obs = call.observe_eval(state, *step)
        return obs

    for _ in islice(play(config, env, replay, choose, seed, observe), rows):
        pass

    values = probe_features(agent, state, replay.sample(samples, host_generator(seed, "probe")))
    if {"target-churn", "gradient-cosine"} & set(metrics):
        totals, starts, schedule = (
            zero_totals(agent, config, env.spec),
            replay.valid_starts(),
            target_schedule(config, agent),
        )
        state = agent.forget(state)
        for index in range(updates):
            generator, place = host_generator(seed, "replay", index), index % len(starts)
            if agent.is_streaming:  # steps in their order, and again from the first one
                batch = replay.step_from(starts[place], explored[place])
            else:
                batch = replay.sample(config.batch_size, generator)
            batch = append_held_out(batch, replay.sample(config.held_out_size, generator))
            state, totals = call.update(state, totals, batch)
            step_of_update = (index + 1) * config.update_period
            if schedule.is_refresh_due(step_of_update):
                state = call.refresh(state)
            elif schedule.is_sync_due(step_of_update):
                state = call.sync(state)
        values |= fetch_means(totals, updates)
    return values


class KnownValues(NamedTuple):
    """Learned and true action values of a toy problem in its non-terminal states, of shape (S, A)."""

    states: np.ndarray  # numbers of the states, of shape (S,)
    learned: np.ndarray  # mean of the online heads
    true: np.ndarray


def known_values(run_dir: Path) -> KnownValues | None:
    """Return the learned and the true values of a run on a toy problem; None for any other environment."""
    config: Any = read_config(run_dir)
    if config.env_id not in toy.PROBLEMS or config.env_kwargs or config.env_wrappers:
        return None
    problem = toy.PROBLEMS[config.env_id]()
    agent = make_run_agent(config, run.specification(config))
    if not isinstance(agent.network, Network):  # an agent of a user may have none
        return None
    state, _ = load_agent_state(run_dir, agent)
    obs: Any = problem.features
    if config.normalise_observations:
        obs = normalisation.normalise_observation(state.moments, obs)
    q, _ = agent.network.apply(state.params, state.statistics, obs)
    learned = np.asarray(q)[:, np.array(config.target_scheme.online)].mean(axis=1)
    if config.normalise_rewards:
        learned = learned * np.asarray(normalisation.reward_scale(state.moments))
    states = np.flatnonzero(~problem.terminal)
    return KnownValues(states, learned[states], toy.optimal_values(problem, config.discount)[states])
