"""Classifiers of torchvision, timm and Hugging Face with exits, and how to build them again from plain data."""

import difflib
import importlib
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
from torch import nn

from alight.data.labels import ONE_CLASS
from alight.data.preprocess import Normalisation
from alight.data.tokens import CONFIG, FILE, MASK
from alight.errors import BadInput
from alight.networks.attach import EXITS, attach_heads
from alight.networks.heads import HeadChoice
from alight.networks.multi_exit import MultiExitModel
from alight.networks.own import from_own
from alight.networks.zoo import BACKBONES, ZOO

EXTRAS = {"timm": "vision", "torchvision": "vision", "transformers": "text"}
IMAGE_SIZE = 224  # of a network that does not name one
SECONDS = 5  # until a hub that gives no answer counts as out of reach
TOKENS = 16  # in an example of text; a network takes any number of them
REFUSED = re.compile(  # arguments that could fetch something or change what is built: a folder cannot have them
    "pretrained|checkpoint|weights|cache|hub|features_only|url|file|trust|quantization"
)


def from_timm(
    name: str,
    *,
    num_classes: int | None = None,
    pretrained: bool = False,
    after: str | Sequence[str] = "auto",
    head: HeadChoice = "auto",
    count: int = EXITS,
    image_size: int | None = None,
    **arguments: Any,
) -> MultiExitModel:
    """Build a network of timm with exits; further arguments go to `timm.create_model`.

    A folder that `save_model` wrote is loaded without downloading weights again.

    Args:
        name: Of a model of timm.
        num_classes: None: as many as the model has.
        pretrained: Download weights; else they are random.
        after: As of `attach_heads`.
        head: As of `attach_heads`.
        count: How many exits "auto" places.
        image_size: None: the model's own.
        arguments: Further ones of `timm.create_model`.

    >>> from_timm("test_resnet", num_classes=10, image_size=32, count=2).exits
    ('layer1', 'layer2', 'end')
    """
    if num_classes is not None:
        arguments["num_classes"] = num_classes
    network = _timm_network(name, pretrained=pretrained, from_hub=":" in name, **arguments)
    config = network.pretrained_cfg
    channels = int(arguments.get("in_chans", config["input_size"][0]))
    model = attach_heads(
        network,
        _places(after, count),
        example=torch.zeros(2, channels, *_timm_size(network, image_size)),
        head=head,
        normalisation=_normalisation(config, channels),
    )
    if ":" not in name:  # one from the hub may be built in a way that only its hub knows: it is passed in again
        arguments["num_classes"] = model.num_classes
        model.recipe |= {"source": "timm", "name": name, "arguments": arguments}
    return model


def from_torchvision(
    name: str,
    *,
    num_classes: int | None = None,
    weights: str | None = None,
    after: str | Sequence[str] = "auto",
    head: HeadChoice = "auto",
    count: int = EXITS,
    image_size: int = IMAGE_SIZE,
    **arguments: Any,
) -> MultiExitModel:
    """Build a network of torchvision with exits; further arguments go to `torchvision.models.get_model`.

    Args:
        name: Of a model of torchvision.
        num_classes: None: as many as the model has.
        weights: Such as "DEFAULT" or "IMAGENET1K_V1"; None: random.
        after: As of `attach_heads`.
        head: As of `attach_heads`.
        count: How many exits "auto" places.
        image_size: Height and width of images.
        arguments: Further ones of `torchvision.models.get_model`.

    >>> from_torchvision("resnet18", num_classes=10, image_size=32, after=["layer1", "layer2"]).exits
    ('layer1', 'layer2', 'end')
    """
    if num_classes is not None:
        arguments["num_classes"] = num_classes
    network = _torchvision_network(name, weights=weights, **arguments)
    models = _library("torchvision").models
    known = models.get_model_weights(name)[weights] if weights else None
    prepare = (known or models.get_model_weights(name).DEFAULT).transforms()
    model = attach_heads(
        network,
        _places(after, count),
        example=torch.zeros(2, 3, image_size, image_size),
        head=head,
        classes=known.meta["categories"] if known else (),
        normalisation=Normalisation(tuple(prepare.mean), tuple(prepare.std)),
    )
    arguments["num_classes"] = model.num_classes
    model.recipe |= {"source": "torchvision", "name": name, "arguments": arguments}
    return model


