"""Figures of a paper as pure functions of arrays: `charts.py` says what is drawn, `style.py` how it looks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isqn.report import charts, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_PER_ROW = 5
PAGE = 10.0  # inches that a row may take; a paper shrinks it
PANELS = {1: (3.2, 2.1), 2: (2.3, 1.7), 3: (1.9, 1.5)}  # side by side: inches of each; more of them are smaller
SMALL_PANEL = (1.25, 1.05)
LETTER = 0.055  # inches of a letter of what was left out, about
FORMATS: dict[str, dict[str, Any]] = {  # no dates: the same numbers give the same bytes
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {},
}
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def write(figure: charts.Figure, folder: Path, among: Iterable[str] = ()) -> list[Path]:
    """NAME.svg, NAME.pdf and NAME.png in a folder; returns their paths."""
    drawn = draw(figure, among)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{figure.name}.{suffix}" for suffix in FORMATS]
    with _settings():
        for path, metadata in zip(paths, FORMATS.values(), strict=True):
            drawn.savefig(path, dpi=200, metadata=metadata)
    return paths


def draw(figure: charts.Figure, among: Iterable[str] = ()) -> Figure:
    """Panels in rows, one legend below them, and what was left out. Title and caption are left to the text around it.

    `among` has the labels of all figures of a report, for each to look the same in all of them.
    """
    with _settings():
        from matplotlib.figure import Figure  # not pyplot, which keeps every figure and chooses where it is shown

        panels = figure.charts
        widths = _widths(panels)
        columns = len(widths)
        rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
        heights = [max(_height(chart, columns) for chart in row) for row in rows]
        labels = list(dict.fromkeys(label for chart in panels for label in chart.series))
        looks = style.looks([*among, *labels])
        # Bars are named where they stand.
        lines = [chart.series for chart in panels if chart.kind == "lines"]
        named = [label for label in labels if any(label in series and _has(series[label]) for series in lines)]
        width = max(sum(widths) + 0.45 * columns, _entry(named) + 0.1)
        legend = _in_columns(named, width)
        remark = textwrap.wrap(figure.remark, int(width / LETTER))
        remarked = 0.13 * len(remark)
        below = remarked + (0.17 * len(legend[0]) + 0.05 if legend else 0)  # the panels
        height = sum(heights) + below
        drawn = Figure(figsize=(width, height), layout="constrained")
        grid = drawn.subplots(
            *(len(rows), columns), squeeze=False, sharey=_comparable(panels), width_ratios=widths, height_ratios=heights
        )
        for spare in grid.flat[len(panels) :]:
            spare.remove()
        for index, (axis, chart) in enumerate(zip(grid.flat, panels, strict=False)):
            if chart.kind == "bars":
                _bars(axis, chart, looks)
            else:
                _lines(axis, chart, looks, widths[index % columns])
            axis.set_title(chart.title)
            if index + columns >= len(panels) or panels[index + columns].xlabel != chart.xlabel:
                axis.set_xlabel(chart.xlabel)
            if index % columns == 0 or panels[index - 1].ylabel != chart.ylabel:
                axis.set_ylabel(chart.ylabel)
        drawn.align_ylabels()
        drawn.set_layout_engine("constrained", rect=(0, below / height, 1, 1 - below / height))
        _legend(drawn, legend, looks, remarked / height)
        words: dict[str, Any] = {"size": style.STYLE["xtick.labelsize"], "color": style.REFERENCE}
        drawn.text(0.04 / width, remarked / height, "\n".join(remark), va="top", **words)
        return drawn


def _widths(panels: tuple[charts.Chart, ...]) -> list[float]:
    """Of the columns: as many panels side by side as a page takes, in rows of about the same number."""
    for rows in range(math.ceil(len(panels) / PANELS_PER_ROW), len(panels) + 1):
        columns = math.ceil(len(panels) / rows)
        widths = [max(_width(chart, columns) for chart in panels[column::columns]) for column in range(columns)]
        if sum(widths) + 0.45 * columns <= PAGE:
            break
    return widths


def _comparable(panels: tuple[charts.Chart, ...]) -> bool:
    """Whether all panels measure the same thing against the same baseline, which then is at one height in all."""
    return panels[0].reference is not None and len({(c.kind, c.ylabel, c.reference) for c in panels}) == 1


def _width(chart: charts.Chart, columns: int) -> float:
    """Of a panel without what stands beside it, in inches. Bars are as wide as the words under them."""
    title = _text_width(chart.title, "axes.titlesize") + 0.1  # matplotlib makes no room for it
    if chart.kind == "lines":
        return max(PANELS.get(columns, SMALL_PANEL)[0], title)
    words = [_text_width(line, "xtick.labelsize") for label in chart.series for line in _lines_of(label)]
    return max(1.2, len(chart.series) * max([0.42, *(word + 0.1 for word in words)]), title)


def _height(chart: charts.Chart, columns: int) -> float:
    """Of a panel with what stands above and below it."""
    below = max((len(_lines_of(label)) for label in chart.series), default=1) if chart.kind == "bars" else 2
    panel = max(PANELS.get(columns, SMALL_PANEL)[1], _text_width(chart.ylabel, "axes.labelsize"))
    return panel + 0.12 * (below + bool(chart.title)) + 0.2


def _text_width(text: str, setting: str) -> float:
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=style.STYLE[setting]).get_extents().width / 72 if text.strip() else 0.0


def _bars(axis: Axes, chart: charts.Chart, looks: style.Looks) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2, foreground="white")]  # where the reference runs through a number
    largest = max((abs(_only(series.point)) for series in chart.series.values() if _has(series)), default=0.0)
    for place, (label, series) in enumerate(chart.series.items()):
        if not _has(series):
            continue
        colour, dash = looks[label]
        point = _only(series.point)
        reach = [point]
        axis.bar(place, point, width=0.66, color=colour, hatch=3 * dash.hatch, edgecolor="white", linewidth=0)
        if series.low is not None and series.high is not None:
            reach += [_only(series.low), _only(series.high)]
            for ink, wide in (("white", 2.0), ("black", 0.8)):  # white around it, to be seen on a black bar
                cap: dict[str, Any] = {"marker": "_", "markersize": 3.2 + wide, "markeredgewidth": wide}
                axis.plot([place, place], reach[1:], color=ink, linewidth=wide, solid_capstyle="butt", **cap)
        up = 1 if point >= 0 else -1
        axis.annotate(
            _value(point, largest),
            (place, up * max(up * end for end in reach if math.isfinite(end))),
            xytext=(0, 2.5 * up),
            textcoords="offset points",
            ha="center",
            va="bottom" if up == 1 else "top",
            fontsize=style.STYLE["xtick.labelsize"],
            path_effects=halo,
        )
    axis.margins(y=0.14)  # room for the numbers; matplotlib lets bars begin at 0
    axis.set_xlim(-0.6, max(1, len(chart.series)) - 0.4)
    axis.set_xticks(range(len(chart.series)), ["\n".join(_lines_of(label)) for label in chart.series])
    axis.tick_params(axis="x", length=0)
    _finish(axis, chart)
    if axis.patches and axis.get_ylim()[0] < 0:
        axis.axhline(0, color=style.INK, linewidth=0.7)


def _lines(axis: Axes, chart: charts.Chart, looks: style.Looks, width: float) -> None:
    if chart.log_x:
        axis.set_xscale("log")
    places = []
    for label, series in chart.series.items():
        colour, dash = looks[label]
        line: dict[str, Any] = {"color": colour, "linestyle": dash.matplotlib}
        seed: dict[str, Any] = {"color": colour, "linewidth": 0.5, "alpha": 0.35}
        band: dict[str, Any] = {"color": colour, "linewidth": 0, "alpha": 0.2}
        point = np.ravel(series.point)
        if series.x is None:
            if series.low is not None and series.high is not None:
                axis.axhspan(_only(series.low), _only(series.high), **band)
            axis.axhline(point[0], **line)
            continue
        x = np.asarray(series.x)
        places.append(x)
        if series.low is not None and series.high is not None:
            axis.fill_between(x, series.low, series.high, **band)
            if len(x) == 1:  # a band has no width there
                axis.vlines(x, series.low, series.high, color=colour, linewidth=0.8)
        elif series.seeds is not None:
            axis.plot(x, np.transpose(series.seeds), **seed)
        there = np.isfinite(point)
        beside = np.concatenate([[False], there[:-1]]) | np.concatenate([there[1:], [False]])
        marked = there if len(point) <= charts.FEW else there & ~beside  # a point between two gaps has no line
        axis.plot(x, point, marker="o", markevery=marked, **line)
    axis.margins(x=0.02)
    _ticks(axis, np.unique(np.concatenate([[], *places])), chart.log_x, width)
    _finish(axis, chart)


def _ticks(axis: Axes, x: np.ndarray, log_x: bool, width: float) -> None:
    """Few places are ticked where they are, as far as their numbers have room; many, at round numbers."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    if log_x:
        axis.xaxis.set_minor_locator(NullLocator())
    elif len(x) > charts.FEW:
        axis.xaxis.set_major_locator(MaxNLocator(min(6, int(width / 0.37)), steps=[1, 2, 2.5, 5, 10]))
    if len(x) <= charts.FEW:
        axis.set_xticks(charts.apart(x, 0.22 / width, log_x))
    if log_x or np.max(x, initial=0) >= 1000:
        axis.xaxis.set_major_formatter(_short)


