"""Commands that build and examine a network with exits: attach, train, record, costs."""

import argparse
import os
import shutil
from functools import partial
from pathlib import Path

from alight.cli.arguments import (
    any_options,
    check_data,
    check_distinct,
    check_network_name,
    count,
    new_folder,
    numbers,
    own_options,
    words,
    words_or_auto,
)
from alight.cli.clusters import check_output_file, engine_arguments, output_or_folder, recorded_on_ray
from alight.cli.command import Command, CommandResult
from alight.cli.options import (
    TOKENIZER,
    data_arguments,
    data_options,
    device,
    device_option,
    first_inputs,
    folder_option,
    model_argument,
    output_option,
    run_arguments,
    set_option,
    tuned_settings,
)
from alight.errors import BadInput
from alight.files import check_network_folder, whole_folder
from alight.scores import SCORES

CHECKPOINT = "checkpoint.safetensors"


def run_attach(options: argparse.Namespace) -> CommandResult:
    """Add exits with untrained heads to a network, and write it to a folder."""
    check_network_name(options.network)
    check_data(options.weights)
    import torch

    from alight.networks.libraries import from_name
    from alight.networks.multi_exit import Normalisation
    from alight.networks.store import load_backbone, save_model

    torch.manual_seed(options.seed)
    try:
        model = from_name(
            options.network,
            num_classes=options.classes,
            pretrained=options.pretrained,
            after=options.after,
            head=options.head,
            count=options.count,
            image_size=options.image_size,
            arguments=any_options(options.set),
        )
    except TypeError as error:
        raise BadInput(f"{options.network} does not accept these options ({error})") from error
    if options.weights:
        load_backbone(model, options.weights)
    if options.mean:
        model.normalisation = Normalisation(options.mean, options.std or (1.0,) * len(options.mean))
    with new_folder(Path(options.output)) as folder:
        save_model(model, folder)
        _keep_tokenizer(Path(options.network.removeprefix("transformers:")), folder)
    return CommandResult(
        f"{options.network}, {model.num_classes} classes, exits after {', '.join(model.exits)}: {folder.resolve()}",
        {
            "path": folder.resolve(),
            "network": options.network,
            "num_classes": model.num_classes,
            "exits": model.exits,
        },
    )


def run_train(options: argparse.Namespace) -> CommandResult | None:
    """Train the heads of a network, or all of it; resumes an interrupted training."""
    check_network_folder(options.model)
    check_data(options.data, options.validation, options.tokenizer)
    from alight.data.formats import load_data
    from alight.networks.store import load_model, save_model
    from alight.training.settings import TrainingSettings
    from alight.training.training import train_heads

    source, folder = Path(options.model), Path(options.output or options.model)
    model = load_model(source)
    spec, reading = model.input_spec, data_options(options)
    data = load_data(options.data, spec, split=options.split, shuffle=True, augment=options.augment, **reading)
    validation = None
    if options.validation:
        validation = load_data(options.validation, spec, split="test", shuffle=False, **reading)
    try:
        own = own_options(TrainingSettings, options.set, ["mode", "epochs"])
        settings = TrainingSettings(mode=options.mode, epochs=options.epochs, **own)
    except TypeError as error:
        raise BadInput(f"--set {' '.join(options.set)}: a value is of the wrong kind ({error})") from error
    with new_folder(folder, keep=CHECKPOINT):
        checkpoint = folder / CHECKPOINT
        history = train_heads(
            model,
            data,
            settings,
            validation=validation,
            checkpoint=checkpoint,
            checkpoint_every=options.checkpoint_every,
            device=device(options),
            progress=not options.quiet,
        )
        if int(os.environ.get("RANK", "0")):  # of the processes that torchrun started, the first writes
            return None
        save_model(model, folder)
        if source.resolve() != folder.resolve() and (source / TOKENIZER).is_dir():
            with whole_folder(folder / TOKENIZER) as filling:
                shutil.copytree(source / TOKENIZER, filling, dirs_exist_ok=True)
        checkpoint.unlink(missing_ok=True)
    return CommandResult(str(history), {"path": folder.resolve(), "exits": history.exits, "epochs": history.epochs})


def run_record(options: argparse.Namespace) -> CommandResult:
    """Record the outputs of every head for every sample."""
    check_distinct(options.data, options.output)
    check_network_folder(options.model)
    if options.engine == "ray":
        return recorded_on_ray(options)
    check_output_file(options)
    check_data(options.data, options.tokenizer)
    from alight.data.formats import load_data
    from alight.engine.recorder import record_to
    from alight.networks.store import load_model

    model = load_model(options.model)
    data = load_data(options.data, model.input_spec, split=options.split, **data_options(options))
    recorded = record_to(
        options.output,
        model,
        data,
        score=options.score,
        features=options.features,
        log_probabilities=options.log_probabilities,
        settings=tuned_settings(options, model, partial(first_inputs, data, model))[0],
        progress=not options.quiet,
    )
    lines = [str(recorded)]
    if recorded.accuracies:
        pairs = zip(model.exits, recorded.accuracies, strict=True)
        lines.append("accuracy " + ", ".join(f"{name} {accuracy:.1%}" for name, accuracy in pairs))
    return CommandResult("\n".join(lines), recorded)


