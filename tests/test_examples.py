"""Every public name has an example in its docstring; all examples run, since pytest collects them from src."""

import inspect

import pytest

import alight
from alight import calibrate

METHODS = [name for name, each in vars(calibrate).items() if not name.startswith("_") and not inspect.ismodule(each)]
NAMES = [*alight.__all__, *(f"calibrate.{name}" for name in METHODS)]
VALUES = tuple(
    f"calibrate.{name}" for name in ("COMBINE", "CONTRACTS", "METHODS", "Method", "Fit")
)  # no functions, no classes


def documented(name):
    owner = calibrate if name.startswith("calibrate.") else alight
    return getattr(owner, name.removeprefix("calibrate."))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in VALUES])
def test_every_public_name_has_an_example(name):
    assert ">>> " in (inspect.getdoc(documented(name)) or "")


def test_only_values_go_without():
    assert not any(inspect.isfunction(documented(name)) or inspect.isclass(documented(name)) for name in VALUES)
    assert set(VALUES) <= set(NAMES)


def test_examples_are_run(pytestconfig):
    assert "--doctest-modules" in pytestconfig.getini("addopts")
    assert "src" in pytestconfig.getini("testpaths")
