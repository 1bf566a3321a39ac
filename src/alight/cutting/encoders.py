"""Text encoders of Hugging Face, cut between their layers with the attention mask carried.

Each stage is the network's own code: a copy of the network with the same parameters and a subset of its layers. Hidden
states come in where embeddings are expected, so masks are made exactly as the network makes them. Where calling the
layers directly, without the network around them, gives the same to the last bit, that is done, and what attention
reads of the mask is made once. It is faster for single texts.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from alight.cutting.running import MASK, in_mode
from alight.errors import BadInput

KINDS = {"bert", "roberta", "distilbert", "xlm-roberta", "camembert", "electra", "mpnet"}  # by model_type
ATTENTION_BIAS = "attention_bias"  # what attention reads of a mask, an attribute of it as long as it is carried whole


def is_text_encoder(model: nn.Module) -> bool:
    """Check whether this is a classifier on one of the encoders that are cut here."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    return kind in KINDS and hasattr(model, "base_model") and model.base_model is not model


def cut_text_encoder(
    model: nn.Module, after: Sequence[str], example: Any, *, direct: bool | None = None
) -> list["EncoderStage"]:
    """Return stages that carry hidden states (samples, tokens, width) and the attention mask (samples, tokens).

    `direct` says whether layers are called directly; by default that is tried on the example.
    """
    if isinstance(example, list | tuple):
        if len(example) > 2:
            raise BadInput(f"the example has {len(example)} inputs without names: give a dict of them by name")
        example = dict(zip(("input_ids", MASK), example, strict=False))
    names = tuple(example) if isinstance(example, Mapping) else ("input_ids",)
    if "input_ids" not in names:
        raise BadInput(f"the example has {list(names)}: give at least 'input_ids', best with 'attention_mask'")
    layers, number, indices = _layers_of(model, after)
    stages = []
    for index, (start, stop) in enumerate(pairwise([0, *(index + 1 for index in indices), number])):
        network = _with_layers(model, layers, range(start, stop), first=index == 0, last=index == len(after))
        stages.append(EncoderStage(network, layers, () if index else names, logits=index == len(after)))
    if direct is None:
        direct = bool(indices) and _is_same_directly(stages, example)
    for stage in stages:
        stage.direct = direct
    return stages