def run_costs(options: argparse.Namespace) -> CommandResult:
    """Measure the cost of every stage and every head."""
    check_network_folder(options.model)
    from alight.costing.measure import head_overhead, measure_costs, time_stages
    from alight.networks.multi_exit import example_of
    from alight.networks.store import load_model

    model = load_model(options.model).to(device(options))
    example = example_of(model, options.tokens)
    if options.unit == "ms":
        timings = time_stages(model, example, options.batch_size)
        costs, summary = timings.costs(), str(timings)
    else:
        costs = measure_costs(model, example, options.unit, options.batch_size)
        summary = f"heads before the last: {head_overhead(costs):.2%} of the full network"
    costs.save(options.output)
    return CommandResult(
        f"{summary}\n{costs}: {options.output}",
        {
            "path": options.output,
            "unit": costs.unit,
            "exits": model.exits,
            "stages": costs.stages,
            "heads": costs.heads,
            "cumulative": costs.cumulative(),
            "full_network": costs.full,
        },
    )


def _keep_tokenizer(source: Path, folder: Path) -> None:
    """Save the tokenizer of a folder beside the network that reads its tokens."""
    if (source / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
        with whole_folder(folder / TOKENIZER) as filling:
            tokenizer.save_pretrained(str(filling))


def _attach_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("network", help="timm:NAME, torchvision:NAME, transformers:FOLDER or zoo:NAME")
    parser.add_argument("--after", type=words_or_auto, default="auto", help="modules, as layer1,layer2 (default: auto)")
    parser.add_argument("--count", type=count, default=3, help="exits before the end that auto places (default: 3)")
    parser.add_argument("--head", default="auto", help="kind of head (default: by the shape of the features)")
    parser.add_argument("--classes", type=count, help="number of classes (default: the network's own)")
    parser.add_argument("--image-size", type=count, help="height and width of images (default: the network's own)")
    parser.add_argument("--pretrained", action="store_true", help="download the library's weights")
    parser.add_argument("--weights", metavar="FILE", help="trained weights of the full network (.safetensors)")
    parser.add_argument("--mean", type=numbers, help="subtracted from each channel of images in 0..1, as 0.5,0.5,0.5")
    parser.add_argument("--std", type=numbers, help="divisor of each channel then")
    set_option(parser, "option of the network")
    parser.add_argument("--seed", type=int, default=0, help="of fresh weights (default: 0)")
    folder_option(parser, "model", "folder for the network")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser, split="train")
    device_option(parser)
    parser.add_argument("--validation", metavar="DATA", help="data to evaluate every epoch on")
    parser.add_argument("--mode", choices=["frozen", "joint", "mixed"], default="frozen", help="default: frozen")
    parser.add_argument("--epochs", type=count, default=10, help="default: 10")
    parser.add_argument("--augment", action="store_true", help="flip and shift images at random")
    parser.add_argument("--checkpoint-every", metavar="EPOCHS", type=count, default=1, help="default: 1")
    set_option(parser, "a field of TrainingSettings, as distill=0.5")
    folder_option(parser, None, "folder for the trained network (default: that of the model)")


def _record_arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser, split="test")
    parser.add_argument("--score", choices=[*SCORES], default="margin", help="default: margin")
    parser.add_argument("--features", type=words, default=(), help="further scores to record, as negative_entropy")
    parser.add_argument("--log-probabilities", action="store_true", help="record them too, in half precision")
    run_arguments(parser)
    engine_arguments(parser)
    output_option(parser, "outputs.npz", "with --engine ray a folder", output_or_folder)


def _costs_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("--unit", choices=["FLOPs", "MACs", "ms", "J"], default="FLOPs", help="default: FLOPs")
    parser.add_argument("--batch-size", type=count, help="default: 2")
    parser.add_argument("--tokens", type=count, help="of a text (default: 16)")
    device_option(parser)
    output_option(parser, "costs.json")


COMMANDS = (
    Command(
        "attach",
        run_attach,
        _attach_arguments,
        (
            "attach torchvision:resnet18 --weights resnet18.safetensors --classes 10 --image-size 32 -o model",
            "attach timm:test_resnet --image-size 32 --count 2 -o small",
        ),
    ),
    Command(
        "train",
        run_train,
        _train_arguments,
        (
            "train model train.npz --epochs 2 --set learning_rate=0.003",
            "train model train.npz --validation validation.npz --mode joint --augment --epochs 2 -o trained",
        ),
    ),
    Command(
        "record",
        run_record,
        _record_arguments,
        (
            "record model validation.npz -o labelled.npz",
            "record model test.npz --features negative_entropy -o test_outputs.npz",
            "record model validation.parquet --engine ray -o partitions",
        ),
    ),
    Command(
        "costs",
        run_costs,
        _costs_arguments,
        ("costs model -o costs.json", "costs model --unit ms --batch-size 32 -o costs_ms.json"),
    ),
)
