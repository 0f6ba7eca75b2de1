"""Several sets of parameters in one model: each with its row of the table, and with ranks of its own.

Four ranks train a model with two experts. A pair of ranks has one of them, whose gradients only that pair
averages; all ranks average the rest. One process has both experts. A row says in its last number which
expert it goes to, so no rows have to travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.comm.mesh import Mesh
from minidist.comm.work import Group
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.residency import ROWS
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.engine.partition_model import partition_model
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.buckets import GradientComm
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.sharding.sets import equal_start
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.share_model import share_model
from minidist.parallel.sharding.whole import dealing
from minidist.parallel.training.precision import Precision
from tests.helpers.contract import ADAMW, TOLERANCE

Clusters = Callable[[int], md.Cluster]
RANKS, F64, CLIP = 4, 8, 0.3
ROWS_OF_RANKS = (3, 1, 2, 4)  # of a batch; with two micro-batches, one rank has a single row


class WithExperts(nn.Module):
    """Layers that all rows go through, and of the experts `numbers` the one that a row names."""

    def __init__(self, numbers: tuple[int, ...], seed: int, seed_of_experts: int) -> None:
        super().__init__()

        def layer(ins: int, outs: int, *seeds: int) -> nn.Module:
            torch.manual_seed(hash(seeds))
            return nn.Linear(ins, outs).double()

        self.first, self.last = layer(6, 5, seed, 1), layer(7, 3, seed, 2)
        self.experts = nn.ModuleDict({str(n): layer(5, 7, seed_of_experts, 3, n) for n in numbers})

    def forward(self, x: Tensor) -> Any:
        hidden, out = torch.tanh(self.first(x)), x.new_zeros(len(x), 7)
        for number, expert in self.experts.items():
            mine = (x[:, -1] == float(number)).nonzero()[:, 0]
            out = out.index_add(0, mine, torch.tanh(expert(hidden[mine])))
        return self.last(out)


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Three global batches: each rank's rows, which all go to its pair's expert."""
    generator, found = torch.Generator().manual_seed(7), []
    for step in range(3):
        of_ranks = []
        for rank, count in enumerate(ROWS_OF_RANKS):
            x = torch.randn(count + step, 6, generator=generator, dtype=torch.float64)
            x[:, -1] = rank // 2
            of_ranks.append((x, torch.randint(0, 3, (count + step,), generator=generator)))
        found.append(of_ranks)
    return found


@dataclass
class Run:
    """What a training gave: of each step the loss, the norm, and the gradients; and how it ended."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]


def in_one_process() -> Run:
    model = WithExperts((0, 1), 0, 0)
    optimizer, run = ADAMW(model.parameters()), Run([], [], [], {})
    for of_ranks in batches():
        inputs, targets = (torch.cat(each) for each in zip(*of_ranks, strict=True))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        run.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        run.norms.append(float(norm))
        optimizer.step()
        run.losses.append(float(loss.detach()))
    for name, parameter in model.named_parameters():
        run.state[f"model.{name}"] = parameter.detach()
        state = optimizer.state[parameter]
        run.state |= {f"optimizer.{name}.{key}": state[key].double() for key in state}
    return run


def the_pair() -> Group:
    return Mesh(dp=RANKS).blocks("dp", 2)[0]


def engine_of(
    rows: tuple[int, int],
    micro_batches: int = 1,
    group: Callable[[], Group] = the_pair,
    clip: float | None = CLIP,
) -> Engine:
    """An engine with a row for the dense parameters, and one for this rank's expert over `group`."""
    layout = md.Layout(dp=RANKS, micro_batches=micro_batches)
    pair, second = divmod(md.rank(), 2)
    model = WithExperts((pair,), md.rank(), second)  # the first rank's values have to reach the others
    part = partition_model(model, layout, Mesh(dp=RANKS))
    experts = {name for name, _ in model.named_parameters() if name.startswith("experts.")}
    own = ParameterSet(ROWS[rows[1]], GradientComm(group()), experts)
    options = {"bucket_mb": 0.0003} if ROWS[rows[0]].parameters else {}
    strategy = share_model(model, ADAMW, ROWS[rows[0]], options, None, GradientComm(None), [own])
    return Engine(part, strategy, layout, cross_entropy, Precision("fp32"), clip)


def keep(gradients: list[list[TensorBox]], engine: Engine) -> None:
    gradients.append(boxes_of(engine.strategy.gradient_boxes()))


def boxes_of(boxes: Any) -> list[TensorBox]:
    return [box._replace(tensor=box.tensor.detach().clone()) for box in boxes]


