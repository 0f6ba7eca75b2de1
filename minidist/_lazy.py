"""Import a package's public names when they are first used.

`import minidist` and `minidist --help` take milliseconds, because only the first name that needs torch
imports it. A package lists its names once, as imports under `if TYPE_CHECKING`: type checkers and editors
read them there, and so does `lazy`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that calls it while it is imported."""
    spec: Any = sys.modules[package].__spec__
    text = spec.loader.get_data(spec.origin).decode()
    homes: dict[str, str] = {}  # the module of each name
    for line in text.partition("\nif TYPE_CHECKING:\n")[2].partition("\n\n")[0].splitlines():
        words = line.replace(",", "").split()  # from module import name as name
        if "import" in words:
            module = words[1]
        if "as" in words:
            homes[words[-1]] = module

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = importlib.import_module(homes[name] if homes[name] != package else f"{package}.{name}")
        value = found if homes[name] == package else getattr(found, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(homes), sorted(homes)
