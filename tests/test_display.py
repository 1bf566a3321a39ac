"""In notebooks things show as small tables: escaped, whole, and without scripts."""

from html import escape
from html.parser import HTMLParser

import pytest
from conftest import made_up
from torch import nn

from alight import Costs, calibrate, replay
from alight.display import accuracy_text, html_table
from alight.networks.multi_exit import MultiExitModel
from alight.outputs import HeadOutputs
from alight.planning.plan import Plan
from alight.policies.policy import ExitAt, Threshold

COSTS = Costs([1.0, 1.0, 2.0, 2.0], [0.1] * 4, unit="<ms>")


class Reader(HTMLParser):
    """Tags, and the text of every cell; every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows = [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert not attributes
        self.open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += text


def things():
    table = made_up(1, 300, 4)
    policy = calibrate.certified_probability(calibrate.eero)(COSTS, "50%", table)
    model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)], ["<a>", "end"])
    last = ExitAt(costs=(2.0,), open_exits=(1,), num_exits=2)
    return {
        "costs": COSTS,
        "labelled": table,
        "unlabelled": table.unlabelled(),
        "policy": policy,
        "decisions": replay(policy, table),
        "plan": Plan(last, False, 9.0, 9.0, 0.8, 0.8, Costs([1.0, 1.0], [0.1, 0.1], "ms"), 64, model, reason="<no>"),
    }


@pytest.mark.parametrize("name", things())
def test_a_table_is_small_closed_and_harmless(name):
    text = things()[name]._repr_html_()
    read = Reader(text)
    assert read.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
    assert len({len(row) for row in read.rows}) == 1
    assert len(text) < 4000


def test_cells_are_those_of_the_thing():
    shown = things()
    rows = Reader(shown["costs"]._repr_html_()).rows
    assert rows[0] == ["exit", "stage", "head", "cumulative", "of the full network"]
    assert [float(row[3].split()[0]) for row in rows[1:]] == pytest.approx(COSTS.cumulative())
    shares = [float(row[2].rstrip(" %")) / 100 for row in Reader(shown["decisions"]._repr_html_()).rows[1:]]
    assert shares == pytest.approx(shown["decisions"].exit_shares, abs=1e-3)
    accuracies = [float(row[2].rstrip(" %")) / 100 for row in Reader(shown["labelled"]._repr_html_()).rows[1:]]
    assert accuracies == pytest.approx(1 - shown["labelled"].risks(), abs=1e-3)
    assert escape(str(shown["policy"].certificate)) in shown["policy"]._repr_html_()


def test_what_a_user_names_is_escaped():
    policy = Threshold(thresholds=(0.5,), costs=(1.0, 2.0), method="<script>alert(1)</script>")
    assert "<script" not in policy._repr_html_()
    assert "&lt;script&gt;" in policy._repr_html_()
    assert "<b>" not in html_table("<b>", [["<b>", "<b>"]], ["<b>"])


def test_an_accuracy_below_100_percent_is_never_rounded_up_to_it():
    labels = [0] * 2000
    one_wrong = HeadOutputs([[0.9]] * 2000, [[1], *[[0]] * 1999], labels)
    decisions = replay(ExitAt(costs=(1.0,), open_exits=(0,), num_exits=1), one_wrong)
    assert "accuracy 99.95%, " in repr(decisions)
    for share, shown in ((1999 / 2000, "99.95 %"), (0.99999, "99.999 %"), (0.9994, "99.9 %"), (1.0, "100.0 %")):
        assert accuracy_text(share) == shown
    assert accuracy_text(0.0) == "0.0 %"