def train(
    rows: tuple[int, int],
    micro_batches: int = 1,
    resume: bool = False,
    fault: Callable[[pytest.MonkeyPatch], None] = lambda _: None,
    group: Callable[[], Group] = the_pair,
) -> tuple[list[float], list[float], list[list[TensorBox]], list[TensorBox]]:
    """Losses and norms; boxes of the gradients in each step, and of the state after the last."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        engine = engine_of(rows, micro_batches, group)
        losses, norms, gradients = [], [], []
        for number, of_ranks in enumerate(batches()):
            if resume and number == 2:
                engine = resumed(engine, engine_of(rows, micro_batches, group))
            engine.before_update = partial(keep, gradients, engine)
            losses.append(engine.step(*of_ranks[md.rank()]))
            norms.append(engine.grad_norm)
        return losses, norms, gradients, boxes_of(engine.strategy.state_boxes())


def resumed(engine: Engine, other: Engine) -> Engine:
    """Another engine with the state of this one, as this rank would load it from its own boxes."""
    own, strategy = boxes_of(engine.strategy.state_boxes()), other.strategy
    kinds: dict[str, dict[str, Any]] = {}
    for box in own:
        kind, _, rest = box.name.partition(".")
        name, _, key = rest.rpartition(".")
        if kind == "optimizer":
            kinds.setdefault(name, {})[key] = box.shape, box.tensor.dtype
    strategy.load_settings(engine.strategy.settings(), kinds)
    with torch.no_grad():
        for old, new in zip(own, strategy.state_boxes(), strict=True):
            assert old[:3] == new[:3]
            new.tensor.copy_(old.tensor)
    strategy.loaded()
    other.load_settings(engine.settings())
    return other


def joined(of_ranks: list[list[TensorBox]]) -> dict[str, Tensor]:
    """Whole tensors from the boxes of all ranks; NaN where no rank has a box, or two differ."""
    whole: dict[str, Tensor] = {}
    for box in (box for boxes in of_ranks for box in boxes):
        into = whole.setdefault(box.name, torch.full(box.shape, torch.nan, dtype=torch.float64))
        place = narrowed(into, box.offsets, box.tensor.shape)
        is_same = place.isnan() | ((place - box.tensor).abs() < TOLERANCE)
        place.copy_(torch.where(is_same, box.tensor, torch.nan))
    return whole


def compare(found: list[Any]) -> None:
    """Fail where losses, gradients, norms, weights or moments differ from one process's."""
    expected, same = in_one_process(), partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)
    for losses, norms, _, _ in found:
        same(losses, expected.losses)
        same(norms, expected.norms)
    for step, wanted in enumerate(expected.gradients):
        gradients = joined([each[2][step] for each in found])
        same(gradients, {f"gradient.{name}": gradient for name, gradient in wanted.items()})
    same(joined([each[3] for each in found]), expected.state)


BOTH = [(2, 1), (0, 0), (0, 2), (1, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("rows", BOTH, ids=str)
def test_two_sets_equal_one_process(cluster_of: Clusters, rows: tuple[int, int]) -> None:
    for micro_batches in (1, 2):
        compare(cluster_of(RANKS).run(train, rows, micro_batches))


@pytest.mark.parametrize("rows", [(2, 1), (0, 2), (3, 3)], ids=str)
def test_the_state_of_two_sets_is_saved_and_loaded(cluster_of: Clusters, rows: tuple[int, int]) -> None:
    compare(cluster_of(RANKS).run(train, rows, resume=True))


def step_of(rows: tuple[int, int]) -> tuple[int, int, md.Memory, int, int]:
    """Bytes that a step sends, and by the formula; memory; and elements of the two sets."""
    engine, batch = engine_of(rows, clip=None), batches()[0][md.rank()]
    engine.step(*batch)  # the ranks agree on the buckets
    with comm.ledger() as ledger:
        engine.step(*batch)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (engine.model, engine.model.experts)]
    return ledger.bytes_sent, engine.strategy.bytes_per_step(), engine.memory(), sizes[0] - sizes[1], sizes[1]


@pytest.mark.parametrize("rows", [(2, 1), (0, 0), (0, 2), (1, 0)], ids=str)
def test_each_set_sends_and_keeps_what_its_row_says(cluster_of: Clusters, rows: tuple[int, int]) -> None:
    found, (dense_row, expert_row) = cluster_of(RANKS).run(step_of, rows), (ROWS[row] for row in rows)
    padding = 20 * F64  # of some small buckets
    for sent, formula, memory, dense, expert in found:
        assert sent == formula
        told = dense_row.bytes_sent(F64 * dense, RANKS) + expert_row.bytes_sent(F64 * expert, 2)
        counts = 2 * F64 * (4 + 3) + 2 * F64 * (2 + 3)  # who used which parameter, and totals
        assert told <= sent <= told + counts + 2 * padding
        assert memory.parameters <= F64 * (dense + expert) + padding
    *_, dense, expert = found[0]
    copies = (RANKS if dense_row.state else 1), (RANKS if expert_row.state else 2)  # two pairs
    state = 2 * F64 * (copies[0] * dense + copies[1] * expert)
    steps = 4 * 6 * RANKS  # a number for each of up to 6 slices
    assert state <= sum(memory.optimizer for _, _, memory, _, _ in found) <= state + steps


# Planted faults.


def no_checks(patch: pytest.MonkeyPatch) -> None:
    for module in (dealing, equal_start):
        patch.setattr(module, "require_same", lambda *_: None)


def everyone_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParameterSet, "counts_here", True)


def the_other_pair() -> Group:
    return Mesh(dp=RANKS).blocks("dp", 2)[1]


@pytest.mark.parametrize("group", [the_other_pair, lambda: None], ids=["across", "all"])
def test_a_set_over_the_wrong_ranks_is_refused(cluster_of: Clusters, group: Callable[[], Group]) -> None:
    with pytest.raises(md.RankError, match=r"parameters and buffers of rank .* in the group differ"):
        cluster_of(RANKS).run(train, (2, 1), group=group)


FAULTS = {
    "averaged across": ((2, 1), no_checks, the_other_pair),
    "averaged over all": ((2, 1), no_checks, lambda: None),
    "averaged across, whole": ((0, 0), no_checks, the_other_pair),
    "a norm with copies": ((0, 0), everyone_counts, the_pair),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(cluster_of: Clusters, name: str) -> None:
    rows, fault, group = FAULTS[name]
    with pytest.raises(AssertionError, match="not close"):
        compare(cluster_of(RANKS).run(train, rows, fault=fault, group=group))


def test_sets_are_whole_together_or_not_at_all(cluster_of: Clusters) -> None:
    with pytest.raises(md.RankError, match="either all sets of parameters are whole between steps, or none"):
        cluster_of(RANKS).run(train, (3, 1))
