"""Settings as JSON and back, to the same Python values: tuples stay tuples, and nothing is ever executed.

JSON has only lists, and only text as keys. The settings of a scheduler or an optimizer's group may also hold
tuples, keys that are numbers, and small tensors; each is written as an object with one key that begins with a
dollar sign. Floats keep all their digits. Infinities and NaN are written as Python writes them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy
import torch


def encode(value: Any, where: str) -> Any:
    """Return a value as JSON can hold it. where: its name, for the error.

    Raises TypeError if it contains something other than None, booleans, real numbers, text, lists, tuples,
    dictionaries, counters and real tensors.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (numpy.bool_, numpy.integer, numpy.floating)):
        return value.item()
    if isinstance(value, list):
        return [encode(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(each, f"{where}[{i}]") for i, each in enumerate(value)]}
    if isinstance(value, dict):
        if type(value) is dict and all(isinstance(key, str) and key[:1] != "$" for key in value):
            return {key: encode(each, f"{where}.{key}") for key, each in value.items()}
        pairs = [[encode(key, where), encode(each, f"{where}.{key}")] for key, each in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    if isinstance(value, torch.Tensor) and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [dtype, list(value.shape), value.detach().reshape(-1).tolist()]}
    kind = type(value).__name__ if not isinstance(value, torch.Tensor) else f"tensor of {value.dtype}"
    raise TypeError(
        f"{where} is a {kind}, which a checkpoint cannot hold; give None, booleans, real numbers, text, real "
        "tensors, and lists, tuples and dictionaries of them"
    )


def decode(value: Any) -> Any:
    """Return the value that `encode` was given. ValueError, TypeError or AttributeError for other input."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(each) for key, each in value.items()}
    content = value[kind]
    if kind == "$tuple":
        return tuple(decode(each) for each in content)
    if kind == "$tensor":
        name, shape, numbers = content
        return torch.tensor(numbers, dtype=dtype_named(name)).view(shape)
    if kind in ("$dict", "$counter"):
        pairs = {decode(key): decode(each) for key, each in content}
        return Counter(pairs) if kind == "$counter" else pairs
    raise ValueError(f"unknown kind of value {kind!r}")


def dtype_named(name: str) -> torch.dtype:
    """Return torch.float32 for "float32"; ValueError if no dtype has this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype
