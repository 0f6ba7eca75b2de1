"""Seeding: hashes that are the same everywhere, and values that depend on a name and a seed alone."""

import torch
from torch import nn

from minidist.model.seeding import fill, generator, stable_hash, undrawn


def test_the_hash_is_the_same_in_every_process():
    assert stable_hash(0, "layers.0.token.weight") == 9_183_170_205_738_441_268
    assert 0 <= stable_hash("x") < 2**63
    assert stable_hash("ab", "c") != stable_hash("a", "bc")
    assert stable_hash(1, 23) != stable_hash(12, 3)


def test_a_generator_is_a_stream_of_its_own():
    one, same, other = generator(0, "a"), generator(0, "a"), generator(0, "b")
    draws = [torch.rand(8, generator=each) for each in (one, same, other)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_filling_goes_by_name_and_not_by_order():
    first = {"a.weight": torch.empty(3, 5), "b.weight": torch.empty(3, 5), "c.bias": torch.empty(4)}
    second = {name: torch.full_like(value, torch.nan) for name, value in reversed(first.items())}
    for parameters in (first, second):
        fill(parameters.items(), lambda name, _: 1.0 if name.startswith("a") else 100.0, seed=0)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not first["c.bias"].any()
    assert first["a.weight"].abs().max() < 10 < first["b.weight"].abs().max()


def test_layers_are_made_without_drawing_values():
    before = torch.get_rng_state()
    made = undrawn(lambda: nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)), torch.float64, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert [(p.shape, p.dtype) for p in made.parameters()] == [
        ((4, 3), torch.float64),
        ((2, 3), torch.float64),
        ((2,), torch.float64),
    ]
    nn.Linear(3, 2)  # and outside they draw
    assert not torch.equal(torch.get_rng_state(), before)
