"""The chain of stages is the network: networks of many kinds, cut at three places."""

import json

import pytest
import timm
import torch
import torchvision
from torch.nn import functional

from alight.cutting.placement import cut_evenly
from alight.cutting.stages import cut_data, stages_from_data

vision = torchvision.models


def small(name, size, **settings):
    return lambda: timm.create_model(name, num_classes=7, **settings), size


NETWORKS = {  # how to make each, and the side of its images
    "resnet18": (lambda: vision.resnet18(num_classes=7), 64),
    "densenet": (lambda: vision.DenseNet(8, (2, 2, 2), 16, num_classes=7), 32),
    "mobilenet_v2": (lambda: vision.mobilenet_v2(num_classes=7), 32),
    "mobilenet_v3": (lambda: vision.mobilenet_v3_small(num_classes=7), 32),
    "shufflenet": (lambda: vision.shufflenet_v2_x0_5(num_classes=7), 32),
    "squeezenet": (lambda: vision.squeezenet1_1(num_classes=7), 64),
    "mnasnet": (lambda: vision.mnasnet0_5(num_classes=7), 32),
    "efficientnet": (lambda: vision.efficientnet_b0(num_classes=7), 32),
    "googlenet": (lambda: vision.googlenet(num_classes=7, init_weights=False), 64),
    "vision transformer": (lambda: vision.VisionTransformer(32, 8, 4, 2, 16, 32, num_classes=7), 32),
    "swin": (lambda: vision.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=7), 32),
    "maxvit": (lambda: vision.MaxVit((32, 32), 16, 4, [16, 32], [2, 2], 8, 0.2, num_classes=7), 32),
    "resnet10t": small("resnet10t", 32),
    "convnext": small("convnext_atto", 32),
    "vit": small("vit_tiny_patch16_224", 64, img_size=64, depth=4, embed_dim=48),
    "deit distilled": small("deit_tiny_distilled_patch16_224", 64, img_size=64, depth=4, embed_dim=48),
    "vit relative": small("vit_relpos_small_patch16_224", 64, img_size=64, depth=4, embed_dim=48, num_heads=2),
    "beit": small("beit_base_patch16_224", 64, img_size=64, depth=4, embed_dim=48, num_heads=2),
    "eva": small("eva02_tiny_patch14_224", 56, img_size=56, depth=4),
    "cait": small("cait_xxs24_224", 64, img_size=64, depth=4, embed_dim=48, num_heads=2),
    "swin v2": small(
        "swinv2_cr_tiny_ns_224", 64, img_size=64, depths=(1, 1, 2, 1), embed_dim=24, num_heads=(1, 2, 2, 2)
    ),
    "davit": small("davit_tiny", 64, depths=(1, 1, 2, 1), embed_dims=(24, 48, 96, 192), num_heads=(1, 2, 2, 2)),
    "edgenext": small("edgenext_xx_small", 64),
    "xcit": small("xcit_nano_12_p16_224", 64, img_size=64, depth=4),
    "twins": small("twins_svt_small", 64, img_size=64, depths=(1, 1, 2, 1)),
    "coat": small("coat_lite_tiny", 64, img_size=64),
    "mobilevit": small("mobilevit_xxs", 64),
    "ghostnet": small("ghostnet_050", 64),
    "lcnet": small("lcnet_050", 64),
    "dla": small("dla46_c", 64),
    "tnt": small("tnt_s_legacy_patch16_224", 64, img_size=64, depth=4),
    "convit": small("convit_tiny", 64, img_size=64),
    "poolformer": small("poolformer_s12", 64),
}


QUICK = ("mobilenet_v3", "swin", "resnet10t", "convnext", "vit", "deit distilled")  # one of each kind of cut


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in NETWORKS],
)
def network_and_stages(request):
    """A network, its stages when cut at three places, and five images."""
    torch.manual_seed(0)
    create, side = NETWORKS[request.param]
    network = create().eval()
    images = torch.randn(5, 3, side, side)
    names, stages = cut_evenly(network, images[:1], count=3)
    assert len(names) == 3
    return network, stages, images


def chained(stages, *batch):
    for stage in stages:
        batch = stage(*batch)
    return batch


def test_the_chain_is_the_network_bit_by_bit_for_any_batch_size(network_and_stages):
    network, stages, images = network_and_stages
    with torch.no_grad():
        for batch in (images[:1], images):
            assert torch.equal(chained(stages, batch), network(batch))


def test_gradients_through_the_chain_are_those_of_the_network(network_and_stages):
    network, stages, images = network_and_stages
    found, expected = (gradients(network, run(images)) for run in (lambda x: chained(stages, x), network))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def gradients(network, logits):
    network.zero_grad()
    functional.cross_entropy(logits, torch.arange(5)).backward()
    return {name: weight.grad.clone() for name, weight in network.named_parameters() if weight.grad is not None}


def test_samples_can_leave_after_every_stage(network_and_stages):
    network, stages, images = network_and_stages
    staying, carried = torch.arange(5), (images,)
    with torch.no_grad():
        for stage, kept in zip(stages[:-1], ([4, 0, 2, 1], [2, 0, 1], [1, 2]), strict=True):
            carried = stage(*carried)
            assert all(len(tensor) == len(staying) for tensor in carried)
            staying, carried = staying[kept], tuple(tensor[kept] for tensor in carried)
        torch.testing.assert_close(stages[-1](*carried), network(images[staying]), rtol=1e-4, atol=1e-5)


def test_stages_hold_the_networks_own_parameters_and_buffers_under_their_names(network_and_stages):
    network, stages, _ = network_and_stages
    theirs = dict(network.state_dict(keep_vars=True))
    for stage in stages:
        for name, tensor in stage.state_dict(keep_vars=True).items():
            assert tensor is theirs[name]


def test_stages_built_from_data_run_the_same_code_on_the_same_weights(network_and_stages):
    network, stages, images = network_and_stages
    data, constants = cut_data(stages)
    rebuilt = stages_from_data(network, json.loads(json.dumps(data)), constants)
    assert [stage._source for stage in rebuilt] == [stage._source for stage in stages]
    assert [list(stage.state_dict()) for stage in rebuilt] == [list(stage.state_dict()) for stage in stages]
    with torch.no_grad():
        assert torch.equal(chained([stage.eval() for stage in rebuilt], images), network(images))
