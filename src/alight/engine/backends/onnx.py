"""Stages that onnxruntime runs."""

import importlib
import os
from typing import Any

import numpy as np

from alight.errors import BadFile, BadInput

SPIN = {  # threads of one stage must not keep a core busy while those of the next one work
    "session.force_spinning_stop": "1",
}

TELEMETRY = "ORT_DISABLE_TELEMETRY"  # from 1.29 on it tells its makers of every network, unless this is set before


class Session:
    """One stage: its graph takes what is carried, in order, and gives the logits and what is carried on."""

    def __init__(self, content: bytes, name: str, num_threads: int | None = None) -> None:
        runtime = _onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = available_cores() if num_threads is None else num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors, which are raised as well
        for key, value in SPIN.items():
            options.add_session_config_entry(key, value)
        try:
            self._session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            problem = f"onnxruntime {runtime.__version__} cannot load it ({_first_line(error)})"
            raise BadFile(name, problem, "upgrade onnxruntime, or export it again") from error
        self._name, self._inputs = name, [each.name for each in self._session.get_inputs()]
        self._outputs = [each.name for each in self._session.get_outputs()]

    def __call__(self, carried: tuple[np.ndarray, ...], rows: Any) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Logits of those in these rows, None is everyone, and what is carried on."""
        if rows is not None:
            carried = tuple(each[rows] for each in carried)
        try:
            logits, *others = self._session.run(self._outputs, dict(zip(self._inputs, carried, strict=True)))
        except Exception as error:  # of several types, none of which onnxruntime exports
            raise BadInput(
                f"{self._name} cannot take these {len(carried[0])} samples ({_first_line(error)}): look for indices of"
                " tokens that the network does not know, or for texts that are too long"
            ) from error
        return logits, tuple(others)


def available_cores() -> int:
    """Processors that this process may use."""
    known = getattr(os, "sched_getaffinity", None)
    return len(known(0)) if known else os.cpu_count() or 1


def _onnxruntime() -> Any:
    os.environ.setdefault(TELEMETRY, "1")
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise BadInput('onnxruntime is not installed: pip install "alight[deploy]"') from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
