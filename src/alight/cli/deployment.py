"""Commands that deploy a network: export, run, serve."""

import argparse
import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alight.cli.arguments import (
    ALLOW_MISMATCH,
    FORCE,
    MODEL,
    NORMALISATION,
    POLICIES,
    POLICY,
    RUN,
    RUNTIME,
    SALT,
    TOKENIZER_FOLDER,
    check_data,
    check_distinct,
    check_idle,
    check_unused,
    count,
    folder_option,
    named,
    normalisation,
    output,
    output_option,
    policy_of,
    port,
    run_settings,
    runtime_settings,
    salted_by,
    share,
    torch_device,
    words,
)
from alight.cli.command import Command, CommandResult, argument
from alight.cli.kinds import check_order
from alight.cli.running import answers_file, decisions_result
from alight.display import layer_label
from alight.engine.manifest import BFLOAT16, FLOAT16, FLOAT32, INT8, ONNX
from alight.engine.settings import OPENVINO, RunSettings
from alight.errors import BadInput
from alight.files import FIRST_STAGES, MANIFEST, check_network_folder
from alight.files import POLICY as POLICY_FILE
from alight.policies import load_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from alight.engine.manifest import Manifest
    from alight.policies.policy import Policy
    from alight.serve.access import Tokens
    from alight.serve.hosting import ModelSource, OpenLedger
    from alight.serve.model import ServedModel

TOKEN = "ALIGHT_TOKEN"  # variable of the environment
OF_DEPLOYED = ("budget", "max_accuracy_loss", "runtime", "providers", "batch_size", "threads", "split")
DEPLOYED = (
    "is for a policy that is calibrated on what is exported: give labelled samples as --data FILE, or leave it out"
    " (`alight run --runtime` chooses for a folder in float32)"
)


def run_export(options: argparse.Namespace) -> CommandResult:
    """Write a network and its policy to a folder that runs without PyTorch, in int8 if wanted."""
    check_order(options, {"model": "network", "policy": "policy"})
    for marker in (MANIFEST, *FIRST_STAGES):
        check_unused(options.output, options.force, marker)
    if options.triton and Path(options.triton).exists():
        raise BadInput(f"{options.triton} exists: give a new folder to --triton")
    if options.precision or options.data:
        return _deployed(options)
    check_idle(options, *OF_DEPLOYED, why=DEPLOYED)
    check_data(options.tokenizer)
    policy = load_policy(policy_of(options.model, options.policy))
    from alight.engine.backends.cascade import Cascade
    from alight.engine.manifest import Manifest
    from alight.engine.predictor import load_network
    from alight.export.exporting import export_model

    terms = named(options, "format", "allow_mismatch", "tokenizer")
    model = load_network(options.model)
    terms |= {"normalisation": normalisation(options), "progress": not options.quiet}
    folder = export_model(model, policy, options.output, **terms).resolve()
    _write_triton(folder, options.triton)
    if isinstance(model, Cascade):
        found = load_policy(folder / POLICY_FILE)
        return CommandResult(f"cascade of {', '.join(found.exits)}: {folder}", {"path": folder, "exits": found.exits})
    manifest = Manifest.load(folder)
    exits = ", ".join(layer_label(manifest.exits[index]) for index in manifest.open_exits)
    inputs, difference = "; ".join(map(str, manifest.inputs)), manifest.made_with["largest difference"]
    return CommandResult(
        f"{len(manifest.stages)} stages ({manifest.format}), exits after {exits}, for"
        f" {inputs}; largest difference from the network {difference}: {folder}",
        {"path": folder, "manifest": manifest},
    )


def _write_triton(folder: Path, repository: str | None) -> None:
    if repository:
        from alight.export.triton import write_triton

        write_triton(folder, repository)


def _precision_wanted(options: argparse.Namespace) -> str:
    """Return the precision in which a network is to be deployed, if the other options go with it."""
    precision, *others = options.precision or [FLOAT32]
    if others:
        raise BadInput(f"{precision} and {others[0]} are two precisions: give one of them")
    if not options.data:
        raise BadInput(
            f"scores move in {precision}, so the policy is calibrated again: give labelled samples that the"
            " network was not trained on, as --data FILE"
        )
    if options.format != ONNX:
        raise BadInput(f"stages of {options.format} are float32: leave --format out")
    if options.triton and options.runtime == OPENVINO:
        raise BadInput("Triton runs stages by onnxruntime, for which the policy is not calibrated then: leave one out")
    check_data(options.data, options.tokenizer)
    return str(precision)


