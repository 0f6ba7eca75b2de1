"""Wrong answers to lesson 5."""

from numba import cuda, float32

from minidist.kernels.cuda.warp import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    load_128,
    store_128,
)
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()
OWN = 4
SIDE = 16 * OWN
DEPTH = 16
PIECE = 512
SLOTS = 3
RING = SLOTS * PIECE
PENDING = SLOTS - 2


@cuda.jit(device=True)
def fetch(tile, matrix, i0, j0):
    t = cuda.threadIdx.y * 16 + cuda.threadIdx.x
    rows, columns = tile.shape
    for s in range(t, rows * columns, 256):
        i, j = s // columns, s % columns
        inside = i0 + i < matrix.shape[0] and j0 + j < matrix.shape[1]
        tile[i, j] = matrix[i0 + i, j0 + j] if inside else float32(0)


@WRONG.to("loads_per_multiply_add", "loads_per_multiply_add(2, 2)", "expected 1", "got      2")
def two_each(rows, columns):
    return 2


@WRONG.to("loads_per_multiply_add", "loads_per_multiply_add(1, 1)", "expected 2", "got      0.5")
def upside_down(rows, columns):
    return rows * columns / (rows + columns)


@WRONG.to("loads_per_multiply_add", "loads_per_multiply_add(1, 1)", "expected 2", "got      1")
def counts_two_operations(rows, columns):
    return (rows + columns) / (2 * rows * columns)


