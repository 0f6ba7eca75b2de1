"""Tensor and sequence parallelism: the weights of one process, the bytes of the formula, every refusal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from minidist import comm
from minidist.model.loss import cross_entropy
from minidist.parallel.tensor_parallel import operators, vocabulary
from minidist.parallel.tensor_parallel import sequence_parallel as sequence_parts
from minidist.parallel.tensor_parallel.cuts import Cut, cuts
from minidist.parallel.tensor_parallel.plans import plan_for
from minidist.parallel.tensor_parallel.replace_layers import parallelize
from minidist.parallel.tensor_parallel.vocabulary import (
    vocab_parallel_cross_entropy,
    vocabulary_of,
)
from minidist.parallel.training.activation_memory import ActivationCounter
from tests.conftest import Clusters
from tests.helpers import contract, models
from tests.helpers.contract import Fault, instead_of, patched
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses
from tests.helpers.step_bytes import bytes_per_pass

VOCABULARY, TOKENS = 11, 12
"""An odd vocabulary; a length that 2, 3 and 4 ranks divide, as sequence parallelism needs it."""
gpt = partial(models.gpt, context=TOKENS, heads=4)
mlp = partial(models.mlp, sizes=(6, 5, 4))
tokens = partial(models.tokens, length=TOKENS)
vectors = partial(models.vectors, classes=4)


class Grouped(nn.Module):
    """Attention whose keys and values have half as many heads as its queries; no biases."""

    def __init__(self, heads: int = 8, groups: int = 4, head_dim: int = 2) -> None:
        super().__init__()
        self.head_dim = head_dim
        width = heads * head_dim
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * head_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Own(nn.Module):
    """A user's model: an embedding, attention with grouped queries, an MLP with ragged sizes, a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.norm, self.attention = nn.RMSNorm(16), Grouped()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 7), nn.Linear(7, 16), nn.Linear(16, VOCABULARY)
        self.fc3.weight.requires_grad_(False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.attention(self.norm(x))
        return self.fc3(x + self.fc2(functional.gelu(self.fc1(x))))


class Flat(nn.Module):
    """All maps of a block in one module, with a hidden size that is no multiple of its heads' size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head_size = 2
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)
        self.last = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # (B, 6), one token each
        heads = (part(x).unflatten(-1, (-1, self.head_size))[:, :, None] for part in (self.q, self.k, self.v))
        x = x + self.o(functional.scaled_dot_product_attention(*heads).flatten(1))
        return self.last(x + self.down(functional.silu(self.gate(x)) * self.up(x)))


FLAT_PLAN = {"q|k|v": "column", "o": "row", "gate|up": "column", "down": "row"}
OWN_PLAN = {
    "table": "vocabulary",
    "norm": "sequence",
    "attention.q|k|v": "column",
    "attention.out": "row",
    "fc1": "column",
    "fc2": "row",
    "fc3": "column_gathered",
}


BATCHES = (4, 1, 3)
CASES = {
    "gpt": contract.Case(gpt, tokens, batches=BATCHES),
    "gpt not tied": contract.Case(partial(gpt, tied=False), tokens, batches=BATCHES),
    "mlp": contract.Case(mlp, vectors, batches=BATCHES),
    "mlp of three": contract.Case(partial(mlp, sizes=(6, 5, 7, 4)), vectors, batches=BATCHES),
    "own": contract.Case(Own, tokens, batches=BATCHES),
    "flat": contract.Case(Flat, vectors, batches=BATCHES),
}
PLANS = {"own": OWN_PLAN, "flat": FLAT_PLAN}


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of outputs that may be a part of the logits."""
    outputs, whole = model(inputs), vocabulary_of(model)
    if whole is None:
        return cross_entropy(outputs, targets)
    return vocab_parallel_cross_entropy(outputs, targets, vocabulary=whole)


def train(case: contract.Case, plan: Any, **options: Any) -> tuple[contract.Trained, dict[str, Cut]]:
    """In a loop of one's own, each rank from weights of its own."""
    model = case.model(md.rank())
    parallelize(model, plan or plan_for(model), **options)
    return run(model, case), cuts(model)


def run(model: nn.Module, case: contract.Case) -> contract.Trained:
    optimizer = case.optimizer(model.parameters())
    losses = []
    for inputs, targets in case.global_batches():
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return contract.Trained(losses, {name: p.detach().clone() for name, p in model.state_dict().items()})


def assemble(trained: list[tuple[contract.Trained, dict[str, Cut]]]) -> contract.Trained:
    """The whole tensors from the boxes, which have to cover each once; the rest is equal to the bit."""
    (first, cut), *others = trained
    state = {}
    for name, part in first.state.items():
        if name not in cut:
            assert all(torch.equal(other.state[name], part) for other, _ in others), name
            state[name] = part
            continue
        whole = part.new_full(cut[name].shape, torch.nan)
        for rank, boxes in trained:
            box = boxes[name]
            place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            assert whole[place].isnan().all()
            assert rank.state[name].shape == box.sizes
            whole[place] = rank.state[name]
        state[name] = whole
    assert all(other.losses == first.losses for other, _ in others)
    return contract.Trained(first.losses, state)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, ranks) for name in CASES for ranks in (2, 3)), ("gpt", 1), ("gpt", 4)],
)
def test_every_parameter_equals_one_process(cluster_of: Clusters, name: str, ranks: int) -> None:
    trained = cluster_of(ranks).run(train, CASES[name], PLANS.get(name))
    contract.compare(assemble(trained), contract.train_in_one_process(CASES[name]))


