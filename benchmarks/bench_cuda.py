"""The CUDA ladders on a GPU: each rung is checked against float64, then timed in turn with torch.

    minidist bench cuda                               under four minutes on one H200, and attention
    minidist bench cuda -k test_attention             attention's ladder alone
    minidist bench cuda --full                        longer rounds, and the slow rungs at larger sizes
    minidist bench cuda --full --part 1/2             the better half of the rungs, in less than ten minutes
    python -m minidist bench cuda --full --json --out results.json

Times are the GPU's own, from device events, on random operands that are not in its L2 cache. torch multiplies
float32 without TF32, except next to rung 9. A rung's sizes end where one product would take too long.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.mark import ParameterSet

from minidist import kernels
from minidist.benchmarks.harness import formats
from minidist.benchmarks.harness.cuda import cuda_timing
from minidist.benchmarks.harness.cuda.cuda_check import check_attention, check_rung, dtype_of, kind_of
from minidist.benchmarks.harness.cuda.cuda_timing import Gpu, Operands
from minidist.benchmarks.harness.turns import Benchmark, compared, measure_pair, record
from minidist.kernels.measure import attention_reference as attention
from minidist.kernels.measure import product_checks

if TYPE_CHECKING:
    from minidist.kernels.cuda.attention.cuda_attention_rung import CudaAttentionRung
    from minidist.kernels.cuda.cuda_rung import CudaRung, CudaStep

REASON = cuda_timing.unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

LADDER = kernels.CUDA_LADDER
GROUPS = {
    "float32": "CUDA ladder, float32",
    "tf32": "CUDA ladder, float32 as TF32",
    "float16": "CUDA ladder, float16",
    "bfloat16": "CUDA ladder, bfloat16",
    "float64": "CUDA ladder, float64",
}
LARGEST_FLOAT64 = 4096
# Seconds, in a quick run and in a full one: what one product may take, and how long a comparison goes on.
LONGEST = {False: 0.4, True: 2.5}
BUDGET = {False: 0.5, True: 3.0}
LAUNCH_ROUNDS = {False: 30, True: 100}
LAUNCH_GOAL = 15e-6  # seconds of Python for a launch, beyond those of torch.matmul
rates: dict[tuple[str, str], float] = {}  # FLOP/s of each rung in each kind of arithmetic, as last measured


def kinds(step: CudaRung) -> list[str]:
    """The kinds of arithmetic that a rung does: its dtypes, and "tf32" where it rounds float32 to TF32."""
    return [kind_of(step, dtype) for dtype in step.dtypes]


def cases() -> list[ParameterSet]:
    """Every rung in each of its kinds of arithmetic at each size; float64 on the last rung that has it."""
    doubles = [step for step in LADDER if "float64" in step.dtypes]
    return [
        pytest.param(step, kind, size, id=f"{step.name}-{kind}-{size}")
        for kind in GROUPS
        for step in (doubles[-1:] if kind == "float64" else LADDER)
        for size in cuda_timing.SIZES
        if kind in kinds(step) and (kind != "float64" or size <= LARGEST_FLOAT64)
    ]


def main_kinds(step: CudaRung) -> list[str]:
    """One kind of arithmetic for each rung, and also TF32."""
    return [kind for kind in ("float32", "tf32", "bfloat16") if kind in kinds(step)]


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU that is measured."""
    return cuda_timing.gpu()


@pytest.fixture(autouse=True)
def gpu_answers(request: pytest.FixtureRequest, gpu: Gpu) -> Iterator[None]:
    """Stop the run after a kernel has broken the GPU's context: nothing works in this process any more."""
    yield
    try:
        gpu.wait()
    except RuntimeError as error:
        lost = f"{request.node.name} left the GPU unusable ({str(error).partition(chr(10))[0]})"
        request.session.shouldfail = f"{lost}: leave it out with -k"
        pytest.fail(lost)


