"""Jobs on Ray: every sample once, the same answers as on one machine, whatever dies on the way."""

import json
import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run
from networks import check_once, made, on_one_machine
from pyarrow import fs

from alight import PartitionedOutputs, calibrate, load_model, load_policy, record
from alight.cli.parser import COMMANDS
from alight.cluster.jobs import How, predict_on_ray, record_on_ray
from alight.cluster.stores import Store
from alight.data.formats import load_data
from alight.errors import BadFile, BadInput, Mismatch
from alight.policies.policy import Threshold

HOW = How(batch_size=32, partition_rows=64, workers=2, progress=False)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray for all tests here: two workers, little shared memory."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        ray.init(
            "local",
            num_cpus=2,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("network")
    made(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder / "model")


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder / "policy.json")


def test_answers_are_those_of_one_machine_and_a_second_run_does_what_is_missing(folder, model, policy, tmp_path):
    data, output = str(folder / "test.npz"), tmp_path / "answers"
    decisions = on_one_machine(model, policy, data, 32)
    assert len(set(decisions.exits)) > 1
    done = predict_on_ray(folder / "model", policy, data, str(output), HOW)
    assert (done.num_samples, done.num_partitions, done.done_before) == (len(decisions), 5, 0)
    check_once(output, decisions)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["totals"]["rows"] == sum(manifest["partitions"].values()) == len(decisions)
    assert manifest["totals"]["exits"] == np.bincount(decisions.exits, minlength=3).tolist()
    untouched = (output / "part-00000.parquet").stat().st_mtime_ns
    (output / "part-00003.parquet").unlink()
    (output / "part-00004.parquet").write_bytes(b"damaged")
    (output / ".part-00001.parquet.12ab").write_bytes(b"left by a worker that died")
    again = predict_on_ray(folder / "model", policy, data, str(output), HOW)
    assert again.done_before == 3
    assert again.totals == done.totals
    check_once(output, decisions)
    assert (output / "part-00000.parquet").stat().st_mtime_ns == untouched
    assert not list(output.glob(".part*"))
    other = replace(policy, thresholds=tuple(0.9 * value for value in policy.thresholds))
    with pytest.raises(Mismatch, match="partitions of another job, whose policy differ"):
        predict_on_ray(folder / "model", other, data, str(output), HOW)


def test_a_worker_that_is_killed_loses_nothing_and_doubles_nothing(folder, model, policy, tmp_path):
    data, output = folder / "many.npz", tmp_path / "answers"
    with np.load(folder / "test.npz") as arrays:
        np.savez(data, images=np.tile(arrays["images"], (10, 1, 1, 1)), labels=np.tile(arrays["labels"], 10))
    killed, told = [], []

    def kill() -> None:
        while not list(output.glob("part-*")):
            time.sleep(0.01)
        killed.append(workers()[0])
        told.append(Path(f"/proc/{killed[0]}/environ").read_bytes().split(b"\0"))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = predict_on_ray(folder / "model", policy, str(data), str(output), HOW)
    killer.join()
    assert killed
    assert b"MALLOC_ARENA_MAX=1" in told[0]  # so that what threads held is there for the next
    assert done.done_before == 0
    check_once(output, on_one_machine(model, policy, data, 32))


def workers():
    """The processes in which Ray runs our workers."""
    told = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    return sorted(int(process) for process, name in told.items() if name.startswith(b"ray::MapWorker"))


def test_a_recording_in_partitions_is_the_recording(folder, model, tmp_path):
    whole = record(model, load_data(folder / "test.npz", model.input_spec, batch_size=32), progress=False)
    store = Store(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "parts")
    done = record_on_ray(folder / "model", str(folder / "test.npz"), store, HOW)
    assert done.totals["right"] == whole.correct().sum(axis=0).tolist()
    parts = PartitionedOutputs.open(tmp_path / "parts")
    table = parts.load()
    assert np.array_equal(table.scores, whole.scores)
    assert np.array_equal(table.predictions, whole.predictions)
    assert np.array_equal(table.labels, whole.labels)
    assert table.fingerprint == whole.fingerprint
    costs = [1.0, 2.0, 3.0]
    assert calibrate.eero(costs, 2.0, parts).to_dict() == calibrate.eero(costs, 2.0, whole).to_dict()


@pytest.mark.compiled
def test_compiled_stages_give_the_same_rows(folder, model, policy, tmp_path, capsys):
    line = f"predict {folder}/model {folder}/policy.json {folder}/test.npz --engine ray --device cpu --compile --quiet"
    status, _, err = run(f"{line} --batch-size 32 --partition-rows 64 --actors 1 -o {tmp_path}/answers", capsys)
    assert (status, err) == (0, "")
    assert json.loads((tmp_path / "answers" / "plan.json").read_text())["switches"]["compile"]
    check_once(tmp_path / "answers", on_one_machine(model, policy, folder / "test.npz", 32))


def test_what_a_worker_cannot_read_is_told_in_a_line(folder, tmp_path, capsys):
    where = tmp_path / "pictures"
    where.mkdir()
    broken = where / "broken.png"
    broken.write_bytes(b"no picture")
    line = (
        f"predict {folder}/model {folder}/policy.json {where} --engine ray --batch-size 32 --actors 1 -o {tmp_path}/b"
    )
    status, out, err = run(f"{line} --quiet", capsys)
    assert (status, out) == (1, "")
    assert err.startswith(f"alight: cannot read {broken}: it is not a whole image")
    assert len(err.splitlines()) == 1
    with pytest.raises(BadFile, match="not finished"):
        PartitionedOutputs.open(tmp_path / "b")


def test_what_makes_no_sense_is_refused_before_anything_runs(folder, policy, tmp_path, capsys):
    data, model = str(folder / "test.npz"), folder / "model"
    labelled = record(load_model(model), load_data(folder / "train.npz", load_model(model).input_spec), progress=False)
    paced = calibrate.certify(calibrate.eero, policy.costs, policy.budget, labelled, contract="stream")
    with pytest.raises(BadInput, match="a paced policy keeps its budget along one stream, and many workers are many"):
        predict_on_ray(model, paced, data, str(tmp_path / "a"), HOW)
    foreign = Threshold(thresholds=(0.5, 0.5), costs=policy.costs, fingerprint="another")
    with pytest.raises(Mismatch, match="calibrated on outputs of the network another"):
        predict_on_ray(model, foreign, data, str(tmp_path / "a"), HOW)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"has mine\.txt and no plan\.json: give a folder that is empty"):
        predict_on_ray(model, policy, data, str(tmp_path / "full"), HOW)
    line = f"predict {model} {folder}/policy.json {data}"
    for options, told in {
        f"--engine ray -o {tmp_path}/a.csv": "writes a folder of partitions",
        f"--engine ray --speed auto -o {tmp_path}/a": "measures this machine",
        f"-o {tmp_path}/full": "is a folder or a URI: give a file, or --engine ray",
        "-o s3://bucket/answers": "is a folder or a URI",
    }.items():
        status, _, err = run(f"{line} {options}", capsys)
        assert status == 1
        assert told in err
    assert not (tmp_path / "a").exists()


def test_the_commands_of_the_page_are_examples_that_run():
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text().partition("## A Ray cluster")[2]
    lines = [line.removeprefix("$ alight ") for line in page.splitlines() if line.startswith("$ alight ")]
    examples = {example for command in COMMANDS.values() for example in command.examples}
    assert len(lines) == 3
    assert set(lines) <= examples  # each of which tests/cli/test_help.py runs
