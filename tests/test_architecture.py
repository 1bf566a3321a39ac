"""Rooms follow the data: imports run one way."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import alight

PACKAGE = Path(alight.__file__).parent
FOUNDATION = {"errors", "files", "scores", "outputs", "costs", "display", "provenance"}
MAY_IMPORT = {
    "display": set(),
    "errors": {"display"},
    "files": {"errors"},
    "scores": set(),
    "outputs": {"errors", "files", "scores", "display"},
    "costs": {"errors", "files", "display"},
    "provenance": set(),
    "recordings": FOUNDATION,
    "budgeting": {"errors"},
    "policies": FOUNDATION | {"budgeting"},
    "calibrate": FOUNDATION | {"budgeting", "policies"},
    "evaluation": FOUNDATION | {"policies"},
    "benchmark": FOUNDATION | {"policies", "evaluation", "recordings"},
    "cutting": FOUNDATION,
    "networks": FOUNDATION | {"cutting", "data"},
    "data": {"errors", "files", "outputs"},
    "training": FOUNDATION | {"networks", "data"},
    "costing": FOUNDATION | {"cutting", "networks", "data", "engine"},
    "engine": FOUNDATION | {"networks", "data", "policies"},
    "planning": FOUNDATION | {"networks", "data", "policies", "calibrate", "costing", "engine", "export"},
    "export": FOUNDATION | {"networks", "data", "policies", "engine"},
    "report": FOUNDATION | {"policies", "evaluation"},
    "sklearn": FOUNDATION | {"policies", "calibrate"},
    "routing": FOUNDATION | {"budgeting", "policies", "data"},
    "fitting": FOUNDATION
    | {"policies", "calibrate", "evaluation", "report"}
    | {"networks", "training", "costing", "data", "engine", "planning", "export"},
    "cluster": FOUNDATION | {"networks", "data", "policies", "engine"},
    "serve": FOUNDATION | {"policies", "networks", "data", "engine", "__version__"},
    "demo": FOUNDATION
    | {"calibrate", "evaluation", "recordings", "policies", "report"}
    | {"networks", "training", "costing", "engine", "fitting"},
    "cli": FOUNDATION
    | {"budgeting", "policies", "calibrate", "evaluation", "benchmark", "recordings", "report", "__version__"}
    | {"cutting", "networks", "training", "costing", "data", "engine", "planning", "export", "fitting", "routing"}
    | {"cluster", "serve", "demo"},
    "__main__": {"cli"},
}
NO_TORCH = {"errors", "files", "display", "scores", "outputs", "costs", "provenance", "recordings"}
NO_TORCH |= {"budgeting", "policies", "calibrate", "evaluation", "benchmark", "report", "data", "engine", "fitting"}
NO_TORCH |= {"routing", "sklearn"}
WITH_TORCH = ("alight.engine.backends.torch", "alight.engine.backends.aoti")  # what runs on torch
LATE = {"data", "engine", "fitting"}  # may import torch, or networks that do, inside a function


def imported_modules(source: str, module: str) -> set[str]:
    """Full names of everything that a module imports, wherever in the file, relative imports resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *(node.module or "").split(".")]).strip(".")
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def rooms_imported(source: str, module: str) -> set[str]:
    inside = [name.split(".") for name in imported_modules(source, module) if name.split(".")[0] == "alight"]
    return {parts[1] if len(parts) > 1 else "*" for parts in inside}


