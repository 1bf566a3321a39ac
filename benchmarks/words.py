"""Check that names, docstrings, messages and pages use the field's words: prints file:line: word -> replacement.

    python benchmarks/words.py            # exit status 1 if there is a hit

Looks at src/**/*.py (names, comments, strings and file names), docs/**/*.md, README.md, CONTRIBUTING.md, CHANGELOG.md,
and the names of files and tests in tests/. A phrase may be broken over two lines, or joined by underscores.
"""

import argparse
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

# Anywhere, upper or lower case, as whole words or as parts of a name; a space stands for any gap.
TEXT = {
    r"told": "reported, given or returned",
    r"foretold": "predicted",
    r"dear": "expensive",
    r"dearer": "more expensive",
    r"dearest": "most expensive",
    r"whoever": "the one that",
    r"by lot": "random, at random",
    r"by turns": "interleaved",
    r"those who": "samples that, users who",
    r"chances?": "probability",
    r"promis(?:e|es|ed|ing)": "guarantee",
    r"plain networks?": "full network",
    r"is no": "is not a, has no",
    r"as it is": "unchanged, or reword",
    r"as they are": "unchanged, or reword",
    r"be it ever so": "however",
    r"quickened": "accelerated",
    r"worn": "applied",
    r"hurry": "low_latency",
    r"walks_alone": "supports_single_sample",
    r"close_up": "compact",
}
# Not hits, though a word above is part of them; a space stands for any gap here, too.
PHRASES = ("there is no", "is no longer", "by chance", "as (?:soon|long|far|often|much|many) as (?:it is|they are)")

# Names in code as a whole, leading underscores aside; in this case exactly. Modules count in lower case.
NAMES = {
    r"Told": "HeadValues, Prediction",
    r"Asked": "PredictRequest",
    r"Wrong": "ErrorResponse",
    r"Left": "ExitCount",
    r"Book": "SpendLedger",
    r"How": "JobConfig",
    r"Found": "CommandResult",
    r"Some": "LayerSubset",
    r"Given": "HiddenStatesInput",
    r"told_of_one": "score_one",
    r"wide": "pack",
    r"apart": "unpack",
    r"ahead": "prefetch",
    r"enough": "inputs_for_duration",
    r"titles": "metadata",
    r"seat": "insert",
    r"by_lot": "random_exits",
    r"by_turns": "interleaved_timings",
    r"quickened": "accelerate",
}

ALLOWED: dict[str, set[str]] = {}  # words, in lower case, by the file that may use them

GAP = r"""[\s_#>"']+"""  # also the start of a comment, a quotation or a string in the next line
START = r"(?:(?<![A-Za-z])|(?-i:(?<=[a-z])(?=[A-Z])))"  # of a word: BudgetPromise has two
END = r"(?:(?![A-Za-z])|(?-i:(?<=[a-z])(?=[A-Z])))"


class Hit(NamedTuple):
    """A word that has a better one, and where it stands."""

    path: str
    line: int
    word: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word} -> {self.replacement}"


def _pattern(words: str) -> str:
    return START + words.replace(" ", GAP) + END


TEXT_PATTERNS = [(re.compile(_pattern(word), re.IGNORECASE), better) for word, better in TEXT.items()]
PHRASE_PATTERN = re.compile("|".join(map(_pattern, PHRASES)), re.IGNORECASE)
NAME_PATTERNS = [(re.compile(word), better) for word, better in NAMES.items()]
MODULE_PATTERNS = [(re.compile(word, re.IGNORECASE), better) for word, better in NAMES.items()]


def in_text(text: str, path: str) -> list[Hit]:
    """Return the hits in a text.

    >>> [str(hit) for hit in in_text("What is told of those\\n# who leave; there is no other.", "page.md")]
    ['page.md:1: told -> reported, given or returned', 'page.md:1: those who -> samples that, users who']
    """
    masked = PHRASE_PATTERN.sub(lambda match: re.sub(r"\w", "-", match[0]), text)
    found = [(match, better) for pattern, better in TEXT_PATTERNS for match in pattern.finditer(masked)]
    return [
        Hit(path, 1 + text.count("\n", 0, match.start()), re.sub(r"[\s#>\"']+", " ", match[0]), better)
        for match, better in sorted(found, key=lambda pair: pair[0].start())
    ]


def in_name(
    name: str, path: str, line: int, patterns: Sequence[tuple[re.Pattern[str], str]] = NAME_PATTERNS
) -> list[Hit]:
    """Return the hit of a whole name, if it is one.

    >>> in_name("_wide", "engine.py", 3)
    [Hit(path='engine.py', line=3, word='_wide', replacement='pack')]
    """
    return [Hit(path, line, name, better) for pattern, better in patterns if pattern.fullmatch(name.lstrip("_"))]


def in_code(source: str, path: str) -> list[Hit]:
    """Return the hits in a module: its name, whole names in the code first, then text that holds no such name."""
    hits = in_name(Path(path).stem, path, 1, MODULE_PATTERNS) or in_text(Path(path).stem, path)
    names, lines = [], source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and (found := in_name(token.string, path, token.start[0])):
            names += found
            row, column = token.start
            blank = "-" * len(token.string)
            lines[row - 1] = lines[row - 1][:column] + blank + lines[row - 1][column + len(blank) :]
    return hits + sorted([*names, *in_text("".join(lines), path)], key=lambda hit: hit.line)


def in_test_names(source: str, path: str) -> list[Hit]:
    """Return the hits in the names of a test file and of its tests."""
    hits = in_text(Path(path).stem, path)
    for line, text in enumerate(source.splitlines(), 1):
        if match := re.match(r"\s*(?:async )?def (test_\w+)", text):
            hits += [hit._replace(line=line) for hit in in_text(match[1], path)]
    return hits


def hits_in(root: Path) -> list[Hit]:
    """Return all hits in a repository, without those that are allowed."""
    return [hit for hit in _all_hits(root) if hit.word.lower() not in ALLOWED.get(hit.path, ())]


def _all_hits(root: Path) -> Iterator[Hit]:
    pages = [*(root / name for name in PAGES), *sorted((root / "docs").rglob("*.md"))]
    looked_at = [
        *((path, in_code) for path in sorted((root / "src").rglob("*.py"))),
        *((path, in_text) for path in pages if path.exists()),
        *((path, in_test_names) for path in sorted((root / "tests").rglob("*.py"))),
    ]
    for path, look in looked_at:
        yield from look(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the repository (default: this one)")
    hits = hits_in(parser.parse_args(given).root.resolve())
    for hit in hits:
        print(hit)
    if hits:
        counts = Counter(hit.path.partition("/")[0] for hit in hits)
        summary = ", ".join(f"{place} {count}" for place, count in counts.most_common())
        print(f"{len(hits)} words have a better one: {summary}", file=sys.stderr)
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main())
