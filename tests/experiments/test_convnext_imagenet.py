"""The ImageNet experiment end to end, on a folder of a few made-up pictures and a network of a few channels."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.models import convnext_tiny
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from alight import Costs, HeadOutputs, read_points

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
CLASSES = ("cat", "dog", "owl")
TINY = [CNBlockConfig(4, 8, 2), CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 2)]

pytestmark = pytest.mark.filterwarnings("ignore:the last exit has")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXPERIMENTS))
        found = importlib.import_module("convnext_imagenet")
        patched.setitem(found.NETWORKS, "convnext_tiny", partial(ConvNeXt, TINY))
        yield found
        sys.modules.pop("convnext_imagenet")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, dice = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 10)):
        for shade, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                noise = dice.integers(0, 60, (40, 48, 3)) + 80 * shade
                Image.fromarray(noise.astype(np.uint8)).save(folder / part / name / f"{number}.png")
    return folder


def test_heads_stand_after_blocks_and_halvings_in_the_order_in_which_they_run(script):
    whole = convnext_tiny()
    assert len(script.places(whole)) == 20  # 21 exits, as the paper's table of weights has
    assert len(script.places(whole, "blocks")) == 17
    assert script.places(whole)[:5] == ["features.1.0", "features.1.1", "features.1.2", "features.2", "features.3.0"]
    assert script.places(whole)[-1] == "features.7.1"


def test_the_papers_settings_are_the_defaults(script):
    assert script.PAPER.epochs == 300
    assert script.CALIBRATION == 5000
    assert (script.PAPER.optimizer, script.PAPER.momentum, script.PAPER.weight_decay) == ("sgd", 0.9, 1e-4)
    assert script.PAPER.mode == "frozen"


def test_a_tiny_imagenet_goes_from_pictures_to_a_report(script, pictures, tmp_path):
    given = ["--weights=random", "--epochs=2", "--batch-size=5", "--calibration=12", "--size=32", "--workers=0"]
    methods = ["--methods", "eero", "geometric", "patience"]
    script.main([str(pictures), str(tmp_path / "out"), *given, "--device=cpu", "--limit=15", *methods])
    out = tmp_path / "out"
    calibration, test = (HeadOutputs.load(out / f"{name}.npz") for name in ("calibration", "test"))
    costs = Costs.load(out / "costs.json")
    assert (len(calibration), len(test)) == (12, 18)
    assert test.num_exits == calibration.num_exits == len(costs) == 7  # 4 blocks, 2 halvings, the end
    assert set(test.features) == set(script.SCORES)
    assert {point.method for point in read_points(out / "points.csv")} > {"eero", "geometric", "patience"}
    assert (out / "report.html").stat().st_size > 1000
    assert load_file(out / "heads.safetensors")
    about = json.loads((out / "run.json").read_text())
    assert about["epochs"] == "2"
    assert {"hardware", "versions", "date", "commit"} <= about.keys()


def test_weights_may_come_from_a_file_and_stay_frozen(script, tmp_path):
    torch.manual_seed(1)
    backbone = script.NETWORKS["convnext_tiny"](num_classes=3)
    save_file(backbone.state_dict(), tmp_path / "weights.safetensors")
    model = script.build("convnext_tiny", str(tmp_path / "weights.safetensors"), 3, 32, "all").eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images)[-1], backbone.eval()(images))


def test_a_split_that_leaves_nothing_is_refused(script, pictures, tmp_path):
    with pytest.raises(SystemExit, match="30 of 30 validation images to calibrate on leave none"):
        script.main([str(pictures), str(tmp_path), "--calibration=30", "--weights=random", "--device=cpu"])
