"""Import a package's public names when they are first used.

`import minidist` and `minidist --help` take milliseconds, because only the first name that needs torch
imports it. A package lists its names once, as imports under `TYPE_CHECKING`: type checkers and editors read
them there, and so does `lazy`, in the package's source.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package, from the imports in its source."""
    loader: Any = sys.modules[package].__loader__
    statements = ast.parse(loader.get_source(package)).body
    blocks = [node.body for node in statements if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    homes = {each.name: str(node.module) for node in imports for each in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:  # a module of its own
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(homes), sorted(homes)
