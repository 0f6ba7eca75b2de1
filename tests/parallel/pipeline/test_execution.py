"""Pipelines: for every schedule one process's gradients, the bytes, what is live, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.model.loss import accuracy, cross_entropy
from minidist.parallel import schedules
from minidist.parallel.contract.schedule_kinds import SCHEDULES, round_robin
from minidist.parallel.layerwise.layer_by_layer import cut
from minidist.parallel.pipeline import execution as pipelines
from minidist.parallel.pipeline.execution import Pipeline
from minidist.parallel.pipeline.schedule_run import ScheduleRun
from minidist.parallel.pipeline.split_backward import SplitBackward
from minidist.parallel.schedules.instructions import Instruction
from tests.conftest import Clusters
from tests.helpers.contract import Fault, instead_of, nothing, patched, with_fault
from tests.helpers.models import Calls, gpt, tokens
from tests.helpers.on_ranks import on_ranks

Gradients = dict[str, Tensor]
ROWS = (8, 3, 1, 13)  # ragged, and fewer than there are micro-batches
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
"""Float64: sums in another order."""


def own_stages(model: nn.Module, chunks: int = 1, schedule: Any = "1f1b") -> list[nn.Module]:
    """This rank's chunks of a model's layers, where a schedule places them."""
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    place = SCHEDULES[schedule].placement if isinstance(schedule, str) else round_robin
    parts = cut(layers, md.size() * chunks)
    own = place(md.size(), chunks).stages[md.rank()]
    return [nn.Sequential(*(layers[i] for i in parts[stage])) for stage in own]


def untie(model: nn.Module) -> nn.Parameter | None:
    """This rank's copy of a GPT's token table, the last rank's a copy with other values to begin with."""
    layers: Any = model.layers
    table = layers[0].token.weight
    if md.rank() == md.size() - 1 > 0:
        table = layers[-1].output.weight = nn.Parameter(table.detach() * 2)
    return table if md.rank() in (0, md.size() - 1) else None


def train_here(
    schedule: Any, chunks: int, micro_batches: int | None, rows: Sequence[int] = ROWS
) -> list[tuple[float, float, float, Gradients]]:
    """On a rank: for each batch the loss twice, the accuracy, and the gradients by their global names."""
    model = gpt(layers=6)
    pipeline = Pipeline(own_stages(model, chunks, schedule), schedule, micro_batches, tied=[untie(model)])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = [parameter for stage in pipeline.stages for parameter in stage.parameters()]
    generator = torch.Generator().manual_seed(3)
    found = []
    for count in rows:
        inputs, targets = tokens(generator, count)
        model.zero_grad()
        losses = pipeline.step(inputs, targets), pipeline.evaluate(inputs, targets)
        right = pipeline.evaluate(inputs, targets, accuracy)
        found.append((*losses, right, {names[id(p)]: p.grad.clone() for p in own if p.grad is not None}))
    return found


@cache
def in_one_process(rows: Sequence[int]) -> list[tuple[float, float, Gradients]]:
    """For each batch the loss, the accuracy, and the gradients."""
    model = gpt(layers=6)
    generator = torch.Generator().manual_seed(3)
    found = []
    for count in rows:
        inputs, targets = tokens(generator, count)
        model.zero_grad()
        outputs = model(inputs)
        loss = cross_entropy(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss.item(), float(accuracy(outputs, targets)), gradients))
    return found


def check(results: Sequence[Any], rows: Sequence[int] = ROWS) -> None:
    """Fail where ranks differ from one process, or copies of the tied table by a bit."""
    for batch, (loss, right, expected) in enumerate(in_one_process(rows)):
        seen: Gradients = {}
        for found in results:
            torch.testing.assert_close([*found[batch][:3]], [loss, loss, right], **EXACT)
            for name, gradient in found[batch][3].items():
                name = "layers.0.token.weight" if name == "layers.7.output.weight" else name
                torch.testing.assert_close(
                    gradient, expected[name], **EXACT, msg=lambda m, n=name: f"{n}: {m}"
                )
                assert torch.equal(seen.setdefault(name, gradient), gradient)
        assert seen.keys() == expected.keys()


