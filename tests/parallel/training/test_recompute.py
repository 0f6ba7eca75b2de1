"""Recomputation: the same gradients to the last bit, for a fraction of the activations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import GPT, config
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.recompute_policies import POLICIES
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.parallel.training.recompute import recompute, recompute_by, recomputed_in, recomputes
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import gpt, tokens
from tests.helpers.refusals import refuses

PARTS = {
    "whole layers": None,
    "attention": ["layers.*.attention"],
    "in one another": ["layers.*", "layers.*.mlp", "layers.?.attention"],
}


def gradients(model: nn.Module, seed: int = 3) -> list[Tensor | None]:
    """Of one batch, with dropout's draws from the seed."""
    inputs, targets = tokens(torch.Generator().manual_seed(0), 4)
    torch.manual_seed(seed)
    model.zero_grad()
    cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("parts", PARTS)
def test_gradients_are_the_same_with_dropout(parts: str) -> None:
    plain, recomputed = gpt(0, dropout=0.3), recompute(gpt(0, dropout=0.3), PARTS[parts])
    expected = gradients(plain)
    draws = torch.rand(3)
    torch.testing.assert_close(gradients(recomputed), expected, rtol=0, atol=0)
    assert torch.equal(torch.rand(3), draws)  # what is drawn next is the same, too
    assert any(not torch.equal(a, b) for a, b in zip(gradients(plain, seed=4), expected, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "form",
    [
        *("micro_batches=2", "dp=2", "dp=3,micro_batches=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"),
        *("tp=2", "tp=2,sequence_parallel=true", "cp=2", "pp=2,micro_batches=2", "pp=2,schedule=gpipe"),
        *("pp=2,schedule=interleaved,chunks=2", "dp=2,tp=2,zero=3", "dp=2,pp=2,zero=1,micro_batches=2"),
        *("tp=2,cp=2,sequence_parallel=true", "dp=2,cp=2,zero=2", "pp=4,micro_batches=2"),
    ],
)
def test_every_policy_meets_the_contract(cluster_of: Clusters, form: str, policy: str) -> None:
    layout = replace(md.Layout.parse(form), recompute=policy)
    contract.check(cluster_of, contract.Case(gpt, tokens), layout)


CHOSEN = {
    "every layer": (["encoder.0", "encoder.1", "decoder.0", "decoder.1"], [f"layers.{i}" for i in range(4)]),
    "every second layer": (["encoder.1", "decoder.1"], ["layers.1", "layers.3"]),
    "attention alone": (
        [f"{name}.self_attn" for name in ("encoder.0", "encoder.1", "decoder.0", "decoder.1")],
        ["layers.1.attention", "layers.2.attention"],
    ),
}
"""What policies choose of an encoder and a decoder, and of a GPT."""


@pytest.mark.parametrize("policy", CHOSEN)
def test_policies_choose_by_name(policy: str) -> None:
    (layers, _), (expected, of_gpt) = CHOSEN["every layer"], CHOSEN[policy]
    parts = [
        f"{name}.{part}" for name in layers for part in ("self_attn", "self_attn.out", "attn_norm", "mlp")
    ]
    assert [*POLICIES[policy].chooses(layers, [*layers, *parts])] == expected
    model = recompute_by(gpt(0), policy)
    names = {part: name for name, part in model.named_modules()}
    assert [names[part] for part in recomputed_in(model)] == of_gpt
    assert not recomputes(recompute_by(gpt(0), False))


def test_the_peak_is_an_input_a_layer_and_the_activations_of_one() -> None:
    text = torch.randint(0, 8, (4, 16))
    size = text.numel() * 32 * 4  # of the stream

    def count(parts: list[str] | str | None, layers: int = 8) -> int:
        shape = config("byte-tiny", vocabulary=8, context=16, width=32, heads=2, layers=layers)
        model = GPT(shape, dtype=torch.float32)
        if parts != "none":
            recompute(model, parts)
        with ActivationCounter(model) as counter:
            cross_entropy(model(text), text).backward()  # type: ignore[no-untyped-call]
        assert counter.saved == 0
        return counter.peak

    block = count("none") - count("none", layers=7)
    assert block > 15 * size  # 34 B T D bytes at 2 an activation, less dropout's masks
    whole, parts = count(None), count(["layers.*.attention"])
    assert count(None) - count(None, layers=7) == size  # what a layer more costs
    assert whole < 8 * size + 1.3 * block
    assert whole < parts < count("none")


test_parts_that_are_not_there = refuses(
    lambda model, parts: recompute(model, parts),
    (
        {"model": gpt(0), "parts": "layer.*"},
        r"unknown part 'layer.\*': did you mean 'layers.\*'\? known are layers, ",
    ),
    ({"model": gpt(0), "parts": ["layers.*", "layers.*.atention"]}, r"did you mean 'layers.\*.attention'"),
    ({"model": nn.Linear(2, 2), "parts": None}, "a Linear has no ModuleList or Sequential whose layers"),
)


@pytest.mark.parametrize("parts", [None, ["1.0"]])
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_spectral_norm_moves_once(norm: Callable[[nn.Module], nn.Module], parts: list[str] | None) -> None:
    """Each forward pass improves its estimate; a recomputed pass has the one that the first pass had."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(norm(nn.Linear(3, 3)), nn.ReLU()), nn.Linear(3, 1))
    again = recompute(deepcopy(model), parts)
    for _ in range(3):
        x = torch.randn(4, 3)
        for each in (model, again):
            each.zero_grad()
            each(x).square().sum().backward()
        for state in (nn.Module.named_buffers, nn.Module.named_parameters):
            for (name, one), (_, other) in zip(state(model), state(again), strict=True):
                assert torch.equal(one, other), name
                assert one.grad is None or torch.equal(one.grad, other.grad), name


class Counts(nn.Module):
    """Scales by a tensor that changes from call `late` on: assigned, or in place."""

    def __init__(self, elements: int, late: int, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.late, self.in_place = nn.Linear(3, 3), late, in_place
        self.register_buffer("scale", torch.ones(elements))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh() * self.scale[:3].clone()
        self.late -= 1
        if self.late <= 0:
            if self.in_place:
                self.scale.mul_(2)
            else:
                self.scale = self.scale * 2
        return y


def trained(late: int, elements: int, in_place: bool, again: bool) -> list[list[Tensor | None]]:
    model: nn.Module = nn.Sequential(Counts(elements, late, in_place))
    if again:
        recompute(model)
    found = []
    for step in range(4):
        if step == 2:
            model = copy.deepcopy(model)
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return found


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("elements", [3, 2**17])
@pytest.mark.parametrize("late", [1, 2])
def test_state_may_begin_to_change_in_any_call(late: int, elements: int, in_place: bool) -> None:
    if in_place and elements > 3 and late == 2:
        with pytest.raises(RuntimeError, match=r"scale of shape .* changed in place"):
            trained(late, elements, in_place, True)
        return
    torch.testing.assert_close(
        trained(late, elements, in_place, True), trained(late, elements, in_place, False), rtol=0, atol=0
    )
