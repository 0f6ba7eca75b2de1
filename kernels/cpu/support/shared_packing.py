"""A b that all threads pack together, and products with it: rung 6's loops, cut into parts for rung 7."""

from __future__ import annotations

from typing import Any

from numba import njit

from . import atomic, board, packed_product, register_tile
from .vector_moves import offset


@njit(boundscheck=False)
def post(at: int, a: Any, b: Any, out: Any, shared: Any, how: int, seats: int, parts: Any) -> None:
    """Put a product on the board at `at`: see `board.post`.

    `shared` is the memory for the packed b, and behind it for a word that says whether a part is packed.
    """
    columns = register_tile.columns(out)
    start = board.address(shared)
    flags = start + b.shape[0] * -(-b.shape[1] // columns) * columns * out.itemsize
    for part in range(parts[0] * -(-b.shape[0] // register_tile.DEPTH)):
        atomic.store(flags + 8 * part, 0)
    board.post(at, a, b, out, how, seats, parts, start, flags)


@njit(boundscheck=False, inline="always")
def place(part: int, shape: Any, tile: Any, parts: Any, how: int) -> tuple[int, int, int, int, int]:
    """Return where a part of out lies: its rows (from, to), its columns (from, to), and its height in tiles.

    out has `shape`, and is cut into `parts`: (one below the other, side by side), at edges of tiles. Without
    packing (`how`) the last part takes the columns beyond the whole tiles, too.
    """
    (m, n), (rows, columns), (down, across) = shape, tile, parts
    tiles, wide = -(-m // rows), n // columns if how else -(-n // columns)
    t, s = divmod(part, across)
    t0, t1 = t * tiles // down, (t + 1) * tiles // down
    j0, j1 = s * wide // across * columns, n if s == across - 1 else (s + 1) * wide // across * columns
    return t0 * m // tiles, t1 * m // tiles, j0, j1, t1 - t0


@njit(boundscheck=False)
def pack_part(b: Any, to: Any, part: int, parts: int) -> None:
    """Pack one part of b (k, n): number `part` of the `parts` side by side in each of its depths.

    When all parts are packed, `to` holds b's depths one after another, each as `pack_panels` leaves it.
    """
    k, n = b.shape
    columns = register_tile.columns(b)
    wide, depths = -(-n // columns), -(-k // register_tile.DEPTH)
    d, s = divmod(part, parts)
    p0, p1 = d * k // depths, (d + 1) * k // depths
    j0, j1 = s * wide // parts * columns, min(n, (s + 1) * wide // parts * columns)
    packed_product.pack_panels(b[p0:p1, j0:j1], offset(to, p0 * wide * columns + j0 * (p1 - p0)))


@njit(boundscheck=False)
def pack_together(b: Any, packed_b: Any, at: int, parts: int) -> None:
    """Pack b (k, n) in `parts` parts with the other threads of a board.

    A thread does not wait for a part that another has not finished: that one's core may belong to another
    program for milliseconds. It packs the part again, to the same values.
    """
    packs, flags = board.number(at, board.PACKS), board.number(at, board.FLAGS)
    part = board.take_to_pack(at)
    while part < parts:
        pack_part(b, packed_b, part, packs)
        atomic.store(flags + 8 * part, 1)
        part = board.take_to_pack(at)
    for other in range(parts):
        if not atomic.read(flags + 8 * other):
            pack_part(b, packed_b, other, packs)


@njit(boundscheck=False, inline="always")
def multiply_packed(a: Any, packed_b: Any, out: Any, j0: int, j1: int, own: Any, tiles: int) -> None:
    """Fill columns j0 to j1 of out (m, n) with a (m, k) times b, which `pack_together` has packed."""
    k = a.shape[1]
    columns = register_tile.columns(out)
    wide, depths = -(-out.shape[1] // columns), -(-k // register_tile.DEPTH)
    for d in range(depths):
        p0, p1 = d * k // depths, (d + 1) * k // depths
        panel = offset(packed_b, p0 * wide * columns + j0 * (p1 - p0))
        packed_product.multiply(a[:, p0:p1], panel, out[:, j0:j1], own, tiles, d)
