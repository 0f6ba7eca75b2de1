"""Wrong answers to lesson 12."""

import torch

import minidist as md
from minidist import comm
from minidist.parallel.pipeline.schedules import Instruction
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


def filled(weights, most, fits):
    """Parts from the left; `fits` decides from the weight with the next layer, and the limit."""
    parts, begin, weight = [], 0, 0
    for i, each in enumerate(weights):
        if i > begin and not fits(weight + each, most):
            parts.append(range(begin, i))
            begin, weight = i, 0
        weight += each
    return parts + ([range(begin, len(weights))] if begin < len(weights) else [])


@WRONG.to("fill", "does not have each layer once", "expected", "got")
def forgets_the_last_part(weights, most):
    return filled(weights, most, lambda weight, most: weight <= most)[:-1]


@WRONG.to("fill", "fill([2, 2], 2): the part range(0, 2) weighs 4, more than 2")
def one_layer_too_many(weights, most):
    parts, begin, weight = [], 0, 0
    for i, each in enumerate(weights):
        weight += each
        if weight > most:
            parts.append(range(begin, i + 1))
            begin, weight = i + 1, 0
    return parts + ([range(begin, len(weights))] if begin < len(weights) else [])


@WRONG.to("fill", "a part ends although its next layer would fit")
def strictly_below(weights, most):
    return filled(weights, most, lambda weight, most: weight < most)


@WRONG.to("fill", "should be a list of ranges")
def lists_of_weights(weights, most):
    return [[weights[i] for i in part] for part in filled(weights, most, lambda w, m: w <= m)]


@WRONG.to("fill", "the idea is missing: weights read", "look at each layer once")
def adds_up_again_and_again(weights, most):
    parts, begin = [], 0
    for i in range(len(weights)):
        if i > begin and sum(weights[begin : i + 1]) > most:
            parts.append(range(begin, i))
            begin = i
    return parts + ([range(begin, len(weights))] if len(weights) else [])


def chain(stage, inputs, targets, back=True, scale=1.0, ones=False, into=None):
    """A step with a mistake for each argument."""
    r, last = md.rank(), md.size() - 1
    x = inputs
    if r > 0:
        x = comm.recv(torch.empty_like(inputs) if into is None else into, r - 1).requires_grad_()
    y = stage(x)
    if r == last:
        y = ((y - targets) ** 2).mean() * scale
        y.backward()
    else:
        comm.send(y.detach(), r + 1)
        g = torch.ones_like(y) if ones else comm.recv(torch.empty_like(y), r + 1)
        y.backward(g)
    if r > 0 and back:
        comm.send(x.grad, r - 1)
    return y.item() if r == last else None


@WRONG.to("step", "On 2 ranks", "rank 0", "waits for rank 1", "comm.recv(torch.empty_like(y), r + 1)")
def never_sends_the_gradient(stage, inputs, targets):
    r, last = md.rank(), md.size() - 1
    x = inputs if r == 0 else comm.recv(torch.empty_like(inputs), r - 1).requires_grad_()
    y = stage(x)
    if r == last:
        y = ((y - targets) ** 2).mean()
        y.backward()
        return y.item()
    comm.send(y.detach(), r + 1)
    y.backward(comm.recv(torch.empty_like(y), r + 1))
    return None


@WRONG.to("step", "On 2 ranks with 1 row of 1, rank 1 raised", "comm.send(x.grad, r - 1)")
def forgets_requires_grad(stage, inputs, targets):
    r, last = md.rank(), md.size() - 1
    x = inputs if r == 0 else comm.recv(torch.empty_like(inputs), r - 1)
    y = stage(x)
    if r == last:
        y = ((y - targets) ** 2).mean()
        y.backward()
    else:
        comm.send(y.detach(), r + 1)
        y.backward(comm.recv(torch.empty_like(y), r + 1))
    if r > 0:
        comm.send(x.grad, r - 1)
    return y.item() if r == last else None


@WRONG.to("step", "On 2 ranks with 1 row of 1, rank 0's gradient of its stage's 0.weight is wrong")
def starts_backward_from_ones(stage, inputs, targets):
    return chain(stage, inputs, targets, ones=True, back=False)


