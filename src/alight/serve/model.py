"""The network that is served: loaded from a folder, run under each policy, its exits timed.

Every call into the engine is in this file: `load_served_model` and `ServedModel.decide`.
"""

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from alight.errors import BadInput, Mismatch
from alight.outputs import Decisions
from alight.policies.capped import capped
from alight.policies.paced import Pace
from alight.policies.policy import Policy, Threshold

MANIFEST = "manifest.json"  # in an exported folder alone
TOKENIZER = "tokenizer"  # the folder beside a network that reads text
ROUNDS = 3  # of which the fastest counts: the others are slowed down by noise of the machine
WEIGHT = 0.1  # of the latest batch in the running estimate of the machine's speed

Runner = Any  # a network under a policy: a `Predictor` or a `Deployed`, with policy, memory, with_policy and a call
Sample = np.ndarray | str  # a batch of one as the network takes it, or a text
Tokenize = Callable[[Sequence[str]], Mapping[str, np.ndarray]]  # texts to arrays, as long as the longest text


@dataclass(frozen=True)
class ServedModel:
    """A network ready to answer under each of its policies, and the inputs it takes."""

    runners: Mapping[str, Runner]  # by the name of the policy
    exits: tuple[str, ...]
    classes: tuple[str, ...]  # their names, where known
    shape: tuple[int | None, ...]  # of one array, where it takes arrays
    dtype: str
    image_shape: tuple[int, int, int] | None  # channels, height, width
    preprocess: Callable[[Any], np.ndarray]  # a picture as the network takes it, as a batch of one
    tokenize: Tokenize | None
    engine: str  # which library runs it

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies by their names."""
        return {name: runner.policy for name, runner in self.runners.items()}

    @property
    def input_kind(self) -> str:
        """What a request holds: "images", "texts" or "arrays"."""
        return "texts" if self.tokenize else "images" if self.image_shape else "arrays"

    def batch(self, samples: Sequence[Sample]) -> Any:
        """Return samples as one batch of inputs."""
        if self.tokenize:
            return self.tokenize([str(sample) for sample in samples])
        return np.concatenate(samples)

    def decide(
        self, name: str, samples: Sequence[Sample], first: int, limits: Sequence[int], pace: Pace | None
    ) -> tuple[Decisions, Pace | None]:
        """Decide samples, numbered from `first`, under a policy, and return the pace of its stream after them.

        A sample leaves at the latest at the open exit of its limit. `pace` is None where the policy keeps none.
        """
        runner = self.runners[name]
        numbers, last = np.arange(first, first + len(samples)), len(runner.policy.costs) - 1
        if min(limits) < last:
            bounds = {int(number): limit for number, limit in zip(numbers, limits, strict=True) if limit < last}
            runner = runner.with_policy(capped(runner.policy, bounds))
        if pace is None:
            return runner(self.batch(samples), numbers), None
        runner.memory = (pace,)
        decisions = runner(self.batch(samples), numbers)
        return decisions, runner.memory[0]


def load_served_model(
    folder: Path,
    policies: Mapping[str, Policy],
    *,
    tokenizer: Path | None = None,
    max_tokens: int = 128,
    threads: int | None = None,
    allow_mismatch: bool = False,
    switches: Mapping[str, Any] | None = None,
) -> ServedModel:
    """Load the network of a folder under each of these policies: an exported one without torch, others with it.

    `switches` are keyword arguments of `Predictor`; an exported network is refused with any of them.
    """
    check_policies(policies)
    common = {"num_threads": threads, "allow_mismatch": allow_mismatch}
    if (folder / MANIFEST).is_file():
        unused = {"tokenizer": tokenizer, **(switches or {})}
        if odd := [name for name, value in unused.items() if value and (name, value) != ("device", "cpu")]:
            raise BadInput(
                f"{folder} was exported, and {odd[0]} is for networks that were not: leave it out, or serve the network"
                " that was exported"
            )
        return _exported(folder, policies, max_tokens, common)
    return _saved(folder, policies, tokenizer or folder / TOKENIZER, max_tokens, {**common, **(switches or {})})


def check_policies(policies: Mapping[str, Policy]) -> None:
    """Check that there is a policy, that all have one unit, and that each of several has a budget of its own."""
    if not policies:
        raise BadInput("there is no policy to serve under: give at least one")
    units = sorted({policy.unit for policy in policies.values()})
    if len(units) > 1:
        raise BadInput(f"policies with costs in {' and '.join(map(repr, units))}: give policies of one unit")
    budgets = [policy.budget for policy in policies.values()]
    if len(policies) > 1 and (None in budgets or len(set(budgets)) < len(budgets)):
        raise BadInput(f"policies with budgets {budgets}: each of several needs a budget of its own")


def _saved(
    folder: Path, policies: Mapping[str, Policy], tokenizer: Path, max_tokens: int, settings: Mapping[str, Any]
) -> ServedModel:
    from alight.data.preprocess import Images, image_shape
    from alight.engine.predictor import Predictor
    from alight.networks.store import load_model

    model = load_model(folder)
    shape = image_shape(model)
    images = Images(model, False, "the request") if shape else None
    example = model.recipe.get("example", {}).get("shape")
    return ServedModel(
        _runners(policies, lambda policy: Predictor(model, policy, probabilities=policy.lens is None, **settings)),
        model.exits,
        model.classes,
        tuple(example[1:]) if isinstance(example, list) else (),
        "float32",
        shape,
        (lambda picture: images.stacked([picture]).numpy()) if images else _no_images,
        _tokenize(model.input_names, tokenizer, max_tokens) if model.input_names else None,
        "PyTorch",
    )


def _exported(
    folder: Path, policies: Mapping[str, Policy], max_tokens: int, settings: Mapping[str, Any]
) -> ServedModel:
    from alight.data.tokens import Texts
    from alight.deploy.inputs import admit
    from alight.export.manifest import AOTI, Manifest

    manifest = Manifest.load(folder)
    compiled = manifest.format == AOTI
    if compiled:
        from alight.export.packages import load_compiled as load
    else:
        from alight.deploy.folder import load

    first = manifest.inputs[0]
    return ServedModel(
        _runners(policies, lambda policy: load(folder, policy, probabilities=policy.lens is None, **settings)),
        manifest.exits,
        manifest.classes,
        () if manifest.input_names else first.shape[1:],
        first.dtype,
        manifest.image_shape,
        lambda picture: admit([picture], manifest)[0],
        Texts(folder, manifest, max_tokens) if manifest.input_names else None,
        "PyTorch, compiled ahead of time" if compiled else "onnxruntime",
    )


def _runners(policies: Mapping[str, Policy], load: Callable[[Policy], Any]) -> dict[str, Runner]:
    """Return a runner for each policy; policies that open the same exits share one network."""
    runners: dict[str, Runner] = {}
    shared: dict[tuple[Any, ...], Runner] = {}
    for name, policy in policies.items():
        key = (policy.open_exits, policy.inputs, policy.fingerprint)
        runners[name] = shared[key].with_policy(policy) if key in shared else load(policy)
        shared.setdefault(key, runners[name])
    return runners


def _tokenize(names: Sequence[str], folder: Path, max_tokens: int) -> Tokenize:
    """Return a function from texts to the inputs of these names, by the tokenizer in a folder."""
    if not folder.is_dir():
        raise BadInput(f"the network reads text, and there is no tokenizer in {folder}: name one (--tokenizer FOLDER)")
    try:
        auto = importlib.import_module("transformers").AutoTokenizer
    except ImportError as error:
        raise BadInput('texts need transformers to be read: pip install "alight[text]"') from error
    tokenizer = auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    length = min(max_tokens, tokenizer.model_max_length)

    def tokenize(texts: Sequence[str]) -> Mapping[str, np.ndarray]:
        encoded = tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors="np")
        return {name: encoded[name] for name in names}

    return tokenize


def _no_images(picture: Any) -> np.ndarray:
    raise Mismatch("the network does not take images")


class ExitTiming:
    """Seconds that a batch needs at most to reach each open exit: measured at the start, corrected while it runs.

    >>> timing = ExitTiming([0.001, 0.004], growth=2.0, max_batch=11)
    >>> timing.seconds(1, open_index=1), timing.seconds(6, open_index=0)
    (0.004, 0.0015)
    >>> timing.deepest(1, within=0.002)
    0
    """

    def __init__(self, single: Sequence[float], growth: float, max_batch: int) -> None:
        self._single, self._growth, self._max_batch = list(single), growth, max_batch
        self.slowdown = 1.0  # of the machine now against when it was measured
        self.per_sample = single[-1] * growth / max_batch  # seconds, a running average

    def seconds(self, count: int, open_index: int) -> float:
        """Return the seconds for so many samples to reach an open exit, if none leaves before."""
        larger = (count - 1) / max(self._max_batch - 1, 1)
        return self._single[open_index] * (1 + (self._growth - 1) * larger) * self.slowdown

    def deepest(self, count: int, within: float) -> int | None:
        """Return the last open exit that so many samples reach in time; None if they do not reach the first."""
        reached = [open_index for open_index in range(len(self._single)) if self.seconds(count, open_index) <= within]
        return reached[-1] if reached else None

    def update(self, count: int, open_index: int, seconds: float) -> None:
        """Take into account the seconds of a batch whose last samples left at this open exit."""
        ratio = seconds / self.seconds(count, open_index) * self.slowdown
        self.slowdown = max(1.0, (1 - WEIGHT) * self.slowdown + WEIGHT * ratio)
        self.per_sample = (1 - WEIGHT) * self.per_sample + WEIGHT * seconds / count


def measure_timings(model: ServedModel, sample: Sample, max_batch: int) -> dict[str, ExitTiming]:
    """Measure how long exits take under every policy; policies that open the same exits share a timing."""
    batch, single = model.batch([sample] * max_batch), model.batch([sample])
    timings: dict[tuple[int, ...], ExitTiming] = {}
    for runner in model.runners.values():
        policy = _to_the_end(runner.policy)
        if policy.open_exits not in timings:
            exits = [_seconds(runner, capped(policy, {0: last}), single, 1) for last in range(len(policy.costs))]
            growth = max(1.0, _seconds(runner, policy, batch, max_batch) / exits[-1])
            timings[policy.open_exits] = ExitTiming(np.maximum.accumulate(exits).tolist(), growth, max_batch)
    return {name: timings[policy.open_exits] for name, policy in model.policies.items()}


def _to_the_end(policy: Policy) -> Policy:
    """Return a policy with the inputs of this one under which every sample goes to the last exit."""
    carried: dict[str, Any] = {each.name: getattr(policy, each.name) for each in fields(Policy)}
    return Threshold(thresholds=(math.inf,) * (len(policy.costs) - 1), **carried)


def _seconds(runner: Runner, policy: Policy, inputs: Any, count: int) -> float:
    timed, seconds = runner.with_policy(policy), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        timed(inputs, np.arange(count))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
