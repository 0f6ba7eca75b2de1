"""Match names against patterns, and suggest the nearest known name for an unknown one.

A pattern such as "layers.*.mlp" names that part of every layer. "*" stands for any letters between two dots,
never for a dot, so a pattern has as many dots as the names that it fits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """Return an error for an unknown `name`, for the caller to raise: unknown("model", "gpt-2", names)."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {what} {name!r}: {guess}known are {', '.join(names)}")


def fits(name: str, pattern: str) -> bool:
    """Whether the dotted `name`, such as "layers.3.mlp", matches the pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def fits_none(pattern: str, names: Iterable[str]) -> ValueError:
    """Return an error for a pattern that fits no name, for the caller to raise; it suggests the nearest."""
    shortened = (".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return unknown("part", pattern, dict.fromkeys(shortened))
