"""Read docstrings for the site's API reference: examples as code, and the function `kernels.rung`.

An extension of Griffe, which reads the sources for mkdocstrings: mkdocs.yml names it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)


class Reference(griffe.Extension):
    """Changes what Griffe has read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fence an example: in Markdown its `>>>` would make a quotation of a quotation of a quotation."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
        if obj.path == "minidist.kernels.rung" and obj.is_function:
            self.rung = obj

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Keep `kernels.rung` beside the module of the same name, which Griffe prefers."""
        pkg["kernels"].set_member("rung()", self.rung)
