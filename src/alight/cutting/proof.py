"""Prove that a chain of stages is its network: bit by bit, at other sizes, when samples leave, and in training.

The two are compared on random inputs. What was not seen to be the same is refused, with what the network does there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alight.cutting.running import Inputs, in_mode, refusals, same_bits, without_caches
from alight.cutting.tracing import logits_in, on_meta, walk
from alight.errors import BadInput

ROWS = 5  # samples in a batch of the proof: an odd number that the trace has not seen
KEPT = ([0, 2, 3], [0, 2], [1])  # rows that stay after the first, the second and the third stage; later all do
SAME = 1e-3  # of the largest number: kernels differ by far less at another batch size, mixed samples by far more
SAME_IN_HALF = 3e-2
LARGE = 128  # the side of an image that is tried at a quarter of it, which is cheaper
LOGITS_DIFFER = (
    "the stages do not give what the network gives: is it random in evaluation mode, or does it branch on the batch"
    " size or on content? Cut elsewhere, or teach alight this network with register_cutter"
)
OUTPUTS_DIFFER = (
    "the outputs of the stages are not the network's: does the network write into tensors that several outputs share?"
    " Build MultiExitModel(stages, heads) by hand"
)
Batch = tuple[Tensor, ...]
Axes = list[tuple[int, int]]  # that have one size: which tensor, and which of its axes


class FixedSizes:
    """A hook that refuses inputs of sizes at which the chain was not seen to be the network.

    `pattern` has a number for every axis of a sample that is fixed, and a name for one that is free; axes of one name
    have one size.
    """

    def __init__(self, pattern: Sequence[Sequence[int | str]], reason: str) -> None:
        self.pattern, self.reason = [list(axes) for axes in pattern], reason

    def __call__(self, stage: nn.Module, batch: Batch) -> None:
        """Raise unless the inputs have sizes like the pattern's."""
        free: dict[str, int] = {}
        for tensor, axes in zip(batch, self.pattern, strict=True):
            sizes = tensor.shape[1:]
            if len(sizes) != len(axes) or any(
                free.setdefault(axis, size) != size if isinstance(axis, str) else axis != size
                for axis, size in zip(axes, sizes, strict=True)
            ):
                raise BadInput(
                    f"an input of {tuple(sizes)} per sample, and the network was cut for ({', '.join(map(str, axes))}):"
                    f" {self.reason}. Give inputs of this size, or cut with an example of the size that you need"
                )


