"""A CUDA rung as its callers see it: NumPy arrays and torch tensors, multiplied in the emulator."""

import pickle

import numpy as np
import pytest
import torch

from minidist.kernels import CPU_LADDER, rung
from minidist.kernels.cuda import RUNGS
from minidist.kernels.cuda.cuda_rung import CudaRung
from minidist.kernels.cuda.runtime.kernel import Kernel
from minidist.kernels.emulator import launch
from minidist.kernels.measure import product_checks
from tests.helpers.products import LAYOUTS, check_laid_out
from tests.helpers.refusals import refuses

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")

from tests.helpers.cuda_kernels import (  # noqa: F401
    COMPUTED,
    HALVES,
    STEP,
    compute,
    scaled,
    without_gpu,
)
from tests.helpers.fresh_python import output_of


def test_arguments_of_a_kernel_are_named_when_they_are_wrong():
    x = np.zeros(8, "f4")
    kernel = Kernel(scaled(2), threads=32)
    for given, kind, words in [
        ((x[::2], 4), TypeError, "argument 0 of scale is a 1-D array with gaps"),
        ((np.zeros((2, 2, 2), "f4"), 4), TypeError, "argument 0 of scale has 3 dimensions"),
        ((x, 2**31), ValueError, "argument 1 of scale is 2147483648.*int32"),
        ((x, 1.5), TypeError, "argument 1 of scale is a float"),
    ]:
        with pytest.raises(kind, match=words):
            kernel.launch((1,), *given)
        with pytest.raises(kind, match=words):
            launch(kernel, 1, 32, *given)
    x[:] = 1
    kernel.launch((1,), x, np.int64(5))
    np.testing.assert_array_equal(x, [2] * 5 + [1] * 3)


