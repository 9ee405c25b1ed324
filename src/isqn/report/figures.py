"""Draw figures for a paper as pure functions of the data in `charts.py` and the settings in `style.py`."""

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
PAGE = 10.0  # maximum width of a row in inches; a paper scales it down
PANELS = {1: (3.2, 2.1), 2: (2.3, 1.7), 3: (1.9, 1.5)}  # panels in a row -> width and height of each in inches
SMALL_PANEL = (1.25, 1.05)  # the same for more than three panels in a row
LETTER = 0.055  # approximate width of a letter of the remark in inches
FORMATS: dict[str, dict[str, Any]] = {  # without dates, so that the same numbers give the same bytes
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {},
}
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def write(figure: charts.Figure, folder: Path, all_labels: Iterable[str] = ()) -> list[Path]:
    """Write NAME.svg, NAME.pdf and NAME.png to a folder and return their paths."""
    drawn = draw(figure, all_labels)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{figure.name}.{suffix}" for suffix in FORMATS]
    with _matplotlib_settings():
        for path, metadata in zip(paths, FORMATS.values(), strict=True):
            drawn.savefig(path, dpi=200, metadata=metadata)
    return paths


def draw(figure: charts.Figure, all_labels: Iterable[str] = ()) -> Figure:
    """Draw the panels in rows, a legend below them and the remark at the bottom, without title and caption.

    `all_labels` are the labels of all figures of a report, so that a label has the same style in all of them.
    """
    with _matplotlib_settings():
        from matplotlib.figure import Figure  # not pyplot, which keeps every figure in memory and selects a display

        panels = figure.charts
        widths = _column_widths(panels)
        columns = len(widths)
        rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
        heights = [max(_height(chart, columns) for chart in row) for row in rows]
        labels = list(dict.fromkeys(label for chart in panels for label in chart.series))
        styles = style.assign_styles([*all_labels, *labels])
        # Bars have their labels below them and need no legend.
        lines = [chart.series for chart in panels if chart.kind == "lines"]
        in_legend = [label for label in labels if any(label in series and _has_data(series[label]) for series in lines)]
        width = max(sum(widths) + 0.45 * columns, _entry_width(in_legend) + 0.1)
        legend = _legend_columns(in_legend, width)
        remark = textwrap.wrap(figure.remark, int(width / LETTER))
        remark_height = 0.13 * len(remark)
        below = remark_height + (0.17 * len(legend[0]) + 0.05 if legend else 0)  # legend and remark
        height = sum(heights) + below
        drawn = Figure(figsize=(width, height), layout="constrained")
        grid = drawn.subplots(
            *(len(rows), columns), squeeze=False, sharey=_share_y(panels), width_ratios=widths, height_ratios=heights
        )
        for spare in grid.flat[len(panels) :]:
            spare.remove()
        for index, (axis, chart) in enumerate(zip(grid.flat, panels, strict=False)):
            if chart.kind == "bars":
                _draw_bars(axis, chart, styles)
            else:
                _draw_lines(axis, chart, styles, widths[index % columns])
            axis.set_title(chart.title)
            if index + columns >= len(panels) or panels[index + columns].xlabel != chart.xlabel:
                axis.set_xlabel(chart.xlabel)
            if index % columns == 0 or panels[index - 1].ylabel != chart.ylabel:
                axis.set_ylabel(chart.ylabel)
        drawn.align_ylabels()
        drawn.set_layout_engine("constrained", rect=(0, below / height, 1, 1 - below / height))
        _draw_legend(drawn, legend, styles, remark_height / height)
        font: dict[str, Any] = {"size": style.STYLE["xtick.labelsize"], "color": style.REFERENCE}
        drawn.text(0.04 / width, remark_height / height, "\n".join(remark), va="top", **font)
        return drawn


def _column_widths(panels: tuple[charts.Chart, ...]) -> list[float]:
    """Return the widths of the columns, in inches.

    A row has as many panels as fit on a page, and all rows have about the same number of panels.
    """
    for rows in range(math.ceil(len(panels) / PANELS_PER_ROW), len(panels) + 1):
        columns = math.ceil(len(panels) / rows)
        widths = [max(_width(chart, columns) for chart in panels[column::columns]) for column in range(columns)]
        if sum(widths) + 0.45 * columns <= PAGE:
            break
    return widths


def _share_y(panels: tuple[charts.Chart, ...]) -> bool:
    """Return whether all panels show the same quantity with the same reference, and so share their y axis."""
    return panels[0].reference is not None and len({(c.kind, c.ylabel, c.reference) for c in panels}) == 1


