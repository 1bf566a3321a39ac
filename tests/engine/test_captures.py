"""What may run concurrently on a GPU: runs that write to memory of their own alone."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from alight.engine.backends import Reads
from alight.engine.backends.torch import captures, open_stages
from alight.engine.backends.torch.captures import Addresses, Captures, memory_use, reserve_streams
from alight.errors import AlightError
from alight.networks.zoo import resnet18_cifar

KEPT = {"scratch": torch.zeros(8, 4)}


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(8, 4))
        self.listed, self.table = [torch.zeros(8, 4)], None
        self.norm = nn.InstanceNorm1d(8, track_running_stats=True).train()


def into_a_buffer(module, inputs):
    return module.buffer[: len(inputs)].copy_(inputs) + 1


def past_autograd(module, inputs):
    module.buffer.data[: len(inputs)].copy_(inputs)
    return module.buffer + 1


def into_a_list(module, inputs):
    return torch.mul(inputs, 2, out=module.listed[0][: len(inputs)]) + 1


def into_what_a_module_keeps(module, inputs):
    return KEPT["scratch"][: len(inputs)].add_(inputs) * 2


@torch.library.custom_op("alight_test::doubled", mutates_args=())
def doubled(inputs: torch.Tensor) -> torch.Tensor:
    return inputs * 2


def by_an_operation_of_somebody_else(module, inputs):
    return doubled(inputs)


def by_what_torch_does_not_see(module, inputs):
    made = torch.empty_like(inputs)
    np.copyto(np.frombuffer(memory_of(made), dtype=np.float32), inputs.numpy().ravel())
    return made + 1


def handed_on_by_what_torch_does_not_see(module, inputs):
    made = inputs.new_empty(inputs.shape)
    np.copyto(np.frombuffer(memory_of(made), dtype=np.float32), inputs.numpy().ravel())
    return made.view(-1)


def in_memory_of_another_order_by_what_torch_does_not_see(module, inputs):
    made = inputs.new_empty_strided(inputs.shape, inputs.stride())
    np.copyto(np.frombuffer(memory_of(made), dtype=np.float32), inputs.numpy().ravel())
    return made + 1


def permuted_by_what_torch_does_not_see(module, inputs):
    made = torch.empty_permuted(inputs.shape, (0, 1))
    np.copyto(np.frombuffer(memory_of(made), dtype=np.float32), inputs.numpy().ravel())
    return made + 1


def memory_of(tensor):
    import ctypes

    return (ctypes.c_byte * (tensor.numel() * 4)).from_address(tensor.data_ptr())


def into_what_it_makes_in_its_first_run(module, inputs):
    if module.table is None:
        module.table = torch.empty_like(inputs)
    return module.table.copy_(inputs) + 1


def by_a_norm_that_trains(module, inputs):
    return module.norm(inputs[None])[0]


@pytest.mark.parametrize(
    "run",
    [
        into_a_buffer,
        past_autograd,
        into_a_list,
        into_what_a_module_keeps,
        by_an_operation_of_somebody_else,
        by_what_torch_does_not_see,
        handed_on_by_what_torch_does_not_see,
        in_memory_of_another_order_by_what_torch_does_not_see,
        permuted_by_what_torch_does_not_see,
        into_what_it_makes_in_its_first_run,
        by_a_norm_that_trains,
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_writes_elsewhere_does_not_run_concurrently(run, inference):
    module = Holds()
    with torch.inference_mode(inference):
        assert not memory_use(lambda inputs: run(module, inputs), [torch.randn(8, 4)]).writes_own


def test_a_run_that_fails_cannot_be_watched():
    with pytest.raises(AlightError, match=r"the memory of a stage cannot be watched: no$"):
        memory_use(lambda inputs: (_ for _ in ()).throw(RuntimeError("no\nnor here")), [torch.randn(8, 4)])


def with_a_table_made_once(module, inputs):
    if module.table is None:
        module.table = torch.arange(4.0)
    return inputs * module.table


def in_place_of_its_inputs(module, inputs):
    return inputs.relu_().add_(module.buffer[0])


def in_memory_that_it_allocates(module, inputs):
    made = torch.empty(2, *inputs.shape)
    made[0].copy_(inputs)
    made[1] = inputs + 1
    return made.sum(0), made.view(-1)


@pytest.mark.parametrize("run", [with_a_table_made_once, in_place_of_its_inputs, in_memory_that_it_allocates])
def test_what_writes_to_memory_of_its_own_runs_concurrently(run):
    module = Holds()
    with torch.inference_mode():
        assert memory_use(lambda inputs: run(module, inputs), [torch.randn(8, 4)]).writes_own


def test_ordinary_networks_run_concurrently():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    bert = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes)).eval()
    tokens = torch.randint(5, 100, (2, 12))
    (whole,) = open_stages(resnet18_cifar(10).eval(), [7], [Reads(())])
    with torch.inference_mode():
        assert memory_use(whole.logits, [torch.randn(2, 3, 32, 32)]).writes_own
        assert memory_use(lambda *given: bert(*given).logits, [tokens, torch.ones_like(tokens)]).writes_own
        assert memory_use(nn.LSTM(4, 8, batch_first=True).eval(), [torch.randn(2, 5, 4)]).writes_own


class Caches(nn.Module):
    """Keeps tensors as modules do: registered, as attributes, in dicts and in lists; some it makes in its first run."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.ones(4))
        self.plain, self.listed, self.cached, self.passing = torch.ones(4), [torch.ones(4)], {}, None

    def forward(self, inputs):
        if "bias" not in self.cached:
            self.cached["bias"] = self.layer.bias * 2
        self.passing = self.layer.weight.sum(0)  # made in every run, as by weight_norm
        scale = torch.tensor(2.0) * self.buffer
        return self.layer(inputs) * scale + self.plain + self.listed[0] + self.cached["bias"] + self.passing

    def train(self, mode=True):
        self.cached = {}
        return super().train(mode)


