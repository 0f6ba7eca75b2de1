"""A systolic array: that what moves through it is the product, and that what it counts is what happened."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from minidist.kernels.measure import product_checks
from minidist.kernels.systolic import SystolicArray, compare, cycles
from tests.helpers.products import check_not_finite
from tests.helpers.refusals import refuses

DATAFLOWS = ("weight_stationary", "output_stationary")

every_dataflow = pytest.mark.parametrize("dataflow", DATAFLOWS)
every_buffering = pytest.mark.parametrize("double_buffered", [True, False])
edges = st.integers(1, 6)
sizes = st.integers(0, 13)
arrays = st.builds(SystolicArray, edges, edges, st.sampled_from(DATAFLOWS), st.booleans())


def integers(m, n, k, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(-99, 100, (m, k)), rng.integers(-99, 100, (k, n))


# Ragged in each dimension; longer and shorter than the array; one row, one column, one PE.
# fmt: off
RAGGED = [  # m, n, k, rows, cols
    (3, 2, 5, 2, 2), (5, 3, 3, 2, 2), (2, 9, 13, 5, 4), (13, 9, 2, 5, 4), (7, 5, 9, 4, 3), (1, 1, 1, 3, 4),
    (4, 7, 5, 1, 3), (4, 7, 5, 3, 1), (3, 4, 5, 1, 1), (1, 6, 6, 4, 4), (6, 1, 6, 4, 4), (6, 6, 1, 4, 4),
]
# fmt: on


@every_dataflow
@every_buffering
def test_ragged_products_are_exact_and_counted_right(dataflow, double_buffered):
    for m, n, k, rows, cols in RAGGED:
        check(SystolicArray(rows, cols, dataflow, double_buffered), m, n, k, 0)


@settings(deadline=None, max_examples=150)
@given(arrays, sizes, sizes, sizes, st.integers(0, 2**32))
def test_any_product_on_any_array_is_exact_and_counted_right(array, m, n, k, seed):
    check(array, m, n, k, seed)


def check(array, m, n, k, seed):
    a, b = integers(m, n, k, seed)
    product = array.matmul(a, b)
    np.testing.assert_array_equal(product.c, a @ b)
    assert product.c.dtype == np.int64
    # Counted while it ran, against closed formulas: cycles, reads of a, b and c, and writes.
    assert product.counts == array.counts(m, n, k)
    assert product.cycles == cycles(m, n, k, array.rows, array.cols, array.dataflow, array.double_buffered)
    work = array.rows * array.cols * product.cycles
    assert product.utilisation == (m * n * k / work if work else 0)
    assert 0 <= product.utilisation <= 1


@settings(deadline=None, max_examples=30)
@given(arrays, sizes, sizes, sizes, st.integers(0, 2**32))
def test_frames_are_the_cycles_of_matmul_and_conserve_what_they_move(array, m, n, k, seed):
    a, b = integers(m, n, k, seed)
    product, frames = array.matmul(a, b), list(array.frames(a, b))
    assert [frame.cycle for frame in frames] == list(range(product.cycles))
    assert sum(int(frame.active.sum()) for frame in frames) == m * n * k
    counts = product.counts
    assert sum(frame.a_in.count() for frame in frames) == counts.a_reads
    assert sum(frame.b_in.count() for frame in frames) == counts.b_reads
    assert sum(frame.c_out.count() for frame in frames) == counts.c_writes
    # All that left is in c, and nothing else is.
    assert sum(int(frame.c_out.sum()) for frame in frames if frame.c_out.count()) == (a @ b).sum()
    if frames:
        np.testing.assert_array_equal(frames[-1].c.filled(0), a @ b)
        assert frames[-1].c.count() == m * n


def assert_same(left, right):
    """Two masked arrays hold the same, in the same places."""
    np.testing.assert_array_equal(np.ma.getmaskarray(left), np.ma.getmaskarray(right))
    np.testing.assert_array_equal(left.filled(0), right.filled(0))


@settings(deadline=None, max_examples=30)
@given(arrays, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32))
def test_each_pe_gets_from_its_neighbours_what_they_held_a_cycle_before(array, m, n, k, seed):
    """No PE sees memory: what it holds was next to it a cycle earlier, or came in at an edge."""
    frames = list(array.frames(*integers(m, n, k, seed)))
    for before, now in itertools.pairwise(frames):
        assert_same(now.a[:, 1:], before.a[:, :-1])
        assert_same(now.a[:, 0], now.a_in)
        product = np.where(now.active, now.a.filled(0) * now.b.filled(0), 0)
        # A PE multiplies in the cycle in which it has both operands, and in no other.
        np.testing.assert_array_equal(now.active, ~(np.ma.getmaskarray(now.a) | np.ma.getmaskarray(now.b)))
        if array.dataflow == "weight_stationary":
            above = np.zeros_like(product)
            above[1:] = before.sums.filled(0)[:-1]
            np.testing.assert_array_equal(now.sums.filled(0), above + product)
            assert_same(now.c_out, now.sums[-1])
            assert now.results is None
        else:
            assert_same(now.b[1:], before.b[:-1])
            assert_same(now.b[0], now.b_in)
            # A sum grows where it is, or starts anew.
            grown = now.sums.filled(0) - product
            held = ~np.ma.getmaskarray(now.sums)
            kept = (grown == before.sums.filled(0)) | (grown == 0)
            assert kept[held].all()
            assert_same(now.c_out, now.results[-1])
            # What moves down came from above, but for the row that puts its sum onto the wave.
            moved = ~np.ma.getmaskarray(before.results[:-1])
            np.testing.assert_array_equal(
                now.results.filled(0)[1:][moved], before.results.filled(0)[:-1][moved]
            )


def test_a_small_product_by_hand_weight_stationary():
    """[[1, 2], [3, 4]] times [[5, 6], [7, 8]] on 2 x 2: two cycles of loading, then a enters, skewed."""
    frames = list(SystolicArray(2, 2, "weight_stationary").frames([[1, 2], [3, 4]], [[5, 6], [7, 8]]))
    _ = None  # a register that holds nothing
    # Cycle by cycle: a, b, sums, the next weights, what leaves; rows of the array.
    expected = [
        ([[_, _], [_, _]], [[_, _]] * 2, [[_, _]] * 2, [[7, _], [_, _]]),
        ([[_, _], [_, _]], [[_, _]] * 2, [[_, _]] * 2, [[5, 8], [7, _]]),
        ([[1, _], [_, _]], [[5, _], [_, _]], [[5, _], [_, _]], [[_, 6], [7, 8]]),
        ([[3, 1], [2, _]], [[5, 6], [7, _]], [[15, 6], [1 * 5 + 2 * 7, _]], [[_, _], [_, 8]]),
        ([[_, 3], [4, 2]], [[5, 6], [7, 8]], [[_, 18], [43, 22]], [[_, _]] * 2),
        ([[_, _], [_, 4]], [[5, 6], [7, 8]], [[_, _], [_, 50]], [[_, _]] * 2),
    ]
    assert len(frames) == 6
    for frame, registers in zip(frames, expected, strict=True):
        held = [x.tolist() for x in (frame.a, frame.b, frame.sums, frame.waiting)]
        assert held == list(registers), f"cycle {frame.cycle}"
    assert [frame.tile for frame in frames] == [None, None, 0, 0, None, None]
    leaving = [frame.c_out.tolist() for frame in frames]
    assert leaving == [[_, _]] * 3 + [[19, _], [43, 22], [_, 50]]
    assert frames[-2].c.tolist() == [[19, 22], [43, _]]


@every_dataflow
def test_a_second_register_hides_the_loading_or_draining(dataflow):
    """Then PE (0, 0) never waits between its first product and its last."""
    rng = np.random.default_rng()
    rows, cols, tiles = (int(x) for x in rng.integers(2, 5, 3))
    height, n, stream = rows * tiles, cols * 2, rows + int(rng.integers(3))
    m, k = (stream, height) if dataflow == "weight_stationary" else (height, stream)
    a, b = integers(m, n, k, 0)

    def working(double_buffered):
        frames = SystolicArray(rows, cols, dataflow, double_buffered).frames(a, b)
        return np.flatnonzero([frame.active[0, 0] for frame in frames])

    assert (np.diff(working(True)) == 1).all()
    gaps = np.diff(working(False))
    assert (gaps[gaps > 1] == rows + 1).all()
    assert (gaps > 1).sum() == 2 * tiles - 1
    both = [SystolicArray(rows, cols, dataflow, double).matmul(a, b).cycles for double in (True, False)]
    assert both[0] == 2 * tiles * stream + 2 * rows + cols - 2
    assert both[1] == both[0] + (2 * tiles - 1) * rows


def test_the_order_of_the_sum_is_the_documented_one():
    rng = np.random.default_rng()
    a, b = rng.standard_normal((5, 17)).astype("float32"), rng.standard_normal((17, 6)).astype("float32")

    def in_order(columns):
        total = np.zeros((5, 6), "float32")
        for p in columns:
            total += a[:, p, None] * b[p]
        return total

    np.testing.assert_array_equal(
        SystolicArray(4, 3, "output_stationary").matmul(a, b).c, in_order(range(17))
    )
    tiles = [in_order(range(p, min(p + 4, 17))) for p in range(0, 17, 4)]
    expected = tiles[0]
    for tile in tiles[1:]:
        expected = expected + tile
    np.testing.assert_array_equal(SystolicArray(4, 3, "weight_stationary").matmul(a, b).c, expected)


@every_dataflow
@every_buffering
def test_nan_and_infinity_go_where_they_belong_and_nowhere_else(dataflow, double_buffered):
    """Tiles are ragged, so that idle PEs hold infinite weights of the tile before, next to zeros."""
    rng = np.random.default_rng()
    a, b = product_checks.inputs(7, 8, 10, "float64", int(rng.integers(2**32)))
    a[2, 3], b[1, 4], b[4:7, 1] = np.nan, np.inf, (np.inf, np.inf, -np.inf)
    a[3], b[9, 6] = 0, np.inf  # 0 * inf is NaN
    array = SystolicArray(4, 3, dataflow, double_buffered)
    c, expected = check_not_finite(lambda a, b: array.matmul(a, b).c, a, b)
    assert np.isnan(expected[3, 6])
    np.testing.assert_allclose(c, expected, rtol=1e-12, atol=1e-14)  # a sum may cancel


@pytest.mark.parametrize(
    ("left", "right", "sums"),
    [
        ("int8", "int8", "int64"),
        ("uint8", "int64", "int64"),
        ("uint64", "int16", "int64"),
        ("float16", "float16", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("float32", "float64", "float64"),
        ("int8", "float32", "float32"),
        ("int64", "float32", "float64"),
    ],
)
@every_dataflow
def test_each_dtype_is_summed_in_the_documented_one(left, right, sums, dataflow):
    rng = np.random.default_rng()
    a, b = (
        rng.integers(0, 100, shape).astype(product_checks.numpy_dtype(kind))
        for shape, kind in (((4, 300), left), ((300, 3), right))
    )
    c = SystolicArray(5, 2, dataflow).matmul(a, b).c
    assert c.dtype == sums
    # 300 products of up to 9801: int8, float16 and uint8 would have overflowed or lost the last digits.
    np.testing.assert_array_equal(c, a.astype("int64") @ b.astype("int64"))


def test_integers_are_exact_up_to_the_last_that_fits():
    a = np.array([[2**31, 2**31 - 1]])
    assert SystolicArray(1, 1).matmul(a, [[2**31], [-(2**30)]]).c[0, 0] == 2**62 - 2**30 * (2**31 - 1)
    assert SystolicArray(2, 2).matmul([[-(2**62)]], [[1]]).c[0, 0] == -(2**62)
    with pytest.raises(ValueError, match=r"sums of 2 products .* may not fit in int64: scale them down"):
        SystolicArray(1, 1).matmul([[2**31, 2**31]], [[2**31], [2**31]])
    with pytest.raises(ValueError, match="may not fit in int64"):
        SystolicArray(1, 1).matmul(np.array([[-(2**63)]]), [[1]])
    with pytest.raises(ValueError, match="may not fit in int64"):
        SystolicArray(1, 1).matmul(np.array([[2**63]], "uint64"), np.array([[0]]))


@every_dataflow
def test_frames_are_copies(dataflow):
    array, (a, b) = SystolicArray(3, 2, dataflow), integers(4, 5, 6, 0)

    def held(frame):
        values = vars(frame).values()
        return [x for x in values if isinstance(x, np.ndarray)]

    frames, then = [], []
    for frame in array.frames(a, b):
        frames.append(frame)
        then.append([x.copy() for x in held(frame)])
    for frame, copies in zip(frames, then, strict=True):
        for now, copy in zip(held(frame), copies, strict=True):
            assert_same(np.ma.asarray(now), np.ma.asarray(copy))
    # And what a reader writes into a frame does not reach the array.
    for frame in array.frames(a, b):
        result = frame.c.copy()
        for x in held(frame):
            x[...] = 1
    np.testing.assert_array_equal(result, a @ b)


def test_a_frame_prints_what_each_register_holds():
    frames = list(SystolicArray(2, 2).frames([[1, 2], [3, 4]], [[5, 6], [7, 8]]))
    text = str(frames[3])
    assert text.startswith("cycle 3: tile 0 enters, 3 of 4 PEs active\n")
    assert "a       [[3 1]\n         [2 --]]" in text
    assert "c_out   [19 --]" in text
    assert "results" not in text


def test_inputs_are_not_changed_and_may_have_any_strides():
    a, b = integers(9, 8, 7, 1)
    before = a.copy(), b.copy()
    wide = np.zeros((14, 16), int)
    wide[::2, ::-2] = b
    view = wide[::2, ::-2]
    np.testing.assert_array_equal(SystolicArray(3, 4).matmul(np.asfortranarray(a), view).c, a @ b)
    np.testing.assert_array_equal(a, before[0])
    np.testing.assert_array_equal(b, before[1])


@settings(deadline=None, max_examples=40)
@given(sizes, sizes, sizes, st.integers(1, 5))
def test_scalar_and_vector_counts_are_those_of_their_loops(m, n, k, lanes):
    scalar, vector = compare(m, n, k, lanes=lanes).rows
    steps = reads_of_a = reads_of_b = writes = 0
    for _i, _j in itertools.product(range(m), range(n)):
        for _p in range(k):
            steps, reads_of_a, reads_of_b = steps + 1, reads_of_a + 1, reads_of_b + 1
        writes += k > 0
    assert (scalar.cycles, scalar.a_reads, scalar.b_reads) == (steps, reads_of_a, reads_of_b)
    assert (scalar.c_reads, scalar.c_writes) == (0, writes)
    steps = reads_of_a = reads_of_b = 0
    for _i, j, _p in itertools.product(range(m), range(0, n, lanes), range(k)):
        steps, reads_of_a = steps + 1, reads_of_a + 1
        reads_of_b += len(range(j, min(j + lanes, n)))
    assert (vector.cycles, vector.a_reads, vector.b_reads) == (steps, reads_of_a, reads_of_b)
    assert (vector.c_reads, vector.c_writes) == (0, writes)
    assert scalar.multiply_adds == vector.multiply_adds == m * n * k


def test_compare_says_how_often_each_element_is_read():
    arrays = [SystolicArray(128, 128, dataflow) for dataflow in DATAFLOWS]
    comparison = compare(512, 512, 512, *arrays)
    scalar, vector, weights, outputs = comparison.rows
    size = 512 * 512
    assert [row.a_reads // size for row in comparison.rows] == [512, 32, 4, 4]
    assert [row.b_reads // size for row in comparison.rows] == [512, 512, 1, 4]
    assert [row.c_writes // size for row in comparison.rows] == [1, 1, 4, 1]
    assert [row.c_reads // size for row in comparison.rows] == [0, 0, 3, 0]
    assert scalar.utilisation == vector.utilisation == 1
    assert weights.utilisation == outputs.utilisation == pytest.approx(512**3 / 128**2 / 8574)
    assert scalar.multiply_adds_per_access < 0.5 < vector.multiply_adds_per_access < 1
    assert outputs.multiply_adds_per_access == pytest.approx(512 / 9)
    assert outputs.bytes_moved(operand_bytes=1, sum_bytes=4) == 8 * size + 4 * size
    lines = str(comparison).splitlines()
    assert lines[0].startswith("(512, 512) times (512, 512): 134,217,728 multiply-adds")
    assert [line.split("  ")[0] for line in lines[2:]] == [row.machine for row in comparison.rows]
    assert "8,574" in lines[4]
    assert "262,144 (1x)" in lines[4]
    assert repr(comparison) == str(comparison)


def test_a_dataflow_may_be_spelt_as_in_the_papers():
    array = SystolicArray(2, np.int64(3), "output-stationary")
    assert array == SystolicArray(2, 3, "output_stationary")


test_mistakes_are_named_in_one_sentence = refuses(
    lambda call: call(),
    (lambda: SystolicArray(0, 4), r"rows is 0: pass 1 or more"),
    (lambda: SystolicArray(4, -1), r"cols is -1: pass 1 or more"),
    (lambda: SystolicArray(2.5, 4), TypeError, r"rows is 2.5: pass a whole number, 1 or more"),
    (lambda: SystolicArray(2, 2, "row"), r"dataflow is 'row': pass 'weight_stationary' or"),
    (lambda: SystolicArray(2, 2).matmul([1, 2], [[3]]), r"a has 1 dimensions, shape \(2,\)"),
    (lambda: SystolicArray(2, 2).matmul([[1]], [[1j]]), TypeError, r"b has dtype complex128: convert"),
    (lambda: SystolicArray(2, 2).matmul([[True]], [[1]]), TypeError, r"a has dtype bool: convert"),
    (lambda: SystolicArray(2, 2).matmul(np.ones((2, 3)), np.ones((2, 3))), r"columns of a \(3\)"),
    # At the call, not when the first frame is asked for.
    (lambda: SystolicArray(2, 2).frames(np.ones((2, 3)), np.ones((2, 3))), r"do not multiply"),
    (lambda: compare(1, -2, 3), r"n is -2: pass 0 or more"),
    (lambda: compare(1, 2, 3, lanes=0), r"lanes is 0: pass 1 or more"),
    (lambda: cycles(1, 2, 3, 4, 0, "weight_stationary"), r"cols is 0: pass 1 or more"),
    (lambda: cycles(1, 2, 3, 4, 4, "ws"), r"dataflow is 'ws'"),
)
