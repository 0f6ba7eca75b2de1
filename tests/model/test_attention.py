"""A GPT whose attention runs on a rung: it trains to the weights of torch's attention, and finds faults."""

import copy
import dataclasses
import pickle

import pytest
import torch

import minidist as md
from minidist.kernels import ATTENTION_LADDER, rung
from minidist.kernels.cuda import attention as cuda
from minidist.model import GPT, GPTConfig, blocks, cross_entropy
from minidist.model.attention import Attend, attention, named
from minidist.parallel.sequence_share.sequence_share import SequenceShare, apply
from tests.helpers.refusals import refuses

S6, S7 = ATTENTION_LADDER[-2:]
SHAPE = GPTConfig(vocabulary=11, context=40, layers=2, heads=2, width=24)
NEAR = {"rtol": 1e-5, "atol": 1e-6}
"""Float32 keeps 7 digits; the weights are below 1, and five steps move them by up to 0.1."""


def trained(step):
    """The weights after five steps. The first ones are larger than a GPT's, so that attention is sharp."""
    model = GPT(SHAPE, attention=step)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 10 if weight.dim() > 1 else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in batches(5):
        optimizer.zero_grad()
        cross_entropy(model(rows[:, :-1]), rows[:, 1:]).backward()
        optimizer.step()
    return dict(model.named_parameters())


def batches(count):
    return [torch.randint(11, (4, 38), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def same(step):
    found, expected = trained(step), trained(None)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], **NEAR)


@pytest.mark.parametrize("step", ATTENTION_LADDER, ids=lambda step: step.name)
def test_a_gpt_trains_on_each_rung_to_the_weights_of_torchs_attention(step):
    same(step)


# From rung 3 on kernels compile for seconds.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] if name[1] > "2" else []) for name in cuda.RUNGS]
)
def test_a_block_attends_on_the_cuda_ladder_too(name):
    pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")
    step = cuda.load(name)
    torch.manual_seed(0)  # a few draws in a hundred differ by more than 30 roundings
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=getattr(torch, step.dtypes[0])) for _ in range(3))
    found = {}
    for attend in (Attend(named(step.name)), blocks.attend):
        wide = torch.float64 if attend is blocks.attend else q.dtype
        qkv = [x.detach().to(wide).requires_grad_() for x in (q, k, v)]
        out = attend(*qkv, 0.0)
        found[attend] = [out, *torch.autograd.grad(out.square().sum(), qkv)]
    coarse = torch.finfo(q.dtype).eps
    for ours, exact in zip(*found.values(), strict=True):
        assert ours.dtype == q.dtype
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=30 * coarse)


def spoiled(what):
    """Rung 7 with a fault of a hundredth in one element."""

    def compute(q, k, v, out, logs, heads, causal):
        S7.compute(q, k, v, out, logs, heads, causal)
        (out if what == "out" else logs)[-1, -1] += 1e-2 * (what in ("out", "logs"))

    def gradients(*arrays):
        S7.gradients(*arrays)
        arrays[6 + ("dq", "dk", "dv").index(what)][-1, -1] += 1e-2

    own = gradients if what in ("dq", "dk", "dv") else S7.gradients
    return dataclasses.replace(S7, name="s0_spoiled", compute=compute, gradients=own)


@pytest.mark.parametrize("what", ["out", "logs", "dq", "dk", "dv"])
def test_a_fault_in_one_element_is_found(what):
    same(S7)
    with pytest.raises(AssertionError):
        same(spoiled(what))


