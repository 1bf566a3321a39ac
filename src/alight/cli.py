"""The command line: each command reads what the one before it wrote. Progress on stderr, results on stdout."""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from alight import __version__, calibrate, recordings
from alight.costs import Costs, as_costs
from alight.errors import AlightError, BadInput
from alight.evaluation import Point, read_points, sweep, write_points
from alight.files import check_writable
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy, aligned
from alight.policies.route import replay, replay_on
from alight.report import write_report

SLOW = ("genetic", "auto")  # seconds for each budget, so only on request


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for what cannot be done, 2 for a command that makes no sense, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except AlightError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        print("alight: interrupted, nothing half-written is left", file=sys.stderr)
        return 130
    return 0


def demo(options: argparse.Namespace) -> None:
    """Compare all methods on recorded outputs of a real network."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    points = {name: _demo_points(recordings.load(name), name) for name in recordings.NAMES}
    name = recordings.NAMES[0]
    recording = recordings.load(name)
    given = (recording.costs, "50%", recording.labelled)
    policy = calibrate.certify(calibrate.eero, *given, contract="probability")
    policy.save(folder / "policy.json")
    careful = calibrate.certify(
        calibrate.eero, recording.costs, None, recording.labelled, risk="excess_error", alpha=0.05
    )
    careful.save(folder / "careful_policy.json")
    batches = calibrate.certify(calibrate.eero, *given, contract="batch")
    stream = calibrate.certify(calibrate.eero, *given, contract="stream")
    batches.save(folder / "batch_policy.json")
    stream.save(folder / "stream_policy.json")
    promises = [
        f"For half of the plain network's FLOPs: {policy.certificate}",
        f"In every batch: {batches.certificate}",
        f"Along a stream: {stream.certificate}",
        f"For at most 5 points lost: {careful.certificate}",
    ]
    for each, its_points in points.items():
        write_points(its_points, folder / f"{each}.csv")
    title = "Early exit on CIFAR-100: a ResNet-18 with 8 exits"
    report = write_report(points, folder / "report.html", title=title, promises=promises)
    print(
        f"ResNet-18 on CIFAR-100, 8 exits, heads trained on the frozen backbone: calibrated on "
        f"{len(recording.labelled):,} images, tested on {len(recording.test):,} others\n"
    )
    print("\n".join(_demo_table(points[name])))
    print(f"\nA policy for 50% of the plain network, with a promise, in {folder / 'policy.json'}:\n\n{policy}\n")
    chosen = calibrate.auto(*given)
    chosen.save(folder / "auto_policy.json")
    for kept, where in ((policy, "policy.json"), (chosen, "auto_policy.json"), (careful, "careful_policy.json")):
        decisions = replay(kept, recording.test)
        print(
            f"{where} on the test images: {decisions.accuracy(recording.test.known_labels('the demo')):.1%} right,"
            f" {decisions.mean_cost / recording.costs.plain:.1%} of the plain network spent"
        )
    print(
        f"\nauto_policy.json is for the same budget and was chosen by cross-fitting: {chosen.settings['winner']} won."
    )
    print(f"careful_policy.json is the cheapest that keeps another promise:\n{careful.certificate}")
    print(_batches_and_stream(batches, stream, recording.test))
    print(f"\nOpen the report: {report.resolve()}")


def _batches_and_stream(batches: Policy, stream: Policy, test: HeadOutputs) -> str:
    """What the harder promises cost: batches by rank, and a stream that turns hard half-way."""
    size, half = 250, len(test) // 2
    test = test.take(np.random.default_rng(0).permutation(len(test)))  # recorded class by class
    worst = replay(batches, test, batch_size=size).spent.reshape(-1, size).mean(axis=1).max()
    scores = np.concatenate([test.scores[:half], 0.3 * test.scores[half:]])
    decisions, (state, *_) = replay_on(stream, replace(test, scores=scores), batch_size=50)
    ahead = np.cumsum(decisions.spent - (stream.budget or 0.0))[49::50].max() / stream.costs[-1]
    alarm = f"after {state.alarmed_at - half} of them" if state.alarmed else "not"
    dearest, spent = worst / (batches.budget or 1.0), decisions.mean_cost / (stream.budget or 1.0)
    return (
        f"\nbatch_policy.json in batches of {size}: the dearest spends {dearest:.2%} of its budget.\n"
        f"stream_policy.json on images that turn hard half-way: {spent:.2%} of the budget spent, at no moment ahead by"
        f" more than {ahead:.2f} full passes; the alarm was raised {alarm}."
    )


def calibrate_command(options: argparse.Namespace) -> None:
    """Fit a policy to a budget, and promise to keep it."""
    labelled, unlabelled = _tables(options, "labelled", "unlabelled")
    method = calibrate.METHODS[options.method]
    _distinct(options.labelled, options.output, options.costs)
    own = _own_options(method, options.set)
    try:
        if options.contract or options.risk:
            promised = {
                "contract": options.contract,
                "delta": options.delta,
                "risk": options.risk,
                "alpha": options.alpha,
            }
            policy = calibrate.certify(
                method, _costs(options.costs), options.budget, labelled, unlabelled, **promised, **own
            )
        elif options.budget is None:
            raise BadInput("there is no budget: give --budget, or --risk and --alpha for the cheapest policy")
        else:
            policy = method(_costs(options.costs), options.budget, labelled, unlabelled, **own)
    except TypeError as error:  # the only values whose type nobody has checked yet
        raise BadInput(f"--set {' '.join(options.set)}: a value is of the wrong kind ({error})") from error
    if options.output:
        policy.save(options.output)
    print(policy)


def sweep_command(options: argparse.Namespace) -> None:
    """Compare methods over budgets on test data."""
    _distinct(options.output, options.report, options.costs)
    for path in (options.labelled, options.unlabelled, options.test):
        _distinct(path, options.output, options.report)
    labelled, unlabelled, test = _tables(options, "labelled", "unlabelled", "test")
    costs = _costs(options.costs)
    methods, promises = {name: calibrate.METHODS[name] for name in options.methods}, []
    if options.contract:
        promised = {"contract": options.contract, "delta": options.delta}
        methods = {name: partial(calibrate.certify, method, **promised) for name, method in methods.items()}
        promises = [f"Every policy here was certified: contract '{options.contract}', delta {options.delta:g}."]
    budgets = options.budgets or _even_budgets(costs)
    points = sweep(methods, costs, budgets, labelled=labelled, unlabelled=unlabelled, test=test, progress=True)
    if options.report:
        write_report(points, options.report, title=f"{options.test}", promises=promises)
    write_points(points, options.output)
    print("\n".join(str(point) for point in points if point.method in methods))


def report_command(options: argparse.Namespace) -> None:
    """Draw the points of a sweep as one HTML page."""
    _distinct(options.points, options.output)
    print(write_report(read_points(options.points), options.output, title=options.title or options.points).resolve())


def _demo_points(recording: recordings.Recording, name: str) -> list[Point]:
    print(name, file=sys.stderr)
    methods = {name: method for name, method in calibrate.METHODS.items() if name not in SLOW}
    budgets = [f"{percent:g}%" for percent in np.linspace(20, 100, 17)]
    return sweep(methods, recording.costs, budgets, labelled=recording.labelled, test=recording.test, progress=True)


def _demo_table(points: Sequence[Point]) -> list[str]:
    """Budget, accuracy and spent of EERO, of the paper's rule and of the best single exit."""
    columns = [["budget", *(f"{point.budget / point.plain_cost:.0%}" for point in points if point.method == "eero")]]
    for method, title in {"eero": "eero", "eero_marginal": "paper's rule", "best_single_exit": "single exit"}.items():
        own = [point for point in points if point.method == method]
        columns.append([f"  {title}", *(f"{point.accuracy:.1%}" for point in own)])
        columns.append(["spent", *(f"{point.mean_cost / point.plain_cost:.1%}" for point in own)])
    header, *rows = aligned(columns)
    return [header, *rows[::2]]  # every 10 %


