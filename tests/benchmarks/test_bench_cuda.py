"""The benchmarks of the CUDA ladder, on the emulator and on a GPU whose times are known."""

import dataclasses
import importlib
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from minidist.benchmarks.harness import results
from minidist.benchmarks.harness.cuda import cuda_check, cuda_timing, one_rung
from minidist.benchmarks.report import ladders
from minidist.kernels.cuda import RUNGS
from minidist.kernels.cuda.attention import CUDA_ATTENTION_LADDER
from minidist.kernels.cuda.runtime import device
from tests.benchmarks.harness.test_turns import FakeBenchmark
from tests.helpers import warm_python
from tests.helpers.clocks import HANG
from tests.helpers.emulated_gpu import ROOF, EmulatedGpu

TESTS = Path(__file__).parent.parent
SOON = {
    "SIZES": (16, 32, 64),
    "TRANSPOSED_SIZE": 24,
    "TINY": 8,
    "MOST_ROUNDS": 5,
    "FEWEST_ROUNDS": 5,
    "MOST_CALLS": 2,
}


@pytest.fixture
def bench(monkeypatch):
    """The suite, which is not read where there is no GPU, at small sizes and without its ladder."""
    monkeypatch.setattr(cuda_timing, "unavailable", lambda: None)
    for name, value in SOON.items():
        monkeypatch.setattr(cuda_timing, name, value)
    found = importlib.import_module("minidist.benchmarks.bench_cuda")
    monkeypatch.setattr(found, "rates", {})
    return found


