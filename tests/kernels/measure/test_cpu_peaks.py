"""The loops do nothing but what they measure, and the rates are those of all threads together."""

import itertools
import os
import platform
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from threadpoolctl import threadpool_limits

from minidist.kernels.cpu.support.bf16_instructions import AVX512_BF16, NONE, matrix_unit
from minidist.kernels.cpu.support.caches import available_cpus
from minidist.kernels.cpu.support.vector_unit import vector_unit
from minidist.kernels.measure import cpu_peaks, peak_loops, product_checks
from minidist.kernels.measure.peak_loops import SUMS, flops_per_turn, fma, registers, triad
from minidist.kernels.measure.timing_in_turns import time_in_turns
from minidist.kernels.rung import empty
from tests.helpers.clocks import HANG, Clock
from tests.helpers.fresh_python import output_of
from tests.helpers.products import every_dtype

on_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 code")
# x86's names of a fused multiply-add, and of the two instructions where there is none.
MULTIPLY_ADD = re.compile(r"^(vfmadd\d+p[sd]|mulp[sd]|addp[sd])$")


def loops(assembly):
    """The instructions of each innermost loop: from a label to the jump back to it."""
    found = []
    body, label = [], None
    for line in assembly.splitlines():
        text = line.strip()
        if re.match(r"^\.LBB\w+:", text):
            body, label = [], text.partition(":")[0]
        elif text and not text.startswith((".", "#")):
            operation, _, operands = text.partition("\t")
            body.append((operation.strip(), operands.strip()))
            if operation.startswith("j") and operands.strip() == label:
                found.append(body)
    return found


@every_dtype
@settings(deadline=None, max_examples=20)
@given(turns=st.integers(0, 20), factor=st.integers(-3, 3), addend=st.integers(-3, 3))
def test_fma_does_each_multiply_add_each_turn(dtype, turns, factor, addend):
    rows = registers(dtype)
    rows[0], rows[1] = factor / 2, addend
    expected = rows.astype(np.float64)
    for _ in range(turns):
        expected[2:] = expected[2:] * expected[0] + expected[1]
    fma(rows, turns)
    np.testing.assert_allclose(rows, expected, rtol=1e-5 if dtype == "float32" else 1e-13)


@every_dtype
def test_sums_stay_normal_numbers_for_ever(dtype):
    rows = registers(dtype)
    assert rows.shape == (2 + SUMS, vector_unit().lanes(dtype))
    assert len(np.unique(rows[2:])) == rows[2:].size
    fma(rows, 2000)
    np.testing.assert_allclose(rows[2:], 2, rtol=1e-6)


@on_x86
@every_dtype
def test_the_fma_loop_is_multiply_adds_between_registers_only(dtype):
    fma(registers(dtype), 1)
    code = next(text for signature, text in fma.inspect_asm().items() if signature[0].dtype.name == dtype)
    fused = vector_unit().fused
    found = [body for body in loops(code) if any(MULTIPLY_ADD.match(operation) for operation, _ in body)]
    assert found
    for body in found:
        arithmetic = [x for x in body if MULTIPLY_ADD.match(x[0])]
        each = 1 if fused else 2
        assert len(arithmetic) % (each * SUMS) == 0
        assert all(x[0].endswith("s" if dtype == "float32" else "d") for x in arithmetic)
        # Nothing is loaded or stored: no operand is an address. What remains counts turns.
        assert not any("(" in operands for _, operands in body), body
        assert len(body) - len(arithmetic) <= 4
        if fused:
            assert {operation for operation, _ in arithmetic} <= {"vfmadd213p" + x for x in "sd"} | {
                f"vfmadd{order}p{x}" for order in (132, 231) for x in "sd"
            }


def test_products_of_pairs_cancel_and_leave_nothing_else_to_do():
    if matrix_unit() != AVX512_BF16:
        pytest.skip(NONE if not matrix_unit() else "tiles take the place of pairs")
    rows = registers(np.uint32)
    fma(rows, 1000)
    np.testing.assert_array_equal(rows, registers(np.uint32))
    code = next(text for signature, text in fma.inspect_asm().items() if signature[0].dtype.name == "uint32")
    for body in (body for body in loops(code) if any(name == "vdpbf16ps" for name, _ in body)):
        assert sum(name == "vdpbf16ps" for name, _ in body) % SUMS == 0
        assert not any("(" in operands for _, operands in body), body
    flops = []
    for kind in "float32", "bfloat16":
        flops.append(cpu_peaks._fma_work(kind, 7)())
    assert flops == [7 * 2 * SUMS * 16, 7 * 4 * SUMS * 16]


