"""The checks of the source tree and of its words find what was planted for them."""

import ast
import doctest
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def script(name):
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house, words = script("house"), script("words")


@pytest.mark.parametrize("module", [house, words], ids=["house", "words"])
def test_examples_of_the_scripts_print_what_they_show(module):
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


FIRST = """
from typing import TYPE_CHECKING, Any
from alight.second import Twice as Other
if TYPE_CHECKING:
    from alight.room import third

class Twice:
    def run(self, a, b, /, c, *args, d: "list[Any]" = 1, **settings: Any):
        return a
"""
SECOND = """
class Twice:
    pass

def late(value):
    from . import first
    from .room.third import nothing
"""
BRANCHES = "def branching(value):\n" + "\n".join(f"    if value == {each}:\n        return" for each in range(20))


def planted(folder, files):
    """Write files into a folder and return it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def rows(tmp_path):
    files = {
        "first.py": FIRST,
        "second.py": SECOND,
        "room/third.py": BRANCHES,
        "room/__init__.py": "",
        "__init__.py": "",
    }
    return house.measure(planted(tmp_path / "alight", files))


def value(rows, measure, room="all"):
    return next((row.value, row.detail) for row in rows if (row.measure, row.room) == (measure, room))


def test_planted_cycle_duplicate_and_branches_are_measured(rows):
    assert value(rows, "files") == (5, "")
    assert value(rows, "files", "room") == (2, "")
    assert value(rows, "module cycles") == (1, "alight.first alight.second")
    assert value(rows, "room cycles") == (1, "first second")
    assert value(rows, "imports at the top level", "first") == (1, "second 1")
    assert value(rows, "lazy imports", "second") == (2, "first 1; room 1")
    assert value(rows, "duplicate class names") == (1, "Twice in alight.first, alight.second")
    assert value(rows, "highest complexity") == (21, "21 alight.room.third.branching (line 1)")
    assert value(rows, "most arguments")[0] == 4
    assert value(rows, "Any in annotations")[0] == 2
    assert value(rows, "**keywords of type Any") == (1, "alight.first.Twice.run")


def test_missed_goals_are_named_and_fail_the_check(rows, tmp_path, capsys):
    missed = {row.measure for row in house.missed(rows)}
    complexities = {"highest complexity", "highest complexity, expressions counted"}
    assert missed == {"module cycles", "room cycles", "duplicate class names", *complexities}
    assert house.main(["--package", str(tmp_path / "alight"), "--check", "--csv", str(tmp_path / "house.csv")]) == 1
    assert ["duplicate", "class", "names", "1", "<=", "0", "over"] in map(
        str.split, capsys.readouterr().out.splitlines()
    )
    assert (tmp_path / "house.csv").read_text().startswith("measure,room,value,detail\nfiles,all,5,\n")


LONG = tuple(f"alight.engine.backends.torch.kernels.{name}_rows" for name in ("settle", "combine"))  # take pointers


def test_the_tree_has_no_cycle_no_class_twice_and_no_tangled_function():
    measured = house.measure(ROOT / "src/alight")
    for measure in ("module cycles", "room cycles", "duplicate class names"):
        assert value(measured, measure)[0] == 0, value(measured, measure)
    for measure in ("highest complexity", "highest complexity, expressions counted", "most arguments"):
        highest = [line for line in value(measured, measure)[1].split("; ") if not any(name in line for name in LONG)]
        over = [line for line in highest if int(line.split()[0]) > house.GOALS[measure]]
        assert not over, over


@pytest.mark.slow
def test_walks_of_common_tasks_are_measured_and_do_not_grow():
    counts = {row.measure: row.value for row in house.measure_walks(ROOT / "src/alight")}
    # the range of ties is a function and a file of predict, and three of calibrate order scores in it by hash
    most = {"alight calibrate": (174, 18), "alight predict, 40 images": (300, 38), "one HTTP request": (91, 22)}
    for name, (functions, files) in most.items():
        assert 20 < counts[f"{name}: functions"] <= functions
        assert 5 < counts[f"{name}: files"] <= files


def test_complexity_counts_the_branches_that_ruff_counts():
    source = """
def outer(value):
    try:
        with value:
            while value: pass
    except KeyError: pass
    else: pass
    match value:
        case 1: pass
        case _: pass
    def inner():
        for each in value: pass
    return [each for each in value if each and value]
"""
    assert house.complexity(ast.parse(source).body[0]) == 7


def test_code_that_runs_is_counted_once_and_not_at_import(tmp_path, monkeypatch):
    source = "def early(): pass\nearly()\ndef late(): return [each for each in range(3)]\ndef unused(): pass\n"
    package = planted(tmp_path / "traced_package", {"__init__.py": source})
    monkeypatch.syspath_prepend(tmp_path)
    tracer, before = house.Tracer(package), sys.getprofile()
    tracer.install()
    try:
        with tracer.noting():
            import traced_package

            traced_package.late()
            traced_package.late()
        traced_package.unused()
    finally:
        sys.setprofile(before)
        house.threading.setprofile(None)
    ran = tracer.functions()
    assert [*ran] == ["__init__.py"]
    assert {*ran["__init__.py"]} - {"<listcomp>"} == {"late"}


PLANTED = {
    "README.md": "There is no other.\nThis is\nno page; it is no longer one, as soon as it is read.\n",
    "docs/page.md": "> Those\n> who wait.\n",
    "src/alight/asked.py": "from x import Some\n\ndef _seat(some):  # By lot\n    return f'a {some.chance}, left'\n",
    "tests/test_runs.py": "def test_samples_are_told_apart():\n    told = 1\n",
    "tests/test_those_who_wait.py": "",
}


def test_planted_words_are_found_in_their_lines(tmp_path, capsys, monkeypatch):
    root = planted(tmp_path, PLANTED)
    found = [(hit.path.rpartition("/")[2], hit.line, hit.word) for hit in words.hits_in(root)]
    assert found == [
        ("asked.py", 1, "asked"),
        ("asked.py", 1, "Some"),
        ("asked.py", 3, "_seat"),
        ("asked.py", 3, "By lot"),
        ("asked.py", 4, "chance"),
        ("README.md", 2, "is no"),
        ("page.md", 1, "Those who"),
        ("test_runs.py", 1, "told"),
        ("test_those_who_wait.py", 1, "those_who"),
    ]
    assert words.main([str(root)]) == 1
    assert "docs/page.md:1: Those who -> samples that, users who\n" in capsys.readouterr().out
    monkeypatch.setitem(words.ALLOWED, "docs/page.md", {"those who"})
    assert len(words.hits_in(root)) == len(found) - 1


def test_plain_words_pass(tmp_path):
    root = planted(
        tmp_path, {"README.md": "The probability is not small.\n", "src/a.py": "def pack(left, found): ...\n"}
    )
    assert words.main([str(root)]) == 0
