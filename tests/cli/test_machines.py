"""Training on several machines: each starts torchrun, together they train one network, and the first one writes it."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from commands import copy_network

from alight import load_model


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
def test_two_machines_train_the_network_that_one_does(network, tmp_path):
    folder = copy_network(network, tmp_path, samples=96)
    train = f"-m alight train {folder}/model {folder}/train.npz --epochs 2 --batch-size 32 --device cpu --json".split()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    subprocess.run([sys.executable, *train, "-o", f"{folder}/alone", "-q"], env=env, check=True, capture_output=True)
    meeting = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port()}".split()
    line = [sys.executable, "-m", "torch.distributed.run", *meeting, *train, "-o", f"{folder}/together"]
    machines = [
        subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert sorted(bool(out) for out, _ in outputs) == [False, True]  # one of them prints the result
    values = json.loads(next(out for out, _ in outputs if out))
    assert values["path"] == str(folder / "together")
    assert len(values["epochs"]) == 2
    assert sorted(path.name for path in (folder / "together").iterdir()) == ["config.json", "model.safetensors"]
    before, alone, together = (load_model(folder / name).state_dict() for name in ("model", "alone", "together"))
    moved = [name for name in before if not torch.equal(before[name], alone[name])]
    assert moved
    for name in before:
        torch.testing.assert_close(together[name], alone[name], atol=1e-4, rtol=0)
