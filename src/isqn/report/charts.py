"""What a report shows, as data: charts of numbers, tables of words. `figures.py` and `page.py` draw them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from isqn.analysis.stats import Interval

FEW = 10  # so many points of a line are marked, and ticked where they are


class Series(NamedTuple):
    """One line of a chart, (points,) each; or one bar, of a single point. Not a number: nothing to draw there."""

    point: np.ndarray
    low: np.ndarray | None = None  # of the interval around it
    high: np.ndarray | None = None
    x: np.ndarray | None = None  # of a line; without it, one point is a level that holds for every x, drawn across
    seeds: np.ndarray | None = None  # (seeds, points): what the line is an average of


def apart(x: np.ndarray, share: float, log_x: bool) -> np.ndarray:
    """Those of some places whose numbers have room beside each other: this share of the axis."""
    x = x[x > 0] if log_x else x
    scale = np.log(x) if log_x else x
    kept: list[int] = []
    for i in range(len(x)):
        if not kept or scale[i] - scale[kept[-1]] > share * (scale[-1] - scale[0]):
            kept.append(i)
    return x[kept]


@dataclass(frozen=True)
class Chart:
    """One panel. Its labels, such as "iS-DQN K=9", are the legend's, and decide the colours."""

    kind: Literal["bars", "lines"]
    series: Mapping[str, Series]
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    log_x: bool = False
    reference: float | None = None  # where a dashed level is drawn: the baseline


@dataclass(frozen=True)
class Figure:
    """One file, or one part of the page: panels side by side under one legend."""

    name: str  # of the file, without its suffix
    title: str
    caption: str  # what is shown, over what, with which intervals
    charts: tuple[Chart, ...]
    remark: str = ""  # what was left out, cut or pooled: stands in the file too, which may travel without its caption


Value = str | int | float | Interval | None


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...]
    caption: str = ""
    remark: str = ""

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """In words."""
        return tuple(zip(*map(_words, zip(*self.values, strict=True)), strict=True))

    def as_json(self) -> list[dict[str, Any]]:
        """Numbers as numbers; one with an interval is an object of `point`, `low` and `high`."""
        return [dict(zip(self.columns, map(_plain, row), strict=True)) for row in self.values]


def _words(column: tuple[Value, ...]) -> list[str]:
    """Of its cells: as many decimals as three figures or so of the largest number take, and all of a whole one."""
    numbers = [cell for cell in column if isinstance(cell, float)]
    numbers += [float(part) for cell in column if isinstance(cell, Interval) for part in cell]
    largest = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
    decimals = 0 if largest >= 1000 else 1 if largest >= 20 else 2
    if 1e-12 < largest < 0.1:  # below that it is an error of rounding
        decimals = 1 - math.floor(math.log10(largest))

    def word(cell: Value) -> str:
        if cell is None or isinstance(cell, str):
            return cell or ""
        if isinstance(cell, int):
            return f"{cell:,}"
        if isinstance(cell, float):
            return f"{cell:z.{decimals}f}"
        point, low, high = (word(float(part)) for part in cell)
        return f"{point} [{low}, {high}]" if math.isfinite(cell.low) else point

    return [word(cell) for cell in column]


def _plain(value: Value) -> Any:
    if isinstance(value, Interval):
        return {name: _plain(float(number)) for name, number in value._asdict().items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


@dataclass(frozen=True)
class Report:
    """The page from top to bottom."""

    title: str
    question: str
    notes: tuple[str, ...]  # what a reader must know before the numbers: runs missing, seeds dropped, protocols pooled
    headline: Table
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...] = ()
    configs: Mapping[str, str] = field(default_factory=dict)  # a run's name -> its config.toml

    @property
    def labels(self) -> list[str]:
        """Of all its charts: what a label looks like depends on those beside it."""
        charts = [chart for figure in self.figures for chart in figure.charts]
        return list(dict.fromkeys(label for chart in charts for label in chart.series))
