"""Reports of runs written here: their numbers, computed by hand, and their notes on what was left out."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import run_config, write_run
from isqn.agents.cql import CqlConfig
from isqn.agents.dqn import DqnConfig
from isqn.agents.sac import SacConfig
from isqn.analysis.results import read_score_dict
from isqn.analysis.stats import Interval
from isqn.cli import main
from isqn.config.toml import to_toml
from isqn.report import figures, page, tables
from isqn.report.build import Options, build, overview
from isqn.report.charts import Chart, Figure, Report, Series, Table
from isqn.report.collect import collect
from isqn.report.write import watch, write, write_figure_csv, write_returns_csv
from isqn.study.catalogue import find_study, format_command
from isqn.study.grid import Cell, Study
from isqn.study.grid import to_toml as study_toml
from isqn.train import record
from isqn.types import UserError

TB, TF, IS = {"scheme": "target-based"}, {"scheme": "target-free"}, {"scheme": "iterated-shared"}
TASK = {"env_id": "CartPole-v1", "random_score": 0.0, "reference_score": 10.0}  # a score is a tenth of the return
SMALL = {"epoch_steps": 1_000, "total_timesteps": 2_000, "hidden_sizes": [4]}


def make_study(*methods: dict, tasks=(TASK,), seeds=(0, 1), settings=None, **more) -> Study:
    fields = {"name": "mine", "question": "Which is better?", "baseline": "TB-DQN"} | more
    shared = SMALL | (settings or {})
    if all(task["env_id"].startswith("ALE/") for task in tasks):  # whose torso has no hidden sizes
        del shared["hidden_sizes"]
    return Study(tasks=tasks, methods=methods, seeds=seeds, settings=shared, **fields)


Returns = Callable[[Cell, int], list | None]


def write_study(
    folder: Path, requested: Study, returns: Returns, more: Callable[[Cell, int], dict] = lambda *_: {}
) -> Path:
    """Write the folder of a study. A run with too few epochs is unfinished; a run of None has not started."""
    folder.mkdir(exist_ok=True)
    (folder / "study.toml").write_text(study_toml(requested))
    for cell in requested.cells:
        for seed in requested.seeds:
            epochs = returns(cell, seed)
            if epochs is not None:
                whole = len(epochs) == cell.config.num_epochs
                config = cell.config.replace(seed=seed)
                write_run(cell.folder(folder, seed), config, epochs, finished=whole, **more(cell, seed))
    return folder


def returns_by_method(**sums: list[float]) -> Returns:
    """Return two epochs with the given sum of returns for each method and seed. `TB_DQN` stands for TB-DQN."""
    return lambda cell, seed: [0.25 * (x := sums[cell.method.replace("-", "_")][seed]), 0.75 * x]


def build_report(folder: Path, **options) -> Report:
    return build(collect(folder), Options(**options))[0]


def build_comparison(folder: Path, baseline: str | None = None, **options):
    return build(collect(folder, baseline), Options(**options))[1]


def figure(report: Report, name: str) -> Figure:
    (found,) = (f for f in report.figures if f.name == name)
    return found


def chart(report: Report, name: str) -> Chart:
    (found,) = figure(report, name).charts
    return found


def table(report: Report, title: str) -> Table:
    (found,) = (t for t in report.tables if t.title == title)
    return found


def points_of(chart: Chart) -> dict[str, list[float]]:
    return {name: [round(float(p), 9) for p in series.point] for name, series in chart.series.items()}


def assert_drawable(report: Report) -> None:
    """Check that the figures and the page can be drawn."""
    for one in report.figures:
        assert len(figures.draw(one).axes) == len(one.charts)
    assert page.render(report).endswith("</html>\n")


# -- the comparison -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_seeds(tmp_path_factory):
    """AUCs are 10, 20, 30, 40 and 20, 30, 60, 100, and their interquartile means 25 and 45."""
    requested = make_study(TB, TF, seeds=(0, 1, 2, 3))
    folder = tmp_path_factory.mktemp("four") / "study"
    return write_study(folder, requested, returns_by_method(TB_DQN=[30, 10, 40, 20], TF_DQN=[20, 100, 30, 60]))


@pytest.mark.parametrize(
    ("returns", "sentence"),
    [
        ([20, 20, 20], "TF-DQN has 2.00 [2.00, 2.00] of the AUC of TB-DQN, with 0.50 of its parameters: better."),
        ([5, 5, 5], "TF-DQN has 0.50 [0.50, 0.50] of the AUC of TB-DQN, with 0.50 of its parameters: worse."),
        (
            [5, 5, 20],
            "TF-DQN has 1.00 [0.50, 2.00] of the AUC of TB-DQN, with 0.50 of its parameters: "
            "no difference can be seen.",
        ),
        (
            [5, 5],
            "TF-DQN has 0.50 [0.50, 0.50] of the AUC of TB-DQN, with 0.50 of its parameters: "
            "2 seeds are too few to tell.",
        ),
        ([5], "TF-DQN has 0.50 of the AUC of TB-DQN, with 0.50 of its parameters: 1 seed is too few to tell."),
    ],
)
def test_the_headline_in_words(returns, sentence, tmp_path):
    requested = make_study(TB, TF, seeds=tuple(range(len(returns))))
    study = write_study(tmp_path / "s", requested, returns_by_method(TB_DQN=[10] * len(returns), TF_DQN=returns))
    assert build_report(study).findings == (sentence,)


def test_headline_by_hand(four_seeds):
    report, found = build(collect(four_seeds), Options())
    assert found.aucs["TB-DQN"].point == pytest.approx(1)
    assert found.aucs["TF-DQN"].point == pytest.approx(45 / 25)
    # 20 beats 10 and ties with 20; 30 beats two and ties with one; 60 and 100 beat all: 1.5 + 2.5 + 4 + 4 of 16.
    assert found.improvements["TF-DQN"].point == pytest.approx(12 / 16)
    assert set(found.improvements) == {"TF-DQN"}
    rows = {row[0]: dict(zip(report.headline.columns, row, strict=True)) for row in report.headline.rows}
    assert list(rows) == ["TB-DQN", "TF-DQN"]
    # Mean scores over training are 0.5, 1, 1.5, 2 and 1, 1.5, 3, 5.
    assert [rows["TB-DQN"][name] for name in ("IQM", "median", "mean", "optimality gap")] == [
        "1.25",
        "1.25",
        "1.25",
        "0.12",
    ]
    assert [rows["TF-DQN"][name] for name in ("IQM", "median", "mean", "optimality gap")] == [
        "2.25",
        "2.62",
        "2.62",
        "0.00",
    ]
    assert re.fullmatch(r"1\.80 \[\d\.\d\d, \d\.\d\d\]", rows["TF-DQN"]["normalised AUC"])
    based, free = report.headline.as_json()
    assert free["normalised AUC"] == pytest.approx(found.aucs["TF-DQN"]._asdict())
    assert (based["IQM"], based["P(beats TB-DQN)"]) == (1.25, None)
    assert rows["TB-DQN"]["P(beats TB-DQN)"] == ""
    # CartPole with 4 inputs, 4 hidden units and 2 actions; the target-based agent keeps a copy.
    assert [rows[name]["parameters kept"] for name in rows] == ["60", "30"]
    assert report.notes == ()


def test_scores_are_divided_by_the_chosen_baseline(four_seeds):
    found = build_comparison(four_seeds, baseline="TF-DQN")
    assert found.aucs["TB-DQN"].point == pytest.approx(25 / 45)
    assert found.aucs["TF-DQN"].point == pytest.approx(1)
    assert found.improvements["TB-DQN"].point == pytest.approx(4 / 16)


def test_figures_and_tables_show_the_same_numbers(four_seeds):
    report = build_report(four_seeds)
    assert points_of(chart(report, "auc")) == {"TB-DQN": [1.0], "TF-DQN": [1.8]}
    assert chart(report, "auc").reference == 1
    curves = chart(report, "curves")
    assert points_of(curves) == {"TB-DQN": [0.625, 1.875], "TF-DQN": [1.125, 3.375]}
    np.testing.assert_array_equal(curves.series["TB-DQN"].x, [1000, 2000])
    assert curves.xlabel == "agent steps"
    assert points_of(chart(report, "improvement")) == {"TF-DQN": [0.75]}
    profile = chart(report, "profile").series["TF-DQN"]
    assert profile.x[[0, -1]].tolist() == [0, 5]
    np.testing.assert_allclose(profile.point, [np.mean(np.array([1, 1.5, 3, 5]) > x) for x in profile.x])
    tasks = chart(report, "tasks")
    assert points_of(tasks)["TF-DQN"] == [0.25 * 52.5, 0.75 * 52.5]
    assert tasks.series["TF-DQN"].seeds.tolist() == [[5, 15], [25, 75], [7.5, 22.5], [15, 45]]
    assert points_of(chart(report, "parameters")) == {"TB-DQN": [60], "TF-DQN": [30]}
    assert table(report, "Mean return over training").rows[0][1].startswith("12.5 [")


@pytest.mark.parametrize(
    ("cells", "texts"),
    [
        ((0.171, Interval(0.2, 0.045, 1.0), -0.0004), ["0.17", "0.20 [0.04, 1.00]", "0.00"]),
        ((0.016, 0.0034, 5e-16), ["0.016", "0.003", "0.000"]),
        ((25.04, 7.0, None), ["25.0", "7.0", ""]),
        ((1234.5, Interval(-88.74, np.nan, np.nan)), ["1234", "-89"]),
        ((17_795, "all"), ["17,795", "all"]),
        ((0.0, np.nan), ["0.00", "nan"]),
    ],
)
def test_numbers_of_a_column_have_the_same_number_of_decimals(cells, texts):
    rows = Table("", ("",), tuple((cell,) for cell in cells)).rows
    assert [text for (text,) in rows] == texts


def test_several_tasks_are_pooled_on_a_common_scale(tmp_path):
    second = {"env_id": "Acrobot-v1", "random_score": -500.0, "reference_score": -100.0}
    requested = make_study(TB, TF, tasks=(TASK, second))

    def returns(cell, seed):
        if cell.task == "CartPole-v1":
            return [5, 15] if cell.method == "TB-DQN" else [10, 30]  # AUC 2 and 4
        return [-300, -300] if cell.method == "TB-DQN" else [-500, -300]  # AUC 1 and 0.5

    found = build_comparison(write_study(tmp_path / "s", requested, returns))
    assert found.scores["TF-DQN"].tolist() == [[[1, 3], [0, 0.5]]] * 2
    # The IQM drops the lowest and the highest of four runs: (1 + 2) / 2 and (0.5 + 4) / 2.
    assert found.aucs["TF-DQN"].point == pytest.approx(2.25 / 1.5)
    assert found.caption.startswith(
        "IQM over 2 tasks x 2 seeds, 95 % stratified bootstrap intervals (unreliable with only 2 seeds); 0 is"
    )


def test_atari_is_human_normalised_with_frames_on_the_x_axis(tmp_path):
    requested = make_study(TB, TF, tasks=({"env_id": "ALE/Breakout-v5"},))
    folder = tmp_path / "s"
    write_study(folder, requested, lambda cell, _: [16.1, 30.5] if cell.method == "TB-DQN" else [1.7, 16.1])
    found = collect(folder)
    report, comparison = build(found, Options())
    np.testing.assert_allclose(comparison.scores["TB-DQN"][0], [[0.5, 1]])
    assert comparison.aucs["TF-DQN"].point == pytest.approx(0.5 / 1.5)
    assert "0 is random play and 1 a human" in figure(report, "auc").caption
    for name in ("curves", "tasks"):
        assert chart(report, name).xlabel == "frames"
        assert chart(report, name).series["TB-DQN"].x.tolist() == [4000, 8000]


def test_one_seed_has_no_interval_and_the_caption_says_so(tmp_path):
    report = build_report(
        write_study(
            tmp_path / "s",
            make_study(TB, TF, seeds=(5,)),
            lambda cell, _: [1, 3] if cell.method[:2] == "TB" else [2, 4],
        )
    )
    assert report.headline.rows[1][1:3] == ("1.50", "1.00")
    assert "1 task x 1 seed, no intervals (only one seed);" in report.headline.caption
    for name in ("auc", "curves", "profile", "improvement", "tasks"):
        assert all(series.low is None and series.high is None for series in chart(report, name).series.values())
    assert table(report, "Mean return over training").rows[1] == ("TF-DQN", "3.00")


@pytest.mark.parametrize(
    ("second", "x", "xlabel"),
    [
        ({"env_id": "Acrobot-v1"}, [1000, 2000], "agent steps"),
        ({"env_id": "Acrobot-v1", "epoch_steps": 500, "total_timesteps": 1_000}, [50, 100], "share of training in %"),
        ({"env_id": "Acrobot-v1", "total_timesteps": 1_500}, [1, 2], "epoch"),
        ({"env_id": "ALE/Pong-v5"}, [50, 100], "share of training in %"),
    ],
)
def test_tasks_of_different_lengths_share_a_valid_x_axis(tmp_path, second, x, xlabel):
    requested = make_study(TB, tasks=(TASK, {"random_score": 0.0, "reference_score": 10.0, **second}))
    report = build_report(write_study(tmp_path / "s", requested, lambda *_: [5, 15]))
    assert chart(report, "curves").xlabel == xlabel
    assert chart(report, "curves").series["TB-DQN"].x.tolist() == x


# -- panels and ablations ------------------------------------------------------------------------------------------


def test_each_panel_is_divided_by_its_own_baseline(tmp_path):
    types = {"compute_dtype": ["float32", "bfloat16"]}
    requested = make_study({**TB, **types}, {**TF, **types}, panels="compute_dtype")
    sums = {"TB-DQN, float32": 10, "TF-DQN, float32": 5, "TB-DQN, bfloat16": 20, "TF-DQN, bfloat16": 30}
    report = build_report(write_study(tmp_path / "s", requested, lambda cell, _: [sums[cell.method] / 2] * 2))
    first, second = figure(report, "auc").charts
    assert (first.title, points_of(first)) == ("float32", {"TB-DQN": [1], "TF-DQN": [0.5]})
    assert (second.title, points_of(second)) == ("bfloat16", {"TB-DQN": [1], "TF-DQN": [1.5]})
    for name in ("curves", "profile", "tasks"):
        panels = {c.title.split(", ")[-1]: list(c.series) for c in figure(report, name).charts}
        assert panels == {"float32": ["TB-DQN", "TF-DQN"], "bfloat16": ["TB-DQN", "TF-DQN"]}, name
    assert points_of(chart(report, "improvement")) == {"TF-DQN, float32": [0], "TF-DQN, bfloat16": [1]}
    assert list(chart(report, "parameters").series) == ["TB-DQN", "TF-DQN"], "the sizes are the same in both panels"
    assert [row[0] for row in report.headline.rows] == list(sums)


def test_a_panel_without_the_baseline_is_refused(tmp_path):
    requested = make_study({**TB, "compute_dtype": ["float32", "bfloat16"]}, TF, panels="compute_dtype")
    write_study(tmp_path / "s", requested, lambda *_: [1, 2])
    with pytest.raises(
        UserError, match=r"The baseline 'TF-DQN' is not a method of the panel 'bfloat16'; did you mean TB"
    ):
        collect(tmp_path / "s", "TF-DQN")


def test_an_ablation_has_lines_over_its_setting_and_levels_for_other_methods(tmp_path):
    periods = {"target_update_period": [400, 100, 200]}
    requested = make_study({**TB, **periods}, TF, along="target_update_period", baseline="TB-DQN, T=200")
    sums = {"TB-DQN, T=100": 4, "TB-DQN, T=200": 8, "TB-DQN, T=400": 6, "TF-DQN": 2}
    report = build_report(write_study(tmp_path / "s", requested, lambda cell, _: [sums[cell.method] / 2] * 2))
    drawn = chart(report, "ablation")
    assert points_of(drawn) == {"TF-DQN": [0.25], "TB-DQN": [0.5, 1, 0.75]}
    assert drawn.series["TB-DQN"].x.tolist() == [100, 200, 400]
    assert (drawn.xlabel, drawn.log_x, drawn.reference) == ("target update period T", True, 1)
    assert not any(f.name == "auc" for f in report.figures)


def test_an_ablation_over_heads_by_width(tmp_path):
    widths = {"width_factor": [1.0, 2.0]}
    requested = make_study(
        {**TF, **widths},
        {**IS, "num_bellman_iterations": [1, 3], **widths},
        along="num_bellman_iterations",
        panels="width_factor",
        baseline="TF-DQN",
    )

    def returns(cell, _):
        heads = 0 if cell.method.startswith("TF") else cell.config.num_bellman_iterations
        return [cell.config.width_factor + heads] * 2

    report = build_report(write_study(tmp_path / "s", requested, returns))
    first, second = figure(report, "ablation").charts
    assert (first.title, points_of(first)) == ("width x1", {"TF-DQN": [1], "iS-DQN": [2, 4]})
    assert (second.title, points_of(second)) == ("width x2", {"TF-DQN": [1], "iS-DQN": [1.5, 2.5]})
    assert second.series["iS-DQN"].x.tolist() == [1, 3]
    assert second.xlabel == "K"
    first, second = figure(report, "ablation-tasks").charts  # not normalised
    assert (first.title, points_of(first)) == ("CartPole-v1, width x1", {"TF-DQN": [1], "iS-DQN": [2, 4]})
    assert (second.title, points_of(second)) == ("CartPole-v1, width x2", {"TF-DQN": [2], "iS-DQN": [3, 5]})
    assert_drawable(report)


def test_an_ablation_that_includes_zero_has_a_linear_axis(tmp_path):
    requested = make_study({**TB, "learning_rate": [0.0, 0.1]}, along="learning_rate", baseline="TB-DQN, lr=0")
    drawn = chart(build_report(write_study(tmp_path / "s", requested, lambda *_: [1, 2])), "ablation")
    assert drawn.series["TB-DQN"].x.tolist() == [0, 0.1]
    assert (drawn.log_x, drawn.xlabel) == (False, "learning rate")


# -- missing runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A study of three epochs, in which TB seed 2 is in its second one and TF seed 1 has not started."""
    requested = make_study(TB, TF, seeds=(0, 1, 2), settings={"total_timesteps": 3_000})
    incomplete = {("TB-DQN", 2): [4, 99], ("TF-DQN", 1): None}
    folder = tmp_path_factory.mktemp("unfinished") / "study"
    return write_study(folder, requested, lambda cell, seed: incomplete.get((cell.method, seed), [2 + seed, 4, 5]))


