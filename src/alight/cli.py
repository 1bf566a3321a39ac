"""The command line: each command reads what the one before it wrote. Progress on stderr, results on stdout."""

import argparse
import inspect
import os
import shutil
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
from alight.policies.saved import load_policy
from alight.report import write_report
from alight.scores import SCORES

TOKENIZER = "tokenizer"  # the folder beside a network that reads text
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
    except ImportError as error:
        needed = {"torch": "torch", "safetensors": "torch", "timm": "vision", "torchvision": "vision"}.get(
            str(error.name)
        )
        return _fail(f'{error}: pip install "alight[{needed}]"' if needed else str(error))
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


def attach_command(options: argparse.Namespace) -> None:
    """Put exits with untrained heads on a network, and write it to a folder."""
    import torch

    from alight.models.multi_exit import Normalisation
    from alight.models.named import from_name
    from alight.models.weights import load_backbone

    torch.manual_seed(options.seed)
    try:
        model = from_name(
            options.network,
            num_classes=options.classes,
            pretrained=options.pretrained,
            after=options.after,
            head=options.head,
            count=options.count,
            image_size=options.image_size,
            arguments=_settings(options.set),
        )
    except TypeError as error:
        raise BadInput(f"{options.network} does not take these options ({error})") from error
    if options.weights:
        load_backbone(model, options.weights)
    if options.mean:
        model.normalisation = Normalisation(options.mean, options.std or (1.0,) * len(options.mean))
    folder = model.save(options.output)
    _keep_tokenizer(Path(options.network.removeprefix("transformers:")), folder)
    print(f"{options.network}, {model.num_classes} classes, exits after {', '.join(model.exits)}: {folder.resolve()}")


def train_command(options: argparse.Namespace) -> None:
    """Train the heads of a network, or all of it; an interrupted training goes on where it was."""
    from alight.models.folder import load_model
    from alight.models.training import train_heads
    from alight.runtime.loading import load_data

    source, folder = Path(options.model), Path(options.output or options.model)
    model = load_model(source)
    given = _data_options(options)
    data = load_data(options.data, model, split=options.split, shuffle=True, augment=options.augment, **given)
    validation = load_data(options.validation, model, split="test", **given) if options.validation else None
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.safetensors"
    settings = {"mode": options.mode, "epochs": options.epochs, "device": _device(options.device)}
    try:
        history = train_heads(
            model,
            data,
            validation=validation,
            checkpoint=checkpoint,
            **settings | _own_options(train_heads, options.set, taken=[*settings, "validation", "checkpoint"]),
        )
    except TypeError as error:
        raise BadInput(f"--set {' '.join(options.set)}: a value is of the wrong kind ({error})") from error
    if int(os.environ.get("RANK", "0")) == 0:  # of the processes that torchrun started, the first
        model.save(folder)
        if source.resolve() != folder.resolve() and (source / TOKENIZER).is_dir():
            shutil.copytree(source / TOKENIZER, folder / TOKENIZER, dirs_exist_ok=True)
        checkpoint.unlink(missing_ok=True)
        print(history)


def record_command(options: argparse.Namespace) -> None:
    """Write down what every head says about every sample."""
    from alight.models.folder import load_model
    from alight.runtime.loading import load_data
    from alight.runtime.recorder import record_to

    _distinct(options.data, options.output)
    model = load_model(options.model)
    data = load_data(options.data, model, split=options.split, **_data_options(options))
    recorded = record_to(
        options.output,
        model,
        data,
        score=options.score,
        features=options.features,
        log_probabilities=options.log_probabilities,
        **_speed_settings(options, model, partial(_first_inputs, data)),
    )
    print(recorded)
    if recorded.accuracies:
        pairs = zip(model.exits, recorded.accuracies, strict=True)
        print("accuracy " + ", ".join(f"{name} {accuracy:.1%}" for name, accuracy in pairs))


