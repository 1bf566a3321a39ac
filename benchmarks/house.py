"""Measure the source tree: size, imports, cycles, complexity, and the code that three common tasks run through.

    python benchmarks/house.py                          # a table, with goals
    python benchmarks/house.py --against HEAD~20        # before and after
    python benchmarks/house.py --walks --csv house.csv  # also run the three tasks: half a minute

A room is a top-level module or package of alight. Imports inside functions are counted apart as lazy; those under
`if TYPE_CHECKING` do not count. Complexity is McCabe's as ruff's C901 computes it, and once more with branches inside
expressions. A walk counts the code that runs in any thread during `alight calibrate` on a recorded table, `alight
predict` on 40 images, and one HTTP request after a first one. It counts distinct pairs of file and name (so all lambdas
of a file are one), without class bodies and what runs at import: of the conventions tried, this one comes closest to a
review's 133/23, 320/50 and 95/26 functions/files, with 135/23, 319/49 and 95/25 on the same tree.
"""

import argparse
import ast
import base64
import contextlib
import csv
import inspect
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "alight"
ALL = "all"
TOP = 10  # functions named in the details of a measure
MAX_COMPLEXITY, MAX_ARGUMENTS = 15, 10
GOALS = {
    "files": 115,
    "lines": 18_500,
    "module cycles": 0,
    "room cycles": 0,
    "duplicate class names": 0,
    "highest complexity": MAX_COMPLEXITY,
    "highest complexity, expressions counted": MAX_COMPLEXITY,
    "most arguments": MAX_ARGUMENTS,
}
IMPORTS = (("imports at the top level", False), ("lazy imports", True))
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Row(NamedTuple):
    """One measure of one room, or of all."""

    measure: str
    room: str
    value: int
    detail: str = ""


@dataclass(frozen=True)
class Module:
    """One file of the package, parsed."""

    name: str
    is_package: bool
    lines: int
    tree: ast.Module

    @property
    def room(self) -> str:
        """Name of the top-level module or package; that of the whole package for its own __init__."""
        return self.name.split(".")[min(1, self.name.count("."))]


class Import(NamedTuple):
    """One module importing another."""

    source: str
    target: str
    lazy: bool


class FoundFunction(NamedTuple):
    """A function or method, and where it is defined."""

    name: str
    node: Function
    is_method: bool

    def place(self, value: int) -> str:
        """Return the value with the function's name and line."""
        return f"{value} {self.name} (line {self.node.lineno})"


def read_modules(package: Path) -> list[Module]:
    """Parse every file of a package."""
    modules = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, is_package, text.count("\n"), ast.parse(text)))
    return modules


# Imports and cycles


def imports_of(module: Module, names: set[str]) -> set[Import]:
    """Return what a module imports of the package itself, without imports for type checkers."""
    return {
        Import(module.name, target, lazy)
        for node, lazy in _import_nodes(module.tree, lazy=False)
        for target in _targets(node, module, names)
        if target != module.name
    }


