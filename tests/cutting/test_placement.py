"""Exits are suggested at even shares of the cost, at block ends where the network can be cut."""

from itertools import pairwise

import pytest
import timm
import torch
import torchvision
from torch import nn

from alight.cutting.cut import cut
from alight.cutting.placement import CutPlace, cut_evenly, cut_places, suggest_exits
from alight.cutting.running import Inputs
from alight.errors import BadInput

IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_exits_on_equal_blocks_are_evenly_spaced():
    network = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12)), nn.Linear(8, 1))
    assert suggest_exits(network, torch.zeros(1, 8), count=3) == ["2", "5", "8"]
    assert suggest_exits(network, torch.zeros(1, 8), count=2) == ["3", "7"]


def test_an_exit_counts_its_head_so_that_expensive_heads_move_exits_forward():
    network = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12)))
    image, block = torch.zeros(1, 8), 2 * 8 * 8
    assert cut_evenly(network, image, 3, head_flops=lambda shape, classes: 0)[0] == ["2", "5", "8"]
    assert cut_evenly(network, image, 3, head_flops=lambda shape, classes: block)[0] == ["1", "4", "7"]
    assert cut_evenly(network, image, 1, head_flops=lambda shape, classes: 9 * block)[0] == ["0"]
    with pytest.raises(BadInput, match="0 places found to cut a Sequential and 1 asked for"):
        cut_evenly(network, image, 1, head_flops=lambda shape, classes: 12 * block)


def test_expensive_blocks_weigh_more():
    sizes = [(8, 64), (64, 64), (64, 8), (8, 8), (8, 8), (8, 8)]
    blocks = [nn.Sequential(nn.Linear(*size), nn.ReLU()) for size in sizes]
    assert suggest_exits(nn.Sequential(*blocks, nn.Linear(8, 1)), torch.zeros(1, 8), count=1) == ["1"]


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (lambda: torchvision.models.resnet18(), ["layer1.0", "layer2", "layer3"]),
        pytest.param(
            lambda: torchvision.models.convnext_tiny(),
            ["features.3.0", "features.5.2", "features.5.7"],
            marks=pytest.mark.slow,
        ),
        (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32), ["blocks.2", "blocks.5", "blocks.8"]),
    ],
)
def test_suggestions_are_block_ends(network, expected):
    assert suggest_exits(network(), IMAGE, count=3) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "efficientnet_b0", "vgg11"])
def test_wherever_an_exit_is_suggested_the_network_can_be_cut(name):
    network = torchvision.models.get_model(name, num_classes=3).eval()
    names = suggest_exits(network, IMAGE, count=5)
    assert len(cut(network, names, IMAGE)) == 6


@pytest.mark.slow
def test_exits_keep_a_minimum_distance_where_they_can():
    network = timm.create_model("mobilevit_xxs", num_classes=3)
    image = torch.randn(1, 3, 64, 64)
    shares = {place.name: place.share for place in cut_places(network, Inputs(image), 3)[0]}
    chosen = [shares[name] for name in suggest_exits(network, image, count=3)]
    assert all(later - earlier >= 0.25 / 3 for earlier, later in pairwise(chosen))


def test_places_too_near_to_each_other_are_still_used_where_there_are_no_others():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    network = nn.Sequential(*blocks, nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 3)))
    assert suggest_exits(network, torch.zeros(1, 4), count=3) == ["0", "1", "2"]


def test_shares_grow_and_end_before_the_network_does():
    found, _ = cut_places(torchvision.models.resnet18(), Inputs(IMAGE), 3)
    shares = [place.share for place in found]
    assert shares == sorted(set(shares))
    assert shares[0] > 0
    assert shares[-1] < 1
    assert all(place.alive == 1 for place in found if isinstance(place, CutPlace))


def test_attention_is_counted():
    network = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=12)
    first, *_ = [
        place for place in cut_places(network, Inputs(torch.zeros(1, 3, 64, 64)), 1)[0] if place.name == "blocks.0"
    ]
    tokens, width = 17, 12
    linear = 2 * tokens * (3 + 1 + 4 + 4) * width * width
    block = linear + 2 * 2 * tokens * tokens * width  # queries by keys, and weights by values
    patches = 2 * 16 * 3 * 16 * 16 * width
    assert first.share == pytest.approx((patches + block) / (patches + 2 * block + 2 * width * 1000), rel=1e-6)


