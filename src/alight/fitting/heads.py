"""A network becomes one with exits, whatever it was given as."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alight.data.batches import first_batch
from alight.data.preprocess import Normalisation
from alight.display import layer_label, listed
from alight.errors import BadInput
from alight.files import CONFIG, read_json
from alight.fitting.calls import Steps, data_literal, example_literal
from alight.fitting.checks import check_places
from alight.fitting.inputs import check_example, check_logits, classes_in, example_for

if TYPE_CHECKING:
    from alight.networks.multi_exit import MultiExitModel
    from alight.training.settings import TrainingSettings

SEED = 0  # of new weights
HEADS = ("separable", "auto")  # that are tried on images; others take the last
MOST_HEADS = 0.1  # of the full network: separable heads that cost more are replaced by linear ones


@dataclass(frozen=True)
class WithHeads:
    """A network with exits, an example of what it takes, and whether its weights, or its heads alone, are random."""

    model: "MultiExitModel"
    example: Any
    untrained: bool = False
    new_heads: bool = False

    @property
    def device(self) -> Any:
        """Where the network is."""
        return next(self.model.parameters()).device


def with_heads(
    network: Any, data: Any, preprocess: Any, steps: Steps, after: str | int | Sequence[str] = "auto"
) -> WithHeads:
    """Return the network with exits, whatever it was given as; a module is copied, so that the given one stays."""
    from alight.networks.multi_exit import MultiExitModel

    named = NamedNetwork(str(network)) if isinstance(network, str | Path) else network
    named = replace(named, after=after) if isinstance(named, NamedNetwork) else None
    model = _built(named, classes_in(data)[1], steps) if named else network
    _check_module(model)
    _check_gradients()
    new_heads = not isinstance(model, MultiExitModel) or _gets_heads(named) or model.is_untrained("heads")
    if not isinstance(model, MultiExitModel):
        model, example = _attached(model, data, preprocess, steps, after, getattr(named, "image_size", None))
    else:
        if not _gets_heads(named):
            check_places(after, model)
        model = model if named else _copied(model, steps)
        _set_preprocess(model, preprocess, steps, has_trained_heads=not new_heads)
        example = _own_example(model, data, preprocess, steps)
    _check_classes(named, model)
    if named and named.weights:
        _load_weights(model, named.weights, steps)
    keep_classes(model, data, steps)
    untrained = not named.is_trained if named else model.is_untrained("stages")
    return WithHeads(model, example, untrained, new_heads)


def _check_classes(named: "NamedNetwork | None", model: "MultiExitModel") -> None:
    """Raise if a network that was built by name has another number of classes than was asked for."""
    if named and named.num_classes not in (None, model.num_classes):
        raise BadInput(
            f"{named.name} has {model.num_classes} classes, and {named.num_classes} were asked for: leave that out, or"
            " let it take num_classes"
        )


def keep_classes(model: "MultiExitModel", data: Any, steps: Steps, split: str | None = None) -> None:
    """Give a network without names for its classes those of labelled data, where the data has as many."""
    names = () if model.classes else classes_in(data, split)[0]
    if names and model.num_classes == len(names):
        model.classes = tuple(names)
        steps.call(f"model.classes = {model.classes!r}")
        steps.say(f"the logits are taken to be in this order: {listed(names)}")


def _copied(model: "MultiExitModel", steps: Steps) -> "MultiExitModel":
    steps.call("model = copy.deepcopy(network)", imports=["import copy"])
    return copy.deepcopy(model)


def _load_weights(model: "MultiExitModel", weights: str, steps: Steps) -> None:
    from alight.networks.store import load_backbone

    load_backbone(model, weights)
    imports = ["from alight.networks.store import load_backbone"]
    steps.call(f"load_backbone(model, {weights!r})", imports=imports)


def _check_gradients() -> None:
    """Raise where torch keeps no gradients: heads cannot be trained there."""
    import torch

    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise BadInput(f"fit is called inside torch.{mode}(), where nothing can be trained: call it outside of it")


def _not_a_network(value: Any) -> str:
    """Return what to give instead of a value that is not a module."""
    if hasattr(getattr(value, "network", None), "parameters"):
        return f"a {type(value).__name__} is not a network, but holds one: give predictor.network"
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    return (
        f"{kind} is not a network: give a torch module, a folder that save_model wrote, a name"
        " such as 'timm:resnet18', or Costs with logits as validation"
    )


def _check_module(network: Any) -> None:
    """Raise if it is not a module, or cannot be cut: it is compiled, scripted, without weights, or not in float32."""
    import torch

    from alight.networks.multi_exit import MultiExitModel

    if isinstance(network, Mapping) and any(isinstance(each, torch.Tensor) for each in network.values()):
        raise BadInput(
            "these are weights alone: load them into the network, network.load_state_dict(weights), give that"
        )
    if not isinstance(network, torch.nn.Module):
        raise BadInput(_not_a_network(network))
    if isinstance(network, MultiExitModel):
        return
    if hasattr(network, "_orig_mod"):
        raise BadInput("the network is compiled: give the module itself, network._orig_mod; exits are compiled later")
    if isinstance(network, torch.jit.ScriptModule):
        raise BadInput("the network is TorchScript, which cannot be cut: give the torch module that it was made of")
    weights = [*network.parameters()]
    if any(each.is_meta for each in weights):
        raise BadInput("the network's weights hold no data (device meta): load them first, or build it on the CPU")
    kinds = {str(each.dtype).removeprefix("torch.") for each in weights if each.is_floating_point()}
    if others := sorted(kinds - {"float32"}):
        raise BadInput(f"the network's weights are {others[0]}: give network.float(), and a dtype where it is run")


def _gets_heads(named: "NamedNetwork | None") -> bool:
    """Return whether a library's network gets new heads: those of a folder are trained, those of one's own may be."""
    from alight.networks.libraries import is_own

    return named is not None and not named.is_folder and not is_own(named.name)


def _built(named: "NamedNetwork", count: int | None, steps: Steps) -> Any:
    """Return the network of a name; with as many classes as the data has where nothing else says how many."""
    if named.may_have_any_classes and count is not None:
        named = replace(named, num_classes=count)
        steps.say(f"{count} classes, as in the training data")
    steps.say(f"loading {named.name}" if named.is_folder else f"building {named.name}")
    return named.build(steps)


def _own_example(model: "MultiExitModel", data: Any, preprocess: Any, steps: Steps) -> Any:
    """Return an example of what a network with exits takes: its own, or one from the data."""
    from alight.networks.multi_exit import example_of

    if "example" in model.recipe:
        example = example_of(model)
        steps.call("example = example_of(model)", imports=["from alight.networks.multi_exit import example_of"])
    else:
        example, _ = example_for(model, data, preprocess)
        steps.call(f"example = {example_literal(example)}", imports=["import torch"])
    steps.say(f"the network has exits after {listed(map(layer_label, model.exits[:-1]))}, and at its end")
    return example


@dataclass(frozen=True)
class NamedNetwork:
    """A network by its folder, by its name in a library, or as FILE.py:NAME, whose code is run."""

    name: str
    num_classes: int | None = None
    image_size: int | None = None
    pretrained: bool = False
    weights: str | None = None  # of the full network, a file of safetensors or torch
    device: str | None = None
    after: str | int | Sequence[str] = "auto"

    @property
    def is_folder(self) -> bool:
        """Whether it is the folder of a saved network."""
        return (Path(self.name) / CONFIG).is_file()

    @property
    def may_have_any_classes(self) -> bool:
        """Whether it is built with as many classes as there are, because nothing says how many."""
        libraries = ("timm:", "torchvision:", "zoo:")
        return self.num_classes is None and not self.pretrained and self.name.startswith(libraries)

    @property
    def is_trained(self) -> bool:
        """Whether all weights are those of a training: a library's own with other classes has a new classifier."""
        downloaded = self.pretrained or self.name.startswith("transformers:")
        if self.is_folder:
            from alight.networks.store import KIND

            recipe = read_json(Path(self.name) / CONFIG, KIND)["recipe"]
            return "stages" not in recipe.get("untrained", {})
        return self.weights is not None or (downloaded and self.num_classes is None)

    def build(self, steps: Steps) -> Any:
        """Return the network where it is to run: with exits, or a module of one's own file or package without."""
        from alight.networks.libraries import is_own

        make, name = (self._own, "network") if is_own(self.name) else (self._made, "model")
        network = self._loaded(steps) if self.is_folder else make(steps)
        if self.device not in (None, "cpu"):
            network.to(self.device)
            steps.call(f"{name}.to({self.device!r})")
        return network

    def _own(self, steps: Steps) -> Any:
        from alight.networks.own import build_own

        if self.pretrained:
            raise BadInput(f"{self.name} is your own network, and no library has weights of it: give weights in a file")
        steps.call(
            f"torch.manual_seed({SEED})",
            f"network = build_own({self.name!r}, {{}}, {self.num_classes})",
            imports=["import torch", "from alight.networks.own import build_own"],
        )
        with _seeded():
            return build_own(self.name, {}, self.num_classes)

    def _loaded(self, steps: Steps) -> "MultiExitModel":
        from alight.networks.store import load_model

        if given := [name for name in ("num_classes", "image_size", "pretrained", "weights") if getattr(self, name)]:
            raise BadInput(f"{self.name} is a saved network, which has its own {given[0]}: leave it out")
        steps.call(f"model = alight.load_model({self.name!r})")
        return load_model(self.name)

    def _made(self, steps: Steps) -> "MultiExitModel":
        from alight.networks.libraries import from_name
        from alight.networks.multi_exit import example_of

        given = {name: getattr(self, name) for name in ("num_classes", "image_size", "pretrained")}
        terms: dict[str, Any] = {name: value for name, value in given.items() if value}
        if self.after != "auto":
            terms["after"] = self.after
        kinds = HEADS if self.name.startswith(("timm:", "torchvision:")) else HEADS[-1:]
        model, head, _ = _affordable(lambda head: from_name(self.name, head=head, **terms), kinds, example_of)
        if head != "auto":
            terms["head"] = head
        listed = "".join(f", {name}={value!r}" for name, value in terms.items())
        steps.call(
            f"torch.manual_seed({SEED})",
            f"model = from_name({self.name!r}{listed})",
            imports=["import torch", "from alight.networks.libraries import from_name"],
        )
        return model


