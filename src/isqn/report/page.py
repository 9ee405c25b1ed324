"""Render the report as one self-contained HTML page, with its style, its data and the plotting library."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from isqn import __version__
from isqn.report import style
from isqn.report.charts import MAX_MARKED, Chart, Figure, Report, Series, Table, spaced_ticks
from isqn.types import UserError

SEEDS = ""  # name of the button for the curves of single seeds; no label is empty
LONG = 32  # characters; longer cells may wrap
BAR_HEIGHT, CHART_PADDING = 26, 64  # pixels
NUMBER = re.compile(r"-?\d")
EMPTY_CELLS = ("", "nan")


def render(report: Report, *, refresh_seconds: int | None = None) -> str:
    """Return the page as HTML. With `refresh_seconds` it reloads itself and keeps its scroll position and state."""
    library, script = _plotly(), _read_resource("page.js")
    # The content security policy blocks the network and all scripts but these two.
    hashes = " ".join(f"'sha256-{_sha256(text)}'" for text in (library, script))
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"
    styles = style.assign_styles(report.labels)
    charts = {
        f"{figure.name}/{index}": _chart_data(chart, styles)
        for figure in report.figures
        for index, chart in enumerate(figure.charts)
    }
    data = json.dumps({"charts": charts, "refresh": refresh_seconds}, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # else a label could close the script element
    reloads = f" This page reloads every {refresh_seconds} seconds." if refresh_seconds else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>
{_read_resource("page.css")}</style>
</head>
<body>
<main>
<h1>{escape(report.title)}</h1>
<p class="question">{escape(report.question)}</p>
{_notes(report.notes)}
{_table(report.headline, "headline")}
{_findings(report.findings)}
<section>
{_toggles(report, styles)}
{"".join(_figure(figure, styles) for figure in report.figures)}
</section>
{"".join(_table(table) for table in report.tables)}
{_configs(report.configs)}
</main>
<div class="readout" aria-hidden="true" hidden></div>
<footer>Made with isqn {__version__}; charts drawn by plotly.js.{reloads}</footer>
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # slow to import

    return get_plotlyjs()


def _read_resource(name: str) -> str:
    return files("isqn.report").joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _findings(findings: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(finding)}</li>" for finding in findings)
    return f'<ul class="findings">{items}</ul>' if items else ""


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<aside class="notes" aria-label="Notes"><ul>{items}</ul></aside>' if items else ""


def _table(table: Table, name: str = "") -> str:
    """Render a table in a scrollable box. Columns of numbers are right-aligned."""
    columns = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    kinds = ["number" if _is_numeric(column) else "text" for column in columns]
    head = "".join(_cell("th", *pair) for pair in zip(table.columns, kinds, strict=True))
    rows = [f"<tr>{''.join(_cell('td', *pair) for pair in zip(row, kinds, strict=True))}</tr>\n" for row in table.rows]
    title = escape(table.title)
    return f"""<section class="table {name}">
<h2>{title}</h2>
<div class="box" tabindex="0" role="region" aria-label="{title}">
<table><thead><tr>{head}</tr></thead>
<tbody>
{"".join(rows)}</tbody></table>
</div>
{_caption(table)}
</section>
"""


def _cell(element: str, text: str, kind: str) -> str:
    kind = "long" if kind == "text" and len(text) > LONG else kind
    return f'<{element} class="{kind}">{escape(text)}</{element}>'


def _is_numeric(column: Iterable[str]) -> bool:
    """Return whether every nonempty cell begins with a number, as in "0.41 [0.35, 0.47]", and there is one."""
    nonempty = [cell for cell in column if cell.strip().lower() not in EMPTY_CELLS]
    return bool(nonempty) and all(NUMBER.match(cell.strip()) for cell in nonempty)


def _caption(item: Figure | Table) -> str:
    text = f"{item.caption} {item.remark}".strip()
    return f'<p class="caption">{escape(text)}</p>' if text else ""


def _toggles(report: Report, styles: style.Styles) -> str:
    """Render a button for each label of a line, and one for the single seeds behind intervals, which are hidden."""
    lines = [chart for figure in report.figures for chart in figure.charts if chart.kind == "lines"]
    labels = dict.fromkeys(label for chart in lines for label in chart.series)
    buttons = [_button(label, f"{_swatch(*styles[label])}{escape(label)}") for label in labels]
    all_series = [series for chart in lines for series in chart.series.values()]
    if any(series.seeds is not None and series.low is not None for series in all_series):
        buttons.append(_button(SEEDS, "single seeds", pressed=False))
    if not buttons:
        return ""
    return f"""<div class="toggles" role="group" aria-label="Series shown in the charts">{"".join(buttons)}
