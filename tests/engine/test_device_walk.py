"""What a GPU decides is what a replay decides; here with the same programs and kernels, without one."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import (
    EXECUTOR,
    INTERPRETED,
    ByPython,
    Captured,
    interpreted,
    passed_in_a_process_of_their_own,
    skip_without_loops,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from alight import Predictor, RunSettings, calibrate
from alight.engine.backends import Reads
from alight.engine.backends.torch import deciding, device_walk, open_stages
from alight.engine.backends.torch.deciding import Deciding
from alight.engine.backends.torch.device_walk import BatchWalk, Executor, Network, StreamWalk
from alight.engine.backends.torch.values import half
from alight.engine.recorder import record
from alight.engine.walk import Answers, usable
from alight.errors import AlightError, BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.outputs import half as numpy_half
from alight.planning.timing import stage_seconds
from alight.policies.combinations import Gain
from alight.policies.policy import ExitAt, Lottery, Mixture, Patience, Streak, Threshold
from alight.policies.route import replay

COSTS = (1.0, 2.0, 3.0)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is that process")
@pytest.mark.timeout(1200)  # an interpreter is slow
@pytest.mark.parametrize("those", ["not slow", "slow"])
def test_walks_are_decided_as_replayed_in_a_process_of_their_own(those):
    skip_without_loops()
    assert " passed" in passed_in_a_process_of_their_own(__file__, those)


class Split(nn.Module):
    """A stage that hands on two tensors of different kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, inputs):
        return self.linear(inputs).tanh(), inputs[:, :3] > 0


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, features, signs):
        return self.linear(features).tanh() + signs.float().sum(1, keepdim=True), signs


class Last(nn.Module):
    def forward(self, features, signs):
        return features[:, :5].contiguous(), signs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MultiExitModel([Split(), Joined(), Last()], [nn.Linear(8, 4), nn.Linear(6, 4), nn.Linear(5, 4)]).eval()


@pytest.fixture(scope="module")
def inputs():
    return torch.randn(61, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def table(model, inputs):
    labels = np.random.default_rng(2).integers(4, size=61)
    return record(model, (inputs, labels), progress=False)


def rules(table):
    middle = tuple(np.median(table.scores, axis=0)[:2].tolist())
    threshold = Threshold(middle, costs=COSTS)
    cut = float(np.sort(table.scores[:, 0])[30])
    terms = {"costs": COSTS, "salt": 7 << 32 | 11}
    return {
        "threshold": threshold,
        "ties": Threshold((cut, cut), tie_shares=(0.0, 0.5), **terms),
        "nobody leaves": Threshold((np.inf, np.inf), costs=COSTS),
        "everybody leaves": Threshold((-np.inf, -np.inf), costs=COSTS),
        "lottery": Lottery(exit_rates=(0.3, 0.3, 0.4), **terms),
        "one exit": ExitAt(costs=(3.0,), open_exits=(2,)),
        "patience": Patience(patience=1, costs=COSTS),
        "streak": Streak(threshold=middle[0], patience=2, costs=COSTS),
        "mixture": Mixture(
            first=replace(threshold, salt=5), second=Patience(patience=1, costs=COSTS), share=0.4, **terms
        ),
        "vote": calibrate.combined(calibrate.eero, "vote")(COSTS, "60%", table),
        "geometric mean": calibrate.combined(calibrate.eero, "geometric_mean")(COSTS, "60%", table),
        "gain": replace(threshold, combination=GAIN, thresholds=(-0.1, -0.2)),
    }


GAIN = Gain(
    exits=(0, 1, 2),
    columns=("margin",),
    knots=(((0.2,),), ((0.3,),), ((),)),
    weights=((0.3, -0.4, 0.1), (0.2, -0.3, 0.1, 0.05, 0.02, 0.03, 0.04, 0.1, -0.1, 0.05, -0.02), (0.0,) * 9),
    class_gains=((0.01, -0.02, 0.03), (0.0, 0.05), ()),
)


def network_of(model, rule, probability=False):
    reads = [Reads(names, probability, top) for names, top in map(rule.reads, range(len(rule.open_exits)))]
    stages = [stage.forward for stage in open_stages(model, rule.open_exits, reads)]
    return Network(stages, reads, lambda given: given)


def decided(model, rule, inputs, *, size, parts, probability=False):
    """Samples, predictions, open exits and probabilities of a walk that takes the inputs in these parts."""
    with torch.inference_mode():
        walk = StreamWalk(network_of(model, rule, probability), rule, (inputs[:3],), size, EXECUTOR)
        found, start = [], 0
        for part in parts:
            walk.push(np.arange(start, start + part), (inputs[start : start + part],))
            found += walk.fetched()
            start += part
        walk.end()
        found += walk.fetched(every=True)
    joined = Answers(*(None if each[0] is None else np.concatenate(each) for each in zip(*found, strict=True)))
    order = np.argsort(joined.samples)
    assert joined.samples[order].tolist() == [*range(start)]  # each once
    return walk, Answers(*(None if each is None else each[order] for each in joined))


def always():
    return True


NAMES = "threshold, ties, lottery, patience, geometric mean"
OTHERS = "nobody leaves, everybody leaves, one exit, streak, mixture, vote, gain"


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in [(8, [20, 1, 40]), (20, [5, 7]), (7, [61])]]


