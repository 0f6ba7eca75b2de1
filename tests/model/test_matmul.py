"""The product and the linear layer on a rung: right gradients, equal to torch's own, computed by the rung."""

import copy
import dataclasses
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.gradcheck import GradcheckError

import minidist as md
from minidist.kernels import CPU_LADDER, CUDA_LADDER, Rung, rung
from minidist.kernels.measure import product_checks
from minidist.model import MLP, accuracy, digits
from minidist.model.matmul import Linear, matmul
from tests.helpers.products import skip_unless_it_runs
from tests.helpers.refusals import refuses

# Rung 8 rounds to bf16, so its products and layers are held to its bound, below.
EXACT = [step for step in CPU_LADDER if not step.factors]
every_exact_rung = pytest.mark.parametrize("step", EXACT, ids=lambda step: step.name)
S4, S8 = rung("s4_loop_order"), rung("s8_matrix_unit")


class Counting:
    """A rung that keeps the arguments of its calls."""

    def __init__(self, step: Rung = S4) -> None:
        self.calls = []
        self.rung = dataclasses.replace(step, name="s0_counting", compute=self.compute)
        self._step = step

    def compute(self, a, b, out):
        self.calls.append((a, b, out))
        self._step.compute(a, b, out)


def wrong_in_one_element(a, b, out):
    S4.compute(a, b, out)
    out[-1, -1] += 1e-3


WRONG = dataclasses.replace(S4, name="s0_wrong", compute=wrong_in_one_element)


def random(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


@every_exact_rung
def test_gradients_are_those_of_the_product(step):
    for x, w in [
        (random(3, 4), random(4, 5)),
        (random(2, 3, 4), random(5, 4).T),
        (random(4), random(4, 2)),
        (random(3, 1), random(1, 1)),
        (random(4, 3).T, random(4, 6)[:, ::2]),
    ]:
        assert torch.autograd.gradcheck(lambda x, w: matmul(x, w, step), (x, w))


def test_a_rung_that_is_wrong_in_one_element_fails_gradcheck_and_equality():
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda x, w: matmul(x, w, WRONG), (random(3, 4), random(4, 5)))
    with pytest.raises(AssertionError):
        compare_with_torch(Linear(4, 5, rung=WRONG, dtype=torch.float64), random(3, 4))


