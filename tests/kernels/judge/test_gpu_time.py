"""The time on a GPU: launches as they were recorded, on a driver whose kernels run in the emulator."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from minidist.kernels.cuda.runtime import compiler, device
from minidist.kernels.judge import gpu_time, verdicts
from minidist.kernels.measure import gpu_timer
from tests.helpers import warm_python
from tests.helpers.fake_driver import FakeDriver, install
from tests.kernels.measure.test_points import Timer

TEXT = """
import numpy as np
from numba import cuda
from minidist.kernels.emulator import launch

@cuda.jit
def kernel(pair, factor, n, out):
    j, i = cuda.grid(2)
    if i < n and j < pair[0].shape[0]:
        out[i, j] = pair[0][j, i] * factor

def transpose(a, out):
    m, n = a.shape
    launch(kernel, (-(-m // 16), -(-n // 8)), (16, 8), (a, out), np.float32(1), n, out)
"""
MATRIX = SimpleNamespace(ndim=2, dtype="float32")
TYPES = (MATRIX, MATRIX, "float32", "int64", MATRIX)


@pytest.mark.parametrize(("capability", "seconds"), [((9, 0), 1e-6), ((8, 0), None)])
def test_a_gpu_gets_what_the_emulator_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], seconds: float | None
) -> None:
    driver = FakeDriver(capability)
    install(monkeypatch, driver)
    monkeypatch.delenv(device.VARIABLE, raising=False)
    monkeypatch.setattr(gpu_timer, "find", lambda: Timer([1e-6] * gpu_time.ROUNDS))
    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)
    link = compiler.link

    def linked(code: bytes, *how: Any) -> tuple[bytes, str]:
        cubin, log = link(code, *how)
        driver.kernels[cubin] = (code.decode(), 0, TYPES)
        return cubin, log

    monkeypatch.setattr(compiler, "link", linked)
    (tmp_path / "answer.py").write_text(TEXT)
    free: list[Any] = []
    monkeypatch.setattr(FakeDriver, "_cuMemFreeAsync", lambda self, address, stream: free.append(address))
    [verdict] = verdicts.judge(tmp_path / "answer.py")
    assert (verdict.wrong, verdict.seconds) == ("", seconds)
    if seconds is None:
        assert not driver.launches
        return
    assert {*driver.launches} == {((16, 32, 1), (16, 8, 1), 0, 1, 0)}
    assert len(driver.launches) == 1 + gpu_time.ROUNDS
    a, out = (
        memory[-address % 256 :][: 4 * 256 * 256].view(np.float32) for address, memory in _by_address(driver)
    )
    np.testing.assert_array_equal(out.reshape(256, 256), a.reshape(256, 256).T)


def _by_address(driver: FakeDriver) -> list[tuple[int, Any]]:
    """Each allocation with the address of its first byte, in the order in which they were made."""
    return [(memory.ctypes.data, memory) for memory in driver.memory.values()]
