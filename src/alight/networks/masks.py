"""Which input of a network says what is padding: known by its name, or stated."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import get_args

import torch
from torch import Tensor, nn

from alight.cutting.chain import is_close
from alight.cutting.running import Inputs, in_mode, same_bits
from alight.data.tokens import IDS, SEGMENTS, Meaning, mask_meaning
from alight.errors import BadInput

Batch = tuple[Tensor, ...]


class Masks:
    """The mask among the inputs of a network, and others that look like one."""

    place: int | None = None  # among the inputs
    meaning: Meaning | None = None  # of 1 or True

    def __init__(self, backbone: nn.Module, inputs: Inputs, stated: Mapping[str, Meaning] | None) -> None:
        names = argument_names(backbone, inputs)
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
        if self._network_reads(backbone, inputs, name) == [True, False]:
            other = "padding" if self.meaning == "tokens" else "tokens"
            raise BadInput(
                f"where {name!r} is 1 it means {other}, as the network reads it, not {self.meaning}: say so,"
                f" mask={{{name!r}: {other!r}}}"
            )

    def check_exits(
        self, network: nn.Module, inputs: Inputs, run: Callable[[Batch], list[Tensor]], exits: Sequence[str]
    ) -> None:
        """Raise if the logits of an exit depend on tokens that a mask hides from the network."""
        for mask in self.unknown if self.place is None else [[*self.inputs][self.place]]:
            reads = self._network_reads(network, inputs, mask)
            if len({*reads}) < 2:
                continue
            batches = self._batches(inputs, mask)
            pairs = zip(exits, run(batches[0]), run(batches[1 + reads.index(False)]), strict=True)
            if moved := [exit_name for exit_name, one, other in pairs if not is_close(one, other)]:
                raise BadInput(
                    f"the logits at {moved[0]!r} depend on tokens that {mask!r} hides from the network: carry the mask,"
                    f" and attach a head that reads it, with what 1 means, mask={{{mask!r}: ...}}"
                )

    def _network_reads(self, network: nn.Module, inputs: Inputs, mask: str) -> list[bool]:
        """Return whether the network reads tokens that the mask hides, and those that it shows; [] if unknown."""
        try:
            with in_mode(network, training=False):
                first, *others = [inputs.run(network, batch) for batch in self._batches(inputs, mask)]
                return [not same_bits(first, other) for other in others]
        except Exception:  # of a network that does not take such batches
            return []

    def _batches(self, inputs: Inputs, mask: str) -> list[Batch]:
        """Return a batch whose mask hides half of the tokens, the same with others of these, and with others shown."""
        place, batch = [*self.inputs].index(mask), [*inputs.of_size(2)]
        flags = batch[place]
        if flags.ndim != 2 or flags.shape[1] < 2 or flags.is_floating_point():
            raise BadInput(f"{mask!r} of shape {tuple(flags.shape)} is not one flag per token: give it so")
        hidden = torch.zeros_like(flags, dtype=torch.bool)
        hidden[:, flags.shape[1] // 2 :] = True
        batch[place] = (hidden if self.meaning == "padding" else ~hidden).to(flags.dtype)
        return [tuple(batch), *(_changed(batch, places, place) for places in (hidden, ~hidden))]

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


def masks_left_out(network: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the masks that the network's code takes besides inputs of these names."""
    return [name for name in signature(network.forward).parameters if mask_meaning(name) and name not in names]


def _is_flags(tensor: Tensor) -> bool:
    """Check for one whole number per sample and token, 0 or 1."""
    return tensor.ndim == 2 and not tensor.is_floating_point() and _is_binary(tensor)


def _is_binary(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def argument_names(backbone: nn.Module, inputs: Inputs) -> Sequence[str]:
    """Return the names of inputs; of several without names those that the network's code has for them."""
    if inputs.names or len(inputs.tensors) < 2:
        return tuple(inputs.arguments)
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in signature(backbone.forward).parameters.items() if each.kind in kinds]
    return tuple(names[: len(inputs.tensors)] if len(names) >= len(inputs.tensors) else inputs.arguments)