def test_suggesting_exits_leaves_the_network_unchanged():
    network = torchvision.models.resnet18(num_classes=3).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    suggest_exits(network, IMAGE, count=2)
    assert network.training
    assert all(weight.requires_grad for weight in network.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(module._forward_hooks for module in network.modules())


class ReadsContent(nn.Module):
    """Blocks between which the content of the input decides."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.sum() > 100:
                x = -x
        return x


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_uncuttable_network_is_refused_with_the_line_and_the_remedy(wrapped):
    network = nn.Sequential(ReadsContent()) if wrapped else ReadsContent()
    with pytest.raises(
        BadInput, match=r"content of a tensor .*test_placement\.py:\d+ in forward: if x\.sum.*register_cutter"
    ):
        suggest_exits(network, torch.zeros(1, 4), count=2)


def test_too_many_or_no_exits_are_refused():
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(BadInput, match="1 place found to cut a Sequential and 9 asked for: ask for fewer"):
        suggest_exits(network, torch.zeros(1, 4), count=9)
    with pytest.raises(BadInput, match="0 exits: ask for at least one"):
        suggest_exits(network, torch.zeros(1, 4), count=0)


def conv_bn_relu(channels, width, **further):
    return [nn.Conv2d(channels, width, 3, padding=1, **further), nn.BatchNorm2d(width), nn.ReLU()]


def own_cnn():
    """A network as people write them: one row of layers, and a classifier."""
    layers = [*conv_bn_relu(3, 16), nn.MaxPool2d(2), *conv_bn_relu(16, 32), nn.MaxPool2d(2), *conv_bn_relu(32, 64)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class OwnNet(nn.Module):
    """Layers as attributes, an activation that is called twice, and one that is a function."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv3, self.conv4 = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.relu, self.fc = nn.ReLU(), nn.Linear(16, 10)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = nn.functional.relu(self.conv3(x))
        return self.fc(self.conv4(x).mean((2, 3)))


def test_in_a_row_of_layers_exits_stand_after_norm_activation_and_pooling():
    network = own_cnn()
    names = cut_evenly(network, IMAGE, 3, allow_fewer=True, allow_crowded=False)[0]
    assert names == ["3", "7"]
    assert all(isinstance(network.get_submodule(name), nn.MaxPool2d) for name in names)


def test_a_bare_convolution_is_never_followed_by_its_norm():
    assert suggest_exits(OwnNet(), IMAGE, count=3) == ["bn1", "bn2", "conv3"]  # conv3 has no norm that could follow
    stem = nn.Sequential(*conv_bn_relu(3, 8), nn.Conv2d(8, 8, 3))  # a block that ends with a convolution
    network = nn.Sequential(stem, nn.BatchNorm2d(8), nn.ReLU(), nn.Sequential(*conv_bn_relu(8, 9)), nn.Flatten())
    names = {place.name for place in cut_places(nn.Sequential(network, nn.LazyLinear(9)), Inputs(IMAGE), 3)[0]}
    assert "0.0" not in names
    assert "0.2" in names


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("timm:test_resnet", ["layer1", "layer2"]),  # conv1, bn1 and maxpool, 46 % of the FLOPs, are its stem
        ("timm:test_convnext", ["stages.0", "stages.1.blocks.0", "stages.1", "stages.2.blocks.0"]),  # not stem
        ("timm:test_efficientnet", ["blocks.0", "blocks.1"]),  # not conv_stem, nor blocks.1.0.se inside a block
        ("timm:test_vit", ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4"]),  # not patch_embed
        ("timm:test_mambaout", ["stages.0", "stages.1", "stages.2.blocks.0", "stages.2.blocks.1"]),
        ("timm:test_byobnet", ["stages.0", "stages.1"]),
        ("torchvision:mobilenet_v2", ["features.1", "features.2", "features.3"]),  # not features.0
    ],
)
def test_the_stem_before_the_blocks_and_what_stands_between_them_are_not_places(name, places):
    library, name = name.split(":")
    make = timm.create_model if library == "timm" else torchvision.models.get_model
    network, size = make(name, num_classes=10).eval(), 160 if name == "test_vit" else 64
    found = [place.name for place in cut_places(network, Inputs(torch.zeros(1, 3, size, size)), 99)[0]]
    assert found[: len(places)] == places
    assert len(found) <= len(places) or name in ("test_convnext", "mobilenet_v2")


