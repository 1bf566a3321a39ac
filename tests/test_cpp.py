"""The walk in C++ decides as Python does."""

import csv
import io
import json
import os
import shutil
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import shared_folder
from exported import drawn, folder, images, network, older_exporter, policy
from torch import nn

from alight import Costs, MultiExitModel, Normalisation, Predictor, RunSettings, calibrate, export_model, record
from alight.budgeting.thresholds import tie_range
from alight.engine.backends import Reads, score_rows
from alight.engine.backends.onnx import ELSEWHERE
from alight.engine.manifest import checksum
from alight.export.precision import lower, put_policy
from alight.networks.heads import TokenHead
from alight.policies.policy import Streak, Threshold

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which("c++")
OPENED = (0, 1, 3)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def runtime_library():
    """ONNX Runtime's library, which its Python package brings along."""
    onnxruntime = pytest.importorskip("onnxruntime")
    return next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*"))


def compiled(source, target, *options):
    """The program of a source file, compiled with the header."""
    command = [COMPILER, "-std=c++17", "-pthread", *options, "-I", ROOT / "cpp", source, "-o", target, "-ldl"]
    subprocess.run(command, check=True)
    return target


def sanitizers(place):
    """Options of the compiler for its sanitizers, where it has them."""
    options = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    command = [COMPILER, *options, "-xc++", "-", "-o", place / "sanitised"]
    tried = subprocess.run(command, input=b"int main() {}", capture_output=True)
    return [] if tried.returncode else options


@pytest.fixture(scope="module")
def program():
    def build(place):
        warnings = ("all", "extra", "conversion", "sign-conversion", "shadow", "old-style-cast", "pedantic", "error")
        compiled(ROOT / "cpp/example.cpp", place / "example", *(f"-W{each}" for each in warnings))

    return shared_folder(Path(os.environ["SESSION_FOLDER"]), "cpp", build) / "example"


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    return lower(folder(), tmp_path_factory.mktemp("int8") / "int8", "int8", [(images()[:64],)])


def decided(program, place, array, tmp_path, batch=1, warm=None, times=False):
    np.save(tmp_path / "images.npy", array)
    options = ["--batch", str(batch), "--library", str(runtime_library()), *(["--times"] if times else [])]
    options += [] if warm is None else ["--warm", str(warm)]
    done = subprocess.run([program, place, tmp_path / "images.npy", *options], capture_output=True, text=True)
    return done, list(csv.DictReader(io.StringIO(done.stdout)))


def assert_same(rows, decisions):
    assert [row["prediction"] for row in rows] == [network().classes[index] for index in decisions.predictions]
    names = [network().exits[index] for index in decisions.exits]
    assert [row["exit"] for row in rows] == names
    assert [float(row["cost"]) for row in rows] == decisions.spent.tolist()
    if decisions.probabilities is not None:
        assert np.allclose([float(row["probability"]) for row in rows], decisions.probabilities, atol=1e-6)


def with_policy(place, rule, tmp_path):
    shutil.copytree(place, tmp_path / "copied")
    put_policy(tmp_path / "copied", rule)
    return tmp_path / "copied"


@pytest.mark.parametrize("kind", ["threshold", "patience", "streak", "mixture", "lottery"])
def test_every_rule_decides_as_in_python(kind, program, tmp_path):
    place = with_policy(folder(), drawn(kind, np.random.default_rng(3), OPENED), tmp_path)
    expected = Predictor.load(place, settings=RunSettings(threads=1), probabilities=True)
    decisions = expected(images(), np.arange(len(images())))
    for batch in (1, 64):
        done, rows = decided(program, place, images(), tmp_path, batch)
        assert done.returncode == 0, done.stderr
        assert_same(rows, decisions)
        assert f"batches of {batch}: mean" in done.stderr


@pytest.mark.parametrize("method", ["eero, vote", "eero, agreement", "patience, vote", "learned_stopping", "eenet"])
def test_combined_exits_decide_as_in_python(method, program, tmp_path):
    name, _, combine = method.partition(", ")
    fit = calibrate.METHODS[name]
    fit = calibrate.combined(fit, combine) if combine else fit
    labelled = network_and_labels()
    fitted = fit(Costs([1.0, 1.5, 3.5], [0.0, 0.0, 0.0], "FLOPs"), "70%", labelled)
    rule = fitted.renumbered(OPENED, num_exits=4, exits=network().exits, full_cost=6.0)
    assert rule.combination is not None
    place = with_policy(folder(), rule, tmp_path)
    has_one = rule.combination.keeps_answers
    predictor = Predictor.load(place, settings=RunSettings(threads=1), probabilities=has_one)
    decisions = predictor(images(), np.arange(len(images())))
    assert len({*decisions.exits.tolist()}) > 1
    for batch in (1, 64):
        done, rows = decided(program, place, images(), tmp_path, batch)
        assert done.returncode == 0, done.stderr
        if not has_one:
            assert {row["probability"] for row in rows} == {""}
        assert_same(rows, decisions)


def test_other_combinations_are_refused_with_what_runs_instead(program, tmp_path):
    add = {"combination": {"kind": "GeometricMean", "exits": [0, 1, 3]}}
    place = with_changed(folder(), "policy.json", lambda content: content.update(add), tmp_path / "combined")
    done, _ = decided(program, place, images()[:3], tmp_path)
    said = "the policy combines exits as a GeometricMean, which does not run in C++: calibrate by `eero`, or"
    assert (done.returncode, said in done.stderr) == (1, True)


def network_and_labels():
    """What the open exits say about the images, and labels that the later exits are more often right about."""
    found = record(Predictor.load(folder(), settings=RunSettings(threads=1)).backend, images(), progress=False)
    rng = np.random.default_rng(0)
    kept = np.where(rng.random(len(found)) < 0.8, found.predictions[:, 2], found.predictions[:, 1])
    return replace(found, labels=kept)


