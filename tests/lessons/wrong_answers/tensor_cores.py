"""Wrong answers to lesson 6."""

import numpy as np
from numba import cuda, float32, uint32

from minidist.kernels.cuda.instructions.warp import mma_m16n8k16_f16
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to(
    "element_of_a", "element_of_a(0, 2) is wrong", "expected row 8, column 0", "got      row 0, column 8"
)
def goes_right_first(lane, i):
    g, t = lane // 4, lane % 4
    return g + 8 * (i // 4), 2 * t + i % 2 + 8 * (i // 2 % 2)


@WRONG.to("element_of_a", "element_of_a(0, 4) is wrong", "expected row 0, column 8")
def as_in_c(lane, i):
    g, t = lane // 4, lane % 4
    return g + 8 * (i // 2 % 2), 2 * t + i % 2


@WRONG.to(
    "element_of_a", "element_of_a(1, 0) is wrong", "expected row 0, column 2", "got      row 1, column 0"
)
def exchanges_g_and_t(lane, i):
    g, t = lane % 8, lane // 8
    return g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)


@WRONG.to("element_of_a", "element_of_a(0, 0) should be two whole numbers, (row, column)", "got      0")
def gives_an_index(lane, i):
    g, t = lane // 4, lane % 4
    return 16 * (g + 8 * (i // 2 % 2)) + 2 * t + i % 2 + 8 * (i // 4)


@WRONG.to("tensor_matmul", "a of 16 x 16 and b of 16 x 8, c is wrong", "expected", "got")
@cuda.jit
def exchanges_registers(a, b, c):
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    i0, j0 = 16 * cuda.blockIdx.y, 8 * cuda.blockIdx.x
    for r in range(4):
        sums[r] = float32(0)
    for w in range(0, a.shape[1], 8):
        fragment_a[0] = a[i0 + g, w + t]
        fragment_a[1] = a[i0 + g, w + t + 4]
        fragment_a[2] = a[i0 + g + 8, w + t]
        fragment_a[3] = a[i0 + g + 8, w + t + 4]
        fragment_b[0] = b[j0 + g, w + t]
        fragment_b[1] = b[j0 + g, w + t + 4]
        mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0)
    for r in range(4):
        c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2] = sums[r]


@WRONG.to("tensor_matmul", "a of 16 x 16 and b of 16 x 8", "Out of bounds")
@cuda.jit
def takes_words_for_elements(a, b, c):
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    i0, j0 = 16 * cuda.blockIdx.y, 8 * cuda.blockIdx.x
    for r in range(4):
        sums[r] = float32(0)
    for w in range(0, a.shape[1], 16):
        fragment_a[0] = a[i0 + g, w + 2 * t]
        fragment_a[1] = a[i0 + g + 8, w + 2 * t]
        fragment_a[2] = a[i0 + g, w + 2 * t + 8]
        fragment_a[3] = a[i0 + g + 8, w + 2 * t + 8]
        fragment_b[0] = b[j0 + g, w + 2 * t]
        fragment_b[1] = b[j0 + g, w + 2 * t + 8]
        mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0)
    for r in range(4):
        c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2] = sums[r]


@WRONG.to("tensor_matmul", "a of 16 x 32 and b of 32 x 8, c is wrong")
@cuda.jit
def only_the_first_sixteen(a, b, c):
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    i0, j0 = 16 * cuda.blockIdx.y, 8 * cuda.blockIdx.x
    for r in range(4):
        sums[r] = float32(0)
    fragment_a[0] = a[i0 + g, t]
    fragment_a[1] = a[i0 + g + 8, t]
    fragment_a[2] = a[i0 + g, t + 4]
    fragment_a[3] = a[i0 + g + 8, t + 4]
    fragment_b[0] = b[j0 + g, t]
    fragment_b[1] = b[j0 + g, t + 4]
    mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0)
    for r in range(4):
        c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2] = sums[r]


@WRONG.to("tensor_matmul", "a of 16 x 16 and b of 16 x 16, c is wrong from element [0, 8]")
@cuda.jit
def forgets_where_its_columns_begin(a, b, c):
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    i0, j0 = 16 * cuda.blockIdx.y, 8 * cuda.blockIdx.x
    for r in range(4):
        sums[r] = float32(0)
    for w in range(0, a.shape[1], 8):
        fragment_a[0] = a[i0 + g, w + t]
        fragment_a[1] = a[i0 + g + 8, w + t]
        fragment_a[2] = a[i0 + g, w + t + 4]
        fragment_a[3] = a[i0 + g + 8, w + t + 4]
        fragment_b[0] = b[g, w + t]
        fragment_b[1] = b[g, w + t + 4]
        mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0)
    for r in range(4):
        c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2] = sums[r]