@pytest.mark.parametrize(
    ("missing", "seeds", "returns", "sentences"),
    [
        ("drop", [0], [[2, 4, 5]], ["Left out: seeds 1-2, because 2 of 6 runs are"]),
        ("truncate", [0, 2], [[2], [4]], ["Left out: seed 1, because 1 of 6 runs are", "first 1 of 3 epochs."]),
    ],
)
def test_dropped_and_truncated_runs_are_noted_with_every_number(unfinished, missing, seeds, returns, sentences):
    report, found = build(collect(unfinished), Options(missing=missing))
    assert list(found.results.seeds) == seeds
    assert chart(report, "tasks").series["TB-DQN"].seeds.tolist() == returns
    remarks = [shown.remark for shown in (overview(report), *report.figures) if shown.name != "parameters"]
    remarks += [report.headline.remark, table(report, "Mean return over training").remark, " ".join(report.notes)]
    assert len(remarks) == 9
    for remark in remarks:
        assert all(sentence in remark for sentence in sentences), remark
    assert report.notes[-1] == "Of 6 runs, unfinished: 1, not started: 1; see the table of runs."
    assert table(report, "Runs").rows == (
        ("CartPole-v1", "TB-DQN", "0-1", "2", "", "1 min 20 s"),
        ("CartPole-v1", "TF-DQN", "0, 2", "", "1", "1 min"),
    )