def _affordable(
    make: Callable[[str], "MultiExitModel"], kinds: Sequence[str], example: Callable[["MultiExitModel"], Any]
) -> tuple["MultiExitModel", str, float]:
    """Return a network with the first kind of heads that fit and cost little of it, the kind, and what they cost.

    Separable heads are far more accurate than linear ones early in a network.
    """
    from alight.costing.measure import head_overhead, measure_costs

    for head in kinds:
        try:
            with _seeded():
                model = make(head)
            overhead = head_overhead(measure_costs(model, example(model)))
        except BadInput:
            if head == kinds[-1]:
                raise
            continue
        if head == kinds[-1] or overhead <= MOST_HEADS:
            break
    return model, head, overhead


def _attached(
    network: Any, data: Any, preprocess: Any, steps: Steps, after: str | int | Sequence[str], image_size: int | None
) -> tuple["MultiExitModel", Any]:
    """Return a copy of a module with exits where they pay, and an example of what it takes."""
    from alight.networks.attach import attach_heads
    from alight.networks.libraries import own_classes

    example, normalisation = example_for(network, data, preprocess, image_size)
    steps.say("placing exits, and checking that the logits stay the same")
    own: dict[str, Any] = {"normalisation": normalisation, "classes": own_classes(network)}
    own = {name: value for name, value in own.items() if value}
    try:
        model, head, overhead = _affordable(
            lambda head: attach_heads(copy.deepcopy(network), after, example=example, head=head, **own),
            HEADS if getattr(example, "ndim", 0) == 4 else HEADS[-1:],
            lambda _: example,
        )
    except BadInput:
        check_example(network, example, normalisation)
        check_logits(network, example)
        raise
    given = [] if after == "auto" else [repr(after)]
    terms = ["copy.deepcopy(network)", *given, "example=example", *([f"head={head!r}"] if head != "auto" else [])]
    values = {"normalisation": f"alight.{normalisation!r}", "classes": repr(own.get("classes"))}
    terms += [f"{name}={values[name]}" for name in own]
    steps.call(
        f"example = {example_literal(example)}",
        f"torch.manual_seed({SEED})",
        f"model = alight.attach_heads({', '.join(terms)})",
        imports=["import copy", "import torch"],
    )
    places = listed(map(layer_label, model.exits[:-1]))
    steps.say(f"attached exits after {places}; their heads cost {overhead:.1%} of the network")
    if not isinstance(preprocess, Normalisation):
        _set_preprocess(model, preprocess, steps)
    return model, example


