"""Laws of stages, on small networks that each do one unusual thing."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional

from alight.cutting.calls import quick_result
from alight.cutting.cut import cut
from alight.cutting.running import chain
from alight.cutting.stages import Stage
from alight.errors import BadInput
from alight.networks.attach import attach_heads


class Chain(nn.Module):
    """Three blocks and a classifier; what differs is `forward`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.fc = nn.Linear(4, 3)
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.randn(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.fc(self.third(self.second(self.first(x))))


class Skips(Chain):
    def forward(self, x):
        early = self.first(x)
        late = self.second(early)
        return self.fc(self.third(late) + early * self.scale + x)


class UsesConstants(Chain):
    """A table made of the batch size, a parameter and a device, used on both sides of the cut."""

    def forward(self, x):
        table = torch.zeros(len(x), 4, dtype=x.dtype, device=x.device) + self.bias
        table[:, 0] = self.bias[0] * 2
        steps = torch.arange(4, device=x.device).to(x.dtype)
        x = self.first(x) + table
        x = self.second(x + steps)
        return self.fc(self.third(x) + table * steps)


class BatchSecond(Chain):
    """Tokens first and batch second, as older transformers do."""

    def forward(self, x):
        x = x.unsqueeze(0).repeat(6, 1, 1) + torch.arange(6.0).to(x)[:, None, None]
        return self.fc(self.third(self.second(self.first(x))).mean(0))


class ManyRows(Chain):
    """Every sample in several rows, as windows are."""

    def forward(self, x):
        x = torch.stack([x, x + 1], dim=1).flatten(0, 1)
        x = self.third(self.second(self.first(x)))
        return self.fc(x.view(-1, 2, 4).sum(1))


class Writes(Chain):
    def forward(self, x):
        x = self.first(x).clone()
        x += self.bias
        other = x[:, :2]
        other.mul_(2)
        return self.fc(functional.relu_(self.second(x)) + x)


class Branches(Chain):
    def forward(self, x):
        if x.shape[-1] > 2 and x.ndim == 2:
            x = self.first(x)
        rows, *_ = x.shape
        for part in x:
            assert part.shape == (4,)
        return self.fc(self.third(self.second(x)).reshape(rows, -1))


class FunctionalDropout(Chain):
    def forward(self, x):
        x = self.first(x)
        x = functional.dropout(self.second(x), 0.5, self.training)
        return self.fc(self.third(x) if self.training else self.third(x) * 1)


class Containers(Chain):
    """Dicts, tuples and optional arguments between modules."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Pair(), Pair()

    def forward(self, x, shift=None):
        made = self.first({"x": x, "sum": x * 0})
        made = self.second(made)
        x = made["x"] if shift is None else made["x"] + shift
        return self.fc(self.third(x + made["sum"]))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair):
        return {"x": self.linear(pair["x"]), "sum": pair["sum"] + pair["x"]}


class SharedTable(Chain):
    """A table that a module makes of no content, one for all samples, used on both sides of the cut."""

    def __init__(self):
        super().__init__()
        self.positions = Positions()

    def forward(self, x):
        table = self.positions(x)
        return self.fc(self.third(self.second(self.first(x) + table) - table) + table)


class Positions(nn.Module):
    def forward(self, x):
        return torch.arange(x.shape[1]).to(x)[None] * torch.zeros_like(x[:1]).cos()


UNUSUAL = [
    SharedTable, Chain, Skips, UsesConstants, BatchSecond, ManyRows, Writes, FunctionalDropout, Containers
]  # fmt: skip


def chained(stages, *batch):
    for stage in stages:
        batch = stage(*batch)
    return batch


def rows(count):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_networks_are_cut_bit_by_bit(kind):
    network = kind().eval()
    stages = cut(network, ["first", "second"], rows(1))
    for count in (1, 2, 5, 8):
        assert torch.equal(chained(stages, rows(count)), network(rows(count)))


@pytest.mark.parametrize("kind", UNUSUAL)
def test_every_carried_tensor_has_a_row_per_sample_and_can_be_compacted(kind):
    network = kind().eval()
    first, second, last = cut(network, ["first", "second"], rows(1))
    carried = first(rows(6))
    assert all(len(tensor) == 6 for tensor in carried)
    carried = second(*(tensor[[5, 1, 3]] for tensor in carried))
    kept = last(*(tensor[[2, 0]] for tensor in carried))
    torch.testing.assert_close(kept, network(rows(6)[[3, 5]]))


@pytest.mark.parametrize("kind", UNUSUAL)
def test_stages_follow_the_network_to_another_dtype(kind):
    network = kind().eval()
    stages = nn.ModuleList(cut(network, ["first", "second"], rows(1))).double()
    assert {weight.dtype for weight in network.first.parameters()} == {torch.float64}
    network.double()
    assert torch.equal(chained(stages, rows(5).double()), network(rows(5).double()))


@pytest.mark.parametrize("kind", UNUSUAL)
def test_stages_follow_the_network_to_another_device(kind):
    network = kind().eval()
    stages = nn.ModuleList(cut(network, ["first", "second"], rows(1))).to("meta")
    assert chained(stages, rows(5).to("meta")).device.type == "meta"


@pytest.mark.parametrize("kind", UNUSUAL)
def test_in_training_mode_the_chain_draws_the_same_random_numbers_as_the_network(kind):
    network = kind()
    stages = nn.ModuleList(cut(network, ["first", "second"], rows(1)))
    assert all(stage.training for stage in stages)
    torch.manual_seed(3)
    expected = network(rows(5))
    torch.manual_seed(3)
    assert torch.equal(chained(stages, rows(5)), expected)


def test_a_stage_changes_mode_with_what_contains_it():
    network = FunctionalDropout()
    stages = nn.ModuleList(cut(network, ["first"], rows(1)))
    stages.eval()
    network.eval()
    assert torch.equal(chained(stages, rows(5)), network(rows(5)))
    stages.train()
    assert not torch.equal(chained(stages, rows(5)), chained(stages, rows(5)))


def test_cutting_changes_neither_statistics_nor_modes_nor_random_state():
    network = torchvision.models.mobilenet_v3_small(num_classes=3)
    network.features[0].eval()
    before, modes = copy.deepcopy(network.state_dict()), [module.training for module in network.modules()]
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    cut(network, ["features.3"], torch.randn(1, 3, 32, 32, generator=torch.Generator()))
    assert torch.equal(torch.rand(1), expected)
    assert [module.training for module in network.modules()] == modes
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_batch_normalisation_keeps_its_own_mode_inside_a_stage():
    network = torchvision.models.resnet18(num_classes=3)
    stages = nn.ModuleList(cut(network, ["layer1"], torch.randn(1, 3, 32, 32))).train()
    network.bn1.eval()
    old = network.bn1.running_mean.clone(), network.layer1[0].bn1.running_mean.clone()
    chained(stages, torch.randn(4, 3, 32, 32))
    assert torch.equal(network.bn1.running_mean, old[0])
    assert not torch.equal(network.layer1[0].bn1.running_mean, old[1])


def test_every_name_in_the_state_dict_of_the_network_is_in_that_of_a_stage():
    network = torchvision.models.resnet18(num_classes=3)
    stages = cut(network, ["layer1", "layer2.0"], torch.randn(1, 3, 32, 32))
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(network.state_dict())


def test_a_step_of_the_optimiser_on_stages_is_one_on_the_network():
    network = UsesConstants().eval()
    stages = nn.ModuleList(cut(network, ["first", "second"], rows(1)))
    optimiser = torch.optim.SGD(stages.parameters(), lr=0.1)
    chained(stages, rows(5)).sum().backward()
    optimiser.step()
    assert torch.equal(chained(stages, rows(5)), network(rows(5)))


def test_buffers_of_opened_modules_stay_shared_when_stages_move():
    network = Skips().eval()
    stages = nn.ModuleList(cut(network, ["first", "second"], rows(1))).double()
    assert network.scale.dtype == torch.float64
    assert stages[2].get_buffer("scale") is network.scale


def test_a_copy_of_a_stage_has_weights_of_its_own():
    network = UsesConstants().eval()
    stages = cut(network, ["first"], rows(1))
    copied = copy.deepcopy(nn.ModuleList(stages))
    expected = network(rows(5))
    with torch.no_grad():
        for weight in network.parameters():
            weight.zero_()
    assert torch.equal(chained(copied, rows(5)), expected)


def test_a_copy_keeps_what_stages_share():
    network = Skips().eval()
    first, last = cut(network, ["first"], rows(1))
    twins = copy.deepcopy([network, first, last])
    assert torch.equal(chained(twins[1:], rows(5)), network(rows(5)))
    assert twins[2].get_parameter("fc.weight") is twins[0].fc.weight
    assert twins[2].get_buffer("scale") is twins[0].scale
    assert copy.copy(last).get_parameter("fc.weight") is network.fc.weight


def test_pickling_a_stage_is_refused_with_the_alternative(tmp_path):
    stages = nn.ModuleList(cut(Chain(), ["first"], rows(1)))
    for attempt in (lambda: pickle.dumps(stages), lambda: torch.save(stages, tmp_path / "stages.pt")):
        with pytest.raises(BadInput, match=r"cannot be pickled.*save_model.*cut it again"):
            attempt()


def test_a_stage_shows_what_it_runs_and_has_code_of_its_own():
    first, last = cut(Chain(), ["first"], rows(1))
    assert isinstance(first, Stage)
    assert "self.first(" in first._source
    assert "self.fc(" in last._source
    assert type(first).forward.__code__ is not type(last).forward.__code__


def test_several_inputs_come_as_a_tuple_or_by_name():
    network = Containers().eval()
    batch = {"x": rows(5), "shift": rows(5) * 2}
    for example in (batch, tuple(batch.values())):
        stages = cut(network, ["first", "second"], example)
        assert torch.equal(chained(stages, *batch.values()), network(**batch))


class Inner(nn.Module):
    """Gives a row per part of a sample, a map of attention that is not used, and the tokens, in this order."""

    def __init__(self):
        super().__init__()
        self.pixels, self.tokens = nn.Linear(2, 2), nn.Linear(4, 4)

    def forward(self, pixels, tokens):
        pixels = self.pixels(pixels)
        tokens = self.tokens(tokens) + pixels.view(-1, 4)
        return pixels, tokens.softmax(-1), tokens


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.fc = Inner(), Inner(), nn.Linear(4, 3)

    def forward(self, x):
        pixels, _, tokens = self.first(x.view(-1, 2), x)
        pixels, _, tokens = self.second(pixels, tokens)
        return self.fc(tokens)


def test_of_several_outputs_a_head_reads_the_one_with_a_row_per_sample_that_is_used_later():
    network = Nested().eval()
    first, last = cut(network, ["first"], rows(1))
    features, pixels = first(rows(5))
    assert torch.equal(features, network.first(rows(5).view(-1, 2), rows(5))[2])
    assert pixels.shape == (5, 2, 2)
    assert torch.equal(last(features, pixels), network(rows(5)))


def test_code_that_branches_on_shapes_and_walks_over_samples_is_followed():
    network = Branches().eval()
    assert torch.equal(chained(cut(network, ["first"], rows(1)), rows(5)), network(rows(5)))


def test_a_module_may_have_any_name_that_the_network_gives_it():
    network = nn.Sequential(OrderedDict(source=nn.Linear(4, 4), graphs=nn.ReLU(), shared=nn.Linear(4, 3)))
    batch = torch.randn(5, 4)
    assert torch.equal(chain(cut(network, ["source"], torch.randn(2, 4)), (batch,)), network(batch))


MAPS, STEPS = torch.randn(2, 4, 3, 3), torch.randn(2, 5, 4).transpose(1, 2)  # the second is not contiguous
QUICK = {
    "batch norm": (functional.batch_norm, MAPS, torch.zeros(4), torch.ones(4)),
    "batch norm of steps": (functional.batch_norm, STEPS, torch.zeros(4), torch.ones(4)),
    "layer norm of steps": (functional.layer_norm, STEPS, (5,)),
    "group norm": (functional.group_norm, MAPS, 2),
    "GELU of steps": (functional.gelu, STEPS),
    "linear": (functional.linear, STEPS, torch.randn(7, 5)),
    "linear of one row": (functional.linear, STEPS, torch.randn(5)),
    "attention": (functional.scaled_dot_product_attention, MAPS, MAPS, torch.randn(2, 4, 3, 6)),
    "addition": (torch.add, MAPS, MAPS),
}


@pytest.mark.parametrize("case", QUICK)
def test_shapes_that_are_found_quickly_are_those_that_torch_gives(case):
    function, *args = QUICK[case]
    found = quick_result(function, [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args])
    made = function(*args)
    known = case not in ("linear of one row", "addition")
    assert (found is not None) == known
    assert not known or (found.shape, found.stride(), found.dtype) == (made.shape, made.stride(), made.dtype)


class Experts(nn.Module):
    """Returns logits and a loss that balances its experts over the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.end = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        loss = x.softmax(1).mean(0).square().sum()
        x = self.second(x.relu())
        self.loss = loss + x.softmax(1).mean(0).square().sum()
        return self.end(x), self.loss


def test_a_loss_beside_the_logits_is_not_carried():
    network, batch = Experts().eval(), torch.randn(7, 6)
    model = attach_heads(network, ["second"], example=torch.randn(2, 6), logits=0).eval()
    assert model.verify() == ""
    with torch.no_grad():
        assert len(model.stages[0](batch)) == 1
        assert torch.equal(model(batch)[-1], network(batch)[0])


class WritesThroughAView(Experts):
    def forward(self, x):
        x = self.first(x)
        view = x[:, :2]
        view.add_(1)
        torch.relu_(x[:, 2:])
        return self.end(self.second(x))


class DrawsForNothing(Experts):
    def forward(self, x):
        x = self.first(x)
        nn.functional.dropout(x, training=self.training)
        return self.end(nn.functional.dropout(self.second(x), training=self.training))


@pytest.mark.parametrize("kind", [WritesThroughAView, DrawsForNothing])
def test_what_has_effects_stays_though_its_result_is_not_used(kind):
    torch.manual_seed(0)
    network, batch = kind().eval(), torch.randn(7, 6)
    model = attach_heads(network, ["first"], example=torch.randn(2, 6)).eval()
    assert model.verify() == ""
    with torch.no_grad():
        assert torch.equal(model(batch)[-1], network(batch))
    logits = []
    for run in (network.train(), lambda given: model.train()(given)[-1]):
        torch.manual_seed(1)
        logits.append(run(batch))
    assert torch.equal(*logits)


class BranchesOnAnUnusedTensor(Experts):
    """Computes a tensor of which only the size is read."""

    def forward(self, x):
        windows, x = x.unfold(1, 2, 2), self.first(x)
        return self.end(self.second(x if windows.shape[1] < 10 else -x).mean(1))


def test_the_size_of_a_tensor_that_nothing_else_uses_is_compared():
    network, short, long = BranchesOnAnUnusedTensor().eval(), torch.randn(3, 12, 6), torch.randn(3, 40, 6)
    stages = cut(network, ["first"], torch.randn(2, 8, 6))
    with torch.no_grad():
        assert torch.equal(chain(stages, (short,)), network(short))
        with pytest.raises(BadInput, match="it compares 20 with 10"):
            chain(stages, (long,))
