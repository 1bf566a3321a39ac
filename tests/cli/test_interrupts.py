"""Ctrl-C, whenever it comes: one line, status 130, and no new or partial file."""

import signal

import pytest
import torch
from commands import COSTS, copy_network, interrupted, make_tables

from alight import calibrate
from alight.cli import main
from alight.cli.command import ExitStatus
from alight.engine.recorder import record
from alight.networks.store import load_model, save_model

MESSAGE = "alight: interrupted, no partial file is left"
LINES = {  # what is interrupted, at which word on stderr, and after so many seconds of work
    "while libraries load": ("sweep tables/labelled.npz tables/test.npz --costs tables/costs.json", "ready", 0.1),
    "sweep": ("sweep tables/labelled.npz tables/test.npz --costs tables/costs.json --methods auto", "sweep", 0.5),
    "calibrate": (
        "calibrate tables/labelled.npz --costs tables/costs.json --budget 50% --method genetic -o policy.json"
        " --set generations=100000",
        "ready",
        1.5,
    ),
    "demo": ("demo -o shown/deep", "train:", 0.5),
    "demo over a folder": ("demo -o tables", "train:", 0.5),
    "while torch loads": ("attach timm:test_resnet -o new/model", "ready", 1.0),
    "train": ("train model train.npz --mode joint --epochs 100000 -o new/trained", "train:", 0.2),
    "record": ("record model train.npz --batch-size 1 -o new.npz", "record:", 0.3),
    "record over a table": ("record model train.npz --batch-size 1 -o outputs.npz --force", "record:", 0.3),
    "predict": ("predict model policy.json train.npz --batch-size 1 -o answers.parquet", "predict:", 0.3),
    "bench": ("bench model policy.json train.npz --batch-sizes 1 --samples 1400", "batches of 1", 0.5),
}
QUICK = ("while libraries load", "sweep", "calibrate", "while torch loads")  # less than five seconds


@pytest.fixture(scope="module")
def place(tmp_path_factory, network):
    folder = copy_network(network, tmp_path_factory.mktemp("interrupted"))
    (folder / "tables").mkdir()
    make_tables(folder / "tables")
    model = load_model(folder / "model")
    with torch.no_grad():
        for each in model.heads.parameters():
            each.add_(0.01)  # as trained heads, of which no line says that they are not
    save_model(model, folder / "model", force=True)
    images = model.recipe["example"]["shape"][1:]
    outputs = record(model, [torch.randn(64, *images)], progress=False)
    outputs.save(folder / "outputs.npz")
    calibrate.eero(COSTS.at_exits([0, 1, 3]), "50%", outputs).save(folder / "policy.json")
    return folder


def test_an_interrupt_that_a_library_swallows_comes_again(tmp_path):
    deaf = """
import signal, sys, types
def __getattr__(name):  # where the command line looks up its parser: a library that hears no interrupt
    try:
        sys.stderr.write("deaf\\n")  # at once: the interrupt comes as soon as it is seen
        signal.pause()  # until the interrupt
    except:
        signal.pause()  # until it comes again
sys.modules["alight.cli.parser"] = module = types.ModuleType("alight.cli.parser")
module.__getattr__ = __getattr__
"""
    done = interrupted("doctor", tmp_path, "deaf", before=deaf)
    assert done.returncode == 130
    assert done.stderr == f"ready\ndeaf\n{MESSAGE}\n"


def contents(folder):
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in LINES]
)
def test_an_interrupt_prints_one_line_and_leaves_no_partial_file(case, place):
    before = contents(place)
    line, word, work = LINES[case]
    done = interrupted(line, place, word, work)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.endswith(f"{MESSAGE}\n")
    own = [each for each in done.stderr.replace("\r", "\n").splitlines() if each.startswith("alight:")]
    assert own == [MESSAGE]
    after = contents(place)
    kept = {path for path in after if path.parts[:2] == ("new", "trained") or path.parts == ("new",)}
    if case == "train":  # what it resumes from, if an epoch was done
        assert {path.name for path in kept if path.parts[2:]} <= {"checkpoint.safetensors"}
        assert all((place / path).is_dir() == (len(path.parts) < 3) for path in kept)
        after = {path: content for path, content in after.items() if path not in kept}
    assert after == before


def test_a_library_that_fails_to_load_when_interrupted_is_one_line_too(monkeypatch, capsys):
    def swallowing():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("could not import module datetime") from None  # as NumPy does

    monkeypatch.setattr("alight.cli.parser.parser", swallowing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process may ignore it
    try:
        assert main(["doctor"]) == ExitStatus.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "alight: interrupted, no partial file is left\n"
