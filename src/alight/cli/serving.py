"""The command that answers over HTTP: serve."""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

from alight.cli.command import Command
from alight.cli.given import check_network
from alight.cli.options import count, device_option, output
from alight.cli.switches import model_argument, switches
from alight.errors import BadInput

TOKEN = "ALIGHT_TOKEN"
EXPORTED = "manifest.json"  # in the folder of an exported network


def run_serve(options: argparse.Namespace) -> None:
    """Answer over HTTP under a policy, in small batches, until it is told to stop."""
    folder = Path(options.model)
    exported = (folder / EXPORTED).is_file()
    if not exported:
        check_network(options.model)
    from alight.serve.model import load_served_model
    from alight.serve.run import Address, load_policies, serve
    from alight.serve.schemas import Limits

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
        threads=options.threads,
        allow_mismatch=options.allow_mismatch,
        switches=_switches(options, exported),
    )
    serve(
        load,
        Address(options.host, options.port),
        limits,
        state=None if options.no_state else Path(options.state),
        token=_token(options.token_file),
        log_level=options.log_level,
    )


def _switches(options: argparse.Namespace, exported: bool) -> dict[str, Any]:
    """How the network is run; of one that was exported all that was asked for, so that it is refused by name."""
    if exported:
        return {name: getattr(options, name) for name in ("device", "dtype", "channels_last", "compile")}
    return {name: value for name, value in switches(options).items() if name != "num_threads"}


def _token(path: str | None) -> str | None:
    """The token that requests must bring, of a file or the environment: a list of processes does not show them."""
    token = Path(path).read_text(encoding="utf-8").strip() if path else os.environ.get(TOKEN)
    if token is None:
        return None
    if len(token) < 16 or not token.isascii() or any(character.isspace() for character in token):
        raise BadInput(f"a token of {len(token)} characters: give 16 or more of ASCII, without spaces")
    return token


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    policies = "JSON that `alight calibrate` wrote; the first is in force until another of them is asked for"
    parser.add_argument("policies", nargs="+", metavar="policy", help=policies)
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes any that is free")
    parser.add_argument("--batch-size", type=count, default=32, help="samples that run together (default: 32)")
    wait = "milliseconds for which the first of a batch waits for others (default: 2)"
    parser.add_argument("--max-wait", metavar="MS", type=float, default=2.0, help=wait)
    parser.add_argument("--queue", type=count, default=512, help="samples that may wait (default: 512)")
    parser.add_argument("--max-body", metavar="MIB", type=float, default=16.0, help="of a request (default: 16)")
    parser.add_argument("--max-pixels", metavar="MILLIONS", type=float, default=16.0, help="of an image (default: 16)")
    parser.add_argument("--max-tokens", type=count, default=128, help="of a text, then it is cut off (default: 128)")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=30.0, help="of a request (default: 30)")
    state = "where what was spent survives a restart (default: spending.json)"
    parser.add_argument("--state", metavar="FILE", type=output, default="spending.json", help=state)
    parser.add_argument("--no-state", action="store_true", help="forget what was spent when it stops")
    token = f"file with the bearer token that requests must bring (default: that of {TOKEN}, if it is set)"
    parser.add_argument("--token-file", metavar="FILE", help=token)
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", choices=levels, default="info", help="default: info")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder of a tokenizer (default: that of the model)")
    device_option(parser)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: the network's own")
    parser.add_argument("--channels-last", action="store_true", help="images with their channels last in memory")
    parser.add_argument("--threads", type=int, help="of the host (default: as many as the engine takes)")
    parser.add_argument("--compile", action="store_true", help="compile each part of the network first")
    parser.add_argument("--allow-mismatch", action="store_true", help="take a policy of another network too")


COMMANDS = (
    Command(
        "serve",
        run_serve,
        _serve_arguments,
        (
            "serve model policy.json --port 8000",
            "serve model cheap.json dear.json --host 0.0.0.0 --batch-size 16 --state spending.json",
        ),
        results=False,
    ),
)
