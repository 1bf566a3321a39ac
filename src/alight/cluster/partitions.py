"""A folder of partitions: what is to be done, what is done, and in the end what it amounts to.

plan.json             what the partitions are made from and how; another job is refused
part-00000.parquet    one for each shard of the data, there once it is whole
manifest.json         there once all are: what they amount to
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alight.cluster.stores import Store
from alight.errors import BadFile, BadInput, Mismatch
from alight.files import SCHEMA
from alight.outputs import MANIFEST, PLAN

DIGITS = 5  # of a partition's number, more where there are more


@dataclass(frozen=True)
class Partitions:
    """A folder of partitions whose names end so."""

    folder: Store
    suffix: str

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Write down what is to be done; a folder of another job, or of other things, is refused."""
        told = self.folder / PLAN
        if not told.is_file():
            if other := next((name for name, _ in self.folder.files()), None):
                raise BadInput(f"{self.folder} has {other} and no {PLAN}: give a folder that is empty or not there yet")
            self.folder.make_folder()
            told.write_whole(_document("Plan", plan))
            return
        there, plan = _read(told, "Plan"), json.loads(json.dumps(plan))
        if odd := [name for name in sorted({*there, *plan}) if there.get(name) != plan.get(name)]:
            raise Mismatch(
                f"{self.folder} has partitions of another job, whose {' and '.join(odd)} differ: give another folder,"
                " or remove this one"
            )

    def store(self, index: int) -> Store:
        """Where a partition lies, or will."""
        return self.folder / f"part-{index:0{DIGITS}}{self.suffix}"

    def there(self) -> set[int]:
        """The partitions that are done; what a worker left half-written when it died is taken away."""
        done = set()
        for name, _ in self.folder.files():
            if name.startswith(".part-"):
                (self.folder / name).remove()
            elif name.startswith("part-") and name.endswith(self.suffix):
                done.add(int(name.removeprefix("part-").removesuffix(self.suffix)))
        return done

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Say that all are done, and what they amount to."""
        (self.folder / MANIFEST).write_whole(_document("Manifest", manifest))


def _document(kind: str, content: Mapping[str, Any]) -> bytes:
    document = {"alight": kind, "schema": SCHEMA, **content}
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def _read(file: Store, kind: str) -> dict[str, Any]:
    try:
        document = json.loads(file.read())
        found, schema = document.pop("alight"), document.pop("schema")
    except (ValueError, KeyError, AttributeError) as error:
        raise BadFile(str(file), f"it is no {kind} ({error})", "give a folder that alight wrote") from error
    if found != kind or schema > SCHEMA:
        raise BadFile(str(file), f"it is a {found} of schema {schema}", f"upgrade alight, which reads up to {SCHEMA}")
    return dict(document)
