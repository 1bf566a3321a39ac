"""A worker: the network is sent as bytes, and its partitions hold the decisions of one process."""

import json
import platform
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from cascades import COSTS, chain, outputs, pixels
from networks import answers, as_pictures, as_table, by_a_worker, check_once, make_job, on_one_machine
from pyarrow import parquet
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from alight import HeadOutputs, calibrate, load_model, record, replay, save_model
from alight.calibrate import certified_batch
from alight.cli import main
from alight.cluster.stores import PartitionFolder, Store
from alight.cluster.workers import PredictTask, RecordTask, ShardWorker, WorkerSettings, pack
from alight.data.batches import load_data
from alight.errors import BadInput

WORDS = "bread soup sauce guitar song piano".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT with exits, and texts for it as lines and as Parquet."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "bert").mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "bert" / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerFast(vocab={word: index for index, word in enumerate(vocabulary)})
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    config.id2label, config.label2id = {0: "food", 1: "music"}, {"food": 0, "music": 1}
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size=rng.integers(1, 6))) for _ in range(40)]
    labels = ["food" if index % 3 else "music" for index in range(40)]
    lines = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    parquet.write_table(pa.table({"text": texts, "label": labels}), folder / "texts.parquet", row_group_size=8)
    line = f"attach transformers:{folder}/bert --after bert.encoder.layer.0 -o {folder}/model"
    assert main(line.split()) == 0
    return folder


def test_texts_of_parquet_are_recorded_as_one_process_does(folder):
    model = load_model(folder / "model")
    tokenizer = folder / "model" / "tokenizer"
    whole = record(
        model, load_data(folder / "texts.jsonl", model.input_spec, batch_size=8, tokenizer=tokenizer), progress=False
    )
    done = by_a_worker(
        RecordTask(), folder / "model", folder / "texts.parquet", folder / "parts", rows=16, batch_size=8
    )
    assert done["index"] == [0, 1, 2]
    assert done["error"] == ["", "", ""]
    assert [json.loads(summary)["rows"] for summary in done["summary"]] == [16, 16, 8]
    table = HeadOutputs.joined([HeadOutputs.load(folder / "parts" / f"part-0000{index}.npz") for index in range(3)])
    np.testing.assert_allclose(table.scores, whole.scores, atol=1e-6)
    assert np.array_equal(table.labels, whole.labels)
    assert table.fingerprint == whole.fingerprint
    for index, summary in enumerate(done["summary"]):
        content = (folder / "parts" / f"part-0000{index}.npz").read_bytes()
        assert RecordTask().summary(content) | {"skipped": 0} == json.loads(summary)