def test_ties_are_drawn_by_the_same_hash(program, tmp_path):
    terms = {"costs": (1.0, 2.5, 6.0), "open_exits": OPENED, "num_exits": 4, "score": "max_probability"}
    tied = Threshold((1.0, 1.0), (0.4, 0.7), **terms, salt=2**52 + 12345)
    place = with_policy(folder(), tied, tmp_path)
    bright = 1e4 * images()  # every probability is exactly 1
    decisions = Predictor.load(place, settings=RunSettings(threads=1), probabilities=True)(
        bright, np.arange(len(bright))
    )
    assert 0.2 < (decisions.exits == 0).mean() < 0.6
    assert_same(decided(program, place, bright, tmp_path, 32)[1], decisions)


TIES = """
#include "alight.hpp"
#include <cstdio>

struct Comma : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
};

int main(int, char** given) {
  std::locale::global(std::locale(std::locale(), new Comma));
  alight::Policy policy(alight::Json::parsed(given[1])), streak(alight::Json::parsed(given[2]));
  for (double threshold : alight::Json::parsed(given[3])["thresholds"].numbers()) {
    alight::Ties ties = alight::tie_range(threshold);
    std::printf("%a %a\\n", ties.lowest, ties.highest);
  }
  int64_t sample = 0;
  for (double score : alight::Json::parsed(given[3])["scores"].numbers()) {
    alight::Memory memory, other;
    bool leaves = policy.leaves(0, sample++, 0, score, memory);
    std::printf("%d %d\\n", leaves, streak.leaves(0, 0, 0, score, other));
  }
}
"""


@pytest.mark.parametrize("options", [[], ["-O3", "-march=native", "-ffp-contract=fast"]], ids=["plain", "fused"])
def test_the_same_scores_are_tied_to_the_bit_whatever_the_compiler_fuses(options, tmp_path):
    (tmp_path / "ties.cpp").write_text(TIES)
    compiled(tmp_path / "ties.cpp", tmp_path / "ties", *options)
    rng = np.random.default_rng(0)
    thresholds = [*rng.uniform(-2, 2, 500), *(1 - 10.0 ** -rng.uniform(0, 16, 300)), *10.0 ** rng.uniform(-300, 3, 200)]
    thresholds = [*map(float, thresholds), 0.0, 1.0, np.inf, -np.inf]
    for threshold in (0.0032489161900422087, 0.7, 1 - 1e-12, 1.0, -0.25):
        ends = [np.nextafter(end, to) for end in tie_range(threshold) for to in (-np.inf, end, np.inf)]
        scores = [*map(float, np.repeat([*ends, threshold], 10))]
        policy = Threshold((threshold,), (0.4,), costs=(1.0, 2.0), salt=2**52 + 12345)
        streak = Streak(threshold, 1, costs=(1.0, 2.0))
        given = {"thresholds": [{np.inf: "never", -np.inf: "always"}.get(each, each) for each in thresholds]}
        texts = [json.dumps(each) for each in (policy.to_dict(), streak.to_dict(), given | {"scores": scores})]
        done = subprocess.run([tmp_path / "ties", *texts], capture_output=True, text=True, check=True)
        lines = [line.split() for line in done.stdout.splitlines()]
        ranges, decided = lines[: len(thresholds)], [[int(each) for each in line] for line in lines[len(thresholds) :]]
        assert [tuple(map(float.fromhex, line)) for line in ranges] == [*map(tie_range, thresholds)]
        samples = np.arange(len(scores))
        expected = [rule.step(0, samples, samples, np.array(scores), ())[0] for rule in (policy, streak)]
        np.testing.assert_array_equal(decided, np.stack(expected, 1).astype(int))


SCORES = """
#include "alight.hpp"
#include <cstdio>

int main(int, char** given) {
  const std::string content = alight::file_content(given[1], "");
  const size_t classes = std::stoul(given[2]), row = classes * sizeof(float);
  std::vector<float> logits(classes);
  for (size_t at = 0; at < content.size(); at += row) {
    std::memcpy(logits.data(), &content[at], row);
    const auto values = alight::head_values(logits.data(), classes, {"margin", "max_probability", "negative_entropy"});
    for (double score : values.scores) std::printf("%a ", score);
  }
}
"""