def costs_command(options: argparse.Namespace) -> None:
    """Measure what every stage and every head costs."""
    from alight.models.folder import load_model
    from alight.models.measure import head_overhead, measure_costs, time_stages
    from alight.runtime.loading import example_of

    model = load_model(options.model).to(_device(options.device))
    example = example_of(model, options.tokens)
    if options.unit == "ms":
        timings = time_stages(model, example, options.batch_size)
        costs = timings.costs()
        print(timings)
    else:
        costs = measure_costs(model, example, options.unit, options.batch_size)
        print(f"heads before the last: {head_overhead(costs):.2%} of the plain network")
    costs.save(options.output)
    print(f"{costs}: {options.output}")


def predict_command(options: argparse.Namespace) -> None:
    """Answer every sample under a policy."""
    from alight.models.folder import load_model
    from alight.runtime.answers import write_answers
    from alight.runtime.loading import load_data, names_of
    from alight.runtime.predictor import Predictor

    _distinct(options.data, options.policy, options.output)
    model, policy = load_model(options.model), load_policy(options.policy)
    data = load_data(options.data, model, split=options.split, **_data_options(options))
    predictor = Predictor(
        model,
        policy,
        batch_size=options.batch_size,
        probabilities=policy.lens is None,
        allow_mismatch=options.allow_mismatch,
        **_speed_settings(options, model, partial(_first_inputs, data), policy),
    )
    decisions = predictor.run(data)
    write_answers(decisions, options.output, names=names_of(data), classes=model.classes, unit=policy.unit)
    print(f"{decisions}: {options.output}")


def plan_command(options: argparse.Namespace) -> None:
    """Measure whether exits pay on this machine, and write the policy that does."""
    from alight.models.folder import load_model
    from alight.runtime.loading import example_of
    from alight.runtime.plan import plan

    _distinct(options.labelled, options.output)
    model = load_model(options.model)
    made = plan(
        model,
        HeadOutputs.load(options.labelled),
        example=example_of(model, options.tokens),
        batch_size=options.batch_size,
        budget=options.budget,
        max_accuracy_loss=options.max_accuracy_loss,
        speed=options.speed,
        **_switches(options),
    )
    made.policy.save(options.output)
    print(f"{made}\n\n{made.policy}\n\n{options.output}")


def bench_command(options: argparse.Namespace) -> None:
    """Time a policy beside the plain network on real samples."""
    from alight.models.batches import as_batch
    from alight.models.folder import load_model
    from alight.runtime.bench import compare
    from alight.runtime.loading import load_data

    model, policy = load_model(options.model), load_policy(options.policy)
    given = _data_options(options) | {"batch_size": options.samples}
    data = load_data(options.data, model, split=options.split, **given)
    batch = as_batch(next(iter(data)))
    for size in options.batch_sizes:
        settings = _speed_settings(options, model, lambda: batch.inputs, policy, size)
        measured = compare(model, policy, batch.inputs, size, allow_mismatch=options.allow_mismatch, **settings)
        print(measured)
    if batch.labels is not None:
        print(f"accuracy with exits {measured.decisions.accuracy(batch.labels.numpy()):.1%} on {len(batch)} samples")


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


