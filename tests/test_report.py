"""The report: one page, whole, self-contained, that says what the points say."""

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from alight.errors import BadInput, Mismatch
from alight.evaluation.sweep import ORACLE, SINGLE_EXIT, Point, read_points
from alight.report import write_report

HOSTILE = "</script><script>alert('method')</script><img src=x onerror=alert(1)> & \"quoted\""
PLAIN = 1.2e9


def point(method: str, budget: float, spent: float, accuracy: float, **others: Any) -> Point:
    return Point(
        method,
        budget=budget * PLAIN,
        accuracy=accuracy,
        mean_cost=spent * PLAIN,
        accuracy_low=accuracy - 0.01,
        accuracy_high=accuracy + 0.01,
        mean_cost_low=(spent - 0.01) * PLAIN,
        mean_cost_high=(spent + 0.01) * PLAIN,
        plain_cost=PLAIN,
        unit="FLOPs",
        **others,
    )


@pytest.fixture
def points() -> list[Point]:
    """Three methods, one of which plans its rates, and both references, on a network of three exits."""
    steps = [0.2, 0.4, 0.6, 0.8, 1.0]
    shares = [(1 - step, 0.0, step) for step in steps]
    return [
        *(
            point("eero", step, step - 0.01, 0.5 + 0.3 * step, exit_rates=share, exit_shares=share)
            for step, share in zip(steps, shares, strict=True)
        ),
        *(
            point("patience", step, step, 0.4 + 0.4 * step, exit_shares=share)
            for step, share in zip(steps, shares, strict=True)
        ),
        *(point(HOSTILE, step, 0.3 + 0.1 * step, 0.9 * step) for step in steps),
        *(
            point(ORACLE, step, step, 0.6 + 0.35 * step, exit_shares=share)
            for step, share in zip(steps, shares, strict=True)
        ),
        *(
            point(SINGLE_EXIT, cost, cost, accuracy, exit_shares=tuple(float(index == place) for index in range(3)))
            for place, (cost, accuracy) in enumerate([(0.2, 0.5), (0.5, 0.65), (1.0, 0.8)])
        ),
        Point("bare", budget=0.5 * PLAIN, accuracy=0.55, mean_cost=0.45 * PLAIN, plain_cost=PLAIN, unit="FLOPs"),
    ]


