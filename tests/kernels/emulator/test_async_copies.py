"""What goes on by itself in the emulator, copies and mbarriers: each mistake stands beside what is right.

The kernels are PTX written by hand: no compiler is needed, and a mistake is one line more or less.
"""

import numpy as np
import pytest

from minidist.kernels.cuda.runtime.matrix import TensorMap
from tests.helpers.ptx_fragments import c_16x8, registers_of
from tests.helpers.ptx_programs import execute, fault_of, here, make_mbarrier, of, result

# cp.async: a word of x to shared memory, and from there to y.
ISSUE = here("%tid", "%r1", 16) + of("x", "%d1", "%tid", 16) + of("y", "%d2", "%tid", 16)
COPY = "cp.async.cg.shared.global [%r1], [%d1], 16;\n"
COMMIT, WAIT = "cp.async.commit_group;\n", "cp.async.wait_group 0;\n"
OUT = "ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1];\nst.global.v4.u32 [%d2], {%r2, %r3, %r4, %r5};\n"


def words(n):
    return np.arange(1, n + 1, dtype=np.uint32)


def test_cp_async_copies():
    x, y = words(256), result(256)
    execute(ISSUE + COPY + COMMIT + WAIT + OUT, threads=64, x=x, y=y)
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_fills_up_with_zeros(size):
    x = np.arange(1, 513, dtype=np.uint32).view(np.uint8)
    count, y = np.arange(32, dtype=np.uint32) % (size + 1), result(128)
    cache = "cg" if size == 16 else "ca"
    body = ISSUE + of("count", "%d3", "%tid", 4) + "ld.global.u32 %r6, [%d3];\n"
    clear = "mov.u32 %r2, 0xEEEEEEEE;\nst.shared.v4.u32 [%r1], {%r2, %r2, %r2, %r2};\n"
    copy = f"cp.async.{cache}.shared.global [%r1], [%d1], {size}, %r6;\n"
    execute(body + clear + copy + COMMIT + WAIT + OUT, x=x, y=y, count=count)
    arrived = y.view(np.uint8).reshape(32, 16)
    for lane in range(32):
        expected = np.full(16, 0xEE, np.uint8)
        expected[:size] = 0
        expected[: count[lane]] = x.reshape(-1, 16)[lane, : count[lane]]
        np.testing.assert_array_equal(arrived[lane], expected)


def test_cp_async_reads_global_memory_when_it_is_waited_for():
    x, y = words(128), result(128)
    store = "mov.u32 %r8, 77;\nst.global.u32 [%d1], %r8;\n"
    execute(ISSUE + COPY + COMMIT + store + WAIT + OUT, x=x, y=y)
    assert (y[::4] == 77).all()


TWO = ISSUE + "add.u32 %r9, %r1, 4096;\n" + COPY + COMMIT + COPY.replace("%r1", "%r9") + COMMIT


@pytest.mark.parametrize("body", [ISSUE + COPY + COMMIT + OUT, ISSUE + COPY + WAIT + OUT])
def test_cp_async_has_to_be_waited_for(body):
    """Not waited for; waited for and in no group."""
    fault_of(
        "async copy read before it was waited for", "thread 0 of block 0", body, x=words(128), y=result(128)
    )


def test_cp_async_groups_end_in_order():
    x, y = words(128), result(128)
    execute(TWO + "cp.async.wait_group 1;\n" + OUT, x=x, y=y)
    np.testing.assert_array_equal(x, y)
    late = OUT.replace("[%r1]", "[%r9]")
    fault_of(
        "async copy read before it was waited for",
        "still fills",
        TWO + "cp.async.wait_group 1;\n" + late,
        x=x,
        y=y,
    )


def test_cp_async_shows_its_data_to_other_warps_by_a_barrier():
    x, y = words(256), result(256)
    other = "xor.b32 %r10, %tid, 32;\n" + here("%r10", "%r1", 16)
    execute(ISSUE + COPY + COMMIT + WAIT + "bar.sync 0;\n" + other + OUT, threads=64, x=x, y=y)
    np.testing.assert_array_equal(y.reshape(2, 128), x.reshape(2, 128)[::-1])
    fault_of(
        "race", "copy or matrix instruction", ISSUE + COPY + COMMIT + WAIT + other + OUT, threads=64, x=x, y=y
    )
    # The barrier does not stand in for the wait of the other.
    lax = ISSUE + COPY + COMMIT + "bar.sync 0;\n" + other + OUT
    fault_of("async copy read before it was waited for", "still fills", lax, threads=64, x=x, y=y)


