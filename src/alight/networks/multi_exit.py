"""A network with exits: stages in a chain, a head after each."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from alight.cutting.chain import Chain, check_batch, is_close
from alight.cutting.proof import check_chain
from alight.cutting.running import Inputs, chain, in_mode, pick_logits, same_bits
from alight.cutting.sizes import FixedSizes
from alight.data.batches import by_name
from alight.data.preprocess import InputSpec, Normalisation, TensorSpec
from alight.data.tokens import mask_meaning
from alight.display import exit_names
from alight.errors import BadInput
from alight.networks.features import Masks, argument_names, check_axes, masks_left_out
from alight.networks.heads import Head

Carried = tuple[Tensor, ...]  # what crosses a cut: the features that the head reads, then all else that is used later

PROVEN_ROWS = 2  # samples of a batch that the network runs too
ONE_LOGIT = (
    "the network gives one logit, and a softmax over one class is always 1: give a classifier of at least two classes,"
    " or wrap one with a sigmoid as alight.TwoLogits(network); a regression needs classes, such as ranges of its target"
)
INDICES = {torch.int32, torch.int64}  # dtypes of tokens, which are alike


class TwoLogits(nn.Module):
    """A binary classifier of one logit z as one of two classes: logits (0, z), whose softmax is the sigmoid of z.

    Args:
        network: Returns one logit per sample.

    >>> model = TwoLogits(nn.Linear(4, 1))
    >>> model(torch.zeros(5, 4)).shape
    torch.Size([5, 2])
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any, **by_name: Any) -> Tensor:
        """Return the logits of the negative and of the positive class."""
        logit = pick_logits(self.network(*inputs, **by_name))
        if logit.numel() != len(logit):
            raise BadInput(f"the network gives {tuple(logit.shape)}, not one logit per sample: leave TwoLogits out")
        return functional.pad(logit.reshape(-1, 1), (1, 0))


def count_classes(logits: Any) -> int:
    """Return how many classes a batch of logits has, if they are those of one class per sample.

    >>> count_classes(torch.zeros(5, 3))
    3
    """
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    if not shape or len(shape) > 2:
        what = f"a tensor of shape {shape}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise BadInput(
            f"the network gives {what}, not (samples, classes): exits decide about one class per sample, so detection,"
            " segmentation and labels of tokens need a network that gives one row of logits per sample"
        )
    if len(shape) == 1 or shape[1] < 2:
        raise BadInput(ONE_LOGIT)
    return shape[1]


def same_classes(logits: Sequence[Tensor], what: str) -> int:
    """Return how many classes all of these logits have."""
    counts = [*map(count_classes, logits)]
    if len(set(counts)) > 1:
        raise BadInput(f"the {what} give {counts} logits: give as many of each, one per class")
    return counts[0]


