"""A recipe: what a training adds to the loop of `data_parallel`, for the mistakes that people make there.

The data are shuffled in every epoch. Micro-batches add up their gradients, the ranks take them in turn. Some
tokens are padding and have no target. Embeddings drop some of their elements, at random. Weights and
gradients are rounded to bfloat16 and the optimizer keeps wide copies, its masters. The loss is scaled, the
gradient clipped, the learning rate warms up, and a checkpoint lets a training go on where it ended.

bfloat16's values stand in wide tensors here (`low`). So n ranks still equal one rank to 1e-10, since every
micro-batch is rounded as it is on one rank.

In a step a rank sends 2 (n - 1) / n (S + 8) bytes: n ranks, S bytes of parameters, 8 that count the targets.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, same_weights

SCALE, CLIP, DROP, WARM_UP = 1024.0, 0.5, 0.1, 4


def low(x: Tensor) -> Tensor:
    """Round to the nearest bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)


def dropped(x: Tensor, generator: torch.Generator) -> Tensor:
    """Set some elements to 0, and make the others larger in return."""
    return x * (torch.rand(x.shape, generator=generator) >= DROP) / (1 - DROP)


def rows_of(step: int, data: Batch, steps: int) -> Batch:
    """Return a step's rows, in the order of its epoch, which has so many steps."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(step // steps))
    own = order.tensor_split(steps)[step % steps]
    return data[0][own], data[1][own]


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, m: int = 4,
    saved: dict[str, Any] | None = None, stop: int | None = None,
) -> list[float]:  # fmt: skip
    """Train on half of the batches' rows for two epochs, in m micro-batches, and return the losses.

    saved: a checkpoint; empty at first. Training goes on from there to step `stop`, and saves there.
    """
    rank, ranks, steps = comm.rank(), comm.size(), max(1, len(batches) // 2)
    same_weights(model)
    data = torch.cat([x for x, _ in batches[:steps]]), torch.cat([y for _, y in batches[:steps]])
    weights = list(model.parameters())
    masters = [nn.Parameter(p.detach().clone()) for p in weights]
    optimizer = make_optimizer(masters)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP))
    random = [torch.Generator().manual_seed(i) for i in range(m)]  # one for each micro-batch
    first, losses = 0, []
    if saved:
        first = saved["step"]
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        for p, value in zip(masters, saved["masters"], strict=True):
            p.data.copy_(value)
        for generator, state in zip(random, saved["random"], strict=True):
            generator.set_state(state)
    for step in range(first, len(batches) if stop is None else stop):
        for p, master in zip(weights, masters, strict=True):
            p.data.copy_(low(master.data))
        # Compute: this rank's micro-batches.
        inputs, targets = (x.tensor_split(m) for x in rows_of(step, data, steps))  # m times (B / m, T)
        own = range(rank, m, ranks)
        count = comm.all_reduce(torch.stack([(targets[i] >= 0).sum() for i in own]).sum())  # in all
        gradients, loss = [torch.zeros_like(p) for p in weights], torch.zeros((), dtype=weights[0].dtype)
        for i in own:
            model.zero_grad()
            x = dropped(model[0](inputs[i]), random[i])
            scores = model[1:](x).flatten(0, 1)
            part = cross_entropy(scores, targets[i].flatten(), ignore_index=-1, reduction="sum") / count
            (part * SCALE).backward()
            loss += part.detach()
            for gradient, p in zip(gradients, weights, strict=True):
                gradient += low(p.grad) / SCALE
        # Communicate: add up the gradients of all micro-batches.
        for gradient in gradients:
            comm.all_reduce(gradient)
        # Update the masters.
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient * (CLIP / norm).clamp(max=1)
        optimizer.step()
        schedule.step()
        losses.append(loss)
    if saved is not None:
        states = [generator.get_state() for generator in random]
        for i in range(m):  # each is with the rank whose micro-batches it drops from
            comm.broadcast(states[i], i % ranks)
        saved |= {
            "step": len(batches) if stop is None else stop,
            "optimizer": deepcopy(optimizer.state_dict()),
            "schedule": schedule.state_dict(),
            "masters": [p.detach().clone() for p in masters],
            "random": states,
        }
    for p, master in zip(weights, masters, strict=True):
        p.data.copy_(master.data)
    return comm.all_reduce(torch.stack(losses)).tolist()
