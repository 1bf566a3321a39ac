"""Commands on recorded outputs and logs, which need no network: calibrate, sweep, report, benchmark."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from alight import calibrate, recordings
from alight.benchmark import as_points, benchmark, leaderboard, write_results
from alight.budgeting.bounds import check_delta
from alight.calibrate.cost_guarantees import guaranteed_by
from alight.cli.arguments import (
    check_distinct,
    check_idle,
    count,
    methods,
    named,
    output,
    output_option,
    own_options,
    set_option,
    share,
    words,
    wrong_kind,
)
from alight.cli.command import Argument, Command, CommandResult, argument
from alight.cli.kinds import check_order
from alight.cli.logs import (
    LOG_OPTIONS,
    MAX_COSTS,
    OF_LOGS,
    WITHOUT_MOST,
    beside_the_largest,
    halves,
    is_log,
    log_budgets,
    read_logged,
    reported_points,
)
from alight.costs import Costs, as_costs
from alight.errors import AlightError, BadInput
from alight.evaluation import comparison_table, read_points, sweep, write_points
from alight.fitting.fitted import reported_folder
from alight.fitting.steps import LEAST_LABELS, default_method
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.provenance import provenance
from alight.recordings import Recording
from alight.report import ReportedNetwork, examples, read_images, write_report

SHOWN = 8  # budgets in the table that a sweep prints
TABLES = ("labelled", "unlabelled", "test")  # arguments of `sweep`
CONTRACT, NO_CONTRACT = "probability", "none"  # of `calibrate` by default: without it every second policy overspends


def combined_with(
    combine: str,
    method: calibrate.Method,
    costs: Costs,
    budget: float,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
) -> Policy:
    """Return the policy of a method on combined answers, as a function that other processes can be given."""
    return calibrate.combined(method, combine)(costs, budget, labelled, unlabelled)


FAST_METHODS = {name: method for name, method in calibrate.METHODS.items() if name != "genetic"}
BENCHMARKED: dict[str, calibrate.Method] = {
    **FAST_METHODS,
    **{
        f"{method.__name__}, {combine}": partial(combined_with, combine, method)
        for combine in ("vote", "geometric_mean")
        for method in (calibrate.eero, calibrate.global_threshold)
    },
}


LOGS_ALONE = "is for a log of models, and these are recorded outputs: leave it out"
WITHOUT_DELTA = f"is the probability that a guarantee fails: give --contract {CONTRACT}, or leave it out"


def run_calibrate(options: argparse.Namespace) -> CommandResult:
    """Fit a policy to a budget that it is guaranteed to keep, unless you do without."""
    try:
        policy = _calibrated(options)
    except TypeError as error:  # of a value of --set, the only ones whose type is not checked yet
        raise wrong_kind(options.set, error) from error
    if options.output:
        policy.save(options.output)
    text = str(policy) if policy.certificate else f"{policy}\n{guaranteed_by(policy)}"
    if is_log(options.labelled):
        lines = [str(policy), "", *beside_the_largest(policy, read_logged(options))]
        text = "\n".join(lines if policy.certificate else [*lines, WITHOUT_MOST])
    return CommandResult(text, {"path": options.output, "policy": policy.to_dict()})


def run_sweep(options: argparse.Namespace) -> CommandResult:
    """Compare methods over budgets on test data."""
    check_distinct(options.output, options.report, options.costs)
    if options.images and not options.report:
        raise BadInput("--images are shown in a report: give --report FILE, too")
    for path in (options.labelled, options.unlabelled, options.test, options.images):
        check_distinct(path, options.output, options.report)
    tables, costs, budgets = _swept_data(options)
    chosen, guarantees = _swept_methods(options), []
    if options.contract:
        delta = f", delta {options.delta:g}" if options.contract == CONTRACT else ""
        guarantees = [f"Every policy here was certified: contract '{options.contract}'{delta}."]
    images = read_images(options.images) if options.images else None
    points = sweep(chosen, costs, budgets, **tables, progress=not options.quiet)
    if options.report:
        shown = None
        if images is not None:  # where they leave under the first of the methods, at every budget
            name, method = next(iter(chosen.items()))
            given = tables["labelled"], tables["unlabelled"]
            policies = [replace(method(costs, budget, *given), method=name) for budget in budgets]
            shown = examples(images, policies, tables["test"])
        network = ReportedNetwork(points, exits=tables["test"].exits, examples=shown)
        write_report(network, options.report, title=f"{options.test or options.labelled}", guarantees=guarantees)
    write_points(points, options.output)
    lines = [*comparison_table(points, SHOWN), "", _legend(len(budgets)), f"points: {options.output}"]
    lines += [f"report: {options.report}"] if options.report else []
    return CommandResult("\n".join(lines), {"path": options.output, "report": options.report, "points": points})


def _swept_methods(options: argparse.Namespace) -> dict[str, calibrate.Method]:
    """Return the methods of a sweep by name, on combined answers and with a guarantee where the options say so."""
    if options.contract != CONTRACT:
        check_idle(options, "delta", why=WITHOUT_DELTA)
    chosen = {name: calibrate.METHODS[name] for name in options.methods}
    if options.combine:
        chosen = {name: calibrate.combined(method, options.combine) for name, method in chosen.items()}
    if options.contract:
        chosen = {name: _certified(method, options.contract, options) for name, method in chosen.items()}
    return chosen


def _swept_data(options: argparse.Namespace) -> tuple[dict[str, Any], Costs, Sequence[Any]]:
    """Return the tables by their names, costs and budgets of a sweep, of recorded outputs or of a log."""
    if is_log(options.labelled):
        if options.test:
            raise BadInput("one half of a log tests what the other calibrates: give one log alone")
        log = read_logged(options)
        tables = halves(log, options.seed)
        return tables, log.costs, options.budgets or log_budgets(log.costs, [*tables.values()], 17)
    check_order(options, {"labelled": "table", "test": "table", "--costs": "costs"})
    check_idle(options, *OF_LOGS, why=LOGS_ALONE)
    if not options.test or not options.costs:
        raise BadInput("a sweep needs test data and costs: give recorded outputs of test data, and --costs FILE")
    tables, costs = dict(zip(TABLES, _tables(options, *TABLES), strict=True)), _costs(options.costs)
    return tables, costs, options.budgets or even_budgets(costs)


def _legend(budgets: int) -> str:
    """Return what the marks of a table of methods mean, and how many of the budgets it shows."""
    marks = "budgets in percent of the full network's cost; * best within the budget, ! spent more than the budget"
    return f"{marks}; {SHOWN} of {budgets} budgets" if budgets > SHOWN else marks


def run_report(options: argparse.Namespace) -> CommandResult:
    """Draw what `fit` found, the points of sweeps, or what a log shows, on one HTML page."""
    check_distinct(*options.points, options.output)
    title = options.title or ", ".join(options.points)
    page = write_report(_reported(options.points), options.output, title=title).resolve()
    return CommandResult(str(page), {"path": page})


def run_benchmark(options: argparse.Namespace) -> CommandResult:
    """Compare methods, and your own, on many recordings."""
    check_distinct(options.output, options.leaderboard, options.differences, options.report, *options.recordings)
    known = {Path(path).stem: Recording.load(path) for path in options.recordings}
    known = known or {name: recordings.load(name) for name in recordings.names()}
    chosen: dict[str, calibrate.Method] = BENCHMARKED
    if options.methods:
        chosen = {name: calibrate.METHODS[name] for name in options.methods}
    chosen = chosen | {text.rpartition(":")[2]: _own_method(text) for text in options.method}
    given = {"resplits": options.resplits, "seed": options.seed, "jobs": options.jobs}
    compared = benchmark(chosen, known, **given, progress=not options.quiet)
    results, places = compared.results, leaderboard(compared)
    made = provenance("numpy", "scipy")
    write_results(results, options.output, **made)
    if options.leaderboard:
        write_results(places, options.leaderboard, **made)
    if options.differences:
        write_results(compared.differences, options.differences, **made)
    if options.report:
        title = f"{len(chosen)} methods on {len(known)} recordings, {options.resplits} resplits each"
        write_report(as_points(results, known), options.report, title=title, guarantees=[*map(str, places)])
    paths = {"path": options.output, "leaderboard": options.leaderboard, "report": options.report}
    paths |= {"differences": options.differences}
    return CommandResult("\n".join(map(str, places)), paths | {"places": places})


def _own_method(text: str) -> calibrate.Method:
    """Return the function that text such as mine.py:mine names; the file is run."""
    path, _, name = text.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise BadInput(f"--method {text}: there is no file {path!r}; give FILE.py:FUNCTION")
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules.pop(Path(path).stem, None)  # another file of this name
    found = getattr(import_module(Path(path).stem), name, None)
    if not callable(found):
        raise BadInput(f"--method {text}: {path} has no function {name!r}")
    method: calibrate.Method = found
    return method


def even_budgets(costs: Costs) -> list[str]:
    """Return 17 percentages from the first exit to the full network; one alone where the first exit costs more.

    >>> even_budgets(Costs([4.0, 4.0], [0.0, 0.0]))[:2]
    ['50%', '53.125%']
    >>> even_budgets(Costs([4.0, 1.0], [2.0, 0.0]))
    ['120%']
    """
    lowest = np.ceil(100 * costs.shares()[0])
    return list(dict.fromkeys(f"{percent:g}%" for percent in np.linspace(lowest, max(lowest, 100), 17)))


def _reported(paths: Sequence[str]) -> ReportedNetwork | dict[str, ReportedNetwork]:
    """Return the network of one table of points or folder, or those of several by the names of their files."""
    networks = [reported_folder(path) if Path(path).is_dir() else _points_in(path) for path in paths]
    if len(paths) == 1:
        return networks[0]
    stems = [Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else paths
    return dict(zip(names, networks, strict=True))


def _points_in(path: str) -> ReportedNetwork:
    points = reported_points(path) if is_log(path) else read_points(path)
    return ReportedNetwork(points, exits=points[0].exits)


def _calibrated(options: argparse.Namespace) -> Policy:
    check_distinct(options.labelled, options.output, options.costs)
    labelled, unlabelled, costs = _calibration_data(options)
    logged = is_log(options.labelled)
    _check_risk(options)
    contract: Any = options.contract or (None if options.risk or (logged and not options.max_costs) else CONTRACT)
    contract = None if contract == NO_CONTRACT else contract
    if not options.risk and contract != CONTRACT:
        check_idle(options, "delta", why=WITHOUT_DELTA)
    method = calibrate.METHODS[options.method or _default_method(options, labelled)]
    own = own_options(method, options.set, progress=not options.quiet)
    if options.budget is None and not options.risk:
        raise BadInput("there is no budget: give --budget 50%, or --risk and --alpha for the cheapest policy")
    method = calibrate.combined(method, options.combine) if options.combine else method
    method = calibrate.pruned(method) if options.prune else method
    if options.risk:
        risk = named(options, "risk", "alpha", "delta", "seed")
        method = calibrate.certified_risk(method, **risk, cost=contract, max_costs=options.max_costs)
    elif contract:
        method = _certified(method, contract, options)
    return method(costs, options.budget, labelled, unlabelled, **own)


def _check_risk(options: argparse.Namespace) -> None:
    """Check that a risk has a limit, and a limit a risk; a loss of accuracy is both."""
    if options.max_accuracy_loss is not None:
        if options.risk:
            raise BadInput("--max-accuracy-loss is --risk excess_error with its --alpha: give one of them")
        options.risk, options.alpha = "excess_error", options.max_accuracy_loss
    if not options.risk:
        check_idle(options, "alpha", why="is the highest risk that is allowed: give --risk, and say of what")
    elif options.alpha is None:
        raise BadInput(f"--risk {options.risk} has no limit: give --alpha 0.01, which allows one point")


def _calibration_data(options: argparse.Namespace) -> tuple[HeadOutputs, HeadOutputs | None, Costs]:
    """Return the labelled table, the unlabelled one where there is one, and costs, of recorded outputs or of a log."""
    if is_log(options.labelled):
        labelled, costs = read_logged(options)
        return labelled, None, costs
    check_order(options, {"labelled": "table", "--costs": "costs"})
    check_idle(options, *OF_LOGS, "max_costs", why=LOGS_ALONE)
    if not options.costs:
        raise BadInput("there are no costs: give --costs FILE, or cumulative costs as --costs 1,2.5,4")
    return *_tables(options, "labelled", "unlabelled"), _costs(options.costs)


def _default_method(options: argparse.Namespace, labelled: HeadOutputs) -> str:
    """Return the usual method; `search` of a log; `eero` where many fits of another would be slow."""
    if labelled.costs is not None and labelled.labels is not None:
        return "search"
    many = options.prune or options.set or options.combine or options.risk
    return "eero" if many else default_method(labelled)


def _certified(method: calibrate.Method, contract: str, options: argparse.Namespace) -> calibrate.Method:
    """Return the method with this guarantee on cost."""
    check_delta(options.delta)
    of_cost = {"delta": options.delta} if contract == "probability" else {}
    drawn = {} if contract == "batch" else {"seed": options.seed}  # a batch keeps its budget whatever is drawn
    most = {"max_costs": options.max_costs} if getattr(options, "max_costs", None) else {}
    return calibrate.CONTRACTS[contract](method, **of_cost, **drawn, **most)


def _tables(options: argparse.Namespace, *names: str) -> list[Any]:
    """Return the tables of these options; one given twice is one object, so that methods notice."""

    @cache
    def load(path: Path) -> HeadOutputs:
        table = HeadOutputs.load_sample(path) if path.is_dir() else HeadOutputs.load(path)
        return table.with_score(options.score) if options.score else table

    paths = [getattr(options, name) for name in names]
    return [path and load(Path(path).resolve()) for path in paths]


def _costs(text: str) -> Costs:
    """Return costs from a file, or cumulative ones from text such as 1,2.5,4."""
    if Path(text).is_file():
        return Costs.load(text)
    try:
        return as_costs([float(part) for part in text.split(",")])
    except ValueError as error:
        if isinstance(error, AlightError):
            raise
        raise BadInput(
            f"costs {text!r}: there is no such file, and they are not numbers; give costs.json or 1,2.5,4"
        ) from error


def _table_arguments(*further: str) -> tuple[Argument, ...]:
    return (
        argument(
            "labelled",
            help="recorded outputs with labels, .npz or a folder of partitions, of which at most a million rows are"
            " drawn at random; gives risks, and thresholds too if alone; or a log of models (.csv, .parquet, .jsonl)",
        ),
        *(argument(name, nargs="?", help=f"recorded outputs of {name} data, with labels (.npz)") for name in further),
        argument("--unlabelled", metavar="FILE", help="recorded outputs that set the thresholds"),
        argument("--costs", help="costs.json, or cumulative costs of the exits as 1,2.5,4"),
        argument("--score", help="score to use instead of the one the tables were recorded with"),
        *LOG_OPTIONS,
    )


def _contract_options(*contracts: str, default: str = "") -> tuple[Argument, ...]:
    shown = f" (default: {default})" if default else ""
    return (
        argument("--contract", choices=contracts, help=f"what to guarantee about cost{shown}"),
        argument("--delta", type=float, default=0.05, help="probability that a guarantee fails (default: 0.05)"),
        argument("--seed", type=int, default=0, help="of the contract's split and salt (default: 0)"),
    )


DEFAULTS = (
    f"default: auto from {LEAST_LABELS:,} labels on, else eero, as beside --combine, --prune, --set or --risk;"
    " search of a log"
)
METHODS = f"{', '.join(calibrate.METHODS)} ({DEFAULTS})"
COMBINED = argument(
    "--combine", choices=[*calibrate.COMBINE], help="how to combine the answers of exits (default: not)"
)
RISKS = ["error", "excess_error", "disagreement"]
SLOW = "default: all but genetic, which takes seconds"
COMMANDS = (
    Command(
        run_calibrate,
        (
            *_table_arguments(),
            argument("--budget", help="a number in the costs' unit, '50%%', '2.5 GFLOPs', '3 ms', '$1.20/1000'"),
            argument("--method", choices=[*calibrate.METHODS], metavar="METHOD", help=METHODS),
            COMBINED,
            argument("--prune", action="store_true", help="close exits that are not worth their heads"),
            *_contract_options(
                NO_CONTRACT,
                "mean",
                "probability",
                "batch",
                "stream",
                default=f"{CONTRACT}; {NO_CONTRACT} beside --risk",
            ),
            argument("--risk", choices=RISKS, help="what to guarantee about predictions"),
            argument("--alpha", type=float, help="highest risk that is allowed"),
            argument(
                "--max-accuracy-loss", type=share, help="--risk excess_error with this --alpha; 0.01 is one point"
            ),
            MAX_COSTS,
            set_option("a method's own option"),
            output_option(None, "where to write the policy (JSON)"),
        ),
        (
            "calibrate labelled.npz --costs costs.json --budget 50% -o policy.json",
            "calibrate labelled.npz --costs costs.json --budget 50% --combine vote -o policy.json",
            "calibrate labelled.npz --costs costs.json --budget 50% --contract stream",
            "calibrate labelled.npz --costs costs.json --budget 50% --contract none",
            "calibrate labelled.npz --costs costs.json --risk excess_error --alpha 0.1",
            "calibrate partitions --costs costs.json --budget 50% -o policy.json",
            "calibrate log.csv --budget 50%",
            "calibrate log.csv --budget '$2/1000' --max-costs 0.0015,0.006,0.02 -o policy.json",
            "calibrate log.csv --max-accuracy-loss 0.05",
        ),
    ),
    Command(
        run_sweep,
        (
            *_table_arguments("test"),
            argument("--methods", type=methods, default=list(FAST_METHODS), help=SLOW),
            COMBINED,
            argument("--budgets", type=words, help="default: 17 from the cheapest exit to the full network"),
            *_contract_options("mean", "probability"),
            output_option("points.csv"),
            argument("--report", metavar="FILE", type=output, help="where to draw the points as an HTML page"),
            argument("--images", metavar="FILE", help="test images, in the table's order, to show there (.npz)"),
        ),
        (
            "sweep labelled.npz test_outputs.npz --costs costs.json --report report.html",
            "sweep labelled.npz test_outputs.npz --costs costs.json --methods eero,geometric --budgets 40%,60% --json",
            "sweep log.csv --methods search,eero --budgets 30%,60%",
        ),
    ),
    Command(
        run_report,
        (
            argument(
                "points",
                nargs="+",
                help="folder that `alight fit` wrote, CSV of `alight sweep`, or a log; each is one network",
            ),
            output_option("report.html"),
            argument("--title", help="default: the name of the CSV"),
        ),
        ("report points.csv -o report.html --title 'Our network'", "report log.csv -o report.html"),
    ),
    Command(
        run_benchmark,
        (
            argument("recordings", nargs="*", help="files that Recording.save wrote (default: all that are installed)"),
            argument("--methods", type=methods, help="default: all but genetic, and combined answers"),
            argument("--method", metavar="FILE.py:FUNCTION", action="append", default=[], help="one of your own"),
            argument("--resplits", type=count, default=20, help="of each recording, its own split first (default: 20)"),
            argument("--seed", type=int, default=0, help="of the resplits (default: 0)"),
            argument("--jobs", type=count, default=1, help="processes (default: 1)"),
            output_option("benchmark.csv"),
            argument("--leaderboard", metavar="FILE", type=output, help="where to write it as CSV, too"),
            argument(
                "--differences", metavar="FILE", type=output, help="where to write paired differences to auto (CSV)"
            ),
            argument("--report", metavar="FILE", type=output, help="where to draw it as an HTML page"),
        ),
        (
            "benchmark --methods eero,geometric --resplits 2 --report benchmark.html",
            "benchmark mine.npz --methods eero --method mine.py:mine --jobs 2",
        ),
    ),
)
