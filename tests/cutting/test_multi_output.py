"""A network that gives several logits becomes stages and heads that give the same."""

import copy
import re

import pytest
import torch
from torch import nn

from alight.cutting.cut import split_outputs
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel


class Exits(nn.Module):
    """Blocks with batch normalisation in place, and a classifier after each."""

    def __init__(self, count=3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)) for _ in range(count)
        )
        self.classifiers = nn.ModuleList(nn.Linear(6, 4) for _ in range(count))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        outputs = []
        for block, classifier in zip(self.blocks, self.classifiers, strict=True):
            x = block(x)
            outputs.append(classifier(self.drop(x)))
        return outputs


class Named(Exits):
    def forward(self, x):
        return {f"exit{index}": logits for index, logits in enumerate(super().forward(x))}


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Exits()

    def forward(self, x):
        return tuple(self.inner(x * 2))


class Feeds(Exits):
    """Earlier logits are used by later exits, and all exits by a scale made before any."""

    def forward(self, x):
        scale = torch.sigmoid(x.mean(1, keepdim=True))
        early = self.classifiers[0](self.blocks[0](x))
        late = self.classifiers[1](self.blocks[1](x) * scale) + early
        return early, late, self.classifiers[2](self.blocks[2](x)) + late * scale


class BlockWithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.body(x)
        return x, self.head(x)


class Mixed(nn.Module):
    """Every block gives features and logits at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = BlockWithHead(), BlockWithHead(), BlockWithHead()

    def forward(self, x):
        x, first = self.one(x)
        x, second = self.two(x)
        return [first, second, self.three(x)[1]]


def rows(count):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count))


def outputs_of(network, batch):
    made = network(batch)
    return list(made.values()) if isinstance(made, dict) else list(made)


@pytest.mark.parametrize("kind", [Exits, Named, Wrapped, Feeds, Mixed])
def test_stages_and_heads_give_the_outputs_bit_by_bit(kind):
    network = kind().eval()
    model = MultiExitModel(*split_outputs(network, rows(1)))
    for count in (1, 2, 5):
        for found, expected in zip(model(rows(count)), outputs_of(network, rows(count)), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [Exits, Feeds, Mixed])
def test_every_parameter_is_in_one_place_and_stays_shared(kind):
    network = kind()
    stages, heads = split_outputs(network, rows(1))
    held = [weight for part in (*stages, *heads) for weight in part.parameters()]
    assert sorted(map(id, held)) == sorted(map(id, network.parameters()))


def test_a_head_holds_its_classifier_and_a_stage_its_block():
    stages, heads = split_outputs(Exits(), rows(1))
    assert [name for name, _ in heads[1].named_parameters()] == ["classifiers.1.weight", "classifiers.1.bias"]
    assert {name.split(".")[1] for name, _ in stages[1].named_parameters()} == {"1"}
    assert all(head.reads_everything for head in heads[:-1])
    assert isinstance(heads[-1], nn.Identity)


def test_samples_can_leave_between_stages():
    network = Feeds().eval()
    stages, heads = split_outputs(network, rows(1))
    carried = stages[0](rows(5))
    carried = stages[1](*(tensor[[3, 1]] for tensor in carried))
    torch.testing.assert_close(heads[1](*carried), network(rows(5))[1][[3, 1]])
    torch.testing.assert_close(stages[2](*(tensor[[1]] for tensor in carried)), network(rows(5))[2][[1]])


def test_training_mode_draws_the_same_random_numbers_and_updates_the_same_statistics():
    network = Exits()
    twin = copy.deepcopy(network)
    model = MultiExitModel(*split_outputs(network, rows(1))).train()
    torch.manual_seed(1)
    found = model(rows(5))
    torch.manual_seed(1)
    for one, other in zip(found, twin(rows(5)), strict=True):
        assert torch.equal(one, other)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor)


def test_a_network_with_one_output_is_refused():
    with pytest.raises(BadInput, match="gives 1 outputs: give one that returns several, or attach heads"):
        split_outputs(nn.Linear(6, 3), rows(1))


class LateFirst(Exits):
    def forward(self, x):
        return super().forward(x)[::-1]


class LastTwoSwapped(Exits):
    def forward(self, x):
        early, middle, late = super().forward(x)
        return early, late, middle


class Repeated(Feeds):
    def forward(self, x):
        early, _, late = super().forward(x)
        return late, early


@pytest.mark.parametrize(("kind", "order"), [(LateFirst, [2, 1, 0]), (LastTwoSwapped, [0, 2, 1])])
def test_outputs_out_of_order_are_refused_with_the_order_found(kind, order):
    with pytest.raises(BadInput, match=rf"not ordered from early to late: .*in the order {re.escape(str(order))}"):
        split_outputs(kind(), rows(1))


def test_an_output_that_needs_nothing_of_its_own_is_refused():
    with pytest.raises(BadInput, match=r"output 1 needs nothing beyond .* in the order \[1, 0\]"):
        split_outputs(Repeated(), rows(1))