def test_runs_without_a_common_scale_are_shown_task_by_task(tmp_path):
    """The baseline is no better than random play, so scores cannot be divided by it."""
    requested = make_study(TB, TF, tasks=({"env_id": "MountainCar-v0"},), seeds=(0, 1, 2))
    incomplete = {("TF-DQN", 1): None}
    write_study(tmp_path / "s", requested, lambda cell, seed: incomplete.get((cell.method, seed), [-200, -200]))
    with pytest.raises(UserError, match="1 of 6 runs"):
        build_report(tmp_path / "s")
    report, found = build(collect(tmp_path / "s"), Options(missing="drop"))
    assert found is None
    assert report.headline.title == "Mean return over training"
    assert report.headline.rows[1] == ("TF-DQN", "-200.0 [-200.0, -200.0]")
    assert report.notes[0].startswith("Left out: seed 1,")
    assert report.notes[1].startswith("There is no common scale: on MountainCar-v0, the mean return of TB-DQN over its")
    assert [f.name for f in report.figures] == ["tasks", "parameters"]
    assert chart(report, "tasks").series["TB-DQN"].seeds.shape == (2, 2)
    assert "Left out: seed 1," in figure(report, "tasks").remark


def test_methods_are_not_compared_with_a_baseline_below_random_play(tmp_path):
    folder = write_study(tmp_path / "s", make_study(TB, TF), returns_by_method(TB_DQN=[-3, -5], TF_DQN=[10, 10]))
    report, found = build(collect(folder), Options())
    assert found is None
    assert report.notes[0].startswith(
        "Methods cannot be compared with TB-DQN: the IQM of its area under the curve is -0.4 and must be above 0, where"
    )


