"""What `fit` is given, checked before anything is computed, and its data, once they are seen."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.columns import is_array, is_path
from alight.data.preprocess import Normalisation, as_array
from alight.display import layer_label, listed
from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.scores import are_probabilities

SHARED = 0.01  # of the validation samples, at least, that are training samples too: a few may be alike by nature
FEW = 200  # validation samples: with fewer, accuracies are too vague to be compared
MEANS = (("image_mean", "image_std"), ("mean", "std"))  # of image processors, and of torchvision, timm


def check_given(network: Any, train: Any, validation: Any, training: Any, batch_size: Any) -> None:
    """Raise if arguments are missing, of another kind, or in another order."""
    if not _is_module(network) and (_is_module(train) or _is_module(validation)):
        raise BadInput("the arguments are in another order: write fit(network, train, validation)")
    if validation is None:
        raise BadInput("there is no validation data: give samples that the network was not trained on")
    _check_settings(training, batch_size)
    if is_array(train) and is_array(validation) and train.ndim > validation.ndim == 1 and len(train) == len(validation):
        raise BadInput(
            "the validation data look like the labels of the training data: give pairs, as in"
            " fit(network, (images, labels), (other_images, other_labels))"
        )
    if (train is not None and train is validation) or _same_path(train, validation):
        raise BadInput("the training data are also the validation data: hold out samples that nothing is trained on")


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


def warn_of_shared_samples(train: Any, validation: Any) -> None:
    """Warn if validation samples are training samples, too, where both are in memory."""
    seen, held_out = _hashes(train), _hashes(validation)
    shared = sum(each in seen for each in held_out) if seen and held_out else 0
    if shared > SHARED * len(held_out):
        warnings.warn(
            f"{shared:,} of {len(held_out):,} validation samples are among the training samples: accuracy looks better"
            " than it is, and no guarantee holds; hold samples out",
            stacklevel=4,
        )


def warn_of_table(table: HeadOutputs, num_classes: int | None) -> None:
    """Warn if what was recorded of the validation samples says little: few, of one class, or hardly ever correct."""
    count = len(table)
    if count < 4:
        number = f"{count} validation sample{'s' * (count != 1)}"
        raise BadInput(f"{number}: give at least 4, better 2,000; half of them are the test")
    if count < FEW:
        warnings.warn(
            f"{count} validation samples are few: half of them are the test, whose accuracy is known to about"
            f" +-{100 / np.sqrt(count - count // 2):.0f} points; give 2,000 or more",
            stacklevel=5,
        )
    if table.labels is None:
        return
    if len(np.unique(table.labels)) == 1:
        warnings.warn(
            f"all {count:,} validation samples have the label {table.labels[0]}: accuracies say nothing about other"
            " classes; give samples of all of them",
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
    return (
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


def _hashes(data: Any) -> list[int]:
    """Return a hash of every sample that is in memory as a row of an array, or a text; none of other data."""
    data = getattr(data, "tensors", data)  # of torch's TensorDataset
    inputs = data[0] if isinstance(data, tuple) and len(data) == 2 else data
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], str):
        return [*map(hash, inputs)]
    if not is_array(inputs) or inputs.ndim < 2 or str(getattr(inputs, "device", "cpu")) != "cpu":
        return []
    return [hash(row.tobytes()) for row in as_array(inputs)]
