"""Play with a trained agent: an environment rebuilt from the run's own configuration, fresh seeds."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.agents.base import Agent, AgentState
from isqn.compiler import jit
from isqn.data.files import DamagedFile
from isqn.envs.adapter import Environment, make_environment
from isqn.envs.native import NativeEnvironment
from isqn.keys import device_key, episode_seed, host_generator
from isqn.train import checkpoint
from isqn.train.functions import compile_agent
from isqn.types import Array, EnvSpec, Interrupted, UserError


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
        state, seen = call.observe_eval(state, frame)
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


def host_evaluation(
    agent: Agent,
    environments: list[Environment],
    *,
    steps: int,
    epsilon: float,
    max_episode_steps: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Callable[[AgentState, int], list[Episode]]:
    """A function of a state and a seed, which plays whole games in several environments at once: each takes its share
    of the steps, and ends its last game."""
    count = len(environments)
    share, everyone = -(-steps // count), np.arange(count)
    act = jit(jax.vmap(agent.act, in_axes=(None, 0, None, 0, 0)))

    def evaluate(state: AgentState, seed: int) -> list[Episode]:
        state = only_acting(state, seed)
        stacks = [FrameStack(env.spec) for env in environments]
        games = everyone.copy()  # the number of the game that each is in
        obs = np.stack([begin(environments[i], stacks[i], seed, i) for i in range(count)])
        totals, lengths, left = np.zeros(count), np.zeros(count, int), np.full(count, share)
        found: list[list[Episode]] = [[] for _ in environments]
        for time in itertools.count():
            playing = np.flatnonzero(left > 0)
            if not len(playing):
                break
            if should_stop():
                raise Interrupted(STOPPED)
            actions = np.asarray(act(state, obs, epsilon, time * count + everyone, games).action)
            for i in playing:
                env, stack = environments[i], stacks[i]
                frame, reward, terminated, truncated = env.step(actions[i])
                obs[i] = stack.push(frame)
                totals[i], lengths[i] = totals[i] + reward, lengths[i] + 1
                over = truncated or lengths[i] >= max_episode_steps
                if terminated and env.continues and not over:  # a lost life is not the end of the game
                    obs[i] = stack.reset(env.reset(episode_seed(seed, int(games[i]))))
                elif terminated or over:
                    found[i].append(Episode(episode_seed(seed, int(games[i])), float(totals[i]), int(lengths[i])))
                    games[i], left[i] = games[i] + count, left[i] - lengths[i]
                    totals[i], lengths[i] = 0.0, 0
                    obs[i] = begin(env, stack, seed, int(games[i]))
        return [episode for episodes in found for episode in episodes]

    def begin(env: Environment, stack: FrameStack, seed: int, game: int) -> np.ndarray:
        return stack.reset(env.reset(episode_seed(seed, game), restart=True))

    return evaluate


STOPPED = "stopped in an evaluation, which is played again by `isqn resume`; what was learned is saved"


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
    """The same in one program, for an environment that is written in JAX."""
    share = -(-steps // count)
    stretch = min(share, 1_000)

    def begin(seed: Array, index: Array) -> Any:
        return (*env.reset(device_key(seed, "environment", 0, index)), jnp.float32(0), jnp.int32(0)), index

    def step(state: AgentState, playing: Any, index: Array, time: Array) -> Any:
        (inner, obs, total, length), game = playing
        number = time * count + index
        action = agent.act(state, obs, jnp.float32(epsilon), number, game).action
        step_key, reset_key = jax.random.split(device_key(state.seed, "environment", 1, number))
        inner, obs, reward, terminated, truncated = env.step(inner, action, step_key)
        total, length = total + reward, length + 1
        over = terminated | truncated | (length >= max_episode_steps)
        again = (*env.reset(reset_key), jnp.float32(0), jnp.int32(0))
        playing = jax.tree.map(lambda new, old: jnp.where(over, new, old), again, (inner, obs, total, length))
        return (playing, game + count * over), (over, total, length)

    start = jit(jax.vmap(begin, (None, 0)))

    @jit
    def play(state: AgentState, games: Any, first: Array) -> Any:
        def together(games: Any, time: Array) -> Any:
            return jax.vmap(step, (None, 0, 0, None))(state, games, jnp.arange(count), time)

        return jax.lax.scan(together, games, first + jnp.arange(stretch))

    def evaluate(state: AgentState, seed: int) -> list[Episode]:
        state = only_acting(state, seed)
        games = start(seed, jnp.arange(count))
        found: list[list[Episode]] = [[] for _ in range(count)]
        played = np.zeros(count, int)  # steps of the games that have ended
        first = 0
        while (played < share).any():
            if should_stop():
                raise Interrupted(STOPPED)
            games, ended = play(state, games, first)
            over, totals, lengths = map(np.asarray, ended)
            for time, index in zip(*np.nonzero(over), strict=True):
                if played[index] < share:
                    played[index] += lengths[time, index]
                    found[index].append(Episode(seed, float(totals[time, index]), int(lengths[time, index])))
            first += stretch
        return [episode for episodes in found for episode in episodes]

    return evaluate


def only_acting(state: AgentState, seed: int) -> AgentState:
    """Return the acting part of a state, with a seed of its own."""
    return state._replace(seed=jnp.asarray(seed, jnp.uint32), optimizer=(), copies=(), probe=())


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
