"""Check arguments that must be integers or numbers. A bool is neither, although Python calls it an int."""

from __future__ import annotations

from typing import TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an integer or a float, and not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int | None = None, hint: str = "") -> None:
    """Refuse a `value` that is not an integer, or is less than `least`; `hint` ends the message.

    Raises TypeError ("rounds is 2.5 (float); give an integer") or ValueError ("rounds is 0; give at least
    1").
    """
    if not is_whole(value):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); give an integer{hint}")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; give at least {least}{hint}")
