"""Commands on recorded outputs, which need no network: calibrate, sweep, report."""

import argparse
from functools import cache, partial
from pathlib import Path
from typing import Any

from alight import calibrate
from alight.budgeting.bounds import check_delta
from alight.cli.command import Command, Found
from alight.cli.options import distinct, methods, output, output_option, own_options, set_option, words
from alight.costs import Costs, as_costs
from alight.demo.pages import even_budgets, examples_of, points_of
from alight.errors import AlightError, BadInput
from alight.evaluation import sweep, write_points
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.report import ReportedNetwork, read_images, write_report

TABLES = ("labelled", "unlabelled", "test")
SLOW = ("genetic", "auto")  # seconds for each budget, so only on request


def run_calibrate(options: argparse.Namespace) -> Found:
    """Fit a policy to a budget, and promise to keep it."""
    try:
        policy = _calibrated(options)
    except TypeError as error:  # the only values whose type nobody has checked yet
        raise BadInput(f"--set {' '.join(options.set)}: a value is of the wrong kind ({error})") from error
    if options.output:
        policy.save(options.output)
    return Found(str(policy), {"path": options.output, "policy": policy.to_dict()})


def run_sweep(options: argparse.Namespace) -> Found:
    """Compare methods over budgets on test data."""
    distinct(options.output, options.report, options.costs)
    if options.images and not options.report:
        raise BadInput("--images are shown in a report: give --report FILE, too")
    for path in (options.labelled, options.unlabelled, options.test, options.images):
        distinct(path, options.output, options.report)
    tables = dict(zip(TABLES, _tables(options, *TABLES), strict=True))
    costs = _costs(options.costs)
    chosen, guarantees = {name: calibrate.METHODS[name] for name in options.methods}, []
    if options.contract:
        chosen = {name: _certified(method, options) for name, method in chosen.items()}
        guarantees = [f"Every policy here was certified: contract '{options.contract}', delta {options.delta:g}."]
    budgets, shown = options.budgets or even_budgets(costs), not options.quiet
    images = read_images(options.images) if options.images else None
    points = sweep(chosen, costs, budgets, **tables, progress=shown)
    if options.report:
        left = None if images is None else examples_of(images, chosen, costs, budgets, tables)
        shown_points = ReportedNetwork(points, examples=left)
        write_report(shown_points, options.report, title=f"{options.test}", guarantees=guarantees)
    write_points(points, options.output)
    lines = [str(point) for point in points if point.method in chosen]
    return Found("\n".join(lines), {"path": options.output, "report": options.report, "points": points})


def run_report(options: argparse.Namespace) -> Found:
    """Draw the points of sweeps as one HTML page."""
    distinct(*options.points, options.output)
    title = options.title or ", ".join(options.points)
    page = write_report(points_of(options.points), options.output, title=title).resolve()
    return Found(str(page), {"path": page})


def _calibrated(options: argparse.Namespace) -> Policy:
    method = calibrate.METHODS[options.method]
    own = own_options(method, options.set, progress=not options.quiet)
    labelled, unlabelled = _tables(options, "labelled", "unlabelled")
    distinct(options.labelled, options.output, options.costs)
    if options.budget is None and not (options.contract or options.risk):
        raise BadInput("there is no budget: give --budget, or --risk and --alpha for the cheapest policy")
    method = calibrate.pruned(method) if options.prune else method
    if options.risk:
        of_risk = {name: getattr(options, name) for name in ("risk", "alpha", "delta")}
        method = calibrate.certified_risk(method, **of_risk, cost=options.contract)
    elif options.contract:
        method = _certified(method, options)
    return method(_costs(options.costs), options.budget, labelled, unlabelled, **own)


def _certified(method: calibrate.Method, options: argparse.Namespace) -> calibrate.Method:
    """Return the method with the guarantee on cost that the options name."""
    check_delta(options.delta)
    of_cost = {"delta": options.delta} if options.contract == "probability" else {}
    return calibrate.CONTRACTS[options.contract](method, **of_cost)