def followed(module, inputs, run=None):
    addresses = Addresses([module])
    addresses.follow(memory_use(run or module, [inputs]).outside)
    return addresses


@torch.inference_mode()
def test_what_modules_keep_beside_parameters_and_buffers_is_followed():
    inputs = torch.randn(8, 4)
    changes = {
        "plain": lambda module: setattr(module, "plain", torch.zeros(4)),
        "listed": lambda module: module.listed.pop(),
        "cached": lambda module: module.train().eval(),
        "layer": lambda module: module.load_state_dict(Caches().state_dict(), assign=True),
    }
    for change in changes.values():
        module = Caches().eval()
        addresses = followed(module, inputs)
        module(inputs)  # makes another `passing`, which nothing captured reads
        assert addresses.hold()
        change(module)
        assert not addresses.hold()


@torch.inference_mode()
def test_memory_that_no_module_holds_is_refused():
    module, foreign = Caches().eval(), torch.ones(4)
    with pytest.raises(AlightError, match="no parameters or buffers of its modules: register_buffer them"):
        followed(module, torch.randn(8, 4), lambda inputs: module(inputs) + foreign)


def three_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4)).eval()


CHANGES = {
    "a weight": lambda layers: setattr(layers[1][0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "its numbers": lambda layers: setattr(layers[1][0].weight, "data", torch.zeros(4, 4)),
    "a bias that was none": lambda layers: setattr(layers[1][0], "bias", nn.Parameter(torch.zeros(4))),
    "a layer": lambda layers: layers[1].__setitem__(0, nn.Linear(4, 4)),
    "a block": lambda layers: layers.__setitem__(1, nn.Identity()),
    "a layer more": lambda layers: layers[1].append(nn.Tanh()),
    "a parametrization": lambda layers: nn.utils.parametrizations.weight_norm(layers[1][0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_layers_that_stay_is_noticed(change):
    layers = three_layers()
    addresses = followed(layers, torch.randn(2, 4))
    layers.load_state_dict(three_layers().state_dict())  # in place
    assert addresses.hold()
    CHANGES[change](layers)
    assert not addresses.hold()


@torch.inference_mode()
def test_weights_of_a_class_that_keeps_its_numbers_in_other_tensors_are_refused():
    layers = three_layers()
    layers[1][0].weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)), requires_grad=False)
    with pytest.raises(AlightError, match="a TwoTensor does not say where its numbers lie: take weights of plain"):
        followed(layers, torch.randn(2, 4))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["levit_128s", "test_vit", "test_convnext", "test_efficientnet", "crossvit_tiny_240"])
def test_networks_of_timm_use_nothing_but_what_they_hold(name):
    import timm

    network = timm.create_model(name, num_classes=10).eval()
    size = network.default_cfg["input_size"]
    addresses = followed(network, torch.randn(1, *size))
    assert addresses.hold()
    network.train().eval()
    assert addresses.hold() == (name != "levit_128s")  # which empties its caches then


def test_the_first_error_of_concurrent_work_is_the_one_that_is_said(monkeypatch):
    class Lane:
        def wait_stream(self, other):
            if failed:
                raise RuntimeError("the capture is over")

    def work():
        failed.append(True)
        raise MemoryError("this one")

    failed, made = [], object.__new__(Captures)
    made.streams = [Lane(), Lane()]
    monkeypatch.setattr(torch.cuda, "current_stream", Lane)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with pytest.raises(MemoryError, match="this one"):
        made.run_concurrently([work, work])


@pytest.fixture
def streams(monkeypatch):
    """Torch's streams, each priority's handed out again and again."""
    given = dict.fromkeys(captures.PRIORITIES, 0)

    def stream(device, priority):
        given[priority] += 1
        return (device, priority, given[priority] % captures.POOLED)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(captures, "RESERVED", set())
    return captures.RESERVED


def test_streams_are_reserved_until_they_are_returned(streams):
    every = captures.POOLED * len(captures.PRIORITIES)
    found = [each for _ in range(every // 4) for each in reserve_streams(0, 4)]
    assert len(set(found)) == every == 96
    with pytest.raises(AlightError, match="96 streams are in use, which is all: drop predictors"):
        reserve_streams(0, 1)
    captures.RESERVED.difference_update(found[:1])
    assert reserve_streams(0, 1) == found[:1]


def test_streams_of_graphs_that_nobody_needs_are_found_when_all_are_in_use(streams, monkeypatch):
    found = reserve_streams(0, 96)
    monkeypatch.setattr(gc, "collect", lambda: captures.RESERVED.difference_update(found[-4:]))
    assert {*reserve_streams(0, 4)} == {*found[-4:]}
