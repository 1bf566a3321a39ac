"""Text encoders of Hugging Face, cut between their layers with the attention mask carried.

Each stage is the network's own code: the network once more, with the same parameters, of which only some layers are
left. Hidden states come in where embeddings are expected, so masks are made exactly as the network makes them. Where
calling the layers straight, without the network around them, gives the same to the last bit, that is done, and what
attention sees of the mask is made once. It is quicker for single texts.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from alight.cutting.modes import in_mode
from alight.errors import BadInput

KINDS = {
    "bert",
    "roberta",
    "distilbert",
    "xlm-roberta",
    "camembert",
    "electra",
    "mpnet",
}  # by their configuration's model_type
MASK = "attention_mask"
SEEN = "seen_by_attention"  # what a mask carries along as long as it is carried whole


def is_text_encoder(model: nn.Module) -> bool:
    """Is this a classifier on one of the encoders that are cut here?"""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    return kind in KINDS and hasattr(model, "base_model") and model.base_model is not model


def cut_text_encoder(model: nn.Module, after: Sequence[str], example: Any) -> Sequence[nn.Module]:
    """Stages that carry hidden states (samples, tokens, width) and the attention mask (samples, tokens)."""
    names = tuple(example) if isinstance(example, Mapping) else ("input_ids",)
    if "input_ids" not in names:
        raise BadInput(f"the example has {list(names)}: give at least 'input_ids', best with 'attention_mask'")
    layers, number = _layers_of(model)
    indices = [_index(layers, number, name) for name in after]
    if indices != sorted(indices):
        found = [f"{layers}.{index}" for index in sorted(indices)]
        raise BadInput(f"exits {list(after)} are out of order: the network runs them as {found}")
    stages: list[EncoderStage] = []
    for index, (start, stop) in enumerate(pairwise([0, *(index + 1 for index in indices), number])):
        part = _part(model, layers, range(start, stop), first=index == 0, last=index == len(after))
        stages.append(EncoderStage(part, layers, () if index else names, logits=index == len(after)))
    for stage in stages if indices and _same_straight(stages, example) else ():
        stage.straight = True
    return stages


class EncoderStage(nn.Module):
    """Some layers of a text encoder; the first with the embeddings, the last with the classifier."""

    network: nn.Module
    straight = False  # whether the layers are called without the network around them

    def __init__(self, network: nn.Module, layers: str, input_names: Sequence[str], *, logits: bool) -> None:
        super().__init__()
        object.__setattr__(
            self, "network", network
        )  # unregistered: its parts are ours, under the names they have there
        self._modules, self._parameters, self._buffers = network._modules, network._parameters, network._buffers
        self.way, self.input_names, self.logits = tuple(layers.split(".")), tuple(input_names), logits

    def forward(self, *carried: Tensor) -> Any:
        """Hidden states and the mask, or the logits at the end."""
        if self.straight:
            return self._straight(*carried)
        inputs = dict(zip(self.input_names or ("inputs_embeds", MASK), carried, strict=True))
        if self.logits:
            return self.network(**inputs, return_dict=True).logits
        hidden = self.network.base_model(**inputs, return_dict=True).last_hidden_state  # type: ignore[operator]
        return hidden, _mask(inputs.get(MASK), hidden)

    def _straight(self, first: Tensor, *others: Tensor) -> Any:
        base: Any = self._modules[self.way[0]]
        hidden, given = (first, others[0]) if not self.input_names else self._embedded(base, (first, *others))
        made_before = hasattr(given, SEEN)  # by the stage before, of the same mask
        mask, seen = (given, getattr(given, SEEN)) if made_before else _looked_at(base.config, given, hidden)
        layers: Any = self
        for name in self.way:
            layers = layers._modules[name]  # quicker than by attribute
        for layer in layers._modules.values():
            made = layer(hidden, seen)
            hidden = made[0] if isinstance(made, tuple) else made
        return self._classified(base, hidden) if self.logits else (hidden, mask)

    def _classified(self, base: Any, hidden: Tensor) -> Any:
        """The logits of hidden states, as these encoders make them: of the first token, of a pooled one, or of all."""
        parts: Any = self._modules
        if "pre_classifier" in parts:  # DistilBERT's
            hidden = parts["pre_classifier"](hidden[:, 0]).relu()
        elif base._modules.get("pooler") is not None:
            hidden = base._modules["pooler"](hidden)
        return parts["classifier"](parts["dropout"](hidden) if "dropout" in parts else hidden)

    def _embedded(self, base: Any, carried: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Hidden states of the tokens, and the mask if there is one."""
        inputs = dict(zip(self.input_names, carried, strict=True))
        mask = inputs.pop(MASK, None)
        hidden: Tensor = base.embeddings(**inputs)
        return base.embeddings_project(hidden) if hasattr(base, "embeddings_project") else hidden, mask


