"""Datasets collected by a trained agent."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import Agent, AgentState, identity_observe
from isqn.data.dataset import DatasetWriter, Provenance
from isqn.data.files import lock_folder
from isqn.envs.adapter import Environment
from isqn.keys import episode_seed
from isqn.train.evaluate import FrameStack
from isqn.train.functions import compile_agent
from isqn.types import Interrupted, UserError

SAVE_STEPS = 50_000  # agent steps between saves


def collect(
    agent: Agent,
    state: AgentState,
    env: Environment,
    out: Path,
    about: Provenance,
    *,
    steps: int,
    seed: int,
    epsilon: float,
    max_episode_steps: int,
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[int, float], None] = lambda *_: None,
) -> bool:
    """Record at least `steps` steps, to the end of an episode; return False if the dataset was complete.

    The same call resumes a collection that was interrupted.
    """
    call = compile_agent(agent)
    writer, stack = DatasetWriter(out, env.spec, about), FrameStack(env.spec)
    state = state._replace(seed=jnp.asarray(seed, jnp.uint32))
    weights = sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params))).hexdigest()
    settings = {"steps": steps, "epsilon": epsilon, "weights": weights}
    index = writer.resume(**settings)
    if index.get("complete"):
        return False
    step = saved_step = index.get("step", 0)
    episode = index.get("episode", 0)
    if step and agent.observe_eval is not identity_observe:
        raise UserError(f"{out} cannot be resumed: the running moments of the agent were not saved; delete it.")

    def observe(frame: np.ndarray) -> np.ndarray:
        nonlocal state
        state, obs = call.observe_eval(state, frame)
        return obs

    with lock_folder(out, "choose another --out"):
        while step < steps:
            frame = env.reset(episode_seed(seed, episode), restart=True)
            obs, length, is_over, total = stack.reset(observe(frame)), 0, False, 0.0
            writer.add_first(frame)
            while not is_over:
                action = np.asarray(call.act(state, obs, epsilon, step, episode).action)
                frame, reward, terminated, truncated = env.step(action)
                step, length, total = step + 1, length + 1, total + reward
                truncated = truncated or (not terminated and length >= max_episode_steps)
                writer.add(action, reward, terminated, truncated, frame)
                obs, is_over = stack.push(observe(frame)), terminated or truncated
                # A lost life is not the end of the game.
                if is_over and env.game_continues and length < max_episode_steps:
                    frame = env.reset(episode_seed(seed, episode))
                    obs, is_over = stack.reset(observe(frame)), False
                    writer.add_first(frame)
            episode += 1
            report(step, total)
            stopping = should_stop() and step < steps
            if step - saved_step >= SAVE_STEPS or step >= steps or stopping:
                saved_step = step
                writer.save(tidy=True, **settings, step=step, episode=episode, complete=step >= steps)
            if stopping:
                raise Interrupted(f"stopped at step {step:,}; the same command resumes it")
    return True
