"""Data of a fit: what a module takes, from the first samples, and validation samples that are timed and shown."""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from alight.data.batches import Batch, as_batch, as_tensor, first_batch, in_batches, length_of
from alight.data.columns import are_image_files, depth, is_array, is_path
from alight.data.labels import UnknownClasses
from alight.data.preprocess import UNKNOWN, InputSpec, Normalisation, TensorSpec, as_array, check_shapes, is_picture
from alight.data.samples import declared_classes, is_texts, picture
from alight.data.sources import open_data
from alight.data.tokens import IDS, MASK
from alight.display import listed
from alight.errors import AlightError, BadInput

CHANNELS = (1, 3)  # of pictures
KEPT = 256  # validation samples that are timed and shown, at least


def classes_in(data: Any, split: str | None = None) -> tuple[Sequence[str], int | None]:
    """Return the names of the classes in the order that labels are numbered in, and how many there are, if known.

    >>> classes_in((["a", "b", "c"], ["no", "yes", "no"])), classes_in((np.zeros((3, 2)), [0, 1, 2]))
    ((('no', 'yes'), 2), ((), 3))
    """
    try:
        samples = open_data(data, InputSpec(), split)
    except UnknownClasses as error:
        return error.names, len(error.names)
    except AlightError:  # what the network takes is not known yet
        return (), None
    features = getattr(data, "features", None) or {}  # of a data set of Hugging Face
    declared = next((each.names for each in features.values() if hasattr(each, "names")), None)
    names = tuple(declared or declared_classes(getattr(data, "dataset", data)))
    labels: Any = getattr(samples, "labels", None)
    if names or not is_array(labels) or depth(labels) != 1 or not len(labels) or "float" in str(labels.dtype):
        return names, len(names) or None
    return (), int(labels.max()) + 1


def _normalisation(network: Any, preprocess: Any) -> Normalisation | None:
    """Return how a module normalises images: as given, or as timm knows."""
    if isinstance(preprocess, Normalisation):
        return preprocess
    known = getattr(network, "pretrained_cfg", None)
    if not isinstance(known, Mapping) or "mean" not in known or "std" not in known:
        return None
    fits = _channels(network) in (None, len(known["mean"]))  # it does not where built with in_chans=1
    return Normalisation(known["mean"], known["std"]) if fits else None


def example_for(
    network: Any, data: Any, preprocess: Any, image_size: int | None = None
) -> tuple[Any, Normalisation | None]:
    """Return a batch of two as a module takes it, where the module is, and how it normalises images.

    Floats are zeros, tokens are those of the first samples. Pictures and bytes are brought to `image_size`.
    """
    import torch

    parameters = inspect.signature(network.forward).parameters
    names = _inputs_by_name([*parameters], data)
    if names:
        _check_no_size(image_size)
        tokenizer = None if isinstance(preprocess, Normalisation) else preprocess
        spec = InputSpec(names=names, tokenizer=tokenizer)
        example: Any = dict(zip(names, map(as_tensor, first_batch(data, spec, labels=False).inputs), strict=True))
        normalisation = None
    else:
        normalisation = _normalisation(network, preprocess)
        inputs = _first_inputs(data)
        if isinstance(inputs, tuple) and len(inputs) == 2 and len(parameters) == 1:
            inputs = inputs[0]  # the other are labels of several axes
        example, normalisation = _image_or_array(network, inputs, normalisation, image_size)
    weight = next(network.parameters(), torch.empty(0))

    def placed(part: Any) -> Any:
        check_single(part)
        cleared = torch.zeros(part.shape, dtype=torch.float32) if part.is_floating_point() else part
        return cleared.to(weight.device)

    if isinstance(example, dict):
        return {name: placed(part) for name, part in example.items()}, normalisation
    return tuple(map(placed, example)) if isinstance(example, tuple) else placed(example), normalisation


def _inputs_by_name(parameters: Sequence[str], data: Any) -> tuple[str, ...]:
    """Return which inputs the data has by name, or a tokenizer gives; none where a module takes tensors in order."""
    columns = _columns(data)
    found = tuple(name for name in parameters if name in columns)
    return found or tuple(name for name in (IDS, MASK) if IDS in parameters and name in parameters)


def _columns(data: Any) -> Sequence[str]:
    """Return the names in a dict, a table, or the first of several dicts; none of data without names."""
    if isinstance(data, Mapping):
        return [*data]
    for names in ("column_names", "columns"):  # of Hugging Face, and of pandas
        if hasattr(data, names):
            return [*map(str, getattr(data, names))]
    if is_path(data) or is_array(data) or not isinstance(data, Iterable):
        return ()
    first = data[0] if isinstance(data, tuple) and data else next(iter(data), None)
    return [*first] if isinstance(first, Mapping) else ()


