"""The emulator knows every instruction that NVVM emits for Numba's language, and runs it on any shapes."""

import cmath
import itertools
import math
import os
import re
import warnings

import numpy as np
import pytest

from minidist.kernels.cuda.runtime.compiler import compile_ptx
from minidist.kernels.emulator.arithmetic.operations import operation
from minidist.kernels.emulator.instructions.atomics import atomic
from minidist.kernels.emulator.instructions.warps import warp_operation
from minidist.kernels.emulator.ptx.dtypes import DTYPES

pytest.importorskip("numba_cuda", reason="needs numba-cuda, which compiles without a GPU too")
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("Numba's simulator compiles nothing", allow_module_level=True)

# What touches memory, steers the program, or is about addresses and lanes: the core's own.
CORE = {"ld", "st", "bra", "ret", "exit", "call", "cvta", "bar", "activemask"}

# Expressions of x, y and z, elements of arrays of one dtype; each is stored in an array of that dtype.
# fmt: off
WHOLE = """x + y; x - y; x * y; x // y; x % y; x & y; x | y; x ^ y; x << y; x >> y; x >> 3; x << 2; x // 7
x % 8; -x; ~x; abs(x); not x; min(x, y); max(x, y); x if x < y else y + 1; x <= y and x != 3; x * y + z; x**2
x / y; cuda.popc(x); cuda.clz(x); cuda.brev(x); math.sqrt(x); x == y; x >= y or y > z; x if x > y else z"""
REAL = """x + y; x - y; x * y; x / y; x // y; x % y; x**y; x**2; x**0.5; x * y + z; cuda.fma(x, y, z); -x
abs(x); min(x, y); max(x, y); x if x < y else z; x if x <= y else z; x if x == y else z; x if x != y else z
not (x < y); int(x); round(x); x > y or x != z; math.floor(x); math.ceil(x); math.trunc(x); math.isnan(x)
math.exp(x); math.exp2(x); math.expm1(x); math.log(x); math.log2(x); math.log10(x); math.log1p(x)
math.sqrt(x); math.sin(x); math.cos(x); math.tan(x); math.sinh(x); math.cosh(x); math.tanh(x)
math.asin(x); math.acos(x)
math.atan(x); math.asinh(x); math.acosh(x); math.atanh(x); math.atan2(x, y); math.hypot(x, y); math.isinf(x)
math.erf(x); math.erfc(x); math.gamma(x); math.lgamma(x); math.fmod(x, y); math.remainder(x, y)
cuda.cbrt(x); math.isfinite(x); math.copysign(x, y)
math.modf(x)[0]; math.frexp(x)[1]; math.ldexp(x, 3); math.degrees(x)
math.nextafter(x, y)"""
HALF = "x; x if x < y else z; x**2; x**0.5; x // y; int(x); cuda.fma(x, y, z); -x; x > 1"
COMPLEX = "x + y; x - y; x * y; x / y; abs(x); x.conjugate(); x == y; cmath.exp(x); cmath.sqrt(x)"
LOGICAL = "x & y; x | y; x ^ y; x and y; not x; x == y"
SHUFFLES = """cuda.shfl_sync(-1, x, 3); cuda.shfl_up_sync(-1, x, 1); cuda.shfl_down_sync(-1, x, 1)
cuda.shfl_xor_sync(-1, x, 1); cuda.match_any_sync(-1, x); cuda.match_all_sync(-1, x)[0]"""
VOTES = """cuda.all_sync(-1, x); cuda.any_sync(-1, x); cuda.eq_sync(-1, x); cuda.ballot_sync(-1, x)
cuda.ffs(x); cuda.syncthreads_count(x); cuda.atomic.compare_and_swap(a, x, y); cuda.atomic.cas(a, 0, x, y)"""
SUMS = """cuda.atomic.add(a, 0, x); cuda.atomic.sub(a, 0, x); cuda.atomic.max(a, 0, x)
cuda.atomic.nanmin(a, 0, x)"""
BITS = """cuda.atomic.and_(a, 0, x); cuda.atomic.or_(a, 0, x); cuda.atomic.xor(a, 0, x)
cuda.atomic.exch(a, 0, x)"""
COUNTERS = "cuda.atomic.inc(a, 0, x); cuda.atomic.dec(a, 0, x)"
# fmt: on
EXPRESSIONS = [
    (WHOLE, "int8 int16 int32 int64 uint8 uint16 uint32 uint64"),
    (REAL, "float32 float64"),
    (HALF, "float16"),
    (COMPLEX, "complex64"),
    (LOGICAL, "boolean"),
    (SHUFFLES, "int32 int64"),
    (VOTES, "int32"),
    (SUMS, "int32 uint32 int64 uint64 float32 float64"),
    (BITS, "int32 uint32 int64 uint64"),
    (COUNTERS, "uint32"),
]
NUMBERS = " ".join(dtypes for _, dtypes in EXPRESSIONS[:3]).split()  # whole, real and half


