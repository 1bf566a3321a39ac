"""Rooms follow the data: imports run one way."""

import ast
from pathlib import Path

import pytest

import alight

PACKAGE = Path(alight.__file__).parent
FOUNDATION = {"errors", "files", "scores", "outputs", "costs", "display"}
MAY_IMPORT = {
    "errors": set(),
    "files": {"errors"},
    "scores": set(),
    "display": set(),
    "outputs": {"errors", "files", "scores", "display"},
    "costs": {"errors", "files", "display"},
    "provenance": set(),
    "recordings": FOUNDATION,
    "budgeting": {"errors"},
    "policies": FOUNDATION | {"budgeting"},
    "calibrate": FOUNDATION | {"budgeting", "policies"},
    "evaluation": FOUNDATION | {"policies"},
    "cutting": FOUNDATION,
    "networks": FOUNDATION | {"cutting", "data"},
    "data": {"errors", "files"},
    "training": FOUNDATION | {"networks", "data"},
    "costing": FOUNDATION | {"cutting", "networks", "data"},
    "engine": FOUNDATION | {"networks", "data", "policies", "deploy"},
    "planning": FOUNDATION | {"networks", "data", "policies", "calibrate", "costing", "engine"},
    "deploy": FOUNDATION | {"policies", "export", "data", "engine"},
    "export": FOUNDATION | {"networks", "data", "policies", "engine", "deploy"},
    "cluster": FOUNDATION | {"networks", "data", "policies", "engine"},
    "report": FOUNDATION | {"policies", "evaluation"},
    "serve": FOUNDATION | {"policies", "networks", "data", "engine", "deploy", "export", "__version__"},
    "cli": FOUNDATION
    | {"budgeting", "policies", "calibrate", "evaluation", "recordings", "report", "__version__"}
    | {"cutting", "networks", "training", "costing", "data", "engine", "planning", "cluster", "provenance"}
    | {"deploy", "export", "serve", "demo"},
    "demo": FOUNDATION
    | {"calibrate", "evaluation", "recordings", "policies", "report", "provenance"}
    | {"networks", "training", "costing", "data", "engine", "planning"},
}
NO_TORCH = {
    "budgeting",
    "policies",
    "calibrate",
    "evaluation",
    "outputs",
    "costs",
    "scores",
    "report",
    "recordings",
    "files",
    "display",
    "deploy",
}


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


@pytest.mark.parametrize("module", [name for name in modules() if name.split(".")[1] in NO_TORCH])
def test_the_mathematics_never_imports_torch(module):
    imported = imported_modules(modules()[module].read_text(), module)
    assert not {name for name in imported if name.split(".")[0] in ("torch", "torchvision")}


def test_every_room_is_in_the_table():
    assert {name.split(".")[1] for name in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "line",
    [
        "from alight.calibrate.planned_rates import eero",
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
    assert "torch.nn" in imported_modules("import torch.nn", "alight.budgeting.rates")
    assert "torch.nn" in imported_modules("from torch import nn", "alight.budgeting.rates")


def test_public_names_are_sorted_and_all_there():
    assert alight.__all__ == sorted(alight.__all__)
    for name in alight.__all__:
        assert getattr(alight, name) is not None
    assert set(alight.__all__) <= set(dir(alight))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        alight.nonsense  # noqa: B018
