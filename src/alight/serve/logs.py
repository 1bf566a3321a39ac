"""Logs as one JSON object per line on stderr."""

import json
import logging
import time
from typing import Any

LOGGER = logging.getLogger("alight.serve")
OTHERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "fastapi", "python_multipart", "PIL")


def event(name: str, level: int = logging.INFO, **values: Any) -> None:
    """Log an event by its name, with values."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, name, extra={"values": values})


class Lines(logging.Formatter):
    """A record as one line of JSON.

    >>> record = logging.LogRecord("alight.serve", logging.INFO, "", 0, "drained", (), None)
    >>> json.loads(Lines().format(record))["event"]
    'drained'
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.name != LOGGER.name:
            line["logger"] = record.name
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_in_lines(level: str) -> None:
    """Let everything that this process logs be such lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    for name in (LOGGER.name, *OTHERS):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == LOGGER.name else logging.ERROR)
