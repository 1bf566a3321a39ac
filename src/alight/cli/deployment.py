"""Commands that deploy a network: export, run, serve."""

import argparse
import os
from functools import partial
from pathlib import Path

from alight.cli.arguments import check_distinct, count, output
from alight.cli.command import Command, CommandResult
from alight.cli.options import (
    TOKENIZER,
    folder_option,
    mismatch_option,
    model_argument,
    output_option,
    policy_argument,
    run_arguments,
    run_settings,
    tokenizer_option,
)
from alight.cli.policies import decisions_result
from alight.engine.manifest import POLICY
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.files import MANIFEST, check_network_folder
from alight.policies import load_policy

TOKEN = "ALIGHT_TOKEN"  # variable of the environment


def run_export(options: argparse.Namespace) -> CommandResult:
    """Write a network and its policy to a folder that runs without PyTorch."""
    check_network_folder(options.model)
    policy = load_policy(options.policy)
    from alight.engine.manifest import Manifest
    from alight.export.exporting import export_model
    from alight.networks.store import load_model

    tokenizer = Path(options.model) / TOKENIZER
    folder = export_model(
        load_model(options.model),
        policy,
        options.output,
        tokenizer=tokenizer if tokenizer.is_dir() else None,
        format=options.format,
        allow_mismatch=options.allow_mismatch,
        progress=not options.quiet,
    ).resolve()
    manifest = Manifest.load(folder)
    inputs, difference = "; ".join(map(str, manifest.inputs)), manifest.made_with["largest difference"]
    return CommandResult(
        f"{len(manifest.stages)} stages ({manifest.format}), exits {', '.join(map(str, manifest.open_exits))}, for"
        f" {inputs}; largest difference from the network {difference}: {folder}",
        {"path": folder, "manifest": manifest},
    )


def run_run(options: argparse.Namespace) -> CommandResult:
    """Predict every sample with an exported network, without PyTorch."""
    check_distinct(options.data, options.policy, options.output)
    from alight.data.formats import load_data, names_of, write_answers
    from alight.engine.manifest import Manifest, exported_tokenizer
    from alight.engine.predictor import Predictor

    manifest = Manifest.load(options.folder)
    data = load_data(
        options.data,
        manifest.input_spec,
        split="test",
        batch_size=options.batch_size,
        tokenizer=exported_tokenizer(options.folder, manifest) if manifest.input_names else None,
        max_tokens=options.max_tokens,
        labels=False,
    )
    policy = load_policy(options.policy or Path(options.folder) / POLICY)
    predictor = Predictor.load(
        options.folder,
        policy if options.policy else None,
        settings=RunSettings(threads=options.threads),
        batch_size=options.batch_size,
        probabilities=policy.keeps_predictions,
        allow_mismatch=options.allow_mismatch,
        allow_compiled=True,
    )
    decisions, unit = predictor.run(data, progress=not options.quiet), predictor.policy.unit
    write_answers(decisions, options.output, names=names_of(data), classes=manifest.classes, unit=unit)
    return decisions_result(decisions, options.output, unit)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    policy_argument(parser)
    formats = "onnx runs without PyTorch; aoti is compiled for this kind of machine, with it (default: onnx)"
    parser.add_argument("--format", choices=["onnx", "aoti"], default="onnx", help=formats)
    mismatch_option(parser)
    folder_option(parser, "exported", "folder for the stages")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="folder that `alight export` wrote")
    parser.add_argument("data", help=".npz of images, folder of images, .jsonl of texts")
    parser.add_argument("--policy", metavar="FILE", help="another policy with the same exits (default: the folder's)")
    parser.add_argument("--batch-size", type=count, default=128, help="default: 128")
    parser.add_argument("--threads", type=count, help="default: one for each processor")
    parser.add_argument("--max-tokens", type=count, default=128, help="of a text (default: 128)")
    mismatch_option(parser)
    output_option(parser, "answers.csv", ".csv or .parquet")


