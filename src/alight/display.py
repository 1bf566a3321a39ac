"""Small tables for notebooks: HTML without scripts or styles, every text escaped."""

from collections.abc import Sequence
from html import escape


def html_table(title: str, columns: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a table with a title, columns whose first cell is their name, and notes below.

    >>> html_table("Two < three", [["exit", "0"], ["cost", "1.5"]])
    '<table><caption>Two &lt; three</caption><thead><tr><th>exit</th><th>cost</th></tr></thead><tbody><tr><td>0</td><td>1.5</td></tr></tbody></table>'
    """  # noqa: E501
    header, *rows = zip(*columns, strict=True)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return table + "".join(f"<p>{escape(note)}</p>" for note in notes if note)
