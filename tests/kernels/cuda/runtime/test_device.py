"""Where kernels run, and what is said where they can't."""

import sys

import pytest

from minidist.kernels import CPU_LADDER, rung
from minidist.kernels.cuda import RUNGS
from minidist.kernels.cuda.runtime import device

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

import cuda.bindings.driver as real

from tests.helpers.fake_driver import FakeDriver

HAS_GPU = device.has_gpu.__wrapped__  # which remembers nothing


@pytest.mark.parametrize(
    ("named", "simulator", "found", "expected"),
    [
        (None, None, False, "emulator"),
        (None, None, True, "gpu"),
        (None, "0", False, "emulator"),
        ("emulator", None, True, "emulator"),
        ("gpu", None, True, "gpu"),
    ],
)
def test_the_back_end_is_chosen(monkeypatch, named, simulator, found, expected):
    for variable, value in ((device.VARIABLE, named), ("NUMBA_ENABLE_CUDASIM", simulator)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    monkeypatch.setattr(device, "has_gpu", lambda: found)
    assert device.backend() == expected


@pytest.mark.parametrize(
    ("named", "simulator", "words"),
    [
        ("cpu", "0", ["'cpu'", "gpu or emulator"]),
        ("emulator", "1", ["NUMBA_ENABLE_CUDASIM", "unset it"]),
        ("gpu", "0", ["no NVIDIA GPU"]),
    ],
)
def test_a_back_end_that_can_not_be_is_refused(monkeypatch, named, simulator, words):
    monkeypatch.setenv(device.VARIABLE, named)
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", simulator)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        device.backend()
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


def test_an_old_driver_is_named_with_its_remedy():
    device.check_driver(13000, 13)
    device.check_driver(13010, 12)
    with pytest.raises(RuntimeError, match=r"CUDA 12\.8.*CUDA 13.*580.*numba-cuda\[cu12\].*emulator"):
        device.check_driver(12080, 13)


def test_a_gpu_is_found_by_what_its_driver_says(monkeypatch):
    def answers(driver):
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        return HAS_GPU()

    assert answers(FakeDriver())
    assert not answers(FakeDriver(count=0))
    broken = FakeDriver()
    broken.fails["cuInit"] = real.CUresult.CUDA_ERROR_NO_DEVICE
    assert not answers(broken)
    with pytest.raises(RuntimeError, match=r"CUDA 12\.9"):
        answers(FakeDriver(version=12090))
    assert not answers(None)  # no module


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"numba-cuda.*pip install 'minidist\[cuda\]'"):
        rung(RUNGS[0])
    assert rung("s1_python_loops") is CPU_LADDER[0]


def test_a_missing_compiler_is_named(monkeypatch):
    import cuda.pathfinder

    def missing(name):
        raise cuda.pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(ImportError, match=r"nvvm, which was not found: pip install"):
        device.require_compiler.__wrapped__()


@pytest.mark.parametrize(
    ("needed", "has", "expected"),
    [
        ("sm_75", (7, 5), "sm_75"),
        ("sm_80", (8, 9), "sm_89"),
        ("sm_80", (12, 0), "sm_120"),
        ("sm_90a", (9, 0), "sm_90a"),
        ("sm_80", (7, 5), r"kernel k needs compute capability 8\.0.*Tesla T4 has compute capability 7\.5"),
        ("sm_90a", (8, 0), r"only compute capability 9\.0 has.*8\.0"),
        ("sm_90a", (10, 0), r"only compute capability 9\.0 has.*10\.0"),
    ],
)
def test_the_architecture_of_a_gpu(needed, has, expected):
    if expected.startswith("sm_"):
        assert device.architecture_on(needed, has, "kernel k", "Tesla T4") == expected
    else:
        with pytest.raises(RuntimeError, match=expected):
            device.architecture_on(needed, has, "kernel k", "Tesla T4")
