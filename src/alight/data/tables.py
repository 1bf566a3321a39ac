"""Tables as columns: of pandas, of Hugging Face, and files of Parquet, CSV and JSON lines.

Neither pandas, datasets nor pyarrow is imported unless the data is of that kind.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.columns import LABEL_NAMES, TEXT_NAMES, Columns, Kind, LazyColumn, choose, first_of, whole
from alight.data.labels import renumbered
from alight.data.preprocess import InputSpec
from alight.data.samples import Items, Samples, picture, samples_of_columns
from alight.data.tokens import library
from alight.errors import BadFile, BadInput
from alight.files import PathLike

OTHER_SEPARATORS = (";", "\t", "|")  # of tables that other programs call CSV
LINE = 'write {"text": ..., "label": ...} on every line'


def is_frame(value: Any) -> bool:
    """Return whether it is a DataFrame of pandas, which is not imported for the question."""
    return isinstance(value, getattr(sys.modules.get("pandas"), "DataFrame", ()))


def is_series(value: Any) -> bool:
    """Return whether it is a Series of pandas."""
    return isinstance(value, getattr(sys.modules.get("pandas"), "Series", ()))


def is_hugging_face(value: Any, kind: str = "Dataset") -> bool:
    """Return whether it is a data set of Hugging Face, or another class of its library by name."""
    return isinstance(value, getattr(sys.modules.get("datasets"), kind, ()))


def frame_columns(frame: Any) -> Columns:
    """Return the columns of a DataFrame: numbers as arrays, all else as lists."""
    if not frame.columns.is_unique:
        raise BadInput(f"the DataFrame has columns of one name ({', '.join(map(str, frame.columns))}): rename them")
    return {name: series_values(frame[name]) for name in frame.columns}


def series_values(series: Any) -> Any:
    """Return a Series as an array of numbers, or as a list."""
    return series.to_numpy() if getattr(series.dtype, "kind", "O") in "biuf" and not _is_nullable(series) else [*series]


def _is_nullable(series: Any) -> bool:
    return not isinstance(series.dtype, np.dtype)


def hugging_face(data: Any, spec: InputSpec, labels: bool = True, where: PathLike | None = None) -> Samples | Items:
    """Return the samples of a data set of Hugging Face in any format; where it has a transform, what that gives.

    Labels that are indices of named classes are those of the network where it knows all of these names.
    """
    if data.format["type"] == "custom":
        return Items(data, spec)
    table = data.with_format("arrow")
    columns: dict[str, Any] = {}
    for name in data.format["columns"]:
        read = partial(_arrow_rows, table.select_columns([name]), name)
        columns[name] = _arrow_column(len(data), table.data.column(name).type, read, where or "the data set")
    if not len(data):
        return Samples([[]])
    named = {name: feature.names for name, feature in data.features.items() if hasattr(feature, "names")}
    label = choose(columns, spec, str(where or "the data set")).label
    if labels and label is not None and label in named:
        columns[label] = renumbered(np.array(whole(columns[label])), named[label], spec)
    return samples_of_columns(columns, spec, where, labels)


def _arrow_rows(table: Any, name: str, rows: Sequence[int]) -> Any:
    return table[[*rows]].column(name)


def _arrow_column(length: int, dtype: Any, fetch: Callable[[Sequence[int]], Any], where: PathLike) -> LazyColumn:
    return LazyColumn(length, _arrow_kind(dtype), partial(_read_arrow, fetch, str(where)))


def _read_arrow(fetch: Callable[[Sequence[int]], Any], where: str, rows: Sequence[int]) -> list[Any]:
    column = fetch(rows)
    return [None] * len(rows) if column.null_count == len(rows) else [*column_values(column, where)]


def _arrow_kind(dtype: Any) -> Kind:
    """Return what a column of this type holds for each sample."""
    types = library("pyarrow", "pyarrow").types
    if types.is_dictionary(dtype):
        dtype = dtype.value_type
    if types.is_string(dtype) or types.is_large_string(dtype):
        return "text"
    is_number = types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype) or types.is_null(dtype)
    return "number" if is_number else "array"


def column_values(column: Any, where: str) -> Iterator[Any]:
    """Yield each value of an Arrow column as a picture, an array, a number or a text.

    Images may be bytes of image files, with or without a path beside them (as Hugging Face writes them), tensors, or
    lists of lists.

    >>> import pyarrow as pa
    >>> [*column_values(pa.array([[[1, 2], [3, 4]]]), "a.parquet")]
    [array([[1, 2],
            [3, 4]])]
    """
    pa = library("pyarrow", "pyarrow")
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # of an extension type, which older versions leave in chunks
            column = pa.concat_arrays(column.chunks)
    if isinstance(column.type, pa.FixedShapeTensorType):
        yield from column.to_numpy_ndarray()
        return
    column = getattr(column, "storage", column)
    if _arrow_kind(column.type) != "array" and not pa.types.is_null(column.type):
        yield from column.to_pylist()
        return
    dtype = column.type
    while pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype):
        dtype = dtype.value_type
    for value in column.to_pylist():
        yield _value(value, dtype, where)


def _value(value: Any, dtype: Any, where: str) -> Any:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return picture(io.BytesIO(value["bytes"]), value.get("path") or where)
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return picture(value["path"])
    if isinstance(value, bytes):
        return picture(io.BytesIO(value), where)
    if isinstance(value, list):
        return np.array(value, dtype=dtype.to_pandas_dtype())
    raise BadFile(
        where,
        f"a row holds {'nothing' if value is None else type(value).__name__} where an image or text should be",
        "write bytes of image files, tensors, lists of numbers, or strings",
    )


def parquet_columns(path: Path) -> Columns:
    """Return the columns of a Parquet file."""
    pa, parquet = library("pyarrow", "pyarrow"), library("pyarrow.parquet", "pyarrow")
    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise BadFile(path, f"it is not a complete Parquet file ({error})", "write it again") from error
    return {
        name: _arrow_column(table.num_rows, table.column(name).type, partial(_taken, table.column(name)), path)
        for name in table.column_names
    }


def _taken(column: Any, rows: Sequence[int]) -> Any:
    return column.slice(rows.start, len(rows)) if isinstance(rows, range) else column.take(rows)


def csv_columns(path: Path, spec: InputSpec) -> Columns:
    """Return the columns of a CSV file with a header: numbers where all cells are some, texts elsewhere.

    Labels that are names of the network's classes stay names, though these may look like numbers.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(path, f"it is not UTF-8 ({error})", "save it in this encoding") from error
    rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if path.suffix == ".tsv" else ",")
    header, cells = next(rows, []), list[list[str]]()
    _check_header(header, path)
    for row in rows:
        if row and len(row) != len(header):
            problem = f"line {rows.line_num} has {len(row)} cells, and the first line names {len(header)} columns"
            raise BadFile(path, problem, "write texts that hold commas or quotes in quotes")
        cells += [row] if row else []
    if not cells:
        raise BadFile(path, "it is empty", "write a line with the names of columns, and one for each sample")
    columns = dict(zip(header, (list(each) for each in zip(*cells, strict=True)), strict=True))
    label = first_of(header, LABEL_NAMES)
    named = [label] if label is not None and {*columns[label]} <= {*spec.classes} else []
    return {name: each if name in (*TEXT_NAMES, *named) else _parsed(each) for name, each in columns.items()}


