"""Several processes: together they see every sample of a batch once, and their mean losses average to its own."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from alight.errors import BadInput
from alight.training.distributed import Processes, processes

NUMBERS = TensorDataset(torch.arange(23.0))


def parts(count: int, batch_size: int = 5) -> list[list[tuple[torch.Tensor, float]]]:
    """Batches and weights of every process, all with the same seed."""
    seen = []
    for rank in range(count):
        shared = Processes(rank, count).share(DataLoader(NUMBERS, batch_size, shuffle=True))
        torch.manual_seed(7)
        shared.begin(0, 7)
        seen.append([(batch, shared.weight()) for (batch,) in shared])
    return seen


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_are_the_batches_of_one_process(count):
    torch.manual_seed(7)
    whole = [batch for (batch,) in DataLoader(NUMBERS, 5, shuffle=True)]
    for step, batches in enumerate(zip(*parts(count), strict=True)):
        together = torch.cat([batch for batch, weight in batches if weight])
        assert sorted(together.tolist()) == sorted(whole[step].tolist())
        averaged = np.mean([weight * batch.mean().item() for batch, weight in batches])
        assert averaged == pytest.approx(whole[step].mean().item())


def test_a_sampler_for_processes_is_taken_as_it_stands():
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=1, shuffle=True)
    shared = Processes(1, 2).share(DataLoader(NUMBERS, 4, sampler=sampler))
    orders = []
    for epoch in (0, 1, 0):
        shared.begin(epoch, 0)
        orders.append([batch.tolist() for (batch,) in shared])
        assert shared.weight() == 1.0
    assert orders[0] == orders[2] != orders[1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Plain(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Stream()), DataLoader(Plain(), batch_size=None)])
def test_what_has_no_batches_of_indices_cannot_be_parted(loader):
    with pytest.raises(BadInput, match="cannot be parted among processes: give a DataLoader"):
        Processes(0, 2).share(loader)
    assert len(list(Processes().share(loader))) in (2, 4)


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    own, device = processes(torch.device("cpu"))
    assert (own.rank, own.count, own.is_first) == (0, 1, True)
    assert device == torch.device("cpu")
