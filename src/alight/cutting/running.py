"""Run a network on batches like its example: in one mode, with its errors explained, and leave no trace of it."""

import itertools
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from alight.errors import BadInput

LogitsChoice = str | int | Callable[[Any], Tensor] | None  # which part of an output is the logits, or what makes them
MASK = "attention_mask"
NOT_THE_NETWORKS = Path(__file__).parent, Path(torch.__file__).parent  # folders whose code is not the network's own


class Inputs:
    """An example of what the network takes, to be made into batches of any size, and which of its outputs is meant.

    Without `pick`, the output is the network's, unchanged. `mask` is the place among the inputs of the mask that is
    carried for heads.
    """

    def __init__(self, example: Any, pick: Callable[[Any], Any] | None = None) -> None:
        self.example, self.pick = example, pick
        self.names: tuple[str, ...] = tuple(example) if isinstance(example, Mapping) else ()
        several = tuple(example.values()) if self.names else example
        tensors = several if isinstance(several, list | tuple) else [several]
        other = [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, Tensor)]
        if other or not tensors:
            raise BadInput(f"the example holds {other or 'nothing'}: give tensors as the network takes them")
        sizes = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
        if len(sizes) > 1 or 0 in sizes:
            raise BadInput(f"the example's tensors hold {sorted(sizes)} samples: give the same batch in each")
        self.tensors: tuple[Tensor, ...] = tuple(tensors)
        self.vocabularies: list[int | None] = [None for _ in tensors]  # how many different tokens there are
        self.mask = self.names.index(MASK) if MASK in self.names else None

    @property
    def arguments(self) -> Sequence[str]:
        """Return names for the arguments of the first stage."""
        return self.names or [f"input_{index}" for index in range(len(self.tensors))]

    def of_size(self, size: int, device: Any = None, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Return a batch of samples like those of the example, all different."""
        pairs = zip(self.tensors, self.vocabularies, strict=True)
        batch = [_varied(tensor, size, tokens, seed) for seed, (tensor, tokens) in enumerate(pairs)]  # two may be alike
        return tuple(tensor.to(device, dtype if tensor.is_floating_point() else None) for tensor in batch)

    def run(self, model: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
        """Return the network's output for a batch."""
        output = model(**dict(zip(self.names, tensors, strict=True))) if self.names else model(*tensors)
        return self.pick(output) if self.pick else output

    def find_vocabularies(self, model: nn.Module) -> None:
        """Note which inputs are embedded, so that batches hold random tokens; not where the network refuses those."""
        if all(tensor.is_floating_point() for tensor in self.tensors):
            return
        batch = self.of_size(2)

        def note(module: nn.Embedding, arguments: tuple[Any, ...]) -> None:
            for index, tensor in enumerate(batch):
                if any(item is tensor for item in arguments):
                    self.vocabularies[index] = module.num_embeddings

        hooks = [each.register_forward_pre_hook(note) for each in model.modules() if isinstance(each, nn.Embedding)]
        try:
            with in_mode(model, training=False):
                self.run(model, batch)
                self.run(model, self.of_size(2))
        except Exception:  # such as "every text must end with the same token"
            self.vocabularies = [None for _ in self.tensors]
        for hook in hooks:
            hook.remove()


def pick_logits(output: Any, choice: LogitsChoice = None) -> Any:
    """Return the logits of a network's output: what `choice` names or makes, what is called so, or the only tensor.

    >>> pick_logits({"features": torch.zeros(2, 8), "scores": torch.zeros(2, 3)}, "scores").shape
    torch.Size([2, 3])
    """
    if callable(choice):
        return choice(output)
    if isinstance(output, Tensor):
        return output
    parts = _parts(output)
    if choice is None and "logits" in parts:
        choice = "logits"
    if isinstance(choice, int) and -len(parts) <= choice < len(parts):
        return pick_logits([*parts.values()][choice])
    if choice in parts:
        return pick_logits(parts[choice])
    tensors = [(path, leaf) for path, leaf in tree_flatten_with_path(parts)[0] if isinstance(leaf, Tensor)]
    if choice is None and len(tensors) == 1:
        return tensors[0][1]
    listed = ", ".join(f"{''.join(map(str, path))} of shape {tuple(leaf.shape)}" for path, leaf in tensors)
    asked = "" if choice is None else f", and none is {choice!r}"
    raise BadInput(
        f"the network gives {len(tensors)} tensors{asked} ({listed or type(output).__name__}): say which are the"
        " logits, as in attach_heads(..., logits=0), by name, index or function (--logits 0), or let it return these"
        " alone"
    )


def _parts(output: Any) -> dict[Any, Any]:
    """Return the parts of an output by name, those of a list or tuple by index."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, list | tuple):
        return output._asdict() if hasattr(output, "_asdict") else dict(enumerate(output))
    return dict(vars(output)) if hasattr(output, "__dict__") else {}


def _varied(tensor: Tensor, size: int, vocabulary: int | None, seed: int) -> Tensor:
    rows = [tensor[index % len(tensor)] for index in range(size)]
    generator = torch.Generator().manual_seed(seed)
    if vocabulary is not None:
        return torch.randint(vocabulary, (size, *tensor.shape[1:]), generator=generator).to(tensor)
    if tensor.is_floating_point():
        return torch.stack([row + torch.randn(row.shape, generator=generator).to(row) / 8 for row in rows])
    return torch.stack([row.roll(index, -1) if row.ndim else row for index, row in enumerate(rows)])


def chain(stages: Iterable[nn.Module], batch: tuple[Tensor, ...]) -> Any:
    """Return what comes out when stages run one after the other."""
    carried = batch
    for stage in stages:
        carried = stage(*carried)
    return carried


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Check whether two tensors are the same, bit by bit."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)


def is_text(tensor: Tensor) -> bool:
    """Check for whole numbers, one per token."""
    return tensor.ndim == 2 and not tensor.is_floating_point()


@contextmanager
def in_mode(*modules: nn.Module, training: bool) -> Iterator[None]:
    """Run modules in training or evaluation mode without gradients; restore modes, buffers and random state after.

    So are weights that a pass in evaluation or a change of mode writes to: those of embeddings with a largest norm, and
    of modules with a `train` of their own, which may merge weights.

    >>> network = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    >>> with in_mode(network, training=False):
    ...     network.training, torch.is_grad_enabled()
    (False, False)
    >>> network.training
    True
    """
    everything = nn.ModuleList(modules)
    modes = [(module, module.training) for module in everything.modules()]
    buffers = [(each._buffers, {**each._buffers}) for each in everything.modules() if type(each._buffers) is dict]
    written = [(each, each.detach().clone()) for each in _written_to(everything) if not each.is_inference()]
    devices = {tensor.device for tensor in itertools.chain(everything.parameters(), everything.buffers())}
    with torch.no_grad(), torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        everything.train(training)
        try:
            yield
        finally:
            for module, mode in modes:
                if type(module).train is not nn.Module.train and module.training != mode:
                    module.train(mode)
            for module, mode in modes:
                module.training = mode
            for own, old in buffers:  # a network may put others in their place
                own.update(old)
            for tensor, content in written:
                tensor.data.copy_(content)
            torch.clear_autocast_cache()  # torch 2.6 reuses what was cast without gradients where they are wanted


def _written_to(module: nn.Module) -> list[Tensor]:
    """Return buffers, and weights that lookups and changes of mode write to."""
    looked_up = [each for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    networks = [module, *module.children()]  # which freeze parts by a `train` of their own: a copy would be large
    own = [each for each in module.modules() if type(each).train is not nn.Module.train]
    merged = [weight for each in own for weight in each.parameters(recurse=not any(each is one for one in networks))]
    return [*module.buffers(), *(each.weight for each in looked_up if each.max_norm is not None), *merged]


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes, each as (owner, name, value), other values for a while."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, vars(owner).get(name) or getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def without_shortcuts(model: nn.Module) -> Iterator[None]:
    """Switch off what gives the same network other last bits: caches of text decoders, and fused encoder layers.

    A cache copies keys and values into another memory layout, and a classifier reads each text only once.
    """
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    caching = [(config, "use_cache", False) for config in configs if getattr(config, "use_cache", None) is True]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with replaced(caching):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def refusals() -> Iterator[None]:
    """Raise whatever a network raises as bad input, with the line of its code."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        message = next(iter(str(error).splitlines()), "")
        line = own_line(reversed([*walk_tb(error.__traceback__)]))
        raise BadInput(
            f"the network fails on the example with {type(error).__name__}: {message} (at {line}): give an"
            " example as the network takes it, cut elsewhere, or teach alight this network with register_cutter"
        ) from error


def own_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first of these lines that is in the network's own code."""
    for frame, number in frames:
        path = frame.f_code.co_filename
        if _is_own(path):
            return f"{path}:{number} in {frame.f_code.co_name}: {linecache.getline(path, number).strip()}"
    return "an unknown line"


@cache  # every call that is traced asks for the files of a dozen frames
def _is_own(path: str) -> bool:
    """Return whether a file may hold a network's own code."""
    file = Path(path)
    return file.name != "contextlib.py" and not any(folder in file.parents for folder in NOT_THE_NETWORKS)
