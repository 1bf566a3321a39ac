"""A small network and data on disk, and a policy for it: what jobs are made of."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
from commands import make_network
from PIL import Image
from pyarrow import parquet

from alight import Predictor, calibrate, load_model, measure_costs, record
from alight.cluster.partitions import Partitions
from alight.cluster.shards import open_data
from alight.cluster.stores import Store
from alight.cluster.workers import Settings, Worker, pack
from alight.data.formats import load_data
from alight.networks.multi_exit import example_of


def made(folder: Path, samples: int = 300):
    """A folder with a network, digits as .npz, and a policy for them."""
    make_network(folder, samples)
    model = load_model(folder / "model")
    labelled = record(model, load_data(folder / "train.npz", model.input_spec), progress=False)
    costs = measure_costs(model, example_of(model))
    policy = calibrate.eero(costs, "80%", labelled)
    policy.save(folder / "policy.json")
    return model, policy


def on_one_machine(model, policy, where, batch_size):
    """What one process decides about the same data."""
    predictor = Predictor(model, policy, batch_size=batch_size)
    return predictor.run(load_data(where, model.input_spec, split="test", batch_size=batch_size), progress=False)


def by_a_worker(task, model_folder, data, output, *, rows, batch_size):
    """What a worker in this process says of all shards; the partitions are in the output folder."""
    given = open_data(str(data), load_model(model_folder), rows)
    partitions = Partitions(Store.at(output), task.suffix)
    partitions.begin({})
    settings = Settings(task, partitions, given.kind, given.where, batch_size, {"num_threads": 1})
    return Worker(pack(model_folder), settings)({"shard": [pickle.dumps(shard) for shard in given.shards]})


def answers(folder):
    """All rows of the partitions, in their order."""
    return pa.concat_tables([parquet.read_table(file) for file in sorted(Path(folder).glob("part-*.parquet"))])


def check_once(folder, decisions):
    """Every sample has one row, and that is what one machine decides."""
    table = answers(folder)
    assert table["sample"].to_pylist() == list(range(len(decisions)))
    assert table["label"].to_pylist() == decisions.predictions.tolist()
    assert table["exit"].to_pylist() == decisions.exits.tolist()
    assert table["cost_FLOPs"].to_pylist() == decisions.spent.tolist()


def as_pictures(archive: Path, folder: Path) -> None:
    """The images of an .npz as files in a folder for each class."""
    with np.load(archive) as arrays:
        for number, (image, label) in enumerate(zip(arrays["images"], arrays["labels"], strict=True)):
            (folder / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / str(label) / f"{number:05}.png")


def as_table(archive: Path, folder: Path, rows: int = 50) -> None:
    """The images of an .npz as two Parquet files of tensors, in row groups."""
    folder.mkdir()
    with np.load(archive) as arrays:
        half = len(arrays["labels"]) // 2
        for name, part in {"a.parquet": slice(None, half), "b.parquet": slice(half, None)}.items():
            images = pa.FixedShapeTensorArray.from_numpy_ndarray(arrays["images"][part])
            table = pa.table({"image": images, "label": arrays["labels"][part]})
            parquet.write_table(table, folder / name, row_group_size=rows)
