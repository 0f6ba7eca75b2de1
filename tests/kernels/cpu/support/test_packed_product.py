"""Packing, against plain NumPy: any sizes and strides, padding of 0, and nothing beyond the target."""

import functools

import numpy as np

from minidist.kernels.cpu.support import register_tile, vector_moves
from tests.helpers.products import (
    GUARD,
    assert_guards,
    every_dtype,
    every_layout,
    guarded,
    laid_out,
    random_laid_out,
)


@functools.cache
def compiled(dtype):
    """The functions of panels, with the target given as an array and the element where it begins."""
    from numba import njit, types

    from minidist.kernels.cpu.support import packed_product

    matrix, target = types.Array(getattr(types, dtype), 2, "A"), types.Array(getattr(types, dtype), 2, "C")

    @njit(types.void(matrix, target, types.intp, types.intp))
    def pack(x, to, start, pitch):
        packed_product.pack(x, vector_moves.pointer(to, 0, start), pitch)

    @njit(types.void(target, types.intp, types.intp, matrix, types.intp))
    def put(tile, start, pitch, out, add):
        packed_product.put(vector_moves.pointer(tile, 0, start), pitch, out, add)

    return {"pack": pack, "put": put}


@every_dtype
@every_layout
def test_pack_copies_to_rows_a_pitch_apart_and_nothing_between_them(dtype, layout):
    rng = np.random.default_rng()
    vector = register_tile.tile_columns(dtype) // register_tile.VECTORS
    edges = [0, 1, vector - 1, vector, vector + 1, 2 * vector, 3 * vector + 1]
    for rows in edges:
        for columns in [*edges, int(rng.integers(70))]:
            x = random_laid_out(rng, rows, columns, dtype, layout)
            pitch = columns + int(rng.integers(3))
            memory = guarded(rows * pitch, dtype)
            compiled(dtype)["pack"](x, memory, GUARD, pitch)
            assert_guards(memory)
            packed = memory[0, GUARD:-GUARD].reshape(rows, pitch)
            np.testing.assert_array_equal(packed[:, :columns], x, err_msg=f"{rows} x {columns}")
            assert np.isnan(packed[:, columns:]).all()


@every_dtype
@every_layout
def test_put_writes_or_adds_and_nothing_else(dtype, layout):
    rng = np.random.default_rng()
    for _ in range(10):
        rows, columns, spare = (int(size) for size in rng.integers([0, 0, 0], [9, 40, 3]))
        tile = rng.standard_normal((rows, columns + spare)).astype(dtype)
        memory = guarded(tile.size, dtype)
        memory[0, GUARD:-GUARD] = tile.ravel()
        before = rng.standard_normal((rows, columns)).astype(dtype)
        for add in (0, 1):
            out, base = laid_out(before, layout)
            compiled(dtype)["put"](memory, GUARD, columns + spare, out, add)
            np.testing.assert_array_equal(out, before + tile[:, :columns] if add else tile[:, :columns])
            out[...] = np.nan
            assert np.isnan(base).all(), "written outside of out"