def _width(chart: charts.Chart, columns: int) -> float:
    """Return the width of a panel in inches, without its axis labels. A bar is at least as wide as its label."""
    title = _text_width(chart.title, "axes.titlesize") + 0.1  # matplotlib reserves no width for it
    if chart.kind == "lines":
        return max(PANELS.get(columns, SMALL_PANEL)[0], title)
    label_widths = [_text_width(line, "xtick.labelsize") for label in chart.series for line in _wrap_label(label)]
    return max(1.2, len(chart.series) * max([0.42, *(width + 0.1 for width in label_widths)]), title)


def _height(chart: charts.Chart, columns: int) -> float:
    """Return the height of a panel in inches, with its title and the labels below it."""
    lines_below = max((len(_wrap_label(label)) for label in chart.series), default=1) if chart.kind == "bars" else 2
    panel = max(PANELS.get(columns, SMALL_PANEL)[1], _text_width(chart.ylabel, "axes.labelsize"))
    return panel + 0.12 * (lines_below + bool(chart.title)) + 0.2


def _text_width(text: str, setting: str) -> float:
    """Return the width of a text in inches, in the font size of a setting."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=style.STYLE[setting]).get_extents().width / 72 if text.strip() else 0.0


def _draw_bars(axis: Axes, chart: charts.Chart, styles: style.Styles) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2, foreground="white")]  # keeps a number legible on the reference line
    largest = max((abs(_scalar(series.point)) for series in chart.series.values() if _has_data(series)), default=0.0)
    for position, (label, series) in enumerate(chart.series.items()):
        if not _has_data(series):
            continue
        colour, dash = styles[label]
        point = _scalar(series.point)
        ends = [point]
        axis.bar(position, point, width=0.66, color=colour, hatch=3 * dash.hatch, edgecolor="white", linewidth=0)
        if series.low is not None and series.high is not None:
            ends += [_scalar(series.low), _scalar(series.high)]
            for ink, thickness in (("white", 2.0), ("black", 0.8)):  # a white rim makes it visible on a black bar
                cap: dict[str, Any] = {"marker": "_", "markersize": 3.2 + thickness, "markeredgewidth": thickness}
                axis.plot([position] * 2, ends[1:], color=ink, linewidth=thickness, solid_capstyle="butt", **cap)
        sign = 1 if point >= 0 else -1
        axis.annotate(
            _format_value(point, largest),
            (position, sign * max(sign * end for end in ends if math.isfinite(end))),
            xytext=(0, 2.5 * sign),
            textcoords="offset points",
            ha="center",
            va="bottom" if sign == 1 else "top",
            fontsize=style.STYLE["xtick.labelsize"],
            path_effects=halo,
        )
    axis.margins(y=0.14)  # room for the numbers; matplotlib adds none at 0, where bars begin
    axis.set_xlim(-0.6, max(1, len(chart.series)) - 0.4)
    axis.set_xticks(range(len(chart.series)), ["\n".join(_wrap_label(label)) for label in chart.series])
    axis.tick_params(axis="x", length=0)
    _finish(axis, chart)
    if axis.patches and axis.get_ylim()[0] < 0:
        axis.axhline(0, color=style.INK, linewidth=0.7)


def _draw_lines(axis: Axes, chart: charts.Chart, styles: style.Styles, width: float) -> None:
    if chart.log_x:
        axis.set_xscale("log")
    all_x = []
    for label, series in chart.series.items():
        colour, dash = styles[label]
        line: dict[str, Any] = {"color": colour, "linestyle": dash.matplotlib}
        seed: dict[str, Any] = {"color": colour, "linewidth": 0.5, "alpha": 0.35}
        band: dict[str, Any] = {"color": colour, "linewidth": 0, "alpha": 0.2}
        point = np.ravel(series.point)
        if series.x is None:
            if series.low is not None and series.high is not None:
                axis.axhspan(_scalar(series.low), _scalar(series.high), **band)
            axis.axhline(point[0], **line)
            continue
        x = np.asarray(series.x)
        all_x.append(x)
        if series.low is not None and series.high is not None:
            axis.fill_between(x, series.low, series.high, **band)
            if len(x) == 1:  # the band of a single point has no width
                axis.vlines(x, series.low, series.high, color=colour, linewidth=0.8)
        elif series.seeds is not None:
            axis.plot(x, np.transpose(series.seeds), **seed)
        is_finite = np.isfinite(point)
        has_neighbour = np.concatenate([[False], is_finite[:-1]]) | np.concatenate([is_finite[1:], [False]])
        # A point between two gaps has no line and would be invisible without a marker.
        marked = is_finite if len(point) <= charts.MAX_MARKED else is_finite & ~has_neighbour
        axis.plot(x, point, marker="o", markevery=marked, **line)
    axis.margins(x=0.02)
    _set_x_ticks(axis, np.unique(np.concatenate([[], *all_x])), chart.log_x, width)
    _finish(axis, chart)


def _set_x_ticks(axis: Axes, x: np.ndarray, log_x: bool, width: float) -> None:
    """Place ticks at the data if there are few points and their labels have room, else at round numbers."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    if log_x:
        axis.xaxis.set_minor_locator(NullLocator())
    elif len(x) > charts.MAX_MARKED:
        axis.xaxis.set_major_locator(MaxNLocator(min(6, int(width / 0.37)), steps=[1, 2, 2.5, 5, 10]))
    if len(x) <= charts.MAX_MARKED:
        axis.set_xticks(charts.spaced_ticks(x, 0.22 / width, log_x))
    if log_x or np.max(x, initial=0) >= 1000:
        axis.xaxis.set_major_formatter(_format_short)


