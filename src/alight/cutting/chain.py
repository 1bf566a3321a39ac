"""A network and the stages that should be the same: run both, and compare what they give and how they train."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from alight.cutting.calls import logits_in, walk
from alight.cutting.running import Inputs, in_mode, refusals, same_bits, without_shortcuts
from alight.errors import BadInput

KEPT = ([0, 2, 3], [0, 2], [1])  # rows that stay after the first, the second and the third stage; then that one
SAME = 1e-3  # of the largest number: kernels differ by far less at another batch size, mixed samples by far more
SAME_IN_HALF, HALF = 3e-2, (torch.float16, torch.bfloat16)
NOISE, SAMPLED = 0.1, 1000  # share of a weight's mean size, by which weights are changed, and how many tell it
PLAIN = (bool, int, float, str, type(None))  # what attributes are compared of
SEEDS = 4  # of a network whose training draws from Python's own random numbers, so that both branches are seen
Batch = tuple[Tensor, ...]


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
        with attributes_restored(self.network):
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
        with attributes_restored(self.network):
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


@contextmanager
def other_weights(network: nn.Module, stages: Sequence[nn.Module] = ()) -> Iterator[None]:
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


def check_batch(chain: Chain) -> None:
    """Raise unless stages in a row give what the network gives for the batch of its inputs, in evaluation.

    Up to rounding; in half precision, in which rounding hides much, bit by bit, where the network repeats its bits: for
    texts without padding, of which a network may leave the mask out and so run other kernels, once they have some.
    """
    inputs = chain.inputs
    with chain.in_evaluation(), refusals():
        made, expected = chain.whole_outputs(inputs.tensors), chain.expected(inputs.tensors)
        pairs = [*zip(made, expected, strict=not chain.heads)]
        bits = all(same_bits(*pair) for pair in pairs)
        exact = not bits and expected[0].dtype in HALF and all(map(same_bits, chain.expected(inputs.tensors), expected))
        if exact and (padded := _padded(inputs)):
            exact = bool(chain.difference(padded, chain.expected(padded)))
    if bits or (not exact and all(is_close(*pair) for pair in pairs)):
        return
    sizes = " and ".join(str(tuple(each.shape[1:])) for each in inputs.tensors)
    constants = " (a tensor that is neither a parameter nor a buffer has another dtype there: make it a buffer)"
    cast = " under torch.autocast" if torch.is_autocast_enabled(inputs.tensors[0].device.type) else ""
    raise BadInput(
        f"for inputs of {sizes} per sample, {str(inputs.tensors[0].dtype).removeprefix('torch.')}{cast}, the exits do"
        f" not give what the network gives{constants if exact else ''}: its code does something else there than for the"
        " example that it was cut with, or an attribute was changed since. Cut it with an example like these inputs, or"
        " give it inputs like the example"
    )


def _padded(inputs: Inputs) -> Batch:
    """Return texts without padding with their last token masked; nothing for other inputs."""
    if inputs.mask is None or not bool(inputs.tensors[inputs.mask].all()):
        return ()
    mask = inputs.tensors[inputs.mask].clone()
    mask[:, -1] = 0
    return tuple(mask if index == inputs.mask else each for index, each in enumerate(inputs.tensors))


def is_chain_of(
    network: nn.Module, stages: Sequence[nn.Module], inputs: Inputs, batch: Batch, heads: Sequence[nn.Module] = ()
) -> bool:
    """Check whether stages in a row give what the network gives in evaluation, also when samples of a batch leave."""
    chain = Chain(network, stages, inputs, heads)
    with chain.in_evaluation():
        trial = chain.trial(batch)
        if chain.difference(*trial) or not chain.keeps_samples_apart(*trial):
            return False
        with other_weights(network, stages):
            return not chain.difference(*chain.trial(batch))


def is_close(one: Tensor, other: Tensor, tolerance: float | None = None) -> bool:
    """Check whether two tensors differ by no more than kernels do at another batch size, as a share of the largest."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other) or not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = tolerance or (SAME_IN_HALF if one.dtype in HALF else SAME)
    finite = other[other.isfinite()].abs()
    return torch.allclose(one, other, 0, tolerance * (finite.max().item() if finite.numel() else 1), equal_nan=True)


def training_difference(chain: Chain, batch: Batch) -> str:
    """Return how two steps of training differ between stages and network; "" if they do not, or if neither trains.

    Nothing is changed by it: gradients are not kept, buffers, attributes and the state of random numbers are put back.
    """
    for seed in range(SEEDS):
        own = two_steps(chain.network, [chain.network], chain.run_network, batch, seed)
        if isinstance(own, Exception):
            return ""
        ours = two_steps(chain.network, [*chain.stages, *chain.heads], chain.run_stages, batch, seed)
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


def two_steps(
    network: nn.Module, trained: Sequence[nn.Module], run: Callable[[Batch], list[Tensor]], batch: Batch, seed: int
) -> TrainingSteps | Exception:
    """Return what two steps do to the network, without changed weights; the error if it fails."""
    parameters = {name: each for name, each in network.named_parameters() if each.requires_grad}
    trainable = in_mode(network, *trained, training=True), torch.enable_grad()
    try:
        with _seeded(seed) as drawn, attributes_restored(network), trainable[0], trainable[1]:
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
def attributes_restored(network: nn.Module) -> Iterator[None]:
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
