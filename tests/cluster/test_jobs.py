"""Jobs on Ray: every sample once, the same answers as on one machine, whatever dies on the way."""

import json
import os
import re
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from commands import run
from networks import as_pictures, as_table, made, on_one_machine
from pyarrow import fs, parquet

from alight import PartitionedOutputs, calibrate, load_model, load_policy, measure_costs, record
from alight.cluster.jobs import How, predict_on_ray, record_on_ray
from alight.cluster.stores import Store
from alight.errors import BadFile, BadInput, Mismatch
from alight.policies.policy import Threshold
from alight.runtime.loading import example_of, load_data

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
    as_pictures(folder / "test.npz", folder / "pictures")
    as_table(folder / "test.npz", folder / "table")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder / "model")


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder / "policy.json")


def answers(folder):
    files = sorted(Path(folder).glob("part-*.parquet"))
    return pa.concat_tables([parquet.read_table(file) for file in files])


def check_once(folder, count, decisions):
    """Every sample has one row, and that is what one machine decides."""
    table = answers(folder)
    assert table["sample"].to_pylist() == list(range(count))
    assert table["label"].to_pylist() == decisions.predictions.tolist()
    assert table["exit"].to_pylist() == decisions.exits.tolist()
    assert table["cost_FLOPs"].to_pylist() == decisions.spent.tolist()


def test_answers_are_those_of_one_machine_and_a_second_run_does_what_is_missing(folder, model, policy, tmp_path):
    data, output = str(folder / "test.npz"), tmp_path / "answers"
    decisions = on_one_machine(model, policy, data, 32)
    assert len(set(decisions.exits)) > 1
    done = predict_on_ray(folder / "model", policy, data, str(output), HOW)
    assert (done.num_samples, done.num_partitions, done.done_before) == (len(decisions), 5, 0)
    check_once(output, len(decisions), decisions)
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
    check_once(output, len(decisions), decisions)
    assert (output / "part-00000.parquet").stat().st_mtime_ns == untouched
    assert not list(output.glob(".part*"))
    other = replace(policy, thresholds=tuple(0.9 * value for value in policy.thresholds))
    with pytest.raises(Mismatch, match="partitions of another job, whose policy differ"):
        predict_on_ray(folder / "model", other, data, str(output), HOW)


def test_a_worker_that_is_killed_loses_nothing_and_doubles_nothing(folder, model, policy, tmp_path):
    data, output = folder / "many.npz", tmp_path / "answers"
    with np.load(folder / "test.npz") as arrays:
        np.savez(data, images=np.tile(arrays["images"], (10, 1, 1, 1)), labels=np.tile(arrays["labels"], 10))
    killed = []

    def kill() -> None:
        while not list(output.glob("part-*")):
            time.sleep(0.01)
        killed.append(workers()[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = predict_on_ray(folder / "model", policy, str(data), str(output), HOW)
    killer.join()
    assert killed
    assert done.done_before == 0
    check_once(output, done.num_samples, on_one_machine(model, policy, data, 32))


def workers():
    """The processes in which Ray runs our workers."""
    told = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    return sorted(int(process) for process, name in told.items() if name.startswith(b"ray::MapWorker"))


def test_a_quota_keeps_its_budget_in_every_batch_and_so_in_all(folder, model, policy, tmp_path):
    quota = calibrate.contracts.as_quota(policy)
    data = str(folder / "test.npz")
    predict_on_ray(folder / "model", quota, data, str(tmp_path / "answers"), HOW)
    decisions = on_one_machine(model, quota, data, 32)
    check_once(tmp_path / "answers", len(decisions), decisions)  # the same batches
    predict_on_ray(folder / "model", quota, str(folder / "table"), str(tmp_path / "other"), HOW)
    costs, start = answers(tmp_path / "other")["cost_FLOPs"].to_numpy(), 0
    for size in json.loads((tmp_path / "other" / "manifest.json").read_text())["partitions"].values():
        for batch in np.split(costs[start : start + size], range(32, size, 32)):
            assert batch.sum() <= len(batch) * quota.budget * (1 + 1e-12)
        start += size
    assert start == len(costs) == len(decisions)
    assert costs.sum() <= len(costs) * quota.budget * (1 + 1e-12)


def test_a_recording_in_partitions_is_the_recording(folder, model, tmp_path):
    whole = record(model, load_data(folder / "test.npz", model, batch_size=32), progress=False)
    store = Store(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "parts")
    for data in (str(folder / "table"), str(folder / "test.npz")):
        done = record_on_ray(folder / "model", data, store if "npz" in data else str(tmp_path / "table"), HOW)
        assert done.totals["right"] == whole.correct().sum(axis=0).tolist()
    parts = PartitionedOutputs.open(tmp_path / "parts")
    table = parts.load()
    assert np.array_equal(table.scores, whole.scores)
    assert np.array_equal(table.predictions, whole.predictions)
    assert np.array_equal(table.labels, whole.labels)
    assert table.fingerprint == whole.fingerprint
    costs = [1.0, 2.0, 3.0]
    assert calibrate.eero(costs, 2.0, parts).to_dict() == calibrate.eero(costs, 2.0, whole).to_dict()


def test_pictures_keep_their_names_and_a_broken_one_is_told_in_a_line(folder, policy, tmp_path, capsys):
    where = str(folder / "pictures")
    predict_on_ray(folder / "model", policy, where, str(tmp_path / "answers"), HOW)
    names = answers(tmp_path / "answers")["sample"].to_pylist()
    assert sorted(names) == sorted(str(path) for path in (folder / "pictures").glob("*/*.png"))
    broken = folder / "pictures" / "3" / "broken.png"
    broken.write_bytes(b"no picture")
    line = (
        f"predict {folder}/model {folder}/policy.json {where} --engine ray --batch-size 32 --actors 1 -o {tmp_path}/b"
    )
    status, out, err = run(f"{line} --quiet", capsys)
    broken.unlink()
    assert (status, out) == (1, "")
    assert err.startswith(f"alight: cannot read {broken}: it is no whole image")
    assert len(err.splitlines()) == 1
    with pytest.raises(BadFile, match="not finished"):
        PartitionedOutputs.open(tmp_path / "b")


def test_the_commands_of_the_page_run(folder, model, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text().partition("## A Ray cluster")[2]
    lines = re.search(r"^```bash\n(alight .*?)^```", page, re.DOTALL | re.MULTILINE)[1].splitlines()
    for name in ("model", "policy.json", "test.npz", "pictures"):
        (tmp_path / {"pictures": "images", "test.npz": "validation.npz"}.get(name, name)).symlink_to(folder / name)
    measure_costs(model, example_of(model)).save(tmp_path / "costs.json")
    (tmp_path / "policy.json").unlink()
    (tmp_path / "policy.json").write_bytes((folder / "policy.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert len(lines) == 3
    for line in lines:
        status, out, err = run(line.removeprefix("alight "), capsys)
        assert status == 0, err
        assert out
    assert load_policy("policy.json").method == "eero"


def test_what_makes_no_sense_is_refused_before_anything_runs(folder, policy, tmp_path, capsys):
    data, model = str(folder / "test.npz"), folder / "model"
    labelled = record(load_model(model), load_data(folder / "train.npz", load_model(model)), progress=False)
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