def test_not_causal_with_other_numbers_of_keys_and_any_strides():
    q, k, v = (torch.randn(2, 5, size, 8).transpose(0, 1).requires_grad_() for size in (7, 9, 9))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    g = torch.randn_like(expected)
    found = attention(q, k, v, S6)
    torch.testing.assert_close(found, expected, **NEAR)
    for ours, its in zip(*(torch.autograd.grad(out, (q, k, v), g) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, its, **NEAR)


def test_a_gradient_of_a_gradient_is_refused():
    q = X.clone().requires_grad_()
    for loss in (attention(q, X, X, S6).sum(), attention(q, X, X, S6).square().sum()):
        with pytest.raises(NotImplementedError, match="attention on a rung has none; leave the rung out"):
            torch.autograd.grad(loss, q, create_graph=True)


def test_a_float32_rung_trains_in_16_bits_alone_and_in_a_ring(cluster_of):
    for layout in (md.Layout(dp=2, precision="bf16"), md.Layout(cp=2, precision="bf16")):
        losses = [cluster_of(2).run(engine_losses, layout, step)[0] for step in (None, "s6_causal")]
        torch.testing.assert_close(*losses, rtol=2**-8, atol=0)


def test_a_model_on_a_rung_is_copied_pickled_loaded_and_cut_by_tensor_parallelism(cluster_of):
    model, plain = GPT(SHAPE, attention="s6"), GPT(SHAPE, seed=1)
    tokens = torch.randint(11, (2, 9))
    plain.load_state_dict(model.state_dict())
    for twin in (plain, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(tokens), model(tokens), **NEAR)
    for layout in (md.Layout(tp=2), md.Layout(cp=2), md.Layout(pp=2)):
        losses = [cluster_of(2).run(engine_losses, layout, step)[0] for step in (None, "s6_causal")]
        torch.testing.assert_close(*losses, **NEAR)


def engine_losses(layout, step):
    """On a rank: the losses of some steps."""
    model = GPT(SHAPE, attention=step)
    engine = md.prepare(model, lambda parameters: torch.optim.SGD(parameters, lr=0.5), layout)
    return torch.tensor([float(engine.step(rows[:, :-1], rows[:, 1:])) for rows in batches(4)])


def test_a_rung_of_16_bits_fits_an_engine_of_16_bits():
    md.prepare(GPT(SHAPE, attention=HALF), torch.optim.Adam, md.Layout(precision="bf16"))


X = torch.ones(1, 2, 3, 4)
HALF = dataclasses.replace(S6, name="s0_half", dtypes=("bfloat16",))


test_what_a_rung_does_not_take_is_named_with_the_remedy = refuses(
    lambda call: call(),
    (lambda: GPT(SHAPE, attention="s6_casual"), "unknown rung 's6_casual': did you mean s6_"),
    (lambda: GPT(SHAPE, attention=rung("s4")), TypeError, r"attention is Rung\(.*; give a rung of atten"),
    (
        lambda: GPT(dataclasses.replace(SHAPE, dropout=0.1), attention=S6),
        "dropout is 0.1, and rung s6_causal drops no attention weights; set it to 0",
    ),
    (
        lambda: GPT(SHAPE, attention=S6, dtype=torch.float64)(torch.ones(1, 2).long()),
        TypeError,
        r"q has dtype float64, but rung s6_causal takes float32; convert it with \.to\(torch\.float32\)",
    ),
    (
        lambda: md.prepare(GPT(SHAPE, attention=HALF), torch.optim.Adam, md.Layout()),
        TypeError,
        r"layers\.1\.attention computes in float32, but rung s0_half takes bfloat16; give the layout",
    ),
    (lambda: attention(X, X, X.to("meta"), S6), r"v is on meta, but rung s6_causal runs on"),
    (lambda: attention(X.numpy(), X, X, S6), TypeError, r"q is a ndarray, not a tensor"),
    (lambda: attention(X, X[:, :1], X, S6), r"q is \(1, 2, 3, 4\), k is \(1, 1, 3, 4\)"),
    (lambda: attention(X, X[:, :, :1], X[:, :, :1], S6, causal=True), "needs a key of its own"),
    (lambda: attention(X, X, X, None), TypeError, "rung is None; give a rung of attention, such as named"),
    (lambda: attention(X, X, X, rung("s4")), TypeError, r"rung is Rung\(.*; give a rung of attention"),
    (lambda: Attend(S6)(X, X, X, 0.5), "dropout is 0.5, and rung s6_causal drops no"),
    (
        lambda: apply(GPT(SHAPE, attention=HALF), SequenceShare(blocks=None)),
        TypeError,
        "rung s0_half takes bfloat16, and a ring gives its rung float32: take a CUDA rung from s1 to s3",
    ),
    (
        lambda: apply(GPT(SHAPE, attention=S6), SequenceShare(blocks=(None, None))),
        "rung s6_causal, but these ranks trade heads, .*cp_kind",
    ),
)
