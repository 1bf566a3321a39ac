"""ONNX stages in lower precision: int8 by ONNX Runtime's quantiser, or weights of half the size.

An int8 stage holds quantised convolutions and matrix products; the product that gives the logits stays in float32.
Where one stage quantises its state and the next one quantises it in the same way, the state crosses as bytes, with
channels last as int8 kernels want them: nothing is converted at an exit, and survivors are a quarter of the size.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.batches import fitted
from alight.data.preprocess import TensorSpec, first_unusable
from alight.engine.backends import State
from alight.engine.backends.exported import exported_backend
from alight.engine.backends.onnx import Session, on_host
from alight.engine.manifest import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GAPS,
    INT8,
    ONNX,
    PROBED_LOGITS,
    Manifest,
    check_loses_nothing,
    checksum,
    probe_inputs,
    relative_gap,
    verified,
)
from alight.engine.predictor import check_exits, check_fingerprint
from alight.engine.settings import ONNXRUNTIME, OPENVINO, RunSettings
from alight.errors import AlightError, BadFile, BadInput, Mismatch
from alight.export.programs import LOGITS, quietly
from alight.files import POLICY, whole_folder
from alight.policies.policy import Policy

FLOAT_HEAD = f"{INT8}, head {FLOAT32}"
LEVELS = {  # what a stage can be, by the precision that is asked for: the first that loses little is taken
    FLOAT32: (FLOAT32,),
    INT8: (INT8, FLOAT_HEAD, FLOAT32),
    FLOAT16: (FLOAT16, FLOAT32),
    BFLOAT16: (BFLOAT16, FLOAT32),
}
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# that keep images in int8; a clip, as of ReLU6, becomes the range of bytes, where the range before it may be far wider
BETWEEN = ("Add", "AveragePool", "Clip", "Concat", "GlobalAveragePool", "MaxPool", "Relu")
ALIKE = 1e-4  # by which the scales of both sides of a cut may differ, in parts of them: both saw the same numbers
PART = 16  # samples that are run together to find ranges
SMALLEST = 256  # weights of a tensor: smaller ones stay in float32
IMAGES = 4  # axes
TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # channels

Feed = Mapping[str, np.ndarray]


def lower(
    source: Path,
    folder: Path,
    precision: str,
    samples: Sequence[State],
    *,
    runtime: str = ONNXRUNTIME,
    providers: Sequence[str] = (),
    levels: Sequence[str] = (),
) -> Path:
    """Write an exported folder of float32 stages again in lower precision, and return it; PyTorch is not needed.

    The policy comes along unchanged, for the network of float32: `Predictor.load` refuses it until one that was
    calibrated on these stages takes its place (`put_policy`). `alight.deploy` does all of it. A stage that OpenVINO
    computes otherwise than its quantised file says stays in float32.

    Args:
        source: That `export_model` wrote.
        folder: To write.
        precision: "int8", "float16" (weights alone), "bfloat16" (arithmetic of OpenVINO), or "float32" as before.
        samples: Batches of inputs as the network takes them, some tens of samples or more, for the ranges of int8.
        runtime: That will run the folder.
        providers: Of ONNX Runtime, with which it will run.
        levels: Of every stage, one of `LEVELS[precision]`; none: the first.
    """
    manifest = Manifest.load(source)
    check_precision(precision, runtime)
    if manifest.format != ONNX or manifest.precision != FLOAT32:
        raise BadInput(f"stages of {manifest.format} in {manifest.precision}: give a folder of ONNX in float32")
    check_loses_nothing(folder)
    levels = _checked_levels(levels, precision, manifest)
    _check_kinds(samples, manifest.inputs)
    states = [part for batch in samples for part in _parts(fitted(batch, manifest.input_spec))]
    _check_samples(states, precision)
    with whole_folder(folder) as filling:
        paths, written = [filling / stage.file for stage in manifest.stages], list[str]()
        for stage, path, level in zip(manifest.stages, paths, levels, strict=True):
            session = Session(verified(source, stage.file, stage.checksum), stage.file)
            written.append(_write(source / stage.file, path, level, session, states, runtime))
            states = [session(each)[1] for each in states]
        carried = [stage.carries for stage in manifest.stages]
        carried = share_bytes(paths, carried) if precision == INT8 else carried
        files = [
            replace(stage, checksum=checksum(path.read_bytes()), carries=tuple(carries), precision=level, probe=())
            for stage, path, carries, level in zip(manifest.stages, paths, carried, written, strict=True)
        ]
        named = json.dumps([manifest.fingerprint, runtime, *providers, precision, [each.checksum for each in files]])
        own = manifest.fingerprint if precision == FLOAT32 else checksum(named.encode())[: len(manifest.fingerprint)]
        for name in (POLICY, *manifest.further):
            (filling / name).parent.mkdir(exist_ok=True)
            (filling / name).write_bytes((source / name).read_bytes())
        terms: dict[str, Any] = {"precision": precision, "runtime": runtime, "providers": tuple(providers)}
        probed(replace(manifest, fingerprint=own, stages=tuple(files), **terms), filling).save(filling)
    return folder


def put_policy(folder: Path, policy: Policy) -> None:
    """Let a policy take the place of the one of an exported folder, if it is for these stages."""
    manifest = Manifest.load(folder)
    check_exits(policy, len(manifest.exits))
    check_fingerprint(policy, manifest.fingerprint)
    if policy.open_exits != manifest.open_exits:
        raise Mismatch(f"the policy opens exits {policy.open_exits}, and the folder has {manifest.open_exits}")
    policy.save(folder / POLICY)
    replace(manifest, policy_checksum=checksum((folder / POLICY).read_bytes())).save(folder)


def without_heads(source: Path, folder: Path) -> Path:
    """Write the stages of an exported folder without their heads, but for the last one, to be timed; return the folder.

    What a stage of it gives are states alone.
    """
    onnx = _onnx()
    manifest = Manifest.load(source)
    folder.mkdir()
    files = []
    for stage in manifest.stages:
        model = onnx.load_from_string((source / stage.file).read_bytes())
        if stage.carries:
            _name_nodes(model.graph)
            kept = [each for each in model.graph.output if each.name != LOGITS.name]
            needed = _needed(model.graph, [each.name for each in kept])
            for values, wanted in ((model.graph.output, kept), (model.graph.node, _among(model.graph, needed))):
                del values[:]
                values.extend(wanted)
        (folder / stage.file).write_bytes(model.SerializeToString())
        files.append(replace(stage, checksum=checksum((folder / stage.file).read_bytes()), probe=()))
    replace(manifest, stages=tuple(files), further={}).save(folder)
    return folder


def probed(manifest: Manifest, folder: Path) -> Manifest:
    """Return the manifest with what the stages of the folder give for the probe, by their runtime."""
    stages, state = exported_backend(folder, manifest, RunSettings(), allow_compiled=True).stages, None
    made = []
    for run, stage in zip(stages, manifest.stages, strict=True):
        logits, state = run(probe_inputs(manifest.inputs) if state is None else state)
        made.append(replace(stage, probe=tuple(np.asarray(logits)[0, :PROBED_LOGITS].astype(float).tolist())))
    return replace(manifest, stages=tuple(made))


def check_precision(precision: str, runtime: str) -> None:
    """Raise unless a runtime runs exported stages in this precision."""
    if precision not in LEVELS:
        raise BadInput(f"there is no precision {precision!r}: choose {', '.join(LEVELS)}")
    if runtime not in (ONNXRUNTIME, OPENVINO):
        raise BadInput(f"{runtime!r} does not run exported stages: choose {ONNXRUNTIME} or {OPENVINO}")
    if precision == BFLOAT16 and runtime != OPENVINO:
        raise BadInput(
            f"{runtime} has no bf16 arithmetic on processors: choose runtime='{OPENVINO}', or float16 for files of half"
            " the size"
        )


def _checked_levels(levels: Sequence[str], precision: str, manifest: Manifest) -> Sequence[str]:
    """Return the level of every stage, if there are such."""
    levels = [*levels] or [LEVELS[precision][0]] * len(manifest.stages)
    odd = [level for level in levels if level not in LEVELS[precision]]
    if odd or len(levels) != len(manifest.stages):
        what = f"there is no level {odd[0]!r}" if odd else f"{len(levels)} levels for {len(manifest.stages)} stages"
        raise BadInput(f"{what}: give each stage one of {'; '.join(LEVELS[precision])}")
    return levels


def _check_samples(states: Sequence[State], precision: str) -> None:
    if precision == INT8 and not states:
        raise BadInput("the ranges of int8 are those of samples, and there are none: give some tens")
    if any(first_unusable(each) is not None for each in states):
        raise BadInput("a sample holds NaN, infinity or a negative index, of which int8 has no range: leave it out")


def _check_kinds(samples: Sequence[State], inputs: Sequence[TensorSpec]) -> None:
    """Check that no pixels are given to a network of floats: ranges would be those of other numbers."""
    for array, own in (pair for batch in samples for pair in zip(batch, inputs, strict=False)):
        if own.dtype.startswith("float") and "float" not in str(array.dtype):
            raise BadInput(
                f"samples of {array.dtype}, and the network takes {own}: give them normalised, as it takes them"
            )


def _parts(samples: State) -> list[State]:
    """Return inputs in small batches."""
    return [tuple(each[start : start + PART] for each in samples) for start in range(0, len(samples[0]), PART)]


def _write(source: Path, target: Path, level: str, session: Session, states: Sequence[State], runtime: str) -> str:
    """Write a stage of float32 in another precision, and return which it has; its inputs give the ranges of int8."""
    if level in (FLOAT16, BFLOAT16):
        _half(source, target, level)
    elif level != FLOAT32:
        feeds = [dict(zip(session.inputs, each, strict=True)) for each in states]
        _quantise(source, target, feeds, float_head=level == FLOAT_HEAD)
        if runtime == OPENVINO and not _is_computed(target, session, states[0]):
            level = FLOAT32
    if level == FLOAT32:
        target.write_bytes(source.read_bytes())
    return level


def _is_computed(path: Path, session: Session, samples: State) -> bool:
    """Return whether OpenVINO is as near to a stage of float32, in a batch and alone, as its quantised file is.

    OpenVINO 2026.4 gives all channels the bias of the first where a tensor of all samples, as a class token, or padding
    is put beside what a convolution makes; pools take padding for the smallest number.
    """
    from alight.engine.backends.openvino import quantised_stage

    content = path.read_bytes()
    file = Session(content, path.name, 1)
    try:
        stage = quantised_stage(content, path.name, session.inputs)
        alone = tuple(each[:1] for each in samples)
        gaps = _gaps(stage(samples), file(samples), session(samples))
        gaps += _gaps(stage.run_one(alone), file(alone), session(alone))
    except BadFile:  # it cannot be compiled
        return False
    return all(gap <= max(GAPS[INT8], 2 * own) for gap, own in gaps)


def _gaps(*made: tuple[np.ndarray, State]) -> list[tuple[float, float]]:
    """Return how far two runs of a stage are from a third, in parts of its largest number, for every tensor."""
    found = zip(*((logits, *map(on_host, others)) for logits, others in made), strict=True)
    return [(relative_gap(one, wanted), relative_gap(other, wanted)) for one, other, wanted in found]


def share_bytes(paths: Sequence[Path], carried: Sequence[Sequence[TensorSpec]]) -> list[tuple[TensorSpec, ...]]:
    """Let states that both sides of a cut quantise alike cross it as bytes, and return what each stage carries then."""
    onnx = _onnx()
    models, found = [onnx.load(path) for path in paths], []
    for index, (one, other) in enumerate(zip(models, [*models[1:], None], strict=True)):
        specs = []
        for place, spec in enumerate(carried[index]):
            made = _Cut(one, other, spec, place) if other is not None else None
            specs.append(made.shared() if made is not None and made.is_quantised else spec)
        found.append(tuple(specs))
    for path, model in zip(paths, models, strict=True):
        onnx.save(model, path)
    return found


class _Cut:
    """A tensor that one stage hands to the next, both quantised."""

    def __init__(self, before: Any, after: Any, spec: TensorSpec, place: int) -> None:
        self.before, self.after, self.spec = before.graph, after.graph, spec
        self.output, self.input = before.graph.output[place + 1], after.graph.input[place]
        made = [node for node in self.before.node if self.output.name in node.output]
        self.restored: Any = made[0] if made and made[0].op_type == "DequantizeLinear" else None
        reading = [node for node in self.after.node if self.input.name in node.input]
        quantising = [node for node in reading if node.op_type == "QuantizeLinear"]
        self.quantised: Any = quantising[0] if len(quantising) == 1 else None
        restored = [node for node in self.after.node if self._follows(node)]
        self.again: Any = restored[0] if restored else None
        self.others = [node for node in reading if node is not self.quantised]

    def _follows(self, node: Any) -> bool:
        first = self.quantised
        return first is not None and node.op_type == "DequantizeLinear" and node.input[0] == first.output[0]

    @property
    def is_quantised(self) -> bool:
        """Whether both sides quantise the tensor with one scale and one zero point, as bytes."""
        if self.restored is None or self.quantised is None or self.again is None:
            return False
        one, other = _scale(self.before, self.restored), _scale(self.after, self.quantised)
        if one is None or other is None:
            return False
        return one[1] == other[1] and abs(one[0] / other[0] - 1) <= ALIKE

    def shared(self) -> TensorSpec:
        """Hand bytes over instead of floats, and return what crosses now."""
        onnx = _onnx()
        scale = next(each for each in self.before.initializer if each.name == self.restored.input[1])
        copied = f"{self.input.name}_crossing_scale"
        self.after.initializer.append(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale), copied))
        for node in [*self.after.node]:
            if self._follows(node):
                node.input[1] = copied
        images = len(self.spec.shape) == IMAGES
        restored, name = self.restored, self.output.name
        codes = restored.input[0]
        readers = [node for node in self.before.node if name in node.input]
        restored.output[0] = f"{name}_restored"
        _rename(readers, name, restored.output[0])
        if not readers:
            self.before.node.remove(restored)
        leave: dict[str, Any] = {"perm": TO_LAST} if images else {}
        kind = "Transpose" if images else "Identity"
        self.before.node.append(onnx.helper.make_node(kind, [codes], [name], **leave))
        _rename(self.others, self.input.name, self.again.output[0])
        enter: dict[str, Any] = {"perm": TO_FIRST} if images else {}
        placed = [*self.after.node].index(self.quantised)
        made = onnx.helper.make_node(kind, [self.input.name], [self.quantised.output[0]], **enter)
        self.after.node.remove(self.quantised)
        self.after.node.insert(placed, made)
        _sort(self.after)
        shape = tuple(self.spec.shape[axis] for axis in TO_LAST) if images else self.spec.shape
        for each in (self.output, self.input):
            _describe(each, shape)
        return TensorSpec(self.spec.name, shape, "uint8")


def _quantise(source: Path, target: Path, feeds: Sequence[Feed], *, float_head: bool) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    onnx = _onnx()
    with tempfile.TemporaryDirectory() as folder, quietly():
        ready = Path(folder) / "ready.onnx"
        quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
        model = onnx.load(ready)
        _name_nodes(model.graph)
        onnx.save(model, ready)
        kinds = {node.op_type for node in model.graph.node}
        kept = _kept_in_float(model.graph, float_head=float_head) | _not_quantisable(model.graph)
        quantize_static(
            str(ready),
            str(target),
            _Feeds(feeds),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=[*PRODUCTS, *(BETWEEN if "Conv" in kinds else ())],
            nodes_to_exclude=sorted(kept),
        )


class _Feeds:
    """Batches as ONNX Runtime's quantiser reads them."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._left: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._left, None)


