"""Commands that build a network with exits: attach, train."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from alight.cli.arguments import (
    DEVICE,
    FORCE,
    MODEL,
    NORMALISATION,
    any_options,
    check_data,
    check_unused,
    count,
    counts,
    data_arguments,
    folder_option,
    named,
    new_folder,
    normalisation,
    set_option,
    torch_device,
    training_settings,
    words,
    words_or_auto,
)
from alight.cli.command import Command, CommandResult, argument
from alight.cli.kinds import check_order
from alight.data.preprocess import Normalisation
from alight.display import layer_label
from alight.errors import BadInput
from alight.files import CASCADE, POLICY, WEIGHTS

CHECKPOINT = "checkpoint.safetensors"
LIBRARIES = ("timm", "torchvision", "transformers", "zoo")
WEIGHT_FILES = (".pt", ".pth", ".safetensors")


def run_attach(options: argparse.Namespace) -> CommandResult:
    """Add exits with untrained heads to a network, and write it to a folder."""
    check_name(options.network, options.pretrained)
    check_data(options.weights)
    check_unused(options.output, options.force, WEIGHTS)
    import torch

    from alight.networks.libraries import from_name
    from alight.networks.store import load_backbone, save_model

    torch.manual_seed(options.seed)
    try:
        own = named(options, "pretrained", "after", "head", "count", "image_size", "input_shape")
        own |= {"arguments": any_options(options.set), "stated": _stated(options)}
        model = from_name(options.network, num_classes=options.classes, **own)
    except TypeError as error:
        raise BadInput(f"{options.network} does not accept these options ({error}): see --set and --classes") from error
    if options.weights:
        load_backbone(model, options.weights)
    elif options.network.startswith(("timm:", "torchvision:", "zoo:")) and not options.pretrained:
        model.note_untrained("stages")
    model.normalisation = normalisation(options) or model.normalisation
    with new_folder(Path(options.output)) as folder:
        save_model(model, folder, force=options.force)
    path, exits = folder.resolve(), ", ".join(map(layer_label, model.exits))
    return CommandResult(
        f"{options.network}, {model.num_classes} classes, exits after {exits}: {path}",
        {"path": path, "network": options.network, "num_classes": model.num_classes, "exits": model.exits},
    )


def _stated(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a network of one's own does not say by itself, as far as it was given."""
    logits = int(options.logits) if (options.logits or "").lstrip("-").isdigit() else options.logits
    return {name: value for name, value in (("logits", logits), ("channels", options.channels)) if value is not None}


def check_name(network: str, pretrained: bool) -> None:
    """Check that the text names a network, and that a file or folder in it exists, before torch is loaded."""
    place, colon, name = network.rpartition(":")
    library = network.partition(":")[0]
    if network.endswith(WEIGHT_FILES):
        raise BadInput(f"{network} holds weights alone: name the network that they are of, with --weights {network}")
    if "/" in network and (not colon or network.startswith((".", "/"))) and ".py:" not in network:
        raise BadInput(f"there is no folder {network!r}: check the path, or name a network, as timm:resnet18")
    if not colon or not place or not name:
        raise BadInput(
            f"network {network!r}: write timm:NAME, torchvision:NAME, transformers:FOLDER, zoo:NAME, FILE.py:NAME or"
            " package.module:NAME"
        )
    if library in LIBRARIES:
        folder = network.partition(":")[2]
        if library == "transformers" and not pretrained and not Path(folder).is_dir():
            raise BadInput(
                f"there is no folder {folder!r}: check the path, or give --pretrained to download it from the hub"
            )
    elif place.endswith(".py") and not Path(place).is_file():
        raise BadInput(f"there is no file {place!r}: write FILE.py:NAME, with the path of the file")


