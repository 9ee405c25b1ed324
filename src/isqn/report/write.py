"""Write a report to disk: the page, every figure in three formats, and the numbers behind them."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isqn.analysis.results import write_score_dict
from isqn.config.fields import nearest
from isqn.data.files import replace_text, writing
from isqn.report import figures, page
from isqn.report.build import Options, build, overview
from isqn.report.charts import Figure, Report
from isqn.report.collect import CollectedRuns, collect
from isqn.types import UserError

__all__ = ["Options", "require_libraries", "watch", "write"]


def require_libraries() -> None:
    """Refuse to start without the plotting libraries, before hours of training or before any file is written."""
    for name in ("matplotlib", "plotly"):
        if find_spec(name) is None:
            raise UserError(f'The report needs {name}: pip install "isqn[report]" (`isqn study --no-report` does not).')


def write(folder: Path, out: Path, options: Options, baseline: str | None = None, only: tuple[str, ...] = ()) -> Report:
    """Write index.html, figures/, results.csv, scores.json and headline.json, and return the report.

    With `only`, no other figures are written as files.
    """
    require_libraries()
    collected = collect(folder, baseline)
    report, comparison = build(collected, options)
    all_figures = [figure for figure in (overview(report), *report.figures) if figure]
    names = [figure.name for figure in all_figures]
    for name in only:
        if name not in names:
            notes = " ".join(report.notes)
            raise UserError(f"--figure {name!r} is not in this report; {nearest(name, names)} {notes}".strip())
    with writing(out, "choose another --out"):
        out.mkdir(parents=True, exist_ok=True)
        if not only:
            _remove_stale_figures(out / "figures", names)
        for figure in all_figures:
            if not only or figure.name in only:
                figures.write(figure, out / "figures", all_labels=report.labels)
                write_figure_csv(out / "figures" / f"{figure.name}.csv", figure)
        write_returns_csv(out / "results.csv", collected)
        if comparison:
            write_score_dict(out / "scores.json", comparison.results, comparison.scores, comparison.scale)
        else:
            (out / "scores.json").unlink(missing_ok=True)  # left by an earlier report
        replace_text(out / "headline.json", json.dumps(report.headline.as_json(), indent=1) + "\n")
        replace_text(out / "index.html", page.render(report))
    return report


def _remove_stale_figures(folder: Path, names: list[str]) -> None:
    """Remove figures of an earlier report that are not in this one.

    A figure is recognised by having all of its files, so that files of the user stay.
    """
    suffixes = (*figures.FORMATS, "csv")
    for csv_path in folder.glob("*.csv"):
        files = [csv_path.with_suffix(f".{suffix}") for suffix in suffixes]
        if csv_path.stem not in names and all(file.is_file() for file in files):
            for file in files:
                file.unlink()


def write_returns_csv(path: Path, collected: CollectedRuns) -> None:
    """Write the mean return of each epoch of each run, one row each."""
    rows = []
    for one in collected.runs:
        key = (collected.name, one.task, one.protocol, one.method, one.config.seed)
        for epoch, value in enumerate(one.returns):
            rows.append((*key, epoch, one.config.epoch_end(epoch), f"{value:.9g}", "yes" if one.finished else "no"))
    header = ("study", "task", "protocol", "method", "seed", "epoch", "step", "mean_return", "finished")
    _write_rows(path, header, rows)


def write_figure_csv(path: Path, figure: Figure) -> None:
    """Write the data of a figure, one row for each point of each line and for each bar."""
    rows = []
    for chart in figure.charts:
        for label, series in chart.series.items():
            columns = [series.x, series.point, series.low, series.high]
            for values in zip(*(("",) * len(series.point) if c is None else c for c in columns), strict=True):
                rows.append((chart.title, label, *(v if v == "" else f"{v:.9g}" for v in values)))
    _write_rows(path, ("panel", "label", "x", "point", "low", "high"), rows)


def _write_rows(path: Path, header: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    replace_text(path, text.getvalue())


def watch(folder: Path, out: Path, options: Options, baseline: str | None, seconds: float) -> None:
    """Write only the page, again and again, until every run has finished."""
    require_libraries()
    while True:
        collected = collect(folder, baseline)
        report, _ = build(collected, options, watching=True)
        with writing(out, "choose another --out"):
            out.mkdir(parents=True, exist_ok=True)
            replace_text(out / "index.html", page.render(report, refresh_seconds=max(1, round(seconds))))
        if not collected.num_unfinished and not collected.num_not_started:
            return
        time.sleep(seconds)