def _looked_at(config: Any, given: Tensor | None, hidden: Tensor) -> tuple[Tensor, Any]:
    """A mask of our own, which nobody else changes, and what attention sees of it, which it carries along."""
    from transformers.masking_utils import create_bidirectional_mask

    mask, seen = _mask(given, hidden).detach(), create_bidirectional_mask(config, hidden, given)
    if not torch.compiler.is_compiling():
        setattr(mask, SEEN, seen)
    return mask, seen


def _mask(given: Tensor | None, hidden: Tensor) -> Tensor:
    """The mask as it came; all ones where there was none."""
    return torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device) if given is None else given


def _same_straight(stages: Sequence["EncoderStage"], example: Any) -> bool:
    """Whether layers called straight give what the network gives, to the last bit, also for texts of unlike length."""
    names = stages[0].input_names
    given = tuple(example[name] for name in names) if isinstance(example, Mapping) else (example,)
    padded = tuple(_last_hidden(*pair) for pair in zip(names, given, strict=True))
    whole: Any
    straight: Any
    with in_mode(*stages, training=False):
        for whole in (given, padded):
            straight = whole
            for stage in stages:
                whole = stage(*whole)
                try:
                    straight = stage._straight(*straight)
                    same = torch.equal(*(each if stage.logits else each[0] for each in (whole, straight)))
                except (TypeError, AttributeError, KeyError, ImportError, RuntimeError):
                    return False  # another way of calling its layers, or no numbers to compare
                if not same:
                    return False
    return True


def _last_hidden(name: str, tensor: Tensor) -> Tensor:
    """The input, its mask without the last token of the first text."""
    if name != MASK or tensor.shape[1] < 2:
        return tensor
    tensor = tensor.clone()
    tensor[0, -1] = 0
    return tensor


class Given(nn.Module):
    """Hidden states in the place of embeddings."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden states among all that embeddings are given."""
        return next(item for item in (*args, *kwargs.values()) if isinstance(item, Tensor) and item.ndim == 3)


class Some(nn.ModuleList):
    """Some of the layers, under the names that they have among all."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)

    def __getitem__(self, index: Any) -> Any:
        chosen = list(self._modules.items())[index]
        return Some(dict(chosen)) if isinstance(chosen, list) else chosen[1]


def _part(model: nn.Module, layers: str, kept: range, *, first: bool, last: bool) -> nn.Module:
    """The network with only some layers, without embeddings unless first, without anything behind unless last."""
    prefix = model.base_model_prefix
    *way, name = layers.removeprefix(f"{prefix}.").split(".")
    every = model.get_submodule(layers)
    child: nn.Module = Some({key: layer for key, layer in every.named_children() if int(key) in kept})
    base = model.get_submodule(prefix)  # type: ignore[arg-type]
    for depth in range(len(way), 0, -1):
        child, name = _twin(base.get_submodule(".".join(way[:depth])), {name: child}), way[depth - 1]
    changes: dict[str, nn.Module | None] = {name: child}
    if not first:
        changes["embeddings"] = Given()
        changes |= {"embeddings_project": nn.Identity()} if "embeddings_project" in base._modules else {}  # ELECTRA's
    if not last and "pooler" in base._modules:
        changes["pooler"] = None
    twin = _twin(base, changes)
    return _twin(model, {prefix: twin}, only=None if last else {prefix})  # type: ignore[dict-item]


def _twin(module: nn.Module, changes: Mapping[str, nn.Module | None], only: set[Any] | None = None) -> nn.Module:
    """A module with the same parameters and other children in some places."""
    twin: nn.Module = object.__new__(type(module))
    children = {name: child for name, child in module._modules.items() if only is None or name in only}
    twin.__dict__.update(module.__dict__, _modules={**children, **changes})
    return twin


def _layers_of(model: nn.Module) -> tuple[str, int]:
    """The name of the list of layers, the longest one of the network, and how many it holds."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        raise BadInput(f"a {type(model).__name__} without a list of layers: teach alight with register_cutter")
    return max(lists.items(), key=lambda pair: pair[1])


def _index(layers: str, number: int, name: str) -> int:
    start, _, index = name.rpartition(".")
    if start != layers or not index.isdigit():
        raise BadInput(f"{name!r} is no layer of this encoder: name layers, {layers}.0 to {layers}.{number - 1}")
    return int(index)
