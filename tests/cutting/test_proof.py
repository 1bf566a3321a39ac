"""What a cut refuses: networks that mix samples, share memory, or read numbers from their weights."""

import pytest
import torch
from torch import nn

from alight.cutting.cut import chain, cut
from alight.errors import BadInput


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.third(self.second(self.first(x).relu()).relu())


class BatchStatistics(Network):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third((x - x.mean(0)) / x.std(0))


class UntrackedNorm(Network):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x):
        return self.third(self.norm(self.second(self.first(x))))


class SortedBatch(Network):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x + 0.5 * x.sort(0).values)


class SharedMemory(Network):
    """A view is taken before the cut, and the tensor is written to after it."""

    def forward(self, x):
        x = self.first(x)
        view = x.view(-1, 2, 3)
        x = self.second(x) if False else x
        y = self.second(x.clone())
        x += 1
        return self.third(y + view.flatten(1))


class NumberOfABuffer(Network):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.third(self.second(self.first(x)) * self.scale.item())


class NumberOfAParameter(Network):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.third(self.second(self.first(x))) / float(self.temperature)


class BranchOnAParameter(NumberOfAParameter):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x.relu() if self.temperature > 1 else x)


@pytest.mark.parametrize(
    ("kind", "where"),
    [(BatchStatistics, "its own code"), (UntrackedNorm, r"'norm' \(BatchNorm1d\)"), (SortedBatch, "its own code")],
)
def test_samples_that_mix_are_refused(kind, where):
    torch.manual_seed(0)
    with pytest.raises(BadInput, match=f"depend on the other samples of its batch, first in {where}"):
        cut(kind().eval(), ["first"], torch.randn(4, 6))


def test_carried_tensors_that_share_memory_are_refused():
    with pytest.raises(BadInput, match="share memory that the network writes to later"):
        cut(SharedMemory().eval(), ["first"], torch.randn(4, 6))


@pytest.mark.parametrize("kind", [NumberOfABuffer, NumberOfAParameter, BranchOnAParameter])
def test_numbers_read_from_weights_are_not_fixed_silently(kind):
    network = kind().eval()
    try:
        stages = cut(network, ["first"], torch.randn(4, 6))
    except BadInput as error:
        assert "content of" in str(error)
        assert "test_proof.py" in str(error)
        return
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.mul_(3)
        batch = torch.randn(5, 6)
        torch.testing.assert_close(chain(stages, (batch,)), network(batch))
