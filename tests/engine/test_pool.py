"""Samples wait in holes of other batches, lose nothing on the way, and few are moved."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alight.engine import pool as pools
from alight.engine.pool import Group, Pool
from alight.engine.rows import empty, gathered, move, own_memory


def group(samples, own=True, layout=torch.contiguous_format):
    """Samples whose tensors and memories tell who they are."""
    who = torch.as_tensor(samples)
    maps = who.float()[:, None, None, None].expand(-1, 3, 2, 2).contiguous(memory_format=layout)
    return Group(np.asarray(samples), ((np.asarray(samples) * 10,), ()), (maps, who.clone()), own)


def assert_whole(made):
    assert made.recalled[0][0].tolist() == (made.samples * 10).tolist()
    assert made.carried[1].tolist() == made.samples.tolist()
    assert torch.equal(made.carried[0], made.carried[1].float()[:, None, None, None].expand(-1, 3, 2, 2))


def emptied(pool):
    while (rest := pool.rest()) is not None:
        yield rest


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_everyone_who_stays_comes_out_once_in_full_batches(data):
    size = data.draw(st.integers(1, 7))
    pool, expected, found, number = Pool(size), [], [], 0
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.sampled_from([size, size, size, 1, 9]))
        staying = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        layout = data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last]))
        came = group(range(number, number + count), data.draw(st.booleans()), layout)
        before = [each.clone() for each in came.carried]
        made = list(pool.add(came, staying)) if len(staying) else []
        assert all(len(each.samples) == size for each in made)
        if not came.own:
            assert all(map(torch.equal, came.carried, before))  # it is somebody else's
        for each in made:
            assert_whole(each)
        if data.draw(st.booleans()):
            pool.close_up()
        expected += (staying + number).tolist()
        found += [sample for each in made for sample in each.samples.tolist()]
        number += count
    for rest in emptied(pool):
        assert_whole(rest)
        found += rest.samples.tolist()
    assert sorted(found) == expected


@pytest.mark.parametrize("leaving", [0.1, 0.2, 0.4, 0.6, 0.9])
def test_no_more_are_moved_than_leave_or_stay(monkeypatch, leaving):
    moved = []
    monkeypatch.setattr(pools, "move", lambda *given: moved.append(len(given[1])) or move(*given))
    rng, pool, size, fewer = np.random.default_rng(0), Pool(50), 50, 0
    for start in range(0, 5000, size):
        staying = np.flatnonzero(rng.uniform(size=size) > leaving)
        fewer += min(len(staying), size - len(staying))
        list(pool.add(group(range(start, start + size)), staying))
    assert 0 < sum(moved) <= fewer


def test_those_who_have_closed_up_need_not_move_when_they_are_a_rest(monkeypatch):
    moved, pool = [], Pool(8)
    monkeypatch.setattr(pools, "move", lambda *given: moved.append(len(given[1])) or move(*given))
    assert not list(pool.add(group(range(8)), np.array([1, 3, 6, 7])))
    pool.close_up()
    assert moved == [2]  # 6 and 7, into the rows of 0 and 2
    assert not list(pool.add(group(range(8, 10)), None))
    rest = pool.rest()
    assert moved == [2, 2]  # 8 and 9 once, right behind the others
    assert_whole(rest)
    assert sorted(rest.samples) == [1, 3, 6, 7, 8, 9]


def test_without_a_size_groups_stay_apart():
    (made,) = Pool(None).add(group(range(6)), np.array([1, 4]))
    assert made.samples.tolist() == [1, 4]
    assert_whole(made)


def test_memory_is_ones_own_unless_it_was_given_or_holds_two_tensors():
    given, made = torch.zeros(4, 6), torch.zeros(4, 6)
    assert own_memory((made, torch.zeros(4)), (given,))
    assert not own_memory((made, given), (given,))
    assert not own_memory((made, given[:, :3]), (given,))
    assert not own_memory((made, made.view(4, 2, 3)), ())
    assert not own_memory((torch.zeros(1, 6).expand(4, 6),), ())
    assert own_memory((empty(4, torch.zeros(1, 3, 2, 2).to(memory_format=torch.channels_last)),), ())


def test_rows_are_moved_and_gathered_in_any_layout():
    source = torch.arange(48.0).view(4, 3, 2, 2).to(memory_format=torch.channels_last)
    for target in (torch.zeros(4, 3, 2, 2), torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)):
        move((source,), np.array([2, 0]), (target,), np.array([3, 1]))
        assert torch.equal(target[[3, 1]], source[[2, 0]])
        assert not target[[0, 2]].any()
    (made,) = gathered((source,), np.array([3, 3, 1]))
    assert torch.equal(made, source[[3, 3, 1]])
    assert made.is_contiguous(memory_format=torch.channels_last)
