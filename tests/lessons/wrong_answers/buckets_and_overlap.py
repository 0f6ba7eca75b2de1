"""Wrong answers to lesson 10."""

import torch
from torch.nn import functional

import minidist as md
from minidist import comm
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


def sum_together(bucket, back=True):
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    comm.all_reduce(flat)
    for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        if back:
            tensor.copy_(part.view(tensor.shape))


@WRONG.to("all_reduce_in_buckets", "limit 8: rank 0's tensor 0", "expected", "got")
def loses_the_last_bucket(tensors, limit):
    bucket, held = [], 0
    for tensor in tensors:
        if bucket and held + tensor.numel() > limit:
            sum_together(bucket)
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.numel()


@WRONG.to("all_reduce_in_buckets", "rank 0's tensor 0", "expected", "got")
def does_not_copy_back(tensors, limit):
    for tensor in tensors:
        sum_together([tensor], back=False)


@WRONG.to("all_reduce_in_buckets", "sends a message of", "and the limit is")
def closes_a_bucket_too_late(tensors, limit):
    bucket, held = [], 0
    for tensor in tensors:
        bucket.append(tensor)
        held += tensor.numel()
        if held >= limit:
            sum_together(bucket)
            bucket, held = [], 0
    if bucket:
        sum_together(bucket)


@WRONG.to("all_reduce_in_buckets", "shapes (2, 3), (2,), (5,)", "RuntimeError", "line")
def forgets_the_shapes(tensors, limit):
    for tensor in tensors:
        flat = tensor.reshape(-1).clone()
        comm.all_reduce(flat)
        tensor.copy_(flat)


@WRONG.to("all_reduce_in_buckets", "rank 0's tensor 0", "expected", "got")
def puts_sums_into_the_list(tensors, limit):
    for place, tensor in enumerate(tensors):
        tensors[place] = comm.all_reduce(tensor.clone())


@WRONG.to("all_reduce_in_buckets", "sends messages of 8, 8, 3 elements", "neighbours of the list, whole")
def cuts_at_the_limit(tensors, limit):
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for piece in flat.split(limit):
        comm.all_reduce(piece)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


@WRONG.to("all_reduce_in_buckets", "the first transposed", "rank 0's tensor 0", "t.reshape(-1) is a copy")
def writes_to_a_copy(tensors, limit):
    buckets, held = [[]], 0
    for tensor in tensors:
        if buckets[-1] and held + tensor.numel() > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(tensor)
        held += tensor.numel()
    for bucket in buckets:
        flat = comm.all_reduce(torch.cat([t.reshape(-1) for t in bucket]))
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.reshape(-1).copy_(part)


@WRONG.to("all_reduce_in_buckets", "the idea is missing: messages by each rank")
def one_message_a_tensor(tensors, limit):
    for tensor in tensors:
        sum_together([tensor])


@WRONG.to("reduce_in_backward", "had begun 0 all-reduces", "should have begun 2")
def begins_after_backward(model):
    def finish():
        for parameter in model.parameters():
            comm.all_reduce(parameter.grad, "mean")

    return finish


@WRONG.to("reduce_in_backward", "in step 2", "expected", "got")
def never_clears_the_list(model):
    under_way = []

    def start(parameter):
        under_way.append((comm.all_reduce(parameter.grad, async_op=True), parameter))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)

    def finish():
        for work, parameter in under_way:
            work.wait()
            parameter.grad /= md.size()

    return finish


@WRONG.to("reduce_in_backward", "in step 1", "expected", "got")
def leaves_the_sum(model):
    under_way = []

    def start(parameter):
        under_way.append(comm.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)

    def finish():
        while under_way:
            under_way.pop().wait()

    return finish


@WRONG.to("reduce_in_backward", "returns None", "finish, itself and not finish()")
def returns_nothing(model):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    return


@WRONG.to("reduce_in_backward", "raised", "line", "NoneType")
def asks_before_backward(model):
    under_way = [(comm.all_reduce(p.grad, async_op=True), p) for p in model.parameters()]

    def finish():
        for work, parameter in under_way:
            work.wait()
            parameter.grad /= md.size()

    return finish


