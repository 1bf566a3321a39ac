"""CUDA graphs are for GPUs, and captured of full batches."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from alight.engine.backends.torch.captures import Captures
from alight.engine.backends.torch.prepare import Captured, Graphed
from alight.engine.predictor import Predictor
from alight.engine.recorder import record
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.planning.tune import tune_speed
from alight.policies.policy import Threshold

GRAPHS = RunSettings(device="cpu", graphs=True)
TURNS = SimpleNamespace(in_turn=nullcontext)  # of one thread


@pytest.fixture
def model():
    return MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]).eval()


def test_without_a_gpu_the_switch_is_refused(model):
    with pytest.raises(BadInput, match="need a GPU and the network runs on cpu: leave graphs out"):
        Predictor(model, Threshold((0.5,), costs=(1.0, 2.0)), settings=GRAPHS)
    with pytest.raises(BadInput, match="need a GPU"):
        record(model, torch.zeros(5, 4), settings=GRAPHS, progress=False)


@pytest.mark.usefixtures("short_trials")
def test_without_a_gpu_the_switch_is_not_tried(model):
    tuned = tune_speed(model, batch_size=8, example=torch.zeros(1, 4), settings=RunSettings(device="cpu", threads=1))
    assert not any("graphs" in trial.switches for trial in tuned.trials)


def test_before_a_full_batch_came_smaller_ones_are_launched():
    part = Graphed(0, lambda inputs: 2 * inputs, None, 4, captures=TURNS, every=[])
    assert part(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert not part.captured


class Replayed:
    """What a CUDA graph does, without a GPU: the same tensors are read and written every time."""

    def __init__(self, run, given):
        self.run, self.given, self.made = run, given, run(*given)

    def replay(self):
        for there, each in zip(self.made, self.run(*self.given), strict=True):
            there.copy_(each)


def test_partial_batches_are_replayed_in_the_first_rows_and_keep_their_outputs(monkeypatch):
    def run(inputs):
        return 2 * inputs, inputs.repeat_interleave(3, dim=0), inputs.sum()  # a row for each sample, three, and none

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    part = Graphed(0, run, None, 4, captures=TURNS, every=[])
    batches = torch.arange(24.0).reshape(12, 2).split([4, 1, 3, 4])
    graph = Replayed(run, (torch.full((4, 2), torch.nan),))
    kind = ((batches[0].shape[1:], batches[0].stride(), batches[0].dtype),)
    part.captured[kind] = Captured(graph, graph.given, graph.made[:2], fast=True)
    part.run = None
    kept = [part(batch) for batch in batches]
    for batch, made in zip(batches, kept, strict=True):  # not written over by those after them
        assert torch.equal(made[0], 2 * batch)
        assert torch.equal(made[1], batch.repeat_interleave(3, dim=0))
    part.captured[kind] = Captured(graph, graph.given, graph.made, fast=False)
    assert torch.equal(part(batches[0])[2], batches[0].sum())  # a full batch is handed on whole
    part.run = run
    assert torch.equal(part(batches[1])[0], 2 * batches[1])
    assert torch.equal(part(torch.ones(5, 2))[0], torch.full((5, 2), 2.0))  # larger than what was captured


def part_that_doubles(captures):
    def run(inputs):
        return (2 * inputs,)

    part = Graphed(0, run, None, 4, captures, every=[])
    graph, kind = Replayed(run, (torch.zeros(4, 2),)), ((torch.Size([2]), (2, 1), torch.float32),)
    part.captured[kind] = Captured(graph, graph.given, graph.made, fast=True)
    return part, graph


@pytest.fixture
def waited(monkeypatch):
    """Which streams wait for which, where every thread has one of its own."""
    found, streams = [], {}

    class Stream:
        def wait_stream(self, other):
            found.append((self, other))

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.setdefault(get_ident(), Stream()))
    return found


def test_threads_replay_one_after_another_and_wait_for_the_stream_of_the_other(waited, monkeypatch):
    part, graph = part_that_doubles(Captures(0))
    replay = graph.replay
    monkeypatch.setattr(graph, "replay", lambda: (replay(), time.sleep(0)))  # as torch's, which lets others run

    def wrong(number):
        batch = torch.full((4, 2), float(number))
        return sum(not torch.equal(part(batch)[0], 2 * batch) for _ in range(300))

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(wrong, range(2))] == [0, 0]
    assert waited
    assert all(one is not other for one, other in waited)


def test_under_autocast_kernels_are_launched_for_graphs_know_nothing_of_it():
    part, graph = part_that_doubles(TURNS)
    graph.replay = None  # would fail
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(part(torch.ones(4, 2))[0], torch.full((4, 2), 2.0))


def test_what_was_captured_with_weights_that_moved_is_not_replayed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    layer, batch = nn.Linear(2, 3), torch.ones(4, 2)
    weights = [each.detach() for each in layer.parameters()]  # a graph reads these, wherever the layer's are

    def as_captured(inputs):
        return (nn.functional.linear(inputs, *weights),)

    parts = []
    parts += [Graphed(index, lambda inputs: (layer(inputs),), layer, 4, TURNS, parts) for index in range(2)]
    part, other = parts
    other.captured["shape"] = None  # torch frees what it computes in together with the first one's
    monkeypatch.setattr(part, "_captured", lambda state: Captured(graph, graph.given, graph.made, fast=True))
    with torch.inference_mode():
        graph = Replayed(as_captured, (batch,))
        part(batch)
        layer.load_state_dict({"weight": torch.zeros(3, 2), "bias": torch.ones(3)})  # in place: the graph sees it
        assert part(batch)[0].tolist() == [[1.0] * 3] * 4
        assert part.captured
        layer.load_state_dict({"weight": torch.zeros(3, 2), "bias": torch.full((3,), 2.0)}, assign=True)
        weights = [each.detach() for each in layer.parameters()]
        assert part(batch[:3])[0].tolist() == [[2.0] * 3] * 3
        assert not part.captured
        assert not other.captured
        graph = Replayed(as_captured, (batch,))
        assert part(batch)[0].tolist() == [[2.0] * 3] * 4
