"""Wrong answers to lesson 3."""

from numba import cuda, float32, njit

from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to(
    "add",
    "1 element and 1 block of 32 threads",
    "Out of bounds",
    "thread 1 of block 0",
    "line",
    "x[i] + y[i]",
)
@cuda.jit
def no_guard(x, y, z):
    i = cuda.grid(1)
    z[i] = x[i] + y[i]


@WRONG.to("add", "33 elements and 2 blocks", "z is wrong from element 32", "got      [", "nan")
@cuda.jit
def only_within_its_block(x, y, z):
    i = cuda.threadIdx.x
    if i < z.size:
        z[i] = x[i] + y[i]


@WRONG.to("add", "Out of bounds", "thread 1 of block 0")
@cuda.jit
def guard_off_by_one(x, y, z):
    i = cuda.grid(1)
    if i <= z.size:
        z[i] = x[i] + y[i]


@WRONG.to("add", "A kernel returns nothing", "arrays")
@cuda.jit
def returns_the_sum(x, y, z):
    return x[cuda.grid(1)] + y[cuda.grid(1)]


@WRONG.to("add", "plain Python function", "@cuda.jit")
def not_decorated(x, y, z):
    i = cuda.grid(1)
    if i < z.size:
        z[i] = x[i] + y[i]


@WRONG.to("add", "Numba can't compile it", "name 'n' is not defined")
@cuda.jit
def a_name_that_is_not_there(x, y, z):
    i = cuda.grid(1)
    if i < n:  # noqa: F821
        z[i] = x[i] + y[i]


@WRONG.to("add", "y, which should stay as it was")
@cuda.jit
def adds_into_y(x, y, z):
    i = cuda.grid(1)
    if i < z.size:
        y[i] += x[i]
        z[i] = y[i]


@WRONG.to("add", "takes 2 arguments", "3 were passed")
@cuda.jit
def leaves_an_argument_out(x, z):
    i = cuda.grid(1)
    if i < z.size:
        z[i] += x[i]


