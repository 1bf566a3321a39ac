"""Prove that a chain of stages is its network: bit by bit, at other sizes, when samples leave, and in training.

The two are compared on random inputs. What was not seen to be the same is refused, with what the network does there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from alight.cutting.chain import Batch, Chain, ProofBatch, other_weights, training_difference, two_steps
from alight.cutting.mixing import (
    check_chain_keeps_samples_apart,
    check_harder_batches,
    check_many_samples,
    check_network_keeps_samples_apart,
)
from alight.cutting.running import Inputs, refusals, same_bits
from alight.cutting.sizes import FixedSizes
from alight.cutting.stages import refuse_training
from alight.cutting.tracing import MANY
from alight.errors import BadInput

ROWS = 5  # samples in a batch of the proof: an odd number that the trace has not seen
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
Axes = list[tuple[int, int]]  # that have one size: which tensor, and which of its axes
Others = list[tuple[Axes, list[int]]]  # axes, and other sizes than the example's that the network takes there
Changes = Sequence[tuple[Axes, int]]  # axes, and the size that they get


def prove(
    network: nn.Module, stages: list[nn.Module], inputs: Inputs, heads: Sequence[nn.Module] = ()
) -> list[nn.Module]:
    """Return the stages if their chain is the network in evaluation; the first refuses sizes at which it may not be."""
    for module in (*stages, *heads):
        module.training = network.training
    chain = Chain(network, stages, inputs, heads)
    with chain.in_evaluation(), refusals():
        others = _accepted_sizes(chain)
        trials, small = _trials(chain, others), _small_batch(chain, others)
        _check_with_other_weights(chain, small)
        _check_bits(chain, chain.trial(inputs.of_size(1)))
        reasons: list[str] = []
        if not _vary_all(inputs, others, trials) or any(chain.difference(*trial) for trial in trials):
            others, reasons = _free_sizes(chain, others)
            trials, small = _trials(chain, others), _small_batch(chain, others)
            _check_bits(chain, trials[0])
        _fix_other_sizes(chain, others, reasons)
        check_chain_keeps_samples_apart(chain, *trials)
    if reason := training_difference(chain, tuple(each[:2] for each in small)):
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
        others = _accepted_sizes(chain)
        trials = _trials(chain, others)
        try:
            chain.outputs(trials[1].batch)
        except BadInput:  # the stages refuse other sizes than the example's
            others = []
            trials = _trials(chain, others)
        for trial in (chain.trial(inputs.of_size(1)), *trials):
            _check_bits(chain, trial)
        if as_given:
            _check_batch_itself(chain, inputs.tensors)
        carried: Any = trials[1].batch
        for stage, reader in zip(stages[:-1], readers, strict=False):
            carried = stage(*carried)
            reader(carried)
        _check_with_other_weights(chain, _small_batch(chain, others))
        check_network_keeps_samples_apart(chain, inputs.of_size(MANY["data"]))
        check_chain_keeps_samples_apart(chain, *trials)
    ours = two_steps(network, [*stages, *heads], chain.run_stages, trials[1].batch, seed=0)
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
        check_network_keeps_samples_apart(chain, batch, parts=([*range(0, size, 2)], [*range(1, size, 2)]))
    if size >= ROWS:
        check_chain_keeps_samples_apart(chain, trial, trial)


def _check_with_other_weights(chain: Chain, batch: Batch) -> None:
    """Raise if samples mix once weights change, in batches that show it, or if stages differ from the network then."""
    check_many_samples(chain, batch)
    with other_weights(chain.network):
        check_harder_batches(chain, batch)
        batches = tuple(each[:2] for each in batch), chain.inputs.of_size(1)  # other sizes are judged elsewhere
        if not all(chain.difference(*chain.trial(each)) for each in batches):
            return
    if not chain.difference(*chain.trial(batches[1])):  # with its own weights
        raise BadInput(f"with other weights the stages do not give what the network gives: {FROZEN_NUMBERS}")


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


def _small_batch(chain: Chain, others: Others) -> Batch:
    """Return four samples of the first other sizes that the network takes, which are small for large images."""
    trial = _trial_of(chain, 4, [(axes, sizes[0]) for axes, sizes in others]) if others else None
    return chain.inputs.of_size(4) if trial is None else trial.batch


def _trial_of(chain: Chain, rows: int, changes: Changes) -> ProofBatch | None:
    """Return a batch of so many samples with other sizes; None if the network does not take it.

    It is asked with data: at a quarter of the size of an image that is quicker than without. Sizes of which it makes
    another number of samples, as of frames that are counted by a number in its code, it does not take.
    """
    try:
        trial = chain.trial(resized(chain.inputs.of_size(rows), changes))
    except Exception:  # whatever a network says to sizes that it does not take
        return None
    return trial if all(len(each) == rows for each in trial.expected) else None


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
        if len({axis for _, axis in axes}) > 1 and (sizes := _from_first_accepted(chain, axes, size, [])):
            accepted.append((axes, sizes))
    return accepted


def axes_of_one_size(inputs: Inputs, *, alone: bool = True) -> list[tuple[Axes, int]]:
    """Return axes of inputs that have one size, and the size: each axis alone, or together as in a square."""
    groups: dict[Any, Axes] = {}
    for index, tensor in enumerate(inputs.tensors):
        for axis, size in enumerate(tensor.shape[1:], 1):
            groups.setdefault((size, axis if alone else 0), []).append((index, axis))
    return [(axes, size) for (size, _), axes in groups.items()]


def _from_first_accepted(chain: Chain, axes: Axes, size: int, accepted: Others) -> list[int]:
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


def resized(batch: Batch, changes: Changes) -> Batch:
    """Return a batch with other sizes along some axes: what is there is repeated, floats with noise."""
    resized = list(batch)
    for index, axis, size in ((index, axis, size) for axes, size in changes for index, axis in axes):
        tensor = resized[index]
        tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % tensor.shape[axis])
        if tensor.is_floating_point() and not tensor.is_meta:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(size + index))
            tensor = tensor + noise.to(tensor) / 8
        resized[index] = tensor
    return tuple(resized)
