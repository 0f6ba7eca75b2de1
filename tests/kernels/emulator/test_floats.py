"""The emulator's floats: every result is the exact one, a fraction, rounded once, in each mode and format."""

import itertools
import math
import operator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minidist.kernels.emulator.arithmetic import rounding
from minidist.kernels.emulator.arithmetic.operations import operation
from minidist.kernels.emulator.ptx.dtypes import DTYPES
from tests.helpers.emulated import FORMATS, MODES, floats, integers, rounded, run, same, wrap

NAN, INF = math.nan, math.inf
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
    "rcp": lambda a: 1 / a,
}
# What is added to what, but for its size: of a sum that is 0, the terms' signs decide.
TERMS = {
    "add": lambda a, b: (a, b),
    "sub": lambda a, b: (a, -b),
    "fma": lambda a, b, c: (math.copysign(1, a) * math.copysign(1, b), c),
}


def ieee(name, kind, mode, row):
    """What IEEE 754 says of these floats."""
    if all(map(math.isfinite, row)) and not (name in ("div", "rcp") and row[-1] == 0):
        value = EXACT[name](*map(Fraction, row))
        if value:
            return rounded(value, kind, mode)
        if name in TERMS:
            signs = {math.copysign(1, term) for term in TERMS[name](*row)}
            return math.copysign(0.0, signs.pop() if len(signs) == 1 else 1 if mode != "rm" else -1)
    # A zero, an infinity or NaN: nothing to round. Beside an infinite c, a finite product does not matter.
    if name == "fma" and math.isfinite(row[0]) and math.isfinite(row[1]):
        row = (0.0, 0.0, row[2])
    with np.errstate(all="ignore"):
        return float(EXACT[name](*map(np.float64, row)))


def operands_of(name, kind):
    """Columns of operands: all pairs of edges, and random numbers."""
    if name == "rcp":
        return [floats(kind, 150)]
    edges = np.append(floats(kind, 2), [np.inf, -np.inf, np.nan]).astype(floats(kind, 0).dtype)
    a, b = (x.ravel() for x in np.meshgrid(edges, edges))
    first, second = floats(kind, 60, 1), floats(kind, 60, 2)
    with np.errstate(all="ignore"):
        nearby = (-first * (1 + 2.0**-9)).astype(a.dtype)  # for sums that cancel
        a, b = np.concatenate((a, first, first)), np.concatenate((b, second, nearby))
        return [a, b, np.where(np.arange(a.size) % 3, -(a * b), np.roll(b, 7))] if name == "fma" else [a, b]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", list(EXACT))
def test_results_are_rounded_once(name, kind, mode):
    operands = operands_of(name, kind)
    got = run(f"{name}.{mode}.{kind}", *operands)
    rows = zip(*(x.tolist() for x in operands), strict=True)
    same(got, [ieee(name, kind, mode, row) for row in rows], f"{name}.{mode}.{kind}")
    if mode == "rn" and name in ("add", "sub", "mul"):
        same(run(f"{name}.{kind}", *operands), got)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_roots_are_rounded_once(kind, mode):
    x = np.absolute(floats(kind, 100))
    root = run(f"sqrt.{mode}.{kind}", x)
    beside = [np.nextafter(root, root.dtype.type(end)) for end in (0, np.inf)]
    for one, r, below, above in zip(*(map(Fraction, y.tolist()) for y in (x, root, *beside)), strict=True):
        if mode == "rn":
            assert ((below + r) / 2) ** 2 <= one <= ((r + above) / 2) ** 2
        elif mode == "rp":
            assert one <= r**2
            assert r == 0 or below**2 < one
        else:
            assert r**2 <= one < above**2
    same(run(f"sqrt.{mode}.{kind}", [-1.0, -0.0, INF, NAN]), [NAN, -0.0, INF, NAN])


any_float = st.floats(width=32, allow_nan=False)


