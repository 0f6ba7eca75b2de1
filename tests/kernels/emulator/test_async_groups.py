"""Warp groups, register pools and clusters in the emulator: each mistake stands beside what is right."""

import numpy as np
import pytest

from minidist.kernels.cuda.runtime.matrix import TensorMap
from minidist.kernels.emulator.ptx.fault import EmulatorError
from tests.helpers.ptx_fragments import bits_of, d_64xn, registers_of
from tests.helpers.ptx_programs import execute, fault_of, here, make_mbarrier, of, result


# wgmma: a (64, 16) and b (16, 16) of bfloat16 lie in shared memory without swizzle, as pieces of 8 rows of 16
# bytes; the two pieces of 8 rows are 128 bytes apart (leading), and the next 8 rows 256 (stride).
def pieces(x):
    """The bytes of x (rows, 16), small integers, as bfloat16 in these pieces: words of 32 bits."""
    return bits_of(x, "bf16").reshape(-1, 8, 2, 8).swapaxes(1, 2).reshape(-1).view(np.uint32)


def descriptor(start):
    return start >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32


IMAGE = "".join(
    f"add.u32 %r2, %tid, {128 * i};\n"
    + of("x", "%d1", "%r2", 4)
    + "ld.global.u32 %r3, [%d1];\n"
    + here("%r2", "%r4", 4)
    + "st.shared.u32 [%r4], %r3;\n"
    for i in range(5)
)
PROXY, MEET, FENCE = "fence.proxy.async.shared::cta;\n", "bar.sync 0;\n", "wgmma.fence.sync.aligned;\n"
SUMS = ", ".join(f"%f{i}" for i in range(8))
ONES = "".join(f"mov.f32 %f{i}, 0f3F800000;\n" for i in range(8))
SETUP = f"mov.u64 %d2, {descriptor(0)};\nmov.u64 %d3, {descriptor(2048)};\nsetp.eq.u32 %p1, 0, 0;\n" + ONES
MULTIPLY = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{SUMS}}}, %d2, %d3, %p1, 1, 1, 0, 0;\n"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;\n", "wgmma.wait_group.sync.aligned 0;\n"
STORE = of("y", "%d4", "%tid", 32) + "".join(f"st.global.f32 [%d4+{4 * i}], %f{i};\n" for i in range(8))
READY = IMAGE + PROXY + MEET + SETUP


def operands(seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-4, 5, (64, 16)), rng.integers(-4, 5, (16, 16))  # b by its columns: (n, k)
    return a, b, np.concatenate([pieces(a), pieces(b)])


def held(d):
    """What the threads hold of d (64, 16): (128, 8)."""
    return registers_of(d, d_64xn, 8, range(128)).T


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (MULTIPLY, lambda p: p + 1),
        (MULTIPLY * 2, lambda p: 2 * p + 1),
        (
            MULTIPLY * 2 + "setp.eq.u32 %p1, 0, 1;\n" + MULTIPLY + "setp.eq.u32 %p1, 0, 0;\n" + MULTIPLY,
            lambda p: 2 * p,
        ),
        (MULTIPLY + COMMIT + MULTIPLY + COMMIT + "wgmma.wait_group.sync.aligned 1;\n", lambda p: 2 * p + 1),
    ],
)
def test_wgmma_adds_products(steps, expected):
    a, b, x = operands()
    y = result(1024, np.float32)
    execute(READY + FENCE + steps + COMMIT + WAIT + STORE, threads=128, x=x, y=y)
    np.testing.assert_array_equal(y.reshape(128, 8), held(expected(a @ b.T)))


def test_wgmma_by_one_of_two_warp_groups_while_the_other_waits():
    a, b, x = operands()
    y = result(2048, np.float32)
    skip = "setp.lt.u32 %p2, %tid, 128;\n@!%p2 bra END;\n"
    image = IMAGE.replace("st.shared", "@%p3 st.shared").replace("ld.global", "@%p3 ld.global")
    body = "setp.lt.u32 %p3, %tid, 128;\n" + image + PROXY + MEET + SETUP + skip
    execute(body + FENCE + MULTIPLY + COMMIT + WAIT + STORE + "END:\nbar.sync 0;\n", threads=256, x=x, y=y)
    np.testing.assert_array_equal(y[:1024].reshape(128, 8), held(a @ b.T + 1))
    np.testing.assert_array_equal(y[1024:], result(1024, np.float32))


