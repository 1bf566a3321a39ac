"""What `fit` is given, checked before anything is computed, and its data, once they are seen."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.columns import LazyColumn, depth, is_array, is_path, kind_of, whole
from alight.data.preprocess import InputSpec, Normalisation, as_array
from alight.data.samples import Items, Samples
from alight.data.sources import open_data
from alight.display import layer_label, listed
from alight.engine.recorder import numbered_otherwise
from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.scores import are_probabilities

SWAPPED = 4  # times as many validation samples as training samples: they may have been exchanged
SHARED = 0.01  # of the validation samples, at least, that are training samples too: a few may be alike by nature
MOST_BYTES = 4 * 2**30  # of samples that are compared: a few seconds
COMPARED = 500  # files of validation pictures, at most, that are looked for among the training pictures
OFTEN = 20  # validation samples per class: with so many, a class without any is worth a warning
LEAST = 6  # validation samples: of the half that calibrates, one chooses the policy and two certify it
FEW = 200  # validation samples: with fewer, accuracies are too vague to be compared
MEANS = (("image_mean", "image_std"), ("mean", "std"))  # of image processors, and of torchvision, timm


def check_given(network: Any, train: Any, validation: Any, training: Any, batch_size: Any) -> None:
    """Raise if arguments are missing, of another kind, or in another order."""
    if not _is_module(network) and (_is_module(train) or _is_module(validation)):
        raise BadInput("the arguments are in another order: write fit(network, train, validation)")
    if validation is None:
        raise BadInput("there is no validation data: give samples that the network was not trained on")
    _check_settings(training, batch_size)
    if isinstance(train, Iterator):
        raise BadInput(
            f"the training data are a {type(train).__name__}, which is spent after one pass: give a DataLoader, a list,"
            " or anything that starts anew"
        )
    if any(map(_begins_with_labels, (train, validation))):
        raise BadInput("a pair begins with its labels: give (inputs, labels)")
    if is_array(train) and is_array(validation) and train.ndim > validation.ndim == 1 and len(train) == len(validation):
        raise BadInput(
            "the validation data look like the labels of the training data: give pairs, as in"
            " fit(network, (images, labels), (other_images, other_labels))"
        )
    if (train is not None and train is validation) or _same_path(train, validation):
        raise BadInput("the training data are also the validation data: hold out samples that nothing is trained on")


def _begins_with_labels(data: Any) -> bool:
    """Return whether a pair is one number per sample, and then arrays of several axes."""
    pair = isinstance(data, tuple) and len(data) == 2 and is_array(data[1])
    return pair and depth(data[0]) == 1 and data[1].ndim > 2


def _check_settings(training: Any, batch_size: Any) -> None:
    """Raise unless these are settings of a training that `fit` can do, and a batch size."""
    if training is not None and not hasattr(training, "mode"):
        raise BadInput(f"training={training!r} is not settings: give alight.TrainingSettings(epochs=3), for example")
    if type(batch_size) is not int or batch_size < 1:
        raise BadInput(f"batch_size={batch_size!r} is not a whole number of samples: give 64, for example")


def check_places(after: Any, network: Any) -> None:
    """Raise if it is said where exits go, of a network that has them.

    >>> check_places("auto", "model")
    """
    if isinstance(after, str) and after == "auto":
        return
    kind = "costs of exits" if type(network).__name__ == "Costs" else "a network that has exits already"
    raise BadInput(f"after={after!r} is where exits go, and this is {kind}: leave it out, or give the network itself")


def check_trained(exits: Sequence[str], random: bool) -> None:
    """Raise if the heads of a network are random: a policy would be calibrated on guesses."""
    if random:
        places = listed(map(layer_label, exits[:-1]))
        raise BadInput(
            f"the heads after {places} are new, and nothing trains them: give training data before the validation data,"
            " or a network whose heads are trained"
        )


def known_preprocess(preprocess: Any) -> Any:
    """Return a normalisation of whatever has a mean and a standard deviation; a tokenizer or its folder unchanged.

    >>> known_preprocess({"mean": (0.5,), "std": (0.25,)})
    Normalisation(mean=(0.5,), std=(0.25,))
    """
    if preprocess is None or is_path(preprocess) or isinstance(preprocess, Normalisation):
        return preprocess
    values = preprocess if isinstance(preprocess, Mapping) else _attributes(preprocess)
    for mean, std in MEANS:
        if mean in values and std in values:
            return Normalisation(values[mean], values[std])
    if hasattr(preprocess, "pad") or hasattr(preprocess, "encode"):
        return preprocess
    raise BadInput(
        f"preprocess is a {type(preprocess).__name__}: give alight.Normalisation(mean, std), an image processor, or a"
        " tokenizer; or give data as the network takes it, and no preprocess"
    )


def compare_samples(train: Any, validation: Any, spec: InputSpec) -> None:
    """Warn if validation samples are training samples, too, or far more: in memory, files, or data sets of torch."""
    files = [_picture_files(each, spec) for each in (train, validation)]
    known, held_out = _file_keys(*files) if all(files) else (_keys(train, spec), _keys(validation, spec))
    count, others = map(len, files if all(files) else (known, held_out))
    if 0 < SWAPPED * count < others:
        warnings.warn(
            f"{count:,} training samples and {others:,} for validation: training data come first, then validation data;"
            " are they in another order?",
            stacklevel=4,
        )
    seen = {*known}
    shared = sum(each in seen for each in held_out)
    if shared > SHARED * len(held_out):
        compared = " that were compared" if len(held_out) < others else ""
        warnings.warn(
            f"{shared:,} of {len(held_out):,} validation samples{compared} are among the training samples: accuracy"
            " looks better than it is, and no guarantee holds; hold samples out",
            stacklevel=4,
        )


def warn_of_table(table: HeadOutputs, num_classes: int | None) -> None:
    """Warn if what was recorded of the validation samples says little: few, of one class, or hardly ever correct."""
    count = len(table)
    if count < LEAST:
        number = f"{count} validation sample{'s' * (count != 1)}"
        raise BadInput(f"{number}: give at least {LEAST}, better 2,000; half of them are the test")
    if count < FEW:
        warnings.warn(
            f"{count} validation samples are few: half of them are the test, whose accuracy is known to about"
            f" +-{100 / np.sqrt(count - count // 2):.0f} points; give 2,000 or more",
            stacklevel=5,
        )
    if table.labels is None:
        return
    present = np.unique(table.labels)
    if len(present) == 1:
        warnings.warn(
            f"all {count:,} validation samples have the label {table.labels[0]}: accuracies say nothing about other"
            " classes; give samples of all of them",
            stacklevel=5,
        )
    elif num_classes and count >= OFTEN * num_classes and len(present) < num_classes:
        missing = listed(map(str, np.setdiff1d(np.arange(num_classes), present).tolist()))
        warnings.warn(
            f"none of {count:,} validation samples is of class {missing}: accuracies and guarantees say nothing about"
            " it; give samples of all classes",
            stacklevel=5,
        )
    if guesses := near_guessing(table, num_classes):
        warnings.warn(guesses, stacklevel=5)


def near_guessing(table: HeadOutputs, num_classes: int | None) -> str:
    """Return what to do about a full network that hardly does better than guessing; nothing where it does.

    >>> near_guessing(HeadOutputs([[0.9]] * 2, [[0], [1]], [0, 1]), 2)
    ''
    """
    guessing = 1 / (num_classes or np.inf)
    if table.labels is None or (accuracy := float(table.correct()[:, -1].mean())) >= guessing + min(guessing, 0.1):
        return ""
    return numbered_otherwise(table, num_classes) or (
        f"the full network has {accuracy:.1%} accuracy on the validation samples, near the {guessing:.1%} of guessing:"
        " train it longer, or check that its weights are loaded, that inputs are normalised as in its training, and the"
        " order of its classes"
    )


def warn_of_probabilities(logits: Any) -> None:
    """Warn if a network gives probabilities instead of logits.

    >>> warn_of_probabilities(np.array([[1.0, 2.0]]))
    """
    if are_probabilities(as_array(logits)):
        warnings.warn(
            "the network gives probabilities, not logits: leave its softmax out, or losses and scores are those of a"
            " softmax of a softmax",
            stacklevel=6,
        )


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _same_path(train: Any, validation: Any) -> bool:
    both = is_path(train) and is_path(validation)
    return both and Path(train).resolve() == Path(validation).resolve()


def _attributes(value: Any) -> dict[str, Any]:
    names = [name for pair in MEANS for name in pair]
    return {name: getattr(value, name) for name in names if isinstance(getattr(value, name, None), list | tuple)}


def _picture_files(data: Any, spec: InputSpec) -> Sequence[str]:
    """Return the files of a folder of pictures; none of other data."""
    found = open_data(data, spec, labels=False) if is_path(data) else None
    return getattr(found, "files", None) or ()


def _file_keys(train: Sequence[str], validation: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return hashes of the contents of some validation files, and of the training files of the same sizes."""
    some = validation[:: -(-len(validation) // COMPARED)]
    sizes = {Path(each).stat().st_size for each in some}
    same_size = [each for each in train if Path(each).stat().st_size in sizes]
    seen, held_out = ([hash(Path(each).read_bytes()) for each in files] for files in (same_size, some))
    return seen, held_out


def _keys(data: Any, spec: InputSpec) -> list[int]:
    """Return a number for every sample, the same for the same one: of its values, or of its place; none if unknown."""
    data, rows = _rows_of(data)
    if isinstance(data, HeadOutputs) or rows is None:
        return []
    tensors = getattr(data, "tensors", None)  # of torch's TensorDataset
    found = Samples(tensors[:1]) if tensors else open_data(data, spec, labels=False)
    if isinstance(found, Items):
        return [hash((id(data), row)) for row in rows or range(len(data))]
    columns = [each for each in getattr(found, "columns", ()) if _is_comparable(each)]
    rows_of = (as_array(each) if is_array(each) else whole(each) for each in columns)
    values = [hash(tuple(map(_content, row))) for row in zip(*rows_of, strict=True)]
    return [values[row] for row in rows] if rows else values


def _rows_of(data: Any) -> tuple[Any, Sequence[int] | None]:
    """Return the data set behind torch's loaders and subsets, and which rows: () for all, None where it is unknown."""
    torch_data = getattr(getattr(sys.modules.get("torch"), "utils", None), "data", None)
    rows: Sequence[int] = ()
    if torch_data is not None and isinstance(data, torch_data.DataLoader):
        sampler: Any = data.sampler if data.batch_size else None
        data = data.dataset
        if type(sampler) is torch_data.SubsetRandomSampler:
            rows = [*sampler.indices]
        elif type(sampler) not in (torch_data.SequentialSampler, torch_data.RandomSampler) or len(sampler) != len(data):
            return data, None
    while torch_data is not None and type(data) is torch_data.Subset:
        rows = [data.indices[row] for row in rows] if rows else [*data.indices]
        data = data.dataset
    return data, rows


def _is_comparable(column: Any) -> bool:
    """Return whether the values of a column say which sample it is, and are texts, or in memory and not too many."""
    kind = kind_of(column)
    near = str(getattr(column, "device", "cpu")) == "cpu" and getattr(column, "nbytes", 0) <= MOST_BYTES
    return kind == "text" or (kind == "array" and near and not isinstance(column, LazyColumn))


def _content(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else as_array(value).tobytes()
