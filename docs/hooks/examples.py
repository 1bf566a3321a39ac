"""Show examples in docstrings as code, fields of data classes with their comments as parameters, defaults as values."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from griffe import Attribute, Class, Extension, Function, Object

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

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Show a default that is a constant of a module as its value."""
        for each in func.parameters:
            if str(each.default).isupper() and str(each.default).isidentifier():
                each.default = repr(getattr(import_module(func.module.path), str(each.default)))


def fields(cls: Class) -> dict[str, str]:
    """Return the comment beside every public field of a data class, "" where there is none."""
    assert isinstance(cls.filepath, Path)
    source = cls.filepath.read_text(encoding="utf-8").splitlines()
    own = [each for each in cls.members.values() if isinstance(each, Attribute) and each.annotation and each.lineno]
    own = [each for each in own if not each.name.startswith("_") and "instance-attribute" in each.labels]
    return {each.name: _capital(source[(each.lineno or 1) - 1].partition("  # ")[2]) for each in own}


def _capital(comment: str) -> str:
    return comment[:1].upper() + comment[1:] + "." * bool(comment)
