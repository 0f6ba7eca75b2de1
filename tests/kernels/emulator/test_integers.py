"""The emulator's integers and bits, against Python's, lane by lane; and that it knows what NVVM emits."""

import itertools
import operator
import random

import numpy as np
import pytest

from minidist.kernels.emulator.arithmetic.operations import operation
from tests.helpers.emulated import check, integers, run, size, wrap

INTEGERS = [f"{letter}{size}" for size in (16, 32, 64) for letter in "us"]
WORDS = [kind for kind in INTEGERS if kind[1:] != "16"]


def pairs(kind):
    """All pairs of edges and random numbers, as two columns."""
    return [list(column) for column in zip(*itertools.product(integers(kind), repeat=2), strict=True)]


# Integers.


def truncated(a, b):
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_arithmetic(kind):
    n = size(kind)
    binary = {
        "add": operator.add,
        "sub": operator.sub,
        "mul.lo": operator.mul,
        "mul.hi": lambda a, b: a * b >> n,
        "div": truncated,
        "rem": lambda a, b: -1 if b == 0 else a - b * truncated(a, b),
        "min": min,
        "max": max,
    }
    if n < 64:
        binary["mul.wide"] = operator.mul
    for name, reference in binary.items():
        check(f"{name}.{kind}", reference, *pairs(kind))
    a, b = pairs(kind)
    c = a[::-1]
    check(f"mad.lo.{kind}", lambda a, b, c: a * b + c, a, b, c)
    check(f"mad.hi.{kind}", lambda a, b, c: (a * b >> n) + c, a, b, c)
    check(f"sad.{kind}", lambda a, b, c: abs(a - b) + c, a, b, c)
    if n < 64:
        check(f"mad.wide.{kind}", lambda a, b, c: a * b + c, a, b, [x << n for x in c])
    if kind[0] == "s":
        check(f"neg.{kind}", operator.neg, integers(kind))
        check(f"abs.{kind}", abs, integers(kind))


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("carry", [False, True])
def test_carries(kind, carry):
    n = size(kind)
    unsigned = f"u{n}"
    a, b = pairs(unsigned)
    c = a[::-1]
    flags = np.full(len(a), carry)
    for name, exact in (("add", lambda a, b: a + b + carry), ("sub", lambda a, b: a - b - carry)):
        result, out = run(f"{name}c.cc.{kind}", a, b, flags)
        totals = [exact(x, y) for x, y in zip(a, b, strict=True)]
        assert result.tolist() == [wrap(total, unsigned) for total in totals]
        assert out.tolist() == [not 0 <= total < 1 << n for total in totals]
        assert run(f"{name}c.{kind}", a, b, flags).tolist() == result.tolist()
        if not carry:
            again, flag = run(f"{name}.cc.{kind}", a, b)
            assert (again.tolist(), flag.tolist()) == (result.tolist(), out.tolist())
    for half, shift in (("lo", 0), ("hi", n)):
        result, out = run(f"madc.{half}.cc.{kind}", a, b, c, flags)
        products = [wrap(wrap(x, kind) * wrap(y, kind) >> shift, unsigned) for x, y in zip(a, b, strict=True)]
        totals = [x + y + carry for x, y in zip(products, c, strict=True)]
        assert result.tolist() == [wrap(total, unsigned) for total in totals]
        assert out.tolist() == [total >> n == 1 for total in totals]
    found = operation(("addc", "cc", kind))
    assert found.reads_carry
    assert found.writes_carry
    assert not operation(("add", kind)).writes_carry


# Bits. The references follow the manual's pseudocode, bit by bit.

COUNTS = [0, 1, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 255, 256, 257, 2**31, 2**32 - 1]


@pytest.mark.parametrize("size_", [16, 32, 64])
def test_shifts_clamp_their_count(size_):
    x, n = zip(*itertools.product(integers(f"u{size_}"), COUNTS), strict=True)
    check(f"shl.b{size_}", lambda x, n: x << min(n, 64), x, n)
    check(f"shr.u{size_}", lambda x, n: x >> n, x, n)
    check(f"shr.b{size_}", lambda x, n: x >> n, x, n)
    signed = [wrap(one, f"s{size_}") for one in x]
    check(f"shr.s{size_}", lambda x, n: x >> n, signed, n)


def test_funnel_shifts():
    a, b, c = zip(*itertools.product(integers("u32", 5), integers("u32", 5), COUNTS), strict=True)
    for mode, count in (("clamp", lambda c: min(c, 32)), ("wrap", lambda c: c % 32)):
        check(f"shf.l.{mode}.b32", lambda a, b, c, count=count: ((b << 32 | a) << count(c)) >> 32, a, b, c)
        check(f"shf.r.{mode}.b32", lambda a, b, c, count=count: (b << 32 | a) >> count(c), a, b, c)


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_counting_bits(kind):
    n = size(kind)
    x = integers(f"u{n}") + [1 << i for i in range(n)] + [(1 << i) - 1 for i in range(n + 1)]
    check(f"popc.{kind}", lambda x: bin(x).count("1"), x)
    check(f"clz.{kind}", lambda x: n - x.bit_length(), x)
    check(f"brev.{kind}", lambda x: int(f"{x:0{n}b}"[::-1], 2), x)
    check(f"not.{kind}", lambda x: ~x, x)
    for letter in "us":
        signed = [wrap(one, f"{letter}{n}") for one in x]

        def highest(x):
            return (~x if x < 0 else x).bit_length() - 1

        check(f"bfind.{letter}{n}", highest, signed)
        check(
            f"bfind.shiftamt.{letter}{n}",
            lambda x: -1 if highest(x) < 0 else n - 1 - highest(x),
            signed,
        )


@pytest.mark.parametrize("kind", WORDS)
def test_bit_fields(kind):
    n = size(kind)
    rng = random.Random(kind)
    rows = [
        (rng.choice(integers(kind)), rng.choice(integers(kind)), rng.choice(COUNTS), rng.choice(COUNTS))
        for _ in range(2000)
    ]
    a, b, position, length = zip(*rows, strict=True)

    def bfe(a, position, length):
        position, length = position & 255, length & 255
        sign = 0 if kind[0] == "u" or not length else a >> min(position + length - 1, n - 1) & 1
        bits = [a >> position + i & 1 if i < length and position + i < n else sign for i in range(n)]
        return sum(bit << i for i, bit in enumerate(bits))

    def bfi(a, b, position, length):
        position, length = position & 255, length & 255
        for i in range(length):
            if position + i < n:
                b = b & ~(1 << position + i) | (a >> i & 1) << position + i
        return b

    check(f"bfe.{kind}", bfe, a, position, length)
    if kind[0] == "u":
        check(f"bfi.b{n}", bfi, a, b, position, length)


def test_logic():
    a, b = pairs("u32")
    for name, reference in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        check(f"{name}.b32", reference, a, b)
        flags = [True, True, False, False], [True, False, True, False]
        assert run(f"{name}.pred", *flags).tolist() == list(map(reference, *flags))
    assert run("not.pred", [True, False]).tolist() == [False, True]


def test_permuting_bytes():
    rng = random.Random(1)
    a, b, c = ([rng.getrandbits(32) for _ in range(300)] for _ in range(3))

    def prmt(a, b, c):
        source = (b << 32 | a).to_bytes(8, "little")
        chosen = []
        for at in range(4):
            code = c >> 4 * at & 15
            byte = source[code & 7]
            chosen.append((0xFF if byte & 0x80 else 0) if code & 8 else byte)
        return int.from_bytes(bytes(chosen), "little")

    check("prmt.b32", prmt, a, b, c)
