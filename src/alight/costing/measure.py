"""The cost of every stage and every head, per sample: counted in FLOPs, timed in ms, or metered in joules."""

import ctypes
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from alight.costing.cascades import example_inputs, member_costs, time_members
from alight.costs import Costs
from alight.cutting.flops import FlopCounter, without_data
from alight.cutting.running import in_mode
from alight.data.batches import as_inputs, sample_shape
from alight.display import percent
from alight.engine.backends.cascade import Cascade
from alight.errors import BadInput
from alight.networks.multi_exit import Carried, MultiExitModel, advance, check_has_exits, example_of, read

Floats = npt.NDArray[np.float64]

UNITS = ("FLOPs", "MACs", "ms", "J", "USD")
REPEATS = 30  # timed passes: the median of 30 is steady where the mean is not
WARMUP = 5  # passes before, in which kernels are chosen and caches fill
SECONDS = 1.0  # of every part under the energy meter, which ticks some ten times a second
BETWEEN_SYNCS = 8  # passes between two looks at the clock, so that a GPU is kept busy
POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


def measure_costs(
    model: MultiExitModel | Cascade,
    example: Any = None,
    unit: str = "FLOPs",
    batch_size: int | None = None,
    *,
    repeats: int = REPEATS,
    warmup: int = WARMUP,
    seconds: float = SECONDS,
    progress: bool = True,
) -> Costs:
    """Measure the cost per sample of every stage and head, at the batch size of the example or another one.

    FLOPs and MACs are counted from shapes; ms are medians of timed passes (see `time_stages` for their spread), J is an
    energy meter's count. Of a `cascade` each network is measured alone, in ms with its preprocessing, by any engine.

    Args:
        model: On its device, in its dtype; or a cascade.
        example: A batch; None: like the one that heads were attached with.
        unit: "FLOPs", "MACs" (one is 2 FLOPs), "ms" or "J"; of a cascade "USD", the prices of its members.
        batch_size: None: that of the example.
        repeats: Timed passes, whose median counts.
        warmup: Passes before them.
        seconds: Of every part, for an energy meter.
        progress: Show a bar.

    >>> stages = [nn.Sequential(nn.Flatten(), nn.Linear(12, 8)), nn.Linear(8, 8)]
    >>> measure_costs(MultiExitModel(stages, [nn.Linear(8, 3), nn.Identity()]), torch.zeros(1, 3, 4)).cumulative()
    array([240., 368.])
    """
    if unit not in UNITS:
        raise BadInput(f"there is no unit {unit!r} to measure in: choose one of {', '.join(UNITS)}")
    if unit == "ms":
        terms: dict[str, Any] = {"repeats": repeats, "warmup": warmup, "progress": progress}
        return time_stages(model, example, batch_size, **terms).costs()
    if isinstance(model, Cascade):
        if unit == "J":
            raise BadInput("an energy meter is for one network: measure each network of the cascade for itself")
        return member_costs(model, unit, lambda network, unit: measure_costs(network, None, unit))
    if unit == "USD":
        raise BadInput("prices are those of the members of a cascade: measure FLOPs, ms or J")
    inputs = _batch(model, example, batch_size)
    with in_mode(model, training=False):
        if unit == "J":
            return _metered(model, inputs, warmup, seconds, progress)
        stages, heads, unknown = without_data(partial(_count, model), inputs)
    _check_counts(model, stages, heads, unknown)
    per_sample = len(inputs[0]) * (2 if unit == "MACs" else 1)
    return Costs(np.array(stages) / per_sample, np.array(heads) / per_sample, unit, (), sample_shape(inputs))


