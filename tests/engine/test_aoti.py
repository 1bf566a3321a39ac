"""Stages that were compiled ahead of time decide what the predictor decides."""

import shutil
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from alight import MultiExitModel, Predictor, RunSettings, export_model
from alight.errors import AlightError, BadInput
from alight.policies.policy import ExitAt, Lottery, Threshold
from alight.serve.model import load_served_model


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_compiled_stages_decide_what_the_predictor_decides(tmp_path):
    torch.manual_seed(0)
    model = MultiExitModel([nn.Linear(4, 8), nn.Tanh()], [nn.Linear(8, 3), nn.Linear(8, 3)]).eval()
    rule = Threshold((0.2,), costs=(1.0, 3.0))
    folder = export_model(model, rule, tmp_path / "exported", example=torch.zeros(1, 4), format="aoti")
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json", ".pt2", ".pt2"]
    with zipfile.ZipFile(folder / "stage_0.pt2") as package:
        code = "".join(package.read(name).decode() for name in package.namelist() if name.endswith(".cpp"))
    assert "#pragma omp parallel\n" in code  # for as many threads as there are where it runs
    compiled, numbers = (
        Predictor.load(folder, allow_compiled=True),
        np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32),
    )
    expected = Predictor(model, rule)(numbers)
    assert {*expected.exits.tolist()} == {0, 1}
    for batch_size in (1, 7, 60):
        compiled.batch_size = batch_size
        found = compiled(numbers)
        assert (found.predictions == expected.predictions).all()
        assert (found.exits == expected.exits).all()
    lottery = Lottery(costs=(1.0, 3.0), exit_rates=(0.5, 0.5))
    divided = compiled.with_policy(lottery)
    start = divided.next_number
    parts = [divided(numbers[first:last]).exits for first, last in ((0, 1), (1, 20), (20, 60))]
    expected_exits = Predictor(model, lottery)(numbers, np.arange(start, start + 60)).exits
    np.testing.assert_array_equal(np.concatenate(parts), expected_exits)
    served = load_served_model(folder, {"rule": rule}, settings=RunSettings(threads=1))
    assert (served.predictors["rule"](numbers).exits == expected.exits).all()
    assert served.engine == "PyTorch, compiled ahead of time"
    with pytest.raises(BadInput, match="holds machine code that torch compiled: load it with allow_compiled=True"):
        Predictor.load(folder)


def test_a_missing_compiler_is_reported_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model, rule = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)]), ExitAt(costs=(1.0,))
    with pytest.raises(AlightError, match="no C\\+\\+ compiler: install one"):
        export_model(model, rule, tmp_path / "exported", example=torch.zeros(1, 4), format="aoti")
    assert not (tmp_path / "exported").exists()
