"""The sizes of blocks for any caches, the memory that threads keep, and how out is cut into parts."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from minidist.kernels.cpu.support import block_sizes as module
from minidist.kernels.cpu.support import register_tile, shared_packing
from minidist.kernels.cpu.support.block_sizes import LEAST_WIDTH, Blocks, blocks, cut, memory
from minidist.kernels.cpu.support.caches import Caches

KIB = 2**10


@given(
    l2=st.integers(0, 8 * KIB).map(lambda kib: kib * KIB),
    l3=st.integers(0, 512 * KIB).map(lambda kib: kib * KIB),
    kind=st.sampled_from(["f", "d"]),
)
def test_blocks_fit_their_caches_and_the_memory_asked_for(l2, l3, kind):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "caches", lambda: Caches(l2=l2, l3=l3))
        size = blocks.__wrapped__(kind)
    bytes_ = np.dtype(kind).itemsize
    assert (size.rows, size.columns) == (register_tile.ROWS, register_tile.tile_columns(kind))
    block_of_a = size.rows * size.depth * bytes_
    assert size.tiles == 1 or size.tiles * block_of_a <= l2 // 2 < (size.tiles + 1) * block_of_a
    assert size.width >= size.columns
    assert size.width % size.columns == 0
    assert size.width <= LEAST_WIDTH or size.width * size.depth * bytes_ <= l3 // 4
    assert (size.width + size.columns) * size.depth * bytes_ > l3 // 4
    assert size.depth <= register_tile.PITCH
    assert size.memory == size.rows * (size.columns + size.tiles * register_tile.PITCH)


def test_memory_is_kept_until_more_is_needed():
    purpose = "a test's"
    first = memory(purpose, "f", 100)
    assert (first.shape, first.dtype) == ((1, 100), np.float32)
    assert first.ctypes.data % 64 == 0
    assert memory(purpose, "f", 60) is first
    more = memory(purpose, "f", 101)
    assert more is not first
    assert more.shape[1] >= 101
    assert memory(purpose, "f", 100) is more


SIZE = Blocks(rows=14, columns=32, tiles=12, width=8192, depth=768, near=2**18, far=2**23, memory=1)
LENGTHS = st.one_of(st.integers(1, 200), st.integers(1, 20_000))


def uncovered(m, n, k, threads, packed, place):
    """Pairs of neighbouring parts of out that overlap or leave a gap, empty parts, and idle threads."""
    _, down, across, _ = cut(m, n, k, SIZE, threads, packed)
    wrong = [] if down * across >= min(threads, -(-m // 14) * max(1, n // 32)) else ["a thread has no part"]
    above, left = dict.fromkeys(range(across), 0), n
    for part in range(down * across):
        i0, i1, j0, j1, tiles = place(part, (m, n), (14, 32), (down, across), 0 if packed else 1)
        if not (i0 == above[part % across] < i1 and (i1 - i0) <= 14 * tiles <= 14 * SIZE.tiles):
            wrong.append(f"rows {i0} to {i1} below {above[part % across]}, in {tiles} tiles")
        if not (left % n == j0 < j1):  # a row of parts begins where the one above it ends: at n, or 0
            wrong.append(f"columns {j0} to {j1} right of {left}")
        above[part % across], left = i1, j1
    wrong += [] if left == n else [f"columns end at {left} of {n}"]
    return wrong + [f"rows end at {end} of {m}" for end in above.values() if end != m]


@settings(max_examples=200, deadline=None)
@given(m=LENGTHS, n=LENGTHS, k=LENGTHS, threads=st.sampled_from([2, 64, 192]), packed=st.booleans())
@example(m=64, n=64, k=64, threads=192, packed=False)
@example(m=1, n=20_000, k=4096, threads=64, packed=False)
@example(m=20_000, n=63, k=1, threads=192, packed=True)
@example(m=4096, n=4096, k=4096, threads=192, packed=True)
def test_each_element_of_out_is_in_one_part(m, n, k, threads, packed):
    assert not uncovered(m, n, k, threads, packed, shared_packing.place.py_func)


@pytest.mark.parametrize("threads", [64, 192])
def test_a_gap_between_parts_would_be_found(threads):
    def place(part, *more):
        i0, i1, j0, j1, tiles = shared_packing.place.py_func(part, *more)
        return i0, i1, j0, j1 - (part == 7), tiles

    assert uncovered(1000, 1000, 100, threads, True, place)
