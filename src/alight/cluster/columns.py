"""Images and texts as they stand in the columns of Parquet files."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from alight.data.formats import picture
from alight.errors import BadFile


def values_of(column: Any, where: str) -> Iterator[Any]:
    """Each value as a picture, an array or a text: bytes of image files, with or without a path beside them (as Hugging
    Face writes them), tensors, lists of lists, or strings.

    >>> [*values_of(pa.array([[[1, 2], [3, 4]]]), "a.parquet")]
    [array([[1, 2],
            [3, 4]])]
    """
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        yield from column.to_numpy_ndarray()
        return
    for value in column.to_pylist():
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            yield picture(io.BytesIO(value["bytes"]), value.get("path") or where)
        elif isinstance(value, bytes):
            yield picture(io.BytesIO(value), where)
        elif isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield np.array(value, dtype=_numbers(kind))
        else:
            raise BadFile(
                where,
                f"a row holds {'nothing' if value is None else type(value).__name__} where an image or text should be",
                "write bytes of image files, tensors, lists of numbers, or strings",
            )


def _numbers(kind: Any) -> Any:
    """The kind of number inside lists of lists."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind.to_pandas_dtype()