@WRONG.to("register_tile", "a of 1 x 1, b of 1 x 1", "Out of bounds")
@cuda.jit
def no_guard(a, b, c):
    tile_a = cuda.shared.array((SIDE, DEPTH), float32)
    tile_b = cuda.shared.array((DEPTH, SIDE), float32)
    sums = cuda.local.array((OWN, OWN), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
    for e in range(OWN):
        for f in range(OWN):
            sums[e, f] = float32(0)
    for p in range(0, a.shape[1], DEPTH):
        fetch(tile_a, a, i0, p)
        fetch(tile_b, b, p, j0)
        cuda.syncthreads()
        for q in range(DEPTH):
            for e in range(OWN):
                for f in range(OWN):
                    sums[e, f] += tile_a[y + 16 * e, q] * tile_b[q, x + 16 * f]
        cuda.syncthreads()
    for e in range(OWN):
        for f in range(OWN):
            if i0 + y < c.shape[0] and j0 + x < c.shape[1]:
                c[i0 + y + 16 * e, j0 + x + 16 * f] = sums[e, f]


@WRONG.to("register_tile", "a of 1 x 1, b of 1 x 1 and OWN = 4, c is wrong", "expected", "got      nan")
@cuda.jit
def writes_nothing(a, b, c):
    tile_a = cuda.shared.array((SIDE, DEPTH), float32)
    tile_b = cuda.shared.array((DEPTH, SIDE), float32)
    sums = cuda.local.array((OWN, OWN), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
    for e in range(OWN):
        for f in range(OWN):
            sums[e, f] = float32(0)
    for p in range(0, a.shape[1], DEPTH):
        fetch(tile_a, a, i0, p)
        fetch(tile_b, b, p, j0)
        cuda.syncthreads()
        for q in range(DEPTH):
            for e in range(OWN):
                for f in range(OWN):
                    sums[e, f] += tile_a[y + 16 * e, q] * tile_b[q, x + 16 * f]
        cuda.syncthreads()


@WRONG.to("register_tile", "a of 2 x 4, b of 4 x 3 and OWN = 4, c is wrong from element [0, 1]")
@cuda.jit
def reads_neighbours_and_writes_strides(a, b, c):
    tile_a = cuda.shared.array((SIDE, DEPTH), float32)
    tile_b = cuda.shared.array((DEPTH, SIDE), float32)
    sums = cuda.local.array((OWN, OWN), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
    for e in range(OWN):
        for f in range(OWN):
            sums[e, f] = float32(0)
    for p in range(0, a.shape[1], DEPTH):
        fetch(tile_a, a, i0, p)
        fetch(tile_b, b, p, j0)
        cuda.syncthreads()
        for q in range(DEPTH):
            for e in range(OWN):
                for f in range(OWN):
                    sums[e, f] += tile_a[OWN * y + e, q] * tile_b[q, OWN * x + f]
        cuda.syncthreads()
    for e in range(OWN):
        for f in range(OWN):
            i, j = i0 + y + 16 * e, j0 + x + 16 * f
            if i < c.shape[0] and j < c.shape[1]:
                c[i, j] = sums[e, f]


@WRONG.to("register_tile", "and OWN = 2")
@cuda.jit
def knows_only_four(a, b, c):
    tile_a = cuda.shared.array((64, DEPTH), float32)
    tile_b = cuda.shared.array((DEPTH, 64), float32)
    sums = cuda.local.array((4, 4), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * 64, cuda.blockIdx.x * 64
    for e in range(4):
        for f in range(4):
            sums[e, f] = float32(0)
    for p in range(0, a.shape[1], DEPTH):
        fetch(tile_a, a, i0, p)
        fetch(tile_b, b, p, j0)
        cuda.syncthreads()
        for q in range(DEPTH):
            for e in range(4):
                for f in range(4):
                    sums[e, f] += tile_a[y + 16 * e, q] * tile_b[q, x + 16 * f]
        cuda.syncthreads()
    for e in range(OWN):
        for f in range(OWN):
            i, j = i0 + y + 16 * e, j0 + x + 16 * f
            if i < c.shape[0] and j < c.shape[1]:
                c[i, j] = sums[e, f]


@WRONG.to("register_tile", "the idea is missing: bank conflicts")
@cuda.jit
def owns_neighbours(a, b, c):
    tile_a = cuda.shared.array((SIDE, DEPTH), float32)
    tile_b = cuda.shared.array((DEPTH, SIDE), float32)
    sums = cuda.local.array((OWN, OWN), float32)
    column = cuda.local.array(OWN, float32)
    row = cuda.local.array(OWN, float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
    for e in range(OWN):
        for f in range(OWN):
            sums[e, f] = float32(0)
    for p in range(0, a.shape[1], DEPTH):
        fetch(tile_a, a, i0, p)
        fetch(tile_b, b, p, j0)
        cuda.syncthreads()
        for q in range(DEPTH):
            for e in range(OWN):
                column[e] = tile_a[OWN * y + e, q]
                row[e] = tile_b[q, OWN * x + e]
            for e in range(OWN):
                for f in range(OWN):
                    sums[e, f] += column[e] * row[f]
        cuda.syncthreads()
    for e in range(OWN):
        for f in range(OWN):
            i, j = i0 + OWN * y + e, j0 + OWN * x + f
            if i < c.shape[0] and j < c.shape[1]:
                c[i, j] = sums[e, f]


@WRONG.to("axpy", "With 1 element", "Out of bounds")
@cuda.jit
def no_ragged_end(alpha, x, y):
    four_x = cuda.local.array(4, float32)
    four_y = cuda.local.array(4, float32)
    i = 4 * cuda.grid(1)
    if i < x.size:
        load_128(four_x, 0, x, i)
        load_128(four_y, 0, y, i)
        for e in range(4):
            four_y[e] += alpha * four_x[e]
        store_128(y, i, four_y, 0)


@WRONG.to("axpy", "With 1 element", "y is wrong", "expected", "got")
@cuda.jit
def leaves_out_the_end(alpha, x, y):
    four_x = cuda.local.array(4, float32)
    four_y = cuda.local.array(4, float32)
    i = 4 * cuda.grid(1)
    if i + 4 <= x.size:
        load_128(four_x, 0, x, i)
        load_128(four_y, 0, y, i)
        for e in range(4):
            four_y[e] += alpha * four_x[e]
        store_128(y, i, four_y, 0)


@WRONG.to("axpy", "With 128 elements", "Misaligned", "multiple of 16", "load_128(four_x, 0, x, i)")
@cuda.jit
def begins_at_its_own_number(alpha, x, y):
    four_x = cuda.local.array(4, float32)
    four_y = cuda.local.array(4, float32)
    i = cuda.grid(1)
    if 4 * i + 4 <= x.size:
        load_128(four_x, 0, x, i)
        load_128(four_y, 0, y, i)
        for e in range(4):
            four_y[e] += alpha * four_x[e]
        store_128(y, i, four_y, 0)
    else:
        for e in range(4 * i, x.size):
            y[e] += alpha * x[e]


@WRONG.to("axpy", "called with too few arguments, or too many")
@cuda.jit
def leaves_out_an_index(alpha, x, y):
    four_x = cuda.local.array(4, float32)
    i = 4 * cuda.grid(1)
    load_128(four_x, x, i)
    for e in range(4):
        y[i + e] += alpha * four_x[e]


@WRONG.to("axpy", "With 4 elements", "y is wrong", "expected", "got")
@cuda.jit
def forgets_to_store(alpha, x, y):
    four_x = cuda.local.array(4, float32)
    four_y = cuda.local.array(4, float32)
    i = 4 * cuda.grid(1)
    if i + 4 <= x.size:
        load_128(four_x, 0, x, i)
        load_128(four_y, 0, y, i)
        for e in range(4):
            four_y[e] += alpha * four_x[e]
    else:
        for e in range(i, x.size):
            y[e] += alpha * x[e]


@WRONG.to("axpy", "the idea is missing: loads of a warp", "load_128 and store_128")
@cuda.jit
def one_by_one(alpha, x, y):
    i = 4 * cuda.grid(1)
    for e in range(i, min(i + 4, x.size)):
        y[e] += alpha * x[e]


@WRONG.to("ring_backwards", "Async copy read before it was waited for", "an asynchronous copy still fills")
@cuda.jit
def never_waits(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
        cp_async_commit()
    for piece in range(pieces):
        cuda.syncthreads()
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
        cp_async_commit()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[piece % SLOTS * PIECE + PIECE - 1 - i]


@WRONG.to("ring_backwards", "1 piece of 512 elements", "Race", "cp_async_16", "cuda.syncthreads()")
@cuda.jit
def waits_only_for_its_own(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
        cp_async_commit()
    for piece in range(pieces):
        cp_async_wait(PENDING)
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
        cp_async_commit()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[piece % SLOTS * PIECE + PIECE - 1 - i]


@WRONG.to("ring_backwards", "1 piece of 512 elements", "Async copy read before it was waited for")
@cuda.jit
def commits_only_what_there_is(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
            cp_async_commit()
    for piece in range(pieces):
        cp_async_wait(PENDING)
        cuda.syncthreads()
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
            cp_async_commit()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[piece % SLOTS * PIECE + PIECE - 1 - i]


@WRONG.to(
    "ring_backwards", "cp_async_wait has to know `groups` when it is compiled", "the name of a constant"
)
@cuda.jit
def computes_what_it_waits_for(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t = cuda.threadIdx.x
    cp_async_16(ring, 4 * t, x, 4 * t)
    cp_async_commit()
    cp_async_wait(SLOTS - 3)
    cuda.syncthreads()
    for i in range(t, PIECE, 128):
        y[i] = ring[PIECE - 1 - i]


@WRONG.to("ring_backwards", "4 pieces of 512 elements and SLOTS = 3", "Race", "copies to shared memory")
@cuda.jit
def copies_before_the_barrier(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
        cp_async_commit()
    for piece in range(pieces):
        cp_async_wait(PENDING)
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
        cp_async_commit()
        cuda.syncthreads()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[piece % SLOTS * PIECE + PIECE - 1 - i]


@WRONG.to("ring_backwards", "3 pieces of 512 elements and SLOTS = 3", "y is wrong", "nan")
@cuda.jit
def forgets_the_last_pieces(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
        cp_async_commit()
    for piece in range(max(pieces - SLOTS + 1, min(pieces, SLOTS - 1))):
        cp_async_wait(PENDING)
        cuda.syncthreads()
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
        cp_async_commit()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[piece % SLOTS * PIECE + PIECE - 1 - i]


@WRONG.to("ring_backwards", "0 bytes went to the ring by cp_async_16", "begin a copy for each piece")
@cuda.jit
def copies_as_in_lesson_four(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(pieces):
        for i in range(t, PIECE, 128):
            ring[i] = x[piece * PIECE + i]
        cuda.syncthreads()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[PIECE - 1 - i]
        cuda.syncthreads()


@WRONG.to(
    "ring_backwards",
    "the idea is missing: copies that each wait waits for though they are not needed yet",
    "cp_async_wait(PENDING)",
)
@cuda.jit
def waits_for_all(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
        cp_async_commit()
    for piece in range(pieces):
        cp_async_wait(0)
        cuda.syncthreads()
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
        cp_async_commit()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[piece % SLOTS * PIECE + PIECE - 1 - i]


@WRONG.to("ring_backwards", "the idea is missing: barriers for each piece")
@cuda.jit
def two_barriers(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
        cp_async_commit()
    for piece in range(pieces):
        cp_async_wait(PENDING)
        cuda.syncthreads()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = ring[piece % SLOTS * PIECE + PIECE - 1 - i]
        cuda.syncthreads()
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
        cp_async_commit()


@WRONG.to("register_tile", "Barrier not reached by all", "only some of them came to line", "syncthreads()")
@cuda.jit
def waits_with_half_of_the_threads(a, b, c):
    if cuda.threadIdx.y < 8:
        cuda.syncthreads()
    for _ in range(0, a.shape[1], 16):
        cuda.syncthreads()


@WRONG.to(
    "register_tile", "the idea is missing: elements read from global memory", "leave those reads to fetch"
)
@cuda.jit
def never_looks_into_the_tiles(a, b, c):
    sums = cuda.local.array((OWN, OWN), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
    for e in range(OWN):
        for f in range(OWN):
            sums[e, f] = float32(0)
            i, j = i0 + y + 16 * e, j0 + x + 16 * f
            if i < c.shape[0] and j < c.shape[1]:
                for p in range(a.shape[1]):
                    sums[e, f] += a[i, p] * b[p, j]
                c[i, j] = sums[e, f]


@WRONG.to("register_tile", "loads from shared memory for each multiply-add", "into column and row")
@cuda.jit
def one_sum_after_the_other(a, b, c):
    tile_a = cuda.shared.array((SIDE, DEPTH), float32)
    tile_b = cuda.shared.array((DEPTH, SIDE), float32)
    sums = cuda.local.array((OWN, OWN), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE
    for e in range(OWN):
        for f in range(OWN):
            sums[e, f] = float32(0)
    for p in range(0, a.shape[1], DEPTH):
        fetch(tile_a, a, i0, p)
        fetch(tile_b, b, p, j0)
        cuda.syncthreads()
        for e in range(OWN):
            for f in range(OWN):
                cuda.syncthreads()  # keeps the compiler from joining the loads
                for q in range(DEPTH):
                    sums[e, f] += tile_a[y + 16 * e, q] * tile_b[q, x + 16 * f]
        cuda.syncthreads()
    for e in range(OWN):
        for f in range(OWN):
            i, j = i0 + y + 16 * e, j0 + x + 16 * f
            if i < c.shape[0] and j < c.shape[1]:
                c[i, j] = sums[e, f]


@WRONG.to("ring_backwards", "y is right, but its numbers do not come from the ring", "in place of x")
@cuda.jit
def copies_for_show(x, y):
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    for piece in range(SLOTS - 1):
        if piece < pieces:
            cp_async_16(ring, piece * PIECE + 4 * t, x, piece * PIECE + 4 * t)
        cp_async_commit()
    for piece in range(pieces):
        cp_async_wait(PENDING)
        cuda.syncthreads()
        ahead = piece + SLOTS - 1
        if ahead < pieces:
            cp_async_16(ring, ahead % SLOTS * PIECE + 4 * t, x, ahead * PIECE + 4 * t)
        cp_async_commit()
        for i in range(t, PIECE, 128):
            y[piece * PIECE + i] = x[piece * PIECE + PIECE - 1 - i]


@WRONG.to("axpy", "the idea is missing: instructions in float64", "a plain 0.0 or 1.0 is a float64")
@cuda.jit
def multiplies_in_float64(alpha, x, y):
    four_x = cuda.local.array(4, float32)
    four_y = cuda.local.array(4, float32)
    i = 4 * cuda.grid(1)
    if i + 4 <= x.size:
        load_128(four_x, 0, x, i)
        load_128(four_y, 0, y, i)
        for e in range(4):
            four_y[e] += 1.0 * alpha * four_x[e]
        store_128(y, i, four_y, 0)
    else:
        for e in range(i, x.size):
            y[e] += alpha * x[e]
