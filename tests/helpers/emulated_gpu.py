"""A GPU for the benchmarks of the CUDA ladder: main memory, the emulator, the CPU's clock.

    python tests/helpers/emulated_gpu.py bench cuda -k s2_coalesced --out /tmp/results.json

runs the command `minidist` with it in place of a GPU, at small sizes. Its times are the emulator's.
"""

import os
import sys
import time

from minidist.benchmarks.harness.cuda import cuda_timing, one_rung
from minidist.kernels.cuda.runtime import device
from minidist.kernels.measure.peaks import Roof

ROOF = Roof("a GPU", {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12, "float16": 800e12}, 4e12)


class EmulatedGpu:
    """Stands for `cuda_timing.Gpu`."""

    device = "cpu"

    def __init__(self, l2=30_000, free=2**40, roof=ROOF, refused=()):
        self._l2, self._free, self.roof, self.refused = l2, free, roof, refused
        self.waits = 0

    def l2(self):
        return self._l2

    def free(self):
        return self._free

    def refuses(self, step):
        return f"rung {step.name} needs another GPU" if step.name in self.refused else None

    def wait(self):
        self.waits += 1

    def seconds(self, program, calls=1):
        start = time.perf_counter()
        for _ in range(calls):
            program()
        return (time.perf_counter() - start) / calls


def install(gpu):
    """Let this process measure on it."""
    os.environ[device.VARIABLE] = "emulator"
    cuda_timing.unavailable = lambda: None
    cuda_timing.gpu = lambda: gpu
    cuda_timing.SIZES, cuda_timing.TRANSPOSED_SIZE = (32, 40), 40
    cuda_timing.TINY, cuda_timing.HOST_CALLS = 16, 2
    if "bench" in sys.orig_argv:  # the process of a rung has to have this GPU too
        words = sys.orig_argv[1 : sys.orig_argv.index("bench")]
        one_rung.PROGRAM = (sys.executable, *words)
    cuda_timing.MOST_ROUNDS, cuda_timing.FEWEST_ROUNDS, cuda_timing.MOST_CALLS = 3, 3, 2


if __name__ == "__main__":
    from minidist.cli.commands import main

    install(EmulatedGpu(refused=("s10_hopper",)))
    main()
