"""How a network runs: runtime, device, dtype, memory layout, compilation, CUDA graphs, threads."""

from dataclasses import dataclass
from typing import Any

from alight.errors import BadInput

DTYPES = {  # by the names that people write
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
PROVIDER = "ExecutionProvider"  # with which the names of ONNX Runtime's providers end
TORCH, ONNXRUNTIME, OPENVINO = "torch", "onnxruntime", "openvino"  # runtimes: what executes stages


@dataclass(frozen=True)
class RunSettings:
    """How a network runs; what is None stays as the network has it.

    >>> RunSettings(dtype="bf16").dtype
    'bfloat16'
    """

    device: Any = None  # a name, or a torch.device
    dtype: Any = None  # "fp32", "bf16", "fp16", or a torch.dtype
    channels_last: bool = False  # memory layout of images
    compile: bool = False  # compile every stage with torch.compile
    graphs: bool = False  # replay full batches as CUDA graphs, where the host decides
    decide: str = "auto"  # who decides about samples on a GPU: "device", "host", or whichever is faster
    threads: int | None = None  # on the host
    runtime: str | None = None  # of an exported network: "onnxruntime" or "openvino"; None: the one it was exported for
    providers: tuple[str, ...] = ()  # of ONNX Runtime, the first that can, then the CPU: "cuda", "tensorrt", ..

    def __post_init__(self) -> None:
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            if name not in DTYPES:
                raise BadInput(f"there is no dtype {name!r} here: choose bf16, fp16 or fp32")
            object.__setattr__(self, "dtype", DTYPES[name])
        if self.device is not None:
            object.__setattr__(self, "device", str(self.device))
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"{self.threads} threads: give 1 or more")
        if self.runtime not in (None, TORCH, ONNXRUNTIME, OPENVINO):
            raise BadInput(f"there is no runtime {self.runtime!r}: choose {TORCH}, {ONNXRUNTIME} or {OPENVINO}")
        if self.providers:
            given: Any = self.providers
            if isinstance(given, str) or not all(isinstance(each, str) for each in given):
                raise BadInput(f"providers {given!r}: give their names, as ('cuda',)")
            object.__setattr__(self, "providers", tuple(each.removesuffix(PROVIDER).lower() for each in given))
        if self.decide not in ("auto", "device", "host"):
            raise BadInput(f"decide {self.decide!r}: choose auto, device or host")
