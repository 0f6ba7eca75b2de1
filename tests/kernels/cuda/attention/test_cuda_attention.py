"""Every rung of the CUDA ladder of attention without a GPU: what it computes, its counts, its machine code.

That these checks can fail is in `../test_cuda_mutants.py`.
"""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")
pytest.importorskip("ml_dtypes")

from minidist.kernels import rung
from minidist.kernels.cuda import attention
from minidist.kernels.cuda.attention import CUDA_ATTENTION_LADDER
from minidist.kernels.emulator import profiled
from minidist.kernels.measure.attention_reference import assert_near, check, drawn, formula, least_bytes, run
from tests.helpers.cuda_kernels import events_of, without_gpu  # noqa: F401
from tests.helpers.machine_code import launches, shortcomings
from tests.helpers.products import check_ladder
from tests.helpers.refusals import refuses

LAST = CUDA_ATTENTION_LADDER[-1]
EVERY_DTYPE = [(step, dtype) for step in CUDA_ATTENTION_LADDER for dtype in step.dtypes]
every_rung = pytest.mark.parametrize("step", CUDA_ATTENTION_LADDER, ids=lambda step: step.name)
every_dtype = pytest.mark.parametrize(
    ("step", "dtype"), EVERY_DTYPE, ids=[f"{step.name}-{dtype}" for step, dtype in EVERY_DTYPE]
)
# What stands before, queries, keys, width: a single number, ragged, past a tile each way, the usual width.
SIZES = [((1,), 1, 1, 1), ((2, 3), 5, 3, 7), ((), 37, 150, 33), ((2,), 70, 70, 64), ((1,), 133, 133, 128)]
HEAD = ((1,), 128, 128, 64)


def test_the_ladder_holds_every_rung_file_in_order():
    check_ladder(attention, CUDA_ATTENTION_LADDER, lambda step: f"Attention in CUDA, rung {step.number}: ")
    for step in CUDA_ATTENTION_LADDER:
        assert rung(step.name, CUDA_ATTENTION_LADDER) is step
        assert len(Path(inspect.getfile(step.compute)).read_text().splitlines()) <= 150


@every_dtype
def test_each_rung_is_the_formula(step, dtype):
    """Kernels for rows of 128 numbers are compiled for the first dtype alone, and below for the others."""
    are_the_formula(step, dtype, SIZES if dtype == step.dtypes[0] else SIZES[:-1])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("step", "dtype"), [(step, dtype) for step, dtype in EVERY_DTYPE if dtype != step.dtypes[0]]
)
def test_long_rows_of_the_other_dtypes_are_the_formula(step, dtype):
    are_the_formula(step, dtype, SIZES[-1:])


def are_the_formula(step, dtype, sizes):
    rng = np.random.default_rng()
    for size in sizes:
        for causal in (False, True)[: 1 + (size[1] == size[2])]:
            check(step, size, causal, rng, dtype)


@every_dtype
def test_tensors_strides_and_nothing_to_attend_to(step, dtype):
    kind, rng = getattr(torch, dtype), np.random.default_rng()
    check(step, ((2,), 40, 40, 24), True, rng, dtype, to=lambda x: torch.from_numpy(x.astype("f4")).to(kind))
    q, k, v, _ = drawn(((2,), 20, 20, 24), rng, dtype)
    views = np.asfortranarray(q), k[:, ::-1].copy()[:, ::-1], np.repeat(v, 2, axis=-1)[..., ::2]
    for x in views:
        x.flags.writeable = False
    np.testing.assert_array_equal(step.attention(*views, causal=True), step.attention(q, k, v, causal=True))
    turned = [torch.from_numpy(x.astype("f4")).to(kind).transpose(0, 1).contiguous() for x in (q, k, v)]
    found = step.attention(*(x.transpose(0, 1) for x in turned), causal=True)
    np.testing.assert_array_equal(found.float(), step.attention(q, k, v, causal=True).astype("f4"))
    out, logs = step.forward(q, k[:, :0], v[:, :0])
    assert (out == 0).all()
    assert (logs == -np.inf).all()
    assert step.attention(q[:, :0], k, v).shape == (2, 0, 24)


@every_dtype
def test_large_scores_do_not_overflow_and_nan_is_not_lost(step, dtype):
    q, k, v, _ = drawn(((), 20, 150, 8), np.random.default_rng(), dtype)
    q[:, 0], k[:, 0] = 200, np.linspace(-100, 100, 150)  # each tile's scores are larger than the last one's
    assert_near([step.attention(q, k, v)], [formula(q, k, v, q, False)[0]], dtype)
    k[120, 3] = np.nan
    assert np.isnan(step.attention(q, k, v).astype("f4")).all()
    k[:70] = -np.inf  # the first tile: weight 0 in the rows that see more
    k[120, 3] = 0
    assert_near([step.attention(abs(q), k, v)], [formula(abs(q), k[70:], v[70:], q, False)[0]], dtype)


