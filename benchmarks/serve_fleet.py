"""Four replicas, one ledger: each is killed in turn, the ledger too, and all together never exceed one budget.

    python benchmarks/serve_fleet.py --samples 40000        # 8 minutes on two idle cores; needs redis-server

Each replica is `alight serve` in a process of its own, of a small network that has learned scikit-learn's digits, under
one stream policy of 45 % of the full network. Clients of two tenants and of none send one picture at a time, as fast as
they are answered; what the replicas get differs: two see clean digits, two noisy ones, on which early exits are not
sure. One replica after the other is killed with SIGKILL and replaced; then the ledger, which is started again after
some seconds, and once more without its data. After every answer the costs of all answers so far are compared with the
budgets of all samples sent so far: the difference may never exceed one sample at the last exit. Tenants have caps per
hour; answers of one tenant may never cost more together. Writes results/serve_fleet.csv, one row for each phase.
"""

import argparse
import base64
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from alight import TrainingSettings, calibrate, measure_costs, record, save_model, train_heads, zoo
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
REPLICAS, BUDGET, CLIENTS = 4, "45%", 8
DOWN = 5.0  # seconds for which the ledger is gone
NOT_SENT = -1  # the status of a request to a replica that is not there
TENANTS = {"shop": 0.08, "bank": 0.12}  # caps, as shares of the allowance of the whole run
Row = dict[str, str | float | int]


def prepare(folder: Path) -> tuple[Any, list[np.ndarray]]:
    """Train a network on digits, put it and its policy into a folder; the policy, and clean and noisy pictures."""
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, labels = load_digits(return_X_y=True)
    images = (15.9 * pixels).astype(np.uint8).reshape(-1, 1, 8, 8)
    model = zoo.resnet_digits()
    settings = TrainingSettings(mode="joint", epochs=4, learning_rate=5e-3, schedule="onecycle")
    train_heads(model, (images[:900], labels[:900]), settings, batch_size=64, progress=False)
    save_model(model, folder / "model")
    labelled = record(model, (images[900:1400], labels[900:1400]), progress=False)
    costs = measure_costs(model, torch.zeros(1, 1, 8, 8))
    policy = calibrate.certified_stream(calibrate.eero, seed=0)(costs, BUDGET, labelled, spend_all=True)
    policy.save(folder / "policy.json")
    clean = images[1400:, 0]
    noise = np.random.default_rng(0).integers(-90, 90, clean.shape)
    return policy, [clean, np.clip(clean + noise, 0, 255).astype(np.uint8)]


def body(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return json.dumps({"images": [base64.b64encode(file.getvalue()).decode()]}).encode()


class Ledger:
    """A Redis or Valkey of our own, which can be killed and started again."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.program = shutil.which("redis-server") or shutil.which("valkey-server")
        if self.program is None:
            raise SystemExit("there is no redis-server and no valkey-server: install one of them")
        self.start()

    def start(self) -> None:
        """Start it with what its folder holds."""
        self.folder.mkdir(exist_ok=True)
        options = ["--port", str(self.port), "--dir", str(self.folder), "--appendonly", "yes", "--save", ""]
        self.process = subprocess.Popen([str(self.program), *options], stdout=subprocess.DEVNULL)

    def kill(self, forget: bool) -> None:
        """End it at once; what it has written is lost too if it is to forget."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if forget:
            shutil.rmtree(self.folder)


class Replica:
    """A service in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path, port: int, ledger: int) -> None:
        line = ["serve", "model", "policy.json", "--port", str(port), "--threads", "1", "--log-level", "error"]
        line += ["--ledger", f"redis://127.0.0.1:{ledger}/0", "--token-file", "tokens.json", "--batch-size", "8"]
        self.port, self.folder, self.line = port, folder, [sys.executable, "-m", "alight", *line]
        self.start()

    def start(self) -> None:
        """Start it."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self.line, cwd=self.folder, env=environment)

    def kill(self) -> None:
        """End it at once."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ready(self) -> bool:
        """Whether it answers requests."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            try:
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
            except OSError:
                return False


@dataclass
class Account:
    """What was sent and what was answered, of all clients together."""

    budget: float
    last: float
    caps: dict[str, float]
    sent: int = 0
    answered: int = 0
    spent: float = 0.0
    ahead: float = 0.0  # of the budgets of all samples sent, at most
    by_tenant: dict[str, float] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self) -> None:
        """Count a sample that is sent."""
        with self.lock:
            self.sent += 1

    def wait(self, answered: int) -> None:
        """Wait until so many were answered."""
        wait_for(lambda: self.answered >= answered, 3600)

    def take(self, status: int, cost: float, tenant: str) -> None:
        """Count an answer, and compare what was spent with what was allowed."""
        with self.lock:
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if status != 200:
                if status:  # it was refused or never sent, so not decided; one whose connection broke may have been
                    self.sent -= 1
                return
            self.answered += 1
            self.spent += cost
            self.ahead = max(self.ahead, self.spent - self.sent * self.budget)
            if tenant:
                self.by_tenant[tenant] = self.by_tenant.get(tenant, 0.0) + cost