class Chain(NamedTuple):
    """A network and stages that should be the same; with heads, the network has one output for each."""

    network: nn.Module
    stages: Sequence[nn.Module]
    inputs: Inputs
    heads: Sequence[nn.Module] = ()

    def expected(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of the network."""
        output = self.inputs.run(self.network, batch)
        return (
            [each for each in walk(output) if isinstance(each, Tensor)] if self.heads else [logits_in(output, Tensor)]
        )

    def outputs(self, batch: Batch, kept: Sequence[Sequence[int]] = ()) -> list[tuple[list[int], Tensor]]:
        """Return the outputs of the stages with the rows of the batch that they are of; `kept` stay after each."""
        carried: Any = batch
        rows = list(range(len(batch[0])))
        outputs = []
        for index, stage in enumerate(self.stages):
            carried = stage(*carried)
            if index == len(self.stages) - 1:
                outputs.append((rows, carried))
            elif self.heads:
                outputs.append((rows, self.heads[index](*carried)))
            if index < len(kept) and index < len(self.stages) - 1:
                rows = [rows[row] for row in kept[index]]
                carried = tuple(tensor[kept[index]] for tensor in carried)
        return outputs

    def is_same(self, batch: Batch) -> bool:
        """Check whether stages and network give the same for a batch, bit by bit."""
        pairs = zip(self.expected(batch), self.outputs(batch), strict=not self.heads)
        return all(same_bits(expected, output) for expected, (_, output) in pairs)


def prove(
    network: nn.Module, stages: list[nn.Module], inputs: Inputs, heads: Sequence[nn.Module] = ()
) -> list[nn.Module]:
    """Return the stages if their chain is the network in evaluation; the first refuses sizes at which it may not be."""
    for module in (*stages, *heads):
        module.training = network.training
    chain = Chain(network, stages, inputs, heads)
    with in_mode(network, *stages, *heads, training=False), without_caches(network), refusals():
        _check_bits(chain, inputs.of_size(1))
        batch = _fix_sizes(chain)
        _check_bits(chain, batch)
        _check_samples_apart(chain, batch)
    return stages


def is_chain_of(
    network: nn.Module, stages: Sequence[nn.Module], inputs: Inputs, batch: Batch, heads: Sequence[nn.Module] = ()
) -> bool:
    """Check whether stages in a row give what the network gives for a batch in evaluation, bit by bit."""
    with in_mode(network, *stages, *heads, training=False), without_caches(network):
        return Chain(network, stages, inputs, heads).is_same(batch)


def _check_bits(chain: Chain, batch: Batch) -> None:
    if not chain.is_same(batch):
        raise BadInput(f"at batch size {len(batch[0])} {OUTPUTS_DIFFER if chain.heads else LOGITS_DIFFER}")


def _fix_sizes(chain: Chain) -> Batch:
    """Let the first stage refuse sizes that are not proven to be free; return a batch of other sizes that are."""
    inputs = chain.inputs
    batch = inputs.of_size(ROWS)
    names: dict[tuple[int, int], str] = {}
    reasons = []
    for axes, sizes in _accepted_sizes(chain):
        reason = next(filter(None, (_difference(chain, _resized(batch, axes, size)) for size in sizes)), "")
        if reason:
            reasons.append(reason)
        else:
            names |= dict.fromkeys(axes, f"any size {len(set(names.values())) + 1}")
            batch = _resized(batch, axes, sizes[0])
    pattern = [
        [names.get((index, axis), size) for axis, size in enumerate(tensor.shape[1:], 1)]
        for index, tensor in enumerate(inputs.tensors)
    ]
    if any(isinstance(size, int) for axes in pattern for size in axes):
        reason = "; ".join(reasons) or "the network itself takes no other size"
        chain.stages[0].register_forward_pre_hook(FixedSizes(pattern, reason))
    return batch


def _difference(chain: Chain, batch: Batch) -> str:
    """Return how the chain differs from the network for a batch that the network takes; "" if it does not."""
    try:
        return "" if chain.is_same(batch) else "at another size the stages do not give what the network gives"
    except Exception as error:  # whatever fails where a number in the code is of another size
        return f"at another size they fail: {str(error).partition('. Give')[0] or type(error).__name__}"


def _accepted_sizes(chain: Chain) -> list[tuple[Axes, list[int]]]:
    """Return axes whose size the network lets differ from the example's, and up to two other sizes that it takes."""
    accepts = _acceptance(chain)
    groups: dict[tuple[int, int], Axes] = {}
    for index, tensor in enumerate(chain.inputs.tensors):
        for axis, size in enumerate(tensor.shape[1:], 1):
            groups.setdefault((axis, size), []).append((index, axis))
    accepted: list[tuple[Axes, list[int]]] = []
    refused: dict[int, Axes] = {}
    for (_, size), axes in groups.items():
        if sizes := [other for other in _other_sizes(size) if accepts(axes, other)][:2]:
            accepted.append((axes, sizes))
        else:
            refused.setdefault(size, []).extend(axes)
    for size, axes in refused.items():  # such as height and width of a network that takes squares
        if len({axis for _, axis in axes}) > 1:
            sizes = [other for other in _other_sizes(size) if accepts(axes, other)][:2]
            accepted += [(axes, sizes)] if sizes else []
    return accepted


def _other_sizes(size: int) -> list[int]:
    sizes = [size // 4 if size >= LARGE else 0, size // 2, size + size // 2, size - 1, size + 1]
    return [other for other in dict.fromkeys(sizes) if other not in (0, size)]


def _acceptance(chain: Chain) -> Callable[[Axes, int], bool]:
    """Return a function that says whether the network takes another size; without data where it runs without."""

    def runs(network: nn.Module, batch: Batch) -> bool:
        try:
            with in_mode(network, training=False):
                chain.inputs.run(network, batch)
        except Exception:  # whatever a network says to sizes that it does not take
            return False
        return True

    network, batch = chain.network, chain.inputs.of_size(2)
    try:
        without_data = on_meta(network)
        if runs(without_data, tuple(tensor.to("meta") for tensor in batch)):
            network, batch = without_data, tuple(tensor.to("meta") for tensor in batch)
    except Exception:  # of a network that cannot be copied
        pass
    return lambda axes, size: runs(network, _resized(batch, axes, size))


def _resized(batch: Batch, axes: Axes, size: int) -> Batch:
    """Return a batch with another size along some axes: what is there is repeated, floats with noise."""
    resized = list(batch)
    for index, axis in axes:
        tensor = resized[index]
        tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % tensor.shape[axis])
        if tensor.is_floating_point() and not tensor.is_meta:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(size))
            tensor = tensor + noise.to(tensor) / 8
        resized[index] = tensor
    return tuple(resized)


