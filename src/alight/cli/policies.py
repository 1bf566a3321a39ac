"""Commands that run a network under a policy: predict, plan, bench."""

import argparse
import sys
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from alight import calibrate
from alight.cli.arguments import check_data, check_distinct, count, counts, output
from alight.cli.clusters import check_output_file, engine_arguments, output_or_folder, predicted_on_ray
from alight.cli.command import Command, CommandResult
from alight.cli.options import (
    data_arguments,
    data_options,
    first_inputs,
    mismatch_option,
    model_argument,
    output_option,
    run_arguments,
    run_settings,
    tuned_settings,
)
from alight.cli.tables import even_budgets
from alight.evaluation import sweep
from alight.files import check_network_folder
from alight.outputs import Decisions, HeadOutputs
from alight.policies import load_policy
from alight.provenance import measured_on
from alight.report import ReportedNetwork, write_report

if TYPE_CHECKING:
    from alight.planning.plan import Plan

BESIDE_A_PLAN = ("eero", "best_single_exit")  # methods that a plan's page compares, in milliseconds
PLAN_VALUES = (
    *("pays", "throughput", "full_throughput", "speedup", "accuracy", "full_accuracy", "largest_loss"),
    *("open_exits", "batch_size", "settings", "reason"),
)


def run_predict(options: argparse.Namespace) -> CommandResult:
    """Predict every sample under a policy."""
    check_distinct(options.data, options.policy, options.output)
    check_network_folder(options.model)
    if options.engine == "ray":
        return predicted_on_ray(options, load_policy(options.policy))
    check_output_file(options)
    check_data(options.data, options.tokenizer)
    policy = load_policy(options.policy)
    from alight.data.formats import load_data, names_of, write_answers
    from alight.engine.predictor import Predictor
    from alight.networks.store import load_model

    model = load_model(options.model)
    data = load_data(options.data, model.input_spec, split=options.split, **data_options(options))
    settings, rebatch = tuned_settings(options, model, partial(first_inputs, data, model), policy)
    predictor = Predictor(
        model,
        policy,
        settings=settings,
        batch_size=options.batch_size,
        rebatch=rebatch,
        probabilities=policy.keeps_predictions,
        allow_mismatch=options.allow_mismatch,
    )
    decisions = predictor.run(data, progress=not options.quiet)
    write_answers(decisions, options.output, names=names_of(data), classes=model.classes, unit=policy.unit)
    return decisions_result(decisions, options.output, policy.unit)


def decisions_result(decisions: Decisions, path: str, unit: str) -> CommandResult:
    """Return the result of a command that wrote these decisions."""
    cost, shares = decisions.mean_cost, decisions.exit_shares
    values = {"path": path, "num_samples": len(decisions), "mean_cost": cost, "unit": unit, "exit_shares": shares}
    return CommandResult(f"{decisions}: {path}", values)


def run_plan(options: argparse.Namespace) -> CommandResult:
    """Measure whether early exit pays on this machine, and write the best policy."""
    check_distinct(options.labelled, options.output, options.report)
    check_network_folder(options.model)
    labelled = HeadOutputs.load(options.labelled)
    from alight.networks.multi_exit import example_of
    from alight.networks.store import load_model
    from alight.planning.plan import plan

    model = load_model(options.model)
    planned = plan(
        model,
        labelled,
        example=example_of(model, options.tokens),
        batch_size=options.batch_size,
        budget=options.budget,
        max_accuracy_loss=options.max_accuracy_loss,
        speed=options.speed,
        settings=run_settings(options),
    )
    planned.policy.save(options.output)
    if options.report:
        _write_plan(planned, labelled, options.report, title=f"{options.model}: does it pay here?")
    values = {name: getattr(planned, name) for name in PLAN_VALUES} | {"policy": planned.policy.to_dict()}
    text = f"{planned}\n\n{planned.policy}\n\n{options.output}"
    return CommandResult(text, {"path": options.output, "report": options.report, **values})


