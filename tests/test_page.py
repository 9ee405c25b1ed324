"""The HTML page, as text and in a browser. No visit may cause a console message, an error or a network request."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from playwright.sync_api import sync_playwright

from isqn.report import page
from isqn.report.charts import Chart, Figure, Report, Series, Table
from isqn.types import UserError

NAN = float("nan")
LABELS = ("TB-DQN", "TF-DQN", "iS-DQN K=1", "iS-DQN K=3", "iS-DQN K=9", "iS-DQN K=49")
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
BROWSER_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
LINES = ".scatterlayer path.js-line:not([style*='stroke-width: 0px'])"  # a band's outline has no width
TIMEOUT = 60_000  # milliseconds, long enough never to matter


def numbers(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def make(*charts: Chart, notes=(), headline=None, tables=(), configs=None, title="A report") -> Report:
    headline = headline or Table("Result", ("scheme", "score"), (("TB-DQN", "1.00"), ("TF-DQN", "0.62")))
    figures = (Figure("first", "First figure", "What is shown.", charts),) if charts else ()
    return Report(title, "Which one is better?", tuple(notes), headline, figures, tuple(tables), configs or {})


def small_report() -> Report:
    """Make two panels of lines and one of bars. Line j of panel i has the value 10 i + j + k at x = 100 k."""
    k = np.arange(12.0)

    def lines(i: int) -> Chart:
        series = {
            label: Series(10 * i + j + k, 10 * i + j + k - 0.5, 10 * i + j + k + 0.25, 100 * k)
            for j, label in enumerate(LABELS[:3])
        }
        return Chart("lines", series | {"human": Series(numbers(7))}, f"panel {i}", "steps", "return")

    bars = {
        label: Series(numbers(value), numbers(value - 0.2), numbers(value + 0.1))
        for label, value in zip((*LABELS[:3], "random"), (1.06, 43.21, -2, 12345.6), strict=True)
    }
    return make(lines(0), lines(1), Chart("bars", bars, "bars", ylabel="score", reference=1.5))


def big_report() -> Report:
    """Make a report of the largest expected size: six labels in fifteen panels, a table of sixty rows."""
    x = np.arange(100) * 500_000.0
    rng = np.random.default_rng(0)

    def task(i: int) -> Chart:
        runs = rng.normal(1, 0.1, (len(LABELS), 3, 100)).cumsum(axis=-1) * 10**i
        series = {
            label: Series(mean := seeds.mean(0), mean - 10**i, mean + 10**i, x, seeds)
            for label, seeds in zip(LABELS, runs, strict=True)
        }
        return Chart("lines", series, f"task {i}", "environment frames", "mean return of an epoch")

    table = Table("By task", ("task", *LABELS), tuple((f"task {i}", *["12,345.6 ± 78.9"] * 6) for i in range(60)))
    return make(
        *map(task, range(15)),
        notes=["2 of 450 runs are missing."],
        tables=[table],
        configs={f"run-{i}": 'scheme = "target-free"\n' * 20 for i in range(8)},
    )


def page_data(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def browser():
    executable = shutil.which("chromium")
    if executable is None:
        assert os.environ.get("ISQN_BROWSER") != "1", "ISQN_BROWSER=1 says that chromium is installed, and it is not"
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=executable, args=list(BROWSER_FLAGS))


@contextmanager
def visits(browser, folder):
    """Open reports as files; check at the end for console messages, errors and requests of other resources."""
    messages, requests, contexts = [], [], []
    path = folder / "index.html"

    def open_page(report: Report, device=DESKTOP, prepare=lambda page: None, refresh_seconds=None):
        path.write_text(page.render(report, refresh_seconds=refresh_seconds), encoding="utf-8")
        contexts.append(browser.new_context(**device))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(TIMEOUT)
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        prepare(tab)
        tab.goto(path.as_uri())
        wait_until_drawn(tab)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert messages == []
    assert set(requests) == {path.as_uri()}


@pytest.fixture
def visit(browser, tmp_path):
    """Return a function that opens a report."""
    with visits(browser, tmp_path) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def small_page(browser, tmp_path_factory):
    with visits(browser, tmp_path_factory.mktemp("small")) as open_page:
        yield open_page(small_report())


@pytest.fixture
def small_tab(small_page):
    """Return the small report in a tab that several tests share; each gets it as it was opened."""
    yield small_page
    for button in small_page.locator(".toggles button[aria-pressed=false]").all():
        button.click()
    small_page.mouse.move(0, 0)
    small_page.set_viewport_size(DESKTOP["viewport"])
    small_page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    wait_until_drawn(small_page)


def wait_until_drawn(tab) -> None:
    """Wait until every chart is up to date."""
    tab.wait_for_selector("main:not([aria-busy])")


def chart(tab, index: int):
    return tab.locator(".chart").nth(index)


def count_visible_traces(tab, label: str) -> list[int]:
    """Count the visible traces of a label in each chart."""
    return tab.evaluate(
        """(label) => [...document.querySelectorAll(".chart")].map(
            (place) => place.data.filter((trace) => trace.meta[0] === label && trace.visible === true).length)""",
        label,
    )


def count_drawn_lines(tab, index: int) -> int:
    """Count the lines that a chart shows on the screen."""
    return chart(tab, index).locator(LINES).count()


def axis_ranges(tab, index: int) -> list[list[float]]:
    return chart(tab, index).evaluate("(place) => [place.layout.xaxis.range, place.layout.yaxis.range]")


def screen_position(tab, index: int, x: float) -> tuple[float, float]:
    """Return the screen position of an x in a panel, at half its height."""
    chart(tab, index).scroll_into_view_if_needed()
    frame = chart(tab, index).locator(".nsewdrag").bounding_box()
    low, high = axis_ranges(tab, index)[0]
    return frame["x"] + frame["width"] * (x - low) / (high - low), frame["y"] + frame["height"] / 2


def readout(tab, head: str) -> list[str]:
    """Wait until the readout has a first line, because plotly delays hover events, and return all its lines."""
    tab.wait_for_selector(".readout:not([hidden])")
    tab.wait_for_function("(head) => document.querySelector('.readout p').textContent === head", arg=head)
    return [" ".join(line.split()) for line in tab.locator(".readout").inner_text().splitlines() if line.strip()]


def drag(tab, start: tuple[float, float], end: tuple[float, float]) -> None:
    tab.mouse.move(*start)
    tab.mouse.down()
    tab.mouse.move(*end, steps=5)
    tab.mouse.up()


@pytest.mark.parametrize(("device", "per_row"), [(DESKTOP, 3), (PHONE, 1)], ids=["desktop", "phone"])
def test_every_chart_is_drawn_and_the_page_does_not_scroll_sideways(visit, device, per_row):
    tab = visit(big_report(), device)
    assert tab.locator(".chart.js-plotly-plot").count() == 15
    assert [count_drawn_lines(tab, index) for index in range(15)] == [6] * 15
    assert count_visible_traces(tab, "iS-DQN K=9") == [2] * 15  # its line and its band; single seeds are hidden
    tops = [chart(tab, index).bounding_box()["y"] for index in range(15)]
    assert [tops.count(top) for top in sorted(set(tops))] == [per_row] * (15 // per_row)
    assert tab.evaluate("document.documentElement.scrollWidth") == device["viewport"]["width"]
    widths = tab.locator(".box").last.evaluate("(box) => [box.scrollWidth, box.clientWidth]")
    assert (widths[0] > widths[1]) == (per_row == 1)  # a wide table scrolls in its own box


def test_a_button_toggles_a_label_in_all_charts(small_tab):
    tab = small_tab
    button = tab.get_by_role("button", name="TF-DQN", exact=True)
    before = [count_drawn_lines(tab, index) for index in range(3)]
    assert before == [4, 4, 0]
    assert count_visible_traces(tab, "TF-DQN") == [2, 2, 2]  # line and band; bar and number
    others = count_visible_traces(tab, "TB-DQN")
    button.click()
    wait_until_drawn(tab)
    assert button.get_attribute("aria-pressed") == "false"
    assert count_visible_traces(tab, "TF-DQN") == [0, 0, 0]
    assert count_visible_traces(tab, "TB-DQN") == others
    assert [count_drawn_lines(tab, index) for index in range(3)] == [3, 3, 0]
    assert "TF-DQN" not in chart(tab, 2).text_content()
    button.click()
    wait_until_drawn(tab)
    assert button.get_attribute("aria-pressed") == "true"
    assert count_visible_traces(tab, "TF-DQN") == [2, 2, 2]
    assert [count_drawn_lines(tab, index) for index in range(3)] == before


def test_buttons_work_with_the_keyboard(small_tab):
    tab = small_tab
    tab.locator(".box").first.focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "TF-DQN"
    for key, expected in (("Space", [0, 0, 0]), ("Enter", [2, 2, 2])):
        tab.keyboard.press(key)
        wait_until_drawn(tab)
        assert count_visible_traces(tab, "TF-DQN") == expected


def test_buttons_exist_for_labels_of_lines_and_not_for_labels_of_bars_only(small_tab):
    tab = small_tab
    assert tab.locator(".toggles button").all_inner_texts() == [*LABELS[:3], "human"]
    tab.set_viewport_size({"width": 1280, "height": 300})
    tab.evaluate("document.querySelector('.chart').scrollIntoView({ block: 'center' })")
    assert tab.evaluate("scrollY") > 0
    assert tab.locator(".toggles").bounding_box()["y"] == 0  # the buttons are sticky


def test_single_seeds_are_hidden_only_behind_intervals(visit):
    x, seeds = np.arange(20.0), np.stack([np.arange(20.0), np.arange(20.0) + 2])
    mean = seeds.mean(0)
    both = {"TB-DQN": Series(mean, mean - 1, mean + 1, x, seeds), "TF-DQN": Series(mean, x=x, seeds=seeds)}
    tab = visit(make(Chart("lines", both)))
    assert (count_visible_traces(tab, "TB-DQN"), count_visible_traces(tab, "TF-DQN")) == ([2], [2])
    tab.get_by_role("button", name="single seeds").click()
    wait_until_drawn(tab)
    assert (count_visible_traces(tab, "TB-DQN"), count_visible_traces(tab, "TF-DQN")) == ([3], [2])
    tab.get_by_role("button", name="TB-DQN").click()
    wait_until_drawn(tab)
    assert (count_visible_traces(tab, "TB-DQN"), count_visible_traces(tab, "TF-DQN")) == ([0], [2])
    assert "single seeds" not in page.render(make(Chart("lines", {"TF-DQN": Series(mean, x=x, seeds=seeds)})))


def test_hovering_shows_the_values_of_all_labels_at_an_x(small_tab):
    """At x = 400 of panel 1, k = 4, the values are 10 + j + 4 and the level of 7."""
    tab = small_tab
    tab.mouse.move(*screen_position(tab, 1, 400))
    expected = ["TB-DQN 14 [13.5, 14.25]", "TF-DQN 15 [14.5, 15.25]", "iS-DQN K=1 16 [15.5, 16.25]", "human 7"]
    assert readout(tab, "steps: 400") == ["steps: 400", *expected]
    tab.mouse.move(*screen_position(tab, 1, 540))  # 500 is nearer than 600
    assert readout(tab, "steps: 500")[:2] == ["steps: 500", "TB-DQN 15 [14.5, 15.25]"]
    box, panel = tab.locator(".readout").bounding_box(), chart(tab, 1).bounding_box()
    assert box["y"] >= panel["y"] + panel["height"] or box["y"] + box["height"] <= panel["y"]  # outside of the panel
    tab.get_by_role("button", name="TF-DQN").click()
    tab.wait_for_selector(".readout", state="hidden")
    wait_until_drawn(tab)
    tab.mouse.move(*screen_position(tab, 1, 400))
    assert readout(tab, "steps: 400") == ["steps: 400", expected[0], *expected[2:]]
    x, y = screen_position(tab, 2, 0)
    tab.mouse.move(x + 5, y)
    assert readout(tab, "score") == [
        *("score", "TB-DQN 1.06 [0.86, 1.16]"),
        *("iS-DQN K=1 −2 [−2.2, −1.9]", "random 12,346 [12,345, 12,346]"),
    ]


def test_a_tap_shows_values_and_dragging_scrolls_on_touch_screens(visit):
    tab = visit(small_report(), PHONE)
    tab.touchscreen.tap(*screen_position(tab, 0, 300))
    assert readout(tab, "steps: 300")[:2] == ["steps: 300", "TB-DQN 3 [2.5, 3.25]"]
    assert chart(tab, 0).evaluate("(place) => place.layout.dragmode") is False
    tab.locator("h1").tap()
    tab.wait_for_selector(".readout", state="hidden")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


def test_labels_with_different_x_values_can_all_be_hovered(visit):
    every = {"TB-DQN": Series(np.arange(40.0), x=np.arange(40.0) * 100)}
    rare = {"TF-DQN": Series(np.arange(16.0), x=np.arange(16.0) * 250)}
    tab = visit(make(Chart("lines", every | rare, xlabel="steps")))
    for x, expected in ((1250, ["TF-DQN 5"]), (1300, ["TB-DQN 13"]), (1500, ["TB-DQN 15", "TF-DQN 6"])):
        tab.mouse.move(*screen_position(tab, 0, x))
        assert readout(tab, f"steps: {x:,}") == [f"steps: {x:,}", *expected]


def test_dragging_zooms_one_panel_and_a_double_click_zooms_out(small_tab):
    tab = small_tab
    before, beside = axis_ranges(tab, 0), axis_ranges(tab, 1)
    (left, y), (right, _) = screen_position(tab, 0, 200), screen_position(tab, 0, 700)
    drag(tab, (left, y), (right, y + 3))
    assert axis_ranges(tab, 0)[0] == pytest.approx([200, 700], abs=10)
    assert axis_ranges(tab, 1) == beside
    tab.mouse.dblclick((left + right) / 2, y)
    tab.wait_for_function(
        "() => document.querySelector('.chart').layout.xaxis.autorange === true"  # after plotly's animation
    )
    assert axis_ranges(tab, 0) == before


def test_bars_levels_and_references_are_drawn(visit):
    series = {"TB-DQN": Series(np.arange(12.0), x=np.arange(12.0)), "human": Series(numbers(3))}
    tab = visit(make(small_report().figures[0].charts[2], Chart("lines", series, reference=5.0)))
    assert chart(tab, 0).locator(".bars .point").count() == 4
    assert chart(tab, 0).locator("path.xerror").count() == 4
    values = [text.strip() for text in chart(tab, 0).locator(".textpoint text").all_text_contents()]
    assert values == ["1.06", "43.2", "−2", "12.3k"]
    ticks = sorted(chart(tab, 0).locator(".ytick text").all(), key=lambda tick: tick.bounding_box()["y"])
    assert [tick.text_content() for tick in ticks] == [*LABELS[:3], "random"]  # from top to bottom
    for index, (across, along) in enumerate((("width", "height"), ("height", "width"))):
        line, frame = chart(tab, index).locator(".shapelayer path"), chart(tab, index).locator(".nsewdrag")
        assert line.evaluate("(line) => getComputedStyle(line).strokeDasharray") == "5px, 4px"
        assert line.bounding_box()[across] < 2
        assert line.bounding_box()[along] == pytest.approx(frame.bounding_box()[along], abs=2)
    paths = chart(tab, 1).locator("path.js-line")
    assert paths.nth(1).bounding_box()["width"] == pytest.approx(paths.nth(0).bounding_box()["width"], abs=1)
    assert paths.nth(1).bounding_box()["height"] < 2


def test_every_bar_has_its_label(visit):
    labels = [f"iS-DQN K={k}, no LN, lr=0.001" for k in range(1, 14)]
    tab = visit(make(Chart("bars", {label: Series(numbers(1)) for label in labels})))
    assert chart(tab, 0).locator(".ytick text").count() == len(labels)


def test_gaps_are_null_and_split_lines_and_bands(visit):
    """Twelve points without the 4th, 6th and 7th are two lines, and the 5th alone, which has a marker."""
    y = np.arange(12.0)
    y[[3, 5, 6]] = NAN
    chart_of = Chart("lines", {"TB-DQN": Series(y, y - 1, y + 1, np.arange(12.0))})
    report = make(chart_of, Chart("lines", {"TB-DQN": Series(np.full(12, NAN), x=np.arange(12.0))}))
    text = page.render(report)
    (series,) = page_data(text)["charts"]["first/0"]["series"]
    assert series["y"] == [0, 1, 2, None, 4, None, None, 7, 8, 9, 10, 11]
    assert series["low"] == [-1, 0, 1, None, 3, None, None, 6, 7, 8, 9, 10]
    tab = visit(report)
    paths = [path.get_attribute("d") for path in chart(tab, 0).locator(LINES).all()]
    assert ["L" in path for path in paths] == [True, False, True]
    sizes = chart(tab, 0).evaluate("(place) => place.data.at(-1).marker.size")
    assert [i for i, size in enumerate(sizes) if size] == [4]
    assert chart(tab, 0).locator("path.js-fill").get_attribute("d").count("Z") == 3
    assert chart(tab, 1).locator(".annotation-text").text_content() == "no data"


HOSTILE = '</script><script>window.harm = 1</script><img src="https://x.test/" onerror="harm = 2"> & $x^2$ %{x} \'"'


def test_text_is_escaped_everywhere(visit):
    series = {HOSTILE: Series(np.arange(3.0), x=np.arange(3.0)), "<b>bold</b>": Series(numbers(1))}
    bars = {HOSTILE: Series(numbers(1)), "<a href='https://x.test/'>link</a>": Series(numbers(2))}
    charts = (Chart("lines", series, HOSTILE, HOSTILE, HOSTILE), Chart("bars", bars, HOSTILE, HOSTILE, HOSTILE))
    report = Report(
        *(
            HOSTILE,
            HOSTILE,
            (HOSTILE,),
            Table(HOSTILE, (HOSTILE,), ((HOSTILE,),), HOSTILE),
            (Figure(HOSTILE, HOSTILE, HOSTILE, charts),),
        ),
        configs={HOSTILE: HOSTILE},
    )
    tab = visit(report)
    assert tab.evaluate("window.harm") is None
    assert tab.locator("img, .chart a").count() == 0
    for place in ("h1", ".question", ".notes li", ".headline h2", "td", ".figure h2", ".panel h3 >> nth=0", "summary"):
        assert tab.locator(place).first.text_content() == HOSTILE, place
    assert tab.locator(".toggles button").all_inner_texts() == [HOSTILE, "<b>bold</b>"]
    assert tab.locator("pre").text_content() == HOSTILE
    for words in (chart(tab, 0).locator(".ytitle"), chart(tab, 1).locator(".ytick").last):
        assert words.text_content().replace(" ", "") == HOSTILE.replace(" ", "")  # wrapped at blanks
    tab.mouse.move(*screen_position(tab, 0, 1))
    assert readout(tab, f"{HOSTILE}: 1") == [f"{HOSTILE}: 1", f"{HOSTILE} 1", "<b>bold</b> 1"]
    tab.locator(".toggles button").first.click()
    wait_until_drawn(tab)
    assert count_visible_traces(tab, HOSTILE) == [0, 0]


def test_tables_right_align_columns_of_numbers(visit):
    rows = (
        ("TB-DQN", "1.00", "0.41 [0.35, 0.47]", "-2", "10 of 10", "a"),
        ("iS-DQN K=9", "12,345.6", "", "0.1", "9 of 10", "1"),
    )
    columns = ("scheme", "score", "interval", "change", "seeds", "mixed")
    tab = visit(make(headline=Table("Result", columns, rows, "A caption.")))
    assert tab.locator("th").all_inner_texts() == list(columns)
    assert [row.locator("td").all_inner_texts() for row in tab.locator("tbody tr").all()] == [list(row) for row in rows]
    sides = [cell.evaluate("(cell) => getComputedStyle(cell).textAlign") for cell in tab.locator("td").all()[:6]]
    assert sides == ["left", "right", "right", "right", "right", "left"]
    assert tab.locator("td").first.evaluate("(c) => getComputedStyle(c).fontVariantNumeric") == "tabular-nums"
    assert tab.locator(".headline .caption").inner_text() == "A caption."
    assert tab.locator(".notes, .toggles, .figure, details").count() == 0  # empty parts are not rendered


def test_a_page_that_reloads_keeps_its_state(visit):
    report = big_report()
    tab = visit(report, prepare=lambda tab: tab.clock.install(), refresh_seconds=3600)
    tab.get_by_role("button", name="TF-DQN").click()
    tab.get_by_role("button", name="single seeds").click()
    tab.locator("summary").nth(2).click()
    wait_until_drawn(tab)
    (left, y), (right, _) = screen_position(tab, 4, 1e7), screen_position(tab, 4, 3e7)
    drag(tab, (left, y), (right, y + 3))
    zoomed, height = axis_ranges(tab, 4), tab.evaluate("scrollY")
    assert height > 0
    tab.evaluate("window.old = true")
    with tab.expect_event("load"):
        tab.clock.fast_forward("01:00:00")
    wait_until_drawn(tab)
    assert tab.evaluate("window.old") is None
    assert tab.evaluate("scrollY") == height
    pressed = {b.inner_text(): b.get_attribute("aria-pressed") for b in tab.locator(".toggles button").all()}
    assert pressed == dict.fromkeys(LABELS, "true") | {"TF-DQN": "false", "single seeds": "true"}
    assert (count_visible_traces(tab, "TF-DQN"), count_visible_traces(tab, "TB-DQN")) == ([0] * 15, [3] * 15)
    assert axis_ranges(tab, 4) == zoomed
    assert [details.get_attribute("open") for details in tab.locator("details").all()][:4] == [None, None, "", None]


def test_a_page_without_refresh_does_not_reload(visit):
    tab = visit(small_report(), prepare=lambda tab: tab.clock.install())
    tab.evaluate("window.old = true")
    tab.clock.fast_forward("48:00:00")
    wait_until_drawn(tab)
    assert tab.evaluate("window.old") is True


def test_the_page_works_if_the_browser_forbids_storage(visit):
    forbid = "Object.defineProperty(window, 'sessionStorage', { get() { throw new Error('forbidden'); } });"
    tab = visit(
        small_report(), prepare=lambda tab: (tab.clock.install(), tab.add_init_script(forbid)), refresh_seconds=60
    )
    tab.get_by_role("button", name="TF-DQN").click()
    with tab.expect_event("load"):
        tab.clock.fast_forward("01:00")
    wait_until_drawn(tab)
    assert count_visible_traces(tab, "TF-DQN") == [2, 2, 2]


def test_the_printed_page_has_a_legend_and_panels_that_fit(small_tab):
    tab = small_tab
    widths = [chart(tab, index).locator(".main-svg").first.bounding_box()["width"] for index in range(3)]
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not tab.locator(".toggles").is_visible()
    assert tab.locator(".key li").all_inner_texts() == [*LABELS[:3], "human"]
    printed = [chart(tab, index).locator(".main-svg").first.bounding_box()["width"] for index in range(3)]
    assert printed == [330] * 3
    tab.emulate_media(media="screen")
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not tab.locator(".key").is_visible()
    assert [chart(tab, index).locator(".main-svg").first.bounding_box()["width"] for index in range(3)] == widths


def test_the_page_loads_nothing_from_the_network():
    from plotly.offline import get_plotlyjs

    text = page.render(big_report(), refresh_seconds=30)
    assert text.count(get_plotlyjs()) == 1
    ours = text.replace(get_plotlyjs(), "")
    assert re.findall(r"""\b(?:src|href|action|srcset)\s*=\s*["']?([^"'>\s]*)""", ours) == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", ours)
    assert "default-src 'none'" in ours
    assert "This page reloads every 30 seconds." in ours


def test_a_level_has_a_value_at_every_x_of_its_panel():
    line, level = (
        Series(numbers(1, 2, 3), x=numbers(10, 20, 40)),
        Series(numbers(5), numbers(4), numbers(6)),
    )
    charts = page_data(page.render(make(Chart("lines", {"a": line, "b": level}), Chart("lines", {"b": level}))))[
        "charts"
    ]
    _, across = charts["first/0"]["series"]
    assert (across["x"], across["y"], across["low"], across["high"]) == ([10, 20, 40], [5] * 3, [4] * 3, [6] * 3)
    (alone,) = charts["first/1"]["series"]
    assert (alone["x"], alone["y"]) == ([0.5, 1, 1.5], [5] * 3)


def test_a_line_of_one_epoch_is_not_a_level():
    epoch = Chart("lines", {"a": Series(numbers(5), numbers(4), numbers(6), numbers(100))})
    chart = page_data(page.render(make(epoch)))["charts"]["first/0"]
    (point,) = chart["series"]
    assert (point["x"], point["y"], point["level"], chart["ticks"]) == ([100], [5], False, [100])


def test_few_points_have_ticks_where_there_is_room():
    x = numbers(1, 3, 9, 10, 49)  # on a logarithmic axis 10 is too near to 9
    charts = {scale: Chart("lines", {"a": Series(x, x=x)}, log_x=scale) for scale in (True, False)}
    found = page_data(
        page.render(make(*charts.values(), Chart("lines", {"a": Series(np.zeros(11), x=np.arange(11.0))})))
    )["charts"]
    assert [found[f"first/{i}"]["ticks"] for i in range(3)] == [[1, 3, 9, 49], [1, 9, 49], None]


@pytest.mark.parametrize(
    ("chart_of", "sentence"),
    [
        (
            Chart("lines", {"a": Series(numbers(1, 2), x=numbers(1, 2, 3))}, "Pong"),
            "a of the chart 'Pong' has different",
        ),
        (
            Chart("lines", {"a": Series(numbers(1, 2), numbers(0), numbers(3))}, "Pong"),
            "different numbers of points and of x",
        ),
        (
            Chart("bars", {"a": Series(numbers(1, 2))}, "Pong"),
            "The bar a of the chart 'Pong' has 2 points; a bar has one.",
        ),
    ],
)
def test_series_of_inconsistent_lengths_are_refused(chart_of, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        page.render(make(chart_of))