@interpreted
@pytest.mark.parametrize(
    "name", [*NAMES.split(", "), *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS.split(", "))]
)
@pytest.mark.parametrize(("size", "parts"), [(2, [9, 1, 1]), *SLOW])  # batches: a group of four, one, a partial one
def test_a_walk_decides_as_a_replay_does(model, inputs, table, name, size, parts):
    rule = rules(table)[name]
    _, answers = decided(model, rule, inputs, size=size, parts=parts)
    expected = replay(rule, table.take(np.arange(sum(parts))))
    np.testing.assert_array_equal(np.asarray(rule.open_exits)[answers.open_indices], expected.exits)
    np.testing.assert_array_equal(answers.predictions, expected.predictions)


@interpreted
@pytest.mark.parametrize("size", [1, 5])
def test_gains_of_several_columns_keep_the_probabilities_of_answers(model, inputs, size):
    labels = np.random.default_rng(2).integers(4, size=61)
    table = record(model, (inputs, labels), features=("logit_margin", "max_probability"), progress=False)
    rule = calibrate.learned_stopping(COSTS, "60%", table)
    assert len(rule.combination.columns) == 3
    walk, answers = decided(model, rule, inputs, size=size, parts=[16], probability=True)
    assert walk.by_kernel
    expected = replay(rule, table.take(np.arange(16)))
    assert len({*expected.exits.tolist()}) > 1
    np.testing.assert_array_equal(answers.open_indices, expected.exits)
    np.testing.assert_array_equal(answers.predictions, expected.predictions)
    probabilities = table.column("max_probability")[np.arange(16), expected.exits]
    np.testing.assert_allclose(answers.probabilities, probabilities, rtol=1e-6)  # of float32


@interpreted
@pytest.mark.slow
def test_one_batch_is_answered_by_itself_and_a_walk_takes_the_numbers_of_another_policy(model, inputs, table):
    first = rules(table)["threshold"]
    with torch.inference_mode():
        walk = BatchWalk(network_of(model, first, probability=True), first, (inputs[:3],), 32, EXECUTOR)
    assert [*walk.sizes] == [32, 16]
    for rule in (first, rules(table)["ties"], rules(table)["lottery"]):
        for count in (1, 9, 32):
            with torch.inference_mode():
                walk.use(rule)
                found = walk.one_batch(np.arange(count), (inputs[:count],), always)
            order, expected = np.argsort(found.samples), replay(rule, table.take(np.arange(count)))
            np.testing.assert_array_equal(found.open_indices[order], expected.exits)
            np.testing.assert_array_equal(found.predictions[order], expected.predictions)
            assert ((found.probabilities > 0.25) & (found.probabilities <= 1)).all()


@interpreted
@pytest.mark.parametrize("name", ["threshold", "ties", "lottery", "patience", "mixture", "vote", "gain"])
def test_one_sample_is_answered_wherever_it_lies(model, inputs, table, name):
    rule = rules(table)[name]
    memory = torch.zeros(4 * 61 + 1)  # no sample begins at a whole word of eight bytes
    memory[1:] = inputs.flatten()
    odd, turned = memory[1:].view(61, 4), inputs.t().contiguous().t()
    expected = replay(rule, table)
    with torch.inference_mode():
        walk = BatchWalk(network_of(model, rule), rule, (inputs[:1],), 1, EXECUTOR)
        for sample in range(12):
            for given_inputs in (inputs, odd, turned):
                found = walk.one_batch(np.array([sample]), (given_inputs[sample : sample + 1],), always)
                assert found.samples.tolist() == [sample]
                assert np.asarray(rule.open_exits)[found.open_indices] == expected.exits[sample]
                assert found.predictions == expected.predictions[sample]


class Places(nn.Module):
    """A stage that hands on numbers of rows of a table, which other numbers would be outside of."""

    def forward(self, inputs):
        return inputs, (inputs > 0).long()


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(2, 1)

    def forward(self, features, places):
        return features + self.rows(places)[..., 0], places


class NotRun(Captured):
    """What a device has captured and not run: its tensors hold whatever lay in their memory."""

    def __init__(self, work):
        super().__init__(work)
        work()
        *before, last = work.func.__self__.rooms
        handed_through = {each.data_ptr() for room in before for each in room.state}
        for each in last.state:
            if each.data_ptr() not in handed_through:
                each.fill_(1 << 40)


