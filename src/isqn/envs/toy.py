"""Three small problems with known values, as Gymnasium environments and as JAX functions.

Each problem is a finite Markov decision process, given as arrays. Observations are one-hot, so a linear network is a
table, and its learned values can be compared with the exact ones.
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
    rewards: np.ndarray  # (S, A, S): reward of each transition
    terminal: np.ndarray  # (S,): whether entering the state ends the episode
    start: np.ndarray  # (S,): distribution of the initial state
    features: np.ndarray  # (S, F): observation of each state
    horizon: int  # steps after which an episode is truncated; does not affect the values
    cells: tuple[tuple[int, int], ...]  # (row, column) of each state, for rendering


def chain(length: int = 8) -> FiniteMDP:
    """Make a chain: walk left or right from the left end; entering the right end gives reward 1 and terminates.

    If n = length - 2 - s steps remain after a step to the right, Q*(s, right) = discount**n. A step to the left loses
    two steps, or one at the left end: Q*(s, left) = discount**(n + 2), and Q*(0, left) = discount**(n + 1).
    """
    next_states = np.zeros((length, 2), int)
    for s in range(length):
        next_states[s] = max(s - 1, 0), min(s + 1, length - 1)
    rewards = np.zeros((length, 2, length))
    rewards[:-1, 1, -1] = 1
    return FiniteMDP(
        transitions=np.eye(length)[next_states],
        rewards=rewards,
        terminal=np.arange(length) == length - 1,
        start=np.eye(length)[0],
        features=np.eye(length, dtype=np.float32),
        horizon=100,
        cells=tuple((0, s) for s in range(length)),
    )


def loop(length: int = 3) -> FiniteMDP:
    """Make a ring without terminal states: advancing gives reward 1, staying 0; truncated after 5 steps.

    Q*(s, advance) = 1 / (1 - discount), Q*(s, stay) = discount / (1 - discount). An agent that treats truncation as
    termination learns values of at most 5.
    """
    states = np.arange(length)
    next_states = np.stack([states, (states + 1) % length], axis=1)
    rewards = np.zeros((length, 2, length))
    rewards[:, 1] = 1
    return FiniteMDP(
        transitions=np.eye(length)[next_states],
        rewards=rewards,
        terminal=np.zeros(length, bool),
        start=np.full(length, 1 / length),
        features=np.eye(length, dtype=np.float32),
        horizon=5,
        cells=tuple((0, s) for s in range(length)),
    )


def grid() -> FiniteMDP:
    """Make the 4 x 3 world of Russell and Norvig, "Artificial Intelligence", chapter on sequential decisions.

    A step (up, right, down, left) costs 0.04, and goes to either side with probability 0.1 each. The top right corner
    gives reward 1, the cell below it -1, and both terminate. The tests compare the values with the book's.
    """
    cells = tuple((row, column) for row in range(3) for column in range(4) if (row, column) != (1, 1))
    goals = {cells.index((0, 3)): 1.0, cells.index((1, 3)): -1.0}
    directions = [(-1, 0), (0, 1), (1, 0), (0, -1)]
    num_states = len(cells)
    transitions = np.zeros((num_states, 4, num_states))
    for s, (row, column) in enumerate(cells):
        for action in range(4):
            for turn, probability in ((0, 0.8), (-1, 0.1), (1, 0.1)):
                down, right = directions[(action + turn) % 4]
                target = (row + down, column + right)
                next_state = cells.index(target) if target in cells else s
                transitions[s, action, next_state] += probability
    rewards = np.full((num_states, 4, num_states), -0.04)
    for goal, value in goals.items():
        transitions[goal] = np.eye(num_states)[goal]
        rewards[:, :, goal] += value
    return FiniteMDP(
        transitions=transitions,
        rewards=rewards,
        terminal=np.isin(np.arange(num_states), list(goals)),
        start=np.eye(num_states)[cells.index((2, 0))],
        features=np.eye(num_states, dtype=np.float32),
        horizon=100,
        cells=cells,
    )


PROBLEMS = {"isqn/Chain-v0": chain, "isqn/Loop-v0": loop, "isqn/Grid-v0": grid}


def bellman_iterates(mdp: FiniteMDP, q: np.ndarray, discount: float, k: int) -> np.ndarray:
    """Apply the optimal Bellman operator k times; return q and the k results, of shape (k + 1, S, A)."""
    expected_reward = np.einsum("ijk,ijk->ij", mdp.transitions, mdp.rewards)
    is_nonterminal = ~mdp.terminal
    iterates = [np.asarray(q, np.float64)]
    for _ in range(k):
        value = is_nonterminal * iterates[-1].max(axis=1)
        iterates.append((expected_reward + discount * mdp.transitions @ value) * is_nonterminal[:, None])
    return np.stack(iterates)


def optimal_values(mdp: FiniteMDP, discount: float, tolerance: float = 1e-12) -> np.ndarray:
    """Return Q*, of shape (S, A), by value iteration in float64; zero in terminal states.

    The discount may be 1 if some policy terminates with probability 1.
    """
    q: np.ndarray = np.zeros(mdp.transitions.shape[:2])
    while True:
        previous, q = q, bellman_iterates(mdp, q, discount, 1)[1]
        if np.abs(q - previous).max() <= tolerance * max(1.0, float(np.abs(q).max())):
            return q


class ToyEnvironment(gym.Env):
    """Gymnasium environment of a finite Markov decision process."""

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
        self.state = self._sample(self.mdp.start)
        self.time = 0
        return self.mdp.features[self.state].copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        state = self.state
        self.state = self._sample(self.mdp.transitions[state, action])
        self.time += 1
        reward = float(self.mdp.rewards[state, action, self.state])
        terminated = bool(self.mdp.terminal[self.state])
        truncated = not terminated and self.time >= self.mdp.horizon
        return self.mdp.features[self.state].copy(), reward, terminated, truncated, {}

    def _sample(self, probabilities: np.ndarray) -> int:
        return int(np.searchsorted(np.cumsum(probabilities), self.np_random.random(), side="right"))

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return "\n".join("".join(row) for row in self._text_rows())
        if self.render_mode == "rgb_array":
            colours = {" ": (30, 30, 30), ".": (200, 200, 200), "*": (230, 190, 60), "@": (60, 120, 220)}
            pixels = np.array([[colours[c] for c in row] for row in self._text_rows()], np.uint8)
            return np.kron(pixels, np.ones((32, 32, 1), np.uint8))
        return None

    def _text_rows(self) -> list[list[str]]:
        """Return the map as rows of characters: the agent is @, terminal states are *."""
        height, width = np.max(self.mdp.cells, axis=0) + 1
        text = [[" "] * width for _ in range(height)]
        for s, (row, column) in enumerate(self.mdp.cells):
            text[row][column] = "@" if s == self.state else "*" if self.mdp.terminal[s] else "."
        return text


class ToyState(NamedTuple):
    """State of an episode in JAX."""

    place: Array  # index of the state
    time: Array  # steps since the reset


def make_jax_functions(mdp: FiniteMDP) -> tuple[Any, Any, int]:
    """Return the JAX functions `reset` and `step` of a problem, and its number of actions."""
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