# a * b + c = 1 + 2**-24 + 2**-60 is just above the middle of two float32 numbers; in float64, it is there.
@example((2**12 + 1) * 2.0**-30, (2**24 - 2**12 + 1) * 2.0**-30, 1.0, "rn")
@settings(max_examples=200, deadline=None)
@given(any_float, any_float, any_float, st.sampled_from(MODES))
def test_fma_of_any_numbers_is_rounded_once(a, b, c, mode):
    same(run(f"fma.{mode}.f32", [a], [b], [c]), [ieee("fma", "f32", mode, (a, b, c))], mode)


def test_subnormal_numbers_are_flushed_and_results_saturated():
    tiny, normal = 2.0**-127, 2.0**-126
    same(
        run("add.ftz.f32", [tiny, -tiny, normal, INF, NAN], [0.0, -0.0, -1.5 * normal, 1, 1]),
        [0, -0.0, -0.0, INF, NAN],
    )
    same(run("mul.ftz.f32", [normal, -tiny], [0.5, 2.0**100]), [0.0, -0.0])
    same(run("fma.rn.ftz.f32", [tiny], [2.0**100], [1.0]), [1.0])
    same(run("cvt.ftz.f64.f32", [tiny, -tiny, 1.0]), [0.0, -0.0, 1.0])
    same(run("cvt.rn.ftz.f32.f64", [tiny, -tiny, 1.0]), [0.0, -0.0, 1.0])
    same(run("cvt.sat.f32.f32", [2.0, -INF, 0.5, NAN]), [1, 0, 0.5, 0])
    assert run("setp.gt.ftz.f32", [tiny], [0.0]).tolist() == [False]


@pytest.mark.parametrize("kind", ["f32", "f64", "f16"])
def test_lesser_and_greater(kind):
    a, b = zip(*itertools.product([1.0, -1.0, 0.0, -0.0, INF, -INF, NAN], repeat=2), strict=True)
    for name, best in (("min", min), ("max", max)):

        def choose(x, y, best=best):
            # The sign of a zero counts.
            return best((x, y), key=lambda z: (z, math.copysign(1, z)))

        numbers = [
            NAN if x != x and y != y else x if y != y else y if x != x else choose(x, y)
            for x, y in zip(a, b, strict=True)
        ]
        same(run(f"{name}.{kind}", a, b), numbers, name)
        if kind != "f64":
            nans = [NAN if x != x or y != y else choose(x, y) for x, y in zip(a, b, strict=True)]
            same(run(f"{name}.NaN.{kind}", a, b), nans, name)


def test_signs_and_tests_of_floats():
    x = [0.0, -0.0, 1.5, -INF, NAN, 2.0**-127]
    for kind in ("f32", "f64"):
        same(run(f"neg.{kind}", x), [-one for one in x])
        same(run(f"abs.{kind}", x), [abs(one) for one in x])
        same(run(f"copysign.{kind}", [-0.0, 2.0], [3.0, -INF]), [-3.0, INF])
    for name, expected in {
        "finite": [1, 1, 1, 0, 0, 1],
        "infinite": [0, 0, 0, 1, 0, 0],
        "number": [1, 1, 1, 1, 0, 1],
        "notanumber": [0, 0, 0, 0, 1, 0],
    }.items():
        assert run(f"testp.{name}.f32", x).tolist() == expected