def _tables(options: argparse.Namespace, *names: str) -> list[Any]:
    """The tables behind these options; one given twice is one table, so that methods notice."""

    @cache
    def load(path: Path) -> HeadOutputs:
        # no method here reads log-probabilities, which are by far the most of a recording
        sample = partial(HeadOutputs.load_sample, log_probabilities=False)
        table = sample(path) if path.is_dir() else HeadOutputs.load(path)
        return table.with_score(options.score) if options.score else table

    return [path and load(Path(path).resolve()) for path in (getattr(options, name) for name in names)]


def _costs(text: str) -> Costs:
    """Costs from a file, or cumulative ones written out as 1,2.5,4."""
    if Path(text).is_file():
        return Costs.load(text)
    try:
        return as_costs([float(part) for part in text.split(",")])
    except ValueError as error:
        if isinstance(error, AlightError):
            raise
        raise BadInput(f"costs {text!r} are neither a file nor numbers: give costs.json or 1,2.5,4") from error


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    _table_arguments(parser)
    parser.add_argument("--budget", help="a number in the costs' unit, '50%%', '2.5 GFLOPs', '3 ms'")
    known = f"{', '.join(calibrate.METHODS)} (default: eero)"
    parser.add_argument("--method", choices=calibrate.METHODS, metavar="METHOD", default="eero", help=known)
    parser.add_argument("--prune", action="store_true", help="close exits that are not worth their heads")
    _contract_options(parser, "batch", "stream")
    risks = ["error", "excess_error", "disagreement"]
    parser.add_argument("--risk", choices=risks, help="what to promise about answers")
    parser.add_argument("--alpha", type=float, help="the most that the risk may be")
    set_option(parser, "a method's own option")
    output_option(parser, None, "where to write the policy (JSON)")


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    _table_arguments(parser, "test")
    fast = [name for name in calibrate.METHODS if name not in SLOW]
    slow = "default: all but genetic and auto, which take seconds each"
    parser.add_argument("--methods", type=methods, default=fast, help=slow)
    parser.add_argument("--budgets", type=words, help="default: 17 from the cheapest exit to the plain network")
    _contract_options(parser)
    output_option(parser, "points.csv")
    parser.add_argument("--report", metavar="FILE", type=output, help="where to draw the points as an HTML page")
    parser.add_argument("--images", metavar="FILE", help="test images, in the table's order, to show there (.npz)")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("points", nargs="+", help="CSV that `alight sweep` wrote; of several, one network each")
    output_option(parser, "report.html")
    parser.add_argument("--title", help="default: the name of the CSV")


def _contract_options(parser: argparse.ArgumentParser, *further: str) -> None:
    contracts = ["mean", "probability", *further]
    parser.add_argument("--contract", choices=contracts, help="what to promise about cost")
    parser.add_argument("--delta", type=float, default=0.05, help="probability that a promise fails (default: 0.05)")


def _table_arguments(parser: argparse.ArgumentParser, *further: str) -> None:
    parser.add_argument(
        "labelled",
        help="recorded outputs with labels, .npz or a folder of partitions, of which at most a million rows are drawn"
        " at random; gives risks, and thresholds too if alone",
    )
    for name in further:
        parser.add_argument(name, help=f"recorded outputs of {name} data, with labels (.npz)")
    parser.add_argument("--unlabelled", metavar="FILE", help="recorded outputs that set the thresholds")
    parser.add_argument("--costs", required=True, help="costs.json, or cumulative costs of the exits as 1,2.5,4")
    parser.add_argument("--score", help="another score of the tables than the one they were recorded with")


COMMANDS = (
    Command(
        "calibrate",
        run_calibrate,
        _calibrate_arguments,
        (
            "calibrate labelled.npz --costs costs.json --budget 50% -o policy.json",
            "calibrate labelled.npz --costs costs.json --budget 50% --contract probability --delta 0.05",
            "calibrate labelled.npz --costs costs.json --risk excess_error --alpha 0.1",
            "calibrate partitions --costs costs.json --budget 50% -o policy.json",
        ),
    ),
    Command(
        "sweep",
        run_sweep,
        _sweep_arguments,
        (
            "sweep labelled.npz test_outputs.npz --costs costs.json --report report.html",
            "sweep labelled.npz test_outputs.npz --costs costs.json --methods eero,geometric --budgets 40%,60% --json",
        ),
    ),
    Command("report", run_report, _report_arguments, ("report points.csv -o report.html --title 'Our network'",)),
)
