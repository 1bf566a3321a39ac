"""Exported networks, run by onnxruntime and NumPy alone: PyTorch is neither needed nor imported.

    deployed = alight.deploy.load("exported")      # what `alight export` wrote
    decisions = deployed(images)                   # .predictions .exits .spent, as a `Predictor` decides

>>> import tempfile
>>> import numpy as np
>>> from torch import nn, zeros
>>> from alight import MultiExitModel, export_model
>>> from alight.policies.policy import ExitAt
>>> model = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])
>>> folder = export_model(model, ExitAt(costs=(1.0,)), f"{tempfile.mkdtemp()}/exported", example=zeros(1, 4))
>>> load(folder)(np.ones((5, 4))).exits
array([0, 0, 0, 0, 0])
"""

from alight.deploy.deployed import Deployed
from alight.deploy.folder import load
from alight.export.manifest import Manifest

__all__ = ["Deployed", "Manifest", "load"]