def _finish(axis: Axes, chart: charts.Chart) -> None:
    """Add the reference line and the y ticks, or "no data" to an empty panel."""
    from matplotlib.ticker import MaxNLocator

    if chart.reference is not None:
        axis.axhline(chart.reference, color=style.REFERENCE, linestyle=(0, (4, 3)), linewidth=0.8, zorder=0.9)
    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
    if max(map(abs, axis.get_ylim())) >= 1000:
        axis.yaxis.set_major_formatter(_format_short)
    if not any(map(_has_data, chart.series.values())):
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color=style.REFERENCE)
        axis.tick_params(left=False, labelleft=False)
        axis.grid(False)


def _entry_width(labels: list[str]) -> float:
    """Return the width of a legend entry in inches: the longest label, its line and the space between them."""
    return max((_text_width(label, "legend.fontsize") for label in labels), default=0) + 0.48


def _legend_columns(labels: list[str], width: float) -> list[list[str]]:
    """Arrange the labels in columns that keep their order when read row by row."""
    rows = math.ceil(len(labels) / max(1, int(width / _entry_width(labels))))
    columns = math.ceil(len(labels) / max(1, rows))
    return [labels[column::columns] for column in range(columns)]


def _draw_legend(drawn: Figure, columns: list[list[str]], styles: style.Styles, bottom: float) -> None:
    from matplotlib.lines import Line2D

    labels = [label for column in columns for label in column]
    entries: list[tuple[str, Any]] = [(styles[label][0], styles[label][1].matplotlib) for label in labels]
    if labels:
        lines = [Line2D([], [], color=colour, linestyle=dash) for colour, dash in entries]
        spaces = {"handlelength": 2.2, "handletextpad": 0.5, "columnspacing": 1.2, "borderaxespad": 0.1}
        drawn.legend(lines, labels, loc="lower center", bbox_to_anchor=(0.5, bottom), ncols=len(columns), **spaces)


def _has_data(series: charts.Series) -> bool:
    return bool(np.isfinite(series.point).any())


def _scalar(value: Any) -> float:
    return float(np.reshape(value, ()))


def _wrap_label(label: str) -> list[str]:
    """Split the label of a bar into short lines: "iS-DQN K=9, LN" takes three."""
    parts = [textwrap.wrap(part, 8, break_long_words=False, break_on_hyphens=False) for part in label.split(", ")]
    return [line for part in parts for line in part]


def _format_short(value: float, _: Any = None) -> str:
    """Format a number with a unit prefix: 200000 -> 200k, 100 million -> 100M."""
    unit, letter = next((pair for pair in UNITS if abs(value) >= pair[0]), (1.0, ""))
    return f"{value / unit:g}{letter}".replace("-", "−")


def _format_value(value: float, largest: float) -> str:
    """Format the number of a bar so that the largest has about three digits: 1.06 and 0.03, 43.2, 4.05M."""
    rounded = float(f"{largest:.3g}")
    if rounded >= 1000 or 0 < rounded < 0.1:
        return _format_short(float(f"{value:.3g}"))
    return f"{value:z.{2 if rounded < 10 else 1 if rounded < 100 else 0}f}".replace("-", "−")


def _matplotlib_settings() -> Any:
    """Return a context with matplotlib's defaults and our settings. The user's matplotlibrc has no effect."""
    from matplotlib import style as matplotlib_style

    return matplotlib_style.context(["default", style.STYLE])
