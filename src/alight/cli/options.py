"""Options that several commands share: the network, its data, how it runs, and where results go."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alight.cli.arguments import count, output, output_folder
from alight.engine.settings import RunSettings
from alight.policies.policy import Policy

TOKENIZER = "tokenizer"  # the folder beside a network that reads text


def model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the network."""
    parser.add_argument("model", help="folder of a network with exits")


def policy_argument(parser: argparse.ArgumentParser) -> None:
    """Add the policy."""
    parser.add_argument("policy", help="JSON that `alight calibrate` or `alight plan` wrote")


def data_arguments(parser: argparse.ArgumentParser, split: str, *, policy: bool = False) -> None:
    """Add the network, a policy where one is used, and the data."""
    model_argument(parser)
    if policy:
        policy_argument(parser)
    parser.add_argument(
        "data", help=".npz of images and labels, folder of class folders, cifar100:FOLDER, .jsonl of texts, ..."
    )
    parser.add_argument("--split", default=split, help=f"part of a data set that has several (default: {split})")
    parser.add_argument("--batch-size", type=count, default=128, help="default: 128")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data (default: 0)")
    tokenizer_option(parser)


def tokenizer_option(parser: argparse.ArgumentParser) -> None:
    """Add --tokenizer FOLDER."""
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder of a tokenizer (default: that of the model)")


def device_option(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument("--device", help="default: cuda if there is one")


def mismatch_option(parser: argparse.ArgumentParser) -> None:
    """Add --allow-mismatch."""
    parser.add_argument("--allow-mismatch", action="store_true", help="accept a policy of another network")


def run_arguments(parser: argparse.ArgumentParser, *, tuning: bool = True) -> None:
    """Add how a network runs: device, precision, memory layout, threads, compilation; with tuning CUDA graphs too."""
    device_option(parser)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: the network's own")
    parser.add_argument("--channels-last", action="store_true", help="images with their channels last in memory")
    parser.add_argument("--threads", type=int, help="of the CPU (default: PyTorch's own)")
    parser.add_argument("--compile", action="store_true", help="compile each stage of the network first")
    if tuning:
        parser.add_argument("--graphs", action="store_true", help="replay batches on a GPU as CUDA graphs")
        parser.add_argument(
            "--speed", choices=["auto"], help="measure first which of these options pay here, --compile included"
        )


def set_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --set NAME=VALUE, as often as needed."""
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=what)


def output_option(
    parser: argparse.ArgumentParser, default: str | None, what: str = "", kind: Callable[[str], str] = output
) -> None:
    """Add -o, --output FILE."""
    text = ", ".join(part for part in (what, f"default: {default}" if default else "") if part)
    parser.add_argument("-o", "--output", metavar="FILE", type=kind, default=default, help=text)


def folder_option(parser: argparse.ArgumentParser, default: str | None, what: str) -> None:
    """Add -o, --output FOLDER."""
    text = f"{what} (default: {default})" if default else what
    parser.add_argument("-o", "--output", metavar="FOLDER", type=output_folder, default=default, help=text)


def data_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return how data is read, as keyword arguments of `load_data`."""
    tokenizer = options.tokenizer or Path(options.model) / TOKENIZER
    return {"batch_size": options.batch_size, "workers": options.workers, "tokenizer": tokenizer}


def run_settings(options: argparse.Namespace) -> RunSettings:
    """Return how the network runs."""
    graphs = getattr(options, "graphs", False)  # few batches of a service are full
    return RunSettings(
        device(options), options.dtype, options.channels_last, options.compile, graphs, threads=options.threads
    )


def tuned_settings(
    options: argparse.Namespace,
    model: Any,
    example: Callable[[], Any],
    policy: Policy | None = None,
    batch_size: int | None = None,
) -> tuple[RunSettings, bool]:
    """Return how the network runs, and whether survivors are rebatched; with --speed auto what is fastest here."""
    from alight.planning.tune import tune_speed

    settings = run_settings(options)
    if options.speed is None:
        return settings, True
    mismatch = getattr(options, "allow_mismatch", False)
    size = batch_size or options.batch_size
    tuned = tune_speed(model, policy, batch_size=size, example=example(), settings=settings, allow_mismatch=mismatch)
    if not options.quiet:
        print(tuned, file=sys.stderr)
    return tuned.settings, tuned.rebatch


def first_inputs(data: Any, model: Any) -> Any:
    """Return the inputs of the first batch."""
    from alight.data.batches import as_batch

    return as_batch(next(iter(data)), model.input_spec).inputs


def device(options: argparse.Namespace) -> str:
    """Return where the network runs."""
    import torch

    return str(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