def from_transformers(
    source: Any,
    *,
    num_classes: int | None = None,
    after: str | Sequence[str] = "auto",
    head: HeadChoice = "auto",
    count: int = EXITS,
    example: Any = None,
) -> MultiExitModel:
    """Build a text or image classifier of Hugging Face with exits, from a folder or name with weights, or a config.

    Code that comes with a network is never run. A network without a classifier gets a random one. Text is taken as
    "input_ids" and "attention_mask", images at the network's size, unless an `example` says otherwise: pairs of texts
    need one with "token_type_ids". Images are normalised as the image processor says that lies beside the weights.

    Args:
        source: A folder or name with weights, a config, or a network.
        num_classes: None: as many as the network has.
        after: As of `attach_heads`.
        head: As of `attach_heads`.
        count: How many exits "auto" places.
        example: A batch; None: "input_ids" and "attention_mask", or images of the network's size.

    >>> from transformers import BertConfig
    >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 32}
    >>> from_transformers(BertConfig(vocab_size=50, **sizes), num_classes=3).num_exits
    4
    """
    auto = _library("transformers")
    settings, normalisation = {} if num_classes is None else {"num_labels": num_classes}, None
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        _check_folder(source)
        with nullcontext() if Path(source).is_dir() else _downloading(str(source), str(source)):
            try:
                config = auto.AutoConfig.from_pretrained(source, trust_remote_code=False, **settings)
            except ValueError as error:
                reason = str(error).partition("\n")[0]
                what = f"{str(source)!r} is not a network of transformers ({reason})"
                remedy = f"write {source} alone if alight saved it, or give a folder of transformers"
                raise BadInput(f"{what}: {remedy}") from error
            network = _with_weights(config, source)
        normalisation = _processor_normalisation(source) if "Image" in _auto_class(config).__name__ else None
    else:
        config = source
        if num_classes is not None:
            config.num_labels = num_classes
        network = _auto_class(config).from_config(config, trust_remote_code=False)
    if (task := getattr(config, "problem_type", None)) not in (None, "single_label_classification"):
        raise BadInput(
            f"the network was trained for {task}: {ONE_CLASS}; if it is not, set config.problem_type to None"
        )
    model = attach_heads(
        network,
        _places(after, count),
        example=_transformers_example(config) if example is None else example,
        head=head,
        normalisation=normalisation,
        classes=own_classes(network),
    )
    model.recipe |= {"source": "transformers", "name": config.model_type, "arguments": _config_settings(config)}
    model.tokenizer = _tokenizer_beside(source, model)
    return model


def own_classes(network: Any) -> tuple[str, ...]:
    """Return the names that a network of transformers has for its classes; none of others, or where they are numbers.

    >>> own_classes(nn.Linear(2, 2))
    ()
    """
    config = getattr(network, "config", None)
    named = getattr(config, "id2label", None) or {}
    names = tuple(named.get(index, f"LABEL_{index}") for index in range(getattr(config, "num_labels", 0)))
    return () if names == tuple(f"LABEL_{index}" for index in range(len(names))) else names


LIBRARIES: dict[str, Callable[..., MultiExitModel]] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
    "transformers": from_transformers,
}
PRETRAINED: dict[str, dict[str, Any]] = {"timm": {"pretrained": True}, "torchvision": {"weights": "DEFAULT"}}


def from_name(
    network: str,
    *,
    num_classes: int | None = None,
    pretrained: bool = False,
    after: str | int | Sequence[str] = "auto",
    head: str = "auto",
    count: int = EXITS,
    image_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    arguments: Mapping[str, Any] | None = None,
    stated: Mapping[str, Any] | None = None,
) -> MultiExitModel:
    """Build the network LIBRARY:NAME, FILE.py:NAME or package.module:NAME with exits; `arguments` are its own.

    `input_shape`, of one sample, and what is `stated` are for networks of files and packages alone (`from_own`).

    >>> from_name("zoo:msdnet_cifar", num_classes=10, arguments={"blocks": 2, "channels": 4}).exits
    ('block 0', 'block 1')
    """
    library, _, name = network.partition(":")
    if is_own(network):
        if pretrained:
            raise BadInput(f"{network} has no weights to download: give a file of them (--weights)")
        given: dict[str, Any] = {"image_size": image_size, "input_shape": input_shape, "arguments": arguments}
        return from_own(network, num_classes=num_classes, after=after, head=head, count=count, stated=stated, **given)
    if stated:
        raise BadInput(f"{network} says itself where its {' and '.join(stated)} are: leave it out")
    if input_shape is not None:
        raise BadInput(f"{network} says itself what it takes: leave input_shape out, or give image_size")
    options = {"num_classes": num_classes, "image_size": image_size} | dict(arguments or {})
    options = {key: value for key, value in options.items() if value is not None}
    if library not in LIBRARIES or not name:
        return _from_zoo(network, after, head, count, options)
    if library == "transformers" and not pretrained and not Path(name).is_dir():
        raise BadInput(
            f"there is no folder {name!r}: give that of a network of transformers, or pretrained (--pretrained) to"
            f" download {name!r} from its hub"
        )
    options |= {"after": after, "head": head, "count": count} | (PRETRAINED.get(library, {}) if pretrained else {})
    return LIBRARIES[library](name, **options)