def test_protocols_are_pooled_only_if_allowed_and_then_noted(tmp_path):
    games = tuple({"env_id": f"ALE/{game}-v5"} for game in ("Pong", "Breakout"))
    protocols = {"ALE/Pong-v5": "machado2018-v1", "ALE/Breakout-v5": "streaming-v1"}
    folder = tmp_path / "s"
    write_study(
        folder, make_study(TB, tasks=games), lambda *_: [20, 20], lambda cell, _: {"protocol": protocols[cell.task]}
    )
    with pytest.raises(UserError, match="played under different protocols, machado2018-v1 and streaming-v1,"):
        build_report(folder)
    report = build_report(folder, pool_protocols=True)
    assert report.notes == ("Pooled: runs of ALE under machado2018-v1 and streaming-v1.",)
    assert all(report.notes[0] == f.remark for f in report.figures if f.name != "parameters")


def test_a_run_with_other_settings_than_the_study_is_refused(tmp_path):
    requested = make_study(TB, TF)
    write_study(tmp_path / "s", requested, lambda *_: [1, 2])
    (tmp_path / "s" / "study.toml").write_text(study_toml(requested.replace(settings=SMALL | {"discount": 0.5})))
    with pytest.raises(
        UserError, match=r"seed-0 has discount = 0\.99, and the study says 0\.5; choose another folder, or move"
    ):
        collect(tmp_path / "s")


# -- metrics over training -------------------------------------------------------------------------------------------


STEPS = [1000, 1500, 2000]


def report_with_metrics(tmp_path: Path, columns: Callable[[Cell, int], dict], *methods: dict, **more) -> Report:
    requested = make_study(*methods, settings={"analysis": True}, **more)
    return build_report(
        write_study(
            tmp_path / "s", requested, lambda *_: [1, 2], lambda *key: {"metrics": {"step": STEPS, **columns(*key)}}
        )
    )


def test_probes_are_means_over_seeds_where_all_seeds_have_them(tmp_path):
    def columns(cell, seed):
        first = "" if seed == 0 else 7  # a seed that has not learned yet
        return {"effective_rank": [first, 10 + seed, 20 + seed], "dormant_share": [0.5, 0.5, 0.25]}

    report = report_with_metrics(tmp_path, columns, TB)
    drawn = chart(report, "effective-rank")
    assert points_of(drawn) == {"TB-DQN": [10.5, 20.5]}
    assert drawn.series["TB-DQN"].x.tolist() == [1500, 2000]
    assert drawn.series["TB-DQN"].low.tolist() == [10, 20]
    assert (drawn.title, drawn.xlabel) == ("CartPole-v1", "agent steps")
    assert points_of(chart(report, "dormant-share")) == {"TB-DQN": [0.5, 0.5, 0.25]}
    assert not any(f.name in ("gradient-cosine", "target-churn", "weights") for f in report.figures)


def test_adjacent_rows_of_long_runs_are_averaged(tmp_path):
    steps = list(range(1, 602))
    rank = {"step": steps, "effective_rank": steps}
    requested = make_study(TB)
    report = build_report(write_study(tmp_path / "s", requested, lambda *_: [1, 2], lambda *_: {"metrics": rank}))
    line = chart(report, "effective-rank").series["TB-DQN"]
    assert line.x.tolist() == list(range(3, 601, 3))
    assert line.point.tolist() == list(range(2, 600, 3))


def test_churn_is_divided_by_that_of_the_target_free_agent_at_the_same_step(tmp_path):
    churn = {"TB-DQN": ["", 0, 0], "TF-DQN": ["", 2, 4], "iS-DQN K=1": [9, 1, 3]}
    report = report_with_metrics(
        tmp_path,
        lambda cell, seed: {"target_churn_held_out": [c and c * (1 + 2 * seed) for c in churn[cell.method]]},
        *(TB, TF, IS),
    )
    drawn = chart(report, "target-churn")
    # The seeds have churn c and 3 c, so the mean of the target-free agent is 4 and then 8.
    assert points_of(drawn) == {"TB-DQN": [0, 0], "TF-DQN": [1, 1], "iS-DQN K=1": [0.5, 0.75]}
    assert all(series.x.tolist() == [1500, 2000] for series in drawn.series.values())
    assert drawn.series["iS-DQN K=1"].high.tolist() == [0.75, 1.125]
    assert (drawn.ylabel, drawn.reference) == ("target churn / that of TF", 1)
    shown = table(report, "Probes")
    column = shown.columns.index("target churn")
    means = {row[1]: row[column].point for row in shown.values}
    # The mean of 0.5 and 0.75, at the two steps that both agents have.
    assert means == pytest.approx({"TB-DQN": 0, "TF-DQN": 1, "iS-DQN K=1": 0.625})
    assert_drawable(report)


