"""Costs: FLOPs by hand and as published, milliseconds by quartiles, joules by the meter."""

import csv
import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional

from alight import Member, cascade
from alight.costing import cascades
from alight.costing.measure import NvmlMeter, RaplMeter, head_overhead, measure_costs, meter_for, time_stages
from alight.costs import Costs
from alight.cutting.flops import count_flops
from alight.data.preprocess import InputSpec, TensorSpec
from alight.engine.backends.members import OneStage
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel
from alight.networks.zoo import ResNet, msdnet_cifar, resnet18_cifar

SPEC = InputSpec((TensorSpec("rows", (None, 2), "float32"),), num_classes=3)
ROOT = Path(__file__).parent.parent.parent
FVCORE_RESNET18 = 556_705_792  # multiply-adds by fvcore 0.1.5 of ResNet-18 at 32 x 32: benchmarks/count_flops.py
FVCORE_CONVNEXT_T = 4_470_399_744  # and of ConvNeXt-T at 224 x 224


def one_stage(network: nn.Module) -> MultiExitModel:
    """Return a network as one stage, so that its costs are the stage's."""
    return MultiExitModel([network], [nn.Identity()])


def flops(network: nn.Module, *shape: int) -> float:
    return float(measure_costs(one_stage(network), torch.zeros(shape)).stages[0])


def test_convolutions_count_as_by_hand():
    assert flops(nn.Conv2d(3, 8, 3, padding=1), 1, 3, 10, 10) == 2 * 8 * 100 * 3 * 9
    assert flops(nn.Conv2d(4, 8, 3, stride=2, groups=2), 1, 4, 11, 11) == 2 * 8 * 25 * 2 * 9
    assert flops(nn.Conv2d(6, 6, 7, padding=3, groups=6), 1, 6, 14, 14) == 2 * 6 * 196 * 49
    assert flops(nn.Conv1d(4, 5, 3), 1, 4, 12) == 2 * 5 * 10 * 4 * 3
    assert flops(nn.ConvTranspose2d(4, 5, 2, stride=2), 1, 4, 6, 6) == 2 * 5 * 36 * 4 * 4


def test_linear_layers_count_as_by_hand():
    assert flops(nn.Linear(12, 7), 1, 12) == 2 * 12 * 7
    assert flops(nn.Linear(12, 7, bias=False), 1, 5, 12) == 2 * 5 * 12 * 7


class Attention(nn.Module):
    def forward(self, tokens):
        split = tokens.unflatten(-1, (4, 8)).transpose(1, 2)
        return functional.scaled_dot_product_attention(split, split, split).flatten(1)


def test_attention_counts_as_by_hand_fused_or_not():
    tokens, width = 10, 32
    inner = 2 * 2 * tokens * tokens * width  # queries with keys, then weights with values
    projections = 2 * tokens * width * width * 4
    assert flops(Attention(), 1, tokens, width) == inner

    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    assert flops(Own(width, 4, batch_first=True), 1, tokens, width) == inner + projections
    layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
    assert flops(layer, 1, tokens, width) == inner + projections + 2 * 2 * tokens * width * 64


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def test_recurrent_layers_count_as_by_hand():
    assert flops(Recurrent(8, 16, batch_first=True), 1, 10, 8) == 2 * 10 * (8 + 16) * 4 * 16


class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(32, 24, dtype=torch.int8))

    def forward(self, x):
        return torch._int_mm(x.to(torch.int8), self.weight).float()


def test_whole_number_and_vector_products_count_as_by_hand():
    assert flops(Rounded(), 20, 32) == 2 * 32 * 24
    vector = torch.ones(6)

    class Scored(nn.Module):
        def forward(self, x):
            return x @ vector

    assert flops(Scored(), 4, 6) == 2 * 6


def test_costs_are_per_sample_at_any_batch_size():
    example = torch.zeros(3, 12)
    for batch_size in (None, 1, 8):
        assert measure_costs(one_stage(nn.Linear(12, 7)), example, batch_size=batch_size).stages == [2 * 12 * 7]


def test_multiply_adds_are_half_the_flops():
    model, example = one_stage(nn.Linear(12, 7)), torch.zeros(1, 12)
    costs = measure_costs(model, example, unit="MACs")
    assert costs.unit == "MACs"
    assert costs.stages == measure_costs(model, example).stages / 2


