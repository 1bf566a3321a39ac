"""Pictures and pixels as an image network takes them: at its size, in 0..1, normalised as it was trained."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel

SHIFT = 8  # augmented images are moved by up to an eighth of their size, as is usual for 32 x 32

Sample = tuple[Any, int | None]  # an image or a text, and its class


class Images:
    """Images to tensors of the network's size, in 0..1, normalised; `where` they come from is named in errors."""

    def __init__(self, model: MultiExitModel, augment: bool, where: str) -> None:
        shape = image_shape(model)
        if shape is None:
            raise BadInput(f"the network does not take images, and {where} holds some: give text (.jsonl)")
        self.shape, self.augment, self.where = shape, augment, where
        self.mean, self.std = (
            _per_channel(None if model.normalisation is None else getattr(model.normalisation, name), shape[0])
            for name in ("mean", "std")
        )

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """A batch of images, and of labels where all have one."""
        images = self.stacked([image for image, _ in samples])
        labels = [label for _, label in samples]
        return images if None in labels else (images, torch.tensor(labels))

    def stacked(self, pictures: Sequence[Any]) -> Tensor:
        """The pictures as one tensor that the network takes."""
        images = torch.stack([self._image(picture) for picture in pictures])
        if self.augment:
            images = torch.stack([_moved(image) for image in images])
        if self.mean is not None and self.std is not None:
            images = (images - self.mean) / self.std
        return images

    def _image(self, image: Any) -> Tensor:
        """Channels first, in 0..1."""
        if not isinstance(image, np.ndarray):
            image = self._pixels(image)
        channels, height, width = self.shape
        if image.shape == (height, width) and channels == 1:
            image = image[None]
        elif image.shape == (height, width, channels) and image.shape != self.shape:
            image = image.transpose(2, 0, 1)
        if image.shape != self.shape:
            raise BadInput(
                f"{self.where} has images of shape {image.shape} and the network takes {self.shape} (channels, height,"
                " width): resize them, or attach heads for this image size"
            )
        tensor = torch.from_numpy(np.array(image, order="C"))  # a copy, since some may not be written to
        if image.dtype == np.uint8:
            return tensor.float() / 255
        tensor = tensor.float()
        if self.mean is not None and not (tensor.min() >= 0 and tensor.max() <= 1):
            raise BadInput(
                f"{self.where} has images from {tensor.min():g} to {tensor.max():g}, and the network normalises ones"
                " in 0..1: give bytes (uint8), or divide them"
            )
        return tensor

    def _pixels(self, picture: Any) -> np.ndarray:
        """A picture's bytes at the network's size: its shorter side resized, its middle taken."""
        if isinstance(picture, Tensor):
            return picture.numpy(force=True)
        channels, height, width = self.shape
        picture = picture.convert("L" if channels == 1 else "RGB")
        scale = max(height / picture.height, width / picture.width)
        if scale != 1:
            size = (max(width, round(scale * picture.width)), max(height, round(scale * picture.height)))
            picture = picture.resize(size, resample=2)  # bilinear
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        return np.asarray(picture.crop((left, top, left + width, top + height)))


def image_shape(model: MultiExitModel) -> tuple[int, int, int] | None:
    """Channels, height and width of the images that a network takes; None of one that takes none, or does not say."""
    shape = model.recipe.get("example", {}).get("shape")
    return (shape[1], shape[2], shape[3]) if isinstance(shape, list) and len(shape) == 4 else None


def is_picture(value: Any) -> bool:
    """Whether it is a picture as Pillow makes them, or bytes: what is not yet as a network takes it."""
    if isinstance(value, Tensor):
        return value.dtype is torch.uint8
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8
    return callable(getattr(value, "convert", None)) and callable(getattr(value, "resize", None))


def _moved(image: Tensor) -> Tensor:
    """The image, flipped or not, moved by a few pixels; what comes in from outside is black."""
    _, height, width = image.shape
    down, right = height // SHIFT, width // SHIFT
    padded = torch.nn.functional.pad(image, (right, right, down, down))
    top, left = int(torch.randint(2 * down + 1, ())), int(torch.randint(2 * right + 1, ()))
    image = padded[:, top : top + height, left : left + width]
    return image.flip(-1) if torch.rand(()) < 0.5 else image


def _per_channel(values: Sequence[float] | None, channels: int) -> Tensor | None:
    if values is None:
        return None
    if len(values) != channels:
        raise BadInput(
            f"the network normalises {len(values)} channels and takes images of {channels}: attach heads with as many"
            " means and standard deviations as channels"
        )
    return torch.tensor(values)[:, None, None]