def ask(replica: Replica, index: int, bodies: list[Any], account: Account, stop: threading.Event) -> None:
    """Send one picture after the other to one replica, as one of three callers."""
    rng = np.random.default_rng(index)
    tenant = ["", "shop", "bank", ""][index // 2 % 4]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer token-of-{tenant or 'nobody'}-12345"}
    kind = bodies[index % REPLICAS % 2]
    with closing(http.client.HTTPConnection("127.0.0.1", replica.port, timeout=30)) as connection:
        while not stop.is_set():
            account.send()
            status, cost = 0, 0.0
            try:
                connection.request("POST", "/predict", kind[int(rng.integers(len(kind)))], headers)
                reply = connection.getresponse()
                status, content = reply.status, json.loads(reply.read())
                cost = sum(each["cost"] for each in content["predictions"]) if status == 200 else 0.0
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                status = NOT_SENT if isinstance(error, ConnectionRefusedError) else 0
                stop.wait(0.2)
            account.take(status, cost, tenant)
            if status == 429:
                stop.wait(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--output", type=Path, default=ROOT / "results/serve_fleet.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = fleet(Path(temporary), options.samples)
    made = provenance("numpy", "torch", "redis", "uvicorn", folder=ROOT)
    write_rows(options.output, [row | made for row in rows])


def fleet(folder: Path, samples: int) -> list[Row]:
    """The rows of a run with so many samples, by replicas whose files are in a folder."""
    policy, kinds = prepare(folder)
    caps = {name: share * samples * policy.budget for name, share in TENANTS.items()}
    tokens = [{"token": f"token-of-{name}-12345", "role": "predict", "tenant": name} for name in TENANTS]
    tokens.append({"token": "token-of-nobody-12345", "role": "predict"})
    (folder / "tokens.json").write_text(json.dumps({"tokens": tokens, "tenants": caps}))
    first, *others = free_ports(1 + REPLICAS)
    ledger = Ledger(folder / "ledger", first)
    replicas = [Replica(folder, port, first) for port in others]
    try:
        return run(samples, policy, caps, ledger, replicas, [[*map(body, each)] for each in kinds])
    finally:
        for replica in replicas:
            replica.process.terminate()
        for replica in replicas:
            replica.process.wait()
        ledger.kill(forget=False)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in opened]
    for each in opened:
        each.close()
    return ports


def run(
    samples: int, policy: Any, caps: dict[str, float], ledger: Ledger, replicas: list[Replica], bodies: list[Any]
) -> list[Row]:
    """The rows of all phases."""
    wait_for(lambda: all(replica.ready() for replica in replicas))
    account, stop = Account(policy.budget, policy.costs[-1], caps), threading.Event()
    threads = [
        threading.Thread(target=ask, args=(replicas[index % REPLICAS], index, bodies, account, stop))
        for index in range(CLIENTS)
    ]
    hour = time.time() // 3600
    for thread in threads:
        thread.start()
    phases = [f"replica {index} killed" for index in range(REPLICAS)]
    phases = ["all alive", *phases, "ledger killed", "ledger killed, its data lost"]
    rows: list[Row] = []
    for number, phase in enumerate(phases):
        before = (account.answered, account.spent)
        if phase.startswith("replica"):
            replica = replicas[int(phase.split()[1])]
            replica.kill()
            replica.start()
        elif phase.startswith("ledger"):
            ledger.kill(forget="lost" in phase)
            time.sleep(DOWN)
            ledger.start()
        account.wait(samples * (number + 1) // len(phases))
        with account.lock:
            answered, spent = account.answered - before[0], account.spent - before[1]
            rows.append(
                {
                    "phase": phase,
                    "answered": answered,
                    "spend_of_allowance": spent / (answered * policy.budget),
                    "answered_so_far": account.answered,
                    "spend_of_allowance_so_far": account.spent / (account.answered * policy.budget),
                    "most_ahead_of_budget_in_samples": account.ahead / policy.costs[-1],
                    **{f"{name}_of_cap": account.by_tenant.get(name, 0.0) / cap for name, cap in caps.items()},
                    "statuses": " ".join(f"{key}:{count}" for key, count in sorted(account.statuses.items())),
                    "hours": time.time() // 3600 - hour + 1,
                }
            )
        print(rows[-1], flush=True)
    stop.set()
    for thread in threads:
        thread.join()
    return rows


def wait_for(condition: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("it takes too long")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