@pytest.mark.parametrize(
    ("kind", "match", "body"),
    [
        ("out of bounds", "thread 25 of block 0 copies 16 bytes from byte 400 of x", ISSUE + COPY),
        ("misaligned", "copies 16 bytes to an address", ISSUE + "add.u32 %r1, %r1, 8;\n" + COPY),
        ("misaligned", "copies 16 bytes from an address", ISSUE + "add.s64 %d1, %d1, 4;\n" + COPY),
        ("out of bounds", "to byte 8192 of shared memory", ISSUE + "add.u32 %r1, %r1, 8192;\n" + COPY),
        ("out of bounds", "reads 20 bytes for a copy of 16", ISSUE + COPY.replace("16;", "16, 20;")),
        (
            "overwrites a pending copy",
            "another copy is under way",
            ISSUE + "mov.u64 %d1, %x;\n" + COPY + COPY,
        ),
    ],
)
def test_cp_async_is_checked_when_it_begins(kind, match, body):
    """Also where nobody ever waits for it."""
    fault_of(kind, match, body, x=words(100), y=result(128))


def test_cp_async_must_not_write_what_another_warp_reads():
    read = "xor.b32 %r10, %tid, 32;\n" + here("%r10", "%r11", 16) + "ld.shared.u32 %r12, [%r11];\n"
    store = ISSUE + "st.shared.u32 [%r1], %tid;\nbar.sync 0;\n" + read
    fault_of("race", "warp . reads", store + COPY + COMMIT + WAIT, threads=64, x=words(256), y=result(256))
    execute(store + "bar.sync 0;\n" + COPY + COMMIT + WAIT, threads=64, x=words(256), y=result(256))


# mma and ldmatrix, through the machine: x (a: 16 x 16, b: 16 x 8 by columns) to fragments, and products to y.
def test_ldmatrix_mma_and_stmatrix_run_in_some_warps():
    rng = np.random.default_rng(1)
    a = rng.integers(-4, 5, (16, 16)).astype(np.float16)
    b = rng.integers(-4, 5, (16, 8)).astype(np.float16)
    x = np.concatenate([a.reshape(-1), b.reshape(-1)]).view(np.uint32)
    c, y = result(3 * 128, np.float32), result(3 * 64)
    load = """
    and.b32 %r20, %lane, 15;
    shr.u32 %r21, %lane, 4;
    """
    # Each lane stores 8 words of x for its own warp: 192 words, 6 a lane.
    copy = "".join(
        f"add.u32 %r4, %lane, {32 * i};\n" + of("x", "%d1", "%r4", 4) + "ld.global.u32 %r5, [%d1];\n"
        "mad.lo.u32 %r6, %warp, 192, %r4;\n" + here("%r6", "%r7", 4) + "st.shared.u32 [%r7], %r5;\n"
        for i in range(6)
    )
    # a: rows lane & 15, halves lane >> 4; b: rows lane & 15, transposed.
    addresses = (
        "mul.lo.u32 %r22, %warp, 768;\nmad.lo.u32 %r22, %r20, 32, %r22;\nmad.lo.u32 %r22, %r21, 16, %r22;\n"
        + here("%r22", "%r23", 1)
        + "mul.lo.u32 %r24, %warp, 768;\nmad.lo.u32 %r24, %r20, 16, %r24;\nadd.u32 %r24, %r24, 512;\n"
        + here("%r24", "%r25", 1)
    )
    multiply = """
    bar.warp.sync 0xFFFFFFFF;
    setp.eq.u32 %p2, %warp, 1;
    @%p2 bra END;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r30, %r31, %r32, %r33}, [%r23];
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r34, %r35}, [%r25];
    mov.f32 %f0, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r30, %r31, %r32, %r33},
        {%r34, %r35}, {%f0, %f0, %f0, %f0};
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r23], {%r30, %r31, %r32, %r33};
    """
    out = (
        of("c", "%d2", "%tid", 16)
        + "st.global.v4.f32 [%d2], {%f1, %f2, %f3, %f4};\nbar.warp.sync 0xFFFFFFFF;\n"
        + "".join(
            f"add.u32 %r4, %lane, {32 * i};\nmad.lo.u32 %r6, %warp, 192, %r4;\n"
            + here("%r6", "%r7", 4)
            + "ld.shared.u32 %r5, [%r7];\nmad.lo.u32 %r8, %warp, 64, %r4;\n"
            + of("y", "%d1", "%r8", 4)
            + "st.global.u32 [%d1], %r5;\n"
            for i in range(2)
        )
    )
    execute(load + copy + addresses + multiply + out + "END:\n", threads=96, x=x, c=c, y=y)
    product = a.astype(np.float32) @ b.astype(np.float32)
    for warp in (0, 2):
        np.testing.assert_array_equal(c.reshape(3, 32, 4)[warp].T, registers_of(product, c_16x8, 4))
        np.testing.assert_array_equal(y.reshape(3, 64)[warp], x[:64])
    np.testing.assert_array_equal(c.reshape(3, 128)[1], result(128, np.float32))
    divergent = "setp.lt.u32 %p1, %tid, 24;\n@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r30}, [%r23];\n"
    fault_of("divergence", "needs all 32 threads", divergent, x=x, c=c, y=y)


