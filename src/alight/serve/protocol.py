"""The V2 inference protocol (KServe, Triton) over REST, with its extensions for binary tensors and repositories.

A model has one input: numbers as the network takes them, pixels (UINT8), image files or texts (BYTES; files in JSON are
base64). Its outputs are `index`, `label`, `exit`, `cost` and `probability` of each sample. Parameters of a request are
`budget`, `deadline_ms` and `binary_data_output`.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from alight import __version__
from alight.errors import AlightError
from alight.serve.hosting import HostedModel, ModelHost, Service, body_of
from alight.serve.model import ServedModel
from alight.serve.reading import OPTION_BYTES, UnreadSamples, count_samples, decode_json
from alight.serve.requests import Limits, PredictOptions, PredictResponse, RequestRefused, error_schemas, parse

LENGTH = "inference-header-content-length"  # bytes of JSON before the binary tensors
DTYPES = {"UINT8": "u1", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4"}
DTYPES |= {"FP64": "<f8", "BOOL": "?"}
MAX_SIZE, MAX_AXES = 2**31, 32  # of a tensor
NUMBERS = re.compile(rb"[-+.0-9eE,\[\]\s]*")
OF_NUMBERS = b"-+.0123456789eE \t\r\n"  # what is left without them is how numbers are nested
OUTPUTS = {"index": "INT64", "label": "BYTES", "exit": "INT64", "cost": "FP64", "probability": "FP64"}
OUTPUTS_BYTES = 100 * len(OUTPUTS)  # of JSON that names them
NOTHING = msgspec.Raw()


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """The description of a tensor; its values are still JSON, or follow the JSON."""

    name: str
    shape: msgspec.Raw
    datatype: str
    data: msgspec.Raw = NOTHING
    parameters: msgspec.Raw = NOTHING


class InferenceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request of the protocol, whose values are still JSON."""

    inputs: tuple[InputTensor]  # one, so that nothing is built of more
    id: str = ""
    parameters: msgspec.Raw = NOTHING
    outputs: msgspec.Raw = NOTHING


class Parameters(msgspec.Struct, forbid_unknown_fields=True):
    """What a request may say beside its tensors."""

    budget: float | str | None = None
    deadline_ms: float | None = None
    binary_data_output: bool = False


class InputParameters(msgspec.Struct, forbid_unknown_fields=True):
    """What may be said of an input."""

    binary_data_size: int | None = None


class OutputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What may be said of an output."""

    binary_data: bool | None = None


class RequestedOutput(msgspec.Struct, forbid_unknown_fields=True):
    """An output that a request asks for."""

    name: str
    parameters: OutputParameters = OutputParameters()


def add_inference_protocol(app: FastAPI, service: Service) -> None:
    """Add the paths of the protocol to an application."""
    host = service.host

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """Return what the server is."""
        return {"name": "alight", "version": __version__, "extensions": ["binary_tensor_data", "model_repository"]}

    @app.get("/v2/health/live")
    async def live() -> Response:
        """Return whether the process should stay alive."""
        return _health(not any(worker.stalled for worker in host.workers))

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        """Return whether requests should be sent here."""
        return _health(host.ready)

    @app.get("/v2/models/{name}", responses=error_schemas(401, 403, 404))
    @app.get("/v2/models/{name}/versions/{version}", responses=error_schemas(401, 403, 404))
    async def metadata(name: str, version: str | None = None) -> dict[str, Any]:
        """Return what a model takes and gives."""
        return _metadata(host.find(name, version), [*host.models[name]])

    @app.get("/v2/models/{name}/ready", responses=error_schemas(401, 403, 404))
    @app.get("/v2/models/{name}/versions/{version}/ready", responses=error_schemas(401, 403, 404))
    async def model_ready(name: str, version: str | None = None) -> Response:
        """Return whether a model answers requests."""
        return _health(host.find(name, version).worker.ready)

    @app.post("/v2/models/{name}/infer", responses=error_schemas())
    @app.post("/v2/models/{name}/versions/{version}/infer", responses=error_schemas())
    async def infer(request: Request, name: str, version: str | None = None) -> Response:
        """Answer the samples of one tensor."""
        hosted = host.find(name, version)
        content = await body_of(request)
        async with service.in_time(request) as until:
            header = _header_length(request, len(content))
            arguments = open_inference, content, header, hosted.worker.model, host.limits
            own_id, given, wanted, unread = await service.counted(len(content), until, *arguments)
            response = await service.answer(request, hosted, unread, parse(PredictOptions, given))
        return inference_response(hosted, own_id, response, wanted)

    @app.post("/v2/repository/index", responses=error_schemas(401, 403))
    async def index() -> list[dict[str, str]]:
        """Return all models and versions."""
        states = {True: "READY", False: "UNAVAILABLE"}
        return [
            {"name": name, "version": version, "state": states[hosted.worker.ready]}
            for name, versions in host.models.items()
            for version, hosted in versions.items()
        ]

    @app.post("/v2/repository/models/{name}/load", responses=error_schemas(401, 403, 404, 422))
    async def load(name: str) -> dict[str, list[str]]:
        """Load everything that has changed on disk, also models that are new; as SIGHUP does."""
        return {"changed": await run_sync(_reload, host, name)}


def _reload(host: ModelHost, name: str) -> list[str]:
    """Load what has changed and return the names of it; a model that was not there, and is not now, is refused."""
    try:
        changed = host.reload()
    except (AlightError, OSError, ValueError) as error:
        raise RequestRefused(422, f"not loaded, and what was served still is: {error}") from error
    if name not in {each.rpartition(":")[0] for each in changed}:
        host.find(name)
    return changed


def _health(good: bool) -> Response:
    return JSONResponse({"state": "ready" if good else "not ready"}, 200 if good else 503)


def _header_length(request: Request, size: int) -> int:
    """Return how many bytes of the body are JSON."""
    text = request.headers.get(LENGTH)
    if text is None:
        return size
    if not text.isdecimal() or len(text) > 20 or int(text) > size:
        raise RequestRefused(400, f"a body of {size} bytes with {text[:20]} bytes of JSON: mend {LENGTH}")
    return int(text)


def open_inference(
    content: bytearray, header: int, model: ServedModel, limits: Limits
) -> tuple[str, dict[str, Any], dict[str, bool], UnreadSamples]:
    """Return the id of a request, what it may spend, its outputs (binary or not), and its samples, counted."""
    request = decode_json(memoryview(content)[:header], InferenceRequest)
    (tensor,) = request.inputs
    parameters = _small(request.parameters, Parameters, Parameters())
    wanted = _wanted(_small(request.outputs, list[RequestedOutput], [], OUTPUTS_BYTES), parameters.binary_data_output)
    shape = _small(tensor.shape, list[int], [])
    if not 0 < len(shape) <= MAX_AXES or min(shape) < 1 or max(shape) > MAX_SIZE or shape[0] > limits.batch:
        raise RequestRefused(413, f"a tensor of shape {shape}: send 1 to {limits.batch} samples along the first axis")
    binary = _binary_values(tensor, memoryview(content)[header:])
    if tensor.datatype == "BYTES":
        kind = "texts" if model.tokenize else "images"
        values: Any = _strings(tensor, binary, math.prod(shape), text=kind == "texts")
        if len(values) > shape[0]:
            raise RequestRefused(422, f"a tensor of BYTES of shape {shape}: send one element for each sample")
    else:
        kind, values = "arrays", _numbers(tensor, binary, shape)
    options = {"budget": parameters.budget, "deadline_ms": parameters.deadline_ms}
    return request.id, options, wanted, count_samples(kind, values, model, limits)


def _binary_values(tensor: InputTensor, behind: memoryview) -> memoryview | None:
    """Return the values of a tensor that follow the JSON, None if they are in it."""
    size = _small(tensor.parameters, InputParameters, InputParameters()).binary_data_size
    if len(behind) != (size or 0):
        raise RequestRefused(422, f"{len(behind)} bytes after the JSON, and binary_data_size {size}: send as many")
    if size is not None and bytes(tensor.data):
        raise RequestRefused(422, "data in the JSON and after it: send the values once")
    return None if size is None else behind


def _wanted(outputs: Sequence[RequestedOutput], binary: bool) -> dict[str, bool]:
    """Return the outputs of an answer, all if none is named, and whether each is binary."""
    if unknown := [output.name for output in outputs if output.name not in OUTPUTS]:
        raise RequestRefused(422, f"there is no output {unknown[0][:100]!r}: ask for some of {', '.join(OUTPUTS)}")
    said = {output.name: output.parameters.binary_data for output in outputs} or dict.fromkeys(OUTPUTS)
    return {name: binary if each is None else each for name, each in said.items()}


def _small(raw: msgspec.Raw, kind: Any, default: Any, most: int = OPTION_BYTES) -> Any:
    """Return a value that is short in JSON."""
    text = bytes(raw)
    if len(text) > most:
        raise RequestRefused(422, f"{len(text):,} bytes where {most} are enough: send less")
    return decode_json(text, kind) if text else default


def _strings(tensor: InputTensor, binary: memoryview | None, count: int, *, text: bool) -> list[Any]:
    """Return the elements of a tensor of BYTES: of JSON strings, of binary data bytes, or texts."""
    if binary is None:
        data = bytes(tensor.data)
        if data.count(b'"') - data.count(rb"\"") > 2 * count:
            raise RequestRefused(422, f"more than the {count} elements that the shape says")
        elements: list[Any] = decode_json(data, list[str])
    else:
        elements, place = [], 0
        while place < len(binary) and len(elements) <= count:
            (size,) = struct.unpack_from("<I", binary, place) if place + 4 <= len(binary) else (len(binary),)
            elements.append(bytes(binary[place + 4 : place + 4 + size]))
            place += 4 + size
        if place != len(binary):
            raise RequestRefused(422, "elements of BYTES do not end where the data ends: send a length before each")
        if text:
            try:
                elements = [each.decode() for each in elements]
            except UnicodeDecodeError as error:
                raise RequestRefused(422, f"a text that is not UTF-8 ({error})") from error
    if len(elements) != count:
        raise RequestRefused(422, f"{len(elements)} elements, and the shape says {count}")
    return elements


def _numbers(tensor: InputTensor, binary: memoryview | None, shape: Sequence[int]) -> np.ndarray:
    """Return the numbers of a tensor, of JSON or of binary data, as one array."""
    if tensor.datatype not in DTYPES:
        raise RequestRefused(422, f"a tensor of {tensor.datatype[:20]!r}: send BYTES, {', '.join(DTYPES)}")
    dtype, total = np.dtype(DTYPES[tensor.datatype]), math.prod(shape)
    if binary is not None:
        if total * dtype.itemsize != len(binary):
            raise RequestRefused(422, f"{len(binary)} bytes for {total} numbers of {dtype.itemsize} bytes")
        return np.frombuffer(binary, dtype).reshape(shape)
    data = bytes(tensor.data)
    if not NUMBERS.fullmatch(data):
        raise RequestRefused(422, "data that is not an array of numbers")
    nesting = data.translate(None, OF_NUMBERS)
    if (found := nesting.count(b",") + 1 if re.search(rb"\d", data) else 0) != total:
        raise RequestRefused(422, f"{found} numbers, and the shape {list(shape)} says {total}")
    if nesting not in (_nesting([total]), _nesting(shape)):
        raise RequestRefused(422, f"numbers not nested as the shape {list(shape)} says: send them as one list")
    numbers = np.fromstring(data.translate(None, b"[] \t\r\n").decode(), sep=",")
    with np.errstate(invalid="ignore", over="ignore"):
        values = numbers.astype(dtype)
    if dtype.kind != "f" and (changed := numbers[values != numbers]).size:
        raise RequestRefused(422, f"a tensor of {tensor.datatype} with the number {changed[0]:g}: send FP32")
    return values.reshape(shape)


def _nesting(shape: Sequence[int]) -> bytes:
    """Return the brackets and commas of an array of this shape in JSON.

    >>> _nesting([2, 3])
    b'[[,,],[,,]]'
    """
    inner = b""
    for size in reversed(shape):
        inner = b"[" + b",".join([inner] * size) + b"]"
    return inner


def _metadata(hosted: HostedModel, versions: list[str]) -> dict[str, Any]:
    model = hosted.worker.model
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    if model.tokenize:
        inputs = [{"name": "texts", "datatype": "BYTES", "shape": [-1]}]
    else:
        (tensor,) = model.spec.tensors
        inputs = [{"name": tensor.name, "datatype": names[np.dtype(tensor.dtype)], "shape": [-1, *model.shape]}]
    outputs = [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in OUTPUTS.items()]
    platform = {"name": hosted.source.name, "versions": versions, "platform": model.engine}
    return {**platform, "inputs": inputs, "outputs": outputs}


def inference_response(
    hosted: HostedModel, own_id: str, answer: PredictResponse, wanted: Mapping[str, bool]
) -> Response:
    """Return the answer as the protocol writes it, its tensors as JSON or behind it."""
    columns = {name: [getattr(each, name) for each in answer.predictions] for name in wanted}
    if None in columns.get("probability", ()):
        del columns["probability"]
    outputs, tail = [], b""
    for name, values in columns.items():
        output: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": [len(values)]}
        if name == "label":
            values = [*map(str, values)]
        if wanted[name]:
            content = _binary(values, OUTPUTS[name])
            output["parameters"] = {"binary_data_size": len(content)}
            tail += content
        else:
            output["data"] = values
        outputs.append(output)
    said = answer.model_dump(exclude={"predictions"})
    source = hosted.source
    document: dict[str, Any] = {"model_name": source.name, "model_version": source.version, "outputs": outputs}
    document |= {"parameters": said} | ({"id": own_id} if own_id else {})
    head = msgspec.json.encode(document)
    if not tail:
        return Response(head, media_type="application/json")
    return Response(head + tail, media_type="application/octet-stream", headers={LENGTH: str(len(head))})


def _binary(values: Sequence[Any], datatype: str) -> bytes:
    if datatype != "BYTES":
        return np.array(values, DTYPES[datatype]).tobytes()
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)
