"""Import a package's public names when they are first used.

`import minidist` and `minidist --help` take milliseconds, because only the first name that needs torch
imports it. Type checkers and editors read the imports under `TYPE_CHECKING` next to each call of `lazy`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy(
    package: str, homes: dict[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package whose names are defined in other modules.

    homes: maps each module to the public names that it defines; to none if the module itself is the name.
    """
    modules = {name: module for module, names in homes.items() for name in names}
    modules |= {module.rpartition(".")[2]: module for module, names in homes.items() if not names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        value = getattr(module, name) if homes[modules[name]] else module
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(modules), sorted(modules)
