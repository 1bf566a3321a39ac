"""What every stage and every head costs, per sample: counted, timed, or metered."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from alight.costing.energy import Meter, meter_for
from alight.costing.flops import OnMeta, as_meta, count_flops, warn_of
from alight.costs import Costs
from alight.cutting.modes import in_mode
from alight.errors import BadInput
from alight.networks.multi_exit import Carried, MultiExitModel, advance, read

Floats = npt.NDArray[np.float64]

UNITS = ("FLOPs", "MACs", "ms", "J")
REPEATS = 30  # timed passes: the median of 30 is steady where the mean is not
WARMUP = 5  # passes before, in which kernels are chosen and caches fill
SECONDS = 1.0  # of every part under the energy meter, which ticks some ten times a second
TOGETHER = 8  # passes between two looks at the clock, so that a GPU is kept busy


def measure_costs(
    model: MultiExitModel,
    example: Any,
    unit: str = "FLOPs",
    batch_size: int | None = None,
    *,
    repeats: int = REPEATS,
    warmup: int = WARMUP,
    seconds: float = SECONDS,
) -> Costs:
    """Cost per sample of every stage and head, at the batch size of the example or another one.

    "FLOPs" and "MACs" (one MAC is 2 FLOPs) are counted from shapes; "ms" are medians of `repeats` timed passes (see
    `time_stages` for their spread), "J" an energy meter's count over `seconds` of every part, both on the device and in
    the dtype of the network.

    >>> stages = [nn.Sequential(nn.Flatten(), nn.Linear(12, 8)), nn.Linear(8, 8)]
    >>> measure_costs(MultiExitModel(stages, [nn.Linear(8, 3), nn.Identity()]), torch.zeros(1, 3, 4)).cumulative()
    array([240., 368.])
    """
    if unit not in UNITS:
        raise BadInput(f"there is no unit {unit!r} to measure in: choose one of {', '.join(UNITS)}")
    if unit == "ms":
        return time_stages(model, example, batch_size, repeats=repeats, warmup=warmup).costs()
    if unit == "J":
        return _metered(model, example, batch_size, warmup, seconds)
    flops = _counted(model, example, batch_size)
    return flops if unit == "FLOPs" else Costs(flops.stages / 2, flops.heads / 2, "MACs")


def head_overhead(costs: Costs) -> float:
    """What all heads but the last cost together, as a share of the plain network.

    >>> head_overhead(Costs(stages=[40, 59], heads=[2, 1]))
    0.02
    """
    return float(costs.heads[:-1].sum() / costs.full)


@dataclass(frozen=True, eq=False, repr=False)
class Timings:
    """Milliseconds of every stage and head for one batch, in every timed pass."""

    stages: Floats  # (passes, exits)
    heads: Floats  # (passes, exits)
    batch_size: int
    exits: tuple[str, ...]

    def costs(self) -> Costs:
        """Medians per sample. They increase from exit to exit, since every stage takes time of its own."""
        return Costs(self.stages_spread()[1] / self.batch_size, self.heads_spread()[1] / self.batch_size, "ms")

    def stages_spread(self) -> Floats:
        """Lower quartile, median and upper quartile of every stage, for one batch."""
        return np.quantile(self.stages, [0.25, 0.5, 0.75], axis=0)

    def heads_spread(self) -> Floats:
        """Lower quartile, median and upper quartile of every head, for one batch."""
        return np.quantile(self.heads, [0.25, 0.5, 0.75], axis=0)

    def __repr__(self) -> str:
        rows = [f"milliseconds of a batch of {self.batch_size}, median (quartiles) of {len(self.stages)} passes"]
        spreads = zip(self.exits, self.stages_spread().T, self.heads_spread().T, strict=True)
        rows += [f"{name}: stage {_spread(stage)}, head {_spread(head)}" for name, stage, head in spreads]
        return "\n".join([*rows, f"heads before the last: {head_overhead(self.costs()):.2%} of the plain network"])


def time_stages(
    model: MultiExitModel,
    example: Any,
    batch_size: int | None = None,
    *,
    repeats: int = REPEATS,
    warmup: int = WARMUP,
) -> Timings:
    """Milliseconds of every stage and head, pass by pass, on the device and in the dtype of the network.

    A pass runs all stages and heads in a row, as serving does, and notes the time between them; on a GPU by events in
    its own queue, so that nothing waits for the clock. A head that does nothing takes 0 ms.

    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> timings = time_stages(model, torch.zeros(1, 4), batch_size=512, repeats=3, warmup=1)
    >>> timings.costs().unit, timings.batch_size
    ('ms', 512)
    """
    if repeats < 1 or warmup < 0:
        raise BadInput(f"repeats={repeats}, warmup={warmup}: time at least one pass")
    inputs = _batch(model, example, batch_size)
    with in_mode(model, training=False):
        for _ in range(warmup):
            model(inputs)
        passes = np.array([_timed_pass(model, inputs) for _ in range(repeats)])  # (passes, 2 x exits)
    stages, heads = passes[:, 0::2], passes[:, 1::2]
    for index, head in enumerate(model.heads):
        if isinstance(head, nn.Identity):
            heads[:, index] = 0.0
    if slow := [name for name, median in zip(model.exits, np.median(stages, axis=0), strict=True) if median <= 0]:
        raise BadInput(f"the stage before {slow[0]!r} is too short for the clock: give a larger batch_size")
    return Timings(stages, heads, len(inputs[0]), model.exits)


def _timed_pass(model: MultiExitModel, inputs: Carried) -> list[float]:
    """Milliseconds of stage, head, stage, head, ..."""
    clock = _Clock(inputs[0].device)
    clock.mark()
    carried = inputs
    for stage, head in zip(model.stages, model.heads, strict=True):
        carried = advance(stage, carried)
        clock.mark()
        read(head, carried)
        clock.mark()
    return clock.milliseconds()


class _Clock:
    """Marks in time: events in the queue of a GPU, or the wall clock once all work is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append(event)
        else:
            _wait(self.device)
            self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between each mark and the next."""
        _wait(self.device)
        pairs = zip(self.marks[:-1], self.marks[1:], strict=True)
        if self.device.type == "cuda":
            return [before.elapsed_time(after) for before, after in pairs]
        return [1e3 * (after - before) for before, after in pairs]


def _counted(model: MultiExitModel, example: Any, batch_size: int | None) -> Costs:
    inputs = _batch(model, example, batch_size)
    with in_mode(model, training=False):
        try:
            with OnMeta():
                stages, heads, unknown = _count_walk(model, tree_map(as_meta, inputs))
        except (RuntimeError, TypeError, ValueError):  # it asks for numbers, or has no meta kernel
            stages, heads, unknown = _count_walk(model, inputs)
    for name, names in unknown.items():
        warn_of(names, f"the way to exit {name!r}")
    _check_grows(model, stages, heads)
    samples = len(inputs[0])
    return Costs(np.array(stages) / samples, np.array(heads) / samples, "FLOPs")


def _count_walk(model: MultiExitModel, carried: Carried) -> tuple[list[int], list[int], dict[str, set[str]]]:
    """FLOPs of all stages, of all heads, and what could not be counted before each exit."""
    stages, heads, unknown = [], [], {}
    for name, stage, head in zip(model.exits, model.stages, model.heads, strict=True):
        moved: list[Carried] = []
        made, no_formula = count_flops(lambda: moved.append(advance(_eager(stage), carried)))  # noqa: B023
        carried = moved[0]
        answered, none_either = count_flops(lambda: read(_eager(head), carried))  # noqa: B023
        stages.append(made)
        heads.append(answered)
        unknown[name] = no_formula | none_either
    return stages, heads, unknown


def _check_grows(model: MultiExitModel, stages: list[int], heads: list[int]) -> None:
    for name, stage, head in zip(model.exits, stages, heads, strict=True):
        if stage + head == 0:
            raise BadInput(
                f"between exit {name!r} and the one before it is nothing that counts as FLOPs:"
                " leave one of the two out, or measure unit='ms'"
            )


def _metered(model: MultiExitModel, example: Any, batch_size: int | None, warmup: int, seconds: float) -> Costs:
    """Joules per sample: every part runs for some seconds on the same features; the idle device's share is included."""
    inputs = _batch(model, example, batch_size)
    meter = meter_for(inputs[0].device)
    stages, heads = [], []
    with in_mode(model, training=False):
        for _ in range(warmup):
            model(inputs)
        for stage, head, carried, features in _walk(model, inputs):
            stages.append(_energy(meter, lambda: advance(stage, carried), inputs[0].device, seconds))  # noqa: B023
            idle = isinstance(head, nn.Identity)
            heads.append(0.0 if idle else _energy(meter, lambda: read(head, features), inputs[0].device, seconds))  # noqa: B023
    if not all(joules > 0 for joules in stages):
        raise BadInput(f"the energy meter did not move within {seconds:g} s: give more seconds")
    return Costs(np.array(stages) / len(inputs[0]), np.array(heads) / len(inputs[0]), "J")