def test_counting_leaves_the_network_alone():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    network[1].eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    measure_costs(one_stage(network), torch.randn(2, 3, 8, 8))
    assert network.training
    assert not network[1].training
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert all(parameter.device.type == "cpu" for parameter in network.parameters())


@torch.library.custom_op("alight_tests::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT


@squared.register_fake
def _(x):
    return x.new_empty(*x.shape[:-1], x.shape[-2])


@torch.library.custom_op("alight_tests::only_real", mutates_args=())
def only_real(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT


class Calling(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.linear, self.operation = nn.Linear(4, 4), operation

    def forward(self, x):
        return self.operation(self.linear(x))


@pytest.mark.parametrize("operation", [squared, only_real], ids=["on meta", "on real tensors only"])
def test_an_operation_without_a_formula_is_named(operation):
    with pytest.warns(UserWarning, match=r"exit 'exit 1' runs alight_tests.\w+, which has no formula"):
        costs = measure_costs(one_stage(Calling(operation)), torch.zeros(1, 3, 4))
    assert costs.stages == [2 * 3 * 4 * 4]


def test_fourier_transforms_and_distances_are_named():
    for operation in (torch.fft.rfft, lambda x: torch.cdist(x, x), torch.linalg.svdvals):
        with pytest.warns(UserWarning, match="no formula"):
            measure_costs(one_stage(Calling(operation)), torch.zeros(1, 3, 4))


class NeedsValues(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x) if x.sum().item() >= 0 else x


def test_a_network_that_needs_values_is_counted_on_real_tensors():
    assert flops(NeedsValues(nn.Linear(4, 4)), 1, 4) == 32
    assert flops(NeedsValues(Attention()), 1, 10, 32) == flops(Attention(), 1, 10, 32)


def test_the_flops_of_one_call_are_those_of_the_stage():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5))
    images = torch.zeros(4, 3, 8, 8)
    assert count_flops(network, images) == 4 * flops(network, 4, 3, 8, 8)
    assert count_flops(NeedsValues(network), images) == count_flops(network, images)


@pytest.mark.slow
def test_costs_are_those_of_the_published_results():
    spec = importlib.util.spec_from_file_location("count_flops", ROOT / "benchmarks" / "count_flops.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with script.RESULTS.open(newline="") as file:
        published = {(row["network"], row["head"]): row for row in csv.DictReader(file)}
    for name, network in script.NETWORKS.items():
        for kind, costs in script.costs_by_head(network, network.backbone()).items():
            row = published.pop((name, kind))
            assert f"{costs.full / 1e6:.2f} {costs.heads[:-1].sum() / 1e6:.2f}" == (
                f"{row['full_mflops']} {row['heads_mflops']}"
            )
    assert not published


def convnext_without_patches(num_classes: int) -> MultiExitModel:
    depths = (2, 2, 6, 2)
    backbone = timm.models.ConvNeXt(num_classes=num_classes, depths=depths, dims=(40, 80, 160, 320), patch_size=1)
    blocks = [f"stages.{stage}.blocks.{block}" for stage, depth in enumerate(depths) for block in range(depth)]
    return attach_heads(backbone, blocks[:-1], example=torch.zeros(1, 3, 32, 32), head="pooled_linear")


@pytest.mark.parametrize(
    ("recording", "network"),
    [
        ("resnet18_frozen", partial(resnet18_cifar, head="flatten_linear")),
        pytest.param("resnet18_mixed_distilled", partial(resnet18_cifar, head="separable"), marks=pytest.mark.slow),
        pytest.param("convnext_frozen", convnext_without_patches, marks=pytest.mark.slow),
        ("msdnet_joint", msdnet_cifar),
    ],
)
def test_costs_are_those_of_the_recordings(recording, network):
    published = Costs.load(ROOT / "results" / "recordings" / recording / "costs.json")
    counted = measure_costs(network(100), torch.zeros(1, 3, 32, 32))
    assert counted.stages.tolist() == published.stages.tolist()
    assert counted.heads.tolist() == published.heads.tolist()


def test_costs_are_twice_what_fvcore_counts():
    with torch.device("meta"):
        networks = ResNet(100), timm.create_model("convnext_tiny")
    for network, size, counted in zip(networks, (32, 224), (FVCORE_RESNET18, FVCORE_CONVNEXT_T), strict=True):
        assert flops(network, 1, 3, size, size) == pytest.approx(2 * counted, rel=0.01)


def test_network_and_example_may_be_on_the_meta_device():
    model, example = one_stage(nn.Linear(12, 7)), torch.zeros(3, 12, device="meta")
    assert measure_costs(model, example, batch_size=2).stages == [2 * 12 * 7]
    assert measure_costs(model.to("meta"), torch.zeros(3, 12)).stages == [2 * 12 * 7]


def two_exits() -> MultiExitModel:
    torch.manual_seed(0)
    return MultiExitModel([nn.Linear(16, 256), nn.Linear(256, 256)], [nn.Linear(256, 3), nn.Identity()])


def test_heads_are_counted_apart_from_stages():
    costs = measure_costs(two_exits(), torch.zeros(1, 16))
    assert costs.stages.tolist() == [2 * 16 * 256, 2 * 256 * 256]
    assert costs.heads.tolist() == [2 * 256 * 3, 0]
    assert head_overhead(costs) == pytest.approx(2 * 256 * 3 / (2 * 16 * 256 + 2 * 256 * 256))


def test_percentages_refer_to_the_most_expensive_network_of_a_cascade_alone(tmp_path, clock_of_this_thread):
    clock_of_this_thread(cascades)
    small, large, example = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3)), torch.zeros(2, 6)
    costs = measure_costs(cascade([small, large], example=example))
    assert costs.cumulative().tolist() == [36, 36 + 162]
    assert costs.full == costs.cumulative([1])[0] == 162
    assert costs.budget("50%") == 81
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json").full == 162
    assert measure_costs(cascade([large, small], example=example)).full == 162
    deep = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    timed = time_stages(cascade([deep, deep], example=torch.zeros(2, 64)), batch_size=256, repeats=5, progress=False)
    assert timed.costs().full < 0.8 * timed.costs().cumulative()[-1]
    assert "network 1: " in str(timed)