def test_the_data_of_a_figure_are_written_as_csv(tmp_path):
    level, line = Series(np.array([0.5])), Series(np.array([1.0, np.nan]), x=np.array([10.0, 20.0]), low=np.zeros(2))
    write_figure_csv(
        tmp_path / "a.csv", Figure("a", "", "", (Chart("lines", {"b": level, "c, d": line}, title="panel"),))
    )
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        "panel,label,x,point,low,high",
        "panel,b,,0.5,,",
        'panel,"c, d",10,1,0,',
        'panel,"c, d",20,nan,0,',
    ]


def test_churn_without_a_target_free_agent_is_not_divided(tmp_path):
    drawn = chart(
        report_with_metrics(tmp_path, lambda *_: {"target_churn_held_out": [1, 2, 3]}, TB, IS), "target-churn"
    )
    assert points_of(drawn) == {"TB-DQN": [1, 2, 3], "iS-DQN K=1": [1, 2, 3]}
    assert (drawn.ylabel, drawn.reference) == ("target churn", None)


def test_churn_with_two_target_free_agents_is_not_divided(tmp_path):
    other = {**TF, "name": "TF-DQN, other", "learning_rate": 0.5}
    drawn = chart(
        report_with_metrics(tmp_path, lambda *_: {"target_churn_held_out": [1, 2, 3]}, TB, TF, other), "target-churn"
    )
    assert points_of(drawn)["TF-DQN"] == [1, 2, 3]
    assert drawn.ylabel == "target churn"


def test_cosines_are_those_of_the_shared_agent_with_the_smallest_k(tmp_path):
    def columns(cell, _):
        k = cell.config.num_bellman_iterations
        return {"gradient_cosine_own_tb": [0.1 * k] * 3, "gradient_cosine_tf_tb": [0.01 * k] * 3}

    drawn = chart(
        report_with_metrics(tmp_path, columns, TB, {**IS, "num_bellman_iterations": [3, 2]}), "gradient-cosine"
    )
    assert points_of(drawn) == {"iS-DQN K=2 and target-based": [0.2] * 3, "target-free and target-based": [0.02] * 3}


def test_learned_weights_have_a_line_for_each_pair(tmp_path):
    meta = {**IS, "num_bellman_iterations": 2, "meta_gradient": "adam"}

    def columns(cell, _):
        learns = cell.config.meta_gradient != "none"
        return {"pair_weight_1": [1, 1.5, 1.75], "pair_weight_2": [1, 0.5, 0.25]} if learns else {}

    drawn = chart(
        report_with_metrics(tmp_path, columns, {**IS, "num_bellman_iterations": 2}, meta, baseline="iS-DQN K=2"),
        "weights",
    )
    assert points_of(drawn) == {"pair 1": [1, 1.5, 1.75], "pair 2": [1, 0.5, 0.25]}
    assert (drawn.title, drawn.reference) == ("CartPole-v1", 1)


# -- sizes, work, energy, provenance -----------------------------------------------------------------------------------


def test_energy_by_hand(tmp_path):
    """Two seeds of one program share its 2 hours, its 2 cores and its 3 GB."""
    metrics = {"step": [1000, 2000], "seconds": [100, 7200], "memory_mb": [3000, 2000]}
    both = {"metrics": metrics, "cores": 2, "trained_with": [".", "../seed-1"]}
    found = collect(write_study(tmp_path / "s", make_study(TB), lambda *_: [1, 2], lambda *_: both))
    shown = tables.energy(found.runs)
    assert shown.rows == (
        ("core hours", "4.00"),
        ("GB hours", "6.00"),
        ("energy", "0.0839 kWh"),  # (4 x 12 + 6 x 0.3725) x 1.67 = 83.9 Wh
        ("carbon dioxide equivalent", "39.8 g"),  # x 475 g/kWh
    )
    assert "(core hours x 12 W + GB hours x 0.3725 W) x 1.67" in shown.caption
    assert "CO2e = energy x 475 g/kWh" in shown.caption
    assert tables.runs(found).rows[0][-1] == "2 h"


def test_work_and_time_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_flops", lambda config, _: 2e6 if config.scheme == "target-based" else 3e6)
    rates = {0: [1, 500, 500], 1: [1, 250, 9999]}  # the first row includes compilation
    folder = write_study(
        tmp_path / "s",
        make_study(TB, TF, flops=True),
        lambda *_: [1, 2],
        lambda _, seed: {"metrics": {"step": STEPS, "steps_per_second": rates[seed]}},
    )
    report = build_report(folder)
    flops, hours = figure(report, "work").charts
    assert points_of(flops) == {"TB-DQN": [2e6], "TF-DQN": [3e6]}
    for shown in hours.series.values():  # a million steps take 2,000 s at 500 a second, and 4,000 s at 250
        assert np.concatenate([shown.low, shown.point, shown.high]) * 3600 == pytest.approx([2000, 3000, 4000])
    assert table(report, "Compute and time").rows[0] == ("CartPole-v1", "TB-DQN", "2.0", "375", "0.83")


def test_sizes_of_networks_and_the_memory_of_processes(four_seeds):
    rows = table(build_report(four_seeds), "Parameters and memory").rows
    assert [row[1:4] for row in rows] == [("TB-DQN", "30", "30"), ("TF-DQN", "30", "0")]
    assert [row[-1] for row in rows] == ["250", "250"]


def test_a_report_can_be_made_where_the_environment_is_not_installed(tmp_path):
    requested = make_study(TB, TF, tasks=({**TASK, "env_id": "nowhere/Gone-v0"},))
    report = build_report(write_study(tmp_path / "s", requested, returns_by_method(TB_DQN=[10, 10], TF_DQN=[5, 5])))
    assert [row[1] for row in report.headline.rows] == ["1.00 [1.00, 1.00]", "0.50 [0.50, 0.50]"]
    assert [row[-1] for row in report.headline.rows] == ["", ""]
    assert not any(f.name == "parameters" for f in report.figures)
    assert table(report, "Parameters and memory").rows[0][2:7] == ("",) * 5


