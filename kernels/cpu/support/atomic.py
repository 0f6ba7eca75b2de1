"""Counters that threads share: no other thread can come between the parts of a `fetch_add`.

Each function takes the address of an 8-byte integer. Counters in use at the same time belong on different
cache lines: two cores that write to one line keep taking it from each other.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from .vector_instructions import INT64, Value


@intrinsic
def fetch_add(context: Any, address: Any, amount: Any) -> Any:
    """fetch_add(address, amount): add to the counter, and return its value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def read(context: Any, address: Any) -> Any:
    """read(address): the counter; whatever others wrote before they added to it is then visible."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.intp(types.intp), generate


@intrinsic
def store(context: Any, address: Any, value: Any) -> Any:
    """store(address, value): set the counter; whatever was written before is visible to those who read it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        counter = builder.inttoptr(arguments[0], INT64.as_pointer())
        builder.store_atomic(arguments[1], counter, "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@njit("intp(intp, intp, intp)", nogil=True)
def wait(address: int, value: int, patience: int) -> int:
    """Return how many looks are left when the counter has reached `value`; 0 after `patience` looks at it."""
    while patience > 0 and read(address) < value:
        patience -= 1
    return patience