class EncoderStage(nn.Module):
    """A subset of the layers of a text encoder; the first stage with the embeddings, the last with the classifier."""

    network: nn.Module
    direct = False  # whether the layers are called without the network around them

    def __init__(self, network: nn.Module, layers: str, input_names: Sequence[str], *, logits: bool) -> None:
        super().__init__()
        object.__setattr__(self, "network", network)  # not as a submodule: its modules are ours
        self._modules, self._parameters, self._buffers = network._modules, network._parameters, network._buffers
        self.path, self.input_names, self.logits = tuple(layers.split(".")), tuple(input_names), logits

    def forward(self, *carried: Tensor) -> Any:
        """Return hidden states and the mask, or the logits at the end."""
        if self.direct:
            return self.directly(*carried)
        inputs = dict(zip(self.input_names or ("inputs_embeds", MASK), carried, strict=True))
        if self.logits:
            return self.network(**inputs, return_dict=True).logits
        hidden = self.network.base_model(**inputs, return_dict=True).last_hidden_state  # type: ignore[operator]
        return hidden, _mask(inputs.get(MASK), hidden)

    def directly(self, first: Tensor, *others: Tensor) -> Any:
        """Return what `forward` does, with the layers called without the network around them."""
        base: Any = self._modules[self.path[0]]
        hidden, carried = (first, others[0]) if not self.input_names else self._embedded(base, (first, *others))
        if hasattr(carried, ATTENTION_BIAS):  # made by the stage before, of the same mask
            mask, bias = carried, getattr(carried, ATTENTION_BIAS)
        else:
            from transformers.masking_utils import create_bidirectional_mask

            mask = _mask(carried, hidden).detach()  # our own, which nothing else changes
            bias = create_bidirectional_mask(base.config, hidden, carried)
            if not torch.compiler.is_compiling():
                setattr(mask, ATTENTION_BIAS, bias)
        layers: Any = self
        for name in self.path:
            layers = layers._modules[name]  # faster than by attribute
        for layer in layers._modules.values():
            output = layer(hidden, bias)
            hidden = output[0] if isinstance(output, tuple) else output
        return self._classified(base, hidden) if self.logits else (hidden, mask)

    def _classified(self, base: Any, hidden: Tensor) -> Any:
        """Return the logits as these encoders make them: of the first token, of a pooled one, or of all."""
        modules: Any = self._modules
        if "pre_classifier" in modules:  # DistilBERT's
            hidden = modules["pre_classifier"](hidden[:, 0]).relu()
        elif base._modules.get("pooler") is not None:
            hidden = base._modules["pooler"](hidden)
        return modules["classifier"](modules["dropout"](hidden) if "dropout" in modules else hidden)

    def _embedded(self, base: Any, carried: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return hidden states of the tokens, and the mask if there is one."""
        inputs = dict(zip(self.input_names, carried, strict=True))
        mask = inputs.pop(MASK, None)
        hidden: Tensor = base.embeddings(**inputs)
        return base.embeddings_project(hidden) if hasattr(base, "embeddings_project") else hidden, mask


def _mask(carried: Tensor | None, hidden: Tensor) -> Tensor:
    """Return the mask unchanged; all ones where there was none."""
    return torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device) if carried is None else carried


def _is_same_directly(stages: Sequence["EncoderStage"], example: Any) -> bool:
    """Check whether layers called directly give the same to the last bit, also for random texts of different length."""
    names, config = stages[0].input_names, stages[0].network.config
    inputs = tuple(example[name] for name in names) if isinstance(example, Mapping) else (example,)
    padded = tuple(_random_texts(name, tensor, config) for name, tensor in zip(names, inputs, strict=True))
    carried: Any
    directly: Any
    with in_mode(*stages, training=False):
        for carried in (inputs, padded):
            directly = carried
            for stage in stages:
                carried = stage(*carried)
                try:
                    directly = stage.directly(*directly)
                    same = torch.equal(*(each if stage.logits else each[0] for each in (carried, directly)))
                except (TypeError, AttributeError, KeyError, ImportError, RuntimeError):
                    return False  # its layers are called in another way, or there are no numbers to compare
                if not same:
                    return False
    return True


def _random_texts(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Return the input with random tokens in the place of the example's, and a mask without the first text's last."""
    if name == "input_ids":
        generator = torch.Generator().manual_seed(0)
        return torch.randint(config.vocab_size, tensor.shape, generator=generator).to(tensor)
    if name != MASK or tensor.shape[1] < 2:
        return tensor
    tensor = tensor.clone()
    tensor[0, -1] = 0
    return tensor


class HiddenStatesInput(nn.Module):
    """Hidden states in the place of embeddings."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states among all that embeddings are given."""
        return next(item for item in (*args, *kwargs.values()) if isinstance(item, Tensor) and item.ndim == 3)


class LayerSubset(nn.ModuleList):
    """A subset of the layers, under the names that they have among all."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(layers)

    def __getitem__(self, index: Any) -> Any:
        chosen = list(self._modules.items())[index]
        return LayerSubset(dict(chosen)) if isinstance(chosen, list) else chosen[1]


def _with_layers(model: nn.Module, layers: str, kept: range, *, first: bool, last: bool) -> nn.Module:
    """Return the network with a subset of its layers, embeddings only if first, and a classifier only if last."""
    prefix = str(model.base_model_prefix)
    *path, name = layers.removeprefix(f"{prefix}.").split(".")
    every = model.get_submodule(layers)
    child: nn.Module = LayerSubset({key: layer for key, layer in every.named_children() if int(key) in kept})
    base = model.get_submodule(prefix)
    for depth in range(len(path), 0, -1):
        child, name = _twin(base.get_submodule(".".join(path[:depth])), {name: child}), path[depth - 1]
    changes: dict[str, nn.Module | None] = {name: child}
    if not first:
        changes["embeddings"] = HiddenStatesInput()
        changes |= {"embeddings_project": nn.Identity()} if "embeddings_project" in base._modules else {}  # ELECTRA's
    if not last and "pooler" in base._modules:
        changes["pooler"] = None
    twin = _twin(base, changes)
    return _twin(model, {prefix: twin}, only=None if last else {prefix})


def _twin(module: nn.Module, changes: Mapping[str, nn.Module | None], only: set[str] | None = None) -> nn.Module:
    """Return a module with the same parameters and other children in some places."""
    twin: nn.Module = object.__new__(type(module))
    children = {name: child for name, child in module._modules.items() if only is None or name in only}
    twin.__dict__.update(module.__dict__, _modules={**children, **changes})
    return twin


def _layers_of(model: nn.Module, after: Sequence[str]) -> tuple[str, int, list[int]]:
    """Return the name of the list of layers, the longest one, how many it holds, and which of them are named."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        raise BadInput(f"a {type(model).__name__} without a list of layers: teach alight with register_cutter")
    layers, number = max(lists.items(), key=lambda pair: pair[1])
    known = {f"{layers}.{index}": index for index in range(number)}
    for name in after:
        if name not in known:
            raise BadInput(f"{name!r} is not a layer of this encoder: name layers, {layers}.0 to {layers}.{number - 1}")
    indices = [known[name] for name in after]
    if indices != sorted(indices):
        order = [f"{layers}.{index}" for index in sorted(indices)]
        raise BadInput(f"exits {list(after)} are out of order: the network runs them as {order}")
    return layers, number, indices
