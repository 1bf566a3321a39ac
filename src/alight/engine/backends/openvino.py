"""Stages that OpenVINO runs, on NumPy arrays."""

import io
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from threading import local
from typing import Any, NamedTuple, Self

import numpy as np

from alight.data.preprocess import TensorSpec
from alight.data.tokens import library
from alight.engine.backends import HeadValues, Reads, State, score_one
from alight.engine.backends.onnx import OnnxBackend, available_cores, check_whole, first_line, refusal
from alight.engine.manifest import BFLOAT16, GAPS, INT8, SMALL_GAP, Manifest, relative_gap, verified
from alight.errors import BadFile, BadInput

PRECISION = "INFERENCE_PRECISION_HINT"  # else it takes bf16 for float32 on processors that have it
SNIPPETS = "SNIPPETS_MODE"  # kernels made for fixed sizes: they round pixels to other bytes than those for any size do
PLAIN = {"PERFORMANCE_HINT": "LATENCY", PRECISION: "f32"}
QUANTISED = {SNIPPETS: "DISABLE"}
SUMS = ("ReduceMean", "ReduceSum")
IMAGES = 4  # axes
TO_LAST, TO_FIRST = np.array([0, 2, 3, 1]), np.array([0, 3, 1, 2])  # channels
CONVOLUTIONAL = ("Convolution", "GroupConvolution", "ConvolutionBackpropData", "AvgPool", "MaxPool")  # give images
ELEMENTWISE = (
    *("Add", "Clamp", "Concat", "Convert", "Divide", "Elu", "Erf", "FakeQuantize", "Gelu", "HSigmoid", "HSwish"),
    *("Maximum", "Minimum", "Mish", "Multiply", "Power", "PRelu", "Relu", "Sigmoid", "SoftPlus", "Subtract", "Swish"),
    "Tanh",
)


class OpenVinoBackend(OnnxBackend):
    """The ONNX stages of an exported folder, run by OpenVINO: with bf16 arithmetic, where the folder says so."""

    name = "OpenVINO"
    _limits: Any = None  # thresholds, where single samples run ahead

    def _load(self, folder: Path, manifest: Manifest) -> list[Any]:
        if self.settings.providers:
            raise BadInput("providers are those of ONNX Runtime: leave them out, or choose runtime='onnxruntime'")
        config, core = {**PLAIN, "INFERENCE_NUM_THREADS": self.settings.threads or available_cores()}, _core()
        if manifest.precision == BFLOAT16:
            if "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
                raise BadInput(f"{folder} computes in bf16, which this processor has not: export it as int8 or float32")
            config[PRECISION] = "bf16"
        if manifest.precision == INT8:
            config |= QUANTISED
        stages: list[Compiled] = []
        given, turned = [each.name for each in manifest.inputs], frozenset[str]()
        for stage in manifest.stages:
            content, name = verified(folder, stage.file, stage.checksum), f"{folder / stage.file}"
            stages.append(Compiled(core, content, name, config, given, stage.carries, turned, self.batch_size))
            given, turned = [each.name for each in stage.carries], stages[-1].turned
        self._joined = JoinedStages(core, stages, config, GAPS.get(manifest.precision, SMALL_GAP))
        return stages

    def with_reads(self, reads: Sequence[Reads]) -> Self:
        other = super().with_reads(reads)
        other._limits = None
        return other

    def expect(self, thresholds: Sequence[float]) -> None:
        """Let single samples run ahead to the first exit where their score reaches its threshold."""
        if len(thresholds) and self.reads[0].columns[0] in SCORES:
            self._limits = _limits_of(thresholds)

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        if stage == 0 and self._limits is not None:
            passed = self._joined(state, self._limits, self.reads[0].columns[0])
            state = state if passed is None else (passed,)
        if not isinstance(state[0], PassedExits):
            return super().run_one(stage, state)
        inputs, logits = state[0]
        if stage < len(logits):
            return score_one(logits[stage].data, self.reads[stage]), state
        for each in self.stages[:stage]:  # it was expected to leave, and stays
            inputs = each.run_one(inputs)[1]
        return super().run_one(stage, inputs)


def quantised_stage(content: bytes, name: str, takes: Sequence[str]) -> "Compiled":
    """Return a stage of int8 as a folder of them runs it, on one thread, but for how images cross cuts."""
    config = {**PLAIN, **QUANTISED, "INFERENCE_NUM_THREADS": 1}
    return Compiled(_core(), content, name, config, takes, (), (), None)