def _tables(options: argparse.Namespace, *names: str) -> list[Any]:
    """The tables behind these options; one file given twice is one table, so that methods notice."""

    @cache
    def load(path: Path) -> HeadOutputs:
        table = HeadOutputs.load(path)
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


def _even_budgets(costs: Costs) -> list[str]:
    """17 percentages from the cheapest exit to the plain network."""
    lowest = np.ceil(100 * costs.cumulative()[0] / costs.plain)
    return [f"{percent:g}%" for percent in np.linspace(min(lowest, 100), 100, 17)]


def _own_options(method: Callable[..., Any], settings: Sequence[str]) -> dict[str, Any]:
    """A method's own keyword arguments, from name=value."""
    known = [name for name, each in inspect.signature(method).parameters.items() if each.kind is each.KEYWORD_ONLY]
    values: dict[str, Any] = {}
    if "progress" in known:
        known.remove("progress")
        values["progress"] = True
    for setting in settings:
        name, equals, value = setting.partition("=")
        if name not in known or not equals:
            raise BadInput(f"--set {setting!r}: write NAME=VALUE with NAME one of {', '.join(known) or 'none here'}")
        values[name] = _value(value)
    return values


def _value(text: str) -> float | int | bool | str | None:
    words = {"true": True, "yes": True, "false": False, "no": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _fail(message: str) -> int:
    print(f"alight: {message}", file=sys.stderr)
    return 1


def _output(text: str) -> str:
    """A path that can be written to, checked before the work begins."""
    try:
        check_writable(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from error
    return text


def _distinct(*paths: str | None) -> None:
    """Refuse a command that would write over what it reads, or write one file twice."""
    given = [Path(path).resolve() for path in paths if path]
    if len(set(given)) < len(given):
        twice = next(path for path in given if given.count(path) > 1)
        raise BadInput(f"{twice} is named twice among inputs and outputs: give each its own file")


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in calibrate.METHODS]:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}: choose among {', '.join(calibrate.METHODS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="alight", description="Early-exit inference under a budget.")
    parser.add_argument("--version", action="version", version=f"alight {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], example: str) -> argparse.ArgumentParser:
        text = inspect.getdoc(run)
        added = commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")
        added.set_defaults(run=run)
        return added

    added = command("demo", demo, "alight demo")
    added.add_argument("-o", "--output", default="alight-demo", help="folder for the report (default: alight-demo)")

    added = command(
        "calibrate",
        calibrate_command,
        "alight calibrate labelled.npz --costs costs.json --budget 50%% --output policy.json",
    )
    _table_options(added)
    added.add_argument("--budget", help="a number in the costs' unit, '50%%', '2.5 GFLOPs', '3 ms'")
    added.add_argument("--method", choices=calibrate.METHODS, default="eero", help="default: eero")
    _contract_options(added, "batch", "stream")
    added.add_argument(
        "--risk", choices=["error", "excess_error", "disagreement"], help="what to promise about answers"
    )
    added.add_argument("--alpha", type=float, help="the most that the risk may be")
    added.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a method's own option")
    added.add_argument("-o", "--output", type=_output, help="where to write the policy (JSON)")

    added = command(
        "sweep",
        sweep_command,
        "alight sweep labelled.npz test.npz --costs costs.json --methods eero,geometric --report report.html",
    )
    _table_options(added, "test")
    fast = [name for name in calibrate.METHODS if name not in SLOW]
    added.add_argument(
        "--methods", type=_names, default=fast, help="default: all but genetic and auto, which take seconds each"
    )
    added.add_argument(
        "--budgets", type=lambda text: text.split(","), help="default: 17 from the cheapest exit to the plain network"
    )
    _contract_options(added)
    added.add_argument("-o", "--output", type=_output, default="points.csv", help="default: points.csv")
    added.add_argument("--report", type=_output, help="where to draw the points as an HTML page")

    added = command("report", report_command, "alight report points.csv --output report.html")
    added.add_argument("points", help="CSV that `alight sweep` wrote")
    added.add_argument("-o", "--output", type=_output, default="report.html", help="default: report.html")
    added.add_argument("--title", help="default: the name of the CSV")
    return parser


def _contract_options(parser: argparse.ArgumentParser, *further: str) -> None:
    contracts = ["mean", "probability", *further]
    parser.add_argument("--contract", choices=contracts, help="what to promise about cost")
    parser.add_argument("--delta", type=float, default=0.05, help="probability that a promise fails (default: 0.05)")


def _table_options(parser: argparse.ArgumentParser, *further: str) -> None:
    parser.add_argument(
        "labelled", help="recorded outputs with labels (.npz); gives risks, and thresholds too if alone"
    )
    for name in further:
        parser.add_argument(name, help=f"recorded outputs of {name} data, with labels (.npz)")
    parser.add_argument("--unlabelled", help="recorded outputs that set the thresholds (.npz)")
    parser.add_argument("--costs", required=True, help="costs.json, or cumulative costs of the exits as 1,2.5,4")
    parser.add_argument("--score", help="another score of the tables than the one they were recorded with")


if __name__ == "__main__":
    sys.exit(main())
