"""Every rung of the attention ladder, and the backward pass, beside the formulas in float64."""

import importlib.util
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest

from minidist import kernels
from minidist.kernels import ATTENTION_LADDER, rung
from minidist.kernels.cpu import attention
from minidist.kernels.cpu.support import thread_pool
from minidist.kernels.emulator.mistakes.patches import changed
from minidist.kernels.measure.attention_reference import assert_near, check, drawn, formula
from tests.helpers.products import check_ladder
from tests.helpers.refusals import refuses

every_rung = pytest.mark.parametrize("step", ATTENTION_LADDER, ids=lambda step: step.name)
LAST = ATTENTION_LADDER[-1]
# What stands before, queries, keys, width. With tiles, blocks are of 28
# queries and 256 keys, and parts of 252 queries.
SIZES = [
    ((1,), 1, 1, 1),
    ((), 2, 3, 1),
    ((2, 3), 37, 53, 5),
    ((2,), 70, 70, 64),
    ((1,), 29, 300, 33),
    ((2,), 261, 270, 16),
    ((1,), 530, 530, 70),
]
CASES = [(size, causal) for size in SIZES for causal in (False, True)[: 1 + (size[1] == size[2])]]
every_size = pytest.mark.parametrize(("size", "causal"), CASES, ids=lambda x: str(x).replace(" ", ""))


@every_rung
@every_size
def test_each_rung_is_the_formula(step, size, causal):
    check(step, size, causal, np.random.default_rng())


@every_rung
def test_any_strides_and_inputs_that_may_not_be_written(step):
    rng = np.random.default_rng()
    q, k, v, _ = drawn(((2,), 40, 40, 24), rng)
    expected = step.attention(q, k, v, causal=True)
    unaligned = np.frombuffer(b"." + v.tobytes(), "float32", offset=1).reshape(v.shape)
    there = [np.asfortranarray(q), k[:, ::-1].copy()[:, ::-1], np.repeat(v, 2, axis=-1)[..., ::2]]
    np.testing.assert_array_equal(step.attention(q, k, unaligned, causal=True), expected)
    before = [x.copy() for x in there]
    for x in there:
        x.flags.writeable = False
    np.testing.assert_array_equal(step.attention(*there, causal=True), expected)
    for x, same in zip(there, before, strict=True):
        np.testing.assert_array_equal(x, same)


@every_rung
def test_nothing_to_attend_to_is_zeros(step):
    q, k, v, d_out = drawn(((2,), 3, 0, 4), np.random.default_rng())
    out, logs = step.forward(q, k, v)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(logs, -np.inf)
    assert step.attention(k, q, q).shape == (2, 0, 4)
    if step.gradients:
        found = step.backward(q, k, v, out, logs, d_out)
        assert [x.shape for x in found] == [(2, 3, 4), (2, 0, 4), (2, 0, 4)]


@every_rung
def test_large_scores_do_not_overflow_and_nan_is_not_lost(step):
    q, k, v, _ = drawn(((), 20, 300, 8), np.random.default_rng())
    q *= 1e3
    q[:, 0], k[:, 0] = 1e4, np.linspace(-1e3, 1e3, 300)  # each block's scores are larger than the last one's
    assert_near([step.attention(q, k, v)], [formula(q, k, v, q, False)[0]])
    k[200, 3] = np.nan
    assert np.isnan(step.attention(q, k, v)).all()
    k[:257], q = -np.inf, abs(q)  # the first block: weight 0 in the rows that see more
    assert_near([step.attention(q, k, v)], [formula(q, k[257:], v[257:], q, False)[0]])


def test_backward_of_a_head_that_several_cores_share(monkeypatch):
    monkeypatch.setattr(thread_pool, "threads", lambda: 5)
    for size in (((), 900, 700, 20), ((2,), 520, 520, 33)):
        check(LAST, size, size[1] == size[2], np.random.default_rng())


@pytest.mark.parametrize("causal", [False, True])
def test_skipping_and_threads_change_no_bit(causal):
    q, k, v, _ = drawn(((2,), 300, 300, 32), np.random.default_rng())
    first, *others = (step.attention(q, k, v, causal=causal) for step in ATTENTION_LADDER[3:])
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_memory_grows_with_the_positions_and_not_with_their_square(monkeypatch):
    monkeypatch.setattr(thread_pool, "threads", lambda: 1)  # a late worker makes its memory at any time

    def peak(positions):
        q, k, v, d_out = drawn(((2,), positions, positions, 16), np.random.default_rng(0))
        tracemalloc.start()
        LAST.backward(q, k, v, *LAST.forward(q, k, v, causal=True), d_out, causal=True)
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return largest

    peak(8)  # compiles, and makes this thread's memory
    short, long = peak(512), peak(2048)
    assert long < 4.2 * short
    assert long < 2048 * 2048 * 4 / 2  # one head's scores