def _finish(axis: Axes, chart: charts.Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    if chart.reference is not None:
        axis.axhline(chart.reference, color=style.REFERENCE, linestyle=(0, (4, 3)), linewidth=0.8, zorder=0.9)
    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
    if max(map(abs, axis.get_ylim())) >= 1000:
        axis.yaxis.set_major_formatter(_short)
    if not any(map(_has, chart.series.values())):
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color=style.REFERENCE)
        axis.tick_params(left=False, labelleft=False)
        axis.grid(False)


def _entry(labels: list[str]) -> float:
    """The width of an entry of the legend: the longest label, the line beside it and the space between."""
    return max((_text_width(label, "legend.fontsize") for label in labels), default=0) + 0.48


def _in_columns(labels: list[str], width: float) -> list[list[str]]:
    """The legend's columns. It is read along its rows, in the order given."""
    rows = math.ceil(len(labels) / max(1, int(width / _entry(labels))))
    columns = math.ceil(len(labels) / max(1, rows))
    return [labels[column::columns] for column in range(columns)]


def _legend(drawn: Figure, columns: list[list[str]], looks: style.Looks, bottom: float) -> None:
    from matplotlib.lines import Line2D

    labels = [label for column in columns for label in column]
    styles: list[tuple[str, Any]] = [(looks[label][0], looks[label][1].matplotlib) for label in labels]
    if labels:
        lines = [Line2D([], [], color=colour, linestyle=dash) for colour, dash in styles]
        spaces = {"handlelength": 2.2, "handletextpad": 0.5, "columnspacing": 1.2, "borderaxespad": 0.1}
        drawn.legend(lines, labels, loc="lower center", bbox_to_anchor=(0.5, bottom), ncols=len(columns), **spaces)