class KnownGpu(EmulatedGpu):
    """A GPU whose clock moves only where a product says so."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.clock, self.products = 0.0, 0

    def seconds(self, program, calls=1):
        start = self.clock
        for _ in range(calls):
            program()
        return (self.clock - start) / calls


@dataclasses.dataclass
class Step:
    """A rung that multiplies with torch, at a rate of its own, and wrongly from a call on."""

    gpu: KnownGpu
    rate: float = 1e9  # FLOP/s
    wrong_from: int = 10**9
    name: str = "s9_some_idea"
    number: int = 9
    dtypes: tuple = ("float32",)
    tf32: bool = False

    def sums(self, dtype):
        return dtype if dtype == "float64" else "float32"

    def matmul(self, a, b, out):
        self.gpu.products += 1
        torch.mm(a, b, out=out)
        if self.gpu.products >= self.wrong_from:
            out[-1, -1] += 1
        self.gpu.clock += 2 * out.numel() * a.shape[1] / self.rate


@pytest.fixture
def measure(bench, monkeypatch):
    """`measure(...)` runs a benchmark of a made-up rung beside a torch of 4 GFLOP/s, and returns it."""

    def run(step, kind="float32", *more, test="test_rung", full=False, torch_rate=4e9, disabled=False):
        gpu = step.gpu

        def multiply(a, b, c):
            torch.mm(a, b, out=c)
            gpu.clock += 2 * c.numel() * a.shape[1] / torch_rate

        monkeypatch.setattr(cuda_timing, "torch_matmul", multiply)
        benchmark = FakeBenchmark(disabled=disabled)
        given = () if test == "test_launch" else (kind, *(more or (32,)))
        getattr(bench, test)(benchmark, full, gpu, step, *given)
        return benchmark

    return run


def watched(step, look):
    """Have a rung look at its operands before it multiplies them."""
    multiply = step.matmul

    def matmul(a, b, out):
        look(a, b)
        multiply(a, b, out)

    step.matmul = matmul
    return step


def test_the_figures_are_those_of_the_clock(measure):
    benchmark = measure(Step(KnownGpu()))
    extra = benchmark.extra_info
    assert benchmark.group == "CUDA ladder, float32"
    assert benchmark.stats.stats.data == pytest.approx([2 * 32**3 / 1e9] * 5)
    assert (extra["gflops"], extra["peer_gflops"], extra["ratio"]) == pytest.approx((1.0, 4.0, 4.0))
    assert extra["percent_of_peer"] == pytest.approx(25.0)
    assert extra["percent_of_gpu_peak"] == pytest.approx(100 * 1e9 / 50e12)
    assert (extra["peak_gflops"], extra["peak_gb_per_s"]) == pytest.approx((50e3, 4e3))
    assert (extra["rung"], extra["dtype"], extra["size"]) == ("s9_some_idea", "float32", 32)
    told = extra["label"], extra["series"], extra["peer"]
    assert told == ("s9_some_idea, 32", "9 some idea", "torch.matmul")
    assert 0 < extra["worst_error"] < 1e-6
    json.dumps(results.rounded(extra))


@pytest.mark.parametrize("kind", ["tf32", "float16", "bfloat16", "float64"])
def test_each_arithmetic_has_its_group_dtype_and_bound(bench, measure, kind):
    seen = set()

    def look(a, b):
        seen.add((str(a.dtype), torch.get_float32_matmul_precision()))

    step = Step(KnownGpu(), dtypes=("float16", "bfloat16", "float32", "float64"), tf32=True)
    benchmark = measure(watched(step, look), kind)
    dtype = "float32" if kind == "tf32" else kind
    assert seen == {(f"torch.{dtype}", "high" if kind == "tf32" else "highest")}
    assert benchmark.group == bench.GROUPS[kind]
    assert ("percent_of_gpu_peak" in benchmark.extra_info) == (kind in ROOF.flops)


def test_every_rung_is_measured_in_each_of_its_arithmetics(bench):
    cases = {param.id for param in bench.cases()}
    for step in bench.LADDER:
        for kind in bench.kinds(step):
            if kind != "float64":
                assert {f"{step.name}-{kind}-{size}" for size in cuda_timing.SIZES} <= cases
    assert any("float64" in case for case in cases)


def test_a_wrong_product_is_never_timed(measure):
    step = Step(KnownGpu(), wrong_from=1)
    with pytest.raises(AssertionError, match=r"^rung s9_some_idea, 32 x 32 x 32 in float32, seed=\d+: 1 of"):
        measure(step)
    assert step.gpu.products == 1


def test_a_product_that_goes_wrong_while_it_is_timed_is_found(measure):
    step = Step(KnownGpu(), wrong_from=5)
    with pytest.raises(AssertionError, match="are wrong"):
        measure(step)
    assert step.gpu.products > 5


def test_operands_are_fresh_each_time(bench, measure, monkeypatch):
    seeds = []
    operands = bench.Operands
    monkeypatch.setattr(
        bench, "Operands", lambda *a, seed, **k: seeds.append(seed) or operands(*a, seed=seed, **k)
    )
    for _ in range(2):
        measure(Step(KnownGpu()), "float32", 16, disabled=True)
    assert len(set(seeds)) == 2


def test_a_product_that_would_take_too_long_is_left_out_and_says_so(measure):
    slow = Step(KnownGpu(), rate=2 * 64**3 / 1.5)  # 1.5 s at 64, and an eighth at 32
    told = r"would take about 1.50 s, and in a quick run .* at most"
    with pytest.raises(pytest.skip.Exception, match=told):
        measure(slow, "float32", 64, torch_rate=1e9, disabled=True)
    assert slow.gpu.products == 2  # at 32, to see how fast it is
    measure(slow, "float32", 64, full=True, torch_rate=1e9, disabled=True)
    assert slow.gpu.products < 12


def test_what_the_gpu_or_its_memory_refuses_is_left_out_and_says_so(measure):
    refused = Step(KnownGpu(refused=("s9_some_idea",)))
    for test, more in (("test_rung", (16,)), ("test_launch", ()), ("test_transposed", ("nt",))):
        with pytest.raises(pytest.skip.Exception, match="rung s9_some_idea needs another GPU"):
            measure(refused, "float32", *more, test=test)
    with pytest.raises(pytest.skip.Exception, match="more than is free"):
        measure(Step(KnownGpu(free=1000)), "float32", 16)


@pytest.mark.parametrize("order", ["nt", "tn"])
def test_transposed_operands_are_multiplied_and_labelled(measure, order):
    strides = set()
    step = watched(Step(KnownGpu()), lambda a, b: strides.add((a.stride(), b.stride())))
    extra = measure(step, "float32", order, test="test_transposed").extra_info
    assert strides == {((24, 1), (1, 24)) if order == "nt" else ((1, 24), (24, 1))}
    assert (extra["label"], extra["order"]) == (f"s9_some_idea, float32, {order}", order)
    assert "series" not in extra


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_checked_then_compared_with_torchs(bench, monkeypatch, backward):
    """On the emulator; two programs are timed in turns, and a wrong result is never timed."""
    monkeypatch.setenv(device.VARIABLE, "emulator")
    monkeypatch.setattr(cuda_timing, "HEADS", 2)
    checked = []
    monkeypatch.setattr(bench, "check_attention", lambda *given: checked.append(given))
    gpu, benchmark, step = EmulatedGpu(), FakeBenchmark(), CUDA_ATTENTION_LADDER[-1]
    bench.test_attention(benchmark, False, gpu, step, "bfloat16", True, backward, 40)
    extra = benchmark.extra_info
    assert extra["label"] == "s5_backward, bfloat16, 40, causal" + ", backward" * backward
    work = (5 if backward else 2) * 2 * 40 * 40 * 64
    assert extra["gflops"] == pytest.approx(work / benchmark.stats.stats.median / 1e9)
    assert extra["peer"] == "scaled_dot_product_attention"
    assert checked == [(step, "bfloat16", "cpu")]
    wrong = dataclasses.replace(step, compute=lambda q, k, v, out, *_: out.data.fill(0))
    benchmark = FakeBenchmark()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        bench.test_attention(benchmark, False, gpu, wrong, "bfloat16", True, backward, 40)
    assert not benchmark.extra_info


def test_launching_is_compared_with_torchs_and_has_a_goal(measure, monkeypatch):
    step = Step(KnownGpu())

    def host_seconds(gpu, program):
        before = gpu.products
        program()
        return 20e-6 if gpu.products > before else 8e-6

    monkeypatch.setattr(cuda_timing, "host_seconds", host_seconds)
    benchmark = measure(step, test="test_launch")
    extra = benchmark.extra_info
    assert benchmark.stats.stats.data == pytest.approx([20e-6] * 30)
    assert extra["beyond_peer"] == pytest.approx(12e-6)
    assert extra["goal"] == {"of": "beyond_peer", "below": 15e-6}
    assert extra["label"] == "s9_some_idea, float32, 8"


def minidist(program, *words, **variables):
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent), warm_python.CHILDREN: "3", **variables}
    return warm_python.run([sys.executable, *program, "bench", "cuda", *words], timeout=HANG, env=env)


def test_without_a_gpu_the_command_says_so_and_writes_nothing(tmp_path):
    out = tmp_path / "out.json"
    done = minidist(["-m", "minidist"], "--out", str(out), MINIDIST_CUDA_BACKEND="emulator")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "minidist: MINIDIST_CUDA_BACKEND is 'emulator', and this measures a GPU: with a GPU,"
    )
    assert done.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.deep
def test_the_command_on_the_emulator(tmp_path):
    """From collection to the table, with real rungs; only the clock and the memory are not a GPU's."""
    out = tmp_path / "out.json"
    some = "s2_coalesced or (s3_shared_tile and test_rung) or s10_hopper"
    done = minidist([str(TESTS / "helpers/emulated_gpu.py")], "--out", str(out), "-k", some)
    assert done.returncode == 0, done.stderr
    found = results.load(out)
    names = [entry["name"] for entry in found["benchmarks"]]
    assert names == [  # the best rung first
        "test_rung[s3_shared_tile-float32-32]",
        "test_rung[s3_shared_tile-float32-40]",
        "test_rung[s2_coalesced-float32-32]",
        "test_rung[s2_coalesced-float32-40]",
        "test_transposed[s2_coalesced-float32-nt]",
        "test_transposed[s2_coalesced-float32-tn]",
        "test_launch[s2_coalesced]",
    ]
    climbed = ladders.cuda_ladder("out", found)
    assert [row.rung for row in climbed.rows if row.entries] == ["s2_coalesced", "s3_shared_tile"]
    assert climbed.sizes == [32, 40]
    assert "rung s10_hopper needs another GPU" in " ".join(done.stdout.split())
    table = done.stdout[done.stdout.index("The CUDA ladder against torch.matmul") :]
    assert "s3_shared_tile      float32" in table
    assert "s8_warp_tile        not measured" in table
    assert found["suites"]["bench_cuda"].startswith("The CUDA ladders on a GPU")


