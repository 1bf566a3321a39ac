"""What alight can be installed with, and what for."""

from importlib.util import find_spec
from typing import NamedTuple


class Extra(NamedTuple):
    """Packages by the names they are imported by, what they are for, and how to get them."""

    packages: dict[str, str]  # by module: the name under which it is installed
    purpose: str


EXTRAS = {
    "torch": Extra({"torch": "torch", "safetensors": "safetensors"}, "networks: attach, train, record, predict"),
    "vision": Extra(
        {"torchvision": "torchvision", "timm": "timm", "PIL": "pillow"}, "networks of timm and torchvision, image files"
    ),
    "text": Extra({"transformers": "transformers"}, "networks of Hugging Face that read text"),
    "deploy": Extra({"onnxruntime": "onnxruntime"}, "exported networks, without PyTorch: run"),
    "export": Extra({"onnx": "onnx", "onnxscript": "onnxscript"}, "networks to ONNX: export"),
    "ray": Extra({"ray": "ray", "pyarrow": "pyarrow"}, "many machines: predict and record --engine ray"),
    "figures": Extra({"matplotlib": "matplotlib"}, "figures of the experiments"),
    "learn": Extra({"sklearn": "scikit-learn"}, "learned scores, and the digits that come with it"),
    "serve": Extra(
        {
            "fastapi": "fastapi",
            "uvicorn": "uvicorn",
            "prometheus_client": "prometheus-client",
            "python_multipart": "python-multipart",
            "PIL": "pillow",
        },
        "the HTTP service",
    ),
}
BESIDE = {
    "pyarrow": "answers as Parquet",
    "datasets": "data sets of Hugging Face",
}  # no extra has them: installed by their own name


def extra_of(module: str) -> str | None:
    """The extra that brings a module, None where none does.

    >>> extra_of("timm.layers"), extra_of("nonsense")
    ('vision', None)
    """
    top = module.partition(".")[0]
    return next((name for name, extra in EXTRAS.items() if top in extra.packages), None)


def missing_for(*extras: str) -> str:
    """Which packages of these extras are not installed, and how to get them, in a line; empty where all are there.

    >>> missing_for()
    ''
    """
    missing = {name: [p for module, p in EXTRAS[name].packages.items() if find_spec(module) is None] for name in extras}
    if not any(missing.values()):
        return ""
    packages = ", ".join(package for each in missing.values() for package in each)
    return f'{packages} missing: pip install "alight[{",".join(name for name in extras if missing[name])}]"'
