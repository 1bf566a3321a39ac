"""Texts become tokens by the tokenizer that was exported with a network, without PyTorch."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alight.errors import BadInput
from alight.export.manifest import TOKENIZER, Manifest, verified

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
MASK, SEGMENTS = "attention_mask", "token_type_ids"


class Texts:
    """A tokenizer: texts in, arrays by name out, as many tokens as the longest has, or `max_tokens`."""

    def __init__(self, folder: Path, manifest: Manifest, max_tokens: int = 128) -> None:
        if not manifest.input_names:
            raise BadInput(f"the network does not take text but {manifest.inputs[0]}: give that")
        files = {name: f"{TOKENIZER}/{name}" for name in (FILE, CONFIG)}
        if missing := [name for name in files.values() if name not in manifest.further]:
            raise BadInput(f"{folder} has no {missing[0]}: export the network with its tokenizer")
        content = {name: verified(folder, file, manifest.further[file]) for name, file in files.items()}
        config = json.loads(content[CONFIG])
        self._tokenizer = _tokenizers().Tokenizer.from_str(content[FILE].decode())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(min(max_tokens, config.get("model_max_length") or max_tokens))
        pad = config.get("pad_token") or ""
        pad = pad["content"] if isinstance(pad, dict) else pad
        self._names, self._filler = manifest.input_names, self._tokenizer.token_to_id(pad) or 0

    def __call__(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """The texts as the network takes them."""
        made = self._tokenizer.encode_batch(list(texts))
        longest = max(len(each.ids) for each in made)
        columns = {
            "input_ids": ([each.ids for each in made], self._filler),
            MASK: ([each.attention_mask for each in made], 0),
            SEGMENTS: ([each.type_ids for each in made], 0),
        }
        if unknown := [name for name in self._names if name not in columns]:
            raise BadInput(f"the network takes {unknown[0]!r}, which a tokenizer does not give: give arrays")
        return {name: _filled(columns[name][0], longest, columns[name][1]) for name in self._names}


def _filled(rows: Sequence[Sequence[int]], width: int, filler: int) -> np.ndarray:
    filled = np.full((len(rows), width), filler, dtype=np.int64)
    for row, numbers in enumerate(rows):
        filled[row, : len(numbers)] = numbers
    return filled


def _tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise BadInput("texts need the package tokenizers: pip install tokenizers") from error