@on_x86
@pytest.mark.parametrize(
    ("cpu", "unit"), [("haswell", "AVX2"), pytest.param("nehalem", "SSE", marks=pytest.mark.deep)]
)
def test_the_loops_of_other_vector_units_are_as_clean(cpu, unit):
    """Compiled for that CPU in a process of its own; a machine with AVX-512 has the others too."""
    if unit == "AVX2" and vector_unit().name == "SSE":
        pytest.skip("this machine can't run AVX2")
    code = (
        "import tests.kernels.measure.test_cpu_peaks as t\n"
        f"assert t.vector_unit().name == {unit!r}\n"
        "for dtype in ('float32', 'float64'):\n"
        "    t.test_the_fma_loop_is_multiply_adds_between_registers_only(dtype)\n"
        "    t.test_sums_stay_normal_numbers_for_ever(dtype)\n"
        "t.check_triad(True, 80); t.check_triad(False, 8)\n"
    )
    features = {"haswell": "+avx2,+fma", "nehalem": "+sse4.2"}[cpu]
    root = Path(__file__).parents[3]
    output_of(code, folder=root, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)


def check_triad(streaming, elements):
    rng = np.random.default_rng()
    a, b, c = (empty(1, elements + 8, np.float64)[0] for _ in range(3))
    a[...], b[...], c[...] = np.nan, rng.standard_normal(b.shape), rng.standard_normal(c.shape)
    scale = float(rng.standard_normal())
    b_before, c_before = b.copy(), c.copy()
    triad(streaming)(a[:elements], b[:elements], c[:elements], scale)
    np.testing.assert_allclose(a[:elements], (b + scale * c)[:elements], rtol=1e-12, atol=1e-12)
    assert np.isnan(a[elements:]).all()
    np.testing.assert_array_equal(b, b_before)
    np.testing.assert_array_equal(c, c_before)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("lines", [1, 2, 7, 64, 1001])
def test_triad_writes_b_plus_scale_times_c_and_no_more(streaming, lines):
    check_triad(streaming, 8 * lines)


@on_x86
@pytest.mark.parametrize("streaming", [True, False])
def test_only_the_streaming_triad_stores_past_the_caches(streaming):
    check_triad(streaming, 64)
    code = "".join(triad(streaming).inspect_asm().values())
    assert ("movntp" in code) == streaming


@pytest.fixture
def clock(monkeypatch):
    """A clock of its own for each thread that `rate` starts."""
    found = Clock()
    monkeypatch.setattr(cpu_peaks, "time", found)
    return found


def lasting(clock, seconds, work=1.0, first=0.0):
    """A loop that takes so long by the clock, and another time at first."""
    waits = itertools.chain([first], itertools.repeat(seconds))
    return lambda: clock.sleep(next(waits)) or work


def test_a_rate_is_the_work_of_all_threads_over_their_time(clock):
    together = threading.Barrier(4)
    loops = [lasting(clock, 1 / 64, 5.0) for _ in range(4)]
    run = cpu_peaks.rate([lambda loop=loop: (together.wait(HANG), loop())[1] for loop in loops], 1 / 8)
    assert run == cpu_peaks.Rate(4 * 5 * 64, 0.0)


def test_the_slower_threads_count_too(clock):
    """The second ends after 1/4 s: both are divided by that, not the first by its 1/8."""
    run = cpu_peaks.rate([lasting(clock, 1 / 64), lasting(clock, 1 / 4)], 1 / 8)
    assert run.per_second == (8 + 1) * 4


def test_the_first_call_is_not_timed(clock):
    assert cpu_peaks.rate([lasting(clock, 1 / 64, first=9.0)], 1 / 8).per_second == 64


def test_a_thread_that_runs_is_granted_its_time(clock):
    def work():
        clock.sleep(1 / 64)
        clock.ran += 1 / 256
        return 1.0

    assert cpu_peaks.rate([work], 1 / 8).granted == 1 / 4


