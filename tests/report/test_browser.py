"""The report in a real browser: what is drawn, what moves, and that nothing leaves the page."""

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import chromium
import numpy as np
import pytest
from chromium import Tab
from colours import contrast, luminance
from points import FULL, HOSTILE, STEPS, made_point, made_points
from waiting import wait_until

from alight.evaluation import ORACLE, SINGLE_EXIT, Point, area_under_curve, read_points
from alight.report import Examples, ReportedNetwork, SampleWalk, data_address, write_report

FIGURES = [
    "Accuracy against cost",
    "Share of samples per exit, planned and observed",
    "Accuracy against cost of all methods",
    "Spent against allowed budget",
    "Spent minus allowed budget",
    "Error rate of each exit alone on small",
]
MOVING = ("accuracy", "compare", "spending", "overspending")  # figures through which the budget's line passes
SWITCHED = MOVING[1:]  # and in which methods are switched on and off


class Plan:
    """A plan as the page reads it."""

    pays, throughput, full_throughput, accuracy, full_accuracy = True, 1500.0, 1000.0, 0.79, 0.8
    batch_size, open_exits, reason = 64, (0, 2), "Exits pay."


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    browser = chromium.found()
    if browser is None:
        pytest.skip("no browser: install chromium or name one in the environment variable CHROMIUM")
    with chromium.opened(browser, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def fresh(tab: Tab) -> Tab:
    tab.console.clear()
    tab.requests.clear()
    tab.resize(1200)
    tab.prefer("light")
    return tab


def made_examples() -> Examples:
    """Four images, each a grey of its own, which leave later the more is allowed."""
    images = tuple(data_address(np.full((8, 8), 60 * shade, np.uint8)) for shade in range(4))
    walks = (
        SampleWalk("eero", 0.2 * FULL, exits=(0, 0, 0, 2), answers=("a", "a", "b", "b")),
        SampleWalk("eero", 0.8 * FULL, exits=(0, 2, 2, 2), answers=("a", "b", "b", "b")),
    )
    return Examples(images, labels=("a", "b", "b", "b"), walks=walks)


@pytest.fixture
def shown(fresh: Tab, tmp_path: Path) -> Tab:
    """A page with everything, open at 1200 pixels."""
    points = made_points()
    names = {"exits": ["layer1", "layer2", "layer3"], "classes": "zero one two three four five six seven".split()}
    network = ReportedNetwork(points, **names, examples=made_examples(), plan=Plan())
    other = [replace(each, full_cost=2.0, budget=each.budget / 6e8, mean_cost=each.mean_cost / 6e8, unit="ms")
             for each in points if each.method != "patience"]  # fmt: skip
    fresh.open(write_report({"small": network, "large": other}, tmp_path / "report.html", title="Drawn"))
    return fresh


def set_slider(tab: Tab, stop: int) -> None:
    tab.ask(f"budget.value = {stop}; budget.dispatchEvent(new Event('input', {{bubbles: true}}))")


def line_of(tab: Tab, figure: str) -> float:
    return float(tab.ask(f"document.querySelector('#{figure} .budget-line line').getAttribute('x1')"))


def table_of(tab: Tab, table: str) -> list[list[str]]:
    """What the cells say, without the small print."""
    script = f"""[...document.querySelectorAll('#{table} tbody tr')].map((row) => [...row.children].map((cell) => {{
        const copy = cell.cloneNode(true);
        copy.querySelectorAll('small').forEach((each) => each.remove());
        return copy.textContent;
    }}))"""
    return list(tab.ask(script))


def csv_of(tab: Tab, link: str) -> list[dict[str, str]]:
    kind, _, content = str(tab.ask(f"document.getElementById('{link}').href")).partition(",")
    assert kind == "data:text/csv;charset=utf-8"
    return list(csv.DictReader(io.StringIO(unquote(content)), strict=True))


def test_every_figure_is_drawn_without_a_word_on_the_console_or_a_request(shown: Tab) -> None:
    labels = shown.ask("[...document.querySelectorAll('svg[role=img]')].map((each) => each.ariaLabel)")
    assert [label.partition(":")[0] for label in labels] == FIGURES
    assert len(shown.texts("#switches input")) == 6  # four methods and two references
    assert shown.console == []
    assert {url.partition(":")[0] for url in shown.requests} == {"file", "data"}
    assert sum(url.startswith("file:") for url in shown.requests) == 1


def test_the_slider_moves_the_line_through_all_curves_and_the_numbers_follow(shown: Tab) -> None:
    points = {round(each.budget / FULL, 9): each for each in made_points() if each.method == "eero"}
    stops = sorted({*STEPS, 0.5})  # one method has a single budget, between the others'
    assert int(shown.ask("budget.max")) == len(stops) - 1
    places: dict[str, list[float]] = {figure: [] for figure in MOVING}
    for stop, allowed in enumerate(stops):
        set_slider(shown, stop)
        for figure, seen in places.items():
            seen.append(line_of(shown, figure))
        assert shown.text("#allowed").startswith(f"{100 * allowed:g}% of the full network")
        assert shown.ask("budget.ariaValueText ?? budget.getAttribute('aria-valuetext')").startswith(
            f"{100 * allowed:g}%"
        )
        if allowed not in points:
            continue
        point = points[allowed]
        assert f"accuracy {point.accuracy:.1%}, {point.mean_cost / FULL:.1%} spent" in shown.text("#chosen")
        lost = f"{100 * point.worst_class_loss:.1f}"
        worst = f"Of all classes, seven loses most against the last exit: {lost} points, with {90 * allowed:.1f}% spent"
        assert worst in shown.text("#chosen")
        assert f"seven: −{lost}" in shown.texts("#readout small")
        (row,) = [each for each in table_of(shown, "readout") if each[0] == "eero"]
        assert row[1:] == [
            f"{point.accuracy:.1%}",
            f"{100 * (point.accuracy - 0.8):+.1f}".replace("-", "−"),
            f"{point.mean_cost / FULL:.1%}",
            f"{point.mean_cost / point.budget:.1%}",
        ]
        assert table_of(shown, "exits") == [
            [
                f"layer{index + 1}",
                f"{cost}%",
                {math.inf: "nobody", -math.inf: "everyone"}.get(threshold, f"{threshold:g}"),
                f"{rate:.1%}",
                f"{share:.1%}",
            ]
            for index, (cost, threshold, rate, share) in enumerate(
                zip((20, 55, 112.5), point.thresholds, point.exit_rates, point.exit_shares, strict=True)
            )
        ]
        assert shown.text("#guarantees") == point.guarantee
        assert shown.texts("#numbers .number") == [
            f"{point.accuracy:.1%}",
            f"{100 * abs(0.8 - point.accuracy):.1f} points",
            f"{point.mean_cost / FULL:.1%} of full cost",
        ]
        assert shown.texts("#line h3") == ["layer1", "layer2", "layer3"]
        assert shown.texts("#line .leave") == [f"{share:.1%} leave" for share in point.exit_shares]
        assert point.rule in shown.text("#rule")
    for seen in places.values():
        assert seen == sorted(set(seen))  # to the right with every step
        assert seen[1] - seen[0] == pytest.approx(2 * (seen[2] - seen[1]), abs=0.1)  # 20 %, 40 %, 50 %: to scale
    assert shown.console == []


def test_rings_stand_on_the_curves_where_the_methods_end_up(shown: Tab) -> None:
    set_slider(shown, 0)
    script = """[...document.querySelectorAll('#spending .budget-line circle')].map((each) =>
        [each.getAttribute('cx'), each.getAttribute('cy')].map(Number))"""
    rings = shown.ask(script)
    assert len(rings) == 4  # eero, patience, the hostile one and the oracle; the bare one has no such budget
    assert {round(across, 3) for across, _ in rings} == {round(line_of(shown, "spending"), 3)}


def test_the_slider_obeys_the_keyboard(shown: Tab) -> None:
    set_slider(shown, 2)
    before = line_of(shown, "accuracy")
    shown.press("ArrowRight", "#budget")
    assert line_of(shown, "accuracy") > before
    shown.press("Home", "#budget")
    assert shown.text("#allowed").startswith("20% of the full network · 240 MFLOPs")
    shown.press("End", "#budget")
    assert shown.text("#allowed").startswith("100% of the full network · 1.2 GFLOPs")


def test_methods_are_switched_off_and_on_in_all_figures(shown: Tab) -> None:
    def curves() -> list[int]:
        return [int(shown.ask(f"document.querySelectorAll('#{figure} .series.m0').length")) for figure in SWITCHED]

    assert min(curves()) > 0
    shown.ask("document.querySelector('#switches input[value=eero]').click()")
    assert curves() == [0, 0, 0]
    assert "eero" not in [row[0] for row in table_of(shown, "readout")]
    assert "eero" not in {row["method"] for row in csv_of(shown, "compare-csv")}
    assert "eero" in {row["method"] for row in csv_of(shown, "accuracy-csv")}  # the chosen one stays
    shown.press(" ", "#switches input[value=eero]")
    assert min(curves()) > 0
    shown.ask("none.click()")
    assert shown.texts("#compare .note, #spending .note, #overspending .note") == ["No method is switched on."] * 3
    set_slider(shown, 1)
    shown.ask("all.click()")
    assert len(table_of(shown, "readout")) == 5
    assert shown.console == []


def test_a_method_is_chosen_by_its_name_or_from_the_list(shown: Tab) -> None:
    shown.press("Enter", "#readout button[data-method=patience]")
    assert shown.text("#chosen").startswith("patience with")
    assert shown.ask("document.activeElement.dataset.method") == "patience"
    assert shown.ask("method.value") == "patience"
    shown.ask(f"method.value = {json.dumps(HOSTILE)}; method.dispatchEvent(new Event('change', {{bubbles: true}}))")
    assert shown.text("#chosen").startswith(HOSTILE)
    assert shown.text("#shares .note") == "This point does not say how many samples left at each exit."
    assert shown.text("#guarantees summary").startswith("No guarantee is recorded for this policy")
    assert shown.ask("document.getElementById('line-section').hidden")
    assert shown.console == []


def test_several_networks_share_a_page(shown: Tab) -> None:
    assert shown.ask("document.getElementById('network-field').hidden") is False
    shown.ask("network.value = 1; network.dispatchEvent(new Event('change', {bubbles: true}))")
    assert shown.text("#facts").startswith("large")
    assert "Of all classes, class 7 loses most" in shown.text("#chosen")  # it has no names
    assert shown.text("#allowed").endswith(" ms")
    assert "patience" not in [row[0] for row in table_of(shown, "readout")]
    assert shown.ask("document.getElementById('plan-section').hidden")
    assert shown.texts("#line img") == []
    assert {row["unit"] for row in csv_of(shown, "download")} == {"ms"}
    assert shown.console == []


def test_examples_stand_at_the_exit_where_they_left(shown: Tab) -> None:
    script = "[...document.querySelectorAll('#line .samples')].map((row) => row.querySelectorAll('img').length)"
    set_slider(shown, 0)
    assert shown.ask(script) == [3, 0, 1]
    assert shown.ask("document.querySelector('#line .wrong img').alt") == "a, wrong: it is b"
    assert shown.text("#line-how") == "Test images under eero at 20%; red: wrong answer."
    assert [row["exit"] for row in csv_of(shown, "examples-csv")] == ["0", "0", "0", "2"]
    set_slider(shown, 5)
    assert shown.ask(script) == [1, 0, 3]
    assert shown.ask("document.querySelectorAll('#line .wrong').length") == 0
    assert shown.text("#line-how") == "Test images under eero at 80%."
    assert shown.ask("[...document.querySelectorAll('#line img')].every((image) => image.naturalWidth === 8)")


def test_a_plan_stands_beside_the_full_network(shown: Tab) -> None:
    assert shown.text("#plan-title") == "The plan: early exit is faster here"
    assert table_of(shown, "plan") == [
        ["samples per second", "1,000", "1,500"],
        ["speed-up", "1", "1.50"],
        ["accuracy", "80.0%", "79.0%"],
    ]
    assert "batches of 64" in shown.text("#plan-how")
    assert "layer1, layer3" in shown.text("#plan-how")
    assert [row["samples_per_second"] for row in csv_of(shown, "plan-csv")] == ["1000", "1500"]


def test_the_data_behind_each_figure_are_the_points(shown: Tab, tmp_path: Path) -> None:
    set_slider(shown, 1)
    points = made_points()
    (tmp_path / "points.csv").write_text(
        unquote(shown.ask("download.href").partition(",")[2]), encoding="utf-8", newline=""
    )
    assert list(map(repr, read_points(tmp_path / "points.csv"))) == list(map(repr, points))  # repr: a NaN equals no NaN

    def numbers(rows: list[dict[str, str]], *names: str) -> list[tuple[Any, ...]]:
        return sorted((row["method"], *(float(row[name]) for name in names)) for row in rows)

    names = ("budget", "accuracy", "mean_cost")
    drawn = sorted((each.method, *(getattr(each, name) for name in names)) for each in points)
    assert numbers(csv_of(shown, "compare-csv"), *names) == drawn
    opening = [row for row in drawn if row[0] in ("eero", SINGLE_EXIT)]
    assert numbers(csv_of(shown, "accuracy-csv"), *names) == opening
    assert numbers(csv_of(shown, "spending-csv"), *names) == [row for row in drawn if row[0] != SINGLE_EXIT]
    assert numbers(csv_of(shown, "risk-csv"), *names) == [row for row in drawn if row[0] == SINGLE_EXIT]
    assert {row["method"] for row in csv_of(shown, "readout-csv")} == {"eero", "patience", HOSTILE, ORACLE, "bare"}
    (eero,) = [each for each in points if each.method == "eero" and each.budget == 0.4 * FULL]
    exits = csv_of(shown, "exits-csv")
    assert tuple(float(row["cost"]) for row in exits) == eero.exit_costs
    assert tuple(float(row["threshold"]) for row in exits) == eero.thresholds
    assert tuple(float(row["planned"]) for row in exits) == eero.exit_rates
    assert tuple(float(row["observed"]) for row in exits) == eero.exit_shares
    table = {(row["method"], float(row["spent_share_of_full"])): row for row in csv_of(shown, "table-csv")}
    assert float(table["patience", 0.5]["accuracy"]) == pytest.approx(0.6)


def test_a_click_on_a_link_gives_the_file(shown: Tab, tmp_path: Path) -> None:
    shown.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "got"))
    wanted = unquote(shown.ask("document.getElementById('exits-csv').href").partition(",")[2])
    shown.ask("document.getElementById('exits-csv').click()")
    target = tmp_path / "got" / "drawn-small-exits.csv"
    wait_until(target.exists)
    assert target.read_text(encoding="utf-8") == wanted


