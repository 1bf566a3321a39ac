"""Data is read without torch: it is imported only where its loaders, generators or tensors are asked for."""

import subprocess
import sys
from pathlib import Path

import numpy as np

import alight.data

MODULES = sorted(f"alight.data.{path.stem}" for path in Path(alight.data.__file__).parent.glob("*.py"))
IMPORTED = "import sys\nfor name in sys.argv[1:]: __import__(name)\nassert 'torch' not in sys.modules, 'torch is there'"
READ = """
import sys
import numpy as np
from PIL import Image
from alight.data.batches import as_inputs, batches, fitted, in_batches
from alight.data.batches import load_data
from alight.data.formats import names_of
from alight.data.preprocess import InputSpec, Normalisation, TensorSpec
tensors = (TensorSpec("images", (None, 3, 6, 7), "float32"),)
spec = InputSpec(tensors, normalisation=Normalisation((0.5,) * 3, (0.5,) * 3))
pixels = np.zeros((5, 6, 7, 3), np.uint8)
pictures = [Image.fromarray(each) for each in pixels]
forms = [pixels, (pixels, np.arange(5)), pictures, [*pixels], [(each, 0) for each in pictures], {"images": pixels}]
for data in [*forms, load_data(sys.argv[1], spec)]:
    made = [fitted(batch.inputs, spec)[0] for batch in batches(in_batches(data, spec, 2), spec, "the test")]
    assert np.array_equal(np.concatenate(made), np.full((5, 3, 6, 7), -1.0, np.float32)), data
assert "torch" not in sys.modules, "torch is there"
"""


def python(source, *arguments, **options):
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_importing_it_does_not_import_torch():
    assert "alight.data.batches" in MODULES
    done = python(IMPORTED, *MODULES)
    assert done.returncode == 0, done.stderr


def test_the_import_test_can_fail(tmp_path):
    (tmp_path / "torch.py").touch()  # found first, and imported at once
    assert "torch is there" in python(IMPORTED, "torch", cwd=tmp_path).stderr


def test_pictures_pixels_and_files_become_batches_without_torch(tmp_path):
    np.savez(tmp_path / "images.npz", images=np.zeros((5, 6, 7, 3), np.uint8), labels=np.arange(5))
    done = python(READ, tmp_path / "images.npz")
    assert done.returncode == 0, done.stderr
