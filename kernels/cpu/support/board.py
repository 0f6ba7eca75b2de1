"""The board: where a thread posts a product, and others find it without a word of Python.

A thread that asks Python for work needs some 20 us, in which two cores multiply 128 x 128 matrices. So the
board is memory that compiled code reads. Its first words are counters, each on a cache line of its own:

- the bell counts the products posted, and workers watch it;
- the door is minus the number of threads inside, which read the board or work on its product;
- `open` is the number of the product while threads may still join;
- `packed` deals out the parts of b to pack, and `taken` those of out to multiply.

A worker that joins first steps inside, then checks that the product is still open. The thread that posted it
first closes it, then waits until nobody is inside, in `close` for a while and then in `thread_pool.clear`. So
nobody works on a product that has ended.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from . import atomic, thread_pool
from .vector_instructions import Emitter, Value, emitted

# In bytes from the board's address; `thread_pool` counts words.
BELL, DOOR, OPEN = 8 * thread_pool.BELL, 8 * thread_pool.DOOR, 8 * thread_pool.OPEN
PACKED, TAKEN, NUMBERS = 8 * thread_pool.PACKED, 8 * thread_pool.TAKEN, 8 * thread_pool.NUMBERS
FROM_BACK = 2**32  # added to `taken` for a part taken from the back, and 1 for one from the front
ARRAY = 5  # numbers of an array: its address, its shape and its strides
# The numbers after those of a, b and out, in the order in which rung 7 writes them.
ELEMENT = thread_pool.ELEMENT - thread_pool.NUMBERS
SEATS, PACKS, DOWN, ACROSS, HOW, SHARED, FLAGS = range(ELEMENT + 1, ELEMENT + 8)


@emitted(lambda address, like: types.CPointer(like.dtype), types.intp, None)
def elements(at: Emitter, address: Value, like: Value) -> Any:
    """elements(address, like): the address, as a pointer to elements of `like`, an array or a dtype."""
    return at.builder.inttoptr(address, at.context.get_value_type(types.CPointer(at.kinds[1].dtype)))


@njit(boundscheck=False)
def address(x: Any) -> Any:
    """Return where an array begins."""
    return np.intp(x.ctypes.data)


@njit(boundscheck=False)
def write(at: int, place: int, value: int) -> None:
    """Write one of the product's numbers."""
    atomic.store(at + NUMBERS + 8 * place, value)


@njit(boundscheck=False)
def number(at: int, place: int) -> Any:
    """Read one of the product's numbers."""
    return atomic.read(at + NUMBERS + 8 * place)


@njit(boundscheck=False)
def write_array(at: int, place: int, x: Any) -> None:
    """Write where an array lies: `place` is 0 for a, 1 for b, 2 for out."""
    start = ARRAY * place
    write(at, start, address(x))
    for axis in range(2):
        write(at, start + 1 + axis, x.shape[axis])
        write(at, start + 3 + axis, x.strides[axis])


@njit(boundscheck=False)
def where(at: int, place: int) -> tuple[int, int, int, int, int]:
    """Return where the array at `place` lies: its address, its shape and its strides."""
    start = ARRAY * place
    rows, columns = number(at, start + 1), number(at, start + 2)
    return number(at, start), rows, columns, number(at, start + 3), number(at, start + 4)


@njit(boundscheck=False)
def array(at: int, place: int, like: Any) -> Any:
    """Return the array at `place`, of the dtype of the array `like`."""
    start, m, n, down, right = where(at, place)
    return np.lib.stride_tricks.as_strided(carray(elements(start, like), (1, 1)), (m, n), (down, right))


@njit(boundscheck=False)
def cut(at: int, like: Any) -> tuple[int, int, int, int, Any]:
    """Return how the product is multiplied, its parts of b, of out down and across, and where b is packed."""
    packed = elements(number(at, SHARED), like)
    return number(at, HOW), number(at, PACKS), number(at, DOWN), number(at, ACROSS), packed


@njit(boundscheck=False)
def post(
    at: int, a: Any, b: Any, out: Any, how: int, seats: int, parts: Any, shared: int, flags: int
) -> None:
    """Write a product on the board, and ring the bell.

    `how` is its way of `small_products.py`; `parts` counts those of b side by side, and of out one below
    the other and side by side. b is packed into the memory at `shared`, with a word at `flags` for each part.
    """
    write_array(at, 0, a)
    write_array(at, 1, b)
    write_array(at, 2, out)
    packs, down, across = parts
    for i, value in enumerate((out.itemsize, seats, packs, down, across, how, shared, flags)):
        write(at, ELEMENT + i, value)
    product = atomic.read(at + BELL) + 1
    atomic.store(at + PACKED, 0)
    atomic.store(at + TAKEN, 0)
    atomic.store(at + OPEN, product)
    atomic.fetch_add(at + BELL, 1)


@njit(boundscheck=False)
def join(at: int, seen: int, element: int, leads: bool, patience: int) -> Any:
    """Wait for a product after number `seen`, step inside to work for it, and return its number.

    Return 0 if none comes within `patience` looks, and -1 if its elements are not `element` bytes long. A
    worker passes over a product that has ended or has no free seat, and gets no more looks for it: however
    many small products follow each other, threads that they have no work for fall asleep. The thread that
    posted it (`leads`) needs no seat.
    """
    while True:
        patience = atomic.wait(at + BELL, seen + 1, 0 if leads else patience)
        product = atomic.read(at + BELL)
        if product == seen:
            return 0
        seen = product
        inside = -atomic.fetch_add(at + DOOR, -1)
        is_open = atomic.fetch_add(at + OPEN, 0) == product
        fits = number(at, ELEMENT) == element
        if is_open and fits and (leads or inside < number(at, SEATS)):
            return product
        leave(at)
        if is_open and not fits:
            return -1


@njit(boundscheck=False)
def take_to_pack(at: int) -> Any:
    """Return the number of the next part of b to pack, which no other thread gets."""
    return atomic.fetch_add(at + PACKED, 1)


@njit(boundscheck=False)
def take(at: int, parts: int, leads: bool) -> Any:
    """Return the number of a part of out that no other thread gets, or -1 if none of the `parts` is left.

    The thread that leads takes the first parts, and the others the last. So if the same matrices are
    multiplied again, most of what a core needs is in its own caches.
    """
    taken = atomic.fetch_add(at + TAKEN, 1 if leads else FROM_BACK)
    back, front = divmod(taken, FROM_BACK)
    if front + back >= parts:
        return -1
    return front if leads else parts - 1 - back


@njit(boundscheck=False)
def leave(at: int) -> None:
    """Step outside."""
    atomic.fetch_add(at + DOOR, 1)


@njit(boundscheck=False)
def close(at: int, patience: int) -> None:
    """Let no more threads join, and wait for those inside, for so many looks at the door."""
    atomic.fetch_add(at + OPEN, -atomic.read(at + OPEN))
    atomic.wait(at + DOOR, 0, patience)
    atomic.fetch_add(at + DOOR, 0)  # with this, what those inside have written is here, too