def _kept_in_float(graph: Any, *, float_head: bool) -> set[str]:
    """Return the names of nodes that stay in float32: the product that gives the logits, and what only logits need."""
    names = [each.name for each in graph.output]
    logits = next((name for name in names if name == LOGITS.name), names[0])
    head = _needed(graph, [logits]) - _needed(graph, [name for name in names if name != logits])
    if float_head and len(names) > 1:
        return head
    products = [node.name for node in graph.node if node.op_type in PRODUCTS and node.name in head]
    last = products[-1:]
    after = _needed(graph, [logits]) - _needed(
        graph, [name for node in graph.node if node.name in last for name in node.input]
    )
    return {*last, *(after & head)}


def _not_quantisable(graph: Any) -> set[str]:
    """Return the names of transposed convolutions in groups, whose biases ONNX Runtime's quantiser cannot scale."""
    transposed = [node for node in graph.node if node.op_type == "ConvTranspose"]
    return {node.name for node in transposed if any(each.name == "group" and each.i > 1 for each in node.attribute)}


def _name_nodes(graph: Any) -> None:
    for index, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{index}"


def _among(graph: Any, names: set[str]) -> list[Any]:
    return [node for node in graph.node if node.name in names]


def _needed(graph: Any, names: Sequence[str]) -> set[str]:
    """Return the names of all nodes that these tensors are made by."""
    makers = {name: node for node in graph.node for name in node.output}
    found, left = set(), [*names]
    while left:
        node = makers.get(left.pop())
        if node is not None and node.name not in found:
            found.add(node.name)
            left += node.input
    return found