def _import_nodes(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, lazy
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = node.orelse
    for child in children:
        yield from _import_nodes(child, lazy or isinstance(node, Function | ast.Lambda))


def _targets(node: ast.Import | ast.ImportFrom, module: Module, names: set[str]) -> Iterator[str]:
    """Yield the modules that an import statement names: the submodule where there is one, else the package."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
        return
    up = node.level - module.is_package
    package = module.name.split(".")[: -up or None] if node.level else []
    base = ".".join([*package, *([node.module] if node.module else [])])
    if base in names:
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if submodule in names else base


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node, largest first (Tarjan's algorithm).

    >>> cycles([("a", "b"), ("b", "a"), ("b", "c")])
    [['a', 'b']]
    """
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        graph[source].add(target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            start = stack.index(node)
            found.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted((component for component in found if len(component) > 1), key=lambda names: (-len(names), names))


# Functions and classes


def functions_of(module: Module) -> Iterator[FoundFunction]:
    """Yield every function and method of a module, nested ones too."""
    yield from _functions(module.tree, module.name)


def _functions(node: ast.AST, prefix: str) -> Iterator[FoundFunction]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield FoundFunction(f"{prefix}.{child.name}", child, isinstance(node, ast.ClassDef))
        named = isinstance(child, Function | ast.ClassDef)
        yield from _functions(child, f"{prefix}.{child.name}" if named else prefix)  # type: ignore[attr-defined]


def complexity(function: Function) -> int:
    """Return the cyclomatic complexity of a function as ruff's C901 computes it.

    >>> complexity(ast.parse("def f(x):\\n  if x and x > 1: return 1\\n  return [y for y in x if y]").body[0])
    2
    """
    return 1 + _branches(function.body)


def _branches(statements: Sequence[ast.stmt]) -> int:
    return sum(map(_branches_of, statements))


def _branches_of(statement: ast.stmt) -> int:
    match statement:
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            return 1 + _branches(statement.body) + _branches(statement.orelse)
        case ast.Try() | ast.TryStar():
            handlers = sum(1 + _branches(handler.body) for handler in statement.handlers)
            rest = _branches([*statement.body, *statement.orelse, *statement.finalbody])
            return handlers + rest + bool(statement.orelse)
        case ast.Match():
            branches = sum(1 + _branches(case.body) for case in statement.cases)
            return branches - _catches_all(statement.cases[-1])
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return 1 + _branches(statement.body)
        case ast.With() | ast.AsyncWith() | ast.ClassDef():
            return _branches(statement.body)
    return 0


def _catches_all(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def full_complexity(function: Function) -> int:
    """Return the complexity with and/or, ternaries, asserts, and loops and conditions of comprehensions counted too.

    >>> full_complexity(ast.parse("def f(x):\\n  if x and x > 1: return 1\\n  return [y for y in x if y]").body[0])
    5
    """
    extra = 0
    for node in ast.walk(function):
        match node:
            case ast.BoolOp():
                extra += len(node.values) - 1
            case ast.comprehension():
                extra += 1 + len(node.ifs)
            case ast.IfExp() | ast.Assert():
                extra += 1
    return complexity(function) + extra


def arguments(function: FoundFunction) -> int:
    """Return the number of named arguments, without self and cls, *args and **kwargs."""
    given = function.node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    implicit = function.is_method and names[:1] in (["self"], ["cls"])
    return len(names) - implicit + len(given.kwonlyargs)


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield every annotation of arguments, results and variables."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.FunctionDef(returns=ast.expr() as annotation):
                yield annotation
            case ast.AsyncFunctionDef(returns=ast.expr() as annotation):
                yield annotation


def count_any(annotation: ast.expr) -> int:
    """Return how often Any stands in an annotation, also in one that is quoted.

    >>> count_any(ast.parse("dict[Any, 'list[typing.Any]']", mode="eval").body)
    2
    """
    count = 0
    for node in ast.walk(annotation):
        match node:
            case ast.Name(id="Any") | ast.Attribute(attr="Any"):
                count += 1
            case ast.Constant(value=str() as text):
                with contextlib.suppress(SyntaxError):
                    count += count_any(ast.parse(text, mode="eval").body)
    return count


def takes_any_keywords(function: Function) -> bool:
    """Return whether a function takes **settings: Any, or **settings without a type."""
    given = function.args.kwarg
    return given is not None and (given.annotation is None or count_any(given.annotation) > 0)


# All measures


def measure(package: Path) -> list[Row]:
    """Return every measure of a package that can be read from its source."""
    modules = read_modules(package)
    return [*_sizes(modules), *_import_rows(modules), *_class_rows(modules), *_function_rows(modules)]


def _sizes(modules: Sequence[Module]) -> list[Row]:
    files, lines = Counter(module.room for module in modules), Counter[str]()
    for module in modules:
        lines[module.room] += module.lines
    return [*_per_room("files", files), *_per_room("lines", lines)]


def _per_room(measure: str, values: Mapping[str, int]) -> list[Row]:
    return [Row(measure, ALL, sum(values.values())), *(Row(measure, room, values[room]) for room in sorted(values))]


def _import_rows(modules: Sequence[Module]) -> list[Row]:
    names = {module.name for module in modules}
    rooms = {module.name: module.room for module in modules}
    found = {edge for module in modules for edge in imports_of(module, names)}
    rows = []
    for kind, lazy in IMPORTS:
        edges = [edge for edge in found if edge.lazy == lazy]
        rows.append(Row(kind, ALL, len(edges)))
        for room in sorted(set(rooms.values())):
            counts = Counter(rooms[edge.target] for edge in edges if rooms[edge.source] == room)
            counts.pop(room, None)
            detail = "; ".join(f"{other} {count}" for other, count in sorted(counts.items()))
            rows.append(Row(kind, room, counts.total(), detail))
    between_rooms = {(rooms[edge.source], rooms[edge.target]) for edge in found}
    in_modules = cycles((edge.source, edge.target) for edge in found)
    in_rooms = cycles(between_rooms)
    return [
        *rows,
        Row("imports between rooms", ALL, sum(source != target for source, target in between_rooms)),
        Row("module cycles", ALL, len(in_modules), _joined(" ".join(each) for each in in_modules)),
        Row("modules in cycles", ALL, sum(map(len, in_modules))),
        Row("room cycles", ALL, len(in_rooms), _joined(" ".join(each) for each in in_rooms)),
    ]


def _class_rows(modules: Sequence[Module]) -> list[Row]:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module.name)
    twice = {name: places for name, places in sorted(homes.items()) if len(places) > 1}
    detail = _joined(f"{name} in {', '.join(places)}" for name, places in twice.items())
    return [Row("classes", ALL, sum(map(len, homes.values()))), Row("duplicate class names", ALL, len(twice), detail)]


def _function_rows(modules: Sequence[Module]) -> list[Row]:
    functions = [function for module in modules for function in functions_of(module)]
    any_keywords = [each.name for each in functions if takes_any_keywords(each.node)]
    any_annotations = Counter[str]()
    for module in modules:
        any_annotations[module.room] += sum(map(count_any, annotations(module.tree)))
    return [
        Row("functions", ALL, len(functions)),
        *_ranked("longest function", functions, _length),
        *_ranked("highest complexity", functions, lambda each: complexity(each.node), MAX_COMPLEXITY),
        *_ranked(
            "highest complexity, expressions counted",
            functions,
            lambda each: full_complexity(each.node),
            MAX_COMPLEXITY,
        ),
        *_ranked("most arguments", functions, arguments, MAX_ARGUMENTS),
        *(row for row in _per_room("Any in annotations", any_annotations) if row.value),
        Row("**keywords of type Any", ALL, len(any_keywords), _joined(any_keywords)),
    ]


def _length(function: FoundFunction) -> int:
    return (function.node.end_lineno or 0) - function.node.lineno + 1


def _ranked(
    measure: str, functions: Sequence[FoundFunction], value: Callable[[FoundFunction], int], limit: int | None = None
) -> list[Row]:
    """Return the highest value with the functions that lead, and how many are over a limit."""
    values = sorted(((value(each), each) for each in functions), key=lambda pair: (-pair[0], pair[1].name))
    leading = [(number, each) for number, each in values if limit is not None and number > limit] or values[:TOP]
    rows = [Row(measure, ALL, values[0][0] if values else 0, _joined(each.place(number) for number, each in leading))]
    if limit is not None:
        rows.append(Row(f"{measure}: functions over {limit}", ALL, sum(number > limit for number, _ in values)))
    return rows


def _joined(items: Iterable[str]) -> str:
    return "; ".join(items)


# Walks: the code that runs in three tasks


class Tracer:
    """Notes which code of a package runs, in every thread started after it was installed.

    Code made at run time has no file in the package and does not count, nor does what runs while a module is imported.
    """

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package}{os.sep}"
        self.names: set[tuple[str, str]] = set()  # file and name of what ran
        self.active = False
        self.importing = threading.local()

    def install(self) -> None:
        """Hook into this thread and those to come; nothing is noted yet."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def _hook(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            depth: int = getattr(self.importing, "depth", 0)
            self.importing.depth = depth + (1 if event == "call" else -1)
        elif self.active and event == "call" and code.co_filename.startswith(self.prefix):
            is_class = not code.co_flags & inspect.CO_OPTIMIZED
            if not is_class and not getattr(self.importing, "depth", 0):
                self.names.add((code.co_filename, code.co_name))

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what runs in this block."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def functions(self) -> dict[str, list[str]]:
        """Return the functions that ran, by file."""
        found: dict[str, list[str]] = defaultdict(list)
        for file, name in sorted(self.names):
            found[file.removeprefix(self.prefix)].append(name)
        return found


IMAGES, SIZE, CLASSES = 40, 32, 10
PREPARE = (
    f"attach timm:test_resnet --classes {CLASSES} --image-size {SIZE} --after layer1,layer2 -o attached",
    "train attached labelled.npz --epochs 1 -o model",
    "record model labelled.npz -o recorded.npz",
    "costs model -o costs.json",
    "calibrate recorded.npz --costs costs.json --budget 90% --method eero -o policy.json",
)


def prepare() -> None:
    """Write images, a small network with exits and its policy into the working folder."""
    import numpy as np

    from alight import recordings

    rng = np.random.default_rng(0)
    for name, samples in (("labelled", 200), ("images", IMAGES)):
        images = rng.integers(256, size=(samples, 3, SIZE, SIZE), dtype=np.uint8)
        np.savez(f"{name}.npz", images=images, labels=rng.integers(CLASSES, size=samples))
    for line in PREPARE:
        command(line)
    recording = recordings.load()
    recording.labelled.save("shipped.npz")
    recording.costs.save("shipped.json")


def walk_calibrate(tracer: Tracer) -> None:
    """Calibrate a policy with one method, `eero`, on a recorded table that ships with the package."""
    with tracer.noting():
        command("calibrate shipped.npz --costs shipped.json --budget 50% --method eero -o calibrated.json")


def walk_predict(tracer: Tracer) -> None:
    """Predict the images with the network and its policy."""
    with tracer.noting():
        command("predict model policy.json images.npz -o answers.csv")


def walk_request(tracer: Tracer) -> None:
    """Start the service, let starlette's test client stand where its server would, and send the same request twice."""
    import numpy as np
    import uvicorn
    from fastapi.testclient import TestClient
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((SIZE, SIZE, 3), 128, np.uint8)).save(file, "PNG")
    content = {"images": [base64.b64encode(file.getvalue()).decode()]}

    def ask(server: uvicorn.Server, **_: object) -> None:
        application: Any = server.config.app
        with TestClient(application, base_url="http://127.0.0.1") as client:
            client.post("/predict", json=content).raise_for_status()
            with tracer.noting():
                client.post("/predict", json=content).raise_for_status()

    async def serve(server: uvicorn.Server, **_: object) -> None:
        ask(server)

    uvicorn.Server.run, uvicorn.Server.serve = ask, serve  # type: ignore[method-assign, assignment]
    command("serve model policy.json --port 0 --threads 1 --no-state --log-level error")


