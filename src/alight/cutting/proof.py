"""Prove that a chain of stages is its network: bit by bit, at other sizes, when samples leave, and in training.

The two are compared on random inputs. What was not seen to be the same is refused, with what the network does there.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alight.cutting.running import Inputs, in_mode, refusals, same_bits, without_shortcuts
from alight.cutting.sizes import FixedSizes
from alight.cutting.stages import refuse_training
from alight.cutting.tracing import logits_in, on_meta, walk
from alight.errors import BadInput

ROWS = 5  # samples in a batch of the proof: an odd number that the trace has not seen
KEPT = ([0, 2, 3], [0, 2], [1])  # rows that stay after the first, the second and the third stage; later all do
SAME = 1e-3  # of the largest number: kernels differ by far less at another batch size, mixed samples by far more
SAME_IN_HALF = 3e-2
SEEDS = 4  # of a network whose training draws from Python's own random numbers, so that both branches are seen
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
Others = list[tuple[Axes, list[int]]]  # axes, and other sizes than the example's that the network takes there
Accepts = Callable[[Sequence[tuple[Axes, int]]], bool]  # does the network take inputs with these sizes?


class SamplesMixed(BadInput):
    """A network that cannot be cut anywhere, since its logits for a sample are not a function of the sample."""


class Chain(NamedTuple):
    """A network and stages that should be the same; with heads, the network has one output for each."""

    network: nn.Module
    stages: Sequence[nn.Module]
    inputs: Inputs
    heads: Sequence[nn.Module] = ()

    def expected(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of the network."""
        with _attributes_restored(self.network):
            output = self.inputs.run(self.network, tuple(tensor.clone() for tensor in batch))  # it may write into them
        return (
            [each for each in walk(output) if isinstance(each, Tensor)] if self.heads else [logits_in(output, Tensor)]
        )

    def outputs(self, batch: Batch, kept: Sequence[Sequence[int]] = ()) -> list[tuple[list[int], Tensor]]:
        """Return the outputs of the stages with the rows of the batch that they are of; `kept` stay after each."""
        carried: Any = tuple(tensor.clone() for tensor in batch)
        rows = list(range(len(batch[0])))
        outputs = []
        with _attributes_restored(self.network):
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

    def whole_outputs(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of the stages for all samples."""
        return [output for _, output in self.outputs(batch)]

    def difference(self, batch: Batch, expected: Sequence[Tensor]) -> str:
        """Return how the stages differ from what is expected for a batch; "" if they give the same, bit by bit."""
        try:
            pairs = zip(self.whole_outputs(batch), expected, strict=not self.heads)
            return "" if all(same_bits(*pair) for pair in pairs) else "the stages do not give what the network gives"
        except Exception as error:  # whatever fails where a number in the code is of another size
            return f"they fail with {str(error).partition('. Give')[0] or type(error).__name__}"

    def keeps_samples_apart(self, batch: Batch, expected: Sequence[Tensor]) -> bool:
        """Check whether the stages give what is expected for the samples that stay, once others have left."""
        pairs = zip(self.outputs(batch, KEPT), expected, strict=False)
        return all(is_close(output, whole[rows]) for (rows, output), whole in pairs)


def prove(
    network: nn.Module, stages: list[nn.Module], inputs: Inputs, heads: Sequence[nn.Module] = ()
) -> list[nn.Module]:
    """Return the stages if their chain is the network in evaluation; the first refuses sizes at which it may not be."""
    for module in (*stages, *heads):
        module.training = network.training
    chain = Chain(network, stages, inputs, heads)
    with in_mode(network, *stages, *heads, training=False), without_shortcuts(network), refusals():
        accepts, others, batches = _other_sizes_taken(chain)
        expected = [chain.expected(batch) for batch in batches]
        _check_network_keeps_samples_apart(chain, batches[0], expected[0])
        _check_bits(chain, inputs.of_size(1))
        reasons: list[str] = []
        if not _vary_all(inputs, others, batches) or any(map(chain.difference, batches, expected)):
            others, reasons = _free_sizes(chain, others)
            batches = _other_batches(inputs, others, accepts)
            expected = [chain.expected(batches[0])]
            _check_bits(chain, batches[0])
        _fix_other_sizes(chain, others, reasons)
        _check_chain_keeps_samples_apart(chain, batches[0], expected[0])
    if reason := training_difference(chain, batches[1]):
        for stage in (*stages, *heads):
            refuse_training(stage, f"{reason} if it is trained in stages")
    return stages


def check_chain(
    network: nn.Module, stages: Sequence[nn.Module], inputs: Inputs, heads: Sequence[nn.Module] = ()
) -> str:
    """Raise unless the chain is the network: for its weights and for others, at sizes that it takes, in training.

    Return why the stages refuse to be trained; "" if they can be. Nothing is changed by it.
    """
    chain = Chain(network, stages, inputs, heads)
    with in_mode(network, *stages, *heads, training=False), without_shortcuts(network), refusals():
        _check_bits(chain, inputs.of_size(1))
        batches = [inputs.of_size(ROWS), inputs.of_size(2)]
        _, _, others = _other_sizes_taken(chain)
        try:
            chain.outputs(others[1])
            batches = others
        except BadInput:  # the stages refuse other sizes than the example's
            pass
        for batch in batches:
            _check_bits(chain, batch)
        expected = chain.expected(batches[0])
        _check_network_keeps_samples_apart(chain, batches[0], expected)
        _check_chain_keeps_samples_apart(chain, batches[0], expected)
        with _other_weights(network):
            _check_bits(chain, batches[1])
    ours = _one_step(network, [*stages, *heads], chain.whole_outputs, batches[1], seed=0)
    if isinstance(ours, BadInput):
        return str(ours)
    if reason := training_difference(chain, batches[1]):
        raise BadInput(f"one step of training differs: {reason}. Train heads alone, or cut elsewhere")
    return ""


@contextmanager
def _other_weights(network: nn.Module) -> Iterator[None]:
    """Change all weights for a while, so that a number that was read from them is found."""
    tensors = [each for each in (*network.parameters(), *network.buffers()) if each.is_floating_point()]
    kept = [tensor.detach().clone() for tensor in tensors]
    for tensor in tensors:
        tensor.data.mul_(1.25)
    try:
        yield
    finally:
        for tensor, old in zip(tensors, kept, strict=True):
            tensor.data.copy_(old)


def is_chain_of(
    network: nn.Module, stages: Sequence[nn.Module], inputs: Inputs, batch: Batch, heads: Sequence[nn.Module] = ()
) -> bool:
    """Check whether stages in a row give what the network gives in evaluation, also when samples of a batch leave."""
    chain = Chain(network, stages, inputs, heads)
    with in_mode(network, *stages, *heads, training=False), without_shortcuts(network):
        expected = chain.expected(batch)
        return not chain.difference(batch, expected) and chain.keeps_samples_apart(batch, expected)


def _check_bits(chain: Chain, batch: Batch) -> None:
    pairs = zip(chain.whole_outputs(batch), chain.expected(batch), strict=not chain.heads)
    if not all(same_bits(*pair) for pair in pairs):
        raise BadInput(f"at batch size {len(batch[0])} {OUTPUTS_DIFFER if chain.heads else LOGITS_DIFFER}")


def _free_sizes(chain: Chain, others: Others) -> tuple[Others, list[str]]:
    """Return those of the axes along which any size is proven to be free alone, and why the others are not."""
    free, reasons = [], []
    for axes, sizes in others:
        batches = [_resized(chain.inputs.of_size(2), [(axes, size)]) for size in sizes]
        batches = [batch for batch in batches if _runs(chain, chain.network, batch)]
        reason = next(filter(None, (chain.difference(batch, chain.expected(batch)) for batch in batches)), "")
        if reason:
            reasons.append(f"at another size {reason}")
        elif batches:
            free.append((axes, sizes))
    return free, reasons


def _fix_other_sizes(chain: Chain, free: Others, reasons: Sequence[str]) -> None:
    """Let the first stage refuse sizes along all axes that are not free."""
    names = {each: f"any size {number}" for number, (axes, _) in enumerate(free, 1) for each in axes}
    pattern = [
        [names.get((index, axis), size) for axis, size in enumerate(tensor.shape[1:], 1)]
        for index, tensor in enumerate(chain.inputs.tensors)
    ]
    if any(isinstance(size, int) for axes in pattern for size in axes):
        reason = "; ".join(reasons) or "the network itself takes no other size"
        chain.stages[0].register_forward_pre_hook(FixedSizes(pattern, reason))


def _other_batches(inputs: Inputs, others: Others, accepts: Accepts) -> list[Batch]:
    """Return two batches in which every size that may differ from the example's does, each in another way."""
    batches = []
    for shift, rows in enumerate((ROWS, 2)):
        changes = [(axes, sizes[(index + shift) % len(sizes)]) for index, (axes, sizes) in enumerate(others)]
        firsts = [(axes, sizes[0]) for axes, sizes in others]
        taken = next((each for each in (changes, firsts, firsts[:1]) if accepts(each)), [])
        batches.append(_resized(inputs.of_size(rows), taken))
    return batches


def _vary_all(inputs: Inputs, others: Others, batches: Sequence[Batch]) -> bool:
    """Check whether along each of the axes some batch has another size than the example."""
    return all(
        any(batch[index].shape[axis] != inputs.tensors[index].shape[axis] for batch in batches)
        for axes, _ in others
        for index, axis in axes
    )


def _other_sizes_taken(chain: Chain) -> tuple[Accepts, Others, list[Batch]]:
    """Return what says which sizes the network takes, those other than the example's that it does, and batches of them.

    It is asked without data first, which is cheap, and with data where it takes no batch of these sizes after all.
    """
    for with_data in (False, True):
        accepts = _acceptance(chain, with_data=with_data)
        others = _accepted_sizes(chain.inputs, accepts)
        batches = _other_batches(chain.inputs, others, accepts)
        if with_data or _runs(chain, chain.network, batches[1]):
            break
    return accepts, others, batches


def _accepted_sizes(inputs: Inputs, accepts: Accepts) -> Others:
    """Return axes whose size the network lets differ, with other sizes than the example's; it takes the first."""
    groups: dict[tuple[int, int], Axes] = {}
    for index, tensor in enumerate(inputs.tensors):
        for axis, size in enumerate(tensor.shape[1:], 1):
            groups.setdefault((axis, size), []).append((index, axis))
    accepted: Others = []
    refused: dict[int, Axes] = {}
    for (_, size), axes in groups.items():
        if sizes := _from_first_accepted(axes, size, accepts):
            accepted.append((axes, sizes))
        else:
            refused.setdefault(size, []).extend(axes)
    for size, axes in refused.items():  # such as height and width of a network that takes squares
        if len({axis for _, axis in axes}) > 1:
            sizes = _from_first_accepted(axes, size, accepts)
            accepted += [(axes, sizes)] if sizes else []
    return accepted


def _from_first_accepted(axes: Axes, size: int, accepts: Accepts) -> list[int]:
    """Return an accepted size and the one to be tried after it; none if none is accepted."""
    others = _other_sizes(size)
    return next((others[place : place + 2] for place, other in enumerate(others) if accepts([(axes, other)])), [])


def _other_sizes(size: int) -> list[int]:
    sizes = [size // 4 if size >= LARGE else 0, size // 2, size + size // 2, size - 1, size + 1]
    return [other for other in dict.fromkeys(sizes) if other not in (0, size)]


def _acceptance(chain: Chain, *, with_data: bool) -> Accepts:
    """Return a function that says whether the network takes other sizes; without data only where it runs without."""
    network, batch = chain.network, chain.inputs.of_size(2)
    if not with_data:
        with suppress(Exception):  # of a network that cannot be copied
            copied, meta = on_meta(network), tuple(tensor.to("meta") for tensor in batch)
            network, batch = (copied, meta) if _runs(chain, copied, meta) else (network, batch)
    known: dict[str, bool] = {}

    def accepts(changes: Sequence[tuple[Axes, int]]) -> bool:
        key = str(changes)
        if key not in known:
            known[key] = _runs(chain, network, _resized(batch, changes))
        return known[key]

    return accepts


def _runs(chain: Chain, network: nn.Module, batch: Batch) -> bool:
    try:
        with in_mode(network, training=False), _attributes_restored(network):
            chain.inputs.run(network, batch)
    except Exception:  # whatever a network says to sizes that it does not take
        return False
    return True


def _resized(batch: Batch, changes: Sequence[tuple[Axes, int]]) -> Batch:
    """Return a batch with other sizes along some axes: what is there is repeated, floats with noise."""
    resized = list(batch)
    for index, axis, size in ((index, axis, size) for axes, size in changes for index, axis in axes):
        tensor = resized[index]
        tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % tensor.shape[axis])
        if tensor.is_floating_point() and not tensor.is_meta:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(size))
            tensor = tensor + noise.to(tensor) / 8
        resized[index] = tensor
    return tuple(resized)


