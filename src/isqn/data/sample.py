"""Sampling of transitions from rows; frame stacks and n-step returns are built when a batch is sampled.

A row is one time step of an episode: a frame, and the action and reward of the step taken from it. An episode of L
steps has L + 1 rows: no step starts at the last row, but it holds the true last observation to bootstrap from. Rows are
numbered from the first one ever added.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isqn.data.frames import Frames, Layout
from isqn.types import EnvSpec, Transition, UserError

Array = NDArray[Any]

COLUMNS = ("actions", "rewards", "ends")
# Values of the column `ends`: the role of a row in its episode. No step starts at a row of context, which only appears
# in frame stacks.
INSIDE, TRUNCATED, TERMINATED, CONTEXT = 0, 1, 2, 4
ENDED = TRUNCATED | TERMINATED


@dataclass
class Rows:
    """Rows of episodes and the n-step transitions in them; only the last `capacity` rows are sampled.

    Older rows remain available while a frame stack needs them. A column may be a ring buffer: row r is at index r
    modulo its length. Slots that are not yet written count as ended, so that no stack reaches back before row 0. Not
    thread-safe.
    """

    spec: EnvSpec
    layout: Layout
    capacity: int
    frames: Frames
    actions: Array
    rewards: Array
    ends: Array
    num_steps_return: int
    discount: float
    reward_clip: float | None
    total: int = 0  # number of rows ever added

    @property
    def num_rows(self) -> int:
        """Number of rows that can be sampled."""
        return min(self.total, self.capacity)

    def slot(self, row: Any) -> Any:
        """Return the index of a row (or of several) in the columns."""
        return row % len(self.ends)

    def sample(self, batch_size: int, generator: np.random.Generator) -> Transition:
        """Sample a batch uniformly, with replacement, from the valid starts."""
        return self.gather(self._draw(batch_size, generator))

    def valid_starts(self) -> Array:
        """Return all rows at which a transition can start: those with a complete n-step return."""
        rows = np.arange(self.total - self.num_rows, self.total)
        return rows[self._steps_taken(rows) > 0]

    def gather(self, starts: Array) -> Transition:
        """Return the transitions that start at the given rows.

        Observations are read-only, because they are views of one (batch, frame, ...) array where possible: jax reorders
        the axes on transfer in a third of the time that numpy would take here.
        """
        steps = self._steps_taken(starts)
        if not steps.all():
            raise ValueError(f"No transition starts at rows {starts[steps == 0].tolist()}.")
        ahead = np.arange(self.num_steps_return)
        rewards = self.rewards[self.slot(starts[:, None] + ahead)].astype(np.float64)
        if self.reward_clip is not None:
            rewards = rewards.clip(-self.reward_clip, self.reward_clip)
        rewards = np.where(ahead < steps[:, None], rewards, 0.0)
        terminated = self.ends[self.slot(starts + steps)] == TERMINATED
        obs, next_obs = self._stacks(starts, steps)
        return Transition(
            obs=obs,
            action=self.actions[self.slot(starts)].astype(self.spec.action_dtype),
            reward=(rewards * self.discount**ahead).sum(1).astype(np.float32),
            discount=np.where(terminated, 0.0, self.discount**steps).astype(np.float32),
            next_obs=next_obs,
        )

    def _draw(self, batch_size: int, generator: np.random.Generator) -> Array:
        """Draw valid starts by rejection sampling, or from their full list if that takes too long."""
        drawn = np.empty(0, np.int64)
        for _ in range(64):  # nearly every row is a valid start, except in very small buffers
            if not self.total:
                break
            rows = generator.integers(self.total - self.num_rows, self.total, batch_size)
            drawn = np.concatenate([drawn, rows[self._steps_taken(rows) > 0]])[:batch_size]
            if len(drawn) == batch_size:
                return drawn
        starts = self.valid_starts()
        if not len(starts):
            raise UserError(
                f"The replay holds {self.num_rows} rows and no complete {self.num_steps_return}-step "
                "transition to sample; let the agent act longer before it learns (--learning-starts)."
            )
        return np.concatenate([drawn, generator.choice(starts, batch_size - len(drawn))])

    def _steps_taken(self, starts: Array) -> Array:
        """Return the number of steps in the n-step return of each row.

        It is n, or fewer at the end of an episode. It is 0 if no step starts at the row or the return is incomplete.
        """
        n = self.num_steps_return
        ahead = np.minimum(starts[:, None] + np.arange(1, n + 1), self.total - 1)
        ends = self.ends[self.slot(ahead)] & ENDED != 0
        ended = ends.any(1)
        complete = ended | (starts + n < self.total)
        steps = np.where(ended, ends.argmax(1) + 1, n)
        return np.where(complete & (self.ends[self.slot(starts)] == INSIDE), steps, 0)

    def _stacks(self, starts: Array, steps: Array) -> tuple[Array, Array]:
        """Return the observations at both ends of each return; frames before the start of an episode are zeros."""
        stack = self.spec.frame_stack
        width = stack + self.num_steps_return
        window: Array = np.zeros((len(starts), width, self.layout.words), self.layout.word)
        self.frames.read(window, starts - stack + 1, self.first_in_stack(starts), starts + steps)
        window.flags.writeable = False
        if (steps == self.num_steps_return).all():
            following = window[:, self.num_steps_return :]
        else:
            following = window[np.arange(len(starts))[:, None], steps[:, None] + np.arange(stack)]
        return self.observations(window[:, :stack]), self.observations(following)

    def first_in_stack(self, rows: Array) -> Array:
        """Return the oldest row in the frame stack of each row, which never reaches into the previous episode."""
        previous = rows[:, None] - np.arange(1, self.spec.frame_stack)
        stops = np.ones((len(rows), self.spec.frame_stack), bool)
        stops[:, :-1] = self.ends[self.slot(previous)] & ENDED != 0
        return rows - stops.argmax(1)

    def observations(self, stacks: Array) -> Array:
        """Convert stored frames, (batch, stack, words), to observations, concatenated along the last axis."""
        spec = self.spec
        frames = stacks.view(spec.frame_dtype).reshape(*stacks.shape[:2], *spec.frame_shape)
        return np.moveaxis(frames, 1, -2).reshape(len(stacks), *spec.obs_shape)


def action_dtype(spec: EnvSpec) -> np.dtype[Any]:
    """Return the dtype of the column of actions: the smallest unsigned integer, or float32 if continuous."""
    return np.dtype(spec.action_dtype) if spec.is_continuous else np.min_scalar_type(spec.num_actions - 1)


def columns_bytes(spec: EnvSpec, rows: int) -> int:
    """Return the size in bytes of the columns of so many rows."""
    width = action_dtype(spec).itemsize * prod(spec.action_shape)
    return rows * (width + np.dtype(np.float32).itemsize + np.dtype(np.uint8).itemsize)