def test_a_rung_multiplies_any_layout_in_the_emulator():
    for layout in LAYOUTS:
        check_laid_out(STEP, (5, 6, 4), "float64", [layout] * 3, seed=1, read_only=True)
        check_laid_out(STEP, (1, 6, 1), "float32", [layout] * 3, seed=2)
    rng = np.random.default_rng()
    for sizes in [(0, 3, 2), (3, 0, 2), (3, 2, 0), (1, 1, 1), (3, 40, 2)]:
        product_checks.check(STEP, *sizes, "float32", rng)
    repeated = np.broadcast_to(np.float32([[1, 2, 3]]), (4, 3))
    np.testing.assert_allclose(STEP.matmul(repeated, repeated.T), repeated @ repeated.T)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_halves_of_numpy_and_torch_are_multiplied(dtype):
    rng = np.random.default_rng()
    for sizes in [(5, 7, 30), (1, 1, 1), (0, 2, 3), (2, 3, 0)]:
        product_checks.check(HALVES, *sizes, dtype, rng)
        if dtype != "float32":
            product_checks.check(HALVES, *sizes, dtype, rng, out_dtype="float32")
    kind = getattr(torch, dtype)
    a, b = torch.randn(5, 6).to(kind), torch.randn(4, 6).to(kind).T
    c = HALVES.matmul(a, b)
    assert c.dtype == kind
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2**-8, atol=1e-3)
    wide = torch.full((5, 4), torch.nan)
    assert HALVES.matmul(a, b, out=wide) is wide
    torch.testing.assert_close(wide, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_tensors_in_main_memory_are_used_in_place():
    memory = torch.randn(9, 12, dtype=torch.float64)
    a, b, out = memory[:3, :4], memory[4:8, 1:10:2], memory[:3, 5:10]
    expected = a @ b
    assert STEP.matmul(a, b, out=out) is out
    torch.testing.assert_close(out, expected)
    assert [a.data_ptr(), b.data_ptr(), out.data_ptr()] == COMPUTED
    assert STEP.matmul(a, b).is_contiguous()
    column = torch.zeros(5, 3, dtype=torch.float64).T
    STEP.matmul(a, b, out=column)
    torch.testing.assert_close(column, expected)
    for sizes in [(0, 3, 2), (3, 0, 2), (3, 2, 0)]:
        m, n, k = sizes
        out = torch.full((m, n), torch.nan)
        torch.testing.assert_close(
            STEP.matmul(torch.ones(m, k), torch.ones(k, n), out=out), torch.zeros(m, n)
        )
    expanded = torch.ones(1, 3).expand(4, 3)
    torch.testing.assert_close(STEP.matmul(expanded, expanded.T), torch.full((4, 4), 3.0))
    with torch.no_grad():
        parameter = torch.nn.Parameter(torch.ones(2, 2))
        torch.testing.assert_close(STEP.matmul(parameter, parameter), torch.full((2, 2), 2.0))


A, B = torch.ones(2, 3), torch.ones(3, 2)


test_wrong_arguments_are_named_with_their_values = refuses(
    lambda given: STEP.matmul(*given),
    (
        (A, B.numpy(), None),
        TypeError,
        ["b is a ndarray and a is a torch", "arrays alone", "torch.as_tensor(b)"],
    ),
    ((A.numpy(), B, None), TypeError, ["a is a ndarray and b is a torch tensor: pass arrays alone"]),
    ((A, A, None), ["(2, 3)", "do not multiply"]),
    ((A, B.double(), None), TypeError, ["torch.float32", "torch.float64"]),
    ((A.long(), B, None), TypeError, ["a has dtype int64", "s1_multiply", "float32 or float64"]),
    ((A[0], B, None), ["a has 1 dimension"]),
    ((A.to_sparse(), B, None), TypeError, ["to_dense"]),
    ((A, B.clone().requires_grad_(), None), TypeError, ["b requires a gradient", "minidist.model.matmul"]),
    ((A.to("meta"), B.to("meta"), None), ["a is on meta", "s1_multiply runs on cuda"]),
    ((A, B.to("meta"), None), TypeError, ["a is on cpu and b is on meta"]),
    ((A, B, np.zeros((2, 2), "f4")), TypeError, ["out is a ndarray"]),
    ((A, B, torch.zeros(2, 3)), ["out has shape (2, 3)", "(2, 2)"]),
    ((A, B, torch.zeros(2, 2).double()), TypeError, ["out is torch.float64"]),
    ((A, B, torch.zeros(2, 2, device="meta")), TypeError, ["out is torch.strided on meta"]),
    ((A, B, torch.zeros(1, 2).expand(2, 2)), ["one element stands for several"]),
    ((A, B, torch.zeros(3).as_strided((2, 2), (1, 1))), ["one element stands for several"]),
    ((A, B, torch.zeros(2, 2, requires_grad=True)), TypeError, ["out requires a gradient"]),
    ((A, B, A[:, :2]), ["out shares memory with a"]),
    ((A.numpy(), B.numpy(), torch.zeros(2, 2)), TypeError, ["out is a torch tensor"]),
    ((A.numpy().astype("f2"), B.numpy(), None), TypeError, ["a has dtype float16"]),
    literal=True,
)


def test_rungs_say_what_they_are():
    assert pickle.loads(pickle.dumps(STEP)) == STEP
    assert (STEP.sums("float64"), HALVES.sums("float16"), HALVES.sums("float32")) == (
        "float64",
        "float32",
        "float32",
    )
    with pytest.raises(ValueError, match="a CudaRung runs on 'cuda'"):
        CudaRung(1, "s1", "cpu", "", ("float32",), compute)
    with pytest.raises(ValueError, match="architecture is 'sm'"):
        CudaRung(1, "s1", "cuda", "", ("float32",), compute, architecture="sm")


def test_rungs_are_found_by_full_name_and_the_cpus_without_numba():
    assert rung("s2") is CPU_LADDER[1]
    found = rung(RUNGS[0])
    assert (found.device, found.name, found.number) == ("cuda", RUNGS[0], 1)
    with pytest.raises(ValueError, match=rf"mean {RUNGS[2]}\?"):
        rung(RUNGS[2][:-1])
    code = (
        "import sys; from minidist.kernels import CPU_LADDER, cuda, rung; rung('s4_loop_order')\n"
        "print([m for m in ('numba', 'torch', 'cuda') if m in sys.modules], hasattr(cuda, 'nothing'))"
    )
    assert output_of(code) == "[] False"


def test_numbas_simulator_steps_through_the_kernels_without_instructions_of_our_own():
    """NUMBA_ENABLE_CUDASIM is read when Numba is imported: hence the process."""
    code = (
        "import numpy as np\n"
        "from numba import cuda\n"
        "from minidist.kernels.cuda import s2_coalesced, s3_shared_tile\n"
        "a, b = np.ones((3, 5), np.float32), np.full((5, 4), 2, np.float32)\n"
        "for made in (s2_coalesced.KERNEL, s3_shared_tile.kernel('float32')):\n"
        "    c = np.zeros((3, 4), np.float32)\n"
        "    cuda.jit(made.function)[1, made.threads](a, b, c)\n"
        "    assert (c == 10).all(), c\n"
        "try:\n"
        "    s2_coalesced.RUNG.matmul(a, b)\n"
        "except RuntimeError as error:\n"
        "    assert 'for the ladder, unset it' in str(error)\n"
    )
    output_of(code, NUMBA_ENABLE_CUDASIM="1")
