"""The report as one HTML page, which brings along its style, its numbers and the library that draws them."""

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
from isqn.report.charts import FEW, Chart, Figure, Report, Series, Table, apart
from isqn.types import UserError

SEEDS = ""  # the name of the button for single seeds; no label is empty
LONG = 32  # letters of a cell that may be broken into lines
BAR, FRAME = 26, 64  # pixels of one bar, and of what is around the bars
NUMBER = re.compile(r"-?\d")
NOTHING = ("", "nan")


def render(report: Report, *, refresh_seconds: int | None = None) -> str:
    """The page as text. With `refresh_seconds` it reloads itself, and stays where its reader is."""
    library, ours = _plotly(), _file("page.js")
    # The page forbids itself the network, and every script but these two.
    scripts = " ".join(f"'sha256-{_sha256(text)}'" for text in (library, ours))
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {scripts}"
    looks = style.looks(report.labels)
    charts = {
        f"{figure.name}/{index}": _chart(chart, looks)
        for figure in report.figures
        for index, chart in enumerate(figure.charts)
    }
    data = json.dumps({"charts": charts, "refresh": refresh_seconds}, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # else a label could close the element
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
{_file("page.css")}</style>
</head>
<body>
<main>
<h1>{escape(report.title)}</h1>
<p class="question">{escape(report.question)}</p>
{_notes(report.notes)}
{_table(report.headline, "headline")}
<section>
{_toggles(report, looks)}
{"".join(_figure(figure, looks) for figure in report.figures)}
</section>
{"".join(_table(table) for table in report.tables)}
{_configs(report.configs)}
</main>
<div class="readout" aria-hidden="true" hidden></div>
<footer>Made with isqn {__version__}; charts drawn by plotly.js.{reloads}</footer>
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script>{ours}</script>
</body>
</html>
"""


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # slow to import

    return get_plotlyjs()


def _file(name: str) -> str:
    return files("isqn.report").joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<aside class="notes" aria-label="Notes"><ul>{items}</ul></aside>' if items else ""


def _table(table: Table, name: str = "") -> str:
    """Columns of numbers stand to the right; a table that is too wide or too long scrolls in its box."""
    words = table.rows
    columns = [[row[index] for row in words] for index in range(len(table.columns))]
    kinds = ["number" if _is_numeric(column) else "text" for column in columns]
    head = "".join(_cell("th", *pair) for pair in zip(table.columns, kinds, strict=True))
    rows = [f"<tr>{''.join(_cell('td', *pair) for pair in zip(row, kinds, strict=True))}</tr>\n" for row in words]
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
    """Whether every cell begins with a number, as in "0.41 [0.35, 0.47]", or says that there is none."""
    said = [cell for cell in column if cell.strip().lower() not in NOTHING]
    return bool(said) and all(NUMBER.match(cell.strip()) for cell in said)


def _caption(shown: Figure | Table) -> str:
    text = f"{shown.caption} {shown.remark}".strip()
    return f'<p class="caption">{escape(text)}</p>' if text else ""


def _toggles(report: Report, looks: style.Looks) -> str:
    """One button for each label of a line; and one for the seeds behind intervals, which sum them up at first."""
    lines = [chart for figure in report.figures for chart in figure.charts if chart.kind == "lines"]
    labels = dict.fromkeys(label for chart in lines for label in chart.series)
    buttons = [_button(label, f"{_swatch(*looks[label])}{escape(label)}") for label in labels]
    every = [series for chart in lines for series in chart.series.values()]
    if any(series.seeds is not None and series.low is not None for series in every):
        buttons.append(_button(SEEDS, "single seeds", pressed=False))
    if not buttons:
        return ""
    return f"""<div class="toggles" role="group" aria-label="What the charts show">{"".join(buttons)}
<span class="hint">Hover for values, drag to zoom, double-click to zoom out.</span></div>
<noscript><p class="notes">The charts need JavaScript.</p></noscript>"""


def _button(name: str, content: str, pressed: bool = True) -> str:
    return (
        f'<button type="button" data-name="{escape(name)}" aria-pressed="{"true" if pressed else "false"}">'
        f"{content}</button>\n"
    )


def _swatch(colour: str, dash: style.Dash) -> str:
    named = {"solid": "none", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}
    strokes = named.get(dash.plotly, dash.plotly.replace("px", ""))
    return (
        '<svg class="swatch" width="24" height="8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="24" y2="4" stroke="{colour}" stroke-dasharray="{strokes}"/></svg>'
    )


def _figure(figure: Figure, looks: style.Looks) -> str:
    columns = {1: 1, 2: 2, 4: 2}.get(len(figure.charts), 3)
    panels = "".join(_panel(figure, index) for index in range(len(figure.charts)))
    labels = dict.fromkeys(label for chart in figure.charts if chart.kind == "lines" for label in chart.series)
    key = "".join(f"<li>{_swatch(*looks[label])}{escape(label)}</li>" for label in labels)
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
    height = f' style="height:{FRAME + BAR * len(chart.series)}px"' if chart.kind == "bars" else ""
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


def _chart(chart: Chart, looks: style.Looks) -> dict[str, Any]:
    """What the script needs to draw one panel."""
    lines = [series.x for series in chart.series.values() if series.x is not None]
    x = np.unique(np.concatenate(lines or [np.ones(1)]))
    # a level is drawn and hovered wherever a line is, and somewhere if there is no stretch of a line
    across = x if len(x) > 1 else x + np.array([-0.5, 0, 0.5]) * (np.abs(x) if x.any() else 1)
    return {
        "kind": chart.kind,
        "xlabel": chart.xlabel,
        "ylabel": chart.ylabel,
        "logX": chart.log_x,
        "ticks": _numbers(apart(x, 0.11, chart.log_x)) if lines and len(x) <= FEW else None,
        "reference": chart.reference,
        "series": [
            {"label": label, "colour": colour, "dash": dash.plotly, "hatch": dash.hatch}
            | _columns(chart, label, series, across)
            for label, series in chart.series.items()
            for colour, dash in [looks[label]]
        ],
    }


def _columns(chart: Chart, label: str, series: Series, across: np.ndarray) -> dict[str, Any]:
    """The numbers of one series: a bar's of length one, a level's repeated for every x of its panel."""
    x = np.ones(1) if series.x is None else np.asarray(series.x, np.float64)
    parts = {"y": series.point, "low": series.low, "high": series.high, "seeds": series.seeds}
    given = {name: np.asarray(part, np.float64) for name, part in parts.items() if part is not None}
    if chart.kind == "bars" and len(series.point) != 1:
        raise UserError(f"The bar {label} of the chart {chart.title!r} has {len(series.point)} points; a bar has one.")
    if any(part.shape[-1:] != x.shape for part in given.values()):
        raise UserError(f"The series {label} of the chart {chart.title!r} has another number of points than of x.")
    level = chart.kind == "lines" and series.x is None
    if level:
        given = {name: np.repeat(part, len(across), axis=-1) for name, part in given.items()}
        x = across
    return {**dict.fromkeys(parts), "level": level, "x": _numbers(x)} | {k: _numbers(v) for k, v in given.items()}


def _numbers(values: np.ndarray) -> list[Any]:
    """As a run's own tables have them: nine digits; null where there is nothing to draw."""
    if values.ndim > 1:
        return [_numbers(row) for row in values]
    return [float(f"{value:.9g}") if np.isfinite(value) else None for value in values]