@pytest.mark.parametrize("width", [375, 768, 1440])
def test_the_page_is_readable_on_narrow_and_wide_screens(shown: Tab, width: int) -> None:
    shown.resize(width)
    shown.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert shown.ask("document.documentElement.scrollWidth") <= width
    assert shown.ask("[...document.querySelectorAll('figure svg')].every((each) => each.clientWidth <= innerWidth)")
    smallest = """Math.min(...[...document.querySelectorAll('main *')]
        .filter((each) => each.textContent.trim() && each.getClientRects().length)
        .map((each) => parseFloat(getComputedStyle(each).fontSize)))"""
    assert shown.ask(smallest) >= 11
    spread = shown.ask("[...document.querySelectorAll('figure svg[role=img]')].map((each) => each.clientWidth)")
    assert min(spread) >= 240
    for table in ("readout", "exits"):
        assert shown.ask(f"{table}.scrollWidth <= {table}.parentElement.clientWidth"), table
    assert shown.ask("Math.max(...[...exits.rows].map((row) => row.clientHeight))") < 40  # "layer1" stays a word


def test_the_page_is_light_or_dark_as_the_system_or_the_reader_wants_it(shown: Tab) -> None:
    def tones() -> list[float]:
        names = ("backgroundColor", "color")
        return [luminance(shown.ask(f"getComputedStyle(document.body).{name}")) for name in names]

    light = tones()
    shown.prefer("dark")
    dark = tones()
    assert contrast(*light) >= 7
    assert contrast(*dark) >= 7
    assert light[0] > 0.9
    assert dark[0] < 0.05
    for expected in (light, dark, dark):  # light, dark, as the system, which is dark
        shown.press("Enter", "#theme")
        assert tones() == expected
    for scheme in ("light", "dark"):
        shown.prefer(scheme)
        colors = ["getComputedStyle(facts).color", "getComputedStyle(document.querySelector('.how')).color"]
        paper = tones()[0]
        assert min(contrast(luminance(shown.ask(color)), paper) for color in colors) >= 4.5


