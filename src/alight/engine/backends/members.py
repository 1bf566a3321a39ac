"""What other systems run: an ONNX file, a LiteRT file, a model behind HTTP; or have run: logits.

Each network is a backend of one stage, arrays in and logits out, which a cascade runs as it does networks of PyTorch.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from alight.data.preprocess import InputSpec, TensorSpec
from alight.data.tokens import library
from alight.engine.backends import HeadValues, Reads, State, score_one, score_rows
from alight.engine.backends.onnx import OnnxBackend, Session, available_cores
from alight.engine.manifest import checksum
from alight.errors import BadFile, BadInput, Unreachable
from alight.files import PathLike
from alight.scores import are_probabilities

Stage = Callable[[State], tuple[np.ndarray, State]]

SMALLEST = 1e-9  # probability: in 8 bits many are 0, and of a thousand small ones all
ROUNDING = 1e-2  # by which probabilities in few bits may leave 0 to 1
PROBES, PROBED_SIZE = 16, 32  # random inputs that tell probabilities from logits, and a free size of theirs
SOFTMAX = ((1 / 256, 0), (1 / 256, -128))  # scale and zero of a softmax that is quantised to 8 bits, as TFLite fixes it
ATTEMPTS, PAUSE, TIMEOUT = 2, 0.1, 10.0  # of a call over HTTP, and seconds
DATATYPES = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "INT8": "int8", "UINT8": "uint8"}
DATATYPES |= {"INT32": "int32", "INT64": "int64", "BOOL": "bool"}  # of the Open Inference Protocol, V2
ELEMENTS = {"float": "float32", "double": "float64"}  # of ONNX, where the names differ from those of NumPy


class OneStage(OnnxBackend):
    """A network without exits, of which a function gives the logits.

    >>> spec = InputSpec((TensorSpec("rows", (None, 2), "float32"),), num_classes=3)
    >>> network = OneStage("own", lambda state: (state[0] @ np.ones((2, 3), np.float32), ()), spec, "0")
    >>> network.run(0, network.admit((np.zeros((4, 2)),)))[0].predictions
    array([0, 0, 0, 0])
    """

    def __init__(self, name: str, stage: Stage, inputs: InputSpec, fingerprint: str) -> None:
        self.name, self.inputs, self.fingerprint, self.stages = name, inputs, fingerprint, [stage]
        self.exits, self.open_exits, self.reads, self.threads = ("end",), (0,), [Reads(())], None


@dataclass(frozen=True)
class Outputs:
    """How what a network gives becomes logits of the classes that count."""

    skip_classes: int = 0  # before the first that counts, such as a background that other networks do not have
    probabilities: bool | None = None  # instead of logits; None: find out
    image_size: int | None = None  # of images, where the network does not say
    normalised: bool = False  # does a quantised network get images normalised, which are then quantised, or bytes?

    def of(self, name: str, stage: Stage, inputs: InputSpec, known: bool | None = None) -> Stage:
        """Return a stage that gives logits; `known` says whether its outputs are probabilities, None is unknown."""
        known = known if self.probabilities is None else self.probabilities
        probabilities = self._gives_probabilities(name, stage, inputs) if known is None else known

        def logits(state: State) -> tuple[np.ndarray, State]:
            given, state_after = stage(state)
            self._check(name, given, len(state[0]), inputs.num_classes)
            if probabilities and (np.abs(given - 0.5) > 0.5 + ROUNDING).any():
                raise BadInput(
                    f"{name} gives numbers from {given.min():g} to {given.max():g}, which are not probabilities: let"
                    " its member say probabilities=False"
                )
            values = np.log(np.maximum(given, SMALLEST)) if probabilities else given
            return values[:, self.skip_classes :], state_after

        return logits

    def _gives_probabilities(self, name: str, stage: Stage, inputs: InputSpec) -> bool:
        """Return whether random inputs all give probabilities."""
        rng = np.random.default_rng(0)
        drawn = []
        for each in inputs.tensors:
            shape = (PROBES, *(size or self.image_size or PROBED_SIZE for size in each.shape[1:]))
            floats = "float" in each.dtype
            drawn.append((rng.normal(size=shape) if floats else rng.integers(0, 2, shape)).astype(each.dtype))
        try:
            given = stage(tuple(drawn))[0]
        except BadInput as error:
            raise BadInput(
                f"{name} takes no random inputs of {', '.join(str(each.shape) for each in drawn)}, which would tell"
                " whether it gives probabilities: say so, Member(network, probabilities=False), or its image_size"
            ) from error
        self._check(name, given, PROBES, inputs.num_classes)
        return are_probabilities(given)

    def _check(self, name: str, given: np.ndarray, samples: int, classes: int | None) -> None:
        """Check that there is a number for each sample and class; `classes` is how many count, None where unknown."""
        found = given.shape[1] - self.skip_classes if given.ndim == 2 and len(given) == samples else 0
        if found < 2 or found != (classes or found):
            raise BadInput(
                f"{name} gives numbers of shape {given.shape} for {samples} samples, not one for each of"
                f" {max(classes or 2, 2) + self.skip_classes}{'' if classes else ' or more'} classes: let its first"
                " output be logits or probabilities of all classes, two of a yes or no"
            )


def onnx_member(path: PathLike, threads: int | None = None, outputs: Outputs = Outputs()) -> OneStage:
    """Return the network of an ONNX file, whose first output is its logits or probabilities."""
    content = Path(path).read_bytes()
    session = Session(content, str(path), threads)
    described, classes = session._session.get_inputs(), session._session.get_outputs()[0].shape[-1]
    kinds = [each.type.removeprefix("tensor(").removesuffix(")") for each in described]
    inputs = tuple(
        TensorSpec(each.name, (None, *map(_size, each.shape[1:])), ELEMENTS.get(kind, kind))
        for each, kind in zip(described, kinds, strict=True)
    )
    fixed = {size for each in described if (size := _size(each.shape[0])) is not None}
    if fixed - {1}:
        raise BadFile(path, f"it takes batches of {max(fixed)} alone", "export it with a free batch size, or one of 1")
    count = classes - outputs.skip_classes if isinstance(classes, int) else None
    spec = InputSpec(inputs, tuple(each.name for each in inputs) if len(inputs) > 1 else (), num_classes=count)
    stage: Stage = _one_by_one(session) if fixed else lambda state: (session(state)[0], ())
    return OneStage("onnxruntime", outputs.of(Path(path).name, stage, spec), spec, checksum(content))


def _size(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _one_by_one(stage: Stage) -> Stage:
    """Return a stage for any number of samples of one that takes one at a time."""

    def run(state: State) -> tuple[np.ndarray, State]:
        rows = [stage(tuple(each[row : row + 1] for each in state))[0] for row in range(len(state[0]))]
        return np.concatenate(rows), ()

    return run


def litert_member(path: PathLike, threads: int | None = None, outputs: Outputs = Outputs()) -> OneStage:
    """Return the network of a LiteRT (TFLite) file: images channels first, bytes where it is quantised.

    A quantised network whose images are `normalised` gets these in its own 8 bits.
    """
    content = Path(path).read_bytes()
    network = LiteRT(content, str(path), threads, outputs.normalised)
    spec = replace(network.spec, num_classes=network.classes - outputs.skip_classes)
    return OneStage(
        "LiteRT", outputs.of(Path(path).name, network, spec, network.gives_probabilities), spec, checksum(content)
    )


class LiteRT:
    """An interpreter of LiteRT. It runs one sample at a time: its threads share each, so that batches gain nothing."""

    def __init__(self, content: bytes, name: str, threads: int | None = None, normalised: bool = False) -> None:
        interpreter = library("ai_edge_litert.interpreter", '"alight[litert]"').Interpreter
        try:
            self._interpreter = interpreter(model_content=content, num_threads=threads or available_cores())
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise BadFile(name, f"LiteRT cannot load it ({error})", "give a .tflite file") from error
        inputs, self._output = self._interpreter.get_input_details(), self._interpreter.get_output_details()[0]
        if len(inputs) != 1 or inputs[0]["shape"][0] != 1:
            raise BadFile(name, f"it takes {len(inputs)} inputs", "give a network of one input and batches of one")
        self._input, self._lock = inputs[0], Lock()  # an interpreter is for one thread at a time
        self.classes = int(self._output["shape"][-1])
        sizes = [int(size) for size in self._input["shape"][1:]]
        self._is_image, dtype = len(sizes) == 3, np.dtype(self._input["dtype"])
        shape = (None, sizes[2], *sizes[:2]) if self._is_image else (None, *sizes)
        bytes_or_floats = "float32" if normalised and self._input["quantization"][0] else "uint8"
        self.spec = InputSpec((TensorSpec("images", shape, bytes_or_floats if dtype.itemsize == 1 else dtype.name),))

    @property
    def gives_probabilities(self) -> bool | None:
        """Whether its outputs are those of a softmax, as their quantisation says; None where they are floats."""
        scale, zero = self._output["quantization"]
        return (scale, zero) in SOFTMAX if scale else None

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        """Return what it gives, as floats."""
        samples = state[0].transpose(0, 2, 3, 1) if self._is_image else state[0]
        (scale, zero), kind = self._input["quantization"], self._input["dtype"]
        if kind in (np.int8, np.uint8) and samples.dtype.kind == "f":
            info = np.iinfo(kind)
            samples = np.clip(np.rint(samples / scale) + zero, info.min, info.max).astype(kind)
        elif kind == np.int8:
            samples = (samples.astype(np.int16) - 128).astype(np.int8)  # the same bytes, counted from -128
        rows = []
        with self._lock:
            for sample in samples:
                self._interpreter.set_tensor(self._input["index"], np.ascontiguousarray(sample[None]))
                self._interpreter.invoke()
                rows.append(self._interpreter.get_tensor(self._output["index"])[0])
        scale, zero = self._output["quantization"]
        values = np.stack(rows).astype(np.float32)
        return (values - zero) * scale if scale else values, ()


def remote_member(url: str, token_variable: str | None = None, outputs: Outputs = Outputs()) -> OneStage:
    """Return a model behind HTTP that speaks the Open Inference Protocol (KServe, V2): URL/v2/models/NAME.

    `token_variable` names the variable of the environment that holds a bearer token, where one is asked for.
    """
    remote = Remote(url.rstrip("/"), token_variable)
    described = remote.answer("")
    try:
        remote.inputs = inputs = tuple(_tensor(each) for each in described["inputs"])
        remote.output, shape = str(described["outputs"][0]["name"]), described["outputs"][0]["shape"]
        classes = int(shape[-1]) if len(shape) > 1 else 1
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadInput(f"{url} does not describe its inputs and outputs ({error}): give URL/v2/models/NAME") from error
    if classes in (0, 1):
        raise BadInput(
            f"{url} gives {remote.output!r} of shape {shape}, not a number for every class: let its first output be"
            " logits or probabilities"
        )
    remote.finds_probabilities = outputs.probabilities is None
    names = tuple(each.name for each in inputs) if len(inputs) > 1 else ()
    spec = InputSpec(inputs, names, num_classes=classes - outputs.skip_classes if classes > 0 else None)
    own = checksum(json.dumps(described, sort_keys=True).encode())
    return OneStage("HTTP", outputs.of(url, remote, spec, known=False), spec, own)  # finding out would be paid for


def _tensor(described: Mapping[str, Any]) -> TensorSpec:
    sizes = (None if size < 0 else int(size) for size in described["shape"][1:])
    return TensorSpec(str(described["name"]), (None, *sizes), DATATYPES[described["datatype"]])


class Remote:
    """Calls of a model over HTTP: arrays as JSON, tried again once where the connection or the server fails."""

    inputs: Sequence[TensorSpec] = ()
    output = ""  # its name
    finds_probabilities = False  # in the answers themselves, where nothing says what they are

    def __init__(self, url: str, token_variable: str | None) -> None:
        self.url, self.token_variable = url, token_variable

    def answer(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON that a request is answered with."""
        headers = {"Content-Type": "application/json"}
        if self.token_variable:
            headers["Authorization"] = f"Bearer {os.environ.get(self.token_variable, '')}"
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, headers)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                    return json.load(response)
            except (OSError, ValueError) as error:  # connections, statuses, and JSON that is none
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if attempt == ATTEMPTS or refused:
                    raise Unreachable(f"{self.url} gave no answer ({error}): is it running?") from error
                time.sleep(PAUSE)
        raise AssertionError

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        kinds = {name: kind for kind, name in DATATYPES.items()}
        tensors = [
            {"name": own.name, "shape": [*each.shape], "datatype": kinds[own.dtype], "data": each.ravel().tolist()}
            for own, each in zip(self.inputs, state, strict=True)
        ]
        answer = self.answer("/infer", {"inputs": tensors, "outputs": [{"name": self.output}]})
        try:
            output = next(each for each in answer["outputs"] if each["name"] == self.output)
            shape = output.get("shape") or [len(state[0]), -1]
            given = np.array(output["data"], np.float64).reshape(shape)
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise Unreachable(
                f"{self.url} gave no {self.output!r} of numbers ({error!r}): look at its answers"
            ) from error
        if self.finds_probabilities and len(given) >= PROBES and given.ndim == 2 and are_probabilities(given):
            raise BadInput(f"{self.url} gives probabilities, not logits: say so, Member(url, probabilities=True)")
        return given, ()


