"""The text of code that was typed and not read from a file, taken along to the ranks.

A notebook's cells have their text in the memory of the notebook's process alone; a rank's tracebacks show it.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from typing import Any


class WithSource:
    """A function together with the text of what was typed in this process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = getattr(function, "__qualname__", repr(function))
        # An entry without a modification time is nobody's file: whoever typed it put it there.
        self.texts = {
            name: entry
            for name, entry in list(linecache.cache.items())
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, in a rank."""
        linecache.cache.update(self.texts)
        return self.function(*args, **kwargs)
