"""Find samples that change each other's logits: in a batch of the network, and in stages once others have left."""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alight.cutting.calls import fixed_masks, walk
from alight.cutting.chain import HALF, Batch, Chain, ProofBatch, attributes_restored, is_close
from alight.cutting.joining import ForcedRead, SampleWatch
from alight.cutting.running import is_text, same_bits
from alight.cutting.tracing import on_meta
from alight.errors import BadInput

APART = ([0, 2], [1, 3])  # of four samples, those that are run without the others: the largest is in one of the two
SCALES = (1.0, 300.0, -20.0, 0.05)  # of these samples: limits, clamps and peaks are reached by some of them
TOKENS = (4, 1, 3, 2)  # of four parts of their texts, those that are not padding
MANY, SOME = 1031, 53  # samples of a run that is watched, without and with data: primes that no size is a multiple of
ROWS = 40  # samples of a batch for a network that ranks, counts or reads samples: more than most limits


class SamplesMixed(BadInput):
    """A network that cannot be cut anywhere, since its logits for a sample are not a function of the sample."""


def check_harder_batches(chain: Chain, batch: Batch) -> None:
    """Raise if samples mix in batches in which they differ more than in this one; in this one if none is judged."""
    few = tuple(tensor[: len(SCALES)] for tensor in batch)
    harder = *_harder(chain, few), *_of_lengths(chain.inputs.of_size(len(SCALES)))
    judged = [check_network_keeps_samples_apart(chain, each, finite=True) for each in harder]
    if not any(judged):
        check_network_keeps_samples_apart(chain, few)


def check_many_samples(chain: Chain, example: Batch) -> None:
    """Raise if functions of the network join samples on the way to the logits, or if many samples mix.

    Many are tried where it ranks, counts or reads samples: such code may treat them together only past a limit.
    """
    watch, dtype = _watched(chain, example)
    for line, content in watch.branches.items():
        _check_branch(chain, example, line, content)
    if not watch.is_suspicious:
        return
    batch = chain.inputs.of_size(ROWS)
    if dtype in HALF:  # in which the last bits may change what is chosen
        try:
            chain = chain._replace(network=copy.deepcopy(chain.network).float())
        except RuntimeError:  # of weights that are computed, which cannot be copied
            return
        batch = tuple(each.float() if each.dtype in HALF else each for each in batch)
    powers = 2.0 ** torch.linspace(-8, 8, ROWS)
    scaled = tuple(_times(each, powers) if _is_scalable(each) else each for each in batch)
    copies = tuple(each[:1].repeat(ROWS, *[1] * (each.ndim - 1)) for each in batch)
    small = [[0], [ROWS - 1], [*range(ROWS // 4)]]
    for each, parts in ((copies, small[:1]), (scaled, small), (batch, [[*range(0, ROWS, 2)]])):
        check_network_keeps_samples_apart(chain, each, finite=True, parts=parts)


def _watched(chain: Chain, example: Batch) -> tuple[SampleWatch, torch.dtype]:
    """Return what a run of many samples showed, and the dtype of the logits; raise if functions join samples in them.

    It is a run without data where the network can do without.
    """
    try:
        batch = [each.new_empty((MANY, *each.shape[1:]), device="meta") for each in example]
        with fixed_masks(), torch.device("meta"):
            watch, outputs = _run_watched(chain._replace(network=on_meta(chain.network)), batch)
    except Exception:  # whatever a network does that cannot be done without data
        watch, outputs = _run_watched(chain, _repeated(example))
    if problem := watch.problem(outputs):
        raise SamplesMixed(f"{problem}: compute nothing across samples, and treat all samples of a batch alike")
    return watch, outputs[0].dtype


def _run_watched(
    chain: Chain, batch: Sequence[Tensor], forced: ForcedRead | None = None
) -> tuple[SampleWatch, list[Tensor]]:
    watch = SampleWatch(batch, forced)
    with attributes_restored(chain.network), watch:
        return watch, chain.run_network(tuple(batch))


def _check_branch(chain: Chain, example: Batch, line: str, content: Any) -> None:
    """Raise if the logits change with what the network's code reads at a line, where it looks at several samples.

    A check that raises is not a reason, nor is a number that is kept.
    """
    batch = _repeated(example)
    _, expected = _run_watched(chain, batch)
    far = 1e3 * (abs(content) + 1)
    for change in [operator.not_] if isinstance(content, bool) else [far.__add__, far.__rsub__]:
        try:
            _, outputs = _run_watched(chain, batch, ForcedRead(line, change))
        except Exception:
            continue
        if not all(is_close(*pair) for pair in zip(outputs, expected, strict=True)):
            raise SamplesMixed(
                "the logits of a sample depend on the other samples of its batch: the network's code reads what it has"
                f" computed from several samples, and goes on by it, at {line}. Decide for each sample, by torch.where"
            )


def _repeated(example: Batch) -> Batch:
    """Return some samples like these."""
    return tuple(each[torch.arange(SOME, device=each.device) % len(each)] for each in example)


def _harder(chain: Chain, batch: Batch) -> list[Batch]:
    """Return batches in which samples differ more: in scale, and in how much of a text is padding."""
    batches = []
    if any(map(_is_scalable, batch)):
        factors = torch.tensor(SCALES)
        batches.append(tuple(_times(each, factors) if _is_scalable(each) else each for each in batch))
    if not all(map(_is_scalable, batch)):
        for pad in {0, 1, *(getattr(each, "padding_idx", 0) or 0 for each in chain.network.modules())}:
            batches.append(tuple(each if _is_scalable(each) else _shortened(each, pad) for each in batch))
    return batches


def _is_scalable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _times(tensor: Tensor, factors: Tensor) -> Tensor:
    return tensor * factors.to(tensor).view(-1, *[1] * (tensor.ndim - 1))


def _shortened(tensor: Tensor, pad: int) -> Tensor:
    """Return texts of different lengths, and lengths and other whole numbers that are as much smaller."""
    if is_text(tensor):
        return _padded(tensor, pad)
    parts = torch.tensor(TOKENS, device=tensor.device).view(-1, *[1] * (tensor.ndim - 1))
    return torch.where(tensor > 0, (tensor.long() * parts // 4).clamp(min=1), tensor).to(tensor.dtype)


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


def check_network_keeps_samples_apart(
    chain: Chain, batch: Batch, *, finite: bool = False, parts: Sequence[list[int]] = APART
) -> bool:
    """Raise if a sample's logits depend on the others of its batch; return False if that cannot be judged.

    With `finite` a batch that the network does not take, or for which it gives no finite numbers, is not judged. The
    rows of `parts` are run without the others.
    """
    try:
        with attributes_restored(chain.network):  # once: what it keeps from batch to batch shows in the last part
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
    with attributes_restored(chain.network):
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


def check_chain_keeps_samples_apart(chain: Chain, trial: ProofBatch, other: ProofBatch) -> None:
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
