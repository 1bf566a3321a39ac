"""Commands that deploy a network: export, run, serve."""

import argparse
import os
from functools import partial
from pathlib import Path

from alight.cli.arguments import (
    ALLOW_MISMATCH,
    FORCE,
    MODEL,
    NORMALISATION,
    POLICIES,
    POLICY,
    RUN,
    TOKENIZER_FOLDER,
    check_distinct,
    check_unused,
    count,
    folder_option,
    named,
    normalisation,
    output,
    output_option,
    policy_of,
    run_settings,
    salted_by,
    torch_device,
)
from alight.cli.command import Command, CommandResult, argument
from alight.cli.kinds import check_order
from alight.cli.running import decisions_result
from alight.engine.manifest import POLICY as POLICY_FILE
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.files import MANIFEST, check_network_folder
from alight.policies import load_policy

TOKEN = "ALIGHT_TOKEN"  # variable of the environment


def run_export(options: argparse.Namespace) -> CommandResult:
    """Write a network and its policy to a folder that runs without PyTorch."""
    check_order(options, {"model": "network", "policy": "policy"})
    check_unused(options.output, options.force, MANIFEST)
    policy = load_policy(policy_of(options.model, options.policy))
    from alight.engine.backends.cascade import Cascade
    from alight.engine.manifest import Manifest
    from alight.engine.predictor import load_network
    from alight.export.exporting import export_model

    terms = named(options, "format", "allow_mismatch")
    model = load_network(options.model)
    terms |= {"normalisation": normalisation(options), "progress": not options.quiet}
    folder = export_model(model, policy, options.output, **terms).resolve()
    if options.triton:
        from alight.export.triton import write_triton

        write_triton(folder, options.triton)
    if isinstance(model, Cascade):
        found = load_policy(folder / POLICY_FILE)
        return CommandResult(f"cascade of {', '.join(found.exits)}: {folder}", {"path": folder, "exits": found.exits})
    manifest = Manifest.load(folder)
    exits = ", ".join(manifest.exits[index] for index in manifest.open_exits)
    inputs, difference = "; ".join(map(str, manifest.inputs)), manifest.made_with["largest difference"]
    return CommandResult(
        f"{len(manifest.stages)} stages ({manifest.format}), exits after {exits}, for"
        f" {inputs}; largest difference from the network {difference}: {folder}",
        {"path": folder, "manifest": manifest},
    )


def run_run(options: argparse.Namespace) -> CommandResult:
    """Predict every sample with an exported network, without PyTorch."""
    check_distinct(options.data, options.policy, options.output)
    check_order(options, {"folder": "exported", "data": "data"})
    from alight.data.batches import load_data
    from alight.data.formats import names_of, write_answers
    from alight.engine.manifest import Manifest, exported_tokenizer
    from alight.engine.predictor import Predictor

    manifest = Manifest.load(options.folder)
    tokenizer = exported_tokenizer(options.folder, manifest) if manifest.input_names else None
    reading = {**named(options, "batch_size", "max_tokens"), "tokenizer": tokenizer, "labels": False}
    data = load_data(options.data, manifest.input_spec, split="test", **reading)
    policy = load_policy(options.policy or Path(options.folder) / POLICY_FILE)
    predictor = Predictor.load(
        options.folder,
        policy if options.policy else None,
        settings=RunSettings(threads=options.threads),
        probabilities=policy.keeps_answers,
        allow_compiled=True,
        **named(options, "batch_size", "allow_mismatch"),
    )
    predictor = predictor.with_policy(salted_by(predictor.policy, options.data))
    decisions = predictor.run(data, progress=not options.quiet)
    write_answers(decisions, options.output, names=names_of(data), classes=manifest.classes)
    return decisions_result(decisions, options.output, predictor.policy)


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
        load_policies([*map(Path, options.policies)] or [policy_of(options.model, None)]),
        tokenizer=Path(options.tokenizer) if options.tokenizer else None,
        max_tokens=options.max_tokens,
        settings=run_settings(options, None if exported else torch_device(options)),
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


def _token(path: str | None) -> str | None:
    """Return the token that requests must bring, from a file or the environment, which lists of processes hide."""
    token = Path(path).read_text(encoding="utf-8").strip() if path else os.environ.get(TOKEN)
    if token is None:
        return None
    if len(token) < 16 or not token.isascii() or any(character.isspace() for character in token):
        raise BadInput(f"a token of {len(token)} characters: give 16 or more of ASCII, without spaces")
    return token


FORMATS = "onnx runs without PyTorch; aoti is compiled for this kind of machine, with it (default: onnx)"
WAIT = "milliseconds for which the first of a batch waits for others (default: 2)"
STATE = "file that keeps the spent budget over restarts (default: spending.json)"
TOKEN_FILE = f"file with the bearer token that requests must bring (default: that of {TOKEN}, if it is set)"
LEVELS = ["debug", "info", "warning", "error"]
COMMANDS = (
    Command(
        run_export,
        (
            MODEL,
            POLICY,
            argument("--format", choices=["onnx", "aoti"], default="onnx", help=FORMATS),
            argument("--triton", metavar="FOLDER", help="a model repository for Triton, too"),
            *NORMALISATION,
            ALLOW_MISMATCH,
            folder_option("exported", "folder for the stages"),
            FORCE,
        ),
        ("export model policy.json -o exported", "export model policy.json -o stages --triton repository"),
    ),
    Command(
        run_run,
        (
            argument("folder", help="folder that `alight export` wrote"),
            argument("data", help=".npz of images, folder of images, .jsonl of texts"),
            argument("--policy", metavar="FILE", help="another policy with the same exits (default: the folder's)"),
            argument("--batch-size", type=count, default=128, help="default: 128"),
            argument("--threads", type=count, help="default: one for each processor"),
            argument("--max-tokens", type=count, default=128, help="of a text (default: 128)"),
            ALLOW_MISMATCH,
            output_option("answers.csv", ".csv or .parquet"),
        ),
        ("run exported test.npz -o answers.csv", "run exported test.npz --threads 1 --json --quiet"),
    ),
    Command(
        run_serve,
        (
            MODEL,
            argument(
                "policies",
                nargs="*",
                metavar="policy",
                help=f"{POLICIES}; the first is in force until a request chooses another",
            ),
            argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone"),
            argument("--port", type=int, default=8000, help="default: 8000; 0 for any free one"),
            argument("--batch-size", type=count, default=32, help="samples that run together (default: 32)"),
            argument("--max-wait", metavar="MS", type=float, default=2.0, help=WAIT),
            argument("--queue", type=count, default=512, help="samples that may wait (default: 512)"),
            argument("--max-body", metavar="MIB", type=float, default=16.0, help="of a request (default: 16)"),
            argument("--max-pixels", metavar="MILLIONS", type=float, default=16.0, help="of an image (default: 16)"),
            argument("--max-tokens", type=count, default=128, help="of a text, which is truncated (default: 128)"),
            argument("--timeout", metavar="SECONDS", type=float, default=30.0, help="of a request (default: 30)"),
            argument("--state", metavar="FILE", type=output, default="spending.json", help=STATE),
            argument("--no-state", action="store_true", help="forget the spent budget at the end"),
            argument("--token-file", metavar="FILE", help=TOKEN_FILE),
            argument("--log-level", choices=LEVELS, default="info", help="default: info"),
            TOKENIZER_FOLDER,
            *RUN,
            ALLOW_MISMATCH,
        ),
        (
            "serve model policy.json --port 8000",
            "serve model cheap.json accurate.json --host 0.0.0.0 --batch-size 16 --state spending.json",
        ),
        results=False,
    ),
)
