"""The rungs that share rows: equal to one process, bytes as their formulas say, and the point of each."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import minidist as md
from minidist import comm
from minidist.plain import one_process
from minidist.plain.gpt import Batch, MakeOptimizer, gpt, loss_of
from tests.conftest import Clusters
from tests.helpers.clocks import HANG
from tests.helpers.on_ranks import on_ranks
from tests.helpers.plain_rungs import (
    ADAMW,
    ROWS,
    STEPS,
    Parameters,
    Trained,
    assert_equal,
    draw_batches,
    module_of,
    parameters_of,
    small,
    train,
)


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The engine's Muon in the rung's groups; 64 is the vocabulary's size."""
    hidden: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for p in parameters:
        hidden[p.dim() == 2 and 64 not in p.shape].append(p)
    groups = [{"params": hidden[True]}, {"params": hidden[False], "elementwise": True, "lr": 1e-2}]
    return md.Muon(groups, lr=0.02)


ADAM = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
SGD = partial(torch.optim.SGD, lr=0.1)
DILOCO: dict[str, Any] = {"k": 2, "make_outer": module_of("local_sgd").DILOCO}
SHARDED = ("data parallel", "ZeRO 1", "ZeRO 2", "ZeRO 3")
SAME: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {}),
    ("buckets", {}),
    ("overlap", {}),
    *(("sharded", {"row": row}) for row in SHARDED),
]


@functools.cache
def trained_on(cluster: md.Cluster, rung: str, steps: int = STEPS, **options: Any) -> list[Trained]:
    """Train on all ranks. Tests that look at the same training share it."""
    return cluster.run(train, rung, options, draw_batches(steps))


@functools.cache
def one_process_on(
    steps: int = STEPS, rows: int = ROWS, make: MakeOptimizer = ADAMW
) -> tuple[list[float], Parameters]:
    model = small()
    return one_process.train(model, draw_batches(steps, rows), make), parameters_of(model)


def compare(found: list[Trained], losses: list[float], parameters: Parameters) -> None:
    for one in found:
        assert_equal(one, losses, parameters)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("rung", "options"), SAME)
def test_it_equals_one_process(cluster_of: Clusters, ranks: int, rung: str, options: dict[str, Any]) -> None:
    compare(trained_on(cluster_of(ranks), rung, **options), *one_process_on())


@pytest.mark.parametrize("ranks", [2, 4])
def test_muon_equals_the_engines_in_one_process(cluster_of: Clusters, ranks: int) -> None:
    compare(cluster_of(ranks).run(train, "muon", {}, draw_batches(), ADAM), *one_process_on(make=muon))


def test_where_the_others_equal_one_process(cluster_of: Clusters) -> None:
    """A single worker is never stale. An average after every step of plain SGD averages the gradients."""
    compare(trained_on(cluster_of(2), "parameter_server"), *one_process_on())
    equal = draw_batches(rows=8)
    compare(cluster_of(4).run(train, "local_sgd", {"k": 1}, equal, SGD), *one_process_on(rows=8, make=SGD))


# Local SGD and the asynchronous server compute something else: what these simulations compute.


