"""Figure files: coordinates, labels, layout, reproducible bytes, colours and dashes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isqn.report import figures, style
from isqn.report.charts import Chart, Figure, Series

PAPER = ("TB-DQN", "TF-DQN", "iS-DQN K=1", "iS-DQN K=3", "iS-DQN K=9", "iS-DQN K=49")
STEPS = np.array([1e6, 2e6, 3e6, 4e6])


def draw(*panels: Chart, remark: str = ""):
    """Draw a figure and lay it out, so that a layout warning of matplotlib fails the test."""
    drawn = figures.draw(Figure("name", "a title", "a caption", panels, remark))
    drawn.draw_without_rendering()
    assert drawn.get_suptitle() == "", "a paper has its own caption"
    return drawn


def bar(point: float, low: float | None = None, high: float | None = None) -> Series:
    low, high = (None if end is None else np.array([end]) for end in (low, high))
    return Series(np.array([point]), low, high)


def line(*point: float, **more: np.ndarray) -> Series:
    return Series(np.array(point), x=STEPS[: len(point)], **more)


def level(point: float, **more: np.ndarray) -> Series:
    return Series(np.array([point]), **more)


def heights(axis) -> list[float]:
    return [patch.get_height() for patch in axis.patches]


def texts_of(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def line_data(axis, colour: str) -> list[list[float]]:
    return [list(line.get_ydata()) for line in axis.get_lines() if line.get_color() == colour]


def outline(collection) -> np.ndarray:
    return collection.get_paths()[0].vertices


# -- bars


def test_bars_have_the_height_and_the_number_of_their_points():
    chart = Chart("bars", {"TB-DQN": bar(1.0), "TF-DQN": bar(0.724), "iS-DQN K=9": bar(1.061)})
    (axis,) = draw(chart).axes
    assert heights(axis) == [1.0, 0.724, 1.061]
    assert texts_of(axis) == ["1.00", "0.72", "1.06"]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["TB-DQN", "TF-DQN", "iS-DQN\nK=9"]
    assert axis.get_ylim()[0] == 0


def test_intervals_are_drawn_and_numbers_are_placed_beyond_them():
    """A percentile interval need not contain the point."""
    (axis,) = draw(Chart("bars", {"TB-DQN": bar(2.0, 1.5, 2.25), "TF-DQN": bar(1.0, 1.125, 1.5)})).axes
    assert line_data(axis, "black") == [[1.5, 2.25], [1.125, 1.5]]
    assert [text.xy for text in axis.texts] == [(0, 2.25), (1, 1.5)]
    assert axis.get_ylim()[1] > 2.25


def test_negative_bars_extend_down_from_zero():
    (axis,) = draw(Chart("bars", {"TB-DQN": bar(-20.0, -25.0, -10.0), "TF-DQN": bar(5.0)}, reference=-20.0)).axes
    assert heights(axis) == [-20.0, 5.0]
    assert [text.xy for text in axis.texts] == [(0, -25.0), (1, 5.0)]
    assert texts_of(axis) == ["−20.0", "5.0"]
    assert axis.get_ylim()[0] < -25


def test_a_nan_bar_leaves_an_empty_position():
    (axis,) = draw(Chart("bars", {"TB-DQN": bar(np.nan, np.nan, np.nan), "TF-DQN": bar(3.0)})).axes
    assert heights(axis) == [3.0]
    assert axis.patches[0].get_x() + axis.patches[0].get_width() / 2 == pytest.approx(1)
    assert len(axis.get_xticklabels()) == 2
    assert texts_of(axis) == ["3.00"]


@pytest.mark.parametrize(
    "labels",
    [
        PAPER,
        tuple(f"{label}{suffix}" for label in ("TB-Rainbow", "Meta iS-Rainbow K=9") for suffix in ("", ", bfloat16")),
        ("a", "an unbreakablyLongWordInTheLabel", "b"),
    ],
)
def test_labels_below_bars_do_not_overlap(labels):
    chart = Chart("bars", {label: bar(1.0) for label in labels})
    for axis in draw(chart, chart, chart).axes:
        boxes = [tick.get_window_extent() for tick in axis.get_xticklabels()]
        assert len(boxes) == len(labels)
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.00"),
        (0.0123, "0.0123"),
        (0.999, "1.00"),
        (9.996, "10.0"),
        (43.21, "43.2"),
        (432.1, "432"),
        (999.6, "1k"),
        (8_100_000, "8.1M"),
        (4_046_502, "4.05M"),
        (999_950, "1M"),
        (1.213e9, "1.21G"),
    ],
)
def test_numbers_on_bars_have_about_three_significant_digits(number, text):
    (axis,) = draw(Chart("bars", {"TB-DQN": bar(number)})).axes
    assert texts_of(axis) == [text]


# -- lines


def test_a_line_and_its_band_have_the_given_coordinates():
    series = line(1.0, 2.0, 4.0, 3.0, low=np.array([0.5, 1.0, 3.0, 2.0]), high=np.array([1.5, 3.0, 5.0, 4.0]))
    (axis,) = draw(Chart("lines", {"TB-DQN": series}, xlabel="frames")).axes
    (drawn,) = axis.get_lines()
    assert list(drawn.get_xdata()) == list(STEPS)
    assert list(drawn.get_ydata()) == [1.0, 2.0, 4.0, 3.0]
    corners = {tuple(corner) for corner in outline(axis.collections[0])}
    assert corners == {*zip(STEPS, series.low, strict=True), *zip(STEPS, series.high, strict=True)}
    assert axis.collections[0].get_alpha() == 0.2
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1M", "2M", "3M", "4M"]


def test_nan_is_a_gap_and_an_isolated_point_has_a_marker():
    point = np.arange(20.0)
    point[[3, 5, 6]] = np.nan
    (axis,) = draw(Chart("lines", {"TB-DQN": Series(point, x=np.arange(20.0))})).axes
    (drawn,) = axis.get_lines()
    assert np.array_equal(drawn.get_ydata(), point, equal_nan=True)
    assert np.flatnonzero(drawn.get_markevery()).tolist() == [4]


def test_a_level_is_a_horizontal_line_across_the_panel():
    series = {"TB-DQN": line(1.0, 2.0, 3.0), "TF-DQN": level(1.5, low=np.array([1.25]), high=np.array([1.75]))}
    (axis,) = draw(Chart("lines", series, log_x=True)).axes
    (across,) = (drawn for drawn in axis.get_lines() if drawn.get_color() == style.ORANGE)
    assert list(across.get_ydata()) == [1.5, 1.5]
    ends = axis.transAxes.inverted().transform(across.get_transform().transform(across.get_xydata()))
    assert ends[:, 0] == pytest.approx([0, 1])
    (band,) = axis.patches
    assert (band.get_y(), band.get_height()) == (1.25, 0.5)
    assert axis.get_xscale() == "log"
    assert axis.get_xlim()[0] > 5e5, "a level must not stretch the axis"


def test_single_seeds_are_drawn_as_thin_lines_without_an_interval():
    seeds = np.array([[1.0, 2.0], [3.0, 6.0]])
    (axis,) = draw(Chart("lines", {"TB-DQN": line(2.0, 4.0, seeds=seeds)})).axes
    *thin, mean = axis.get_lines()
    assert [list(drawn.get_ydata()) for drawn in thin] == [[1.0, 2.0], [3.0, 6.0]]
    assert list(mean.get_ydata()) == [2.0, 4.0]
    assert max(drawn.get_linewidth() for drawn in thin) < mean.get_linewidth()

    ends = {"low": np.array([1.0, 2.0]), "high": np.array([3.0, 6.0])}
    (axis,) = draw(Chart("lines", {"TB-DQN": line(2.0, 4.0, seeds=seeds, **ends)})).axes
    assert len(axis.get_lines()) == 1


@pytest.mark.parametrize("kind", ["bars", "lines"])
def test_the_reference_is_a_dashed_line(kind):
    series = {"bars": bar(2.0), "lines": line(1.0, 2.0)}[kind]
    (axis,) = draw(Chart(kind, {"TB-DQN": series}, reference=1.25)).axes
    assert line_data(axis, style.REFERENCE) == [[1.25, 1.25]]
    (axis,) = draw(Chart(kind, {"TB-DQN": series})).axes
    assert line_data(axis, style.REFERENCE) == []


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize(
    "x", [np.array([30, 100, 300, 1000, 3000, 8000, 30000]), np.array([0, 1, 2, 10]), np.linspace(0, 1e8, 40)]
)
def test_tick_labels_of_the_x_axis_do_not_overlap(x, log_x):
    chart = Chart("lines", {"TB-DQN": Series(np.sqrt(x), x=x)}, log_x=log_x)
    for count in (1, 5):
        axis = draw(*[chart] * count).axes[0]
        left, right = axis.get_xlim()
        ticks = zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
        boxes = [tick.get_window_extent() for place, tick in ticks if left <= place <= right]
        assert len(boxes) > 1
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


# -- panels and legend


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 3), (5, 5), (6, 3), (7, 4), (10, 5), (15, 5)])
def test_panels_form_even_rows_with_one_axis_label_each(count, columns):
    chart = Chart("lines", {"TB-DQN": line(1.0, 2.0)}, xlabel="frames", ylabel="return")
    axes = draw(*[chart] * count).axes
    assert len(axes) == count
    assert len({round(axis.get_position().x0, 3) for axis in axes}) == columns
    assert [axis.get_ylabel() for axis in axes] == ["return" if i % columns == 0 else "" for i in range(count)]
    assert [axis.get_xlabel() for axis in axes] == ["frames" if i + columns >= count else "" for i in range(count)]


def test_rows_have_fewer_panels_if_these_have_many_bars():
    drawn = draw(*[Chart("bars", {label: bar(1.0) for label in PAPER})] * 5)
    assert len({round(axis.get_position().x0, 3) for axis in drawn.axes}) == 3
    assert drawn.get_figwidth() <= figures.PAGE


def test_panels_of_different_quantities_have_their_own_y_labels():
    charts = [Chart("lines", {"TB-DQN": line(1.0, 2.0)}, title=name, ylabel=name) for name in ("rank", "churn")]
    axes = draw(*charts).axes
    assert [axis.get_ylabel() for axis in axes] == ["rank", "churn"]
    assert [axis.get_title() for axis in axes] == ["rank", "churn"]


def test_panels_with_the_same_reference_share_their_y_axis():
    low, high = ({"TB-DQN": line(0.0, top)} for top in (1.0, 9.0))
    first, second = draw(Chart("lines", low, reference=1.0), Chart("lines", high, reference=1.0)).axes
    assert first.get_ylim() == second.get_ylim()
    first, second = draw(
        Chart("bars", {"a": bar(1.0)}, reference=1.0), Chart("bars", {"a": bar(9.0)}, reference=1.0)
    ).axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > 9
    first, second = draw(Chart("lines", low), Chart("lines", high)).axes
    assert first.get_ylim()[1] < 2


def test_the_legend_keeps_the_order_of_labels_and_fits_in_the_figure():
    """Its rows are read from left to right. Labels of several panels appear once, and labels without data do not."""
    given = [*PAPER, "ES-DQN N=9", "Meta iS-DQN K=9"]
    first = Chart("lines", {label: line(1.0, 2.0) for label in given[:5]})
    second = Chart("lines", {label: line(1.0, 2.0) for label in given[3:]} | {"gone": line(np.nan, np.nan)})
    drawn = draw(first, second)
    (legend,) = drawn.legends
    texts = sorted(
        legend.get_texts(), key=lambda text: (-round(text.get_window_extent().y0), text.get_window_extent().x0)
    )
    assert [text.get_text() for text in texts] == given
    assert len({round(text.get_window_extent().y0) for text in texts}) > 1, (
        "a legend with one row does not test the order"
    )
    shown = {text.get_text(): line for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)}
    assert {label: line.get_color() for label, line in shown.items()} == style.assign_colours(given)
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= drawn.bbox.width
    assert box.y1 < min(axis.get_tightbbox().y0 for axis in drawn.axes)


@pytest.mark.parametrize("game", ["Pong", "SpaceInvaders", "A task with a very long name"])
@pytest.mark.parametrize("kind", ["bars", "lines"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_panel_titles_do_not_overlap_and_fit_in_the_figure(kind, count, game):
    chart = Chart(
        kind, {"TB-DQN": bar(1.0) if kind == "bars" else line(-500.0, 2.0)}, f"MinAtar/{game}-v1", ylabel="return"
    )
    drawn = draw(*[chart] * count)
    boxes = [axis.title.get_window_extent() for axis in drawn.axes]
    room = drawn.dpi * 0.03
    assert all(room < box.x0 and box.x1 < drawn.bbox.width - room for box in boxes)
    assert all(one.x1 + room < other.x0 for one, other in itertools.pairwise(boxes) if one.y0 == other.y0)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9, 13])
def test_the_legend_fits_in_the_figure(count):
    drawn = draw(Chart("lines", {f"pair {i}": line(1.0, 2.0) for i in range(count)}))
    box = drawn.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= drawn.bbox.width


@pytest.mark.parametrize("kinds", [["bars"], ["lines"], ["bars", "lines", "lines"]], ids=len)
def test_the_remark_is_below_everything_and_fits_in_the_figure(kinds):
    remark = "Left out: seeds 1-2, because 2 of 6 runs are missing. All runs are cut to the first 1 of 3 epochs."
    panels = [Chart(kind, {"TB-DQN": bar(1.0) if kind == "bars" else line(1.0, 2.0)}, xlabel="steps") for kind in kinds]
    drawn = draw(*panels, remark=remark)
    (below,) = (text for text in drawn.texts if text.get_text().startswith("Left out"))
    assert below.get_text().replace("\n", " ") == remark
    box = below.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= drawn.bbox.width
    assert box.y0 >= 0
    for above in (*drawn.legends, *drawn.axes):
        assert above.get_tightbbox().y0 >= box.y1


def test_a_label_has_the_same_style_in_all_figures_of_a_report():
    all_labels = ["Meta TB-DQN", "Meta iS-DQN K=9", "TB-DQN", "TB-DQN, LN"]
    figure = Figure("x", "", "", (Chart("lines", {label: line(1.0, 2.0) for label in ("TB-DQN, LN", all_labels[1])}),))
    alone, together = (figures.draw(figure, labels).legends[0].get_lines() for labels in ((), all_labels))
    assert [line.get_color() for line in alone] == [style.BLACK, style.OTHER_COLOURS[0]]
    assert [line.get_color() for line in together] == [style.BLACK, style.OTHER_COLOURS[1]]
    assert together[0].get_linestyle() == "--"


def test_bars_have_no_legend():
    assert draw(Chart("bars", {label: bar(1.0) for label in PAPER})).legends == []


@pytest.mark.parametrize("kind", ["bars", "lines"])
@pytest.mark.parametrize("log_x", [False, True])
def test_empty_panels_say_no_data(kind, log_x):
    nothing = {"bars": bar(np.nan), "lines": line(np.nan, np.nan)}[kind]
    for series in ({}, {"TB-DQN": nothing}):
        (axis,) = draw(Chart(kind, series, log_x=log_x)).axes
        assert "no data" in texts_of(axis)


def test_a_line_of_one_epoch_is_a_marker_with_an_interval():
    series = {"TB-DQN": line(2.0, low=np.array([1.0]), high=np.array([3.0]))}
    (axis,) = draw(Chart("lines", series)).axes
    (drawn,) = axis.get_lines()
    assert (list(drawn.get_xdata()), list(drawn.get_ydata()), drawn.get_marker()) == ([1e6], [2.0], "o")
    (interval,) = axis.collections[-1].get_segments()
    assert interval.tolist() == [[1e6, 1.0], [1e6, 3.0]]


def test_a_panel_of_levels_alone_can_be_drawn():
    (axis,) = draw(Chart("lines", {"TF-DQN": level(2.0)}, log_x=True)).axes
    assert line_data(axis, style.ORANGE) == [[2.0, 2.0]]
    assert texts_of(axis) == []


# -- files


def test_the_same_numbers_give_the_same_bytes(tmp_path, monkeypatch):
    """Neither the date nor the user's own settings of matplotlib change the files."""
    bars = Chart("bars", {label: bar(1.0, 0.9, 1.1) for label in (*PAPER, "TB-DQN, LN")}, reference=1.0)
    lines = Chart("lines", {"TB-DQN": line(1.0, 3.0, 2.0), "TF-DQN": level(1.0)}, xlabel="frames")
    figure = Figure("auc", "A title", "a caption", (bars, lines))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    first = figures.write(figure, tmp_path / "new" / "first")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "svg.hashsalt": None, "pdf.fonttype": 3}):
        second = figures.write(figure, tmp_path / "second")
        assert matplotlib.rcParams["font.size"] == 30
    assert first == [tmp_path / "new" / "first" / f"auc.{suffix}" for suffix in ("svg", "pdf", "png")]
    heads = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes().startswith(heads[one.suffix])
        assert one.read_bytes() == other.read_bytes(), one.suffix


