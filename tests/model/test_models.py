"""Models: exact sizes, weights that do not depend on the cut, a causal GPT and an MLP that learn."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from minidist.model.configs import CONFIGS, BERTConfig, GPTConfig, config
from minidist.model.gpt import GPT, gpt_layers
from minidist.model.mlp import MLP
from tests.helpers.refusals import refuses

TINY = GPTConfig(vocabulary=11, context=8, layers=4, heads=2, width=12)


@pytest.fixture(autouse=True)
def one_thread():
    # Products this small wait for their threads: where the cores were taken, 30 s went in place of one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def draw_tokens(shape, config=TINY):
    return torch.randint(config.vocabulary, shape)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [name for name, shape in CONFIGS.items() if isinstance(shape, GPTConfig)])
def test_the_formula_counts_what_the_module_has(name, tied):
    shape = config(name, tied=tied)
    model = GPT(shape, device="meta")
    assert count(model) == shape.parameters()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_bert_is_for_sizing():
    with pytest.raises(TypeError, match="BERTConfig, which cannot be built"):
        GPT(config("bert-tiny"))
    assert isinstance(config("bert-tiny"), BERTConfig)


@pytest.mark.parametrize("index", range(TINY.layers + 2))
def test_a_layer_built_alone_has_the_weights_of_the_whole(index):
    whole = GPT(TINY, seed=5)
    torch.rand(7)  # another rank has used its global state otherwise
    (alone,) = gpt_layers(TINY, index, index + 1, seed=5)
    torch.testing.assert_close(alone.state_dict(), whole.layers[index].state_dict(), rtol=0, atol=0)


def test_stages_in_a_chain_compute_what_the_whole_does():
    whole, tokens = GPT(TINY, dtype=torch.float64), draw_tokens((3, 5))
    stages = {cut: gpt_layers(TINY, *cut, dtype=torch.float64) for cut in ((4, 6), (0, 1), (1, 4))}
    assert {cut: len(stage) for cut, stage in stages.items()} == {(4, 6): 2, (0, 1): 1, (1, 4): 3}
    x = tokens
    for cut in sorted(stages):
        for layer in stages[cut]:
            x = layer(x)
    assert torch.equal(x, whole(tokens))


@pytest.mark.parametrize("build", [partial(GPT, TINY), MLP])
def test_seeds_are_the_models_own(build):
    before = torch.random.get_rng_state()
    one, same, other = build(seed=1), build(seed=1), build(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() == 1 or not torch.equal(a, c), name


def test_defaults_of_torch_are_heeded():
    with torch.device("meta"):
        assert all(p.is_meta for model in (GPT(TINY), MLP()) for p in model.parameters())
    assert {p.dtype for p in GPT(TINY).parameters()} == {torch.float32}


def test_first_weights_are_spread_as_the_paper_says():
    shape = config("byte-small")
    names = dict(GPT(shape).named_parameters())
    matrices = {name: weight for name, weight in names.items() if weight.dim() == 2}
    for name, weight in matrices.items():
        residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        expected = 0.02 / math.sqrt(2 * shape.layers) if residual else 0.02
        # From 32,768 draws a deviation is known to 1/sqrt(2 n), 0.4 %: 3 % is seven times as much.
        assert weight.std().item() == pytest.approx(expected, rel=0.03), name
    draws = [weight.flatten()[:1000] for weight in matrices.values()]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)
    assert all(bool((value == 0).all()) for name, value in names.items() if name.endswith("bias"))
    assert all(bool((value == 1).all()) for name, value in names.items() if name.endswith("norm.weight"))


def test_a_tied_matrix_is_one_parameter_also_in_copies():
    model = GPT(TINY)
    for each in (model, copy.deepcopy(model), GPT(TINY, dtype=torch.float64).to(torch.float32)):
        assert each.layers[0].token.weight is each.layers[-1].output.weight
        assert count(each) == TINY.parameters()
    assert {"layers.0.token.weight", "layers.5.output.weight"} <= model.state_dict().keys()
    free = GPT(GPTConfig(vocabulary=11, context=8, layers=4, heads=2, width=12, tied=False))
    assert not torch.equal(free.layers[0].token.weight, free.layers[-1].output.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_later_token_does_not_change_earlier_logits(dtype):
    model, tokens = GPT(TINY, dtype=dtype), draw_tokens((2, 8))
    before = model(tokens)
    assert (before.shape, before.dtype) == ((2, 8, 11), dtype)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % TINY.vocabulary
    after = model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5], before[:, 5])
    assert not torch.allclose(after[:, 6:], before[:, 6:])


test_wrong_sizes_and_inputs_are_refused = refuses(
    lambda call: call(),
    *(
        (partial(gpt_layers, TINY, *cut), "give 0 <= start < stop <= 6")
        for cut in ((0, 0), (3, 2), (-1, 2), (0, 7), (6, None))
    ),
    (lambda: GPT(TINY)(draw_tokens((1, 9))), r"tokens are \(1, 9\); give \(B, T\) with T at most 8"),
    (lambda: GPT(TINY)(torch.tensor([[3, 11]])), "tokens are 3 to 11; give 0 to 10"),
    (lambda: GPT(TINY)(draw_tokens((4,))), "tokens are"),
    *((partial(MLP, sizes), "give two or more, each at least 1") for sizes in ((), (64,), (64, 0, 10))),
    (lambda: MLP()(torch.rand(2, 8)), r"inputs are \(2, 8\); give \(\.\.\., 64\)"),
)


def test_dropout_acts_in_training_alone():
    shape = GPTConfig(vocabulary=11, context=8, layers=1, heads=2, width=12, dropout=0.5)
    model, tokens = GPT(shape), draw_tokens((2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), GPT(GPTConfig(**{**vars(shape), "dropout": 0.0}))(tokens))


class Transposed(nn.Module):
    """A linear layer of another maker: it draws from the global state when it is made, and keeps a buffer."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x):
        return (self.weight @ x.mT).mT * self.scale + self.bias


def test_an_mlp_has_the_same_weights_on_any_linear():
    before = torch.random.get_rng_state()
    ours, theirs = MLP(linear=Transposed, dtype=torch.float64), MLP(dtype=torch.float64)
    assert torch.equal(torch.random.get_rng_state(), before)
    named, expected = (dict(each.named_parameters()) for each in (ours, theirs))
    torch.testing.assert_close(named, expected, rtol=0, atol=0)
    x = torch.randn(13, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