<span class="hint">Hover for values, drag to zoom, double-click to zoom out.</span></div>
<noscript><p class="notes">The charts require JavaScript.</p></noscript>"""


def _button(name: str, content: str, pressed: bool = True) -> str:
    return (
        f'<button type="button" data-name="{escape(name)}" aria-pressed="{"true" if pressed else "false"}">'
        f"{content}</button>\n"
    )


def _swatch(colour: str, dash: style.Dash) -> str:
    """Render a short piece of a line in its colour and dash."""
    named = {"solid": "none", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}
    dasharray = named.get(dash.plotly, dash.plotly.replace("px", ""))
    return (
        '<svg class="swatch" width="24" height="8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="24" y2="4" stroke="{colour}" stroke-dasharray="{dasharray}"/></svg>'
    )


def _figure(figure: Figure, styles: style.Styles) -> str:
    columns = {1: 1, 2: 2, 4: 2}.get(len(figure.charts), 3)
    panels = "".join(_panel(figure, index) for index in range(len(figure.charts)))
    labels = dict.fromkeys(label for chart in figure.charts if chart.kind == "lines" for label in chart.series)
    key = "".join(f"<li>{_swatch(*styles[label])}{escape(label)}</li>" for label in labels)
    return f"""<section class="figure">
<h2>{escape(figure.title)}</h2>
<ul class="key">{key}</ul>
<div class="panels columns-{columns}">
{panels}</div>
{_caption(figure)}
</section>
"""


def _panel(figure: Figure, index: int) -> str:
    chart = figure.charts[index]
    title = f"<h3>{escape(chart.title)}</h3>" if chart.title else ""
    height = f' style="height:{CHART_PADDING + BAR_HEIGHT * len(chart.series)}px"' if chart.kind == "bars" else ""
    return (
        f'<div class="panel">{title}<div class="chart" data-chart="{escape(f"{figure.name}/{index}")}" role="img" '
        f'aria-label="{escape(chart.title or figure.title)}"{height}></div></div>\n'
    )


def _configs(configs: Mapping[str, str]) -> str:
    items = "".join(
        f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>\n"
        for name, text in configs.items()
    )
    return f'<section class="configs">\n<h2>Exact configurations</h2>\n{items}</section>' if items else ""


def _chart_data(chart: Chart, styles: style.Styles) -> dict[str, Any]:
    """Return the data from which page.js draws a panel."""
    lines = [series.x for series in chart.series.values() if series.x is not None]
    x = np.unique(np.concatenate(lines or [np.ones(1)]))
    # A level has a point at every x of the panel, to be drawn and hovered there; a panel without lines gets three.
    level_x = x if len(x) > 1 else x + np.array([-0.5, 0, 0.5]) * (np.abs(x) if x.any() else 1)
    return {
        "kind": chart.kind,
        "xlabel": chart.xlabel,
        "ylabel": chart.ylabel,
        "logX": chart.log_x,
        "ticks": _json_numbers(spaced_ticks(x, 0.11, chart.log_x)) if lines and len(x) <= MAX_MARKED else None,
        "reference": chart.reference,
        "series": [
            {"label": label, "colour": colour, "dash": dash.plotly, "hatch": dash.hatch}
            | _series_data(chart, label, series, level_x)
            for label, series in chart.series.items()
            for colour, dash in [styles[label]]
        ],
    }


def _series_data(chart: Chart, label: str, series: Series, level_x: np.ndarray) -> dict[str, Any]:
    """Return the numbers of a series. A bar has one point; that of a level is repeated for every x of its panel."""
    x = np.ones(1) if series.x is None else np.asarray(series.x, np.float64)
    parts = {"y": series.point, "low": series.low, "high": series.high, "seeds": series.seeds}
    arrays = {name: np.asarray(part, np.float64) for name, part in parts.items() if part is not None}
    if chart.kind == "bars" and len(series.point) != 1:
        raise UserError(f"The bar {label} of the chart {chart.title!r} has {len(series.point)} points; a bar has one.")
    if any(part.shape[-1:] != x.shape for part in arrays.values()):
        raise UserError(f"The series {label} of the chart {chart.title!r} has different numbers of points and of x.")
    is_level = chart.kind == "lines" and series.x is None
    if is_level:
        arrays = {name: np.repeat(part, len(level_x), axis=-1) for name, part in arrays.items()}
        x = level_x
    numbers = {name: _json_numbers(part) for name, part in arrays.items()}
    return {**dict.fromkeys(parts), "level": is_level, "x": _json_numbers(x)} | numbers


def _json_numbers(values: np.ndarray) -> list[Any]:
    """Return nested lists of numbers with nine digits, as in the tables of a run, and None for nan."""
    if values.ndim > 1:
        return [_json_numbers(row) for row in values]
    return [float(f"{value:.9g}") if np.isfinite(value) else None for value in values]
