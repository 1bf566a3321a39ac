import numpy as np
import pytest
import torch

from alight.costing.measure import measure_costs
from alight.errors import BadInput
from alight.networks.store import load_model, save_model
from alight.networks.zoo import msdnet_cifar, msdnet_imagenet

# Cumulative million multiply-adds, heads included, and million weights, of the authors' released code: counted on it,
# or for steps of 6 and growing blocks computed by hand from the channels and scales that it gives every layer.
REFERENCE = {
    "imagenet, steps of 7": (
        lambda: msdnet_imagenet(step=7),
        224,
        [612.0, 1430.8, 2276.4, 2959.9, 3246.2],
        62.31,
    ),
    "imagenet, steps of 4": (lambda: msdnet_imagenet(), 224, [337.2, 681.7, 1003.7, 1249.6, 1355.6], 23.96),
    "imagenet, steps of 6": (
        lambda: msdnet_imagenet(step=6),
        224,
        [511.3, 1166.1, 1838.3, 2494.6, 2735.1],
        56.53,
    ),
    "cifar, growing blocks": (lambda: msdnet_cifar(growing=True), 32, [6.8, 14.2, 27.3, 41.4, 58.1], 2.08),
    "cifar": (lambda: msdnet_cifar(), 32, [15.0, 25.3, 36.8, 46.0, 56.9, 66.5, 75.5], 3.07),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_multiply_adds_and_weights_are_those_of_the_authors(name):
    make, size, macs, weights = REFERENCE[name]
    with torch.device("meta"):
        model = make()
        costs = measure_costs(model, torch.zeros(1, 3, size, size), unit="MACs")
    np.testing.assert_allclose(costs.cumulative() / 1e6, macs, rtol=0.005)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(weights, rel=0.005)


def test_blocks_grow_by_a_step_from_the_second_on(tmp_path):
    model = msdnet_cifar(10, blocks=3, base=2, step=2, channels=4, growing=True)
    layers = [sum("DenseLayer" in type(layer).__name__ for layer in stage.layers) for stage in model.stages]
    assert layers == [2, 3, 5]
    again = load_model(save_model(model.eval(), tmp_path))
    images = torch.randn(2, 3, 32, 32)
    assert all(map(torch.equal, again(images), model(images)))


def small():
    torch.manual_seed(0)
    return msdnet_cifar(10, blocks=3, base=2, step=2, channels=4, growth=4)


def test_every_exit_learns():
    model = small()
    logits = model(torch.randn(4, 3, 32, 32))
    assert [tuple(each.shape) for each in logits] == [(4, 10)] * 3
    sum(each.square().mean() for each in logits).backward()
    for name, parameter in model.named_parameters():
        if not name.startswith(("stages.2", "heads.2")):
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name


def test_what_is_carried_can_be_compacted_by_sample():
    model, images = small().eval(), torch.randn(5, 3, 32, 32)
    kept = torch.tensor([0, 3])
    with torch.no_grad():
        carried = model.stages[0](images)
        assert all(len(part) == 5 for part in carried)
        some = model.stages[1](*(part[kept] for part in carried))
        torch.testing.assert_close(model.heads[1](some[0]), model(images)[1][kept])


def test_bad_settings_are_refused():
    with pytest.raises(BadInput, match="at least 1"):
        msdnet_cifar(blocks=0)