def compare_with_torch(ours, x):
    """Hold output and all gradients of `ours` to those of torch's layer with the same parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a layer without weights
        theirs = nn.Linear(ours.in_features, ours.out_features, ours.bias is not None, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layer in (ours, theirs):
        leaf = x.detach().clone().requires_grad_()
        y = layer(leaf)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
        results.append([y.detach(), leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    for mine, its in zip(*results, strict=True):
        # Sums of at most 40 products of numbers near 1 in float64: they round by about 1e-14.
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


@every_exact_rung
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (2, 0, 7), (0, 7), (2, 1, 3, 7)])
def test_linear_equals_torchs(step, bias, shape):
    compare_with_torch(Linear(7, 6, bias, rung=step, dtype=torch.float64), random(*shape))


def hold_to_the_bound(c, a, b, added=None):
    """Fail unless c is a b + added, but for rung 8's rounding of float32 factors, its sums and c's dtype."""
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    factors = S8.factors if c.dtype == torch.float32 else 0.0
    most = product_checks.error_bound(a.shape[1], "float16", "float32", factors=factors) * sizes
    added = torch.zeros(c.shape[1]) if added is None else added
    most += torch.finfo(c.dtype).eps * (exact.abs() + most + added.double().abs())
    assert ((c.double() - exact - added.double()).abs() <= most).all()


def check_bounded(step, dtype, x_shape, outs, bias=True, seed=0):
    """Check the output and all gradients of a layer on `step` against the bound of rung 8."""
    torch.manual_seed(seed)
    layer = Linear(x_shape[-1], outs, bias, rung=step, dtype=dtype)
    x = torch.randn(x_shape, dtype=dtype, requires_grad=True)
    y = layer(x)
    g = torch.randn_like(y)
    y.backward(g)
    assert y.shape == (*x_shape[:-1], outs)
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    w, (xs, ys, gs, x_grads) = (
        layer.weight,
        (t.flatten(0, -2) if t.ndim > 1 else t[None] for t in (x, y, g, x.grad)),
    )
    hold_to_the_bound(ys, xs, w.T, layer.bias)
    hold_to_the_bound(x_grads, gs, w)
    hold_to_the_bound(w.grad, gs.T, xs)
    if bias:
        torch.testing.assert_close(layer.bias.grad, gs.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_on_the_matrix_unit_stays_within_its_bound(dtype, bias):
    skip_unless_it_runs(S8)
    for shape in [(7,), (5, 7), (2, 3, 7), (2, 0, 7), (0, 7), (2, 1, 3, 7), (70, 33)]:
        check_bounded(S8, dtype, shape, 6, bias)


def six_bits(x):
    return (x.view(np.uint32) & np.uint32(0xFFFC_0000)).view(np.float32)


@pytest.mark.parametrize("fault", ["one element", "six bits"])
def test_coarser_products_are_out_of_the_bound(fault):
    def compute(a, b, out):
        if fault == "six bits":
            a, b = six_bits(np.ascontiguousarray(a)), six_bits(np.ascontiguousarray(b))
        S4.compute(a, b, out)
        out[-1, -1] += 0.5 * (fault == "one element")

    check_bounded(S4, torch.float32, (5, 7), 6)
    with pytest.raises(AssertionError):
        check_bounded(dataclasses.replace(S4, name="s0_coarse", compute=compute), torch.float32, (5, 7), 6)


def test_linear_is_copied_pickled_saved_and_shown():
    layer = Linear(4, 3, bias=False, rung=S4)
    x = torch.randn(2, 4)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
    assert list(layer.state_dict()) == ["weight"]
    assert repr(layer) == "Linear(4, 3, bias=False, rung=s4_loop_order)"


def test_forward_and_both_gradients_run_on_the_rung_without_a_copy():
    counting = Counting()
    layer = Linear(4, 3, rung=counting.rung)
    x = torch.randn(5, 4, requires_grad=True)
    y = layer(x)
    g = torch.randn(5, 3)
    y.backward(g)

    weight = layer.weight.detach().numpy()
    assert [out.shape for _, _, out in counting.calls] == [(5, 3), (5, 4), (3, 4)]
    (x_seen, w_seen, _), (g_seen, w_again, _), (g_transposed, x_again, _) = counting.calls
    for seen, source in [(x_seen, x.detach().numpy()), (w_again, weight), (x_again, x.detach().numpy())]:
        assert seen.ctypes.data == source.ctypes.data
        assert seen.strides == source.strides
    assert w_seen.ctypes.data == weight.ctypes.data
    assert w_seen.strides == weight.T.strides
    assert g_transposed.ctypes.data == g_seen.ctypes.data
    assert g_transposed.strides == g_seen.T.strides
    assert layer.weight.grad.stride() == layer.weight.stride()


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "shapes"),
    [
        (True, True, [(2, 3), (2, 4), (4, 3)]),
        (True, False, [(2, 3), (2, 4)]),
        (False, True, [(2, 3), (4, 3)]),
        (False, False, [(2, 3)]),
    ],
)
def test_a_gradient_that_nobody_asked_for_is_not_computed(x_grad, w_grad, shapes):
    counting = Counting()
    y = matmul(random(2, 4, grad=x_grad), random(4, 3, grad=w_grad), counting.rung)
    assert y.requires_grad == (x_grad or w_grad)
    if y.requires_grad:
        y.sum().backward()  # an expanded gradient: strides of 0
    assert [out.shape for _, _, out in counting.calls] == shapes


def test_a_gradient_of_a_gradient_is_refused():
    x, w = random(2, 3), random(3, 2)
    for loss in (matmul(x, w, S4).square().sum(), matmul(x, w, S4).sum()):
        with pytest.raises(NotImplementedError, match="a product on a rung has none; leave the rung out"):
            torch.autograd.grad(loss, x, create_graph=True)


def learned(linear, precision):
    """On a rank: the digits' accuracy after six rounds through the rows, and the dtypes of weights."""
    data = digits()
    x, y = data.train[:]
    layout = md.Layout(**({"precision": precision} if precision else {}))
    engine = md.prepare(MLP((64, 128, 10), linear=linear), partial(torch.optim.AdamW, lr=3e-3), layout)
    for epoch in range(6):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(128):
            engine.step(x[rows], y[rows])
    inputs, targets = data.test[:]
    weight = next(engine.model.parameters())
    masters = {p.dtype for group in engine.optimizer.param_groups for p in group["params"]}
    outputs = engine.model(inputs.to(weight.dtype))
    return accuracy(outputs, targets).item(), weight.dtype, masters


