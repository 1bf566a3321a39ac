"""Commands that make a network with exits and look at it: attach, train, record, costs."""

import argparse
import os
import shutil
from functools import partial
from pathlib import Path

from alight.cli.clusters import check_output_file, engine_arguments, output_or_folder, recorded_on_ray
from alight.cli.command import Command, Found
from alight.cli.given import check_data, check_name, check_network, new_folder
from alight.cli.options import (
    any_options,
    count,
    device_option,
    distinct,
    numbers,
    output_folder,
    output_option,
    own_options,
    set_option,
    words,
    words_or_auto,
)
from alight.cli.switches import (
    TOKENIZER,
    data_arguments,
    data_options,
    device,
    first_inputs,
    model_argument,
    speed_settings,
    switch_arguments,
)
from alight.errors import BadInput
from alight.files import whole_folder
from alight.scores import SCORES

CHECKPOINT = "checkpoint.safetensors"


def run_attach(options: argparse.Namespace) -> Found:
    """Put exits with untrained heads on a network, and write it to a folder."""
    check_name(options.network)
    check_data(options.weights)
    import torch

    from alight.networks.libraries import from_name
    from alight.networks.multi_exit import Normalisation
    from alight.networks.store import save_model
    from alight.networks.weights import load_backbone

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
        raise BadInput(f"{options.network} does not take these options ({error})") from error
    if options.weights:
        load_backbone(model, options.weights)
    if options.mean:
        model.normalisation = Normalisation(options.mean, options.std or (1.0,) * len(options.mean))
    with new_folder(Path(options.output)) as folder:
        save_model(model, folder)
        _keep_tokenizer(Path(options.network.removeprefix("transformers:")), folder)
    return Found(
        f"{options.network}, {model.num_classes} classes, exits after {', '.join(model.exits)}: {folder.resolve()}",
        {
            "path": folder.resolve(),
            "network": options.network,
            "num_classes": model.num_classes,
            "exits": model.exits,
        },
    )


def run_train(options: argparse.Namespace) -> Found | None:
    """Train the heads of a network, or all of it; an interrupted training goes on where it was."""
    check_network(options.model)
    check_data(options.data, options.validation, options.tokenizer)
    from alight.data.formats import load_data
    from alight.networks.store import load_model, save_model
    from alight.training.training import train_heads

    source, folder = Path(options.model), Path(options.output or options.model)
    model = load_model(source)
    given = data_options(options)
    data = load_data(options.data, model, split=options.split, shuffle=True, augment=options.augment, **given)
    validation = load_data(options.validation, model, split="test", **given) if options.validation else None
    settings = {"mode": options.mode, "epochs": options.epochs, "device": device(options)}
    taken = [*settings, "validation", "checkpoint", "batch_size"]
    settings |= own_options(train_heads, options.set, taken=taken, progress=not options.quiet)
    with new_folder(folder, keep=CHECKPOINT):
        checkpoint = folder / CHECKPOINT
        try:
            history = train_heads(model, data, validation=validation, checkpoint=checkpoint, **settings)
        except TypeError as error:
            raise BadInput(f"--set {' '.join(options.set)}: a value is of the wrong kind ({error})") from error
        if int(os.environ.get("RANK", "0")):  # of the processes that torchrun started, the first writes
            return None
        save_model(model, folder)
        if source.resolve() != folder.resolve() and (source / TOKENIZER).is_dir():
            with whole_folder(folder / TOKENIZER) as filling:
                shutil.copytree(source / TOKENIZER, filling, dirs_exist_ok=True)
        checkpoint.unlink(missing_ok=True)
    return Found(str(history), {"path": folder.resolve(), "exits": history.exits, "epochs": history.epochs})


def run_record(options: argparse.Namespace) -> Found:
    """Write down what every head says about every sample."""
    distinct(options.data, options.output)
    check_network(options.model)
    if options.engine == "ray":
        return recorded_on_ray(options)
    check_output_file(options)
    check_data(options.data, options.tokenizer)
    from alight.data.formats import load_data
    from alight.engine.recorder import record_to
    from alight.networks.store import load_model

    model = load_model(options.model)
    data = load_data(options.data, model, split=options.split, **data_options(options))
    recorded = record_to(
        options.output,
        model,
        data,
        score=options.score,
        features=options.features,
        log_probabilities=options.log_probabilities,
        progress=not options.quiet,
        **speed_settings(options, model, partial(first_inputs, data)),
    )
    lines = [str(recorded)]
    if recorded.accuracies:
        pairs = zip(model.exits, recorded.accuracies, strict=True)
        lines.append("accuracy " + ", ".join(f"{name} {accuracy:.1%}" for name, accuracy in pairs))
    return Found("\n".join(lines), recorded)


def run_costs(options: argparse.Namespace) -> Found:
    """Measure what every stage and every head costs."""
    check_network(options.model)
    from alight.costing.measure import head_overhead, measure_costs, time_stages
    from alight.data.formats import example_of
    from alight.networks.store import load_model

    model = load_model(options.model).to(device(options))
    example = example_of(model, options.tokens)
    if options.unit == "ms":
        timings = time_stages(model, example, options.batch_size)
        costs, told = timings.costs(), str(timings)
    else:
        costs = measure_costs(model, example, options.unit, options.batch_size)
        told = f"heads before the last: {head_overhead(costs):.2%} of the plain network"
    costs.save(options.output)
    return Found(
        f"{told}\n{costs}: {options.output}",
        {
            "path": options.output,
            "unit": costs.unit,
            "exits": model.exits,
            "stages": costs.stages,
            "heads": costs.heads,
            "cumulative": costs.cumulative(),
            "plain": costs.full,
        },
    )


def _keep_tokenizer(source: Path, folder: Path) -> None:
    """Put the tokenizer of a folder beside the network that reads its tokens."""
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
    parser.add_argument("--weights", metavar="FILE", help="trained weights of the plain network (.safetensors)")
    parser.add_argument("--mean", type=numbers, help="taken off each channel of images in 0..1, as 0.5,0.5,0.5")
    parser.add_argument("--std", type=numbers, help="what each channel is then divided by")
    set_option(parser, "the network's own option")
    parser.add_argument("--seed", type=int, default=0, help="of fresh weights (default: 0)")
    folder = "folder for the network (default: model)"
    parser.add_argument("-o", "--output", metavar="FOLDER", type=output_folder, default="model", help=folder)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser, split="train")
    parser.add_argument("--validation", metavar="DATA", help="data to judge every epoch by")
    parser.add_argument("--mode", choices=["frozen", "joint", "mixed"], default="frozen", help="default: frozen")
    parser.add_argument("--epochs", type=count, default=10, help="default: 10")
    parser.add_argument("--augment", action="store_true", help="flip and move images at random")
    set_option(parser, "an option of train_heads, as distill=0.5")
    folder = "folder for the trained network (default: where it was)"
    parser.add_argument("-o", "--output", metavar="FOLDER", type=output_folder, help=folder)


def _record_arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser, split="test")
    parser.add_argument("--score", choices=SCORES, default="margin", help="default: margin")
    parser.add_argument("--features", type=words, default=(), help="further scores to keep, as negative_entropy")
    parser.add_argument("--log-probabilities", action="store_true", help="keep those too, in half precision")
    switch_arguments(parser, allow_mismatch=False)
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
            "record model validation.npz --engine ray -o partitions",
        ),
    ),
    Command(
        "costs",
        run_costs,
        _costs_arguments,
        ("costs model -o costs.json", "costs model --unit ms --batch-size 32 -o costs_ms.json"),
    ),
)
