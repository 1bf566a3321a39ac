"""Texts become tokens by the tokenizer that lies beside a network: by `tokenizers` alone wherever that can read it."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alight.data.preprocess import InputSpec
from alight.errors import BadFile, BadInput
from alight.files import PathLike

FILE, CONFIG = TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
IDS, MASK, SEGMENTS = "input_ids", "attention_mask", "token_type_ids"
Meaning = Literal["tokens", "padding"]  # what 1 or True in a mask says about a position


def mask_meaning(name: str) -> Meaning | None:
    """Return what 1 means in an input of this name; None where the name does not say that it is a mask.

    >>> mask_meaning("attention_mask"), mask_meaning("src_key_padding_mask"), mask_meaning("input_ids")
    ('tokens', 'padding', None)
    """
    if name == MASK:
        return "tokens"
    return "padding" if name.endswith("padding_mask") else None


class Texts:
    """A tokenizer: texts in, arrays by name out, as many tokens as the longest has, or `max_tokens`.

    `Texts(folder, model.input_spec)(["Where is my card?"])` has the ids that transformers' own tokenizer gives.
    """

    def __init__(self, folder: PathLike, spec: InputSpec, max_tokens: int = 128) -> None:
        if not spec.names:
            takes = f" but {spec.tensors[0]}" if spec.tensors else ""
            raise BadInput(f"the network does not take text{takes}: give that")
        if unknown := [name for name in spec.names if name not in (IDS, MASK, SEGMENTS)]:
            raise BadInput(f"the network takes {unknown[0]!r}, which a tokenizer does not give: give arrays")
        if not Path(folder).is_dir():
            raise BadInput(
                f"the network reads text, and there is no tokenizer in {folder}: name one (--tokenizer FOLDER)"
            )
        self._names = spec.names
        encoder = _Encoder if (Path(folder) / FILE).is_file() else _of_transformers
        self._encode: Callable[[list[str]], Mapping[str, np.ndarray]] = encoder(Path(folder), max_tokens)

    def __call__(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the texts as the network takes them."""
        columns = self._encode(list(texts))
        if MASK not in self._names and not columns[MASK].all():
            raise BadInput(
                f"texts of different lengths are padded, and the network was cut without {MASK!r}, so it would read the"
                " padding: attach heads with an example that has it, or give texts of one length"
            )
        return {name: columns[name] for name in self._names}


class _Encoder:
    """A tokenizer.json, run by the package `tokenizers`."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        tokenizers = library("tokenizers", "tokenizers")
        try:
            config = json.loads((folder / CONFIG).read_bytes()) if (folder / CONFIG).is_file() else {}
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / FILE))
        except Exception as error:  # of Rust, without a type of its own
            raise BadFile(folder, f"its tokenizer is damaged ({error})", "save it again") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(
            min(max_tokens, config.get("model_max_length") or max_tokens),
            direction=config.get("truncation_side", "right"),
        )
        pad = config.get("pad_token") or ""
        self._filler = self._tokenizer.token_to_id(pad["content"] if isinstance(pad, dict) else pad) or 0
        self._left = config.get("padding_side") == "left"

    def __call__(self, texts: list[str]) -> dict[str, np.ndarray]:
        rows = self._tokenizer.encode_batch(texts)
        return {
            IDS: self._padded([each.ids for each in rows], self._filler),
            MASK: self._padded([each.attention_mask for each in rows], 0),
            SEGMENTS: self._padded([each.type_ids for each in rows], 0),
        }

    def _padded(self, rows: Sequence[Sequence[int]], filler: int) -> np.ndarray:
        padded = np.full((len(rows), max(map(len, rows))), filler, dtype=np.int64)
        for row, numbers in enumerate(rows):
            start = padded.shape[1] - len(numbers) if self._left else 0
            padded[row, start : start + len(numbers)] = numbers
        return padded


def _of_transformers(folder: Path, max_tokens: int) -> Callable[[list[str]], Mapping[str, np.ndarray]]:
    """Return a tokenizer that only transformers can load, as one without a tokenizer.json."""
    auto = library("transformers", '"alight[text]"').AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BadFile(folder, f"it has no tokenizer that can be read ({error})", f"save one with {FILE}") from error
    return partial(
        tokenizer,
        padding=True,
        truncation=True,
        max_length=min(max_tokens, tokenizer.model_max_length),
        return_tensors="np",
        return_attention_mask=True,
        return_token_type_ids=True,
    )


def library(name: str, package: str) -> Any:
    """Return a module that is optional, or say which package has it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(f"{name.partition('.')[0]} is not installed: pip install {package}") from error
