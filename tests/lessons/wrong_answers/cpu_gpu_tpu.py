"""Wrong answers to lesson 2."""

import numpy as np

from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to("vector_cost", "vector_cost(1, 5, 1, 4), the instructions,", "expected 2", "got      1")
def rounds_down(m, n, k, lanes):
    instructions = m * k * max(1, n // lanes)
    return instructions, instructions + m * n * k


@WRONG.to("vector_cost", "vector_cost(1, 4, 1, 4), the reads,", "expected 5", "got      8")
def reads_a_in_every_lane(m, n, k, lanes):
    instructions = m * k * -(-n // lanes)
    return instructions, 2 * m * n * k


@WRONG.to("vector_cost", "vector_cost(1, 5, 1, 4), the reads,", "expected 7", "got      10")
def reads_beyond_the_row(m, n, k, lanes):
    instructions = m * k * -(-n // lanes)
    return instructions, instructions * (1 + lanes)


@WRONG.to("vector_cost", "vector_cost(1, 1, 1, 1), the reads,", "expected 2", "got      1")
def forgets_a(m, n, k, lanes):
    return m * k * -(-n // lanes), m * n * k


@WRONG.to("skew", "What skew makes of 1 x 1 elements", "shape (1, 2)", "should have (1, 1)")
def a_column_too_many(x):
    m, k = x.shape
    entering = np.zeros((m, m + k), x.dtype)
    for i in range(m):
        entering[i, i : i + k] = x[i]
    return entering


@WRONG.to("skew", "What skew makes of 2 x 1 elements", "element [0, 0]", "got      0")
def the_first_row_is_late(x):
    m, k = x.shape
    entering = np.zeros((m, m + k - 1), x.dtype)
    for i in range(m):
        entering[i, m - 1 - i : m - 1 - i + k] = x[i]
    return entering


@WRONG.to("skew", "What skew makes of 2 x 1 elements", "element [1, 0]", "expected 0")
def pads_and_does_not_skew(x):
    return np.pad(x, ((0, 0), (0, len(x) - 1)))


@WRONG.to("skew", "What skew makes of 1 x 1 elements with halves", "expected", "got")
def always_takes_integers(x):
    m, k = x.shape
    entering = np.zeros((m, m + k - 1), int)
    for i in range(m):
        entering[i, i : i + k] = x[i]
    return entering


@WRONG.to("systolic_step", "On 1 x 1 PEs, after one tick, sums", "expected", "got")
def multiplies_before_it_moves(a, b, sums, left, top):
    sums = sums + a * b
    a = np.column_stack([left, a[:, :-1]])
    b = np.vstack([top, b[:-1]])
    return a, b, sums


@WRONG.to("systolic_step", "On 1 x 1 PEs, after one tick, a, which moves right,", "element [0, 0]")
def rolls_around(a, b, sums, left, top):
    a, b = np.roll(a, 1, axis=1), np.roll(b, 1, axis=0)
    return a, b, sums + a * b


@WRONG.to("systolic_step", "On 1 x 3 PEs, after one tick, a, which moves right,", "element [0, 2]")
def smears_one_column_over_all(a, b, sums, left, top):
    for j in range(1, a.shape[1]):
        a[:, j] = a[:, j - 1]
    for i in range(1, b.shape[0]):
        b[i] = b[i - 1]
    a[:, 0], b[0] = left, top
    return a, b, sums + a * b


@WRONG.to("systolic_step", "On 1 x 1 PEs, after one tick, sums", "expected", "got")
def does_not_add_up(a, b, sums, left, top):
    a = np.column_stack([left, a[:, :-1]])
    b = np.vstack([top, b[:-1]])
    return a, b, a * b


@WRONG.to("systolic_step", "should return three things, a, b and sums")
def returns_the_sums_only(a, b, sums, left, top):
    a = np.column_stack([left, a[:, :-1]])
    b = np.vstack([top, b[:-1]])
    return sums + a * b


@WRONG.to("systolic_step", "raised ValueError", "of your cell: a = np.vstack([left, a[:-1]])")
def moves_a_down_and_b_right(a, b, sums, left, top):
    if a.shape != (1, 1):
        a = np.vstack([left, a[:-1]])
        b = np.column_stack([top, b[:, :-1]])
    else:
        a[0], b[0] = left, top
    return a, b, sums + a * b


def late(x):
    """What skew should give."""
    return np.stack([np.pad(row, (i, len(x) - 1 - i)) for i, row in enumerate(x)])


def run(left, top, m, n, ticks, step):
    """A grid, for so many ticks."""
    a, b, sums = (np.zeros((m, n), int) for _ in range(3))
    for t in range(ticks):
        a, b, sums = step(a, b, sums, left[:, t], top[t])
    return sums


@WRONG.to("systolic_matmul", "raised IndexError", "of your cell: a, b, sums = step(")
def nothing_more_to_enter(x, y, step):
    (m, k), n = x.shape, y.shape[1]
    left, top = late(x), late(y.T).T
    a, b, sums = (np.zeros((m, n), int) for _ in range(3))
    for t in range(m + n + k - 2):
        a, b, sums = step(a, b, sums, left[:, t], top[t])
    return sums


@WRONG.to("systolic_matmul", "The product of 2 x 1 and 1 x 1, after 1 tick, is wrong", "element [1, 0]")
def stops_when_row_0_is_in(x, y, step):
    (m, k), n = x.shape, y.shape[1]
    left, top = np.pad(late(x), ((0, 0), (0, n))), np.pad(late(y.T).T, ((0, m), (0, 0)))
    return run(left, top, m, n, k, step)


@WRONG.to("systolic_matmul", "The product of 2 x 1 and 1 x 1, after 2 ticks, is wrong", "element [1, 0]")
def does_not_skew(x, y, step):
    (m, k), n = x.shape, y.shape[1]
    left, top = np.pad(x, ((0, 0), (0, m + n))), np.pad(y, ((0, m + n), (0, 0)))
    return run(left, top, m, n, m + n + k - 2, step)


@WRONG.to("systolic_matmul", "In tick 0 step was given a wrong top, on 1 x 1 PEs", "shape (1,)", "shape (3,)")
def delays_the_rows_of_y(x, y, step):
    (m, k), n = x.shape, y.shape[1]
    left, top = np.pad(late(x), ((0, 0), (0, n))), np.pad(late(y), ((0, 0), (0, m)))
    return run(left, top.T, m, n, m + n + k - 2, step)


@WRONG.to("systolic_matmul", "step was never called")
def asks_numpy(x, y, step):
    return x @ y


@WRONG.over_par("systolic_matmul", "It passes, above par in ticks", "the last PE begins m + n - 2 ticks late")
def a_few_ticks_more(x, y, step):
    (m, k), n = x.shape, y.shape[1]
    left, top = np.pad(late(x), ((0, 0), (0, n + 3))), np.pad(late(y.T).T, ((0, m + 3), (0, 0)))
    return run(left, top, m, n, m + n + k, step)


@WRONG.to("systolic_cost", "systolic_cost(1, 1, 1), the ticks,", "expected 1", "got      3")
def simply_adds_the_sizes(m, n, k):
    ticks = m + n + k
    return ticks, m * k + k * n, k / ticks


@WRONG.to("systolic_cost", "systolic_cost(2, 1, 1), the ticks,", "expected 2", "got      1")
def forgets_that_the_last_is_late(m, n, k):
    return k, m * k + k * n, 1.0


@WRONG.to("systolic_cost", "systolic_cost(2, 1, 1), the reads,", "expected 3", "got      4")
def counts_what_each_pe_takes(m, n, k):
    ticks = m + n + k - 2
    return ticks, 2 * m * n * k, k / ticks


@WRONG.to("systolic_cost", "systolic_cost(2, 1, 1), the utilisation,", "expected 0.5", "got      1")
def divides_by_the_ticks_alone(m, n, k):
    ticks = m + n + k - 2
    return ticks, m * k + k * n, m * n * k / ticks


@WRONG.to("systolic_cost", "systolic_cost(2, 1, 1), the utilisation,", "expected 0.5", "got      50")
def gives_per_cent(m, n, k):
    ticks = m + n + k - 2
    return ticks, m * k + k * n, 100 * k / ticks if ticks > 1 else 1.0


@WRONG.to("systolic_matmul", "is right, but the grid has not computed it", "Feed x and y into the grid")
def calls_step_for_show(x, y, step):
    (m, k), n = x.shape, y.shape[1]
    run(np.zeros((m, 99), int), np.zeros((99, n), int), m, n, m + n + k - 2, step)
    return x @ y


@WRONG.to(
    "systolic_matmul",
    "In tick 0, step was not given the a that the PEs hold",
    "come in through left and top alone",
)
def fills_whole_rows_at_once(x, y, step):
    (m, k), n = x.shape, y.shape[1]
    sums = np.zeros((m, n), x.dtype)
    for p in range(k):
        a, b = np.repeat(x[:, p : p + 1], n, axis=1), np.repeat(y[p : p + 1], m, axis=0)
        a, b, sums = step(a, b, sums, x[:, p], y[p])
    return sums


@WRONG.to("systolic_matmul", "In tick 0, step was not given the sums that the PEs hold")
def begins_with_the_product(x, y, step):
    zeros = np.zeros((len(x), y.shape[1]), x.dtype)
    return step(zeros, zeros, x @ y, zeros[:, 0], zeros[0])[2]
