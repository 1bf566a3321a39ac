"""Pack the results of trainings into a few archives of bounded size, the most important first; unpack them again.

    python experiments/cifar100_pack.py FOLDER STATE       # unpacks every archive of FOLDER into STATE

An archive holds files as JOB/result/NAME. Tables, histories and settings of all finished jobs come first, with the logs
of those that are not finished; then the weights that are worth keeping, in the order of the jobs.
"""

import json
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from cifar100_train import RUNS, Job

from alight.files import write_text

LARGEST = 15 * 2**20  # bytes of an archive
MOST = 4  # archives at a time
BLOCK = 512  # bytes by which an archive grows, and that each file's name takes
END = 20 * BLOCK  # bytes at the end of an archive


def pack(jobs: Sequence[Job], state: Path, out: Path, again: bool = False) -> list[Path]:
    """Write the archives and return their paths; weights that were packed before are left out, unless `again`."""
    packed = state / "packed.json"
    before: list[str] = json.loads(packed.read_text()) if packed.exists() and not again else []
    small = [path for job in jobs for path in _small(state / job.name)]
    weights = [path for job in jobs for path in _weights(job, state) if str(path.relative_to(state)) not in before]
    archives = _filled("tables", small, state, out, MOST)
    later = _filled("weights", weights, state, out, MOST - len(archives))
    sent = [name for archive in later for name in names(archive)]
    write_text(packed, json.dumps(before + sent, indent=1))
    for kind, count in {"weights": len(weights) - len(sent), "tables": len(small) - sum(map(_count, archives))}.items():
        if count:
            print(f"{count} files of {kind} found no place in {MOST} archives: pack fewer jobs (--jobs)")
    return archives + later


def unpack(archives: Iterable[Path], state: Path) -> None:
    """Extract all files to their places in the state folder."""
    for archive in archives:
        with tarfile.open(archive) as file:
            file.extractall(state, filter="data")


def names(archive: Path) -> list[str]:
    """Return the names of the files in an archive."""
    with tarfile.open(archive) as file:
        return file.getnames()


def _count(archive: Path) -> int:
    return len(names(archive))


def _small(folder: Path) -> list[Path]:
    """Return tables, histories and settings of a finished job, or log and progress of another."""
    if (folder / "result").exists():
        return sorted(path for path in (folder / "result").iterdir() if path.suffix != ".safetensors")
    return [path for path in (folder / "log.txt", folder / "progress.csv") if path.exists()]


def _weights(job: Job, state: Path) -> list[Path]:
    """Return the files of a job's weights that are worth keeping: none of seeds after the first."""
    kinds = {"": (), "heads": ("heads",), "everything": ("heads", "stages")}[RUNS[job.run].ships]
    result = state / job.name / "result"
    return [] if job.seed else [path for kind in kinds for path in sorted(result.glob(f"{kind}-*.safetensors"))]


def _filled(name: str, paths: Sequence[Path], state: Path, out: Path, most: int) -> list[Path]:
    """Write files in their order into at most `most` archives."""
    groups: list[list[Path]] = []
    room = 0
    for path in paths:
        size = BLOCK + -(-path.stat().st_size // BLOCK) * BLOCK
        if size > room:
            if len(groups) == most:
                break
            groups.append([])
            room = LARGEST - END
        groups[-1].append(path)
        room -= size
    archives = [out / f"{name}-{number}.tar" for number in range(len(groups))]
    for archive, group in zip(archives, groups, strict=True):
        with tarfile.open(archive, "w") as file:
            for path in group:
                file.add(path, str(path.relative_to(state)))
    return archives


if __name__ == "__main__":
    unpack(sorted(Path(sys.argv[1]).glob("*.tar")), Path(sys.argv[2]))