@pytest.mark.parametrize(("step", "kind", "size"), cases())
@compared("CUDA ladder")
def test_rung(benchmark: Benchmark, full: bool, gpu: Gpu, step: CudaRung, kind: str, size: int) -> None:
    """Square products of `size`: GFLOP/s, the share of torch.matmul's speed, and of the GPU's peak."""
    benchmark.group = GROUPS[kind]
    _beside_torch(benchmark, full, gpu, step, kind, size, "nn")
    benchmark.extra_info |= {
        "label": f"{step.name}, {size}",
        "series": f"{step.number} {step.name.partition('_')[2].replace('_', ' ')}",
    }


@pytest.mark.parametrize("order", ["nt", "tn"])
@pytest.mark.parametrize(
    ("step", "kind"),
    [pytest.param(step, kind, id=f"{step.name}-{kind}") for step in LADDER for kind in main_kinds(step)],
)
@compared(f"CUDA ladder, one operand transposed, n = {cuda_timing.TRANSPOSED_SIZE}")
def test_transposed(
    benchmark: Benchmark, full: bool, gpu: Gpu, step: CudaRung, kind: str, order: str
) -> None:
    """Products of a view whose columns lie one after another: b (nt), or a (tn)."""
    _beside_torch(benchmark, full, gpu, step, kind, cuda_timing.TRANSPOSED_SIZE, order)
    benchmark.extra_info |= {"label": f"{step.name}, {formats.kind_name(kind)}, {order}", "order": order}


@pytest.mark.parametrize("step", LADDER, ids=lambda step: step.name)
@compared("Launching a rung from Python")
def test_launch(benchmark: Benchmark, full: bool, gpu: Gpu, step: CudaRung) -> None:
    """Python's time to launch a product so small that the GPU is done first; nothing waits for the result."""
    _refuse(gpu, step)
    kind = main_kinds(step)[-1]
    n = cuda_timing.TINY
    operands = Operands(gpu, (n, n, n), dtype_of(kind), seed=secrets.randbits(63))
    a, b, c = operands.next()
    with cuda_timing.float32_as(kind):
        check_rung(step, kind, a, b, c, gpu.wait, f"seed={operands.seed}", operands.seed)
        ours, peer = (
            lambda: cuda_timing.host_seconds(gpu, lambda: step.matmul(a, b, out=c)),
            lambda: cuda_timing.host_seconds(gpu, lambda: cuda_timing.torch_matmul(a, b, c)),
        )
        seconds = measure_pair(ours, peer, rounds=LAUNCH_ROUNDS[full])
    record(benchmark, *seconds, "torch.matmul")
    if benchmark.disabled:
        return
    extra = benchmark.extra_info
    extra |= {
        "label": f"{step.name}, {formats.kind_name(kind)}, {n}",
        "rung": step.name,
        "dtype": kind,
        "beyond_peer": benchmark.stats.stats.median - extra["peer_median"],
        "goal": {"of": "beyond_peer", "below": LAUNCH_GOAL},
    }


@pytest.mark.parametrize("positions", cuda_timing.POSITIONS)
@pytest.mark.parametrize(
    ("step", "dtype", "causal", "backward"),
    [
        pytest.param(step, dtype, causal, backward, id="-".join([step.name, dtype, *named]))
        for step in kernels.CUDA_ATTENTION_LADDER
        for dtype in step.dtypes
        for causal in (False, True)
        for backward in (False, True)[: 1 + bool(step.gradients)]
        for named in [["causal"] * causal + ["backward"] * backward]
    ],
)
@compared(f"CUDA ladder of attention, {cuda_timing.HEADS} heads of 64")
def test_attention(
    benchmark: Benchmark,
    full: bool,
    gpu: Gpu,
    step: CudaAttentionRung,
    dtype: str,
    causal: bool,
    backward: bool,
    positions: int,
) -> None:
    """A rung beside torch's scaled_dot_product_attention, after a check of small sizes and of two heads."""
    import torch

    _refuse(gpu, step)
    check_attention(step, dtype, gpu.device)
    drawn = torch.randn(4, cuda_timing.HEADS, positions, 64, device=gpu.device)
    q, k, v, slope = drawn.to(getattr(torch, dtype))
    peers = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    torch_attention: Any = torch.nn.functional.scaled_dot_product_attention
    out, logs = step.forward(q, k, v, causal=causal)
    gpu.wait()  # with a limit; to read the result waits for ever if the kernel never ends
    exact = torch_attention(*(x[:2].double() for x in (q, k, v)), is_causal=causal)
    attention.assert_near([out[:2]], [exact.cpu().numpy()], dtype)
    graph = torch_attention(*peers, is_causal=causal)

    def ours() -> Any:
        if backward:
            return step.backward(q, k, v, out, logs, slope, causal=causal)
        return step.forward(q, k, v, causal=causal)

    def theirs() -> Any:
        if backward:
            return torch.autograd.grad(graph, peers, slope, retain_graph=True)
        return torch_attention(*peers, is_causal=causal)

    ours(), theirs()
    gpu.wait()
    record(
        benchmark, *cuda_timing.time_on_gpu(gpu, ours, theirs, BUDGET[full]), "scaled_dot_product_attention"
    )
    if not benchmark.disabled:
        size = (cuda_timing.HEADS,), positions, positions, 64
        benchmark.extra_info |= {
            "label": f"{step.name}, {dtype}, {positions}{', causal' * causal}{', backward' * backward}",
            "rung": step.name,
            "dtype": dtype,
            "gflops": attention.flops(size, causal, backward) / benchmark.stats.stats.median / 1e9,
        }


