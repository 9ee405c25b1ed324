"""Tables of a run folder: CSV files that are flushed row by row."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

from isqn.data.files import writing
from isqn.data.text import DamagedText, read_table
from isqn.types import UserError

MAX_EPOCHS = 100_000  # of a run whose config does not say more
EPISODE_COLUMNS = ("epoch", "episode", "step", "frame", "return", "length", "seconds")


class Table:
    """A CSV file that grows by whole rows and can be truncated to its length at a checkpoint."""

    def __init__(self, path: Path, columns: tuple[str, ...], length: int | None = None):
        self.columns, self._path = columns, path
        with writing(path):
            self._file = path.open("wb" if length is None else "r+b", buffering=0)
            self._file.truncate(length or 0)
            self._file.seek(length or 0)
        if length is None:
            self._write(columns)

    def add(self, row: dict[str, Any]) -> None:
        self._write([_cell(row.get(column)) for column in self.columns])

    def _write(self, cells: Any) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        left = line.getvalue().encode()  # one write per row: a kill leaves it complete or absent
        with writing(self._path):
            while left:  # a disk that is almost full takes a part, and the next write says why
                left = left[self._file.write(left) :]

    @property
    def length(self) -> int:
        return self._file.tell()

    def flush_to_disk(self) -> None:
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.9g}" if isinstance(value, float) else value


def require_tables(run_dir: Path, lengths: dict[str, int]) -> None:
    """Refuse tables that are damaged or shorter than at a checkpoint, because their rows cannot be restored."""
    advice = "Put it back, or move the folder away to train it anew."
    for name, length in lengths.items():
        path = run_dir / f"{name}.csv"
        if not path.exists():
            raise UserError(f"{path} is missing. {advice}")
        is_shorter = path.stat().st_size < length
        try:
            read_table(path, None if is_shorter else length)
        except DamagedText as error:
            raise UserError(f"{error} {advice}") from None
        if is_shorter:
            raise UserError(f"{path} is shorter than at the checkpoint. {advice}")


def results_table(run_dir: Path) -> Path:
    """Return the table with the results of a run: its evaluations if it is offline, or its training episodes."""
    evaluations = run_dir / "evaluations.csv"
    return evaluations if evaluations.is_file() else run_dir / "episodes.csv"


def results(run_dir: Path, num_epochs: int = 0) -> dict[str, Any]:
    """Return the mean return of each epoch, and the sum of these means (the paper's AUC)."""
    epochs: dict[int, list[float]] = {}
    path, most = results_table(run_dir), max(num_epochs, MAX_EPOCHS)
    rows = read_table(path, needs=("epoch", "return"))
    for line, row in enumerate(rows, start=2):
        if int(row["epoch"]) >= most:  # a number in a damaged file must not decide how long a list is
            raise DamagedText.at(path, line, f"epoch is {row['epoch']}, and the run has at most {most:,}")
        epochs.setdefault(int(row["epoch"]), []).append(float(row["return"]))
    means = [sum(epochs[e]) / len(epochs[e]) if e in epochs else None for e in range(max(epochs, default=-1) + 1)]
    return {"episodes": len(rows), "epoch_returns": means, "auc": sum(mean for mean in means if mean is not None)}
