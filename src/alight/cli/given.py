"""What a command was given, looked at before torch is loaded, which takes seconds."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alight.errors import BadInput
from alight.networks.folder import check_folder

LIBRARIES = ("timm", "torchvision", "transformers", "zoo")


def check_network(folder: str) -> None:
    """That a network lies in the folder."""
    check_folder(Path(folder))


def check_data(*places: str | None) -> None:
    """That there is something where the data should be: a file, a folder, or the folder of NAME:FOLDER."""
    for where in places:
        if where is not None and not Path(where).exists() and not Path(where.partition(":")[2] or where).exists():
            raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", where)


def check_name(network: str) -> None:
    """That a network is named as one of a library."""
    library, _, name = network.partition(":")
    if library not in LIBRARIES or not name:
        raise BadInput(f"network {network!r}: write timm:NAME, torchvision:NAME, transformers:FOLDER or zoo:NAME")


@contextmanager
def new_folder(folder: Path, keep: str = "") -> Iterator[Path]:
    """The folder, made if need be; if the work fails, what it has made is gone, but for the file to keep.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp()) / "runs" / "first"
    >>> try:
    ...     with new_folder(folder):
    ...         raise ValueError
    ... except ValueError:
    ...     folder.parent.exists()
    False
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException:
        if missing:
            _clear(folder, missing[-1], keep)
        raise


def _clear(folder: Path, first: Path, keep: str) -> None:
    """Take away the first folder that was made, or all but the file to keep in the last."""
    if not (keep and (folder / keep).exists()):
        shutil.rmtree(first, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != keep:
            path.unlink()