def _first_inputs(data: Any) -> Any:
    """Return the inputs of the first samples, unchanged: an array, pictures, or several arrays."""
    first = data[0] if isinstance(data, list) and data else None
    if isinstance(first, tuple) and first and is_array(first[0]) and depth(first[-1]) == 0:
        return [first[0]]  # pairs of an array and a label
    samples = open_data(data, InputSpec(), labels=False)
    if samples is None:
        inputs = first_batch(data, InputSpec(), labels=False).inputs
        return inputs if len(inputs) > 1 else inputs[0]
    if not len(samples):
        raise BadInput("the data have no samples: give at least one")
    return samples.__getitems__(range(min(2, len(samples))))[0]


def _check_no_size(image_size: int | None) -> None:
    if image_size is not None:
        raise BadInput(
            f"image_size={image_size} is for pictures and bytes, and the data are neither: leave it out, since arrays"
            " have their own size"
        )


def _image_or_array(
    network: Any, inputs: Any, normalisation: Normalisation | None, image_size: int | None
) -> tuple[Any, Normalisation | None]:
    """Return two samples such as a module takes them, and the normalisation where they are pictures or bytes."""
    import torch

    if isinstance(inputs, tuple):
        _check_no_size(image_size)
        return tuple(as_tensor(each)[:2] for each in inputs), None
    if is_texts(inputs) and not are_image_files(inputs):
        raise BadInput(
            f"the data are texts, such as {inputs[0]!r}, and the network takes no {IDS!r}: give a network that reads"
            " text, or the arrays that this one takes"
        )
    pictures = are_image_files(inputs) or (isinstance(inputs, list) and any(map(is_picture, inputs)))
    if pictures:
        shape = _picture_size(network, picture(inputs[0]) if are_image_files(inputs) else inputs[0])
    else:
        array = as_array(inputs[0] if isinstance(inputs, list) else inputs[:1][0])
        if array.dtype != np.uint8 or array.ndim not in (2, 3):
            _check_no_size(image_size)
            _check_channels_first(network, array.shape)
            made = as_tensor(array[None])
            return made.expand(2, *made.shape[1:]).contiguous(), normalisation
        shape = _channels_first(array.shape)
    if normalisation is None:
        raise BadInput(f"the data are pictures or bytes, {UNKNOWN}")
    return torch.zeros(2, *_wanted_shape(shape, len(normalisation.mean), image_size)), normalisation


def _wanted_shape(shape: Sequence[int], channels: int, image_size: int | None) -> tuple[int, ...]:
    """Return the shape that pictures get: the channels of their normalisation, and the size that is asked for."""
    first = channels if shape[0] in CHANNELS else shape[0]
    return (first, image_size, image_size) if image_size is not None else (first, *shape[1:])


def _channels(network: Any) -> int | None:
    """Return how many channels the first convolution takes; None where there is none."""
    from torch import nn

    return next((each.in_channels for each in network.modules() if isinstance(each, nn.Conv2d)), None)


def _check_channels_first(network: Any, shape: Sequence[int]) -> None:
    """Raise if images have as many channels as the first convolution takes, but last."""
    first = _channels(network)
    if len(shape) == 3 and shape[2] == first != shape[0]:
        own = TensorSpec("images", (None, first, *shape[:2]), "float32")
        check_shapes([np.empty((1, *shape))], InputSpec((own,)))


def check_example(network: Any, example: Any, normalisation: Normalisation | None = None) -> None:
    """Raise if that is why a network failed on an example: integers, or images whose channels are not the network's."""
    from torch import nn

    shape, dtype = tuple(getattr(example, "shape", ())), str(getattr(example, "dtype", "")).removeprefix("torch.")
    if dtype.startswith(("int", "uint")) and not any(isinstance(each, nn.Embedding) for each in network.modules()):
        raise BadInput(
            f"the data are {dtype}, and the network takes floats: give x.astype('float32'), scaled as in its training,"
            " or bytes (uint8) with a normalisation as preprocess"
        )
    first = _channels(network)
    given = len(normalisation.mean) if normalisation else None
    if first is not None and given not in (None, first) and shape[1:2] == (given,):
        raise BadInput(
            f"the normalisation and so the images have {given} channel{'s' * (given != 1)}, and the network takes"
            f" {first}: give {first} means and {first} standard deviations (--mean and --std of the commands)"
        )
    if first is not None and len(shape) in (3, 4) and (len(shape) == 3 or shape[1] != first):
        check_shapes([example], InputSpec((TensorSpec("images", (None, first, None, None), "float32"),)))