def compiled(source, signature, fastmath):
    """The opcodes of the kernel `k` in this source, each with an instruction that has it."""
    from numba import cuda
    from numba.cuda import libdevice, random

    namespace = {"cuda": cuda, "math": math, "cmath": cmath, "libdevice": libdevice, "random": random}
    exec(source, namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ptx = compile_ptx(namespace["k"], signature, "sm_90a", 32, fastmath=fastmath)
    found = re.finditer(r"(?:^|[;{])\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)[ \t]+[^\n;]+;", ptx, re.M)
    return {tuple(line[1].split(".")): " ".join(line[0].split()) for line in found}


def sources():
    """Kernels with all of the language: (source, signature, fastmath)."""
    from numba import types
    from numba.cuda.libdevicefuncs import functions
    from numba.cuda.np.numpy_support import from_dtype
    from numba.cuda.random import xoroshiro128p_dtype

    def array(dtype):
        return types.Array(dtype if isinstance(dtype, types.Type) else getattr(types, dtype), 1, "C")

    for lines, dtypes in EXPRESSIONS:
        stored = [f"    o[{n}] = {one}" for n, one in enumerate(re.split("; |\n", lines))]
        source = "\n".join(["def k(a, o):", "    x, y, z = a[cuda.grid(1)], a[1], a[2]", *stored])
        for dtype in dtypes.split():
            for fastmath in (False, True) if dtype == "float32" else (False,):
                yield source, (array(dtype), array(dtype)), fastmath
    for dtype in NUMBERS:
        names = [f"o{n}" for n in range(len(NUMBERS))]
        body = [f"    {name}[i] = a[i]" for name in names]
        source = "\n".join([f"def k(a, {', '.join(names)}):", "    i = cuda.grid(1)", *body])
        yield source, (array(dtype), *map(array, NUMBERS)), False
    # The intrinsics that name a rounding mode are short: all those of a signature in one kernel.
    short = {name[5:]: each for name, each in functions.items() if re.search(r"_r[nzdu]$", name)}
    for (result, arguments), named in itertools.groupby(
        sorted(short, key=lambda name: str(short[name])), key=lambda name: short[name]
    ):
        operands = ", ".join(f"a{n}[{n}]" for n in range(len(arguments)))
        body = [f"    o[{n}] = libdevice.{name}({operands})" for n, name in enumerate(named)]
        parameters = ", ".join(f"a{n}" for n in range(len(arguments)))
        source = "\n".join([f"def k(o, {parameters}):", *body])
        signature = (array(result), *(array(one.ty) for one in arguments))
        for fastmath in (False, True) if "float32" in str(signature) else (False,):
            yield source, signature, fastmath
    draw = "random.xoroshiro128p_uniform_float32(s, i) + random.xoroshiro128p_normal_float64(s, i)"
    source = f"def k(s, o):\n    i = cuda.grid(1)\n    o[i] = {draw}"
    yield source, (array(from_dtype(xoroshiro128p_dtype)), array("float64")), False


@pytest.mark.deep
def test_every_instruction_that_nvvm_emits_is_known_and_runs():
    emitted = {}
    for source, signature, fastmath in sources():
        emitted |= compiled(source, signature, fastmath)
    asked = {opcode: line for opcode, line in emitted.items() if opcode[0] not in CORE}
    # A mov computes nothing: a unit of its own copies the registers (instructions/arithmetic.py).
    known = (operation, warp_operation, atomic, lambda opcode: opcode[0] == "mov")
    unknown = [line for opcode, line in asked.items() if not any(find(opcode) for find in known)]
    assert not unknown, "\n".join(unknown)
    assert len(asked) > 400, "the kernels have become too simple"
    rng = np.random.default_rng(0)
    for opcode in asked:
        if found := operation(opcode):
            check_shapes(opcode, found, rng)


def check_shapes(opcode, found, rng):
    """An operation takes instructions by lanes, and constants, and gives the promised dtype."""
    shapes = [(3, 32), (1, 1), (3, 1)]
    operands = []
    for kind, shape in zip(found.operands, itertools.cycle(shapes), strict=False):
        operands.append(rng.integers(0, 9, shape).astype(DTYPES[kind]))
    before = [x.copy() for x in operands]
    with np.errstate(all="ignore"):
        results = found.function(*operands)
    for result, kind in zip(
        results if found.writes_carry else [results], [found.result, "pred"], strict=False
    ):
        assert result.dtype == DTYPES[kind], opcode
        assert result.shape == (3, 32), opcode
    for x, y in zip(operands, before, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=f"{opcode} changes an operand")