def _from_zoo(
    network: str, after: str | int | Sequence[str], head: str, count: int, options: dict[str, Any]
) -> MultiExitModel:
    """Return the network zoo:NAME, with its own exits."""
    library, _, name = network.partition(":")
    if network.endswith((".pt", ".pth", ".safetensors")):
        raise BadInput(f"{network} holds weights alone: load them into the module that they are of, and give that")
    if library != "zoo" or name not in ZOO:
        raise BadInput(
            f"network {network!r}: write timm:NAME, torchvision:NAME, transformers:FOLDER, FILE.py:NAME, or zoo:NAME"
            f" with NAME one of {', '.join(ZOO)}"
        )
    if after != "auto" or count != EXITS:
        raise BadInput(f"the exits of {network} stand where its paper puts them: leave after and count out")
    if head != "auto" and name in BACKBONES:
        options["head"] = head
    model = ZOO[name](**options)
    model.note_untrained("heads")
    return model


def _places(after: str | int | Sequence[str], count: int) -> str | int | Sequence[str]:
    """Return where `attach_heads` puts exits: the usual number may be fewer, another one is met or refused."""
    return count if after == "auto" and count != EXITS else after


def is_own(network: str) -> bool:
    """Return whether text names a network of a file or a package: FILE.py:NAME or package.module:NAME.

    >>> is_own("nets.py:Net"), is_own("my.models:build"), is_own("timm:resnet18"), is_own("resnet18")
    (True, True, False, False)
    """
    place, colon, name = network.rpartition(":")
    if not colon or not name or network.partition(":")[0] in (*LIBRARIES, "zoo"):
        return False
    return place.endswith(".py") or all(part.isidentifier() for part in place.split("."))


def build_network(recipe: Mapping[str, Any]) -> nn.Module:
    """Return the full network of a recipe, or one made with exits, with random weights.

    Nothing is fetched and only the library's code is run.

    >>> type(build_network({"source": "zoo", "name": "resnet_digits", "num_classes": 10, "arguments": {}})).__name__
    'ResNet'
    """
    source, name, arguments = recipe["source"], recipe["name"], recipe["arguments"]
    if source == "zoo":
        if name not in ZOO:
            raise BadInput(f"this alight has no network {name!r}")
        classes = recipe["num_classes"]
        return BACKBONES[name](classes) if name in BACKBONES else ZOO[name](classes, **arguments)
    if refused := next(filter(REFUSED.search, arguments), None):
        raise BadInput(f"its recipe asks for {refused!r}, which could fetch something: only settings are taken")
    return BUILDERS[source](name, **arguments)


def recognised(network: nn.Module, num_classes: int) -> dict[str, Any] | None:
    """Return how a library builds a network that was given as an object; None where none builds one like it.

    "Like it" is by class, printed structure, and names and shapes of weights; whether it computes the same is for the
    caller to compare.

    >>> import timm
    >>> recognised(timm.create_model("test_resnet", num_classes=7), 7)
    {'source': 'timm', 'name': 'test_resnet', 'arguments': {'num_classes': 7}}
    >>> recognised(nn.Linear(2, 2), 2) is None
    True
    """
    library = type(network).__module__.partition(".")[0]
    candidates = CANDIDATES.get(library, lambda *_: ())(network, num_classes)
    found = [each for each in ({"source": library, **each} for each in candidates) if _builds_alike(each, network)]
    return found[0] if len(found) == 1 else None


def _builds_alike(recipe: Mapping[str, Any], network: nn.Module) -> bool:
    """Return whether what is built of a recipe has the class, structure and weights of a network, by shape."""
    try:
        with torch.device("meta"):  # shapes without numbers
            built = build_network(recipe)
    except Exception:
        try:
            built = build_network(recipe)  # some libraries compute with numbers when they build
        except Exception:  # or refuse the settings
            return False
    shapes = [{name: tuple(each.shape) for name, each in one.state_dict().items()} for one in (built, network)]
    return type(built) is type(network) and str(built) == str(network) and shapes[0] == shapes[1]


