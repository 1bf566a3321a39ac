"""Waiting samples fill the free rows of other batches, none is lost, and few are moved."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alight.engine.backends.onnx import OnnxBackend
from alight.engine.backends.torch import TorchBackend, rows
from alight.engine.walk import Group, Pool


class Counting:
    """The rows of a backend, and how many were moved."""

    def __init__(self, backend):
        self.take, self.allocate, self.copy, self.moved = backend.take, backend.allocate, backend.move, []

    def move(self, source, rows, target, slots):
        self.moved.append(len(rows))
        self.copy(source, rows, target, slots)


def torch_rows():
    return Counting(TorchBackend.__new__(TorchBackend))


def numpy_rows():
    return Counting(OnnxBackend.__new__(OnnxBackend))


def group(samples, own=True, layout=torch.contiguous_format):
    """Samples whose states and memories say which they are."""
    who = torch.as_tensor(samples)
    maps = who.float()[:, None, None, None].expand(-1, 3, 2, 2).contiguous(memory_format=layout)
    return Group(np.asarray(samples), ((np.asarray(samples) * 10,), ()), (maps, who.clone()), own)


def assert_whole(made):
    assert made.recalled[0][0].tolist() == (made.samples * 10).tolist()
    assert made.state[1].tolist() == made.samples.tolist()
    assert torch.equal(made.state[0], made.state[1].float()[:, None, None, None].expand(-1, 3, 2, 2))


def emptied(pool):
    while (rest := pool.rest()) is not None:
        yield rest


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_survivor_comes_out_once_in_full_batches(data):
    size = data.draw(st.integers(1, 7))
    pool, expected, found, number = Pool(size, torch_rows()), [], [], 0
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.sampled_from([size, size, size, 1, 9]))
        staying = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        layout = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last]))
        came = group(range(number, number + count), data.draw(st.booleans()), layout)
        before = [each.clone() for each in came.state]
        made = list(pool.add(came, staying)) if len(staying) else []
        assert all(len(each.samples) == size for each in made)
        if not came.own:
            assert all(map(torch.equal, came.state, before))  # it is somebody else's
        for each in made:
            assert_whole(each)
        if data.draw(st.booleans()):
            pool.compact()
        expected += (staying + number).tolist()
        found += [sample for each in made for sample in each.samples.tolist()]
        number += count
    for rest in emptied(pool):
        assert_whole(rest)
        found += rest.samples.tolist()
    assert sorted(found) == expected


@pytest.mark.parametrize("leaving", [0.1, 0.2, 0.4, 0.6, 0.9])
def test_no_more_rows_are_moved_than_leave_or_stay(leaving):
    rng, pool, size, fewer = np.random.default_rng(0), Pool(50, torch_rows()), 50, 0
    for start in range(0, 5000, size):
        staying = np.flatnonzero(rng.uniform(size=size) > leaving)
        fewer += min(len(staying), size - len(staying))
        list(pool.add(group(range(start, start + size)), staying))
    assert 0 < sum(pool.backend.moved) <= fewer


def test_a_partial_batch_that_was_compacted_needs_no_copy():
    pool = Pool(8, torch_rows())
    moved = pool.backend.moved
    assert not list(pool.add(group(range(8)), np.array([1, 3, 6, 7])))
    pool.compact()
    assert moved == [2]  # 6 and 7, into the rows of 0 and 2
    assert not list(pool.add(group(range(8, 10)), None))
    rest = pool.rest()
    assert moved == [2, 2]  # 8 and 9 once, right behind the others
    assert_whole(rest)
    assert sorted(rest.samples) == [1, 3, 6, 7, 8, 9]


def test_without_a_size_groups_stay_apart():
    (made,) = Pool(None, torch_rows()).add(group(range(6)), np.array([1, 4]))
    assert made.samples.tolist() == [1, 4]
    assert_whole(made)


def test_memory_is_owned_unless_it_was_given_or_holds_two_tensors():
    given, made = torch.zeros(4, 6), torch.zeros(4, 6)
    assert rows.owns((made, torch.zeros(4)), (given,))
    assert not rows.owns((made, given), (given,))
    assert not rows.owns((made, given[:, :3]), (given,))
    assert not rows.owns((made, made.view(4, 2, 3)), ())
    assert not rows.owns((torch.zeros(1, 6).expand(4, 6),), ())
    assert rows.owns(rows.allocate(4, (torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last),)), ())


def test_rows_are_moved_and_taken_in_any_layout():
    source = torch.arange(48.0).view(4, 3, 2, 2).to(memory_format=torch.channels_last)
    for target in (torch.zeros(4, 3, 2, 2), torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)):
        rows.move((source,), np.array([2, 0]), (target,), np.array([3, 1]))
        assert torch.equal(target[[3, 1]], source[[2, 0]])
        assert not target[[0, 2]].any()
    (made,) = rows.take((source,), np.array([3, 3, 1]))
    assert torch.equal(made, source[[3, 3, 1]])
    assert made.is_contiguous(memory_format=torch.channels_last)


def test_numpy_states_are_put_together_as_tensors_are():
    pool, rng, found = Pool(6, numpy_rows()), np.random.default_rng(0), []
    expected = []
    for start in range(0, 60, 6):
        samples = np.arange(start, start + 6)
        staying = np.flatnonzero(rng.uniform(size=6) < 0.6)
        expected += samples[staying].tolist()
        state = (samples[:, None] * np.ones((1, 3)), samples.copy())
        found += pool.add(Group(samples, ((samples * 10,), ()), state, own=True), staying) if len(staying) else []
    while (rest := pool.rest()) is not None:
        found.append(rest)
    for each in found:
        assert each.recalled[0][0].tolist() == (each.samples * 10).tolist()
        assert (each.state[0] == each.samples[:, None]).all()
        assert each.state[1].tolist() == each.samples.tolist()
    assert sorted(sample for each in found for sample in each.samples.tolist()) == expected
