"""The parameter server: workers push gradients and pull parameters, and do not wait for each other.

Rank 0, the server, holds the parameters and the optimizer; the other ranks are workers. A worker computes the
gradient of its own rows and pushes it; the server updates the parameters at once and returns them. So a slow
worker delays nobody. The price is staleness: while a worker computes, the others change the parameters, and
its gradient belongs to old ones. With one worker nothing is stale, and the result is that of one process.
In a step a worker sends S bytes, and the server (n - 1) S: n ranks, n - 1 rows or more, S bytes of weights.

Sources: Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1 (Downpour SGD); Li et al.
2014, "Scaling Distributed Machine Learning with the Parameter Server", section 3.
Lesson: 11 "Waiting or not"
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, loss_of, same_weights


def serve(x: nn.Parameter, steps: int, optimizer: torch.optim.Optimizer) -> None:
    """Update the parameters `x` with every gradient that a worker pushes, in order of arrival."""
    lock = Lock()

    def serve_one(worker: int) -> None:
        for _ in range(steps):
            gradient = comm.recv(torch.empty_like(x), worker)
            with lock:  # one update at a time
                x.grad = gradient
                optimizer.step()
                newest = x.detach().clone()
            comm.send(newest, worker)

    # A receive waits for one rank, so every worker gets a thread of its own.
    with ThreadPoolExecutor(comm.size()) as pool:
        list(pool.map(serve_one, range(1, comm.size())))


def work(x: Tensor, model: nn.Sequential, batches: Sequence[Batch]) -> Tensor:
    """Compute, push and pull, once for each batch; return this worker's part of each loss."""
    losses, worker, workers = [], comm.rank() - 1, comm.size() - 1
    for batch in batches:
        # Compute.
        inputs, targets = (whole.tensor_split(workers)[worker] for whole in batch)  # (B / (n - 1), T)
        model.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        # Push.
        comm.send(parameters_to_vector(p.grad for p in model.parameters()), 0)
        # Pull, into the model's parameters.
        comm.recv(x, 0)
        losses.append(loss.detach() * len(inputs) / len(batch[0]))
    return torch.stack(losses)


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train `model` in place, as the server or as a worker, and return the losses of whole batches."""
    same_weights(model)
    x = nn.Parameter(parameters_to_vector(model.parameters()).detach())  # all parameters in one message
    vector_to_parameters(x, model.parameters())  # from now on they are views of x
    if comm.rank() == 0:
        serve(x, len(batches), make_optimizer([x]))
        losses = x.new_zeros(len(batches))
    else:
        losses = work(x.detach(), model, batches)
    comm.broadcast(x.detach())  # for the workers that were done before the last update
    return comm.all_reduce(losses).tolist()
