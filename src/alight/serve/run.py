"""The service as a process: its network is loaded and timed, it serves, and it drains before it stops."""

import logging
import os
import signal
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI
from PIL import Image

from alight.errors import BadInput
from alight.policies import load_policy
from alight.policies.paced import Paced
from alight.policies.policy import Policy
from alight.serve.app import create_app
from alight.serve.ledger import RESERVE, SpendLedger, resume_state
from alight.serve.model import Sample, ServedModel, check_policies, measure_timings
from alight.serve.monitoring import Metrics, log_as_json, log_event
from alight.serve.schemas import Limits
from alight.serve.worker import BatchWorker

GRACE = 30  # seconds for requests under way, once the service is to stop
KEEP_ALIVE = 75  # seconds that an idle connection lasts: longer than load balancers keep theirs, which is 60 mostly


@dataclass(frozen=True)
class Address:
    """Where the service listens."""

    host: str = "127.0.0.1"
    port: int = 8000


def load_policies(paths: list[Path]) -> dict[str, Policy]:
    """Load the policies of these files by their names, without .json."""
    policies = {path.stem: load_policy(path) for path in paths}
    if len(policies) < len(paths):
        raise BadInput(f"{len(paths)} policies have {len(policies)} names: give each file a name of its own")
    check_policies(policies)
    return policies


def bind(address: Address) -> socket.socket:
    """Return a socket with the address, which does not listen yet."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address.host, address.port))
    except OSError as error:
        bound.close()
        error.filename = f"{address.host}:{address.port}"
        raise
    return bound


def build_app(model: ServedModel, state: Path | None, limits: Limits, token: str | None = None) -> FastAPI:
    """Return the application of a network: its stream is resumed and its exits are timed."""
    ledger = SpendLedger(resume_state(state, model.policies), state, max(RESERVE, 4 * limits.batch))
    timings = measure_timings(model, example(model), limits.batch)
    for name, policy in model.policies.items():
        if not isinstance(policy, Paced):
            log_event("no guarantee for the stream", logging.WARNING, policy=name, advice="calibrate --contract stream")
    return create_app(BatchWorker(model, ledger, timings, limits, Metrics(model.exits)), token)


def example(model: ServedModel) -> Sample:
    """Return a sample such as the network takes, to warm up with."""
    if model.tokenize:
        return "a few words to begin with, about as many as people write when they ask for something"
    if model.image_shape:
        _, height, width = model.image_shape
        return model.preprocess(Image.new("RGB", (width, height), (128, 128, 128)))
    if not model.shape or None in model.shape:
        raise BadInput("the network does not say what it takes: build it with attach_heads, which keeps an example")
    sizes = [int(size or 0) for size in model.shape]
    return np.zeros((1, *sizes), dtype=model.dtype)


def serve(
    load: Callable[[], ServedModel],
    address: Address,
    limits: Limits,
    *,
    state: Path | None = None,
    token: str | None = None,
    log_level: str = "info",
) -> None:
    """Serve until SIGTERM or SIGINT, then answer requests under way and write the final state.

    `load` loads the network, once the address is found to be free.
    """
    log_as_json(log_level)
    warnings.filterwarnings("ignore", module="PIL")  # about images that are refused anyway
    with bind(address) as listening:
        model = load()
        config = uvicorn.Config(
            build_app(model, state, limits, token),
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
        log_event(
            "serving", url=f"http://{host}:{port}", policies=[*model.predictors], engine=model.engine, pid=os.getpid()
        )
        signal.signal(signal.SIGTERM, _stopped)  # uvicorn raises it again once it has drained, which is not a failure
        uvicorn.Server(config).run(sockets=[listening])


def _stopped(*_: object) -> None:
    log_event("stopped")
