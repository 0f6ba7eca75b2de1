"""The small GPT that every rung of the training ladder trains: an embedding, blocks, a norm and a head.

A block is attention and an MLP, each behind a norm and added to its input (Vaswani et al. 2017, "Attention Is
All You Need", section 3, with the norms in front as in GPT-2). There is no position embedding: in causal
attention a token sees only itself and the tokens before it, which tells it enough about the order. Attention
is the only place where tokens exchange information; every other layer treats each token by itself.

Letters of the shapes, here and in all rungs: B rows, T tokens in a row, D width, H heads, V vocabulary.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minidist import comm

Batch = tuple[Tensor, Tensor]
"""Input tokens and target tokens, both (B, T)."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to an optimizer, such as `partial(torch.optim.AdamW, lr=1e-2)`."""


class Attention(nn.Module):
    """Every token takes in what it needs of the tokens before it, once for each head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        """Return the attention's output, of the shape of `x`."""
        return self.out(self.mix(x))

    def mix(self, x: Tensor) -> Tensor:  # (B, T, D)
        """Return what the heads find, one head beside the other."""
        projected = (project(x) for project in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projected)  # (B, H, T, D / H)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D / H)
        return mixed.transpose(1, 2).flatten(2)  # (B, T, D)


class Block(nn.Module):
    """Attention, where tokens exchange information, then an MLP, where each token works alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        """Return the block's output, of the shape of `x`."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt(
    layers: int = 4, width: int = 32, heads: int = 4, vocabulary: int = 64, seed: int = 0
) -> nn.Sequential:
    """Build the model: tokens (B, T) to scores (B, T, V). Its weights depend on the seed alone."""
    torch.manual_seed(seed)
    blocks = [Block(width, heads) for _ in range(layers)]
    norm, head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, norm, head)


def same_weights(module: nn.Module, source: int = 0) -> None:
    """Give every rank the weights of rank `source`, and no gradients. Rungs with several ranks begin so."""
    for p in module.parameters():
        p.grad = None
        comm.broadcast(p.detach(), source)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens of all rows."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
