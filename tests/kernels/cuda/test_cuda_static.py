"""What the assembler makes of every rung, for every architecture that it runs on, without a GPU.

The kernels are those for large products with all matrices in rows, compiled on the path that `cuda.jit` takes
too: LTO-IR, linked to machine code. A launch is caught to learn which kernel that is, and with what.
"""

import importlib
import re

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")
pytest.importorskip("ml_dtypes")

from minidist.kernels.cuda import CUDA_LADDER
from tests.helpers.cuda_kernels import without_gpu  # noqa: F401
from tests.helpers.machine_code import launched, shortcomings

ARCHITECTURES = ("sm_80", "sm_90", "sm_90a", "sm_100")
LARGE = 4096

# For each rung: the most registers of a thread, at least so many blocks on a multiprocessor, bytes of shared
# memory, and at least so many of which instructions. 65536 registers hold 2048 threads of 32, in units of 8.
TILE_3 = 4 * 2 * 32 * 32
TILE_4 = 4 * 2 * 64 * 8
TILE_5 = 4 * 2 * 128 * 8
PANELS = 4 * 2 * 8 * (128 + 4)
EXPECTED = {
    # 6 blocks of 256 threads with 40 registers, 48 warps of 64. sm_100's code has 50 for float64.
    ("s1_naive", "float32"): (40, 6, 0, {"FFMA": 1}),
    ("s1_naive", "float64"): (56, 4, 0, {"DFMA": 1}),
    ("s2_coalesced", "float32"): (40, 6, 0, {"FFMA": 1}),
    ("s2_coalesced", "float64"): (56, 4, 0, {"DFMA": 1}),
    # Two blocks of 1024 threads fill a multiprocessor: 65536 / 2048. 32 steps are unrolled.
    ("s3_shared_tile", "float32"): (32, 2, TILE_3, {"FFMA": 32, "BAR": 2, "LDS.128": 8}),
    ("s3_shared_tile", "float64"): (32, 2, 2 * TILE_3, {"DFMA": 32, "BAR": 2, "LDS.128": 16}),
    # 512 threads: 65536 / 512. All 8 x 8 multiply-adds, and four steps of tile_a in one load.
    ("s4_thread_tile_1d", "float32"): (96, 1, TILE_4, {"FFMA": 64, "BAR": 2, "LDS.128": 16}),
    ("s4_thread_tile_1d", "float64"): (128, 1, 2 * TILE_4, {"DFMA": 64, "BAR": 2, "LDS.128": 32}),
    # 64 sums and 16 factors beside addresses: two blocks of 256 threads. float64 takes twice as many.
    ("s5_thread_tile_2d", "float32"): (128, 2, TILE_5, {"FFMA": 64, "BAR": 2, "LDS": 16}),
    ("s5_thread_tile_2d", "float64"): (192, 1, 2 * TILE_5, {"DFMA": 64, "BAR": 2, "LDS.64": 16}),
    # Two blocks of 256 threads, by the launch bounds: 65536 / 512.
    ("s6_vector_loads", "float32"): (128, 2, PANELS, {"FFMA": 64, "LDG.128": 2, "LDS.128": 4, "STG.128": 16}),
    ("s7_async_copy", "float32"): (128, 2, 4 * PANELS, {"FFMA": 64, "LDGSTS": 5, "LDS.128": 4, "BAR": 1}),
    # One block of 256 threads: 128 sums, and 24 factors twice.
    ("s8_warp_tile", "float32"): (
        255,
        1,
        3 * 4 * 8 * (128 + 4 + 256 + 4),
        {"FFMA": 1024, "LDGSTS": 6, "LDS.128": 48},
    ),
    # 128 sums, and two sets of 16 + 16 registers of factors.
    ("s9_tensor_core", "float16"): (255, 1, 0, {"HMMA": 128, "LDSM": 32, "LDGSTS": 24, "STG.128": 1}),
    ("s9_tensor_core", "bfloat16"): (255, 1, 0, {"HMMA": 128, "LDSM": 32, "LDGSTS": 24, "STG.128": 1}),
    ("s9_tensor_core", "float32"): (255, 1, 0, {"HMMA": 128, "LDSM": 16, "LDGSTS": 24, "STG.64": 64}),
    # 65536 / 384 in units of 8, from which setmaxnreg takes and to which it gives.
    ("s10_hopper", "float16"): (
        168,
        1,
        None,
        {"HGMMA": 4, "UTMALDG": 2, "UTMASTG": 4, "STSM": 16, "USETMAXREG": 2, "SYNCS": 4},
    ),
}
EXPECTED["s10_hopper", "bfloat16"] = EXPECTED["s10_hopper", "float16"]
DYNAMIC = {"s9_tensor_core": 3 * 128 * (128 + 256), "s10_hopper": 225 * 1024 - 1024}  # bytes, at most


