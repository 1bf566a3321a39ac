"""Show examples in docstrings as code."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)


class Examples(Extension):
    """Put a fence around every example."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change an object's docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