def run_train(options: argparse.Namespace) -> CommandResult | None:
    """Train the heads of a network, or all of it; resumes an interrupted training."""
    check_order(options, {"model": "network", "data": "data"})
    check_data(options.data, options.validation, options.tokenizer)
    source, folder = Path(options.model), Path(options.output)
    in_place = source.resolve() == folder.resolve()
    check_unused(options.output, options.force, POLICY if in_place else WEIGHTS)  # a policy of `fit` would be lost
    from alight.data.batches import load_data
    from alight.networks.store import load_model, save_model
    from alight.training.training import train_heads

    model = load_model(source)
    spec, reading = model.input_spec, named(options, "batch_size", "workers", "tokenizer")
    data = load_data(options.data, spec, split=options.split, shuffle=True, augment=options.augment, **reading)
    validation = None
    if options.validation:
        validation = load_data(options.validation, spec, split="test", shuffle=False, **reading)
    settings = training_settings(options, named(options, "mode", "epochs"))
    with new_folder(folder, keep=CHECKPOINT):
        checkpoint = folder / CHECKPOINT
        history = train_heads(
            model,
            data,
            settings,
            validation=validation,
            checkpoint=checkpoint,
            checkpoint_every=options.checkpoint_every,
            device=torch_device(options),
            progress=not options.quiet,
        )
        if int(os.environ.get("RANK", "0")):  # of the processes that torchrun started, the first writes
            return None
        save_model(model, folder, force=True)
        checkpoint.unlink(missing_ok=True)
    return CommandResult(str(history), {"path": folder.resolve(), "exits": history.exits, "epochs": history.epochs})


def run_cascade(options: argparse.Namespace) -> CommandResult:
    """Chain trained networks, from cheap to expensive, as one with an exit after each."""
    check_unused(options.output, options.force, CASCADE)
    from alight.engine.backends.cascade import Member, cascade

    names = options.names or [Path(place).stem for place in options.networks]
    if len(names) != len(options.networks):
        raise BadInput(f"{len(names)} names for {len(options.networks)} networks: give one each")
    members = [
        Member(place, name, **_member(options.set, name)) for place, name in zip(options.networks, names, strict=True)
    ]
    if unknown := [each for each in options.set if each.partition(".")[0] not in names]:
        raise BadInput(f"--set {unknown[0]!r}: write NAME.FIELD=VALUE with NAME one of {', '.join(names)}")
    made = cascade(members, image_size=options.image_size)
    path = made.save(options.output).resolve()
    takes = ", ".join(map(str, made.input_spec.tensors))
    return CommandResult(
        f"{', '.join(made.exits)}; takes {takes or 'what its networks take'}: {path}",
        {"path": path, "exits": made.exits, "num_classes": made.num_classes},
    )


def _member(settings: Sequence[str], name: str) -> dict[str, Any]:
    """Return the fields of one member from NAME.FIELD=VALUE; mean and std are its normalisation."""
    from alight.engine.backends.cascade import UNSAVED, Member

    own = any_options([each.removeprefix(f"{name}.") for each in settings if each.startswith(f"{name}.")])
    mean, std = own.pop("mean", None), own.pop("std", None)
    if mean is not None or std is not None:
        own["normalisation"] = Normalisation(tuple(mean or [0.0] * len(std)), tuple(std or [1.0] * len(mean)))
    known = [each.name for each in fields(Member) if each.name not in UNSAVED]
    if unknown := [each for each in own if each not in known]:
        stated = ["mean", "std", *(each for each in known if each != "normalisation")]
        raise BadInput(f"--set {name}.{unknown[0]}: a network of a cascade has {', '.join(stated)}")
    return own


def run_check(options: argparse.Namespace) -> CommandResult:
    """Check that the exits of a saved network give what the network gives, bit by bit."""
    check_order(options, {"model": "network"})
    from alight.networks.own import build_own
    from alight.networks.store import load_model

    network = build_own(options.network, any_options(options.set)) if options.network else None
    model = load_model(options.model, backbone=network)
    refusal = model.verify()
    found = {"path": Path(options.model).resolve(), "sizes": model.sizes, "training": refusal or "same"}
    if model.network is None:
        found |= {"training": refusal or "not checked"}
        return CommandResult(
            f"{options.model}: gives the logits that the network gave when it was saved; samples do not mix, and may"
            f" leave\ninputs per sample: {model.sizes}\nnot checked, as the folder holds no code of the network: other"
            " sizes than it was compared with when it was saved, other weights, and joint training: --network"
            " FILE.py:NAME names it",
            found,
        )
    return CommandResult(
        f"{options.model}: equal to the network, bit by bit, for random inputs in batches of 1, 2 and 5, with other"
        f" weights, and when samples leave\ninputs per sample: {model.sizes}\njoint training: "
        + (f"refused, {refusal}" if refusal else "the same gradients as the network's own code"),
        found,
    )