def test_versions_and_commands_are_shown_without_folders(tmp_path):
    commands = {
        0: "/home/me/.venv/lib/isqn/experiments/worker.py out/jobs/a.toml out/runs/b",
        1: "/home/me/.venv/bin/isqn resume out/runs/b/seed-1",
        2: "/usr/lib/python3/isqn/__main__.py resume out/runs/b/seed-2",
    }
    summary = {"python": "3.11.7", "versions": {"isqn": "0.1.0", "jax": "0.9"}, "device": "cpu:0", "git": "a" * 40}
    requested = make_study(TB, seeds=(0, 1, 2))
    report = build_report(
        write_study(
            tmp_path / "s", requested, lambda *_: [1, 2], lambda _, seed: {"command": commands[seed], **summary}
        )
    )
    assert table(report, "Commands").rows == (
        ("isqn study study.toml", "1"),
        ("isqn resume out/runs/b/seed-1", "1"),
        ("isqn resume out/runs/b/seed-2", "1"),
    )
    assert table(report, "Software and devices").rows == (
        ("python 3.11.7, isqn 0.1.0, jax 0.9", "gymnasium", "cpu:0", "a" * 12, "3"),
    )
    assert report.configs["study.toml"] == study_toml(requested)
    config_text = (tmp_path / "s" / "runs" / "CartPole-v1" / "TB-DQN" / "seed-0" / "config.toml").read_text()
    assert report.configs["CartPole-v1, TB-DQN, seed 0"] == config_text
    named = collect(write_study(tmp_path / "t", requested.replace(name="online-ln", scale="mini"), lambda *_: [1, 2]))
    assert named.description == "Which is better?"


def test_the_command_of_a_study_of_the_paper():
    plain, paper = find_study("online-plain", "mini"), find_study("mellowmax", "paper")
    assert format_command(plain) == "isqn study online-plain --scale mini"
    part = plain.only(tasks=("Acrobot-v1",), seeds=(20, 21))
    assert format_command(part) == "isqn study online-plain --scale mini --tasks Acrobot-v1 --seeds 20 21 --out FOLDER"
    assert format_command(paper.only(seeds=(1,))) == "isqn study mellowmax --scale paper --seeds 1 --out FOLDER"
    assert format_command(plain.replace(settings={"discount": 0.9})) == "isqn study study.toml"
    assert format_command(plain.replace(tasks=({"env_id": "MountainCar-v0"},))) == "isqn study study.toml"


# -- a folder of runs without a study --------------------------------------------------------------------------------


def write_runs(root: Path, *runs: tuple[str, DqnConfig], epochs=(30, 40), **more) -> Path:
    for name, settings in runs:
        write_run(root / name, settings, list(epochs)[: settings.num_epochs], **more)
    return root


def small_config(scheme: str, seed: int = 0, **settings) -> DqnConfig:
    return run_config(seed=seed, **{"epochs": 2, "scheme": scheme, "hidden_sizes": (4,)} | settings)


def test_a_folder_of_runs_without_a_study_is_compared(tmp_path):
    shared = [(f"k{k}", small_config("iterated-shared", num_bellman_iterations=k)) for k in (9, 49, 3)]
    root = write_runs(
        tmp_path / "runs", *shared, ("free", small_config("target-free")), ("based", small_config("target-based"))
    )
    found = collect(root)
    assert found.name == "runs"
    assert found.baseline == "TB-DQN"
    assert [cell.method for cell in found.cells] == ["TB-DQN", "TF-DQN", "iS-DQN K=3", "iS-DQN K=9", "iS-DQN K=49"]
    report, compared = build(found, Options())
    assert compared.aucs["iS-DQN K=9"].point == pytest.approx(1)
    assert report.question == "Individual runs, not part of a study."
    assert table(report, "Commands").rows == (("isqn train dqn", "5"),)
    assert report.configs["CartPole-v1, TF-DQN, seed 0"] == (root / "free" / "config.toml").read_text()


def test_short_and_full_environment_ids_are_the_same_task(tmp_path):
    short = small_config("target-free").replace(env_id="MinAtar/Breakout")
    full = small_config("target-based").replace(env_id="MinAtar/Breakout-v1")
    assert collect(write_runs(tmp_path / "runs", ("a", short), ("b", full))).tasks == ("MinAtar/Breakout-v1",)


def test_runs_without_a_common_task_are_shown_task_by_task(tmp_path):
    other = SacConfig(total_timesteps=2_000, epoch_steps=1_000, learning_starts=500)
    runs = ("a", small_config("target-based")), ("b", other)
    report, compared = build(collect(write_runs(tmp_path / "runs", *runs)), Options())
    assert compared is None
    assert report.headline.columns == ("method", "CartPole-v1", "Pendulum-v1")
    assert report.headline.rows == (("TB-DQN", "35.0", ""), ("iS-SAC K=1", "", "35.0"))
    assert report.notes == (
        "The methods are shown task by task and not compared, because not all have runs on all tasks "
        "(CartPole-v1: TB-DQN; Pendulum-v1: iS-SAC K=1).",
    )
    assert_drawable(report)


def test_offline_runs_are_drawn_over_updates_from_zero(tmp_path):
    fields = {"num_updates": 2_000, "epoch_updates": 1_000, "env_id": "CartPole-v1", "hidden_sizes": (4,)}
    runs = [CqlConfig(**fields, scheme=name) for name in ("target-based", "target-free")]
    root = write_runs(tmp_path, *((run.scheme, run) for run in runs), epochs=(30, 40, 50))
    report = build_report(root)
    (curves,) = figure(report, "curves").charts
    assert curves.xlabel == "updates"
    assert curves.series["TB-CQL"].x.tolist() == [0, 1_000, 2_000]
    assert "evaluation return" in figure(report, "curves").caption
    write_runs(tmp_path, ("online", small_config("target-based")))
    with pytest.raises(UserError, match="learn from datasets and some by playing"):
        collect(root)


