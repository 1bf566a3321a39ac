"""A worker: the network travels as bytes, and what it writes is what one process would have said."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from alight import HeadOutputs, load_model, record
from alight.cli import main
from alight.cluster.partitions import Partitions
from alight.cluster.shards import open_data
from alight.cluster.stores import Store
from alight.cluster.tasks import Recordings
from alight.cluster.workers import Settings, Worker, pack
from alight.errors import BadInput
from alight.runtime.loading import load_data

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
    whole = record(model, load_data(folder / "texts.jsonl", model, batch_size=8, tokenizer=tokenizer), progress=False)
    data = open_data(str(folder / "texts.parquet"), model, 16)
    partitions = Partitions(Store.at(folder / "parts"), ".npz")
    partitions.begin({})
    settings = Settings(Recordings(), partitions, data.kind, data.where, 8, {"num_threads": 1})
    worker = Worker(pack(folder / "model"), settings)
    done = worker({"shard": [pickle.dumps(shard) for shard in data.shards]})
    assert done["index"] == [0, 1, 2]
    assert done["error"] == ["", "", ""]
    assert [json.loads(summary)["rows"] for summary in done["summary"]] == [16, 16, 8]
    table = HeadOutputs.joined([HeadOutputs.load(folder / "parts" / f"part-0000{index}.npz") for index in range(3)])
    np.testing.assert_allclose(table.scores, whole.scores, atol=1e-6)
    assert np.array_equal(table.labels, whole.labels)
    assert table.fingerprint == whole.fingerprint
    for index, summary in enumerate(done["summary"]):
        assert Recordings().summary(partitions.store(index).read()) == json.loads(summary)


def test_texts_need_a_tokenizer(folder):
    settings = Settings(Recordings(), Partitions(Store.at(folder), ".npz"), "text", "texts", 8, {})
    files = {name: content for name, content in pack(folder / "model").items() if "/" not in name}
    with pytest.raises(BadInput, match="texts holds text, which needs a tokenizer"):
        Worker(files, settings)
