"""Wrong answers to lesson 13."""

import torch
from torch.nn import functional

import minidist as md
from minidist import comm
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


def operator(x, go, back):
    """go forward, back backward."""

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return go(x)

        @staticmethod
        def backward(ctx, gradient):
            return back(gradient)

    return Operator.apply(x)


def summed(x):
    return comm.all_reduce(x.clone())


@WRONG.to("shared_mlp_forward", "On 2 ranks", "rank 0's y", "expected", "got")
def never_sums(x, a, b):
    return functional.gelu(x @ a) @ b


@WRONG.to("shared_mlp_forward", "rank 0's y", "expected", "got")
def forgets_gelu(x, a, b):
    return comm.all_reduce(x @ a @ b)


@WRONG.to("shared_mlp_forward", "rank 0's y", "expected", "got")
def takes_the_mean(x, a, b):
    return comm.all_reduce(functional.gelu(x @ a) @ b, "mean")


@WRONG.to("shared_mlp_forward", "raised RuntimeError", "shapes cannot be multiplied", "line")
def gathers_what_is_cut(x, a, b):
    hidden = comm.all_gather(functional.gelu(x @ a).T.contiguous()).T
    return comm.all_reduce(hidden @ b)


@WRONG.to("enter", "On 2 ranks", "rank 0's gradient of x", "expected", "got")
def passes_the_gradient_on(x):
    return operator(x, lambda x: x.view_as(x), lambda gradient: gradient)


@WRONG.to("enter", "On 2 ranks", "rank 0's result", "expected", "got")
def is_leave(x):
    return operator(x, summed, lambda gradient: gradient)


@WRONG.to("enter", "gradient of another tensor, which got the same one", "expected", "got")
def sums_the_gradient_in_place(x):
    return operator(x, lambda x: x.view_as(x), comm.all_reduce)


@WRONG.to("enter", "rank 0's gradient of x", "expected", "got")
def averages(x):
    return operator(x, lambda x: x.view_as(x), lambda g: comm.all_reduce(g.clone(), "mean"))


def attention(x, query, key, value, output, head_size, begin, end, causal=True):
    inside = begin(x)
    heads = [(inside @ w).unflatten(1, (-1, head_size)).transpose(0, 1) for w in (query, key, value)]
    mixed = functional.scaled_dot_product_attention(*heads, is_causal=causal)
    return end(mixed.transpose(0, 1).flatten(1) @ output)


def f(x):
    return operator(x, lambda x: x.view_as(x), summed)


def g(x):
    return operator(x, summed, lambda gradient: gradient)


@WRONG.to("shared_attention", "rank 0's gradient of x", "expected", "got")
def forgets_to_enter(x, query, key, value, output, head_size):
    return attention(x, query, key, value, output, head_size, lambda x: x, g)


@WRONG.to("shared_attention", "rank 0's y", "expected", "got")
def forgets_to_leave(x, query, key, value, output, head_size):
    return attention(x, query, key, value, output, head_size, f, lambda x: x)


@WRONG.to("shared_attention", "rank 0's y", "expected", "got")
def sees_the_future(x, query, key, value, output, head_size):
    return attention(x, query, key, value, output, head_size, f, g, causal=False)


@WRONG.to("shared_attention", "rank 0's gradient of x", "expected", "got")
def leaves_both_ways(x, query, key, value, output, head_size):
    twice = lambda x: operator(x, summed, summed)  # noqa: E731
    return attention(x, query, key, value, output, head_size, f, twice)


def loss_of(logits, targets, first, shared_largest=True, everybody=False):
    rows, columns = logits.shape
    local = targets - first
    mine = (local >= 0) & (local < columns)
    local = local.clamp(0, columns - 1)
    largest = logits.amax(1)
    if shared_largest:
        largest = comm.all_reduce(largest, "max")
    exponentials = (logits - largest[:, None]).exp()
    scores = logits.gather(1, local[:, None])[:, 0] - largest
    if not everybody:
        scores = scores * mine
    total, score = comm.all_reduce(torch.stack([exponentials.sum(1), scores]))
    gradient = exponentials / total[:, None]
    gradient[torch.arange(rows), local] -= mine.to(logits.dtype)
    return (total.log() - score).mean(), gradient / rows


@WRONG.to("vocabulary_loss", "On 2 ranks", "rank 0's", "expected", "got")
def each_its_own_largest(logits, targets):
    return loss_of(logits, targets, md.rank() * logits.shape[1], shared_largest=False)


@WRONG.to("vocabulary_loss", "On 2 ranks with 1 row and a vocabulary of 2", "rank 0's loss", "expected")
def counts_scores_of_all_ranks(logits, targets):
    return loss_of(logits, targets, md.rank() * logits.shape[1], everybody=True)


