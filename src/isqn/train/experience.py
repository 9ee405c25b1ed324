"""Steps of a run in the host loop: replay buffer, recorded dataset, and history of the running game.

The state of the environment is never saved: it follows from the seed of the episode and the actions since. A restart
resets with that seed and repeats those actions, so that a run can stop after any step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from isqn.agents.base import AgentState
from isqn.data.dataset import DatasetWriter, Provenance
from isqn.data.files import DamagedFile
from isqn.data.replay import Replay
from isqn.envs.adapter import Environment
from isqn.keys import episode_seed
from isqn.types import EnvSpec, UserError


class History:
    """Actions since the game began, episode by episode, and the newest frame."""

    def __init__(self) -> None:
        self._actions: list[list[np.ndarray]] = [[]]  # a game has several episodes where a lost life ends one
        self.frame = np.zeros(())

    def add(self, action: np.ndarray, frame: np.ndarray) -> None:
        self._actions[-1].append(action)
        self.frame = frame

    def end_episode(self, *, is_over: bool) -> None:
        """Start the actions of another episode; forget the earlier ones if the game is over."""
        self._actions = [[]] if is_over else [*self._actions, []]

    def arrays(self, env: Environment) -> dict[str, np.ndarray]:
        """Return the history as the arrays of a checkpoint."""
        actions = [action for episode in self._actions for action in episode]
        return {
            "history.actions": np.array(actions, env.spec.action_dtype).reshape(-1, *env.spec.action_shape),
            "history.lengths": np.array([len(episode) for episode in self._actions], np.int32),
            "history.frame": self.frame,
        }

    def load(self, arrays: dict[str, np.ndarray], spec: EnvSpec, run_dir: Path) -> None:
        """Take the history out of the arrays of a checkpoint; raises `DamagedFile`."""
        names = [f"history.{name}" for name in ("actions", "lengths", "frame")]
        if missing := [name for name in names if name not in arrays]:
            raise DamagedFile(f"a checkpoint of {run_dir} has no {', '.join(missing)}")
        actions, lengths, self.frame = map(arrays.pop, names)
        if (
            (actions.dtype, actions.shape[1:]) != (np.dtype(spec.action_dtype), spec.action_shape)
            or (lengths.dtype, lengths.ndim) != (np.int32, 1)
            or not lengths.size
            or (lengths < 0).any()
            or lengths.sum(dtype=np.int64) != len(actions)
            or not (np.isfinite(actions) if spec.is_continuous else (actions >= 0) & (actions < spec.num_actions)).all()
        ):
            raise DamagedFile(f"a checkpoint of {run_dir} does not hold the actions of episodes in its history")
        ends = np.cumsum(lengths)
        self._actions = [list(actions[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def replay_actions(self, env: Environment, seed: int, episode: int, env_id: str) -> None:
        """Bring a new environment to the state in which the run stopped."""
        frame = np.zeros(())
        for actions in self._actions:
            frame = env.reset(episode_seed(seed, episode))
            for action in actions:
                frame = env.step(action).frame
        if not np.array_equal(frame, self.frame):
            raise UserError(
                f"{env_id} did not come back to where the run stopped: under the same seed and actions it shows "
                "another observation, so this run cannot be resumed; an environment must draw only from its seed."
            )


class Experience:
    """Replay buffer of a run, its recorded dataset if it has one, and the history of its game."""

    def __init__(self, config: Any, run_dir: Path, env: Environment, replay: Replay) -> None:
        self.replay, self.history = replay, History()
        self._run_dir, self._env, self._seed = run_dir, env, config.seed
        self._writer: DatasetWriter | None = None
        if config.record_dataset:
            about = Provenance(f"{config.label}, seed {config.seed}, while it learns")
            self._writer = DatasetWriter(run_dir / "dataset", env.spec, about)

    def begin_episode(
        self, observe: Callable[..., Any], state: AgentState, episode: int, *, restart: bool
    ) -> AgentState:
        """Reset the environment and add its first frame; return the state of the agent that has observed it."""
        frame = self._env.reset(episode_seed(self._seed, episode), restart=restart)
        state, obs = observe(state, frame)
        self.history.frame = frame
        self.replay.add_first(obs)
        if self._writer:
            self._writer.add_first(frame)
        return state

    def add(
        self, action: np.ndarray, reward: float, terminated: bool, truncated: bool, frame: np.ndarray, obs: np.ndarray
    ) -> None:
        """Add a step, and the observation that the agent makes of its frame."""
        self.history.add(action, frame)
        self.replay.add(action, reward, terminated, truncated, obs)
        if self._writer:
            self._writer.add(action, reward, terminated, truncated, frame)

    def arrays(self) -> dict[str, np.ndarray]:
        return self.history.arrays(self._env)

    def save(self) -> dict[str, Any]:
        """Write the replay buffer and the dataset; return their descriptions for the manifest of a checkpoint."""
        dataset = {"dataset": self._writer.save()} if self._writer else {}
        return {"replay": self.replay.save(self._run_dir / "replay"), **dataset}

    def load(self, arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> None:
        """Load what a checkpoint describes; take the history out of its arrays."""
        self.history.load(arrays, self._env.spec, self._run_dir)
        self.replay.restore(manifest["replay"], self._run_dir / "replay")
        if self._writer:
            self._writer.restore(manifest["dataset"])
            self._writer.save()  # the index may name files that are newer than this checkpoint