def test_runs_of_a_task_with_different_settings_are_different_methods(tmp_path):
    root = write_runs(
        tmp_path,
        *(("a", small_config("target-based")), ("b", small_config("target-based", learning_rate=0.5, loop="host"))),
        *(("c", small_config("target-based", task="Acrobot-v1", discount=0.9, experiment="other")),),
        *(("d", small_config("target-based", task="Acrobot-v1", discount=0.9, learning_rate=0.5)),),
    )
    found = collect(root)
    methods = {(cell.task, cell.method) for cell in found.cells}
    assert methods == {(t, m) for t in ("CartPole-v1", "Acrobot-v1") for m in ("TB-DQN, lr=0.001", "TB-DQN, lr=0.5")}


def test_settings_implied_by_label_and_task_are_not_in_the_method_name(tmp_path):
    """Each scheme has its own target update period on each task."""
    periods = {("target-based", "CartPole-v1"): 100, ("target-based", "Acrobot-v1"): 200}
    periods |= {("target-free", "CartPole-v1"): 300, ("target-free", "Acrobot-v1"): 400}
    runs = {(s, t): small_config(s, task=t, target_update_period=period) for (s, t), period in periods.items()}
    found = collect(write_runs(tmp_path, *((f"{s}-{t}", config) for (s, t), config in runs.items())))
    assert list(found.methods) == ["TB-DQN", "TF-DQN"]
    assert found.tasks == ("Acrobot-v1", "CartPole-v1")


def test_runs_that_differ_only_in_length_are_the_same_method(tmp_path):
    root = write_runs(
        tmp_path, ("a", small_config("target-based")), ("b", small_config("target-based", seed=1, epochs=1))
    )
    found = collect(root)
    assert [cell.method for cell in found.cells] == ["TB-DQN"]
    with pytest.raises(UserError, match="different numbers of epochs: 2, and fewer in CartPole-v1 TB-DQN seed 1"):
        build(found, Options())
    assert build(found, Options(missing="truncate"))[1].results.returns["TB-DQN"].tolist() == [[[30]], [[30]]]


def test_duplicate_runs_are_refused(tmp_path):
    write_runs(tmp_path, ("a", small_config("target-based")), ("b", small_config("target-based")))
    with pytest.raises(UserError, match=r"a and .*b are the same run twice: .* seed 0\. Report "):
        collect(tmp_path)


def test_a_saved_model_is_not_a_run(tmp_path):
    write_runs(tmp_path, ("a", small_config("target-based")))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.toml").write_text(to_toml(small_config("target-free")))
    assert [cell.method for cell in collect(tmp_path).cells] == ["TB-DQN"]


def test_a_run_without_a_summary_is_unfinished(tmp_path):
    write_runs(tmp_path, ("a", small_config("target-based")), ("b", small_config("target-based", seed=1)))
    (tmp_path / "b" / "summary.json").unlink()
    found = collect(tmp_path)
    assert (len(found.runs), found.num_unfinished, found.num_not_started) == (2, 1, 0)
    with pytest.raises(UserError, match=r"1 of 2 runs .*: CartPole-v1 TB-DQN seed 1;"):
        build(found, Options())


def test_random_play_on_an_unknown_task_is_measured_once(tmp_path, monkeypatch, capsys):
    requested = []
    monkeypatch.setattr("isqn.report.compare.random_return", lambda task, **_: requested.append(task) or 10.0)
    found = collect(write_runs(tmp_path, ("a", small_config("target-based", task="mine/New-v0"))))
    for _ in range(2):
        assert build(found, Options())[1].scores["TB-DQN"].tolist() == [[[0.8, 1.2]]]  # 10 is 0 and 35 is 1
    assert requested == ["mine/New-v0"]
    assert "playing mine/New-v0 at random" in capsys.readouterr().err


# -- files ---------------------------------------------------------------------------------------------------------


def test_results_csv_has_a_row_for_every_epoch_of_every_run(unfinished, tmp_path):
    write_returns_csv(tmp_path / "results.csv", collect(unfinished))
    assert (tmp_path / "results.csv").read_text() == (
        "study,task,protocol,method,seed,epoch,step,mean_return,finished\n"
        "mine,CartPole-v1,gymnasium,TB-DQN,0,0,1000,2,yes\n"
        "mine,CartPole-v1,gymnasium,TB-DQN,0,1,2000,4,yes\n"
        "mine,CartPole-v1,gymnasium,TB-DQN,0,2,3000,5,yes\n"
        "mine,CartPole-v1,gymnasium,TB-DQN,1,0,1000,3,yes\n"
        "mine,CartPole-v1,gymnasium,TB-DQN,1,1,2000,4,yes\n"
        "mine,CartPole-v1,gymnasium,TB-DQN,1,2,3000,5,yes\n"
        "mine,CartPole-v1,gymnasium,TB-DQN,2,0,1000,4,no\n"
        "mine,CartPole-v1,gymnasium,TF-DQN,0,0,1000,2,yes\n"
        "mine,CartPole-v1,gymnasium,TF-DQN,0,1,2000,4,yes\n"
        "mine,CartPole-v1,gymnasium,TF-DQN,0,2,3000,5,yes\n"
        "mine,CartPole-v1,gymnasium,TF-DQN,2,0,1000,4,yes\n"
        "mine,CartPole-v1,gymnasium,TF-DQN,2,1,2000,4,yes\n"
        "mine,CartPole-v1,gymnasium,TF-DQN,2,2,3000,5,yes\n"
    )


@pytest.fixture(scope="module")
def reported(four_seeds, tmp_path_factory):
    """A complete report, written as the command does."""
    out = tmp_path_factory.mktemp("out") / "report"
    return SimpleNamespace(folder=four_seeds, out=out, report=write(four_seeds, out, Options()))


@pytest.mark.parametrize("name", ["matplotlib", "plotly"])
def test_nothing_is_written_without_the_plotting_libraries(name, four_seeds, tmp_path, monkeypatch):
    monkeypatch.setattr("isqn.report.write.find_spec", lambda one: None if one == name else one)
    for make in (
        lambda: write(four_seeds, tmp_path, Options()),
        lambda: watch(four_seeds, tmp_path, Options(), None, 1),
    ):
        with pytest.raises(UserError, match=rf'^The report needs {name}: pip install "isqn\[report\]"'):
            make()
    assert not list(tmp_path.iterdir())