def test_sums_are_nan_until_wgmma_was_waited_for():
    _, _, x = operands()
    y = result(1024, np.float32)
    execute(READY + FENCE + MULTIPLY + COMMIT + STORE + WAIT, threads=128, x=x, y=y)
    assert np.isnan(y).all()


DIFFERENT = "cvt.u64.u32 %d5, %warp;\nadd.s64 %d3, %d3, %d5;\n"
OTHER = "xor.b32 %r5, %tid, 32;\n" + here("%r5", "%r6", 4) + "st.shared.u32 [%r6], %tid;\n"


@pytest.mark.parametrize(
    ("kind", "match", "body"),
    [
        ("missing fence", r"no wgmma\.fence before the first", READY + MULTIPLY + COMMIT + WAIT),
        ("missing fence", r"no fence\.proxy\.async", IMAGE + MEET + SETUP + FENCE + MULTIPLY),
        ("missing fence", r"no fence\.proxy\.async", PROXY + IMAGE + MEET + SETUP + FENCE + MULTIPLY),
        ("race", "lets wgmma read shared memory that warp . wrote", IMAGE + PROXY + SETUP + FENCE + MULTIPLY),
        ("unwritten shared memory", "nobody wrote", READY + "add.s64 %d3, %d3, 64;\n" + FENCE + MULTIPLY),
        ("out of bounds", "and the block has 8192", READY + "add.s64 %d3, %d3, 400;\n" + FENCE + MULTIPLY),
        ("race", "matrix instruction of warp 3 reads", READY + FENCE + MULTIPLY + COMMIT + OTHER + WAIT),
        ("race", "matrix instruction of warp 3 reads", READY + FENCE + MULTIPLY + WAIT + OTHER),
        ("wgmma not waited for", "does not wait", READY + FENCE + MULTIPLY + COMMIT),
        ("wgmma not waited for", "does not wait", READY + FENCE + MULTIPLY + WAIT),
        ("wgmma", "different values of the descriptor of b", READY + DIFFERENT + FENCE + MULTIPLY),
        ("wgmma", "different values of scale-d", READY + "setp.eq.u32 %p1, %tid, 0;\n" + FENCE + MULTIPLY),
        ("divergence", "needs all 32 threads", READY + "setp.lt.u32 %p2, %tid, 16;\n@%p2 " + FENCE),
        ("deadlock", "32 wait", READY + "setp.lt.u32 %p2, %tid, 32;\n@!%p2 bra END;\n" + FENCE + "END:\n"),
    ],
)
def test_wgmma_mistakes(kind, match, body):
    fault_of(kind, match, body, threads=128, x=operands()[2])


@pytest.mark.parametrize(
    "wrong",
    [
        MULTIPLY.replace("m64n16k16", "m64n12k16"),
        MULTIPLY.replace("m64n16k16", "m64n16k8"),
        MULTIPLY.replace("1, 1, 0, 0", "1, 2, 0, 0"),
        MULTIPLY.replace("1, 1, 0, 0", "-1, 1, 0, 0"),
        MULTIPLY.replace("%d2,", "{%r20, %r21, %r22, %r23},").replace("1, 1, 0, 0", "1, 1, 0"),
        MULTIPLY.replace("f32.bf16.bf16", "f16.f16.f16"),
        MULTIPLY.replace("k16.f32.bf16.bf16", "k8.f32.tf32.tf32"),
        MULTIPLY.replace("1, 1, 0, 0", "1, 1, 0"),
        MULTIPLY.replace("bf16.bf16", "e4m3.e4m3"),
        MULTIPLY.replace(", %f7", ""),
    ],
)
def test_wgmma_says_what_it_does_not_take(wrong):
    with pytest.raises(EmulatorError, match=r"(is not emulated|does not take)"):
        execute(READY + FENCE + wrong, threads=128, x=operands()[2])
    with pytest.raises(EmulatorError, match="a multiple of 128"):
        execute(FENCE, threads=96)


