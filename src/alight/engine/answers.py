"""Decisions as a table for people and programs: one row per sample, as CSV or Parquet."""

import csv
import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alight.errors import BadInput
from alight.files import PathLike, write_text, write_whole
from alight.outputs import Decisions


def write_answers(
    decisions: Decisions,
    path: PathLike,
    *,
    names: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    unit: str = "",
) -> Path:
    """The path of a table of samples, labels, exits, probabilities and costs; .parquet needs pyarrow.

    A label is the class's name where `classes` has names, else its index.
    """
    columns = answer_columns(decisions, names or range(len(decisions)), classes, unit)
    if Path(path).suffix != ".parquet":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        return write_text(path, text.getvalue())
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise BadInput(f"{path} is to be Parquet, which needs pyarrow: pip install pyarrow, or write .csv") from error
    return write_whole(path, lambda file: parquet.write_table(arrow.table(columns), file))


def answer_columns(
    decisions: Decisions, samples: Sequence[Any], classes: Sequence[str] = (), unit: str = ""
) -> dict[str, list[Any]]:
    """The columns of a table of answers, each with a cell for every sample.

    >>> answer_columns(Decisions([1], [0], [2.5]), ["a.png"], ["cat", "dog"], "ms")
    {'sample': ['a.png'], 'label': ['dog'], 'exit': [0], 'cost_ms': [2.5]}
    """
    columns = {
        "sample": list(samples),
        "label": [classes[index] if classes else index for index in decisions.predictions.tolist()],
        "exit": decisions.exits.tolist(),
        f"cost_{unit}" if unit else "cost": decisions.spent.tolist(),
    }
    if decisions.probabilities is not None:
        columns["probability"] = decisions.probabilities.tolist()
    return columns
