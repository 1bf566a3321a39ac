"""Every runtime that is installed is tried under the same policy, and the fastest can be written to a folder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from exported import images, network, older_exporter, policy, table

from alight import Costs, Predictor, RunSettings, compare_runtimes, load_policy, tune_speed
from alight.calibrate.risk_guarantees import largest_loss
from alight.engine.manifest import Manifest
from alight.errors import AlightError, BadInput
from alight.planning import engines
from alight.planning import plan as planning
from alight.planning.engines import RuntimeComparison, RuntimeTrial
from alight.policies.policy import ExitAt
from alight.policies.route import replay

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
    found = RuntimeComparison(
        (*trials, RuntimeTrial("onnxruntime", "full network", 3.0)), 64, network(), {"onnxruntime": policy()}
    )
    with older_exporter():
        made = found.export(tmp_path / "made")
    assert Manifest.load(made).runtime == "onnxruntime"
    expected = Predictor(network(), policy(), settings=ONE)(images(), np.arange(len(images())))
    decided = Predictor.load(made, settings=ONE)(images(), np.arange(len(images())))
    assert (decided.exits == expected.exits).all()
    with pytest.raises(AlightError, match="no exported runtime was compared"):
        RuntimeComparison(trials[:1], 64, network(), {"torch": policy()}).export(tmp_path / "other")


def test_a_runtime_that_is_faster_by_noise_alone_is_as_fast_as_the_next():
    trials = (RuntimeTrial("torch", "with exits", 100.0), RuntimeTrial("openvino", "full network", 103.0))
    found = RuntimeComparison(trials, 64)
    assert found.reason == "openvino, full network, is as fast here as torch, with exits (1.03 times)."


def test_a_runtime_that_fails_is_named_and_the_others_count(monkeypatch):
    def refuse(*_, **__):
        raise BadInput("no operator for that")

    monkeypatch.setattr(engines, "export_model", refuse)
    found = compare_runtimes(network(), policy(), images(), 64, settings=ONE, rounds=1)
    assert {each.runtime for each in found.ranked} == {"torch"}
    assert "onnxruntime: does not run: no operator for that" in str(found)


def planned(monkeypatch, own_times, **goal):
    """A plan with every runtime, of which the exported ones have these times of stages."""
    heads = [0.01, 0.01, 0.01, 0.0]
    costs = {name: Costs(stages, heads, "ms") for name, stages in own_times.items()}
    monkeypatch.setattr(planning, "runtime_costs", lambda *_: (costs, []))
    monkeypatch.setattr(planning, "walking_costs", lambda *_: Costs([1.0, 1.0, 1.0, 1.0], heads, "ms"))
    with older_exporter():
        terms = {"batch_size": 16, "example": torch.from_numpy(images()[:16]), "settings": ONE, "progress": False}
        return planning.plan(network(), table(), speed="runtimes", **goal, **terms)


def test_each_runtime_is_planned_for_by_its_own_times(short_trials, monkeypatch, tmp_path):
    even, late = [1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.1, 9.0]
    names = engines.installed_runtimes()
    found = planned(monkeypatch, dict(zip(names, [even, late], strict=False)), budget="60%")
    assert {each.runtime for each in found.runtimes.ranked} == {"torch", *names}
    assert found.runtimes.policies["torch"] is found.policy
    assert found.runtimes.reason in str(found)
    fitting, _ = table().split(1 / 3, np.random.default_rng(0))
    for name, stages in zip(names, [even, late], strict=False):
        costs, policy = Costs(stages, [0.01, 0.01, 0.01, 0.0], "ms"), found.runtimes.policies[name]
        assert policy.full_cost == costs.full
        assert np.isclose(policy.costs[-1], costs.at_exits(policy.open_exits).cumulative()[-1])
        assert replay(policy, fitting).mean_cost <= 0.6 * costs.full
    for name in names:
        trial = RuntimeTrial(name, "with exits", 1e9)
        fastest = replace(found, runtimes=replace(found.runtimes, trials=(*found.runtimes.trials, trial)))
        assert fastest.fastest == (name, found.runtimes.policies[name])
        with older_exporter():
            made = fastest.runtimes.export(tmp_path / name)
        assert (Manifest.load(made).runtime, load_policy(made / "policy.json")) == fastest.fastest


def test_policies_of_several_runtimes_lose_no_more_together_than_one_alone(short_trials, monkeypatch):
    asked = []

    def noted(fit, costs, fitting, testing, loss, delta, baselines):
        asked.append(delta)

    monkeypatch.setattr(planning, "cheapest", noted)
    names = engines.installed_runtimes()
    found = planned(monkeypatch, {name: [1.0] * 4 for name in names}, max_accuracy_loss=0.3)
    assert np.allclose(asked, 0.05 / (1 + len(names)))
    assert len(asked) == 1 + len(names)
    assert all(len(each.open_exits) == 1 for each in found.runtimes.policies.values())  # none was found: no exits
    assert found.runtimes.policies[names[0]].costs == (4.0,)


def test_a_runtime_that_cannot_keep_the_budget_is_not_recommended(short_trials, monkeypatch):
    names = engines.installed_runtimes()
    found = planned(monkeypatch, {name: [9.0, 0.1, 0.1, 0.1] for name in names}, budget="60%")
    assert {each.runtime for each in found.runtimes.ranked} == {"torch"}
    assert f"{names[0]}: " in str(found.runtimes)
    assert "budget 5.58" in str(found.runtimes)
    assert found.fastest == ("torch", found.policy)


def test_a_plan_says_why_a_runtime_is_left_out(short_trials, monkeypatch):
    def refuse(*_, **__):
        raise BadInput("no operator for that")

    monkeypatch.setattr(engines, "export_model", refuse)
    terms = {"batch_size": 16, "example": torch.from_numpy(images()[:16]), "progress": False}
    for settings, why in {
        ONE: "no operator",
        RunSettings(threads=1, dtype="bf16"): "exported stages are float32",
    }.items():
        unknown = replace(table(), fingerprint="")
        found = planning.plan(network(), unknown, speed="runtimes", max_accuracy_loss=0.3, settings=settings, **terms)
        assert {each.runtime for each in found.runtimes.ranked} == {"torch"}
        for name in engines.installed_runtimes():
            assert f"{name}: does not run: {why}" in str(found)


def test_a_plan_says_what_the_policy_of_the_fastest_runtime_loses(short_trials, monkeypatch):
    name, *others = engines.installed_runtimes()
    trials = (RuntimeTrial(name, "with exits", 9.0), RuntimeTrial("torch", "with exits", 5.0))
    monkeypatch.setattr(planning, "compare_runtimes", lambda *given, **_: RuntimeComparison(trials, 16, *given[:2]))
    late = {each: [0.1, 0.1, 0.1, 9.0] for each in (name, *others)}
    found = planned(monkeypatch, late, budget="60%")
    _, testing = table().split(1 / 3, np.random.default_rng(0))
    own = replay(replace(found.runtimes.policies[name], salt=planning.TESTING_SALT), testing)
    correct, full = own.correct(testing.labels), testing.correct()[:, -1]
    lost = largest_loss(full, correct, 0.05 / (2 + len(others)))
    said = f"{name}, with exits: {correct.mean():.1%} accuracy; it loses at most {lost:.1%}, with 95 % confidence."
    assert found.runtimes.note.replace(" %", "%") == said.replace(" %", "%")
    assert found.accuracy != correct.mean()
    assert str(found).endswith(found.runtimes.note)
    assert "\n\ntorch, batches of 16" in str(found)
    slow = replace(found.runtimes, trials=trials[1:])
    monkeypatch.setattr(planning, "compare_runtimes", lambda *_, **__: replace(slow, note=""))
    assert planned(monkeypatch, late, budget="60%").runtimes.note == ""


def test_policies_of_runtimes_that_are_not_known_or_without_that_of_torch_are_refused():
    for given in ({"openvino": policy()}, {"torch": policy(), "onnx": policy()}):
        with pytest.raises(BadInput, match="give one for torch, others for onnxruntime and openvino"):
            compare_runtimes(network(), given, images(), 64)


def test_times_of_every_exit_are_measured_by_each_runtime():
    with older_exporter():
        terms = (torch.from_numpy(images()[:8]), 8, ONE)
        found, failed = engines.runtime_costs(network(), engines.installed_runtimes(), *terms)
    assert not failed
    assert [*found] == engines.installed_runtimes()
    for costs in found.values():
        assert (len(costs), costs.unit) == (4, "ms")
        assert (np.diff(costs.cumulative()) > 0).all()


def test_a_network_that_is_not_exported_is_not_run_by_another_runtime_silently():
    with pytest.raises(BadInput, match="openvino runs exported networks: export it, and load the folder"):
        Predictor(network(), policy(), settings=RunSettings(runtime="openvino"))


def test_a_policy_of_one_early_exit_is_compared_and_written(tmp_path):
    first = ExitAt(costs=(1.0,), open_exits=(0,), num_exits=4)
    with older_exporter():
        found = compare_runtimes(network(), first, images(), 64, settings=ONE, rounds=1)
        made = RuntimeComparison(
            tuple(each for each in found.trials if each.what == "with exits"), 64, network(), found.policies
        ).export(tmp_path / "made")
    assert {each.what for each in found.trials if each.runtime == "onnxruntime"} == {"with exits", "full network"}
    assert Manifest.load(made).open_exits == (0,)
    assert (Predictor.load(made, settings=ONE)(images()).exits == 0).all()


def test_a_policy_of_another_network_runs_by_no_runtime_unless_it_is_allowed():
    other = replace(policy(), fingerprint="5e88")
    terms = {"settings": ONE, "rounds": 1}
    with pytest.raises(AlightError, match="no runtime runs this network under this policy: does not run: the policy"):
        compare_runtimes(network(), other, images(), 64, **terms)
    with older_exporter():
        found = compare_runtimes(network(), other, images(), 64, allow_mismatch=True, **terms)
    assert all(each.per_second > 0 for each in found.trials)


def test_a_runtime_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(engines, "installed_runtimes", list)
    found = compare_runtimes(network(), policy(), images(), 64, settings=ONE, rounds=1)
    assert 'openvino: it or onnx is not installed, so not tried: pip install "alight[export,openvino]"' in str(found)
    assert {each.runtime for each in found.ranked} == {"torch"}


def test_tuning_compares_runtimes_too_and_writes_the_fastest(short_trials, tmp_path):
    model, terms = network(), {"batch_size": 16, "example": torch.from_numpy(images()[:16]), "settings": ONE}
    with older_exporter():
        tuned = tune_speed(model, policy(), switches=["channels_last", "runtimes"], **terms)
        made = tuned.runtimes.export(tmp_path / "made")
    assert {each.runtime for each in tuned.runtimes.ranked} == {"torch", *engines.installed_runtimes()}
    assert tuned.runtimes.reason in str(tuned)
    fastest = next(each for each in tuned.runtimes.ranked if each.runtime != "torch")
    assert (Manifest.load(made).runtime, len(Manifest.load(made).stages) > 1) == (
        fastest.runtime,
        fastest.what == "with exits",
    )
    assert tune_speed(model, policy(), switches=[], **terms).runtimes is None
