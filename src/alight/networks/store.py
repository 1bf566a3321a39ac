"""Save networks to folders and load them."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from alight.errors import BadFile, BadInput, Mismatch
from alight.files import CONFIG, WEIGHTS, PathLike, check_network_folder, read_json, write_json, write_whole
from alight.networks.attach import attach_heads, from_outputs
from alight.networks.cascade import cascade
from alight.networks.heads import HEADS, Factory
from alight.networks.libraries import BUILDERS, Heads, build
from alight.networks.multi_exit import MultiExitModel, Normalisation, described_example, structure
from alight.networks.zoo import NATIVE, ZOO


def fingerprint(model: MultiExitModel, **settings: object) -> str:
    """The network's fingerprint: its weights, statistics and their dtype, exits, heads, normalisation, and settings.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])
    >>> fingerprint(model) == fingerprint(model), fingerprint(model) == fingerprint(model, dtype="bfloat16")
    (True, False)
    """
    told = json.dumps({**structure(model), **settings}, sort_keys=True, default=str)
    return digest(model.state_dict(), told)


def digest(state: Mapping[str, Tensor], told: str = "") -> str:
    """SHA-256 of tensors with their names, types and shapes, the first 16 hexadecimal digits."""
    hashed = hashlib.sha256(told.encode())
    for name, tensor in state.items():
        whole = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        hashed.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:16]


CONVERT = 'convert it once: safetensors.torch.save_file(torch.load(path, weights_only=True), "weights.safetensors")'


def load_backbone(model: MultiExitModel, path: PathLike) -> None:
    """Give the stages the weights of a safetensors file, by the names that they had before the network was cut."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(os.fspath(path))
    except SafetensorError as error:
        raise BadFile(path, f"it is no whole safetensors file ({error})", CONVERT) from error
    put_backbone(model, found)


def put_backbone(model: MultiExitModel, state: Mapping[str, Tensor]) -> None:
    """Give the stages these weights, by the names that they had before the network was cut."""
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("stages.")}
    original = {name: name.split(".", 2)[2] for name in own}  # after "stages." and the stage's number
    missing = [each for each in original.values() if each not in state]
    other = [each for name, each in original.items() if each in state and state[each].shape != own[name].shape]
    unknown = sorted(state.keys() - set(original.values()))
    for what, names in {"are missing": missing, "have another shape": other, "belong nowhere": unknown}.items():
        if names:
            raise Mismatch(
                f"the weights are another network's: {len(names)} {what}, the first {names[0]!r};"
                " name the network (and its number of classes) that they were saved from"
            )
    for name, tensor in own.items():
        tensor.copy_(state[original[name]])


KIND = "MultiExitModel"
MADE_BY_HAND = {
    "stages": "a MultiExitModel built by hand",
    "cascade": "the networks of a cascade",
    "outputs": "a network with several outputs",
}
LIBRARIES = ("alight", "torch", "torchvision", "timm", "transformers", "safetensors")


def save_model(model: MultiExitModel, folder: PathLike) -> Path:
    """The folder, once weights and config are in it, whole or as it was before.

    >>> import tempfile
    >>> from torch import nn
    >>> stages, heads = [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]
    >>> folder = save_model(MultiExitModel(stages, heads), tempfile.mkdtemp())
    >>> sorted(path.name for path in folder.iterdir())
    ['config.json', 'model.safetensors']
    """
    folder = Path(folder)
    tensors, tied = _apart(model.state_dict())
    config = _config(model) | {"tied": tied}
    content = save(tensors, {"alight": KIND, "config": json.dumps(config)})
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WEIGHTS, lambda file: file.write(content))
    write_json(folder / CONFIG, KIND, config)
    return folder


def load_model(folder: PathLike, backbone: Any = None, head: Heads | None = None) -> MultiExitModel:
    """The network of a folder that `save_model` wrote, on the CPU, in evaluation mode.

    One that alight cannot build again is passed in: the `backbone` that `attach_heads` or `from_outputs` was given, the
    networks of a cascade, or a `MultiExitModel` built by hand; `head` if heads were made by a function of one's own.
    What is passed in gets the weights of the folder.

    >>> import tempfile
    >>> from alight import from_timm
    >>> folder = save_model(from_timm("test_resnet", num_classes=10, image_size=32, count=2), tempfile.mkdtemp())
    >>> load_model(folder).num_exits
    3
    """
    folder = Path(folder)
    tensors, config = _read(folder)
    try:
        with torch.random.fork_rng(devices=[]):  # fresh weights draw numbers before they are overwritten
            model = _rebuilt(config, backbone, head)
        _check_same(model, config, tensors)
        _fill(model, tensors, config["tied"])
        if normalisation := config["normalisation"]:
            model.normalisation = Normalisation(tuple(normalisation["mean"]), tuple(normalisation["std"]))
        model.num_classes, model.classes = config["num_classes"], tuple(config["classes"])
        model.recipe = config["recipe"]
        found, saved = fingerprint(model), config["fingerprint"]
    except (BadFile, Mismatch, ImportError):
        raise
    except Exception as error:  # a damaged config fails in a dozen ways
        if backbone is not None:
            raise Mismatch(f"what was passed in does not fit {folder} ({error}): pass in what was saved") from error
        raise BadFile(folder, f"the network cannot be built again ({error})", "save it again") from error
    if found != saved:
        raise BadFile(folder, f"it is damaged (fingerprint {found}, saved as {saved})", "save the network again")
    return model.eval()


