"""Rung 8: its modes, its edges, what it refuses; and the loop over AMX's tiles on a model of them."""

import resource
from types import FunctionType

import numpy as np
import pytest
import torch

from minidist.kernels import rung
from minidist.kernels.cpu import s8_matrix_unit
from minidist.kernels.cpu.s8_matrix_unit import MODES
from minidist.kernels.cpu.support import bf16_instructions, bf16_posting
from minidist.kernels.cpu.support.tile_registers import configuration
from minidist.kernels.measure import product_checks
from minidist.kernels.rung import empty
from minidist.kernels.tpu.tiles import TileUnit
from minidist.kernels.tried_once import remembered
from minidist.model.matmul import Linear
from tests.helpers.fresh_python import output_of
from tests.helpers.products import LAYOUTS, every_layout, laid_out, skip_unless_it_runs

STEP = rung("s8_matrix_unit")
PITCH, SIDE = 784, 16


@pytest.fixture
def unit():
    """This CPU's matrix unit; the tests of rung 8 itself need one."""
    skip_unless_it_runs(STEP)


def bf16(x):
    """float32 x, rounded to bf16."""
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def rms(c, exact):
    return np.sqrt(((c - exact) ** 2).mean() / (exact**2).mean())


@pytest.mark.parametrize(("mode", "most"), [("bf16", 3e-3), ("bf16x3", 5e-6), ("bf16x6", 6e-7)])
def test_each_mode_has_its_error(unit, mode, most):
    rng = np.random.default_rng()
    for m, n, k in [(1, 1, 1), (45, 70, 33), (64, 96, 1700)]:
        a, b = product_checks.inputs(m, n, k, "float32", int(rng.integers(2**32)))
        c = STEP.matmul(a, b, mode=mode)
        product_checks.assert_product(c, a, b, mode, factors=MODES[mode][1])
        assert c.size == 1 or rms(c, product_checks.reference(a, b)) < most  # a single number is its own mean
    if mode == "bf16":
        np.testing.assert_allclose(c, product_checks.reference(bf16(a), bf16(b)), rtol=1e-4, atol=1e-3)


def test_bf16_numbers_of_torch_and_as_bits(unit):
    torch.manual_seed(0)
    a, b = torch.randn(37, 50).bfloat16(), torch.randn(50, 41).bfloat16()
    exact = a.double() @ b.double()
    c = STEP.matmul(a, b)
    assert c.dtype == torch.bfloat16
    torch.testing.assert_close(c.double(), exact, rtol=2**-8, atol=1e-5)
    wide = torch.empty(37, 41)
    assert STEP.matmul(a, b, out=wide) is wide
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5)
    bits = [x.view(torch.int16).numpy().view(np.uint16) for x in (a, b)]
    expected = c.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(STEP.matmul(*bits), expected)
    kind = pytest.importorskip("ml_dtypes", reason="NumPy has no bf16 of its own").bfloat16
    d = STEP.matmul(*(x.view(kind) for x in bits))
    assert d.dtype == kind
    np.testing.assert_array_equal(d.view(np.uint16), expected)


def test_a_refusal_names_what_was_given(unit):
    """Torch's and ml_dtypes' bf16, not the bits under which rung 8 reads them."""
    half, single = torch.ones(2, 2).bfloat16(), torch.ones(2, 2)
    cases = [
        (half, single, None, "a is torch.bfloat16 and b is torch.float32"),
        (half, half, single.double(), "out is torch.float64, and a and b are torch.bfloat16"),
        (half, half.clone().requires_grad_(), None, "b requires a gradient.*minidist.model.matmul"),
        (half.half(), half, None, "a has dtype float16, and rung s8_matrix_unit takes bfloat16 or float32"),
    ]
    with torch.no_grad():
        assert (STEP.matmul(half.clone().requires_grad_(), half) == 2).all()
    assert (STEP.matmul(half[:, :0], half[:0]) == 0).all()
    with pytest.raises(ValueError, match="a is on meta, and rung s8_matrix_unit runs on cpu"):
        STEP.matmul(half.to("meta"), half.to("meta"))
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has no bf16 of its own")
    ours, bits = np.ones((2, 2), ml_dtypes.bfloat16), np.full((2, 2), 0x3F80, np.uint16)
    cases += [
        (ours, single.numpy(), None, "a is bfloat16 and b is float32"),
        (ours, ours, np.ones((2, 2)), "out is float64, and a and b are bfloat16"),
    ]
    for a, b, out, said in cases:
        with pytest.raises(TypeError, match=said):
            STEP.matmul(a, b, out=out)
    assert (STEP.matmul(ours, bits, out=bits.copy()) == 0x4000).all()  # 2


