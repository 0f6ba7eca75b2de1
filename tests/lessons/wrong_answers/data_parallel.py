"""Wrong answers to lesson 9."""

import torch
from torch.nn import functional

import minidist as md
from minidist import comm
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to("average_gradients", "On 2 ranks", "rank 0's gradient of layers.0.linear.weight", "expected", "got")
def forgets_to_divide(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            comm.all_reduce(parameter.grad)


@WRONG.to("average_gradients", "layers.0.linear.weight", "expected", "got")
def averages_the_weights(model):
    for parameter in model.parameters():
        comm.all_reduce(parameter.detach(), "mean")


@WRONG.to("average_gradients", "frozen", "raised", "line", "parameter.grad")
def takes_none_for_a_gradient(model):
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)
        parameter.grad /= md.size()


@WRONG.to("average_gradients", "layers.0.linear.weight", "expected", "got")
def divides_a_copy(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            total = comm.all_reduce(parameter.grad.clone())
            total /= md.size()


@WRONG.to("average_gradients", "begins comm.all_reduce and never waits for it")
def begins_and_goes_on(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            comm.all_reduce(parameter.grad, "mean", async_op=True)


@WRONG.to("average_gradients", "the idea is missing: bytes sent by each rank", "no gather")
def gathers_and_adds(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            all_of_them = comm.all_gather(parameter.grad.reshape(1, -1))
            parameter.grad = all_of_them.mean(0).view(parameter.shape)


@WRONG.to("batch_gradients", "On 2 ranks with 5, 6 rows", "rank 0's gradient", "expected", "got")
def mean_of_means(model, inputs, targets):
    functional.cross_entropy(model(inputs), targets).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, "mean")


@WRONG.to("batch_gradients", "On 2 ranks with 5, 6 rows", "rank 0's gradient", "expected", "got")
def divides_by_its_own_rows(model, inputs, targets):
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
    (loss / max(len(inputs), 1)).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)


@WRONG.to("batch_gradients", "On 2 ranks with 5, 6 rows", "rank 0's gradient", "expected", "got")
def divides_twice(model, inputs, targets):
    rows = comm.all_reduce(torch.tensor(len(inputs)))
    (functional.cross_entropy(model(inputs), targets, reduction="sum") / rows).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, "mean")


@WRONG.to("batch_gradients", "0 rows", "rank 1 has returned from its function", "all_reduce", "line")
def stays_away_without_rows(model, inputs, targets):
    rows = comm.all_reduce(torch.tensor(len(inputs)))
    if len(inputs) == 0:
        return
    (functional.cross_entropy(model(inputs), targets, reduction="sum") / rows).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)


@WRONG.to("batch_gradients", "the idea is missing: all-reduces by each rank")
def counts_rows_for_each_parameter(model, inputs, targets):
    functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    for parameter in model.parameters():
        parameter.grad /= comm.all_reduce(torch.tensor(len(inputs)))
        comm.all_reduce(parameter.grad)
