"""Which input of a network says what is padding: known by its name, or stated."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import get_args

import torch
from torch import Tensor, nn

from alight.cutting.proof import is_close
from alight.cutting.running import Inputs, in_mode
from alight.data.tokens import IDS, SEGMENTS, Meaning, mask_meaning
from alight.errors import BadInput


class Masks:
    """The mask among the inputs of a network, and others that look like one."""

    place: int | None = None  # among the inputs
    meaning: Meaning | None = None  # of 1 or True

    def __init__(self, backbone: nn.Module, inputs: Inputs, stated: Mapping[str, Meaning] | None) -> None:
        names = inputs.names or _argument_names(backbone, inputs)
        self.inputs = dict(zip(names, inputs.tensors, strict=True))
        self.unknown: list[str] = []  # inputs that may be masks
        known = {name: meaning for name in names if (meaning := mask_meaning(name))} if stated is None else dict(stated)
        self._check(known)
        for name, meaning in known.items():
            self.place, self.meaning = names.index(name), meaning
        if stated is None and not known and len(names) > 1:
            self.unknown = [name for name in names if name not in (IDS, SEGMENTS) and _is_flags(self.inputs[name])]
        inputs.mask = self.place
        if self.place is not None:
            self._check_meaning(backbone, inputs, names[self.place])

    def _check_meaning(self, backbone: nn.Module, inputs: Inputs, name: str) -> None:
        """Raise if the network reads what the mask hides, and does not read what it shows."""
        mask = inputs.tensors[self.place or 0]
        if mask.ndim != 2 or mask.shape[1] < 2 or mask.is_floating_point():
            return
        batch = list(inputs.of_size(2))
        hidden = torch.zeros_like(batch[self.place or 0], dtype=torch.bool)
        hidden[:, mask.shape[1] // 2 :] = True
        batch[self.place or 0] = (hidden if self.meaning == "padding" else ~hidden).to(mask.dtype)
        with in_mode(backbone, training=False):
            try:
                expected = inputs.run(backbone, tuple(batch))
                reads = [
                    not is_close(inputs.run(backbone, _changed(batch, places, self.place or 0)), expected)
                    for places in (hidden, ~hidden)
                ]
            except Exception:  # of a network that does not take such a batch
                return
        if reads == [True, False]:
            other = "padding" if self.meaning == "tokens" else "tokens"
            raise BadInput(
                f"where {name!r} is 1 it means {other}, as the network reads it, not {self.meaning}: say so,"
                f" mask={{{name!r}: {other!r}}}"
            )

    def of(self, features: Tensor, others: Sequence[Tensor]) -> Meaning | None:
        """Return what 1 means in the mask that is carried right behind tokens, None where there is none."""
        if self.place is None or not others or features.ndim != 3:
            return None
        given = [*self.inputs.values()][self.place]
        return self.meaning if given.shape == features.shape[:2] and torch.equal(given, others[0]) else None

    def _check(self, known: Mapping[str, Meaning]) -> None:
        """Raise unless there is at most one mask, among the inputs, of a known meaning that its content has."""
        if len(known) > 1 or not known.keys() <= self.inputs.keys() or not {*known.values()} <= {*get_args(Meaning)}:
            raise BadInput(
                f"masks {dict(known)} of inputs {list(self.inputs)}: say which is the one of the features, and what 1"
                " means in it, as in mask={'pad': 'padding'} or mask={'valid': 'tokens'}"
            )
        for name in known:
            given = self.inputs[name]
            if known[name] == "tokens" and given.is_floating_point() and not (_is_binary(given) and given.any()):
                raise BadInput(f"{name!r} is not 1 for tokens and 0 for padding: give it so, or say mask={{}}")


def _changed(batch: Sequence[Tensor], places: Tensor, mask: int) -> tuple[Tensor, ...]:
    """Return inputs that differ at some tokens."""
    changed = [tensor.clone() for tensor in batch]
    for index, tensor in enumerate(changed):
        if index != mask and tensor.shape[:2] == places.shape:
            other = tensor.roll(1, 0) if not tensor.is_floating_point() else tensor + 1
            tensor[places] = other[places]
    return tuple(changed)


def _is_flags(tensor: Tensor) -> bool:
    """Check for one whole number per sample and token, 0 or 1."""
    return tensor.ndim == 2 and not tensor.is_floating_point() and _is_binary(tensor)


def _is_binary(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _argument_names(backbone: nn.Module, inputs: Inputs) -> Sequence[str]:
    """Return the names that the network's code has for inputs that are given without any."""
    if len(inputs.tensors) < 2:
        return tuple(inputs.arguments)
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in signature(backbone.forward).parameters.items() if each.kind in kinds]
    return tuple(names[: len(inputs.tensors)] if len(names) >= len(inputs.tensors) else inputs.arguments)