@WRONG.over_par("tensor_matmul", "It passes, above par in loads of a warp for each of them")
@cuda.jit
def reads_c_for_its_sums(a, b, c):
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    i0, j0 = 16 * cuda.blockIdx.y, 8 * cuda.blockIdx.x
    for r in range(4):
        c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2] = float32(0)
    for w in range(0, a.shape[1], 8):
        for r in range(4):
            sums[r] = c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2]
        fragment_a[0] = a[i0 + g, w + t]
        fragment_a[1] = a[i0 + g + 8, w + t]
        fragment_a[2] = a[i0 + g, w + t + 4]
        fragment_a[3] = a[i0 + g + 8, w + t + 4]
        fragment_b[0] = b[j0 + g, w + t]
        fragment_b[1] = b[j0 + g, w + t + 4]
        mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0)
        for r in range(4):
            c[i0 + g + 8 * (r // 2), j0 + 2 * t + r % 2] = sums[r]


@WRONG.to(
    "row_for_ldmatrix", "row_for_ldmatrix(8) is wrong", "expected row 8, column 0", "got      row 0, column 8"
)
def upper_quarters_first(lane):
    return lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8


@WRONG.to("row_for_ldmatrix", "row_for_ldmatrix(1) is wrong", "expected row 1, column 0")
def what_the_lane_gets(lane):
    return lane // 4, 2 * (lane % 4)


@WRONG.to(
    "row_for_ldmatrix",
    "row_for_ldmatrix(16) is wrong",
    "expected row 0, column 8",
    "got      row 16, column 0",
)
def a_row_for_each_lane(lane):
    return lane, 0


@WRONG.to("rounded", "is wrong from element", "expected", "got")
def cuts_off(x, bits):
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(fraction, bits)), exponent - bits)


@WRONG.to("rounded", "rounded([2049, 0.00123], 11) is wrong", "expected [2048", "got      [2050")
def ties_away_from_zero(x, bits):
    fraction, exponent = np.frexp(x)
    scaled = np.ldexp(fraction, bits)
    return np.ldexp(np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5)), exponent - bits)


@WRONG.to("rounded", "expected", "got")
def rounds_decimals(x, bits):
    return np.round(x, bits)


@WRONG.to("rounded", "is wrong from element 0", "expected [0.33398, 0.66797]")
def one_bit_too_few(x, bits):
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(fraction, bits - 1)), exponent - bits + 1)


@WRONG.to("rounded", "is float64, and should be float32")
def leaves_float32(x, bits):
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)


@WRONG.to("error_bound", "error_bound(8, 1)", "expected 0.007828", "got      0.003906")
def only_one_factor(bits, k):
    return (1 + 2.0**-bits) * (1 + 2.0**-24) ** k - 1


@WRONG.to("error_bound", "error_bound(11, 16)", "expected", "got")
def factors_each_time(bits, k):
    return ((1 + 2.0**-bits) ** 2 * (1 + 2.0**-24)) ** k - 1


@WRONG.to("error_bound", "error_bound(8, 1)", "got      1.008")
def forgets_to_take_one_off(bits, k):
    return (1 + 2.0**-bits) ** 2 * (1 + 2.0**-24) ** k


@WRONG.to("error_bound", "error_bound(8, 4096)", "expected", "got")
def sums_in_the_small_format(bits, k):
    return (1 + 2.0**-bits) ** (k + 2) - 1 if k > 100 else (1 + 2.0**-bits) ** 2 * (1 + 2.0**-24) ** k - 1


@WRONG.to("error_bound", "error_bound(11, 16)", "expected", "got")
def forgets_the_sum(bits, k):
    return (1 + 2.0**-bits) ** 2 - 1


@WRONG.to("element_of_a", "element_of_a(0, 0) should be two whole numbers", "got      (0.0, 0)")
def divides_with_one_slash(lane, i):
    return lane / 4 + 8 * (i // 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i // 4)


@WRONG.to("rounded", "returns what it should, but changes x", "a new array")
def rounds_in_place(x, bits):
    fraction, exponent = np.frexp(x)
    x[...] = np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)
    return x


@WRONG.to("tensor_matmul", "A name stands for an array in one place", "returns nothing")
@cuda.jit
def keeps_what_mma_returns(a, b, c):
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    for r in range(4):
        sums[r] = float32(0)
    for _ in range(0, a.shape[1], 8):
        sums = mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0)


@WRONG.to("tensor_core_peak", "tensor_core_peak(1, 1, 4, 4, 4, 1.0)", "expected 128", "got      64")
def counts_a_multiply_add_as_one(multiprocessors, cores, m, n, k, clock):
    return m * n * k * cores * multiprocessors * clock


@WRONG.to("tensor_core_peak", "expected 128", "got      32")
def counts_the_elements_of_the_result(multiprocessors, cores, m, n, k, clock):
    return 2 * m * n * cores * multiprocessors * clock


@WRONG.to("tensor_core_peak", "tensor_core_peak(84, 4, 4, 4, 4, 1500000000.0)", "expected", "got")
def forgets_that_a_multiprocessor_has_several(multiprocessors, cores, m, n, k, clock):
    return 2 * m * n * k * multiprocessors * clock


@WRONG.to("rounded", "rounded([255.999985], 24)", "expected", "got")
def trusts_a_logarithm(x, bits):
    exponent = np.floor(np.log2(np.abs(x) + (x == 0))) + 1  # of a number just below 256 it is 9
    return np.ldexp(np.round(np.ldexp(x, (bits - exponent).astype(int))), (exponent - bits).astype(int))


@WRONG.to("rounded", "rounded([3e+38, 1e-30], 8)", "got      [nan")
def adds_a_large_number_and_subtracts_it(x, bits):
    with np.errstate(all="ignore"):
        large = x * np.float32(2.0 ** (24 - bits) + 1)  # more than a float32 holds
        return large - (large - x)
