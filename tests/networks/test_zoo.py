import pytest
import timm
import torch

from alight.costing.measure import head_overhead, measure_costs
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.store import load_model, save_model
from alight.networks.zoo import DIGITS, ZOO, ResNet, resnet18_cifar, resnet_digits


@pytest.mark.parametrize(("name", "exits"), [("resnet18_cifar", 8), ("msdnet_cifar", 7)])
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


def test_pooled_heads_cost_below_one_percent_and_flattening_heads_do_not():
    example = torch.zeros(1, 3, 32, 32)
    pooled = resnet18_cifar(100, head="pooled_linear")
    assert head_overhead(measure_costs(pooled, example)) < 0.01
    flat = attach_heads(ResNet(100), ["layer1.0"], example=example, head="flatten_linear")
    assert measure_costs(flat, example).heads[0] == 2 * 64 * 32 * 32 * 100


def test_exits_keep_stochastic_depth():
    sizes = {"depths": (1, 1, 2, 1), "dims": (4, 8, 8, 16), "patch_size": 1, "ls_init_value": 1.0}
    backbone = timm.models.ConvNeXt(num_classes=10, drop_path_rate=0.9, **sizes)
    images = torch.randn(8, 3, 32, 32)
    model = attach_heads(backbone, ["stages.0", "stages.1"], example=images)
    torch.manual_seed(0)
    one, other = (model.train()(images)[-1] for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.equal(model.eval()(images)[-1], backbone.eval()(images))
