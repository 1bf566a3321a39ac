"""The doctor says what is there, what is missing for what, and what to do about it."""

import json
from importlib import metadata

import torch
from commands import run

import alight
from alight import provenance
from alight.cli import getting_started
from alight.cli.getting_started import EXTRAS


def findings(capsys):
    status, out, err = run("doctor --json", capsys)
    assert (status, err) == (0, "")
    return {each["name"]: each for each in json.loads(out)["findings"]}


def test_the_doctor_names_versions_extras_and_devices(capsys):
    found = findings(capsys)
    assert {"alight", *EXTRAS, "processor", "compiler"} <= set(found)
    assert alight.__version__ in found["alight"]["detail"]
    assert f"torch {metadata.version('torch')}" in found["torch"]["detail"]
    assert found["GPU"]["ok"] == torch.cuda.is_available()
    assert all(bool(each["advice"]) != each["ok"] for each in found.values())
    _, out, _ = run("doctor", capsys)
    assert len(out.splitlines()) == len(found) + sum(not each["ok"] for each in found.values())


def test_what_is_missing_comes_with_a_line_of_advice(capsys, monkeypatch):
    monkeypatch.setattr(provenance, "version", missing)
    found = findings(capsys)
    for name in ("torch", "vision", "text"):
        assert not found[name]["ok"]
        assert found[name]["advice"] == f'pip install "alight[{name}]"'
    assert found["pyarrow"]["advice"] == "pip install pyarrow"
    assert "GPU" not in found  # torch is missing


def missing(package):
    if package in ("numpy", "scipy", "tqdm"):
        return "1.0"
    raise metadata.PackageNotFoundError(package)


def test_what_is_installed_but_broken_is_reported(capsys, monkeypatch):
    def broken(name):
        raise OSError("libfoo.so: cannot open\nmore")

    monkeypatch.setattr(getting_started.importlib, "import_module", broken)
    found = findings(capsys)["vision"]
    assert not found["ok"]
    assert "libfoo.so: cannot open" in found["detail"]
    assert "more" not in found["detail"]


def test_every_extra_of_the_project_is_looked_at():
    extras = metadata.metadata("alight").get_all("Provides-Extra")
    assert set(extras) - {"dev", "test", "docs"} <= set(EXTRAS)
