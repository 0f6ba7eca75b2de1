"""Values in words: numbers, arrays and arguments as a message shows them, short enough to read."""

from __future__ import annotations

from typing import Any

import numpy as np

SHORT = 8
"""Elements of an array that are shown; of a longer one, those about the first that is wrong."""


def number(value: float, digits: int = 4) -> str:
    """1 200 for 1200, and 0.25 for a quarter."""
    if float(value).is_integer():
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.{digits}g}"


def plural(many: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{many} {noun}{'s' * (many != 1)}"


def digits_for(one: Any, other: Any, least: int = 5) -> int:
    """As many digits as it takes to see that two numbers differ."""
    return next((digits for digits in range(least, 17) if f"{one:.{digits}g}" != f"{other:.{digits}g}"), 17)


def first_lines(error: BaseException, most: int = 300) -> str:
    """What an exception says, without the pages that some compilers add."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])
    return text if len(text) <= most else text[: most - 3] + "..."


def around(array: np.ndarray, place: int = 0, digits: int = 5) -> str:
    """An array of one dimension as text: all of a short one, else what lies about `place`."""
    start = max(0, min(place - 1, len(array) - SHORT)) if len(array) > SHORT else 0
    shown = ", ".join(_number(value, digits) for value in array[start : start + SHORT])
    left = "..., " if start else ""
    return f"[{left}{shown}{', ...' if start + SHORT < len(array) else ''}]"


def _number(value: Any, digits: int) -> str:
    """A number with so many digits, or with nine where these would make it a whole one that it is not."""
    text = f"{value:.{digits}g}"
    return text if "." in text or float(text) == value else f"{value:.9g}"


def as_array(value: Any) -> np.ndarray:
    """A number, array or tensor as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) in ("torch.bfloat16",):
            value = value.float()
    return np.asarray(value)


def a_kind_of(value: Any) -> str:
    """What a right value is, in words: a tensor, an array, a number."""
    if hasattr(value, "detach"):
        return "a tensor"
    return "an array" if isinstance(value, np.ndarray) else "a number"


def described(value: Any) -> str:
    """An argument as text, short enough for a message."""
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if len(value.shape) == 1 and value.shape[0] <= SHORT:
            return around(as_array(value))
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
