"""Training in several processes: those that `torchrun` started, and each one's shard of every batch."""

import atexit
import gc
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from alight.errors import BadInput


@dataclass(frozen=True)
class Processes:
    """The processes that train one network, and which of them this one is; without others it is 0 of 1."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process prints and saves."""
        return self.rank == 0

    def average_gradients(self, module: nn.Module) -> nn.Module:
        """Return the module with gradients averaged over all processes."""
        if self.count == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        return DistributedDataParallel(module, static_graph=True)  # some weights may be unused, but always the same

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def any(self, value: bool, device: torch.device) -> bool:
        """Return whether the value is true in one of the processes, which talk through this device."""
        return bool(self.sum(torch.tensor(float(value), device=device))) if self.count > 1 else value

    def wait(self) -> None:
        """Return once every process has called this."""
        if self.count > 1:
            distributed.barrier()


def join_processes(device: torch.device) -> tuple[Processes, torch.device]:
    """Return the processes that `torchrun` started, or this one alone; and the device of this one."""
    joined = distributed.is_available() and distributed.is_initialized()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not joined:
        return Processes(), device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not joined:
        import_module("torch.distributed.nn")  # imported later, its default arguments keep the group to the end
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave_processes)  # not sooner: a group can be joined only once
    return Processes(distributed.get_rank(), distributed.get_world_size()), device


def _leave_processes() -> None:
    """Destroy the group and end its threads: one that frees a tensor while the interpreter ends aborts the process."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    for name in ("last_exc", "last_value", "last_traceback"):
        setattr(sys, name, None)  # the frames of a training that raised keep the group
    gc.collect()  # the threads end with the last reference to the group


class ShardedLoader:
    """A loader of which each process gets its shard of every batch.

    A batch of the loader is the batch of all processes together: each takes every n-th sample of it. A loader with a
    DistributedSampler is used unchanged.
    """

    def __init__(self, loader: Iterable[Any], processes: Processes) -> None:
        self._original = self._loader = loader
        self._processes, self._sizes = processes, deque[int]()  # sizes of whole batches that were not weighed yet
        if processes.count > 1 and not isinstance(getattr(loader, "sampler", None), DistributedSampler):
            self._loader = _sharded(loader, processes, self._sizes)

    def __iter__(self) -> Iterator[Any]:
        self._sizes.clear()
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def begin_epoch(self, epoch: int, seed: int) -> None:
        """Make the order of the samples a function of the seed and the epoch."""
        samplers = (getattr(self._original, name, None) for name in ("sampler", "batch_sampler"))
        for owner in (self._original, *samplers):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed)

    def next_weight(self, samples: int) -> tuple[float, int]:
        """Return the factor of this process's mean loss that makes the average over processes that of the batch.

        Return also the samples of the whole batch; `samples` are those that this process got.
        """
        if not self._sizes:
            return 1.0, samples
        whole, count = self._sizes.popleft(), self._processes.count
        return len(range(self._processes.rank, whole, count)) * count / whole, whole


class _ShardSampler(Sampler[list[int]]):
    """One process's shard of every batch; one that would be empty gets the first sample, with weight 0."""

    def __init__(self, batch_sampler: Any, processes: Processes, sizes: deque[int]) -> None:
        self._batch_sampler, self._processes, self._sizes = batch_sampler, processes, sizes

    def __iter__(self) -> Iterator[list[int]]:
        rank, count = self._processes.rank, self._processes.count
        batches = [list(batch) for batch in self._batch_sampler]  # the same in every process: all have the same seed
        if rank:
            torch.manual_seed(torch.initial_seed() + rank)  # from here on dropout differs
        for batch in batches:
            self._sizes.append(len(batch))
            yield batch[rank::count] or batch[:1]

    def __len__(self) -> int:
        return len(self._batch_sampler)


def _sharded(loader: Iterable[Any], processes: Processes, sizes: deque[int]) -> DataLoader[Any]:
    """Return a loader with the same workers and collation for the shards of one process."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or batch_sampler is None:
        raise BadInput(
            f"a {type(loader).__name__} cannot be divided among processes: give a DataLoader over a data set with"
            " indices and a batch size (of all processes together), or one with a DistributedSampler"
        )
    return DataLoader(
        loader.dataset,
        batch_sampler=_ShardSampler(batch_sampler, processes, sizes),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        persistent_workers=loader.persistent_workers,
    )
