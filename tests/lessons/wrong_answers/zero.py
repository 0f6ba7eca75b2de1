"""Wrong answers to lesson 14."""

import torch

import minidist as md
from minidist import comm
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()


@WRONG.to("state_bytes", "stage=1", "bytes of parameters", "expected", "got")
def shares_parameters_first(parameters, ranks, stage, mixed):
    p, g, o = (2, 2, 12) if mixed else (4, 4, 8)
    share = [ranks if stage > i else 1 for i in range(3)]
    return parameters * p / share[0], parameters * g / share[1], parameters * o / share[2]


@WRONG.to("state_bytes", "mixed=True", "bytes of optimizer", "expected 12", "got      8")
def forgets_the_master_weights(parameters, ranks, stage, mixed):
    p, g, o = (2, 2, 8) if mixed else (4, 4, 8)
    own = parameters / ranks
    return (
        (own if stage > 2 else parameters) * p,
        (own if stage > 1 else parameters) * g,
        (own if stage > 0 else parameters) * o,
    )


@WRONG.to("state_bytes", "should be three numbers")
def gives_the_total(parameters, ranks, stage, mixed):
    return parameters * 16


@WRONG.to("state_bytes", "stage=1", "bytes of gradients")
def stage_1_shares_gradients_too(parameters, ranks, stage, mixed):
    p, g, o = (2, 2, 12) if mixed else (4, 4, 8)
    own = parameters / ranks
    return (
        (own if stage > 2 else parameters) * p,
        (own if stage > 0 else parameters) * g,
        (own if stage > 0 else parameters) * o,
    )


@WRONG.to("scaled_step", "master is wrong", "expected", "got")
def divides_in_float16(weight, master, gradient, scale, lr):
    if not gradient.isfinite().all():
        return scale / 2
    master -= lr * (gradient / scale).float()
    weight.copy_(master)
    return scale


@WRONG.to("scaled_step", "master is wrong")
def moves_the_weight(weight, master, gradient, scale, lr):
    if not gradient.isfinite().all():
        return scale / 2
    weight -= (lr * gradient.float() / scale).half()
    master.copy_(weight)
    return scale


@WRONG.to("scaled_step", "one of them inf", "what it returns", "expected", "got")
def never_looks_for_overflow(weight, master, gradient, scale, lr):
    master -= lr * gradient.float() / scale
    weight.copy_(master)
    return scale


@WRONG.to("scaled_step", "one of them nan", "what it returns")
def looks_for_infinity_only(weight, master, gradient, scale, lr):
    if gradient.isinf().any():
        return scale / 2
    master -= lr * gradient.float() / scale
    weight.copy_(master)
    return scale


@WRONG.to("scaled_step", "what it returns is None")
def forgets_the_scale(weight, master, gradient, scale, lr):
    if gradient.isfinite().all():
        master -= lr * gradient.float() / scale
        weight.copy_(master)


@WRONG.to("scaled_step", "With a gradient of 1 element and scale 4096, weight is wrong")
def keeps_the_weight_as_it_was(weight, master, gradient, scale, lr):
    if not gradient.isfinite().all():
        return scale / 2
    master -= lr * gradient.float() / scale
    weight = master.half()  # noqa: F841
    return scale


@WRONG.to("zero_1_step", "On 2 ranks with 2 parameters and sgd, after step 1, rank 0's flat")
def takes_the_sum(flat, own, optimizer, gradient):
    own.grad = comm.reduce_scatter(gradient)
    optimizer.step()
    comm.all_gather(own, out=flat)


@WRONG.to("zero_1_step", "On 2 ranks", "after step 1", "rank 0's flat", "expected", "got")
def forgets_the_others(flat, own, optimizer, gradient):
    own.grad = comm.reduce_scatter(gradient, "mean")
    optimizer.step()


@WRONG.to("zero_1_step", "after step 1", "rank 0's flat")
def uses_its_own_gradient(flat, own, optimizer, gradient):
    own.grad = gradient.view(md.size(), -1)[md.rank()].clone()
    optimizer.step()
    comm.all_gather(own, out=flat)


@WRONG.to("zero_1_step", "raised RuntimeError", "line")
def gives_it_the_whole_gradient(flat, own, optimizer, gradient):
    own.grad = comm.all_reduce(gradient, "mean")
    optimizer.step()
    comm.all_gather(own, out=flat)


@WRONG.to("zero_1_step", "after step 1", "rank 0's flat")
def gathers_before_the_step(flat, own, optimizer, gradient):
    own.grad = comm.reduce_scatter(gradient, "mean")
    comm.all_gather(own, out=flat)
    optimizer.step()


