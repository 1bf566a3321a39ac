"""Commands that take a network out of PyTorch: export, run."""

import argparse
from pathlib import Path

from alight.cli.command import Command, Found
from alight.cli.options import count, distinct, output_folder, output_option
from alight.cli.switches import TOKENIZER, model_argument
from alight.files import check_network_folder
from alight.policies.saved import load_policy


def run_export(options: argparse.Namespace) -> Found:
    """Write a network and its policy to a folder that runs without PyTorch."""
    check_network_folder(options.model)
    policy = load_policy(options.policy)
    from alight.export.exporting import export_model
    from alight.export.manifest import Manifest
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
    taken, apart = "; ".join(map(str, manifest.inputs)), manifest.made_with["largest difference"]
    return Found(
        f"{len(manifest.stages)} stages ({manifest.format}), exits {', '.join(map(str, manifest.open_exits))}, for"
        f" {taken}; at most {apart} from the network: {folder}",
        {"path": folder, "manifest": manifest},
    )


def run_run(options: argparse.Namespace) -> Found:
    """Answer every sample with an exported network, without PyTorch."""
    distinct(options.data, options.policy, options.output)
    from alight import deploy
    from alight.deploy.reading import read_data
    from alight.engine.answers import write_answers
    from alight.export.manifest import AOTI

    manifest = deploy.Manifest.load(options.folder)
    data = read_data(
        options.data, options.folder, manifest, batch_size=options.batch_size, max_tokens=options.max_tokens
    )
    policy = load_policy(options.policy) if options.policy else None
    load = deploy.load
    if manifest.format == AOTI:
        from alight.export.packages import load_compiled as load
    deployed = load(
        options.folder,
        policy,
        batch_size=options.batch_size,
        num_threads=options.threads,
        allow_mismatch=options.allow_mismatch,
    )
    deployed.probabilities = deployed.policy.lens is None
    decisions, unit = deployed.run(data, progress=not options.quiet), deployed.policy.unit
    write_answers(decisions, options.output, names=data.names, classes=manifest.classes, unit=unit)
    return Found(
        f"{decisions}: {options.output}",
        {
            "path": options.output,
            "samples": len(decisions),
            "mean_cost": decisions.mean_cost,
            "unit": unit,
            "exit_shares": decisions.exit_shares,
        },
    )


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("policy", help="JSON that `alight calibrate` or `alight plan` wrote")
    told = "onnx runs without PyTorch; aoti is compiled for this kind of machine, with it (default: onnx)"
    parser.add_argument("--format", choices=["onnx", "aoti"], default="onnx", help=told)
    parser.add_argument("--allow-mismatch", action="store_true", help="take a policy of another network too")
    folder = "folder for the stages (default: exported)"
    parser.add_argument("-o", "--output", metavar="FOLDER", type=output_folder, default="exported", help=folder)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="what `alight export` wrote")
    parser.add_argument("data", help=".npz of images, folder of images, .jsonl of texts")
    parser.add_argument("--policy", metavar="FILE", help="another policy with the same exits (default: the folder's)")
    parser.add_argument("--batch-size", type=count, default=128, help="default: 128")
    parser.add_argument("--threads", type=count, help="default: one for each processor")
    parser.add_argument("--max-tokens", type=count, default=128, help="of a text (default: 128)")
    parser.add_argument("--allow-mismatch", action="store_true", help="take a policy of another network too")
    output_option(parser, "answers.csv", ".csv or .parquet")


COMMANDS = (
    Command("export", run_export, _export_arguments, ("export model policy.json -o exported",)),
    Command(
        "run",
        run_run,
        _run_arguments,
        ("run exported test.npz -o answers.csv", "run exported test.npz --threads 1 --json --quiet"),
    ),
)
