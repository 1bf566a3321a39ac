"""Shards: together the processes see every sample of a batch once, and their mean losses average to the batch's."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from alight.errors import BadInput
from alight.training.distributed import Processes, ShardedLoader, join_processes

NUMBERS = TensorDataset(torch.arange(23.0))


def shards(count: int, batch_size: int = 5) -> list[list[tuple[torch.Tensor, float]]]:
    """Batches and weights of every process, all with the same seed."""
    seen = []
    for rank in range(count):
        sharded = ShardedLoader(DataLoader(NUMBERS, batch_size, shuffle=True), Processes(rank, count))
        torch.manual_seed(7)
        sharded.begin_epoch(0, 7)
        seen.append([(batch, sharded.next_weight(len(batch))[0]) for (batch,) in sharded])
    return seen


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shards_together_are_the_batches_of_one_process(count):
    torch.manual_seed(7)
    whole = [batch for (batch,) in DataLoader(NUMBERS, 5, shuffle=True)]
    for step, batches in enumerate(zip(*shards(count), strict=True)):
        together = torch.cat([batch for batch, weight in batches if weight])
        assert sorted(together.tolist()) == sorted(whole[step].tolist())
        averaged = np.mean([weight * batch.mean().item() for batch, weight in batches])
        assert averaged == pytest.approx(whole[step].mean().item())


def test_a_distributed_sampler_is_used_unchanged():
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=1, shuffle=True)
    sharded = ShardedLoader(DataLoader(NUMBERS, 4, sampler=sampler), Processes(1, 2))
    orders = []
    for epoch in (0, 1, 0):
        sharded.begin_epoch(epoch, 0)
        orders.append([batch.tolist() for (batch,) in sharded])
        assert sharded.next_weight(4) == (1.0, 4)
    assert orders[0] == orders[2] != orders[1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Indexed(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Stream()), DataLoader(Indexed(), batch_size=None)])
def test_a_loader_without_batches_of_indices_cannot_be_divided(loader):
    with pytest.raises(BadInput, match="cannot be divided among processes: give a DataLoader"):
        ShardedLoader(loader, Processes(0, 2))
    assert len(list(ShardedLoader(loader, Processes()))) in (2, 4)


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    processes, device = join_processes(torch.device("cpu"))
    assert (processes.rank, processes.count, processes.is_first) == (0, 1, True)
    assert device == torch.device("cpu")