def reduced(waiting, op="mean"):
    n, count = md.size(), sum(map(len, waiting))
    flat = torch.zeros(-(-count // n) * n)
    torch.cat(waiting, out=flat[:count])
    return comm.reduce_scatter(flat, op)


def packed(gradients, bucket, reduce, last=True, anew=True):
    """The parts, with a mistake for each argument."""
    parts, waiting, count = [], [], 0
    for gradient in gradients:
        if waiting and count + len(gradient) > bucket:
            parts.append(reduce(waiting))
            waiting, count = [], 0 if anew else count
        waiting.append(gradient)
        count += len(gradient)
    return [*parts, reduce(waiting)] if waiting and last else parts


@WRONG.to("reduce_in_buckets", "part 0", "expected", "got")
def sums_in_place_of_the_mean(gradients, bucket):
    return packed(gradients, bucket, lambda waiting: reduced(waiting, "sum"))


@WRONG.to("reduce_in_buckets", "returns 1 part, and should return 2, one for each bucket")
def one_bucket_for_all(gradients, bucket):
    waiting = list(gradients)
    return [reduced(waiting)] if waiting else []


@WRONG.to("reduce_in_buckets", "returns 1 part, and should return 2")
def forgets_the_last_bucket(gradients, bucket):
    return packed(gradients, bucket, reduced, last=False)


@WRONG.to("reduce_in_buckets", "[3, 3, 1] and bucket=4, rank 0 returns 3 parts, and should return 2")
def never_counts_anew(gradients, bucket):
    return packed(gradients, bucket, reduced, anew=False)


@WRONG.to("reduce_in_buckets", "raised ValueError", "pad it to", "line")
def forgets_to_pad(gradients, bucket):
    return packed(gradients, bucket, lambda waiting: comm.reduce_scatter(torch.cat(waiting), "mean"))


@WRONG.to("reduce_in_buckets", "[3, 3, 1] and bucket=4", "part 0", "shape")
def lets_a_bucket_overflow(gradients, bucket):
    parts, waiting = [], []
    for gradient in gradients:
        waiting.append(gradient)
        if sum(map(len, waiting)) >= bucket:
            parts.append(reduced(waiting))
            waiting = []
    return [*parts, reduced(waiting)] if waiting else parts


@WRONG.to("reduce_in_buckets", "the idea is missing: bytes live at a time", "keep no name or list")
def computes_all_gradients_first(gradients, bucket):
    return packed(list(gradients), bucket, reduced)


def there_and_back(layers, parts, x, target, order=1, op="mean", inputs_too=True):
    inputs, own = [], []
    for layer, part in zip(layers, parts, strict=True):
        weights = comm.all_gather(part)
        inputs.append(x)
        x = layer.forward(weights, x)
        if not inputs_too:
            inputs[-1] = x
    gradient = x - target
    for layer, part in zip(layers[::-1], parts[::-1], strict=True):
        weights = comm.all_gather(part)
        gradient, whole = layer.backward(weights, inputs.pop(), gradient)
        own.append(comm.reduce_scatter(whole, op))
    return own[::order]


@WRONG.to("zero_3_pass", "On 2 ranks", "rank 0's gradient for layer 0", "shape")
def leaves_them_backward(layers, parts, x, target):
    return there_and_back(layers, parts, x, target)


@WRONG.to("zero_3_pass", "rank 0's gradient for layer 0", "expected", "got")
def adds_up_in_place_of_the_mean(layers, parts, x, target):
    return there_and_back(layers, parts, x, target, order=-1, op="sum")


@WRONG.to("zero_3_pass", "On 2 ranks with 2 layers", "raised RuntimeError", "shapes", "line")
def keeps_outputs(layers, parts, x, target):
    return there_and_back(layers, parts, x, target, order=-1, inputs_too=False)


@WRONG.to("zero_3_pass", "raised ValueError", "gather the parts of all ranks first", "line")
def never_gathers(layers, parts, x, target):
    for layer, part in zip(layers, parts, strict=True):
        x = layer.forward(part, x)
    return [torch.zeros_like(part) for part in parts]


@WRONG.to("zero_3_pass", "rank 0's gradient for layer 0", "shape")
def keeps_whole_gradients(layers, parts, x, target):
    inputs, own = [], []
    for layer, part in zip(layers, parts, strict=True):
        inputs.append(x)
        x = layer.forward(comm.all_gather(part), x)
    gradient = x - target
    for layer, part in zip(layers[::-1], parts[::-1], strict=True):
        gradient, whole = layer.backward(comm.all_gather(part), inputs.pop(), gradient)
        own.insert(0, comm.all_reduce(whole, "mean"))
    return own


@WRONG.to("zero_3_pass", "the idea is missing: tensors as large as a layer, at a time", "del weights")
def holds_all_that_it_gathers(layers, parts, x, target):
    inputs, own, kept = [], [], []
    for layer, part in zip(layers, parts, strict=True):
        kept.append(comm.all_gather(part))
        inputs.append(x)
        x = layer.forward(kept[-1], x)
    gradient = x - target
    for layer, weights in zip(layers[::-1], kept[::-1], strict=True):
        gradient, whole = layer.backward(weights, inputs.pop(), gradient)
        own.insert(0, comm.reduce_scatter(whole, "mean"))
    return own


@WRONG.over_par("zero_3_pass", "It passes, above par in tensors as large as a layer", "del weights")
def forgets_to_let_go_of_the_gradient(layers, parts, x, target):
    return there_and_back(layers, parts, x, target, order=-1)


@WRONG.over_par("zero_1_step", "It passes, above par in bytes sent", "which is a reduce-scatter")
def reduces_all_of_the_gradient(flat, own, optimizer, gradient):
    own.grad = comm.all_reduce(gradient, "mean").view(md.size(), -1)[md.rank()].clone()
    optimizer.step()
    comm.all_gather(own, out=flat)


@WRONG.to(
    "scaled_step",
    "whose sum is more than a float16 holds, and scale 131072, what it returns",
    "expected",
    "got",
)
def looks_at_the_sum(weight, master, gradient, scale, lr):
    if not gradient.sum().isfinite():
        return scale / 2
    master -= lr * gradient.float() / scale
    weight.copy_(master)
    return scale


@WRONG.to("reduce_in_buckets", "lengths [5, 1] and bucket=2", "line")
def empties_an_empty_bucket(gradients, bucket):
    parts, waiting, count = [], [], 0
    for gradient in gradients:
        if count + len(gradient) > bucket:
            parts.append(reduced(waiting))
            waiting, count = [], 0
        waiting.append(gradient)
        count += len(gradient)
        del gradient
    return [*parts, reduced(waiting)] if waiting else parts
