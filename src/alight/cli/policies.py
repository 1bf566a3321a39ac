"""Commands that run a network under a policy: predict, plan, bench."""

import argparse
import sys
from dataclasses import fields
from functools import partial
from typing import Any

from alight.cli.clusters import check_output_file, engine_arguments, output_or_folder, predicted_on_ray
from alight.cli.command import Command, Found
from alight.cli.given import check_data, check_network
from alight.cli.options import count, counts, device_option, distinct, output, output_option
from alight.cli.switches import (
    data_arguments,
    data_options,
    first_inputs,
    model_argument,
    speed_settings,
    switch_arguments,
    switches,
)
from alight.demo.pages import write_plan
from alight.outputs import HeadOutputs
from alight.policies.saved import load_policy


def run_predict(options: argparse.Namespace) -> Found:
    """Answer every sample under a policy."""
    distinct(options.data, options.policy, options.output)
    check_network(options.model)
    if options.engine == "ray":
        return predicted_on_ray(options, load_policy(options.policy))
    check_output_file(options)
    check_data(options.data, options.tokenizer)
    policy = load_policy(options.policy)
    from alight.data.formats import load_data, names_of
    from alight.engine.answers import write_answers
    from alight.engine.predictor import Predictor
    from alight.networks.store import load_model

    model = load_model(options.model)
    data = load_data(options.data, model, split=options.split, **data_options(options))
    predictor = Predictor(
        model,
        policy,
        batch_size=options.batch_size,
        probabilities=policy.lens is None,
        allow_mismatch=options.allow_mismatch,
        **speed_settings(options, model, partial(first_inputs, data), policy),
    )
    decisions = predictor.run(data, progress=not options.quiet)
    write_answers(decisions, options.output, names=names_of(data), classes=model.classes, unit=policy.unit)
    return Found(
        f"{decisions}: {options.output}",
        {
            "path": options.output,
            "samples": len(decisions),
            "mean_cost": decisions.mean_cost,
            "unit": policy.unit,
            "exit_shares": decisions.exit_shares,
        },
    )


def run_plan(options: argparse.Namespace) -> Found:
    """Measure whether exits pay on this machine, and write the policy that does."""
    distinct(options.labelled, options.output, options.report)
    check_network(options.model)
    labelled = HeadOutputs.load(options.labelled)
    from alight.data.formats import example_of
    from alight.networks.store import load_model
    from alight.planning.plan import plan

    model = load_model(options.model)
    made = plan(
        model,
        labelled,
        example=example_of(model, options.tokens),
        batch_size=options.batch_size,
        budget=options.budget,
        max_accuracy_loss=options.max_accuracy_loss,
        speed=options.speed,
        **switches(options),
    )
    made.policy.save(options.output)
    if options.report:
        write_plan(made, labelled, options.report, title=f"{options.model}: does it pay here?")
    told = ("pays", "throughput", "dense_throughput", "speedup", "accuracy", "dense_accuracy", "largest_loss")
    values = {name: getattr(made, name) for name in (*told, "open_exits", "batch_size", "settings", "reason")}
    text = f"{made}\n\n{made.policy}\n\n{options.output}"
    return Found(text, {"path": options.output, "report": options.report, **values, "policy": made.policy.to_dict()})


def run_bench(options: argparse.Namespace) -> Found:
    """Time a policy beside the plain network on real samples."""
    check_network(options.model)
    check_data(options.data, options.tokenizer)
    policy = load_policy(options.policy)
    from alight.data.batches import as_batch
    from alight.data.formats import load_data
    from alight.networks.store import load_model
    from alight.planning.timing import compare

    model = load_model(options.model)
    given = data_options(options) | {"batch_size": options.samples}
    data = load_data(options.data, model, split=options.split, **given)
    batch, measured = as_batch(next(iter(data))), []
    for size in options.batch_sizes:
        if not options.quiet:
            print(f"batches of {size}", file=sys.stderr)
        settings = speed_settings(options, model, lambda: batch.inputs, policy, size)
        measured += [compare(model, policy, batch.inputs, size, allow_mismatch=options.allow_mismatch, **settings)]
    lines, accuracy = [str(each) for each in measured], None
    if batch.labels is not None:
        accuracy = measured[-1].decisions.accuracy(batch.labels.numpy())
        lines.append(f"accuracy with exits {accuracy:.1%} on {len(batch)} samples")
    return Found(
        "\n".join(lines), {"samples": len(batch), "accuracy": accuracy, "runs": [_figures(e) for e in measured]}
    )


def _figures(measured: Any) -> dict[str, Any]:
    """The figures of a comparison, without the answers."""
    return {each.name: getattr(measured, each.name) for each in fields(measured) if each.name != "decisions"}


def _predict_arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser, split="test", policy=True)
    switch_arguments(parser)
    engine_arguments(parser)
    output_option(parser, "answers.csv", ".csv or .parquet; with --engine ray a folder", output_or_folder)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("labelled", help="recorded outputs with labels (.npz)")
    parser.add_argument("--batch-size", type=count, default=64, help="default: 64")
    parser.add_argument("--budget", help="'60%%' of the plain network's time, or '0.2 ms' per sample")
    parser.add_argument("--max-accuracy-loss", type=float, help="0.01 is one point (the default without a budget)")
    parser.add_argument("--tokens", type=count, help="length of texts to measure with")
    device_option(parser)
    output_option(parser, "policy.json")
    parser.add_argument("--report", metavar="FILE", type=output, help="where to show the plan as an HTML page")
    switch_arguments(parser, allow_mismatch=False)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser, split="test", policy=True)
    switch_arguments(parser)
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