@pytest.mark.parametrize("at_call", [0, 2])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_thread_raises_is_raised(threads, at_call, clock):
    calls = itertools.count()

    def broken():
        if next(calls) == at_call:
            raise ZeroDivisionError("broken")
        return clock.sleep(1 / 64) or 1.0

    works = [broken, *[lasting(clock, 1 / 64) for _ in range(threads - 1)]]
    with pytest.raises(ZeroDivisionError, match="broken"):
        cpu_peaks.rate(works, 1 / 8)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_threads_have_a_core_each_and_a_single_one_goes_anywhere():
    cpus = available_cpus()
    seen = [set() for _ in cpus]
    cpu_peaks.rate([lambda i=i: seen[i].add(tuple(available_cpus())) or 1.0 for i in range(len(cpus))], 0.001)
    assert seen == ([{(cpu,)} for cpu in cpus] if len(cpus) > 1 else [{tuple(cpus)}])
    alone = set()
    cpu_peaks.rate([lambda: alone.add(tuple(available_cpus())) or 1.0], 0.001)
    assert alone == {tuple(cpus)}
    assert available_cpus() == cpus  # the caller's own are left alone


def test_the_peaks_are_plausible_beside_each_other(monkeypatch):
    """No figure is of another kind. Threads count the time in which they run: other programs may run too."""
    own = SimpleNamespace(perf_counter=time.thread_time, thread_time=time.thread_time)
    monkeypatch.setattr(cpu_peaks, "time", own)
    one, together = cpu_peaks.roofs(seconds=0.004, repetitions=10, memory=64 * 2**20)
    for roof in (one, together):
        assert list(roof.flops) == ["float32", "float64", *(["bfloat16"] if matrix_unit() else [])]
        assert roof.flops.get("bfloat16", np.inf) > roof.flops["float32"]
        assert 1 < roof.flops["float32"] / roof.flops["float64"] < 4
        assert 0 < roof.granted <= 1
        assert 1e9 < roof.bandwidth < 1e13
    cores = len(available_cpus())
    for of_one, of_all in [
        (one.bandwidth, together.bandwidth),
        *zip(one.flops.values(), together.flops.values(), strict=True),
    ]:
        assert of_one / 2 < of_all < 2 * cores * of_one
    assert one.name == "one core"
    assert together.name == (f"{cores} cores" if cores > 1 else "one core")


def test_on_one_core_both_roofs_are_one(monkeypatch):
    measured = []
    monkeypatch.setattr(cpu_peaks, "available_cpus", lambda: [0])
    monkeypatch.setattr(cpu_peaks, "_roof", lambda *arguments: measured.append(arguments) or arguments)
    one, together = cpu_peaks.roofs()
    assert one is together
    assert len(measured) == 1


@pytest.mark.scale  # needs an idle machine, and a NumPy that sees the same vector unit as Numba
@pytest.mark.skipif(sys.platform == "darwin", reason="there NumPy uses the CPU's matrix unit")
@every_dtype
def test_no_product_is_faster_than_the_peak(dtype):
    """numpy.matmul is a loop of FMAs and more; in turns, so that both meet the same clock."""
    a, b = product_checks.inputs(384, 384, 384, dtype, 0)
    c, rows, turns = np.empty_like(a), registers(dtype), 20_000
    with threadpool_limits(1):
        seconds = time_in_turns(
            {"peak": lambda: fma(rows, turns), "numpy": lambda: np.matmul(a, b, out=c)}, rounds=15
        )
    peak = turns * flops_per_turn(dtype) / min(seconds["peak"])
    assert peak >= 0.9 * product_checks.flops(384, 384, 384) / min(seconds["numpy"])


