"""The replay of the compiled loop: plain arrays on the device, one row for each step, all seeds in step.

Each row holds both ends of its step, so that the last observation of an episode needs no row of its own
and seeds whose episodes end at different times stay aligned. Boolean observations (MinAtar) are kept as
bits: 50 bytes instead of 400.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isqn.types import Array, EnvSpec, Transition, num_bytes


class Rows(NamedTuple):
    """A ring: the step taken at time t is row t modulo the capacity."""

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    ended: Array  # terminated or truncated
    next_obs: Array
    explored: Array  # whether another action looked better


class DeviceReplay(NamedTuple):
    """What sampling needs to know; the rows themselves are part of the loop's state."""

    spec: EnvSpec
    capacity: int
    num_steps_return: int
    discount: float
    reward_clip: float | None

    @property
    def is_packed(self) -> bool:
        return self.spec.frame_dtype == "bool"

    def init(self) -> Rows:
        size = int(np.prod(self.spec.obs_shape))
        width, dtype = (-(-size // 8), "uint8") if self.is_packed else (size, self.spec.frame_dtype)

        def rows(dtype: str, *shape: int) -> Array:
            return jnp.zeros((self.capacity, *shape), dtype)

        return Rows(
            obs=rows(dtype, width),
            action=rows("int32"),
            reward=rows("float32"),
            terminated=rows("bool"),
            ended=rows("bool"),
            next_obs=rows(dtype, width),
            explored=rows("bool"),
        )

    @property
    def nbytes(self) -> int:
        """Exact, known before anything is allocated."""
        return num_bytes(jax.eval_shape(self.init))

    def add(self, rows: Rows, time: Array, row: Rows) -> Rows:
        """Write the step taken at `time`, counted from 0."""
        row = row._replace(obs=self._encode(row.obs), next_obs=self._encode(row.next_obs))
        place = time % self.capacity
        return jax.tree.map(lambda ring, new: jax.lax.dynamic_update_index_in_dim(ring, new, place, 0), rows, row)

    def sample(self, rows: Rows, num_added: Array | int, key: Array, batch_size: int) -> Transition:
        """Uniform over the steps whose n-step return is complete whatever follows."""
        n = self.num_steps_return
        size = jnp.minimum(num_added, self.capacity)
        start = num_added - size + jax.random.randint(key, (batch_size,), 0, size - n + 1)
        steps = (start[:, None] + jnp.arange(n)) % self.capacity  # (B, n)
        ended = rows.ended[steps]
        # A step counts unless an earlier one of its window ended the episode.
        counts = jnp.cumprod(jnp.concatenate([jnp.ones((batch_size, 1), bool), ~ended[:, :-1]], axis=1), axis=1)
        rewards = rows.reward[steps]
        if self.reward_clip is not None:
            rewards = jnp.clip(rewards, -self.reward_clip, self.reward_clip)
        powers = self.discount ** jnp.arange(n, dtype=jnp.float32)
        taken = counts.sum(axis=1)
        last = jnp.take_along_axis(steps, taken[:, None] - 1, axis=1)[:, 0]
        return Transition(
            obs=self._decode(rows.obs[steps[:, 0]]),
            action=rows.action[steps[:, 0]],
            reward=(rewards * counts * powers).sum(axis=1),
            discount=jnp.float32(self.discount) ** taken * ~rows.terminated[last],
            next_obs=self._decode(rows.next_obs[last]),
        )

    def latest(self, rows: Rows, num_added: Array | int) -> Transition:
        """The step that was added last, as a batch of one: all that a stream is learned from."""
        row = jax.tree.map(lambda ring: jnp.take(ring, (num_added - 1) % self.capacity, axis=0)[None], rows)
        return Transition(
            obs=self._decode(row.obs),
            action=row.action,
            reward=row.reward,
            discount=jnp.float32(self.discount) * ~row.terminated,
            next_obs=self._decode(row.next_obs),
            ended=row.ended,
            explored=row.explored,
        )

    def _encode(self, obs: Array) -> Array:
        flat = obs.reshape(-1)
        return jnp.packbits(flat) if self.is_packed else flat

    def _decode(self, stored: Array) -> Array:
        if self.is_packed:
            stored = jnp.unpackbits(stored, axis=-1, count=int(np.prod(self.spec.obs_shape))).astype(bool)
        return stored.reshape(-1, *self.spec.obs_shape)