# Registers: 384 threads begin with 168 each; the first warp group gives, the others take.
def registers(give, take):
    return (
        "setp.lt.u32 %p1, %tid, 128;\n@%p1 bra GIVE;\n"
        f"setmaxnreg.inc.sync.aligned.u32 {take};\nbra END;\n"
        f"GIVE:\nsetmaxnreg.dec.sync.aligned.u32 {give};\nEND:\n"
    )


@pytest.mark.parametrize(
    ("match", "body"),
    [
        (
            r"setmaxnreg.inc to 240 waits for ever: the block's 12 warps want 66560 registers, "
            r"and it began with 64512 \(168 for each thread\)",
            registers(40, 240),
        ),
        ("setmaxnreg.dec to 176, and the warp holds 168: use inc", registers(176, 168)),
        ("setmaxnreg.inc to 160, and the warp holds 168: use dec", registers(40, 160)),
    ],
)
def test_register_mistakes(match, body):
    fault_of("registers", match, body, threads=384)


def test_setmaxnreg_takes_multiples_of_8():
    for count in (16, 100, 264):
        with pytest.raises(EmulatorError, match="a multiple of 8 from 24 to 256"):
            execute(f"setmaxnreg.inc.sync.aligned.u32 {count};\n", threads=128)


# Clusters of two blocks. %rank is the block's rank; %r1 is the mbarrier at byte 0 of its shared memory.
ARRIVE, AWAIT = "barrier.cluster.arrive.release.aligned;\n", "barrier.cluster.wait.acquire.aligned;\n"
BOTH = ARRIVE + AWAIT
PEER = "xor.b32 %r2, %rank, 1;\nmapa.shared::cluster.u32 %r3, %r1, %r2;\n"
INIT = make_mbarrier(1) + "fence.mbarrier_init.release.cluster;\n"
REMOTE = "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];\n"
TRY = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r1], 0;\n"
GIVE = (
    "mad.lo.u32 %r4, %tid, 4, %r3;\nmad.lo.u32 %r5, %rank, 100, %tid;\n"
    "st.shared::cluster.u32 [%r4+64], %r5;\n"
)
TAKE = (
    "mad.lo.u32 %r6, %tid, 4, %r1;\nld.shared.u32 %r7, [%r6+64];\nmad.lo.u32 %r8, %rank, 32, %tid;\n"
    + of("y", "%d1", "%r8", 4)
    + "st.global.u32 [%d1], %r7;\n"
)
CLUSTER = {"blocks": 2, "cluster": 2}
EXCHANGED = np.concatenate([np.arange(32) + 100, np.arange(32)])


def test_blocks_of_a_cluster_write_each_other_s_memory():
    y = result(64)
    execute("mov.u32 %r1, memory;\n" + PEER + GIVE + BOTH + TAKE, **CLUSTER, y=y)
    np.testing.assert_array_equal(y, EXCHANGED)
    fault_of("race", "wrote", "mov.u32 %r1, memory;\n" + PEER + GIVE + TAKE + BOTH, **CLUSTER, y=y)
    relaxed = BOTH.replace("release", "relaxed")
    fault_of("race", "wrote", "mov.u32 %r1, memory;\n" + PEER + GIVE + relaxed + TAKE, **CLUSTER, y=y)


def test_blocks_of_a_cluster_arrive_at_each_other_s_mbarriers():
    y = result(64)
    exchange = INIT + BOTH + PEER + GIVE + REMOTE + TRY + TAKE
    execute(exchange + BOTH, **CLUSTER, y=y)
    np.testing.assert_array_equal(y, EXCHANGED)
    unmade = INIT + PEER + GIVE + REMOTE + TRY + TAKE + BOTH
    fault_of("race", "that another warp made", unmade, **CLUSTER, y=y)


