"""A tensor core: D = A x B + C on a small tile, with half-precision inputs and float32 sums.

The product of two float16 numbers is exact: 11 bits times 11 bits make 22, and float32 has 24; the smallest,
2**-48, and the largest, 65504**2, are well inside its range. So all rounding is in the sums, and the result
depends on how a unit sums.

NVIDIA documents neither the order of the sums nor their rounding. Experiments found that both differ from
IEEE 754's float32 (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ
Computer Science 7:e330, 2021, on V100, T4 and A100; Khattak and Mikaitis, Accurate Models of NVIDIA Tensor
Cores, arXiv:2512.07004, 2025, up to B200). The unit adds a block of products and the accumulator all at once:
it shifts all of them to the largest exponent among them, cuts off the bits below the last one that it keeps
(towards zero), adds exactly, and cuts the sum to float32. The next block takes that as its accumulator.

So `tensor_core_mma` has two kinds of unit: "float32", which sums as IEEE 754 says, and models of real ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..rung import Array, check_matrix


@dataclass(frozen=True)
class SummingUnit:
    """How the tensor core of a GPU sums."""

    blocks: Mapping[str, int]  # the products that it adds at once, for each dtype that it takes
    extra_bits: int  # those that it keeps below the 23 of float32's fraction, while it adds


# Each gives, to the last bit, the results recorded on that GPU: 5000 dot products of random numbers for each
# dtype, published with Khattak and Mikaitis's paper (north-numerical-computing/MATLAB-tensor-core on GitHub).
# The records of TF32 on the H100 have 4 products each; that it adds 8 at once is the authors' finding.
UNITS = {
    "V100": SummingUnit({"float16": 4}, extra_bits=0),
    "A100": SummingUnit({"float16": 8, "bfloat16": 8, "tf32": 4}, extra_bits=1),
    "H100": SummingUnit({"float16": 16, "bfloat16": 16, "tf32": 8}, extra_bits=2),  # the H200 too
}


def tensor_core_mma(a: Array, b: Array, c: Array, unit: str = "float32", tf32: bool = False) -> Array:
    """Return d = a x b + c, (m, n) in float32; a is (m, k), b is (k, n), c is (m, n) in float32.

    a and b are both float16, or both bfloat16 (of the package ml_dtypes), or both float32 with `tf32=True`,
    which rounds them to TF32 first (`round_to_tf32`). Any sizes, also 0 and 1. Products are exact. Those of
    bfloat16 and TF32 may leave float32's range of exponents, unlike float16's: with "float32" sums they then
    overflow to infinity or lose bits below its smallest number.

    `unit` says how they are summed:
    - "float32": d = c, then d = d + a[:, p] b[p, :] for p = 0, 1, ..., k - 1, each sum rounded to the nearest
      float32. The error is at most gamma_k (|a||b| + |c|), with gamma_k as in `product_checks`.
    - "V100", "A100", "H100": as that GPU does, 4, 8 or 16 products of float16 at once. Each term is cut
      towards zero, by less than a unit in the last place of the largest: the error bound is about twice as
      large, and errors of terms of one sign add up instead of averaging out.

    NaN and infinity follow IEEE 754; a sum of 2**128 or more is infinite. Raises TypeError for an argument
    that is not a NumPy array and for other dtypes; ValueError for shapes that do not fit, and for a unit that
    is unknown or does not take the dtype.
    """
    for name, x in (("a", a), ("b", b), ("c", c)):
        check_matrix(name, x)
    kind = _kind(a, b, c, tf32)
    if a.shape[1] != b.shape[0] or c.shape != (a.shape[0], b.shape[1]):
        raise ValueError(
            f"a {a.shape}, b {b.shape} and c {c.shape} do not fit: pass (m, k), (k, n) and (m, n)"
        )
    if unit != "float32" and unit not in UNITS:
        raise ValueError(f"unit is {unit!r}: pass 'float32', {', '.join(map(repr, UNITS))}")
    if unit != "float32" and kind not in UNITS[unit].blocks:
        raise ValueError(f"unit is {unit!r}, which takes no {kind}: pass float16, or a newer unit")
    if tf32:
        a, b = round_to_tf32(a), round_to_tf32(b)
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    d: Array = np.array(c, np.float32)
    # inf - inf and overflow are results, as in the hardware: no warning.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if unit == "float32":
            for p in range(a.shape[1]):
                d += a[:, p, None] * b[p]  # the product is exact, so this rounds once
            return d
        block = UNITS[unit].blocks[kind]
        for p in range(0, a.shape[1], block):
            d = _add_block(a[:, p : p + block], b[p : p + block], d, UNITS[unit].extra_bits)
        return d


def round_to_tf32(x: Array) -> Array:
    """Return float32 x rounded to TF32: the 8 bits of exponent of float32, the 10 of fraction of float16.

    It rounds to the nearest, ties away from zero, as the instruction cvt.rna.tf32.f32 does (NVIDIA, PTX ISA,
    cvt). The result is float32, of the same shape. Raises TypeError if x is not a NumPy array of float32.
    """
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"x is {kind}, not a NumPy array of float32: convert it with .astype('float32')")
    # Half of the last bit that stays is added to the magnitude; then the 13 bits below it are cleared.
    bits = x.astype(np.float32).view(np.uint32) + np.uint32(1 << 12)
    rounded: Array = np.where(np.isfinite(x), (bits & np.uint32(0xFFFFE000)).view(np.float32), x)
    return rounded


def _kind(a: Array, b: Array, c: Array, tf32: bool) -> str:
    """Return what a and b hold, "tf32" or the name of their dtype, or raise what is wrong with them."""
    inputs = ("float32",) if tf32 else ("float16", "bfloat16")
    for name, x in (("a", a), ("b", b)):
        if x.dtype.name not in inputs:
            remedy = f"convert it with .astype({inputs[0]!r})"
            if x.dtype.name == "float32":
                remedy += ", or pass tf32=True"
            raise TypeError(f"{name} has dtype {x.dtype}, and the unit takes {' or '.join(inputs)}: {remedy}")
    if a.dtype != b.dtype:
        raise TypeError(
            f"a is {a.dtype} and b is {b.dtype}: convert one with .astype(), so that both are the same"
        )
    if c.dtype.name != "float32":
        raise TypeError(f"c has dtype {c.dtype}, and sums are float32: convert it with .astype('float32')")
    return "tf32" if tf32 else str(a.dtype.name)


def _add_block(a: Array, b: Array, c: Array, extra_bits: int) -> Array:
    """Return c (m, n) plus a block of products, in float32; all but the two cuts is exact in float64."""
    a, b, c = a[:, None, :].astype(np.float64), b.T[None, :, :].astype(np.float64), c[:, :, None]
    terms = np.concatenate([a * b, c.astype(np.float64)], axis=2)  # (m, n, products and c)
    # The hardware adds the exponents of the factors and ignores whether the product of their significands, in
    # [1, 4), has carried: with the exponent of the product itself, 2 to 16 % of the recorded results differ.
    exponents = np.concatenate([np.frexp(a)[1] + np.frexp(b)[1] - 1, np.frexp(c)[1]], axis=2)
    counting = np.where(terms == 0, np.iinfo(exponents.dtype).min, exponents)
    largest = np.where((terms == 0).all(axis=2), 0, counting.max(axis=2))
    shift = 24 + extra_bits - largest  # 24, since frexp's significands are in [0.5, 1)
    kept = np.trunc(np.ldexp(terms, shift[:, :, None]))
    return _truncate(np.ldexp(kept.sum(axis=2), -shift))  # infinities and NaN pass through all of this


def _truncate(x: Array) -> Array:
    """Return float64 x as float32, rounded towards zero, but infinite from 2**128 on."""
    rounded = x.astype(np.float32)
    magnitude = np.abs(x)
    too_large = (np.abs(rounded.astype(np.float64)) > magnitude) & (magnitude < 2.0**128)
    truncated: Array = np.where(too_large, np.nextafter(rounded, np.float32(0)), rounded)
    return truncated
