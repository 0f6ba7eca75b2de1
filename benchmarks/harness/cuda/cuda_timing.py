"""Time two matrix products in turns on a GPU, for the CUDA ladder.

The GPU's own clock times them (`kernels.measure.gpu_timer`); the time that Python needs to launch a kernel is
measured separately. Operands are random, since zeros switch fewer transistors and let the clock rise. The
sets of operands fill the L2 cache twice, and each call takes the next set, so that none finds its operands in
the cache.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from minidist.benchmarks.harness.cuda.cuda_check import check_rung
from minidist.benchmarks.harness.turns import measure_pair
from minidist.kernels.cuda.runtime import device
from minidist.kernels.measure.gpu_timer import GpuTimer
from minidist.kernels.measure.peaks import Roof

if TYPE_CHECKING:
    from minidist.kernels.cuda.cuda_rung import CudaRung, CudaStep

SIZES = (1024, 2048, 4096, 8192, 16384)  # n of n x n times n x n
TRANSPOSED_SIZE = 4096
HEADS, POSITIONS = 32, (1024, 4096)  # of attention
TINY = 64  # a product that runs in less time than Python takes to launch it
TURN = 1e-3  # minimal seconds of a turn
MOST_CALLS = 64  # in a turn; a GPU's queue takes about a thousand launches before Python has to wait
MOST_ROUNDS, FEWEST_ROUNDS, FEWEST_SLOW_ROUNDS = 50, 7, 3
SLOW = 0.05  # a turn longer than these seconds allows FEWEST_SLOW_ROUNDS
MOST_SETS = 64
HOST_CALLS = 100  # launches that are timed together
ORDERS = ("nn", "nt", "tn", "tt")  # of a and b, in BLAS's letters: n as it is, t transposed

Program = Callable[[], object]


class Gpu(GpuTimer):
    """The GPU that is current in torch. Tests use main memory and the emulator instead."""

    def l2(self) -> int:
        """Return the bytes of the L2 cache, which operands must not stay in."""
        from minidist.kernels.cuda.runtime import gpu_driver as driver

        return driver.get().here().l2

    def free(self) -> int:
        """Return the free bytes, including those in torch's own cache."""
        self._cuda.empty_cache()
        size: int = self._cuda.mem_get_info()[0]
        return size

    @functools.cached_property
    def roof(self) -> Roof | None:
        """This GPU's peaks, which each process measures once, or None if they can't be measured."""
        from minidist.kernels.measure import gpu_peaks

        with contextlib.suppress(RuntimeError):  # other processes may have filled the memory
            return gpu_peaks.roof()
        return None

    def refuses(self, step: CudaStep) -> str | None:
        """Return the reason why a rung does not run here, or None if this GPU has its instructions."""
        name, capability = self._cuda.get_device_name(), self._cuda.get_device_capability()
        try:
            device.architecture_on(step.architecture, capability, f"rung {step.name}", name)
        except RuntimeError as error:
            return str(error)
        return None


@functools.cache
def gpu() -> Gpu:
    """Return this process's GPU; call it only if `unavailable()` is None."""
    import torch

    return Gpu(torch)


def unavailable() -> str | None:
    """Return in one sentence why the CUDA ladder can't be measured here, or None if it can."""
    purpose = (
        "with a GPU, `minidist bench cuda` checks each rung of the CUDA ladder against float64 and times it "
        "against torch.matmul; without one, the tests check the rungs in an emulator"
    )
    try:
        where = device.backend()
        if where == "gpu":
            device.require_compiler()
    except (ImportError, RuntimeError, ValueError) as error:
        return str(error)
    if where != "gpu":
        asked = os.environ.get(device.VARIABLE)
        why = (
            f"{device.VARIABLE} is {asked!r}, and this measures a GPU" if asked else "there is no NVIDIA GPU"
        )
        return f"{why}: {purpose}"
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} can't use this machine's GPU, but the comparison needs it to: "
            "run `minidist doctor` to see why"
        )
    return None


