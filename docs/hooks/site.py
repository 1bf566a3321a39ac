"""Formulas as MathML, linked files of the repository, the commands' help, and a check that nothing is fetched.

Formulas become MathML when the site is built, which browsers draw without a script. A page may link to any file of the
repository: files outside of docs/ are copied beside the pages. A page that fetches from another host is an error.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from html import unescape
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from alight.cli import main
from alight.cli.parser import COMMANDS

ROOT = Path(__file__).parents[2]
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
MEASURED = re.compile(r"<p>(?=(?:Measured|Run) on \d{4}-)")
LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)#\s]+)(?=\))")
FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)\s*=\s*[\"']?(?:https?:)?//[^>]*>")
COMMANDS_HERE = "<!-- commands -->"


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository that pages link to."""
    for page in files.documentation_pages():
        for place in filter(None, (outside(page.src_uri, target) for target in LINK.findall(page.content_string))):
            if not files.get_file_from_path(place):
                files.append(File.generated(config, place, abs_src_path=str(ROOT / place)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page with links that hold in the site, and every command's help at its marker."""
    here = page.file.src_uri

    def led(match: re.Match[str]) -> str:
        place = outside(here, match[1])
        return match[1] if place is None else os.path.relpath(place, PurePosixPath(here).parent)

    return LINK.sub(led, markdown).replace(COMMANDS_HERE, "\n\n".join(commands()))


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with its formulas as MathML, and small lines that say on what something was measured."""
    html = MEASURED.sub('<p class="measured">', html)
    return FORMULA.sub(lambda found: formula(unescape(found[3]), inline=found[2] == "("), html)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Return the page unchanged; raise an error if it fetches something from another host."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches from another host: {found[0]}; put the file into docs/")
    return output


def formula(latex: str, *, inline: bool) -> str:
    """Return a formula as MathML; a display formula in a box that scrolls."""
    made: str = convert(latex, "inline" if inline else "block")
    return made if inline else f'<div class="formula">{made}</div>'


def outside(page: str, target: str) -> str | None:
    """Return the path from the root of the file outside of docs/ that a page links to, None if it is inside."""
    path = (ROOT / "docs" / page).parent.joinpath(target).resolve()
    if path.is_relative_to(ROOT / "docs") or not path.is_file():
        return None
    return path.relative_to(ROOT).as_posix()


def commands() -> Iterator[str]:
    """Yield every command and the output of its --help as Markdown."""
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    for name in COMMANDS:
        with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
            main([name, "--help"])
        yield f"## alight {name}\n\n```text\n{said.getvalue().strip()}\n```"
