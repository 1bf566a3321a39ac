"""What every head says about every sample, once, so that everything else is arithmetic on a table."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from alight.errors import BadInput
from alight.models.batches import batches, length_of
from alight.models.fingerprint import fingerprint
from alight.models.multi_exit import MultiExitModel
from alight.outputs import HeadOutputs
from alight.runtime.prefetch import ahead
from alight.runtime.prepare import as_dtype, device_of, placed, prepared


def record(
    model: MultiExitModel,
    loader: Iterable[Any],
    *,
    score: str = "margin",
    features: Iterable[str] = (),
    log_probabilities: bool = False,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    channels_last: bool = False,
    progress: bool = True,
) -> HeadOutputs:
    """What every head says about everything that a loader gives, in its order; with labels, if it gives any.

    Scores are computed in float64 from logits, batch by batch: only they are kept, and `log_probabilities` in half
    precision if asked for. `features` names further scores. `dtype` is "bf16", "fp16" or None for the network's own; a
    predictor in that dtype needs a recording in it. The table carries the fingerprint of the network as it ran.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> record(model, [(torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1]))], progress=False)
    HeadOutputs(5 samples, 2 exits, score 'margin', labelled)
    """
    if not isinstance(model, MultiExitModel):
        raise BadInput(f"a {type(model).__name__} has no exits yet: attach_heads makes a MultiExitModel of it")
    ready = prepared(model, device=device, dtype=dtype, channels_last=channels_last)
    place, kind, wanted = device_of(ready), as_dtype(dtype), tuple(features)
    parts: list[HeadOutputs] = []
    seen = 0
    shown: dict[str, Any] = {"desc": "record", "unit": "batch", "total": length_of(loader), "disable": not progress}
    for batch in tqdm(ahead(batches(loader, "the recording")), **shown):
        with torch.inference_mode():
            logits = ready(placed(ready.admit(batch.inputs), place, kind, channels_last))
        told = _on_host(logits)  # (samples, exits, classes)
        _check_numbers(told, seen, ready.exits)
        labels = None if batch.labels is None else batch.labels.cpu().numpy()
        parts.append(
            HeadOutputs.from_logits(told, labels, score, features=wanted, keep_log_probabilities=log_probabilities)
        )
        seen += len(batch)
    return _joined(parts, fingerprint(ready))


def _on_host(logits: Sequence[Tensor]) -> np.ndarray:
    if len({tuple(each.shape) for each in logits}) > 1:
        shapes = [tuple(each.shape) for each in logits]
        raise BadInput(f"the exits' logits disagree in shape, {shapes}: attach heads with one number of classes")
    together: np.ndarray = torch.stack(list(logits), dim=1).double().cpu().numpy()
    return together


def _check_numbers(logits: np.ndarray, seen: int, exits: Sequence[str]) -> None:
    bad = np.isnan(logits) | (logits == np.inf)  # -inf is a class that was masked out
    if bad.any():
        row, exit_index, _ = np.argwhere(bad)[0]
        raise BadInput(
            f"exit {exit_index} ({exits[exit_index]}) gives {logits[bad][0]:g} for sample {seen + row}: look for NaN in"
            " that sample or in the weights; in half precision try dtype='bf16'"
        )


def _joined(parts: Sequence[HeadOutputs], told: str) -> HeadOutputs:
    """One table of many, in their order."""
    labelled = [part.labels is not None for part in parts]
    if any(labelled) and not all(labelled):
        raise BadInput(f"{labelled.count(False)} of {len(parts)} batches have no labels: give labels for all or none")
    first = parts[0]
    return HeadOutputs(
        scores=np.concatenate([part.scores for part in parts]),
        predictions=np.concatenate([part.predictions for part in parts]),
        labels=np.concatenate([part.labels for part in parts if part.labels is not None]) if all(labelled) else None,
        score=first.score,
        features={name: np.concatenate([part.features[name] for part in parts]) for name in first.features},
        log_probabilities=None
        if first.log_probabilities is None
        else np.concatenate([part.log_probabilities for part in parts if part.log_probabilities is not None]),
        fingerprint=told,
    )
