"""The service from its folder to its last answer: loaded, warmed up, served, drained."""

import logging
import os
import signal
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from PIL import Image

from alight.errors import BadInput
from alight.policies.paced import Paced
from alight.policies.policy import Policy
from alight.policies.saved import load_policy
from alight.serve.app import create_app
from alight.serve.ledger import AHEAD, Book, resumed
from alight.serve.limits import Limits
from alight.serve.logs import event, log_in_lines
from alight.serve.metrics import Metrics
from alight.serve.network import Network, Sample, check_policies, load_network
from alight.serve.timing import timings
from alight.serve.worker import Worker

GRACE = 30  # seconds for requests under way, once it is to stop
KEEP_ALIVE = 75  # seconds that an idle connection lasts: longer than load balancers keep theirs, which is 60 mostly


@dataclass(frozen=True)
class Address:
    """Where the service listens."""

    host: str = "127.0.0.1"
    port: int = 8000


def load_policies(paths: list[Path]) -> dict[str, Policy]:
    """The policies of these files by their names, without .json."""
    policies = {path.stem: load_policy(path) for path in paths}
    if len(policies) < len(paths):
        raise BadInput(f"{len(paths)} policies have {len(policies)} names: give each file a name of its own")
    check_policies(policies)
    return policies


def bound(address: Address) -> socket.socket:
    """A socket with the address, which does not listen yet."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((address.host, address.port))
    except OSError as error:
        taken.close()
        error.filename = f"{address.host}:{address.port}"
        raise
    return taken


def assembled(
    network: Network, policies: Mapping[str, Policy], state: Path | None, limits: Limits, token: str | None = None
) -> FastAPI:
    """The application of a network that is loaded: its stream resumed, its exits timed."""
    metrics = Metrics(network.exits)
    book = Book(resumed(state, policies), state, max(AHEAD, 4 * limits.batch))
    worker = Worker(network, book, timings(network, example(network), limits.batch), limits, metrics)
    for name, policy in policies.items():
        if not isinstance(policy, Paced):
            event("no promise about the stream", logging.WARNING, policy=name, advice="calibrate --contract stream")
    return create_app(network, worker, limits, metrics, token)


def example(network: Network) -> Sample:
    """A sample such as the network takes, to warm up with."""
    if network.texts:
        return "a few words to begin with, about as many as people write when they ask for something"
    if network.image_shape:
        _, height, width = network.image_shape
        return network.picture(Image.new("RGB", (width, height), (128, 128, 128)))
    if not network.shape or None in network.shape:
        raise BadInput("the network does not say what it takes: build it with attach_heads, which keeps an example")
    sizes = [int(size or 0) for size in network.shape]
    return np.zeros((1, *sizes), dtype=network.dtype)


def serve(
    folder: Path,
    policies: Mapping[str, Policy],
    address: Address,
    limits: Limits,
    *,
    state: Path | None = None,
    token: str | None = None,
    log_level: str = "info",
    **switches: Any,
) -> None:
    """Answer until SIGTERM or SIGINT: then what is under way is answered, and what was spent written down."""
    log_in_lines(log_level)
    warnings.filterwarnings("ignore", module="PIL")  # of pictures that are refused anyway
    listening = bound(address)
    with listening:
        network = load_network(folder, policies, tokens=limits.tokens, **switches)
        app = assembled(network, policies, state, limits, token)
        config = uvicorn.Config(
            app,
            http="h11",  # which bounds headers
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
        )
        host, port = listening.getsockname()[:2]
        event("serving", url=f"http://{host}:{port}", policies=[*policies], engine=network.engine, pid=os.getpid())
        signal.signal(signal.SIGTERM, _stopped)  # uvicorn raises it again once it has drained, which is no failure
        uvicorn.Server(config).run(sockets=[listening])


def _stopped(*_: object) -> None:
    event("stopped")