class MultiExitModel(nn.Module):
    """A backbone cut into stages, with a head after each.

    A stage takes what is carried, one argument each, and returns a tuple: the features for its head first. A head takes
    the features, or all that is carried if it has `reads_everything = True`, and returns logits.

    Args:
        stages: The layers between exits.
        heads: One per stage, which return logits.
        exits: Their names.
        input_names: Of a network whose input is a dict of tensors.
        num_classes: None: not known.
        classes: Their names.
        normalisation: Of images in files and bytes.
        recipe: How to build the network again, as plain data.

    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> [tuple(logits.shape) for logits in model(torch.zeros(5, 4))]
    [(5, 3), (5, 3)]
    """

    exits: tuple[str, ...]  # their names, earliest first
    input_names: tuple[str, ...]  # of a network whose input is a dict of tensors
    num_classes: int | None
    classes: tuple[str, ...]  # their names, where known
    normalisation: Normalisation | None  # of the images that it was trained on, None where it is unknown
    recipe: dict[str, Any]  # how to build the network again, as plain data
    network: nn.Module | None = None  # that was cut; not a submodule, as the stages have its modules
    pick: Callable[[Any], Any] | None = None  # returns the logits of its output
    known_inputs: Mapping[str, Any] | None = None  # sizes that were compared with a network that is not here
    reference: Mapping[str, Tensor] | None = None  # inputs by number, and the "logits" that this network gave for them
    tokenizer: Any = None  # of its texts: the folder of one, or a tokenizer of transformers

    def __init__(
        self,
        stages: Sequence[nn.Module],
        heads: Sequence[nn.Module],
        exits: Sequence[str] = (),
        input_names: Sequence[str] = (),
        *,
        num_classes: int | None = None,
        classes: Sequence[str] = (),
        normalisation: Normalisation | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not stages or len(stages) != len(heads):
            raise BadInput(f"{len(stages)} stages and {len(heads)} heads: give one stage and one head per exit")
        if exits and len(exits) != len(stages):
            raise BadInput(f"{len(exits)} names for {len(stages)} exits: give one name per exit")
        if classes and num_classes not in (None, len(classes)):
            raise BadInput(f"{len(classes)} names for {num_classes} classes: give one name per class")
        if 1 in (num_classes, len(classes)):
            raise BadInput(ONE_LOGIT)
        self.stages, self.heads = nn.ModuleList(stages), nn.ModuleList(heads)
        self.exits = exit_names(exits, len(stages))
        self.input_names = tuple(input_names)
        self.num_classes = num_classes or len(classes) or None
        self.classes = tuple(classes)
        self.normalisation = normalisation
        self.recipe = dict(recipe or {"source": "stages"})
        self._verifying = False
        self.proven_kinds: set[Any] = set()  # autocast, sizes and dtypes for which exits were compared with the network

    @property
    def num_exits(self) -> int:
        """Return the number of exits."""
        return len(self.stages)

    @property
    def input_spec(self) -> InputSpec:
        """What the network takes, of the sizes of its example; without one it has no tensors, as one built by hand."""
        example = self.recipe.get("example", {})
        if "several" in example or isinstance(example.get("shape"), list):
            example = {f"input_{index}": part for index, part in enumerate(example.get("several", [example]))}
        weight = next((each for each in self.parameters() if each.is_floating_point()), torch.empty(0))
        doubles = {"float32": "float64"} if weight.dtype is torch.float64 else {}
        tensors = tuple(
            TensorSpec(name, (None, *part["shape"][1:]), doubles.get(part["dtype"], part["dtype"]))
            for name, part in example.items()
        )
        return InputSpec(
            tensors,
            self.input_names,
            self.normalisation,
            self.classes,
            self.num_classes,
            tokenizer=self.tokenizer,
            free=tuple(map(self._free_axes, range(len(tensors)), tensors)),
        )

    def _free_axes(self, index: int, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the axes of an input that take any size: proven ones, or of separate stages all but the features."""
        axes = range(1, len(tensor.shape))
        if (sizes := self._fixed_sizes()) is not None:
            return tuple(axis for axis, size in zip(axes, sizes.pattern[index], strict=True) if isinstance(size, str))
        is_cut = "after" in self.recipe or self.recipe["source"] == "outputs"
        features = not is_cut and len(tensor.shape) in (2, 4) and "float" in tensor.dtype
        return tuple(axes)[features:]

    def note_untrained(self, part: Literal["heads", "stages"]) -> None:
        """Note that the weights of a part are random, by their fingerprint: whatever trains them changes it."""
        state = getattr(self, part).state_dict()
        if state and not any(each.is_meta for each in state.values()):
            self.recipe = {**self.recipe, "untrained": self.recipe.get("untrained", {}) | {part: digest(state)}}

    def is_untrained(self, part: Literal["heads", "stages"]) -> bool:
        """Return whether the weights of a part are known to be the random ones that it was built with."""
        known = self.recipe.get("untrained", {}).get(part)
        return known is not None and bool(known == digest(getattr(self, part).state_dict()))

    def forward(self, inputs: Any) -> list[Tensor]:
        """Return the logits of every exit, earliest first."""
        logits, carried = [], self.admit(inputs)
        for stage, head in zip(self.stages, self.heads, strict=True):
            carried = advance(stage, carried)
            logits.append(read(head, carried))
        return logits

    def admit(self, inputs: Any) -> Carried:
        """Return a batch as the first stage takes it, of a tensor, several, or a dict of them by name."""
        if isinstance(inputs, tuple | list):
            example = self.recipe.get("example")
            expected = len(example.get("several", self.input_names or (1,))) if example else len(inputs)
            if len(inputs) != expected:
                raise BadInput(f"{len(inputs)} inputs, and the network was cut with {expected}: give as many, in order")
            return self.proven(tuple(inputs))
        return self.proven(by_name(inputs, self.input_names) if isinstance(inputs, Mapping) else (inputs,))

    def proven(self, batch: Carried) -> Carried:
        """Return a batch; the first of each new size and dtype is run by the network too, and both have to agree.

        So is the first under another `torch.autocast`, which the network's code may switch off for a part of itself.
        """
        device = batch[0].device.type
        is_cast = device != "meta" and torch.is_autocast_enabled(device)
        cast = torch.get_autocast_dtype(device) if is_cast else None
        kind = (cast, *[(each.shape[1:], each.dtype) for each in batch])
        if kind in self.proven_kinds or self._verifying:
            return batch
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return batch
        if batch[0].is_meta or isinstance(batch[0], FakeTensor):  # as where FLOPs are counted
            return batch
        if self.network is None:
            self._check_known(batch)
            self.proven_kinds.add(kind)
            return batch
        check_batch(self.beside_network(tuple([each[:PROVEN_ROWS].detach() for each in batch])))
        self.proven_kinds.add(kind)
        return batch

    def beside_network(self, batch: Carried) -> Chain:
        """Return the stages and the network that they were cut from, to be compared for a batch."""
        assert self.network is not None
        inputs = Inputs(dict(zip(self.input_names, batch, strict=True)) if self.input_names else batch, self.pick)
        heads = [*self.heads] if self.recipe["source"] == "outputs" else []
        return Chain(self.network, [*self.stages], inputs, heads)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the network, after which it is compared with its exits again: its kernels are others."""
        self.proven_kinds.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _check_known(self, batch: Carried) -> None:
        """Raise if there is no network to compare with, and it was not compared for inputs of these sizes before."""
        if self.known_inputs is None:
            return
        self._check_dtypes(batch)
        sizes, lengths = [tuple(each.shape[1:]) for each in batch], self.known_inputs["lengths"]
        known = [[tuple(shape) for shape in each] for each in self.known_inputs["sizes"]]
        if sizes in known or (
            lengths and all(len(each) == 1 and lengths[0] <= each[0] <= lengths[1] for each in sizes)
        ):
            return
        seen = f"{lengths[0]} to {lengths[1]} tokens" if lengths else " or ".join(str(each[0]) for each in known)
        raise BadInput(
            f"inputs of {sizes[0]} per sample, and this folder holds the network without its code, which was compared"
            f" with it for {seen}: pass the network in as load_model(folder, backbone=...), or run inputs of this size"
            " before it is saved"
        )

    def _check_dtypes(self, batch: Carried) -> None:
        """Raise if inputs are of another dtype than the example's; floats are alike, and so are indices."""
        example = Inputs(random_example(self.recipe, torch.Generator().manual_seed(0))).tensors
        for given, known in zip(batch, example, strict=True):
            alike = {given.dtype, known.dtype} <= INDICES or (given.is_floating_point() and known.is_floating_point())
            if given.dtype != known.dtype and not alike:
                other, own = (str(each.dtype).removeprefix("torch.") for each in (given, known))
                raise BadInput(
                    f"inputs of {other}, and this folder holds the network without its code, which was compared with it"
                    f" for {own}: convert them as the network's code does, or pass the network in as"
                    " load_model(folder, backbone=...)"
                )

    @property
    def sizes(self) -> str:
        """The sizes of inputs that the first stage takes, per sample."""
        return str(self._fixed_sizes() or "any that the network takes")

    def _fixed_sizes(self) -> FixedSizes | None:
        hooks = self.stages[0]._forward_pre_hooks.values()
        return next((hook for hook in hooks if isinstance(hook, FixedSizes)), None)

    def verify(self, example: Any = None) -> str:
        """Raise unless the exits give what the network gives; return why it cannot be trained jointly, "" if it can.

        Compared are logits, bit by bit, for random inputs like the example (by default the one that heads were attached
        with) at several batch sizes and sizes of input, with other weights, when samples leave, and the gradients of
        one step of training. Heads have to read the axes that the network has for channels, at any size that it takes,
        and no token that a mask hides. A network that was loaded without its code is compared with the logits that it
        gave when it was saved, and its stages with each other: whether samples mix, may leave, and hide padding. A
        model of separate stages or networks has nothing to be compared with.

        >>> from alight import attach_heads
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> attach_heads(network, after=["1"], example=torch.zeros(1, 4)).verify()
        ''
        """
        self._verifying = True  # without a note of these sizes: random inputs show less than those to come
        try:
            return self._verified(example)
        finally:
            self._verifying = False

    def _verified(self, example: Any) -> str:
        network = self.network or self._network_of_stages()
        inputs = self._proof_inputs(network, random_example(self.recipe, torch.Generator().manual_seed(0)))
        if self.recipe["source"] == "outputs":
            heads, readers = [*self.heads], []
        else:
            heads, readers = [], [partial(_read_any_size, *pair) for pair in zip(self.heads, self.exits, strict=True)]
            check_heads(self, inputs.example)
            self._check_masks(network, inputs)
            if not self.recipe.get("channels"):
                check_axes([*self.stages], [*self.heads], self.exits, inputs)
        inputs = inputs if example is None else self._proof_inputs(network, example)
        return check_chain(network, [*self.stages], inputs, heads, readers, as_given=example is not None)

    def _network_of_stages(self) -> nn.Module:
        """Return the stages as a network if they give the logits that were saved with them."""
        if self.reference is None or self.known_inputs is None:
            raise BadInput("there is no network to compare with: a model of separate stages or networks has none")
        if digest(self.stages.state_dict()) != self.known_inputs["weights"]:
            raise BadInput(
                "there is no network to compare with: it was loaded without its code, and its weights were changed"
                " since, so save it and check the folder, or pass it in as load_model(folder, backbone=...)"
            )
        network = StagesInOrder(self.stages)
        weight = next((each for each in self.parameters()), torch.empty(0))
        given = {name: each.clone().to(weight.device) for name, each in self.reference.items()}  # which they may change
        expected = given.pop("logits")
        with in_mode(network, training=False):
            made = network(*given.values())
        if not is_close(made, expected):
            raise BadInput(
                "the stages do not give the logits that the network gave when it was saved: install the version of"
                " torch that it was saved with, or save it again where its code is"
            )
        return network

    def _proof_inputs(self, network: nn.Module, example: Any) -> Inputs:
        """Return an example where the network is and in its dtype, whose logits are those that were named."""
        weight = next((each for each in self.parameters() if each.is_floating_point()), torch.empty(0))
        example = tree_map_only(
            Tensor, lambda each: each.to(weight.device, weight.dtype if each.is_floating_point() else None), example
        )
        choice = self.recipe.get("logits")
        by_rule = self.pick and not isinstance(choice, Mapping)
        inputs = Inputs(example, partial(pick_logits, choice=choice) if by_rule else self.pick)
        inputs.find_vocabularies(network)
        return inputs

    def _check_masks(self, network: nn.Module, inputs: Inputs) -> None:
        """Raise if an exit reads what a mask hides, or if a mask that the network takes is ignored."""
        names, stated = argument_names(network, inputs), self.recipe.get("mask")
        known = None if stated is None else {names[stated[0]]: stated[1]} if stated else {}
        with in_mode(self, network, training=False):
            Masks(network, inputs, known).check_exits(network, inputs, self, self.exits)
        for name in masks_left_out(network, names) if self.input_names else ():
            try:
                self.admit({**inputs.example, name: torch.ones(inputs.tensors[0].shape[:2])})
            except BadInput:
                continue
            raise BadInput(f"the network takes {name!r}, was cut without it, and it is ignored: refuse it in `admit`")

    def keep_network(self, network: nn.Module, pick: Callable[[Any], Any] | None = None) -> "MultiExitModel":
        """Remember which network was cut, and how its logits are picked from its output; return the model."""
        object.__setattr__(self, "network", network)
        self.pick = pick
        return self

    def carried_past_exits(self, inputs: Any) -> list[Carried]:
        """Return what is carried past each exit, earliest first: what its head reads, then all else."""
        carried = [self.admit(inputs)]
        for stage in self.stages:
            carried.append(advance(stage, carried[-1]))
        return carried[1:]


class StagesInOrder(nn.Module):
    """Stages in the place of the network that they were cut from, whose code is not there."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *inputs: Tensor, **by_name: Tensor) -> Any:
        """Return the logits."""
        return chain(self.stages, (*inputs, *by_name.values()))


def advance(stage: nn.Module, carried: Carried) -> Carried:
    """Return what is carried after a stage."""
    output = stage(*carried)
    return output if isinstance(output, tuple) else (output,)


def read(head: nn.Module, carried: Carried) -> Tensor:
    """Return the logits of a head."""
    return head(*carried) if getattr(head, "reads_everything", False) else head(carried[0])


def exit_logits(model: MultiExitModel, inputs: Carried) -> list[Tensor]:
    """Return the logits of every exit in evaluation mode, whatever the mode of the network."""
    with in_mode(model, training=False), torch.inference_mode():
        return model(inputs)


def all_close(made: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float | None = None) -> bool:
    """Check whether tensors are as many and differ by no more than kernels do, or by so much of the largest number."""
    return len(made) == len(expected) and all(is_close(*pair, tolerance) for pair in zip(made, expected, strict=True))


def _read_any_size(head: nn.Module, name: str, carried: Carried) -> None:
    """Raise if a head that averages over positions does not take as many as there are."""
    if isinstance(head, Head) and head.channels_last is not None:
        try:
            read(head, carried)
        except RuntimeError as error:
            raise BadInput(
                f"the head at {name!r} fails on features of shape {tuple(carried[0].shape[1:])}, where the input has"
                f" another size ({error}): does it read positions for channels? Say channels='first' or 'last'"
            ) from error


def check_heads(model: MultiExitModel, example: Any) -> None:
    """Raise if a head changes what it reads, which later exits read too; the example is a batch of any size.

    >>> head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    >>> check_heads(MultiExitModel([nn.Linear(2, 4)], [head]), torch.ones(1, 2))
    Traceback (most recent call last):
    alight.errors.BadInput: the head at 'exit 1' changes its input in place, which later exits read: use inplace=False
    """
    with in_mode(model, training=False):
        for name, head, carried in zip(model.exits, model.heads, model.carried_past_exits(example), strict=True):
            checked_read(head, carried, name)


def checked_read(head: nn.Module, carried: Carried, name: str) -> Tensor:
    """Return the logits of a head in evaluation; raise if it changes what it reads, in evaluation or in training."""
    with in_mode(head, training=False):
        logits, changed = _read_of_copies(head, carried)
    with suppress(ValueError, RuntimeError), in_mode(head, training=True):  # it may be made for evaluation alone
        changed |= _read_of_copies(head, tuple(torch.cat([tensor, tensor]) for tensor in carried))[1]
    if changed:
        raise BadInput(f"the head at {name!r} changes its input in place, which later exits read: use inplace=False")
    return logits


def _read_of_copies(head: nn.Module, carried: Carried) -> tuple[Tensor, bool]:
    """Return the logits of a head, and whether it changed what it was given."""
    with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode do not count their versions
        copies = tuple(tensor.clone() for tensor in carried)
        versions = [tensor._version for tensor in copies]
        logits = read(head, copies)
        changed = [tensor._version for tensor in copies] != versions
        return logits, changed or not all(map(same_bits, copies, carried))  # `.data` is written without a version


def digest(state: Mapping[str, Tensor], structure: str = "") -> str:
    """Return the SHA-256 of a text and of tensors with names, types and shapes, the first 16 hexadecimal digits."""
    hashed = hashlib.sha256(structure.encode())
    for name, tensor in sorted(state.items()):
        whole = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        hashed.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:16]


def structure(model: MultiExitModel) -> dict[str, Any]:
    """Return what a network is besides its weights, as plain data; a head that is not alight's by its type."""
    return {
        "exits": list(model.exits),
        "heads": [
            {"head": head.name, **head.settings}
            if isinstance(head, Head)
            else {"type": f"{type(head).__module__}.{type(head).__qualname__}"}
            for head in model.heads
        ],
        "input_names": list(model.input_names),
        "normalisation": model.normalisation and asdict(model.normalisation),
    }


def describe(example: Any) -> dict[str, Any]:
    """Return shapes and dtypes of an example as plain data, and the smallest and largest of whole numbers.

    >>> describe({"input_ids": torch.tensor([[1, 5]])})
    {'input_ids': {'shape': [1, 2], 'dtype': 'int64', 'range': [1, 5]}}
    """
    if isinstance(example, Mapping):
        return {name: describe(part) for name, part in example.items()}
    if isinstance(example, list | tuple):
        return {"several": [describe(part) for part in example]}
    described = {"shape": list(example.shape), "dtype": str(example.dtype).removeprefix("torch.")}
    if example.dtype.is_floating_point or example.dtype.is_complex or not example.numel():
        return described
    return described | {"range": [int(example.min()), int(example.max())]}


def random_example(recipe: Mapping[str, Any], generator: torch.Generator) -> Any:
    """Return a random example of the shapes and ranges of a recipe's; a mask hides the end of texts."""
    described, mask = recipe["example"], recipe.get("mask")
    masks = [[*described.get("several", described.values())][mask[0]]] if mask else []

    def draw(one: Mapping[str, Any], name: str) -> Tensor:
        dtype, shape = getattr(torch, one["dtype"]), one["shape"]
        if "range" not in one:
            return torch.randn(shape, generator=generator).to(dtype)
        meaning = mask_meaning(name) if mask is None else mask[1] if any(one is each for each in masks) else None
        if meaning and len(shape) == 2:
            lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
            lengths[0] = max(1, shape[1] - 1)  # so that something is hidden
            kept = torch.arange(shape[1]) < lengths
            return (kept if meaning == "tokens" else ~kept).to(dtype)
        lowest, highest = one["range"]
        return torch.randint(lowest, highest + 1, one["shape"], generator=generator).to(dtype)

    return _example(described, draw)


def _example(described: Mapping[str, Any], make: Callable[[Mapping[str, Any], str], Tensor], name: str = "") -> Any:
    if "several" in described:
        return tuple(_example(part, make) for part in described["several"])
    if isinstance(described.get("shape"), list):
        return make(described, name)
    return {name: _example(part, make, name) for name, part in described.items()}


def check_has_exits(model: Any) -> None:
    """Raise unless it is a network with exits.

    >>> check_has_exits(MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)]))
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"a {type(model).__name__} is not a network: give the MultiExitModel that attach_heads returns")
    if not isinstance(model, MultiExitModel):
        raise BadInput(f"a {type(model).__name__} has no exits yet: attach_heads makes a MultiExitModel of it")


def example_of(model: MultiExitModel, tokens: int | None = None) -> Any:
    """Return a batch as the network takes it, of the sizes of its example, or of texts of so many tokens.

    All values are one, which is a token, a mask and a number alike; where 1 in a mask is padding, they are zero.
    """
    described = model.recipe.get("example")
    if not described:
        raise BadInput("the network does not say what it takes: build it with attach_heads, which keeps an example")
    example = _example(described, lambda one, _: torch.ones(one["shape"], dtype=getattr(torch, one["dtype"])))
    if isinstance(example, dict) and tokens is not None:
        example = {name: torch.ones(len(part), tokens, dtype=part.dtype) for name, part in example.items()}
    index, meaning = model.recipe.get("mask") or (0, "tokens")
    if meaning == "padding":
        model.admit(example)[index].zero_()
    return example


def input_names(example: Any) -> tuple[str, ...]:
    """Return the names of the inputs of an example that is a dict; none of any other."""
    return tuple(example) if isinstance(example, Mapping) else ()
