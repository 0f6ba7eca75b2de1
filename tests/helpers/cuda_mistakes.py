"""Mistakes for rungs 2 to 8, each with the check that has to find it; see `cuda_mutants.py`."""

from tests.helpers.cuda_mutants import Mutant, swap, without

RACE, OUT, EARLY = "race", "out of bounds", "async copy read before it was waited for"

SYNC = "            cuda.syncthreads()\n"
STAGED_BARRIERS = (
    Mutant("no barrier after the copies", RACE, without(SYNC, "{}            q = ")),
    Mutant("no barrier after their use", RACE, without(SYNC, "                q += 1\n{}")),
)
ROW_UNCHECKED, COLUMN_UNCHECKED = (
    swap("a[i, p] if i < m and p < k else", "a[i, p] if p < k else"),
    swap("b[p, j] if p < k and j < n else", "b[p, j] if p < k else"),
)
MUTANTS = {
    "s2_coalesced": (
        Mutant(
            "warps go down columns",
            "uncoalesced",
            swap(
                "threadIdx.x // COLUMNS)",
                "threadIdx.x % ROWS)",
                "threadIdx.x % COLUMNS)",
                "threadIdx.x // ROWS)",
                "ROWS = 8 ",
                "ROWS = 32 ",
                "COLUMNS = 32 ",
                "COLUMNS = 8 ",
            ),
        ),
    ),
    "s3_shared_tile": (
        Mutant("no barrier after the copies", RACE, without(SYNC[:-1] + "  # the tiles are whole\n")),
        Mutant("no barrier after their use", RACE, without(SYNC[:-1] + "  # all have read them\n")),
        Mutant("reads a past its last row", OUT, ROW_UNCHECKED),
        Mutant("reads b past its last column", OUT, COLUMN_UNCHECKED),
        Mutant(
            "writes c past its last column", RACE, swap("        if i < m and j < n:", "        if i < m:")
        ),
        Mutant(
            "threads without an element end early",
            "barrier not reached by all threads",
            swap(
                "        for p0 in range", "        if i >= m:\n            return\n        for p0 in range"
            ),
        ),
        Mutant(
            "a warp reads a column",
            "bank conflicts",
            swap("tile_a[y, x] = ", "tile_a[x, y] = ", "tile_a[y, q]", "tile_a[q, y]"),
        ),
    ),
    "s4_thread_tile_1d": (
        *STAGED_BARRIERS,
        Mutant("reads a past its last row", OUT, ROW_UNCHECKED),
        Mutant("a warp too few", "unwritten shared memory", swap("SIDE // OWN\n", "SIDE // OWN - 32\n")),
        Mutant("a sum is chosen when running", "stack", swap("= sums[e]\n", "= sums[(e + t) % OWN]\n")),
    ),
    "s5_thread_tile_2d": (
        *STAGED_BARRIERS,
        Mutant("reads b past its last column", OUT, COLUMN_UNCHECKED),
        Mutant(
            "columns of a thread lie side by side",
            "bank conflicts",
            swap("x + e * APART]", "x * OWN + e]", "j0 + x + f * APART", "j0 + x * OWN + f"),
        ),
        Mutant("four blocks want the registers of two", "spills", swap("=THREADS)", "=THREADS, blocks=4)")),
    ),
    "s6_vector_loads": (
        Mutant("no barrier after the copies", RACE, without(SYNC, "{}            q = ")),
        Mutant("no barrier after their use", RACE, without(SYNC, "+ ROW)\n{}")),
        Mutant("reads a past its last row", OUT, swap("if i < m and p < k:", "if p < k:")),
        Mutant("writes four of c past its last column", OUT, swap("e * OWN + f, n - j)", "e * OWN + f, 4)")),
        Mutant("steps begin anywhere", "misaligned", swap("ROW = SIDE + 4 ", "ROW = SIDE + 1 ")),
        Mutant("no gap between steps", "bank conflicts", swap("ROW = SIDE + 4 ", "ROW = SIDE ")),
        Mutant(
            "elements are stored one by one",
            "missing STG.128",
            swap("if vectors and left >= 4:", "if not vectors and left >= 4:", file="tiling/panels"),
        ),
    ),
    "s7_async_copy": (
        Mutant("no barrier", RACE, without("                cuda.syncthreads()\n")),
        Mutant("no wait", EARLY, without("                cp_async_wait(PENDING)\n")),
        Mutant("waits for one panel too few", EARLY, swap("PENDING = AHEAD - 1", "PENDING = AHEAD")),
        Mutant(
            "waits after the barrier",
            RACE,
            swap(
                "cp_async_wait(PENDING)\n                cuda.syncthreads()\n",
                "cuda.syncthreads()\n                cp_async_wait(PENDING)\n",
            ),
        ),
        Mutant("copies are in no group", EARLY, without("            cp_async_commit()\n")),
        Mutant(
            "copies to two slots of four in turns",
            "overwrites a pending copy",
            swap("STAGE) if write < LAST", "STAGE) if write < STAGE"),
        ),
        Mutant("copies behind the ring", OUT, swap("STAGE) if write < LAST", "STAGE) if write <= LAST")),
        Mutant(
            "copies past the end of a",
            OUT,
            swap("a_pitch, int32(k - p0 - a_p), a_wide", "a_pitch, 8, a_wide"),
        ),
        Mutant("copies past the last row of a", OUT, swap("int32(m - i0 - a_i), ", "int32(SIDE), ")),
        Mutant("no gap between steps", "bank conflicts", swap("ROW = SIDE + 4 ", "ROW = SIDE ")),
        Mutant(
            "stores four where rows begin anywhere",
            "misaligned",
            swap(" and c.row_stride % 4 == 0 and ", " and ", file="tiling/panels"),
        ),
    ),
    "s8_warp_tile": (
        Mutant("no barrier in the loop", RACE, without(SYNC, "{}            write = read")),
        Mutant(
            "no barrier before it", RACE, without("        cuda.syncthreads()\n", "{}        load(int64(0), ")
        ),
        Mutant("waits for one panel too few", EARLY, swap("pending = ahead - 1", "pending = ahead")),
        Mutant(
            "copies are in no group", EARLY, without("            cp_async_commit()\n", "{}            all_")
        ),
        Mutant(
            "copies to the wrong slot", RACE, swap("write = read\n", "write = (read + stage) % ring_size\n")
        ),
        Mutant(
            "reads behind the ring",
            OUT,
            swap("int32(read + stage) if read < last_stage else int32(0)", "read + stage"),
        ),
        Mutant(
            "loads a fragment that is not there",
            "unwritten shared memory",
            swap("if left > 1:", "if True:"),
            (70, 140, 5),
        ),
        Mutant("copies past the last row of a", OUT, swap("int32(m - i0 - a_i), ", "int32(rows), ")),
        Mutant(
            "one set of registers", "wrong numbers", swap("column, p % 2 * own_rows + e * 4", "column, e * 4")
        ),
        Mutant("no gap between steps", "bank conflicts", swap("rows + 4, columns + 4", "rows, columns")),
    ),
}