def command(line: str) -> None:
    """Run a command of alight in this process."""
    from alight.cli import main

    with contextlib.redirect_stdout(sys.stderr):
        status = main(line.split())
    if status:
        raise SystemExit(f"alight {line}: exit status {status}")


WALKS: dict[str, Callable[[Tracer], None]] = {
    "alight calibrate": walk_calibrate,
    f"alight predict, {IMAGES} images": walk_predict,
    "one HTTP request": walk_request,
}


def measure_walks(package: Path) -> list[Row]:
    """Return functions and files of each walk, every walk in a process of its own."""
    rows = []
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("prepare", *WALKS):
            line = [sys.executable, str(Path(__file__).resolve()), "--package", str(package), "--run-walk", name]
            done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: exit status {done.returncode}\n{done.stderr}")
            if name in WALKS:
                functions: dict[str, list[str]] = json.loads(done.stdout)
                detail = _joined(f"{file}: {', '.join(names)}" for file, names in functions.items())
                rows.append(Row(f"{name}: functions", ALL, sum(map(len, functions.values())), detail))
                rows.append(Row(f"{name}: files", ALL, len(functions)))
    return rows


def run_walk(name: str, package: Path) -> None:
    """Run one walk in this process and print the functions that ran, by file, as JSON."""
    if name == "prepare":
        prepare()
        return
    tracer = Tracer(package)
    tracer.install()
    WALKS[name](tracer)
    sys.setprofile(None)
    if not tracer.names:
        raise SystemExit(f"nothing of {package} ran: another alight was imported, or the service did not use uvicorn")
    print(json.dumps(tracer.functions()))


