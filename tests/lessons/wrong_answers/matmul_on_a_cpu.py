"""Wrong answers to lesson 1."""

from numba import njit

from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to("matmul_loops", "The product of 1 x 1 and 1 x 1", "expected", "got")
def adds_to_what_was_in_c(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for p in range(a.shape[1]):
                c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul_loops", "The product of 1 x 3 and 3 x 2")
def forgets_to_start_a_new_sum(a, b, c):
    total = 0.0
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, j]
            c[i, j] = total


@WRONG.to("matmul_loops", "The product of 1 x 3 and 3 x 2", "expected", "got")
def takes_n_for_k(a, b, c):
    m, n = a.shape[0], b.shape[1]
    for i in range(m):
        for j in range(n):
            total = 0.0
            for p in range(n):
                total += a[i, p] * b[p, j]
            c[i, j] = total


@WRONG.to("matmul_loops", "read one element at a time", "a[i, p]")
def takes_rows(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            c[i, j] = (a[i, :] * b[:, j]).sum()


@WRONG.to("intensity", "intensity(1, 1, 1, 2)", "expected", "got")
def counts_a_multiply_add_as_one(m, k, n, itemsize):
    return m * k * n / (itemsize * (m * k + k * n + m * n))


@WRONG.to("intensity", "intensity(1, 1, 1, 2)", "expected", "got")
def counts_elements_and_not_bytes(m, k, n, itemsize):
    return 2 * m * k * n / (m * k + k * n + m * n)


@WRONG.to("intensity", "intensity(1, 1, 1, 2)", "expected", "got")
def forgets_that_c_is_written(m, k, n, itemsize):
    return 2 * m * k * n / (itemsize * (m * k + k * n))


@WRONG.to("matmul_rows", "The product of 1 x 1 and 1 x 1", "expected", "got")
def does_not_clear_c(a, b, c):
    for i in range(a.shape[0]):
        for p in range(a.shape[1]):
            for j in range(b.shape[1]):
                c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul_rows", "The product of 1 x 3 and 3 x 2", "expected", "got")
def overwrites_c(a, b, c):
    c[:] = 0
    for i in range(a.shape[0]):
        for p in range(a.shape[1]):
            for j in range(b.shape[1]):
                c[i, j] = a[i, p] * b[p, j]


@WRONG.to("matmul_rows", "The product of 1 x 3 and 3 x 2", "expected", "got")
def clears_c_too_often(a, b, c):
    for i in range(a.shape[0]):
        for p in range(a.shape[1]):
            for j in range(b.shape[1]):
                c[i, j] = 0
                c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul_blocks", "IndexError", "line", "b[p, j]")
def goes_past_the_end(a, b, c, size):
    c[:] = 0
    for p0 in range(0, a.shape[1], size):
        for i in range(a.shape[0]):
            for p in range(p0, p0 + size):
                for j in range(b.shape[1]):
                    c[i, j] += b[p, j] * a[i, p]


@WRONG.to("matmul_blocks", "The product of", "size", "expected", "got")
def ends_each_block_one_too_early(a, b, c, size):
    c[:] = 0
    for p0 in range(0, a.shape[1], size):
        for i in range(a.shape[0]):
            for p in range(p0, min(p0 + size, a.shape[1] - 1)):
                for j in range(b.shape[1]):
                    c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul_blocks", "The product of", "size", "expected", "got")
def clears_c_for_every_row(a, b, c, size):
    for p0 in range(0, a.shape[1], size):
        for i in range(a.shape[0]):
            c[i, :] = 0
            for p in range(p0, min(p0 + size, a.shape[1])):
                for j in range(b.shape[1]):
                    c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul_tile", "The product of 2 x 8 and 8 x 2", "expected", "got")
def stores_in_place_of_adding(a, b, c):
    for i in range(0, a.shape[0], 2):
        for p in range(0, a.shape[1], 4):
            for j in range(b.shape[1]):
                for row in range(2):
                    total = 0.0
                    for q in range(4):
                        total += a[i + row, p + q] * b[p + q, j]
                    c[i + row, j] = total


@WRONG.to("matmul_tile", "The product of 2 x 4 and 4 x 1", "expected", "got")
def forgets_the_second_row(a, b, c):
    c[:] = 0
    for i in range(0, a.shape[0], 2):
        for p in range(0, a.shape[1], 4):
            for j in range(b.shape[1]):
                for q in range(4):
                    c[i, j] += a[i, p + q] * b[p + q, j]


@WRONG.to("matmul_tile", "The product of 2 x 4 and 4 x 1", "expected", "got")
def uses_one_row_of_a_for_both(a, b, c):
    c[:] = 0
    for i in range(0, a.shape[0], 2):
        for p in range(0, a.shape[1], 4):
            for j in range(b.shape[1]):
                for q in range(4):
                    c[i, j] += a[i, p + q] * b[p + q, j]
                    c[i + 1, j] += a[i, p + q] * b[p + q, j]


@WRONG.to("matmul_loops", "the idea is missing: writes", "in a variable")
def adds_up_in_c(a, b, c):
    c[:] = 0
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for p in range(a.shape[1]):
                c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul_rows", "the idea is missing: cache lines", "j in the innermost loop")
@WRONG.to("matmul_tile", "the idea is missing: reads", "the idea is missing: writes")
def walks_down_columns(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            c[i, j] = total
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, j]
                c[i, j] = total


@WRONG.to("matmul_blocks", "the idea is missing: cache lines", "for all rows of a")
def does_not_use_the_block_again(a, b, c, size):
    c[:] = 0
    for i in range(a.shape[0]):
        for p in range(a.shape[1]):
            for j in range(b.shape[1]):
                c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul_loops", "without @njit", "the lesson compiles it below")
@njit
def compiles_it_itself(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, j]
            c[i, j] = total


@WRONG.to("matmul_loops", "a, which should stay as it was", "expected", "got      0")
def clears_what_it_has_read(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, j]
                if j == b.shape[1] - 1:
                    a[i, p] = 0
            c[i, j] = total


@WRONG.over_par("matmul_rows", "above par in cache lines", "j is in the innermost loop, as it should be")
def goes_through_all_of_c_for_each_p(a, b, c):
    c[:] = 0
    for p in range(a.shape[1]):
        for i in range(a.shape[0]):
            for j in range(b.shape[1]):
                c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul_rows", "14\u202f976, where par is 915", "walk along rows: j in the innermost loop")
def keeps_the_loops_of_the_first_exercise(a, b, c):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, j]
            c[i, j] = total


@WRONG.to("matmul_blocks", "the idea is missing: cache lines", "walk along rows: j in the innermost loop")
def keeps_those_loops_and_takes_no_block(a, b, c, size):
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, j]
            c[i, j] = total


@WRONG.to("matmul_tile", "the idea is missing: writes", "add four products to c at once")
def takes_two_by_two(a, b, c):
    c[:] = 0
    for i in range(0, a.shape[0], 2):
        for p in range(0, a.shape[1], 2):
            a00, a01, a10, a11 = a[i, p], a[i, p + 1], a[i + 1, p], a[i + 1, p + 1]
            for j in range(b.shape[1]):
                b0, b1 = b[p, j], b[p + 1, j]
                c[i, j] += a00 * b0 + a01 * b1
                c[i + 1, j] += a10 * b0 + a11 * b1