def test_a_dense_network_has_exits_in_its_blocks_not_at_pools_and_transitions():
    network = torchvision.models.DenseNet(32, (2, 2, 2, 2), 8, num_classes=10).eval()
    places = {place.name for place in cut_places(network, Inputs(IMAGE), 99)[0]}
    assert {"features.denseblock1.denselayer1", "features.denseblock1", "features.denseblock2.denselayer1"} == places


def test_layers_after_the_last_block_are_places_where_blocks_are_too_few():
    blocks = [torchvision.models.resnet.BasicBlock(8, 8) for _ in range(2)]
    tail = nn.Sequential(*conv_bn_relu(8, 32), *conv_bn_relu(32, 32), *conv_bn_relu(32, 32))
    network = nn.Sequential(nn.Sequential(*conv_bn_relu(3, 8)), *blocks, tail, nn.Flatten(), nn.Linear(32 * 1024, 10))
    assert [place.name for place in cut_places(network, Inputs(IMAGE), 3)[0]] == ["1", "2", "3.2", "3.5"]


class ConvNormRelu(nn.Module):
    """A block of one convolution, whose activation is not a module."""

    def __init__(self, channels, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, images):
        return self.norm(self.conv(images)).relu()


def test_small_blocks_end_after_their_activation_even_where_that_is_a_function():
    blocks = nn.Sequential(*(ConvNormRelu(*pair) for pair in pairwise([3, 8, 8, 8, 8, 8])))
    network = nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    assert suggest_exits(network, IMAGE, count=2) == ["0.1", "0.3"]  # and not 0.1.norm


def test_layers_inside_residual_blocks_are_never_places():
    network = torchvision.models.resnet18(num_classes=10)
    places = {place.name for place in cut_places(network, Inputs(IMAGE), 99)[0]}
    assert {"layer1.0", "layer2", "layer3"} <= places
    assert not [name for name in places if ".conv" in name or ".bn" in name or "downsample" in name]
    with pytest.raises(BadInput, match="places found to cut a ResNet and 99 asked for: ask for fewer"):
        suggest_exits(network, IMAGE, count=99)


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit", "test_efficientnet", "test_byobnet"])
def test_with_fewer_allowed_there_are_as_many_exits_as_pay_at_block_ends(name):
    size = 160 if name == "test_vit" else 64
    network = timm.create_model(name, num_classes=10).eval()
    names, stages = cut_evenly(network, torch.zeros(2, 3, size, size), 3, allow_fewer=True, allow_crowded=False)
    assert 1 <= len(names) <= 3
    assert len(stages) == len(names) + 1
    shares = {each.name: each for each in cut_places(network, Inputs(torch.zeros(2, 3, size, size)), 3)[0]}
    assert all(shares[each].cost < 0.9 for each in names)


@pytest.mark.parametrize(("count", "crowded"), [(3, False), (2, True), (1, True)])
def test_the_only_place_is_taken_though_it_stands_early(count, crowded):
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10)).eval()
    names, _ = cut_evenly(network, torch.zeros(2, 3, 32, 32), count, allow_fewer=True, allow_crowded=crowded)
    assert names == ["1"]


def test_fewer_exits_are_placed_where_one_would_stand_at_the_start_or_save_next_to_nothing():
    class Narrow(nn.Module):  # its first layer has 1 % of the FLOPs, its last but one ends at 99.9 %
        def __init__(self):
            super().__init__()
            widths = [1, 16, 32, 64, 64]
            pairs = [*pairwise(widths)]
            self.convs = nn.ModuleList([nn.Conv2d(*pair, 3, padding=1) for pair in pairs])
            self.norms, self.last = nn.ModuleList([nn.BatchNorm2d(width) for _, width in pairs]), nn.Linear(64, 10)

        def forward(self, x):
            for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
                x = torch.relu(norm(conv(x)))
                x = nn.functional.max_pool2d(x, 2) if index == 1 else x
            return self.last(x.mean((2, 3)))

    names = cut_evenly(Narrow().eval(), torch.zeros(2, 1, 8, 8), 3, allow_fewer=True, allow_crowded=False)[0]
    assert names == ["norms.1", "norms.2"]
