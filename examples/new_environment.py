"""A new environment: move a paddle to catch a falling ball.

isqn train dqn --import examples/new_environment.py --env-id Catch-v0 --total-timesteps 10_000
"""

import gymnasium as gym
import numpy as np

import isqn


class Catch(gym.Env):
    """A picture of 6 x 5 pixels; actions left, stay, right; 1 for a catch, -1 for a miss."""

    observation_space = gym.spaces.Box(0, 255, (6, 5, 1), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # all randomness comes from self.np_random: that is how a run is resumed
        self.row, self.column, self.paddle = 0, int(self.np_random.integers(5)), 2
        return self.picture(), {}

    def step(self, action):
        self.row += 1
        self.paddle = int(np.clip(self.paddle + action - 1, 0, 4))
        terminated = self.row == 5
        reward = (1.0 if self.paddle == self.column else -1.0) if terminated else 0.0
        return self.picture(), reward, terminated, False, {}

    def picture(self):
        pixels = np.zeros((6, 5, 1), np.uint8)
        pixels[self.row, self.column] = pixels[5, self.paddle] = 255
        return pixels


isqn.register_environment("Catch-v0", entry_point=Catch)
