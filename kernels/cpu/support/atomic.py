"""Counters that threads share: a step of `fetch_add` can't be divided by another thread's.

Both take the address of an 8-byte integer. Counters that are used at the same time belong on different cache
lines: two cores that write to one line take it from each other.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from .register_tile import intrinsic
from .vector_instructions import INT64, Value


@intrinsic
def fetch_add(context: Any, address: Any, amount: Any) -> Any:
    """fetch_add(address, amount): add to the counter, and return what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def read(context: Any, address: Any) -> Any:
    """read(address): the counter, and with it all that others wrote before they added to it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.intp(types.intp), generate


@njit("void(intp, intp, intp)", nogil=True)
def wait(address: int, value: int, patience: int) -> None:
    """Return when the counter has reached this value, or after that many looks at it."""
    while patience > 0 and read(address) < value:
        patience -= 1