@WRONG.to("step", "the loss that the last rank returns is a tensor", "loss.item()", "out of memory")
def returns_a_tensor(stage, inputs, targets):
    r, last = md.rank(), md.size() - 1
    x = inputs if r == 0 else comm.recv(torch.empty_like(inputs), r - 1).requires_grad_()
    y = stage(x)
    if r == last:
        y = ((y - targets) ** 2).mean()
        y.backward()
    else:
        comm.send(y.detach(), r + 1)
        y.backward(comm.recv(torch.empty_like(y), r + 1))
    if r > 0:
        comm.send(x.grad, r - 1)
    return y if r == last else None


@WRONG.to("step", "rank 0's gradient of its stage's 0.weight is None")
def only_the_last_goes_backward(stage, inputs, targets):
    r, last = md.rank(), md.size() - 1
    x = inputs if r == 0 else comm.recv(torch.empty_like(inputs), r - 1)
    y = stage(x)
    if r < last:
        comm.send(y.detach(), r + 1)
        return None
    loss = ((y - targets) ** 2).mean()
    loss.backward()
    return loss.item()


@WRONG.to("step", "On 1 rank with 2 rows of 3", "gradient")
def sums_the_squares(stage, inputs, targets):
    return chain(stage, inputs, targets, scale=inputs.numel())


@WRONG.to("step", "the idea is missing: messages sent by a rank", "and nothing else")
def sends_the_shape_first(stage, inputs, targets):
    r, last = md.rank(), md.size() - 1
    if r > 0:
        comm.recv(torch.empty(2, dtype=torch.int64), r - 1)
    if r < last:
        comm.send(torch.tensor(inputs.shape), r + 1)
    return chain(stage, inputs, targets)


def forwards(numbers):
    return [Instruction("forward", i) for i in numbers]


def backwards(numbers):
    return [Instruction("backward", i) for i in numbers]


@WRONG.to("gpipe", "gpipe(2, 1) has 1 lists, and should have 2")
def one_list_for_all(ranks, micro_batches):
    return [forwards(range(micro_batches)) + backwards(range(micro_batches))]


@WRONG.to("gpipe", "gpipe(1, 3)", "rank 0 has B0 before F1", "all forward passes come first")
def one_after_the_other(ranks, micro_batches):
    return [
        [each for i in range(micro_batches) for each in forwards([i]) + backwards([i])] for _ in range(ranks)
    ]


@WRONG.to("gpipe", "gpipe(1, 1)", "rank 0, micro-batch 0", "backward")
def only_forward(ranks, micro_batches):
    return [forwards(range(micro_batches)) for _ in range(ranks)]


@WRONG.to("gpipe", "micro-batches are 0 to 0")
def counts_from_one(ranks, micro_batches):
    numbers = range(1, micro_batches + 1)
    return [forwards(numbers) + backwards(numbers) for _ in range(ranks)]


@WRONG.to("gpipe", "gpipe(1, 1)", "which is no Instruction")
def strings(ranks, micro_batches):
    return [["forward 0", "backward 0"] for _ in range(ranks)]


@WRONG.to("bubble", "bubble(4, 8) is 0.375", "over the time worked", "the share of all the time is asked")
def beside_the_work(ranks, micro_batches):
    return (ranks - 1) / micro_batches


@WRONG.to("bubble", "expected", "got")
def one_rank_too_many(ranks, micro_batches):
    return ranks / (micro_batches + ranks)


@WRONG.to("bubble", "expected", "got")
def the_share_that_works(ranks, micro_batches):
    return micro_batches / (micro_batches + ranks - 1)


def alternating(ranks, micro_batches, ahead_of):
    """1F1B with `ahead_of(rank)` forward passes at the start."""
    schedule = []
    for rank in range(ranks):
        ahead = min(ahead_of(rank), micro_batches)
        own = forwards(range(ahead))
        for i in range(micro_batches):
            own += forwards([ahead + i] if ahead + i < micro_batches else []) + backwards([i])
        schedule.append(own)
    return schedule


@WRONG.to(
    "one_f_one_b",
    "one_f_one_b(1, 3): rank 0 holds 3 micro-batches at a time, and 1 is enough",
    "its list begins F0 F1",
)
def all_forward_first(ranks, micro_batches):
    return [forwards(range(micro_batches)) + backwards(range(micro_batches)) for _ in range(ranks)]


@WRONG.to("one_f_one_b", "one_f_one_b(2, 2)", "the schedule never ends", "rank 0 waits at recv B0")
def the_ranks_the_wrong_way_round(ranks, micro_batches):
    return alternating(ranks, micro_batches, lambda rank: rank)


@WRONG.to("one_f_one_b", "one_f_one_b(2, 2)", "there is no forward pass")
def forgets_those_at_the_end(ranks, micro_batches):
    schedule = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        own = forwards(range(ahead))
        for i in range(micro_batches - ahead):
            own += forwards([i]) if i >= ahead else []
            own += backwards([i])
        own += backwards(range(micro_batches - ahead, micro_batches))
        schedule.append(own)
    return schedule


@WRONG.to("one_f_one_b", "one_f_one_b(1, 3)", "rank 0 holds 2 micro-batches at a time")
def one_more_at_the_start(ranks, micro_batches):
    return alternating(ranks, micro_batches, lambda rank: ranks - rank)


@WRONG.to("one_f_one_b", "one_f_one_b(3, 1): rank 0 has F1; micro-batches are 0 to 0")
def begins_with_more_than_there_are(ranks, micro_batches):
    schedule = []
    for rank in range(ranks):
        ahead = ranks - 1 - rank
        own = forwards(range(ahead))
        for i in range(micro_batches):
            own += forwards([ahead + i] if ahead + i < micro_batches else []) + backwards([i])
        schedule.append(own)
    return schedule


@WRONG.to("one_f_one_b", "the idea is missing: units of time", "p - 1 - r forward passes")
def one_micro_batch_at_a_time(ranks, micro_batches):
    return alternating(ranks, micro_batches, lambda rank: 0)


def split(numbers):
    return [Instruction(kind, i) for i in numbers for kind in ("backward_input", "backward_weight")]


@WRONG.to("my_schedule", "my_schedule(2, 1) takes 6 units of time. 1F1B takes 6: yours is to be shorter")
def as_it_was(ranks, micro_batches):
    return alternating(ranks, micro_batches, lambda rank: ranks - 1 - rank)


@WRONG.to("my_schedule", "my_schedule(1, 1)", "backward_weight")
def leaves_out_the_weights(ranks, micro_batches):
    return [
        forwards(range(micro_batches)) + [Instruction("backward_input", i) for i in range(micro_batches)]
        for _ in range(ranks)
    ]


@WRONG.to("my_schedule", "rank 0 has W0 before I0, which it needs")
def weights_before_inputs(ranks, micro_batches):
    return [
        forwards(range(micro_batches))
        + [Instruction("backward_weight", i) for i in range(micro_batches)]
        + [Instruction("backward_input", i) for i in range(micro_batches)]
        for _ in range(ranks)
    ]


@WRONG.to("my_schedule", "never ends", "waits at recv B0 for rank 1")
def first_ranks_hold_one_alone(ranks, micro_batches):
    if ranks == 1:
        return [forwards(range(micro_batches)) + split(range(micro_batches))]
    early = [each for i in range(micro_batches) for each in forwards([i]) + split([i])]
    return [early] * (ranks - 1) + [forwards(range(micro_batches)) + split(range(micro_batches))]


@WRONG.to("my_schedule", "the idea is missing: micro-batches that a rank holds", "do not put off too many")
def all_weights_at_the_end(ranks, micro_batches):
    numbers = range(micro_batches)
    return [
        [Instruction(kind, i) for kind in ("forward", "backward_input", "backward_weight") for i in numbers]
        for _ in range(ranks)
    ]


@WRONG.to("step", "On 2 ranks with 1 row of 1, rank 1's step", "changes inputs, which is the caller's")
def receives_into_inputs(stage, inputs, targets):
    return chain(stage, inputs, targets, into=inputs)


@WRONG.to("step", "changes stage, which is the caller's")
def makes_a_step_of_sgd_too(stage, inputs, targets):
    loss = chain(stage, inputs, targets)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter -= 0.1 * parameter.grad
    return loss


@WRONG.to("step", "the idea is missing: forward passes of a stage: 2, where par is 1", "keep y = stage(x)")
def runs_the_stage_twice(stage, inputs, targets):
    with torch.no_grad():
        stage(inputs)
    return chain(stage, inputs, targets)
