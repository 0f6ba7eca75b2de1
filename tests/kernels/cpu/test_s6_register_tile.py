"""Rung 6 past every boundary: of vectors, tiles, blocks of a, blocks of b, and depths; and planted faults."""

import contextlib
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from minidist.kernels import Rung, rung
from minidist.kernels.cpu.support import one_thread, register_tile
from minidist.kernels.cpu.support.block_sizes import blocks
from minidist.kernels.measure import product_checks
from tests.helpers.products import (
    LAYOUTS,
    check_laid_out,
    every_cache,
    every_dtype,
    guarded_blocks,
    with_caches,
)

RUNG = rung(6)


@contextlib.contextmanager
def small_blocks(dtype, tiles, panels):
    """Blocks of so many tiles of a and panels of b, in memory of no more than the size asked for."""
    whole = blocks(np.dtype(dtype).char)
    small = replace(
        whole,
        tiles=tiles,
        near=0,
        far=0,
        width=panels * whole.columns,
        memory=whole.rows * (whole.columns + tiles * register_tile.PITCH),
    )
    with guarded_blocks(one_thread, small, _kept=one_thread.KeptByThread()) as given:
        yield
    assert given


@every_dtype
def test_every_shape_of_a_tile(dtype):
    """Half a vector wide, one and two, each number of rows, and edges in between; sums that end before and
    after the prefetch of out."""
    rng = np.random.default_rng()
    columns = register_tile.tile_columns(dtype)
    for m in range(1, register_tile.ROWS + 2):
        for n in range(1, columns + 2):
            k = int(
                rng.choice([1, 2, register_tile.LATE - 1, register_tile.LATE, register_tile.LATE + 1, 60])
            )
            product_checks.check(RUNG, m, n, k, dtype, rng)
            for layout in ("embedded", "embedded, transposed"):  # nothing beside is read or written
                layouts = ["embedded", layout, "embedded"]
                check_laid_out(RUNG, (m, n, k), dtype, layouts, int(rng.integers(2**32)))


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_sizes_past_every_block_in_any_layout(data):
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    tiles, panels = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    m = data.draw(st.integers(1, 4 * tiles * register_tile.ROWS))
    n = data.draw(st.integers(1, 4 * panels * register_tile.tile_columns(dtype)))
    k = data.draw(
        st.sampled_from([1, 50, register_tile.DEPTH - 1, register_tile.DEPTH, register_tile.DEPTH + 1, 1600])
    )
    layouts = [data.draw(st.sampled_from(list(LAYOUTS))) for _ in range(3)]
    with small_blocks(dtype, tiles, panels):
        check_laid_out(RUNG, (m, n, k), dtype, layouts, data.draw(st.integers(0, 2**32)))


@every_cache
@every_dtype
def test_sizes_past_the_blocks_of_any_machine(dtype, l2, l3):
    rng = np.random.default_rng()
    with with_caches(l2, l3):
        size = blocks(np.dtype(dtype).char)
        product_checks.check(
            RUNG, size.rows * size.tiles + 1, size.near // size.depth + 1, size.depth + 1, dtype, rng
        )
        # Just deep enough to be packed, and wider than a block of b.
        product_checks.check(RUNG, size.rows + 1, size.width + 1, size.near // size.width + 1, dtype, rng)


@every_dtype
def test_memory_is_read_only_where_it_was_packed_for_this_product(dtype):
    """NaN from an earlier product does not reach the next, which needs less of the kept memory."""
    rng = np.random.default_rng()
    nan = np.full((100, 100), np.nan, dtype)
    assert np.isnan(RUNG.matmul(nan, nan)).all()
    for _ in range(20):
        m, n, k = (int(size) for size in rng.integers(1, 100, size=3))
        product_checks.check(RUNG, m, n, k, dtype, rng)


def beyond_the_edge(a, b, out):
    """Whole vectors are written, whatever the width of out: as many more elements as are missing."""
    RUNG.compute(a, b, out)
    if out.shape[1] % 8 and out.strides[1] == out.itemsize and out.base is not None:
        np.lib.stride_tricks.as_strided(out[-1:, -1:], (1, 2))[0, 1] = 0


def without_the_last_depth(a, b, out):
    k = a.shape[1]
    keep = k if k <= register_tile.DEPTH else k - 1
    RUNG.compute(a[:, :keep], b[:keep], out)


def with_a_column_of_the_padding(a, b, out):
    RUNG.compute(a, b, out)
    if out.shape[1] > register_tile.tile_columns(out.dtype):
        out[:, register_tile.tile_columns(out.dtype)] = 0


@pytest.mark.parametrize("fault", [beyond_the_edge, without_the_last_depth, with_a_column_of_the_padding])
def test_a_planted_fault_is_found(fault):
    step = Rung(1, "s1_fault", "cpu", "", ("float32", "float64"), fault)
    sizes = (20, 2 * register_tile.tile_columns("float32") + 3, register_tile.DEPTH + 1)
    layouts = ["contiguous", "contiguous", "embedded"]
    check_laid_out(RUNG, sizes, "float32", layouts, seed=1)
    with pytest.raises(AssertionError):
        check_laid_out(step, sizes, "float32", layouts, seed=1)