def _half(source: Path, target: Path, precision: str) -> None:
    """Write a stage whose weights have 16 bits; they are converted when it is loaded."""
    onnx = _onnx()
    kind = getattr(onnx.TensorProto, precision.upper())
    model = onnx.load(source)
    casts = []
    for each in model.graph.initializer:
        if each.data_type != onnx.TensorProto.FLOAT or int(np.prod(each.dims)) < SMALLEST:
            continue
        values, name = onnx.numpy_helper.to_array(each), each.name
        if precision == FLOAT16 and np.abs(values).max() > np.finfo(np.float16).max:
            raise BadInput(f"a weight of {np.abs(values).max():g} is too large for float16: export as bfloat16 or int8")
        each.CopyFrom(_packed(onnx, values, f"{name}_{precision}", kind))
        casts.append(onnx.helper.make_node("Cast", [each.name], [name], to=onnx.TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, target)


def _packed(onnx: Any, values: np.ndarray, name: str, kind: int) -> Any:
    if kind == onnx.TensorProto.FLOAT16:
        return onnx.numpy_helper.from_array(values.astype(np.float16), name)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
    return onnx.helper.make_tensor(name, kind, values.shape, rounded.tobytes(), raw=True)


def _scale(graph: Any, node: Any) -> tuple[float, int] | None:
    """Return scale and zero point of a node that quantises, None where they are not of bytes."""
    onnx = _onnx()
    constants = {each.name: each for each in graph.initializer}
    if len(node.input) < 3 or not {node.input[1], node.input[2]} <= constants.keys():
        return None
    scale, zero = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[1:3])
    return (float(scale), int(zero)) if zero.dtype == np.uint8 and scale.size == 1 else None


def _rename(nodes: Sequence[Any], old: str, new: str) -> None:
    for node in nodes:
        for place, name in enumerate(node.input):
            if name == old:
                node.input[place] = new


def _sort(graph: Any) -> None:
    """Put nodes after those that make their inputs, as ONNX demands."""
    known = {each.name for each in (*graph.initializer, *graph.input)} | {""}
    left, ordered = [*graph.node], []
    while left:
        ready = [node for node in left if {*node.input} <= known]
        if not ready:
            raise AlightError("the nodes of a quantised stage depend on each other in a circle: export it as float32")
        ordered += ready
        known |= {name for node in ready for name in node.output}
        left = [node for node in left if not {*node.output} <= known]
    del graph.node[:]
    graph.node.extend(ordered)


def _describe(value: Any, shape: Sequence[int | None]) -> None:
    onnx = _onnx()
    names = [axis.dim_param for axis in value.type.tensor_type.shape.dim]
    sizes = [
        names[0] or "samples",
        *(f"{value.name}_{axis}" if size is None else size for axis, size in enumerate(shape) if axis),
    ]
    value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.UINT8, sizes))


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise AlightError(f'{error}: pip install "alight[export]"') from error
    import onnx.helper
    import onnx.numpy_helper

    return onnx