def architectures(step, dtype):
    """For which a rung is assembled with this dtype: a rung with several has half of them with each.

    So each rung and each dtype is assembled for all four, the two of 16 bits, whose code differs in the name
    of one instruction, together.
    """
    if step.architecture == "sm_90a":
        return ("sm_90a",)
    apart = min(len(step.dtypes), 2)
    return ARCHITECTURES[(step.dtypes.index(dtype) + step.number) % apart :: apart]


CASES = [
    (step, dtype, architecture)
    for step in CUDA_LADDER
    for dtype in step.dtypes
    for architecture in architectures(step, dtype)
]


def assembled(step, dtype, architecture):
    """Whether every run does: a rung's first dtype for the H100, in whose code its idea has to show."""
    first = next(each for each in architectures(step, dtype) if each.startswith("sm_90"))
    return dtype == step.dtypes[0] and architecture == first


@pytest.mark.parametrize(
    "of", [lambda step, dtype: step.name, lambda step, dtype: dtype.replace("bfloat", "float")]
)
def test_each_rung_and_each_dtype_is_assembled_for_each_architecture(of):
    found = {(of(step, dtype), architecture) for step, dtype, architecture in CASES}
    wanted = {of(step, dtype) for step, dtype, _ in CASES if step.number < 10}
    assert {(each, architecture) for each in wanted for architecture in ARCHITECTURES} <= found


def test_every_rung_and_dtype_is_expected():
    assert list(EXPECTED) == [(step.name, dtype) for step in CUDA_LADDER for dtype in step.dtypes]


@pytest.mark.parametrize(
    ("step", "dtype", "architecture"),
    [
        pytest.param(
            *case,
            id=f"{case[0].name}-{case[1]}-{case[2]}",
            marks=[] if assembled(*case) else [pytest.mark.deep],
        )
        for case in CASES
    ],
)
def test_registers_spills_occupancy_and_instructions(step, dtype, architecture):
    kernel, types, dynamic = launched(step, dtype, LARGE)
    registers, blocks, shared, wanted = EXPECTED[step.name, dtype]
    compiled = kernel.compile(types, architecture)
    if step.number >= 8:  # a tile's number is split by division; one of 64 bits would be a function's call
        assert not re.search(rb"__cuda\w*_(div|rem)_[su]64", compiled.cubin)
    assert shortcomings(compiled, registers, wanted) == [], compiled.report
    assert shared is None or compiled.report.shared == shared
    assert dynamic <= DYNAMIC.get(step.name, 0)
    # Room for 64 warps; each quarter of a multiprocessor has 16384 registers, which warps get by 256.
    warps, per_warp = blocks * kernel.threads // 32, -(-compiled.report.registers * 32 // 256) * 256
    assert warps <= min(64, 16384 // per_warp * 4)
    room = {"sm_80": 164}.get(architecture, 228) * 1024  # shared memory, of which a block loses 1024 bytes
    assert blocks * (compiled.report.shared + dynamic + 1024) <= room


TILES = [(8, "LARGE"), (8, "SMALL"), (9, "LARGE"), (9, "TIGHT"), (9, "SMALL")]
ASSEMBLED_FOR = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
# Each tile for two architectures, and each architecture with two tiles, one of them of rung 9.
SAMPLE = [(*tile, ASSEMBLED_FOR[(i + more) % 5]) for more in (0, 3) for i, tile in enumerate(TILES)]


@pytest.mark.deep
@pytest.mark.parametrize(("number", "tile", "architecture"), SAMPLE)
def test_no_tile_of_any_size_spills(monkeypatch, number, tile, architecture):
    step = CUDA_LADDER[number - 1]
    module = importlib.import_module(f"minidist.kernels.cuda.{step.name}")
    monkeypatch.setattr(module, "choose", lambda m, n: getattr(module, tile))
    for dtype in set(step.dtypes) - {"bfloat16"}:  # whose code is float16's
        kernel, types, _ = launched(step, dtype, LARGE)
        report = kernel.compile(types, architecture).report
        assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0), (dtype, report)
