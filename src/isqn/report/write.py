"""A report on disk: the page, every figure in three formats, and the numbers behind them."""

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
from isqn.experiments.config import nearest
from isqn.report import figures, page
from isqn.report.build import Options, build, overview
from isqn.report.charts import Figure, Report
from isqn.report.collect import Collected, collect
from isqn.train.record import replace_text, writable
from isqn.types import UserError

__all__ = ["Options", "require_libraries", "watch", "write"]


def require_libraries() -> None:
    """Before hours of training, or before half of the files are written."""
    for name in ("matplotlib", "plotly"):
        if find_spec(name) is None:
            raise UserError(f'The report needs {name}: pip install "isqn[report]" (`isqn study --no-report` does not).')


def write(folder: Path, out: Path, options: Options, baseline: str | None = None, only: tuple[str, ...] = ()) -> Report:
    """index.html, figures/, results.csv, scores.json and headline.json."""
    require_libraries()
    collected = collect(folder, baseline)
    report, compared = build(collected, options)
    drawn = [figure for figure in (overview(report), *report.figures) if figure]
    names = [figure.name for figure in drawn]
    for name in only:
        if name not in names:
            why = " ".join(report.notes)
            raise UserError(f"--figure {name!r} is not in this report; {nearest(name, names)} {why}".strip())
    with writable(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        if not only:
            _drop_others(out / "figures", names)
        labels = report.labels
        for figure in drawn:
            if not only or figure.name in only:
                figures.write(figure, out / "figures", among=labels)
                write_numbers(out / "figures" / f"{figure.name}.csv", figure)
        write_csv(out / "results.csv", collected)
        if compared:
            write_score_dict(out / "scores.json", compared.results, compared.scores, compared.scale)
        else:
            (out / "scores.json").unlink(missing_ok=True)  # of an earlier report
        replace_text(out / "headline.json", json.dumps(report.headline.as_json(), indent=1) + "\n")
        replace_text(out / "index.html", page.render(report))
    return report


def _drop_others(folder: Path, names: list[str]) -> None:
    """Figures of an earlier report which this one does not have: what has all of their files is one."""
    suffixes = (*figures.FORMATS, "csv")
    for numbers in folder.glob("*.csv"):
        files = [numbers.with_suffix(f".{suffix}") for suffix in suffixes]
        if numbers.stem not in names and all(file.is_file() for file in files):
            for file in files:
                file.unlink()


def write_csv(path: Path, collected: Collected) -> None:
    """One row for each epoch of each run: what the figures of returns are made from."""
    rows = []
    for one in collected.runs:
        whose = (collected.name, one.task, one.protocol, one.method, one.config.seed)
        for epoch, value in enumerate(one.returns):
            rows.append((*whose, epoch, one.config.epoch_end(epoch), f"{value:.9g}", "yes" if one.finished else "no"))
    header = ("study", "task", "protocol", "method", "seed", "epoch", "step", "mean_return", "finished")
    _write_rows(path, header, rows)


def write_numbers(path: Path, figure: Figure) -> None:
    """What a figure shows, to draw it another way: a row for each point of each of its lines and bars."""
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
    """The page alone, made anew until every run has finished."""
    require_libraries()
    while True:
        collected = collect(folder, baseline)
        report, _ = build(collected, options, watching=True)
        with writable(out, "--out"):
            out.mkdir(parents=True, exist_ok=True)
            replace_text(out / "index.html", page.render(report, refresh_seconds=max(1, round(seconds))))
        if not collected.going and not collected.waiting:
            return
        time.sleep(seconds)
