"""Replay buffer of the compiled loop: arrays on the device, one row per step.

Each row holds both `obs` and `next_obs`. The last observation of an episode then needs no row of its own, so parallel
seeds stay aligned although their episodes end at different times. Boolean observations (MinAtar) are packed into bits:
50 bytes instead of 400.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.types import Array, EnvSpec, Transition, num_bytes


class Rows(NamedTuple):
    """Ring buffer of steps: the step at time t is row t modulo the capacity."""

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    ended: Array  # whether the episode ended at this step (terminated or truncated)
    next_obs: Array
    explored: Array  # whether another action had a higher value


class DeviceReplay(NamedTuple):
    """Settings and pure functions of the replay buffer; its `Rows` are part of the loop's state."""

    spec: EnvSpec
    capacity: int
    num_steps_return: int
    discount: float
    reward_clip: float | None

    @property
    def is_packed(self) -> bool:
        """Whether observations are stored as bits."""
        return self.spec.frame_dtype == "bool"

    def init(self) -> Rows:
        """Return an empty ring buffer."""
        size = int(np.prod(self.spec.obs_shape))
        width, dtype = (-(-size // 8), "uint8") if self.is_packed else (size, self.spec.frame_dtype)

        def column(dtype: str, *shape: int) -> Array:
            return jnp.zeros((self.capacity, *shape), dtype)

        return Rows(
            obs=column(dtype, width),
            action=column(self.spec.action_dtype, *self.spec.action_shape),
            reward=column("float32"),
            terminated=column("bool"),
            ended=column("bool"),
            next_obs=column(dtype, width),
            explored=column("bool"),
        )

    @property
    def nbytes(self) -> int:
        """Exact size in bytes, computed without allocating anything."""
        return num_bytes(jax.eval_shape(self.init))

    def add(self, rows: Rows, time: Array, row: Rows) -> Rows:
        """Write the step taken at `time`, counted from 0."""
        row = row._replace(obs=self._encode(row.obs), next_obs=self._encode(row.next_obs))
        slot = time % self.capacity
        return jax.tree.map(lambda ring, new: jax.lax.dynamic_update_index_in_dim(ring, new, slot, 0), rows, row)

    def sample(self, rows: Rows, num_added: Array | int, key: Array, batch_size: int) -> Transition:
        """Sample n-step transitions uniformly from the steps that have n - 1 successors in the buffer."""
        n = self.num_steps_return
        size = jnp.minimum(num_added, self.capacity)
        start = num_added - size + jax.random.randint(key, (batch_size,), 0, size - n + 1)
        steps = (start[:, None] + jnp.arange(n)) % self.capacity  # (B, n)
        ended = rows.ended[steps]
        # A step counts towards the return unless an earlier step of its window ended the episode.
        counts = jnp.cumprod(jnp.concatenate([jnp.ones((batch_size, 1), bool), ~ended[:, :-1]], axis=1), axis=1)
        rewards = self._clip(rows.reward[steps])
        powers = self.discount ** jnp.arange(n, dtype=jnp.float32)
        num_steps = counts.sum(axis=1)
        last = jnp.take_along_axis(steps, num_steps[:, None] - 1, axis=1)[:, 0]
        return Transition(
            obs=self._decode(rows.obs[steps[:, 0]]),
            action=rows.action[steps[:, 0]],
            reward=(rewards * counts * powers).sum(axis=1),
            discount=jnp.float32(self.discount) ** num_steps * ~rows.terminated[last],
            next_obs=self._decode(rows.next_obs[last]),
        )

    def latest(self, rows: Rows, num_added: Array | int) -> Transition:
        """Return the newest step as a batch of one, for agents that learn online from a stream."""
        row = jax.tree.map(lambda ring: jnp.take(ring, (num_added - 1) % self.capacity, axis=0)[None], rows)
        return Transition(
            obs=self._decode(row.obs),
            action=row.action,
            reward=self._clip(row.reward),
            discount=jnp.float32(self.discount) * ~row.terminated,
            next_obs=self._decode(row.next_obs),
            ended=row.ended,
            explored=row.explored,
        )

    def _clip(self, rewards: Array) -> Array:
        return rewards if self.reward_clip is None else jnp.clip(rewards, -self.reward_clip, self.reward_clip)

    def _encode(self, obs: Array) -> Array:
        flat = obs.reshape(-1)
        return jnp.packbits(flat) if self.is_packed else flat

    def _decode(self, stored: Array) -> Array:
        if self.is_packed:
            stored = jnp.unpackbits(stored, axis=-1, count=int(np.prod(self.spec.obs_shape))).astype(bool)
        return stored.reshape(-1, *self.spec.obs_shape)
