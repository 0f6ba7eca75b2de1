"""Train a GAN in a loop of your own: two models, two optimizers, and gradients that the ranks average.

python examples/gan.py
torchrun --nproc-per-node 2 examples/gan.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import minidist as md

NOISE, ROWS = 4, 128


def real_rows(rows: int) -> Tensor:
    """Points on a ring of radius 2, (rows, 2)."""
    angle = 6.2832 * torch.rand(rows, 1)
    return 2 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(rows, 2)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs))


def train(steps: int = 300) -> float:
    torch.manual_seed(md.rank())  # each rank draws rows of its own; it gets rank 0's weights
    generator, critic = md.DataParallel(mlp(NOISE, 2)), md.DataParallel(mlp(2, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.99))
    of_critic = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.99))
    yes, no = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    for step in range(steps):
        # The critic learns to tell points of the ring from generated ones.
        fake = generator(torch.randn(ROWS, NOISE))
        of_critic.zero_grad()
        both = critic(torch.cat([real_rows(ROWS), fake.detach()]))
        bce(both, torch.cat([yes, no])).backward()
        critic.synchronize()
        of_critic.step()

        # The generator learns to pass for the ring. The critic's gradients of this pass are not used.
        of_generator.zero_grad()
        with critic.no_sync():
            loss = bce(critic(fake), yes)
            loss.backward()
        generator.synchronize()
        of_generator.step()
        if md.rank() == 0 and step % 100 == 0:
            print(f"step {step}: the generator's loss is {loss.item():.3f}")
    radius = generator(torch.randn(1000, NOISE)).norm(dim=1)
    return (radius - 2).abs().mean().item()


if __name__ == "__main__":
    print(f"mean distance from the ring: {md.launch(train, ranks=2)[0]:.3f}")
