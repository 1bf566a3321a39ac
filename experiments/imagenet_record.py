"""Eight pretrained networks on 5,000 ImageNet validation images: what each says, once; about 15 minutes on one core.

    python experiments/imagenet_record.py DATA MODELS MOBILENETS --output imagenet.npz

MODELS holds the packages that experiments/imagenet_networks.py names, MOBILENETS the int8 networks as .tflite files.
Networks of torch are exported and run by ONNX Runtime, which takes less than half of torch's time on a CPU, and the
int8 ones by LiteRT. Images are resized by a bicubic filter. Networks see the middle 224 of the 256 pixels, as usual;
EfficientNet-lite1 and 2 see 95 % of each side: they take more pixels than that middle has, and are half a point more
accurate so. The recording holds scores, classes and log-probabilities of the five likeliest classes, no image; beside
it, the FLOPs of each network.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from imagenet_networks import CAFFE, LITE, SIZES, efficientnet_lite, load_images, resnet50

import alight
from alight.data.tokens import library
from alight.engine.backends.cascade import Cascade
from alight.planning.timing import full_network

MOBILENETS = {  # files, and the name here
    "v1-0.25@128 int8": "mobilenet_v1_0.25_128_quant.tflite",
    "v1-0.5@160 int8": "mobilenet_v1_0.5_160_quant.tflite",
    "v1-0.75@192 int8": "mobilenet_v1_0.75_192_quant.tflite",
    "v2@224 int8": "mobilenet_v2_1.0_224_quant.tflite",
}
SEEN = {"lite1": 0.95, "lite2": 0.95}  # share of each side
USUAL = 0.875  # of all others
CONVOLUTIONS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
PIXELS = 256  # of the data


def exported(models: Path, name: str) -> Path:
    """Return the folder of a network that ONNX Runtime runs, exported once."""
    folder = models / "onnx" / name
    if not (folder / "manifest.json").is_file():
        size, normalisation = SIZES.get(name, 224), LITE if name in SIZES else CAFFE
        network = efficientnet_lite(models, name) if name in SIZES else resnet50(models / "package")
        example = torch.zeros(2, 3, size, size)
        model = alight.attach_heads(network, (), example=example, normalisation=normalisation)
        alight.export_model(model, full_network(model), folder, progress=False)
    return folder


def multiply_adds(path: Path) -> int:
    """Return the multiply-adds of the convolutions and linear layers of a LiteRT network, for one image."""
    network = library("ai_edge_litert.interpreter", "ai-edge-litert").Interpreter(str(path))
    shapes = {each["index"]: each["shape"] for each in network.get_tensor_details()}
    total = 0
    for operation in network._get_ops_details():
        if operation["op_name"] in CONVOLUTIONS:
            kernel, output = shapes[operation["inputs"][1]], shapes[operation["outputs"][0]]
            inputs = (
                1
                if operation["op_name"] == "DEPTHWISE_CONV_2D"
                else int(np.prod(kernel[1:])) // int(np.prod(kernel[1:3]))
            )
            window = int(np.prod(kernel[1:3])) if len(kernel) == 4 else int(kernel[1])
            total += int(np.prod(output)) * window * (inputs if len(kernel) == 4 else 1)
    return total


def networks(models: Path, mobilenets: Path) -> list[alight.Member]:
    """Return all candidates, from few multiply-adds to many."""
    members = [
        alight.Member(
            mobilenets / file,
            name,
            crop=USUAL,
            bicubic=True,
            skip_classes=1,
            flops=2.0 * multiply_adds(mobilenets / file),
        )
        for name, file in MOBILENETS.items()
    ]
    for name in (*SIZES, "resnet50"):
        members.append(alight.Member(exported(models, name), name, crop=SEEN.get(name, USUAL), bicubic=True))
    return members


def flops(models: Path) -> dict[str, float]:
    """Return the FLOPs of the networks of torch, by name."""
    counted = {}
    for name in (*SIZES, "resnet50"):
        size = SIZES.get(name, 224)
        network = efficientnet_lite(models, name) if name in SIZES else resnet50(models / "package")
        model = alight.attach_heads(network, (), example=torch.zeros(1, 3, size, size))
        counted[name] = alight.measure_costs(model).full
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("data", "models", "mobilenets"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--output", type=Path, default=Path("imagenet.npz"))
    parser.add_argument("--limit", type=int, help="images")
    options = parser.parse_args()
    members = networks(options.models, options.mobilenets)
    chain: Cascade = alight.cascade(members, image_size=PIXELS)
    pixels, labels = load_images(options.data, options.limit)
    outputs = alight.record(chain, (pixels, labels), batch_size=25, features=["negative_entropy"], top=5)
    outputs.save(options.output)
    counted: dict[str, Any] = {each.name: each.flops for each in members if each.flops} | flops(options.models)
    options.output.with_suffix(".json").write_text(json.dumps(counted, indent=2))
    print(dict(zip(outputs.exits, (1 - outputs.risks()).round(4).tolist(), strict=True)))


if __name__ == "__main__":
    main()