def test_a_block_must_not_end_before_others_used_its_memory():
    first_only = "setp.eq.u32 %p3, %rank, 0;\n@!%p3 bra END;\n"
    one_way = INIT + BOTH + PEER + first_only + REMOTE + "END:\n"
    fault_of("block ended", "block 1 may have ended", one_way, **CLUSTER)
    execute(one_way + BOTH, **CLUSTER)
    # A block that has waited for the arrival may end.
    waits = one_way + "@%p3 bra FREE;\n" + TRY + "FREE:\n"
    execute(waits, **CLUSTER)


OUTSIDE = "mov.u32 %r1, memory;\nmapa.shared::cluster.u32 %r3, %r1, 2;\n"
STUCK = INIT + "setp.eq.u32 %p3, %rank, 0;\n@%p3 bra A;\n" + TRY + "A:\n" + BOTH


@pytest.mark.parametrize(
    ("kind", "match", "body"),
    [
        ("barrier", "again before it has waited", ARRIVE * 2),
        ("barrier", "to which it did not come", AWAIT),
        ("out of bounds", "rank 2 of a cluster of 2", OUTSIDE),
        ("deadlock", "32 threads wait for the mbarrier .* of block 1,", STUCK),
    ],
)
def test_cluster_mistakes(kind, match, body):
    fault_of(kind, match, body, **CLUSTER)


# Multicast: each block loads 4 rows of a box of 8 x 32 float32, and both get all 8.
LOADS = (
    "fence.proxy.tensormap::generic.acquire.sys [%t], 128;\n"
    "mov.s32 %r10, 0;\nmul.lo.u32 %r11, %rank, 4;\nmul.lo.u32 %r12, %rank, 512;\nadd.u32 %r12, %r12, 1024;\n"
    "mov.u16 %s1, MASK;\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 1024;\n@%p1 "
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%r12], [%t, {%r10, %r11}], [%r1], %s1;\n"
)
ROWS = "".join(
    f"add.u32 %r13, %tid, {32 * i};\n" + here("%r13", "%r14", 4) + "ld.shared.u32 %r15, [%r14+1024];\n"
    "mad.lo.u32 %r16, %rank, 256, %r13;\n" + of("y", "%d1", "%r16", 4) + "st.global.u32 [%d1], %r15;\n"
    for i in range(8)
)


def source():
    values = np.arange(1, 257, dtype=np.float32)
    return values, TensorMap(values, 8, 32, 32, 4, 32, "float32", 0)


def test_multicast_loads_reach_all_blocks():
    values, t = source()
    y = result(512, np.float32)
    start = INIT + BOTH
    execute(start + LOADS.replace("MASK", "3") + TRY + ROWS + BOTH, **CLUSTER, t=t, y=y)
    np.testing.assert_array_equal(y.reshape(2, 256), [values, values])
    fault_of("out of bounds", "mask 0b101", start + LOADS.replace("MASK", "5"), **CLUSTER, t=t, y=y)
    mine = start + LOADS.replace("MASK", "1") + TRY
    fault_of("deadlock", "lacks 1024 bytes|512 bytes", mine, **CLUSTER, t=t, y=y)
    soon = INIT + "bar.sync 0;\n" + LOADS.replace("MASK", "3") + TRY + ROWS + BOTH
    fault_of("race", "that another warp made", soon, **CLUSTER, t=t, y=y)


def test_multicast_must_not_overwrite_what_the_other_block_reads():
    _, t = source()
    again = LOADS.replace("MASK", "3") + TRY.replace(" 0;", " 1;") + ROWS
    first = INIT + BOTH + LOADS.replace("MASK", "3") + TRY + ROWS
    execute(first + BOTH + again + BOTH, **CLUSTER, t=t, y=result(512, np.float32))
    fault_of(
        "race", "lets the copy engine write", first + again + BOTH, **CLUSTER, t=t, y=result(512, np.float32)
    )
