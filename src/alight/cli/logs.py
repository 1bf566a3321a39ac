"""Logs of models on the command line: what `calibrate`, `sweep` and `report` do with one, and how it is shown."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alight import calibrate
from alight.cli.arguments import numbers, words
from alight.cli.command import Argument, argument
from alight.cli.kinds import kind_of
from alight.costs import Costs
from alight.display import accuracy_text, aligned, percent, quantity
from alight.errors import BadInput
from alight.evaluation import Point, sweep
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay
from alight.routing.logs import NAMES, RequestLog, read_log

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl")
REPORTED = ("search", "eero", "global_threshold", "best_single_exit")  # methods that the report of a log compares
BUDGETS = 9  # in that report
WITHOUT_MOST = (
    "Not guaranteed: every call has its own cost; --max-costs, the most that a call of each model can cost, makes a"
    " guarantee possible."
)


OF_LOGS = ("column", "models", "unit", "incomplete")  # options that a log alone has


def is_log(path: str) -> bool:
    """Return whether there is a log of models at this path: a table of text or Parquet that alight did not write."""
    return Path(path).suffix in SUFFIXES and kind_of(path) == "data"


def read_logged(options: argparse.Namespace) -> RequestLog:
    """Return the log that is the first argument of a command, read as its options say."""
    if options.costs or options.unlabelled:
        raise BadInput("a log has its own costs, and is one table: leave --costs and --unlabelled out")
    pairs = [text.partition("=") for text in options.column]
    if wrong := [kind for kind, _, name in pairs if kind not in NAMES or not name]:
        raise BadInput(f"--column {wrong[0]!r}: write KIND=NAME with KIND one of {', '.join(NAMES)}")
    named = {kind: name for kind, _, name in pairs}
    return read_log(options.labelled, **named, unit=options.unit, models=options.models, incomplete=options.incomplete)


def halves(log: RequestLog, seed: int) -> dict[str, Any]:
    """Return the tables of a sweep: one half of the requests calibrates, the other tests."""
    labelled, test = log.outputs.split(0.5, np.random.default_rng(seed))
    return {"labelled": labelled, "unlabelled": None, "test": test}


def log_budgets(costs: Costs, tables: Sequence[HeadOutputs | None], count: int) -> list[str]:
    """Return percentages from what the cheapest model costs in every table to all that the largest costs."""
    first = max(float(table.costs[:, 0].mean()) for table in tables if table is not None and table.costs is not None)
    lowest = np.ceil(100 * first / costs.full)
    return list(dict.fromkeys(f"{each:g}%" for each in np.linspace(lowest, max(lowest, 100), count)))


def reported_points(path: str) -> list[Point]:
    """Return the points that a report of a log shows."""
    log = read_log(path)
    tables = halves(log, 0)
    methods = {name: calibrate.METHODS[name] for name in REPORTED}
    budgets = log_budgets(log.costs, [*tables.values()], BUDGETS)
    return sweep(methods, log.costs, budgets, labelled=tables["labelled"], test=tables["test"])


def beside_the_largest(policy: Policy, log: RequestLog) -> list[str]:
    """Return lines of a table: accuracy and cost of the policy on the log, beside the largest model alone."""
    decisions, largest = (
        replay(policy, log.outputs, batch_size=1 if policy.reads_costs else None),
        log.outputs.exits[-1],
    )
    assert log.outputs.costs is not None
    graded = log.outputs.labels is not None
    per, times = ("1,000 requests", 1000) if log.costs.unit == "USD" else ("request", 1)
    spent = [decisions.mean_cost, float(log.outputs.costs[:, -1].mean())]
    right = [decisions.accuracy(log.outputs.truth()), float(log.outputs.correct()[:, -1].mean())]
    return [
        f"on this log of {len(log.outputs):,} requests, which set the thresholds:",
        *aligned(
            [
                ["", "this policy", f"{largest} alone"],
                ["accuracy" if graded else f"agrees with {largest}", *map(accuracy_text, right)],
                [f"cost per {per}", *(quantity(times * each, log.costs.unit) for each in spent)],
                ["of the largest", *(percent(each / spent[1]) for each in spent)],
            ]
        ),
    ]


LOG_OPTIONS: tuple[Argument, ...] = (
    argument("--column", metavar="KIND=NAME", action="append", default=[], help=f"of a log: {', '.join(NAMES)}"),
    argument("--models", type=words, help="of a log: these alone, in this order (default: all, cheapest first)"),
    argument("--unit", help="of a log's costs (default: as its column says, or USD)"),
    argument(
        "--incomplete",
        choices=["refuse", "drop"],
        default="refuse",
        help="what to do with requests that were not given to every model (default: refuse)",
    ),
)
MAX_COSTS = argument(
    "--max-costs", type=numbers, help="of a log: the most that a call of each model can cost, 0.001,0.02"
)
