"""The command that does it all: from a network to a folder that runs within a budget, and a report."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from alight.cli.arguments import (
    DEVICE,
    FORCE,
    NORMALISATION,
    RUNTIMES,
    TOKENIZER_FOLDER,
    check_data,
    check_distinct,
    check_idle,
    check_unused,
    compared,
    count,
    folder_option,
    named,
    new_folder,
    normalisation,
    output,
    set_option,
    share,
    times,
    torch_device,
    training_settings,
    words_or_auto,
)
from alight.cli.command import Command, CommandResult, argument
from alight.cli.kinds import check_kind, kind_of
from alight.cli.networks import LIBRARIES, check_name
from alight.costs import Costs
from alight.errors import BadInput
from alight.files import POLICY, WEIGHTS
from alight.fitting.calls import Steps
from alight.fitting.fitted import FittedPredictor
from alight.fitting.heads import NamedNetwork
from alight.fitting.steps import BATCH_SIZE, BUDGET, Goal, fit_to
from alight.outputs import HeadOutputs
from alight.report import Baseline

OF_TRAINING = ("mode", "epochs", "set")
OF_NETWORKS = ("pretrained", "weights", "classes", "image_size", "mean", "std", "tokenizer", "device")


def run_fit(options: argparse.Namespace) -> CommandResult:
    """Fit a network to a budget in one go: exits, training, a guaranteed policy, a folder, a report."""
    goal = Goal(options.budget, options.max_accuracy_loss, options.speedup)
    _check_kinds(options)
    _check_options(options)
    *training, validation = options.data
    if len(training) > 1:
        raise BadInput(f"{len(options.data)} data sets: give training and validation data, or validation data alone")
    check_data(*options.data, options.weights, options.tokenizer)
    check_distinct(*options.data, options.report)
    check_unused(options.output, options.force, WEIGHTS)
    check_unused(options.output, options.force, POLICY)
    with new_folder(Path(options.output)) as folder:  # before the work, which would be lost where none can be made
        if options.network.endswith(".json"):
            network, (data, steps) = Costs.load(options.network), _recorded(validation, options)
            after = _places(options)
            predictor = fit_to(goal, network, None, data, batch_size=options.batch_size, steps=steps, after=after)
        else:
            predictor = _fitted(goal, training[0] if training else None, validation, options)
        predictor.save(folder, force=options.force)
    if options.report:
        name, accuracy, cost = options.smaller or ("", 0.0, "")
        smaller = Baseline(name, accuracy, predictor.fitted.costs.budget(cost)) if name else None
        predictor.report(options.report, title=f"{options.network}: fitted to a budget", smaller=smaller)
    by_runtimes = [predictor.compare_runtimes()] if options.runtimes else []
    places = f"{folder.resolve()}" + (f", {Path(options.report).resolve()}" if options.report else "")
    if not options.quiet:
        print(f"\nThe same by hand:\n\n{predictor.calls}\n", file=sys.stderr)
    values = {"path": folder.resolve(), "report": options.report, **predictor.fitted.values()}
    values["runtimes"] = [each.values() for each in by_runtimes]
    text = "\n\n".join(map(str, [predictor.summary, *by_runtimes]))
    return CommandResult(f"{text}\n{places}", values)


def _check_kinds(options: argparse.Namespace) -> None:
    """Raise if the network is not the first argument, or data is not what a network or a file of costs needs."""
    given = [options.network, *options.data]
    networks = [each for each in given if each.partition(":")[0] in LIBRARIES or kind_of(each) == "network"]
    networks += [each for each in given if ".py:" in each]
    if networks and options.network not in networks:
        words = shlex.join([networks[0], *(each for each in given if each != networks[0])])
        raise BadInput(f"the arguments are in another order: write `alight fit {words} ...`")
    if options.runtimes and (options.network.endswith(".json") or kind_of(options.data[-1]) == "table"):
        raise BadInput("--runtimes runs samples, and these are recorded outputs: give validation data")
    if options.network.endswith(".json"):
        if len(options.data) > 1:
            raise BadInput(
                f"{options.data[0]} is training data, and {options.network} has no network to train: leave it out"
            )
        check_kind(options.network, "costs")
        check_kind(options.data[-1], "table")


def _check_options(options: argparse.Namespace) -> None:
    """Raise if an option was given that does nothing for this network and these data."""
    if options.smaller and not options.report:
        raise BadInput("--smaller is a line of the report: give --report FILE, too")
    if options.tokenizer and (options.mean or options.std):
        raise BadInput("--tokenizer is for texts, and --mean and --std are for images: give one of them")
    if len(options.data) == 1:
        check_idle(options, *OF_TRAINING, why="is for a training, and there are no training data: leave it out")
    if options.network.endswith(".json"):
        check_idle(options, *OF_NETWORKS, why=f"is for a network, and {options.network} has none: leave it out")


def _fitted(goal: Goal, train: str | None, validation: str, options: argparse.Namespace) -> FittedPredictor:
    """Return the predictor of a network that torch runs."""
    if not Path(options.network).is_dir():
        check_name(options.network, options.pretrained)
    own = named(options, "pretrained", "weights", "image_size")
    network = NamedNetwork(options.network, num_classes=options.classes, device=torch_device(options), **own)
    settings = None if train is None else _settings(network, options)
    preprocess = normalisation(options) or options.tokenizer
    held_out, steps = _recorded(validation, options)
    return fit_to(goal, network, train, held_out, preprocess, settings, options.batch_size, steps, _places(options))


def _places(options: argparse.Namespace) -> str | int | list[str]:
    """Return where exits go: after modules, or how many of them."""
    if options.after != "auto" and options.count is not None:
        raise BadInput("--after names the exits, and --count says how many to place: give one of them")
    return options.after if options.count is None else options.count


def _recorded(validation: str, options: argparse.Namespace) -> tuple[Any, Steps]:
    """Return recorded outputs from their file, the path of other data; and steps that know the file."""
    if kind_of(validation) != "table":
        return validation, Steps(not options.quiet)
    sources = {"validation": f"alight.HeadOutputs.load({validation!r})"}
    return HeadOutputs.load(validation), Steps(not options.quiet, sources=sources)


def _settings(network: NamedNetwork, options: argparse.Namespace) -> Any:
    """Return how to train where the options say something about it; else None, and `fit` decides."""
    chosen = {name: value for name, value in named(options, "mode", "epochs").items() if value is not None}
    if not chosen and not options.set:
        return None
    return training_settings(options, chosen if network.is_trained else {"mode": "joint", **chosen})


NETWORK = (
    "timm:NAME, torchvision:NAME, transformers:FOLDER, zoo:NAME; your own, run to build it: FILE.py:NAME,"
    " package.module:NAME; the folder of a saved network; or costs.json with a recording as data"
)
DATA = "training data, then validation data; validation data alone where the heads are trained already"
COMMANDS = (
    Command(
        run_fit,
        (
            argument("network", help=NETWORK),
            argument("data", nargs="+", metavar="DATA", help=DATA),
            argument(
                "--budget", help=f"'50%%' of the full network, '2.5 GFLOPs', '3 ms' per sample (default: {BUDGET}%)"
            ),
            argument(
                "--max-accuracy-loss",
                type=share,
                help="instead: the fastest that loses no more; 1%% is one point",
            ),
            argument("--speedup", type=times, help="instead: 2 or 2x, so many times as fast as the full network, here"),
            argument("--report", metavar="FILE", type=output, help="where to write a report (HTML)"),
            argument(
                "--smaller",
                metavar="NAME,ACCURACY,COST",
                type=compared,
                help="another network as a line of the report, as 'ResNet-10,70%%,450 MFLOPs'",
            ),
            argument("--after", type=words_or_auto, default="auto", help="exits, as layer1,layer2 (default: auto)"),
            argument("--count", type=count, help="exits before the end that auto places (default: 3, where they pay)"),
            argument(
                "--mode", choices=["frozen", "joint", "mixed"], help="default: frozen; joint without trained weights"
            ),
            argument("--epochs", type=count, help="of the training (default: 10)"),
            set_option("a field of TrainingSettings, as distill=0.5"),
            argument("--classes", type=count, help="number of classes (default: the network's own)"),
            argument("--image-size", type=count, help="height and width of images (default: the network's own)"),
            argument("--pretrained", action="store_true", help="download the library's weights"),
            argument("--weights", metavar="FILE", help="trained weights of the full network (.safetensors, .pt, .pth)"),
            *NORMALISATION,
            TOKENIZER_FOLDER,
            argument("--batch-size", type=count, default=BATCH_SIZE, help=f"default: {BATCH_SIZE}"),
            RUNTIMES,
            DEVICE,
            folder_option("fitted", "folder for the network, its policy and tables"),
            FORCE,
        ),
        (
            "fit model train.npz validation.npz --budget 60% --epochs 1 -o fitted --report report.html",
            "fit costs.json labelled.npz --budget 60% -o decided",
        ),
    ),
)