def check_single(values: Any) -> None:
    """Raise if numbers of the data are in half precision, which weights in single precision cannot multiply."""
    if (kind := str(values.dtype).removeprefix("torch.")) in ("float16", "bfloat16"):
        raise BadInput(f"the data are {kind}, and the network takes float32: give x.astype('float32'), or x.float()")


def check_logits(network: Any, example: Any) -> None:
    """Raise if a network fails on samples of the data, or gives something else than a row of logits for each."""
    import torch

    from alight.networks.multi_exit import count_classes

    given = example if isinstance(example, Mapping | tuple) else (example,)
    copied = copy.deepcopy(network).eval()
    try:
        with torch.no_grad():
            logits = copied(**given) if isinstance(given, Mapping) else copied(*given)
    except Exception as error:
        parts = [*given.values()] if isinstance(given, Mapping) else given
        shapes = listed(f"{tuple(each.shape)}" for each in parts)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise BadInput(
            f"the network fails on two samples of the data, shape {shapes}, with {reason}: give samples as the network"
            " takes them"
        ) from error
    if isinstance(logits, torch.Tensor):
        count_classes(logits)


def _channels_first(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) == 2:
        return 1, *shape
    last = shape[-1] in CHANNELS and shape[0] not in CHANNELS
    return (shape[2], shape[0], shape[1]) if last else tuple(shape)


def _picture_size(network: Any, first: Any) -> tuple[int, ...]:
    """Return the size of pictures: the one that a library knows for its network, or that of the first picture."""
    known = getattr(network, "pretrained_cfg", None) or {}
    if "input_size" in known:
        return tuple(known["input_size"])
    config = getattr(network, "config", None)
    channels = getattr(config, "num_channels", 1 if first.mode == "L" else 3)
    size = getattr(config, "image_size", None)
    height, width = (first.height, first.width) if size is None else (size, size) if isinstance(size, int) else size
    return channels, height, width


class KeptSamples:
    """Batches on their way to `record`; of their samples some are kept, spread over all, to be timed and shown."""

    def __init__(self, data: Any, spec: InputSpec, batch_size: int) -> None:
        self.data, self.loader, self.spec = data, in_batches(data, spec, batch_size), spec
        self.parts: list[tuple[Any, ...]] = []
        self.rows: list[int] = []

    def __len__(self) -> int:
        count = length_of(self.loader)
        if count is None:
            raise TypeError("the loader has no length")
        return count

    def __iter__(self) -> Iterator[Batch]:
        seen, count = 0, length_of(self.loader)
        for raw in self.loader:
            batch = as_batch(raw, self.spec)
            every = max(1, len(batch) * (count or 1) // KEPT)
            self._keep(batch, np.arange(-seen % every, len(batch), every) + seen, seen)
            seen += len(batch)
            yield batch

    def _keep(self, batch: Batch, rows: Any, seen: int) -> None:
        """Keep these rows; where batches have different lengths, as of texts, those of the widest alone."""
        part = tuple(as_array(each)[rows - seen] for each in batch.inputs)
        if self.parts and [each.shape[1:] for each in part] != [each.shape[1:] for each in self.parts[0]]:
            if part[0].size // max(len(part[0]), 1) < self.parts[0][0].size // max(len(self.parts[0][0]), 1):
                return
            self.parts, self.rows = [], []
        self.parts.append(part)
        self.rows += rows.tolist()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The kept samples as one batch."""
        return tuple(np.concatenate(each) for each in zip(*self.parts, strict=True))

    def shown(self, test_rows: Any) -> tuple[Any, Any] | None:
        """Return test samples that a page can show, and their rows in the test table; None where it cannot.

        `test_rows` are the samples of the test table, in its order. Images are kept ones in 0..1, texts are read again.
        """
        if self.spec.takes_texts:
            samples = open_data(self.data, self.spec)
            texts: Any = [] if samples is None else samples.__getitems__(test_rows[:KEPT].tolist())[0]
            return (texts, np.arange(len(texts))) if is_texts(texts) else None
        if self.spec.image_shape is None or self.spec.image_shape[0] not in (1, 3):
            return None
        place = {int(sample): row for row, sample in enumerate(test_rows)}
        chosen = [index for index, sample in enumerate(self.rows) if sample in place]
        pixels = self.inputs[0][chosen].astype(np.float32)
        if (known := self.spec.normalisation) is not None:
            mean, std = known.by_channel
            pixels = np.clip(pixels * std + mean, 0, 1)
        rows = np.array([place[self.rows[index]] for index in chosen], dtype=np.int64)
        return (pixels, rows) if len(chosen) else None