def _config(model: MultiExitModel) -> dict[str, Any]:
    return {
        "recipe": model.recipe,
        **structure(model),
        "num_classes": model.num_classes,
        "classes": list(model.classes),
        "fingerprint": fingerprint(model),
        "versions": {name: number for name in LIBRARIES if (number := _version(name))},
    }


def _apart(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, whole and in memory of its own; and the names of those that are another one."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise BadInput(f"{name} is a {type(tensor).__name__}, no tensor: only tensors can be saved")
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor.detach().cpu().contiguous()
    stored = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    alone = {name: stored[tensor.untyped_storage().data_ptr()] == 1 for name, tensor in tensors.items()}
    return {name: tensor if alone[name] else tensor.clone() for name, tensor in tensors.items()}, tied


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and config of a folder."""
    check_network_folder(folder)
    config = read_json(folder / CONFIG, KIND)
    try:
        with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise BadFile(folder / WEIGHTS, f"it is damaged ({error})", "save the network again") from error
    if told.get("alight") != KIND or "config" not in told:
        raise BadFile(folder / WEIGHTS, "alight did not write it", "give a folder that alight saved a network to")
    try:
        beside = json.loads(told["config"])
    except json.JSONDecodeError as error:
        raise BadFile(folder / WEIGHTS, f"its config is damaged ({error})", "save the network again") from error
    if beside.get("fingerprint") != config.get("fingerprint"):  # a save was cut off between the two files
        config = beside
    return tensors, config


def _rebuilt(config: Mapping[str, Any], backbone: Any, head: Heads | None) -> MultiExitModel:
    """The network of a config, with whatever weights."""
    recipe = config["recipe"]
    source = recipe["source"]
    if isinstance(backbone, MultiExitModel):
        return backbone
    if source in BUILDERS and backbone is None:
        backbone = build(source, recipe["name"], recipe["arguments"])
    if source == "zoo":
        return _from_zoo(recipe, config["heads"], head)
    if backbone is None or source == "stages":
        what = recipe.get("type") or MADE_BY_HAND.get(source, "the network")
        raise Mismatch(f"alight cannot build {what} again: pass it in as load_model(folder, backbone=...)")
    example = described_example(recipe["example"]) if "example" in recipe else None
    if source == "cascade":
        return cascade([*backbone], config["exits"], example)
    if source == "outputs":
        return from_outputs(backbone, example, config["exits"])
    return attach_heads(backbone, recipe["after"], example=example, head=_factories(config["heads"], head))


def _from_zoo(recipe: Mapping[str, Any], heads: Sequence[Mapping[str, Any]], head: Heads | None) -> MultiExitModel:
    if recipe["name"] not in ZOO:
        raise BadInput(f"this alight has no network {recipe['name']!r}")
    own = {} if recipe["name"] in NATIVE else {"head": _factories(heads, head)}
    return ZOO[recipe["name"]](recipe["num_classes"], **recipe["arguments"], **own)


def _factories(heads: Sequence[Mapping[str, Any]], head: Heads | None) -> Heads:
    """What makes the heads before the last: those of alight from their settings, others as passed in."""
    if head is not None:
        return head
    if foreign := [settings["type"] for settings in heads[:-1] if "type" in settings]:
        raise Mismatch(
            f"its heads are {foreign[0]}, not alight's: pass in what made them, load_model(folder, head=...)"
        )
    return [_factory(settings) for settings in heads[:-1]]


def _factory(settings: Mapping[str, Any]) -> Factory:
    arguments = {key: value for key, value in settings.items() if key != "head"}
    return lambda _: HEADS[settings["head"]](**arguments)


def _check_same(model: MultiExitModel, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """That the weights of the folder belong to this network."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    saved |= {name: saved[other] for name, other in config["tied"].items()}
    if own == saved and list(model.exits) == config["exits"]:
        return
    odd = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    what = f"exits {list(model.exits)} here, {config['exits']} there"
    if odd:
        shapes = f"{own.get(odd[0], 'missing')} here, {saved.get(odd[0], 'missing')} there"
        what = f"{len(odd)} weights differ, the first {odd[0]!r}: {shapes}"
    raise Mismatch(f"the folder is another network's ({what}): pass in the one that was saved")


def _fill(model: MultiExitModel, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Put the weights in place, in their dtype; what is shared stays shared."""
    whole = {**tensors, **{name: tensors[other] for name, other in tied.items()}}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(whole[name].dtype)
    model.load_state_dict(whole)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
