"""A recording in partitions is the table that its parts are, and calibration need not hold it."""

import numpy as np
import pytest
from conftest import made_up

from alight import calibrate, recordings
from alight.errors import BadFile, BadInput, Mismatch
from alight.outputs import HeadOutputs
from alight.partitioned import PLAN, PartitionedOutputs

COSTS = np.array([1.0, 2.0, 3.5, 5.0])


def parted(table, folder, sizes=(70, 1, 130)):
    folder.mkdir()
    for index, rows in enumerate(np.split(np.arange(len(table)), np.cumsum(sizes))):
        table.take(rows).save(folder / f"part-{index:05}.npz")
    return PartitionedOutputs.open(folder)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("slack", [None, "paper", "exact"])
@pytest.mark.parametrize("method", ["eero", "eero_marginal"])
def test_partitions_give_the_policy_of_the_whole_table(method, slack, labelled, ties, tmp_path):
    table = made_up(1, 300, 4, ties=ties)
    table = table if labelled else table.unlabelled()
    parts = parted(table, tmp_path / "parts")
    for budget in (1.2, 2.4, 3.9):
        whole = calibrate.METHODS[method](COSTS, budget, table, slack=slack)
        assert calibrate.METHODS[method](COSTS, budget, parts, slack=slack).to_dict() == whole.to_dict()


def test_partitions_of_a_real_network_with_unlabelled_ones_beside_them(tmp_path):
    labelled, test, costs = recordings.load()
    parts = parted(labelled, tmp_path / "labelled", (999, 1))
    unlabelled = test.take(slice(0, 3000)).unlabelled()
    beside = parted(unlabelled, tmp_path / "unlabelled", (1500,))
    whole = calibrate.eero(costs, "50%", labelled, unlabelled)
    assert calibrate.eero(costs, "50%", parts, beside).to_dict() == whole.to_dict()
    batch = calibrate.certified_batch(calibrate.eero)(costs, "50%", parts)
    assert batch.to_dict() == calibrate.certified_batch(calibrate.eero)(costs, "50%", labelled).to_dict()


def test_partitions_load_as_one_table_of_any_of_its_scores(tmp_path):
    rng = np.random.default_rng(0)
    table = HeadOutputs.from_logits(rng.normal(size=(40, 3, 4)), features=["negative_entropy"])
    parted(table, tmp_path / "parts", (13,))
    parts = PartitionedOutputs.open(tmp_path / "parts", "negative_entropy")
    whole = table.with_score("negative_entropy")
    assert np.array_equal(parts.load().scores, whole.scores)
    assert np.array_equal(np.concatenate([*parts.scores]), whole.scores)
    assert np.array_equal(parts.risks(), whole.risks())
    assert (len(parts), parts.sizes, parts.score) == (40, (13, 27), "negative_entropy")


def test_what_needs_the_table_says_so(tmp_path):
    parts = parted(made_up(1, 300, 4), tmp_path / "parts")
    message = "needs the whole table in memory, and was given 4 partitions of 300 samples: give what its load"
    for method in (calibrate.search, calibrate.two_exits, calibrate.geometric, calibrate.patience):
        with pytest.raises(BadInput, match=message):
            method(COSTS, 2.4, parts)


def test_folders_that_are_no_recording_are_refused(tmp_path):
    with pytest.raises(BadFile, match=r"no partitions \(\*\.npz\)"):
        PartitionedOutputs.open(tmp_path)
    made_up(1, 30, 4).save(tmp_path / "a.npz")
    made_up(1, 30, 3).save(tmp_path / "b.npz")
    with pytest.raises(Mismatch, match=r"a\.npz and .*b\.npz differ in exits"):
        PartitionedOutputs.open(tmp_path)
    (tmp_path / PLAN).write_text("{}")
    with pytest.raises(BadFile, match="not finished"):
        PartitionedOutputs.open(tmp_path)
