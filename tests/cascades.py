"""Small networks with their own sizes, normalisations and engines, as one cascade for all tests."""

import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from commands import shared_folder
from onnx import TensorProto, helper
from torch import nn

from alight import Cascade, Costs, HeadOutputs, Member, MultiExitModel, Normalisation, attach_heads, cascade, record

CLASSES = 4
SHARED = Normalisation(mean=(0.5, 0.4, 0.3), std=(0.3, 0.25, 0.2))
BARE = Normalisation(mean=(0.0,) * 3, std=(1.0,) * 3)
COSTS = Costs(stages=[0, 2, 3, 0], heads=[1, 0.5, 0, 20], members=[0, 1, 1, 2])


def convolutions(width: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)).eval()


@cache
def with_an_exit() -> MultiExitModel:
    model = attach_heads(convolutions(6, 1), ["0"], example=torch.zeros(2, 3, 12, 12), normalisation=SHARED)
    with torch.no_grad():
        model.heads[0].linear.weight.mul_(20)
    return model.eval()


def write_onnx(
    path: Path, *, size: int = 8, classes: int = CLASSES, softmax: bool = False, batch: object = "n"
) -> Path:
    """Write a linear network of the mean of each channel, with fixed weights, as people export them."""
    rng = np.random.default_rng(3)
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [3, classes], rng.normal(size=3 * classes) * 4)
    nodes = [
        helper.make_node("GlobalAveragePool", ["pixels"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["scores" if softmax else "logits"]),
    ]
    if softmax:
        nodes.append(helper.make_node("Softmax", ["scores"], ["logits"]))
    given = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [batch, 3, size, size])
    made = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, classes])
    graph = helper.make_graph(nodes, "network", [given], [made], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def write_litert(path: Path, rng: np.random.Generator) -> np.ndarray:
    """Write a network of LiteRT in 8 bits, the softmax of linear values of the mean of each channel; return weights."""
    from ai_edge_litert import schema_py_generated as schema
    from flatbuffers import Builder

    weights = rng.integers(0, 256, (CLASSES, 3), dtype=np.uint8)
    model, graph, names = schema.ModelT(), schema.SubGraphT(), iter("abcdefgh")
    model.version, model.buffers, model.operatorCodes = 3, [schema.BufferT()], []
    graph.tensors, graph.operators = [], []

    def tensor(shape, scale, zero, data=None, kind=schema.TensorType.UINT8):
        made, buffer = schema.TensorT(), schema.BufferT()
        made.quantization = schema.QuantizationParametersT()
        made.quantization.scale, made.quantization.zeroPoint = [scale], [zero]
        made.shape, made.type, made.name, made.buffer = [*shape], kind, next(names), len(model.buffers)
        buffer.data = None if data is None else np.frombuffer(data.tobytes(), np.uint8)
        model.buffers.append(buffer)
        graph.tensors.append(made)
        return len(graph.tensors) - 1

    def operator(name, inputs, outputs, options, **terms):
        code, made = schema.OperatorCodeT(), schema.OperatorT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
        made.opcodeIndex, made.inputs, made.outputs = len(model.operatorCodes), inputs, outputs
        made.builtinOptionsType = getattr(schema.BuiltinOptions, options)
        made.builtinOptions = getattr(schema, f"{options}T")()
        for each, value in terms.items():
            setattr(made.builtinOptions, each, value)
        model.operatorCodes.append(code)
        graph.operators.append(made)

    pixels, pooled = tensor((1, 8, 8, 3), 1 / 255, 0), tensor((1, 1, 1, 3), 1 / 255, 0)
    matrix = tensor(weights.shape, 0.05, 128, weights)
    bias = tensor((CLASSES,), 0.05 / 255, 0, np.zeros(CLASSES, np.int32), schema.TensorType.INT32)
    values, answers = tensor((1, CLASSES), 0.1, 128), tensor((1, CLASSES), 1 / 256, 0)
    window = {"filterHeight": 8, "filterWidth": 8, "strideH": 8, "strideW": 8, "padding": schema.Padding.VALID}
    operator("AVERAGE_POOL_2D", [pixels], [pooled], "Pool2DOptions", **window)
    operator("FULLY_CONNECTED", [pooled, matrix, bias], [values], "FullyConnectedOptions")
    operator("SOFTMAX", [values], [answers], "SoftmaxOptions", beta=1.0)
    graph.inputs, graph.outputs, model.subgraphs = [pixels], [answers], [graph]
    builder = Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return 0.05 * (weights.astype(float) - 128)


@cache
def onnx_file() -> Path:
    def write(folder: Path) -> None:
        write_onnx(folder / "tiny.onnx")

    return shared_folder(Path(os.environ["SESSION_FOLDER"]), "tiny_onnx", write) / "tiny.onnx"


@cache
def chain() -> Cascade:
    """An ONNX file at 8 pixels, a network with an exit at 12, and a large one at 16, each with its own view."""
    large = Member(convolutions(16, 2), "large", image_size=16, normalisation=BARE, bicubic=True)
    small = Member(onnx_file(), "tiny", normalisation=BARE, crop=0.75)
    return cascade([small, Member(with_an_exit(), "middle"), large])


@cache
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (120, 3, 16, 16), dtype=np.uint8)


@cache
def outputs() -> HeadOutputs:
    """What every exit says; labels are what the large network says, but for some."""
    said = record(chain(), pixels(), batch_size=50, progress=False)
    labels = np.where(np.arange(120) % 7 == 0, said.predictions[:, 0], said.predictions[:, -1])
    return HeadOutputs.from_arrays({**said.rows(), **said.metadata(), "labels": labels})


@contextmanager
def remote_model(
    weights: np.ndarray, failures: int = 0, outputs: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list
) -> Iterator[tuple[str, list[int]]]:
    """Serve x @ weights by the Open Inference Protocol; yields the URL and the sizes of batches asked for.

    `outputs` makes of its right outputs those of a model that errs.
    """
    sizes: list[int] = []
    failing = [failures]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, weights.shape[0]]}]
            self.answer(
                {"inputs": inputs, "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, weights.shape[1]]}]}
            )

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"][0]
            if failing[0]:
                failing[0] -= 1
                self.send_error(503)
                return
            rows = np.array(request["data"], np.float32).reshape(request["shape"])
            sizes.append(len(rows))
            right = {"name": "y", "shape": [len(rows), weights.shape[1]], "data": (rows @ weights).ravel().tolist()}
            self.answer({"outputs": outputs([right])})

        def answer(self, content):
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v2/models/linear", sizes
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
