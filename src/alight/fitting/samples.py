"""Some of the validation samples, to be timed and shown."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from alight.data.batches import Batch, as_batch, in_batches, length_of
from alight.data.preprocess import InputSpec, as_array
from alight.data.samples import is_texts
from alight.data.sources import open_data

KEPT = 256  # samples, at least


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
