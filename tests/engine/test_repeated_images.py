"""Where many images are one and the same, their share that leaves is the planned one in every batch and runtime."""

import numpy as np
import pytest
import torch
from exported import older_exporter
from torch import nn

import alight
from alight import Predictor, RunSettings, calibrate, record, replay

RUNTIMES = {"torch": "torch", "onnx": "onnxruntime", "openvino": "openvino"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.third, self.out = nn.Conv2d(32, 48, 3, 1, 1), nn.Linear(48, 20)

    def forward(self, images):
        for convolution in (self.first, self.second, self.third):
            images = torch.relu(convolution(images))
        return self.out(images.mean((2, 3)))


@pytest.fixture(scope="module")
def blank():
    return np.random.default_rng(0).random(600) < 0.4


@pytest.fixture(scope="module")
def images(blank):
    made = np.random.default_rng(1).normal(size=(600, 3, 16, 16)).astype(np.float32)
    made[blank] = 0.3
    return made


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    made = alight.attach_heads(net, after=["first", "second"], example=torch.zeros(2, 3, 16, 16))
    for head in made.heads[:-1]:
        for parameter in head.parameters():
            parameter.data.mul_(3)
    return made


@pytest.fixture(scope="module")
def fitted(model, images):
    costs = alight.measure_costs(model, torch.zeros(1, 3, 16, 16))
    table = record(model, (images, np.arange(600) % 20), progress=False, batch_size=64)
    return table, calibrate.geometric(costs, "45%", table), costs


@pytest.fixture(scope="module")
def folder(model, fitted, tmp_path_factory):
    with older_exporter():
        return alight.export_model(model, fitted[1], tmp_path_factory.mktemp("blank") / "exported", progress=False)


def predictor(runtime, request):
    if runtime == "torch":
        return Predictor(request.getfixturevalue("model"), request.getfixturevalue("fitted")[1])
    pytest.importorskip(RUNTIMES[runtime])
    settings = RunSettings(threads=1, runtime="openvino" if runtime == "openvino" else None)
    return Predictor.load(request.getfixturevalue("folder"), settings=settings)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("size", [1, 7, 600])
def test_equal_images_cost_what_was_planned(runtime, size, request, fitted, images, blank):
    table, policy, costs = fitted
    assert 0 < policy.tie_shares[0] < 1  # the threshold lies at the score of the equal images
    expected, found = replay(policy, table), predictor(runtime, request)
    parts = [found(images[at : at + size], np.arange(600)[at : at + size]) for at in range(0, 600, size)]
    exits, spent = (np.concatenate([getattr(each, name) for each in parts]) for name in ("exits", "spent"))
    assert spent.mean() / costs.full == pytest.approx(expected.mean_cost / costs.full, abs=0.01)
    np.testing.assert_array_equal(exits[blank], expected.exits[blank])
    assert (exits != expected.exits).sum() <= 2  # whose scores lie at the end of a range of ties
