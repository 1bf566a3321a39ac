import pytest
import torch

from alight.costing.measure import head_overhead, measure_costs
from alight.errors import BadInput
from alight.networks.architectures import ConvNeXt, DropPath, ResNet
from alight.networks.attach import attach_heads
from alight.networks.store import load_model, save_model
from alight.networks.zoo import DIGITS, ZOO, convnext_cifar, convnext_tiny, resnet18_cifar, resnet_digits


@pytest.mark.parametrize(("name", "exits"), [("resnet18_cifar", 8), ("convnext_cifar", 12), ("msdnet_cifar", 7)])
def test_every_network_for_small_images_has_its_exits(name, exits):
    model = ZOO[name](10).eval()
    with torch.no_grad():
        logits = model(torch.zeros(1, 3, 32, 32))
    assert [tuple(each.shape) for each in logits] == [(1, 10)] * exits
    assert model.num_classes == 10
    assert model.recipe["name"] == name


def test_a_trained_backbone_is_kept_unchanged():
    torch.manual_seed(0)
    backbone = ResNet(10).eval()
    model = resnet18_cifar(10, backbone=backbone, head="pooled_linear").eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images)[-1], backbone(images))


def test_resnet_18_takes_torchvisions_weights_behind_its_stem():
    from torchvision.models import resnet18

    theirs = resnet18(num_classes=100).state_dict()
    ours = ResNet(100).state_dict()
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name].shape != theirs[name].shape] == ["conv1.weight"]


def test_a_resnet_with_one_block_per_layer_is_the_smaller_half_of_a_resnet_18():
    small, large = ResNet(10, blocks=(1, 1, 1, 1)), ResNet(10)
    assert small(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    left = [name for name in large.state_dict() if name not in small.state_dict()]
    assert {name.split(".")[1] for name in left} == {"1"}  # of every layer, the second block
    with pytest.raises(BadInput, match=r"blocks \(2, 2\) are not one number per layer.*as many as widths, 4"):
        ResNet(10, blocks=(2, 2))


def test_a_resnet_for_digits_is_saved_and_loaded(tmp_path):
    model = resnet_digits().eval()
    images = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(load_model(save_model(model, tmp_path))(images)[-1], model(images)[-1])
    shares = measure_costs(model, images).shares()
    assert shares.tolist() == pytest.approx([1 / 7, 2 / 5, 3 / 5, 1], abs=0.02)
    assert model.normalisation == DIGITS


def test_convnext_is_timms_with_timms_weights():
    import timm

    torch.manual_seed(0)
    theirs = timm.create_model("convnext_atto", num_classes=7, conv_mlp=False).eval()
    ours = ConvNeXt((2, 2, 6, 2), (40, 80, 160, 320), 7).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)


def test_convnext_tiny_has_an_exit_after_each_of_its_18_blocks():
    with torch.device("meta"):
        network = ConvNeXt((3, 3, 9, 3), (96, 192, 384, 768), 1000)
    assert len(network.blocks) == 18
    assert sum(parameter.numel() for parameter in network.parameters()) == 28_589_128  # as timm's and torchvision's


@pytest.mark.slow
def test_the_whole_convnext_tiny_is_built():
    model = convnext_tiny(10).eval()
    assert model.num_exits == 18
    with torch.no_grad():
        assert [len(each) for each in model(torch.zeros(1, 3, 224, 224))] == [1] * 18


def test_pooled_heads_cost_below_one_percent_and_flattening_heads_do_not():
    example = torch.zeros(1, 3, 32, 32)
    backbone = convnext_cifar(100, head="pooled_linear")
    assert head_overhead(measure_costs(backbone, example)) < 0.01
    flat = attach_heads(ResNet(100), ["layer1.0"], example=example, head="flatten_linear")
    assert measure_costs(flat, example).heads[0] == 2 * 64 * 32 * 32 * 100


def test_bad_settings_are_refused():
    with pytest.raises(BadInput, match="2 depths and 1 widths"):
        ConvNeXt((1, 1), (8,), 10)


def test_blocks_are_dropped_only_in_training_and_the_mean_stays():
    dropping, features = DropPath(0.25), torch.ones(4000, 2, 3)
    torch.manual_seed(0)
    left = dropping(features)
    assert left.unique().tolist() == pytest.approx([0, 4 / 3])
    assert left.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(left, left[:, :1, :1].expand_as(left))  # a sample as a whole
    assert torch.equal(dropping.eval()(features), features)
    network = ConvNeXt((1, 2), (8, 16), 10, drop_path=0.2)
    assert [part.probability for part in network.modules() if isinstance(part, DropPath)] == [0, 0.1, 0.2]
    with pytest.raises(BadInput, match="drop_path 1 is out of bounds"):
        ConvNeXt((1, 2), (8, 16), 10, drop_path=1.0)


def test_exits_keep_stochastic_depth():
    backbone = ConvNeXt((1, 1, 2, 1), (4, 8, 8, 16), 10, patch=1, scale=1.0, drop_path=0.9)
    model = convnext_cifar(10, backbone=backbone)
    images = torch.randn(8, 3, 32, 32)
    torch.manual_seed(0)
    one, other = (model.train()(images)[-1] for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.equal(model.eval()(images)[-1], backbone.eval()(images))