@interpreted
def test_a_stage_is_captured_with_what_the_stage_before_makes(inputs):
    model = MultiExitModel([Places(), Looked(), Looked()], [nn.Linear(4, 3) for _ in range(3)]).eval()
    rule = Threshold((np.inf, np.inf), costs=COSTS)
    with torch.inference_mode():
        walk = BatchWalk(network_of(model, rule), rule, (inputs[:1],), 1, Executor(NotRun, ByPython))
        assert walk.one_batch(np.array([0]), (inputs[:1],), always).open_indices.tolist() == [2]


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_samples_with_unusable_logits_are_named_and_the_others_answered(model, inputs, table):
    broken = inputs[:40].clone()
    broken[13] = float("nan")
    rule = rules(table)["nobody leaves"]
    _, answers = decided(model, rule, broken, size=8, parts=[40])
    assert answers.open_indices[13] == -1
    answered = usable(rule, [answers])
    assert len(next(answered).samples) == 39
    with pytest.raises(BadInput, match="unusable logits for 1 samples, the first is sample 13, at exit 0"):
        next(answered)


@interpreted
def test_a_walk_that_was_left_starts_empty_again(model, inputs, table):
    rule = rules(table)["nobody leaves"]
    walk, _ = decided(model, rule, inputs, size=8, parts=[8])
    with torch.inference_mode():
        walk.push(np.arange(30), (inputs[:30],))
        walk.reset()
        walk.push(np.arange(5), (inputs[:5],))
        walk.end()
        (answers,) = walk.fetched(every=True)
    assert sorted(answers.samples.tolist()) == [*range(5)]


@interpreted
def test_batches_run_in_groups_where_enough_wait_and_at_once_where_nothing_else_runs(model, inputs, table):
    rule = rules(table)["everybody leaves"]
    with torch.inference_mode():
        walk = StreamWalk(network_of(model, rule), rule, (inputs[:1],), 1, EXECUTOR)
        launched = []
        walk._launch = lambda *given: launched.append(given[-1]) or StreamWalk._launch(walk, *given)
        for count in (1, 11):
            walk.push(np.arange(count), (inputs[:count],))
        walk.end()
    assert walk.group == 4
    assert launched == [1, 1, 1, 1, 4, 4]  # the first alone, then up to where a group begins


class Workspace(Joined):
    """A stage that computes in memory of its own, which concurrent batches would share."""

    def __init__(self):
        super().__init__()
        self.workspaces = {"made": torch.zeros(64, 6)}

    def forward(self, features, signs):
        made, signs = super().forward(features, signs)
        return self.workspaces["made"][: len(made)].copy_(made).clone(), signs


@interpreted
@pytest.mark.parametrize(("second", "expected"), [(Joined, {0, 1, 2}), (Workspace, {0, 2})])
def test_batches_of_stages_that_write_to_memory_of_their_own_run_one_after_another(
    model, inputs, table, second, expected
):
    rule, found = rules(table)["threshold"], set()
    changed = MultiExitModel([model.stages[0], second(), model.stages[2]], model.heads).eval()
    network = network_of(changed, rule)
    launched = [stage.logits for stage in open_stages(changed, rule.open_exits, network.reads)]

    def run_concurrently(works):
        found.update(works[0].args[:1] if len(works) > 1 else ())
        return [work() for work in works]

    with torch.inference_mode():
        executor = Executor(lambda work: work() or Captured(work), EXECUTOR.compile, run_concurrently)
        StreamWalk(Network(*network[:3], launched), rule, (inputs[:1],), 2, executor)
    assert found == expected


class Interpreted(Deciding):
    """Decides on the host as on a device: the same walks, without one."""

    missing = missing_for_one = ""

    def executor(self, lanes, *, alone):
        return EXECUTOR, None


def predictor_of(model, rule, size, *, decide="device", **options):
    made = Predictor(model, rule, batch_size=size, **options)
    reads = [stage.reads for stage in made.backend.stages]
    given = made.backend.runs, reads, made.backend.admit, torch.device("cpu"), decide, made.backend.stages
    made.backend.deciding = Interpreted(*given)
    made.backend.supports_single_sample = False
    return made.with_policy(rule)


@interpreted
@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["threshold", "lottery", "patience", "mixture"]),
    st.integers(1, 9) | st.just(16),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_a_stream_is_decided_alike_however_it_is_divided_into_calls(model, inputs, table, seed, name, size, calls):
    rng = np.random.default_rng(seed)
    rule = replace(rules(table)[name], salt=seed)
    if name == "threshold":
        rule = replace(rule, thresholds=tuple(np.quantile(table.scores[:, :2], rng.uniform(size=2)).tolist()))
    found, start, exits = predictor_of(model, rule, size), 0, []
    for count, way in calls:
        part = inputs[start : start + count]
        start += len(part)
        if not len(part):
            break
        if way == 0:
            exits.append(found(part).exits)
        elif way == 1:
            exits.append(found.run([*part.split(5)], progress=False).exits)
        elif way == 2:
            exits += [found(each).exits for each in part.split(1)]
        else:
            answers = [*found.stream([part])]
            order = np.argsort(np.concatenate([each.samples for each in answers]))
            exits.append(np.concatenate([each.open_indices for each in answers])[order])
    expected = replay(rule, table.take(np.arange(start)))
    np.testing.assert_array_equal(np.concatenate(exits), expected.exits)
    assert found.decided_by == "the device decides"


