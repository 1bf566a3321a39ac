"""Run modules in one mode for a while, and leave no trace of it."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_mode(*modules: nn.Module, training: bool) -> Iterator[None]:
    """Run modules in training or evaluation mode without gradients; restore modes, statistics and random state after.

    >>> network = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    >>> with in_mode(network, training=False):
    ...     network.training, torch.is_grad_enabled()
    (False, False)
    >>> network.training
    True
    """
    everything = nn.ModuleList(modules)
    modes = [(module, module.training) for module in everything.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in everything.buffers()] if training else []
    devices = {tensor.device for tensor in itertools.chain(everything.parameters(), everything.buffers())}
    with torch.no_grad(), torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        everything.train(training)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, old in buffers:
                buffer.copy_(old)
