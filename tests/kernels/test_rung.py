"""What every rung has from `Rung`: its checks, sizes of 0, `out`; and finding a rung by name."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from minidist.kernels import ATTENTION_LADDER, CPU_LADDER, Rung, rung
from minidist.kernels.rung import empty, meets_itself
from tests.helpers.fresh_python import output_of
from tests.helpers.products import skip_unless_it_runs
from tests.helpers.refusals import refuses


def numpy_product(a, b, out):
    np.matmul(a, b, out=out)


STEP = Rung(1, "s1_numpy", "cpu", "NumPy's own product.", ("float32", "float64"), numpy_product)


def test_result_is_new_or_out():
    rng = np.random.default_rng()
    a, b = rng.standard_normal((3, 4)), rng.standard_normal((4, 5))
    c = STEP.matmul(a, b)
    assert c.flags.c_contiguous
    np.testing.assert_allclose(c, a @ b)
    out = np.full((3, 5), np.nan)
    assert STEP.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out, c)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 2), (2, 3, 0), (0, 0, 0), (2, 0, 3)])
def test_empty_products_never_reach_the_kernel(m, k, n):
    def refuse(a, b, out):
        raise AssertionError("called")

    step = Rung(1, "s1_refuses", "cpu", "", ("float64",), refuse)
    out = np.full((m, n), np.nan)
    assert step.matmul(np.ones((m, k)), np.ones((k, n)), out=out) is out
    np.testing.assert_array_equal(out, np.zeros((m, n)))


def test_an_unaligned_view_is_copied_and_a_subclass_is_a_plain_array_to_the_kernel():
    seen = []

    def record(a, b, out):
        seen.extend((a, b))
        np.matmul(a, b, out=out)

    packed = np.zeros((3, 3), dtype=[("flag", "i1"), ("x", "f8")])
    packed["x"] = np.arange(9).reshape(3, 3)
    assert not packed["x"].flags.aligned
    plain = np.ones((3, 2))
    c = Rung(1, "s1_records", "cpu", "", ("float64",), record).matmul(packed["x"], plain.view(np.matrix))
    np.testing.assert_array_equal(c, np.arange(9).reshape(3, 3) @ plain)
    assert seen[0].flags.aligned
    assert [type(x) for x in seen] == [np.ndarray, np.ndarray]
    assert np.shares_memory(seen[1], plain)


ONES = np.ones((2, 3))


def read_only():
    out = np.zeros((2, 2))
    out.flags.writeable = False
    return out


def unaligned():
    return np.zeros((2, 2), dtype=[("flag", "i1"), ("x", "f8")])["x"]


test_wrong_arguments_are_named_with_their_values = refuses(
    lambda given: STEP.matmul(*given),
    ((ONES, ONES, None), ["(2, 3)", "do not multiply"]),
    ((ONES, np.ones((4, 5)), None), ["(2, 3)", "(4, 5)", "(3)", "(4)"]),
    ((np.ones(3), ONES, None), ["a has 1 dimension", "(3,)", "reshape"]),
    ((ONES, np.ones((3, 1, 1)), None), ["b has 3 dimensions", "(3, 1, 1)"]),
    ((ONES.astype("f4"), ONES.T, None), TypeError, ["float32", "float64", "astype"]),
    ((ONES.astype(int), ONES.T, None), TypeError, ["a has dtype int64", "s1_numpy", "float32 or float64"]),
    ((ONES, ONES.T.astype("c16"), None), TypeError, ["b has dtype complex128", "float32 or float64"]),
    ((ONES.astype(">f8"), ONES.T, None), TypeError, ["a has dtype >f8", "float64"]),
    ((ONES.tolist(), ONES.T, None), TypeError, ["a is a list", "numpy.asarray"]),
    ((ONES, None, None), TypeError, ["b is a NoneType"]),
    (
        (torch.ones(2, 3), ONES.T, None),
        TypeError,
        ["a is a torch tensor", "tensor.numpy()", "minidist.model.matmul"],
    ),
    ((ONES, torch.nn.Parameter(torch.ones(3, 2)), None), TypeError, ["b is a torch tensor"]),
    ((ONES, ONES.T, np.zeros((2, 3))), ["out has shape (2, 3)", "(2, 2)"]),
    ((ONES, ONES.T, np.zeros(4)), ["out has shape (4,)", "(2, 2)"]),
    ((ONES, ONES.T, np.zeros((2, 2), "f4")), TypeError, ["out is float32", "float64"]),
    ((ONES, ONES.T, read_only()), ["read-only"]),
    ((ONES, ONES.T, unaligned()), ["not aligned"]),
    ((ONES, ONES.T, torch.zeros(1, 2).double().expand(2, 2).numpy()), ["same memory"]),
    ((ONES, ONES.T, as_strided(np.zeros(3), (2, 2), (8, 8))), ["same memory"]),
    ((ONES, ONES.T, [[0.0, 0.0], [0.0, 0.0]]), TypeError, ["out is a list"]),
    ((ONES, ONES.T, torch.zeros(2, 2)), TypeError, ["out is a torch tensor"]),
    literal=True,
)


def test_a_matrix_that_meets_itself_is_known():
    for rows, columns, down, right in itertools.product(range(5), range(5), range(-6, 7), range(-6, 7)):
        places = [i * down + j * right for i in range(rows) for j in range(columns)]
        found = meets_itself((rows, columns), (down, right))
        assert found == (len({*places}) < len(places)), (rows, columns, down, right)


@pytest.mark.parametrize("step", CPU_LADDER, ids=lambda step: step.name)
def test_no_rung_mixes_tensors_with_arrays(step):
    """All say it in one sentence, as those of the CUDA ladder do."""
    skip_unless_it_runs(step)
    array, tensor = np.ones((2, 2), "f"), torch.ones(2, 2)
    for a, b, (plain, other) in ((array, tensor, "ab"), (tensor, array, "ba")):
        said = f"{plain} is a ndarray and {other} is a torch tensor"
        with pytest.raises(TypeError, match=rf"{said}: pass arrays alone, with .*, or tensors alone"):
            step.matmul(a, b)


def test_out_may_lie_between_the_inputs_but_not_on_them():
    memory = np.random.default_rng().standard_normal((4, 6))
    a, b, between = memory[:, ::2][:3, :3], np.eye(3), memory[:, 1::2][:3, :3]
    before = a.copy()
    STEP.matmul(a, b, out=between)  # the same bounds in memory, and no element in common
    np.testing.assert_array_equal(between, before)
    np.testing.assert_array_equal(a, before)
    with pytest.raises(ValueError, match="out shares memory with a"):
        STEP.matmul(a, b, out=memory[1:4, 2:5])
    with pytest.raises(ValueError, match="out shares memory with b"):
        STEP.matmul(b, a, out=a)


def test_a_device_that_does_not_exist_is_refused_and_a_copy_of_a_rungs_file_has_no_number():
    with pytest.raises(ValueError, match=r"device is 'gpu'.*'cuda'"):
        Rung(1, "s1", "gpu", "", ("float32",), numpy_product)
    copied = Rung.of_file("mine.naive", idea="", dtypes=("float32",), compute=numpy_product)
    assert (copied.number, copied.name, copied.device) == (0, "naive", "cpu")


def test_a_rung_travels_to_other_processes_and_a_copied_models_rung_is_the_ladders():
    for step in (*CPU_LADDER, *ATTENTION_LADDER):
        assert pickle.loads(pickle.dumps(step)) == copy.deepcopy(step) == step


@pytest.mark.parametrize("asked", ["s4_loop_order", "s4", "4", 4])
def test_rung_is_found_by_name_and_number(asked):
    assert rung(asked) is CPU_LADDER[3]
    assert rung("s1_numpy", ladder=[STEP]) is STEP  # in the ladder given


def test_unknown_rung_names_the_nearest():
    with pytest.raises(ValueError, match=r"'s4_loop_ordr'.*mean s4_loop_order\?.* s1_python_loops, s2_"):
        rung("s4_loop_ordr")
    with pytest.raises(ValueError, match="unknown rung '99': the ladder is s1_python_loops"):
        rung(99)


def test_importing_the_ladder_neither_imports_numba_nor_compiles():
    code = (
        "import sys, minidist.kernels; print([m for m in ('numba', 'llvmlite', 'scipy') if m in sys.modules])"
    )
    assert output_of(code) == "[]"


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 5), (64, 64)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_new_results_start_on_a_cache_line(shape, dtype):
    for _ in range(8):
        fresh = empty(*shape, dtype)
        assert (fresh.shape, fresh.dtype) == (shape, np.dtype(dtype))
        assert fresh.size == 0 or fresh.ctypes.data % 64 == 0
        assert fresh.flags.c_contiguous
        assert fresh.flags.writeable
