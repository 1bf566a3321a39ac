"""A sample of a recording in partitions: the whole table where it fits, else a uniform draw in bounded memory."""

import tracemalloc

import numpy as np
import pytest
from conftest import made_up
from scipy.stats import chisquare

from alight import calibrate, recordings
from alight.errors import BadFile, BadInput, Mismatch
from alight.files import PLAN
from alight.outputs import HeadOutputs

COSTS = np.array([1.0, 2.0, 3.5, 5.0])


def parted(table, folder, sizes=(70, 1, 130)):
    folder.mkdir()
    for index, rows in enumerate(np.split(np.arange(len(table)), np.cumsum(sizes))):
        table.take(rows).save(folder / f"part-{index:05}.npz")
    return folder


def numbered(rows, exits=2):
    """A table whose predictions are the numbers of its rows."""
    numbers = np.arange(rows)
    return HeadOutputs(np.linspace(0, 1, rows * exits).reshape(rows, exits), np.stack([numbers] * exits, 1), numbers)


def same(one, other):
    return one.rows().keys() == other.rows().keys() and all(
        np.array_equal(one.rows()[name], other.rows()[name]) for name in one.rows()
    )


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("method", ["eero", "eero_marginal", "search", "patience"])
def test_a_recording_that_fits_is_the_whole_table_for_every_method(method, labelled, tmp_path):
    table = made_up(1, 300, 4, ties=True)
    table = table if labelled else table.unlabelled()
    parts = HeadOutputs.load_sample(parted(table, tmp_path / "parts"), rows=300)
    assert same(parts, table)
    whole = calibrate.METHODS[method](COSTS, 2.4, table)
    assert calibrate.METHODS[method](COSTS, 2.4, parts).to_dict() == whole.to_dict()


def test_every_column_of_a_recording_is_kept(tmp_path):
    logits = np.random.default_rng(0).normal(size=(40, 3, 4))
    table = HeadOutputs.from_logits(logits, features=["negative_entropy"])
    folder = parted(table, tmp_path / "parts", (13,))
    assert same(HeadOutputs.load_sample(folder), table)
    drawn = HeadOutputs.load_sample(folder, rows=20)
    rows = [int(np.flatnonzero((table.scores == row).all(axis=1))[0]) for row in drawn.scores]
    assert same(drawn, table.take(np.array(rows)))


def test_a_sample_keeps_the_order_draws_no_row_twice_and_depends_on_its_seed_alone(tmp_path):
    one = parted(numbered(500), tmp_path / "one")
    first = HeadOutputs.load_sample(one, rows=120)
    assert len(first) == 120
    assert (np.diff(first.labels) > 0).all()
    assert same(first, HeadOutputs.load_sample(one, rows=120, seed=0))
    assert not same(first, HeadOutputs.load_sample(one, rows=120, seed=1))
    other = parted(numbered(500), tmp_path / "other", (3, 7, 200))
    assert same(first, HeadOutputs.load_sample(other, rows=120))


@pytest.mark.slow
def test_every_row_and_every_pair_is_drawn_equally_often(tmp_path):
    folder = parted(numbered(40), tmp_path / "parts", (5, 2, 20))
    drawn = np.array([HeadOutputs.load_sample(folder, rows=12, seed=seed).labels for seed in range(2000)])
    counts = np.bincount(drawn.ravel(), minlength=40)
    # inclusions without replacement vary less than a multinomial's counts, by (1 - 12 / 40) * 40 / 39
    assert chisquare(12 * 2000 / 40 + (counts - 600) / np.sqrt(0.7 * 40 / 39)).pvalue > 0.001
    together = np.zeros((40, 40))
    for rows in drawn:
        together[np.ix_(rows, rows)] += 1
    pairs = together[np.triu_indices(40, 1)]
    expected = 2000 * 12 * 11 / (40 * 39)
    assert abs(pairs - expected).max() < 5 * np.sqrt(expected)


def test_memory_holds_the_sample_and_one_partition(tmp_path):
    folder, rows = tmp_path / "parts", 20_000
    folder.mkdir()
    for index in range(30):
        made_up(index, rows, 4).save(folder / f"part-{index:05}.npz")
    partition = made_up(0, rows, 4)
    size = sum(array.nbytes for array in partition.rows().values())
    HeadOutputs.load_sample(folder, rows=100)  # what is loaded once
    tracemalloc.start()
    sample = HeadOutputs.load_sample(folder, rows=rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(sample) == rows
    assert peak < 8 * size  # of 30


def test_a_sample_of_a_real_network_gives_nearly_the_policy_of_all_rows(tmp_path):
    labelled, _, costs = recordings.load()
    sample = HeadOutputs.load_sample(parted(labelled, tmp_path / "parts", (999, 1)), rows=2500)
    whole, drawn = (calibrate.eero(costs, "50%", table, spend_all=True) for table in (labelled, sample))
    assert np.abs(sample.risks() - labelled.risks()).max() < 4 * 0.5 / np.sqrt(2500)
    assert np.abs(np.subtract(drawn.exit_rates, whole.exit_rates)).max() < 0.05


def test_folders_that_are_not_a_recording_are_refused(tmp_path):
    with pytest.raises(BadFile, match=r"no partitions \(\*\.npz\)"):
        HeadOutputs.load_sample(tmp_path)
    made_up(1, 30, 4).save(tmp_path / "a.npz")
    with pytest.raises(BadInput, match="a sample of 0 rows"):
        HeadOutputs.load_sample(tmp_path, rows=0)
    made_up(1, 30, 3).save(tmp_path / "b.npz")
    with pytest.raises(Mismatch, match=r"a\.npz and .*b\.npz differ in exits"):
        HeadOutputs.load_sample(tmp_path)
    made_up(1, 30, 4).unlabelled().save(tmp_path / "b.npz")
    with pytest.raises(Mismatch, match=r"a\.npz and .*b\.npz differ in exits, score, network or columns"):
        HeadOutputs.load_sample(tmp_path)
    (tmp_path / PLAN).write_text("{}")
    with pytest.raises(BadFile, match="not finished"):
        HeadOutputs.load_sample(tmp_path)
