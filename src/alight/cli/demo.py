"""`alight demo`: all methods on recorded outputs of a real network, and a report to look at."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from alight import calibrate, recordings
from alight.cli.command import Command, Found
from alight.cli.given import new_folder
from alight.cli.options import output_folder
from alight.cli.tables import SLOW
from alight.evaluation import Point, sweep, write_points
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy, aligned
from alight.policies.route import replay, replay_on
from alight.report import write_report


def run_demo(options: argparse.Namespace) -> Found:
    """Compare all methods on recorded outputs of a real network."""
    with new_folder(Path(options.output)) as folder:
        return _shown(folder, quiet=options.quiet)


def _shown(folder: Path, *, quiet: bool) -> Found:
    points = {name: _points(recordings.load(name), name, quiet=quiet) for name in recordings.NAMES}
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
    report = write_report(points, folder / "report.html", title=title, promises=promises).resolve()
    lines = [
        f"ResNet-18 on CIFAR-100, 8 exits, heads trained on the frozen backbone: calibrated on "
        f"{len(recording.labelled):,} images, tested on {len(recording.test):,} others\n",
        *_table(points[name]),
        f"\nA policy for 50% of the plain network, with a promise, in {folder / 'policy.json'}:\n\n{policy}\n",
    ]
    chosen, measured = calibrate.auto(*given), {}
    chosen.save(folder / "auto_policy.json")
    for kept, where in ((policy, "policy.json"), (chosen, "auto_policy.json"), (careful, "careful_policy.json")):
        decisions = replay(kept, recording.test)
        accuracy = decisions.accuracy(recording.test.known_labels("the demo"))
        spent = decisions.mean_cost / recording.costs.plain
        measured[where] = {"accuracy": accuracy, "spent": spent}
        lines.append(f"{where} on the test images: {accuracy:.1%} right, {spent:.1%} of the plain network spent")
    lines += [
        f"\nauto_policy.json is for the same budget and was chosen by cross-fitting: {chosen.settings['winner']} won.",
        f"careful_policy.json is the cheapest that keeps another promise:\n{careful.certificate}",
        _batches_and_stream(batches, stream, recording.test),
        f"\nOpen the report: {report}",
    ]
    return Found("\n".join(lines), {"report": report, "folder": folder.resolve(), "policies": measured})


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


def _points(recording: recordings.Recording, name: str, *, quiet: bool) -> list[Point]:
    if not quiet:
        print(name, file=sys.stderr)
    methods = {name: method for name, method in calibrate.METHODS.items() if name not in SLOW}
    budgets = [f"{percent:g}%" for percent in np.linspace(20, 100, 17)]
    labelled, test, costs = recording
    return sweep(methods, costs, budgets, labelled=labelled, test=test, progress=not quiet)


def _table(points: Sequence[Point]) -> list[str]:
    """Budget, accuracy and spent of EERO, of the paper's rule and of the best single exit."""
    columns = [["budget", *(f"{point.budget / point.plain_cost:.0%}" for point in points if point.method == "eero")]]
    for method, title in {"eero": "eero", "eero_marginal": "paper's rule", "best_single_exit": "single exit"}.items():
        own = [point for point in points if point.method == method]
        columns.append([f"  {title}", *(f"{point.accuracy:.1%}" for point in own)])
        columns.append(["spent", *(f"{point.mean_cost / point.plain_cost:.1%}" for point in own)])
    header, *rows = aligned(columns)
    return [header, *rows[::2]]  # every 10 %


def _arguments(parser: argparse.ArgumentParser) -> None:
    folder = "folder for the report (default: alight-demo)"
    parser.add_argument("-o", "--output", metavar="FOLDER", type=output_folder, default="alight-demo", help=folder)


COMMANDS = (Command("demo", run_demo, _arguments, ("demo",)),)