def _deployed(options: argparse.Namespace) -> CommandResult:
    """Write a network in lower precision, with a policy that is calibrated on it."""
    precision = _precision_wanted(options)
    goal = named(options, "budget", "max_accuracy_loss")
    asked = options.policy or (goal["budget"] is None and goal["max_accuracy_loss"] is None)
    policy = load_policy(policy_of(options.model, options.policy)) if asked else None
    from alight.data.batches import load_data
    from alight.export.exporting import check_normalisation
    from alight.fitting.calls import Steps
    from alight.fitting.deploying import check_is_for, deploy
    from alight.fitting.heads import keep_classes
    from alight.networks.store import load_model

    model = load_model(options.model)
    if policy is not None:
        if not options.allow_mismatch:
            check_is_for(policy, model)
        policy = replace(policy, exits=(), fingerprint="")  # checked, and the normalisation may be another below
    check_normalisation(normalisation(options), model.normalisation)
    model.normalisation = model.normalisation or normalisation(options)
    model.tokenizer = options.tokenizer or model.tokenizer
    split, batch_size = options.split or "test", options.batch_size or 1
    keep_classes(model, options.data, Steps(not options.quiet, "deploy"), split)
    data = load_data(options.data, model.input_spec, split=split)
    settings = RunSettings(threads=options.threads, **runtime_settings(options))
    terms = {
        **goal,
        "precision": precision,
        "settings": settings,
        "progress": not options.quiet,
    }
    made = deploy(model, data, options.output, policy=policy, batch_size=batch_size, **terms)
    _write_triton(made.folder, options.triton)
    names = ("exits", "levels", "before", "after", "times", "full_time", "float_time", "full_accuracy", "shares")
    values = {name: getattr(made, name) for name in names}
    values |= {"path": made.folder, "accuracy": made.decisions.accuracy(), "policy": made.policy.to_dict()}
    return CommandResult(f"{made}\n{made.folder}", values)


def run_run(options: argparse.Namespace) -> CommandResult:
    """Predict every sample with an exported network, without PyTorch."""
    check_distinct(options.data, options.policy, options.output)
    check_order(options, {"folder": "exported", "data": "data"})
    from alight.data.formats import names_of, write_answers
    from alight.engine.manifest import Manifest
    from alight.engine.predictor import Predictor

    manifest = Manifest.load(options.folder)
    data = _with_fitting_labels(options, manifest)
    policy = load_policy(options.policy or Path(options.folder) / POLICY_FILE)
    predictor = Predictor.load(
        options.folder,
        policy if options.policy else None,
        settings=RunSettings(threads=options.threads, **runtime_settings(options)),
        probabilities=policy.keeps_answers,
        allow_compiled=True,
        **named(options, "batch_size", "allow_mismatch"),
    )
    predictor = predictor.with_policy(salted_by(predictor.policy, options.data, options.salt))
    decisions = predictor.run(data, progress=not options.quiet)
    write_answers(decisions, options.output, names=names_of(data), classes=manifest.classes)
    return decisions_result(decisions, options.output, predictor.policy)


def _with_fitting_labels(options: argparse.Namespace, manifest: "Manifest") -> "Iterable[Any]":
    """Return the data of `alight run`; labels of other classes, as folders of any names are, are left out."""
    from alight.data.batches import load_data
    from alight.engine.manifest import exported_tokenizer

    tokenizer = exported_tokenizer(options.folder, manifest) if manifest.input_names else None
    reading = {**named(options, "batch_size", "max_tokens"), "tokenizer": tokenizer, "split": "test"}
    try:
        return load_data(options.data, manifest.input_spec, **reading)
    except BadInput as error:
        unlabelled = load_data(options.data, manifest.input_spec, labels=False, **reading)
        warnings.warn(f"the labels are left out, and no accuracy is computed: {error}", stacklevel=2)
        return unlabelled


