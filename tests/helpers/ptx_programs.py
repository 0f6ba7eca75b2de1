"""Small kernels in hand-written PTX for the emulator's tests: any instruction, and no compiler."""

import numpy as np
import pytest

from minidist.kernels.emulator.execution.run_grid import run_kernel
from minidist.kernels.emulator.ptx.fault import Fault

SHARED = 8192  # bytes of the variable `memory`


def program(body, arrays, threads, shared=SHARED, bounds=""):
    """Return the PTX of a kernel on arrays; its body finds their addresses in registers %<name>.

    Other registers: numbered %p, %r, %d (64 bits), %f, %s (16 bits). %tid, %lane, %warp and %rank hold
    the thread's indices, and `memory` is shared memory.
    """
    parameters = ", ".join(f".param .u64 {name}_{i}" for name in arrays for i in range(7))
    addresses = "\n".join(f"ld.param.u64 %{name}, [{name}_4];" for name in arrays)
    named = "".join(f".reg .b64 %{name};\n" for name in arrays)
    return f"""
.version 8.6
.target sm_90a
.address_size 64
.shared .align 1024 .b8 memory[{shared}];
.visible .entry kernel({parameters}) .maxntid {threads}, 1, 1 {bounds}
{{
.reg .pred %p<40>;
.reg .b16 %s<40>;
.reg .b32 %r<80>;
.reg .b32 %tid, %lane, %warp, %rank;
.reg .b64 %d<40>;
.reg .f32 %f<300>;
{named}{addresses}
mov.u32 %tid, %tid.x;
mov.u32 %rank, %cluster_ctarank;
and.b32 %lane, %tid, 31;
shr.u32 %warp, %tid, 5;
{body}
ret;
}}
"""


def execute(body, threads=32, blocks=1, cluster=1, shared=SHARED, bounds="", **arrays):
    """Run such a kernel on arrays or tensor maps."""
    text = program(body, arrays, threads, shared, bounds)
    run_kernel(text, (blocks,), (threads,), list(arrays.values()), cluster=cluster, names=list(arrays))


def fault_of(kind, match, body, **options):
    """Run, and check the Fault that has to come."""
    with pytest.raises(Fault, match=match) as caught:
        execute(body, **options)
    assert caught.value.kind == kind, caught.value
    assert caught.value.instruction  # which names what was run


def here(index, register, bytes_each):
    """Return PTX that sets `register` to the address of element `index` (a 32-bit register) of `memory`."""
    return f"mov.u32 {register}, memory;\nmad.lo.u32 {register}, {index}, {bytes_each}, {register};\n"


def of(array, register, index, bytes_each):
    """Return PTX that sets `register` to the address of element `index` (a 32-bit register) of an array."""
    return f"mul.wide.u32 {register}, {index}, {bytes_each};\nadd.s64 {register}, %{array}, {register};\n"


def make_mbarrier(count):
    """Return PTX by which thread 0 makes an mbarrier for `count` arrivals at byte 0 of `memory`: %r1."""
    start = "mov.u32 %r1, memory;\nsetp.eq.u32 %p1, %tid, 0;\n"
    return f"{start}@%p1 mbarrier.init.shared::cta.b64 [%r1], {count};\n"


def result(n, dtype=np.uint32):
    """Return an output array filled with a pattern that no kernel computes."""
    return np.full(n, 0xEE, np.uint8).repeat(np.dtype(dtype).itemsize).view(dtype)
