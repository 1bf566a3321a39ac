"""Every runtime that is installed is tried under the same policy, and the fastest can be written to a folder."""

import numpy as np
import pytest
import torch
from exported import images, network, older_exporter, policy, table

from alight import Predictor, RunSettings, compare_runtimes
from alight.engine.manifest import Manifest
from alight.errors import AlightError, BadInput
from alight.planning import engines
from alight.planning.engines import RuntimeComparison, RuntimeTrial
from alight.planning.plan import plan

ONE = RunSettings(threads=1)


@pytest.fixture(scope="module")
def compared():
    with older_exporter():
        return compare_runtimes(network(), policy(), images(), 64, settings=ONE, rounds=1)


def test_every_installed_runtime_runs_with_exits_and_without(compared):
    ways = {"torch", *engines.installed_runtimes()}
    assert {(each.runtime, each.what) for each in compared.trials} == {
        (way, what) for way in ways for what in ("with exits", "full network")
    }
    assert all(each.per_second > 0 for each in compared.trials)
    assert compared.reason in str(compared)
    assert compared.fastest.per_second == max(each.per_second for each in compared.trials)


def test_the_fastest_is_written_and_decides_like_the_network(compared, tmp_path):
    trials = (RuntimeTrial("torch", "with exits", 9.0), RuntimeTrial("onnxruntime", "with exits", 5.0))
    found = RuntimeComparison((*trials, RuntimeTrial("onnxruntime", "full network", 3.0)), 64, network(), policy())
    with older_exporter():
        made = found.export(tmp_path / "made")
    assert Manifest.load(made).runtime == "onnxruntime"
    expected = Predictor(network(), policy(), settings=ONE)(images(), np.arange(len(images())))
    decided = Predictor.load(made, settings=ONE)(images(), np.arange(len(images())))
    assert (decided.exits == expected.exits).all()
    with pytest.raises(AlightError, match="no exported runtime was compared"):
        RuntimeComparison(trials[:1], 64, network(), policy()).export(tmp_path / "other")


def test_a_runtime_that_fails_is_named_and_the_others_count(monkeypatch):
    def refuse(*_, **__):
        raise BadInput("no operator for that")

    monkeypatch.setattr(engines, "export_model", refuse)
    found = compare_runtimes(network(), policy(), images(), 64, settings=ONE, rounds=1)
    assert {each.runtime for each in found.ranked} == {"torch"}
    assert "onnxruntime: does not run: no operator for that" in str(found)


def test_a_plan_runs_by_other_runtimes_too(short_trials):
    with older_exporter():
        terms = {"batch_size": 16, "example": torch.from_numpy(images()[:16]), "settings": ONE}
        found = plan(network(), table(), speed="runtimes", max_accuracy_loss=0.3, progress=False, **terms)
    assert {"torch", "onnxruntime"} <= {each.runtime for each in found.runtimes.ranked}
    assert found.runtimes.policy is found.policy
    assert found.runtimes.reason in str(found)


def test_a_network_that_is_not_exported_is_not_run_by_another_runtime_silently():
    with pytest.raises(BadInput, match="openvino runs exported networks: export it, and load the folder"):
        Predictor(network(), policy(), settings=RunSettings(runtime="openvino"))
