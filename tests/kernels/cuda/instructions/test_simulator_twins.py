"""Rungs 1 to 8 under Numba's own simulator, which runs their Python source thread by thread.

It is slow, and so the sizes are tiny. NUMBA_ENABLE_CUDASIM is read when Numba is imported: hence the process.
"""

import pytest

from minidist.kernels.cuda import RUNGS
from tests.helpers.fresh_python import output_of

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

CODE = """
import numpy as np
from minidist.kernels.measure import harness
from minidist.kernels.cuda import CUDA_LADDER
from minidist.kernels.cuda.runtime import device

assert device.backend() == "simulator"
rng = np.random.default_rng()
for step in CUDA_LADDER:
    a, b = harness.inputs(3, 5, 9, step.dtypes[0], seed=step.number)
    # With a pitch that is more than a row; rungs that are compiled for an order get the other one.
    out = np.full((8, 3), np.nan, a.dtype)[:5].T
    views = np.pad(a, 1)[1:-1, 1:-1], np.pad(b, 1)[1:-1, 1:-1]
    x, y = views if step.number < 6 else (np.asfortranarray(a), np.asfortranarray(b))
    try:
        step.matmul(x, y, out=out)
    except RuntimeError as error:
        assert "\\n" not in str(error)
        print("refused", error)
        continue
    harness.assert_product(out, a, b, step.name)
    for sizes in [(0, 5, 2), (3, 0, 2), (3, 5, 0), (1, 1, 1)]:
        harness.check(step, *sizes, step.dtypes[-1], rng)
    print("checked", step.name)
"""


@pytest.mark.deep
def test_the_first_eight_rungs_run_in_the_simulator_and_the_others_say_what_to_do():
    lines = output_of(CODE, NUMBA_ENABLE_CUDASIM="1").splitlines()
    assert lines[:8] == [f"checked {name}" for name in RUNGS[:8]]
    for name, line in zip(RUNGS[8:], lines[8:], strict=True):
        assert line.startswith("refused ")
        assert f"rung {name} uses instructions that Numba's simulator can't run" in line
        assert "unset NUMBA_ENABLE_CUDASIM" in line
