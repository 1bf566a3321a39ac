"""Runs the cells of a notebook, as its reader would, and keeps what each shows below it: tables, text and figures.

    python experiments/notebook_outputs.py notebooks/tour.ipynb      # half a minute on one core

Cells share one namespace and run in a temporary folder; no Jupyter is needed. What a cell prints is kept as text, the
value of its last line as HTML where it has some, and the figure that it leaves open as a PNG file.
"""

import ast
import base64
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib

from alight.files import write_text

Cell = dict[str, Any]


def shown(source: str, names: dict[str, object], where: str) -> tuple[str, object]:
    """Run a cell; return what it prints and the value of its last line, None where that is not shown."""
    *before, last = ast.parse(source).body
    value = None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(before, []), where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
        else:
            exec(compile(ast.Module([last], []), where, "exec"), names)
    return printed.getvalue(), None if source.rstrip().endswith(";") else value


def run(notebook: dict[str, Any], where: str) -> Iterator[tuple[Cell, str, object]]:
    """Yield every cell of code with what it prints and shows."""
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            yield cell, *shown("".join(cell["source"]), names, f"{where}, cell {number}")


def outputs(printed: str, value: object, number: int) -> list[Cell]:
    """Return what a notebook keeps below a cell."""
    kept: list[Cell] = []
    if printed:
        kept.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        kept.append({"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": number})
    return kept + [{"output_type": "display_data", "data": {"image/png": each}, "metadata": {}} for each in figures()]


def figures() -> Iterator[str]:
    """Yield the open figures as PNG files in base64, and close them."""
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, dpi=90, bbox_inches="tight")
        yield base64.b64encode(file.getvalue()).decode()
    pyplot.close("all")


def main() -> None:
    matplotlib.use("agg")
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            for number, (cell, printed, value) in enumerate(run(notebook, path.name), start=1):
                cell |= {"outputs": outputs(printed, value, number), "execution_count": number}
        write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
