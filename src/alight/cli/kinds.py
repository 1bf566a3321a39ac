"""What lies at a path: a network, a policy, costs, a table or data; arguments in a wrong order are recognised by it."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Literal

import numpy as np

from alight.errors import BadInput
from alight.files import CASCADE, CONFIG, FIRST_STAGES, MANIFEST, WEIGHTS, check_network_folder

Kind = Literal["network", "exported", "policy", "costs", "table", "recording", "points", "data"]

WRITTEN: dict[str, Kind] = {  # by the kind that alight's own files state
    "Policy": "policy",
    "Costs": "costs",
    "HeadOutputs": "table",
    "Recording": "recording",
    "MultiExitModel": "network",
    "Cascade": "network",
}
DESCRIBED: dict[Kind, str] = {
    "network": "the folder of a network",
    "exported": "the folder of an exported network",
    "policy": "a policy",
    "costs": "a file of costs",
    "table": "a file of recorded outputs",
    "recording": "a recording with its costs",
    "points": "the points of a sweep",
    "data": "data (images or texts)",
}
REMEDIES: dict[Kind, str] = {
    "network": "give the folder that `alight attach`, `train` or `cascade` wrote (`alight run` runs an exported one)",
    "exported": "give the folder that `alight export` wrote",
    "policy": "give the JSON that `alight calibrate` or `alight plan` wrote",
    "costs": "give the JSON that `alight costs` wrote",
    "table": "give the .npz that `alight record` wrote",
    "data": "give what the network is to run on",
}


def kind_of(path: str) -> Kind | None:
    """Return what lies there, None where nothing does or it cannot be read, which the command then says.

    >>> kind_of("nowhere.npz") is None, kind_of(".")
    (True, 'data')
    """
    place = Path(path)
    if place.is_dir():
        return _kind_of_folder(place)
    if not place.is_file():
        return None
    if place.suffix == ".npz":
        return _stated_in_arrays(place)
    if place.suffix == ".json":
        return _stated_in_json(place)
    if place.suffix == ".csv":
        with place.open(errors="replace") as file:
            return "points" if file.readline().startswith("method,budget,") else "data"
    return "data"


def check_order(options: argparse.Namespace, expected: Mapping[str, Kind]) -> None:
    """Raise if an argument of a command holds something else than expected, and say in which order they belong.

    `expected` has the command's positional arguments in their order, and options with their dashes. The folder of a
    network must be complete; what else does not exist is left to the function that reads it.
    """
    values = {name: str(getattr(options, name.lstrip("-"))) for name in expected if getattr(options, name.lstrip("-"))}
    kinds = {name: kind_of(value) for name, value in values.items()}
    wrong = [name for name, kind in kinds.items() if kind not in (None, expected[name])]
    if not wrong:
        for name, value in values.items():
            if expected[name] == "network":
                check_network_folder(value)
        return
    for order in permutations(values):
        if all(kinds[other] == expected[name] for name, other in zip(values, order, strict=True)):
            command = options.run.__name__.removeprefix("run_")
            words = _words(values, order)
            raise BadInput(f"the arguments are in another order: write `alight {command} {words} ...`")
    check_kind(values[wrong[0]], expected[wrong[0]])


def check_kind(path: str, expected: Kind) -> None:
    """Raise if something else lies there than expected; what does not exist is left to the function that reads it."""
    if Path(path).exists() and (kind := kind_of(path)) != expected:
        found = DESCRIBED[kind] if kind else "a file from elsewhere"
        raise BadInput(f"{path} is {found}, not {DESCRIBED[expected]}: {REMEDIES[expected]}")


def _words(values: Mapping[str, str], order: Sequence[str]) -> str:
    """Return the values in another order, each after the name of its option."""
    pairs = zip(values, order, strict=True)
    return shlex.join([word for name, other in pairs for word in ([name] * name.startswith("--") + [values[other]])])


def _kind_of_folder(folder: Path) -> Kind:
    if (folder / CASCADE).is_file() or all((folder / name).is_file() for name in (WEIGHTS, CONFIG)):
        return "network"
    if any(map(Path.is_file, map(folder.joinpath, (MANIFEST, *FIRST_STAGES)))):
        return "exported"
    first = next(iter(sorted(folder.glob("*.npz"))), None)
    return "table" if first is not None and _stated_in_arrays(first) == "table" else "data"


def _stated_in_arrays(path: Path) -> Kind | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            return WRITTEN.get(str(file["alight"]), "data") if "alight" in file.files else "data"
    except Exception:  # a damaged archive fails in a dozen ways
        return None


def _stated_in_json(path: Path) -> Kind | None:
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return None
    return WRITTEN.get(document.get("alight", "")) if isinstance(document, dict) else None
