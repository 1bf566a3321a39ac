"""Commands that run or time a network with exits: record, costs, predict, plan, bench; here, or on Ray's machines."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alight import calibrate
from alight.cli.arguments import (
    ALLOW_MISMATCH,
    DEVICE,
    FORCE,
    MODEL,
    POLICY,
    RUN_OR_TUNE,
    RUNTIMES,
    SALT,
    check_data,
    check_distinct,
    check_idle,
    check_unused,
    count,
    counts,
    data_arguments,
    named,
    output,
    output_option,
    policy_of,
    run_settings,
    salted_by,
    share,
    torch_device,
    words,
)
from alight.cli.command import Command, CommandResult, argument
from alight.cli.kinds import check_order
from alight.cli.tables import even_budgets
from alight.display import accuracy_text, aligned, layer_label, percent, quantity
from alight.engine.settings import TORCH, RunSettings
from alight.errors import BadInput
from alight.evaluation import evaluate_policy, sweep
from alight.files import TEST
from alight.outputs import KEPT, Decisions, HeadOutputs
from alight.policies import load_policy
from alight.policies.policy import Policy
from alight.provenance import measured_on
from alight.report import MeasuredSpeed, ReportedNetwork, write_report
from alight.scores import SCORES

if TYPE_CHECKING:
    from alight.planning.plan import Plan

ERRORS = 3  # standard errors by which samples that are like those of the calibration may spend more than the budget
RECORDED = ("score", "features", "top")  # options of record
OF_RAY = ("actors", "gpus_per_actor", "on_error", "partition_rows")
FILES = (".csv", ".parquet", ".npz")
BESIDE_A_PLAN = ("eero", "best_single_exit")  # methods that a plan's page compares, in milliseconds
PLAN_VALUES = (
    *("pays", "throughput", "full_throughput", "speedup", "accuracy", "full_accuracy", "largest_loss"),
    *("open_exits", "batch_size", "settings", "reason"),
)


def run_record(options: argparse.Namespace) -> CommandResult:
    """Record the outputs of every head for every sample."""
    check_distinct(options.data, options.output)
    check_order(options, {"model": "network", "data": "data"})
    if options.engine == "ray":
        return _record_on_ray(options)
    _check_local(options)
    check_data(options.data, options.tokenizer)
    check_unused(options.output, options.force)
    if Path(options.output).suffix != ".npz":
        named_so = Path(options.output).with_suffix(".npz")
        raise BadInput(f"recorded outputs are .npz, by which other commands know them: give -o {named_so}")
    from alight.engine.recorder import Recorder

    model, data = _model_and_data(options)
    settings, _ = _tuned_settings(options, model, data)
    recorder = Recorder(model, **named(options, *RECORDED), settings=settings)
    recorded = recorder.write(options.output, data, progress=not options.quiet)
    lines = [str(recorded)]
    if recorded.accuracies:
        pairs = zip(map(layer_label, model.exits), recorded.accuracies, strict=True)
        lines.append("accuracy: " + ", ".join(f"{name} {accuracy_text(accuracy)}" for name, accuracy in pairs))
    return CommandResult("\n".join(lines), recorded)


def run_costs(options: argparse.Namespace) -> CommandResult:
    """Measure the cost of every stage and every head."""
    check_order(options, {"model": "network"})
    from alight.costing.measure import head_overhead, measure_costs, time_stages
    from alight.engine.backends.cascade import Cascade
    from alight.engine.predictor import load_network
    from alight.networks.multi_exit import example_of

    model, progress = load_network(options.model), not options.quiet
    is_cascade = isinstance(model, Cascade)
    example = None if is_cascade else example_of(model.to(torch_device(options)), options.tokens)
    if options.unit == "ms":
        timings = time_stages(model, example, options.batch_size, progress=progress)
        costs, lines = timings.costs(), [str(timings), ""]
    else:
        costs, lines = measure_costs(model, example, options.unit, options.batch_size, progress=progress), []
    costs.save(options.output)
    lines += [f"cost per sample; full network {quantity(costs.full, costs.unit)}", *aligned(costs.columns(model.exits))]
    if not is_cascade:
        lines.append(f"heads before the last: {percent(head_overhead(costs))} of the full network")
    lines.append(f"costs: {options.output}")
    values = {"path": options.output, "unit": costs.unit, "exits": model.exits, "stages": costs.stages}
    values |= {"heads": costs.heads, "cumulative": costs.cumulative(), "full_network": costs.full}
    return CommandResult("\n".join(lines), values)


def run_predict(options: argparse.Namespace) -> CommandResult:
    """Predict every sample under a policy."""
    check_distinct(options.data, options.policy, options.output)
    check_order(options, {"model": "network", "policy": "policy", "data": "data"})
    policy = load_policy(policy_of(options.model, options.policy))
    salted = salted_by(policy, options.data, options.salt)
    if options.engine == "ray":
        return _predict_on_ray(options, salted)
    _check_local(options)
    check_data(options.data, options.tokenizer)
    from alight.data.formats import names_of, write_answers
    from alight.engine.predictor import Predictor

    model, data = _model_and_data(options)
    settings, rebatch = _tuned_settings(options, model, data, policy)
    terms = {**named(options, "batch_size", "allow_mismatch"), "probabilities": policy.keeps_answers}
    predictor = Predictor(model, salted, settings=settings, rebatch=rebatch, **terms)
    decisions = predictor.run(data, progress=not options.quiet)
    write_answers(decisions, options.output, names=names_of(data), classes=model.classes)
    bench = shlex.join(["alight", "bench", *filter(None, [options.model, options.policy, options.data])])
    test = Path(options.model) / TEST
    known = _tested(HeadOutputs.load(test)) if test.is_file() else ""
    return decisions_result(decisions, options.output, policy, f"the full network's{known}: {bench}")


def _tested(table: HeadOutputs) -> str:
    """Return the accuracy of the full network on the test samples of `fit`, in a few words."""
    if table.labels is None:
        return ""
    accuracy = accuracy_text(float(table.correct()[:, -1].mean()))
    return f" was {accuracy} on {len(table):,} test samples; on these"


def decisions_result(decisions: Decisions, path: str, policy: Policy, note: str = "") -> CommandResult:
    """Return the result of a command that wrote these decisions; a note stands beside the accuracy."""
    accuracy = None if decisions.labels is None else decisions.accuracy()
    lines = [f"{len(decisions):,} sample{'s' * (len(decisions) != 1)}, answers: {path}"]
    if accuracy is not None:
        lines.append(f"accuracy {accuracy_text(accuracy)}" + (f" ({note})" if note else ""))
    lines += [spent_of(decisions, policy), *aligned(decisions.columns())]
    values = {"path": path, "num_samples": len(decisions), "accuracy": accuracy, **cost_values(decisions, policy)}
    return CommandResult("\n".join(lines), {**values, "exit_shares": decisions.exit_shares})


def spent_of(decisions: Decisions, policy: Policy) -> str:
    """Return what was spent per sample, and what was allowed, in a line."""
    share = (
        "" if policy.full_cost is None else f" ({percent(decisions.mean_cost / policy.full_cost)} of the full network)"
    )
    allowed = "" if policy.budget is None else f"; budget {policy.amount(policy.budget)}"
    error = decisions.spent.std() / len(decisions) ** 0.5
    if policy.budget is not None and decisions.mean_cost > policy.budget + ERRORS * error:
        allowed += ", overspent significantly: are these samples like those it was calibrated with?"
    return f"spent {quantity(decisions.mean_cost, policy.unit)} per sample{share}{allowed}"


def cost_values(decisions: Decisions, policy: Policy) -> dict[str, Any]:
    """Return what was spent per sample and what was allowed, for programs."""
    values = {"mean_cost": decisions.mean_cost, "budget": policy.budget, "full_cost": policy.full_cost}
    return {**values, "unit": policy.unit, "exits": decisions.exit_names}


def run_plan(options: argparse.Namespace) -> CommandResult:
    """Measure whether early exit pays on this machine, and write the best policy."""
    check_distinct(options.labelled, options.output, options.report)
    check_order(options, {"model": "network", "labelled": "table"})
    labelled = HeadOutputs.load(options.labelled)
    from alight.engine.backends.cascade import Cascade
    from alight.engine.predictor import load_network
    from alight.networks.multi_exit import example_of
    from alight.planning.plan import plan

    model = load_network(options.model)
    goal = {**named(options, "batch_size", "budget", "max_accuracy_loss"), "progress": not options.quiet}
    goal["speed"] = "runtimes" if options.runtimes else options.speed
    settings = run_settings(options, torch_device(options))
    example = None if isinstance(model, Cascade) else example_of(model, options.tokens)
    planned = plan(model, labelled, example=example, **goal, settings=settings)
    runtime, policy = planned.fastest
    policy.save(options.output)
    if options.report:
        _write_plan(planned, labelled, options.report, title=f"{options.model}: does it pay here?")
    values = {name: getattr(planned, name) for name in PLAN_VALUES} | {"policy": policy.to_dict(), "runtime": runtime}
    values["runtimes"] = [] if planned.runtimes is None else [planned.runtimes.values()]
    text = f"{planned}\n\n{policy}\n\npolicy: {options.output}"
    if runtime != TORCH:
        exported = shlex.join(["alight", "export", options.model, options.output, "-o", "FOLDER"])
        threads = f" --threads {planned.settings.threads}" if planned.settings.threads else ""
        ran = f"alight run FOLDER DATA --runtime {runtime} --batch-size {planned.batch_size}{threads}"
        text += f" for {runtime}: {exported}, then {ran}"
    text += f"\nreport: {options.report}" if options.report else ""
    return CommandResult(text, {"path": options.output, "report": options.report, **values})


def _write_plan(planned: "Plan", labelled: HeadOutputs, path: str, title: str) -> None:
    """Write a page with a plan, and with methods at many budgets, fitted to and tested on the samples of the plan."""
    from alight.planning.plan import FITTED

    fitted, judged = labelled.split(FITTED, np.random.default_rng(0))
    methods = {name: calibrate.METHODS[name] for name in BESIDE_A_PLAN}
    points = sweep(methods, planned.costs, even_budgets(planned.costs), labelled=fitted, test=judged)
    network = ReportedNetwork(
        points,
        exits=tuple(planned.model.exits),
        classes=tuple(getattr(planned.model, "classes", ())),  # a cascade has none
        plan=planned,
        note=measured_on("torch"),
        chosen=evaluate_policy(planned.policy, planned.costs, judged),
        speed=MeasuredSpeed(planned.speedup, batch_size=planned.batch_size),
        guarantees=[planned.reason],
    )
    write_report(network, path, title=title)


def run_bench(options: argparse.Namespace) -> CommandResult:
    """Time a policy against the full network on real samples."""
    check_order(options, {"model": "network", "policy": "policy", "data": "data"})
    check_data(options.data, options.tokenizer)
    policy = load_policy(policy_of(options.model, options.policy))
    from alight.data.batches import as_batch
    from alight.engine.predictor import known_labels
    from alight.planning.engines import RuntimeComparison, compare_runtimes
    from alight.planning.timing import compare

    model, data = _model_and_data(options, batch_size=options.samples)
    batch, measured = as_batch(next(iter(data)), model.input_spec).to("cpu"), []
    by_runtimes: list[RuntimeComparison] = []
    for size in options.batch_sizes:
        if not options.quiet:
            print(f"batches of {size}", file=sys.stderr)
        settings, rebatch = _tuned_settings(options, model, data, policy, size)
        terms = {"settings": settings, "rebatch": rebatch, "allow_mismatch": options.allow_mismatch}
        measured += [compare(model, policy, batch.inputs, size, **terms)]
        if options.runtimes:
            own = {"settings": settings, "compiled": settings.compile, "allow_mismatch": options.allow_mismatch}
            by_runtimes += [compare_runtimes(model, policy, batch.inputs, size, **own)]
    last = measured[-1]
    tables = ["\n".join(aligned(each.columns())) for each in measured] + [str(each) for each in by_runtimes]
    lines = [f"{len(batch):,} samples: {spent_of(last.decisions, policy)}"]
    accuracies: dict[str, float] = {}
    if (labels := known_labels([batch.labels], len(batch), model.input_spec.num_classes)) is not None:
        for name, decisions in {"accuracy": last.decisions, "full_accuracy": last.full_decisions}.items():
            accuracies[name] = decisions.accuracy(labels)
        lines.append("accuracy {} with exits, {} of the full network".format(*map(accuracy_text, accuracies.values())))
    names = [field.name for field in fields(last) if "decisions" not in field.name]
    runs = [{name: getattr(each, name) for name in names} for each in measured]
    values = {"num_samples": len(batch), **accuracies, **cost_values(last.decisions, policy), "runs": runs}
    values["runtimes"] = [each.values() for each in by_runtimes]
    return CommandResult("\n\n".join([*tables, "\n".join(lines)]), values)


def _model_and_data(options: argparse.Namespace, batch_size: int | None = None) -> tuple[Any, Any]:
    """Return the network, and its data in batches."""
    from alight.data.batches import load_data
    from alight.engine.predictor import load_network

    model = load_network(options.model)
    reading = named(options, "split", "workers", "tokenizer")
    return model, load_data(options.data, model.input_spec, batch_size=batch_size or options.batch_size, **reading)


def _tuned_settings(
    options: argparse.Namespace, model: Any, data: Any, policy: Policy | None = None, batch_size: int | None = None
) -> tuple[RunSettings, bool]:
    """Return how the network runs, and whether survivors are rebatched; with --speed auto what is fastest here."""
    settings = run_settings(options, torch_device(options))
    if options.speed is None:
        return settings, True
    from alight.data.batches import as_batch
    from alight.planning.tune import tune_speed

    tuned = tune_speed(
        model,
        policy,
        batch_size=batch_size or options.batch_size,
        example=as_batch(next(iter(data)), model.input_spec).inputs,
        settings=settings,
        allow_mismatch=getattr(options, "allow_mismatch", False),
    )
    if not options.quiet:
        print(tuned, file=sys.stderr)
    return tuned.settings, tuned.rebatch


# On many machines


def _predict_on_ray(options: argparse.Namespace, policy: Policy) -> CommandResult:
    """Predict all samples, in partitions."""
    from alight.cluster.jobs import predict_on_ray

    done = predict_on_ray(options.model, policy, *_job(options), allow_mismatch=options.allow_mismatch)
    rows = done.totals["rows"]
    cost = done.totals["spent"] / rows
    shares = [each / rows for each in done.totals["exits"]]
    right = [each / rows for each in done.totals["correct"]]
    accuracy = f"accuracy {accuracy_text(right[0])}, " if right else ""
    budget = "" if policy.budget is None else f" (budget {policy.amount(policy.budget)})"
    spent = f"spent {policy.amount(cost)} per sample{budget}"
    summary = f"{accuracy}{spent}, left at {_percentages(done.exits, shares)}"
    values = {"mean_cost": cost, "unit": policy.unit, "exit_shares": shares, "accuracy": right[0] if right else None}
    return _job_result(done, summary, values)


def _record_on_ray(options: argparse.Namespace) -> CommandResult:
    """Record all samples, in partitions."""
    from alight.cluster.jobs import record_on_ray

    done = record_on_ray(options.model, *_job(options), **named(options, *RECORDED))
    accuracies = [correct / done.totals["rows"] for correct in done.totals["correct"]]
    summary = f"accuracy: {_percentages(done.exits, accuracies)}" if accuracies else ""
    return _job_result(done, summary, {"accuracies": accuracies})


def _job(options: argparse.Namespace) -> tuple[str, str, Any]:
    """Return data, output and configuration of a job."""
    from alight.cluster.jobs import JobConfig

    if options.output.endswith(FILES):
        raise BadInput(f"--engine ray writes a folder of partitions and {options.output} is a file: give -o FOLDER")
    if options.speed:
        raise BadInput("--speed auto measures this machine, not those of the cluster: give the options that pay there")
    config = JobConfig(
        **named(options, "batch_size", "partition_rows", "tokenizer", "on_error"),
        workers=options.actors,
        gpus=options.gpus_per_actor,
        progress=not options.quiet,
        settings=run_settings(options, torch_device(options)),
    )
    return options.data, options.output, config


def _job_result(done: Any, summary: str, values: dict[str, Any]) -> CommandResult:
    sizes = {"num_samples": done.num_samples, "partitions": done.num_partitions, "done_before": done.done_before}
    sizes["bad_rows"] = done.totals["skipped"]
    return CommandResult(f"{done}\n{summary}".rstrip(), {"path": done.folder, **sizes, **values})


def _percentages(exits: Sequence[str], shares: Sequence[float]) -> str:
    pairs = zip(map(layer_label, exits), shares, strict=True)
    return ", ".join(f"{name} {accuracy_text(share)}" for name, share in pairs)


def _output_or_folder(text: str) -> str:
    """Return the path of a file that can be written to, of a folder that exists, or a URI."""
    return text if "://" in text or Path(text).is_dir() else output(text)


def _check_local(options: argparse.Namespace) -> None:
    """Check that the output is a file, which all engines but Ray write, and that Ray has no options."""
    check_idle(options, *OF_RAY, why="is for many machines: give --engine ray, or leave it out")
    if "://" in options.output or Path(options.output).is_dir():
        raise BadInput(f"{options.output} is a folder or a URI: give a file, or --engine ray")


def answers_file(text: str, *, or_folder: bool = False) -> str:
    """Return the path of a table of answers that can be written to: CSV, or Parquet; or that of a folder, or a URI."""
    if or_folder and ("://" in text or Path(text).is_dir()):
        return text
    if Path(text).suffix not in ("", ".csv", ".parquet"):
        raise argparse.ArgumentTypeError(f"{text!r}: answers are CSV or Parquet, so give .csv or .parquet")
    return output(text)


WHERE = "this process, or Ray: data and output are then paths or URIs, and the output a folder of partitions"
ON_ERROR = "of a bad row on Ray: end the job, or leave the row out and list it in bad-*.parquet"
ENGINE = (
    argument("--engine", choices=["local", "ray"], default="local", help=f"{WHERE} (default: local)"),
    argument("--actors", type=count, help="of Ray, each a network (default: as many as fit)"),
    argument("--gpus-per-actor", metavar="GPUS", type=float, default=1.0, help="0.5 lets two share one (default: 1)"),
    argument("--on-error", choices=["fail", "skip"], default="fail", help=f"{ON_ERROR} (default: fail)"),
    argument("--partition-rows", type=count, default=4096, help="samples of a partition (default: 4096)"),
)
COMMANDS = (
    Command(
        run_record,
        (
            *data_arguments("test"),
            argument("--score", choices=[*SCORES], default="margin", help="default: margin"),
            argument("--features", type=words, default=(), help="further scores to record, as negative_entropy"),
            argument("--top", type=count, default=KEPT, help=f"likeliest classes to record (default: {KEPT})"),
            *RUN_OR_TUNE,
            *ENGINE,
            output_option("outputs.npz", "with --engine ray a folder", _output_or_folder),
            FORCE,
        ),
        (
            "record model validation.npz -o labelled.npz",
            "record model test.npz --features negative_entropy -o test_outputs.npz",
            "record model validation.parquet --engine ray -o partitions",
        ),
    ),
    Command(
        run_costs,
        (
            MODEL,
            argument("--unit", choices=["FLOPs", "MACs", "ms", "J", "USD"], default="FLOPs", help="default: FLOPs"),
            argument("--batch-size", type=count, help="default: 2"),
            argument("--tokens", type=count, help="of a text (default: 16)"),
            DEVICE,
            output_option("costs.json"),
        ),
        ("costs model -o costs.json", "costs model --unit ms --batch-size 32 -o costs_ms.json"),
    ),
    Command(
        run_predict,
        (
            *data_arguments("test", POLICY),
            *RUN_OR_TUNE,
            SALT,
            ALLOW_MISMATCH,
            *ENGINE,
            output_option(
                "answers.csv", ".csv or .parquet; with --engine ray a folder", partial(answers_file, or_folder=True)
            ),
        ),
        (
            "predict model policy.json test.npz -o answers.csv",
            "predict fitted test.npz",
            "predict model policy.json test.npz --json --quiet",
            "predict model policy.json test.parquet --engine ray -o answers",
        ),
    ),
    Command(
        run_plan,
        (
            MODEL,
            argument("labelled", help="recorded outputs with labels (.npz)"),
            argument("--batch-size", type=count, default=64, help="default: 64"),
            argument("--budget", help="'60%%' of the full network's time, or '0.2 ms' per sample"),
            argument("--max-accuracy-loss", type=share, help="0.01 is one point (the default without a budget)"),
            argument("--tokens", type=count, help="length of texts to measure with"),
            output_option("policy.json"),
            argument("--report", metavar="FILE", type=output, help="HTML page to show the plan on"),
            RUNTIMES,
            *RUN_OR_TUNE,
        ),
        (
            "plan model labelled.npz --batch-size 32 --max-accuracy-loss 0.01 -o policy.json",
            "plan model labelled.npz --batch-size 32 --budget 80% -o policy.json",
        ),
    ),
    Command(
        run_bench,
        (
            *data_arguments("test", POLICY, batch_size=False),
            *RUN_OR_TUNE,
            ALLOW_MISMATCH,
            argument("--samples", type=count, default=512, help="how many to run (default: 512)"),
            argument("--batch-sizes", type=counts, default=(1, 64), help="default: 1,64"),
            RUNTIMES,
        ),
        ("bench model policy.json test.npz --samples 64 --batch-sizes 1,32",),
    ),
)
