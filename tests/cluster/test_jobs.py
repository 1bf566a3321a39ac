"""Jobs on Ray: every sample once, with the decision of one machine, also if a worker or the driver is killed."""

import json
import os
import signal
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run
from networks import answers, as_arrays, as_pictures, check_once, make_job, on_one_machine
from PIL import Image
from pyarrow import fs, parquet
from waiting import wait_until

from alight import HeadOutputs, calibrate, load_model, load_policy, record, replay
from alight.cli import main
from alight.cli.parser import COMMANDS
from alight.cluster.jobs import JobConfig, predict_on_ray, record_on_ray
from alight.cluster.stores import Store
from alight.data.batches import load_data
from alight.errors import BadFile, BadInput, Mismatch
from alight.policies.policy import Lottery, Threshold

CONFIG = JobConfig(batch_size=32, partition_rows=64, workers=2, progress=False)


@pytest.fixture(scope="module")
def cluster():
    """Start Ray for all tests that need it: two workers, little shared memory."""
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
    make_job(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder / "model")


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder / "policy.json")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_decisions_are_those_of_one_machine_and_a_second_run_makes_missing_partitions(folder, model, policy, tmp_path):
    data, output = str(folder / "test"), tmp_path / "answers"
    decisions = on_one_machine(model, policy, folder / "test.npz", 32)
    assert len(set(decisions.exits)) > 1
    done = predict_on_ray(folder / "model", policy, data, str(output), CONFIG)
    assert (done.num_samples, done.num_partitions, done.done_before) == (len(decisions), 5, 0)
    check_once(output, decisions)
    job = json.loads((output / "job.json").read_text())
    assert job["totals"]["rows"] == sum(job["partitions"].values()) == len(decisions)
    assert job["totals"]["exits"] == np.bincount(decisions.exits, minlength=3).tolist()
    untouched = (output / "part-00000.parquet").stat().st_mtime_ns
    (output / "part-00003.parquet").unlink()
    (output / "part-00004.parquet").write_bytes(b"damaged")
    (output / ".part-00001.parquet.12ab").write_bytes(b"left by a worker that died")
    again = predict_on_ray(folder / "model", policy, data, str(output), CONFIG)
    assert again.done_before == 3
    assert again.totals == done.totals
    check_once(output, decisions)
    assert (output / "part-00000.parquet").stat().st_mtime_ns == untouched
    assert not list(output.glob(".part*"))
    other = replace(policy, thresholds=tuple(0.9 * value for value in policy.thresholds))
    with pytest.raises(Mismatch, match="partitions of another job, whose policy differ"):
        predict_on_ray(folder / "model", other, data, str(output), CONFIG)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_loses_no_row_and_doubles_none(folder, model, policy, tmp_path):
    data, output = tmp_path / "many", tmp_path / "answers"
    as_arrays(folder / "test.npz", data, times=10)
    np.savez(tmp_path / "many.npz", **{name: np.load(data / f"{name}.npy") for name in ("images", "labels")})
    killed, environments = [], []

    def kill() -> None:
        wait_until(lambda: list(output.glob("part-*")))
        killed.append(workers()[0])
        environments.append(Path(f"/proc/{killed[0]}/environ").read_bytes().split(b"\0"))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = predict_on_ray(folder / "model", policy, str(data), str(output), CONFIG)
    killer.join()
    assert killed
    assert b"MALLOC_ARENA_MAX=1" in environments[0]  # so that memory of threads is reused by the next
    assert done.done_before == 0
    check_once(output, on_one_machine(model, policy, tmp_path / "many.npz", 32))


