"""The folder of a saved network, checked without torch."""

from pathlib import Path

from alight.errors import BadFile

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MANIFEST = "manifest.json"  # of an exported network


def check_folder(folder: Path) -> None:
    """Raise unless weights and config of a network are in the folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if (folder / MANIFEST).is_file() and not (folder / WEIGHTS).is_file():
        raise BadFile(
            folder, "it holds an exported network", "use `alight run`, or give the folder it was exported from"
        )
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise BadFile(folder, f"it has no {name}", "give a folder that alight saved a network to")
