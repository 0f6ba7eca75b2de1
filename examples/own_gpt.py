"""Train a GPT of your own on Python's source, byte by byte. The ranks share the optimizer's state (ZeRO-1).

python examples/own_gpt.py
torchrun --nproc-per-node 2 examples/own_gpt.py
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import minidist as md
from minidist.model import Sampler, dataset

WIDTH, CONTEXT = 64, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1))  # (B, T, 3, heads, D / heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, D / heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, 256)
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))


def train(steps: int = 60) -> float:
    torch.manual_seed(0)
    data = dataset("bytes", length=CONTEXT, limit=2000)
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    engine = md.prepare(GPT(), optimizer, md.Layout(dp=md.size(), zero=1), clip_norm=1.0)
    sampler = Sampler(len(data.train), 32, rank=engine.data_rank, ranks=engine.data_ranks)
    for step in range(steps):
        loss = engine.step(*data.train[sampler.share(step)])
        if md.rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")
    return engine.evaluate(*data.test[md.rank() : 64 : md.size()])


if __name__ == "__main__":
    print(f"loss of held-out text: {md.launch(train, ranks=2)[0]:.3f}")
