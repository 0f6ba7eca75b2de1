"""Wrong answers to lesson 4."""

from numba import cuda, float32

from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()
TILE = 16


@WRONG.to("backwards", "128 elements and 1 block", "Race", "no barrier between them", "at line")
@cuda.jit
def no_barrier(x, y):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    for start in range(cuda.blockIdx.x * 128, x.size, cuda.gridDim.x * 128):
        tile[t] = x[start + t]
        y[start + t] = tile[127 - t]


@WRONG.to(
    "backwards",
    "256 elements and 1 block",
    "Race",
    "writes shared memory that warp",
    "tile[t] = x[start + t]",
)
@cuda.jit
def one_barrier(x, y):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    for start in range(cuda.blockIdx.x * 128, x.size, cuda.gridDim.x * 128):
        tile[t] = x[start + t]
        cuda.syncthreads()
        y[start + t] = tile[127 - t]


@WRONG.to("backwards", "128 elements and 1 block", "Race", "y[start + t] = tile[127 - t]")
@cuda.jit
def only_at_the_end(x, y):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    for start in range(cuda.blockIdx.x * 128, x.size, cuda.gridDim.x * 128):
        tile[t] = x[start + t]
        y[start + t] = tile[127 - t]
        cuda.syncthreads()


@WRONG.to("backwards", "Race", "thread 64 of block 0", "y[start + t] = tile[127 - t]")
@cuda.jit
def a_barrier_for_some(x, y):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    for start in range(cuda.blockIdx.x * 128, x.size, cuda.gridDim.x * 128):
        tile[t] = x[start + t]
        if t < 64:
            cuda.syncthreads()
        y[start + t] = tile[127 - t]


@WRONG.to("reads", "reads(8, 8, 8, 8)", "expected 128", "got")
def each_once_for_each_element(m, n, k, tile):
    return 2 * m * n * k