def _own_options(method: Callable[..., Any], settings: Sequence[str], taken: Sequence[str] = ()) -> dict[str, Any]:
    """A function's own keyword arguments, from name=value; those taken have an option of their own."""
    parameters = inspect.signature(method).parameters.items()
    known = [name for name, each in parameters if each.kind is each.KEYWORD_ONLY and name not in taken]
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


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for a function that takes any, from name=value."""
    if odd := [setting for setting in settings if "=" not in setting]:
        raise BadInput(f"--set {odd[0]!r}: write NAME=VALUE")
    return {setting.partition("=")[0]: _value(setting.partition("=")[2]) for setting in settings}


def _data_options(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = options.tokenizer or Path(options.model) / TOKENIZER
    return {"batch_size": options.batch_size, "workers": options.workers, "tokenizer": tokenizer}


def _switches(options: argparse.Namespace) -> dict[str, Any]:
    """The speed tools that were asked for, by their names as keyword arguments."""
    asked = {
        "dtype": options.dtype,
        "channels_last": options.channels_last,
        "compile": options.compile,
        "num_threads": options.threads,
    }
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    return {"device": _device(options.device), **given}


def _speed_settings(
    options: argparse.Namespace,
    model: Any,
    example: Callable[[], Any],
    policy: Policy | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """The speed tools that were asked for, or with --speed auto those that pay here."""
    from alight.runtime.tune import tune_speed

    if options.speed is None:
        return _switches(options)
    fixed = {**_switches(options), "allow_mismatch": getattr(options, "allow_mismatch", False)}
    tuned = tune_speed(model, policy, batch_size=batch_size or options.batch_size, example=example(), **fixed)
    print(tuned, file=sys.stderr)
    return {name: value for name, value in tuned.settings.items() if name != "allow_mismatch"}


def _first_inputs(data: Any) -> Any:
    from alight.models.batches import as_batch

    return as_batch(next(iter(data))).inputs


def _device(asked: str | None) -> str:
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _keep_tokenizer(source: Path, folder: Path) -> None:
    """Put the tokenizer of a folder beside the network that reads its tokens."""
    if (source / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
        tokenizer.save_pretrained(str(folder / TOKENIZER))


def _value(text: str) -> float | int | bool | str | list[float] | None:
    words = {"true": True, "yes": True, "false": False, "no": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    try:
        return [float(part) for part in text.split(",")] if "," in text else text
    except ValueError:
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

    _network_commands(command)
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


def _network_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """The commands that run a network."""
    added = command("attach", attach_command, "alight attach torchvision:resnet18 --weights resnet18.safetensors")
    added.add_argument("network", help="timm:NAME, torchvision:NAME, transformers:FOLDER or zoo:NAME")
    added.add_argument("--after", type=_modules, default="auto", help="modules, as layer1,layer2 (default: auto)")
    added.add_argument("--count", type=int, default=3, help="exits before the end that auto places (default: 3)")
    added.add_argument("--head", default="auto", help="kind of head (default: by the shape of the features)")
    added.add_argument("--classes", type=int, help="number of classes (default: the network's own)")
    added.add_argument("--image-size", type=int, help="height and width of images (default: the network's own)")
    added.add_argument("--pretrained", action="store_true", help="download the library's weights")
    added.add_argument("--weights", help="trained weights of the plain network (.safetensors)")
    added.add_argument("--mean", type=_numbers, help="taken off each channel of images in 0..1, as 0.5,0.5,0.5")
    added.add_argument("--std", type=_numbers, help="what each channel is then divided by")
    added.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="the network's own option")
    added.add_argument("--seed", type=int, default=0, help="of fresh weights (default: 0)")
    added.add_argument("-o", "--output", default="model", help="folder for the network (default: model)")

    added = command("train", train_command, "alight train model train.npz --epochs 20 --set learning_rate=0.003")
    _data_arguments(added, split="train")
    added.add_argument("--validation", help="data to judge every epoch by")
    added.add_argument("--mode", choices=["frozen", "joint", "mixed"], default="frozen", help="default: frozen")
    added.add_argument("--epochs", type=int, default=10, help="default: 10")
    added.add_argument("--augment", action="store_true", help="flip and move images at random")
    added.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="an option of train_heads, as distill=0.5"
    )
    added.add_argument("-o", "--output", help="folder for the trained network (default: where it was)")

    added = command("record", record_command, "alight record model test.npz --output test_outputs.npz")
    _data_arguments(added, split="test")
    added.add_argument("--score", choices=SCORES, default="margin", help="default: margin")
    added.add_argument("--features", type=_modules, default=(), help="further scores to keep, as negative_entropy")
    added.add_argument("--log-probabilities", action="store_true", help="keep those too, in half precision")
    _running_arguments(added, allow_mismatch=False)
    added.add_argument("-o", "--output", type=_output, default="outputs.npz", help="default: outputs.npz")

    added = command("costs", costs_command, "alight costs model --unit ms --batch-size 256 --output costs.json")
    added.add_argument("model", help="folder of a network with exits")
    added.add_argument("--unit", choices=["FLOPs", "MACs", "ms", "J"], default="FLOPs", help="default: FLOPs")
    added.add_argument("--batch-size", type=int, help="default: 2")
    added.add_argument("--tokens", type=int, help="of a text (default: 16)")
    added.add_argument("--device", help="default: cuda if there is one")
    added.add_argument("-o", "--output", type=_output, default="costs.json", help="default: costs.json")

    added = command("predict", predict_command, "alight predict model policy.json images.npz --output answers.csv")
    _data_arguments(added, split="test", policy=True)
    _running_arguments(added)
    added.add_argument("-o", "--output", type=_output, default="answers.csv", help=".csv or .parquet (answers.csv)")

    added = command("plan", plan_command, "alight plan model labelled.npz --batch-size 64 --max-accuracy-loss 0.01")
    added.add_argument("model", help="folder of a network with exits")
    added.add_argument("labelled", help="recorded outputs with labels (.npz)")
    added.add_argument("--batch-size", type=int, default=64, help="default: 64")
    added.add_argument("--budget", help="'60%%' of the plain network's time, or '0.2 ms' per sample")
    added.add_argument("--max-accuracy-loss", type=float, help="0.01 is one point (the default without a budget)")
    added.add_argument("--tokens", type=int, help="length of texts to measure with")
    added.add_argument("--device", help="default: a GPU if there is one")
    added.add_argument("-o", "--output", type=_output, default="policy.json", help="default: policy.json")
    _running_arguments(added, allow_mismatch=False)

    added = command("bench", bench_command, "alight bench model policy.json images.npz --batch-sizes 1,64")
    _data_arguments(added, split="test", policy=True)
    _running_arguments(added)
    added.add_argument("--samples", type=int, default=512, help="how many to run (default: 512)")
    added.add_argument("--batch-sizes", type=_whole_numbers, default=(1, 64), help="default: 1,64")


def _running_arguments(parser: argparse.ArgumentParser, *, allow_mismatch: bool = True) -> None:
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: the network's own")
    parser.add_argument("--channels-last", action="store_true", help="images with their channels last in memory")
    parser.add_argument("--threads", type=int, help="of the host (default: as many as torch takes)")
    parser.add_argument("--compile", action="store_true", help="compile each part of the network first")
    parser.add_argument(
        "--speed", choices=["auto"], help="measure first which of these switches pay here; --compile is then tried too"
    )
    if allow_mismatch:
        parser.add_argument("--allow-mismatch", action="store_true", help="take a policy of another network too")


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _data_arguments(parser: argparse.ArgumentParser, split: str, *, policy: bool = False) -> None:
    parser.add_argument("model", help="folder of a network with exits")
    if policy:
        parser.add_argument("policy", help="JSON that `alight calibrate` or `alight plan` wrote")
    parser.add_argument(
        "data", help=".npz of images and labels, folder of class folders, cifar100:FOLDER, .jsonl of texts, ..."
    )
    parser.add_argument("--split", default=split, help=f"part of a data set that has several (default: {split})")
    parser.add_argument("--batch-size", type=int, default=128, help="default: 128")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data (default: 0)")
    parser.add_argument("--tokenizer", help="folder of a tokenizer (default: that of the model)")
    parser.add_argument("--device", help="default: cuda if there is one")


def _modules(text: str) -> str | list[str]:
    return text if text == "auto" else text.split(",")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


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