def _write_plan(planned: "Plan", labelled: HeadOutputs, path: str, title: str) -> None:
    """Write a page with a plan, and with methods at many budgets, fitted on one half of the samples."""
    fitted, judged = labelled.split(0.5, np.random.default_rng(0))
    methods = {name: calibrate.METHODS[name] for name in BESIDE_A_PLAN}
    points = sweep(methods, planned.costs, even_budgets(planned.costs), labelled=fitted, test=judged)
    network = ReportedNetwork(points, exits=tuple(planned.model.exits), plan=planned, note=measured_on("torch"))
    write_report(network, path, title=title)


def run_bench(options: argparse.Namespace) -> CommandResult:
    """Time a policy against the full network on real samples."""
    check_network_folder(options.model)
    check_data(options.data, options.tokenizer)
    policy = load_policy(options.policy)
    from alight.data.batches import as_batch
    from alight.data.formats import load_data
    from alight.networks.store import load_model
    from alight.planning.timing import compare

    model = load_model(options.model)
    reading = data_options(options) | {"batch_size": options.samples}
    data = load_data(options.data, model.input_spec, split=options.split, **reading)
    batch, measured = as_batch(next(iter(data)), model.input_spec).to("cpu"), []
    for size in options.batch_sizes:
        if not options.quiet:
            print(f"batches of {size}", file=sys.stderr)
        settings, rebatch = tuned_settings(options, model, lambda: batch.inputs, policy, size)
        terms = {"settings": settings, "rebatch": rebatch, "allow_mismatch": options.allow_mismatch}
        measured += [compare(model, policy, batch.inputs, size, **terms)]
    lines, accuracy = [str(each) for each in measured], None
    if batch.labels is not None:
        accuracy = measured[-1].decisions.accuracy(batch.labels.numpy())
        lines.append(f"accuracy with exits {accuracy:.1%} on {len(batch)} samples")
    names = [field.name for field in fields(measured[0]) if field.name != "decisions"]
    runs = [{name: getattr(each, name) for name in names} for each in measured]
    return CommandResult("\n".join(lines), {"num_samples": len(batch), "accuracy": accuracy, "runs": runs})


def _predict_arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser, split="test", policy=True)
    run_arguments(parser)
    mismatch_option(parser)
    engine_arguments(parser)
    output_option(parser, "answers.csv", ".csv or .parquet; with --engine ray a folder", output_or_folder)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("labelled", help="recorded outputs with labels (.npz)")
    parser.add_argument("--batch-size", type=count, default=64, help="default: 64")
    parser.add_argument("--budget", help="'60%%' of the full network's time, or '0.2 ms' per sample")
    parser.add_argument("--max-accuracy-loss", type=float, help="0.01 is one point (the default without a budget)")
    parser.add_argument("--tokens", type=count, help="length of texts to measure with")
    output_option(parser, "policy.json")
    parser.add_argument("--report", metavar="FILE", type=output, help="HTML page to show the plan on")
    run_arguments(parser)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser, split="test", policy=True)
    run_arguments(parser)
    mismatch_option(parser)
    parser.add_argument("--samples", type=count, default=512, help="how many to run (default: 512)")
    parser.add_argument("--batch-sizes", type=counts, default=(1, 64), help="default: 1,64")


COMMANDS = (
    Command(
        "predict",
        run_predict,
        _predict_arguments,
        (
            "predict model policy.json test.npz -o answers.csv",
            "predict model policy.json test.npz --json --quiet",
            "predict model policy.json test.parquet --engine ray -o answers",
        ),
    ),
    Command(
        "plan",
        run_plan,
        _plan_arguments,
        (
            "plan model labelled.npz --batch-size 32 --max-accuracy-loss 0.01 -o policy.json",
            "plan model labelled.npz --batch-size 32 --budget 60% -o policy.json",
        ),
    ),
    Command(
        "bench", run_bench, _bench_arguments, ("bench model policy.json test.npz --samples 64 --batch-sizes 1,32",)
    ),
)
