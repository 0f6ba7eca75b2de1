"""Counters that threads share: no other thread can come between the parts of a `fetch_add`.

Each function takes the address of an 8-byte integer. Counters in use at the same time belong on different
cache lines: two cores that write to one line keep taking it from each other.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from .vector_instructions import INT64, Emitter, Value, emitted


def _counter(at: Emitter, address: Value) -> Value:
    return at.builder.inttoptr(address, INT64.as_pointer())


@emitted(types.intp, types.intp, types.intp)
def fetch_add(at: Emitter, address: Value, amount: Value) -> Any:
    """fetch_add(address, amount): add to the counter, and return its value before."""
    return at.builder.atomic_rmw("add", _counter(at, address), amount, "seq_cst")


@emitted(types.intp, types.intp)
def read(at: Emitter, address: Value) -> Any:
    """read(address): the counter; whatever others wrote before they added to it is then visible."""
    return at.builder.load_atomic(_counter(at, address), "acquire", 8)


@emitted(types.void, types.intp, types.intp)
def store(at: Emitter, address: Value, value: Value) -> Any:
    """store(address, value): set the counter; whatever was written before is visible to those who read it."""
    at.builder.store_atomic(value, _counter(at, address), "release", 8)


@njit("intp(intp, intp, intp)", nogil=True)
def wait(address: int, value: int, patience: int) -> int:
    """Return how many looks are left when the counter has reached `value`; 0 after `patience` looks at it."""
    while patience > 0 and read(address) < value:
        patience -= 1
    return patience
