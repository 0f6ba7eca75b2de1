"""What training takes, reckoned beforehand, against what ranks count; what fits; and the papers' figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import minidist as md
from minidist.model import GPT, GPTConfig, config, cross_entropy
from minidist.model.configs import CONFIGS
from minidist.parallel.activations import ActivationCounter
from minidist.parallel.recompute import recompute
from minidist.scale import saved, tensors
from minidist.scale.estimates import estimate

Clusters = Callable[[int], md.Cluster]
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
TINY = GPTConfig(vocabulary=61, context=24, layers=3, heads=4, width=32)
SHAPES = [
    TINY,
    replace(TINY, layers=1, width=24, heads=2, tied=False),
    GPTConfig(context=32, layers=2, heads=3, width=48),
]


# The papers' figures.


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, "120"), (1, "31.4"), (2, "16.6"), (3, "1.9")])
def test_the_zero_papers_table(stage: int, gigabytes: str) -> None:
    # 7.5 B parameters on 64 ranks, mixed precision, Adam: figure 1.
    found = estimate(7.5e9, md.Layout(dp=64, zero=stage, precision="bf16")).total / 1e9
    assert f"{found:.{len(gigabytes.partition('.')[2])}f}" == gigabytes


def test_weights_of_bert() -> None:
    assert estimate("bert-tiny").parameters == pytest.approx(17.5e6, rel=0.01)
    assert estimate("bert-base").parameters == pytest.approx(438e6, rel=0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_block_is_what_the_formula_of_korthikanti_says(precision: str) -> None:
    # 34 s b h without two masks of one byte, which is 32; the statistics and log-sums are what is left out.
    shape = CONFIGS["gpt3-2.7b"]
    found = saved.Saved(shape, 4, 2048, 2).block() / (4 * 2048 * shape.width)
    assert 32 <= found < 32.1
    math = saved.Saved(shape, 4, 2048, 2, attention="math").block() - saved.Saved(shape, 4, 2048, 2).block()
    assert math > 4 * shape.heads * 2048**2 * 4  # the softmax in float32 alone


# Parameters, layer by layer.


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tied", [True, False])
def test_layers_have_all_parameters(name: str, tied: bool) -> None:
    shape = config(name)
    shape = replace(shape, tied=tied) if isinstance(shape, GPTConfig) else shape
    assert sum(map(sum, tensors.layers(shape))) == shape.parameters()


def test_layers_are_those_of_the_module() -> None:
    for shape in SHAPES:
        model, known = GPT(shape, device="meta"), set[int]()
        for layer, sizes in zip(model.layers, tensors.layers(shape), strict=True):
            new = [p for p in layer.parameters() if id(p) not in known]
            known |= set(map(id, new))
            assert sorted(p.numel() for p in new) == sorted(sizes)


def test_tensor_parallel_ranks_and_stages_have_all_parameters_together() -> None:
    shape = config("gpt2-small", vocabulary=50304)
    whole = shape.parameters()
    stages = [sum(map(sum, tensors.layers(shape, pp=5, stage=stage))) for stage in range(5)]
    assert sum(stages) == whole + 50304 * 768  # the last stage's copy of the tied matrix
    whole_on_each = 12 * 6 * 768 + 1024 * 768 + 2 * 768  # norms, biases of the projections, positions
    assert sum(map(sum, tensors.layers(shape, tp=4))) == (whole - whole_on_each) // 4 + whole_on_each


# Activations, against what autograd saves.


def saved_by(shape: GPTConfig, precision: str, rows: int, again: bool) -> int:
    """Peak of a forward and a backward pass."""
    model: nn.Module = GPT(shape, dtype=DTYPES[precision])
    if again:
        recompute(model)
    tokens = torch.randint(0, shape.vocabulary, (rows, shape.context))
    with ActivationCounter(model, [tokens]) as counter:
        cross_entropy(model(tokens), torch.zeros_like(tokens)).backward()
    return counter.peak


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_of_the_activations(shape: GPTConfig, dropout: float, precision: str) -> None:
    shape = replace(shape, dropout=dropout)
    for rows in (1, 5):
        expected = estimate(shape, None, precision, (rows, shape.context)).activations
        assert saved_by(shape, precision, rows, again=False) == expected


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_recomputed_activations(shape: GPTConfig, precision: str) -> None:
    layout = md.Layout(recompute=True)
    for rows in (1, 5):
        expected = estimate(shape, layout, precision, (rows, shape.context)).activations
        assert saved_by(shape, precision, rows, again=True) == expected
