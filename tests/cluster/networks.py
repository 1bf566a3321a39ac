"""A small network, data on disk, and a policy, as jobs need them."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
from commands import make_network
from PIL import Image
from pyarrow import parquet

from alight import Predictor, calibrate, load_model, measure_costs, record
from alight.cluster.shards import open_data
from alight.cluster.stores import PartitionFolder, Store
from alight.cluster.workers import ShardWorker, WorkerSettings, pack
from alight.data.batches import load_data
from alight.engine.predictor import load_network
from alight.engine.settings import RunSettings
from alight.networks.multi_exit import example_of


def make_job(folder: Path, samples: int = 300):
    """Fill a folder with a network, digits as test.npz and as arrays in test, and a policy; return model and policy."""
    make_network(folder, samples)
    as_arrays(folder / "test.npz", folder / "test")
    model = load_model(folder / "model")
    labelled = record(model, load_data(folder / "train.npz", model.input_spec), progress=False)
    costs = measure_costs(model, example_of(model))
    policy = calibrate.eero(costs, "80%", labelled)
    policy.save(folder / "policy.json")
    return model, policy


def on_one_machine(model, policy, where, batch_size):
    """Return the decisions of one process about the same data."""
    predictor = Predictor(model, policy, batch_size=batch_size)
    return predictor.run(load_data(where, model.input_spec, split="test", batch_size=batch_size), progress=False)


def by_a_worker(task, model_folder, data, output, *, rows, batch_size, on_error="fail"):
    """Return the rows that a worker in this process returns for all shards; it writes the partitions."""
    sharded = open_data(str(data), load_network(model_folder), rows)
    partitions = PartitionFolder(Store.at(output), task.suffix)
    partitions.begin({})
    settings = WorkerSettings(task, partitions, sharded.where, batch_size, RunSettings(threads=1), on_error)
    return ShardWorker(pack(model_folder), settings)({"shard": [pickle.dumps(shard) for shard in sharded.shards]})


def answers(folder):
    """Return all rows of the partitions, in their order."""
    return pa.concat_tables([parquet.read_table(file) for file in sorted(Path(folder).glob("part-*.parquet"))])


def check_once(folder, decisions):
    """Check that every sample has one row, with the decision of one machine."""
    table = answers(folder)
    assert table["sample"].to_pylist() == list(range(len(decisions)))
    assert table["prediction"].to_pylist() == decisions.predictions.tolist()
    assert table["exit"].to_pylist() == [decisions.exit_names[index] for index in decisions.exits]
    assert table["cost_FLOPs"].to_pylist() == decisions.spent.tolist()


def as_arrays(archive: Path, folder: Path, times: int = 1) -> None:
    """Write the arrays of an .npz as images.npy and labels.npy, several times one after the other."""
    folder.mkdir()
    with np.load(archive) as arrays:
        for name in ("images", "labels"):
            np.save(folder / f"{name}.npy", np.concatenate([arrays[name]] * times))


def as_pictures(archive: Path, folder: Path) -> None:
    """Write the images of an .npz as files in a folder for each class."""
    with np.load(archive) as arrays:
        for number, (image, label) in enumerate(zip(arrays["images"], arrays["labels"], strict=True)):
            (folder / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / str(label) / f"{number:05}.png")


def as_table(archive: Path, folder: Path, rows: int = 50) -> None:
    """Write the images of an .npz as two Parquet files of tensors, in row groups."""
    folder.mkdir()
    with np.load(archive) as arrays:
        half = len(arrays["labels"]) // 2
        for name, part in {"a.parquet": slice(None, half), "b.parquet": slice(half, None)}.items():
            images = pa.FixedShapeTensorArray.from_numpy_ndarray(arrays["images"][part])
            table = pa.table({"image": images, "label": arrays["labels"][part]})
            parquet.write_table(table, folder / name, row_group_size=rows)
