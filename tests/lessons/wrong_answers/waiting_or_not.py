"""Wrong answers to lesson 11."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import minidist as md
from minidist import comm
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to("rates", "rates([1.0, 2.0]), gradients a second waiting", "expected 1", "got      1.333")
def waits_for_the_mean(seconds):
    return len(seconds) / (sum(seconds) / len(seconds)), sum(1 / each for each in seconds)


@WRONG.to("rates", "rates([1.0, 2.0]), gradients a second not waiting", "expected 1.5", "got      1.333")
def mean_of_the_seconds(seconds):
    return len(seconds) / max(seconds), len(seconds) ** 2 / sum(seconds)


@WRONG.to("rates", "rates([0.5, 0.5]), gradients a second waiting", "expected 4", "got      2")
def rounds_in_place_of_gradients(seconds):
    return 1 / max(seconds), sum(1 / each for each in seconds)


@WRONG.to("rates", "should be a pair")
def one_number(seconds):
    return len(seconds) / max(seconds)


@WRONG.to("work", "On 2 ranks, 2 steps", "push 1 of rank 1", "expected", "got")
def pulls_only_once(gradient, x, steps):
    comm.recv(x, 0)
    g = gradient(x)
    for step in range(steps):
        comm.send(g, 0)
        if step < steps - 1:
            comm.recv(torch.empty_like(x), 0)


@WRONG.to("work", "On 2 ranks, 1 step", "no rank can go on", "comm.send(gradient(x), 0)")
def pushes_before_it_pulls(gradient, x, steps):
    for _ in range(steps):
        comm.send(gradient(x), 0)
        comm.recv(x, 0)


@WRONG.to("work", "push 0 of rank 1", "expected", "got")
def pushes_parameters(gradient, x, steps):
    for _ in range(steps):
        comm.recv(x, 0)
        comm.send(x - gradient(x), 0)


@WRONG.to("work", "On 2 ranks", "rank 1", "comm.recv(x, 0)")
def pulls_once_more(gradient, x, steps):
    for _ in range(steps):
        comm.recv(x, 0)
        comm.send(gradient(x), 0)
    comm.recv(x, 0)


@WRONG.to("work", "the idea is missing: gradients that a worker computes", "one gradient for each pull")
def computes_twice(gradient, x, steps):
    for _ in range(steps):
        comm.recv(x, 0)
        g = torch.empty_like(gradient(x))
        g.copy_(gradient(x))
        comm.send(g, 0)


def threads(serve_one):
    with ThreadPoolExecutor(md.size()) as pool:
        list(pool.map(serve_one, range(1, md.size())))


@WRONG.to("serve", "On 3 ranks", "rank 2 could not finish while rank 1 computed", "is the lock held")
def holds_the_lock_all_the_time(x, lr, steps):
    lock = threading.Lock()

    def serve_one(worker):
        for _ in range(steps):
            with lock:
                comm.send(x.clone(), worker)
                x.sub_(lr * comm.recv(torch.empty_like(x), worker))

    threads(serve_one)
    return x


@WRONG.to("serve", "two threads used x at the same time", "inside `with lock:`")
def takes_no_lock(x, lr, steps):
    def serve_one(worker):
        for _ in range(steps):
            comm.send(x.clone(), worker)
            x.sub_(lr * comm.recv(torch.empty_like(x), worker))

    threads(serve_one)
    return x


@WRONG.to("serve", "On 2 ranks, 1 step each: x after all pushes", "expected", "got")
def adds_the_gradient(x, lr, steps):
    lock = threading.Lock()

    def serve_one(worker):
        for _ in range(steps):
            comm.send(x.clone(), worker)
            gradient = comm.recv(torch.empty_like(x), worker)
            with lock:
                x.add_(lr * gradient)

    threads(serve_one)
    return x


@WRONG.to("serve", "On 2 ranks, 3 steps each: what rank 1 pulled for step 1", "expected", "got")
def updates_at_the_end(x, lr, steps):
    total = torch.zeros_like(x)

    def serve_one(worker):
        for _ in range(steps):
            comm.send(x.clone(), worker)
            total.add_(comm.recv(torch.empty_like(x), worker))

    threads(serve_one)
    return x.sub_(lr * total)


@WRONG.to("serve", "On 2 ranks, 1 step each: the x that serve was given, which is changed in place")
def works_on_a_copy(x, lr, steps):
    x = x.clone()

    def serve_one(worker):
        for _ in range(steps):
            comm.send(x.clone(), worker)
            x.sub_(lr * comm.recv(torch.empty_like(x), worker))

    threads(serve_one)
    return x


@WRONG.to("serve", "On 2 ranks", "rank 1")
def serves_one_step_too_few(x, lr, steps):
    def serve_one(worker):
        for _ in range(steps - 1):
            comm.send(x.clone(), worker)
            x.sub_(lr * comm.recv(torch.empty_like(x), worker))

    threads(serve_one)
    return x


@WRONG.to("serve", "On 2 ranks, 1 step each, rank 0 raised UnboundLocalError", "comm.send(x.clone()")
def makes_x_a_name_of_its_own(x, lr, steps):
    def serve_one(worker):
        for _ in range(steps):
            comm.send(x.clone(), worker)  # noqa: F823
            x -= lr * comm.recv(torch.empty_like(x), worker)  # noqa: F841

    threads(serve_one)
    return x


@WRONG.to("serve", "On 3 ranks", "rank 2 could not finish while rank 1 computed")
def one_worker_after_the_other(x, lr, steps):
    for _ in range(steps):
        for worker in range(1, md.size()):
            comm.send(x.clone(), worker)
            x.sub_(lr * comm.recv(torch.empty_like(x), worker))
    return x


def descent(curvature, lr, delay, steps, old):
    x = [1.0]
    for t in range(steps):
        x.append(x[t] - lr * curvature * old(x, t))
    return x


@WRONG.to("delayed_descent", "delayed_descent(1.0, 0.5, 1, 4)", "element 2", "expected", "got")
def without_delay(curvature, lr, delay, steps):
    return descent(curvature, lr, delay, steps, lambda x, t: x[t])


@WRONG.to("delayed_descent", "delayed_descent(1.0, 0.25, 3, 8) raised IndexError")
def index_below_zero(curvature, lr, delay, steps):
    return descent(curvature, lr, delay, steps, lambda x, t: x[t - delay])


@WRONG.to("delayed_descent", "delayed_descent(1.0, 0.5, 1, 4)", "expected", "got")
def waits_for_the_first(curvature, lr, delay, steps):
    return descent(curvature, lr, delay, steps, lambda x, t: x[t - delay] if t >= delay else 0.0)


@WRONG.to("delayed_descent", "has the shape (0,), and should have (1,)")
def leaves_out_the_first(curvature, lr, delay, steps):
    return descent(curvature, lr, delay, steps, lambda x, t: x[max(t - delay, 0)])[1:]


@WRONG.to("delayed_descent", "delayed_descent(2.0, 0.25, 0, 3)", "expected", "got")
def forgets_the_curvature(curvature, lr, delay, steps):
    return descent(1.0, lr, delay, steps, lambda x, t: x[max(t - delay, 0)])


@WRONG.to("may_begin", "may_begin([0], 0, 0)", "expected True", "got      False")
def strictly(clocks, worker, bound):
    return clocks[worker] - min(clocks) < bound


@WRONG.to("may_begin", "may_begin([1, 0], 1, 0)", "expected True", "got      False")
def measures_from_the_fastest(clocks, worker, bound):
    return max(clocks) - min(clocks) <= bound


@WRONG.to("may_begin", "should be True or False; it is 0")
def how_far_ahead(clocks, worker, bound):
    return clocks[worker] - min(clocks)