BROKEN = """
from tests.helpers.emulated_gpu import EmulatedGpu, install
from minidist.cli.commands import main

class Broken(EmulatedGpu):
    def wait(self):
        super().wait()
        if self.waits > 4:
            raise RuntimeError("an illegal memory access\\nmore of it")

install(Broken())
main()
"""


def test_a_gpu_that_breaks_ends_the_run_and_what_was_measured_is_kept(tmp_path):
    out = tmp_path / "out.json"
    done = minidist(["-c", BROKEN], "--out", str(out), "-k", "s2_coalesced and not launch")
    assert done.returncode == 1
    # Each waits for both checks, before it is timed, and when it is over.
    assert [entry["name"] for entry in results.load(out)["benchmarks"]] == [
        "test_rung[s2_coalesced-float32-32]"
    ]
    said = " ".join((done.stdout + done.stderr).split())
    assert "test_rung[s2_coalesced-float32-40] left the GPU unusable (an illegal memory access)" in said
    assert "skipped all later benchmarks" in said
    assert "leave it out with -k" in said


STUBBORN = """
import ctypes, sys
from tests.helpers.emulated_gpu import EmulatedGpu, install
from minidist.benchmarks.harness.cuda.one_rung import OneRungAtATime
from minidist.cli.commands import main

if "--one-process" in sys.argv and any(word.startswith("s9_") for word in sys.argv):
    ctypes.PyDLL(None).sleep(600)  # as in a driver's call: no signal reaches Python
measure = OneRungAtATime.measure_one
OneRungAtATime.measure_one = lambda self, rung, limit: measure(self, rung, 1 if rung[:2] == "s9" else limit)
install(EmulatedGpu())
main()
"""


