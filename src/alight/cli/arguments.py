"""Arguments that commands share, and values, checked before the work begins and before torch is loaded."""

import argparse
import errno
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alight import calibrate
from alight.budgeting.thresholds import SALTS
from alight.cli.command import Argument, argument
from alight.data.preprocess import Normalisation
from alight.engine.settings import RunSettings
from alight.errors import AlightError, BadInput
from alight.files import FIRST_STAGES, MANIFEST, WEIGHTS, check_writable, described_network
from alight.files import POLICY as POLICY_FILE
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy

if TYPE_CHECKING:
    from alight.training.settings import TrainingSettings


def output(text: str) -> str:
    """Return the path of a file that can be written to."""
    try:
        check_writable(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from error
    return text


def output_folder(text: str) -> str:
    """Return the path of a folder that exists or can be created."""
    target = Path(text).resolve()
    existing = next(path for path in (target, *target.parents) if path.exists())
    if not text or not existing.is_dir():
        where = existing if text else "an empty name"
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {where} is not a folder")
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {existing} is read-only")
    return text


def salted_by(policy: Policy, path: str, salt: str = "data") -> Policy:
    """Return the policy with a salt of its own for this data, the same in every run and, of files, on Ray too.

    A run numbers its samples from 0, so with the policy's own salt the first sample of every run would draw alike.
    With `salt="policy"` it does, as that of every new `Predictor`.
    """
    if salt == "policy":
        return policy
    digest, place = sha256(str(policy.salt).encode()), Path(path)
    if not place.exists():  # a URI, or a data set by name
        digest.update(path.encode())
    if place.is_file():
        with place.open("rb") as file:
            digest.update(file.read(2**20))
    for each in sorted(place.rglob("*")) or [place] if place.exists() else ():
        digest.update(f"{each.name} {each.stat().st_size}".encode())
    return replace(policy, salt=int.from_bytes(digest.digest()) % SALTS)


def count(text: str) -> int:
    """Return a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def port(text: str) -> int:
    """Return the number of a TCP port; 0 stands for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 0 to 65535")
    return int(text)


def share(text: str) -> float:
    """Return a share from text such as 0.01 or 1%.

    >>> share("0.01"), share("1%")
    (0.01, 0.01)
    """
    with suppress(ValueError):
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    raise argparse.ArgumentTypeError(f"{text!r}: give a share, as 0.01 or 1%")


def compared(text: str) -> tuple[str, float, str]:
    """Return name, accuracy and cost of a network from text such as ResNet-10,70%,450 MFLOPs."""
    name, *others = [part.strip() for part in text.split(",")]
    if len(others) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}: give name, accuracy and cost, as 'ResNet-10,70%,450 MFLOPs'")
    return name, share(others[0]), others[1]


def times(text: str) -> float:
    """Return a factor from text such as 2 or 2x.

    >>> times("2"), times("1.5x")
    (2.0, 1.5)
    """
    with suppress(ValueError):
        return float(text.removesuffix("x"))
    raise argparse.ArgumentTypeError(f"{text!r}: give a factor, as 2 or 2x")


