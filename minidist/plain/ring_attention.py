"""Ring attention: a row too long for one rank is shared along its tokens, through the whole model.

Every rank has all parameters, and T / n of the tokens of each row. Only attention looks at other tokens:
there each rank's block of keys and values travels around a ring, and while a rank computes with one block,
the next one arrives. The softmax is put together block by block, so no rank ever holds the keys or the scores
of a whole row. The backward pass sends the blocks around once more, each followed by the sum of its
gradients, to which every rank adds.

In a step a rank sends L ((n - 1) + (2 n - 1)) K bytes, forward and backward, and 2 (n - 1) / n S for the
gradients of the parameters: n ranks, L blocks of the model, K the bytes of a rank's keys and values, S those
of the parameters. Keys and values make n - 1 hops to see all ranks, and their gradients n, since the last
hop brings them home: backward that is (n - 1) + n. K has 2 B T D / n elements. n is above 1, and divides T.

The ranks' work is uneven: tokens see only those before them, so rank 0 computes with 1 block and the last
rank with all n, and the others wait for it. Ranks with tokens of both ends of a row would even this out.

Sources: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
section 3; for the softmax in blocks and its gradient, Dao et al. 2022, "FlashAttention", 3.1 and appendix B.
Lesson: 15 "All together"
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.plain.gpt import Attention, Batch, Block, MakeOptimizer, loss_of, same_weights


def around_the_ring(block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (owner, block) for the blocks of all ranks, this rank's first."""
    rank, n = comm.rank(), comm.size()
    for hop in range(n - 1):
        # Launch: pass the block on to the next rank, receive the block of the rank before.
        sending, arriving = comm.send(block, (rank + 1) % n, async_op=True), torch.empty_like(block)
        receiving = comm.recv(arriving, (rank - 1) % n, async_op=True)
        # Compute: the caller does.
        yield (rank - hop) % n, block
        # Wait.
        sending.wait()
        receiving.wait()
        block = arriving
    yield (rank + 1) % n, block


def scores(q: Tensor, k: Tensor, diagonal: bool) -> Tensor:  # (B, H, T / n, D / H), twice
    """Return (B, H, T / n, T / n). If q and k are of the same tokens, hide those above the diagonal."""
    s: Tensor = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return s.masked_fill(torch.ones_like(s).triu(1).bool(), -torch.inf) if diagonal else s


class RingSoftmax(torch.autograd.Function):
    """softmax(q k^T / sqrt(D / H)) v, with the queries of this rank, and the keys and values of all."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, H, T / n, D / H) each
        """Keys and values go around the ring."""
        rank, out, log_sum = comm.rank(), torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
        for owner, (k_here, v_here) in around_the_ring(torch.stack((k, v))):
            if owner <= rank:  # later ranks have later tokens, which this rank's do not see
                s, before = scores(q, k_here, owner == rank), log_sum
                log_sum = torch.logaddexp(before, s.logsumexp(-1, keepdim=True))  # log(sum(exp(s))) so far
                out = out * (before - log_sum).exp() + (s - log_sum).exp() @ v_here  # softmax(s) v so far
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (B, H, T / n, D / H)
        """Keys, values and their gradients go around the ring."""
        q, k, v, out, log_sum = ctx.saved_tensors
        rank, n, delta = comm.rank(), comm.size(), (gradient * out).sum(-1, keepdim=True)
        dq, dk_dv = torch.zeros_like(q), torch.zeros_like(torch.stack((k, v)))
        for owner, (k_here, v_here) in around_the_ring(torch.stack((k, v))):
            if owner <= rank:
                p = (scores(q, k_here, owner == rank) - log_sum).exp()  # softmax(s)
                ds = p * (gradient @ v_here.transpose(-1, -2) - delta) / q.shape[-1] ** 0.5
                dq += ds @ k_here
                dk_dv += torch.stack((ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ gradient))
            # The sum follows its block. The sum for the next block arrives; after the last block, our own.
            sending = comm.send(dk_dv, (rank + 1) % n, tag=1, async_op=True)
            dk_dv = comm.recv(torch.empty_like(dk_dv), (rank - 1) % n, tag=1)
            sending.wait()
        return dq, dk_dv[0], dk_dv[1]


class RingAttention(Attention):
    """The model's attention, for this rank's tokens."""

    def mix(self, x: Tensor) -> Tensor:  # (B, T / n, D)
        """As in gpt.py, but for the softmax."""
        projected = (project(x) for project in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projected)
        return RingSoftmax.apply(q, k, v).transpose(1, 2).flatten(2)


def train(model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer) -> list[float]:
    """Train `model` in place on this rank's tokens of each batch, and return the losses."""
    same_weights(model)
    blocks = [layer for layer in model if isinstance(layer, Block)]
    for block in blocks:
        block.attention.__class__ = RingAttention  # the same parameters, another forward pass
    rank, n, optimizer, losses = comm.rank(), comm.size(), make_optimizer(model.parameters()), []
    for batch in batches:
        # Compute: what this rank's tokens contribute to the mean loss, and to the gradients.
        inputs, targets = (tokens.chunk(n, dim=1)[rank] for tokens in batch)  # (B, T / n)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets) / n
        loss.backward()
        # Communicate: add up what all tokens contribute.
        for p in model.parameters():
            comm.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.detach())
    for block in blocks:
        block.attention.__class__ = Attention
    return comm.all_reduce(torch.stack(losses)).tolist()