def test_scores_near_certainty_are_tied_with_those_of_python(tmp_path):
    (tmp_path / "scores.cpp").write_text(SCORES)
    compiled(tmp_path / "scores.cpp", tmp_path / "scores")
    rng = np.random.default_rng(0)
    for classes in (2, 7, 8, 100, 129, 1000):
        logits = rng.normal(size=(300, classes)).astype(np.float32)
        logits[:, 0] += rng.uniform(10, 45, 300).astype(np.float32)
        (tmp_path / "logits").write_bytes(logits.tobytes())
        command = [tmp_path / "scores", tmp_path / "logits", str(classes)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        expected = score_rows(logits, Reads(("margin", "max_probability", "negative_entropy"))).columns
        for score, own in zip(map(float.fromhex, found), np.stack(expected, 1).ravel().tolist(), strict=True):
            lowest, highest = tie_range(own)
            assert lowest <= score <= highest, (classes, score, own)


def test_a_quantised_network_and_bytes_of_images_decide_as_in_python(program, int8, tmp_path):
    fitted = calibrate.eero([1.0, 2.5, 6.0], 3.0, recorded(int8))
    terms = {"open_exits": OPENED, "num_exits": 4, "exits": network().exits}
    place = with_policy(int8, Threshold(fitted.thresholds, fitted.tie_shares, costs=fitted.costs, **terms), tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, size=(150, 6, 7, 3), dtype=np.uint8)
    decisions = Predictor.load(place, settings=RunSettings(threads=1), probabilities=True)(pixels, np.arange(150))
    assert len({*decisions.exits.tolist()}) > 1
    for batch in (1, 37):
        assert_same(decided(program, place, pixels, tmp_path, batch)[1], decisions)
    first = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    assert_same(decided(program, place, first, tmp_path, 37)[1], decisions)


def recorded(place):
    from alight import record
    from alight.engine.backends.exported import exported_backend
    from alight.engine.manifest import Manifest

    backend = exported_backend(place, Manifest.load(place), RunSettings(threads=1))
    return record(backend, (images(), np.arange(len(images())) % 5), progress=False)


def test_what_would_be_wrong_is_refused(program, tmp_path):
    unusable = images().copy()
    unusable[7, 0, 0, 0] = np.nan
    done, _ = decided(program, folder(), unusable, tmp_path)
    refused = "the input of sample 7 holds NaN, infinity or a negative token: look for it there"
    assert (done.returncode, refused in done.stderr) == (1, True)
    shutil.copytree(folder(), tmp_path / "changed")
    (tmp_path / "changed" / "stage_2.onnx").write_bytes(b"nonsense")
    done, _ = decided(program, tmp_path / "changed", images(), tmp_path)
    assert (done.returncode, "stage_2.onnx was changed or damaged" in done.stderr) == (1, True)
    (tmp_path / "changed" / "stage_2.onnx").write_bytes(elsewhere := b"\x0a\x08location\x12\x01w")
    manifest = json.loads((tmp_path / "changed" / "manifest.json").read_text())
    manifest["stages"][2]["checksum"] = checksum(elsewhere)
    (tmp_path / "changed" / "manifest.json").write_text(json.dumps(manifest))
    done, _ = decided(program, tmp_path / "changed", images(), tmp_path)
    assert (done.returncode, "stage_2.onnx names another file for its weights" in done.stderr) == (1, True)
    change = {"score": "surprise"}
    place = with_changed(folder(), "policy.json", lambda content: content.update(change), tmp_path / "score")
    done, _ = decided(program, place, images(), tmp_path)
    said = "the policy reads the score surprise, which is not known here: run the folder in Python"
    assert (done.returncode, said in done.stderr) == (1, True)
    batched = with_policy(folder(), drawn("quota", np.random.default_rng(0), OPENED), tmp_path)
    done, _ = decided(program, batched, images(), tmp_path)
    assert (done.returncode, "a policy Quota needs batches or streams" in done.stderr) == (1, True)


def test_shapes_are_refused_beside_the_shape_that_the_network_takes(program, tmp_path):
    takes = "and the network takes input_0 of shape (samples, 3, 6, 7), float32"
    other = "give that shape, or export the network with an example of yours"
    pixels = np.zeros((4, 7, 6, 3), dtype=np.uint8)
    for array, shape, remedy in (
        (images()[:, :2].copy(), "(150, 2, 6, 7)", other),
        (images()[0], "(3, 6, 7)", "give a batch, of one sample (1, 3, 6, 7)"),
        (images()[0, 0, 0], "(7,)", other),
        (pixels, "(4, 7, 6, 3)", other),
        (pixels[..., 0].copy(), "(4, 7, 6)", other),
        (pixels[0].reshape(6, 7, 3), "(6, 7, 3)", "give a batch, of one sample (1, 6, 7, 3)"),
        (images().reshape(150, 6, 7, 3), "(150, 6, 7, 3)", "put the channels first"),
    ):
        done, _ = decided(program, folder(), array, tmp_path)
        assert f"an input of shape {shape}, {takes}: {remedy}" in done.stderr
        assert done.returncode == 1


def test_other_libraries_are_refused(program, tmp_path):
    np.save(tmp_path / "images.npy", images()[:3])
    (tmp_path / "old.c").write_text(
        "const void *none(unsigned version) { return 0; }\nconst void *base[] = {(void *)none};\n"
        "const void *OrtGetApiBase(void) { return base; }"
    )
    subprocess.run([COMPILER, "-xc", "-shared", "-fPIC", tmp_path / "old.c", "-o", tmp_path / "old.so"], check=True)
    for library in ("libm.so.6", tmp_path / "old.so"):
        command = [program, folder(), tmp_path / "images.npy", "--library", library]
        done = subprocess.run(command, capture_output=True, text=True)
        expected = f"alight: {library} is not ONNX Runtime 1.17 or newer: give the path of such a library\n"
        assert (done.returncode, done.stderr) == (1, expected)


def test_files_that_are_missing_are_named_with_their_remedy(program, tmp_path):
    np.save(tmp_path / "images.npy", images()[:3])
    fitted = shutil.copytree(folder(), tmp_path / "fitted")
    (fitted / "manifest.json").unlink()
    damaged = shutil.copytree(folder(), tmp_path / "damaged")
    (damaged / "stage_1.onnx").unlink()
    (tmp_path / "text.npy").write_text("no array at all")
    exported = "give a folder that `alight export` wrote"
    for place, array, message in (
        (folder(), "nothere.npy", "there is no file nothere.npy: check its path"),
        (folder(), tmp_path, f"cannot read {tmp_path}: give a file that this user may read"),
        (folder(), "text.npy", "text.npy is not an .npy file: save the array by numpy.save"),
        ("nosuch", "images.npy", f"there is no folder nosuch: {exported}"),
        ("images.npy", "images.npy", f"there is no folder images.npy: {exported}"),
        ("fitted", "images.npy", f"there is no file fitted/manifest.json: {exported}"),
        ("damaged", "images.npy", "there is no file damaged/stage_1.onnx: export the network again"),
    ):
        command = [program, place, array, "--library", runtime_library()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (1, f"alight: {message}\n")


def with_changed(place, file, change, copied):
    """A copy of the folder, one of whose files was changed by somebody who corrected the checksum."""
    shutil.copytree(place, copied)
    content = json.loads((copied / file).read_text())
    change(content)
    (copied / file).write_text(json.dumps(content))
    if file == "policy.json":
        manifest = json.loads((copied / "manifest.json").read_text())
        manifest["policy_checksum"] = checksum((copied / file).read_bytes())
        (copied / "manifest.json").write_text(json.dumps(manifest))
    return copied


def test_parts_that_do_not_fit_together_are_refused(program, int8, tmp_path):
    policies = [{"thresholds": []}, {"tie_shares": [7.0, 1.0]}, {"costs": [1.0]}, {"costs": []}, {"salt": -1}]
    policies += [{"schema": 2}, {"alight": "Report"}, {"salt": 0.5}, {"salt": "never"}, {"num_exits": 5}]
    policies += [{"costs": [1.0, 0.5, 6.0]}, {"rule": "Lottery", "exit_rates": [0.5, -1.0, 1.5]}]
    vote = {"kind": "Vote", "exits": [0, 1, 3], "column": "margin", "others": [0.0, 0.0, 0.0]}
    vote |= {"constants": [[0.0], [0.0, -1.0], [0.0, 0.0, 0.0]], "slopes": [[1.0], [1.0, 1.0], [1.0, 1.0, 1.0]]}
    policies += [{"rule": "Lottery", "exit_rates": [0.5, 0.2, 0.2]}, {"combination": vote}]
    changes = [("policy.json", lambda content, each=each: content.update(each)) for each in policies]
    changes += [
        ("manifest.json", lambda content: content.update(exits=content["exits"][:1])),
        ("manifest.json", lambda content: content.update(schema=2)),
        ("manifest.json", lambda content: content.update(inputs=[])),
        ("manifest.json", lambda content: content["inputs"][0].update(shape="any")),
        ("manifest.json", lambda content: content["stages"][0].update(carries=[])),
        ("manifest.json", lambda content: content["stages"][0].update(probe=[0.0] * 5000)),
        ("manifest.json", lambda content: content["normalisation"].update(std=[0.5])),
        ("manifest.json", lambda content: content["normalisation"]["std"].__setitem__(1, -0.2)),
        ("manifest.json", lambda content: content["normalisation"]["mean"].__setitem__(0, "never")),
        ("manifest.json", lambda content: content["stages"][0]["probe"].__setitem__(0, "never")),
        ("manifest.json", lambda content: content.update(precision="int8", providers=["cuda"])),
    ]
    remedies = "again", "export it as onnx", "export the network on such a machine"
    for index, (file, change) in enumerate(changes):
        place = with_changed(folder(), file, change, tmp_path / str(index))
        done, _ = decided(program, place, images()[:3], tmp_path)
        assert (done.returncode, any(each in done.stderr for each in remedies)) == (1, True), index
    whole = (folder() / "manifest.json").read_text()
    for text in (whole + "more", whole + "\0", whole[:-60], '{"format": t', 100_000 * "["):
        (tmp_path / "0/manifest.json").write_text(text)
        done, _ = decided(program, tmp_path / "0", images()[:3], tmp_path)
        assert (done.returncode, "the file is not JSON: export the network again" in done.stderr) == (1, True)


def test_of_equal_names_the_last_counts_as_in_python(program, tmp_path):
    place = shutil.copytree(folder(), tmp_path / "twice")
    whole = (place / "manifest.json").read_text()
    (place / "manifest.json").write_text(whole.rstrip().removesuffix("}") + ', "classes": ["a", "b", "c", "d", "e"]}')
    decisions = Predictor.load(place, settings=RunSettings(threads=1))(images(), np.arange(150))
    _, rows = decided(program, place, images(), tmp_path)
    assert [row["prediction"] for row in rows] == ["abcde"[index] for index in decisions.predictions]


def test_odd_files_and_options_are_refused(program, tmp_path):
    for odd in (images()[:0], np.uint8(3)):
        done, _ = decided(program, folder(), odd, tmp_path)
        assert (done.returncode, "holds no images: give at least one" in done.stderr) == (1, True)
    for option, value, least in (
        *(("--batch", value, 1) for value in ("many", "0", "-3", "2.5", "", "99999999999")),
        *(("--threads", value, 1) for value in ("0", "-1")),
        *(("--warm", value, 0) for value in ("-1", "all")),
    ):
        command = [program, folder(), tmp_path / "images.npy", "--library", runtime_library(), option, value]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stderr == f"alight: {option} {value}: give a whole number, {least} or more\n"
        assert done.returncode == 1


def npy(shape, content, version=1, order="False"):
    """An .npy file of float32, whatever its header says."""
    header = f"{{'descr': '<f4', 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + content


def test_arrays_are_read_as_numpy_reads_them_or_refused(program, tmp_path):
    own, place = images()[:20], tmp_path / "array.npy"
    _, expected = decided(program, folder(), own, tmp_path)

    def run(content):
        place.write_bytes(content)
        command = [program, folder(), place, "--library", runtime_library()]
        done = subprocess.run(command, capture_output=True, text=True)
        return list(csv.DictReader(io.StringIO(done.stdout))), done.stderr

    content = own.tobytes()
    for version in (1, 2, 3):
        assert run(npy("(20, 3, 6, 7)", content, version))[0] == expected
    assert run(npy("(20L, 3L, 6L, 7L)", content + b"more"))[0] == expected
    assert run(npy("(20, 3, 6, 7)", content, version=4))[1].endswith(
        "is not an .npy file: save the array by numpy.save\n"
    )
    in_columns = npy("(20, 3, 6, 7)", content, order="True")
    assert run(in_columns)[1].endswith("is in Fortran order: save numpy.ascontiguousarray of it\n")
    huge = "(4611686018427387904, 3, 6, 7)", "(99999999999999999999, 3, 6, 7)", "(20, 3, 6, 7, 99999999999999999999)"
    for shape in (*huge, "(-20, 3, 6, 7)", "(21, 3, 6, 7)", "(20, 3, 6, 7", "20"):
        for data in (content, b""):
            assert run(npy(shape, data)) == ([], f"alight: {place} is cut short: write it again\n"), shape
    for dtype in (">f4", "<f2", "<c8", "<U1", ">i8"):
        np.save(tmp_path / "other.npy", np.zeros((2, 3, 6, 7)).astype(dtype))
        said = (
            f"holds '{dtype}', which is not read here: save uint8, or numbers as the network takes them, little-endian"
        )
        assert said in run((tmp_path / "other.npy").read_bytes())[1]


class Pixels(nn.Module):
    """The features of images of bytes."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3)

    def forward(self, pixels):
        return torch.relu(self.convolution(pixels.float() / 255)).mean((2, 3))


def test_a_network_that_takes_bytes_gets_them_unchanged(program, tmp_path):
    torch.manual_seed(0)
    model = MultiExitModel([Pixels(), nn.Linear(6, 8)], [nn.Linear(6, 4), nn.Linear(8, 4)])
    pixels = np.random.default_rng(0).integers(0, 256, size=(50, 6, 7, 3), dtype=np.uint8)
    first = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    with older_exporter():
        rule = Threshold((0.2813,), costs=(1.0, 2.0), score="max_probability")
        place = export_model(model, rule, tmp_path / "bytes", example=torch.from_numpy(first[:2]), progress=False)
    expected = Predictor.load(place, settings=RunSettings(threads=1))(first, np.arange(50))
    assert len({*expected.exits.tolist()}) == 2
    for given in (pixels, first):
        done, rows = decided(program, place, given, tmp_path, batch=8)
        assert done.returncode == 0, done.stderr
        assert [int(row["prediction"]) for row in rows] == expected.predictions.tolist()
        assert [float(row["cost"]) for row in rows] == expected.spent.tolist()
    for given, dtype in ((first.astype(np.float32), "float32"), (first.astype(np.int64), "int64")):
        done, _ = decided(program, place, given, tmp_path)
        assert f"holds {dtype}, and the network takes uint8: give that" in done.stderr
        assert done.returncode == 1
    done, _ = decided(program, place, pixels[:, :5].copy(), tmp_path)
    assert "an input of shape (50, 5, 7, 3), and the network takes" in done.stderr


def test_floats_that_look_like_pixels_are_warned_of_once_as_in_python(program, tmp_path):
    shades = np.random.default_rng(0).uniform(size=(6, 3, 6, 7)).astype(np.float32)
    for given, warns in ((255 * shades, True), (shades, True), (shades - 0.5, False), (images()[:6], False)):
        done, rows = decided(program, folder(), given, tmp_path, batch=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Predictor.load(folder(), settings=RunSettings(threads=1))(given)
        sentences = [str(each.message).rpartition("; if it takes pixels")[0] for each in caught]
        assert [f"alight: {each}" in done.stderr for each in sentences] == [True] * warns
        assert (done.returncode, len(rows), done.stderr.count("alight: images are")) == (0, 6, warns)


def test_grey_bytes_need_no_channels(program, tmp_path):
    torch.manual_seed(0)
    stages, heads = [nn.Flatten(), nn.Linear(42, 8)], [nn.Linear(42, 4), nn.Linear(8, 4)]
    model = MultiExitModel(stages, heads, normalisation=Normalisation((0.5,), (0.25,)))
    pixels = np.random.default_rng(0).integers(0, 256, size=(20, 6, 7), dtype=np.uint8)
    with older_exporter():
        rule, example = Threshold((0.3,), costs=(1.0, 2.0)), torch.zeros(2, 1, 6, 7)
        place = export_model(model, rule, tmp_path / "grey", example=example, progress=False)
    expected = Predictor.load(place, settings=RunSettings(threads=1))(pixels, np.arange(20))
    for given in (pixels, pixels[..., None], pixels[:, None]):
        _, rows = decided(program, place, given, tmp_path, batch=8)
        assert [int(row["prediction"]) for row in rows] == expected.predictions.tolist()


def test_grey_images_of_bytes_need_no_channels_where_the_network_takes_bytes(program, tmp_path):
    torch.manual_seed(0)
    stages, heads = [Scaled(), nn.Linear(42, 8)], [nn.Linear(42, 4), nn.Linear(8, 4)]
    pixels = np.random.default_rng(0).integers(0, 256, size=(20, 6, 7), dtype=np.uint8)
    example = torch.zeros(2, 1, 6, 7, dtype=torch.uint8)
    with older_exporter():
        rule = Threshold((0.3,), costs=(1.0, 2.0))
        place = export_model(MultiExitModel(stages, heads), rule, tmp_path / "grey", example=example, progress=False)
    expected = Predictor.load(place, settings=RunSettings(threads=1))(pixels[:, None], np.arange(20))
    for given in (pixels, pixels[..., None], pixels[:, None]):
        done, rows = decided(program, place, given, tmp_path, batch=8)
        assert [int(row["prediction"]) for row in rows] == expected.predictions.tolist(), done.stderr


class Scaled(nn.Module):
    """Bytes as numbers in 0..1, in one row for each image."""

    def forward(self, pixels):
        return pixels.flatten(1).float() / 255


def test_first_batches_are_not_timed(program, tmp_path):
    for count, batch, warmed in ((3, 1, 10), (3, 2, 20), (5, 64, 50), (150, 1, 10)):
        done, rows = decided(program, folder(), images()[:count], tmp_path, batch)
        assert len(rows) == count
        assert f"warmed up by {warmed} images; batches of {min(count, batch)}: mean" in done.stderr
    done, _ = decided(program, folder(), images()[:3], tmp_path, warm=0)
    assert "warmed up by 0 images" in done.stderr
    done, _ = decided(program, folder(), images()[:3], tmp_path, warm=7, times=True)
    assert len(done.stderr.split()) == 3  # times of the batches, of which none is a warm-up
    done = subprocess.run([program], capture_output=True, text=True)
    assert "--warm N: decide about N images before the timed ones (10 batches by default)" in done.stderr


class Narrowed(nn.Module):
    """Inputs in single precision, NaN as 0."""

    def forward(self, values):
        return torch.nan_to_num(values.float())


def test_inputs_of_other_floats_that_hold_nan_are_refused(program, tmp_path):
    model = MultiExitModel([Narrowed(), nn.Linear(4, 8)], [nn.Linear(4, 3), nn.Linear(8, 3)])
    example = torch.zeros(2, 4, dtype=torch.float64)
    with older_exporter():
        rule = Threshold((0.5,), costs=(1.0, 2.0))
        place = export_model(model, rule, tmp_path / "wide", example=example, progress=False)
    values = np.ones((5, 4))
    assert decided(program, place, values, tmp_path)[0].returncode == 0
    values[3, 1] = np.nan
    done, _ = decided(program, place, values, tmp_path)
    assert (done.returncode, "the input of sample 3 holds NaN, infinity or" in done.stderr) == (1, True)


def test_names_are_written_in_utf_8(program, tmp_path):
    place = with_changed(
        folder(),
        "manifest.json",
        lambda content: content["exits"].__setitem__(0, "caf\u00e9 \U0001f600"),
        tmp_path / "0",
    )
    _, rows = decided(program, place, images(), tmp_path)
    assert "caf\u00e9 \U0001f600" in {row["exit"] for row in rows}


def test_classes_are_named_unless_their_indices_are_asked_for(program, tmp_path):
    decisions = Predictor.load(folder(), settings=RunSettings(threads=1))(images(), np.arange(150))
    odd = ["caf\u00e9, hot", 'a "b"', "two\nlines", "", "eel"]
    changed = with_changed(folder(), "manifest.json", lambda content: content.update(classes=odd), tmp_path / "odd")
    fewer = with_changed(folder(), "manifest.json", lambda content: content.update(classes=odd[:2]), tmp_path / "fewer")
    indices = [str(index) for index in decisions.predictions]
    assert {*indices} == {*"01234"}
    for place, options, expected in (
        (folder(), [], [network().classes[index] for index in decisions.predictions]),
        (folder(), ["--indices"], indices),
        (changed, [], [odd[index] for index in decisions.predictions]),
        (fewer, [], indices),  # as in Python
    ):
        np.save(tmp_path / "images.npy", images())
        command = [program, place, tmp_path / "images.npy", "--library", runtime_library(), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert [row["prediction"] for row in csv.DictReader(io.StringIO(done.stdout))] == expected


TEXTS = """
#include "alight.hpp"
#include <iostream>

int main(int, char** given) {
  std::vector<alight::Predictor> predictors;
  for (int each = 0; each < 3; ++each) predictors.emplace_back(given[1], 1, given[2]);  // which moves the first ones
  std::vector<int64_t> tokens(600, 3), mask(600, 1);
  auto decide = [&](std::vector<int64_t> first, std::vector<int64_t> second) {
    try {
      std::cout << predictors[0]({{tokens.data(), first}, {mask.data(), second}}, 0).size() << '\\n';
    } catch (const std::exception& error) {
      std::cout << error.what() << '\\n';
    }
  };
  decide({5, 12}, {5, 12});
  decide({5, 12}, {1, 12});
  decide({5, 12}, {5, 1});
  decide({1, 600}, {1, 600});
  tokens[7] = -5;
  decide({5, 12}, {5, 12});
  tokens[7] = 10;
  decide({5, 12}, {5, 12});
}
"""


class MaskedClass(nn.Linear):
    """A head that can never give its last class."""

    def forward(self, features):
        return super().forward(features) + torch.tensor([0.0, 0.0, -1e9])


def test_logits_beside_a_masked_class_are_compared_with_those_of_the_export(program, tmp_path):
    model = MultiExitModel([nn.Linear(5, 6), nn.Linear(6, 6)], [MaskedClass(6, 3), MaskedClass(6, 3)]).eval()
    with older_exporter():
        rule = Threshold((0.5,), costs=(1.0, 2.0))
        place = export_model(model, rule, tmp_path / "masked", example=torch.randn(2, 5), progress=False)
    done, _ = decided(program, place, np.zeros((2, 5), dtype=np.float32), tmp_path)
    assert done.returncode == 0, done.stderr
    place = with_changed(place, "manifest.json", move_probe, tmp_path / "moved")
    done, _ = decided(program, place, np.zeros((2, 5), dtype=np.float32), tmp_path)
    assert "gives other logits here than where it was exported (by " in done.stderr


class Words(nn.Module):
    """A stage that turns tokens into features, or passes features on."""

    def __init__(self, embeds):
        super().__init__()
        self.layer = nn.Embedding(10, 6) if embeds else nn.Linear(6, 6)

    def forward(self, values, mask):
        return self.layer(values) * (~mask if mask.dtype == torch.bool else mask)[..., None], mask


@pytest.mark.parametrize("mask", [torch.ones(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.bool)])
def test_texts_are_compared_with_the_logits_of_the_export(mask, program, tmp_path):
    name = "key_padding_mask" if mask.dtype == torch.bool else "attention_mask"
    example = {"input_ids": torch.ones(2, 8, dtype=torch.int64), name: mask}
    heads = [TokenHead((8, 6), 3) for _ in range(2)]
    model = MultiExitModel([Words(True), Words(False)], heads, input_names=(*example,)).eval()
    with older_exporter():
        place = export_model(model, Threshold((0.5,), costs=(1.0, 2.0)), tmp_path / "texts", example=example)
    done, _ = decided(program, place, np.ones((2, 8), dtype=np.int64), tmp_path)
    assert "1 inputs, and the network takes 2" in done.stderr  # which is looked at once the stages are loaded
    place = with_changed(place, "manifest.json", move_probe, tmp_path / "moved")
    done, _ = decided(program, place, images(), tmp_path)
    assert "moved/stage_1.onnx gives other logits here than where it was exported (by " in done.stderr
    assert done.returncode == 1


def move_probe(content):
    """Let the manifest expect a logit that the network does not give."""
    content["stages"][1]["probe"][0] += 0.1


def test_texts_that_python_refuses_are_refused_and_predictors_can_be_moved(tmp_path):
    names = ("input_ids", "attention_mask")
    example = dict.fromkeys(names, torch.ones(2, 8, dtype=torch.int64))
    heads = [TokenHead((8, 6), 3) for _ in range(2)]
    model = MultiExitModel([Words(True), Words(False)], heads, input_names=names).eval()
    place = export_model(model, Threshold((0.5,), costs=(1.0, 2.0)), tmp_path / "texts", example=example)
    (tmp_path / "texts.cpp").write_text(TEXTS)
    compiled(tmp_path / "texts.cpp", tmp_path / "program")
    done = subprocess.run([tmp_path / "program", place, runtime_library()], capture_output=True, text=True)
    answers = done.stdout.splitlines()
    assert (done.returncode, answers[0]) == (0, "5")
    assert "5 samples of input_ids and 1 of attention_mask: give as many of each" in answers[1]
    assert answers[2] == "input_ids has 12 tokens and attention_mask 1: give every input of a text one length"
    assert "texts of 600 tokens, and the network was compared for 1 to 512" in answers[3]
    assert "the input of sample 0 holds NaN, infinity or a negative token" in answers[4]
    assert answers[5].startswith(f"{place}/stage_0.onnx cannot take these 5 samples (")
    assert answers[5].endswith(
        "): look for indices of tokens that the network does not know, or for texts that are too long"
    )
    assert (len(answers), done.stderr) == (6, "")  # nothing that ONNX Runtime prints


SHARED = """
#include "alight.hpp"
#include <cstdio>
#include <thread>

static_assert(!std::is_invocable_v<const alight::Predictor&, const std::vector<float>&>);  // all samples would be 0

int main(int, char** given) {
  alight::Predictor predictor(given[1], 1, given[2]);
  predictor = alight::Predictor(given[1], 2, given[2]);
  std::vector<float> images(150 * 3 * 6 * 7);
  for (size_t each = 0; each < images.size(); ++each) images[each] = static_cast<float>(each * 7919 % 1000) / 250 - 2;
  const std::vector<alight::Decision> alone = predictor(images, 0);
  std::vector<int> same(4, 0);  // by thread
  std::vector<std::thread> threads;
  for (int& count : same)
    threads.emplace_back([&] {
      for (int time = 0; time < 20; ++time) {
        const std::vector<alight::Decision> found = predictor(images, 0);
        for (size_t each = 0; each < found.size(); ++each)
          count += found[each].exit == alone[each].exit && found[each].prediction == alone[each].prediction;
      }
    });
  for (std::thread& each : threads) each.join();
  for (int count : same) std::printf("%d\\n", count);
}
"""


def test_a_predictor_may_be_assigned_and_shared_by_threads(tmp_path):
    (tmp_path / "shared.cpp").write_text(SHARED)
    compiled(tmp_path / "shared.cpp", tmp_path / "program", *sanitizers(tmp_path))
    done = subprocess.run([tmp_path / "program", folder(), runtime_library()], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, 4 * ["3000"]), done.stderr[:2000]


def test_compilers_that_assume_no_nan_are_refused():
    command = [COMPILER, "-std=c++17", "-fsyntax-only", "-Ofast", ROOT / "cpp/example.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert "which -ffast-math and -Ofast assume away: compile without them" in done.stderr


class Double(nn.Linear):
    """A head that ends in double precision, as a network that ends in `.double()`."""

    def forward(self, values):
        return super().forward(values).double()


def test_a_stage_of_other_element_types_is_refused(program, tmp_path):
    torch.manual_seed(0)
    model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), Double(8, 3)])
    with older_exporter():
        rule = Threshold((0.5,), costs=(1.0, 2.0))
        place = export_model(model, rule, tmp_path / "double", example=torch.zeros(2, 4), progress=False)
    done, _ = decided(program, place, np.ones((5, 4), dtype=np.float32), tmp_path)
    assert "stage_1.onnx gives logits of float64, and float32 is read here: let the network end" in done.stderr
    assert (done.returncode, done.stdout) == (1, "")
    place = with_changed(
        folder(),
        "manifest.json",
        lambda content: content["stages"][1]["carries"][1].update(dtype="int32"),
        tmp_path / "carried",
    )
    done, _ = decided(program, place, images()[:3], tmp_path)
    assert "of float32, and the manifest says int32: export the network again" in done.stderr
    assert done.returncode == 1


def test_weights_elsewhere_are_found_however_protobuf_writes_them(program, tmp_path):
    padded = b"\x8a\x80\x80\x80"  # to five bytes with the next one, whose upper bits Protobuf drops in a tag
    tags = [b"\x0a", b"\x8a\x00", b"\x8a\x80\x80\x00", padded + b"\x00", padded + b"\x10", padded + b"\x70"]
    lengths = [b"\x08", b"\x88\x00", b"\x88\x80\x80\x00"]
    other_tags = [padded + b"\x01", b"\x8a\x80\x10", b"\x8a", b"\x80\x00", b"\x0b", b"\x00", b""]
    other_lengths = [b"\x88\x80\x80\x80\x10", b"\x88", b"\x00", b"\x09", b""]
    read = [(tag, b"\x08") for tag in tags] + [(tag, each) for tag in tags[:2] for each in lengths]
    other = [(tag, b"\x08") for tag in other_tags] + [(b"\x0a", each) for each in other_lengths]
    place = shutil.copytree(folder(), tmp_path / "changed")
    for tag, length in read + other:
        content = tag + length + b"location"
        replace_stage(place, "stage_0.onnx", content)
        done, _ = decided(program, place, images()[:1], tmp_path)
        refused = "names another file for its weights" in done.stderr
        assert refused == ((tag, length) in read) == bool(ELSEWHERE.search(content)), content
        assert done.returncode == 1  # of others too, which are no network
        loads = f"alight: ONNX Runtime cannot load {place}/stage_0.onnx ("
        assert refused or done.stderr.startswith(loads) or "give a row of logits" in done.stderr, content


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_whole_numbers_of_other_types_are_converted_as_in_python(dtype, program, tmp_path):
    torch.manual_seed(0)
    model = MultiExitModel([nn.Embedding(100, 6), nn.Linear(6, 6)], [TokenHead((8, 6), 3) for _ in range(2)])
    example = torch.ones(2, 8, dtype=getattr(torch, np.dtype(dtype).name))
    with older_exporter():
        rule = Threshold((0.4,), costs=(1.0, 2.0))
        place = export_model(model, rule, tmp_path / "tokens", example=example, progress=False)
    tokens = np.random.default_rng(0).integers(0, 100, size=(30, 8))
    expected = Predictor.load(place, settings=RunSettings(threads=1))(tokens, np.arange(30))
    assert len({*expected.exits.tolist()}) == 2
    for other in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        done, rows = decided(program, place, tokens.astype(other), tmp_path, batch=8)
        assert done.returncode == 0, done.stderr
        assert [int(row["prediction"]) for row in rows] == expected.predictions.tolist()
        assert [row["exit"] for row in rows] == [expected.exit_names[index] for index in expected.exits]
    name = np.dtype(dtype).name
    large = [(tokens.astype(np.uint64) + 2**63, 2**63 + int(tokens[0, 0]))]
    if dtype is np.int32:
        large += [(tokens - 2**40, tokens[0, 0] - 2**40), (tokens.astype(np.uint32) + 2**31, 2**31 + tokens[0, 0])]
    for given, first in large:
        done, _ = decided(program, place, given, tmp_path)
        holds = f"holds {given.dtype}, and the network takes {name}, which does not hold {first}: give numbers in its"
        assert (done.returncode, holds in done.stderr) == (1, True), done.stderr
    done, _ = decided(program, place, np.int16(-1) - tokens.astype(np.int16), tmp_path)
    first = np.flatnonzero((tokens >= 0).any(1))[0]
    assert f"the input of sample {first} holds NaN, infinity or a negative token" in done.stderr
    done, _ = decided(program, place, tokens.astype(np.float32), tmp_path)
    assert f"holds float32, and the network takes {name}: give that" in done.stderr


def test_logits_that_are_not_rows_are_refused(program, tmp_path):
    onnx = pytest.importorskip("onnx")
    float32, make = onnx.TensorProto.FLOAT, onnx.helper.make_tensor_value_info
    for name, axes in (("one", [0]), ("none", [1, 2, 3])):  # logits of one sample for all, no classes
        place = shutil.copytree(folder(), tmp_path / name)
        nodes = [
            onnx.helper.make_node("ReduceMax", ["images"], ["logits"], axes=axes, keepdims=0),
            onnx.helper.make_node("Identity", ["images"], ["carried"]),
        ]
        outputs = [make("logits", float32, None), make("carried", float32, None)]
        graph = onnx.helper.make_graph(nodes, "stage", [make("images", float32, [None, 3, 6, 7])], outputs)
        opset = [onnx.helper.make_opsetid("", 17)]
        content = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
        replace_stage(place, "stage_0.onnx", content)
        done, _ = decided(program, place, images()[:3], tmp_path)
        assert "a stage does not give a row of logits for each sample: export the network again" in done.stderr
        assert done.returncode == 1


def replace_stage(place, file, content):
    """Write another stage into a folder, with its checksum."""
    (place / file).write_bytes(content)
    manifest = json.loads((place / "manifest.json").read_text())
    next(each for each in manifest["stages"] if each["file"] == file)["checksum"] = checksum(content)
    (place / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
def test_sanitizers_find_nothing(int8, tmp_path):
    if not (options := sanitizers(tmp_path)):
        pytest.skip("this compiler has no sanitizers")
    compiled(ROOT / "cpp/example.cpp", tmp_path / "program", *options)
    quantised = with_policy(int8, drawn("threshold", np.random.default_rng(3), OPENED), tmp_path)
    for place in (folder(), quantised):
        for batch in (1, 37):
            done, rows = decided(tmp_path / "program", place, images(), tmp_path, batch)
            assert (done.returncode, len(rows)) == (0, len(images())), done.stderr
            assert "Sanitizer" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_cmake_builds_the_example(tmp_path):
    for step in (["-S", ROOT / "cpp", "-B", tmp_path], ["--build", tmp_path]):
        subprocess.run(["cmake", *step], check=True, capture_output=True)
    done, rows = decided(tmp_path / "alight_example", folder(), images(), tmp_path)
    assert (done.returncode, len(rows)) == (0, len(images()))
    assert policy().open_exits == OPENED


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_projects_of_an_older_standard_may_use_the_header(tmp_path):
    (tmp_path / "main.cpp").write_text('#include "alight.hpp"\nint main() {}\n')
    (tmp_path / "CMakeLists.txt").write_text(f"""
        cmake_minimum_required(VERSION 3.16)
        project(app CXX)
        set(CMAKE_CXX_STANDARD 14)
        add_subdirectory({ROOT / "cpp"} alight)
        add_executable(app main.cpp)
        target_link_libraries(app PRIVATE alight)
    """)
    for step in (["-S", tmp_path, "-B", tmp_path / "build"], ["--build", tmp_path / "build", "--target", "app"]):
        subprocess.run(["cmake", *step], check=True, capture_output=True)
    assert (tmp_path / "build/app").is_file()