def test_a_network_with_exits_in_a_cascade_is_paid_as_far_as_it_runs():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3))
    first, last = attach_heads(body, ["0"], example=torch.zeros(2, 6)), nn.Linear(6, 3)
    costs = measure_costs(cascade([first, last], example=torch.zeros(2, 6)))
    head, tail = 2 * 9 * 3, 2 * 9 * 9 + 2 * 9 * 3
    assert costs.cumulative().tolist() == [108 + head, 108 + head + tail, 108 + head + tail + 36]
    assert costs.cumulative([0, 2]).tolist() == [108 + head, 108 + head + 36]  # nothing after the exit that is open
    assert costs.alone.tolist() == [108 + head, 108 + tail, 36]
    assert costs.full == 108 + tail


def test_other_engines_say_their_flops_or_are_timed(tmp_path):
    network = OneStage("own", lambda state: (state[0] @ np.ones((2, 3), np.float32), ()), SPEC, "0")
    with pytest.raises(BadInput, match=r"FLOPs of one cannot be counted: .* unit='ms'"):
        measure_costs(cascade([network], ["one"]))
    known = cascade([Member(network, "one", flops=6.0, price=0.1), Member(network, "two", flops=60.0, price=2.0)])
    assert measure_costs(known, unit="MACs").cumulative().tolist() == [3.0, 33.0]
    assert measure_costs(known, unit="USD").full == 2.0
    assert measure_costs(known, unit="ms", repeats=3, progress=False).unit == "ms"
    with pytest.raises(BadInput, match="has no price"):
        measure_costs(cascade([network]), unit="USD")


def test_one_exit_has_no_overhead():
    assert head_overhead(Costs([5.0], [1.0])) == 0


def test_milliseconds_are_medians_per_sample_with_their_quartiles():
    timings = time_stages(two_exits(), torch.zeros(4, 16), batch_size=32, repeats=7, warmup=2)
    assert timings.stages.shape == timings.heads.shape == (7, 2)
    low, median, high = timings.quartiles()
    assert (low <= median).all()
    assert (median <= high).all()
    costs = timings.costs()
    assert costs.unit == "ms"
    np.testing.assert_allclose(costs.stages, np.median(timings.stages, axis=0) / 32)
    assert costs.heads[1] == 0
    assert "batch of 32" in str(timings)
    assert "% of the full network" in str(timings)