def _beside_torch(
    benchmark: Benchmark, full: bool, gpu: Gpu, step: CudaRung, kind: str, size: int, order: str
) -> None:
    """Check a rung's square product, time it in turns with torch's, and record the figures."""
    _refuse(gpu, step)
    expected = _expected_seconds(gpu, step, kind, size)
    if expected > LONGEST[full]:
        mode = "full" if full else "quick"
        pytest.skip(
            f"a product would take about {formats.seconds(expected)}, and in a {mode} run "
            f"{formats.seconds(LONGEST[full])} at most"
        )
    try:
        operands = Operands(gpu, (size,) * 3, dtype_of(kind), order, seed=secrets.randbits(63))
    except MemoryError as error:
        pytest.skip(str(error))

    seconds, worst = cuda_timing.beside_torch(gpu, step, kind, operands, BUDGET[full])
    record(benchmark, *seconds, "torch.matmul")
    if not benchmark.disabled:
        _enter(benchmark, gpu, step, kind, size)
        benchmark.extra_info["worst_error"] = worst


def _enter(benchmark: Benchmark, gpu: Gpu, step: CudaRung, kind: str, size: int) -> None:
    """Record what the times mean: FLOP/s, the share of torch's rate, and of the GPU's peak."""
    extra, work = benchmark.extra_info, product_checks.flops(size, size, size)
    rate = work / benchmark.stats.stats.median
    rates[step.name, kind] = rate
    extra |= {
        "rung": step.name,
        "dtype": kind,
        "size": size,
        "gflops": rate / 1e9,
        "peer_gflops": work / 1e9 / extra["peer_median"],
        "percent_of_peer": 100 / extra["ratio"],
    }
    roof = gpu.roof
    if roof is not None and kind in roof.flops:
        extra |= {
            "percent_of_gpu_peak": 100 * rate / roof.peak(kind),
            "peak_gflops": roof.peak(kind) / 1e9,
            "peak_gb_per_s": roof.bandwidth / 1e9,
        }


def _expected_seconds(gpu: Gpu, step: CudaRung, kind: str, size: int) -> float:
    """Seconds that a product will take, at the rate last seen or a small product's; 0 for small ones."""
    probed = cuda_timing.SIZES[:2][-1]
    if (step.name, kind) not in rates:
        if size <= probed:
            return 0.0
        a, b, c = Operands(gpu, (probed,) * 3, dtype_of(kind), seed=0).next()
        step.matmul(a, b, out=c)
        seconds = gpu.seconds(lambda: step.matmul(a, b, out=c))
        rates[step.name, kind] = product_checks.flops(probed, probed, probed) / seconds
    return product_checks.flops(size, size, size) / rates[step.name, kind]


def _refuse(gpu: Gpu, step: CudaStep) -> None:
    if reason := gpu.refuses(step):
        pytest.skip(reason)
