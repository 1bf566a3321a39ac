"""The service as a process: its network is loaded and timed, it serves, and it drains before it stops."""

import os
import signal
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import uvicorn

from alight.serve.app import build_app
from alight.serve.model import ServedModel
from alight.serve.monitoring import log_as_json, log_event
from alight.serve.requests import Limits

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
