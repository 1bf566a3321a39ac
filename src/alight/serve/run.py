"""The service as a process: its network is loaded and timed, it serves, and it drains before it stops."""

import logging
import os
import signal
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from alight.policies.paced import Paced
from alight.serve.app import create_app
from alight.serve.ledger import RESERVE, SpendLedger, resume_state
from alight.serve.model import ServedModel, measure_timings
from alight.serve.monitoring import Metrics, log_as_json, log_event
from alight.serve.requests import Limits
from alight.serve.worker import BatchWorker

GRACE = 30  # seconds for requests under way, once the service is to stop
KEEP_ALIVE = 75  # seconds that an idle connection lasts: longer than load balancers keep theirs, which is 60 mostly


def bind(host: str, port: int) -> socket.socket:
    """Return a socket with the address, which does not listen yet."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        error.filename = f"{host}:{port}"
        raise
    return bound


def build_app(model: ServedModel, state: Path | None, limits: Limits, token: str | None = None) -> FastAPI:
    """Return the application of a network: its stream is resumed and its exits are timed."""
    ledger = SpendLedger(resume_state(state, model.policies), state, max(RESERVE, 4 * limits.batch))
    timings = measure_timings(model, limits.batch)
    for name, policy in model.policies.items():
        if not isinstance(policy, Paced):
            log_event("no guarantee for the stream", logging.WARNING, policy=name, advice="calibrate --contract stream")
    return create_app(BatchWorker(model, ledger, timings, limits, Metrics(model.exits)), token)


def serve(
    load: Callable[[], ServedModel],
    limits: Limits,
    *,
    host: str,
    port: int,
    state: Path | None = None,
    token: str | None = None,
    log_level: str = "info",
) -> None:
    """Serve until SIGTERM or SIGINT, then answer requests under way and write the final state.

    `load` loads the network, once the address is found to be free.
    """
    log_as_json(log_level)
    warnings.filterwarnings("ignore", module="PIL")  # about images that are refused anyway
    with bind(host, port) as listening:
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
        url = "http://{}:{}".format(*listening.getsockname())
        log_event("serving", url=url, policies=[*model.predictors], engine=model.engine, pid=os.getpid())
        # uvicorn raises SIGTERM again once it has drained, which is not a failure
        signal.signal(signal.SIGTERM, lambda *_: log_event("stopped"))
        uvicorn.Server(config).run(sockets=[listening])
