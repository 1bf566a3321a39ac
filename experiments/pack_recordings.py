"""Pack the recordings in results/ into the package alight-recordings, one file each.

    python experiments/pack_recordings.py    # seconds; `make recordings` builds the wheel afterwards

Where a network was recorded with log-probabilities (NAME_0), its recording without (NAME) is left out.
"""

from pathlib import Path

from recorded_cifar100 import Result, folders

from alight.recordings import Recording

TARGET = Path(__file__).parent.parent / "packages" / "recordings" / "alight_recordings"


def pack(target: Path = TARGET) -> None:
    """Write every recording of results/ as one file of the target folder, in the place of those there."""
    for old in target.glob("*.npz"):
        old.unlink()
    for folder in folders():
        result = Result.of(folder)
        path = Recording(result.calibration, result.test, result.costs).save(target / f"{folder.name}.npz")
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    pack()