def _check_samples_apart(chain: Chain, batch: Batch) -> None:
    """Raise if a sample's logits depend on the others of its batch, in the network or once some have left."""
    expected, some = chain.expected(batch), tuple(tensor[KEPT[0]] for tensor in batch)
    if not all(is_close(one, other[KEPT[0]]) for one, other in zip(chain.expected(some), expected, strict=True)):
        raise BadInput(
            f"the logits of a sample depend on the other samples of its batch, first in {_mixing_module(chain, batch)}:"
            " normalise with stored statistics (track_running_stats=True), and compute nothing across samples"
        )
    outputs = chain.outputs(batch, KEPT)
    if not all(is_close(output, one[rows]) for (rows, output), one in zip(outputs, expected, strict=False)):
        raise BadInput(
            "once some samples have left, the stages do not give what the network gives: tensors that are carried past"
            " an exit share memory that the network writes to later. Cut elsewhere, or write no tensor in place"
        )


def is_close(one: Tensor, other: Tensor) -> bool:
    """Check whether two tensors differ by no more than kernels do at another batch size."""
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and torch.equal(one, other)
    tolerance = SAME_IN_HALF if one.dtype in (torch.float16, torch.bfloat16) else SAME
    finite = other[other.isfinite()].abs()
    return torch.allclose(one, other, 0, tolerance * (finite.max().item() if finite.numel() else 1), equal_nan=True)


def _mixing_module(chain: Chain, batch: Batch) -> str:
    """Return the first module whose result for a sample depends on the others of its batch."""
    some = tuple(tensor[KEPT[0]] for tensor in batch)
    for (name, one), (_, other) in zip(_results(chain, batch), _results(chain, some), strict=False):
        if len(one) == ROWS and one.is_floating_point() and not is_close(other, one[KEPT[0]]):
            return f"{name!r} ({type(chain.network.get_submodule(name)).__name__})"
    return "its own code"


def _results(chain: Chain, batch: Batch) -> list[tuple[str, Tensor]]:
    """Return the first tensor of what each module returned, with the module's name, in the order of their ends."""
    results: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda _, __, result: results.extend(
            [(name, each.clone()) for each in walk(result) if isinstance(each, Tensor) and each.ndim][:1]
        )

    hooks = [module.register_forward_hook(note(name)) for name, module in chain.network.named_modules() if name]
    try:
        chain.inputs.run(chain.network, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return results