class LogitsBackend(OnnxBackend):
    """The logits of every exit as input, (samples, exits, classes).

    >>> import numpy as np
    >>> from alight import Predictor, Threshold
    >>> policy = Threshold(thresholds=(0.5,), costs=(1.0, 3.0))
    >>> logits = np.array([[[0.0, 9.0], [9.0, 0.0]], [[0.0, 0.1], [9.0, 0.0]]])
    >>> decisions = Predictor(LogitsBackend(("first", "end"), policy.open_exits), policy)(logits)
    >>> decisions.predictions, decisions.exits
    (array([1, 0]), array([0, 1]))
    """

    name = "recorded logits"

    def __init__(
        self, exits: Sequence[str], open_exits: Sequence[int], classes: int | None = None, fingerprint: str = ""
    ) -> None:
        self.exits, self.open_exits, self.fingerprint = tuple(exits), tuple(open_exits), fingerprint
        self.inputs = InputSpec((TensorSpec("logits", (None, len(self.exits), classes), "float64"),))
        self.reads = [Reads(())] * len(self.open_exits)  # until a policy asks for more

    def run(self, stage: int, state: State) -> tuple[HeadValues, State]:
        return score_rows(state[0][:, self.open_exits[stage]], self.reads[stage]), state

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        return score_one(state[0][:, self.open_exits[stage]], self.reads[stage]), state

    def owns(self, made: State, given: State) -> bool:
        return False  # they are the caller's