def run_serve(options: argparse.Namespace) -> None:
    """Serve predictions over HTTP under a policy, in small batches."""
    if (options.model is None) == (options.models is None):
        raise BadInput("give the folder of a network, or --models FILE")
    if options.model is not None and not (Path(options.model) / MANIFEST).is_file():
        check_network_folder(options.model)
    if options.tls_key and not options.tls_certificate:
        raise BadInput("--tls-key belongs to a certificate: give --tls-certificate FILE, too")
    from alight.serve.access import EVERYBODY, Access, allowed_hosts
    from alight.serve.hosting import ModelHost
    from alight.serve.requests import Limits
    from alight.serve.run import Listening, serve

    limits = Limits(
        batch=options.batch_size,
        wait=options.max_wait / 1000,
        queue=options.queue,
        body=None if options.max_body is None else int(options.max_body * 2**20),
        pixels=int(options.max_pixels * 1e6),
        tokens=options.max_tokens,
        timeout=options.timeout,
        connections=options.connections,
        readers=options.readers,
        watch=options.watch,
    )
    tokens = _tokens(options.token_file)
    access = Access(
        tokens,
        allowed_hosts(options.host, options.allowed_hosts or [], tokens is not None),
        tuple(origin.lower() for origin in options.allowed_origins or []),
    )
    everybody = {} if options.per_hour is None else {EVERYBODY: options.per_hour}
    load = partial(
        ModelHost,
        partial(_sources, options),
        limits,
        open_ledger=_open_ledger(options.ledger),
        caps=partial(access.caps, everybody),
    )
    serve(
        load,
        access,
        Listening(options.host, options.port, *(map(_path, (options.tls_certificate, options.tls_key)))),
        token_file=_path(options.token_file),
        log_level=options.log_level,
    )


def _sources(options: argparse.Namespace) -> "list[ModelSource]":
    """Return the models to serve: those of a file, or the one that the command names; read again on SIGHUP."""
    from alight.serve.hosting import ModelSource, listed_models

    if options.models:
        models = listed_models(Path(options.models))
    else:
        policies = [*map(Path, options.policies)] or [policy_of(options.model, None)]
        name = Path(options.model).resolve().name
        models = [{"name": name, "version": "1", "folder": Path(options.model), "policies": policies}]
        models[0]["state"] = Path(options.state)
    keeps = not (options.no_state or options.ledger)
    return [
        ModelSource(
            each["name"],
            each["version"],
            partial(_served_model, options, each["folder"], each["policies"]),
            (each["folder"], *each["policies"]),
            each["state"] if keeps else None,
        )
        for each in models
    ]


def _served_model(options: argparse.Namespace, folder: Path, policies: list[Path]) -> "ServedModel":
    from alight.serve.model import load_policies, load_served_model

    exported = (folder / MANIFEST).is_file()
    return load_served_model(
        folder,
        load_policies(policies),
        tokenizer=_path(options.tokenizer),
        max_tokens=options.max_tokens,
        settings=run_settings(options, None if exported else torch_device(options)),
        allow_mismatch=options.allow_mismatch,
    )


def _open_ledger(url: str | None) -> "OpenLedger":
    """Return what opens the ledger of a model: the one that replicas share, or a file."""
    from alight.serve.hosting import open_in_file

    if url is None:
        return open_in_file
    from alight.serve.fleet import FleetLedger, check_ledger

    def open_shared(source: "ModelSource", policies: "Mapping[str, Policy]", _: int) -> FleetLedger:
        ledger = FleetLedger(url, f"{source.name}:{source.version}", policies)
        check_ledger(url)
        return ledger

    return open_shared


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _tokens(path: str | None) -> "Tokens | None":
    """Return the tokens that requests must bring, from a file or the environment, which lists of processes hide."""
    from alight.serve.access import Tokens

    if path:
        return Tokens.load(Path(path))
    token = os.environ.get(TOKEN)
    return None if token is None else Tokens.of(token)