def _timm_candidates(network: Any, num_classes: int) -> Iterator[dict[str, Any]]:
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None) or {}
    name = config.get("architecture")
    if not name:
        return
    weight = next((each for each in network.parameters() if each.ndim == 4), None)
    settings: list[dict[str, Any]] = [{}]
    if weight is not None and weight.shape[1] != config.get("input_size", (3,))[0]:
        settings = [{"in_chans": int(weight.shape[1])}]
    size = getattr(getattr(network, "patch_embed", None), "img_size", None)
    if size is not None and tuple(size) != tuple(config.get("input_size", (0, 0, 0))[1:]):
        settings = [{**each, "img_size": list(size)} for each in settings]
    yield from ({"name": str(name), "arguments": {"num_classes": num_classes, **each}} for each in settings)


def _torchvision_candidates(network: Any, num_classes: int) -> Iterator[dict[str, Any]]:
    models = _library("torchvision").models
    for name in models.list_models(module=models):
        if models.get_model_builder(name).__module__ == type(network).__module__:
            yield {"name": name, "arguments": {"num_classes": num_classes}}


def _transformers_candidates(network: Any, num_classes: int) -> Iterator[dict[str, Any]]:
    config = getattr(network, "config", None)
    if config is not None and getattr(config, "num_labels", None) == num_classes:
        yield {"name": config.model_type, "arguments": _config_settings(config)}


CANDIDATES: dict[str, Callable[[Any, int], Iterator[dict[str, Any]]]] = {
    "timm": _timm_candidates,
    "torchvision": _torchvision_candidates,
    "transformers": _transformers_candidates,
}


def _config_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a config of transformers as plain data, without those that could fetch something."""
    kept = {key: value for key, value in config.to_diff_dict().items() if not REFUSED.search(key) and key != "auto_map"}
    return dict(_as_json(kept))


def _check_folder(source: Any) -> None:
    """Raise if this is the path of a folder that does not exist, so that it is not looked for on a network."""
    place = Path(source).expanduser()
    is_path = not isinstance(source, str) or place.is_absolute() or source.startswith((".", "~"))
    if (is_path or len(place.parts) > 2) and not place.is_dir():
        raise BadInput(f"there is no folder {str(source)!r}: check the path, or give a name of the hub, as owner/name")
    if place.is_dir() and not (place / "config.json").is_file():
        raise BadInput(f"the folder {str(source)!r} has no config.json: give one that transformers saved a network to")


def _with_weights(config: Any, source: Any) -> Any:
    """Return the network of a config with the weights beside it."""
    try:
        return _auto_class(config).from_pretrained(source, config=config, trust_remote_code=False)
    except OSError as error:
        if not Path(source).is_dir():
            raise  # of a download
        raise BadInput(
            f"the folder {str(source)!r} has a config.json and no weights: save a trained network there,"
            " network.save_pretrained(folder); to train one from the start, build it in Python,"
            " AutoModelForSequenceClassification.from_config(config), and give that to fit with"
            " training=TrainingSettings(mode='joint')"
        ) from error


def _timm_network(name: str, *, pretrained: bool = False, from_hub: bool = False, **arguments: Any) -> Any:
    timm = _library("timm")
    if from_hub:
        where, _, place = name.partition(":")
        if where == "local-dir" and not Path(place).is_dir():
            raise BadInput(f"there is no folder {place!r}: check the path of timm:local-dir:FOLDER")
        _check_folder(place)
    else:
        _check_known(timm, name.partition(".")[0], timm.list_models())
    known = timm.get_pretrained_cfg(name) if pretrained and not from_hub else None
    repository = place if from_hub else getattr(known, "hf_hub_id", None)
    with _downloading(name, repository) if known or (from_hub and where != "local-dir") else nullcontext():
        return timm.create_model(name, pretrained=pretrained, **arguments)


def _torchvision_network(name: str, *, weights: str | None = None, **arguments: Any) -> Any:
    torchvision = _library("torchvision")
    _check_known(torchvision, name, torchvision.models.list_models(module=torchvision.models))
    with _downloading(name) if weights else nullcontext():
        return torchvision.models.get_model(name, weights=weights, **arguments)


@contextmanager
def _downloading(name: str, repository: str | None = None) -> Iterator[None]:
    """Raise in one sentence what keeps a network from being downloaded."""
    try:
        if repository:
            _check_hub(repository)
        yield
    except OSError as error:
        reason = str(getattr(error, "reason", error)).strip().partition("\n")[0].rstrip(".")
        raise BadInput(
            f"{name} cannot be downloaded ({reason}): check the connection, or give a folder or a file of weights that"
            " is here"
        ) from error


def _check_hub(repository: str) -> None:
    """Raise if the hub cannot be reached, and has to be: its own client tries for half a minute per file."""
    hub, files = _library("huggingface_hub"), ("config.json", "model.safetensors", "pytorch_model.bin")
    cached = any(isinstance(hub.try_to_load_from_cache(repository, file), str) for file in files)
    if cached or hub.constants.HF_HUB_OFFLINE:
        return
    try:
        urlopen(Request(hub.HfApi().endpoint, method="HEAD"), timeout=SECONDS).close()  # by a proxy, if any
    except URLError as error:
        if not isinstance(error, HTTPError) and not isinstance(error.reason, ssl.SSLError):  # else it has answered
            raise


def _transformers_network(name: str, **arguments: Any) -> Any:
    auto = _library("transformers")
    settings = {key: value for key, value in arguments.items() if key not in ("model_type", "auto_map")}
    if _asks_for_kernels(settings):
        raise BadInput("its recipe asks for attention from a hub, which is code from elsewhere")
    config = auto.AutoConfig.for_model(name, **settings)
    return _auto_class(config).from_config(config, trust_remote_code=False)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "timm": _timm_network,
    "torchvision": _torchvision_network,
    "transformers": _transformers_network,
}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'{name} is not installed: pip install "alight[{EXTRAS[name]}]"') from error


def _check_known(library: Any, name: str, known: Sequence[str]) -> None:
    if name not in known:
        nearest = " or ".join(difflib.get_close_matches(name, known, cutoff=0.0))
        version = f"{library.__name__} {library.__version__}"
        raise BadInput(f"{version} has no classifier {name!r}: did you mean {nearest}?")


def _timm_size(network: Any, image_size: int | None) -> tuple[int, ...]:
    _, *size = network.pretrained_cfg["input_size"]
    if image_size is not None:
        return image_size, image_size
    embedding = getattr(network, "patch_embed", None)  # a transformer may have been built for another size
    built = getattr(embedding, "img_size", None) or size
    return tuple(built if len(built) == 2 else size)


def _normalisation(config: Any, channels: int) -> Normalisation:
    """Return what the network was trained with; for another number of channels, the mean for each."""
    mean, std = tuple(config["mean"]), tuple(config["std"])
    if len(mean) == channels:
        return Normalisation(mean, std)
    return Normalisation((sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels)


def _processor_normalisation(source: Any) -> Normalisation | None:
    """Return that of the image processor beside the weights, None where there is none or it scales images otherwise."""
    try:
        settings, _ = _library("transformers").ImageProcessingMixin.get_image_processor_dict(source)
    except OSError:
        return None
    if not settings.get("do_normalize") or abs(255 * settings.get("rescale_factor", 0) - 1) > 1e-6:
        return None
    return Normalisation(settings["image_mean"], settings["image_std"])


def _tokenizer_beside(source: Any, model: MultiExitModel) -> Any:
    """Return the folder of weights where a tokenizer lies beside them, that of a hub's name, or None."""
    if not model.input_spec.takes_texts or not isinstance(source, str | os.PathLike):
        return None
    if Path(source).is_dir():
        return Path(source) if any((Path(source) / name).is_file() for name in (FILE, CONFIG)) else None
    try:
        return _library("transformers").AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None