def test_all_files_are_written(reported):
    names = [f.name for f in reported.report.figures]
    assert names == ["auc", "curves", "profile", "improvement", "tasks", "parameters"]
    files = {path.relative_to(reported.out).as_posix() for path in reported.out.rglob("*") if path.is_file()}
    pictures = {f"figures/{name}.{kind}" for name in ("overview", *names) for kind in ("svg", "pdf", "png", "csv")}
    assert files == {"index.html", "results.csv", "scores.json", "headline.json", *pictures}
    assert read_score_dict(reported.out / "scores.json")["TF-DQN"].tolist() == [
        [[0.5, 1.5]],
        [[2.5, 7.5]],
        [[0.75, 2.25]],
        [[1.5, 4.5]],
    ]
    headline = json.loads((reported.out / "headline.json").read_text())
    assert [row["method"] for row in headline] == ["TB-DQN", "TF-DQN"]
    text = (reported.out / "index.html").read_text()
    for words in ("Which is better?", "Exact configurations", "study.toml", "Runs", "Energy"):
        assert words in text
    assert '"refresh":null' in text


def test_the_same_runs_give_the_same_bytes(reported, tmp_path):
    write(reported.folder, tmp_path, Options(), only=("auc", "curves"))
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4 + 2 * 4
    for file in files:
        assert (tmp_path / file).read_bytes() == (reported.out / file).read_bytes(), file


def test_stale_figures_are_removed_and_other_files_are_kept(tmp_path):
    folder = write_study(tmp_path / "s", make_study(TB, TF, seeds=(0, 1)), lambda *_: [1, 2])
    out, theirs = tmp_path / "out" / "figures", tmp_path / "out" / "figures" / "mine.csv"
    write(folder, tmp_path / "out", Options())
    theirs.write_text("of the user")
    shutil.copytree(out, tmp_path / "before")
    for file in list(out.glob("auc.*")):
        file.rename(file.with_stem("of-an-earlier-report"))
    write(folder, tmp_path / "out", Options(), only=("curves",))
    assert (out / "of-an-earlier-report.csv").exists()  # with --figure, no files are removed
    write(folder, tmp_path / "out", Options())
    assert {file.name for file in out.iterdir()} == {file.name for file in (tmp_path / "before").iterdir()}
    assert theirs.read_text() == "of the user"


def test_watch_updates_the_page_until_every_run_has_finished(tmp_path, monkeypatch):
    requested = make_study(TB, TF)
    begun = {("TB-DQN", 0): [1, 2], ("TB-DQN", 1): [1]}
    folder = write_study(tmp_path / "s", requested, lambda cell, seed: begun.get((cell.method, seed)))
    index, pages = tmp_path / "out" / "index.html", []

    def sleep(seconds: float) -> None:
        """Start all runs during the first sleep, and finish them during the second."""
        assert seconds == 5
        pages.append(index.read_text())
        for cell in requested.cells:
            for seed in requested.seeds:
                place = cell.folder(folder, seed)
                if not place.exists():
                    write_run(place, cell.config.replace(seed=seed), [1, 2], finished=False)
                elif len(pages) == 2:
                    record.write_summary(
                        place, {"status": "finished", "protocol": "gymnasium", "epoch_returns": [1, 2], "auc": 3}
                    )

    monkeypatch.setattr(time, "sleep", sleep)
    watch(folder, tmp_path / "out", Options(), None, 5)
    assert len(pages) == 2
    assert "Of 4 runs, unfinished: 1, not started: 2" in pages[0]
    assert "No seed has a run of every method on every task" in pages[0]
    assert "Of 4 runs, unfinished: 3, not started: 0" in pages[1]
    assert "Left out: seed 1," in pages[1]  # one of its runs has no complete epoch yet
    assert "reloads every 5 seconds" in pages[1]
    assert "unfinished:" not in index.read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html"}


# -- command line ----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_the_page(reported, tmp_path, capsys):
    assert main(["report", str(reported.folder), "-o", str(tmp_path), "--figure", "auc"]) == 0
    out, err = capsys.readouterr()
    header, *rows, finding, path = out.splitlines()
    question, legend, last = err.splitlines()
    assert question == "Which is better?"
    assert legend.startswith("TB is target-based, TF is target-free. Normalised AUC: area under the learning curve, ")
    assert last == "the report is written; open this page in a browser"
    assert header.split("  ")[0] == "method"
    assert re.fullmatch(r"TF-DQN has 1\.80 \[.+\] of the AUC of TB-DQN, with 0\.50 of its parameters: .+\.", finding)
    assert [row.split()[:2] for row in rows] == [["TB-DQN", "1.00"], ["TF-DQN", "1.80"]]
    assert path == str(tmp_path / "index.html")
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {"auc.svg", "auc.pdf", "auc.png", "auc.csv"}


def test_the_command_answers_in_json(reported, tmp_path, capsys):
    assert main(["report", str(reported.folder), "-o", str(tmp_path), "--figure", "auc", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["title"] == "mine"
    assert answer["result"][1]["method"] == "TF-DQN"
    assert answer["result"][1]["normalised AUC"]["point"] == pytest.approx(1.8)
    assert answer["page"] == str(tmp_path / "index.html")


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--missing", "dropp"], 2, "--missing is 'dropp'; did you mean drop?"),
        (["--figur", "auc"], 2, "`isqn report` has no flag --figur; did you mean --figure?"),
        (["--figure", "aucs"], 1, "--figure 'aucs' is not in this report; did you mean auc?"),
        (["--baseline", "TB-DQM"], 1, "The baseline 'TB-DQM' is not a method here; did you mean TB-DQN?"),
        (["--watch", "--every", "0"], 1, "--every is 0; it must be a number of seconds above 0."),
    ],
)
def test_a_wrong_flag_is_answered_in_one_sentence(four_seeds, tmp_path, capsys, words, code, sentence):
    assert main(["report", str(four_seeds), "-o", str(tmp_path / "out"), *words]) == code
    assert capsys.readouterr() == ("", f"isqn: {sentence}\n")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_runs_is_answered_in_one_sentence(four_seeds, unfinished, tmp_path, capsys):
    def refused(folder: Path) -> str:
        assert main(["report", str(folder), "-o", str(tmp_path / "out")]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    assert "There is no run in" in refused(tmp_path)
    assert f"did you mean {four_seeds}?" in refused(four_seeds.with_name("studi"))
    assert "is not a folder; give that of a study, or one with runs in it." in refused(four_seeds / "study.toml")
    assert "2 of 6 runs are missing, unfinished or without an episode: CartPole-v1 TB-DQN seed 2, " in refused(
        unfinished
    )
    (tmp_path / "study.toml").write_text("name = ")
    assert "study.toml is not valid TOML" in refused(tmp_path)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_written_is_refused(reported, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["report", str(reported.folder), "-o", str(tmp_path / "file"), "--figure", "auc"]) == 1
    assert capsys.readouterr().err.endswith("cannot be written (File exists); choose another --out.\n")