class Compiled:
    """One stage, compiled for batches of any size, and once more for single samples; each when it is first needed.

    Where images cross cuts it is compiled for full batches, too: only for known sizes nothing is copied there.
    """

    def __init__(
        self,
        core: Any,
        content: bytes,
        name: str,
        config: dict[str, Any],
        takes: Sequence[str],
        gives: Sequence[TensorSpec],
        turned: Collection[str],
        batch_size: int | None,
    ) -> None:
        check_whole(content, name)
        self._core, self._name, self._config = core, name, config
        try:
            self._model = core.read_model(io.BytesIO(content))
            self.reads = [takes.index(each.any_name) for each in self._model.inputs]  # others no node reads
            self._rows = _give_largest_indices(self._model)
            _widen_sums(self._model)
            _take_channels_last(self._model, turned)
            self.turned = _give_channels_last(self._model, {each.name for each in gives})
        except Exception as error:
            problem = f"OpenVINO cannot load it ({first_line(error)})"
            raise BadFile(name, problem, "upgrade openvino, or run it by onnxruntime") from error
        is_exact = config[PRECISION] == "f32"  # in bf16, kernels for known sizes round otherwise
        self._alone = 1 if is_exact else None
        self._full = batch_size if is_exact and (turned or self.turned) else None
        self._compiled: dict[int | None, Any] = {}  # by the size of batches; None: any
        self._requests = local()  # each thread has its own: a request runs once at a time

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state, in memory of their own."""
        size = self._full if len(state[0]) == self._full else None
        logits, *others = (np.array(each.data) for each in self._run(state, size))
        return logits, tuple(others)

    def run_one(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state of a single sample, in memory that the next sample overwrites."""
        logits, *others = self._run(state, self._alone)
        return logits.data, tuple(others)

    def _run(self, state: State, size: int | None) -> Sequence[Any]:
        run: Bound | None = getattr(self._requests, str(size), None)
        if run is None:
            run = Bound(self._request(size))
            setattr(self._requests, str(size), run)
        try:
            made = run([state[place] for place in self.reads])
        except Exception as error:
            setattr(self._requests, str(size), None)
            raise BadInput(refusal(self._name, state[0].shape[0], error)) from error
        outputs = len(made) - len(self._rows)
        for largest, rows in zip(made[outputs:], self._rows, strict=True):
            if (last := int(largest.data)) >= rows:
                raise BadInput(
                    f"an input leads to the index {last}, and the network's table has {rows} rows: give others"
                )
        return made[:outputs]

    def alone(self) -> Any:
        """Return the model for single samples, if it is one of known sizes that looks nothing up."""
        model = None if self._rows or self._alone is None else self._sized(self._alone)
        return None if model is None or model.is_dynamic() else model

    def _sized(self, size: int | None) -> Any:
        if size is None:
            return self._model
        model = self._model.clone()
        model.reshape({each: [size, *[*each.partial_shape][1:]] for each in model.inputs})
        return model

    def _request(self, size: int | None) -> Any:
        if size not in self._compiled:
            try:
                self._compiled[size] = self._core.compile_model(self._sized(size), "CPU", self._config)
            except RuntimeError as error:
                if size is None:
                    problem = f"OpenVINO cannot compile it ({first_line(error)})"
                    raise BadFile(self._name, problem, "upgrade openvino, or export it for onnxruntime") from error
                self._request(None)  # some networks are compiled for any size alone
                self._compiled[size] = self._compiled[None]
        return self._compiled[size].create_infer_request()


