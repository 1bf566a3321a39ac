"""A cascade: whole networks one after another, each of which is an exit, or has exits of its own.

A sample is kept once, as pixels, texts or arrays, and becomes the input of a network when it gets there, so that every
network has its own input size, preprocessing, dtype, device and engine. What a network carries from one of its exits to
the next travels behind the sample, and is dropped when the sample moves on to another network.
"""

import copy
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from alight.data.batches import fitted
from alight.data.preprocess import InputSpec, Normalisation, TensorSpec, as_array, first_unusable, is_tensor
from alight.data.views import View, common_inputs
from alight.engine.backends import Backend, DeviceValues, HeadValues, Integers, Reads, State
from alight.engine.backends.exported import exported_backend
from alight.engine.backends.members import Outputs, litert_member, onnx_member, remote_member
from alight.engine.manifest import Manifest, checksum
from alight.engine.settings import RunSettings
from alight.errors import BadFile, BadInput, Mismatch
from alight.files import CASCADE, CONFIG, MANIFEST, POLICY, PathLike, read_json, whole_folder, write_json
from alight.outputs import HeadOutputs

KIND, MEMBER = "Cascade", "member_"  # of the description, and before the number of a network's file
REMOTE = ("http://", "https://")
FILES = {".onnx": onnx_member, ".tflite": litert_member}
UNSAVED = ("network", "name", "settings")  # fields of a member that are written in a way of their own
NETWORKS = "a network of torch, a MultiExitModel, a folder that alight wrote, an .onnx or .tflite file, or a URL"


@dataclass(frozen=True)
class Member:
    """One network of a cascade, and how it reads the samples.

    >>> Member("small.onnx", normalisation=Normalisation(mean=(0.5,) * 3, std=(0.5,) * 3), crop=0.875).name
    ''
    """

    network: Any  # of torch, a MultiExitModel, a folder that alight wrote, an .onnx or .tflite file, or a URL
    name: str = ""  # of its exit; "": that of the file, or "network 1", "network 2", ...
    image_size: int | None = None  # height and width, where the network does not say
    normalisation: Normalisation | None = None  # of its images, where the network does not say
    crop: float = 1.0  # share of each side of an image that it sees, the middle
    bicubic: bool = False  # the filter that resizes its images, instead of the bilinear one
    skip_classes: int = 0  # before the first that counts, such as a background that other networks do not have
    probabilities: bool | None = None  # given instead of logits; None: find out; of a URL, logits
    settings: RunSettings = field(default_factory=RunSettings)  # device, dtype, threads, ..., if not the cascade's
    flops: float | None = None  # per sample, where they cannot be counted
    price: float | None = None  # in USD per sample
    token_variable: str | None = None  # of the environment, which holds the bearer token of a URL

    def __post_init__(self) -> None:
        if not 0 < self.crop <= 1:
            raise BadInput(f"crop {self.crop:g}: give the share of each side that the network sees, at most 1")
        if self.skip_classes < 0 or (self.image_size is not None and self.image_size < 1):
            raise BadInput(
                f"skip_classes {self.skip_classes}, image_size {self.image_size}: give 0 or more classes to leave out"
                " before the others, and 1 or more pixels"
            )


def cascade(
    networks: Sequence[Any], names: Sequence[str] = (), *, example: Any = None, image_size: int | None = None
) -> "Cascade":
    """Chain separate networks, from cheap to expensive, as one with an exit after each: nothing is trained.

    `record`, `measure_costs`, `plan`, `Predictor`, `export_model`, `alight serve`, ... take it as they take a network
    with exits. Networks that take the same inputs get them unchanged. Networks that take images of different sizes or
    normalisations get each its own from the same pixels, and networks that read texts make their own tokens.

    Args:
        networks: From cheap to expensive: of torch, with exits or without, folders that alight wrote, .onnx or .tflite
            files, URLs of the Open Inference Protocol, or a `Member` of these that says more.
        names: Of the networks.
        example: A batch as the networks of torch take it that do not say so themselves.
        image_size: Height and width at which pixels are kept; None: as large as a network needs them.

    >>> import torch
    >>> from torch import nn
    >>> small, large = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    >>> model = cascade([small, large], ["small", "large"], example=torch.zeros(1, 4))
    >>> model
    Cascade(small, large)
    """
    if isinstance(networks, str | Path | Member) or not isinstance(networks, Sequence):
        raise BadInput(f"a {type(networks).__name__} instead of networks: give a list, [small, large]")
    if not networks:
        raise BadInput("a cascade without networks: give at least one, better two")
    if names and len(names) != len(networks):
        raise BadInput(f"{len(names)} names for {len(networks)} networks: give one each")
    given = [each if isinstance(each, Member) else Member(each) for each in networks]
    called = [*names] or [_name(member, index) for index, member in enumerate(given)]
    if len({*called}) < len(called):
        raise BadInput(f"networks of a cascade named {', '.join(called)}: give each a name of its own")
    opened = [OpenMember(*each, example) for each in zip(given, called, strict=True)]
    return Cascade(opened, (image_size, image_size) if image_size else ())