@pytest.mark.parametrize(("step", "dtype"), [case for case in EVERY_DTYPE if case[0].number > 3])
def test_tensor_cores_round_weights_and_results_and_nothing_else(step, dtype):
    """One tile of keys has the largest scores of the rows. Numbers next to a tie may fall to either side."""
    q, k, v, d_out = drawn(((2,), 61, 61, 64), np.random.default_rng(), dtype)
    found = [*step.forward(q, k, v, causal=True)]
    if step.gradients:
        found += step.backward(q, k, v, *found, d_out, causal=True)

    def rounded(x, kind=q.dtype):
        return x.astype(kind).astype("f8")

    out, logs = (x.astype("f8") for x in found[:2])
    q, k, v, d_out = (x.astype("f8") for x in (q, k, v, d_out))
    scores = np.where(np.tri(61), q @ k.swapaxes(1, 2) / 8, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = [rounded(weights) @ v / weights.sum(-1, keepdims=True)]
    p = np.exp(scores - logs[..., None])
    ds = rounded(p * (d_out @ v.swapaxes(1, 2) - (out * d_out).sum(-1, keepdims=True)) / 8)
    exact += [ds @ k, ds.swapaxes(1, 2) @ q, rounded(p).swapaxes(1, 2) @ d_out]
    for x, numbers in zip([out, *found[2:]], exact, strict=False):
        assert (x.astype("f8") == rounded(numbers)).mean() > 0.97


@pytest.mark.parametrize("causal", [False, True])
def test_keys_past_the_last_give_no_gradient_if_all_scores_are_very_negative(causal):
    """Zeros fill up a tile, whose weights would be exp(0 - logs): infinite."""
    q, k, v, d_out = drawn(((), 70, 70, 64), np.random.default_rng(), "bfloat16")
    q, k = abs(q) * 8, -abs(k) * 8
    found = LAST.forward(q, k, v, causal=causal)
    gradients = LAST.backward(q, k, v, *found, d_out, causal=causal)
    assert found[1].max() < -100
    assert all(np.isfinite(x.astype("f4")).all() for x in gradients)


@every_rung
@pytest.mark.parametrize("causal", [False, True])
def test_what_a_rung_moves_and_that_no_banks_conflict(step, causal):
    with profiled() as counts:
        run(step, HEAD, causal, step.dtypes[0])
    assert counts.shared_conflicts == 0
    least = least_bytes(step, HEAD, causal, step.dtypes[0])
    if step.number == 1:  # 128 x 128 scores, and a key's column in each of 32 rows
        assert counts.moved > 100 * least
    elif step.number == 2:  # a query reads itself and all that it sees, and writes its row and a sector
        seen = 128 * 129 / 2 if causal else 128 * 128
        assert counts.moved == 4 * 64 * (2 * 128 + 2 * seen) + 32 * 128
    else:
        assert least <= counts.moved <= 1.3 * least
    assert (counts.total.matrix > 0) == (step.number > 3)


@every_rung
def test_the_emulator_is_fast_enough_for_tests_and_lessons(step):
    """128 positions in 300,000 calls of functions, some 0.2 s: a call for each thread would be millions."""
    run(step, HEAD, True, step.dtypes[0])
    assert events_of(lambda: run(step, HEAD, True, step.dtypes[0])) < 600_000


@pytest.mark.parametrize(
    ("step", "dtype"),
    [  # bfloat16's code differs from float16's in the names of two instructions
        pytest.param(*each, id=name, marks=[pytest.mark.deep] if "bf" in name else [])
        for each in EVERY_DTYPE
        for name in ["-".join([each[0].name, each[1]])]
    ],
)
@pytest.mark.parametrize("width", [64, pytest.param(128, marks=pytest.mark.deep)])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nothing_spills_and_blocks_fit(step, dtype, architecture, width):
    for kernel, types, dynamic in launches(step, dtype, 256, width):
        registers, blocks, shared = step.room[kernel.name]
        compiled = kernel.compile(types, architecture)
        assert shortcomings(compiled, registers, {}) == [], compiled.report
        assert blocks * kernel.threads * -(-compiled.report.registers // 8) * 8 <= 65536
        assert compiled.report.shared + dynamic <= shared * (width // 64)


Q = torch.ones(2, 3, 4)
test_arguments_that_do_not_fit_are_named = refuses(
    lambda arguments: CUDA_ATTENTION_LADDER[0].attention(*arguments),
    ((Q, Q.numpy(), Q), TypeError, "k is a ndarray, not a torch tensor, as q is"),
    ((Q.numpy(), Q, Q), TypeError, "k is a Tensor, not a NumPy array"),
    ((Q, Q, Q.to("meta")), TypeError, "v is on meta and q on cpu"),
    ((Q.to("meta"),) * 3, "q is on meta, where rung s1_three_kernels can't run"),
    ((Q, Q.clone().requires_grad_(), Q), TypeError, "k requires a gradient"),
    ((Q.double(),) * 3, TypeError, r"q is float64: rung s1_three_kernels .*\.to\(torch.float32\)"),
)


def test_rows_too_wide_for_shared_memory_are_refused():
    q = np.ones((2, 417), "f4")
    check(CUDA_ATTENTION_LADDER[1], ((), 2, 3, 417), False, np.random.default_rng())
    with pytest.raises(ValueError, match="q is 417 wide: rung s3_shared_tiles takes 416 at most"):
        CUDA_ATTENTION_LADDER[2].attention(q, q, q)
