"""CUDA graphs are for GPUs, and captured of full batches."""

import pytest
import torch
from torch import nn

from alight.errors import BadInput
from alight.models.multi_exit import MultiExitModel
from alight.policies.policy import Threshold
from alight.runtime.graphs import Graphed
from alight.runtime.predictor import Predictor
from alight.runtime.recorder import record
from alight.runtime.tune import tune_speed


@pytest.fixture
def model():
    return MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]).eval()


def test_without_a_gpu_the_switch_is_refused(model):
    with pytest.raises(BadInput, match="need a GPU and the network runs on cpu: leave graphs out"):
        Predictor(model, Threshold((0.5,), costs=(1.0, 2.0)), device="cpu", graphs=True)
    with pytest.raises(BadInput, match="need a GPU"):
        record(model, torch.zeros(5, 4), device="cpu", graphs=True, progress=False)


def test_compiled_parts_are_not_replayed(model):
    with pytest.raises(BadInput, match="choose one of compile and graphs"):
        Predictor(model, Threshold((0.5,), costs=(1.0, 2.0)), compile=True, graphs=True)
    with pytest.raises(BadInput, match="choose one of compile and graphs"):
        record(model, torch.zeros(5, 4), compile=True, graphs=True, progress=False)


def test_without_a_gpu_the_switch_is_not_tried(model):
    tuned = tune_speed(model, batch_size=8, example=torch.zeros(1, 4), device="cpu", num_threads=1)
    assert not any("graphs" in trial.settings for trial in tuned.trials)


def test_before_a_full_batch_came_smaller_ones_are_run_as_they_are():
    part = Graphed(0, lambda inputs: 2 * inputs, 4, pool=None)
    assert part(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert not part.captured