class Operands:
    """Sets of a (m, k), b (k, n) and c (m, n) that together fill the L2 cache twice."""

    def __init__(
        self, gpu: Gpu, shape: tuple[int, int, int], dtype: str, order: str = "nn", *, seed: int
    ) -> None:
        """Draw magnitudes in [0.5, 1.5) with random signs; `order` is one of ORDERS.

        Raises MemoryError if the sets, with room to check a product, don't fit the GPU's free memory.
        """
        import torch

        m, n, k = shape
        kind = getattr(torch, dtype)
        size = (m * k + k * n + m * n) * kind.itemsize
        count = min(MOST_SETS, 2 * gpu.l2() // size + 1)
        # Drawing needs two matrices of float32, checking needs four of float64.
        room = 4 * 8 * max(m * k, k * n)
        if count * size + room > gpu.free():
            raise MemoryError(
                f"{m} x {n} x {k} in {dtype} takes {(count * size + room) / 2**30:.1f} GiB, more than is free"
            )
        self.seed = seed
        generator = torch.Generator(gpu.device).manual_seed(seed)
        half = torch.tensor(0.5, device=gpu.device)

        def draw(rows: int, columns: int, transposed: bool) -> Any:
            if transposed:
                return draw(columns, rows, False).T
            x = torch.empty(rows, columns, device=gpu.device).uniform_(-1, 1, generator=generator)
            return x.add_(torch.copysign(half, x)).to(kind)

        self.sets = [
            (
                draw(m, k, order[0] == "t"),
                draw(k, n, order[1] == "t"),
                torch.empty(m, n, dtype=kind, device=gpu.device),
            )
            for _ in range(count)
        ]
        self._turn = itertools.cycle(self.sets)

    def next(self) -> tuple[Any, Any, Any]:
        """Return a, b and c of the next set."""
        return next(self._turn)


@contextlib.contextmanager
def float32_as(kind: str) -> Iterator[None]:
    """Let torch multiply float32 matrices in TF32 if `kind` is "tf32", and in float32 otherwise."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def time_on_gpu(gpu: Gpu, ours: Program, peer: Program, budget: float) -> tuple[list[float], list[float]]:
    """Time two programs in turns by the GPU's own clock; return the seconds of a call in each turn, for both.

    A turn calls a program often enough to fill a millisecond. The number of rounds fits into `budget`
    seconds, between 7 and 50, or at least 3 if a call takes long. Both programs must have been called before.
    """
    calls, turn = [], 0.0
    for program in (ours, peer):
        once = gpu.seconds(program)
        calls.append(max(1, min(MOST_CALLS, round(TURN / once))) if once > 0 else MOST_CALLS)
        turn += once * calls[-1]
    fewest = FEWEST_SLOW_ROUNDS if turn > SLOW else FEWEST_ROUNDS
    rounds = max(fewest, min(MOST_ROUNDS, int(budget / max(turn, 1e-9))))
    return measure_pair(
        lambda: gpu.seconds(ours, calls[0]),
        lambda: gpu.seconds(peer, calls[1]),
        rounds=rounds,
        warmup_rounds=1 if turn < SLOW else 0,
    )


def beside_torch(
    gpu: Gpu, rung: CudaRung, kind: str, operands: Operands, budget: float
) -> tuple[tuple[list[float], list[float]], float]:
    """Check a rung, and time it in turns with torch.matmul; return both's seconds, and the largest error."""

    def ours() -> None:
        a, b, c = operands.next()
        rung.matmul(a, b, out=c)

    def check() -> float:
        return check_rung(rung, kind, *operands.next(), gpu.wait, f"seed={operands.seed}", operands.seed)

    def peer() -> None:
        torch_matmul(*operands.next())

    with float32_as(kind):
        worst = check()
        peer()
        gpu.wait()
        seconds = time_on_gpu(gpu, ours, peer, budget)
        ours()  # check again after launches that followed each other closely
        return seconds, max(worst, check())


def torch_matmul(a: Any, b: Any, c: Any) -> None:
    """Multiply with torch."""
    import torch

    torch.matmul(a, b, out=c)


def host_seconds(gpu: Gpu, program: Program, calls: int = HOST_CALLS) -> float:
    """Return the seconds that Python takes for one of `calls` calls, without waiting for the GPU."""
    gpu.wait()
    start = time.perf_counter()
    for _ in range(calls):
        program()
    took = time.perf_counter() - start
    gpu.wait()
    return took / calls