def test_texts_need_a_tokenizer(folder):
    settings = WorkerSettings(RecordTask(), PartitionFolder(Store.at(folder), ".npz"), "texts", 8, {})
    files = {name: content for name, content in pack(folder / "model").items() if "/" not in name}
    with pytest.raises(BadInput, match="texts holds text, which needs a tokenizer"):
        ShardWorker(files, settings)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with digits and a network for them, and its policy."""
    folder = tmp_path_factory.mktemp("digits")
    return folder, *make_job(folder)


def test_a_quota_keeps_its_budget_in_every_batch_and_in_total(digits, tmp_path):
    folder, model, policy = digits
    table = HeadOutputs([[0.1, 0.5, 0.9]] * 2, [[0, 0, 0]] * 2)  # not looked at: the policy plans its rates
    quota = certified_batch(lambda *_: policy)(policy.costs, policy.budget, table)
    task = PredictTask(quota, model.exits, model.classes)
    by_a_worker(task, folder / "model", folder / "test", tmp_path / "same", rows=64, batch_size=32)
    decisions = on_one_machine(model, quota, folder / "test.npz", 32)
    check_once(tmp_path / "same", decisions)  # in the same batches
    as_table(folder / "test.npz", tmp_path / "table")
    done = by_a_worker(task, folder / "model", tmp_path / "table", tmp_path / "other", rows=64, batch_size=32)
    costs, start = answers(tmp_path / "other")["cost_FLOPs"].to_numpy(), 0
    for size in (json.loads(summary)["rows"] for summary in done["summary"]):
        assert size % 32  # so that batches differ from those of one machine
        for batch in np.split(costs[start : start + size], range(32, size, 32)):
            assert batch.sum() <= len(batch) * quota.budget * (1 + 1e-12)
        start += size
    assert start == len(costs) == 300
    assert costs.sum() <= len(costs) * quota.budget * (1 + 1e-12)
    assert costs.sum() == pytest.approx(decisions.spent.sum(), rel=0.05)


def held():
    """Return the memory that this process does not share, in MB."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1e3


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is of glibc")
def test_freed_memory_is_returned_to_the_system_after_a_partition(digits, tmp_path):
    folder, model, policy = digits
    blocks = [b"x" * size for size in range(100_000, 101_000)]
    few = blocks[::50]  # between which the others leave holes
    before = held()
    del blocks
    assert held() > before - 20
    by_a_worker(
        PredictTask(policy, model.exits, model.classes),
        folder / "model",
        folder / "test",
        tmp_path,
        rows=64,
        batch_size=32,
    )
    assert held() < before - 60
    assert len(few) == 20


def test_data_and_results_may_be_in_a_file_system_without_folders(digits, tmp_path):
    folder, model, policy = digits
    task, memory = (
        PredictTask(policy, model.exits, model.classes),
        fsspec.filesystem("memory"),
    )  # which has keys alone, like a bucket
    memory.pipe("/bucket/images.npy", (folder / "test" / "images.npy").read_bytes())
    where = "fsspec+memory://bucket"
    by_a_worker(task, folder / "model", f"{where}/images.npy", f"{where}/answers", rows=64, batch_size=32)
    assert PartitionFolder(Store.at(f"{where}/answers"), ".parquet").existing() == {0, 1, 2, 3, 4}
    names = [name for name in memory.ls("/bucket/answers", detail=False) if "part-" in name]
    assert len(names) == 5  # and no incomplete file
    for name in names:
        (tmp_path / name.rpartition("/")[2]).write_bytes(memory.cat(name))
    check_once(tmp_path, on_one_machine(model, policy, folder / "test.npz", 32))


def test_images_keep_their_names_and_a_damaged_one_is_named(digits, tmp_path):
    folder, model, policy = digits
    as_pictures(folder / "test.npz", tmp_path / "pictures")
    where, task = tmp_path / "pictures", PredictTask(policy, model.exits, model.classes)
    by_a_worker(task, folder / "model", where, tmp_path / "answers", rows=100, batch_size=32)
    names = answers(tmp_path / "answers")["sample"].to_pylist()
    assert names == sorted(str(path) for path in where.glob("*/*.png"))
    (where / "3" / "broken.png").write_bytes(b"no picture")
    done = by_a_worker(task, folder / "model", where, tmp_path / "again", rows=100, batch_size=32)
    assert [bool(error) for error in done["error"]] == [False, True, False, False]
    assert "broken.png: it is not a usable image" in done["error"][1]
    assert len(list((tmp_path / "again").glob("part-*"))) == 3


