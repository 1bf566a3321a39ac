"""Networks by name, as a command line writes them: timm:NAME, torchvision:NAME, transformers:FOLDER, zoo:NAME."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alight.errors import BadInput
from alight.models.attach import EXITS
from alight.models.multi_exit import MultiExitModel
from alight.models.sources import from_timm, from_torchvision, from_transformers
from alight.models.zoo import NATIVE, ZOO

LIBRARIES: dict[str, Callable[..., MultiExitModel]] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
    "transformers": from_transformers,
}
PRETRAINED: dict[str, dict[str, Any]] = {"timm": {"pretrained": True}, "torchvision": {"weights": "DEFAULT"}}


def from_name(
    network: str,
    *,
    num_classes: int | None = None,
    pretrained: bool = False,
    after: str | Sequence[str] = "auto",
    head: str = "auto",
    count: int = EXITS,
    image_size: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> MultiExitModel:
    """The named network with exits; `arguments` are the network's own.

    >>> from_name("zoo:msdnet_cifar", num_classes=10, arguments={"blocks": 2, "channels": 4}).exits
    ('block 0', 'block 1')
    """
    library, _, name = network.partition(":")
    given = {"num_classes": num_classes, "image_size": image_size} | dict(arguments or {})
    if library in LIBRARIES and name:
        given |= {"after": after, "head": head, "count": count} | (PRETRAINED.get(library, {}) if pretrained else {})
        return LIBRARIES[library](name, **_given(given))
    if library != "zoo" or name not in ZOO:
        raise BadInput(
            f"network {network!r}: write timm:NAME, torchvision:NAME, transformers:FOLDER, or zoo:NAME with NAME one of"
            f" {', '.join(ZOO)}"
        )
    if after != "auto" or count != EXITS:
        raise BadInput(f"the exits of {network} stand where its paper puts them: leave after and count out")
    if head != "auto" and name not in NATIVE:
        given["head"] = head
    return ZOO[name](**_given(given))


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