@interpreted
@pytest.mark.slow
def test_rooms_hold_all_who_come(model, inputs, table):
    for salt in (2767, 2657, 2520):  # five of a batch of six wait for each stage when the last samples come
        rule = Lottery(costs=COSTS, exit_rates=(0.12, 0.12, 0.76), salt=salt)
        _, answers = decided(model, rule, inputs, size=6, parts=[59])
        np.testing.assert_array_equal(answers.open_indices, replay(rule, table.take(np.arange(59))).exits)


@interpreted
def test_answers_are_taken_across_the_end_of_their_memory(model, inputs, table):
    rows = np.arange(183) % 61
    found = predictor_of(model, rules(table)["threshold"], 1)(inputs[rows])
    expected = replay(rules(table)["threshold"], table)
    np.testing.assert_array_equal(found.exits, expected.exits[rows])
    np.testing.assert_array_equal(found.predictions, expected.predictions[rows])


@interpreted
def test_batches_that_decide_together_are_not_handed_over_together(model, inputs, table):
    quota = calibrate.certified_batch(calibrate.geometric)(COSTS, "70%", table)
    found = predictor_of(model, quota, 8)(inputs)
    np.testing.assert_array_equal(found.exits, replay(quota, table, batch_size=8).exits)


@interpreted
@pytest.mark.slow
def test_auto_keeps_the_faster_way_and_says_why(model, inputs, table, monkeypatch):
    rule = rules(table)["threshold"]
    found = predictor_of(model, rule, 8, decide="auto")
    assert len(found(inputs[:8])) == 8
    assert found.decided_by == "the host decides about the first batches"
    np.testing.assert_array_equal(found(inputs, samples=np.arange(61)).exits, replay(rule, table).exits)
    assert found.decided_by.startswith("the host decides about batches of 8: ")  # an interpreter is slow
    assert " for 61 samples, the device takes " in found.decided_by
    patient = found.with_policy(calibrate.certified_batch(calibrate.geometric)(COSTS, "70%", table))
    patient(inputs)
    assert "Quota needs it" in patient.decided_by


@interpreted
def test_single_samples_and_batches_of_one_have_walks_of_their_own(model, inputs, table):
    rule = rules(table)["lottery"]
    found = predictor_of(model, rule, 1, probabilities=True)
    expected = replay(rule, table)
    ones = [found(inputs[row : row + 1], samples=[row]) for row in range(5)]
    np.testing.assert_array_equal(np.concatenate([each.exits for each in ones]), expected.exits[:5])
    assert all(0.25 <= each.probabilities[0] <= 1 for each in ones)
    np.testing.assert_array_equal(found(inputs[:20], samples=np.arange(20)).exits, expected.exits[:20])
    broken = inputs[:1] * float("nan")
    with pytest.raises(BadInput, match="the first is sample 7, at exit 0"):
        found(broken, samples=[7])


class Tinted(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 1)

    def forward(self, pictures):
        return self.mix(pictures).tanh()


@pytest.fixture
def tinted():
    """A network whose answers change with the memory layout that a picture is taken for."""
    torch.manual_seed(0)
    heads = [nn.Sequential(nn.Flatten(), nn.Linear(48, 5)) for _ in range(2)]
    return MultiExitModel([Tinted(), Tinted()], heads).eval()


PICTURES = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(3))
NEVER = Threshold((np.inf,), costs=(1.0, 2.0))


def alone(found, pictures):
    return [int(found(pictures[row : row + 1].clone(), samples=[row]).predictions[0]) for row in range(len(pictures))]


def labels_of(model):
    return model(PICTURES)[-1].argmax(1).tolist()


@interpreted
@pytest.mark.parametrize("changed", ["weights", "rule"])
def test_a_walk_that_takes_another_layout_does_not_get_single_samples_of_the_old_one(tinted, changed):
    found, expected = predictor_of(tinted, NEVER, 8), labels_of(tinted)
    assert alone(found, PICTURES) == expected
    if changed == "weights":
        tinted.double().float()  # the same numbers elsewhere
    else:
        found = found.with_policy(Patience(patience=1, costs=(1.0, 2.0)))
    found(PICTURES[:1].clone().contiguous(memory_format=torch.channels_last))
    assert alone(found, PICTURES) == expected


@interpreted
def test_single_samples_in_a_class_of_their_own_do_not_speak_for_others(tinted):
    found, expected = predictor_of(tinted, NEVER, 8), labels_of(tinted)
    for _ in range(2):
        assert found(nn.Parameter(PICTURES[:1].clone())).predictions[0] == expected[0]
    assert found(PICTURES[1:2].numpy()).predictions[0] == expected[1]
    turned = PICTURES.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    given = [nn.Parameter(turned[row : row + 1]) for row in range(len(turned))]
    assert [int(found(each).predictions[0]) for each in given] == expected


