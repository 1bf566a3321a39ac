"""What lies in the folder of a network, known without torch."""

from pathlib import Path

from alight.errors import BadFile

WEIGHTS, CONFIG = "model.safetensors", "config.json"
EXPORTED = "manifest.json"  # in a folder of stages for elsewhere


def check_layout(folder: Path) -> None:
    """That weights and config are in the folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if (folder / EXPORTED).is_file() and not (folder / WEIGHTS).is_file():
        raise BadFile(
            folder, "it holds an exported network", "use `alight run`, or give the folder it was exported from"
        )
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise BadFile(folder, f"it has no {name}", "give a folder that alight saved a network to")