# mbarriers: the first is at byte 0 of shared memory.
def init(count):
    return make_mbarrier(count) + "bar.sync 0;\n"


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r1];\n"
TRY = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;\n"
STORE = here("%tid", "%r40", 4) + "st.shared.u32 [%r40+64], %tid;\n"
LOAD = (
    "xor.b32 %r41, %tid, 32;\n"
    + here("%r41", "%r42", 4)
    + "ld.shared.u32 %r43, [%r42+64];\n"
    + of("y", "%d2", "%tid", 4)
    + "st.global.u32 [%d2], %r43;\n"
)


def test_mbarriers_order_what_warps_do():
    y = result(64)
    execute(init(64) + STORE + ARRIVE + TRY + LOAD, threads=64, y=y)
    np.testing.assert_array_equal(y, np.arange(64) ^ 32)
    late = init(64) + STORE + ARRIVE + LOAD
    fault_of("race", "warp . wrote", late, threads=64, y=y)
    relaxed = init(64) + STORE + ARRIVE.replace(".shared", ".relaxed.cta.shared") + TRY + LOAD
    fault_of("race", "warp . wrote", relaxed, threads=64, y=y)
    # A store after the arrival is not released by it.
    after = init(64) + ARRIVE + STORE + TRY + LOAD
    fault_of("race", "warp . wrote", after, threads=64, y=y)


def test_phases_of_mbarriers_alternate():
    make, again = init(32), TRY.replace(" 0;", " 1;")
    phases = make + again + ARRIVE + TRY + ARRIVE + again
    execute(phases)  # the phase before the first counts as over
    for phase, body in enumerate((make + TRY, make + ARRIVE + again, phases + TRY)):
        fault_of("deadlock", f"32 threads wait .* phase {phase} lacks 32 of 32 arrivals", body)


def test_mbarriers_at_generic_addresses():
    y = result(64)
    generic = "cvt.u64.u32 %d4, %r1;\ncvta.shared.u64 %d5, %d4;\n" + (ARRIVE + TRY).replace("%r1", "%d5")
    generic = generic.replace(".shared::cta", "")
    execute(init(64) + STORE + generic + LOAD, threads=64, y=y)
    np.testing.assert_array_equal(y, np.arange(64) ^ 32)


MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
LONELY = "setp.lt.u32 %p3, %tid, 32;\n@%p3 "


@pytest.mark.parametrize(
    ("kind", "match", "body"),
    [
        ("mbarrier", "where none was made", "mov.u32 %r1, memory;\n" + ARRIVE),
        ("mbarrier", "64 arrivals at an mbarrier whose phase 0 lacks 63 of 63", init(63) + ARRIVE),
        ("mbarrier", "mbarrier.inval has to end that first", init(1) * 2),
        ("mbarrier", "made for 0 arrivals", init(0)),
        (
            "misaligned",
            "at byte 4 of shared memory",
            "mov.u32 %r1, memory;\n" + ARRIVE.replace("%r1", "%r1+4"),
        ),
        ("out of bounds", "at byte 8192 of", "mov.u32 %r1, memory;\n" + ARRIVE.replace("%r1", "%r1+8192")),
        (
            "mbarrier",
            "something was written over it",
            init(64) + "@%p1 st.shared.u32 [%r1], %tid;\nbar.sync 0;\n" + ARRIVE,
        ),
        ("race", "that another warp made", make_mbarrier(64) + ARRIVE),
        (
            "deadlock",
            "64 threads wait for the mbarrier at byte 0 .* phase 0 lacks 32 of 64 arrivals",
            init(64) + LONELY + ARRIVE + TRY,
        ),
        (
            "deadlock",
            "lacks 12800 bytes",
            init(64) + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 200;\n" + TRY,
        ),
    ],
)
def test_mbarrier_mistakes(kind, match, body):
    fault_of(kind, match, body, threads=64, y=result(64))