class Queued(ByPython):
    """A program whose launches wait in a queue, as in a stream, until the host looks for answers."""

    queue, interrupted, lost = [], False, False

    def launch(self):
        Queued.queue.append(partial(self.run, [] if Queued.lost else self.program))

    def wait(self, is_done):
        if Queued.interrupted:
            Queued.interrupted = False
            raise KeyboardInterrupt
        while not is_done() and Queued.queue:
            Queued.queue.pop(0)()

    def finish(self):
        while Queued.queue:
            Queued.queue.pop(0)()


@interpreted
def test_an_interrupted_sample_is_not_answered_in_place_of_the_next(tinted, monkeypatch):
    monkeypatch.setattr(Interpreted, "executor", lambda *_, **__: (Executor(Captured, Queued), None))
    found, expected = predictor_of(tinted, NEVER, 8), labels_of(tinted)
    assert alone(found, PICTURES[:4]) == expected[:4]
    Queued.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        found(PICTURES[:1].clone(), samples=[0])
    assert len(Queued.queue) == 1
    late = torch.full((1, 3, 4, 4), torch.nan)  # of work that stands in the queue behind the sample that was left
    monkeypatch.setattr(Queued, "finish", lambda self: (Queued.queue.pop(0)(), late.copy_(PICTURES[5:6])))
    assert found(late, samples=[5]).predictions[0] == expected[5]
    assert not Queued.queue
    assert alone(found, PICTURES) == expected


@interpreted
@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_awaited_on_the_device_of_the_network(tinted, monkeypatch, count):
    inside, awaited = [], []

    @contextmanager
    def on(device):
        inside.append(device)
        yield
        inside.pop()

    class Watched(ByPython):
        def wait(self, is_done):
            awaited.append(bool(inside))
            super().wait(is_done)

    monkeypatch.setattr(device_walk, "on", on)
    monkeypatch.setattr(Interpreted, "executor", lambda *_, **__: (Executor(Captured, Watched), None))
    found = predictor_of(tinted, NEVER, 8)
    for _ in range(3):
        [*found.answers(PICTURES[:count].clone())]
    assert len(awaited) >= 3
    assert all(awaited)


@interpreted
@pytest.mark.parametrize("count", [1, 3])
def test_a_device_that_ends_without_answers_is_named(tinted, monkeypatch, count):
    monkeypatch.setattr(Interpreted, "executor", lambda *_, **__: (Executor(Captured, Queued), None))
    found = predictor_of(tinted, NEVER, 8)
    for _ in range(3):
        (answers,) = found.answers(PICTURES[:count].clone())
        assert answers.predictions.tolist() == labels_of(tinted)[:count]
    monkeypatch.setattr(Queued, "lost", True)
    with pytest.raises(AlightError, match="the device has ended a batch without its answers"):
        [*found.answers(PICTURES[:count].clone())]


@interpreted
def test_a_loader_that_fails_leaves_what_was_answered_and_empty_rooms(model, inputs, table):
    def loader():
        yield inputs[:32]
        yield inputs[32:48]
        raise OSError("disk gone")

    rule = rules(table)["lottery"]
    found = predictor_of(model, rule, 2)
    with pytest.raises(OSError, match="disk gone") as caught:
        found.run(loader(), progress=False)
    assert sorted(np.concatenate([each.samples for each in caught.value.finished])) == [*range(48)]
    np.testing.assert_array_equal(found(inputs, samples=np.arange(61)).exits, replay(rule, table).exits)


@interpreted
def test_the_host_decides_about_more_shapes_than_are_captured(model, inputs, table, monkeypatch):
    monkeypatch.setattr(deciding, "SHAPES", 2)
    rule = rules(table)["lottery"]
    found, expected = predictor_of(model, rule, 8), replay(rule, table)
    for size in (2, 4, 8, 4):
        np.testing.assert_array_equal(found(inputs[:size], samples=np.arange(size)).exits, expected.exits[:size])
    device, host = found.decided_by.split("; ")
    assert device == "the device decides"
    assert host.startswith("the host decides about batches of further shapes, 2 are captured: ")


def test_numbers_are_rounded_to_half_precision_once():
    numbers = np.random.default_rng(0).normal(size=4000) * 10
    ties = np.repeat(1 + 2.0**-11 * np.arange(1, 400, 2), 3) + np.tile([-1e-10, 0.0, 1e-10], 200)
    both = np.concatenate([numbers, ties, -ties, [0.0, -np.inf, -1e9, -1e-9]])
    np.testing.assert_array_equal(half(torch.from_numpy(both)).numpy(), numpy_half(both))


def test_the_host_decides_where_no_gpu_is(model, table):
    rule = rules(table)["threshold"]
    assert Predictor(model, rule).decided_by == "the host decides"
    with pytest.raises(BadInput, match="a GPU can decide and the network runs on cpu: leave decide out"):
        Predictor(model, rule, settings=RunSettings(decide="device"))
    with pytest.raises(BadInput, match="decide 'gpu': choose auto, device or host"):
        RunSettings(decide="gpu")