@WRONG.to("reads", "reads(9, 8, 8, 8)", "expected", "got")
def rounds_down(m, n, k, tile):
    return m * k * max(1, n // tile) + k * n * max(1, m // tile)


@WRONG.to("reads", "reads(8, 16, 4, 4)", "expected", "got")
def takes_its_own_side(m, n, k, tile):
    return m * k * -(-m // tile) + k * n * -(-n // tile)


@WRONG.to("reads", "reads(9, 8, 8, 8)", "expected", "got")
def counts_beyond_the_edges(m, n, k, tile):
    across, down, steps = -(-n // tile), -(-m // tile), -(-k // tile)
    return 2 * across * down * steps * tile * tile


@WRONG.to("tiled_matmul", "TILE = 16", "has a fault", "Race")
@cuda.jit
def waits_once(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    total = float32(0)
    for p in range(0, a.shape[1], TILE):
        tile_a[y, x] = a[i, p + x] if i < c.shape[0] and p + x < a.shape[1] else float32(0)
        tile_b[y, x] = b[p + y, j] if p + y < a.shape[1] and j < c.shape[1] else float32(0)
        cuda.syncthreads()
        for q in range(TILE):
            total += tile_a[y, q] * tile_b[q, x]
    if i < c.shape[0] and j < c.shape[1]:
        c[i, j] = total


@WRONG.to("tiled_matmul", "a of 1 x 1, b of 1 x 1 and TILE = 16", "Barrier not reached by all threads")
@cuda.jit
def leaves_early(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    if i >= c.shape[0] or j >= c.shape[1]:
        return
    total = float32(0)
    for p in range(0, a.shape[1], TILE):
        tile_a[y, x] = a[i, p + x] if p + x < a.shape[1] else float32(0)
        tile_b[y, x] = b[p + y, j] if p + y < a.shape[1] else float32(0)
        cuda.syncthreads()
        for q in range(TILE):
            total += tile_a[y, q] * tile_b[q, x]
        cuda.syncthreads()
    c[i, j] = total


@WRONG.to("tiled_matmul", "a of 1 x 1", "nobody", "shared memory")
@cuda.jit
def no_zeros_beyond_the_edges(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    total = float32(0)
    for p in range(0, a.shape[1], TILE):
        if i < c.shape[0] and p + x < a.shape[1]:
            tile_a[y, x] = a[i, p + x]
        if p + y < a.shape[1] and j < c.shape[1]:
            tile_b[y, x] = b[p + y, j]
        cuda.syncthreads()
        for q in range(TILE):
            total += tile_a[y, q] * tile_b[q, x]
        cuda.syncthreads()
    if i < c.shape[0] and j < c.shape[1]:
        c[i, j] = total


@WRONG.to("tiled_matmul", "a of 1 x 1", "Out of bounds")
@cuda.jit
def no_guard(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    total = float32(0)
    for p in range(0, a.shape[1], TILE):
        tile_a[y, x] = a[i, p + x]
        tile_b[y, x] = b[p + y, j]
        cuda.syncthreads()
        for q in range(TILE):
            total += tile_a[y, q] * tile_b[q, x]
        cuda.syncthreads()
    c[i, j] = total


@WRONG.to("tiled_matmul", "a of 2 x 4, b of 4 x 3", "c is wrong", "expected", "got")
@cuda.jit
def multiplies_by_rows_of_b(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    total = float32(0)
    for p in range(0, a.shape[1], TILE):
        tile_a[y, x] = a[i, p + x] if i < c.shape[0] and p + x < a.shape[1] else float32(0)
        tile_b[y, x] = b[p + y, j] if p + y < a.shape[1] and j < c.shape[1] else float32(0)
        cuda.syncthreads()
        for q in range(TILE):
            total += tile_a[y, q] * tile_b[x, q]
        cuda.syncthreads()
    if i < c.shape[0] and j < c.shape[1]:
        c[i, j] = total


@WRONG.to("tiled_matmul", "TILE = 16, c is wrong", "40")
@cuda.jit
def only_the_first_tiles(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    tile_a[y, x] = a[i, x] if i < c.shape[0] and x < a.shape[1] else float32(0)
    tile_b[y, x] = b[y, j] if y < a.shape[1] and j < c.shape[1] else float32(0)
    cuda.syncthreads()
    total = float32(0)
    for q in range(TILE):
        total += tile_a[y, q] * tile_b[q, x]
    if i < c.shape[0] and j < c.shape[1]:
        c[i, j] = total


@WRONG.to("tiled_matmul", "TILE = 8")
@cuda.jit
def knows_only_sixteen(a, b, c):
    tile_a = cuda.shared.array((16, 16), float32)
    tile_b = cuda.shared.array((16, 16), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    total = float32(0)
    for p in range(0, a.shape[1], 16):
        tile_a[y, x] = a[i, p + x] if i < c.shape[0] and p + x < a.shape[1] else float32(0)
        tile_b[y, x] = b[p + y, j] if p + y < a.shape[1] and j < c.shape[1] else float32(0)
        cuda.syncthreads()
        for q in range(16):
            total += tile_a[y, q] * tile_b[q, x]
        cuda.syncthreads()
    if i < c.shape[0] and j < c.shape[1]:
        c[i, j] = total


@WRONG.to("passes", "passes(0)", "expected 1", "got      32")
def the_same_word_counts_often(stride):
    banks = [t * stride % 32 for t in range(32)]
    return max(banks.count(bank) for bank in banks)


@WRONG.to("passes", "passes(32)", "expected 32", "got      1")
def counts_banks(stride):
    return 32 // len({t * stride % 32 for t in range(32)}) if stride % 32 else 1


@WRONG.to("passes", "passes(3)", "expected 1", "got      3")
def as_sectors(stride):
    return max(1, min(32, stride))


@WRONG.to("passes", "passes(1)", "expected 1", "got      4")
def takes_words_for_bytes(stride):
    banks = [word % 32 for word in {4 * t * stride for t in range(32)}]
    return max(banks.count(bank) for bank in banks)


@WRONG.to("transpose", "Race", "shared memory")
@cuda.jit
def does_not_wait(a, out):
    tile = cuda.shared.array((32, 33), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    if i < a.shape[0] and j < a.shape[1]:
        tile[y, x] = a[i, j]
    i, j = cuda.blockIdx.x * 32 + y, cuda.blockIdx.y * 32 + x
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = tile[x, y]


@WRONG.to("transpose", "a of 2 x 3")
@cuda.jit
def keeps_the_guard_of_a(a, out):
    tile = cuda.shared.array((32, 33), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    if i < a.shape[0] and j < a.shape[1]:
        tile[y, x] = a[i, j]
    cuda.syncthreads()
    if i < a.shape[0] and j < a.shape[1]:
        out[cuda.blockIdx.x * 32 + y, cuda.blockIdx.y * 32 + x] = tile[x, y]


@WRONG.to("transpose", "a of 33 x 5")
@cuda.jit
def leaves_the_block_where_it_was(a, out):
    tile = cuda.shared.array((32, 33), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    if i < a.shape[0] and j < a.shape[1]:
        tile[y, x] = a[i, j]
    cuda.syncthreads()
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = tile[x, y]


@WRONG.to("transpose", "a of 2 x 3", "out is wrong from element [0, 1]")
@cuda.jit
def turns_the_blocks_only(a, out):
    tile = cuda.shared.array((32, 33), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    tile[y, x] = a[i, j] if i < a.shape[0] and j < a.shape[1] else float32(0)
    cuda.syncthreads()
    i, j = cuda.blockIdx.x * 32 + y, cuda.blockIdx.y * 32 + x
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = tile[y, x]


@WRONG.to("tiled_matmul", "has to know its shape when it is compiled", "names of constants")
@cuda.jit
def a_tile_as_long_as_a_row(a, b, c):
    tile_a = cuda.shared.array((TILE, a.shape[1]), float32)
    c[0, 0] = tile_a[0, 0]


@WRONG.to("backwards", "y is right, but the numbers do not go through tile", "another thread wrote")
@cuda.jit
def reads_backwards_from_x(x, y):
    t = cuda.threadIdx.x
    for start in range(cuda.blockIdx.x * 128, x.size, cuda.gridDim.x * 128):
        y[start + t] = x[start + 127 - t]


@WRONG.to("backwards", "y is right, but the numbers do not go through tile")
@cuda.jit
def fills_the_tile_and_reads_x(x, y):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    for start in range(cuda.blockIdx.x * 128, x.size, cuda.gridDim.x * 128):
        tile[t] = x[start + t]
        cuda.syncthreads()
        y[start + t] = x[start + 127 - t]
        cuda.syncthreads()


@WRONG.to("tiled_matmul", "reads of global memory by each thread: 96, where par is 6", "from the tiles")
@cuda.jit
def mentions_a_tile_and_is_naive(a, b, c):
    j, i = cuda.blockIdx.x * TILE + cuda.threadIdx.x, cuda.blockIdx.y * TILE + cuda.threadIdx.y
    if i < c.shape[0] and j < c.shape[1]:
        total = float32(0)
        for p in range(a.shape[1]):
            total += a[i, p] * b[p, j]
        c[i, j] = total


@WRONG.to("tiled_matmul", "the idea is missing: instructions in float64", "begin the sum as float32(0)")
@cuda.jit
def adds_up_in_float64(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    total = 0.0
    for p in range(0, a.shape[1], TILE):
        tile_a[y, x] = a[i, p + x] if i < c.shape[0] and p + x < a.shape[1] else float32(0)
        tile_b[y, x] = b[p + y, j] if p + y < a.shape[1] and j < c.shape[1] else float32(0)
        cuda.syncthreads()
        for q in range(TILE):
            total += tile_a[y, q] * tile_b[q, x]
        cuda.syncthreads()
    if i < c.shape[0] and j < c.shape[1]:
        c[i, j] = total


@WRONG.over_par("tiled_matmul", "It passes, above par in reads of global memory", "from the tiles")
@cuda.jit
def adds_up_in_c(a, b, c):
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    inside = i < c.shape[0] and j < c.shape[1]
    if inside:
        c[i, j] = float32(0)
    for p in range(0, a.shape[1], TILE):
        tile_a[y, x] = a[i, p + x] if i < c.shape[0] and p + x < a.shape[1] else float32(0)
        tile_b[y, x] = b[p + y, j] if p + y < a.shape[1] and j < c.shape[1] else float32(0)
        cuda.syncthreads()
        total = float32(0)
        for q in range(TILE):
            total += tile_a[y, q] * tile_b[q, x]
        if inside:
            c[i, j] += total
        cuda.syncthreads()


@WRONG.to(
    "transpose", "sectors for each store: 32, where par is 4", "write a tile to shared memory along rows"
)
@cuda.jit
def copies_straight(a, out):
    j, i = cuda.grid(2)
    if i < a.shape[0] and j < a.shape[1]:
        out[j, i] = a[i, j]


@WRONG.to("transpose", "the idea is missing: bank conflicts", "rows of tile a word longer")
@cuda.jit
def does_not_pad(a, out):
    tile = cuda.shared.array((32, 32), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    if i < a.shape[0] and j < a.shape[1]:
        tile[y, x] = a[i, j]
    cuda.syncthreads()
    i, j = cuda.blockIdx.x * 32 + y, cuda.blockIdx.y * 32 + x
    if i < out.shape[0] and j < out.shape[1]:
        out[i, j] = tile[x, y]
