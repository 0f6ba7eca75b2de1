"""A TPU's matrix unit: a systolic array, simulated cycle by cycle.

A grid of small processing elements (PEs) multiplies and adds, and each hands its operands to its neighbours.
Only the edges read memory, so a whole row or column of PEs uses an element that was read once (Kung, Why
Systolic Architectures?, IEEE Computer 15(1), 1982). The first TPU has 256 x 256 of them (Jouppi et al.,
In-Datacenter Performance Analysis of a Tensor Processing Unit, ISCA 2017, section 2).

    from minidist.kernels.systolic import SystolicArray, compare

    array = SystolicArray(128, 128, "weight_stationary")
    product = array.matmul(a, b)
    product.c, product.cycles, product.utilisation, product.counts.a_reads
    print(compare(512, 512, 512, array))             # with a scalar processor and a vector unit
    for frame in SystolicArray(3, 3).frames(a, b):   # the registers in each cycle
        print(frame)

Nothing here multiplies matrices: c is what comes out at the bottom edge. `weight_stationary.py` and
`output_stationary.py` say what moves in each dataflow, `cost_formulas.py` derives the formulas. A 512 x 512 x
512 product on 128 x 128 PEs takes 0.7 s in float32 (one core of an AMD EPYC, Zen 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ..rung import Array, check_matrix, check_sizes
from .array import ArrayMachine, Frame
from .cost_formulas import (
    CountedAndPredicted,
    ProductCounts,
    at_least,
    dataflow_name,
    scalar,
    systolic,
    vector,
)
from .output_stationary import OutputStationary
from .weight_stationary import WeightStationary

MACHINES: dict[str, type[ArrayMachine]] = {
    "weight_stationary": WeightStationary,
    "output_stationary": OutputStationary,
}


@dataclass(frozen=True, eq=False)
class Product:
    """The result of an array: the product, and its cost, counted while it ran."""

    c: Array  # (m, n), int64 or a float dtype: see SystolicArray.matmul
    counts: ProductCounts

    @property
    def cycles(self) -> int:
        """The cycles from the first element read until the last command has crossed the array."""
        return self.counts.cycles

    @property
    def utilisation(self) -> float:
        """Useful multiply-adds over rows * cols * cycles, 0 to 1."""
        return self.counts.utilisation


@dataclass(frozen=True)
class SystolicArray:
    """A systolic array of rows x cols PEs.

    A product larger than the array runs as tiles. With `double_buffered`, as in the TPU, each PE has a second
    register, and a tile's load (or drain) overlaps with the work of the tile before (or after) it. Raises
    ValueError for sizes below 1 and unknown dataflows, TypeError for sizes that are not whole numbers.
    """

    rows: int
    cols: int
    dataflow: str = "weight_stationary"  # a tile of b stays in the PEs; or "output_stationary": a tile of c
    double_buffered: bool = True

    def __post_init__(self) -> None:
        for name in ("rows", "cols"):
            object.__setattr__(self, name, at_least(name, getattr(self, name), 1))
        object.__setattr__(self, "dataflow", dataflow_name(self.dataflow))

    def matmul(self, a: ArrayLike, b: ArrayLike) -> Product:
        """Multiply a (m, k) by b (k, n), of any sizes; a size of 0 gives zeros in 0 cycles.

        Integers are summed exactly, in int64, and c is int64. Floats are summed in the dtype that NumPy's
        promotion gives to a and b, but at least in float32, and c has that dtype: float16 and bfloat16 give
        float32, as in a TPU. Weight-stationary, the sum over each `rows` elements of k comes first, in order,
        and then the sum of those; output-stationary, the sum over k is in order. NaN and infinity are
        propagated.

        Raises TypeError for dtypes other than integers and real floats; ValueError for shapes that do not
        multiply, and for integers whose sums might not fit in int64.
        """
        machine = self._machine(a, b)
        while machine.busy:
            machine.step()
        counts = ("cycles", "a_reads", "b_reads", "c_reads", "c_writes")
        seen = {name: getattr(machine, name) for name in counts}
        counted = replace(self.counts(machine.m, machine.n, machine.k), **seen)
        assert machine.multiply_adds == counted.multiply_adds
        return Product(machine.c.values, counted)

    def frames(self, a: ArrayLike, b: ArrayLike) -> Iterator[Frame]:
        """Yield the array's state in each cycle of `matmul(a, b)`, and raise what it raises.

        There is a frame for each cycle; the last one's `c` is the product.
        """
        return self._machine(a, b).frames()

    def counts(self, m: int, n: int, k: int) -> ProductCounts:
        """Return what `matmul` would count for (m, k) times (k, n), by formulas, without running it."""
        return systolic(m, n, k, self.rows, self.cols, self.dataflow, self.double_buffered)

    def _machine(self, a: ArrayLike, b: ArrayLike) -> ArrayMachine:
        a, b = _operands(a, b)
        return MACHINES[self.dataflow](a, b, self.rows, self.cols, self.double_buffered)


def compare(m: int, n: int, k: int, *arrays: SystolicArray, lanes: int = 16) -> CountedAndPredicted:
    """Return the counts of (m, k) times (k, n) on a scalar processor, a vector unit and each of the arrays.

    Printed, they are a table; `.rows` holds the numbers. Nothing is run. 16 lanes are an AVX-512 register of
    float32.
    """
    rows = [scalar(m, n, k), vector(m, n, k, lanes), *(array.counts(m, n, k) for array in arrays)]
    return CountedAndPredicted(tuple(rows))


def _operands(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    """Return a and b as matrices in the dtype of their sums, or raise what is wrong with them."""
    matrices = {"a": np.asarray(a), "b": np.asarray(b)}
    for name, x in matrices.items():
        check_matrix(name, x)
        # bfloat16 is not one of NumPy's own dtypes: its kind is "V", so its name decides.
        if x.dtype.kind not in "iuf" and x.dtype.name != "bfloat16":
            raise TypeError(
                f"{name} has dtype {x.dtype}: convert it to integers or real floats with .astype()"
            )
    left, right = matrices.values()
    check_sizes(left.shape, right.shape)
    if left.dtype.kind in "iu" and right.dtype.kind in "iu":
        if _sums(left, right) >= 2**63 or max(_largest(left), _largest(right)) >= 2**63:
            raise ValueError(
                f"sums of {left.shape[1]} products of a (up to {_largest(left)} in magnitude) and b (up to "
                f"{_largest(right)}) may not fit in int64: scale them down, or use .astype(float)"
            )
        return left.astype(np.int64), right.astype(np.int64)
    floats = [x.astype(np.float32) if x.dtype.name == "bfloat16" else x for x in (left, right)]
    dtype = np.result_type(*floats, np.float32)
    return floats[0].astype(dtype), floats[1].astype(dtype)


def _largest(x: Array) -> int:
    """Return the largest magnitude of an integer in x, as a Python int: int64 has no abs(minimum)."""
    return max(-int(x.min()), int(x.max())) if x.size else 0


def _sums(a: Array, b: Array) -> float:
    """Return a bound on the magnitude of sums of products of integers, whatever their signs."""
    bound: int = a.shape[1] * _largest(a) * _largest(b)
    if bound < 2**63:
        return bound
    # The largest elements may never meet: compute the sums in float64, and add what that may round off.
    sums = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
    largest: float = sums.max(initial=0) * (1 + (a.shape[1] + 2) * 2.0**-52)
    return largest