@interpreted
def test_a_loader_that_fails_at_once_leaves_what_came_before(model, inputs, table):
    def loader():
        yield from inputs[:20].split(4)
        raise OSError("disk gone")

    found = predictor_of(model, rules(table)["lottery"], 4)
    with pytest.raises(OSError, match="disk gone") as caught:
        found.run(loader(), progress=False)
    assert sorted(np.concatenate([each.samples for each in caught.value.finished])) == [*range(20)]


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("decide", ["auto", "device"])
def test_unusable_logits_in_the_first_batches_leave_the_others_answered_and_the_walk_free(model, inputs, table, decide):
    broken = inputs.clone()
    broken[50] = float("nan")
    found = predictor_of(model, rules(table)["nobody leaves"], 8, decide=decide)
    with pytest.raises(BadInput, match="the first is sample 50") as caught:
        found(broken, samples=np.arange(61))
    assert sum(len(each.samples) for each in caught.value.finished) == 60
    assert not found.backend.deciding.busy  # though the error is kept


@interpreted
def test_weights_that_were_moved_are_captured_again(table, inputs):
    torch.manual_seed(0)
    own = MultiExitModel([nn.Linear(4, 4), nn.Linear(4, 4)], [nn.Linear(4, 3), nn.Linear(4, 3)]).eval()
    rule = Threshold((0.3,), costs=(1.0, 2.0))
    found = predictor_of(own, rule, 8)
    deciding = found.backend.deciding
    deciding.modules = found.backend.stages
    found(inputs)
    found(inputs[:1])
    before = dict(deciding.walks)
    found(inputs)
    assert deciding.walks == before
    own.double().float()
    found(inputs)
    found(inputs[:1])
    assert len(deciding.walks) == 2
    assert not {id(walk) for walk in deciding.walks.values()} & {id(walk) for walk in before.values()}


class Counted(Captured):
    """Counts captures, of which one may be interrupted."""

    count, interrupted = 0, False

    def __init__(self, work):
        super().__init__(work)
        Counted.count += 1
        if Counted.interrupted:
            raise KeyboardInterrupt


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(Counted, "count", 0)
    monkeypatch.setattr(Interpreted, "executor", lambda *_, **__: (Executor(Counted, ByPython), None))
    return Counted


@interpreted
@pytest.mark.parametrize("count", [1, 3, 20])  # a sample, a batch alone, many batches
@pytest.mark.parametrize("change", ["weight", "layer", "kind of layer"])
def test_what_was_replaced_between_layers_that_stay_is_captured_again(inputs, counted, count, change):
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    own = MultiExitModel(blocks, [nn.Linear(4, 3), nn.Linear(4, 3)]).eval()
    found = predictor_of(own, NEVER, 8)
    for _ in range(2):
        found(inputs[:count])
    before = counted.count
    found(inputs[:count])
    assert counted.count == before > 0
    if change == "weight":
        blocks[0][1].weight = nn.Parameter(torch.zeros(4, 4))
    else:
        blocks[0][1] = nn.Linear(4, 4) if change == "layer" else nn.Tanh()
    found(inputs[:count])
    assert counted.count == 2 * before


@interpreted
@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_capture_that_was_interrupted_leaves_nothing_of_other_weights(inputs, counted, monkeypatch, count):
    own = MultiExitModel([nn.Linear(4, 4), nn.Linear(4, 4)], [nn.Linear(4, 3), nn.Linear(4, 3)]).eval()
    found = predictor_of(own, NEVER, 8)
    found(inputs[:count])
    before = counted.count
    own.double().float()
    monkeypatch.setattr(counted, "interrupted", True)
    with pytest.raises(KeyboardInterrupt):
        found(inputs[:count])
    monkeypatch.setattr(counted, "interrupted", False)
    found(inputs[:count])
    assert counted.count == 2 * before + 1
    assert not found.backend.deciding.busy