class Bound:
    """Runs a compiled stage; tensors that it was given last, such as those of the stage before, are not given again."""

    def __init__(self, request: Any) -> None:
        self._request, self._results = request, range(len(request.results))
        model = request.get_compiled_model()
        self._given: list[Any] = [None] * len(model.inputs)  # tensors that it reads
        self._outputs: list[Any] = []  # whose memory stays the same
        shapes = [each.partial_shape for each in (*model.inputs, *model.outputs)]
        self._is_alone = not any(each.is_dynamic for each in shapes) and shapes[0][0] == 1

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs, in memory that the next run overwrites."""
        request = self._request
        for index, each in enumerate(inputs):
            if each is not self._given[index]:
                self._given[index] = each = _tensor(each) if isinstance(each, np.ndarray) else each
                request.set_input_tensor(index, each)
        if self._is_alone and self._outputs:  # a tenth of a small stage's time is saved
            request.infer()
            return self._outputs
        request.start_async()  # `infer` hides what fails, leaves the answers of the last run there, and takes one core
        request.wait()
        self._outputs = [request.get_output_tensor(index) for index in self._results]
        return self._outputs


class PassedExits(NamedTuple):
    """How far a sample ran ahead: its inputs, and the logits of every exit on the way."""

    inputs: State
    logits: Sequence[Any]


class JoinedStages:
    """All stages as one model, which runs single samples to the first exit where the score reaches its threshold.

    To enter the runtime at three exits took 8 % of the time of a ResNet-18 in int8, on two threads 32 %. The scores in
    the model, in float32, say only how far it runs: from the logits the host decides as if stages had run one by one.
    """

    def __init__(self, core: Any, stages: "Sequence[Compiled]", config: dict[str, Any], allowed: float) -> None:
        self._core, self._stages, self._config, self._allowed = core, stages, config, allowed
        self._compiled: dict[str, Any] = {}  # by scores
        self._requests = local()  # each thread has its own

    def __call__(self, state: State, limits: Any, score: str) -> PassedExits | None:
        """Return how far a sample ran, in memory that the next sample overwrites; None: run it stage by stage."""
        runs: dict[str, Bound | None] = vars(self._requests)
        if score not in runs:
            runs[score] = self._proven(state, score)
        if (run := runs[score]) is None:
            return None
        count, *logits = run(self._inputs(state, limits))
        return PassedExits(state, logits[: int(count.data)])

    def _inputs(self, state: State, limits: Any) -> list[Any]:
        return [*(state[place] for place in self._stages[0].reads), limits]

    def _proven(self, state: State, score: str) -> "Bound | None":
        """Return the model if it gives what its stages give at every exit, each of which it has run once then."""
        try:
            if score not in self._compiled:
                model = _until_reached(self._stages, SCORES[score])
                self._compiled[score] = model and self._core.compile_model(model, "CPU", self._config)
            if self._compiled[score] is None:
                return None
            run = Bound(self._compiled[score].create_infer_request())
            _, *logits = run(self._inputs(state, _limits_of([np.inf] * (len(self._stages) - 1))))
        except RuntimeError:
            return None  # of operations that it does not take inside of a branch
        for stage, found in zip(self._stages, logits, strict=True):
            wanted, state = stage(state)
            if not relative_gap(found.data, wanted) <= self._allowed:
                return None
        return run


def _until_reached(stages: Sequence[Compiled], score: Callable[[Any], Any]) -> Any:
    """Return a model that runs stages until a score reaches its limit; it gives their number, and the logits of all."""
    openvino = openvino_library()
    opset, last = openvino.opset13, len(stages) - 1
    models = [each.alone() for each in stages]
    if None in models:
        return None
    further: Any = None  # the model of the stages after this one
    for index in range(last, -1, -1):
        logits, *state = [each.input_value(0) for each in models[index].get_results()]
        takes, gives = models[index].get_parameters(), [opset.constant(np.int32(last + 1)), logits]
        if further is not None:
            limits = opset.parameter([last], openvino.Type.f32)
            is_below = opset.less(score(logits), opset.gather(limits, np.array([index]), np.array(0)))
            branch = opset.if_op(opset.squeeze(is_below, np.array([0])).output(0))
            zeros = [np.zeros([*each.shape], np.float32) for each in further.outputs[1:]]
            none = openvino.Model([opset.result(opset.constant(each)) for each in (np.int32(index + 1), *zeros)], [])
            branch.set_then_body(further)
            branch.set_else_body(none)
            given = [*(state[place] for place in stages[index + 1].reads), limits.output(0)]
            for value, each in zip(given, further.get_parameters(), strict=False):  # the last stage has no limit
                branch.set_input(value, each, None)
            count, *deeper = map(branch.set_output, further.get_results(), none.get_results())
            takes, gives = [*takes, limits], [count, logits, *deeper]
        further = openvino.Model([opset.result(each) for each in gives], takes)
    return further


def _max_probability(logits: Any) -> Any:
    opset = openvino_library().opset13
    return opset.reduce_max(opset.softmax(logits, 1), np.array(1))


def _margin(logits: Any) -> Any:
    opset = openvino_library().opset13
    largest = opset.topk(opset.softmax(logits, 1), np.int32(2), 1, "max", "value").output(0)
    return opset.reduce_sum(opset.multiply(largest, np.array([[1, -1]], np.float32)), np.array(1))


SCORES = {"max_probability": _max_probability, "margin": _margin}


def _give_largest_indices(model: Any) -> list[int]:
    """Let a model give the largest index into each of its tables last, and return how many rows these have.

    For an index beyond them OpenVINO reads zeros.
    """
    opset, rows, results = openvino_library().opset13, [], []
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Gather":
            continue
        index, axis = node.input_value(1), node.input_value(2).get_node()
        if index.get_node().get_type_name() == "Constant" or axis.get_type_name() != "Constant":
            continue
        count = node.input_value(0).get_partial_shape()[int(axis.get_vector()[0])]
        if count.is_static:
            flat = opset.reshape(index, np.array([-1]), special_zero=False)
            rows.append(count.get_length())
            results.append(opset.result(opset.reduce_max(flat, np.array(0))))
    model.add_results(results)
    return rows


def _take_channels_last(model: Any, turned: Collection[str]) -> None:
    """Let a model take images of these names with channels last."""
    openvino = openvino_library()
    for parameter in model.get_parameters():
        if parameter.output(0).any_name in turned and parameter.get_element_type() != openvino.Type.u8:
            readers, shape = [*parameter.output(0).get_target_inputs()], [*parameter.get_partial_shape()]
            parameter.set_partial_shape(openvino.PartialShape([shape[axis] for axis in TO_LAST]))
            back = openvino.opset13.transpose(parameter, TO_FIRST)
            for each in readers:
                each.replace_source_output(back.output(0))
    model.validate_nodes_and_infer_types()


def _give_channels_last(model: Any, names: Collection[str]) -> frozenset[str]:
    """Let a model give images of these names, as convolutions make them, with channels last, and return which.

    Kernels for convolutions keep channels last in memory, so that nothing has to be copied; to copy images to channels
    first took 7 to 13 % of the time of a ResNet-18 with three exits. Bytes are handed on so by the graph itself. The
    plugin leaves such a transposition out, but not after a sum: a maximum that changes nothing stands between.
    """
    openvino = openvino_library()
    opset, found = openvino.opset13, []
    for result in model.get_results():
        source, names_here = result.input_value(0), result.output(0).names & {*names}
        if not names_here or source.get_partial_shape().rank != openvino.Dimension(IMAGES):
            continue
        node = source.get_node()
        if source.get_element_type() == openvino.Type.u8 and node.get_type_name() == "Transpose":
            same = opset.maximum(node.input_value(0), node.input_value(0))
            node.input(0).replace_source_output(same.output(0))
        elif source.get_element_type() == openvino.Type.f32 and _is_convolutional(source):
            result.input(0).replace_source_output(opset.transpose(opset.maximum(source, source), TO_LAST).output(0))
        else:
            continue
        found += names_here
    model.validate_nodes_and_infer_types()
    return frozenset(found)


def _is_convolutional(output: Any) -> bool:
    """Return whether images come from convolutions or pools, through sums and functions of numbers alone."""
    left, seen, found = [output.get_node()], set[str](), False
    while left:
        node = left.pop()
        kind, name, shape = node.get_type_name(), node.get_name(), node.output(0).get_partial_shape()
        if name in seen or (shape.rank.is_static and (len(shape) == 0 or shape[0].is_static)):  # known, or of no sample
            continue
        seen.add(name)
        if kind in ELEMENTWISE:
            left += [each.get_source_output().get_node() for each in node.inputs()]
        elif kind in CONVOLUTIONAL or _is_turned_input(node):
            found = True
        else:
            return False
    return found


def _is_turned_input(node: Any) -> bool:
    """Return whether a node turns images back that came with channels last."""
    return node.get_type_name() == "Transpose" and node.input_value(0).get_node().get_type_name() == "Parameter"


def _widen_sums(model: Any) -> None:
    """Give sums over tensors of three axes a fourth one of size 1.

    OpenVINO 2026.4 reads the scales of quantised ones beyond their end, from some row of a batch on.
    """
    openvino = openvino_library()
    for node in model.get_ordered_ops():
        if node.get_type_name() not in SUMS or node.input(0).get_partial_shape().rank != openvino.Dimension(3):
            continue
        axes = node.input_value(1).get_node()
        if axes.get_type_name() != "Constant":
            continue
        opset = openvino.opset13
        made = {"ReduceMean": opset.reduce_mean, "ReduceSum": opset.reduce_sum}[node.get_type_name()]
        last, four = np.array([3]), [*(axes.get_vector() % 3), 3]
        keeps = node.get_attributes()["keep_dims"]
        found = made(opset.unsqueeze(node.input_value(0), last), np.array(four), keep_dims=keeps)
        node.output(0).replace((opset.squeeze(found, last) if keeps else found).output(0))


@cache
def openvino_library() -> Any:
    """Return the library, if it is installed."""
    return library("openvino", '"alight[openvino]"')


@cache
def _core() -> Any:
    """Return the one core of this process: dropped in another thread, it would unmap the signal stack of this one."""
    return openvino_library().Core()


def _limits_of(thresholds: Sequence[float]) -> Any:
    return _tensor(np.array(thresholds, np.float32))


def _tensor(array: np.ndarray) -> Any:
    array = np.ascontiguousarray(array).view(array.dtype.str)  # of two names for int64 it knows one
    return openvino_library().Tensor(array, shared_memory=array.flags.writeable)  # it takes no others without a copy
