"""Wrong answers to lesson 0."""

import sys

import numpy as np

from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to("add_cost", "add_cost(1, 4), the bytes,", "expected 12", "got      8")
def forgets_that_y_goes_back(n, itemsize):
    return n, 2 * n * itemsize


@WRONG.to("add_cost", "add_cost(1, 4), the bytes,", "expected 12", "got      3")
def counts_elements_as_bytes(n, itemsize):
    return n, 3 * n


@WRONG.to("add_cost", "add_cost(1, 4), the FLOPs,", "expected 1", "got      2")
def counts_a_multiplication_too(n, itemsize):
    return 2 * n, 3 * n * itemsize


@WRONG.to("add_cost", "should return two things, the FLOPs and the bytes", "it returned 1.")
def returns_the_flops_only(n, itemsize):
    return n


@WRONG.to("add_cost", "add_cost(1, 4) is None", "return", "That call printed:\n  1 12")
def prints_in_place_of_returning(n, itemsize):
    print(n, 3 * n * itemsize)


@WRONG.to("matmul_cost", "matmul_cost(1, 1, 1, 4), the FLOPs,", "expected 2", "got      1")
def counts_a_multiply_add_as_one(m, k, n, itemsize):
    return m * k * n, (m * k + k * n + m * n) * itemsize


@WRONG.to("matmul_cost", "matmul_cost(1, 1, 1, 4), the bytes,", "expected 12", "got      8")
def forgets_to_write_c(m, k, n, itemsize):
    return 2 * m * k * n, (m * k + k * n) * itemsize


@WRONG.to("matmul_cost", "matmul_cost(1, 5, 1, 4), the bytes,", "expected 44", "got      60")
def moves_three_numbers_for_each_multiply_add(m, k, n, itemsize):
    return 2 * m * k * n, 3 * m * k * n * itemsize


@WRONG.to("matmul_cost", "matmul_cost(1, 5, 1, 4), the FLOPs,", "expected 10", "got      2")
def takes_k_for_n(m, k, n, itemsize):
    return 2 * m * n * n, (m * k + k * n + m * n) * itemsize


@WRONG.to("attainable", "raised ValueError", "of your cell: return min(peak")
def python_s_min_on_an_array(peak, bandwidth, intensity):
    """FLOP/s that a program of this intensity can reach at most."""
    return min(peak, bandwidth * intensity)


@WRONG.to("attainable", "attainable(", "is wrong", "expected", "got")
def takes_the_higher_limit(peak, bandwidth, intensity):
    return np.maximum(peak, bandwidth * intensity)


@WRONG.to("attainable", "attainable(", "is wrong", "expected", "got")
def forgets_the_peak(peak, bandwidth, intensity):
    return bandwidth * intensity


@WRONG.to("attainable", "attainable(", "is wrong", "expected", "got")
def divides_by_the_intensity(peak, bandwidth, intensity):
    return np.minimum(peak, bandwidth / (intensity + 1e-30))


@WRONG.to("predict", "The time that predict(800, 10, 100, 10) gives is wrong", "expected 8", "got      9")
def one_after_the_other(flop, moved, peak, bandwidth):
    computing, moving = flop / peak, moved / bandwidth
    return computing + moving, "memory" if moving > computing else "arithmetic"


@WRONG.to("predict", "(200, 20, 100, 10) calls the limit", "expected 'arithmetic'", "got      'memory'")
def takes_the_ridge_for_memory(flop, moved, peak, bandwidth):
    computing, moving = flop / peak, moved / bandwidth
    return max(computing, moving), "memory" if moving >= computing else "arithmetic"


@WRONG.to("predict", "ZeroDivisionError", "of your cell: if flop and flop / moved")
def by_way_of_the_intensity(flop, moved, peak, bandwidth):
    if flop and flop / moved < peak / bandwidth:
        return moved / bandwidth, "memory"
    return (flop / peak, "arithmetic") if flop else (moved / bandwidth, "memory")


@WRONG.to("predict", "should return two things, the seconds and a string")
def forgets_to_say_what_limits(flop, moved, peak, bandwidth):
    return max(flop / peak, moved / bandwidth)


@WRONG.to("predict", "predict(800, 10, 100, 10) calls the limit", "expected 'arithmetic'")
def mixes_up_the_two(flop, moved, peak, bandwidth):
    computing, moving = flop / peak, moved / bandwidth
    return max(computing, moving), "arithmetic" if moving >= computing else "memory"


@WRONG.to(
    "add_cost", "raised TypeError", "takes 1 positional argument but 2 were given", "line", "def takes_"
)
def takes_one_argument(n):
    return n, 12 * n


@WRONG.to("add_cost", "raised SystemExit", "line", "sys.exit")
def ends_the_program(n, itemsize):
    sys.exit(f"{n} FLOPs")


@WRONG.to("add_cost", "the bytes, has the shape (2,), and should be one number")
def nests_its_results(n, itemsize):
    return n, (2 * n * itemsize, n * itemsize)


@WRONG.to("attainable", "returns what it should, but changes intensity", "a new array")
def changes_what_it_is_given(peak, bandwidth, intensity):
    if not isinstance(intensity, np.ndarray):
        return min(peak, bandwidth * intensity)
    intensity *= bandwidth
    return np.minimum(peak, intensity)
