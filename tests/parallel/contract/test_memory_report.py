"""engine.memory(): every storage of a rank once, whatever the tensors in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import MLP
from minidist.parallel.contract.memory_report import Memory, ResidentTensors, Storages, memory_of, size
from minidist.parallel.sharding.sharded import Sharded
from tests.conftest import Clusters
from tests.helpers.contract import Fault, instead_of, patched, with_fault

ADAM = partial(torch.optim.Adam, lr=1e-3)
SGD = partial(torch.optim.SGD, lr=0.1)


def held(**parts: list[Tensor]) -> ResidentTensors:
    return ResidentTensors(**{"parameters": [], "gradients": [], "optimizer": [], "buffers": [], **parts})


def numbers(memory: Memory) -> list[int]:
    return [memory.parameters, memory.gradients, memory.optimizer, memory.buffers]


def test_what_serves_two_purposes_counts_for_the_first() -> None:
    flat = torch.zeros(8)
    found = memory_of(held(parameters=[flat[:4]], optimizer=[flat[4:], torch.zeros(2)]), activations=7)
    assert numbers(found) == [32, 0, 8, 0]
    assert (found.total, found.states) == (47, 40)


def test_tensors_that_share_memory_in_part() -> None:
    memory = bytearray(100)
    first = torch.frombuffer(memory, dtype=torch.uint8, count=60)
    second = torch.frombuffer(memory, dtype=torch.uint8, count=60, offset=40)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert Storages().add([first, second]) == 100
    assert Storages().add([second, first, first]) == 100


def test_empty_freed_and_meta_tensors() -> None:
    freed = torch.zeros(10)
    freed.untyped_storage().resize_(0)
    assert Storages().add([freed, torch.zeros(0), torch.zeros(())]) == 4
    meta = torch.zeros(10, device="meta")
    assert Storages().add([meta, meta[1:], torch.zeros(3, device="meta")]) == 52


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (17_543_680, "17.5 MB"),
        (999_600, "1.00 MB"),
        (3 * 10**15, "3000 TB"),
    ],
)
def test_sizes_have_three_digits(bytes_: int, text: str) -> None:
    assert size(bytes_) == text


def test_it_prints_as_a_table() -> None:
    lines = str(Memory(4000, 4000, 8000, 0, 0)).splitlines()
    assert lines[0] == "parameters    4.00 kB  25.0%"
    assert lines[-1] == "total         16.0 kB 100.0%"
    assert len({len(line) for line in lines}) == 1
    assert "0.0%" in str(Memory(0, 0, 0, 0, 0))


class Parts(nn.Module):
    """Two layers with one weight, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(self.frozen(x)))) * self.scale


def trained(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = ADAM) -> md.Engine:
    engine = md.prepare(model, optimizer, md.Layout(dp=md.size()))
    engine.step(torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
    return engine


def test_an_engine_counts_what_its_rank_holds() -> None:
    model = Parts()
    before = md.prepare(model, ADAM).memory()
    assert [*numbers(before), before.activations] == [2 * 144, 0, 0, 24, 0]
    after = trained(model).memory()
    assert numbers(after) == [2 * 144, 144, 2 * 144 + 4, 24]  # 4: Adam's step
    assert after.activations > 0
    assert after.total == after.states + after.activations


def test_ranks_count_their_buckets(cluster_of: Clusters) -> None:
    for found in cluster_of(2).run(lambda: numbers(trained(Parts()).memory())):
        # At the end of the last bucket travel a count for each gradient, rows and loss.
        assert found == [2 * 144, 144 + 4 * (1 + 2), 2 * 144 + 4, 24]


def test_activations_are_those_of_the_last_step() -> None:
    model = MLP((6, 5, 3))
    engine = md.prepare(model, SGD)
    found = []
    for rows in (4, 8, 4):
        engine.step(torch.randn(rows, 6), torch.zeros(rows, dtype=torch.int64))
        found.append(engine.memory().activations)
    # For each row the first layer's output, of which the ReLU has the storage, and the log-softmax; the
    # inputs and targets are the caller's; then the loss's number of targets.
    assert found == [4 * rows * (5 + 3) + 4 for rows in (4, 8, 4)]


def test_a_step_that_fails_leaves_the_count_as_it_was() -> None:
    engine = md.prepare(MLP((6, 3)), SGD)
    with pytest.raises(ValueError, match="no rows"):
        engine.step(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    assert engine.memory().activations == 0


def test_tensors_in_lists_of_the_optimizers_state_count() -> None:
    """LBFGS keeps its history in lists."""
    engine = md.prepare(nn.Linear(50, 2), partial(torch.optim.LBFGS, lr=0.1, max_iter=3), md.Layout())
    inputs, targets = torch.randn(4, 50), torch.tensor([0, 1, 0, 1])
    for _ in range(2):
        engine.step(inputs, targets)
    (state,) = engine.optimizer.state.values()
    lists = [x for value in state.values() if isinstance(value, list) for x in value]
    in_lists = sum(x.nbytes for x in lists if isinstance(x, Tensor))
    assert in_lists >= 2 * 4 * 102
    direct = sum(x.nbytes for x in state.values() if isinstance(x, Tensor))
    assert engine.memory().optimizer == in_lists + direct


@instead_of(Sharded, "held")
def without_gradients(held: Any, self: Sharded) -> ResidentTensors:
    found = held(self)
    return ResidentTensors(found.parameters, [], found.optimizer, found.buffers)


FAULTS = {
    "each tensor counts": patched(
        Storages, "add", lambda _, own: sum(x.untyped_storage().nbytes() for x in own)
    ),
    "elements count": patched(Storages, "add", lambda _, own: sum({id(x): x.nbytes for x in own}.values())),
    "no gradients": without_gradients,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(cluster_of: Clusters, fault: Fault) -> None:
    for found in cluster_of(2).run(with_fault, fault, lambda: numbers(trained(Parts()).memory())):
        assert found != [2 * 144, 144 + 4 * (1 + 2), 2 * 144 + 4, 24]