def test_mbarriers_can_be_made_again_when_they_were_ended():
    end = "bar.sync 0;\n@%p1 mbarrier.inval.shared::cta.b64 [%r1];\nbar.sync 0;\n"
    once = init(64) + ARRIVE + TRY
    execute(once + end + once, threads=64, y=result(64))


# Tensor copies: boxes of 8 x 32 float32 (128 bytes a row) at byte 1024 of shared memory, mbarrier at byte 0.
def matrix(rows=20, columns=50, swizzle=128, box=(8, 32)):
    memory = np.zeros((rows, 56), np.float32)
    memory[:, :columns] = np.arange(1, rows * columns + 1).reshape(rows, columns)
    return memory[:, :columns], TensorMap(memory.reshape(-1), rows, columns, 56, *box, "float32", swizzle)


SHOW = make_mbarrier(1) + "fence.mbarrier_init.release.cluster;\nbar.sync 0;\n"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.sys [%t], 128;\n"
CORNER = ACQUIRE + "mov.s32 %r2, X;\nmov.s32 %r3, Y;\nadd.u32 %r4, %r1, 1024;\n"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 1024;\n"
BOX = (
    "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%r4], [%t, {%r2, %r3}], [%r1];\n"
)
ROWS = (
    "shr.u32 %r5, %tid, 3;\nand.b32 %r6, %tid, 7;\nand.b32 %r7, %r5, 7;\nxor.b32 %r8, %r6, %r7;\n"
    "mad.lo.u32 %r9, %r5, 8, %r8;\nmad.lo.u32 %r9, %r9, 16, %r4;\n"  # chunk tid & 7 of row tid >> 3, swizzled
    "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r9];\n"
    + of("y", "%d2", "%tid", 16)
    + "st.global.v4.u32 [%d2], {%r10, %r11, %r12, %r13};\n"
)


def at(x, y):
    return CORNER.replace("X", str(x)).replace("Y", str(y))


@pytest.mark.parametrize(("x", "y"), [(0, 0), (4, 3), (-5, -2), (40, 15), (-32, 0), (100, 0), (17, -8)])
def test_tensor_loads(x, y):
    values, t = matrix()
    out = result(256, np.float32)
    execute(SHOW + at(x, y) + EXPECT + BOX + TRY + ROWS, threads=64, t=t, y=out)
    expected = np.pad(values, 100)[100 + y : 108 + y, 100 + x : 132 + x]
    np.testing.assert_array_equal(out.reshape(8, 32), expected)


START, FULL, FURTHER = SHOW + at(0, 0), SHOW + at(0, 0) + EXPECT, "add.u32 %r4, %r4, 1024;\n"
SILENT = START + ARRIVE.replace("mb", "@%p1 mb")  # arrives, and announces no bytes
UNSHOWN = FULL.replace("fence.mbarrier_init.release.cluster;", "")
EARLY = "async copy read before it was waited for"


@pytest.mark.parametrize(
    ("kind", "match", "body"),
    [
        (EARLY, "still fills", FULL + BOX + ROWS),
        (EARLY, "still fills", SILENT + BOX + TRY + ROWS),
        (EARLY, "still fills", FULL + BOX + FURTHER + BOX + TRY + ROWS),
        ("deadlock", "lacks 1024 bytes", FULL.replace("], 1024", "], 2048") + BOX + TRY + ROWS),
        ("deadlock", "has 512 bytes more than were announced", FULL.replace("], 1024", "], 512") + BOX + TRY),
        ("missing fence", "names the mbarrier at byte 0, which its maker did not show", UNSHOWN + BOX),
        ("misaligned", "0x420 of shared memory is not aligned", FULL + BOX.replace("[%r4]", "[%r4+32]")),
        ("out of bounds", "takes 1024 bytes", FULL + BOX.replace("[%r4]", "[%r4+6272]")),
        ("wrong memory", "no tensor map", FULL + BOX.replace("%t,", "%y,")),
        ("missing fence", "that its block did not acquire", FULL.replace(ACQUIRE, "") + BOX),
        ("missing fence", "that its block did not acquire", FULL.replace(ACQUIRE, "") + BOX + ACQUIRE),
        ("overwrites a pending copy", "another copy is under way", FULL + BOX * 2),
        ("copy not waited for", "still under way when its block ends", FULL + BOX),
    ],
)
def test_tensor_load_mistakes(kind, match, body):
    fault_of(kind, match, body, threads=64, t=matrix()[1], y=result(256, np.float32))