@interpreted
def test_a_change_of_policy_that_was_interrupted_is_made_again(model, inputs, table, monkeypatch):
    never, always = (rules(table)[f"{name} leaves"] for name in ("nobody", "everybody"))
    found = predictor_of(model, never, 8)
    assert (found(inputs[:8]).exits == 2).all()

    def interrupted(*_):
        raise KeyboardInterrupt

    other = found.with_policy(always)
    with monkeypatch.context() as patch:
        patch.setattr(Threshold, "numbers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            other(inputs[:8])
    assert not found.backend.deciding.busy
    assert (other(inputs[:8]).exits == 0).all()
    assert (found(inputs[:8]).exits == 2).all()


@interpreted
@pytest.mark.parametrize("lost", [0, 3])  # samples that wait in a walk which fails altogether
def test_a_batch_that_the_device_has_no_memory_for_leaves_all_that_came_before(lost):
    rule = Lottery(costs=(1.0, 2.0), exit_rates=(0.5, 0.5), salt=3)
    head = nn.Sequential(nn.AdaptiveAvgPool1d(3), nn.Linear(3, 3))
    model = MultiExitModel([nn.Tanh(), nn.Tanh()], [head, head]).eval()
    data = [torch.randn(3, size, generator=torch.Generator().manual_seed(0)) for size in (9, 5, 7, 5, 7, 9)]
    found, given = predictor_of(model, rule, 4), []
    found.run(data, progress=False)

    def full(inputs):
        given.append(inputs)
        if len(given) == len(data):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inputs

    first, *_ = walks = [*found.backend.deciding.walks.values()]
    for walk in walks:
        walk.admit = full
    if lost:
        first.end = None  # which is no function
    with pytest.raises(torch.OutOfMemoryError) as caught:
        found.run(data, samples=np.arange(18), progress=False)
    assert sorted(np.concatenate([each.samples for each in caught.value.finished])) == [*range(lost, 15)]


@interpreted
def test_a_walk_in_use_is_not_timed(model, inputs, table):
    found = predictor_of(model, rules(table)["nobody leaves"], 4)
    deciding = found.backend.deciding
    deciding.modules = found.backend.stages
    stream, size = found.stream([*inputs.split(4)]), 4
    answered = [next(stream)]
    with found.backend.running(), deciding.replays(size) as replays:
        assert not replays
    answered += stream
    assert sum(len(each.samples) for each in answered) == 61
    with found.backend.running(), deciding.replays(size) as replays:
        assert len(replays) == 3
    np.testing.assert_array_equal(
        found(inputs, samples=np.arange(61)).exits, replay(rules(table)["nobody leaves"], table).exits
    )
    assert (stage_seconds(found, (inputs[:4],)) > 0).all()


class Later(TorchDispatchMode):
    """Streams as a GPU has them: what is written is queued, and done in any order that streams and events allow.

    Some runs upload as early as can be and do all else as late, others go on in any stream now and then.
    """

    WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

    def __init__(self, monkeypatch, rng):
        super().__init__()
        self.rng, self.any_order, self.running = rng, rng.random() < 0.5, False
        self.streams = [Queue() for _ in range(3)]
        self.current, self.uploading = self.streams[0], self.streams[2]
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))

    def __torch_dispatch__(self, function, types, given=(), options=None):
        if function not in self.WRITES or self.running:
            return function(*given, **(options or {}))
        self.later(lambda: function(*given, **(options or {})))
        return given[0]

    def later(self, work):
        self.current.waiting.append((work, None))
        while not (self.any_order and self.rng.random() < 0.3):
            if not self.step(self.rng.permutation(3) if self.any_order else [2]):
                break

    def step(self, streams=(2, 0, 1)):
        """Go on in one of the streams; return whether one could."""
        for index in streams:
            stream = self.streams[index]
            if stream.waiting and (stream.waiting[0][1] is None or stream.waiting[0][1]()):
                work, _ = stream.waiting.pop(0)
                self.running = True
                work()
                self.running = False
                stream.done += 1
                return True
        return False

    @contextmanager
    def entered(self, stream):
        before = self.current
        self.current = stream or before
        yield
        self.current = before


class Queue:
    def __init__(self):
        self.waiting, self.done = [], 0

    def reached(self):
        """What says whether all that has come by now is done."""
        goal = self.done + len(self.waiting)
        return lambda: self.done >= goal

    def wait_stream(self, other):
        self.waiting.append((lambda: None, other.reached()))

    def wait_event(self, event):
        self.waiting.append((lambda: None, event.reached))


class Event:
    def __init__(self, later):
        self.later, self.reached = later, lambda: True

    def record(self, stream):
        self.reached = stream.reached()

    def query(self):
        return self.reached()

    def synchronize(self):
        while not self.reached():
            assert self.later.step(), "all streams wait for each other"


class Device(torch.Tensor):
    """Lies on the device, says the walk."""

    is_cuda = True


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_streams_changes_an_answer(model, inputs, table, monkeypatch, seed):
    """Inputs of host and device are interleaved, streams change, and runs are left in the middle."""
    rng, rule = np.random.default_rng(seed), rules(table)["lottery"]
    size = int(rng.choice([2, 3, 5]))
    monkeypatch.setattr(device_walk, "SLOTS", int(rng.choice([3, 4, 6, 12])))  # the last two run batches in groups
    with torch.inference_mode(), Later(monkeypatch, rng) as later:
        later.running = True
        captured = Executor(lambda work: Captured(lambda: later.later(work)), ByPython)
        walk = StreamWalk(network_of(model, rule), rule, (inputs[:3],), size, captured, later.uploading)
        later.running = False
        for last in (False, True):
            found, start = [], 0
            while start < len(inputs) and (last or rng.random() < 0.6):
                count = int(rng.integers(1, 4 * size + 3))
                later.current = later.streams[rng.integers(2)]
                part = inputs[start : start + count]
                walk.push(
                    np.arange(start, start + len(part)), (part.as_subclass(Device) if rng.random() < 0.4 else part,)
                )
                found += walk.fetched()
                start += len(part)
            if last:
                walk.end()
                found += walk.fetched(every=True)
            walk.reset()
    expected = replay(rule, table).exits
    samples, exits = (np.concatenate([getattr(each, name) for each in found]) for name in ("samples", "open_indices"))
    assert sorted(samples) == [*range(61)]
    np.testing.assert_array_equal(exits, expected[samples])


