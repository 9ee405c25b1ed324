"""Sessions of the seeds that one compiled program trains: each has its own run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from isqn.data.device_replay import DeviceReplay, Rows
from isqn.data.files import DamagedFile, Description, check_files, sync, write_file
from isqn.data.segments import read_arrays
from isqn.train import checkpoint
from isqn.train.progress import Progress
from isqn.train.session import Counters, Epoch, Session
from isqn.train.tables import EPISODE_COLUMNS
from isqn.types import Array


class Ended(NamedTuple):
    """Episode statistics of each step of each seed."""

    over: Array
    episodic_return: Array
    length: Array


@dataclass
class SeedCounters(Counters):
    """Position of one seed, beside its state on the device."""

    step: int = 0
    epoch_returns: list[float] = field(default_factory=list)


@dataclass
class SavedSeed:
    """Files of one seed as of its checkpoint; empty for a new run."""

    counters: SeedCounters = field(default_factory=SeedCounters)
    replay_files: list[Description] = field(default_factory=list)
    table_lengths: dict[str, int] = field(default_factory=dict)


class SeedSessions:
    """One session per seed. States and totals are batches whose leading axis is the seed."""

    def __init__(
        self,
        config: Any,
        run_dirs: Sequence[Path],
        saved: Sequence[SavedSeed],
        columns: tuple[str, ...],
        progress: Progress,
        frames_per_step: int,
        capacity: int,
    ):
        self._config, self._run_dirs, self._capacity, self._frames_per_step = (
            config,
            run_dirs,
            capacity,
            frames_per_step,
        )
        self._replay_files = [seed.replay_files for seed in saved]
        self._sessions = [
            Session(
                config.with_seed_index(index),
                run_dir,
                seed.counters,
                {"episodes": EPISODE_COLUMNS, "metrics": columns},
                seed.table_lengths,
                progress,
                first_step=seed.counters.step,
                frames_per_step=frames_per_step,
            )
            for index, (run_dir, seed) in enumerate(zip(run_dirs, saved, strict=True))
        ]
        self.first = self._sessions[0]

    def count_updates(self, number: int) -> None:
        for session in self._sessions:
            session.counters.logged_updates += number

    def add_episodes(self, ended: Ended, first_step: int) -> None:
        """Record the episodes that ended in a stretch of steps; an episode belongs to the epoch in which it ends."""
        for index, session in enumerate(self._sessions):
            mine = select_seed(ended, index, axis=1)
            for place in np.flatnonzero(mine.over):
                step = first_step + int(place) + 1
                episodic_return, epoch = float(mine.episodic_return[place]), (step - 1) // self._config.epoch_steps
                session.add_episode(epoch, step, episodic_return, int(mine.length[place]))
                session.counters.epoch_returns.append(episodic_return)

    def add_rows(
        self, step: int, updates: int, agents: Any, totals: Any, probe: Callable[[int, Any], dict[str, float]]
    ) -> None:
        """Write a row of metrics for each seed; `probe` returns more metrics, given the seed's index and agent."""
        epsilon = float(self._config.epsilon(step - 1))
        for index, session in enumerate(self._sessions):
            agent = select_seed(agents, index)
            means, _ = session.average(select_seed(totals, index), agent, step)
            means |= probe(index, agent) if means else {}
            row = {"frame": step * self._frames_per_step, "updates": updates, "epsilon": epsilon, **means}
            session.add_row(step, row, steps_per_step=len(self._sessions))

    def show_progress(self, step: int) -> None:
        self._sessions[-1].show_progress(step)

    def end_epoch(self, epoch: int, step: int, agents: Any) -> list[Epoch]:
        """Return the results of an epoch, and save the agents that are the best of their seed so far."""
        results = []
        for index, session in enumerate(self._sessions):
            result = Epoch(epoch, step, session.counters.epoch_returns)
            session.counters.epoch_returns = []
            session.end_epoch(result, select_seed(agents, index))
            results.append(result)
        return results

    def save(self, step: int, state: Any, totals: Any) -> None:
        """Write a checkpoint of each seed."""
        for index, session in enumerate(self._sessions):
            mine, sums = jax.tree.map(np.asarray, select_seed(state, index)), select_seed(totals, index)
            session.counters.step = step

            def save_replay(index: int = index, rows: Rows = mine.rows) -> dict[str, Any]:
                folder, files = self._run_dirs[index] / "replay", self._replay_files[index]
                self._replay_files[index] = save_rows(folder, rows, files, step, self._capacity)
                return {"replay": {"files": self._replay_files[index]}}

            def arrays(mine: Any = mine, sums: Any = sums) -> dict[str, np.ndarray]:
                return checkpoint.flatten({**mine._replace(rows=())._asdict(), "totals": sums})

            session.save(step, mine.agent, sums, arrays, save_replay, tidy=False)
        for run_dir in self._run_dirs:  # only now: old checkpoints stay until every seed has the new one
            checkpoint.tidy(run_dir)

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def select_seed(tree: Any, index: int, axis: int = 0) -> Any:
    """Return the part of one seed."""
    return jax.tree.map(lambda x: jnp.take(x, index, axis), tree)