def head_overhead(costs: Costs) -> float:
    """Return the cost of all heads but the last as a share of the full network's.

    Args:
        costs: Of every stage and head.

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
    members: tuple[int, ...] = ()  # of a cascade, the network of each exit
    sample_shape: tuple[int, ...] = ()  # of the images that were timed, where it is known

    def costs(self) -> Costs:
        """Return medians per sample. They increase from exit to exit, since every stage takes time of its own."""
        _, (stages, heads), _ = self.quartiles()
        return Costs(stages / self.batch_size, heads / self.batch_size, "ms", self.members, self.sample_shape)

    def quartiles(self) -> Floats:
        """Return lower quartile, median and upper quartile for one batch: (3, 2, exits), stages before heads."""
        return np.quantile([self.stages, self.heads], [0.25, 0.5, 0.75], axis=1)

    def __repr__(self) -> str:
        rows = [f"milliseconds of a batch of {self.batch_size}, median (quartiles) of {len(self.stages)} passes"]
        if self.members:
            whole = np.quantile(self.stages + self.heads, [0.25, 0.5, 0.75], axis=0)
            return "\n".join(
                [*rows, *(f"{name}: {_spread(each)}" for name, each in zip(self.exits, whole.T, strict=True))]
            )
        quartiles = self.quartiles()
        rows += [
            f"{name}: stage {_spread(quartiles[:, 0, index])}, head {_spread(quartiles[:, 1, index])}"
            for index, name in enumerate(self.exits)
        ]
        return "\n".join([*rows, f"heads before the last: {percent(head_overhead(self.costs()))} of the full network"])


def _spread(values: Floats) -> str:
    return f"{values[1]:.3f} ({values[0]:.3f} to {values[2]:.3f})"


def time_stages(
    model: MultiExitModel | Cascade,
    example: Any = None,
    batch_size: int | None = None,
    *,
    repeats: int = REPEATS,
    warmup: int = WARMUP,
    progress: bool = True,
) -> Timings:
    """Time every stage and head in ms, pass by pass, on the device and in the dtype of the network.

    A pass runs all stages and heads in a row, as serving does, and notes the time between them; on a GPU by events in
    its stream, so that nothing waits for the clock. A head that does nothing takes 0 ms. A network of a cascade is
    timed from its preprocessing on: whole, or from exit to exit, heads with their stages.

    Args:
        model: On its device, in its dtype; or a cascade.
        example: A batch; None: like the one that heads were attached with.
        batch_size: None: that of the example.
        repeats: Timed passes.
        warmup: Passes before them.
        progress: Show a bar.

    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> timings = time_stages(model, torch.zeros(1, 4), batch_size=512, repeats=3, warmup=1)
    >>> timings.costs().unit, timings.batch_size
    ('ms', 512)
    """
    if repeats < 1 or warmup < 0:
        raise BadInput(f"repeats={repeats}, warmup={warmup}: time at least one pass")
    if isinstance(model, Cascade):
        terms: dict[str, Any] = {"repeats": repeats, "warmup": warmup, "progress": progress}
        return time_cascade(model, example, batch_size, terms)
    inputs = _batch(model, example, batch_size)
    with in_mode(model, training=False):
        for _ in range(warmup):
            model(inputs)
        bar = tqdm(range(repeats), "time stages", unit="pass", disable=not progress)
        passes = np.array([_timed_pass(model, inputs) for _ in bar])  # (passes, 2 x exits)
    stages, heads = passes[:, 0::2], passes[:, 1::2]
    heads[:, [isinstance(head, nn.Identity) for head in model.heads]] = 0.0
    if short := [name for name, median in zip(model.exits, np.median(stages, axis=0), strict=True) if median <= 0]:
        raise BadInput(f"the stage before {short[0]!r} is too short for the clock: give a larger batch_size")
    return Timings(stages, heads, len(inputs[0]), model.exits, (), sample_shape(inputs))


def time_cascade(network: Cascade, example: Any, batch_size: int | None, terms: dict[str, Any]) -> Timings:
    """Return the times of a cascade: of a network without exits as those of a head, which is closed with it."""
    example = example_inputs(network) if example is None else example
    size = batch_size or len(as_inputs(example, network.input_spec)[0])
    if size < 1:
        raise BadInput(f"batch_size={size}: give at least 1")
    passes, owners = time_members(network, example, size, **terms), network.members_of_exits
    whole = np.array([owners.count(owner) == 1 for owner in owners])
    return Timings(np.where(whole, 0.0, passes), np.where(whole, passes, 0.0), size, network.exits, owners)


def _timed_pass(model: MultiExitModel, carried: Carried) -> list[float]:
    """Return the milliseconds of stage, head, stage, head, ..."""
    device = carried[0].device
    moments = [_now(device)]
    for stage, head in zip(model.stages, model.heads, strict=True):
        carried = advance(stage, carried)
        moments.append(_now(device))
        read(head, carried)
        moments.append(_now(device))
    _synchronize(device)
    if device.type == "cuda":
        return [before.elapsed_time(after) for before, after in pairwise(moments)]
    return [1e3 * (after - before) for before, after in pairwise(moments)]


def _now(device: torch.device) -> Any:
    """Return this moment: an event in the stream of a GPU, or the wall clock once all work is done."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event
    _synchronize(device)
    return time.perf_counter()


def _count(model: MultiExitModel, carried: Carried) -> tuple[list[int], list[int], list[set[str]]]:
    """Return the FLOPs of every stage and of every head, and the operations without a formula in both."""
    stages, heads, unknown = [], [], []
    for stage, head in zip(model.stages, model.heads, strict=True):
        with FlopCounter() as in_stage:  # modules from before torch.compile
            carried = advance(getattr(stage, "_orig_mod", stage), carried)
        with FlopCounter() as in_head:
            read(getattr(head, "_orig_mod", head), carried)
        stages.append(in_stage.flops)
        heads.append(in_head.flops)
        unknown.append(in_stage.unknown | in_head.unknown)
    return stages, heads, unknown


def _check_counts(model: MultiExitModel, stages: list[int], heads: list[int], unknown: list[set[str]]) -> None:
    """Warn of operations that could not be counted; raise if an exit costs nothing."""
    for name, stage, head, operations in zip(model.exits, stages, heads, unknown, strict=True):
        if operations:
            warnings.warn(
                f"the way to exit {name!r} runs {', '.join(sorted(operations))}, which has no formula: its FLOPs are"
                " not in these costs. Give one with torch.utils.flop_counter.register_flop_formula, or measure"
                " unit='ms'",
                stacklevel=3,
            )
        if stage + head == 0:
            raise BadInput(
                f"between exit {name!r} and the one before it is nothing that counts as FLOPs:"
                " leave one of the two out, or measure unit='ms'"
            )