def modules() -> dict[str, Path]:
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {".".join(["alight", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in files}


@pytest.mark.parametrize("module", modules())
def test_a_room_imports_only_the_rooms_below_it(module):
    room = module.split(".")[1]
    assert rooms_imported(modules()[module].read_text(), module) - {room} <= MAY_IMPORT[room]


def without_torch() -> list[str]:
    return [name for name in modules() if name.split(".")[1] in NO_TORCH and not name.startswith(WITH_TORCH)]


def at_import(source: str) -> str:
    """The source without the bodies of its functions: what runs when the module is imported."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            node.body = [ast.Pass()]
    return ast.unparse(tree)


@pytest.mark.parametrize("module", without_torch())
def test_what_needs_no_torch_never_imports_it(module):
    source = modules()[module].read_text()
    imported = imported_modules(at_import(source) if module.split(".")[1] in LATE else source, module)
    assert not {name for name in imported if name.split(".")[0] in ("torch", "torchvision")}
    if module.split(".")[1] in ("engine", "fitting"):
        assert not {name for name in imported if name.startswith(("alight.networks", *WITH_TORCH))}


def test_importing_what_needs_no_torch_does_not_load_it():
    script = f"import sys, importlib\nfor name in {without_torch()!r}: importlib.import_module(name)\n"
    script += "assert 'torch' not in sys.modules, 'torch is there'"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_policies_know_whether_they_combine_answers():
    rooms = ("alight.policies", "alight.calibrate", "alight.engine.backends.torch")  # a kernel takes its numbers
    others = {module: path for module, path in modules().items() if not module.startswith(rooms)}
    asking = [module for module, path in others.items() if ".combination" in attributes_read(path.read_text())]
    assert not asking
    assert ".combination" in attributes_read(modules()["alight.policies.route"].read_text())  # it can be found


def attributes_read(source: str) -> set[str]:
    return {f".{node.attr}" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def test_every_room_is_in_the_table():
    assert {name.split(".")[1] for name in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "line",
    [
        "from alight.calibrate.published import eero",
        "from alight import calibrate",
        "import alight.calibrate",
        "import alight.calibrate.eero as e",
        "from ..calibrate import eero",
        "from .. import calibrate",
        "def late():\n    from alight.calibrate import METHODS",
    ],
)
def test_the_import_test_can_fail(line):
    assert "calibrate" in rooms_imported(line, "alight.policies.policy")
    assert not rooms_imported(line, "alight.policies.policy") <= MAY_IMPORT["policies"]


def test_the_torch_test_can_fail():
    assert "torch" in imported_modules(at_import("import torch\ndef late():\n    import numpy"), "alight.data.batches")
    assert "torch" not in imported_modules(at_import("def late():\n    import torch"), "alight.data.batches")
    assert "torch.nn" in imported_modules("import torch.nn", "alight.budgeting.rates")
    assert "torch.nn" in imported_modules("from torch import nn", "alight.budgeting.rates")


TESTS = sorted(Path(__file__).parent.rglob("*.py"))
BY_THE_CLOCK = re.compile(  # asyncio.sleep(0) lets other tasks run; tests/waiting.py waits for a condition
    r"\bsleep\b(?!\(0\))|\.join\(0?\.\d|\bEvent\(\)\.wait\([^)]|\bTimer\("
)
ROOM_OF_TEST = {"test_fit": "fitting"}  # others beside the rooms are named as their room is


def pauses(source: str) -> list[str]:
    """Lines that let time pass instead of waiting for a condition, those of scripts in strings included."""
    return [line.strip() for line in source.splitlines() if BY_THE_CLOCK.search(line)]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_")


def defined_names(tree: ast.AST) -> set[str]:
    """Private names that code defines: functions, classes, attributes, variables and arguments."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return {name for name in names if is_private(name)}


@cache
def private_names() -> dict[str, set[str]]:
    """Private names by room; scripts of experiments/ and benchmarks/ are rooms too."""
    root, names = Path(__file__).parent.parent, {}
    scripts = {path: path.parent.name for room in ("experiments", "benchmarks") for path in (root / room).glob("*.py")}
    for path, room in ({path: name.split(".")[1] for name, path in modules().items()} | scripts).items():
        names.setdefault(room, set()).update(defined_names(ast.parse(path.read_text())))
    return names


def used_names(tree: ast.AST) -> set[str]:
    """Private names that code imports, reads from an object, or gives to setattr and its like."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names |= {*node.name.split(".")}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            names |= {part for text in texts for part in text.split(".") if called.endswith(("attr", "patch"))}
    return {name for name in names if is_private(name)}


def names_of_other_rooms(source: str, room: str) -> set[str]:
    """Private names of other rooms than this one that the source of a test uses."""
    tree, names = ast.parse(source), private_names()
    own = defined_names(tree) | names.get(room, set())
    return (used_names(tree) - own) & set().union(*names.values())


def room_of_test(path: Path) -> str:
    inside = path.relative_to(Path(__file__).parent)
    return inside.parts[0] if len(inside.parts) > 1 else ROOM_OF_TEST.get(path.stem, path.stem.removeprefix("test_"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(Path(__file__).parent).as_posix())
def test_a_test_neither_sleeps_nor_uses_a_private_name_of_another_room(path):
    source = path.read_text()
    assert path == Path(__file__) or path.name == "waiting.py" or not pauses(source)
    assert not names_of_other_rooms(source, room_of_test(path))


def test_the_test_of_tests_can_fail():
    for line in ("time.sleep(0.1)", "call(sleep, 3)", "thread.join(0.02)", "Event().wait(seconds)", "Timer(2, kill)"):
        assert pauses(f"SCRIPT = 'import time'\n    {line}") == [line]
    assert not pauses("await asyncio.sleep(0)\nprocess.wait(60)\nawait asyncio.Event().wait()\n', '.join(names)")
    for line in (
        "from alight.cutting.proof import _fix_other_sizes",
        "proof._fix_other_sizes(stages)",
        "patch.setattr(proof, '_fix_other_sizes', None)",
        "patch.setattr('alight.cutting.proof._fix_other_sizes', None)",
    ):
        assert names_of_other_rooms(line, "networks") == {"_fix_other_sizes"}
        assert not names_of_other_rooms(line, "cutting")
    assert not names_of_other_rooms("class Own:\n    def _fix_other_sizes(self): self._fix_other_sizes()", "networks")


def test_public_names_are_sorted_and_all_there():
    assert alight.__all__ == sorted(alight.__all__)
    for name in alight.__all__:
        assert getattr(alight, name) is not None
    assert set(alight.__all__) <= set(dir(alight))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        alight.nonsense  # noqa: B018
