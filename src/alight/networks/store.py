"""Networks as folders: weights, a description, and the graphs of their stages; nothing in them can run code."""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from alight.cutting.chain import is_chain_of, is_close
from alight.cutting.cut import as_head, cut, cut_into_layers, split_outputs
from alight.cutting.proof import ROWS, resized
from alight.cutting.running import Inputs, LogitsChoice, chain, in_mode, is_text, pick_logits, same_bits
from alight.cutting.skeleton import buffers_data, complete, modules_data, skeleton
from alight.cutting.stages import NotPlainData, Stage, cut_data, stages_from_data
from alight.data.preprocess import Normalisation
from alight.data.tokens import TOKENIZER, save_tokenizer
from alight.errors import AlightError, BadFile, BadInput, Mismatch
from alight.files import (
    CALIBRATION,
    CALLS,
    CONFIG,
    COSTS,
    FIT,
    MANIFEST,
    POLICY,
    TEST,
    WEIGHTS,
    PathLike,
    check_network_folder,
    check_replaceable,
    read_json,
    whole_folder,
    write_json,
    write_whole,
)
from alight.networks.heads import HEADS, HeadFactory
from alight.networks.libraries import BUILDERS, build_network, recognised
from alight.networks.multi_exit import MultiExitModel, digest, random_example, read, structure
from alight.networks.zoo import BACKBONES, ZOO
from alight.provenance import installed_versions

KIND = "MultiExitModel"
SAVE_WEIGHTS = "save the weights alone, torch.save(network.state_dict(), path), or as .safetensors"
UNDER = ("state_dict", "model_state_dict", "model")  # names under which trainings save weights
WRAPPERS = ("module.", "_orig_mod.")  # before names in a network that was wrapped
CONSTANT = "constants."  # before the names of tensors that have none in the network
UNSAVED = "unsaved."  # of these, before the names of buffers that a network has without saving them
REFERENCE = "reference."  # and before inputs, by number, and the "logits" that the network gave for them
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of texts for which layers are compared with the network
PASSED_IN = {
    "stages": "a MultiExitModel built by hand",
    "outputs": "a network with several outputs",
}
OTHER_LOGITS = (
    "something is not saved with its weights, such as a buffer with persistent=False or a number drawn when it is built"
    " (make it a saved buffer), so what was saved gives other logits than the network"
)
SAME_NETWORK = 0.05  # of the largest logit: devices differ by less, other networks by more
LIBRARIES = ("alight", "torch", "torchvision", "timm", "transformers", "safetensors")


def fingerprint(model: MultiExitModel) -> str:
    """Return the network's fingerprint: of weights, statistics, their dtype, exits, heads and normalisation.

    Args:
        model: The network.

    >>> model = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])
    >>> fingerprint(model) == fingerprint(model), fingerprint(model) == fingerprint(model.bfloat16())
    (True, False)
    """
    return digest(model.state_dict(), json.dumps(structure(model), sort_keys=True, default=str))