def _name(member: Member, index: int) -> str:
    if member.name:
        return member.name
    is_place = isinstance(member.network, str | Path)
    return Path(str(member.network)).stem if is_place else f"network {index + 1}"


class OpenMember:
    """A network of a cascade that was opened: its exits, what it takes, and what runs it."""

    def __init__(self, member: Member, name: str, example: Any = None) -> None:
        self.member, self.name, self.network = member, name, _opened(member, example)
        self.is_torch = not hasattr(self.network, "run")
        self.spec = _completed(self.network.input_spec if self.is_torch else self.network.inputs, member, name)
        own = tuple(self.network.exits)
        self.exits = (name,) if len(own) == 1 else tuple(f"{name}: {each}" for each in own)
        self._by_threads: dict[int | None, Any] = {member.settings.threads: self.network}

    def backend(self, open_exits: Sequence[int], given: RunSettings, batch_size: int | None) -> Backend:
        """Return what runs it up to each of these exits, with its own settings, or the given ones where it has none."""
        own = {each.name: value for each in fields(RunSettings) if (value := getattr(self.member.settings, each.name))}
        settings = replace(given, **own | {"decide": "host"})  # which network is next, the host decides
        if self.is_torch:
            from alight.engine.backends.torch import TorchBackend  # PyTorch is imported where it runs

            return TorchBackend(self.network, open_exits, settings, batch_size)
        if settings.threads not in self._by_threads:
            self._by_threads[settings.threads] = _opened(replace(self.member, settings=settings))
        return self._by_threads[settings.threads]

    def fingerprint(self, given: RunSettings) -> str:
        """Return that of the network as it runs, and how it reads samples."""
        own = self.backend(range(len(self.exits)), given, None).fingerprint
        read = (self.member.crop, self.member.bicubic, self.member.skip_classes, self.spec.normalisation)
        said = "" if self.member.probabilities is None else f" probabilities={self.member.probabilities}"
        return f"{own} {read} {self.spec.tensors[:1]}{said}"


def _opened(member: Member, example: Any = None) -> Any:
    """Return a network with exits of torch, or a backend."""
    network, threads = member.network, member.settings.threads
    outputs = Outputs(member.skip_classes, member.probabilities, member.image_size)
    if isinstance(network, str) and network.startswith(REMOTE):
        return remote_member(network, member.token_variable, outputs)
    if isinstance(network, str | Path) and not Path(network).exists():
        raise FileNotFoundError(f"there is no {network}: give {NETWORKS}")
    if isinstance(network, str | Path) and (open_file := FILES.get(Path(network).suffix)):
        return open_file(network, threads, replace(outputs, normalised=member.normalisation is not None))
    if replace(outputs, image_size=None) != Outputs():
        raise BadInput("skip_classes and probabilities are for files and URLs: let the network itself give the logits")
    if isinstance(network, str | Path):
        return _opened_folder(Path(network), threads)
    if hasattr(network, "run") and hasattr(network, "with_reads"):
        return network
    try:
        from alight.engine.backends.torch import torch_member  # PyTorch is imported where it runs
    except ImportError as error:
        raise BadInput(f"a {type(network).__name__} is not a network: give {NETWORKS}") from error
    return torch_member(network, example, member.image_size, member.normalisation)


def _opened_folder(folder: Path, threads: int | None) -> Any:
    """Return the network of a folder that alight wrote, exported or saved."""
    if (folder / MANIFEST).is_file():
        return exported_backend(folder, Manifest.load(folder), RunSettings(threads=threads))
    if (folder / CONFIG).is_file():
        from alight.networks.store import load_model  # PyTorch is imported where it runs

        return load_model(folder)
    raise BadFile(folder, "it is not a network of a cascade", f"give {NETWORKS}")