def test_rows_of_bf16_numbers_are_read_where_they_lie(unit):
    """A row of whole words is not packed; one that is not, or falls into the same cache lines, is."""
    rng = np.random.default_rng(2)
    memory = (rng.standard_normal((30, 2048 + 6), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    b = np.ascontiguousarray(memory[:20].T[:1024, :20])
    for pitch in 2048, 2050, 2051, 2054:
        for k in 1024, 1023:
            base = np.ascontiguousarray(memory[:, :pitch])
            for a in base[:, :k], base[::-1, :k], base[::-2, 6 : k + 6]:
                expected = STEP.matmul(np.asfortranarray(a), b[:k])
                np.testing.assert_array_equal(STEP.matmul(a, b[:k]), expected)


def test_sums_of_bf16_numbers_are_rounded_once(unit):
    """Also where more than one block of the depth adds to them; planted: each block rounded its own."""
    rng = np.random.default_rng(1)
    for m, n, k in [(20, 70, 60), (15, 64, 4000)]:
        a, b = (
            (rng.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for shape in ((m, k), (k, n))
        )
        sums = STEP.matmul(a, b, out=np.empty((m, n), np.float32))
        rounded = (STEP.matmul(a, b).astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(rounded, bf16(sums))


@every_layout
def test_bf16_numbers_may_lie_anyhow(unit, layout):
    """The layouts of float32 are those of every rung: see test_cpu_ladder.py."""
    x = (product_checks.inputs(70, 70, 70, "float32", 1)[0].view(np.uint32) >> 16).astype(np.uint16)
    view = laid_out(np.ones((70, 70), np.float32), layout)[0]
    base = np.full(view.base.shape if view.base is not None else view.shape, 0x7FC0, np.uint16)
    there = LAYOUTS[layout](70, 70)[1](base)
    there[...] = x
    expected = STEP.matmul(x, x)
    np.testing.assert_array_equal(STEP.matmul(there, there), expected)
    np.testing.assert_array_equal(STEP.matmul(x, x, out=there), expected)
    there[...] = 0x7FC0
    assert (base == 0x7FC0).all(), "written outside of out"


SPECIAL = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-42, 3.4e38, -3.4e38, 3.3e38]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "columns", "k"), [(4, 3, 5), (40, 70, 70), (17, 33, 1700)])
def test_special_numbers_travel_as_in_float32(unit, mode, rows, columns, k):
    """By vectors and alone; "bf16" takes them rounded and subnormal numbers for 0, as the others may."""
    rng = np.random.default_rng()
    a, b = rng.standard_normal((rows, k), np.float32), rng.standard_normal((k, columns), np.float32)
    places = rng.integers(k, size=rows)
    a[range(rows), places] = np.resize(rng.permutation(SPECIAL), rows)  # one in each row
    b[:, 0], b[:, 1] = 0, 1e-40
    x, y = (bf16(a), bf16(b)) if mode == "bf16" else (a, b)
    flushed = [np.where(np.abs(z) < np.finfo(np.float32).tiny, 0, z).astype(float) for z in (x, y)]
    x, y = flushed if mode == "bf16" else (x.astype(float), y.astype(float))
    with np.errstate(all="ignore"):
        exact, sizes, without = x @ y, np.abs(x) @ np.abs(y), flushed[0] @ flushed[1]
        expected = exact.astype(np.float32)
    c = STEP.matmul(a, b, mode=mode)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(c[~finite], expected[~finite])
    most = 2 * MODES[mode][1] if mode != "bf16" else 1e-4
    off = np.minimum(*(np.abs(c[finite] - each[finite]) for each in (exact, without)))
    assert (off <= most * sizes[finite] + 1e-30).all()


def test_where_numbers_become_infinite_and_parts_subnormal(unit):
    one = np.eye(40, dtype=np.float32)
    for number, rounded in ((3.3961e38, True), (3.3962e38, False)):
        assert np.isfinite(STEP.matmul(one[:, :1] * np.float32(number), one[:1, :1])[0, 0]) == rounded
    a, b = product_checks.inputs(40, 40, 40, "float32", 5)
    for scale, least, most in ((1e-32, 0, 5e-6), (1e-37, 1e-4, 1e-2)):  # one part of two is left
        x, y = a * np.float32(scale), b * np.float32(1e20)
        assert least < rms(STEP.matmul(x, y, mode="bf16x3"), product_checks.reference(x, y)) < most


def test_subnormal_numbers_and_payloads(unit):
    one, tiny = np.ones((40, 40), "f"), np.full((40, 40), 1e-40, "f")
    for mode in MODES:
        assert not STEP.matmul(tiny, one * 2**20, mode=mode).any()
        # A NaN that rounding must not turn into -0.
        payload = np.full((40, 40), 0x7FFFFFFF, np.uint32).view(np.float32)
        assert np.isnan(STEP.matmul(payload, one, mode=mode)).all()


def test_all_cores_and_many_strips(unit, monkeypatch):
    monkeypatch.setattr(s8_matrix_unit, "LEAST_WORK", 1)
    monkeypatch.setattr(s8_matrix_unit, "SHARED", 1)  # a panel at a time
    monkeypatch.setattr(s8_matrix_unit.thread_pool, "threads", lambda: 3)
    a, b = product_checks.inputs(90, 100, 40, "float32", 3)
    for mode in MODES:
        product_checks.assert_product(STEP.matmul(a, b, mode=mode), a, b, mode, factors=MODES[mode][1])
    a[3, 4] = np.inf
    assert np.isinf(STEP.matmul(a, b, mode="bf16x3")[3]).all()


def test_fresh_memory_is_arbitrary(unit, monkeypatch):
    memory = bf16_posting.memory

    def garbage(purpose, kind, elements):
        found = memory(purpose, kind, elements)
        found[...] = -7
        return found

    for module in s8_matrix_unit, bf16_posting:
        monkeypatch.setattr(module, "memory", garbage)
    monkeypatch.setattr(s8_matrix_unit, "own_memory", bf16_posting._OwnMemory)
    a, b = product_checks.inputs(9, 10, 35, "float32", 3)
    for mode in MODES:
        product_checks.assert_product(STEP.matmul(a, b, mode=mode), a, b, mode, factors=MODES[mode][1])
    x = bf16(a[:, :1]).view(np.uint32) >> 16
    deep = np.repeat(x.astype(np.uint16), 5000, axis=1)  # of several depths, whose sums wait to be rounded
    np.testing.assert_array_equal(STEP.matmul(deep, deep.T), STEP.matmul(deep, deep.T.copy()))


def test_without_a_unit_it_says_so(monkeypatch):
    monkeypatch.setattr(bf16_instructions, "matrix_unit", lambda: "")
    with pytest.raises(RuntimeError, match=r"no bf16 products: s8_matrix_unit needs AMX or .* take rung s7"):
        STEP.matmul(np.ones((2, 2), "f"), np.ones((2, 2), "f"))
    with pytest.raises(RuntimeError, match="no bf16 products"):
        Linear(2, 2, rung="s8")(torch.ones(1, 2))
    with pytest.raises(ValueError, match="mode is 'tf32': pass 'bf16', 'bf16x3'"):
        STEP.matmul(np.ones((2, 2), "f"), np.ones((2, 2), "f"), mode="tf32")


def test_no_answer_is_kept_where_numba_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="unset NUMBA_DISABLE_JIT"):
        bf16_instructions.matrix_unit.__wrapped__()
    assert not list(tmp_path.iterdir())


