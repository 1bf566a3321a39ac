"""What commands put on a report's page beside the points of one sweep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alight import calibrate
from alight.costs import Costs
from alight.evaluation import Point, read_points, sweep
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.provenance import provenance
from alight.report import Examples, ReportedNetwork, examples, write_report

if TYPE_CHECKING:
    from alight.planning.plan import Plan

BESIDE_A_PLAN = ("eero", "best_single_exit")  # methods that a plan's page compares, in milliseconds


def even_budgets(costs: Costs) -> list[str]:
    """17 percentages from the first exit to the plain network; one alone where the first costs more than that.

    >>> even_budgets(Costs([4.0, 4.0], [0.0, 0.0]))[:2]
    ['50%', '53.125%']
    >>> even_budgets(Costs([4.0, 1.0], [2.0, 0.0]))
    ['120%']
    """
    lowest = np.ceil(100 * costs.cumulative()[0] / costs.full)
    return list(dict.fromkeys(f"{percent:g}%" for percent in np.linspace(lowest, max(lowest, 100), 17)))


def points_of(paths: Sequence[str]) -> list[Point] | dict[str, list[Point]]:
    """The points of one table, or those of several by the names of their files."""
    if len(paths) == 1:
        return read_points(paths[0])
    stems = [Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else paths
    return {name: read_points(path) for name, path in zip(names, paths, strict=True)}


def examples_of(
    images: np.ndarray,
    methods: Mapping[str, Callable[..., Policy]],
    costs: Costs,
    budgets: Sequence[str],
    tables: Mapping[str, Any],
) -> Examples:
    """Test images where they leave under the first of the methods, at every budget."""
    name, method = next(iter(methods.items()))
    given = (tables["labelled"], tables["unlabelled"])
    policies = [replace(method(costs, budget, *given), method=name) for budget in budgets]
    return examples(images, policies, tables["test"])


def write_plan(made: "Plan", labelled: HeadOutputs, path: str, title: str) -> Path:
    """The path of a page with a plan, and with methods at many budgets on one half of the labelled samples."""
    fitted, judged = labelled.split(0.5, np.random.default_rng(0))
    methods = {name: calibrate.METHODS[name] for name in BESIDE_A_PLAN}
    points = sweep(methods, made.costs, even_budgets(made.costs), labelled=fitted, test=judged)
    network = ReportedNetwork(points, exits=tuple(made.model.exits), plan=made, note=measured_on("torch"))
    return write_report(network, path, title=title)


def measured_on(*packages: str) -> str:
    """Where, with which versions of these packages and when something was measured, for a page's note."""
    where = provenance(*packages)
    return f"measured on {where['hardware']}, {where['versions']}, {where['date']}"
