"""Whole jobs on Ray: all data through the network, in partitions that are each written once, whatever fails."""

import json
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pyarrow import parquet
from tqdm import tqdm

from alight.cluster.shards import Shard, ShardedData, open_data
from alight.cluster.stores import PartitionFolder, Store
from alight.cluster.workers import ClusterTask, PredictTask, RecordTask, ShardWorker, Summary, WorkerSettings, pack
from alight.engine.backends.cascade import Cascade
from alight.engine.predictor import Predictor, load_network
from alight.engine.recorder import Recorder
from alight.engine.settings import RunSettings
from alight.errors import AlightError, BadInput
from alight.files import PathLike
from alight.networks.store import fingerprint
from alight.outputs import KEPT
from alight.policies.policy import Policy

MAX_TASKS = 5000  # of Ray Data at once; of more partitions, several are one task
SHARED_MEMORY = 100 * 2**20  # bytes for what passes between processes, beside the network
ARENAS = "MALLOC_ARENA_MAX"  # of glibc, which gives the new thread of each partition a memory arena of its own


@dataclass(frozen=True)
class JobResult:
    """A job whose partitions are all written.

    >>> print(JobResult("answers", 10, 3, 1, {"rows": 10, "spent": 25.0, "exits": [5, 5]}))
    10 samples in 3 partitions, 1 of them done before: answers
    """

    folder: str
    num_samples: int
    num_partitions: int
    done_before: int
    totals: Summary  # "rows" of all partitions, "skipped" rows that are bad, and what the task sums up
    exits: tuple[str, ...] = ()  # names of all exits of the network

    def __str__(self) -> str:
        before = f", {self.done_before} of them done before" if self.done_before else ""
        skipped = self.totals.get("skipped", 0)
        bad = f"; {skipped:,} bad rows were left out, see bad-*.parquet there" if skipped else ""
        return f"{self.num_samples:,} samples in {self.num_partitions} partitions{before}: {self.folder}{bad}"