FORMATS = "onnx runs without PyTorch; aoti is compiled for this kind of machine, with it (default: onnx)"
PRECISION_OPTIONS = {
    "int8": (INT8, "quantise convolutions and matrix products, calibrated on --data"),
    "fp16": (FLOAT16, "weights of 16 bits: files of half the size"),
    "bf16": (BFLOAT16, "arithmetic of 16 bits, by openvino"),
}
CALIBRATED = "labelled samples that trained nothing: the policy is calibrated again on what is exported"
WAIT = "milliseconds for which the first of a batch waits for others (default: 2)"
STATE = "file that keeps the spent budget over restarts (default: spending.json)"
TOKEN_FILE = f"file with the bearer tokens that requests must bring (default: the one of {TOKEN}, if it is set)"
LEDGER = "redis://HOST:PORT/0: one budget for all replicas that name it, instead of --state"
MODELS = "JSON that lists several models and versions, instead of model and policies"
BODY = "of a request (default: as much as a full batch needs, 16 of images)"
WATCH = "share of the samples that run to the last exit once more, to watch disagreement (default: 0)"
HOSTS = "names that requests use for the service, as a.org,b.org; * for any (default: this machine's; any with tokens)"
PER_HOUR = "what all requests together may cost in an hour, as '5 PFLOPs'"
ORIGINS = "pages that may call the service, as https://a.org (default: its own page alone)"
LEVELS = ["debug", "info", "warning", "error"]
COMMANDS = (
    Command(
        run_export,
        (
            MODEL,
            POLICY,
            argument("--format", choices=["onnx", "aoti"], default="onnx", help=FORMATS),
            argument("--triton", metavar="FOLDER", help="a model repository for Triton, too"),
            *(
                argument(f"--{name}", action="append_const", const=precision, dest="precision", help=text)
                for name, (precision, text) in PRECISION_OPTIONS.items()
            ),
            argument("--data", help=CALIBRATED),
            argument("--split", help="part of a data set that has several (default: test)"),
            argument("--budget", help="instead of a policy: '50%%', '0.5 ms' of the exported network"),
            argument(
                "--max-accuracy-loss",
                type=share,
                help="instead: the fastest that loses no more against the last exit in this precision; 0.01 is a point",
            ),
            argument("--batch-size", type=count, help="at which stages are timed (default: 1)"),
            argument("--threads", type=count, help="default: one for each processor"),
            *RUNTIME,
            TOKENIZER_FOLDER,
            *NORMALISATION,
            ALLOW_MISMATCH,
            folder_option("exported", "folder for the stages"),
            FORCE,
        ),
        (
            "export model policy.json -o exported",
            "export model --int8 --data test.npz --budget 80% -o int8",
            "export model policy.json -o stages --triton repository",
        ),
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
            *RUNTIME,
            SALT,
            ALLOW_MISMATCH,
            output_option("answers.csv", ".csv or .parquet", answers_file),
        ),
        ("run exported test.npz -o answers.csv", "run exported test.npz --threads 1 --json --quiet"),
    ),
    Command(
        run_serve,
        (
            argument("model", nargs="?", help="folder of a network with exits, or exported"),
            argument(
                "policies",
                nargs="*",
                metavar="policy",
                help=f"{POLICIES}; the first is in force until a request chooses another",
            ),
            argument("--models", metavar="FILE", help=MODELS),
            argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone"),
            argument("--port", type=port, default=8000, help="default: 8000; 0 for any free one"),
            argument("--batch-size", type=count, default=32, help="samples that run together (default: 32)"),
            argument("--max-wait", metavar="MS", type=float, default=2.0, help=WAIT),
            argument("--queue", type=count, default=512, help="samples admitted and not answered (default: 512)"),
            argument("--connections", type=count, default=512, help="open at once (default: 512)"),
            argument("--readers", type=count, default=2, help="threads that decode small requests (default: 2)"),
            argument("--max-body", metavar="MIB", type=float, help=BODY),
            argument("--max-pixels", metavar="MILLIONS", type=float, default=16.0, help="of an image (default: 16)"),
            argument("--max-tokens", type=count, default=128, help="of a text, which is truncated (default: 128)"),
            argument("--timeout", metavar="SECONDS", type=float, default=30.0, help="of a request (default: 30)"),
            argument("--state", metavar="FILE", type=output, default="spending.json", help=STATE),
            argument("--no-state", action="store_true", help="forget the spent budget at the end"),
            argument("--ledger", metavar="URL", help=LEDGER),
            argument("--per-hour", metavar="COST", help=PER_HOUR),
            argument("--token-file", metavar="FILE", help=TOKEN_FILE),
            argument("--allowed-hosts", metavar="NAMES", type=words, help=HOSTS),
            argument("--allowed-origins", metavar="URLS", type=words, help=ORIGINS),
            argument("--tls-certificate", metavar="FILE", help="PEM; the service speaks HTTPS then"),
            argument("--tls-key", metavar="FILE", help="PEM of its private key (default: in the certificate's file)"),
            argument("--watch", metavar="SHARE", type=float, default=0.0, help=WATCH),
            argument("--log-level", choices=LEVELS, default="info", help="default: info"),
            TOKENIZER_FOLDER,
            *RUN,
            *RUNTIME,
            ALLOW_MISMATCH,
        ),
        (
            "serve model policy.json --port 8000",
            "serve model cheap.json accurate.json --host 0.0.0.0 --token-file tokens.json --ledger redis://ledger:6379/0",
        ),
        results=False,
    ),
)
