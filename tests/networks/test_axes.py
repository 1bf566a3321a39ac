"""Heads average over positions in space or time and read channels, wherever these are."""

import pytest
import torch
import torchvision
from torch import nn

from alight.engine.recorder import record
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.heads import PooledLinear, TokenHead
from alight.training.settings import TrainingSettings
from alight.training.training import train_heads


def block(kind, inputs, outputs, stride=2):
    return nn.Sequential(kind(inputs, outputs, 5, stride, 2), nn.ReLU())


def sound_network(classes=3, pooled=True):
    torch.manual_seed(0)
    end = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, classes))
    blocks = [block(nn.Conv1d, 1, 8), block(nn.Conv1d, 8, 16)]
    return nn.Sequential(*blocks, end if pooled else nn.Sequential(nn.Flatten(), nn.Linear(16 * 32, classes)))


def sounds(count, length=128):
    """Tones of three heights that begin anywhere, so that no moment says which it is."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.arange(count) % 3
    times = torch.arange(length) + 100 * torch.rand(count, 1, generator=generator)
    noise = torch.randn(count, length, generator=generator) / 4
    return (torch.sin(times * (0.2 + 0.4 * labels[:, None])) + noise)[:, None], labels


def test_exits_on_sounds_learn_because_they_read_channels():
    model = attach_heads(sound_network(), ["0", "1"], example=sounds(2)[0])
    assert [type(head) for head in model.heads[:2]] == [PooledLinear, PooledLinear]
    settings = TrainingSettings(mode="joint", epochs=6, learning_rate=1e-2, seed=0)
    train_heads(model, sounds(600), settings, batch_size=30, progress=False)
    assert record(model, sounds(300), progress=False).risks()[:2].max() < 0.1


class Spectrum(nn.Module):
    """Features (batch, time, channels) of a recurrent layer on (batch, time, channels)."""

    def __init__(self):
        super().__init__()
        self.gru, self.end = nn.GRU(5, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x):
        return self.end(self.gru(x)[0].mean(1))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.end = nn.Linear(5, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.end(self.one(x.transpose(0, 1)).relu().mean(0))


class Patches(nn.Module):
    """Tokens with learnt positions, so that images have one size."""

    def __init__(self, width=12):
        super().__init__()
        self.patches, self.end = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 5)
        self.positions = nn.Parameter(torch.zeros(1, 16, width))
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        return self.end(self.block(self.patches(x).flatten(2).transpose(1, 2) + self.positions).mean(1))


class Rows(nn.Module):
    """Images as (batch, height, width, channels) after the first layer."""

    def __init__(self):
        super().__init__()
        self.patches, self.block, self.end = nn.Conv2d(3, 12, 4, 4), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, pixels):
        return self.end(self.block(self.patches(pixels).permute(0, 2, 3, 1)).mean((1, 2)))


def swin():
    return torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=5)


CASES = {  # a network, an exit, an example, whether the channels are last, and how many there are
    "sound": (sound_network, "1", torch.randn(2, 1, 128), False, 16),
    "sound of one length": (lambda: sound_network(pooled=False), "1", torch.randn(2, 1, 128), False, 16),
    "as many moments as channels": (sound_network, "1", torch.randn(2, 1, 64), False, 16),
    "point cloud": (
        lambda: nn.Sequential(nn.Conv1d(3, 16, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, 5)),
        "1",
        torch.randn(2, 3, 100),
        False,
        16,
    ),
    "volume": (
        lambda: nn.Sequential(block(nn.Conv3d, 1, 8), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 5)),
        "0",
        torch.randn(2, 1, 8, 12, 16),
        False,
        8,
    ),
    "wide image by name": (
        lambda: nn.Sequential(block(nn.Conv2d, 3, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        "0",
        {"input": torch.randn(2, 3, 32, 128)},
        False,
        8,
    ),
    "rows by name": (Rows, "block", {"pixels": torch.randn(2, 3, 32, 128)}, True, 12),
    "swin whose channels are as many as rows and columns": (swin, "features.1", torch.randn(2, 3, 64, 64), True, 16),
    "recurrent": (Spectrum, "gru", torch.randn(2, 20, 5), True, 12),
    "time before batch": (TimeFirst, "one", torch.randn(2, 20, 5), True, 12),
    "tokens of one image size": (Patches, "block", torch.randn(2, 3, 16, 16), True, 12),
    "as many tokens as channels": (lambda: Patches(16), "block", torch.randn(2, 3, 16, 16), True, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_the_default_head_reads_channels(case):
    network, exit_name, example, last, channels = CASES[case]
    torch.manual_seed(0)
    model = attach_heads(network(), [exit_name], example=example).eval()
    head = model.heads[0]
    assert head.linear.in_features == channels
    if not isinstance(head, TokenHead):
        assert head.channels_last == last
    carried = model.carried_past_exits(example)[0]
    positions = [axis for axis in range(1, carried[0].ndim) if axis != (carried[0].ndim - 1 if last else 1)]
    torch.testing.assert_close(head(carried[0].flip(positions)), head(carried[0]))  # an average has no order


class Opaque(nn.Module):
    """Features of which neither another size nor a layer says what the axes are."""

    def __init__(self):
        super().__init__()
        self.one, self.end = nn.Module(), nn.Module()
        self.mix, self.end = Mix(24, (6, 8)), Mix(48, (5,))

    def forward(self, x):
        return self.end(self.mix(x))


class Mix(nn.Module):
    def __init__(self, inputs, shape):
        super().__init__()
        self.weight, self.shape = nn.Parameter(torch.randn(inputs, torch.Size(shape).numel())), shape

    def forward(self, x):
        return (x.reshape(len(x), -1) @ self.weight).reshape(len(x), *self.shape)


def test_axes_that_nothing_tells_apart_are_asked_for():
    example = torch.randn(2, 3, 8)
    with pytest.raises(BadInput, match=r"\(6, 8\) after 'mix' is the channels: give attach_heads channels='first'"):
        attach_heads(Opaque(), ["mix"], example=example)
    first = attach_heads(Opaque(), ["mix"], example=example, channels="first").heads[0]
    assert (type(first), first.linear.in_features) == (PooledLinear, 6)
    last = attach_heads(Opaque(), ["mix"], example=example, channels="last").heads[0]
    assert (type(last), last.linear.in_features) == (TokenHead, 8)
    assert attach_heads(Opaque(), ["mix"], example=example, head="flatten_linear").heads[0].linear.in_features == 48
    with pytest.raises(BadInput, match="channels='middle': say 'first'"):
        attach_heads(Opaque(), ["mix"], example=example, channels="middle")


def test_a_token_head_is_refused_on_channels_and_positions():
    with pytest.raises(BadInput, match=r"\(16, 32\) are \(channels, positions\), not tokens: use head='pooled_linear'"):
        attach_heads(sound_network(), ["1"], example=torch.randn(2, 1, 128), head="token")
