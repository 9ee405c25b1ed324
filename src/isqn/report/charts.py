"""What a report shows, as data: charts of numbers, tables of words. `figures.py` and `page.py` draw them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np


class Series(NamedTuple):
    """One line of a chart, (points,) each; or one bar, of a single point. Not a number: nothing to draw there."""

    point: np.ndarray
    low: np.ndarray | None = None  # of the interval around it
    high: np.ndarray | None = None
    x: np.ndarray | None = None  # of a line; one value: a level that holds for every x, drawn across
    seeds: np.ndarray | None = None  # (seeds, points): what the line is an average of


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
    caption: str  # what is shown, over what, with which intervals, and what was left out
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


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
