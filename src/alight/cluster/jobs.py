"""Whole jobs on Ray: all data through the network, in partitions that are each there once, whatever dies on the way."""

import json
import logging
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from alight.cluster.partitions import Partitions
from alight.cluster.shards import Data, Shard, open_data
from alight.cluster.stores import Store
from alight.cluster.tasks import Answers, Recordings, Summary, Task, added
from alight.cluster.workers import Settings, Worker, pack
from alight.engine.predictor import Predictor
from alight.engine.recorder import Recorder
from alight.errors import AlightError, BadInput
from alight.files import PathLike
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import fingerprint, load_model
from alight.policies.policy import Policy

TASKS = 5000  # that Ray Data is given at once; of more partitions, several are one task
ROOM = 100 * 2**20  # bytes of shared memory for what passes between processes, beside the network
ARENAS = "MALLOC_ARENA_MAX"  # of glibc, for whom each partition's thread is a new one, with an arena to fill


@dataclass(frozen=True)
class Finished:
    """A job that is done: all partitions are there.

    >>> print(Finished("answers", 10, 3, 1, {"rows": 10, "spent": 25.0, "exits": [5, 5]}))
    10 samples in 3 partitions, 1 of them done before: answers
    """

    folder: str
    num_samples: int
    num_partitions: int
    done_before: int
    totals: Summary

    def __str__(self) -> str:
        before = f", {self.done_before} of them done before" if self.done_before else ""
        return f"{self.num_samples} samples in {self.num_partitions} partitions{before}: {self.folder}"