class Page(HTMLParser):
    """The tags of a page with their attributes, and the text inside each element with an id."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.last = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.last = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self.last] = self.texts.get(self.last, "") + data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def data_of(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Page(path.read_text(encoding="utf-8")).texts["data"])
    return data


def test_the_page_asks_nothing_of_any_network(points: list[Point], tmp_path: Path) -> None:
    path = write_report(points, tmp_path / "report.html", title="A title")
    page = Page(path.read_text(encoding="utf-8"))
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action"):
            assert not re.match(r"\s*(\w+:)?//", attributes.get(name) or ""), f"<{tag}> asks for {attributes[name]}"
    assert not any(word in page.texts["style"] for word in ("@import", "url("))
    policies = [each["content"] for _, each in page.tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policies
    assert (policies[0] or "").startswith("default-src 'none'")


def test_the_page_is_small_enough_to_send(points: list[Point], tmp_path: Path) -> None:
    path = write_report(points, tmp_path / "report.html")
    assert path == tmp_path / "report.html"
    assert 400_000 < path.stat().st_size < 3_000_000


def test_the_page_carries_the_licences_of_what_draws_it(points: list[Point], tmp_path: Path) -> None:
    text = write_report(points, tmp_path / "report.html").read_text(encoding="utf-8")
    for notice in ("Permission to use, copy, modify", "Mike Bostock", "Observable, Inc.", "Robert Penner"):
        assert notice in text


def test_hostile_titles_and_names_stay_text(points: list[Point], tmp_path: Path) -> None:
    title = "</title></style><script>alert('title')</script><img src=x onerror=alert(1)>"
    calm = Page(write_report(points[:5], tmp_path / "calm.html").read_text(encoding="utf-8"))
    path = write_report({HOSTILE: points}, tmp_path / "hostile.html", title=title)
    page = Page(path.read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in calm.tags]
    assert page.texts["title"].strip() == title
    network = data_of(path)["networks"][0]
    assert network["name"] == HOSTILE
    assert HOSTILE in {each["method"] for each in network["points"]}


def test_promises_stand_above_the_figures_as_text(points: list[Point], tmp_path: Path) -> None:
    text = write_report(points, tmp_path / "report.html", promises=["A <b> promise.", "Another."]).read_text()
    assert "A &lt;b&gt; promise." in text
    assert text.index("Another.") < text.index('id="accuracy-title"')
    assert 'class="promise"' not in write_report(points, tmp_path / "report.html").read_text()


def test_a_dollar_sign_is_no_placeholder(points: list[Point], tmp_path: Path) -> None:
    path = write_report(points, tmp_path / "report.html", title="$data costs $5")
    assert Page(path.read_text(encoding="utf-8")).texts["title"].strip() == "$data costs $5"


def test_every_point_is_in_the_page_with_every_figure(points: list[Point], tmp_path: Path) -> None:
    data = data_of(write_report(points, tmp_path / "report.html"))
    (network,) = data["networks"]
    assert data["columns"] == [each.name for each in fields(Point)]
    assert len(network["points"]) == len(points)
    for given, found in zip(points, network["points"], strict=True):
        for name in data["columns"]:
            value = getattr(given, name)
            if isinstance(value, float) and math.isnan(value):
                assert found[name] is None
            else:
                assert found[name] == (list(value) if isinstance(value, tuple) else value)


def test_points_of_one_network_and_of_several_are_both_reported(points: list[Point], tmp_path: Path) -> None:
    other = [replace(each, plain_cost=2.0, budget=1.0, mean_cost=1.0, unit="ms") for each in points]
    one = data_of(write_report(tuple(points), tmp_path / "one.html"))
    two = data_of(write_report({"small": points, "large": other}, tmp_path / "two.html"))
    assert [network["name"] for network in one["networks"]] == [""]
    assert [(network["name"], network["unit"]) for network in two["networks"]] == [("small", "FLOPs"), ("large", "ms")]
    assert two["networks"][0]["points"] == one["networks"][0]["points"]


def test_the_table_compares_at_equal_spent_budget_and_marks_the_best_method(
    points: list[Point], tmp_path: Path
) -> None:
    data = data_of(write_report(points, tmp_path / "report.html"))
    assert data["spends"] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    rows = {row["method"]: row["cells"] for row in data["networks"][0]["table"]}
    assert set(rows) == {"eero", "patience", HOSTILE, ORACLE, "bare"}
    assert rows["eero"][3]["accuracy"] == pytest.approx(0.5 + 0.3 * 0.51, abs=5e-4)  # half spent of 51 % allowed
    assert rows["patience"][3]["accuracy"] == pytest.approx(0.6, abs=5e-4)
    assert rows["eero"][3]["best"]
    assert not rows["patience"][3]["best"]
    assert not any(cell["best"] for cell in rows[ORACLE] if cell)
    assert rows[HOSTILE][0] is None
    assert rows[HOSTILE][7] is None  # it spends between 32 % and 40 %
    for column in range(8):
        assert any(cells[column] and cells[column]["best"] for cells in rows.values())


@pytest.mark.parametrize("nothing", [[], {}, {"empty": []}])
def test_no_points_are_refused_and_leave_no_file(
    nothing: list[Point] | Mapping[str, list[Point]], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"there are no (points|networks).* to report"):
        write_report(nothing, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_points_without_the_plain_cost_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="plain_cost"):
        write_report([Point("eero", budget=4.0, accuracy=0.8, mean_cost=3.0)], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_points_of_two_networks_in_one_list_are_refused(points: list[Point], tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match="not of one network"):
        write_report([*points, replace(points[0], plain_cost=2 * PLAIN)], tmp_path / "report.html")


def test_an_existing_report_survives_a_failure(points: list[Point], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the former report")
    with pytest.raises(UnicodeEncodeError):
        write_report(points, path, title="half a character: \ud800")
    assert path.read_text() == "the former report"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def chromium() -> str:
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    found = next((place for name in names if name and (place := shutil.which(name))), None)
    if found is None:
        pytest.skip("no browser: install chromium or name one in the environment variable CHROMIUM")
    return found


def open_in(chromium: str, page: Path, profile: Path) -> tuple[Page, str]:
    """The page as the browser has built it, and what it wrote to its console."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage"]
    flags += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [chromium, *flags, "--dump-dom", page.as_uri()], capture_output=True, timeout=120, check=True, encoding="utf-8"
    )
    return Page(done.stdout), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def figures_of(page: Page) -> Iterator[str]:
    for tag, attributes in page.tags:
        if tag == "svg" and attributes.get("role") == "img":
            yield (attributes["aria-label"] or "").partition(":")[0]


def test_a_browser_draws_every_figure_without_a_word_on_the_console(
    points: list[Point], chromium: str, tmp_path: Path
) -> None:
    path = write_report(points, tmp_path / "report.html", title="Drawn")
    page, console = open_in(chromium, path, tmp_path / "profile")
    assert console == ""
    assert list(figures_of(page)) == [
        "Accuracy against budget spent",
        "Spent against allowed budget",
        "Spent minus allowed budget",
        "Share of samples per exit, planned and observed",
        "Error rate of each exit alone",
    ]
    assert sum(each.get("type") == "checkbox" for _, each in page.tags) == 6  # four methods and two references
    assert page.count("strong") >= 8
    assert page.count("img") == 0
    (link,) = [each for _, each in page.tags if each.get("id") == "download"]
    kind, _, content = (link["href"] or "").partition(",")
    assert kind == "data:text/csv;charset=utf-8"
    (tmp_path / "points.csv").write_text(unquote(content), encoding="utf-8")
    assert list(map(repr, read_points(tmp_path / "points.csv"))) == list(map(repr, points))  # repr: a NaN equals no NaN


def test_a_browser_draws_what_little_there_is(chromium: str, tmp_path: Path) -> None:
    path = write_report({"one": [Point("mine", 4.0, 0.8, 3.0, plain_cost=8.0)]}, tmp_path / "report.html")
    page, console = open_in(chromium, path, tmp_path / "profile")
    assert console == ""
    assert len(list(figures_of(page))) == 3
    assert sum(each.get("class") == "note" for _, each in page.tags) == 3  # no shares, no single exits; no script


def test_the_browser_test_can_fail(points: list[Point], chromium: str, tmp_path: Path) -> None:
    path = write_report(points, tmp_path / "report.html")
    path.write_text(path.read_text(encoding="utf-8").replace("Plot.plot(", "Plot.plod("), encoding="utf-8")
    page, console = open_in(chromium, path, tmp_path / "profile")
    assert "plod is not a function" in console
    assert list(figures_of(page)) == []
