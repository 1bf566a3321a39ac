"""What a network takes, as plain data: a network in PyTorch and an exported one both describe themselves so."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and dtype; None stands for a size that may differ, as that of the batch, the first."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether an array of this shape is such a tensor.

        >>> TensorSpec("images", (None, 3, 32, 32), "float32").fits((5, 3, 32, 32))
        True
        """
        return len(shape) == len(self.shape) and all(
            own in (None, size) for own, size in zip(self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape[1:])
        return f"{self.name} of shape (samples{sizes and ', ' + sizes}), {self.dtype}"


@dataclass(frozen=True)
class InputSpec:
    """The tensors that a network takes, how its images are normalised, and the classes that labels may name.

    >>> InputSpec((TensorSpec("images", (None, 3, 32, 32), "float32"),)).image_shape
    (3, 32, 32)
    """

    tensors: tuple[TensorSpec, ...] = ()  # () where the network does not say, as one that was built by hand
    names: tuple[str, ...] = ()  # of a network whose input is a dict of tensors
    mean: tuple[float, ...] = ()  # subtracted from every channel of an image in 0..1; () is nothing
    std: tuple[float, ...] = ()  # what the difference is divided by
    classes: tuple[str, ...] = ()  # their names, where known
    num_classes: int | None = None

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of the images that it takes; None of a network that takes none or does not say."""
        shape = self.tensors[0].shape if len(self.tensors) == 1 else ()
        if len(shape) != 4 or None in shape[1:]:
            return None
        channels, height, width = (int(size or 0) for size in shape[1:])
        return channels, height, width
