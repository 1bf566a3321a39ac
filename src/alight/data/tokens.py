"""Texts become tokens by the tokenizer that lies beside a network: by `tokenizers` alone wherever that can read it."""

import importlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alight.data.preprocess import InputSpec
from alight.errors import BadFile, BadInput

TOKENIZER = "tokenizer"  # the folder of one, beside a network that reads text
FILE, CONFIG = TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MAX_TOKENS = 128  # by default
WORDS = (".json", ".txt", ".model", ".jinja")  # files of a tokenizer
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

    It is the folder of one or a tokenizer of transformers. `Texts(folder, model.input_spec)(["Where is my card?"])` has
    the ids that transformers' own tokenizer gives. Where the network reads a mask, lengths are rounded up to a multiple
    of `spec.token_multiple`.
    """

    def __init__(self, tokenizer: Any, spec: InputSpec, max_tokens: int = MAX_TOKENS) -> None:
        if not spec.names:
            takes = f" but {spec.tensors[0]}: give that" if spec.tensors else ": give tensors"
            raise BadInput(f"the network does not take text{takes}")
        if unknown := [name for name in spec.names if name not in (IDS, MASK, SEGMENTS)]:
            raise BadInput(f"the network takes {unknown[0]!r}, which a tokenizer does not give: give arrays")
        self._names = spec.names
        self._encode = _encoder(tokenizer, max_tokens)
        self._multiple = spec.token_multiple if MASK in spec.names else 1

    @property
    def is_thread_safe(self) -> bool:
        """Whether several threads may call it at once; a tokenizer of transformers keeps state while it works."""
        return isinstance(self._encode, _Encoder)

    def __call__(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the texts as the network takes them."""
        if odd := [(row, text) for row, text in enumerate(texts) if not isinstance(text, str)]:
            raise BadInput(f"the text of sample {odd[0][0]} of a batch is {odd[0][1]!r}: give a text for every sample")
        columns = self._encode([str(text) for text in texts])
        if MASK not in self._names and not columns[MASK].all():
            raise BadInput(
                f"texts of different lengths are padded, and the network was cut without {MASK!r}, so it would read the"
                " padding: attach heads with an example that has it, or give texts of one length"
            )
        return self._rounded_up({name: columns[name] for name in self._names})

    def pad(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
        """Return tokens of texts of different lengths, by name, as arrays of the longest's, padded by the tokenizer."""
        if MASK not in columns:
            raise BadInput(f"tokens of different lengths without {MASK!r}: keep what the tokenizer gives, or pad them")
        filler, left = self._encode.padding
        return self._rounded_up(
            {name: padded(rows, filler if name == IDS else 0, left) for name, rows in columns.items()}
        )

    def _rounded_up(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return texts padded to the next multiple of tokens, but to no more than a text may have."""
        length, (filler, left) = next(iter(columns.values())).shape[1], self._encode.padding
        more = min(-(-length // self._multiple) * self._multiple, self._encode.length) - length
        if more <= 0:
            return columns
        width = ((0, 0), (more, 0) if left else (0, more))
        return {name: np.pad(rows, width, constant_values=filler * (name == IDS)) for name, rows in columns.items()}


def padded(rows: Sequence[Sequence[int]], filler: int, left: bool = False) -> np.ndarray:
    """Return rows of numbers as one array, shorter ones filled at their end or before their start.

    >>> padded([[1, 2, 3], [4]], filler=0)
    array([[1, 2, 3],
           [4, 0, 0]])
    """
    made = np.full((len(rows), max(map(len, rows))), filler, dtype=np.int64)
    for row, numbers in enumerate(rows):
        start = made.shape[1] - len(numbers) if left else 0
        made[row, start : start + len(numbers)] = numbers
    return made


def texts_for(spec: InputSpec, where: str = "the data", max_tokens: int = MAX_TOKENS) -> Texts:
    """Return the tokenizer of a network, which is loaded once; `where` the texts come from is named in errors."""
    if spec.names and spec.tokenizer is None:
        raise BadInput(
            f"{where} holds text, which needs a tokenizer: set model.tokenizer to the folder of one or to a tokenizer"
            " of transformers (--tokenizer FOLDER of the commands)"
        )
    if max_tokens not in spec.loaded:
        spec.loaded[max_tokens] = Texts(spec.tokenizer, spec, max_tokens)
    return spec.loaded[max_tokens]


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer into an empty folder: the files of another folder, or one of transformers."""
    if callable(getattr(tokenizer, "save_pretrained", None)):
        tokenizer.save_pretrained(str(folder))
        return
    _check_folder(tokenizer)
    if not (Path(tokenizer) / FILE).is_file():  # which transformers writes for all that it can load
        _loaded_by_transformers(tokenizer).save_pretrained(str(folder))
        return
    for file in Path(tokenizer).iterdir():
        if file.suffix in WORDS and file.name != "config.json":  # of a network, which may lie beside it
            shutil.copy(file, folder)


def _encoder(tokenizer: Any, max_tokens: int) -> "_Encoder | _OfTransformers":
    """Return what makes arrays of texts."""
    if callable(tokenizer) and not isinstance(tokenizer, str | os.PathLike):
        return _OfTransformers(tokenizer, max_tokens)
    _check_folder(tokenizer)
    if (Path(tokenizer) / FILE).is_file():
        return _Encoder(Path(tokenizer), max_tokens)
    return _OfTransformers(_loaded_by_transformers(tokenizer), max_tokens)


def _check_folder(tokenizer: Any) -> None:
    if not isinstance(tokenizer, str | os.PathLike) or not Path(tokenizer).is_dir():
        raise BadInput(
            f"the network reads text, and there is no tokenizer in {tokenizer}: name one (model.tokenizer = FOLDER, or"
            " --tokenizer FOLDER of the commands)"
        )


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
        self.length = min(max_tokens, config.get("model_max_length") or max_tokens)
        self._tokenizer.enable_truncation(self.length, direction=config.get("truncation_side", "right"))
        pad = config.get("pad_token") or ""
        filler = self._tokenizer.token_to_id(pad["content"] if isinstance(pad, dict) else pad) or 0
        self.padding = filler, config.get("padding_side") == "left"

    def __call__(self, texts: list[str]) -> dict[str, np.ndarray]:
        rows, (filler, left) = self._tokenizer.encode_batch(texts), self.padding
        return {
            IDS: padded([each.ids for each in rows], filler, left),
            MASK: padded([each.attention_mask for each in rows], 0, left),
            SEGMENTS: padded([each.type_ids for each in rows], 0, left),
        }


class _OfTransformers:
    """A tokenizer of transformers that gives arrays as long as the longest text."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self.length = tokenizer, min(max_tokens, tokenizer.model_max_length)
        self.padding = int(tokenizer.pad_token_id or 0), tokenizer.padding_side == "left"

    def __call__(self, texts: list[str]) -> Mapping[str, np.ndarray]:
        return self._tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.length,
            return_tensors="np",
            return_attention_mask=True,
            return_token_type_ids=True,
        )


def _loaded_by_transformers(folder: Any) -> Any:
    """Return a tokenizer that only transformers can load, as one without a tokenizer.json."""
    auto = library("transformers", '"alight[text]"').AutoTokenizer
    try:
        return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise BadFile(folder, f"it has no tokenizer that can be read ({error})", f"save one with {FILE}") from error


def library(name: str, package: str) -> Any:
    """Return a module that is optional, or say which package has it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(f"{name.partition('.')[0]} is not installed: pip install {package}") from error