def _energy(meter: Meter, run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Joules of one run, from as many as fit into the given seconds."""
    _wait(device)
    before, start, runs = meter.joules(), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(TOGETHER):
            run()
        _wait(device)
        runs += TOGETHER
    return (meter.joules() - before) / runs


def _walk(model: MultiExitModel, inputs: Carried) -> Iterator[tuple[nn.Module, nn.Module, Carried, Carried]]:
    """Every stage and head, with what goes into each."""
    carried = inputs
    for stage, head in zip(model.stages, model.heads, strict=True):
        features = advance(stage, carried)
        yield stage, head, carried, features
        carried = features


def _batch(model: MultiExitModel, example: Any, batch_size: int | None) -> Carried:
    """The example on the network's device and in its dtype, repeated or shortened to the batch size."""
    inputs = model.admit(example)
    if not all(isinstance(part, Tensor) and part.ndim and len(part) for part in inputs):
        raise BadInput("the example has no samples: give a batch of tensors as the network takes it")
    if batch_size is not None and batch_size < 1:
        raise BadInput(f"batch_size={batch_size}: give at least 1")
    weights = [*model.parameters(), *model.buffers()]
    floats = [tensor for tensor in weights if tensor.is_floating_point()]
    device = weights[0].device if weights else inputs[0].device
    rows = torch.arange(batch_size or len(inputs[0])) % len(inputs[0])

    def placed(part: Tensor) -> Tensor:
        dtype = floats[0].dtype if floats and part.is_floating_point() else part.dtype
        resized = part if len(rows) == len(part) else part[rows.to(part.device)]
        return resized.to(part.device if part.is_meta else device, dtype)

    return tuple(placed(part) for part in inputs)


def _eager(module: nn.Module) -> nn.Module:
    """The module as it was before torch.compile."""
    return getattr(module, "_orig_mod", module)


def _wait(device: torch.device) -> None:
    """Return once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def _spread(values: Floats) -> str:
    return f"{values[1]:.3f} ({values[0]:.3f} to {values[2]:.3f})"