@interpreted
def test_under_autocast_the_host_decides(model, inputs, table):
    rule = rules(table)["threshold"]
    found, host = predictor_of(model, rule, 8, probabilities=True), Predictor(model, rule, probabilities=True)
    for _ in range(2):  # before and after a walk was captured
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert np.array_equal(found(inputs).probabilities, host(inputs).probabilities)
            assert np.array_equal(found(inputs[:1]).probabilities, host(inputs[:1]).probabilities)
        assert "the host decides: under torch.autocast it has to, give dtype instead" in found.decided_by
        assert np.array_equal(found(inputs).probabilities, host(inputs).probabilities)


class Cached(Joined):
    """A stage that keeps what it computes from its weights, as LeViT does, until it is trained."""

    def __init__(self):
        super().__init__()
        self.cache, self.weight = {}, nn.Parameter(torch.ones(6))

    def forward(self, features, signs):
        if "doubled" not in self.cache:
            self.cache["doubled"] = self.weight * 2
        features, signs = super().forward(features, signs)
        return features * self.cache["doubled"], signs

    def train(self, mode=True):
        self.cache = {}
        return super().train(mode)


@interpreted
def test_what_a_stage_kept_is_captured_again_once_it_has_let_go_of_it(model, inputs, table):
    rule, captures = rules(table)["threshold"], []
    changed = MultiExitModel([model.stages[0], Cached(), model.stages[2]], model.heads).eval()
    found = predictor_of(changed, rule, 8)
    found.backend.deciding.executor = lambda *_, **__: (
        Executor(lambda work: captures.append(work) or work() or Captured(work), ByPython),
        None,
    )
    found(inputs)
    count = len(captures)
    found(inputs)
    assert len(captures) == count > 0
    changed.train().eval()
    found(inputs)
    assert len(captures) == 2 * count


FOREIGN = {"scale": torch.ones(6)}


class Foreign(Joined):
    """A stage that reads what it does not hold."""

    def forward(self, features, signs):
        features, signs = super().forward(features, signs)
        return features * FOREIGN["scale"], signs


@interpreted
def test_the_host_decides_where_stages_read_what_they_do_not_hold(model, inputs, table):
    rule = rules(table)["threshold"]
    changed = MultiExitModel([model.stages[0], Foreign(), model.stages[2]], model.heads).eval()
    found = predictor_of(changed, rule, 8)
    with pytest.warns(UserWarning, match="the host decides: a stage uses tensors that are no parameters or buffers"):
        assert len(found(inputs)) == len(inputs)
    assert not found.backend.deciding.addresses  # which would keep weights
    assert found.decided_by.endswith("of its modules: register_buffer them")


@interpreted
def test_the_host_decides_about_gains_that_no_kernel_scores(model, inputs, table):
    """Their step looks classes up in a tensor that a cache of 64 holds: captured work would read it after that."""
    rule = Streak(threshold=-0.1, patience=1, costs=COSTS, combination=GAIN)
    found = predictor_of(model, rule, 8)
    np.testing.assert_array_equal(found(inputs).exits, replay(rule, table).exits)
    assert found.decided_by == "the host decides: Streak needs it"


@interpreted
def test_batches_of_shapes_that_are_not_captured_run_together(monkeypatch):
    ran = []

    class Second(nn.Module):
        def forward(self, inputs):
            ran.append(inputs.shape)
            return inputs.tanh()

    class Head(nn.Module):
        def forward(self, inputs):
            return inputs.mean(1, keepdim=True) * torch.arange(3.0)

    monkeypatch.setattr(deciding, "SHAPES", 1)
    rule = Lottery(costs=(1.0, 2.0), exit_rates=(0.5, 0.5), salt=3)
    model = MultiExitModel([nn.Tanh(), Second()], [Head(), Head()]).eval()
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 5 if index % 8 == 0 else 7, generator=generator) for index in range(64)]
    expected = Predictor(model, rule, batch_size=4).run(data, progress=False)
    alone = sum(shape[1] == 7 for shape in ran)
    found = predictor_of(model, rule, 4)
    ran.clear()
    assert np.array_equal(found.run(data, progress=False).predictions, expected.predictions)
    assert sum(shape[1] == 7 for shape in ran) < 1.3 * alone


@interpreted
def test_what_leaves_less_memory_than_it_takes_is_not_kept(model, inputs, table, monkeypatch):
    rule, free = rules(table)["threshold"], iter([9 * 2**30, 4 * 2**30])
    monkeypatch.setattr(Interpreted, "_free_memory", lambda _: next(free))
    found = predictor_of(model, rule, 8, decide="auto")
    assert np.array_equal(found(inputs).exits, replay(rule, table).exits)
    assert found.decided_by == (
        "the host decides: captured batches of 8 take 5,368,709,120 bytes, and leave 4,294,967,296 free"
    )