@dataclass(frozen=True)
class How:
    """How a job is done, whatever it is."""

    batch_size: int = 128
    partition_rows: int = 4096  # samples of a partition, of Parquet at least
    workers: int | None = None  # by default as many as the cluster has room for
    tokenizer: PathLike | None = None  # another than that of the network
    progress: bool = True
    switches: Mapping[str, Any] = field(default_factory=dict)  # of `Predictor` and `record`

    @property
    def rows(self) -> int:
        """Samples of a partition: whole batches, so that batches are those of one machine."""
        return -(-self.partition_rows // self.batch_size) * self.batch_size


def predict_on_ray(
    model: PathLike,
    policy: Policy,
    data: "str | Store",
    output: "str | Store",
    how: How = How(),  # noqa: B008  # which nobody can change
    *,
    allow_mismatch: bool = False,
) -> Finished:
    """Answers for all data under a policy, in a folder of Parquet partitions: one row for each sample.

    `model` is a folder that `save_model` wrote; it travels to the workers. `data` and `output` are paths that all of
    them see, URIs, or `Store`s. A second run with the same arguments does what is missing. Samples have the numbers
    that they have on one machine, and get the same answers; batches of a quota end where partitions end, each keeps
    its budget, and so does the whole.
    """
    network = load_model(model)
    if not allow_mismatch:  # found out here, not by every worker
        Predictor(network, policy, dtype=how.switches.get("dtype"))
    return _done(Answers(policy, network.classes, allow_mismatch), model, network, data, output, how)


def record_on_ray(
    model: PathLike,
    data: "str | Store",
    output: "str | Store",
    how: How = How(),  # noqa: B008
    *,
    score: str = "margin",
    features: Sequence[str] = (),
    log_probabilities: bool = False,
) -> Finished:
    """What every head says about all data, in a folder of .npz partitions that `HeadOutputs.load_sample` reads.

    See `predict_on_ray` for what the arguments mean.
    """
    network = load_model(model)
    Recorder(network, score, features)  # finds out whether there are such scores
    return _done(Recordings(score, tuple(features), log_probabilities), model, network, data, output, how)


def _done(
    task: Task, model: PathLike, network: MultiExitModel, data: "str | Store", output: "str | Store", how: How
) -> Finished:
    """The job, once every partition is there and the manifest says so."""
    given = open_data(data, network, how.rows)
    partitions = Partitions(Store.at(output), task.suffix)
    partitions.begin(_plan(task, given, fingerprint(network), how))
    summaries = dict(_before(task, partitions, given))
    before = len(summaries)
    if before < len(given.shards):
        settings = Settings(
            task, partitions, given.kind, given.where, how.batch_size, {"num_threads": 1, **how.switches}
        )
        files = pack(Path(model), Path(how.tokenizer) if how.tokenizer else None)
        missing = [shard for shard in given.shards if shard.index not in summaries]
        shown = tqdm(total=len(given.shards), initial=before, unit="partition", disable=not how.progress)
        with shown, _ray(sum(map(len, files.values()))):
            for index, summary in _results(files, settings, missing, how.workers):
                summaries[index] = summary
                shown.update()
        partitions.there()  # clears what dead workers left
    totals = added(summaries[index] for index in sorted(summaries))
    if totals["rows"] != len(given):
        raise AlightError(f"{totals['rows']} rows for {len(given)} samples: the data changed meanwhile, start anew")
    sizes = {partitions.store(each.index).name: each.stop - each.start for each in given.shards}
    partitions.finish({"totals": totals, "partitions": sizes})
    return Finished(str(partitions.folder), len(given), len(given.shards), before, totals)


def _plan(task: Task, data: Data, network: str, how: How) -> dict[str, Any]:
    """All that the partitions depend on."""
    what = {"data": data.where, "content": data.content, "samples": len(data), "network": network}
    sizes = {"batch_size": how.batch_size, "partition_rows": how.rows}
    switches = {name: value for name, value in how.switches.items() if name not in ("device", "num_threads")}
    return {**task.told(), **what, **sizes, "switches": switches}


def _before(task: Task, partitions: Partitions, data: Data) -> Iterator[tuple[int, Summary]]:
    """Partitions that are there already; one that cannot be read, or has other rows, is made again."""
    there = partitions.there()
    for shard in data.shards:
        if shard.index in there:
            try:
                summary = task.summary(partitions.store(shard.index).read())
            except (OSError, ValueError, KeyError):
                continue
            if summary["rows"] == shard.stop - shard.start:
                yield shard.index, summary


def _results(
    files: Mapping[str, bytes], settings: Settings, shards: Sequence[Shard], workers: int | None
) -> Iterator[tuple[int, Summary]]:
    """What each partition amounts to, as it gets done; who dies is replaced, and the shard given to another."""
    import ray

    on_gpu = str(settings.switches.get("device", "cpu")).startswith("cuda")
    cores = settings.switches["num_threads"] or 1
    room = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free = int(room.get("GPU", 0) if on_gpu else room.get("CPU", 0) // cores)
    if not free:
        needs = "a GPU" if on_gpu else f"{cores} cores"
        raise BadInput(f"a worker needs {needs} and the cluster has none to give: see --device and --threads")
    count = min(workers or free, len(shards))
    network = ray.put(files)
    given = ray.data.from_items(
        [{"shard": pickle.dumps(shard)} for shard in shards], override_num_blocks=min(len(shards), TASKS)
    )
    done = given.map_batches(
        _Worker,
        fn_constructor_args=(network, settings),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=min(count, free), max_size=count),  # more where the cluster grows
        runtime_env={"env_vars": {ARENAS: os.environ.get(ARENAS, "1")}},
        **({"num_gpus": 1} if on_gpu else {"num_cpus": cores}),
    )
    for row in done.iter_rows():
        if row["error"]:
            raise AlightError(row["error"])
        yield row["index"], json.loads(row["summary"])


class _Worker(Worker):
    """A worker that is told where the network lies in shared memory, so that a replacement finds it again."""

    def __init__(self, network: Any, settings: Settings) -> None:
        import ray

        super().__init__(ray.get(network), settings)


@contextmanager
def _ray(network: int) -> Iterator[None]:
    """Ray as it runs already, the cluster that RAY_ADDRESS names, or this machine's cores for as long as it lasts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it has files of its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, about itself
        import ray
        import ray.data

        mine = not ray.is_initialized()
        if mine:
            address = os.environ.get("RAY_ADDRESS")
            here: dict[str, Any] = {"object_store_memory": ROOM + 2 * network, "include_dashboard": False}
            with _unheard():
                ray.init(
                    address or "local", logging_level=logging.ERROR, log_to_driver=False, **({} if address else here)
                )
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        try:
            yield
        finally:
            if mine:
                ray.shutdown()


@contextmanager
def _unheard() -> Iterator[None]:
    """Nothing on stderr while Ray starts, whose core greets there by itself; what goes wrong is raised."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