def test_one_thread_acquires_a_tensor_map_for_its_block():
    values, t = matrix()
    y = result(256, np.float32)
    start = SHOW + at(0, 0).replace(ACQUIRE, "") + EXPECT
    by_the_other_warp = "setp.eq.u32 %p4, %tid, 40;\n@%p4 " + ACQUIRE
    execute(by_the_other_warp + start + BOX + TRY + ROWS, threads=64, t=t, y=y)
    np.testing.assert_array_equal(y.reshape(8, 32), values[:8, :32])
    late = start + by_the_other_warp + BOX + TRY + ROWS  # with no barrier in between
    fault_of("missing fence", "that its block did not acquire", late, threads=64, t=t, y=y)
    of_block_0 = "setp.eq.u32 %p4, %rank, 0;\n@%p4 " + ACQUIRE
    both = of_block_0 + start.replace("bar.sync 0;\n", MEET) + BOX + TRY + ROWS
    fault_of("missing fence", "thread 0 of block 1 uses", both, threads=64, blocks=2, cluster=2, t=t, y=y)


def test_a_tensor_load_must_not_write_what_another_warp_still_reads():
    """The second warp reads the first box; the second box is written there once it has said so."""
    again = "mov.s32 %r3, 8;\n" + EXPECT + BOX + TRY.replace(" 0;", " 1;") + ROWS
    values, t = matrix()
    y = result(256, np.float32)
    first = SHOW + at(0, 0) + EXPECT + BOX + TRY + ROWS
    execute(first + "bar.sync 0;\n" + again, threads=64, t=t, y=y)
    np.testing.assert_array_equal(y.reshape(8, 32), values[8:16, :32])
    fault_of(
        "race",
        "lets the copy engine write shared memory that warp 1 reads",
        first + again,
        threads=64,
        t=t,
        y=y,
    )


PUT = here("%tid", "%r20", 16) + (
    "add.u32 %r21, %tid, 1;\ncvt.rn.f32.u32 %f1, %r21;\nst.shared.v4.f32 [%r20+1024], {%f1, %f1, %f1, %f1};\n"
)
FENCE, GATHER = (
    "fence.proxy.async.shared::cta;\n",
    "bar.sync 0;\nmov.u32 %r1, memory;\nsetp.eq.u32 %p1, %tid, 0;\n",
)
BOX_OUT = "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%t, {%r2, %r3}], [%r4];\n"
BULK_COMMIT, BULK_WAIT = "@%p1 cp.async.bulk.commit_group;\n", "@%p1 cp.async.bulk.wait_group.read 0;\n"


@pytest.mark.parametrize(("x", "y"), [(0, 0), (3, 5), (-5, -2), (40, 15), (60, 0)])
@pytest.mark.parametrize("wait", [BULK_WAIT, BULK_WAIT.replace(".read", "")])
def test_tensor_stores(x, y, wait):
    values, t = matrix(swizzle=0)
    expected = values.copy()
    for i in range(8):
        for j in range(32):
            if 0 <= y + i < 20 and 0 <= x + j < 50:
                expected[y + i, x + j] = 8 * i + j // 4 + 1
    execute(PUT + FENCE + GATHER + at(x, y) + BOX_OUT + BULK_COMMIT + wait, threads=64, t=t)
    np.testing.assert_array_equal(values, expected)
    assert (t.array.reshape(20, 56)[:, 50:] == 0).all()


REUSE = "bar.sync 0;\n" + PUT
STORED = PUT + FENCE + GATHER + at(0, 0) + BOX_OUT
UNMET = GATHER.replace("bar.sync 0;", "fence.proxy.async;")


@pytest.mark.parametrize(
    ("kind", "match", "body"),
    [
        ("missing fence", "that its block did not acquire", STORED.replace(ACQUIRE, "")),
        ("missing fence", r"no fence\.proxy\.async", PUT + GATHER + at(0, 0) + BOX_OUT),
        ("missing fence", r"no fence\.proxy\.async", FENCE + PUT + GATHER + at(0, 0) + BOX_OUT),
        ("missing fence", r"no fence\.proxy\.async", PUT + FENCE + PUT + GATHER + at(0, 0) + BOX_OUT),
        ("race", "warp 1 wrote", PUT + FENCE + UNMET + at(0, 0) + BOX_OUT),
        ("unwritten shared memory", "nobody wrote", GATHER + at(0, 0) + BOX_OUT),
        ("race", "reads", STORED + BULK_COMMIT + REUSE),
        ("race", "reads", STORED + BULK_WAIT + REUSE),
        ("copy not waited for", r"wait_group\.read", STORED + BULK_COMMIT),
    ],
)
def test_tensor_store_mistakes(kind, match, body):
    fault_of(kind, match, body, threads=64, t=matrix(swizzle=0)[1])
