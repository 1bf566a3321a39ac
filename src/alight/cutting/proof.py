"""Prove that a chain of stages is its network: bit by bit, at other sizes, when samples leave, and in training.

The two are compared on random inputs. What was not seen to be the same is refused, with what the network does there.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from alight.cutting.running import Inputs, in_mode, is_text, refusals, same_bits, without_shortcuts
from alight.cutting.sizes import FixedSizes
from alight.cutting.stages import refuse_training
from alight.cutting.tracing import MANY, logits_in, walk
from alight.errors import BadInput

ROWS = 5  # samples in a batch of the proof: an odd number that the trace has not seen
KEPT = ([0, 2, 3], [0, 2], [1])  # rows that stay after the first, the second and the third stage; then that one
APART = ([0, 2], [1, 3])  # of four samples, those that are run without the others: the largest is in one of the two
SAME = 1e-3  # of the largest number: kernels differ by far less at another batch size, mixed samples by far more
SAME_IN_HALF, HALF = 3e-2, (torch.float16, torch.bfloat16)
SCALES = (1.0, 300.0, -20.0, 0.05)  # of these samples: limits, clamps and peaks are reached by some of them
TOKENS = (4, 1, 3, 2)  # of four parts of their texts, those that are not padding
NOISE, SAMPLED = 0.1, 1000  # share of a weight's mean size, by which weights are changed, and how many tell it
PLAIN = (bool, int, float, str, type(None))  # what attributes are compared of
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
FROZEN_NUMBERS = (
    "a number or tensor that the network's code reads from its weights was read when it was cut, or an attribute shares"
    " memory with a weight. Compute it in forward by tensor functions, or make it a parameter or a buffer"
)
Batch = tuple[Tensor, ...]
Axes = list[tuple[int, int]]  # that have one size: which tensor, and which of its axes
Others = list[tuple[Axes, list[int]]]  # axes, and other sizes than the example's that the network takes there
Changes = Sequence[tuple[Axes, int]]  # axes, and the size that they get


class SamplesMixed(BadInput):
    """A network that cannot be cut anywhere, since its logits for a sample are not a function of the sample."""


class ProofBatch(NamedTuple):
    """A batch, and what the network gives for it."""

    batch: Batch
    expected: list[Tensor]


class Chain(NamedTuple):
    """A network and stages that should be the same; with heads, the network has one output for each."""

    network: nn.Module
    stages: Sequence[nn.Module]
    inputs: Inputs
    heads: Sequence[nn.Module] = ()

    @contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Run both in evaluation mode, without what changes last bits."""
        with in_mode(self.network, *self.stages, *self.heads, training=False), without_shortcuts(self.network):
            yield

    def expected(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of the network, whose attributes are left as they were."""
        with _attributes_restored(self.network):
            return self.run_network(batch)

    def run_network(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of the network."""
        output = self.inputs.run(self.network, tuple(tensor.clone() for tensor in batch))  # it may write into them
        return (
            [each for each in walk(output) if isinstance(each, Tensor)] if self.heads else [logits_in(output, Tensor)]
        )

    def outputs(
        self, batch: Batch, kept: Sequence[Sequence[int]] = (), between: Batch | None = None
    ) -> list[tuple[list[int], Tensor]]:
        """Return the outputs of the stages with the rows of the batch that they are of; `kept` stay after each.

        Another batch may run in `between`, through every stage right after this one.
        """
        with _attributes_restored(self.network):
            return self._run_stages(batch, kept, between)

    def _run_stages(
        self, batch: Batch, kept: Sequence[Sequence[int]], between: Batch | None = None
    ) -> list[tuple[list[int], Tensor]]:
        carried: Any = tuple(tensor.clone() for tensor in batch)
        other: Any = between and tuple(tensor.clone() for tensor in between)
        rows = list(range(len(batch[0])))
        outputs = []
        for index, stage in enumerate(self.stages):
            carried = stage(*carried)
            other = other and stage(*other)
            if index == len(self.stages) - 1:
                outputs.append((rows, carried))
            elif self.heads:
                outputs.append((rows, self.heads[index](*carried)))
            if kept and index < len(self.stages) - 1:
                stay = [*kept[index]] if index < len(kept) else [*range(len(rows))]  # in new memory all the same
                rows = [rows[row] for row in stay]
                carried = tuple(tensor[stay] for tensor in carried)
        return outputs

    def run_stages(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of the stages for all samples."""
        return [output for _, output in self._run_stages(batch, ())]

    def whole_outputs(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of the stages for all samples; the network's attributes are left as they were."""
        return [output for _, output in self.outputs(batch)]

    def trial(self, batch: Batch) -> ProofBatch:
        """Return a batch with what the network gives."""
        return ProofBatch(batch, self.expected(batch))

    def difference(self, batch: Batch, expected: Sequence[Tensor]) -> str:
        """Return how the stages differ from what is expected for a batch; "" if they give the same, bit by bit."""
        try:
            pairs = zip(self.whole_outputs(batch), expected, strict=not self.heads)
            return "" if all(same_bits(*pair) for pair in pairs) else "the stages do not give what the network gives"
        except Exception as error:  # whatever fails where a number in the code is of another size
            return f"they fail with {str(error).partition('. Give')[0] or type(error).__name__}"

    def keeps_samples_apart(self, batch: Batch, expected: Sequence[Tensor], between: Batch | None = None) -> bool:
        """Check whether the stages give what is expected for the samples that stay, once others have left."""
        pairs = zip(self.outputs(batch, KEPT, between), expected, strict=False)
        return all(is_close(output, whole[rows]) for (rows, output), whole in pairs)


def prove(
    network: nn.Module, stages: list[nn.Module], inputs: Inputs, heads: Sequence[nn.Module] = ()
) -> list[nn.Module]:
    """Return the stages if their chain is the network in evaluation; the first refuses sizes at which it may not be."""
    for module in (*stages, *heads):
        module.training = network.training
    chain = Chain(network, stages, inputs, heads)
    with chain.in_evaluation(), refusals():
        others = _accepted_sizes(chain)
        trials = _trials(chain, others)
        _check_with_other_weights(chain, trials)
        _check_bits(chain, chain.trial(inputs.of_size(1)))
        reasons: list[str] = []
        if not _vary_all(inputs, others, trials) or any(chain.difference(*trial) for trial in trials):
            others, reasons = _free_sizes(chain, others)
            trials = _trials(chain, others)
            _check_bits(chain, trials[0])
        _fix_other_sizes(chain, others, reasons)
        _check_chain_keeps_samples_apart(chain, *trials)
    if reason := training_difference(chain, trials[1].batch):
        for stage in (*stages, *heads):
            refuse_training(stage, f"{reason} if it is trained in stages")
    return stages


def check_chain(
    network: nn.Module,
    stages: Sequence[nn.Module],
    inputs: Inputs,
    heads: Sequence[nn.Module] = (),
    readers: Sequence[Callable[[Batch], None]] = (),
    *,
    as_given: bool = False,
) -> str:
    """Raise unless the chain is the network: for its weights and for others, at sizes that it takes, in training.

    What is carried past each exit goes to `readers`. With `as_given` the example itself is a batch, too, next to those
    that are like it. Return why the stages refuse to be trained; "" if they can be. Nothing is changed by it.
    """
    chain = Chain(network, stages, inputs, heads)
    with chain.in_evaluation(), refusals():
        trials = _trials(chain, _accepted_sizes(chain))
        try:
            chain.outputs(trials[1].batch)
        except BadInput:  # the stages refuse other sizes than the example's
            trials = _trials(chain, [])
        for trial in (chain.trial(inputs.of_size(1)), *trials):
            _check_bits(chain, trial)
        if as_given:
            _check_batch_itself(chain, inputs.tensors)
        carried: Any = trials[1].batch
        for stage, reader in zip(stages[:-1], readers, strict=False):
            carried = stage(*carried)
            reader(carried)
        _check_with_other_weights(chain, trials)
        _check_network_keeps_samples_apart(chain, inputs.of_size(MANY["data"]))
        _check_chain_keeps_samples_apart(chain, *trials)
    ours = _two_steps(network, [*stages, *heads], chain.run_stages, trials[1].batch, seed=0)
    if isinstance(ours, BadInput):
        return str(ours)
    if reason := training_difference(chain, trials[1].batch):
        raise BadInput(f"one step of training differs: {reason}. Train heads alone, or cut elsewhere")
    return ""


def _check_batch_itself(chain: Chain, batch: Batch) -> None:
    """Raise if samples of a batch mix, or if its stages differ from the network, all together or after some left."""
    trial, size = chain.trial(batch), len(batch[0])
    _check_bits(chain, trial)
    if size > 1:
        _check_network_keeps_samples_apart(chain, batch, parts=([*range(0, size, 2)], [*range(1, size, 2)]))
    if size >= ROWS:
        _check_chain_keeps_samples_apart(chain, trial, trial)


def _check_with_other_weights(chain: Chain, trials: Sequence[ProofBatch]) -> None:
    """Raise if samples mix once weights change, in batches that show it, or if stages differ from the network then."""
    few = tuple(tensor[: len(SCALES)] for tensor in trials[0].batch)
    with _other_weights(chain.network):
        harder = *_harder(chain, few), *_of_lengths(chain.inputs.of_size(len(SCALES)))
        judged = [_check_network_keeps_samples_apart(chain, each, finite=True) for each in harder]
        if not any(judged):
            _check_network_keeps_samples_apart(chain, few)
        batches = trials[1].batch, chain.inputs.of_size(1)  # other sizes than the example's are judged elsewhere
        if not all(chain.difference(*chain.trial(batch)) for batch in batches):
            return
    if not chain.difference(*chain.trial(batches[1])):  # with its own weights
        raise BadInput(f"with other weights the stages do not give what the network gives: {FROZEN_NUMBERS}")


@contextmanager
def _other_weights(network: nn.Module, stages: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Change all weights for a while: a number that was read from them is found, and what is zero takes part.

    Stages may have weights of their own under the network's names, which are changed alike.
    """
    own = dict(_named_tensors(network))
    others = [each for stage in stages for name, each in _named_tensors(stage) if name in own]
    tensors = [*{id(each): each for each in (*own.values(), *others)}.values()]
    tensors = [each for each in tensors if each.is_floating_point() and each.layout == torch.strided]
    kept = [tensor.detach().clone() for tensor in tensors]
    for tensor in tensors:
        tensor.data.mul_(1.25)
        if isinstance(tensor, nn.Parameter):  # statistics may have to be positive
            waves = torch.arange(-3, 4, device=tensor.device, dtype=tensor.dtype).repeat(tensor.numel() // 7 + 1)
            size = float(tensor.detach().flatten()[:SAMPLED].abs().mean()) or NOISE
            tensor.data.add_(waves[: tensor.numel()].view(tensor.shape), alpha=NOISE * size)
    try:
        yield
    finally:
        for tensor, old in zip(tensors, kept, strict=True):
            tensor.data.copy_(old)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _harder(chain: Chain, batch: Batch) -> list[Batch]:
    """Return batches in which samples differ more: in scale, and in how much of a text is padding."""
    batches = []
    if any(each.is_floating_point() for each in batch):
        batches.append(tuple(_scaled(each) if each.is_floating_point() else each for each in batch))
    if any(map(is_text, batch)):
        for pad in {0, *(getattr(each, "padding_idx", 0) or 0 for each in chain.network.modules())}:
            batches.append(tuple(_padded(each, pad) if is_text(each) else each for each in batch))
    return batches


def _scaled(tensor: Tensor) -> Tensor:
    factors = torch.tensor(SCALES, device=tensor.device, dtype=tensor.dtype)
    return tensor * factors.view(-1, *[1] * (tensor.ndim - 1))


def _of_lengths(batch: Batch) -> list[Batch]:
    """Return batches of sequences that end in zeros, if they are sequences: steps are the first axis or the second."""
    axes = (1, 2) if any(map(_is_sequence, batch)) else ()
    return [tuple(_ended(each, axis) if _is_sequence(each) else each for each in batch) for axis in axes]


def _is_sequence(tensor: Tensor) -> bool:
    return tensor.ndim == 3 and tensor.is_floating_point()


def _ended(tensor: Tensor, axis: int) -> Tensor:
    """Return sequences of different lengths: a row's end along an axis is zero."""
    size = tensor.shape[axis]
    steps = torch.arange(size, device=tensor.device).view(1, *(size if each == axis else 1 for each in (1, 2)))
    lengths = torch.tensor([max(1, size * parts // 4) for parts in TOKENS], device=tensor.device).view(-1, 1, 1)
    return tensor * (steps < lengths)


def _padded(tensor: Tensor, pad: int) -> Tensor:
    """Return texts of different lengths: a row's end is padding."""
    length = tensor.shape[1]
    lengths = torch.tensor([max(1, length * parts // 4) for parts in TOKENS])
    return torch.where(torch.arange(length) < lengths[:, None], tensor.cpu(), pad).to(tensor)


def check_batch(
    network: nn.Module, stages: Sequence[nn.Module], inputs: Inputs, heads: Sequence[nn.Module] = ()
) -> None:
    """Raise unless stages in a row give what the network gives for this batch, in evaluation.

    Up to rounding; in half precision, in which rounding hides much, bit by bit, where the network repeats its bits.
    """
    chain = Chain(network, stages, inputs, heads)
    with chain.in_evaluation(), refusals():
        made, expected = chain.whole_outputs(inputs.tensors), chain.expected(inputs.tensors)
        pairs = [*zip(made, expected, strict=not heads)]
        bits = all(same_bits(*pair) for pair in pairs)
        exact = not bits and expected[0].dtype in HALF and all(map(same_bits, chain.expected(inputs.tensors), expected))
    if bits or (not exact and all(is_close(*pair) for pair in pairs)):
        return
    sizes = " and ".join(str(tuple(each.shape[1:])) for each in inputs.tensors)
    constants = " (a tensor that is neither a parameter nor a buffer has another dtype there: make it a buffer)"
    raise BadInput(
        f"for inputs of {sizes} per sample, {str(inputs.tensors[0].dtype).removeprefix('torch.')}, the exits do not"
        f" give what the network gives{constants if exact else ''}: its code does something else there than for the"
        " example that it was cut with, or an attribute was changed since. Cut it with an example like these inputs, or"
        " give it inputs like the example"
    )


def is_chain_of(
    network: nn.Module, stages: Sequence[nn.Module], inputs: Inputs, batch: Batch, heads: Sequence[nn.Module] = ()
) -> bool:
    """Check whether stages in a row give what the network gives in evaluation, also when samples of a batch leave."""
    chain = Chain(network, stages, inputs, heads)
    with chain.in_evaluation():
        trial = chain.trial(batch)
        if chain.difference(*trial) or not chain.keeps_samples_apart(*trial):
            return False
        with _other_weights(network, stages):
            return not chain.difference(*chain.trial(batch))


def _check_bits(chain: Chain, trial: ProofBatch) -> None:
    pairs = zip(chain.whole_outputs(trial.batch), trial.expected, strict=not chain.heads)
    if not all(same_bits(*pair) for pair in pairs):
        raise BadInput(f"at batch size {len(trial.batch[0])} {OUTPUTS_DIFFER if chain.heads else LOGITS_DIFFER}")


def _free_sizes(chain: Chain, others: Others) -> tuple[Others, list[str]]:
    """Return those of the axes along which any size is proven to be free alone, and why the others are not."""
    free, reasons = [], []
    for axes, sizes in others:
        trials = [_trial_of(chain, 2, [(axes, size)]) for size in sizes]
        reasons_here = [chain.difference(*trial) for trial in trials if trial]
        if any(reasons_here):
            reasons.append(f"at another size {next(filter(None, reasons_here))}")
        elif reasons_here:
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


def _trials(chain: Chain, others: Others) -> list[ProofBatch]:
    """Return two batches in which every size that may differ from the example's does, each in another way."""
    firsts = [(axes, sizes[0]) for axes, sizes in others]
    trials = []
    for shift, rows in enumerate((ROWS, 2)):
        changes = [(axes, sizes[(index + shift) % len(sizes)]) for index, (axes, sizes) in enumerate(others)]
        taken = (_trial_of(chain, rows, each) for each in (changes, firsts, firsts[:1]) if each)
        trials.append(next(filter(None, taken), None) or chain.trial(chain.inputs.of_size(rows)))
    return trials


def _trial_of(chain: Chain, rows: int, changes: Changes) -> ProofBatch | None:
    """Return a batch of so many samples with other sizes; None if the network does not take it.

    It is asked with data: at a quarter of the size of an image that is quicker than without.
    """
    try:
        return chain.trial(resized(chain.inputs.of_size(rows), changes))
    except Exception:  # whatever a network says to sizes that it does not take
        return None


def _vary_all(inputs: Inputs, others: Others, trials: Sequence[ProofBatch]) -> bool:
    """Check whether along each of the axes some batch has another size than the example."""
    return all(
        any(trial.batch[index].shape[axis] != inputs.tensors[index].shape[axis] for trial in trials)
        for axes, _ in others
        for index, axis in axes
    )


def _accepted_sizes(chain: Chain) -> Others:
    """Return axes whose size the network lets differ, with other sizes than the example's; it takes the first."""
    accepted: Others = []
    refused: dict[int, Axes] = {}
    for axes, size in axes_of_one_size(chain.inputs):
        if sizes := _from_first_accepted(chain, axes, size, accepted):
            accepted.append((axes, sizes))
        else:
            refused.setdefault(size, []).extend(axes)
    for size, axes in refused.items():  # such as height and width of a network that takes squares
        if len({axis for _, axis in axes}) > 1 and (sizes := _from_first_accepted(chain, axes, size, ())):
            accepted.append((axes, sizes))
    return accepted


def axes_of_one_size(inputs: Inputs, *, alone: bool = True) -> list[tuple[Axes, int]]:
    """Return axes of inputs that have one size, and the size: each axis alone, or together as in a square."""
    groups: dict[Any, Axes] = {}
    for index, tensor in enumerate(inputs.tensors):
        for axis, size in enumerate(tensor.shape[1:], 1):
            groups.setdefault((size, axis if alone else 0), []).append((index, axis))
    return [(axes, size) for (size, _), axes in groups.items()]


def _from_first_accepted(chain: Chain, axes: Axes, size: int, accepted: Sequence[tuple[Axes, list[int]]]) -> list[int]:
    """Return an accepted size and the one to be tried after it; none if none is accepted.

    It is tried together with the accepted sizes of other axes, which are small, before it is tried alone.
    """
    sizes, firsts = _other_sizes(size), [(each, first) for each, (first, *_) in accepted]
    for place, other in enumerate(sizes):
        change = (axes, other)
        if (firsts and _trial_of(chain, 2, [*firsts, change])) or _trial_of(chain, 2, [change]):
            return sizes[place : place + 2]
    return []


def _other_sizes(size: int) -> list[int]:
    sizes = [size // 4 if size >= LARGE else 0, size // 2, size + size // 2, size - 1, size + 1]
    return [other for other in dict.fromkeys(sizes) if other not in (0, size)]


def resized(batch: Batch, changes: Sequence[tuple[Axes, int]]) -> Batch:
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


def _check_network_keeps_samples_apart(
    chain: Chain, batch: Batch, *, finite: bool = False, parts: Sequence[list[int]] = APART
) -> bool:
    """Raise if a sample's logits depend on the others of its batch; return False if that cannot be judged.

    With `finite` a batch that the network does not take, or for which it gives no finite numbers, is not judged. The
    rows of `parts` are run without the others.
    """
    try:
        with _attributes_restored(chain.network):  # once: what it keeps from batch to batch shows in the last part
            expected = chain.run_network(batch)
            outputs = [chain.run_network(tuple(tensor[rows] for tensor in batch)) for rows in parts]
    except Exception:  # such as "every text must end with the same token"
        if finite:
            return False
        raise
    if finite and not all(each.isfinite().all() for each in expected):
        return False
    if rows := [len(each) for each in expected if len(each) != len(batch[0])]:
        raise BadInput(
            f"the network gives {rows[0]} rows for {len(batch[0])} samples: give inputs and return logits whose first"
            " axis is the samples"
        )
    for rows, output in zip(parts, outputs, strict=True):
        if not all(is_close(one, other[rows]) for one, other in zip(output, expected, strict=True)):
            raise _why_samples_mix(chain, batch, rows, expected)
    return True


def _why_samples_mix(chain: Chain, batch: Batch, rows: Any, expected: Sequence[Tensor]) -> SamplesMixed:
    """Return an error for a network that gives these rows other logits than in the batch."""
    with _attributes_restored(chain.network):
        again = [chain.run_network(batch) for _ in range(2)]
    if not all(is_close(*pair) for each in again for pair in zip(each, expected, strict=True)):
        return SamplesMixed(
            "the network gives other logits for the same batch in evaluation mode: let it draw nothing, and keep"
            " nothing from batch to batch"
        )
    return SamplesMixed(
        "the logits of a sample depend on the other samples of its batch, as first seen in what"
        f" {_mixing_module(chain, batch, rows)} returns: normalise with stored statistics"
        " (track_running_stats=True), and compute nothing across samples"
    )


def _check_chain_keeps_samples_apart(chain: Chain, trial: ProofBatch, other: ProofBatch) -> None:
    """Raise if the stages give something else once some samples have left, or go on with those of another batch."""
    _check_shared_tensors(chain, tuple(tensor[: len(SCALES)] for tensor in trial.batch))
    if _is_apart_from(chain, trial, other.batch):
        return
    if chain.keeps_samples_apart(*trial):
        raise BadInput(
            "a stage leaves something for a later one that is not carried from one to the other, such as an attribute"
            " of an object that modules share, and another batch that runs in between changes it: hand it over as an"
            " argument, or cut elsewhere"
        )
    raise BadInput(
        "once some samples have left, the stages do not give what the network gives: a tensor that is carried past"
        " an exit shares memory that the network writes to later, or holds several rows for each sample, not side"
        " by side. Cut elsewhere, or write no tensor in place"
    )


def _is_apart_from(chain: Chain, trial: ProofBatch, between: Batch) -> bool:
    """Check whether samples may leave while another batch, of other samples and perhaps sizes, runs in between."""
    try:
        return chain.keeps_samples_apart(*trial, between)
    except Exception:  # as of a size that the other batch has left behind
        return False


def _check_shared_tensors(chain: Chain, batch: Batch) -> None:
    """Raise if what is carried for all samples of a batch together is something else in a batch of other samples."""
    if not (expected := _shared_tensors(chain, batch)):
        return
    alone = [tuple(tensor[[row] * len(tensor)] for tensor in batch) for row in range(2)]
    halves = tuple(each if each.is_floating_point() or is_text(each) else each // 2 for each in batch)
    for changed in (*alone, halves, *_harder(chain, batch), *_of_lengths(batch)):
        try:
            found = _shared_tensors(chain, changed)
        except Exception:  # such as "every text must end with the same token"
            continue
        pairs = zip(found, expected, strict=True)
        if lines := [line for (line, one), (_, other) in pairs if not same_bits(one, other)]:
            raise BadInput(
                "a tensor that is carried past an exit is one for all samples of a batch and follows their content, as"
                f" a largest length does (made at {lines[0]}), so samples of two batches could not go on together:"
                " compute it for each sample, or cut elsewhere"
            )


def _shared_tensors(chain: Chain, batch: Batch) -> list[tuple[str, Tensor]]:
    """Return what is carried past exits for all samples of a batch together, with the lines that made it."""
    shared, carried = list[tuple[str, Tensor]](), tuple(tensor.clone() for tensor in batch)
    for stage in chain.stages[:-1]:
        known = getattr(stage, "_shared", None)
        carried = stage(*carried)
        if known is None:  # of a stage that was loaded: what is one for all has been repeated, without memory
            repeated = [index for index, each in enumerate(carried) if each.ndim and not each.stride(0)]
            known = dict.fromkeys(repeated, "an unknown line")
        shared += [(line, carried[index]) for index, line in known.items()]
    return shared


def is_close(one: Tensor, other: Tensor, tolerance: float | None = None) -> bool:
    """Check whether two tensors differ by no more than kernels do at another batch size, as a share of the largest."""
    if torch.equal(one, other) or one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = tolerance or (SAME_IN_HALF if one.dtype in HALF else SAME)
    finite = other[other.isfinite()].abs()
    return torch.allclose(one, other, 0, tolerance * (finite.max().item() if finite.numel() else 1), equal_nan=True)


def _mixing_module(chain: Chain, batch: Batch, rows: list[int]) -> str:
    """Return the first module whose result for a sample depends on the others of its batch."""
    some = tuple(tensor[rows] for tensor in batch)
    for (name, one), (_, other) in zip(_results(chain, batch), _results(chain, some), strict=False):
        if len(one) == len(batch[0]) and one.is_floating_point() and not is_close(other, one[rows]):
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
    """Return how two steps of training differ between stages and network; "" if they do not, or if neither trains.

    Nothing is changed by it: gradients are not kept, buffers, attributes and the state of random numbers are put back.
    """
    for seed in range(SEEDS):
        own = _two_steps(chain.network, [chain.network], chain.run_network, batch, seed)
        if isinstance(own, Exception):
            return ""
        ours = _two_steps(chain.network, [*chain.stages, *chain.heads], chain.run_stages, batch, seed)
        if isinstance(ours, BadInput):  # they refuse to be trained, and say why
            return ""
        if isinstance(ours, Exception):
            return f"it fails with {type(ours).__name__}: {str(ours).partition(chr(10))[0]}"
        if reason := own.difference(ours):
            return reason
        if not own.draws:
            break
    return ""


class TrainingSteps(NamedTuple):
    """What two steps of training did: numbers, attributes after each, whether Python or NumPy drew random numbers."""

    numbers: dict[str, Tensor | None]
    attributes: tuple[dict[str, Any], dict[str, Any]]
    draws: bool

    def difference(self, ours: "TrainingSteps") -> str:
        """Return how our steps differ from these, the network's own; "" if they do not."""
        for name, expected in self.numbers.items():
            actual = ours.numbers[name]
            if (expected is None) != (actual is None):
                return f"{name} {'is missing' if actual is None else 'is there, and the network has none,'}"
            if expected is not None and actual is not None and not is_close(actual, expected):
                return f"{name} differs from the network's"
        first, second = self.attributes
        for name, value in second.items():
            if value != first.get(name) and value != ours.attributes[1].get(name):
                return f"the attribute {name!r}, which its code changes in every step, stays the same"
        if self.draws and not ours.draws:
            return "random numbers of Python or NumPy, which its code draws in every step, stay the same"
        return ""


def _two_steps(
    network: nn.Module, trained: Sequence[nn.Module], run: Callable[[Batch], list[Tensor]], batch: Batch, seed: int
) -> TrainingSteps | Exception:
    """Return what two steps do to the network, without changed weights; the error if it fails."""
    parameters = {name: each for name, each in network.named_parameters() if each.requires_grad}
    trainable = in_mode(network, *trained, training=True), torch.enable_grad()
    try:
        with _seeded(seed) as drawn, _attributes_restored(network), trainable[0], trainable[1]:
            torch.manual_seed(seed)
            outputs = run(batch)
            loss = sum((torch.linspace(-1, 1, each.numel()).to(each).view_as(each) * each).sum() for each in outputs)
            gradients = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)  # type: ignore[arg-type]
            numbers: dict[str, Tensor | None] = {f"output {index}": each for index, each in enumerate(outputs)}
            numbers |= {f"the gradient of {name!r}": each for name, each in zip(parameters, gradients, strict=True)}
            numbers |= {f"buffer {name!r}": each.clone() for name, each in network.named_buffers()}
            first = _plain_attributes(network)
            with torch.no_grad():
                numbers |= {f"output {index} of a second step": each for index, each in enumerate(run(batch))}
            return TrainingSteps(numbers, (first, _plain_attributes(network)), drawn())
    except Exception as error:  # whatever a network cannot do in training
        return error


@contextmanager
def _seeded(seed: int) -> Iterator[Callable[[], bool]]:
    """Seed Python's and NumPy's random numbers for a while, and yield a function that says whether any were drawn."""
    numbers: Any = np.random.mtrand._rand  # which the functions of np.random draw from
    states = random.getstate(), numbers.get_state()

    def state() -> tuple[Any, bytes, int]:
        _, keys, place, *_ = numbers.get_state()
        return random.getstate(), keys.tobytes(), place

    random.seed(seed)
    numbers.seed(seed)
    start = state()
    try:
        yield lambda: state() != start
    finally:
        random.setstate(states[0])
        numbers.set_state(states[1])


def _plain_attributes(network: nn.Module) -> dict[str, Any]:
    """Return numbers, texts and lists of them that modules hold in attributes."""
    return {
        f"{name}.{attribute}".lstrip("."): tuple(value) if isinstance(value, list) else value
        for name, module in network.named_modules()
        for attribute, value in vars(module).items()
        if attribute != "training" and (isinstance(value, PLAIN) or _is_plain_list(value))
    }


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) < 1000 and all(isinstance(each, PLAIN) for each in value)


@contextmanager
def _attributes_restored(network: nn.Module) -> Iterator[None]:
    """Put back numbers that a network changes in itself, as when it is given inputs of another size."""
    kinds = (*PLAIN, tuple, Tensor)
    kept, lists = [], []
    for module in network.modules():
        kept.append((module, {name: each for name, each in vars(module).items() if isinstance(each, kinds)}))
        lists += [(each, each[:]) for each in vars(module).values() if _is_plain_list(each)]
    try:
        yield
    finally:
        for module, attributes in kept:
            own = vars(module)
            for name in [name for name, each in own.items() if isinstance(each, kinds) and name not in attributes]:
                del own[name]
            own.update(attributes)
        for value, items in lists:
            value[:] = items
