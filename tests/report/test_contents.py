"""What a page shows: refused where its parts do not fit."""

from dataclasses import replace

import pytest
from points import made_points

from alight.errors import BadInput, Mismatch
from alight.report import Examples, MeasuredSpeed, ReportedNetwork, SampleWalk, as_html


def test_a_network_knows_its_unit_its_cost_and_its_exits():
    network = ReportedNetwork(made_points())
    assert (network.unit, network.full_cost, network.num_exits) == ("FLOPs", 1.2e9, 3)


def test_names_must_be_as_many_as_exits():
    assert ReportedNetwork(made_points(), exits=["a", "b", "c"]).exits == ["a", "b", "c"]
    with pytest.raises(Mismatch, match="2 names for 3 exits of mine: give one each"):
        ReportedNetwork(made_points(), name="mine", exits=["a", "b"])


def test_every_example_has_its_entry_in_every_walk():
    walk = SampleWalk("eero", 1.0, exits=(0, 1), answers=("a", "b"))
    assert Examples(("x", "y"), (), (walk,)).walks == (walk,)
    with pytest.raises(BadInput, match="1 images, but labels or walks of others"):
        Examples(("x",), (), (walk,))
    with pytest.raises(BadInput, match="2 images, but labels or walks of others"):
        Examples(("x", "y"), ("a",), (walk,))
    assert len(Examples((), ("a", "b"), (walk,), texts=("first", "second"))) == 2
    with pytest.raises(BadInput, match="1 texts, but labels or walks of others"):
        Examples((), (), (walk,), texts=("first",))
    with pytest.raises(BadInput, match="2 images and 2 texts: give samples of one kind"):
        Examples(("x", "y"), (), (walk,), texts=("first", "second"))
    with pytest.raises(BadInput, match="there are no walks"):
        Examples(("x", "y"), (), ())


def test_the_chosen_policy_is_one_of_the_network():
    points = made_points()
    network = ReportedNetwork(points, chosen=points[1], speed=MeasuredSpeed(1.5))
    assert (network.chosen, network.num_exits) == (points[1], 3)
    with pytest.raises(Mismatch, match=r"not of one network .*1\.2e\+09 FLOPs and 2 ms"):
        ReportedNetwork(points, chosen=replace(points[1], full_cost=2.0, unit="ms"))
    with pytest.raises(BadInput, match="a speed of mine, but not whose"):
        ReportedNetwork(points, name="mine", speed=MeasuredSpeed(1.5))


def test_a_page_of_nothing_is_refused():
    with pytest.raises(BadInput, match="there are no networks to report"):
        as_html({}, title="title")