@pytest.mark.deep
def test_a_rung_that_never_ends_is_killed_and_the_next_is_measured(tmp_path):
    out = tmp_path / "out.json"
    some = "(s9_tensor_core and tf32 and 40) or (s2_coalesced and 40)"
    done = minidist(["-c", STUBBORN], "--out", str(out), "-k", f"({some}) and test_rung", "--json")
    assert done.returncode == 1
    assert [entry["name"] for entry in results.load(out)["benchmarks"]] == [
        "test_rung[s2_coalesced-float32-40]"
    ]
    said = json.loads(done.stdout)
    assert said["failed"] == ["s9_tensor_core: no end after 1.00 s, so its process was killed"]
    assert (said["measured"], said["suites"]) == (1, ["bench_cuda"])


def test_the_best_rung_comes_first_and_parts_make_up_the_ladder():
    names = [f"test_rung[{rung}-float32-32]" for rung in RUNGS]
    assert one_rung.of_part(names, (1, 1)) == list(reversed(RUNGS))
    for parts in (2, 3, 4):
        cut = [one_rung.of_part(names, (i, parts)) for i in range(1, parts + 1)]
        assert list(itertools.chain(*cut)) == list(reversed(RUNGS))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert one_rung.of_part(names[:2], (1, 1)) == ["s2_coalesced", "s1_naive"]  # and not s10


def test_a_kernel_that_never_ends_is_noticed_before_its_result_is_read(bench):
    class Hanging(KnownGpu):
        def wait(self):
            raise RuntimeError("the GPU has not finished in 30 s")

    gpu, read = Hanging(), []
    a, b, c = bench.Operands(gpu, (16, 16, 16), "float32", seed=0).next()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_check, "assert_product", lambda *_, **__: read.append(1))
        with pytest.raises(RuntimeError, match="not finished"):
            cuda_check.check_rung(Step(gpu), "float32", a, b, c, gpu.wait, "", 0)
    assert read == []
