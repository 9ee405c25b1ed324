"""Three small problems whose values are known exactly, as Gymnasium environments and as JAX functions.

A problem is plain arrays, so one class plays all of them, and value iteration is a few lines of numpy. With
one-hot observations a linear network is a table, and what an agent learned can be compared with the truth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from isqn.lazy import jax, jnp
from isqn.types import Array


class FiniteMDP(NamedTuple):
    """A finite Markov decision process: S states, A actions."""

    transitions: np.ndarray  # (S, A, S): probability of the next state
    rewards: np.ndarray  # (S, A, S): reward of the transition
    terminal: np.ndarray  # (S,): entering such a state ends the episode, and nothing follows it
    start: np.ndarray  # (S,): probability of the first state
    features: np.ndarray  # (S, F): what an agent observes of a state
    horizon: int  # steps after which an episode is truncated; values do not know of it
    cells: tuple[tuple[int, int], ...]  # (row, column) of every state, for pictures


def chain(length: int = 8) -> FiniteMDP:
    """Walk left or right from the left end; entering the right end pays 1 and ends the episode.

    With n = length - 2 - s steps to go after this one: Q*(s, right) = discount**n. Going left costs two
    steps, or one at the wall: Q*(s, left) = discount**(n + 2), and Q*(0, left) = discount**(n + 1).
    """
    moves = np.zeros((length, 2), int)
    for s in range(length):
        moves[s] = max(s - 1, 0), min(s + 1, length - 1)
    rewards = np.zeros((length, 2, length))
    rewards[:-1, 1, -1] = 1
    return FiniteMDP(
        transitions=np.eye(length)[moves],
        rewards=rewards,
        terminal=np.arange(length) == length - 1,
        start=np.eye(length)[0],
        features=np.eye(length, dtype=np.float32),
        horizon=100,
        cells=tuple((0, s) for s in range(length)),
    )


def loop(length: int = 3) -> FiniteMDP:
    """A ring that nothing ever ends: going on pays 1, staying pays 0, and every episode is cut after 5 steps.

    Q*(s, go) = 1 / (1 - discount), Q*(s, stay) = discount / (1 - discount). An agent that takes truncation
    for termination cannot find more than 5.
    """
    states = np.arange(length)
    moves = np.stack([states, (states + 1) % length], axis=1)
    rewards = np.zeros((length, 2, length))
    rewards[:, 1] = 1
    return FiniteMDP(
        transitions=np.eye(length)[moves],
        rewards=rewards,
        terminal=np.zeros(length, bool),
        start=np.full(length, 1 / length),
        features=np.eye(length, dtype=np.float32),
        horizon=5,
        cells=tuple((0, s) for s in range(length)),
    )


def grid() -> FiniteMDP:
    """The 4 x 3 world of Russell and Norvig, "Artificial Intelligence", chapter on sequential decisions.

    A step (up, right, down, left) goes astray to either side with probability 0.1 each, and costs 0.04. The
    corner pays 1, the cell below it -1, and both end the episode. Their table of values is our test.
    """
    cells = tuple((row, column) for row in range(3) for column in range(4) if (row, column) != (1, 1))
    goals = {cells.index((0, 3)): 1.0, cells.index((1, 3)): -1.0}
    directions = [(-1, 0), (0, 1), (1, 0), (0, -1)]
    size = len(cells)
    transitions = np.zeros((size, 4, size))
    for s, (row, column) in enumerate(cells):
        for action in range(4):
            for turn, probability in ((0, 0.8), (-1, 0.1), (1, 0.1)):
                down, right = directions[(action + turn) % 4]
                to = (row + down, column + right)
                transitions[s, action, cells.index(to) if to in cells else s] += probability
    rewards = np.full((size, 4, size), -0.04)
    for goal, value in goals.items():
        transitions[goal] = np.eye(size)[goal]
        rewards[:, :, goal] += value
    return FiniteMDP(
        transitions=transitions,
        rewards=rewards,
        terminal=np.isin(np.arange(size), list(goals)),
        start=np.eye(size)[cells.index((2, 0))],
        features=np.eye(size, dtype=np.float32),
        horizon=100,
        cells=cells,
    )


PROBLEMS = {"isqn/Chain-v0": chain, "isqn/Loop-v0": loop, "isqn/Grid-v0": grid}


def bellman_iterates(mdp: FiniteMDP, q: np.ndarray, discount: float, k: int) -> np.ndarray:
    """q and its k images under the optimal Bellman operator, stacked: (k + 1, S, A)."""
    expected_reward = np.einsum("ijk,ijk->ij", mdp.transitions, mdp.rewards)
    alive = ~mdp.terminal
    iterates = [np.asarray(q, np.float64)]
    for _ in range(k):
        value = alive * iterates[-1].max(axis=1)
        iterates.append((expected_reward + discount * mdp.transitions @ value) * alive[:, None])
    return np.stack(iterates)


def optimal_values(mdp: FiniteMDP, discount: float, tolerance: float = 1e-12) -> np.ndarray:
    """Q*, (S, A), by value iteration in float64; zero in terminal states.

    A discount of 1 is allowed where some policy surely ends the episode.
    """
    q: np.ndarray = np.zeros(mdp.transitions.shape[:2])
    while True:
        previous, q = q, bellman_iterates(mdp, q, discount, 1)[1]
        if np.abs(q - previous).max() <= tolerance * max(1.0, float(np.abs(q).max())):
            return q


class ToyEnvironment(gym.Env):
    """A finite problem, played."""

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}  # noqa: RUF012 - gymnasium's convention

    def __init__(self, name: str, render_mode: str | None = None):
        self.mdp = PROBLEMS[name]()
        self.render_mode = render_mode
        features = self.mdp.features
        self.observation_space = gym.spaces.Box(
            features.min(axis=0), features.max(axis=0), shape=features.shape[1:], dtype=np.float32
        )
        self.action_space = gym.spaces.Discrete(self.mdp.transitions.shape[1])
        self.state = 0
        self.time = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = self._draw(self.mdp.start)
        self.time = 0
        return self.mdp.features[self.state].copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        before = self.state
        self.state = self._draw(self.mdp.transitions[before, action])
        self.time += 1
        reward = float(self.mdp.rewards[before, action, self.state])
        terminated = bool(self.mdp.terminal[self.state])
        truncated = not terminated and self.time >= self.mdp.horizon
        return self.mdp.features[self.state].copy(), reward, terminated, truncated, {}

    def _draw(self, probabilities: np.ndarray) -> int:
        return int(np.searchsorted(np.cumsum(probabilities), self.np_random.random(), side="right"))

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return "\n".join("".join(row) for row in self._characters())
        if self.render_mode == "rgb_array":
            colours = {" ": (30, 30, 30), ".": (200, 200, 200), "*": (230, 190, 60), "@": (60, 120, 220)}
            small = np.array([[colours[c] for c in row] for row in self._characters()], np.uint8)
            return np.kron(small, np.ones((32, 32, 1), np.uint8))
        return None

    def _characters(self) -> list[list[str]]:
        """The agent is @, the ends of the episode are *."""
        rows, columns = np.max(self.mdp.cells, axis=0) + 1
        picture = [[" "] * columns for _ in range(rows)]
        for s, (row, column) in enumerate(self.mdp.cells):
            picture[row][column] = "@" if s == self.state else "*" if self.mdp.terminal[s] else "."
        return picture


class ToyState(NamedTuple):
    place: Array
    time: Array


def native(mdp: FiniteMDP) -> tuple[Any, Any, int]:
    """The functions reset and step of the same problem in JAX, and the number of actions."""
    with np.errstate(divide="ignore"):
        log_start, log_transitions = np.log(mdp.start), np.log(mdp.transitions)
    rewards, features = mdp.rewards.astype(np.float32), mdp.features

    def reset(key: Array) -> tuple[ToyState, Array]:
        place = jax.random.categorical(key, log_start)
        return ToyState(place, jnp.int32(0)), jnp.asarray(features)[place]

    def step(state: ToyState, action: Array, key: Array) -> tuple[ToyState, Array, Array, Array, Array]:
        place = jax.random.categorical(key, jnp.asarray(log_transitions)[state.place, action])
        time = state.time + 1
        reward = jnp.asarray(rewards)[state.place, action, place]
        terminated = jnp.asarray(mdp.terminal)[place]
        return (
            ToyState(place, time),
            jnp.asarray(features)[place],
            reward,
            terminated,
            ~terminated & (time >= mdp.horizon),
        )

    return reset, step, mdp.transitions.shape[1]