def local_sgd(
    ranks: int, k: int, batches: list[Batch], make_outer: MakeOptimizer | None = None
) -> tuple[list[float], Parameters]:
    models, anchor = [small() for _ in range(ranks)], small()
    outer = (make_outer or partial(torch.optim.SGD, lr=1.0))(anchor.parameters())
    optimizers = [ADAMW(model.parameters()) for model in models]
    losses = [0.0] * len(batches)
    for step, (inputs, targets) in enumerate(batches):
        shares = zip(inputs.tensor_split(ranks), targets.tensor_split(ranks), strict=True)
        for model, optimizer, (x, y) in zip(models, optimizers, shares, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses[step] += loss.item() * len(x) / len(inputs)
        if (step + 1) % k == 0 or step + 1 == len(batches):
            for parameter, *each in zip(anchor.parameters(), *(m.parameters() for m in models), strict=True):
                parameter.grad = (parameter - sum(each) / ranks).detach()
            outer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return losses, parameters_of(models[0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [{"k": 2}, {"k": 3}, DILOCO])
def test_local_sgd_equals_its_simulation(cluster_of: Clusters, ranks: int, options: dict[str, Any]) -> None:
    """The average is an outer step of rate 1."""
    compare(
        trained_on(cluster_of(ranks), "local_sgd", **options),
        *local_sgd(ranks, batches=draw_batches(), **options),
    )


def train_and_record(
    batches: list[Batch], mistake: tuple[str, str] = ("", "")
) -> tuple[Trained, list[Tensor]]:
    """Train with a parameter server; the server also returns the pushed gradients, in order of arrival."""
    pushes: list[Tensor] = []

    class Recording(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            pushes.append(self.param_groups[0]["params"][0].grad.clone())
            super().step(closure)

    return train("parameter_server", {}, batches, partial(Recording, **ADAMW.keywords), mistake), pushes


def replay(workers: int, batches: list[Batch], pushes: list[Tensor]) -> tuple[list[float], Parameters]:
    """Simulate the server: each push is a worker's next gradient, at the parameters that it pulled last."""
    model, losses, step = small(), [0.0] * len(batches), [0] * workers
    x = nn.Parameter(parameters_to_vector(model.parameters()).detach())
    optimizer = ADAMW([x])

    def compute(worker: int) -> tuple[float, Tensor]:
        if step[worker] == len(batches):
            return 0.0, torch.zeros_like(x)
        inputs, targets = batches[step[worker]]
        share, y = (whole.tensor_split(workers)[worker] for whole in (inputs, targets))
        vector_to_parameters(x.detach().clone(), model.parameters())
        loss = loss_of(model(share), y)
        gradient = torch.autograd.grad(loss, [*model.parameters()])
        return loss.item() * len(share) / len(inputs), parameters_to_vector(gradient)

    computed = [compute(worker) for worker in range(workers)]
    for push in pushes:
        worker = min(range(workers), key=lambda worker: float((computed[worker][1] - push).abs().max()))
        loss, x.grad = computed[worker]
        torch.testing.assert_close(push, x.grad, rtol=1e-10, atol=1e-10)
        losses[step[worker]] += loss
        optimizer.step()
        step[worker] += 1
        computed[worker] = compute(worker)
    assert step == [len(batches)] * workers
    vector_to_parameters(x.detach(), model.parameters())
    return losses, parameters_of(model)


def test_the_parameter_server_equals_its_simulation(cluster_of: Clusters) -> None:
    batches = draw_batches()
    (server, pushes), *workers = cluster_of(4).run(train_and_record, batches)
    compare([server, *(worker for worker, _ in workers)], *replay(3, batches, pushes))


@pytest.mark.parametrize(
    ("old", "new"), [("ThreadPoolExecutor(comm.size())", "ThreadPoolExecutor(1)"), ("", "")]
)
def test_no_worker_waits_for_a_slow_one(cluster_of: Clusters, tmp_path: Path, old: str, new: str) -> None:
    """Rank 1 begins its first step when rank 2 has pulled its last parameters. Planted: a single thread."""

    def wait_or_tell() -> bool:
        batches, there = draw_batches(), tmp_path / "rank 2 is done"
        came = True

        class Batches(list):  # type: ignore[type-arg]
            def __iter__(self) -> Any:
                nonlocal came
                limit = time.monotonic() + (0.5 if old else HANG)
                while comm.rank() == 1 and not there.exists() and came:
                    time.sleep(0.01)
                    came = time.monotonic() < limit
                yield from super().__iter__()
                if comm.rank() == 2:
                    there.touch()

        train("parameter_server", {}, Batches(batches), mistake=(old, new))
        return came

    assert cluster_of(4).run(wait_or_tell)[1] is not bool(old)


# Those that minidist.plain.mistakes has not: ranks as processes show them, too.
MISTAKES: list[tuple[str, dict[str, Any], str, str]] = [
    ("muon", {}, "comm.reduce_scatter(gradients)[0]", "gradients[comm.rank()]"),
    ("muon", {}, "comm.all_gather(update[None])", "update.expand(comm.size(), -1, -1)"),
    ("muon", {}, "x if rows <= columns else x.T", "x.reshape(rows, columns)"),
    ("muon", {}, "range(0, len(same), n)", "range(0, len(same) - n, n)"),  # a deal that skips matrices
    ("overlap", {}, "self.missing = self.count\n", "pass\n"),
    ("overlap", {}, "async_op=True", '"mean", async_op=True'),
    ("sharded", {"row": "data parallel"}, "comm.all_reduce(gradient)", "gradient"),
    ("sharded", {"row": "ZeRO 3"}, "own.clone()", "own.clone() * 2"),
    ("sharded", {"row": "ZeRO 3"}, "same_weights(model)", "pass"),
    ("parameter_server", {}, "newest = x.detach().clone()", "newest = torch.zeros_like(x)"),
    ("local_sgd", {"k": 3}, " or step == len(batches)", ""),
    ("local_sgd", {"k": 2}, '"mean"', '"max"'),
    ("local_sgd", DILOCO, "outer.step()", "pass"),
    ("local_sgd", DILOCO, "nn.Parameter(x.clone())", "nn.Parameter(x)"),
]


@pytest.mark.parametrize(("rung", "options", "old", "new"), MISTAKES)
def test_a_planted_mistake_is_caught(
    cluster_of: Clusters, rung: str, options: dict[str, Any], old: str, new: str
) -> None:
    """The ranks' inputs are those on which the right rung equals what is expected, above."""
    batches = draw_batches(4 if rung == "local_sgd" else 2)
    expected = local_sgd(2, batches=batches, **options) if rung == "local_sgd" else one_process_on(steps=2)
    if rung == "muon":
        expected = one_process_on(steps=2, make=muon)
    make = ADAM if rung == "muon" else ADAMW
    wrong = cluster_of(2).run(train, rung, options, batches, make, (old, new))
    with pytest.raises(AssertionError, match="not close"):
        compare(wrong, *expected)


# Bytes, as the docstrings give them.


def evaluate(formula: str, **values: int) -> float:
    """Evaluate "2 (n - 1) / n S"."""
    return float(eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula), values))


FORMULAS = [
    *((rung, options, "2 (n - 1) / n S") for rung, options in SAME[:-1]),
    ("sharded", {"row": "ZeRO 3"}, "3 (n - 1) / n S"),
    *(("local_sgd", options, "2 (n - 1) / n S / k") for options in ({"k": 2}, DILOCO)),
]


def sent_in_a_step(cluster: md.Cluster, rung: str, options: dict[str, Any]) -> list[float]:
    """Bytes that each rank sends in a step beyond what it sends once. Local SGD: k divides the steps."""
    k = options.get("k", 1)
    few, many = trained_on(cluster, rung, k, **options), trained_on(cluster, rung, **options)
    without_losses = [[sum(sent for _, sent in one.calls[:-1]) for one in ranks] for ranks in (few, many)]
    return [(y - x) / (STEPS - k) for x, y in zip(*without_losses, strict=True)]


@pytest.mark.parametrize(("rung", "options", "formula"), FORMULAS)
def test_bytes_are_those_of_the_formula(
    cluster_of: Clusters, rung: str, options: dict[str, Any], formula: str
) -> None:
    ranks = 4
    assert formula in (module_of(rung).__doc__ or "")
    size = sum(8 * -(-sum(p.numel() for p in layer.parameters()) // ranks) * ranks for layer in small())
    expected = evaluate(formula, n=ranks, S=size, **{k: v for k, v in options.items() if k == "k"})
    assert sent_in_a_step(cluster_of(ranks), rung, options) == [expected] * ranks


def test_bytes_of_muon(cluster_of: Clusters) -> None:
    assert "2 (n - 1) / n S bytes" in (module_of("muon").__doc__ or "")
    size = 8 * sum(p.numel() for p in small().parameters())
    assert sent_in_a_step(cluster_of(2), "muon", {}) == [size] * 2  # of each shape there are an even number
    size += 8 * 2 * 2 * 128 * 32  # of two shapes 2 matrices, where 4 ranks share
    assert sent_in_a_step(cluster_of(4), "muon", {}) == [2 * 3 / 4 * size] * 4


def test_bytes_of_the_parameter_server(cluster_of: Clusters) -> None:
    assert "worker sends S bytes, and the server (n - 1) S" in (module_of("parameter_server").__doc__ or "")
    size = sum(8 * p.numel() for p in small().parameters())
    assert sent_in_a_step(cluster_of(4), "parameter_server", {}) == [3 * size, size, size, size]


# The point of each rung.


def test_buckets_send_fewer_messages(cluster_of: Clusters) -> None:
    def count(rung: str) -> int:
        with comm.ledger() as ledger:
            module_of(rung).train(gpt(), draw_batches(1), ADAMW)
        return [call.name for call in ledger.calls[:-1]].count("all_reduce")

    def messages(rung: str) -> int:
        return cluster_of(2).run(count, rung)[0]

    few, many = messages("buckets"), messages("data_parallel")
    assert (few, many) == (7, 69)
    assert f"{few} instead of {many}" in (module_of("buckets").__doc__ or "")


@on_ranks(2, row=[("buckets", 0), ("overlap", 6)])
def test_overlap_sends_while_backward_runs(row: tuple[str, int]) -> None:
    """Before the backward pass computes its last gradient, all buckets but the one that it is in are sent."""
    (rung, begun), model, seen = row, gpt().double(), list[int]()

    def look(gradient: Tensor) -> None:
        seen.append([call.name for call in ledger.calls].count("all_reduce"))

    model[0].weight.register_hook(look)  # type: ignore[union-attr, operator]
    with comm.ledger() as ledger:
        module_of(rung).train(model, draw_batches(1), ADAMW)
    assert seen == [begun]


@pytest.mark.parametrize(
    ("row", "held"),
    [("data parallel", "4 S"), ("ZeRO 1", "2 S + 2 S / n"), ("ZeRO 2", "S + 3 S / n"), ("ZeRO 3", "4 S / n")],
)
def test_a_rank_holds_what_its_row_says(cluster_of: Clusters, row: str, held: str) -> None:
    """Measured when the last gradient of the second backward pass arrives, that of the embedding."""

    def bytes_held() -> int:
        model, seen, optimizers = small(), [], []

        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizers.append(ADAMW(parameters))
            return optimizers[0]

        def look(p: Tensor) -> None:
            own = [p for group in optimizers[0].param_groups for p in group["params"]]
            state = [v for values in optimizers[0].state.values() for v in values.values() if v.dim()]
            values = [*model.parameters(), *own]
            tensors = [*values, *state, *(p.grad for p in values if p.grad is not None)]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            seen.append(sum(storages.values()))

        model[0].weight.register_post_accumulate_grad_hook(look)  # type: ignore[union-attr, operator]
        module_of("sharded").train(model, draw_batches(2), make, row=row)
        return seen[1]

    assert re.search(rf"{row} .* {re.escape(held)} ", module_of("sharded").__doc__ or "")
    ranks = 4
    size, embedding = (sum(8 * p.numel() for p in part.parameters()) for part in (small(), small()[0]))
    # The embedding is not reduced yet: its gradient is whole, and in ZeRO 3 so are its parameters.
    extra = {"ZeRO 2": embedding - embedding // ranks, "ZeRO 3": 2 * embedding - embedding // ranks}
    expected = evaluate(held, n=ranks, S=size) + extra.get(row, 0)
    assert cluster_of(ranks).run(bytes_held) == [expected] * ranks