@WRONG.to("reduce_in_backward", "the idea is missing: all-reduces that backward waited for", "async_op=True")
def waits_in_the_hook(model):
    def start(parameter):
        comm.all_reduce(parameter.grad, "mean")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)
    return lambda: None


@WRONG.to("accumulate_gradients", "rank 0's gradient", "expected", "got")
def sends_what_was_sent(model, micro_batches):
    rows = comm.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in micro_batches)))
    for inputs, targets in micro_batches:
        (functional.cross_entropy(model(inputs), targets, reduction="sum") / rows).backward()
        for parameter in model.parameters():
            comm.all_reduce(parameter.grad)


@WRONG.to("accumulate_gradients", "rank 0's gradient", "expected", "got")
def mean_of_micro_batches(model, micro_batches):
    for inputs, targets in micro_batches:
        (functional.cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, "mean")


@WRONG.to("accumulate_gradients", "rank 0's gradient", "expected", "got")
def keeps_the_last_alone(model, micro_batches):
    rows = comm.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in micro_batches)))
    for inputs, targets in micro_batches:
        model.zero_grad()
        (functional.cross_entropy(model(inputs), targets, reduction="sum") / rows).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)


@WRONG.to("accumulate_gradients", "the gradients are right, but rank 0 keeps", "Call backward after each")
def one_forward_for_all(model, micro_batches):
    own = [torch.cat(each) for each in zip(*micro_batches, strict=True)] or [torch.empty(0)] * 2
    rows = comm.all_reduce(torch.tensor(len(own[0])))
    (functional.cross_entropy(model(own[0]), own[1], reduction="sum") / rows).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)


@WRONG.to("accumulate_gradients", "the gradients are right, but rank 0 keeps", "Call backward after each")
def one_backward_for_all(model, micro_batches):
    rows = comm.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in micro_batches)))
    total = sum(functional.cross_entropy(model(x), y, reduction="sum") for x, y in micro_batches)
    (total / rows).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)


@WRONG.to("accumulate_gradients", "and no rows, rank 1 raised", "comm.all_reduce(parameter.grad)")
def forgets_ranks_without_any(model, micro_batches):
    rows = comm.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in micro_batches)))
    for inputs, targets in micro_batches:
        (functional.cross_entropy(model(inputs), targets, reduction="sum") / rows).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)


@WRONG.over_par("accumulate_gradients", "It passes, above par in all-reduces by each rank")
def sums_the_loss_as_well(model, micro_batches):
    rows, total = comm.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in micro_batches))), 0
    for inputs, targets in micro_batches:
        loss = functional.cross_entropy(model(inputs), targets, reduction="sum") / rows
        loss.backward()
        total += loss.detach()
    comm.all_reduce(torch.as_tensor(total, dtype=torch.float64))
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        comm.all_reduce(parameter.grad)


@WRONG.to("all_reduce_in_buckets", "rank 0's tensor 0", "t.data = ... gives t other memory", "t.copy_(...)")
def gives_tensors_other_memory(tensors, limit):
    buckets, held = [[]], 0
    for tensor in tensors:
        if buckets[-1] and held + tensor.numel() > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(tensor)
        held += tensor.numel()
    for bucket in buckets:
        flat = comm.all_reduce(torch.cat([tensor.reshape(-1) for tensor in bucket]))
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.data = part.view(tensor.shape)


@WRONG.to("reduce_in_backward", "but when 1 of 2 had come, rank 0 had begun 0 all-reduces", "hide a message")
def begins_all_at_the_last(model):
    parameters, arrived, under_way = list(model.parameters()), [], []

    def start(parameter):
        arrived.append(parameter)
        if len(arrived) == len(parameters):
            under_way.extend(comm.all_reduce(each.grad, async_op=True) for each in parameters)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(start)

    def finish():
        for work in under_way:
            work.wait()
        for parameter in arrived:
            parameter.grad /= md.size()
        arrived.clear()
        under_way.clear()

    return finish