def _check_header(header: Sequence[str], path: Path) -> None:
    """Raise if columns are not separated by commas, or not all have a name of their own."""
    if len(header) == 1 and (others := [mark for mark in OTHER_SEPARATORS if mark in header[0]]):
        raise BadFile(path, f"its cells are separated by {others[0]!r}", "save it with commas")
    if len({*header}) < len(header) or not all(header):
        raise BadFile(path, f"its first line is {','.join(header)!r}", "let it name every column, each by another name")


def _parsed(cells: list[str]) -> Any:
    """Return cells as numbers if all are some."""
    for kind in (int, float):
        with suppress(ValueError, OverflowError):
            return np.array([kind(cell) for cell in cells])
    return cells


def line_columns(path: Path, spec: InputSpec) -> Columns:
    """Return the columns of JSON lines: the keys of all objects."""
    rows = [*_objects(path, spec)]
    if not rows:
        raise BadFile(path, "it is empty", LINE)
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    if spec.takes_texts and spec.names[0] not in columns:
        columns["text"] = [row[str(first_of([*row], TEXT_NAMES))] for row in rows]
    return columns


def _objects(path: Path, spec: InputSpec) -> Iterator[Mapping[str, Any]]:
    """Yield the object of every line, which has a text, or the tokens of one, if the network reads texts."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadFile(path, f"line {number} is not JSON ({error})", "write one object per line") from error
        if not isinstance(row, dict) or (spec.takes_texts and not _has_text(row, spec)):
            raise BadFile(path, f"line {number} has no text", LINE)
        yield row


def _has_text(row: Mapping[str, Any], spec: InputSpec) -> bool:
    found = first_of([*row], TEXT_NAMES)
    return spec.names[0] in row or (found is not None and isinstance(row[found], str))
