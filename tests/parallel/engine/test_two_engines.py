"""Two models that are trained in turn, each by an engine of its own: a GAN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import minidist as md
from tests.conftest import Clusters
from tests.helpers.contract import plain_steps
from tests.parallel.engine.test_loops import CLOSE, deep, rows

ADAM = partial(torch.optim.Adam, lr=0.02, betas=(0.5, 0.9))


def mlp(seed: int, inputs: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def drawn(steps: int, *columns: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(4)
    sizes = [(steps, 6, each) for each in columns]
    of_all = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    return [*zip(*of_all, strict=True)]


# The losses. `model` is what an engine trains; the other model is a variable of the function around it.


def critic_loss(penalty: bool) -> Callable[[Any, Any], Tensor]:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, fake = batch
        if not penalty:
            yes, no = model(real), model(fake)
            return binary_cross_entropy_with_logits(
                yes, torch.ones_like(yes)
            ) + binary_cross_entropy_with_logits(no, torch.zeros_like(no))
        between = ((real + fake) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        distance: Tensor = model(fake).mean() - model(real).mean()
        return distance + 10 * (slope.norm(dim=1) - 1).square().mean()

    return loss


def generator_loss(critic: nn.Module, penalty: bool) -> Callable[[Any, Any], Tensor]:
    def loss(model: Any, noise: Tensor) -> Tensor:
        score: Tensor = critic(model(noise))
        return -score.mean() if penalty else binary_cross_entropy_with_logits(score, torch.ones_like(score))

    return loss


def gan(layout: md.Layout, penalty: bool, freezes: bool, rehearse: bool) -> list[dict[str, Tensor]]:
    generator, critic = mlp(md.rank(), 3, 4), mlp(10 + md.rank(), 4, 1)
    options: Any = {"rehearse": rehearse}
    of_critic = md.prepare(critic, ADAM, layout, critic_loss(penalty), **options)
    of_generator = md.prepare(generator, ADAM, layout, generator_loss(critic, penalty), **options)
    for real, noise in drawn(4, 4, 3):
        own, own_noise = rows(of_critic, real, noise)
        with torch.no_grad():
            fake = generator(own_noise)
        of_critic.step((own, fake))
        critic.requires_grad_(not freezes)
        of_generator.step(own_noise)
        critic.requires_grad_(True)
    return [of_generator.full_state_dict(), of_critic.full_state_dict()]


def plain_gan(penalty: bool) -> tuple[nn.Module, nn.Module]:
    generator, critic = mlp(0, 3, 4), mlp(10, 4, 1)
    of_generator, of_critic = ADAM(generator.parameters()), ADAM(critic.parameters())
    for real, noise in drawn(4, 4, 3):
        plain_steps(critic, of_critic, [(real, generator(noise).detach())], critic_loss(penalty))
        plain_steps(generator, of_generator, [noise], generator_loss(critic, penalty))
    return generator, critic


LAYOUTS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"]


GANS = [
    *((layout, True, True, False) for layout in LAYOUTS),
    *((layout, False, False, True) for layout in ("dp=2,zero=1", "dp=2,zero=3")),
    *(deep(layout, False, True, False) for layout in LAYOUTS),
    deep("dp=2", False, False, True),
]


def compare(found: list[list[dict[str, Tensor]]], expected: tuple[nn.Module, nn.Module]) -> None:
    for of_rank in found:
        for state, model in zip(of_rank, expected, strict=True):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, **CLOSE)


@pytest.mark.parametrize(("layout", "penalty", "freezes", "rehearse"), GANS)
def test_a_gan(cluster_of: Clusters, layout: str, penalty: bool, freezes: bool, rehearse: bool) -> None:
    """Also with a gradient penalty; and with gradients that nobody uses, which a rehearsal must not send."""
    found = cluster_of(2).run(gan, md.Layout.parse(layout), penalty, freezes, rehearse)
    compare(found, plain_gan(penalty))
