"""Show examples in docstrings as code, fields of data classes with their comments as parameters, defaults as values."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from griffe import Alias, Attribute, Class, Extension, Function, Module, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
PARAMETERS = "Args:\n"


class Examples(Extension):
    """Put a fence around every example, and the parameters of a data class before it."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change an object's docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Describe the fields of a data class, unless its docstring does."""
        made = any(str(each.value).startswith("dataclass") for each in cls.decorators)
        if not made or not cls.docstring or PARAMETERS in cls.docstring.value:
            return
        lines = [f"    {name}: {beside}" for name, beside in fields(cls).items() if beside]
        before, fence, example = cls.docstring.value.partition("```pycon")
        if lines:
            described = "\n".join([PARAMETERS.rstrip(), *lines])
            cls.docstring.value = f"{before.rstrip()}\n\n{described}\n\n{fence}{example}"

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Show defaults that are constants of a module as their values."""
        for function in functions(pkg):
            for each in function.parameters:
                if str(each.default).isupper() and str(each.default).isidentifier():
                    with suppress(KeyError):  # of two constants on one line
                        each.default = value_of(function.module[str(each.default)], pkg)


def value_of(constant: Attribute | Alias, pkg: Module) -> str:
    """Return the value of a constant, which may be imported from another module of the package."""
    while isinstance(constant, Alias):
        constant = pkg[constant.target_path.removeprefix(f"{pkg.name}.")]
    return str(constant.value)


def functions(place: Object) -> Iterator[Function]:
    """Yield all functions and methods of a package, module or class."""
    for each in place.members.values():
        if isinstance(each, Function):
            yield each
        elif isinstance(each, Module | Class):
            yield from functions(each)


def fields(cls: Class) -> dict[str, str]:
    """Return the comment beside every public field of a data class, "" where there is none."""
    assert isinstance(cls.filepath, Path)
    source = cls.filepath.read_text(encoding="utf-8").splitlines()
    own = [each for each in cls.members.values() if isinstance(each, Attribute) and each.annotation and each.lineno]
    own = [each for each in own if not each.name.startswith("_") and "instance-attribute" in each.labels]
    return {each.name: _capital(source[(each.lineno or 1) - 1].partition("  # ")[2]) for each in own}


def _capital(comment: str) -> str:
    return comment[:1].upper() + comment[1:] + "." * bool(comment)
