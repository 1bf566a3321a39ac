"""Exported stages need onnxruntime and NumPy alone."""

import os
import subprocess
import sys

import numpy as np
from exported import folder, images

from alight import Predictor
from alight.engine.backends.onnx import TELEMETRY

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "torch torchvision timm transformers safetensors onnx onnxscript".split():
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Blocked())
"""
PREDICT = """
import sys
import numpy as np
import alight
predictor = alight.Predictor.load(sys.argv[1], settings=alight.RunSettings(threads=1))
decisions = predictor(np.load(sys.argv[2]))
one = predictor(np.load(sys.argv[2])[:1])
assert one.exits[0] == decisions.exits[0]
assert not {"torch", "onnx", "onnxscript", "transformers"} & set(sys.modules), "torch is there"
print(decisions.predictions.tolist(), decisions.exits.tolist())
"""


def python(source, *arguments, env=None):
    return subprocess.run([sys.executable, "-c", source, *map(str, arguments)], capture_output=True, text=True, env=env)


def test_it_predicts_where_torch_cannot_be_imported_and_where_it_could(tmp_path):
    np.save(tmp_path / "images.npy", images())
    here = Predictor.load(folder())(images())
    for source in (BLOCKED + PREDICT, PREDICT):
        done = python(source, folder(), tmp_path / "images.npy")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{here.predictions.tolist()} {here.exits.tolist()}"


def test_no_telemetry_is_kept_or_sent(tmp_path):
    np.save(tmp_path / "images.npy", images())
    (tmp_path / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in (TELEMETRY, "CI", "XDG_CACHE_HOME")}
    done = python(PREDICT, folder(), tmp_path / "images.npy", env={**kept, "HOME": str(tmp_path / "home")})
    assert done.returncode == 0, done.stderr
    assert not [*(tmp_path / "home").iterdir()]  # where onnxruntime keeps what it is about to tell


def test_the_test_can_fail(tmp_path):
    np.save(tmp_path / "images.npy", images())
    assert "torch is not here" in python(BLOCKED + "import torch").stderr
    imported = "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\n"
    assert "torch is there" in python(imported + PREDICT, folder(), tmp_path / "images.npy").stderr


def test_the_command_runs_without_torch(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, size=(9, 6, 7, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels)
    command = "from alight.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = python(BLOCKED + command, "run", folder(), tmp_path / "images.npz", "-o", tmp_path / "answers.csv", "-q")
    assert done.returncode == 0, done.stderr
    header, *rows = (tmp_path / "answers.csv").read_text().splitlines()
    assert header == "sample,prediction,exit,cost,probability"
    assert len(rows) == 9
    assert {row.split(",")[1] for row in rows} <= {"ant", "bee", "cat", "dog", "eel"}
