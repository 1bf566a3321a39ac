"""A small network whose stages carry two tensors, exported once for all tests of a session."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import shared_folder
from torch import nn

from alight import Cascade, HeadOutputs, MultiExitModel, Normalisation, Predictor, cascade, export_model, fingerprint
from alight.engine.backends import Backend
from alight.engine.settings import RunSettings
from alight.export import exporting
from alight.networks.multi_exit import advance
from alight.policies.limits import Quota
from alight.policies.policy import Lottery, Mixture, Patience, Policy, Streak, Threshold

ALL_COSTS = (1.0, 2.5, 3.0, 6.0)
OPEN = (0, 1, 3)  # of four exits
COSTS = tuple(ALL_COSTS[index] for index in OPEN)


class Second(nn.Module):
    """A stage that carries a second tensor of each sample past the features."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, features, *others):
        carried = others[0] if others else features.mean(dim=(2, 3))
        return torch.relu(self.convolution(features)) + features, carried + features.amax(dim=(2, 3))


class Both(nn.Module):
    reads_everything = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, features, carried):
        return self.linear(torch.cat([features.mean(dim=(2, 3)), carried], dim=1))


@cache
def network() -> MultiExitModel:
    """Four exits, five classes by name, images of 3 x 6 x 7 that are normalised."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    model = MultiExitModel(
        [first, Second(), Second(), Second()],
        [pooled, Both(), Both(), Both()],
        classes=("ant", "bee", "cat", "dog", "eel"),
        normalisation=Normalisation((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)),
        recipe={"source": "stages", "example": {"shape": [2, 3, 6, 7], "dtype": "float32"}},
    ).eval()
    model.heads[1].linear.weight.data[:, :6] = model.heads[0][2].weight.data  # so that exits agree now and then
    with torch.no_grad():
        for linear, logits in zip(
            (model.heads[0][2], *(head.linear for head in model.heads[1:])), model(_images()), strict=True
        ):
            spread, mean = logits.std(dim=0).mean() / 2, logits.mean(dim=0)
            linear.weight /= spread  # every class is answered, and no score is always 1
            linear.bias.copy_((linear.bias - mean) / spread)
    return model


def _images() -> torch.Tensor:
    return torch.from_numpy(images())


@cache
def images() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(150, 3, 6, 7)).astype(np.float32)


@cache
def table() -> HeadOutputs:
    """What every exit says about the images."""
    model = network()  # made outside, or its weights could not be exported
    with torch.inference_mode():
        logits = [each.numpy() for each in model(torch.from_numpy(images()))]
    labels = np.random.default_rng(0).integers(5, size=len(images()))
    return HeadOutputs.from_logits(logits, labels, features=["max_probability", "negative_entropy", "logit_margin"])


def middle(exit_index: int, share: float) -> float:
    """A threshold halfway between two recorded scores, so that the last bits decide nothing."""
    scores = np.sort(table().scores[:, exit_index])
    place = int(share * (len(scores) - 2))
    return float((scores[place] + scores[place + 1]) / 2)


def policy(share: float = 0.6) -> Policy:
    """Thresholds that this share of samples does not reach, for the exits that are exported."""
    thresholds = tuple(middle(index, share) for index in OPEN[:-1])
    terms = {"open_exits": OPEN, "num_exits": 4, "costs": COSTS, "fingerprint": fingerprint(network())}
    return Threshold(thresholds, **terms)


@cache
def folder(open_exits: tuple[int, ...] = OPEN) -> Path:
    """The network, exported with these exits; with the policy above where they are its own; to be read only."""
    chosen = policy() if open_exits == OPEN else drawn("patience", np.random.default_rng(0), open_exits)

    def export(place: Path) -> None:
        with nullcontext() if open_exits == OPEN else older_exporter():
            export_model(network(), chosen, place / "exported")

    name = "exported_" + "_".join(map(str, open_exits))
    return shared_folder(Path(os.environ["SESSION_FOLDER"]), name, export) / "exported"


@contextmanager
def older_exporter() -> Iterator[Callable[..., None]]:
    """Export with the older exporter alone, which takes a tenth of a second; gives what stands for the newer one."""

    def refuse(*_):
        raise RuntimeError("no such operator")

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(exporting.WRITERS["onnx"], "export", refuse)
        yield refuse


def drawn(kind: str, rng: np.random.Generator, open_exits: tuple[int, ...]) -> Policy:
    """A policy of this kind over these exits, its numbers drawn; no threshold lies at a recorded score."""
    costs = tuple(ALL_COSTS[index] for index in open_exits)
    terms = {"costs": costs, "open_exits": open_exits, "num_exits": 4, "salt": int(rng.integers(2**53))}
    thresholds = tuple(middle(index, rng.uniform()) for index in open_exits[:-1])
    if kind == "threshold":
        return Threshold(thresholds, **terms)
    if kind == "patience":
        return Patience(int(rng.integers(0, 3)), **terms)
    if kind == "streak":
        return Streak(thresholds[0], int(rng.integers(1, 3)), **terms)
    if kind == "mixture":
        return Mixture(Patience(1, **terms), Threshold(thresholds, **terms), float(rng.uniform()), **terms)
    if kind == "quota":
        rates = tuple(rng.dirichlet(np.ones(len(open_exits))).tolist())
        return Quota(exit_rates=rates, budget=float(np.dot(rates, costs)) * 1.01, **terms)
    return Lottery(exit_rates=tuple(rng.dirichlet(np.ones(len(open_exits))).tolist()), **terms)


def compile_network(folder: Path) -> None:
    """Export the network with all exits open, its stages compiled ahead of time."""
    every_exit = drawn("patience", np.random.default_rng(0), (0, 1, 2, 3))
    export_model(network(), every_exit, folder, format="aoti", progress=False)


@cache
def compiled_stages(compiled: Path) -> Backend:
    """The stages of such a folder, which take long to load."""
    return Predictor.load(compiled, settings=RunSettings(threads=1), allow_compiled=True).backend


class InOneStage(nn.Module):
    """Several stages as one."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *carried):
        for stage in self.stages:
            carried = advance(stage, carried)
        return carried


@cache
def chain() -> Cascade:
    """The exits of the network as those of two: the first half in PyTorch, all of it in ONNX Runtime."""
    model = network()
    known = {"classes": model.classes, "normalisation": model.normalisation, "recipe": model.recipe}
    half = MultiExitModel([*model.stages[:2]], [*model.heads[:2]], **known)
    whole = MultiExitModel([InOneStage(model.stages[:3]), model.stages[3]], [*model.heads[2:]], **known).eval()

    def export(place: Path) -> None:
        with older_exporter():
            export_model(whole, Patience(1, costs=(1.0, 2.0)), place / "exported")

    place = shared_folder(Path(os.environ["SESSION_FOLDER"]), "second_of_a_cascade", export) / "exported"
    return cascade([half, place], ["half", "whole"])


def predictor(backend: str | Path, rule: Policy, **options) -> Predictor:
    """The network under a policy, run on one thread: "torch", "onnx", "cascade", or the folder of compiled stages."""
    settings = RunSettings(threads=1)
    if isinstance(backend, Path):
        return Predictor(compiled_stages(backend), rule, **options)
    if backend == "cascade":
        return Predictor(chain(), rule, settings=settings, **options)
    if backend == "torch":
        return Predictor(network(), rule, settings=settings, **options)
    return Predictor.load(folder(rule.open_exits), rule, settings=settings, **options)
