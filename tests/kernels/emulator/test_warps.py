"""Warps and atomics of the emulator, against loops over lanes that follow the manual's pseudocode."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.kernels.emulator.base.addresses import awaited
from minidist.kernels.emulator.instructions.atomics import apply, atomic
from minidist.kernels.emulator.instructions.warps import warp_operation
from minidist.kernels.emulator.ptx.dtypes import DTYPES

ALL = 0xFFFFFFFF
seeds = st.integers(0, 2**32 - 1)


def warps(seed, count=2):
    """Active lanes, and for each lane a mask of members: its own half, the whole warp, or any lanes."""
    rng = np.random.default_rng(seed)
    active = rng.random((count, 32)) < rng.choice([0.5, 0.95, 1.0])
    halves = np.where(np.arange(32) < 16, 0x0000FFFF, 0xFFFF0000)
    members = [np.full(32, ALL), halves, rng.integers(0, 2**32, 32)][rng.integers(3)]
    return rng, active, np.broadcast_to(members, (count, 32)).astype(np.uint32)


def run(opcode, active, *operands):
    found = warp_operation(tuple(opcode.split(".")))
    assert found is not None, opcode
    result, predicate, undefined = found.function(active, *operands)
    assert result.dtype == DTYPES[found.result]
    assert undefined.shape == active.shape
    return np.broadcast_to(result, active.shape), predicate, undefined


def present(active, members, lane):
    """The lanes that take part with this one."""
    return [j for j in range(32) if active[j] and members[lane] >> j & 1]


@settings(max_examples=50, deadline=None)
@given(seeds, st.sampled_from(["up", "down", "bfly", "idx"]))
def test_shuffles(seed, mode):
    rng, active, members = warps(seed)
    a = rng.integers(0, 2**32, active.shape).astype(np.uint32)
    b = np.broadcast_to(rng.integers(0, 40, rng.choice([1, 32])), active.shape).astype(np.uint32)
    width = int(rng.choice([32, 16, 8, 4, 2]))
    c = np.uint32((32 - width) << 8 | (0 if mode == "up" else 31))
    result, predicate, undefined = run(
        f"shfl.sync.{mode}.b32", active, a, b, np.broadcast_to(c, active.shape), members
    )
    for warp, lane in zip(*np.nonzero(active), strict=True):
        lane, offset, clamp, mask = int(lane), int(b[warp, lane]) & 31, int(c) & 31, int(c) >> 8 & 31
        first = lane & mask
        last = first | (clamp & ~mask)
        j, in_range = {
            "up": (lane - offset, lane - offset >= last),
            "down": (lane + offset, lane + offset <= last),
            "bfly": (lane ^ offset, lane ^ offset <= last),
            "idx": (first | (offset & ~mask), first | (offset & ~mask) <= last),
        }[mode]
        j = j if in_range else lane
        assert result[warp, lane] == a[warp, j]
        assert predicate[warp, lane] == in_range
        there = present(active[warp], members[warp], lane)
        assert undefined[warp, lane] == (j not in there or lane not in there)
    assert not undefined[~active].any()


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_votes_and_matches(seed):
    rng, active, members = warps(seed)
    flag = rng.random(active.shape) < rng.choice([0, 0.5, 1])
    value = rng.integers(0, rng.choice([1, 3]), active.shape).astype(np.uint64) << np.uint64(40)
    got = {mode: run(f"vote.sync.{mode}.pred", active, flag, members)[0] for mode in ("all", "any", "uni")}
    ballot, _, undefined = run("vote.sync.ballot.b32", active, flag, members)
    same, _, _ = run("match.any.sync.b64", active, value, members)
    agreed, agree, _ = run("match.all.sync.b64", active, value, members)
    for warp, lane in zip(*np.nonzero(active), strict=True):
        there = present(active[warp], members[warp], lane)
        flags = [bool(flag[warp, j]) for j in there]
        assert got["all"][warp, lane] == all(flags)
        assert got["any"][warp, lane] == any(flags)
        assert got["uni"][warp, lane] == (all(flags) or not any(flags))
        assert ballot[warp, lane] == sum(1 << j for j in there if flag[warp, j])
        assert undefined[warp, lane] == (lane not in there)
        if lane in there:
            equal = sum(1 << j for j in there if value[warp, j] == value[warp, lane])
            everyone = sum(1 << j for j in there)
            assert same[warp, lane] == equal
            assert agree[warp, lane] == (equal == everyone)
            assert agreed[warp, lane] == (everyone if equal == everyone else 0)


def test_awaited_lanes():
    active = np.zeros((1, 32), bool)
    active[0, :2] = True
    members = np.full((1, 32), 0b1011, np.uint32)
    assert awaited(members, active)[0].tolist() == [0b1000, 0b1000] + [0] * 30
    assert warp_operation(("shfl", "idx", "b32")) is None


# Atomics.


def serial(memory, index, operand, compare, name):
    """One lane after another, in the dtype of the memory."""
    cells, dtype = memory.copy(), memory.dtype
    old = np.zeros(index.shape, dtype)
    for lane in range(index.size):
        r, b, c = cells[index[lane]], operand[lane], compare[lane]
        old[lane] = r
        cells[index[lane]] = {
            "add": lambda r, b, c: r + b,
            "min": lambda r, b, c: min(r, b),
            "max": lambda r, b, c: max(r, b),
            "and": lambda r, b, c: r & b,
            "or": lambda r, b, c: r | b,
            "xor": lambda r, b, c: r ^ b,
            "exch": lambda r, b, c: b,
            "cas": lambda r, b, c: b if r == c else r,
            "inc": lambda r, b, c: 0 if r >= b else r + 1,
            "dec": lambda r, b, c: b if r == 0 or r > b else r - 1,
        }[name](r, b, c)
    return cells, old


CASES = [f"{name}.{kind}" for name in ("add", "min", "max") for kind in ("u32", "s32", "u64", "s64")]
CASES += [f"{name}.{kind}" for name in ("and", "or", "xor", "exch", "cas") for kind in ("b32", "b64")]
CASES += ["inc.u32", "dec.u32", "cas.b16", "add.f32", "add.f64"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cells", [1, 3, 1000])
def test_atomics_take_turns(case, cells):
    rng = np.random.default_rng(len(case) + cells)
    found = atomic(("atom", "global", *case.split(".")))
    dtype = DTYPES[found.kind]

    def draw(count):
        if dtype.kind == "f":
            return rng.standard_normal(count).astype(dtype)
        if found.name in ("inc", "dec", "cas"):
            return rng.integers(0, 4, count).astype(dtype)
        return rng.integers(0, 2**62, count, np.uint64).astype(dtype)

    memory, index = draw(cells), rng.integers(0, cells, 200)
    operand, compare = draw(200), draw(200)
    with np.errstate(over="ignore"):
        after, old = serial(memory, index, operand, compare, found.name)
        got = apply(memory, index, operand, compare, found)
    np.testing.assert_array_equal(got, old)
    np.testing.assert_array_equal(memory, after)


def test_lanes_of_one_cell_act_in_order():
    memory = np.zeros(3, np.uint32)
    add = atomic(("red", "relaxed", "gpu", "shared::cta", "add", "u32"))
    old = apply(memory, np.ones(64, np.intp), np.ones(64, np.uint32), None, add)
    assert old.tolist() == list(range(64))
    assert memory.tolist() == [0, 64, 0]
    for unknown in ("atom.global.add.b32", "atom.add.cache.u32", "atom.global.v2.f32.add", "ld.global.u32"):
        assert atomic(tuple(unknown.split("."))) is None


@pytest.mark.parametrize("lanes", [2, 64])
def test_global_sums_flush_subnormal_numbers_and_shared_ones_do_not(lanes):
    tiny = np.full(lanes, 2.0**-149, np.float32)
    for space, total in (("global", 0.0), ("shared", lanes * 2.0**-149)):
        for cells in (1, 70):
            memory = np.zeros(cells, np.float32)
            apply(memory, np.zeros(lanes, np.intp), tiny, None, atomic(("atom", space, "add", "f32")))
            assert memory[0] == total