def test_paper_is_white_and_has_no_controls(shown: Tab) -> None:
    shown.press("Enter", "#theme")
    shown.press("Enter", "#theme")
    shown.prefer("dark", media="print")
    assert shown.ask("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert contrast(luminance(shown.ask("getComputedStyle(document.body).color")), 1.0) >= 7
    seen = "[...document.querySelectorAll('input, select, button:not(.name), a')].filter((each) => each.offsetParent)"
    assert [each for each in shown.ask(f"{seen}.map((each) => each.id)") if each != "network"] == []
    assert "%" in shown.text("#allowed")
    assert len(shown.call("Page.printToPDF", printBackground=False)["data"]) > 10_000


def test_every_control_and_figure_has_a_name_for_screen_readers(shown: Tab) -> None:
    roles = {"slider", "checkbox", "combobox", "button", "image", "link", "table", "region", "group"}
    nodes = shown.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    found = {role for role, _ in named}
    assert {"slider", "checkbox", "combobox", "button", "image", "link"} <= found
    nameless = [role for role, name in named if role in roles - {"table", "group"} and not name]
    assert nameless == []
    assert sum(role == "image" for role, _ in named) >= 6 + 4
    assert ("slider", "Budget allowed per sample") in named
    assert shown.ask("[...document.querySelectorAll('table')].every((each) => !each.rows.length || each.tHead)")


def test_areas_and_calibration_errors_are_shown(shown: Tab) -> None:
    areas = area_under_curve(made_points())
    rows = {row[0]: row[1] for row in table_of(shown, "table")}
    assert rows["eero"] == f"{100 * areas['eero']:.1f}"
    assert rows["oracle"] == f"{100 * areas['oracle']:.1f}"
    assert table_of(shown, "calibration") == [["calibration error, points", "2.0", "5.0", "10.0"]]


def test_a_page_of_little_says_what_is_missing(fresh: Tab, tmp_path: Path) -> None:
    fresh.open(write_report({"one": [Point("mine", 4.0, 0.8, 3.0, full_cost=8.0)]}, tmp_path / "report.html"))
    assert fresh.console == []
    assert len(fresh.texts("svg[role=img]")) == 3  # there is one method: no figure compares it
    assert fresh.ask("document.getElementById('compare-section').hidden")
    assert fresh.texts("#numbers .number") == ["80.0%", "2.67×", "37.5% of full cost"]  # no full network to lose to
    assert len(fresh.texts("figure .note")) == 2  # no shares, no single exits
    assert fresh.ask("document.getElementById('calibration-part').hidden")
    assert table_of(fresh, "table")[0][:2] == ["mine", "–"]
    assert fresh.ask("budget.disabled")
    assert fresh.text("#allowed").startswith("50% of the full network · 4")


def many(name: str) -> list[Point]:
    """12 methods at 40 budgets, on a network of 12 exits."""
    rng = np.random.default_rng(0)
    points = []
    for method in range(12):
        for allowed in np.linspace(0.1, 1.0, 40):
            shares = rng.dirichlet(np.ones(12))
            texts: dict[str, Any] = {"exit_rates": tuple(shares.tolist()), "exit_shares": tuple(shares.tolist())}
            texts["thresholds"] = (*rng.uniform(size=11).tolist(), -math.inf)
            texts["rule"] = "leave at the first score that reaches its threshold, on the margin"
            texts["guarantee"] = f"With probability 95% the mean cost of {name} stays within its budget. " * 2
            points.append(made_point(f"{name}_{method}", allowed, allowed * 0.98, 0.9 * allowed**0.1, **texts))
    return points


@pytest.mark.alone
def test_a_large_page_is_small_and_opens_at_once(fresh: Tab, tmp_path: Path) -> None:
    path = write_report({name: many("method") for name in ("one", "two", "three")}, tmp_path / "report.html")
    assert path.stat().st_size < 3_000_000
    opened, moved = [], []
    for _ in range(3):  # the best of three: others use this machine too
        fresh.open(path)
        opened.append(fresh.ask("performance.timing.loadEventEnd - performance.timing.navigationStart"))
        fresh.ask("all.click()")
        moved.append(
            fresh.ask("""(() => {
                const start = performance.now();
                for (const stop of [5, 10, 15, 20]) {
                    budget.value = stop;
                    budget.dispatchEvent(new Event("input", {bubbles: true}));
                    document.body.getBoundingClientRect();
                }
                return (performance.now() - start) / 4;
            })()""")
        )
    assert min(opened) < 2000
    assert min(moved) < 200
    assert fresh.console == []


def test_the_browser_tests_can_fail(fresh: Tab, tmp_path: Path) -> None:
    path = write_report(made_points(), tmp_path / "report.html")
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace("Plot.plot(", "Plot.plod("), encoding="utf-8")
    fresh.open(path)
    assert any("plod is not a function" in line for line in fresh.console)
    assert fresh.texts("svg[role=img]") == []
    fresh.console.clear()
    path.write_text(whole.replace("</main>", '<img src="http://localhost:9/x.png"></main>'), encoding="utf-8")
    fresh.open(path)
    assert any("Content Security Policy" in line for line in fresh.console)