Q = np.ones((2, 3, 4), "float32")
test_arguments_that_do_not_fit_are_named = refuses(
    lambda given: LAST.attention(*given(Q), causal=True),
    (lambda q: ([1.0], q, q), TypeError, "q is a list, not a NumPy array"),
    (lambda q: (q, q.astype("f8"), q), TypeError, "k is float64: rung s7_backward takes float32"),
    (
        lambda q: (*[q.astype(q.dtype.newbyteorder())] * 3,),
        TypeError,
        r"q is [<>]f4: rung .*astype\('float32'\)",
    ),
    (lambda q: (q, q[:, :2], q), r"q is \(2, 3, 4\), k is \(2, 2, 4\) and v is \(2, 3, 4\)"),
    (lambda q: (q, q[..., :2], q[..., :2]), r"q is \(2, 3, 4\), k is \(2, 3, 2\): pass"),
    (lambda q: (q[0, 0], q, q), r"q is \(4,\)"),
    (lambda q: (q[:, :2], q, q), "a causal query needs a key of its own"),
)
test_logs_that_do_not_fit_are_named = refuses(
    lambda change: LAST.backward(Q, Q, Q, Q, change(Q[..., 0]), Q),
    (lambda logs: logs[:, :2], r"logs is \(2, 2\) and q is \(2, 3, 4\): pass what `forward`"),
    (lambda logs: logs[0], r"logs is \(3,\) and q is \(2, 3, 4\)"),
    (lambda logs: logs.astype("f8"), TypeError, "logs is float64: rung s7_backward takes float32"),
    (lambda logs: logs.tolist(), TypeError, "logs is a list, not a NumPy array"),
)


def test_a_rung_without_a_backward_pass_says_which_has_one():
    q = np.ones((3, 4), "float32")
    with pytest.raises(RuntimeError, match="s1_three_passes has no backward pass: take s7_backward"):
        ATTENTION_LADDER[0].backward(q, q, q, q, q[:, 0], q)


def test_the_ladder_holds_every_rung_file_in_order():
    check_ladder(attention, ATTENTION_LADDER, lambda step: "The idea: ")
    assert all(rung(step.name, ATTENTION_LADDER) is step for step in ATTENTION_LADDER)
    folder = Path(attention.__file__).parent
    for file in [*folder.glob("*.py"), *folder.glob("support/[!v]*.py")]:  # all but the LLVM of vectors
        assert len(file.read_text().splitlines()) <= 150


# The file, the mistake, and what it becomes; those of the tiles compile for seconds.
PLANTED = [
    ("attention/s1_three_passes", "total * scale", "total"),
    ("attention/s1_three_passes", "causal and j > i", "causal and j >= i"),
    ("attention/s2_one_pass", "total *= math.exp(top - score)", "pass"),
    ("attention/s2_one_pass", "i + 1 if causal", "i + 2 if causal"),
    ("attention/s3_key_blocks", "sums[c] *= shrink", "pass"),
    ("attention/s3_key_blocks", "totals[i - i0] *= shrink", "pass"),
]
IN_TILES = [
    ("attention/support/forward_pass", "scaled(sums, width, shrink)", "pass"),
    ("attention/support/forward_pass", "first + i + 1 - j0", "first + i + 2 - j0"),
    ("attention/support/forward_pass", "first + i0 + rows - j0", "first + i0 - j0"),
    ("attention/support/backward_pass", "means[i] += out", "means[i] -= out"),
    ("attention/support/backward_pass", "j0 + r - first - i0", "j0 + r - i0"),
    ("attention/support/backward_pass", "int(j0 > 0)", "0"),
    (
        "attention/support/vector_softmax",
        "LEAST, BIAS, FRACTION = -127.0, 127",
        "LEAST, BIAS, FRACTION = -127.0, 126",
    ),
]


def fails(step):
    """Whether the checks that each rung passes find fault with it."""
    try:
        with np.errstate(all="ignore"):
            for size, causal in ((((), 600, 600, 8), True), (((2,), 9, 600, 8), False)):
                check(step, size, causal, np.random.default_rng())
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("file", "old", "new"), PLANTED)
def test_a_planted_mistake_is_found(file, old, new, tmp_path):
    text = (Path(attention.__file__).parent.parent / f"{file}.py").read_text()
    path = tmp_path / "planted.py"
    path.write_text(changed(text, [f"~{old} => {new}"]))
    spec = importlib.util.spec_from_file_location(f"{attention.__name__}.planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert fails(module.RUNG)


@pytest.mark.deep
@pytest.mark.parametrize(("file", "old", "new"), IN_TILES)
def test_a_mistake_planted_in_the_tiles_is_found(file, old, new, tmp_path):
    """In a copy of the kernels, in a process of its own: the tests' own have compiled theirs."""
    copytree(Path(kernels.__file__).parent, tmp_path / "kernels", ignore=ignore_patterns("__pycache__"))
    path = tmp_path / f"kernels/cpu/{file}.py"
    path.write_text(changed(path.read_text(), [f"~{old} => {new}"]))
    program = (
        "import sys; from tests.kernels.cpu.attention.test_attention_ladder import fails\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from kernels.cpu.attention import ATTENTION_LADDER as ladder\n"
        f"sys.exit(3 if fails(ladder[{-1 if 'backward' in file else -2}]) else 0)\n"
    )
    # Threads, so that a head has several parts; and a compiler in a hurry.
    threads = {**os.environ, "NUMBA_NUM_THREADS": "4", "NUMBA_OPT": "0"}
    assert subprocess.run([sys.executable, "-c", program], env=threads, check=False).returncode == 3
