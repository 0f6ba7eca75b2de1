"""Train a small ResNet on handwritten digits. BatchNorms take their statistics over the rows of all ranks.

python examples/resnet.py
torchrun --nproc-per-node 2 examples/resnet.py
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import minidist as md
from minidist.model import Sampler, accuracy, digits


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.shortcut = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        *(Block(16, 16), Block(16, 32, stride=2), Block(32, 64, stride=2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def train(steps: int = 60) -> float:
    torch.manual_seed(0)
    data = digits()
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    engine = md.prepare(resnet(), optimizer, md.Layout(dp=md.size()), batch_norm="synchronized")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, steps)
    sampler = Sampler(len(data.train), 64, rank=engine.data_rank, ranks=engine.data_ranks)
    for step in range(steps):
        loss = engine.step(*data.train[sampler.share(step)])
        schedule.step()
        if md.rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")
    return engine.evaluate(*data.test[md.rank() :: md.size()], accuracy)


if __name__ == "__main__":
    print(f"accuracy on new digits: {md.launch(train, ranks=2)[0]:.1%}")
