"""Commands run in this process or one of their own, on small made-up files."""

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from conftest import made_up
from digits import digits

from alight import Costs, HeadOutputs
from alight.cli import main

COSTS = Costs([1.0, 1.0, 2.0, 2.0], [0.1] * 4, unit="ms")
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


def interrupted(line: str, folder: Path, word: str, wait: float = 0.0) -> subprocess.CompletedProcess[str]:
    """A command in a process and folder of its own, interrupted as by Ctrl-C once its stderr has said a word."""
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT, *shlex.split(line)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    told = b""
    while word.encode() not in told and (said := os.read(process.stderr.fileno(), 4096)):
        told += said
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=60)
    return subprocess.CompletedProcess(line, process.returncode, out.decode(), (told + rest).decode())