def test_triad_arrays_are_past_the_caches_and_within_the_memory(monkeypatch):
    sizes = []

    class Share(cpu_peaks._Share):
        def __init__(self, chunks):
            sizes.append(chunks * cpu_peaks.CHUNK * 8)
            super().__init__(1)

    monkeypatch.setattr(cpu_peaks, "_Share", Share)
    monkeypatch.setattr(cpu_peaks, "rate", lambda works, seconds: cpu_peaks.Rate(1.0, 1.0))
    mib = 2**20
    for threads, cache, memory, expected in [
        (1, 32 * mib, 2**34, 128 * mib),
        (4, 32 * mib, 2**34, 128 * mib),
        (1, 0, 2**34, 4 * cpu_peaks.UNKNOWN_CACHE),
        (1, 32 * mib, 96 * mib, 32 * mib),
        (2, 2**30, 2**36, 2 * cpu_peaks.LARGEST),
        (96, 1152 * mib, 2**36, 4608 * mib),
        (192, 2304 * mib, 2**38, 9216 * mib),
        (192, 384 * mib, 2**38, 1536 * mib),
        (192, 384 * mib, 384 * mib, 128 * mib),  # no more threads than chunks
        (3, 32 * mib, 0, cpu_peaks.CHUNK * 8),
    ]:
        sizes.clear()
        cpu_peaks._roof("", threads, cache, 0.0, 1, memory)
        assert len(sizes) == min(threads, expected // (cpu_peaks.CHUNK * 8))
        assert expected - threads * cpu_peaks.CHUNK * 8 <= sum(sizes) <= expected


@pytest.mark.parametrize(("threads", "calls"), [(1, 1), (16, 1), (17, 2), (192, 12)])
def test_many_threads_call_less_often_and_count_it(threads, calls, monkeypatch):
    """Each call from Python waits for the GIL: 192 threads could not make one a millisecond each."""
    turns = []
    monkeypatch.setattr(cpu_peaks, "_Share", lambda chunks: SimpleNamespace(work=lambda streaming: None))
    monkeypatch.setattr(peak_loops, "fma", lambda rows, count: turns.append(count))
    monkeypatch.setattr(cpu_peaks, "rate", lambda works, seconds: cpu_peaks.Rate((works[0] or float)(), 1.0))
    monkeypatch.setattr(cpu_peaks, "Roof", lambda name, flops, bandwidth, granted: flops)
    flops = cpu_peaks._roof("", threads, 2**20, 0.0, 1, 2**30)
    assert turns == [calls * cpu_peaks.TURNS] * 2
    assert flops == {dtype: turns[0] * flops_per_turn(dtype) for dtype in ("float32", "float64")}


def test_the_better_kind_of_store_counts(monkeypatch):
    monkeypatch.setattr(cpu_peaks, "rate", lambda works, seconds: cpu_peaks.Rate(next(rates), next(granted)))
    for bandwidths in ([7.0, 9.0], [9.0, 7.0]):
        rates, granted = iter([1.0, 2.0, *bandwidths]), iter([1.0, 0.7, 0.9, 0.8])
        roof = cpu_peaks._roof("x", 1, 2**20, 0.0, 1, 2**20)
        assert roof.bandwidth == 9
        assert roof.flops == {"float32": 1, "float64": 2}
        assert roof.granted == 0.7


def test_a_peak_is_the_best_repetition(monkeypatch):
    rates = itertools.cycle([3.0, 8.0, 5.0])
    monkeypatch.setattr(cpu_peaks, "rate", lambda works, seconds: cpu_peaks.Rate(next(rates), 1.0))
    roof = cpu_peaks._roof("x", 1, 2**20, 0.0, 3, 2**20)
    assert {*roof.flops.values(), roof.bandwidth} == {8.0}


def test_a_share_goes_round_all_of_its_arrays():
    share = cpu_peaks._Share(3)
    work = share.work(True)
    assert [work() for _ in range(4)] == [24.0 * cpu_peaks.CHUNK] * 4
    seen = [next(share.chunks) for _ in range(3)]
    assert len({a.ctypes.data for a, _, _ in seen}) == 3
    for a, b, c in seen:
        np.testing.assert_array_equal(a, b + 3 * c)
        assert (a == 7).all()


def test_free_memory_is_the_systems_or_the_containers(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable:    4096 kB\n")
    assert cpu_peaks.available_memory(str(meminfo), str(tmp_path)) == 4096 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert cpu_peaks.available_memory(str(meminfo), str(tmp_path)) == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu_peaks.available_memory(str(meminfo), str(tmp_path)) == 4096 * 1024
    assert cpu_peaks.available_memory("", "") > 2**20
    (tmp_path / "memory").mkdir()  # version 1
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2000000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("500000\n")
    assert cpu_peaks.available_memory(str(meminfo), str(tmp_path)) == 1_500_000
