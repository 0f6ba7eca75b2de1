"""Mistakes for rungs 9 and 10, each with the check that has to find it; see `cuda_mutants.py`."""

from tests.helpers.cuda_mutants import Mutant, swap, without

RACE, OUT, EARLY = "race", "out of bounds", "async copy read before it was waited for"
FENCE, WRONG = "missing fence", "wrong numbers"

WAIT_AND_MEET = (
    "            copies.cp_async_wait(pending)\n            cuda.syncthreads()\n            p, into"
)
LAST_WAIT = "        copies.cp_async_wait(0)\n        cuda.syncthreads()\n        write("
RUNG_9 = (
    Mutant(
        "no barrier in the loop", RACE, without("            cuda.syncthreads()\n", "{}            p, into")
    ),
    Mutant("no barrier before it", RACE, without("        cuda.syncthreads()\n", "{}        load(int32(0)")),
    Mutant("waits for one tile too few", EARLY, swap("pending = ahead - 1", "pending = ahead")),
    Mutant(
        "waits after the barrier",
        RACE,
        swap(
            WAIT_AND_MEET,
            "            cuda.syncthreads()\n            copies.cp_async_wait(pending)\n            p, into",
        ),
    ),
    Mutant(
        "copies are in no group",
        EARLY,
        without("            copies.cp_async_commit()\n", "{}            add(int32(1)"),
    ),
    Mutant(
        "sums pass through memory to which copies go",
        "overwrites a pending copy",
        without("        copies.cp_async_wait(0)\n", "{}        cuda.syncthreads()\n        write("),
    ),
    Mutant(
        "sums pass through memory that others read",
        RACE,
        without("        cuda.syncthreads()\n", "        copies.cp_async_wait(0)\n{}        write("),
    ),
    Mutant("copies behind the ring", OUT, swap("if into == ring_words:", "if into > ring_words:")),
    Mutant(
        "reads the slot before", EARLY, swap("if here == ring_words:", "if here == ring_words - stage_words:")
    ),
    Mutant(
        "one set of registers",
        WRONG,
        swap("read_b(b_fragments, part % 2 * b_set + x", "read_b(b_fragments, x"),
    ),
    Mutant(
        "copies past the last row of a",
        OUT,
        without(" and first + line + turn * lines < count", "inside = deep{}", file="tiling/fragment_tiles"),
    ),
    Mutant(
        "copies past the end of a", OUT, swap("inside = deep and ", "inside = ", file="tiling/fragment_tiles")
    ),
    Mutant(
        "rows that begin anywhere",
        "misaligned",
        swap("packed(a, multiple, padded=True)", "a"),
    ),
    Mutant(
        "lines are not swizzled",
        "bank conflicts",
        swap(
            "* LINE_WORDS + (chunk ^ line % 8) *",
            "* LINE_WORDS + chunk *",
            "((lane >> more_depth) % 2 ^ lane % 8)",
            "((lane >> more_depth) % 2)",
            "(place ^ part * (2 * CHUNK_WORDS)) + x * (16 * LINE_WORDS)",
            "(place + part * (2 * CHUNK_WORDS)) + x * (16 * LINE_WORDS)",
            file="tiling/fragment_tiles",
        ),
    ),
    Mutant(
        "sums are not swizzled",
        "bank conflicts",
        swap(
            "(y ^ (lane >> 2))",
            "y",
            "((lane & 7) ^ (inside & 7))",
            "(lane & 7)",
            file="tiling/fragment_tiles",
        ),
    ),
    Mutant(
        "writes c past its last row",
        OUT,
        swap(
            "            if i < m:\n                if j + 8",
            "            if True:\n                if j + 8",
            file="tiling/fragment_tiles",
        ),
    ),
)