def _completed(spec: InputSpec, member: Member, name: str) -> InputSpec:
    """Return what a network takes, with what its member says about it."""
    if None not in (member.normalisation, spec.normalisation) and member.normalisation != spec.normalisation:
        raise BadInput(f"{name} has {spec.normalisation}, and its member says {member.normalisation}: leave it out")
    if member.normalisation and spec.tensors and not spec.takes_floats:
        raise BadInput(f"{name} takes bytes, and its member says {member.normalisation}: leave it out")
    tensors, size = spec.tensors, member.image_size
    if size and len(tensors) == 1 and len(tensors[0].shape) == 4:
        if not tensors[0].fits((1, tensors[0].shape[1] or 0, size, size)):
            raise BadInput(f"{name} takes {tensors[0]}, and its member says {size} x {size}: leave image_size out")
        tensors = (TensorSpec(tensors[0].name, (*tensors[0].shape[:2], size, size), tensors[0].dtype),)
    return replace(spec, tensors=tensors, normalisation=spec.normalisation or member.normalisation)


class Cascade:
    """Networks in a chain, with an exit after each; `cascade` makes it.

    Args:
        members: Opened networks, from cheap to expensive.
        image_size: Height and width at which pixels are kept; empty: as large as a network needs them.

    >>> import torch
    >>> from torch import nn
    >>> model = cascade([nn.Linear(4, 3), nn.Linear(4, 3)], ["small", "large"], example=torch.zeros(1, 4))
    >>> model.exits, model.members_of_exits
    (('small', 'large'), (0, 1))
    """

    exits: tuple[str, ...]  # their names, earliest first
    input_spec: InputSpec  # what it takes

    def __init__(self, members: Sequence[OpenMember], image_size: Sequence[int] = ()) -> None:
        self.members = tuple(members)
        names, crops = [each.name for each in members], [each.member.crop for each in members]
        kind, self.input_spec = common_inputs([each.spec for each in members], crops, names, image_size)
        self.image_size = self.input_spec.image_shape[1:] if kind == "pixels" and self.input_spec.image_shape else ()
        self.views = [View(kind, each.spec, each.member.crop, each.member.bicubic) for each in members]
        self.exits = tuple(name for each in members for name in each.exits)
        self.classes, self.num_classes = self.input_spec.classes, self.input_spec.num_classes

    def __repr__(self) -> str:
        return f"Cascade({', '.join(each.name for each in self.members)})"

    @property
    def num_exits(self) -> int:
        """The number of exits."""
        return len(self.exits)

    @property
    def members_of_exits(self) -> tuple[int, ...]:
        """The network of each exit, by its place in the chain."""
        return tuple(index for index, each in enumerate(self.members) for _ in each.exits)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of all networks, with their own settings, and of how they read samples."""
        return self.fingerprint_with(RunSettings())

    def fingerprint_with(self, settings: RunSettings) -> str:
        """Return the fingerprint of all networks as they run with these settings."""
        return checksum("\n".join([*self.exits, *(each.fingerprint(settings) for each in self.members)]).encode())[:16]

    def take(self, members: Sequence[int]) -> "Cascade":
        """Return the cascade of these networks, in this order."""
        return Cascade([self.members[index] for index in members], self.image_size)

    def take_outputs(self, members: Sequence[int], outputs: HeadOutputs) -> HeadOutputs:
        """Return what a recording of this cascade says about these networks, as a recording of `take(members)`."""
        if outputs.fingerprint not in ("", self.fingerprint):
            raise Mismatch(
                f"the recording is of {outputs.fingerprint} and this cascade is {self.fingerprint}: record it"
            )
        owners = self.members_of_exits
        exits = [index for member in members for index, owner in enumerate(owners) if owner == member]
        return replace(outputs.at_exits(exits), fingerprint=outputs.fingerprint and self.take(members).fingerprint)

    def backend(
        self, open_exits: Sequence[int], settings: RunSettings | None = None, batch_size: int | None = None
    ) -> "CascadeBackend":
        """Return what runs it between these exits."""
        return CascadeBackend(self, open_exits, settings or RunSettings(), batch_size)

    def save(self, folder: PathLike) -> Path:
        """Write the cascade to a folder, whole or not at all, and return it; nothing in it can run code.

        >>> import tempfile, torch
        >>> from torch import nn
        >>> model = cascade([nn.Linear(4, 3), nn.Linear(4, 3)], example=torch.zeros(1, 4))
        >>> Cascade.load(model.save(f"{tempfile.mkdtemp()}/cascade")).fingerprint == model.fingerprint
        True
        """
        folder = check_cascade_folder(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as filling:
            described = [_saved(each, filling, index) for index, each in enumerate(self.members)]
            content = {"members": described, "image_size": self.image_size, "fingerprint": self.fingerprint}
            write_json(filling / CASCADE, KIND, content)
        return folder

    @classmethod
    def load(cls, folder: PathLike) -> "Cascade":
        """Return the cascade of a folder that `save` wrote; only networks of torch need torch."""
        members, image_size, fingerprint = saved_members(folder)
        made = cls([OpenMember(each, each.name) for each in members], image_size)
        if made.fingerprint != fingerprint:
            problem = f"a file of it was changed (fingerprint {made.fingerprint}, saved as {fingerprint})"
            raise BadFile(folder, problem, "save the cascade again")
        return made


def check_cascade_folder(folder: PathLike) -> Path:
    """Return the folder, if it holds nothing that a cascade in its place would delete, but another cascade."""
    path = Path(folder)
    if path.is_dir() and (held := sorted(each.name for each in path.iterdir())):
        others = [name for name in held if name not in (CASCADE, POLICY) and not name.startswith(MEMBER)]
        if CASCADE not in held or others:
            raise BadInput(
                f"{path} holds other files, such as {(others or held)[0]}, which would be lost: give a new folder"
            )
    return path


def saved_members(folder: PathLike) -> tuple[list[Member], list[int], str]:
    """Return the members of a folder that `Cascade.save` wrote, the size of kept pixels, and the fingerprint."""
    path = Path(folder) / CASCADE
    content = read_json(path, KIND)
    try:
        members = [_loaded(each, path.parent) for each in content["members"]]
        return members, content["image_size"], content["fingerprint"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadFile(path, f"its content is not usable ({error})", "save the cascade again") from error


def _saved(opened: OpenMember, folder: Path, index: int) -> dict[str, Any]:
    """Write the network of a member into a folder, and return all that is known about it as plain data."""
    member = opened.member
    network, place = member.network, f"{MEMBER}{index}"
    if isinstance(network, str) and network.startswith(REMOTE):
        place = network
    elif opened.is_torch:
        from alight.networks.store import save_model

        save_model(opened.network, folder / place, force=True)
    elif isinstance(network, str | Path):
        place += Path(network).suffix
        (shutil.copytree if Path(network).is_dir() else shutil.copy)(network, folder / place)
    else:
        raise BadInput(f"{opened.name} is a {type(network).__name__}, which has no file: give {NETWORKS}")
    plain = {each.name: getattr(member, each.name) for each in fields(member) if each.name not in UNSAVED}
    plain["normalisation"] = member.normalisation and asdict(member.normalisation)
    settings = {name: value for name, value in asdict(member.settings).items() if value}
    return {"name": opened.name, "network": place, "settings": settings, **plain}


def _loaded(content: dict[str, Any], folder: Path) -> Member:
    """Return a member of the plain data that `_saved` returned."""
    place = content.pop("network")
    if not place.startswith(REMOTE):
        if Path(place).name != place:  # nothing outside the folder
            raise ValueError(f"a network in {place!r}")
        place = folder / place
    content["normalisation"] = content["normalisation"] and Normalisation(**content["normalisation"])
    return Member(place, **content | {"settings": RunSettings(**content["settings"])})


class ExitPlace(NamedTuple):
    """Where a stage of a cascade is: its network, the first and the last of that one's own stages that it runs."""

    member: int
    first: int
    last: int
    leaves: bool  # is it the last open exit of its network?


