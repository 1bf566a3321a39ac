"""Commands run in this process or one of their own, on small made-up files."""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import torch
from conftest import made_up
from digits import digits
from made_up_log import write_log
from pyarrow import parquet
from waiting import wait_until

from alight import (
    Costs,
    HeadOutputs,
    calibrate,
    from_timm,
    measure_costs,
    record,
    save_model,
    sweep,
    write_points,
)
from alight.cli import main

COSTS = Costs([1.0, 1.0, 2.0, 2.0], [0.1] * 4, unit="ms")
CHAIN = {  # each command reads what the one before it wrote
    "train": "train {network}/model {network}/train.npz --validation {network}/test.npz --mode joint --epochs 4"
    " --set learning_rate=0.003 -o model",
    "record": "record model {network}/test.npz -o labelled.npz --features negative_entropy",
    "costs": "costs model",
    "calibrate": "calibrate labelled.npz --costs costs.json --budget 90% -o policy.json",
    "predict": "predict model policy.json {network}/test.npz",
}
BOOT = """
import signal, sys
from alight.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
print("ready", file=sys.stderr, flush=True)
sys.exit(main())
"""


def shared_folder(base: Path, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder that is filled once for all processes of a test session; `base` is that of one process."""
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
            folder.mkdir()
            fill(folder)
            done.touch()
    return folder


def run(line, capsys):
    """Status, stdout and stderr of a command."""
    try:
        status = main(shlex.split(line))
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def make_tables(folder: Path) -> None:
    """Recorded outputs of an imaginary network with four exits, good and bad ones, and its costs."""
    made_up(1, 300, 4).save(folder / "labelled.npz")
    made_up(2, 300, 4).unlabelled().save(folder / "unlabelled.npz")
    made_up(3, 600, 4).save(folder / "test.npz")
    COSTS.save(folder / "costs.json")
    made_up(4, 1, 4).save(folder / "one.npz")
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 4, 3))
    both = HeadOutputs.from_logits(logits, rng.integers(3, size=50), features=["negative_entropy"])
    both.save(folder / "both.npz")
    content = (folder / "labelled.npz").read_bytes()
    (folder / "damaged.npz").write_bytes(content[:300] + content[340:])


def make_network(folder: Path, samples: int | None = None) -> Path:
    """Digits as pictures of 16 x 16, and a small network of timm with exits, in the folder."""
    for name, data in zip(("train", "test"), digits(), strict=True):
        images, labels = (tensor[:samples] for tensor in data.tensors)
        doubled = (255 * images.repeat(1, 3, 2, 2)).to(torch.uint8)
        np.savez(folder / f"{name}.npz", images=doubled.numpy(), labels=labels.numpy())
    line = f"attach timm:test_resnet --classes 10 --image-size 16 --after layer1,layer2 -o {folder}/model"
    assert main(line.split()) == 0
    return folder


def copy_network(source: Path, folder: Path, samples: int | None = None) -> Path:
    """Copy a network, and the first samples of its data where it has some, to another folder."""
    shutil.copytree(source / "model", folder / "model")
    for path in source.glob("t*.npz"):
        with np.load(path) as arrays:
            np.savez(folder / path.name, **{name: array[:samples] for name, array in arrays.items()})
    return folder


def run_chain(network: Path, folder: Path) -> None:
    """Run the chain of commands in the folder; what they print is in COMMAND.out and COMMAND.err."""
    for name, line in CHAIN.items():
        with chdir(folder), Path(f"{name}.out").open("w") as out, Path(f"{name}.err").open("w") as err:
            with redirect_stdout(out), redirect_stderr(err):
                status = main(line.format(network=network).split())
            assert status == 0, Path(f"{name}.err").read_text()


def write_example_files(folder: Path) -> None:
    """Write every file that examples of the commands read: untrained networks, images, tables, a policy."""
    images, labels = digits()[0][:296]
    pictures = np.tile(255 * images.numpy(), (1, 3, 4, 4)).astype(np.uint8)
    for name, rows in {"train": slice(64), "validation": slice(64, 264), "test": slice(264, 296)}.items():
        np.savez(folder / f"{name}.npz", images=pictures[rows], labels=labels[rows].numpy())
        tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(pictures[rows])
        parquet.write_table(pa.table({"image": tensors, "label": labels[rows].numpy()}), folder / f"{name}.parquet")
    torch.manual_seed(0)
    model = from_timm("test_convnext", num_classes=10, image_size=32)
    save_model(model, folder / "model")
    save_model(from_timm("test_resnet", num_classes=10, image_size=32), folder / "small")
    costs = measure_costs(model, torch.zeros(1, 3, 32, 32))
    costs.save(folder / "costs.json")
    table = record(model, (pictures, labels), progress=False)
    labelled, test = table.take(slice(64, 264)), table.take(slice(264, 296))
    labelled.save(folder / "labelled.npz")
    test.save(folder / "test_outputs.npz")
    calibrate.eero(costs, "60%", labelled).save(folder / "policy.json")
    shutil.copytree(folder / "model", folder / "fitted")
    shutil.copy(folder / "policy.json", folder / "fitted")
    (folder / "partitions").mkdir()
    for index, rows in enumerate((slice(0, 120), slice(120, 200))):
        labelled.take(rows).save(folder / "partitions" / f"part-0000{index}.npz")
    points = sweep({"geometric": calibrate.geometric}, costs, ["60%"], labelled=labelled, test=test)
    write_points(points, folder / "points.csv")
    write_log(folder / "log.csv")


def interrupted(
    line: str, folder: Path, word: str, work: float = 0.0, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command in a process and folder of its own, interrupted as by Ctrl-C once its stderr has said a word.

    `work`: seconds of CPU time that the process spends in between; `before`: code that it runs first.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", before + BOOT, *shlex.split(line)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    seen = b""
    while word.encode() not in seen and (printed := os.read(process.stderr.fileno(), 4096)):
        seen += printed
    used = psutil.Process(process.pid).cpu_times
    end = sum(used()[:2]) + work
    wait_until(lambda: process.poll() is not None or sum(used()[:2]) >= end)
    process.send_signal(signal.SIGINT)
    try:
        out, rest = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(line, process.returncode, out.decode(), (seen + rest).decode())