# -- the replay buffer as files

FILE_ROWS = 4_096


def save_rows(folder: Path, rows: Rows, files: list[Description], step: int, capacity: int) -> list[Description]:
    """Write the last `capacity` rows and return the descriptions of their files.

    Files begin at multiples of `FILE_ROWS`, so that their names and contents depend only on the step, and not on the
    steps of earlier checkpoints. Of the files of the last checkpoint, those that cannot have changed are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved_files = {(file["since"], file["until"]): file for file in files}
    oldest, described = max(0, step - capacity), []
    for start in range(oldest // FILE_ROWS * FILE_ROWS, step, FILE_ROWS):
        since, until = max(start, oldest), min(start + FILE_ROWS, step)
        file = saved_files.get((since, until))
        if file is None:
            places = np.arange(since, until) % capacity
            content = safetensors.numpy.save({name: ring[places] for name, ring in rows._asdict().items()})
            file = {**write_file(folder, f"rows-{until:012d}", content), "since": since, "until": until}
        described.append(file)
    sync(folder)
    return described


def load_rows(folder: Path, files: list[Description], replay: DeviceReplay) -> Rows:
    """Load the rows that `save_rows` described; raises `DamagedFile`."""
    rows = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(replay.init))
    _check_ranges(folder, check_files({"files": files}, folder), replay.capacity)
    for file in files:
        arrays, count = read_arrays(folder, file), file["until"] - file["since"]
        expected = {name: (ring.dtype, (count, *ring.shape[1:])) for name, ring in rows._asdict().items()}
        if {name: (array.dtype, array.shape) for name, array in arrays.items()} != expected:
            raise DamagedFile(f"{folder / file['name']} is damaged: its arrays are not those of {count:,} rows.")
        places = np.arange(file["since"], file["until"]) % replay.capacity
        for name, array in arrays.items():
            getattr(rows, name)[places] = array
    return rows


def _check_ranges(folder: Path, files: list[Description], capacity: int) -> None:
    """Raise `DamagedFile` unless the files hold the last rows, one file after the other."""
    ranges: list[Any] = [(file.get("since"), file.get("until")) for file in files]
    if all(type(end) is int and 0 <= end < 2**62 for pair in ranges for end in pair):
        starts, ends = [since for since, _ in ranges], [until for _, until in ranges]
        has_all = not ranges or starts[0] <= max(0, ends[-1] - capacity)
        if has_all and starts[1:] == ends[:-1] and all(since < until for since, until in ranges):
            return
    raise DamagedFile(f"{folder} has files of the rows {ranges!r:.80}, which do not follow one another.")
