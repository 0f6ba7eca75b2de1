"""Wrong answers to lesson 8."""

import torch

import minidist as md
from minidist import comm
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


def ring(x, step, gives, takes, add):
    """One step of a ring, as the wrong answers below take it."""
    r, n = md.rank(), md.size()
    arrived = torch.empty_like(takes)
    work = comm.send(gives, (r + step) % n, async_op=True)
    comm.recv(arrived, (r - step) % n)
    work.wait()
    if add:
        takes.add_(arrived)
    else:
        takes.copy_(arrived)


@WRONG.to("shift", "no rank can go on", "waits for rank", "line", "comm.send(x")
def all_send_first(x):
    r, n = md.rank(), md.size()
    arrived = torch.empty_like(x)
    comm.send(x, (r + 1) % n)
    comm.recv(arrived, (r - 1) % n)
    return arrived


@WRONG.to("shift", "On 3 ranks", "rank 0's result", "expected", "got")
def gives_to_the_rank_before(x):
    r, n = md.rank(), md.size()
    if n == 1:
        return x.clone()
    arrived = torch.empty_like(x)
    work = comm.send(x, (r - 1) % n, async_op=True)
    comm.recv(arrived, (r + 1) % n)
    work.wait()
    return arrived


@WRONG.to("shift", "rank 0's own x, which should stay as it was")
def receives_into_x(x):
    r, n = md.rank(), md.size()
    if n == 1:
        return x
    work = comm.send(x.clone(), (r + 1) % n, async_op=True)
    comm.recv(x, (r - 1) % n)
    work.wait()
    return x


@WRONG.to("shift", "is None", "return")
def forgets_to_return(x):
    ring(x, 1, x, x.clone(), add=False) if md.size() > 1 else None


@WRONG.to("shift", "1 rank", "ValueError", "this rank itself")
def talks_to_itself_when_alone(x):
    r, n = md.rank(), md.size()
    arrived = torch.empty_like(x)
    work = comm.send(x, (r + 1) % n, async_op=True)
    comm.recv(arrived, (r - 1) % n)
    work.wait()
    return arrived


@WRONG.to("shift", "rank 0 begins comm.send and never waits for it", "work.wait()")
def never_waits(x):
    r, n = md.rank(), md.size()
    if n == 1:
        return x.clone()
    arrived = torch.empty_like(x)
    comm.send(x, (r + 1) % n, async_op=True)
    comm.recv(arrived, (r - 1) % n)
    return arrived


@WRONG.to(
    "shift", "On 2 ranks with tensors of length 0", "rank 1 has returned from its function", "rank 0 waits"
)
def the_last_has_nobody_to_give_to(x):
    r, n = md.rank(), md.size()
    if r == n - 1:
        return x.clone()
    arrived = torch.empty_like(x)
    work = comm.send(x, r + 1, async_op=True)
    comm.recv(arrived, (r - 1) % n)
    work.wait()
    return arrived


@WRONG.to("ring_reduce_scatter", "part of the sum", "expected", "got")
def one_step_too_few(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 2):
        ring(x, 1, parts[(r - 1 - s) % n], parts[(r - 2 - s) % n], add=True)
    return parts[r]


@WRONG.to("ring_reduce_scatter", "part of the sum", "shape")
def ends_with_the_next_part(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        ring(x, 1, parts[(r - s) % n], parts[(r - 1 - s) % n], add=True)
    return parts[(r + 1) % n]


@WRONG.to("ring_reduce_scatter", "part of the sum")
def stores_in_place_of_adding(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        ring(x, 1, parts[(r - 1 - s) % n], parts[(r - 2 - s) % n], add=False)
    return parts[r]


@WRONG.to("ring_reduce_scatter", "comm.all_reduce", "do without")
def lets_the_library_do_it(x):
    return comm.all_reduce(x).tensor_split(md.size())[md.rank()]


@WRONG.to("ring_all_gather", "On 2 ranks", "expected", "got")
def adds_in_place_of_storing(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        ring(x, 1, parts[(r - s) % n], parts[(r - 1 - s) % n], add=True)
    return x


@WRONG.to("ring_all_gather", "On 3 ranks", "expected", "got")
def always_sends_its_own_part(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for _ in range(n - 1):
        ring(x, 1, parts[r].clone(), parts[(r - 1) % n], add=False)
    return x


@WRONG.to("ring_all_gather", "filled in place")
def returns_a_new_tensor(x):
    r, n = md.rank(), md.size()
    x = x.clone()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        ring(x, 1, parts[(r - s) % n], parts[(r - 1 - s) % n], add=False)
    return x


@WRONG.to("ring_all_reduce", "On 2 ranks with tensors of length 1, rank 1's result", "expected", "got")
def only_reduces(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        ring(x, 1, parts[(r - 1 - s) % n], parts[(r - 2 - s) % n], add=True)
    return x


@WRONG.to("ring_all_reduce", "rank 0's result", "expected", "got")
def takes_the_mean(x):
    return comm_free_sum(x) / md.size()


def comm_free_sum(x):
    total, travels = x.clone(), x.clone()
    for _ in range(md.size() - 1):
        ring(x, 1, travels.clone(), travels, add=False)
        total += travels
    return total


@WRONG.to("ring_all_reduce", "in place")
def sums_in_a_new_tensor(x):
    return comm_free_sum(x)


@WRONG.to("ring_all_reduce", "the idea is missing: bytes sent by a rank", "never the whole tensor")
def passes_whole_tensors_around(x):
    return x.copy_(comm_free_sum(x))


@WRONG.to("ring_seconds", "ring_seconds(", "expected", "got")
def sends_it_whole(size, ranks, alpha, beta):
    return 2 * (ranks - 1) * (alpha + beta * size)


@WRONG.to("ring_seconds", "expected", "got")
def forgets_the_second_half(size, ranks, alpha, beta):
    return (ranks - 1) * (alpha + beta * size / ranks)


@WRONG.to("ring_seconds", "expected", "got")
def one_alpha_in_all(size, ranks, alpha, beta):
    return alpha + 2 * (ranks - 1) / ranks * size * beta
