"""Several processes that train one network: what `torchrun` started, and which part of each batch is whose."""

import atexit
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from alight.errors import BadInput


@dataclass(frozen=True)
class Processes:
    """This process among those that train together; alone it is 0 of 1."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one prints and saves."""
        return self.rank == 0

    def join(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over all processes."""
        if self.count == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        return DistributedDataParallel(module, static_graph=True)  # some weights may be unused, but always the same

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def wait(self) -> None:
        """Return once every process has come here."""
        if self.count > 1:
            distributed.barrier()

    def share(self, loader: Iterable[Any]) -> "ShardedLoader":
        """This process's part of every batch of a loader."""
        return ShardedLoader(loader, self)


def processes(device: torch.device) -> tuple[Processes, torch.device]:
    """The processes that `torchrun` started, or this one alone; and this one's device."""
    joined = distributed.is_available() and distributed.is_initialized()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not joined:
        return Processes(), device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not joined:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(distributed.destroy_process_group)  # not sooner: a group can be joined only once
    return Processes(distributed.get_rank(), distributed.get_world_size()), device


class ShardedLoader:
    """A loader's batches, of each the part that is this process's, with the size of the whole batch.

    A batch of the loader is the batch of all processes together: each takes every n-th sample of it. A loader with a
    DistributedSampler is taken as it stands.
    """

    def __init__(self, loader: Iterable[Any], own: Processes) -> None:
        self._given = self._loader = loader
        self._own, self._sizes = own, deque[int]()  # sizes of whole batches that are under way
        if own.count > 1 and not isinstance(getattr(loader, "sampler", None), DistributedSampler):
            self._loader = _parted(loader, own, self._sizes)

    def __iter__(self) -> Iterator[Any]:
        self._sizes.clear()
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def begin(self, epoch: int, seed: int) -> None:
        """Make the order of the samples a function of the seed and the epoch."""
        samplers = (getattr(self._given, name, None) for name in ("sampler", "batch_sampler"))
        for owner in (self._given, *samplers):
            if callable(tell := getattr(owner, "set_epoch", None)):
                tell(epoch)
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed)

    def weight(self) -> float:
        """By how much to multiply this process's mean loss, so that the average over processes is the batch's."""
        if not self._sizes:
            return 1.0
        whole = self._sizes.popleft()
        return len(range(self._own.rank, whole, self._own.count)) * self._own.count / whole


class _Parts(Sampler[list[int]]):
    """Every batch's part for one process; a batch too small for all lends its first sample, which then counts 0."""

    def __init__(self, whole: Any, own: Processes, sizes: deque[int]) -> None:
        self._whole, self._own, self._sizes = whole, own, sizes

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(batch) for batch in self._whole]  # the same in every process: all have the same seed
        if self._own.rank:
            torch.manual_seed(torch.initial_seed() + self._own.rank)  # from here on dropout differs
        for batch in batches:
            self._sizes.append(len(batch))
            yield batch[self._own.rank :: self._own.count] or batch[:1]

    def __len__(self) -> int:
        return len(self._whole)


def _parted(loader: Iterable[Any], own: Processes, sizes: deque[int]) -> DataLoader[Any]:
    """The loader with its workers and its collation, but for the part of each batch that is this process's."""
    whole = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or whole is None:
        raise BadInput(
            f"a {type(loader).__name__} cannot be parted among processes: give a DataLoader over a data set with"
            " indices and a batch size (of all processes together), or one with a DistributedSampler"
        )
    return DataLoader(
        loader.dataset,
        batch_sampler=_Parts(whole, own, sizes),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        persistent_workers=loader.persistent_workers,
    )