@WRONG.to("vocabulary_loss", "logits far from 0", "rank 0's loss", "got      nan")
def subtracts_nothing(logits, targets):
    columns = logits.shape[1]
    local = targets - md.rank() * columns
    mine = (local >= 0) & (local < columns)
    local = local.clamp(0, columns - 1)
    e = torch.exp(logits)
    score = logits.gather(1, local[:, None])[:, 0] * mine
    total, score = comm.all_reduce(torch.stack([e.sum(1), score]))
    gradient = e / total[:, None]
    gradient[torch.arange(len(local)), local] -= mine.to(logits.dtype)
    return (total.log() - score).mean() * (1 if e.isfinite().all() else torch.nan), gradient / len(local)


@WRONG.to("vocabulary_loss", "rank 0's logits are changed")
def subtracts_in_place(logits, targets):
    logits -= comm.all_reduce(logits.amax(1), "max")[:, None]
    return loss_of(logits, targets, md.rank() * logits.shape[1])


@WRONG.to("shared_attention", "the idea is missing: bytes sent by a rank", "enter x once")
def enters_three_times(x, query, key, value, output, head_size):
    heads = [(f(x) @ w).unflatten(1, (-1, head_size)).transpose(0, 1) for w in (query, key, value)]
    mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
    return g(mixed.transpose(0, 1).flatten(1) @ output)


@WRONG.to("vocabulary_loss", "the idea is missing: bytes sent by a rank", "three numbers a row")
def gathers_the_logits(logits, targets):
    whole = torch.cat(list(comm.all_gather(logits[None])), 1).requires_grad_()
    loss = functional.cross_entropy(whole, targets)
    loss.backward()
    return loss.detach(), whole.grad.tensor_split(md.size(), 1)[md.rank()]


@WRONG.to("vocabulary_loss", "result should be two")
def returns_the_loss_alone(logits, targets):
    return loss_of(logits, targets, md.rank() * logits.shape[1])[0]


@WRONG.to("vocabulary_loss", "raised IndexError", "line")
def forgets_where_its_part_begins(logits, targets):
    rows = torch.arange(len(logits))
    score = logits[rows, targets]
    total = comm.all_reduce(logits.exp().sum(1))
    return (total.log() - score).mean(), logits.exp() / total[:, None]


@WRONG.to("gather_tokens", "the idea is missing: bytes sent backward", "which is a reduce-scatter")
def reduces_all_of_the_gradient(x):
    return operator(x, comm.all_gather, lambda g: summed(g).tensor_split(md.size())[md.rank()])


@WRONG.to("gather_tokens", "On 2 ranks", "rank 0's gradient of x", "expected", "got")
def keeps_its_own_rows(x):
    return operator(x, comm.all_gather, lambda g: g.tensor_split(md.size())[md.rank()])


@WRONG.to("gather_tokens", "rank 0's gradient of x", "expected", "got")
def averages_the_gradients(x):
    return operator(x, comm.all_gather, lambda g: comm.reduce_scatter(g, "mean"))


@WRONG.to("gather_tokens", "rank 0's gradient of x", "expected", "got")
def is_seen_by_no_gradient(x):
    return comm.all_gather(x.detach()) + 0 * x.sum()


@WRONG.to("gather_tokens", "rank 0's gradient of x", "expected", "got      0")
def forgets_the_operator(x):
    return comm.all_gather(x)


@WRONG.to("gather_tokens", "rank 0's result is a list, and should be a tensor")
def a_list_of_tokens(x):
    return [x] * md.size()


@WRONG.to("shared_attention", "gradient of query is None: backward does not come to it")
def lets_go_of_query(x, query, key, value, output, head_size):
    return attention(x, query.detach(), key, value, output, head_size, f, g)


@WRONG.to("vocabulary_loss", "On 2 ranks with 1 row and a vocabulary of 4, rank 0's loss")
def counts_from_the_end(logits, targets):
    rows, columns = logits.shape
    local, row = targets - md.rank() * columns, torch.arange(rows)
    mine = (local < columns) & (local >= -columns)  # a negative index counts from the end
    z = logits - comm.all_reduce(logits.amax(1), "max")[:, None]
    score = z.new_zeros(rows)
    score[mine] = z[row[mine], local[mine]]
    total, score = comm.all_reduce(torch.stack([z.exp().sum(1), score]))
    gradient = z.exp() / total[:, None]
    gradient[row[mine], local[mine]] -= 1
    return (total.log() - score).mean(), gradient / rows


@WRONG.to("gather_tokens", "rank 0's result", "shape")
def scatters(x):
    return operator(x, lambda x: x.view_as(x), lambda g: g)
