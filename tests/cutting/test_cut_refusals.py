"""What cannot be cut is refused with the reason and the remedy."""

import pytest
import torch
import torchvision
from torch import nn

from alight.cutting.cut import CUTTERS, cut, register_cutter
from alight.errors import BadInput


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.second(self.first(x)))


class ReadsContent(Blocks):
    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        return self.fc(self.second(x))


def turned(x):
    """Each sample by its own content."""
    return torch.stack([-row if row.sum() > 0 else row for row in x])


class ReadsSamples(Blocks):
    def forward(self, x):
        return self.fc(self.second(turned(self.first(x))))


class LoopsOverSamples(Blocks):
    def forward(self, x):
        x = self.first(x)
        return self.fc(torch.stack([self.second(row) for row in x]))


class DividesByTheBatch(Blocks):
    def forward(self, x):
        return self.fc(self.second(self.first(x) * (1 / len(x))))


class MixesSamples(Blocks):
    def forward(self, x):
        x = self.first(x)
        mean = x.mean(0)
        return self.fc(self.second(x) + mean)


class BranchesOnTheBatch(Blocks):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.fc(x if len(x) < 5 else -x)


class RowsApart(Blocks):
    """Two rows for each sample, a whole batch apart."""

    def forward(self, x):
        x = self.second(self.first(torch.cat([x, x + 1])))
        return self.fc(x[: len(x) // 2] - 2 * x[len(x) // 2 :])


class CallsTwice(Blocks):
    def forward(self, x):
        return self.fc(self.first(self.first(x)))


class ReadsContentInTraining(Blocks):
    def forward(self, x):
        x = self.first(x)
        if self.training and x.sum() > 0:
            x = -x
        return self.fc(self.second(x))


class FailsInTraining(Blocks):
    """Whose second output, made in training alone, needs more than there is."""

    def forward(self, x):
        x = self.first(x)
        if self.training:
            nn.functional.conv1d(x.unsqueeze(1), torch.ones(1, 1, 9))
        return self.fc(self.second(x))


EXAMPLE = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))


def test_an_unknown_name_is_answered_with_the_nearest_ones():
    with pytest.raises(BadInput, match=r"no module is called 'layer1\.3'.*'layer1\.\d'"):
        cut(torchvision.models.resnet18(), ["layer1.3"], torch.randn(1, 3, 32, 32))
    with pytest.raises(BadInput, match="no module is called ''"):
        cut(Blocks(), [""], EXAMPLE)


def test_a_name_given_twice_is_refused():
    with pytest.raises(BadInput, match="'first' is named more than once"):
        cut(Blocks(), ["first", "first"], EXAMPLE)


def test_a_text_in_place_of_a_list_is_refused():
    with pytest.raises(BadInput, match=r"give a list of names, as in after=\['first'\]"):
        cut(Blocks(), "first", EXAMPLE)


def test_exits_out_of_order_are_refused_with_the_order_found():
    with pytest.raises(BadInput, match=r"out of order: the network runs them as \['first', 'second'\]"):
        cut(Blocks(), ["second", "first"], EXAMPLE)


def test_two_exits_at_the_same_place_are_refused():
    with pytest.raises(BadInput, match=r"nothing is computed between the end of 'layer1\.1' and that of 'layer1'"):
        cut(torchvision.models.resnet18(), ["layer1.1", "layer1"], torch.randn(1, 3, 32, 32))


def test_an_exit_at_the_end_of_the_network_is_refused():
    with pytest.raises(BadInput, match="nothing is computed between the end of 'fc' and that of 'the network'"):
        cut(Blocks(), ["fc"], EXAMPLE)


def test_modules_that_run_never_or_more_than_once_are_refused():
    with pytest.raises(BadInput, match="'spare' is never called"):
        cut(Blocks(), ["spare"], EXAMPLE)
    with pytest.raises(BadInput, match="'first' is called 2 times"):
        cut(CallsTwice(), ["first"], EXAMPLE)


def test_reading_the_content_of_a_tensor_is_refused_with_the_line_and_the_remedy():
    message = (
        r"content of a tensor \(__bool__\) at .*test_cut_refusals\.py:\d+ in forward: if x\.sum\(\) > 0:.*register"
    )
    with pytest.raises(BadInput, match=message):
        cut(ReadsContent(), ["first"], EXAMPLE)


