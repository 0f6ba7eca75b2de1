"""Patterns for the names of a model's parts: "layers.*.mlp" is that part of every layer.

"*" in a name between two dots stands for any letters, never for a dot: a pattern has as many names as what it
fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from minidist._names import unknown


def fits(name: str, pattern: str) -> bool:
    """Whether a name, such as "layers.3.mlp", is one of those that a pattern stands for."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def fits_none(pattern: str, names: Iterable[str]) -> ValueError:
    """The error for a pattern that fits none of the names, for the caller to raise; it offers the nearest."""
    return unknown("part", pattern, dict.fromkeys(map(_pattern, names)))


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