def _check_network_keeps_samples_apart(chain: Chain, batch: Batch, expected: Sequence[Tensor]) -> None:
    """Raise if a sample's logits depend on the others of its batch."""
    some = tuple(tensor[KEPT[0]] for tensor in batch)
    pairs = zip(chain.expected(some), expected, strict=True)
    if not all(is_close(one, other[KEPT[0]]) for one, other in pairs):
        if not all(map(is_close, chain.expected(batch), expected)):
            raise SamplesMixed(
                "the network gives other logits for the same batch in evaluation mode: let it draw nothing"
            )
        raise SamplesMixed(
            "the logits of a sample depend on the other samples of its batch, as first seen in what"
            f" {_mixing_module(chain, batch)} returns: normalise with stored statistics (track_running_stats=True), and"
            " compute nothing across samples"
        )


def _check_chain_keeps_samples_apart(chain: Chain, batch: Batch, expected: Sequence[Tensor]) -> None:
    """Raise if the stages give something else once some samples have left."""
    if not chain.keeps_samples_apart(batch, expected):
        raise BadInput(
            "once some samples have left, the stages do not give what the network gives: tensors that are carried past"
            " an exit share memory that the network writes to later. Cut elsewhere, or write no tensor in place"
        )


def is_close(one: Tensor, other: Tensor) -> bool:
    """Check whether two tensors differ by no more than kernels do at another batch size."""
    if torch.equal(one, other) or one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
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

    modules = [(name, module) for name, module in chain.network.named_modules() if name]
    hooks = [
        module.register_forward_hook(note(name))
        for name, module in modules
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        chain.inputs.run(chain.network, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return results


def training_difference(chain: Chain, batch: Batch) -> str:
    """Return how a step of training differs between stages and network; "" if it does not, or if neither trains.

    Nothing is changed by it: gradients are not kept, buffers and the state of random numbers are put back.
    """
    for seed in range(SEEDS):
        own = _one_step(chain.network, [chain.network], chain.expected, batch, seed)
        if isinstance(own, Exception):
            return ""
        ours = _one_step(chain.network, [*chain.stages, *chain.heads], chain.whole_outputs, batch, seed)
        if isinstance(ours, BadInput):  # they refuse to be trained, and say why
            return ""
        if isinstance(ours, Exception):
            return f"it fails with {type(ours).__name__}: {str(ours).partition(chr(10))[0]}"
        for name, expected in own.numbers.items():
            actual = ours.numbers[name]
            if (expected is None) != (actual is None):
                return f"{name} {'is missing' if actual is None else 'is there, and the network has none,'}"
            if expected is not None and actual is not None and not is_close(actual, expected):
                return f"{name} differs from the network's"
        if not own.drew_from_python:
            break
    return ""


class TrainingStep(NamedTuple):
    """Logits, gradients and buffers after a step of training; whether Python's random numbers were used."""

    numbers: dict[str, Tensor | None]
    drew_from_python: bool


def _one_step(
    network: nn.Module, trained: Sequence[nn.Module], run: Callable[[Batch], list[Tensor]], batch: Batch, seed: int
) -> TrainingStep | Exception:
    """Return what one step does to the network; the error if it fails."""
    parameters = {name: each for name, each in network.named_parameters() if each.requires_grad}
    python_state = random.getstate()
    random.seed(seed)
    start = random.getstate()
    try:
        with _buffers_restored(network), in_mode(network, *trained, training=True), torch.enable_grad():
            torch.manual_seed(seed)
            outputs = run(batch)
            loss = sum((torch.linspace(-1, 1, each.numel()).to(each).view_as(each) * each).sum() for each in outputs)
            gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)  # type: ignore[arg-type]
            numbers: dict[str, Tensor | None] = {f"output {index}": each for index, each in enumerate(outputs)}
            numbers |= {f"the gradient of {name!r}": each for name, each in zip(parameters, gradients, strict=True)}
            numbers |= {f"buffer {name!r}": each.clone() for name, each in network.named_buffers()}
            return TrainingStep(numbers, random.getstate() != start)
    except Exception as error:  # whatever a network cannot do in training
        return error
    finally:
        random.setstate(python_state)


@contextmanager
def _attributes_restored(network: nn.Module) -> Iterator[None]:
    """Put back numbers that a network changes in itself when it is given inputs of another size."""
    kinds = (bool, int, float, str, tuple, type(None))
    kept = [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, kinds)})
        for module in network.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in kept:
            vars(module).update(attributes)


@contextmanager
def _buffers_restored(network: nn.Module) -> Iterator[None]:
    """Put back buffers that are replaced by others; in_mode puts back what is written into them."""
    kept = [(module, dict(module._buffers)) for module in network.modules()]
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)