CLUSTER_BARRIER = "        sync.cluster_arrive()\n        sync.cluster_wait()\n"
RELEASE = "sync.mbarrier_arrive_at(barriers, slots + {}, {})"
SOON, LATE = "(before if BEHIND else slot)", "before"
MEET = "                    sync.barrier_sync(1 + consumer, 128)\n"
RUNG_10 = (
    Mutant(
        "only the block waits for its mbarriers",
        RACE,
        swap(CLUSTER_BARRIER + "\n        # Producer", "        cuda.syncthreads()\n\n        # Producer"),
    ),
    Mutant("mbarriers are not shown", FENCE, without("            sync.fence_mbarrier_init()\n")),
    Mutant("a block leaves before the others", "block ended", without(CLUSTER_BARRIER, "its mbarriers.\n{}")),
    Mutant("the map of b is not acquired", FENCE, without("                tma.tensor_map_acquire(b)\n")),
    Mutant("the map of c is not acquired", FENCE, swap("tma.tensor_map_acquire(c)", "pass")),
    Mutant(
        "only the own block learns of a free slot",
        RACE,
        swap(RELEASE.format(SOON, "member"), RELEASE.format(SOON, "rank"))
        + swap(RELEASE.format(LATE, "member"), RELEASE.format(LATE, "rank")),
    ),
    Mutant("a slot is free after half its readers", "mbarrier", swap("CONSUMERS * CLUSTER ", "CLUSTER ")),
    Mutant("a slot is free a step early", RACE, swap("wait(sums, BEHIND)", "wait(sums, 2)")),
    Mutant("the wrong slot is free", "deadlock", swap(SOON, "slot")),
    Mutant(
        "the producer does not wait",
        "mbarrier",
        without("sync.mbarrier_wait(barriers, slots + slot, parity ^ 1)\n" + " " * 24),
    ),
    Mutant(
        "the producer waits for the first readers",
        "deadlock",
        swap("slots + slot, parity ^ 1)", "slots + slot, parity)"),
    ),
    Mutant(
        "consumers do not wait", EARLY, without(" " * 20 + "sync.mbarrier_wait(barriers, slot, parity)\n")
    ),
    Mutant(
        "fewer bytes are announced",
        EARLY,
        swap("barriers, slot, slot_bytes)", "barriers, slot, slot_bytes - 4 * share_words)"),
    ),
    Mutant(
        "more bytes are announced",
        "deadlock",
        swap("barriers, slot, slot_bytes)", "barriers, slot, slot_bytes + 16)"),
    ),
    Mutant("both blocks load to one place", "overwrites a pending copy", without(" + rank * share_words")),
    Mutant("copies to blocks outside the cluster", OUT, swap("(1 << CLUSTER) - 1", "(2 << CLUSTER) - 1")),
    Mutant("no wgmma.fence", FENCE, without("                    fence(sums)\n")),
    Mutant("multiplications are in no group", RACE, without("                    wgmma.wgmma_commit()\n")),
    Mutant("sums go on with the next tile", WRONG, swap("a_here, b_here, step)", "a_here, b_here, 1)")),
    Mutant("tiles are not swizzled", WRONG, swap("// x.itemsize, x.dtype)", "// x.itemsize, x.dtype, 0)")),
    Mutant(
        "lines lie half as far apart", WRONG, swap("a_words, b_leading, 1024)", "a_words, b_leading, 512)")
    ),
    Mutant("tiles begin anywhere", "misaligned", swap("alignment=1024", "alignment=16")),
    Mutant("no memory for what leaves", OUT, without(" + OUT_BYTES", "stage_bytes(columns){},\n")),
    Mutant("the map has a row more than the matrix", OUT, swap("x.data, x.rows, ", "x.data, x.rows + 1, ")),
    Mutant("others write where a store still reads", RACE, without(MEET, "read(others)\n{}")),
    Mutant("a store does not wait for other warps", RACE, without(MEET, "fence_proxy_async()\n{}")),
    Mutant(
        "stores do not see what was written",
        FENCE,
        without("                    sync.fence_proxy_async()\n"),
    ),
    Mutant("one buffer too few is free", RACE, swap("others = BUFFERS - 1", "others = BUFFERS")),
    Mutant("ends before its last store", "copy not waited for", swap("tma.tma_store_wait(0)", "pass")),
    Mutant("consumers share a named barrier", "barrier", swap("sync(1 + consumer,", "sync(1,", times=2)),
    Mutant("more registers than there are", "registers", swap("= 40, 232", "= 40, 240")),
    Mutant(
        "the producer is not elected",
        "looped copies",
        swap("thread < 32 and elect_one()", "thread == 0"),
    ),
)
MUTANTS = {"s9_tensor_core": RUNG_9, "s10_hopper": RUNG_10}
