"""The register tile keeps its promise: for every vector unit, its inner loop keeps the sums in registers.

LLVM writes the machine code for processors that are not here, too; only the results need the machine itself
(`test_packed_product.py`, and every test of rungs 6 and 7).
"""

import re

import llvmlite.binding as llvm
import pytest
from llvmlite import ir
from numba import types

from minidist.kernels.cpu.support import register_tile, vector_instructions, vector_unit

LINUX = "x86_64-unknown-linux-gnu"
PROCESSORS = [
    (vector_unit.AVX512, LINUX, "skylake-avx512"),
    (vector_unit.AVX512, LINUX, "sapphirerapids"),
    (vector_unit.AVX512, LINUX, "znver4"),
    (vector_unit.AVX2, LINUX, "haswell"),
    (vector_unit.AVX2, LINUX, "znver2"),
    (vector_unit.NEON, "aarch64-unknown-linux-gnu", "neoverse-n1"),
    (vector_unit.SSE, LINUX, "x86-64"),
]
ADDS = {True: r"fmla|vfmadd", False: r"addp"}


@pytest.fixture(scope="module", autouse=True)
def all_targets():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def inner_loop(unit, triple, processor, element, rows, monkeypatch):
    """The instructions of the shortest loop of a tile's machine code that adds products."""
    monkeypatch.setattr(vector_instructions, "vector_unit", lambda: unit)
    module = ir.Module()
    module.triple = triple
    width = register_tile.VECTORS * unit.lanes(element.name)
    register_tile._tile(module, element, rows, width).linkage = "external"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, opt=3)
    compiled = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        compiled, llvm.create_pass_builder(machine, options)
    )
    assembly = machine.emit_assembly(compiled)
    loops = []
    for label in re.finditer(r"^(\.LBB\w+):", assembly, re.MULTILINE):
        back = re.search(rf"\b(b\.\w+|j\w+)\s+{re.escape(label[1])}$", assembly[label.end() :], re.MULTILINE)
        if back:
            body = assembly[label.end() :][: back.end()]
            if re.search(ADDS[unit.fused], body):
                loops.append([line for line in body.splitlines() if re.match(r"\t[a-z]", line)])
    return min(loops, key=len)


@pytest.mark.parametrize(
    ("unit", "triple", "processor"), PROCESSORS, ids=lambda value: getattr(value, "name", value)
)
@pytest.mark.parametrize("element", [types.float32, types.float64], ids=str)
def test_the_inner_loop_leaves_memory_alone(unit, triple, processor, element, monkeypatch):
    loop = inner_loop(unit, triple, processor, element, unit.tile_rows, monkeypatch)
    adds = sum(bool(re.search(ADDS[unit.fused], line)) for line in loop)
    assert adds % (unit.tile_rows * register_tile.VECTORS) == 0, "\n".join(loop)
    assert adds > 0
    assert not [line for line in loop if re.search(r"%[re]sp|\[sp", line)], "\n".join(loop)


@pytest.mark.parametrize(
    ("unit", "triple", "processor"), PROCESSORS[2:6], ids=lambda value: getattr(value, "name", value)
)
def test_a_tile_that_is_too_high_would_be_found(unit, triple, processor, monkeypatch):
    monkeypatch.setattr(register_tile, "ROWS", unit.tile_rows + 3)
    loop = inner_loop(unit, triple, processor, types.float32, unit.tile_rows + 3, monkeypatch)
    assert [line for line in loop if re.search(r"%[re]sp|\[sp", line)]