def save_model(model: MultiExitModel, folder: PathLike, *, force: bool = False) -> Path:
    """Write weights, description, graphs and tokenizer to a folder, whole or not at all, and return it.

    A network of timm, torchvision or transformers is remembered by its name and settings, if what they build again is
    shown to be the same network. One's own is written down call by call, down to the layers of torch, so that
    `load_model` needs none of its code; where that cannot be shown to give the same, it has to be passed in again.

    Args:
        model: The network.
        folder: To write.
        force: Replace another network that is there, and what `fit` wrote about it.

    >>> import tempfile
    >>> stages, heads = [nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]
    >>> folder = save_model(MultiExitModel(stages, heads), tempfile.mkdtemp())
    >>> sorted(path.name for path in folder.iterdir())
    ['config.json', 'model.safetensors']
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file():  # which would go on being served
        raise BadInput(f"{folder} holds an exported network: give another folder")
    identity = fingerprint(model)
    if not _holds(folder, identity):
        check_replaceable(folder, force=force)
    recipe = {**model.recipe, **(_recognised(model) or {})}
    if "untrained" in recipe:
        recipe["untrained"] = {part: each for part, each in recipe["untrained"].items() if model.is_untrained(part)}
    cut_graph, constants = _cut_config(model, alone=recipe["source"] == "backbone")
    constants |= _reference(model) if cut_graph else {}
    whole = torch.contiguous_format
    constants = {
        f"{CONSTANT}{name}": each.detach().cpu().clone(memory_format=whole) for name, each in constants.items()
    }
    tensors, tied = untied(model.state_dict())
    config = {
        "recipe": recipe,
        **structure(model),
        "num_classes": model.num_classes,
        "classes": list(model.classes),
        "fingerprint": identity,
        "versions": installed_versions(*LIBRARIES),
        "tied": tied,
        **cut_graph,
    }
    content = save({**tensors, **constants}, {"alight": KIND, "config": json.dumps(config)})
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CALLS).is_file() and not _holds(folder, identity):  # what `fit` wrote about another network
        for name in (POLICY, COSTS, CALIBRATION, TEST, CALLS, FIT):
            (folder / name).unlink(missing_ok=True)
    write_whole(folder / WEIGHTS, lambda file: file.write(content))
    write_json(folder / CONFIG, KIND, config)
    if model.tokenizer is not None and not _is_same(model.tokenizer, folder / TOKENIZER):
        with whole_folder(folder / TOKENIZER) as filling:
            save_tokenizer(model.tokenizer, filling)
    return folder


def _holds(folder: Path, identity: str) -> bool:
    """Return whether the network of this fingerprint lies in the folder."""
    with suppress(AlightError, OSError):
        return bool(read_json(folder / CONFIG, KIND).get("fingerprint") == identity)
    return False


def _is_same(tokenizer: Any, folder: Path) -> bool:
    return isinstance(tokenizer, str | os.PathLike) and Path(tokenizer).resolve() == folder.resolve()


def load_model(
    folder: PathLike,
    backbone: Any = None,
    head: HeadFactory | Sequence[HeadFactory] | None = None,
    logits: LogitsChoice = None,
) -> MultiExitModel:
    """Load the network of a folder that `save_model` wrote, on the CPU, in evaluation mode.

    A network that the folder does not hold whole is passed in: the `backbone` that `attach_heads` or `from_outputs` was
    given, or a `MultiExitModel` built by hand; `head` if heads were made by a function of
    one's own, and `logits` if it was a function. What is passed in gets the weights of the folder. The stages are built
    from the saved graphs, without tracing the network, and compared with it on a random batch, once samples have left,
    and with other weights; and with the logits of two inputs that were saved.

    Args:
        folder: That `save_model` wrote.
        backbone: The network, where the folder does not hold it whole; it gets the weights of the folder.
        head: Functions of one's own that made the heads.
        logits: A function of the output, if it was one.

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
            alone = backbone is None and config.get("layers") is not None
            network = _skeleton(config, tensors, constants) if alone else _network(config["recipe"], backbone)
            pick = None if alone else _pick(config["recipe"], logits)
            model = _model(config, network, constants, head, pick)
            if config.get("layers") is not None and not isinstance(network, MultiExitModel):
                complete([*model.stages], network, _by_stage(tensors, config["tied"]))
        _restore(model, folder, config, tensors)
        whole = not alone and isinstance(network, nn.Module) and not isinstance(network, MultiExitModel)
        names = [name for name in constants if name.startswith(REFERENCE)]
        reference = {name.removeprefix(REFERENCE): constants[name] for name in names}
        if whole:
            model.keep_network(network, pick)
            if problem := _difference(model, network, reference):
                raise _not_the_network(folder, config, problem, is_given=backbone is not None)
    if alone:
        model.known_inputs, model.reference = config["known"], reference
    return model.eval()