class CascadeBackend:
    """The networks of a cascade up to each open exit; a network without an open exit is not run."""

    def __init__(
        self, network: Cascade, open_exits: Sequence[int], settings: RunSettings, batch_size: int | None = None
    ) -> None:
        if "device" in (settings.decide, *(each.member.settings.decide for each in network.members)):
            raise BadInput("the host decides which network of a cascade is next: leave decide out")
        self.network, self.settings, self.views = network, settings, network.views
        self.inputs, self.exits, self.open_exits = network.input_spec, network.exits, tuple(open_exits)
        self.backends: dict[int, Any] = {}
        self.places: list[ExitPlace] = []
        for member in sorted({network.members_of_exits[index] for index in self.open_exits}):
            self._add(member, batch_size)
        every = [*self.backends.values()]
        devices = {str(getattr(each, "device", "cpu")) for each in every}
        self._device = every[0] if len(devices) == 1 and every[0].in_flight else None  # the one GPU that runs all
        self.in_flight = every[0].in_flight if self._device else 0
        self.supports_single_sample = all(each.supports_single_sample for each in every)
        self.name = "cascade of " + ", ".join(dict.fromkeys(each.name for each in every))
        self.kept = len(self.inputs.tensors) or 1  # arrays that a sample is kept as
        asked = [str(network.members[place.member].member.network).startswith(REMOTE) for place in self.places]
        self.first_remote = [*asked, True].index(True)  # the open exit from which on calls may have to be paid for

    def _add(self, member: int, batch_size: int | None) -> None:
        """Add the backend of a network, and the places of its open exits."""
        owners = self.network.members_of_exits
        start = owners.index(member)
        own = [index - start for index in self.open_exits if owners[index] == member]
        backend = self.network.members[member].backend(own, self.settings, batch_size)
        stages = [backend.open_exits.index(index) for index in own]
        firsts = [0, *(stage + 1 for stage in stages)]
        last = len(stages) - 1
        self.places += [ExitPlace(member, firsts[at], stage, at == last) for at, stage in enumerate(stages)]
        self.backends[member] = backend

    @cached_property
    def fingerprint(self) -> str:
        return self.network.fingerprint_with(self.settings)

    def with_reads(self, reads: Sequence[Reads]) -> Self:
        other = copy.copy(self)
        other.backends = {}
        for member, backend in self.backends.items():
            own = [Reads(())] * len(backend.open_exits)
            for place, wanted in zip(self.places, reads, strict=True):
                if place.member == member:
                    own[place.last] = wanted
            other.backends[member] = backend.with_reads(own)
        return other

    def admit(self, inputs: State) -> State:
        if self._device is not None:
            from alight.engine.backends.torch.prepare import placed

            return placed(inputs, self._device.device, RunSettings())
        return fitted(inputs, self.inputs) if self.inputs.tensors else tuple(map(as_array, inputs))

    def pin(self, inputs: State) -> State:
        return inputs if self._device is None else self._device.pin(inputs)

    def run(self, stage: int, state: State) -> tuple[HeadValues | DeviceValues, State]:
        values, state = self._run("run", stage, state)
        if self.in_flight or isinstance(values, HeadValues):
            return values, state
        values.send()
        return values.get(), state

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        return self._run("run_one", stage, state)

    def _run(self, how: str, stage: int, state: State) -> tuple[Any, State]:
        place = self.places[stage]
        backend, kept, carried = self.backends[place.member], state[: self.kept], state[self.kept :]
        if place.first == 0:
            view = self.views[place.member]
            alone = view.kind == "same" and stage < len(self.places) - 1  # a network may write to its input
            carried = backend.admit(tuple(map(copy.copy, kept)) if alone else view(kept))
        for own in range(place.first, place.last + 1):
            values, carried = getattr(backend, how)(own, carried)
        if stage == len(self.places) - 1:
            return values, ()
        return values, kept if place.leaves else (*kept, *carried)

    def take(self, state: State, rows: Integers) -> State:
        return tuple(_taken(each, rows) for each in state)

    def allocate(self, size: int, like: State) -> State:
        return tuple(_allocated(size, each) for each in like)

    def move(self, source: State, rows: Integers, target: State, slots: Integers) -> None:
        for one, other in zip(source, target, strict=True):
            _moved(one, rows, other, slots)

    def owns(self, made: State, given: State) -> bool:
        if given or any(not is_tensor(each) and not each.flags.writeable for each in made):
            return False  # the samples are the caller's
        tensors = tuple(each for each in made if is_tensor(each))
        return not tensors or _rows().owns(tensors, ())

    def first_unusable(self, state: State) -> int | None:
        return None if self._device else first_unusable(state)

    def running(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for backend in self.backends.values():
            stack.enter_context(backend.running())
        return stack


def _rows() -> Any:
    from alight.engine.backends.torch import rows  # only where there are tensors

    return rows


def _taken(part: Any, rows: Integers) -> Any:
    return _rows().take((part,), rows)[0] if is_tensor(part) else part[rows]


def _allocated(size: int, like: Any) -> Any:
    return _rows().allocate(size, (like,))[0] if is_tensor(like) else np.empty((size, *like.shape[1:]), like.dtype)


def _moved(source: Any, rows: Integers, target: Any, slots: Integers) -> None:
    if is_tensor(source):
        _rows().move((source,), rows, (target,), slots)
    else:
        target[slots] = source[rows]