DIE, RIGHT, WRONG = "import os; os.kill(os.getpid(), 4)", "pass", "raise SystemExit(1)"


@pytest.mark.parametrize(
    ("amx", "vectors", "granted", "found"),
    [
        (DIE, RIGHT, True, "AVX512_BF16"),
        (RIGHT, RIGHT, True, "AMX"),
        (RIGHT, RIGHT, False, "AVX512_BF16"),  # Linux has refused this process
        (DIE, WRONG, True, ""),
        (RIGHT, DIE, True, ""),  # packing rounds with an instruction of AVX512_BF16
    ],
)
def test_instructions_are_tried_once(monkeypatch, tmp_path, amx, vectors, granted, found):
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(bf16_instructions.platform, "machine", lambda: "x86_64")
    note = f"open({str(tmp_path / 'tried')!r}, 'a').write('x'); "
    program = f"name = NAME; {note}exec({{{{'AMX': {amx!r}, 'AVX512_BF16': {vectors!r}}}}}[name])"
    monkeypatch.setattr(bf16_instructions, "PROGRAM", program)
    monkeypatch.setattr(bf16_instructions, "ask_for_tiles", lambda: granted)
    for _ in range(2):
        assert bf16_instructions.matrix_unit.__wrapped__() == found
    assert (tmp_path / "tried").read_text() == "xx"


