"""What a page shows: refused where its parts do not fit."""

import pytest
from points import made_points

from alight.errors import BadInput, Mismatch
from alight.report import Examples, ReportedNetwork, SampleWalk, as_html


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


def test_a_page_of_nothing_is_refused():
    with pytest.raises(BadInput, match="there are no networks to report"):
        as_html({}, title="title")
