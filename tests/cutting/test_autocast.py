"""What the network's code says to torch.autocast holds in stages too, also where the caller runs them under one."""

import pytest
import torch
from torch import nn
from two_convolutions import IMAGES, Network

from alight import attach_heads, load_model, save_model
from alight.errors import BadFile, BadInput


class FullPrecisionEnd(Network):
    """Computes its end in float32, whatever runs around it, as code does that would overflow."""

    def rest(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().rest(x.float()) @ torch.eye(6)


class HalfPrecisionEnd(Network):
    def rest(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.norm(self.second(x)).flatten(2)
            return (x @ x.transpose(1, 2)).mean(2).float()


class HalfPrecision(Network):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return super().forward(x)


class InnermostCounts(Network):
    def rest(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cuda", enabled=False):
            x = self.second(x)
            with torch.autocast("cpu", enabled=False):
                return self.norm(x.float()).mean((2, 3)) @ torch.eye(6)


class AsksForAutocast(Network):
    def rest(self, x):
        return super().rest(-x if torch.is_autocast_enabled("cpu") else x)


def outer(dtype):
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", [FullPrecisionEnd, HalfPrecisionEnd, HalfPrecision, InnermostCounts])
def test_stages_compute_in_the_precision_that_the_code_asks_for(kind, dtype, tmp_path):
    torch.manual_seed(0)
    network = kind().eval()
    model = attach_heads(network, ["first"], example=IMAGES).eval()
    loaded = load_model(save_model(model, tmp_path / "saved"))  # without its code
    with torch.no_grad(), outer(dtype):
        expected, batch = network(IMAGES), IMAGES.clone()
        for each in (model, loaded):
            logits = each(batch)[-1]
            assert logits.dtype == expected.dtype
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("kind", [FullPrecisionEnd, HalfPrecisionEnd, HalfPrecision])
def test_gradients_under_autocast_are_the_networks(kind):
    torch.manual_seed(0)
    network = kind()
    model = attach_heads(network, ["first"], example=IMAGES)
    gradients = []
    for run in (network, lambda batch: model(batch)[-1]):
        network.zero_grad()
        with outer(torch.bfloat16):
            logits = run(IMAGES)
        logits.float().square().sum().backward()
        gradients.append([each.grad.clone() for each in network.parameters()])
    assert all(map(torch.equal, *gradients))


def test_code_that_does_something_else_under_autocast_is_refused_there():
    model = attach_heads(AsksForAutocast().eval(), ["first"], example=IMAGES).eval()
    model(IMAGES)
    with (
        pytest.raises(BadInput, match=r"float32 under torch\.autocast, the exits do not give what the network gives"),
        outer(torch.bfloat16),
    ):
        model(IMAGES)
    model(IMAGES)


class ForSeveralLabels(Network):
    def __init__(self, end):
        super().__init__()
        self.end = end

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.end(super().forward(x))


@pytest.mark.parametrize("end", [nn.Sigmoid(), torch.sigmoid, torch.Tensor.sigmoid])
def test_a_sigmoid_is_found_under_autocast(end):
    with pytest.raises(BadInput, match="the network ends in a sigmoid"):
        attach_heads(ForSeveralLabels(end), ["first"], example=IMAGES)


def test_a_folder_cannot_name_other_functions_to_be_run_under_autocast(tmp_path):
    folder = save_model(attach_heads(HalfPrecisionEnd(), ["first"], example=IMAGES), tmp_path / "saved")
    (file,) = [each for each in folder.glob("*.json") if "under cpu" in each.read_text()]
    written = file.read_text()
    for other in ("os.system under cpu torch.bfloat16 True", "torch.matmul under cpu os.system True"):
        name = next(part for part in written.split('"') if " under cpu" in part)
        file.write_text(written.replace(name, other))
        with pytest.raises(BadFile, match="is not a tensor function that alight knows"):
            load_model(folder)
