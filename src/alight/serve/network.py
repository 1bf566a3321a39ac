"""What is served: a network of a folder, and a runner for every policy that may be in force."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from alight.errors import BadInput
from alight.outputs import Decisions
from alight.policies.policy import Memory, Policy

MANIFEST = "manifest.json"  # in a folder that was exported, and in no other
TOKENIZER = "tokenizer"  # the folder beside a network that reads text

Sample = np.ndarray | str  # a batch of one as the network takes it, or a text
Texts = Callable[[Sequence[str]], Mapping[str, np.ndarray]]  # texts as the network takes them, as long as the longest


class Runner(Protocol):
    """Something that decides under a policy: a `Predictor`, or a `Deployed`."""

    memory: Memory

    @property
    def policy(self) -> Policy:
        """The policy that decides."""

    def __call__(self, inputs: Any, samples: Any = None) -> Decisions:
        """What is decided about a batch."""

    def with_policy(self, policy: Policy) -> Self:
        """The same network under another policy."""


@dataclass(frozen=True)
class Network:
    """A network ready to answer, and what it takes."""

    runners: Mapping[str, Runner]  # by the name of the policy
    exits: tuple[str, ...]
    classes: tuple[str, ...]  # their names, where known
    shape: tuple[int | None, ...]  # of one array that it takes, where it takes one
    dtype: str
    image_shape: tuple[int, int, int] | None  # channels, height, width
    picture: Callable[[Any], np.ndarray]  # a picture as the network takes it, as a batch of one
    texts: Texts | None
    engine: str  # what runs it

    @property
    def kind(self) -> str:
        """What it is asked about: "images", "texts" or "arrays"."""
        return "texts" if self.texts else "images" if self.image_shape else "arrays"

    def joined(self, samples: Sequence[Sample]) -> Any:
        """Samples as one batch."""
        if self.texts:
            return self.texts([str(sample) for sample in samples])
        return np.concatenate(samples)


def load_network(
    folder: Path,
    policies: Mapping[str, Policy],
    *,
    tokenizer: Path | None = None,
    tokens: int = 128,
    threads: int | None = None,
    allow_mismatch: bool = False,
    **switches: Any,
) -> Network:
    """The network of a folder under each of these policies: one that was exported without torch, others with it."""
    check_policies(policies)
    given = {"num_threads": threads, "allow_mismatch": allow_mismatch, **switches}
    if (folder / MANIFEST).is_file():
        return _exported(folder, policies, tokens, tokenizer=tokenizer, **given)
    return _saved(folder, policies, tokenizer or folder / TOKENIZER, tokens, **given)


def check_policies(policies: Mapping[str, Policy]) -> None:
    """That there are some, of one unit, and that budgets tell them apart."""
    if not policies:
        raise BadInput("there is no policy to serve under: give at least one")
    units = sorted({policy.unit for policy in policies.values()})
    if len(units) > 1:
        raise BadInput(f"policies with costs in {' and '.join(map(repr, units))}: give those of one unit")
    budgets = [policy.budget for policy in policies.values()]
    if len(policies) > 1 and (None in budgets or len(set(budgets)) < len(budgets)):
        raise BadInput(f"policies with budgets {budgets}: each of several needs a budget of its own")


def _saved(folder: Path, policies: Mapping[str, Policy], words: Path, tokens: int, **switches: Any) -> Network:
    from alight.data.batches import as_inputs
    from alight.data.tokens import Texts as Tokens
    from alight.engine.predictor import Predictor
    from alight.networks.store import load_model

    model = load_model(folder)
    spec = model.input_spec

    def made(policy: Policy) -> Any:
        return Predictor(model, policy, probabilities=policy.keeps_predictions, **switches)

    return Network(
        _runners(policies, made),
        model.exits,
        model.classes,
        spec.tensors[0].shape[1:] if len(spec.tensors) == 1 and not spec.names else (),
        "float32",
        spec.image_shape,
        lambda picture: as_inputs(picture, spec)[0],
        Tokens(words, spec, tokens) if spec.names else None,
        "PyTorch",
    )


def _exported(
    folder: Path,
    policies: Mapping[str, Policy],
    tokens: int,
    *,
    num_threads: int | None,
    allow_mismatch: bool,
    **others: Any,
) -> Network:
    from alight.data.batches import as_inputs
    from alight.data.tokens import Texts as Tokens
    from alight.engine.manifest import AOTI, Manifest, exported_tokenizer

    if odd := [name for name, value in others.items() if value and (name, value) != ("device", "cpu")]:
        raise BadInput(
            f"{folder} was exported, and {odd[0]} is for networks that were not: leave it out, or serve the network"
            " that was exported"
        )
    manifest = Manifest.load(folder)
    compiled = manifest.format == AOTI
    if compiled:
        from alight.export.packages import load_compiled as load
    else:
        from alight.deploy.folder import load

    def made(policy: Policy) -> Any:
        chances = policy.keeps_predictions
        return load(folder, policy, probabilities=chances, num_threads=num_threads, allow_mismatch=allow_mismatch)

    first, spec = manifest.inputs[0], manifest.input_spec
    return Network(
        _runners(policies, made),
        manifest.exits,
        manifest.classes,
        () if manifest.input_names else first.shape[1:],
        first.dtype,
        spec.image_shape,
        lambda picture: as_inputs(picture, spec)[0],
        Tokens(exported_tokenizer(folder, manifest), spec, tokens) if spec.names else None,
        "PyTorch, compiled ahead of time" if compiled else "onnxruntime",
    )


def _runners(policies: Mapping[str, Policy], made: Callable[[Policy], Any]) -> dict[str, Runner]:
    """One runner for each policy; those that open the same exits share all but the policy."""
    runners: dict[str, Runner] = {}
    for name, policy in policies.items():
        for other in runners.values():
            same = (other.policy.open_exits, other.policy.inputs) == (policy.open_exits, policy.inputs)
            if same and other.policy.fingerprint == policy.fingerprint:
                runners[name] = other.with_policy(policy)
                break
        else:
            runners[name] = made(policy)
    return runners
