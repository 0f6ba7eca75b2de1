"""Unknown names: an error that offers the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a `name` that is no `what`, for the caller to raise: unknown("model", "gpt-2", names)."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {what} {name!r}: {guess}known are {', '.join(names)}")
