"""Find samples that change each other's logits: in a batch of the network, and in stages once others have left."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from alight.cutting.calls import CONTENT_READS, SIZED_BY_CONTENT, walk
from alight.cutting.chain import HALF, Batch, Chain, ProofBatch, attributes_restored, is_close
from alight.cutting.running import is_text, same_bits
from alight.errors import BadInput

APART = ([0, 2], [1, 3])  # of four samples, those that are run without the others: the largest is in one of the two
SCALES = (1.0, 300.0, -20.0, 0.05)  # of these samples: limits, clamps and peaks are reached by some of them
TOKENS = (4, 1, 3, 2)  # of four parts of their texts, those that are not padding
ALONG = {"argsort", "cummax", "cumprod", "cumsum", "kthvalue", "msort", "sort", "topk"}  # functions of an axis
OVER = {
    "all",
    "amax",
    "amin",
    "any",
    "max",
    "mean",
    "median",
    "min",
    "norm",
    "std",
    "sum",
    "var",
}  # of all axes or some
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
    """Raise if samples mix in a large batch, where the network ranks or counts samples, or reads what they hold.

    Such code may treat samples together only past a limit: a capacity, or a largest number.
    """
    with attributes_restored(chain.network), _Watch() as watch:
        output = chain.run_network(tuple(each[:2] for each in example))[0]
    if not watch.is_suspicious or output.dtype in HALF:  # in which the last bits may change what is chosen
        return
    batch = chain.inputs.of_size(ROWS)
    powers = 2.0 ** torch.linspace(-8, 8, ROWS)
    scaled = tuple(_times(each, powers) if _is_scalable(each) else each for each in batch)
    copies = tuple(each[:1].repeat(ROWS, *[1] * (each.ndim - 1)) for each in batch)
    small = [[0], [ROWS - 1], [*range(ROWS // 4)]]
    for each, parts in ((copies, small[:1]), (scaled, small), (batch, [[*range(0, ROWS, 2)]])):
        check_network_keeps_samples_apart(chain, each, finite=True, parts=parts)


class _Watch(TorchFunctionMode):
    """Notes whether a network ranks samples, reads the content of tensors, or makes sizes of it."""

    is_suspicious = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_suspicious |= _may_join_samples(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _may_join_samples(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name in ALONG:
        return _is_along_samples(name, args, kwargs)
    if name in ("__getitem__", "__setitem__"):
        return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in walk(args[1]))
    if name in OVER or name == "where":  # without an axis or another tensor
        return len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].ndim > 0
    return name in CONTENT_READS or SIZED_BY_CONTENT.fullmatch(name) is not None


def _is_along_samples(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a function is called for the first axis of a tensor; by default it is the last."""
    place = 2 if name in ("topk", "kthvalue") else 1
    axis = kwargs.get("dim", args[place] if len(args) > place else -1)
    return name == "msort" or not isinstance(axis, int) or axis % max(1, args[0].ndim) == 0


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