def test_the_digits_are_learned_in_bf16_as_well_as_in_float32(cluster_of):
    """Rounded on the rung, and with bf16 copies of float32 masters; both within half a point."""
    skip_unless_it_runs(S8)
    run = partial(cluster_of(1).run, learned)
    ((exact, *_),) = run(nn.Linear, None)
    assert exact > 0.93
    for precision, dtype in ((None, torch.float32), ("bf16", torch.bfloat16)):
        ((found, *dtypes),) = run(partial(Linear, rung=S8.name), precision)
        assert found >= exact - 0.005
        assert dtypes == [dtype, {torch.float32}]


test_wrong_arguments_are_named_with_their_values = refuses(
    lambda given: matmul(*given, S4),
    ((torch.ones(2, 3), torch.ones(4, 5)), ["(2, 3)", "(4, 5)", "do not multiply"]),
    ((torch.ones(2, 3), torch.ones(3)), ["(2, 3)", "(3,)"]),
    ((torch.tensor(1.0), torch.ones(1, 1)), ["shape ()"]),
    ((torch.ones(2, 3), torch.ones(3, 2).double()), TypeError, ["float32", "float64"]),
    ((torch.ones(2, 3).bfloat16(), torch.ones(3, 2)), TypeError, ["x has dtype bfloat16", "s4_loop_order"]),
    ((torch.ones(2, 3), torch.ones(3, 2).long()), TypeError, ["w has dtype int64", "float32 or float64"]),
    ((np.ones((2, 3)), torch.ones(3, 2)), TypeError, ["x is a ndarray", "torch.as_tensor"]),
    (
        (torch.ones(2, 3, device="meta"), torch.ones(3, 2)),
        ["x is on meta", "s4_loop_order runs on cpu", ".to('cpu')"],
    ),
    literal=True,
)


@pytest.mark.parametrize(
    "step",
    # From rung 6 on they are compiled for three products, for seconds. Rungs 7 and 8 take operands as 6 does.
    [
        pytest.param(step, id=step.name, marks=[pytest.mark.deep] if step.number > 5 else [])
        for step in CUDA_LADDER
        if step.number not in (7, 8)
    ],
)
def test_a_layer_on_the_cuda_ladder_takes_tensors_in_main_memory_too(step):
    name = step.dtypes[0]
    dtype = getattr(torch, name)
    layer = Linear(7, 6, rung=step, dtype=dtype)
    x = torch.randn(3, 5, 7, dtype=dtype, requires_grad=True)
    y = layer(x)
    g = torch.randn_like(y)
    y.backward(g)
    theirs, x_theirs = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    expected = nn.functional.linear(x_theirs, theirs.weight, theirs.bias)
    theirs.zero_grad()
    expected.backward(g.double())
    # Sums of up to 15 products of order 1, rounded to the dtype; TF32 keeps 11 bits of its factors.
    exact = torch.finfo(torch.bfloat16 if step.tf32 and name == "float32" else dtype).eps
    for ours, other in [(y, expected), (x.grad, x_theirs.grad), (layer.weight.grad, theirs.weight.grad)]:
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), other, rtol=0, atol=30 * exact)


def test_a_layer_takes_a_rung_by_name():
    named, given = (
        Linear(3, 2, rung=rung, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        for rung in ("s4_loop_order", S4)
    )
    x = random(5, 3)
    assert named.rung is S4
    torch.testing.assert_close(named(x), given(x), rtol=0, atol=0)
    assert Linear(3, 2, rung="s7").rung.name == "s7_threads"


test_linear_refuses_negative_sizes_and_what_is_no_rung = refuses(
    lambda given: Linear(given[0], 2, **given[1]),
    ((-1, {"rung": S4}), "in_features is -1"),
    ((1, {}), TypeError, "rung"),
    ((3, {"rung": "s4_lop_order"}), r"unknown rung 's4_lop_order': did you mean s4_loop_order\?"),
    ((3, {"rung": 4}), TypeError, "rung is 4; give a rung or its name"),
)