def _auto_class(config: Any) -> Any:
    """Return the class of transformers that builds the classifier of a config: one for text or one for images."""
    auto = _library("transformers")
    for kind in (auto.AutoModelForSequenceClassification, auto.AutoModelForImageClassification):
        if type(config) in kind._model_mapping:
            return kind
    raise BadInput(f"a {config.model_type} classifies neither text nor images: give another network")


def _transformers_example(config: Any) -> Any:
    """Return two images of the network's size, or two texts of different tokens, each in both."""
    if "Image" in _auto_class(config).__name__:
        size = getattr(config, "image_size", IMAGE_SIZE)  # convolutional networks name none
        sides = size if isinstance(size, list | tuple) else (size, size)
        return torch.zeros(2, config.num_channels, *sides)
    tokens = torch.arange(TOKENS) % getattr(config, "vocab_size", 2)
    return {"input_ids": torch.stack([tokens, tokens.roll(1)]), MASK: torch.ones(2, TOKENS, dtype=torch.int64)}


def _asks_for_kernels(settings: Any) -> bool:
    """Check whether attention is named as hub/kernel, in the settings or in nested ones."""
    if not isinstance(settings, Mapping):
        return False
    return any(
        ("attn_implementation" in str(key) and "/" in str(value)) or _asks_for_kernels(value)
        for key, value in settings.items()
    )


def _as_json(value: Any) -> Any:
    """Return settings as JSON has them: tuples as lists, dtypes by name, whole-number keys as text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