def counts(text: str) -> tuple[int, ...]:
    """Return whole numbers from text such as 1,64."""
    return tuple(count(part) for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """Return numbers from text such as 0.5,0.5,0.5."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers, as 0.5,0.5,0.5") from error


def normalisation(options: argparse.Namespace) -> Normalisation | None:
    """Return the normalisation of images that --mean and --std name, None where both are left out."""
    if not (options.mean or options.std):
        return None
    return Normalisation(options.mean or (0.0,) * len(options.std), options.std or (1.0,) * len(options.mean))


def words(text: str) -> list[str]:
    """Return words from text such as layer1,layer2."""
    return text.split(",")


def words_or_auto(text: str) -> str | list[str]:
    """Return words, or auto."""
    return text if text == "auto" else text.split(",")


def methods(text: str) -> list[str]:
    """Return names of methods from text such as eero,geometric."""
    names = text.split(",")
    if unknown := [name for name in names if name not in calibrate.METHODS]:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}: choose among {', '.join(calibrate.METHODS)}")
    return names


# Shared arguments

MODEL = argument("model", help="folder of a network with exits")
POLICIES = "JSON that `alight calibrate` or `alight plan` wrote (default: that of the folder, if `alight fit` wrote it)"
POLICY = argument("policy", nargs="?", help=POLICIES)
TOKENIZER_FOLDER = argument("--tokenizer", metavar="FOLDER", help="folder of a tokenizer (default: that of the model)")
DEVICE = argument("--device", help="default: cuda if there is one")
FORCE = argument("--force", action="store_true", help="replace the network or recording that is there")
SALT = argument(
    "--salt",
    choices=["data", "policy"],
    default="data",
    help="of ties and mixtures: data draws anew for each file, so that many small runs keep the budget; policy draws as"
    " a Predictor and C++ do (default: data)",
)
ALLOW_MISMATCH = argument("--allow-mismatch", action="store_true", help="accept a policy of another network")
NORMALISATION = (
    argument(
        "--mean", type=numbers, help="subtracted from each channel of images in 0..1, as 0.5,0.5,0.5 (default: 0)"
    ),
    argument("--std", type=numbers, help="divisor of each channel then (default: 1)"),
)
RUNTIME = (  # of an exported network
    argument("--runtime", choices=["onnxruntime", "openvino"], help="of an exported network (default: its own)"),
    argument("--providers", type=words, help="of onnxruntime, as cuda or coreml (default: the CPU)"),
)
RUNTIMES = argument("--runtimes", action="store_true", help="run it by onnxruntime and openvino, too, and compare")
RUN = (
    DEVICE,
    argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: the network's own"),
    argument("--channels-last", action="store_true", help="images with their channels last in memory"),
    argument("--threads", type=int, help="of the CPU (default: PyTorch's own)"),
    argument("--compile", action="store_true", help="compile each stage of the network first"),
    argument(
        "--decide", choices=["auto", "device", "host"], default="auto", help="who decides on a GPU (default: auto)"
    ),
)
RUN_OR_TUNE = (
    *RUN,
    argument("--graphs", action="store_true", help="replay batches on a GPU as CUDA graphs"),
    argument("--speed", choices=["auto"], help="measure first which of these options pay here, --compile included"),
)


def data_arguments(split: str, *before: Argument, batch_size: bool = True) -> tuple[Argument, ...]:
    """Return the network, what comes before the data, the data, and how it is read."""
    data = ".npz of images and labels, folder of class folders, cifar100:FOLDER, .csv, .parquet, .jsonl, ..."
    return (
        MODEL,
        *before,
        argument("data", help=data),
        argument("--split", default=split, help=f"part of a data set that has several (default: {split})"),
        *([argument("--batch-size", type=count, default=128, help="default: 128")] if batch_size else []),
        argument("--workers", type=int, default=0, help="processes that load data (default: 0)"),
        TOKENIZER_FOLDER,
    )


def set_option(what: str) -> Argument:
    """Return --set NAME=VALUE, as often as needed."""
    return argument("--set", metavar="NAME=VALUE", action="append", default=[], help=what)


def output_option(default: str | None, what: str = "", kind: Callable[[str], str] = output) -> Argument:
    """Return -o, --output FILE."""
    text = ", ".join(part for part in (what, f"default: {default}" if default else "") if part)
    return argument("-o", "--output", metavar="FILE", type=kind, default=default, help=text)


def folder_option(default: str, what: str) -> Argument:
    """Return -o, --output FOLDER."""
    text = f"{what} (default: {default})"
    return argument("-o", "--output", metavar="FOLDER", type=output_folder, default=default, help=text)


# What options mean


def named(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return these options, as keyword arguments of the same names."""
    return {name: getattr(options, name) for name in names}


def run_settings(options: argparse.Namespace, device: str | None = None) -> RunSettings:
    """Return how the network runs, on the device of the options unless another is given."""
    graphs = getattr(options, "graphs", False)  # few batches of a service are full
    switches = named(options, "dtype", "channels_last", "compile", "threads", "decide")
    return RunSettings(device or options.device, graphs=graphs, **switches, **runtime_settings(options))


def runtime_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what runs an exported network, where the command can choose it."""
    return {"runtime": getattr(options, "runtime", None), "providers": tuple(getattr(options, "providers", None) or ())}


def torch_device(options: argparse.Namespace) -> str:
    """Return where PyTorch runs the network."""
    import torch

    if str(options.device).startswith("cuda") and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch finds no GPU here; leave it out to run on the CPU, or see `alight doctor`")
    return str(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def policy_of(folder: str, named: str | None) -> Path:
    """Return the path of the policy: the one that is named, or the one that lies in the network's folder."""
    own = Path(folder) / POLICY_FILE
    if not named and not own.is_file():
        raise BadInput(f"{folder} has no {POLICY_FILE}: name the JSON that `alight calibrate` or `alight plan` wrote")
    return Path(named or own)


def own_options(
    function: Callable[..., Any], settings: Sequence[str], reserved: Sequence[str] = (), *, progress: bool = True
) -> dict[str, Any]:
    """Return a function's keyword arguments from NAME=VALUE, except reserved ones, which have an option."""
    parameters = inspect.signature(function).parameters.items()
    known = [name for name, each in parameters if each.kind is each.KEYWORD_ONLY and name not in reserved]
    values: dict[str, Any] = {}
    if "progress" in known:
        known.remove("progress")
        values["progress"] = progress
    for setting in settings:
        name, equals, value = setting.partition("=")
        if name not in known or not equals:
            write = f"write NAME=VALUE with NAME one of {', '.join(known)}"
            raise BadInput(f"--set {setting!r}: {write if known else 'there are none here, leave it out'}")
        values[name] = _value(value)
    return values


def training_settings(options: argparse.Namespace, given: Mapping[str, Any]) -> "TrainingSettings":
    """Return how to train: what is given, and --set, which may not name an option of its own."""
    from alight.training.settings import TrainingSettings

    try:
        return TrainingSettings(**given, **own_options(TrainingSettings, options.set, ["mode", "epochs"]))
    except TypeError as error:
        raise wrong_kind(options.set, error) from error


def wrong_kind(settings: Sequence[str], error: TypeError) -> BadInput:
    """Return the error of a value of --set that a function does not take."""
    return BadInput(f"--set {' '.join(settings)}: a value is of the wrong kind ({error})")


def any_options(settings: Sequence[str]) -> dict[str, Any]:
    """Return keyword arguments from NAME=VALUE for a function that takes any."""
    if invalid := [setting for setting in settings if "=" not in setting]:
        raise BadInput(f"--set {invalid[0]!r}: write NAME=VALUE, as in --set width=8")
    return {setting.partition("=")[0]: _value(setting.partition("=")[2]) for setting in settings}


def _value(text: str) -> float | int | bool | str | list[Any] | None:
    named = {"true": True, "yes": True, "false": False, "no": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    for read in (int, float, partial(_values, int), partial(_values, float)):
        with suppress(ValueError):
            return read(text)
    return text


def _values(read: Callable[[str], Any], text: str) -> list[Any]:
    return [read(part) for part in text.split(",")]


# Checks and folders


def check_idle(options: argparse.Namespace, *names: str, why: str) -> None:
    """Raise if one of these options was given, which do nothing here; `why` goes on after its name."""
    for name in names:
        if getattr(options, name) != options.default_of(name):
            raise BadInput(f"--{name.replace('_', '-')} {why}")


def check_distinct(*paths: str | None) -> None:
    """Check that no file is named twice, so that a command does not write over what it reads."""
    resolved = [Path(path).resolve() for path in paths if path]
    if len(set(resolved)) < len(resolved):
        twice = next(path for path in resolved if resolved.count(path) > 1)
        raise BadInput(f"{twice} is named twice among inputs and outputs: give each its own file")


def check_unused(path: str, force: bool, marker: str = "") -> None:
    """Check that no file is written over, nor a folder with this file in it, unless --force allows it."""
    place = Path(path) / marker
    if not force and place.is_file():
        raise BadInput(f"{path} holds {_described(place)}: give another place with -o, or --force to replace it")


def _described(place: Path) -> str:
    """Return what a file is, or the folder that it lies in, in a few words."""
    if place.name in FIRST_STAGES:
        return "what is left of an exported network"
    if place.name in (MANIFEST, POLICY_FILE):
        return "an exported network" if place.name == MANIFEST else "a fitted network, its policy and tables"
    try:
        if place.name == WEIGHTS:
            return described_network(place.parent)
        table = HeadOutputs.load(place)
        return f"a recording of {len(table)} samples at {table.num_exits} exits"
    except (AlightError, OSError):
        return f"a file of {place.stat().st_size:,} bytes"


def check_data(*places: str | None) -> None:
    """Check that the data exists: a file, a folder, or the folder of NAME:FOLDER."""
    from alight.data.formats import without_part

    for where in filter(None, places):
        path, _ = without_part(where)
        if not Path(path).exists() and not Path(path.partition(":")[2] or path).exists():
            raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", where)


@contextmanager
def new_folder(folder: Path, keep: str = "") -> Iterator[Path]:
    """Yield the folder, created if need be; if the work fails, remove what was created, except the file to keep.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp()) / "runs" / "first"
    >>> try:
    ...     with new_folder(folder):
    ...         raise ValueError
    ... except ValueError:
    ...     folder.parent.exists()
    False
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException:
        created = folder.iterdir() if missing and keep and (folder / keep).exists() else missing[-1:]
        for path in created:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != keep:
                path.unlink(missing_ok=True)
        raise