@dataclass(frozen=True)
class JobConfig:
    """Sizes, workers and switches of a job.

    >>> JobConfig(batch_size=100, partition_rows=256).rows
    300
    """

    batch_size: int = 128
    partition_rows: int = 4096  # samples of a partition, of Parquet at least
    workers: int | None = None  # by default as many as the cluster has room for
    gpus: float = 1.0  # of each worker on a GPU; two workers share one that both take half of
    on_error: str = "fail"  # the first bad row ends the job; "skip" leaves bad rows out and lists them
    tokenizer: PathLike | None = None  # another than that of the network
    progress: bool = True
    settings: RunSettings = field(default_factory=RunSettings)

    @property
    def rows(self) -> int:
        """Samples of a partition: whole batches, so that batches are those of one machine."""
        return -(-self.partition_rows // self.batch_size) * self.batch_size

    def __post_init__(self) -> None:
        if self.on_error not in ("fail", "skip") or not self.gpus > 0:
            raise BadInput(f"on_error {self.on_error!r}, {self.gpus:g} GPUs: give fail or skip, and a positive number")


def predict_on_ray(
    model: PathLike,
    policy: Policy,
    data: "str | Store",
    output: "str | Store",
    config: JobConfig = JobConfig(),
    *,
    allow_mismatch: bool = False,
) -> JobResult:
    """Predict all data under a policy, into a folder of Parquet partitions with one row for each sample.

    `model` is a folder that `save_model` or `Cascade.save` wrote; it is sent to the workers. `data` and `output` are
    paths that all of them see, URIs, or `Store`s. A second run with the same arguments makes the partitions that are
    missing. Samples have the numbers that they have on one machine, and get the same predictions; batches of a quota
    end where partitions end, each keeps its budget, and so does the whole.
    """
    network = load_network(model)
    if not allow_mismatch:  # once here, before every worker does
        Predictor(network, policy, settings=RunSettings(dtype=config.settings.dtype))
    task = PredictTask(policy, network.exits, network.classes, allow_mismatch)
    return _run_job(task, model, network, data, output, config)


def record_on_ray(
    model: PathLike,
    data: "str | Store",
    output: "str | Store",
    config: JobConfig = JobConfig(),
    *,
    score: str = "margin",
    features: Sequence[str] = (),
    top: int = KEPT,
) -> JobResult:
    """Record the outputs of every head for all data, into partitions that `HeadOutputs.load_sample` reads.

    See `predict_on_ray` for the arguments.
    """
    network = load_network(model)
    Recorder(network, score, features, top)  # checks that there are such scores
    return _run_job(RecordTask(score, tuple(features), top), model, network, data, output, config)


def _run_job(
    task: ClusterTask,
    folder: PathLike,
    network: Any,
    where: "str | Store",
    output: "str | Store",
    config: JobConfig,
) -> JobResult:
    """Make all partitions that are missing, and write that the job is done."""
    data = open_data(where, network, config.rows)
    partitions = PartitionFolder(Store.at(output), task.suffix)
    own = network.fingerprint if isinstance(network, Cascade) else fingerprint(network)
    data = data.named(partitions.begin(_plan(task, data, own, config))["data"])
    summaries = _summaries_before(task, partitions, data)
    before = len(summaries)
    if before < len(data.shards):
        run = replace(config.settings, threads=config.settings.threads or 1)
        settings = WorkerSettings(task, partitions, data.where, config.batch_size, run, config.on_error)
        files = pack(Path(folder), Path(config.tokenizer) if config.tokenizer else None)
        missing = [shard for shard in data.shards if shard.index not in summaries]
        bar = tqdm(total=len(data.shards), initial=before, unit="partition", disable=not config.progress)
        with bar, _ray(sum(map(len, files.values()))):
            for index, summary in _summaries(files, settings, missing, config):
                summaries[index] = summary
                bar.update()
        partitions.existing()  # removes incomplete files of workers that died
    totals = add_summaries([summaries[index] for index in sorted(summaries)])
    if (rows := totals["rows"] + totals["skipped"]) != len(data):
        raise AlightError(f"{rows} rows for {len(data)} samples: the data changed meanwhile, start again")
    sizes = {partitions.partition(shard.index).name: len(shard) for shard in data.shards}
    partitions.finish({"totals": totals, "partitions": sizes})
    return JobResult(str(partitions.folder), len(data), len(data.shards), before, totals, network.exits)


def add_summaries(summaries: Sequence[Summary]) -> Summary:
    """Return the totals over partitions.

    >>> add_summaries([{"rows": 2, "exits": [1, 1]}, {"rows": 1, "exits": [0, 1]}])
    {'rows': 3, 'exits': [1, 2]}
    """
    totals: Summary = {}
    for name, first in summaries[0].items():
        values = [each[name] for each in summaries]
        totals[name] = [*map(sum, zip(*values, strict=True))] if isinstance(first, list) else sum(values)
    return totals


def _plan(task: ClusterTask, data: ShardedData, network: str, config: JobConfig) -> dict[str, Any]:
    """Return all that the partitions depend on."""
    inputs = {"data": data.where, "content": data.content, "samples": len(data), "network": network}
    sizes = {"batch_size": config.batch_size, "partition_rows": config.rows}
    run = replace(config.settings, device=None, threads=None)  # which change no answer
    return {**task.plan(), **inputs, **sizes, "settings": asdict(run)}


def _summaries_before(task: ClusterTask, partitions: PartitionFolder, data: ShardedData) -> dict[int, Summary]:
    """Return the summaries of partitions that are written; one that is damaged, or has other rows, is made again."""
    summaries: dict[int, Summary] = {}
    for index in partitions.existing() & {shard.index for shard in data.shards}:
        with suppress(OSError, ValueError, KeyError):
            bad = partitions.bad_rows(index)
            skipped = parquet.read_metadata(bad.open()).num_rows if bad.info().is_file else 0
            summary = task.summary(partitions.partition(index).read()) | {"skipped": skipped}
            if summary["rows"] + skipped == len(data.shards[index]):
                summaries[index] = summary
    return summaries


def _summaries(
    files: Mapping[str, bytes], settings: WorkerSettings, shards: Sequence[Shard], config: JobConfig
) -> Iterator[tuple[int, Summary]]:
    """Yield the summary of each partition once it is written; a worker that dies is replaced, its shard redone."""
    import ray

    on_gpu = (settings.run.device or "cpu").startswith("cuda")
    cores = settings.run.threads or 1
    resources = ray.cluster_resources()
    free = int(resources.get("GPU", 0) / config.gpus if on_gpu else resources.get("CPU", 0) // cores)
    if not free:
        needs = f"{config.gpus:g} GPUs" if on_gpu else f"{cores} cores"
        raise BadInput(f"a worker needs {needs} and the cluster has none to give: see --device and --threads")
    resources_of_worker: dict[str, Any] = {"num_gpus": config.gpus} if on_gpu else {"num_cpus": cores}
    count = min(config.workers or free, len(shards))
    network = ray.put(files)
    rows = ray.data.from_items(
        [{"shard": pickle.dumps(shard)} for shard in shards], override_num_blocks=min(len(shards), MAX_TASKS)
    )
    done = rows.map_batches(
        _RayWorker,
        fn_constructor_args=(network, settings),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=min(count, free), max_size=count),  # more where the cluster grows
        runtime_env={"env_vars": {ARENAS: os.environ.get(ARENAS, "1")}},
        **resources_of_worker,
    )
    for row in done.iter_rows():
        if row["error"]:
            raise AlightError(row["error"])
        yield row["index"], json.loads(row["summary"])


class _RayWorker(ShardWorker):
    """A worker that gets the network from shared memory, so that a replacement finds it again."""

    def __init__(self, network: Any, settings: WorkerSettings) -> None:
        import ray

        super().__init__(ray.get(network), settings)


@contextmanager
def _ray(network_bytes: int) -> Iterator[None]:
    """Use Ray if it runs already, the cluster of RAY_ADDRESS, or this machine's cores for as long as it lasts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray has log files of its own
    with warnings.catch_warnings(), _stdout_as_stderr():
        warnings.simplefilter("ignore")  # Ray's own, about itself
        import ray
        import ray.data

        own = not ray.is_initialized()
        if own:
            options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
            if not (address := os.environ.get("RAY_ADDRESS")):
                options |= {"object_store_memory": SHARED_MEMORY + 2 * network_bytes, "include_dashboard": False}
            with _silent_stderr():
                ray.init(address or "local", **options)
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        try:
            yield
        finally:
            if own:
                ray.shutdown()


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Send what Ray prints on stdout, when a worker dies, say, to stderr: stdout has the result alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard stderr while Ray starts, whose core prints there; errors are raised all the same."""
    kept, discarded = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(discarded, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(discarded)
