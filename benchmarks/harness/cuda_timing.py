"""Where the CUDA ladder is measured, on which operands, and how two products are timed there in turn.

The GPU's own clock times them (`kernels.gpu_timer`): what Python needs to launch a kernel is a figure of its
own. Operands are random, since zeros switch fewer transistors and let the clock rise, and each call takes
the next of as many sets as fill the L2 cache twice, so that none finds its operands there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from minidist.benchmarks.harness.turns import measure_turns
from minidist.kernels.cuda.runtime import device
from minidist.kernels.measure.gpu_timer import GpuTimer
from minidist.kernels.measure.peaks import Roof

if TYPE_CHECKING:
    from minidist.kernels.cuda.rung import CudaRung

SIZES = (1024, 2048, 4096, 8192, 16384)  # n of n x n times n x n
TRANSPOSED_SIZE = 4096
TINY = 64  # of a product that takes a GPU less time than Python takes to launch it
TURN = 1e-3  # seconds that a turn takes at least
MOST_CALLS = 64  # in a turn; a GPU's queue takes about a thousand launches before Python has to wait
MOST_ROUNDS, FEWEST_ROUNDS, FEWEST_SLOW_ROUNDS = 50, 7, 3
SLOW = 0.05  # seconds of a product from which on the fewest rounds are for slow ones
MOST_SETS = 64
HOST_CALLS = 100  # whose launches are timed together
ORDERS = ("nn", "nt", "tn", "tt")  # of a and b: n as they are, t transposed, as BLAS calls them

Program = Callable[[], object]


class Gpu(Protocol):
    """What the benchmarks need of a GPU. Tests put main memory and the emulator in its place."""

    device: str  # where torch makes tensors

    def l2(self) -> int:
        """Bytes of the cache that operands shall not be found in."""

    def free(self) -> int:
        """Bytes of memory that tensors may take."""

    def roof(self) -> Roof | None:
        """The peaks that were measured now; None where they can't be."""

    def refuses(self, step: CudaRung) -> str | None:
        """Why a rung does not run on it; None where it does."""

    def wait(self) -> None:
        """Return when all is done that was started."""

    def seconds(self, program: Program, calls: int = 1) -> float:
        """The seconds of one call, from `calls` of them."""


class TorchGpu(GpuTimer):
    """torch's current GPU."""

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self._torch = torch

    def l2(self) -> int:
        """Bytes of the L2 cache."""
        from minidist.kernels.cuda.runtime import gpu_driver as driver

        current = driver.get()
        return current.properties(current.current()).l2

    def free(self) -> int:
        """Bytes that are free, those that torch keeps for itself with them."""
        self._cuda.empty_cache()
        size: int = self._cuda.mem_get_info()[0]
        return size

    @functools.cached_property
    def _roof(self) -> Roof | None:
        from minidist.kernels.measure import gpu_peaks

        with contextlib.suppress(RuntimeError):  # memory that others fill
            return gpu_peaks.roof()
        return None

    def roof(self) -> Roof | None:
        """The peaks of this GPU, measured once in a process."""
        return self._roof

    def refuses(self, step: CudaRung) -> str | None:
        """Why a rung does not run on it: instructions that only other GPUs have."""
        try:
            device.architecture_on(
                step.architecture,
                self._cuda.get_device_capability(),
                f"rung {step.name}",
                self._cuda.get_device_name(),
            )
        except RuntimeError as error:
            return str(error)
        return None


@functools.cache
def gpu() -> Gpu:
    """The GPU of this process, where `unavailable` knows no reason against it."""
    import torch

    return TorchGpu(torch)


def unavailable() -> str | None:
    """Why the CUDA ladder can't be measured here, as one sentence; None where it can be."""
    purpose = (
        "on one, `minidist bench cuda` checks each rung of the CUDA ladder against float64 and times it "
        "beside torch.matmul; without one, the tests check the rungs in an emulator"
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
            f"torch {torch.__version__} can't use this machine's GPU, which it has to be compared on: "
            "`minidist doctor` says why"
        )
    return None


class Operands:
    """Sets of a (m, k), b (k, n) and c (m, n), more than fill a cache twice; `next()` gives the next set."""

    def __init__(
        self, gpu: Gpu, shape: tuple[int, int, int], dtype: str, order: str = "nn", *, seed: int
    ) -> None:
        """Draw them: magnitudes in [0.5, 1.5), random signs. `order` is one of ORDERS.

        Raises MemoryError where they don't fit the GPU's free memory, with room to check a product.
        """
        import torch

        m, n, k = shape
        kind = getattr(torch, dtype)
        size = (m * k + k * n + m * n) * kind.itemsize
        count = min(MOST_SETS, 2 * gpu.l2() // size + 1)
        # Drawing takes two matrices of float32, checking four of float64.
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
        """Return a, b and c of the set whose turn it is."""
        return next(self._turn)


@contextlib.contextmanager
def float32_as(kind: str) -> Iterator[None]:
    """Let torch multiply float32 as TF32 where `kind` is "tf32", and as float32 otherwise."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def time_in_turns(gpu: Gpu, ours: Program, peer: Program, budget: float) -> tuple[list[float], list[float]]:
    """Time two programs in turn, A B A B, and return the GPU's seconds of a call in each turn, of both.

    In a turn a program is called as often as fills a millisecond. There are as many rounds as fit into
    `budget` seconds: 7 to 50, or 3 at least where a call takes long. Both programs have been called before.
    """
    calls, turn = [], 0.0
    for program in (ours, peer):
        once = gpu.seconds(program)
        calls.append(max(1, min(MOST_CALLS, round(TURN / once))) if once > 0 else MOST_CALLS)
        turn += once * calls[-1]
    fewest = FEWEST_SLOW_ROUNDS if turn > SLOW else FEWEST_ROUNDS
    rounds = max(fewest, min(MOST_ROUNDS, int(budget / max(turn, 1e-9))))
    return measure_turns(
        lambda: gpu.seconds(ours, calls[0]),
        lambda: gpu.seconds(peer, calls[1]),
        rounds=rounds,
        warmup_rounds=1 if turn < SLOW else 0,
    )


def host_seconds(gpu: Gpu, program: Program, calls: int = HOST_CALLS) -> float:
    """Return Python's seconds for one call, from `calls` of them, without waiting for the GPU."""
    gpu.wait()
    start = time.perf_counter()
    for _ in range(calls):
        program()
    took = time.perf_counter() - start
    gpu.wait()
    return took / calls