def test_timed_costs_increase():
    costs = measure_costs(two_exits(), torch.zeros(4, 16), unit="ms", repeats=5, warmup=1)
    assert (np.diff(costs.cumulative()) > 0).all()


def test_timing_runs_in_the_dtype_of_the_network():
    seen = []

    class Watching(nn.Linear):
        def forward(self, x):
            seen.append((x.dtype, len(x)))
            return super().forward(x)

    model = one_stage(Watching(4, 4)).to(torch.bfloat16)
    time_stages(model, torch.zeros(2, 4), batch_size=5, repeats=1, warmup=0)
    assert seen == [(torch.bfloat16, 5)]


def rapl(folder, counts, full=1000):
    for index, count in enumerate(counts):
        package = folder / f"intel-rapl:{index}"
        (package / f"intel-rapl:{index}:0").mkdir(parents=True, exist_ok=True)
        (package / "energy_uj").write_text(f"{count}\n")
        (package / "max_energy_range_uj").write_text(f"{full}\n")


def test_the_rapl_meter_adds_packages_and_survives_a_counter_that_wraps_around(tmp_path):
    rapl(tmp_path, [100, 900])
    meter = RaplMeter(tmp_path)
    assert meter.joules() == 0
    rapl(tmp_path, [150, 950])
    assert meter.joules() == pytest.approx(100e-6)
    rapl(tmp_path, [160, 20])
    assert meter.joules() == pytest.approx((100 + 10 + 70) * 1e-6)


def test_a_machine_without_a_meter_says_so(tmp_path):
    with pytest.raises(BadInput, match=r"no energy counter .* measure unit='ms'"):
        RaplMeter(tmp_path)
    with pytest.raises(BadInput, match="no energy meter for meta"):
        meter_for(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so():
    with pytest.raises(BadInput, match="cannot be read"):
        NvmlMeter(torch.device("cuda"))


def test_joules_come_from_the_meter(tmp_path, monkeypatch):
    rapl(tmp_path, [0], full=10**12)
    meter, reads = RaplMeter(tmp_path), iter(range(1, 100))

    class Running(RaplMeter):
        def joules(self):
            rapl(tmp_path, [next(reads) * 10**6], full=10**12)
            return super().joules()

    meter.__class__ = Running
    monkeypatch.setattr("alight.costing.measure.meter_for", lambda device: meter)
    costs = measure_costs(two_exits(), torch.zeros(4, 16), unit="J", seconds=0.01, warmup=1)
    assert costs.unit == "J"
    assert (costs.stages > 0).all()
    assert costs.heads[0] > 0
    assert costs.heads[1] == 0


def test_bad_input_is_refused():
    model, example = two_exits(), torch.zeros(1, 16)
    with pytest.raises(BadInput, match="no unit 'seconds'"):
        measure_costs(model, example, unit="seconds")
    with pytest.raises(BadInput, match="batch_size=0"):
        measure_costs(model, example, batch_size=0)
    with pytest.raises(BadInput, match="no samples"):
        measure_costs(model, torch.zeros(0, 16))
    with pytest.raises(BadInput, match="repeats=0"):
        time_stages(model, example, repeats=0)
    idle = MultiExitModel([nn.Linear(4, 4), nn.ReLU()], [nn.Linear(4, 2), nn.Identity()], exits=["a", "b"])
    with pytest.raises(BadInput, match="between exit 'b' and the one before it is nothing that counts"):
        measure_costs(idle, torch.zeros(1, 4))


@pytest.mark.parametrize("unit", ["FLOPs", "ms"])
def test_costs_know_the_size_of_the_images_that_they_were_measured_with(unit, tmp_path):
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)) for _ in range(2)]
    model = MultiExitModel([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)], heads)
    costs = measure_costs(model, torch.zeros(2, 3, 40, 40), unit, repeats=1, warmup=0, progress=False)
    for each in (costs, Costs.from_cumulative([1.0, 2.0], sample_shape=(3, 40, 40))):
        each.save(tmp_path / "costs.json")
        for found in (each, each.at_exits([1]), Costs.load(tmp_path / "costs.json")):
            assert found.sample_shape == (3, 40, 40)
    Costs.from_cumulative([1.0, 2.0]).save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json").sample_shape == ()
    rows = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    assert measure_costs(rows, torch.zeros(1, 4)).sample_shape == ()
