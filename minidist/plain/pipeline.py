"""Pipeline parallelism: micro-batches let the ranks work at the same time, each on its own layers.

Cut the batch into m micro-batches. While a rank works on one of them, the next rank works on the one before.
A schedule is a list of instructions for each rank, in which F3 is the forward pass of micro-batch 3 and B3
its backward pass; one loop executes any schedule. Two of them, for 3 ranks and 4 micro-batches:

    GPipe   rank 0  F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
            rank 1   . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
            rank 2   .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
    1F1B    rank 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
            rank 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
            rank 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

GPipe runs all forward passes first, so a rank holds the activations of all m micro-batches. 1F1B runs each
backward pass as soon as it can. It is no faster, but rank r of p holds the activations of at most p - r
micro-batches. With either, a rank waits for (p - 1) / (m + p - 1) of the time, so a larger m helps.

A rank waits for what it receives, because the instruction needs it. It does not wait for what it sends: two
neighbours that send to each other at the same time would wait forever, each for the other to receive.

In a step every rank but the last sends A bytes to the next rank, and every rank but the first sends A bytes
to the one before, in m messages: A is the bytes of the activations between two layers, B T D elements. A
batch has at least m rows, and a model at least p layers.

Sources: Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2019, "PipeDream", section 3.2.
Lesson: 12 "Cutting the model"
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights

Instruction = tuple[str, int]
"""("F", 3) or ("B", 3)."""

Schedule = Callable[[int, int, int], list[Instruction]]
"""From a rank, the number of ranks p and the number of micro-batches m to the rank's instructions."""


def gpipe(rank: int, p: int, m: int) -> list[Instruction]:
    """All forward passes, then all backward passes."""
    return [("F", i) for i in range(m)] + [("B", i) for i in range(m)]


def one_f_one_b(rank: int, p: int, m: int) -> list[Instruction]:
    """A forward pass for each rank that follows, then one forward pass and one backward pass in turn."""
    forward, backward = [("F", i) for i in range(m)], [("B", i) for i in range(m)]
    ahead = min(p - 1 - rank, m)
    in_turn = [each for pair in zip(forward[ahead:], backward, strict=False) for each in pair]
    return forward[:ahead] + in_turn + backward[m - ahead :]


def own_layers(model: nn.Sequential, rank: int) -> nn.Sequential:
    """Return a rank's part of the model: consecutive layers, about as many on each rank."""
    layers, p = list(model), comm.size()
    return nn.Sequential(*layers[len(layers) * rank // p : len(layers) * (rank + 1) // p])


def run(
    instructions: list[Instruction], layers: nn.Module, batch: Batch, m: int, embedding: Tensor
) -> Tensor:
    """Execute the instructions for one batch. Return its loss on the last rank, and 0 on the others."""
    rank, last, loss = comm.rank(), comm.size() - 1, embedding.new_zeros(())
    inputs, targets = (whole.tensor_split(m) for whole in batch)  # m times (B / m, T)
    held: dict[int, tuple[Tensor, Tensor]] = {}  # a micro-batch's input and output, until its backward pass
    sending: dict[int, comm.Work] = {}  # to each neighbour, the message that is on its way

    def send(x: Tensor, neighbour: int) -> None:
        """Launch a message once the one before it has arrived, so that its memory can be freed."""
        if neighbour in sending:
            sending[neighbour].wait()
        sending[neighbour] = comm.send(x, neighbour, async_op=True)

    for kind, i in instructions:
        if kind == "F":  # receive the input, compute, send the output on
            x = inputs[i]
            if rank > 0:
                x = comm.recv(embedding.new_empty(*x.shape, embedding.shape[1]), rank - 1)  # (B / m, T, D)
                x.requires_grad_()
            y = layers(x)
            if rank < last:
                send(y.detach(), rank + 1)
            else:
                y = loss_of(y, targets[i]) * len(targets[i]) / len(batch[1])  # its part of the mean
                loss += y.detach()
            held[i] = x, y
        else:  # receive the output's gradient, compute, send the input's gradient back
            x, y = held.pop(i)
            y.backward(comm.recv(torch.empty_like(y), rank + 1) if rank < last else None)
            if rank > 0:
                send(x.grad, rank - 1)
    for work in sending.values():
        work.wait()
    return loss


def train(
    model: nn.Sequential,
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer,
    schedule: Schedule = one_f_one_b,
    m: int = 4,
) -> list[float]:
    """Train this rank's layers of `model` in place, fetch the others, and return the losses."""
    same_weights(model)
    rank, p = comm.rank(), comm.size()
    layers, instructions = own_layers(model, rank), schedule(rank, p, m)
    embedding = next(model.parameters())  # (V, D): messages have its D and dtype
    optimizer, losses = make_optimizer(layers.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(run(instructions, layers, batch, m, embedding))
        optimizer.step()
    for owner in range(p):
        same_weights(own_layers(model, owner), owner)  # the caller gets the whole model
    return comm.all_reduce(torch.stack(losses)).tolist()  # the other ranks add zeros to the last one's