def workers():
    """Return the processes in which Ray runs our workers."""
    lines = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    return sorted(int(process) for process, line in lines.items() if line.startswith(b"ray::MapWorker"))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_recording_in_partitions_equals_that_of_one_machine(folder, model, tmp_path):
    whole = record(model, load_data(folder / "test.npz", model.input_spec, batch_size=32), progress=False)
    store = Store(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "parts")
    done = record_on_ray(folder / "model", str(folder / "test"), store, CONFIG)
    assert done.totals["correct"] == whole.correct().sum(axis=0).tolist()
    table = HeadOutputs.load_sample(tmp_path / "parts")
    assert np.array_equal(table.scores, whole.scores)
    assert np.array_equal(table.predictions, whole.predictions)
    assert np.array_equal(table.labels, whole.labels)
    assert table.fingerprint == whole.fingerprint
    costs = [1.0, 2.0, 3.0]
    assert calibrate.eero(costs, 2.0, table).to_dict() == calibrate.eero(costs, 2.0, whole).to_dict()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_cascade_decides_on_workers_as_on_one_machine(tmp_path):
    from cascades import COSTS, chain, outputs, pixels

    whole, policy = outputs(), calibrate.eero(COSTS, "70%", outputs())
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/images.npy", pixels())
    np.save(tmp_path / "data/labels.npy", whole.labels)
    folder = chain().save(tmp_path / "cascade")
    done = predict_on_ray(folder, policy, str(tmp_path / "data"), str(tmp_path / "answers"), CONFIG)
    decisions = replay(policy, whole)
    assert (done.num_samples, len(set(decisions.exits.tolist())) > 1) == (len(pixels()), True)
    table = answers(tmp_path / "answers")
    assert table["prediction"].to_pylist() == decisions.predictions.tolist()
    assert table["exit"].to_pylist() == [chain().exits[index] for index in decisions.exits]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_compiled_stages_give_the_same_rows(folder, model, policy, tmp_path, capsys):
    line = f"predict {folder}/model {folder}/policy.json {folder}/test --engine ray --device cpu --compile --quiet"
    status, _, err = run(f"{line} --batch-size 32 --partition-rows 64 --actors 1 -o {tmp_path}/answers", capsys)
    assert (status, err) == (0, "")
    assert json.loads((tmp_path / "answers" / "plan.json").read_text())["settings"]["compile"]
    check_once(tmp_path / "answers", on_one_machine(model, policy, folder / "test.npz", 32))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_random_exits_are_those_of_one_machine(folder, policy, tmp_path, capsys):
    Lottery(costs=policy.costs, exit_rates=(0.4, 0.3, 0.3), unit=policy.unit).save(tmp_path / "lottery.json")
    as_pictures(folder / "test.npz", tmp_path / "pictures")
    line = f"predict {folder}/model {tmp_path}/lottery.json {tmp_path}/pictures --batch-size 32 --device cpu --quiet"
    assert run(f"{line} -o {tmp_path}/here.parquet", capsys)[0] == 0
    assert run(f"{line} --engine ray --partition-rows 64 --actors 1 -o {tmp_path}/there", capsys)[0] == 0
    here, there = parquet.read_table(tmp_path / "here.parquet"), answers(tmp_path / "there")
    assert here["exit"].to_pylist() == there["exit"].to_pylist()
    assert len(set(here["exit"].to_pylist())) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_file_that_a_worker_cannot_read_is_named_in_one_line(folder, tmp_path, capsys):
    where = tmp_path / "pictures"
    where.mkdir()
    broken = where / "broken.png"
    broken.write_bytes(b"no picture")
    line = f"predict {folder}/model {folder}/policy.json {where} --engine ray --batch-size 32 --actors 1 --quiet -o"
    status, out, err = run(f"{line} {tmp_path}/b", capsys)
    assert (status, out) == (1, "")
    assert err.startswith(f"alight: cannot read {broken}: it is not a usable image")
    assert len(err.splitlines()) == 1
    with pytest.raises(BadFile, match="not finished"):
        HeadOutputs.load_sample(tmp_path / "b")
    Image.new("RGB", (8, 8)).save(where / "fine.png")
    status, out, err = run(f"{line} {tmp_path}/c --on-error skip --json", capsys)
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert (result["num_samples"], result["bad_rows"]) == (2, 1)
    assert answers(tmp_path / "c")["sample"].to_pylist() == [str(where / "fine.png")]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_same_data_by_another_path_goes_on_and_stdout_has_the_result_alone(folder, tmp_path, monkeypatch, capfd):
    as_arrays(folder / "test.npz", tmp_path / "many", times=10)
    monkeypatch.chdir(tmp_path)
    line = f"predict {folder}/model {folder}/policy.json {{}} --engine ray --batch-size 32 --partition-rows 64"
    line += " --actors 2 --device cpu --json --quiet -o answers"

    def kill() -> None:
        wait_until(lambda: list((tmp_path / "answers").glob("part-*")))
        os.kill(workers()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert main(line.format(tmp_path / "many").split()) == 0
    killer.join()
    assert json.loads(capfd.readouterr().out)["done_before"] == 0
    (tmp_path / "answers" / "part-00003.parquet").unlink()
    assert main(line.format("many").split()) == 0
    assert json.loads(capfd.readouterr().out)["done_before"] == 46


def test_invalid_jobs_are_refused_before_anything_runs(folder, policy, tmp_path, capsys):
    data, model = str(folder / "test"), folder / "model"
    labelled = record(load_model(model), load_data(folder / "train.npz", load_model(model).input_spec), progress=False)
    paced = calibrate.certified_stream(calibrate.eero, seed=0)(policy.costs, policy.budget, labelled)
    with pytest.raises(BadInput, match="a paced policy keeps its budget along one stream, and every worker is"):
        predict_on_ray(model, paced, data, str(tmp_path / "a"), CONFIG)
    foreign = Threshold(thresholds=(0.5, 0.5), costs=policy.costs, fingerprint="another")
    with pytest.raises(Mismatch, match="calibrated on outputs of the network another"):
        predict_on_ray(model, foreign, data, str(tmp_path / "a"), CONFIG)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"has mine\.txt and no plan\.json: give a folder that is empty"):
        predict_on_ray(model, policy, data, str(tmp_path / "full"), CONFIG)
    line = f"predict {model} {folder}/policy.json {data}"
    for options, message in {
        f"--engine ray -o {tmp_path}/a.csv": "writes a folder of partitions",
        f"--engine ray --speed auto -o {tmp_path}/a": "measures this machine",
        f"-o {tmp_path}/full": "is a folder or a URI: give a file, or --engine ray",
        "-o s3://bucket/answers": "is a folder or a URI",
    }.items():
        status, _, err = run(f"{line} {options}", capsys)
        assert status == 1
        assert message in err
    assert not (tmp_path / "a").exists()


def test_the_commands_of_the_page_are_examples_that_run():
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text().partition("## A Ray cluster")[2]
    lines = [line.removeprefix("$ alight ") for line in page.splitlines() if line.startswith("$ alight ")]
    examples = {example for command in COMMANDS.values() for example in command.examples}
    assert len(lines) == 3
    assert set(lines) <= examples  # each of which tests/cli/test_help.py runs
