"""`--engine ray`: predict and record on many machines."""

import argparse
from pathlib import Path
from typing import Any

from alight.cli.arguments import count, output
from alight.cli.command import CommandResult
from alight.cli.options import run_settings
from alight.errors import BadInput
from alight.policies.policy import Policy

FILES = (".csv", ".parquet", ".npz")


def engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where it runs, and how many at once."""
    engine = "this process, or Ray: data and output are then paths or URIs, and the output a folder of partitions"
    parser.add_argument("--engine", choices=["local", "ray"], default="local", help=f"{engine} (default: local)")
    parser.add_argument("--actors", type=count, help="of Ray, each a network (default: as many as fit)")
    parser.add_argument("--partition-rows", type=count, default=4096, help="samples of a partition (default: 4096)")


def output_or_folder(text: str) -> str:
    """Return the path of a file that can be written to, of a folder that exists, or a URI."""
    return text if "://" in text or Path(text).is_dir() else output(text)


def check_output_file(options: argparse.Namespace) -> None:
    """Check that the output is a file, which all engines but Ray write."""
    if "://" in options.output or Path(options.output).is_dir():
        raise BadInput(f"{options.output} is a folder or a URI: give a file, or --engine ray")


def predicted_on_ray(options: argparse.Namespace, policy: Policy) -> CommandResult:
    """Predict all samples, in partitions."""
    from alight.cluster.jobs import predict_on_ray

    done = predict_on_ray(
        options.model,
        policy,
        options.data,
        _folder(options),
        _job_config(options),
        allow_mismatch=options.allow_mismatch,
    )
    cost = done.totals["spent"] / done.num_samples
    shares = [each / done.num_samples for each in done.totals["exits"]]
    text = f"{done}\nmean cost {cost:g} {policy.unit}".rstrip() + f", exit shares {_percentages(shares)}"
    return CommandResult(text, {**_values(done), "mean_cost": cost, "unit": policy.unit, "exit_shares": shares})


def recorded_on_ray(options: argparse.Namespace) -> CommandResult:
    """Record all samples, in partitions."""
    from alight.cluster.jobs import record_on_ray

    kept = {name: getattr(options, name) for name in ("score", "features", "log_probabilities")}
    done = record_on_ray(options.model, options.data, _folder(options), _job_config(options), **kept)
    accuracies = [correct / done.num_samples for correct in done.totals["correct"]]
    text = f"{done}\naccuracy {_percentages(accuracies)}" if accuracies else f"{done}"
    return CommandResult(text, {**_values(done), "accuracies": accuracies})


def _values(done: Any) -> dict[str, Any]:
    return {
        "path": done.folder,
        "num_samples": done.num_samples,
        "partitions": done.num_partitions,
        "done_before": done.done_before,
    }


def _percentages(shares: list[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def _folder(options: argparse.Namespace) -> str:
    if options.output.endswith(FILES):
        raise BadInput(f"--engine ray writes a folder of partitions and {options.output} is a file: give -o FOLDER")
    return str(options.output)


def _job_config(options: argparse.Namespace) -> Any:
    from alight.cluster.jobs import JobConfig

    if options.speed:
        raise BadInput("--speed auto measures this machine, not those of the cluster: give the options that pay there")
    return JobConfig(
        batch_size=options.batch_size,
        partition_rows=options.partition_rows,
        workers=options.actors,
        tokenizer=options.tokenizer,
        progress=not options.quiet,
        settings=run_settings(options),
    )