def test_an_answer_is_found_anew_where_it_cannot_be_kept(monkeypatch, tmp_path):
    """As on a full disk: here a file may have no bytes."""
    monkeypatch.setenv("MINIDIST_CACHE_DIR", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        found = remembered("question", (), lambda: "yes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found == "yes"
    assert remembered("question", (), lambda: "kept") == "kept" == remembered("question", (), lambda: "new")


# Rung 8 as it is with AMX, but for the tile instructions.
AMX_LOOPS = """
import sys, numpy as np
from numba import njit
from minidist.kernels.cpu.support import bf16_instructions
bf16_instructions.matrix_unit = lambda: "AMX"
from minidist.kernels.cpu.support import atomic, bf16_packing, board, tile_registers

configured = np.zeros(1, np.int64)  # threads
AT = configured.ctypes.data

@njit
def begin_tiles():
    atomic.fetch_add(AT, 1)

@njit
def end_tiles():
    atomic.fetch_add(AT, -1)

@njit
def number(word, half):
    bits = np.uint32(board.elements(word + 2 * half, np.uint16)[0]) << np.uint32(16)
    return bf16_packing._number(np.uint32(bits))

@njit
def add_products(shape, parts, a, a_part, b, b_part, c, c_pitch, add):
    for i in range(32):
        for j in range(32):
            at = board.elements(c + 4 * (i * c_pitch + j), np.float32)
            total = at[0] if add else np.float32(0)
            if atomic.read(AT) < 1:
                total = np.float32(np.nan)
            for level in range(parts - 1, -1, -1):
                for x in range(level + 1):
                    for p in range(shape[1]):
                        a_word = a + 4 * (x * a_part + i * shape[2] + p)
                        b_word = b + 4 * ((level - x) * b_part + 32 * p + j)
                        total += number(a_word, 0) * number(b_word, 0) + number(a_word, 1) * number(b_word, 1)
            at[0] = total

tile_registers.begin_tiles, tile_registers.end_tiles = begin_tiles, end_tiles
tile_registers.add_products = add_products

from minidist.kernels import rung
from minidist.kernels.cpu.s8_matrix_unit import MODES
from minidist.kernels.measure import product_checks
for sizes in ((1, 1, 1), (45, 70, 33), (64, 96, 4100), (100, 33, 64)):
    a, b = product_checks.inputs(*sizes, "float32", 3)
    for mode in MODES:
        c = rung("s8").matmul(a, b, mode=mode)
        product_checks.assert_product(c, a, b, mode, factors=MODES[mode][1])
    halves = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    wide = rung("s8").matmul(*halves, out=np.empty(c.shape, np.float32))
    rounded = (rung("s8").matmul(*halves).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(rounded, wide, rtol=2**-8)
print("configured still" if configured[0] else "right")
"""

# The compiler's code for a Xeon with tiles, which need not run here.
ASSEMBLY = """
from numba import types
from minidist.kernels.cpu.support import tile_registers
tile_registers.add_products.compile((types.UniTuple(types.intp, 3), *[types.intp] * 8))
print(*tile_registers.add_products.inspect_asm().values())
from minidist.kernels.measure import peak_loops
peak_loops.tiles().compile((types.intp,))
print("the peak", *peak_loops.tiles().inspect_asm().values())
"""
XEON = {
    "NUMBA_CPU_NAME": "sapphirerapids",
    "NUMBA_CPU_FEATURES": "+64bit,+cmov,+sse2,+avx2,+fma,+avx512f,+avx512bf16,+amx-tile,+amx-bf16",
}


@pytest.mark.deep
def test_the_loops_of_amx_around_its_tiles(tmp_path):
    if bf16_instructions.matrix_unit() == bf16_instructions.AMX:
        pytest.skip("this CPU has AMX: the other tests run them")
    assert output_of(AMX_LOOPS, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_NUM_THREADS="2") == "right"


@pytest.mark.deep
def test_what_the_compiler_makes_of_the_loop_over_tiles():
    """Four loads and four products a step, no tile stored inside the loop, and nothing else from memory."""
    if bf16_instructions.platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("LLVM is built here for another kind of CPU")
    products, peak = output_of(ASSEMBLY, **XEON).split("the peak")
    assert peak.count("\ttdpbf16ps") % 4 == 0 < peak.count("\ttdpbf16ps")
    assert peak.count("\ttilestored") == peak.count("\ttileloadd") == 0
    lines = [line.split() for line in products.splitlines() if line.startswith("\t")]
    names = [line[0] for line in lines]
    first = names.index("tdpbf16ps")
    end = next(i for i in range(first, len(names)) if names[i].startswith("j"))
    loop = lines[first - 2 : end]
    assert [line[0] for line in loop].count("tileloadd") == [line[0] for line in loop].count("tdpbf16ps") == 4
    others = [line for line in loop if line[0] not in ("tileloadd", "tdpbf16ps")]
    assert not [line for line in others if "(" in " ".join(line) and line[0] != "leaq"], others
    assert (names.count("tilestored"), names.count("tilezero")) == (4, 4)
    assert names.count("tileloadd") == 4 + names.count("tdpbf16ps")  # LLVM unrolls what is left of the loop


# The loop over tiles, as Python, on the model.


def on_model(unit):
    """`tile_registers.add_products` with the model's instructions in the place of the CPU's."""
    from minidist.kernels.cpu.support import tile_registers as registers

    def instruction(name, *tiles):
        return lambda *arguments: getattr(unit, name)(*tiles, *arguments)

    calls = {f"{name}{t}": instruction(name, t) for name in ("zero", "load", "store") for t in range(8)}
    calls |= {f"add{i}": instruction("multiply", i, 4 + i // 2, 6 + i % 2) for i in range(4)}
    kernel = registers.add_products.py_func
    return FunctionType(kernel.__code__, {**kernel.__globals__, **calls})


def packed(x, transposed, parts):
    """Words of the parts of x (rows, k): as rung 8 packs a, or, transposed, a panel of b."""
    from minidist.kernels.cpu.support import bf16_packing

    rows, k = x.shape
    depth = -(-k // (2 * SIDE)) * SIDE
    to = np.zeros((parts, depth, 32) if transposed else (parts, 32, PITCH), np.uint32)
    by = (1, 32) if transposed else (PITCH, 1)
    own = np.empty((parts, SIDE, SIDE), np.uint32)
    where = (x.ctypes.data, rows, k, *x.strides, 4)
    bf16_packing.pack(where, to.ctypes.data, *by, parts, to.strides[0], depth, own.ctypes.data)
    return to


def multiply_on_model(parts=1, k=70, rows=(), pair=True, release=True, permission=True, skip=None):
    """A product of 32 x k by k x 32 on the model; the unit, the result, and a and b."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((32, k), np.float32), rng.standard_normal((k, 32), np.float32)
    packed_a, packed_b = packed(a, False, parts), packed(b.T, True, parts)
    if not pair:
        halves = packed_b.view(np.uint16)
        packed_b = np.ascontiguousarray(halves.reshape(*halves.shape[:-1], 32, 2).swapaxes(-1, -2)).view(
            np.uint32
        )
        packed_b = packed_b.reshape(parts, -1, 32)
    if skip is not None:
        packed_a[skip] = 0
    c = np.full((32, 32), np.nan, np.float32)
    unit = TileUnit([packed_a, packed_b, c], permission)
    unit.configure(configuration(*rows))
    depth = packed_b.shape[1]
    sizes = (32, depth, PITCH), parts, packed_a.ctypes.data, 32 * PITCH, packed_b.ctypes.data, depth * 32
    multiply = on_model(unit)
    multiply(*sizes, c.ctypes.data, 32, 0)
    multiply(*sizes, c.ctypes.data, 32, 1)  # and once more on top of it
    if release:
        unit.release()
    return unit, c / 2, a, b


@pytest.mark.parametrize(("parts", "most"), [(1, 3e-3), (2, 5e-6), (3, 6e-7)])
def test_tiles_multiply_on_the_model(parts, most):
    unit, c, a, b = multiply_on_model(parts)
    assert rms(c, product_checks.reference(a, b)) < most
    products = (1, 3, 6)[parts - 1] * 3  # of parts, for three steps of 16 words
    assert (unit.loads, unit.stores, unit.products) == (2 * 4 * products + 4, 8, 2 * 4 * products)
    assert unit.released
    # Two by two tiles keep the unit busy but for the first loads and the last sums.
    assert 16 * unit.products <= unit.cycles < 16 * unit.products + 200


def test_one_tile_of_sums_waits_for_each_product():
    unit = TileUnit([])
    unit.configure(configuration(16))
    for _ in range(10):
        unit.multiply(0, 4, 6)
    assert unit.cycles == 10 * 52


def test_mistakes_on_tiles_are_found():
    with pytest.raises(ValueError, match="as many words as b has rows"):
        multiply_on_model(rows=(15,))
    with pytest.raises(PermissionError, match="ask Linux"):
        multiply_on_model(permission=False)
    assert not multiply_on_model(release=False)[0].released
    _, c, a, b = multiply_on_model(pair=False)
    assert rms(c, product_checks.reference(a, b)) > 0.5
    for part, least in ((1, 1e-3), (2, 1e-6)):  # forgotten
        _, c, a, b = multiply_on_model(part + 1, skip=part)
        assert rms(c, product_checks.reference(a, b)) > least
    unit = TileUnit([empty(1, 4, np.float32)])
    with pytest.raises(RuntimeError, match="no tile is configured"):
        unit.zero(0)
    unit.configure(configuration(16))
    with pytest.raises(IndexError, match="outside the memory"):
        unit.load(0, unit.memory[0].ctypes.data, 64)
