"""Evaluation of a trained agent, on episodes that depend on a seed of their own."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import Agent, AgentState
from isqn.compiler import jit
from isqn.data.files import DamagedFile, writing
from isqn.envs.adapter import Environment, make_environment
from isqn.envs.native import NativeEnvironment, to_native_action
from isqn.keys import device_key, episode_seed, host_generator
from isqn.train import checkpoint
from isqn.train.functions import compile_agent
from isqn.types import Array, EnvSpec, Interrupted, UserError


class Episode(NamedTuple):
    """Result of one episode, over all lives; the return is that of unclipped rewards."""

    seed: int
    episodic_return: float
    length: int


class FrameStack:
    """The last frames of an episode, joined along the last axis as in the replay buffer; zeros before the first."""

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
    """Play whole episodes, over all lives, and return their results; the same seed gives the same episodes."""
    write_video = _video_writer() if video else None  # a missing package is reported before any episode is played
    call = compile_agent(agent)
    state = state._replace(seed=jnp.asarray(seed, jnp.uint32))
    stack, results, pictures, step = FrameStack(env.spec), list[Episode](), list[np.ndarray](), 0

    def observe(frame: np.ndarray) -> np.ndarray:
        nonlocal state
        state, obs = call.observe_eval(state, frame)
        return obs

    for index in range(episodes):
        start = episode_seed(seed, index)
        obs = stack.reset(observe(env.reset(start, restart=True)))
        total, length, is_over = 0.0, 0, False
        while not is_over:
            if video and index == 0:
                pictures.append(_render(env))
            frame, reward, terminated, truncated = env.step(call.act(state, obs, epsilon, step, index).action)
            obs = stack.push(observe(frame))
            step, length, total = step + 1, length + 1, total + reward
            is_over = truncated or length >= max_episode_steps
            if terminated and env.game_continues and not is_over:
                obs = stack.reset(observe(env.reset(start)))  # a lost life is not the end of the game
            else:
                is_over = is_over or terminated
        results.append(Episode(start, total, length))
    if video and write_video:
        with writing(video):
            video.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # from JAX; the child only starts ffmpeg
            write_video(video, pictures, fps=30, macro_block_size=2)
    return results


def host_evaluation(
    agent: Agent,
    environments: list[Environment],
    *,
    steps: int,
    epsilon: float,
    max_episode_steps: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Callable[[AgentState, int], list[Episode]]:
    """Return a function that evaluates a state with a seed, in several environments in parallel.

    It plays whole episodes, over all lives: each environment takes its share of `steps`, and then ends its last one.
    """
    count = len(environments)
    share, indices = -(-steps // count), np.arange(count)
    act = jit(jax.vmap(agent.act, in_axes=(None, 0, None, 0, 0)))

    def evaluate(state: AgentState, seed: int) -> list[Episode]:
        state = acting_state(state, seed)
        stacks = [FrameStack(env.spec) for env in environments]
        games = indices.copy()  # number of the current game in each environment
        obs = np.stack([reset_game(environments[i], stacks[i], seed, i) for i in range(count)])
        totals, lengths, steps_left = np.zeros(count), np.zeros(count, int), np.full(count, share)
        results: list[list[Episode]] = [[] for _ in environments]
        for time in itertools.count():
            playing = np.flatnonzero(steps_left > 0)
            if not len(playing):
                break
            if should_stop():
                raise Interrupted(STOPPED)
            actions = np.asarray(act(state, obs, epsilon, time * count + indices, games).action)
            for i in playing:
                env, stack = environments[i], stacks[i]
                frame, reward, terminated, truncated = env.step(actions[i])
                obs[i] = stack.push(frame)
                totals[i], lengths[i] = totals[i] + reward, lengths[i] + 1
                is_over = truncated or lengths[i] >= max_episode_steps
                if terminated and env.game_continues and not is_over:  # a lost life is not the end of the game
                    obs[i] = stack.reset(env.reset(episode_seed(seed, int(games[i]))))
                elif terminated or is_over:
                    results[i].append(Episode(episode_seed(seed, int(games[i])), float(totals[i]), int(lengths[i])))
                    games[i], steps_left[i] = games[i] + count, steps_left[i] - lengths[i]
                    totals[i], lengths[i] = 0.0, 0
                    obs[i] = reset_game(env, stack, seed, int(games[i]))
        return [episode for episodes in results for episode in episodes]

    def reset_game(env: Environment, stack: FrameStack, seed: int, game: int) -> np.ndarray:
        return stack.reset(env.reset(episode_seed(seed, game), restart=True))

    return evaluate


STOPPED = "stopped during an evaluation, which `isqn resume` repeats; the training before it is saved"


def native_evaluation(
    agent: Agent,
    env: NativeEnvironment,
    *,
    count: int,
    steps: int,
    epsilon: float,
    max_episode_steps: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Callable[[AgentState, int], list[Episode]]:
    """Return a function as `host_evaluation` does, for an environment written in JAX: all in one compiled program."""
    share = -(-steps // count)
    stretch = min(share, 1_000)

    def reset_game(seed: Array, index: Array) -> Any:
        return (*env.reset(device_key(seed, "environment", 0, index)), jnp.float32(0), jnp.int32(0)), index

    def step(state: AgentState, playing: Any, index: Array, time: Array) -> Any:
        (env_state, obs, total, length), game = playing
        number = time * count + index
        action = agent.act(state, obs, jnp.float32(epsilon), number, game).action
        step_key, reset_key = jax.random.split(device_key(state.seed, "environment", 1, number))
        env_action = to_native_action(env.spec, action)
        env_state, obs, reward, terminated, truncated = env.step(env_state, env_action, step_key)
        total, length = total + reward, length + 1
        over = terminated | truncated | (length >= max_episode_steps)
        new_game = (*env.reset(reset_key), jnp.float32(0), jnp.int32(0))
        playing = jax.tree.map(lambda new, old: jnp.where(over, new, old), new_game, (env_state, obs, total, length))
        return (playing, game + count * over), (over, total, length)

    start = jit(jax.vmap(reset_game, (None, 0)))

    @jit
    def play(state: AgentState, games: Any, first: Array) -> Any:
        def step_all(games: Any, time: Array) -> Any:
            return jax.vmap(step, (None, 0, 0, None))(state, games, jnp.arange(count), time)

        return jax.lax.scan(step_all, games, first + jnp.arange(stretch))

    def evaluate(state: AgentState, seed: int) -> list[Episode]:
        state = acting_state(state, seed)
        games = start(seed, jnp.arange(count))
        results: list[list[Episode]] = [[] for _ in range(count)]
        counted = np.zeros(count, int)  # steps of the games that have ended
        first = 0
        while (counted < share).any():
            if should_stop():
                raise Interrupted(STOPPED)
            games, ended = play(state, games, first)
            over, totals, lengths = map(np.asarray, ended)
            for time, index in zip(*np.nonzero(over), strict=True):
                if counted[index] < share:
                    counted[index] += lengths[time, index]
                    results[index].append(Episode(seed, float(totals[time, index]), int(lengths[time, index])))
            first += stretch
        return [episode for episodes in results for episode in episodes]

    return evaluate


def acting_state(state: AgentState, seed: int) -> AgentState:
    """Return the parts of a state that acting needs, with another seed."""
    return state._replace(seed=jnp.asarray(seed, jnp.uint32), optimizer=(), copies=(), probe=())


def random_return(env_id: str, episodes: int = 1_000, seed: int = 0, max_steps: int = 27_000, **settings: Any) -> float:
    """Return the mean return of uniformly random actions, the zero of normalised scores."""
    rng, total = host_generator(seed, "random-play"), 0.0
    with make_environment(env_id, **settings) as env:
        for episode in range(episodes):
            env.reset(episode_seed(seed, episode))
            for _ in range(max_steps):
                _, reward, terminated, truncated = env.step(env.spec.random_action(rng))
                total += reward
                if terminated or truncated:
                    break
    return total / episodes


def _render(env: Environment) -> np.ndarray:
    picture = env.render()
    if picture is None:
        raise UserError(f"{env.spec.id} cannot be rendered; leave out --capture-video.")
    return picture


def _video_writer() -> Callable[..., None]:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401 - imageio looks for it only when it writes
    except ImportError:
        raise UserError('--capture-video needs `pip install "isqn[video]"`.') from None
    return imageio.mimwrite


def load_agent_state(run_dir: Path, agent: Agent, which: str = "last") -> tuple[AgentState, int]:
    """Return the agent of the newest readable checkpoint (`last`) or of the best epoch (`best`), and its step."""
    template = {"agent": jax.eval_shape(agent.init, 0)}
    for step, folder, arrays in _saved_agents(run_dir, which):
        arrays = {name: array for name, array in arrays.items() if name.startswith("agent.")}
        tree = checkpoint.unflatten(template, arrays, folder)
        return jax.tree.map(jnp.asarray, tree["agent"]), step
    if which == "last" and not checkpoint.steps(run_dir):
        raise UserError(f"{run_dir} has no checkpoint yet; train it for longer.")
    best = "; that of its best epoch may be (`--which best`)" if which == "last" and any(run_dir.glob("best-*")) else ""
    raise UserError(f"{run_dir} has no {which} checkpoint that can be read{best}.")


def _saved_agents(run_dir: Path, which: str) -> Iterator[tuple[int, Path, dict[str, np.ndarray]]]:
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
