"""Contents of a report as data: charts, figures and tables. `figures.py` and `page.py` draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from isqn.analysis.stats import Interval

MAX_LINES = 10  # in a panel of curves
MAX_MARKED = 10  # a line with at most this many points has a marker and a tick at each


class Series(NamedTuple):
    """Data of one line, in arrays (points,), or of one bar, with a single point. nan is a gap."""

    point: np.ndarray
    low: np.ndarray | None = None  # lower end of the interval
    high: np.ndarray | None = None  # upper end of the interval
    x: np.ndarray | None = None  # x values of a line; without them a single point is a horizontal line
    seeds: np.ndarray | None = None  # (seeds, points): the curves that the line averages


def interval_series(x: np.ndarray | None, value: Interval) -> Series:
    """Return a series of points, with their interval if there is one."""
    point, low, high = (np.atleast_1d(part) for part in value)
    return Series(point, low, high, x) if np.isfinite(low).any() else Series(point, x=x)


def spaced_ticks(x: np.ndarray, share: float, log_x: bool) -> np.ndarray:
    """Select tick positions that are at least a share of the axis apart, so that their labels do not overlap."""
    x = x[x > 0] if log_x else x
    scale = np.log(x) if log_x else x
    selected: list[int] = []
    for i in range(len(x)):
        if not selected or scale[i] - scale[selected[-1]] > share * (scale[-1] - scale[0]):
            selected.append(i)
    return x[selected]


@dataclass(frozen=True)
class Chart:
    """One panel. The keys of `series`, such as "iS-DQN K=9", are the labels of the legend and select the colours."""

    kind: Literal["bars", "lines"]
    series: Mapping[str, Series]
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    log_x: bool = False
    reference: float | None = None  # value of the baseline, drawn as a dashed line


@dataclass(frozen=True)
class Figure:
    """Panels that share a legend: one file, and one section of the page."""

    name: str  # file name without its suffix
    title: str
    caption: str  # the quantity, what it is aggregated over, and the kind of interval
    charts: tuple[Chart, ...]
    remark: str = ""  # seeds dropped, epochs truncated, protocols pooled; also drawn in the file, which has no caption


def nonempty_figure(name: str, title: str, caption: str, charts: Iterable[Chart]) -> Iterator[Figure]:
    """Yield a figure of the charts that are not empty, if there are any."""
    nonempty = tuple(chart for chart in charts if chart.series)
    if nonempty:
        yield Figure(name, title, caption, nonempty)


Value = str | int | float | Interval | None


@dataclass(frozen=True)
class Table:
    """Table of the report. Its cells are numbers, numbers with intervals, or text."""

    title: str
    columns: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...]
    caption: str = ""
    remark: str = ""

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Cells as formatted text."""
        return tuple(zip(*map(_format_column, zip(*self.values, strict=True)), strict=True))

    def as_json(self) -> list[dict[str, Any]]:
        """Return the rows as JSON objects. A number with an interval is an object of `point`, `low` and `high`."""
        return [dict(zip(self.columns, map(_json_value, row), strict=True)) for row in self.values]


def _format_column(column: tuple[Value, ...]) -> list[str]:
    """Format the cells of a column with the same number of decimals.

    The largest number gets about three significant digits. Integers are written in full.
    """
    numbers = [cell for cell in column if isinstance(cell, float)]
    numbers += [float(part) for cell in column if isinstance(cell, Interval) for part in cell]
    largest = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
    decimals = 0 if largest >= 1000 else 1 if largest >= 20 else 2
    if 1e-12 < largest < 0.1:  # smaller numbers are rounding errors
        decimals = 1 - math.floor(math.log10(largest))

    def format_cell(cell: Value) -> str:
        if cell is None or isinstance(cell, str):
            return cell or ""
        if isinstance(cell, int):
            return f"{cell:,}"
        if isinstance(cell, float):
            return f"{cell:z.{decimals}f}"
        point, low, high = (format_cell(float(part)) for part in cell)
        return f"{point} [{low}, {high}]" if math.isfinite(cell.low) else point

    return [format_cell(cell) for cell in column]


def _json_value(value: Value) -> Any:
    if isinstance(value, Interval):
        return {name: _json_value(float(number)) for name, number in value._asdict().items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


@dataclass(frozen=True)
class Report:
    """Contents of the page from top to bottom."""

    title: str
    question: str
    notes: tuple[str, ...]  # caveats: runs missing, seeds dropped, protocols pooled
    headline: Table
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...] = ()
    configs: Mapping[str, str] = field(default_factory=dict)  # name of a run -> its config.toml
    findings: tuple[str, ...] = ()  # the headline in words

    @property
    def labels(self) -> list[str]:
        """Labels of all charts. The style of a label depends on the other labels."""
        charts = [chart for figure in self.figures for chart in figure.charts]
        return list(dict.fromkeys(label for chart in charts for label in chart.series))