def _set_preprocess(model: Any, preprocess: Any, steps: Steps, has_trained_heads: bool = False) -> None:
    """Give the network the normalisation or the tokenizer, where there is one; heads were trained with their own."""
    if has_trained_heads and isinstance(preprocess, Normalisation):
        from alight.export.exporting import check_normalisation

        check_normalisation(preprocess, model.normalisation)
    if preprocess is not None:
        name = "normalisation" if isinstance(preprocess, Normalisation) else "tokenizer"
        setattr(model, name, preprocess)
        value = f"alight.{preprocess!r}" if name == "normalisation" else data_literal("preprocess", preprocess)
        steps.call(f"model.{name} = {value}")


def default_training(made: WithHeads, data: Any) -> "TrainingSettings":
    """Return settings that train heads alone, or everything where nothing was trained before; labels are not needed."""
    from alight.training.settings import TrainingSettings

    model, spec = made.model, made.model.input_spec
    own_heads = model.recipe["source"] in ("stages", "outputs") or "after" not in model.recipe
    if made.untrained or own_heads:
        return TrainingSettings(mode="joint")
    unlabelled = first_batch(data, spec).labels is None
    return TrainingSettings(distill=1.0) if unlabelled else TrainingSettings()


@contextmanager
def _seeded() -> Iterator[None]:
    """Draw the same random weights every time, and leave the generators of the caller alone."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield
