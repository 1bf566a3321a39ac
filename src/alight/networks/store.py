"""Networks as folders: weights, a description, and the graphs of their stages; nothing in them can run code."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from alight.cutting.cut import as_head, cut, split_outputs
from alight.cutting.proof import ROWS, is_chain_of
from alight.cutting.running import Inputs, LogitsChoice, in_mode, pick_logits
from alight.cutting.stages import NotPlainData, cut_data, stages_from_data
from alight.data.preprocess import Normalisation
from alight.errors import BadFile, BadInput, Mismatch
from alight.files import CONFIG, MANIFEST, WEIGHTS, PathLike, check_network_folder, read_json, write_json, write_whole
from alight.networks.attach import cascade
from alight.networks.heads import HEADS, HeadFactory
from alight.networks.libraries import BUILDERS, build_network
from alight.networks.multi_exit import MultiExitModel, random_example, read, structure
from alight.networks.zoo import BACKBONES, ZOO
from alight.provenance import installed_versions

KIND = "MultiExitModel"
CONVERT = 'convert it once: safetensors.torch.save_file(torch.load(path, weights_only=True), "weights.safetensors")'
CONSTANT = "constants."  # before the names of tensors that have none in the network
PASSED_IN = {
    "stages": "a MultiExitModel built by hand",
    "cascade": "the networks of a cascade",
    "outputs": "a network with several outputs",
}
LIBRARIES = ("alight", "torch", "torchvision", "timm", "transformers", "safetensors")


def fingerprint(model: MultiExitModel, **settings: object) -> str:
    """Return the network's fingerprint: of weights, statistics, their dtype, exits, heads, normalisation and settings.

    >>> model = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])
    >>> fingerprint(model) == fingerprint(model), fingerprint(model) == fingerprint(model, dtype="bfloat16")
    (True, False)
    """
    return digest(model.state_dict(), json.dumps({**structure(model), **settings}, sort_keys=True, default=str))


def save_model(model: MultiExitModel, folder: PathLike) -> Path:
    """Write weights, description and graphs to a folder, whole or not at all, and return it.

    >>> import tempfile
    >>> stages, heads = [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]
    >>> folder = save_model(MultiExitModel(stages, heads), tempfile.mkdtemp())
    >>> sorted(path.name for path in folder.iterdir())
    ['config.json', 'model.safetensors']
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file():  # which would go on being served
        raise BadInput(f"{folder} holds an exported network: give another folder")
    cut_graph, constants = _cut_config(model)
    constants = {f"{CONSTANT}{name}": tensor.detach().cpu().clone() for name, tensor in constants.items()}
    tensors, tied = untied(model.state_dict())
    config = {
        "recipe": model.recipe,
        **structure(model),
        "num_classes": model.num_classes,
        "classes": list(model.classes),
        "fingerprint": fingerprint(model),
        "versions": installed_versions(*LIBRARIES),
        "tied": tied,
        **cut_graph,
    }
    content = save({**tensors, **constants}, {"alight": KIND, "config": json.dumps(config)})
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WEIGHTS, lambda file: file.write(content))
    write_json(folder / CONFIG, KIND, config)
    return folder


def load_model(
    folder: PathLike,
    backbone: Any = None,
    head: HeadFactory | Sequence[HeadFactory] | None = None,
    logits: LogitsChoice = None,
) -> MultiExitModel:
    """Load the network of a folder that `save_model` wrote, on the CPU, in evaluation mode.

    A network that alight cannot build again is passed in: the `backbone` that `attach_heads` or `from_outputs` was
    given, the networks of a cascade, or a `MultiExitModel` built by hand; `head` if heads were made by a function of
    one's own, and `logits` if it was a function. What is passed in gets the weights of the folder. The stages are built
    from the saved graphs, without tracing the network, and compared with it on one random batch.

    >>> import tempfile
    >>> from alight import from_timm
    >>> folder = save_model(from_timm("test_resnet", num_classes=10, image_size=32, count=2), tempfile.mkdtemp())
    >>> load_model(folder).num_exits
    3
    """
    folder = Path(folder)
    tensors, constants, config = _read(folder)
    with _refusals(folder, backbone):
        with torch.random.fork_rng(devices=[]):  # random weights draw numbers before they are overwritten
            network = _network(config["recipe"], backbone)
            pick = _pick(config["recipe"], logits)
            model = _model(config, network, constants, head, pick)
        _put(model, config, tensors)
        model.num_classes, model.classes = config["num_classes"], tuple(config["classes"])
        model.normalisation = config["normalisation"] and Normalisation(**config["normalisation"])
        model.recipe = config["recipe"]
        computed, saved = fingerprint(model), config["fingerprint"]
        if computed != saved:
            raise BadFile(folder, f"it is damaged (fingerprint {computed}, saved as {saved})", "save the network again")
        if "graph" in config and not isinstance(network, MultiExitModel) and not _is_whole(model, network, pick):
            problem = "its stages do not give what the network gives"
            if backbone is not None:
                raise Mismatch(f"{folder}: {problem} that was passed in: pass in the one that was saved")
            versions = ", ".join(f"{name} {number}" for name, number in config["versions"].items())
            raise BadFile(folder, f"{problem}; it was saved with {versions}", "install these, or save it again")
    if "graph" in config and isinstance(network, nn.Module) and not isinstance(network, MultiExitModel):
        model.keep_network(network, pick)
    return model.eval()


