"""The report: one page, whole, self-contained, that says what the points say."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from points import FULL, HOSTILE, made_points

from alight.errors import BadInput, Mismatch
from alight.evaluation import ORACLE, Point
from alight.report import ReportedNetwork, as_html, write_report


@pytest.fixture
def points() -> list[Point]:
    return made_points()


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
    assert HOSTILE in {row[0] for row in network["points"]}


def test_guarantees_of_all_networks_and_of_one_are_in_the_page_as_text(points: list[Point], tmp_path: Path) -> None:
    network = ReportedNetwork(points, guarantees=["Of </script> one."])
    data = data_of(write_report(network, tmp_path / "report.html", guarantees=["A <b> guarantee.", "Another."]))
    assert data["guarantees"] == ["A <b> guarantee.", "Another."]
    assert data["networks"][0]["guarantees"] == ["Of </script> one."]
    assert data_of(write_report(points, tmp_path / "report.html"))["guarantees"] == []


def test_a_dollar_sign_is_not_a_placeholder(points: list[Point], tmp_path: Path) -> None:
    path = write_report(points, tmp_path / "report.html", title="$data costs $5")
    assert Page(path.read_text(encoding="utf-8")).texts["title"].strip() == "$data costs $5"


def test_every_point_is_in_the_page_with_every_figure(points: list[Point], tmp_path: Path) -> None:
    data = data_of(write_report(points, tmp_path / "report.html"))
    (network,) = data["networks"]
    assert data["columns"] == [each.name for each in fields(Point)]
    assert len(network["points"]) == len(points)
    assert [as_shown(each) for each in network["points"]] == [
        [getattr(given, name) for name in data["columns"]] for given in map(without_nan, points)
    ]


def as_shown(row: list[Any]) -> list[Any]:
    """A row of the page's JSON as Python values, None for NaN."""
    infinite = {"inf": math.inf, "-inf": -math.inf}
    return [tuple(infinite.get(each, each) for each in cell) if isinstance(cell, list) else cell for cell in row]


def without_nan(given: Point) -> Point:
    missing = {each.name: None for each in fields(Point) if getattr(given, each.name) != getattr(given, each.name)}
    return replace(given, **missing)


def test_points_of_one_network_and_of_several_are_both_reported(points: list[Point], tmp_path: Path) -> None:
    other = [replace(each, full_cost=2.0, budget=1.0, mean_cost=1.0, unit="ms") for each in points]
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


def test_points_without_the_full_cost_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="full_cost"):
        write_report([Point("eero", budget=4.0, accuracy=0.8, mean_cost=3.0)], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_points_of_two_networks_in_one_list_are_refused(points: list[Point], tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match="not of one network"):
        write_report([*points, replace(points[0], full_cost=2 * FULL)], tmp_path / "report.html")


def test_an_existing_report_survives_a_failure(points: list[Point], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the former report")
    with pytest.raises(UnicodeEncodeError):
        write_report(points, path, title="half a character: \ud800")
    assert path.read_text() == "the former report"
    assert list(tmp_path.iterdir()) == [path]


def test_a_network_brings_its_name_its_exits_and_its_note(points: list[Point], tmp_path: Path) -> None:
    network = ReportedNetwork(points, name="mine", exits=["a", "b", "c"], note="on a laptop")
    (written,) = data_of(write_report(network, tmp_path / "report.html"))["networks"]
    assert (written["name"], written["exits"], written["note"]) == ("mine", ["a", "b", "c"], "on a laptop")
    (written,) = data_of(write_report({"other": network}, tmp_path / "report.html"))["networks"]
    assert written["name"] == "other"


def test_a_written_page_is_the_page(points: list[Point], tmp_path: Path) -> None:
    text = write_report(points, tmp_path / "report.html", title="T", guarantees=["P."]).read_text(encoding="utf-8")
    assert text == as_html(ReportedNetwork(points), title="T", guarantees=["P."])
