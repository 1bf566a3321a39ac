"""One's own network by name: FILE.py:NAME or package.module:NAME, whose code is run because it was named."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alight.cutting.running import in_mode
from alight.errors import AlightError, BadInput
from alight.networks.attach import EXITS, attach_heads
from alight.networks.heads import HeadChoice
from alight.networks.multi_exit import MultiExitModel

ASK_SHAPE = (
    "give --input-shape, as 3,32,32 for images or 128 for rows of 128 numbers, or --image-size (input_shape=...)"
)
BATCH = 2  # of an example


def from_own(
    network: str,
    *,
    num_classes: int | None = None,
    after: str | int | Sequence[str] = "auto",
    head: HeadChoice = "auto",
    count: int = EXITS,
    image_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    arguments: Mapping[str, Any] | None = None,
    stated: Mapping[str, Any] | None = None,
) -> MultiExitModel:
    """Build a network of one's own with exits: a class or a function of a file or a package, which is run.

    `input_shape` is that of one sample, as (3, 32, 32); for images `image_size` will do. `arguments` are the
    network's own; what it does not say, `stated` does: `logits` and `channels` of `attach_heads`. `save_model` writes
    its layers down, so that the file is not needed again.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "nets.py"
    >>> _ = path.write_text("from torch import nn\\ndef build(width=8):\\n"
    ...     "    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))\\n")
    >>> from_own(f"{path}:build", input_shape=(4,), after=["1"], arguments={"width": 16}).exits
    ('1', 'end')
    """
    built = build_own(network, arguments or {}, num_classes)
    if isinstance(built, MultiExitModel):
        if after != "auto" or count != EXITS:
            raise BadInput(f"{network} has exits of its own, {', '.join(built.exits)}: leave after and count out")
        return built
    model = attach_heads(
        built,
        count if after == "auto" else after,
        example=example_for(built, network, input_shape, image_size),
        num_classes=num_classes,
        head=head,
        **stated or {},
    )
    model.recipe["built"] = network
    return model


def build_own(network: str, arguments: Mapping[str, Any], num_classes: int | None = None) -> nn.Module:
    """Return the network that FILE.py:NAME or package.module:NAME names; `num_classes` is passed on if it takes it."""
    made = import_object(network)
    if isinstance(made, nn.Module):
        if arguments:
            raise BadInput(
                f"{network} is a network already, so it takes no arguments: leave {', '.join(arguments)} out"
            )
        return made
    if not callable(made):
        raise BadInput(f"{network} is a {type(made).__name__}: name a class or a function that makes a network")
    given = dict(arguments)
    takes = _parameters(made)
    if num_classes is not None and "num_classes" in takes:
        given.setdefault("num_classes", num_classes)
    _check_arguments(network, takes, given)
    try:
        result = made(**given)
    except AlightError:
        raise
    except Exception as error:
        raise BadInput(f"{network} fails with {type(error).__name__}: {error}; {_given(given)}") from error
    if not isinstance(result, nn.Module):
        raise BadInput(f"{network} returns {result!r:.40}: name what returns a torch.nn.Module")
    return result


def import_object(text: str) -> Any:
    """Return what FILE.py:NAME or package.module:NAME names; the file or the package is run."""
    place, _, name = text.rpartition(":")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_of_package(place)
    try:
        found = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        own = [each for each in public if getattr(getattr(module, each), "__module__", "") == module.__name__]
        raise BadInput(f"{place} has no {name!r}: it has {', '.join(own) or 'no class or function'}") from error
    return found


def example_for(
    network: nn.Module, name: str, input_shape: Sequence[int] | None, image_size: int | None = None
) -> Tensor:
    """Return a batch for a network, of numbers or, where it takes none, of tokens."""
    if input_shape is None and image_size is None:
        raise BadInput(f"{name} does not say what it takes: {ASK_SHAPE}")
    if input_shape is None:
        weight = next((each.weight for each in network.modules() if isinstance(each, nn.Conv2d)), None)
        channels = 3 if weight is None else int(weight.shape[1])
        input_shape = (channels, image_size or 1, image_size or 1)
    reasons = []
    for dtype in (torch.get_default_dtype(), torch.int64):
        example = torch.zeros(BATCH, *input_shape, dtype=dtype)
        try:
            with in_mode(network, training=False):
                network(example)
        except Exception as error:  # whatever a network raises for what it does not take
            reasons.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        else:
            return example
    shape = ", ".join(map(str, input_shape))
    raise BadInput(f"{name} does not run on a batch of shape ({BATCH}, {shape}) ({reasons[0]}): {ASK_SHAPE}")


def _module_of_file(path: Path) -> Any:
    """Return a file as a module; it finds those beside it."""
    if not path.is_file():
        raise BadInput(f"there is no file {str(path)!r}: write FILE.py:NAME, with the path of the file")
    folder, name = str(path.resolve().parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    spec = importlib.util.spec_from_file_location(name if known is None else f"alight_own_{name}", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise BadInput(f"{path} cannot be imported ({type(error).__name__}: {error}): correct it first") from error
    return module


def _module_of_package(name: str) -> Any:
    """Return a module of a package, which is installed or lies in this folder."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise BadInput(f"{name} needs {error.name}, which is not installed: install it first") from error
        raise BadInput(
            f"there is no module {name!r}, here or installed: write package.module:NAME, FILE.py:NAME, timm:NAME,"
            " torchvision:NAME, transformers:FOLDER or zoo:NAME"
        ) from error
    except Exception as error:
        raise BadInput(f"{name} cannot be imported ({type(error).__name__}: {error}): correct it first") from error


def _parameters(made: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(made).parameters
    except (TypeError, ValueError):  # of code that is not Python's
        return {}


def _check_arguments(network: str, takes: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    """Raise if an argument is missing or not known."""
    named = {name: each for name, each in takes.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    if unknown := [name for name in given if name not in named and not takes_any]:
        known = ", ".join(named) or "no arguments"
        raise BadInput(f"{network} takes no argument {unknown[0]!r}: it takes {known} (--set NAME=VALUE)")
    if missing := [name for name, each in named.items() if each.default is each.empty and name not in given]:
        options = " ".join(f"--set {name}=..." for name in missing)
        raise BadInput(f"{network} needs {', '.join(missing)}: give {options}, or name a function without arguments")


def _given(arguments: Mapping[str, Any]) -> str:
    if not arguments:
        return "it was called without arguments, others are given by --set NAME=VALUE"
    return f"it was called with {', '.join(f'{name}={value!r}' for name, value in arguments.items())}"