PLACES = "folder of `attach`, `train`, `fit` or `export`, .onnx or .tflite file, or URL of the Open Inference Protocol"
COMMANDS = (
    Command(
        run_attach,
        (
            argument(
                "network",
                help="timm:NAME, torchvision:NAME, transformers:FOLDER, zoo:NAME; or your own, run to"
                " build it: FILE.py:NAME, package.module:NAME",
            ),
            argument("--after", type=words_or_auto, default="auto", help="modules, as layer1,layer2 (default: auto)"),
            argument("--count", type=count, default=3, help="exits before the end that auto places (default: 3)"),
            argument("--head", default="auto", help="kind of head (default: by the shape of the features)"),
            argument("--classes", type=count, help="number of classes (default: the network's own)"),
            argument("--image-size", type=count, help="height and width of images (default: the network's own)"),
            argument("--input-shape", type=counts, help="of one sample, as 3,32,32, for a network of your own"),
            argument("--logits", metavar="NAME", help="which output they are, by name or index, of several"),
            argument("--channels", choices=["first", "last"], help="axis of features, where your network does not say"),
            argument("--pretrained", action="store_true", help="download the library's weights"),
            argument("--weights", metavar="FILE", help="trained weights of the full network (.safetensors, .pt, .pth)"),
            *NORMALISATION,
            set_option("argument of the network"),
            argument("--seed", type=int, default=0, help="of fresh weights (default: 0)"),
            folder_option("model", "folder for the network"),
            FORCE,
        ),
        (
            "attach torchvision:resnet18 --weights resnet18.safetensors --classes 10 --image-size 32 -o model",
            "attach timm:test_resnet --image-size 32 --count 2 -o small",
            "attach nets.py:Net --input-shape 3,32,32 --set width=8 --weights weights.pt -o own",
        ),
    ),
    Command(
        run_cascade,
        (
            argument("networks", nargs="+", metavar="network", help=PLACES),
            argument("--names", type=words, help="as small,large (default: those of the files)"),
            argument("--image-size", type=count, help="at which pixels are kept (default: as large as is needed)"),
            set_option("NAME.FIELD=VALUE of one network: image_size, crop, mean, std, skip_classes, flops, price"),
            folder_option("cascade", "folder for the cascade"),
            FORCE,
        ),
        (
            "cascade small model -o cascade",
            "cascade small model --names small,large --set small.crop=0.875 --set large.price=0.002 -o priced",
        ),
    ),
    Command(
        run_check,
        (
            MODEL,
            argument("--network", metavar="FILE.py:NAME", help="code of your own network, run to build it"),
            set_option("argument of the network"),
        ),
        ("check model",),
    ),
    Command(
        run_train,
        (
            *data_arguments("train"),
            DEVICE,
            argument("--validation", metavar="DATA", help="data to evaluate every epoch on"),
            argument("--mode", choices=["frozen", "joint", "mixed"], default="frozen", help="default: frozen"),
            argument("--epochs", type=count, default=10, help="default: 10"),
            argument("--augment", action="store_true", help="flip and shift images at random"),
            argument("--checkpoint-every", metavar="EPOCHS", type=count, default=1, help="default: 1"),
            set_option("a field of TrainingSettings, as distill=0.5"),
            folder_option("trained", "folder for the trained network; the model's own trains it in its place"),
            FORCE,
        ),
        (
            "train model train.npz --epochs 2 --set learning_rate=0.003 -o model",
            "train model train.npz --validation validation.npz --mode joint --augment --epochs 2 -o trained",
        ),
    ),
)