# Tables


def missed(rows: Iterable[Row]) -> list[Row]:
    """Return the measures that are over their goal."""
    return [row for row in rows if row.room == ALL and row.value > GOALS.get(row.measure, row.value)]


def table(rows: Sequence[Row], before: Sequence[Row] | None = None) -> str:
    """Return the measures as aligned text: goals, sizes and imports of each room, and the details.

    >>> print(table([Row("files", "all", 120)], [Row("files", "all", 166)]))
    measure  before  after  goal
    files       166    120  <= 115  over
    """
    past = {(row.measure, row.room): str(row.value) for row in before or ()}
    lines = [["measure", *(["value"] if before is None else ["before", "after"]), "goal", ""]]
    for row in rows:
        if row.room == ALL:
            goal = GOALS.get(row.measure)
            judged = ["", ""] if goal is None else [f"<= {goal}", "over" if row.value > goal else "met"]
            old = [] if before is None else [past.get((row.measure, ALL), "-")]
            lines.append([row.measure, *old, str(row.value), *judged])
    numbers = len(lines[0]) - 3
    rooms = sorted({row.room for row in (*rows, *(before or ()))} - {ALL})
    parts = [
        _aligned(lines, numbers),
        *(_room_tables(rows, past if before is not None else None, rooms) if rooms else ()),
    ]
    for row in rows:
        if row.room == ALL and row.detail:
            parts.append("\n  ".join([f"{row.measure}:", *row.detail.split("; ")]))
    return "\n\n".join(parts)


