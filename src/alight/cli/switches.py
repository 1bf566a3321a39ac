"""Options of the commands that run a network: its data, and how it is made quick."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alight.cli.options import count, device_option
from alight.policies.policy import Policy

TOKENIZER = "tokenizer"  # the folder beside a network that reads text


def model_argument(parser: argparse.ArgumentParser) -> None:
    """The network."""
    parser.add_argument("model", help="folder of a network with exits")


def data_arguments(parser: argparse.ArgumentParser, split: str, *, policy: bool = False) -> None:
    """The network, a policy where one is used, and the data."""
    model_argument(parser)
    if policy:
        parser.add_argument("policy", help="JSON that `alight calibrate` or `alight plan` wrote")
    parser.add_argument(
        "data", help=".npz of images and labels, folder of class folders, cifar100:FOLDER, .jsonl of texts, ..."
    )
    parser.add_argument("--split", default=split, help=f"part of a data set that has several (default: {split})")
    parser.add_argument("--batch-size", type=count, default=128, help="default: 128")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data (default: 0)")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder of a tokenizer (default: that of the model)")
    device_option(parser)


def switch_arguments(parser: argparse.ArgumentParser, *, allow_mismatch: bool = True) -> None:
    """What makes a network quick."""
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: the network's own")
    parser.add_argument("--channels-last", action="store_true", help="images with their channels last in memory")
    parser.add_argument("--threads", type=int, help="of the host (default: as many as torch takes)")
    parser.add_argument("--compile", action="store_true", help="compile each part of the network first")
    parser.add_argument("--graphs", action="store_true", help="replay batches on a GPU as CUDA graphs")
    parser.add_argument(
        "--speed", choices=["auto"], help="measure first which of these switches pay here; --compile is then tried too"
    )
    if allow_mismatch:
        parser.add_argument("--allow-mismatch", action="store_true", help="take a policy of another network too")


def data_options(options: argparse.Namespace) -> dict[str, Any]:
    """How data is read, as keyword arguments."""
    tokenizer = options.tokenizer or Path(options.model) / TOKENIZER
    return {"batch_size": options.batch_size, "workers": options.workers, "tokenizer": tokenizer}


def switches(options: argparse.Namespace) -> dict[str, Any]:
    """The speed tools that were asked for, by their names as keyword arguments."""
    asked = {
        "dtype": options.dtype,
        "channels_last": options.channels_last,
        "compile": options.compile,
        "graphs": getattr(options, "graphs", False),  # of a service few batches are full
        "num_threads": options.threads,
    }
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    return {"device": device(options), **given}


def speed_settings(
    options: argparse.Namespace,
    model: Any,
    example: Callable[[], Any],
    policy: Policy | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """The speed tools that were asked for, or with --speed auto those that pay here."""
    from alight.planning.tune import tune_speed

    if options.speed is None:
        return switches(options)
    fixed = {**switches(options), "allow_mismatch": getattr(options, "allow_mismatch", False)}
    tuned = tune_speed(model, policy, batch_size=batch_size or options.batch_size, example=example(), **fixed)
    if not options.quiet:
        print(tuned, file=sys.stderr)
    return {name: value for name, value in tuned.settings.items() if name != "allow_mismatch"}


def first_inputs(data: Any, model: Any) -> Any:
    """The inputs of the first batch."""
    from alight.data.batches import as_batch

    return as_batch(next(iter(data)), model.input_spec).to("cpu").inputs


def device(options: argparse.Namespace) -> str:
    """Where the network runs."""
    import torch

    return str(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