def test_importing_does_not_load_matplotlib():
    code = "import sys, isqn.report.figures; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_dollar_sign_in_a_name_is_not_mathematics(tmp_path):
    figures.write(Figure("a", "$x^{", "", (Chart("bars", {"a $x^{ b$": Series(np.ones(1))}, "$_$"),)), tmp_path)
    assert "$" in (tmp_path / "a.svg").read_text()


# -- colours and dashes


def test_schemes_of_the_paper_have_fixed_colours():
    assert style.assign_colours([*PAPER, "ES-DQN N=9"]) == {
        "TB-DQN": "#000000",
        "TF-DQN": "#E69F00",
        "iS-DQN K=1": "#56B4E9",
        "iS-DQN K=3": "#0072B2",
        "iS-DQN K=9": "#009E73",
        "iS-DQN K=49": "#CC79A7",
        "ES-DQN N=9": "#D55E00",
    }
    assert {dash.plotly for _, dash in style.assign_styles(PAPER).values()} == {"solid"}
    assert style.assign_colours(["iS-CQL K=9"]) == {"iS-CQL K=9": "#009E73"}


# Matrices on linear RGB that simulate the two common kinds of colour blindness (Machado et al. 2009, severity 1).
COLOUR_VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def to_lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """Convert an sRGB colour (IEC 61966-2-1, white D65) to CIE 1976 L*a*b* as seen with a kind of colour vision."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(vision @ linear, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", COLOUR_VISION)
def test_colour_blind_readers_can_distinguish_the_schemes(vision):
    """A distance of 2 is just noticeable; red and green of equal lightness would be near 0 for some readers."""
    colours = style.assign_colours([*PAPER, "ES-DQN N=9", "Meta iS-DQN K=9", "i-DQN K=9"]).values()
    for one, other in itertools.combinations(colours, 2):
        assert np.linalg.norm(to_lab(one, COLOUR_VISION[vision]) - to_lab(other, COLOUR_VISION[vision])) > 15, (
            one,
            other,
        )


def test_a_suffix_changes_the_dash_and_keeps_the_colour():
    labels = ["TB-DQN", "TB-DQN, LN", "iS-DQN K=9, LN", "Meta iS-DQN K=9", "Meta iS-DQN K=9, LN", "TB-DQN, bfloat16"]
    styles = style.assign_styles(labels)
    colours = {label: colour for label, (colour, _) in styles.items()}
    assert colours["TB-DQN"] == colours["TB-DQN, LN"] == colours["TB-DQN, bfloat16"] == style.BLACK
    assert colours["iS-DQN K=9, LN"] == style.GREEN
    assert colours["Meta iS-DQN K=9"] == colours["Meta iS-DQN K=9, LN"] not in (style.BLACK, style.GREEN)
    assert [dash.plotly for _, dash in styles.values()] == ["solid", "dash", "dash", "solid", "dash", "dot"]
    assert style.assign_styles(["TB-DQN", "TB-CQL"])["TB-CQL"][1].plotly == "dash"


def test_numbered_labels_go_from_dark_to_light():
    labels = [f"pair {i}" for i in (10, 9, 1, 2, 3)]
    colours = style.assign_colours(labels)
    lightness = [to_lab(colours[f"pair {i}"], np.eye(3))[0] for i in (1, 2, 3, 9, 10)]
    assert lightness == sorted(lightness)
    assert len(set(lightness)) == 5
    assert list(colours) == labels


def test_a_sweep_of_one_scheme_goes_from_dark_to_light():
    swept = [f"TB-DQN, T={period}" for period in (1000, 40, 200)]
    colours = style.assign_colours([*swept, "TB-DQN", "TB-DQN, LN", "iS-DQN K=9, T=40", "iS-DQN K=9, T=200"])
    lightness = [to_lab(colours[f"TB-DQN, T={period}"], np.eye(3))[0] for period in (40, 200, 1000)]
    assert lightness[0] + 15 < lightness[1] < lightness[2] - 15
    assert colours["TB-DQN"] == colours["TB-DQN, LN"] == style.BLACK
    assert colours["iS-DQN K=9, T=40"] == colours["iS-DQN K=9, T=200"] == style.GREEN, (
        "two values differ only in their dash"
    )
    rates = style.assign_colours(["TB-DQN, lr=1e-05", "TB-DQN, lr=0.0001", "TB-DQN, lr=0.001"]).values()
    lightness = [to_lab(colour, np.eye(3))[0] for colour in rates]
    assert lightness[0] < lightness[1] < lightness[2]
    assert set(style.assign_colours([f"TB-DQN{norm}, bfloat16" for norm in ("", ", LN", ", BN")]).values()) == {
        style.BLACK
    }


def test_colours_of_other_k_are_interpolated():
    red, green, blue = (int(style.assign_colours(["iS-DQN K=5"])["iS-DQN K=5"][i : i + 2], 16) for i in (1, 3, 5))
    assert red == 0
    assert 0x72 < green < 0x9E
    assert 0x73 < blue < 0xB2


LABELS = st.builds(
    lambda name, suffix: name + suffix,
    st.one_of(
        st.sampled_from(["TB-DQN", "TB-CQL", "TF-DQN", "iS-DQN", "Meta TB-DQN", "Breakout", "", "K=3", "i-DQN K=3"]),
        st.builds(
            "{}{}".format, st.sampled_from(["iS-DQN K=", "ES-DQN N=", "pair ", "Meta iS-DQN K="]), st.integers(1, 2000)
        ),
        st.text(max_size=3),
    ),
    st.sampled_from(["", "", ", LN", ", bfloat16", ", LN, bfloat16", ", a", ", T=1", ", T=2", ", T=30"]),
)


@settings(max_examples=200)
@given(st.lists(LABELS, max_size=60))
def test_no_two_labels_share_colour_and_dash(labels):
    styles = style.assign_styles(labels)
    assert styles.keys() == set(labels)
    for name in ("matplotlib", "plotly"):
        assert len({(colour, getattr(dash, name)) for colour, dash in styles.values()}) == len(styles)