def _room_tables(rows: Sequence[Row], past: Mapping[tuple[str, str], str] | None, rooms: Sequence[str]) -> list[str]:
    """Return sizes of each room, and how many modules of which other rooms it imports."""
    found = {(row.measure, row.room): row for row in rows}
    sizes = ("files", "lines")
    lines = [["room", *(f"{name} before" for name in sizes if past is not None), *sizes]]
    for room in rooms:
        old = [past.get((name, room), "-") for name in sizes] if past is not None else []
        lines.append([room, *old, *(str(found[name, room].value) if (name, room) in found else "-" for name in sizes)])
    parts = [_aligned(lines, len(lines[0]) - 1)]
    for name, _ in IMPORTS:
        graph = [(room, found[name, room].detail) for room in rooms if (name, room) in found]
        parts.append(
            "\n  ".join([f"{name}, of other rooms:", *(f"{room}: {detail}" for room, detail in graph if detail)])
        )
    return parts


def _aligned(lines: Sequence[Sequence[str]], numbers: int) -> str:
    """Return lines in columns, the numbers that follow the first column to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [cell.rjust if 0 < place <= numbers else cell.ljust for place, cell in enumerate(line)]
        text.append("  ".join(put(width) for put, width in zip(cells, widths, strict=True)).rstrip())
    return "\n".join(text)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write one line per measure and room."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)


@contextlib.contextmanager
def package_at(revision: str) -> Iterator[Path]:
    """Unpack the package of another revision into a folder that is removed afterwards."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            file.extractall(folder, filter="data")
        yield Path(folder).resolve() / "src" / "alight"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=PACKAGE, help="folder of the package (default: src/alight)")
    parser.add_argument("--against", metavar="REV", help="measure another git revision too")
    parser.add_argument("--walks", action="store_true", help="run the three tasks and count the code they run")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the measures of the working tree")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a goal is missed")
    parser.add_argument("--run-walk", choices=["prepare", *WALKS], help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    package = options.package.resolve()
    if options.run_walk:
        run_walk(options.run_walk, package)
        return 0
    measures = [measure, measure_walks] if options.walks else [measure]
    rows, before = [row for each in measures for row in each(package)], None
    if options.against:
        with package_at(options.against) as other:
            before = [row for each in measures for row in each(other)]
    print(table(rows, before))
    if options.csv:
        write_csv(options.csv, rows)
    return int(options.check and bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
