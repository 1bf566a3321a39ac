"""The network that is served: loaded from a folder, run under each policy, its exits timed.

`load_served_model` and `ServedModel.predictor` are the ways into the engine.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from alight.data.preprocess import InputSpec
from alight.data.tokens import TOKENIZER, Texts
from alight.engine.manifest import Manifest, exported_tokenizer
from alight.engine.predictor import Predictor, load_network
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.files import CASCADE, MANIFEST
from alight.policies import load_policy
from alight.policies.limits import capped
from alight.policies.paced import Pace
from alight.policies.policy import Policy, Threshold

ROUNDS = 3  # of which the fastest counts: the others are slowed down by noise of the machine
REMOTE_ROUNDS = 2  # where another server is asked, which may have to be paid for each call
WEIGHT = 0.1  # of the latest batch in the running estimate of the machine's speed

PICTURES = 16 * 2**20  # bytes of a request with image files, whose sizes are not known
NUMBER, LETTER = 24, 4  # bytes of a number in JSON and of a letter in UTF-8, at most
MOST_BYTES = 64 * 2**20  # of any request: send more in several

Sample = np.ndarray | Mapping[str, np.ndarray]  # a batch of one as the network takes it; of a text its tokens


@dataclass(frozen=True)
class ServedModel:
    """A network ready to answer under each of its policies, and the inputs it takes."""

    predictors: Mapping[str, Predictor]  # by the name of the policy
    spec: InputSpec
    tokenize: Texts | None  # of a network that reads text
    exits: tuple[str, ...]
    engine: str  # which library runs it
    tokenizing: Lock = field(default_factory=Lock)  # held by tokenizers that are not thread-safe

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies by their names."""
        return {name: predictor.policy for name, predictor in self.predictors.items()}

    @property
    def input_kind(self) -> str:
        """What a request holds: "images", "texts" or "arrays", also of images that cannot be normalised."""
        return "texts" if self.tokenize else "images" if self.spec.takes_pictures else "arrays"

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of one array; () where the network reads text or does not say."""
        return self.spec.tensors[0].shape[1:] if self.spec.tensors and not self.spec.names else ()

    @property
    def dtype(self) -> str:
        """The dtype of one array."""
        return self.spec.tensors[0].dtype if self.spec.tensors else "float32"

    def example(self) -> Sample:
        """Return a sample such as the network takes, to warm up with."""
        if self.tokenize:
            return self.tokenize(["a few words to begin with, about as many as people write when they ask something"])
        if not self.shape or None in self.shape:
            raise BadInput("the network does not say what it takes: build it with attach_heads, which keeps an example")
        return np.zeros((1, *(int(size or 0) for size in self.shape)), dtype=self.dtype)

    def reads_like(self, other: "ServedModel") -> bool:
        """Return whether samples that were read for another network are what this one takes."""
        return self.tokenize is None and self.spec.normalisation == other.spec.normalisation

    def largest_body(self, samples: int, letters: int) -> int:
        """Return the bytes that a request with so many samples needs at most, texts with so many letters each.

        >>> from alight.data.preprocess import TensorSpec
        >>> spec = InputSpec((TensorSpec("rows", (None, 100), "float32"),))
        >>> ServedModel({}, spec, None, (), "").largest_body(samples=32, letters=0)
        142336
        """
        numbers = math.prod(int(size or 1) for size in self.shape)
        content = samples * (LETTER * letters if self.tokenize else NUMBER * numbers)
        return min(MOST_BYTES, max(2**16 + content, PICTURES if self.input_kind == "images" else 0))

    def batch(self, samples: Sequence[Sample]) -> Any:
        """Return samples as one batch of inputs."""
        if self.tokenize is None:
            return np.concatenate([*map(np.asarray, samples)])
        columns = {name: [sample[name][0] for sample in samples] for name in self.spec.names}
        if len({len(row) for row in columns[self.spec.names[0]]}) == 1:
            return {name: np.stack(rows) for name, rows in columns.items()}
        return self.tokenize.pad(columns)

    def predictor(self, name: str, numbers: Sequence[int], limits: Sequence[int], pace: Pace | None) -> Predictor:
        """Return what answers samples of these numbers, each at the latest at the open exit of its limit.

        `pace` is that of the stream before them, None where the policy keeps none; its memory has the pace afterwards.
        """
        predictor = self.predictors[name]
        last = len(predictor.policy.costs) - 1
        if min(limits) < last:
            bounds = {number: limit for number, limit in zip(numbers, limits, strict=True) if limit < last}
            predictor = predictor.with_policy(capped(predictor.policy, bounds))
        if pace is not None:
            predictor.memory = (pace,)
        return predictor

    def full_answers(self, name: str, samples: Sequence[Sample]) -> np.ndarray:
        """Return the classes of samples that run to the last open exit of a policy, whatever it decides."""
        predictor = self.predictors[name]
        return predictor.with_policy(to_the_end(predictor.policy))(self.batch(samples)).predictions


def load_policies(paths: Sequence[Path]) -> dict[str, Policy]:
    """Load the policies of these files by their names, without .json."""
    policies = {path.stem: load_policy(path) for path in paths}
    if len(policies) < len(paths):
        raise BadInput(f"{len(paths)} policies have {len(policies)} names: give each file a name of its own")
    return policies


def load_served_model(
    folder: Path,
    policies: Mapping[str, Policy],
    *,
    tokenizer: Path | None = None,
    max_tokens: int = 128,
    settings: RunSettings | None = None,
    allow_mismatch: bool = False,
) -> ServedModel:
    """Load the network of a folder under each of these policies: an exported one without torch, others with it.

    Policies that open the same exits share one network.
    """
    check_policies(policies)
    exported = (folder / MANIFEST).is_file()
    if exported and tokenizer:
        raise BadInput(f"{folder} was exported, and tokenizer is for networks that were not: leave it out")
    if exported:
        load: Callable[..., Predictor] = partial(Predictor.load, folder, allow_compiled=True)
    else:
        load = partial(Predictor, load_network(folder))
    terms: dict[str, Any] = {"settings": settings, "allow_mismatch": allow_mismatch}
    predictors: dict[str, Predictor] = {}
    shared: dict[tuple[Any, ...], Predictor] = {}
    for name, policy in policies.items():
        key = (policy.open_exits, policy.inputs, policy.fingerprint)
        terms["probabilities"] = policy.keeps_answers
        predictors[name] = shared[key].with_policy(policy) if key in shared else load(policy, **terms)
        shared.setdefault(key, predictors[name])
    backend = next(iter(shared.values())).backend
    words = None
    if backend.inputs.names:
        words = exported_tokenizer(folder, Manifest.load(folder)) if exported else tokenizer or folder / TOKENIZER
        words = backend.inputs.tokenizer if (folder / CASCADE).is_file() else words
    texts = Texts(words, backend.inputs, max_tokens) if words else None
    return ServedModel(predictors, backend.inputs, texts, backend.exits, backend.name)


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


def to_the_end(policy: Policy) -> Policy:
    """Return the policy under which every sample goes to the last open exit of this one."""
    return Threshold(thresholds=(math.inf,) * (len(policy.costs) - 1), **policy.terms())


def measure_timings(model: ServedModel, max_batch: int) -> dict[str, ExitTiming]:
    """Measure how long exits take under every policy; policies that open the same exits share a timing."""
    sample = model.example()
    single = model.batch([sample])
    timings: dict[tuple[int, ...], ExitTiming] = {}
    for predictor in model.predictors.values():
        policy = to_the_end(predictor.policy)
        if policy.open_exits not in timings:
            costs = policy.costs
            first_remote = getattr(predictor.backend, "first_remote", len(costs))
            rounds = [ROUNDS if last < first_remote else REMOTE_ROUNDS for last in range(len(costs))]
            count = max_batch if first_remote == len(costs) else min(2, max_batch)
            exits = [
                _seconds(predictor, capped(policy, {0: last}), single, 1, rounds[last]) for last in range(len(costs))
            ]
            slower = _seconds(predictor, policy, model.batch([sample] * count), count, rounds[-1]) / exits[-1] - 1
            growth = max(1.0, 1 + slower * (max_batch - 1) / max(count - 1, 1))
            timings[policy.open_exits] = ExitTiming(np.maximum.accumulate(exits).tolist(), growth, max_batch)
    return {name: timings[policy.open_exits] for name, policy in model.policies.items()}


def _seconds(predictor: Predictor, policy: Policy, inputs: Any, count: int, rounds: int) -> float:
    timed, seconds = predictor.with_policy(policy), []
    for _ in range(rounds):
        start = time.perf_counter()
        timed(inputs, np.arange(count))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