@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_approximations_are_good(ftz):
    x = np.random.default_rng(0).uniform(0.01, 8, 1000).astype(np.float32)
    wide = x.astype(np.float64)
    functions = {
        "sin": np.sin,
        "cos": np.cos,
        "ex2": np.exp2,
        "lg2": np.log2,
        "sqrt": np.sqrt,
        "tanh": np.tanh,
    }
    functions |= {"rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x)}
    for name, function in functions.items():
        # PTX promises as much for the least exact of them but tanh: sin and cos.
        error = np.absolute(run(f"{name}.approx{ftz}.f32", x) - function(wide))
        np.testing.assert_array_less(error, 2**-20.9 * np.maximum(1, np.absolute(function(wide))))
    for name in ("approx", "full"):
        np.testing.assert_allclose(run(f"div.{name}{ftz}.f32", x, x[::-1]), wide / wide[::-1], rtol=2**-22)
    np.testing.assert_allclose(run("rsqrt.approx.f64", wide), 1 / np.sqrt(wide), rtol=2**-51)


def test_coarse_approximations_use_the_upper_words():
    x = np.random.default_rng(0).uniform(0.5, 8, 100)
    for name, exact in (("rcp", 1 / x), ("rsqrt", 1 / np.sqrt(x))):
        got = run(f"{name}.approx.ftz.f64", x)
        np.testing.assert_allclose(got, exact, rtol=2**-18)
        assert not (got.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()
    same(run("rcp.approx.ftz.f64", [0.0, -0.0, INF, 2.0**-1030, 2.0**1023]), [INF, -INF, 0.0, INF, 0.0])


# Half precision. bfloat16 travels as bits.


def as_float(x, kind):
    """Python floats as a kind's array, with what is too large as infinity: bfloat16 as its bits."""
    with np.errstate(over="ignore"):
        if kind == "bf16":
            return np.array(x, np.float64).astype(ml_dtypes.bfloat16).view(np.uint16)
        return np.array(x, np.float64).astype(DTYPES[kind])


def value(x, kind):
    """The same back."""
    return x.view(ml_dtypes.bfloat16).astype(np.float64) if kind == "bf16" else x


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_halves_are_rounded_once(name, kind):
    columns = operands_of(name, kind)
    if name == "fma":
        a, b = columns[:2]
        columns = [
            x.astype(np.float64)
            for x in (*(np.tile(x, 2) for x in (a, b)), np.append(columns[2], np.roll(a, 5)))
        ]
    columns = [as_float(x, kind) for x in columns]
    rows = list(zip(*(value(x, kind).tolist() for x in columns), strict=True))
    expected = [ieee(name, kind, "rn", row) for row in rows]
    opcode = f"{name}{'.rn' if name == 'fma' else ''}"
    same(value(run(f"{opcode}.{kind}", *columns), kind), expected, f"{opcode}.{kind}")


def test_fma_of_bfloat16_sees_what_float64_does_not():
    # 1.0625 * 1.0625 = 1.12890625 is the middle of two; 2**-100 beyond it decides, either way.
    a, c = as_float([1.0625] * 3, "bf16"), as_float([2.0**-100, -(2.0**-100), 255 * 2.0**-60], "bf16")
    assert value(run("fma.rn.bf16", a, a, c), "bf16").tolist() == [1.1328125, 1.125, 1.1328125]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_signs_of_halves(kind):
    x = [0.0, -0.0, 1.5, -2.0, INF, NAN]
    same(value(run(f"neg.{kind}", as_float(x, kind)), kind), [-one for one in x])
    same(value(run(f"abs.{kind}", as_float(x, kind)), kind), [abs(one) for one in x])


# Conversions.

LIMITS = {
    f"{letter}{n}": ((1 << n - 1) - 1 if letter == "s" else (1 << n) - 1)
    for letter in "us"
    for n in (8, 16, 32, 64)
}
INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("mode", list(INTEGRAL))
@pytest.mark.parametrize("source", list(FORMATS))
def test_floats_to_integers(source, mode):
    x = [
        s * (n + f)
        for n in (0, 1, 2, 7, 127, 255, 2**15, 2**31 - 1, 2**31, 2**63, 2**64)
        for f in (0, 0.25, 0.5, 0.75)
        for s in (1, -1)
    ]
    x = as_float([*x, INF, -INF, 1e300, -1e300], source)
    numbers = value(x, source).tolist()
    for kind, most in LIMITS.items():
        least = -most - 1 if kind[0] == "s" else 0
        whole = [most if one == INF else least if one == -INF else INTEGRAL[mode](one) for one in numbers]
        got = run(f"cvt.{mode}.{kind}.{source}", x)
        assert got.tolist() == [max(least, min(most, one)) for one in whole], kind
        nan = as_float([NAN], source)
        highest = wrap(1 << int(kind[1:]) - 1, kind) if source == "f64" or kind[1:] == "64" else 0
        assert run(f"cvt.{mode}.{kind}.{source}", nan).tolist() == [highest], kind
    if source == "bf16":
        return
    kept = np.array([1.5, -0.5, 2.5, -2.5, INF, 0.25])
    got = run(f"cvt.{mode}.{source}.{source}", as_float(kept, source))
    np.testing.assert_array_equal(
        value(got, source), [INTEGRAL[mode](one) if one != INF else INF for one in kept]
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", list(FORMATS))
def test_everything_to_floats(kind, mode):
    if kind.endswith("16") and mode != "rn":
        assert operation(("cvt", mode, kind, "f32")) is None
        return
    for source in ("f32",) if kind == "bf16" else (*LIMITS, *FORMATS):
        if source == kind:
            continue
        if source in FORMATS:
            x = as_float([*floats(source, 100), INF, -INF], source)
            numbers = value(x, source).tolist()
        else:
            x = numbers = integers(source, 100)
        got = value(run(f"cvt.{mode}.{kind}.{source}", x), kind)
        exact = [one if one in (0, INF, -INF) else rounded(Fraction(one), kind, mode) for one in numbers]
        same(got, exact, f"cvt.{mode}.{kind}.{source}")


def test_integers_to_integers():
    for source, kind in itertools.product(LIMITS, repeat=2):
        x = integers(source)
        assert run(f"cvt.{kind}.{source}", x).tolist() == [wrap(one, kind) for one in x]


def test_packing_two_halves():
    a, b = floats("f32", 50, 1), floats("f32", 50, 2)
    for kind in ("f16", "bf16"):
        low, high = run(f"cvt.rn.{kind}x2.f32", a, b).view(np.uint16).reshape(-1, 2).T
        for got, x in ((low, b), (high, a)):
            np.testing.assert_array_equal(got, run(f"cvt.rn.{kind}.f32", x).view(np.uint16))


def test_tf32_has_ten_bits_less_than_13():
    x = np.concatenate((floats("f32", 100), 1 + np.arange(8, dtype=np.float32) * np.float32(2.0**-12)))
    got = run("cvt.rna.tf32.f32", x).view(np.float32).tolist()
    for one, short in zip(map(Fraction, x.tolist()), got, strict=True):
        unit = Fraction(max(2.0**-126, 2.0 ** (math.frexp(one)[1] - 1))) / 1024
        whole = math.floor(abs(one / unit) + Fraction(1, 2)) * (1 if one > 0 else -1)
        assert short == (float(whole * unit) if abs(whole * unit) < 2**128 else math.copysign(INF, one))


# Comparisons.

ORDERED = {"eq": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_comparing_floats(kind):
    a, b = zip(*itertools.product([1.0, 0.0, -0.0, -INF, NAN], repeat=2), strict=True)
    columns = [as_float(x, kind) for x in (a, b)]
    for name, compare in {**ORDERED, "ne": lambda x, y: x < y or x > y}.items():
        expected = [bool(compare(x, y)) for x, y in zip(a, b, strict=True)]
        assert run(f"setp.{name}.{kind}", *columns).tolist() == expected, name
        unordered = [holds or x != x or y != y for holds, x, y in zip(expected, a, b, strict=True)]
        assert run(f"setp.{name}u.{kind}", *columns).tolist() == unordered, name
    nan = [x != x or y != y for x, y in zip(a, b, strict=True)]
    assert run(f"setp.nan.{kind}", *columns).tolist() == nan
    assert run(f"setp.num.{kind}", *columns).tolist() == [not one for one in nan]


def test_comparing_integers():
    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        a, b = zip(*itertools.product(integers(kind), repeat=2), strict=True)
        for name, compare in {**ORDERED, "ne": operator.ne}.items():
            expected = list(map(compare, a, b))
            assert run(f"setp.{name}.{kind}", a, b).tolist() == expected


def test_selecting():
    assert run("selp.b32", [1, 2], [3, 4], [True, False]).tolist() == [1, 4]
    assert operation(("setp", "lo", "s32")) is None


def test_an_interruption_leaves_the_rounding_mode_as_it_was(monkeypatch):
    modes = []

    def interrupted(mode):
        modes.append(mode)
        if mode != rounding.MODES["rn"]:
            raise KeyboardInterrupt  # as Ctrl-C does once the mode is set

    monkeypatch.setattr(rounding, "_set_mode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rounding.rounding("rz", np.add)(1.0, 1.0)
    assert modes == [rounding.MODES["rz"], rounding.MODES["rn"]]