def _has(series: charts.Series) -> bool:
    return bool(np.isfinite(series.point).any())


def _only(value: Any) -> float:
    return float(np.reshape(value, ()))


def _lines_of(label: str) -> list[str]:
    """To stand under a bar: "iS-DQN K=9, LN" takes three lines."""
    words = [textwrap.wrap(part, 8, break_long_words=False, break_on_hyphens=False) for part in label.split(", ")]
    return [line for part in words for line in part]


def _short(value: float, _: Any = None) -> str:
    """200000 is 200k, and 100 million 100M."""
    unit, letter = next((pair for pair in UNITS if abs(value) >= pair[0]), (1.0, ""))
    return f"{value / unit:g}{letter}".replace("-", "−")


def _value(value: float, largest: float) -> str:
    """Three digits or so of the largest beside it: 1.06 and 0.03, 43.2, 4.05M."""
    near = float(f"{largest:.3g}")
    if near >= 1000 or 0 < near < 0.1:
        return _short(float(f"{value:.3g}"))
    return f"{value:z.{2 if near < 10 else 1 if near < 100 else 0}f}".replace("-", "−")


def _settings() -> Any:
    """Ours on top of matplotlib's own, whatever the reader's file of settings says."""
    from matplotlib import style as of_matplotlib

    return of_matplotlib.context(["default", style.STYLE])
