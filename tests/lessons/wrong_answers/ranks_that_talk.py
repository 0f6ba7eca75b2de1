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


@WRONG.to("shift", "On 4 ranks", "rank 0's result", "expected", "got", "10 is rank 1's number")
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


@WRONG.to("shift", "On 1 rank", "rank 0's result is x itself", "x.clone()")
def returns_x_when_alone(x):
    return x if md.size() == 1 else passed_on(x, asks_first=False)


def passed_on(x, asks_first):
    """Give x to the next rank; rank 0 sends first, the others as they are told."""
    r, n = md.rank(), md.size()
    if n == 1:
        return x.clone()
    arrived = torch.empty_like(x)
    if asks_first and r > 0:
        comm.recv(arrived, r - 1)
        comm.send(x, (r + 1) % n)
    else:
        work = comm.send(x, (r + 1) % n, async_op=True)
        comm.recv(arrived, (r - 1) % n)
        work.wait()
    return arrived


@WRONG.to("shift", "the idea is missing: rounds of messages, one after the other", "at the same time")
def a_chain_in_which_all_wait(x):
    return passed_on(x, asks_first=True)


@WRONG.to("shift", "the idea is missing: rounds of messages, one after the other", "at the same time")
def even_ranks_first(x):
    r, n = md.rank(), md.size()
    if n == 1:
        return x.clone()
    arrived = torch.empty_like(x)
    if r % 2:
        comm.recv(arrived, r - 1)
        comm.send(x, (r + 1) % n)
    else:
        comm.send(x, (r + 1) % n)
        comm.recv(arrived, (r - 1) % n)
    return arrived


# Ranks 0 and 2 wait for rank 3, and the message tells of the one that is found first.
@WRONG.to("shift", "On 4 ranks with 8 numbers", "rank 3 has returned from its function", "waits for rank 3")
def the_last_has_nobody_to_give_to(x):
    r, n = md.rank(), md.size()
    if r == n - 1:
        return x.clone()
    arrived = torch.empty_like(x)
    work = comm.send(x, r + 1, async_op=True)
    comm.recv(arrived, (r - 1) % n)
    work.wait()
    return arrived


@WRONG.to(
    "ring_reduce_scatter",
    "rank 0's part of the sum",
    "expected [1111, 1111]",
    "In 1 the parts of ranks 1, 2 and 3 are missing",
)
def one_step_too_few(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 2):
        ring(x, 1, parts[(r - 1 - s) % n], parts[(r - 2 - s) % n], add=True)
    return parts[r]


@WRONG.to("ring_reduce_scatter", "part of the sum", "2222 is the sum of part 1, and this is part 0")
def ends_with_the_next_part(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        ring(x, 1, parts[(r - s) % n], parts[(r - 1 - s) % n], add=True)
    return parts[(r + 1) % n]


@WRONG.to("ring_reduce_scatter", "part of the sum", "the parts of ranks 0, 2 and 3 are missing")
def stores_in_place_of_adding(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        ring(x, 1, parts[(r - 1 - s) % n], parts[(r - 2 - s) % n], add=False)
    return parts[r]


@WRONG.to("ring_reduce_scatter", "comm.all_reduce", "do without")
def lets_the_library_do_it(x):
    return comm.all_reduce(x).tensor_split(md.size())[md.rank()]


@WRONG.to("ring_reduce_scatter", "the idea is missing: bytes sent by a rank", "never the whole tensor")
def sends_the_whole_tensor_round(x):
    return comm_free_sum(x).tensor_split(md.size())[md.rank()]


@WRONG.to("ring_reduce_scatter", "the idea is missing: rounds of messages, one after the other")
def one_rank_after_the_other(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        takes = parts[(r - 2 - s) % n]
        takes.add_(taken(parts[(r - 1 - s) % n], takes))
    return parts[r]


def taken(gives, takes):
    """What comes from the rank before; only rank 0 sends before it listens."""
    r, n = md.rank(), md.size()
    arrived = torch.empty_like(takes)
    if r == 0:
        comm.send(gives, 1)
        comm.recv(arrived, n - 1)
    else:
        comm.recv(arrived, r - 1)
        comm.send(gives, (r + 1) % n)
    return arrived


@WRONG.to("ring_reduce_scatter", "the result is right, but rank 0 sends to ranks 1, 2 and 3", "no ring")
def sends_each_part_to_its_owner(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    works = [comm.send(parts[other], other, async_op=True) for other in range(n) if other != r]
    for other in range(n):
        if other != r:
            parts[r].add_(comm.recv(torch.empty_like(parts[r]), other))
    for work in works:
        work.wait()
    return parts[r]


@WRONG.to("ring_all_gather", "the result is right, but rank 0 sends to ranks 1, 2 and 3", "no ring")
def sends_its_part_to_all(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    works = [comm.send(parts[r], other, async_op=True) for other in range(n) if other != r]
    for other in range(n):
        if other != r:
            comm.recv(parts[other], other)
    for work in works:
        work.wait()
    return x


@WRONG.to("ring_all_gather", "On 4 ranks", "expected", "got")
def adds_in_place_of_storing(x):
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)
    for s in range(n - 1):
        ring(x, 1, parts[(r - s) % n], parts[(r - 1 - s) % n], add=True)
    return x


@WRONG.to("ring_all_gather", "On 4 ranks", "expected", "got")
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


@WRONG.to("ring_all_reduce", "On 4 ranks", "rank 0's result", "expected", "got", "missing")
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


@WRONG.to("ring_all_reduce", "the result is right, but rank 0 sends to ranks 1, 2 and 3")
def through_rank_0(x):
    r, n = md.rank(), md.size()
    if r > 0:
        comm.send(x, 0)
        return comm.recv(x, 0)
    for other in range(1, n):
        x += comm.recv(torch.empty_like(x), other)
    for other in range(1, n):
        comm.send(x, other)
    return x


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