def _metered(model: MultiExitModel, inputs: Carried, warmup: int, seconds: float, progress: bool) -> Costs:
    """Meter joules per sample: every part runs for some seconds on the same features; idle power is included."""
    device, samples = inputs[0].device, len(inputs[0])
    meter = meter_for(device)

    def joules(run: Callable[[], object]) -> float:
        """Return the joules of one run, from as many as fit into these seconds."""
        _synchronize(device)
        before, start, runs = meter.joules(), time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for _ in range(BETWEEN_SYNCS):
                run()
            _synchronize(device)
            runs += BETWEEN_SYNCS
        return (meter.joules() - before) / runs

    for _ in range(warmup):
        model(inputs)
    stages, heads, carried = [], [], inputs
    parts = [*zip(model.stages, model.heads, strict=True)]
    for stage, head in tqdm(parts, "measure energy", unit="stage", disable=not progress):
        stages.append(joules(partial(advance, stage, carried)))
        carried = advance(stage, carried)
        heads.append(0.0 if isinstance(head, nn.Identity) else joules(partial(read, head, carried)))
    if min(map(sum, zip(stages, heads, strict=True))) <= 0:
        raise BadInput(f"the energy meter did not move within {seconds:g} s: give more seconds")
    return Costs(np.array(stages) / samples, np.array(heads) / samples, "J", (), sample_shape(inputs))


def _batch(model: MultiExitModel, example: Any, batch_size: int | None) -> Carried:
    """Return the example on the network's device and in its dtype, repeated or shortened to the batch size."""
    check_has_exits(model)
    weights = [*model.parameters(), *model.buffers()]
    example = example_of(model) if example is None else example
    inputs = model.admit(tree_map_only(Tensor, partial(_placed, weights=weights), example))
    if not all(isinstance(part, Tensor) and part.ndim and len(part) for part in inputs):
        raise BadInput("the example has no samples: give a batch of tensors as the network takes it")
    if batch_size is not None and batch_size < 1:
        raise BadInput(f"batch_size={batch_size}: give at least 1")
    rows = torch.arange(batch_size or len(inputs[0])) % len(inputs[0])
    return tuple(part if len(rows) == len(part) else part[rows.to(part.device)] for part in inputs)


def _placed(part: Tensor, weights: list[Tensor]) -> Tensor:
    """Return a tensor on the device of the weights, unless it holds no data, and in their dtype if both are floats."""
    device = weights[0].device if weights and not part.is_meta else None
    dtype = next((tensor.dtype for tensor in weights if tensor.is_floating_point()), None)
    return part.to(device, dtype if part.is_floating_point() else None)


def _synchronize(device: torch.device) -> None:
    """Return once the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


class Meter(Protocol):
    """Counts the joules that a device uses."""

    def joules(self) -> float:
        """Return the joules since a fixed moment."""
        ...


class RaplMeter:
    """The energy counters of all processor packages under Linux (Intel and AMD: Running Average Power Limit)."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        packages = [path for path in sorted(folder.glob("*-rapl:*")) if path.name.count(":") == 1]
        self.counters = [path / "energy_uj" for path in packages]
        try:
            self.ranges = [int((path / "max_energy_range_uj").read_text()) for path in packages]
            self.last = self._counts()
        except OSError as error:
            raise BadInput(
                f"the processor's energy counter cannot be read ({error}):"
                f" as root, chmod a+r {folder}/*-rapl:*/energy_uj; or measure unit='ms'"
            ) from error
        if not packages:
            raise BadInput(f"this machine has no energy counter under {folder}: measure unit='ms' or 'FLOPs'")
        self.used = 0

    def joules(self) -> float:
        """Return the joules since the meter was made; counters may wrap around to zero."""
        counts = self._counts()
        pairs = zip(counts, self.last, self.ranges, strict=True)
        self.used += sum(now - before if now >= before else now - before + full for now, before, full in pairs)
        self.last = counts
        return self.used / 1e6

    def _counts(self) -> list[int]:
        return [int(path.read_text()) for path in self.counters]


class NvmlMeter:
    """The energy counter of an NVIDIA GPU, from its driver."""

    def __init__(self, device: torch.device) -> None:
        try:
            self.library = ctypes.CDLL(NVML)
        except OSError as error:
            raise BadInput(f"the GPU's energy counter cannot be read ({error}): measure unit='ms'") from error
        self.handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self.handle))

    def joules(self) -> float:
        """Return the joules since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self.handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise BadInput(f"the GPU's energy counter cannot be read ({name} failed with {code}): measure unit='ms'")


def meter_for(device: torch.device) -> Meter:
    """Return the meter of a device; raise an error that says why if there is none."""
    if device.type == "cuda":
        return NvmlMeter(device)
    if device.type == "cpu":
        return RaplMeter()
    raise BadInput(f"there is no energy meter for {device.type}: measure unit='ms'")