def run(cluster_of: Clusters, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function returns on each rank; here where there is one."""
    return cluster_of(ranks).run(function, *args) if ranks > 1 else [function(*args)]


FORMS = {name: (name, kind.least_chunks) for name, kind in SCHEDULES.items()}
FORMS["gpipe of 2 chunks"] = ("gpipe", 2)  # which no layout has


# On 2 ranks: below, where calls are checked.
@pytest.mark.parametrize(
    ("form", "ranks"),
    [*((form, ranks) for form in FORMS for ranks in (1, 3)), ("interleaved", 4), ("zero_bubble", 4)],
)
def test_gradients_are_those_of_one_process(cluster_of: Clusters, form: str, ranks: int) -> None:
    check(run(cluster_of, ranks, train_here, *FORMS[form], 4))


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_any_number_of_micro_batches(cluster_of: Clusters, micro_batches: int) -> None:
    for form in FORMS.values():
        check(cluster_of(2).run(train_here, *form, micro_batches, (8, 5)), (8, 5))


def backward_as_soon_as_it_can(ranks: int, micro_batches: int) -> list[list[Instruction]]:
    """A schedule of one's own: whole backward passes on the last rank, on the others in halves."""
    compute = []
    for rank in range(ranks):
        order = [Instruction("forward", i) for i in range(micro_batches)]
        backwards = range(micro_batches)
        if rank == ranks - 1:
            order += [Instruction("backward", i) for i in backwards]
        else:
            order += [Instruction("backward_input", i) for i in backwards]
            order += [Instruction("backward_weight", i) for i in reversed(backwards)]
        compute.append(order)
    return schedules.with_messages(compute)


def test_a_schedule_of_ones_own(cluster_of: Clusters) -> None:
    for ranks in (1, 3):
        schedule = backward_as_soon_as_it_can(ranks, 5)
        check(run(cluster_of, ranks, train_here, schedule, 1, None, (13, 5)), (13, 5))

    def refused() -> None:
        with pytest.raises(
            ValueError, match="inputs have 4 rows and the schedule 5 micro-batches; give at least"
        ):
            train_here(backward_as_soon_as_it_can(2, 5), 1, None, (4,))
        with pytest.raises(ValueError, match="the schedule is for 3 ranks and the group has 2"):
            train_here(backward_as_soon_as_it_can(3, 5), 1, None)
        with pytest.raises(ValueError, match="the schedule has 5 micro-batches and should have 4"):
            train_here(backward_as_soon_as_it_can(2, 5), 1, 4)

    cluster_of(2).run(refused)


@instead_of(Pipeline, "run")
def without_weights(run: Any, self: Pipeline, x: Tensor, y: Tensor, weight: Any = None, **more: Any) -> Any:
    """Micro-batches count alike, whatever their rows."""
    return run(self, x, y, lambda _: 1 / 4, **more)


@instead_of(ScheduleRun, "_leave")
def gradients_of_another(
    leave: Any,
    self: Any,
    kind: str,
    micro_batch: int,
    chunk: int,
    xs: list[Tensor],
    kept: Any = [],  # noqa: B006
) -> None:
    """Each gradient is that of the micro-batch before: as if messages were matched in another order."""
    if kind == "backward":
        (x,) = xs
        kept.append(x)
        xs = [kept[-2] if len(kept) > 1 and kept[-2].shape == x.shape else torch.zeros_like(x)]
    leave(self, kind, micro_batch, chunk, xs)


FAULTS = {
    "no tied sums": ("1f1b", patched(pipelines, "sum_tied", nothing)),
    "other copies": ("1f1b", patched(pipelines, "start_tied_equal", lambda *_: [0, 1])),
    "no weights": ("1f1b", without_weights),
    "another's gradients": ("1f1b", gradients_of_another),
    "no gradients of weights": ("zero_bubble", patched(SplitBackward, "weight_gradients", nothing)),
}


@pytest.mark.parametrize(("schedule", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(cluster_of: Clusters, schedule: str, fault: Fault) -> None:
    found = cluster_of(2).run(with_fault, fault, train_here, schedule, 1, 4, (5,))
    with pytest.raises(AssertionError, match=r"not close|Extra items"):
        check(found, (5,))


@on_ranks(2, schedule=["1f1b", "zero_bubble"])
def test_gradients_add_up_and_hooks_run(schedule: str) -> None:
    model = gpt(layers=6)
    stages = own_stages(model)
    tied = untie(model)
    pipeline = Pipeline(stages, schedule, 4, tied=[tied])
    calls: dict[str, int] = {}
    for name, parameter in stages[0].named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: calls.update({name: calls.get(name, 0) + 1})
        )
    batch = tokens(torch.Generator().manual_seed(0), 8)
    pipeline.step(*batch)
    once = [p.grad.clone() for p in stages[0].parameters() if p.grad is not None]
    pipeline.step(*batch)
    twice = [p.grad for p in stages[0].parameters() if p.grad is not None]
    assert all(torch.allclose(2 * a, b, rtol=1e-10) for a, b in zip(once, twice, strict=True))
    assert set(calls.values()) == {8}


def test_a_step_sends_what_the_formula_says(cluster_of: Clusters) -> None:
    def count(schedule: str, chunks: int) -> tuple[int, int]:
        pipeline = Pipeline(own_stages(gpt(layers=6), chunks, schedule), schedule, 4)
        batch = tokens(torch.Generator().manual_seed(0), 7)
        sent = []
        for _ in range(2):
            with comm.ledger() as ledger:
                pipeline.step(*batch)
            sent.append(ledger.bytes_sent)
        return sent[0], sent[1]

    whole = 7 * 8 * 8 * 8  # rows, tokens, width, bytes of a float64
    for schedule, chunks in FORMS.values():
        for ranks in (1, 2, 3):
            held_by = SCHEDULES[schedule].placement(ranks, chunks).ranks
            for rank, (first, second) in enumerate(run(cluster_of, ranks, count, schedule, chunks)):
                # Outputs and gradients that go to a neighbour stage on another rank.
                outputs, gradients = (
                    sum(here == rank != there for here, there in pairwise(order))
                    for order in (held_by, held_by[::-1])
                )
                loss = 8 * (ranks - 1) if rank == held_by[-1] else 0
                assert second == whole * (outputs + gradients) + loss
                # Of 7 rows in 4 parts there are parts of two sizes.
                assert first == second + 2 * 80 * outputs


def transposed() -> nn.Module:
    return Calls(nn.Linear(4, 4), lambda inner, x: inner(x).transpose(1, 2))


STAGES: dict[str, Callable[[], list[nn.Module]]] = {
    "in place": lambda: [
        nn.Linear(4, 4),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
        Calls(nn.Identity(), lambda _, x: x.mul_(2)),  # which does not say so
    ],
    "nothing": lambda: [nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)],
    # Outputs lie in memory in another order.
    "another order": lambda: [transposed(), transposed(), nn.Linear(4, 4)],
}


@on_ranks(3, kind=[*STAGES], schedule=["1f1b", "zero_bubble", "layer by layer"])
def test_a_stage_may_be_anything(kind: str, schedule: str) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*STAGES[kind]()).double()
    x, t = torch.randn(5, 4, 4, dtype=torch.float64), torch.arange(20).view(5, 4) % 4
    expected = torch.autograd.grad(cross_entropy(whole(x), t), [*whole.parameters()])
    stage = whole[md.rank()]
    pipeline = md.LayerByLayer(stage) if schedule == "layer by layer" else Pipeline(stage, schedule, 3)
    pipeline.step(x, t)
    wanted = dict(zip(whole.parameters(), expected, strict=True))
    gradients = [p.grad for p in stage.parameters()]
    torch.testing.assert_close(gradients, [wanted[p] for p in stage.parameters()], **EXACT)


def test_ranks_that_are_given_different_batches_do_not_wait_for_ever() -> None:
    def step() -> None:
        rows = 8 - 3 * md.rank()
        Pipeline(nn.Linear(2, 2), "1f1b", 4).step(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64))

    late = pytest.raises((md.RankError, md.RankTimeout), match=r"time limit|had not returned within 1 s")
    with md.Cluster(2, timeout=1) as cluster, late:
        cluster.run(step)


def test_wrong_stages_are_told(cluster_of: Clusters) -> None:
    class Growing(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.new_zeros(len(x), self.calls)

    def step(stage: nn.Module) -> None:
        Pipeline(stage, "gpipe", 2).step(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))

    run = cluster_of(2).run
    with pytest.raises(md.RankError, match="stage 0 gave a tuple; between stages goes one floating-point"):
        run(step, Calls(nn.Identity(), lambda _, x: (x, "a mask")))
    with pytest.raises(
        md.RankError, match=r"stage 0 gave float32\[2x2\] for micro-batch 1 and float32\[2x1\]"
    ):
        run(step, Growing())
    with pytest.raises(md.RankError, match=r"a stage gave int64\[2x2\]; between stages goes one floating"):
        run(step, Calls(nn.Identity(), lambda _, x: x.long()))
