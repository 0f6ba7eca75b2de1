"""Run single instructions of the emulator, and compute references with Python's integers and fractions."""

import math
import random
from fractions import Fraction

import numpy as np

from minidist.kernels.emulator.arithmetic.operations import operation
from minidist.kernels.emulator.ptx.dtypes import DTYPES

# A float's format: bits of the significand, exponents of the smallest and the largest normal number.
FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
MODES = ("rn", "rz", "rm", "rp")


def run(opcode, *operands):
    """Run an instruction on arrays or lists; lists become arrays of the operands' kinds."""
    found = operation(tuple(opcode.split(".")))
    assert found is not None, f"unknown: {opcode}"
    assert len(operands) == len(found.operands), f"{opcode} takes {found.operands}"
    arrays = [as_kind(x, kind) for x, kind in zip(operands, found.operands, strict=True)]
    with np.errstate(all="ignore"):
        got = found.function(*arrays)
    first = got[0] if found.writes_carry else got
    assert first.dtype == DTYPES[found.result], f"{opcode} gives {first.dtype} for {found.result}"
    if found.writes_carry:
        assert got[1].dtype == np.bool_
    return got


def as_kind(x, kind):
    """Return x as an array of this kind; integers wrap."""
    dtype = DTYPES[kind]
    if isinstance(x, np.ndarray) and x.dtype == dtype:
        return x
    if dtype.kind in "fb":
        return np.array(x, dtype)
    return np.array([int(one) % (1 << 8 * dtype.itemsize) for one in x], f"u{dtype.itemsize}").view(dtype)


def size(kind):
    return int(kind.lstrip("busf"))


def wrap(x, kind):
    """Return the integer that the low bits of x encode."""
    x %= 1 << size(kind)
    return x - (1 << size(kind)) if kind[0] == "s" and x >> size(kind) - 1 else x


def integers(kind, count=20):
    """Return edge cases of a kind, and random numbers of all lengths."""
    n, rng = size(kind), random.Random(kind)
    half = 1 << n - 1
    edges = [0, 1, 2, 3, 5, 7, half - 1, half, half + 1, 2 * half - 2, 2 * half - 1, 1 << n // 2]
    return [wrap(x, kind) for x in edges + [rng.getrandbits(rng.randint(1, n)) for _ in range(count)]]


def check(opcode, reference, *columns):
    """Compare an instruction with `reference`, a function of integers, for each row of these columns."""
    got = run(opcode, *columns)
    kind = operation(tuple(opcode.split("."))).result
    for row, one in zip(zip(*columns, strict=True), got.tolist(), strict=True):
        assert one == wrap(int(reference(*row)), kind), (opcode, row)


def rounded(x, kind, mode):
    """Return the float to which a format rounds the fraction x, which is not 0."""
    precision, least, most = FORMATS[kind]
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    below = x // unit
    rest = x / unit - below
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1),
        "rz": x < 0 and rest > 0,
        "rm": False,
        "rp": rest > 0,
    }[mode]
    value = (below + up) * unit
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** most
    if abs(value) > largest:
        inward = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
        value = largest if inward else math.inf
    return math.copysign(float(abs(value)), 1 if x > 0 else -1)


def same(got, expected, message=""):
    """Assert that all bits are equal; any NaN equals any other."""
    expected = np.asarray(expected, got.dtype)
    unsigned = f"u{got.dtype.itemsize}"
    wrong = (got.view(unsigned) != expected.view(unsigned)) & ~(np.isnan(got) & np.isnan(expected))
    places = np.flatnonzero(wrong)[:3]
    assert not wrong.any(), (message, places, got[places], expected[places])


def floats(kind, count, seed=0):
    """Return edge cases and random numbers, near 1 and of all exponents; bf16 as float64."""
    precision, least, most = FORMATS[kind]
    rng = random.Random(f"{kind} {seed}")
    tiny, largest = 2.0 ** (least - precision + 1), (2 - 2.0 ** (1 - precision)) * 2.0**most
    edges = [
        0.0,
        tiny,
        2.0**least - tiny,
        2.0**least,
        1.0,
        1 + 2.0 ** (1 - precision),
        3.0,
        largest,
        2.0**most,
    ]
    drawn = [math.ldexp(rng.getrandbits(precision), rng.randint(-precision - 9, 4)) for _ in range(count)]
    exponents = [rng.randint(least - precision + 1, most - precision) for _ in range(count)]
    drawn += [math.ldexp(rng.getrandbits(precision), exponent) for exponent in exponents]
    signed = [*edges, *(-x for x in edges), *(x * rng.choice((-1, 1)) for x in drawn)]
    return np.array(signed, DTYPES[kind] if kind != "bf16" else np.float64)
