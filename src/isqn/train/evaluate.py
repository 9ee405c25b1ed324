"""Play with a trained agent: an environment rebuilt from the run's own configuration, fresh seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.q_learning import Agent, AgentState
from isqn.data.files import DamagedFile
from isqn.envs.adapter import Environment, make_environment
from isqn.keys import episode_seed, host_generator
from isqn.train import checkpoint
from isqn.train.host import compile_agent
from isqn.types import EnvSpec, UserError


class Episode(NamedTuple):
    seed: int
    episodic_return: float
    length: int


class FrameStack:
    """The last frames joined along the last axis, zeros before the first: as the replay stacks them."""

    def __init__(self, spec: EnvSpec):
        self._obs = np.zeros(spec.obs_shape, spec.frame_dtype)
        self._width = spec.frame_shape[-1]

    def reset(self, frame: np.ndarray) -> np.ndarray:
        self._obs[:] = 0
        return self.push(frame)

    def push(self, frame: np.ndarray) -> np.ndarray:
        self._obs = np.concatenate([self._obs[..., self._width :], frame], axis=-1)
        return self._obs


def evaluate(
    agent: Agent,
    state: AgentState,
    env: Environment,
    *,
    episodes: int,
    seed: int,
    epsilon: float,
    max_episode_steps: int,
    video: Path | None = None,
) -> list[Episode]:
    """Raw returns of whole games. Draws come from `seed`, so that the same call gives the same episodes."""
    write_video = _video_writer() if video else None  # what is missing is said before any game is played
    call = compile_agent(agent)
    state = state._replace(seed=jnp.asarray(seed, jnp.uint32))
    stack, played, pictures, step = FrameStack(env.spec), [], [], 0

    def see(frame: np.ndarray) -> np.ndarray:
        nonlocal state
        state, seen = call.watch(state, frame)
        return seen

    for index in range(episodes):
        start = episode_seed(seed, index)
        obs = stack.reset(see(env.reset(start, restart=True)))
        total, length, over = 0.0, 0, False
        while not over:
            if video and index == 0:
                pictures.append(_picture(env))
            frame, reward, terminated, truncated = env.step(call.act(state, obs, epsilon, step, index).action)
            obs = stack.push(see(frame))
            step, length, total = step + 1, length + 1, total + reward
            over = truncated or length >= max_episode_steps
            if terminated and env.continues and not over:
                obs = stack.reset(see(env.reset(start)))  # a lost life is not the end of the game
            else:
                over = over or terminated
        played.append(Episode(start, total, length))
    if video and write_video:
        video.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX's; the child only becomes ffmpeg
            write_video(video, pictures, fps=30, macro_block_size=2)
    return played


def random_return(env_id: str, episodes: int = 1_000, seed: int = 0, most_steps: int = 27_000) -> float:
    """The mean return of uniformly random actions: where the scale of a task begins."""
    env, rng = make_environment(env_id), host_generator(seed, "random-play")
    total = 0.0
    for episode in range(episodes):
        env.reset(episode_seed(seed, episode))
        for _ in range(most_steps):
            _, reward, terminated, truncated = env.step(env.spec.random_action(rng))
            total += reward
            if terminated or truncated:
                break
    env.close()
    return total / episodes


def _picture(env: Environment) -> np.ndarray:
    picture = env.render()
    if picture is None:
        raise UserError(f"{env.spec.id} cannot draw itself; leave out --capture-video.")
    return picture


def _video_writer() -> Callable[..., None]:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401 - imageio looks for it only when it writes
    except ImportError:
        raise UserError('--capture-video needs `pip install "isqn[video]"`.') from None
    return imageio.mimwrite


def load_agent_state(run_dir: Path, agent: Agent, which: str = "last") -> tuple[AgentState, int]:
    """The agent of the newest readable checkpoint (`last`) or of the best epoch (`best`), and its step."""
    template = {"agent": jax.eval_shape(agent.init, 0)}
    for step, folder, arrays in _saved(run_dir, which):
        arrays = {name: array for name, array in arrays.items() if name.startswith("agent.")}
        tree = checkpoint.unflatten(template, arrays, folder)
        return jax.tree.map(jnp.asarray, tree["agent"]), step
    best = "; that of its best epoch may be: --which best" if which == "last" and any(run_dir.glob("best-*")) else ""
    raise UserError(f"{run_dir} has no {which} checkpoint that can be read{best}.")


def _saved(run_dir: Path, which: str) -> Any:
    if which == "last":
        for step, arrays, _ in checkpoint.newest_good(run_dir):
            yield step, checkpoint.folder_of(run_dir, step), arrays
        return
    for folder in sorted(run_dir.glob("best-*"), reverse=True):
        try:
            arrays, manifest = checkpoint.read(folder)
            yield manifest["step"], folder, arrays
        except DamagedFile as error:
            checkpoint.warn_damaged(error)