def test_bad_rows_are_left_out_and_listed_with_their_reasons(digits, tmp_path):
    folder, model, policy = digits
    as_pictures(folder / "test.npz", tmp_path / "pictures")
    where, task = tmp_path / "pictures", PredictTask(policy, model.exits, model.classes)
    for name in ("0/a.png", "3/broken.png"):
        (where / name).write_bytes(b"no picture")
    done = by_a_worker(task, folder / "model", where, tmp_path / "out", rows=100, batch_size=32, on_error="skip")
    assert done["error"] == [""] * 4
    assert [json.loads(summary)["skipped"] for summary in done["summary"]] == [1, 1, 0, 0]
    names = sorted(str(path) for path in where.glob("*/*.png"))
    bad = pa.concat_tables([parquet.read_table(file) for file in sorted((tmp_path / "out").glob("bad-*.parquet"))])
    assert bad["name"].to_pylist() == [f"{where}/0/a.png", f"{where}/3/broken.png"]
    assert [names[row] for row in bad["row"].to_pylist()] == bad["name"].to_pylist()
    assert all("it is not a usable image" in reason for reason in bad["reason"].to_pylist())
    kept = answers(tmp_path / "out")["sample"].to_pylist()
    assert kept == [name for name in names if name not in bad["name"].to_pylist()]
    decisions = on_one_machine(model, policy, folder / "test.npz", 32)  # whose order is another
    assert len(kept) == len(decisions)


def ragged(path, odd):
    """Write a Parquet file of lists of numbers in which these rows are not images of the network's size, or are NaN."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(3, 16, 16)).tolist() for _ in range(40)]
    kinds = {"shape": [[[0.0] * 3] * 2] * 5, "nan": np.full((3, 16, 16), np.nan).tolist(), "": None}
    for row, kind in odd.items():
        rows[row] = kinds[kind]
    parquet.write_table(pa.table({"image": rows}), path, row_group_size=20)


@pytest.mark.parametrize("kind", ["shape", "nan", ""])
def test_a_row_that_cannot_be_run_is_named_or_left_out(digits, tmp_path, kind):
    folder, model, policy = digits
    path, task = tmp_path / "rows.parquet", PredictTask(policy, model.exits, model.classes)
    ragged(path, {7: kind, 33: kind})
    sizes = {"rows": 20, "batch_size": 8}
    failed = by_a_worker(task, folder / "model", path, tmp_path / "a", **sizes)
    assert "(row 7; --on-error skip leaves such rows out)" in failed["error"][0]
    assert "(row 33; --on-error" in failed["error"][1]
    by_a_worker(task, folder / "model", path, tmp_path / "b", **sizes, on_error="skip")
    assert answers(tmp_path / "b")["sample"].to_pylist() == [row for row in range(40) if row not in (7, 33)]
    for part in (RecordTask(),):
        done = by_a_worker(part, folder / "model", path, tmp_path / "c", **sizes, on_error="skip")
        assert [json.loads(summary)["rows"] for summary in done["summary"]] == [19, 19]
    ragged(path, dict.fromkeys(range(20), kind))
    every = by_a_worker(task, folder / "model", path, tmp_path / "d", **sizes, on_error="skip")
    assert "every row of a partition is bad" in every["error"][0]


def test_images_are_refused_where_the_normalisation_is_unknown(digits, tmp_path):
    folder, _, policy = digits
    model = load_model(folder / "model")
    model.normalisation = None
    save_model(model, tmp_path / "model")
    task = PredictTask(policy, model.exits, model.classes, allow_mismatch=True)
    done = by_a_worker(task, tmp_path / "model", folder / "test", tmp_path / "out", rows=100, batch_size=32)
    assert all("how the network normalises them is unknown" in error for error in done["error"])
    assert not list((tmp_path / "out").glob("part-*"))


def test_a_cascade_is_sent_whole_and_decides_as_on_one_machine(tmp_path):
    policy = calibrate.eero(COSTS, "70%", outputs())
    folder = chain().save(tmp_path / "cascade")
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "images.npy", pixels())
    done = by_a_worker(
        PredictTask(policy, chain().exits, ()), folder, tmp_path / "data", tmp_path / "answers", rows=64, batch_size=32
    )
    assert done["error"] == ["", ""]
    table, expected = answers(tmp_path / "answers"), replay(policy, outputs())
    assert table["prediction"].to_pylist() == expected.predictions.tolist()
    assert table["exit"].to_pylist() == [chain().exits[index] for index in expected.exits]