def _reference(model: MultiExitModel) -> dict[str, Tensor]:
    """Return two inputs, by number, and the "logits" that the stages give for them."""
    inputs = _inputs(model.recipe, 1, model.pick)
    weight = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    few = inputs.of_size(2, weight.device, weight.dtype)
    with in_mode(model, training=False):
        logits = chain(model.stages, tuple(each.clone() for each in few))  # they may write into them
    named = {**{str(index): each for index, each in enumerate(few)}, "logits": logits}
    return {f"{REFERENCE}{name}": tensor for name, tensor in named.items()}


def _restore(model: MultiExitModel, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Give a model the weights of a folder and what it says about them, unless they are not those that were saved."""
    _put(model, config, tensors)
    model.num_classes, model.classes = config["num_classes"], tuple(config["classes"])
    model.normalisation = config["normalisation"] and Normalisation(**config["normalisation"])
    model.recipe = config["recipe"]
    if (folder / TOKENIZER).is_dir():
        model.tokenizer = folder / TOKENIZER
    computed, saved = fingerprint(model), config["fingerprint"]
    if computed != saved:
        raise BadFile(folder, f"it is damaged (fingerprint {computed}, saved as {saved})", "save the network again")


def _difference(model: MultiExitModel, network: nn.Module, reference: Mapping[str, Tensor]) -> str:
    """Return how stages differ from the network, or both from what was saved, as far as devices differ; or ""."""
    if not _is_whole(model, network, model.pick):
        return "its stages do not give what the network gives"
    given = dict(reference)
    expected = given.pop("logits")
    with in_mode(model, training=False):
        logits = chain(model.stages, tuple(each.clone() for each in given.values()))
    return "" if is_close(logits, expected, SAME_NETWORK) else OTHER_LOGITS


def _not_the_network(folder: Path, config: Mapping[str, Any], problem: str, *, is_given: bool) -> Mismatch | BadFile:
    """Return the error of a network that is not the one that was saved."""
    if is_given:
        return Mismatch(f"{folder}: {problem} that was passed in: pass in the one that was saved")
    versions = ", ".join(f"{name} {number}" for name, number in config["versions"].items())
    return BadFile(folder, f"{problem}; it was saved with {versions}", "install these, or save it again")


def _recognised(model: MultiExitModel) -> dict[str, Any] | None:
    """Return how a library builds the network of a model, None where it is not shown to be the same network."""
    network = model.network
    if model.recipe["source"] != "backbone" or network is None:
        return None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = recognised(network, model.num_classes or 0)
        if recipe is None:
            return None
        try:
            built = build_network(recipe)
            built.load_state_dict(network.state_dict())
            weight = next(network.parameters())
            same = _is_whole(model, built.to(weight.device, weight.dtype), model.pick)
        except Exception:  # whatever the library's own code does with settings that it was not built with
            return None
    return recipe if same else None


def _cut_config(model: MultiExitModel, *, alone: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the graphs of a network that was cut, or why it has to be cut again, as config; and constant tensors.

    `alone` asks for graphs that need no code of the network's own, which are taken if they give the same.
    """
    recipe = model.recipe
    if recipe["source"] == "stages" or recipe.get("name") in ZOO.keys() - BACKBONES.keys():
        return {}, {}
    if alone:
        with suppress(Exception):  # whatever a network does that layers do not: then its code is needed
            return _layers_config(model)
    heads = model.heads[:-1] if recipe["source"] == "outputs" else ()
    try:
        graph, tensors = cut_data([*model.stages, *heads])
    except NotPlainData as error:
        return {"graph": None, "cut_again": str(error)}, {}
    return {"graph": graph}, tensors


def _layers_config(model: MultiExitModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return graphs of functions and layers of torch alone, and these layers, as config; and constant tensors.

    Raise BadInput where there are none, or where stages that are built of them do not give what the model gives.
    """
    inputs = _inputs(model.recipe, 1, model.pick)
    stages = [*model.stages]
    try:
        modules = modules_data(stages)
    except NotPlainData:
        if model.network is None or not all(isinstance(stage, Stage) for stage in stages):
            raise
        with in_mode(model.network, training=False):
            stages = cut_into_layers(model.network, model.recipe["after"], inputs)
        modules = modules_data(stages)
    graph, constants = cut_data(stages)
    buffers, unsaved = buffers_data([*model.stages])
    config = {"graph": graph, "layers": modules, "buffers": buffers}
    constants |= {f"{UNSAVED}{name}": tensor for name, tensor in unsaved.items()}
    known = _check_layers(model, config, constants, inputs)
    known["weights"] = digest(model.stages.state_dict())
    return {**config, "known": known}, constants


def _from_data(
    model: MultiExitModel, config: Mapping[str, Any], constants: Mapping[str, Tensor]
) -> Sequence[nn.Module]:
    """Return the stages of a model, built of plain data with copies of its weights."""
    tensors, tied = untied(model.state_dict())
    copied = {name: tensor.clone() for name, tensor in tensors.items()}
    kept = {name: tensor.detach().cpu().clone() for name, tensor in constants.items()}
    network = _skeleton({**config, "tied": tied}, copied, kept)
    stages = stages_from_data(network, config["graph"], kept)
    complete(stages, network, _by_stage(copied, tied))
    return stages


def _check_layers(
    model: MultiExitModel, config: Mapping[str, Any], constants: Mapping[str, Tensor], inputs: Inputs
) -> dict[str, Any]:
    """Return for which inputs stages built of plain data give what the model gives, bit by bit.

    Raise unless they do so for inputs like the example.
    """
    stages = _from_data(model, config, constants)
    weight = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    batch = inputs.of_size(ROWS, weight.device, weight.dtype)
    own = nn.ModuleList(stages).to(weight.device)
    names = [[*each.state_dict()] for each in (model.stages, own)]

    def is_same(batch: tuple[Tensor, ...]) -> bool:
        try:
            with in_mode(model, own, training=False):
                model.proven(batch)
                return same_bits(*[chain(each, tuple(part.clone() for part in batch)) for each in (model.stages, own)])
        except Exception:  # a size that the network, its stages or their layers do not take
            return False

    if not is_same(batch) or sorted(names[0]) != sorted(names[1]):
        raise BadInput("the layers of the network do not give what it gives")
    return _known_sizes(model, tuple(each[:2] for each in batch), is_same)


def _known_sizes(
    model: MultiExitModel, few: tuple[Tensor, ...], is_same: Callable[[tuple[Tensor, ...]], bool]
) -> dict[str, Any]:
    """Return the lengths of texts, or other shapes that the model was compared at, for which stages are the same."""
    if all(map(is_text, few)):
        return {"sizes": [], "lengths": _known_lengths(few, is_same)}
    shapes = {tuple(tuple(shape) for shape, _ in kind) for _, *kind in model.proven_kinds}
    shapes |= {tuple(map(tuple, each)) for each in (model.known_inputs or {"sizes": ()})["sizes"]}
    return {"sizes": [shape for shape in sorted(shapes) if is_same(_of_shape(few, shape))], "lengths": None}


def _of_shape(batch: tuple[Tensor, ...], shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return a batch whose samples have these shapes."""
    changes = [([(index, axis)], size) for index, shape in enumerate(shapes) for axis, size in enumerate(shape, 1)]
    return resized(batch, changes)


def _known_lengths(batch: tuple[Tensor, ...], is_same: Callable[[tuple[Tensor, ...]], bool]) -> tuple[int, int]:
    """Return the shortest and the longest of the tried texts, from those of the batch up and down."""
    own = batch[0].shape[1]
    known = [own]
    for tried in ([each for each in LENGTHS if each > own], [each for each in LENGTHS[::-1] if each < own]):
        for length in tried:
            if not is_same(_of_shape(batch, [[length]] * len(batch))):
                break
            known.append(length)
    return min(known), max(known)


def _skeleton(config: Mapping[str, Any], tensors: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> nn.Module:
    """Return the layers, parameters and buffers of a saved network, which has no code."""
    unsaved = {name.removeprefix(UNSAVED): each for name, each in constants.items() if name.startswith(UNSAVED)}
    return skeleton(config["layers"], config["buffers"], _by_stage(tensors, config["tied"]), unsaved)


def _by_stage(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of the stages by the number of their stage and their name, those of several names too."""
    whole = {**tensors, **{name: tensors[other] for name, other in tied.items()}}
    return {name.removeprefix("stages."): each for name, each in whole.items() if name.startswith("stages.")}


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
    where = f" (it was {recipe['built']})" if recipe.get("built") else ""
    raise Mismatch(f"alight cannot build {what} again{where}: pass it in as load_model(folder, backbone=...)")


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
    inputs = Inputs(random_example(recipe, torch.Generator().manual_seed(seed)), pick)
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
    is_split, graph = recipe["source"] == "outputs", config["graph"]
    if graph is None:
        inputs = _inputs(recipe, 0, pick)
        stages, heads = (
            split_outputs(network, inputs.example) if is_split else (cut(network, recipe["after"], inputs), [])
        )
    else:
        stages, heads, count = stages_from_data(network, graph, constants), [], len(config["exits"])
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


def load_backbone(model: MultiExitModel, path: PathLike) -> None:
    """Give the network its weights from a file, by the names that they have in it; see `read_weights`."""
    state = read_weights(path)
    if model.network is not None:
        own = {name: [tensor] for name, tensor in model.network.state_dict().items()}
    else:  # built with exits: names after "stages." and the stage's number
        own = {}
        for name, tensor in model.state_dict().items():
            if name.startswith("stages."):
                own.setdefault(name.split(".", 2)[2], []).append(tensor)
    inner = {name.partition(".")[2]: tensor for name, tensor in state.items()}
    if inner.keys() == own.keys() and len({name.partition(".")[0] for name in state}) == 1:
        state = inner  # of a module that holds the network, as one of Lightning
    _check_names(state, own)
    for name, tensors in own.items():
        for tensor in tensors:
            tensor.copy_(state[name])


def read_weights(path: PathLike) -> dict[str, Tensor]:
    """Return the weights of a file by name: .safetensors, or what `torch.save` wrote, of which no code is run.

    They may lie under "state_dict", "model_state_dict" or "model", and be those of a network that was wrapped to run
    on several devices or compiled.
    """
    if Path(path).suffix == ".safetensors":
        return unwrapped(read_tensors(path, "it is not a whole safetensors file", SAVE_WEIGHTS)[0], path)
    with Path(path).open("rb"):  # that it is there
        pass
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # objects with code, another kind of file, or a damaged one: each fails in its own way
        problem = "it is damaged, or holds more than weights, such as a whole network, whose code is not run"
        raise BadFile(path, problem, SAVE_WEIGHTS) from error
    return unwrapped(content, path)


def unwrapped(content: Any, path: PathLike) -> dict[str, Tensor]:
    """Return the weights by name in what a training saved.

    >>> [*unwrapped({"epoch": 3, "state_dict": {"module.fc.weight": torch.zeros(1)}}, "net.pt")]
    ['fc.weight']
    """
    while isinstance(content, Mapping) and not _is_state(content):
        inner = next((content[key] for key in UNDER if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not _is_state(content):
        held = ", ".join(map(str, content)) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise BadFile(path, f"it has no weights by name, but {held or 'nothing'}", SAVE_WEIGHTS)
    state = dict(content)
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _is_state(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(isinstance(each, Tensor) for each in content.values())


def _check_names(state: Mapping[str, Tensor], own: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise unless the weights are those of this network, and name the first that differs in each way."""
    problems = {
        "missing in the file": [name for name in own if name not in state],
        "not in the network": [name for name in state if name not in own],
        "of another shape": [
            f"{name} ({tuple(state[name].shape)} in the file, {tuple(tensors[0].shape)} in the network)"
            for name, tensors in own.items()
            if name in state and state[name].shape != tensors[0].shape
        ],
    }
    if found := [f"{len(names)} {problem}, as {names[0]}" for problem, names in problems.items() if names]:
        raise Mismatch(
            f"the weights are another network's: {'; '.join(found)}; name the network (and its number of classes) that"
            " they were saved from"
        )


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
