"""How sure a head is. Higher is surer; every score is a function of one head's logits, in float64.

NumPy arrays and torch tensors are both taken: only operators, and functions that both libraries
spell the same way, are used. All functions work on the last axis, the classes.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # a NumPy array or a torch tensor
ARRAYS = (np.ndarray, np.generic)
FEW = 16  # likeliest classes are found one after the other; more are sorted
NEAR_ONE = 1e-3  # how far a sum of probabilities may be from 1
LOWEST = -1.7e308  # near the least number in double precision


def are_probabilities(values: Array) -> bool:
    """Check whether rows hold numbers from 0 on whose sum is 1, which logits do not.

    >>> are_probabilities(np.array([[0.25, 0.75]])), are_probabilities(np.array([[1.0, 2.0]]))
    (True, False)
    """
    return bool(values.min() >= 0 and abs(values.sum(-1) - 1).max() < NEAR_ONE)


def probabilities(logits: Array) -> Array:
    """Return the softmax of logits, in float64.

    >>> probabilities(np.array([0.0, np.log(3.0)]))
    array([0.25, 0.75])
    """
    if library_of(logits) is not np:
        return logits.double().softmax(-1)
    logits = logits.astype(np.float64, copy=False)
    weights = np.exp(logits - np.maximum.reduce(logits, axis=-1, keepdims=True))
    return weights / np.add.reduce(weights, axis=-1, keepdims=True)


def margin(probabilities: Array) -> Array:
    """Return the gap between the two likeliest classes, the paper's "breaking ties".

    >>> margin(np.array([0.5, 0.2, 0.3]))
    np.float64(0.2)
    """
    if library_of(probabilities) is np:
        ordered = np.partition(probabilities, -2, axis=-1)
        return ordered[..., -1] - ordered[..., -2]
    if probabilities.is_cuda:  # where the two largest of many numbers are sorted out bit by bit, in a hundred kernels
        first, place = probabilities.max(-1, keepdim=True)
        return first[..., 0] - probabilities.scatter(-1, place, -np.inf).amax(-1)
    largest = probabilities.topk(2, dim=-1).values
    return largest[..., 0] - largest[..., 1]


def max_probability(probabilities: Array) -> Array:
    """Return the probability of the likeliest class (the paper's Eq. 5).

    >>> max_probability(np.array([0.5, 0.2, 0.3]))
    np.float64(0.5)
    """
    return library_of(probabilities).amax(probabilities, axis=-1)


def negative_entropy(probabilities: Array) -> Array:
    """Return minus the Shannon entropy in nats; 0 when one class is certain.

    >>> negative_entropy(np.array([0.0, 1.0]))
    np.float64(0.0)
    """
    library = library_of(probabilities)
    safe = library.where(probabilities > 0, probabilities, library.ones_like(probabilities))
    return (probabilities * library.log(safe)).sum(-1)


def logit_margin(logits: Array) -> Array:
    """Return the gap between the two largest logits: never saturates, whatever the confidence.

    >>> logit_margin(np.array([3.0, -1.0, 2.5]))
    np.float64(0.5)
    """
    return margin(logits * 1.0)


def top_classes(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the likeliest classes, likeliest first, of equals the first, and their log-probabilities in float64.

    >>> classes, logs = top_classes(np.log([0.5, 0.2, 0.3]), 2)
    >>> classes, np.exp(logs)
    (array([0, 2]), array([0.5, 0.3]))
    """
    library = library_of(logits)
    exact = logits.astype(np.float64, copy=False) if library is np else logits.double()
    take = np.take_along_axis if library is np else library.take_along_dim
    if count > FEW:
        order = np.argsort(-exact, axis=-1, kind="stable") if library is np else (-exact).argsort(dim=-1, stable=True)
        classes = order[..., :count]
    else:  # several times as fast
        waiting = library.clip(exact, LOWEST, None)  # so that a masked class comes before one that was found
        found = []
        for _ in range(min(count, exact.shape[-1])):
            found.append(waiting.argmax(-1)[..., None])
            if library is np:
                np.put_along_axis(waiting, found[-1], -np.inf, -1)
            else:
                waiting.scatter_(-1, found[-1], -np.inf)
        classes = library.concatenate(found, -1)
    above = take(exact, classes, -1) - take(exact, classes[..., :1], -1)
    total = library.exp(exact - take(exact, classes[..., :1], -1)).sum(-1)[..., None]
    return classes, above - library.log(total)


SCORES: dict[str, Callable[[Array], Array]] = {  # of probabilities, but for logit_margin
    "margin": margin,
    "max_probability": max_probability,
    "negative_entropy": negative_entropy,
    "logit_margin": logit_margin,
}


def score_of(name: str, logits: Array) -> Array:
    """Return the score of this name, from logits."""
    if name != "logit_margin":
        return SCORES[name](probabilities(logits))
    return logit_margin(logits.astype(np.float64) if library_of(logits) is np else logits.double())


def library_of(array: Array) -> Any:
    """Return NumPy or torch, whichever made the array; torch is never imported here."""
    return np if isinstance(array, ARRAYS) else sys.modules["torch"]
