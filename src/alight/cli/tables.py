"""Commands on recorded outputs, which need no network: calibrate, sweep, report."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from alight import calibrate
from alight.budgeting.bounds import check_delta
from alight.cli.arguments import check_distinct, methods, named, output, output_option, own_options, set_option, words
from alight.cli.command import Argument, Command, CommandResult, argument
from alight.costs import Costs, as_costs
from alight.errors import AlightError, BadInput
from alight.evaluation import Point, read_points, sweep, write_points
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.report import ReportedNetwork, examples, read_images, write_report

TABLES = ("labelled", "unlabelled", "test")  # arguments of `sweep`
FAST_METHODS = {name: method for name, method in calibrate.METHODS.items() if name not in ("genetic", "auto")}


def run_calibrate(options: argparse.Namespace) -> CommandResult:
    """Fit a policy to a budget, with a guarantee if you ask for one."""
    try:
        policy = _calibrated(options)
    except TypeError as error:  # of a value of --set, the only ones whose type is not checked yet
        raise BadInput(f"--set {' '.join(options.set)}: a value is of the wrong kind ({error})") from error
    if options.output:
        policy.save(options.output)
    return CommandResult(str(policy), {"path": options.output, "policy": policy.to_dict()})


def run_sweep(options: argparse.Namespace) -> CommandResult:
    """Compare methods over budgets on test data."""
    check_distinct(options.output, options.report, options.costs)
    if options.images and not options.report:
        raise BadInput("--images are shown in a report: give --report FILE, too")
    for path in (options.labelled, options.unlabelled, options.test, options.images):
        check_distinct(path, options.output, options.report)
    tables = dict(zip(TABLES, _tables(options, *TABLES), strict=True))
    costs = _costs(options.costs)
    chosen, guarantees = {name: calibrate.METHODS[name] for name in options.methods}, []
    if options.contract:
        chosen = {name: _certified(method, options) for name, method in chosen.items()}
        guarantees = [f"Every policy here was certified: contract '{options.contract}', delta {options.delta:g}."]
    budgets = options.budgets or even_budgets(costs)
    images = read_images(options.images) if options.images else None
    points = sweep(chosen, costs, budgets, **tables, progress=not options.quiet)
    if options.report:
        shown = None
        if images is not None:  # where they leave under the first of the methods, at every budget
            name, method = next(iter(chosen.items()))
            policies = [method(costs, budget, tables["labelled"], tables["unlabelled"]) for budget in budgets]
            shown = examples(images, [replace(policy, method=name) for policy in policies], tables["test"])
        write_report(
            ReportedNetwork(points, examples=shown), options.report, title=f"{options.test}", guarantees=guarantees
        )
    write_points(points, options.output)
    lines = [str(point) for point in points if point.method in chosen]
    return CommandResult("\n".join(lines), {"path": options.output, "report": options.report, "points": points})


def run_report(options: argparse.Namespace) -> CommandResult:
    """Draw the points of sweeps on one HTML page."""
    check_distinct(*options.points, options.output)
    title = options.title or ", ".join(options.points)
    page = write_report(_points(options.points), options.output, title=title).resolve()
    return CommandResult(str(page), {"path": page})


def even_budgets(costs: Costs) -> list[str]:
    """Return 17 percentages from the first exit to the full network; one alone where the first exit costs more.

    >>> even_budgets(Costs([4.0, 4.0], [0.0, 0.0]))[:2]
    ['50%', '53.125%']
    >>> even_budgets(Costs([4.0, 1.0], [2.0, 0.0]))
    ['120%']
    """
    lowest = np.ceil(100 * costs.shares()[0])
    return list(dict.fromkeys(f"{percent:g}%" for percent in np.linspace(lowest, max(lowest, 100), 17)))


def _points(paths: Sequence[str]) -> list[Point] | dict[str, list[Point]]:
    """Return the points of one table, or those of several by the names of their files."""
    if len(paths) == 1:
        return read_points(paths[0])
    stems = [Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else paths
    return {name: read_points(path) for name, path in zip(names, paths, strict=True)}


def _calibrated(options: argparse.Namespace) -> Policy:
    method = calibrate.METHODS[options.method]
    own = own_options(method, options.set, progress=not options.quiet)
    labelled, unlabelled = _tables(options, "labelled", "unlabelled")
    check_distinct(options.labelled, options.output, options.costs)
    if options.budget is None and not (options.contract or options.risk):
        raise BadInput("there is no budget: give --budget, or --risk and --alpha for the cheapest policy")
    method = calibrate.pruned(method) if options.prune else method
    if options.risk:
        risk = named(options, "risk", "alpha", "delta")
        method = calibrate.certified_risk(method, **risk, cost=options.contract)
    elif options.contract:
        method = _certified(method, options)
    return method(_costs(options.costs), options.budget, labelled, unlabelled, **own)


def _certified(method: calibrate.Method, options: argparse.Namespace) -> calibrate.Method:
    """Return the method with the guarantee on cost that the options name."""
    check_delta(options.delta)
    of_cost = {"delta": options.delta} if options.contract == "probability" else {}
    return calibrate.CONTRACTS[options.contract](method, **of_cost)


def _tables(options: argparse.Namespace, *names: str) -> list[Any]:
    """Return the tables of these options; one given twice is one object, so that methods notice."""

    @cache
    def load(path: Path) -> HeadOutputs:
        # no method here reads log-probabilities, which are by far the most of a recording
        sample = partial(HeadOutputs.load_sample, log_probabilities=False)
        table = sample(path) if path.is_dir() else HeadOutputs.load(path)
        return table.with_score(options.score) if options.score else table

    return [path and load(Path(path).resolve()) for path in (getattr(options, name) for name in names)]


def _costs(text: str) -> Costs:
    """Return costs from a file, or cumulative ones from text such as 1,2.5,4."""
    if Path(text).is_file():
        return Costs.load(text)
    try:
        return as_costs([float(part) for part in text.split(",")])
    except ValueError as error:
        if isinstance(error, AlightError):
            raise
        raise BadInput(f"costs {text!r} are neither a file nor numbers: give costs.json or 1,2.5,4") from error


def _table_arguments(*further: str) -> tuple[Argument, ...]:
    return (
        argument(
            "labelled",
            help="recorded outputs with labels, .npz or a folder of partitions, of which at most a million rows are"
            " drawn at random; gives risks, and thresholds too if alone",
        ),
        *(argument(name, help=f"recorded outputs of {name} data, with labels (.npz)") for name in further),
        argument("--unlabelled", metavar="FILE", help="recorded outputs that set the thresholds"),
        argument("--costs", required=True, help="costs.json, or cumulative costs of the exits as 1,2.5,4"),
        argument("--score", help="score to use instead of the one the tables were recorded with"),
    )


def _contract_options(*contracts: str) -> tuple[Argument, ...]:
    return (
        argument("--contract", choices=contracts, help="what to guarantee about cost"),
        argument("--delta", type=float, default=0.05, help="probability that a guarantee fails (default: 0.05)"),
    )


METHODS = f"{', '.join(calibrate.METHODS)} (default: eero)"
RISKS = ["error", "excess_error", "disagreement"]
SLOW = "default: all but genetic and auto, which take seconds each"
COMMANDS = (
    Command(
        run_calibrate,
        (
            *_table_arguments(),
            argument("--budget", help="a number in the costs' unit, '50%%', '2.5 GFLOPs', '3 ms'"),
            argument("--method", choices=[*calibrate.METHODS], metavar="METHOD", default="eero", help=METHODS),
            argument("--prune", action="store_true", help="close exits that are not worth their heads"),
            *_contract_options("mean", "probability", "batch", "stream"),
            argument("--risk", choices=RISKS, help="what to guarantee about predictions"),
            argument("--alpha", type=float, help="highest risk that is allowed"),
            set_option("a method's own option"),
            output_option(None, "where to write the policy (JSON)"),
        ),
        (
            "calibrate labelled.npz --costs costs.json --budget 50% -o policy.json",
            "calibrate labelled.npz --costs costs.json --budget 50% --contract probability --delta 0.05",
            "calibrate labelled.npz --costs costs.json --risk excess_error --alpha 0.1",
            "calibrate partitions --costs costs.json --budget 50% -o policy.json",
        ),
    ),
    Command(
        run_sweep,
        (
            *_table_arguments("test"),
            argument("--methods", type=methods, default=list(FAST_METHODS), help=SLOW),
            argument("--budgets", type=words, help="default: 17 from the cheapest exit to the full network"),
            *_contract_options("mean", "probability"),
            output_option("points.csv"),
            argument("--report", metavar="FILE", type=output, help="where to draw the points as an HTML page"),
            argument("--images", metavar="FILE", help="test images, in the table's order, to show there (.npz)"),
        ),
        (
            "sweep labelled.npz test_outputs.npz --costs costs.json --report report.html",
            "sweep labelled.npz test_outputs.npz --costs costs.json --methods eero,geometric --budgets 40%,60% --json",
        ),
    ),
    Command(
        run_report,
        (
            argument("points", nargs="+", help="CSV that `alight sweep` wrote; each is shown as one network"),
            output_option("report.html"),
            argument("--title", help="default: the name of the CSV"),
        ),
        ("report points.csv -o report.html --title 'Our network'",),
    ),
)