@pytest.mark.parametrize(
    ("name", "ranks"), [("gpt", 1), ("gpt", 2), ("gpt", 4), ("gpt not tied", 3), ("own", 2), ("own", 3)]
)
def test_a_share_of_the_sequence_changes_nothing(cluster_of: Clusters, name: str, ranks: int) -> None:
    trained = cluster_of(ranks).run(train, CASES[name], PLANS.get(name), sequence_parallel=True)
    contract.compare(assemble(trained), contract.train_in_one_process(CASES[name]))


@instead_of(operators, "_pair")
def without_the_positions(pair: Any, x: Tensor, forward: Any, backward: Any) -> Any:
    if backward.__qualname__.startswith("split_to_ranks"):
        return pair(x, forward, lambda grad: torch.cat([grad] * md.size(), dim=-2))
    return pair(x, forward, backward)


@instead_of(vocabulary, "_localise")
def with_the_neighbours_tokens(localise: Any, targets: Tensor, own: range) -> Any:
    return localise(targets, range(own.start + 1, own.stop + 1))


FAULTS = {
    "no norms": patched(sequence_parts, "copy_all_to_ranks", lambda tensors, group: tensors),
    "no positions": without_the_positions,
    "the neighbour's tokens": with_the_neighbours_tokens,
    "not the first weights": patched(comm, "broadcast", lambda x, **_: x),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(cluster_of: Clusters, fault: Fault) -> None:
    wrong = partial(train, CASES["gpt"], None, sequence_parallel=True)
    trained = cluster_of(2).run(contract.with_fault, fault, wrong)
    with pytest.raises(AssertionError):
        contract.compare(assemble(trained), contract.train_in_one_process(CASES["gpt"]))


@on_ranks(1, 2, 3, sequence_parallel=[False, True])
def test_a_pass_sends_what_the_formula_says(sequence_parallel: bool) -> None:
    model = gpt(0)
    parallelize(model, plan_for(model), sequence_parallel=sequence_parallel)
    inputs, targets = tokens(torch.Generator().manual_seed(0), 3)
    with comm.ledger() as ledger:
        loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    predicted = bytes_per_pass(model.config, 3, TOKENS, md.size(), sequence_parallel, 8)  # type: ignore[arg-type]
    assert ledger.bytes_sent == predicted
    if not sequence_parallel:  # four in each of two blocks; the table, the loss, the head
        forward, backward = ["all_reduce"] * 5, ["all_reduce"] * 5
        assert [call.name for call in ledger.calls] == [*forward, "all_gather", *backward]
        stream, ranks = 3 * TOKENS * 8 * 8, md.size()
        sums, gather = 10 * (2 * (ranks - 1) * stream // ranks), (ranks - 1) * 3 * 3 * TOKENS * 8
        assert ledger.bytes_sent == sums + gather


test_a_plan_that_does_not_fit_is_refused = refuses(
    lambda given: parallelize(gpt(0), given()),
    (lambda: {"layers.*.mlp.upp": "column"}, r"did you mean 'layers.\*.mlp.up'"),
    (lambda: {"layers.*.mlp.up": "columns"}, "unknown style 'columns': did you mean 'column'"),
    (
        lambda: {"layers.1.mlp.up": "column", "layers.*.mlp.up": "row"},
        "layers.1.mlp.up has two styles in the plan, 'column' and 'row'; give it one",
    ),
    (lambda: {"layers.0.token": "vocabulary"}, "are one parameter, and the plan does not cut both alike"),
    (lambda: {"layers.*.mlp.up|down": "row"}, r"names joined by \| read one input"),
    (lambda: {"layers.*.mlp_norm": "column"}, TypeError, "a LayerNorm cannot be cut between ranks"),
    (
        lambda: {"layers.0.position": "row"},
        TypeError,
        "an? Embedding cannot be cut between ranks; give a torch.nn.Linear",
    ),
)


def test_a_forgotten_part_is_refused_under_sequence_parallelism() -> None:
    plan = {name: style for name, style in plan_for(gpt(0)).items() if name != "layers.*.mlp_norm"}
    parallelize(gpt(0), plan)
    with pytest.raises(ValueError, match=r"the plan does not name layers\.1\.mlp_norm"):
        parallelize(gpt(0), plan, sequence_parallel=True)
    with pytest.raises(ValueError, match="sequence_parallel needs input_is_parallel"):
        md.RowParallelLinear(4, 4, input_is_parallel=False, sequence_parallel=True)
    with pytest.raises(ValueError, match="no part of the plan has style 'sequence'"):
        parallelize(mlp(0), plan_for(mlp(0)), sequence_parallel=True)


def test_models_without_a_plan_and_maps_that_are_not_torchs_are_refused() -> None:
    with pytest.raises(TypeError, match="no plan is known for a Linear; give one"):
        plan_for(nn.Linear(2, 2))
    model = mlp(0)
    parallelize(model, plan_for(model))
    with pytest.raises(TypeError, match=r"layers.0.linear is cut already; call parallelize once"):
        parallelize(model, plan_for(model))
    sparse = nn.Sequential(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(ValueError, match="0 with style 'vocabulary': an Embedding with sparse cannot be cut"):
        parallelize(sparse, {"0": "vocabulary"})


@on_ranks(3)
def test_sizes_that_cannot_be_shared_are_refused() -> None:
    part = nn.ModuleDict({"attention": Grouped(heads=9, groups=6)})
    with pytest.raises(ValueError, match=r"attention\.q has size 18, .* not a multiple of 6 heads of 2"):
        parallelize(part, {"attention.q|k|v": "column", "attention.out": "row"})
    with pytest.raises(ValueError, match=r"layers.1.attention has 2 heads .* 3 .* use at most 2"):
        parallelize(gpt(0, heads=2), plan_for(gpt(0)))
    with pytest.raises(ValueError, match=r"layers.0.linear: .* size 2: 2 cannot be shared by 3"):
        parallelize(mlp(0, sizes=(6, 2, 4)), plan_for(mlp(0)))


@on_ranks(2)
def test_a_computed_weight_is_cut() -> None:
    torch.manual_seed(0)
    linear, x = nn.utils.weight_norm(nn.Linear(4, 6)), torch.ones(2, 4)
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    layers = [(one, md.ColumnParallelLinear.from_linear(one, True)) for one in (linear, parametrized)]
    for one, layer in layers:
        torch.testing.assert_close(layer(x), one(x))


@on_ranks(2)
def test_targets_and_tokens_are_checked() -> None:
    logits, targets = torch.randn(4, 3 - md.rank()), torch.zeros(4, dtype=torch.int64)
    vocab_parallel_cross_entropy(logits[:, : 2 + md.rank()][:, :2], targets, vocabulary=4)
    with pytest.raises(ValueError, match="a vocabulary of 6, of which this rank has 3"):
        vocab_parallel_cross_entropy(logits[:, :2], targets, vocabulary=6)
    with pytest.raises(ValueError, match="the mean loss of an empty batch is undefined"):
        vocab_parallel_cross_entropy(logits[:0, :2], targets[:0], vocabulary=4)
    with pytest.raises(TypeError, match=r"targets are torch.float32; give class numbers"):
        vocab_parallel_cross_entropy(logits[:, :2], targets.float(), vocabulary=4)
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="the vocabulary has 4; give 0 to 3"):
            vocab_parallel_cross_entropy(logits[:, :2], targets + wrong, vocabulary=4)
    with pytest.raises(IndexError, match="the vocabulary has 5; give 0 to 4"):
        md.VocabParallelEmbedding(5, 2)(torch.tensor([5]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_is_that_of_whole_logits(cluster_of: Clusters, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (20 * torch.randn(5, 2, VOCABULARY, generator=generator)).to(dtype)
    logits[0, 0, :6] = -torch.inf  # all that the first of two ranks has
    logits[1, 1] += 300  # exponentials that overflow
    targets = torch.randint(6, VOCABULARY, (5, 2), generator=generator)

    def compute() -> tuple[Tensor, Tensor]:
        start, stop = (VOCABULARY * (md.rank() + i) // md.size() for i in (0, 1))
        local = logits[..., start:stop].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(local, targets)  # the ranks tell each other their sizes
        (3 * loss).backward()  # type: ignore[no-untyped-call]
        assert local.grad is not None
        return loss.detach(), local.grad

    whole = logits.clone().requires_grad_()
    expected = cross_entropy(whole, targets)
    (3 * expected).backward()  # type: ignore[no-untyped-call]
    for ranks in (2, 3):
        results = cluster_of(ranks).run(compute)
        for loss, _ in results:
            torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(torch.cat([grad for _, grad in results], dim=-1), whole.grad)


def test_all_activations_between_and_inside_are_shared_with_the_sequence(cluster_of: Clusters) -> None:
    """Korthikanti et al. 2022, section 4.2.2: every activation of a block becomes its n-th part."""

    def kept(sequence_parallel: bool | None) -> int:
        model = gpt(0)
        if sequence_parallel is not None:
            parallelize(model, plan_for(model), sequence_parallel=sequence_parallel)
        own = 1 if not sequence_parallel else md.size()
        block: Any = model.layers[1]  # type: ignore[index]
        x = torch.ones(2, TOKENS // own, 8, dtype=torch.float64, requires_grad=True)
        with ActivationCounter(model) as counter:
            block(x)
        return counter.peak

    one, (with_copies, _), (shared, _) = (
        kept(None),
        cluster_of(2).run(kept, False),
        cluster_of(2).run(kept, True),
    )
    assert 2 * shared == one
    assert shared < with_copies < one