def test_other_calls_at_another_batch_size_are_refused_with_the_line():
    with pytest.raises(BadInput, match=r"2 than at|calls at batch size 2 and \d+ at 3|other functions at batch size 3"):
        cut(LoopsOverSamples(), ["first"], EXAMPLE)


def test_a_fraction_that_follows_the_batch_size_is_refused():
    with pytest.raises(BadInput, match=r"0\.5 at batch size 2 is 0\.333\d* at 3 .*test_cut_refusals\.py"):
        cut(DividesByTheBatch(), ["first"], EXAMPLE)


def test_a_value_of_all_samples_that_crosses_the_cut_is_found():
    with pytest.raises(BadInput, match=r"logits of a sample depend on the other samples .* seen in what 'fc'"):
        cut(MixesSamples(), ["second"], EXAMPLE)


def test_rows_of_a_sample_that_do_not_lie_side_by_side_are_detected():
    with pytest.raises(BadInput, match="or holds several rows for each sample, not side by side"):
        cut(RowsApart(), ["first"], EXAMPLE)


def test_a_network_that_behaves_differently_for_larger_batches_is_detected():
    with pytest.raises(BadInput, match=r"something else for a batch of 4099 samples than for 2 .*x if len\(x\) < 5"):
        cut(BranchesOnTheBatch(), ["first"], EXAMPLE)


def test_a_network_that_can_only_be_cut_for_evaluation_says_so_in_training():
    network = ReadsContentInTraining()
    first, last = cut(network, ["first"], EXAMPLE)
    first.eval(), last.eval(), network.eval()
    assert torch.equal(last(*first(EXAMPLE)), network(EXAMPLE))
    with pytest.raises(BadInput, match=r"cannot run in training mode .*x\.sum\(\) > 0"):
        last.train()(*first(EXAMPLE))


def test_a_network_that_fails_in_training_mode_is_cut_for_evaluation():
    network = FailsInTraining().eval()
    first, last = cut(network, ["first"], EXAMPLE)
    assert torch.equal(last(*first(EXAMPLE)), network(EXAMPLE))
    with pytest.raises(BadInput, match=r"cannot run in training mode .*RuntimeError.*conv1d.* can in evaluation mode"):
        first.train()(EXAMPLE)


def test_content_may_be_read_inside_a_module_that_stays_closed():
    torch.manual_seed(0)  # with some weights the proof's first two samples take one branch, and more take both
    network = nn.Sequential(nn.Linear(4, 4), ReadsSamples(), nn.Linear(3, 3)).eval()
    first, last = cut(network, ["0"], EXAMPLE)
    assert torch.equal(last(*first(EXAMPLE)), network(EXAMPLE))


@pytest.mark.parametrize(
    "example", [None, [1, 2], {}, (EXAMPLE, torch.zeros(2, 4)), torch.zeros(0, 4), torch.tensor(1.0)]
)
def test_an_example_without_a_batch_is_refused(example):
    with pytest.raises(BadInput, match="the example"):
        cut(Blocks(), ["first"], example)


def test_a_registered_cutter_is_used_and_its_stages_are_checked():
    class Own(ReadsSamples):
        pass

    class Tail(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network.fc(self.network.second(turned(x)))

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return (self.inner(x),)

    network = Own().eval()
    try:
        register_cutter(Own)(lambda model, after, example: [Wrapped(model.first), Tail(model)])
        first, last = cut(network, ["first"], EXAMPLE)
        assert torch.equal(last(*first(EXAMPLE)), network(EXAMPLE))
        register_cutter(lambda model: isinstance(model, Own))(lambda model, after, example: [model])
        with pytest.raises(BadInput, match="made 1 stages for 1 exits"):
            cut(network, ["first"], EXAMPLE)
        register_cutter(Own)(lambda model, after, example: [Wrapped(model.first), model.fc])
        with pytest.raises(BadInput, match="do not give what the network gives"):
            cut(network, ["first"], EXAMPLE)
    finally:
        CUTTERS[:] = [pair for pair in CUTTERS if not pair[0](network)]
