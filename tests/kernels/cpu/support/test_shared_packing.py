"""The b that all threads pack: its parts in any order, again and again, and nothing beyond the target."""

import functools
import itertools
import threading

import numpy as np
import pytest

from minidist.kernels.cpu.support import register_tile, vector_moves
from tests.helpers.products import (
    GUARD,
    assert_guards,
    every_dtype,
    every_layout,
    guarded,
    random_laid_out,
)


@functools.cache
def compiled(dtype):
    """pack_part for all parts of b, with the target given as an array and the element where it begins."""
    from numba import njit, types

    from minidist.kernels.cpu.support import shared_packing

    matrix, target = types.Array(getattr(types, dtype), 2, "A"), types.Array(getattr(types, dtype), 2, "C")

    @njit(types.void(matrix, target, types.intp, types.intp), nogil=True)
    def pack_part(b, to, start, parts):
        # The last part first: they are packed in any order.
        for part in range(parts * -(-b.shape[0] // register_tile.DEPTH) - 1, -1, -1):
            shared_packing.pack_part(b, vector_moves.pointer(to, 0, start), part, parts)

    return pack_part


def panels_by_numpy(b, columns, deepest):
    """Each depth's panels, one after another: what the register tile reads, in this order."""
    k, n = b.shape
    wide, depths = -(-n // columns), -(-k // deepest)
    padded = np.zeros((k, wide * columns), b.dtype)
    padded[:, :n] = b
    cuts = [d * k // depths for d in range(depths + 1)]
    blocks = [padded[start:stop] for start, stop in itertools.pairwise(cuts)]
    return np.concatenate(
        [panel.ravel() for block in blocks for panel in np.split(block, wide, axis=1)] or [np.zeros(0)]
    )


@every_dtype
@every_layout
def test_parts_packed_in_any_order_are_panels_padded_with_zeros(dtype, layout):
    rng = np.random.default_rng()
    columns = register_tile.tile_columns(dtype)
    for _ in range(12):
        k = int(
            rng.choice(
                [1, 7, 8, 9, 70, register_tile.DEPTH, register_tile.DEPTH + 1, 2 * register_tile.DEPTH + 5]
            )
        )
        n = int(rng.integers(1, 5 * columns))
        b = random_laid_out(rng, k, n, dtype, layout)
        wide = -(-n // columns)
        memory = guarded(k * wide * columns, dtype)
        compiled(dtype)(b, memory, GUARD, int(rng.integers(1, wide + 1)))
        assert_guards(memory)
        expected = panels_by_numpy(b, columns, register_tile.DEPTH)
        np.testing.assert_array_equal(memory[0, GUARD:-GUARD], expected, err_msg=f"{k} x {n}")


@every_dtype
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "columns reversed"])
def test_packing_again_changes_nothing_at_any_time(dtype, layout):
    """Rung 7 packs a part again where its thread may be asleep, while another multiplies with it already."""
    columns = register_tile.tile_columns(dtype)
    b = random_laid_out(np.random.default_rng(), 700, columns + 1, dtype, layout)
    memory = guarded(2 * columns * len(b), dtype)

    pack_part, stop = compiled(dtype), threading.Event()
    pack_part(b, memory, GUARD, 1)
    expected = memory.copy()

    def pack_again():
        while not stop.is_set():
            pack_part(b, memory, GUARD, 1)

    thread = threading.Thread(target=pack_again)
    thread.start()
    try:
        same = [np.array_equal(memory, expected, equal_nan=True) for _ in range(300)]
    finally:
        stop.set()
        thread.join()
    assert all(same), f"{same.count(False)} of {len(same)} looks found other values"