@WRONG.to("sectors", "sectors(0, 128)", "expected 32", "got      128")
def counts_the_bytes_between(first, stride):
    return max(1, 32 * abs(stride) // 32)


@WRONG.to("sectors", "sectors(4, 4)", "expected 5", "got      4")
def takes_no_heed_of_first(first, stride):
    return len({t * stride // 32 for t in range(32)})


@WRONG.to("sectors", "sectors(0, 4)", "expected 4", "got      32")
def counts_sectors_twice(first, stride):
    return len([(first + t * stride) // 32 for t in range(32)])


@WRONG.to("sectors", "sectors(0, 4)", "expected 4", "got      16")
def takes_the_stride_for_elements(first, stride):
    return len({(first + 4 * t * stride) // 32 for t in range(32)})


@WRONG.to("matmul", "Out of bounds", "a of 1 x 1")
@cuda.jit
def no_guard_in_two_dimensions(a, b, c):
    j, i = cuda.grid(2)
    total = float32(0)
    for p in range(a.shape[1]):
        total += a[i, p] * b[p, j]
    c[i, j] = total


@WRONG.to("matmul", "a of 2 x 4 and b of 4 x 3", "c is wrong from element [0, 0]", "expected", "got")
@cuda.jit
def one_step_too_few(a, b, c):
    j, i = cuda.grid(2)
    if i < c.shape[0] and j < c.shape[1]:
        total = float32(0)
        for p in range(1, a.shape[1]):
            total += a[i, p] * b[p, j]
        if a.shape[1] == 1:
            total += a[i, 0] * b[0, j]
        c[i, j] = total


@WRONG.to("matmul", "c is wrong", "nan")
@cuda.jit
def adds_to_what_nobody_wrote(a, b, c):
    j, i = cuda.grid(2)
    if i < c.shape[0] and j < c.shape[1]:
        for p in range(a.shape[1]):
            c[i, j] += a[i, p] * b[p, j]


@WRONG.to("matmul", "a of 2 x 4 and b of 4 x 3", "has a fault")
@cuda.jit
def guards_with_the_wrong_sizes(a, b, c):
    j, i = cuda.grid(2)
    if i < c.shape[1] and j < c.shape[0]:
        total = float32(0)
        for p in range(a.shape[1]):
            total += a[j, p] * b[p, i]
        c[i, j] = total


@WRONG.to("sums", "100 elements and 1 block of 32 threads", "the sum of partial is wrong", "expected", "got")
@cuda.jit
def one_element_each(x, partial):
    i = cuda.grid(1)
    partial[i] = x[i] if i < x.size else float32(0)


@WRONG.to("sums", "100 elements and 2 blocks of 32 threads", "the sum of partial is wrong")
@cuda.jit
def goes_on_by_a_block(x, partial):
    total = float32(0)
    for i in range(cuda.grid(1), x.size, cuda.blockDim.x):
        total += x[i]
    partial[cuda.grid(1)] = total


@WRONG.to("sums", "5 elements and 1 block of 32 threads", "27 elements of partial were never", "partial[5]")
@cuda.jit
def writes_only_with_a_share(x, partial):
    i = cuda.grid(1)
    if i < x.size:
        total = float32(0)
        for p in range(i, x.size, cuda.gridsize(1)):
            total += x[p]
        partial[i] = total


@WRONG.to("sums", "5 elements", "the sum of partial is wrong", "got      0")
@cuda.jit
def loses_the_rest(x, partial):
    i, piece = cuda.grid(1), x.size // cuda.gridsize(1)
    total = float32(0)
    for p in range(i * piece, (i + 1) * piece):
        total += x[p]
    partial[i] = total


@WRONG.to("sums", "Race", "partial", "at once")
@cuda.jit
def all_into_one_element(x, partial):
    total = float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    partial[0] = total


@WRONG.to("add", "@njit", "write @cuda.jit")
@njit
def for_the_cpu(x, y, z):
    i = cuda.grid(1)
    if i < z.size:
        z[i] = x[i] + y[i]


@WRONG.to("add", "A kernel can't make new arrays", "single elements")
@cuda.jit
def whole_arrays(x, y, z):
    z[:] = x + y


@WRONG.to("add", "can't catch exceptions", "leave out try and except")
@cuda.jit
def catches_the_end(x, y, z):
    i = cuda.grid(1)
    try:
        z[i] = x[i] + y[i]
    except IndexError:
        z[0] = x[0]


@WRONG.to("matmul", "Numba can't compile `matmul` for a GPU", "single elements")
@cuda.jit
def as_in_numpy(a, b, c):
    c[:] = a @ b


@WRONG.to(
    "add", "the idea is missing: loads of a warp for 32 elements", "every thread add an element, its own"
)
@cuda.jit
def lets_one_thread_do_it_all(x, y, z):
    if cuda.grid(1) == 0:
        for i in range(z.size):
            z[i] = x[i] + y[i]


@WRONG.to("matmul", "sectors for each load of a warp", "where par is 2.5", "neighbouring elements")
@cuda.jit
def lets_x_count_rows(a, b, c):
    i, j = cuda.grid(2)
    if i < c.shape[0] and j < c.shape[1]:
        total = float32(0)
        for p in range(a.shape[1]):
            total += a[i, p] * b[p, j]
        c[i, j] = total


@WRONG.to("matmul", "the idea is missing: loads of a warp for 32 sums", "every thread one element of c")
@cuda.jit
def a_thread_for_each_row(a, b, c):
    j, i = cuda.grid(2)
    if i < c.shape[0] and j == 0:
        for column in range(c.shape[1]):
            total = float32(0)
            for p in range(a.shape[1]):
                total += a[i, p] * b[p, column]
            c[i, column] = total


@WRONG.to("matmul", "the idea is missing: instructions in float64", "begin the sum as float32(0)")
@cuda.jit
def adds_up_in_float64(a, b, c):
    j, i = cuda.grid(2)
    if i < c.shape[0] and j < c.shape[1]:
        total = 0.0
        for p in range(a.shape[1]):
            total += a[i, p] * b[p, j]
        c[i, j] = total


@WRONG.to(
    "sums", "the idea is missing: loads of a warp for 32 elements", "let all threads share the elements"
)
@cuda.jit
def one_thread_adds_up_all(x, partial):
    total = float32(0)
    if cuda.grid(1) == 0:
        for i in range(x.size):
            total += x[i]
    partial[cuda.grid(1)] = total


@WRONG.to("sums", "the idea is missing: sectors for each load of a warp", "neighbouring elements")
@cuda.jit
def a_piece_for_each_thread(x, partial):
    i, piece = cuda.grid(1), -(-x.size // cuda.gridsize(1))
    total = float32(0)
    for p in range(i * piece, min((i + 1) * piece, x.size)):
        total += x[p]
    partial[i] = total


@WRONG.to("sums", "the idea is missing: instructions in float64", "float32(0)")
@cuda.jit
def begins_with_a_float64(x, partial):
    total = 0.0
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    partial[cuda.grid(1)] = total