def run_serve(options: argparse.Namespace) -> None:
    """Serve predictions over HTTP under a policy, in small batches."""
    folder = Path(options.model)
    exported = (folder / MANIFEST).is_file()
    if not exported:
        check_network_folder(options.model)
    from alight.serve.model import load_policies, load_served_model
    from alight.serve.requests import Limits
    from alight.serve.run import serve

    limits = Limits(
        batch=options.batch_size,
        wait=options.max_wait / 1000,
        queue=options.queue,
        body=int(options.max_body * 2**20),
        pixels=int(options.max_pixels * 1e6),
        tokens=options.max_tokens,
        timeout=options.timeout,
    )
    load = partial(
        load_served_model,
        folder,
        load_policies([Path(path) for path in options.policies]),
        tokenizer=Path(options.tokenizer) if options.tokenizer else None,
        max_tokens=options.max_tokens,
        settings=_exported_settings(options) if exported else run_settings(options),
        allow_mismatch=options.allow_mismatch,
    )
    serve(
        load,
        limits,
        host=options.host,
        port=options.port,
        state=None if options.no_state else Path(options.state),
        token=_token(options.token_file),
        log_level=options.log_level,
    )


def _exported_settings(options: argparse.Namespace) -> RunSettings:
    """Return all settings that were given, of which an exported network refuses most by name."""
    return RunSettings(options.device, options.dtype, options.channels_last, options.compile, threads=options.threads)


def _token(path: str | None) -> str | None:
    """Return the token that requests must bring, from a file or the environment, which lists of processes hide."""
    token = Path(path).read_text(encoding="utf-8").strip() if path else os.environ.get(TOKEN)
    if token is None:
        return None
    if len(token) < 16 or not token.isascii() or any(character.isspace() for character in token):
        raise BadInput(f"a token of {len(token)} characters: give 16 or more of ASCII, without spaces")
    return token


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    policies = "JSON that `alight calibrate` wrote; the first is in force until a request chooses another"
    parser.add_argument("policies", nargs="+", metavar="policy", help=policies)
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 for any free one")
    parser.add_argument("--batch-size", type=count, default=32, help="samples that run together (default: 32)")
    wait = "milliseconds for which the first of a batch waits for others (default: 2)"
    parser.add_argument("--max-wait", metavar="MS", type=float, default=2.0, help=wait)
    parser.add_argument("--queue", type=count, default=512, help="samples that may wait (default: 512)")
    parser.add_argument("--max-body", metavar="MIB", type=float, default=16.0, help="of a request (default: 16)")
    parser.add_argument("--max-pixels", metavar="MILLIONS", type=float, default=16.0, help="of an image (default: 16)")
    parser.add_argument("--max-tokens", type=count, default=128, help="of a text, which is truncated (default: 128)")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=30.0, help="of a request (default: 30)")
    state = "file that keeps the spent budget over restarts (default: spending.json)"
    parser.add_argument("--state", metavar="FILE", type=output, default="spending.json", help=state)
    parser.add_argument("--no-state", action="store_true", help="forget the spent budget at the end")
    token = f"file with the bearer token that requests must bring (default: that of {TOKEN}, if it is set)"
    parser.add_argument("--token-file", metavar="FILE", help=token)
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", choices=levels, default="info", help="default: info")
    tokenizer_option(parser)
    run_arguments(parser, tuning=False)
    mismatch_option(parser)


COMMANDS = (
    Command("export", run_export, _export_arguments, ("export model policy.json -o exported",)),
    Command(
        "run",
        run_run,
        _run_arguments,
        ("run exported test.npz -o answers.csv", "run exported test.npz --threads 1 --json --quiet"),
    ),
    Command(
        "serve",
        run_serve,
        _serve_arguments,
        (
            "serve model policy.json --port 8000",
            "serve model cheap.json accurate.json --host 0.0.0.0 --batch-size 16 --state spending.json",
        ),
        results=False,
    ),
)