def _cut_config(model: MultiExitModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the graphs of a network that was cut, or why it has to be cut again, as config; and constant tensors."""
    recipe = model.recipe
    if recipe["source"] in ("stages", "cascade") or recipe.get("name") in ZOO.keys() - BACKBONES.keys():
        return {}, {}
    heads = model.heads[:-1] if recipe["source"] == "outputs" else ()
    try:
        graph, tensors = cut_data([*model.stages, *heads])
    except NotPlainData as error:
        return {"graph": None, "cut_again": str(error)}, {}
    return {"graph": graph}, tensors


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return weights, constants and config of a folder."""
    check_network_folder(folder)
    config = read_json(folder / CONFIG, KIND)
    tensors, metadata = read_tensors(folder / WEIGHTS, remedy="save the network again")
    if metadata.get("alight") != KIND or "config" not in metadata:
        raise BadFile(folder / WEIGHTS, "alight did not write it", "give a folder that alight saved a network to")
    try:
        beside = json.loads(metadata["config"])
    except json.JSONDecodeError as error:
        raise BadFile(folder / WEIGHTS, f"its config is damaged ({error})", "save the network again") from error
    if beside.get("fingerprint") != config.get("fingerprint"):  # a save was cut off between the two files
        config = beside
    constants = {name: tensors.pop(name) for name in list(tensors) if name.startswith(CONSTANT)}
    return tensors, {name.removeprefix(CONSTANT): tensor for name, tensor in constants.items()}, config


def read_tensors(
    path: PathLike, problem: str = "it is damaged", remedy: str = ""
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata."""
    try:
        with safetensors.safe_open(os.fspath(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise BadFile(path, f"{problem} ({error})", remedy) from error


@contextmanager
def _refusals(folder: Path, backbone: Any) -> Iterator[None]:
    """Raise what a damaged config or another backbone leads to as an error that names the folder."""
    try:
        yield
    except (BadFile, Mismatch, ImportError):
        raise
    except Exception as error:  # a damaged config fails in a dozen ways
        if backbone is not None:
            raise Mismatch(f"what was passed in does not fit {folder} ({error}): pass in what was saved") from error
        raise BadFile(folder, f"the network cannot be built again ({error})", "save it again") from error


def _network(recipe: Mapping[str, Any], backbone: Any) -> Any:
    """Return the full network, or one made with exits, with whatever weights."""
    source = recipe["source"]
    if isinstance(backbone, MultiExitModel) or (backbone is not None and source != "stages"):
        return backbone
    if source == "zoo" or source in BUILDERS:
        return build_network(recipe)
    what = recipe.get("type") or PASSED_IN.get(source, "the network")
    raise Mismatch(f"alight cannot build {what} again: pass it in as load_model(folder, backbone=...)")


def _pick(recipe: Mapping[str, Any], logits: LogitsChoice) -> Callable[[Any], Any] | None:
    """Return what picks the logits of the network's output; None where it has several, from early to late."""
    if recipe["source"] == "outputs":
        return None
    choice = recipe.get("logits")
    if isinstance(choice, Mapping) and not callable(logits):
        raise Mismatch(f"its logits are made by {choice['function']}: pass it in as load_model(folder, logits=...)")
    return partial(pick_logits, choice=logits if isinstance(choice, Mapping) else choice)


def _inputs(recipe: Mapping[str, Any], seed: int, pick: Callable[[Any], Any] | None) -> Inputs:
    """Return random inputs like the example of a recipe."""
    inputs = Inputs(random_example(recipe["example"], torch.Generator().manual_seed(seed)), pick)
    inputs.mask = recipe["mask"][0] if recipe.get("mask") else None
    return inputs


def _model(
    config: Mapping[str, Any],
    network: Any,
    constants: Mapping[str, Tensor],
    head: HeadFactory | Sequence[HeadFactory] | None,
    pick: Callable[[Any], Any] | None,
) -> MultiExitModel:
    """Return the network with its stages and heads, of the saved graphs or cut again, with whatever weights."""
    recipe = config["recipe"]
    if isinstance(network, MultiExitModel):
        return network
    inputs, after = _inputs(recipe, 0, pick) if recipe.get("example") else None, recipe.get("after", ())
    example = inputs and inputs.example
    if recipe["source"] == "cascade":
        return cascade([*network], config["exits"], example)
    is_split, graph = recipe["source"] == "outputs", config["graph"]
    if graph is None:
        stages, heads = split_outputs(network, example) if is_split else (cut(network, after, inputs), [])
    else:
        stages, heads, count = stages_from_data(network, graph, constants, after, example), [], len(config["exits"])
        if is_split:  # behind the stages are the network's own heads, but for the last, which does nothing
            stages, heads = stages[:count], [*map(as_head, stages[count:]), nn.Identity()]
    heads = heads or [*_heads(config["heads"][:-1], recipe["features"], head), nn.Identity()]
    return MultiExitModel(stages, heads, config["exits"], config["input_names"])


def _heads(
    saved: Sequence[Mapping[str, Any]],
    shapes: Sequence[Sequence[int]],
    head: HeadFactory | Sequence[HeadFactory] | None,
) -> list[nn.Module]:
    """Return heads: those of alight from their settings, others from the functions passed in."""
    if head is None:
        if foreign := [settings["type"] for settings in saved if "type" in settings]:
            raise Mismatch(
                f"its heads are {foreign[0]}, not alight's: pass in what made them, load_model(folder, head=...)"
            )
        return [HEADS[kind](**settings) for kind, settings in ((each.pop("head"), each) for each in map(dict, saved))]
    factories = [head] * len(shapes) if callable(head) else head
    heads = [factory(tuple(shape)) for factory, shape in zip(factories, shapes, strict=True)]
    for made, shape in zip(heads, shapes, strict=True):
        if any(map(is_lazy, made.parameters())):  # a lazy layer gets its shape from a first batch
            with in_mode(made, training=False):
                read(made, (torch.zeros(2, *shape),))
    return heads


def _put(model: MultiExitModel, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put saved tensors into their network, in their dtype; what is shared stays shared."""
    state = model.state_dict(keep_vars=True)
    whole = {**tensors, **{name: tensors[other] for name, other in config["tied"].items()}}
    own, saved = ({name: tuple(each.shape) for name, each in tensors.items()} for tensors in (state, whole))
    if own == saved and list(model.exits) == config["exits"]:
        for name, tensor in state.items():
            tensor.data = tensor.data.to(whole[name].dtype)
        model.load_state_dict(whole)
        return
    odd = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    difference = f"exits {list(model.exits)} here, {config['exits']} there"
    if odd:
        shapes = f"{own.get(odd[0], 'missing')} here, {saved.get(odd[0], 'missing')} there"
        difference = f"{len(odd)} weights differ, the first {odd[0]!r}: {shapes}"
    raise Mismatch(f"the folder is another network's ({difference}): pass in the one that was saved")


def _is_whole(model: MultiExitModel, network: nn.Module, pick: Callable[[Any], Any] | None) -> bool:
    """Check whether the stages give what the network gives for random samples, bit by bit."""
    dtype = next((weight.dtype for weight in model.stages.parameters() if weight.is_floating_point()), None)
    inputs = _inputs(model.recipe, 1, pick)
    inputs.find_vocabularies(network)
    batch = inputs.of_size(ROWS, dtype=dtype)
    heads = [*model.heads] if model.recipe["source"] == "outputs" else []
    return is_chain_of(network, [*model.stages], inputs, batch, heads)


def digest(state: Mapping[str, Tensor], structure: str = "") -> str:
    """Return the SHA-256 of a text and of tensors with names, types and shapes, the first 16 hexadecimal digits."""
    hashed = hashlib.sha256(structure.encode())
    for name, tensor in state.items():
        whole = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        hashed.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:16]


def load_backbone(model: MultiExitModel, path: PathLike) -> None:
    """Give the stages the weights of a safetensors file, by the names that they had before the network was cut."""
    state, _ = read_tensors(path, "it is not a whole safetensors file", CONVERT)
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("stages.")}
    original = {name: name.split(".", 2)[2] for name in own}  # after "stages." and the stage's number
    missing = [each for each in original.values() if each not in state]
    other = [each for name, each in original.items() if each in state and state[each].shape != own[name].shape]
    unknown = sorted(state.keys() - set(original.values()))
    for problem, names in {"are missing": missing, "have another shape": other, "are not needed": unknown}.items():
        if names:
            raise Mismatch(
                f"the weights are another network's: {len(names)} {problem}, the first {names[0]!r};"
                " name the network (and its number of classes) that they were saved from"
            )
    for name, tensor in own.items():
        tensor.copy_(state[original[name]])


def untied(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every tensor once, whole and in memory of its own, and the names of those that are another one."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise BadInput(f"{name} is a {type(tensor).__name__}, not a tensor: only tensors can be saved")
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor.detach().cpu().contiguous()
    stored = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    alone = {name: stored[tensor.untyped_storage().data_ptr()] == 1 for name, tensor in tensors.items()}
    return {name: tensor if alone[name] else tensor.clone() for name, tensor in tensors.items()}, tied
